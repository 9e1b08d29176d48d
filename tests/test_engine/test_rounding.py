"""Conversions round once: each result is checked against exact rational arithmetic."""

from bisect import bisect_right
from fractions import Fraction
from functools import cache
from itertools import chain

import ml_dtypes
import numpy as np
import pytest
from builders.random import rng

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

TARGETS = (
    *("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),  # the core
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float6_e2m3fn", "float4_e2m1fn"),  # ml_dtypes, from float32
)
SOURCES = ("<f8", ">f8", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8", "g")


@cache
def finite_values(target):
    """The non-negative finite values of a dtype, ascending, which is also the order of their codes."""
    dtype = np.dtype(getattr(ml_dtypes, target, target))
    codes = np.arange(1 << 8 * dtype.itemsize - 1, dtype=f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = codes.astype(np.float64)
    return [Fraction(value) for value in dict.fromkeys(values[np.isfinite(values) & (values >= 0)].tolist())]


def rounded(value, values):
    """The nearest of the values, ties to the even code; None if it is too large."""
    size = abs(value)
    low = bisect_right(values, size) - 1
    step = values[low + 1] - values[low] if low + 1 < len(values) else values[-1] - values[-2]
    distance = 2 * (size - values[low]) - step
    code = low + (distance > 0 or (distance == 0 and low % 2 == 1))
    return None if code == len(values) else values[code] * (-1 if value < 0 else 1)


def near_ties(values, source):
    """Numbers of a dtype on, just below and just above the ties between neighbouring values, and at its own limits."""
    step = values[-1] - values[-2]
    pairs = list(zip(values, [*values[1:], values[-1] + step], strict=True))
    chosen = [*pairs[:20], *pairs[-20:], *(pairs[k] for k in rng.integers(0, len(pairs), 60))]
    ties = [(a + b) / 2 for a, b in chosen]
    if np.dtype(source).kind in "iu":
        info = np.iinfo(source)
        whole = chain.from_iterable((int(tie) - 1, int(tie), int(tie) + 1, -int(tie) - 1, -int(tie)) for tie in ties)
        large = [s * ((1 << k) + (1 << k >> j)) + d for k in (30, 52, 60, 63) for j in (4, 8, 9) for d in (-1, 0, 1)
                 for s in (1, -1)]  # fmt: skip
        numbers = [*whole, *large, info.min, info.max, info.max - 1, info.max // 2]
        return np.array([n for n in dict.fromkeys(numbers) if info.min <= n <= info.max], source)
    floats = np.array([float(tie) for tie in ties], np.float64)
    tiny = [5e-324, 2.0**-149, 2.0**-150, 1e300, 1.7e308, 3.4028235677973366e38]
    all_of_them = np.concatenate([floats, np.nextafter(floats, np.inf), np.nextafter(floats, 0), tiny])
    if source == "g":
        wide = floats.astype("g")
        all_of_them = np.concatenate([all_of_them, np.nextafter(wide, np.longdouble(np.inf)), np.nextafter(wide, 0)])
    return np.concatenate([all_of_them, -all_of_them]).astype(source)


def exact(value):
    return Fraction(*value.as_integer_ratio()) if isinstance(value, np.floating) else Fraction(int(value))


def check(got, x, values, target):
    got = np.asarray(got).astype(np.float64)
    for source, result in zip(x.ravel(), got.ravel().tolist(), strict=True):
        want = rounded(exact(source), values)
        if want is not None:
            assert result == want, (source, target)
            assert np.signbit(result) == (source < 0) or "fnuz" in target
        elif target in ("bfloat16", "float16", "float8_e5m2"):
            assert result == (np.inf if source > 0 else -np.inf), source
        elif target.startswith("float8"):
            assert np.isnan(result), source
        else:
            assert abs(result) == values[-1], source  # no infinity and no NaN: saturates


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_astype_rounds_once(source, target):
    values = finite_values(target)
    x = near_ties(values, source)
    check(safeload.astype(x, target), x, values, target)


@pytest.mark.parametrize("target", TARGETS[:4])
@pytest.mark.parametrize("suffix", ["safetensors", "npy", "npz", "big.npy"])
def test_loading_rounds_once(tmp_path, target, suffix):
    values = finite_values(target)
    x = near_ties(values, ">f8" if suffix == "big.npy" else "<f8")
    path = tmp_path / f"x.{suffix}"
    if suffix == "safetensors":
        save_file({"tensor": x}, path)
    elif suffix == "npz":
        np.savez(path, tensor=x)
    else:
        np.save(path, x)
    check(safeload.load(path, dtype=target)["tensor"], x, values, target)
    if target != "float8_e5m2":
        safeload.convert(path, tmp_path / "y.safetensors", dtype=target)
        check(safeload.load(tmp_path / "y.safetensors")["tensor"], x, values, target)


@pytest.mark.parametrize("source", [">f8", "<f8", ">i8", "<u8"])
@pytest.mark.parametrize("layout", ["transposed", "strided", "reversed", "0-d", "broadcast", "empty"])
def test_any_layout_rounds_once(source, layout):
    values = finite_values("bfloat16")
    base = np.resize(near_ties(values, source), (24, 20))
    x = {
        "transposed": base.T,
        "strided": base[::3, 1::2],
        "reversed": base[::-1, ::-1],
        "0-d": base[3, 4:5].reshape(()),
        "broadcast": np.broadcast_to(base[0], (3, 20)),
        "empty": base[:0],
    }[layout]
    got = safeload.astype(x, "bfloat16")
    assert got.shape == x.shape
    check(got, np.ascontiguousarray(x), values, "bfloat16")


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("target", TARGETS[:4])
def test_zeros_nans_and_infinities_keep_their_sign(order, target):
    x = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf], f"{order}f8")
    got = safeload.astype(x, target).astype(np.float64)
    assert np.signbit(got).tolist() == np.signbit(x).tolist()
    assert got[:2].tolist() == [0, 0]
    assert np.isnan(got[2:4]).all()
    assert np.isnan(got[4:]).all() if target == "float8_e4m3fn" else (got[4:] == x[4:]).all()


def test_complex_numbers_lose_the_imaginary_part_with_a_warning():
    with pytest.warns(getattr(np, "exceptions", np).ComplexWarning):
        got = safeload.astype(np.array([1 + 2.0**-8 + 2.0**-40 + 5j]), "bfloat16")
    assert float(got[0]) == 1 + 2.0**-7


@pytest.mark.skipif(not hasattr(ml_dtypes, "complex32"), reason="came with ml_dtypes 0.7")
def test_narrow_complex_numbers_lose_the_imaginary_part_with_a_warning():
    with pytest.warns(getattr(np, "exceptions", np).ComplexWarning):
        got = safeload.astype(np.array([1.5 + 5j]).astype(ml_dtypes.complex32), "bfloat16")
    assert float(got[0]) == 1.5


def test_wide_integers_become_f64_exactly():
    x = np.array([2**53 - 1, -(2**53) + 1, 2**62, 7])
    assert safeload.astype(x, "float64").tolist() == x.tolist()
