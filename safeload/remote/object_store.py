"""Callers' own stores: fsspec filesystems, obstore stores, and paths in either."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.files import WINDOW, ByteStore, Location
from ..core.text import needed
from ..core.thread_group import left_behind
from ..errors import UnsupportedError
from . import url as urls
from .foreign import ObjectStore, changed, checked, secrets_of
from .remote_files import RemoteFiles
from .remote_store import Backend, ForeignStore, RemoteStore, checked_size, digest_of, marks_of, strong_etag
from .url import escaped

# Schemes of obstore's classes; any other class uses its own name.
_SCHEMES = {
    "S3Store": "s3", "GCSStore": "gs", "AzureStore": "az", "HTTPStore": "https", "LocalStore": "file",
    "MemoryStore": "memory",
}  # fmt: skip
# A mark that is no ETag.
_DIGEST = re.compile(r"[0-9a-f]{64}")


def of_fsspec(fs: Any, path: str) -> Location:
    """Return a path in an fsspec filesystem; see `safeload.remote.of_fsspec`."""
    required = ("cat_file", "info", "ls", "_strip_protocol", "unstrip_protocol")
    if not all(hasattr(fs, name) for name in required):
        raise TypeError(f"fs must be an fsspec filesystem, got {type(fs).__name__}")
    if not isinstance(path, str):
        raise TypeError(f"path must be a str, got {type(path).__name__}")
    needed("fsspec", "a filesystem needs fsspec")
    from .filesystem import Filesystem  # only here: it imports fsspec

    url = path if urls.is_url(path) else fs.unstrip_protocol(fs._strip_protocol(path))
    backend = Filesystem(fs)
    if urls.scheme_of(url) == "file" and backend.escapes:  # like `file://` URLs, so that a pickle leads to the file
        url = escaped(url)
    # A pickle of a cache carries the options of the filesystem behind it.
    options = getattr(getattr(fs, "fs", fs), "storage_options", None)
    return Location(RemoteFiles(options if isinstance(options, Mapping) else {}, backend), url)


def of_obstore(store: Any, path: str) -> Location:
    """Return a path in an obstore store; see `safeload.remote.of_obstore`."""
    if not all(callable(getattr(store, name, None)) for name in ("get", "head", "list_with_delimiter")):
        raise TypeError(f"store must be an obstore store, got {type(store).__name__}")
    if not isinstance(path, str):
        raise TypeError(f"path must be a str, got {type(path).__name__}")
    backend = Obstore(store)
    return Location(RemoteFiles(None, backend), backend.root + path.strip("/"))


def path_of(value: Any) -> Location:
    """Return the location of a `Location`, a `FilesystemPath` or a `ByteStore`."""
    if isinstance(value, Location):
        return value
    fs, path = getattr(value, "fs", None), getattr(value, "path", None)
    if isinstance(path, str) and hasattr(fs, "cat_file"):
        if getattr(value, "compression", None) is not None:
            raise UnsupportedError(f"{path}: ranges of a compressed file cannot be read: open it without compression=")
        return of_fsspec(fs, path)
    if callable(getattr(value, "read_into", None)) and hasattr(value, "size"):
        name = path if isinstance(path, str) else type(value).__name__
        return Location(RemoteFiles(None, Single(value)), name if urls.is_url(name) else f"store://{name}")
    expected = "a path, URL, file object, fsspec path or store (size, version, read_into, close)"
    raise TypeError(f"expected {expected}, got {type(value).__name__}")


class Single(Backend):
    """A caller's store, which serves every URL."""

    no_folders, read_only = "a single store has no folders", "a single store is read-only"

    def __init__(self, store: ByteStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<{type(self._store).__name__}>"

    def open(self, url: str, window: int = WINDOW) -> RemoteStore:
        return self._store if isinstance(self._store, RemoteStore) else ForeignStore(self._store, urls.shown(url))


class Obstore(ObjectStore):
    """An obstore store, and its URLs; its calls run in threads of their own, because obstore waits for no signal."""

    proves = True

    def __init__(self, store: Any) -> None:
        self._store = store
        self.name = type(store).__name__
        config = getattr(store, "config", None)
        config = config if isinstance(config, Mapping) else {}
        scheme = _SCHEMES.get(self.name, self.name.lower())
        bucket = config.get("bucket") or config.get("container_name") or ""
        prefix = str(getattr(store, "prefix", None) or "").strip("/")
        where = "/".join(part for part in (bucket, prefix) if part)
        self.root = urls.shown(f"{scheme}://{'/' if scheme == 'file' else ''}{where}").rstrip("/") + "/"  # in messages
        if self.root.count("/") < 3:  # "memory:/"
            self.root = f"{scheme}://"
        self.secrets = secrets_of(config)
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Obstore {self.root}>"  # its configuration holds keys

    def place(self, url: str) -> str:
        self._check_process(url)
        if not f"{url}/".startswith(self.root):
            raise ValueError(f"{urls.shown(url)} is not in {self.root}")
        return url[len(self.root) :].strip("/")

    def entries(self, place: str, shown: str) -> Iterator[tuple[Any, bool]]:
        entries = self._ask(lambda: self._store.list_with_delimiter(place or None), shown)
        if isinstance(entries, Mapping):
            yield from ((entry["path"], False) for entry in entries["objects"])
            yield from ((prefix, True) for prefix in entries["common_prefixes"])

    def stat(self, place: str, shown: str) -> tuple[int, str | None]:
        return _version(self._ask(lambda: self._store.head(place), shown), shown)

    def read(self, place: str, shown: str, begin: int, end: int, version: tuple[Any, ...]) -> Any:
        options: dict[str, Any] = {"range": (begin, end)}
        if version[1] is not None and not _DIGEST.fullmatch(version[1]):
            options["if_match"] = version[1]

        def read() -> Any:
            self._check_process(shown)
            response = self._store.get(place, options=options)
            now = _version(response.meta, shown)
            if now != version:
                raise changed(shown, version[0], now[0])
            return response.bytes()

        return left_behind(read)

    def write(self, source: str, place: str, shown: str) -> None:
        self._ask(lambda: self._store.put(place, Path(source)), shown)  # visible only when it is complete

    def delete(self, place: str, shown: str, *, folder: bool) -> None:
        if not folder:
            self._ask(lambda: self._store.delete(place), shown)

    def _ask(self, function: Callable[[], Any], shown: str) -> Any:
        self._check_process(shown)
        return checked(lambda: left_behind(function), shown, self.secrets)

    def _check_process(self, shown: str) -> None:
        """Refuse a forked process: it lacks obstore's threads, and a read would wait forever."""
        if os.getpid() != self._process:
            advice = "start processes with spawn or forkserver, and open the store there"
            raise UnsupportedError(f"{urls.shown(shown)}: obstore does not work in a forked process: {advice}")


def _version(meta: Mapping[str, Any], shown: str) -> tuple[int, str | None]:
    return checked_size(meta.get("size"), shown), strong_etag(meta) or digest_of(marks_of(meta))
