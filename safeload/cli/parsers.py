"""The table of commands, the arguments they share, and their parsers. A command's module is imported if it runs."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn, TypeAlias

from .._version import __version__
from ..core.showing import width

# The commands in the order of the help: the module of each, which has a function of its name, the heading in the help
# (None: not listed), and the help.
COMMANDS: dict[str, tuple[str, str | None, str]] = {
    "info": ("look", "look", "list tensors and metadata"),
    "get": ("look", "look", "print the values of a tensor"),
    "stats": ("check", "look", "show statistics of the values"),
    "diff": ("check", "look", "compare two checkpoints"),
    "report": ("check", "look", "write an HTML page with charts"),
    "ls": ("files", "look", "list the models on this machine"),
    "families": ("files", "look", "list the known families of models"),
    "check": ("check", "check", "find faults in weights"),
    "scan": ("files", "check", "judge the code that pickles name"),
    "verify": ("files", "check", "compare files with a manifest, a signature or a model"),
    "convert": ("convert", "change", "write another format, dtype or layout"),
    "extract": ("convert", "change", "extract a LoRA adapter from a fine-tuned model"),
    "edit": ("files", "change", "change metadata and names in place"),
    "patch": ("files", "publish", "publish or apply the difference of two files"),
    "sign": ("files", "publish", "sign the files of a model"),
    "completion": ("completion", None, "print a completion script for a shell"),
}

STATUS = "0 success, 1 the file is bad or cannot be read, 2 wrong usage."
OF_SEVERAL = "Of several models, the worst counts."

# Attribute of argparse actions: the function that returns what completion offers beside the choices.
SUGGESTED = "suggested"


# ---- rows ----

Argument = Callable[[Any], object]  # adds itself to a parser
Metavar: TypeAlias = str | tuple[str, str] | None  # None for an argument with choices
Run = Callable[[argparse.Namespace], int]  # runs a command and returns its exit status


def command(description: str, examples: str, *arguments: Argument, status: str = STATUS) -> Callable[[Run], Argument]:
    """Decorate the function that runs a command; the result gives a parser all that the command takes."""

    def row(run: Run) -> Argument:
        def add(parser: Any) -> None:
            parser.description, parser.epilog = description, f"{examples}\n\nExit status: {status}"
            for argument in arguments:
                argument(parser)
            parser.set_defaults(run=run)

        return add

    return row


def argument(
    names: str, metavar: Metavar, help: str, *, suggested: Callable[[], Iterable[str]] = tuple, **settings: Any
) -> Argument:
    """Return an argument, its names separated by spaces; completion also offers the values of ``suggested``."""

    def add(parser: Any) -> None:
        shown = {} if metavar is None else {"metavar": metavar}
        vars(parser.add_argument(*names.split(), help=help, **shown, **settings))[SUGGESTED] = suggested

    return add


def flag(name: str, help: str) -> Argument:
    """Return an option without a value."""
    return argument(name, None, help, action="store_true")


def repeated(names: str, metavar: Metavar, help: str, **settings: Any) -> Argument:
    """Return an option that may be repeated."""
    return argument(names, metavar, f"{help}; may be repeated", action="append", **settings)


def one_of(*arguments: Argument) -> Argument:
    """Return arguments that exclude each other."""

    def add(parser: Any) -> None:
        group = parser.add_mutually_exclusive_group()
        for argument in arguments:
            argument(group)

    return add


def at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return a parser of numbers of at least ``least``, for argparse."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be >= {least}, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names the type in its errors
    return parse


POSITIVE = at_least(1)


def _adapter(text: str) -> tuple[str, float]:
    """Parse PATH or PATH=WEIGHT; an existing path may contain =."""
    path, sign, weight = text.rpartition("=")
    if sign and not os.path.exists(text):
        with suppress(ValueError):
            return path, float(weight)
    return text, 1.0


def _setting(text: str) -> str:
    """Check that KEY or KEY=VALUE has a key."""
    if not text.partition("=")[0]:
        raise argparse.ArgumentTypeError(f"must be KEY or KEY=VALUE, got {text!r}")
    return text


_PATH = "a weight file, a folder, an index.json, a URL (hf://, s3://, https://, ...), or - for stdin"
PATHS = argument("paths", "PATH", f"{_PATH}; may be repeated", nargs="+")
RECURSIVE = flag("-r --recursive", "examine every model in a folder and its subfolders")
PATTERNS: tuple[Argument, ...] = (
    repeated("--only", "PATTERN", "select tensors by name, for example '*.mlp.*'"),
    repeated("--drop", "PATTERN", "leave out tensors by name"),
)
OPENING: tuple[Argument, ...] = (
    flag("--stored", "show codes and scales of a quantized checkpoint as the files store them"),
    argument(
        "--root",
        "NAME",
        "use only this nested container, such as state_dict of a torch checkpoint, or a model in an archive",
    ),
    argument(
        "--unknown-globals",
        None,
        "if a torch checkpoint references classes or functions that are not on the allowlist: refuse it "
        "(default), or replace them by inert placeholders and read the tensors around them",
        choices=("refuse", "inert"),
        default="refuse",
    ),
    argument(
        "--storage-option --storage-options",
        "KEY=VALUE",
        "for URLs: an option of the filesystem, such as anon=true or client_kwargs.endpoint_url=URL; may be "
        "repeated. Pass credentials through environment variables, because other users can see this option",
        action="append",
    ),
)
STORAGE_OPTION = repeated("--storage-option", "KEY=VALUE", "for URLs: an option of the filesystem")
METADATA = repeated(
    "--metadata", "KEY[=VALUE]", "set a metadata key, or remove it if there is no =", type=_setting, default=[]
)
ADAPTER = repeated(
    "--adapter", "ADAPTER[=WEIGHT]", "merge a LoRA adapter, with an optional weight", type=_adapter, dest="adapters"
)
THREADS = argument("--threads", "N", "number of threads; default: chosen automatically", type=POSITIVE)
CACHE = argument(
    "--cache",
    None,
    "the system's cache of files: keep pages (default), or drop pages behind reads and writes, so that other programs' "
    "files stay; needs Linux or another system with posix_fadvise",
    choices=("keep", "drop"),
    default="keep",
)
JSON = flag("--json", "print everything as one JSON object")
JSON_LINES = flag("--json", "print everything as one JSON object; of several models, a line for each")
DASK = argument(
    "--dask", "ADDRESS", 'run on a Dask cluster with access to the files: "tcp://HOST:8786", or a scheduler file'
)
TRUSTED = one_of(
    argument("--key", "FILE", "public key of the signer of the signature, in PEM"),
    repeated("--certificate", "FILE", "certificate to trust, in PEM"),
)


def path(name: str = "path") -> Argument:
    """Return the path of a checkpoint."""
    return argument(name, name.upper(), _PATH)


def selection(keys: Sequence[str], rows: int, order: str = "the order of the file") -> tuple[Argument, ...]:
    """Return the options that select, sort and limit listed tensors."""
    return (
        *PATTERNS,
        argument(
            "--sort", "KEY", f"sort by {', '.join(keys)}; numbers in descending order; default: {order}", choices=keys
        ),
        argument("--limit", "N", "show at most N rows", type=POSITIVE),
        flag("--all", f"list every tensor, even beyond {rows} rows on a terminal"),
    )


# ---- parsers ----


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with the paragraphs around the options wrapped to the terminal; lists below a heading stay unchanged."""

    def _fill_text(self, text: str, width_without_margin: int, indent: str) -> str:
        return "\n\n".join(part if ":\n  " in part else textwrap.fill(part, width()) for part in text.split("\n\n"))


class _Parser(argparse.ArgumentParser):
    """A parser with errors of a single line, because the usage of a command can fill a terminal."""

    def __init__(self, **settings: Any) -> None:
        # Without abbreviations: a new option could break scripts.
        super().__init__(formatter_class=_Help, allow_abbrev=False, **settings)
        self.set_defaults(wrong_usage=2, failed=1)  # exit statuses

    def error(self, message: str) -> NoReturn:
        self.exit(self.get_default("wrong_usage"), f"{self.prog}: error: {message}; see {self.prog} --help\n")


def top_parser() -> argparse.ArgumentParser:
    """Return the parser of the options before the command."""
    listed: dict[str, str] = {}  # commands by heading
    for name, (_, heading, text) in COMMANDS.items():
        if heading is not None:
            listed[heading] = listed.get(heading, f"{heading}:") + f"\n  {name:<10} {text}"
    commands = "\n\n".join(listed.values())
    parser = _Parser(
        prog="safeload",
        usage="safeload [-h] [--version] [-v] COMMAND ...",
        description="Inspect, check, compare and convert model weight files.",
        epilog=f"""{commands}

examples:
  safeload info model.safetensors
  safeload info Llama-3.2-1B/ --tree
  safeload get model.safetensors model.norm.weight
  safeload check Llama-3.2-1B/
  safeload stats model.safetensors --sort absmax
  safeload convert model.pth model.safetensors
  safeload diff model.pth model.safetensors
  safeload ls

Run `safeload COMMAND --help` for details. `safeload PATH` means `safeload info PATH`.""",
    )
    parser.add_argument("--version", action="version", version=f"safeload {__version__}")
    _add_verbose(parser)
    return parser


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command, and import its module."""
    parser = _Parser(prog=f"safeload {name}")
    _add_verbose(parser)
    getattr(import_module(f".{COMMANDS[name][0]}", __package__), name)(parser)
    return parser


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add --verbose, which may stand before or after the command."""
    parser.add_argument(
        "-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log each step to stderr"
    )
