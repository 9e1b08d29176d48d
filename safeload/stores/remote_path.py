"""A path in a store that the caller has opened."""

from __future__ import annotations

from typing import Any

from . import url as urls
from .files import Files


class RemotePath:
    """A path in a store of the caller's, which `safeload.open` and every function that takes a path accept.

    Attributes:
        files: finds and opens files in that store.
        path: as messages show it, and as ``files`` takes it: a URL. It may hold a secret where the caller gave one.
    """

    def __init__(self, files: Files, path: str) -> None:
        self.files = files
        self.path = path

    def __repr__(self) -> str:
        return f"<RemotePath {urls.shown(self.path)}>"

    def __str__(self) -> str:
        return urls.shown(self.path)

    def __truediv__(self, name: str) -> RemotePath:
        """The path of a name in this folder."""
        return RemotePath(self.files, self.files.join(self.path, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePath, (self.files, self.files.public(self.path))
