"""Local files: stores, descriptors closed between reads, mappings, identities, and replacing a file."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from ..base.native import Error, check, ffi, lib, mapped_buffer, pointer, short
from ..base.paths import PathLike, absolute, native_path
from ..errors import FormatError
from .store import ByteStore, Memory

_T = TypeVar("_T")


def identity_of(status: os.stat_result) -> Identity:
    """Return a file's identity from its stat result."""
    return Identity(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)


class Identity(NamedTuple):
    """Identifies the content of a file, to detect changes by other programs."""

    size: int  # bytes
    mtime_ns: int  # time of the last modification, in nanoseconds
    device: int  # of the file system; meaningful only in this process, because a pickle may travel to another machine
    inode: int  # on the device; meaningful only in this process


# Files with open descriptors, by descriptor, oldest first.
_Descriptors: TypeAlias = "dict[Descriptor, weakref.ref[LocalStore]]"

# The files opened by each thread, because threads would contend for a single dict without the GIL. A descriptor stays
# here until it is closed, even if its file has dropped it and a job still uses it. Each access is a single atomic step,
# so no lock is needed: a lock could be held by another thread at a fork.
_open: dict[int, _Descriptors] = {}


def _open_here() -> _Descriptors:
    """Return the files opened by this thread."""
    files = _open.get(get_ident())
    return _open.setdefault(get_ident(), {}) if files is None else files


def _count_open() -> int:
    return sum(map(len, list(_open.values())))


class Descriptor:
    """A file handle of the C core.

    It is closed once its file has dropped it and no thread uses it. A thread that uses it first publishes the use, in
    `_uses` or in a `Claim`, and then checks that the file still has the descriptor. A thread that closes the file first
    takes the descriptor from it, and then looks for uses. So at least one of the two sees the other, and the last one
    closes the descriptor. Nothing depends on when Python drops an object: without the GIL, that may be long after its
    last use.
    """

    def __init__(self, number: int, files: _Descriptors) -> None:
        self.number, self.files = number, files

    # A default, because free-threaded Python drops globals before the last objects at exit.
    def close(self, close: Any = short.sl_file_close) -> bool:
        """Close the handle, unless another thread does; return whether this thread did."""
        files = self.__dict__.pop("files", None)
        if files is None:
            return False
        if files:
            files.pop(self, None)
        close(self.number)
        return True

    def close_unused(self) -> bool:
        """Close the handle, which its file has dropped, unless a thread uses it; return whether it did."""
        return not _is_used(self) and self.close()


# Descriptors that each thread uses for a single call, innermost last; see `Claim` for jobs.
_uses: dict[int, list[Descriptor | None]] = {}


def _is_used(descriptor: Descriptor) -> bool:
    """Return whether a thread uses a descriptor."""
    for uses in list(_uses.values()):
        if descriptor in uses:
            return True
    return bool(_claims) and any(descriptor in claim.held for claim in list(_claims.values()))


# The system's limit is queried only above this many open files, which have at least as many descriptors.
_UNCHECKED = 32
# Maximum number of open files, even if the system's limit is higher.
_MOST_OPEN = 4096


def _budget() -> int:
    """Return how many descriptors to keep open: half of the process's limit, because the program needs some too."""
    if os.name == "nt":  # handles are limited only by memory
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else max(1, min(limit // 2, _MOST_OPEN))


def _release(count: int) -> bool:
    """Close up to ``count`` idle descriptors, a thread's oldest files first but never this thread's latest.

    Moved or modified files keep their descriptors, because they could not be opened again.
    """
    released, here = 0, _open_here()
    for files in list(_open.values()):
        for descriptor, reference in list(files.items())[: -1 if files is here else None]:
            if _is_used(descriptor):
                continue
            file = reference()
            # Before a fork, another thread may have used a descriptor that its file has dropped.
            if file.release() if file is not None and file.holds(descriptor) else descriptor.close():
                released += 1
                if released >= count:
                    return True
    return released > 0


def _keep_within_budget() -> None:
    """Close idle descriptors if too many are open."""
    count = _count_open()
    if count > _UNCHECKED and count > (budget := _budget()):
        _release(count - budget + budget // 4)


def _release_at(path: str) -> bool:
    """Close this process's descriptors of a file if they may give way; return whether any was closed."""
    try:
        identity = identity_of(os.stat(path))
    except OSError:
        return False
    references = [reference for files in list(_open.values()) for reference in list(files.values())]
    files = [file for reference in references if (file := reference()) is not None and file.gives_way]
    return sum(file.release() for file in files if file.identity == identity) > 0


# Errors of the system if the process or the machine has no free descriptor.
_NONE_FREE = (errno.EMFILE, errno.ENFILE)
# Seconds to wait for other threads' jobs to close descriptors, and seconds between checks.
_PATIENCE, _PAUSE = 30.0, 0.001
# And for threads between two steps: after opening a file and before listing it, or after unlisting and before closing.
_MOMENT = 0.1


def with_room(attempt: Callable[[], int], error: Any, status: int | None = None) -> int:
    """Retry an open in the C core until a descriptor is free, and return its status.

    Idle files are closed first. Then other threads' jobs are awaited, unless this thread runs jobs too.
    """
    begin = 0.0
    if status is None:
        status = attempt()
    while status == lib.SL_E_OS and error.os_errno in _NONE_FREE:
        begin = begin or time.monotonic()
        waited = time.monotonic() - begin
        users = _users()
        patience = _PATIENCE if users else _MOMENT if len(_open) > 1 else 0.0
        if not _release(max(1, _count_open() // 2)):
            # Two threads that both use descriptors must not wait for each other.
            if get_ident() in users or waited >= patience:
                break
            time.sleep(_PAUSE)
        elif waited > _PATIENCE:
            break
        status = attempt()
    return status


# ---- a budget for all threads' jobs ----


class Claim:
    """The maximum number of descriptors for a run of jobs, and the descriptors that it uses.

    All runs of a process share half of `_budget`, but each may hold at least one descriptor. A claim publishes its own
    number before it adds up all claims, so that of two concurrent claims at least one sees the other.
    """

    __slots__ = ("_count", "held", "thread")

    def __init__(self) -> None:
        self._count = 0
        self.held: dict[Descriptor, LocalStore] = {}  # descriptors in use, with their files
        self.thread = get_ident()  # the running thread

    def __enter__(self) -> Claim:
        _claims[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _claims.pop(id(self), None)
        self._end_uses()

    def share(self, count: int) -> int:
        """Claim up to ``count`` descriptors, replacing the previous claim, and return how many may be open."""
        self._end_uses()
        self._count = count
        claims = list(_claims.values())
        total = sum([claim._count for claim in claims])
        if total > _UNCHECKED // 2:
            limit = max(1, _budget() // 2)
            self._count = max(1, min(count, limit // len(claims), limit - (total - count)))
        return self._count

    def hold(self, file: LocalStore) -> int:
        """Return the C core's handle of a file, opened again if it was closed, and valid until the next `share`."""
        while (descriptor := file.hold(self)) is None:
            pass
        return descriptor.number

    def _end_uses(self) -> None:
        descriptors, self.held = self.held, {}
        for descriptor, file in descriptors.items():
            if not file.holds(descriptor):
                descriptor.close_unused()


# Claims of all threads, by id. As for `_open`, every access is a single atomic operation.
_claims: dict[int, Claim] = {}


def _forget_threads() -> None:
    """Drop the uses of other threads, which a forked child does not have."""
    for key, claim in list(_claims.items()):
        if claim.thread != get_ident():
            _claims.pop(key, None)
    for thread in list(_uses):
        if thread != get_ident():
            _uses.pop(thread, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def none_free(error: OSError) -> bool:
    """Return whether an open failed because no descriptor was free."""
    return error.errno in _NONE_FREE


def _users() -> set[int]:
    """Return the threads that use descriptors."""
    users = {claim.thread for claim in list(_claims.values()) if claim.held}
    users.update(thread for thread, uses in list(_uses.items()) if uses)
    return users


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

    The descriptor may be closed between reads, because a checkpoint can have more shards than a process can have
    descriptors. The next read opens the file again and refuses it if it has changed.

    Attributes:
        path: the path in messages
        place: the absolute path
        size: in bytes
        gives_way: whether this process may close the file in order to replace it (see `replace`)

    A ``brief`` file gets no `place`, and its descriptor stays open until it is closed.
    """

    gives_way = False
    mark: str | None = None  # identifies the content wherever a copy of it is, such as a commit; None to compare times
    _closed = False
    _descriptor: Descriptor | None = None  # taken from the instance's dict, which is atomic, to be closed

    def __init__(self, path: str, opened: OpenedFile, *, brief: bool = False, shown: str | None = None) -> None:
        self.path = path if shown is None else shown
        handle, self.size, *_ = self._opened = opened
        self._descriptor = descriptor = Descriptor(handle, {} if brief else _open_here())
        if not brief:
            self.place = absolute(path)
            if os.name == "nt":
                self._status = os.stat(self.place)
            descriptor.files[descriptor] = weakref.ref(self)
            if handle > _UNCHECKED:
                _keep_within_budget()

    def __del__(self) -> None:
        descriptor = self._descriptor
        if descriptor is not None:  # not in use, because its users hold the file
            descriptor.close()

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

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def check_open(self) -> None:
        """Raise ValueError after `close`."""
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def use(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function with the C core's handle, which is valid until it returns, and further arguments."""
        uses = _uses.get(get_ident())
        if uses is None:
            uses = _uses.setdefault(get_ident(), [])
        try:
            uses.append(descriptor := self._descriptor)
            if descriptor is not None and self._descriptor is descriptor:
                return function(descriptor.number, *arguments)
        finally:
            uses.pop()
            if descriptor is not self._descriptor and descriptor is not None:
                descriptor.close_unused()
        with Claim() as claim:
            return function(claim.hold(self), *arguments)

    def holds(self, descriptor: Descriptor) -> bool:
        """Return whether this is the file's descriptor."""
        return self._descriptor is descriptor

    def hold(self, claim: Claim) -> Descriptor | None:
        """Publish the use of the descriptor, opened again if it was closed; None if another thread was faster."""
        descriptor = self._descriptor
        if descriptor is None:
            self.check_open()
            descriptor = self._opened_again()
            claim.held[descriptor] = self  # before other threads can close it
            current: Descriptor = self.__dict__.setdefault("_descriptor", descriptor)
            if current is not descriptor:
                del claim.held[descriptor]
                descriptor.close()
                return None
            descriptor.files[descriptor] = weakref.ref(self)
            _keep_within_budget()
            if self._closed:  # by another thread, meanwhile
                self._drop()
            return descriptor
        claim.held[descriptor] = self
        return descriptor if self._descriptor is descriptor else None

    def _opened_again(self) -> Descriptor:
        seen = self.identity
        check_unchanged(self.place, seen)
        _, opened = _opened(self.place)
        descriptor = Descriptor(opened[0], _open_here())
        try:
            identity = identity_of(os.stat(self.place)) if os.name == "nt" else Identity(*opened[1:])
            compare(identity, seen, self.path)
        except BaseException:
            descriptor.close()
            raise
        return descriptor

    def release(self) -> bool:
        """Close the descriptor until the next read, unless the file has moved or changed; return whether it did.

        A descriptor in use is closed by its last user.
        """
        if self._descriptor is None:
            return False
        try:
            identity = identity_of(os.stat(self.place))
        except OSError:
            return False
        return identity == self.identity and self._drop()

    def _drop(self) -> bool:
        """Take the descriptor from the file, and close it unless it is in use; return whether it did."""
        descriptor = self.__dict__.pop("_descriptor", None)
        return descriptor is not None and not _is_used(descriptor) and descriptor.close()

    def read_into(self, offset: int, memory: Memory) -> None:
        """Fill memory with the bytes from ``offset`` on. Keeps the GIL, so it should be used for small reads only."""
        buffer = ffi.from_buffer(memory, require_writable=True)
        arguments = offset, pointer(buffer), len(buffer)
        if self.use(short.sl_file_read, *arguments, None) != lib.SL_OK:
            error = Error()  # repeat the call, to get the error
            check(self.use(short.sl_file_read, *arguments, pointer(error)), error, self.path)

    def map(self) -> Any:
        """Map the whole file, privately and copy-on-write, as a writable buffer."""
        address = ffi.new("void **")
        error = Error()
        status = self.use(short.sl_file_map, self.size, pointer(address), pointer(error))
        check(status, error, self.path)
        return mapped_buffer(address[0], self.size)

    def close(self) -> None:
        """Close the descriptor, or let its last user close it; arrays over mappings stay valid."""
        self._closed = True
        self._drop()


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
    """Return a store over a duplicate of an open descriptor of a regular file; not on Windows.

    ``path`` is for messages only: it may lead elsewhere.
    """
    status = os.fstat(number)
    identity = identity_of(status)
    return LocalStore(path, (os.dup(number), *identity))


@contextlib.contextmanager
def keeping_position(descriptor: int) -> Iterator[None]:
    """Restore the position of a descriptor at the end: a duplicate shares it with the caller's file object."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)


def direct_of(handle: int) -> int | None:
    """Open another handle of a file, for reads past the page cache; None if the system or the disk has none."""
    return short.sl_file_open_direct(handle) or None


def mapping_of(store: ByteStore) -> Any:
    """Return the bytes of a store as a writable buffer, mapped copy-on-write or private; None if there is none.

    A buffer of verified bytes is the store's own until ``store.forget()``.
    """
    make = getattr(store, "map", None)
    try:
        return None if make is None else make()
    except OSError:
        return None


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
        except OSError as error:
            if not _refused(error):
                raise
        if not _release_at(target):
            time.sleep(pause)
    raise PermissionError(errno.EACCES, _in_use(target), shown)


def _refused(error: OSError) -> bool:
    """Return whether Windows refuses to replace the file because it is read-only or in use."""
    mapped = getattr(error, "winerror", None) == _USER_MAPPED_FILE
    return os.name == "nt" and (mapped or isinstance(error, PermissionError))


def _in_use(path: str) -> str:
    with contextlib.suppress(OSError):
        if not os.stat(path).st_mode & stat.S_IWRITE:
            return "the file is read-only, and Windows does not replace read-only files"
    return (
        "Windows does not replace a file that is mapped or open: delete the arrays that were loaded from it, or load "
        'them with backend="pread"; close open checkpoints; or write to another path'
    )
