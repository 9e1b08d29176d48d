"""save_file of 1 GiB onto a disk."""

from __future__ import annotations

import filecmp
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import files
import numpy as np
import pytest
import safetensors.numpy
from compare import Comparison, race, release

import safeload.numpy

ROUNDS = files.LARGE_ROUNDS
PEER = "safetensors.numpy.save_file"


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a disk, with room."""
    folder = files.CACHE / "save"
    folder.mkdir(parents=True, exist_ok=True)
    kind = _filesystem(folder)
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"{folder} is on {kind}, not on a disk: set TMPDIR")
    if os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < 10 << 30:
        pytest.skip(f"{folder} has less than 10 GiB free")
    yield folder
    _empty(folder)
    folder.rmdir()


def _filesystem(path: Path) -> str:
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    inside = [(where, kind) for where, kind in mounts if path.resolve().is_relative_to(where)]
    return max(inside, key=lambda mount: len(mount[0]))[1]


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def tensors(nbytes: int) -> dict[str, np.ndarray]:
    """F16 tensors of 16 MiB, each with bytes of its own."""
    each = 16 << 20
    bits = np.random.default_rng(21).integers(0, 1 << 16, each // 2, np.uint16)
    return {
        f"model.layers.{i}.weight": np.roll(bits, i * 1001).view(np.float16).reshape(2048, -1)
        for i in range(nbytes // each)
    }


def test_save(folder: Path, table, report) -> None:
    data = tensors(1 << 30)

    def ours(path: Path) -> None:
        safeload.numpy.save_file(data, path)

    def ours_plain(path: Path) -> None:
        safeload.numpy.save_file(data, path, durable=False)

    def theirs_plain(path: Path) -> None:
        safetensors.numpy.save_file(data, path)

    def theirs_synced(path: Path) -> None:
        safetensors.numpy.save_file(data, path)
        files.sync(path)

    def limit_plain(path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for array in data.values():
            view = memoryview(array.reshape(-1).view(np.uint8))
            while view:
                view = view[os.write(descriptor, view) :]
        os.close(descriptor)

    def limit_synced(path: Path) -> None:
        limit_plain(path)
        files.sync(path)

    def side(name: str, save: Callable[[Path], None]) -> Callable[[], Path]:
        path = folder / f"{name}.safetensors"

        def run() -> Path:
            save(path)
            return path

        return run

    def check(ours: Path, theirs: Path) -> None:
        if not theirs.name.startswith("limit"):
            assert filecmp.cmp(ours, theirs, shallow=False)

    def prepare() -> None:
        """No file there, nothing left to be written back, page cache to be had (see `files.settle`)."""
        _empty(folder)
        os.sync()
        release()
        files.settle(int(1.1 * (1 << 30)))
        scratch = folder / "scratch"
        with scratch.open("wb", buffering=0) as file:
            # Odd pieces, so that the page cache takes its memory in small runs as well as large ones.
            for i, array in enumerate(data.values()):
                view = memoryview(array.reshape(-1).view(np.uint8))
                step = (1 << 20) + 4096 * i + 8
                for begin in range(0, len(view), step):
                    file.write(view[begin : begin + step])
        scratch.unlink()

    functions = (ours, ours_plain, theirs_plain, theirs_synced, limit_plain, limit_synced)
    sides = {function.__name__: side(function.__name__, function) for function in functions}
    samples = race(sides, ROUNDS, check=check, prepare=prepare)

    def row(job: str, ours: str, peer: str, theirs: str, target: float | None = None) -> dict:
        return table.add(job, peer, Comparison(samples[ours], samples[theirs]), target=target)

    durable, plain = "save_file 1 GiB", "save_file 1 GiB, durable=False"
    rows = [
        row(durable, "ours", f"{PEER}, fsync of file and folder", "theirs_synced", 1),
        row(durable, "ours", "limit: write(2) and fsync", "limit_synced"),
        row(plain, "ours_plain", PEER, "theirs_plain", 1.3),
        row(plain, "ours_plain", "limit: write(2)", "limit_plain"),
        row(f"{durable}, default against default", "ours", PEER, "theirs_plain"),
    ]
    report(sides["ours"], rows, rounds=1, prepare=prepare)


def test_save_tiny_tensors(folder: Path, table, report) -> None:
    data = {entry.name: np.full(entry.shape, k, np.float32) for k, entry in enumerate(files.small(100_000))}

    def side(name: str, save: Callable[[Path], None], durable: bool) -> Callable[[], Path]:
        path = folder / f"{name}.safetensors"

        def run() -> Path:
            save(path)
            if durable:
                files.sync(path)
            return path

        return run

    def check(ours: Path, theirs: Path) -> None:
        assert filecmp.cmp(ours, theirs, shallow=False)

    sides = {
        "ours": side("ours", lambda path: safeload.numpy.save_file(data, path), durable=False),
        "plain": side("plain", lambda path: safeload.numpy.save_file(data, path, durable=False), durable=False),
        "synced": side("synced", lambda path: safetensors.numpy.save_file(data, path), durable=True),
        "theirs": side("theirs", lambda path: safetensors.numpy.save_file(data, path), durable=False),
    }
    samples = race(sides, 9, check=check, prepare=release)
    job = "save_file 100,000 tiny tensors"
    rows = [
        table.add(job, f"{PEER}, fsync of file and folder", Comparison(samples["ours"], samples["synced"]), target=1),
        table.add(f"{job}, durable=False", PEER, Comparison(samples["plain"], samples["theirs"]), target=1),
    ]
    report(sides["ours"], rows, rounds=3)


_GROWTH = """
import sys
from pathlib import Path
sys.path.insert(0, {benches!r})
import numpy as np
from bench_save import tensors
from {module} import save_file
data = tensors(512 << 20)
save_file({{"x": np.zeros(3)}}, {path!r})  # what the first call imports
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here, see proc(5)
before = peak()
save_file(data, {path!r})
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
def test_save_takes_no_second_copy(folder: Path, table) -> None:
    """Growth of peak memory while 512 MiB are saved, each side in processes of its own."""

    def growth(module: str) -> float:
        code = _GROWTH.format(module=module, benches=str(Path(__file__).parent), path=str(folder / "x.safetensors"))
        # Not in the repository, where the source tree would be found first.
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=folder)
        return max(1.0, float(done.stdout))

    found = Comparison([growth("safeload.numpy") for _ in range(3)], [growth("safetensors.numpy") for _ in range(3)])
    table.add("save_file 512 MiB, growth of peak RSS", PEER, found, unit="B")
    assert statistics.median(found.ours) < 64 << 20
