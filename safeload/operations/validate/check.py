"""Check a checkpoint: its files, its names and shapes, its values.

Values are read into tables of rows, in this process or in pieces on an executor, and judged in a fixed order, so that
reports do not depend on which process reads, or on which file fails first.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import numpy as np

from ..._version import __version__
from ...base import log
from ...base.arrays import Array, refuse_masked
from ...base.names import Patterns, Selection
from ...base.paths import PathLike, os_error
from ...base.runtime import paused
from ...base.table import Unknown
from ...base.text import plural, show
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.run.memory import check_threads
from ...engine.run.progress import Progress
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, RemotePermissionError, SafeloadError, UnsupportedError, one_line, public
from ...formats.numbered import other_form
from ...formats.registry import BY_NAME, GGUF
from ...loading import entry as loading
from ...models.choosing import Choice, choose, choose_inner, choose_prefix
from ...models.family import load as load_schema
from ...models.module_names import WRAPPERS, stored_names, wrapped_inside
from ...models.schema import Schema
from ...packed.quantization import quantization_of
from ...stores.files import Location
from ...stores.json_file import read_if_there, read_json
from ...stores.places import Located, places_of
from ..measure.stats import StatsTable, as_plain, measure, of_plain
from ..sources.catalog import Catalog, Given, TensorDescription
from ..sources.executors import (
    EXECUTOR,
    INVALID_PIECE,
    MALFORMED,
    Executor,
    Tables,
    check_executor,
    check_paths,
    check_version,
    files_at,
    groups,
    in_memory,
    names_of,
    opened,
    pieces_of,
    run_pieces,
)
from . import files, structure, values, zeros
from .files import FileEntry
from .findings import ERROR, UNREADABLE, CheckReport, Finding, find
from .structure import Descriptions
from .values import Limits

# Codes of findings that hold without the other shards.
_SHARD_CODES = (
    *("value.", "file.", "tensor."),
    *("schema.shape", "schema.unexpected", "schema.layer_extra", "schema.config"),
)

# The name of a single array in reports.
ARRAY = "array"

# File names in the original releases of Llama and Mistral: weights and config.
_CONSOLIDATED, _PARAMS = "consolidated", "params.json"

# Tables of rows by name: findings about scales, statistics, bounds of outliers, findings about tied heads. Faults of
# entries of archives have the number of the entry, as text.
_CRC, _SCALES, _STATS, _OUTLIERS, _TIED = "crc", "scales", "stats", "outliers", "tied"
_VALUES = (_SCALES, _STATS, _OUTLIERS)

Source = Given | Array | QuantizedTensor


@public
def check(
    source: Source,
    *,
    config: PathLike | Mapping[str, Any] | None = None,
    schema: str | None = "auto",
    shape: tuple[int | None, ...] | None = None,
    limits: Limits | Mapping[str, Any] | tuple[float, float] | None = None,
    values: bool = True,
    only: Patterns = None,
    drop: Patterns = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> CheckReport:
    """Check weights and report faults. Findings are never raised. Also available as ``validate``.

    Errors are: a file that violates its format, or has lost blocks; a missing shard; a zip entry with a wrong CRC-32;
    no tensors; NaN, infinity and values far beyond the rest; missing and unexpected tensors, and wrong shapes,
    according to the config; gaps in the layers; scales of quantized tensors that are not finite or not as expected; a
    GGUF file that llama.cpp refuses. Warnings are: values outside ``limits``, constant matrices, tensors without
    elements or axes, layers with different dtypes, an index with a wrong total_size, a tied head with different values.
    Notes name skipped checks: for codes that cannot be dequantized, and for heads and models without a schema.

    Args:
        source: path or URL of a file, a folder or an index.json; an open `Checkpoint`; a dict of arrays; or a single
            array.
        config: parsed config.json or its path. None uses the config.json of a folder, or the params.json beside
            consolidated.00.pth or consolidated.safetensors.
        schema: the expected names and shapes: "auto" to choose a schema by architectures and model_type in the config;
            the name of a built-in schema; or None.
        shape: expected shape of a single array, with None for any size.
        limits: (low, high) for values; or a dict with any of low, high, norm (largest absolute value of norm weights),
            parameters (number of elements in all tensors), scale and absmax (of int8 tensors: a number, or numbers by
            name).
        values: False to check only files, names, dtypes, shapes and sizes, without reading tensors. This takes as long
            as opening the checkpoint, and leaves ``.stats`` of the report empty.
        only: shell pattern, or several, of the tensors with values to check. Findings about values and shapes of other
            tensors are left out of the report. Missing tensors are always reported.
        drop: shell pattern, or several, of tensors to leave out in the same way.
        storage_options: options of the filesystem behind a URL, see `open`.
        executor: reads values in other processes or on other machines with access to the same files: any object with
            the ``submit`` of `concurrent.futures.Executor`, such as Dask's ``Client``. The
            findings are identical to those of a single process. Headers are read in this process.
        threads: number of threads. None chooses automatically; pieces of an executor get a single thread.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        The report, which is false if there are errors.

    Raises:
        ValueError, TypeError: invalid arguments, such as ``executor`` with tensors in memory.
        TensorNotFoundError: a pattern matches no tensor.
        FormatError: the file of the config is invalid.
        OSError: the file cannot be opened: FileNotFoundError, PermissionError, ...

    Example:
        >>> import numpy as np, safeload
        >>> report = safeload.check({"w": np.float32([[1, np.nan]])})
        >>> report.ok, report.errors[0].code
        (False, 'value.nan')
    """
    options = settings(
        config,
        schema,
        limits,
        only=only,
        drop=drop,
        values=values,
        executor=executor,
        threads=threads,
        progress=progress,
    )
    if isinstance(source, (np.ndarray, QuantizedTensor)):
        if executor is not None:
            raise in_memory("an array is", EXECUTOR)
        report = CheckReport(ARRAY)
        refuse_masked(source, "the array")
        catalog = Catalog.of({ARRAY: source})
        if shape is not None:
            if isinstance(shape, str) or not all(size is None or isinstance(size, int) for size in shape):
                raise TypeError(f"shape must be a tuple of integers and None, got {show(shape)}")
            actual = catalog.about(ARRAY).shape
            if not structure.fits(actual, tuple(shape)):
                sizes = ", ".join("?" if size is None else str(size) for size in shape)
                report.add([find("array.shape", ARRAY, shape=list(actual), sizes=sizes)])
        return _validate_tensors(report, catalog, options._replace(schema=None))
    if shape is not None:
        raise ValueError("shape= requires a single array")
    if isinstance(source, (Mapping, Catalog)):
        with Catalog.of(source) as catalog:
            if executor is not None:
                check_paths(catalog, EXECUTOR)
            return _validate_tensors(CheckReport(catalog.title), catalog, options)
    return validate_path(source, {"storage_options": storage_options}, options)


class CheckSettings(NamedTuple):
    """The checked arguments of `check`."""

    config: Mapping[str, Any] | None  # parsed; None uses the config of the folder
    schema: Schema | Literal["auto"] | None  # "auto" to choose a schema by the config
    limits: Limits
    selection: Selection  # the tensors to report about
    values: bool = True  # True to read tensors
    executor: Executor | None = None
    threads: int | None = None
    progress: Progress = None
    histogram: bool = False  # True to include histograms in statistics


def settings(
    config: PathLike | Mapping[str, Any] | None = None,
    schema: str | None = "auto",
    limits: Any = None,
    *,
    only: Patterns = None,
    drop: Patterns = None,
    **options: Any,
) -> CheckSettings:
    """Check and convert the arguments of `check`."""
    bounds = Limits.of(limits)
    expected: Any = schema if schema in (None, "auto") else load_schema(schema)
    check_threads(options.get("threads"))
    check_executor(options.get("executor"))
    if config is not None and not isinstance(config, Mapping):
        config = read_json(config, "config.json")
    return CheckSettings(config, expected, bounds, Selection(only, drop), **options)


def _params_beside(weights: Sequence[WeightFile]) -> Mapping[str, Any] | None:
    """Return the params.json beside a single file in the original format of Llama or Mistral, or None."""
    if len(weights) != 1:
        return None
    files = weights[0].files
    folder, name = files.split(weights[0].place)
    if not name.startswith(_CONSOLIDATED):
        return None
    params = read_if_there(files.join(folder, _PARAMS), _PARAMS, files)
    if params is None:
        return None
    try:
        listed = files.listing(folder)
    except (UnsupportedError, RemotePermissionError):  # https lists no folders
        listed = []
    slices = [name for name, _ in listed if fnmatchcase(name, f"{_CONSOLIDATED}*.pth")]
    return params if len(slices) < 2 else None  # slices of a model-parallel checkpoint have other shapes


def validate_path(path: PathLike | Located, opening: Mapping[str, Any], options: CheckSettings) -> CheckReport:
    """Validate the checkpoint at a path or URL."""
    (place,), where = places_of([path], opening.get("storage_options"))
    text = where.shown(place)
    report = CheckReport(text)
    if not where.remote and not os.path.lexists(place):
        raise os_error(errno.ENOENT, text)
    try:
        opened = loading.open(path, **opening)
    except (SafeloadError, OSError) as problem:
        plain = not isinstance(problem, SafeloadError)
        if plain and getattr(problem, "filename", None) in (None, text):
            raise
        shards = files.check_shards(place, where, opening)
        if shards is None:
            report.add([files.refusal(problem)])
            return report
        findings, good, config = shards
        report.add(findings)
        return _validate_rest(report, good, config, opening, options)
    with opened, Catalog.of(opened) as catalog:
        report.add(_check_other_form(catalog, options))
        return _validate_tensors(report, catalog, options)


def _check_other_form(catalog: Catalog, options: CheckSettings) -> Iterator[Finding]:
    """Find a second whole checkpoint in a folder, which other libraries read, such as a file beside an index."""
    folder = catalog.folder
    if folder is None or folder.files.remote:
        return
    names = [name for name, is_folder in folder.files.listing(folder.path) if not is_folder]
    forms = [paths[0] for paths in other_form(names)]
    opened = {os.path.basename(path) for path in (*catalog.files, "" if catalog.index is None else catalog.index.path)}
    unread = [name for name in forms if name not in opened]
    if len(unread) != 1 or len(forms) != 2:
        return
    try:
        with Catalog.of(folder / unread[0]) as other:
            a, b = (
                {name: about[1:3] for name, about in each.descriptions([*each]).items()} for each in (catalog, other)
            )
            same = a == b
            if same and options.values and not options.selection:
                from ..measure.diff import diff  # only here: few folders hold two checkpoints

                same = diff(catalog, other, threads=options.threads).same
    except (SafeloadError, OSError):  # it is not whole
        return
    if not same:
        used = next(name for name in forms if name in opened)
        yield find("folder.ambiguous", unread=unread[0], used=used)


def _validate_rest(
    report: CheckReport,
    good: Sequence[Location],
    config: Mapping[str, Any] | None,
    opening: Mapping[str, Any],
    options: CheckSettings,
) -> CheckReport:
    """Check the tensors in the good shards of a damaged folder, as far as they suffice."""
    if not good:
        return report
    read = options.values and quantization_of(config) is None  # codes can have their scales in other shards
    own = options._replace(config=config if options.config is None else options.config, values=read)
    rest = CheckReport(report.source)
    try:
        with loading.open(good, **opening) as opened, Catalog.of(opened) as catalog:
            _validate_tensors(rest, catalog, own)
    except (SafeloadError, OSError):  # these shards need the others
        return report
    findings = [finding for finding in (*rest.errors, *rest.warnings) if finding.code.startswith(_SHARD_CODES)]
    rest.errors, rest.warnings, rest.notes, rest.values = report.errors, report.warnings, report.notes, report.values
    rest.add(findings)
    return rest


def _validate_tensors(report: CheckReport, catalog: Catalog, options: CheckSettings) -> CheckReport:
    started = time.perf_counter()
    selected = frozenset(options.selection.of(list(catalog)))
    try:
        _check_tensors(report, catalog, selected, options)
    finally:
        report.seconds = time.perf_counter() - started
    if options.selection:
        report.leave_out(frozenset(catalog) - selected)
    return report


def _check_tensors(report: CheckReport, catalog: Catalog, selected: Set[str], options: CheckSettings) -> None:
    """Add findings and statistics to the report as they come."""
    tensors = catalog.descriptions([*catalog])
    report.tensors = len(tensors)
    report.parameters = sum(math.prod(about.shape) for about in tensors.values())
    report.format, report.files, report.nbytes = catalog.format, list(catalog.files), catalog.nbytes
    report.values = options.values
    config = options.config
    if config is None:
        try:
            config = _params_beside(catalog.weight_files) or catalog.config
        except (FormatError, OSError) as problem:
            report.add([find("schema.config:unreadable", problem=one_line(problem))])
    report.add(files.check_index(catalog))
    named: Descriptions = tensors
    if catalog.format == GGUF and options.schema == "auto" and config is None:
        findings, choice, config = structure.check_gguf(catalog.metadata, tensors)
        report.add(findings)
    else:
        named = _without_wrappers(report, tensors, catalog.title) if options.schema == "auto" else tensors
        choice = _choose_schema(config, catalog.format, named, options)
        log.debug("validate %s: schema %s", report.source, None if choice is None else choice.schema.name)
    schema = None if choice is None else choice.schema
    report.add(structure.check_sizes(tensors, schema))
    quantization = quantization_of(config)
    codes = catalog.find_codes(quantization)  # their values are not checked
    quantized = structure.quantized_parts(quantization, schema, tensors, codes)
    if quantized.names:
        unchecked = "names, shapes and values" if options.values else "names and shapes"
        count = plural(len(quantized.names), "tensor")
        report.add([find("quantization.unchecked", label=quantized.label, checks=unchecked, tensors=count)])
    tied: Mapping[str, str] = {}
    if choice is None:
        report.add(structure.check_layers(tensors, quantized.modules))
    elif tensors:
        report.schema = choice.schema.name
        parts = quantized if named is tensors else quantized.unwrapped()
        inner = config if choice.inner is None else choice.inner.config
        findings, report.compared, tied = structure.check_schema(choice, inner, named, quantized=parts)
        report.add(findings)
    expected = options.limits.parameters
    if expected is not None and report.parameters != expected:
        report.add([find("model.parameters", parameters=report.parameters, expected=expected)])
    report.add(structure.check_dtypes(tensors, config, quantized.names))
    unknown = catalog.unknown()
    report.add(_check_unknown(catalog.about(name), entry) for name, entry in unknown.items())

    def role(name: str) -> str | None:  # None if it is not in the schema
        return None if schema is None else schema.role(name)

    zero: set[str] = set()  # tensors already reported as zero
    entries: list[FileEntry] | None = None
    with report.readable():
        report.add(zeros.check_tails(catalog, role, zero, values=options.values))
        report.add(zeros.check_runs(catalog, role, zero))
        if options.values:
            entries = files.entries_of(catalog)
    if entries is None:
        return
    selected = selected - unknown.keys()
    read = {name: about for name, about in tensors.items() if name in selected and name not in codes}
    # Tied heads stored along with their embeddings.
    pairs = {head: embedding for head, embedding in tied.items() if {head, embedding} <= selected - zero}
    tables = _read(catalog, read, pairs, entries, options)  # raises errors of the executor
    with report.readable():
        for k, entry in enumerate(entries):
            for fault in _rows(tables, _CRC, [str(k)]).values():
                report.add([entry.finding(fault)])
        bad = set()
        for name, about in read.items():
            if about.quantized:
                of_scales = [Finding(*row) for row in _rows(tables, _SCALES, [name])[name]]
                report.add(of_scales)
                if _has_error(of_scales):
                    bad.add(name)
        stats = report.stats = StatsTable(_rows(tables, _STATS, [*read]))
        report.add(zeros.check_runs(catalog, role, zero, stats))
        about_values = values.check_values(
            stats,
            tensors,
            options.limits,
            skip=bad,
            role=role,
            codes=quantized.names,
            zero=zero,
            outliers=_rows(tables, _OUTLIERS, [*stats]),
        )
        report.add(about_values)
        for pair in pairs.items():
            if bad.isdisjoint(pair):
                report.add(Finding(*row) for row in _rows(tables, _TIED, pair[:1]).values() if row is not None)


def _without_wrappers(report: CheckReport, tensors: Descriptions, title: str) -> Descriptions:
    """Leave out wrappers inside names, which no schema has; a prefix is found by `choose_prefix`."""
    wrapped = next(filter(wrapped_inside, tensors), None)
    if wrapped is None:
        return tensors
    try:
        stored = stored_names(tensors, title)
    except FormatError as problem:
        report.add([find("schema.names:wrapped", problem.tensor, problem=problem.args[0])])
        return tensors
    report.add([find("schema.prefix:wrapped", wrapped, wrappers=", ".join(WRAPPERS))])
    return {bare: tensors[name] for bare, name in stored.items()}


def _choose_schema(
    config: Mapping[str, Any] | None, format: str | None, named: Descriptions, options: CheckSettings
) -> Choice | None:
    row = BY_NAME.get(format or "")
    if isinstance(options.schema, Schema):
        return Choice(options.schema, True)
    if options.schema is None or (row is not None and row.own_names):
        return None
    choice = choose(config, format, named.keys())
    if choice is None:
        return choose_inner(config, named.keys())
    return choose_prefix(choice, config, named.keys()) or choice


def _check_unknown(about: TensorDescription, unknown: Unknown) -> Finding:
    """Return the finding about an entry that cannot be read."""
    in_gguf = about.dtype.startswith("ggml type")  # its bytes end at the next tensor, or at the end
    if in_gguf and about.nbytes == 0 and 0 not in about.shape:
        return find("file.unknown_type:empty", about.name, dtype=about.dtype, shape=list(about.shape))
    if unknown.is_missing:
        return find("file.unknown_type:missing", about.name, dtype=about.dtype, reason=unknown.reason)
    reason = "is unknown to this version" if in_gguf else unknown.reason
    return find("file.unknown_type", about.name, dtype=about.dtype, reason=reason)


# ---- reading ----


def _rows(tables: Tables, table: str, subjects: Sequence[str]) -> dict[str, Any]:
    """Return the rows of subjects in a table; raise the error of the first unread subject."""
    rows, unread = tables.get(table, {}), tables.get(f"unread {table}", {})
    for subject in subjects if unread else ():
        if subject in unread and subject not in rows:
            raise FormatError(unread[subject])
    return {subject: rows[subject] for subject in subjects if subject in rows}


def _read(
    catalog: Catalog,
    tensors: Descriptions,
    pairs: Mapping[str, str],
    entries: Sequence[FileEntry],
    options: CheckSettings,
) -> Tables:
    """Read all rows; errors of files become rows, too."""
    if options.executor is not None:
        pieces = [*_entry_pieces(entries)]
        for piece in _pieces(catalog, [*tensors], "values", histogram=options.histogram):
            for key in ("scale", "absmax"):
                limit = getattr(options.limits, key)
                if isinstance(limit, Mapping):
                    piece[key] = {name: float(limit[name]) for name in piece["names"] if limit.get(name) is not None}
                else:
                    piece[key] = None if limit is None else float(limit)
            pieces.append(piece)
        pieces += (piece for pair in pairs.items() for piece in _pieces(catalog, pair, _TIED, whole=True))
        tables = run_pieces(run, pieces, options.executor, threads=options.threads, progress=options.progress)
        with paused(len(tensors)):
            return {**tables, _STATS: of_plain(tables.get(_STATS, {}))}
    tables = {_CRC: _faults({str(k): entry for k, entry in enumerate(entries)}, options.threads)}
    with _unread(tables, _VALUES, tensors):
        _read_values(tables, catalog, tensors, options)
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


def _read_values(tables: Tables, catalog: Catalog, tensors: Descriptions, options: CheckSettings) -> None:
    limits, threads = options.limits, options.threads
    scales = tables.setdefault(_SCALES, {})
    for name, about in tensors.items():
        if about.quantized:
            scales[name] = list(values.check_scales(catalog, name, limits, threads))
    # Statistics of packed tensors with bad scales would only repeat the error.
    bad = {name for name, findings in scales.items() if _has_error(findings) and tensors[name].packed}
    readable = [name for name in tensors if name not in bad]
    stats = measure(catalog, readable, histogram=options.histogram, threads=threads, progress=options.progress)
    tables[_STATS] = stats
    large = [name for name, row in stats.items() if row.absmax > values.OUTLIER_ABOVE and values.is_real(tensors[name])]
    tables[_OUTLIERS] = values.find_outliers(catalog, large, threads)


def _has_error(findings: Iterable[Sequence[Any]]) -> bool:
    return any(severity == ERROR for severity, *_ in findings)


# ---- in pieces ----


def _entry_pieces(entries: Sequence[FileEntry]) -> Iterator[dict[str, Any]]:
    sizes = [entry.info.packed for entry in entries]
    for group in groups(sizes, [entry.file for entry in entries], range(len(entries))):
        archives: dict[str, list[Any]] = {}
        for k in group:
            file = entries[k].file
            where = file.files.public(file.files.absolute(file.place)), file.files.public_options()
            archive = archives.setdefault(file.place, [*where, *file.identity[:2], {}])
            archive[-1][str(k)] = entries[k].info.name
        piece = {"operation": "validate", "check": _CRC, "version": __version__, "archives": [*archives.values()]}
        yield {**piece, "nbytes": sum(sizes[k] for k in group)}


def _pieces(catalog: Catalog, names: Sequence[str], check: str, **call: Any) -> Iterator[dict[str, Any]]:
    return pieces_of(catalog.sizes(names), catalog, operation="validate", check=check, **call)


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read the rows of a piece; see `run_piece`."""
    check_version(piece, INVALID_PIECE)
    check, tables = piece.get("check"), Tables()
    if check == _CRC:
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
    elif check == "values":
        limits = Limits(scale=piece.get("scale"), absmax=piece.get("absmax"))
        options = settings(limits=limits, histogram=piece.get("histogram") is True, threads=threads)
        with _unread(tables, _VALUES, names_of(piece)), opened(piece, storage_options) as (named, (catalog,)):
            _read_values(tables, catalog, catalog.descriptions(named), options)
            tables[_STATS] = as_plain(tables[_STATS])
    elif check == _TIED:
        with _unread(tables, (_TIED,), names_of(piece)), opened(piece, storage_options) as (named, (catalog,)):
            tables[_TIED] = {named[0]: values.check_tied(catalog, *named)}
    else:
        raise FormatError(f"{INVALID_PIECE}: unknown check {show(check)}, expected crc, values or tied")
    return tables
