"""Paths in stores that your program has already opened: fsspec filesystems and obstore stores.

URLs do not need this module: ``safeload.open("s3://bucket/model.safetensors", storage_options={...})``.
"""

from __future__ import annotations

from typing import Any

from ..core.files import Location
from ..errors import public

__all__ = ["Location", "of_fsspec", "of_obstore"]


@public
def of_fsspec(fs: Any, path: str) -> Location:
    """Return a file or folder in an fsspec filesystem, for `safeload.open` and every function that takes a path.

    The filesystem keeps its credentials, caches and settings. Several threads use it at once.

    Args:
        fs: the filesystem.
        path: in the filesystem, with or without its protocol.

    Returns:
        The path. It pickles with the filesystem's options, except for credentials.

    Raises:
        ImportError: fsspec is not installed.
        TypeError: ``fs`` is not a filesystem.

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
    from . import object_store

    return object_store.of_fsspec(fs, path)


@public
def of_obstore(store: Any, path: str) -> Location:
    """Return a file or folder in an obstore store, for `safeload.open` and every function that takes a path.

    Each range is requested with the ETag the file had when it was opened. A range has at most 16 MiB, and obstore's
    limits apply to it: 30 seconds, and the store's ``retry_config``.

    Args:
        store: such as ``obstore.store.S3Store``, or any object with obstore's methods ``get``, ``head``,
            ``list_with_delimiter`` and ``put``.
        path: in the store, after the store's prefix if it has one.

    Returns:
        The path. It cannot be pickled.

    Raises:
        TypeError: ``store`` is not such a store.

    Example:
        >>> import safeload.remote
        >>> from obstore.store import LocalStore  # doctest: +SKIP
        >>> path = safeload.remote.of_obstore(LocalStore("models"), "model.safetensors")  # doctest: +SKIP
    """
    from . import object_store

    return object_store.of_obstore(store, path)


def __dir__() -> list[str]:
    return __all__
