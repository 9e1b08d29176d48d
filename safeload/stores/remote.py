"""A file in a store that gives ranges of it on request: what such stores have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ..base.forking import ProcessLock
from ..errors import FormatError
from .stop import current
from .store import ByteStore, Memory, Span
from .thread_group import each

# Bytes of the first request: 97 % of the headers of the Hub's safetensors files fit into 100,000.
WINDOW = 128 << 10
# Ranges that are read ahead are read together, with the gap between them, if it has at most this many bytes; and as
# many ranges as this many bytes hold.
_GAP, _TOGETHER = 64 << 10, 8 << 20


class RemoteStore(ABC):
    """One file, of which any range can be read. Any thread may use it.

    Small reads, while it is opened, are answered from windows that are fetched when they are needed.

    Attributes:
        path: its URL as messages show it: without user, password and query.
        size: bytes.
        version: size, and what tells this content from another: an ETag, a version id, a time; None where the store
            gives none. Numbers and texts only.
    """

    path: str
    size: int
    version: tuple[Any, ...]
    _closed = False

    def __init__(self) -> None:
        self._windows: dict[int, bytes] = {}  # by offset
        self._begins: list[int] = []  # their offsets, in order
        self._lock = ProcessLock()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self.path}: an open file cannot be copied or pickled")

    @abstractmethod
    def read_spans(self, spans: Sequence[Span]) -> None:
        """Fills spans, in one request if that is possible: from the first byte of the first to the last of the last.

        Called in any thread; `stop.current` ends it. What is broken off, refused for a while or answered in part is
        tried again, a few times.

        Args:
            spans: ascending, without overlaps, with little between them.

        Raises:
            FormatError: the file has changed since it was opened.
            RemoteError, OSError: the bytes cannot be had.
        """

    def confirm(self) -> None:  # noqa: B027  most stores have nothing to do: each answer says which version it is of
        """Called when a call has read all that it wants, before anyone uses it.

        Raises:
            FormatError: the file has changed since it was opened.
            RemoteError, OSError: that cannot be found out.
        """

    def close(self) -> None:
        """Releases what the store holds. Nothing more is read from it, whatever it would have."""
        self._closed = True
        self._drop()

    def check_open(self) -> None:
        """Raises ValueError after `close`."""
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def read_into(self, offset: int, memory: Memory) -> None:
        """Fills memory with the bytes from ``offset`` on; see `read_spans` for errors."""
        self.check_open()
        view = memoryview(memory).cast("B")  # type: ignore[arg-type]
        if not view.nbytes:
            return
        if offset + view.nbytes > self.size:
            raise FormatError(f"the file ends at byte {self.size}", self.path, self.size)
        read_spans(self, [Span(offset, view)])

    # ---- small reads ----

    def keep(self, offset: int, content: bytes) -> None:
        """Keeps bytes that were read, for `read_at`."""
        with self._lock.own:
            # A fork may copy the state between any two lines: a beginning is listed only while it has its window.
            if len(content) >= len(self._windows.get(offset, b"")):
                self._windows[offset] = content
            at = bisect_left(self._begins, offset)
            if self._begins[at : at + 1] != [offset]:
                self._begins.insert(at, offset)

    def settle(self) -> None:
        """Drops the windows when the table has been read, unless one of them is the whole file."""
        if len(self._windows.get(0, b"")) < self.size:
            self._drop()

    def _drop(self) -> None:
        with self._lock.own:
            self._begins.clear()
            self._windows.clear()

    def held(self, offset: int, size: int) -> bytes | None:
        """Bytes that are in a window; None if they are in none."""
        for begin, content in self._around(offset):
            if offset + size <= begin + len(content):
                return content[offset - begin : offset - begin + size]
        return None

    def _around(self, offset: int) -> list[tuple[int, bytes]]:
        """The windows that a byte may be in: the last few that begin before it, as they overlap little; the first."""
        with self._lock.own:
            at = bisect_right(self._begins, offset)
            return [
                (begin, self._windows[begin])
                for begin in {*self._begins[max(0, at - 3) : at], *self._begins[: min(1, at)]}
            ]

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes of the file, fewer at its end: from a window, or from the file with what lies behind them."""
        self.check_open()
        size = max(0, min(size, self.size - offset))
        if not size:
            return b""
        found = self.held(offset, size)
        if found is not None:
            return found
        # What begins in a window goes on behind it, unless another thread has brought all of it meanwhile.
        for begin, content in self._around(offset):
            end = begin + len(content)
            if offset < end:
                found = content[offset - begin : offset - begin + size]
                return found + self.read_at(offset + len(found), size - len(found))
        begin = max(0, min(offset, self.size - WINDOW))
        memory = bytearray(max(offset + size, min(begin + WINDOW, self.size)) - begin)
        self.read_into(begin, memory)
        content = bytes(memory)
        self.keep(begin, content)
        return content[offset - begin : offset - begin + size]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Reads ranges [begin, end) that `read_at` will be asked for, many at a time."""
        requests: list[list[tuple[int, int]]] = []
        for begin, end in sorted({(max(0, begin), min(end, self.size)) for begin, end in ranges}):
            if begin >= end or self.held(begin, end - begin) is not None:
                continue
            last = requests[-1] if requests else None
            if last is not None and begin - last[-1][1] <= _GAP and end - last[0][0] <= _TOGETHER:
                last.append((begin, end))
            else:
                requests.append([(begin, end)])
        each(self._fetch_all, requests)

    def _fetch_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Reads ranges in one request, and keeps them, but not what is between them."""
        first = ranges[0][0]
        memory = memoryview(bytearray(max(end for _, end in ranges) - first))
        self.read_into(first, memory)
        for begin, end in ranges:
            self.keep(begin, bytes(memory[begin - first : end - first]))


class ForeignStore(RemoteStore):
    """A store of the caller's, with the four members of `ByteStore`.

    What it reads lands in memory of its own first: it may not be possible to end it.

    Args:
        store: the caller's.
        path: as messages show it.
    """

    def __init__(self, store: ByteStore, path: str) -> None:
        super().__init__()
        self.path = path
        self.size = store.size
        self._store = store
        self.version = self._version()

    def _version(self) -> tuple[Any, ...]:
        known = self._store.version
        return (self._store.size, *known) if isinstance(known, tuple) else (self._store.size, known)

    def read_spans(self, spans: Sequence[Span]) -> None:
        """Fills spans, see `RemoteStore.read_spans`."""
        read_spans(self._store, spans)

    def confirm(self) -> None:
        """Compares the version with that of the opening."""
        if self._version() != self.version:
            raise FormatError("the file has changed since it was opened: its version is another one", self.path)

    def close(self) -> None:
        """Closes the caller's store."""
        super().close()
        self._store.close()


def read_spans(store: ByteStore, spans: Sequence[Span]) -> None:
    """Fills spans from any store, from what it holds if that is enough; see `RemoteStore.read_spans`."""
    begin, end = spans[0].offset, spans[-1].end
    if isinstance(store, RemoteStore):
        store.check_open()
        held = store.held(begin, end - begin)
        if held is None:
            store.read_spans(spans)
        else:
            fill(spans, begin, held)
        return
    memory = bytearray(end - begin)
    store.read_into(begin, memory)
    fill(spans, begin, memory)


def fill(spans: Sequence[Span], begin: int, content: bytes | bytearray | memoryview) -> None:
    """Copies bytes that a read that cannot be aborted has brought, unless the call that wanted them has ended.

    Args:
        spans: what to fill.
        begin: offset of the bytes in the store.
        content: the bytes, to the end of the last span.
    """
    view = memoryview(content)
    with current().filling():
        for offset, memory in spans:
            memory[:] = view[offset - begin : offset - begin + len(memory)]
