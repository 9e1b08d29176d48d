"""``safeload stats``: statistics of tensor values."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from ..base.names import natural_key
from .cluster import add_dask, cluster
from .common import (
    STATUS,
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

_KEYS = ("name", "min", "max", "absmax", "mean", "std", "nan", "inf", "zeros")

_EPILOG = f"""examples:
  safeload stats model.safetensors
  safeload stats Llama-3.2-1B/ --only '*norm*' --sort absmax
  safeload stats model.safetensors --histogram --only 'h.0.*'
  safeload stats model.safetensors --json | jq '.tensors[] | select(.nan > 0)'

{STATUS}"""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "Show minimum, maximum, mean and standard deviation of the finite values of each tensor, and the numbers of "
        "NaN, infinite and zero values. Quantized tensors are dequantized first."
    )
    parser.epilog = _EPILOG
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
    # Imported here: they would slow down the other commands.
    from ..operations.measure.stats import lines_of, stats

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
        tensors = [{"name": name, **statistics.to_dict()} for name, statistics in rows]
        print(json.dumps({"path": shown(options.path), "tensors": tensors[: options.limit]}, indent=1))
        return 0
    first = rows[: most_rows(options, _ROWS)]
    paint = painter()
    for line, kind in lines_of(first, columns(), histogram=options.histogram):
        print(paint(line, kind) if kind else line)
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
