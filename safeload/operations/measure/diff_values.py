"""Compare the values of tensors in blocks: many small tensors to a block, many blocks to a large tensor.

Bytes are compared first. Numbers are compared only if the bytes or the dtypes of two tensors differ. The results are
rows of plain values, the fields of `TensorDiff`, because pieces on other machines return them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from threading import local
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...base import dtypes, log
from ...base.arrays import Array, index_of
from ...base.gc_pause import paused
from ...base.native import TIER, ffi, lib
from ...engine.ahead.spans import Spans
from ...engine.codes.pieces import Meter, in_order
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source, of_array
from ...engine.run.jobs import native_order, struct_dtype
from ...engine.run.memory import address_of, aligned_bytes
from ...engine.run.progress import Progress
from ...engine.run.weight_file import is_remote
from ..sources.catalog import Catalog
from ..sources.reading import opened

Shape: TypeAlias = tuple[int, ...]
Row: TypeAlias = Sequence[Any]  # the fields of `TensorDiff`

_EQUAL: Row = (0.0, None, 0.0, 1.0, 0, 0, 0.0, None)

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

# By dtype number: the bytes of an element, and the dtype to compare; complex numbers are compared as two floats.
_SIZES, _PARTS = np.zeros(256, np.int64), np.arange(256, dtype=np.uint8)
for _row in dtypes.TABLE:
    _SIZES[_row.number] = _row.bits // 8
_PARTS[dtypes.BY_CODE["C64"].number], _PARTS[dtypes.BY_CODE["C128"].number] = _F32.number, _F64.number


def common_shape(a: Shape, b: Shape) -> Shape | None:
    """Return the shape of the rows that tensors of different shapes have in common; None if other axes differ too."""
    common = a and b and a[1:] == b[1:] and (min(a[0], b[0]), *a[1:])
    return common if common and common[0] else None


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compare the tensors of a piece; see `run_piece`."""
    with opened(piece, storage_options, ("sources", "against")) as (names, (a, b)):
        with paused(len(names)):
            shapes = {}
            for x, y in zip(a.descriptions(names).values(), b.descriptions(names).values(), strict=True):
                shape = x.shape if x.shape == y.shape else common_shape(x.shape, y.shape)
                if shape is not None:
                    shapes[x.name] = shape
        rows = compare_values(a, b, shapes, threads=threads, progress=None)
        return {"differences": {name: [*row] for name, row in rows.items()}}


def compare_values(
    a: Catalog, b: Catalog, shapes: Mapping[str, Shape], *, threads: int | None, progress: Progress
) -> dict[str, Row]:
    """Compare tensors up to common shapes: plain tensors of local files together, the rest in batches."""
    meter = Meter(progress, 8 * sum(map(math.prod, shapes.values())))
    names = [*shapes]
    rows: dict[str, Row] = {}
    tables = [tensors for tensors in (a.plain(names), b.plain(names)) if tensors is not None and not tensors.remote]
    if len(tables) == 2:
        spans_a, spans_b = map(Spans.of, tables)
        plain = np.flatnonzero(_is_complex(spans_a) == _is_complex(spans_b))
        chosen = [names[k] for k in plain.tolist()]
        compared = _compare(spans_a.pick(plain), spans_b.pick(plain), [shapes[name] for name in chosen], threads, meter)
        rows.update(zip(chosen, compared, strict=True))
    rest = [name for name in names if name not in rows] if len(rows) < len(names) else []
    with _reader(a, rest, threads) as read_a, _reader(b, rest, threads) as read_b:
        for batch in _batches(rest, shapes):
            sources = [_sources(name, shapes[name], (read_a, read_b)) for name in batch]
            spans_a, spans_b = map(_spans, zip(*sources, strict=True))
            compared = _compare(spans_a, spans_b, [shapes[name] for name in batch], threads, meter)
            rows.update(zip(batch, compared, strict=True))
            del sources  # before the next tensors are decoded
            for name in batch:
                log.debug("diff of %s: %s", name, rows[name])
    return rows


# ---- tensors that are not plain, or not in local files ----


def _batches(names: Iterable[str], shapes: Mapping[str, Shape]) -> Iterator[list[str]]:
    """Divide tensors into batches to hold in memory together: a large tensor alone, small tensors up to a block."""
    batch: list[str] = []
    total = 0
    for name in names:
        count = math.prod(shapes[name])
        if batch and total + count > NUMBERS:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += count
    if batch:
        yield batch


_Reader: TypeAlias = Callable[[str, bool], Source | Array]


@contextmanager
def _reader(catalog: Catalog, names: Sequence[str], threads: int | None) -> Iterator[_Reader]:
    """Yield a function that reads tensors in this order, as a source if possible; remote tensors are read ahead."""
    stream = None
    if len(catalog.checkpoints) == 1 and not catalog.in_memory and any(map(is_remote, catalog.weight_files)):
        ahead = [name for name in names if not _is_encoded(catalog, name)]
        stream = catalog.checkpoints[0].stream(ahead, order="given", threads=threads)

    def read(name: str, whole: bool) -> Source | Array:
        if stream is not None and not _is_encoded(catalog, name):
            value: Any = next(stream)[1]
            array: Array = value.dequantize(threads=threads) if isinstance(value, QuantizedTensor) else value
            return array
        encoded = _is_encoded(catalog, name) or catalog.about(name).quantized
        if whole or encoded or is_remote(catalog.place(name).file):
            return catalog.array(name, threads)
        source = catalog.source(name, threads=threads)
        assert isinstance(source, Source)
        return source

    try:
        yield read
    finally:
        if stream is not None:
            stream.close()


def _is_encoded(catalog: Catalog, name: str) -> bool:
    """True if reading the tensor decodes it to float32, or if weight files do not have its dtype."""
    element = catalog.about(name).element
    return element is None or element.packed


def _sources(name: str, shape: Shape, readers: Sequence[_Reader]) -> list[Source]:
    """Return the first rows of the next tensor of both sides, both complex or both real."""
    values = [read(name, False) for read in readers]
    kinds = {value.row.complex if isinstance(value, Source) else value.dtype.kind == "c" for value in values}
    if len(kinds) > 1:
        pairs = zip(values, readers, strict=True)
        arrays = (read(name, True) if isinstance(value, Source) else value for value, read in pairs)
        values = [np.asarray(array, np.complex128) for array in arrays]
    return [_as_source(name, value)._replace(shape=shape) for value in values]


def _as_source(name: str, value: Source | Array) -> Source:
    if isinstance(value, Source):
        return value
    row = dtypes.row_of(value.dtype)
    wider = np.complex128 if value.dtype.kind == "c" else np.float64
    return of_array(name, value.astype(wider) if row is None or row.packed else value)


def _spans(sources: Sequence[Source]) -> Spans:
    files = {file: k for k, file in enumerate(dict.fromkeys(source.file for source in sources))}
    numbers = np.array([source.row.number for source in sources], np.uint8)
    rows = [(files[source.file], source.offset, source.size) for source in sources]
    file, begins, sizes = np.array(rows, np.int64).T
    return Spans([*files], file, begins, sizes, numbers, numbers)


# ---- blocks ----


class _Pieces(NamedTuple):
    """Tensors divided into pieces of at most a block. Small tensors are not divided."""

    tensors: Array  # int64, the tensor of each piece
    begins: Array  # int64, first item of the piece in its tensor
    counts: Array  # int64, items
    last: Array  # bool, True for the last piece of a tensor

    @classmethod
    def of(cls, counts: Array, size: int) -> _Pieces:
        """Divide non-empty tensors with ``counts`` items into pieces of at most ``size`` items."""
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


class _Buffers(local):
    """Memory of a thread for a block of each side."""

    def __init__(self, size: int) -> None:
        self.memory = aligned_bytes(size), aligned_bytes(size)

    def read(self, side: int, spans: Spans) -> Array:
        """Read ranges into consecutive bytes; the next block of this side can overwrite them."""
        spans = spans.joined() if len(spans.sizes) > _FEW_RANGES else spans
        files, file, begins, sizes, sources, targets = spans
        if len(sizes) == 1 and files[int(file[0])] is None and sources[0] == targets[0]:
            return np.frombuffer(ffi.buffer(ffi.cast("char *", int(begins[0])), int(sizes[0])), np.uint8)
        memory = self.memory[side]
        return memory[: spans.fill(memory, threads=1)]


def _is_complex(spans: Spans) -> Array:
    """Return a mask of the ranges with complex numbers."""
    mask: Array = _PARTS[spans.targets] != spans.targets
    return mask


def _compare(a: Spans, b: Spans, shapes: Sequence[Shape], threads: int | None, meter: Meter) -> list[Row]:
    """Compare the first elements of tensors, as many as ``shapes`` have; both of a pair are complex or real."""
    # `meter` gets 8 bytes for each compared element.
    elements = np.array([math.prod(shape) for shape in shapes], np.int64)
    a, b = (_as_parts(spans, elements) for spans in (a, b))
    in_file = np.lexsort((a.begins, a.file))
    in_file = in_file[elements[in_file] > 0]
    differs = a.targets != b.targets
    alike = in_file[~differs[in_file]]
    differs[alike] = _unequal(a.pick(alike), b.pick(alike), elements[alike], threads, meter)
    rows = [_EQUAL] * len(elements)
    in_file = in_file[differs[in_file]]
    of_a, of_b = a.targets[in_file], b.targets[in_file]
    for dtype_a, dtype_b in dict.fromkeys(zip(of_a.tolist(), of_b.tolist(), strict=True)):
        pair = in_file[(of_a == dtype_a) & (of_b == dtype_b)]
        values = _differences(a.pick(pair), b.pick(pair), [shapes[k] for k in pair.tolist()], threads, meter)
        for k, value in zip(pair.tolist(), values, strict=True):
            rows[k] = value
    return rows


def _as_parts(spans: Spans, elements: Array) -> Spans:
    """Cut ranges to their first elements; complex numbers become two floats each."""
    parts = _PARTS[spans.sources]
    return spans._replace(sizes=elements * _SIZES[spans.sources], sources=parts, targets=parts)


# ---- bytes ----


def _unequal(a: Spans, b: Spans, elements: Array, threads: int | None, meter: Meter) -> Array:
    """Return a mask of the tensors with different bytes, for two sides with equal dtypes."""
    differs = np.zeros(len(a.sizes), bool)
    pieces = _Pieces.of(a.lengths, BYTES)
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


def _differences(a: Spans, b: Spans, shapes: Sequence[Shape], threads: int | None, meter: Meter) -> list[Row]:
    """Compare the numbers of tensors that share a dtype in each checkpoint."""
    stored = [dtypes.BY_NUMBER[int(spans.targets[0])] for spans in (a, b)]
    counts = a.sizes // stored[0].block_bytes
    per_element = counts // np.array([math.prod(shape) for shape in shapes], np.int64)
    pieces = _Pieces.of(counts, NUMBERS)
    integers = [row.kind == lib.SL_KIND_INT for row in stored]
    small = all(row.bits <= (_F32.bits if row.floating else _SMALL_INTEGER) for row in stored)
    common = _F32 if small else _F64
    # The core would convert integers to float64 by way of float32.
    targets = [row if integer and not small else common for row, integer in zip(stored, integers, strict=True)]
    sides = [_read_as(spans, target.number) for spans, target in zip((a, b), targets, strict=True)]
    total = int(counts.sum())
    buffers = _Buffers(min(total, 2 * NUMBERS) * _F64.block_bytes)
    progress = 8 * pieces.counts // per_element[pieces.tensors]

    def compare_block(block: slice) -> tuple[list[float], Array]:
        x, y = (
            native_order(buffers.read(side, spans.pick(block)).view(dtypes.element_dtype(targets[side].number)))
            for side, spans in enumerate(sides)
        )
        floats = [values.astype(common.name, copy=False) for values in (x, y)]
        counts = np.ascontiguousarray(pieces.counts[block], np.uint64)
        sums = np.zeros(len(counts), _DIFFERENCE)
        places = [ffi.cast("void *", address_of(values)) for values in floats]
        lengths, records = ffi.from_buffer("uint64_t[]", counts), ffi.from_buffer("sl_difference[]", sums)
        lib.sl_differ(TIER, common.number, *places, lengths, len(counts), records)
        largest = sums["largest"].tolist()
        # If any integer is larger than _EXACT, so is the sum of squares larger than its square.
        wide = np.zeros(len(counts), bool)
        for values, norm in ((x, "norm_a"), (y, "norm_b")):
            wide |= (values.dtype.kind in "iu") & ~(sums[norm] <= _EXACT**2)
        ends = np.cumsum(pieces.counts[block])
        for k in np.flatnonzero(wide).tolist():
            own = slice(int(ends[k]) - int(counts[k]), int(ends[k]))
            largest[k], sums[k] = _exact_sums(x[own], y[own])
        meter.add(int(progress[block].sum()))
        return largest, sums

    parts = [*in_order(compare_block, pieces.blocks(NUMBERS), threads, 16 * total)]
    largest = [value for part, _ in parts for value in part]
    if all(integers):
        largest = [int(value) for value in largest]
    sums = np.concatenate([part for _, part in parts])
    if len(sums) > len(shapes):
        largest, sums = _added_up(largest, sums, pieces)
    return _rows(largest, sums, per_element, shapes)


def _read_as(spans: Spans, target: int) -> Spans:
    """Convert numbers to a dtype as they are read, in pieces of a block."""
    return spans._replace(targets=np.full_like(spans.targets, target)).divided(
        NUMBERS * dtypes.BY_NUMBER[target].block_bytes
    )


def _added_up(largest: list[float], sums: Array, pieces: _Pieces) -> tuple[list[float], Array]:
    """Add up the pieces of each tensor."""
    first = np.flatnonzero(pieces.begins == 0)
    ends = np.flatnonzero(pieces.last) + 1
    totals, maxima = sums[first], [largest[k] for k in first.tolist()]
    for tensor in np.flatnonzero(ends - first > 1).tolist():
        begin, end = int(first[tensor]), int(ends[tensor])
        parts, total = sums[begin:end], totals[tensor]
        k = max(range(begin, end), key=largest.__getitem__)
        maxima[tensor] = largest[k]
        total["at"] = int(pieces.begins[k]) + int(sums["at"][k])
        for field in ("squares", "dot", "norm_a", "norm_b"):
            total[field] = _total(parts[field].tolist())
        for field in ("unequal", "nonfinite", "finite"):
            total[field] = parts[field].sum()
    return maxima, totals


def _total(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond float64, or infinities of both signs
        return sum(numbers)


def _rows(largest: list[float], sums: Array, per_element: Array, shapes: Sequence[Shape]) -> list[Row]:
    """Return the differences of tensors, given the largest difference and the sums of each."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        rms = np.sqrt(sums["squares"] / np.maximum(sums["finite"], 1))
        # NaN if either tensor is zero.
        cosine = np.clip(sums["dot"] / (np.sqrt(sums["norm_a"]) * np.sqrt(sums["norm_b"])), -1.0, 1.0)
        cosine[sums["unequal"] == 0] = 1.0
        change, norm = np.sqrt(sums["squares"]), np.sqrt(sums["norm_a"])
    unequal = sums["unequal"].tolist()
    norms = [length if count else None for length, count in zip(norm.tolist(), unequal, strict=True)]
    columns = (rms.tolist(), cosine.tolist(), unequal, sums["nonfinite"].tolist(), change.tolist(), norms)
    places = (sums["at"].astype(np.int64) // per_element).tolist()
    with paused(len(shapes)):
        indices = [
            index_of(place, shape) if most > 0 else None
            for most, place, shape in zip(largest, places, shapes, strict=True)
        ]
        return [*zip(largest, indices, *columns, strict=True)]


def _exact_sums(x: Array, y: Array) -> tuple[float, tuple[float, ...]]:
    """Return the largest difference and the ``sl_difference`` of a piece with 64-bit integers, by Python's numbers."""
    finite = np.isfinite(x) & np.isfinite(y)
    a, b = (np.where(finite, values, 0) for values in (x, y))
    exact = [
        np.array([*map(Fraction, values.tolist())], object) if values.dtype.kind == "f" else values.astype(object)
        for values in (a, b)
    ]
    differences = np.abs(exact[0] - exact[1])
    distances, a, b = (values.astype(np.float64) for values in (differences, a, b))
    sizes = distances if "f" in (x.dtype.kind, y.dtype.kind) else differences
    at = int(np.argmax(sizes))
    largest = sizes.item(at)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [float((p * q).sum()) for p, q in ((distances, distances), (a, b), (a, a), (b, b))]
    nonfinite = int(np.count_nonzero(~finite))
    unequal = int(np.count_nonzero(distances)) + nonfinite
    return largest, (largest, at, *sums, unequal, nonfinite, x.size - nonfinite)
