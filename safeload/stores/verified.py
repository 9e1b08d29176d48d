"""Files that are hashed in the pass that reads them: only verified bytes are returned.

A file is read once, into private memory, and hashed on the way. Tensors come from this memory, so later changes to the
file change no tensor. Opening a file reads only its first bytes: names, shapes and metadata come from memory that is
hashed later, before the first tensor is returned.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..base.forking import ProcessLock
from ..base.messages import error_about
from ..base.native import private_buffer
from ..errors import FormatError, VerificationError
from .digests import Expected, ExpectedFile, Hasher
from .files import Files
from .local import LocalStore
from .remote import RemoteStore, fill
from .store import WINDOW, ByteStore, Span
from .thread_group import REMOTE_WORKERS, each, in_order

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Bytes to read and hash at a time: they stay in the processor's cache in between.
_CHUNK, _REMOTE_CHUNK = 512 << 10, 8 << 20
# A file with other first bytes than a header of this size is read whole when it is opened.
_HEAD = 128 << 20
# Memory of verified files kept for further reads, besides the last two files. It grows, up to half of the machine's, if
# files are dropped before half of their bytes were used: files of processes hold parts of every tensor.
_KEPT, _FEWEST = 4 << 30, 2


class VerifiedStore(RemoteStore):
    """A file in memory, verified before its bytes are used."""

    here = True

    def __init__(self, path: str, store: ByteStore, expected: ExpectedFile, source: str, kept: KeptMemory) -> None:
        super().__init__()
        self.path, self.size, self.version = path, store.size, store.version
        self._store, self._expected, self._source, self._kept = store, expected, source, kept
        self._memory: Any = None  # the bytes from the beginning of the file; None after `forget`
        self._head = 0  # bytes read while the file was opened, which the table may depend on
        self._used = 0  # bytes taken from the memory
        self._dropped_early = False
        self._opening = False
        self._lent = False
        self._verified = False
        self._error: VerificationError | None = None
        self._reading = ProcessLock()
        check_size(expected, self.size, path=path, source=source)

    def read_spans(self, spans: Sequence[Span]) -> None:
        begin, end = spans[0].offset, spans[-1].end
        head = self._opening and end < min(self.size, _HEAD)
        # `forget` waits: afterwards the memory belongs to a caller, who may change it.
        with self._reading.own:
            memory = self._opened(end) if head else self._ready(alone=True)
            fill(spans, begin, memoryview(memory)[begin:end])
            self._used += sum(len(span.memory) for span in spans)
        if not head:
            self._keep()

    def begin(self) -> None:
        """Read only the header until `settle`. The caller must use it for the table, and for nothing else."""
        self._opening = True

    def settle(self) -> None:
        super().settle()
        self._opening = False

    def verify(self, *, alone: bool = True) -> None:
        """Read and hash the file unless that is done. Alone, it reads ahead of the hash on other threads."""
        with self._reading.own:
            self._ready(alone=alone)
        self._keep()

    def _keep(self) -> None:
        again, self._dropped_early = self._dropped_early, False
        self._kept.add(self, again=again)

    def _opened(self, end: int) -> Any:
        """Return memory with the first bytes of the file, which are hashed later."""
        self._check()
        memory = self._room()
        if self._head < end and not self._verified:
            read_from(self._store, self._head, memoryview(memory)[self._head : end], self.path)
            self._head = end
        return memory

    def _ready(self, *, alone: bool) -> Any:
        """Return memory with the verified file."""
        self._check()
        memory = self._room()
        if not self._verified:
            try:
                self._hash(memory, alone)
            except VerificationError as error:  # the table depends on the memory, so no second try may succeed
                self._error, self._memory = VerificationError(*error.args, path=self.path), None
                raise
            self._verified = True
        return memory

    def _check(self) -> None:
        self.check_open()
        if self._error is not None:
            raise VerificationError(*self._error.args, path=self.path)

    def _room(self) -> Any:
        if self._memory is None:
            self._memory = private_buffer(self.size) if self.size else bytearray()
        return self._memory

    def _hash(self, memory: Any, alone: bool) -> None:
        view = memoryview(memory)
        pieces = (view[begin:end] for begin, end in self._chunks(view, alone))
        compare_digests(pieces, self._expected, self.size, path=self.path, source=self._source)

    def _chunks(self, view: memoryview, alone: bool) -> Iterator[tuple[int, int]]:
        """Yield ranges of the file that have been read, in order."""
        local = isinstance(self._store, LocalStore)
        step = _CHUNK if local else _REMOTE_CHUNK
        head = self._head

        def read(begin: int) -> tuple[int, int]:
            end = min(begin + step, self.size)
            read_from(self._store, begin, view[begin:end], self.path)
            return begin, end

        if head:
            yield 0, head
        begins = range(head, self.size, step)
        if local and (not alone or self.size < 8 * step):
            yield from map(read, begins)
        else:
            yield from in_order(read, begins, 2 if local else REMOTE_WORKERS)

    # ---- memory ----

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return 0 if self._memory is None else self.size

    def map(self) -> Any:
        """Lend the verified bytes as a writable buffer, once: call `forget` before the borrower may write to it.

        Another call meanwhile gets None: arrays of two callers must not share memory.
        """
        with self._reading.own:
            if self._lent:
                return None
            memory = self._ready(alone=True)
            self._lent = True
        self._keep()
        return memory

    def forget(self) -> None:
        """Give the memory away, or free it: the next read reads and hashes the file again."""
        with self._reading.own:
            self._lent = False
            if self._verified:
                self._memory, self._head, self._verified = None, 0, False
                self._dropped_early, self._used = 2 * self._used < self.size, 0
                super()._drop()
        self._kept.remove(self)

    def close(self) -> None:
        super().close()
        self._kept.remove(self)
        self._memory = None
        self._store.close()


def read_from(store: ByteStore, offset: int, memory: memoryview, path: str) -> None:
    """Fill memory from a store, without the GIL if the file is local."""
    if not isinstance(store, LocalStore) or not hasattr(os, "preadv"):
        store.read_into(offset, memory)
        return
    while memory:
        count = store.use(os.preadv, [memory], offset)
        if not count:
            raise FormatError(f"the file ends at byte {offset:,}, but had {store.size:,} bytes", path, offset)
        memory, offset = memory[count:], offset + count


def compare_digests(pieces: Iterable[memoryview], expected: ExpectedFile, size: int, *, path: str, source: str) -> None:
    """Hash the pieces of a file, and compare the digests."""
    ranges = iter(expected.ranges)
    part = next(ranges, None)
    hasher = None if part is None else Hasher(part, size)
    at = 0
    for piece in pieces:
        end = at + len(piece)
        while part is not None and hasher is not None and at < end:
            stop = end if part.end is None else min(end, part.end)
            begin = len(piece) - (end - at)
            hasher.update(piece[begin : begin + stop - at])
            at = stop
            if stop == part.end:
                hasher.check(path, source)
                part = next(ranges, None)
                hasher = None if part is None else Hasher(part, size)
        at = end
    if hasher is not None:
        hasher.check(path, source)


def check_size(expected: ExpectedFile, size: int, *, path: str, source: str) -> None:
    """Compare the size of a file, which is known before it is read."""
    last = expected.ranges[-1].end if expected.ranges else 0
    stated = expected.size if last is None else last
    if stated is not None and stated != size:
        text = f"the file has {size:,} bytes, but {stated:,} in {source}"
        raise error_about(VerificationError, text, path=path)


def verify_content(
    store: ByteStore, expected: ExpectedFile, *, path: str, source: str, tick: Callable[[int], object]
) -> None:
    """Hash a file without keeping it."""
    check_size(expected, store.size, path=path, source=source)
    step = _CHUNK if isinstance(store, LocalStore) else _REMOTE_CHUNK
    buffer = memoryview(bytearray(max(1, min(step, store.size))))

    def pieces() -> Iterator[memoryview]:
        for begin in range(0, store.size, step):
            piece = buffer[: min(step, store.size - begin)]
            read_from(store, begin, piece, path)
            yield piece
            tick(len(piece))

    compare_digests(pieces(), expected, store.size, path=path, source=source)


class KeptMemory:
    """The verified files of a checkpoint that are still in memory. The least recently used are dropped first."""

    def __init__(self) -> None:
        self._stores: OrderedDict[int, VerifiedStore] = OrderedDict()
        self._limit = _KEPT
        self._lock = ProcessLock()

    def add(self, store: VerifiedStore, *, again: bool) -> None:
        """Move a store to the end, and drop the memory of others if there is too much."""
        dropped = []
        with self._lock.own:
            if again:
                self._limit = max(self._limit, min(2 * self._limit, _half_of_memory()))
            self._stores[id(store)] = store
            self._stores.move_to_end(id(store))
            total = sum(other.nbytes for other in self._stores.values())
            while total > self._limit and len(self._stores) > _FEWEST:
                _, oldest = self._stores.popitem(last=False)
                total -= oldest.nbytes
                dropped.append(oldest)
        for oldest in dropped:
            oldest.forget()

    def remove(self, store: VerifiedStore) -> None:
        """Remove a store."""
        with self._lock.own:
            self._stores.pop(id(store), None)


def _half_of_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        return _KEPT


class VerifiedFiles:
    """Files of which only verified bytes are read."""

    def __init__(self, files: Files, expected: Expected) -> None:
        self._files = files
        self.expected = expected
        self._kept = KeptMemory()
        self.remote = files.remote

    def __repr__(self) -> str:
        return f"<VerifiedFiles by {self.expected.source}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return VerifiedFiles, (self._files, self.expected)

    def open(self, path: str, window: int = WINDOW) -> ByteStore:
        if self.expected.lists and not self.expected.covers(path, self._files):
            self.expected.of(path, self._files, None)  # raises before anything is opened
        try:
            store = self._files.open(path, window)
        except FileNotFoundError:
            self.check_missing(path)
            raise
        try:
            expected = self.expected.of(path, self._files, getattr(store, "place", None))
            return VerifiedStore(self._files.shown(path), store, expected, self.expected.source, self._kept)
        except BaseException:
            store.close()
            raise

    def check_missing(self, path: str) -> None:
        """Refuse the absence of an expected file."""
        if self.expected.covers(path, self._files):
            shown = self._files.shown(path)
            raise error_about(
                VerificationError, f"the file is missing, but {self.expected.source} lists it", path=shown
            )

    # ---- the interface of Files ----

    def is_folder(self, path: str) -> bool:
        return self._files.is_folder(path)

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        return self._files.listing(folder)

    def join(self, folder: str, name: str) -> str:
        return self._files.join(folder, name)

    def split(self, path: str) -> tuple[str, str]:
        return self._files.split(path)

    def absolute(self, path: str) -> str:
        return self._files.absolute(path)

    def shown(self, path: str) -> str:
        return self._files.shown(path)

    def public(self, path: str) -> str:
        return self._files.public(path)

    def public_options(self) -> dict[str, Any] | None:
        raise VerificationError("a plan cannot include verified files: its workers would open them unverified")

    def check_unchanged(self, path: str, seen: tuple[Any, ...]) -> None:
        self._files.check_unchanged(path, seen)

    def each(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        return self._files.each(function, items)


def verify_all(stores: Sequence[VerifiedStore], count: int) -> None:
    """Read and hash files on several threads, a file on each."""
    alone = len(stores) < count
    each(lambda store: store.verify(alone=alone), stores, max(1, count))
