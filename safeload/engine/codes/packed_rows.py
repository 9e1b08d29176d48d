"""Slice packed tensors along the first axis, in memory and in files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.packing import Packed, Packing, Part, Zeros
from ..codes import restore
from ..run import jobs
from ..run.jobs import Job, Origin
from ..run.memory import address_of, private_array
from ..run.slice import TAKE, axes_of, read_rows
from . import restore
from .restore import Range, by_columns, bytes_before, row_unit, rows_apart, rows_range, values_before, whole

# Parts that are shared by the first axis, or divided separately.
_OF_ALL = frozenset(
    (
        packing.GROUPS, packing.FACTORS, packing.SHAPE, packing.TABLE, packing.STATE, packing.NESTED,
        packing.NESTED_TABLE,
    )
)  # fmt: skip


def row_block(packed: Packing, parts: Mapping[str, PartRows]) -> int:
    """Return the rows of the first axis that must be sliced together; 0 if the tensor cannot be sliced."""
    if packed.flat:
        assert packed.grid is not None
        unit = packed.grid.column_block * (packed.nested_block if packing.NESTED in parts else 1)
        return unit // math.gcd(unit, math.prod(packed.shape[1:]))
    stacked, shared = len(packed.shape) > 2, _rows_in_word(packed.zeros)
    apart = rows_apart(packed) and len(packed.shape) == 2 and shared > 0
    global_per_rows = packing.GLOBAL in parts and parts[packing.GLOBAL].size > 1
    if not stacked and (not apart or global_per_rows):
        return 0
    unit = 1 if stacked else row_unit(packed) * shared
    if packing.ZERO in parts and packed.zeros is not None and by_columns(packed):
        unit = 32 // math.gcd(packed.zeros.bits, 32)  # whole words
    if packing.NESTED in parts:
        unit = math.lcm(unit, packed.nested_block // math.gcd(packed.nested_block, _scales_per_row(packed)))
    return unit


def _scales_per_row(packed: Packing) -> int:
    grid = packed.grid
    return 0 if grid is None else packed.matrices * grid.rows * grid.columns // max(1, packed.shape[0])


def rows_of(packed: Packing, parts: Mapping[str, PartRows], runs: Sequence[slice]) -> tuple[Packing, dict[str, Array]]:
    """Select runs of rows of a packed tensor along the first axis, and return its packing and parts.

    Parts in memory are views if there is a single run.
    """
    unit, rows, grid = row_block(packed, parts), packed.shape[0], packed.grid
    if not unit:
        raise ValueError(f"{packed.label} {list(packed.shape)} cannot be sliced: dequantize it and slice the values")
    for run in runs:
        if run.start % unit or (run.stop % unit and not (run is runs[-1] and run.stop == rows)):
            raise ValueError(
                f"rows {run.start} to {run.stop} of {packed.label} are not whole blocks of {unit} rows: dequantize it "
                "and slice the values"
            )
    shape = (sum(run.stop - run.start for run in runs), *packed.shape[1:])
    changed, scales = packed._replace(shape=shape), [_times(run, _scales_per_row(packed)) for run in runs]
    sliced: dict[str, Array] = {}
    if packed.flat:
        changed, scales = _rows_of_flat(changed, parts, runs, sliced)
    elif len(shape) > 2:
        changed = changed._replace(matrices=shape[0] * (packed.matrices // max(1, rows)))
        for role, part in parts.items():
            shared = role in _OF_ALL or (grid is not None and grid.shared) or part.size == 1
            if role == packing.CODES or not shared:
                sliced[role] = part.along(runs, rows)
    elif by_columns(packed):
        changed = _rows_by_columns(changed, parts, runs, sliced)
    else:
        changed = _rows_of_matrix(changed, parts, runs, sliced)
    if packing.SHAPE in parts:
        sliced[packing.SHAPE] = parts[packing.SHAPE].whole().copy()
        if len(sliced[packing.SHAPE]) == len(shape):  # else without the first axis
            sliced[packing.SHAPE][0] = shape[0]
    if packing.STATE in parts:
        import json  # as in stores/json_file

        state = {**json.loads(parts[packing.STATE].whole().tobytes()), "shape": list(shape)}
        sliced[packing.STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    if packing.NESTED in parts:
        sliced[packing.NESTED] = parts[packing.NESTED].ranges(_over(scales, packed.nested_block))
    return changed, {role: sliced[role] if role in sliced else part.whole() for role, part in parts.items()}


def _rows_by_columns(
    packed: Packing, parts: Mapping[str, PartRows], runs: Sequence[slice], sliced: dict[str, Array]
) -> Packing:
    """`rows_of` for a matrix with codes in columns; ``sliced`` is extended."""
    count, length, zeros = packed.shape[0], max(1, packed.columns), packed.zeros
    for role in (packing.CODES, packing.SCALE, packing.ZERO):
        if role in parts:  # columns of the part, or words for this many codes
            array = parts[role].whole()
            width = array.shape[-1]
            places = [slice(run.start * width // length, -(-run.stop * width // length)) for run in runs]
            sliced[role] = array[:, places[0] if len(places) == 1 else positions_of(places)]
    assert packed.grid is not None
    if zeros is not None:  # resolved by all codes of the tensor, because a few could be ambiguous
        stored, _owner = grids.in_memory(packed, {packing.ZERO: parts[packing.ZERO].whole()})
        zeros, _ = grids.settled(zeros, packed.grid, stored.parts[packing.ZERO], 1)
    grid = packed.grid._replace(columns=count)
    return packed._replace(
        shape=(count, packed.rows), columns=count, row_bytes=bytes_before(packed, count), grid=grid, zeros=zeros
    )


def _rows_of_matrix(
    packed: Packing, parts: Mapping[str, PartRows], runs: Sequence[slice], sliced: dict[str, Array]
) -> Packing:
    """`rows_of` for a matrix with codes in rows; ``sliced`` is extended."""
    count, grid, block = packed.shape[0], packed.grid, row_unit(packed)
    if packed.layout == packing.MASKED:
        sliced.update(_rows_of_masked(packed, parts, runs))
    else:
        sliced[packing.CODES] = parts[packing.CODES].along(runs, packed.rows)
    if grid is not None and grid.rows > 1:
        for role in (packing.SCALE, packing.ZERO, packing.BIAS):
            if role in parts:
                shared = _rows_in_word(packed.zeros) if role == packing.ZERO else 1
                sliced[role] = parts[role].along(_over(runs, block * shared), -(-grid.rows // shared))
        grid = grid._replace(rows=sum(run.stop - run.start for run in _over(runs, block)))
    elif grid is not None:
        grid = grid._replace(row_block=max(1, count))
    return packed._replace(rows=count, grid=grid)


def _rows_of_masked(packed: Packing, parts: Mapping[str, PartRows], runs: Sequence[slice]) -> dict[str, Array]:
    """Return runs of rows of the mask and of the values."""
    mask = {packing.MASK: parts[packing.MASK].along(runs, packed.rows)}
    codes = parts[packing.CODES]
    if packing.OFFSETS not in parts:
        return {**mask, packing.CODES: codes.along(runs, packed.rows)}
    offsets = parts[packing.OFFSETS].whole()
    values, moved, before = [], [], 0
    for run in runs:
        begin, end = (int(offsets[k]) if k < packed.rows else codes.size for k in (run.start, run.stop))
        if not 0 <= begin <= end <= codes.size or (run.start == 0 != begin):
            raise ValueError(
                f"row_offsets: rows {run.start} to {run.stop} would be values {begin} to {end} of {codes.size}"
            )
        values.append(slice(begin, end))
        moved.append(offsets[run] - offsets[run][:1] + offsets.dtype.type(before))
        before += end - begin
    changed = moved[0] if len(moved) == 1 else np.concatenate([offsets[:0], *moved])
    return {**mask, packing.CODES: codes.ranges(values), packing.OFFSETS: changed}


def _over(runs: Sequence[slice], unit: int) -> list[slice]:
    """Return the runs of blocks that hold runs of rows."""
    return [slice(run.start // unit, -(-run.stop // unit)) for run in runs]


def _times(run: slice, factor: int) -> slice:
    return slice(run.start * factor, run.stop * factor)


def _rows_in_word(zeros: Zeros | None) -> int:
    """Return the number of grid rows in a word of zero points; 0 if zero points straddle words."""
    if zeros is None or zeros.layout != packing.COLUMNS:
        return 1
    return zeros.word_codes or (0 if 32 % zeros.bits else 32 // zeros.bits)


def _rows_of_flat(
    packed: Packing, parts: Mapping[str, PartRows], runs: Sequence[slice], sliced: dict[str, Array]
) -> tuple[Packing, list[slice]]:
    """`rows_of` for a flat tensor with blocks across rows; also returns the runs of its scales."""
    grid, inner, codes = packed.grid, math.prod(packed.shape[1:]), parts[packing.CODES]
    assert grid is not None
    columns, values = packed.shape[0] * inner, [_times(run, inner) for run in runs]
    blocks, size = _over(values, grid.column_block), codes.dtype.itemsize
    if packed.layout == packing.BLOCKS:
        stored = [slice(bytes_before(packed, run.start), bytes_before(packed, run.stop)) for run in values]
        sliced[packing.CODES] = codes.ranges(stored)
    else:  # the last byte of an odd number of values is half used
        last = codes.size * size
        halves = [
            slice(run.start // 2, last if run.stop == packed.columns > run.start else run.stop // 2) for run in values
        ]
        if any(half.start % size or half.stop % size for half in halves):
            raw = jobs.native_order(np.ascontiguousarray(codes.whole())).reshape(-1).view(np.uint8)
            codes, size = PartRows(raw), 1
        sliced[packing.CODES] = codes.ranges([slice(half.start // size, half.stop // size) for half in halves])
        sliced[packing.SCALE] = parts[packing.SCALE].ranges(blocks)
    grid = grid._replace(columns=sum(run.stop - run.start for run in blocks))
    return packed._replace(columns=columns, row_bytes=bytes_before(packed, columns), grid=grid), blocks


def read_index(packed: Packed, index: tuple[Any, ...], dtype: np.dtype[Any], name: str) -> Array:
    """Return elements of a packed tensor of a file, dequantizing only the selected rows of the first axis."""
    shape = packed.packing.shape
    axes, after = axes_of(index, shape, TAKE)
    part = _range_of(packed.packing, span_of(axes))
    row = dtypes.BY_NAME[dtype.name]
    before = values_before(packed.packing, part)
    flat = private_array((part.values,), dtype)
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
    return part_of(values, axes, after, before // max(1, inner))


def span_of(axes: list[range]) -> tuple[int, int]:
    """Return the range of the first axis that holds the selected positions as start and stop."""
    if axes and axes[0]:
        return axes[0][0], axes[0][-1] + 1
    return 0, 0 if axes else 1


def part_of(rows: Array, axes: list[range], after: tuple[Any, ...], first: int) -> Array:
    """Return the selected elements of rows from ``first`` on as a separate array; for ``after`` see `axes_of`."""
    chosen: list[Any] = [slice(axis.start, axis.stop, axis.step) for axis in axes]
    if axes:
        chosen[0] = slice(axes[0].start - first, axes[0].stop - first, axes[0].step)
    view: Array = rows[tuple(chosen)][after]
    return view if view.size == rows.size and view.flags.c_contiguous else view.copy()


def _range_of(packed: Packing, rows: tuple[int, int]) -> Range:
    """Return the smallest range with these rows that can be dequantized alone."""
    start, stop = rows
    if packed.flat:
        block, inner = (1 if packed.grid is None else packed.grid.column_block), math.prod(packed.shape[1:])
        begin = start * inner // block * block
        return Range(0, 1, 0, 1, begin, min(packed.columns, -(-stop * inner // block) * block) - begin)
    if len(packed.shape) > 2:
        matrices = packed.matrices // max(1, packed.shape[0])
        return Range(start * matrices, (stop - start) * matrices, 0, packed.rows, 0, packed.columns)
    if len(packed.shape) == 2 and rows_apart(packed):
        block = row_unit(packed)
        begin = start // block * block
        if by_columns(packed):  # whole words
            stop = -(-stop // block) * block
        return rows_range(packed, 0, begin, stop)
    return whole(packed)


# ---- parts, of which only the selected rows are read from files ----


class PartRows:
    """A part in memory, or of a file: it is read when rows are selected, and at most once as a whole.

    Attributes:
        shape: of the array over the part
        dtype: of its elements
        size: number of elements
    """

    def __init__(self, part: Part | Array) -> None:
        self._array = None if isinstance(part, Part) else part
        if isinstance(part, Part):
            self._part = part
            self.dtype = dtypes.array_dtype(part.row.number)
            self.shape = dtypes.array_shape(part.row, part.shape, part.end - part.begin)
            self.size = math.prod(self.shape)
        else:
            self.dtype, self.shape, self.size = part.dtype, part.shape, part.size

    def whole(self) -> Array:
        """Return the part as an array."""
        if self._array is None:
            self._array = self.ranges([slice(0, self.size)]).reshape(self.shape)
        return self._array

    def along(self, runs: Sequence[slice], length: int) -> Array:
        """Return runs of the first axis, which is divided into ``length`` rows if it has another length.

        A single run of a part in memory is a view.
        """
        divided = self.shape[:1] != (length,)
        if self._array is not None:
            array = self._array.reshape(length, self.size // max(1, length)) if divided else self._array
            view: Array = array[runs[0]] if len(runs) == 1 else array[positions_of(runs)]
            return view
        shape = (self.size // max(1, length),) if divided else self.shape[1:]
        pitch = math.prod(shape) * self.dtype.itemsize
        positions = positions_of(runs)
        unique, inverse = np.unique(positions, return_inverse=True)
        origin = Origin(self._part.name, self._part.shape)
        rows = read_rows(self._part.file, self._part.begin, pitch, unique, origin=origin)
        if len(unique) < len(positions) or (inverse[1:] < inverse[:-1]).any():
            rows = rows[inverse]
        return jobs.native_order(rows.view(self.dtype).reshape(len(positions), *shape))

    def ranges(self, runs: Sequence[slice]) -> Array:
        """Return ranges of the elements in C order, one after the other; a single range in memory is a view."""
        if self._array is not None:
            flat = self._array.reshape(-1)
            view: Array = flat[runs[0]] if len(runs) == 1 else flat[positions_of(runs)]
            return view
        part, size = self._part, self.dtype.itemsize
        array = private_array((sum(run.stop - run.start for run in runs),), self.dtype)
        batch, at = jobs.Batch(), address_of(array) if array.size else 0
        for run in runs:
            nbytes = (run.stop - run.start) * size
            if nbytes:
                origin = Origin(part.name, part.shape)
                batch.add(Job(part.file, part.begin + run.start * size, at, nbytes, origin=origin))
            at += nbytes
        batch.run()
        return jobs.native_order(array)


def positions_of(runs: Sequence[slice]) -> Array:
    """Return the positions in runs."""
    return np.concatenate([np.arange(run.start, run.stop) for run in runs] or [np.empty(0, np.int64)])
