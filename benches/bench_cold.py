"""Files that are not in the page cache: loading, past it and through it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import files
import pytest
import safetensors.numpy
from compare import Comparison, race, release, same_arrays

import safeload.numpy

ROUNDS = files.LARGE_ROUNDS
PEER = 'safetensors.numpy.load_file(backend="pread")'
PREAD, AUTO = 'ours, backend="pread"', 'ours, backend="auto"'

pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="the page cache cannot be dropped without posix_fadvise"
)


def drop(path: Path) -> None:
    """Removes a file from the page cache, and sees that it is gone."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not files.cached(path)


def prepare(path: Path, widening: float) -> Callable[[], None]:
    """The same state before every sample: the file on the disk alone, memory at hand for its pages and the result."""

    def prepare() -> None:
        release()
        files.settle(int(path.stat().st_size * 1.1 * widening))
        drop(path)

    return prepare


def direct_read(path: Path) -> float:
    """Seconds of the best of fio's direct reads of the whole file."""
    best = float("inf")
    for block, depth in (("1M", 8), ("4M", 4), ("16M", 4)):
        command = ["fio", "--name=read", f"--filename={path}", "--rw=read", "--readonly", "--direct=1"]
        command += ["--ioengine=libaio", f"--bs={block}", f"--iodepth={depth}", "--output-format=json"]
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        best = min(best, path.stat().st_size / json.loads(out[out.index("{") :])["jobs"][0]["read"]["bw_bytes"])
    return best


def test_load(llama: Path, table, report) -> None:
    sides = {
        "ours": lambda: safeload.numpy.load_file(llama, backend="direct"),
        PREAD: lambda: safeload.numpy.load_file(llama, backend="pread"),
        AUTO: lambda: safeload.numpy.load_file(llama, backend="auto"),
        PEER: lambda: safetensors.numpy.load_file(llama, backend="pread"),
    }
    before = prepare(llama, 1)
    samples = race(sides, ROUNDS, check=same_arrays, prepare=before)
    job = 'load_file 2.5 GB, page cache cold, backend="direct"'
    rows = [
        table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), target=2),
        table.add(job, PREAD, Comparison(samples["ours"], samples[PREAD]), target=1.3),
        table.add(job.replace("direct", "pread"), PEER, Comparison(samples[PREAD], samples[PEER])),
        *(
            table.add(job.replace("direct", "auto"), side, Comparison(samples[AUTO], samples[side]), target=0.95)
            for side in (PREAD, "ours")
        ),
    ]
    if shutil.which("fio"):
        limit = [direct_read(llama) for _ in range(3)]
        rows.append(
            table.add(job, "limit: fio's best direct read", Comparison(samples["ours"][:3], limit), target=0.65)
        )
    report(sides["ours"], rows, rounds=1, prepare=before)
