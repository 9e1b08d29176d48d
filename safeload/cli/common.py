"""What commands share: arguments, colours, progress bars."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from .. import checkpoint
from ..checkpoint import Checkpoint
from ..text import width

Report = Callable[[int, int], object]

STATUS = "Exit status: 0 good, 1 the file is bad or cannot be read, 2 wrong usage."

# Seconds between two updates of the plain bar.
_INTERVAL = 0.1

_COLOURS = {"error": "31;1", "warning": "33", "good": "32", "head": "1", "dim": "2"}


def add_command(commands: Any, name: str, *, help: str, description: str, epilog: str) -> Any:
    """A subcommand's parser; ``epilog`` begins with its examples."""
    return commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, width()),
        epilog="\n\n".join(_wrapped(part) for part in epilog.split("\n\n")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _wrapped(paragraph: str) -> str:
    """A paragraph of prose in as many columns as there are; examples stay as they are."""
    return paragraph if paragraph.startswith("examples:") else textwrap.fill(paragraph, width())


def add_path(parser: Any, name: str = "path") -> None:
    """Adds PATH and how a torch checkpoint is opened."""
    parser.add_argument(name, metavar=name.upper(), help="a weight file, a folder of them or an index.json")


def add_opening(parser: Any) -> None:
    """Adds how a torch checkpoint is opened."""
    parser.add_argument("--root", metavar="NAME", help="only the tensors in this nested dict of a torch checkpoint")
    parser.add_argument(
        "--unknown-globals",
        choices=("refuse", "inert"),
        default="refuse",
        help="a torch checkpoint that names classes or functions off the list of harmless ones: refuse it (default), "
        "or keep them as inert placeholders and take the tensors around them",
    )


def add_threads(parser: Any) -> None:
    """Adds --threads."""
    parser.add_argument("--threads", metavar="N", type=positive, help="threads that read; as many as help by default")


def add_json(parser: Any) -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def open_path(path: str, options: argparse.Namespace) -> Checkpoint:
    """Opens a checkpoint as `add_opening` says."""
    return checkpoint.open(path, root=options.root, unknown_globals=options.unknown_globals)


# ---- colours ----


def painter(stream: TextIO | None = None) -> Callable[[str, str], str]:
    """A function of a text and what it is: "error", "warning", "good", "head" or "dim".

    It colours on a terminal, unless NO_COLOR is set (https://no-color.org) or TERM is "dumb".
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return lambda text, kind: text
    return lambda text, kind: f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if text else text


# ---- progress ----


@contextmanager
def bar(label: str) -> Iterator[Report | None]:
    """A progress bar on stderr while it is a terminal: tqdm's where it is installed, else a percentage."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        with _plain_bar(label) as report:
            yield report
        return
    drawn: Any = None

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        if drawn is None or drawn.total != total:
            if drawn is not None:
                drawn.close()
            drawn = tqdm(
                desc=label, total=total, unit="B", unit_scale=True, unit_divisor=1024, leave=False, ncols=width()
            )
        drawn.update(done - drawn.n)

    try:
        yield draw
    finally:
        if drawn is not None:
            drawn.close()


@contextmanager
def _plain_bar(label: str) -> Iterator[Report]:
    shown = 0.0

    def draw(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= _INTERVAL or done >= total:
            shown = now
            print(f"\r{label}: {100 * done // max(1, total):3}%", end="", file=sys.stderr, flush=True)

    try:
        yield draw
    finally:
        if shown:
            print("\r" + " " * (len(label) + 6) + "\r", end="", file=sys.stderr, flush=True)
