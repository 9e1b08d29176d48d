"""Parts of stores, and bytes in memory, as stores of their own."""

from __future__ import annotations

from ..errors import FormatError
from .store import ByteStore, Memory, read_at


class StoreWindow:
    """A range of a store as a store of its own."""

    def __init__(self, store: ByteStore, begin: int, size: int, path: str) -> None:
        self.size = size
        self.version = (size,)
        self._store = store
        self._begin = begin
        self._path = path

    def read_into(self, offset: int, memory: Memory) -> None:
        if offset + memoryview(memory).nbytes > self.size:  # type: ignore[arg-type]
            raise FormatError(f"the range ends at byte {self.size}", self._path, self.size)
        self._store.read_into(self._begin + offset, memory)

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes of the window, fewer at its end."""
        return read_at(self._store, self._begin + offset, max(0, min(size, self.size - offset)))

    def close(self) -> None:
        pass


class Unpacked:
    """Bytes in memory as a store."""

    def __init__(self, content: bytes | bytearray) -> None:
        self.size = len(content)
        self.version = (self.size,)
        self.content = content

    def read_into(self, offset: int, memory: Memory) -> None:
        view = memoryview(memory).cast("B")  # type: ignore[arg-type]
        view[:] = memoryview(self.content)[offset : offset + len(view)]

    def close(self) -> None:
        pass
