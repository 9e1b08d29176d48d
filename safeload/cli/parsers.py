"""The parsers of the command line. The module of a command is imported only if the command runs."""

from __future__ import annotations

import argparse
import textwrap
from importlib import import_module
from typing import NoReturn

from .._version import __version__
from ..base.layout import width

# The commands in the order of the help: each is a module of this package.
COMMANDS = {
    "info": "list tensors and metadata",
    "get": "print the values of a tensor",
    "check": "find faults in weights",
    "stats": "show statistics of the values",
    "convert": "write another format, dtype or layout",
    "edit": "change metadata and names in place",
    "diff": "compare two checkpoints",
    "patch": "publish or apply the difference of two files",
    "report": "write an HTML page with charts",
    "scan": "judge the code that pickles name",
    "verify": "compare files with a signature or a manifest",
    "sign": "sign the files of a model",
    "ls": "list the models on this machine",
    "families": "list the known families of models",
    "completion": "print a completion script for a shell",
}

_EPILOG = """examples:
  safeload info model.safetensors
  safeload info Llama-3.2-1B/ --tree
  safeload get model.safetensors model.norm.weight
  safeload check Llama-3.2-1B/
  safeload stats model.safetensors --sort absmax
  safeload convert model.pth model.safetensors
  safeload diff model.pth model.safetensors
  safeload ls

Run `safeload COMMAND --help` for details. `safeload PATH` means `safeload info PATH`."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with the paragraphs around the options wrapped to the terminal; examples stay unchanged."""

    def _fill_text(self, text: str, width_without_margin: int, indent: str) -> str:
        parts = text.split("\n\n")
        return "\n\n".join(part if part.startswith("examples:") else textwrap.fill(part, width()) for part in parts)


class _Parser(argparse.ArgumentParser):
    """A parser with errors of a single line, because the usage of a command can fill a terminal."""

    wrong_usage = 2  # exit status

    def error(self, message: str) -> NoReturn:
        self.exit(self.wrong_usage, f"{self.prog}: error: {message}; see {self.prog} --help\n")


class Parsers:
    """The parser of the options before the command, and a parser for each command."""

    def __init__(self) -> None:
        self.top = _Parser(
            prog="safeload",
            usage="safeload [-h] [--version] [-v] COMMAND ...",
            description="Inspect, check, compare and convert model weight files.",
            epilog=_EPILOG,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self.top.add_argument("--version", action="version", version=f"safeload {__version__}")
        _add_verbose(self.top)
        self._commands = self.top.add_subparsers(title="commands", metavar="COMMAND", prog="safeload")
        for name, text in COMMANDS.items():
            self._commands.add_parser(
                name,
                help=text,
                formatter_class=_Help,
                allow_abbrev=False,  # otherwise a new option could break scripts
            )
        self._complete: set[str] = set()

    def command(self, name: str) -> argparse.ArgumentParser:
        """Return the parser of a command, and import its module."""
        parser: argparse.ArgumentParser = self._commands.choices[name]
        if name not in self._complete:
            _add_verbose(parser)
            import_module(f".{name}", __package__).register(parser)
            self._complete.add(name)
        return parser


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add --verbose, which may stand before or after the command."""
    parser.add_argument(
        "-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log each step to stderr"
    )
