"""`QuantizedTensor`: a tensor in int8, in ggml blocks or packed by a published checkpoint, as stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, refuse_masked
from ...base.native import lib
from ...base.packing import CODES, INT8, SCALE, Packed, Packing, int8_packing
from ...errors import UnsupportedError, exported, public
from ..codes import restore
from ..run import jobs
from ..run.cast import target_array
from ..run.jobs import Channels, Job
from ..run.memory import address_of, check_threads
from ..run.slice import TAKE, axes_of
from . import restore

_F32 = dtypes.BY_CODE["F32"]

# Keys of `QuantizedTensor.parts` without a name in a file.
_UNNAMED = {CODES: "data"}


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
            return {self.names.get(role, _UNNAMED.get(role, role)): array for role, array in self.roles.items()}
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
        row = row_of(self.scheme) if self.packing is None and self.scheme != INT8 else _F32
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
            batch.add(Job(*place, lib.SL_OP_CONVERT))
        else:
            packed, owner = restoring
            name = self.names.get(CODES, "")
            for job in restore.restore_jobs(packed, batch.into(result), target.number, name, owner=owner):
                batch.add(job)
        batch.run(threads=threads)
        return result

    def restoring(self) -> tuple[Packed, Any] | None:
        """Return the codes as a source of jobs, and the owner of their memory; None for blocks. Internal.

        :meta private:
        """
        if self.packing is not None:
            return grids.in_memory(self.packing, self.roles)
        if self.scale is None:
            return None
        arrays = {CODES: self.data, SCALE: np.ascontiguousarray(self.scale, np.float32)}
        return grids.in_memory(int8_packing(self.shape, self.axis), arrays)

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
            parts = {role: packed_rows.PartRows(array) for role, array in self.roles.items()}
            packing, arrays = packed_rows.rows_of(self.packing, parts, [rows])
            return QuantizedTensor.of_parts(packing, self.names, arrays)
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


def dequantize_index(tensor: QuantizedTensor, index: tuple[Any, ...], dtype: np.dtype[Any]) -> Array:
    """Return elements of a quantized tensor, dequantizing only the selected rows of the first axis."""
    axes, after = axes_of(index, tensor.shape, TAKE)
    start, stop = packed_rows.span_of(axes) if len(axes) > 1 else (0, None)
    values = (tensor if stop is None else tensor[start:stop]).dequantize(dtype)
    return packed_rows.part_of(values, axes, after, start)


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
    row = row_of(scheme)
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
