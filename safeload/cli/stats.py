"""``safeload stats``: statistics of tensor values."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from ..base.layout import figure, table, width
from ..base.names import natural_key
from ..base.text import printable
from .cluster import add_dask, cluster
from .common import (
    STATUS,
    add_command,
    add_json,
    add_opening,
    add_path,
    add_selection,
    add_threads,
    bar,
    columns,
    most_rows,
    open_path,
    painter,
    rest,
    shown,
)

# Maximum number of rows on a terminal.
_ROWS = 100

# Width from which the table has more columns.
_WIDE = 110

_KEYS = ("name", "min", "max", "absmax", "mean", "std", "nan", "inf", "zeros")

_BARS = " ▁▂▃▄▅▆▇█"

_EPILOG = f"""examples:
  safeload stats model.safetensors
  safeload stats Llama-3.2-1B/ --only '*norm*' --sort absmax
  safeload stats model.safetensors --histogram --only 'h.0.*'
  safeload stats model.safetensors --json | jq '.tensors[] | select(.nan > 0)'

{STATUS}"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "stats",
        help="show statistics of the values",
        description="Show minimum, maximum, mean and standard deviation of the finite values of each tensor, and count "
        "NaN, infinite and zero values. Quantized tensors are dequantized first.",
        epilog=_EPILOG,
    )
    add_path(parser)
    add_selection(parser, _KEYS, _ROWS)
    parser.add_argument(
        "--histogram", action="store_true", help="also show the distribution of absolute values by powers of two"
    )
    add_opening(parser)
    add_threads(parser)
    add_dask(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the statistics of ``options.path`` and return the exit status."""
    from ..operations.measure.stats import stats  # only here: importing it takes milliseconds

    with open_path(options.path, options) as opened, cluster(options.dask) as executor, bar("stats") as progress:
        results = stats(
            opened,
            histogram=options.histogram,
            only=options.only,
            drop=options.drop,
            executor=executor,
            threads=options.threads,
            progress=progress,
        )
    rows = _sorted(results, options.sort)
    if options.json:
        from ..operations.validate.findings import stats_json

        tensors = [{"name": name, "dtype": s.dtype, "shape": list(s.shape), **stats_json(s)} for name, s in rows]
        print(json.dumps({"path": shown(options.path), "tensors": tensors[: options.limit]}, indent=1))
        return 0
    first = rows[: most_rows(options, _ROWS)]
    for line in _lines(first, columns(), options.histogram):
        print(line)
    if len(first) < len(rows):
        print(rest(len(rows) - len(first), "tensor", options))
    return 0


def _sorted(results: dict[str, Any], key: str | None) -> list[tuple[str, Any]]:
    rows = list(results.items())
    if key == "name":
        return sorted(rows, key=lambda row: natural_key(row[0]))
    if key is None:
        return rows

    def order(row: tuple[str, Any]) -> float:
        value: float = getattr(row[1], key)
        return math.inf if math.isnan(value) else -value

    return sorted(rows, key=order)


def _lines(rows: list[tuple[str, Any]], columns: int | None, histogram: bool) -> list[str]:
    paint = painter()
    header: tuple[str, ...] = ("tensor", "min", "max", "mean", "std", "bad")
    wide = width() >= _WIDE
    if wide:
        header = ("tensor", "dtype", "shape", "min", "max", "absmax", "mean", "std", "zeros", "NaN", "Inf")
    left = {0, 1, 2} if wide else {0}
    right = frozenset(set(range(len(header))) - left)
    lines = table(header, [_cells(name, s, wide) for name, s in rows], right=right, columns=columns)
    result = [paint(lines[0], "head")]
    for line, (_, s) in zip(lines[1:], rows, strict=True):
        result.append(paint(line, "error") if s.nan + s.inf else line)
        if histogram and s.histogram is not None:
            result.append("  " + _sparkline(s.histogram.tolist()))
    return result


def _cells(name: str, s: Any, wide: bool) -> tuple[str, ...]:
    numbers = (_number(s.min), _number(s.max), _number(s.mean), _number(s.std))
    if not wide:
        return printable(name), *numbers, f"{s.nan + s.inf:,}" if s.nan + s.inf else ""
    counts = tuple(f"{count:,}" if count else "" for count in (s.zeros, s.nan, s.inf))
    return printable(name), s.dtype, str(list(s.shape)), *numbers[:2], _number(s.absmax), *numbers[2:], *counts


def _number(value: float) -> str:
    return "-" if math.isnan(value) else figure(value, 3)


def _sparkline(bins: list[int]) -> str:
    """Draw bars from the first to the last nonempty bin, between their powers of two."""
    from ..operations.measure.stats import HISTOGRAM_EDGES

    filled = [k for k, count in enumerate(bins) if count]
    if not filled:
        return "all values are zero"
    first, last = filled[0], filled[-1]
    top = max(bins)
    bars = "".join(_BARS[-(-count * (len(_BARS) - 1) // top)] for count in bins[first : last + 1])
    low, high = (round(math.log2(HISTOGRAM_EDGES[k])) for k in (first, last + 1))
    return f"2^{low} {bars} 2^{high}"
