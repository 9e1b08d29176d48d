"""Write files atomically: at any moment the path holds the complete old file or the complete new file."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from . import jobs
from .arrays import Array, byteswapped
from .files import Identity, copy_range, drop, identity_of, lock, pages_of_new_file, replace, sync_folder, unlock
from .native import Error, address_of, check, ffi, lib
from .tensors import Lazy
from .text import PathLike, native_path, unwritable

# Hashing fewer bytes takes less time than a handover to a thread.
_ALONE = 1 << 20
# A file of up to this size is written without jobs, which would take longer than the system calls; but not from more
# pieces, because each call releases the GIL, and waits for it beside a busy thread.
_SHORT_FILE, _FEW_PIECES = 1 << 20, 2
# Buffer for tensors that are not in C order, so that they are not copied whole.
_COPY_BUFFER = 16 << 20

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# A temporary name is ".NAME.RANDOM.tmp". RANDOM has this many hexadecimal digits.
_RANDOM, _SUFFIX = 16, ".tmp"
_TEMPORARY = re.compile(rf"\.(.*)\.[0-9a-f]{{{_RANDOM}}}{re.escape(_SUFFIX)}", re.DOTALL)
# The longest name of most filesystems (NAME_MAX) minus the additions of a temporary name.
_LONGEST_NAME = 255 - len(".") - len(".") - _RANDOM - len(_SUFFIX)

_LITTLE = sys.byteorder == "little"

# Bytes to write: their owner, address and size, and True if they must be written before the next piece is requested.
# All other memory must stay valid until the last piece is written.
Piece: TypeAlias = tuple[Any, int, int, bool]


class AtomicFile:
    """A file under construction. Leaving the ``with`` block puts it in place; an exception leaves no trace.

    A new file gets mode 0666 less the umask. A replaced file keeps its mode and owner, and symbolic links are followed.
    Devices and pipes are written directly, in order.

    ``size`` bytes are reserved before the first byte is written. A symbolic link is replaced itself if not ``follow``.
    """

    identity: Identity | None = None  # of the complete file, after `seal`
    temporary: str | None = None  # path of the file until it is in place; None for devices and pipes
    in_order = False  # True for devices and pipes, which are written in order

    def __init__(
        self,
        path: PathLike,
        size: int,
        *,
        overwrite: bool = True,
        durable: bool = True,
        digest: Digest | None = None,
        follow: bool = True,
    ) -> None:
        self.path = self._target = native_path(path)[0]
        self._overwrite, self._durable, self._digest = overwrite, durable, digest
        self.descriptor, self._process = -1, os.getpid()
        self._position = 0
        self._pages = pages_of_new_file()  # address of its ``sl_pages``; 0 if its pages stay in the system's cache
        try:
            self._begin(size, follow)
            return
        except OSError as error:
            shown = error.errno is None or error.filename == self.path  # not a temporary or resolved path
            refusal = unwritable(error if shown else type(error)(error.errno, error.strerror, self.path), self.path)
        try:
            raise refusal  # not in the handler: its context could name the secrets of a URL
        finally:
            del refusal  # which refers to this frame

    def _begin(self, size: int, follow: bool) -> None:
        try:
            existing = os.stat(self.path)
        except FileNotFoundError:
            existing = None
            check_place(self.path)
        if existing is not None and not self._overwrite:
            raise existing_file(self.path)
        if existing is not None and stat.S_ISDIR(existing.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if existing is not None and not stat.S_ISREG(existing.st_mode):
            self.in_order = True  # by the unresolved path, because realpath of /dev/stdout may not be openable
            self.descriptor = os.open(self.path, os.O_WRONLY | _FLAGS)
            return
        place, link = os.path.split(self.path)
        self._target = _resolved(self.path) if follow else os.path.join(_resolved(place or os.curdir), link)
        self.temporary = _temporary_of(self._target)
        try:
            self.descriptor = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
            if os.name != "nt":  # Windows removes no open file
                with suppress(OSError):  # the file can be written without a lock
                    lock(self.descriptor)  # for `remove_abandoned`
            if existing is not None:
                set_owner_and_mode(self.descriptor, existing)
            reserve(self.descriptor, size, self.path)
        except BaseException:  # that of a signal may arrive after the file exists
            self.abandon()
            raise

    def __del__(self) -> None:
        """Remove the file if the exception of a signal arrived before the ``with`` block began."""
        if getattr(self, "temporary", None) is not None:
            self.abandon()

    def write(self, pieces: list[tuple[int, int]]) -> None:
        """Append memory, as pairs of address and size in bytes. The caller keeps it alive."""
        with nullcontext() if self._digest is None else self._digest.adding(pieces):
            handle, begin, end = _handle(self.descriptor), self._position, self._position
            places = []
            for address, size in pieces:
                places.append((end, address, size))
                end += size
            if end <= _SHORT_FILE and len(pieces) <= _FEW_PIECES and not self.in_order:
                error = Error()
                for place, address, size in places:
                    check(lib.sl_file_write(handle, place, ffi.cast("void *", address), size, error), error, self.path)
            else:  # the system can begin to write a durable file to the disk at once
                early = self._durable or self._pages
                op = lib.SL_OP_APPEND if self.in_order else lib.SL_OP_WRITE_BACK if early else lib.SL_OP_WRITE
                rows = [(handle, *place, 0, 0, op, 0, 0, 0, 0, 0, self._pages, 0) for place in places]
                table, files = np.array(rows, dtype=jobs.JOB), [handle] * len(rows)
                failed = jobs.Job(handle, 0, 0, 0, origin=jobs.Origin("", path=self.path))
                # A single thread is enough: ext4 and xfs serialize buffered writes to a file by its lock.
                jobs.run_jobs(table, files, end - begin, 1, report=bool, job=lambda _: failed)
            self._position = end

    def copy(self, descriptor: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Append ranges (begin, size) of an open file, copied or shared by the system if it can, neighbours at once."""
        begin = end = 0
        for at, nbytes in chain(ranges, [(-1, 0)]):
            if at != end:
                with self._naming():
                    copy_range(descriptor, begin, end - begin, self.descriptor, self._position)
                self._position += end - begin
                begin = at
            end = at + nbytes

    def seek(self, position: int) -> None:
        """Set the byte at which `write` continues; the file must not be `in_order`."""
        self._position = position

    def truncate(self, size: int) -> None:
        """Cut off bytes after this size, which a failed write can leave; the file must not be `in_order`."""
        with self._naming():
            os.ftruncate(self.descriptor, size)

    @contextmanager
    def stream(self) -> Iterator[BinaryIO]:
        """Yield a binary stream to the file, for Python's own libraries."""
        with self._naming(), os.fdopen(os.dup(self.descriptor), "wb") as stream:
            yield stream

    def seal(self) -> None:
        """Close the complete file before the end of the block puts it in place.

        If many files are put in place together, each needs a descriptor only while it is written.
        """
        if self.descriptor >= 0:
            with self._naming():
                if (self._durable or self._pages) and self.temporary is not None:
                    os.fsync(self.descriptor)
                self.identity = identity_of(os.fstat(self.descriptor))
                if self._pages:
                    drop(_handle(self.descriptor), self._pages, 0, self.identity.size)
                self._close()

    def _naming(self) -> AbstractContextManager[None]:
        return naming(self.path, self.temporary, self._target)

    def exchange(self, other: AtomicFile) -> None:
        """Exchange the contents of two new files of this path."""
        self.temporary, other.temporary = other.temporary, self.temporary
        self.descriptor, other.descriptor = other.descriptor, self.descriptor
        self._position, other._position = other._position, self._position

    def commit(self) -> None:
        """Put the complete file in place."""
        self.seal()
        if self.temporary is None:
            return
        _move(self.temporary, self._target, self.path, overwrite=self._overwrite)
        self.temporary = None
        if self._durable:
            sync_folder(os.path.dirname(self._target))

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            with self._naming():
                self.commit()
        except BaseException as raised:
            in_place = self.temporary is None and not self.in_order  # only the fsync of the folder has failed
            self.abandon()
            if in_place and not self._overwrite:
                with suppress(OSError):
                    os.unlink(self._target)
            elif in_place and isinstance(raised, OSError):
                text = f"{raised.strerror}; the file is in place, but a crash of the machine can take it back"
                raise type(raised)(raised.errno, text, self.path) from None
            raise

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            if self.temporary is not None:
                unlock(descriptor)
            os.close(descriptor)

    def abandon(self) -> None:
        """Remove the file unless it is in place."""
        if self._process != os.getpid():  # a forked child: its parent is still writing the file
            self.temporary = None
        self._close()
        if self.temporary is not None:
            with suppress(OSError):
                os.unlink(self.temporary)
            self.temporary = None


class Digest:
    """SHA-256 of the memory that a file is written from. Leaving the ``with`` block ends its thread."""

    def __init__(self) -> None:
        import hashlib  # only here: few files are hashed while they are written
        from concurrent.futures import ThreadPoolExecutor

        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "safeload-digest")  # starts with the first large memory
        self.hexdigest = self._digest.hexdigest

    @contextmanager
    def adding(self, pieces: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Add memory, as pairs of address and size in bytes, while the block writes it."""
        hashed = None
        if sum(size for _, size in pieces) < _ALONE:
            self._add(pieces)
        else:
            hashed = self._thread.submit(self._add, pieces)
        try:
            yield
        finally:
            if hashed is not None:
                hashed.result()  # the caller may reuse the memory

    def _add(self, pieces: Sequence[tuple[int, int]]) -> None:
        for address, size in pieces:
            if size:
                self._digest.update(ffi.buffer(ffi.cast("char *", address), size))

    def __enter__(self) -> Digest:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


class Swap:
    """Files that are replaced in turn; an error restores all of them, the last first.

    If a step cannot be taken back, the earlier ones stay too: their order keeps readers away. Call `finish` when all
    steps are done. The end of the block removes hidden files.
    """

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []
        self._hidden: list[str] = []  # paths of old files, under names of temporary files

    def hide(self, path: str, *, keep: bool = False) -> None:
        """Rename a file aside; ``keep`` gives a file that will be replaced a second name instead, a hard link."""
        hidden = _temporary_of(path)
        self.undo.append(partial(_bring_back, hidden, path))
        self._hidden.append(hidden)
        if keep:
            with suppress(OSError):
                os.link(path, hidden, follow_symlinks=os.link not in os.supports_follow_symlinks)
                return
        os.rename(path, hidden)

    def put(
        self,
        source: str,
        target: str,
        *,
        like: os.stat_result | None = None,
        overwrite: bool = True,
        durable: bool = True,
    ) -> None:
        """Rename a complete file, which gets owner and mode of the file that it replaces, or else of ``like``."""
        with naming(target, source, target):
            replaces = overwrite and os.path.lexists(target)
            if replaces and os.path.exists(target):
                like = os.stat(target)
            if like is not None:
                set_owner_and_mode(source, like)
            if replaces:
                self.hide(target, keep=True)
            self.undo.append(partial(_give_back, target, source))
            _move(source, target, target, overwrite=overwrite)
            if durable:
                sync_folder(os.path.dirname(target))

    def finish(self, old: Sequence[str]) -> bool:
        """Remove old files; return False if one stays, and keep hidden files then: an index among them may name it."""
        self.undo.clear()
        for path in old:
            with suppress(OSError):
                os.unlink(path)
        if any(map(os.path.lexists, old)):
            self._hidden.clear()
            return False
        return True

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError):
            while kind is not None and self.undo:
                self.undo.pop()()
        for path in self._hidden if kind is None else ():
            with suppress(OSError):
                os.unlink(path)


def _bring_back(hidden: str, path: str) -> None:
    with suppress(FileNotFoundError):  # the error came before it was hidden
        if not os.path.exists(path) or not os.path.samefile(hidden, path):
            os.replace(hidden, path)
        os.unlink(hidden)  # a second name of the same file stays


def _give_back(target: str, source: str) -> None:
    with suppress(FileNotFoundError):
        if not os.path.lexists(source):
            os.rename(target, source)
        elif os.path.samefile(target, source):  # a link, which could not be removed
            os.unlink(target)


@contextmanager
def naming(shown: str, *internal: str | None) -> Iterator[None]:
    """Report a path of the caller's in errors that name no path or an internal one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, *internal):
            raise
        raise type(error)(error.errno, error.strerror, shown) from None


def set_owner_and_mode(file: str | int, like: os.stat_result) -> None:
    """Give a file, by its path or descriptor, the owner, if possible, and the mode of another file."""
    # Not on Windows: a read-only temporary file can neither replace another file nor be deleted there.
    if os.name == "nt":
        return
    own = os.stat(file)
    if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
        with suppress(PermissionError):  # only root can change the owner
            os.chown(file, like.st_uid, like.st_gid)
    elif own.st_mode == like.st_mode:
        return
    os.chmod(file, stat.S_IMODE(like.st_mode))


def _resolved(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:  # on Windows, some filesystems cannot resolve paths
        if os.path.islink(path):
            raise
        return os.path.abspath(path)


def existing_file(path: str, text: str = "File exists; pass overwrite=True to replace it") -> FileExistsError:
    """Return the refusal of a file that is there."""
    return FileExistsError(errno.EEXIST, text, path)


def check_place(path: str) -> None:
    """Refuse, like open(2), a new path that realpath would change: "new/", "new/." or "missing/../new"."""
    folder, name = os.path.split(path)
    above = folder if name else os.path.dirname(folder)
    if above and not os.path.isdir(above):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def reserve(descriptor: int, size: int, path: str) -> None:
    """Reserve space for a file's bytes if the filesystem can."""
    error = Error()
    check(lib.sl_file_reserve(_handle(descriptor), size, error), error, path)


def _handle(descriptor: int) -> int:
    """Return the C core's file handle for a descriptor."""
    if sys.platform == "win32":
        import msvcrt

        return msvcrt.get_osfhandle(descriptor)
    return descriptor


def written_as_is(array: Array) -> bool:
    """Return True if an array is in C order and little-endian: its bytes can be written unchanged."""
    return array.flags.c_contiguous and (array.dtype.isnative == _LITTLE or not _must_swap(array))


def pieces_of(value: Array | Lazy) -> Iterable[Piece]:
    """Return the bytes of an array as files store them."""
    array = value.make() if isinstance(value, Lazy) else value
    if array.flags.c_contiguous and not _must_swap(array):
        return ((array, address_of(array), array.nbytes, array is not value),)
    return _copies_of(array) if array.size else ()


def _copies_of(array: Array) -> Iterator[Piece]:
    """Copy an array in C order through a small buffer: a broadcast or transposed array is not copied whole."""
    count = max(1, _COPY_BUFFER // array.dtype.itemsize)
    for block in np.nditer(array, flags=["external_loop", "buffered"], order="C", buffersize=count):
        piece = np.ascontiguousarray(block)
        piece = byteswapped(piece) if _must_swap(array) else piece
        yield piece, address_of(piece), piece.nbytes, True


def write_pieces(file: Any, pieces: Iterable[Piece]) -> None:
    """Append pieces to a file, as many in a call as their memory allows."""
    waiting: list[tuple[int, int]] = []
    for owner, address, size, streamed in pieces:
        if size:
            waiting.append((address, size))
        if streamed:
            file.write(waiting)
            waiting.clear()
        del owner  # frees streamed memory before the next is made
    if waiting:
        file.write(waiting)


def _must_swap(array: Array) -> bool:
    return array.dtype.itemsize > 1 and bool(array.dtype.isnative) != _LITTLE


def _short(name: str) -> str:
    """Shorten a name if its temporary names would be too long."""
    while len(os.fsencode(name)) > _LONGEST_NAME:
        name = name[:-1]
    return name


def _temporary_of(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{_short(name)}.{os.urandom(_RANDOM // 2).hex()}{_SUFFIX}")


def hidden_name(entry: str) -> str | None:
    """Return the name of the file that a temporary file belongs to; None for any other file."""
    match = _TEMPORARY.fullmatch(entry)
    return None if match is None else match[1]


def remove_abandoned(folder: str, names: Iterable[str]) -> None:
    """Remove temporary files of these files, unless a process is writing in the folder.

    A writer locks the file that it writes. Its complete files wait without a lock, so a locked file protects all.
    """
    names, entries = set(map(_short, names)), os.listdir(folder)
    temporary = {os.path.join(folder, entry): name for entry in entries if (name := hidden_name(entry)) is not None}
    if not any(map(_is_in_use, temporary)):
        for path, name in temporary.items():
            if name in names:
                with suppress(FileNotFoundError, PermissionError):  # Windows: in use
                    os.unlink(path)


def _is_in_use(path: str) -> bool:
    """Return True unless it is certain that no process is writing a temporary file."""
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return os.name != "nt" and lock(descriptor) is not True
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _move(source: str, target: str, shown: str, *, overwrite: bool) -> None:
    """Rename a file; without ``overwrite`` by link(2), which does not replace an existing target.

    On a filesystem without links, a race remains between the check and the rename.
    """
    if overwrite:
        replace(source, target, shown)
        return
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(target):
            raise existing_file(target) from None
        os.rename(source, target)
    else:
        os.unlink(source)
