"""Run a Python program with safeload in the place of safetensors: ``python -m safeload.as_safetensors SCRIPT``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from .compat.alias import path_with_shim

_HELP = """\
usage: python -m safeload.as_safetensors SCRIPT [ARG ...]
       python -m safeload.as_safetensors -m MODULE [ARG ...]
       python -m safeload.as_safetensors -c CODE [ARG ...]

Run a Python program, and every Python program that it starts, with safeload in
the place of safetensors. Arguments, exit status, tracebacks and signals are as
without this command.

  SCRIPT     a file to run, or - for standard input
  -m MODULE  a module to run, such as pytest
  -c CODE    code to run

Options of Python come first: python -u -m safeload.as_safetensors SCRIPT.
A program that is started with -I, -E or -S, or by a Python without safeload,
imports the real safetensors.
"""
_MODULE = "safeload.as_safetensors"


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the program, or return an exit status."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(_HELP, end="")
        return 0
    first, problem = arguments[0] if arguments else "", None
    if not arguments:
        problem = "no SCRIPT given"
    elif first.startswith("-") and first != "-" and not first.startswith(("-m", "-c")):
        problem = f"unknown option {first}; options of Python come before -m {_MODULE}"
    elif sys.flags.ignore_environment or sys.flags.no_site:
        problem = "Python's options -I, -E and -S switch off PYTHONPATH or site, which this command needs"
    if problem is not None:
        print(f"{_MODULE}: {problem} (--help shows the usage)", file=sys.stderr)
        return 2
    # The working directory, where `python -m` looks first, is not on the path of a script.
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = folder in (os.path.abspath(entry) for entry in sys.path[1:])
    os.environ["PYTHONPATH"] = path_with_shim() if installed else path_with_shim(folder)
    command = [sys.executable, *_python_options(len(arguments)), *arguments]
    if os.name != "nt":
        os.execv(sys.executable, command)
    # Windows cannot replace a process. The program gets Ctrl-C too, and decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return subprocess.run(command, check=False).returncode


def _python_options(count: int) -> list[str]:
    """Return the options that Python was started with, before ``-m safeload.as_safetensors`` and its arguments."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - count]
    if options[-1:] == [_MODULE]:  # as in -m MODULE or -um MODULE
        del options[-1]
    elif options and options[-1].startswith("-") and options[-1].endswith(_MODULE):  # as in -mMODULE
        options[-1] = options[-1].removesuffix(_MODULE)
    else:  # run by another program
        return []
    flags = options.pop()[:-1]
    return options if flags == "-" else [*options, flags]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
