"""Validates a checkpoint: its files, its names and shapes, its values."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from ... import loading
from ...base import log
from ...base.arrays import Array, refuse_masked
from ...base.paths import PathLike, native_path, os_error
from ...base.selecting import Patterns, Selection
from ...base.text import show
from ...checkpoint import Checkpoint
from ...engine.progress import Progress
from ...engine.quantized_tensor import QuantizedTensor
from ...engine.threads import check_threads
from ...errors import (
    ForbiddenError,
    FormatError,
    LimitError,
    MissingShardError,
    SafeloadError,
    UnsupportedError,
    one_line,
)
from ...models.choosing import Choice, choose, choose_inner, choose_prefix
from ...models.reading import load as load_schema
from ...models.schema import Schema
from ..about import About
from ..catalog import Catalog, Given
from ..stats import stats
from . import files, holes, names, schemas, values
from .findings import Limits, ValidationReport, error
from .names import Quantized

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
        source: path of a file, a folder or an index.json; an open `Checkpoint`; a dict of arrays; or a single array.
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
        threads: None: chosen automatically.
        progress: a callable that gets (bytes_done, bytes_total).

    Returns:
        The report; it is false if there are errors.

    Raises:
        ValueError, TypeError: wrong arguments.
        TensorNotFoundError: a pattern matches no tensor.
        FormatError: the file of a schema or config does not hold one.
        OSError: the file cannot be opened: FileNotFoundError, PermissionError, ...

    Example:
        >>> import numpy as np, safeload
        >>> report = safeload.validate({"w": np.float32([[1, np.nan]])})
        >>> report.ok, report.errors[0].code
        (False, 'value.nan')
    """
    wanted = settings(config, schema, limits, values=values, only=only, drop=drop, threads=threads, progress=progress)
    if isinstance(source, (np.ndarray, QuantizedTensor)):
        return _validate_array(source, shape, wanted)
    if shape is not None:
        raise ValueError("shape= is for a single array")
    if isinstance(source, (Mapping, Catalog)):
        with Catalog.of(source) as catalog:
            return _validate_tensors(ValidationReport(catalog.title), catalog, wanted)
    return validate_path(source, lambda: loading.open(source), wanted)


class Settings(NamedTuple):
    """The checked arguments of `validate`.

    Attributes:
        config: parsed config; None for that of a folder.
        schema: the given schema; None for none, or to choose one.
        choose: whether to choose a schema.
        limits: limits for values.
        values: whether to read tensors.
        selection: the tensors to report about.
        threads: None: chosen automatically.
        progress: see `validate`.
        histogram: whether the statistics include histograms.
    """

    config: Mapping[str, Any] | None
    schema: Schema | None
    choose: bool
    limits: Limits
    values: bool
    selection: Selection
    threads: int | None
    progress: Progress
    histogram: bool


def settings(
    config: PathLike | Mapping[str, Any] | None = None,
    schema: str | PathLike | Mapping[str, Any] | None = "auto",
    limits: Any = None,
    *,
    values: bool = True,
    only: Patterns = None,
    drop: Patterns = None,
    threads: int | None = None,
    progress: Progress = None,
    histogram: bool = False,
) -> Settings:
    """Checks the arguments of `validate`.

    Raises:
        ValueError, TypeError, FormatError, OSError: see `validate`.
    """
    bounds = Limits.of(limits)
    asked = load_schema(schema) if schema is not None and schema != "auto" else None
    check_threads(threads)
    selection = Selection(only, drop)
    return Settings(
        read_config(config), asked, schema == "auto", bounds, values, selection, threads, progress, histogram
    )


def read_config(config: PathLike | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The parsed config, read from its file if given by path.

    Raises:
        FormatError: the file does not hold a JSON object.
        OSError: the file cannot be read.
    """
    if config is None or isinstance(config, Mapping):
        return config
    from ...stores.json_file import read_json

    found: Mapping[str, Any] = read_json(config, "config.json")
    return found


def _params_beside(paths: Sequence[str]) -> Mapping[str, Any] | None:
    """The parsed params.json beside the only file, if that holds weights under Meta's or Mistral's own names.

    None without one, and for a slice of a model-parallel checkpoint, whose shapes are not those of the model.

    Raises:
        FormatError, OSError: see `read_config`.
    """
    if len(paths) != 1 or not os.path.basename(paths[0]).startswith(_CONSOLIDATED):
        return None
    folder = os.path.dirname(paths[0])
    params = os.path.join(folder, _PARAMS)
    if not os.path.isfile(params):
        return None
    slices = [name for name in os.listdir(folder or ".") if fnmatchcase(name, f"{_CONSOLIDATED}*.pth")]
    return read_config(params) if len(slices) < 2 else None


def validate_path(path: PathLike, open: Callable[[], Checkpoint], wanted: Settings) -> ValidationReport:
    """`validate` for a path, which ``open`` opens."""
    text = native_path(path)[0]
    report = ValidationReport(text)
    if not os.path.lexists(text):
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
    x: Array | QuantizedTensor, shape: tuple[int | None, ...] | None, wanted: Settings
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


def _validate_tensors(report: ValidationReport, catalog: Catalog, wanted: Settings) -> ValidationReport:
    started = time.perf_counter()
    chosen = frozenset(wanted.selection.of(list(catalog)))
    try:
        _check_tensors(report, catalog, chosen, wanted)
    finally:
        report.seconds = time.perf_counter() - started
    if wanted.selection:
        report.leave_out(frozenset(catalog) - chosen)
    return report


def _check_tensors(report: ValidationReport, catalog: Catalog, chosen: frozenset[str], wanted: Settings) -> None:
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
            config = _params_beside(catalog.files) or catalog.config
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
    report.add(names.check_sizes(known, schema))
    codes = catalog.find_codes(whole)
    quantized = names.quantized_parts(whole, schema, known, codes)
    if quantized is not None:
        report.add([names.note_quantized(quantized, values=wanted.values)])
    if choice is None:
        report.add(names.check_layers(known, frozenset() if quantized is None else quantized.modules))
    elif known:
        report.schema = choice.schema.name
        compared = schemas.check_schema(choice, config, known, quantized=quantized, inner=inner)
        report.compared = compared.compared
        report.add(compared.findings)
    if limits.parameters is not None and report.parameters != limits.parameters:
        message = f"{report.parameters:,} parameters, expected {limits.parameters:,}"
        report.add([error("model.parameters", None, message)])
    report.add(names.check_dtypes(known, whole, quantized))
    report.values = wanted.values
    model = _Model(known, frozenset(codes), quantized, schema)
    zero: set[str] = set()
    try:
        for finding, in_it in holes.check_tails(catalog, model.role, values=wanted.values):
            report.add([finding])
            zero.update(in_it)
        if not wanted.values:
            return
        report.add(files.check_crc(catalog, threads=wanted.threads))
        skip = zero | _check_contents(report, catalog, model, chosen, zero, wanted)
        if choice is not None:
            pairs = _tied_pairs(choice.schema, config, known)
            report.add(values.check_tied(catalog, {a: b for a, b in pairs.items() if {a, b} <= chosen - skip}))
    except (FormatError, OSError) as problem:
        report.add([error("file.read", None, one_line(problem))])


class _Model(NamedTuple):
    """Description of a model before its values are read.

    Attributes:
        known: its tensors.
        codes: tensors that hold codes, whose values are not checked.
        quantized: tensors that are parts of quantized weights.
        schema: the schema, None without one.
    """

    known: Mapping[str, About]
    codes: frozenset[str]
    quantized: Quantized | None
    schema: Schema | None

    def role(self, name: str) -> str | None:
        """The role of a tensor; None without a schema, or if the schema lacks the tensor."""
        return None if self.schema is None else self.schema.role(name)


def _check_contents(
    report: ValidationReport,
    catalog: Catalog,
    model: _Model,
    chosen: frozenset[str],
    zero: set[str],
    wanted: Settings,
) -> set[str]:
    """Checks scales and values, and stores the statistics in the report. Returns the names of tensors with bad scales.

    Args:
        report: gets the findings and the statistics.
        catalog: the tensors.
        model: description of the model.
        chosen: the tensors whose values are read.
        zero: tensors already reported as zero.
        wanted: the settings.
    """
    bad = set()
    for name, tensor in model.known.items():
        if tensor.quantized and name in chosen:
            value = catalog.value(name)
            assert isinstance(value, QuantizedTensor)
            found = list(values.check_scales(name, value, wanted.limits))
            report.add(found)
            if found:
                bad.add(name)
    # A second error about a packed tensor would say the same.
    readable = chosen - model.codes - {name for name in bad if model.known[name].packed}
    report.stats = stats(
        catalog,
        histogram=wanted.histogram,
        names=[name for name in model.known if name in readable],
        threads=wanted.threads,
        progress=wanted.progress,
    )
    codes: frozenset[str] = frozenset() if model.quantized is None else model.quantized.names
    report.add(
        values.check_values(report.stats, model.known, wanted.limits, bad, role=model.role, codes=codes, zero=zero)
    )
    return bad


def _tied_pairs(schema: Schema, config: Mapping[str, Any] | None, known: Mapping[str, About]) -> dict[str, str]:
    """Tied heads that are present along with their embedding: name of the head to name of the embedding."""
    try:
        wanted = schema.expand(config, known.keys())
    except ValueError:  # already reported by check_schema
        return {}
    return {w.name: w.tied for w in wanted.values() if w.tied is not None and w.name in known and w.tied in known}
