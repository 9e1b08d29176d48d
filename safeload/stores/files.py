"""Where paths lead: the local file system, or stores behind URLs. What opens checkpoints knows only `Files`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol, TypeVar

from ..base.paths import absolute
from ..errors import SafeloadError
from .local import check_unchanged, compare, open_local
from .store import ByteStore

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Files(Protocol):
    """Finds and opens files. Paths are texts that only it divides; any thread may use it."""

    @property
    def remote(self) -> bool:
        """Whether each question takes a request."""

    def open(self, path: str) -> ByteStore:
        """Opens a file for reading.

        Raises:
            FormatError: not a regular file.
            FileNotFoundError: there is none.
            OSError: it cannot be opened.
        """

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder at a path."""

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        """Names in a folder, sorted, and whether each is a folder itself; hidden ones are left out."""

    def join(self, folder: str, name: str) -> str:
        """The path of a bare name in a folder."""

    def split(self, path: str) -> tuple[str, str]:
        """The folder of a path, and its name there."""

    def absolute(self, path: str) -> str:
        """The path that leads to the same file from everywhere in this process."""

    def shown(self, path: str) -> str:
        """A path as messages have it: without secrets."""

    def public(self, path: str) -> str:
        """An absolute path as pickles and plans carry it, without secrets.

        Raises:
            UnsupportedError: it leads nowhere without them.
        """

    def public_options(self) -> dict[str, Any] | None:
        """The ``storage_options`` as plans carry them, without secrets; None without any.

        Raises:
            UnsupportedError: the files are in a store of this process.
        """

    def check_unchanged(self, path: str, seen: tuple[Any, ...]) -> None:
        """Refuses a file that has changed, before it is opened, if that can be told without a request.

        Raises:
            FormatError: it has.
        """

    def each(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """The results of a function that opens files, for each item; many at a time where that saves time."""


class LocalFiles:
    """The local file system."""

    remote = False

    def __reduce__(self) -> str:
        return "LOCAL"

    def open(self, path: str) -> ByteStore:
        """See `Files`."""
        return open_local(path)

    def is_folder(self, path: str) -> bool:
        """See `Files`."""
        return os.path.isdir(path)

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        """See `Files`."""
        with os.scandir(folder) as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))

    def join(self, folder: str, name: str) -> str:
        """See `Files`."""
        return os.path.join(folder, name)

    def split(self, path: str) -> tuple[str, str]:
        """See `Files`."""
        return os.path.split(path)

    def absolute(self, path: str) -> str:
        """See `Files`."""
        return absolute(path)

    def shown(self, path: str) -> str:
        """See `Files`."""
        return path

    def public(self, path: str) -> str:
        """See `Files`."""
        return path

    def public_options(self) -> dict[str, Any] | None:
        """See `Files`."""
        return None

    def check_unchanged(self, path: str, seen: tuple[Any, ...]) -> None:
        """See `Files`."""
        check_unchanged(path, seen)

    def each(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """See `Files`."""
        return [function(item) for item in items]


LOCAL = LocalFiles()


class Location:
    """Where a file or a folder is: a path, and what finds and opens files there.

    `safeload.open`, and every function that takes a path, takes a location too. A pickle of it has no secrets.

    Args:
        files: finds and opens it.
        path: as ``files`` takes it, with the secrets of a URL: messages have `shown`.

    Attributes:
        files: see above.
        path: see above.

    Example:
        >>> import fsspec
        >>> import safeload.remote
        >>> folder = safeload.remote.of_fsspec(fsspec.filesystem("memory"), "models")
        >>> folder / "model.safetensors"
        <Location memory:///models/model.safetensors>
    """

    __slots__ = ("files", "path")

    def __init__(self, files: Files, path: str) -> None:
        self.files = files
        self.path = path

    def __repr__(self) -> str:
        return f"<Location {self.shown}>"

    def __str__(self) -> str:
        return self.shown

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and (self.files, self.path) == (other.files, other.path)

    def __hash__(self) -> int:
        return hash((self.files, self.path))

    def __truediv__(self, name: str) -> Location:
        """The location of a name in this folder."""
        return Location(self.files, self.files.join(self.path, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return Location, (self.files, self.files.public(self.files.absolute(self.path)))

    @property
    def shown(self) -> str:
        """The path as messages have it, without secrets."""
        return self.files.shown(self.path)


@contextmanager
def rather_changed(files: Files, seen: Iterable[tuple[str, tuple[Any, ...]]]) -> Iterator[None]:
    """Says of files on the network that cannot be opened again that they have changed, if they have.

    Args:
        files: where they are.
        seen: path and version of each.

    Raises:
        FormatError: they have.
    """
    try:
        yield
    except SafeloadError:
        for path, version in seen if files.remote else ():
            with closing(files.open(path)) as store:
                compare(store.version, version, files.shown(path))
        raise
