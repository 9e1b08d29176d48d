"""Divide an operation into pieces, run these on an executor, such as Dask's, and open their files in a worker.

A piece is plain data: the operation with its options, the names of its tensors, and their files with the version of
each. A worker opens no other file. The result of a piece of an operation that only reads is a dict of tables, each
with a row per tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import groupby
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from .._version import __version__
from ..core import dtypes
from ..core.arrays import Array
from ..core.checkpoint import Checkpoint, folder_of, recipe_of, tensors_of
from ..core.files import LOCAL, Location, cache_here, caching, check_unchanged, identity_of
from ..core.memory import Cache
from ..core.names import grouped
from ..core.opening import reopen_subset
from ..core.progress import Meter, Progress
from ..core.registry import Opened, Recipe, formats_of, row_of
from ..core.runtime import paused
from ..core.tensors import Spans
from ..core.text import absolute, debug, native_path, plural, printable, show
from ..core.weight_file import WeightFile
from ..errors import FormatError, MissingShardError, UnsupportedError
from ..formats.folder import CONFIG
from ..remote import url as urls
from .catalog import Catalog

# The argument, for messages.
EXECUTOR = "executor="

# Bytes of tensors in a piece. Small pieces waste time, because a task costs about 1 ms with Dask; large pieces leave
# workers idle at the end.
_SMALLEST, _LARGEST = 16 << 20, 1 << 30
# The number of pieces, if the limits allow it.
_PIECES = 64
# The cost of a tensor besides its bytes, in bytes.
_TENSOR_COST = 4 << 10
# The number of tensors that open again, with their file, in the time that a tensor costs.
_OPENED = 4

_T = TypeVar("_T")


class Executor(Protocol):
    """The required method of executors, as in `concurrent.futures.Executor`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function in another thread, process or machine and return a `concurrent.futures.Future`, or alike."""


def run(
    function: Callable[[Mapping[str, Any], int | None], _T],  # importable by name, because executors pickle it
    pieces: Sequence[Mapping[str, Any]],  # with the nbytes of each
    executor: Executor | None,  # None to run the pieces in this thread
    *,
    threads: int | None,  # per piece; None: one on an executor, which can run several pieces per machine, and all here
    progress: Progress,
) -> list[_T]:
    """Call ``function(piece, threads)`` for each piece and return the results in order; no piece is tried again."""
    results: list[Any] = [None] * len(pieces)
    finished: SimpleQueue[Any] = SimpleQueue()
    futures: dict[Any, int] = {}
    # Dask returns the result of an earlier call with equal arguments unless it gets pure=False.
    token = os.urandom(8).hex()
    with closing(Meter(progress, sum(piece["nbytes"] for piece in pieces))) as meter:
        try:
            if executor is not None:
                for piece in pieces:
                    future = executor.submit(_call, function, piece, threads or 1, token, cache_here())
                    futures[future] = len(futures)
                    future.add_done_callback(finished.put)
            for k, piece in enumerate(pieces):
                if executor is None:
                    results[k] = function(piece, threads)
                else:
                    future = finished.get()
                    k = futures[future]
                    results[k] = future.result()
                debug("piece %d of %d is done", k + 1, len(pieces))
                meter.add(pieces[k]["nbytes"])
        except BaseException:
            # The first exception is raised. An executor that has lost its cluster cannot cancel, and runs nothing.
            for future in [future for future in futures if not _quietly(future.cancel)]:
                _quietly(future.result)
            raise
    return results


def groups(sizes: Sequence[int], files: Sequence[WeightFile], file: Sequence[int]) -> list[list[int]]:
    """Divide tensors, or entries of archives, into pieces of similar size, and return their positions."""
    costs, places = [size + _TENSOR_COST for size in sizes], [each.place for each in files]
    limit = max(_SMALLEST, min(_LARGEST, sum(costs) // _PIECES))
    by_place: dict[str, list[int]] = {}
    for number, rows in groupby(range(len(file)), file.__getitem__):
        by_place.setdefault(places[number], []).extend(rows)
    divided: list[list[int]] = []
    used = math.inf  # of the limit by the last piece
    for positions in by_place.values():
        first, size = files[file[positions[0]]], sum(map(costs.__getitem__, positions))
        # A piece should take no less time than opening its file again; an unpacked file is not divided.
        parts = 1 if first.unpacked else size // max(1, _TENSOR_COST * first.table.count / _OPENED)
        allowed = max(limit, size / max(1, parts) + _TENSOR_COST)
        used = math.inf if first.unpacked or used >= _SMALLEST else used  # only small files share a piece
        for k in positions:
            if used + costs[k] > allowed:
                divided.append([])
                used = 0
            divided[-1] += [k]
            used += costs[k]
        used = math.inf if first.unpacked else used
    return divided


def check_executor(executor: Any) -> None:
    """Refuse an object if it is neither an executor nor None."""
    usable = callable(getattr(executor, "submit", None)) and not isinstance(executor, type)
    if executor is not None and not usable:
        raise TypeError(
            f"executor must have a submit() method like concurrent.futures.Executor, got {type(executor).__name__}: "
            "for Dask, pass the client"
        )


def _call(function: Callable[[Any, int | None], _T], piece: Any, threads: int, token: str, cache: Cache) -> _T:
    return caching(cache)(function)(piece, threads)


def _quietly(call: Callable[[], Any]) -> Any:
    """Call a method of a future, and return True if it raises."""
    try:
        return call()
    except Exception as error:
        debug("another piece failed, or cannot be cancelled: %s", error)
        return True


# ---- tensors that other processes can read ----


def check_paths(catalog: Catalog, argument: str) -> None:
    """Refuse tensors in memory, which other processes cannot read."""
    if catalog.in_memory:
        raise in_memory("the tensors of a dict are", argument)


def in_memory(tensors_are: str, argument: str) -> ValueError:
    """Return the error for tensors in memory; ``tensors_are`` is the subject and the verb of its message."""
    return ValueError(f"{argument} needs the path of a checkpoint, or an open one: {tensors_are} only in this process")


def check_path(path: str) -> None:
    """Refuse a path or name that no system can have."""
    try:
        native_path(path)
    except (ValueError, OSError) as error:
        raise FormatError(f"invalid plan: {error}") from None


def place_at(path: str, planned: Mapping[str, Any] | None, storage_options: Mapping[str, Any] | None) -> Location:
    """Return the location of a path or URL in a plan; options of this process override ``planned`` options."""
    check_path(path)
    if not urls.is_url(path):
        return Location(LOCAL, path)
    from ..remote.remote_files import RemoteFiles  # only here: most paths are local

    options = None if planned is None and storage_options is None else _merged(planned or {}, storage_options or {})
    return Location(RemoteFiles(options), path)


def _merged(planned: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**planned, **own}
    for key, value in planned.items():
        if isinstance(value, dict) and isinstance(own.get(key), Mapping):
            merged[key] = _merged(value, own[key])
    return merged


# Rows by tensor, by the name of the table.
Tables: TypeAlias = dict[str, dict[str, Any]]

# Prefixes of messages.
INVALID_PLAN, INVALID_PIECE = "invalid plan", "invalid piece"
# The errors of a malformed piece.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)


def run_pieces(
    function: Callable[[Mapping[str, Any], int | None], Mapping[str, Mapping[str, Any]]],
    pieces: Iterable[Mapping[str, Any]],
    executor: Executor | None,
    *,
    threads: int | None,
    progress: Progress,
) -> Tables:
    """Run pieces on an executor, and join the tables of their results."""
    tables: Tables = {}
    for result in run(function, [*pieces], executor, threads=threads, progress=progress):
        for name, rows in result.items():
            tables.setdefault(name, {}).update(rows)
    return tables


def pieces_of(
    sizes: Mapping[str, int], catalog: Catalog, against: Catalog | None = None, *, whole: bool = False, **call: Any
) -> Iterator[dict[str, Any]]:
    """Divide tensors, given the bytes of each, into pieces of a call; ``against`` has tensors of equal names."""
    names, both = [*sizes], {"sources": catalog, "against": against}
    sides = {key: TensorFiles(side, names) for key, side in both.items() if side is not None}
    with paused(len(names)):
        files, file = sides["sources"].files, sides["sources"].file.tolist()
        for group in [[*range(len(names))]] if whole else groups([*sizes.values()], files, file):
            chosen = [*map(names.__getitem__, group)]
            sources = {key: side.sources(group) for key, side in sides.items()}
            nbytes = sum(map(sizes.__getitem__, chosen))
            yield {**call, "version": __version__, "names": chosen, **sources, "nbytes": nbytes}


class TensorFiles:
    """The files of tensors of a catalog."""

    def __init__(
        self, catalog: Catalog, names: Sequence[str], argument: str = EXECUTOR, spans: Spans | None = None
    ) -> None:
        check_paths(catalog, argument)
        self._checkpoints = catalog.checkpoints
        self._owners = {file: k for k, owner in enumerate(self._checkpoints) for file in owner.weight_files}
        indexed = (checkpoint for checkpoint in catalog.checkpoints if checkpoint.index is not None)
        self._unlisted = {file: names for checkpoint in indexed for file, names in unlisted_in(checkpoint).items()}
        self._further: dict[int, list[int]] = {}  # files of scales and of other parts, by the index of the tensor
        tensors = catalog.plain(names, blocks=True) if spans is None else None
        spans = spans if tensors is None else tensors.spans
        if spans is not None:
            self.files: Sequence[Any] = spans.files
            self.file: Array = spans.file  # index of the file with the values or codes of each tensor
            return
        numbers: dict[WeightFile, int] = {}
        first = []
        for k, name in enumerate(names):
            # An activation scale has no place.
            _, file, number = catalog.place(name) if name in catalog else (None, catalog.ignored[name].file, -1)
            assert file is not None
            first.append(numbers.setdefault(file, len(numbers)))
            packed = file.table.packed.get(number)
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
        by_checkpoint = grouped(places.values(), lambda place: self._owners[place[0]])
        return [self._source(self._checkpoints[k], items) for k, items in by_checkpoint.items()]

    def _source(self, owner: Checkpoint, numbered: Sequence[tuple[WeightFile, int]]) -> dict[str, Any]:
        recipe, row, files = recipe_of(owner), row_of(owner.format), [file for file, _ in numbered]
        coded = [file for file in files if dtypes.may_hold_codes(file.table.numbers)]
        public = files[0].files.public
        return {
            # Path, size, version, and the index of the first tensor of the piece in the file.
            "files": [[public(file.place), *file.identity[:2], k] for file, k in numbered],
            "storage_options": files[0].files.public_options(),
            "config": owner.config if coded else None,
            "configs": _configs(owner, coded),
            "unlisted": {public(file.place): self._unlisted[file] for file in files if self._unlisted.get(file)},
            # A file of a folder's format can be of another format when it is opened alone.
            "format": owner.format if row.parts is not None or row.source else recipe.format,
            "root": recipe.root,
            "unknown_globals": recipe.unknown_globals,
            "stored": recipe.stored,
        }


def unlisted_in(checkpoint: Checkpoint) -> dict[WeightFile, list[str]]:
    """Return the tensors of each file that the index does not list, or lists for another file."""
    listed = {(file, k) for _, file, k in tensors_of(checkpoint)}
    numbered = {file: enumerate(file.table.names) for file in checkpoint.weight_files}
    return {file: [name for k, name in names if (file, k) not in listed] for file, names in numbered.items()}


def _configs(owner: Checkpoint, coded: Iterable[WeightFile]) -> list[list[Any]]:
    """Return path, size and version of the local configurations that give codes their meaning."""
    from ..quant.quantization import BESIDE  # only here: most checkpoints do not need it

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
            sources = field_of(piece, side, (list, tuple), "a list")
            reopened = (_reopened(source, names, storage_options) for source in sources)
            origins: list[Any] = [stack.enter_context(Checkpoint(source)) for source in reopened] or [{}]
            catalog = Catalog(origins)
            present = [name for name in names if name not in catalog.ignored] if catalog.ignored else names
            catalog.check(present)
            catalogs.append(Catalog(origins, mapped=False, names=present))
        yield names, catalogs


def field_of(
    content: Any, key: str, kinds: type[_T] | tuple[type[_T], ...], what: str, prefix: str = INVALID_PIECE
) -> _T:
    """Return a field of a plan or a piece, and refuse a value of any other kind."""
    value = content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(value, kinds):
        raise FormatError(f"{prefix}: {key} must be {what}, got {show(value)}")
    return value


def check_version(plan: Any, prefix: str = INVALID_PLAN) -> None:
    """Refuse a plan, piece or note of another version of safeload."""
    version = field_of(plan, "version", str, "a string", prefix)
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
        files = place_at(seen[0][0], source["storage_options"], storage_options).files
        first = {files.shown(path): names[k] for path, _, _, k in source["files"]}
        format, unknown_globals = source["format"], source["unknown_globals"]
        if format is not None:
            formats_of(format)
        if unknown_globals not in ("refuse", "inert"):
            raise ValueError(f"unknown_globals {unknown_globals!r}")
        paths, root, stored = tuple(path for path, _ in seen), source["root"], source["stored"]
        recipe = Recipe(paths, True, format, root, unknown_globals, stored, files)
        config, unlisted = source["config"], source["unlisted"]
    except MALFORMED as error:
        raise FormatError(f"{INVALID_PIECE}: malformed source: {error!r}") from None
    for path, identity in configs:
        if not os.path.exists(path):
            raise FormatError("the configuration is gone", path)
        check_unchanged(path, identity)
    try:
        return reopen_subset(seen, config, recipe, unlisted)
    except (FileNotFoundError, FormatError) as error:
        gone = isinstance(error, FileNotFoundError)
        path = str(getattr(error, "filename", None) or error) if gone else getattr(error, "path", None) or ""
        known = type(error) is FormatError and error.tensor is None
        if path not in first or not (gone or known):
            raise
        more = f" and of {plural(len(names) - 1, 'more tensor')}" if len(names) > 1 else ""
        subject = f"the file of tensor {show(first[path])}{more}"
        if gone:
            text = f"{subject} is gone, or not on this machine"
            raise MissingShardError(text, path, tensor=first[path]) from None
        offset = getattr(error, "offset", None)
        raise FormatError(f"{subject}: {error.args[0]}", path, offset, tensor=first[path]) from None
