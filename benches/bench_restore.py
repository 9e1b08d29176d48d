"""Packed tensors of published checkpoints to their true weights: in memory, and a folder while it is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import files
import ml_dtypes
import nf4
import numpy as np
import pytest
from compare import Comparison, race, release, same_bytes
from limits import STORE, storer, stream

import safeload

ROUNDS = 5
# Two cores, as for the other rows in memory.
THREADS = min(2, os.cpu_count() or 1)
ROWS, COLUMNS = 8192, 11008
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# What a user would write for a format.
Peer = Callable[[dict[str, Any]], np.ndarray]


def _random(dtype: str, shape: tuple[int, ...], low: int = 0, high: int = 256) -> np.ndarray:
    block = np.random.default_rng(30).integers(low, high, 1 << 22).astype(np.uint8)
    raw = np.resize(block, int(np.prod(shape)) * np.dtype(dtype if dtype != "f8" else "u1").itemsize)
    return raw.view(ml_dtypes.float8_e4m3fn if dtype == "f8" else dtype).reshape(shape)


def _scales(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    values = np.random.default_rng(31).random(shape, np.float32) * np.float32(0.02) + np.float32(0.001)
    return values.astype(dtype)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    return np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1)


def _words(codes: np.ndarray) -> np.ndarray:
    return _nibbles(codes.view(np.uint8))


def fp8() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    tensors = {
        "w.weight": _random("f8", (ROWS, COLUMNS), 0, 126),
        "w.weight_scale_inv": _scales((ROWS // 128, COLUMNS // 128)),
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}

    def peer(t: dict[str, Any]) -> np.ndarray:
        return t["w.weight"].astype(np.float32) * t["w.weight_scale_inv"].repeat(128, 0).repeat(128, 1)

    return tensors, config, peer


def nvfp4() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    tensors = {
        "w.weight": _random("u1", (ROWS, COLUMNS // 2)),
        "w.weight_scale": _random("f8", (ROWS, COLUMNS // 16), 1, 126),
        "w.weight_scale_2": np.float32([0.001]),
    }
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}

    def peer(t: dict[str, Any]) -> np.ndarray:
        scale = t["w.weight_scale"].astype(np.float32) * t["w.weight_scale_2"]
        return E2M1[_nibbles(t["w.weight"])] * scale.repeat(16, 1)

    return tensors, config, peer


def mxfp4() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    tensors = {
        "w.weight_packed": _random("u1", (ROWS, COLUMNS // 2)),
        "w.weight_scale": _random("u1", (ROWS, COLUMNS // 32), 110, 130),
    }
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}

    def peer(t: dict[str, Any]) -> np.ndarray:
        scale = np.ldexp(np.float32(1), t["w.weight_scale"].astype(np.int32) - 127)
        return E2M1[_nibbles(t["w.weight_packed"])] * scale.repeat(32, 1)

    return tensors, config, peer


def int4() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    tensors = {
        "w.weight_packed": _random("i4", (ROWS, COLUMNS // 8)),
        "w.weight_scale": _scales((ROWS, COLUMNS // 128), ml_dtypes.bfloat16),
        "w.weight_zero_point": _random("i4", (ROWS // 8, COLUMNS // 128)),
        "w.weight_shape": np.array([ROWS, COLUMNS]),
    }
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
        }
    }

    def peer(t: dict[str, Any]) -> np.ndarray:
        zeros = _words(np.ascontiguousarray(t["w.weight_zero_point"].T)).T.astype(np.float32)
        codes = _words(t["w.weight_packed"]).astype(np.float32)
        return (codes - zeros.repeat(128, 1)) * t["w.weight_scale"].astype(np.float32).repeat(128, 1)

    return tensors, config, peer


def mlx4() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    tensors = {
        "w.weight": _random("u4", (ROWS, COLUMNS // 8)),
        "w.scales": _scales((ROWS, COLUMNS // 64), np.float16),
        "w.biases": _scales((ROWS, COLUMNS // 64), np.float16),
    }
    config = {"quantization": {"bits": 4, "group_size": 64, "mode": "affine"}}

    def peer(t: dict[str, Any]) -> np.ndarray:
        scale, bias = (t[f"w.{name}"].astype(np.float32).repeat(64, 1) for name in ("scales", "biases"))
        return _words(t["w.weight"]).astype(np.float32) * scale + bias

    return tensors, config, peer


def bitnet() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    codes = _random("u1", (ROWS // 4, COLUMNS))
    codes = codes & ~((codes & (codes >> 1) & 0x55) * np.uint8(3))  # no code is 3
    tensors = {"w.weight": codes, "w.weight_scale": _scales((1,), ml_dtypes.bfloat16)}
    config = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}

    def peer(t: dict[str, Any]) -> np.ndarray:
        planes = [(t["w.weight"] >> 2 * k & 3).astype(np.float32) - 1 for k in range(4)]
        return np.concatenate(planes) * t["w.weight_scale"].astype(np.float32)

    return tensors, config, peer


def _gptq(order: bool) -> tuple[dict[str, Any], dict[str, Any], Peer]:
    """With the arithmetic of AutoGPTQ's forward; ``order``: groups as desc_act has them."""
    groups = np.arange(COLUMNS, dtype=np.int32) // 128
    if order:
        groups = np.random.default_rng(32).permutation(groups)
    tensors = {
        "w.qweight": _random("i4", (COLUMNS // 8, ROWS)),
        "w.qzeros": _random("i4", (COLUMNS // 128, ROWS // 8)),
        "w.scales": _scales((COLUMNS // 128, ROWS), np.float16),
        "w.g_idx": groups,
    }
    said = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": order, "sym": False}
    shifts = np.arange(0, 32, 4, dtype=np.uint32)

    def peer(t: dict[str, Any]) -> np.ndarray:
        codes = (t["w.qweight"].view(np.uint32)[:, None] >> shifts[:, None] & 15).reshape(COLUMNS, ROWS)
        zeros = ((t["w.qzeros"].view(np.uint32)[..., None] >> shifts) + 1 & 15).reshape(-1, ROWS)
        own = t["w.g_idx"]
        values = (codes.astype(np.float32) - zeros.astype(np.float32)[own]) * t["w.scales"].astype(np.float32)[own]
        return np.ascontiguousarray(values.T)

    return tensors, {"quantization_config": said}, peer


def gptq() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    return _gptq(False)


def gptq_order() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    return _gptq(True)


def awq() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    """With the arithmetic of AutoAWQ's `dequantize_gemm`, transposed."""
    tensors = {
        "w.qweight": _random("i4", (COLUMNS, ROWS // 8)),
        "w.qzeros": _random("i4", (COLUMNS // 128, ROWS // 8)),
        "w.scales": _scales((COLUMNS // 128, ROWS), np.float16),
    }
    said = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    shifts = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32) * np.uint32(4)

    def unpacked(words: np.ndarray) -> np.ndarray:
        return (words.view(np.uint32)[..., None] >> shifts & 15).reshape(len(words), -1).astype(np.float32)

    def peer(t: dict[str, Any]) -> np.ndarray:
        scales = t["w.scales"].astype(np.float32).repeat(128, 0)
        return np.ascontiguousarray(((unpacked(t["w.qweight"]) - unpacked(t["w.qzeros"]).repeat(128, 0)) * scales).T)

    return tensors, {"quantization_config": said}, peer


def gpt_oss() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    experts, rows, columns = 6, 5760, 2880
    tensors = {
        "e.gate_up_proj_blocks": _random("u1", (experts, rows, columns // 32, 16)),
        "e.gate_up_proj_scales": _random("u1", (experts, rows, columns // 32), 110, 130),
    }
    config = {"quantization_config": {"quant_method": "mxfp4"}}

    def peer(t: dict[str, Any]) -> np.ndarray:
        scale = np.ldexp(np.float32(1), t["e.gate_up_proj_scales"].astype(np.int32) - 127)
        values = E2M1[_nibbles(t["e.gate_up_proj_blocks"])] * scale[..., None]
        return np.ascontiguousarray(values.reshape(experts, rows, columns).swapaxes(1, 2))

    return tensors, config, peer


def bitsandbytes(*, nested: bool) -> tuple[dict[str, Any], dict[str, Any], Peer]:
    name = "w.weight"
    return nf4.tensors(name, ROWS, COLUMNS, nested=nested), nf4.CONFIG, nf4.in_numpy(name, (ROWS, COLUMNS))


def sparse() -> tuple[dict[str, Any], dict[str, Any], Peer]:
    mask = _random("u1", (ROWS, COLUMNS // 8))
    counts = np.unpackbits(mask, axis=-1).sum(-1, dtype=np.int64)
    tensors = {
        "w.compressed": _random("u1", (2 * int(counts.sum()),), 1, 126).view(ml_dtypes.bfloat16),
        "w.bitmask": mask,
        "w.row_offsets": np.cumsum(counts) - counts,
        "w.shape": np.array([ROWS, COLUMNS]),
    }
    said = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}

    def peer(t: dict[str, Any]) -> np.ndarray:
        values = np.zeros((ROWS, COLUMNS), np.float32)
        values[np.unpackbits(t["w.bitmask"], axis=-1, bitorder="little").view(bool)] = t["w.compressed"]
        return values

    return tensors, {"quantization_config": said}, peer


# The part of the limit that DESIGN.md asks for, and how many times a user's own expression.
FAMILIES = {
    "fp8 128x128": (fp8, 0.8, 4),
    "nvfp4": (nvfp4, 0.65, 10),
    "mxfp4": (mxfp4, 0.65, 10),
    "int4 g128 asym": (int4, 0.65, 10),
    "mlx4 g64": (mlx4, 0.6, 10),
    "nf4 b64": (partial(bitsandbytes, nested=False), 0.6, 10),
    "nf4 b64, nested": (partial(bitsandbytes, nested=True), 0.6, 10),
    "ternary": (bitnet, 0.5, 10),
    "mxfp4 experts, transposed": (gpt_oss, 0.6, 10),
    "gptq4 g128": (gptq, 0.6, 10),
    "gptq4 g128, desc_act": (gptq_order, 0.6, 10),
    "awq4 g128": (awq, 0.6, 10),
    "sparse bf16": (sparse, 0.5, 10),
}


def write(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> Path:
    """A folder of one file; safeload.save_file writes the stored tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    safeload.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_memory(name: str, tmp_path: Path, table, report) -> None:
    make, part, times = FAMILIES[name]
    tensors, config, peer = make()
    opened = safeload.load(write(tmp_path / "model", tensors, config), backend="pread")
    (packed,) = (value for value in opened.values() if isinstance(value, safeload.QuantizedTensor))
    out = np.ones(packed.shape, np.float32)
    expression = "the numpy expression of the format"
    limit = "limit: memcpy of as many bytes"
    sides = {
        "ours": lambda: packed.dequantize(out=out, threads=THREADS),
        expression: lambda: peer(tensors),
        limit: stream(packed.nbytes + out.nbytes, THREADS),
        STORE: storer(np.ones(packed.size, np.float32), THREADS),
    }

    def check(ours: np.ndarray, theirs: np.ndarray | None) -> None:
        if theirs is not None and theirs.dtype == np.float32:
            assert np.array_equal(ours, theirs)

    samples = race(sides, ROUNDS, check=check, prepare=release)
    job = f"{name} to f32, {packed.size / 2**20:.0f} Mi elements in memory"
    rows = [
        table.add(job, expression, Comparison(samples["ours"], samples[expression]), target=times),
        table.add(job, limit, Comparison(samples["ours"], samples[limit]), target=part),
        table.add(job, STORE, Comparison(samples["ours"], samples[STORE])),
    ]
    report(sides["ours"], rows, rounds=3)


def _torch_fp8(tensors: dict[str, Any]) -> Any:
    import torch

    codes = torch.from_numpy(tensors["w.weight"].view(np.uint8)).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(tensors["w.weight_scale_inv"])
    return (codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)).numpy()


def test_fp8_against_torch(tmp_path: Path, table, report) -> None:
    pytest.importorskip("torch", reason="torch is absent")
    tensors, config, _ = fp8()
    packed = safeload.load(write(tmp_path / "model", tensors, config), backend="pread")["w.weight"]
    out = np.ones(packed.shape, np.float32)
    peer = "torch, w.float() * scales expanded"
    sides = {"ours": lambda: packed.dequantize(out=out, threads=THREADS), peer: lambda: _torch_fp8(tensors)}
    samples = race(sides, ROUNDS, check=lambda a, b: same_bytes(a, b), prepare=release)
    job = f"fp8 128x128 to f32, {packed.size / 2**20:.0f} Mi elements in memory"
    report(sides["ours"], [table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=4)], rounds=3)


@pytest.mark.parametrize("nested", [False, True], ids=["nf4 b64", "nf4 b64, nested"])
def test_nf4_against_bitsandbytes(nested: bool, tmp_path: Path, table, report) -> None:
    tensors, config, _ = bitsandbytes(nested=nested)
    theirs = nf4.by_its_library("w.weight", tensors, THREADS)
    if theirs is None:
        pytest.skip("bitsandbytes is absent")
    packed = safeload.load(write(tmp_path / "model", tensors, config), backend="pread")["w.weight"]
    out = np.ones(packed.shape, np.float32)
    peer = "bitsandbytes, dequantize_4bit"
    sides = {"ours": lambda: packed.dequantize(out=out, threads=THREADS), peer: theirs}
    samples = race(sides, ROUNDS, check=lambda a, b: same_bytes(a, b), prepare=release)
    label = "nf4 b64, nested" if nested else "nf4 b64"
    job = f"{label} to f32, {packed.size / 2**20:.0f} Mi elements in memory"
    report(sides["ours"], [table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=10)], rounds=3)


# ---- a folder ----


@pytest.fixture(scope="session")
def fp8_folder() -> Path:
    """A model of 3 GB."""
    return files.fp8_folder()


def by_hand(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    """What a user would write today, tensor by tensor. safetensors.numpy 0.8.0 does not read float8."""
    places = {}
    for shard in folder.glob("*.safetensors"):
        header, begin = files.header_of(shard)
        places |= dict.fromkeys(header, (np.memmap(shard, np.uint8, "r"), header, begin))

    def read(name: str) -> np.ndarray:
        data, header, begin = places[name]
        low, high = (begin + offset for offset in header[name]["data_offsets"])
        dtype = np.float32 if header[name]["dtype"] == "F32" else ml_dtypes.float8_e4m3fn
        return data[low:high].view(dtype).reshape(header[name]["shape"])

    result = {}
    for name in names:
        codes, scales = read(name), read(f"{name}_scale_inv")
        rows, columns = codes.shape
        result[name] = codes.astype(np.float32) * scales.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    return result


def _prepare(folder: Path) -> Callable[[], None]:
    def prepare() -> None:
        for shard in folder.glob("*.safetensors"):
            if not files.cached(shard):
                files.warm(shard)
        release()
        files.settle(2 << 30)

    return prepare


def test_a_folder_of_fp8_as_f32(fp8_folder: Path, table, report) -> None:
    if files.available_memory() < 20 << 30:
        pytest.skip("needs 20 GiB of memory")
    names = [f"model.layers.{layer}.mlp.{k}.weight" for layer in range(4) for k in range(3)]
    peer = "numpy.memmap, astype, times the scales"
    sides = {
        "ours": lambda: safeload.load(fp8_folder, names, dtype="float32"),
        peer: lambda: by_hand(fp8_folder, names),
    }

    def check(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            assert same_bytes(array, theirs[name]), name

    samples = race(sides, files.LARGE_ROUNDS, check=check, prepare=_prepare(fp8_folder))
    row = table.add("1 GB of an fp8 folder as f32", peer, Comparison(samples["ours"], samples[peer]), target=4)
    report(sides["ours"], [row], rounds=1, prepare=_prepare(fp8_folder))


_GROWTH = """
import sys
import safeload

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

loaded = safeload.load, safeload.load_quantized  # their modules
before = peak()
if sys.argv[2] == "f32":
    result = safeload.load(sys.argv[1], dtype="float32")
else:
    result = safeload.load_quantized(sys.argv[1], sys.argv[2])
print(peak() - before, sum(value.nbytes for value in result.values()))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak RSS is read from /proc")
@pytest.mark.parametrize("target", ["f32", "q8_0"])
def test_growth_of_memory(fp8_folder: Path, target: str, benchmark) -> None:
    if files.available_memory() < 16 << 30:
        pytest.skip("needs 16 GiB of memory")
    command = [sys.executable, "-I", "-c", _GROWTH, str(fp8_folder), target]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    growth, result = map(int, done.split())
    assert growth <= result + (256 << 20)
    benchmark.extra_info[f"growth of peak RSS, fp8 to {target}"] = {"growth": growth, "result": result}
    print(f"\n{target}: peak RSS grew by {growth / 2**20:.0f} MiB for a result of {result / 2**20:.0f} MiB")
    benchmark.pedantic(os.getpid, rounds=1)  # what is told is in extra_info


def test_a_folder_of_fp8_to_q8_0(fp8_folder: Path, table, report) -> None:
    if files.available_memory() < 16 << 30:
        pytest.skip("needs 16 GiB of memory")
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    peer = "numpy.memmap, astype, times the scales, gguf-py quantize"
    names = [f"model.layers.0.mlp.{k}.weight" for k in range(3)]
    few = fp8_folder.parent / f"fp8-few-v{files.VERSION}"
    if not few.exists():
        safeload.convert(fp8_folder, few, names=names, max_shard_size="5GB")
    sides = {
        "ours": lambda: safeload.load_quantized(few, "q8_0"),
        peer: lambda: {n: quantize(a, GGMLQuantizationType.Q8_0) for n, a in by_hand(few, names).items()},
    }

    def check(ours: dict[str, Any], theirs: dict[str, np.ndarray]) -> None:
        for name, value in ours.items():
            assert same_bytes(value.data, theirs[name]), name

    samples = race(sides, files.LARGE_ROUNDS, check=check, prepare=_prepare(few))
    row = table.add("fp8 folder of 250 MB to q8_0", peer, Comparison(samples["ours"], samples[peer]), target=10)
    report(sides["ours"], [row], rounds=1, prepare=_prepare(few))
