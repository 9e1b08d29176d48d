"""Find the destination of a conversion: a local path, or a folder in a store behind a URL."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ...base import url as urls
from ...base.paths import PathLike, native_path
from ...base.text import show
from ...formats.folder import INDEX, SINGLE
from ...formats.registry import SAFETENSORS, SUFFIXES, WEIGHT_SUFFIXES
from ...stores.files import LOCAL, Location
from ...stores.places import Located, is_file_object, places_of
from ..sources.executors import files_at
from .folder import Folder, LocalFolder
from .replacement import LocalReplacement, Replacement

if TYPE_CHECKING:
    from ...stores.remote_files import RemoteFiles
    from .store_folder import StoreFolder

# The destination of a conversion.
Destination: TypeAlias = PathLike | Located

# The default limit for shards, in bytes.
USUAL_SIZE = 5_000_000_000

# A suffix begins with a letter: the names of models end in versions and sizes, such as "Qwen2.5-7B".
_SUFFIX = re.compile(r"\.(?:[a-z]\w*)?", re.ASCII)

# A URL as `pathlib` spells it.
_PATH_OF_URL = re.compile(rf"({'|'.join(urls.PLAIN)}):[/\\](?![/\\])")


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


def of(location: Location) -> Folder:
    """Return the destination folder at a location, without listing it."""
    files, path = location.files, location.path
    if not files.remote:
        return LocalFolder(path)
    from .store_folder import StoreFolder  # only here: most destinations are local

    files = check_writable(location)
    if names_file(location):
        raise ValueError(
            f"{show(location.shown)} has the suffix of a file, but max_shard_size= writes a folder of shards: pass a "
            f"folder such as {show(files.shown(files.split(path)[0]) + '/')}, or end the URL with a slash"
        )
    return StoreFolder(files, path)


def check_writable(location: Location) -> RemoteFiles:
    """Return the files of a store, and refuse a read-only store."""
    from ...stores.remote_files import RemoteFiles

    files = location.files
    assert isinstance(files, RemoteFiles)
    files.backend(location.path).check_writable(location.path)
    return files


def names_file(location: Location) -> bool:
    """Return True if a URL has the suffix of a weight file."""
    path = location.path
    suffix = "" if path.endswith("/") else os.path.splitext(path)[1].lower()
    return suffix in SUFFIXES or suffix in WEIGHT_SUFFIXES


def file_in_store(location: Location, *, overwrite: bool) -> tuple[StoreFolder, str]:
    """Return the folder of a file to be written to a store, and its name there."""
    from .store_folder import StoreFolder, is_file

    files = check_writable(location)
    parent, name = files.split(location.path)
    folder = StoreFolder(files, parent)
    if not overwrite and is_file(location):
        raise FileExistsError(errno.EEXIST, "File exists; pass overwrite=True to replace it", location.shown)
    if name == SINGLE and is_file(folder.location / INDEX):
        message = f"The shards of {INDEX} beside it would be read instead: remove them, or choose a new folder"
        raise FileExistsError(errno.EEXIST, message, folder.shown(INDEX))
    return folder, name


def folder_at(path: str, planned: Mapping[str, Any] | None, storage_options: Mapping[str, Any] | None) -> Folder:
    """Return the folder of a plan; see `files_at`."""
    files = files_at(path, planned, storage_options)
    if not files.remote:
        return LocalFolder(path)
    from ...stores.remote_files import RemoteFiles
    from .store_folder import StoreFolder

    assert isinstance(files, RemoteFiles)
    return StoreFolder(files, path)


def replacement_of(folder: Folder) -> Replacement:
    """Return the replacement policy of a folder."""
    if isinstance(folder, LocalFolder):
        return LocalReplacement(folder)
    from .store_folder import StoreFolder, StoreReplacement

    assert isinstance(folder, StoreFolder)
    return StoreReplacement(folder)
