"""``-`` as a path of the command line: stdin as a source, stdout as a destination."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from ..base.text import show

# The path of stdin and of stdout.
STANDARD = "-"
# The name of stdin in output and messages.
STDIN = "<stdin>"
# Files of the system that stand for stdin. If it is a pipe, weights cannot be mapped through them.
_DEVICES = frozenset(("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"))


def source(path: Any) -> Any:
    """Return a path unchanged, or stdin as a binary file object for "-"."""
    if not is_stdin(path):
        return path
    if sys.stdin is None or sys.stdin.closed:
        raise ValueError(f"{STANDARD} reads stdin, which is closed; {_other()}")
    if sys.stdin.isatty():
        raise ValueError(f"{STANDARD} reads stdin, which is a terminal; redirect a file or a pipe to it, or {_other()}")
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
    from ..formats.foreign import HEAD_SIZE
    from ..formats.registry import check_head
    from ..stores.file_objects import temporary_copy

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
        raise ValueError(f"{what}, not {path} for a stream" + (f"; {_other()}" if path == STANDARD else ""))


def _other() -> str:
    return f"for a file of this name pass {show(os.path.join(os.curdir, STANDARD))}"


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
        raise ValueError(f"{STANDARD} writes to stdout, which is closed; {_other()}")
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
