"""Allocate memory for tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from ...base.arrays import Array, array_over, empty_array
from ...base.native import address_of as address_of
from ...base.native import private_buffer
from ...base.text import show

# Tensors of at least this size get memory of their own. Smaller tensors share a pool: 100,000 tensors should not
# take 100,000 allocations and reads.
POOLED_BELOW = 1 << 20
# Arrays of at least this size, a huge page, get memory in huge pages. Smaller arrays come from malloc, which reuses
# pages: new pages take much longer to touch than to fill.
HUGE_FROM = 2 << 20
# Alignment of pools: a cache line, more than any dtype needs.
ALIGNMENT = 64
# Unit of direct reads: SL_DIRECT_PAGE in the core.
PAGE = 4096


def overlapping(targets: Mapping[str, Array], sources: Iterable[Array]) -> set[str]:
    """Return the names of targets overlapping the memory of a source, gaps between elements included."""
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
        at = bisect_right(ends, begin)  # the first merged source with an end behind the target's beginning
        if target.size and at < len(begins) and begins[at] < end:
            names.add(name)
    return names


_OWNS_DATA = attrgetter("flags.owndata")


def check_disjoint(out: Mapping[str, Array], contents: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Refuse arrays to fill that share memory, except a single array for tied tensors.

    Tensors of equal bytes have equal ``contents``, and may share memory.
    """
    arrays = out.values()
    if all(map(_OWNS_DATA, arrays)) and len(set(map(id, arrays))) == len(arrays):
        return
    spans = {name: (address_of(array), array.nbytes) for name, array in out.items() if array.nbytes}
    check_spans(spans, spans, contents, "out")


def check_spans(
    spans: Mapping[str, tuple[int, int]],
    written: Container[str],
    contents: Callable[[], Mapping[str, Any]] | Mapping[str, Any],
    argument: str,
) -> None:
    """Refuse memory that is written under two names, or written and kept; see `check_disjoint`."""
    known: Mapping[str, Any] | None = None
    last = {True: (0, 0, ""), False: (0, 0, "")}  # the span that ends last, among written and among kept spans
    for name, (following, size) in sorted(spans.items(), key=itemgetter(1)):
        writes = name in written
        for begin, nbytes, other in [last[True], *([last[False]] if writes else [])]:
            if following >= begin + nbytes:
                continue
            known = known if known is not None else contents() if callable(contents) else contents
            if (begin, nbytes) == (following, size) and known.get(other) == known.get(name, other):
                continue
            raise ValueError(
                f"{argument}: {show(other)} and {show(name)} share memory; pass an array of its own for each tensor"
            )
        if following + size > sum(last[writes][:2]):
            last[writes] = (following, size, name)


def _bounds(array: Array) -> tuple[int, int]:
    """Return the first byte that an array of any strides uses, and one past the last."""
    begin = end = array.__array_interface__["data"][0]
    if not array.size:
        return begin, end
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        begin, end = begin + min(reach, 0), end + max(reach, 0)
    return begin, end + array.dtype.itemsize


def aligned_bytes(size: int) -> Array:
    """Return new memory aligned to `ALIGNMENT`, in huge pages if it is large."""
    raw = private_array((size + ALIGNMENT,), np.dtype(np.uint8))
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + size]


def private_array(shape: tuple[int, ...], dtype: np.dtype[Any], begin: int = 0) -> Array:
    """Return a new array with undefined values, in huge pages if it is large.

    A direct read fills a large array without a copy if the array begins at the offset within a page at which its tensor
    begins in the file, which is ``begin`` modulo the page; the dtype's alignment may not allow it.
    """
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    if size < HUGE_FROM:
        return empty_array(shape, dtype)
    at = begin % PAGE if begin % max(dtype.alignment, 1) == 0 else 0
    return array_over(private_buffer(size + at), dtype, shape, at)
