"""``safeload report``: an HTML page with charts of the content of a file."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from ..base.scheme import SCHEMES
from ..base.text import printable, size
from ..engine.atomic_file import write_text
from ..stores.url import is_url
from .common import STATUS, add_command, add_json, add_opening, add_path, add_threads, bar, open_path, shown

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
        "-o", "--output", metavar="FILE", default="report.html", help="the page to write; report.html by default"
    )
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
    from .report_page import facts, head, page
    from .report_source import File, about, files_of, now

    date = now()
    _check_output(options.output, options.path)
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
    write_text(options.output, page(title, top, parts))
    nbytes = os.path.getsize(options.output)
    if options.json:
        print(json.dumps({"output": options.output, "nbytes": nbytes, "ok": found.ok}, indent=1))
    else:
        print(f"{printable(options.output)}: {size(nbytes)}; {printable(path)} is {found.verdict}")
    return 0 if found.ok else 1


def _check_output(output: str, path: str) -> None:
    """Refuses to replace a file of the source: any in its folder but a page.

    Raises:
        ValueError: the output is such a file.
    """
    if is_url(path):
        return
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    beside = os.path.realpath(os.path.dirname(output)) == os.path.realpath(folder)
    page = os.path.splitext(output)[1].lower() in (".html", ".htm")
    same = os.path.exists(output) and os.path.exists(path) and os.path.samefile(output, path)
    if same or (beside and os.path.isfile(output) and not page):
        raise ValueError(f"--output {output} is a file of the source, choose another")
