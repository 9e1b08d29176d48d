"""Helpers of the commands: options as keyword arguments, stdin and stdout, messages, the terminal, Dask."""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from .._version import __version__
from ..core import showing
from ..core.text import NAME, is_absent, is_terminal, plural, printable, show
from ..errors import FormatError, NoMatchError, SafeloadError, one_line
from .parsers import Argument, argument

if TYPE_CHECKING:
    from ..conversion.executors import Executor
    from ..core.checkpoint import Checkpoint
    from ..core.progress import Report

# False if the shell leaves patterns such as *.safetensors to the program.
SHELL_EXPANDS = os.name != "nt"

# The path of stdin and of stdout, and advice for messages.
STANDARD = "-"
_OTHER = f"for a file of this name pass {show(os.path.join(os.curdir, STANDARD))}"
# The name of stdin in output and messages.
STDIN = "<stdin>"
# Files of the system that stand for stdin. If it is a pipe, weights cannot be mapped through them.
_DEVICES = frozenset(("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"))

_COLOURS = {"error": "31;1", "warning": "33", "good": "32", "head": "1", "dim": "2"}


# ---- options ----

# The options of `OPENING` as keyword arguments of `safeload.open`.
OPENED = "root unknown_globals stored storage_options"


def expanded(paths: Iterable[str]) -> list[str]:
    """Expand patterns such as ``*.safetensors`` if the shell does not."""
    if SHELL_EXPANDS:
        return [*paths]
    import glob  # imported here: only Windows needs it

    from ..remote.url import is_url

    known = ((path, is_url(path) or os.path.lexists(path)) for path in paths)
    return [match for path, whole in known for match in ([] if whole else sorted(glob.glob(path))) or [path]]


def dtype(help: str) -> Argument:
    """Return --dtype, with the dtypes that tensors can be loaded as."""
    from ..core import load  # only here: it imports NumPy

    def checked(text: str) -> str:
        try:
            load.parse_target(text)
        except (TypeError, SafeloadError) as error:
            raise argparse.ArgumentTypeError(in_options(str(error))) from None
        return text

    return argument("--dtype", None, help, suggested=load.targets, type=checked)


def open_path(path: Any, options: argparse.Namespace) -> Checkpoint:
    """Open a checkpoint, or stdin for "-", with the options of `OPENING`."""
    from .. import open  # imported here: it imports NumPy, and `safeload --help` needs neither

    return open(source(path), **given(options, OPENED))


def given(options: argparse.Namespace, names: str) -> dict[str, Any]:
    """Return the options that are keyword arguments of the same names."""
    return {name: getattr(options, name) for name in names.split()}


def shown(path: str) -> str:
    """Return a path for printing; a URL loses its secrets."""
    from ..remote import url as urls

    if is_stdin(path):
        return STDIN
    return urls.shown(path) if urls.is_url(path) else path


def storage_options(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the options of --storage-option, or None. Dots in a key lead into nested options."""
    texts: list[str] | None = getattr(options, "storage_option", None)
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
        inner[last] = parsed(value)
    return nested


def parsed(text: str) -> Any:
    """Parse a value as JSON if it is valid JSON, else return it as text."""
    import json  # imported here: few commands need it

    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and Infinity are not JSON

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return text


# ---- "-" as a path: stdin as a source, stdout as a destination ----


def source(path: Any) -> Any:
    """Return a path unchanged, or stdin as a binary file object for "-"."""
    if not is_stdin(path):
        return path
    if sys.stdin is None or sys.stdin.closed:
        raise ValueError(f"{STANDARD} reads stdin, which is closed; {_OTHER}")
    if sys.stdin.isatty():
        raise ValueError(f"{STANDARD} reads stdin, which is a terminal; redirect a file or a pipe to it, or {_OTHER}")
    return sys.stdin.buffer


def is_stdin(path: Any) -> bool:
    """Return True for "-", and for a device that is stdin unless stdin is a file, which opens by this path."""
    return path == STANDARD or (
        path in _DEVICES
        and sys.stdin is not None
        and not sys.stdin.closed
        and not _is_file(sys.stdin)
        and _descriptor(sys.stdin) == 0
    )


@contextmanager
def read_again(path: str) -> Iterator[Any]:
    """Yield the `source` for a command that reads it several times: of a pipe, a temporary copy."""
    stream = source(path)
    if stream is path or _is_file(stream):
        yield stream
        return
    # Imported here: they would slow down other commands.
    from ..core.foreign import HEAD_SIZE
    from ..core.registry import check_head
    from ..remote.file_objects import temporary_copy

    head = stream.read(HEAD_SIZE)
    if len(head) == HEAD_SIZE:
        check_head(head, STDIN)  # other formats are not read to their end, which may never come
    with temporary_copy(stream, head, STDIN) as copy, open(copy.fileno(), "rb", buffering=0, closefd=False) as again:
        again.seek(0)
        vars(again)["name"] = STDIN
        yield again


def check_once(paths: Sequence[str]) -> None:
    """Refuse "-" as several sources, because stdin can be read once."""
    if sum(map(is_stdin, paths)) > 1:
        raise ValueError(f"{STANDARD} is repeated, but stdin can be read only once")


def refuse(path: str | None, what: str) -> None:
    """Refuse "-" for a command that needs a file; ``what`` begins the message."""
    if is_stdin(path):
        raise ValueError(f"{what}, not {path} for a stream" + (f"; {_OTHER}" if path == STANDARD else ""))


def _descriptor(stream: Any) -> int:
    """Return the descriptor of a stream; -1 if it is not a stream of the system."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError):
        return -1


def _is_file(stream: Any) -> bool:
    try:
        return stat.S_ISREG(os.fstat(_descriptor(stream)).st_mode)
    except OSError:
        return False


@contextmanager
def binary_stdout() -> Iterator[BinaryIO]:
    """Yield stdout for binary data, and flush it at the end."""
    if getattr(sys.stdout, "name", None) == os.devnull:  # `main` has replaced a closed stream
        raise ValueError(f"{STANDARD} writes to stdout, which is closed; {_OTHER}")
    if sys.stdout.isatty():
        raise ValueError(
            f"{STANDARD} writes binary data to stdout, which is a terminal; redirect it, such as > model.safetensors"
        )
    sys.stdout.flush()
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def write_to_stdout(text: str) -> int:
    """Write text in UTF-8, whatever the encoding of the terminal, and return its size in bytes."""
    data = text.encode("utf-8", "backslashreplace")
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return len(data)


# ---- several models ----

# Outcome of a command for a model: the exit status, a line, the result as JSON, and a function that prints it whole.
Outcome: TypeAlias = tuple[int, str, Callable[[], dict[str, Any]], Callable[[], object]]
# Examines a model, given its path and the executor of --dask.
Examine: TypeAlias = Callable[[str, Any], Outcome]


def is_alone(options: argparse.Namespace) -> bool:
    """Return True if a command gets a single model, and so prints its whole result."""
    return len(options.paths) == 1 and not options.recursive


def refuse_several(options: argparse.Namespace, *names: str) -> None:
    """Refuse options that name a file of a single model."""
    for name in names:
        if getattr(options, name) is not None and not is_alone(options):
            raise ValueError(f"--{name.replace('_', '-')} takes a single model, without --recursive")


def for_each(options: argparse.Namespace, examine: Examine) -> int:
    """Print the outcome of a model; of several, a line for each and their total. Return the worst exit status."""
    with cluster(getattr(options, "dask", None)) as executor:
        if not is_alone(options):
            return _list_outcomes(options, examine, executor)
        status, _, result, show_all = examine(options.paths[0], executor)
        if options.json:
            print_json(result())
        else:
            show_all()
        return status


def _list_outcomes(options: argparse.Namespace, examine: Examine, executor: Any) -> int:
    count = bad = worst = 0
    for place, fault in _places(options):
        try:
            if fault:
                raise SafeloadError(fault)
            status, line, result, _ = examine(place, executor)
        except BrokenPipeError:
            raise
        except FAILURES as error:
            status, line = status_of(error, options), in_options(one_line(error))
            result = partial(dict[str, Any], error=line)
        count, bad, worst = count + 1, bad + (status > 0), max(worst, status)
        verdict = "error" if status else "ok"
        if options.json:
            print_json({"path": shown(place), "status": status, **result()}, indent=None)
        else:
            print_lines([(f"{verdict:5}  {printable(shown(place))}: {printable(line)}", "error" if status else "")])
    total = f"{plural(count, 'model')}: " + (f"{bad:,} with errors" if bad else "no errors")
    if options.json:
        print(total, file=sys.stderr)
    else:
        print_lines(["", (total, "error" if bad else "good")])
    return worst


def _places(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the paths of models, each with an error or ""; with --recursive, those in folders."""
    from ..checking.local_models import tree_of  # imported here: few calls search folders
    from ..remote.url import is_url

    for path in options.paths:
        if options.recursive and is_url(path):
            raise ValueError(f"--recursive searches folders on this machine, got {show(shown(path))}")
    for path in options.paths:
        if not options.recursive or not os.path.isdir(path):
            yield path, ""
            continue
        tree = tree_of(path)
        # A file of an incomplete set is whole by itself; the commands find what a folder lacks.
        yield from ((model.path, "" if os.path.isdir(model.path) else model.note) for model in tree)
        yield from ((path, note) for note in tree.notes)
        if not tree and not tree.notes:
            yield path, "no models found"


# ---- rows ----


def most_rows(options: argparse.Namespace, rows: int) -> int | None:
    """Return the row limit, ``rows`` by default, or None for all rows. Without a terminal there is no default limit."""
    limit: int | None = options.limit
    return limit if limit is not None or options.all else showing.terminal_rows(rows)


def hint(options: argparse.Namespace) -> str:
    """Return the end of lines that count hidden rows."""
    return "" if options.limit else "; pass --all to list all"


# ---- messages of the Python API in the words of the command line ----

# Arguments in advice, such as `dtype="float32"`, `overwrite=True` and `max_shard_size=`.
_ARGUMENT = r"""(?<![^ (])
    (against|base|dtype|drop|exact|force|format|ignore|imatrix|keep|layout|max_shard_size|metadata|only|overwrite|quantize|raw|record
     |rename|part|requantize|resume|root|scale_dtype|stored|unknown_globals|verify|with_rest|write)
    (?:=(?: True\b | "(\w+)" | (?<=format=)'(\w+)' | (?<=(?:only|drop|keep|root)=)(?=') | (?<=ignore=)(?=')
       | (?<=quantize=)(?=')
       | (?=[ ,;:.)]|$) )
       | (?<=max_shard_size)(?=[ ]|$))"""

_QUOTED = r"""["']([^"']*)["']"""
_CACHE = "--storage-option filecache.cache_storage=FOLDER"

# Other Python in advice. `re` compiles the patterns when the first message has some, because few runs print one.
_CODE = (
    (r"storage_options= \(which may be empty\)", "--storage-option KEY=VALUE"),
    (r"pass storage_options= or", "pass --storage-option KEY=VALUE or"),
    (r"storage_options=\{'headers': \{'Authorization': \.\.\.\}\}", "--storage-option headers.Authorization=..."),
    (r"storage_options=\{'verify': PATH\}", "--storage-option verify=PATH"),
    (r"check_files=True", "--storage-option filecache.check_files=true"),
    (r'safeload\.open\("(filecache::[^"]*)", storage_options=\{\}\) keeps', rf"\1 with {_CACHE} keeps"),
    (r"(filecache::URL) with storage_options=\{\}", rf"\1 with {_CACHE}"),
    (rf"safeload\.load\({_QUOTED}(?:, storage_options=\{{\}})?\) reads it over the network", r"pass \1"),
    (rf"safeload\.open\({_QUOTED}\)", r"\1"),
    (r"names are exact; only= of safeload\.load takes patterns", "names are exact"),
    (r", or open several together with safeload\.open\(\[.*\]\)", ""),
    (r"patterns are not expanded: pass safeload\.open a list such as \S+", "pass the matching files"),
    (r"; for a bucket pass safeload\.remote\.\S+ path\)", ""),
    (r"safeload\.load without dtype= returns them", "--stored shows them"),
    (r"safeload\.open reads other formats too", "`safeload convert` makes a safetensors file from other formats"),
    (r"safeload\.load of the whole checkpoint .* with stored=True", "--stored shows the codes as stored"),
    (r'see safeload\.load_quantized, or pass quantize="(\S*)" to safeload\.convert', r"pass --quantize \1 to convert"),
    (r"safeload\.convert can merge", "`safeload convert` can merge"),
    (r"safeload\.convert\(\.\.\., URL\) writes", "`safeload convert SOURCE URL` writes"),
    (r"Convert the tensor with safeload\.astype, or leave it out(?: with drop=)?", "Leave it out with --drop"),
    (r"\bscheme=\{('[^']*)': None\}", r"--quantize \1=none'"),
    (r"no pattern of scheme= matches", "no pattern of --quantize matches"),
    (r"\bscheme=", "--quantize "),
    (r"\bexecutor=", "--dask"),
    (r"\badapters=", "--adapter"),
    (r"or a dict with a scheme for each name pattern", "or --quantize PATTERN=SCHEME for each kind of matrix"),
    (r"pass check=False", "pass --no-check"),
    (r"pass safeload\.Signature\(path, key=\.\.\.\)", "pass --key or --certificate"),
)


def _option(argument: re.Match[str]) -> str:
    option = f"--{argument[1].replace('_', '-')}"
    value = argument[2] or argument[3]
    if value is not None:
        return f"{option} {value}"
    return f"{option} " if argument.string.startswith("'", argument.end()) else option


def in_options(text: str) -> str:
    """Return a message with options instead of Python arguments and calls."""
    if not any(mark in text for mark in ("=", "safeload.", "max_shard_size", "or a dict")):
        return text
    for pattern, replacement in _CODE:
        text = re.sub(pattern, replacement, text)
    return re.sub(_ARGUMENT, _option, text, flags=re.VERBOSE)


# ---- the terminal ----

columns = showing.terminal_columns

# Errors about files and arguments: the last is a package for a URL scheme.
FAILURES = SafeloadError, OSError, MemoryError, ValueError, TypeError, ModuleNotFoundError


def status_of(error: Exception, options: argparse.Namespace) -> int:
    """Return the exit status of an error about a file or an argument."""
    wrong = isinstance(error, (ValueError, TypeError)) and not isinstance(error, (SafeloadError, OSError))
    return options.wrong_usage if wrong else 2 if isinstance(error, NoMatchError) else options.failed


# How messages of `FileExistsError` begin.
_EXISTS, _UNFINISHED = "File exists", "An unfinished conversion"


def complain(error: Exception) -> None:
    """Flush stdout and print an error to stderr."""
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

    class Escaped(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(f"safeload: {record.levelname.lower()}: {in_options(record.getMessage())}")

    logger, handler = logging.getLogger(NAME), logging.StreamHandler(sys.stderr)
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


def painter() -> Callable[[str, str], str]:
    """Return a function that colours text by kind: "error", "warning", "good", "head", "dim", or "" for none."""
    if not is_terminal(sys.stdout) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return lambda text, kind: text  # see https://no-color.org
    return lambda text, kind: f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if text and kind else text


def print_lines(lines: Iterable[str | tuple[str, str]]) -> None:
    """Print lines, some with the kind of their colour; see `painter`."""
    paint = painter()
    for line in lines:
        print(line if isinstance(line, str) else paint(*line))


def print_json(value: Any, indent: int | None = 1) -> None:
    """Print a value as JSON, on a single line if ``indent`` is None."""
    import json  # imported here: few commands need it

    print(json.dumps(value, indent=indent))


# ---- progress ----


@contextmanager
def bar(label: str) -> Iterator[Report | None]:
    """Show a progress bar if stderr is a terminal; redirected output stays reproducible."""
    from ..core import progress  # imported here: few commands show progress

    with progress.bar(label) if is_terminal(sys.stderr) else nullcontext() as report:
        yield report


@contextmanager
def running(options: argparse.Namespace, label: str) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments of a function that reads all values; with a progress bar."""
    with cluster(options.dask) as executor, bar(label) as progress:
        yield {"executor": executor, "threads": options.threads, "progress": progress}


# ---- pieces on a Dask cluster ----

_TIMEOUT = 10  # seconds to wait for a scheduler, or for its file
_ON_WORKERS = "install safeload and its packages on every worker"


@contextmanager
def cluster(address: str | None) -> Iterator[Executor | None]:
    """Return the executor of a Dask cluster, by address or by path of a scheduler file, or None without an address."""
    if address is None:
        yield None
        return
    import asyncio  # only here: most commands need none of these
    import logging
    from concurrent.futures import CancelledError
    from pkgutil import resolve_name

    try:
        from distributed import Client, Security, client, comm
        from distributed.scheduler import KilledWorker
    except ImportError:
        if not is_absent("distributed") and not is_absent("dask"):
            raise  # Dask is installed but broken
        raise SafeloadError("--dask needs Dask, which is not installed: pip install distributed") from None
    scheduler = _address_in(address) if ":" not in address or os.path.exists(address) else address
    option = f"--dask {printable(scheduler)}"

    async def check() -> None:  # first, because a failing `Client` takes 20 seconds to end
        await (await comm.connect(scheduler, timeout=_TIMEOUT, **Security().get_connection_args("client"))).close()

    try:
        asyncio.run(check())
    except OSError:
        raise SafeloadError(f"{option}: no scheduler answered in {_TIMEOUT} seconds") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{option}: {error}") from None
    if not logging.getLogger(NAME).isEnabledFor(logging.DEBUG):
        for name in ("distributed", "distributed.client"):  # their tracebacks would hide our message
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with Client(scheduler, timeout=_TIMEOUT, set_as_default=False) as executor:
            if not executor.scheduler_info()["workers"]:
                print(f"safeload: {option}: waiting for a worker", file=sys.stderr, flush=True)
                versions = {}
            else:  # workers without this version of safeload would die at their first piece and leave Dask waiting
                versions = executor.run(resolve_name, "safeload:__version__", on_error="return")
            for worker, version in versions.items():
                if isinstance(version, (ImportError, AttributeError)):
                    raise SafeloadError(f"{option}: worker {worker}: {version}; {_ON_WORKERS}")
                if isinstance(version, str) and version != __version__:
                    raise SafeloadError(f"{option}: worker {worker}: expected safeload {__version__}, got {version}")
            yield executor  # not its get_executor(): its future of a piece fails if the worker with the result dies
    except KilledWorker as error:
        raise SafeloadError(f"{option}: one piece killed several workers: {error}") from None
    except (CancelledError, getattr(client, "ClosedClientError", CancelledError)):  # releases of 2023 lack the class
        raise SafeloadError(f"{option}: the connection to the scheduler was lost") from None
    except ImportError as error:
        raise SafeloadError(f"{option}: {error}; {_ON_WORKERS}") from None


def _address_in(path: str) -> str:
    """Return the address in a scheduler file, waiting for the file like Dask's own programs."""
    from ..core.files import read_json

    until = time.monotonic() + (_TIMEOUT if path.endswith(".json") else 0)
    while True:
        try:
            address = read_json(path, "a scheduler file").get("address")
            break
        except (FormatError, FileNotFoundError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    if not isinstance(address, str):
        raise FormatError("not a Dask scheduler file: it has no address", path)
    return address
