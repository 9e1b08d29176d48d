"""Paths in stores that your program has already opened: fsspec filesystems and obstore stores.

URLs do not need this module: ``safeload.open("s3://bucket/model.safetensors", storage_options={...})``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.files import Location
from ..core.text import needed
from ..errors import public
from . import url as urls

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
    if not all(hasattr(fs, name) for name in ("cat_file", "info", "ls", "_strip_protocol", "unstrip_protocol")):
        raise TypeError(f"fs must be an fsspec filesystem, got {type(fs).__name__}")
    if not isinstance(path, str):
        raise TypeError(f"path must be a str, got {type(path).__name__}")
    needed("fsspec", "a filesystem needs fsspec")
    from .filesystem import Filesystem  # only here: it imports fsspec
    from .remote_files import RemoteFiles

    url = path if urls.is_url(path) else fs.unstrip_protocol(fs._strip_protocol(path))
    backend = Filesystem(fs)
    if urls.scheme_of(url) == "file" and backend.escapes:  # like `file://` URLs, so that a pickle leads to the file
        url = urls.escaped(url)
    # A pickle of a cache carries the options of the filesystem behind it.
    options = getattr(getattr(fs, "fs", fs), "storage_options", None)
    return Location(RemoteFiles(options if isinstance(options, Mapping) else {}, backend), url)


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
    if not all(callable(getattr(store, name, None)) for name in ("get", "head", "list_with_delimiter")):
        raise TypeError(f"store must be an obstore store, got {type(store).__name__}")
    if not isinstance(path, str):
        raise TypeError(f"path must be a str, got {type(path).__name__}")
    from .foreign import Obstore
    from .remote_files import RemoteFiles

    backend = Obstore(store)
    return Location(RemoteFiles(None, backend), backend.root + path.strip("/"))


def __dir__() -> list[str]:
    return __all__
