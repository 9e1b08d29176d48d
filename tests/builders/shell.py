"""Scripts for bash in which the command ``safeload`` is a fork of this process, so that it need not be imported anew.

The shell sends a process id, a folder, arguments and its environment; the child takes over that process's streams.
"""

import os
import select
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path

from builders.inside import main

# Without these the scripts start the program itself.
FORKS = sys.platform == "linux" and hasattr(os, "pidfd_open")

_FUNCTION = """
exec 8<>"$REQUESTS" 9<>"$STATUSES"
safeload() {
    local shell=$BASHPID status
    # In a subshell: this one's own stdout is what the command gets.
    (printf '%s\\0' "$shell" "$PWD" "$#" "$@"; env -0; printf '\\0') >&8
    read -r -u 9 status
    return "$status"
}
"""
_LAST = b"\0\0"  # of a request: no variable of the environment is empty


def output_of(script: str, environment: Mapping[str, str], *, forks: bool) -> str:
    """What a script prints on stdout and stderr, together."""
    # Each command appends: they do not share a position in the file with the shell.
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "output"), "a+b") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        if not (forks and FORKS):
            subprocess.run(["bash", "-c", script], env=environment, check=False, **streams)
        else:
            pipes = {name: str(Path(folder, name)) for name in ("REQUESTS", "STATUSES")}
            for path in pipes.values():
                os.mkfifo(path)
            requests, statuses = (os.open(path, os.O_RDWR) for path in pipes.values())
            command = ["bash", "-c", _FUNCTION + script]
            with subprocess.Popen(command, env={**environment, **pipes}, **streams) as shell:
                _serve(shell, requests, statuses)
            os.close(requests)
            os.close(statuses)
        output.seek(0)
        return output.read().decode()


def _serve(shell: subprocess.Popen[bytes], requests: int, statuses: int) -> None:
    """Run the commands of a shell until it ends."""
    ended = os.pidfd_open(shell.pid)
    request = b""
    while requests in select.select([requests, ended], [], [])[0]:
        request += os.read(requests, 1 << 16)
        if request.endswith(_LAST):
            os.write(statuses, b"%d\n" % _run(request.decode().split("\0")))
            request = b""
    os.close(ended)


def _run(request: list[str]) -> int:
    process, folder, count, *words = request
    arguments, environment = words[: int(count)], words[int(count) : -2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no thread of this process
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256
    status = 1
    try:
        status = _command(int(process), folder, arguments, environment)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def _command(process: int, folder: str, arguments: list[str], environment: list[str]) -> int:
    """Run a command in this process as if a shell had started it."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    for number in range(3):
        flags = os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(f"/proc/{process}/fd/{number}", flags), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variable.partition("=")[::2] for variable in environment)
    # Buffered by lines, for which nothing is left to write at the end.
    sys.stdin, sys.stdout, sys.stderr = (open(k, "w" if k else "r", 1, encoding="utf-8") for k in range(3))  # noqa: SIM115
    sys.argv = ["safeload", *arguments]
    try:
        return main(arguments)
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
