"""Replacement policies: the files to replace in a folder, and the order, so that it is never half old and half new.

Without ``overwrite``, nothing is replaced. With ``overwrite``, the files of the old checkpoint are removed: shards and
records of conversions, the index, and ``model.safetensors``. Foreign files stay.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import TracebackType

from ...engine.run.atomic_file import leftovers
from ...errors import FormatError
from ...formats.folder import INDEX, RESUME, SINGLE
from ...formats.numbered import sets_of
from ...stores.local import identity_of, replace
from . import journal
from .folder import ASIDE, Folder, LocalFolder, check_free
from .journal import RECORD

# Shards of any writer. An old index can name other files too; they are never removed.
_NUMBERED = re.compile(r".+-[0-9]{5,}-of-[0-9]{5,}\.safetensors", re.ASCII | re.DOTALL)


class Replacement(ABC):
    """Replaces the content of a folder by new shards. Create a new object for each conversion."""

    # ---- before anything is written ----

    @abstractmethod
    def check_free(self, overwrite: bool) -> None:
        """Refuse a folder with content, before anything is read.

        Raises:
            FileExistsError: the folder has content and ``overwrite`` is False; or a file has its name.
        """

    @abstractmethod
    def outdated(self, files: Sequence[str]) -> list[str]:
        """List the files of the old checkpoint, and of earlier conversions, to remove once the index names new shards.

        Args:
            files: names of the new shards.

        Raises:
            FileExistsError: a foreign file would hide the new index from other programs.
        """

    @abstractmethod
    def free_names(self, files: Sequence[str]) -> dict[str, str]:
        """Return names for shards written together: their own names unless old files are in the way."""

    # ---- shards waiting for the last piece ----

    @abstractmethod
    def aside(self, file: str, plan: str) -> tuple[Folder, str]:
        """Return the folder and the name for a shard of a plan while the folder has other content."""

    @abstractmethod
    def begun(self, plan: str) -> bool:
        """Return True if shards of a plan were written aside and wait for its last piece."""

    @abstractmethod
    def asides(self) -> Sequence[Folder]:
        """List the subfolders in which shards of interrupted conversions wait."""

    @abstractmethod
    def collect(self, plan: str, places: Mapping[str, Folder]) -> None:
        """Move the shards of a plan, and their records, into the folder.

        Args:
            plan: id of the plan.
            places: the present folder of each shard.
        """

    @abstractmethod
    def leftovers(self, names: Sequence[str]) -> list[str]:
        """List temporary versions of these files, left by killed processes."""

    @abstractmethod
    def tidy(self, plan: str, names: Sequence[str], places: Iterable[Folder]) -> None:
        """Remove leftovers of killed processes, and subfolders in which shards waited.

        Args:
            plan: id of the plan.
            names: names of all files of the result.
            places: subfolders with shards of the plan.
        """

    # ---- while files are put in place ----

    @abstractmethod
    def undone(self) -> AbstractContextManager[object]:
        """Return a context that cleans up after an error: it removes a new folder, or uploaded shards."""

    @abstractmethod
    def shard(self, stack: ExitStack, file: str) -> AbstractContextManager[ExitStack]:
        """Return a context with a stack for putting a shard in place.

        All local shards wait for each other in ``stack``. Shards for a store are uploaded immediately, to save disk
        space on this machine.
        """

    @abstractmethod
    def before_config(
        self, config: bytes | None, outdated: Sequence[str], *, indexed: bool
    ) -> AbstractContextManager[object]:
        """Return a context that must end when only the config, and the index or only shard, are left to put in place.

        Args:
            config: content of the new config; None for none.
            outdated: see `outdated`.
            indexed: False if the only shard is ``model.safetensors``.
        """

    @abstractmethod
    def after_index(self, outdated: Sequence[str]) -> AbstractContextManager[object]:
        """Return a context for all files. At its end, outdated files are removed."""


class LocalReplacement(Replacement):
    """Writes new shards into a subfolder, or under temporary names, and renames them when all are complete."""

    def __init__(self, folder: LocalFolder) -> None:
        self._folder = folder
        self._hidden: dict[str, str] = {}  # old model.safetensors or index, while config and index are put in place

    def check_free(self, overwrite: bool) -> None:
        path = self._folder.location.path
        if os.path.lexists(path) and not os.path.isdir(path):
            raise FileExistsError(errno.EEXIST, "This is a file, but shards need a folder", path)
        names = self._folder.names()
        if names and not overwrite:
            journal.check_unfinished(self._folder, names)
            check_free(path, overwrite)

    def outdated(self, files: Sequence[str]) -> list[str]:
        """List ``model.safetensors``, indexed shards, recorded shards, and records.

        Without an index and a ``model.safetensors``, the only complete set of shards is the old checkpoint.
        """
        names = self._folder.names()
        indexed = _indexed(self._folder)
        if INDEX in names and SINGLE not in indexed and SINGLE not in files:
            self._check_no_single()
        shards = {name for name in indexed if _NUMBERED.fullmatch(name)}
        shards.update(name for name in journal.shards(self._folder, names) & names if _NUMBERED.fullmatch(name))
        if not names & {INDEX, SINGLE}:
            shards.update(filter(_NUMBERED.fullmatch, _complete_set(names - {*files})))
        single = {SINGLE} if self._has_single() else set()
        indexes = self.leftovers([INDEX]) if names else []  # a conversion was killed while they were hidden
        single.update(self.leftovers([SINGLE]) if names else (), indexes)
        for hidden in indexes:
            shards.update(name for name in _indexed(self._folder, hidden) if _NUMBERED.fullmatch(name))
        records = {name + RECORD for name in shards} & names
        index = {INDEX} & names if SINGLE in files else set()
        return sorted((single | index | shards | records) - {*files, *(file + RECORD for file in files)})

    def free_names(self, files: Sequence[str]) -> dict[str, str]:
        return {file: file for file in files}  # they replace old files together

    def aside(self, file: str, plan: str) -> tuple[Folder, str]:
        return self._aside(plan), file

    def begun(self, plan: str) -> bool:
        return os.path.isdir(self._aside(plan).location.path)

    def asides(self) -> list[Folder]:
        names = sorted(name for name in self._folder.names() if name.startswith(ASIDE) and name != RESUME)
        return [LocalFolder(path) for path in map(self._folder.shown, names) if os.path.isdir(path)]

    def collect(self, plan: str, places: Mapping[str, Folder]) -> None:
        for file, place in places.items():
            # An interrupted call can have left the shard in the usual subfolder.
            for source in sorted({place.place, self._aside(plan).place} - {self._folder.place}):
                self._take(file, LocalFolder(source))

    def leftovers(self, names: Sequence[str]) -> list[str]:
        return list(map(os.path.basename, leftovers(self._folder.location.path, names)))

    def tidy(self, plan: str, names: Sequence[str], places: Iterable[Folder]) -> None:
        ours = {self._aside(plan).place, *(place.place for place in places)}
        waited = {aside.place for aside in self.asides()} & ours
        for folder in (self._folder.place, *sorted(waited)):
            with suppress(OSError):  # another process removed it, or Windows has it open
                for path in leftovers(folder, names):
                    os.unlink(path)
                if folder in waited:
                    LocalFolder(folder).remove(names)
                    journal.clear(LocalFolder(folder))
                    os.rmdir(folder)

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

    @contextmanager
    def before_config(self, config: bytes | None, outdated: Sequence[str], *, indexed: bool) -> Iterator[None]:
        """Hide the old ``model.safetensors`` or index at the end: readers would prefer it to the new files."""
        if indexed and SINGLE not in outdated:
            self._check_no_single()
        yield
        for name in (SINGLE, INDEX):
            if name in outdated and os.path.isfile(self._folder.shown(name)):
                hidden = self._folder.shown(f".{name}.{os.urandom(8).hex()}.tmp")
                os.rename(self._folder.shown(name), hidden)
                self._hidden[name] = hidden

    @contextmanager
    def after_index(self, outdated: Sequence[str]) -> Iterator[None]:
        """Restore the hidden file if the new files cannot be put in place."""
        try:
            yield
        except BaseException:
            for name, hidden in self._hidden.items():
                with suppress(OSError):
                    os.rename(hidden, self._folder.shown(name))
            self._hidden = {}
            raise
        files = [*map(os.path.basename, self._hidden.values()), *(name for name in outdated if name != SINGLE)]
        self._hidden = {}
        self._folder.remove(sorted(files, key=lambda name: name.startswith(".")))  # a hidden index names the shards

    def _aside(self, plan: str) -> LocalFolder:
        return LocalFolder(self._folder.shown(ASIDE + plan))

    def _take(self, file: str, source: LocalFolder) -> None:
        """Move a shard and its record here; at any moment, one of the folders has both.

        A replaced shard keeps its mode, as with `AtomicFile`. A shard missing from ``source`` was moved before.
        """
        journal.copy(file, source, self._folder)
        old, new = source.shown(file), self._folder.shown(file)
        if os.name != "nt":
            with suppress(FileNotFoundError):
                os.chmod(old, stat.S_IMODE(os.stat(new).st_mode))
        with suppress(FileNotFoundError):
            replace(old, new, new)
        journal.forget(source, [file])

    def _has_single(self) -> bool:
        return os.path.isfile(self._folder.shown(SINGLE))

    def _check_no_single(self) -> None:
        """Refuse to leave a ``model.safetensors`` beside the index.

        Raises:
            FileExistsError: the file exists.
        """
        if self._has_single():
            message = (
                f"Other programs load this file instead of the shards of {INDEX}: remove it, or choose a new folder"
            )
            raise FileExistsError(errno.EEXIST, message, self._folder.shown(SINGLE))


def _indexed(folder: LocalFolder, index: str = INDEX) -> set[str]:
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
    """The index and the shards beside a new ``model.safetensors``: safeload would read them instead of the new file.

    Write the file in a ``with`` block: its end removes the old shards, unless an error occurred.

    Args:
        path: path of the new file.
        overwrite: True if they may be removed.

    Raises:
        FileExistsError: they exist, and ``overwrite`` is False.
    """

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
            shards = sorted(name for name in _indexed(folder) if _NUMBERED.fullmatch(name))
            self._shards.append((folder, [INDEX, *shards, *(name + RECORD for name in shards)]))

    def check_source(self, paths: Sequence[str], *, every_tensor: bool) -> None:
        """Refuse to remove shards of the source if the new file does not get all of their tensors.

        Args:
            paths: source files.
            every_tensor: True if it writes all of their tensors.

        Raises:
            FileExistsError: tensors would be lost.
        """
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
            folder.remove(names)  # the index first
