"""The command line: ``safeload COMMAND``, also ``python -m safeload``.

Exit status 0: success; 1: the file is bad or cannot be read; 2: wrong usage.
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

`safeload COMMAND --help` shows more."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="safeload",
        description="Inspect, check, compare and convert model weight files.",
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


def _main(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may contain characters that the terminal cannot encode
            stream.reconfigure(errors="backslashreplace")
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python would report it again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130  # the exit status of a shell for SIGINT
    except (SafeloadError, OSError, MemoryError) as error:
        print(f"safeload: {printable(one_line(error))}", file=sys.stderr)
        return 1
    except (ValueError, TypeError) as error:  # wrong arguments; faults of files are SafeloadError
        print(f"safeload: {printable(str(error))}", file=sys.stderr)
        return 2
    return status
