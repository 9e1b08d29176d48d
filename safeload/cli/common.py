"""Shared parts of the commands: arguments, colours, progress bars."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from ..base import log
from ..base.layout import width
from ..base.text import plural, printable
from ..checkpoint import Checkpoint
from ..engine.run import progress
from ..engine.run.progress import Report
from ..errors import one_line
from ..loading import entry as loading
from ..stores import url as urls

STATUS = "Exit status: 0 success, 1 the file is bad or cannot be read, 2 wrong usage."

# Whether the shell replaces patterns by the files they match before a program sees them.
SHELL_EXPANDS = os.name != "nt"

# Attribute of the actions of a parser that `suggest` sets.
SUGGESTED = "suggested"

_COLOURS = {"error": "31;1", "warning": "33", "good": "32", "head": "1", "dim": "2"}


def add_command(commands: Any, name: str, *, help: str, description: str, epilog: str) -> Any:
    """Adds the parser of a subcommand; ``epilog`` begins with its examples."""
    parser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, width()),
        epilog="\n\n".join(_wrapped(part) for part in epilog.split("\n\n")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_verbose(parser)
    return parser


def _wrapped(paragraph: str) -> str:
    """A paragraph of prose, wrapped to the width of the terminal; examples are left unchanged."""
    return paragraph if paragraph.startswith("examples:") else textwrap.fill(paragraph, width())


def add_verbose(parser: Any) -> None:
    """Adds --verbose, which stands before or after the command."""
    parser.add_argument(
        "-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="print what is done, on stderr"
    )


def add_path(parser: Any, name: str = "path", *, several: bool = False) -> None:
    """Adds the path of a checkpoint, or ``paths`` of one or more."""
    text = "a weight file, a folder of them, an index.json, or a URL of one: hf://, s3://, https://, ..."
    if several:
        parser.add_argument("paths", metavar="PATH", nargs="+", help=f"{text}; may be repeated")
    else:
        parser.add_argument(name, metavar=name.upper(), help=text)


def expanded(paths: Iterable[str]) -> list[str]:
    """Paths, with patterns such as ``*.safetensors`` replaced by the files they match where the shell does not."""
    return [path for given in paths for path in _matching(given)]


def _matching(path: str) -> list[str]:
    if SHELL_EXPANDS or urls.is_url(path) or os.path.lexists(path):
        return [path]
    import glob  # only here: it is needed on Windows alone

    return sorted(glob.glob(path)) or [path]


def add_selection(parser: Any, keys: Sequence[str], rows: int, *, order: str = "the order of the file") -> None:
    """Adds the options that select, sort and limit the tensors that are listed.

    Args:
        parser: of the command.
        keys: what can be sorted by.
        rows: the most rows on a terminal.
        order: the order by default, for the help.
    """
    add_patterns(parser)
    parser.add_argument("--sort", choices=keys, help=f"sort by this, numbers from the largest; by default {order}")
    parser.add_argument("--limit", metavar="N", type=positive, help="show N rows at most")
    parser.add_argument(
        "--all", action="store_true", help=f"show every tensor, even on a terminal and above {rows} rows"
    )


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
    parser.add_argument(
        "--storage-option",
        "--storage-options",
        metavar="KEY=VALUE",
        action="append",
        help="for URLs: an option of the filesystem, as in anon=true or client_kwargs.endpoint_url=URL; may be "
        "repeated. Others on this machine see it: keys are better in the environment",
    )


def add_overwrite(parser: Any, help: str) -> None:
    """Adds --overwrite."""
    parser.add_argument("--overwrite", action="store_true", help=help)


def add_patterns(parser: Any) -> None:
    """Adds --only and --drop."""
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        help="only tensors whose names match, as in '*.mlp.*'; may be repeated",
    )
    parser.add_argument(
        "--drop", metavar="PATTERN", action="append", help="leave out tensors whose names match; may be repeated"
    )


def suggest(action: argparse.Action, values: Callable[[], Iterable[str]]) -> None:
    """Sets what completion offers for an option that also takes other values; asked only by `safeload completion`."""
    vars(action)[SUGGESTED] = values


def add_threads(parser: Any) -> None:
    """Adds --threads."""
    parser.add_argument(
        "--threads", metavar="N", type=positive, help="number of threads; chosen automatically by default"
    )


def add_json(parser: Any, help: str = "print everything as one JSON object") -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help=help)


def positive(text: str) -> int:
    """Parses an integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def not_negative(text: str) -> float:
    """Parse a number of at least 0, for argparse."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return value


def open_path(path: str, options: argparse.Namespace) -> Checkpoint:
    """Opens a checkpoint with the options of `add_opening`."""
    return loading.open(
        path,
        root=options.root,
        unknown_globals=options.unknown_globals,
        stored=options.stored,
        storage_options=storage_options(options),
    )


def shown(path: str) -> str:
    """A path as it is printed: of a URL without what may be secret."""
    return urls.shown(path) if urls.is_url(path) else path


def storage_options(options: argparse.Namespace) -> dict[str, Any] | None:
    """What --storage-option says; None without one. Dots in a key lead into nested options.

    Raises:
        ValueError: not KEY=VALUE; the message does not have what was given, which may be a secret.
    """
    given: list[str] | None = options.storage_option
    if given is None:
        return None
    found: dict[str, Any] = {}
    for text in given:
        key, sign, value = text.partition("=")
        *outer, last = key.split(".")
        if not sign or not all((*outer, last)):
            raise ValueError("--storage-option takes KEY=VALUE, as in anon=true or client_kwargs.endpoint_url=URL")
        inner = found
        for name in outer:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ValueError(f"--storage-option {printable(key)}: {printable(name)} has a value already")
        inner[last] = _parsed(value)
    return found


def _parsed(text: str) -> Any:
    """A value: true, false, null, a number, an object, a list or a text in quotes as JSON has it, else text."""
    import json  # only here: few commands need it

    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and Infinity are not JSON

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return text


# ---- rows ----


def most_rows(options: argparse.Namespace, rows: int) -> int | None:
    """The most rows to show, ``rows`` by default; None for all, as always where stdout is not a terminal."""
    limit: int | None = options.limit
    return limit if limit is not None or options.all or columns() is None else rows


def rest(hidden: int, noun: str, options: argparse.Namespace) -> str:
    """The line that says how much is not shown."""
    return f"... and {plural(hidden, noun)} more" + ("" if options.limit else "; --all shows every one")


# ---- the terminal ----


def columns() -> int | None:
    """Width of the terminal; None where stdout is not one: nothing is cut there, whatever COLUMNS says."""
    return width() if _is_terminal(sys.stdout) else None


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def complain(error: Exception) -> None:
    """Prints an error on stderr, after what was printed on stdout before it."""
    sys.stdout.flush()
    text = one_line(error).replace("storage_options= (which may be empty)", "--storage-option KEY=VALUE")
    print(f"safeload: {printable(text)}", file=sys.stderr)


# Symbols of safeload itself, and what a terminal that cannot encode them shows instead; everything else is escaped.
_PLAIN = {"…": "~", "µ": "u", **dict(zip("▁▂▃▄▅▆▇█", "12345678", strict=True))}


def plain(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters that a stream cannot encode, as error handler of its codec."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in text), error.end


@contextmanager
def verbose(wanted: bool) -> Iterator[None]:
    """Prints what the logger "safeload" gets, on stderr."""
    if not wanted:
        yield
        return
    import logging  # only here: it would add milliseconds to every command

    class Escaped(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(f"safeload: {record.levelname.lower()}: {record.getMessage()}")

    logger, handler = logging.getLogger(log.NAME), logging.StreamHandler(sys.stderr)
    handler.setFormatter(Escaped())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def painter(stream: TextIO | None = None) -> Callable[[str, str], str]:
    """A function that colours a text by its kind: "error", "warning", "good", "head" or "dim".

    It colours only on a terminal, unless NO_COLOR is set (https://no-color.org) or TERM is "dumb".
    """
    stream = sys.stdout if stream is None else stream
    if not _is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
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
