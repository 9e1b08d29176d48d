"""How cost grows: load time with the size of a file, opening with the number of tensors. The pictures of report.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import files
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from bench_load import prepare
from compare import race, same_list

import safeload
import safeload.numpy

# MiB of BF16 in tensors of 8 MiB (the first file has one of 1 MiB).
SIZES = (1, 8, 64, 512, 2048)
COUNTS = (10, 100, 1000, 10_000, 100_000, 1_000_000)


@pytest.mark.parametrize("mib", SIZES)
def test_load_by_size(mib: int, table, benchmark) -> None:
    each = min(mib, 8)
    entries = [files.Entry(f"w{k}", "BF16", (each << 9, 1024)) for k in range(mib // each)]
    path = files.make(f"size-{mib}", entries, block=files.weights())
    if files.available_memory() < 8 * path.stat().st_size:
        pytest.skip("needs eight times as much memory")
    sides: dict[str, Callable[[], Any]] = {
        "safeload, mapped": lambda: safeload.numpy.load_file(path),
        "safeload, pread": lambda: safeload.numpy.load_file(path, backend="pread"),
        "safeload, as f32": lambda: safeload.numpy.load_file(path, dtype="float32"),
        "safetensors.numpy": lambda: safetensors.numpy.load_file(path),
        "safetensors.numpy, astype f32": lambda: {
            name: array.astype(np.float32) for name, array in safetensors.numpy.load_file(path).items()
        },
    }

    def check(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(array[..., ::7], theirs[name][..., ::7]) for name, array in ours.items())

    samples = race(sides, 15 if mib < 512 else 5, check=check, prepare=prepare(path, 2))
    for side, seconds in samples.items():
        table.point("load_by_size", side, path.stat().st_size, seconds)
    benchmark.pedantic(sides["safeload, mapped"], rounds=3)


def sparse(count: int) -> Path:
    """A safetensors file of ``count`` tensors of 4 KiB that takes the room of its header."""
    path = files.CACHE / f"sparse-{count}-v{files.VERSION}.safetensors"
    if not path.exists():
        entry = {"dtype": "F32", "shape": [32, 32]}
        width = len(str(count - 1))
        header = {f"w{k:0{width}}": {**entry, "data_offsets": [k << 12, k + 1 << 12]} for k in range(count)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        files.CACHE.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + (count << 12))
    return path


@pytest.mark.parametrize("count", COUNTS)
def test_open_by_tensors(count: int, table, benchmark) -> None:
    path = sparse(count)

    def ours() -> list[str]:
        with safeload.safe_open(path, framework="np") as file:
            return file.keys()

    def theirs() -> list[str]:
        with safetensors.safe_open(path, framework="np") as file:
            return list(file.keys())

    def all_views() -> list[str]:
        return list(safeload.numpy.load_file(path))

    sides = {
        "safeload, open and list": ours,
        "safetensors, open and list": theirs,
        "safeload, load_file": all_views,
    }
    if count <= 100_000:  # a million are 4 GB, which it copies
        sides["safetensors.numpy, load_file"] = lambda: list(safetensors.numpy.load_file(path))
    samples = race(sides, 15 if count < 100_000 else 3, check=same_list, number=10 if count <= 1000 else 1)
    for side, seconds in samples.items():
        table.point("open_by_tensors", side, count, seconds)
    benchmark.pedantic(ours, rounds=3)
