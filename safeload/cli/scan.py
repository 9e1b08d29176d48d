"""``safeload scan``: judge the code that files name."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..errors import SafeloadError
from .common import add_json, columns, complain, expanded, painter, shown
from .streams import check_once, source

# Exit status of wrong usage (EX_USAGE of sysexits.h), because 2 means dangerous.
_USAGE = 64
_COLOURS = {"harmless": "good", "unknown": "warning", "dangerous": "error"}

_EPILOG = """examples:
  safeload scan model.pth
  safeload scan downloads/ other.nemo
  safeload scan hf://owner/name
  safeload scan model.pkl --json | jq -r '.findings[] | select(.verdict != "harmless") | .name'

Exit status: 0 everything is harmless, 1 something is unknown or cannot be read, 2 something is dangerous, 64 wrong
usage. Of several paths, the worst counts."""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "List every global that pickles in files name, with a verdict: harmless (on the allowlist), "
        "unknown or dangerous. Pickles are found in torch checkpoints, NumPy and joblib files, and inside zip and tar "
        "archives (.nemo, .keras, torch.package), nested, compressed, appended or at an offset. Nothing is executed "
        "or imported."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="a file, a folder, a URL, or - for stdin; may be repeated"
    )
    parser.add_argument("--all", action="store_true", help="list harmless globals too; --json always lists them")
    parser.add_argument(
        "--storage-option",
        metavar="KEY=VALUE",
        action="append",
        help="for URLs: an option of the filesystem; may be repeated",
    )
    add_json(parser)

    parser.wrong_usage = _USAGE
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the findings about ``options.paths`` and return the exit status."""
    try:
        return _run(options)
    except (ValueError, TypeError) as error:
        if isinstance(error, SafeloadError):
            raise
        complain(error)
        return _USAGE


def _run(options: argparse.Namespace) -> int:
    from ..operations.trust.scan import ScanReport, scan  # imported here: it would slow down the other commands
    from .common import storage_options

    total = ScanReport()
    paths = expanded(options.paths)
    check_once(paths)
    for path in paths:
        try:
            report = scan(source(path), storage_options=storage_options(options))
        except (OSError, SafeloadError, ModuleNotFoundError) as error:
            complain(error)
            total.unreadable.append((shown(path), str(error)))
            continue
        total.add(report)
    if options.json:
        print(json.dumps(total.to_dict(), indent=1))
        return total.status
    paint = painter()
    for line in total.lines(columns(), harmless=options.all):
        print(paint(line, _COLOURS[total.verdict]) if line.startswith(f"{total.verdict}:") else line)
    return total.status
