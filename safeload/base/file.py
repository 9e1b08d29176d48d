"""An open weight file: its descriptor, its table and views into its mapping."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from ..errors import FormatError, os_error
from .arrays import Array as Array  # re-exported: most modules need both
from .arrays import ArraySpec, array_spec
from .native import Error, check, ffi, lib, mapped_buffer, pointer, short
from .table import ListedTable, Table, TensorInfo
from .text import show

PathLike = str | os.PathLike[str]

# In bytes: the limit of Windows, far above PATH_MAX of other systems.
_LONGEST_PATH = 65_536
# PATH_MAX of Linux. Bytes are rarely a path, and sometimes the content of a file by mistake.
_LONGEST_BYTES = 4096


def native_path(path: PathLike) -> tuple[str, bytes]:
    """A path as messages show it and as the C core takes it.

    Raises:
        TypeError: not a path.
        ValueError: the path contains a NUL, which would truncate it silently.
        OSError: the path is longer than any system accepts.
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
    """A path that stays valid when the working directory changes."""
    if path.startswith("/") and os.name != "nt":  # the fast case: every open calls this
        return path
    try:
        return os.path.abspath(path)
    except OSError:  # the working directory has been deleted
        return path


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


class Descriptor(int):
    """The C core's file handle, closed when nothing refers to it any more.

    Jobs hold a reference to the descriptor that they read: if it were closed under them, the next file to be opened
    would get its number, and they would read that file. It must not be copied: the copy would close the number a second
    time, whichever file has it by then.
    """

    __slots__ = ()

    def __del__(self) -> None:
        _open.pop(int(self), None)  # before another file gets its number
        short.sl_file_close(int(self))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an open file cannot be copied or pickled")


# Files whose descriptors are open, by descriptor, the oldest first. Every access is one atomic operation, so that it
# needs no lock, which a fork might find locked.
_open: dict[int, weakref.ref[WeightFile]] = {}
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
    """Closes up to ``count`` descriptors, oldest files first, never the latest. Returns whether it closed any.

    A file that is no longer at its path, or has been written to, keeps its descriptor: it could not be opened again.
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
    """Closes descriptors if an open has failed because none was free. Returns whether to try again."""
    return error_number in (errno.EMFILE, errno.ENFILE) and _release(max(1, len(_open) // 2))


def check_unchanged(path: str, seen: tuple[int, ...]) -> None:
    """`WeightFile.check_identity` before a file is opened: a changed file may not even be a weight file any more.

    Raises:
        FormatError: another program has changed the file.
    """
    try:
        status = os.stat(path)
    except OSError:  # opening it raises a better error
        return
    compare(identity_of(status), seen, path)


def compare(found: tuple[int, ...], seen: tuple[int, ...], path: str) -> None:
    """Raises FormatError if a file is not the one seen before; ``seen`` is an `Identity` or the beginning of one."""
    if found[: len(seen)] != tuple(seen):
        what = "it was written to, or replaced"
        if found[0] != seen[0]:
            what = f"it had {seen[0]:,} bytes, and has {found[0]:,}"
        raise FormatError(f"the file has changed since it was opened: {what}", path)


def are_few(files: Iterable[WeightFile | None]) -> bool:
    """Whether all of these files may be open at once, whatever the limit is."""
    return len(set(files)) <= _FEW


def groups(files: Sequence[WeightFile | None]) -> list[tuple[int, int]]:
    """Divides a sequence into ranges [begin, end) of which each refers to no more files than may be open at once."""
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
    """One file, open for reading until it is closed or no longer referenced. Any thread may use it.

    Its descriptor may be closed between reads, because a checkpoint may have more shards than a process may have
    descriptors. The file is then opened again when needed, and must be unchanged.

    Args:
        path: as given by the caller.
        opened: the C core's ``sl_file``.
        table: its tensors.
        brief: whether it will be closed again at once: it cannot be copied, and its descriptor stays open until then.

    Attributes:
        path: as given by the caller.
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
        """A placeholder file for bytes in memory, which their owner reads itself."""
        file = cls.__new__(cls)
        file.path, file.size, file.table, file._descriptor = "", size, table, None
        file._closed = True
        return file

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self.path}: an open file cannot be copied or pickled")

    def stand_for(self, origin: WeightFile) -> None:
        """Makes `place` and `identity` those of another file, of which this one is the unpacked content."""
        self._origin = origin.place, origin.identity

    @property
    def place(self) -> str:
        """The absolute path by which it was opened."""
        return self._place if self._origin is None else self._origin[0]

    @property
    def identity(self) -> Identity:
        """The identity of the file when it was first opened."""
        return self._own_identity() if self._origin is None else self._origin[1]

    def _own_identity(self) -> Identity:
        if os.name == "nt":
            return identity_of(self._status)
        opened = self._opened
        return Identity(opened.size, opened.mtime_ns, opened.device, opened.inode)

    def check_identity(self, seen: tuple[int, ...]) -> None:
        """Compares the file with an earlier opening of it: ``seen`` is an `Identity` or the beginning of one.

        Raises:
            FormatError: another program has changed the file.
        """
        compare(self.identity, seen, self.path)

    def release(self) -> bool:
        """Closes the descriptor until the next read, unless the path no longer leads to the file.

        Returns:
            Whether it was closed.
        """
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
        if self._closed:  # another thread has closed it meanwhile
            self._descriptor = None
        return descriptor

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes of the file, fewer at its end. It keeps the GIL, and is meant for small reads.

        Raises:
            OSError: the file cannot be read.
        """
        size = max(0, min(size, self.size - offset))
        if size == 0:
            return b""
        memory = ffi.new("char[]", size)
        if short.sl_file_read(self.descriptor, offset, pointer(memory), size, None) != lib.SL_OK:
            error = Error()  # once more, to get the error
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
        """The description of each tensor, in the order of the table."""
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
        """`layout` of many tensors; each column is decoded once."""
        rows, shapes, ranges = self.table.rows, self.table.shapes, self.table.byte_ranges()
        if self.table.shaped:
            return [self._shaped(i, array_spec(rows[i], shapes[i], *ranges[i])) for i in indices]
        return [array_spec(rows[i], shapes[i], *ranges[i]) for i in indices]

    def _shaped(self, index: int, layout: ArraySpec) -> ArraySpec:
        return layout._replace(strides=self.table.strides(index), big_endian=self.table.big_endian)


def open_descriptor(path: PathLike) -> WeightFile:
    """An open file whose table is still empty, for formats that are read in Python.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    text, encoded = native_path(path)
    opened, error = ffi.new("sl_file *"), Error()
    arguments = encoded, pointer(opened), pointer(error)
    status = short.sl_file_open(*arguments)
    if status == lib.SL_E_OS and make_room(error.os_errno):
        status = short.sl_file_open(*arguments)
    check(status, error, text)
    return WeightFile(text, opened, ListedTable([]))
