"""The local file as a store: its descriptor, which may be closed between reads, its identity and its mapping."""

from __future__ import annotations

import errno
import os
import sys
import time
import weakref
from _thread import get_ident
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from ..base.native import Error, check, ffi, lib, mapped_buffer, pointer, short
from ..base.paths import PathLike, absolute, native_path
from ..errors import FormatError
from .store import ByteStore, Memory


def identity_of(status: os.stat_result) -> Identity:
    """The fields of a stat result that identify a file."""
    return Identity(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)


class Identity(NamedTuple):
    """Identifies a file, to detect that another program has replaced it or written into it.

    Attributes:
        size: bytes.
        mtime_ns: time of the last change, in nanoseconds.
        device: of the file system; meaningless in another process, which may be on another machine.
        inode: of the file on that device; meaningless elsewhere for the same reason.
    """

    size: int
    mtime_ns: int
    device: int
    inode: int


# Files whose descriptors are open, by descriptor, the oldest first. Every access is one atomic operation, so that it
# needs no lock, which a fork might find locked.
_open: dict[int, weakref.ref[LocalStore]] = {}


class Descriptor(int):
    """The C core's file handle, closed when nothing refers to it any more.

    Jobs hold a reference to the descriptor that they read: if it were closed under them, the next file to be opened
    would get its number, and they would read that file. It must not be copied: the copy would close the number a second
    time, whichever file has it by then.
    """

    __slots__ = ()

    # By defaults: free-threaded Python ends with globals that are gone before the last objects are.
    def __del__(self, known: dict[int, weakref.ref[LocalStore]] = _open, close: Any = short.sl_file_close) -> None:
        known.pop(int(self), None)  # before another file gets its number
        close(int(self))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an open file cannot be copied or pickled")


# Up to this many open files the system's limit is not queried.
_FEW = 32
# At most this many, far more than speed needs, even where the system's own limit is higher.
_MANY = 4096


def _budget() -> int:
    """How many descriptors to keep open: half of the process's limit, as the program needs some too."""
    if os.name == "nt":  # handles are limited by memory only
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MANY if limit == resource.RLIM_INFINITY else max(1, min(limit // 2, _MANY))


def _release(count: int) -> bool:
    """Close up to ``count`` idle descriptors, oldest files first, never the latest; return whether it closed any.

    A file that is no longer at its path, or has been written to, keeps its descriptor: it could not be opened again.
    """
    released = 0
    busy = {number for claim in list(_claims.values()) for number in list(claim.held.values())}
    for number in list(_open)[:-1]:
        if number in busy:
            continue
        reference = _open.get(number)
        file = None if reference is None else reference()
        if file is not None and file.release():
            released += 1
            if released >= count:
                break
    return released > 0


def release_at(path: str) -> bool:
    """Closes the file at a path where whoever opened it `gives_way`, as Windows does not replace a file that is open.

    Returns:
        Whether it closed any.
    """
    try:
        there = identity_of(os.stat(path))
    except OSError:
        return False
    files = [file for reference in list(_open.values()) if (file := reference()) is not None and file.gives_way]
    return sum(file.release() for file in files if file.version == there) > 0


# What the system answers if the process, or the machine, has no descriptor left.
_NONE_FREE = (errno.EMFILE, errno.ENFILE)
# Seconds to wait for jobs of other threads to close theirs, and between two looks.
_PATIENCE, _PAUSE = 30.0, 0.001


def with_room(attempt: Callable[[], int], error: Any, status: int | None = None) -> int:
    """Call a function of the C core that opens a file until it finds a free descriptor, and return its status.

    Idle files are closed first; then the jobs of other threads are awaited, unless this thread runs some too.

    Args:
        attempt: returns the status.
        error: the core's error, which the function fills.
        status: of a first attempt; None to make it here.
    """
    deadline = 0.0
    if status is None:
        status = attempt()
    while status == lib.SL_E_OS and error.os_errno in _NONE_FREE:
        deadline = deadline or time.monotonic() + _PATIENCE
        if not _release(max(1, len(_open) // 2)):
            if not _others_hold():
                break
            time.sleep(_PAUSE)
        if time.monotonic() > deadline:
            break
        status = attempt()
    return status


# ---- one budget for the jobs of all threads ----


class Claim:
    """The descriptors that one run of jobs may hold at a time.

    All runs of the process share half of `_budget`; each may hold one descriptor at least. A claim announces its number
    before it adds up those of other threads: of two at once, one at least sees the other.

    Attributes:
        thread: that runs the jobs.
        held: the open descriptors, by file.
    """

    __slots__ = ("_count", "held", "thread")

    def __init__(self) -> None:
        self._count = 0
        self.held: dict[Any, int] = {}
        self.thread = get_ident()

    def __enter__(self) -> Claim:
        _claims[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _claims.pop(id(self), None)

    def share(self, wanted: int) -> int:
        """Claim up to ``wanted`` descriptors instead of those before, and return how many may be open."""
        self.held = {}
        self._count = wanted
        claims = list(_claims.values())
        total = sum([claim._count for claim in claims])
        if total > _FEW:
            most = max(1, _budget() // 2)
            self._count = max(1, min(wanted, most // len(claims), most - (total - wanted)))
        return self._count


# Claims of all threads, by id. As with `_open`, every access is one atomic operation.
_claims: dict[int, Claim] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_claims.clear)  # their threads are not in the child


def none_free(error: OSError) -> bool:
    """Return whether a file could not be opened because no descriptor was free."""
    return error.errno in _NONE_FREE


def _others_hold() -> bool:
    """Return whether only jobs of other threads hold descriptors: two that hold some must not wait for each other."""
    mine, holders = get_ident(), [claim.thread for claim in list(_claims.values()) if claim.held]
    return bool(holders) and mine not in holders


def check_unchanged(path: str, seen: tuple[int, ...]) -> None:
    """`compare` before a file is opened: a changed file may not even be a weight file any more.

    Raises:
        FormatError: another program has changed the file.
    """
    try:
        status = os.stat(path)
    except OSError:  # opening it raises a better error
        return
    compare(identity_of(status), seen, path)


def compare(found: tuple[Any, ...], seen: tuple[Any, ...], path: str) -> None:
    """Raises FormatError if a file is not the one seen before; ``seen`` is an `Identity` or the beginning of one."""
    if found[: len(seen)] != tuple(seen):
        what = "it was written to, or replaced"
        if found[0] != seen[0]:
            what = f"it had {seen[0]:,} bytes, and has {found[0]:,}"
        raise FormatError(f"the file has changed since it was opened: {what}", path)


class LocalStore:
    """One regular file, open for reading until it is closed or no longer referenced.

    Its descriptor may be closed between reads, because a checkpoint may have more shards than a process may have
    descriptors. The file is then opened again when needed, and must be unchanged.

    Args:
        path: as given by the caller.
        opened: the C core's ``sl_file``.
        brief: whether it will be closed again at once: it has no `place`, and its descriptor stays open until then.
        shown: the path in messages, where that is another.

    Attributes:
        path: as messages show it.
        place: the absolute path.
        size: bytes.
        gives_way: whether this process may close it to replace the file; see `release_at`.
    """

    gives_way = False
    _closed = False

    def __init__(self, path: str, opened: Any, *, brief: bool = False, shown: str | None = None) -> None:
        self.path = path if shown is None else shown
        self.size: int = opened.size
        self._opened = opened
        self._descriptor: Descriptor | None = Descriptor(opened.handle)
        if not brief:
            self.place = absolute(path)
            if os.name == "nt":
                self._status = os.stat(self.place)
            _open[opened.handle] = weakref.ref(self)
            if len(_open) > _FEW and len(_open) > (budget := _budget()):
                _release(len(_open) - budget + budget // 4)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self.path}: an open file cannot be copied or pickled")

    @property
    def version(self) -> Identity:
        """The identity of the file when it was first opened."""
        if os.name == "nt":
            return identity_of(self._status)
        opened = self._opened
        return Identity(opened.size, opened.mtime_ns, opened.device, opened.inode)

    @property
    def descriptor(self) -> Descriptor:
        """The C core's file handle. Whoever uses it holds a reference to it for as long."""
        descriptor = self._descriptor
        if descriptor is None:
            if self._closed:
                raise ValueError(f"{self.path} is closed")
            descriptor = self._reopen()
        return descriptor

    def release(self) -> bool:
        """Closes the descriptor until the next read, unless the path no longer leads to the file.

        Returns:
            Whether it was closed.
        """
        if self._descriptor is None:
            return False
        try:
            there = identity_of(os.stat(self.place))
        except OSError:
            return False
        if there != self.version:
            return False
        self._descriptor = None
        return True

    def _reopen(self) -> Descriptor:
        seen = self.version
        check_unchanged(self.place, seen)
        again = open_local(self.place, shown=self.path)
        compare(again.version, seen, self.path)
        self._descriptor = descriptor = again.descriptor
        _open[int(descriptor)] = weakref.ref(self)
        if self._closed:  # another thread has closed it meanwhile
            self._descriptor = None
        return descriptor

    def read_into(self, offset: int, memory: Memory) -> None:
        """Fills memory with the bytes from ``offset`` on. It keeps the GIL, and is meant for small reads.

        Raises:
            FormatError: the file ends too early.
            OSError: the file cannot be read.
        """
        buffer = ffi.from_buffer(memory, require_writable=True)
        place = self.descriptor, offset, pointer(buffer), len(buffer)
        if short.sl_file_read(*place, None) != lib.SL_OK:
            error = Error()  # once more, to get the error
            check(short.sl_file_read(*place, pointer(error)), error, self.path)

    def map(self) -> Any:
        """A new private copy-on-write mapping of the whole file, as a writable buffer.

        Raises:
            OSError: the system refuses the mapping.
        """
        address = ffi.new("void **")
        error = Error()
        status = short.sl_file_map(self.descriptor, self.size, pointer(address), pointer(error))
        check(status, error, self.path)
        return mapped_buffer(address[0], self.size)

    def open_direct(self) -> Descriptor | None:
        """Another handle to the file, for jobs that read past the page cache; None where system or disk has none."""
        handle = short.sl_file_open_direct(self.descriptor)
        return Descriptor(handle) if handle else None

    def close(self) -> None:
        """Closes the descriptor once no job needs it; arrays over mappings stay valid."""
        self._closed = True
        self._descriptor = None


def open_local(path: PathLike, *, shown: str | None = None) -> LocalStore:
    """Opens a file.

    Args:
        path: of the file.
        shown: the path in later messages, where that is another.

    Raises:
        FormatError: not a regular file.
        OSError: the file cannot be opened.
    """
    text, encoded = native_path(path)
    opened, error = ffi.new("sl_file *"), Error()
    arguments = encoded, pointer(opened), pointer(error)
    check(with_room(lambda: int(short.sl_file_open(*arguments)), error), error, text)
    return LocalStore(text, opened, shown=shown)


def descriptor_of(store: ByteStore) -> Descriptor | None:
    """The handle by which the C core reads a store itself; None if it has none."""
    return store.descriptor if isinstance(store, LocalStore) else None


def direct_of(store: ByteStore) -> Descriptor | None:
    """A new handle for jobs that read a store past the page cache; None if it, or the system, has none."""
    return store.open_direct() if isinstance(store, LocalStore) else None


def mapping_of(store: ByteStore) -> Any:
    """A new private copy-on-write mapping of a store, as a writable buffer; None if it, or the system, has none."""
    try:
        return store.map() if isinstance(store, LocalStore) else None
    except OSError:
        return None
