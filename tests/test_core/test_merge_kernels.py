"""Products merged into matrices: the defined order of roundings, with equal bits on every tier and in any pieces."""

from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.inside import available_tiers, dtypes, jobs, lib, tier_name
from builders.random import rng
from builders.thorough import dealt

from safeload import SafeloadError

TIERS = pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
SHAPES = [(1, 1), (1, 31), (9, 32), (5, 33), (40, 100), (33, 513), (3, 20_000), (70, 2048), (5000, 1)]
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn]


def nearest(value):
    """The f32 nearest to a fraction, ties to even."""
    near = np.float32(float(value))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(candidates, key=lambda one: (abs(Fraction(float(one)) - value), int(one.view(np.uint32)) & 1))


def fused(a, b, c):
    return nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def defined(values, updates):
    """The definition of csrc/kernels/merge.h, in exact fractions."""
    out = values.copy()
    for left, right, scaling in updates:
        for r, c in np.ndindex(out.shape):
            total = np.float32(0)
            for k in range(left.shape[1]):
                total = fused(left[r, k], right[k, c], total)
            out[r, c] = fused(np.float32(scaling), total, out[r, c])
    return out


def merged(tier, values, updates, to, monkeypatch, threads=1, out=None):
    inside.tune(monkeypatch, tier=tier)
    out = np.full(values.shape, 7, to) if out is None else out
    source, target = dtypes.row_of(values.dtype), dtypes.row_of(np.dtype(to))
    merge = jobs.Updates(
        values.shape[1], [jobs.Update(left, jobs.panels_of(right), scaling) for left, right, scaling in updates]
    )
    little = jobs.native_order(values)
    place = None, little.ctypes.data, out.ctypes.data, values.nbytes, source.number, target.number, lib.SL_OP_MERGE
    batch = jobs.Batch([jobs.Job(*place, merge=merge)])
    batch.results([out])
    assert batch.run(threads=threads) == values.nbytes
    return out


def factors(rows, columns, rank, scaling=1.5):
    left, right = rng.standard_normal((rows, rank), np.float32), rng.standard_normal((rank, columns), np.float32)
    return left, right, scaling


@TIERS
def test_each_step_rounds_once(tier, monkeypatch):
    """Also where sums cancel, are halfway between floats, or subnormal."""
    values = rng.standard_normal((3, 35), np.float32)
    left, right, _ = factors(3, 35, 5)
    left[1], right[:, 3] = np.float32(1 + 2**-12), np.float32(1 - 2**-12)
    left[2] *= np.float32(1e-25)
    right[:, 7:14] *= np.float32(1e-19)
    values[2, 7:14] = np.float32(3e-44)
    values[:, 20:] = -2 * (left @ right)[:, 20:]
    several = [(left, right, 2.0), (left[:, :1].copy(), right[1:2].copy(), float(np.float32(0.1)))]
    found = merged(tier, values, several, np.float32, monkeypatch)
    assert np.array_equal(found.view(np.uint32), defined(values, several).view(np.uint32))


@pytest.mark.parametrize(
    ("shape", "dtype"), [*product(SHAPES, DTYPES), *dealt([(2, 400_000)], DTYPES)], ids=lambda part: str(part)[:40]
)
def test_bits_are_those_of_every_tier(shape, dtype, monkeypatch):
    values = rng.standard_normal(shape, np.float32).astype(dtype)
    updates = [factors(*shape, 9), factors(*shape, 1, -0.25)]
    truth, size = values.astype(np.float64), np.abs(values.astype(np.float64))
    for left, right, scaling in updates:
        truth += scaling * (left.astype(np.float64) @ right)
        size += abs(scaling) * (np.abs(left).astype(np.float64) @ np.abs(right))
    wide = {tier: merged(tier, values, updates, np.float32, monkeypatch) for tier in available_tiers()}
    assert (np.abs(wide[0] - truth) <= 8 * np.finfo(np.float32).eps * size).all()
    for tier, found in wide.items():
        assert np.array_equal(found, wide[0]), tier_name(tier)
        assert np.array_equal(merged(tier, values, updates, np.float32, monkeypatch, threads=3), found)
        for to in (np.float16, ml_dtypes.bfloat16):
            narrow = merged(tier, values, updates, to, monkeypatch)
            with np.errstate(over="ignore"):
                assert np.array_equal(narrow.view(np.uint16), found.astype(to).view(np.uint16))


@TIERS
def test_a_rank_of_thousands(tier, monkeypatch):
    values = np.zeros((9, 40), np.float32)
    update = factors(9, 40, 3000, 1.0)
    truth = update[0].astype(np.float64) @ update[1]
    found = merged(tier, values, [update], np.float32, monkeypatch)
    assert np.abs(found - truth).max() < 1e-3
    assert np.array_equal(found, merged(0, values, [update], np.float32, monkeypatch))


@TIERS
def test_in_place(tier, monkeypatch):
    values = rng.standard_normal((30, 700), np.float32)
    update = factors(30, 700, 4)
    expected = merged(tier, values, [update], np.float32, monkeypatch)
    assert merged(tier, values, [update], np.float32, monkeypatch, out=values) is values
    assert np.array_equal(values, expected)


@TIERS
def test_nan_and_infinity_stay(tier, monkeypatch):
    values = np.float32([[np.nan, np.inf, -np.inf, 1, 1]])
    left, right = np.float32([[1]]), np.float32([[1, 1, 1, np.nan, np.inf]])
    found = merged(tier, values, [(left, right, 1.0)], np.float32, monkeypatch)
    assert np.array_equal(found, np.float32([[np.nan, np.inf, -np.inf, np.nan, np.inf]]), equal_nan=True)


def test_panels():
    right = np.arange(2 * 35, dtype=np.float32).reshape(2, 35)
    panels = jobs.panels_of(right)
    assert panels.shape == (2, 2, 32)
    assert np.array_equal(panels.transpose(1, 0, 2).reshape(2, 64)[:, :35], right)
    assert not panels[1, :, 3:].any()


@pytest.mark.parametrize("to", [lib.SL_I8, lib.SL_F4, lib.SL_Q4_0, lib.SL_UNKNOWN])
def test_only_floats_of_whole_bytes_result(to):
    job = jobs.Job(None, 0, 0, 0, lib.SL_F32, to, lib.SL_OP_MERGE, merge=jobs.Updates(1, []))
    with pytest.raises(SafeloadError, match="no merging"):
        jobs.Batch([job]).run()


@TIERS
@pytest.mark.parametrize("shape", [(9, 33), (40, 1100)])
def test_two_products_are_multiplied(tier, shape, monkeypatch):
    """Between other products, with equal bits on every tier."""
    values = rng.standard_normal(shape, np.float32)
    pairs = [factors(*shape, rank, scaling)[:2] for rank, scaling in ((2, 1), (3, 1), (4, 1), (1, 1))]
    scalings, times = (0.5, 1.5, 1.0, -2.0), (False, True, False, False)
    updates = [
        jobs.Update(left, jobs.panels_of(right), scaling, last)
        for (left, right), scaling, last in zip(pairs, scalings, times, strict=True)
    ]

    def run(number):
        inside.tune(monkeypatch, tier=number)
        out, row = np.empty(shape, np.float32), dtypes.row_of(values.dtype).number
        place = None, values.ctypes.data, out.ctypes.data, values.nbytes, row, row, lib.SL_OP_MERGE
        batch = jobs.Batch([jobs.Job(*place, merge=jobs.Updates(shape[1], updates))])
        batch.results([out])
        batch.run(threads=2)
        return out

    wide = [scaling * (left.astype(np.float64) @ right) for (left, right), scaling in zip(pairs, scalings, strict=True)]
    np.testing.assert_allclose(run(tier), values + wide[0] + wide[1] * wide[2] + wide[3], rtol=0, atol=5e-5)
    assert np.array_equal(run(tier), run(lib.SL_TIER_SCALAR))


def test_a_product_without_a_second_is_refused():
    left, right, _ = factors(4, 5, 2)
    update = jobs.Update(left, jobs.panels_of(right), 1.0, True)
    values, row = np.zeros((4, 5), np.float32), dtypes.row_of(np.dtype(np.float32)).number
    place = None, values.ctypes.data, values.ctypes.data, values.nbytes, row, row, lib.SL_OP_MERGE
    for updates in ([update], [update, update]):
        batch = jobs.Batch([jobs.Job(*place, merge=jobs.Updates(5, updates))])
        batch.results([values])
        with pytest.raises(SafeloadError, match="no product to multiply"):
            batch.run(threads=1)
