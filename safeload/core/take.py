"""Read rows of a tensor by index: positions of the first axis, in any order."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from . import dtypes, jobs
from .arrays import Array, array_over, byteswapped
from .cast import astype
from .jobs import Job, Origin
from .load import load_tensors, parse_target, read_scale
from .memory import private_array
from .native import address_of, lib
from .packing import INT8
from .quantized_tensor import PartRows, QuantizedTensor, cut_run, row_block, rows_of
from .slice import TAKE, read_rows, read_slice
from .tensors import Tensors
from .text import error_about, tensor_named
from .weight_file import WeightFile

# Values that are read and converted together, at up to 8 bytes.
_CHUNK = 8 << 20


def positions_in(rows: Any, count: int, name: str) -> Array:
    """Return the positions that ``rows`` selects, as int64 from 0 on."""
    about = tensor_named(name)
    if isinstance(rows, (slice, str, bytes)) or rows is None or (not isinstance(rows, range) and _is_integer(rows)):
        kind = type(rows).__name__
        raise TypeError(f"{about}: rows must be a list, an integer array or a mask, got {kind}: {_ADVICE}")
    small = isinstance(rows, range) and max(map(abs, (rows.start, rows.stop, rows.step))) < 1 << 62  # fits 64 bits
    indices = np.arange(rows.start, rows.stop, rows.step) if small else np.asarray(rows)
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


def take_rows(file: WeightFile, index: int, rows: Any, dtype: Any, name: str) -> Any:
    """Read rows of a tensor; see `Checkpoint.take`. ``name`` is its name in messages."""
    table = file.table
    table.refuse_unknown([index], file.path)
    packed, target = table.packed.get(index), parse_target(dtype)
    shape = table.shape(index) if packed is None else packed.packing.shape
    if not shape:
        raise error_about(UnsupportedError, "has no axes, so it has no rows: use checkpoint[name]", tensor=name)
    positions = positions_in(rows, shape[0], name)
    parts = {} if packed is None else {role: PartRows(part) for role, part in packed.parts.items()}
    blocks_of = 0 if packed is None else row_block(packed.packing, parts)
    if packed is not None and target is None:
        runs = _runs(positions)
        if not blocks_of or cut_run(runs, blocks_of, shape[0]) is not None:
            raise _cuts(name, packed.packing.label, blocks_of)
        return rows_of(packed.packing, packed.names(name), parts, runs)
    unique, inverse = np.unique(positions, return_inverse=True)
    ascending = len(inverse) == len(unique) and (inverse[1:] > inverse[:-1]).all()
    name, row, inner = table.names[index], table.row(index), math.prod(shape[1:])
    to, cut = target, packed is None and inner % row.block != 0
    if packed is not None:
        unit, own = blocks_of, packed

        def stored(rows: Array) -> Any:
            runs = [slice(run.start * unit, min(run.stop * unit, shape[0])) for run in _runs(rows)]
            return rows_of(own.packing, own.names(name), parts, runs)

    elif cut:  # the blocks of rows are read, or all if rows and blocks are of other lengths
        if target is None:
            raise _cuts(name, row.name, row.block)
        unit, place = row.block if len(shape) == 1 else 0, (file, table.byte_range(index)[0], row.block_bytes)
        stored = partial(read_rows, *place, origin=Origin(name, shape))
    else:
        unit, wrapped = 1, _wrapper(file, index)
        quantized = row.blocked or index in table.scales
        to = target if quantized else row.loaded_as(target)
        if to is None or to is row or (index in table.strides and not quantized):
            data = _plain(file, index, unique)
            data = wrapped(data if ascending else data[inverse], positions)
            return data if to is None or to is row else astype(data, dtypes.element_dtype(to.number))

        def stored(rows: Array) -> Any:
            return wrapped(_plain(file, index, rows), rows)

    assert to is not None
    if not unit and len(unique):
        arrays, _ = load_tensors(Tensors([file], [name], [index]), backend="pread", dtype=to.name)
        return np.ascontiguousarray(arrays[name][positions])

    def read(blocks: Array) -> Array:
        tensor = stored(blocks)
        if isinstance(tensor, QuantizedTensor):
            return tensor.dequantize(to.name)
        return _converted(tensor, row, to, (-1, *shape[1:]), name)

    values = _values(unique, shape, to, read, unit=max(1, unit))
    return values if ascending else values[inverse]


def _values(
    rows: Array, shape: tuple[int, ...], target: dtypes.Dtype, read: Callable[[Array], Array], unit: int
) -> Array:
    """Return values of ascending rows; ``read`` returns the values of a few blocks of ``unit`` rows."""
    values = private_array((len(rows), *shape[1:]), dtypes.element_dtype(target.number))
    if not values.size:
        return values
    of_rows = rows // unit
    numbers = np.concatenate([[0], np.cumsum(np.diff(of_rows) != 0)])  # of the blocks
    groups = numbers // max(1, _CHUNK // (unit * math.prod(shape[1:])))
    edges = (np.flatnonzero(np.diff(groups)) + 1).tolist()
    for first, last in pairwise([0, *edges, len(rows)]):
        blocks = np.unique(of_rows[first:last])
        picked = read(blocks)
        if unit > 1:
            picked = picked[np.searchsorted(blocks, of_rows[first:last]) * unit + rows[first:last] % unit]
        values[first:last] = picked
    return values


def _converted(rows: Array, row: dtypes.Dtype, target: dtypes.Dtype, shape: tuple[int, ...], name: str) -> Array:
    """Convert stored elements of a floating or block dtype."""
    if not (row.packed or row.blocked):
        return astype(rows, dtypes.element_dtype(target.number))
    stored = np.ascontiguousarray(rows).view(np.uint8)
    values = private_array((stored.size // row.block_bytes * row.block,), dtypes.element_dtype(target.number))
    batch = jobs.Batch()
    place = None, address_of(stored), batch.into(values), stored.nbytes, row.number, target.number
    batch.add(Job(*place, lib.SL_OP_CONVERT, origin=Origin(name, values.shape)))
    batch.run()
    return values.reshape(shape)


def _plain(file: WeightFile, index: int, rows: Array) -> Array:
    """Read rows of a tensor as stored, in the order of this machine."""
    layout, count = file.table.layout(index), file.table.shape(index)[0]
    origin = Origin(file.table.names[index], file.table.shape(index))
    if layout.strides is None:
        pitch = (layout.end - layout.begin) // max(1, count)
        shape = layout.shape[1:] if layout.shape[:1] == (count,) else (pitch,)
        array = read_rows(file, layout.begin, pitch, rows, origin=origin).view(layout.dtype).reshape(len(rows), *shape)
    else:  # rows are read together if each has bytes of its own, else with the whole tensor
        pitch, *strides = layout.strides
        reach = sum((size - 1) * stride for size, stride in zip(layout.shape[1:], strides, strict=True))
        extent = layout.dtype.itemsize + reach
        if pitch < extent or 0 in layout.shape:
            return np.ascontiguousarray(read_slice(file, index, (Ellipsis,), TAKE)[rows])
        raw = np.ascontiguousarray(read_rows(file, layout.begin, pitch, rows, width=extent, origin=origin))
        array = array_over(raw, layout.dtype, (len(rows), *layout.shape[1:]), 0, (extent, *strides)).copy()
    return jobs.native_order(byteswapped(array) if layout.big_endian else array)


def _wrapper(file: WeightFile, index: int) -> Callable[[Array, Array], Any]:
    """Return a function from the data of rows, and their positions, to the tensor of these rows."""
    row, shape, scale = file.table.row(index), file.table.shape(index), file.table.scales.get(index)
    if scale is None:
        return lambda data, rows: QuantizedTensor(row.name, (len(data), *shape[1:]), data) if row.blocked else data
    factors, axis = read_scale(file, scale), scale.axis
    return lambda data, rows: QuantizedTensor(
        INT8, (len(data), *shape[1:]), data, factors[rows] if axis == 0 else factors, axis
    )


def _runs(positions: Array) -> list[slice]:
    """Return positions as runs of neighbours."""
    if not len(positions):
        return [slice(0, 0)]
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    begins, ends = positions[[0, *edges]].tolist(), (positions[[*(edges - 1), -1]] + 1).tolist()
    return list(map(slice, begins, ends))


def _cuts(name: str, label: str, unit: int) -> UnsupportedError:
    how = f"are taken in whole blocks of {unit}" if unit else "cannot be taken as stored"
    return error_about(UnsupportedError, f": rows of {label} {how}; pass dtype= to dequantize them", tensor=name)
