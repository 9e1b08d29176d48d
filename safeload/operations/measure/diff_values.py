"""Differences of two runs of numbers: float64 in the C core, 64-bit integers exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.native import TIER, ffi, lib
from ...engine.run.memory import address_of
from .diff_report import TensorDiff

# Integers up to this size are exact as float64, and so are their differences.
_EXACT = 1 << 52
# The low bits that an integer of 64 bits has more than a float64.
_LOW = 0x7FF


class Sums(NamedTuple):
    """Partial sums over one piece of two tensors."""

    largest: float  # an int if both hold integers
    at: int
    squares: float
    dot: float
    norm_a: float
    norm_b: float
    unequal: int
    nonfinite: int
    finite: int


def sum_up(x: Array, y: Array, begin: int) -> Sums:
    """Partial sums over one piece: float32, float64 or integers; ``begin`` is the index of its first element."""
    whole = x.dtype.kind in "iu" and y.dtype.kind in "iu"
    if exceeds_float64(x) or exceeds_float64(y):
        return _exact_sums(x, y, begin)
    dtype = np.dtype(np.float32 if x.dtype == y.dtype == np.float32 else np.float64)
    x, y = x.astype(dtype, copy=False), y.astype(dtype, copy=False)
    found = ffi.new("sl_difference *")
    places = (ffi.cast("void *", address_of(values)) for values in (x, y))
    lib.sl_differ(TIER, dtypes.BY_NAME[dtype.name].number, *places, x.size, found)
    return Sums(
        int(found.largest) if whole else found.largest, begin + found.at, found.squares, found.dot, found.norm_a,
        found.norm_b, found.unequal, found.nonfinite, found.finite,
    )  # fmt: skip


def summary(parts: Sequence[Sums], shape: tuple[int, ...], axes: int) -> TensorDiff:
    """Add up the pieces of a tensor.

    Args:
        parts: in order.
        shape: of the tensor.
        axes: the index of the largest difference has this many of its axes.
    """
    largest = max(parts, key=lambda part: part.largest, default=None)
    different = sum(part.unequal for part in parts)
    finite = sum(part.finite for part in parts)
    squares, dot, norm_a, norm_b = (
        _total([getattr(part, field) for part in parts]) for field in ("squares", "dot", "norm_a", "norm_b")
    )
    length = math.sqrt(norm_a) * math.sqrt(norm_b)
    cosine = 1.0 if different == 0 else dot / length if length else math.nan
    index = None
    if largest is not None and largest.largest > 0:
        index = tuple(int(k) for k in np.unravel_index(largest.at, shape)[:axes])
    return TensorDiff(
        0.0 if largest is None else largest.largest,
        index,
        math.sqrt(squares / finite) if finite else 0.0,
        max(-1.0, min(1.0, cosine)) if not math.isnan(cosine) else cosine,
        different,
        sum(part.nonfinite for part in parts),
    )


def _total(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond float64, or infinities of both signs
        return sum(numbers)


# ---- 64-bit integers ----


def exceeds_float64(values: Array) -> bool:
    """True if float64 may lose bits of these integers or of their differences; False for floats."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8 or not values.size:
        return False
    return bool(values.max() > _EXACT or (values.dtype.kind == "i" and values.min() < -_EXACT))


def _exact_sums(x: Array, y: Array, begin: int) -> Sums:
    """`sum_up` if one side holds integers that float64 lacks: differences are exact before they are squared."""
    carry = np.zeros(x.size, bool)
    finite = np.ones(x.size, bool)
    if x.dtype.kind in "iu" and y.dtype.kind in "iu":
        sizes, carry = _integer_distances(x, y)
        distances = sizes.astype(np.float64) + np.where(carry, 2.0**64, 0.0)
    else:
        whole, floats = (x, y) if x.dtype.kind in "iu" else (y, x)
        finite = np.isfinite(floats)
        near = np.where(finite, floats, 0.0).astype(np.float64)
        low = whole & whole.dtype.type(_LOW)
        # The first difference is exact wherever it is small, so equal numbers, and only these, give 0.
        sizes = distances = np.where(finite, np.abs(((whole - low).astype(np.float64) - near) + low), 0.0)
    at = int(np.argmax(np.where(carry, sizes, 0)) if carry.any() else np.argmax(sizes))
    largest = sizes[at].item() + (1 << 64 if carry[at] else 0)
    a, b = (np.where(finite, values, 0).astype(np.float64) for values in (x, y))
    with np.errstate(over="ignore", invalid="ignore"):
        products = (distances, distances), (a, b), (a, a), (b, b)
        squares, dot, norm_a, norm_b = (float((p * q).sum()) for p, q in products)
    nonfinite = int(np.count_nonzero(~finite))
    unequal = int(np.count_nonzero(distances)) + nonfinite
    return Sums(largest, begin + at, squares, dot, norm_a, norm_b, unequal, nonfinite, x.size - nonfinite)


def _integer_distances(x: Array, y: Array) -> tuple[Array, Array]:
    """|x - y| modulo 2^64 as uint64, and where 2^64 is missing: between a negative number and a uint64."""
    if np.uint64 not in (x.dtype, y.dtype):
        x, y = x.astype(np.int64), y.astype(np.int64)
        return np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64), np.zeros(x.size, bool)
    if y.dtype != np.uint64:
        x, y = y, x
    bits = x.astype(np.uint64)
    negative = x < 0
    beyond = y - bits  # y + |x| where x is negative
    return np.where(negative, beyond, np.maximum(bits, y) - np.minimum(bits, y)), negative & (beyond < y)
