"""Folders for other engines: the formats against the engines' own tools, and the memory of a conversion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import files
import ml_dtypes
import numpy as np
import pytest
from bench_load import threads
from compare import Comparison, race, same_bytes

import safeload

SIDE = 8192  # of a bf16 matrix of 128 MiB
WEIGHT = "x.weight"


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    values = np.resize(np.random.default_rng(9).standard_normal(1 << 20, np.float32) * np.float32(0.02), SIDE * SIDE)
    return values.astype(ml_dtypes.bfloat16).reshape(SIDE, SIDE)


def _mlx(weight: np.ndarray, name: str) -> Callable[[], Any]:
    mx = pytest.importorskip("mlx.core", reason="mlx is absent")
    array = mx.array(weight.astype(np.float32)).astype(mx.bfloat16)
    mx.eval(array)
    mode = name.removeprefix("mlx-")
    if mode != name:
        return lambda: mx.eval(parts := mx.quantize(array, mode=mode)) or np.array(parts[0])
    return lambda: mx.eval(parts := mx.quantize(array, 64, int(name.removeprefix("mlx")))) or np.array(parts[0])


def _torch(weight: np.ndarray) -> Any:
    torch = pytest.importorskip("torch", reason="torch is absent")
    torch.set_num_threads(threads())
    return torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)


def _bitsandbytes(weight: np.ndarray, name: str) -> Callable[[], Any]:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is absent")
    tensor, kind = _torch(weight), name.removeprefix("bnb_")
    return lambda: functional.quantize_4bit(tensor, blocksize=64, quant_type=kind)[0].numpy()


def _compressed(weight: np.ndarray, name: str) -> Callable[[], Any]:
    """What compressed-tensors does with a weight: observe, quantize, pack."""
    package = "compressed_tensors.compressors.pack_quantized.helpers"
    pack = pytest.importorskip(package, reason="compressed-tensors is absent").pack_to_int32
    import torch

    tensor = _torch(weight)

    def quantize() -> Any:
        groups = tensor.reshape(SIDE, SIDE // 128, 128)
        least, most = torch.aminmax(groups, dim=-1)
        scale = torch.max(-least.clamp(max=0), most.clamp(min=0)) / 7.5
        codes = torch.round(torch.clamp(groups / scale[..., None], -8, 7)).to(torch.int8).reshape(SIDE, SIDE)
        return pack(codes, 4).numpy()

    return quantize


ROWS = {"w4a16": _compressed, "mlx4": _mlx, "mlx3": _mlx, "mlx-mxfp4": _mlx, "bnb_nf4": _bitsandbytes}


@pytest.mark.parametrize("name", ROWS)
def test_formats_in_memory(matrix: np.ndarray, name: str, table, report) -> None:
    peer = "the engine's tool"
    sides = {"ours": lambda: safeload.load_quantized({WEIGHT: matrix}, name), peer: ROWS[name](matrix, name)}

    def check(ours: dict[str, Any], theirs: np.ndarray) -> None:
        assert same_bytes(ours[WEIGHT].data.view(np.uint8), theirs.view(np.uint8))

    samples = race(sides, 5, check=check)
    row = table.add(f"128 MiB of bf16 to {name}", peer, Comparison(samples["ours"], samples[peer]), target=5)
    report(sides["ours"], [row], rounds=3)


FAMILIES = ("w4a16", "w8a8", "fp8_block", "nvfp4a16", "mxfp4a16", "deepseek_fp8", "mlx4", "bnb_nf4")
_GROWTH = """
import sys
import numpy
import safeload

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

ones = {"a.weight": numpy.ones((128, 128), "float32")}
safeload.convert(ones, sys.argv[3], quantize=sys.argv[2], only="*")
before = peak()
safeload.convert(sys.argv[1], sys.argv[3], quantize=sys.argv[2], only="*.weight", ignore="*norm*", overwrite=True)
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak RSS is read from /proc")
@pytest.mark.parametrize(
    "name", ["w4a16", "w8a8", "fp8_block", "nvfp4a16", "mxfp4a16", "deepseek_fp8", "mlx4", "bnb_nf4"]
)
def test_memory_of_a_folder(name: str, tmp_path: Path, table, report) -> None:
    folder = files.llama_folder()
    with safeload.open(folder) as checkpoint:
        largest = max(info.nbytes for info in checkpoint.tensors.values())
    command = [sys.executable, "-I", "-c", _GROWTH, str(folder), name, str(tmp_path / "out")]

    def growth() -> float:
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    comparison = Comparison([growth() for _ in range(2)], [float(largest + (64 << 20))] * 2)
    job = f"Llama 1B, a folder of 2.5 GB, to {name}, growth of peak memory"
    row = table.add(job, "limit: 64 MiB and the largest tensor", comparison, target=1, unit="B")
    report(growth, [row], rounds=1)
