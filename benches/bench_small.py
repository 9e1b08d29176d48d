"""Small files: 64 bytes to 1 MiB in 1 to 300 tensors: loaded, opened, saved, in memory; both backends of both sides."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import files
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from compare import Comparison, race, same_arrays

import safeload
import safeload.numpy

PEER = "safetensors"
ROUNDS = 31

# Seconds of calls to a sample.
SAMPLE = 0.0015

# A cell fails if we are slower by more than this many seconds, and by more than 5 %.
WITHIN = 3e-6

# Number of tensors, and bytes of all of them.
GRID = [
    (1, 64),
    (1, 4 << 10),
    (1, 64 << 10),
    (1, 1 << 20),
    (10, 4 << 10),
    (10, 64 << 10),
    (10, 1 << 20),
    (100, 64 << 10),
    (100, 1 << 20),
    (300, 64 << 10),
    (300, 1 << 20),
]

Arrays = Mapping[str, np.ndarray]
Job = Callable[[ModuleType, Path, bytes], Arrays]


def _load_file(backend: str) -> Job:
    return lambda module, path, data: module.numpy.load_file(path, backend=backend)


def _one(backend: str) -> Job:
    def one(module: ModuleType, path: Path, data: bytes) -> Arrays:
        with module.safe_open(path, framework="np", backend=backend) as file:
            return {"model.layers.0.weight": file.get_tensor("model.layers.0.weight")}

    return one


def _each(backend: str) -> Job:
    def each(module: ModuleType, path: Path, data: bytes) -> Arrays:
        with module.safe_open(path, framework="np", backend=backend) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - theirs has no other iteration

    return each


JOBS: dict[str, Job] = {
    "load_file, mmap": _load_file("mmap"),
    "load_file, pread": _load_file("pread"),
    "safe_open and one tensor, mmap": _one("mmap"),
    "safe_open and one tensor, pread": _one("pread"),
    "safe_open and each tensor, mmap": _each("mmap"),
    "safe_open and each tensor, pread": _each("pread"),
    "load(bytes)": lambda module, path, data: module.numpy.load(data),
}


def _size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1024 else f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def _file(count: int, nbytes: int) -> Path:
    shape = (nbytes // count // 4,)
    entries = [files.Entry(f"model.layers.{k}.weight", "F32", shape) for k in range(count)]
    return files.make(f"small-{count}x{nbytes // count}", entries)


def _calls(side: Callable[[], Any]) -> int:
    side()
    started = time.perf_counter()
    for _ in range(3):
        side()
    return max(1, int(SAMPLE / ((time.perf_counter() - started) / 3)))


_cells: list[tuple[dict[str, Any], Comparison]] = []


@pytest.mark.parametrize(("count", "nbytes"), GRID)
@pytest.mark.parametrize("job", JOBS)
def test_cell(job: str, count: int, nbytes: int, table, report) -> None:
    path = _file(count, nbytes)
    data = path.read_bytes()
    sides = {
        "ours": lambda: JOBS[job](safeload, path, data),
        PEER: lambda: JOBS[job](safetensors, path, data),
    }
    number = _calls(sides[PEER])
    samples = race(sides, ROUNDS, check=same_arrays, number=number)
    comparison = Comparison(samples["ours"], samples[PEER])
    title = f"{job}, {count} x {_size(nbytes // count)}"
    row = table.add(title, PEER, comparison, target=1, within=WITHIN)
    _cells.append((row, comparison))
    report(sides["ours"], [row], rounds=3, number=number)


def _same_content(ours: bytes, theirs: bytes) -> None:
    assert ours == theirs


@pytest.mark.parametrize(("count", "nbytes"), GRID)
def test_save(count: int, nbytes: int, table, report) -> None:
    arrays = safeload.numpy.load_file(_file(count, nbytes), backend="pread")
    sides = {"ours": lambda: safeload.numpy.save(arrays), PEER: lambda: safetensors.numpy.save(arrays)}
    number = _calls(sides[PEER])
    samples = race(sides, ROUNDS, check=_same_content, number=number)
    title = f"save, {count} x {_size(nbytes // count)}"
    row = table.add(title, PEER, Comparison(samples["ours"], samples[PEER]), target=1, within=WITHIN)
    report(sides["ours"], [row], rounds=3, number=number)


@pytest.mark.parametrize(("count", "nbytes"), GRID)
def test_save_file(count: int, nbytes: int, table, report, tmp_path: Path) -> None:
    """Ours writes a new file and renames it; the peer writes into the old file, which a crash can leave incomplete."""
    arrays = safeload.numpy.load_file(_file(count, nbytes), backend="pread")
    content = safeload.numpy.save(arrays)

    def side(name: str, save: Callable[[Path], None]) -> Callable[[], bytes]:
        path = tmp_path / name

        def run() -> bytes:
            save(path)
            return content

        return run

    def rename(path: Path) -> None:
        temporary = f"{path}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(descriptor, content)
        os.close(descriptor)
        os.replace(temporary, path)

    limit = "limit: write a new file, rename it"
    sides = {
        "ours": side("ours", lambda path: safeload.numpy.save_file(arrays, path, durable=False)),
        PEER: side("theirs", lambda path: safetensors.numpy.save_file(arrays, path)),
        limit: side("limit", rename),
    }
    number = _calls(sides["ours"])
    samples = race(sides, ROUNDS, number=number)
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {content}
    title = f"save_file, durable=False, {count} x {_size(nbytes // count)}"
    rows = [table.add(title, peer, Comparison(samples["ours"], samples[peer])) for peer in (PEER, limit)]
    report(sides["ours"], rows, rounds=3, number=number)


def test_the_worst_cell(table, report) -> None:
    """A row for the README: the cell in which we are the slowest beside the peer."""
    if not _cells:
        pytest.skip("no cell was measured")
    row, comparison = min(_cells, key=lambda cell: cell[0]["ratio"])
    worst = table.add(f"the worst of {len(_cells)} cells: {row['job']}", PEER, comparison, target=1, within=WITHIN)
    report(lambda: statistics.median(comparison.ours), [worst], rounds=1)
