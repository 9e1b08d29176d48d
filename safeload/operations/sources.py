"""The files that pieces read: as plain data in a plan, opened again in whatever process does a piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from ..base import dtypes
from ..base.paths import absolute
from ..base.text import plural, show
from ..checkpoint import Checkpoint
from ..engine.weight_file import WeightFile
from ..errors import FormatError, MissingShardError
from ..formats.folder import CONFIG
from ..formats.opening import Recipe, find_some
from ..formats.registry import FORMATS
from ..stores.local import check_unchanged, identity_of
from .catalog import Catalog
from .plan import field, texts

_K = TypeVar("_K")

# The bytes of tensors that a piece reads: enough to make what an engine adds (about 1 ms for Dask) count for nothing,
# little enough to keep all workers busy to the end.
_LEAST, _MOST = 16 << 20, 1 << 30
# So many pieces, if that leaves each of them between those sizes.
_PIECES = 64

# What a tensor costs beside its bytes, as bytes.
_EACH = 4 << 10


def check_paths(catalog: Catalog, what: str) -> None:
    """Refuses tensors in memory.

    Args:
        catalog: the tensors.
        what: the argument that needs files, for messages.

    Raises:
        ValueError: some of them are in memory.
    """
    if catalog.in_memory:
        raise in_memory("the tensors of a dict are", what)


def in_memory(found: str, what: str) -> ValueError:
    """The error for tensors in memory."""
    return ValueError(f"{what} needs the path of a checkpoint, or an open one: {found} in this process only")


class Sources:
    """The files of a catalog, for pieces that read some of its tensors.

    Args:
        catalog: the tensors, of open checkpoints.
        what: the argument that needs files, for messages.

    Raises:
        ValueError: tensors in memory, or a checkpoint that was not opened by `safeload.open`.
    """

    def __init__(self, catalog: Catalog, what: str) -> None:
        check_paths(catalog, what)
        self._catalog = catalog
        self._owners = {file: one for one in catalog.checkpoints for file in one.weight_files}
        self._recipes = {id(one): one.recipe() for one in catalog.checkpoints}
        self._unlisted: dict[str, list[str]] = {}
        for one in catalog.checkpoints:
            if one.index is not None:  # which may leave out tensors of its shards
                self._unlisted.update(_unlisted(one))

    def file_of(self, name: str) -> WeightFile:
        """The file that holds the values of a tensor, or its codes."""
        return self.files_of(name)[0]

    def files_of(self, name: str) -> list[WeightFile]:
        """The files that hold a tensor; the first one holds its values or codes."""
        if name not in self._catalog:
            return [self._catalog.ignored[name].file]
        place = self._catalog.place(name)
        assert place.file is not None
        packed = place.file.table.packed(place.number)
        parts = () if packed is None else packed.parts.values()
        return list(dict.fromkeys((place.file, *(part.file for part in parts))))

    def of(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """What `opened` needs to open the files of these tensors.

        Returns:
            For each checkpoint {"folder": text, "files": [[name, bytes, mtime in ns, index of the first of the names],
            ...]}, and what else it takes to open them as the checkpoint was opened.
        """
        found: dict[int, dict[str, Any]] = {}
        seen: set[str] = set()
        for k, name in enumerate(names):
            for file in self.files_of(name):
                if file.place in seen:
                    continue
                seen.add(file.place)
                owner = self._owners[file]
                folder, path = os.path.split(file.place)
                source = found.setdefault(id(owner), {"folder": folder, "files": []})
                path = path if folder == source["folder"] else file.place
                source["files"].append([path, *file.identity[:2], k])
                if file.place in self._unlisted:
                    source.setdefault("unlisted", {})[file.place] = self._unlisted[file.place]
                if dtypes.may_hold_codes(file.table.numbers):
                    if "config" not in source:
                        source.update(_config_of(owner))
                    for one in _beside(file):
                        if one != source.get("config") and one not in source.setdefault("beside", []):
                            source["beside"].append(one)
        for key, source in found.items():
            recipe = self._recipes[key]
            source.update((k, v) for k, v in recipe._asdict().items() if k in _OPTIONS and v != _OPTIONS[k])
        return list(found.values())


# Options of `safeload.open` that a piece has, and their values by default.
_OPTIONS: Mapping[str, Any] = {"format": None, "root": None, "unknown_globals": "refuse", "stored": False}


def _unlisted(opened: Checkpoint) -> dict[str, list[str]]:
    """By path, names of tensors that are in a file, and that the index leaves out or finds in another one."""
    listed = {(file, k) for _, file, k in opened.entries()}
    found: dict[str, list[str]] = {}
    for file in opened.weight_files:
        left = [name for k, name in enumerate(file.table.names) if (file, k) not in listed]
        if left:
            found.setdefault(file.place, []).extend(left)
    return found


def _config_of(opened: Checkpoint) -> dict[str, Any]:
    """The configuration that packed tensors need; nothing for files without one of their folder."""
    if opened.config is None:
        return {}
    if opened.folder is None:  # a list of folders, with that of any of them
        return {"config": opened.config}
    return {"config": source_of(os.path.join(opened.folder, CONFIG))}


def _beside(file: WeightFile) -> list[list[Any]]:
    """The configurations in the folder of a file, which are read with it unless that of a checkpoint is given."""
    from ..packed.logical import BESIDE  # only here: most checkpoints do not need it

    paths = (os.path.join(os.path.dirname(file.place), name) for name in BESIDE)
    return [source_of(path) for path in paths if os.path.exists(path)]


def source_of(path: str) -> list[Any]:
    """A small file that is read when it is needed: path, bytes, mtime in ns."""
    return [absolute(path), *identity_of(os.stat(path))[:2]]


@contextmanager
def opened(sources: Any, names: Sequence[str]) -> Iterator[Catalog]:
    """Opens the files of a piece, and closes them again. They are read through descriptors, never through a mapping.

    Args:
        sources: what `Sources.of` has returned.
        names: the tensors of the piece.

    Raises:
        FormatError: a file has changed since the plan was made, or is gone; or these are not sources.
        SafeloadError, OSError: see `safeload.open`.
    """
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(Checkpoint(_find(source, names))) for source in sources]
        catalog = Catalog.of(checkpoints or {})
        catalog.mapped = False
        catalog.check(name for name in names if name not in catalog.ignored)
        yield catalog


def _find(source: Any, names: Sequence[str]) -> Any:
    files = field(source, "files", list)
    seen = []
    folder = field(source, "folder", str)
    if not files:
        raise FormatError("a source of a piece has files, found none")
    for file in files:
        name, identity, first = identified(file)
        path = os.path.join(folder, name)
        tensor = names[first] if first < len(names) else ""
        more = f" and of {plural(len(names) - 1, 'more tensor')}" if len(names) > 1 else ""
        if not os.path.exists(path):
            message = f"the file of tensor {show(tensor)}{more} is gone, or not on this machine"
            raise MissingShardError(message, path, tensor=tensor)
        try:
            check_unchanged(path, identity)
        except FormatError as error:
            message = f"the file of tensor {show(tensor)}{more}: {error.args[0]}"
            raise FormatError(message, path, tensor=tensor) from None
        seen.append((path, identity))
    for beside in field(source, "beside", list) if "beside" in source else ():
        path, identity, _ = identified(beside)
        if not os.path.exists(path):
            raise FormatError("the configuration is gone", path)
        check_unchanged(path, identity)
    options = {key: source.get(key, usual) for key, usual in _OPTIONS.items()}
    for key, value in options.items():
        if value != _OPTIONS[key] and not _fits(key, value):
            raise FormatError(f"a source of a piece has {show(key)} as safeload.open, found {show(value)}")
    unlisted = field(source, "unlisted", dict) if "unlisted" in source else {}
    recipe = Recipe(tuple(path for path, _ in seen), True, **options)
    return find_some(
        tuple(seen), config_from(source.get("config")), recipe, {path: texts(unlisted, path) for path in unlisted}
    )


def _fits(key: str, value: Any) -> bool:
    """Whether an option may have a value other than the usual one."""
    if key == "format":
        return isinstance(value, str) and value in FORMATS
    return isinstance(value, str) if key == "root" else value == ("inert" if key == "unknown_globals" else True)


def identified(file: Any) -> tuple[str, tuple[int, ...], int]:
    """The path of a file, its size and mtime, and the index of the first tensor in it (0 where that is not given).

    Raises:
        FormatError: it is something else.
    """
    path, *numbers = file if isinstance(file, (list, tuple)) and file else [None]
    integers = len(numbers) > 1 and all(type(number) is int for number in numbers)
    if not isinstance(path, str) or "\0" in path or not integers:
        raise FormatError(f"a source of a piece is [path, bytes, mtime in ns, ...], found {show(file)}")
    return path, tuple(numbers[:2]), max(0, sum(numbers[2:3]))


def config_from(file: Any) -> dict[str, Any] | None:
    """The configuration in a file, given by `source_of`, or itself; None for None.

    Raises:
        FormatError: the file has changed, or does not hold one.
        OSError: the file cannot be read.
    """
    if file is None or isinstance(file, dict):
        return file
    from ..stores.json_file import read_json

    path, identity, _ = identified(file)
    check_unchanged(path, identity)
    return read_json(path, CONFIG)


# ---- groups ----


def groups(sizes: Mapping[_K, int], file_of: Callable[[_K], WeightFile]) -> list[list[_K]]:
    """Divides tensors, or entries of archives, into pieces of about the same number of bytes.

    A piece reads from several files only where these are small. A file that must be unpacked is not divided.

    Args:
        sizes: by name, or whatever they go by, the bytes of each.
        file_of: the file that holds one of them.
    """
    most = max(_LEAST, min(_MOST, sum(sizes.values(), _EACH * len(sizes)) // _PIECES))
    held: dict[str, tuple[bool, list[_K]]] = {}  # together, whatever the order of the names
    for name in sizes:
        file = file_of(name)
        held.setdefault(file.place, (file.unpacked, []))[1].append(name)
    found: list[list[_K]] = []
    room = -1  # bytes that the last piece may still get; none before the first
    for unpacked, names in held.values():
        if unpacked:
            found.append(names)
            room = -1
            continue
        if most - room >= _LEAST:
            room = -1
        for name in names:
            cost = sizes[name] + _EACH
            if cost > room:
                found.append([])
                room = most
            found[-1].append(name)
            room -= cost
    return found
