"""Arguments, colours and progress bars that the commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from ..base import log
from ..base.layout import is_terminal, terminal_columns
from ..base.text import plural, printable
from ..errors import one_line
from .streams import STDIN, is_stdin, source

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..engine.run.progress import Report

STATUS = "Exit status: 0 success, 1 the file is bad or cannot be read, 2 wrong usage."

# False if the shell leaves patterns such as *.safetensors to the program.
SHELL_EXPANDS = os.name != "nt"

# Attribute that `suggest` sets on argparse actions.
SUGGESTED = "suggested"

_COLOURS = {"error": "31;1", "warning": "33", "good": "32", "head": "1", "dim": "2"}


def add_path(parser: Any, name: str = "path", *, several: bool = False, stdin: bool = True) -> None:
    """Add the path of a checkpoint or, if ``several``, one or more ``paths``; False for ``stdin`` leaves out "-"."""
    more = "a URL (hf://, s3://, https://, ...), or - for stdin" if stdin else "or a URL: hf://, s3://, https://, ..."
    text = f"a weight file, a folder, an index.json, {more}"
    if several:
        parser.add_argument("paths", metavar="PATH", nargs="+", help=f"{text}; may be repeated")
    else:
        parser.add_argument(name, metavar=name.upper(), help=text)


def expanded(paths: Iterable[str]) -> list[str]:
    """Expand patterns such as ``*.safetensors`` if the shell does not."""
    return [match for path in paths for match in _matching(path)]


def _matching(path: str) -> list[str]:
    from ..base import url as urls

    if SHELL_EXPANDS or urls.is_url(path) or os.path.lexists(path):
        return [path]
    import glob  # imported here: only Windows needs it

    return sorted(glob.glob(path)) or [path]


def add_selection(parser: Any, keys: Sequence[str], rows: int, *, order: str = "the order of the file") -> None:
    """Add the options that select, sort and limit listed tensors."""
    add_patterns(parser)
    parser.add_argument("--sort", choices=keys, help=f"sort by this key, numbers in descending order; default: {order}")
    parser.add_argument("--limit", metavar="N", type=positive, help="show at most N rows")
    parser.add_argument("--all", action="store_true", help=f"list every tensor, even beyond {rows} rows on a terminal")


def add_opening(parser: Any) -> None:
    """Add the options for opening a checkpoint."""
    parser.add_argument(
        "--stored",
        action="store_true",
        help="show codes and scales of a quantized checkpoint as the files store them",
    )
    parser.add_argument(
        "--root",
        metavar="NAME",
        help="use only this nested container, such as state_dict of a torch checkpoint, or a model in an archive",
    )
    parser.add_argument(
        "--unknown-globals",
        choices=("refuse", "inert"),
        default="refuse",
        help="if a torch checkpoint references classes or functions that are not on the allowlist: refuse it "
        "(default), or replace them by inert placeholders and read the tensors around them",
    )
    parser.add_argument(
        "--storage-option",
        "--storage-options",
        metavar="KEY=VALUE",
        action="append",
        help="for URLs: an option of the filesystem, such as anon=true or client_kwargs.endpoint_url=URL; may be "
        "repeated. Pass credentials through environment variables, because other users can see this option",
    )


def add_overwrite(parser: Any, help: str) -> None:
    """Add --overwrite."""
    parser.add_argument("--overwrite", action="store_true", help=help)


def add_patterns(parser: Any) -> None:
    """Add --only and --drop."""
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        help="select tensors by name, for example '*.mlp.*'; may be repeated",
    )
    parser.add_argument("--drop", metavar="PATTERN", action="append", help="leave out tensors by name; may be repeated")


def suggest(action: argparse.Action, values: Callable[[], Iterable[str]]) -> None:
    """Set the values that completion offers for an option which also takes other values."""
    vars(action)[SUGGESTED] = values


def add_threads(parser: Any) -> None:
    """Add --threads."""
    parser.add_argument(
        "--threads", metavar="N", type=positive, help="number of threads; default: chosen automatically"
    )


def add_json(parser: Any, help: str = "print everything as one JSON object") -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help=help)


def positive(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def not_negative(text: str) -> float:
    """Parse a number of at least 0, for argparse."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value


def open_path(path: Any, options: argparse.Namespace) -> Checkpoint:
    """Open a checkpoint, or stdin for "-", with the options of `add_opening`."""
    from ..loading import entry  # imported here: it imports NumPy, and `safeload --help` needs neither

    return entry.open(source(path), **opening(options))


def opening(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_opening` as keyword arguments of `safeload.open`."""
    return {
        "root": options.root,
        "unknown_globals": options.unknown_globals,
        "stored": options.stored,
        "storage_options": storage_options(options),
    }


def shown(path: str) -> str:
    """Return a path for printing; a URL loses its secrets."""
    from ..base import url as urls

    if is_stdin(path):
        return STDIN
    return urls.shown(path) if urls.is_url(path) else path


def storage_options(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the options of --storage-option, or None. Dots in a key lead into nested options."""
    texts: list[str] | None = options.storage_option
    if texts is None:
        return None
    nested: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        *outer, last = key.split(".")
        if not sign or not all((*outer, last)):
            # The message omits the text, which can be a secret.
            raise ValueError("--storage-option takes KEY=VALUE, such as anon=true or client_kwargs.endpoint_url=URL")
        inner = nested
        for name in outer:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ValueError(f"--storage-option {printable(key)}: {printable(name)} already has a value")
        inner[last] = _parsed(value)
    return nested


def _parsed(text: str) -> Any:
    """Parse a value as JSON if it is valid JSON, else return it as text."""
    import json  # imported here: few commands need it

    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and Infinity are not JSON

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return text


# ---- rows ----


def most_rows(options: argparse.Namespace, rows: int) -> int | None:
    """Return the row limit, ``rows`` by default, or None for all rows. Without a terminal there is no default limit."""
    limit: int | None = options.limit
    return limit if limit is not None or options.all or columns() is None else rows


def rest(hidden: int, noun: str, options: argparse.Namespace) -> str:
    """Return the line that counts hidden rows."""
    return f"... and {plural(hidden, noun)} more{hint(options)}"


def hint(options: argparse.Namespace) -> str:
    """Return the end of lines that count hidden rows."""
    return "" if options.limit else "; pass --all to list all"


# ---- the terminal ----


columns = terminal_columns


# How messages of `FileExistsError` begin.
_EXISTS, _UNFINISHED = "File exists", "An unfinished conversion"


def complain(error: Exception) -> None:
    """Flush stdout and print an error to stderr."""
    from .flags import in_options

    sys.stdout.flush()
    text = one_line(error)
    if isinstance(error, FileExistsError):
        reason = error.strerror or ""
        if reason.startswith(_EXISTS):
            text = f"{error.filename} already exists{reason.removeprefix(_EXISTS)}"
        elif reason.startswith(_UNFINISHED):
            text = f"{error.filename} holds {reason[0].lower()}{reason[1:]}"
    print(f"safeload: {printable(in_options(text))}", file=sys.stderr)


# safeload's own symbols and their substitutes on terminals that cannot encode them; other characters are escaped.
_PLAIN = {"…": "~", "µ": "u", **dict(zip("▁▂▃▄▅▆▇█", "12345678", strict=True))}


def plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a stream cannot encode; an error handler for codecs."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in text), error.end


@contextmanager
def log_to_stderr(*, verbose: bool) -> Iterator[None]:
    """Print warnings of "safeload" to stderr and, if ``verbose``, each step."""
    import logging  # only here: importing it takes milliseconds

    from .flags import in_options

    class Escaped(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(f"safeload: {record.levelname.lower()}: {in_options(record.getMessage())}")

    logger, handler = logging.getLogger(log.NAME), logging.StreamHandler(sys.stderr)
    handler.setFormatter(Escaped())
    handler.setLevel(logging.DEBUG if verbose else logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    if verbose:
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def painter(stream: TextIO | None = None) -> Callable[[str, str], str]:
    """Return a function that colours text by kind: "error", "warning", "good", "head" or "dim"."""
    stream = sys.stdout if stream is None else stream
    if not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return lambda text, kind: text  # see https://no-color.org
    return lambda text, kind: f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if text else text


# ---- progress ----


@contextmanager
def bar(label: str) -> Iterator[Report | None]:
    """Show a progress bar if stderr is a terminal; redirected output stays reproducible."""
    from ..engine.run import progress  # imported here: few commands show progress

    if not progress.on_terminal():
        yield None
        return
    with progress.bar(label) as report:
        yield report
