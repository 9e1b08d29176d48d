"""A folder on this disk that gets a new checkpoint: old or new, never between.

New files are complete and synced under temporary names first, and shards get names that are free:
``model-00001-of-0000M.safetensors``, where M is the least number with no file in the folder, from the number of shards
on. So no step changes a file that an index names. `DiskSink.commit` then takes these steps. Readers find the old model,
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
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from ...engine.run.atomic_file import (
    AtomicFile,
    Digest,
    Swap,
    hidden_name,
    naming,
    remove_abandoned,
)
from ...errors import FormatError
from ...formats.folder import CONFIG, INDEX, SINGLE, is_weight_file
from ...formats.numbered import sets_of
from ...stores.files import LOCAL, Location
from ...stores.local import identity_of, sync_folder
from . import journal
from .sink import Sink, blocking_index, indexed_names, is_extra, shared_identity

# Shards of any writer. An old index can name other files too; they are never removed.
_NUMBERED = re.compile(r".+-[0-9]{5,}-of-[0-9]{5,}\.safetensors", re.ASCII | re.DOTALL)
# Names of indexes.
_INDEX_SUFFIX = ".safetensors.index.json"


class DiskSink(Sink):
    """A folder on this disk."""

    _unreadable = (OSError, FormatError)

    def names(self) -> set[str]:
        path = self.location.path
        return set(os.listdir(path)) if os.path.isdir(path) else set()  # this also refreshes the NFS client's cache

    def identity(self, name: str) -> list[Any] | None:
        try:
            return shared_identity(identity_of(os.stat(self.shown(name))))
        except OSError:
            return None

    def writing(self, name: str, size: int, *, overwrite: bool = True, digest: Digest | None = None) -> AtomicFile:
        os.makedirs(self.location.path, exist_ok=True)
        return AtomicFile(self.shown(name), size, overwrite=overwrite, digest=digest, follow=False)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):
                (os.rmdir if name.endswith("/") else os.unlink)(self.shown(name))

    # ---- a new checkpoint ----

    @contextmanager
    def begin(self, *, overwrite: bool = False, config: bytes | None = None) -> Iterator[None]:
        existed = os.path.isdir(self.location.path)
        self._overwrite, self._config = overwrite, config
        self._files: dict[str, AtomicFile] = {}  # complete, under temporary names
        try:
            with ExitStack() as self._stack:
                yield
        except BaseException:
            if not existed:
                with suppress(OSError):
                    os.rmdir(self.location.path)
            raise

    def new(self, name: str, size: int) -> AtomicFile:
        return self._stack.enter_context(self.writing(name, size, overwrite=self._replaces(name)))

    def add(self, name: str, file: AtomicFile) -> None:
        self._files[name] = file

    def _replaces(self, name: str) -> bool:
        """Return False for a shard, whose name is free."""
        return self._overwrite and _NUMBERED.fullmatch(name) is None

    def commit(
        self,
        files: Mapping[str, bytes | Location],
        waiting: Sequence[tuple[str, str]] = (),
        placed: Collection[str] = (),
    ) -> None:
        shards, taken = [*self._files], dict(waiting)
        new = {*shards, *taken, *placed}
        outdated = self._outdated({*new, *files}) if self._overwrite else []
        if new != {SINGLE} and SINGLE not in outdated and os.path.isfile(self.shown(SINGLE)):
            text = f"Other programs load this file instead of the shards of {INDEX}: remove it, or choose a new folder"
            raise FileExistsError(errno.EEXIST, text, self.shown(SINGLE))
        self._overwrite = self._overwrite or not shards  # an earlier call may have put files beside shards of pieces
        block = None
        if self._is_read_between(new, placed):
            self._put(INDEX, blocking_index([CONFIG, *outdated, *sorted(new)]))
            block = self._files.pop(INDEX)
        for name, content in files.items():
            self._put(name, content)
        if self._config is not None:
            self._put(CONFIG, self._config)
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
        like = self._like(outdated)
        with Swap() as swap:
            for name, source in steps:
                target, waits = self.shown(name), name in taken
                if source is None:
                    if os.path.isfile(target):
                        swap.hide(target)
                    continue
                if waits and name != SINGLE and os.path.lexists(target):
                    text = "Another conversion has written this shard; repeat the call"
                    raise FileExistsError(errno.EEXIST, text, target)
                overwrite, owner = waits or self._replaces(name), like if name in new else None
                swap.put(source, target, like=owner, overwrite=overwrite, durable=not waits)
            with naming(self.location.path):
                sync_folder(self.location.path)
            finished = swap.finish([*map(self.shown, outdated)])
        for file in (*self._files.values(), *([] if block is None else [block])):
            file.temporary = None  # it is in place
        if finished:
            remove_killed(self)

    def _outdated(self, files: Collection[str]) -> list[str]:
        """List ``model.safetensors``, indexed and recorded shards, and records; the only index of another name too."""
        names = self.names()
        indexes = sorted(name for name in names if _is_index(name) and not name.startswith("."))
        old_index = INDEX if INDEX in indexes or len(indexes) != 1 else indexes[0]
        named = indexed_names(self, old_index) | self._unfinished()
        if not names & {INDEX, SINGLE, *indexes}:  # the only complete set of shards is the old checkpoint
            shard_sets = sets_of([name for name in names - {*files} if name.endswith(".safetensors")])
            complete = [shard_set for shard_set in shard_sets if shard_set.complete]
            named.update(complete[0].files.values() if len(complete) == 1 else ())
        shards = set(filter(_NUMBERED.fullmatch, named))
        single = {SINGLE} if os.path.isfile(self.shown(SINGLE)) else set()
        index = {old_index} & names if SINGLE in files or old_index != INDEX else set()
        return sorted((single | index | shards) - {*files})

    def _unfinished(self) -> set[str]:
        """Return the shards that interrupted conversions have put here."""
        return {
            name
            for call, of_call in journal.records(self).items()
            for file, record in of_call.items()
            for place, name in journal.places(self, call, file)
            if place is self and place.holds(name, record["size"], record["sha256"])
        }

    def _is_read_between(self, new: Collection[str], placed: Collection[str]) -> bool:
        """Return True if readers would find old weights beside the new config, or new shards by the old index."""
        weights = {*filter(is_weight_file, self.names())} - {*placed}
        if self._config is not None and weights and self._config != self.content(CONFIG):
            return True
        return not (indexed_names(self) - {*placed}).isdisjoint(new)

    def _like(self, outdated: Iterable[str]) -> os.stat_result | None:
        """Return the status of an old shard."""
        for name in outdated:
            if name == SINGLE or _NUMBERED.fullmatch(name):
                with suppress(OSError):
                    return os.stat(self.shown(name))
        return None


def remove_killed(sink: DiskSink) -> None:
    """Remove what killed calls left of a model: their temporary files, and shards that only their indexes name."""
    names = sink.names()
    hidden = {entry: name for entry in names if (name := hidden_name(entry)) is not None}
    kept = {shard for name in names - hidden.keys() if _is_index(name) for shard in indexed_names(sink, name)}
    for entry, name in hidden.items():
        if _is_index(name):
            sink.remove(shard for shard in indexed_names(sink, entry) - kept if _NUMBERED.fullmatch(shard))
    of_models = [name for name in hidden.values() if name.endswith((".safetensors", ".json")) or is_extra(name)]
    remove_abandoned(sink.location.path or os.curdir, of_models)


def _is_index(name: str) -> bool:
    return name.endswith(_INDEX_SUFFIX)


def shards_beside(path: str, overwrite: bool) -> list[str]:
    """Return the index and the shards that safeload would read instead of a new ``model.safetensors``."""
    old: list[str] = []
    usual = os.path.basename(path) != SINGLE and not os.path.islink(path)
    for place in () if usual else {os.path.abspath(path), os.path.realpath(path)}:
        folder = DiskSink(LOCAL, os.path.dirname(place))
        index = folder.shown(INDEX)
        if os.path.basename(place) != SINGLE or not os.path.isfile(index):
            continue
        if not overwrite:
            message = f"The checkpoint of {INDEX} exists beside {SINGLE}; pass overwrite=True to replace it"
            raise FileExistsError(errno.EEXIST, message, index)
        old += [index, *map(folder.shown, sorted(filter(_NUMBERED.fullmatch, indexed_names(folder))))]
    return old


def remove_shards(old: Iterable[str]) -> None:
    """Remove what `shards_beside` has found, once the new file is in place."""
    for path in old:
        is_index = os.path.basename(path) == INDEX  # readers find the old shards as long as it stays
        with nullcontext() if is_index else suppress(OSError):
            os.unlink(path)


def check_shards(old: Collection[str], read: Iterable[str], *, every_tensor: bool) -> None:
    """Refuse to remove shards of the source if the new file does not get all of their tensors."""
    if not old:
        return
    shards = [path for path in old if path.endswith(".safetensors") and os.path.exists(path)]
    identities = {identity_of(os.stat(path))[2:] for path in read if os.path.exists(path)} if shards else set()
    lost = [path for path in shards if identity_of(os.stat(path))[2:] in identities]
    if lost and not (every_tensor and len(lost) == len(shards)):
        message = (
            f"{SINGLE} would replace all shards of {INDEX}, which are the source, but not get all of their "
            "tensors: choose another folder"
        )
        raise FileExistsError(errno.EEXIST, message, lost[0])
