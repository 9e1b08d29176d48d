"""Stores that the caller has opened: filesystems of fsspec, stores of obstore, and paths of either."""

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
from .foreign_errors import again, changed, cleaned, in_our_words, may_pass
from .options import secrets_of
from .remote import ForeignStore, RemoteStore, fill
from .remote_files import RemoteFiles
from .store import ByteStore, Span
from .thread_group import each

# Schemes of obstore's classes; another class gets its name.
_SCHEMES = {
    "S3Store": "s3", "GCSStore": "gs", "AzureStore": "az", "HTTPStore": "https", "LocalStore": "file",
    "MemoryStore": "memory",
}  # fmt: skip


def of_fsspec(fs: Any, path: str) -> Location:
    """A path in a filesystem of fsspec; see `safeload.remote.of_fsspec`."""
    needed = ("cat_file", "info", "ls", "_strip_protocol", "unstrip_protocol")
    if not all(hasattr(fs, name) for name in needed):
        raise TypeError(f"fs: expected a filesystem of fsspec, found {type(fs).__name__}")
    if not isinstance(path, str):
        raise TypeError(f"path: expected a str, found {type(path).__name__}")
    url = path if urls.is_url(path) else fs.unstrip_protocol(fs._strip_protocol(path))
    if urls.scheme_of(url) == "file" and is_escaped(fs):  # as `file://` URLs are, so that a pickle leads to the file
        url = escaped(url)
    # What a pickle carries of a cache leads to the files behind it.
    options = getattr(getattr(fs, "fs", fs), "storage_options", None)
    return Location(RemoteFiles(options if isinstance(options, Mapping) else {}, Filesystem(fs)), url)


def of_obstore(store: Any, path: str) -> Location:
    """A path in a store of obstore; see `safeload.remote.of_obstore`."""
    if not all(callable(getattr(store, name, None)) for name in ("get", "head", "list_with_delimiter")):
        raise TypeError(f"store: expected a store of obstore, found {type(store).__name__}")
    if not isinstance(path, str):
        raise TypeError(f"path: expected a str, found {type(path).__name__}")
    backend = Obstore(store)
    return Location(RemoteFiles(None, backend), backend.root + path.strip("/"))


def path_of(value: Any) -> Location:
    """What an object names that is neither a text nor a path of the local file system.

    Taken are a `Location`; objects with a filesystem of fsspec as ``fs`` and a path in it as ``path``
    (``fsspec.core.OpenFile``, universal_pathlib's ``UPath``); and stores with the members of `ByteStore`.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, Location):
        return value
    fs, path = getattr(value, "fs", None), getattr(value, "path", None)
    if isinstance(path, str) and hasattr(fs, "cat_file"):
        if getattr(value, "compression", None) is not None:
            raise UnsupportedError(f"{path}: a compressed file has no ranges: open it without compression=")
        return of_fsspec(fs, path)
    if callable(getattr(value, "read_into", None)) and hasattr(value, "size"):
        name = path if isinstance(path, str) else type(value).__name__
        return Location(RemoteFiles(None, Single(value)), name if urls.is_url(name) else f"store://{name}")
    raise TypeError(
        f"a path, a URL, a path of fsspec or a store (size, version, read_into, close) is wanted, "
        f"found {type(value).__name__}"
    )


class Single:
    """A store of the caller's as a `Backend`: whatever the URL, it is the file.

    Args:
        store: the caller's.
    """

    def __init__(self, store: ByteStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<{type(self._store).__name__}>"

    def open(self, url: str) -> RemoteStore:
        """See `Backend`."""
        return self._store if isinstance(self._store, RemoteStore) else ForeignStore(self._store, urls.shown(url))

    def is_folder(self, url: str) -> bool:
        """See `Backend`."""
        return False

    def listing(self, url: str) -> list[tuple[str, bool]]:
        """See `Backend`."""
        raise UnsupportedError(f"{urls.shown(url)}: a store of the caller's is one file, and lists no folder")

    def upload(self, source: str, url: str) -> None:
        """See `Backend`."""
        raise UnsupportedError(f"{urls.shown(url)}: a store of the caller's is only read")

    def remove(self, several: Sequence[str]) -> None:
        """See `Backend`."""
        self.check_writable(several[0])

    def check_writable(self, url: str) -> None:
        """See `Backend`."""
        raise UnsupportedError(f"{urls.shown(url)}: a store of the caller's is only read")


class Obstore:
    """A store of obstore as a `Backend`.

    Args:
        store: any object with obstore's methods ``get``, ``head``, ``list_with_delimiter`` and ``put``.

    Attributes:
        root: the URL of its root as messages show it.
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

    def open(self, url: str) -> ObstoreFile:
        """See `Backend`."""
        return ObstoreFile(self._store, self._place(url), url, self._secrets)

    def is_folder(self, url: str) -> bool:
        """See `Backend`."""
        found = self._list(url)
        return bool(found["objects"] or found["common_prefixes"]) or not self._place(url)

    def listing(self, url: str) -> list[tuple[str, bool]]:
        """See `Backend`."""
        found, here = self._list(url), self._place(url)
        names = [(item["path"], False) for item in found["objects"]] + [(p, True) for p in found["common_prefixes"]]
        return sorted((path.rstrip("/").rpartition("/")[2], folder) for path, folder in names if path != here)

    def _list(self, url: str) -> Mapping[str, Any]:
        place = self._place(url)
        found = checked_call(lambda: self._store.list_with_delimiter(place or None), url, self._secrets)
        return found if isinstance(found, Mapping) else {}

    def upload(self, source: str, url: str) -> None:
        """See `Backend`. obstore's ``put`` shows an object when all of it is there."""
        place = self._place(url)
        checked_call(lambda: self._store.put(place, Path(source)), url, self._secrets)

    def remove(self, several: Sequence[str]) -> None:
        """See `Backend`."""

        def remove_one(url: str) -> None:  # of a list it would not say which of them do not exist
            place = self._place(url)
            with suppress(FileNotFoundError):
                checked_call(lambda: self._store.delete(place), url, self._secrets)

        each(remove_one, several)

    def check_writable(self, url: str) -> None:
        """See `Backend`."""
        self._place(url)


class ObstoreFile(RemoteStore):
    """A file of a store of obstore. Each range lands in memory of its own, and says which version it is of.

    Args:
        store: the caller's.
        place: the path in it.
        url: as messages show it.
        secrets: texts that no message may have.
    """

    def __init__(self, store: Any, place: str, url: str, secrets: list[str]) -> None:
        super().__init__()
        self.path = url
        self._store, self._place, self._secrets, self._process = store, place, secrets, os.getpid()
        meta = checked_call(lambda: store.head(place), url, secrets)
        self.size = meta["size"]
        self._etag = meta.get("e_tag")
        self.version = _version(meta)
        log.debug("%s: opened by %s", url, type(store).__name__)

    def read_spans(self, spans: Sequence[Span]) -> None:
        """Fills spans, see `RemoteStore.read_spans`."""
        begin, end = spans[0].offset, spans[-1].end
        content = again(
            lambda: self._range(begin, end), self.path, self._secrets, begin, end, passing=_may_pass, words=_words
        )
        fill(spans, begin, content)

    def _range(self, begin: int, end: int) -> memoryview:
        check_process(self._process, self.path)
        options: dict[str, Any] = {"range": (begin, end)}
        if self._etag is not None and not self._etag.startswith("W/"):
            options["if_match"] = self._etag
        answer = self._store.get(self._place, options=options)
        if _version(answer.meta) != self.version:
            raise changed(self.path, self.size, answer.meta["size"])
        content = memoryview(answer.bytes())
        if len(content) != end - begin:
            raise RemoteError(f"{len(content):,} bytes came instead of {end - begin:,}", self.path, begin, end)
        return content


def _version(meta: Mapping[str, Any]) -> tuple[Any, ...]:
    found = meta.get("version") or meta.get("e_tag") or meta.get("last_modified")
    return meta["size"], None if found is None else str(found)


def check_process(process: int, url: str) -> None:
    """Refuses a fork: obstore's threads are not in it, and a read would wait for them for ever.

    Raises:
        UnsupportedError: this is another process than ``process``.
    """
    if os.getpid() != process:
        raise UnsupportedError(
            f"{url}: a forked process cannot use obstore: begin processes by spawn or forkserver, and open it there"
        )


def checked_call(function: Any, url: str, secrets: list[str]) -> Any:
    """Calls a function of obstore, with errors in our words."""
    try:
        return function()
    except Exception as error:
        ours = _words(error, url, secrets)
    try:
        raise ours
    finally:
        del ours  # which refers to this frame


def _words(
    error: Exception, url: str, secrets: list[str], begin: int | None = None, end: int | None = None
) -> Exception:
    if not type(error).__module__.startswith("obstore"):
        return in_our_words(error, url, secrets, begin, end)
    name = type(error).__name__
    said = cleaned(Exception(str(error).partition("\n\nDebug source")[0]), secrets)
    if name == "NotFoundError":
        return in_our_words(FileNotFoundError(), url, secrets)
    if name == "PreconditionError":
        return changed(url, 0)
    if name == "NotSupportedError":
        return UnsupportedError(f"{url}: {said}")
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return RemotePermissionError(f"the store refuses access: {said}", url, begin, end)
    return RemoteError(said, url, begin, end)


def _may_pass(error: Exception) -> bool:
    return not type(error).__module__.startswith("obstore") and may_pass(error)  # obstore has tried again itself
