"""What callers pass as a path: one of this machine, a URL, a path in a store of theirs, a store of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ..base.paths import PathLike, native_path
from ..base.text import show
from . import url as urls
from .files import LOCAL, Files, Location
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
Located: TypeAlias = Location | FilesystemPath | ByteStore


def is_located(given: object) -> bool:
    """Whether an object, neither a path of this machine nor an array, is a `Located`."""
    if isinstance(given, Location):
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
        ValueError: files of several stores in a list, or URLs beside those of a store of the caller's; a path that
            contains a NUL.
    """
    texts: list[str] = []
    files: Files = LOCAL
    own: Files | None = None  # of URLs
    for one in given:
        if isinstance(one, (str, bytes, bytearray, memoryview, os.PathLike)) and not hasattr(one, "fs"):
            text = one if isinstance(one, str) else native_path(one)[0]
            if not urls.is_url(text):
                texts.append(native_path(text)[0])
                continue
            if "\0" in text:
                raise ValueError(f"embedded null byte in path {show(urls.shown(text))}")
            if own is None:
                from .remote_files import RemoteFiles  # only here: most paths are local

                own = RemoteFiles(storage_options)
            files = _same(files, own)
            texts.append(text)
        else:
            from .object_store import path_of

            place = path_of(one)
            files = _same(files, place.files)
            texts.append(place.path)
    return texts, files


def _same(known: Files, files: Files) -> Files:
    """Where all paths of a list lead; those of this machine may be beside others."""
    if known is LOCAL or files is LOCAL or known is files:
        return files if known is LOCAL else known
    raise ValueError(
        'the files of a list must be in one store: folder = safeload.remote.of_fsspec(fs, "models"), then '
        '[folder / "a.safetensors", folder / "b.safetensors"]'
    )
