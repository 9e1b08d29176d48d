"""``safeload diff``: how two checkpoints differ."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..base.text import width
from .common import add_command, add_json, add_opening, add_path, add_threads, bar, open_path, painter

# Rows of each list; --all shows every one.
_ROWS = 40

_EPILOG = """examples:
  safeload diff old.safetensors new.safetensors
  safeload diff Llama-3.2-1B/ llama-q4_0.gguf
  safeload diff model.pth model.safetensors --tolerance 1e-3 && echo close

Exit status: 0 the same (with --tolerance: names, shapes and values within it), 1 they differ or one is bad,
2 wrong usage."""


def register(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "diff",
        help="how two of them differ",
        description="Tensors that only one of two checkpoints has, other shapes and dtypes, and for each tensor in "
        "both the largest and the RMS difference and the cosine. Formats and dtypes may differ; quantized tensors are "
        "compared as the values that they restore to.",
        epilog=_EPILOG,
    )
    add_path(parser, "a")
    add_path(parser, "b")
    parser.add_argument(
        "--tolerance", metavar="X", type=float, help="differences up to this are none, dtypes may differ"
    )
    parser.add_argument("--all", action="store_true", help=f"every row, also when a list has more than {_ROWS}")
    add_opening(parser)
    add_threads(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints how ``options.a`` and ``options.b`` differ; returns the exit status."""
    from ..operations.diff import diff  # only here: it takes milliseconds that other commands would pay

    with open_path(options.a, options) as a, open_path(options.b, options) as b, bar("diff") as progress:
        report = diff(a, b, threads=options.threads, progress=progress)
    good = report.same if options.tolerance is None else report.within(options.tolerance)
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        paint = painter()
        *lines, verdict = report.lines(width(), None if options.all else _ROWS)
        for line in lines:
            print(line)
        print(paint(verdict, "good" if good else "error"))
    return 0 if good else 1
