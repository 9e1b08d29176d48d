"""Replacement policies: the files to replace in a folder, and the order, so that it is never half old and half new.

Without ``overwrite``, nothing is replaced. With ``overwrite``, the files of the old checkpoint are removed: shards and
records of conversions, the index, and ``model.safetensors``. Foreign files stay.

New files in a local folder are complete and synced under temporary names first, and shards get names that are free:
``model-00001-of-0000M.safetensors``, where M is the least number with no file in the folder, from the number of shards
on. So no step changes a file that an index names. ``LocalReplacement.commit`` then takes these steps. Readers find the
old model, the new model or an error after each of them, whether they prefer ``model.safetensors`` (transformers) or the
index (diffusers):

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import TypeAlias

from ...engine.run.atomic_file import (
    AtomicFile,
    Swap,
    hidden_name,
    remove_abandoned,
    set_owner_and_mode,
)
from ...errors import FormatError
from ...formats.folder import CONFIG, INDEX, SINGLE, is_weight_file
from ...formats.numbered import PART, sets_of
from ...stores.local import identity_of, replace, sync_folder
from . import journal
from .folder import Folder, LocalFolder, check_free, is_extra

# Shards of any writer. An old index can name other files too; they are never removed.
_NUMBERED = re.compile(r".+-[0-9]{5,}-of-[0-9]{5,}\.safetensors", re.ASCII | re.DOTALL)
# Names of indexes.
_INDEX_SUFFIX = ".safetensors.index.json"

# A file that is never there; by its name, readers miss it before they open another.
_MISSING = "being-replaced.safetensors"

# Puts a new shard in place, with the owner and mode of an old file.
Put: TypeAlias = Callable[[Swap, "os.stat_result | None"], object]


class Replacement(ABC):
    """Replaces the content of a folder by new shards. Create a new object for each conversion."""

    is_new = True  # False if the folder has files

    # ---- before anything is written ----

    @abstractmethod
    def check_free(self, overwrite: bool) -> None:
        """Refuse a folder with content, before anything is read."""

    @abstractmethod
    def outdated(self, files: Sequence[str]) -> list[str]:
        """List the files of the old checkpoint and earlier conversions, to remove once the index names new shards."""

    # ---- while files are put in place ----

    @abstractmethod
    def undone(self) -> AbstractContextManager[object]:
        """Return a context that cleans up after an error: it removes a new folder, or uploaded shards."""

    @abstractmethod
    def shard(self, stack: ExitStack, file: str) -> AbstractContextManager[ExitStack]:
        """Return a context with a stack for putting a shard in place: ``stack``, or a stack that uploads at once."""
        # Local shards wait for each other. Uploading each at once saves disk space on this machine.

    def before_config(self, config: bytes | None, placed: Collection[str]) -> AbstractContextManager[object]:
        """Return a context that must end when only the config, and the index or only shard, are left to upload."""
        return nullcontext()

    def after_index(self, outdated: Sequence[str]) -> AbstractContextManager[object]:
        """Return a context for all uploads. At its end, outdated files are removed."""
        return nullcontext()

    def blocking_index(
        self, config: bytes | None, outdated: Sequence[str], shards: Collection[str], placed: Collection[str]
    ) -> dict[str, dict[str, str]] | None:
        """Return an index that keeps readers from the folder during `commit`; None if its config does not change."""
        return None

    def commit(  # noqa: B027
        self,
        shards: Mapping[str, Put],
        beside: Mapping[str, AtomicFile],  # sealed
        outdated: Sequence[str],
        *,
        single: bool,  # True if the only shard is model.safetensors
        block: AtomicFile | None,  # see `blocking_index`
    ) -> None:
        """Put local files in place; see the docstring of the module."""


class LocalReplacement(Replacement):
    """Renames new files when all are complete."""

    def __init__(self, folder: LocalFolder) -> None:
        self._folder = folder

    def check_free(self, overwrite: bool) -> None:
        path = self._folder.location.path
        if os.path.lexists(path) and not os.path.isdir(path):
            raise FileExistsError(errno.EEXIST, "This is a file, but shards need a folder", path)
        names = self._folder.names()
        if names and not overwrite:
            journal.check_unfinished(self._folder, names)
            check_free(path, overwrite)

    def outdated(self, files: Sequence[str]) -> list[str]:
        """List ``model.safetensors``, indexed and recorded shards, and records; the only index of another name too."""
        names = self._folder.names()
        indexes = sorted(name for name in names if _is_index(name) and not name.startswith("."))
        old_index = INDEX if INDEX in indexes or len(indexes) != 1 else indexes[0]
        named = indexed_names(self._folder, old_index) | self._unfinished()
        if not names & {INDEX, SINGLE, *indexes}:  # the only complete set of shards is the old checkpoint
            named.update(_complete_set(names - {*files}))
        shards = set(filter(_NUMBERED.fullmatch, named))
        single = {SINGLE} if self._has_single() else set()
        index = {old_index} & names if SINGLE in files or old_index != INDEX else set()
        return sorted((single | index | shards) - {*files})

    def _unfinished(self) -> set[str]:
        """Return the shards that interrupted conversions have put here."""
        return {
            name
            for call, of_call in journal.records(self._folder).items()
            for file, record in of_call.items()
            for place, name in journal.places(self._folder, call, file)
            if place is self._folder and place.holds(name, record["size"], record["sha256"])
        }

    @contextmanager
    def undone(self) -> Iterator[None]:
        path = self._folder.location.path
        existed = os.path.isdir(path)
        try:
            yield
        except BaseException:
            if not existed:
                with suppress(OSError):
                    os.rmdir(path)
            raise

    def shard(self, stack: ExitStack, file: str) -> AbstractContextManager[ExitStack]:
        return nullcontext(stack)

    def blocking_index(
        self, config: bytes | None, outdated: Sequence[str], shards: Collection[str], placed: Collection[str]
    ) -> dict[str, dict[str, str]] | None:
        """Return an index also if the old index names a file that will be replaced."""
        weights = {*filter(is_weight_file, self._folder.names())} - {*placed}
        changes = config is not None and bool(weights) and config != self._folder.content(CONFIG)
        if not changes and (indexed_names(self._folder) - {*placed}).isdisjoint(shards):
            return None
        return blocking_index([CONFIG, *outdated, *sorted(shards)])

    def commit(
        self,
        shards: Mapping[str, Put],
        beside: Mapping[str, AtomicFile],
        outdated: Sequence[str],
        *,
        single: bool,
        block: AtomicFile | None,
    ) -> None:
        if not single and SINGLE not in outdated and self._has_single():
            text = f"Other programs load this file instead of the shards of {INDEX}: remove it, or choose a new folder"
            raise FileExistsError(errno.EEXIST, text, self._folder.shown(SINGLE))
        other_indexes = [name for name in outdated if _is_index(name) and name != INDEX]
        gone = {SINGLE, INDEX} & {*outdated, *([] if block is None else [INDEX])} - {*shards, *beside}
        with Swap() as swap:
            if block is not None:
                self._hide(other_indexes, swap)  # the next call could not tell that they are old
                block.put(swap)
                self._hide({SINGLE} & {*outdated, *shards}, swap)
            for name in sorted(beside.keys() - {INDEX}, key=lambda name: name == CONFIG):
                beside[name].put(swap)
            like = self._like(outdated)
            for put in shards.values():
                put(swap, like)
            self._hide(other_indexes, swap)
            if INDEX in beside:
                beside[INDEX].put(swap)
            self._hide(gone, swap)
            try:
                sync_folder(self._folder.location.path)
            except OSError as error:
                raise type(error)(error.errno, error.strerror, self._folder.location.path) from None
            finished = swap.finish([*map(self._folder.shown, outdated)])
        if finished:
            remove_killed(self._folder)

    def _like(self, outdated: Iterable[str]) -> os.stat_result | None:
        """Return the status of an old shard."""
        for name in outdated:
            if name == SINGLE or _NUMBERED.fullmatch(name):
                with suppress(OSError):
                    return os.stat(self._folder.shown(name))
        return None

    def _hide(self, names: Iterable[str], swap: Swap) -> None:
        for path in map(self._folder.shown, names):
            if os.path.isfile(path):
                swap.hide(path)

    def _has_single(self) -> bool:
        return os.path.isfile(self._folder.shown(SINGLE))


def taking(waiting: Folder, file: str, folder: Folder, name: str) -> Put:
    """Return a function that moves a complete shard from a local subfolder into its folder."""
    return partial(_take, waiting.shown(file), folder.shown(name))


def _take(old: str, new: str, swap: Swap, like: os.stat_result | None) -> None:
    if os.path.lexists(new):
        if os.path.basename(new) != SINGLE:
            raise FileExistsError(errno.EEXIST, "Another conversion has written this shard; repeat the call", new)
        like = os.stat(new) if os.path.exists(new) else like
        swap.keep(new)
    swap.undo.append(partial(_give_back, new, old))
    if like is not None and os.name != "nt":
        set_owner_and_mode(old, like)
    replace(old, new, new)


def _give_back(new: str, old: str) -> None:
    if not os.path.lexists(old):
        os.rename(new, old)


def blocking_index(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return an index that no reader can open.

    Args:
        names: other files. One that is there keeps the index from being stale; the next call removes the shards.
    """
    return {"metadata": {}, "weight_map": {name: name for name in (_MISSING, *names)}}


def free_names(folder: Folder, files: Collection[str], taken: Collection[str] | None = None) -> dict[str, str]:
    """Return free names for shards: their own, or with the next total that no file in the folder has.

    ``model.safetensors`` keeps its name in a local folder, and gets numbers in a store, which cannot replace it.
    """
    taken = folder.names() if taken is None else taken
    numbered = SINGLE in taken and folder.location.files.remote
    usual = {file: "model-00001-of-00001.safetensors" if numbered and file == SINGLE else file for file in files}
    totals = {(numbers.stem, int(numbers.total), numbers.suffix) for numbers in sets_of([*taken])}
    parts = {file: part for file in files if (part := PART.fullmatch(usual[file])) is not None}
    shift = 0
    while any((part[1], int(part[3]) + shift, part[4]) in totals for part in parts.values()):
        shift += 1
    new = {file: f"{part[1]}-{part[2]}-of-{int(part[3]) + shift:05}{part[4]}" for file, part in parts.items()}
    return {**usual, **(new if shift else {})}


def remove_killed(folder: LocalFolder) -> None:
    """Remove what killed calls left of a model: their temporary files, and shards that only their indexes name."""
    names = folder.names()
    hidden = {entry: name for entry in names if (name := hidden_name(entry)) is not None}
    kept = {shard for name in names - hidden.keys() if _is_index(name) for shard in indexed_names(folder, name)}
    for entry, name in hidden.items():
        if _is_index(name):
            folder.remove(shard for shard in indexed_names(folder, entry) - kept if _NUMBERED.fullmatch(shard))
    of_models = [name for name in hidden.values() if name.endswith((".safetensors", ".json")) or is_extra(name)]
    remove_abandoned(folder.location.path or os.curdir, of_models)


def _is_index(name: str) -> bool:
    return name.endswith(_INDEX_SUFFIX)


def indexed_names(folder: Folder, index: str = INDEX) -> set[str]:
    """Return the indexed files of a folder; none if the index cannot be read."""
    try:
        weight_map = folder.read_json(index, INDEX).get("weight_map")
    except (FormatError, OSError):
        return set()
    named = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in named if isinstance(name, str)} & folder.names()


def _complete_set(names: Iterable[str]) -> list[str]:
    """Return the only complete set of shards of a folder without an index, or nothing."""
    shards = [name for name in names if name.endswith(".safetensors")]
    complete = [shard_set for shard_set in sets_of(shards) if shard_set.complete]
    return [*complete[0].files.values()] if len(complete) == 1 else []


class OldShards:
    """The index and the shards beside a new ``model.safetensors``: safeload would read them instead of the new file."""

    # The end of a `with` block that writes the file removes the old shards, unless an error occurred.

    def __init__(self, path: str, overwrite: bool) -> None:
        self._shards: list[tuple[LocalFolder, list[str]]] = []
        usual = os.path.basename(path) != SINGLE and not os.path.islink(path)
        for place in () if usual else {os.path.abspath(path), os.path.realpath(path)}:
            folder = LocalFolder(os.path.dirname(place))
            if os.path.basename(place) != SINGLE or not os.path.isfile(folder.shown(INDEX)):
                continue
            if not overwrite:
                message = f"The checkpoint of {INDEX} exists beside {SINGLE}; pass overwrite=True to replace it"
                raise FileExistsError(errno.EEXIST, message, folder.shown(INDEX))
            shards = sorted(name for name in indexed_names(folder) if _NUMBERED.fullmatch(name))
            self._shards.append((folder, [INDEX, *shards]))

    def check_source(self, paths: Sequence[str], *, every_tensor: bool) -> None:
        """Refuse to remove shards of the source if the new file does not get all of their tensors."""
        if not self._shards:
            return
        shards = [folder.shown(name) for folder, names in self._shards for name in names]
        shards = [path for path in shards if path.endswith(".safetensors") and os.path.exists(path)]
        sources = [path for path in paths if os.path.exists(path)]
        identities = {identity_of(os.stat(path))[2:] for path in sources}
        read = [path for path in shards if identity_of(os.stat(path))[2:] in identities]
        if read and not (every_tensor and len(read) == len(shards)):
            message = (
                f"{SINGLE} would replace all shards of {INDEX}, which are the source, but not get all of their "
                "tensors: choose another folder"
            )
            raise FileExistsError(errno.EEXIST, message, read[0])

    def __enter__(self) -> OldShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for folder, names in self._shards if kind is None else ():
            os.unlink(folder.shown(INDEX))  # an error must tell that readers still find the old shards
            folder.remove(names)
