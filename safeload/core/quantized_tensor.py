"""`QuantizedTensor`: a tensor in int8, in ggml blocks or packed by its checkpoint; rows and boxes of any tensor.

`take_rows` is here because rows of a quantized tensor are a quantized tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import UnsupportedError, exported, public
from . import dtypes, jobs, packing
from .arrays import Array, refuse_masked
from .cast import astype, target_array
from .jobs import Channels, Job, Origin
from .memory import check_threads, private_array
from .native import address_of, lib
from .packing import CODES, INT8, SCALE, Packed, Packing, Part, Zeros, int8_packing, scheme_row
from .restore import (
    Range,
    by_columns,
    bytes_before,
    in_memory,
    restore_box,
    restore_jobs,
    row_unit,
    rows_apart,
    settled,
    values_before,
    whole,
)
from .slice import TAKE, axes_of, positions_in, read_ranges, read_rows, rows_as_stored
from .table import Scale
from .tensors import packed_of
from .text import error_about
from .weight_file import WeightFile


@exported()
class QuantizedTensor:
    """A tensor in int8 with scales, in ggml blocks, or packed by a published checkpoint.

    Two tensors are equal if their schemes, shapes, axes and all bytes are equal. The constructor keeps ``data`` and
    ``scale`` without copying the arrays. Packed tensors ("fp8 128x128", "int4 g32", "nvfp4") come from `safeload.open`:
    ``data`` holds their codes, ``parts`` all of their stored tensors.

    ``numpy.asarray`` dequantizes to float32; ``tensor[2:5]`` is a range of the first axis.

    Args:
        scheme: "int8" or the lower-case name of a ggml type: "q4_0", "q8_0", "q6_k", ...
        shape: logical shape, outermost axis first.
        data: int8 of the tensor's shape; or uint8 bytes of blocks along the last axis: [..., K / 32 * 18] for q4_0.
        scale: float32 factors that dequantize int8: of shape [] or, with ``axis``, [shape[axis]]; None for blocks.
        axis: axis of per-axis scales; None for a single scale.

    Attributes:
        nbytes: bytes of data and scale, or of all parts.
        ndim: number of axes.
        size: number of elements.
        parts: arrays by their names in the file, or "data" and "scale"; callers should not modify them.

    Raises:
        ValueError: an unknown scheme, or arrays that do not fit the shape.
        TypeError: data or scale is not a NumPy array.

    The block formats are defined in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> q = safeload.quantize(np.ones((2, 64), np.float32), "q8_0")
        >>> q
        <QuantizedTensor q8_0 [2, 64], 136 bytes>
        >>> q.dequantize("float16").dtype, np.asarray(q).dtype
        (dtype('float16'), dtype('float32'))
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("axis", "data", "names", "packing", "roles", "scale", "scheme", "shape")

    @public
    def __init__(
        self, scheme: str, shape: tuple[int, ...], data: Array, scale: Array | None = None, axis: int | None = None
    ) -> None:
        self.scheme = scheme
        self.shape = tuple(int(dim) for dim in shape)
        self.data = data
        self.scale = scale
        self.axis = axis
        # Internal, of packed tensors: layout and meaning of the codes, and by role names and arrays of the parts.
        self.packing: Packing | None = None
        self.names: Mapping[str, str] = {}
        self.roles: Mapping[str, Array] = {}
        data_storage, scale_storage = storage_of(scheme, self.shape, axis)
        _check(f"{scheme} data", data, data_storage)
        if scale_storage is None:
            if scale is not None:
                raise ValueError(f"{scheme} stores its scales in its blocks: scale must be None")
        else:
            _check(f"{scheme} scale", scale, scale_storage)

    @classmethod
    def of_parts(cls, packing: Packing, names: Mapping[str, str], arrays: Mapping[str, Array]) -> QuantizedTensor:
        """Make a packed tensor of arrays by role, without copying. Internal.

        :meta private:

        Args:
            names: names of the parts by role, and of the tensor under `NAME`.
        """
        tensor = cls.__new__(cls)
        tensor.scheme, tensor.shape, tensor.data = packing.label, packing.shape, arrays[CODES]
        tensor.scale, tensor.axis = None, None
        tensor.packing, tensor.names, tensor.roles = packing, names, arrays
        return tensor

    @property
    def parts(self) -> dict[str, Array]:
        """The stored arrays by name."""
        if self.packing is not None:
            unnamed = {CODES: "data"}
            return {self.names.get(role, unnamed.get(role, role)): array for role, array in self.roles.items()}
        return {"data": self.data} if self.scale is None else {"data": self.data, "scale": self.scale}

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of ``np.asarray(tensor)``: float32."""
        return np.dtype(np.float32)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(array.nbytes for array in self.parts.values())

    @public
    def dequantize(self, dtype: Any = np.float32, *, out: Array | None = None, threads: int | None = None) -> Array:
        """Return the values: int8 times scale, or the exact values of ggml's reference implementation for blocks.

        Packed tensors are dequantized in float32, like the library that wrote them.

        Args:
            dtype: a floating dtype that float32 converts to.
            out: C-contiguous array of that dtype and of the tensor's shape to fill; it may overlap the tensor's own
                memory. None for a new array.
            threads: number of threads; None to choose automatically.

        Returns:
            An array of ``shape``; ``out`` if given.

        Raises:
            UnsupportedError: this scheme cannot be dequantized, or not to this dtype.
            FormatError: a scale of a packed tensor is not finite.
            ValueError: ``out`` does not fit.
        """
        target = dtypes.parse(dtype)
        row = scheme_row(self.scheme) if self.packing is None and self.scheme != INT8 else dtypes.F32
        if not target.floating or target.packed or not row.converts_to(target):
            raise UnsupportedError(f"cannot dequantize {self.scheme} to {target.name}")
        check_threads(threads)
        result = target_array(self.shape, dtypes.element_dtype(target.number), out)
        if result.size == 0:
            return result
        if out is not None and any(np.may_share_memory(result, part) for part in self.parts.values()):
            np.copyto(result, self.dequantize(dtype, threads=threads))
            return result
        batch = jobs.Batch()
        restoring = self.restoring()
        if restoring is None:
            data = np.ascontiguousarray(self.data)
            place = None, address_of(data), batch.into(result), data.nbytes, row.number, target.number
            batch.jobs.append(Job(*place, lib.SL_OP_CONVERT))
        else:
            packed, owner = restoring
            name = self.names.get(CODES, "")
            batch.jobs += restore_jobs(packed, batch.into(result), target.number, name, owner=owner)
        batch.run(threads=threads)
        return result

    def restoring(self) -> tuple[Packed, Any] | None:
        """Return the codes as a source of jobs, and the owner of their memory; None for blocks. Internal.

        :meta private:
        """
        if self.packing is not None:
            return in_memory(self.packing, self.roles)
        if self.scale is None:
            return None
        arrays = {CODES: self.data, SCALE: np.ascontiguousarray(self.scale, np.float32)}
        return in_memory(int8_packing(self.shape, self.axis), arrays)

    @public
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a quantized tensor cannot become an array without a copy, because dequantizing makes one")
        values = self.dequantize()
        return values if dtype is None else values.astype(dtype, copy=False)

    @public
    def __getitem__(self, rows: slice) -> QuantizedTensor:
        """Return a range of the first axis, which must be rows of whole blocks.

        Raises:
            TypeError: the index is not a slice.
            ValueError: a slice with a step, or rows that are not whole blocks.
        """
        if not isinstance(rows, slice):
            raise TypeError("a quantized tensor can only be sliced along its first axis, as in tensor[2:5]")
        start, stop, step = rows.indices(self.shape[0] if self.shape else 0)
        if step != 1 or not self.shape:
            raise ValueError("a quantized tensor can only be sliced along its first axis, with step 1")
        rows = slice(start, max(start, stop))
        if self.packing is not None:
            parts = {role: PartRows(array) for role, array in self.roles.items()}
            return rows_of(self.packing, self.names, parts, [rows])
        if self.scheme != INT8 and len(self.shape) == 1:
            raise ValueError(
                f"a 1-d {self.scheme} tensor has blocks along its only axis: dequantize it and slice the values"
            )
        scale = self.scale[rows] if self.axis == 0 and self.scale is not None else self.scale
        data = self.data[rows]
        return QuantizedTensor(self.scheme, (len(data), *self.shape[1:]), data, scale, self.axis)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantizedTensor):
            return NotImplemented
        return (
            (self.scheme, self.shape, self.axis) == (other.scheme, other.shape, other.axis)
            and self.packing == other.packing
            and self.parts.keys() == other.parts.keys()
            and all(
                (array.dtype, array.shape) == (other.parts[name].dtype, other.parts[name].shape)
                and np.array_equal(_bytes(array), _bytes(other.parts[name]))
                for name, array in self.parts.items()
            )
        )

    def __repr__(self) -> str:
        axis = "" if self.axis is None else f", axis={self.axis}"
        return f"<QuantizedTensor {self.scheme} {list(self.shape)}{axis}, {self.nbytes:,} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.packing is not None:
            return QuantizedTensor.of_parts, (self.packing, dict(self.names), dict(self.roles))
        return type(self), (self.scheme, self.shape, self.data, self.scale, self.axis)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def storage_of(
    scheme: str, shape: tuple[int, ...], axis: int | None
) -> tuple[tuple[np.dtype[Any], tuple[int, ...]], tuple[np.dtype[Any], tuple[int, ...]] | None]:
    """Return dtype and shape of a quantized tensor's data, and of its scale (None for blocks)."""
    if scheme == INT8:
        if axis is not None and not 0 <= axis < len(shape):
            raise ValueError(f"axis {axis} is out of range for shape {list(shape)}")
        scales = () if axis is None else (shape[axis],)
        return (np.dtype(np.int8), shape), (np.dtype(np.float32), scales)
    row = scheme_row(scheme)
    if axis is not None:
        raise ValueError(f"{scheme} has one scale per block: axis= applies only to {INT8}")
    if not shape or shape[-1] % row.block:
        reason = f"has rows of {shape[-1]}, which is not a multiple of {row.block}" if shape else "has no axes"
        raise ValueError(f"{scheme} stores blocks of {row.block} elements, but shape {list(shape)} {reason}")
    return (np.dtype(np.uint8), (*shape[:-1], row.nbytes(shape[-1]))), None


def channels_of(shape: tuple[int, ...], axis: int | None, factors: Array | None) -> Channels:
    """Return the channels of a tensor of this shape: a channel for each index along the axis, or a single channel."""
    if axis is None:
        return Channels(1, 1, factors)
    return Channels(max(1, shape[axis]), max(1, math.prod(shape[axis + 1 :])), factors)


def _check(label: str, array: Any, storage: tuple[np.dtype[Any], tuple[int, ...]]) -> None:
    refuse_masked(array, label)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{label} must be a NumPy array, got {type(array).__name__}")
    if (array.dtype, array.shape) != storage:
        raise ValueError(f"{label} must be {storage[0]} {list(storage[1])}, got {array.dtype} {list(array.shape)}")


# ---- rows of packed tensors along the first axis, in memory and in files ----

# Parts that are shared by the first axis, or divided separately.
_OF_ALL = {packing.GROUPS, packing.FACTORS, packing.SHAPE, packing.TABLE, packing.STATE}
_OF_ALL |= {packing.NESTED, packing.NESTED_TABLE}


# Parts by role.
_Parts: TypeAlias = "Mapping[str, PartRows]"


def row_block(packed: Packing, parts: _Parts) -> int:
    """Return the rows of the first axis that must be sliced together; 0 if the tensor cannot be sliced."""
    if packed.flat:
        assert packed.grid is not None
        unit = packed.grid.column_block * (packed.nested_block if packing.NESTED in parts else 1)
        return unit // math.gcd(unit, math.prod(packed.shape[1:]))
    stacked, shared = len(packed.shape) > 2, _rows_in_word(packed.zeros)
    apart = rows_apart(packed) and len(packed.shape) == 2 and shared > 0
    global_per_rows = packing.GLOBAL in parts and parts[packing.GLOBAL].size > 1
    if not stacked and (not apart or global_per_rows):
        return 0
    unit = 1 if stacked else row_unit(packed) * shared
    if packing.ZERO in parts and packed.zeros is not None and by_columns(packed):
        unit = 32 // math.gcd(packed.zeros.bits, 32)  # whole words
    if packing.NESTED in parts:
        unit = math.lcm(unit, packed.nested_block // math.gcd(packed.nested_block, _scales_per_row(packed)))
    return unit


def _scales_per_row(packed: Packing) -> int:
    grid = packed.grid
    return 0 if grid is None else packed.matrices * grid.rows * grid.columns // max(1, packed.shape[0])


def rows_of(packed: Packing, names: Mapping[str, str], parts: _Parts, runs: Sequence[slice]) -> QuantizedTensor:
    """Select runs of rows of a packed tensor along the first axis; parts in memory are views if it is a single run."""
    unit, rows, grid = row_block(packed, parts), packed.shape[0], packed.grid
    if not unit:
        raise ValueError(f"{packed.label} {list(packed.shape)} cannot be sliced: dequantize it and slice the values")
    run = cut_run(runs, unit, rows)
    if run is not None:
        raise ValueError(
            f"rows {run.start} to {run.stop} of {packed.label} are not whole blocks of {unit} rows: dequantize it "
            "and slice the values"
        )
    shape = (sum(run.stop - run.start for run in runs), *packed.shape[1:])
    changed, scales = packed._replace(shape=shape), _times(runs, _scales_per_row(packed))
    if packed.flat and grid is not None:
        scales = _over(_times(runs, math.prod(shape[1:])), grid.column_block)
        changed, sliced = _rows_of_flat(changed, parts, runs, scales)
    elif len(shape) == 2 and by_columns(packed):
        changed, sliced = _rows_by_columns(changed, parts, runs)
    else:
        axes = _axes_of_rows(packed, parts)
        sliced = {role: parts[role].along(_over(runs, block), length) for role, (block, length) in axes.items()}
        if len(shape) > 2:
            changed = changed._replace(matrices=shape[0] * (packed.matrices // max(1, rows)))
        elif grid is not None and grid.rows > 1:
            count = sum(run.stop - run.start for run in _over(runs, row_unit(packed)))
            changed = changed._replace(rows=shape[0], grid=grid._replace(rows=count))
        else:
            changed = changed._replace(rows=shape[0], grid=grid and grid._replace(row_block=max(1, shape[0])))
        if packing.OFFSETS in parts:
            sliced.update(_rows_of_masked(packed, parts, runs))
    if packing.SHAPE in parts:
        sliced[packing.SHAPE] = parts[packing.SHAPE].whole().copy()
        if len(sliced[packing.SHAPE]) == len(shape):  # else without the first axis
            sliced[packing.SHAPE][0] = shape[0]
    if packing.STATE in parts:
        import json  # as in core/files.py

        state = {**json.loads(parts[packing.STATE].whole().tobytes()), "shape": list(shape)}
        sliced[packing.STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    if packing.NESTED in parts:
        sliced[packing.NESTED] = parts[packing.NESTED].ranges(_over(scales, packed.nested_block))
    arrays = {role: sliced[role] if role in sliced else part.whole() for role, part in parts.items()}
    return QuantizedTensor.of_parts(changed, names, arrays)


def _axes_of_rows(packed: Packing, parts: _Parts) -> dict[str, tuple[int, int]]:
    """Return, for each part with an axis of rows, the rows per element of this axis, and its length."""
    grid, rows = packed.grid, packed.shape[0]
    if len(packed.shape) > 2:
        shared = grid is not None and grid.shared
        return {
            role: (1, rows)
            for role, part in parts.items()
            if role == packing.CODES or not (shared or role in _OF_ALL or part.size == 1)
        }
    axes = dict.fromkeys((packing.MASK, packing.CODES), (1, packed.rows))
    if packing.OFFSETS in parts:  # rows have different numbers of codes
        del axes[packing.CODES]
    if grid is not None and grid.rows > 1:
        block, together = row_unit(packed), _rows_in_word(packed.zeros)
        axes.update(dict.fromkeys((packing.SCALE, packing.BIAS), (block, grid.rows)))
        axes[packing.ZERO] = block * together, -(-grid.rows // together)
    return {role: axis for role, axis in axes.items() if role in parts}


def cut_run(runs: Sequence[slice], unit: int, rows: int) -> slice | None:
    """Return the first run that is not whole blocks of rows, or None; the last run may end within the last block."""
    cut = (run for run in runs if run.start % unit or (run.stop % unit and (run is not runs[-1] or run.stop != rows)))
    return next(cut, None)


def _rows_by_columns(packed: Packing, parts: _Parts, runs: Sequence[slice]) -> tuple[Packing, dict[str, Array]]:
    """`rows_of` for a matrix with codes in columns."""
    count, length, zeros, sliced = packed.shape[0], max(1, packed.columns), packed.zeros, dict[str, Array]()
    for role in filter(parts.__contains__, (packing.CODES, packing.SCALE, packing.ZERO)):
        array = parts[role].whole()
        width = array.shape[-1]  # columns of the part, or words for this many codes
        places = [slice(run.start * width // length, -(-run.stop * width // length)) for run in runs]
        sliced[role] = array[:, places[0] if len(places) == 1 else positions_of(places)]
    assert packed.grid is not None
    if zeros is not None:  # resolved by all codes of the tensor, because a few could be ambiguous
        stored, _owner = in_memory(packed, {packing.ZERO: parts[packing.ZERO].whole()})
        zeros, _ = settled(zeros, packed.grid, stored.parts[packing.ZERO], 1)
    grid, size = packed.grid._replace(columns=count), bytes_before(packed, count)
    packed = packed._replace(shape=(count, packed.rows), columns=count, row_bytes=size, grid=grid, zeros=zeros)
    return packed, sliced


def _rows_of_masked(packed: Packing, parts: _Parts, runs: Sequence[slice]) -> dict[str, Array]:
    """Return the values of runs of rows, and the number of values before each row."""
    codes, offsets = parts[packing.CODES], parts[packing.OFFSETS].whole()
    values, moved, before = [], [offsets[:0]], 0
    for run in runs:
        begin, end = (int(offsets[k]) if k < packed.rows else codes.size for k in (run.start, run.stop))
        if not 0 <= begin <= end <= codes.size or (run.start == 0 != begin):
            raise ValueError(
                f"row_offsets: rows {run.start} to {run.stop} would be values {begin} to {end} of {codes.size}"
            )
        values.append(slice(begin, end))
        moved.append(offsets[run] - offsets[run][:1] + offsets.dtype.type(before))
        before += end - begin
    return {packing.CODES: codes.ranges(values), packing.OFFSETS: np.concatenate(moved)}


def _rows_of_flat(
    packed: Packing, parts: _Parts, runs: Sequence[slice], blocks: Sequence[slice]
) -> tuple[Packing, dict[str, Array]]:
    """`rows_of` for a flat tensor with blocks across rows."""
    grid, inner, codes = packed.grid, math.prod(packed.shape[1:]), parts[packing.CODES]
    assert grid is not None
    columns, values, size = packed.shape[0] * inner, _times(runs, inner), codes.dtype.itemsize
    if packed.layout == packing.BLOCKS:
        stored = [slice(bytes_before(packed, run.start), bytes_before(packed, run.stop)) for run in values]
        sliced = {packing.CODES: codes.ranges(stored)}
    else:  # the last byte of an odd number of values is half used
        last = codes.size * size
        halves = [
            slice(run.start // 2, last if run.stop == packed.columns > run.start else run.stop // 2) for run in values
        ]
        if any(half.start % size or half.stop % size for half in halves):
            raw = jobs.native_order(np.ascontiguousarray(codes.whole())).reshape(-1).view(np.uint8)
            codes, size = PartRows(raw), 1
        stored = [slice(half.start // size, half.stop // size) for half in halves]
        sliced = {packing.CODES: codes.ranges(stored), packing.SCALE: parts[packing.SCALE].ranges(blocks)}
    grid = grid._replace(columns=sum(run.stop - run.start for run in blocks))
    return packed._replace(columns=columns, row_bytes=bytes_before(packed, columns), grid=grid), sliced


def _over(runs: Sequence[slice], unit: int) -> list[slice]:
    """Return the runs of blocks that hold runs of rows."""
    return [slice(run.start // unit, -(-run.stop // unit)) for run in runs]


def _times(runs: Sequence[slice], factor: int) -> list[slice]:
    return [slice(run.start * factor, run.stop * factor) for run in runs]


def _rows_in_word(zeros: Zeros | None) -> int:
    """Return the number of grid rows in a word of zero points; 0 if zero points straddle words."""
    if zeros is None or zeros.layout != packing.COLUMNS:
        return 1
    return zeros.word_codes or (0 if 32 % zeros.bits else 32 // zeros.bits)


# ---- parts, of which only the selected rows are read from files ----


class PartRows:
    """A part in memory, or of a file: it is read when rows are selected, and at most once as a whole."""

    def __init__(self, part: Part | Array) -> None:
        self._array = None if isinstance(part, Part) else part
        if isinstance(part, Part):
            self._part = part
            self.dtype = dtypes.array_dtype(part.row.number)
            self.shape = dtypes.array_shape(part.row, part.shape, part.end - part.begin)
            self.size = math.prod(self.shape)
        else:
            self.dtype, self.shape, self.size = part.dtype, part.shape, part.size

    def whole(self) -> Array:
        """Return the part as an array."""
        if self._array is None:
            self._array = self.ranges([slice(0, self.size)]).reshape(self.shape)
        return self._array

    def along(self, runs: Sequence[slice], length: int) -> Array:
        """Return runs of the first axis, divided into ``length`` rows if need be; a single run in memory is a view."""
        divided = self.shape[:1] != (length,)
        shape = (self.size // max(1, length),) if divided else self.shape[1:]
        if self._array is not None:
            return _picked(self._array.reshape(length, *shape), runs)
        pitch = math.prod(shape) * self.dtype.itemsize
        positions = positions_of(runs)
        unique, order = _ascending(positions)
        origin = Origin(self._part.name, self._part.shape)
        rows = read_rows(self._part.file, self._part.begin, pitch, unique, origin=origin)[order]
        return jobs.native_order(rows.view(self.dtype).reshape(len(positions), *shape))

    def ranges(self, runs: Sequence[slice]) -> Array:
        """Return ranges of the elements in C order, one after the other; a single range in memory is a view."""
        if self._array is not None:
            return _picked(self._array.reshape(-1), runs)
        part, size = self._part, self.dtype.itemsize
        array = private_array((sum(run.stop - run.start for run in runs),), self.dtype)
        batch, at = jobs.Batch(), address_of(array)
        for run in runs:
            nbytes = (run.stop - run.start) * size
            if nbytes:
                origin = Origin(part.name, part.shape)
                batch.jobs.append(Job(part.file, part.begin + run.start * size, at, nbytes, origin=origin))
            at += nbytes
        batch.run()
        return jobs.native_order(array)


def _picked(array: Array, runs: Sequence[slice]) -> Array:
    """Return runs of the first axis: a view if it is a single run."""
    picked: Array = array[runs[0]] if len(runs) == 1 else array[positions_of(runs)]
    return picked


def positions_of(runs: Sequence[slice]) -> Array:
    """Return the positions in runs."""
    return np.concatenate([np.arange(run.start, run.stop) for run in runs] or [np.empty(0, np.int64)])


# ---- rows of any tensor of a file ----

# Values that are read and converted together, at up to 8 bytes.
_CHUNK = 8 << 20


def read_scale(file: WeightFile, scale: Scale) -> Array:
    """Read the scales of an int8 tensor."""
    return jobs.read_small(file, np.dtype(np.float32), scale.shape, scale.begin, scale.end)


def take_rows(file: WeightFile, index: int, rows: Any, target: dtypes.Dtype | None, name: str) -> Any:
    """Read rows of a tensor; see `Checkpoint.take`. ``name`` is its name in messages."""
    table = file.table
    packed, row, scale = table.packed.get(index), table.row(index), table.scales.get(index)
    shape = table.shape(index) if packed is None else packed.packing.shape
    if not shape:
        raise error_about(UnsupportedError, "has no axes, so it has no rows: use checkpoint[name]", tensor=name)
    positions, inner = positions_in(rows, shape[0], name), math.prod(shape[1:])
    parts: dict[str, PartRows] = {}
    unit = 1  # rows that are read together; 0 if only all rows can be
    if packed is not None:
        parts = {role: PartRows(part) for role, part in packed.parts.items()}
        unit = row_block(packed.packing, parts)
        if target is None:
            runs = _runs(positions)
            if not unit or cut_run(runs, unit, shape[0]) is not None:
                raise _cuts(name, packed.packing.label, unit)
            return rows_of(packed.packing, packed.names(name), parts, runs)
    elif inner % row.block:  # rows begin within blocks
        unit = row.block if len(shape) == 1 else 0
        if target is None:
            raise _cuts(name, row.name, row.block)
    unique, order = _ascending(positions)
    name = table.names[index]
    factors = None if scale is None else read_scale(file, scale)
    quantized = packed is not None or factors is not None or row.blocked
    to = target if quantized else row.loaded_as(target)

    def stored(rows: Array, data: Array) -> Any:
        """Return the data of rows as a tensor."""
        if scale is not None and factors is not None:
            return QuantizedTensor(INT8, data.shape, data, factors[rows] if scale.axis == 0 else factors, scale.axis)
        return QuantizedTensor(row.name, (len(data), *shape[1:]), data) if row.blocked else data

    if packed is None and unit == 1 and (to is None or to is row or (index in table.strides and not quantized)):
        data = stored(positions, rows_as_stored(file, index, unique)[order])
        return data if to is None or to is row else astype(data, dtypes.element_dtype(to.number))
    assert to is not None

    def read(blocks: Array) -> Array:
        """Return the values of blocks of rows."""
        if packed is not None and not unit:
            return _of_packed(packed, [slice(0, size) for size in shape], to, name)
        if packed is not None:
            runs = [slice(run.start * unit, min(run.stop * unit, shape[0])) for run in _runs(blocks)]
            return rows_of(packed.packing, packed.names(name), parts, runs).dequantize(to.name)
        if unit == 1:
            tensor = stored(blocks, rows_as_stored(file, index, blocks))
            if isinstance(tensor, QuantizedTensor):
                return tensor.dequantize(to.name)
        else:
            begin, end = table.byte_range(index)
            pitch = row.block_bytes if unit else end - begin
            tensor = read_rows(file, begin, pitch, blocks, origin=Origin(name, shape))
        return _converted(tensor, row, to, (-1, *shape[1:]), name)

    values = private_array((len(unique), *shape[1:]), dtypes.element_dtype(to.number))
    size = max(1, unit or shape[0])  # rows of a block
    blocks, numbers = np.unique(unique // size, return_inverse=True)
    step = max(1, _CHUNK // max(1, size * inner))
    for begin in range(0, len(blocks) if inner else 0, step):
        first, last = np.searchsorted(numbers, (begin, begin + step))
        picked = read(blocks[begin : begin + step])
        if size > 1:
            picked = picked[(numbers[first:last] - begin) * size + unique[first:last] % size]
        values[first:last] = picked
    return values[order]


def _ascending(positions: Array) -> tuple[Array, Any]:
    """Return the distinct positions in ascending order, and the index of all positions in them."""
    distinct, inverse = np.unique(positions, return_inverse=True)
    return distinct, slice(None) if np.array_equal(distinct, positions) else inverse


def _converted(rows: Array, row: dtypes.Dtype, target: dtypes.Dtype, shape: tuple[int, ...], name: str) -> Array:
    """Convert stored elements of a floating or block dtype."""
    if not (row.packed or row.blocked):
        return astype(rows, dtypes.element_dtype(target.number))
    stored = np.ascontiguousarray(rows).view(np.uint8)
    values = private_array((stored.size // row.block_bytes * row.block,), dtypes.element_dtype(target.number))
    batch = jobs.Batch()
    place = None, address_of(stored), batch.into(values), stored.nbytes, row.number, target.number
    batch.jobs.append(Job(*place, lib.SL_OP_CONVERT, origin=Origin(name, values.shape)))
    batch.run()
    return values.reshape(shape)


def _runs(positions: Array) -> list[slice]:
    """Return positions as runs of neighbours."""
    if not len(positions):
        return [slice(0, 0)]
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    begins, ends = positions[[0, *edges]].tolist(), (positions[[*(edges - 1), -1]] + 1).tolist()
    return list(map(slice, begins, ends))


def _cuts(name: str, label: str, unit: int) -> UnsupportedError:
    how = f"are taken in whole blocks of {unit}" if unit else "cannot be taken as stored"
    return error_about(UnsupportedError, f": rows of {label} {how}; pass dtype= to dequantize them", tensor=name)


# ---- boxes of any tensor of a file ----

# A range along each axis of the loaded array.
Box = Sequence[slice]

# The parts of a matrix that can be cut along both axes.
_CUT = {packing.CODES, packing.SCALE, packing.ZERO, packing.BIAS, packing.GLOBAL, packing.GROUPS, packing.FACTORS}
_CUT |= {packing.SHAPE, packing.TABLE}
# Values that are dequantized together if a tensor is read by rows.
_BAND = 1 << 20


def read_box(
    file: WeightFile, index: int, box: Box, target: dtypes.Dtype | None, name: str, *, sparing: bool = True
) -> Array:
    """Return the values of a box in new memory; a quantized tensor needs a target.

    Unless ``sparing``, columns of codes are read with the columns between, in fewer reads.
    """
    file.table.refuse_unknown([index], file.path)
    row, shape = file.table.row(index), tuple(part.stop - part.start for part in box)
    packed = packed_of(file, index)
    if target is None or (packed is None and not row.packed and not row.blocked):
        array = read_ranges(file, index, box)
        return array if target in (None, row) or not row.floating else astype(array, dtypes.array_dtype(target.number))
    if 0 in shape:
        return np.empty(shape, dtypes.element_dtype(target.number))
    if packed is None and row.blocked and file.table.shape(index)[-1] % row.block == 0:
        first, last = box[-1].start // row.block, -(-box[-1].stop // row.block)
        stored = slice(first * row.block_bytes, last * row.block_bytes)
        data = read_ranges(file, index, (*box[:-1], stored))
        blocks = QuantizedTensor(row.name, (*shape[:-1], (last - first) * row.block), data)
        values = blocks.dequantize(target.name)[..., box[-1].start - first * row.block :][..., : shape[-1]]
        return np.ascontiguousarray(values)
    whole_shape, unit = file.table.shape(index), row.block
    if packed is not None:
        whole_shape, unit = packed.packing.shape, _together(packed.packing)
        if _can_be_cut(packed) or not unit or shape[1:] == whole_shape[1:]:
            return _of_packed(packed, box, target, name, sparing=sparing)
    step = max(1, _BAND // max(1, unit * math.prod(whole_shape[1:]))) * unit
    values, begin = private_array(shape, dtypes.element_dtype(target.number)), box[0].start
    while begin < box[0].stop:  # bands of rows end with a block, so that no byte is read twice
        end = min(box[0].stop, (begin // step + 1) * step)
        if packed is None:
            inside = (slice(None), *box[1:])
            band = take_rows(file, index, range(begin, end), target, name)[inside]
        else:
            band = _of_packed(packed, (slice(begin, end), *box[1:]), target, name)
        values[begin - box[0].start : end - box[0].start] = band
        begin = end
    return values


def read_index(file: WeightFile, index: int, indices: tuple[Any, ...], target: dtypes.Dtype, name: str) -> Array:
    """Return the elements of a quantized tensor at basic indices, dequantizing only a box around them."""
    packed = packed_of(file, index)
    axes, after = axes_of(indices, file.table.shape(index) if packed is None else packed.packing.shape, TAKE)
    box = [slice(axis[0], axis[-1] + 1) if axis else slice(0, 0) for axis in axes]
    values = read_box(file, index, box, target, name, sparing=False)
    view: Array = values[tuple(slice(None, None, axis.step) for axis in axes)][after]
    return view if view.size == values.size and view.flags.c_contiguous else view.copy()


# ---- boxes of a packed tensor ----


def _of_packed(packed: Packed, box: Box, target: dtypes.Dtype, name: str, *, sparing: bool = True) -> Array:
    """Return the values of a box, from the smallest range around it that can be dequantized alone."""
    spec, batch = packed.packing, jobs.Batch()
    part, first, shape = _range_around(packed, box)
    values = private_array(shape, dtypes.element_dtype(target.number))
    if values.size:
        cut = part.columns < spec.columns or not (part.rows == spec.rows or rows_apart(spec))
        if not sparing and by_columns(spec):
            cut = part.rows < spec.rows
        if cut and _can_be_cut(packed):
            batch.jobs.append(restore_box(packed, part, batch.into(values), target.number, name))
        else:
            memory = batch.into(values) - target.nbytes(values_before(spec, part))
            batch.jobs += restore_jobs(packed, memory, target.number, name, ranges=(part,))
        batch.run()
    inside = tuple(slice(own.start - at, own.stop - at) for own, at in zip(box, first, strict=True))
    return np.ascontiguousarray(values[inside]) if shape else values


def _range_around(packed: Packed, box: Box) -> tuple[Range, Sequence[int], tuple[int, ...]]:
    """Return the smallest range around a box that can be dequantized alone, its first indices, and its shape."""
    spec, grid = packed.packing, packed.packing.grid
    if _can_be_cut(packed):
        units = [1, 1]  # rows and columns of codes that are stored together or share a scale
        if spec.layout == packing.COLUMNS:
            units[0] = 32 // math.gcd(spec.bits, 32)
        elif spec.layout == packing.BLOCKS:
            units[1] = dtypes.BLOCK_TYPES[spec.numbers].block
        else:
            units[1] = 32 // spec.bits if spec.layout == packing.WORDS else 8 // math.gcd(spec.bits, 8)
        if grid is not None:
            blocks = (grid.row_block if grid.rows > 1 else 1), (grid.column_block if grid.columns > 1 else 1)
            units = [*map(math.lcm, units, blocks)]
        turn = -1 if spec.transpose else 1
        sides = zip([*box][::turn], units, (spec.rows, spec.columns), strict=True)
        (top, bottom), (left, right) = (_widened(part, unit, total) for part, unit, total in sides)
        part = Range(0, 1, top, bottom - top, left, right - left)
        return part, (top, left)[::turn], (part.rows, part.columns)[::turn]
    rows, *rest = spec.shape or (1,)
    begin, end, inner = 0, rows, math.prod(rest)
    if box and (unit := _together(spec)):
        begin, end = _widened(box[0], unit, rows)
    part = whole(spec)
    if spec.flat:
        part = part._replace(column=begin * inner, columns=(end - begin) * inner)
    elif end - begin < rows and spec.matrices > 1:
        each = spec.matrices // rows
        part = part._replace(first=begin * each, matrices=(end - begin) * each)
    elif end - begin < rows and by_columns(spec):
        each = spec.columns // rows
        part = part._replace(column=begin * each, columns=(end - begin) * each)
    elif end - begin < rows:
        each = spec.rows // rows
        part = part._replace(row=begin * each, rows=(end - begin) * each)
    return part, [begin, *[0] * len(rest)][: len(spec.shape)], (end - begin, *rest)[: len(spec.shape)]


def _can_be_cut(packed: Packed) -> bool:
    """Return True for a matrix of which ranges of rows and columns can be dequantized."""
    spec = packed.packing
    stored = (spec.columns, spec.rows) if spec.transpose else (spec.rows, spec.columns)
    layouts = packing.ROWS, packing.COLUMNS, packing.WORDS, packing.BLOCKS
    if spec.flat or spec.matrices != 1 or spec.shape != stored or spec.layout not in layouts:
        return False
    known = spec.layout != packing.BLOCKS or spec.numbers in dtypes.BLOCK_TYPES
    return known and not packed.parts.keys() - _CUT and spec.word_codes * spec.bits in (0, 32)


def _together(packed: Packing) -> int:
    """Return the rows of the first axis that are dequantized together; 0 if only all rows are."""
    rows, inner = max(1, math.prod(packed.shape[:1])), math.prod(packed.shape[1:])
    if packed.flat:
        block = 1 if packed.grid is None else packed.grid.column_block
        return block // math.gcd(block, inner)
    if packed.matrices > 1:
        return int(packed.matrices % rows == 0)
    each, rest = divmod(packed.columns if by_columns(packed) else packed.rows, rows)  # rows or columns of codes
    return math.lcm(row_unit(packed), each) // each if each and not rest and rows_apart(packed) else 0


def _widened(part: slice, unit: int, total: int) -> tuple[int, int]:
    """Return the begin and the end of the whole units that hold a range, within a total."""
    return part.start // unit * unit, min(total, -(-part.stop // unit) * unit)
