"""Compute range, mean, standard deviation, NaN, infinities and zeros of tensors in a single pass over their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple, overload

import numpy as np

from ..conversion.catalog import Catalog, Given, TensorDescription, about_value, has_names
from ..conversion.executors import EXECUTOR, Executor, check_executor, in_memory, opened, pieces_of, run_pieces
from ..core import dtypes, jobs
from ..core.arrays import Array, as_array, index_of
from ..core.files import caching
from ..core.jobs import Origin
from ..core.memory import Cache, check_threads
from ..core.names import Patterns
from ..core.native import address_of, lib, short
from ..core.packing import scheme_row
from ..core.progress import Progress, reporter
from ..core.quantized_tensor import QuantizedTensor
from ..core.runtime import paused
from ..core.showing import Result, ResultTable, figure, table, terminal_columns, width
from ..core.source import Source, of_numbers, of_packed, of_reals
from ..core.tensors import Tensors
from ..core.text import plural, printable
from ..errors import UnsupportedError, exported, public

_RECORD = jobs.struct_dtype("sl_stats")
_F32 = dtypes.BY_CODE["F32"]
# Additional fields for integers, and the dtypes with these fields.
_WHOLE = ("least", "most", "sum_low", "sum_high")
_WHOLE_NUMBERS = [row.number for row in dtypes.TABLE if row.kind in (lib.SL_KIND_INT, lib.SL_KIND_BOOL)]
_U64 = dtypes.BY_CODE["U64"].number

_SEGMENT: int = lib.SL_STATS_SEGMENT  # elements per record
_BINS: int = lib.SL_HISTOGRAM_BINS
_WORD = 8  # bytes of a bin, and of a field of a record

# Columns of the table, and of a table of at least this width; spread needs a histogram and some width.
_HEAD, _WIDE = ("tensor", "min", "max", "mean", "std", "bad"), 110
_WIDE_HEAD = ("tensor", "dtype", "shape", "min", "max", "absmax", "mean", "std", "zeros", "NaN", "Inf")
_SPREAD, _SPREAD_WIDTH = ("peak", "outliers"), 60

_OUTLIER = 6.0  # times the root mean square, below the magnitude of an outlier

_BARS = " ▁▂▃▄▅▆▇█"

HISTOGRAM_EDGES: Array = np.ldexp(1.0, np.arange(lib.SL_HISTOGRAM_BINS + 1) + lib.SL_HISTOGRAM_LOWEST)
"""The 65 edges of the 64 bins of `TensorStats.histogram`: 2**-48, 2**-47, ... 2**16. Bin k counts
``HISTOGRAM_EDGES[k] <= abs(x) < HISTOGRAM_EDGES[k + 1]``. The first bin also counts smaller nonzero values, the last
bin larger finite values."""
HISTOGRAM_EDGES.flags.writeable = False


class _StatsFields(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    count: int  # type: ignore[assignment] # hides tuple.count
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
    histogram: Array | None = None
    nbytes: int = 0


@exported()
class TensorStats(Result, _StatsFields):
    """Statistics of a tensor. ``str()`` is its row in ``safeload stats``.

    If no element is finite, ``min`` to ``std`` are nan. Its row has the name "", and floats from ``min`` to ``std``.

    Attributes:
        dtype: dtype code, such as "BF16" or "Q4_0". Quantized int8 is "I8", with statistics of the dequantized values.
        shape: logical shape, outermost axis first.
        count: number of elements.
        min: smallest finite value, exact; 0.0 for -0.0. An int for integers and bool, like max and absmax.
        max: largest finite value, exact.
        absmax: largest finite absolute value, exact.
        mean: mean of the finite values; for integers the exact sum, divided and rounded once.
        std: population standard deviation of the finite values, as in ``numpy.std``.
        nan: number of NaNs.
        inf: number of infinities of either sign.
        zeros: number of zeros of either sign.
        first_nan: index of the first NaN in C order, with an integer per axis; None without NaNs.
        first_inf: index of the first infinity in C order; None without infinities.
        histogram: int64 of shape [64], the number of finite nonzero values per bin of `HISTOGRAM_EDGES`; None unless
            requested.
        nbytes: bytes of the tensor as stored.
        peak: absmax / std; nan if std is 0.
        outliers: share of outliers among the finite values: magnitudes from the first power of two that is at least 6
            times the root mean square. nan without a histogram.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> stats = safeload.stats(np.float32([0, 1, np.nan]))
        >>> stats.nan, stats.first_nan, stats.zeros, stats.max
        (1, (2,), 1, 1.0)
    """

    __slots__ = ()

    _columns = (
        *("name", "dtype", "shape", "nbytes", "count", "min", "max", "absmax", "mean", "std"),
        *("nan", "inf", "zeros", "first_nan", "first_inf", "histogram"),
    )
    _notebook = ("name", "dtype", "shape", "min", "max", "mean", "std", "nan", "inf", "zeros")
    _json = _StatsFields._fields

    def _values(self) -> Iterable[Any]:
        return _rows([("", self)])

    @property
    def peak(self) -> float:
        return self.absmax / self.std if self.std else math.nan

    @property
    def outliers(self) -> float:
        finite = self.count - self.nan - self.inf
        if self.histogram is None or not finite:
            return math.nan
        first = np.searchsorted(HISTOGRAM_EDGES[:-1], _OUTLIER * math.hypot(self.mean, self.std))
        return int(self.histogram[first:].sum()) / finite if self.absmax else 0.0

    def __str__(self) -> str:
        return "\n".join(line for line, _ in lines_of([("", self)], terminal_columns()))


def _rows(stats: Iterable[tuple[str, TensorStats]]) -> Iterator[Any]:
    for name, (dtype, shape, count, *numbers, nan, inf, zeros, first_nan, first_inf, histogram, nbytes) in stats:
        yield (
            *(name, dtype, [*shape], nbytes, count),
            *map(float, numbers),
            *(nan, inf, zeros, [*(first_nan or ())], [*(first_inf or ())]),
            [] if histogram is None else histogram.tolist(),
        )


@exported()
class StatsTable(ResultTable[TensorStats]):
    """The dict of `TensorStats` by name that `safeload.stats` returns. ``str()`` is the table of ``safeload stats``.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> safeload.stats({"w": np.float32([1, 2, 3])})
        tensor  min  max  mean    std  bad
        w         1    3     2  0.816
    """

    _columns, _notebook = TensorStats._columns, TensorStats._notebook

    def _values(self) -> Iterable[Any]:
        return _rows(self.items())

    @property
    def summary(self) -> str:
        """The extent and the extremes in a line: "30 tensors, absmax 3.2 (model.norm.weight), 2 NaN"."""
        known = [(s.absmax, name) for name, s in self.items() if not math.isnan(s.absmax)]
        peak, name = max(known, default=(0, ""))
        parts = [plural(len(self), "tensor"), *([f"absmax {_number(peak)} ({printable(name)})"] if known else [])]
        bad = {"NaN": sum(s.nan for s in self.values()), "infinite": sum(s.inf for s in self.values())}
        return ", ".join([*parts, *(f"{count:,} {what}" for what, count in bad.items() if count)])

    def lines(self, columns: int | None = None, rows: int | None = None) -> list[str]:
        return [line for line, _ in lines_of([*islice(self.items(), rows)], columns)]


def lines_of(
    rows: Sequence[tuple[str, TensorStats]], columns: int | None, *, histogram: bool = False
) -> list[tuple[str, str]]:
    """Return the lines of a table, each with its colour or "", cut to ``columns`` characters if given."""
    wide = width() >= _WIDE
    spread = width() >= _SPREAD_WIDTH and any(s.histogram is not None for _, s in rows)
    cells: list[tuple[str, ...]] = [_WIDE_HEAD if wide else _HEAD]
    if spread:
        at = cells[0].index("std") + 1
        cells = [(*cells[0][:at], *_SPREAD, *cells[0][at:])]
    for name, s in rows:
        low, high, mean, std = map(_number, (s.min, s.max, s.mean, s.std))
        counts = [f"{count:,}" if count else "" for count in ((s.zeros, s.nan, s.inf) if wide else (s.nan + s.inf,))]
        kind = (s.dtype, str(list(s.shape))) if wide else ()
        absmax = (_number(s.absmax),) if wide else ()
        beyond = (_number(s.peak), _share(s.outliers)) if spread else ()
        cells.append((printable(name), *kind, low, high, *absmax, mean, std, *beyond, *counts))
    right = frozenset(range(3 if wide else 1, len(cells[0])))
    head, *lines = table(cells[0], cells[1:], right=right, columns=columns)
    result = [(head, "head")]
    for line, (_, s) in zip(lines, rows, strict=True):
        result.append((line, "error" if s.nan + s.inf else ""))
        if histogram and s.histogram is not None:
            result.append((f"  {_sparkline(s.histogram.tolist())}", ""))
    return result


def _number(value: float) -> str:
    return "-" if math.isnan(value) else figure(value, 3)


def _share(value: float) -> str:
    if not value or math.isnan(value):
        return "-" if value else ""
    return "<0.01%" if value < 1e-4 else f"{value:.2%}"


def _sparkline(bins: list[int]) -> str:
    """Draw bars from the first to the last nonempty bin, between their powers of two."""
    filled = [k for k, count in enumerate(bins) if count]
    if not filled:
        return "all values are zero"
    first, end = filled[0], filled[-1] + 1
    bars = "".join(_BARS[-(-count * (len(_BARS) - 1) // max(bins))] for count in bins[first:end])
    low, high = (round(math.log2(HISTOGRAM_EDGES[k])) for k in (first, end))
    return f"2^{low} {bars} 2^{high}"


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
    cache: Cache = "keep",
) -> StatsTable: ...
@overload
def stats(x: Any, *, histogram: bool = False, threads: int | None = None, progress: Progress = None) -> TensorStats: ...
@public
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
    cache: Cache = "keep",
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
            object with the ``submit`` of `concurrent.futures.Executor`, such as Dask's ``Client``.
            A single process gives identical statistics.
        threads: number of threads. None chooses automatically; pieces of an executor get a single thread.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).
        cache: "drop" leaves few pages of the files in the system's page cache, see `load`.

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
    check_threads(threads)
    check_executor(executor)
    if has_names(x):
        with caching(cache), Catalog.of(x, storage_options) as catalog:
            chosen = catalog.choose(names, only, drop)
            catalog.refuse_codes(chosen, "stats")
            return StatsTable(
                measure(catalog, chosen, histogram=histogram, executor=executor, threads=threads, progress=progress)
            )
    if not (names is only is drop is None):
        raise ValueError("names=, only= and drop= require a checkpoint or a dict")
    if executor is not None:
        raise in_memory("an array is", EXECUTOR)
    if (source := _reals("", x, threads)) is not None:
        return _measure({"": source}, [about_value("", x)], histogram, threads, progress)[""]
    if isinstance(x, QuantizedTensor):
        raise UnsupportedError(f"cannot dequantize {x.scheme}: no kernel supports it")
    dtype = np.asarray(x).dtype
    if dtype.kind == "c":
        raise UnsupportedError(f"{dtype} values have no order; pass x.real and x.imag, or abs(x)")
    raise TypeError(f"cannot compute statistics of {dtype}: it does not hold numbers")


def measure(
    catalog: Catalog,
    names: Sequence[str],
    *,
    histogram: bool = False,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, TensorStats]:
    """Compute statistics of tensors that are not codes; see `stats`."""
    if executor is not None:
        pieces = pieces_of(catalog.sizes(names), catalog, operation="stats", histogram=histogram)
        rows = run_pieces(run, pieces, executor, threads=threads, progress=progress).get("stats", {})
        with paused(len(rows)):
            return of_plain({name: rows[name] for name in names if name in rows})
    with paused(len(names)):
        tensors = catalog.plain(names)
        if tensors is not None and not tensors.remote:
            return _measure_plain(tensors, histogram, threads, progress)
        in_place = {name: catalog.in_place(name) for name in names}
        ready = {name: source for name, source in in_place.items() if source and source.row.converts_to(_F32)}
        done = _measure(ready, map(catalog.about, ready), histogram, threads, progress)
    for name in (name for name, source in in_place.items() if source is None):  # apart: each needs a copy
        if (source := _reals(name, catalog.value(name, threads), threads)) is not None:
            done |= _measure({name: source}, [catalog.about(name)], histogram, threads, None)
    return {name: done[name] for name in names if name in done}


def _measure_plain(
    tensors: Tensors, histogram: bool, threads: int | None, progress: Progress
) -> dict[str, TensorStats]:
    """Compute statistics of plain tensors of local files, in columns."""
    numbers = set(tensors.columns.numbers)
    real = [number for number in numbers if dtypes.BY_NUMBER[number].converts_to(_F32)]
    if len(real) < len(numbers):
        tensors = tensors.pick(np.flatnonzero(np.isin(tensors.spans.sources, real)))
    spans, columns, shapes = tensors.spans, tensors.columns, tensors.columns.shapes

    def run(op: int, places: Array, rows: Array) -> None:
        def origin(row: int) -> Origin:
            return Origin(tensors.names[rows[row]], shapes[rows[row]])

        with reporter(progress, int(spans.sizes.sum())) as report:  # other tensors are empty
            jobs.run_columns(spans.pick(rows), places[rows], report=report, op=op, origin=origin, threads=threads)

    codes = [dtypes.BY_NUMBER[number].code for number in columns.numbers]
    heads = [*zip(codes, shapes, spans.sizes.tolist(), strict=True)]
    return dict(zip(tensors.names, _statistics(heads, spans.sources, run, histogram), strict=True))


# ---- in pieces ----


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the statistics of the tensors of a piece; see `run_piece`."""
    with opened(piece, storage_options) as (names, (catalog,)):
        return {"stats": as_plain(measure(catalog, names, histogram=piece.get("histogram") is True, threads=threads))}


def as_plain(statistics: Mapping[str, TensorStats]) -> dict[str, list[Any]]:
    """Return statistics as plain data, by name."""
    return {
        name: [*fields, None if histogram is None else histogram.tolist(), nbytes]
        for name, (*fields, histogram, nbytes) in statistics.items()
    }


def of_plain(plain: Mapping[str, Sequence[Any]]) -> dict[str, TensorStats]:
    """Return the statistics that `as_plain` wrote."""
    rows = [
        (
            *(dtype, tuple(shape), *numbers),
            *(None if nan is None else tuple(nan), None if inf is None else tuple(inf)),
            *(None if histogram is None else np.array(histogram, np.int64), nbytes),
        )
        for dtype, shape, *numbers, nan, inf, histogram, nbytes in plain.values()
    ]
    return dict(zip(plain, map(tuple.__new__, repeat(TensorStats), rows), strict=True))


# ---- sources ----


def _reals(name: str, value: Any, threads: int | None) -> Source | None:
    """Return a tensor in memory as a source; None if it does not hold real numbers or cannot be dequantized."""
    if isinstance(value, QuantizedTensor):
        restoring = value.restoring()
        if restoring is None:
            source = of_numbers(name, value.data, scheme_row(value.scheme), threads)._replace(shape=value.shape)
        else:
            source = of_packed(name, *restoring)
            if not source.in_order:
                source = of_reals(name, value.dequantize(threads=threads), threads)
    else:
        array = as_array(value, name)
        row = dtypes.row_of(array.dtype)
        if row is None or row.packed:  # not supported by the core, or elements share bytes
            if array.dtype.kind == "f" and array.itemsize > 8:
                row = dtypes.BY_CODE["F64"]  # not exact for long double
            elif row is not None or (array.dtype.isbuiltin == 2 and array.itemsize == 1):
                row = _F32  # the small types of ml_dtypes: nothing else registers dtypes with NumPy
            else:
                return None
            array = array.astype(row.name)
        source = of_numbers(name, array, row, threads)
    return source if source.row.converts_to(_F32) else None


def _measure(
    sources: Mapping[str, Source],  # of values, or of the codes to dequantize
    abouts: Iterable[TensorDescription],
    histogram: bool,
    threads: int | None,
    progress: Progress,
) -> dict[str, TensorStats]:
    """Compute the statistics of all sources in a single run."""

    def run(op: int, places: Array, rows: Array) -> None:
        with paused(len(parts)):
            work = [parts[row].work(op, place) for row, place in zip(rows.tolist(), places[rows].tolist(), strict=True)]
        jobs.Batch(work).run(threads=threads, progress=progress)

    parts, heads = [*sources.values()], []
    for about in abouts:
        stored = about.element or dtypes.BY_NAME.get(about.dtype)
        code = about.dtype if about.packed or stored is None else stored.code
        heads.append((code, about.shape, about.nbytes))
    numbers = np.array([part.row.number for part in parts], np.uint8)
    return dict(zip(sources, _statistics(heads, numbers, run, histogram), strict=True))


def _statistics(
    heads: Sequence[tuple[str, tuple[int, ...], int]],  # dtype, as in `TensorStats`, shape and bytes of each tensor
    numbers: Array,  # uint8, dtypes of the values
    run: Callable[[int, Array, Array], object],
    histogram: bool,
) -> list[TensorStats]:
    """Compute the statistics of tensors in a single run."""
    # An allocation holds the bins of each tensor, and a record per segment. The core merges the records at the end.
    # `run` gets the operation, the address of the results of each tensor, and the tensors with elements.
    shapes = [shape for _, shape, _ in heads]
    counts = np.array([*map(math.prod, shapes)], np.int64)
    segments = -(-counts // _SEGMENT)
    bins = _BINS if histogram else 0
    words = bins + segments * (_RECORD.itemsize // _WORD)
    begins = np.cumsum(words) - words
    memory = np.zeros(int(words.sum()), np.uint64)
    places = address_of(memory) + begins * _WORD
    run(lib.SL_OP_HISTOGRAM if histogram else lib.SL_OP_STATS, places, np.flatnonzero(counts))
    merged = np.zeros(len(counts), _RECORD)
    first = (places + bins * _WORD).astype(np.uint64)
    records = segments.astype(np.uint64)
    short.sl_stats_merge(*map(address_of, (first, records)), len(counts), address_of(merged))
    nan, inf, low, high, finite = (merged[field] for field in ("nan", "infinite", "min", "max", "finite"))
    power = merged["exponent"].astype(np.intc)
    with np.errstate(all="ignore"):
        absmax = np.where(-low > high, -low, high)
        # Rounding can push the mean past min or max, and the deviation past absmax.
        mean = np.ldexp(merged["mean"] + merged["rest"], power)
        mean = np.where(low > mean, low, mean)
        mean = np.where(high < mean, high, mean)
        std, largest = np.sqrt(merged["squares"] / finite), np.ldexp(absmax, -power)
        std = np.ldexp(np.where(largest < std, largest, std), power)
    with paused(len(counts)):
        measures = [column.tolist() for column in (low, high, absmax, mean, std)]
        for row in np.flatnonzero(finite == 0).tolist():
            for column in measures:
                column[row] = math.nan  # a single object, so that equal statistics compare equal
        for row in np.flatnonzero(np.isin(numbers, _WHOLE_NUMBERS) & (finite > 0)).tolist():
            for column, number in zip(measures, _of_integers(merged[row], numbers[row] == _U64), strict=True):
                column[row] = number
        columns = [
            *([dtype for dtype, _, _ in heads], shapes, (finite + nan + inf).tolist(), *measures),
            *(nan.tolist(), inf.tolist(), merged["zeros"].tolist()),
            _indices(nan, merged["first_nan"], shapes),
            _indices(inf, merged["first_infinite"], shapes),
            [memory[at : at + bins].astype(np.int64) if histogram else None for at in begins.tolist()],
            [nbytes for _, _, nbytes in heads],
        ]
        return list(map(tuple.__new__, repeat(TensorStats), zip(*columns, strict=True)))


def _of_integers(record: Any, unsigned: bool) -> tuple[float, ...]:
    """Return the exact range of integers, their mean and their deviation."""
    least, most, sum_low, sum_high, finite = (int(record[field]) for field in (*_WHOLE, "finite"))
    flip = 0 if unsigned else 1 << 63
    low, high = least - flip, most - flip
    absmax = max(high, -low)
    mean = ((sum_high << 64) + sum_low) / finite
    return low, high, absmax, mean, min(math.sqrt(float(record["squares"]) / finite), float(absmax))


def _indices(counts: Array, first: Array, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...] | None]:
    """Return the index of the first NaN or infinity of each tensor; None if it has none."""
    indices: list[tuple[int, ...] | None] = [None] * len(counts)
    for row in np.flatnonzero(counts).tolist():
        indices[row] = index_of(int(first[row]), shapes[row])
    return indices
