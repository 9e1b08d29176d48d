"""The command line: ``safeload COMMAND`` or ``python -m safeload COMMAND``.

Exit status: 0 success, 1 a bad or unreadable file, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from ..core.text import similar
from . import common
from .common import FAILURES, STANDARD
from .parsers import COMMANDS, command_parser, top_parser

# Commands and options for words that people try.
_INSTEAD = {
    word: use
    for use, words in {
        "check PATH": "validate",
        "convert SOURCE DESTINATION --adapter ADAPTER": "merge",
        "convert SOURCE DESTINATION --dtype DTYPE": "dequantize",
        "convert SOURCE DESTINATION --only PATTERN": "extract",
        "convert SOURCE DESTINATION --quantize SCHEME": "quantise quantize",
        "convert SOURCE DESTINATION --rename REGEX REPLACEMENT": "rename",
        "convert SOURCE FOLDER/ --max-shard-size SIZE": "shard split",
        "convert FOLDER/ DESTINATION": "unshard",
        "convert hf://OWNER/NAME FOLDER/": "download",
        "diff A B": "compare",
        "get FILE NAME": "cat print",
        "get FILE NAME --rows 0:10": "head",
        "info PATH": "describe inspect list metadata show summary view",
        "info PATH --tree": "tree",
        "report PATH": "html",
        "verify PATH --write FILE": "manifest",
        "--adapter": "--lora --merge",
        "--drop": "--exclude --skip",
        "--dtype": "--outtype --torch-dtype --type",
        "--only": "--filter --include --select",
        "--quantize": "--bits --quant --scheme",
        "--tolerance": "--atol --rtol",
    }.items()
    for word in words.split()
}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line that starts with a command or, for `info`, with a path."""
    top = top_parser()
    if not arguments:
        top.print_help(sys.stderr)
        top.exit(2)
    place = next(
        (k for k, word in enumerate(arguments) if not word.startswith("-") or word == STANDARD), len(arguments)
    )
    word = arguments[place] if place < len(arguments) else ""
    is_path = word == STANDARD or os.path.lexists(word) or any(mark in word for mark in (os.sep, "/", ".", "*"))
    if is_path and word not in COMMANDS:
        return _options(command_parser("info"), arguments)
    before = top.parse_args(arguments[:place])
    if not word:
        top.error("which command?")
    if word not in COMMANDS:
        instead = _INSTEAD.get(word.lower())
        advice = f", use: safeload {instead}" if instead else _near(word, list(COMMANDS))
        top.error(f"unknown command {word!r}{advice or ', expected one of ' + ', '.join(COMMANDS)}")
    options = _options(command_parser(word), arguments[place + 1 :])
    return argparse.Namespace(**{**vars(before), **vars(options)})


def _options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of a command; the error about an unknown option names the command."""
    # Intermixed parsing forgets the arguments after "--" (https://github.com/python/cpython/issues/60346).
    parse = parser.parse_known_args if "--" in arguments else parser.parse_known_intermixed_args
    options, extra = parse(arguments)
    if extra:
        from ..remote.foreign import cleaned  # only here: it knows URLs with secrets

        options_of = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
        near = _near(_INSTEAD.get(word := extra[0].partition("=")[0], word), options_of)
        parser.error(f"unrecognized arguments: {cleaned(ValueError(' '.join(extra)), [])}{near}")
    return options


def _near(word: str, names: Sequence[str]) -> str:
    bare = {name.lstrip("-"): name for name in names}  # dashes make all options alike
    close = similar(word.lstrip("-"), [*bare])
    return f", did you mean {bare[close[0]]!r}?" if close else ""


_INTERRUPTED, _PIPE_CLOSED = 130, 141  # the exit statuses of a shell for SIGINT and SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    try:
        with ExitStack() as stack:
            # Replace missing streams (daemons, pythonw, ``>&-``) by the null device: otherwise `print` to a missing
            # stderr goes to stdout, and the next opened file becomes stdout's descriptor.
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if stream is None or getattr(stream, "closed", False):
                    nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                    stack.callback(setattr, sys, name, stream)
                    setattr(sys, name, nowhere)
            return _main(arguments, stack)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _main(arguments: Sequence[str] | None, stack: ExitStack) -> int:
    codecs.register_error("safeload", common.plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the terminal may be unable to encode a name
            stream.reconfigure(errors="safeload")
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    interrupts: list[int] = []
    if arguments is not None:
        return _run(options, interrupts)
    for name in ("SIGTERM", "SIGHUP"):  # kill, and a terminal or connection that closes
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            # Remove a half-written file, as Ctrl-C does; the exit status is a shell's.
            signal.signal(number, lambda number, _: sys.exit(128 + number))

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # `__main__` lets Ctrl-C end the process
        signal.signal(signal.SIGINT, interrupt)
        # At the end again, because Python's own handler prints a traceback at exit.
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return _run(options, interrupts)


def _run(options: argparse.Namespace, interrupts: Sequence[int]) -> int:
    try:
        with common.log_to_stderr(verbose=getattr(options, "verbose", False)), ExitStack() as stack:
            if getattr(options, "cache", None) == "drop":
                from ..core.files import caching  # only here: help and version need no NumPy

                stack.enter_context(caching("drop"))
            options.storage_options = common.storage_options(options)
            if "paths" in options:
                options.paths = common.expanded(options.paths)
                common.check_once(options.paths)
            status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python would report it again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except Exception as error:
        if interrupts:  # an import that was interrupted raises ImportError
            return _INTERRUPTED
        if not isinstance(error, FAILURES):
            raise  # a defect of safeload
        common.complain(error)
        status = common.status_of(error, options)
    return status
