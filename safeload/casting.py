"""Conversion of arrays between dtypes, on all cores."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import dtypes, jobs
from ._native import lib
from .files import Array


def astype(x: Any, dtype: Any, *, out: Array | None = None, threads: int | None = None) -> Array:
    """An array's values in another dtype, rounded once to nearest, ties to even.

    Between floats, and from integers and bool to float32, in C on all cores; everything else as numpy's ``astype`` does
    it. A NaN stays a NaN. Where the target has no infinity (float8_e4m3fn) too large a value becomes NaN, as in
    ml_dtypes.

    Args:
        x: array, or what numpy makes one of, of any layout.
        dtype: numpy or ml_dtypes type, name ("bfloat16") or safetensors code ("BF16").
        out: C-contiguous array of that dtype and of x's shape to fill; None for a new one.
        threads: None for what helps.

    Returns:
        A C-contiguous array of x's shape that shares no memory with x; ``out`` if it was given.

    Raises:
        TypeError: no such dtype.
        ValueError: ``out`` does not fit.
    """
    array = np.asarray(x)
    target = dtypes.parse(dtype)
    wanted = dtypes.element_dtype(target.number)
    jobs.check_threads(threads)
    if out is None:
        out = jobs.private_array(array.shape, wanted)
    elif not isinstance(out, np.ndarray) or out.dtype != wanted or out.shape != array.shape:
        raise ValueError(f"out must be an array of {wanted} {list(array.shape)}")
    elif not (out.flags.c_contiguous and out.flags.writeable and out.flags.aligned):
        raise ValueError("out must be C-contiguous, aligned and writable")
    source = dtypes.BY_NAME.get(array.dtype.name)
    if source is None or not _in_core(source, target, array):
        np.copyto(out, array.astype(wanted), casting="unsafe")
        return out
    if np.may_share_memory(array, out):
        array = array.copy()
    contiguous = array if array.flags.c_contiguous else array.copy(order="C")
    job = jobs.Job(
        lib.SL_MEMORY,
        jobs.address_of(contiguous),
        jobs.address_of(out),
        contiguous.nbytes,
        source.number,
        target.number,
    )
    jobs.run([job], lib.SL_READ, lambda job, position: ("", None), threads=threads)
    return out


def _in_core(source: dtypes.Dtype, target: dtypes.Dtype, array: Array) -> bool:
    """Whether the C core converts these: its jobs take little-endian elements of whole bytes."""
    if source.packed or target.packed or not array.dtype.isnative or sys.byteorder != "little" or array.size == 0:
        return False
    if not source.floating and target.code != "F32":  # would go through f32: two roundings
        return False
    return source is target or bool(lib.sl_convertible(source.number, target.number))
