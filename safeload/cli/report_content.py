"""The sections of the page of ``safeload report``: findings, content, charts, sizes, tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ..base.layout import figure
from ..base.scheme import usual_axis
from ..base.text import show, size
from ..checkpoint import Checkpoint
from ..operations.quantize.quantize import SchemeName
from . import report_plots as plots
from .common import bar
from .report_kinds import ReportContent, content
from .report_page import collapsible, facts, finding, part, section, table
from .report_plots import Line
from .report_source import File

# Most rows of a table on the page, and most tensors of one group of findings; browsers are slow with more.
_ROWS = 5000
_LISTED = 1000

# Most groups of findings.
_GROUPS = 500

# Most metadata entries, and most characters of each.
_METADATA, _LENGTH = 100, 200

_HEAT = (
    "How many of the values of a kind have this absolute value. Each row is compared with its own fullest column. "
    "Zeros, NaN and infinity are left out."
)
_BARS = "Colours are those of the layers below."
_SIZES = "Memory for all arrays when they are loaded with this dtype, or by load_quantized with this scheme."
_QUANTIZED = "There embeddings, norms, biases and what does not fit the scheme stay float32."

_SPREAD = (
    Line("largest absolute value", 1, lambda one: float(one.stats.absmax)),
    Line("standard deviation", 0, lambda one: float(one.stats.std)),
)


def found_section(found: Any) -> str:
    """What `safeload.validate` found; those that say the same of several tensors are one."""
    from ..operations.validate.findings import gather

    groups = [group for listed in (found.errors, found.warnings, found.notes) for group in gather(listed)]
    items = []
    for first, more in groups[:_GROUPS]:
        others = [(other.tensor or "file", other.message) for other in more[:_LISTED]]
        left = max(0, len(more) - _LISTED)
        items.append(finding(first.severity, first.code, first.tensor or "file", first.message, others, left))
    if not items:
        return ""
    left = len(groups) - len(items)
    rest = f'<p class="soft">and {left:,} more; safeload check --json lists every one.</p>' if left > 0 else ""
    return section("Findings", f'<ul class="findings">{"".join(items)}</ul>', rest)


def sections(opened: Checkpoint, found: Any, scheme: SchemeName | None, threads: int | None) -> Iterator[str]:
    """The sections about a checkpoint that could be opened.

    Args:
        opened: the checkpoint.
        found: the `safeload.ValidationReport` about it, with histograms.
        scheme: also show the quantization error of this scheme.
        threads: None: chosen automatically.
    """
    infos = opened.tensors
    shown = content({name: info.nbytes for name, info in infos.items()}, found.stats)
    metadata = [(key, _value(value)) for key, value in islice(opened.metadata.items(), _METADATA)]
    listed = (
        collapsible(
            _some(len(opened.metadata), _METADATA, "entry of metadata", "entries of metadata"),
            facts(metadata, "pairs"),
            rows=len(metadata),
        )
        if metadata
        else ""
    )
    yield section("Content", facts(_facts(opened, found), "tiles"), listed)
    if not infos:
        return
    layered = bool(shown.layered)
    layers = len({one.layer for one in shown.layered})
    few = f"The first {plots.LAYERS} of {layers:,} layers." if layers > plots.LAYERS else ""
    by_layer = (
        part("By layer", (f'<p class="soft small">{few}</p>' if few else "") + plots.stacks(shown)) if layered else ""
    )
    yield section("Where the bytes are", plots.bars(shown), by_layer, note=_BARS if layered else "")
    yield _sizes(opened)
    lines = [one for one in shown.layered if one.stats is not None]
    drawn = plots.panels(lines, _SPREAD, log=True)
    if drawn:
        yield section("Values over the layers", plots.legend(_SPREAD), drawn, note=few)
    known = [one for one in shown.tensors if one.stats is not None]
    heat = plots.heat(known, _lowest())
    if heat:
        yield section("How large the values are", plots.shades(), heat, note=_HEAT)
    if scheme is not None:
        yield _quantized(opened, shown, scheme, threads)
    yield section("Tensors", _table(opened, found))


def digest_section(files: Sequence[File]) -> str:
    """SHA-256 of each file, where there are several."""
    rows = [(os.path.basename(file.path), file.digest, f"{file.nbytes:,}") for file in files if file.digest is not None]
    if len(files) < 2 or not rows:
        return ""
    title = _some(len(rows), _ROWS, "file", "files")
    header = ("file", "SHA-256", "bytes")
    return section("Files", table(title, header, rows[:_ROWS], label="SHA-256 of each file", words=2))


def _lowest() -> int:
    from ..operations.measure.stats import HISTOGRAM_EDGES

    return round(math.log2(HISTOGRAM_EDGES[0]))


def _some(count: int, most: int, one: str, many: str) -> str:
    """Title of a list that may be cut."""
    what = f"{count:,} {one if count == 1 else many}"
    return what if count <= most else f"the first {most:,} of {what}"


def _value(value: Any) -> str:
    if not isinstance(value, str):
        return show(value)
    return value if len(value) <= _LENGTH else f"{value[:_LENGTH]}…"


def _facts(opened: Checkpoint, found: Any) -> Iterator[tuple[str, str]]:
    yield "format", opened.format
    yield "tensors", f"{found.tensors:,}"
    yield "parameters", f"{found.parameters:,}"
    yield "size of the tensors", size(found.nbytes)
    totals: dict[str, int] = {}
    for info in opened.tensors.values():
        totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
    if totals:
        yield "dtypes", ", ".join(sorted(totals, key=lambda code: -totals[code]))
    if found.schema is not None:
        yield "schema", found.schema


def _sizes(opened: Checkpoint) -> str:
    """What the checkpoint takes in memory as each dtype and scheme."""
    from ..operations.measure.sizes import sizes

    found = sizes(opened)
    whole = found.dtypes.get("float32")
    schemes = {
        name: total for name, total in found.schemes.items() if total != whole
    }  # or there is nothing to quantize
    note = f"{_SIZES} {_QUANTIZED}" if schemes else _SIZES
    rows = [*found.dtypes.items(), *schemes.items()]
    return section("Size when loaded", plots.measures([("as stored", found.stored), *rows]), note=note) if rows else ""


def _table(opened: Checkpoint, found: Any) -> str:

    def row(name: str, info: Any) -> tuple[str, ...]:
        s = found.stats.get(name)
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


def _quantized(opened: Checkpoint, shown: ReportContent, scheme: SchemeName, threads: int | None) -> str:
    """The section about the quantization error, with one tensor in memory at a time."""
    errors, refused = _errors(opened, scheme, threads)
    if not errors and not refused:
        return ""
    worst = sorted(errors.items(), key=lambda item: item[1].snr_db)
    rows = [[n, f"{e.max_error:.4g}", f"{e.rms_error:.4g}", f"{e.snr_db:.2f}"] for n, e in worst[:_ROWS]]
    header = ["tensor", "max error", "RMS error", "SNR in dB"]
    if refused:
        header.append("not quantized")
        rows = [[*row, ""] for row in rows]
        rows += [[name, "", "", "", reason] for name, reason in islice(refused.items(), _ROWS)]
    line = Line("signal-to-noise ratio in dB, more is better", 2, lambda one: float(errors[one.name].snr_db))
    drawn = plots.panels([one for one in shown.layered if one.name in errors], [line], log=False)
    title = f"{_some(len(errors) + len(refused), len(rows), 'tensor', 'tensors')}, worst first"
    return section(
        f"Error when quantized to {scheme}",
        plots.legend([line]) + drawn if drawn else "",
        table(title, header, rows, label=f"quantization error of {scheme}"),
    )


def _errors(opened: Checkpoint, scheme: SchemeName, threads: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Errors of the tensors that `load_quantized` quantizes, and why some tensors cannot be quantized."""
    from ..errors import RangeError
    from ..operations.quantize.checkpoint import ModelRules, Rules
    from ..operations.quantize.quantization_error import QuantizationError, quantization_error
    from ..operations.quantize.quantize import quantize
    from ..operations.sources.catalog import Catalog

    catalog = Catalog.of(opened)
    rules = Rules(scheme, None)
    rules.schema = ModelRules.of(catalog).schema
    errors: dict[str, QuantizationError] = {}
    refused: dict[str, str] = {}
    with bar(scheme) as progress:
        done, total = 0, sum(catalog.about(name).nbytes for name in catalog)
        for name in catalog:
            about = catalog.about(name)
            done += about.nbytes
            if name in catalog.codes or about.quantized:
                refused[name] = "holds codes, not weights" if name in catalog.codes else "is quantized already"
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
