"""The files that pieces read: as plain data in a plan, opened again in whatever process does a piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from ...base import dtypes
from ...base.paths import absolute
from ...base.text import plural, show
from ...checkpoint import Checkpoint
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, MissingShardError
from ...formats.folder import CONFIG
from ...formats.opening import Recipe, reopen_subset
from ...formats.registry import FORMATS
from ...stores import url as urls
from ...stores.files import LOCAL, Files, Location
from ...stores.local import check_unchanged, identity_of
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
            For each checkpoint {"folder": text, "files": [[name, bytes, version, index of the first of the names],
            ...]}, and what else it takes to open them as the checkpoint was opened. The version of a local file is its
            mtime in ns. URLs come without secrets.

        Raises:
            UnsupportedError: a URL that leads nowhere without its query; a store of this process.
        """
        found: dict[int, dict[str, Any]] = {}
        seen: set[str] = set()
        for k, name in enumerate(names):
            for file in self.files_of(name):
                if file.place in seen:
                    continue
                seen.add(file.place)
                owner = self._owners[file]
                whole = file.files.public(file.place)
                folder, path = file.files.split(whole)
                source = found.setdefault(id(owner), {"folder": folder, "files": [], **_options_of(file.files)})
                path = path if folder == source["folder"] else whole
                source["files"].append([path, *file.identity[:2], k])
                if file.place in self._unlisted:
                    source.setdefault("unlisted", {})[whole] = self._unlisted[file.place]
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
    folder = opened.folder
    if folder is None or folder.files.remote:  # a list of folders, with that of any of them
        return {"config": opened.config}
    return {"config": source_of((folder / CONFIG).path)}


def _beside(file: WeightFile) -> list[list[Any]]:
    """The configurations in the folder of a file, which are read with it unless that of a checkpoint is given."""
    from ...packed.config_files import BESIDE  # only here: most checkpoints do not need it

    if file.files.remote:
        return []
    paths = (os.path.join(os.path.dirname(file.place), name) for name in BESIDE)
    return [source_of(path) for path in paths if os.path.exists(path)]


def source_of(path: str) -> list[Any]:
    """A small local file that is read when it is needed: path, bytes, mtime in ns."""
    return [absolute(path), *identity_of(os.stat(path))[:2]]


def versions_of(piece: Mapping[str, Any]) -> list[list[Any]]:
    """The files that a piece reads, adapters included: bare name, bytes and version of each."""
    listed: list[Any] = []
    for source in (*field(piece, "sources", list), *(piece.get("adapters") or ())):
        if isinstance(source, Mapping):
            configs = [source["config"]] if isinstance(source.get("config"), list) else []
            listed += [*field(source, "files", list), *configs, *source.get("beside", ())]
    identities = (identified(file) for file in listed)
    return [[urls.shown(path).replace("\\", "/").rpartition("/")[2], *identity] for path, identity, _ in identities]


# ---- where paths lead ----

_STORAGE_OPTIONS = "storage_options"


def _options_of(files: Files) -> dict[str, Any]:
    """The public options of URLs; nothing for local files."""
    options = files.public_options()
    return {} if options is None else {_STORAGE_OPTIONS: options}


def files_of(source: Mapping[str, Any], path: str, storage_options: Mapping[str, Any] | None) -> Files:
    """Where the paths of a source lead.

    Args:
        source: has "storage_options" where URLs need some.
        path: one of the paths.
        storage_options: of this process, which win.

    Raises:
        FormatError: these are not options.
    """
    if not urls.is_url(path):
        return LOCAL
    from ...stores.remote_files import RemoteFiles  # only here: most paths are local

    planned = field(source, _STORAGE_OPTIONS, dict) if _STORAGE_OPTIONS in source else None
    if planned is None and storage_options is None:
        return RemoteFiles()
    return RemoteFiles(_merged(planned or {}, storage_options or {}))


def _merged(planned: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    found = {**planned, **own}
    for key, value in planned.items():
        if isinstance(value, dict) and isinstance(own.get(key), Mapping):
            found[key] = _merged(value, own[key])
    return found


def file_as_plain(file: WeightFile) -> str | dict[str, Any]:
    """The path of an open file; see `location_as_plain`."""
    return location_as_plain(Location(file.files, file.place))


def file_of(plain: Any, storage_options: Mapping[str, Any] | None) -> tuple[Location, tuple[Any, ...]]:
    """A file that is given as [what `location_as_plain` returns, bytes, version], and its version.

    Raises:
        FormatError: it is something else.
    """
    first, *more = plain if isinstance(plain, (list, tuple)) and plain else [None]
    location = location_of(first, storage_options)
    return location, identified([location.path, *more])[1]


def location_as_plain(location: Location) -> str | dict[str, Any]:
    """A file as a plan has it: a path; of a URL with options an object.

    Raises:
        UnsupportedError: see `Sources.of`.
    """
    path, options = location.files.public(location.files.absolute(location.path)), _options_of(location.files)
    return {"path": path, **options} if options else path


def location_of(plain: Any, storage_options: Mapping[str, Any] | None = None) -> Location:
    """The inverse of `location_as_plain`.

    Raises:
        FormatError: it is something else.
    """
    source = plain if isinstance(plain, Mapping) else {"path": plain}
    path = field(source, "path", str)
    return Location(files_of(source, path, storage_options), path)


# ---- in a worker ----


@contextmanager
def opened(sources: Any, names: Sequence[str], storage_options: Mapping[str, Any] | None = None) -> Iterator[Catalog]:
    """Opens the files of a piece, and closes them again. They are read through descriptors, never through a mapping.

    Args:
        sources: what `Sources.of` has returned.
        names: the tensors of the piece.
        storage_options: of this process, which win over those of the sources.

    Raises:
        FormatError: a file has changed since the plan was made, or is gone; or these are not sources.
        SafeloadError, OSError: see `safeload.open`.
    """
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(Checkpoint(_find(source, names, storage_options))) for source in sources]
        catalog = Catalog.of(checkpoints or {})
        catalog.mapped = False
        catalog.check(name for name in names if name not in catalog.ignored)
        yield catalog


def _find(source: Any, names: Sequence[str], storage_options: Mapping[str, Any] | None) -> Any:
    files = field(source, "files", list)
    seen = []
    tensors: dict[str, str] = {}  # the first one of each file
    folder = field(source, "folder", str)
    place = files_of(source, folder, storage_options)
    if not files:
        raise FormatError("a source of a piece has files, found none")
    for file in files:
        name, identity, first = identified(file)
        path = name if urls.is_url(name) and place.remote else place.join(folder, name)
        tensor = names[first] if first < len(names) else ""
        tensors[place.shown(path)] = tensor
        if not place.remote:
            with _of_tensor(tensors, names):
                if not os.path.exists(path):
                    raise FileNotFoundError(path)
                check_unchanged(path, identity)
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
    recipe = Recipe(tuple(path for path, _ in seen), True, **options, files=place)
    config = config_from(source.get("config"))
    with _of_tensor(tensors, names):
        return reopen_subset(tuple(seen), config, recipe, {path: texts(unlisted, path) for path in unlisted})


@contextmanager
def _of_tensor(tensors: Mapping[str, str], names: Sequence[str]) -> Iterator[None]:
    """Adds the tensor to errors about a file that is gone or has changed.

    Args:
        tensors: the first tensor of each file, by its path in messages.
        names: all tensors of the piece.
    """
    more = f" and of {plural(len(names) - 1, 'more tensor')}" if len(names) > 1 else ""
    try:
        yield
    except FileNotFoundError as error:
        path = str(error.filename or error)
        if path not in tensors:
            raise
        message = f"the file of tensor {show(tensors[path])}{more} is gone, or not on this machine"
        raise MissingShardError(message, path, tensor=tensors[path]) from None
    except FormatError as error:
        path = error.path or ""
        if type(error) is not FormatError or error.tensor is not None or path not in tensors:
            raise
        message = f"the file of tensor {show(tensors[path])}{more}: {error.args[0]}"
        raise FormatError(message, path, error.offset, tensor=tensors[path]) from None


def _fits(key: str, value: Any) -> bool:
    """Whether an option may have a value other than the usual one."""
    if key == "format":
        return isinstance(value, str) and value in FORMATS
    return isinstance(value, str) if key == "root" else value == ("inert" if key == "unknown_globals" else True)


def identified(file: Any) -> tuple[str, tuple[Any, ...], int]:
    """The path of a file, its size and version, and the index of the first tensor in it (0 where that is not given).

    Raises:
        FormatError: it is something else.
    """
    path, size, version, *first = file if isinstance(file, (list, tuple)) and len(file) > 2 else [None] * 3
    integers = type(size) is int and all(type(number) is int for number in first)
    plain = integers and isinstance(version, (int, float, str, type(None)))
    if not isinstance(path, str) or "\0" in path or not plain:
        raise FormatError(f"a source of a piece is [path, bytes, mtime in ns or version, ...], found {show(file)}")
    return path, (size, version), max(0, sum(first[:1]))


def config_from(file: Any) -> dict[str, Any] | None:
    """The configuration in a file, given by `source_of`, or itself; None for None.

    Raises:
        FormatError: the file has changed, or does not hold one.
        OSError: the file cannot be read.
    """
    if file is None or isinstance(file, dict):
        return file
    from ...stores.json_file import read_json

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
