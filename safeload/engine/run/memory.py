"""Memory that tensors are read into."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...base.arrays import Array, array_over, empty_array
from ...base.native import ffi, pointer, private_buffer

# Tensors of at least this size get memory of their own. Smaller ones share a pool, so that 100,000 of them do not take
# 100,000 allocations and reads.
POOLED_BELOW = 1 << 20
# Arrays of at least this size, a huge page, get memory in huge pages. Below it there is none to get, and malloc reuses
# pages: 1 MiB of new ones takes ten times as long to touch as to fill.
HUGE_FROM = 2 << 20
# Alignment of pools: a cache line, which is more than any dtype needs.
ALIGNMENT = 64
# What reads past the page cache move: see SL_DIRECT_PAGE in the core.
PAGE = 4096


def address_of(array: Array) -> int:
    """Address of a contiguous array's first element. Numpy's own ways to get it take four times as long."""
    return pointer(ffi.from_buffer(array))


def overlapping(targets: Mapping[str, Array], sources: Iterable[Array]) -> set[str]:
    """Names of the targets whose memory, gaps between elements included, overlaps that of a source."""
    ends: list[int] = []
    begins: list[int] = []
    for begin, end in sorted(map(_bounds, sources)):
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    names = set()
    for name, target in targets.items():
        begin, end = _bounds(target)
        at = bisect_right(ends, begin)  # the first run of sources that ends behind the target's beginning
        if target.size and at < len(begins) and begins[at] < end:
            names.add(name)
    return names


def _bounds(array: Array) -> tuple[int, int]:
    """The first byte that an array of any strides uses, and the one past the last."""
    begin = end = array.__array_interface__["data"][0]
    if not array.size:
        return begin, end
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        begin, end = begin + min(reach, 0), end + max(reach, 0)
    return begin, end + array.dtype.itemsize


def aligned_bytes(size: int) -> Array:
    """New memory aligned to `ALIGNMENT`, in huge pages if it is large."""
    raw = private_array((size + ALIGNMENT,), np.dtype(np.uint8))
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + size]


def private_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array with undefined values, in huge pages if it is large.

    Raises:
        UnsupportedError: numpy does not support an array of this shape.
    """
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    return empty_array(shape, dtype) if size < HUGE_FROM else array_over(private_buffer(size), dtype, shape, 0)


def paged_array(shape: tuple[int, ...], dtype: np.dtype[Any], begin: int) -> Array:
    """A new array that can be read past the page cache without a copy: what fills a page of the file fills one of it.

    Args:
        shape: of the array.
        dtype: of the array.
        begin: its first byte in the file. It lies there within a page as the array does in memory, unless the dtype's
            alignment forbids it.

    Raises:
        UnsupportedError: numpy does not support an array of this shape.
    """
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    at = begin % PAGE
    if size < HUGE_FROM or at % max(dtype.alignment, 1):
        return private_array(shape, dtype)
    return array_over(private_buffer(size + at), dtype, shape, at)
