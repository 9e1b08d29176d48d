"""What callers pass as a path: one of this machine, a URL, a path in a store of theirs, a store of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ..base.paths import PathLike, native_path
from . import url as urls
from .files import LOCAL, Files
from .remote_path import RemotePath
from .store import ByteStore


class FilesystemPath(Protocol):
    """A path in a filesystem of fsspec: ``fsspec.core.OpenFile``, universal_pathlib's ``UPath``."""

    @property
    def fs(self) -> Any:
        """The filesystem."""

    @property
    def path(self) -> str:
        """The path there."""


# What is opened beside paths of this machine and URLs.
Located: TypeAlias = RemotePath | FilesystemPath | ByteStore


def is_located(given: object) -> bool:
    """Whether an object, neither a path of this machine nor an array, is a `Located`."""
    if isinstance(given, RemotePath):
        return True
    members = ("fs", "path") if hasattr(given, "fs") else ("size", "version", "read_into", "close")
    return all(hasattr(given, name) for name in members)


def places_of(
    given: Sequence[PathLike | Located], storage_options: Mapping[str, Any] | None = None
) -> tuple[list[str], Files]:
    """Paths as texts, and where they lead.

    Args:
        given: what callers pass.
        storage_options: of the filesystems that URLs lead to.

    Raises:
        TypeError: not a path.
        ValueError: objects beside others in a list; a path that contains a NUL.
    """
    texts: list[str] = []
    files: Files = LOCAL
    for one in given:
        if isinstance(one, str) and urls.is_url(one):
            if files is LOCAL:
                from .remote_files import RemoteFiles  # only here: most paths are local

                files = RemoteFiles(storage_options)
            texts.append(one)
        elif isinstance(one, (str, bytes, bytearray, memoryview, os.PathLike)) and not hasattr(one, "fs"):
            texts.append(native_path(one)[0])
        else:
            from .objects import path_of

            place = path_of(one)
            if texts and place.files is not files:
                raise ValueError(
                    'the files of a list must be in one store: folder = safeload.remote.of_fsspec(fs, "models"), then '
                    '[folder / "a.safetensors", folder / "b.safetensors"]'
                )
            files = place.files
            texts.append(place.path)
    return texts, files
