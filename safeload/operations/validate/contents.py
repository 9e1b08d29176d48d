"""Checks of tensor and archive contents: CRC-32 of archives, scales, statistics, tied heads.

`Contents` reads in this process. `GatheredContents` reads in pieces on an executor, and then replays the results in the
order of a single process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...base.gc_pause import paused
from ...base.scheme import INT8
from ...base.text import show
from ...errors import FormatError, UnsupportedError, one_line
from ...models.schema import Schema
from ...stores.files import Location
from ..measure.stats import as_plain, measure, of_plain
from ..measure.stats_table import StatsTable, TensorStats
from ..sources import executors
from ..sources.catalog import Catalog
from ..sources.codec import encode
from ..sources.description import TensorDescription
from ..sources.executors import EXECUTOR, groups
from ..sources.piece_files import PieceSource, PlannedPath, Sources, location_of, opened, path_in_plan
from ..sources.plan import INVALID_PIECE, PlannedPiece, TensorPiece, decode_piece
from . import files, holes, values
from .files import FileEntry
from .findings import ERROR, CheckReport, Finding
from .settings import CheckSettings, Limits, settings
from .structure import Quantized

_OPERATION = "validate"

# Key of the error in the result of a piece that cannot read a file. Pieces do not raise these errors, because the
# report must not depend on which piece fails first.
_PROBLEM = "problem"

_Options = Mapping[str, Any] | None


class Model(NamedTuple):
    """Description of a model, known before its values are read."""

    tensors: Mapping[str, TensorDescription]
    codes: frozenset[str]  # tensors with codes; their values are not checked
    quantized: Quantized | None
    schema: Schema | None

    def role(self, name: str) -> str | None:
        """Return the role of a tensor, or None if it is not in the schema."""
        return None if self.schema is None else self.schema.role(name)


class Contents:
    """Read and check tensors and archives. All methods raise FormatError or OSError for an unreadable file."""

    def __init__(self, catalog: Catalog, options: CheckSettings) -> None:
        self._catalog = catalog
        self._options = options
        self.limits = options.limits

    def crc(self) -> Iterator[Finding]:
        """Check the bytes of zip entries against their CRC-32."""
        entries = files.entries_of(self._catalog)
        for entry, fault in zip(entries, files.faults_of(entries, self._options.threads), strict=True):
            if fault is not None:
                yield files.crc_finding(entry, fault)

    def scales(self, name: str) -> list[Finding]:
        """Check the scales of a quantized tensor."""
        return list(values.check_scales(self._catalog, name, self.limits, self._options.threads))

    def stats(self, names: Sequence[str]) -> dict[str, TensorStats]:
        """Return the statistics of tensors; tensors without real numbers are skipped."""
        return measure(self._catalog, names, self._options.histogram, self._options.threads, self._options.progress)

    def zeros(
        self, stats: Mapping[str, TensorStats], model: Model, reported: set[str]
    ) -> Iterator[tuple[Finding, list[str]]]:
        """Yield findings about lost blocks, each with the names of its zero tensors."""
        yield from holes.check_zeros(self._catalog, stats, model.role, reported)

    def outliers(self, stats: Mapping[str, TensorStats]) -> dict[str, float]:
        """Return the tensors with a value far beyond the rest, each with a bound of 99.9 % of the values."""
        return values.find_outliers(self._catalog, stats, self._options.threads)

    def tied(self, head: str, embedding: str) -> Finding | None:
        """Compare a head with its tied embedding."""
        return values.check_tied(self._catalog, head, embedding)


def check_contents(
    report: CheckReport,
    contents: Contents,
    model: Model,
    names: Sequence[str],  # of tensors with values to check
    *,
    pairs: Mapping[str, str],  # tied heads and their embeddings
    zero: set[str],  # tensors already reported as zero
) -> None:
    """Run all checks of contents, and add findings and statistics to the report as they come."""
    report.add(contents.crc())
    bad = set()
    for name in names:
        if model.tensors[name].quantized:
            findings = contents.scales(name)
            report.add(findings)
            if _has_error(findings):
                bad.add(name)
    report.stats = StatsTable(contents.stats(_readable(names, model.tensors, bad)))
    for finding, hidden in contents.zeros(report.stats, model, zero):
        report.add([finding])
        zero.update(hidden)
    codes: frozenset[str] = frozenset() if model.quantized is None else model.quantized.names
    report.add(
        values.check_values(
            report.stats,
            model.tensors,
            contents.limits,
            bad,
            role=model.role,
            codes=codes,
            zero=zero,
            outliers=contents.outliers(_large(report.stats, model.tensors, codes)),
        )
    )
    tied = (contents.tied(*pair) for pair in pairs.items() if bad.isdisjoint(pair))
    report.add(finding for finding in tied if finding is not None)


def _large(
    stats: Mapping[str, TensorStats], tensors: Mapping[str, TensorDescription], codes: Collection[str]
) -> dict[str, TensorStats]:
    """Return the statistics of the tensors that can have outliers."""
    return {
        name: row
        for name, row in stats.items()
        if row.absmax > values.OUTLIER_ABOVE and name not in codes and values.is_real(tensors[name])
    }


def _has_error(findings: Sequence[Finding]) -> bool:
    return any(finding.severity == ERROR for finding in findings)


def _readable(names: Sequence[str], tensors: Mapping[str, TensorDescription], bad: set[str]) -> list[str]:
    """Return the tensors to compute statistics of. Packed tensors with bad scales would only repeat the error."""
    return [name for name in names if not (name in bad and tensors[name].packed)]


# ---- on an executor ----


class GatheredContents(Contents):
    """Contents read by the pieces of an executor; only errors about unreadable files become findings."""

    def __init__(
        self, catalog: Catalog, options: CheckSettings, names: Sequence[str], pairs: Mapping[str, str]
    ) -> None:
        super().__init__(catalog, options)
        self._entries: list[FileEntry] = []
        self._unreadable: list[Exception] = []
        try:
            self._entries = files.entries_of(catalog)
        except (FormatError, OSError) as problem:
            self._unreadable.append(problem)
        sources = Sources(catalog, EXECUTOR)
        pieces = [
            *_entry_pieces(self._entries),
            *_value_pieces(catalog, options, names, sources),
            *_tied_pieces(catalog, pairs, sources),
        ]
        results = executors.run(
            run,
            [encode(planned.piece) for planned in pieces],
            options.executor,
            sizes=[planned.nbytes for planned in pieces],
            threads=options.threads,
            progress=options.progress,
        )
        self._results: dict[Any, Mapping[str, Any]] = {}  # by the index of an entry, a name, or a pair of names
        for planned, result in zip(pieces, results, strict=True):
            self._results.update(dict.fromkeys(planned.subjects, result))

    def crc(self) -> Iterator[Finding]:
        if self._unreadable:
            raise self._unreadable.pop()  # its traceback refers to this object
        for k, entry in enumerate(self._entries):
            fault = _field(self._results[k], "faults").get(str(k))
            if fault is not None:
                yield files.crc_finding(entry, fault)

    def scales(self, name: str) -> list[Finding]:
        findings = _field(self._results[name], "scales", name)[name]
        return [Finding(*finding) for finding in findings]

    def stats(self, names: Sequence[str]) -> dict[str, TensorStats]:
        with paused(len(names)):
            plain = {name: _field(self._results[name], "stats").get(name) for name in names}
            return of_plain({name: row for name, row in plain.items() if row is not None})

    def outliers(self, stats: Mapping[str, TensorStats]) -> dict[str, float]:
        bounds = {name: _field(self._results[name], "outliers").get(name) for name in stats}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def tied(self, head: str, embedding: str) -> Finding | None:
        findings = _field(self._results[head, embedding], "tied")
        return Finding(*findings[0]) if findings else None


def _field(result: Mapping[str, Any], key: str, name: str | None = None) -> Any:
    """Return a field of a result; raise the problem of the piece if it stopped before."""
    value = result.get(key)
    if value is None or (name is not None and name not in value):
        raise FormatError(result.get(_PROBLEM) or f"a piece of validate has no result {show(key)}")
    return value


# ---- pieces ----


class PlannedArchive(NamedTuple):
    """An archive, and the entries for a piece to read."""

    path: str | PlannedPath
    size: int  # bytes
    version: int | float | str | None  # see `SourceFile`
    entries: dict[str, str]  # names, by the number of the entry


@dataclass(frozen=True, eq=False, kw_only=True)
class ArchivesPiece(PlannedPiece):
    """A piece to compare checksums of archives."""

    check: str
    sources: tuple[PieceSource, ...] = ()
    archives: tuple[PlannedArchive, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class ValuesPiece(TensorPiece):
    """A piece to check values; see `Limits`."""

    check: str
    histogram: bool = False
    scale: float | dict[str, float] | None = None
    absmax: float | dict[str, float] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class TiedPiece(PlannedPiece):
    """A piece to compare a tied head with its embedding."""

    check: str
    names: tuple[str, str]


class _Planned(NamedTuple):
    """A piece to run."""

    piece: PlannedPiece
    nbytes: int
    subjects: Sequence[Any]  # indices of entries, names of tensors, or pairs of names


def _entry_pieces(entries: Sequence[FileEntry]) -> Iterator[_Planned]:
    sizes = [entry.info.packed for entry in entries]
    files = [entry.file for entry in entries]
    for group in groups(sizes, files, range(len(files))):
        archives: dict[str, PlannedArchive] = {}
        for k in group:
            file = entries[k].file
            if file.place not in archives:
                path = path_in_plan(Location(file.files, file.place))
                archives[file.place] = PlannedArchive(path, file.identity[0], file.identity[1], {})
            archives[file.place].entries[str(k)] = entries[k].name
        piece = ArchivesPiece(operation=_OPERATION, check="archives", archives=tuple(archives.values()))
        yield _Planned(piece, sum(sizes[k] for k in group), group)


def _value_pieces(
    catalog: Catalog, options: CheckSettings, names: Sequence[str], sources: Sources
) -> Iterator[_Planned]:
    tensors = catalog.descriptions(names)
    for rows in groups([tensors[name].nbytes for name in names], *sources.columns_of(names)):
        group = [*map(names.__getitem__, rows)]
        int8 = [name for name in group if tensors[name].scheme == INT8]
        piece = ValuesPiece(
            operation=_OPERATION,
            check="values",
            names=tuple(group),
            sources=sources.of(group),
            histogram=options.histogram,
            scale=_plain_limit(options.limits.scale, int8),
            absmax=_plain_limit(options.limits.absmax, int8),
        )
        yield _Planned(piece, sum(tensors[name].nbytes for name in group), group)


def _plain_limit(limit: Any, names: Sequence[str]) -> Any:
    """Return a limit as a number, as numbers by name, or None if it applies to no tensor."""
    if limit is None or not names:
        return None
    if not isinstance(limit, Mapping):
        return float(limit)
    return {name: float(limit[name]) for name in names if limit.get(name) is not None}


def _tied_pieces(catalog: Catalog, pairs: Mapping[str, str], sources: Sources) -> Iterator[_Planned]:
    for pair in pairs.items():
        piece = TiedPiece(operation=_OPERATION, check="tied", names=pair, sources=sources.of(pair))
        yield _Planned(piece, sum(catalog.about(name).nbytes for name in pair), [pair])


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run the check of a piece; see `run_piece`."""
    check = piece.get("check") if isinstance(piece, Mapping) else None
    if not isinstance(check, str) or check not in _CHECKS:
        raise FormatError(f"{INVALID_PIECE}: unknown check {show(check)}, expected one of {', '.join(_CHECKS)}")
    return _CHECKS[check](piece, threads, storage_options)


@contextmanager
def _problem_in(result: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except (FormatError, UnsupportedError, OSError) as problem:
        result[_PROBLEM] = one_line(problem)


def _check_archives(piece: Mapping[str, Any], threads: int | None, storage_options: _Options) -> dict[str, Any]:
    result: dict[str, Any] = {}
    decoded = decode_piece(ArchivesPiece, piece)
    with _problem_in(result):
        faults: dict[str, str] = {}
        for archive in decoded.archives:
            location, identity = location_of(archive.path, storage_options), (archive.size, archive.version)
            location.files.check_unchanged(location.path, identity)
            with files.reopened(location, identity, list(archive.entries.values())) as entries:
                by_number = zip(archive.entries, files.faults_of(entries, threads), strict=True)
                faults.update((number, fault) for number, fault in by_number if fault is not None)
        result["faults"] = faults
    return result


def _check_values(piece: Mapping[str, Any], threads: int | None, storage_options: _Options) -> dict[str, Any]:
    decoded = decode_piece(ValuesPiece, piece)
    names, limits = decoded.names, Limits(scale=decoded.scale, absmax=decoded.absmax)
    options = settings(limits=limits, threads=threads, histogram=decoded.histogram)
    scales: dict[str, list[Finding]] = {}
    result: dict[str, Any] = {"scales": {}}
    with _problem_in(result), opened(decoded.sources, names, storage_options) as catalog:
        contents = Contents(catalog, options)
        tensors = catalog.descriptions(names)
        for name in names:
            if tensors[name].quantized:
                scales[name] = contents.scales(name)
                result["scales"][name] = encode(scales[name])
        bad = {name for name, findings in scales.items() if _has_error(findings)}
        stats = contents.stats(_readable(names, tensors, bad))
        result["outliers"] = contents.outliers(_large(stats, tensors, ()))
        result["stats"] = as_plain(stats)
    return result


def _check_tied(piece: Mapping[str, Any], threads: int | None, storage_options: _Options) -> dict[str, Any]:
    decoded = decode_piece(TiedPiece, piece)
    result: dict[str, Any] = {}
    with _problem_in(result), opened(decoded.sources, decoded.names, storage_options) as catalog:
        finding = Contents(catalog, settings(threads=threads)).tied(*decoded.names)
        result["tied"] = [] if finding is None else [encode(finding)]
    return result


_CHECKS = {"archives": _check_archives, "values": _check_values, "tied": _check_tied}
