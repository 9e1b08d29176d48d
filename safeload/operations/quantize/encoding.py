"""Quantize a matrix to the stored parts of an engine's format; csrc/kernels/encode.c computes scales and codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array, index_of
from ...base.native import TIER, ffi, lib
from ...base.text import subject
from ...engine.codes.source import Source, memory_of
from ...engine.run import jobs
from ...engine.run.memory import address_of, private_array, thread_count
from ...errors import RangeError
from ...packed.families import Preset
from ...stores.thread_group import in_order
from ..sources.catalog import Catalog, RestructuredCatalog, TensorRecipe, read_values

# The dtypes of weights that engines quantize.
WEIGHTS = ("BF16", "F16", "F32")
# Columns of a row of weights whose blocks cross rows: whole blocks, and an even number of codes.
_FLAT = 4096
# The largest E2M1 times the largest E4M3.
_NVFP4_MOST = np.float32(2688)
_Result = TypeVar("_Result")

# Weights that are read at once: few enough for the caches, and as many as hide the latency of a network.
_LOCAL, _REMOTE = 1 << 20, 4 << 20
# Threads that read from a network: one reads, while another quantizes.
_REMOTE_READERS = 2
# Bytes of the ranges that all threads read.
_MOST_BYTES = 32 << 20


# ---- the values of a weight, in ranges, on several threads at once ----


class Weights(NamedTuple):
    """The values of a weight, in C order and little-endian."""

    # Returns a range, valid until its context ends; any thread may call it.
    read: Callable[[int, int], AbstractContextManager[Array]]
    step: int  # values to read at once
    readers: int | None = None  # most threads


class Scratch:
    """Memory reused from tensor to tensor."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array over the memory, which grows if necessary."""
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # frees the old memory before new memory is allocated
            self._memory = private_array((size,), np.dtype(np.uint8))
        array: Array = np.ndarray(shape, dtype, self._memory)
        return array


class ScratchBuffers:
    """Scratch memory that threads borrow; it is reused from weight to weight."""

    def __init__(self) -> None:
        self._free: list[Scratch] = []

    @contextmanager
    def borrow(self, count: int, dtype: np.dtype[Any]) -> Iterator[Array]:
        """Lend memory for this many values."""
        try:
            scratch = self._free.pop()
        except IndexError:
            scratch = Scratch()
        try:
            yield scratch.array((count,), dtype)
        finally:
            self._free.append(scratch)


def in_memory(values: Array) -> Weights:
    """Return little-endian values in memory."""
    flat = values.reshape(-1)
    return Weights(lambda begin, end: nullcontext(flat[begin:end]), _LOCAL)


def weights_in(
    catalog: Catalog,
    name: str,
    row: dtypes.Dtype,
    scratch: ScratchBuffers,
    whole: Callable[[tuple[int, ...], np.dtype[np.generic]], Array],  # an array for values that have no ranges
    *,
    threads: int | None,
) -> Weights:
    """Return the values of a weight of a model as a dtype; weights with a merged adapter are computed first."""
    arranged = catalog if isinstance(catalog, RestructuredCatalog) and catalog.for_engine else None
    base, dtype = catalog if arranged is None else arranged.base, dtypes.array_dtype(row.number)
    if arranged is not None and arranged.recipe(name).renamed is None:
        items = arranged.recipe(name).items
        if len(items) > 1:
            packed = any(base.about(source).packed for source in arranged.sources_of(name))
            alone = packed or base.in_memory or base.makes
            return _of_items(arranged, items, row, scratch, alone=alone)
    elif not base.makes:
        value = catalog.values(name)
        if isinstance(value, Source) and value.packed is None:
            return _ranges_of(value, row, scratch)
        return in_memory(jobs.native_order(read_values(value, row, whole(value.shape, dtype), threads)))
    values = whole(catalog.about(name).shape, dtype)
    catalog.read_into(name, row, values, threads)
    return in_memory(jobs.native_order(values))


def _ranges_of(source: Source, row: dtypes.Dtype, scratch: ScratchBuffers) -> Weights:
    dtype = dtypes.array_dtype(row.number)
    if source.file is None and source.row.number == row.number and source.size:
        stored = memory_of(source)
        whole = stored.nbytes == source.size and address_of(stored) == source.offset
        if whole and source.offset % dtype.alignment == 0:
            return in_memory(stored.view(dtype))

    @contextmanager
    def read(begin: int, end: int) -> Iterator[Array]:
        part = source._replace(shape=(end - begin,), offset=source.offset + source.row.nbytes(begin))
        with scratch.borrow(end - begin, dtype) as values:
            yield jobs.native_order(read_values(part, row, values, 1))

    remote = source.file is not None and source.file.remote
    return Weights(read, _REMOTE, _REMOTE_READERS) if remote else Weights(read, _LOCAL)


def _of_items(
    catalog: RestructuredCatalog,
    items: Sequence[TensorRecipe],
    row: dtypes.Dtype,
    scratch: ScratchBuffers,
    *,
    alone: bool,
) -> Weights:
    """Return the values of a stack, of which each strip makes one item."""
    dtype, shape = dtypes.array_dtype(row.number), items[0].shape
    size = math.prod(shape)

    @contextmanager
    def read(begin: int, end: int) -> Iterator[Array]:
        with scratch.borrow(end - begin, dtype) as values:
            for number in range(begin // size, end // size):
                item = values[number * size - begin : (number + 1) * size - begin]
                catalog.make(items[number], row, item.reshape(shape), 1)
            if end == size * len(items):
                catalog.release()
            yield jobs.native_order(values)

    return Weights(read, size, 1 if alone else None)


# ---- encoding ----


class Encoding(NamedTuple):
    """A matrix, or a stack of matrices, to quantize."""

    name: str  # of the weight, for messages
    preset: Preset
    shape: tuple[int, ...]
    row: dtypes.Dtype  # dtype of the weight before it is quantized

    @property
    def columns(self) -> int:
        """The columns of a block."""
        return self.preset.group or max(1, self.shape[-1])

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales."""
        if self.preset.flat:
            return (-(-math.prod(self.shape) // self.columns),)
        *stack, rows, columns = self.shape
        return *stack, -(-rows // self.preset.row_block), -(-columns // self.columns)

    def stored(self, role: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return dtype and shape of a part."""
        code = self.preset.parts[role].dtype
        row = self.row if code is None else dtypes.BY_CODE[code]
        if role == packing.CODES and self.preset.flat:
            shape: tuple[int, ...] = (-(-math.prod(self.shape) // 2), 1)
        elif role == packing.CODES:
            shape = *self.shape[:-1], -(-self.shape[-1] * self.preset.bits // row.bits)
        elif role in (packing.SCALE, packing.BIAS):
            shape = self.grid
        elif role == packing.ZERO:
            rows, columns = self.grid
            shape = -(-rows * self.preset.bits // 32), columns
        else:
            shape = (1,) if role == packing.GLOBAL else self.constants()[role].shape
        return dtypes.array_dtype(row.number), shape

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        stored = map(self.stored, self.preset.parts)
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in stored)

    def constants(self) -> dict[str, Array]:
        """Return the parts that do not depend on the values."""
        return self.preset.constants(self.preset, self.shape, self.row.name)


def encode(
    encoding: Encoding,
    weights: Weights,
    *,
    largest: float | None = None,  # for NVFP4: the largest magnitude in the weight and its fused partners
    codes: Array | None = None,  # memory for the codes
    only_scales: bool = False,
    threads: int | None = None,
) -> dict[str, Array]:
    """Return the parts of a matrix by role, except those of `Encoding.constants`."""
    preset, shape, row = encoding.preset, encoding.shape, encoding.row
    if only_scales:
        codes = np.empty(0, np.uint8)
    elif codes is None:
        dtype, codes_shape = encoding.stored(packing.CODES)
        codes = private_array(codes_shape, dtype)
    blocks = math.prod(encoding.grid)
    scales = np.zeros(blocks, np.float32)
    biases = np.zeros(blocks if packing.BIAS in preset.parts else 0, np.float32)
    zeros = np.zeros(blocks if packing.ZERO in preset.parts else 0, np.int8)
    scale_codes = np.zeros(blocks, np.uint8)
    table = np.array(preset.table, np.float32)
    tensor_scale = np.float32(0) if largest is None else global_scale(largest, row)
    # Blocks that cross rows are never fewer than a row of `_FLAT`.
    columns = _FLAT if preset.flat else max(1, shape[-1])
    row_bytes = columns * preset.bits // 8 if preset.flat else codes.nbytes // max(1, math.prod(shape[:-1]))

    def run(strip: _Strip, values: Array) -> None:
        top = strip.first // columns  # the first row of the strip
        block = top // preset.row_block * -(-columns // encoding.columns)
        fields = {
            "method": preset.method,
            "bits": preset.bits,
            "is_signed": preset.signed,
            "high_first": preset.flat,
            "filler": strip.filler,
            "from": row.number,
            "global": float(tensor_scale),
            "rows": strip.rows,
            "columns": strip.columns,
            "row_block": preset.row_block,
            "group": encoding.columns,
            "row_bytes": row_bytes,
            "table": _pointer(table, "float *"),
            "codes": _pointer(codes, "uint8_t *", top * row_bytes),
            "scales": _pointer(scales, "float *", block),
            "biases": _pointer(biases, "float *", block),
            "zeros": _pointer(zeros, "int8_t *", block),
            "scale_codes": _pointer(scale_codes, "uint8_t *", block),
            "weights": _pointer(values, "void *"),
        }
        position = ffi.new("uint64_t *")
        status = lib.sl_encode(TIER, ffi.new("sl_encoding *", fields), position)
        assert status in (lib.SL_OK, lib.SL_E_RANGE)
        if status == lib.SL_E_RANGE:
            value = float(jobs.native_order(values[position[0] : position[0] + 1])[0])
            index = list(index_of(strip.first + position[0], shape))
            text = f"element {index} is {value}: only finite numbers can be quantized"
            if math.isfinite(value):
                text = f"the scale of the block at {index} does not fit {row.name}: pass dtype="
            raise RangeError(subject(encoding.name) + text, tensor=encoding.name)

    for _ in _each_strip(run, encoding, weights, threads):
        pass
    scale_dtype, scale_shape = encoding.stored(packing.SCALE)
    by_code = scale_dtype.itemsize == 1
    scale = scale_codes.view(scale_dtype) if by_code else _little(scales, scale_dtype)
    parts: dict[str, Array] = {packing.SCALE: scale.reshape(scale_shape)}
    if not only_scales:
        parts[packing.CODES] = codes
    if packing.BIAS in preset.parts:
        parts[packing.BIAS] = _little(biases, scale_dtype).reshape(scale_shape)
    if packing.ZERO in preset.parts:
        parts[packing.ZERO] = _packed_zeros(zeros.reshape(scale_shape), preset.bits)
    if packing.GLOBAL in preset.parts:
        parts[packing.GLOBAL] = _little(np.array([tensor_scale]), np.dtype(np.float32))
    return parts


def largest_in(encoding: Encoding, weights: Weights, threads: int | None = None) -> float:
    """Return the largest magnitude in a matrix; NaN counts as infinity."""

    def largest(_strip: _Strip, values: Array) -> int:
        bits = ffi.new("uint32_t *")
        lib.sl_absmax(TIER, encoding.row.number, _pointer(values, "void *"), values.size, bits)
        return int(bits[0])

    top = max(_each_strip(largest, encoding, weights, threads), default=0)
    return float(np.array([top], np.uint32).view(np.float32)[0])


def global_scale(largest: float, row: dtypes.Dtype) -> np.float32:
    """Return NVFP4's scale of a tensor; each step is rounded to the dtype of the weight, as in PyTorch."""
    dtype = dtypes.array_dtype(row.number)
    smallest = np.float32(2.0**-14 if row.code == "F16" else 2.0**-126)
    with np.errstate(over="ignore"):
        inverse = (np.float32(1) / np.maximum(np.array(largest, np.float32), smallest)).astype(dtype).astype(np.float32)
        scale: np.float32 = (inverse * _NVFP4_MOST).astype(dtype).astype(np.float32)[()]
    return scale if np.isfinite(scale) else np.float32(1)


class _Strip(NamedTuple):
    """Weights that are read together: rows of a matrix, or a run of blocks that cross rows."""

    first: int  # weight
    rows: int
    columns: int
    filler: int = 0  # the code after the last, of an odd number


def _strips(encoding: Encoding, weights: Weights) -> Iterator[_Strip]:
    """Yield the strips of a matrix, of about as many weights as are read at once."""
    preset, size = encoding.preset, math.prod(encoding.shape)
    if size == 0:
        return
    columns = _FLAT if preset.flat else encoding.shape[-1]
    rows = size // columns
    step = max(1, weights.step // columns // preset.row_block) * preset.row_block
    for begin in range(0, rows, step):
        yield _Strip(begin * columns, min(step, rows - begin), columns)
    rest = size - rows * columns
    if rest:  # an odd number of codes is padded with the first code of 0
        below = sum(value < 0 for value in preset.table)
        order = np.argsort(np.array(preset.table, np.float32), kind="stable")
        yield _Strip(rows * columns, 1, rest, int(order[below]))


def _each_strip(
    run: Callable[[_Strip, Array], _Result], encoding: Encoding, weights: Weights, threads: int | None
) -> Iterator[_Result]:
    """Call a function with each strip and its values, on several threads."""

    def read(strip: _Strip) -> _Result:
        with weights.read(strip.first, strip.first + strip.rows * strip.columns) as values:
            return run(strip, values)

    strips, bytes_of = [*_strips(encoding, weights)], encoding.row.nbytes
    longest = bytes_of(strips[0].rows * strips[0].columns) if strips else 0
    workers = min(_MOST_BYTES // max(1, longest), weights.readers or _MOST_BYTES)
    return in_order(read, strips, max(1, min(workers, thread_count(bytes_of(math.prod(encoding.shape)), threads))))


def _pointer(array: Array, kind: str, element: int = 0) -> Any:
    return ffi.cast(kind, address_of(array)) + element if array.size else ffi.NULL


def _little(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return float32 rounded to a dtype, in file byte order."""
    with np.errstate(over="ignore"):
        return jobs.native_order(values.astype(dtype, copy=False))


def _packed_zeros(zeros: Array, bits: int) -> Array:
    """Pack zero points down the rows into words, the first row in the lowest bits."""
    per_word, half = 32 // bits, 1 << bits - 1
    rows, columns = zeros.shape
    padded = np.zeros((-(-rows // per_word), per_word, columns), np.uint8)
    padded.reshape(-1, columns)[:rows] = zeros + np.int8(half)
    shifts = (bits * np.arange(per_word, dtype=np.uint32))[:, None]
    words: Array = np.bitwise_or.reduce(padded.astype(np.uint32) << shifts, axis=1)
    return jobs.native_order(words.view(np.int32))
