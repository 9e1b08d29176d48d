"""Dequantize packed tensors: read and check their scales, and describe their codes to the C core.

The float32 arithmetic follows the libraries that write the checkpoints: each step is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.messages import error_about
from ...base.native import ffi, lib
from ...base.packing import Grid, Packed, Packing, Part, Zeros, by_columns
from ...base.text import show
from ...errors import FormatError
from ..run import jobs
from ..run.cast import astype
from ..run.job import Job, Origin
from ..run.memory import address_of
from . import grids, masked
from .code_ranges import Range, bytes_before, mask_bytes, ranges_of, stored_rows, values_before, whole

_F32 = dtypes.BY_CODE["F32"]

# Roles of the parts that become float32 grids.
_SCALES = frozenset((packing.SCALE, packing.ZERO, packing.BIAS, packing.NESTED))
# The unused code of ternary planes.
_NOT_TERNARY = 3


class CodeReader:
    """The codes of a range. Its scales are read, checked and combined when the job runs."""

    def __init__(self, packed: Packed, part: Range, name: str, stored: Mapping[str, Part] | None = None) -> None:
        self._packed, self._parts = packed
        self._part, self._name = part, name
        self._stored = packed.parts if stored is None else stored

    @property
    def cost(self) -> int:
        grid = self._packed.grid
        places = (mask_bytes(self._packed) + 8) * self._part.rows if self._packed.layout == packing.MASKED else 0
        kinds = len(_SCALES & self._parts.keys())
        scales = 0 if grid is None else 4 * kinds * self._part.matrices * grid.rows * self._grid_columns(grid)
        return places + scales

    @property
    def nbytes(self) -> int:
        packed, part = self._packed, self._part
        if packed.layout == packing.MASKED:
            codes = self._parts[packing.CODES]
            return codes.end - codes.begin
        rows = part.matrices * stored_rows(packed, part.rows)
        if by_columns(packed):  # from the first word of the columns to the last
            return max(0, rows - 1) * packed.row_bytes + min(rows, 1) * bytes_before(packed, part.columns_of(packed))
        return rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        packed = self._packed
        return bytes_before(packed, self._part.columns_of(packed)) if packed.flat else packed.row_bytes

    def _grid_columns(self, grid: Grid) -> int:
        """Return the number of columns of the range's grid."""
        packed = self._packed
        divided = packed.flat or by_columns(packed)
        return -(-self._part.columns_of(packed) // grid.column_block) if divided else grid.columns

    def stored(self) -> dict[str, tuple[Any, int, int]]:
        parts = {role: part for role, part in self._parts.items() if role != packing.CODES}
        return {role: (part.file, part.begin, part.end) for role, part in parts.items()}

    def moved(self, addresses: Mapping[str, int]) -> CodeReader:
        parts = dict(self._parts)
        for role, address in addresses.items():
            part = parts[role]
            parts[role] = part._replace(file=None, begin=address, end=address + part.end - part.begin)
        return CodeReader(Packed(self._packed, parts), self._part, self._name, self._stored)

    def prepare(self) -> dict[str, Any]:
        """Return the fields of an ``sl_packed``."""
        packed, part = self._packed, self._part
        fields: dict[str, Any] = {
            "layout": packed.layout,
            "bits": packed.bits,
            "word_codes": packed.word_codes,
            "high_first": packed.high_first,
            "transpose": packed.transpose,
            "interleaved": packed.interleaved,
            "divide": packed.scale_rule == packing.QUOTIENT,
            "forbidden": _NOT_TERNARY if packed.numbers in ("ternary", "i2_s") else -1,
            "size": self.nbytes,
            "matrices": part.matrices,
            "rows": part.rows,
            "columns": part.columns_of(packed),
            "row_bytes": self._row_bytes,
            "row_block": 1,
            "column_block": 1,
        }
        row = dtypes.BY_CODE.get(packed.numbers)
        if packed.layout == packing.BLOCKS:
            fields["codes"] = getattr(lib, f"SL_{packed.numbers.upper()}")
        elif row is not None:
            fields["codes"] = row.number
        elif packed.numbers == packing.TABLE:
            fields["table"] = self._finite(packing.TABLE, self._floats(packing.TABLE, 0, 1 << packed.bits))
        else:
            fields["table"] = _table_of(packed.numbers, packed.bits)
        if packing.SHAPE in self._parts:
            self._check_shape()
        if packed.layout == packing.MASKED:
            fields.update(masked.fields_of(Packed(packed, self._parts), part, self._name, read_part))
        if packed.grid is not None:
            self._add_grid(fields, packed.grid)
        if packing.FACTORS in self._parts:
            factors = self._finite(packing.FACTORS, self._floats(packing.FACTORS, 0, packed.columns))
            fields["factors"] = np.full(packed.columns, factors[0], np.float32) if factors.size == 1 else factors
        elif packed.factor != 1:
            fields["factors"] = np.full(packed.columns, packed.factor, np.float32)
        return fields

    def _fail(self, message: str, role: str) -> FormatError:
        file = self._stored[role].file
        path = None if file is None else str(file.path)
        return error_about(FormatError, f": {message}", path=path, tensor=self._name)

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
        row, column = part.row // grid.row_block, part.column // grid.column_block
        height = grid.rows if part.rows == self._packed.rows else -(-part.rows // grid.row_block)
        rows, columns = slice(row, row + height), slice(column, column + self._grid_columns(grid))
        at = rows, columns
        height, width = rows.stop - rows.start, columns.stop - columns.start
        fields.update(
            row_block=grid.row_block,
            column_block=grid.column_block,
            grid_rows=height,
            grid_columns=width,
            grid_step=0 if grid.shared else height * width,
        )
        for role, name in (packing.SCALE, "scales"), (packing.BIAS, "biases"):
            if role not in self._parts:
                continue
            stored = self._stored_numbers(role, grid, (first, matrices), at)
            if stored is None:
                numbers = self._elements(role, grid, (first, matrices), at)
                stored = {name: self._finite(role, numbers, (first, rows.start, columns.start))}
            fields.update(stored)
        if self._packed.zeros is not None:
            self._add_packed_zeros(fields, grid, self._packed.zeros, (first, matrices), at)
        elif packing.ZERO in self._parts:
            zeros = self._elements(packing.ZERO, grid, (first, matrices), at)
            fields["zeros"] = self._finite(packing.ZERO, zeros, (first, rows.start, columns.start))
        if self._packed.symmetric and "zeros" in fields and fields["zeros"].any():
            raise self._fail(
                f"its zero points are not all 0, but the configuration says symmetric ({fields['zeros'].max():g})",
                packing.ZERO,
            )
        if packing.GROUPS in self._parts:
            fields["groups"] = self._groups(grid)

    def _stored_numbers(
        self, role: str, grid: Grid, matrices: tuple[int, int], at: tuple[slice, slice]
    ) -> dict[str, Any] | None:
        """Return the fields for scales or biases as they are stored; None if they must become float32 first."""
        packed, stored = self._packed, self._parts[role]
        row, (rows, columns) = self._dtype_of(role), at
        rule = packed.scale_rule if role == packing.SCALE else packing.STORED
        if rule in (packing.INVERSE, packing.QUOTIENT, packing.NESTED_RULE) or packed.family == packing.OWN:
            return None
        if not grids.can_store(packed, grid, grouped=packing.GROUPS in self._parts):
            return None
        count = matrices[1] * (rows.stop - rows.start) * grid.columns
        begin = (matrices[0] * grid.rows + rows.start) * grid.columns
        if columns != slice(0, grid.columns) or begin + count > math.prod(stored.shape):
            return None
        raw = read_part(stored, begin * row.block_bytes, count * row.block_bytes).view(np.uint8)
        if not grids.all_finite(raw, row):
            return None
        if role == packing.BIAS:
            return {"stored_biases": raw, "bias_dtype": row.number}
        fields = {"stored_scales": raw, "scale_dtype": row.number}
        if rule == packing.STORED:
            return fields
        shared = grids.shared_fields(packed, row, self._shared(), matrices)
        return None if shared is None else fields | shared

    def _elements(self, role: str, grid: Grid, matrices: tuple[int, int], at: tuple[slice, slice]) -> Array:
        """Return elements of a part as float32 [matrices, rows, columns]; whole rows of the grid are read at once."""
        first, count = matrices
        rows, columns = at
        height, width = rows.stop - rows.start, columns.stop - columns.start
        read = self._scales if role == packing.SCALE else lambda begin, n: self._floats(role, begin, n)
        begin = (first * grid.rows + rows.start) * grid.columns
        if width == grid.columns or count * height == 1:
            return read(begin + columns.start, count * height * width).reshape(count, height, width)
        elements = np.empty((count, height, width), np.float32)
        for k in range(count * height):
            elements.reshape(-1, width)[k] = read(begin + k * grid.columns + columns.start, width)
        return elements

    def _dtype_of(self, role: str) -> dtypes.Dtype:
        scales = self._packed.scale_dtype if role == packing.SCALE else None
        return self._parts[role].row if scales is None else dtypes.BY_CODE[scales]

    def _shared(self) -> Array:
        """Return the factors or divisors of all scales."""
        size = math.prod(self._parts[packing.GLOBAL].shape)
        shared = self._finite(packing.GLOBAL, self._floats(packing.GLOBAL, 0, size)).reshape(-1)
        return shared / np.float32(2688) if self._packed.scale_rule == packing.MLX_GLOBAL else shared

    def _floats(self, role: str, begin: int, count: int) -> Array:
        """Return elements of a part as float32."""
        part = self._parts[role]
        row, size = self._dtype_of(role), math.prod(part.shape)
        raw = read_part(part, begin * row.block_bytes, min(count, size) * row.block_bytes)
        array = jobs.native_order(raw.view(np.uint8).view(dtypes.element_dtype(row.number)))
        if row is _F32:
            return array
        # NumPy's memory, which malloc reuses for the scales of the next tensor: new pages take longer than the scales.
        return astype(array, np.float32, out=np.empty(array.shape, np.float32), threads=1)

    def _scales(self, begin: int, count: int) -> Array:
        """Return the scales of elements [begin, begin + count) of the grid."""
        packed = self._packed
        rule = packed.scale_rule
        if rule == packing.NESTED_RULE:
            return self._nested(begin, count)
        scales = self._floats(packing.SCALE, begin, count)
        if rule in (packing.STORED, packing.QUOTIENT):
            return scales
        with np.errstate(all="ignore"):  # `_finite` refuses bad results
            if rule == packing.INVERSE:
                return np.reciprocal(scales)
            shared, size = self._shared(), math.prod(self._parts[packing.GLOBAL].shape)
            if size > 1:  # a scale per expert, or per equal part of its rows
                assert packed.grid is not None
                rows, columns = packed.grid.rows, packed.grid.columns
                elements = rows * packed.matrices // size * columns
                shared = shared[np.arange(begin, begin + count) // elements]
            combine = np.divide if rule == packing.DIVIDED else np.multiply
            # In place, because new pages cost more than the arithmetic; but float32 scales may belong to the caller.
            combined: Array = combine(scales, shared, out=None if self._parts[packing.SCALE].row is _F32 else scales)
            return combined

    def _nested(self, begin: int, count: int) -> Array:
        """Return double-quantized scales (bitsandbytes): 8-bit codes, a scale per block, and an offset."""
        packed, block = self._packed, self._packed.nested_block
        first, last = begin // block, -(-(begin + count) // block)
        table = self._finite(packing.NESTED_TABLE, self._floats(packing.NESTED_TABLE, 0, 256))
        shared = self._finite(packing.NESTED, self._floats(packing.NESTED, first, last - first))
        codes = read_part(self._parts[packing.SCALE], begin, count).view(np.uint8)
        blocks = np.zeros((last - first, block), np.float32)
        scales: Array = blocks.reshape(-1)[begin - first * block :][:count]
        np.take(table, codes, out=scales, mode="clip")  # codes are in range; without "clip" NumPy makes a copy
        with np.errstate(all="ignore"):  # `_finite` refuses bad results
            blocks *= shared[:, None]
            scales += np.float32(packed.nested_offset)
        return scales

    def _finite(self, role: str, values: Array, begin: tuple[int, int, int] | None = None) -> Array:
        """Refuse values that would make weights NaN or infinite. ``begin`` is the first element of a grid range."""
        good = np.isfinite(values)
        if role == packing.SCALE and self._packed.scale_rule == packing.QUOTIENT:
            good &= values != 0
        if not good.all() and self._packed.family != packing.OWN:
            at = tuple(int(k) for k in np.argwhere(~good)[0])
            if begin is not None:
                at = tuple(k + low for k, low in zip(at, begin, strict=True))
                at = at if self._packed.matrices > 1 else at[1:]
            value = values[~good].flat[0]
            raise self._fail(
                f"its {role} is {value} at {list(at)}, which makes every weight of the block meaningless", role
            )
        return np.ascontiguousarray(values)

    def _add_packed_zeros(
        self, fields: dict[str, Any], grid: Grid, zeros: Zeros, matrices: tuple[int, int], at: tuple[slice, slice]
    ) -> None:
        """Add zero points as a grid; a single zero point is subtracted from the table instead."""
        part, table = self._parts[packing.ZERO], fields["table"]

        def read(begin: int, size: int) -> Array:
            return read_part(part, begin, size)

        only = grids.only_code(zeros, grid, read, self._packed.matrices)
        zeros = grids.settled(zeros, only)
        if only is not None:
            fields["table"] = table - grids.numbers_of(zeros, np.array(only, np.uint32), table)
            return
        packed, stored = self._packed, None
        if not packed.symmetric and grids.can_store(packed, grid, grouped=packing.GROUPS in self._parts):
            stored = grids.zero_fields(zeros, grid, read, (matrices, at), table)
        if stored is None:
            stored = {"zeros": np.ascontiguousarray(grids.read_numbers(zeros, grid, read, matrices, at, table=table))}
        fields.update(stored)

    def _groups(self, grid: Grid) -> Array | None:
        groups = read_part(self._parts[packing.GROUPS]).view(np.uint8).view("<i4")
        down = by_columns(self._packed) or self._packed.layout == packing.COLUMNS
        if (groups == -1).all() and not down:  # allocated by the writer, and not used
            return None
        block, count = (grid.row_block, grid.rows) if down else (grid.column_block, grid.columns)
        bad = np.flatnonzero((groups < 0) | (groups >= count))
        if bad.size:
            raise self._fail(
                f"column {int(bad[0])} is in group {int(groups[bad[0]])}, but there are {count} groups",
                packing.GROUPS,
            )
        if np.array_equal(groups, np.arange(groups.size) // block):  # blocks are faster
            return None
        return np.ascontiguousarray(groups.astype(np.uint32))


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
    (-1, 0 and 1).
    """
    codes, half = range(1 << bits), 1 << bits - 1
    values: Iterable[float] = codes
    if numbers in _POSITIVE:
        values = (*_POSITIVE[numbers], *(-value for value in _POSITIVE[numbers]))
    elif numbers == "ternary":
        values = (-1, 0, 1, math.nan)
    elif numbers != "unsigned":
        values = [(code if numbers == "offset" else code ^ half) - half for code in codes]
    return np.array([*values], np.float32)


# ---- jobs ----


def restore_jobs(
    packed: Packed, memory: int, target: int, name: str, *, owner: Any = None, ranges: Iterable[Range] | None = None
) -> Iterator[Job]:
    """Yield the jobs that dequantize a tensor into memory.

    ``owner`` keeps the memory of the parts alive; None for a file.
    """
    spec, codes = packed.packing, packed.parts[packing.CODES]
    row = dtypes.of_number(target)
    for part in ranges_of(spec) if ranges is None else ranges:
        begin = (part.first * stored_rows(spec, spec.rows) + stored_rows(spec, part.row)) * spec.row_bytes
        begin += bytes_before(spec, part.column)
        parts = packed.parts
        if spec.layout == packing.MASKED:
            parts = masked.parts_of(packed, part, name, read_part)
            begin = parts[packing.CODES].begin - codes.begin
        yield Job(
            codes.file,
            codes.begin + begin,
            memory + row.nbytes(values_before(spec, part)),
            part.matrices * part.rows * part.columns_of(spec) * 4,
            _F32.number,
            target,
            lib.SL_OP_RESTORE,
            origin=Origin(name, spec.shape, owner),
            packed=CodeReader(Packed(spec, parts), part, name),
        )


def restore_job(packed: Packed, op: int, memory: int, name: str, *, owner: Any = None) -> Job:
    """Return a job for an operation on all values of a tensor, which must be `in_order`."""
    (job,) = restore_jobs(packed, memory, _F32.number, name, owner=owner, ranges=(whole(packed.packing),))
    return job._replace(op=op)


def in_order(packed: Packing) -> bool:
    """Return True if codes are stored in the order of the values."""
    return not packed.transpose


def in_memory(packed: Packing, arrays: Mapping[str, Array]) -> tuple[Packed, Any]:
    """Return a packed tensor with parts in memory, and the owner of the memory."""
    stored = {role: np.ascontiguousarray(jobs.native_order(array)) for role, array in arrays.items()}
    parts = {}
    for role, array in stored.items():
        begin = address_of(array) if array.size else 0
        row = dtypes.BY_NAME[arrays[role].dtype.name]
        parts[role] = Part(role, None, row, array.shape, begin, begin + array.nbytes)
    return Packed(packed, parts), stored


def read_part(part: Part, begin: int = 0, size: int | None = None) -> Array:
    """Return bytes of a part in the byte order of files: a copy from a file, or a view of an array."""
    first = part.begin + begin
    end = part.end if size is None else first + size
    if part.file is None:
        return np.frombuffer(ffi.buffer(ffi.cast("char *", first), end - first), np.uint8) if end > first else _NO_BYTES
    origin = Origin(part.name, part.shape)
    return jobs.read_small(part.file, np.dtype(np.uint8), (end - first,), first, end, origin=origin)


def read_array(part: Part) -> Array:
    """Return a part of a file as an array of its own dtype, in private memory; meant for small parts."""
    shape = dtypes.array_shape(part.row, part.shape, part.end - part.begin)
    place = dtypes.array_dtype(part.row.number), shape, part.begin, part.end
    return jobs.read_small(part.file, *place, origin=Origin(part.name, part.shape))


_NO_BYTES: Array = np.empty(0, np.uint8)
