"""Int8 from codes that are stored in another order than their values: some rows at a time.

The values never take more memory than these rows.
"""

from __future__ import annotations

import math

import numpy as np

from ...base.arrays import Array
from ...base.native import lib
from ...base.packing import Packing
from ...engine.codes.code_ranges import Range, small_ranges, values_before
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.restore import restore_jobs
from ...engine.codes.source import Source, address
from ...engine.run import jobs
from ...engine.run.job import Channels, Job, Origin
from ...engine.run.memory import private_array

# Values that are restored at a time: 224 MiB of float32, which most matrices of models of 8 billion weights are within.
# Larger ones are restored twice, which takes 1.7 times as long.
_AT_A_TIME = 56 << 20

_INFINITY_BITS = 0x7F800000


def fill_by_parts(source: Source, result: QuantizedTensor, threads: int | None) -> None:
    """Fills in the codes and the scale of an int8 tensor; values that are too many for one part are restored twice.

    Args:
        source: packed codes, of at least one value.
        result: int8, of the source's shape.
        threads: None: chosen automatically.

    Raises:
        RangeError: a value is not finite; the message has tensor and index.
        FormatError, OSError: the file cannot be read.
    """
    assert source.packed is not None
    assert result.scale is not None
    means = source.packed.packing
    ranges = list(small_ranges(means, _AT_A_TIME))
    values = private_array((_count(ranges[0], means),), np.dtype(np.float32))
    maxima = np.zeros(result.scale.size, np.uint32)
    for part in ranges:
        _restore(source, part, values, threads)
        job, own, inner = _job(source, part, values, result.axis)
        channels = Channels(own.stop - own.start, inner)
        memory = address(maxima[own])
        jobs.Batch([job._replace(op=lib.SL_OP_ABSMAX, memory=memory, channels=channels)]).run(threads=threads)
        if not_finite(maxima[own]):
            jobs.Batch([job._replace(op=lib.SL_OP_FINITE)]).run(threads=threads)  # raises, with the index
    factors = set_scale(result, maxima)
    for part in ranges:
        if len(ranges) > 1:
            _restore(source, part, values, threads)
        job, own, inner = _job(source, part, values, result.axis)
        channels = Channels(own.stop - own.start, inner, factors[own])
        memory = address(result.data) + values_before(means, part)
        jobs.Batch([job._replace(op=lib.SL_OP_INT8, memory=memory, channels=channels)]).run(threads=threads)


def not_finite(maxima: Array) -> bool:
    """Whether one of the bits of maxima is that of infinity or NaN."""
    return bool((maxima >= _INFINITY_BITS).any())


def set_scale(result: QuantizedTensor, maxima: Array) -> Array:
    """Sets the scale of an int8 tensor from the bits of the maxima of its channels.

    Returns:
        The factors for its values, of shape [channels].
    """
    absmax = maxima.view(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / absmax
    usable = np.isfinite(inverse)
    assert result.scale is not None
    result.scale[...] = np.where(usable, absmax / np.float32(127), np.float32(0)).reshape(result.scale.shape)
    return np.ascontiguousarray(np.where(usable, inverse, np.float32(0)), np.float32).reshape(-1)


def _count(part: Range, packed: Packing) -> int:
    return part.matrices * part.rows * part.columns_of(packed)


def _restore(source: Source, part: Range, values: Array, threads: int | None) -> None:
    """Restores a range of the values of codes."""
    assert source.packed is not None
    memory = address(values) - 4 * values_before(source.packed.packing, part)
    restoring = restore_jobs(source.packed, memory, lib.SL_F32, source.name, owner=source.owner, ranges=(part,))
    jobs.Batch(restoring).run(threads=threads)


def _job(source: Source, part: Range, values: Array, axis: int | None) -> tuple[Job, slice, int]:
    """A job on the values of a range, their channels, and the consecutive values of each."""
    assert source.packed is not None
    count, begin = _count(part, source.packed.packing), values_before(source.packed.packing, part)
    origin = Origin(source.name, source.shape, values, begin)
    job = Job(None, address(values), 0, 4 * count, lib.SL_F32, lib.SL_F32, origin=origin)
    if axis is None:
        return job, slice(0, 1), 1
    length, inner = source.shape[axis], math.prod(source.shape[axis + 1 :])
    if count % (length * inner) == 0:
        return job, slice(0, length), inner
    first = begin // inner % length
    if count < inner:  # a part of one
        return job, slice(first, first + 1), count
    return job, slice(first, first + count // inner), inner
