"""`QuantizedTensor`: a tensor in int8 or in blocks of ggml, as stored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, refuse_masked
from ..base.native import lib
from ..base.scheme import INT8, row_of
from ..errors import UnsupportedError
from . import jobs
from .cast import target_array
from .threads import check_threads


class QuantizedTensor:
    """A tensor in int8 with scales, or in blocks of ggml.

    Two tensors are equal if their schemes, shapes, axes and all bytes are. The constructor copies nothing: data and
    scale are the arrays that it was given.

    Args:
        scheme: "int8" or the lower-case name of a ggml type: "q4_0", "q8_0", "q6_k", ...
        shape: logical shape, outermost axis first.
        data: int8 of the tensor's shape; or uint8 whose last axis counts bytes of blocks: [..., K / 32 * 18] for q4_0.
        scale: float32 factors that dequantize int8: of shape [] or, with ``axis``, [shape[axis]]; None for blocks.
        axis: axis of per-axis scales, one for each index along it; None for one scale of the whole tensor.

    Attributes:
        nbytes: bytes of data and scale.

    Raises:
        ValueError: an unknown scheme, or arrays that do not fit the shape.
        TypeError: data or scale is not a numpy array.

    The blocks are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("axis", "data", "scale", "scheme", "shape")

    def __init__(
        self, scheme: str, shape: tuple[int, ...], data: Array, scale: Array | None = None, axis: int | None = None
    ) -> None:
        self.scheme = scheme
        self.shape = tuple(int(dim) for dim in shape)
        self.data = data
        self.scale = scale
        self.axis = axis
        wanted = storage_of(scheme, self.shape, axis)
        _check(f"{scheme} data", data, wanted[0])
        if wanted[1] is None:
            if scale is not None:
                raise ValueError(f"{scheme} has its scales in its blocks: scale must be None")
        else:
            _check(f"{scheme} scale", scale, wanted[1])

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dequantize(self, dtype: Any = np.float32, *, out: Array | None = None, threads: int | None = None) -> Array:
        """The values: int8 times its scale; for blocks the same values as ggml's reference implementation.

        Args:
            dtype: a floating dtype that float32 converts to.
            out: C-contiguous array of that dtype and of the tensor's shape to fill; None for a new one.
            threads: None: chosen automatically.

        Returns:
            An array of ``shape``; ``out`` if given.

        Raises:
            UnsupportedError: there is no kernel for this scheme, or no conversion to this dtype.
            ValueError: ``out`` does not fit.
        """
        target = dtypes.parse(dtype)
        source = row_of(self.scheme).number
        if not target.floating or target.packed or not lib.sl_convertible(source, target.number):
            raise UnsupportedError(f"there is no kernel that dequantizes {self.scheme} to {target.name}")
        check_threads(threads)
        result = target_array(self.shape, dtypes.element_dtype(target.number), out)
        data = np.ascontiguousarray(self.data)
        if data.size:
            batch = jobs.Batch()
            place = None, jobs.address_of(data), batch.into(result), data.nbytes, source, target.number
            if self.scale is None:
                batch.add(jobs.Job(*place, lib.SL_OP_CONVERT))
            else:
                channels = channels_of(self.shape, self.axis, np.ascontiguousarray(self.scale, np.float32))
                batch.add(jobs.Job(*place, lib.SL_OP_FROM_INT8, channels=channels))
            batch.run(threads=threads)
        return result

    def _rows(self, rows: slice) -> QuantizedTensor:
        """A range of the first axis; the whole tensor if it is 1-D and in blocks."""
        data, scale = self.data[rows], self.scale
        if self.scheme != INT8 and len(self.shape) == 1:
            return self
        if self.axis == 0 and scale is not None:
            scale = scale[rows]
        return QuantizedTensor(self.scheme, (len(data), *self.shape[1:]), data, scale, self.axis)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantizedTensor):
            return NotImplemented
        return (
            (self.scheme, self.shape, self.axis) == (other.scheme, other.shape, other.axis)
            and np.array_equal(self.data, other.data)
            and (self.scale is None) == (other.scale is None)
            and (self.scale is None or other.scale is None or self.scale.tobytes() == other.scale.tobytes())
        )

    def __repr__(self) -> str:
        axis = "" if self.axis is None else f", axis={self.axis}"
        return f"<QuantizedTensor {self.scheme} {list(self.shape)}{axis}, {self.nbytes:,} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.scheme, self.shape, self.data, self.scale, self.axis)


def storage_of(
    scheme: str, shape: tuple[int, ...], axis: int | None
) -> tuple[tuple[np.dtype[Any], tuple[int, ...]], tuple[np.dtype[Any], tuple[int, ...]] | None]:
    """Dtype and shape of a quantized tensor's data and of its scale (None for blocks).

    Raises:
        ValueError: an unknown scheme, an axis out of range, or rows that do not fill whole blocks.
    """
    if scheme == INT8:
        if axis is not None and not 0 <= axis < len(shape):
            raise ValueError(f"axis {axis} is outside the axes of {list(shape)}")
        scales = () if axis is None else (shape[axis],)
        return (np.dtype(np.int8), shape), (np.dtype(np.float32), scales)
    row = row_of(scheme)
    if axis is not None:
        raise ValueError(f"{scheme} has a scale for each block: axis is for {INT8}")
    if not shape or shape[-1] % row.block:
        found = f"has rows of {shape[-1]}, which is not a multiple of {row.block}" if shape else "is that of a scalar"
        raise ValueError(f"{scheme} stores blocks of {row.block} elements, but shape {list(shape)} {found}")
    return (np.dtype(np.uint8), (*shape[:-1], row.nbytes(shape[-1]))), None


def channels_of(shape: tuple[int, ...], axis: int | None, factors: Array | None) -> jobs.Channels:
    """The channels of a tensor of this shape: one, or one for each index along an axis."""
    if axis is None:
        return jobs.Channels(1, 1, factors)
    return jobs.Channels(max(1, shape[axis]), max(1, math.prod(shape[axis + 1 :])), factors)


def _check(what: str, array: Any, wanted: tuple[np.dtype[Any], tuple[int, ...]]) -> None:
    refuse_masked(array, what)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{what} must be a numpy array, not {type(array).__name__}")
    if (array.dtype, array.shape) != wanted:
        raise ValueError(f"{what} is {array.dtype} {list(array.shape)}, but it must be {wanted[0]} {list(wanted[1])}")
