"""Find the destination of a conversion: a local path, or a folder in a store behind a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from ...base.paths import PathLike, native_path
from ...base.text import show
from ...formats.registry import SAFETENSORS, SUFFIXES, WEIGHT_SUFFIXES
from ...stores import url as urls
from ...stores.files import LOCAL, Location
from ...stores.places import Located, places_of
from ..sources.piece_files import files_at
from .folder import Folder, LocalFolder
from .replacement import LocalReplacement, Replacement

# The destination of a conversion.
Destination: TypeAlias = PathLike | Located

# The default limit for shards.
USUAL_SIZE = "5GB"

# A suffix begins with a letter: the names of models end in versions and sizes, such as "Qwen2.5-7B".
_SUFFIX = re.compile(r"\.(?:[a-z]\w*)?", re.ASCII)

# A URL as `pathlib` spells it.
_PATH_OF_URL = re.compile(rf"({'|'.join(urls.PLAIN)}):[/\\](?![/\\])")


def where(dst: Destination, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Return the location of a destination. ``file://`` URLs are local.

    Raises:
        TypeError, ValueError: ``dst`` is not a path.
        UnsupportedError: the URL needs ``storage_options``, or the network is forbidden.
    """
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
    """Return True if a destination is a folder: a URL, an existing folder, or a path with a final slash or no suffix.

    Args:
        format: the requested format; a format other than safetensors is written to a file without a suffix.
    """
    path = location.path
    if location.files.remote or os.path.isdir(path) or not os.path.basename(path):
        return True
    suffix = os.path.splitext(path)[1].lower()
    named = suffix in WEIGHT_SUFFIXES or suffix in SUFFIXES or _SUFFIX.fullmatch(suffix) is not None
    return not named and format in (None, SAFETENSORS)


def of(location: Location) -> Folder:
    """Return the destination folder at a location, without listing it.

    Raises:
        ValueError: a URL has the suffix of a file.
        UnsupportedError: the store is read-only.
        FileNotFoundError: the repository does not exist.
    """
    files, path = location.files, location.path
    if not files.remote:
        return LocalFolder(path)
    from ...stores.remote_files import RemoteFiles  # only here: most destinations are local
    from .store_folder import StoreFolder

    assert isinstance(files, RemoteFiles)
    files.backend(path).check_writable(path)
    suffix = "" if path.endswith("/") else os.path.splitext(path)[1].lower()
    if suffix in SUFFIXES or suffix in WEIGHT_SUFFIXES:
        raise ValueError(
            f"{show(location.shown)} has the suffix of a file, but stores get folders of shards: pass a folder such as "
            f"{show(files.shown(files.split(path)[0]) + '/')}, or end the URL with a slash; max_shard_size= changes "
            f"the size of shards ({USUAL_SIZE})"
        )
    return StoreFolder(files, path)


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
