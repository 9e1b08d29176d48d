"""Files behind URLs: finds the backend of a URL, and opens files there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..core.files import LOCAL, WINDOW, ByteStore, Files, LocalStore, Location, open_local
from ..core.text import needed, show
from ..errors import UnsupportedError, missing_file
from . import of_fsspec
from . import url as urls
from .foreign import Single, copy_whole, public_options
from .remote_store import Backend


class RemoteFiles(Files):
    """The files behind URLs, and local files too."""

    remote = waits = True

    def __init__(self, options: Mapping[str, Any] | None = None, backend: Backend | None = None) -> None:
        if not isinstance(options, (Mapping, type(None))):
            raise TypeError(f"storage_options must be a dict, got {type(options).__name__}")
        self._options = options
        self._backend = backend
        self._backends: dict[object, Backend] = {}
        # Whether paths are literal, so that marks such as "%" are data, as in most stores of callers.
        self._literal = backend is not None and not backend.escapes

    def __reduce__(self) -> tuple[Any, ...]:
        if self._backend is not None and self._options is None:
            raise TypeError(f"{self._backend!r} holds an open store and cannot be pickled")
        return RemoteFiles, (public_options(self._options),)

    def backend(self, url: str) -> Backend:
        urls.check_allowed(url, self._backend is not None or self._options is not None)
        if self._backend is not None:
            return self._backend
        key, make = _store_of(url, self._options or {})
        backend = self._backends.get(key)
        return self._backends.setdefault(key, make()) if backend is None else backend

    def is_local(self, path: str) -> bool:
        return not urls.is_url(path)

    def open(self, path: str, window: int = WINDOW) -> ByteStore:
        if not urls.is_url(path):
            return super().open(path)
        urls.check_no_page(path)
        return self.backend(path).open(path, window)

    def is_folder(self, path: str) -> bool:
        return self.backend(path).is_folder(path) if urls.is_url(path) else super().is_folder(path)

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        if not urls.is_url(folder):
            return super().listing(folder)
        entries = self.backend(folder).listing(folder)
        return [(name, is_folder) for name, is_folder in entries if not name.startswith(".")]

    # ---- paths as text ----

    def join(self, folder: str, name: str) -> str:
        if not urls.is_url(folder):
            return super().join(folder, name)
        try:
            return urls.join(folder, name, self._literal)
        except urls.UrlError as error:
            raise UnsupportedError(f"{urls.shown(folder)}: {show(name)}: {error}") from None

    def split(self, path: str) -> tuple[str, str]:
        return urls.split(path, self._literal) if urls.is_url(path) else super().split(path)

    def shown(self, path: str) -> str:
        return urls.shown(path) if urls.is_url(path) else path

    def public(self, path: str) -> str:
        if not urls.is_url(path):
            return super().public(path)
        backend = self._backend or self._backends.get(urls.scheme_of(path))  # the only one by scheme that pins: the Hub
        return urls.public(path if backend is None else backend.pinned(path))

    def public_options(self) -> dict[str, Any] | None:
        if self._backend is not None and self._options is None:
            text = "holds an open store: a plan cannot include it, and workers cannot open it"
            raise UnsupportedError(f"{self._backend!r} {text}")
        return public_options(self._options)


def _store_of(url: str, options: Mapping[str, Any]) -> tuple[object, Callable[[], Backend]]:
    """Return a key of a URL's store, and what makes its backend; hosts share no redirects or credentials."""
    scheme, chained = urls.scheme_of(url), len(urls.links(url)) > 1
    if not chained and scheme in ("http", "https", "hf"):
        version = needed("urllib3", "http, https and hf URLs need urllib3").__version__
        if [*map(int, re.findall(r"\d+", version)[:2])] < [2, 3]:
            text = f"http, https and hf URLs need urllib3 2.3 or later, but {version} is installed"
            raise UnsupportedError(f"{text}: pip install -U urllib3")
        if scheme == "hf":
            from .hub import Hub

            return scheme, lambda: Hub(options)
        from .http import Web

        return (scheme, (urls.divided(url).place or "").lower()), lambda: Web(options)
    if "::" not in url and scheme == "file":
        return scheme, LocalUrls
    needed("fsspec", f"{urls.shown(url)} needs fsspec")
    from .filesystem import Filesystem, key_of

    return key_of(url), lambda: Filesystem.of(url, options)


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


class LocalUrls(Backend):
    """``file://`` URLs."""

    def open(self, url: str, window: int = WINDOW) -> LocalStore:
        shown = urls.shown(url)
        try:
            return open_local(urls.local_path(url), shown=shown)
        except FileNotFoundError:
            raise missing_file(shown, f"No such file or directory: {shown}") from None

    def is_folder(self, url: str) -> bool:
        return LOCAL.is_folder(urls.local_path(url))

    def listing(self, url: str) -> list[tuple[str, bool]]:
        return LOCAL.listing(urls.local_path(url))

    def upload(self, source: str, url: str) -> None:
        copy_whole(source, urls.local_path(url))

    def remove(self, targets: Sequence[str]) -> None:
        for url in targets:
            is_folder = url.endswith("/")
            with suppress(OSError if is_folder else FileNotFoundError):  # a folder may be missing, or have files
                (os.rmdir if is_folder else os.remove)(urls.local_path(url))
