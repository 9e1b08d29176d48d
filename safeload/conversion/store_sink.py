"""A folder in a store behind a URL, where nothing can be renamed.

New shards get new names if they replace a checkpoint, and the old shards are removed once the index names the new
shards. If the conversion is interrupted, the folder has the old checkpoint, the new one, or an index of a missing file.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, cast

from ..core.atomic_file import AtomicFile, Digest
from ..core.files import Files, Location
from ..core.text import debug, plural, size, warning
from ..core.thread_group import left_behind
from ..errors import FormatError, RemoteError, RemoteTimeoutError, UnsupportedError
from ..formats.folder import CONFIG, INDEX, SINGLE, is_weight_file
from ..remote import url as urls
from ..remote.remote_files import RemoteFiles
from ..remote.remote_store import Backend
from .sink import Sink, blocking_index

_SHARD = re.compile(r"model-[0-9]{5,}(?:-of-[0-9]{5,})?\.safetensors", re.ASCII)
# A write may take this many times the seconds that a read may wait for a byte, and a second for each so many bytes.
_TIMEOUTS, _SLOWEST = 10, 128 << 10


class StoreSink(Sink):
    """A folder in a store. The path holds secrets; like a plan, the pickle holds none."""

    _unreadable = (FileNotFoundError, FormatError)

    def __init__(self, files: Files, path: str) -> None:
        if urls.needs_query(path):
            raise UnsupportedError(f"{files.shown(path)}: expected the URL of a folder, without ? and #")
        super().__init__(files, path)

    def names(self) -> set[str]:
        try:
            return {name for name, _ in self.location.files.listing(self.location.path)}
        except FileNotFoundError:
            return set()

    def identity(self, name: str) -> list[Any] | None:
        with closing(self.location.files.open((self.location / name).path)) as store:
            return list(store.version[:2])

    @contextmanager
    def writing(
        self, name: str, size: int, *, overwrite: bool = True, digest: Digest | None = None
    ) -> Iterator[AtomicFile]:
        with (
            self.staging(name) as path,
            self.room(size),
            AtomicFile(path, size, durable=False, digest=digest) as file,
        ):
            yield file

    @contextmanager
    def staging(self, name: str) -> Iterator[str]:
        """Yield a path in a temporary folder of this machine, and upload the file that is written there."""
        with tempfile.TemporaryDirectory(prefix="safeload-", ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, name)
            yield path
            self._upload(path, name)

    def _upload(self, path: str, name: str) -> None:
        nbytes, shown = os.path.getsize(path), self.shown(name)
        debug("%s: uploading %d bytes", shown, nbytes)
        self._change(lambda backend: backend.upload(path, (self.location / name).path), nbytes, shown)

    def _change(self, change: Callable[[Backend], object], nbytes: int, shown: str) -> None:
        """Change files of the store within a time limit: libraries may wait forever for a silent server."""
        backend = cast(RemoteFiles, self.location.files).backend(self.location.path)
        seconds = _TIMEOUTS * backend.timeout + nbytes / _SLOWEST
        try:
            left_behind(lambda: change(backend), seconds)
        except RemoteError:
            raise
        except TimeoutError:
            text = (
                f"the store has not completed a write of {nbytes:,} bytes within {seconds:,.0f} s, but may still do so"
            )
            raise RemoteTimeoutError(text, shown) from None

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Explain a full disk: files are stored in TMPDIR until they are uploaded."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            message = f"No space for {size(nbytes)} to be uploaded from here; set TMPDIR to another folder"
            raise OSError(error.errno, message, tempfile.gettempdir()) from None

    def remove(self, names: Iterable[str]) -> None:
        paths = [(self.location / name.rstrip("/")).path + name[len(name.rstrip("/")) :] for name in names]
        if paths:
            self._change(lambda backend: backend.remove(paths), 0, self.location.shown)

    # ---- a new checkpoint ----

    @contextmanager
    def begin(self, *, overwrite: bool = False, config: bytes | None = None) -> Iterator[None]:
        self._before = self.names() if overwrite else set()
        self._config = config
        self._shards: list[str] = []  # uploaded
        self._complete = False  # True if an index may name the shards
        # Config and index of the old model, None for a missing file, while an index keeps readers away.
        self._old: dict[str, bytes | None] = {}
        self._single: AtomicFile | None = None
        with (
            tempfile.TemporaryDirectory(prefix="safeload-", ignore_cleanup_errors=True) as self._folder,
            ExitStack() as self._stack,
        ):
            try:
                if config is not None and not self._before:  # a new folder has no weights without it
                    self._shards.append(CONFIG)
                    self._put(CONFIG, config)
                yield
            except BaseException:
                try:
                    if self._old:
                        self._put(INDEX, blocking_index([CONFIG]))
                        for name, content in self._old.items():
                            self.remove([name]) if content is None else self._put(name, content)
                    if self._old or not self._complete:
                        self.remove(self._shards)
                except Exception as error:  # the first error is raised
                    shown = self.location.shown
                    warning("%s: cannot delete the shards of the failed save: %s", shown, error)
                raise

    def new(self, name: str, size: int) -> AtomicFile:
        return self._stack.enter_context(AtomicFile(os.path.join(self._folder, name), size, durable=False))

    def add(self, name: str, file: AtomicFile) -> None:
        """Upload a file at once, which saves disk space on this machine; ``model.safetensors`` waits for `commit`."""
        if name == SINGLE:
            self._single = file
            return
        if _SHARD.fullmatch(name):
            self._shards.append(name)  # before the upload, because an interrupted upload may still arrive
        self._send(name, file)

    def _send(self, name: str, file: AtomicFile) -> None:
        file.commit()
        self._upload(file.path, name)
        os.unlink(file.path)

    def commit(
        self,
        files: Mapping[str, bytes | Location],
        waiting: Sequence[tuple[str, str]] = (),
        placed: Collection[str] = (),
    ) -> None:
        new = {*self._shards, *placed}
        outdated = {name for name in self._before if name == SINGLE or _SHARD.fullmatch(name)} - new
        if self._before and INDEX not in files:  # the only shard is model.safetensors
            outdated = {*outdated, INDEX} - {SINGLE}  # the index may keep readers away
        for name, content in files.items():
            if name != INDEX:
                self._put(name, content)
        if self._config is not None and self._before:
            old = {*filter(is_weight_file, self.names())} - new
            if old and self._config != self.content(CONFIG):
                # Readers must not find old weights beside the new config: until the new index, this one refuses them.
                self._old = {name: self.content(name) for name in (CONFIG, INDEX)}
                self._complete = True
                self._put(INDEX, blocking_index([CONFIG, *sorted(new)]))
                if SINGLE in old:
                    self._old = {}  # it cannot be brought back
                    self.remove([SINGLE])
            self._complete = True
            self._put(CONFIG, self._config)
        self._complete = True
        if INDEX in files:
            self._put(INDEX, files[INDEX])
        if self._single is not None:
            self._send(SINGLE, self._single)
        self._old = {}
        try:
            self.remove(sorted(outdated))
        except (OSError, RemoteError) as error:  # the new checkpoint is complete
            if {SINGLE, INDEX} & outdated & self.names():  # which readers may prefer
                raise
            text = "%s: cannot delete %s of the replaced checkpoint: %s"
            warning(text, self.location.shown, plural(len(outdated), "file"), error)
