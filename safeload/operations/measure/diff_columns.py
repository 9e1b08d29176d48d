"""Compares plain tensors of two checkpoints in columns: bytes first, then the values of those that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from threading import local
from typing import NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.gc_pause import paused
from ...engine.ahead.spans import Spans
from ...engine.codes.pieces import VALUES, Meter, in_order
from ...engine.read.tensors import Tensors
from ...engine.run.jobs import native_order
from ...engine.run.memory import aligned_bytes
from .diff_report import TensorDiff
from .diff_values import exceeds_float64, sum_up, summary

EQUAL = TensorDiff(0.0, None, 0.0, 1.0, 0, 0)

# Bytes that are compared at a time: those of both stay in a core's cache.
_BLOCK = 512 << 10
_WORD = 8
# Elements of values that are compared at a time, and the most that a tensor has which is compared with others.
_VALUES, _SMALL = VALUES // 8, VALUES // 64
_F64 = dtypes.BY_CODE["F64"].number


class Compared(NamedTuple):
    """What is known of some tensors.

    Attributes:
        found: the differences, by name.
        unequal: names of tensors of one dtype whose bytes differ, and whose values have not been compared.
    """

    found: dict[str, TensorDiff]
    unequal: set[str]


def compare(a: Tensors, b: Tensors, threads: int | None, meter: Meter) -> Compared:
    """Compares tensors of local files; large ones whose bytes differ are left to the caller.

    Args:
        a: the tensors of one checkpoint.
        b: those of the same names and shapes of the other one.
        threads: None: chosen automatically.
        meter: gets 8 bytes for each element that has been compared.

    Raises:
        FormatError, OSError: a file cannot be read.
    """
    counts = np.array([math.prod(shape) for shape in a.shapes], np.int64)
    numbers_a, numbers_b = a.ranges.numbers, b.ranges.numbers
    differs = (numbers_a != numbers_b) & (counts > 0)
    alike = np.flatnonzero((numbers_a == numbers_b) & (counts > 0))
    alike = alike[np.lexsort((a.ranges.begins[alike], a.ranges.file[alike]))]
    differs[alike] = _unequal(Spans.of(a).pick(alike), Spans.of(b).pick(alike), counts[alike], threads, meter)
    found = {a.names[k]: EQUAL for k in np.flatnonzero(~differs).tolist()}
    readable = np.zeros(256, bool)
    readable[[row.number for row in dtypes.TABLE if _has_values(row)]] = True
    small = differs & (counts <= _SMALL) & readable[numbers_a] & readable[numbers_b]
    for pair in {*zip(numbers_a[small].tolist(), numbers_b[small].tolist(), strict=True)}:
        rows = np.flatnonzero(small & (numbers_a == pair[0]) & (numbers_b == pair[1]))
        found.update(_measured(a, b, rows, counts, threads, meter))
    left = differs & ~small & (numbers_a == numbers_b)
    return Compared(found, {a.names[k] for k in np.flatnonzero(left).tolist()})


def _has_values(row: dtypes.Dtype) -> bool:
    """Whether elements are whole bytes, and real numbers."""
    if row.packed or row.complex:
        return False
    return not row.floating or row.converts_to(dtypes.BY_CODE["F64"])


# ---- bytes ----


class _Block(NamedTuple):
    """Ranges of bytes of both that are compared together.

    Attributes:
        one: of the first.
        other: of the second.
        begin: where they begin, if the bytes of all tensors stood one after the other.
        end: where they end.
        first: row of the tensor that the first byte is of.
        last: row of the one that the last byte is of.
    """

    one: Spans
    other: Spans
    begin: int
    end: int
    first: int
    last: int


def _unequal(a: Spans, b: Spans, counts: Array, threads: int | None, meter: Meter) -> Array:
    """Which tensors of one dtype and shape have other bytes.

    Args:
        a: tensors in the order of their bytes.
        b: the same tensors.
        counts: their elements.
        threads: see `compare`.
        meter: gets the elements of those that are equal.
    """
    differs = np.zeros(len(a), bool)
    ends = np.cumsum(a.lengths)
    buffers = local()

    def function(block: _Block) -> tuple[int, Array | None]:
        nbytes = block.end - block.begin
        if not hasattr(buffers, "both"):
            buffers.both = aligned_bytes(_BLOCK), aligned_bytes(_BLOCK)
        words = -(-nbytes // _WORD) * _WORD
        for spans, buffer in zip((block.one, block.other), buffers.both, strict=True):
            buffer[nbytes:words] = 0
            spans.fill(buffer, threads=1)
        x, y = (buffer[:words] for buffer in buffers.both)
        different = np.flatnonzero(x.view(np.uint64) != y.view(np.uint64))
        if not len(different):
            return block.end, None
        if block.first == block.last:
            return block.end, np.array([block.first])
        places = (different[:, None] * _WORD + np.arange(_WORD)).ravel()
        places = places[x[places] != y[places]]
        return block.end, np.unique(np.searchsorted(ends, block.begin + places, side="right"))

    def blocks() -> Iterator[_Block]:
        for block in _blocks(a, b, ends):
            if block.first < block.last or not differs[block.first]:  # no more of a tensor that is known to differ
                yield block

    passed = 0
    for end, rows in in_order(function, blocks(), threads, 2 * int(ends[-1]) if len(a) else 0):
        if rows is not None:
            differs[rows] = True
        until = int(np.searchsorted(ends, end, side="right"))
        some = slice(passed, until)
        meter.add(8 * int(counts[some][~differs[some]].sum()))
        passed = until
    rest = slice(passed, None)
    meter.add(8 * int(counts[rest][~differs[rest]].sum()))
    return differs


def _blocks(a: Spans, b: Spans, ends_of_tensors: Array) -> Iterator[_Block]:
    """The bytes of both in blocks; ranges that are neighbours in both are read as one."""
    if not len(a):
        return
    joints = ~(a.follows() & b.follows())
    first = np.flatnonzero(np.concatenate([[True], joints]))
    one, other = (spans.merged(first).divided(_BLOCK) for spans in (a, b))
    ends = np.cumsum(one.lengths)
    begin = done = 0
    while begin < len(one):
        end = int(np.searchsorted(ends, done + _BLOCK, side="right"))
        some, until = slice(begin, end), int(ends[end - 1])
        first, last = np.searchsorted(ends_of_tensors, [done, until - 1], side="right").tolist()
        yield _Block(one.pick(some), other.pick(some), done, until, first, last)
        begin, done = end, until


# ---- values ----


def _measured(
    a: Tensors, b: Tensors, rows: Array, counts: Array, threads: int | None, meter: Meter
) -> Iterator[tuple[str, TensorDiff]]:
    """Name and differences of small tensors, of one dtype in each checkpoint."""
    rows = rows[np.lexsort((a.ranges.begins[rows], a.ranges.file[rows]))]
    ends = np.cumsum(counts[rows])
    total = int(ends[-1])
    one, other = _numbers(a, rows), _numbers(b, rows)

    def blocks() -> Iterator[tuple[int, int]]:
        begin = done = 0
        while begin < len(rows):
            end = int(np.searchsorted(ends, done + _VALUES, side="right"))
            yield begin, end
            begin, done = end, int(ends[end - 1])

    def function(block: tuple[int, int]) -> list[TensorDiff]:
        some = slice(*block)
        number = counts[rows[some]]
        x, y, shapes = one(some), other(some), [a.shapes[k] for k in rows[some].tolist()]
        if exceeds_float64(x) or exceeds_float64(y):
            until = np.cumsum(number)[:-1]
            pairs = zip(np.split(x, until), np.split(y, until), shapes, strict=True)
            return [summary([sum_up(p, q, 0)], shape, len(shape)) for p, q, shape in pairs]
        return _of_values(x, y, number, shapes)

    done = 0
    for found in in_order(function, blocks(), threads, 16 * total):
        some = rows[done : done + len(found)]
        done += len(found)
        meter.add(8 * int(counts[some].sum()))
        yield from zip([a.names[k] for k in some.tolist()], found, strict=True)


def _numbers(tensors: Tensors, rows: Array) -> Callable[[slice], Array]:
    """Reads the elements of some of these rows, one tensor after the other: integers as such, others as float64."""
    number = int(tensors.ranges.numbers[rows[0]])
    floating = dtypes.BY_NUMBER[number].floating
    targets = np.full(len(tensors), _F64, np.uint8) if floating else None
    spans = Spans.of(tensors, targets).pick(rows)
    dtype = np.dtype(np.float64) if floating else dtypes.element_dtype(number)

    def read(some: slice) -> Array:
        wanted = spans.pick(some)
        values = np.empty(int(wanted.lengths.sum()) // dtype.itemsize, dtype)
        wanted.joined().fill(values.view(np.uint8), threads=1)
        values = native_order(values)
        return values if values.dtype.kind in "iu" else values.astype(np.float64, copy=False)

    return read


def _of_values(x: Array, y: Array, counts: Array, shapes: list[tuple[int, ...]]) -> list[TensorDiff]:
    """The differences of tensors that stand one after the other, none of them empty."""
    whole = x.dtype.kind in "iu" and y.dtype.kind in "iu"
    x, y = x.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
    ends = np.cumsum(counts)
    starts = ends - counts
    finite, nonfinite = counts, np.zeros(len(counts), np.int64)
    with np.errstate(invalid="ignore", over="ignore"):
        both = np.isfinite(x) & np.isfinite(y)
        if not both.all():
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            finite = np.add.reduceat(both, starts, dtype=np.int64)
            nonfinite = np.add.reduceat(~both & ~same, starts, dtype=np.int64)
            x, y = np.where(both, x, 0.0), np.where(both, y, 0.0)
        difference = np.abs(x - y)
        largest = np.maximum.reduceat(difference, starts)
        squares, dot, norm_a, norm_b = (
            np.add.reduceat(product, starts) for product in (difference * difference, x * y, x * x, y * y)
        )
        unequal = np.add.reduceat(difference != 0, starts, dtype=np.int64) + nonfinite
        rms = np.sqrt(squares / np.maximum(finite, 1))
        cosine = np.clip(dot / (np.sqrt(norm_a) * np.sqrt(norm_b)), -1.0, 1.0)  # nan where one of them is zero
    cosine[unequal == 0] = 1.0
    places = np.flatnonzero(difference == np.repeat(largest, counts))
    at = places[np.searchsorted(places, starts)] - starts
    if whole:
        largest = largest.astype(np.int64)
    columns = zip(*(column.tolist() for column in (largest, at, rms, cosine, unequal, nonfinite)), shapes, strict=True)
    with paused(len(counts)):
        return [
            TensorDiff(most, index_of(where, shape) if most > 0 else None, mean, angle, number, infinite)
            for most, where, mean, angle, number, infinite, shape in columns
        ]


def index_of(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element in C order."""
    index = []
    for length in reversed(shape):
        element, k = divmod(element, length)
        index.append(k)
    return tuple(reversed(index))
