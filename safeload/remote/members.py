"""Members of an archive as files: a container that stores them unpacked is read in place, by ranges."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..core.files import Files
from ..core.store import WINDOW, ByteStore, LocalStore, Span, compare, identity_of
from ..core.thread_group import read_spans
from ..errors import UnsupportedError, missing_file
from .remote_store import RemoteStore

# Longest name of a member in characters, and most folders in a name.
MAX_NAME = 4096
MAX_DEPTH = 32


def name_fault(name: str) -> str | None:
    """Return why a member must not have a name, or None if it may."""
    parts = name.split("/")
    if len(name) > MAX_NAME or len(parts) > MAX_DEPTH:
        return f"is longer than {MAX_NAME:,} characters, or more than {MAX_DEPTH} folders deep"
    if "\0" in name or "\\" in name:
        return "contains NUL or a backslash"
    if name.startswith("/") or (len(name) > 1 and name[1] == ":"):
        return "is absolute"
    if ".." in parts:
        return "leads out of the archive"
    return "is not normalized" if "" in parts or "." in parts else None


class MemberStore(RemoteStore):
    """The bytes of a member, which is a first byte and a size in a container; closing it leaves the container open."""

    def __init__(self, container: ByteStore, member: tuple[int, int], path: str) -> None:
        super().__init__()
        self.path = path
        self.begin, self.size = member
        self.version = (self.size, self.begin, *container.version[:2])
        self.here = container.here if isinstance(container, RemoteStore) else True
        self.container = container

    def read_spans(self, spans: Sequence[Span]) -> None:
        read_spans(self.container, [Span(self.begin + offset, memory) for offset, memory in spans])

    def confirm(self) -> None:
        if isinstance(self.container, RemoteStore):
            self.container.confirm()
        elif isinstance(self.container, LocalStore) and os.name != "nt":  # where its handle is no descriptor
            compare(identity_of(self.container.use(os.fstat)), self.container.identity, self.path)


class MemberFiles(Files):
    """The members of a container by their names, which have no `name_fault`; "" is the folder at the top."""

    remote = inside = True  # nothing here is a path of this machine

    def __init__(self, container: ByteStore, path: str, members: Mapping[str, tuple[int, int]]) -> None:
        self._container = container
        self._path = path
        self._members = members
        self.waits = isinstance(container, RemoteStore) and not container.here
        self._folders: dict[str, dict[str, bool]] = {"": {}}  # names in each folder, and if they are folders
        for name in members:
            parts, folder = name.split("/"), ""
            for k, part in enumerate(parts, 1):
                self._folders.setdefault(folder, {}).setdefault(part, k < len(parts))
                folder = self.join(folder, part)

    def __repr__(self) -> str:
        return f"<MemberFiles {self._path}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r}: members of an open container cannot be pickled")

    @property
    def folders(self) -> list[str]:
        """All folders, from the top down."""
        return sorted(self._folders, key=lambda folder: (folder.count("/") if folder else -1, folder))

    def is_local(self, path: str) -> bool:
        return False

    def open(self, path: str, window: int = WINDOW) -> ByteStore:
        member = self._members.get(path)
        if member is None:
            raise missing_file(self.shown(path), f"No such member: {self.shown(path)}")
        return MemberStore(self._container, member, self.shown(path))

    def is_folder(self, path: str) -> bool:
        return path in self._folders

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        return sorted((name, kind) for name, kind in self._folders[folder].items() if not name.startswith("."))

    def join(self, folder: str, name: str) -> str:
        return f"{folder}/{name}" if folder else name

    def split(self, path: str) -> tuple[str, str]:
        folder, _, name = path.rpartition("/")
        return folder, name

    def shown(self, path: str) -> str:
        return f"{self._path}/{path}" if path else self._path

    def public(self, path: str) -> str:
        raise UnsupportedError(f"{self.shown(path)}: a member has no path of its own")

    def public_options(self) -> dict[str, Any] | None:
        raise UnsupportedError(f"{self!r}: members have no paths of their own")
