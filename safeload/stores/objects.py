"""Object stores as backends, by five calls: entries, stat, read, write and delete; and ``file://`` URLs."""

from __future__ import annotations

import os
import secrets
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..base import log
from ..base import url as urls
from ..errors import RemoteError, UnsupportedError, missing_file
from .files import LOCAL
from .foreign_errors import TRIES, changed, checked, translated
from .local import LocalStore, open_local, replace
from .remote import Backend, RemoteStore, checked_name
from .store import WINDOW, ByteStore
from .thread_group import each


class ObjectStore(Backend):
    """An object store behind URLs, by five calls: entries, stat, read, write and delete.

    Ctrl-C and the stop of the thread end each call; errors are safeload's.
    """

    name: str  # of the library's class
    secrets: list[str]  # for messages
    proves = False  # True if every `read` checks the version

    @abstractmethod
    def place(self, url: str) -> str:
        """Return the place of a URL in the store."""

    def writable(self, url: str) -> tuple[ObjectStore, str]:
        """Return the store and the place to write a URL, or refuse a store that cannot be written."""
        return self, self.place(url)

    @abstractmethod
    def entries(self, place: str, shown: str) -> Iterable[tuple[Any, bool]]:
        """Return the paths in a folder, and whether each is a folder; the folder itself may be among them."""

    @abstractmethod
    def stat(self, place: str, shown: str) -> tuple[int, str | None]:
        """Return the size of a file and a mark of its content."""

    @abstractmethod
    def read(self, place: str, shown: str, begin: int, end: int, version: tuple[Any, ...]) -> Any:
        """Return the bytes of a range; its errors are not translated yet."""

    @abstractmethod
    def write(self, source: str, place: str, shown: str) -> None:
        """Write a local file, which becomes visible only when it is complete."""

    @abstractmethod
    def delete(self, place: str, shown: str, *, folder: bool) -> None:
        """Delete a file, or an empty folder."""

    def open(self, url: str, window: int = WINDOW) -> ByteStore:
        return StoredObject(self, self.place(url), urls.shown(url), window)

    def is_folder(self, url: str) -> bool:
        place = self.place(url)
        return not place or any(True for _ in self.entries(place, urls.shown(url)))

    def listing(self, url: str) -> list[tuple[str, bool]]:
        place, shown = self.place(url), urls.shown(url)
        listed = [(checked_name(path, shown), path, is_folder) for path, is_folder in self.entries(place, shown)]
        return sorted({(name, is_folder) for name, path, is_folder in listed if path.strip("/") != place.strip("/")})

    def upload(self, source: str, url: str) -> None:
        store, place = self.writable(url)
        store.write(source, place, urls.shown(url))

    def remove(self, targets: Sequence[str]) -> None:
        def remove_one(url: str) -> None:
            store, place = self.writable(url)
            with suppress(FileNotFoundError):
                store.delete(place, urls.shown(url), folder=url.endswith("/"))

        each(remove_one, targets)

    def check_writable(self, url: str) -> None:
        self.writable(url)


class StoredObject(RemoteStore):
    """A file of an object store, read by ranges into separate buffers, because not every read can be aborted."""

    def __init__(self, objects: ObjectStore, place: str, url: str, window: int = WINDOW) -> None:
        super().__init__(window)
        self.path = url
        self._objects, self._place = objects, place
        self.version = objects.stat(place, url)
        self.size: int = self.version[0]
        log.debug("%s: opened by %s", url, objects.name)

    def content(self, begin: int, end: int) -> memoryview:
        translate = partial(translated, begin=begin, end=end)
        secrets = self._objects.secrets
        return checked(lambda: self._range(begin, end), self.path, secrets, tries=TRIES, translate=translate)

    def _range(self, begin: int, end: int) -> memoryview:
        content = memoryview(self._objects.read(self._place, self.path, begin, end, self.version))
        if len(content) == end - begin:
            return content
        if len(content) > end - begin:
            raise UnsupportedError(f"{self.path}: the store does not support ranges of this file")
        self.confirm()
        raise RemoteError(f"expected {end - begin:,} bytes, got {len(content):,}", self.path, begin, end)

    def confirm(self) -> None:
        if not self._objects.proves:
            version = self._objects.stat(self._place, self.path)
            if version != self.version:
                raise changed(self.path, self.size, version[0])


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
        copy_whole(source, urls.local_path(url), urls.shown(url))

    def remove(self, targets: Sequence[str]) -> None:
        for url in targets:
            if url.endswith("/"):
                with suppress(OSError):  # it may be missing, or have files
                    os.rmdir(urls.local_path(url))
                continue
            with suppress(FileNotFoundError):
                os.remove(urls.local_path(url))


def copy_whole(source: str, path: str, shown: str) -> None:
    """Copy a local file to a local path, where it appears only when it is complete."""
    folder, name = os.path.split(path)
    os.makedirs(folder or ".", exist_ok=True)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        shutil.copyfile(source, temporary)
        replace(temporary, path, shown)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise
