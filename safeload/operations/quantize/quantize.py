"""Quantizes arrays to int8 or to the block types of ggml, in the pass that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ...base.arrays import Array
from ...base.native import lib
from ...base.scheme import INT8, SCHEMES, parse
from ...base.text import show
from ...engine.codes.quantized_tensor import QuantizedTensor, channels_of, storage_of
from ...engine.codes.source import Source, address, of_reals
from ...engine.run import jobs
from ...engine.run.memory import private_array
from ...engine.run.progress import Progress
from ...engine.run.threads import check_threads
from .bitnet import BITNET, quantize_bitnet
from .int8_by_parts import fill_by_parts, not_finite, set_scale

SchemeName: TypeAlias = Literal["int8", "q4_0", "q8_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"]
Rounding: TypeAlias = Literal["absmax", "ggml"]


class Request(NamedTuple):
    """One result to fill from a source: a quantized tensor, or an array of the dtype with number ``target``."""

    source: Source
    result: QuantizedTensor | Array
    target: int


def new_tensor(source: Source, scheme: str, axis: int | None, data: Array | None = None) -> QuantizedTensor:
    """A new quantized tensor, to be filled by `run_requests`, with codes in ``data`` if given."""
    (data_dtype, data_shape), scale = storage_of(scheme, source.shape, axis)
    scales = None if scale is None else np.zeros(scale[1], scale[0])
    codes = private_array(data_shape, data_dtype) if data is None else data
    return QuantizedTensor(scheme, source.shape, codes, scales, axis)


def run_requests(wanted: Sequence[Request], *, threads: int | None, progress: Progress) -> None:
    """Fills the results: int8 in two passes over its source, everything else in one.

    Raises:
        RangeError: a value is out of range for its scheme; the message has tensor and index.
    """
    for w in wanted:
        if _by_parts(w):
            assert isinstance(w.result, QuantizedTensor)
            fill_by_parts(w.source, w.result, threads)
    wanted = [w for w in wanted if not _by_parts(w)]
    scaled = [w for w in wanted if _is_int8(w)]
    first, second = _halves(progress, sum(w.source.size for w in scaled), sum(w.source.size for w in wanted))
    factors = _scales(scaled, threads, first)
    # What is read twice comes from the page cache the second time.
    batch = jobs.Batch()
    for w in wanted:
        memory = address(w.result.data if isinstance(w.result, QuantizedTensor) else w.result)
        if id(w) in factors:
            assert isinstance(w.result, QuantizedTensor)
            channels = channels_of(w.source.shape, w.result.axis, factors[id(w)])
            batch.add(w.source.work(lib.SL_OP_INT8, memory, channels=channels))
        else:
            for job in w.source.jobs(memory, w.target):
                batch.add(job)
    batch.run(threads=threads, progress=second)


def _is_int8(w: Request) -> bool:
    return isinstance(w.result, QuantizedTensor) and w.result.scale is not None


def _by_parts(w: Request) -> bool:
    return _is_int8(w) and not w.source.in_order


def _scales(scaled: Sequence[Request], threads: int | None, progress: Progress) -> dict[int, Array]:
    """Fills in the scales of int8 tensors. Returns the factors for their values, by ``id`` of the request."""
    maxima = [np.zeros(w.result.scale.shape, np.uint32) for w in scaled]  # type: ignore[union-attr]
    channels = [channels_of(w.source.shape, w.result.axis, None) for w in scaled]  # type: ignore[union-attr]
    work = [
        w.source.work(lib.SL_OP_ABSMAX, address(bits), channels=one)
        for w, bits, one in zip(scaled, maxima, channels, strict=True)
    ]
    jobs.Batch(work).run(threads=threads, progress=progress)
    factors = {}
    for w, bits in zip(scaled, maxima, strict=True):
        if not_finite(bits):
            jobs.Batch([w.source.work(lib.SL_OP_FINITE, 0)]).run(threads=threads)  # raises, with the index
        factors[id(w)] = set_scale(w.result, bits)  # type: ignore[arg-type]
    return factors


def _halves(progress: Progress, first: int, second: int) -> tuple[Progress, Progress]:
    """Splits one progress callback between two runs; ``first`` and ``second`` are their bytes."""
    if not callable(progress) or not first:
        return None, progress
    report = progress
    return (lambda done, total: report(done, first + second)), (
        lambda done, total: report(first + done, first + second)
    )


# ---- one array ----


def quantize(
    x: Any,
    scheme: SchemeName | Literal["bitnet"],
    *,
    axis: int | None = None,
    rounding: Rounding | None = None,
    out: QuantizedTensor | None = None,
    threads: int | None = None,
) -> QuantizedTensor:
    """Quantizes an array to int8, to a block type of ggml, or to ternary codes.

    - "int8": scale = absmax / 127, codes x * (127 / absmax) rounded half away from zero, within [-128, 127].
    - "q4_0": blocks of 32 along the last axis, each with a float16 scale d and 4-bit codes q, value (q - 8) * d. With
      ``rounding="absmax"`` d = absmax / 7 and q = round(x / d) + 8; with "ggml" the bytes are those of llama.cpp's
      reference.
    - "q8_0": blocks of 32 with a float16 scale absmax / 127 and int8 codes, as in llama.cpp's reference.
    - "q5_0": as "q4_0" with 5-bit codes, value (q - 16) * d; "q4_1" and "q5_1": also with a float16 minimum m, value
      q * d + m. All as in llama.cpp's reference.
    - "q4_k", "q5_k": super-blocks of 256, in which 8 runs of 32 have a 6-bit scale and a 6-bit minimum, in units of two
      float16, value q * scale - minimum; "q6_k": 16 runs of 16 with an 8-bit scale, value (q - 32) * scale. Each scale
      is the best of some twenty tries, as in llama.cpp's reference without an importance matrix.
    - "bitnet": for the master weights of BitNet b1.58, what training computes with: codes -1, 0 and 1, value code * m,
      where m is the mean of abs(x); four rows of codes in one of bytes, as transformers packs them.

    The reference is https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c. An absmax of zero, or one so
    small that its inverse is not finite, gives scale 0, and all values dequantize as 0.

    Args:
        x: array of real numbers, or anything that numpy converts to one; for block types the last axis must be a
            multiple of 32, for "q4_k", "q5_k" and "q6_k" of 256.
        scheme: one of the above.
        axis: for int8 the axis with a scale for each of its elements; None for one scale.
        rounding: for "q4_0": "absmax" (the default) or "ggml"; "q8_0" takes both, with the same result; the others
            take "ggml".
        out: a quantized tensor of the same scheme, shape and axis to fill; None for a new one. It is unchanged if a
            value is refused.
        threads: None: chosen automatically.

    Returns:
        The quantized tensor; ``out`` if it was given.

    Raises:
        RangeError: NaN, infinity, or a block whose scale float16 cannot hold, with the index of the first.
        ValueError: unknown scheme or rounding, an axis out of bounds, rows that are not whole blocks, an ``out`` that
            does not match.
        TypeError: x does not hold real numbers.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.quantize(np.float32([-0.5, -0.25, 0.1, 0.5]), "int8").data
        array([-127,  -64,   25,  127], dtype=int8)
    """
    if isinstance(scheme, str) and scheme.lower() == BITNET:
        if axis is not None or rounding is not None or out is not None:
            raise ValueError("bitnet takes neither axis=, rounding= nor out=")
        return quantize_bitnet("", x, threads)
    name = parse(scheme)
    target = SCHEMES[name].target(rounding)
    if name == INT8 and rounding is not None:
        raise ValueError("rounding is for q4_0: int8 has one")
    check_threads(threads)
    source = of_reals("", x, threads)
    if axis is not None and axis < 0:
        axis += len(source.shape)
    storage_of(name, source.shape, axis)
    if out is not None:
        _check_fitting(out, source, name, axis)
    result = new_tensor(source, name, axis)
    run_requests([Request(source, result, target)], threads=threads, progress=None)
    if out is None:
        return result
    out.data[...] = result.data  # only now: out is unchanged if a value is refused
    if out.scale is not None:
        out.scale[...] = result.scale
    return out


def quantize_source(
    source: Source | Array | QuantizedTensor,
    scheme: str,
    *,
    axis: int | None,
    rounding: Rounding | None,
    data: Array,
    threads: int | None,
) -> QuantizedTensor:
    """Quantizes one tensor into ``data``.

    Raises:
        RangeError: a value is out of range for the scheme; the message has tensor and index.
    """
    if isinstance(source, QuantizedTensor):
        source = source.dequantize(threads=threads)
    given = source if isinstance(source, Source) else of_reals("", source, threads)
    result = new_tensor(given, scheme, axis, data)
    run_requests([Request(given, result, SCHEMES[scheme].target(rounding))], threads=threads, progress=None)
    return result


def _check_fitting(out: QuantizedTensor, source: Source, scheme: str, axis: int | None) -> None:
    if not isinstance(out, QuantizedTensor):
        raise TypeError(f"out must be a QuantizedTensor, not {type(out).__name__}")
    if (out.scheme, out.shape, out.axis) != (scheme, source.shape, axis):
        raise ValueError(f"out is {show(out)}, but the result is {scheme} {list(source.shape)} with axis={axis}")
    if not (out.data.flags.c_contiguous and out.data.flags.writeable):
        raise ValueError("out.data must be C-contiguous and writable")
