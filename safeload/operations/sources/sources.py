"""The files that pieces read: as plain data in a plan, opened again in whatever process does a piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

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


class FileVersion(NamedTuple):
    """A local file in a plan: a worker refuses it if it has changed."""

    path: str  # absolute
    size: int  # bytes
    version: int | float | str | None  # time of the last change in ns

    @classmethod
    def of(cls, path: str) -> FileVersion:
        """The present version of a file."""
        return cls(absolute(path), *identity_of(os.stat(path))[:2])

    def check_unchanged(self) -> None:
        """Refuse another version of the file.

        Raises:
            FormatError: the file has changed.
        """
        _check_path(self.path)
        check_unchanged(self.path, (self.size, self.version))  # type: ignore[arg-type]


class SourceFile(NamedTuple):
    """A weight file in a plan."""

    path: str  # a name in the folder of the source, or a whole path
    size: int  # bytes
    version: int | float | str | None  # of an object in a store; of a local file its mtime in ns
    first: int = 0  # index of the first tensor of the piece that this file holds

    @property
    def identity(self) -> tuple[Any, ...]:
        """Size and version."""
        return self.size, self.version


@dataclass(frozen=True, eq=False)
class Source:
    """Files of a checkpoint that a piece reads, and how the checkpoint was opened."""

    folder: str
    files: tuple[SourceFile, ...]
    storage_options: dict[str, Any] | None = None
    config: FileVersion | dict[str, Any] | None = None  # needed by packed tensors
    beside: tuple[FileVersion, ...] = ()  # configurations that are read with a file of their folder
    unlisted: dict[str, list[str]] = field(default_factory=dict)  # see `_unlisted`
    format: str | None = None  # this and the next ones: see `safeload.open`
    root: str | None = None
    unknown_globals: str = "refuse"
    stored: bool = False

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("a source must have files")
        for path in (self.folder, *(file.path for file in self.files)):
            _check_path(path)
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(f"format must be a name of safeload.open, got {show(self.format)}")
        if self.unknown_globals not in ("refuse", "inert"):
            raise ValueError(f'unknown_globals must be "refuse" or "inert", got {show(self.unknown_globals)}')

    def versions(self) -> list[list[Any]]:
        """Bare name, size and version of each file and configuration."""
        config = [self.config] if isinstance(self.config, FileVersion) else []
        files: list[SourceFile | FileVersion] = [*self.files, *config, *self.beside]
        return [version_of(file.path, file.size, file.version) for file in files]


def _check_path(path: str) -> None:
    if "\0" in path:
        raise FormatError(f"invalid plan: a path must not contain NUL, got {show(path)}")


def version_of(path: str, size: int, version: Any) -> list[Any]:
    """Bare name, size and version of a file."""
    return [urls.shown(path).replace("\\", "/").rpartition("/")[2], size, version]


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

    def of(self, names: Iterable[str]) -> tuple[Source, ...]:
        """Return the sources that `opened` needs for these tensors: one for each checkpoint.

        Raises:
            UnsupportedError: a URL that leads nowhere without its query; a store of this process.
        """
        sources: dict[int, dict[str, Any]] = {}
        seen: set[str] = set()
        for k, name in enumerate(names):
            for file in self.files_of(name):
                if file.place in seen:
                    continue
                seen.add(file.place)
                owner = self._owners[file]
                whole = file.files.public(file.place)
                folder, path = file.files.split(whole)
                source = sources.setdefault(id(owner), {"folder": folder, "files": [], "beside": [], "unlisted": {}})
                source["storage_options"] = file.files.public_options()
                path = path if folder == source["folder"] else whole
                source["files"].append(SourceFile(path, file.identity[0], file.identity[1], k))
                if file.place in self._unlisted:
                    source["unlisted"][whole] = self._unlisted[file.place]
                if dtypes.may_hold_codes(file.table.numbers):
                    if "config" not in source:
                        source["config"] = _config_of(owner)
                    files = (one for one in _beside(file) if one != source["config"])
                    source["beside"] += [one for one in files if one not in source["beside"]]
        return tuple(
            Source(
                folder=source["folder"],
                files=tuple(source["files"]),
                storage_options=source["storage_options"],
                config=source.get("config"),
                beside=tuple(source["beside"]),
                unlisted=source["unlisted"],
                format=self._recipes[key].format,
                root=self._recipes[key].root,
                unknown_globals=self._recipes[key].unknown_globals,
                stored=self._recipes[key].stored,
            )
            for key, source in sources.items()
        )


def _unlisted(opened: Checkpoint) -> dict[str, list[str]]:
    """By path, names of tensors that are in a file, and that the index leaves out or finds in another one."""
    listed = {(file, k) for _, file, k in opened.entries()}
    found: dict[str, list[str]] = {}
    for file in opened.weight_files:
        left = [name for k, name in enumerate(file.table.names) if (file, k) not in listed]
        if left:
            found.setdefault(file.place, []).extend(left)
    return found


def _config_of(opened: Checkpoint) -> FileVersion | dict[str, Any] | None:
    """The configuration that packed tensors need: a local file, or its content."""
    folder = opened.folder
    if opened.config is None or folder is None or folder.files.remote:  # no folder: a list of them
        return opened.config
    return FileVersion.of((folder / CONFIG).path)


def _beside(file: WeightFile) -> list[FileVersion]:
    """The configurations in the folder of a file, which are read with it unless that of a checkpoint is given."""
    from ...packed.quantization import BESIDE  # only here: most checkpoints do not need it

    if file.files.remote:
        return []
    paths = (os.path.join(os.path.dirname(file.place), name) for name in BESIDE)
    return [FileVersion.of(path) for path in paths if os.path.exists(path)]


# ---- where paths lead ----


def files_at(path: str, planned: Mapping[str, Any] | None, storage_options: Mapping[str, Any] | None) -> Files:
    """Return the files that a path in a plan leads to.

    Args:
        path: a path or a URL.
        planned: storage options of the plan, without secrets.
        storage_options: of this process; they take precedence.
    """
    if not urls.is_url(path):
        return LOCAL
    from ...stores.remote_files import RemoteFiles  # only here: most paths are local

    if planned is None and storage_options is None:
        return RemoteFiles()
    return RemoteFiles(_merged(planned or {}, storage_options or {}))


def _merged(planned: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    found = {**planned, **own}
    for key, value in planned.items():
        if isinstance(value, dict) and isinstance(own.get(key), Mapping):
            found[key] = _merged(value, own[key])
    return found


@dataclass(frozen=True, eq=False)
class PlannedPath:
    """A URL with storage options."""

    path: str  # public
    storage_options: dict[str, Any]


def path_in_plan(location: Location) -> str | PlannedPath:
    """Return a location as plans carry it; see `location_of`.

    Raises:
        UnsupportedError: see `Sources.of`.
    """
    path, options = location.files.public(location.files.absolute(location.path)), location.files.public_options()
    return path if options is None else PlannedPath(path, options)


def location_of(planned: str | PlannedPath, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Return the location that a plan carries.

    Args:
        planned: see `path_in_plan`.
        storage_options: of this process; they take precedence.
    """
    path, options = (planned, None) if isinstance(planned, str) else (planned.path, planned.storage_options)
    _check_path(path)
    return Location(files_at(path, options, storage_options), path)


# ---- in a worker ----


@contextmanager
def opened(
    sources: Iterable[Source], names: Sequence[str], storage_options: Mapping[str, Any] | None = None
) -> Iterator[Catalog]:
    """Open the files of a piece, and close them again. They are read through descriptors, never through a mapping.

    Args:
        sources: made by `Sources.of`.
        names: the tensors of the piece.
        storage_options: of this process; they take precedence over those of the sources.

    Raises:
        FormatError: a file has changed since the plan was made, or is gone.
        SafeloadError, OSError: see `safeload.open`.
    """
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(Checkpoint(_find(source, names, storage_options))) for source in sources]
        catalog = Catalog.of(checkpoints or {})
        catalog.mapped = False
        catalog.check(name for name in names if name not in catalog.ignored)
        yield catalog


def _find(source: Source, names: Sequence[str], storage_options: Mapping[str, Any] | None) -> Any:
    seen = []
    tensors: dict[str, str] = {}  # the first tensor of each file
    files = files_at(source.folder, source.storage_options, storage_options)
    for file in source.files:
        path = file.path if urls.is_url(file.path) and files.remote else files.join(source.folder, file.path)
        tensors[files.shown(path)] = names[file.first] if 0 <= file.first < len(names) else ""
        if not files.remote:
            with _of_tensor(tensors, names):
                if not os.path.exists(path):
                    raise FileNotFoundError(path)
                check_unchanged(path, file.identity)
        seen.append((path, file.identity))
    for beside in source.beside:
        if not os.path.exists(beside.path):
            raise FormatError("the configuration is gone", beside.path)
        beside.check_unchanged()
    recipe = Recipe(
        tuple(path for path, _ in seen),
        True,
        source.format,
        source.root,
        source.unknown_globals,  # type: ignore[arg-type] # checked
        source.stored,
        files,
    )
    config = config_from(source.config)
    with _of_tensor(tensors, names):
        return reopen_subset(tuple(seen), config, recipe, source.unlisted)


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


def config_from(config: FileVersion | dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a configuration that a plan has, or the content of its file.

    Raises:
        FormatError: the file has changed, or holds no configuration.
        OSError: the file cannot be read.
    """
    if not isinstance(config, FileVersion):
        return config
    from ...stores.json_file import read_json

    config.check_unchanged()
    return read_json(config.path, CONFIG)


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
