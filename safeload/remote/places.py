"""Callers' paths: local paths, URLs, paths in a caller's filesystem or store, stores themselves, and file objects."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.files import LOCAL, Files, Located, Location
from ..core.text import PathLike, native_path, private_text, show
from . import url as urls

if TYPE_CHECKING:
    from .file_objects import FileObjects


def is_located(value: object) -> bool:
    """Return whether an object is a `Located`; it must not be a local path or an array."""
    if isinstance(value, Location) or is_file_object(value):
        return True
    members = ("fs", "path") if hasattr(value, "fs") else ("size", "version", "read_into", "close")
    return all(hasattr(value, name) for name in members)


def is_file_object(value: object) -> bool:
    """Return whether an object has ``read``, like an open file, and is not a store."""
    is_class = isinstance(value, type)
    return not is_class and callable(getattr(value, "read", None)) and not hasattr(value, "read_into")


def places_of(
    paths: Sequence[PathLike | Located], storage_options: Mapping[str, Any] | None = None
) -> tuple[list[str], Files]:
    """Return callers' paths as text, and their store."""
    texts: list[str] = []
    files: Files = LOCAL
    url_files: Files | None = None
    objects: FileObjects | None = None
    for path in paths:
        if isinstance(path, (str, bytes, bytearray, memoryview, os.PathLike)) and not hasattr(path, "fs"):
            text = path if isinstance(path, str) else native_path(path)[0]
            if not urls.is_url(text):
                texts.append(private_text(text))
                continue
            if "\0" in text:
                raise ValueError(f"embedded null byte in path {show(urls.shown(text))}")
            if url_files is None:
                from .remote_files import RemoteFiles  # only here: most paths are local

                url_files = RemoteFiles(storage_options)
            files = _common(files, url_files)
        elif is_file_object(path) and not _is_at_start(path):
            if objects is None:
                from .file_objects import FileObjects  # only here: most paths are local

                objects = FileObjects()
            files = _common(files, objects)
            text = objects.add(path)
        else:
            from .object_store import path_of

            location = path_of(path)
            files = _common(files, location.files)
            text = location.path
        texts.append(text)
    return texts, files


def _is_at_start(file: Any) -> bool:
    """Return whether a file object is open at the beginning of a file of fsspec, which its filesystem reads better."""
    of_filesystem = hasattr(getattr(file, "fs", None), "cat_file") and isinstance(getattr(file, "path", None), str)
    return of_filesystem and not getattr(file, "closed", False) and file.readable() and file.tell() == 0


def _common(known: Files, files: Files) -> Files:
    """Return the files behind all paths of a list; local paths may be mixed with paths of a single store."""
    if known is LOCAL or files is LOCAL or known is files:
        return files if known is LOCAL else known
    how = 'folder = safeload.remote.of_fsspec(fs, "models"), then [folder / "a.safetensors", folder / "b.safetensors"]'
    raise ValueError(f"the files of a list must be in one store: {how}")
