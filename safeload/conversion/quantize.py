"""Quantize arrays: to int8, to ggml block types and to ternary codes in the pass that reads them, and for engines.

csrc/kernels/encode.c computes the scales and codes of an engine's format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ..core import dtypes, jobs, packing
from ..core.arrays import Array, index_of
from ..core.cast import astype
from ..core.memory import check_threads, private_array, thread_count
from ..core.native import TIER, address_of, ffi, lib
from ..core.progress import Progress
from ..core.quantized_tensor import QuantizedTensor, channels_of, storage_of
from ..core.restore import divided, restore_jobs, values_before
from ..core.source import Source, memory_of, of_numbers, of_reals
from ..core.text import show, subject
from ..core.thread_group import in_order
from ..errors import RangeError, public
from ..quant import codes as moving
from ..quant.families import Preset
from ..quant.small_integers import to_bitnet
from .catalog import Catalog, RestructuredCatalog, read_values
from .recipes import TensorRecipe

SchemeName: TypeAlias = Literal[
    "int8", "q4_0", "q8_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
    "nvfp4", "tq1_0", "tq2_0",
]  # fmt: skip
Rounding: TypeAlias = Literal["absmax", "ggml"]

_F32 = dtypes.BY_CODE["F32"]


@public
def quantize(
    x: Any,
    scheme: SchemeName | Literal["bitnet"],
    *,
    axis: int | None = None,
    rounding: Rounding | None = None,
    importance: Any = None,
    out: QuantizedTensor | None = None,
    threads: int | None = None,
) -> QuantizedTensor:
    """Quantize an array to int8, to a ggml block type, or to ternary codes.

    - "int8": scale = absmax / 127, codes x * (127 / absmax) rounded half away from zero, within [-128, 127].
    - "q4_0": blocks of 32 along the last axis, each with a float16 scale d and 4-bit codes q, value (q - 8) * d. With
      ``rounding="absmax"`` d = absmax / 7 and q = round(x / d) + 8; with "ggml" the bytes match llama.cpp's reference.
    - "q8_0": blocks of 32 with a float16 scale absmax / 127 and int8 codes, as in llama.cpp's reference.
    - "q5_0": like "q4_0" with 5-bit codes, value (q - 16) * d. "q4_1" and "q5_1" add a float16 minimum m, value
      q * d + m. All match llama.cpp's reference.
    - "q4_k", "q5_k": super-blocks of 256, in which 8 runs of 32 have a 6-bit scale and a 6-bit minimum, in units of two
      float16, value q * scale - minimum. "q6_k": 16 runs of 16 with an 8-bit scale, value (q - 32) * scale. "q2_k" and
      "q3_k" are like these with 2 and 3 bits. Each scale is the best of about twenty candidates, as in llama.cpp's
      reference.
    - "iq4_nl": blocks of 32 with 4-bit indices into a table of 16 numbers. "iq4_xs": super-blocks of 8 such runs with
      6-bit scales. "mxfp4": blocks of 32 with 4-bit floats and a power of two as scale.
    - "nvfp4": blocks of 64 with 4-bit floats, in which 4 runs of 16 have a scale of float8_e4m3fn. As in llama.cpp's
      reference, the tensor has no factor: runs with absmax below 0.0058 become 0, and magnitudes above 2688 are cut.
    - "tq1_0", "tq2_0": super-blocks of 256 of the codes -1, 0 and 1, for weights that are ternary already, such as
      those of BitNet; d = absmax.
    - "bitnet": the codes -1, 0 and 1 that training computes from the master weights of BitNet b1.58, value code * m
      with m = mean(abs(x)). A byte holds the codes of four rows, as transformers packs them.

    The reference is https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c. If absmax is zero, or so small
    that its inverse is not finite, the scale is 0 and all values dequantize as 0.

    Args:
        x: array of real numbers, or anything that NumPy can convert to an array. For block types the last axis must be
            a multiple of 32, for "nvfp4" of 64, for "q2_k" to "q6_k", "iq4_xs", "tq1_0" and "tq2_0" of 256.
        scheme: see above.
        axis: for int8: the axis to give a scale per element; None for a single scale.
        rounding: for "q4_0": "absmax" (the default) or "ggml". "q8_0" accepts both, with equal results; other block
            types accept "ggml".
        importance: how much each column matters, such as the mean square of its inputs: finite numbers >= 0 of shape
            [columns], or for a stack of matrices [matrices, columns]. The bytes then match those of llama.cpp with an
            importance matrix. "q8_0", "mxfp4", "nvfp4", "tq1_0" and "tq2_0" have no choice and ignore it, as there.
        out: quantized tensor to fill, with the scheme, shape and axis of the result; None for a new one. It is left
            unchanged if a value is refused.
        threads: None: chosen automatically.

    Returns:
        The quantized tensor; ``out`` if given.

    Raises:
        RangeError: a value is NaN or infinite, or the scale of a block does not fit float16; the message has the first
            index.
        ValueError: unknown scheme or rounding, axis out of bounds, rows that are not whole blocks, or an ``out`` or
            ``importance`` that does not match.
        TypeError: x does not hold real numbers.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.quantize(np.float32([-0.5, -0.25, 0.1, 0.5]), "int8").data
        array([-127,  -64,   25,  127], dtype=int8)
    """
    if isinstance(scheme, str) and scheme.lower() == "bitnet":
        if axis is not None or rounding is not None or out is not None or importance is not None:
            raise ValueError("bitnet does not accept axis=, rounding=, importance= or out=")
        shape = of_reals("", x, threads).shape
        if len(shape) != 2 or shape[0] % 4:
            raise ValueError(f"bitnet packs four rows of a matrix into one, but the shape is {list(shape)}")
        # Ternary codes of a matrix, like `WeightQuant` of transformers' integrations/bitnet.py, in float32.
        packed, parts = to_bitnet(np.asarray(astype(x, np.float32, threads=threads)))
        return QuantizedTensor.of_parts(packed, {}, parts)
    name = packing.parse_scheme(scheme)
    if importance is not None:
        rounding = weighted_rounding(name, rounding)
    packing.SCHEMES[name].target(rounding)  # refuses an unknown rounding
    if name == packing.INT8 and rounding is not None:
        raise ValueError("rounding= applies only to q4_0: int8 supports a single rounding")
    check_threads(threads)
    source = of_reals("", x, threads)
    if axis is not None and axis < 0:
        axis += len(source.shape)
    storage_of(name, source.shape, axis)
    if out is not None:
        if not isinstance(out, QuantizedTensor):
            raise TypeError(f"out must be a QuantizedTensor, got {type(out).__name__}")
        if (out.scheme, out.shape, out.axis) != (name, source.shape, axis):
            raise ValueError(f"out is {show(out)}, but the result is {name} {list(source.shape)} with axis={axis}")
        if not (out.data.flags.c_contiguous and out.data.flags.writeable):
            raise ValueError("out.data must be C-contiguous and writable")
    weights = None if importance is None else check_importance(importance, source.shape)
    result = quantize_source(source, name, axis=axis, rounding=rounding, threads=threads, importance=weights)
    if out is None:
        return result
    out.data[...] = result.data  # only now, so that a refused value leaves out unchanged
    if out.scale is not None:
        out.scale[...] = result.scale
    return out


def weighted_rounding(scheme: Any, rounding: Rounding | None, argument: str = "importance=") -> Rounding:
    """Return the rounding for a scheme with importance."""
    if scheme == packing.INT8:
        raise ValueError(f"{argument} applies to ggml's block types, got int8")
    if rounding not in (None, "ggml"):
        raise ValueError(f'{argument} implies rounding="ggml", got {show(rounding)}')
    return "ggml"


def quantize_source(
    source: Source | Array | QuantizedTensor,
    scheme: str,
    *,
    axis: int | None,
    rounding: Rounding | None,
    data: Array | None = None,
    threads: int | None,
    importance: Array | None = None,
) -> QuantizedTensor:
    """Quantize a tensor, into ``data`` if given."""
    if isinstance(source, QuantizedTensor):
        source = source.dequantize(threads=threads)
    reals = source if isinstance(source, Source) else of_reals("", source, threads)
    request = quantizing(reals, scheme, axis, rounding, importance=importance, data=data)
    run_requests([request], threads=threads, progress=None)
    quantized: QuantizedTensor = request.result
    return quantized


# ---- importance ----


def check_importance(importance: Any, shape: tuple[int, ...], name: str = "") -> Array:
    """Return importance as float32 [matrices or 1, columns] for a tensor of this shape."""
    with np.errstate(over="ignore"):
        vectors = np.ascontiguousarray(np.asarray(importance), np.float32)
    columns = shape[-1] if shape else 1
    if vectors.shape not in ((columns,), (math.prod(shape[:-2]), columns), (*shape[:-2], columns)):
        either = f" or {[*shape[:-2], columns]}" if len(shape) > 2 else ""
        raise ValueError(f"{subject(name)}importance has shape {list(vectors.shape)}, expected [{columns}]{either}")
    if not (np.isfinite(vectors) & (vectors >= 0)).all():
        raise ValueError(f"{subject(name)}importance must be finite and >= 0")
    return vectors.reshape(-1, columns)


def weighted_jobs(
    source: Source, scheme: str, memory: int, importance: Array, threads: int | None
) -> Iterator[jobs.Job]:
    """Yield the jobs that quantize a tensor to ``memory`` (address), one for each matrix with its own importance."""
    target, columns = packing.SCHEMES[scheme].dtype, source.shape[-1]
    if source.packed is not None and (len(importance) > 1 or not source.in_order):
        # In another order than their values, or with an importance for each matrix.
        values = read_values(source, _F32, private_array(source.shape, np.dtype(np.float32)), threads)
        source = of_numbers(source.name, values, source.row, threads)
    first = source.work(lib.SL_OP_WEIGHTED, memory)._replace(target=target.number)
    if source.packed is not None:
        yield first._replace(channels=jobs.Channels(columns, 1, importance[0]))
        return
    elements = math.prod(source.shape) // len(importance)
    for index, vector in enumerate(importance):
        yield first._replace(
            offset=source.offset + source.row.nbytes(index * elements),
            size=source.row.nbytes(elements),
            memory=memory + target.nbytes(index * elements),
            channels=jobs.Channels(columns, 1, vector),
            origin=jobs.Origin(source.name, source.shape, source.owner, index * elements),
        )


# ---- many tensors in one run ----


class Request(NamedTuple):
    """A result to fill from a source."""

    source: Source
    result: Any  # a `QuantizedTensor` or an array
    target: int  # dtype number of the codes, or of the array
    importance: Array | None = None  # of the columns, see `check_importance`


def quantizing(
    source: Source,
    scheme: str,
    axis: int | None,
    rounding: Rounding | None,  # for q4_0
    *,
    importance: Array | None = None,
    data: Array | None = None,
) -> Request:
    """Return a request to quantize; the codes of its result are in ``data`` if given."""
    (data_dtype, data_shape), scale = storage_of(scheme, source.shape, axis)
    scales = None if scale is None else np.zeros(scale[1], scale[0])
    codes = private_array(data_shape, data_dtype) if data is None else data
    result = QuantizedTensor(scheme, source.shape, codes, scales, axis)
    return Request(source, result, packing.SCHEMES[scheme].target(rounding if scheme == "q4_0" else None), importance)


def run_requests(requests: Sequence[Request], *, threads: int | None, progress: Progress) -> None:
    """Fill the results: int8 in two passes over its source, everything else in a single pass."""
    ordered: list[Request] = []
    scaled: list[tuple[Source, int | None]] = []  # to quantize to int8, with their axis
    for request in requests:
        source, result = request.source, request.result
        is_int8 = isinstance(result, QuantizedTensor) and result.scale is not None
        if is_int8 and not source.in_order:
            _fill_by_parts(source, result, threads)
            continue
        ordered.append(request)
        if is_int8:
            scaled.append((source, result.axis))
    first_bytes = sum(source.size for source, _ in scaled)
    total = first_bytes + sum(request.source.size for request in ordered)
    first, second, report = None, progress, progress
    if callable(report) and first_bytes:  # both passes count
        first, second = (lambda done, _: report(done, total)), (lambda done, _: report(first_bytes + done, total))
    maxima = iter(maxima_of(scaled, threads, first))
    # The second pass reads from the page cache.
    batch = jobs.Batch()
    for source, result, target, weights in ordered:
        memory = address_of(result.data if isinstance(result, QuantizedTensor) else result)
        work: Iterable[jobs.Job] = source.jobs(memory, target)
        if isinstance(result, QuantizedTensor):
            if result.scale is not None:
                factors = _set_scale(result, next(maxima))
                work = [source.work(lib.SL_OP_INT8, memory, channels=channels_of(source.shape, result.axis, factors))]
            elif weights is not None and packing.SCHEMES[result.scheme].weighted and source.size:
                work = weighted_jobs(source, result.scheme, memory, weights, threads)
        batch.jobs += work
    batch.run(threads=threads, progress=second)


def maxima_of(
    tensors: Sequence[tuple[Source, int | None]], threads: int | None, progress: Progress = None
) -> list[Array]:
    """Return the bits of the largest magnitude in each channel of tensors with ordered values, to quantize to int8."""
    ends = np.cumsum([0, *(1 if axis is None else source.shape[axis] for source, axis in tensors)])
    bits = np.zeros(ends[-1], np.uint32)
    maxima = [bits[begin:end] for begin, end in pairwise(ends.tolist())]
    work = [
        source.work(lib.SL_OP_ABSMAX, address_of(own), channels=channels_of(source.shape, axis, None))
        for (source, axis), own in zip(tensors, maxima, strict=True)
    ]
    jobs.Batch(work).run(threads=threads, progress=progress)
    if _not_finite(bits):
        source = next(source for (source, _), own in zip(tensors, maxima, strict=True) if _not_finite(own))
        jobs.Batch([source.work(lib.SL_OP_FINITE, 0)]).run(threads=threads)  # raises, with the index
    return maxima


def _not_finite(maxima: Array) -> bool:
    """Return True if the bits of any maximum are infinity or NaN."""
    return not np.isfinite(maxima.view(np.float32)).all()


def scales_of(maxima: Array) -> tuple[Array, Array]:
    """Return the scale of each channel of an int8 tensor, and the factor for its values."""
    absmax = maxima.view(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / absmax
    usable = np.isfinite(inverse)
    scales = np.where(usable, absmax / np.float32(127), np.float32(0))
    return scales, np.ascontiguousarray(np.where(usable, inverse, np.float32(0)), np.float32).reshape(-1)


def _set_scale(result: QuantizedTensor, maxima: Array) -> Array:
    """Set the scale of an int8 tensor from the bits of its channels' maxima; return a factor per channel."""
    scales, factors = scales_of(maxima)
    assert result.scale is not None
    result.scale[...] = scales.reshape(result.scale.shape)
    return factors


# ---- int8 from packed codes in another order than their values ----

# Values restored at a time: 224 MiB of float32, more than most matrices of models with 8 billion weights have. A larger
# matrix is restored twice, because its scale must be known before its codes.
_AT_A_TIME = 56 << 20


def _fill_by_parts(source: Source, result: QuantizedTensor, threads: int | None) -> None:
    """Fill an int8 tensor from packed codes, in parts, so that restored values take bounded memory."""
    assert source.packed is not None
    assert result.scale is not None
    packed = source.packed.packing
    ranges = list(divided(packed, _AT_A_TIME))
    values = private_array((ranges[0].values,), np.dtype(np.float32))
    at, maxima, factors = address_of(values), np.zeros(result.scale.size, np.uint32), None
    for op in (lib.SL_OP_ABSMAX, lib.SL_OP_INT8):
        for part in ranges:
            begin, count = values_before(packed, part), part.values
            if factors is None or len(ranges) > 1:
                to = at - 4 * begin
                restoring = restore_jobs(source.packed, to, lib.SL_F32, source.name, owner=source.owner, ranges=(part,))
                jobs.Batch(restoring).run(threads=threads)
            own, inner = _channels(source.shape, result.axis, begin, count)
            origin = jobs.Origin(source.name, source.shape, values, begin)
            memory = address_of(maxima[own]) if factors is None else address_of(result.data) + begin
            channels = jobs.Channels(own.stop - own.start, inner, None if factors is None else factors[own])
            job = jobs.Job(None, at, memory, 4 * count, lib.SL_F32, lib.SL_F32, op, None, channels, origin)
            jobs.Batch([job]).run(threads=threads)
            if factors is None and _not_finite(maxima[own]):  # raises, with the index
                jobs.Batch([job._replace(memory=0, op=lib.SL_OP_FINITE, channels=None)]).run(threads=threads)
        if factors is None:
            factors = _set_scale(result, maxima)


def _channels(shape: tuple[int, ...], axis: int | None, begin: int, count: int) -> tuple[slice, int]:
    """Return the channels of a range of values, and the number of consecutive values per channel."""
    if axis is None:
        return slice(0, 1), 1
    length, inner = shape[axis], math.prod(shape[axis + 1 :])
    if count % (length * inner) == 0:
        return slice(0, length), inner
    first = begin // inner % length
    if count < inner:  # part of a single channel
        return slice(first, first + 1), count
    return slice(first, first + count // inner), inner


# ---- formats of engines: the values of a weight, in ranges, on several threads at once ----

# The dtypes of weights that engines quantize.
WEIGHTS = ("BF16", "F16", "F32")
# Columns of a row of weights whose blocks cross rows: whole blocks, and an even number of codes.
_FLAT = 4096
# The largest E2M1 times the largest E4M3.
_NVFP4_MOST = np.float32(2688)
# The rows of a word of AWQ's, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_Result = TypeVar("_Result")

# Weights that are read at once: few enough for the caches, and as many as hide the latency of a network.
_LOCAL, _REMOTE = 1 << 20, 4 << 20
# Threads that read from a network: one reads, while another quantizes.
_REMOTE_READERS = 2
# Bytes of the ranges that all threads read.
_MOST_BYTES = 32 << 20


class Weights(NamedTuple):
    """The values of a weight, in C order and little-endian."""

    # Returns a range, valid until its context ends; any thread may call it.
    read: Callable[[int, int], AbstractContextManager[Array]]
    step: int  # values to read at once
    readers: int | None = None  # most threads


class Scratch:
    """Memory reused from tensor to tensor."""

    _memory: Array = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array over the memory, which grows if necessary."""
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # frees the old memory before new memory is allocated
            self._memory = private_array((size,), np.dtype(np.uint8))
        array: Array = np.ndarray(shape, dtype, self._memory)
        return array


@contextmanager
def _borrowed(free: list[Scratch], count: int, dtype: np.dtype[Any]) -> Iterator[Array]:
    """Lend memory for values to a thread; it is reused from weight to weight."""
    try:
        scratch = free.pop()
    except IndexError:
        scratch = Scratch()
    try:
        yield scratch.array((count,), dtype)
    finally:
        free.append(scratch)


def in_memory(values: Array) -> Weights:
    """Return little-endian values in memory."""
    flat = values.reshape(-1)
    return Weights(lambda begin, end: nullcontext(flat[begin:end]), _LOCAL)


def weights_in(
    catalog: Catalog,
    name: str,
    row: dtypes.Dtype,
    free: list[Scratch],  # memory for ranges
    whole: Callable[[tuple[int, ...], np.dtype[np.generic]], Array],  # an array for values that have no ranges
    *,
    threads: int | None,
) -> Weights:
    """Return the values of a weight of a model as a dtype; weights with a merged adapter are computed first."""
    arranged = catalog if isinstance(catalog, RestructuredCatalog) and catalog.for_engine else None
    base, dtype = catalog if arranged is None else arranged.base, dtypes.array_dtype(row.number)
    if arranged is not None and arranged.recipes[name].renamed is None:
        items = arranged.recipes[name].items
        if len(items) > 1:
            alone = base.in_memory or base.makes or any(base.about(each).packed for each in arranged.sources_of(name))
            return _of_items(arranged, items, row, free, alone=alone)
    elif not base.makes:
        value = catalog.values(name)
        if isinstance(value, Source) and value.packed is None:
            return _ranges_of(value, row, free)
        return in_memory(jobs.native_order(read_values(value, row, whole(value.shape, dtype), threads)))
    values = whole(catalog.about(name).shape, dtype)
    catalog.read_into(name, row, values, threads)
    return in_memory(jobs.native_order(values))


def _ranges_of(source: Source, row: dtypes.Dtype, free: list[Scratch]) -> Weights:
    dtype = dtypes.array_dtype(row.number)
    if source.file is None and source.row.number == row.number and source.size:
        stored = memory_of(source)
        whole = stored.nbytes == source.size and address_of(stored) == source.offset
        if whole and source.offset % dtype.alignment == 0:
            return in_memory(stored.view(dtype))

    @contextmanager
    def read(begin: int, end: int) -> Iterator[Array]:
        part = source._replace(shape=(end - begin,), offset=source.offset + source.row.nbytes(begin))
        with _borrowed(free, end - begin, dtype) as values:
            yield jobs.native_order(read_values(part, row, values, 1))

    remote = source.file is not None and source.file.remote
    return Weights(read, _REMOTE, _REMOTE_READERS) if remote else Weights(read, _LOCAL)


def _of_items(
    catalog: RestructuredCatalog, items: Sequence[TensorRecipe], row: dtypes.Dtype, free: list[Scratch], *, alone: bool
) -> Weights:
    """Return the values of a stack, of which each strip makes one item."""
    dtype, shape = dtypes.array_dtype(row.number), items[0].shape
    size = math.prod(shape)

    @contextmanager
    def read(begin: int, end: int) -> Iterator[Array]:
        with _borrowed(free, end - begin, dtype) as values:
            for number in range(begin // size, end // size):
                item = values[number * size - begin : (number + 1) * size - begin]
                catalog.make(items[number], row, item.reshape(shape), 1)
            if end == size * len(items):
                catalog.release()
            yield jobs.native_order(values)

    return Weights(read, size, 1 if alone else None)


# ---- encoding ----


class Encoding(NamedTuple):
    """A matrix, or a stack of matrices, to quantize."""

    name: str  # of the weight, for messages
    preset: Preset
    shape: tuple[int, ...]
    row: dtypes.Dtype  # dtype of the weight before it is quantized

    @property
    def columns(self) -> int:
        return self.preset.group or max(1, self.shape[-1])

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales."""
        if self.preset.flat:
            return (-(-math.prod(self.shape) // self.columns),)
        *stack, rows, columns = self.shape
        return *stack, -(-rows // self.preset.row_block), -(-columns // self.columns)

    def stored(self, role: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return dtype and shape of a part."""
        code = self.preset.parts[role].dtype
        row, layout = self.row if code is None else dtypes.BY_CODE[code], self.preset.layout
        if role == packing.CODES and self.preset.flat:
            shape: tuple[int, ...] = (-(-math.prod(self.shape) // 2), 1)
        elif role == packing.CODES and layout == packing.WORDS:
            shape = -(-self.shape[-2] * self.preset.bits // row.bits), self.shape[-1]
        elif role == packing.CODES:
            shape = *self.shape[:-1], -(-self.shape[-1] * self.preset.bits // row.bits)
        elif role in (packing.SCALE, packing.BIAS):
            shape = self.grid
        elif role == packing.ZERO:
            rows, columns = self.grid
            shape = -(-rows * self.preset.bits // 32), columns
        else:
            shape = (1,) if role == packing.GLOBAL else self.constants()[role].shape
        return dtypes.array_dtype(row.number), shape if layout == packing.ROWS else shape[::-1]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in map(self.stored, self.preset.parts))

    def constants(self) -> dict[str, Array]:
        """Return the parts that do not depend on the values."""
        return self.preset.constants(self.preset, self.shape, self.row.name)


def encode(
    encoding: Encoding,
    weights: Weights,
    *,
    largest: float | None = None,  # for NVFP4: the largest magnitude in the weight and its fused partners
    codes: Array | None,  # memory for the codes; None to compute the other parts alone
    threads: int | None = None,
) -> dict[str, Array]:
    """Return the parts of a matrix by role, except those of `Encoding.constants`."""
    preset, shape, row = encoding.preset, encoding.shape, encoding.row
    only_scales, codes = codes is None, np.empty(0, np.uint8) if codes is None else codes
    blocks = math.prod(encoding.grid)
    scales = np.zeros(blocks, np.float32)
    biases = np.zeros(blocks if packing.BIAS in preset.parts else 0, np.float32)
    zeros = np.zeros(blocks if packing.ZERO in preset.parts else 0, np.int8)
    scale_codes = np.zeros(blocks, np.uint8)
    table = np.array(preset.table, np.float32)
    tensor_scale = np.float32(0) if largest is None else global_scale(largest, row)
    # Blocks that cross rows are never fewer than a row of `_FLAT`.
    columns = _FLAT if preset.flat else max(1, shape[-1])
    row_bytes = columns * preset.bits // 8 if preset.flat else codes.nbytes // max(1, math.prod(shape[:-1]))
    used = -(-columns * preset.bits // 8)
    if preset.layout != packing.ROWS:  # whole words
        row_bytes = used
    if used < row_bytes:  # rows end with a word that is not full
        codes.view(np.uint8).reshape(-1, row_bytes)[:, used:] = 0

    def run(strip: _Strip, values: Array) -> None:
        top = strip.first // columns  # the first row of the strip
        block = top // preset.row_block * -(-columns // encoding.columns)
        fields = {
            "method": preset.method,
            "bits": preset.bits,
            "is_signed": preset.signed,
            "high_first": preset.flat,
            "filler": strip.filler,
            "from": row.number,
            "global": float(tensor_scale),
            "rows": strip.rows,
            "columns": strip.columns,
            "row_block": preset.row_block,
            "group": encoding.columns,
            "row_bytes": row_bytes,
            "table": _pointer(table, "float *"),
            "codes": _pointer(codes, "uint8_t *", top * row_bytes),
            "scales": _pointer(scales, "float *", block),
            "biases": _pointer(biases, "float *", block),
            "zeros": _pointer(zeros, "int8_t *", block),
            "scale_codes": _pointer(scale_codes, "uint8_t *", block),
            "weights": _pointer(values, "void *"),
        }
        position = ffi.new("uint64_t *")
        status = lib.sl_encode(TIER, ffi.new("sl_encoding *", fields), position)
        assert status in (lib.SL_OK, lib.SL_E_RANGE)
        if status == lib.SL_E_RANGE:
            value = float(jobs.native_order(values[position[0] : position[0] + 1])[0])
            index = list(index_of(strip.first + position[0], shape))
            text = f"element {index} is {value}: only finite numbers can be quantized"
            if math.isfinite(value):
                text = f"the scale of the block at {index} does not fit {row.name}: pass dtype="
            raise RangeError(subject(encoding.name) + text, tensor=encoding.name)

    for _ in _each_strip(run, encoding, weights, threads):
        pass
    numbers = {packing.CODES: codes, packing.BIAS: biases, packing.GLOBAL: np.array([tensor_scale])}
    numbers[packing.ZERO] = zeros + np.int16(1 << preset.bits - 1)
    scale_dtype = encoding.stored(packing.SCALE)[0]
    numbers[packing.SCALE] = scale_codes.view(scale_dtype) if scale_dtype.itemsize == 1 else scales
    roles = (role for role in preset.parts if role in numbers and not (only_scales and role == packing.CODES))
    return {role: _stored(encoding, role, numbers[role], threads) for role in roles}


def moved(
    encoding: Encoding,
    coded: moving.Coded,
    roles: Collection[str],
    *,
    codes: Array | None,  # memory for the codes, if they are among the roles
    threads: int | None = None,
) -> dict[str, Array]:
    """Like `encode`, for some parts of a weight whose codes move from another format."""
    preset, target = encoding.preset, moving.holds(encoding.preset.name)
    assert target is not None
    grids = None if {*roles} == {packing.CODES} else moving.moved_grids(coded, target)

    def numbers(role: str) -> Array:
        if role == packing.CODES:
            assert codes is not None
            rows: Array = codes.reshape(-1).view(np.uint8).reshape(len(coded.matrices), encoding.shape[-2], -1)
            moving.move_codes(coded, target, rows, signed=preset.signed, threads=threads)
            return codes
        assert grids is not None
        if role == packing.ZERO:
            return np.full(encoding.grid, 1 << preset.bits - 1) if grids.zeros is None else grids.zeros
        values: Any = {packing.SCALE: grids.scales, packing.BIAS: grids.biases}.get(role, grids.factors)
        dtype, _ = encoding.stored(role)
        if role == packing.SCALE and dtype.itemsize == 1:
            values = values.astype(dtypes.element_dtype(dtypes.BY_CODE[target.scales[0]].number)).view(dtype)
        return np.asarray(values)

    return {role: _stored(encoding, role, numbers(role), threads) for role in roles}


def largest_in(encoding: Encoding, weights: Weights, threads: int | None = None) -> float:
    """Return the largest magnitude in a matrix; NaN counts as infinity."""

    def largest(_strip: _Strip, values: Array) -> int:
        bits = ffi.new("uint32_t *")
        lib.sl_absmax(TIER, encoding.row.number, _pointer(values, "void *"), values.size, bits)
        return int(bits[0])

    top = max(_each_strip(largest, encoding, weights, threads), default=0)
    return float(np.array([top], np.uint32).view(np.float32)[0])


def global_scale(largest: float, row: dtypes.Dtype) -> np.float32:
    """Return NVFP4's scale of a tensor; each step is rounded to the dtype of the weight, as in PyTorch."""
    dtype = dtypes.array_dtype(row.number)
    smallest = np.float32(2.0**-14 if row.code == "F16" else 2.0**-126)
    with np.errstate(over="ignore"):
        inverse = (np.float32(1) / np.maximum(np.array(largest, np.float32), smallest)).astype(dtype).astype(np.float32)
        scale: np.float32 = (inverse * _NVFP4_MOST).astype(dtype).astype(np.float32)[()]
    return scale if np.isfinite(scale) else np.float32(1)


class _Strip(NamedTuple):
    """Weights that are read together: rows of a matrix, or a run of blocks that cross rows."""

    first: int  # weight
    rows: int
    columns: int
    filler: int = 0  # the code after the last, of an odd number


def _strips(encoding: Encoding, weights: Weights) -> Iterator[_Strip]:
    """Yield the strips of a matrix, of about as many weights as are read at once."""
    preset, size = encoding.preset, math.prod(encoding.shape)
    if size == 0:
        return
    columns = _FLAT if preset.flat else encoding.shape[-1]
    rows = size // columns
    step = max(1, weights.step // columns // preset.row_block) * preset.row_block
    for begin in range(0, rows, step):
        yield _Strip(begin * columns, min(step, rows - begin), columns)
    rest = size - rows * columns
    if rest:  # an odd number of codes is padded with the first code of 0
        below = sum(value < 0 for value in preset.table)
        order = np.argsort(np.array(preset.table, np.float32), kind="stable")
        yield _Strip(rows * columns, 1, rest, int(order[below]))


def _each_strip(
    run: Callable[[_Strip, Array], _Result], encoding: Encoding, weights: Weights, threads: int | None
) -> Iterator[_Result]:
    """Call a function with each strip and its values, on several threads."""

    def read(strip: _Strip) -> _Result:
        with weights.read(strip.first, strip.first + strip.rows * strip.columns) as values:
            return run(strip, values)

    strips, bytes_of = [*_strips(encoding, weights)], encoding.row.nbytes
    longest = bytes_of(strips[0].rows * strips[0].columns) if strips else 0
    workers = min(_MOST_BYTES // max(1, longest), weights.readers or _MOST_BYTES)
    return in_order(read, strips, max(1, min(workers, thread_count(bytes_of(math.prod(encoding.shape)), threads))))


def _pointer(array: Array, kind: str, element: int = 0) -> Any:
    return ffi.cast(kind, address_of(array)) + element if array.size else ffi.NULL


def _stored(encoding: Encoding, role: str, numbers: Array, threads: int | None) -> Array:
    """Return a part in file byte order and layout: of codes in rows, unsigned zero points, or the numbers of blocks."""
    preset, (dtype, shape) = encoding.preset, encoding.stored(role)
    if role == packing.CODES and preset.layout == packing.ROWS:
        return numbers
    if role == packing.CODES:
        rows = numbers.reshape(-1).view(np.uint8).reshape(encoding.shape[-2], -1)
        if preset.layout == packing.COLUMNS:
            return _turned(rows.view(np.int32), preset)
        return moving.turned(rows, private_array(shape, dtype), threads)
    if role == packing.ZERO:
        return _packed_zeros(numbers.reshape(encoding.grid), preset)
    with np.errstate(over="ignore"):
        part: Array = jobs.native_order(numbers.astype(dtype, copy=False))
    part = part.reshape(shape if role == packing.GLOBAL else encoding.grid)
    return part if role == packing.GLOBAL else _turned(part, preset)


def _packed_zeros(zeros: Array, preset: Preset) -> Array:
    """Pack zero points down the rows into words, the first row in the lowest bits."""
    per_word = 32 // preset.bits
    codes = (zeros - preset.added).astype(np.uint8) & np.uint8((1 << preset.bits) - 1)
    padded = np.zeros((-(-len(codes) // per_word), per_word, codes.shape[1]), np.uint32)
    padded.reshape(-1, codes.shape[1])[: len(codes)] = codes
    order = _AWQ_ORDER if preset.layout == packing.WORDS else range(per_word)
    padded <<= preset.bits * np.argsort(order).astype(np.uint32)[:, None]
    return _turned(jobs.native_order(np.bitwise_or.reduce(padded, axis=1).view(np.int32)), preset)


def _turned(part: Array, preset: Preset) -> Array:
    return part if preset.layout == packing.ROWS else np.ascontiguousarray(part.T)
