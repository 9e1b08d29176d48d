"""Validate a checkpoint: its files, its names and shapes, its values."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ...base import log
from ...base.arrays import Array, refuse_masked
from ...base.paths import PathLike, os_error
from ...base.selecting import Patterns
from ...base.table import Unknown
from ...base.text import show
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.run.progress import Progress
from ...engine.run.weight_file import WeightFile
from ...errors import (
    FormatError,
    RemotePermissionError,
    SafeloadError,
    UnsupportedError,
    one_line,
    public,
)
from ...formats.numbered import other_form
from ...formats.registry import BY_NAME, GGUF
from ...loading import entry as loading
from ...models.choosing import Choice, Inner, choose, choose_inner, choose_prefix
from ...models.module_names import WRAPPERS, stored_names, wrapped_inside
from ...packed.quantization import quantization_of
from ...stores.json_file import read_if_there
from ...stores.places import Located, places_of
from ..sources.catalog import Catalog, Given
from ..sources.description import TensorDescription
from ..sources.executors import EXECUTOR, Executor, check_paths, in_memory
from . import files, structure, zeros
from .contents import Model, check_contents
from .findings import CheckReport, Finding, find
from .gguf_rules import check_gguf
from .settings import CheckSettings, Limits, settings
from .shards import ShardCheck, refusal

# Codes of findings that hold without the other shards.
_SHARD_CODES = (
    *("value.", "file.", "tensor."),
    *("schema.shape", "schema.unexpected", "schema.layer_extra", "schema.config"),
)

# The name of a single array in reports.
ARRAY = "array"

# File names in the original releases of Llama and Mistral: weights and config.
_CONSOLIDATED, _PARAMS = "consolidated", "params.json"

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
        values=values,
        only=only,
        drop=drop,
        executor=executor,
        threads=threads,
        progress=progress,
    )
    if isinstance(source, (np.ndarray, QuantizedTensor)):
        if executor is not None:
            raise in_memory("an array is", EXECUTOR)
        return _validate_array(source, shape, options)
    if shape is not None:
        raise ValueError("shape= requires a single array")
    if isinstance(source, (Mapping, Catalog)):
        with Catalog.of(source) as catalog:
            if executor is not None:
                check_paths(catalog, EXECUTOR)
            return _validate_tensors(CheckReport(catalog.title), catalog, options)
    return validate_path(source, {"storage_options": storage_options}, options)


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
        shards = ShardCheck.of(place, where, opening)
        if shards is None or not shards.faults:
            report.add([refusal(problem)])
            return report
        report.add(shards.faults)
        return _validate_rest(report, shards, opening, options)
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
    report: CheckReport, shards: ShardCheck, opening: Mapping[str, Any], options: CheckSettings
) -> CheckReport:
    """Check the tensors in the good shards of a damaged folder, as far as they suffice."""
    report.add(shards.advice)
    if not shards.good:
        return report
    values = options.values and quantization_of(shards.config) is None  # codes can have their scales in other shards
    config = shards.config if options.config is None else options.config
    try:
        with loading.open(shards.good, **opening) as opened, Catalog.of(opened) as catalog:
            own = options._replace(config=config, values=values)
            rest = _validate_tensors(CheckReport(report.source), catalog, own)
    except (SafeloadError, OSError):  # these shards need the others
        return report
    for name in ("format", "files", "schema", "tensors", "parameters", "nbytes", "compared", "seconds", "stats"):
        setattr(report, name, getattr(rest, name))
    report.add(finding for finding in (*rest.errors, *rest.warnings) if finding.code.startswith(_SHARD_CODES))
    return report


def _validate_array(
    x: Array | QuantizedTensor, shape: tuple[int | None, ...] | None, options: CheckSettings
) -> CheckReport:
    report = CheckReport(ARRAY)
    refuse_masked(x, "the array")
    catalog = Catalog.of({ARRAY: x})
    about = catalog.about(ARRAY)
    if shape is not None:
        if isinstance(shape, str) or not all(size is None or isinstance(size, int) for size in shape):
            raise TypeError(f"shape must be a tuple of integers and None, got {show(shape)}")
        if not structure.fits(about.shape, tuple(shape)):
            sizes = ", ".join("?" if size is None else str(size) for size in shape)
            report.add([find("array.shape", ARRAY, shape=list(about.shape), sizes=sizes)])
    return _validate_tensors(report, catalog, options._replace(choose=False, schema=None))


def _validate_tensors(report: CheckReport, catalog: Catalog, options: CheckSettings) -> CheckReport:
    started = time.perf_counter()
    selected = frozenset(options.selection.of(list(catalog)))
    try:
        model = _check_structure(report, catalog, options)
        _check_files(report, catalog, model, selected, options)
    finally:
        report.seconds = time.perf_counter() - started
    if options.selection:
        report.leave_out(frozenset(catalog) - selected)
    return report


def _check_structure(report: CheckReport, catalog: Catalog, options: CheckSettings) -> Model:
    """Run the checks that read no values, and return the model."""
    tensors = catalog.descriptions([*catalog])
    report.tensors = len(tensors)
    report.parameters = sum(math.prod(about.shape) for about in tensors.values())
    report.format, report.files, report.nbytes = catalog.format, list(catalog.files), catalog.nbytes
    report.values = options.values
    config = _config(report, catalog, options)
    report.add(files.check_index(catalog))
    named: Mapping[str, TensorDescription] = tensors
    inner = None
    if catalog.format == GGUF and options.choose and config is None:
        of_gguf = check_gguf(catalog.metadata, tensors)
        report.add(of_gguf.findings)
        choice, config = of_gguf.choice, of_gguf.config if of_gguf.choice else None
    else:
        named = _without_wrappers(report, tensors, catalog.title) if options.choose else tensors
        choice, inner = _choose_schema(config, catalog.format, named, options)
        log.debug("validate %s: schema %s", report.source, None if choice is None else choice.schema.name)
    schema = None if choice is None else choice.schema
    report.add(structure.check_sizes(tensors, schema))
    quantization = quantization_of(config)
    codes = catalog.find_codes(quantization)
    quantized = structure.quantized_parts(quantization, schema, tensors, codes)
    if quantized is not None:
        report.add([structure.note_quantized(quantized, values=report.values)])
    model = Model(tensors, frozenset(codes), quantized, schema, config if inner is None else inner.config)
    if choice is None:
        report.add(structure.check_layers(tensors, frozenset() if quantized is None else quantized.modules))
    elif tensors:
        report.schema = choice.schema.name
        parts = quantized if quantized is None or named is tensors else quantized.unwrapped()
        findings, report.compared = structure.check_schema(choice, model.config, named, quantized=parts, inner=inner)
        report.add(findings)
    expected = options.limits.parameters
    if expected is not None and report.parameters != expected:
        report.add([find("model.parameters", parameters=report.parameters, expected=expected)])
    report.add(structure.check_dtypes(tensors, config, quantized))
    report.add(_check_unknown(catalog.about(name), unknown) for name, unknown in catalog.unknown().items())
    return model


def _config(report: CheckReport, catalog: Catalog, options: CheckSettings) -> Mapping[str, Any] | None:
    """Return the config passed to `check`, or the config of the checkpoint."""
    if options.config is not None:
        return options.config
    try:
        return _params_beside(catalog.weight_files) or catalog.config
    except (FormatError, OSError) as problem:
        report.add([find("schema.config:unreadable", problem=one_line(problem))])
        return None


def _without_wrappers(
    report: CheckReport, tensors: Mapping[str, TensorDescription], title: str
) -> Mapping[str, TensorDescription]:
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
    config: Mapping[str, Any] | None, format: str | None, named: Mapping[str, TensorDescription], options: CheckSettings
) -> tuple[Choice | None, Inner | None]:
    """Return the schema, and the covered part of the model; None for the whole model."""
    row = BY_NAME.get(format or "")
    if not options.choose or (row is not None and row.own_names):
        return None if options.schema is None else Choice(options.schema, True), None
    choice = choose(config, format, named.keys())
    inner = choose_inner(config, named.keys()) if choice is None else choose_prefix(choice, config, named.keys())
    return (choice if inner is None else inner.choice), inner


def _check_files(
    report: CheckReport, catalog: Catalog, model: Model, selected: Set[str], options: CheckSettings
) -> None:
    """Run the checks that read files. If a file can no longer be read, add a finding and stop."""
    zero: set[str] = set()  # tensors already reported as zero
    entries: list[files.FileEntry] = []
    with report.readable() as readable:
        report.add(zeros.check_tails(catalog, model.role, zero, values=options.values))
        report.add(zeros.check_unwritten(catalog, model.role, zero))
        if options.values:
            entries = files.entries_of(catalog)
    if readable and options.values:
        selected = selected - catalog.unknown().keys()
        check_contents(report, catalog, model, selected, options, entries=entries, zero=zero)


def _check_unknown(about: TensorDescription, unknown: Unknown) -> Finding:
    """Return the finding about an entry that cannot be read."""
    in_gguf = about.dtype.startswith("ggml type")  # its bytes end at the next tensor, or at the end
    if in_gguf and about.nbytes == 0 and 0 not in about.shape:
        return find("file.unknown_type:empty", about.name, dtype=about.dtype, shape=list(about.shape))
    if unknown.is_missing:
        return find("file.unknown_type:missing", about.name, dtype=about.dtype, reason=unknown.reason)
    reason = "is unknown to this version" if in_gguf else unknown.reason
    return find("file.unknown_type", about.name, dtype=about.dtype, reason=reason)
