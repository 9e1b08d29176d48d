"""Paths that are URLs: finds the store that a URL belongs to, and opens what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ..base.text import show
from ..base.url import divided
from ..errors import UnsupportedError
from . import url as urls
from .files import LOCAL
from .options import public_options
from .store import ByteStore
from .thread_group import each

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Backend(Protocol):
    """One kind of store, opened with the caller's options. URLs are the caller's, secrets included."""

    def open(self, url: str) -> ByteStore:
        """Opens a file: a `RemoteStore`, or a `LocalStore` where the file is on this machine.

        Raises:
            FileNotFoundError: there is none.
            RemoteError, OSError: it cannot be opened.
        """

    def is_folder(self, url: str) -> bool:
        """Whether there is a folder at a URL. Stores without folders say no."""

    def listing(self, url: str) -> list[tuple[str, bool]]:
        """Names in a folder, sorted, and whether each is a folder itself."""

    def upload(self, source: str, url: str) -> None:
        """Writes a local file to a URL, where it is seen when it is complete, or not at all.

        Raises:
            UnsupportedError: the store cannot be written to.
            RemoteError, OSError: it cannot be written.
        """

    def remove(self, several: Sequence[str]) -> None:
        """Removes files. Those that do not exist do no harm.

        Raises:
            UnsupportedError: the store cannot be written to.
            RemoteError, OSError: one of them cannot be removed.
        """

    def check_writable(self, url: str) -> None:
        """Refuses a folder that no file can be written into, as far as that is known before it is tried.

        Raises:
            UnsupportedError: the store cannot be written to.
            FileNotFoundError: what must exist before the folder does not, such as a repository.
            RemoteError, OSError: the store does not answer.
        """


class RemoteFiles:
    """The files behind URLs, and beside them those of this machine; see `Files`.

    Args:
        options: ``storage_options``; None if the caller has given none.
        backend: a store of the caller's, which all URLs belong to.
    """

    remote = True

    def __init__(self, options: Mapping[str, Any] | None = None, backend: Backend | None = None) -> None:
        if not isinstance(options, (Mapping, type(None))):
            raise TypeError(f"storage_options: expected a dict, found {type(options).__name__}")
        self._options = options
        self._backend = backend
        self._backends: dict[tuple[str, str], Backend] = {}
        # Whether marks in paths are data already, as in most stores of the caller's.
        self._literal = backend is not None and not getattr(backend, "escapes", False)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._backend is not None and self._options is None:
            raise TypeError(f"{self._backend!r} holds a store of this process: a pickle cannot carry it")
        return RemoteFiles, (public_options(self._options),)

    def public_options(self) -> dict[str, Any] | None:
        """See `Files`."""
        if self._backend is not None and self._options is None:
            raise UnsupportedError(
                f"{self._backend!r} is a store of this process: a plan cannot carry it, and workers cannot open it"
            )
        return public_options(self._options)

    def __repr__(self) -> str:
        return "<RemoteFiles>"  # options are secrets

    def backend(self, url: str) -> Backend:
        """The store that a URL belongs to."""
        scheme = urls.scheme_of(url)
        if self._backend is not None:
            urls.check_allowed(url, True)
            return self._backend
        found = self._backends.get(_key(url))
        if found is None:
            urls.check_allowed(url, self._options is not None)
            made = _backend(scheme, url, self._options or {})
            found = self._backends.setdefault(_key(url), made)
        return found

    def open(self, path: str) -> ByteStore:
        """See `Files`."""
        if not urls.is_url(path):
            return LOCAL.open(path)
        urls.check_no_page(path)
        return self.backend(path).open(path)

    def is_folder(self, path: str) -> bool:
        """See `Files`."""
        return self.backend(path).is_folder(path) if urls.is_url(path) else LOCAL.is_folder(path)

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        """See `Files`."""
        if not urls.is_url(folder):
            return LOCAL.listing(folder)
        found = self.backend(folder).listing(folder)
        return [(name, is_folder) for name, is_folder in found if not name.startswith(".")]

    def join(self, folder: str, name: str) -> str:
        """See `Files`."""
        if not urls.is_url(folder):
            return LOCAL.join(folder, name)
        try:
            return urls.join(folder, name, self._literal)
        except urls.UrlError as error:
            raise UnsupportedError(f"{urls.shown(folder)}: {show(name)}: {error}") from None

    def split(self, path: str) -> tuple[str, str]:
        """See `Files`."""
        return urls.split(path, self._literal) if urls.is_url(path) else LOCAL.split(path)

    def absolute(self, path: str) -> str:
        """See `Files`."""
        return path if urls.is_url(path) else LOCAL.absolute(path)

    def shown(self, path: str) -> str:
        """See `Files`."""
        return urls.shown(path) if urls.is_url(path) else path

    def public(self, path: str) -> str:
        """See `Files`."""
        if not urls.is_url(path):
            return LOCAL.public(path)
        pinned = getattr(self._backend or self._backends.get(_key(path)), "pinned", None)  # a revision of the Hub
        return urls.public(path if pinned is None else pinned(path))

    def check_unchanged(self, path: str, seen: tuple[Any, ...]) -> None:
        """See `Files`: nothing can be told without a request, but opening compares."""
        if not urls.is_url(path):
            LOCAL.check_unchanged(path, seen)

    def each(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """See `Files`."""
        return each(function, items)

    # ---- writing ----

    def upload(self, source: str, url: str) -> None:
        """See `Backend`."""
        self.backend(url).upload(source, url)

    def remove(self, several: Sequence[str]) -> None:
        """See `Backend`; all of the URLs are in one store."""
        if several:
            self.backend(several[0]).remove(several)

    def check_writable(self, url: str) -> None:
        """See `Backend`."""
        self.backend(url).check_writable(url)


def _key(url: str) -> tuple[str, str]:
    """What has a backend of its own: each host, as a redirect or a key of one store concerns no other."""
    scheme, link = urls.scheme_of(url), divided(url)
    return scheme, (link.place or "").lower() if scheme in ("http", "https") else ""


def _backend(scheme: str, url: str, options: Mapping[str, Any]) -> Backend:
    chained = len(urls.links(url)) > 1
    if not chained and scheme in ("http", "https"):
        from .http import Web

        return Web(options)
    if not chained and scheme == "hf":
        from .hub import Hub

        return Hub(options)
    if "::" not in url and scheme == "file":
        from .filesystem import LocalUrls

        return LocalUrls()
    from .filesystem import Filesystem

    return Filesystem.of_url(url, options)
