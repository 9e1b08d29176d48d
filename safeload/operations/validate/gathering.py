"""Reads what `validate` checks in pieces, on an executor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...base.scheme import INT8
from ...base.text import show
from ...errors import FormatError, one_line
from ...stores.files import Location
from ..measure.stats import TensorStats, as_plain, of_plain
from ..sources import executors
from ..sources.catalog import Catalog
from ..sources.codec import encode
from ..sources.executors import EXECUTOR, Executor, groups
from ..sources.piece_files import PieceSource, PlannedPath, Sources, location_of, opened, path_in_plan
from ..sources.plan import INVALID_PIECE, PlannedPiece, TensorPiece, decode_piece
from . import files
from .contents import Contents, readable
from .files import FileEntry
from .findings import Finding, Limits
from .settings import CheckSettings, settings

_OPERATION = "validate"

_Options = Mapping[str, Any] | None

# What a piece says of a file that cannot be read. The engine gets no error, as `validate` raises none: the report then
# has the same finding as that of one process, whichever piece is done first.
_PROBLEM = "problem"


class Gathered(Contents):
    """What pieces have found, as if it were read now: in the order of one process, and each problem in its turn.

    Args:
        catalog: the tensors.
        wanted: the settings.
        names: the tensors whose values are read.
        pairs: tied heads, each with its embedding.
    """

    def __init__(self, catalog: Catalog, wanted: CheckSettings, names: Sequence[str], pairs: Mapping[str, str]) -> None:
        super().__init__(catalog, wanted)
        self._entries: list[FileEntry] = []
        self._unreadable: list[Exception] = []
        try:
            self._entries = files.entries_of(catalog)
        except (FormatError, OSError) as problem:
            self._unreadable.append(problem)
        sources = Sources(catalog, EXECUTOR)
        self._pieces = [
            *_entry_pieces(self._entries),
            *_value_pieces(catalog, wanted, names, sources),
            *_tied_pieces(catalog, pairs, sources),
        ]
        self._found: dict[Any, Mapping[str, Any]] = {}

    def run(self, executor: Executor) -> None:
        """Runs all pieces."""
        wanted = self._wanted
        contents, sizes = [piece for piece, _, _ in self._pieces], [size for _, size, _ in self._pieces]
        results = executors.run(run, contents, executor, sizes=sizes, threads=wanted.threads, progress=wanted.progress)
        for (_, _, subjects), result in zip(self._pieces, results, strict=True):
            self._found.update(dict.fromkeys(subjects, result))

    def crc(self) -> Iterator[Finding]:
        """See `Contents`."""
        if self._unreadable:
            raise self._unreadable.pop()  # it refers to this frame and to this object
        for k, entry in enumerate(self._entries):
            fault = _got(self._found[k], "faults").get(str(k))
            if fault is not None:
                yield files.crc_finding(entry, fault)

    def scales(self, name: str) -> list[Finding]:
        """See `Contents`."""
        found = _got(self._found[name], "scales", name)[name]
        return [Finding(*finding) for finding in found]

    def stats(self, names: Sequence[str]) -> dict[str, TensorStats]:
        """See `Contents`."""
        found = {name: _got(self._found[name], "stats").get(name) for name in names}
        return {name: of_plain(plain) for name, plain in found.items() if plain is not None}

    def tied(self, head: str, embedding: str) -> Finding | None:
        """See `Contents`."""
        found = _got(self._found[head, embedding], "tied")
        return Finding(*found[0]) if found else None


def _got(result: Mapping[str, Any], key: str, name: str | None = None) -> Any:
    """What a piece has found; its problem, raised, if it did not come to that."""
    found = result.get(key)
    if found is None or (name is not None and name not in found):
        raise FormatError(result.get(_PROBLEM) or f"a piece of validate has no result {show(key)}")
    return found


# ---- pieces ----


class PlannedArchive(NamedTuple):
    """An archive whose entries a piece reads."""

    path: str | PlannedPath
    size: int  # bytes
    version: int | float | str | None  # see `SourceFile`
    entries: dict[str, str]  # names, by the number of the entry


@dataclass(frozen=True, eq=False, kw_only=True)
class ArchivesPiece(PlannedPiece):
    """A piece that compares checksums of archives."""

    check: str
    sources: tuple[PieceSource, ...] = ()
    archives: tuple[PlannedArchive, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class ValuesPiece(TensorPiece):
    """A piece that checks values; see `Limits`."""

    check: str
    histogram: bool = False
    scale: float | dict[str, float] | None = None
    absmax: float | dict[str, float] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class TiedPiece(PlannedPiece):
    """A piece that compares a tied head with its embedding."""

    check: str
    names: tuple[str, str]


# A piece, its bytes, and what it is about: entries by index, names of tensors, pairs of them.
_Planned = tuple[dict[str, Any], int, Sequence[Any]]


def _entry_pieces(entries: Sequence[FileEntry]) -> Iterator[_Planned]:
    sizes = {k: entry.info.packed for k, entry in enumerate(entries)}
    for group in groups(sizes, lambda k: entries[k].file):
        archives: dict[str, PlannedArchive] = {}
        for k in group:
            file = entries[k].file
            if file.place not in archives:
                path = path_in_plan(Location(file.files, file.place))
                archives[file.place] = PlannedArchive(path, file.identity[0], file.identity[1], {})
            archives[file.place].entries[str(k)] = entries[k].name
        piece = ArchivesPiece(operation=_OPERATION, check="archives", archives=tuple(archives.values()))
        yield encode(piece), sum(sizes[k] for k in group), group


def _value_pieces(
    catalog: Catalog, wanted: CheckSettings, names: Sequence[str], sources: Sources
) -> Iterator[_Planned]:
    sizes = {name: catalog.about(name).nbytes for name in names}
    for group in groups(sizes, sources.file_of):
        int8 = [name for name in group if catalog.about(name).scheme == INT8]
        piece = ValuesPiece(
            operation=_OPERATION,
            check="values",
            names=tuple(group),
            sources=sources.of(group),
            histogram=wanted.histogram,
            scale=_numbers(wanted.limits.scale, int8),
            absmax=_numbers(wanted.limits.absmax, int8),
        )
        yield encode(piece), sum(sizes[name] for name in group), group


def _numbers(limit: Any, names: Sequence[str]) -> Any:
    """A limit as plain data: a number, or that of each of the tensors that have one; None if there is none."""
    if limit is None or not names:
        return None
    if not isinstance(limit, Mapping):
        return float(limit)
    return {name: float(limit[name]) for name in names if limit.get(name) is not None}


def _tied_pieces(catalog: Catalog, pairs: Mapping[str, str], sources: Sources) -> Iterator[_Planned]:
    for pair in pairs.items():
        piece = TiedPiece(operation=_OPERATION, check="tied", names=pair, sources=sources.of(pair))
        yield encode(piece), sum(catalog.about(name).nbytes for name in pair), [pair]


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Reads what a piece names; see `run_piece`."""
    check = piece.get("check") if isinstance(piece, Mapping) else None
    if not isinstance(check, str) or check not in _CHECKS:
        raise FormatError(f"{INVALID_PIECE}: check must be {', '.join(_CHECKS)}, got {show(check)}")
    return _CHECKS[check](piece, threads, storage_options)


@contextmanager
def _told(found: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except (FormatError, OSError) as problem:
        found[_PROBLEM] = one_line(problem)


def _check_archives(piece: Mapping[str, Any], threads: int | None, storage_options: _Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    decoded = decode_piece(ArchivesPiece, piece)
    with _told(found):
        faults: dict[str, str] = {}
        for archive in decoded.archives:
            location, identity = location_of(archive.path, storage_options), (archive.size, archive.version)
            location.files.check_unchanged(location.path, identity)
            with files.reopened(location, identity, list(archive.entries.values())) as entries:
                by_number = zip(archive.entries, files.faults_of(entries, threads), strict=True)
                faults.update((number, fault) for number, fault in by_number if fault is not None)
        found["faults"] = faults
    return found


def _check_values(piece: Mapping[str, Any], threads: int | None, storage_options: _Options) -> dict[str, Any]:
    decoded = decode_piece(ValuesPiece, piece)
    names, limits = decoded.names, Limits(scale=decoded.scale, absmax=decoded.absmax)
    wanted = settings(limits=limits, threads=threads, histogram=decoded.histogram)
    scales: dict[str, list[list[Any]]] = {}
    found: dict[str, Any] = {"scales": scales}
    with _told(found), opened(decoded.sources, names, storage_options) as catalog:
        contents = Contents(catalog, wanted)
        known = {name: catalog.about(name) for name in names}
        for name in names:
            if known[name].quantized:
                scales[name] = [list(finding) for finding in contents.scales(name)]
        bad = {name for name, findings in scales.items() if findings}
        stats = contents.stats(readable(names, known, bad))
        found["stats"] = {name: as_plain(one) for name, one in stats.items()}
    return found


def _check_tied(piece: Mapping[str, Any], threads: int | None, storage_options: _Options) -> dict[str, Any]:
    decoded = decode_piece(TiedPiece, piece)
    found: dict[str, Any] = {}
    with _told(found), opened(decoded.sources, decoded.names, storage_options) as catalog:
        finding = Contents(catalog, settings(threads=threads)).tied(*decoded.names)
        found["tied"] = [] if finding is None else [list(finding)]
    return found


_CHECKS = {"archives": _check_archives, "values": _check_values, "tied": _check_tied}


def gathered(
    catalog: Catalog, wanted: CheckSettings, names: Sequence[str], pairs: Mapping[str, str], executor: Executor
) -> Contents:
    """Reads everything in pieces.

    Args:
        catalog: the tensors.
        wanted: the settings.
        names: the tensors whose values are read.
        pairs: tied heads, each with its embedding.
        executor: runs the pieces.

    Raises:
        ValueError: tensors in memory.
        Exception: what the executor has raised, or a piece by another fault than a file that cannot be read.
    """
    contents = Gathered(catalog, wanted, names, pairs)
    contents.run(executor)
    return contents
