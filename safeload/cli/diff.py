"""``safeload diff``: compare two checkpoints."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .cluster import add_dask, cluster
from .common import (
    add_json,
    add_opening,
    add_path,
    add_selection,
    add_threads,
    bar,
    columns,
    most_rows,
    not_negative,
    open_path,
    painter,
)
from .streams import check_once

# Maximum number of rows of each list on a terminal.
_ROWS = 40

# Sort keys of tensors with different values.
_KEYS = ("name", "max", "rms", "relative", "cosine", "unequal")

_EPILOG = """examples:
  safeload diff old.safetensors new.safetensors
  safeload diff Llama-3.2-1B/ llama-q4_0.safetensors --only '*.mlp.*' --sort rms
  safeload diff model.pth model.safetensors --tolerance 1e-3 && echo close

Exit status: 0 equal (with --tolerance: equal names and shapes, and values within the tolerance), 1 different, or a file
is bad, 2 wrong usage."""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "List tensors that only one of two checkpoints has, and different shapes and dtypes. For each "
        "tensor in both, show the largest difference, the RMS difference, the relative change and the cosine; for each "
        "layer, the relative change. Tensors that differ only in the size of their first axis are compared up to the "
        "last common row. Formats and dtypes may differ; quantized tensors are dequantized first."
    )
    parser.epilog = _EPILOG
    add_path(parser, "a")
    add_path(parser, "b")
    parser.add_argument(
        "--tolerance", metavar="X", type=not_negative, help="ignore differences up to X, and different dtypes"
    )
    add_selection(parser, _KEYS, _ROWS, order="non-finite values, then the largest difference")
    add_opening(parser)
    add_threads(parser)
    add_dask(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the differences between ``options.a`` and ``options.b`` and return the exit status."""
    from ..operations.measure.diff import diff  # only here: importing it takes milliseconds

    check_once([options.a, options.b])
    with (
        open_path(options.a, options) as a,
        open_path(options.b, options) as b,
        cluster(options.dask) as executor,
        bar("diff") as progress,
    ):
        report = diff(
            a,
            b,
            only=options.only,
            drop=options.drop,
            executor=executor,
            threads=options.threads,
            progress=progress,
        )
    good = report.same if options.tolerance is None else report.within(options.tolerance)
    if options.json:
        judged = {} if options.tolerance is None else {"tolerance": options.tolerance, "within": good}
        print(json.dumps({**report.to_dict(), **judged}, indent=1))
    else:
        paint = painter()
        *lines, verdict = report.lines(columns(), most_rows(options, _ROWS), options.sort, options.tolerance)
        for line in lines:
            print(line)
        print(paint(verdict, "good" if good else "error"))
    return 0 if good else 1
