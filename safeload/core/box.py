"""Read a box of any tensor: a range along each axis, dequantized and converted, from the bytes that hold it.

A packed matrix is cut along both axes, in whole blocks, before it is dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..errors import FormatError
from . import dtypes, jobs, packing
from .arrays import Array
from .cast import astype
from .jobs import Origin
from .memory import private_array
from .native import address_of
from .packing import Packed, Part
from .quantized_tensor import PartRows, QuantizedTensor, read_index, row_block, take_rows
from .restore import by_columns, bytes_before, groups_of, read_part, restore_jobs, settled, words_for
from .slice import read_box as read_stored
from .slice import read_rows
from .tensors import packed_of
from .text import error_about
from .weight_file import WeightFile

# A range along each axis of the loaded array.
Box = Sequence[slice]

# The parts of a matrix that can be cut; a layout with other parts is read by rows.
_CUT = {packing.CODES, packing.SCALE, packing.ZERO, packing.BIAS, packing.GLOBAL, packing.GROUPS, packing.FACTORS}
_CUT |= {packing.SHAPE, packing.TABLE}
# Values that are dequantized together if a tensor is read by rows.
_BAND = 1 << 20


def read_box(file: WeightFile, index: int, box: Box, target: dtypes.Dtype | None, name: str) -> Array:
    """Return the values of a box in new memory; a quantized tensor needs a target."""
    file.table.refuse_unknown([index], file.path)
    row, shape = file.table.row(index), tuple(part.stop - part.start for part in box)
    packed = packed_of(file, index)
    if target is None or (packed is None and not row.packed and not row.blocked):
        array = read_stored(file, index, box)
        return array if target in (None, row) or not row.floating else astype(array, dtypes.array_dtype(target.number))
    if 0 in shape:
        return np.empty(shape, dtypes.element_dtype(target.number))
    if packed is not None:
        values = _of_matrix(file, packed, box, target, name)
    elif row.blocked and file.table.shape(index)[-1] % row.block == 0:
        first, last = box[-1].start // row.block, -(-box[-1].stop // row.block)
        stored = slice(first * row.block_bytes, last * row.block_bytes)
        data = read_stored(file, index, (*box[:-1], stored))
        blocks = QuantizedTensor(row.name, (*shape[:-1], (last - first) * row.block), data)
        values = blocks.dequantize(target.name)[..., box[-1].start - first * row.block :][..., : shape[-1]]
    else:
        values = None
    return np.ascontiguousarray(_by_rows(file, index, box, target, name) if values is None else values)


def _by_rows(file: WeightFile, index: int, box: Box, target: dtypes.Dtype, name: str) -> Array:
    """Read whole rows, a few at a time, or the whole tensor if its rows are not stored apart."""
    packed, dtype = file.table.packed.get(index), dtypes.element_dtype(target.number)
    shape, unit = file.table.shape(index) if packed is None else packed.packing.shape, file.table.row(index).block
    if packed is not None:
        spec, parts = packed
        unit = 0 if by_columns(spec) else row_block(spec, {role: PartRows(part) for role, part in parts.items()})
        if not unit:
            return read_index(packed, tuple(box), dtype, name)
    step = max(1, _BAND // max(1, unit * math.prod(shape[1:]))) * unit
    values = private_array(tuple(part.stop - part.start for part in box), dtype)
    begin, last, inner = box[0].start, box[0].stop, (slice(None), *box[1:])
    while begin < last:  # bands end with a block, so that no byte is read twice
        end = min(last, (begin // step + 1) * step)
        band = take_rows(file, index, range(begin, end), target, name)
        values[begin - box[0].start : end - box[0].start] = band[inner]
        begin = end
    return values


# ---- a packed matrix ----


def _of_matrix(file: WeightFile, packed: Packed, box: Box, target: dtypes.Dtype, name: str) -> Array | None:
    """Return the values of a box of a packed matrix, or None if it cannot be cut along both axes."""
    spec = packed.packing
    stored = (spec.columns, spec.rows) if spec.transpose else (spec.rows, spec.columns)
    layouts = packing.ROWS, packing.COLUMNS, packing.WORDS, packing.BLOCKS
    if spec.flat or spec.matrices != 1 or spec.shape != stored or spec.layout not in layouts:
        return None
    if spec.layout == packing.BLOCKS and spec.numbers not in dtypes.BLOCK_TYPES:
        return None
    if packed.parts.keys() - _CUT or spec.word_codes * spec.bits not in (0, 32):
        return None
    if packing.GLOBAL in packed.parts and math.prod(packed.parts[packing.GLOBAL].shape) > 1:
        return None
    if packing.SHAPE in packed.parts:
        part = packed.parts[packing.SHAPE]
        if tuple(jobs.native_order(read_part(part).view(part.row.name)).tolist()) != spec.shape:
            return None  # reading all of it raises the error
    cut, begins, owner = _cut(packed, *(reversed(box) if spec.transpose else box))
    values = private_array(cut.packing.shape, dtypes.element_dtype(target.number))
    batch = jobs.Batch()
    try:
        batch.jobs += restore_jobs(cut, batch.into(values), target.number, name, owner=owner)
        batch.run()
    except FormatError as error:
        error.path = file.path if error.path is None else error.path
        raise
    begins = begins[::-1] if spec.transpose else begins
    return values[tuple(slice(part.start - at, part.stop - at) for part, at in zip(box, begins, strict=True))]


def _cut(packed: Packed, down: slice, across: slice) -> tuple[Packed, tuple[int, int], list[Array]]:
    """Return the blocks that hold a range of rows and columns, their first row and column, and their owners."""
    spec, stored = packed
    grid, zeros, parts, owner = spec.grid, spec.zeros, dict[str, Part](), list[Array]()

    def hold(role: str, raw: Array) -> None:
        raw = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
        owner.append(raw)
        begin, shape = address_of(raw) if raw.size else 0, (raw.size // stored[role].row.block_bytes,)
        parts[role] = stored[role]._replace(file=None, shape=shape, begin=begin, end=begin + raw.size)

    def window(role: str, pitch: int, lines: range, columns: range, size: int, *, whole: Array | None = None) -> None:
        part, own = stored[role], range(columns.start * size, columns.stop * size)
        end, nbytes = max(0, lines.stop - 1) * pitch * size + own.stop, part.end - part.begin
        if end > nbytes:
            text = f": its {role} has {nbytes:,} bytes, but a row ends at {end:,}"
            raise error_about(FormatError, text, path=part.file.path, tensor=part.name)
        if whole is not None:
            hold(role, whole.reshape(-1, pitch * size)[lines.start : lines.stop, own.start : own.stop])
            return
        origin = Origin(part.name, part.shape)
        hold(role, read_rows(part.file, part.begin, pitch * size, lines, origin=origin, window=own))

    upright = by_columns(spec) or spec.layout == packing.COLUMNS  # groups are of rows
    groups = groups_of(grid, stored[packing.GROUPS], upright) if grid and packing.GROUPS in stored else None
    vertical = zeros is not None and zeros.layout == packing.COLUMNS
    units = [1, 1]  # codes, along both axes, that are stored together or share a scale
    if spec.layout == packing.COLUMNS:
        units[0] = 32 // math.gcd(spec.bits, 32)
    elif spec.layout == packing.BLOCKS:
        units[1] = dtypes.BLOCK_TYPES[spec.numbers].block
    else:
        units[1] = 32 // spec.bits if spec.layout == packing.WORDS else 8 // math.gcd(spec.bits, 8)
    kept = [True, True]  # whether the grid keeps all scales along an axis
    if grid is not None:
        kept = [grid.rows == 1, grid.columns == 1]
        if groups is not None:
            kept[0 if upright else 1] = True
        in_word = 1 if zeros is None else zeros.word_codes or 32 // math.gcd(zeros.bits, 32)
        blocks = grid.row_block * (in_word if vertical else 1), grid.column_block * (1 if vertical else in_word)
        units = [unit if keep else math.lcm(unit, size) for unit, keep, size in zip(units, kept, blocks, strict=True)]
    (top, bottom), (left, right) = (
        (part.start // unit * unit, min(total, -(-part.stop // unit) * unit))
        for part, unit, total in zip((down, across), units, (spec.rows, spec.columns), strict=True)
    )
    lines, ends = range(top, bottom), [bytes_before(spec, left), bytes_before(spec, right)]
    if spec.layout == packing.COLUMNS:
        lines = range(top * spec.bits // 32, -(-bottom * spec.bits // 32))
    elif right == spec.columns:
        ends[1] = spec.row_bytes
    window(packing.CODES, spec.row_bytes, lines, range(*ends), 1)
    if grid is not None:
        rows = range(grid.rows) if kept[0] else range(top // grid.row_block, -(-bottom // grid.row_block))
        columns = range(left // grid.column_block, -(-right // grid.column_block))
        columns = range(grid.columns) if kept[1] else columns
        for role in stored.keys() & {packing.SCALE, packing.BIAS, packing.ZERO}:
            if role != packing.ZERO or zeros is None:
                window(role, grid.columns, rows, columns, stored[role].row.block_bytes)
                continue
            whole = None
            if zeros.symmetric:  # the meaning of a code depends on all of them
                whole = read_part(stored[role])
                part = stored[role]._replace(file=whole, begin=0, end=whole.size)
                zeros, _ = settled(zeros, grid, part, 1)
            codes, pitch = (rows, grid.columns) if vertical else (columns, words_for(zeros, grid.columns))
            first = codes.start // zeros.word_codes if zeros.word_codes else codes.start * zeros.bits // 32
            words = range(first, first + words_for(zeros, len(codes)))
            window(role, pitch, *((words, columns) if vertical else (rows, words)), 4, whole=whole)
        grid = grid._replace(
            row_block=max(1, bottom - top) if grid.rows == 1 else grid.row_block,
            column_block=max(1, right - left) if grid.columns == 1 else grid.column_block,
            rows=len(rows),
            columns=len(columns),
        )
    if groups is not None:
        hold(packing.GROUPS, groups[slice(top, bottom) if upright else slice(left, right)])
    single = packing.FACTORS in stored and math.prod(stored[packing.FACTORS].shape) == 1
    if packing.FACTORS in stored and not single:
        window(packing.FACTORS, spec.columns, range(1), range(left, right), stored[packing.FACTORS].row.block_bytes)
    for role in stored.keys() & {packing.GLOBAL, packing.TABLE, *([packing.FACTORS] if single else [])}:
        hold(role, read_part(stored[role]))
    shape = (right - left, bottom - top) if spec.transpose else (bottom - top, right - left)
    spec = spec._replace(shape=shape, rows=bottom - top, columns=right - left, row_bytes=ends[1] - ends[0])
    return Packed(spec._replace(grid=grid, zeros=zeros), parts), (top, left), owner
