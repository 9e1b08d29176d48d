"""Where saved tensors go: a local file, a file in a store, a binary file object, or a folder of shards."""

from __future__ import annotations

import errno
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, NamedTuple, cast

from ...base.paths import absolute
from ...base.text import parse_size, show
from ...engine.run.atomic_file import AtomicFile, check_place
from ...errors import unsaved
from ...formats.folder import INDEX, SINGLE
from ...formats.registry import SAFETENSORS, WEIGHT_SUFFIXES, WRITTEN
from ...formats.safetensors.file import FileWriter
from ...formats.safetensors.header import ROOM
from ...formats.safetensors.quantized import pack
from ...stores.files import Location
from ..folders import journal
from ..folders.destinations import (
    USUAL_SIZE,
    Destination,
    check_free,
    file_in_store,
    is_folder,
    sink_of,
    where,
)
from ..folders.disk_sink import remove_shards, shards_beside
from ..folders.file_object import BinaryWriter, ObjectFile, SaveDestination, is_written_to
from ..folders.shards import divide, index_text, weight_map, write_shards, writer_of
from ..folders.sink import free_names
from .spool import Spool, Written


class SaveOptions(NamedTuple):
    """The checked options of a save."""

    max_shard_size: int | str | None = None
    overwrite: bool = False
    durable: bool = True
    storage_options: Mapping[str, Any] | None = None


class FileTarget(ABC):
    """A single file."""

    @abstractmethod
    def file(self, size: int) -> Any:
        """Return a context with a file of known size; its end puts the file in place."""

    @abstractmethod
    def spool(self) -> Any:
        """Return a context with an `AtomicFile` of unknown size; its end puts the file in place."""

    @property
    def in_order(self) -> bool:
        """True if the file cannot seek."""
        return False

    def write(self, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None, *, room: int = ROOM) -> None:
        """Write all tensors of the file."""
        writer = FileWriter(*pack(tensors, metadata), room=room)
        try:
            with self.file(writer.size) as file:
                writer.write_to(cast(AtomicFile, file))
        except OSError as error:
            raise unsaved(error) from None


class LocalTarget(FileTarget):
    """A path of this machine."""

    def __init__(self, path: str, options: SaveOptions) -> None:
        self._path, self._options = path, options
        self._in_order = os.path.exists(path) and not os.path.isfile(path)
        if not self._in_order:
            check_free(path, options.overwrite)
        if not os.path.lexists(path):
            check_place(path)
        self._old = shards_beside(path, options.overwrite)

    @property
    def in_order(self) -> bool:
        return self._in_order

    @contextmanager
    def file(self, size: int) -> Iterator[AtomicFile]:
        overwrite = self._options.overwrite or self._in_order
        with AtomicFile(self._path, size, overwrite=overwrite, durable=self._options.durable) as file:
            yield file
        remove_shards(self._old)

    def spool(self) -> Any:
        return self.file(0)


class StoreTarget(FileTarget):
    """A file in a store; it waits on this machine until it is complete."""

    def __init__(self, location: Location, options: SaveOptions) -> None:
        self._folder, self._name = file_in_store(location, overwrite=options.overwrite)
        self._options = options

    def file(self, size: int) -> Any:
        return self._folder.writing(self._name, size, overwrite=self._options.overwrite)

    def spool(self) -> Any:
        return self.file(0)


class ObjectTarget(FileTarget):
    """A binary file object."""

    def __init__(self, file: BinaryWriter) -> None:
        self._object = ObjectFile(file)

    @property
    def in_order(self) -> bool:
        return self._object.in_order

    @contextmanager
    def file(self, size: int) -> Iterator[Written]:
        with self._object.undone():
            yield self._object
            if not self._object.in_order:
                self._object.seek(size)

    @contextmanager
    def spool(self) -> Iterator[AtomicFile]:
        with tempfile.TemporaryDirectory(prefix="safeload-", ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, "spool.safetensors")
            with AtomicFile(path, 0, durable=False) as file:
                yield file
            self._object.copy(path)


class FolderTarget:
    """A folder of shards, here or in a store."""

    def __init__(self, location: Location, options: SaveOptions) -> None:
        size = options.max_shard_size
        self.limit = USUAL_SIZE if size is None else parse_size(size, "max_shard_size")
        self._folder = sink_of(location)
        self._overwrite = options.overwrite
        self._folder.check_free(options.overwrite)
        self._uploaded: dict[str, str] = {}  # shard of each tensor in a store
        self._total = 0
        self._shards: list[Spool] = []  # complete, and not uploaded

    def write(self, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> None:
        """Write all tensors of the folder."""
        shards = divide(tensors, self.limit)
        names = free_names(self._folder, [*shards])
        shards = {names[file]: shard for file, shard in shards.items()}
        total = sum(tensor.nbytes for tensor in tensors.values())
        self._write(
            {file: (lambda shard=shard: writer_of(shard, metadata)) for file, shard in shards.items()},
            weight_map(shards),
            total,
        )

    def _write(self, writers: Mapping[str, Any], files: Mapping[str, str], total: int) -> None:
        index = {} if [*writers] == [SINGLE] else {INDEX: index_text(files, total)}
        write_shards(writers, index, self._folder, overwrite=self._overwrite)
        self._tidy()

    def _tidy(self) -> None:
        if self._overwrite:
            journal.clear(self._folder)

    # ---- shards that come one at a time ----

    def begin(self, stack: ExitStack) -> None:
        """Prepare the folder; the stack cleans up."""
        stack.enter_context(self._folder.begin(overwrite=self._overwrite))
        if self._folder.location.files.remote:
            self._spools = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="safeload-", ignore_cleanup_errors=True)
            )
        else:
            self._spools = self._folder.location.path
            os.makedirs(self._spools, exist_ok=True)

    def next_spool(self, stack: ExitStack) -> Spool:
        """Return the next shard. In a store the complete shard is uploaded first."""
        if self._shards and self._folder.location.files.remote:
            self._upload(self._shards.pop())
        number = len(self._shards) + len(set(self._uploaded.values())) + 1
        path = os.path.join(self._spools, f"model-{number:05}.safetensors")
        return Spool(stack.enter_context(AtomicFile(path, 0)))

    def complete(self, spool: Spool, metadata: Mapping[str, str] | None) -> None:
        """Complete a shard."""
        spool.complete(metadata)
        spool.file.seal()
        self._shards.append(spool)
        self._total += spool.nbytes

    def _upload(self, spool: Spool) -> None:
        """Upload a shard of a folder whose number of shards is unknown."""
        names = self._folder.names()
        file = next(name for k in count(1) if (name := f"model-{k:05}.safetensors") not in names)
        with self._folder.file(file, spool.size) as written:
            spool.write_to(written)
        self._uploaded.update(dict.fromkeys(spool.names, file))

    def finish(self) -> None:
        """Put the complete shards and the index in place."""
        if self._uploaded:
            for spool in self._shards:
                self._upload(spool)
            self._folder.commit({INDEX: index_text(self._uploaded, self._total)})
            self._tidy()
            return
        total = len(self._shards)
        usual = [f"model-{k + 1:05}-of-{total:05}.safetensors" for k in range(total)] if total > 1 else [SINGLE]
        free = free_names(self._folder, usual)
        names = [free[file] for file in usual]
        files = {name: file for file, spool in zip(names, self._shards, strict=True) for name in spool.names}
        spools = zip(names, self._shards, strict=True)
        self._write({file: (lambda spool=spool: spool) for file, spool in spools}, files, self._total)


def target_of(dst: SaveDestination, options: SaveOptions) -> FileTarget | FolderTarget:
    """Return the checked target of a save."""
    if is_written_to(dst):
        if options.max_shard_size is not None:
            raise ValueError("max_shard_size writes a folder, but the destination is a file object")
        return ObjectTarget(dst)
    location = where(cast(Destination, dst), options.storage_options)
    if not location.files.remote:
        location = Location(location.files, _absolute(location.path))
    path = location.path
    suffix = os.path.splitext(path)[1].lower()
    if not location.files.remote and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        return LocalTarget(path, options)  # a device or a pipe
    if is_folder(location):
        return FolderTarget(location, options)
    if options.max_shard_size is not None:
        if suffix in WEIGHT_SUFFIXES:
            raise ValueError(f"max_shard_size writes a folder, but {show(location.shown)} has the suffix of a file")
        return FolderTarget(location, options)
    if suffix not in WRITTEN[SAFETENSORS]:
        raise ValueError(
            f"{show(location.shown)}: tensors are saved as safetensors: use the suffix .safetensors, or end the path "
            "with a slash for a folder"
        )
    return StoreTarget(location, options) if location.files.remote else LocalTarget(path, options)


def _absolute(path: str) -> str:
    """Return a path that is valid until the end of the save, even if the working directory changes."""
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    ends = path.endswith(("/", os.sep))
    return absolute(path) + ("/" if ends and len(path) > 1 else "")
