"""Find the destination of a conversion: a local path, or a folder in a store behind a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from ...base.paths import PathLike, native_path
from ...base.text import show
from ...formats.registry import SUFFIXES, WEIGHT_SUFFIXES
from ...stores import url as urls
from ...stores.files import LOCAL, Location
from ...stores.places import Located, places_of
from ..sources.piece_files import files_at
from .folder import Folder, LocalFolder
from .replacement import LocalReplacement, Replacement

# The destination of a conversion.
Destination: TypeAlias = PathLike | Located

# The default limit for shards in a store.
USUAL_SIZE = "5GB"

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
