"""`Checkpoint.stream` against loading first: reading and the work on what is read, one after the other or at once."""

from __future__ import annotations

import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import files
import numpy as np
from compare import Comparison, race, release

import safeload

ROUNDS = files.LARGE_ROUNDS
AHEAD = 256 << 20
PEER = "load, then sum"

PEAK = """
import sys, safeload
def peak():  # ru_maxrss begins with the memory of the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
with safeload.open(sys.argv[1]) as checkpoint:
    smallest = min(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].nbytes)
    list(checkpoint.stream([smallest], dtype="float32"))  # what the thread and the core take at first
    before = peak()
    for _, array in checkpoint.stream(dtype="float32", ahead=int(sys.argv[2])):
        array.max()
    print(peak() - before)
"""


def _prepare(path: Path) -> None:
    if not files.cached(path):
        files.warm(path)
    release()
    files.settle(int(path.stat().st_size * 2.2))


def _sums(arrays: dict[str, np.ndarray]) -> list[float]:
    with np.errstate(all="ignore"):  # the bits are random
        return [float(array.sum()) for array in arrays.values()]


def _same(ours: list[float], theirs: Any) -> None:
    np.testing.assert_array_equal(ours, _sums(theirs) if isinstance(theirs, dict) else theirs)


def test_stream_and_sum(llama: Path, table, report) -> None:
    """The ceiling is what reading and summing at once could give: the time of both by that of the longer one."""
    job = "stream 2.5 GB of BF16 as F32, summing each tensor"

    def stream() -> list[float]:
        with safeload.open(llama) as checkpoint:
            return [_sums({name: array})[0] for name, array in checkpoint.stream(dtype="float32", ahead=AHEAD)]

    def load() -> dict[str, np.ndarray]:
        return safeload.load(llama, dtype="float32", backend="pread")

    arrays = load()
    summing = race({"sum": partial(_sums, arrays)}, ROUNDS)["sum"]
    del arrays
    sides = {"ours": stream, PEER: lambda: _sums(load()), "read": load}
    samples = race(sides, ROUNDS, check=_same, prepare=lambda: _prepare(llama))
    reading, adding = statistics.median(samples["read"]), statistics.median(summing)
    ceiling = (reading + adding) / max(reading, adding)
    print(f"reading takes {reading:.3f} s, summing {adding:.3f} s: the ceiling is {ceiling:.2f}")
    row = table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), target=round(0.9 * ceiling, 2))
    report(stream, [row], rounds=1, prepare=lambda: _prepare(llama))


def test_growth_of_memory(llama: Path, table, report) -> None:
    job = "stream 2.5 GB of BF16 as F32, growth of peak memory"
    with safeload.open(llama) as checkpoint:
        largest = 2 * max(info.nbytes for info in checkpoint.tensors.values())  # as F32

    def grown() -> int:
        command = [sys.executable, "-c", PEAK, str(llama), str(AHEAD)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    peaks = [float(grown()) for _ in range(3)]
    allowed = float(AHEAD + 2 * largest)  # the one in use, and one that may be larger than `ahead`
    row = table.add(job, "ahead + two tensors", Comparison(peaks, [allowed] * 3), at_most=1, unit="B")
    report(grown, [row], rounds=1)
