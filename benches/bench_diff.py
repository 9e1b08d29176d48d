"""Comparing two checkpoints: against the loop over numpy arrays that a user would write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import files
import ml_dtypes  # noqa: F401 - safetensors.numpy finds bfloat16 only so
import numpy as np
import pytest
import safetensors.numpy
from bench_load import threads
from compare import Comparison, race, release
from limits import shared

import safeload
import safeload.numpy

ROUNDS = files.LARGE_ROUNDS
LIMIT = "limit: reading both files through a buffer"


def prepare(*paths: Path) -> Callable[[], None]:
    def prepare() -> None:
        for path in paths:
            if not files.cached(path):
                files.warm(path)
        release()
        files.settle(2 * sum(path.stat().st_size for path in paths))

    return prepare


def read_both(*paths: Path) -> Callable[[], None]:
    """Reads all bytes of files, on as many threads as ours, into buffers that stay in the cache."""

    def run() -> None:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)

            def work(begin: int, end: int, descriptor: int = descriptor) -> None:
                buffer = memoryview(bytearray(512 << 10))
                for at in range(begin, end, len(buffer)):
                    os.preadv(descriptor, [buffer[: min(len(buffer), end - at)]], at)

            shared(work, path.stat().st_size, threads())()
            os.close(descriptor)

    return run


def equal(a: Path, b: Path) -> dict[str, bool]:
    """Whether each tensor is equal, bit for bit."""
    one, other = safetensors.numpy.load_file(a), safetensors.numpy.load_file(b)
    return {name: np.array_equal(x.view(np.uint8), other[name].view(np.uint8)) for name, x in one.items()}


def largest(a: Path, b: Path) -> dict[str, float]:
    """The largest absolute difference of each tensor."""
    one, other = safetensors.numpy.load_file(a), safetensors.numpy.load_file(b)
    return {name: float(np.abs(x.astype(np.float32) - other[name].astype(np.float32)).max()) for name, x in one.items()}


def same(ours: safeload.DiffReport, theirs: dict[str, bool] | dict[str, float] | None) -> None:
    if theirs is None:
        return
    assert ours.tensors.keys() == theirs.keys()
    for name, found in ours.tensors.items():
        wanted = theirs[name]
        if isinstance(wanted, bool):
            assert (found.unequal == 0) == wanted, name
        else:  # theirs is rounded to float32
            assert abs(found.max - wanted) <= 1e-6 * wanted, name


def measure(job: str, a: Path, b: Path, loop: Callable[[Path, Path], dict], rounds: int, table, report) -> None:
    peer = "safetensors.numpy, np.array_equal" if loop is equal else "safetensors.numpy, np.abs(x - y).max()"
    sides = {"ours": lambda: safeload.diff(a, b), peer: lambda: loop(a, b), LIMIT: read_both(a, b)}
    samples = race(sides, rounds, check=same, prepare=prepare(a, b))
    rows = [
        table.add(job, name, Comparison(samples["ours"], samples[name]), target=None if name == LIMIT else 1)
        for name in (peer, LIMIT)
    ]
    report(sides["ours"], rows, rounds=1, prepare=prepare(a, b))


@pytest.fixture(scope="module")
def large() -> tuple[Path, Path, Path]:
    """1 GB of BF16, a copy of it, and other values of the same shapes."""
    if files.available_memory() < 12 << 30:
        pytest.skip("needs 12 GiB of memory: the page cache, both results of the peer and its temporaries")
    entries = [files.Entry(f"w{k}", "BF16", (4096, 8192)) for k in range(15)]
    a = files.make("diff-1gb", entries, block=files.weights())
    other = np.frombuffer(files.weights(), np.uint16)[::-1].tobytes()
    b = files.make("diff-1gb-other", entries, block=other)
    copy = a.with_name(f"diff-1gb-copy-v{files.VERSION}.safetensors")
    if not copy.exists():
        shutil.copy(a, copy)
    return a, copy, b


def test_equal(large: tuple[Path, Path, Path], table, report) -> None:
    measure("diff: two equal files of 1 GB", large[0], large[1], equal, 5, table, report)


def test_unequal(large: tuple[Path, Path, Path], table, report) -> None:
    """All statistics of ours; of theirs one."""
    measure("diff: two files of 1 GB bf16, all values differ", large[0], large[2], largest, ROUNDS, table, report)


@pytest.fixture(scope="module")
def tiny(n100k: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """100,000 tensors of 8 values, a copy of them, and other values."""
    names = list(safeload.numpy.load_file(n100k))
    some = np.random.default_rng(24).standard_normal((len(names), 2, 4), np.float32)
    values = dict(zip(names, some, strict=True))
    folder = tmp_path_factory.mktemp("tiny")
    a, copy, b = (folder / name for name in ("a", "copy", "b"))
    safeload.numpy.save_file(values, a)
    shutil.copy(a, copy)
    safeload.numpy.save_file({name: array + np.float32(0.001) for name, array in values.items()}, b)
    return a, copy, b


def test_equal_tiny_tensors(tiny: tuple[Path, Path, Path], table, report) -> None:
    measure("diff: two equal files of 100,000 tiny tensors", tiny[0], tiny[1], equal, 5, table, report)


def test_unequal_tiny_tensors(tiny: tuple[Path, Path, Path], table, report) -> None:
    measure("diff: 100,000 tiny tensors, all values differ", tiny[0], tiny[2], largest, 5, table, report)


def test_across_dtypes(table, report) -> None:
    """Against the same tensors as float32, so that every value is compared."""
    entries = [files.Entry(f"w{k}", "BF16", (4096, 8192)) for k in range(6)]
    path = files.make("diff", entries, block=files.weights())
    other = path.with_name(f"diff-f32-v{files.VERSION}.safetensors")
    if not other.exists():
        safeload.convert(path, other, dtype="float32")

    def loop() -> dict[str, tuple[float, float, float]]:
        found = {}
        second = safetensors.numpy.load_file(other)
        for name, array in safetensors.numpy.load_file(path).items():
            x, y = array.astype(np.float64).ravel(), second[name].astype(np.float64).ravel()
            d = x - y
            found[name] = np.abs(d).max(), np.sqrt(np.mean(d * d)), (x @ y) / np.sqrt((x @ x) * (y @ y))
        return found

    def check(ours: safeload.DiffReport, theirs: dict[str, tuple[float, float, float]]) -> None:
        assert not ours.unequal
        assert ours.tensors.keys() == theirs.keys()
        assert all(worst == rms == 0 and abs(cosine - 1) < 1e-9 for worst, rms, cosine in theirs.values())

    sides = {"ours": lambda: safeload.diff(path, other), "numpy loop": loop}
    samples = race(sides, ROUNDS, check=check, prepare=prepare(path, other))
    row = table.add(
        "diff: 0.4 GB bf16 and its float32", "numpy loop", Comparison(samples["ours"], samples["numpy loop"]), target=1
    )
    report(sides["ours"], [row], rounds=1, prepare=prepare(path, other))
