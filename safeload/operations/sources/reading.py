"""Divide an operation that only reads into pieces for an executor, and open the files of a piece in a worker.

A piece is plain data: the operation with its options, the names of its tensors, and their files with the version of
each. A worker opens no other file. The result of a piece is a dict of tables, each with a row per tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import numpy as np

from ..._version import __version__
from ...base import dtypes
from ...base.arrays import Array
from ...base.gc_pause import paused
from ...base.paths import absolute
from ...base.text import plural, printable, show
from ...checkpoint import Checkpoint, folder_of, recipe_of, tensors_of
from ...engine.run.progress import Progress
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, MissingShardError, UnsupportedError
from ...formats.folder import CONFIG
from ...formats.opening import reopen_subset
from ...formats.registry import Opened, Recipe, formats_of, row_of
from ...stores.files import LOCAL
from ...stores.local import check_unchanged, identity_of
from . import executors
from .catalog import Catalog
from .executors import Executor, check_path, check_paths, files_at

# Rows by tensor, by the name of the table.
Tables: TypeAlias = dict[str, dict[str, Any]]

# Prefixes of messages.
INVALID_PLAN, INVALID_PIECE = "invalid plan", "invalid piece"
# The errors of a malformed piece.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)


def merged(results: Iterable[Mapping[str, Mapping[str, Any]]]) -> Tables:
    """Join the tables of parts; the parts can be joined in any groups."""
    tables: Tables = {}
    for result in results:
        for name, rows in result.items():
            tables.setdefault(name, {}).update(rows)
    return tables


def run_pieces(
    function: Callable[[Mapping[str, Any], int | None], Mapping[str, Mapping[str, Any]]],
    pieces: Iterable[Mapping[str, Any]],
    executor: Executor | None,
    *,
    threads: int | None,
    progress: Progress,
) -> Tables:
    """Run pieces on an executor, and return their merged tables."""
    return merged(executors.run(function, [*pieces], executor, threads=threads, progress=progress))


def pieces_of(
    sizes: Mapping[str, int], catalog: Catalog, against: Catalog | None = None, *, whole: bool = False, **call: Any
) -> Iterator[dict[str, Any]]:
    """Divide tensors, given the bytes of each, into pieces of a call, or into a ``whole`` piece.

    Tensors of ``against`` have equal names.
    """
    names = [*sizes]
    sides = {"sources": TensorFiles(catalog, names)}
    if against is not None:
        sides["against"] = TensorFiles(against, names)
    side = sides["sources"]
    with paused(len(names)):
        groups = executors.groups([*sizes.values()], side.files, side.file)
        for group in [[*range(len(names))]] if whole else groups:
            content = {**call, "version": __version__, "names": [*map(names.__getitem__, group)]}
            content |= {key: side.sources(group) for key, side in sides.items()}
            content["nbytes"] = sum(map(sizes.__getitem__, content["names"]))
            yield content


class TensorFiles:
    """The files of tensors of a catalog."""

    def __init__(
        self,
        catalog: Catalog,
        names: Sequence[str],
        argument: str = executors.EXECUTOR,
        located: tuple[Sequence[Any], Array] | None = None,  # files and the file of each tensor, if they are known
    ) -> None:
        check_paths(catalog, argument)
        self._checkpoints = catalog.checkpoints
        self._owners = {file: k for k, owner in enumerate(self._checkpoints) for file in owner.weight_files}
        self._unlisted = {
            file: names
            for checkpoint in catalog.checkpoints
            if checkpoint.index is not None
            for file, names in _unlisted(checkpoint).items()
        }
        self._further: dict[int, list[int]] = {}  # files of scales and of other parts, by the index of the tensor
        tensors = catalog.plain(names) if located is None else None
        self.files: Sequence[WeightFile]
        self.file: Array  # index of the file with the values or codes of each tensor
        if tensors is not None:
            located = tensors.files, tensors.ranges.file
        if located is not None:
            self.files, self.file = located
            return
        numbers: dict[WeightFile, int] = {}
        first = []
        for k, name in enumerate(names):
            if name not in catalog:  # an activation scale
                first.append(numbers.setdefault(catalog.ignored[name].file, len(numbers)))
                continue
            file = catalog.place(name).file
            assert file is not None
            first.append(numbers.setdefault(file, len(numbers)))
            packed = file.table.packed.get(catalog.place(name).number)
            for part in () if packed is None else packed.parts.values():
                if part.file is not file:
                    self._further.setdefault(k, []).append(numbers.setdefault(part.file, len(numbers)))
        self.files, self.file = [*numbers], np.array(first, np.int64)

    def sources(self, group: Sequence[int]) -> list[dict[str, Any]]:
        """Return the files of a group of tensors, a source per checkpoint."""
        distinct, first = np.unique(self.file[group], return_index=True)
        numbered = [*zip(first.tolist(), distinct.tolist(), strict=True)]
        if self._further:
            numbered += [(k, number) for k, tensor in enumerate(group) for number in self._further.get(tensor, ())]
        places: dict[str, tuple[WeightFile, int]] = {}  # a path can have several files, each with a part of its bytes
        for k, number in sorted(numbered, key=lambda pair: pair[0]):
            places.setdefault(self.files[number].place, (self.files[number], k))
        by_checkpoint: dict[int, list[tuple[WeightFile, int]]] = {}
        for file, k in places.values():
            by_checkpoint.setdefault(self._owners[file], []).append((file, k))
        return [self._source(self._checkpoints[k], items) for k, items in by_checkpoint.items()]

    def _source(self, owner: Checkpoint, numbered: Sequence[tuple[WeightFile, int]]) -> dict[str, Any]:
        recipe, row, files = recipe_of(owner), row_of(owner.format), [file for file, _ in numbered]
        coded = [file for file in files if dtypes.may_hold_codes(file.table.numbers)]
        public = [file.files.public(file.place) for file in files]
        return {
            # Path, size, version, and the index of the first tensor of the piece in the file.
            "files": [[path, *file.identity[:2], k] for path, (file, k) in zip(public, numbered, strict=True)],
            "storage_options": files[0].files.public_options(),
            "config": owner.config if coded else None,
            "configs": _configs(owner, coded),
            "unlisted": {
                path: self._unlisted[file] for path, file in zip(public, files, strict=True) if file in self._unlisted
            },
            # A file of a folder's format can be of another format when it is opened alone.
            "format": owner.format if row.parts is not None or row.source else recipe.format,
            "root": recipe.root,
            "unknown_globals": recipe.unknown_globals,
            "stored": recipe.stored,
        }


def _unlisted(checkpoint: Checkpoint) -> dict[WeightFile, list[str]]:
    """Return the tensors of each file if the index does not list them, or lists them for another file."""
    listed = {(file, k) for _, file, k in tensors_of(checkpoint)}
    unlisted: dict[WeightFile, list[str]] = {}
    for file in checkpoint.weight_files:
        names = [name for k, name in enumerate(file.table.names) if (file, k) not in listed]
        if names:
            unlisted[file] = names
    return unlisted


def _configs(owner: Checkpoint, coded: Iterable[WeightFile]) -> list[list[Any]]:
    """Return path, size and version of the local configurations that give codes their meaning."""
    from ...packed.quantization import BESIDE  # only here: most checkpoints do not need it

    folders = [os.path.dirname(file.place) for file in coded if not file.files.remote]
    paths = [os.path.join(folder, name) for folder in folders for name in BESIDE]
    folder = folder_of(owner)
    if coded and owner.config is not None and folder is not None and not folder.files.remote:
        paths.append((folder / CONFIG).path)
    present = dict.fromkeys(absolute(path) for path in paths if os.path.exists(path))
    return [[path, *identity_of(os.stat(path))[:2]] for path in present]


# ---- in a worker ----


@contextmanager
def opened(
    piece: Mapping[str, Any], storage_options: Mapping[str, Any] | None = None, sides: Sequence[str] = ("sources",)
) -> Iterator[tuple[list[str], list[Catalog]]]:
    """Open the files of a piece, and yield its names and a catalog per side; files are read without a mapping."""
    names = names_of(piece)
    with ExitStack() as stack:
        catalogs = []
        for side in sides:
            sources = piece.get(side)
            if not isinstance(sources, (list, tuple)):
                raise FormatError(f"{INVALID_PIECE}: {side} must be a list, got {show(sources)}")
            paths = (_reopened(source, names, storage_options) for source in sources)
            catalog = Catalog.of([stack.enter_context(Checkpoint(path)) for path in paths] or {})
            catalog.mapped = False
            present = [name for name in names if name not in catalog.ignored] if catalog.ignored else names
            catalog.check(present)
            catalogs.append(catalog.among(present))
        yield names, catalogs


def check_version(plan: Any, prefix: str = INVALID_PLAN) -> None:
    """Refuse a plan, piece or note of another version of safeload."""
    version = plan.get("version") if isinstance(plan, Mapping) else None
    if not isinstance(version, str):
        raise FormatError(f"{prefix}: version must be a string, got {show(version)}")
    if version != __version__:
        raise UnsupportedError(
            f"the plan was made by safeload {printable(version)}, but this is safeload {__version__}: "
            "every worker needs the same version"
        )


def names_of(piece: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors of a piece."""
    check_version(piece, INVALID_PIECE)
    names = piece.get("names")
    if not isinstance(names, (list, tuple)) or not set(map(type, names)) <= {str}:
        raise FormatError(f"{INVALID_PIECE}: names must be a list of strings, got {show(names)}")
    return [*dict.fromkeys(names)]


def _reopened(source: Any, names: Sequence[str], storage_options: Mapping[str, Any] | None) -> Opened:
    """Open the files of a source, unchanged."""
    try:
        seen = tuple((path, (size, version)) for path, size, version, _ in source["files"])
        configs = [(path, (size, version)) for path, size, version in source["configs"]]
        for path, _ in (*seen, *configs):
            check_path(path)
        files = files_at(seen[0][0], source["storage_options"], storage_options)
        first = {files.shown(path): names[k] for path, _, _, k in source["files"]}
        format, unknown_globals = source["format"], source["unknown_globals"]
        if format is not None:
            formats_of(format)
        if unknown_globals not in ("refuse", "inert"):
            raise ValueError(f"unknown_globals {unknown_globals!r}")
        paths = tuple(path for path, _ in seen)
        recipe = Recipe(paths, True, format, source["root"], unknown_globals, source["stored"], files)
        config, unlisted = source["config"], source["unlisted"]
    except MALFORMED as error:
        raise FormatError(f"{INVALID_PIECE}: malformed source: {error!r}") from None
    for path, identity in configs:
        if not os.path.exists(path):
            raise FormatError("the configuration is gone", path)
        check_unchanged(path, identity)
    with _named_tensor(first, names):
        for path, identity in seen if files is LOCAL else ():
            if not os.path.exists(path):
                raise FileNotFoundError(path)
            check_unchanged(path, identity)
        return reopen_subset(seen, config, recipe, unlisted)


@contextmanager
def _named_tensor(tensors: Mapping[str, str], names: Sequence[str]) -> Iterator[None]:
    """Name a tensor in errors if its file is gone or has changed; ``tensors`` holds the first of each path."""
    more = f" and of {plural(len(names) - 1, 'more tensor')}" if len(names) > 1 else ""
    try:
        yield
    except (FileNotFoundError, FormatError) as error:
        gone = isinstance(error, FileNotFoundError)
        path = str(getattr(error, "filename", None) or error) if gone else getattr(error, "path", None) or ""
        known = type(error) is FormatError and error.tensor is None
        if path not in tensors or not (gone or known):
            raise
        subject = f"the file of tensor {show(tensors[path])}{more}"
        if gone:
            message = f"{subject} is gone, or not on this machine"
            raise MissingShardError(message, path, tensor=tensors[path]) from None
        offset = getattr(error, "offset", None)
        raise FormatError(f"{subject}: {error.args[0]}", path, offset, tensor=tensors[path]) from None
