"""What conversions write to: a path of this machine, or a folder in a store behind a URL."""

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

# What a conversion writes to.
Destination: TypeAlias = PathLike | Located

# Most bytes of a shard in a store where nothing else is said.
USUAL_SIZE = "5GB"

# What `pathlib` makes of a URL.
_PATH_OF_URL = re.compile(rf"({'|'.join(urls.PLAIN)}):[/\\](?![/\\])")


def where(dst: Destination, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Where a destination is. ``file://`` is this machine.

    Raises:
        TypeError, ValueError: not a path.
        UnsupportedError: a URL that needs ``storage_options``, or the network while it is forbidden.
    """
    (text,), files = places_of((dst,), storage_options)
    path_like = isinstance(dst, (str, os.PathLike))
    if not urls.is_url(text):
        if path_like and not isinstance(dst, str) and _PATH_OF_URL.match(text):
            url = urls.shown(_PATH_OF_URL.sub(r"\1://", text))
            raise ValueError(f"{show(url)}: pathlib drops a slash of URLs: pass the URL as a str")
        return Location(LOCAL, native_path(text)[0])
    if path_like and len(urls.links(text)) == 1 and urls.scheme_of(text) == "file":
        return Location(LOCAL, native_path(urls.local_path(text))[0])
    return Location(files, text)


def of(location: Location) -> Folder:
    """The folder at a path, as yet unseen.

    Raises:
        ValueError: a URL with the suffix of a file.
        UnsupportedError: a store that cannot be written to.
        FileNotFoundError: a repository that does not exist.
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
            f"{show(location.shown)} has the suffix of a file, and stores get folders of shards: pass a folder such as "
            f"{show(files.shown(files.split(path)[0]) + '/')}, with max_shard_size= for shards of another size than "
            f"{USUAL_SIZE}; or end the URL with a slash"
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
    """Return the policy that replaces the content of a folder."""
    if isinstance(folder, LocalFolder):
        return LocalReplacement(folder)
    from .store_folder import StoreFolder, StoreReplacement

    assert isinstance(folder, StoreFolder)
    return StoreReplacement(folder)
