"""Hand scales and zero points to the C core as they are stored, so that no float32 copy of them is allocated.

The core converts them block by block. It cannot report a scale that is not finite, so such scales are left to the
float32 path, which names the first one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.packing import COLUMNS, WORDS, Grid, Packing, Zeros, by_columns
from .zero_points import Read, numbers_of, words_for

# By the dtype's code: bits that are all set only in infinities and NaN, and the largest finite number.
_FINITE = {
    "F16": (0x7C00, 65504.0),
    "BF16": (0x7F80, (2 - 2**-7) * 2.0**127),
    "F8_E4M3": (0x7F, 448.0),
    "F8_E5M2": (0x7C, 57344.0),
    "F8_E8M0": (0xFF, 2.0**127),
}

# Elements whose bits are checked at a time: they stay in the cache, and need no new pages.
_CHECKED = 1 << 15

# First matrix and number of matrices, and the rows and columns of their grids.
Place = tuple[tuple[int, int], tuple[slice, slice]]

# Groups of rows: the core keeps the scales of all groups for 64 columns at a time.
_MOST_GROUPS = 512


def can_store(packed: Packing, grid: Grid, *, grouped: bool) -> bool:
    """Return True if the core can convert the scales of a tensor as fast as it restores the codes."""
    if by_columns(packed):
        return grid.column_block == 1 and ((not grouped and packed.bits == 4) or grid.rows <= _MOST_GROUPS)
    return not grouped and (not packed.transpose or packed.bits == 4)


def all_finite(raw: Array, row: dtypes.Dtype) -> bool:
    """Return True if stored numbers are finite; False also for a dtype that is left to the float32 path."""
    if row.code not in _FINITE:
        return False
    mask, _ = _FINITE[row.code]
    bits = raw.view(f"<u{row.block_bytes}")
    return all(
        int((bits[begin : begin + _CHECKED] & bits.dtype.type(mask)).max()) < mask
        for begin in range(0, bits.size, _CHECKED)
    )


def shared_fields(
    packed: Packing, row: dtypes.Dtype, shared: Array, matrices: tuple[int, int]
) -> dict[str, Any] | None:
    """Return the fields of an ``sl_packed`` for finite shared scales; None if a scale could become infinite."""
    first, count = matrices
    divides = packed.scale_rule == packing.DIVIDED
    if shared.size > 1:
        if shared.size != packed.matrices:
            return None
        shared = shared[first : first + count]
    with np.errstate(all="ignore"):
        largest = np.float32(_FINITE[row.code][1])
        results = np.divide(largest, shared) if divides else np.multiply(largest, shared)
    if not np.isfinite(results).all():
        return None
    return {
        "shared": np.ascontiguousarray(shared, np.float32),
        "shared_step": int(shared.size > 1),
        "shared_divides": divides,
    }


def zero_fields(zeros: Zeros, grid: Grid, read: Read, place: Place, table: Array) -> dict[str, Any] | None:
    """Return the fields of an ``sl_packed`` for packed zero points; None if the core does not look them up."""
    (first, count), (rows, columns) = place
    if zeros.bits != 4 or zeros.permuted or zeros.word_codes not in (0, 8) or columns.start % 8:
        return None
    down = zeros.layout == COLUMNS
    if down and rows.start % 8:
        return None
    stored, low, high = grid.rows, rows.start, rows.stop
    if down:
        stored, low, high = words_for(zeros, grid.rows), low // 8, -(-high // 8)
    if count > 1 and (low, high) != (0, stored):
        return None
    pitch = 4 * (grid.columns if down else words_for(zeros, grid.columns))
    raw = read((first * stored + low) * pitch, ((count - 1) * stored + high - low) * pitch)
    skipped = columns.start * 4 if down else columns.start // 2
    return {
        "stored_zeros": raw[skipped:],
        "zero_layout": COLUMNS if down else WORDS if zeros.layout == WORDS else packing.ROWS,
        "zero_bytes": pitch,
        "zero_table": np.ascontiguousarray(numbers_of(zeros, np.arange(16, dtype=np.uint32), table), np.float32),
    }
