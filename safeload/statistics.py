"""Statistics of tensors: a plain stand-in until the kernels are merged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from . import checkpoint as checkpoints
from . import dtypes
from .checkpoint import Checkpoint
from .files import Array
from .quantized import QuantizedTensor

HISTOGRAM_EDGES: Array = np.ldexp(1.0, np.arange(65) - 48)


class TensorStats(NamedTuple):
    """Statistics of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    count: int  # type: ignore[assignment]
    min: float
    max: float
    absmax: float
    mean: float
    std: float
    nan: int
    inf: int
    zeros: int
    first_nan: tuple[int, ...] | None
    first_inf: tuple[int, ...] | None
    histogram: Array | None


def _of_one(x: Any, histogram: bool) -> TensorStats:
    if isinstance(x, QuantizedTensor):
        x = x.dequantize()
    array = np.asarray(x)
    values = array.astype(np.float64)
    nan, inf = np.isnan(values), np.isinf(values)
    finite = values[~(nan | inf)]

    def first(mask: Array) -> tuple[int, ...] | None:
        return tuple(int(k) for k in np.unravel_index(mask.argmax(), mask.shape)) if mask.any() else None

    bins = None
    if histogram:
        magnitudes = np.abs(finite[finite != 0])
        exponents = np.clip(np.floor(np.log2(magnitudes)), -48, 15).astype(np.int64) + 48
        bins = np.bincount(exponents, minlength=64)
    some = finite if finite.size else np.array([math.nan])
    row = dtypes.BY_NAME.get(array.dtype.name)
    return TensorStats(
        array.dtype.name if row is None else row.code,
        array.shape,
        array.size,
        float(some.min()),
        float(some.max()),
        float(np.abs(some).max()),
        float(some.mean()),
        float(some.std()),
        int(nan.sum()),
        int(inf.sum()),
        int((values == 0).sum()),
        first(nan),
        first(inf),
        bins,
    )


def stats(
    x: Any, *, histogram: bool = False, threads: int | None = None, progress: Any = None
) -> TensorStats | dict[str, TensorStats]:
    """Statistics of an array, of a quantized tensor, or of each tensor of a path, checkpoint or dict."""
    if isinstance(x, (np.ndarray, QuantizedTensor)):
        return _of_one(x, histogram)
    if isinstance(x, Checkpoint):
        infos = x.tensors
        return {
            name: _of_one(x.load([name], backend="pread", threads=threads)[name], histogram)
            for name in x
            if not infos[name].dtype.startswith(("C", "F4", "F6_"))
        }
    if isinstance(x, Mapping):
        return {name: _of_one(value, histogram) for name, value in x.items()}
    with checkpoints.open(x) as opened:
        return stats(opened, histogram=histogram, threads=threads)
