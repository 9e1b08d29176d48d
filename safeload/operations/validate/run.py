"""Validates a checkpoint: its files, its names and shapes, its values."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ...base import log
from ...base.arrays import Array, refuse_masked
from ...base.paths import PathLike, os_error
from ...base.selecting import Patterns
from ...base.text import show
from ...checkpoint import Checkpoint
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.run.progress import Progress
from ...engine.run.weight_file import WeightFile
from ...errors import (
    ForbiddenError,
    FormatError,
    LimitError,
    MissingShardError,
    RemotePermissionError,
    SafeloadError,
    UnsupportedError,
    one_line,
)
from ...loading import entry as loading
from ...models.choosing import Choice, choose, choose_inner, choose_prefix
from ...models.schema import Schema
from ...packed.quantization import quantization_of
from ...stores.json_file import read_if_there
from ...stores.places import Located, places_of
from ..sources.catalog import Catalog, Given
from ..sources.description import TensorDescription
from ..sources.executors import EXECUTOR, Executor
from ..sources.piece_files import check_paths, in_memory
from . import files, holes, schemas
from . import names as naming
from .contents import Contents, Model, check_contents
from .findings import Finding, Limits, ValidationReport, error, warning
from .gathering import gathered
from .settings import CheckSettings, settings

# Codes of the findings about files that cannot be opened.
_REFUSALS = (
    (MissingShardError, "index.shard"),
    (ForbiddenError, "file.forbidden"),
    (UnsupportedError, "file.unsupported"),
    (LimitError, "file.limit"),
    (SafeloadError, "file.format"),
)

# Name of a single array in a report.
ARRAY = "array"

# What the publishers of Llama and Mistral call their weights, and the config beside them.
_CONSOLIDATED, _PARAMS = "consolidated", "params.json"

Source = Given | Array | QuantizedTensor


def validate(
    source: Source,
    *,
    config: PathLike | Mapping[str, Any] | None = None,
    schema: str | PathLike | Mapping[str, Any] | None = "auto",
    shape: tuple[int | None, ...] | None = None,
    limits: Limits | Mapping[str, Any] | tuple[float, float] | None = None,
    values: bool = True,
    only: Patterns = None,
    drop: Patterns = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> ValidationReport:
    """Checks weights for everything that may be wrong, and reports it. Findings are never raised.

    Errors are: a file that violates its format, or whose end was never written; a missing shard; an entry of a zip
    archive with a wrong CRC-32; no tensors; NaN and infinity; tensors that are missing, unexpected or of the wrong
    shape by the config; holes in the layers; scales of quantized tensors that are not finite or not the expected ones.
    Warnings are: values outside of ``limits``, matrices of a single value, tensors without elements or axes, layers of
    different dtypes, an index with a wrong total_size, a tied head with values of its own. Notes say what was not
    checked: quantized weights of other libraries, and heads and models without a schema.

    Args:
        source: path or URL of a file, a folder or an index.json; an open `Checkpoint`; a dict of arrays; or a single
            array.
        config: parsed config.json or its path; None for the one of a folder, or for the params.json beside
            consolidated.00.pth or consolidated.safetensors.
        schema: the expected names and shapes: "auto" to choose by the config's architectures and model_type, the name
            of a schema, the path or the content of one (see `safeload.models.schema`), None for none.
        shape: expected shape of a single array; None in it for any size.
        limits: (low, high) for values; or a dict with any of low, high, norm (largest absolute value of the weights of
            norms), parameters (total number of elements), scale and absmax (of int8 tensors: a number, or one for each
            name).
        values: False to read no tensor: only files, names, dtypes, shapes and sizes are checked, which takes as long
            as opening the checkpoint, and ``.stats`` of the report stays empty.
        only: shell pattern, or several, of the tensors whose values are read; what is found about the values and the
            shapes of others is left out of the report. Names are compared as a whole: what is missing is always said.
        drop: shell pattern, or several, of tensors to leave out in the same way.
        storage_options: for URLs: options of the filesystem that a URL leads to, see `open`.
        executor: reads the values in pieces, each of some tensors, on other processes or machines that have the same
            files: anything with the ``submit`` of `concurrent.futures.Executor`, such as Dask's
            ``client.get_executor(pure=False)``. The findings are those of one process; headers are read here.
        threads: None: chosen automatically, and one for each piece of an executor.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        The report; it is false if there are errors.

    Raises:
        ValueError, TypeError: wrong arguments, such as ``executor`` for tensors in memory.
        TensorNotFoundError: a pattern matches no tensor.
        FormatError: the file of a schema or config does not hold one.
        OSError: the file cannot be opened: FileNotFoundError, PermissionError, ...

    Example:
        >>> import numpy as np, safeload
        >>> report = safeload.validate({"w": np.float32([[1, np.nan]])})
        >>> report.ok, report.errors[0].code
        (False, 'value.nan')
    """
    wanted = settings(
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
        return _validate_array(source, shape, wanted)
    if shape is not None:
        raise ValueError("shape= is for a single array")
    if isinstance(source, (Mapping, Catalog)):
        with Catalog.of(source) as catalog:
            if executor is not None:
                check_paths(catalog, EXECUTOR)
            return _validate_tensors(ValidationReport(catalog.title), catalog, wanted)
    return validate_path(source, lambda: loading.open(source, storage_options=storage_options), wanted)


def _params_beside(weights: Sequence[WeightFile]) -> Mapping[str, Any] | None:
    """The parsed params.json beside the only file, if that holds weights under Meta's or Mistral's own names.

    None without one, and for a slice of a model-parallel checkpoint, whose shapes are not those of the model.

    Raises:
        FormatError, OSError: see `read_json`.
    """
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
    return params if len(slices) < 2 else None


def validate_path(path: PathLike | Located, open: Callable[[], Checkpoint], wanted: CheckSettings) -> ValidationReport:
    """`validate` for a path or a URL, which ``open`` opens."""
    (place,), where = places_of([path])
    text = where.shown(place)
    report = ValidationReport(text)
    if not where.remote and not os.path.lexists(place):
        raise os_error(errno.ENOENT, text)
    try:
        opened = open()
    except SafeloadError as problem:
        code = next(code for kind, code in _REFUSALS if isinstance(problem, kind))
        report.add([error(code, None, str(problem))])
        return report
    except FileNotFoundError as problem:
        if problem.filename in (None, text):
            raise
        report.add([error("index.shard", None, f"{problem.filename} is missing, but the index lists it")])
        return report
    with opened, Catalog.of(opened) as catalog:
        return _validate_tensors(report, catalog, wanted)


# ---- parts ----


def _validate_array(
    x: Array | QuantizedTensor, shape: tuple[int | None, ...] | None, wanted: CheckSettings
) -> ValidationReport:
    report = ValidationReport(ARRAY)
    refuse_masked(x, "the array")
    catalog = Catalog.of({ARRAY: x})
    known = catalog.about(ARRAY)
    if shape is not None:
        if isinstance(shape, str) or not all(size is None or isinstance(size, int) for size in shape):
            raise TypeError(f"shape must be a tuple of whole numbers and None, not {show(shape)}")
        if not schemas.fits(known.shape, tuple(shape)):
            sizes = ", ".join("?" if size is None else str(size) for size in shape)
            report.add([error("array.shape", ARRAY, f"has shape {list(known.shape)}, expected [{sizes}]")])
    return _validate_tensors(report, catalog, wanted._replace(choose=False, schema=None))


def _validate_tensors(report: ValidationReport, catalog: Catalog, wanted: CheckSettings) -> ValidationReport:
    started = time.perf_counter()
    chosen = frozenset(wanted.selection.of(list(catalog)))
    try:
        _check_tensors(report, catalog, chosen, wanted)
    finally:
        report.seconds = time.perf_counter() - started
    if wanted.selection:
        report.leave_out(frozenset(catalog) - chosen)
    return report


def _check_tensors(report: ValidationReport, catalog: Catalog, chosen: frozenset[str], wanted: CheckSettings) -> None:
    """Runs all checks of the tensors of a catalog, and adds their findings to the report.

    A file that cannot be read any more ends the checks with a finding.

    Args:
        report: gets the findings.
        catalog: the tensors.
        chosen: those whose values are read.
        wanted: the settings.
    """
    config, limits = wanted.config, wanted.limits
    known = {name: catalog.about(name) for name in catalog}
    report.tensors = len(known)
    report.parameters = sum(math.prod(tensor.shape) for tensor in known.values())
    if config is None:
        try:
            config = _params_beside(catalog.weight_files) or catalog.config
        except (FormatError, OSError) as problem:
            report.add([error("schema.config", None, one_line(problem))])
    report.format, report.files, report.nbytes = catalog.format, list(catalog.files), catalog.nbytes
    report.add(files.check_index(catalog))
    choice = Choice(wanted.schema, True) if wanted.schema is not None else None
    inner = None
    if wanted.choose:
        choice = choose(config, report.format, known.keys())
        inner = choose_inner(config, known.keys()) if choice is None else choose_prefix(choice, config, known.keys())
    log.debug("validate %s: schema %s", report.source, None if choice is None else choice.schema.name)
    whole = config
    if inner is not None:
        choice, config = inner.choice, inner.config
    schema = None if choice is None else choice.schema
    report.add(naming.check_sizes(known, schema))
    quantization = quantization_of(whole)
    codes = catalog.find_codes(quantization)
    quantized = naming.quantized_parts(quantization, schema, known, codes)
    if quantized is not None:
        report.add([naming.note_quantized(quantized, values=wanted.values)])
    if choice is None:
        report.add(naming.check_layers(known, frozenset() if quantized is None else quantized.modules))
    elif known:
        report.schema = choice.schema.name
        compared = schemas.check_schema(choice, config, known, quantized=quantized, inner=inner)
        report.compared = compared.compared
        report.add(compared.findings)
    if limits.parameters is not None and report.parameters != limits.parameters:
        message = f"{report.parameters:,} parameters, expected {limits.parameters:,}"
        report.add([error("model.parameters", None, message)])
    report.add(naming.check_dtypes(known, whole, quantized))
    unknown = catalog.unknown()
    report.add(_check_unknown(catalog.about(name)) for name in unknown)
    chosen -= unknown.keys()
    report.values = wanted.values
    model = Model(known, frozenset(codes), quantized, schema)
    zero: set[str] = set()
    try:
        for finding, in_it in holes.check_tails(catalog, model.role, values=wanted.values):
            report.add([finding])
            zero.update(in_it)
    except (FormatError, OSError) as problem:
        report.add([_unreadable(problem)])
        return
    if wanted.values:
        pairs = {} if choice is None else _tied_pairs(choice.schema, config, known)
        pairs = {head: embedding for head, embedding in pairs.items() if {head, embedding} <= chosen - zero}
        names = [name for name in known if name in chosen and name not in model.codes]
        contents = Contents(catalog, wanted)
        if wanted.executor is not None:
            contents = gathered(catalog, wanted, names, pairs, wanted.executor)
        try:
            check_contents(report, contents, model, names, pairs, zero)
        except (FormatError, OSError) as problem:
            report.add([_unreadable(problem)])


def _unreadable(problem: Exception) -> Finding:
    return error("file.read", None, one_line(problem))


def _tied_pairs(
    schema: Schema, config: Mapping[str, Any] | None, known: Mapping[str, TensorDescription]
) -> dict[str, str]:
    """Tied heads that are present along with their embedding: name of the head to name of the embedding."""
    try:
        wanted = schema.expand(config, known.keys())
    except ValueError:  # already reported by check_schema
        return {}
    return {w.name: w.tied for w in wanted.values() if w.tied is not None and w.name in known and w.tied in known}


def _check_unknown(about: TensorDescription) -> Finding:
    """The finding about a tensor of an unknown ggml type, whose bytes end where the next tensor or the file does."""
    if about.nbytes == 0 and 0 not in about.shape:
        message = f"{about.dtype} tensor {list(about.shape)} has no bytes: the file is truncated, or an offset is wrong"
        return error("file.unknown_type", about.name, message)
    message = f"{about.dtype} is unknown to this version: its values are not checked"
    return warning("file.unknown_type", about.name, message)
