"""Scales and zero points: packed like codes and unpacked here, or handed to the C core as they are stored.

The core converts stored scales block by block, so that no float32 copy of them is allocated. It cannot report a scale
that is not finite, so such scales are left to the float32 path, which names the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.packing import COLUMNS, WORDS, Grid, Packing, Zeros, by_columns

# ---- zero points ----


# Nibbles of the eight codes of a word, in the order of AWQ's kernels.
_PERMUTED = (0, 4, 1, 5, 2, 6, 3, 7)

# Reads bytes of the stored zero points: first byte, and number of bytes.
Read = Callable[[int, int], Array]


def read_codes(zeros: Zeros, grid: Grid, read: Read, matrices: tuple[int, int], at: tuple[slice, slice]) -> Array:
    """Return codes of the grid as uint32 [matrices, rows, columns]."""
    rows, columns = at
    if zeros.layout == COLUMNS:
        low, words = _down(zeros, grid, read, matrices, rows)
        down: Array = _unpacked(words, zeros, rows, low).swapaxes(1, 2)[..., columns]
        return down
    return _unpacked(_along(zeros, grid, read, matrices, rows), zeros, columns)


def words_for(zeros: Zeros, count: int) -> int:
    """Return the number of 32-bit words for this many codes."""
    return -(-count // zeros.word_codes) if zeros.word_codes else -(-count * zeros.bits // 32)


def _along(zeros: Zeros, grid: Grid, read: Read, matrices: tuple[int, int], rows: slice) -> Array:
    """Return the words of rows of the grid, if codes run along the rows."""
    first, count = matrices
    width = words_for(zeros, grid.columns)
    whole = count > 1
    low, high = (0, grid.rows) if whole else (rows.start, rows.stop)
    raw = read((first * grid.rows + low) * width * 4, count * (high - low) * width * 4)
    words: Array = raw.view("<u4").reshape(count, high - low, width)
    return words[:, rows] if whole else words


def _down(zeros: Zeros, grid: Grid, read: Read, matrices: tuple[int, int], rows: slice) -> tuple[int, Array]:
    """Return the first word and the words, columns first, of rows of the grid, if codes run down the rows."""
    first, count = matrices
    stored = words_for(zeros, grid.rows)
    low, high = 0, stored
    if count == 1 and rows.stop > rows.start:
        low = _word_of(zeros, rows.start)
        high = min(_word_of(zeros, rows.stop - 1) + 2, stored)
    raw = read((first * stored + low) * grid.columns * 4, count * (high - low) * grid.columns * 4)
    return low, raw.view("<u4").reshape(count, high - low, grid.columns).swapaxes(1, 2)


def _word_of(zeros: Zeros, index: int) -> int:
    return index // zeros.word_codes if zeros.word_codes else index * zeros.bits // 32


def _unpacked(words: Array, zeros: Zeros, span: slice, low: int = 0) -> Array:
    """Return the codes in a span of the last axis; ``words`` begins with word ``low``."""
    bits = zeros.bits
    per_word = zeros.word_codes or (0 if 32 % bits else 32 // bits)
    mask = np.uint32((1 << bits) - 1)
    if per_word:
        order = np.array(_PERMUTED if zeros.layout == WORDS or zeros.permuted else range(per_word), np.uint32)
        begin = span.start // per_word
        span_words = words[..., begin - low : -(-span.stop // per_word) - low]
        codes = (span_words[..., None] >> order * np.uint32(bits) & mask).reshape(
            *span_words.shape[:-1], span_words.shape[-1] * per_word
        )
        unpacked: Array = codes[..., span.start - begin * per_word : span.stop - begin * per_word]
        return unpacked
    index = np.arange(span.start, span.stop)
    word, shift = index * bits // 32, index * bits % 32
    codes = words[..., word - low] >> shift.astype(np.uint32)
    straddling = np.flatnonzero(shift + bits > 32)
    if straddling.size:
        left = (32 - shift[straddling]).astype(np.uint32)
        codes[..., straddling] |= words[..., word[straddling] + 1 - low] << left
    masked: Array = codes & mask
    return masked


def only_code(zeros: Zeros, grid: Grid, read: Read, matrices: int) -> int | None:
    """Return the only code of a grid with codes along its rows, as in symmetric weights; None if codes differ."""
    if not matrices * grid.rows * grid.columns or zeros.layout == COLUMNS:
        return None
    words = _along(zeros, grid, read, (0, matrices), slice(0, grid.rows)).reshape(-1, words_for(zeros, grid.columns))
    if 32 % zeros.bits == 0 and grid.columns * zeros.bits % 32 == 0:
        if (words != words[0, 0]).any():
            return None
        words = words[:1, :1]
        span = slice(0, 32 // zeros.bits)
    else:
        span = slice(0, grid.columns)
    first = None
    for row in words:  # row by row: all codes would take eight times the memory of the words
        codes = _unpacked(row, zeros, span)
        first = codes[0] if first is None else first
        if (codes != first).any():
            return None
    return None if first is None else int(first)


def added_by(zeros: Zeros, only: int | None) -> int | None:
    """Return the number that writers add to codes, 0 or 1, given the only code; None if weights are not symmetric."""
    middle = 1 << zeros.bits - 1
    return middle - only if only in (middle - 1, middle) else None


def settled(zeros: Zeros, only: int | None) -> Zeros:
    """Return zero points with ``added`` resolved by their only code; see `Zeros.symmetric`."""
    added = added_by(zeros, only) if zeros.symmetric else None
    return zeros._replace(symmetric=False, added=zeros.added if added is None else added)


def read_numbers(
    zeros: Zeros, grid: Grid, read: Read, matrices: tuple[int, int], at: tuple[slice, slice], *, table: Array
) -> Array:
    """Return values of the grid as float32 [matrices, rows, columns]."""
    numbers = numbers_of(zeros, np.arange(1 << zeros.bits, dtype=np.uint32), table)
    per_word = 32 // zeros.bits
    if zeros.layout == COLUMNS or 8 % zeros.bits or zeros.word_codes not in (0, per_word):
        return np.take(numbers, read_codes(zeros, grid, read, matrices, at), mode="clip")
    # Look up whole bytes: unpacking single codes would take as long as restoring the weights.
    rows, columns = at
    begin, per_byte = columns.start // per_word, 8 // zeros.bits
    words = _along(zeros, grid, read, matrices, rows)[..., begin : -(-columns.stop // per_word)]
    of_byte = np.arange(256)[:, None] >> np.arange(per_byte) * zeros.bits & (1 << zeros.bits) - 1
    lanes = np.dtype((np.void, 4 * per_byte))
    values = np.take(numbers[of_byte].view(lanes)[:, 0], np.ascontiguousarray(words).view(np.uint8)).view(np.float32)
    if zeros.layout == WORDS:  # see _PERMUTED
        values = values.reshape(-1, 2, 4).swapaxes(1, 2).reshape(values.shape)
    skipped = columns.start - begin * per_word
    selected: Array = values[..., skipped : skipped + columns.stop - columns.start]
    return selected


def numbers_of(zeros: Zeros, codes: Array, table: Array) -> Array:
    """Return the values of codes. The addition of ``added`` wraps within the bits of a code."""
    numbers: Array = table[codes + np.uint32(zeros.added) & np.uint32((1 << zeros.bits) - 1)]
    return numbers


# ---- as stored ----


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
