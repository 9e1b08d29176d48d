"""Conversion of arrays between dtypes, on several threads."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, as_array, refuse_masked
from ..base.native import lib
from .job import Grid, Job, moving
from .jobs import Batch
from .memory import address_of, private_array
from .threads import check_threads


def astype(x: Any, dtype: Any, *, out: Array | None = None, threads: int | None = None) -> Array:
    """An array's values in another dtype, rounded once to nearest, ties to even.

    The C core converts between floats, and from integers and bool to float32, on all cores; numpy's ``astype`` does
    everything else. A NaN stays a NaN. Where the target has no infinity (float8_e4m3fn), a value that is too large
    becomes NaN, as in ml_dtypes.

    Args:
        x: array of any layout, or anything that numpy converts to one.
        dtype: type of numpy, ml_dtypes, torch or JAX; name ("bfloat16", "bf16") or safetensors code ("BF16").
        out: C-contiguous array of that dtype and of x's shape to fill; None for a new one.
        threads: None: chosen automatically.

    Returns:
        A C-contiguous array of x's shape that shares no memory with x; ``out`` if given.

    Raises:
        TypeError: an unknown dtype, or a masked array.
        ValueError: ``out`` does not fit.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.astype(np.float32([1.0, 3.14159265]), "bfloat16")
        array([1, 3.14062], dtype=bfloat16)
    """
    array = as_array(x)
    target = dtypes.parse(dtype)
    wanted = dtypes.element_dtype(target.number)
    check_threads(threads)
    out = target_array(array.shape, wanted, out)
    source = dtypes.BY_NAME.get(array.dtype.name)
    if source is None or not _in_core(source, target, array):
        np.copyto(out, array.astype(wanted), casting="unsafe")
        return out
    if np.may_share_memory(array, out) or _planes(array) > _MAX_PLANES:
        array = array.copy(order="C")
    Batch(_jobs(array, out, source, target)).run(threads=threads)
    return out


def target_array(shape: tuple[int, ...], dtype: np.dtype[Any], out: Array | None) -> Array:
    """The array for a result of this shape and dtype: ``out`` if it fits, a new one for None.

    Raises:
        TypeError: ``out`` is a masked array.
        ValueError: ``out`` does not fit.
    """
    if out is None:
        return private_array(shape, dtype)
    refuse_masked(out, "out")
    if not isinstance(out, np.ndarray) or out.dtype != dtype or out.shape != shape:
        raise ValueError(f"out must be an array of {dtype} {list(shape)}")
    if not (out.flags.c_contiguous and out.flags.writeable and out.flags.aligned):
        raise ValueError("out must be C-contiguous, aligned and writable")
    return out


# Axes of at least this many elements fill the cache lines that a copy along them touches.
_LINE = 16
# Arrays of more planes than this are copied by numpy: a job for each plane would take longer.
_MAX_PLANES = 1 << 14


class _Axis(NamedTuple):
    """One axis of a copy: number of elements, stride in bytes in the source and in the destination."""

    length: int
    stride: int
    target_stride: int


def _merged_axes(array: Array, itemsize: int) -> list[_Axis]:
    """The array's axes, innermost first, merged into as few as visit its elements in C order, the destination's."""
    axes: list[_Axis] = []
    for length, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if length == 1:
            continue
        if axes and axes[-1].length * axes[-1].stride == stride:
            axes[-1] = axes[-1]._replace(length=axes[-1].length * length)
        else:
            target = axes[-1].length * axes[-1].target_stride if axes else itemsize
            axes.append(_Axis(length, stride, target))
    return axes


def _take_plane(axes: list[_Axis]) -> tuple[_Axis, _Axis]:
    """Removes rows and columns from the axes: columns along the destination's memory if that fills cache lines."""
    while len(axes) < 2:
        axes.append(_Axis(1, 0, 0))
    columns = axes.pop(0 if axes[0].length >= _LINE else axes.index(max(axes)))
    rows = axes.pop(axes.index(max(axes)))
    return rows, columns


def _planes(array: Array) -> int:
    axes = _merged_axes(array, array.dtype.itemsize)
    _take_plane(axes)
    return math.prod(axis.length for axis in axes)


def _jobs(array: Array, out: Array, source: dtypes.Dtype, target: dtypes.Dtype) -> list[Job]:
    """Jobs that copy an array of any strides to a C-contiguous one: one job per plane of two axes."""
    axes = _merged_axes(array, out.dtype.itemsize)
    begin, memory = array.__array_interface__["data"][0], address_of(out)
    if len(axes) == 0 or (len(axes) == 1 and axes[0].stride == array.dtype.itemsize):
        op = moving(source.number, target.number)
        return [Job(None, begin, memory, array.nbytes, source.number, target.number, op)]
    rows, columns = _take_plane(axes)
    planes = [(begin, memory)]
    for axis in axes:
        planes = [(a + k * axis.stride, b + k * axis.target_stride) for k in range(axis.length) for a, b in planes]
    size = rows.length * columns.length * array.dtype.itemsize
    strides = rows.stride, columns.stride, rows.target_stride, columns.target_stride
    grid = Grid(rows.length, columns.length, strides)
    kind = source.number, target.number, moving(source.number, target.number, grid), grid
    return [Job(None, a, b, size, *kind) for a, b in planes]


def _in_core(source: dtypes.Dtype, target: dtypes.Dtype, array: Array) -> bool:
    """Whether the C core can convert this array: its jobs take little-endian elements of whole bytes."""
    if source.packed or target.packed or not array.dtype.isnative or sys.byteorder != "little" or array.size == 0:
        return False
    if source is target:
        return True
    if not source.floating and target.code != "F32":  # would go through f32: two roundings
        return False
    return bool(lib.sl_convertible(source.number, target.number))
