"""``safeload report``: write an HTML page with charts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..base.scheme import SCHEMES
from ..base.text import printable, size
from .common import (
    STATUS,
    add_json,
    add_opening,
    add_overwrite,
    add_path,
    add_threads,
    bar,
    opening,
)
from .streams import STANDARD, read_again, write_to_stdout

_EPILOG = f"""examples:
  safeload report model.safetensors -o report.html
  safeload report Llama-3.2-1B/ --quantize q4_0 -o llama.html
  safeload report 400GB/ --no-digest

{STATUS} A bad file gets a page, too. If SOURCE_DATE_EPOCH is set, it is the date on the page."""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "Write one HTML page that works offline: findings of check, contents, size breakdown, size when "
        "loaded or quantized, absmax and standard deviation by layer, magnitude distribution, SHA-256 of the files, "
        "and with --quantize the quantization error."
    )
    parser.epilog = _EPILOG
    add_path(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="report.html",
        help="page to write, or - for stdout; default: report.html",
    )
    add_overwrite(parser, "replace the file of --output even if safeload did not write it")
    parser.add_argument(
        "--quantize",
        type=str.lower,
        choices=tuple(SCHEMES),
        metavar="SCHEME",
        help=f"also show the quantization error of each tensor: {', '.join(SCHEMES)}",
    )
    parser.add_argument(
        "--no-digest",
        dest="digest",
        action="store_false",
        help="omit SHA-256 digests, which need a second read; always omitted for URLs",
    )
    add_opening(parser)
    add_threads(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page about ``options.path`` and return the exit status."""
    # Imported here: they would slow down the other commands.
    from ..operations.folders.output import Output
    from ..operations.report.page import is_page
    from ..operations.report.report import page_of

    if options.output == STANDARD and options.json:
        raise ValueError("--output - and --json both write to stdout; pass only one of them")
    overwrite = options.overwrite
    output = Output("--output", options.output, "report", is_page, overwrite=overwrite, sources=[options.path])
    if options.output != STANDARD:
        output.check()
    with read_again(options.path) as path:
        choices = {"digest": options.digest, "threads": options.threads, "bars": bar}
        text, report = page_of(path, opening(options), options.quantize, **choices)
    nbytes = write_to_stdout(text) if options.output == STANDARD else output.write(text, report.files)
    if options.json:
        print(json.dumps({"output": options.output, "nbytes": nbytes, "ok": report.ok}, indent=1))
    else:
        where, stream = ("stdout", sys.stderr) if options.output == STANDARD else (options.output, sys.stdout)
        print(f"{printable(where)}: {size(nbytes)}; {printable(report.source)}: {report.verdict}", file=stream)
    return 0 if report.ok else 1
