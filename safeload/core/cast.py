"""Convert arrays between dtypes, on several threads."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ..errors import public
from . import dtypes
from .arrays import Array, as_array, byteswapped, refuse_masked
from .jobs import Batch, Job, JobGrid, moving
from .memory import BYTES_PER_THREAD, check_threads, private_array, thread_count
from .native import TIER, Error, address_of, check, ffi, lib


@public
def astype(x: Any, dtype: Any, *, out: Array | None = None, threads: int | None = None) -> Array:
    """Return an array's values in another dtype, rounded once to nearest, ties to even.

    The C core converts between floats, and from integers and bool to floats of at most 32 bits, on all cores; NumPy's
    ``astype`` does everything else. A NaN stays a NaN. If the target has no infinity (float8_e4m3fn), a value that is
    too large becomes NaN, as in ml_dtypes.

    Args:
        x: array of any layout, or any input of ``numpy.asarray``.
        dtype: type of NumPy, ml_dtypes, torch or JAX; name ("bfloat16", "bf16") or safetensors code ("BF16").
        out: C-contiguous array of that dtype and of x's shape to fill; it may overlap x. None for a new array.
        threads: number of threads; None to choose automatically.

    Returns:
        A C-contiguous array of x's shape that shares no memory with x; ``out`` if given.

    Raises:
        TypeError: an unknown dtype, or a masked array.
        ValueError: ``out`` does not fit.

    Example:
        >>> import numpy as np, safeload
        >>> print(safeload.astype(np.float32([1.0, 3.14159265]), "bfloat16"))
        [1 3.14062]
    """
    array = as_array(x)
    target = dtypes.parse(dtype)
    element = dtypes.element_dtype(target.number)
    check_threads(threads)
    result = target_array(array.shape, element, out)
    if out is not None and np.may_share_memory(array, out):
        array = array.copy(order="C")
    narrows = target.floating and target.bits < dtypes.F32.bits
    if narrows:
        array = _real(array)
    source = dtypes.row_of(array.dtype)
    if source is not None and _in_core(source, target, array):
        _convert(array, result, source, target.number, threads)
        return result
    if source is not None and narrows and array.size and source.converts_to(_F32_ODD):
        odd = np.empty(array.shape, np.float32)  # ml_dtypes would round to float32 first, and then again
        _convert(array, odd, source, _F32_ODD.number, threads)
        array = odd
    np.copyto(result, array.astype(element), casting="unsafe")
    return result


def _real(array: Array) -> Array:
    """Drop the imaginary part of complex numbers (NumPy warns), and round long doubles to odd float64."""
    if array.dtype.kind == "c":
        array = array.astype(f"f{array.dtype.itemsize // 2}")  # complex32 of ml_dtypes has no letter for its parts
    if array.dtype.kind != "f" or array.dtype.itemsize <= dtypes.F64.block_bytes:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        near = array.astype(np.float64)
        back = near.astype(array.dtype)
        bits = near.view(np.int64)  # the core's SL_F32_ODD, for another pair of dtypes
        bits -= np.abs(back) > np.abs(array)
        bits |= (back < array) | (back > array)
    return near


def _convert(array: Array, out: Array, source: dtypes.Dtype, target: int, threads: int | None) -> None:
    """Convert an array of any strides and byte order in the core, into a C-contiguous array elsewhere in memory."""
    if array.dtype.itemsize > 1 and array.dtype.isnative != (sys.byteorder == "little"):
        array = byteswapped(array)
    small = array.nbytes < BYTES_PER_THREAD and array.flags.c_contiguous and thread_count(array.nbytes, threads) == 1
    if small and sys.byteorder == "little":  # a batch takes 20 us
        if source.number == target:
            np.copyto(out, array.view(out.dtype))  # a swapped array still has the dtype of the other order
        elif status := lib.sl_convert(TIER, source.number, target, *map(ffi.from_buffer, (array, out)), array.size):
            check(status, Error())
        return
    jobs = _jobs(array, out, source.number, target)
    if jobs is None:
        array = array.copy(order="C")
        jobs = _jobs(array, out, source.number, target)
    batch = Batch(jobs or ())
    batch.results([out])
    batch.run(threads=threads)


def target_array(shape: tuple[int, ...], dtype: np.dtype[Any], out: Array | None) -> Array:
    """Return ``out`` if it fits a result of this shape and dtype, or a new array for None."""
    if out is None:
        return private_array(shape, dtype)
    refuse_masked(out, "out")
    if not isinstance(out, np.ndarray) or out.dtype != dtype or out.shape != shape:
        raise ValueError(f"out must be a NumPy array of {dtype} {list(shape)}")
    if not (out.flags.c_contiguous and out.flags.writeable and out.flags.aligned):
        raise ValueError("out must be C-contiguous, aligned and writable")
    return out


_F32_ODD = dtypes.of_number(lib.SL_F32_ODD)  # float32, rounded to odd

# A copy along an axis of this many elements fills the cache lines it touches.
_LINE = 16
# Arrays of more planes are copied by NumPy: a job for each plane would take longer.
_MAX_PLANES = 1 << 14


def _merged_axes(array: Array, itemsize: int) -> list[tuple[int, int, int]]:
    """Return length, source step and target step of axes, innermost first, merged if C order allows."""
    axes: list[tuple[int, int, int]] = []
    for length, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        inner, *steps = axes[-1] if axes else (1, 0, itemsize)
        if axes and inner * steps[0] == stride:
            axes[-1] = (inner * length, *axes[-1][1:])
        elif length > 1:
            axes.append((length, stride, inner * steps[1]))
    return axes


def _jobs(array: Array, out: Array, source: int, target: int) -> list[Job] | None:
    """Return jobs that copy any strides to C order, a job per plane of two axes; None for too many planes."""
    axes = _merged_axes(array, out.dtype.itemsize)
    begin, memory = array.__array_interface__["data"][0], address_of(out)
    if not axes or (len(axes) == 1 and axes[0][1] == array.dtype.itemsize):
        return [Job(None, begin, memory, array.nbytes, source, target, moving(source, target))]
    axes += [(1, 0, 0)] * (2 - len(axes))
    columns = axes.pop(0 if axes[0][0] >= _LINE else axes.index(max(axes)))
    rows = axes.pop(axes.index(max(axes)))
    if math.prod(length for length, _, _ in axes) > _MAX_PLANES:
        return None
    planes = [(begin, memory)]
    for length, stride, step in axes:
        planes = [(a + k * stride, b + k * step) for k in range(length) for a, b in planes]
    grid = JobGrid(rows[0], columns[0], (rows[1], columns[1], rows[2], columns[2]))
    size, op = rows[0] * columns[0] * array.dtype.itemsize, moving(source, target, grid)
    return [Job(None, a, b, size, source, target, op, grid) for a, b in planes]


def _in_core(source: dtypes.Dtype, target: dtypes.Dtype, array: Array) -> bool:
    """Return True if the C core converts this array with a single rounding; its jobs take elements of whole bytes."""
    if source.packed or target.packed or array.size == 0:
        return False
    if source is target:
        return True
    if not source.floating and not (target.floating and target.bits <= dtypes.F32.bits):  # float32 lies between
        return False
    return source.converts_to(target)
