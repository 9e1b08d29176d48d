"""Quantization while loading, and int8 in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import files
import numpy as np
import pytest
import safetensors.numpy
from bench_load import threads
from compare import Comparison, prepared, race, same_bytes
from gguf import GGMLQuantizationType
from gguf.quants import quantize as gguf_quantize
from limits import TWO_PASSES, read_twice_and_store

import safeload
from safeload import QuantizedTensor

ROUNDS = files.LARGE_ROUNDS
KEPT = ("embed", "norm")


@pytest.fixture(scope="session")
def llama_folder() -> Path:
    """Llama-3.2-1B's shapes with values like weights, 2.47 GB in two shards."""
    folder = files.llama_folder()
    if files.available_memory() < 12 << 30:
        pytest.skip("needs 12 GiB of memory: the other side holds everything as float32")
    return folder


def by_hand(folder: Path) -> dict[str, np.ndarray]:
    """What a user would write today."""
    result = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, array in safetensors.numpy.load_file(shard).items():
            value = array.astype(np.float32)
            result[name] = value
            if array.ndim == 2 and not any(word in name for word in KEPT):
                result[name] = gguf_quantize(value, GGMLQuantizationType.Q4_0)
    head = result["model.embed_tokens.weight"]
    result["lm_head.weight"] = gguf_quantize(head, GGMLQuantizationType.Q4_0)
    return result


def same(ours: dict[str, Any], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert same_bytes(value.data if isinstance(value, QuantizedTensor) else value, theirs[name]), name


def test_a_folder_to_q4_0(llama_folder: Path, table, report) -> None:
    peer = "safetensors.numpy, astype, gguf-py quantize"
    sides = {
        "ours": lambda: safeload.load_quantized(llama_folder, "q4_0", rounding="ggml"),
        peer: lambda: by_hand(llama_folder),
    }
    samples = race(sides, ROUNDS, check=same, prepare=prepared(llama_folder, 2 << 30))
    row = table.add("2.5 GB bf16 folder to q4_0", peer, Comparison(samples["ours"], samples[peer]), target=10)
    report(sides["ours"], [row], rounds=1, prepare=prepared(llama_folder, 2 << 30))


def numpy_int8(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    absmax = np.abs(x).max()
    scaled = x * (np.float32(127) / absmax)
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return np.clip(rounded, -128, 127).astype(np.int8), absmax / np.float32(127)


@pytest.mark.parametrize("axis", [None, 0])
def test_int8_in_memory(axis: int | None, table, report) -> None:
    x = np.resize(np.random.default_rng(8).standard_normal(1 << 20, np.float32), (8192, 8192))

    def by_row() -> tuple[np.ndarray, np.ndarray]:
        absmax = np.abs(x).max(axis=1)
        scaled = x * (np.float32(127) / absmax)[:, None]
        rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
        return np.clip(rounded, -128, 127).astype(np.int8), absmax / np.float32(127)

    sides = {
        "ours": lambda: safeload.quantize(x, "int8", axis=axis),
        "numpy": (lambda: numpy_int8(x)) if axis is None else by_row,
        TWO_PASSES: read_twice_and_store(x, threads()),
    }

    def check(ours: QuantizedTensor, theirs: tuple[np.ndarray, Any] | None) -> None:
        if theirs is None:
            return
        assert np.count_nonzero(ours.data != theirs[0]) <= 2  # 0.5 is added, not the largest number below it
        assert np.array_equal(ours.scale, theirs[1])

    samples = race(sides, ROUNDS, check=check, prepare=lambda: files.settle(1 << 30))
    job = f"256 MiB of f32 to int8, axis={axis}"
    goals = {"numpy": 8, TWO_PASSES: 0.8}
    rows = [
        table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=goal) for peer, goal in goals.items()
    ]
    report(sides["ours"], rows, rounds=3)


_GROWTH = """
import sys
import safeload

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

before = peak()
result = safeload.load_quantized(sys.argv[1], sys.argv[2])
growth = peak() - before
quantized = [name for name, value in result.items() if isinstance(value, safeload.QuantizedTensor)]
print(growth, sum(value.nbytes for value in result.values()), len(quantized), len(result) - len(quantized))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak RSS is read from /proc")
@pytest.mark.parametrize("scheme", ["q4_0", "int8"])
def test_growth_of_memory(llama_folder: Path, scheme: str, table, benchmark) -> None:
    command = [sys.executable, "-I", "-c", _GROWTH, str(llama_folder), scheme]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    growth, result, quantized, kept = map(int, done.split())
    assert (quantized, kept) == (113, 34)  # 112 projections and the head; embed_tokens and 33 norms
    assert growth <= result + (256 << 20)
    benchmark.extra_info[f"growth of peak RSS, {scheme}"] = {"growth": growth, "result": result}
    print(f"\n{scheme}: peak RSS grew by {growth / 2**20:.0f} MiB for a result of {result / 2**20:.0f} MiB")
    benchmark.pedantic(os.getpid, rounds=1)  # what is told is in extra_info
