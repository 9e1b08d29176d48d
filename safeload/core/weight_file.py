"""Weight files: a table of tensors, and the store with their bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import count, repeat
from operator import sub
from typing import Any, BinaryIO, NoReturn

from ..errors import FormatError, LimitError, UnsupportedError
from . import dtypes
from .files import LOCAL, WINDOW, ByteStore, Files, LocalStore, compare, open_local, read_at
from .packing import INT8
from .runtime import collected_young, paused
from .table import ListedTable, Table, TensorInfo
from .text import PathLike, error_about


class WeightFile:
    """The tensors of an open file. Any thread may use it."""

    verified = False  # True if its store hands out verified bytes from memory; see `trust.verified`
    unpacked = False  # True if this is the unpacked content of another file
    _identity: tuple[Any, ...] | None = None  # of the file that this content stands for

    def __init__(self, path: str, store: ByteStore, table: Table, files: Files = LOCAL, place: str = "") -> None:
        self.path = path
        self.store = store
        self.size = store.size  # in bytes
        self.table = table
        self.files = files
        self.remote = not isinstance(store, LocalStore)  # True if jobs cannot read it: each read is a request
        self.place: str = place or getattr(store, "place", path)  # valid in any working directory

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self.path}: an open file cannot be copied or pickled")

    def stand_for(self, origin: WeightFile, *, unpacked: bool = True) -> None:
        """Take `place`, `files` and `identity` from the file that opens this content."""
        self.place, self.files, self._identity = origin.place, origin.files, origin.identity
        self.unpacked = unpacked

    @property
    def identity(self) -> tuple[Any, ...]:
        """Version of the file when it was first opened; see `ByteStore.version`."""
        return self.store.version if self._identity is None else self._identity

    def check_identity(self, seen: tuple[Any, ...]) -> None:
        """Check that the file has not changed since ``seen``, which is an `identity` or its first fields."""
        compare(self.identity, seen, self.path)

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes of the file, fewer at its end; meant for small reads."""
        return read_at(self.store, offset, size)

    @property
    def local(self) -> LocalStore:
        """The store; jobs and parsers use its file handle."""
        if not isinstance(self.store, LocalStore):
            raise UnsupportedError(f"{self.path} must be a local file", path=self.path)
        return self.store

    def check_open(self) -> None:
        """Raise ValueError after `close`."""
        self.store.check_open()  # type: ignore[attr-defined]  # it is a `LocalStore` or a `RemoteStore`

    def settle(self) -> None:
        """Drop the bytes that a remote store keeps for small reads, once the table has been read."""
        if self.remote:
            self.store.settle()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the store. Arrays over mappings stay valid."""
        self.store.close()

    def infos(self) -> list[TensorInfo]:
        """Return the description of each tensor, in the order of the table."""
        table, count = self.table, self.table.count
        with paused(count):
            names = table.names
            numbers, shapes, begins, ends = table.columns(range(count))
            sizes = table.sizes() if table.shaped or table.quantized else map(sub, ends, begins)
            own_names = collected_young(zip(names), count)
            codes = map(_CODES.__getitem__, numbers)
            fields = zip(names, codes, shapes, sizes, repeat(self.path), begins, own_names)
            # Makes each `TensorInfo` from a tuple of its fields without running Python code.
            infos: list[TensorInfo] = list(map(tuple.__new__, repeat(TensorInfo), fields))
        for k, packed in table.packed.items():
            label = packed.packing.label
            if packed.packing.flat and label in dtypes.BLOCK_TYPES:  # named as in blocks along rows
                label = dtypes.BLOCK_TYPES[label].code
            infos[k] = infos[k]._replace(dtype=label, parts=tuple(part.name for part in packed.parts.values()))
        for k in table.scales.keys() - table.packed.keys():
            infos[k] = infos[k]._replace(dtype=INT8)
        for k, info in enumerate(infos) if table.unknown else ():
            if info.name in table.unknown:
                unknown = table.unknown[info.name]
                infos[k] = info._replace(dtype=unknown.label, shape=unknown.shape)
        return infos

    def tensor_at(self, position: int) -> str | None:
        """Return the name of the tensor at a byte."""
        for name, (begin, end) in zip(self.table.names, self.table.byte_ranges(), strict=True):
            if begin <= position < end:
                return name
        return None


def is_remote(file: object) -> bool:
    """Return True if jobs cannot read a file: each read is a request."""
    return isinstance(file, WeightFile) and file.remote


_CODES = {number: row.code for number, row in dtypes.BY_NUMBER.items()}


def places_in(file: WeightFile) -> dict[str, tuple[WeightFile, int]]:
    """Return file and index of each tensor of a file."""
    with paused(file.table.count):
        return dict(zip(file.table.names, zip(repeat(file), count()), strict=False))


def open_temporary(prefix: str, write: Callable[[BinaryIO, str], None], *, shown: str) -> WeightFile:
    """Write a temporary file, and return it open, without a name and with an empty table."""
    import tempfile  # only here: few loads need it

    descriptor, path = tempfile.mkstemp(prefix=prefix)
    try:
        with os.fdopen(descriptor, "wb") as out:
            write(out, path)
        return open_without_table(path, shown=shown)
    finally:
        with suppress(OSError):  # on Windows an open file cannot be deleted, and stays until the folder is cleaned
            os.unlink(path)


def open_without_table(
    path: PathLike, *, shown: str | None = None, files: Files = LOCAL, window: int = WINDOW
) -> WeightFile:
    """Open a file with an empty table, for formats that are read in Python."""
    if files is not LOCAL:
        place = os.fspath(path)
        store = files.open(place, window)
        file = WeightFile(getattr(store, "path", place), store, ListedTable([]), files, files.absolute(place))
        file.verified = hasattr(store, "verify")
        return file
    local = open_local(path, shown=shown)
    return WeightFile(local.path, local, ListedTable([]))


# ---- fields of a file, one after the other ----

# Bytes to read at first and after a jump, and at most if one window follows another.
_FIRST_READ, _LARGEST_READ = 4096, 1 << 20


class ByteReader:
    """Reads fields in order and reports faults with their byte position."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.position = 0  # byte of the next field; assign to it to skip data
        self._window, self._window_at = b"", 0
        self._step = _FIRST_READ

    def take(self, size: int, field: str) -> bytes:
        """Return the next bytes."""
        data = self.peek(size)
        if len(data) < size:
            raise self.fault(f"{field} needs {size} bytes, but the file ends after {len(data)}")
        self.position += size
        return data

    def peek(self, size: int) -> bytes:
        """Return the next bytes, or fewer at the end of the file, without a step."""
        start = self.position - self._window_at
        if start < 0 or start + size > len(self._window):
            near = 0 <= start <= len(self._window) and self._window
            self._step = min(2 * self._step, _LARGEST_READ) if near else _FIRST_READ
            count = min(max(size, self._step), max(0, self.file.size - self.position))
            self._window, self._window_at, start = self.file.read_at(self.position, count), self.position, 0
        return self._window[start : start + size]

    def take_text(self, size: int, field: str) -> str:
        """Return the next bytes as text."""
        begin = self.position
        try:
            return self.take(size, field).decode()
        except UnicodeDecodeError as error:
            raise self.fault(f"{field} is not UTF-8: {error.reason}", begin + error.start) from None

    def fault(self, message: str, position: int | None = None, tensor: str | None = None) -> FormatError:
        """Return the error for a fault at a byte, by default the next byte."""
        at = self.position if position is None else position
        return error_about(FormatError, message, path=self.file.path, offset=min(at, self.file.size), tensor=tensor)

    def limit(self, message: str, position: int | None = None) -> LimitError:
        """Return the error for a limit that is exceeded at a byte, by default the next byte."""
        at = self.position if position is None else position
        return error_about(LimitError, message, path=self.file.path, offset=at)
