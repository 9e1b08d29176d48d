"""``safeload report``: an HTML page with charts of the content of a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from ..base.scheme import SCHEMES
from ..base.text import printable, size
from ..stores.url import is_url
from .common import (
    STATUS,
    add_command,
    add_json,
    add_opening,
    add_overwrite,
    add_path,
    add_threads,
    bar,
    open_path,
    shown,
)
from .output import STDOUT, Output

_EPILOG = f"""examples:
  safeload report model.safetensors -o report.html
  safeload report Llama-3.2-1B/ --quantize q4_0 -o llama.html
  safeload report 400GB/ --no-digest

{STATUS} The page is also written for a bad file. The date on it is SOURCE_DATE_EPOCH if that is set."""


def register(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "report",
        help="write an HTML page with charts",
        description="Writes one HTML page that works offline: the findings of check, the content of the file, the "
        "distribution of its bytes, its size when loaded or quantized, absmax and standard deviation over the layers, "
        "histograms, SHA-256 of the files, and with --quantize the quantization error.",
        epilog=_EPILOG,
    )
    add_path(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="report.html",
        help="the page to write, - for stdout; report.html by default",
    )
    add_overwrite(parser, "replace the file of --output even if safeload did not write it")
    parser.add_argument(
        "--quantize",
        type=str.lower,
        choices=tuple(SCHEMES),
        metavar="SCHEME",
        help=f"also show the error of each tensor when quantized to this scheme: {', '.join(SCHEMES)}",
    )
    parser.add_argument(
        "--no-digest",
        dest="digest",
        action="store_false",
        help="leave out the SHA-256 of the files, for which they are read a second time; of URLs it is never there",
    )
    add_opening(parser)
    add_threads(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the page about ``options.path``; returns the exit status."""
    # Imported here: they would add milliseconds to the other commands.
    from ..operations.validate.run import validate_path
    from ..operations.validate.settings import settings
    from .report_content import digest_section, found_section, sections
    from .report_page import facts, head, is_page, page
    from .report_source import File, about, files_of, now

    date = now()
    if options.output == STDOUT and options.json:
        raise ValueError("--output - writes the page to stdout, and so does --json with its object: pass one of them")
    overwrite = options.overwrite
    output = Output("--output", options.output, "report", is_page, overwrite=overwrite, sources=[options.path])
    if options.output != STDOUT:
        output.check()
    with bar("report") as progress:
        wanted = settings(threads=options.threads, progress=progress, histogram=True)
        found = validate_path(options.path, lambda: open_path(options.path, options), wanted)
    parts = [found_section(found)]
    path, remote = shown(options.path), is_url(options.path)
    files = [] if remote else files_of(found.files or [path], digest=options.digest, threads=options.threads)
    if found.files:
        with open_path(options.path, options) as opened:
            parts += sections(opened, found, options.quantize, options.threads)
            if remote:  # they are not read a second time
                files = [File(file.path, file.identity[0]) for file in opened.weight_files]
    parts.append(digest_section(files))
    title = os.path.basename(path.rstrip("/") if remote else os.path.abspath(path)) or path
    mood = "bad" if found.errors else "odd" if found.warnings else "calm" if found.notes else "good"
    checked = f"checked: {found.checked}" if found.tensors else ""
    top = head(title, found.verdict, mood, checked, facts(about(path, files, date), "meta"))
    nbytes = output.write(page(title, top, parts), found.files)
    if options.json:
        print(json.dumps({"output": options.output, "nbytes": nbytes, "ok": found.ok}, indent=1))
    else:
        where, stream = ("stdout", sys.stderr) if options.output == STDOUT else (options.output, sys.stdout)
        print(f"{printable(where)}: {size(nbytes)}; {printable(path)} is {found.verdict}", file=stream)
    return 0 if found.ok else 1
