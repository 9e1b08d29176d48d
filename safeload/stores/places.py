"""Callers' paths: local paths, URLs, paths in a caller's filesystem or store, and stores themselves."""

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
    """A path in an fsspec filesystem: ``fsspec.core.OpenFile``, universal_pathlib's ``UPath``."""

    @property
    def fs(self) -> Any:
        """The filesystem."""

    @property
    def path(self) -> str:
        """The path in it."""


# Valid arguments besides local paths and URLs.
Located: TypeAlias = Location | FilesystemPath | ByteStore


def is_located(value: object) -> bool:
    """Return whether an object is a `Located`; it must not be a local path or an array."""
    if isinstance(value, Location):
        return True
    members = ("fs", "path") if hasattr(value, "fs") else ("size", "version", "read_into", "close")
    return all(hasattr(value, name) for name in members)


def places_of(
    paths: Sequence[PathLike | Located], storage_options: Mapping[str, Any] | None = None
) -> tuple[list[str], Files]:
    """Return callers' paths as text, and their store.

    Args:
        storage_options: for the filesystems of URLs.

    Raises:
        TypeError: not a path.
        ValueError: a list with files of several stores, or with URLs beside a caller's store; a path with a NUL.
    """
    texts: list[str] = []
    files: Files = LOCAL
    url_files: Files | None = None
    for path in paths:
        if isinstance(path, (str, bytes, bytearray, memoryview, os.PathLike)) and not hasattr(path, "fs"):
            text = path if isinstance(path, str) else native_path(path)[0]
            if not urls.is_url(text):
                texts.append(native_path(text)[0])
                continue
            if "\0" in text:
                raise ValueError(f"embedded null byte in path {show(urls.shown(text))}")
            if url_files is None:
                from .remote_files import RemoteFiles  # only here: most paths are local

                url_files = RemoteFiles(storage_options)
            files = _common(files, url_files)
            texts.append(text)
        else:
            from .object_store import path_of

            location = path_of(path)
            files = _common(files, location.files)
            texts.append(location.path)
    return texts, files


def _common(known: Files, files: Files) -> Files:
    """Return the files behind all paths of a list; local paths may be mixed with paths of a single store."""
    if known is LOCAL or files is LOCAL or known is files:
        return files if known is LOCAL else known
    raise ValueError(
        'the files of a list must be in one store: folder = safeload.remote.of_fsspec(fs, "models"), then '
        '[folder / "a.safetensors", folder / "b.safetensors"]'
    )
