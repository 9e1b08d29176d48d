"""Unpack zero points that are packed like codes, and look up their values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...base.arrays import Array
from ...base.packing import COLUMNS, WORDS, Grid, Zeros

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
