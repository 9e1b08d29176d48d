"""Statistics: against the numpy expressions a user would write, and against reading the same bytes once."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from bench_load import threads
from compare import Comparison, race
from limits import READ, reader

import safeload

ROUNDS = 7
NBYTES = 256 << 20  # eight times a large third-level cache


def weights(name: str) -> np.ndarray:
    """As weights are distributed; 16 MiB of them, again and again."""
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    some = (np.random.default_rng(8).standard_normal(4 << 20) * 0.02).astype(dtype)
    return np.resize(some, NBYTES // dtype.itemsize)


def numpy_stats(x: np.ndarray) -> tuple[float, ...]:
    """What a user would write; numpy's sums of 16-bit floats are of no use, hence float32."""
    if x.dtype.itemsize < 4:
        x = x.astype(np.float32)
    finite = x if np.isfinite(x).all() else x[np.isfinite(x)]
    low, high = float(finite.min()), float(finite.max())
    counts = float(np.isnan(x).sum()), float(np.isinf(x).sum()), float((x == 0).sum())
    return (
        low,
        high,
        max(high, -low),
        float(finite.mean(dtype=np.float64)),
        float(finite.std(dtype=np.float64)),
        *counts,
    )


def check(ours: safeload.TensorStats, theirs: tuple[float, ...] | None) -> None:
    if theirs is not None:
        exact = (ours.min, ours.max, ours.absmax, ours.nan, ours.inf, ours.zeros)
        assert exact == (*theirs[:3], *theirs[5:])
        assert math.isclose(ours.mean, theirs[3], abs_tol=1e-12 * ours.absmax)
        assert math.isclose(ours.std, theirs[4], rel_tol=1e-9)


@pytest.mark.parametrize(
    ("name", "limit"), [("float32", 0.8), ("bfloat16", 0.45), ("float16", 0.45), ("float64", None)]
)
def test_in_memory(name: str, limit: float | None, table, report) -> None:
    x = weights(name)
    sides = {"ours": lambda: safeload.stats(x), "numpy": lambda: numpy_stats(x), READ: reader(x, threads())}
    samples = race(sides, ROUNDS, check=check)
    job = f"stats of {name}, 256 MiB in memory"
    rows = [
        table.add(job, peer, Comparison(samples["ours"], samples[peer]), target=goal)
        for peer, goal in (("numpy", 10), (READ, limit))
    ]
    report(sides["ours"], rows, rounds=3)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_with_histogram(name: str, table, report) -> None:
    x = weights(name)

    def theirs() -> tuple[tuple[float, ...], np.ndarray]:
        y = x.astype(np.float32)
        bins = np.bincount(np.clip(np.frexp(np.abs(y[y != 0]))[1] + 47, 0, 63), minlength=64)
        return numpy_stats(x), bins

    def same(ours: safeload.TensorStats, other: tuple[tuple[float, ...], np.ndarray]) -> None:
        check(ours, other[0])
        assert np.array_equal(ours.histogram, other[1])

    sides = {"ours": lambda: safeload.stats(x, histogram=True), "numpy": theirs}
    samples = race(sides, 3, check=same)
    job = f"stats with a histogram of {name}, 256 MiB in memory"
    row = table.add(job, "numpy", Comparison(samples["ours"], samples["numpy"]), target=10)
    report(sides["ours"], [row], rounds=3)
