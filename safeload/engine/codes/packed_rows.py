"""Slice packed tensors along the first axis, in memory and in files."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.packing import Packed, Packing, Zeros, by_columns, row_unit
from ..run import jobs
from ..run.memory import private_array
from ..run.slice import check_index
from . import masked, restore, zero_points
from .code_ranges import Range, bytes_before, rows_apart, rows_range, values_before, whole

# Parts that are shared by the first axis, or divided separately.
_OF_ALL = frozenset(
    (
        packing.GROUPS, packing.FACTORS, packing.SHAPE, packing.TABLE, packing.STATE, packing.NESTED,
        packing.NESTED_TABLE,
    )
)  # fmt: skip


def rows_of(packed: Packing, parts: Mapping[str, Array], rows: slice) -> tuple[Packing, dict[str, Array]]:
    """Slice a packed tensor in memory along the first axis, and return its packing and parts, as views if possible.

    Raises:
        ValueError: the range is not whole blocks, or its values are not stored together.
    """
    if packed.flat:
        return _rows_of_flat(packed, parts, rows)
    count = rows.stop - rows.start
    grid = packed.grid
    stacked = len(packed.shape) > 2
    shared = _rows_in_word(packed.zeros)
    apart = rows_apart(packed) and len(packed.shape) == 2 and shared > 0
    global_per_rows = packing.GLOBAL in parts and parts[packing.GLOBAL].size > 1
    if not stacked and (not apart or global_per_rows):
        raise ValueError(f"{packed.label} {list(packed.shape)} cannot be sliced: dequantize it and slice the values")
    unit = 1 if stacked else row_unit(packed) * shared
    if packing.ZERO in parts and packed.zeros is not None and by_columns(packed):
        unit = 32 // math.gcd(packed.zeros.bits, 32)  # whole words
    scales = 0 if grid is None else packed.matrices * grid.rows * grid.columns // max(1, packed.shape[0])
    _check_unit(packed, rows, unit)
    if packing.NESTED in parts:
        _check_unit(packed, rows, packed.nested_block // math.gcd(packed.nested_block, scales))
    sliced = dict(parts)
    if packing.SHAPE in sliced:
        sliced[packing.SHAPE] = _with_length(sliced[packing.SHAPE], packed.shape, count)
    if packing.STATE in sliced:
        sliced[packing.STATE] = _with_state(sliced[packing.STATE], (count, *packed.shape[1:]))
    if packing.NESTED in sliced:
        sliced[packing.NESTED] = _nested_of(packed, parts, rows.start * scales, rows.stop * scales)
    if stacked:
        matrices = packed.matrices // max(1, packed.shape[0])  # per index of the first axis
        for role, array in parts.items():
            if role == packing.CODES or _is_apart(packed, role, array):
                sliced[role] = _along(array, rows, packed.shape[0])
        return packed._replace(shape=(count, *packed.shape[1:]), matrices=count * matrices), sliced
    if by_columns(packed):
        return _rows_by_columns(packed, parts, rows, sliced)
    return _rows_of_matrix(packed, parts, rows, sliced)


def _rows_by_columns(
    packed: Packing, parts: Mapping[str, Array], rows: slice, sliced: dict[str, Array]
) -> tuple[Packing, dict[str, Array]]:
    """`rows_of` for a matrix with codes in columns; ``sliced`` is extended."""
    count = rows.stop - rows.start
    for role in (packing.CODES, packing.SCALE, packing.ZERO):
        if role in parts:
            sliced[role] = _columns_of(parts[role], rows, packed.columns)
    assert packed.grid is not None
    grid, zeros = packed.grid._replace(columns=count), packed.zeros
    if zeros is not None:  # resolved by all codes of the tensor, because a few could be ambiguous
        zeros = _settled(packed, zeros, parts[packing.ZERO])
    changed = packed._replace(columns=count, row_bytes=bytes_before(packed, count), grid=grid, zeros=zeros)
    return changed._replace(shape=(count, packed.rows)), sliced


def _rows_of_matrix(
    packed: Packing, parts: Mapping[str, Array], rows: slice, sliced: dict[str, Array]
) -> tuple[Packing, dict[str, Array]]:
    """`rows_of` for a matrix with codes in rows; ``sliced`` is extended."""
    count, grid, block = rows.stop - rows.start, packed.grid, row_unit(packed)
    if packed.layout == packing.MASKED:
        sliced.update(masked.rows_of(packed, parts, rows))
    else:
        sliced[packing.CODES] = _along(parts[packing.CODES], rows, packed.rows)
    if grid is not None and grid.rows > 1:
        whole_blocks = slice(rows.start // block, -(-rows.stop // block))
        for role in (packing.SCALE, packing.ZERO, packing.BIAS):
            if role in parts:
                shared = _rows_in_word(packed.zeros) if role == packing.ZERO else 1
                words = slice(whole_blocks.start // shared, -(-whole_blocks.stop // shared))
                sliced[role] = _along(parts[role], words, -(-grid.rows // shared))
        grid = grid._replace(rows=whole_blocks.stop - whole_blocks.start)
    elif grid is not None:
        grid = grid._replace(row_block=max(1, count))
    return packed._replace(shape=(count, *packed.shape[1:]), rows=count, grid=grid), sliced


def _rows_in_word(zeros: Zeros | None) -> int:
    """Return the number of grid rows in a word of zero points; 0 if zero points straddle words."""
    if zeros is None or zeros.layout != packing.COLUMNS:
        return 1
    return zeros.word_codes or (0 if 32 % zeros.bits else 32 // zeros.bits)


def _rows_of_flat(packed: Packing, parts: Mapping[str, Array], rows: slice) -> tuple[Packing, dict[str, Array]]:
    """`rows_of` for a flat tensor with blocks across rows."""
    grid, inner = packed.grid, math.prod(packed.shape[1:])
    assert grid is not None
    block = grid.column_block
    unit = block * packed.nested_block if packing.NESTED in parts else block
    _check_unit(packed, rows, unit // math.gcd(unit, inner))
    shape = rows.stop - rows.start, *packed.shape[1:]
    columns, begin, end = shape[0] * inner, rows.start * inner, rows.stop * inner
    first, last = begin // block, -(-end // block)
    codes = np.ascontiguousarray(parts[packing.CODES]).reshape(-1)
    begin, end = begin // 2, codes.nbytes if end == packed.columns > begin else end // 2
    if begin % codes.itemsize or end % codes.itemsize:
        codes = jobs.native_order(codes).view(np.uint8)
    sliced = {
        **parts,
        packing.CODES: codes[begin // codes.itemsize : end // codes.itemsize],
        packing.SCALE: parts[packing.SCALE].reshape(-1)[first:last],
        packing.STATE: _with_state(parts[packing.STATE], shape),
    }
    if packing.NESTED in parts:
        sliced[packing.NESTED] = _nested_of(packed, parts, first, last)
    grid = grid._replace(columns=last - first)
    return packed._replace(shape=shape, columns=columns, row_bytes=-(-columns // 2), grid=grid), sliced


def _nested_of(packed: Packing, parts: Mapping[str, Array], first: int, last: int) -> Array:
    """Return the second-level scales of scales [first, last)."""
    block = packed.nested_block
    nested: Array = parts[packing.NESTED].reshape(-1)[first // block : -(-last // block)]
    return nested


def _check_unit(packed: Packing, rows: slice, unit: int) -> None:
    if rows.start % unit or (rows.stop % unit and rows.stop != packed.shape[0]):
        raise ValueError(
            f"rows {rows.start} to {rows.stop} of {packed.label} are not whole blocks of {unit} rows: dequantize it "
            "and slice the values"
        )


def _with_length(stored: Array, shape: tuple[int, ...], length: int) -> Array:
    """Return a stored shape with another length of the first axis."""
    changed: Array = stored.copy()
    if len(stored) == len(shape):
        changed[0] = length
    return changed


def _with_state(stored: Array, shape: tuple[int, ...]) -> Array:
    """Return the JSON of bitsandbytes with another shape."""
    import json  # as in stores/json_file

    state = json.loads(stored.tobytes())
    return np.frombuffer(json.dumps({**state, "shape": list(shape)}).encode(), np.uint8)


def _is_apart(packed: Packing, role: str, array: Array) -> bool:
    """Return True if a part has separate elements for each index of the first axis."""
    shared = packed.grid is not None and packed.grid.shared
    return not (role in _OF_ALL or shared or array.size == 1)


def _along(array: Array, rows: slice, length: int) -> Array:
    """Return a range of the first axis of a part, which is divided into ``length`` rows if necessary."""
    if array.shape[:1] != (length,):
        array = array.reshape(length, array.size // max(1, length))
    view: Array = array[rows]
    return view


def _settled(packed: Packing, zeros: Zeros, stored: Array) -> Zeros:
    grid, raw = packed.grid, np.ascontiguousarray(jobs.native_order(stored)).reshape(-1).view(np.uint8)
    assert grid is not None
    return zero_points.settled(zeros, zero_points.only_code(zeros, grid, lambda at, size: raw[at : at + size], 1))


def _columns_of(array: Array, columns: slice, length: int) -> Array:
    """Return a range of the last axis of a part with ``length`` columns, or words for this many codes."""
    width, length = array.shape[-1], max(1, length)
    view: Array = array[:, columns.start * width // length : -(-columns.stop * width // length)]
    return view


def read_index(packed: Packed, index: tuple[Any, ...], dtype: np.dtype[Any], name: str) -> Array:
    """Return elements of a packed tensor of a file, dequantizing only the selected rows of the first axis.

    Raises:
        IndexError: not a basic index of the tensor.
        FormatError, OSError: the file cannot be read.
    """
    shape = packed.packing.shape
    check_index(index, shape, "checkpoint[name].dequantize()")
    rows = selected(index, shape)
    part = _range_of(packed.packing, rows)
    row = dtypes.BY_NAME[dtype.name]
    elements = part.rows * part.columns_of(packed.packing)
    before = values_before(packed.packing, part)
    flat = private_array((part.matrices * elements,), dtype)
    if flat.size:
        batch = jobs.Batch()
        memory = batch.into(flat) - row.nbytes(before)
        for job in restore.restore_jobs(packed, memory, row.number, name, ranges=(part,)):
            batch.add(job)
        batch.run()
    inner = math.prod(shape[1:])
    if packed.packing.flat and inner:
        first = before // inner + (before % inner > 0)
        skipped = first * inner - before
        flat, before = flat[skipped : skipped + (flat.size - skipped) // inner * inner], first * inner
    values = flat.reshape(flat.size // inner if inner else shape[0], *shape[1:])
    return part_of(values, index, shape, before // max(1, inner))


def part_of(rows: Array, index: tuple[Any, ...], shape: tuple[int, ...], first: int) -> Array:
    """Return the selected elements as a separate array.

    Args:
        rows: the selected range of the first axis.
        index: a basic index of the whole tensor.
        shape: of the whole tensor.
        first: first index of the range.
    """
    view: Array = rows[_inside(index, shape, first)]
    return view if view.size == rows.size and view.flags.c_contiguous else view.copy()


def _inside(index: tuple[Any, ...], shape: tuple[int, ...], first: int) -> tuple[Any, ...]:
    """Translate an index to rows from ``first`` on; an ellipsis makes the result an array even for a single element."""
    if not any(item is Ellipsis for item in index):
        index = (*index, Ellipsis)
    item = index[0]
    if item is Ellipsis or item is None:
        return index
    if not isinstance(item, slice):
        return operator.index(item) % shape[0] - first, *index[1:]
    positions = range(*item.indices(shape[0]))
    if not positions:
        return slice(0, 0), *index[1:]
    stop = positions[-1] - first + (1 if positions.step > 0 else -1)
    return slice(positions[0] - first, None if stop < 0 else stop, positions.step), *index[1:]


def selected(index: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the selected range of the first axis as start and stop."""
    item = index[0] if index else Ellipsis
    if item is Ellipsis or item is None or not shape:
        return 0, shape[0] if shape else 1
    if isinstance(item, slice):
        positions = range(*item.indices(shape[0]))
        return (min(positions), max(positions) + 1) if len(positions) else (0, 0)
    position = operator.index(item) % shape[0]
    return position, position + 1


def _range_of(packed: Packing, rows: tuple[int, int]) -> Range:
    """Return the smallest range with these rows that can be dequantized alone."""
    start, stop = rows
    if packed.flat:
        block, inner = (1 if packed.grid is None else packed.grid.column_block), math.prod(packed.shape[1:])
        begin = start * inner // block * block
        return Range(0, 1, 0, 1, begin, min(packed.columns, -(-stop * inner // block) * block) - begin)
    if len(packed.shape) > 2:
        matrices = packed.matrices // max(1, packed.shape[0])
        return Range(start * matrices, (stop - start) * matrices, 0, packed.rows)
    if len(packed.shape) == 2 and rows_apart(packed):
        block = row_unit(packed)
        begin = start // block * block
        if by_columns(packed):  # whole words
            stop = -(-stop // block) * block
        return rows_range(packed, 0, begin, stop)
    return whole(packed)
