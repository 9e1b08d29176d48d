"""The command line: ``safeload COMMAND``, also ``python -m safeload``.

Exit status 0: good; 1: the file is bad or cannot be read; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from .._version import __version__
from ..base.text import printable
from ..errors import SafeloadError, one_line
from . import bench, check, convert, diff, info, report, stats

_EPILOG = """examples:
  safeload info model.safetensors
  safeload info Llama-3.2-1B/ --json
  safeload check Llama-3.2-1B/
  safeload stats model.safetensors --sort absmax
  safeload convert model.pth model.safetensors
  safeload diff model.pth model.safetensors

`safeload COMMAND --help` has more of them."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="safeload",
        description="Look into model weight files, check and compare them, convert them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"safeload {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (info, check, stats, convert, diff, report, bench):
        command.register(commands)
    return parser


@contextmanager
def _streams() -> Iterator[None]:
    """Gives stdout and stderr a place where they have none: in daemons, under pythonw, after ``>&-``.

    Else `print` to a missing stderr goes to stdout, and the next file that is opened gets the number that everybody
    takes for stdout's.
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


def _main(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names are in any script, terminals are not
            stream.reconfigure(errors="backslashreplace")
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would report the pipe once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130  # as a shell reports death by SIGINT
    except (SafeloadError, OSError, MemoryError) as error:
        print(f"safeload: {printable(one_line(error))}", file=sys.stderr)
        return 1
    except (ValueError, TypeError) as error:  # wrong arguments; what is wrong with a file is a SafeloadError
        print(f"safeload: {printable(str(error))}", file=sys.stderr)
        return 2
    return status
