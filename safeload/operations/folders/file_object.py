"""Binary file objects as destinations."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeAlias, TypeGuard

from ...base.native import ffi
from ...engine.run.atomic_file import AtomicFile
from .destinations import Destination

# Bytes that a file object gets at once.
_PIECE = 4 << 20


class BinaryWriter(Protocol):
    """A file object opened for writing in binary mode; ``seek`` and ``tell`` are used if it has them."""

    def write(self, data: bytes, /) -> Any:
        """Write bytes and return their number."""


# Where tensors are written: a file, a folder, a store or a file object.
SaveDestination: TypeAlias = Destination | BinaryWriter


def is_written_to(dst: SaveDestination) -> TypeGuard[BinaryWriter]:
    """Return True for file objects opened for writing; paths of fsspec have ``fs``."""
    path_like = isinstance(dst, (str, os.PathLike))
    return not path_like and callable(getattr(dst, "write", None)) and not hasattr(dst, "fs")


class ObjectFile:
    """A binary file object, from its current position on."""

    def __init__(self, file: Any) -> None:
        if isinstance(file, io.TextIOBase):
            raise TypeError("expected a file object opened in binary mode, got a text file")
        if getattr(file, "closed", False):
            raise ValueError("the file object is closed")
        self._file = file
        self._start: int | None = None
        with suppress(AttributeError, OSError, io.UnsupportedOperation):
            if file.seekable():
                self._start = int(file.tell())
        self.in_order = self._start is None  # True if it cannot seek

    def seek(self, position: int) -> None:
        assert self._start is not None
        self._file.seek(self._start + position)

    def write(self, pieces: list[tuple[int, int]]) -> None:
        """Write copies of memory, because an object may keep its argument."""
        for address, size in pieces:
            for begin in range(0, size, _PIECE):
                count = min(_PIECE, size - begin)
                self._write(ffi.buffer(ffi.cast("char *", address + begin), count)[:])

    def _write(self, data: bytes) -> None:
        """Write all bytes, even if the object takes only some at a time."""
        while data:
            count = self._file.write(data)
            if count is None and isinstance(self._file, io.RawIOBase):
                raise BlockingIOError(errno.EAGAIN, "the file object does not block and takes no more bytes")
            if not isinstance(count, int):  # objects other than Python's may return nothing
                return
            if not 0 < count <= len(data):
                raise OSError(errno.EIO, f"the file object wrote {count} of {len(data)} bytes")
            data = data[count:]

    @contextmanager
    def open(self, size: int | None) -> Iterator[Any]:
        """Yield a file: this one, or for an unknown size a temporary one, which is copied."""
        if size is None:
            with tempfile.TemporaryDirectory(prefix="safeload-", ignore_cleanup_errors=True) as folder:
                path = os.path.join(folder, "spool.safetensors")
                with AtomicFile(path, 0, durable=False) as file:
                    yield file
                self.copy(path)
            return
        with self._undone():
            yield self
            if not self.in_order:
                self.seek(size)

    def copy(self, path: str) -> None:
        """Write the bytes of a local file."""
        with self._undone(), open(path, "rb") as complete:
            while data := complete.read(_PIECE):
                self._write(data)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Cut the file to its old size after an error, if the tensors were written at its end."""
        end = None
        if self._start is not None:
            end = int(self._file.seek(0, os.SEEK_END) or self._file.tell())
            self._file.seek(self._start)
        try:
            yield
        except BaseException:
            if end is not None and end <= (self._start or 0):
                with suppress(Exception):  # the first error is raised
                    self._file.seek(self._start)
                    self._file.truncate()
            raise
