"""What the rest of the package asks of a place that bytes come from."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ..base.arrays import Array

# Contiguous memory that a read fills.
Memory: TypeAlias = bytearray | memoryview | Array


@runtime_checkable
class ByteStore(Protocol):
    """The bytes of one file, wherever it is. Any thread may use it.

    A store may have more to offer than this: `local.descriptor_of` and `local.mapping_of` say whether it does, and
    `remote.RemoteStore` reads several ranges at once.
    """

    @property
    def size(self) -> int:
        """Number of bytes."""

    @property
    def version(self) -> tuple[Any, ...]:
        """Differs where the content does. The first field is the size; fields that only this process knows are last."""

    def read_into(self, offset: int, memory: Memory) -> None:
        """Fills memory with the bytes from ``offset`` on.

        Raises:
            FormatError: there are fewer bytes than that.
            OSError: they cannot be read.
        """

    def close(self) -> None:
        """Releases what the store holds; memory that it has filled or mapped stays valid."""


class Span(NamedTuple):
    """Where bytes of a store go.

    Attributes:
        offset: of the first of them in the store.
        memory: that they fill: writable, contiguous bytes.
    """

    offset: int
    memory: memoryview

    @property
    def end(self) -> int:
        """One past the last byte in the store."""
        return self.offset + len(self.memory)


def read_at(store: ByteStore, offset: int, size: int) -> bytes:
    """Bytes of a store, fewer at its end.

    Raises:
        FormatError, OSError: see `ByteStore.read_into`.
    """
    windowed = getattr(store, "read_at", None)
    if windowed is not None:  # of a `RemoteStore`, where each read is a request
        found: bytes = windowed(offset, size)
        return found
    size = max(0, min(size, store.size - offset))
    if size == 0:
        return b""
    memory = bytearray(size)
    store.read_into(offset, memory)
    return bytes(memory)
