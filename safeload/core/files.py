"""Files: stores of bytes, local files and their identities, files behind `Files`, and JSON beside weights.

Local files have descriptors that are closed between reads, and mappings; here they are replaced, copied and locked.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
import sys
import time
import weakref
from _thread import RLock, get_ident
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from ..errors import FormatError, SafeloadError, exported, public
from .arrays import Array
from .memory import Cache
from .native import Error, check, ffi, kept, lib, pointer, short
from .text import PathLike, absolute, native_path, show, size, warning

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# ---- stores ----

# Size of the first request to a remote store: 97 % of the safetensors headers on the Hub fit into 100,000 bytes.
WINDOW = 128 << 10
# Bytes to read and hash at a time: local blocks stay in the processor's cache in between.
LOCAL_BLOCK, REMOTE_BLOCK = 512 << 10, 8 << 20
# Contiguous memory to read into.
Memory: TypeAlias = bytearray | memoryview | Array


class ByteStore(Protocol):
    """The bytes of a file, wherever it is. Must be safe to use from any thread.

    A store can offer more: `LocalStore` has a file handle, `mapping_of` tells whether it can be mapped, and
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


# ---- pages in the system's cache ----

# True while files with dropped pages are opened and created.
_dropping = ContextVar("dropping", default=False)
# The ``sl_pages`` of a new file, of which no page stays.
_NO_PAGES = ffi.new("sl_pages *")


@contextmanager
def caching(cache: Cache) -> Iterator[None]:
    """Drop the pages of files opened and created in a block or a function; "keep" leaves an outer "drop" valid."""
    if cache not in ("keep", "drop"):
        raise ValueError(f'cache must be "keep" or "drop", got {show(cache)}')
    token = _dropping.set(cache == "drop" or _dropping.get())
    try:
        if cache == "drop":
            error = Error()
            check(short.sl_file_drop(0, pointer(_NO_PAGES), 0, 0, pointer(error)), error, subject='cache="drop"')
        yield
    finally:
        _dropping.reset(token)


def cache_here() -> Cache:
    """Return the argument of the outermost `caching` around this call, for other processes."""
    return "drop" if _dropping.get() else "keep"


def pages_of_new_file() -> int:
    """Return the address of the ``sl_pages`` of a file that is created; 0 if its pages stay."""
    return pointer(_NO_PAGES) if _dropping.get() else 0


def drop(descriptor: int, pages: int, offset: int, size: int) -> None:
    """Drop a range from the page cache; pages that are dirty, mapped or kept stay."""
    short.sl_file_drop(descriptor, pages, offset, size, pointer(Error()))


# ---- local files ----


def identity_of(status: os.stat_result) -> Identity:
    """Return a file's identity from its stat result."""
    return Identity(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)


class Identity(NamedTuple):
    """Identifies the content of a file, to detect changes by other programs."""

    size: int  # bytes
    mtime_ns: int  # time of the last modification, in nanoseconds
    device: int  # of the file system; meaningful only in this process, because a pickle may travel to another machine
    inode: int  # on the device; meaningful only in this process


# The lock of all descriptors: reentrant, because garbage collection may close a file inside the lock. It is held for
# moments only, never while a file is opened or looked up.
_lock = RLock()
# Files by their open descriptors, the oldest first.
_open: dict[int, weakref.ref[LocalStore]] = {}
# Threads that use the descriptor of a file, a thread once for each use.
_used: dict[LocalStore, list[int]] = {}

# The system's limit is queried only above this many open files, which have at least as many descriptors.
_UNCHECKED = 32
# Maximum number of open files, even if the system's limit is higher.
_MOST_OPEN = 4096
# Errors of the system if the process or the machine has no free descriptor.
NONE_FREE = (errno.EMFILE, errno.ENFILE)
# Network file systems, and file systems of processes, by magic number: Linux's magic.h, and the sources of Lustre,
# GPFS and BeeGFS.
NETWORKS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x65735546: "FUSE",
    0x0BD00BD0: "Lustre",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
}
# Seconds to wait for other threads to end their uses; without users, for threads that have not yet listed a file.
_PATIENCE, _MOMENT = 30.0, 0.1


def _budget() -> int:
    """Return how many descriptors to keep open: half of the process's limit, because the program needs some too."""
    if os.name == "nt":  # handles are limited only by memory
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else max(1, min(limit // 2, _MOST_OPEN))


def _open_files() -> list[LocalStore]:
    # Not while the dict is iterated: the last reference to a file may go here.
    references = list(_open.values())
    return [file for reference in references if (file := reference()) is not None]


def _release(count: int) -> bool:
    """Close up to ``count`` idle descriptors, the oldest first; return True if any was closed."""
    released = 0
    for file in _open_files():
        released += file.release()
        if released >= count:
            break
    return released > 0


def _keep_within_budget() -> None:
    count = len(_open)
    if count > _UNCHECKED and count > (budget := _budget()):
        _release(count - budget + budget // 4)


def with_room(attempt: Callable[[], int], error: Any, status: int | None = None) -> int:
    """Retry an open in the C core until a descriptor is free: close idle files, then wait for other threads' uses."""
    if status is None:  # no attempt yet
        status = attempt()
    begin = alive = time.monotonic()
    while status == lib.SL_E_OS and error.os_errno in NONE_FREE:
        now = time.monotonic()
        with _lock:
            users = {thread for threads in _used.values() for thread in threads}
        released = _release(max(1, len(_open) // 2))
        if users or released:
            alive = now
        # Threads that use descriptors must not wait for each other.
        if now - begin > _PATIENCE or now - alive > _MOMENT or (not released and get_ident() in users):
            break
        if not released:
            time.sleep(0.001)
        status = attempt()
    return status


def _after_fork() -> None:
    """Drop the lock and the uses of other threads, which a forked child does not have."""
    global _lock
    _lock = RLock()
    mine = get_ident()
    for file, threads in list(_used.items()):
        for thread in threads.copy():
            if thread != mine:
                file.end_use(thread)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def check_unchanged(path: str, seen: tuple[int, ...]) -> None:
    """`compare` before a file is opened, because a changed file may no longer be a weight file at all."""
    try:
        status = os.stat(path)
    except OSError:  # the open raises a better error
        return
    compare(identity_of(status), seen, path)


def compare(version: tuple[Any, ...], seen: tuple[Any, ...], path: str) -> None:
    """Raise FormatError if a file's version differs from ``seen``, which may be a prefix of a version."""
    if version[: len(seen)] != tuple(seen):
        what = "it was modified or replaced"
        if version[0] != seen[0]:
            what = f"it had {seen[0]:,} bytes, but now has {version[0]:,}"
        raise FormatError(f"the file has changed since it was opened: {what}", path)


# The fields of the C core's ``sl_file``: its handle, its size in bytes, and the rest of its `Identity`.
OpenedFile: TypeAlias = tuple[int, int, int, int, int]


class LocalStore:
    """A regular file, open for reading until it is closed or no longer referenced.

    Its descriptor may be closed between reads, because a checkpoint can have more shards than a process descriptors;
    the next read refuses a changed file. A ``brief`` file has no `place`, and stays open until it is closed.
    """

    gives_way = False  # True if this process may close the file in order to `replace` it
    mark: str | None = None  # identifies the content wherever a copy of it is, such as a commit; None to compare times
    closed = False  # True after `close`
    pages = 0  # address of the ``sl_pages``; 0 if all pages stay in the system's cache

    def __init__(self, path: str, opened: OpenedFile, *, brief: bool = False, shown: str | None = None) -> None:
        self._descriptor: int | None = opened[0]  # None between reads
        self._opened = opened
        self.path = path if shown is None else shown  # in messages
        self.size = opened[1]  # in bytes
        if not brief:
            self.place = absolute(path)
            if os.name == "nt":
                self._status = os.stat(self.place)
            if opened[0] > _UNCHECKED:
                _keep_within_budget()
            _open[opened[0]] = weakref.ref(self)
        if _dropping.get():
            self._drop_behind()

    # Defaults, because free-threaded Python drops globals before the last objects at exit.
    def __del__(self, files: Any = _open, close: Any = short.sl_file_close) -> None:
        if self._descriptor is not None:
            files.pop(self._descriptor, None)
            close(self._descriptor)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self.path}: an open file cannot be copied or pickled")

    @property
    def version(self) -> tuple[Any, ...]:
        """The size and `mark`, or the file's `identity`."""
        return self.identity if self.mark is None else (self.size, self.mark)

    @property
    def identity(self) -> Identity:
        """The file's identity when it was first opened."""
        if os.name == "nt":
            return identity_of(self._status)
        return Identity(*self._opened[1:])

    def check_open(self) -> None:
        """Raise ValueError after `close`."""
        if self.closed:
            raise ValueError(f"{self.path} is closed")

    def use(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a function with the descriptor, which is valid until it returns, and further arguments."""
        with _lock:  # as `begin_use`, without its call
            _used.setdefault(self, []).append(get_ident())
        try:  # nobody closes a descriptor that is used
            return function(self._open_again() if self._descriptor is None else self._descriptor, *arguments)
        finally:
            self.end_use()

    def begin_use(self, each: int = 0) -> int:
        """Return the descriptor, opened again if it was closed, and valid until this thread's `end_use`."""
        with _lock:  # `each` is a job's number of descriptors for a file: jobs use at most half of the budget
            if each * len(_used) > _UNCHECKED // 2 and each * len(_used) >= _budget() // 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), self.path)
            _used.setdefault(self, []).append(get_ident())
            descriptor = self._descriptor
        if descriptor is not None:
            return descriptor
        try:
            return self._open_again()
        except BaseException:
            self.end_use()
            raise

    def end_use(self, thread: int | None = None) -> None:
        """End a use of this thread. The last user of a closed file closes its descriptor."""
        with _lock:
            threads = _used[self]
            threads.remove(get_ident() if thread is None else thread)
            if not threads:
                del _used[self]
                if self.closed:
                    self._close_unused()

    def _open_again(self) -> int:
        self.check_open()
        seen = self.identity
        check_unchanged(self.place, seen)
        _, opened = _opened(self.place)
        try:
            identity = identity_of(os.stat(self.place)) if os.name == "nt" else Identity(*opened[1:])
            compare(identity, seen, self.path)
            with _lock:
                if self._descriptor is None:
                    self._descriptor = opened[0]
                    _open[opened[0]] = weakref.ref(self)
        finally:
            if self._descriptor != opened[0]:  # it has changed, or another thread was faster
                short.sl_file_close(opened[0])
        _keep_within_budget()
        assert self._descriptor is not None
        return self._descriptor

    def release(self) -> bool:
        """Close the descriptor until the next read, unless it is used or cannot be opened again; return if it was."""
        if self._descriptor is None or self in _used:
            return False
        try:
            identity = identity_of(os.stat(self.place))
        except OSError:
            return False
        return identity == self.identity and self._close_unused()

    def _close_unused(self) -> bool:
        """Close the descriptor unless it is in use; return True if it was closed."""
        with _lock:
            descriptor = self._descriptor
            if descriptor is None or self in _used:
                return False
            self._descriptor = None
            _open.pop(descriptor, None)
            if self.pages:
                drop(descriptor, self.pages, 0, self.size)
            short.sl_file_close(descriptor)
            return True

    def _drop_behind(self) -> None:
        """Drop pages behind reads, except for blocks of which most is in the cache already: somebody else uses it."""
        block = lib.SL_PAGES_BLOCK
        kept = bytes(
            2 * (self.resident(at, block) or 0) > min(block, self.size - at) for at in range(0, self.size, block)
        )
        self._kept = ffi.new("uint8_t[]", kept)
        self._pages = ffi.new("sl_pages *", (self._kept, len(kept)))
        self.pages = pointer(self._pages)

    def resident(self, offset: int, size: int) -> int | None:
        """Return how many bytes of a range are in the page cache; None if the system does not say."""
        count = ffi.new("uint64_t *")
        status = self.use(short.sl_file_resident, offset, min(size, self.size - offset), pointer(count), None)
        return int(count[0]) if status == lib.SL_OK else None

    @property
    def network(self) -> str | None:
        """The name of the network file system, or of the file system in a process; None for a local disk."""
        return NETWORKS.get(self.use(short.sl_file_system))

    def read_into(self, offset: int, memory: Memory) -> None:
        """Fill memory with the bytes from ``offset`` on. Keeps the GIL, so it should be used for small reads only."""
        buffer = ffi.from_buffer(memory, require_writable=True)
        arguments = offset, pointer(buffer), len(buffer)
        if self.use(short.sl_file_read, *arguments, None) != lib.SL_OK:
            error = Error()  # repeat the call, to get the error
            check(self.use(short.sl_file_read, *arguments, pointer(error)), error, self.path)
        if self.pages:
            self.use(drop, self.pages, offset, len(buffer))

    def map(self, writable: bool = True) -> Any:
        """Map the whole file as a buffer: privately and copy-on-write, or read-only, which some systems charge less."""
        address = ffi.new("void **")
        error = Error()
        status = self.use(short.sl_file_map, self.size, writable, pointer(address), pointer(error))
        check(status, error, self.path)
        buffer = ffi.buffer(kept(address[0], short.sl_file_unmap, self.size), self.size)
        return buffer if writable else memoryview(buffer).toreadonly()

    def close(self) -> None:
        """Close the descriptor, or let its last user close it; arrays over mappings stay valid."""
        self.closed = True
        self._close_unused()


def _opened(path: PathLike) -> tuple[str, OpenedFile]:
    """Open a file; return its path as text, and its fields."""
    text, encoded = native_path(path)
    opened, error = ffi.new("sl_file *"), Error()
    arguments = encoded, pointer(opened), pointer(error)
    check(with_room(lambda: int(short.sl_file_open(*arguments)), error), error, text)
    return text, (opened.handle, opened.size, opened.mtime_ns, opened.device, opened.inode)


def open_local(path: PathLike, *, shown: str | None = None) -> LocalStore:
    """Open a local file."""
    text, opened = _opened(path)
    return LocalStore(text, opened, shown=shown)


def of_descriptor(number: int, path: str) -> LocalStore:
    """Return a store over a duplicate of a regular file's descriptor; the path, for messages, may lead elsewhere."""
    identity = identity_of(os.fstat(number))
    return LocalStore(path, (os.dup(number), *identity))


@contextmanager
def keeping_position(descriptor: int) -> Iterator[None]:
    """Restore the position of a descriptor at the end: a duplicate shares it with the caller's file object."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)


def read_from(store: ByteStore, offset: int, memory: memoryview, path: str) -> None:
    """Fill memory from a store, without the GIL if the file is local."""
    if not isinstance(store, LocalStore) or not hasattr(os, "preadv"):
        store.read_into(offset, memory)
        return
    while memory:
        count = store.use(os.preadv, [memory], offset)
        if not count:
            raise FormatError(f"the file ends at byte {offset:,}, but had {store.size:,} bytes", path, offset)
        if store.pages:
            store.use(drop, store.pages, offset, count)
        memory, offset = memory[count:], offset + count


def blocks_of(store: ByteStore, path: str, tick: Callable[[int], object] = bool) -> Iterator[memoryview]:
    """Read a store in blocks, one after another into the same memory, and report their sizes once they are used."""
    step = LOCAL_BLOCK if isinstance(store, LocalStore) else REMOTE_BLOCK
    buffer = memoryview(bytearray(min(step, store.size)))
    for begin in range(0, store.size, step):
        block = buffer[: store.size - begin]
        read_from(store, begin, block, path)
        yield block
        tick(len(block))


def sha256_of(store: ByteStore, path: str, tick: Callable[[int], object] = bool) -> str:
    """Return the SHA-256 of a store's bytes."""
    import hashlib  # only here: few loads hash files

    digest = hashlib.sha256()
    for block in blocks_of(store, path, tick):
        digest.update(block)
    return digest.hexdigest()


# What arrays over a mapping allow: writing (copy-on-write), writing unless the system refuses it, reading alone.
Access: TypeAlias = Literal["write", "either", "read"]


def mapping_of(store: ByteStore, access: Access) -> Any:
    """Return a store's bytes as a buffer, mapped or lent until ``store.forget()``; None without one.

    Mapped pages cannot be dropped, so a file whose pages are dropped is not mapped.

    Where a private writable mapping is refused (RLIMIT_DATA, strict overcommit, Windows' commit limit), "either" maps
    the file read-only and logs it.
    """
    make = getattr(store, "map", None)
    if make is None or getattr(store, "pages", False):
        return None
    is_local = isinstance(store, LocalStore)
    if access != "read":
        try:
            return make()
        except OSError:  # `suppress` takes four calls, which small loads would pay
            if access == "write" or not is_local:
                return None
    try:
        buffer = make(writable=False) if is_local else make()
    except OSError:
        return None
    if access == "either":
        text = "%s: the system refuses a writable mapping of %s, so arrays are read-only; backend='pread' copies"
        warning(text, store.path, size(store.size))  # type: ignore[attr-defined]  # it is a `LocalStore`
    return None if buffer is None else memoryview(buffer).toreadonly()


# ---- folders and files, here or behind URLs ----


class Files:
    """Finds and opens files, here on this machine. Paths are opaque text to everyone else, from any thread."""

    remote = False  # True if every method call can be a network request
    inside = False  # True if the paths lead into an archive
    waits = False  # True if calls wait for a network, so that several at once are faster

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "LOCAL"

    def is_local(self, path: str) -> bool:
        """Return whether a path is one of this machine's."""
        return True

    def open(self, path: str, window: int = WINDOW) -> ByteStore:
        """Open a file for reading."""
        return open_local(path)

    def is_folder(self, path: str) -> bool:
        """Return whether a path leads to a folder."""
        return os.path.isdir(path)

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        """Return the sorted names in a folder, without hidden names, and whether each is a folder itself."""
        with os.scandir(folder) as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))

    def join(self, folder: str, name: str) -> str:
        """Return the path of a bare name in a folder."""
        return os.path.join(folder, name)

    def split(self, path: str) -> tuple[str, str]:
        """Split a path into its folder and its name there."""
        return os.path.split(path)

    def absolute(self, path: str) -> str:
        """Return a path that stays valid anywhere in this process."""
        return path if self.remote and not self.is_local(path) else absolute(path)

    def shown(self, path: str) -> str:
        """Return a path for messages, without secrets."""
        return path

    def public(self, path: str) -> str:
        """Return an absolute path for pickles and plans, without secrets."""
        return path

    def public_options(self) -> dict[str, Any] | None:
        """Return the ``storage_options`` for plans, without secrets, or None if there are none."""
        return None

    def check_unchanged(self, path: str, seen: tuple[Any, ...]) -> None:
        """Refuse a file that has changed, before it is opened, if that takes no request; opening compares anyway."""
        if self.is_local(path):
            check_unchanged(path, seen)

    def each(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Map a function over items, concurrently if that is faster."""
        if not self.waits:
            return [function(item) for item in items]
        from .thread_group import each  # only here: most paths are local

        return each(function, items)


LOCAL = Files()


@exported("safeload.remote")
class Location:
    """A file or folder: a path and its store.

    `safeload.open` and all functions with a path argument accept a location. Its pickle contains no secrets.

    Args:
        files: finds and opens the file.
        path: the path as ``files`` takes it, including the secrets of a URL; messages use `shown`.

    Attributes:
        files: see above.
        path: see above.

    Example:
        >>> import fsspec
        >>> import safeload.remote
        >>> folder = safeload.remote.of_fsspec(fsspec.filesystem("memory"), "models")
        >>> folder / "model.safetensors"
        <Location memory:///models/model.safetensors>
    """

    __slots__ = ("files", "path")

    def __init__(self, files: Files, path: str) -> None:
        self.files = files
        self.path = path

    def __repr__(self) -> str:
        return f"<Location {self.shown}>"

    def __str__(self) -> str:
        return self.shown

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and (self.files, self.path) == (other.files, other.path)

    def __hash__(self) -> int:
        return hash((self.files, self.path))

    @public
    def __truediv__(self, name: str) -> Location:
        """Return the location of a name in this folder."""
        return Location(self.files, self.files.join(self.path, name))

    @public
    def __reduce__(self) -> tuple[Any, ...]:
        return Location, (self.files, self.files.public(self.files.absolute(self.path)))

    @property
    def shown(self) -> str:
        """The path for messages, without secrets."""
        return self.files.shown(self.path)


@contextmanager
def unchanged(files: Files, seen: Iterable[tuple[str, tuple[Any, ...]]]) -> Iterator[None]:
    """Refuse changed files before they are opened in the block, or remotely if reading them fails."""
    for path, version in seen:
        files.check_unchanged(path, version)
    try:
        yield
    except SafeloadError:
        for path, version in seen if files.remote else ():
            with closing(files.open(path)) as store:
                compare(store.version, version, files.shown(path))
        raise


class FilesystemPath(Protocol):
    """A path in an fsspec filesystem: ``fsspec.core.OpenFile``, universal_pathlib's ``UPath``."""

    @property
    def fs(self) -> Any:
        """The filesystem."""

    @property
    def path(self) -> str:
        """The path in it."""


class BinaryReader(Protocol):
    """A file object opened in binary mode; ``seek`` and ``tell`` are used if it has them."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; none at the end."""


# Valid arguments besides local paths and URLs.
Located: TypeAlias = Location | FilesystemPath | ByteStore | BinaryReader


# ---- JSON files beside weights: index.json, config.json, layouts, manifests ----

# An index takes about 100 bytes per tensor, so this is enough for 600,000 tensors.
MAX_JSON = 64 << 20
# Maximum nesting of objects and arrays. Configs have four or five levels.
MAX_DEPTH = 64


def read_json(path: PathLike, what: str, files: Files = LOCAL) -> dict[str, Any]:
    """Read a JSON object from a regular file in UTF-8 (RFC 8259), with or without a byte order mark."""
    text = native_path(path)[0]
    return parse_json(read_whole(text, what, files)[0], what, files.shown(text))


def read_whole(path: str, what: str, files: Files, limit: int = MAX_JSON) -> tuple[bytes, tuple[Any, ...]]:
    """Return the bytes and the version of a regular file."""
    shown = files.shown(path)
    try:
        store = files.open(path)
    except FormatError:
        if files.remote:  # the store says more
            raise
        raise FormatError(f"{what} is not a regular file", shown) from None
    with closing(store):
        if store.size > limit:
            raise FormatError(f"{what} has {store.size:,} bytes, but the limit is {limit:,}", shown)
        return read_at(store, 0, store.size), store.version


def read_if_there(path: str, what: str, files: Files) -> dict[str, Any] | None:
    """Like `read_json`, but return None if the file does not exist."""
    content = content_if_there(path, what, files)
    return None if content is None else parse_json(content, what, files.shown(path))


def content_if_there(path: str, what: str, files: Files, limit: int = MAX_JSON) -> bytes | None:
    """Return the bytes of a regular file, or None if it does not exist."""
    if is_missing(path, files):
        return None
    try:
        return read_whole(path, what, files, limit)[0]
    except (FileNotFoundError, PermissionError):
        if files.remote:  # without permission to list, stores refuse access to missing files
            return None
        raise


def is_missing(path: str, files: Files) -> bool:
    """Return True if a local file does not exist. Of remote files only opening tells."""
    if files.remote or os.path.lexists(path):
        return False
    check_missing = getattr(files, "check_missing", None)  # of verified files only
    if check_missing is not None:
        check_missing(path)
    return True


def parse_json(content: bytes, what: str, text: str) -> dict[str, Any]:
    """Like `read_json`, for content already read from the path ``text``."""
    import json  # only here: it takes a millisecond, and most files have no JSON beside them

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise FormatError(f"{what}: duplicate key {show(duplicate)}", text)
        return result

    if content.startswith(b"version https://git-lfs"):
        raise FormatError(f"{what} is a Git LFS pointer: run `git lfs pull` to get the file itself", text)
    mark = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    try:
        value = json.loads(content[mark:].decode(), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        offset = mark + len(error.doc[: error.pos].encode())
        fault = error.msg.removesuffix(" at").removesuffix(" starting")  # Python adds line and column
        raise FormatError(f"{what} is not JSON: {fault}", text, offset) from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} is not JSON: it is not UTF-8 ({error.reason})", text, mark + error.start) from None
    except FormatError:
        raise
    except RecursionError:
        raise FormatError(f"{what} is nested more than {MAX_DEPTH} levels deep", text) from None
    except ValueError as error:  # a number with thousands of digits
        raise FormatError(f"{what} is not JSON: {show(str(error))[1:-1]}", text) from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be a JSON object, got {type(value).__name__}", text, 0)
    if content.count(b"{") + content.count(b"[") <= MAX_DEPTH:
        return value
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        items = (item.values() if isinstance(item, dict) else item for item in level)
        level = [inner for group in items for inner in group if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise FormatError(f"{what} is nested more than {MAX_DEPTH} levels deep", text)


@cache
def read_data(module: str, file: str) -> dict[str, Any]:
    """Return the JSON object in a file beside a module, with tuples for arrays; nobody may change it.

    The module's loader reads it, from a zip archive too. Importing `importlib.resources` takes longer than most loads.
    """
    import json  # only here: it takes a millisecond, and most calls need no table

    spec: Any = sys.modules[module].__spec__
    content = spec.loader.get_data(os.path.join(os.path.dirname(spec.origin), file))
    result: dict[str, Any] = json.loads(content, object_pairs_hook=_object)
    return result


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = {key: _frozen(value) for key, value in pairs}
    if len(result) < len(pairs):
        raise ValueError(f"duplicate key in {[key for key, _ in pairs]}")
    return result


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if type(value) is list else value


# ---- replacing a file ----

# ERROR_USER_MAPPED_FILE: Python has no errno for it and reports EINVAL.
_USER_MAPPED_FILE = 1224
# Seconds between attempts while Windows refuses to replace a file: another program, such as a virus scanner, may have
# it open for only a moment.
_REPLACE_PAUSES = (0.01, 0.03, 0.1, 0.3)


def replace(source: str, target: str, shown: str) -> None:
    """Rename a file over another, like ``os.replace``; on Windows, also over this process's own open files."""
    for pause in (*_REPLACE_PAUSES, 0):
        try:
            os.replace(source, target)
            return
        except OSError as error:  # on Windows, if the file is read-only or in use
            mapped = getattr(error, "winerror", None) == _USER_MAPPED_FILE
            if os.name != "nt" or not (mapped or isinstance(error, PermissionError)):
                raise
        released = 0
        with suppress(OSError):
            identity = identity_of(os.stat(target))
            released = sum([file.release() for file in _open_files() if file.gives_way and file.identity == identity])
        if not released:
            time.sleep(pause)
    text = (
        "Windows does not replace a file that is mapped or open: delete the arrays that were loaded from it, or load "
        'them with backend="pread"; close open checkpoints; or write to another path'
    )
    with suppress(OSError):
        if not os.stat(target).st_mode & stat.S_IWRITE:
            text = "the file is read-only, and Windows does not replace read-only files"
    raise PermissionError(errno.EACCES, text, shown)


def sync_folder(folder: str) -> None:
    """Make renames durable. Windows neither has descriptors of folders nor needs them."""
    if os.name == "nt":
        return
    descriptor = os.open(folder or ".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some filesystems cannot sync folders
            raise
    finally:
        os.close(descriptor)


# ---- copying inside the system, where some filesystems share the blocks ----

# Blocks can be shared only if both positions are multiples of this size.
BLOCK = 4096
# Bytes per call, so that signals are handled in between, and bytes of the buffer without the system's help.
_STEP, _BUFFER = 1 << 30, 8 << 20
# Errors of systems, filesystems and sandboxes that do not copy between these files.
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY)


def copy_range(source: int, begin: int, nbytes: int, target: int, at: int) -> None:
    """Copy bytes of a descriptor to a position of another descriptor."""
    # The first step ends on a block of the source: the following steps can share blocks if the target's match.
    step = min(nbytes, -begin % BLOCK) or min(nbytes, _STEP)
    while nbytes:
        copied = 0
        if hasattr(os, "copy_file_range"):
            try:
                copied = os.copy_file_range(source, target, step, begin, at)
            except OSError as error:
                if error.errno not in _NO_COPY:
                    raise
        if not copied:
            size = min(step, _BUFFER)
            if hasattr(os, "pread"):  # it does not move the source's position, which a caller may share
                data = os.pread(source, size, begin)
            else:
                os.lseek(source, begin, os.SEEK_SET)
                data = os.read(source, size)
            if not data:
                raise OSError(errno.EIO, f"the file ends at byte {begin}, {step} bytes too early")
            os.lseek(target, at, os.SEEK_SET)
            copied = os.write(target, data)
        begin, at, nbytes = begin + copied, at + copied, nbytes - copied
        step = min(nbytes, _STEP)


# ---- locks against other processes, which end with this process ----

# Errors of filesystems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
_FAR = 1 << 62  # no byte of the file, which others may read


def lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed; False if somebody else holds the lock, None if there are no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _FAR, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def unlock(descriptor: int) -> None:
    """Release a lock before the file is closed: a child process that inherited the descriptor would keep the lock."""
    if sys.platform != "win32":
        import fcntl

        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
