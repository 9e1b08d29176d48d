"""Read the bytes of files in Python: field after field, or in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import FormatError, LimitError
from .arrays import Array
from .jobs import WINDOW, Batch, Job
from .native import address_of
from .source import Source, memory_of
from .text import error_about
from .weight_file import WeightFile

# ---- fields, one after the other ----

# Bytes to read at first and after a jump, and at most if one window follows another.
_FIRST_READ, _LARGEST_READ = 4096, 1 << 20


class ByteReader:
    """Reads fields in order and reports faults with their byte position."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.position = 0  # byte of the next field; assign to it to skip data
        self._window, self._window_at = b"", 0
        self._step = _FIRST_READ

    def take(self, size: int, field: str) -> bytes:
        """Return the next bytes."""
        data = self.peek(size)
        if len(data) < size:
            raise self.fault(f"{field} needs {size} bytes, but the file ends after {len(data)}")
        self.position += size
        return data

    def peek(self, size: int) -> bytes:
        """Return the next bytes, or fewer at the end of the file, without a step."""
        start = self.position - self._window_at
        if start < 0 or start + size > len(self._window):
            near = 0 <= start <= len(self._window) and self._window
            self._step = min(2 * self._step, _LARGEST_READ) if near else _FIRST_READ
            count = min(max(size, self._step), max(0, self.file.size - self.position))
            self._window, self._window_at, start = self.file.read_at(self.position, count), self.position, 0
        return self._window[start : start + size]

    def take_text(self, size: int, field: str) -> str:
        """Return the next bytes as text."""
        begin = self.position
        try:
            return self.take(size, field).decode()
        except UnicodeDecodeError as error:
            raise self.fault(f"{field} is not UTF-8: {error.reason}", begin + error.start) from None

    def fault(self, message: str, position: int | None = None, tensor: str | None = None) -> FormatError:
        """Return the error for a fault at a byte, by default the next byte."""
        at = self.position if position is None else position
        return error_about(FormatError, message, path=self.file.path, offset=min(at, self.file.size), tensor=tensor)

    def limit(self, message: str, position: int | None = None) -> LimitError:
        """Return the error for a limit that is exceeded at a byte, by default the next byte."""
        at = self.position if position is None else position
        return error_about(LimitError, message, path=self.file.path, offset=at)


# ---- pieces: on several threads, in bounded memory, without mappings ----

# Bytes that each thread reads at a time: enough to amortize a read, and little compared with the memory of any machine.
PIECE = 4 << 20


def file_pieces(file: WeightFile, begin: int, end: int, buffer: Array | None = None) -> Iterator[memoryview]:
    """Yield the bytes [begin, end) of a file in pieces. Each piece overwrites the piece before."""
    step = WINDOW if file.remote else PIECE
    memory = np.empty(min(step, max(1, end - begin)), np.uint8) if buffer is None or file.remote else buffer
    for at in range(begin, end, step):
        size = min(step, end - at)
        Batch([Job(file, at, address_of(memory), size)]).run(threads=1)
        yield memory[:size].data


def source_pieces(source: Source) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces. Each piece overwrites the piece before."""
    if source.file is not None:
        yield from file_pieces(source.file, source.offset, source.offset + source.size)
    elif source.size:
        raw = memory_of(source)
        yield from (raw[at : at + PIECE].data for at in range(0, raw.size, PIECE))
