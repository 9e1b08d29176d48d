"""The protocol of a store, the members of a source of bytes; parts of stores, and bytes in memory, as stores."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ..errors import FormatError
from .arrays import Array

# Size of the first request to a remote store: 97 % of the safetensors headers on the Hub fit into 100,000 bytes.
WINDOW = 128 << 10
# Contiguous memory to read into.
Memory: TypeAlias = bytearray | memoryview | Array


@runtime_checkable
class ByteStore(Protocol):
    """The bytes of a file, wherever it is. Must be safe to use from any thread.

    A store can offer more: `local.LocalStore` has a file handle, `local.mapping_of` tells whether it can be mapped, and
    `remote.RemoteStore` reads several ranges at once.
    """

    @property
    def size(self) -> int:
        """Size in bytes."""

    @property
    def version(self) -> tuple[Any, ...]:
        """Changes with the content. The size comes first; fields meaningful only in this process come last."""

    def read_into(self, offset: int, memory: Memory) -> None:
        """Fill memory with the bytes from ``offset`` on."""

    def close(self) -> None:
        """Release resources; filled or mapped memory stays valid."""


class Span(NamedTuple):
    """A range of a store, and the memory to read it into."""

    offset: int  # first byte in the store
    memory: memoryview  # writable, contiguous bytes

    @property
    def end(self) -> int:
        """One past the last byte in the store."""
        return self.offset + len(self.memory)


def read_at(store: ByteStore, offset: int, size: int) -> bytes:
    """Return bytes of a store; fewer than ``size`` at its end."""
    windowed = getattr(store, "read_at", None)
    if windowed is not None:  # only a `remote.RemoteStore` has it, because each of its reads can be a request
        content: bytes = windowed(offset, size)
        return content
    size = max(0, min(size, store.size - offset))
    if size == 0:
        return b""
    memory = bytearray(size)
    store.read_into(offset, memory)
    return bytes(memory)


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
