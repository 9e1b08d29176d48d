"""Stored parts: scales and zero points, unpacked here or handed to the C core as they are stored.

The core converts stored scales block by block, so that no float32 copy of them is allocated. It cannot report a scale
that is not finite, so such scales are left to the float32 path, which names the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.native import ffi
from ...base.packing import COLUMNS, WORDS, Grid, Packed, Packing, Part, Zeros
from ..run import jobs
from ..run.jobs import Origin
from ..run.memory import address_of

_NO_BYTES: Array = np.empty(0, np.uint8)

# First matrix and number of matrices, and the rows and columns of their grids.
Place = tuple[tuple[int, int], tuple[slice, slice]]


def read_part(part: Part, begin: int = 0, size: int | None = None) -> Array:
    """Return bytes of a part in the byte order of files: a copy from a file, or a view of an array."""
    first = part.begin + begin
    end = part.end if size is None else first + size
    if part.file is None:
        return np.frombuffer(ffi.buffer(ffi.cast("char *", first), end - first), np.uint8) if end > first else _NO_BYTES
    if isinstance(part.file, np.ndarray):
        return part.file[first:end]
    origin = Origin(part.name, part.shape)
    return jobs.read_small(part.file, np.dtype(np.uint8), (end - first,), first, end, origin=origin)


def in_memory(packed: Packing, arrays: Mapping[str, Array]) -> tuple[Packed, Any]:
    """Return a packed tensor with parts in memory, and the owner of the memory."""
    stored = {role: np.ascontiguousarray(jobs.native_order(array)) for role, array in arrays.items()}
    parts = {}
    for role, array in stored.items():
        begin = address_of(array) if array.size else 0
        row = dtypes.BY_NAME[arrays[role].dtype.name]
        parts[role] = Part(role, None, row, array.shape, begin, begin + array.nbytes)
    return Packed(packed, parts), stored


# ---- zero points ----


# Nibbles of the eight codes of a word, in the order of AWQ's kernels.
_PERMUTED = (0, 4, 1, 5, 2, 6, 3, 7)


def words_for(zeros: Zeros, count: int) -> int:
    """Return the number of 32-bit words for this many codes."""
    return -(-count // zeros.word_codes) if zeros.word_codes else -(-count * zeros.bits // 32)


def _words(zeros: Zeros, grid: Grid, part: Part, place: Place) -> tuple[Array, int]:
    """Return the words of rows of the grid [matrices, rows, columns], of which one axis counts words, and the first."""
    (first, count), (rows, _) = place
    down, low, high = zeros.layout == COLUMNS, 0, grid.rows
    lines, width = (words_for(zeros, grid.rows), grid.columns) if down else (grid.rows, words_for(zeros, grid.columns))
    if count == 1 and not down:
        low, high = rows.start, rows.stop
    elif down:
        high = lines
        if count == 1 and rows.stop > rows.start:
            numerator, denominator = (1, zeros.word_codes) if zeros.word_codes else (zeros.bits, 32)
            low = rows.start * numerator // denominator
            high = min((rows.stop - 1) * numerator // denominator + 2, lines)
    raw = read_part(part, (first * lines + low) * width * 4, count * (high - low) * width * 4)
    return raw.view("<u4").reshape(count, high - low, width), low


def read_codes(zeros: Zeros, grid: Grid, part: Part, place: Place) -> Array:
    """Return codes of the grid as uint32 [matrices, rows, columns]."""
    rows, columns = place[1]
    words, low = _words(zeros, grid, part, place)
    if zeros.layout != COLUMNS:
        return _unpacked(words, zeros, columns)
    down: Array = _unpacked(words.swapaxes(1, 2), zeros, rows, low).swapaxes(1, 2)[..., columns]
    return down


def _unpacked(words: Array, zeros: Zeros, span: slice, low: int = 0) -> Array:
    """Return the codes in a span of the last axis; ``words`` begins with word ``low``."""
    bits, index = zeros.bits, np.arange(span.start, span.stop)
    per_word = zeros.word_codes or (0 if 32 % bits else 32 // bits)
    word, shift = index * bits // 32, index * bits % 32
    if per_word:
        order = _PERMUTED if zeros.layout == WORDS or zeros.permuted else range(per_word)
        word, shift = index // per_word, np.array(order)[index % per_word] * bits
    codes = words[..., word - low] >> shift.astype(np.uint32)
    straddling = np.flatnonzero(shift + bits > 32)
    if straddling.size:
        left = (32 - shift[straddling]).astype(np.uint32)
        codes[..., straddling] |= words[..., word[straddling] + 1 - low] << left
    masked: Array = codes & np.uint32((1 << bits) - 1)
    return masked


def settled(zeros: Zeros, grid: Grid, part: Part, matrices: int) -> tuple[Zeros, int | None]:
    """Return zero points with ``added`` resolved, see `Zeros.symmetric`, and the only code of the grid, if any."""
    only = None if zeros.layout == COLUMNS else _only_code(zeros, grid, part, matrices)
    middle = 1 << zeros.bits - 1
    # Writers add 0 or 1 to codes; symmetric weights have the middle.
    added = middle - only if zeros.symmetric and only in (middle - 1, middle) else zeros.added
    return zeros._replace(symmetric=False, added=added), only


def _only_code(zeros: Zeros, grid: Grid, part: Part, matrices: int) -> int | None:
    """Return the only code of a grid with codes along its rows, as in symmetric weights; None if codes differ."""
    if not matrices * grid.rows * grid.columns:
        return None
    span = slice(0, grid.columns)
    words, _ = _words(zeros, grid, part, ((0, matrices), (slice(0, grid.rows), span)))
    lines = words.reshape(-1, words.shape[-1])
    if 32 % zeros.bits == 0 and grid.columns * zeros.bits % 32 == 0:
        if (lines != lines[0, 0]).any():
            return None
        lines, span = lines[:1, :1], slice(0, 32 // zeros.bits)
    first = int(_unpacked(lines[0], zeros, slice(0, 1))[0])
    # Line by line: all codes would take eight times the memory of the words.
    return first if all((_unpacked(line, zeros, span) == first).all() for line in lines) else None


def read_numbers(zeros: Zeros, grid: Grid, part: Part, place: Place, *, table: Array) -> Array:
    """Return values of the grid as float32 [matrices, rows, columns]."""
    numbers = numbers_of(zeros, np.arange(1 << zeros.bits, dtype=np.uint32), table)
    per_word, columns = 32 // zeros.bits, place[1][1]
    if zeros.layout == COLUMNS or 8 % zeros.bits or zeros.word_codes not in (0, per_word):
        return np.take(numbers, read_codes(zeros, grid, part, place), mode="clip")
    # Look up whole bytes: unpacking single codes would take as long as restoring the weights.
    begin, per_byte = columns.start // per_word, 8 // zeros.bits
    words = _words(zeros, grid, part, place)[0][..., begin : -(-columns.stop // per_word)]
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


def zero_fields(zeros: Zeros, grid: Grid, part: Part, place: Place, table: Array) -> dict[str, Any] | None:
    """Return the fields of an ``sl_packed`` for packed zero points; None if the core does not look them up."""
    rows, columns = place[1]
    down = zeros.layout == COLUMNS
    whole_words = not columns.start % 8 and not (down and rows.start % 8)
    if zeros.bits != 4 or zeros.permuted or zeros.word_codes not in (0, 8) or not whole_words:
        return None
    words, _ = _words(zeros, grid, part, place)
    return {
        "stored_zeros": words.reshape(-1).view(np.uint8)[columns.start * 4 if down else columns.start // 2 :],
        "zero_layout": COLUMNS if down else WORDS if zeros.layout == WORDS else packing.ROWS,
        "zero_bytes": 4 * words.shape[-1],
        "zero_table": np.ascontiguousarray(numbers_of(zeros, np.arange(16, dtype=np.uint32), table), np.float32),
    }


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

# Groups of rows: the core keeps the scales of all groups for 64 columns at a time.
_MOST_GROUPS = 512


def by_columns(packed: Packing) -> bool:
    """Return whether rows of values are columns of codes, which can be dequantized independently."""
    return packed.transpose and packed.layout in (COLUMNS, WORDS)


def can_store(packed: Packing, grid: Grid, *, grouped: bool) -> bool:
    """Return True if the core can convert the scales of a tensor as fast as it restores the codes."""
    if by_columns(packed):
        return grid.column_block == 1 and ((not grouped and packed.bits == 4) or grid.rows <= _MOST_GROUPS)
    return not grouped and (not packed.transpose or packed.bits == 4)


def all_finite(raw: Array, row: dtypes.Dtype) -> bool:
    """Return True if stored numbers are finite; False also for a dtype that is left to the float32 path."""
    if row.code not in _FINITE:
        return False
    mask, bits = _FINITE[row.code][0], raw.view(f"<u{row.block_bytes}")
    for begin in range(0, bits.size, _CHECKED):
        if int((bits[begin : begin + _CHECKED] & bits.dtype.type(mask)).max()) >= mask:
            return False
    return True


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
