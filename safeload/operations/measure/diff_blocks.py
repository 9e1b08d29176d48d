"""Compare tensors in blocks: many small tensors to a block, many blocks to a large tensor.

Bytes are compared first. Numbers are compared only if the bytes or the dtypes of two tensors differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from threading import local
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, index_of
from ...base.gc_pause import paused
from ...base.native import TIER, ffi, lib
from ...engine.ahead.spans import Spans
from ...engine.codes.pieces import Meter, in_order
from ...engine.run.jobs import native_order, struct_dtype
from ...engine.run.memory import address_of, aligned_bytes
from .diff_report import TensorDiff

EQUAL = TensorDiff(0.0, None, 0.0, 1.0, 0, 0)

# Bytes per block: enough to amortize the cost of a read, but the blocks of both sides still fit into a cache.
BYTES = 1 << 20
# Numbers per block: handing a block to a thread takes as long as comparing 100,000 numbers.
NUMBERS = 1 << 19

# Joining this many ranges takes longer than reading them separately.
_FEW_RANGES = 8

_DIFFERENCE = struct_dtype("sl_difference")
_F32, _F64 = dtypes.BY_CODE["F32"], dtypes.BY_CODE["F64"]
# Integers of at most this many bits are exact as float32.
_SMALL_INTEGER = 16
# Integers up to this size are exact as float64, and so are their differences.
_EXACT = 1 << 52
# A 64-bit integer has 11 bits more than the significand of a float64.
_LOW = 0x7FF


class Pieces(NamedTuple):
    """Tensors divided into pieces of at most a block. Small tensors are not divided."""

    tensors: Array  # int64, the tensor of each piece
    begins: Array  # int64, first item of the piece in its tensor
    counts: Array  # int64, items
    last: Array  # bool, True for the last piece of a tensor

    @classmethod
    def of(cls, counts: Array, size: int) -> Pieces:
        """Divide non-empty tensors with ``counts`` items into pieces of at most ``size`` items."""
        if not len(counts) or int(counts.max()) <= size:
            return cls(np.arange(len(counts)), np.zeros(len(counts), np.int64), counts, np.ones(len(counts), bool))
        parts = -(-counts // size)
        tensors = np.repeat(np.arange(len(counts)), parts)
        begins = (np.arange(len(tensors)) - np.repeat(np.cumsum(parts) - parts, parts)) * size
        left = counts[tensors] - begins
        return cls(tensors, begins, np.minimum(left, size), left <= size)

    def blocks(self, size: int) -> Iterator[slice]:
        """Yield runs of pieces, each with ``size`` to ``2 * size - 1`` items; the last run can be shorter."""
        ends = np.cumsum(self.counts)
        begin = done = 0
        while begin < len(ends):
            end = min(int(np.searchsorted(ends, done + size)) + 1, len(ends))
            yield slice(begin, end)
            begin, done = end, int(ends[end - 1])


def compare(
    a: Spans, b: Spans, shapes: Sequence[tuple[int, ...]], threads: int | None, meter: Meter
) -> list[TensorDiff | None]:
    """Compare tensors of the same shapes, and return their differences; None for complex tensors whose bytes differ."""
    # A complex number can be passed as two float64. `meter` gets 8 bytes for each compared element.
    elements = np.array([math.prod(shape) for shape in shapes], np.int64)
    file, begins, _, of_a, _ = a.columns
    of_b = b.columns[3]
    alike = of_a == of_b
    in_file = np.lexsort((begins, file))
    in_file = in_file[elements[in_file] > 0]
    differs = np.zeros(len(elements), bool)
    differs[in_file] = ~alike[in_file]
    rows = in_file[alike[in_file]]
    differs[rows] = _unequal(a.pick(rows), b.pick(rows), elements[rows], threads, meter)
    differences: list[TensorDiff | None] = [EQUAL] * len(elements)
    rows = in_file[differs[in_file]]
    for dtype_a, dtype_b in dict.fromkeys(zip(of_a[rows].tolist(), of_b[rows].tolist(), strict=True)):
        pair = rows[(of_a[rows] == dtype_a) & (of_b[rows] == dtype_b)]
        if dtypes.BY_NUMBER[dtype_a].complex or dtypes.BY_NUMBER[dtype_b].complex:
            values: list[TensorDiff | None] = [None] * len(pair)
        else:
            values = _differences(a.pick(pair), b.pick(pair), [shapes[k] for k in pair.tolist()], threads, meter)
        for k, value in zip(pair.tolist(), values, strict=True):
            differences[k] = value
    return differences


class _Buffers(local):
    """Memory of a thread for a block of each side."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = aligned_bytes(size), aligned_bytes(size)
        self.floats: dict[int, Array] = {}  # by side

    def read(self, side: int, spans: Spans) -> Array:
        """Read ranges into consecutive bytes; the next block of this side can overwrite them."""
        spans = spans.joined() if len(spans) > _FEW_RANGES else spans
        file, begins, sizes, sources, targets = spans.columns
        if len(spans) == 1 and spans.files[int(file[0])] is None and sources[0] == targets[0]:
            return np.frombuffer(ffi.buffer(ffi.cast("char *", int(begins[0])), int(sizes[0])), np.uint8)
        memory = self.memory[side]
        return memory[: spans.fill(memory, threads=1)]

    def as_floats(self, side: int, values: Array, dtype: np.dtype[Any]) -> Array:
        """Convert values in memory of their own, unless they have the dtype."""
        if values.dtype == dtype:
            return values
        if side not in self.floats:
            self.floats[side] = aligned_bytes(self.size).view(np.float64)
        floats = self.floats[side][: values.size]
        np.copyto(floats, values, casting="unsafe")
        return floats


# ---- bytes ----


def _unequal(a: Spans, b: Spans, elements: Array, threads: int | None, meter: Meter) -> Array:
    """Return a mask of the tensors with different bytes, for two sides with equal dtypes."""
    differs = np.zeros(len(a), bool)
    pieces = Pieces.of(a.lengths, BYTES)
    total = int(a.lengths.sum())
    a, b = a.divided(BYTES), b.divided(BYTES)
    buffers = _Buffers(min(total, 2 * BYTES))

    def blocks() -> Iterator[slice]:  # of a large tensor, up to the first that differs
        for block in pieces.blocks(BYTES):
            if block.stop - block.start > 1 or not differs[pieces.tensors[block.start]]:
                yield block

    def compare_block(block: slice) -> tuple[slice, Array | bool]:
        x, y = buffers.read(0, a.pick(block)), buffers.read(1, b.pick(block))
        if _same(x, y):
            return block, False
        if block.stop - block.start == 1:
            return block, True
        lengths = pieces.counts[block]
        return block, np.logical_or.reduceat(x != y, np.cumsum(lengths) - lengths)

    for block, unequal in in_order(compare_block, blocks(), threads, 2 * total):
        differs[pieces.tensors[block]] |= unequal
        complete = pieces.tensors[block][pieces.last[block]]
        meter.add(8 * int(elements[complete][~differs[complete]].sum()))
    return differs


def _same(x: Array, y: Array) -> bool:
    words = x.size - x.size % 8
    alike = bool((x[:words].view(np.uint64) == y[:words].view(np.uint64)).all())
    return alike and bool((x[words:] == y[words:]).all())


# ---- numbers ----


class _Sums(NamedTuple):
    """A row of sums for each piece."""

    largest: list[float]  # largest differences; int if both sides hold integers
    sums: Array  # of _DIFFERENCE


def _differences(
    a: Spans, b: Spans, shapes: Sequence[tuple[int, ...]], threads: int | None, meter: Meter
) -> list[TensorDiff | None]:
    """Compare the numbers of tensors that share a dtype in each checkpoint."""
    rows = [dtypes.BY_NUMBER[int(spans.columns[3][0])] for spans in (a, b)]
    counts = a.columns[2] // rows[0].block_bytes
    per_element = counts // np.array([math.prod(shape) for shape in shapes], np.int64)
    pieces = Pieces.of(counts, NUMBERS)
    targets = _targets(rows)
    a, b = (_converted(spans, target) for spans, target in zip((a, b), targets, strict=True))
    dtype_a, dtype_b = (dtypes.element_dtype(target.number) for target in targets)
    whole = all(row.kind == lib.SL_KIND_INT for row in rows)
    total = int(counts.sum())
    buffers = _Buffers(min(total, 2 * NUMBERS) * _F64.block_bytes)
    progress = 8 * pieces.counts // per_element[pieces.tensors]

    def compare_block(block: slice) -> _Sums:
        x = native_order(buffers.read(0, a.pick(block)).view(dtype_a))
        y = native_order(buffers.read(1, b.pick(block)).view(dtype_b))
        sums = _sum_up(x, y, pieces.counts[block], buffers)
        meter.add(int(progress[block].sum()))
        return sums

    parts = [*in_order(compare_block, pieces.blocks(NUMBERS), threads, 16 * total)]
    largest = [value for part in parts for value in part.largest]
    if whole:
        largest = [int(value) for value in largest]
    sums = _Sums(largest, np.concatenate([part.sums for part in parts]))
    return _summaries(sums if len(pieces.last) == len(shapes) else _added_up(sums, pieces), per_element, shapes)


def _targets(rows: Sequence[dtypes.Dtype]) -> list[dtypes.Dtype]:
    """Return the dtypes to read as: float32 if that is exact, else integers as stored and floats as float64."""
    if all(row.bits <= (_F32.bits if row.floating else _SMALL_INTEGER) for row in rows):
        return [_F32, _F32]
    return [row if row.kind == lib.SL_KIND_INT else _F64 for row in rows]


def _converted(spans: Spans, target: dtypes.Dtype) -> Spans:
    targets = np.full_like(spans.targets, target.number)
    spans = Spans(spans.files, spans.columns._replace(targets=targets))
    return spans.divided(NUMBERS * target.block_bytes)


def _sum_up(x: Array, y: Array, counts: Array, buffers: _Buffers) -> _Sums:
    """Compare consecutive pieces: in the C core, or exactly if 64-bit integers exceed float64."""
    target = np.dtype(np.float32 if x.dtype == y.dtype == np.float32 else np.float64)
    floats = [buffers.as_floats(side, values, target) for side, values in enumerate((x, y))]
    sums = np.zeros(len(counts), _DIFFERENCE)
    lengths = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(counts, np.uint64))
    places = [ffi.cast("void *", address_of(values)) for values in floats]
    number = dtypes.BY_NAME[target.name].number
    lib.sl_differ(TIER, number, *places, lengths, len(counts), ffi.from_buffer("sl_difference[]", sums))
    largest = sums["largest"].tolist()
    # If any integer is larger than _EXACT, so is the sum of squares larger than its square.
    wide = x.dtype.kind in "iu" and not (sums["norm_a"] <= _EXACT**2).all()
    if wide or (y.dtype.kind in "iu" and not (sums["norm_b"] <= _EXACT**2).all()):
        end = 0
        for k, count in enumerate(counts.tolist()):
            begin, end = end, end + count
            if _exceeds_float64(x[begin:end]) or _exceeds_float64(y[begin:end]):
                largest[k], sums[k] = _exact_sums(x[begin:end], y[begin:end])
    return _Sums(largest, sums)


def _added_up(sums: _Sums, pieces: Pieces) -> _Sums:
    """Add up the pieces of each tensor."""
    first = np.flatnonzero(pieces.begins == 0)
    ends = np.flatnonzero(pieces.last) + 1
    totals, largest = sums.sums[first], [sums.largest[k] for k in first.tolist()]
    for tensor in np.flatnonzero(ends - first > 1).tolist():
        begin, end = int(first[tensor]), int(ends[tensor])
        parts, total = sums.sums[begin:end], totals[tensor]
        k = max(range(begin, end), key=sums.largest.__getitem__)
        largest[tensor] = sums.largest[k]
        total["at"] = int(pieces.begins[k]) + int(sums.sums["at"][k])
        for field in ("squares", "dot", "norm_a", "norm_b"):
            total[field] = _total(parts[field].tolist())
        for field in ("unequal", "nonfinite", "finite"):
            total[field] = parts[field].sum()
    return _Sums(largest, totals)


def _total(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond float64, or infinities of both signs
        return sum(numbers)


def _summaries(sums: _Sums, per_element: Array, shapes: Sequence[tuple[int, ...]]) -> list[TensorDiff | None]:
    """Return the differences of tensors, given a row of sums for each tensor."""
    totals = sums.sums
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        rms = np.sqrt(totals["squares"] / np.maximum(totals["finite"], 1))
        # NaN if either tensor is zero.
        cosine = np.clip(totals["dot"] / (np.sqrt(totals["norm_a"]) * np.sqrt(totals["norm_b"])), -1.0, 1.0)
        cosine[totals["unequal"] == 0] = 1.0
        change, norm = np.sqrt(totals["squares"]), np.sqrt(totals["norm_a"])
    columns = (
        *(rms, cosine, totals["unequal"], totals["nonfinite"], change, norm),
        totals["at"].astype(np.int64) // per_element,
    )
    with paused(len(shapes)):
        return [
            TensorDiff(
                *(largest, index_of(at, shape) if largest > 0 else None, mean, angle, unequal, nonfinite, size),
                norm=length if unequal else None,
            )
            for largest, shape, mean, angle, unequal, nonfinite, size, length, at in zip(
                sums.largest, shapes, *(column.tolist() for column in columns), strict=True
            )
        ]


# ---- 64-bit integers ----


def _exceeds_float64(values: Array) -> bool:
    """True if float64 can lose bits of these integers or of their differences; False for floats."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8 or not values.size:
        return False
    return bool(values.max() > _EXACT or (values.dtype.kind == "i" and values.min() < -_EXACT))


def _exact_sums(x: Array, y: Array) -> tuple[float, tuple[float, ...]]:
    """Return the largest difference and the ``sl_difference`` of a piece; differences are exact until squared."""
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
        # The first difference is exact if it is small, so only equal numbers give 0.
        sizes = distances = np.where(finite, np.abs(((whole - low).astype(np.float64) - near) + low), 0.0)
    at = int(np.argmax(np.where(carry, sizes, 0)) if carry.any() else np.argmax(sizes))
    largest = sizes[at].item() + (1 << 64 if carry[at] else 0)
    a, b = (np.where(finite, values, 0).astype(np.float64) for values in (x, y))
    with np.errstate(over="ignore", invalid="ignore"):
        products = (distances, distances), (a, b), (a, a), (b, b)
        squares, dot, norm_a, norm_b = (float((p * q).sum()) for p, q in products)
    nonfinite = int(np.count_nonzero(~finite))
    unequal = int(np.count_nonzero(distances)) + nonfinite
    return largest, (largest, at, squares, dot, norm_a, norm_b, unequal, nonfinite, x.size - nonfinite)


def _integer_distances(x: Array, y: Array) -> tuple[Array, Array]:
    """Return |x - y| modulo 2^64 as uint64, and a mask of the differences to add 2^64 to (int64 against uint64)."""
    if np.uint64 not in (x.dtype, y.dtype):
        x, y = x.astype(np.int64), y.astype(np.int64)
        return np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64), np.zeros(x.size, bool)
    if y.dtype != np.uint64:
        x, y = y, x
    bits = x.astype(np.uint64)
    negative = x < 0
    beyond = y - bits  # y + |x| for negative x
    return np.where(negative, beyond, np.maximum(bits, y) - np.minimum(bits, y)), negative & (beyond < y)
