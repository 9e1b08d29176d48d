"""Sections of the report page: findings, contents, charts, sizes, tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ...base.layout import figure
from ...base.scheme import usual_axis
from ...base.text import show, size
from ...checkpoint import Checkpoint
from ...engine.run.progress import Bars
from ..quantize.quantize import SchemeName
from . import plots
from .kinds import ReportContent, content
from .page import collapsible, facts, finding, part, section, soft, table
from .plots import Line
from .source import File

# Maximum number of table rows, and of tensors in a group of findings; browsers are slow with more.
_ROWS = 5000
_LISTED = 1000

# Maximum number of groups of findings.
_GROUPS = 500

# Maximum number of metadata entries, and of characters in each.
_METADATA, _LENGTH = 100, 200

_HEAT = (
    "Number of values by magnitude, for each kind of tensor. Shades are relative to the fullest column of a row. "
    "Zeros, NaN and infinity are left out."
)
_BARS = "Colours match the layers below."
_SIZES = "Memory of all arrays if loaded with this dtype, or by load_quantized with this scheme."
_QUANTIZED = "With a scheme, embeddings, norms, biases and tensors that do not fit it stay float32."

_SPREAD = (
    Line("largest absolute value", 1, lambda row: float(row.stats.absmax)),
    Line("standard deviation", 0, lambda row: float(row.stats.std)),
)


def findings_section(report: Any) -> str:
    """Return the findings of `safeload.check`; equal findings about several tensors form a group."""
    from ..validate.findings import gather

    groups = [group for listed in (report.errors, report.warnings, report.notes) for group in gather(listed)]
    items = []
    for first, more in groups[:_GROUPS]:
        similar = [(item.tensor or "file", item.message) for item in more[:_LISTED]]
        left = max(0, len(more) - _LISTED)
        items.append(finding(first, similar=similar, left=left))
    if not items:
        return ""
    left = len(groups) - len(items)
    rest = f'<p class="soft">and {left:,} more; safeload check --json lists all.</p>' if left > 0 else ""
    return section("Findings", f'<ul class="findings">{"".join(items)}</ul>', rest)


def sections(
    opened: Checkpoint, report: Any, scheme: SchemeName | None, *, threads: int | None, bars: Bars
) -> Iterator[str]:
    """Yield the sections about an open checkpoint; ``scheme`` adds its quantization error."""
    infos = opened.tensors
    shown = content({name: info.nbytes for name, info in infos.items()}, report.stats)
    metadata = [(key, _value(value)) for key, value in islice(opened.metadata.items(), _METADATA)]
    title = _some(len(opened.metadata), _METADATA, "metadata entry", "metadata entries")
    listed = collapsible(title, facts(metadata, "pairs"), rows=len(metadata))
    yield section("Contents", facts(_facts(opened, report), "tiles"), listed)
    if not infos:
        return
    layered = bool(shown.layered)
    layers = len({row.layer for row in shown.layered})
    cut = f"The first {plots.LAYERS} of {layers:,} layers." if layers > plots.LAYERS else ""
    by_layer = part("By layer", soft(cut) + plots.stacks(shown)) if layered else ""
    yield section("Size breakdown", plots.bars(shown), by_layer, note=_BARS if layered else "")
    yield _sizes(opened)
    lines = [row for row in shown.layered if row.stats is not None]
    yield section("Values by layer", plots.panels(lines, _SPREAD, log=True), note=cut)
    measured = [row for row in shown.tensors if row.stats is not None]
    yield section("Magnitude distribution", plots.heat(measured, _lowest()), note=_HEAT)
    if scheme is not None:
        yield _quantized(opened, shown, scheme, threads=threads, bars=bars)
    yield section("Tensors", _table(opened, report))


def digest_section(files: Sequence[File]) -> str:
    """Return the SHA-256 of each file, if there are several."""
    rows = [(os.path.basename(file.path), file.digest, f"{file.nbytes:,}") for file in files if file.digest is not None]
    if len(files) < 2 or not rows:
        return ""
    title = _some(len(rows), _ROWS, "file", "files")
    header = ("file", "SHA-256", "bytes")
    return section("Files", table(title, header, rows[:_ROWS], label="SHA-256 of each file", words=2))


def _lowest() -> int:
    from ..measure.stats_table import HISTOGRAM_EDGES

    return round(math.log2(HISTOGRAM_EDGES[0]))


def _some(count: int, limit: int, singular: str, plural: str) -> str:
    """Return the title of a list that is cut at a limit."""
    total = f"{count:,} {singular if count == 1 else plural}"
    return total if count <= limit else f"the first {limit:,} of {total}"


def _value(value: Any) -> str:
    if not isinstance(value, str):
        return show(value)
    return value if len(value) <= _LENGTH else f"{value[:_LENGTH]}…"


def _facts(opened: Checkpoint, report: Any) -> Iterator[tuple[str, str]]:
    yield "format", opened.format
    yield "tensors", f"{report.tensors:,}"
    yield "parameters", f"{report.parameters:,}"
    yield "tensor size", size(report.nbytes)
    totals: dict[str, int] = {}
    for info in opened.tensors.values():
        totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
    if totals:
        yield "dtypes", ", ".join(sorted(totals, key=lambda code: -totals[code]))
    if report.schema is not None:
        yield "schema", report.schema


def _sizes(opened: Checkpoint) -> str:
    """Return the memory that the checkpoint takes as each dtype and scheme."""
    from ..measure.sizes import sizes

    loaded = sizes(opened)
    unquantized = loaded.dtypes.get("float32")
    schemes = {name: total for name, total in loaded.schemes.items() if total != unquantized}
    note = f"{_SIZES} {_QUANTIZED}" if schemes else _SIZES
    rows = [*loaded.dtypes.items(), *schemes.items()]
    return section("Size when loaded", plots.measures([("as stored", loaded.stored), *rows]), note=note) if rows else ""


def _table(opened: Checkpoint, report: Any) -> str:
    def row(name: str, info: Any) -> tuple[str, ...]:
        s = report.stats.get(name)
        numbers = [""] * 5
        if s is not None:
            bad = f"{s.nan + s.inf:,}" if s.nan + s.inf else ""
            numbers = [*(_number(x) for x in (s.min, s.max, s.mean, s.std)), bad]
        return name, info.dtype, str(list(info.shape)), size(info.nbytes), *numbers

    header = ("tensor", "dtype", "shape", "size", "min", "max", "mean", "std", "NaN, Inf")
    rows = [row(name, info) for name, info in islice(opened.tensors.items(), _ROWS)]
    title = _some(len(opened.tensors), _ROWS, "tensor", "tensors")
    return table(title, header, rows, label="all tensors", words=3)


def _number(value: float) -> str:
    return "" if math.isnan(value) else figure(value, 4)


# ---- quantization error ----


def _quantized(opened: Checkpoint, shown: ReportContent, scheme: SchemeName, *, threads: int | None, bars: Bars) -> str:
    """Return the section on the quantization error, reading tensors one at a time."""
    errors, refused = _errors(opened, scheme, threads, bars)
    if not errors and not refused:
        return ""
    from ..quantize.quantization_error import COLUMNS

    worst = sorted(errors.items(), key=lambda item: item[1].snr_db)
    rows = [[name, *error.cells()] for name, error in worst[:_ROWS]]
    header = ["tensor", *COLUMNS]
    if refused:
        header.append("not quantized")
        rows = [[*row, ""] for row in rows]
        rows += [[name, "", "", "", reason] for name, reason in islice(refused.items(), _ROWS)]
    line = Line("signal-to-noise ratio in dB, higher is better", 2, lambda row: float(errors[row.name].snr_db))
    lines = [row for row in shown.layered if row.name in errors]
    title = f"{_some(len(errors) + len(refused), len(rows), 'tensor', 'tensors')}, worst first"
    return section(
        f"Error when quantized to {scheme}",
        plots.panels(lines, [line], log=False),
        table(title, header, rows, label=f"quantization error of {scheme}"),
    )


def _errors(
    opened: Checkpoint, scheme: SchemeName, threads: int | None, bars: Bars
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure the errors of tensors that `load_quantized` quantizes; list reasons why tensors cannot be quantized."""
    from ...errors import RangeError
    from ..quantize.checkpoint import ModelRules, Rules
    from ..quantize.quantization_error import QuantizationStats, quantization_error
    from ..quantize.quantize import quantize
    from ..sources.catalog import Catalog

    catalog = Catalog.of(opened)
    rules = Rules(scheme, None)
    rules.schema = ModelRules.of(catalog).schema
    errors: dict[str, QuantizationStats] = {}
    refused: dict[str, str] = {}
    with bars(scheme) as progress:
        done, total = 0, sum(catalog.about(name).nbytes for name in catalog)
        for name in catalog:
            about = catalog.about(name)
            done += about.nbytes
            if name in catalog.codes or about.quantized:
                refused[name] = "holds codes, not weights" if name in catalog.codes else "is already quantized"
            elif rules.plan(name, about).scheme is not None:
                value = catalog.array(name, threads)
                axis = usual_axis(scheme, about.shape)
                try:
                    quantized = quantize(value, scheme, axis=axis, threads=threads)
                except RangeError as problem:
                    refused[name] = str(problem)
                else:
                    errors[name] = quantization_error(value, quantized)
            if progress is not None:
                progress(done, total)
    return errors, refused
