"""Divide packed tensors into ranges to dequantize: whole matrices, rows of a matrix, or blocks of a flat row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ...base import dtypes, packing
from ...base.packing import Packing, by_columns

# float32 scales, zeros and biases of a job. A tensor with more is restored in ranges of rows, so that scales cannot
# double the memory of a load.
_GRID_BYTES = 16 << 20

# Ranges have a multiple of this many columns of codes: whole words of every width.
_COLUMN_STEP = 32

# Elements of the longest block of any target dtype.
_LONGEST_BLOCK = 256


class Range(NamedTuple):
    """Whole matrices of a packed tensor, or rows or columns of a single matrix.

    Only flat codes, and codes with columns that are rows of the values, have ranges of columns.
    """

    first: int  # first matrix
    matrices: int  # number of matrices
    row: int  # first row, a multiple of the grid's `row_block`
    rows: int  # number of rows
    column: int = 0  # first column, a multiple of the grid's `column_block`
    columns: int | None = None  # number of columns; None for all from `column` on

    def columns_of(self, packed: Packing) -> int:
        """Return the number of columns."""
        return packed.columns - self.column if self.columns is None else self.columns


def whole(packed: Packing) -> Range:
    """Return the range of a whole tensor."""
    return Range(0, packed.matrices, 0, packed.rows)


def ranges_of(packed: Packing) -> Iterator[Range]:
    """Divide a tensor into ranges with little memory for scales."""
    grid = packed.grid
    if packed.layout == packing.MASKED and packed.columns:
        yield from _masked_ranges(packed)
        return
    if grid is None or grid.shared or packed.matrices * grid.rows * grid.columns * 4 <= _GRID_BYTES:
        yield whole(packed)
        return
    if packed.flat:
        yield from flat_ranges(packed, _GRID_BYTES // 4 * grid.column_block)
        return
    matrices = max(1, _GRID_BYTES // (grid.rows * grid.columns * 4))
    if matrices == 1 and by_columns(packed):
        yield from _columns_ranges(packed, _GRID_BYTES // (grid.rows * 4))
        return
    step = packed.rows
    if matrices == 1 and rows_apart(packed):
        step = max(1, _GRID_BYTES // (grid.columns * 4)) * grid.row_block
    for first in range(0, packed.matrices, matrices):
        for row in range(0, packed.rows, step):
            yield Range(first, min(matrices, packed.matrices - first), row, min(step, packed.rows - row))


def small_ranges(packed: Packing, limit: int) -> Iterator[Range]:
    """Divide codes that are stored in another order than their values into ranges of at most ``limit`` values.

    Matrices are divided only if their columns are stored separately (see `by_columns`). The first range is the largest.
    """
    matrices = limit // max(1, packed.rows * packed.columns)
    if matrices == 0 and by_columns(packed):
        yield from _columns_ranges(packed, limit // packed.rows)
        return
    for first in range(0, packed.matrices, max(1, matrices)):
        yield Range(first, min(max(1, matrices), packed.matrices - first), 0, packed.rows)


def _columns_ranges(packed: Packing, limit: int) -> Iterator[Range]:
    """Divide each matrix into ranges of at most ``limit`` columns of codes, but at least a whole word."""
    step = max(1, limit // _COLUMN_STEP) * _COLUMN_STEP
    for first in range(packed.matrices):
        for column in range(0, packed.columns, step):
            yield rows_range(packed, first, column, min(column + step, packed.columns))


def _masked_ranges(packed: Packing) -> Iterator[Range]:
    """Divide sparse tensors by the memory of their bitmask and row offsets."""
    row_cost, unit = mask_bytes(packed) + 8, 1
    if packed.grid is not None and packed.grid.rows > 1:
        row_cost, unit = row_cost + 4 * packed.grid.columns, packed.grid.row_block
    step = max(1, _GRID_BYTES // (row_cost * unit)) * unit
    for row in range(0, packed.rows, step):
        yield Range(0, 1, row, min(step, packed.rows - row))


def mask_bytes(packed: Packing) -> int:
    """Return the bytes of a row of the mask."""
    return -(-packed.columns // 8)


def rows_range(packed: Packing, matrix: int, begin: int, end: int) -> Range:
    """Return the range of rows [begin, end) of a matrix of values: rows of codes, or columns."""
    if by_columns(packed):
        return Range(matrix, 1, 0, packed.rows, begin, end - begin)
    return Range(matrix, 1, begin, end - begin)


def values_before(packed: Packing, part: Range) -> int:
    """Return the number of values before a range."""
    if by_columns(packed):
        return (part.first * packed.columns + part.column) * packed.rows
    return (part.first * packed.rows + part.row) * packed.columns + part.column


def flat_ranges(packed: Packing, limit: int) -> Iterator[Range]:
    """Divide flat codes into ranges of up to ``limit`` values, but at least a block of the scales and of any dtype."""
    block = math.lcm(_LONGEST_BLOCK, 1 if packed.grid is None else packed.grid.column_block)
    step = max(1, limit // block) * block
    for column in range(0, packed.columns, step):
        yield Range(0, 1, 0, 1, column, min(step, packed.columns - column))


def rows_apart(packed: Packing) -> bool:
    """Return True if rows of the values can be dequantized separately."""
    return by_columns(packed) or not (packed.transpose or packed.layout in (packing.COLUMNS, packing.PLANES))


def stored_rows(packed: Packing, rows: int) -> int:
    """Return the number of stored rows for this many rows of codes."""
    if packed.layout == packing.COLUMNS:
        return rows * packed.bits // 32
    return rows * packed.bits // 8 if packed.layout == packing.PLANES else rows


def bytes_before(packed: Packing, column: int) -> int:
    """Return the bytes of a stored row before a column, which begins at a byte, or of all columns."""
    if packed.layout == packing.COLUMNS:
        return column * 4
    blocks = dtypes.BLOCK_TYPES.get(packed.numbers) if packed.layout == packing.BLOCKS else None
    return -(-column * packed.bits // 8) if blocks is None else column // blocks.block * blocks.block_bytes
