"""Check a checkpoint: its files, its names and shapes, its values.

Values are read into tables of rows, in this process or in pieces on an executor, and judged in a fixed order, so that
reports do not depend on which process reads, or on which file fails first.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .._version import __version__
from ..conversion import executors
from ..conversion.catalog import Catalog, Given, TensorDescription, is_path
from ..conversion.executors import Executor, Tables, opened
from ..conversion.rules import is_of_mlx
from ..core import checkpoint as loading
from ..core import dtypes, packing
from ..core.arrays import Array, index_of, refuse_masked
from ..core.files import Located, caching, read_if_there, read_json
from ..core.memory import Cache, check_threads
from ..core.names import Patterns, Selection
from ..core.opening import Paths
from ..core.progress import Progress
from ..core.quantized_tensor import PartRows, QuantizedTensor
from ..core.registry import BY_NAME, GGUF
from ..core.runtime import paused
from ..core.showing import figure
from ..core.source import Source, source_pieces
from ..core.table import Unknown
from ..core.tensors import packed_of
from ..core.text import PathLike, debug, os_error, plural, show
from ..core.weight_file import WeightFile
from ..errors import FormatError, RemotePermissionError, SafeloadError, UnsupportedError, exported, one_line, public
from ..formats.numbered import other_form
from ..models.choosing import Choice, choose_for_mlx, choose_part
from ..models.family import changed_by_mlx
from ..models.family import load as load_schema
from ..models.module_names import WRAPPERS, stored_names, surely_wrapped, wrapped_inside
from ..models.schema import Schema, wrong_axes
from ..quant.gptq import wrapped_zeros, zeros_disagree
from ..quant.quantization import quantization_of
from ..remote.places import places_of
from . import files, structure
from .diff import diff
from .findings import ERROR, UNREADABLE, WARNING, CheckReport, Finding, find
from .info import misfits_of
from .proof import findings_of
from .stats import HISTOGRAM_EDGES, StatsTable, TensorStats, as_plain, measure, of_plain
from .structure import Descriptions

# Codes of findings that hold without the other shards.
_SHARD_CODES = (
    *("value.", "file.", "tensor."),
    *("schema.shape", "schema.unexpected", "schema.layer_extra", "schema.config"),
)

# A value is an outlier if it is above this, the largest float16, and far above the 99.9th percentile of the tensor's
# magnitudes without zeros. Smaller tensors are not judged.
OUTLIER_ABOVE = 65504.0
_OUTLIER_FACTOR, _OUTLIER_PERMILLE, _OUTLIER_COUNT = 1e4, 999, 1000
_LOW, _HIGH, _NORM = -128.0, 128.0, 4096.0  # the default range of weights, and absolute value of norm weights
_CHUNK = 1 << 20  # numbers to compare at a time
_SCALE_TOLERANCE = 2.0**-22  # relative difference between a float32 scale and the expected one: two roundings

# Last name parts of norm weights, and words that mark a norm like the suffix "norm". Source: transformers, torch and
# llama.cpp.
_NORM_WEIGHTS, _NORM_WORDS = ("weight", "gamma", "scale", "g"), {"ln", "rms"}

# Roles of the parts of packed tensors to check.
_SCALE_ROLES = (packing.SCALE, packing.NESTED, packing.GLOBAL, packing.BIAS)
# Families with negative scales: MLX, and the formats that auto-round writes. For symmetric codes, the lowest code has
# the largest magnitude and stands for the value with the largest magnitude (auto_round/data_type/int.py).
_SIGNED = ("mlx", "gptq", "awq", "int", "int8")

ARRAY = "array"  # the name of a single array in reports
_CONSOLIDATED, _PARAMS = "consolidated", "params.json"  # weights and config in releases of Llama and Mistral

# Tables of rows by name: findings about scales, statistics, bounds of outliers, findings about tied heads. Faults of
# entries of archives have the number of the entry, as text.
_CRC, _SCALES, _STATS, _OUTLIERS, _TIED = "crc", "scales", "stats", "outliers", "tied"
_VALUES = (_SCALES, _STATS, _OUTLIERS)

CheckSource: TypeAlias = Given | Array | QuantizedTensor
_Entries: TypeAlias = Sequence[files.FileEntry]


@exported()
class Limits(NamedTuple):
    """Limits for values.

    Attributes:
        low: smaller values are a warning.
        high: larger values are a warning.
        parameters: expected number of elements in all tensors; None accepts any.
        scale: expected scale of int8 tensors: a number, or numbers by name; None accepts any.
        absmax: largest absolute value before quantization to int8, so that scale is absmax / 127: a number, or numbers
            by name; None accepts any.
        norm: largest absolute value of norm weights. None means ``low`` and ``high`` if you set these, else 4096,
            because norm weights reach hundreds in good models (Gemma).

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> report = safeload.check(np.float32([0.5, 3]), limits=safeload.Limits(low=-1, high=1))
        >>> [warning.code for warning in report.warnings]
        ['value.range']
    """

    low: float = _LOW
    high: float = _HIGH
    parameters: int | None = None
    scale: float | Mapping[str, float] | None = None
    absmax: float | Mapping[str, float] | None = None
    norm: float | None = None

    @classmethod
    def of(cls, value: Any) -> Limits:
        """Return limits from None, (low, high), a dict of fields, or limits."""
        if value is None or isinstance(value, Limits):
            return value or cls()
        if isinstance(value, Mapping):
            unknown = sorted(set(value) - set(cls._fields))
            if unknown:
                raise ValueError(f"limits: unknown key {show(unknown[0])}, expected {', '.join(cls._fields)}")
            limits = cls(**value)
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
            limits = cls(*value)
        else:
            raise TypeError(f"limits must be (low, high) or a dict of {', '.join(cls._fields)}, got {show(value)}")
        if not limits.low <= limits.high:
            raise ValueError(f"limits: low must be <= high, got {limits.low} and {limits.high}")
        if limits.norm is not None and not limits.norm >= 0:
            raise ValueError(f"limits: norm must be >= 0, got {limits.norm}")
        return limits


@public
def check(
    source: CheckSource,
    *,
    config: PathLike | Mapping[str, Any] | None = None,
    schema: str | None = "auto",
    shape: tuple[int | None, ...] | None = None,
    limits: Limits | Mapping[str, Any] | tuple[float, float] | None = None,
    values: bool = True,
    original: Given | None = None,
    adapters: Any = None,
    base: Paths | None = None,
    only: Patterns = None,
    drop: Patterns = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
    cache: Cache = "keep",
) -> CheckReport:
    """Check weights and report faults. Findings are never raised.

    Errors are: a file that violates its format, or has lost blocks; a missing shard; a zip entry with a wrong CRC-32;
    no tensors; NaN, infinity and values far beyond the rest; missing and unexpected tensors, and wrong shapes,
    according to the config; gaps in the layers; scales of quantized tensors that are not finite or not as expected; a
    GGUF file that llama.cpp refuses. Warnings are: values outside ``limits``, constant matrices, empty tensors, weights
    without axes, layers with different dtypes, an index with a wrong total_size, a tied head with different values.
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
        original: the source of a conversion of which this is the result. Tensors that the result lost or changed are
            errors, with the cause, unless the rounding of its format explains them; see `diff` for forms.
        adapters: LoRA adapters that the conversion merged into the original, as in `convert`.
        base: the model of a LoRA adapter, if this is one. Modules that the model lacks, and matrices of another shape
            than its own, are errors.
        only: shell pattern, or several, of the tensors with values to check. Findings about values and shapes of other
            tensors are left out of the report. Missing tensors are always reported.
        drop: shell pattern, or several, of tensors to leave out in the same way.
        storage_options: options of the filesystem behind a URL, see `open`.
        executor: reads values in other processes or on other machines with access to the same files: any object with
            the ``submit`` of `concurrent.futures.Executor`, such as Dask's ``Client``. A single
            process gives identical findings. Headers are read in this process.
        threads: number of threads. None chooses automatically; pieces of an executor get a single thread.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).
        cache: "drop" leaves few pages of the files in the system's page cache, see `load`.

    Returns:
        The report, which is false if there are errors.

    Raises:
        ValueError, TypeError: invalid arguments, such as ``executor`` with tensors in memory, or ``base`` without an
            adapter.
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
        config, schema, limits, only, drop, values=values, executor=executor, threads=threads, progress=progress
    )
    if original is None and adapters is not None:
        raise ValueError("adapters= belongs to original=: pass the source that they were merged into")
    if isinstance(source, (np.ndarray, QuantizedTensor)):
        if original is not None or base is not None:
            raise ValueError(f"{'base=' if original is None else 'original='} requires a checkpoint or a dict")
        return _check_array(source, shape, options)
    if shape is not None:
        raise ValueError("shape= requires a single array")
    if base is not None and not (is_path(source) or hasattr(source, "weight_files")):
        raise ValueError("base= requires the path of an adapter, or an open checkpoint")
    with caching(cache):
        if isinstance(source, (Mapping, Catalog)):
            with Catalog.of(source) as catalog:
                if executor is not None:
                    executors.check_paths(catalog, executors.EXECUTOR)
                report = _validate_tensors(CheckReport(catalog.title), catalog, options)
        else:
            report = validate_path(source, {"storage_options": storage_options}, options)
        if original is not None:
            same: Any = {"only": only, "drop": drop, "storage_options": storage_options, "threads": threads}
            report.add(findings_of(source, original, adapters=adapters, progress=progress, **same))
        if base is not None:
            report.add(misfits_of(source, base, storage_options))
    return report


def _check_array(
    array: Array | QuantizedTensor, shape: tuple[int | None, ...] | None, options: CheckSettings
) -> CheckReport:
    if options.executor is not None:
        raise executors.in_memory("an array is", executors.EXECUTOR)
    report = CheckReport(ARRAY)
    refuse_masked(array, "the array")
    if shape is not None:
        if isinstance(shape, str) or not all(size is None or isinstance(size, int) for size in shape):
            raise TypeError(f"shape must be a tuple of integers and None, got {show(shape)}")
        if wrong_axes(array.shape, tuple(shape)):
            report.add([find("array.shape", ARRAY, shape=list(array.shape), sizes=structure.spelled(tuple(shape)))])
    return _validate_tensors(report, Catalog.of({ARRAY: array}), options._replace(schema=None))


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
    only: Patterns = None,
    drop: Patterns = None,
    **options: Any,
) -> CheckSettings:
    """Check and convert the arguments of `check`."""
    bounds = Limits.of(limits)
    expected: Any = schema if schema in (None, "auto") else load_schema(schema)
    check_threads(options.get("threads"))
    executors.check_executor(options.get("executor"))
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
    if params is not None:
        with suppress(UnsupportedError, RemotePermissionError):  # https lists no folders
            if sum(fnmatchcase(name, f"{_CONSOLIDATED}*.pth") for name, _ in files.listing(folder)) > 1:
                return None  # slices of a model-parallel checkpoint have other shapes
    return params


def validate_path(path: PathLike | Located, opening: Mapping[str, Any], options: CheckSettings) -> CheckReport:
    """Validate the checkpoint at a path or URL; of a damaged folder, the good shards as far as they suffice."""
    (place,), where = places_of([path], opening.get("storage_options"))
    text = where.shown(place)
    report = CheckReport(text)
    if not where.remote and not os.path.lexists(place):
        raise os_error(errno.ENOENT, text)
    try:
        opened = loading.open(path, **opening)
    except (SafeloadError, OSError) as problem:
        if not isinstance(problem, SafeloadError) and getattr(problem, "filename", None) in (None, text):
            raise
        findings, good, config = files.check_shards(place, where, opening, problem)
        report.add(findings)
    else:
        with opened, Catalog.of(opened) as catalog:
            report.add(_check_other_form(catalog, options))
            return _validate_tensors(report, catalog, options)
    if not good:
        return report
    read = options.values and quantization_of(config) is None  # codes can have their scales in other shards
    own = options._replace(config=config if options.config is None else options.config, values=read)
    rest = CheckReport(text)
    try:
        with loading.open(good, **opening) as opened, Catalog.of(opened) as catalog:
            _validate_tensors(rest, catalog, own)
    except (SafeloadError, OSError):  # these shards need the rest
        return report
    findings = [finding for finding in (*rest.errors, *rest.warnings) if finding.code.startswith(_SHARD_CODES)]
    rest.errors, rest.warnings, rest.notes, rest.values = report.errors, report.warnings, report.notes, report.values
    rest.add(findings)
    return rest


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
            abouts = (each.descriptions([*each]) for each in (catalog, other))
            a, b = ({name: about[1:3] for name, about in described.items()} for described in abouts)
            same = a == b
            if same and options.values and not options.selection:
                same = diff(catalog, other, threads=options.threads).same
    except (SafeloadError, OSError):  # it is not whole
        return
    if not same:
        yield find("folder.ambiguous", unread=unread[0], used=next(name for name in forms if name in opened))


def _validate_tensors(report: CheckReport, catalog: Catalog, options: CheckSettings) -> CheckReport:
    started = time.perf_counter()
    selected = frozenset(options.selection.of(list(catalog)))
    _check_tensors(report, catalog, selected, options)
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
        named, wrapped = _without_wrappers(tensors, catalog.title) if options.schema == "auto" else (tensors, None)
        if isinstance(options.schema, Schema):
            choice = Choice(options.schema, True)
        elif options.schema is None or (catalog.format in BY_NAME and BY_NAME[catalog.format].own_names):
            choice = None
        elif is_of_mlx(catalog) and changed_by_mlx(config):
            choice, config = choose_for_mlx(config or {})
        else:
            choice = choose_part(config, catalog.format, named.keys())
        if wrapped is not None and (choice is not None or any(map(surely_wrapped, tensors))):
            report.add([wrapped])
        debug("validate %s: schema %s", report.source, None if choice is None else choice.schema.name)
    schema = None if choice is None else choice.schema
    report.add(structure.check_sizes(tensors))
    quantization = quantization_of(config)
    codes = catalog.find_codes(quantization)  # their values are not checked
    quantized = structure.quantized_parts(quantization, schema, tensors, codes)
    if quantized.names:
        unchecked = "names, shapes and values" if options.values else "names and shapes"
        count = plural(len(quantized.names), "tensor")
        report.add([find("quantization.unchecked", label=quantized.label, checks=unchecked, tensors=count)])
    tied: Mapping[str, str] = {}
    if choice is None:
        report.add(structure.check_layers(tensors, quantized.modules, config))
    elif tensors:
        report.schema = choice.schema.name
        parts = quantized if named is tensors else quantized.unwrapped()
        inner = config if choice.inner is None else choice.inner.config
        findings, report.compared, tied = structure.check_schema(choice, inner, named, parts)
        report.add(findings)
    if options.limits.parameters not in (None, report.parameters):
        report.add([find("model.parameters", parameters=report.parameters, expected=options.limits.parameters)])
    report.add(structure.check_dtypes(tensors, config, quantized.names))
    unknown = catalog.unknown()
    report.add(_check_unknown(catalog.about(name), entry) for name, entry in unknown.items())
    role: Callable[[str], str | None] = schema.role if schema is not None else lambda name: None
    zero: set[str] = set()  # tensors already reported as zero
    entries: _Entries | None = None
    with report.readable():
        report.add(files.check_tails(catalog, role, zero, values=options.values))
        report.add(files.check_runs(catalog, role, zero))
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
        faults = _rows(tables, _CRC, map(str, range(len(entries))))
        report.add(entries[int(number)].finding(fault) for number, fault in faults)
        bad = set()
        for name, findings in _rows(tables, _SCALES, (name for name, about in read.items() if about.quantized)):
            report.add(Finding(*row) for row in findings)
            if _has_error(findings):
                bad.add(name)
        stats = report.stats = StatsTable(_rows(tables, _STATS, read))
        report.add(files.check_runs(catalog, role, zero, stats))
        outliers = dict(_rows(tables, _OUTLIERS, stats))
        real = {name for name, about in tensors.items() if about.floating or about.quantized} - bad
        judged = {name: values for name, values in stats.items() if name in real}
        skip, graph = quantized.names | zero, catalog.format == "onnx"
        report.add(check_values(judged, tensors, options.limits, role, outliers, skip=skip, graph=graph))
        heads = (head for head, embedding in pairs.items() if bad.isdisjoint((head, embedding)))
        report.add(Finding(*row) for _, findings in _rows(tables, _TIED, heads) for row in findings)


def _without_wrappers(tensors: Descriptions, title: str) -> tuple[Descriptions, Finding | None]:
    """Leave out wrappers inside names, which no schema has; a prefix is found by `choose_part`."""
    wrapped = next(filter(wrapped_inside, tensors), None)
    if wrapped is None:
        return tensors, None
    try:
        stored = stored_names(tensors, title)
    except FormatError as problem:
        return tensors, find("schema.names:wrapped", problem.tensor, problem=problem.args[0])
    named = {bare: tensors[name] for bare, name in stored.items()}
    return named, find("schema.prefix:wrapped", wrapped, wrappers=", ".join(WRAPPERS))


def _check_unknown(about: TensorDescription, unknown: Unknown) -> Finding:
    """Return the finding about an entry that cannot be read."""
    in_gguf = about.dtype.startswith("ggml type")  # its bytes end at the next tensor, or at the end
    empty = in_gguf and about.nbytes == 0 and 0 not in about.shape
    rule = "file.unknown_type" + (":empty" if empty else ":missing" if unknown.is_missing else "")
    reason = "is unknown to this version" if in_gguf and not unknown.is_missing else unknown.reason
    return find(rule, about.name, dtype=about.dtype, shape=list(about.shape), reason=reason)


# ---- values ----


def is_norm(name: str, about: TensorDescription, role: str | None) -> bool:
    """True for norm weights, by the role in the schema or else by name."""
    if role is not None or len(about.shape) > 1:
        return role == "norm"
    module, _, last = name.rpartition(".")
    norm = (module.rpartition(".")[2] if last in _NORM_WEIGHTS else last).lower().rstrip("0123456789")
    return norm.endswith("norm") or not _NORM_WORDS.isdisjoint(norm.split("_"))


def check_values(
    stats: Mapping[str, TensorStats],
    tensors: Descriptions,
    limits: Limits,
    role: Callable[[str], str | None],  # of a tensor in the schema
    outliers: Mapping[str, float],  # see `find_outliers`
    *,
    skip: Collection[str],  # parts of quantized weights, which can have any value; zero tensors, already reported
    graph: bool,  # if so, an infinity alone can be a constant, such as the first operand of a maximum
) -> Iterator[Finding]:
    """Find NaN, infinity and outliers (errors), values out of range and constant matrices (warnings)."""
    low, high, norm = limits.low, limits.high, limits.norm
    if norm is None and (low, high) == (_LOW, _HIGH):
        norm = _NORM
    usual, of_norms = (low, high), (low, high) if norm is None else (-norm, norm)
    for name, values in stats.items():
        about, nan = tensors[name], ("value.nan", values.nan, values.first_nan)
        for rule, bad, first in (nan, ("value.inf", values.inf, values.first_inf)):
            if bad:
                at = "" if first is None else f", the first at {list(first)}"
                severity = WARNING if graph and values.inf == values.count == 1 else None
                are = "is" if bad == 1 else "are"
                yield find(rule, name, severity=severity, bad=bad, count=values.count, are=are, at=at)
        if values.count == 0 or math.isnan(values.min) or name in skip:
            continue
        low, high = of_norms if is_norm(name, about, role(name)) else usual
        if name in outliers:
            yield find("value.outlier", name, absmax=figure(values.absmax, 6), bound=figure(outliers[name], 6))
        elif values.min < low or values.max > high:
            smallest, largest = figure(values.min, 6), figure(values.max, 6)
            yield find("value.range", name, min=smallest, max=largest, low=low, high=high)
        if sum(size > 1 for size in about.shape) > 1 and values.nan + values.inf == 0 and values.min == values.max:
            rule = "value.zero" if values.absmax == 0 else "value.constant"
            yield find(rule, name, count=values.count, value=figure(values.min, 6))


def find_outliers(catalog: Catalog, names: Sequence[str], threads: int | None) -> dict[str, float]:
    """Return the tensors with an outlier, each with a bound that 99.9 % of its magnitudes stay below."""
    bounds = {}
    for name, counted in measure(catalog, names, histogram=True, threads=threads).items():
        histogram = counted.histogram
        assert histogram is not None
        count = int(histogram.sum())
        if count < _OUTLIER_COUNT:
            continue
        allowed = count - -(-count * _OUTLIER_PERMILLE // 1000)  # values beyond the percentile
        limit = counted.absmax / _OUTLIER_FACTOR
        first = int(np.searchsorted(HISTOGRAM_EDGES, limit, side="right")) - 1  # the bin of the limit
        bins = len(histogram)
        if first >= 0 and int(histogram[min(first, bins - 1) :].sum()) <= allowed:
            beyond = np.cumsum(histogram[::-1])[::-1]
            edge = int((beyond > allowed).sum())  # the smallest with at most `allowed` larger values
            # A power of two, or the largest magnitude that is not an outlier divided by 10,000.
            bounds[name] = min(float(HISTOGRAM_EDGES[edge]), limit)
        elif int(histogram[min(first + 1, bins) :].sum()) <= allowed:
            array = catalog.array(name, threads).reshape(-1)
            chunks = (np.abs(array[at : at + _CHUNK].astype(np.float64)) for at in range(0, array.size, _CHUNK))
            if sum(int(((chunk >= limit) & np.isfinite(chunk)).sum()) for chunk in chunks) <= allowed:
                bounds[name] = limit
    return bounds


def check_scales(catalog: Catalog, name: str, limits: Limits, threads: int | None) -> Iterator[Finding]:
    """Find bad scales of a quantized or packed tensor. For tensors in files, only scales and blocks are read."""
    about, place = catalog.about(name), catalog.place(name)
    packed = None if place.file is None else packed_of(place.file, place.number)
    if packed is None:
        value = catalog.value(name, threads)
        assert isinstance(value, QuantizedTensor)
        restoring = value.restoring()  # with the owner of the memory of its parts
        if restoring is None:  # blocks with their scales inside
            row, fault = dtypes.BLOCK_TYPES[value.scheme], "blocks have a scale that is not finite"
            of_blocks = dtypes.block_scales(row, np.ascontiguousarray(value.data).reshape(-1, row.block_bytes))
            if of_blocks is not None and not np.isfinite(of_blocks).all():
                faulty = np.flatnonzero(~np.isfinite(of_blocks).all(axis=1))
                first = f"block {faulty[0]} with {', '.join(map(str, of_blocks[faulty[0]]))}"
                yield find("quantization.scale", name, bad=faulty.size, total=len(of_blocks), fault=fault, first=first)
            return
        packed, names = restoring[0], value.names
        parts = value.roles if about.packed or value.scale is None else {packing.SCALE: value.scale}
    else:
        names = packed.names(name)
        parts = {role: PartRows(packed.parts[role]).whole() for role in _SCALE_ROLES if role in packed.parts}
    if about.packed:
        yield from _check_packed(name, packed, names, parts)
        return
    scales: Array = np.atleast_1d(np.asarray(parts[packing.SCALE], np.float64))
    bad = ~np.isfinite(scales) | (scales < 0)
    if bad.any():
        at = int(bad.argmax())
        where = "" if about.axis is None else f" {at} of axis {about.axis}"
        yield find("quantization.scale:int8", name, where=where, scale=scales[at])
        return
    for limit, factor, origin in ((limits.scale, 1.0, ""), (limits.absmax, 1 / 127, " (absmax / 127)")):
        number: Any = limit.get(name) if isinstance(limit, Mapping) else limit
        if number is None:
            continue
        expected = float(number) * factor
        off = np.abs(scales - expected) > _SCALE_TOLERANCE * abs(expected)
        if off.any():
            scale = scales[int(off.argmax())]
            yield find("quantization.scale:limit", name, scale=scale, expected=expected, origin=origin)


def _check_packed(
    name: str, packed: packing.Packed, names: Mapping[str, str], parts: Mapping[str, Array]
) -> Iterator[Finding]:
    """Find scales that are not finite or have a wrong sign, and zero points of 0, which AutoGPTQ stores as -1."""
    for role in _SCALE_ROLES:
        array = parts.get(role)
        if array is None or array.size == 0:
            continue
        if array.dtype == np.uint8:
            if packed.packing.scale_dtype is None:
                continue
            array = array.view(dtypes.element_dtype(dtypes.BY_CODE[packed.packing.scale_dtype].number))
        scales = array.astype(np.float32)
        bad = ~np.isfinite(scales)
        if role != packing.BIAS and packed.packing.family not in _SIGNED:
            bad |= scales < 0
        if bad.any():
            at = np.argwhere(bad)[0].tolist()
            fault = f"values of {show(names[role])} are not finite numbers >= 0"
            first = f"{scales[tuple(at)]:g} at {at}"
            yield find("quantization.scale", name, bad=int(bad.sum()), total=bad.size, fault=fault, first=first)
    if count := wrapped_zeros(packed):
        yield find("quantization.zero", name, zeros=f"{count:,} zero {'point is' if count == 1 else 'points are'}")
    if zeros_disagree(packed):
        yield find("quantization.zero:format", name)


def check_tied(catalog: Catalog, head: str, embedding: str) -> Iterator[Finding]:
    """Find a head that differs from the embedding that the config ties it to."""
    abouts = [catalog.about(name) for name in (head, embedding)]
    if any(about.quantized or (about.element is not None and about.element.packed) for about in abouts):
        return
    a, b = catalog.source(head), catalog.source(embedding)
    if not (isinstance(a, Source) and isinstance(b, Source)) or a.row is not b.row or a.shape != b.shape:
        return
    begin = 0
    for pieces in zip(source_pieces(a), source_pieces(b), strict=True):
        x, y = (np.frombuffer(piece, np.uint8) for piece in pieces)
        unequal = x != y
        if unequal.any():
            element = (begin + int(unequal.argmax())) // a.row.block_bytes
            yield find("head.tied", head, embedding=show(embedding), index=list(index_of(element, a.shape)))
            return
        begin += x.size


# ---- reading ----


def _rows(tables: Tables, table: str, subjects: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of subjects in a table; raise the error of the first unread subject."""
    rows, unread = tables.get(table, {}), tables.get(f"unread {table}", {})
    for subject in subjects:
        if subject in rows:
            yield subject, rows[subject]
        elif subject in unread:
            raise FormatError(unread[subject])


def _read(
    catalog: Catalog, tensors: Descriptions, pairs: Mapping[str, str], entries: _Entries, options: CheckSettings
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
        tables = executors.run_pieces(run, pieces, options.executor, threads=options.threads, progress=options.progress)
        with paused(len(tensors)):
            return {**tables, _STATS: of_plain(tables.get(_STATS, {}))}
    tables = {_CRC: files.faults_of({str(k): entry for k, entry in enumerate(entries)}, options.threads)}
    with _unread(tables, _VALUES, tensors):
        _read_values(tables, catalog, tensors, options)
    with _unread(tables, (_TIED,), pairs):
        for pair in pairs.items():
            tables.setdefault(_TIED, {})[pair[0]] = [*check_tied(catalog, *pair)]
    return tables


@contextmanager
def _unread(tables: Tables, of: Iterable[str], subjects: Iterable[str]) -> Iterator[None]:
    """If a file is unreadable, note its error for the subjects of each table; see `_rows`."""
    try:
        yield
    except UNREADABLE as problem:
        for table in of:
            if table not in tables or table in (_SCALES, _TIED):  # tables that grow by row
                tables[f"unread {table}"] = dict.fromkeys(subjects, one_line(problem))


def _read_values(tables: Tables, catalog: Catalog, tensors: Descriptions, options: CheckSettings) -> None:
    limits, threads = options.limits, options.threads
    scales = tables.setdefault(_SCALES, {})
    for name, about in tensors.items():
        if about.quantized:
            scales[name] = list(check_scales(catalog, name, limits, threads))
    # Statistics of packed tensors with bad scales would only repeat the error.
    bad = {name for name, findings in scales.items() if _has_error(findings) and tensors[name].packed}
    readable = [name for name in tensors if name not in bad]
    stats = measure(catalog, readable, histogram=options.histogram, threads=threads, progress=options.progress)
    tables[_STATS] = stats
    large = [name for name, row in stats.items() if row.absmax > OUTLIER_ABOVE]
    real = [name for name in large if tensors[name].floating or tensors[name].quantized]
    tables[_OUTLIERS] = find_outliers(catalog, real, threads)


def _has_error(findings: Iterable[Sequence[Any]]) -> bool:
    return any(severity == ERROR for severity, *_ in findings)


# ---- in pieces ----


def _entry_pieces(entries: _Entries) -> Iterator[dict[str, Any]]:
    sizes = [entry.info.packed for entry in entries]
    for group in executors.groups(sizes, [entry.file for entry in entries], range(len(entries))):
        archives: dict[str, list[Any]] = {}
        for k in group:
            file = entries[k].file
            where = file.files.public(file.files.absolute(file.place)), file.files.public_options()
            archives.setdefault(file.place, [*where, *file.identity[:2], {}])[-1][str(k)] = entries[k].info.name
        piece = {"operation": "validate", "check": _CRC, "version": __version__, "archives": [*archives.values()]}
        yield {**piece, "nbytes": sum(sizes[k] for k in group)}


def _pieces(catalog: Catalog, names: Sequence[str], check: str, **call: Any) -> Iterator[dict[str, Any]]:
    return executors.pieces_of(catalog.sizes(names), catalog, operation="validate", check=check, **call)


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read the rows of a piece; see `run_piece`."""
    executors.check_version(piece, executors.INVALID_PIECE)
    check, tables = piece.get("check"), Tables()
    if check == _CRC:
        try:
            archives = [
                (executors.place_at(path, planned, storage_options), (size, version), dict(names))
                for path, planned, size, version, names in [*piece["archives"]] or [None]
            ]
        except executors.MALFORMED as error:
            raise FormatError(f"{executors.INVALID_PIECE}: malformed archives: {error!r}") from None
        with _unread(tables, (_CRC,), [number for *_, names in archives for number in names]):
            faults: dict[str, Any] = {}
            for location, identity, names in archives:
                location.files.check_unchanged(location.path, identity)
                with files.reopened(location, identity, [*names.values()]) as entries:
                    faults |= files.faults_of(dict(zip(names, entries, strict=True)), threads)
            tables[_CRC] = faults
    elif check in ("values", _TIED):
        limits = Limits(scale=piece.get("scale"), absmax=piece.get("absmax"))
        options = settings(limits=limits, histogram=piece.get("histogram") is True, threads=threads)
        of, subjects = (_TIED,) if check == _TIED else _VALUES, executors.names_of(piece)
        with _unread(tables, of, subjects), opened(piece, storage_options) as (named, (catalog,)):
            if check == _TIED:
                tables[_TIED] = {named[0]: [*check_tied(catalog, *named)]}
            else:
                _read_values(tables, catalog, catalog.descriptions(named), options)
                tables[_STATS] = as_plain(tables[_STATS])
    else:
        raise FormatError(f"{executors.INVALID_PIECE}: unknown check {show(check)}, expected crc, values or tied")
    return tables
