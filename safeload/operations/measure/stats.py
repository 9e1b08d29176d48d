"""Compute range, mean, standard deviation, NaN, infinities and zeros of tensors in a single pass over their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, as_array, index_of
from ...base.gc_pause import paused
from ...base.native import lib, short
from ...base.scheme import row_of
from ...base.selecting import Patterns
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source, address, of_numbers, of_packed, of_reals
from ...engine.run.jobs import Batch, struct_dtype
from ...engine.run.progress import Progress
from ...engine.run.threads import check_threads
from ...errors import SafeloadError, UnsupportedError, cut_traceback
from ..sources import executors
from ..sources.catalog import Catalog, Given, has_names
from ..sources.codec import encode, from_list
from ..sources.executors import Executor
from ..sources.piece_files import in_memory
from ..sources.plan import TensorPiece, open_piece
from .stats_table import StatsTable, TensorStats

_RECORD = struct_dtype("sl_stats")
_F32 = dtypes.BY_CODE["F32"]
# Fields for all tensors, and additional fields for integers.
_MOMENTS, _WHOLE = list(_RECORD.names or ())[:12], list(_RECORD.names or ())[12:]
_WHOLE_KINDS = (lib.SL_KIND_INT, lib.SL_KIND_BOOL)

# Elements per record.
_SEGMENT: int = lib.SL_STATS_SEGMENT
_BINS: int = lib.SL_HISTOGRAM_BINS
# Bytes of a bin, and of a field of a record.
_WORD = 8


class _Part(NamedTuple):
    """One tensor to compute statistics of."""

    source: Source  # of values, or of the codes to dequantize
    dtype: str  # as in `TensorStats`
    nbytes: int  # of the tensor as stored


@overload
def stats(
    x: Given,
    *,
    histogram: bool = False,
    names: Iterable[str] | None = None,
    only: Patterns = None,
    drop: Patterns = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> StatsTable: ...
@overload
def stats(
    x: Any,
    *,
    histogram: bool = False,
    names: None = None,
    only: None = None,
    drop: None = None,
    storage_options: None = None,
    executor: None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> TensorStats: ...
def stats(
    x: Any,
    *,
    histogram: bool = False,
    names: Iterable[str] | None = None,
    only: Patterns = None,
    drop: Patterns = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> TensorStats | StatsTable:
    """Compute statistics of a tensor, or of each tensor of a checkpoint, in a single pass on all cores.

    Floats are converted to float64, and quantized tensors are dequantized to float32. ``min``, ``max`` and ``absmax``
    are exact, and ints for integers and bool. ``mean`` is within 1e-12 * absmax; for integers it is the exact sum,
    rounded once. ``std`` stays accurate if the mean is much larger. Results have identical bits for every instruction
    set and number of threads, in memory and in files.

    Paths and checkpoints are read through descriptors, never through a mapping.

    Args:
        x: an array (or anything that NumPy converts to an array) or a `QuantizedTensor`; or the path or URL of a
            checkpoint, an open `Checkpoint`, or a dict of arrays and quantized tensors.
        histogram: True to count values by binary exponent, see `HISTOGRAM_EDGES`.
        names: exact names of the tensors to include; None includes all.
        only: shell pattern, or several, of the names to include, such as ``"*norm*"``. Cannot be combined with
            ``names``.
        drop: shell pattern, or several, of names to skip.
        storage_options: options of the filesystem behind a URL, see `open`.
        executor: reads groups of tensors in other processes or on other machines with access to the same files: any
            object with the ``submit`` of `concurrent.futures.Executor`, such as Dask's
            ``client.get_executor(pure=False)``. The statistics are identical to those of a single process.
        threads: number of threads. None chooses automatically; pieces of an executor get a single thread.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        A `TensorStats` for a single tensor. For a checkpoint, a dict of `TensorStats` by name, which prints as a table
        and has the methods ``rows`` and ``to_dict`` of other results. It lacks tensors that do not hold real numbers
        (complex, text) or cannot be dequantized (block types without a kernel).

    Raises:
        TensorNotFoundError: a name does not exist, or a pattern matches no name.
        UnsupportedError: a single tensor is complex or of a block type without a kernel; or a tensor of a checkpoint
            holds codes that cannot be dequantized, such as EXL2, or was opened as stored.
        TypeError: a single array does not hold numbers.
        ValueError: ``executor`` is given, but tensors are in memory.
        FormatError: a file ends too early (with path and offset), or changed before an executor could read it.
        OSError: a file cannot be read.

    Example:
        >>> import safeload
        >>> safeload.stats([3.0, -4.0, float("nan")]).absmax
        4.0
    """
    try:
        check_threads(threads)
        executors.check_executor(executor)
        if has_names(x):
            with Catalog.of(x, storage_options) as catalog:
                chosen = catalog.choose(names, only, drop)
                catalog.refuse_codes(chosen, "stats")
                if executor is None:
                    return StatsTable(measure(catalog, chosen, histogram, threads, progress))
                pieces = measure_in_pieces(catalog, chosen, histogram, executor, threads=threads, progress=progress)
                return StatsTable(pieces)
        if not (names is only is drop is None):
            raise ValueError("names=, only= and drop= require a checkpoint or a dict")
        if executor is not None:
            raise in_memory("an array is", executors.EXECUTOR)
        part = _part("", x, threads)
        if part is None:
            raise _refusal(x)
        return _measure([part], histogram, threads, progress)[0]
    except SafeloadError as error:
        cut_traceback(error)
        raise


def measure(
    catalog: Catalog,
    names: Sequence[str],
    histogram: bool,
    threads: int | None,
    progress: Progress = None,
) -> dict[str, TensorStats]:
    """Compute statistics of tensors that are not codes; see `stats`.

    Tensors that can be read in place share a run. The rest run separately, because each needs a copy.
    """
    ready: dict[str, _Part] = {}
    to_copy: list[str] = []
    with paused(len(names)):
        for name in names:
            source = catalog.in_place(name)
            if source is None:
                to_copy.append(name)
            elif source.row.converts_to(_F32):
                about = catalog.about(name)
                ready[name] = _Part(source, about.dtype if about.packed else about.row.code, about.nbytes)
    done = dict(zip(ready, _measure(list(ready.values()), histogram, threads, progress), strict=True))
    for name in to_copy:
        part = _part(name, catalog.value(name, threads), threads)
        if part is not None:
            done[name] = _measure([part], histogram, threads, None)[0]
    return {name: done[name] for name in names if name in done}


# ---- in pieces ----


@dataclass(frozen=True, eq=False, kw_only=True)
class StatsPiece(TensorPiece):
    """A piece of `stats`."""

    histogram: bool = False


def measure_in_pieces(
    catalog: Catalog,
    names: Sequence[str],
    histogram: bool,
    executor: Executor,
    *,
    threads: int | None,
    progress: Progress,
) -> dict[str, TensorStats]:
    """Compute statistics on an executor; see `stats`."""
    sizes = {name: catalog.about(name).nbytes for name in names}
    plain = executors.by_tensor(
        run,
        lambda group, sources: StatsPiece(operation="stats", names=group, sources=sources, histogram=histogram),
        catalog,
        sizes,
        executor,
        threads=threads,
        progress=progress,
    )
    return {name: of_plain(plain[name]) for name in names if name in plain}


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the statistics of the tensors of a piece; see `run_piece`."""
    with open_piece(StatsPiece, piece, storage_options) as (decoded, catalog):
        statistics = measure(catalog, decoded.names, decoded.histogram, threads)
    return {"tensors": {name: as_plain(row) for name, row in statistics.items()}}


def as_plain(row: TensorStats) -> list[Any]:
    """Return statistics as plain data."""
    return [*encode(row[:-2]), None if row.histogram is None else row.histogram.tolist(), row.nbytes]


def of_plain(plain: Sequence[Any]) -> TensorStats:
    """Return the statistics that `as_plain` wrote."""
    *fields, histogram, nbytes = plain
    return from_list(TensorStats, [*fields, None if histogram is None else np.array(histogram, np.int64), nbytes])


# ---- parts ----


def _part(name: str, value: Any, threads: int | None) -> _Part | None:
    """Return the part for a tensor in memory, or None if it does not hold real numbers."""
    if isinstance(value, QuantizedTensor):
        return _quantized_part(name, value, threads)
    array = as_array(value, name)
    nbytes = array.nbytes
    row = dtypes.row_of(array.dtype)
    code = array.dtype.name if row is None else row.code
    if row is None or row.packed:  # not supported by the core, or elements share bytes
        wider = _wider(array.dtype, row)
        if wider is None:
            return None
        array, row = array.astype(wider.name), wider
    return _Part(of_numbers(name, array, row, threads), code, nbytes) if row.converts_to(_F32) else None


def _wider(dtype: np.dtype[Any], row: dtypes.Dtype | None) -> dtypes.Dtype | None:
    """Return a wider dtype that the core supports, or None if the dtype does not hold real numbers.

    Conversion is exact, except for long double.
    """
    if dtype.kind == "f" and dtype.itemsize > 8:
        return dtypes.BY_CODE["F64"]
    # The small types of ml_dtypes: nothing else registers dtypes with NumPy.
    return dtypes.BY_CODE["F32"] if row is not None or (dtype.isbuiltin == 2 and dtype.itemsize == 1) else None


def _quantized_part(name: str, value: QuantizedTensor, threads: int | None) -> _Part | None:
    """Return the part for a quantized tensor in memory, or None if it cannot be dequantized."""
    code = value.scheme if value.packing is not None else row_of(value.scheme).code
    restoring = value.restoring()
    if restoring is not None:
        source = of_packed(name, *restoring)
        ordered = source if source.in_order else of_reals(name, value.dequantize(threads=threads), threads)
        return _Part(ordered, code, value.nbytes)
    row = row_of(value.scheme)
    if not row.converts_to(_F32):
        return None
    return _Part(of_numbers(name, value.data, row, threads)._replace(shape=value.shape), code, value.nbytes)


def _refusal(x: Any) -> Exception:
    """Return the error for a single value without statistics."""
    if isinstance(x, QuantizedTensor):
        return UnsupportedError(f"cannot dequantize {x.scheme}: no kernel supports it")
    dtype = np.asarray(x).dtype
    if dtype.kind == "c":
        return UnsupportedError(f"{dtype} values have no order; pass x.real and x.imag, or abs(x)")
    return TypeError(f"cannot compute statistics of {dtype}: it does not hold numbers")


def _measure(parts: Sequence[_Part], histogram: bool, threads: int | None, progress: Progress) -> list[TensorStats]:
    """Compute the statistics of all parts in a single run.

    An allocation holds the bins of each part, and a record per segment. The core merges the records at the end.
    """
    counts = np.array([math.prod(part.source.shape) for part in parts], np.int64)
    segments = -(-counts // _SEGMENT)
    bins = _BINS if histogram else 0
    words = bins + segments * (_RECORD.itemsize // _WORD)
    ends = np.cumsum(words)
    memory = np.zeros(int(words.sum()), np.uint64)
    places = address(memory) + (ends - words) * _WORD
    batch = Batch()
    op = lib.SL_OP_HISTOGRAM if histogram else lib.SL_OP_STATS
    with paused(len(parts)):
        for part, count, place in zip(parts, counts.tolist(), places.tolist(), strict=True):
            if count:
                batch.add(part.source.work(op, place))
    batch.run(threads=threads, progress=progress)
    merged = np.zeros(len(parts), _RECORD)
    first = (places + bins * _WORD).astype(np.uint64)
    numbers = segments.astype(np.uint64)
    short.sl_stats_merge(*map(address, (first, numbers)), len(parts), address(merged))
    whole = merged[_WHOLE].tolist() if any(part.source.row.kind in _WHOLE_KINDS for part in parts) else None
    result = []
    with paused(len(parts)):
        for k, (part, record) in enumerate(zip(parts, merged[_MOMENTS].tolist(), strict=True)):
            begin = int(ends[k] - words[k])
            counted = memory[begin : begin + bins].astype(np.int64) if histogram else None
            result.append(_of_record(part, record, counted, None if whole is None else whole[k]))
    return result


def _of_record(
    part: _Part, record: tuple[Any, ...], histogram: Array | None, whole: tuple[int, ...] | None
) -> TensorStats:
    """Convert a merged record of the core to `TensorStats`; ``whole`` holds the additional fields for integers."""
    low: float
    high: float
    absmax: float
    finite, nan, inf, zeros, first_nan, first_inf, low, high, mean, rest, squares, exponent = record
    shape, row = part.source.shape, part.source.row
    if finite and whole is not None and row.kind in _WHOLE_KINDS:
        lowest, highest, sum_low, sum_high = whole
        flip = 0 if row.code == "U64" else 1 << 63
        low, high = lowest - flip, highest - flip
        absmax = max(high, -low)
        mean = ((sum_high << 64) + sum_low) / finite
        std = min(math.sqrt(squares / finite), float(absmax))
    elif finite:
        absmax = max(high, -low)
        # Rounding can push the mean past min or max, and the deviation past absmax.
        mean = min(max(math.ldexp(mean + rest, exponent), low), high)
        std = math.ldexp(min(math.sqrt(squares / finite), math.ldexp(absmax, -exponent)), exponent)
    else:
        low = high = absmax = mean = std = math.nan
    return TensorStats(
        part.dtype,
        shape,
        finite + nan + inf,
        low,
        high,
        absmax,
        mean,
        std,
        nan,
        inf,
        zeros,
        index_of(first_nan, shape) if nan else None,
        index_of(first_inf, shape) if inf else None,
        histogram,
        part.nbytes,
    )
