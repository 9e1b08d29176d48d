"""The command line: ``safeload COMMAND``, also ``python -m safeload``.

Exit status 0: success; 1: the file is bad or cannot be read; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .._version import __version__
from ..base.selecting import NoMatchError
from ..base.table import similar
from ..base.text import printable
from ..errors import SafeloadError
from . import bench, check, completion, convert, diff, info, report, stats
from .common import add_verbose, complain, plain, verbose

_EPILOG = """examples:
  safeload info model.safetensors
  safeload info Llama-3.2-1B/ --tree
  safeload check Llama-3.2-1B/
  safeload stats model.safetensors --sort absmax
  safeload convert model.pth model.safetensors
  safeload diff model.pth model.safetensors

`safeload COMMAND --help` shows more. `safeload PATH` means `safeload info PATH`."""


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of what stands before the command, and the parser of each command."""
    parser = argparse.ArgumentParser(
        prog="safeload",
        usage="safeload [-h] [--version] [-v] COMMAND ...",
        description="Inspect, check, compare and convert model weight files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"safeload {__version__}")
    add_verbose(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="safeload")
    for command in (info, check, stats, convert, diff, report, bench):
        command.register(commands)
    completion.register(commands, parser)
    return parser, commands.choices


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command, which begin with its name or with a path for `info`."""
    parser, commands = _parsers()
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(2)
    place = next((k for k, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    word = arguments[place] if place < len(arguments) else ""
    if word not in commands and _is_path(word):
        return _command(commands["info"], arguments)
    before = parser.parse_args(arguments[:place])
    if word not in commands:
        parser.error(_unknown(word, commands) if word else "which command?")
    options = _command(commands[word], arguments[place + 1 :])
    return argparse.Namespace(**{**vars(before), **vars(options)})


def _command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one command; what it does not take is an error with the usage of this command."""
    # Intermixed parsing forgets what "--" has separated (https://github.com/python/cpython/issues/60346).
    parse = parser.parse_known_args if "--" in arguments else parser.parse_known_intermixed_args
    options, extra = parse(arguments)
    if extra:
        known = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
        near = _near(extra[0].partition("=")[0], known)
        parser.error(f"unrecognized arguments: {printable(' '.join(extra))}{near}")
    return options


def _is_path(word: str) -> bool:
    """Whether a word that is not a command is meant as a path: it exists, or it is spelled like one."""
    return os.path.lexists(word) or any(mark in word for mark in (os.sep, "/", ".", "*"))


def _unknown(word: str, commands: Mapping[str, Any]) -> str:
    near = _near(word, list(commands))
    return f"unknown command {word!r}{near or ', expected one of ' + ', '.join(commands)}"


def _near(word: str, known: Sequence[str]) -> str:
    close = similar(word, known)
    return f", did you mean {close[0]!r}?" if close else ""


@contextmanager
def _streams() -> Iterator[None]:
    """Replaces a missing stdout or stderr by the null device: in daemons, under pythonw, after ``>&-``.

    Otherwise `print` to a missing stderr goes to stdout, and the next file that is opened gets the descriptor that is
    treated as stdout.
    """
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None or getattr(stream, "closed", False):
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.callback(setattr, sys, name, stream)
                setattr(sys, name, nowhere)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    with _streams():
        return _main(arguments)


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)  # the exit status of a shell


def _main(arguments: Sequence[str] | None) -> int:
    codecs.register_error("safeload", plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may contain characters that the terminal cannot encode
            stream.reconfigure(errors="safeload")
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        signal.signal(signal.SIGTERM, _stop)  # a half-written file is removed, as after Ctrl-C
    try:
        with verbose(getattr(options, "verbose", False)):
            status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python would report it again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130  # the exit status of a shell for SIGINT
    except NoMatchError as error:
        complain(error)
        return 2
    except (SafeloadError, OSError, MemoryError, ModuleNotFoundError) as error:  # the last one: a package of a URL
        complain(error)
        return 1
    except (ValueError, TypeError) as error:  # wrong arguments; faults of files are SafeloadError
        complain(error)
        return 2
    return status
