"""Source files of pieces: described in a plan, and opened again by the process running a piece."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.paths import absolute
from ...base.text import plural, show
from ...checkpoint import Checkpoint, folder_of, recipe_of, tensors_of
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, MissingShardError
from ...formats.folder import CONFIG
from ...formats.opening import reopen_subset
from ...formats.registry import Recipe, formats_of, row_of
from ...stores import url as urls
from ...stores.files import Location
from ...stores.local import check_unchanged, identity_of
from .catalog import Catalog
from .executors import check_path, check_paths, files_at

# ---- sources in a plan ----


class FileVersion(NamedTuple):
    """A local file in a plan. A worker refuses the file if it has changed."""

    path: str  # absolute
    size: int  # bytes
    version: int | float | str | None  # mtime in ns

    @classmethod
    def of(cls, path: str) -> FileVersion:
        """Return the present version of a file."""
        return cls(absolute(path), *identity_of(os.stat(path))[:2])

    def check_unchanged(self) -> None:
        """Refuse a changed file."""
        check_path(self.path)
        check_unchanged(self.path, (self.size, self.version))  # type: ignore[arg-type]


class SourceFile(NamedTuple):
    """A weight file in a plan."""

    path: str  # a name in the folder of the source, or a whole path
    size: int  # bytes
    version: int | float | str | None  # mtime in ns of a local file, or the version of an object in a store
    first: int = 0  # index of the first tensor of the piece in this file

    @property
    def identity(self) -> tuple[Any, ...]:
        """Size and version."""
        return self.size, self.version


@dataclass(frozen=True, eq=False)
class PieceSource:
    """The files of a checkpoint for a piece, and the options of the checkpoint."""

    folder: str
    files: tuple[SourceFile, ...]
    storage_options: dict[str, Any] | None = None  # without secrets
    config: FileVersion | dict[str, Any] | None = None  # for packed tensors: a file, or its content
    beside: tuple[FileVersion, ...] = ()  # configurations in the folders of the files
    unlisted: dict[str, list[str]] = field(default_factory=dict)  # see `_unlisted`
    format: str | None = None  # this and the following: see `safeload.open`
    root: str | None = None
    unknown_globals: str = "refuse"
    stored: bool = False

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("a source must have files")
        for path in (self.folder, *(file.path for file in self.files)):
            check_path(path)
        if self.format is not None:
            formats_of(self.format)
        if self.unknown_globals not in ("refuse", "inert"):
            raise ValueError(f'unknown_globals must be "refuse" or "inert", got {show(self.unknown_globals)}')

    def versions(self) -> list[list[Any]]:
        """Return bare name, size and version of each file and configuration."""
        config = [self.config] if isinstance(self.config, FileVersion) else []
        files: list[SourceFile | FileVersion] = [*self.files, *config, *self.beside]
        return [version_of(file.path, file.size, file.version) for file in files]


@dataclass(frozen=True, eq=False)
class PlannedPath:
    """A URL in a plan, with storage options."""

    path: str
    storage_options: dict[str, Any]  # without secrets


def version_of(path: str, size: int, version: Any) -> list[Any]:
    """Return bare name, size and version of a file."""
    return [urls.shown(path).replace("\\", "/").rpartition("/")[2], size, version]


class Sources:
    """The files of a catalog, for pieces."""

    def __init__(self, catalog: Catalog, argument: str) -> None:
        check_paths(catalog, argument)
        self._catalog = catalog
        self._owners = {file: checkpoint for checkpoint in catalog.checkpoints for file in checkpoint.weight_files}
        self._recipes = {id(checkpoint): recipe_of(checkpoint) for checkpoint in catalog.checkpoints}
        self._unlisted: dict[str, list[str]] = {}
        for checkpoint in catalog.checkpoints:
            if checkpoint.index is not None:
                self._unlisted.update(_unlisted(checkpoint))

    def columns_of(self, names: Sequence[str]) -> tuple[Sequence[WeightFile], Sequence[int]]:
        """Return the files with the values or codes of tensors, and for each tensor the index of its file."""
        tensors = self._catalog.plain(names)
        if tensors is not None:
            return tensors.files, [0] * len(tensors) if tensors.file is None else tensors.file
        files: dict[WeightFile, int] = {}
        file = [files.setdefault(self.files_of(name)[0], len(files)) for name in names]
        return [*files], file

    def files_of(self, name: str) -> list[WeightFile]:
        """Return the files of a tensor, the file with its values or codes first."""
        if name not in self._catalog:
            return [self._catalog.ignored[name].file]
        place = self._catalog.place(name)
        assert place.file is not None
        packed = place.file.table.packed(place.number)
        parts = () if packed is None else packed.parts.values()
        return list(dict.fromkeys((place.file, *(part.file for part in parts))))

    def of(self, names: Iterable[str]) -> tuple[PieceSource, ...]:
        """Return the sources of a piece with these tensors, one per checkpoint."""
        names = [*names]
        tensors = self._catalog.plain(names)
        if tensors is not None:
            return self.of_columns(tensors.files, tensors.ranges.file)
        return self.of_files((file, k) for k, name in enumerate(names) for file in self.files_of(name))

    def of_columns(self, files: Sequence[Any], file: Array) -> tuple[PieceSource, ...]:
        """Return the sources of a piece with plain tensors, like `of`; ``file`` numbers the file of each tensor."""
        distinct, first = np.unique(file, return_index=True)
        numbered = sorted(zip(first.tolist(), distinct.tolist(), strict=True))
        return self.of_files((files[number], k) for k, number in numbered)

    def of_files(self, numbered: Iterable[tuple[WeightFile, int]]) -> tuple[PieceSource, ...]:
        """Return the sources of a piece, like `of`, from files with indexes of its tensors, in ascending order."""
        first: dict[str, tuple[WeightFile, int]] = {}  # a path can have several files, each with a part of its bytes
        for file, k in numbered:
            first.setdefault(file.place, (file, k))
        by_checkpoint: dict[int, list[tuple[WeightFile, int]]] = {}
        for file, k in first.values():
            by_checkpoint.setdefault(id(self._owners[file]), []).append((file, k))
        return tuple(map(self._source_of, by_checkpoint.values()))

    def _source_of(self, numbered: Sequence[tuple[WeightFile, int]]) -> PieceSource:
        """Return the source for files of the same checkpoint, each with the index of its first tensor."""
        owner = self._owners[numbered[0][0]]
        recipe = self._recipes[id(owner)]
        folder, config, beside, files, unlisted = None, None, [], [], {}
        for file, k in numbered:
            path = file.files.public(file.place)
            parent, name = file.files.split(path)
            folder = parent if folder is None else folder
            files.append(SourceFile(name if parent == folder else path, file.identity[0], file.identity[1], k))
            if file.place in self._unlisted:
                unlisted[path] = self._unlisted[file.place]
            if dtypes.may_hold_codes(file.table.numbers):
                config = _config_of(owner) if config is None else config
                beside += _beside(file)
        assert folder is not None
        row = row_of(owner.format)
        return PieceSource(
            folder=folder,
            files=tuple(files),
            storage_options=numbered[0][0].files.public_options(),
            config=config,
            beside=tuple(version for version in dict.fromkeys(beside) if version != config),
            unlisted=unlisted,
            # A file of a folder's format can be of another format when it is opened alone.
            format=owner.format if row.parts is not None or row.source else recipe.format,
            root=recipe.root,
            unknown_globals=recipe.unknown_globals,
            stored=recipe.stored,
        )


def _unlisted(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return, by path, the tensors of a file if the index does not list them, or lists them for another file."""
    listed = {(file, k) for _, file, k in tensors_of(checkpoint)}
    unlisted: dict[str, list[str]] = {}
    for file in checkpoint.weight_files:
        names = [name for k, name in enumerate(file.table.names) if (file, k) not in listed]
        if names:
            unlisted.setdefault(file.place, []).extend(names)
    return unlisted


def _config_of(checkpoint: Checkpoint) -> FileVersion | dict[str, Any] | None:
    """Return the configuration of a checkpoint: its file, or the content if the file is remote or unknown."""
    folder = folder_of(checkpoint)
    if checkpoint.config is None or folder is None or folder.files.remote:
        return checkpoint.config
    return FileVersion.of((folder / CONFIG).path)


def _beside(file: WeightFile) -> list[FileVersion]:
    """Return the configurations in the folder of a file: they apply if its checkpoint has none."""
    from ...packed.quantization import BESIDE  # only here: most checkpoints do not need it

    if file.files.remote:
        return []
    paths = (os.path.join(os.path.dirname(file.place), name) for name in BESIDE)
    return [FileVersion.of(path) for path in paths if os.path.exists(path)]


# ---- paths in a plan ----


def path_in_plan(location: Location) -> str | PlannedPath:
    """Return a location as plans carry it; see `location_of`."""
    path, options = location.files.public(location.files.absolute(location.path)), location.files.public_options()
    return path if options is None else PlannedPath(path, options)


def location_of(planned: str | PlannedPath, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Return the location of a path in a plan."""
    path, options = (planned, None) if isinstance(planned, str) else (planned.path, planned.storage_options)
    return Location(files_at(path, options, storage_options), path)


# ---- in a worker ----


@contextmanager
def opened(
    sources: Iterable[PieceSource], names: Sequence[str], storage_options: Mapping[str, Any] | None = None
) -> Iterator[Catalog]:
    """Open the sources of a piece. Files are read through descriptors, never through a mapping."""
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(Checkpoint(_find(source, names, storage_options))) for source in sources]
        catalog = Catalog.of(checkpoints or {})
        catalog.mapped = False
        if catalog.ignored:
            names = [name for name in names if name not in catalog.ignored]
        catalog.check(names)
        yield catalog.among(names)


def _find(source: PieceSource, names: Sequence[str], storage_options: Mapping[str, Any] | None) -> Any:
    """Find the files of a source, unchanged, for a `Checkpoint`."""
    versions = []
    tensors: dict[str, str] = {}  # the first tensor in each file
    files = files_at(source.folder, source.storage_options, storage_options)
    for file in source.files:
        path = file.path if urls.is_url(file.path) and files.remote else files.join(source.folder, file.path)
        tensors[files.shown(path)] = names[file.first] if 0 <= file.first < len(names) else ""
        if not files.remote:
            with _named_tensor(tensors, names):
                if not os.path.exists(path):
                    raise FileNotFoundError(path)
                check_unchanged(path, file.identity)
        versions.append((path, file.identity))
    for beside in source.beside:
        if not os.path.exists(beside.path):
            raise FormatError("the configuration is gone", beside.path)
        beside.check_unchanged()
    recipe = Recipe(
        tuple(path for path, _ in versions),
        True,
        source.format,
        source.root,
        source.unknown_globals,  # type: ignore[arg-type] # checked
        source.stored,
        files,
    )
    config = config_from(source.config)
    with _named_tensor(tensors, names):
        return reopen_subset(tuple(versions), config, recipe, source.unlisted)


@contextmanager
def _named_tensor(tensors: Mapping[str, str], names: Sequence[str]) -> Iterator[None]:
    """Name a tensor in errors if its file is gone or has changed; ``tensors`` holds the first of each path."""
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
    """Return the content of a configuration in a plan."""
    if not isinstance(config, FileVersion):
        return config
    from ...stores.json_file import read_json

    config.check_unchanged()
    return read_json(config.path, CONFIG)
