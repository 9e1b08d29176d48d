"""Callers' paths: local paths, URLs, paths in a caller's filesystem or store, stores themselves, and file objects."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.files import LOCAL, Files, Located, Location
from ..core.text import PathLike, native_path, private_text, show
from . import url as urls


def is_located(value: object) -> bool:
    """Return whether an object is a `Located`; it must not be a local path or an array."""
    if isinstance(value, Location) or is_file_object(value):
        return True
    members = ("fs", "path") if hasattr(value, "fs") else ("size", "version", "read_into", "close")
    return all(hasattr(value, name) for name in members)


def is_file_object(value: object) -> bool:
    """Return whether an object has ``read``, like an open file, and is not a store."""
    return not isinstance(value, type) and callable(getattr(value, "read", None)) and not hasattr(value, "read_into")


def places_of(
    paths: Sequence[PathLike | Located], storage_options: Mapping[str, Any] | None
) -> tuple[list[str], Files]:
    """Return callers' paths as text, and their store."""
    texts: list[str] = []
    files: Files = LOCAL
    url_files = None
    objects = None
    for path in paths:
        if isinstance(path, (str, bytes, bytearray, memoryview, os.PathLike)) and not hasattr(path, "fs"):
            text = path if isinstance(path, str) else native_path(path)[0]
            if not urls.is_url(text):
                texts.append(private_text(text))
                continue
            if "\0" in text:
                raise ValueError(f"embedded null byte in path {show(urls.shown(text))}")
            from .remote_files import RemoteFiles  # only here, like those below: most paths are local

            url_files = url_files or RemoteFiles(storage_options)
            location = Location(url_files, text)
        elif is_file_object(path) and not _is_at_start(path):
            from .file_objects import FileObjects

            objects = objects or FileObjects()
            location = Location(objects, objects.add(path))
        else:
            from .remote_files import path_of

            location = path_of(path)
        texts.append(location.path)
        if files is LOCAL:
            files = location.files
        elif location.files not in (LOCAL, files):  # local paths may be mixed with paths of a single store
            text = 'folder = safeload.remote.of_fsspec(fs, "models"), then [folder / "a.safetensors", '
            raise ValueError(f'the files of a list must be in one store: {text}folder / "b.safetensors"]')
    return texts, files


def _is_at_start(file: Any) -> bool:
    """Return whether a file object is open at the beginning of a file of fsspec, which its filesystem reads better."""
    of_filesystem = hasattr(getattr(file, "fs", None), "cat_file") and isinstance(getattr(file, "path", None), str)
    return of_filesystem and not getattr(file, "closed", False) and file.readable() and file.tell() == 0
