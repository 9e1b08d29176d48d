"""Callers' own stores: fsspec filesystems, obstore stores, and paths in either."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..base import log
from ..base.url import escaped
from ..errors import RemoteError, RemotePermissionError, UnsupportedError
from . import url as urls
from .files import Location
from .filesystem import Filesystem, is_escaped
from .foreign_errors import changed, cleaned, is_transient, retried, translated
from .options import secrets_of
from .remote import (
    ForeignStore,
    RemoteStore,
    checked_name,
    checked_size,
    digest_of,
    fill,
    is_weak,
    marks_of,
    strong_etag,
)
from .remote_files import RemoteFiles
from .stop import left_behind
from .store import WINDOW, ByteStore, Span
from .thread_group import each

# Schemes of obstore's classes; any other class uses its own name.
_SCHEMES = {
    "S3Store": "s3", "GCSStore": "gs", "AzureStore": "az", "HTTPStore": "https", "LocalStore": "file",
    "MemoryStore": "memory",
}  # fmt: skip


def of_fsspec(fs: Any, path: str) -> Location:
    """Return a path in an fsspec filesystem; see `safeload.remote.of_fsspec`."""
    required = ("cat_file", "info", "ls", "_strip_protocol", "unstrip_protocol")
    if not all(hasattr(fs, name) for name in required):
        raise TypeError(f"fs must be an fsspec filesystem, got {type(fs).__name__}")
    if not isinstance(path, str):
        raise TypeError(f"path must be a str, got {type(path).__name__}")
    url = path if urls.is_url(path) else fs.unstrip_protocol(fs._strip_protocol(path))
    if urls.scheme_of(url) == "file" and is_escaped(fs):  # like `file://` URLs, so that a pickle leads to the file
        url = escaped(url)
    # A pickle of a cache carries the options of the filesystem behind it.
    options = getattr(getattr(fs, "fs", fs), "storage_options", None)
    return Location(RemoteFiles(options if isinstance(options, Mapping) else {}, Filesystem(fs)), url)


def of_obstore(store: Any, path: str) -> Location:
    """Return a path in an obstore store; see `safeload.remote.of_obstore`."""
    if not all(callable(getattr(store, name, None)) for name in ("get", "head", "list_with_delimiter")):
        raise TypeError(f"store must be an obstore store, got {type(store).__name__}")
    if not isinstance(path, str):
        raise TypeError(f"path must be a str, got {type(path).__name__}")
    backend = Obstore(store)
    return Location(RemoteFiles(None, backend), backend.root + path.strip("/"))


def path_of(value: Any) -> Location:
    """Return the location of an object other than a str or a local path.

    Accepts a `Location`; objects with an fsspec filesystem as ``fs`` and a path as ``path`` (``fsspec.core.OpenFile``,
    universal_pathlib's ``UPath``); and stores with the members of `ByteStore`.
    """
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
    raise TypeError(
        "expected a path, URL, file object, fsspec path or store (size, version, read_into, close), got "
        f"{type(value).__name__}"
    )


class Single:
    """A caller's store as a `Backend`, which serves every URL."""

    def __init__(self, store: ByteStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<{type(self._store).__name__}>"

    def open(self, url: str, window: int = WINDOW) -> RemoteStore:
        return self._store if isinstance(self._store, RemoteStore) else ForeignStore(self._store, urls.shown(url))

    def is_folder(self, url: str) -> bool:
        return False

    def listing(self, url: str) -> list[tuple[str, bool]]:
        raise UnsupportedError(f"{urls.shown(url)}: a single store has no folders")

    def upload(self, source: str, url: str) -> None:
        self.check_writable(url)

    def remove(self, targets: Sequence[str]) -> None:
        self.check_writable(targets[0])

    def check_writable(self, url: str) -> None:
        raise UnsupportedError(f"{urls.shown(url)}: a single store is read-only")


class Obstore:
    """An obstore store as a `Backend`.

    Attributes:
        root: the root's URL in messages
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        config = getattr(store, "config", None)
        config = config if isinstance(config, Mapping) else {}
        scheme = _SCHEMES.get(type(store).__name__, type(store).__name__.lower())
        bucket = config.get("bucket") or config.get("container_name") or ""
        prefix = str(getattr(store, "prefix", None) or "").strip("/")
        where = "/".join(part for part in (bucket, prefix) if part)
        self.root = urls.shown(f"{scheme}://{'/' if scheme == 'file' else ''}{where}").rstrip("/") + "/"
        if self.root.count("/") < 3:  # "memory:/"
            self.root = f"{scheme}://"
        self._secrets = secrets_of(config)
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Obstore {self.root}>"  # its configuration holds keys

    def _place(self, url: str) -> str:
        check_process(self._process, url)
        if not f"{url}/".startswith(self.root):
            raise ValueError(f"{urls.shown(url)} is not in {self.root}")
        return url[len(self.root) :].strip("/")

    def open(self, url: str, window: int = WINDOW) -> ObstoreFile:
        return ObstoreFile(self._store, self._place(url), url, self._secrets, window=window)

    def is_folder(self, url: str) -> bool:
        entries = self._list(url)
        return bool(entries["objects"] or entries["common_prefixes"]) or not self._place(url)

    def listing(self, url: str) -> list[tuple[str, bool]]:
        entries, folder, shown = self._list(url), self._place(url), urls.shown(url)
        paths = [(entry["path"], False) for entry in entries["objects"]]
        paths += [(prefix, True) for prefix in entries["common_prefixes"]]
        return sorted((checked_name(path, shown), is_folder) for path, is_folder in paths if path != folder)

    def _list(self, url: str) -> Mapping[str, Any]:
        place = self._place(url)
        entries = checked_call(lambda: self._store.list_with_delimiter(place or None), url, self._secrets)
        return entries if isinstance(entries, Mapping) else {}

    def upload(self, source: str, url: str) -> None:
        """Upload a file; obstore's ``put`` makes an object visible only when it is complete."""
        place = self._place(url)
        checked_call(lambda: self._store.put(place, Path(source)), url, self._secrets)

    def remove(self, targets: Sequence[str]) -> None:
        def remove_one(url: str) -> None:  # for a list, obstore would not report which objects do not exist
            place = self._place(url)
            with suppress(FileNotFoundError):
                checked_call(lambda: self._store.delete(place), url, self._secrets)

        each(remove_one, [url for url in targets if not url.endswith("/")])

    def check_writable(self, url: str) -> None:
        self._place(url)


class ObstoreFile(RemoteStore):
    """A file of an obstore store. Each range arrives in its own buffer, with the version it belongs to."""

    def __init__(self, store: Any, place: str, url: str, secrets: list[str], *, window: int = WINDOW) -> None:
        super().__init__(window)
        self.path = url
        self._store, self._place, self._secrets, self._process = store, place, secrets, os.getpid()
        meta = checked_call(lambda: store.head(place), url, secrets)
        self.version = _version(meta, url)
        self.size: int = self.version[0]
        self._etag = meta.get("e_tag")
        log.debug("%s: opened by %s", url, type(store).__name__)

    def read_spans(self, spans: Sequence[Span]) -> None:
        begin, end = spans[0].offset, spans[-1].end
        content = retried(
            lambda: left_behind(lambda: self._range(begin, end)),
            self.path,
            self._secrets,
            begin,
            end,
            transient=_is_transient,
            translate=_translated,
        )
        fill(spans, begin, content)

    def _range(self, begin: int, end: int) -> memoryview:
        check_process(self._process, self.path)
        options: dict[str, Any] = {"range": (begin, end)}
        if self._etag is not None and not is_weak(self._etag):
            options["if_match"] = self._etag
        response = self._store.get(self._place, options=options)
        version = _version(response.meta, self.path)
        if version != self.version:
            raise changed(self.path, self.size, version[0])
        content = memoryview(response.bytes())
        if len(content) != end - begin:
            raise RemoteError(f"expected {end - begin:,} bytes, got {len(content):,}", self.path, begin, end)
        return content


def _version(meta: Mapping[str, Any], url: str) -> tuple[Any, ...]:
    return checked_size(meta.get("size"), url), strong_etag(meta) or digest_of(marks_of(meta))


def check_process(process: int, url: str) -> None:
    """Refuse a forked process: it lacks obstore's threads, and a read would wait forever."""
    if os.getpid() != process:
        raise UnsupportedError(
            f"{url}: obstore does not work in a forked process: start processes with spawn or forkserver, and open the "
            "store there"
        )


def checked_call(function: Any, url: str, secrets: list[str]) -> Any:
    """Call a function of obstore, which Ctrl-C would not interrupt, translating its errors."""
    try:
        return left_behind(function)
    except Exception as error:
        translation = _translated(error, url, secrets)
    try:
        raise translation
    finally:
        del translation  # it refers to this frame


def _translated(
    error: Exception, url: str, secrets: list[str], begin: int | None = None, end: int | None = None
) -> Exception:
    if not type(error).__module__.startswith("obstore"):
        return translated(error, url, secrets, begin, end)
    name = type(error).__name__
    text = cleaned(Exception(str(error).partition("\n\nDebug source")[0]), secrets)
    if name == "NotFoundError":
        return translated(FileNotFoundError(), url, secrets)
    if name == "PreconditionError":
        return changed(url, 0)
    if name == "NotSupportedError":
        return UnsupportedError(f"{url}: {text}")
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return RemotePermissionError(f"the store refuses access: {text}", url, begin, end)
    return RemoteError(text, url, begin, end)


def _is_transient(error: Exception) -> bool:
    return not type(error).__module__.startswith("obstore") and is_transient(error)  # obstore itself has retried
