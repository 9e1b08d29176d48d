"""Statistics of tensors, and tables of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...base.arrays import Array
from ...base.layout import figure, table, terminal_columns, width
from ...base.native import lib
from ...base.results import Result, ResultTable
from ...base.text import printable
from ...errors import exported

# Width from which the table has more columns.
_WIDE = 110

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

    def lines(self, columns: int | None = None, rows: int | None = None) -> list[str]:
        return [line for line, _ in lines_of([*islice(self.items(), rows)], columns)]


def lines_of(
    rows: Sequence[tuple[str, TensorStats]], columns: int | None, *, histogram: bool = False
) -> list[tuple[str, str]]:
    """Return the lines of a table, each with its colour or "", cut to ``columns`` characters if given."""
    header: tuple[str, ...] = ("tensor", "min", "max", "mean", "std", "bad")
    wide = width() >= _WIDE
    if wide:
        header = ("tensor", "dtype", "shape", "min", "max", "absmax", "mean", "std", "zeros", "NaN", "Inf")
    left = {0, 1, 2} if wide else {0}
    right = frozenset(set(range(len(header))) - left)
    lines = table(header, [_cells(name, s, wide) for name, s in rows], right=right, columns=columns)
    result = [(lines[0], "head")]
    for line, (_, s) in zip(lines[1:], rows, strict=True):
        result.append((line, "error" if s.nan + s.inf else ""))
        if histogram and s.histogram is not None:
            result.append(("  " + _sparkline(s.histogram.tolist()), ""))
    return result


def _cells(name: str, s: TensorStats, wide: bool) -> tuple[str, ...]:
    numbers = (_number(s.min), _number(s.max), _number(s.mean), _number(s.std))
    if not wide:
        return printable(name), *numbers, f"{s.nan + s.inf:,}" if s.nan + s.inf else ""
    counts = tuple(f"{count:,}" if count else "" for count in (s.zeros, s.nan, s.inf))
    return printable(name), s.dtype, str(list(s.shape)), *numbers[:2], _number(s.absmax), *numbers[2:], *counts


def _number(value: float) -> str:
    return "-" if math.isnan(value) else figure(value, 3)


def _sparkline(bins: list[int]) -> str:
    """Draw bars from the first to the last nonempty bin, between their powers of two."""
    filled = [k for k, count in enumerate(bins) if count]
    if not filled:
        return "all values are zero"
    first, last = filled[0], filled[-1]
    top = max(bins)
    bars = "".join(_BARS[-(-count * (len(_BARS) - 1) // top)] for count in bins[first : last + 1])
    low, high = (round(math.log2(HISTOGRAM_EDGES[k])) for k in (first, last + 1))
    return f"2^{low} {bars} 2^{high}"
