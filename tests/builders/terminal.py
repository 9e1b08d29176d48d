"""A real terminal for tests of the command line, and Ctrl-C."""

import _thread
import importlib
import os
import signal
import struct
import sys


def press_ctrl_c():
    """Interrupts the main thread as Ctrl-C does, which a console of Windows would send to the parents of a test too."""
    if os.name == "nt":
        _thread.interrupt_main()
    else:
        os.kill(os.getpid(), signal.SIGINT)


def on_terminal(*arguments, columns=80, keys="", program=(sys.executable, "-I", "-m", "safeload"), **environment):
    """What a command writes to a terminal, stdout and stderr together, and its status.

    Args:
        arguments: of the command.
        columns: width of the terminal.
        keys: what is typed.
        program: the command itself.
        environment: variables; None for those that must not be set.
    """
    fcntl, pty, termios = (importlib.import_module(name) for name in ("fcntl", "pty", "termios"))
    pid, descriptor = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        settings = {**os.environ, "TERM": "xterm", "COLUMNS": None, **environment}
        settings = {name: value for name, value in settings.items() if value is not None}
        os.execvpe(program[0], [*program, *map(str, arguments)], settings)
    os.write(descriptor, keys.encode())
    chunks = []
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), b"".join(chunks).decode(errors="surrogateescape")
