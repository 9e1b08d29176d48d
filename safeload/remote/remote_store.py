"""Files in remote stores: backends, range reads, small reads from cached windows, and files inside of other files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ..core.files import WINDOW, ByteStore, LocalStore, Memory, Span, compare, identity_of
from ..core.forking import ProcessLock
from ..core.thread_group import each, fill
from ..errors import FormatError, UnsupportedError
from . import url as urls
from .fetch import read_spans

# Prefetched ranges share a request if the gap between two ranges has at most _GAP bytes, and the request at most
# _TOGETHER bytes.
_GAP, _TOGETHER = 64 << 10, 8 << 20


class Backend(ABC):
    """One kind of store, opened with the caller's options. URLs are the caller's, secrets included."""

    escapes = False  # True if paths of the caller's own store are escaped in its URLs
    timeout = 30.0  # seconds that the store may be silent
    no_folders = read_only = ""  # why nothing is listed or written, if so

    @abstractmethod
    def open(self, url: str, window: int = WINDOW) -> ByteStore:
        """Open a file: a `RemoteStore`, or a `LocalStore` if the file is on this machine."""

    def is_folder(self, url: str) -> bool:
        return False

    def listing(self, url: str) -> list[tuple[str, bool]]:
        """Return the sorted names in a folder, and whether each is a folder itself."""
        raise UnsupportedError(f"{urls.shown(url)}: {self.no_folders}")

    def pinned(self, url: str) -> str:
        """Return the URL for other processes, which must read the same version."""
        return url

    def check_writable(self, url: str) -> None:
        """Refuse a read-only folder before anything is written, as far as can be known."""
        if self.read_only:
            raise UnsupportedError(f"{urls.shown(url)}: {self.read_only}")

    def upload(self, source: str, url: str) -> None:
        """Write a local file to a URL, where it becomes visible only when it is complete."""
        self.check_writable(url)

    def remove(self, targets: Sequence[str]) -> None:
        """Remove files, and empty folders, whose URLs end with a slash; some may not exist."""
        self.check_writable(targets[0])


class RemoteStore:
    """A file read by ranges, small ones from windows; subclasses have `read_spans`, or an unabortable `content`."""

    here = False  # True if reading the whole file takes no network
    _closed = False

    def __init__(self, path: str, version: tuple[Any, ...], window: int = WINDOW) -> None:
        self.path = path  # the URL in messages, without user, password and query
        # the size and a mark of the content, such as an ETag, a version id or a time; None if the store has no mark.
        # Numbers and str only.
        self.version = version
        self.size: int = version[0]  # in bytes
        self.window = window
        # By offset. Each change is a single step of the interpreter, so that a fork copies a whole list.
        self._windows: list[tuple[int, bytes]] = []
        self._lock = ProcessLock()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self.path}: an open file cannot be copied or pickled")

    def read_spans(self, spans: Sequence[Span]) -> None:
        """Fill ascending spans that do not overlap, by a single request, from any thread, until `current` stops."""
        begin, end = spans[0].offset, spans[-1].end
        fill(spans, begin, self.content(begin, end))

    def fill_spans(self, spans: Sequence[Span]) -> None:
        """Fill spans from a window, or by `read_spans`."""
        self.check_open()
        begin, end = spans[0].offset, spans[-1].end
        content = self.held(begin, end - begin)
        if content is None:
            self.read_spans(spans)
        else:
            fill(spans, begin, content)

    def content(self, begin: int, end: int) -> bytes | bytearray | memoryview:
        """Return bytes in a buffer of their own."""
        raise NotImplementedError

    def confirm(self) -> None:
        """Check the version once a call has read everything, unless each response states it."""

    def close(self) -> None:
        """Release resources and refuse all further reads, even from windows."""
        self._closed = True
        self._drop()

    def check_open(self) -> None:
        """Raise ValueError after `close`."""
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def read_into(self, offset: int, memory: Memory) -> None:
        """Fill memory with the bytes from ``offset`` on; see `read_spans` for errors."""
        self.check_open()
        view = memoryview(memory).cast("B")  # type: ignore[arg-type]
        if not view.nbytes:
            return
        if offset + view.nbytes > self.size:
            raise FormatError(f"the file ends at byte {self.size}", self.path, self.size)
        self.fill_spans([Span(offset, view)])

    # ---- small reads ----

    def keep(self, offset: int, content: bytes) -> None:
        """Keep a window of bytes for `read_at`."""
        with self._lock.own:
            at = bisect_left(self._windows, (offset,))
            begin, known = self._windows[at] if at < len(self._windows) else (None, b"")
            if begin != offset:
                self._windows.insert(at, (offset, content))
            elif len(content) >= len(known):
                self._windows[at] = offset, content

    def settle(self) -> None:
        """Drop the windows once the table has been read, unless a window holds the whole file."""
        if self.held(0, self.size) is None:
            self._drop()

    def _drop(self) -> None:
        with self._lock.own:
            self._windows.clear()

    def held(self, offset: int, size: int) -> bytes | None:
        """Return bytes from a single window, or None."""
        for begin, content in self._around(offset):
            if offset + size <= begin + len(content):
                return content[offset - begin : offset - begin + size]
        return None

    def _around(self, offset: int) -> list[tuple[int, bytes]]:
        """Return the windows that may hold a byte: the last few before it, as windows overlap little, and the first."""
        with self._lock.own:
            at = bisect_left(self._windows, (offset + 1,))
            return self._windows[max(0, at - 3) : at] + self._windows[: min(1, at)]

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes from a window, or read a new window; fewer bytes at the end of the file."""
        self.check_open()
        size = max(0, min(size, self.size - offset))
        if not size:
            return b""
        content = self.held(offset, size)
        if content is not None:
            return content
        length = WINDOW if self._windows else self.window
        # If a window holds the beginning, the rest follows it, unless another thread has fetched all of it meanwhile.
        for begin, window in self._around(offset):
            end = begin + len(window)
            if offset == end:  # a small first window is often only a little too small
                length = min(WINDOW, 4 * len(window))
            if offset < end:
                content = window[offset - begin : offset - begin + size]
                return content + self.read_at(offset + len(content), size - len(content))
        begin = max(0, min(offset, self.size - length))
        memory = bytearray(max(offset + size, min(begin + length, self.size)) - begin)
        self.read_into(begin, memory)
        content = bytes(memory)
        self.keep(begin, content)
        return content[offset - begin : offset - begin + size]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges [begin, end) concurrently, for later calls of `read_at`."""
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
        """Read ranges in a single request, and keep the ranges without the gaps."""
        first = ranges[0][0]
        memory = memoryview(bytearray(max(end for _, end in ranges) - first))
        self.read_into(first, memory)
        for begin, end in ranges:
            self.keep(begin, bytes(memory[begin - first : end - first]))


class MemberStore(RemoteStore):
    """The bytes of a member, which is a first byte and a size in a container; closing it leaves the container open."""

    def __init__(self, container: ByteStore, member: tuple[int, int], path: str) -> None:
        self.begin, size = member
        super().__init__(path, (size, self.begin, *container.version[:2]))
        self.here = container.here if isinstance(container, RemoteStore) else True
        self.container = container

    def read_spans(self, spans: Sequence[Span]) -> None:
        read_spans(self.container, [Span(self.begin + offset, memory) for offset, memory in spans])

    def confirm(self) -> None:
        if isinstance(self.container, RemoteStore):
            self.container.confirm()
        elif isinstance(self.container, LocalStore) and os.name != "nt":  # where its handle is no descriptor
            compare(identity_of(self.container.use(os.fstat)), self.container.identity, self.path)
