"""An open weight file: its descriptor, its table and views into its mapping."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from ..errors import FormatError, os_error
from .arrays import Array as Array  # handed on: most modules want both
from .arrays import ArraySpec, array_spec
from .native import Error, check, ffi, lib, mapped_buffer, pointer, short
from .table import ListedTable, Table, TensorInfo
from .text import show

PathLike = str | os.PathLike[str]

# In bytes: what Windows takes, far more than PATH_MAX of other systems.
_LONGEST_PATH = 65_536
# PATH_MAX of Linux: bytes are a path rarely, and the content of a file by mistake.
_LONGEST_BYTES = 4096


def native_path(path: PathLike) -> tuple[str, bytes]:
    """A path as messages show it and as the C core takes it.

    Raises:
        TypeError: not a path.
        ValueError: it holds a NUL, which would silently end it.
        OSError: it is longer than any system takes.
    """
    if isinstance(path, (bytes, bytearray, memoryview)):
        _refuse_content(path)
    text = os.fsdecode(os.fspath(path))
    encoded = text.encode() if os.name == "nt" else os.fsencode(text)
    if b"\0" in encoded:
        raise ValueError(f"embedded null byte in path {show(text)}")
    if len(encoded) > _LONGEST_PATH:
        raise os_error(errno.ENAMETOOLONG, show(text))
    return text, encoded


def _refuse_content(path: bytes | bytearray | memoryview) -> None:
    if not isinstance(path, bytes) or len(path) > _LONGEST_BYTES or bytes(1) in path:
        raise TypeError(
            f"a path, not the content of a file, is wanted (found {type(path).__name__} of length {len(path):,}): "
            "for content use safeload.numpy.load(data)"
        )


def absolute(path: str) -> str:
    """A path that stays right when the working directory changes."""
    if path.startswith("/") and os.name != "nt":  # quickly: every open comes here
        return path
    try:
        return os.path.abspath(path)
    except OSError:  # the working directory is gone
        return path


def identity_of(status: os.stat_result) -> Identity:
    """What a status says that tells files apart."""
    return Identity(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)


class Identity(NamedTuple):
    """What tells a file from the one that another program has put in its place, or has written into.

    Attributes:
        size: bytes.
        mtime_ns: when it was last written.
        device: of the file system; of no meaning in another process, which may be on another machine.
        inode: of the file on it; likewise.
    """

    size: int
    mtime_ns: int
    device: int
    inode: int


class Descriptor(int):
    """The C core's file handle, closed when nothing refers to it any more.

    Jobs keep the one that they read: closed under them, its number would go to the next file that is opened, and they
    would read that. It is never copied: the copy would close the number a second time, whoever has it by then.
    """

    __slots__ = ()

    def __del__(self) -> None:
        _open.pop(int(self), None)  # before its number goes to another file
        short.sl_file_close(int(self))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an open file cannot be copied or pickled")


# Files whose descriptors are open, by descriptor, the oldest first. Each operation on it is a single one, so that no
# lock is needed, which a fork might find taken.
_open: dict[int, weakref.ref[WeightFile]] = {}
# Below so many the limit is not even asked for.
_FEW = 32
# Far more than any speed needs, where the system's own limit is higher still.
_MANY = 4096


def _budget() -> int:
    """How many descriptors to keep open: half of what the process may have, as the program needs some too."""
    if os.name == "nt":  # handles are limited by memory only
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MANY if limit == resource.RLIM_INFINITY else max(1, min(limit // 2, _MANY))


def _release(count: int) -> bool:
    """Lets go of some descriptors, of the oldest files first; whether there were any. The latest is kept.

    A file that is no longer at its path, or was written to, keeps its own: nobody could open it again.
    """
    released = 0
    for number in list(_open)[:-1]:
        reference = _open.get(number)
        file = None if reference is None else reference()
        if file is not None and file.release():
            released += 1
            if released >= count:
                break
    return released > 0


def make_room(error_number: int) -> bool:
    """Lets go of descriptors after an open has failed for want of one; whether to try again."""
    return error_number in (errno.EMFILE, errno.ENFILE) and _release(max(1, len(_open) // 2))


def check_unchanged(path: str, seen: tuple[int, ...]) -> None:
    """`WeightFile.check_identity` before a file is opened: what has changed may not even be a weight file any more.

    Raises:
        FormatError: another program has changed it.
    """
    try:
        status = os.stat(path)
    except OSError:  # opening it says so better
        return
    compare(identity_of(status), seen, path)


def compare(found: tuple[int, ...], seen: tuple[int, ...], path: str) -> None:
    """Raises FormatError where a file is not what was seen of it: an `Identity` or the beginning of one."""
    if found[: len(seen)] != tuple(seen):
        what = "it was written to, or replaced"
        if found[0] != seen[0]:
            what = f"it had {seen[0]:,} bytes, and has {found[0]:,}"
        raise FormatError(f"the file has changed since it was opened: {what}", path)


def are_few(files: Iterable[WeightFile | None]) -> bool:
    """Whether they may all be held open at once, whatever the limit is."""
    return len(set(files)) <= _FEW


def groups(files: Sequence[WeightFile | None]) -> list[tuple[int, int]]:
    """Ranges of a sequence in each of which no more files are than may be held open at once."""
    if are_few(files):
        return [(0, len(files))]
    most = max(1, _budget() // 2)
    result, begin = [], 0
    held: set[WeightFile | None] = set()
    for k, file in enumerate(files):
        if file not in held and len(held) >= most:
            result.append((begin, k))
            begin, held = k, set()
        held.add(file)
    return [*result, (begin, len(files))]


class WeightFile:
    """One file, open for reading until closed or forgotten. Any thread may use it.

    Its descriptor may be let go while nobody reads: a checkpoint may have more shards than a process descriptors. The
    file is opened again when it is needed, and must be the same.

    Args:
        path: as it was given.
        opened: the C core's ``sl_file``.
        table: its tensors.
        brief: whether it is closed again at once: it is neither copied nor let go.

    Attributes:
        path: as it was given.
        size: bytes.
        table: its tensors.
    """

    _origin: tuple[str, Identity] | None = None
    _closed = False

    def __init__(self, path: str, opened: Any, table: Table, *, brief: bool = False) -> None:
        self.path = path
        self.size: int = opened.size
        self.table = table
        self._opened = opened
        self._descriptor: Descriptor | None = Descriptor(opened.handle)
        if not brief:
            self._place = absolute(path)
            if os.name == "nt":
                self._status = os.stat(self._place)
            _open[opened.handle] = weakref.ref(self)
            if len(_open) > _FEW and len(_open) > (budget := _budget()):
                _release(len(_open) - budget + budget // 4)

    @classmethod
    def in_memory(cls, size: int, table: Table) -> WeightFile:
        """Stands for bytes in memory, which whoever has them reads."""
        file = cls.__new__(cls)
        file.path, file.size, file.table, file._descriptor = "", size, table, None
        file._closed = True
        return file

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self.path}: an open file cannot be copied or pickled")

    def stand_for(self, origin: WeightFile) -> None:
        """Makes the file known as another one, whose unpacked content it is."""
        self._origin = origin.place, origin.identity

    @property
    def place(self) -> str:
        """The absolute path that it was opened by."""
        return self._place if self._origin is None else self._origin[0]

    @property
    def identity(self) -> Identity:
        """What the file was when it was first opened."""
        return self._own_identity() if self._origin is None else self._origin[1]

    def _own_identity(self) -> Identity:
        if os.name == "nt":
            return identity_of(self._status)
        opened = self._opened
        return Identity(opened.size, opened.mtime_ns, opened.device, opened.inode)

    def check_identity(self, seen: tuple[int, ...]) -> None:
        """Compares the file with what another opening of it has seen: an `Identity` or the beginning of one.

        Raises:
            FormatError: another program has changed it.
        """
        compare(self.identity, seen, self.path)

    def release(self) -> bool:
        """Closes the descriptor until the file is read again, unless only it leads to the file; whether it did."""
        if self._descriptor is None:
            return False
        try:
            there = identity_of(os.stat(self._place))
        except OSError:
            return False
        if there != self._own_identity():
            return False
        self._descriptor = None
        return True

    def _reopen(self) -> Descriptor:
        seen = self._own_identity()
        check_unchanged(self._place, seen)
        again = open_descriptor(self._place)
        again.path = self.path
        again.check_identity(seen)
        self._descriptor = descriptor = again.descriptor
        _open[int(descriptor)] = weakref.ref(self)
        if self._closed:  # by another thread, meanwhile
            self._descriptor = None
        return descriptor

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes of the file, fewer where it ends; GIL kept, so for what is small.

        Raises:
            OSError: they cannot be read.
        """
        size = max(0, min(size, self.size - offset))
        if size == 0:
            return b""
        memory = ffi.new("char[]", size)
        if short.sl_file_read(self.descriptor, offset, pointer(memory), size, None) != lib.SL_OK:
            error = Error()  # once more, to hear why
            status = short.sl_file_read(self.descriptor, offset, pointer(memory), size, pointer(error))
            check(status, error, self.path)
        data: bytes = ffi.unpack(memory, size)
        return data

    @property
    def descriptor(self) -> Descriptor:
        """The C core's file handle, for jobs."""
        descriptor = self._descriptor
        if descriptor is None:
            if self._closed:
                raise ValueError(f"{self.path} is closed")
            descriptor = self._reopen()
        return descriptor

    def close(self) -> None:
        """Closes the descriptor once no job needs it; arrays over mappings stay valid."""
        self._closed = True
        self._descriptor = None

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

    def infos(self) -> list[TensorInfo]:
        """What is known of each tensor."""
        table = self.table
        ranges = table.byte_ranges()
        sizes = table.sizes() if table.shaped else [end - begin for begin, end in ranges]
        return [
            TensorInfo(name, row.code, shape, size, self.path, begin)
            for name, row, shape, size, (begin, _) in zip(
                table.names, table.rows, table.shapes, sizes, ranges, strict=True
            )
        ]

    def tensor_at(self, position: int) -> str | None:
        """Name of the tensor that a byte belongs to."""
        for name, (begin, end) in zip(self.table.names, self.table.byte_ranges(), strict=True):
            if begin <= position < end:
                return name
        return None

    def layout(self, index: int) -> ArraySpec:
        """How one tensor becomes an array."""
        layout = array_spec(self.table.row(index), self.table.shape(index), *self.table.byte_range(index))
        return self._shaped(index, layout) if self.table.shaped else layout

    def layouts(self, indices: Iterable[int]) -> list[ArraySpec]:
        """`layout` of many tensors, at the price of one look at each column."""
        rows, shapes, ranges = self.table.rows, self.table.shapes, self.table.byte_ranges()
        if self.table.shaped:
            return [self._shaped(i, array_spec(rows[i], shapes[i], *ranges[i])) for i in indices]
        return [array_spec(rows[i], shapes[i], *ranges[i]) for i in indices]

    def _shaped(self, index: int, layout: ArraySpec) -> ArraySpec:
        return layout._replace(strides=self.table.strides(index), big_endian=self.table.big_endian)


def open_descriptor(path: PathLike) -> WeightFile:
    """An open file whose table is still empty, for readers in Python.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    text, encoded = native_path(path)
    opened, error = ffi.new("sl_file *"), Error()
    arguments = encoded, pointer(opened), pointer(error)
    status = short.sl_file_open(*arguments)
    if status == lib.SL_E_OS and make_room(error.os_errno):
        status = short.sl_file_open(*arguments)
    check(status, error, text)
    return WeightFile(text, opened, ListedTable([]))
