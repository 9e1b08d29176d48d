"""Paths in stores that the program has opened itself: filesystems of fsspec, stores of obstore.

URLs need none of this: ``safeload.open("s3://bucket/model.safetensors", storage_options={...})``.
"""

from __future__ import annotations

from typing import Any

from .stores.files import Location

__all__ = ["Location", "of_fsspec", "of_obstore"]


def of_fsspec(fs: Any, path: str) -> Location:
    """A file or folder in a filesystem of fsspec, for `safeload.open` and every function that takes a path.

    The filesystem keeps its credentials, caches and settings, and is used by several threads at once.

    Args:
        fs: the filesystem.
        path: in it, with or without its protocol.

    Returns:
        The path, which can be pickled: with what the filesystem's options have that names no one.

    Raises:
        ImportError: fsspec is not installed.
        TypeError: not a filesystem.

    Example:
        >>> import fsspec
        >>> import safeload.remote
        >>> memory = fsspec.filesystem("memory")
        >>> memory.put_file("model.safetensors", "/models/model.safetensors")
        >>> path = safeload.remote.of_fsspec(memory, "/models/model.safetensors")
        >>> path
        <Location memory:///models/model.safetensors>
        >>> path.files.open(path.path).size == memory.size("/models/model.safetensors")
        True
    """
    from .stores import object_store

    return object_store.of_fsspec(fs, path)


def of_obstore(store: Any, path: str) -> Location:
    """A file or folder in a store of obstore, for `safeload.open` and every function that takes a path.

    Each range is read with the ETag that the file had when it was opened. obstore's limits apply to a range, which has
    16 MiB at most: 30 seconds, and what its ``retry_config`` says.

    Args:
        store: such as ``obstore.store.S3Store``; any object with the methods ``get``, ``head``,
            ``list_with_delimiter`` and ``put`` of obstore's.
        path: in it, behind the prefix of the store if it has one.

    Returns:
        The path. It cannot be pickled.

    Raises:
        TypeError: not such a store.

    Example:
        >>> import safeload.remote
        >>> from obstore.store import LocalStore  # doctest: +SKIP
        >>> path = safeload.remote.of_obstore(LocalStore("models"), "model.safetensors")  # doctest: +SKIP
    """
    from .stores import object_store

    return object_store.of_obstore(store, path)
