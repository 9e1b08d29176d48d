"""Dequantizes packed tensors: reads and checks their scales, and describes their codes to the C core.

The arithmetic is that of the libraries that write these checkpoints, in float32: each step is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..base import dtypes, packing
from ..base.arrays import Array, ArraySpec
from ..base.native import ffi, lib
from ..base.packing import Grid, Packed, Packing, Part
from ..base.text import show
from ..errors import FormatError
from . import jobs
from .cast import astype
from .code_ranges import Range, bytes_before, ranges_of, stored_rows, whole
from .code_tables import table_of
from .job import Job, Origin
from .memory import address_of

_F32 = dtypes.BY_CODE["F32"]

# The code of ternary planes that no writer stores.
_NOT_TERNARY = 3


class Prepared:
    """The codes of a range, prepared when the job runs: its scales are read, checked and combined only then.

    Args:
        packed: what the codes mean, and where the parts are.
        part: the range.
        name: of the tensor, for errors.
        stored: where the parts are stored, for errors; None for where they are read.
    """

    def __init__(self, packed: Packed, part: Range, name: str, stored: Mapping[str, Part] | None = None) -> None:
        self._packed, self._parts = packed
        self._part, self._name = part, name
        self._stored = packed.parts if stored is None else stored

    @property
    def cost(self) -> int:
        """About the bytes that `prepare` allocates."""
        grid = self._packed.grid
        kinds = sum(role in self._parts for role in (packing.SCALE, packing.ZERO, packing.BIAS, packing.NESTED))
        return 0 if grid is None else 4 * kinds * self._part.matrices * grid.rows * self._grid_columns(grid)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes of the range."""
        packed, part = self._packed, self._part
        return part.matrices * stored_rows(packed, part.rows) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        packed = self._packed
        return bytes_before(packed, self._part.columns_of(packed)) if packed.flat else packed.row_bytes

    def _grid_columns(self, grid: Grid) -> int:
        """Columns of the grid of the range."""
        packed = self._packed
        return -(-self._part.columns_of(packed) // grid.column_block) if packed.flat else grid.columns

    def stored(self) -> dict[str, tuple[Any, int, int]]:
        """By role the file and the bytes of the parts that `prepare` reads."""
        parts = {role: part for role, part in self._parts.items() if role != packing.CODES}
        return {role: (part.file, part.begin, part.end) for role, part in parts.items()}

    def moved(self, addresses: Mapping[str, int]) -> Prepared:
        """The same range, where parts of these roles are in memory."""
        parts = dict(self._parts)
        for role, address in addresses.items():
            part = parts[role]
            parts[role] = part._replace(file=None, begin=address, end=address + part.end - part.begin)
        return Prepared(Packed(self._packed, parts), self._part, self._name, self._stored)

    def prepare(self) -> dict[str, Any]:
        """The fields of an ``sl_packed``.

        Raises:
            FormatError: a scale is not finite, or a group does not exist; a file ends too early.
            OSError: a file cannot be read.
        """
        packed, part = self._packed, self._part
        fields: dict[str, Any] = {
            "layout": packed.layout,
            "bits": packed.bits,
            "word_codes": packed.word_codes,
            "high_first": packed.high_first,
            "transpose": packed.transpose,
            "interleaved": packed.interleaved,
            "forbidden": _NOT_TERNARY if packed.numbers == "ternary" else -1,
            "size": self.nbytes,
            "matrices": part.matrices,
            "rows": part.rows,
            "columns": part.columns_of(packed),
            "row_bytes": self._row_bytes,
            "row_block": 1,
            "column_block": 1,
        }
        row = dtypes.BY_CODE.get(packed.numbers)
        if row is not None:
            fields["codes"] = row.number
        elif packed.numbers == packing.TABLE:
            fields["table"] = self._finite(packing.TABLE, self._floats(packing.TABLE, 0, 1 << packed.bits))
        else:
            fields["table"] = table_of(packed.numbers, packed.bits)
        if packing.SHAPE in self._parts:
            self._check_shape()
        if packed.grid is not None:
            self._add_grid(fields, packed.grid)
        if packing.FACTORS in self._parts:
            fields["factors"] = self._finite(packing.FACTORS, self._floats(packing.FACTORS, 0, packed.columns))
        elif packed.factor != 1:
            fields["factors"] = np.full(packed.columns, packed.factor, np.float32)
        return fields

    def _fail(self, message: str, role: str) -> FormatError:
        file = self._stored[role].file
        path = None if file is None else str(file.path)
        return FormatError(f"tensor {show(self._name)}: {message}", path=path, tensor=self._name)

    def _check_shape(self) -> None:
        part = self._parts[packing.SHAPE]
        raw = jobs.native_order(read_part(part).view(part.row.name))
        if tuple(raw.tolist()) != self._packed.shape[-raw.size :]:
            raise self._fail(
                f"its stored shape is {show(raw.tolist())}, but its codes and scales have {list(self._packed.shape)}",
                packing.SHAPE,
            )

    def _add_grid(self, fields: dict[str, Any], grid: Grid) -> None:
        part = self._part
        matrices, first = (1, 0) if grid.shared else (part.matrices, part.first)
        rows = grid.rows if part.rows == self._packed.rows else -(-part.rows // grid.row_block)
        columns = self._grid_columns(grid)
        begin = (first * grid.rows + part.row // grid.row_block) * grid.columns + part.column // grid.column_block
        count = matrices * rows * columns
        shape = matrices, rows, columns
        scales = self._scales(begin, count).reshape(shape)
        fields.update(
            scales=self._finite(packing.SCALE, scales, grid, first),
            row_block=grid.row_block,
            column_block=grid.column_block,
            grid_rows=rows,
            grid_columns=columns,
            grid_step=0 if grid.shared else rows * columns,
        )
        if packing.BIAS in self._parts:
            fields["biases"] = self._finite(packing.BIAS, self._floats(packing.BIAS, begin, count).reshape(shape), grid)
        if packing.ZERO in self._parts:
            zeros = self._packed_zeros(rows) if self._packed.zero_bits else self._floats(packing.ZERO, begin, count)
            fields["zeros"] = self._finite(packing.ZERO, zeros.reshape(shape), grid, first)
        if packing.GROUPS in self._parts:
            fields["groups"] = self._groups(grid)

    def _floats(self, role: str, begin: int, count: int) -> Array:
        """Elements of a part as float32."""
        part = self._parts[role]
        row, size = part.row, math.prod(part.shape)
        if role == packing.SCALE and self._packed.scale_dtype is not None:
            row = dtypes.BY_CODE[self._packed.scale_dtype]
        raw = read_part(part, begin * row.block_bytes, min(count, size) * row.block_bytes)
        array = jobs.native_order(raw.view(np.uint8).view(dtypes.element_dtype(row.number)))
        return array if row is _F32 else astype(array, np.float32, threads=1)

    def _scales(self, begin: int, count: int) -> Array:
        """The scales of elements [begin, begin + count) of the grid."""
        packed = self._packed
        rule = packed.scale_rule
        if rule == packing.NESTED_RULE:
            return self._nested(begin, count)
        scales = self._floats(packing.SCALE, begin, count)
        if rule == packing.STORED:
            return scales
        with np.errstate(all="ignore"):  # what is not finite is refused afterwards
            if rule == packing.INVERSE:
                return np.reciprocal(scales)
            size = math.prod(self._parts[packing.GLOBAL].shape)
            shared = self._finite(packing.GLOBAL, self._floats(packing.GLOBAL, 0, size))
            if rule == packing.MLX_GLOBAL:
                shared = shared / np.float32(2688)
            if size > 1:  # one for each expert, or for equal parts of its rows
                assert packed.grid is not None
                rows, columns = packed.grid.rows, packed.grid.columns
                each = rows * packed.matrices // size * columns
                shared = shared[np.arange(begin, begin + count) // each]
            combine = np.divide if rule == packing.DIVIDED else np.multiply
            # In place: pages of a second array would cost more than the arithmetic. float32 may be the caller's own.
            combined: Array = combine(scales, shared, out=None if self._parts[packing.SCALE].row is _F32 else scales)
            return combined

    def _nested(self, begin: int, count: int) -> Array:
        """The same where scales are codes of 8 bits, of which a block has a scale, and all have an offset."""
        packed, block = self._packed, self._packed.nested_block
        first, last = begin // block, -(-(begin + count) // block)
        table = self._finite(packing.NESTED_TABLE, self._floats(packing.NESTED_TABLE, 0, 256))
        shared = self._finite(packing.NESTED, self._floats(packing.NESTED, first, last - first))
        codes = read_part(self._parts[packing.SCALE], begin, count).view(np.uint8)
        blocks = np.zeros((last - first, block), np.float32)
        scales: Array = blocks.reshape(-1)[begin - first * block :][:count]
        np.take(table, codes, out=scales, mode="clip")  # codes are in range; without "clip" numpy makes a copy
        with np.errstate(all="ignore"):  # what is not finite is refused afterwards
            blocks *= shared[:, None]
            scales += np.float32(packed.nested_offset)
        return scales

    def _finite(self, role: str, values: Array, grid: Grid | None = None, first: int = 0) -> Array:
        """Refuses values that would make weights NaN or infinite."""
        good = np.isfinite(values)
        if not good.all() and self._packed.family != packing.OWN:
            at = tuple(int(k) for k in np.argwhere(~good)[0])
            if grid is not None:
                skipped = self._part.column // grid.column_block
                at = (at[0] + first, at[1] + self._part.row // grid.row_block, at[2] + skipped)
                at = at if self._packed.matrices > 1 else at[1:]
            value = values[~good].flat[0]
            raise self._fail(
                f"its {role} is {value} at {list(at)}, which makes every weight of the block meaningless", role
            )
        return np.ascontiguousarray(values)

    def _packed_zeros(self, rows: int) -> Array:
        """Zero points of some rows of the grid, which compressed-tensors packs down the rows."""
        packed, part, bits = self._packed, self._part, self._packed.zero_bits
        grid = packed.grid
        assert grid is not None
        stored = -(-grid.rows // packed.word_codes) if packed.word_codes else -(-grid.rows * bits // 32)
        row = part.row // grid.row_block + np.arange(rows)
        if packed.word_codes:  # the upper bits of each word are unused
            word, shift = row // packed.word_codes, row % packed.word_codes * bits
        else:
            word, shift = row * bits // 32, row * bits % 32
        last = min(int(word[-1]) + 2, stored) if rows else 0
        low = int(word[0]) if rows and part.matrices == 1 else 0
        high = last if part.matrices == 1 else stored
        row_bytes = grid.columns * 4
        raw = read_part(
            self._parts[packing.ZERO],
            (part.first * stored + low) * row_bytes,
            part.matrices * (high - low) * row_bytes,
        )
        words = raw.view("<u4").reshape(part.matrices, high - low, grid.columns)
        codes = words[:, word - low] >> shift.astype(np.uint32)[:, None]
        straddling = np.flatnonzero(shift + bits > 32)
        if straddling.size:
            left = (32 - shift[straddling]).astype(np.uint32)[:, None]
            codes[:, straddling] |= words[:, word[straddling] + 1 - low] << left
        zeros: Array = (codes & np.uint32((1 << bits) - 1)).astype(np.float32)
        zeros -= np.float32(1 << bits - 1)
        return zeros

    def _groups(self, grid: Grid) -> Array | None:
        groups = read_part(self._parts[packing.GROUPS]).view(np.uint8).view("<i4")
        if (groups == -1).all():  # allotted by the writer, and not used
            return None
        bad = np.flatnonzero((groups < 0) | (groups >= grid.columns))
        if bad.size:
            raise self._fail(
                f"column {int(bad[0])} is in group {int(groups[bad[0]])}, but there are {grid.columns} groups",
                packing.GROUPS,
            )
        return np.ascontiguousarray(groups.astype(np.uint32))


def restore_jobs(
    packed: Packed, memory: int, target: int, name: str, *, owner: Any = None, ranges: Iterable[Range] | None = None
) -> Iterator[Job]:
    """Jobs that dequantize a tensor into memory.

    Args:
        packed: what its codes mean, and where they and its other parts are.
        memory: address of the values.
        target: number of their dtype.
        name: of the tensor.
        owner: keeps the memory of the parts alive; None for a file.
        ranges: what to dequantize; None for all.
    """
    means, codes = packed.packing, packed.parts[packing.CODES]
    row = dtypes.of_number(target)
    for part in ranges_of(means) if ranges is None else ranges:
        before = (part.first * means.rows + part.row) * means.columns + part.column
        begin = (part.first * stored_rows(means, means.rows) + stored_rows(means, part.row)) * means.row_bytes
        begin += bytes_before(means, part.column)
        yield Job(
            codes.file,
            codes.begin + begin,
            memory + row.nbytes(before),
            part.matrices * part.rows * part.columns_of(means) * 4,
            _F32.number,
            target,
            lib.SL_OP_RESTORE,
            origin=Origin(name, means.shape, owner),
            packed=Prepared(packed, part, name),
        )


def restore_job(packed: Packed, op: int, memory: int, name: str, *, owner: Any = None) -> Job:
    """A job for an operation on all values of a tensor, which must be `in_order`."""
    (job,) = restore_jobs(packed, memory, _F32.number, name, owner=owner, ranges=(whole(packed.packing),))
    return job._replace(op=op)


def in_order(packed: Packing) -> bool:
    """Whether codes are stored in the order of the values."""
    return not packed.transpose and packed.layout in (packing.ROWS, packing.PLANES)


def in_memory(packed: Packing, arrays: Mapping[str, Array]) -> tuple[Packed, Any]:
    """A packed tensor whose parts are arrays, and what keeps their memory alive."""
    stored = {role: np.ascontiguousarray(jobs.native_order(array)) for role, array in arrays.items()}
    parts = {}
    for role, array in stored.items():
        begin = address_of(array) if array.size else 0
        row = dtypes.BY_NAME[arrays[role].dtype.name]
        parts[role] = Part(role, None, row, array.shape, begin, begin + array.nbytes)
    return Packed(packed, parts), stored


def read_part(part: Part, begin: int = 0, size: int | None = None) -> Array:
    """Bytes of a part in the byte order of files: of a file in private memory, of an array in place.

    Args:
        part: the part.
        begin: the first byte.
        size: number of bytes; None for all.
    """
    first = part.begin + begin
    end = part.end if size is None else first + size
    if part.file is None:
        return np.frombuffer(ffi.buffer(ffi.cast("char *", first), end - first), np.uint8) if end > first else _NO_BYTES
    number = dtypes.BY_CODE["U8"].number
    spec = ArraySpec(np.dtype(np.uint8), (end - first,), first, end, number, number)
    return jobs.read_small(part.file, spec, Origin(part.name, part.shape))


def read_array(part: Part) -> Array:
    """A part of a file as an array of its own dtype, in private memory; meant for small ones."""
    number = part.row.number
    shape = dtypes.array_shape(part.row, part.shape, part.end - part.begin)
    spec = ArraySpec(dtypes.array_dtype(number), shape, part.begin, part.end, number, number)
    return jobs.read_small(part.file, spec, Origin(part.name, part.shape))


_NO_BYTES: Array = np.empty(0, np.uint8)
