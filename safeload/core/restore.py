"""Dequantize packed tensors in ranges: read and check their scales, and describe their codes to the C core.

The float32 arithmetic follows the libraries that write the checkpoints: each step is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import FormatError
from . import dtypes, jobs, packing
from .arrays import Array
from .cast import astype
from .jobs import Job, Origin
from .native import address_of, ffi, lib, short
from .packing import COLUMNS, WORDS, Grid, Packed, Packing, Part, Zeros
from .slice import read_rows
from .text import error_about, show

# float32 scales, zeros and biases of a job. A tensor with more is restored in ranges of rows, so that scales cannot
# double the memory of a load.
_GRID_BYTES = 16 << 20
# Ranges have a multiple of this many columns of codes, if they can: whole words of every width.
_COLUMN_STEP = 32
# Elements of the longest block of any target dtype.
_LONGEST_BLOCK = 256
# Parts of up to this size are read together, because each use of a file takes longer.
_SMALL_PART = 1 << 20
_ALIGNMENT = 16  # of these parts in memory, for every dtype

# Parts with an element per block, and their fields of an ``sl_packed``: as float32; and as stored, with the dtype.
_GRIDS = {
    packing.SCALE: ("scales", "stored_scales", "scale_dtype"),
    packing.BIAS: ("biases", "stored_biases", "bias_dtype"),
    packing.ZERO: ("zeros", "", ""),
}
# Fields that an ``sl_packed`` has from its `Packing`.
_COPIED = "layout", "bits", "word_codes", "high_first", "transpose", "interleaved"
# Rules of scales that the core does not compute.
_AS_FLOATS = (packing.INVERSE, packing.QUOTIENT, packing.NESTED_RULE)


# ---- ranges ----


class Range(NamedTuple):
    """Whole matrices of a packed tensor, or rows or columns of a single matrix."""

    first: int  # first matrix
    matrices: int  # number of matrices
    row: int  # first row, a multiple of the grid's `row_block`
    rows: int  # number of rows
    column: int  # first column, a multiple of the grid's `column_block`
    columns: int  # number of columns

    @property
    def values(self) -> int:
        """Number of values."""
        return self.matrices * self.rows * self.columns


def whole(packed: Packing) -> Range:
    """Return the range of a whole tensor."""
    return Range(0, packed.matrices, 0, packed.rows, 0, packed.columns)


def ranges_of(packed: Packing) -> Iterable[Range]:
    """Divide a tensor into ranges with little memory for scales."""
    grid = packed.grid
    matrix = 0 if grid is None or grid.shared else 4 * grid.rows * grid.columns  # bytes for a matrix
    if packed.layout == packing.MASKED:  # also for the bitmask and row offsets
        matrix += (_mask_bytes(packed) + 8) * packed.rows
    if packed.matrices * matrix <= _GRID_BYTES:
        return (whole(packed),)
    return divided(packed, _GRID_BYTES * packed.rows * packed.columns // matrix)


def divided(packed: Packing, limit: int) -> Iterator[Range]:
    """Divide a tensor into ranges of up to ``limit`` values, or the least that works; the first is the largest."""
    rows, columns = packed.rows, packed.columns
    matrices = max(1, limit // max(1, rows * columns))
    if packed.flat:
        block = math.lcm(_LONGEST_BLOCK, 1 if packed.grid is None else packed.grid.column_block)
        columns = max(1, limit // block) * block
    elif rows * columns > limit and rows_apart(packed):
        unit = row_unit(packed)
        if by_columns(packed):
            unit = _COLUMN_STEP if limit >= _COLUMN_STEP * rows else unit
            columns = max(1, limit // rows // unit) * unit
        else:
            rows = max(1, limit // columns // unit) * unit
    for first in range(0, packed.matrices, matrices):
        for row in range(0, packed.rows, max(1, rows)):
            for column in range(0, max(1, packed.columns), max(1, columns)):
                sides = min(rows, packed.rows - row), column, min(columns, packed.columns - column)
                yield Range(first, min(matrices, packed.matrices - first), row, *sides)


def values_before(packed: Packing, part: Range) -> int:
    """Return the number of values before a range."""
    if by_columns(packed):
        return (part.first * packed.columns + part.column) * packed.rows
    return (part.first * packed.rows + part.row) * packed.columns + part.column


def rows_apart(packed: Packing) -> bool:
    """Return True if rows of the values can be dequantized separately."""
    return by_columns(packed) or not (packed.transpose or packed.layout in (packing.COLUMNS, packing.PLANES))


def row_unit(packed: Packing) -> int:
    """Return the rows to dequantize together: a block of scales, or the columns that share a word of codes."""
    if packed.layout == packing.WORDS and packed.transpose:
        return 32 // packed.bits
    return 1 if packed.grid is None or by_columns(packed) or packed.grid.rows == 1 else packed.grid.row_block


def bytes_before(packed: Packing, column: int) -> int:
    """Return the bytes of a stored row before a column, which begins at a byte, or of all columns."""
    if packed.layout == packing.COLUMNS:
        return column * 4
    blocks = dtypes.BLOCK_TYPES.get(packed.numbers) if packed.layout == packing.BLOCKS else None
    return -(-column * packed.bits // 8) if blocks is None else column // blocks.block * blocks.block_bytes


# ---- stored parts: scales and zero points, unpacked here or handed to the core as they are stored ----

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


def _read_window(part: Part, pitch: int, lines: range, window: range) -> Array:
    """Return a range of the bytes of each of these lines of ``pitch`` bytes."""
    end, nbytes = max(0, lines.stop - 1) * pitch + window.stop, part.end - part.begin
    if end > nbytes:
        text, path = f": has {nbytes:,} bytes, but a row ends at {end:,}", getattr(part.file, "path", None)
        raise error_about(FormatError, text, path=path, tensor=part.name)
    if len(lines) < 2 or len(window) == pitch:
        return read_part(part, lines.start * pitch + window.start, len(lines) * len(window))
    if part.file is not None and not isinstance(part.file, np.ndarray):
        origin = Origin(part.name, part.shape)
        return read_rows(part.file, part.begin, pitch, lines, origin=origin, window=window).reshape(-1)
    whole = read_part(part, 0, lines.stop * pitch).reshape(-1, pitch)
    return np.ascontiguousarray(whole[lines.start : lines.stop, window.start : window.stop]).reshape(-1)


def floats_of(raw: Array, row: dtypes.Dtype) -> Array:
    """Return stored numbers as float32; float32 itself is not copied."""
    array = jobs.native_order(raw.view(np.uint8).view(dtypes.element_dtype(row.number)))
    if row is dtypes.F32:
        return array
    # NumPy's memory, which malloc reuses for the scales of the next tensor: new pages take longer than the scales.
    return astype(array, np.float32, out=np.empty(array.shape, np.float32), threads=1)


def in_memory(packed: Packing, arrays: Mapping[str, Array]) -> tuple[Packed, Any]:
    """Return a packed tensor with parts in memory, and the owner of the memory."""
    stored = {role: np.ascontiguousarray(jobs.native_order(array)) for role, array in arrays.items()}
    parts = {}
    for role, array in stored.items():
        begin = address_of(array)
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


def settled(
    zeros: Zeros, grid: Grid, part: Part, matrices: int, place: Place | None = None
) -> tuple[Zeros, int | None]:
    """Return zero points with ``added`` resolved, see `Zeros.symmetric`, and the only code of the grid, if any.

    Only a ``place`` of the grid is read if its codes suffice.
    """
    if place is None or zeros.symmetric:
        place = (0, matrices), (slice(0, grid.rows), slice(0, grid.columns))
    only = None if zeros.layout == COLUMNS else _only_code(zeros, grid, part, place)
    middle = 1 << zeros.bits - 1
    # Writers add 0 or 1 to codes; symmetric weights have the middle.
    added = middle - only if zeros.symmetric and only in (middle - 1, middle) else zeros.added
    return zeros._replace(symmetric=False, added=added), only


def _only_code(zeros: Zeros, grid: Grid, part: Part, place: Place) -> int | None:
    """Return the only code of a grid with codes along its rows, as in symmetric weights; None if codes differ."""
    words, span = _words(zeros, grid, part, place)[0], place[1][1]
    if not words.size or span.start == span.stop:
        return None
    lines = words.reshape(-1, words.shape[-1])
    if 32 % zeros.bits == 0 and grid.columns * zeros.bits % 32 == 0:
        if (lines != lines[0, 0]).any():
            return None
        lines, span = lines[:1, :1], slice(0, 32 // zeros.bits)
    first = int(_unpacked(lines[0], zeros, slice(span.start, span.start + 1))[0])
    # Line by line: all codes would take eight times the memory of the words.
    return first if all((_unpacked(line, zeros, span) == first).all() for line in lines) else None


def read_numbers(zeros: Zeros, grid: Grid, part: Part, place: Place, table: Array) -> Array:
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

# Elements checked at a time: their bits stay in the cache, and need no new pages.
_CHECKED = 1 << 15

# Groups of rows: the core keeps the scales of all groups for 64 columns at a time.
_MOST_GROUPS = 512


def by_columns(packed: Packing) -> bool:
    """Return whether rows of values are columns of codes, which can be dequantized independently."""
    return packed.transpose and packed.layout in (COLUMNS, WORDS)


def groups_of(grid: Grid, part: Part, down: bool) -> Array | None:
    """Return the group of each row or column of codes; None if groups are blocks in order, or not used."""
    groups: Array = read_part(part).view(np.uint8).view("<i4")
    block, count = (grid.row_block, grid.rows) if down else (grid.column_block, grid.columns)
    if not down and (groups == -1).all():  # allocated by the writer, and not used
        return None
    in_order = groups.size <= block * count and np.array_equal(groups, np.arange(groups.size) // block)
    return None if in_order else groups


def can_store(packed: Packing, grid: Grid, *, down: bool, grouped: bool) -> bool:
    """Return True if the core can convert the scales of a tensor as fast as it restores the codes."""
    if down:
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


# ---- codes ----


class CodeReader:
    """The codes of a range. Its scales are read, checked and combined when the job runs."""

    # Few objects for the garbage collector: 100,000 experts have as many readers.
    __slots__ = (
        "_apart", "_down", "_name", "_packed", "_part", "_parts", "_place", "_stored", "begin", "cost", "nbytes",
        "row_bytes",
    )  # fmt: skip

    def __init__(
        self,
        packed: Packed,
        part: Range,
        name: str,
        stored: Mapping[str, Part] | None = None,
        row_bytes: int | None = None,  # of a row of codes that hold only the range; None for codes of whole matrices
    ) -> None:
        spec, self._parts = packed
        self._packed, self._part, self._name, self._apart = spec, part, name, row_bytes is not None
        self._stored = packed.parts if stored is None else stored  # with the paths of files
        self.row_bytes = bytes_before(spec, part.columns) if spec.flat else spec.row_bytes
        codes, self._down = self._parts[packing.CODES], by_columns(spec)
        depth = {packing.COLUMNS: 32, packing.PLANES: 8}.get(spec.layout, spec.bits)  # bits of a column in a stored row
        rows = part.matrices * (part.rows * spec.bits // depth)
        before = part.first * (spec.rows * spec.bits // depth) + part.row * spec.bits // depth
        self.begin = codes.begin + before * spec.row_bytes + (part.column and bytes_before(spec, part.column))
        self.nbytes, self.cost = rows * self.row_bytes, 0
        if row_bytes is not None:
            self.begin, self.nbytes, self.row_bytes = codes.begin, codes.end - codes.begin, row_bytes
        elif spec.layout == packing.MASKED:
            self.begin, self.nbytes = codes.begin, codes.end - codes.begin
            self.cost = (_mask_bytes(spec) + 8) * part.rows
        elif self._down:  # from the first word of the columns to the last
            self.nbytes = max(0, rows - 1) * self.row_bytes + min(rows, 1) * bytes_before(spec, part.columns)
        if spec.grid is not None:
            scales = (1 if spec.grid.shared else part.matrices) * spec.grid.rows * spec.grid.columns
            share = scales * part.rows * part.columns // max(1, spec.rows * spec.columns)
            self.cost += 4 * share * len(_GRIDS.keys() & self._parts)

    def stored(self) -> dict[str, tuple[Any, int, int]]:
        parts = () if self._apart else self._parts.items()  # of a range, `prepare` reads no other bytes
        return {role: (part.file, part.begin, part.end) for role, part in parts if role != packing.CODES}

    def moved(self, addresses: Mapping[str, int]) -> CodeReader:
        parts = dict(self._parts)
        for role, address in addresses.items():
            part = parts[role]
            parts[role] = part._replace(file=None, begin=address, end=address + part.end - part.begin)
        return CodeReader(Packed(self._packed, parts), self._part, self._name, self._stored)

    def prepare(self) -> dict[str, Any]:
        """Return the fields of an ``sl_packed``."""
        parts = self._parts
        self._parts = _with_small_parts(parts)
        try:
            return self._fields()
        finally:
            self._parts = parts

    def _fields(self) -> dict[str, Any]:
        packed, part = self._packed, self._part
        fields: dict[str, Any] = {
            **{name: getattr(packed, name) for name in _COPIED},
            "divide": packed.scale_rule == packing.QUOTIENT,
            "forbidden": 3 if packed.numbers in ("ternary", "i2_s") else -1,  # the unused code
            "size": self.nbytes,
            "matrices": part.matrices,
            "rows": part.rows,
            "columns": part.columns,
            "row_bytes": self.row_bytes,
            "row_block": 1,
            "column_block": 1,
        }
        row = dtypes.BY_CODE.get(packed.numbers)
        if packed.layout == packing.BLOCKS:
            fields["codes"] = getattr(lib, f"SL_{packed.numbers.upper()}")
        elif row is not None:
            fields["codes"] = row.number
        elif packed.numbers != packing.TABLE:
            fields["table"] = _table_of(packed.numbers, packed.bits)
        if packing.TABLE in self._parts:  # also of blocks, for codes without their scales
            fields["table"] = self._finite_floats(packing.TABLE, 0, 1 << packed.bits)
        if packing.SHAPE in self._parts:
            part_of_shape = self._parts[packing.SHAPE]
            stored = jobs.native_order(read_part(part_of_shape).view(part_of_shape.row.name)).tolist()
            if tuple(stored) != packed.shape[-len(stored) :]:
                text = f"its stored shape is {show(stored)}, but its codes and scales have {list(packed.shape)}"
                raise self._fail(text, packing.SHAPE)
        if packed.layout == packing.MASKED:
            fields.update(self._mask_fields())
        if packed.grid is not None:
            self._add_grid(fields, packed.grid)
        stored_factors = self._parts.get(packing.FACTORS)
        if stored_factors is not None or packed.factor != 1:
            factors: Any = packed.factor
            if stored_factors is not None:
                first = part.column if math.prod(stored_factors.shape) > 1 else 0
                factors = self._finite_floats(packing.FACTORS, first, part.columns)
            fields["factors"] = np.full(part.columns, factors, np.float32)
        return fields

    def _fail(self, message: str, role: str) -> FormatError:
        file = self._stored[role].file
        path = None if file is None else str(file.path)
        return error_about(FormatError, f": {message}", path=path, tensor=self._name)

    def _add_grid(self, fields: dict[str, Any], grid: Grid) -> None:
        spec, part, groups = self._packed, self._part, self._groups(grid)
        sides = [
            (part.row, part.rows, spec.rows, grid.row_block, grid.rows),
            (part.column, part.columns, spec.columns, grid.column_block, grid.columns),
        ]
        spans = [
            slice(begin // block, begin // block + -(-size // block)) if size < total else slice(0, count)
            for begin, size, total, block, count in sides
        ]
        if groups is not None:  # rows or columns of any group
            k = 0 if self._down or spec.layout == packing.COLUMNS else 1
            begin, size, _, _, count = sides[k]
            fields["groups"], spans[k] = groups[begin : begin + size], slice(0, count)
        height, width = (span.stop - span.start for span in spans)
        self._place = (0, 1) if grid.shared else (part.first, part.matrices), (spans[0], spans[1])
        fields.update(
            row_block=grid.row_block,
            column_block=grid.column_block,
            grid_rows=height,
            grid_columns=width,
            grid_step=0 if grid.shared else height * width,
        )
        storable = can_store(self._packed, grid, down=self._down, grouped=packing.GROUPS in self._parts)
        for role in _GRIDS:
            if role == packing.ZERO and role in self._parts and self._packed.zeros is not None:
                self._add_packed_zeros(fields, grid, self._packed.zeros, storable)
            elif role in self._parts:
                fields.update(self._elements(role, grid, storable))
        if self._packed.symmetric and "zeros" in fields and fields["zeros"].any():
            raise self._fail(
                f"its zero points are not all 0, but the configuration says symmetric ({fields['zeros'].max():g})",
                packing.ZERO,
            )

    def _elements(self, role: str, grid: Grid, storable: bool) -> dict[str, Any]:
        """Return the fields of a part: as stored if the core can convert it, else as float32; both are finite."""
        packed, part, row = self._packed, self._parts[role], self._dtype_of(role)
        floats, stored, dtype = _GRIDS[role]
        rule = packed.scale_rule if role == packing.SCALE else packing.STORED
        (first, count), (rows, columns) = self._place
        height, width = rows.stop - rows.start, columns.stop - columns.start
        line, lines = first * grid.rows + rows.start, count * height  # of the grids of all matrices
        window = range(columns.start * row.block_bytes, columns.stop * row.block_bytes)
        raw = _read_window(part, grid.columns * row.block_bytes, range(line, line + lines), window).view(np.uint8)
        if storable and stored and rule not in _AS_FLOATS and packed.family != packing.OWN:
            shared: dict[str, Any] | None = {} if all_finite(raw, row) else None
            if shared is not None and rule != packing.STORED:
                shared = shared_fields(packed, row, self._shared(), (first, count))
            if shared is not None:
                return {stored: raw, dtype: row.number, **shared}
        if rule == packing.NESTED_RULE:
            elements = self._nested(line * grid.columns + columns.start, raw)
        elif rule in (packing.STORED, packing.QUOTIENT):
            elements = floats_of(raw, row)
        else:
            elements = self._combined(floats_of(raw, row).reshape(lines, width), row, grid, line)
        return {floats: self._finite(role, elements.reshape(count, height, width), (first, rows.start, columns.start))}

    def _dtype_of(self, role: str) -> dtypes.Dtype:
        scales = self._packed.scale_dtype if role == packing.SCALE else None
        return self._parts[role].row if scales is None else dtypes.BY_CODE[scales]

    def _shared(self) -> Array:
        """Return the factors or divisors of all scales."""
        shared = self._finite_floats(packing.GLOBAL, 0, math.prod(self._parts[packing.GLOBAL].shape)).reshape(-1)
        return shared / np.float32(2688) if self._packed.scale_rule == packing.MLX_GLOBAL else shared

    def _combined(self, scales: Array, row: dtypes.Dtype, grid: Grid, line: int) -> Array:
        """Return the scales of lines of the grids, which the scales of the tensor, or a reciprocal, complete."""
        with np.errstate(all="ignore"):  # `_finite` refuses bad results
            if self._packed.scale_rule == packing.INVERSE:
                return np.reciprocal(scales)
            shared = self._shared()
            if shared.size > 1:  # a scale per expert, or per equal part of its rows
                each = grid.rows * self._packed.matrices // shared.size
                shared = shared[np.arange(line, line + len(scales)) // each, None]
            combine = np.divide if self._packed.scale_rule == packing.DIVIDED else np.multiply
            # In place, because new pages cost more than the arithmetic; but float32 scales may belong to the caller.
            combined: Array = combine(scales, shared, out=None if row is dtypes.F32 else scales)
            return combined

    def _nested(self, begin: int, codes: Array) -> Array:
        """Return double-quantized scales (bitsandbytes): 8-bit codes, a scale per block, and an offset."""
        packed, block = self._packed, self._packed.nested_block
        first, last = begin // block, -(-(begin + codes.size) // block)
        table = self._finite_floats(packing.NESTED_TABLE, 0, 256)
        shared = self._finite_floats(packing.NESTED, first, last - first)
        blocks = np.zeros((last - first, block), np.float32)
        scales: Array = blocks.reshape(-1)[begin - first * block :][: codes.size]
        np.take(table, codes, out=scales, mode="clip")  # codes are in range; without "clip" NumPy makes a copy
        with np.errstate(all="ignore"):  # `_finite` refuses bad results
            blocks *= shared[:, None]
            scales += np.float32(packed.nested_offset)
        return scales

    def _finite_floats(self, role: str, begin: int, count: int) -> Array:
        part, row = self._parts[role], self._dtype_of(role)
        size = min(count, math.prod(part.shape)) * row.block_bytes
        return self._finite(role, floats_of(read_part(part, begin * row.block_bytes, size), row))

    def _finite(self, role: str, values: Array, begin: tuple[int, int, int] | None = None) -> Array:
        """Refuse values that would make weights NaN or infinite. ``begin`` is the first element of a grid range."""
        good = np.isfinite(values)
        if role == packing.SCALE and self._packed.scale_rule == packing.QUOTIENT:
            good &= values != 0
        if not good.all() and self._packed.family != packing.OWN:
            at = [int(k) for k in np.argwhere(~good)[0]]
            if begin is not None:
                at = [k + low for k, low in zip(at, begin, strict=True)][self._packed.matrices <= 1 :]
            value = values[~good].flat[0]
            raise self._fail(f"its {role} is {value} at {at}, which makes every weight of the block meaningless", role)
        return np.ascontiguousarray(values)

    def _add_packed_zeros(self, fields: dict[str, Any], grid: Grid, zeros: Zeros, can_store: bool) -> None:
        """Add zero points as a grid; a single zero point is subtracted from the table instead."""
        packed, part, table = self._packed, self._parts[packing.ZERO], fields["table"]
        zeros, only = settled(zeros, grid, part, packed.matrices, self._place)
        if only is not None:
            fields["table"] = table - numbers_of(zeros, np.array(only, np.uint32), table)
            return
        stored = zero_fields(zeros, grid, part, self._place, table) if can_store and not packed.symmetric else None
        fields.update(stored or {"zeros": np.ascontiguousarray(read_numbers(zeros, grid, part, self._place, table))})

    def _groups(self, grid: Grid) -> Array | None:
        down, part = self._down or self._packed.layout == packing.COLUMNS, self._parts.get(packing.GROUPS)
        groups = None if part is None else groups_of(grid, part, down)
        if groups is None:  # blocks are faster
            return None
        count = grid.rows if down else grid.columns
        bad = np.flatnonzero((groups < 0) | (groups >= count))
        if bad.size:
            raise self._fail(
                f"column {int(bad[0])} is in group {int(groups[bad[0]])}, but there are {count} groups", packing.GROUPS
            )
        return np.ascontiguousarray(groups.astype(np.uint32))

    # ---- sparse codes ----

    def _mask_fields(self) -> dict[str, Any]:
        spec, part, parts = self._packed, self._part, self._parts
        count, mask = self.nbytes // parts[packing.CODES].row.block_bytes, read_part(parts[packing.MASK])
        if packing.OFFSETS in parts:
            starts = _integers(parts[packing.OFFSETS])
            origin = starts[0] if part.row and starts.size else np.int64(0)
            starts = np.append(starts - origin, count)
            self._check_starts(starts, count)
        else:
            starts = np.arange(part.rows + 1, dtype=np.int64) * (count // max(1, part.rows))
        if spec.columns > _STEP:
            starts = self._divided(mask, starts)
        step = min(_STEP, max(1, spec.columns))
        return {"mask": mask, "starts": starts.astype(np.uint64), "mask_columns": step, "first_row": part.row}

    def of_rows(self) -> CodeReader:
        """Return the reader of sparse codes with the parts of its range of rows. The offsets are read."""
        spec, parts, rows = self._packed, self._parts, self._part
        first, stop = rows.row, rows.row + rows.rows
        codes, width = parts[packing.CODES], _mask_bytes(spec)
        sliced = {**parts, packing.MASK: _bytes_of(parts[packing.MASK], first * width, stop * width)}
        begin, end = first * spec.row_bytes, stop * spec.row_bytes
        if packing.OFFSETS in parts:
            offsets, count = parts[packing.OFFSETS], self.nbytes // codes.row.block_bytes
            size = offsets.row.block_bytes
            sliced[packing.OFFSETS] = _bytes_of(offsets, first * size, stop * size)
            starts = _integers(_bytes_of(offsets, first * size, min(stop + 1, spec.rows) * size))
            if stop == spec.rows:
                starts = np.append(starts, count)
            self._check_starts(starts, count)
            begin, end = int(starts[0]) * codes.row.block_bytes, int(starts[-1]) * codes.row.block_bytes
        sliced[packing.CODES] = _bytes_of(codes, begin, end)
        return CodeReader(Packed(spec, sliced), rows, self._name, self._stored)

    def _check_starts(self, starts: Array, count: int) -> None:
        """Check that the starts of rows, and an end, ascend from 0 to the number of values."""
        first = self._part.row
        bad = (starts < 0) | (starts > count)
        bad[1:] |= starts[1:] < starts[:-1]
        bad[:1] |= (first == 0) & (starts[:1] != 0)
        if bad.any():
            row = int(bad.argmax())
            message = f"row_offsets: row {first + row} begins at value {starts[row]} of {count}"
            raise self._fail(message, packing.OFFSETS)

    def _divided(self, mask: Array, starts: Array) -> Array:
        """Return starts for every `_STEP` columns of long rows, given the starts of rows and an end."""
        columns, width, step = self._packed.columns, _mask_bytes(self._packed), _STEP // 8
        lines = mask.view(np.uint8).reshape(-1, width)
        counts = np.stack([_COUNTS[lines[:, k : k + step]].sum(-1, dtype=np.int64) for k in range(0, width, step)], -1)
        if columns % 8:  # bits after the last column mean nothing
            counts[:, -1] -= _COUNTS[lines[:, -1] >> columns % 8]
        totals, stored = counts.sum(-1), np.diff(starts)
        bad = np.flatnonzero(totals != stored)
        if bad.size:
            row = int(bad[0])
            places = f"has places for {totals[row]} values in its mask, but {stored[row]} are stored"
            raise self._fail(f"row {self._part.row + row} {places}", packing.MASK)
        divided: Array = starts[:-1, None] + np.cumsum(counts, -1) - counts
        return np.append(divided, starts[-1])


def _with_small_parts(parts: Mapping[str, Part]) -> Mapping[str, Part]:
    """Return the parts with the bytes of small ones in the place of their file."""
    file = parts[packing.CODES].file
    if file is None or file.remote:
        return parts
    result, places, total = dict(parts), [], 0
    for role, part in parts.items():
        size = part.end - part.begin
        if role != packing.CODES and part.file is file and 0 < size <= _SMALL_PART:
            places.append((role, part, total))
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
    if not places:
        return parts
    raw, store = np.empty(total, np.uint8), file.local
    handle, address = store.begin_use(), address_of(raw)
    try:
        for role, part, at in places:
            size = part.end - part.begin
            if short.sl_file_read(handle, part.begin, address + at, size, None) == lib.SL_OK:  # else `read_part` fails
                result[role] = Part(part.name, raw, part.row, part.shape, at, at + size)
    finally:
        store.end_use()
    return result


# Columns per recorded start, in whole bytes: restoring a piece of a row counts up to this many bits again.
_STEP = 1 << 16
_COUNTS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def _mask_bytes(packed: Packing) -> int:
    """Return the bytes of a row of the mask."""
    return -(-packed.columns // 8)


def _bytes_of(part: Part, begin: int, end: int) -> Part:
    return part._replace(begin=part.begin + begin, end=part.begin + end)


def _integers(part: Part) -> Array:
    return jobs.native_order(read_part(part).view(part.row.name)).astype(np.int64)


# ---- values of codes ----

# Positive values: OCP Microscaling Formats (MX) Specification 1.0, section 5.3, and auto-round's quarters.
_POSITIVE = {
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    "e2m3": (*(m / 8 for m in range(8)), *(2.0**e * (1 + m / 8) for e in range(3) for m in range(8))),
    "e3m2": (*(m / 16 for m in range(4)), *(2.0**e * (1 + m / 4) for e in range(-2, 5) for m in range(4))),
    "mxint4": tuple(k / 4 for k in range(8)),
}


@cache
def _table_of(numbers: str, bits: int) -> Array:
    """Return the values of all codes: floats, quarters, or integers.

    Integers are "unsigned", "signed" (two's complement), have an "offset" of half of their range, or are "ternary"
    (-1, 0 and 1). "bits" are the codes themselves: the float16 of each has the bits of the code.
    """
    codes, half = range(1 << bits), 1 << bits - 1
    values: Iterable[float] = codes
    if numbers in _POSITIVE:
        values = (*_POSITIVE[numbers], *(-value for value in _POSITIVE[numbers]))
    elif numbers == "ternary":
        values = (-1, 0, 1, math.nan)
    elif numbers == "bits":
        values = [code * 2.0**-24 for code in codes]
    elif numbers != "unsigned":
        values = [(code if numbers == "offset" else code ^ half) - half for code in codes]
    return np.array([*values], np.float32)


# ---- jobs ----


def restore_jobs(
    packed: Packed, memory: int, target: int, name: str, *, owner: Any = None, ranges: Iterable[Range] | None = None
) -> list[Job]:
    """Return the jobs that dequantize a tensor into memory; ``owner`` keeps parts in memory alive."""
    spec, row, made = packed.packing, dtypes.of_number(target), []
    origin = Origin(name, spec.shape, owner)
    for part in ranges_of(spec) if ranges is None else ranges:
        reader = CodeReader(packed, part, name)
        if spec.layout == packing.MASKED and part.rows != spec.rows:
            reader = reader.of_rows()
        place = packed.parts[packing.CODES].file, reader.begin, memory + row.nbytes(values_before(spec, part))
        how = dtypes.F32.number, target, lib.SL_OP_RESTORE
        made.append(Job(*place, part.values * 4, *how, origin=origin, packed=reader))
    return made


def restore_box(packed: Packed, part: Range, memory: int, target: int, name: str) -> Job:
    """Return the job that dequantizes a range of the rows and columns of a matrix; only its codes are read."""
    spec, codes = packed.packing, packed.parts[packing.CODES]
    lines, right = range(part.row, part.row + part.rows), part.column + part.columns
    window = range(bytes_before(spec, part.column), bytes_before(spec, right))
    if spec.layout == packing.COLUMNS:
        lines = range(lines.start * spec.bits // 32, -(-lines.stop * spec.bits // 32))
    elif right == spec.columns:
        window = range(window.start, spec.row_bytes)
    raw = _read_window(codes, spec.row_bytes, lines, window)
    begin = address_of(raw)
    in_window = codes._replace(file=None, shape=raw.shape, begin=begin, end=begin + raw.size)
    reader = CodeReader(Packed(spec, {**packed.parts, packing.CODES: in_window}), part, name, packed.parts, len(window))
    how = part.values * 4, dtypes.F32.number, target, lib.SL_OP_RESTORE
    shape = (part.columns, part.rows) if spec.transpose else (part.rows, part.columns)
    return Job(None, begin, memory, *how, origin=Origin(name, shape, raw), packed=reader)
