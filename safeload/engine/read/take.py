"""Read rows of a tensor by index: positions of the first axis, in any order."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, ArraySpec, array_over, byteswapped
from ...base.messages import error_about
from ...base.native import lib
from ...base.packing import Packed
from ...base.scheme import INT8
from ...base.text import tensor_named
from ...errors import UnsupportedError
from ..codes.packed_rows import PartRows, row_block, rows_of
from ..codes.quantized_tensor import QuantizedTensor
from ..run import jobs
from ..run.cast import astype
from ..run.job import Job, Origin
from ..run.memory import address_of, private_array
from ..run.slice import TAKE, read_rows, read_slice
from ..run.weight_file import WeightFile
from .delivery import read_scale
from .load import load_tensors, parse_target
from .tensors import Tensors

# Bytes of rows, as stored or as values, that are read and converted together.
_CHUNK = 64 << 20


def positions_in(rows: Any, count: int, name: str) -> Array:
    """Return the positions that ``rows`` selects, as int64 from 0 on."""
    about = tensor_named(name)
    if isinstance(rows, (slice, str, bytes)) or rows is None or (not isinstance(rows, range) and _is_integer(rows)):
        kind = type(rows).__name__
        raise TypeError(f"{about}: rows must be a list, an integer array or a mask, got {kind}: {_ADVICE}")
    indices = np.arange(rows.start, rows.stop, rows.step) if _is_plain_range(rows) else np.asarray(rows)
    if indices.ndim != 1:
        raise TypeError(f"{about}: rows must have 1 axis, got {indices.ndim}")
    if indices.dtype.kind == "b":
        if len(indices) != count:
            raise IndexError(f"{about}: the mask must have {count:,} elements, got {len(indices):,}")
        return np.flatnonzero(indices).astype(np.int64)
    if not len(indices):
        return np.empty(0, np.int64)
    if indices.dtype.kind == "O":  # integers beyond 64 bits, or no numbers
        kinds = [type(index).__name__ for index in indices if not _is_integer(index)]
        if kinds:
            raise TypeError(f"{about}: rows must be integers, got {kinds[0]}")
    elif indices.dtype.kind not in "iu":
        raise TypeError(f"{about}: rows must be integers or a boolean mask, got {indices.dtype}")
    outside = (indices >= count) | (indices < -count)
    if outside.any():
        at = int(outside.argmax())
        limits = f"expected {-count} to {count - 1}" if count else "it has no rows"
        raise IndexError(f"{about}: row {indices[at]} is out of range: {limits} (element {at} of rows)")
    indices = indices.astype(np.int64)
    return np.where(indices < 0, indices + count, indices)


_ADVICE = "get_slice(name)[...] reads a range or a single row"


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, np.ndarray) or value.ndim == 0


def _is_plain_range(rows: Any) -> bool:
    """Return whether NumPy can hold a range in 64 bits."""
    return isinstance(rows, range) and max(map(abs, (rows.start, rows.stop, rows.step))) < 1 << 62


def take_rows(file: WeightFile, index: int, rows: Any, dtype: Any, name: str) -> Any:
    """Read rows of a tensor; see `Checkpoint.take`. ``name`` is its name in messages."""
    table = file.table
    table.refuse_unknown([index], file.path)
    packed, target = table.packed(index), parse_target(dtype)
    shape = table.shape(index) if packed is None else packed.packing.shape
    if not shape:
        raise error_about(UnsupportedError, "has no axes, so it has no rows: use checkpoint[name]", tensor=name)
    positions = positions_in(rows, shape[0], name)
    if packed is not None:
        if target is None:
            return _packed_as_stored(packed, positions, name)
        unique, inverse = np.unique(positions, return_inverse=True)
        return _ordered(_packed_values(file, index, packed, unique, target), inverse)
    return _stored_rows(file, index, positions, target)


def _ordered(rows: Array, inverse: Array) -> Array:
    """Return rows in the requested order, with duplicates."""
    if len(inverse) == len(rows) and (inverse[1:] > inverse[:-1]).all():
        return rows
    return rows[inverse]


# ---- plain tensors, int8 and blocks ----


def _stored_rows(file: WeightFile, index: int, positions: Array, target: dtypes.Dtype | None) -> Any:
    table = file.table
    row, shape, name = table.row(index), table.shape(index), table.names[index]
    scale = table.scale(index)
    unique, inverse = np.unique(positions, return_inverse=True)
    inner = math.prod(shape[1:])
    if inner % row.block:
        if target is None:
            raise _cuts(name, row.name, row.block)
        return _ordered(_values_of_blocks(file, index, unique, target), inverse)
    if row.blocked or (scale is not None and table.is_quantized(index)):
        return _quantized(file, index, unique, inverse, target)
    converted = row.loaded_as(target)
    if converted is row or table.strides(index) is not None:
        rows = _plain(file, index, unique)
        return _ordered(rows if converted is row else astype(rows, dtypes.element_dtype(converted.number)), inverse)
    values = private_array((len(unique), *shape[1:]), dtypes.element_dtype(converted.number))
    for chunk in _chunks(unique, max(row.nbytes(inner), converted.nbytes(inner))):
        values[chunk] = _converted(_plain(file, index, unique[chunk]), row, converted, (-1, *shape[1:]), name)
    return _ordered(values, inverse)


def _chunks(rows: Array, nbytes: int) -> Iterator[slice]:
    """Divide rows into slices of limited size, given the bytes of a row."""
    step = max(1, _CHUNK // max(1, nbytes))
    return (slice(first, first + step) for first in range(0, len(rows), step))


def _converted(rows: Array, row: dtypes.Dtype, target: dtypes.Dtype, shape: tuple[int, ...], name: str) -> Array:
    """Convert stored elements of a floating or block dtype."""
    if not (row.packed or row.blocked):
        return astype(rows, dtypes.element_dtype(target.number))
    stored = np.ascontiguousarray(rows).view(np.uint8)
    count = stored.size // row.block_bytes * row.block
    values = private_array((count,), dtypes.element_dtype(target.number))
    if count:
        batch = jobs.Batch()
        place = None, address_of(stored), batch.into(values), stored.nbytes, row.number, target.number
        batch.add(Job(*place, lib.SL_OP_CONVERT, origin=Origin(name, (count,))))
        batch.run()
    return values.reshape(shape) if values.size else values.reshape([max(0, size) for size in shape])


def _plain(file: WeightFile, index: int, rows: Array) -> Array:
    """Read rows of a tensor as stored, in the order of this machine."""
    layout = file.table.layout(index)
    if layout.strides is not None:
        return _strided(file, index, layout, layout.strides, rows)
    count = file.table.shape(index)[0]
    pitch = (layout.end - layout.begin) // max(1, count)
    shape = layout.shape[1:] if layout.shape[:1] == (count,) else (pitch,)
    raw = read_rows(file, layout.begin, pitch, rows, origin=Origin(file.table.names[index], file.table.shape(index)))
    array = raw.view(layout.dtype).reshape(len(rows), *shape)
    return jobs.native_order(byteswapped(array) if layout.big_endian else array)


def _strided(file: WeightFile, index: int, layout: ArraySpec, strides: tuple[int, ...], rows: Array) -> Array:
    """Read rows of a tensor with strides: together if each has bytes of its own, else with the whole tensor."""
    itemsize = layout.dtype.itemsize
    inner = list(zip(layout.shape[1:], strides[1:], strict=True))
    extent = itemsize + sum((size - 1) * stride for size, stride in inner)
    if strides[0] < extent or 0 in layout.shape:
        return np.ascontiguousarray(read_slice(file, index, (Ellipsis,), TAKE)[rows])
    origin = Origin(file.table.names[index], layout.shape)
    raw = read_rows(file, layout.begin, strides[0], rows, width=extent, origin=origin)
    shape = (len(rows), *layout.shape[1:])
    view = array_over(np.ascontiguousarray(raw), layout.dtype, shape, 0, (extent, *strides[1:]))
    return jobs.native_order(byteswapped(view.copy()) if layout.big_endian else view.copy())


def _values_of_blocks(file: WeightFile, index: int, rows: Array, target: dtypes.Dtype) -> Array:
    """Return values of rows that cut blocks: their blocks are read, or all if rows and blocks are of other lengths."""
    table = file.table
    row, shape, name = table.row(index), table.shape(index), table.names[index]
    begin, _ = table.byte_range(index)
    if len(shape) > 1:
        loaded, _ = load_tensors(Tensors.of([(name, file, index)]), backend="pread", dtype=target.name)
        values: Array = loaded[name][rows]
        return values
    blocks = np.unique(rows // row.block)
    raw = read_rows(file, begin, row.block_bytes, blocks, origin=Origin(name, shape))
    values = _converted(raw, row, row.loaded_as(target), (len(blocks), row.block), name)
    picked: Array = values[np.searchsorted(blocks, rows // row.block), rows % row.block]
    return picked


def _quantized(
    file: WeightFile, index: int, unique: Array, inverse: Array, target: dtypes.Dtype | None
) -> QuantizedTensor | Array:
    """Read rows of int8 with scales, or of blocks."""
    table = file.table
    row, shape, scale = table.row(index), table.shape(index), table.scale(index)
    axis = None if scale is None else scale.axis
    factors = None if scale is None else read_scale(file, scale)

    def tensor(rows: Array) -> QuantizedTensor:
        data = _plain(file, index, rows)
        picked = factors[rows] if factors is not None and axis == 0 else factors
        return QuantizedTensor(INT8 if scale is not None else row.name, (len(rows), *shape[1:]), data, picked, axis)

    if target is None:
        whole = tensor(unique)
        data = _ordered(whole.data, inverse)
        picked = _ordered(whole.scale, inverse) if whole.scale is not None and axis == 0 else whole.scale
        return QuantizedTensor(whole.scheme, (len(inverse), *shape[1:]), data, picked, axis)
    values = private_array((len(unique), *shape[1:]), dtypes.element_dtype(target.number))
    for chunk in _chunks(unique, target.nbytes(math.prod(shape[1:]))):
        values[chunk] = tensor(unique[chunk]).dequantize(target.name)
    return _ordered(values, inverse)


# ---- packed tensors ----


def _packed_as_stored(packed: Packed, positions: Array, name: str) -> QuantizedTensor:
    """Read rows without dequantizing them."""
    spec = packed.packing
    parts = {role: PartRows(part) for role, part in packed.parts.items()}
    unit = row_block(spec, parts)
    runs = _runs_of(positions, unit, spec.shape[0]) if unit else None
    if runs is None:
        raise _cuts(name, spec.label, unit)
    changed, arrays = rows_of(spec, parts, runs)
    return QuantizedTensor.of_parts(changed, packed.names(name), arrays)


def _runs_of(positions: Array, unit: int, count: int) -> list[slice] | None:
    """Return positions as runs of whole blocks, of which only the last may end within a block; None if they are not."""
    if not len(positions):
        return [slice(0, 0)]
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    begins, ends = positions[[0, *edges]], positions[[*(edges - 1), -1]] + 1
    whole = ends % unit == 0
    whole[-1] |= ends[-1] == count
    if (begins % unit).any() or not whole.all():
        return None
    return [slice(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _packed_values(file: WeightFile, index: int, packed: Packed, rows: Array, target: dtypes.Dtype) -> Array:
    """Return values of ascending rows: their blocks are read, or the whole tensor if it cannot be sliced."""
    spec, name = packed.packing, file.table.names[index]
    parts = {role: PartRows(part) for role, part in packed.parts.items()}
    unit, inner = row_block(spec, parts), math.prod(spec.shape[1:])
    values = private_array((len(rows), *spec.shape[1:]), dtypes.element_dtype(target.number))
    if not values.size:
        return values
    if not unit:
        loaded, _ = load_tensors(Tensors.of([(name, file, index)]), backend="pread", dtype=target.name)
        return np.ascontiguousarray(loaded[name][rows])
    for first, last in _groups(rows // unit, unit * target.nbytes(inner)):
        chunk = rows[first:last]
        blocks = np.unique(chunk // unit)
        edges = np.flatnonzero(np.diff(blocks) != 1) + 1
        runs = [
            slice(begin * unit, min(end * unit, spec.shape[0]))
            for begin, end in zip(blocks[[0, *edges]].tolist(), (blocks[[*(edges - 1), -1]] + 1).tolist(), strict=True)
        ]
        changed, arrays = rows_of(spec, parts, runs)
        restored = QuantizedTensor.of_parts(changed, packed.names(name), arrays).dequantize(target.name)
        values[first:last] = restored[np.searchsorted(blocks, chunk // unit) * unit + chunk % unit]
    return values


def _groups(blocks: Array, nbytes: int) -> Iterator[tuple[int, int]]:
    """Divide ascending block numbers of rows into groups of limited size, given the bytes of a block's values."""
    distinct = np.concatenate([[0], np.cumsum(np.diff(blocks) != 0)])
    groups = distinct // max(1, _CHUNK // max(1, nbytes))
    edges = (np.flatnonzero(np.diff(groups)) + 1).tolist()
    return zip([0, *edges], [*edges, len(blocks)], strict=True)


def _cuts(name: str, label: str, unit: int) -> UnsupportedError:
    how = f"are taken in whole blocks of {unit}" if unit else "cannot be taken as stored"
    return error_about(UnsupportedError, f": rows of {label} {how}; pass dtype= to dequantize them", tensor=name)
