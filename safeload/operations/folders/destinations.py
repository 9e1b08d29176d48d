"""Find the destination of a conversion, a local path or a folder in a store behind a URL, and refuse its sources."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import translate
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from ...base import url as urls
from ...base.paths import PathLike, native_path
from ...base.text import parse_size, show
from ...formats.folder import INDEX, SINGLE
from ...formats.registry import SAFETENSORS, SUFFIXES, WEIGHT_SUFFIXES
from ...stores.files import LOCAL, Files, Location
from ...stores.places import Located, is_file_object, places_of
from ..sources.executors import files_at
from .disk_sink import DiskSink
from .sink import EXISTS, EXTRAS, Sink

if TYPE_CHECKING:
    from .store_sink import StoreSink

# The destination of a conversion.
Destination: TypeAlias = PathLike | Located

# The default limit for shards, in bytes.
_USUAL_SIZE = 5_000_000_000

# A suffix begins with a letter: the names of models end in versions and sizes, such as "Qwen2.5-7B".
_SUFFIX = re.compile(r"\.(?:[a-z]\w*)?", re.ASCII)

# Other files that decide what weights are: configurations, indexes, manifests, signatures, metadata of DCP and Orbax.
_DOCUMENTS = re.compile("|".join(map(translate, (*EXTRAS, "*.json", "*.sig", "*.ocdbt", ".*", "_*"))))

# A URL as `pathlib` spells it.
_PATH_OF_URL = re.compile(rf"({'|'.join(urls.PLAIN)}):[/\\](?![/\\])")


def limit_of(max_shard_size: int | str | None) -> int:
    """Return the limit for shards, in bytes."""
    return _USUAL_SIZE if max_shard_size is None else parse_size(max_shard_size, "max_shard_size")


def where(dst: Destination, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Return the location of a destination. ``file://`` URLs are local."""
    if not isinstance(dst, (str, os.PathLike)) and is_file_object(dst):
        raise TypeError(f"the destination must be a path, a URL or a store here, got {type(dst).__name__}")
    (text,), files = places_of((dst,), storage_options)
    path_like = isinstance(dst, (str, os.PathLike))
    if not urls.is_url(text):
        if path_like and not isinstance(dst, str) and _PATH_OF_URL.match(text):
            url = urls.shown(_PATH_OF_URL.sub(r"\1://", text))
            raise ValueError(f"{show(url)}: pathlib drops a slash of the URL; pass it as a str")
        return Location(LOCAL, native_path(text)[0])
    if path_like and len(urls.links(text)) == 1 and urls.scheme_of(text) == "file":
        return Location(LOCAL, native_path(urls.local_path(text))[0])
    return Location(files, text)


def is_folder(location: Location, format: str | None = None) -> bool:
    """Return True if a destination is a folder: an existing folder, or a path with a final slash or no suffix."""
    path = location.path
    if location.files.remote:
        return not names_file(location)  # a URL is a folder unless it has the suffix of a weight file
    if os.path.isdir(path) or not os.path.basename(path):
        return True
    suffix = os.path.splitext(path)[1].lower()
    named = suffix in WEIGHT_SUFFIXES or suffix in SUFFIXES or _SUFFIX.fullmatch(suffix) is not None
    return not named and format in (None, SAFETENSORS)  # other formats are files, even without a suffix


def sink_of(location: Location) -> Sink:
    """Return the sink of a destination folder, without listing it."""
    files, path = location.files, location.path
    if files.remote:
        check_writable(location)
    if files.remote and names_file(location):
        raise ValueError(
            f"{show(location.shown)} has the suffix of a file, but max_shard_size= writes a folder of shards: pass a "
            f"folder such as {show(files.shown(files.split(path)[0]) + '/')}, or end the URL with a slash"
        )
    return _sink(files, path)


def sink_at(path: str, planned: Mapping[str, Any] | None, storage_options: Mapping[str, Any] | None) -> Sink:
    """Return the sink of a plan; see `files_at`."""
    return _sink(files_at(path, planned, storage_options), path)


def _sink(files: Files, path: str) -> Sink:
    if not files.remote:
        return DiskSink(files, path)
    from .store_sink import StoreSink  # only here: most destinations are local

    return StoreSink(files, path)


def check_writable(location: Location) -> None:
    """Refuse a read-only store."""
    from .store_sink import backend_of

    backend_of(location).check_writable(location.path)


def names_file(location: Location) -> bool:
    """Return True if a URL has the suffix of a weight file."""
    path = location.path
    suffix = "" if path.endswith("/") else os.path.splitext(path)[1].lower()
    return suffix in SUFFIXES or suffix in WEIGHT_SUFFIXES


def file_in_store(location: Location, *, overwrite: bool) -> tuple[StoreSink, str]:
    """Return the folder of a file to be written to a store, and its name there."""
    from .store_sink import StoreSink, is_file

    check_writable(location)
    parent, name = location.files.split(location.path)
    sink = StoreSink(location.files, parent)
    if not overwrite and is_file(location):
        raise FileExistsError(errno.EEXIST, EXISTS, location.shown)
    if name == SINGLE and is_file(sink.location / INDEX):
        message = f"The shards of {INDEX} beside it would be read instead: remove them, or choose a new folder"
        raise FileExistsError(errno.EEXIST, message, sink.shown(INDEX))
    return sink, name


# ---- files that must stay ----


def check_free(path: str, overwrite: bool) -> None:
    """Refuse an existing file before anything is read."""
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, EXISTS, path)


def refuse_inputs(path: Any, inputs: Iterable[Any], *, beside: Iterable[Any] = ()) -> None:
    """Refuse to write over a local file that is read, or that `_read_with` finds, whatever its spelling or links."""
    place = _local(path)
    if place is not None and not os.path.isfile(place):
        return
    for file in chain(inputs, () if place is None else _read_with(beside, os.stat(place).st_ino)):
        local = _local(file)
        with suppress(OSError):
            if isinstance(file, str) and file == path if place is None else local and os.path.samefile(place, local):
                raise ValueError(f"{path} would replace {file}, which is read: choose another path")


def _read_with(sources: Iterable[Any], inode: int) -> Iterator[str]:
    """Yield a file of this inode, and links, in a folder, beside an index, or as a document beside a weight file."""
    folders: dict[str, bool] = {}
    for source in filter(None, map(_local, sources)):
        folder, name = os.path.split(source)
        if os.path.isdir(source):
            folders[source] = True
        elif os.path.isfile(source) and (name.endswith(".index.json") or not _is_document(name)):
            folders[folder] = folders.get(folder, False) or name.endswith(".index.json")
    for folder, whole in folders.items():
        with os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                if (entry.inode() == inode or entry.is_symlink()) and (whole or _is_document(entry.name)):
                    yield os.path.join(folder, entry.name)


def _is_document(name: str) -> bool:
    return _DOCUMENTS.match(name) is not None and os.path.splitext(name)[1] not in WEIGHT_SUFFIXES


def _local(path: Any) -> str | None:
    """Return the path of a local file, also of a ``file://`` URL; None for anything else."""
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) and not hasattr(path, "fs") else "\0"
    if "\0" in text:
        return None
    if not urls.is_url(text):
        return text
    return urls.local_path(text) if urls.scheme_of(text) == "file" else None
