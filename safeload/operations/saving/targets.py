"""Where saved tensors go: a single file, or the sink of a folder of shards."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

from ...base.paths import absolute
from ...base.text import show
from ...engine.run.atomic_file import AtomicFile, check_place
from ...errors import unsaved
from ...formats.registry import SAFETENSORS, WEIGHT_SUFFIXES, WRITTEN
from ...formats.safetensors.file import FileWriter
from ...formats.safetensors.header import ROOM
from ...formats.safetensors.quantized import pack
from ...stores.files import Location
from ..folders.destinations import Destination, check_free, file_in_store, is_folder, sink_of, where
from ..folders.disk_sink import remove_shards, shards_beside
from ..folders.file_object import ObjectFile, SaveDestination, is_written_to
from ..folders.sink import Sink


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
    if is_folder(location) or max_shard_size is not None:
        if suffix in WEIGHT_SUFFIXES and not is_folder(location):
            raise ValueError(f"max_shard_size writes a folder, but {show(shown)} has the suffix of a file")
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
    return FileSink(lambda size: store.writing(name, size or 0, overwrite=overwrite))


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
