"""Files that are hashed in the pass that reads them: only verified bytes are returned.

A file is read once, into private memory, and hashed on the way. Tensors come from this memory, so later changes to the
file change no tensor. Opening a file reads only its first bytes: names, shapes and metadata come from memory that is
hashed later, before the first tensor is returned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ..core.files import LOCAL_BLOCK, REMOTE_BLOCK, WINDOW, ByteStore, Files, LocalStore, Span, read_from
from ..core.forking import ProcessLock
from ..core.native import private_buffer
from ..core.thread_group import REMOTE_WORKERS, fill, in_order
from ..errors import LimitError, SafeloadError, VerificationError
from ..remote.remote_store import RemoteStore
from .digests import Expected, ExpectedFile, hash_of, refused

# A file with other first bytes than a header of this size is read whole when it is opened.
_HEAD = 128 << 20
# Memory of verified files kept for further reads, besides the last two files. It grows, up to half of the machine's, if
# files are dropped before half of their bytes were used: files of processes hold parts of every tensor.
_KEPT, _FEWEST = 4 << 30, 2
# Levels of folders to walk.
_LEVELS = 32


class VerifiedStore(RemoteStore):
    """A file in memory, verified before its bytes are used."""

    here = True

    def __init__(self, path: str, store: ByteStore, expected: ExpectedFile, files: VerifiedFiles) -> None:
        super().__init__(path, (store.size, *store.version[1:]))
        self._store, self._expected, self._files = store, expected, files
        self._memory: Any = None  # the bytes from the beginning of the file; None after `forget`
        self._head = 0  # bytes read while the file was opened, which the table may depend on
        self._used = 0  # bytes taken from the memory
        self.dropped_early = False
        self.opening = False  # until `settle` only the header is read, for the table and for nothing else
        self._lent = False
        self._verified = False
        self._error: VerificationError | None = None
        self._reading = ProcessLock()
        check_size(expected, self.size, path=path, source=files.expected.source)

    def read_spans(self, spans: Sequence[Span]) -> None:
        begin, end = spans[0].offset, spans[-1].end
        head = self.opening and end < min(self.size, _HEAD)
        # `forget` waits: afterwards the memory belongs to a caller, who may change it.
        with self._reading.own:
            memory = self._room() if head else self._ready()
            if head and self._head < end and not self._verified:
                read_from(self._store, self._head, memoryview(memory)[self._head : end], self.path)
                self._head = end
            fill(spans, begin, memoryview(memory)[begin:end])
            self._used += sum(len(span.memory) for span in spans)
        if not head:
            self._files.keep(self)

    def settle(self) -> None:
        super().settle()
        self.opening = False

    def verify(self, *, alone: bool = True) -> None:
        """Read and hash the file unless that is done. Alone, it reads ahead of the hash on other threads."""
        with self._reading.own:
            self._ready(alone=alone)
        self._files.keep(self)

    def _ready(self, *, alone: bool = True) -> Any:
        """Return memory with the verified file."""
        memory = self._room()
        if not self._verified:
            pieces, source = self._pieces(memoryview(memory), alone), self._files.expected.source
            try:
                compare_digests(pieces, self._expected, self.size, path=self.path, source=source)
            except VerificationError as error:  # the table depends on the memory, so no second try may succeed
                self._error, self._memory = VerificationError(*error.args, path=self.path), None
                raise
            self._verified = True
        return memory

    def _room(self) -> Any:
        self.check_open()
        if self._error is not None:
            raise VerificationError(*self._error.args, path=self.path)
        if self._memory is None:
            self._memory = private_buffer(self.size) if self.size else bytearray()
        return self._memory

    def _pieces(self, view: memoryview, alone: bool) -> Iterator[memoryview]:
        """Yield the file in pieces that have been read, in order."""
        local = isinstance(self._store, LocalStore)
        step = LOCAL_BLOCK if local else REMOTE_BLOCK
        head, count = self._head, 2 if local else REMOTE_WORKERS
        if local and (not alone or self.size < 8 * step):
            count = 1

        def read(begin: int) -> memoryview:
            piece = view[begin : begin + step]
            read_from(self._store, begin, piece, self.path)
            return piece

        if head:
            yield view[:head]
        yield from in_order(read, range(head, self.size, step), count)

    # ---- memory ----

    def map(self) -> Any:
        """Lend the verified bytes as a writable buffer, until `forget`; None if they are lent to another caller."""
        with self._reading.own:
            if self._lent:
                return None
            memory = self._ready()
            self._lent = True
        self._files.keep(self)
        return memory

    def forget(self) -> None:
        """Give the memory away, or free it: the next read reads and hashes the file again."""
        with self._reading.own:
            self._lent = False
            if self._verified:
                self._memory, self._head, self._verified = None, 0, False
                self.dropped_early, self._used = 2 * self._used < self.size, 0
                super()._drop()
        self._files.drop(self)

    def close(self) -> None:
        super().close()
        self._files.drop(self)
        self._memory = None
        self._store.close()


class VerifiedFiles:
    """`Files` of which only verified bytes are read. The files least recently used leave memory first."""

    def __init__(self, files: Files, expected: Expected) -> None:
        self._files = files
        self.expected = expected
        self._stores: dict[VerifiedStore, None] = {}  # files in memory, the least recently used first
        self._limit = _KEPT
        self._lock = ProcessLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return VerifiedFiles, (self._files, self.expected)

    def open(self, path: str, window: int = WINDOW) -> ByteStore:
        if self.expected.files is not None:
            self.expected.of(path, self._files, None)  # refuses other files before anything is opened
        try:
            store = self._files.open(path, window)
        except FileNotFoundError:
            self.check_missing(path)
            raise
        try:
            expected = self.expected.of(path, self._files, getattr(store, "place", None))
            return VerifiedStore(self._files.shown(path), store, expected, self)
        except BaseException:
            store.close()
            raise

    def check_missing(self, path: str) -> None:
        """Refuse the absence of an expected file."""
        if self.expected.covers(path, self._files):
            raise refused(f"the file is missing, but {self.expected.source} lists it", self._files.shown(path))

    def keep(self, store: VerifiedStore) -> None:
        """Move a store to the end, and drop the memory of older stores if there is too much."""
        dropped = []
        with self._lock.own:
            if store.dropped_early:
                store.dropped_early = False
                half = _KEPT  # of the machine's memory, which Windows does not tell
                with suppress(AttributeError, ValueError, OSError):
                    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
                self._limit = max(self._limit, min(2 * self._limit, half))
            self._stores.pop(store, None)
            self._stores[store] = None
            total = sum(other.size for other in self._stores)
            while total > self._limit and len(self._stores) > _FEWEST:
                dropped.append(next(iter(self._stores)))
                total -= dropped[-1].size
                del self._stores[dropped[-1]]
        for oldest in dropped:
            oldest.forget()

    def drop(self, store: VerifiedStore) -> None:
        """Forget a store that has no memory."""
        with self._lock.own:
            self._stores.pop(store, None)

    def public_options(self) -> NoReturn:
        raise VerificationError("a plan cannot include verified files: its workers would open them unverified")

    def __getattr__(self, name: str) -> Any:
        """Return anything else as the files behind have it."""
        return getattr(self._files, name)


# ---- whole files ----


def compare_digests(pieces: Iterable[memoryview], expected: ExpectedFile, size: int, *, path: str, source: str) -> None:
    """Hash the pieces of a file, and compare the digests."""
    waiting = filter(len, pieces)
    at, rest = 0, memoryview(b"")
    for part in expected:
        digest = hash_of(part.algorithm, size)
        while (part.end is None or at < part.end) and (rest := rest or next(waiting, rest)):
            count = len(rest) if part.end is None else min(len(rest), part.end - at)
            digest.update(rest[:count])
            at, rest = at + count, rest[count:]
        if digest.hexdigest() != part.digest:
            whole = (part.begin, part.end) in ((0, None), (0, size))
            where = "" if whole else f" in bytes [{part.begin:,}, {part.end:,})"
            digests = f"expected {part.algorithm} {part.digest[:16]}..., got {digest.hexdigest()[:16]}..."
            raise refused(f"the file differs from {source}{where}: {digests}", path)
    for _ in waiting:  # the bytes after the last piece
        pass


def check_size(expected: ExpectedFile, size: int, *, path: str, source: str) -> None:
    """Compare the size of a file, which is known before it is read."""
    stated = expected[-1].end if expected else 0
    if stated is not None and stated != size:
        raise refused(f"the file has {size:,} bytes, but {stated:,} in {source}", path)


def walk(
    root: str, files: Files, failed: Callable[[str, Exception], object] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the relative name and the path of each file below a folder, hidden files too if they are local."""
    # `failed` gets each folder that cannot be listed, or is too deep, and the error; None raises the error.
    visited: set[tuple[int, int]] = set()
    waiting = [("", root, 0)]
    while waiting:
        before, folder, level = waiting.pop()
        try:
            if not files.remote:
                status = os.stat(folder)
                if status.st_ino and (status.st_dev, status.st_ino) in visited:  # a link to a folder above
                    continue
                visited.add((status.st_dev, status.st_ino))
                listing = [(name, os.path.isdir(os.path.join(folder, name))) for name in sorted(os.listdir(folder))]
            else:
                listing = files.listing(folder)
        except (OSError, SafeloadError) as error:
            if failed is None:
                raise
            failed(files.shown(folder), error)
            continue
        folders = [name for name, is_folder in listing if is_folder]
        if folders and level >= _LEVELS:
            path, message = files.shown(folder), f"folders are nested more than {_LEVELS} levels deep"
            if failed is None:
                raise LimitError(message, path=path)
            failed(path, LimitError(message, path=path))
            folders = []
        waiting += [(f"{before}{name}/", files.join(folder, name), level + 1) for name in reversed(folders)]
        yield from ((f"{before}{name}", files.join(folder, name)) for name, is_folder in listing if not is_folder)
