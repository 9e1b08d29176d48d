"""Sinks: folders that get a new checkpoint, old or new, never between, and the records of unfinished conversions.

`Sink` is a folder on this disk; `StoreSink` is a folder in a store, where nothing can be renamed.

Unfinished conversions: ``.safeload-resume/CALL/SHARD.json`` in the destination is the record of a complete shard; CALL
is a hash of the call. A local shard waits beside its record until all are complete; in a store it has its final name.

On this disk, new files are complete and synced under temporary names first, and shards get names that are free:
``model-00001-of-0000M.safetensors``, where M is the least number with no file in the folder, from the number of shards
on. So no step changes a file that an index names. `Sink.commit` then takes these steps. Readers find the old model,
the new model or an error after each of them, whether they prefer ``model.safetensors`` (transformers) or the index
(diffusers):

====================================================  ============================  ============================
step                                                  prefers ``model.safetensors``  prefers the index
====================================================  ============================  ============================
``config.json`` stays the same, or no weights are here:
1. tokenizer, config, shards                          old                           old
   (if there is no old index: old or refused)
2a. shards: an old index of another name is hidden    old single file, else new     refused
    the index is replaced                             old single file, else new     new
    the old ``model.safetensors`` is hidden           new                           new
2b. a single file: it is put in place                 new                           old index, else new
    the old index is hidden                           new                           new
``config.json`` changes:
0. an old index of another name is hidden             old or refused                refused
1. an index that names a missing file replaces it     old single file, else refused refused
2. the old ``model.safetensors`` is hidden            refused                       refused
3. tokenizer, ``config.json``                         refused                       refused
4. shards and their index, or the single file         refused, then new             refused, then new
5. a single file: the index of step 1 is hidden       new                           new
both: old shards, index and hidden files are removed  new                           new
====================================================  ============================  ============================

A hidden file is called ``.NAME.*.tmp``, like a new file that waits. The index of step 1 also names ``config.json``, or
safeload's reader would call it stale, and the old and new shards. Before the files are removed, an error takes all
steps back, the last one first; a kill leaves the state of its step. The next call removes the shards that any index
names, hidden or not. A folder without an index whose shards are a complete set, and weights of other formats, count as
an old index. Programs that ignore the index and read every ``model*.safetensors`` can find both models.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from ..core.atomic_file import AtomicFile, Digest, Swap, existing_file, hidden_name, naming, remove_abandoned
from ..core.files import (
    MAX_JSON,
    Files,
    Identity,
    Location,
    blocks_of,
    identity_of,
    read_at,
    read_json,
    sha256_of,
    sync_folder,
)
from ..core.text import absolute, debug, plural, size, warning
from ..core.thread_group import left_behind
from ..errors import FormatError, RemoteError, RemoteTimeoutError, UnsupportedError
from ..formats.folder import CONFIG, INDEX, RESUME, SINGLE, is_weight_file
from ..formats.numbered import PART, sets_of
from ..remote import url as urls
from ..remote.remote_store import Backend, RemoteStore

# Files for other libraries, besides the weights and config.json: tokenizers (sentencepiece and tiktoken
# included), chat templates, settings of generation and processors.
EXTRAS = (
    *("tokenizer*", "tekken.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template*", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
# The limit in bytes; tokenizers have up to 40 MB.
LARGEST_EXTRA = 1 << 30
# A file that is never there; by its name, readers miss it before they open another.
_MISSING = "being-replaced.safetensors"
# Shards of any writer. An old index can name other files too; they are never removed.
NUMBERED = re.compile(r".+-[0-9]{5,}-of-[0-9]{5,}\.safetensors", re.ASCII | re.DOTALL)
# Names of indexes.
_INDEX_SUFFIX = ".safetensors.index.json"
# Suffix of the record of a shard.
RECORD = ".json"
# Hash of a call, which is the name of its subfolder.
DIGITS = 16
CALL = re.compile(rf"[0-9a-f]{{{DIGITS}}}", re.ASCII)
# Shards that safeload writes to a store.
_STORED_SHARD = re.compile(r"model-[0-9]{5,}(?:-of-[0-9]{5,})?\.safetensors", re.ASCII)
# A write may take this many times the seconds that a read may wait for a byte, and a second for each so many bytes.
_TIMEOUTS, _SLOWEST = 10, 128 << 10
_FIELDS = {"piece": str, "size": int, "sha256": str}


class Sink:
    """A folder on this disk: in a `begin` block, `file` writes each new shard, then `commit` puts all in place."""

    # If reading fails with one of these, `holds` is False.
    _unreadable: tuple[type[Exception], ...] = (OSError, FormatError)

    def __init__(self, files: Files, path: str) -> None:
        self.location = Location(files, path)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.location.files, self.place)

    def __truediv__(self, name: str) -> Sink:
        return type(self)(self.location.files, (self.location / name).path)

    @property
    def place(self) -> str:
        """The path as stored in plans, without secrets. A branch stays one, because commits are read-only."""
        path = self.location.path
        return urls.public(path) if self.location.files.remote else absolute(path)

    def shown(self, name: str) -> str:
        files = self.location.files
        return files.shown(files.join(self.location.path, name))

    # ---- files that are there ----

    def names(self) -> set[str]:
        """List the folder; it is empty if it does not exist."""
        path = self.location.path
        return set(os.listdir(path)) if os.path.isdir(path) else set()  # this also refreshes the NFS client's cache

    def identity(self, name: str) -> list[Any] | None:
        """Identify a file without reading it, in the same way on all machines; None if the file is gone."""
        try:
            return shared_identity(identity_of(os.stat(self.shown(name))))
        except OSError:
            return None

    def read_json(self, name: str, what: str) -> dict[str, Any]:
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
            return store.size == size and (unchanged or sha256_of(store, location.shown) == sha256)
        return False

    # ---- single files ----

    def writing(
        self, name: str, size: int, *, overwrite: bool = True, digest: Digest | None = None
    ) -> AbstractContextManager[AtomicFile]:
        """Return a file under construction; leaving the ``with`` block puts it in place."""
        os.makedirs(self.location.path, exist_ok=True)
        return AtomicFile(self.shown(name), size, overwrite=overwrite, digest=digest, follow=False)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and empty subfolders, whose names end with a slash; missing ones are ignored."""
        for name in names:
            with suppress(OSError):
                (os.rmdir if name.endswith("/") else os.unlink)(self.shown(name))

    # ---- a new checkpoint ----

    @contextmanager
    def begin(self, *, overwrite: bool = False, config: bytes | Location | None = None) -> Iterator[None]:
        """Yield for a block of `file` and `commit`, which gets ``config`` again; an error in the block undoes both."""
        # With `overwrite`, shards, records, index and model.safetensors of the old checkpoint go. Foreign files stay.
        existed = os.path.isdir(self.location.path)
        self._overwrite = overwrite
        self._files: dict[str, AtomicFile] = {}  # complete, under temporary names
        try:
            with ExitStack() as self._stack:
                yield
        except BaseException:
            if not existed:
                with suppress(OSError):
                    os.rmdir(self.location.path)
            raise

    def new(self, name: str, size: int, digest: Digest | None = None) -> AtomicFile:
        """Return a new file; `add` decides its name in the end."""
        return self._stack.enter_context(self.writing(name, size, overwrite=self._replaces(name), digest=digest))

    def add(self, name: str, file: AtomicFile) -> None:
        """Add a complete file, which is sealed; a name with numbers must be free."""
        self._files[name] = file

    def _replaces(self, name: str) -> bool:
        """Return False for a shard, because its name is free."""
        return self._overwrite and NUMBERED.fullmatch(name) is None

    @contextmanager
    def file(self, name: str, size: int, digest: Digest | None = None) -> Iterator[AtomicFile]:
        """Yield a new file, and add it."""
        with self.room(size):
            file = self.new(name, size, digest)
            yield file
            file.seal()  # this closes the file, because there can be more shards than descriptors
        self.add(name, file)

    def room(self, nbytes: int) -> AbstractContextManager[None]:
        """Explain a full disk."""
        return nullcontext()

    def commit(
        self,
        files: Mapping[str, bytes | Location],  # index, config, and others beside the shards: content or source
        waiting: Sequence[tuple[str, str]] = (),  # new shards that wait in a subfolder: name here and path there
        placed: Collection[str] = (),  # new shards that are in the folder already
    ) -> None:
        """Put the new files in place, and remove the old checkpoint."""
        shards, taken = [*self._files], dict(waiting)
        new = {*shards, *taken, *placed}
        outdated = self._outdated({*new, *files}) if self._overwrite else []
        if new != {SINGLE} and SINGLE not in outdated and os.path.isfile(self.shown(SINGLE)):
            text = f"Other programs load this file instead of the shards of {INDEX}: remove it, or choose a new folder"
            raise existing_file(self.shown(SINGLE), text)
        self._overwrite = self._overwrite or not shards  # an earlier call may have put files beside shards of pieces
        # Readers would find old weights beside the new config, or new shards by the old index.
        config, block, weights = files.get(CONFIG), None, {*filter(is_weight_file, self.names())} - {*placed}
        changes = config is not None and bool(weights) and config != self.content(CONFIG)
        if changes or not (indexed_names(self) - {*placed}).isdisjoint(new):
            self._put(INDEX, blocking_index([CONFIG, *outdated, *sorted(new)]))
            block = self._files.pop(INDEX)
        for name, content in files.items():
            self._put(name, content)
        # The steps of the table: a name, and the path of its new file; None hides the old file.
        paths = {**{name: file.temporary for name, file in self._files.items()}, **taken}
        beside = sorted(self._files.keys() - {INDEX, *shards}, key=lambda name: name == CONFIG)
        other_indexes = [name for name in outdated if _is_index(name) and name != INDEX]
        gone = {SINGLE, INDEX} & {*outdated, *([] if block is None else [INDEX])} - paths.keys()
        names = [*beside, *shards, *taken, *other_indexes, *({INDEX} & self._files.keys()), *gone]
        steps = [(name, paths.get(name)) for name in names]
        if block is not None:
            hides: list[tuple[str, str | None]] = [(name, None) for name in other_indexes]
            single = [(name, None) for name in {SINGLE} & {*outdated, *shards, *taken}]
            steps = [*hides, (INDEX, block.temporary), *single, *steps]
        shards_before = [self.shown(name) for name in outdated if name == SINGLE or NUMBERED.fullmatch(name)]
        like: os.stat_result | None = None
        for path in shards_before:
            with suppress(OSError):  # another program may remove it
                like = like or os.stat(path)
        with Swap() as swap:
            for name, source in steps:
                target, waits = self.shown(name), name in taken
                if source is None:
                    if os.path.isfile(target):
                        swap.hide(target)
                    continue
                if waits and name != SINGLE and os.path.lexists(target):
                    raise existing_file(target, "Another conversion has written this shard; repeat the call")
                overwrite, owner = waits or self._replaces(name), like if name in new else None
                swap.put(source, target, like=owner, overwrite=overwrite, durable=not waits)
            with naming(self.location.path):
                sync_folder(self.location.path)
            finished = swap.finish([*map(self.shown, outdated)])
        for file in (*self._files.values(), *([] if block is None else [block])):
            file.temporary = None  # it is in place
        if finished:
            remove_killed(self)

    def _put(self, name: str, content: bytes | Location) -> None:
        """Add a file beside the shards, unless it would be copied onto itself or is too large."""
        if isinstance(content, bytes):
            with self.file(name, len(content)) as file, file.stream() as stream:
                stream.write(content)
        elif not _is_same(content, self.location / name):
            with closing(content.files.open(content.path)) as store:
                if store.size <= LARGEST_EXTRA:
                    with self.file(name, store.size) as file, file.stream() as stream:
                        stream.writelines(blocks_of(store, content.shown))
                        if isinstance(store, RemoteStore):
                            store.confirm()

    def _outdated(self, files: Collection[str]) -> list[str]:
        """List ``model.safetensors``, indexed and recorded shards, and records; the only index of another name too."""
        names = self.names()
        indexes = sorted(name for name in names if _is_index(name) and not name.startswith("."))
        old_index = INDEX if INDEX in indexes or len(indexes) != 1 else indexes[0]
        unfinished = {  # the shards that interrupted conversions have put here
            name
            for call, of_call in self.records().items()
            for file, record in of_call.items()
            for place, name in self.places(call, file)
            if place is self and place.holds(name, record["size"], record["sha256"])
        }
        named = indexed_names(self, old_index) | unfinished
        if not names & {INDEX, SINGLE, *indexes}:  # the only complete set of shards is the old checkpoint
            shard_sets = sets_of([name for name in names - {*files} if name.endswith(".safetensors")])
            complete = [shard_set for shard_set in shard_sets if shard_set.complete]
            named.update(complete[0].files.values() if len(complete) == 1 else ())
        shards = set(filter(NUMBERED.fullmatch, named))
        single = {SINGLE} if os.path.isfile(self.shown(SINGLE)) else set()
        index = {old_index} & names if SINGLE in files or old_index != INDEX else set()
        return sorted((single | index | shards) - {*files})

    # ---- unfinished conversions ----

    def waiting(self, call: str) -> Sink:
        """Return the subfolder of an unfinished conversion."""
        return self / RESUME / call

    def write_record(self, call: str, file: str, record: Mapping[str, Any]) -> None:
        if self.location.files.remote:
            record = {**record, "object": self.identity(file)}
        text = (json.dumps(record, indent=1) + "\n").encode()
        place = self.waiting(call)
        try:
            with place.writing(file + RECORD, len(text)) as written, written.stream() as stream:
                stream.write(text)
        except PermissionError:  # Windows: another process running this piece is reading its record
            if self.record(call, file) != record:
                raise

    def record(self, call: str, file: str) -> dict[str, Any] | None:
        """Return the record of a shard, or None if there is no valid record."""
        try:
            record = self.waiting(call).read_json(file + RECORD, "the record of a shard")
        except (FormatError, FileNotFoundError):
            return None
        except OSError:
            if self.location.files.remote:  # the record may exist
                raise
            return None
        return record if all(type(record.get(key)) is kind for key, kind in _FIELDS.items()) else None

    def records(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the valid records of the folder by call and by shard."""
        by_call = {}
        for call in sorted(filter(CALL.fullmatch, (self / RESUME).names())):
            listed = sorted(self.waiting(call).names())
            files = [name.removesuffix(RECORD) for name in listed if name.endswith(".safetensors" + RECORD)]
            of_call = self.location.files.each(partial(self.record, call), files)
            by_call[call] = {file: record for file, record in zip(files, of_call, strict=True) if record is not None}
        return by_call

    def places(self, call: str, file: str) -> list[tuple[Sink, str]]:
        """Return where a shard can be: where it waits, or where an interrupted call has put it."""
        if self.location.files.remote:
            return [(self, file)]
        waiting, usual = self.waiting(call), PART.fullmatch(file)
        shards = [(waiting, file)] if file in waiting.names() else []
        for name in sorted(self.names()):  # with any total number of shards
            part = PART.fullmatch(name)
            if name == file or (part and usual and part.group(1, 2, 4) == usual.group(1, 2, 4)):
                shards.append((self, name))
        return shards

    def clear_records(self, calls: Iterable[str] | None = None) -> None:
        """Remove the records and waiting shards of calls, or of all; other files stay."""
        calls = sorted(filter(CALL.fullmatch, (self / RESUME).names() if calls is None else calls))
        for call in calls:
            place = self.waiting(call)
            ours = (".safetensors" + RECORD, ".tmp")
            place.remove(sorted(name for name in place.names() if is_weight_file(name) or name.endswith(ours)))
        self.remove_empty(calls)

    def remove_empty(self, calls: Sequence[str]) -> None:
        """Remove the subfolders of calls if they have no file."""
        if calls:
            (self / RESUME).remove([call + "/" for call in calls])
        if calls or not self.location.files.remote:
            self.remove([RESUME + "/"])

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a folder with content before anything is read; say how to continue an unfinished conversion."""
        location, names = self.location, self.names()
        if not names and not (location.files.remote and location.path.endswith("/")) and is_file(location):
            raise existing_file(location.shown, "This is a file, but shards need a folder")
        if not names or overwrite:
            return
        for call, of_call in {} if INDEX in names else self.records().items():
            complete = [file for file in of_call if self.places(call, file)]
            if complete and (SINGLE not in names or SINGLE in complete):
                number = PART.fullmatch(complete[0])
                total = 1 if number is None else int(number[3])
                of = f"{len(complete):,} of {plural(total, 'shard')} {'is' if total == 1 else 'are'} there"
                text = f"An unfinished conversion: {of}; pass resume=True to continue or overwrite=True to start over"
                raise existing_file(location.shown, text)
        raise existing_file(location.shown)


class StoreSink(Sink):
    """A folder in a store behind a URL, where nothing can be renamed. The path holds secrets; the pickle holds none."""

    # New shards get new names if they replace a checkpoint, and the old shards are removed once the index names the new
    # shards. If interrupted, the folder has the old checkpoint, the new one, or an index of a missing file.

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
        files: Any = self.location.files
        backend = files.backend(self.location.path)
        seconds = _TIMEOUTS * backend.timeout + nbytes / _SLOWEST
        try:
            left_behind(lambda: change(backend), seconds)
        except RemoteError:
            raise
        except TimeoutError:
            raise RemoteTimeoutError(
                f"the store has not completed a write of {nbytes:,} bytes within {seconds:,.0f} s, but may still do so",
                shown,
            ) from None

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
    def begin(self, *, overwrite: bool = False, config: bytes | Location | None = None) -> Iterator[None]:
        self._before = self.names() if overwrite else set()
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
                    warning("%s: cannot delete the shards of the failed save: %s", self.location.shown, error)
                raise

    def new(self, name: str, size: int, digest: Digest | None = None) -> AtomicFile:
        file = AtomicFile(os.path.join(self._folder, name), size, durable=False, digest=digest)
        return self._stack.enter_context(file)

    def add(self, name: str, file: AtomicFile) -> None:
        """Upload a file at once, which saves disk space on this machine; ``model.safetensors`` waits for `commit`."""
        if name == SINGLE:
            self._single = file
            return
        if _STORED_SHARD.fullmatch(name):
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
        outdated = {name for name in self._before if name == SINGLE or _STORED_SHARD.fullmatch(name)} - new
        if self._before and INDEX not in files:  # the only shard is model.safetensors
            outdated = {*outdated, INDEX} - {SINGLE}  # the index may keep readers away
        for name, content in files.items():
            if name not in (INDEX, CONFIG):
                self._put(name, content)
        if (config := files.get(CONFIG)) is not None and self._before:
            old = {*filter(is_weight_file, self.names())} - new
            if old and config != self.content(CONFIG):
                # Readers must not find old weights beside the new config: until the new index, this one refuses them.
                self._old = {name: self.content(name) for name in (CONFIG, INDEX)}
                self._complete = True
                self._put(INDEX, blocking_index([CONFIG, *sorted(new)]))
                if SINGLE in old:
                    self._old = {}  # it cannot be brought back
                    self.remove([SINGLE])
            self._complete = True
            self._put(CONFIG, config)
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


def find_shard(
    places: Iterable[tuple[Sink, str]], content: Mapping[str, Any], identity: list[Any] | None = None
) -> tuple[Sink, str] | None:
    """Return the first place with the ``content`` of a shard's record, or with an ``identity`` that is trusted."""
    for place, name in places:
        trusted = identity is not None and place.identity(name) == identity
        if trusted or place.holds(name, content["size"], content["sha256"], content.get("object")):
            return place, name
    return None


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
    """Return free names for shards: their own, or with the next total that no file in the folder has."""
    # model.safetensors keeps its name in a local folder, and gets numbers in a store, which cannot replace it.
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
    """Return an index that no reader can open, and that is not stale if one of ``names`` is there."""
    return json.dumps({"metadata": {}, "weight_map": {name: name for name in (_MISSING, *names)}}).encode()


def _is_same(source: Location, copy: Location) -> bool:
    """Return True if a file would be copied onto itself."""
    if copy.files.remote or source.files.remote:
        return copy.files.remote and source.files.remote and source.shown == copy.shown
    return os.path.exists(copy.path) and os.path.samefile(source.path, copy.path)


def remove_killed(sink: Sink) -> None:
    """Remove leftovers of killed calls from a model: their temporary files, and shards that only their indexes name."""
    names = sink.names()
    hidden = {entry: name for entry in names if (name := hidden_name(entry)) is not None}
    kept = {shard for name in names - hidden.keys() if _is_index(name) for shard in indexed_names(sink, name)}
    for entry, name in hidden.items():
        if _is_index(name):
            sink.remove(shard for shard in indexed_names(sink, entry) - kept if NUMBERED.fullmatch(shard))
    of_models = [name for name in hidden.values() if name.endswith((".safetensors", ".json")) or is_extra(name)]
    remove_abandoned(sink.location.path or os.curdir, of_models)


def _is_index(name: str) -> bool:
    return name.endswith(_INDEX_SUFFIX)
