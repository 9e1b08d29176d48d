"""Differences of two runs of numbers, against numpy's sums in higher precision, in every tier."""

import math

import numpy as np
import pytest
from builders.inside import available_tiers, dtypes, ffi, lib, tier_name

TIERS = pytest.mark.parametrize("tier", available_tiers(), ids=tier_name)
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])

# Around the lanes, a block, and several.
COUNTS = [0, 1, 7, 8, 9, 15, 16, 1023, 1024, 1025, 1031, 3000]


def differ(x, y, tier):
    number = dtypes.BY_NAME[x.dtype.name].number
    result = ffi.new("sl_difference *")
    places = [ffi.cast("void *", array.ctypes.data) for array in (x, y)]
    assert lib.sl_differ(tier, number, *places, [x.size], 1, result) == lib.SL_OK
    return fields(result)


def fields(difference):
    return {name: getattr(difference, name) for name, _ in ffi.typeof("sl_difference").fields}


def numbers(count, dtype, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count).astype(dtype)
    y = np.where(rng.random(count) < 0.5, x, x + rng.standard_normal(count)).astype(dtype)
    return x, y


@FLOATS
@pytest.mark.parametrize("count", COUNTS)
def test_sums_are_those_of_numpy_in_every_tier(count, dtype):
    x, y = numbers(count, dtype, count)
    a, b = x.astype(np.float64), y.astype(np.float64)
    difference = np.abs(a - b)
    first, *others = [differ(x, y, tier) for tier in available_tiers()]
    assert all(other == first for other in others)
    assert first["largest"] == max(difference, default=0.0)
    assert first["at"] == (int(difference.argmax()) if count else 0)
    assert (first["unequal"], first["nonfinite"], first["finite"]) == (np.count_nonzero(difference), 0, count)
    for name, terms in (("squares", difference**2), ("dot", a * b), ("norm_a", a * a), ("norm_b", b * b)):
        assert first[name] == pytest.approx(math.fsum(terms), rel=1e-13, abs=1e-13 * math.fsum(abs(terms)))


@FLOATS
@TIERS
def test_what_is_not_finite_is_counted_and_left_out(dtype, tier):
    x, y = numbers(2500, dtype, 1)
    plain = differ(x, y, tier)
    special = [(np.nan, np.nan), (np.inf, np.inf), (np.inf, -np.inf), (np.nan, 1), (2, -np.inf), (np.inf, np.nan)]
    for k, (one, other) in enumerate(special):
        x[400 * k], y[400 * k] = one, other
    found = differ(x, y, tier)
    assert (found["nonfinite"], found["finite"]) == (4, 2500 - len(special))
    x[:2400:400] = y[:2400:400] = 0
    without = differ(x, y, tier)
    for name in ("largest", "at", "squares", "dot", "norm_a", "norm_b"):
        assert found[name] == without[name], name
    assert found["unequal"] == without["unequal"] + 4
    assert plain["nonfinite"] == 0


@TIERS
def test_the_first_of_equal_differences_is_told(tier):
    x = np.zeros(5000)
    y = x.copy()
    y[[1700, 1701, 4000]] = -3.0, 3.0, 3.0
    assert (differ(x, y, tier)["largest"], differ(x, y, tier)["at"]) == (3.0, 1700)


@TIERS
def test_finite_numbers_whose_squares_are_not(tier):
    x, y = np.full(20, 1e200), np.full(20, -1e200)
    found = differ(x, y, tier)
    assert (found["largest"], found["unequal"], found["finite"]) == (2e200, 20, 20)
    assert found["norm_a"] == found["norm_b"] == found["squares"] == math.inf


@FLOATS
@TIERS
def test_consecutive_tensors_are_compared_one_by_one(dtype, tier):
    x, y = numbers(sum(COUNTS), dtype, 2)
    x[20], y[5000] = np.nan, np.inf
    results = ffi.new("sl_difference[]", len(COUNTS))
    places = [ffi.cast("void *", array.ctypes.data) for array in (x, y)]
    number = dtypes.BY_NAME[x.dtype.name].number
    assert lib.sl_differ(tier, number, *places, COUNTS, len(COUNTS), results) == lib.SL_OK
    ends = np.cumsum(COUNTS)[:-1]
    for result, a, b in zip(results, np.split(x, ends), np.split(y, ends), strict=True):
        assert fields(result) == differ(a.copy(), b.copy(), tier)


def test_other_dtypes_and_tiers_are_refused():
    found, place = ffi.new("sl_difference *"), ffi.new("double[1]")
    assert lib.sl_differ(0, lib.SL_BF16, place, place, [1], 1, found) == lib.SL_E_ARGUMENT
    assert lib.sl_differ(99, lib.SL_F64, place, place, [1], 1, found) == lib.SL_E_ARGUMENT
