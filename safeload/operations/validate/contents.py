"""Check tensor and archive contents: CRC-32 of archives, scales, statistics, tied heads.

Readers fill tables of rows, in this process or in pieces on an executor. `check_contents` judges the rows in a fixed
order, so that reports do not depend on which process reads, or on which file fails first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..._version import __version__
from ...base.gc_pause import paused
from ...base.scheme import INT8
from ...base.text import show
from ...engine.run.progress import Progress
from ...errors import FormatError, one_line
from ...models.schema import Schema
from ...stores.files import Location
from ..measure.stats import as_plain, measure, of_plain
from ..measure.stats_table import StatsTable
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from ..sources.executors import files_at, groups
from ..sources.reading import (
    INVALID_PIECE,
    MALFORMED,
    ReadingPiece,
    Tables,
    check_version,
    names_of,
    opened,
    pieces_of,
    run_pieces,
)
from . import files, holes, values
from .files import FileEntry
from .findings import ERROR, UNREADABLE, CheckReport, Finding
from .settings import CheckSettings, Limits
from .structure import Quantized

# Tables of rows by name: findings about scales, statistics, bounds of outliers, findings about tied heads. Faults of
# entries of archives have the number of the entry, as text.
_CRC, _SCALES, _STATS, _OUTLIERS, _TIED = "crc", "scales", "stats", "outliers", "tied"
_VALUES = (_SCALES, _STATS, _OUTLIERS)


class Model(NamedTuple):
    """Description of a model, known before its values are read."""

    tensors: Mapping[str, TensorDescription]
    codes: frozenset[str]  # tensors with codes; their values are not checked
    quantized: Quantized | None
    schema: Schema | None
    config: Mapping[str, Any] | None  # of the part that the schema covers

    @property
    def tied(self) -> dict[str, str]:
        """The tied heads stored along with their embeddings, and the embeddings."""
        try:
            expected = {} if self.schema is None else self.schema.expand(self.config, self.tensors.keys())
        except ValueError:  # already reported by check_schema
            return {}
        tensors = self.tensors
        return {w.name: w.tied for w in expected.values() if w.tied is not None and {w.name, w.tied} <= tensors.keys()}

    def role(self, name: str) -> str | None:
        """Return the role of a tensor, or None if it is not in the schema."""
        return None if self.schema is None else self.schema.role(name)


def check_contents(
    report: CheckReport,
    catalog: Catalog,
    model: Model,
    selected: Set[str],  # tensors with values to check
    options: CheckSettings,
    *,
    entries: Sequence[FileEntry],  # of archives
    zero: set[str],  # tensors already reported as zero
) -> None:
    """Add findings and statistics to the report as they come; an unreadable file is a finding, and ends the check."""
    names = [name for name in model.tensors if name in selected and name not in model.codes]
    pairs = {head: tied for head, tied in model.tied.items() if {head, tied} <= selected - zero}
    tables = _read(catalog, names, pairs, entries, options)  # raises errors of the executor
    with report.readable():
        for k, entry in enumerate(entries):
            for fault in _rows(tables, _CRC, [str(k)]).values():
                report.add([files.crc_finding(entry, fault)])
        bad = set()
        for name in names:
            if model.tensors[name].quantized:
                findings = [Finding(*row) for row in _rows(tables, _SCALES, [name])[name]]
                report.add(findings)
                if _has_error(findings):
                    bad.add(name)
        report.stats = StatsTable(_rows(tables, _STATS, _readable(names, model.tensors, bad)))
        report.add(holes.check_zeros(catalog, report.stats, model.role, zero))
        codes: frozenset[str] = frozenset() if model.quantized is None else model.quantized.names
        large = [name for name, row in report.stats.items() if row.absmax > values.OUTLIER_ABOVE and name not in codes]
        report.add(
            values.check_values(
                report.stats,
                model.tensors,
                options.limits,
                bad,
                role=model.role,
                codes=codes,
                zero=zero,
                outliers=_rows(tables, _OUTLIERS, large),
            )
        )
        for pair in pairs.items():
            if bad.isdisjoint(pair):
                report.add(Finding(*row) for row in _rows(tables, _TIED, pair[:1]).values() if row is not None)


def _rows(tables: Tables, table: str, subjects: Sequence[str]) -> dict[str, Any]:
    """Return the rows of subjects in a table; raise the error of the first unread subject."""
    rows, unread = tables.get(table, {}), tables.get(f"unread {table}", {})
    for subject in subjects if unread else ():
        if subject in unread and subject not in rows:
            raise FormatError(unread[subject])
    return {subject: rows[subject] for subject in subjects if subject in rows}


# ---- reading ----


def _read(
    catalog: Catalog,
    names: Sequence[str],
    pairs: Mapping[str, str],
    entries: Sequence[FileEntry],
    options: CheckSettings,
) -> Tables:
    """Read all rows; errors of files become rows, too."""
    if options.executor is not None:
        pieces = [
            *_entry_pieces(entries),
            *_value_pieces(catalog, names, options),
            *(piece for pair in pairs.items() for piece in _pieces(_TIED, catalog, pair, whole=True)),
        ]
        tables = run_pieces(run, pieces, options.executor, threads=options.threads, progress=options.progress)
        with paused(len(names)):
            return {**tables, _STATS: of_plain(tables.get(_STATS, {}))}
    tables = {}
    numbered = {str(k): entry for k, entry in enumerate(entries)}
    with _unread(tables, (_CRC,), numbered):
        tables[_CRC] = _faults(numbered, options.threads)
    with _unread(tables, _VALUES, names):
        _read_values(
            tables,
            catalog,
            names,
            options.limits,
            histogram=options.histogram,
            threads=options.threads,
            progress=options.progress,
        )
    with _unread(tables, (_TIED,), pairs):
        for pair in pairs.items():
            tables.setdefault(_TIED, {})[pair[0]] = values.check_tied(catalog, *pair)
    return tables


@contextmanager
def _unread(tables: Tables, of: Iterable[str], subjects: Iterable[str]) -> Iterator[None]:
    """If a file is unreadable, note its error for the subjects of each table; see `_rows`."""
    try:
        yield
    except UNREADABLE as problem:
        text = one_line(problem)
        for table in of:
            if table not in tables or table in (_SCALES, _TIED):  # tables that grow by row
                tables[f"unread {table}"] = dict.fromkeys(subjects, text)


def _faults(entries: Mapping[str, FileEntry], threads: int | None) -> dict[str, Any]:
    """Return the faults of entries by number."""
    faults = zip(entries, files.faults_of([*entries.values()], threads), strict=True)
    return {number: fault for number, fault in faults if fault is not None}


def _read_values(
    tables: Tables,
    catalog: Catalog,
    names: Sequence[str],
    limits: Limits,
    *,
    histogram: bool,
    threads: int | None,
    progress: Progress = None,
) -> None:
    tensors, scales = catalog.descriptions(names), tables.setdefault(_SCALES, {})
    for name in names:
        if tensors[name].quantized:
            scales[name] = list(values.check_scales(catalog, name, limits, threads))
    readable = _readable(names, tensors, {name for name, findings in scales.items() if _has_error(findings)})
    stats = measure(catalog, readable, histogram, threads, progress)
    tables[_STATS] = stats
    large = [name for name, row in stats.items() if row.absmax > values.OUTLIER_ABOVE and values.is_real(tensors[name])]
    tables[_OUTLIERS] = values.find_outliers(catalog, large, threads)


def _has_error(findings: Iterable[Sequence[Any]]) -> bool:
    return any(severity == ERROR for severity, *_ in findings)


def _readable(names: Sequence[str], tensors: Mapping[str, TensorDescription], bad: set[str]) -> list[str]:
    """Return the tensors to compute statistics of. Packed tensors with bad scales would only repeat the error."""
    return [name for name in names if not (name in bad and tensors[name].packed)]


# ---- in pieces ----


def _pieces(check: str, catalog: Catalog, names: Sequence[str], *, whole: bool = False) -> Iterator[ReadingPiece]:
    return pieces_of(catalog.sizes(names), catalog, whole=whole, operation="validate", check=check)


def _entry_pieces(entries: Sequence[FileEntry]) -> Iterator[ReadingPiece]:
    sizes = [entry.info.packed for entry in entries]
    for group in groups(sizes, [entry.file for entry in entries], range(len(entries))):
        archives: dict[str, list[Any]] = {}
        for k in group:
            file = entries[k].file
            where = file.files.public(file.files.absolute(file.place)), file.files.public_options()
            archive = archives.setdefault(file.place, [*where, *file.identity[:2], {}])
            archive[-1][str(k)] = entries[k].name
        content = {"operation": "validate", "check": _CRC, "version": __version__, "archives": [*archives.values()]}
        yield ReadingPiece(content, sum(sizes[k] for k in group))


def _value_pieces(catalog: Catalog, names: Sequence[str], options: CheckSettings) -> Iterator[ReadingPiece]:
    tensors = catalog.descriptions(names)
    for piece in _pieces("values", catalog, names):
        int8 = [name for name in piece.content["names"] if tensors[name].scheme == INT8]
        limits = {key: _plain_limit(getattr(options.limits, key), int8) for key in ("scale", "absmax")}
        piece.content.update(limits, histogram=options.histogram)
        yield piece


def _plain_limit(limit: Any, names: Sequence[str]) -> Any:
    """Return a limit as a number, as numbers by name, or None if it applies to no tensor."""
    if limit is None or not names:
        return None
    if not isinstance(limit, Mapping):
        return float(limit)
    return {name: float(limit[name]) for name in names if limit.get(name) is not None}


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read the rows of a piece; see `run_piece`."""
    check_version(piece, INVALID_PIECE)
    check, tables = piece.get("check"), Tables()
    if check == _CRC:
        _read_archives(tables, piece, threads, storage_options)
    elif check == "values":
        limits, histogram = Limits(scale=piece.get("scale"), absmax=piece.get("absmax")), piece.get("histogram") is True
        with _unread(tables, _VALUES, names_of(piece)), opened(piece, storage_options) as (names, (catalog,)):
            _read_values(tables, catalog, names, limits, histogram=histogram, threads=threads)
            tables[_STATS] = as_plain(tables[_STATS])
    elif check == _TIED:
        with _unread(tables, (_TIED,), names_of(piece)), opened(piece, storage_options) as (names, (catalog,)):
            tables[_TIED] = {names[0]: values.check_tied(catalog, *names)}
    else:
        raise FormatError(f"{INVALID_PIECE}: unknown check {show(check)}, expected crc, values or tied")
    return tables


def _read_archives(
    tables: Tables, piece: Mapping[str, Any], threads: int | None, storage_options: Mapping[str, Any] | None
) -> None:
    try:
        archives = [
            (Location(files_at(path, planned, storage_options), path), (size, version), dict(names))
            for path, planned, size, version, names in [*piece["archives"]] or [None]
        ]
    except MALFORMED as error:
        raise FormatError(f"{INVALID_PIECE}: malformed archives: {error!r}") from None
    with _unread(tables, (_CRC,), [number for *_, names in archives for number in names]):
        faults: dict[str, Any] = {}
        for location, identity, names in archives:
            location.files.check_unchanged(location.path, identity)
            with files.reopened(location, identity, [*names.values()]) as entries:
                faults |= _faults(dict(zip(names, entries, strict=True)), threads)
        tables[_CRC] = faults
