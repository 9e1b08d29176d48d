"""Read the fields of a file one after the other."""

from __future__ import annotations

from ..core.text import error_about
from ..core.weight_file import WeightFile
from ..errors import FormatError, LimitError

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
