"""Files that are not in the page cache: loading, past it and through it, and from a file system that waits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import files
import numpy as np
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


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A folder of 256 MiB on a FUSE file system that waits 3 ms before each read of 128 KiB."""
    source, mountpoint = tmp_path / "source", tmp_path / "mounted"
    for folder in (source, mountpoint):
        folder.mkdir()
    values = np.random.default_rng(0).standard_normal(1 << 21, np.float32)
    safeload.numpy.save_file({f"t{k}": values for k in range(32)}, source / "model.safetensors")
    program = subprocess.Popen([sys.executable, Path(__file__).with_name("slow_files.py"), source, mountpoint, "0.003"])
    try:
        while not os.path.ismount(mountpoint):
            assert program.poll() is None
            time.sleep(0.05)
        yield mountpoint / "model.safetensors"
    finally:
        subprocess.run(["umount", mountpoint], check=False)
        program.wait()


@pytest.mark.skipif(
    find_spec("fuse") is None or not os.access("/dev/fuse", os.W_OK), reason="needs fusepy, libfuse 2 and /dev/fuse"
)
def test_slow_file_system(mounted: Path, table, report) -> None:
    def loaded(backend: str) -> dict[str, np.ndarray]:
        arrays = safeload.numpy.load_file(mounted, backend=backend)
        for array in arrays.values():
            array[::1024].sum()  # reads every page of a mapping
        return arrays

    sides = {
        f'ours, backend="{backend}"': lambda backend=backend: loaded(backend) for backend in ("auto", "mmap", "pread")
    }
    samples = race(sides, 5, check=same_arrays, prepare=release)  # FUSE forgets a file's pages when it is opened again
    auto, *others = sides
    job = 'load_file 256 MiB over FUSE, 3 ms a read, backend="auto"'
    rows = [table.add(job, side, Comparison(samples[auto], samples[side]), target=0.95) for side in others]
    report(sides[auto], rows, rounds=1, prepare=release)
