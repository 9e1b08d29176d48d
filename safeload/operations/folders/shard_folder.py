"""A folder of shards that is being written: what any has in common, and one of this machine.

A file is in place when it is complete: a local one is renamed, one for a store waits on this machine and is uploaded.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Protocol

from ...base.paths import absolute
from ...engine.run.atomic_file import AtomicFile, leftovers
from ...engine.run.digest import Digest
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError
from ...formats.folder import INDEX, SINGLE, sets_of
from ...formats.safetensors.file import open_file
from ...stores.files import LOCAL, Files, Location
from ...stores.json_file import read_json
from ...stores.local import Identity, identity_of, replace

_BUFFER = 4 << 20
# The names of folders in which shards wait begin with this; the plan's id follows.
_ASIDE = ".safeload-"
# Follows the name of a shard in the name of its record, see `journal`.
RECORD = ".done.json"
# Shards of any writer. An old index may name other files too, which are never removed.
_NUMBERED = re.compile(r".+-[0-9]{5,}-of-[0-9]{5,}\.safetensors", re.ASCII | re.DOTALL)


class Folder(Protocol):
    """A folder of shards that is being written."""

    @property
    def files(self) -> Files:
        """Where its path leads."""

    @property
    def title(self) -> str:
        """The path as messages and reports have it."""

    @property
    def place(self) -> str:
        """The path as plans have it, without secrets."""

    def public_options(self) -> dict[str, Any] | None:
        """The ``storage_options`` that plans have; see `Files`."""

    def shown(self, name: str) -> str:
        """The path of one of its files, as messages and reports have it."""

    # ---- what is in it ----

    def names(self) -> set[str]:
        """What is in the folder; nothing where there is none."""

    def check_free(self, overwrite: bool) -> None:
        """Refuses a folder that has content, before anything is read.

        Raises:
            FileExistsError: there is a file of this name; or the folder has content, and ``overwrite`` is not set.
        """

    def read_json(self, name: str, what: str) -> dict[str, Any]:
        """Parses a file of the folder, see `stores.json_file.read_json`."""

    def open_shard(self, name: str) -> WeightFile:
        """Opens a shard, for its header.

        Raises:
            FileNotFoundError: it is not there.
            FormatError, OSError: it cannot be opened.
        """

    def same_file(self, name: str, other: Location) -> bool:
        """Whether a file of the folder is the one at another path."""

    def stamp(self, name: str) -> list[Any] | None:
        """What the record of a file has beside its size and digest."""

    def identity(self, name: str) -> list[int] | None:
        """Identify a file without reading it, by a plain list that other machines can compare; None if impossible."""

    def holds(self, name: str, size: int, sha256: str, version: Any = None) -> bool:
        """Whether a file is still what its record says."""

    # ---- writing ----

    def writing(
        self, name: str, size: int, *, overwrite: bool, digest: Digest | None = None
    ) -> AbstractContextManager[AtomicFile]:
        """A file under construction, which the end of the ``with`` block puts in place; see `AtomicFile`."""

    def shard(self, stack: ExitStack, name: str) -> AbstractContextManager[ExitStack]:
        """Gives the stack for a shard that is written together with all others: its end puts the shard in place.

        Local shards wait for each other, in ``stack``. Of those for a store only one at a time waits on this machine.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Removes files. Those that do not exist do no harm."""

    def undone(self) -> AbstractContextManager[object]:
        """While it is entered, an error removes what was made: the folder if it is empty, and each `shard`."""

    # ---- replacing a checkpoint ----

    def free_names(self, files: Sequence[str]) -> dict[str, str]:
        """Names for shards that are written together; others than the given ones where these would be in the way."""

    def apart(self, plan: str, files: Sequence[str]) -> dict[str, tuple[Folder, str]]:
        """Folder and name for the shards of a plan while the folder has other content."""

    def waits(self, plan: str) -> bool:
        """Whether shards of a plan are there, or were, as `apart` has it."""

    def asides(self) -> Sequence[Folder]:
        """Folders inside this one in which shards of interrupted conversions wait."""

    def names_for(self, file: str, plan: str) -> tuple[str, ...]:
        """The names that a shard of a plan may have in this folder."""

    def places(self, plan: str) -> list[Folder]:
        """Where a shard may be that a plan has for this folder."""

    def outdated(self, files: Sequence[str]) -> list[str]:
        """Files of the old checkpoint, and of earlier conversions, to remove once the index names these shards.

        Raises:
            FileExistsError: a file that other programs prefer to the index, and that belongs to neither.
        """

    def before_config(self, config: bytes | None, outdated: Sequence[str]) -> AbstractContextManager[object]:
        """Its end comes when only the config and the index are left to be put in place.

        Args:
            config: what the config will be; None for none.
            outdated: the files that `after_index` removes.
        """

    def after_index(self, outdated: Sequence[str]) -> AbstractContextManager[object]:
        """Its end comes when everything is in place."""

    def moves(self, plan: str, places: Mapping[str, Folder]) -> list[tuple[str, LocalFolder, LocalFolder]]:
        """Shards of a plan that have to be moved, from one folder to another.

        Args:
            plan: its id.
            places: the folder of each of its shards.
        """

    def leftovers(self, names: Sequence[str]) -> list[str]:
        """Names of what killed processes have left of these files."""

    def tidy(self, plan: str, names: Sequence[str], places: Iterable[Folder]) -> None:
        """Remove what killed processes, and pieces whose sources changed, have left of these files.

        Args:
            plan: its id.
            names: of the files.
            places: folders in which shards of the plan have waited.
        """


class LocalFolder:
    """A folder of this machine; see `Folder`.

    Args:
        path: of the folder.
    """

    files: Files = LOCAL

    def __init__(self, path: str) -> None:
        self.title = path
        self._hidden: str | None = None  # the old model.safetensors, while config and index are put in place

    @property
    def place(self) -> str:
        """See `Folder`."""
        return absolute(self.title)

    def public_options(self) -> None:
        """See `Folder`."""

    def shown(self, name: str) -> str:
        """See `Folder`."""
        return os.path.join(self.title, name)

    def names(self) -> set[str]:
        """See `Folder`. On NFS this also has the machine forget what it remembers of the folder."""
        return set(os.listdir(self.title)) if os.path.isdir(self.title) else set()

    def check_free(self, overwrite: bool) -> None:
        """See `Folder`."""
        if not os.path.isdir(self.title) or self.names():
            check_free(self.title, overwrite)

    def read_json(self, name: str, what: str) -> dict[str, Any]:
        """See `Folder`."""
        return read_json(self.shown(name), what)

    def open_shard(self, name: str) -> WeightFile:
        """See `Folder`."""
        return open_file(self.shown(name), brief=True)

    def same_file(self, name: str, other: Location) -> bool:
        """See `Folder`."""
        path = self.shown(name)
        return not other.files.remote and os.path.exists(path) and os.path.samefile(other.path, path)

    def stamp(self, name: str) -> None:
        """See `Folder`: nothing, as the digest is compared."""

    def identity(self, name: str) -> list[int] | None:
        """See `Folder`."""
        try:
            return shared_identity(identity_of(os.stat(self.shown(name))))
        except OSError:
            return None

    def holds(self, name: str, size: int, sha256: str, version: Any = None) -> bool:
        """See `Folder`."""
        path = self.shown(name)
        try:
            return os.path.getsize(path) == size and bool(_digest_of(path) == sha256)
        except OSError:
            return False

    def writing(self, name: str, size: int, *, overwrite: bool, digest: Digest | None = None) -> AtomicFile:
        """See `Folder`."""
        os.makedirs(self.title, exist_ok=True)
        return AtomicFile(self.shown(name), size, overwrite=overwrite, digest=digest)

    def shard(self, stack: ExitStack, name: str) -> AbstractContextManager[ExitStack]:
        """See `Folder`."""
        return nullcontext(stack)

    def remove(self, names: Sequence[str]) -> None:
        """See `Folder`."""
        for name in names:
            with suppress(OSError):
                os.unlink(self.shown(name))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """See `Folder`."""
        made = not os.path.isdir(self.title)
        try:
            yield
        except BaseException:
            if made:
                with suppress(OSError):
                    os.rmdir(self.title)
            raise

    def free_names(self, files: Sequence[str]) -> dict[str, str]:
        """See `Folder`: all files are renamed into place together."""
        return {file: file for file in files}

    def aside(self, plan: str) -> LocalFolder:
        """Where the shards of a plan wait that replaces what the folder has."""
        return LocalFolder(os.path.join(self.title, _ASIDE + plan))

    def apart(self, plan: str, files: Sequence[str]) -> dict[str, tuple[Folder, str]]:
        """See `Folder`: `moves` brings them here."""
        return {file: (self.aside(plan), file) for file in files}

    def waits(self, plan: str) -> bool:
        """See `Folder`."""
        return os.path.isdir(self.aside(plan).title)

    def asides(self) -> list[LocalFolder]:
        """See `Folder`."""
        found = [LocalFolder(self.shown(name)) for name in sorted(self.names()) if name.startswith(_ASIDE)]
        return [place for place in found if os.path.isdir(place.title)]

    def names_for(self, file: str, plan: str) -> tuple[str, ...]:
        """See `Folder`."""
        return (file,)

    def places(self, plan: str) -> list[Folder]:
        """See `Folder`."""
        target, name = os.path.split(self.place)
        return [self, LocalFolder(target)] if name.startswith(_ASIDE) else [self]

    def outdated(self, files: Sequence[str]) -> list[str]:
        """See `Folder`: ``model.safetensors``, shards that the old index names or that have a record, and records.

        Without an index and a ``model.safetensors``, the one complete set of shards is the old checkpoint.
        """
        names = self.names()
        indexed = self.indexed()
        if INDEX in names and SINGLE not in indexed:
            self._check_no_single()
        shards = {name for name in indexed if _NUMBERED.fullmatch(name)}
        shards.update(name for name in names if name + RECORD in names and _NUMBERED.fullmatch(name))
        if not names & {INDEX, SINGLE}:
            shards.update(filter(_NUMBERED.fullmatch, _complete_set(names - {*files})))
        records = {name + RECORD for name in shards} & names
        single = {SINGLE} if self._has_single() else set()
        single.update(self.leftovers([SINGLE]) if names else ())  # a conversion was killed while it was hidden
        return sorted((single | shards | records) - {*files, *(file + RECORD for file in files)})

    def indexed(self) -> set[str]:
        """The files in this folder that its index names; none if the index cannot be read."""
        try:
            weight_map = self.read_json(INDEX, INDEX).get("weight_map")
        except (FormatError, OSError):
            return set()
        named = weight_map.values() if isinstance(weight_map, dict) else ()
        return {name for name in named if isinstance(name, str)} & self.names()

    def _has_single(self) -> bool:
        return os.path.isfile(self.shown(SINGLE))

    def _check_no_single(self) -> None:
        """Refuses a ``model.safetensors`` that stays beside the index.

        Raises:
            FileExistsError: there is one.
        """
        if self._has_single():
            message = (
                f"Other programs load this file instead of the shards of {INDEX}: remove it, or choose a new folder"
            )
            raise FileExistsError(errno.EEXIST, message, self.shown(SINGLE))

    @contextmanager
    def before_config(self, config: bytes | None, outdated: Sequence[str]) -> Iterator[None]:
        """See `Folder`. ``model.safetensors``, which other programs load before an index, gives way to it."""
        if SINGLE not in outdated:
            self._check_no_single()
        yield
        if SINGLE in outdated and self._has_single():
            hidden = self.shown(f".{SINGLE}.{os.urandom(8).hex()}.tmp")
            os.rename(self.shown(SINGLE), hidden)
            self._hidden = hidden

    @contextmanager
    def after_index(self, outdated: Sequence[str]) -> Iterator[None]:
        """See `Folder`. If the index cannot be put in place, ``model.safetensors`` returns."""
        try:
            yield
        except BaseException:
            if self._hidden is not None:
                with suppress(OSError):
                    os.rename(self._hidden, self.shown(SINGLE))
                self._hidden = None
            raise
        hidden = [] if self._hidden is None else [os.path.basename(self._hidden)]
        self._hidden = None
        self.remove([*hidden, *(name for name in outdated if name != SINGLE)])

    def moves(self, plan: str, places: Mapping[str, Folder]) -> list[tuple[str, LocalFolder, LocalFolder]]:
        """See `Folder`. What an interruption has left elsewhere is moved too."""
        aside = self.aside(plan)
        found = []
        for file, place in places.items():
            sources = {place.place, aside.place} - {self.place}
            found += [(file, LocalFolder(source), self) for source in sorted(sources)]
        return found

    def take(self, name: str, other: LocalFolder) -> None:
        """Moves a file here, if it is there. One that is replaced keeps its mode, as `AtomicFile` has it."""
        old, new = other.shown(name), self.shown(name)
        if os.name != "nt":
            with suppress(FileNotFoundError):
                os.chmod(old, stat.S_IMODE(os.stat(new).st_mode))
        with suppress(FileNotFoundError):
            replace(old, new, new)

    def leftovers(self, names: Sequence[str]) -> list[str]:
        """See `Folder`."""
        return list(map(os.path.basename, leftovers(self.title, names)))

    def tidy(self, plan: str, names: Sequence[str], places: Iterable[Folder]) -> None:
        """See `Folder`; and the folders where shards have waited."""
        waited = {aside.place for aside in self.asides()} & {self.aside(plan).place, *(one.place for one in places)}
        for folder in (self.place, *sorted(waited)):
            with suppress(OSError):  # another process has removed it, or Windows has it open
                for path in leftovers(folder, names):
                    os.unlink(path)
                if folder in waited:
                    LocalFolder(folder).remove(names)
                    os.rmdir(folder)


def shared_identity(identity: Identity | None) -> list[int] | None:
    """The fields of an identity that all machines with a shared file system agree on."""
    return None if identity is None else [identity.size, identity.mtime_ns, identity.inode]


def check_free(path: str, overwrite: bool) -> None:
    """Refuses an existing file before anything is read.

    Raises:
        FileExistsError: it exists, and ``overwrite`` is not set.
    """
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "File exists and overwrite=False", path)


class OldShards:
    """The index and the shards beside a new ``model.safetensors``, which safeload would read instead.

    They are removed when the ``with`` block that writes the file ends without an error.

    Args:
        path: of the new file.
        overwrite: whether they may be removed.

    Raises:
        FileExistsError: they exist, and ``overwrite`` is not set.
    """

    def __init__(self, path: str, overwrite: bool) -> None:
        self._folders: dict[str, list[str]] = {}
        usual = os.path.basename(path) != SINGLE and not os.path.islink(path)
        for place in () if usual else {os.path.abspath(path), os.path.realpath(path)}:
            folder = LocalFolder(os.path.dirname(place))
            if os.path.basename(place) != SINGLE or not os.path.isfile(folder.shown(INDEX)):
                continue
            if not overwrite:
                message = f"The checkpoint of {INDEX} exists beside {SINGLE} and overwrite=False"
                raise FileExistsError(errno.EEXIST, message, folder.shown(INDEX))
            shards = {name for name in folder.indexed() if _NUMBERED.fullmatch(name)}
            self._folders[folder.title] = [INDEX, *sorted(shards), *(name + RECORD for name in sorted(shards))]

    def check_source(self, paths: Sequence[str], *, every_tensor: bool) -> None:
        """Refuse to remove shards of the source whose tensors are not all in the new file.

        Args:
            paths: the files that the conversion reads.
            every_tensor: whether it writes all of their tensors.

        Raises:
            FileExistsError: a source is one of the shards, and tensors would be lost.
        """
        if not self._folders:
            return
        shards = [os.path.join(title, name) for title, names in self._folders.items() for name in names]
        shards = [path for path in shards if path.endswith(".safetensors") and os.path.exists(path)]
        sources = [path for path in paths if os.path.exists(path)] if shards else []
        identities = {identity_of(os.stat(path))[2:]: path for path in sources}
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
        for title, names in self._folders.items() if kind is None else ():
            LocalFolder(title).remove(names)  # the index first


def _complete_set(names: Iterable[str]) -> list[str]:
    """Return the shards that a folder without an index is opened by; none unless exactly one set is complete."""
    complete = [one for one in sets_of([name for name in names if name.endswith(".safetensors")]) if one.complete]
    return [*complete[0].files.values()] if len(complete) == 1 else []


def _digest_of(path: str) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
