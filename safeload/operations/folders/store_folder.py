"""A folder of shards in a store behind a URL, where nothing can be renamed.

Shards that replace others get names that are still free, and the old ones are removed when the index names the new
ones. Whenever that is interrupted the folder is the old checkpoint, or the new one, or has no index.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from ...base import log
from ...base.text import plural, size
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.digest import Digest
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, RemoteError, UnsupportedError
from ...formats import registry
from ...formats.folder import CONFIG, INDEX, SINGLE
from ...stores import url as urls
from ...stores.files import Files, Location
from ...stores.json_file import MAX_JSON, read_json
from ...stores.store import ByteStore, read_at
from . import journal
from .shard_folder import Folder, LocalFolder

if TYPE_CHECKING:
    from ...stores.remote_files import RemoteFiles

# Shards that conversions write, and their records. Between "model" and the numbers there are digits of a plan's id
# where the usual names were taken.
_SHARD = re.compile(
    rf"model-(?:[0-9a-f]+-)?[0-9]{{5,}}-of-[0-9]{{5,}}\.safetensors(?:{re.escape(journal.SUFFIX)})?", re.ASCII
)
_STEM, _DIGITS = "model-", 8
_BUFFER = 8 << 20


class StoreFolder:
    """See `Folder`. A pickle carries what a plan does.

    Args:
        files: leads to the store.
        path: URL of the folder, secrets included.

    Raises:
        UnsupportedError: the URL has a query.
    """

    def __init__(self, files: RemoteFiles, path: str) -> None:
        if urls.needs_query(path):
            raise UnsupportedError(f"{files.shown(path)}: expected the URL of a folder, without ? and #")
        self._store = files
        self._path = path
        self._uploaded: list[str] = []  # shards that are written together
        self._complete = False

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreFolder, (self._store, self.place)

    @property
    def files(self) -> Files:
        """See `Folder`."""
        return self._store

    @property
    def title(self) -> str:
        """See `Folder`."""
        return self._store.shown(self._path)

    @property
    def place(self) -> str:
        """See `Folder`. No revision is resolved to its commit: a commit cannot be written to."""
        return urls.public(self._path)

    def public_options(self) -> dict[str, Any] | None:
        """See `Folder`."""
        return self._store.public_options()

    def _url(self, name: str) -> str:
        return self._store.join(self._path, name)

    def shown(self, name: str) -> str:
        """See `Folder`."""
        return self._store.shown(self._url(name))

    # ---- what is in it ----

    def names(self) -> set[str]:
        """See `Folder`. A store that may be written to, but not listed, is refused here."""
        try:
            return {name for name, _ in self._store.listing(self._path)}
        except FileNotFoundError:
            return set()

    def check_free(self, overwrite: bool) -> None:
        """See `Folder`."""
        found = self.names()
        if found and not overwrite:
            raise FileExistsError(errno.EEXIST, "File exists and overwrite=False", self.title)
        if not found and not self._path.endswith("/") and self._is_file():
            raise FileExistsError(errno.EEXIST, "This is a file, and shards need a folder", self.title)

    def _is_file(self) -> bool:
        try:
            self._store.open(self._path).close()
        except (FileNotFoundError, FormatError):  # the second one for an empty folder
            return False
        return True

    def read_json(self, name: str, what: str) -> dict[str, Any]:
        """See `Folder`."""
        return read_json(self._url(name), what, self._store)

    def open_shard(self, name: str) -> WeightFile:
        """See `Folder`."""
        wanted = registry.OpenRequest((registry.SAFETENSORS,), files=self._store)
        return registry.open_file(self._url(name), wanted).file

    def same_file(self, name: str, other: Location) -> bool:
        """See `Folder`."""
        return other.files.remote and other.shown == self.shown(name)

    def stamp(self, name: str) -> list[Any]:
        """See `Folder`: size and version of the object, so that it need not be read to be known again."""
        with closing(self._store.open(self._url(name))) as store:
            return list(store.version[:2])

    def identity(self, name: str) -> None:
        """See `Folder`: `holds` compares the version of the object."""

    def holds(self, name: str, size: int, sha256: str, version: Any = None) -> bool:
        """See `Folder`. The object is read only where the store gives no version, or has another one."""
        try:
            with closing(self._store.open(self._url(name))) as store:
                if store.size != size:
                    return False
                present = list(store.version[:2])
                known = present[-1] is not None and present == version
                return known or _digest_of(store) == sha256
        except (FileNotFoundError, FormatError):
            return False

    # ---- writing ----

    @contextmanager
    def writing(self, name: str, size: int, *, overwrite: bool, digest: Digest | None = None) -> Iterator[AtomicFile]:
        """See `Folder`. The file waits in a temporary folder of this machine until it is uploaded."""
        with tempfile.TemporaryDirectory(prefix="safeload-", ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, name)
            with _room(folder, size), AtomicFile(path, size, durable=False, digest=digest) as file:
                yield file
            log.debug("%s: uploading %d bytes", self.shown(name), size)
            self._store.backend(self._path).upload(path, self._url(name))

    @contextmanager
    def shard(self, stack: ExitStack, name: str) -> Iterator[ExitStack]:
        """See `Folder`."""
        self._uploaded.append(name)  # also an upload that is broken off may arrive
        with ExitStack() as own:
            yield own

    def remove(self, names: Sequence[str]) -> None:
        """See `Folder`."""
        if names:
            self._store.backend(self._path).remove([self._url(name) for name in names])

    @contextmanager
    def undone(self) -> Iterator[None]:
        """See `Folder`."""
        try:
            yield
        except BaseException:
            if self._uploaded and not self._complete:  # then the index may be there already
                try:
                    self.remove(self._uploaded)
                except Exception as error:  # the first one is raised
                    log.warning("%s: shards are left that no index names: %s", self.title, error)
            raise

    # ---- replacing a checkpoint ----

    def free_names(self, files: Sequence[str]) -> dict[str, str]:
        """See `Folder`."""
        taken = {INDEX, *files, *(file + journal.SUFFIX for file in files)}
        if taken.isdisjoint(self.names()):
            return {file: file for file in files}
        mark = os.urandom(_DIGITS // 2).hex()
        return {file: _marked(file, mark) for file in files}

    def apart(self, plan: str, files: Sequence[str]) -> dict[str, tuple[Folder, str]]:
        """See `Folder`: in this folder, under names that the plan's id makes its own."""
        return {file: (self, _marked(file, plan)) for file in files}

    def waits(self, plan: str) -> bool:
        """See `Folder`."""
        return any(name.startswith(_marked(_STEM, plan)) for name in self.names())

    def asides(self) -> list[Folder]:
        """See `Folder`."""
        return []

    def names_for(self, file: str, plan: str) -> tuple[str, ...]:
        """See `Folder`."""
        return file, _marked(file, plan)

    def places(self, plan: str) -> list[Folder]:
        """See `Folder`."""
        return [self]

    def outdated(self, files: Sequence[str]) -> list[str]:
        """See `Folder`: ``model.safetensors``, all other shards that conversions have written, and records."""
        kept = {*files, *(file + journal.SUFFIX for file in files)}
        return sorted(name for name in self.names() - kept if name == SINGLE or _SHARD.fullmatch(name))

    @contextmanager
    def before_config(self, config: bytes | None, outdated: Sequence[str]) -> Iterator[None]:
        """See `Folder`. No weights stand beside the config of others, not even for a moment."""
        yield
        self._complete = True
        if config is not None and self.names() & {INDEX, SINGLE} and config != self._config():
            self.remove([CONFIG])
            self.remove([INDEX, SINGLE])

    def _config(self) -> bytes | None:
        try:
            with closing(self._store.open(self._url(CONFIG))) as store:
                return read_at(store, 0, min(store.size, MAX_JSON))
        except (FileNotFoundError, FormatError):
            return None

    @contextmanager
    def after_index(self, outdated: Sequence[str]) -> Iterator[None]:
        """See `Folder`. Removes what is outdated."""
        yield
        try:
            self.remove(outdated)
        except (OSError, RemoteError) as error:  # what is wanted is there
            log.warning("%s: %s of an older checkpoint left: %s", self.title, plural(len(outdated), "file"), error)

    def moves(self, plan: str, places: Mapping[str, Folder]) -> list[tuple[str, LocalFolder, LocalFolder]]:
        """See `Folder`: none, as every shard is where it stays."""
        return []

    def leftovers(self, names: Sequence[str]) -> list[str]:
        """See `Folder`: none that a listing shows."""
        return []

    def tidy(self, plan: str, names: Sequence[str], places: Iterable[Folder]) -> None:
        """See `Folder`."""


def _marked(file: str, mark: str) -> str:
    return f"{_STEM}{mark[:_DIGITS]}-{file.removeprefix(_STEM)}"


@contextmanager
def _room(folder: str, nbytes: int) -> Iterator[None]:
    """Says what the space is needed for, and where, if it is not there."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"No space for {size(nbytes)}, which wait here to be uploaded: TMPDIR may name another folder"
        raise OSError(error.errno, message, os.path.dirname(folder)) from None


def _digest_of(store: ByteStore) -> str:
    digest, memory = hashlib.sha256(), memoryview(bytearray(min(_BUFFER, max(1, store.size))))
    for at in range(0, store.size, len(memory)):
        part = memory[: min(len(memory), store.size - at)]
        store.read_into(at, part)
        digest.update(part)
    return digest.hexdigest()
