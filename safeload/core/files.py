"""Paths and locations of files: local files or stores behind URLs, each accessed through `Files`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

from ..errors import SafeloadError, exported, public
from .paths import absolute
from .store import WINDOW, ByteStore, check_unchanged, compare, open_local

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Files:
    """Finds and opens files, here on this machine. Paths are opaque text to everyone else, from any thread."""

    remote = False  # True if every method call can be a network request
    inside = False  # True if the paths lead into an archive
    waits = False  # True if calls wait for a network, so that several at once are faster

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "LOCAL"

    def is_local(self, path: str) -> bool:
        """Return whether a path is one of this machine's."""
        return True

    def open(self, path: str, window: int = WINDOW) -> ByteStore:
        """Open a file for reading."""
        return open_local(path)

    def is_folder(self, path: str) -> bool:
        """Return whether a path leads to a folder."""
        return os.path.isdir(path)

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        """Return the sorted names in a folder, without hidden names, and whether each is a folder itself."""
        with os.scandir(folder) as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))

    def join(self, folder: str, name: str) -> str:
        """Return the path of a bare name in a folder."""
        return os.path.join(folder, name)

    def split(self, path: str) -> tuple[str, str]:
        """Split a path into its folder and its name there."""
        return os.path.split(path)

    def absolute(self, path: str) -> str:
        """Return a path that stays valid anywhere in this process."""
        return path if self.remote and not self.is_local(path) else absolute(path)

    def shown(self, path: str) -> str:
        """Return a path for messages, without secrets."""
        return path

    def public(self, path: str) -> str:
        """Return an absolute path for pickles and plans, without secrets."""
        return path

    def public_options(self) -> dict[str, Any] | None:
        """Return the ``storage_options`` for plans, without secrets, or None if there are none."""
        return None

    def check_unchanged(self, path: str, seen: tuple[Any, ...]) -> None:
        """Refuse a file that has changed, before it is opened, if that takes no request; opening compares anyway."""
        if self.is_local(path):
            check_unchanged(path, seen)

    def each(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Map a function over items, concurrently if that is faster."""
        if not self.waits:
            return [function(item) for item in items]
        from .thread_group import each  # only here: most paths are local

        return each(function, items)


LOCAL = Files()


@exported("safeload.remote")
class Location:
    """A file or folder: a path and its store.

    `safeload.open` and all functions with a path argument accept a location. Its pickle contains no secrets.

    Args:
        files: finds and opens the file.
        path: the path as ``files`` takes it, including the secrets of a URL; messages use `shown`.

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

    @public
    def __truediv__(self, name: str) -> Location:
        """Return the location of a name in this folder."""
        return Location(self.files, self.files.join(self.path, name))

    @public
    def __reduce__(self) -> tuple[Any, ...]:
        return Location, (self.files, self.files.public(self.files.absolute(self.path)))

    @property
    def shown(self) -> str:
        """The path for messages, without secrets."""
        return self.files.shown(self.path)


@contextmanager
def unchanged(files: Files, seen: Iterable[tuple[str, tuple[Any, ...]]]) -> Iterator[None]:
    """Refuse changed files before they are opened in the block, or remotely if reading them fails."""
    for path, version in seen:
        files.check_unchanged(path, version)
    try:
        yield
    except SafeloadError:
        for path, version in seen if files.remote else ():
            with closing(files.open(path)) as store:
                compare(store.version, version, files.shown(path))
        raise


class FilesystemPath(Protocol):
    """A path in an fsspec filesystem: ``fsspec.core.OpenFile``, universal_pathlib's ``UPath``."""

    @property
    def fs(self) -> Any:
        """The filesystem."""

    @property
    def path(self) -> str:
        """The path in it."""


class BinaryReader(Protocol):
    """A file object opened in binary mode; ``seek`` and ``tell`` are used if it has them."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; none at the end."""


# Valid arguments besides local paths and URLs.
Located: TypeAlias = Location | FilesystemPath | ByteStore | BinaryReader
