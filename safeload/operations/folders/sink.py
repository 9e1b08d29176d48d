"""Sinks: folders that are read, and get new files. `disk_sink` and `store_sink` are the two kinds."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from typing import Any

from ...base import url as urls
from ...base.paths import absolute
from ...engine.run.atomic_file import AtomicFile, Digest
from ...errors import FormatError
from ...formats.folder import INDEX, SINGLE
from ...formats.numbered import PART, sets_of
from ...stores.files import Files, Location
from ...stores.json_file import MAX_JSON, read_json
from ...stores.local import Identity
from ...stores.remote import RemoteStore
from ...stores.store import ByteStore, read_at

# Files for other libraries, besides the weights and config.json: tokenizers (sentencepiece and tiktoken
# included), chat templates, settings of generation and processors.
EXTRAS = (
    *("tokenizer*", "*.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template*", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
# The refusal of files that are there.
EXISTS = "File exists; pass overwrite=True to replace it"
# The limit in bytes; tokenizers have up to 40 MB.
LARGEST_EXTRA = 1 << 30
_BUFFER = 8 << 20
# A file that is never there; by its name, readers miss it before they open another.
_MISSING = "being-replaced.safetensors"


class Sink(ABC):
    """A folder. New files are written in a `begin` block: `file` for each shard, then `commit` puts all in place."""

    _unreadable: tuple[type[Exception], ...]  # if reading fails with one of these, `holds` is False

    def __init__(self, files: Files, path: str) -> None:
        self.location = Location(files, path)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.location.files, self.place)

    def __truediv__(self, name: str) -> Sink:
        """Return a subfolder."""
        return type(self)(self.location.files, (self.location / name).path)

    @property
    def place(self) -> str:
        """The path as stored in plans, without secrets. A branch stays one, because commits are read-only."""
        path = self.location.path
        return urls.public(path) if self.location.files.remote else absolute(path)

    def shown(self, name: str) -> str:
        """Return the path of a file for messages."""
        files = self.location.files
        return files.shown(files.join(self.location.path, name))

    # ---- files that are there ----

    @abstractmethod
    def names(self) -> set[str]:
        """List the folder; it is empty if it does not exist."""

    @abstractmethod
    def identity(self, name: str) -> list[Any] | None:
        """Identify a file without reading it, in the same way on all machines; None if the file is gone."""

    def read_json(self, name: str, what: str) -> dict[str, Any]:
        """Parse a file; see `stores.json_file.read_json`."""
        location = self.location / name
        return read_json(location.path, what, location.files)

    def content(self, name: str) -> bytes | None:
        """Return a small file, or None if it is missing or unreadable."""
        location = self.location / name
        with suppress(*self._unreadable), closing(location.files.open(location.path)) as store:
            return read_at(store, 0, min(store.size, MAX_JSON))
        return None

    def holds(self, name: str, size: int, sha256: str, identity: list[Any] | None = None) -> bool:
        """Return True if a file has this content; an uploaded object is not read if its ``identity`` is unchanged."""
        location = self.location / name
        with suppress(*self._unreadable), closing(location.files.open(location.path)) as store:
            present = list(store.version[:2])
            unchanged = location.files.remote and present[-1] is not None and identity == present
            return store.size == size and (unchanged or _digest_of(store) == sha256)
        return False

    # ---- single files ----

    @abstractmethod
    def writing(
        self, name: str, size: int, *, overwrite: bool = True, digest: Digest | None = None
    ) -> AbstractContextManager[AtomicFile]:
        """Return a file under construction; leaving the ``with`` block puts it in place."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and empty subfolders, whose names end with a slash; missing ones are ignored."""

    # ---- a new checkpoint ----

    @abstractmethod
    def begin(self, *, overwrite: bool = False, config: bytes | None = None) -> AbstractContextManager[None]:
        """Return a block of `file` and `commit`, whose error takes back what they did.

        With ``overwrite``, the files of the old checkpoint are removed: shards and records of conversions, the index,
        and ``model.safetensors``. Foreign files stay.
        """

    @abstractmethod
    def new(self, name: str, size: int) -> AtomicFile:
        """Return a new file; `add` decides its name in the end."""

    @abstractmethod
    def add(self, name: str, file: AtomicFile) -> None:
        """Add a complete file, which is sealed; a name with numbers must be free."""

    @contextmanager
    def file(self, name: str, size: int) -> Iterator[AtomicFile]:
        """Yield a new file, and add it."""
        with self.room(size):
            file = self.new(name, size)
            yield file
            file.seal()  # this closes the file, because there can be more shards than descriptors
        self.add(name, file)

    def room(self, nbytes: int) -> AbstractContextManager[None]:
        """Explain a full disk."""
        return nullcontext()

    @abstractmethod
    def commit(
        self,
        files: Mapping[str, bytes | Location],  # the index, and others beside the shards: content or source
        waiting: Sequence[tuple[str, str]] = (),  # new shards that wait in a subfolder: name here and path there
        placed: Collection[str] = (),  # new shards that are in the folder already
    ) -> None:
        """Put the new files in place, and remove the old checkpoint."""

    def _put(self, name: str, content: bytes | Location) -> None:
        """Add a file beside the shards, unless it would be copied onto itself or is too large."""
        if isinstance(content, bytes):
            with self.file(name, len(content)) as file, file.stream() as stream:
                stream.write(content)
        elif not _is_same(content, self.location / name):
            with closing(content.files.open(content.path)) as store:
                if store.size <= LARGEST_EXTRA:
                    with self.file(name, store.size) as file, file.stream() as stream:
                        stream.writelines(_blocks(store))
                        if isinstance(store, RemoteStore):
                            store.confirm()


def is_file(location: Location) -> bool:
    """Return True if a path or URL leads to a file."""
    path, files = location.path, location.files
    if not files.remote:
        return os.path.lexists(path) and not os.path.isdir(path)
    with suppress(FileNotFoundError, FormatError):  # FormatError: an empty folder
        files.open(path).close()
        return True
    return False


def is_extra(name: str) -> bool:
    """Return whether a file beside weights is copied by a conversion, for other libraries."""
    return any(fnmatchcase(name, pattern) for pattern in EXTRAS)


def shared_identity(identity: Identity | None) -> list[Any] | None:
    """Return the fields of an identity without the device number, which differs between machines."""
    return None if identity is None else [identity.size, identity.mtime_ns, identity.inode]


def free_names(sink: Sink, files: Collection[str], taken: Collection[str] | None = None) -> dict[str, str]:
    """Return free names for shards: their own, or with the next total that no file in the folder has.

    ``model.safetensors`` keeps its name in a local folder, and gets numbers in a store, which cannot replace it.
    """
    taken = sink.names() if taken is None else taken
    numbered = SINGLE in taken and sink.location.files.remote
    usual = {file: "model-00001-of-00001.safetensors" if numbered and file == SINGLE else file for file in files}
    totals = {(numbers.stem, int(numbers.total), numbers.suffix) for numbers in sets_of([*taken])}
    parts = {file: part for file in files if (part := PART.fullmatch(usual[file])) is not None}
    shift = 0
    while any((part[1], int(part[3]) + shift, part[4]) in totals for part in parts.values()):
        shift += 1
    new = {file: f"{part[1]}-{part[2]}-of-{int(part[3]) + shift:05}{part[4]}" for file, part in parts.items()}
    return {**usual, **(new if shift else {})}


def indexed_names(sink: Sink, index: str = INDEX) -> set[str]:
    """Return the indexed files of a folder; none if the index cannot be read."""
    try:
        weight_map = sink.read_json(index, INDEX).get("weight_map")
    except (FormatError, OSError):
        return set()
    named = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in named if isinstance(name, str)} & sink.names()


def blocking_index(names: Iterable[str]) -> bytes:
    """Return an index that no reader can open.

    One of ``names`` that is there keeps the index from being stale; the next call removes the shards among them.
    """
    return json.dumps({"metadata": {}, "weight_map": {name: name for name in (_MISSING, *names)}}).encode()


def _is_same(source: Location, copy: Location) -> bool:
    """Return True if a file would be copied onto itself."""
    if copy.files.remote or source.files.remote:
        return copy.files.remote and source.files.remote and source.shown == copy.shown
    return os.path.exists(copy.path) and os.path.samefile(source.path, copy.path)


def _digest_of(store: ByteStore) -> str:
    digest = hashlib.sha256()
    for block in _blocks(store):
        digest.update(block)
    return digest.hexdigest()


def _blocks(store: ByteStore) -> Iterator[memoryview]:
    """Yield the bytes of a file, in the same memory."""
    buffer = memoryview(bytearray(min(_BUFFER, store.size)))
    for at in range(0, store.size, _BUFFER):
        block = buffer[: store.size - at]
        store.read_into(at, block)
        yield block
