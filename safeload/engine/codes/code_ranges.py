"""Ranges of packed tensors that can be dequantized alone: whole matrices, rows of one, or blocks of a flat row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ...base import packing
from ...base.packing import Packing, by_columns

# float32 scales, zeros and biases of one job: a tensor with more is restored in several ranges of rows, so that scales
# do not double the memory of a load.
_GRID_BYTES = 16 << 20

# Columns of codes in a range are a multiple of these: whole words of every width.
_COLUMN_STEP = 32

# Elements of the longest block of a dtype that values are converted to.
_LONGEST_BLOCK = 256


class Range(NamedTuple):
    """Matrices of a packed tensor, all of their rows or, of a single one, some.

    Attributes:
        first: the first matrix.
        matrices: their number.
        row: first row, a multiple of the grid's ``row_block``.
        rows: number of rows.
        column: first column, a multiple of the grid's ``column_block``. Only flat codes, and those whose columns are
            rows of the values, have ranges of columns.
        columns: number of columns; None for all from ``column`` on.
    """

    first: int
    matrices: int
    row: int
    rows: int
    column: int = 0
    columns: int | None = None

    def columns_of(self, packed: Packing) -> int:
        """Number of columns."""
        return packed.columns - self.column if self.columns is None else self.columns


def whole(packed: Packing) -> Range:
    """All of a tensor."""
    return Range(0, packed.matrices, 0, packed.rows)


def ranges_of(packed: Packing) -> Iterator[Range]:
    """Divides a tensor into ranges whose scales take little memory."""
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


def small_ranges(packed: Packing, most: int) -> Iterator[Range]:
    """Divides codes that are stored in another order than their values into ranges of at most ``most`` values.

    Whole matrices are divided only where their columns lie apart (see `by_columns`). No range is larger than the first.
    """
    matrices = most // max(1, packed.rows * packed.columns)
    if matrices == 0 and by_columns(packed):
        yield from _columns_ranges(packed, most // packed.rows)
        return
    for first in range(0, packed.matrices, max(1, matrices)):
        yield Range(first, min(max(1, matrices), packed.matrices - first), 0, packed.rows)


def _columns_ranges(packed: Packing, most: int) -> Iterator[Range]:
    """Divides each matrix into ranges of at most ``most`` columns of codes, if that is a whole word or more."""
    step = max(1, most // _COLUMN_STEP) * _COLUMN_STEP
    for first in range(packed.matrices):
        for column in range(0, packed.columns, step):
            yield rows_range(packed, first, column, min(column + step, packed.columns))


def _masked_ranges(packed: Packing) -> Iterator[Range]:
    """The same where it is the mask that takes memory, and the starts of rows."""
    each, unit = mask_bytes(packed) + 8, 1
    if packed.grid is not None and packed.grid.rows > 1:
        each, unit = each + 4 * packed.grid.columns, packed.grid.row_block
    step = max(1, _GRID_BYTES // (each * unit)) * unit
    for row in range(0, packed.rows, step):
        yield Range(0, 1, row, min(step, packed.rows - row))


def mask_bytes(packed: Packing) -> int:
    """Bytes of a row of a mask."""
    return -(-packed.columns // 8)


def rows_range(packed: Packing, matrix: int, begin: int, end: int) -> Range:
    """Rows [begin, end) of the values of a matrix, which are rows of codes, or columns."""
    if by_columns(packed):
        return Range(matrix, 1, 0, packed.rows, begin, end - begin)
    return Range(matrix, 1, begin, end - begin)


def values_before(packed: Packing, part: Range) -> int:
    """Number of values before those of a range."""
    if by_columns(packed):
        return (part.first * packed.columns + part.column) * packed.rows
    return (part.first * packed.rows + part.row) * packed.columns + part.column


def flat_ranges(packed: Packing, most: int) -> Iterator[Range]:
    """Divides flat codes into ranges of whole blocks, of the scales and of any dtype, if ``most`` values hold one."""
    block = math.lcm(_LONGEST_BLOCK, 1 if packed.grid is None else packed.grid.column_block)
    step = max(1, most // block) * block
    for column in range(0, packed.columns, step):
        yield Range(0, 1, 0, 1, column, min(step, packed.columns - column))


def rows_apart(packed: Packing) -> bool:
    """Whether a range of rows of the values can be dequantized without the others."""
    return by_columns(packed) or (packed.layout != packing.PLANES and not packed.transpose)


def stored_rows(packed: Packing, rows: int) -> int:
    """Number of stored rows that hold some rows of codes."""
    if packed.layout == packing.COLUMNS:
        return rows * packed.bits // 32
    return rows * packed.bits // 8 if packed.layout == packing.PLANES else rows


def bytes_before(packed: Packing, column: int) -> int:
    """Bytes of a stored row before a column that begins at a byte; of all columns, what they need."""
    if packed.layout == packing.COLUMNS:
        return column * 4
    return -(-column * packed.bits // 8)
