"""What callers pass as a path: one of this machine, a URL, an object that leads to a file, or a store of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ..base.paths import PathLike, native_path
from .files import LOCAL, Files
from .store import ByteStore
from .url import is_url


@runtime_checkable
class RemotePath(Protocol):
    """A path in a file system that was opened elsewhere; made by the functions of `safeload.remote`."""

    @property
    def files(self) -> Files:
        """Where the path leads."""

    @property
    def path(self) -> str:
        """The path there."""


@runtime_checkable
class FilesystemPath(Protocol):
    """A path in a filesystem of fsspec: ``fsspec.core.OpenFile``, ``upath.UPath``."""

    @property
    def fs(self) -> Any:
        """The filesystem."""

    @property
    def path(self) -> str:
        """The path there."""


# What is opened that is no path.
Located: TypeAlias = RemotePath | FilesystemPath | ByteStore


def places_of(
    given: Sequence[PathLike | Located], storage_options: Mapping[str, Any] | None = None
) -> tuple[list[str], Files]:
    """Paths as texts, and where they lead.

    Args:
        given: what callers pass.
        storage_options: of the filesystems that URLs lead to.

    Raises:
        TypeError: not a path.
        ValueError: objects in different filesystems in one list; a path that contains a NUL.
    """
    texts: list[str] = []
    files: Files = LOCAL
    for one in given:
        if isinstance(one, (str, os.PathLike)) and not hasattr(one, "fs"):
            text = one if isinstance(one, str) and is_url(one) else native_path(one)[0]
            if is_url(text) and files is LOCAL:
                from .remote_files import RemoteFiles  # only here: most paths are local

                files = RemoteFiles(storage_options)
        else:
            if isinstance(one, RemotePath):
                text, found = one.path, one.files
            else:
                from .objects import place_of

                text, found = place_of(one)
            if len(given) > 1 and files not in (LOCAL, found):
                raise ValueError("a list of files that are objects must be of one filesystem")
            files = found
        texts.append(text)
    return texts, files
