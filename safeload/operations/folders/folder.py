"""Destination folders: list, write and identify their files.

A file becomes visible only once it is complete: a local file is renamed into place, a file for a store waits on this
machine until it is uploaded.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from fnmatch import fnmatchcase, translate
from itertools import chain
from typing import Any

import numpy as np

from ...base import url as urls
from ...base.paths import absolute
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.digest import Digest
from ...errors import FormatError
from ...formats.registry import WEIGHT_SUFFIXES
from ...stores.files import LOCAL, Location
from ...stores.json_file import MAX_JSON, read_json
from ...stores.local import Identity, identity_of
from ...stores.store import ByteStore, read_at

_BUFFER = 8 << 20
# Files for other libraries, besides the weights and config.json: tokenizers (sentencepiece and tiktoken
# included), chat templates, settings of generation and processors.
_EXTRAS = (
    *("tokenizer*", "*.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template*", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
# Other files that decide what weights are: configurations, indexes, manifests, signatures, metadata of DCP and Orbax.
_DOCUMENTS = re.compile("|".join(map(translate, (*_EXTRAS, "*.json", "*.sig", "*.ocdbt", ".*", "_*"))))


class Folder(ABC):
    """A destination folder."""

    _unreadable: tuple[type[Exception], ...]  # if reading fails with one of these, `holds` is False

    def __init__(self, location: Location) -> None:
        self.location = location

    @abstractmethod
    def __truediv__(self, name: str) -> Folder:
        """Return a subfolder."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The path as stored in plans, without secrets."""

    def shown(self, name: str) -> str:
        """Return the path of a file for messages."""
        return (self.location / name).shown

    def read_json(self, name: str, what: str) -> dict[str, Any]:
        """Parse a file; see `stores.json_file.read_json`."""
        location = self.location / name
        return read_json(location.path, what, location.files)

    def content(self, name: str) -> bytes | None:
        """Return a small file, or None if it is missing or unreadable."""
        location = self.location / name
        try:
            with closing(location.files.open(location.path)) as store:
                return read_at(store, 0, min(store.size, MAX_JSON))
        except self._unreadable:
            return None

    @abstractmethod
    def names(self) -> set[str]:
        """List the folder; it is empty if it does not exist."""

    @abstractmethod
    def writing(
        self, name: str, size: int, *, overwrite: bool, digest: Digest | None = None
    ) -> AbstractContextManager[AtomicFile]:
        """Return a file under construction; leaving the ``with`` block puts it in place."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and empty subfolders, whose names end with a slash; missing ones are ignored."""

    @abstractmethod
    def identity(self, name: str) -> list[Any] | None:
        """Identify a file without reading it, in the same way on all machines; None if the file is gone."""

    def holds(self, name: str, size: int, sha256: str, identity: list[Any] | None = None) -> bool:
        """Return True if a file has this content; an uploaded object is not read if its ``identity`` is unchanged."""
        location = self.location / name
        try:
            with closing(location.files.open(location.path)) as store:
                if store.size != size:
                    return False
                present = list(store.version[:2])
                unchanged = location.files.remote and present[-1] is not None and identity == present
                return unchanged or _digest_of(store) == sha256
        except self._unreadable:
            return False


class LocalFolder(Folder):
    """A folder of this machine."""

    _unreadable = (OSError, FormatError)

    def __init__(self, path: str) -> None:
        super().__init__(Location(LOCAL, path))

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFolder, (self.location.path,)

    def __truediv__(self, name: str) -> LocalFolder:
        return LocalFolder(self.shown(name))

    def shown(self, name: str) -> str:
        return os.path.join(self.location.path, name)

    @property
    def place(self) -> str:
        return absolute(self.location.path)

    def names(self) -> set[str]:
        path = self.location.path
        return set(os.listdir(path)) if os.path.isdir(path) else set()  # this also refreshes the NFS client's cache

    def writing(self, name: str, size: int, *, overwrite: bool, digest: Digest | None = None) -> AtomicFile:
        os.makedirs(self.location.path, exist_ok=True)
        return AtomicFile(self.shown(name), size, overwrite=overwrite, digest=digest, follow=False)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):
                (os.rmdir if name.endswith("/") else os.unlink)(self.shown(name))

    def identity(self, name: str) -> list[Any] | None:
        try:
            return shared_identity(identity_of(os.stat(self.shown(name))))
        except OSError:
            return None


def shared_identity(identity: Identity | None) -> list[Any] | None:
    """Return the fields of an identity without the device number, which differs between machines."""
    return None if identity is None else [identity.size, identity.mtime_ns, identity.inode]


def is_extra(name: str) -> bool:
    """Return whether a file beside weights is copied by a conversion, for other libraries."""
    return any(fnmatchcase(name, pattern) for pattern in _EXTRAS)


def check_free(path: str, overwrite: bool) -> None:
    """Refuse an existing file before anything is read."""
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "File exists; pass overwrite=True to replace it", path)


def refuse_inputs(path: Any, inputs: Iterable[Any], *, beside: Iterable[Any] = ()) -> None:
    """Refuse to write over a local file that is read, or that `_read_with` finds, whatever its spelling or links."""
    place = _local(path)
    if place is not None and not os.path.isfile(place):
        return
    for file in chain(inputs, () if place is None else _read_with(beside, os.stat(place).st_ino)):
        local = _local(file)
        with suppress(OSError):
            if isinstance(file, str) and file == path if place is None else local and os.path.samefile(place, local):
                raise ValueError(f"{path} would replace {file}, which is read: choose another path")


def _read_with(sources: Iterable[Any], inode: int) -> Iterator[str]:
    """Yield a file of this inode, and links, in a folder, beside an index, or as a document beside a weight file."""
    folders: dict[str, bool] = {}
    for source in filter(None, map(_local, sources)):
        folder, name = os.path.split(source)
        if os.path.isdir(source):
            folders[source] = True
        elif os.path.isfile(source) and (name.endswith(".index.json") or not _is_document(name)):
            folders[folder] = folders.get(folder, False) or name.endswith(".index.json")
    for folder, whole in folders.items():
        with os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                if (entry.inode() == inode or entry.is_symlink()) and (whole or _is_document(entry.name)):
                    yield os.path.join(folder, entry.name)


def _is_document(name: str) -> bool:
    return _DOCUMENTS.match(name) is not None and os.path.splitext(name)[1] not in WEIGHT_SUFFIXES


def _local(path: Any) -> str | None:
    """Return the path of a local file, also of a ``file://`` URL; None for anything else."""
    text = os.fspath(path) if isinstance(path, (str, bytes, os.PathLike)) and not hasattr(path, "fs") else None
    text = os.fsdecode(text) if text is not None else None
    if text is None or "\0" in text or not urls.is_url(text):
        return None if text is None or "\0" in text else text
    return urls.local_path(text) if urls.scheme_of(text) == "file" else None


def _digest_of(store: ByteStore) -> str:
    digest, buffer = hashlib.sha256(), np.empty(min(_BUFFER, max(1, store.size)), np.uint8).data
    for at in range(0, store.size, len(buffer)):
        block = buffer[: min(len(buffer), store.size - at)]
        store.read_into(at, block)
        digest.update(block)
    return digest.hexdigest()
