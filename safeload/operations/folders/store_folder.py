"""A folder of shards in a store behind a URL, where nothing can be renamed.

New shards get new names if they replace a checkpoint, and the old shards are removed once the index names the new
shards. If the conversion is interrupted, the folder has the old checkpoint, the new one, or an index of a missing file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from ...base import log
from ...base import url as urls
from ...base.text import plural, size
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.digest import Digest
from ...errors import FormatError, RemoteError, RemoteTimeoutError, UnsupportedError
from ...formats.folder import CONFIG, INDEX, SINGLE, is_weight_file
from ...stores.files import Location
from ...stores.thread_group import left_behind
from . import journal
from .folder import Folder
from .replacement import Replacement, blocking_index

if TYPE_CHECKING:
    from ...stores.remote_files import RemoteFiles

_SHARD = re.compile(r"model-[0-9]{5,}(?:-of-[0-9]{5,})?\.safetensors", re.ASCII)
# A write may take this many times the seconds that a read may wait for a byte, and a second for each so many bytes.
_TIMEOUTS, _SLOWEST = 10, 128 << 10


class StoreFolder(Folder):
    """A folder in a store. The path holds secrets; like a plan, the pickle holds none."""

    _unreadable = (FileNotFoundError, FormatError)

    def __init__(self, files: RemoteFiles, path: str) -> None:
        if urls.needs_query(path):
            raise UnsupportedError(f"{files.shown(path)}: expected the URL of a folder, without ? and #")
        super().__init__(Location(files, path))
        self._files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreFolder, (self._files, self.place)

    def __truediv__(self, name: str) -> StoreFolder:
        return StoreFolder(self._files, (self.location / name).path)

    @property
    def place(self) -> str:
        return urls.public(self.location.path)  # a branch is not resolved to its commit, because commits are read-only

    def names(self) -> set[str]:
        try:
            return {name for name, _ in self._files.listing(self.location.path)}
        except FileNotFoundError:
            return set()

    @contextmanager
    def writing(self, name: str, size: int, *, overwrite: bool, digest: Digest | None = None) -> Iterator[AtomicFile]:
        with (
            self.staging(name) as path,
            _room(os.path.dirname(path), size),
            AtomicFile(path, size, durable=False, digest=digest) as file,
        ):
            yield file

    @contextmanager
    def staging(self, name: str) -> Iterator[str]:
        """Yield a path in a temporary folder of this machine, and upload the file that is written there."""
        with tempfile.TemporaryDirectory(prefix="safeload-", ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, name)
            yield path
            log.debug("%s: uploading %d bytes", self.shown(name), os.path.getsize(path))
            backend, url = self._files.backend(self.location.path), (self.location / name).path
            _bounded(backend.timeout, lambda: backend.upload(path, url), os.path.getsize(path), self.shown(name))

    def remove(self, names: Iterable[str]) -> None:
        paths = [(self.location / name.rstrip("/")).path + name[len(name.rstrip("/")) :] for name in names]
        if paths:
            backend = self._files.backend(self.location.path)
            _bounded(backend.timeout, lambda: backend.remove(paths), 0, self.location.shown)

    def identity(self, name: str) -> list[Any] | None:
        with closing(self._files.open((self.location / name).path)) as store:
            return list(store.version[:2])


def _bounded(timeout: float, change: Callable[[], object], nbytes: int, shown: str) -> None:
    """Change files of a store within a time limit: libraries may wait forever for a silent server."""
    seconds = _TIMEOUTS * timeout + nbytes / _SLOWEST
    try:
        left_behind(change, seconds)
    except RemoteError:
        raise
    except TimeoutError:
        text = f"the store has not completed a write of {nbytes:,} bytes within {seconds:,.0f} s, but may still do so"
        raise RemoteTimeoutError(text, shown) from None


class StoreReplacement(Replacement):
    """Uploads new shards under free names."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._uploaded: list[str] = []  # files written before the end
        self._complete = False
        # Config and index of the old model, None for a missing file, while an index keeps readers away.
        self._old: dict[str, bytes | None] = {}

    def check_free(self, overwrite: bool) -> None:
        location = self._folder.location
        names = self._folder.names()
        if names and not overwrite:
            journal.check_unfinished(self._folder, names)
            raise FileExistsError(errno.EEXIST, "File exists; pass overwrite=True to replace it", location.shown)
        if not names and not location.path.endswith("/") and is_file(location):
            raise FileExistsError(errno.EEXIST, "This is a file, but shards need a folder", location.shown)

    def outdated(self, files: Sequence[str]) -> list[str]:
        """List old shards, an old ``model.safetensors``, and the index if the new checkpoint has none."""
        names = self._folder.names()
        self.is_new = not names
        gone = {name for name in names if name == SINGLE or _SHARD.fullmatch(name)}
        if SINGLE in files and names:
            gone.add(INDEX)  # `before_config` may put it there
        return sorted(gone - {*files})

    @contextmanager
    def undone(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            shown = self._folder.location.shown
            try:
                if self._old:
                    self._block()
                    for name, content in self._old.items():
                        self._folder.remove([name]) if content is None else self._write(name, content)
                    self._complete = False
                if not self._complete:  # when complete, the index may be there already
                    self._folder.remove(self._uploaded)
            except Exception as error:  # the first error is raised
                log.warning("%s: cannot delete the shards of the failed save: %s", shown, error)
            raise

    @contextmanager
    def shard(self, stack: ExitStack, file: str) -> Iterator[ExitStack]:
        self._uploaded.append(file)  # before the upload, because an interrupted upload may still arrive
        with ExitStack() as own:
            yield own

    @contextmanager
    def before_config(self, config: bytes | None, placed: Collection[str]) -> Iterator[None]:
        """Keep readers away from old weights at the end: no weights stand beside a foreign config at any moment."""
        yield
        new = {*self._uploaded, *placed}
        old = {*filter(is_weight_file, self._folder.names())} - new
        if config is not None and old and config != self._folder.content(CONFIG):
            self._old = {name: self._folder.content(name) for name in (CONFIG, INDEX)}
            self._complete = True
            self._block(*sorted(new))
            if SINGLE in old:
                self._old = {}  # it cannot be brought back
                self._folder.remove([SINGLE])
        self._complete = True

    def _block(self, *shards: str) -> None:
        self._write(INDEX, json.dumps(blocking_index([CONFIG, *shards])).encode())

    def _write(self, name: str, content: bytes) -> None:
        with self._folder.writing(name, len(content), overwrite=True) as file, file.stream() as stream:
            stream.write(content)

    @contextmanager
    def after_index(self, outdated: Sequence[str]) -> Iterator[None]:
        yield
        self._old = {}
        try:
            self._folder.remove(outdated)
        except (OSError, RemoteError) as error:  # the new checkpoint is complete
            if {SINGLE, INDEX} & {*outdated} & self._folder.names():  # which readers may prefer
                raise
            shown = self._folder.location.shown
            log.warning(
                "%s: cannot delete %s of the replaced checkpoint: %s", shown, plural(len(outdated), "file"), error
            )


def is_file(location: Location) -> bool:
    """Return True if a URL leads to a file."""
    try:
        location.files.open(location.path).close()
    except (FileNotFoundError, FormatError):  # FormatError: an empty folder
        return False
    return True


@contextmanager
def _room(folder: str, nbytes: int) -> Iterator[None]:
    """Explain a full disk: files are stored in TMPDIR until they are uploaded."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"No space for {size(nbytes)} to be uploaded from here; set TMPDIR to another folder"
        raise OSError(error.errno, message, os.path.dirname(folder)) from None
