"""Where saved tensors go: a file, a binary file object, or the sink of a folder of shards."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard, cast

from ...base.native import ffi
from ...base.paths import absolute
from ...base.text import show
from ...engine.run.atomic_file import AtomicFile, check_place
from ...errors import unsaved
from ...formats.registry import SAFETENSORS, WEIGHT_SUFFIXES, WRITTEN
from ...formats.safetensors.file import ROOM, FileWriter
from ...formats.safetensors.quantized import pack
from ...stores.files import Location
from .destinations import Destination, check_free, file_in_store, is_folder, sink_of, where
from .disk_sink import remove_shards, shards_beside
from .sink import Sink

# Bytes that a file object gets at once.
_PIECE = 4 << 20


class BinaryWriter(Protocol):
    """A file object opened for writing in binary mode; ``seek`` and ``tell`` are used if it has them."""

    def write(self, data: bytes, /) -> Any:
        """Write bytes and return their number."""


# Where tensors are written: a file, a folder, a store or a file object.
SaveDestination: TypeAlias = Destination | BinaryWriter


def is_written_to(dst: SaveDestination) -> TypeGuard[BinaryWriter]:
    """Return True for file objects opened for writing; paths of fsspec have ``fs``."""
    path_like = isinstance(dst, (str, os.PathLike))
    return not path_like and callable(getattr(dst, "write", None)) and not hasattr(dst, "fs")


class ObjectFile:
    """A binary file object, from its current position on."""

    def __init__(self, file: Any) -> None:
        if isinstance(file, io.TextIOBase):
            raise TypeError("expected a file object opened in binary mode, got a text file")
        if getattr(file, "closed", False):
            raise ValueError("the file object is closed")
        self._file = file
        self._start: int | None = None
        with suppress(AttributeError, OSError, io.UnsupportedOperation):
            if file.seekable():
                self._start = int(file.tell())
        self.in_order = self._start is None  # True if it cannot seek

    def seek(self, position: int) -> None:
        assert self._start is not None
        self._file.seek(self._start + position)

    def write(self, pieces: list[tuple[int, int]]) -> None:
        """Write copies of memory, because an object may keep its argument."""
        for address, size in pieces:
            for begin in range(0, size, _PIECE):
                count = min(_PIECE, size - begin)
                self._write(ffi.buffer(ffi.cast("char *", address + begin), count)[:])

    def _write(self, data: bytes) -> None:
        """Write all bytes, even if the object takes only some at a time."""
        while data:
            count = self._file.write(data)
            if count is None and isinstance(self._file, io.RawIOBase):
                raise BlockingIOError(errno.EAGAIN, "the file object does not block and takes no more bytes")
            if not isinstance(count, int):  # objects other than Python's may return nothing
                return
            if not 0 < count <= len(data):
                raise OSError(errno.EIO, f"the file object wrote {count} of {len(data)} bytes")
            data = data[count:]

    @contextmanager
    def open(self, size: int | None) -> Iterator[Any]:
        """Yield a file: this one, or for an unknown size a temporary one, which is copied."""
        if size is None:
            with tempfile.TemporaryDirectory(prefix="safeload-", ignore_cleanup_errors=True) as folder:
                path = os.path.join(folder, "spool.safetensors")
                with AtomicFile(path, 0, durable=False) as file:
                    yield file
                self.copy(path)
            return
        with self._undone():
            yield self
            if not self.in_order:
                self.seek(size)

    def copy(self, path: str) -> None:
        """Write the bytes of a local file."""
        with self._undone(), open(path, "rb") as complete:
            while data := complete.read(_PIECE):
                self._write(data)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Cut the file to its old size after an error, if the tensors were written at its end."""
        end = None
        if self._start is not None:
            end = int(self._file.seek(0, os.SEEK_END) or self._file.tell())
            self._file.seek(self._start)
        try:
            yield
        except BaseException:
            if end is not None and end <= (self._start or 0):
                with suppress(Exception):  # the first error is raised
                    self._file.seek(self._start)
                    self._file.truncate()
            raise


class FileSink(NamedTuple):
    """A single file."""

    # Returns a context with a file of this size, whose end puts it in place. A file of unknown size, None, can seek.
    open: Callable[[int | None], AbstractContextManager[Any]]
    in_order: bool = False  # True if a file of known size cannot seek

    def write(self, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None, *, room: int = ROOM) -> None:
        """Write all tensors of the file."""
        writer = FileWriter(*pack(tensors, metadata), room=room)
        try:
            with self.open(writer.size) as file:
                writer.write_to(file)
        except OSError as error:
            raise unsaved(error) from None


def target_of(
    dst: SaveDestination,
    max_shard_size: int | str | None = None,
    *,
    overwrite: bool,
    durable: bool,
    storage_options: Mapping[str, Any] | None,
) -> FileSink | Sink:
    """Return the checked target of a save."""
    if is_written_to(dst):
        if max_shard_size is not None:
            raise ValueError("max_shard_size writes a folder, but the destination is a file object")
        file = ObjectFile(dst)
        return FileSink(file.open, file.in_order)
    location = where(cast(Destination, dst), storage_options)
    if not location.files.remote:
        location = Location(location.files, _absolute(location.path))
    path, shown = location.path, location.shown
    suffix = os.path.splitext(path)[1].lower()
    if not location.files.remote and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        return _local_file(path, overwrite=overwrite, durable=durable)  # a device or a pipe
    folder = is_folder(location)
    if max_shard_size is not None and not folder and suffix in WEIGHT_SUFFIXES:
        raise ValueError(f"max_shard_size writes a folder, but {show(shown)} has the suffix of a file")
    if max_shard_size is not None or folder:
        sink = sink_of(location)
        sink.check_free(overwrite)
        return sink
    if suffix not in WRITTEN[SAFETENSORS]:
        raise ValueError(
            f"{show(shown)}: tensors are saved as safetensors: use the suffix .safetensors, or end the path "
            "with a slash for a folder"
        )
    if not location.files.remote:
        return _local_file(path, overwrite=overwrite, durable=durable)
    store, name = file_in_store(location, overwrite=overwrite)
    return FileSink(lambda size: store.writing(name, size or 0))


def _local_file(path: str, *, overwrite: bool, durable: bool) -> FileSink:
    in_order = os.path.exists(path) and not os.path.isfile(path)
    if not in_order:
        check_free(path, overwrite)
    if not os.path.lexists(path):
        check_place(path)
    old = shards_beside(path, overwrite)

    @contextmanager
    def file(size: int | None) -> Iterator[AtomicFile]:
        with AtomicFile(path, size or 0, overwrite=overwrite or in_order, durable=durable) as file:
            yield file
        remove_shards(old)

    return FileSink(file, in_order)


def _absolute(path: str) -> str:
    """Return a path that is valid until the end of the save, even if the working directory changes."""
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    ends = path.endswith(("/", os.sep))
    return absolute(path) + ("/" if ends and len(path) > 1 else "")
