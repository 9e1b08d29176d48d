"""Write files atomically: at any moment the path holds the complete old file or the complete new file."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ...base.arrays import Array, byteswapped
from ...base.native import Error, check, lib
from ...base.paths import PathLike, native_path, unwritable
from ...stores.local import Identity, copy_range, identity_of, lock, replace, sync_folder, unlock
from . import jobs
from .memory import address_of

if TYPE_CHECKING:
    from .digest import Digest

# Buffer for tensors that are not in C order, so that they are not copied whole.
_COPY_BUFFER = 16 << 20

# A temporary name is ".NAME.RANDOM.tmp". RANDOM has this many hexadecimal digits.
_RANDOM, _SUFFIX = 16, ".tmp"
_TEMPORARY = re.compile(rf"\..*\.[0-9a-f]{{{_RANDOM}}}{re.escape(_SUFFIX)}", re.DOTALL)
# The longest name of most filesystems (NAME_MAX) minus the additions of a temporary name.
_LONGEST_STEM = 255 - len(".") - len(".") - _RANDOM - len(_SUFFIX)


class AtomicFile:
    """A file under construction. Leaving the ``with`` block puts it in place; an exception leaves no trace.

    A new file gets mode 0666 less the umask. A replaced file keeps its mode and owner, and symbolic links are followed.
    Devices and pipes are written directly, in order.

    ``size`` bytes are reserved before the first byte is written. A symbolic link is replaced itself if not ``follow``.
    """

    identity: Identity | None = None  # of the complete file, after `seal`

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
        self._digest = digest
        self._follow = follow
        self.path = native_path(path)[0]
        self._overwrite = overwrite
        self._durable = durable
        self._temporary: str | None = None
        self._descriptor, self._process = -1, os.getpid()
        self._position = 0
        try:
            self._begin(size)
            return
        except OSError as error:
            refusal = unwritable(error, self.path)
        try:
            raise refusal
        finally:
            del refusal  # which refers to this frame

    def _begin(self, size: int) -> None:
        try:
            existing = os.stat(self.path)
        except FileNotFoundError:
            existing = None
            check_place(self.path)
        if existing is not None and not self._overwrite:
            raise FileExistsError(errno.EEXIST, "File exists; pass overwrite=True to replace it", self.path)
        if existing is not None and stat.S_ISDIR(existing.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        self._in_order = existing is not None and not stat.S_ISREG(existing.st_mode)
        flags = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        if self._in_order:  # by the unresolved path, because realpath of /dev/stdout may not be openable
            self._descriptor = os.open(self.path, flags)
            return
        place, link = os.path.split(self.path)
        self._target = _resolved(self.path) if self._follow else os.path.join(_resolved(place or os.curdir), link)
        folder, name = os.path.split(self._target)
        self._temporary = os.path.join(folder, f"{_stem(name)}{os.urandom(_RANDOM // 2).hex()}{_SUFFIX}")
        try:
            self._create(flags)
            if existing is not None:
                with self._naming():
                    self._keep_owner_and_mode(existing)
            reserve(self._descriptor, size, self.path)
        except BaseException:
            self._abandon()
            raise

    def _create(self, flags: int) -> None:
        """Create the temporary file. The exception of a signal may arrive after the file exists."""
        assert self._temporary is not None
        try:
            self._descriptor = os.open(self._temporary, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            self._temporary = None
            # The caller knows the path, not the temporary name.
            raise type(error)(error.errno, error.strerror, self.path) from None
        if os.name != "nt":  # Windows removes no open file
            with contextlib.suppress(OSError):  # the file can be written without a lock
                lock(self._descriptor)  # for `remove_abandoned`

    def __del__(self) -> None:
        """Remove the file if the exception of a signal arrived before the ``with`` block began."""
        if getattr(self, "_temporary", None) is not None:
            self._abandon()

    def _keep_owner_and_mode(self, existing: os.stat_result) -> None:
        # Not on Windows: os.fchmod (since Python 3.13) would make the temporary file read-only, and such a file can
        # neither replace another file nor be deleted.
        if os.name == "nt":
            return
        mine = os.fstat(self._descriptor)
        if (mine.st_uid, mine.st_gid) != (existing.st_uid, existing.st_gid):
            with contextlib.suppress(PermissionError):  # only root can change the owner
                os.fchown(self._descriptor, existing.st_uid, existing.st_gid)
        elif mine.st_mode == existing.st_mode:
            return
        os.fchmod(self._descriptor, stat.S_IMODE(existing.st_mode))

    def write(self, pieces: list[tuple[int, int]]) -> None:
        """Append memory, as pairs of address and size in bytes. The caller keeps it alive."""
        if self._digest is not None:
            self._digest.begin(pieces)
        try:
            handle = _handle(self._descriptor)
            self._position = jobs.write(
                handle, self._position, pieces, path=self.path, in_order=self._in_order, durable=self._durable
            )
        finally:
            if self._digest is not None:
                self._digest.wait()  # the caller may reuse the memory

    def copy(self, descriptor: int, begin: int, nbytes: int) -> None:
        """Append bytes of an open file, copied or shared by the system if it can."""
        with self._naming():
            copy_range(descriptor, begin, nbytes, self._descriptor, self._position)
        self._position += nbytes

    @contextlib.contextmanager
    def reopened(self) -> Iterator[int]:
        """Yield a descriptor that reads the file under construction."""
        assert self._temporary is not None
        with self._naming():
            descriptor = os.open(self._temporary, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @property
    def in_order(self) -> bool:
        """True for devices and pipes, whose bytes are written in order."""
        return self._in_order

    def seek(self, position: int) -> None:
        """Set the byte at which `write` continues; the file must not be `in_order`."""
        self._position = position

    def truncate(self, size: int) -> None:
        """Cut off bytes after this size, which a failed write can leave; the file must not be `in_order`."""
        with self._naming():
            os.ftruncate(self._descriptor, size)

    def adopt(self, other: AtomicFile) -> None:
        """Take the content of another new file of the same filesystem, which must not be used afterwards."""
        with self._naming():
            assert self._temporary is not None
            assert other._temporary is not None
            old, own = self._temporary, os.stat(self._temporary)
            if self._descriptor >= 0:
                self._close_descriptor()
            if os.name != "nt":
                set_owner_and_mode(other._temporary, own)
            self._temporary, other._temporary = other._temporary, None
            self._descriptor, self._position = other._take_descriptor(), other._position
            os.unlink(old)

    @contextlib.contextmanager
    def stream(self) -> Iterator[BinaryIO]:
        """Yield a binary stream to the file, for Python's own libraries."""
        with self._naming(), os.fdopen(os.dup(self._descriptor), "wb") as stream:
            yield stream

    def seal(self) -> None:
        """Close the complete file before the end of the block puts it in place.

        If many files are put in place together, each needs a descriptor only while it is written.
        """
        with self._naming():
            self._close(identify=True)

    def put(self, swap: Swap, like: os.stat_result | None = None) -> None:
        """Put the sealed file in place before the ``with`` block ends; ``swap`` can take it back.

        Owner and mode come from the file ``like``, which may lie elsewhere.
        """
        with self._naming():
            if self._temporary is None:  # a device has no other place
                return
            if like is not None and os.name != "nt":
                set_owner_and_mode(self._temporary, like)
            if self._overwrite and os.path.lexists(self._target):
                swap.keep(self._target)
            else:
                swap.undo.append(partial(_take_back, self._target, self._temporary))
            self._commit()

    def _close(self, identify: bool = False) -> None:
        if self._descriptor >= 0:
            if self._durable and self._temporary is not None:
                os.fsync(self._descriptor)
            if identify:
                self.identity = identity_of(os.fstat(self._descriptor))
            self._close_descriptor()

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            with self._naming():
                self._commit()
        except BaseException as raised:
            in_place = self._temporary is None and not self._in_order  # only the fsync of the folder has failed
            self._abandon()
            if in_place and not self._overwrite:
                with contextlib.suppress(OSError):
                    os.unlink(self._target)
            elif in_place and isinstance(raised, OSError):
                text = f"{raised.strerror}; the file is in place, but a crash of the machine can take it back"
                raise type(raised)(raised.errno, text, self.path) from None
            raise

    def _commit(self) -> None:
        self._close()
        if self._temporary is None:
            return
        if self._overwrite:
            replace(self._temporary, self._target, self.path)
        else:
            _move_without_replacing(self._temporary, self._target)
        self._temporary = None
        if self._durable:
            sync_folder(os.path.dirname(self._target))

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Report the caller's path in errors that name no path, the temporary path or the resolved path."""
        internal = (None, self._temporary, self._target if self._temporary is not None else self.path)
        try:
            yield
        except OSError as error:
            if error.errno is None or error.filename not in internal:
                raise
            raise type(error)(error.errno, error.strerror, self.path) from None

    def _close_descriptor(self) -> None:
        descriptor = self._take_descriptor()
        if self._temporary is not None:
            unlock(descriptor)
        os.close(descriptor)

    def _take_descriptor(self) -> int:
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def _abandon(self) -> None:
        if self._process != os.getpid():  # a forked child: its parent is still writing the file
            self._temporary = None
        if self._descriptor >= 0:
            self._close_descriptor()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None


class Swap:
    """Files that are replaced in turn; an error restores all of them, the last first.

    If a step cannot be taken back, the earlier ones stay too: their order keeps readers away. Call `finish` when all
    steps are done. The end of the block removes hidden files.
    """

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []
        self.hidden: list[str] = []  # paths of old files, under names of temporary files

    def hide(self, path: str) -> None:
        """Rename a file aside."""
        hidden = self._hidden(path)
        os.rename(path, hidden)

    def keep(self, path: str) -> None:
        """Give a file that will be replaced a second name; without hard links, rename it."""
        hidden = self._hidden(path)
        try:
            os.link(path, hidden, follow_symlinks=os.link not in os.supports_follow_symlinks)
        except OSError:
            os.rename(path, hidden)

    def finish(self, old: Sequence[str]) -> bool:
        """Remove old files; return False if one stays, and keep hidden files then: an index among them may name it."""
        self.undo.clear()
        for path in old:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if any(map(os.path.lexists, old)):
            self.hidden.clear()
            return False
        return True

    def _hidden(self, path: str) -> str:
        folder, name = os.path.split(path)
        hidden = os.path.join(folder, f"{_stem(name)}{os.urandom(_RANDOM // 2).hex()}{_SUFFIX}")
        self.undo.append(partial(_bring_back, hidden, path))
        self.hidden.append(hidden)
        return hidden

    def __enter__(self) -> Swap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            while kind is not None and self.undo:
                self.undo.pop()()
        for path in self.hidden if kind is None else ():
            with contextlib.suppress(OSError):
                os.unlink(path)


def _bring_back(hidden: str, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # the error came before it was hidden
        if not os.path.exists(path) or not os.path.samefile(hidden, path):
            os.replace(hidden, path)
        os.unlink(hidden)  # a second name of the same file stays


def _take_back(path: str, temporary: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not os.path.lexists(temporary) or os.path.samefile(path, temporary):
            os.unlink(path)


def set_owner_and_mode(path: str, like: os.stat_result) -> None:
    """Give a file the owner, if possible, and the mode of another file."""
    with contextlib.suppress(PermissionError):  # only root can change the owner
        os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, stat.S_IMODE(like.st_mode))


def _resolved(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:  # on Windows, some filesystems cannot resolve paths
        if os.path.islink(path):
            raise
        return os.path.abspath(path)


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


def write_text(path: PathLike, text: str, *, overwrite: bool) -> int:
    """Write a UTF-8 text file atomically, and return its size. Lone surrogates (from paths) are escaped."""
    encoded = text.encode("utf-8", "backslashreplace")
    with AtomicFile(path, len(encoded), overwrite=overwrite) as file, file.stream() as stream:
        stream.write(encoded)
    return len(encoded)


def written_as_is(array: Array) -> bool:
    """Return True if an array is in C order and little-endian: its bytes can be written unchanged."""
    return bool(array.flags.c_contiguous) and not _must_swap(array)


def pieces_of(array: Array) -> Iterator[tuple[Any, int, int]]:
    """Yield the bytes of an array as files store them: tuples of owner, address and size in bytes.

    Each piece must be used before the next is requested, unless the array is `written_as_is`.
    """
    if written_as_is(array):
        yield array, address_of(array), array.nbytes
    elif array.size:
        # Iterates in C order through a small buffer: a broadcast or transposed array is not copied whole.
        count = max(1, _COPY_BUFFER // array.dtype.itemsize)
        for block in np.nditer(array, flags=["external_loop", "buffered"], order="C", buffersize=count):
            piece = np.ascontiguousarray(block)
            piece = byteswapped(piece) if _must_swap(array) else piece
            yield piece, address_of(piece), piece.nbytes


def _must_swap(array: Array) -> bool:
    return array.dtype.itemsize > 1 and bool(array.dtype.isnative) != (sys.byteorder == "little")


def _stem(name: str) -> str:
    """Return the beginning of a file's temporary names, shortened to legal names if necessary."""
    while len(os.fsencode(name)) > _LONGEST_STEM:
        name = name[:-1]
    return f".{name}."


def leftovers(folder: str, names: Iterable[str]) -> list[str]:
    """Return the paths of temporary files left by killed processes that were writing these files."""
    stems = {_stem(name) for name in names}
    return [
        os.path.join(folder, entry)
        for entry in os.listdir(folder)
        if entry.endswith(_SUFFIX) and entry[: -_RANDOM - len(_SUFFIX)] in stems
    ]


def hidden_name(entry: str) -> str | None:
    """Return the name of the file that a temporary file belongs to; None for any other file."""
    return entry[1 : -_RANDOM - len(_SUFFIX) - 1] if _TEMPORARY.fullmatch(entry) else None


def remove_abandoned(folder: str, names: Iterable[str]) -> None:
    """Remove temporary files of these files, unless a process is writing in the folder.

    A writer locks the file that it writes. Its complete files wait without a lock, so a locked file protects all.
    """
    temporary = [entry for entry in os.listdir(folder) if _TEMPORARY.fullmatch(entry)]
    if any(_is_in_use(os.path.join(folder, entry)) for entry in temporary):
        return
    for path in leftovers(folder, names):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows: in use
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


def _move_without_replacing(source: str, target: str) -> None:
    """Rename a file by link(2), which, unlike rename(2), does not replace an existing target.

    On a filesystem without links, a race remains between the check and the rename.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "File exists; pass overwrite=True to replace it", target) from None
        os.rename(source, target)
    else:
        os.unlink(source)
