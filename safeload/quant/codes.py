"""Codes that move from one layout to another without being rounded again.

A row of the table is a `Holds`: the numbers, zero points, scales and blocks that a layout can store. Codes move if the
target holds all of them; there is no function per pair of formats. Integer codes are compared as unsigned numbers q
with a zero point z, so that every layout has the value (q - z) * scale, or q * scale + bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import dtypes, jobs, packing, restore
from ..core.arrays import Array
from ..core.native import address_of, lib
from ..core.packing import BIAS, CODES, GLOBAL, GROUPS, SCALE, SHAPE, ZERO, Grid, Packed, Packing
from ..core.text import error_about
from ..errors import FormatError
from .blocks import BLOCKS, E2M1, INTEGER, MIDDLE
from .families import Preset, presets

E4M3 = "F8_E4M3"
POINTS = "zero points"  # a code per block stands for 0
_FLOATS = ("F16", "BF16", "F32")
# Parts that a move can carry.
_CARRIED = {CODES, SCALE, ZERO, BIAS, GLOBAL, SHAPE, GROUPS}
# Integers that codes stand for; all other numbers are names of floats.
_INTEGERS = {"offset": True, "signed": True, "I8": True, "unsigned": False, "U8": False}  # True if 0 is in the middle
# Twice the numbers of E2M1, with the middle of 8 bits as 0.
_DOUBLED = (2 * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]) + 128).astype(np.uint8)
_U8 = dtypes.BY_CODE["U8"]
_BYTES = {"I8": np.int8, "U8": np.uint8}  # the types of codes in bytes


class Immovable(Exception):  # noqa: N818 - an answer, not a failure
    """Codes cannot move, with the reason."""


class Holds(NamedTuple):
    """The contents of a layout."""

    numbers: str  # `INTEGER`, `E2M1` or `E4M3`
    bits: int  # per code
    zero: str  # what stands for 0: `MIDDLE`, `POINTS` or `BIAS`
    scales: tuple[str, ...]  # codes of the dtypes of scales
    block: tuple[int, int]  # rows and columns with one scale; 0 for all
    factor: str = ""  # rule of the scale of the whole tensor, such as `packing.DIVIDED`; "" for none

    @property
    def text(self) -> str:
        zero = "" if self.numbers != INTEGER else {BIAS: " and biases"}.get(self.zero, f" and {self.zero}")
        kind = f"{self.bits}-bit integers{zero.replace('and middle', 'without zero points')}"
        block = " x ".join(str(side or "all") for side in self.block)
        return f"{kind if self.numbers == INTEGER else self.numbers} in blocks of {block}"


def _of_preset(preset: Preset) -> Holds | None:
    parts, scale = preset.parts, preset.parts[packing.SCALE].dtype
    if preset.flat:
        return None  # numbers of a table
    numbers, scales = INTEGER, _FLOATS if scale is None else (scale,)
    if scale == "U8":
        numbers, scales = (E4M3 if preset.bits == 8 else E2M1), ("F8_E8M0" if preset.group == 32 else E4M3,)
    elif parts[CODES].dtype in (E4M3, "U8"):
        numbers = E4M3 if preset.bits == 8 else E2M1
    zero = BIAS if BIAS in parts else POINTS if preset.method == lib.SL_ENCODE_INT_ZERO else MIDDLE
    factor = packing.DIVIDED if GLOBAL in parts else ""
    return Holds(numbers, preset.bits, zero, scales, (preset.row_block, preset.group or 0), factor)


_BLOCKS = {
    name: Holds(each.codes, int(each.bits), each.zero, (each.scale,), (1, each.columns))
    for name, each in BLOCKS.items()
    if each.plain
}


def holds(scheme: str) -> Holds | None:
    """Return the layout of a format or block type; None if no codes move to it."""
    preset = presets().get(scheme)
    return _BLOCKS.get(scheme) if preset is None else _of_preset(preset)


def bits_of(scheme: str) -> int:
    """Return the bits of a code, from the name of a format or the label of packed codes; 2 for ternary codes."""
    if scheme in presets():
        return presets()[scheme].bits
    match = re.search("[0-9]+", scheme.removeprefix("sparse 2:4 "))
    return 2 if match is None else int(match[0])


# ---- codes of a source ----


class Matrix(NamedTuple):
    """A matrix of a packed tensor."""

    packed: Packed
    number: int  # among the matrices
    rows: Array | None = None  # positions of the rows to take, in order; None for all

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = _sides(self.packed)
        return rows if self.rows is None else len(self.rows), columns


class Grids(NamedTuple):
    """The numbers beside codes, an element for each block: [matrices, rows, columns]."""

    scales: Array  # float32
    zeros: Array | None = None  # integers; None if all codes have the middle as 0
    biases: Array | None = None  # float32
    factors: Any = None  # float32 per matrix

    def mapped(self, function: Callable[[Array], Array]) -> Grids:
        """Apply a function to all grids."""
        zeros, biases = (None if grid is None else function(grid) for grid in (self.zeros, self.biases))
        return Grids(function(self.scales), zeros, biases, self.factors)


class Coded(NamedTuple):
    """A weight as codes: matrices of packed tensors with equal layouts."""

    shape: tuple[int, ...]
    matrices: Sequence[Matrix]

    def part(self, item: int | None, rows: Any) -> Sequence[Matrix]:
        """Return one of the matrices, or all, with some of the rows; None for all rows."""
        chosen = self.matrices if item is None else self.matrices[item : item + 1]
        if rows is None:
            return chosen
        own = (np.arange(each.shape[0]) if each.rows is None else each.rows for each in chosen)
        return [each._replace(rows=positions[rows]) for each, positions in zip(chosen, own, strict=True)]

    def held(self) -> Holds:
        """Return the layout of the codes."""
        kinds = {_held(packed) for packed in {id(each.packed): each.packed for each in self.matrices}.values()}
        if {each.shape for each in self.matrices} != {self.shape[-2:]}:
            raise Immovable("its matrices are stored in parts")
        if len(kinds) != 1:
            raise Immovable("its matrices have different layouts")
        return kinds.pop()

    def grids(self) -> Grids:
        """Read the numbers beside the codes."""
        columns = zip(*map(_grids_of, self.matrices), strict=True)
        grids = Grids(*(None if column[0] is None else np.stack(column) for column in columns))  # type: ignore[arg-type]
        for text, grid in (("scale", grids.scales), ("bias", grids.biases)):
            if grid is not None and not np.isfinite(grid).all():
                raise Immovable(f"it has a {text} that is no finite number")
        return grids


def _held(packed: Packed) -> Holds:
    kind, parts, grid = packed.packing, packed.parts, packed.packing.grid
    if kind.layout == packing.BLOCKS:
        if kind.numbers not in _BLOCKS or parts.keys() != {CODES}:
            raise Immovable(f"safeload moves no codes out of blocks of {kind.label}")
        return _BLOCKS[kind.numbers]
    integer = kind.numbers in _INTEGERS
    left = sorted(parts.keys() - _CARRIED)
    if kind.factor != 1:
        raise Immovable(f"the values of {kind.label} are products with {kind.factor:.6g}, which no other layout has")
    if grid is None or kind.flat or kind.layout == packing.MASKED or left:
        raise Immovable(f"no other layout holds the {left[0] if left else 'order'} of {kind.label}")
    if kind.scale_rule not in (packing.STORED, packing.DIVIDED, packing.MULTIPLIED, packing.MLX_GLOBAL):
        raise Immovable(f"the scales of {kind.label} divide, or are codes themselves")
    if not (integer or kind.numbers in (E2M1, E4M3)):
        raise Immovable(f"no other layout holds the numbers of {kind.label}")
    if GROUPS in parts:
        groups = restore.read_part(parts[GROUPS]).view("<i4")
        block = _block_of(packed)[1] or max(1, groups.size)
        if not ((groups == -1).all() or np.array_equal(groups, np.arange(groups.size) // block)):
            raise Immovable("its columns are in the order of act-order (g_idx)")
    zero = MIDDLE if not integer or _INTEGERS[kind.numbers] else POINTS
    zero = BIAS if BIAS in parts else POINTS if ZERO in parts else zero
    scale = kind.scale_dtype or parts[SCALE].row.code
    factor = "" if kind.scale_rule == packing.STORED else kind.scale_rule
    return Holds(kind.numbers if not integer else INTEGER, _bits(kind), zero, (scale,), _block_of(packed), factor)


def _bits(kind: Packing) -> int:
    """Return the bits of a code; a byte can hold a code of fewer bits."""
    return bits_of(kind.label) if kind.numbers in _BYTES else kind.bits


def _block_of(packed: Packed) -> tuple[int, int]:
    """Return the rows and columns of a block, in the order of the values."""
    grid = packed.packing.grid
    assert grid is not None
    block = grid.row_block if grid.rows > 1 else 0, grid.column_block if grid.columns > 1 else 0
    return block[::-1] if packed.packing.transpose else block


def _sides(packed: Packed) -> tuple[int, int]:
    kind = packed.packing
    return (kind.columns, kind.rows) if kind.transpose else (kind.rows, kind.columns)


def _grids_of(matrix: Matrix) -> Grids:
    packed, index, _ = matrix
    kind = packed.packing
    if kind.layout == packing.BLOCKS:
        return _grids_in_blocks(matrix)
    grid = kind.grid
    assert grid is not None
    at = 0 if grid.shared else index
    count, half = grid.rows * grid.columns, 1 << _bits(kind) - 1

    def numbers(role: str) -> Any:  # an array, or None
        part = packed.parts.get(role)
        if part is None:
            return None
        row = dtypes.BY_CODE[kind.scale_dtype] if role == SCALE and kind.scale_dtype else part.row
        size = count * row.block_bytes
        return restore.floats_of(restore.read_part(part, at * size, size), row).reshape(grid.rows, grid.columns)

    zeros: Array | None = None
    if ZERO in packed.parts and kind.zeros is not None:
        settled, _ = restore.settled(kind.zeros, grid, packed.parts[ZERO], kind.matrices)
        place = (at, 1), (slice(0, grid.rows), slice(0, grid.columns))
        codes = restore.read_codes(settled, grid, packed.parts[ZERO], place)[0].astype(np.uint8)
        codes = codes + np.uint8(settled.added) & np.uint8(2 * half - 1)
        zeros = (codes ^ np.uint8(half if kind.numbers in ("signed", "I8") else 0)).astype(np.int16)
    elif ZERO in packed.parts:
        plain = numbers(ZERO) + np.float32(half if _INTEGERS.get(kind.numbers) else 0)
        if not ((plain == np.rint(plain)) & (plain >= 0) & (plain < 2 * half)).all():
            raise Immovable("its zero points are not codes")
        zeros = plain.astype(np.int16)
    elif kind.numbers in ("unsigned", "U8") and BIAS not in packed.parts:
        zeros = np.zeros((grid.rows, grid.columns), np.int16)
    factors = None
    if GLOBAL in packed.parts:
        part = packed.parts[GLOBAL]
        shared = restore.floats_of(restore.read_part(part), part.row).reshape(-1)
        if shared.size not in (1, kind.matrices):
            raise Immovable("parts of its matrices have scales of their own")
        factors = shared[0 if shared.size == 1 else index]
    return Grids(numbers(SCALE), zeros, numbers(BIAS), factors).mapped(lambda grid: _chosen(grid, matrix))


def _chosen(values: Array, matrix: Matrix) -> Array:
    """Return a grid in the order of the values, for the chosen rows."""
    values = values.T if matrix.packed.packing.transpose else values
    rows, step = matrix.rows, _block_of(matrix.packed)[0]
    if rows is None or step == 0:
        return values
    first = rows[::step]
    if (first % step).any() or not np.array_equal((first[:, None] + np.arange(step)).reshape(-1)[: len(rows)], rows):
        raise Immovable("its rows are rearranged, and blocks of scales hold several")
    chosen: Array = values[first // step]
    return chosen


# ---- ggml's blocks ----


def _bytes_in_blocks(matrix: Matrix) -> Array:
    """Return the bytes of the chosen rows of a matrix: [rows, blocks, bytes of a block]."""
    kind = matrix.packed.packing
    size = kind.rows * kind.row_bytes
    raw = restore.read_part(matrix.packed.parts[CODES], matrix.number * size, size).view(np.uint8)
    stored: Array = raw.reshape(kind.rows, -1, dtypes.BLOCK_TYPES[kind.numbers].block_bytes)
    return stored if matrix.rows is None else stored[matrix.rows]


def _grids_in_blocks(matrix: Matrix) -> Grids:
    name, stored = matrix.packed.packing.numbers, _bytes_in_blocks(matrix)
    row = dtypes.BY_CODE[_BLOCKS[name].scales[0]]
    columns = [
        restore.floats_of(np.ascontiguousarray(stored[..., k * row.block_bytes : (k + 1) * row.block_bytes]), row)
        for k in range(1 + (_BLOCKS[name].zero == BIAS))
    ]
    grids = [each.reshape(stored.shape[:2]) for each in columns]
    return Grids(grids[0], None, grids[1] if len(grids) > 1 else None)


def blocks(scheme: str, coded: Coded, threads: int | None = None) -> Array:
    """Return the bytes of a weight in a block type of ggml: [..., rows, bytes of a row]."""
    target, row = _BLOCKS[scheme], dtypes.BLOCK_TYPES[scheme]
    rows, columns = coded.shape[-2:]
    out: Array = np.empty((len(coded.matrices), rows, columns // row.block, row.block_bytes), np.uint8)
    grids = moved_grids(coded, target)
    dtype = dtypes.element_dtype(dtypes.BY_CODE[target.scales[0]].number)
    for k, each in enumerate(values for values in (grids.scales, grids.biases) if values is not None):
        bytes_of = jobs.native_order(each.astype(dtype)).reshape(*each.shape, 1).view(np.uint8)
        out[..., k * dtype.itemsize : (k + 1) * dtype.itemsize] = bytes_of
    move_codes(coded, target, out[..., -4 * target.bits :], signed=target.bits == 8, threads=threads)
    return out.reshape(*coded.shape[:-1], -1)


# ---- moves ----


class CodesPlan(NamedTuple):
    """How codes move to a format."""

    scale: str  # code of the dtype of scales
    error: float = 0.0  # largest relative change of a number beside the codes; 0 if all values are equal


def plan(coded: Coded, target: Holds | None, requested: str | None = None) -> CodesPlan:
    """Return how codes move to a layout, with scales of the requested dtype if these are exact.

    Raises:
        Immovable: the layout cannot hold these codes.
    """
    source = coded.held()
    if target is None:
        raise Immovable("safeload moves no codes into its layout")
    same = source.numbers == target.numbers and source.bits <= target.bits
    to_integers = (source.numbers, target.numbers) == (E2M1, INTEGER) and target.bits == 8 and not source.factor
    blocks = zip(coded.shape[-2:], source.block, target.block, strict=True)
    divide = all(not 0 < own < side or own % (new or side) == 0 for side, own, new in blocks)
    if not (divide and (same or to_integers)):
        raise Immovable(f"holds {target.text}, got {source.text}")
    (scale,) = source.scales
    kept = [scale, "F16", "BF16"] if scale not in target.scales else [scale]
    kept = [code for code in (requested, *kept, *target.scales[: target.scales != _FLOATS]) if code in target.scales]
    zeros_stay = source.zero == target.zero or (source.zero, target.zero) == (MIDDLE, POINTS)
    stays = same and kept[0] == scale and zeros_stay and source.zero != BIAS and not (source.factor or target.factor)
    if stays and all(m.rows is None and (ZERO not in m.packed.parts or m.packed.packing.zeros) for m in coded.matrices):
        return CodesPlan(scale)
    grids, read = _grids_for(coded, target), coded.grids()
    error = _factor_error(read, source, grids)
    for code in kept:
        if not _exact(grids.scales, code):
            continue
        if grids.biases is None or (source.zero == BIAS and _exact(grids.biases, code)):
            return CodesPlan(code, error)
        if source.zero != BIAS and np.isfinite(rounded := _as(grids.biases, code)).all():
            if _centres(source, target):  # powers of two
                return CodesPlan(code, error)
            exact = -_zeros_of(read, source) * read.scales.astype(np.float64)
            return CodesPlan(code, max(error, _error(rounded, _expanded(exact, coded, source, target))))
    raise Immovable(f"its scales are {scale}, and not exact in {' or '.join(target.scales)}")


def moved_grids(coded: Coded, target: Holds) -> Grids:
    """Return the numbers beside codes that can move to a layout, not rounded to the dtype of its scales yet."""
    try:
        return _grids_for(coded, target)
    except Immovable as reason:  # `plan` has not read them all
        name = coded.matrices[0].packed.parts[CODES].name
        raise error_about(FormatError, f"has codes that cannot move: {reason}", tensor=name) from None


def _grids_for(coded: Coded, target: Holds) -> Grids:
    source, (scales, zeros, biases, factors) = coded.held(), coded.grids()
    if target.numbers == INTEGER:
        half, middle = 1 << source.bits - 1, 1 << target.bits - 1
        multiplied = BIAS in (source.zero, target.zero) and source.zero != target.zero
        if multiplied and (scales.view(np.uint32) & np.uint32(2 * middle - 1)).any():
            raise Immovable("its scales have too many digits for a product with a code to be exact")
        if source.numbers == E2M1:
            scales = scales / np.float32(2)
        elif biases is not None and target.zero != BIAS:
            zeros, biases = _points(scales, biases, target.bits), None
        elif biases is None and zeros is None:
            zeros = np.full(scales.shape, half, np.int16)
        if _centres(source, target):
            outside = zeros is not None and (zeros > middle) | (zeros < (1 << source.bits) - middle)
            if np.any(outside):  # a code could leave the range
                raise Immovable(f"not all of its zero points are {half}")
            zeros = None if target.zero == MIDDLE else np.full(scales.shape, middle, np.int16)
        if target.zero == BIAS and zeros is not None:
            wide: Array = -1.0 * zeros.astype(np.float64) * scales
            zeros, biases = None, wide.astype(np.float32)
    scales, factors = _with_factor(source, target, scales, factors)
    return Grids(scales, zeros, biases, factors).mapped(lambda grid: _expanded(grid, coded, source, target))


def move_codes(coded: Coded, target: Holds, out: Array, *, signed: bool = False, threads: int | None = None) -> None:
    """Fill bytes [matrices, rows, bytes], or [matrices, rows, blocks, bytes of 32 codes], with codes.

    ``signed`` codes are in two's complement.
    """
    source, (rows, columns) = coded.held(), coded.shape[-2:]
    order, work, taken = lib.SL_ORDER_STREAM, [], []
    if out.ndim == 4:
        order = lib.SL_ORDER_HALVES if target.bits == 4 else order
    else:
        out[..., -(-columns * target.bits // 8) :] = 0  # rows can end with a word that is not full
    for place, matrix in zip(out, coded.matrices, strict=True):
        if matrix.rows is not None:  # all of the matrix, then rows of it
            rows = _sides(matrix.packed)[0]
            taken.append((place, np.empty((rows, *place.shape[1:]), np.uint8), matrix.rows))
            place = taken[-1][1]
        codes = jobs.CodeLayout(target.bits, order, place.strides[0], place.strides[1] if place.ndim == 3 else 0)
        work.append(_job(*_as_numbers(matrix, source, target, signed), matrix.number, place, codes))
    jobs.Batch(work).run(threads=threads)
    for place, whole, chosen in taken:
        place[...] = whole[chosen]


def turned(rows: Array, out: Array, threads: int | None = None) -> Array:
    """Transpose rows of 4-bit codes into rows of words of codes in AWQ's order, in ``out``."""
    height, width = rows.shape
    kind = Packing("", "", (2 * width, height), 1, height, 2 * width, packing.ROWS, 4, packing.TABLE, width)
    arrays = {CODES: rows, packing.TABLE: np.arange(16, dtype=np.float32)}
    codes = jobs.CodeLayout(4, lib.SL_ORDER_WORDS, height // 2, 0)
    jobs.Batch([_job(*restore.in_memory(kind._replace(transpose=True), arrays), 0, out, codes)]).run(threads=threads)
    return out


def _job(packed: Packed, owner: Any, number: int, place: Array, codes: jobs.CodeLayout) -> jobs.Job:
    """Return the job that fills a place with the values of a matrix as codes."""
    part = restore.whole(packed.packing)._replace(first=number, matrices=1)
    reader, how = restore.CodeReader(packed, part, ""), (dtypes.F32.number, _U8.number, lib.SL_OP_RESTORE)
    job = jobs.Job(packed.parts[CODES].file, reader.begin, place.ctypes.data, 4 * part.values, *how)
    return job._replace(origin=jobs.Origin("", packed.packing.shape, owner), packed=reader, codes=codes)


def _as_numbers(matrix: Matrix, source: Holds, target: Holds, signed: bool) -> tuple[Packed, Any]:
    """Return a packed tensor with the codes of a layout as values, and the owner of its parts in memory."""
    (kind, parts), middle = matrix.packed, 1 << target.bits - 1
    bits = 8 if kind.numbers in _BYTES else source.bits
    _check_bytes(matrix, source.bits)
    stored = np.arange(1 << bits)  # and their new codes
    if source.numbers != target.numbers:
        becomes = _DOUBLED[stored].astype(np.int64)
    else:
        half = 1 << source.bits - 1 if kind.numbers in ("signed", "I8", "q8_0") else 0
        becomes = (stored + half) % stored.size
    becomes = becomes - 128 * signed
    shift: Array = np.zeros((1, 1), np.int64)
    if source.numbers == target.numbers == INTEGER and _centres(source, target):
        read = _grids_of(matrix._replace(rows=None)) if source.zero != MIDDLE else None
        shift = middle - _zeros_of(read, source, target.bits)
        shift = shift[:1, :1] if (shift == shift[:1, :1]).all() else shift
    arrays: dict[str, Array] = {packing.TABLE: becomes.astype(np.float32)}
    numbers = kind.numbers if kind.layout == packing.BLOCKS else packing.TABLE
    if kind.layout == packing.ROWS and bits == 8 and not kind.word_codes:  # bytes need no table
        numbers, shift, arrays = "U8", shift + becomes[0], {}
    grid = None
    if (shift % (1 << target.bits)).any():
        (down, across), shift = (0, 0) if shift.size == 1 else source.block, -shift.astype(np.float32)
        if kind.transpose:
            down, across, shift = across, down, shift.T
        height, width = shift.shape
        grid = Grid(down or max(1, kind.rows), across or max(1, kind.columns), height, width, shared=True)
        arrays |= {SCALE: np.ones_like(shift), ZERO: shift}
    bare = kind._replace(numbers=numbers, bits=bits, grid=grid, zeros=None, scale_dtype=None, symmetric=False)
    bare = bare._replace(scale_rule=packing.STORED)
    own, owner = restore.in_memory(bare, arrays)
    codes = parts[CODES]
    if isinstance(codes.file, np.ndarray):
        begin = address_of(codes.file) + codes.begin if codes.file.size else 0
        codes = codes._replace(file=None, begin=begin, end=begin + codes.end - codes.begin)
    return Packed(bare, {**own.parts, CODES: codes}), (owner, parts[CODES].file)


def _check_bytes(matrix: Matrix, bits: int) -> None:
    """Refuse bytes beyond the codes of fewer bits."""
    kind, part = matrix.packed.packing, matrix.packed.parts[CODES]
    if kind.numbers not in _BYTES or bits == 8:
        return
    size, low = kind.rows * kind.row_bytes, -(1 << bits - 1) if kind.numbers == "I8" else 0
    codes = restore.read_part(part, matrix.number * size, size).view(_BYTES[kind.numbers])
    if codes.size and not low <= codes.min() <= codes.max() < low + (1 << bits):
        text = f"holds codes of {codes.min()} to {codes.max()}, but they are said to have {bits} bits"
        raise error_about(FormatError, text, tensor=part.name)


def _zeros_of(read: Grids | None, source: Holds, bits: int = 0) -> Array:
    """Return the zero points of codes; a single one if all codes have the middle as 0."""
    if read is not None and read.biases is not None:
        return _points(read.scales, read.biases, bits)
    return np.full((1, 1), 1 << source.bits - 1) if read is None or read.zeros is None else read.zeros


def _points(scales: Array, biases: Array, bits: int) -> Array:
    """Return the zero points that biases stand for."""
    wide = scales.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        points = np.where(scales == 0, 0.0, np.rint(-biases / wide))
    if not ((points >= 0) & (points < 1 << bits) & (-points * wide == biases)).all():
        raise Immovable("its biases are not multiples of its scales")
    return points.astype(np.int16)


def _centres(source: Holds, target: Holds) -> bool:
    """Return True if codes are shifted so that the middle code stands for 0."""
    wider = source.numbers != target.numbers or (source.zero != BIAS and source.bits < target.bits)
    return target.zero == MIDDLE or (target.zero == BIAS and wider)


def _expanded(values: Array, coded: Coded, source: Holds, target: Holds) -> Array:
    """Repeat the elements of a grid for the blocks of a layout."""
    for axis, side, own, requested in zip((1, 2), coded.shape[-2:], source.block, target.block, strict=True):
        count = -(-side // (requested or max(1, side)))
        places = np.arange(count) * (requested or max(1, side)) // (own or max(1, side))
        if values.shape[axis] != count or own != requested:
            values = np.take(values, places, axis=axis)
    return values


def _as(values: Array, code: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded: Array = values.astype(dtypes.element_dtype(dtypes.BY_CODE[code].number)).astype(np.float32)
    return rounded


def _exact(values: Array, code: str) -> bool:
    return bool((_as(values, code) == values).all())


def _error(values: Array, exact: Array) -> float:
    """Return the largest relative error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.abs(values.astype(np.float64) - exact) / np.abs(exact)
    return float(np.nan_to_num(errors, nan=0.0).max(initial=0.0))


# ---- the scale of a whole tensor ----


def _with_factor(source: Holds, target: Holds, scales: Array, factors: Array | None) -> tuple[Array, Array | None]:
    """Return the scales of blocks beside the factor of a tensor, which divides in every format that we write."""
    if not (source.factor or target.factor):
        return scales, None
    if not target.factor:
        raise Immovable("it has a scale for the whole tensor")
    if factors is None:
        if source.scales == (E4M3,):
            return scales, np.ones(len(scales), np.float32)
        largest = scales.max(axis=(1, 2), initial=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = np.where(largest > 0, np.float32(256) / largest, np.float32(1)).astype(np.float32)
        return scales * factors[:, None, None], factors
    if source.factor == packing.DIVIDED:
        return scales, factors
    with np.errstate(divide="ignore"):
        top = np.float32(2688) if source.factor == packing.MLX_GLOBAL else np.float32(1)
        inverse = top / factors
    if not np.isfinite(inverse).all():
        raise Immovable("the scale of the whole tensor has no inverse")
    return scales, inverse.astype(np.float32)


def _factor_error(read: Grids, source: Holds, grids: Grids) -> float:
    """Return the largest relative change of scales whose factor becomes a divisor."""
    if read.factors is None or grids.factors is None:
        return 0.0
    own, new = read.factors[:, None, None], grids.factors[:, None, None]
    shared = own / np.float32(2688) if source.factor == packing.MLX_GLOBAL else own
    exact = read.scales / own if source.factor == packing.DIVIDED else read.scales * shared
    return _error(exact, (read.scales / new).astype(np.float64))
