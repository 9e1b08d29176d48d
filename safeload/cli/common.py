"""Shared parts of the commands: arguments, colours, progress bars."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from .. import checkpoint
from ..base.text import width
from ..checkpoint import Checkpoint
from ..engine import progress
from ..engine.progress import Report

STATUS = "Exit status: 0 success, 1 the file is bad or cannot be read, 2 wrong usage."

_COLOURS = {"error": "31;1", "warning": "33", "good": "32", "head": "1", "dim": "2"}


def add_command(commands: Any, name: str, *, help: str, description: str, epilog: str) -> Any:
    """Adds the parser of a subcommand; ``epilog`` begins with its examples."""
    return commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, width()),
        epilog="\n\n".join(_wrapped(part) for part in epilog.split("\n\n")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _wrapped(paragraph: str) -> str:
    """A paragraph of prose, wrapped to the width of the terminal; examples are left unchanged."""
    return paragraph if paragraph.startswith("examples:") else textwrap.fill(paragraph, width())


def add_path(parser: Any, name: str = "path") -> None:
    """Adds the path of a checkpoint."""
    parser.add_argument(name, metavar=name.upper(), help="a weight file, a folder of them or an index.json")


def add_opening(parser: Any) -> None:
    """Adds the options for opening a checkpoint."""
    parser.add_argument(
        "--stored",
        action="store_true",
        help="take the tensors as the files name them: codes and scales of a quantized checkpoint apart",
    )
    parser.add_argument(
        "--root", metavar="NAME", help="take only the tensors in this nested dict of a torch checkpoint"
    )
    parser.add_argument(
        "--unknown-globals",
        choices=("refuse", "inert"),
        default="refuse",
        help="what to do with a torch checkpoint that names classes or functions off the list of harmless ones: "
        "refuse it (default), or replace them by inert placeholders and read the tensors around them",
    )


def add_patterns(parser: Any) -> None:
    """Adds --only and --drop."""
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", help="only tensors whose names match; may be repeated"
    )
    parser.add_argument("--drop", metavar="PATTERN", action="append", help="leave out tensors; may be repeated")


def add_threads(parser: Any) -> None:
    """Adds --threads."""
    parser.add_argument(
        "--threads", metavar="N", type=positive, help="number of threads; chosen automatically by default"
    )


def add_json(parser: Any) -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def positive(text: str) -> int:
    """Parses an integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def open_path(path: str, options: argparse.Namespace) -> Checkpoint:
    """Opens a checkpoint with the options of `add_opening`."""
    return checkpoint.open(path, root=options.root, unknown_globals=options.unknown_globals, stored=options.stored)


# ---- colours ----


def painter(stream: TextIO | None = None) -> Callable[[str, str], str]:
    """A function that colours a text by its kind: "error", "warning", "good", "head" or "dim".

    It colours only on a terminal, unless NO_COLOR is set (https://no-color.org) or TERM is "dumb".
    """
    stream = sys.stdout if stream is None else stream
    if (
        stream is None
        or stream.closed
        or not stream.isatty()
        or os.environ.get("NO_COLOR")
        or os.environ.get("TERM") == "dumb"
    ):
        return lambda text, kind: text
    return lambda text, kind: f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if text else text


# ---- progress ----


@contextmanager
def bar(label: str) -> Iterator[Report | None]:
    """A progress bar if stderr is a terminal, else none, so that redirected output is reproducible."""
    if not progress.on_terminal():
        yield None
        return
    with progress.bar(label) as report:
        yield report
