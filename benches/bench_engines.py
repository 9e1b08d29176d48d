"""Folders for other engines: weights and folders against the engines' own tools, and the memory of a conversion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import files
import ml_dtypes
import numpy as np
import pytest
from bench_load import threads
from compare import Comparison, race, same_bytes

import safeload
from safeload.core import packing

SIDE = 4096  # of a bf16 matrix of 32 MiB, a usual weight: the slowest peer takes seconds for it
WEIGHT = "x.weight"
LAYERS = 4  # with the embedding, 1 GB

# A peer, and its codes and scales as arrays.
Peer = tuple[Callable[[], Any], Callable[[Any], list[np.ndarray]]]


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    values = np.random.default_rng(9).standard_normal(SIDE * SIDE, np.float32) * np.float32(0.02)
    return values.astype(ml_dtypes.bfloat16).reshape(SIDE, SIDE)


def _mlx(weight: np.ndarray, name: str) -> Peer:
    mx = pytest.importorskip("mlx.core", reason="mlx is absent")
    array = mx.array(weight.astype(np.float32)).astype(mx.bfloat16)
    mx.eval(array)
    bits = name.removeprefix("mlx")
    options = {"mode": bits[1:]} if bits.startswith("-") else {"group_size": 64, "bits": int(bits)}

    def quantize() -> Any:
        parts = mx.quantize(array, **options)
        mx.eval(parts)
        return parts

    return quantize, lambda parts: [np.array(part.view(mx.uint8)) for part in parts]


def _torch(weight: np.ndarray) -> Any:
    torch = pytest.importorskip("torch", reason="torch is absent")
    torch.set_num_threads(threads())
    return torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)


def _bytes(tensor: Any) -> np.ndarray:
    import torch

    return tensor.detach().contiguous().view(torch.uint8).numpy()


def _bitsandbytes(weight: np.ndarray, name: str) -> Peer:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is absent")
    tensor, kind = _torch(weight), name.removeprefix("bnb_")
    quantize = lambda: functional.quantize_4bit(tensor, blocksize=64, quant_type=kind)  # noqa: E731
    return quantize, lambda parts: [_bytes(parts[0]), _bytes(parts[1].absmax)]


def _fp8(weight: np.ndarray, name: str) -> Peer:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers is absent")
    tensor = _torch(weight)
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None)
    operation = module.Fp8Quantize(SimpleNamespace(quantization_config=config))
    return lambda: operation.convert({WEIGHT: tensor}), lambda parts: [_bytes(part) for part in parts.values()]


def _compressed(weight: np.ndarray, name: str) -> Peer:
    """What llm-compressor's `model_free_ptq` does with a weight, once it is in a module: observe and compress."""
    lifecycle = pytest.importorskip("llmcompressor.entrypoints.model_free.lifecycle", reason="llmcompressor is absent")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.utils import get_direct_state_dict

    scheme = preset_name_to_scheme(name.upper(), ["Linear"])
    module = lifecycle.initialize_quantized_linear(_torch(weight), scheme, "cpu")
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(type(module), scheme))

    def quantize() -> Any:
        lifecycle.calibrate_weight(module)
        return compressor.compress(get_direct_state_dict(module), scheme)

    def arrays(parts: Any) -> list[np.ndarray]:
        codes = parts["weight_packed" if "weight_packed" in parts else "weight"]
        return [_bytes(codes), _bytes(parts["weight_scale"])]

    return quantize, arrays


ROWS: dict[str, tuple[str, Callable[[np.ndarray, str], Peer]]] = {
    **dict.fromkeys(
        ("w4a16", "w4a16_asym", "w8a16", "w8a8", "fp8_dynamic", "fp8_block", "nvfp4a16", "mxfp4a16"),
        ("llm-compressor", _compressed),
    ),
    "deepseek_fp8": ("transformers", _fp8),
    **dict.fromkeys(
        ("mlx2", "mlx3", "mlx4", "mlx5", "mlx6", "mlx8", "mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8"), ("mlx", _mlx)
    ),
    **dict.fromkeys(("bnb_nf4", "bnb_fp4"), ("bitsandbytes", _bitsandbytes)),
}


@pytest.mark.parametrize("name", ROWS)
def test_formats_in_memory(matrix: np.ndarray, name: str, table, report) -> None:
    peer, make = ROWS[name]
    quantize, arrays = make(matrix, name)
    sides = {"ours": lambda: safeload.load_quantized({WEIGHT: matrix}, name, threads=threads()), peer: quantize}

    def check(ours: dict[str, Any], theirs: Any) -> None:
        parts = ours[WEIGHT].roles
        roles = [packing.CODES, packing.SCALE, packing.BIAS]
        expected = arrays(theirs)
        for role, part in zip(roles[: len(expected)], expected, strict=True):
            assert same_bytes(parts[role], part), role

    # Our result is fresh memory; mlx keeps the buffers that it has freed.
    samples = race(sides, 5, check=check, prepare=lambda: files.settle(64 << 20))
    row = table.add(f"32 MiB of bf16 to {name}", peer, Comparison(samples["ours"], samples[peer]), target=5)
    report(sides["ours"], [row], rounds=3)


def _model_free(source: Path, target: Path) -> None:
    tool = pytest.importorskip("llmcompressor", reason="llmcompressor is absent")
    _torch(np.zeros(2, ml_dtypes.bfloat16))  # sets the number of threads
    tool.model_free_ptq(str(source), str(target), scheme="W4A16", ignore=["re:.*embed_tokens"], device="cpu")


def _mlx_lm(source: Path, target: Path) -> None:
    """What ``mlx_lm.convert -q`` does, without the tokenizer."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is absent")
    model, config = utils.load_model(source, lazy=True)
    model, config = utils.quantize_model(model, config, 64, 4)
    utils.save_model(target, model, donate_model=True)
    utils.save_config(config, target / "config.json")


FOLDERS = {"w4a16": ("model_free_ptq", _model_free), "mlx4": ("mlx-lm", _mlx_lm)}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, tmp_path: Path, table, report) -> None:
    peer, convert = FOLDERS[name]
    folder = files.llama_folder(LAYERS)
    for shard in folder.glob("*.safetensors"):
        files.warm(shard)

    def ours() -> None:
        shutil.rmtree(tmp_path / "ours", ignore_errors=True)
        safeload.convert(folder, tmp_path / "ours", quantize=name, threads=threads())

    def theirs() -> None:
        shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
        convert(folder, tmp_path / "theirs")

    samples = race({"ours": ours, peer: theirs}, 2)
    _check_folders(tmp_path / "ours", tmp_path / "theirs")
    row = table.add(f"1 GB folder of bf16 to {name}", peer, Comparison(samples["ours"], samples[peer]), target=5)
    report(ours, [row], rounds=2)


def _check_folders(ours: Path, theirs: Path) -> None:
    """The same tensors, stored alike."""
    with safeload.open(ours, stored=True) as a, safeload.open(theirs, stored=True) as b:
        assert sorted(a) == sorted(b)
        for name in a:
            assert same_bytes(a[name], b[name]), name


FAMILIES = ("w4a16", "w8a8", "fp8_block", "nvfp4a16", "mxfp4a16", "deepseek_fp8", "mlx4", "bnb_nf4")

_GROWTH = """
import sys
import numpy
import safeload

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

ones = {"a.weight": numpy.ones((128, 128), "float32")}
safeload.convert(ones, sys.argv[3], quantize=sys.argv[2], only="*", overwrite=True)
before = peak()
safeload.convert(sys.argv[1], sys.argv[3], quantize=sys.argv[2], only="*.weight", ignore="*norm*", overwrite=True)
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak RSS is read from /proc")
@pytest.mark.parametrize("name", FAMILIES)
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
