"""``safeload report``: an HTML page with plots of the content of a file."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from ..base.scheme import SCHEMES, usual_axis
from ..base.text import plural, printable, size
from ..checkpoint import Checkpoint
from ..engine.atomic_file import write_text
from ..operations.quantize import SchemeName
from .common import STATUS, add_command, add_json, add_opening, add_path, add_threads, bar, open_path
from .report_page import collapsible, facts, findings, page, picture, section, table

_EPILOG = f"""examples:
  safeload report model.safetensors -o report.html
  safeload report Llama-3.2-1B/ --quantize q4_0 -o llama.html

{STATUS} The page is also written for a bad file. Needs matplotlib: pip install 'safeload[report]'."""

_HISTOGRAMS = "Darker cells hold more values of a kind. Zeros and values that are not finite are left out."

# Most rows of a table on the page; browsers are slow with more.
_ROWS = 5000


def register(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "report",
        help="write an HTML page with plots",
        description="Writes one HTML page that works offline: the content of the file, the distribution of its bytes, "
        "absmax and standard deviation over the layers, histograms, the findings of check, and with --quantize the "
        "quantization error.",
        epilog=_EPILOG,
    )
    add_path(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="report.html", help="the page to write; report.html by default"
    )
    parser.add_argument(
        "--quantize",
        choices=tuple(SCHEMES),
        help="also show the error of each tensor when quantized to this scheme",
    )
    add_opening(parser)
    add_threads(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the page about ``options.path``; returns the exit status."""
    try:
        from .report_plots import tensor  # noqa: F401 - matplotlib would add a second to other commands
    except ImportError:
        print("safeload: report needs matplotlib: pip install 'safeload[report]'", file=sys.stderr)
        return 2
    from ..operations.validate.run import settings, validate_path

    with bar("report") as progress:
        wanted = settings(threads=options.threads, progress=progress, histogram=True)
        found = validate_path(options.path, lambda: open_path(options.path, options), wanted)
    sections = []
    if found.files:
        with open_path(options.path, options) as opened:
            sections = list(_sections(opened, found, options))
    mood = "bad" if not found.ok else "odd" if found.warnings else "good"
    title = os.path.basename(os.path.normpath(options.path)) or options.path
    text = page(title, found.verdict, mood, [_findings(found), *sections])
    write_text(options.output, text)
    nbytes = os.path.getsize(options.output)
    if options.json:
        print(json.dumps({"output": options.output, "nbytes": nbytes, "ok": found.ok}, indent=1))
    else:
        print(f"{printable(options.output)}: {size(nbytes)}; {printable(options.path)} is {found.verdict}")
    return 0 if found.ok else 1


def _findings(found: Any) -> str:
    from ..operations.validate.findings import gather

    rows = []
    for listed in (found.errors, found.warnings, found.notes):
        for group in gather(listed):
            finding = group.first
            message = finding.message + (f"; {group.others}" if group.more else "")
            rows.append((finding.severity, finding.code, finding.tensor or "file", message))
    return section("What check found", findings(rows))


def _sections(opened: Checkpoint, found: Any, options: argparse.Namespace) -> Iterator[str]:
    from ..operations.stats import HISTOGRAM_EDGES
    from .report_plots import bytes_by_kind, bytes_by_layer, curves, histograms, layered, tensor

    infos = opened.tensors
    tensors = [tensor(name, info.nbytes, found.stats.get(name)) for name, info in infos.items()]
    yield section("What is in it", facts(_facts(opened, found)))
    if tensors:
        layers = layered(tensors)
        by_layer = picture(bytes_by_layer(layers)) if layers else ""
        yield section("Where the bytes are", picture(bytes_by_kind(tensors)), by_layer)
        lines = [one for one in layers if one.stats is not None]
        if lines:
            yield section("Over the layers", picture(curves(lines)))
        known = [one for one in tensors if one.stats is not None]
        map_ = histograms(known, HISTOGRAM_EDGES)
        yield section("How large values are", picture(map_), note=_HISTOGRAMS)
        if options.quantize:
            yield _quantized(opened, layers, options)
        yield section("Tensors", collapsible(f"all {plural(len(infos), 'tensor')}", _table(opened, found)))


def _facts(opened: Checkpoint, found: Any) -> Iterator[tuple[str, str]]:
    yield "format", opened.format
    yield "files", f"{len(opened.files):,}"
    yield "tensors", f"{found.tensors:,}"
    yield "parameters", f"{found.parameters:,}"
    yield "bytes", size(found.nbytes)
    totals: dict[str, int] = {}
    for info in opened.tensors.values():
        totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
    yield "dtypes", ", ".join(sorted(totals, key=lambda code: -totals[code]))
    if found.schema is not None:
        yield "schema", found.schema
    for key, value in list(opened.metadata.items())[:20]:
        yield f"metadata: {key}", str(value)[:200]


def _table(opened: Checkpoint, found: Any) -> str:

    def row(name: str, info: Any) -> tuple[str, ...]:
        s = found.stats.get(name)
        numbers = [""] * 5
        if s is not None:
            bad = f"{s.nan + s.inf:,}" if s.nan + s.inf else ""
            numbers = [*(_number(x) for x in (s.min, s.max, s.mean, s.std)), bad]
        return name, info.dtype, str(list(info.shape)), size(info.nbytes), *numbers

    header = ("tensor", "dtype", "shape", "size", "min", "max", "mean", "std", "NaN, Inf")
    rows = [row(name, info) for name, info in list(opened.tensors.items())[:_ROWS]]
    return table(header, rows, left=frozenset((0, 1, 2)))


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


def _quantized(opened: Checkpoint, layers: Any, options: argparse.Namespace) -> str:
    """The section about the quantization error, with one tensor in memory at a time."""
    from .report_plots import noise

    scheme = options.quantize
    errors, refused = _errors(opened, scheme, options.threads)
    if not errors and not refused:
        return ""
    worst = sorted(errors.items(), key=lambda item: item[1].snr_db)
    rows = [(n, f"{e.max_error:.4g}", f"{e.rms_error:.4g}", f"{e.snr_db:.2f}") for n, e in worst[:_ROWS]]
    rows += [(name, reason, "", "") for name, reason in refused.items()]
    drawn = [one for one in layers if one.name in errors]
    lines = picture(noise(drawn, errors, scheme)) if drawn else ""
    listed = table(("tensor", "max error", "RMS error", "SNR in dB"), rows, left=frozenset((0,)))
    return section(f"Quantized to {scheme}", lines, collapsible(plural(len(rows), "tensor"), listed))


def _errors(opened: Checkpoint, scheme: SchemeName, threads: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Errors of the tensors that `load_quantized` quantizes, and why some tensors cannot be quantized."""
    from ..errors import RangeError
    from ..operations.catalog import Catalog
    from ..operations.quantization_error import QuantizationError, quantization_error
    from ..operations.quantize import quantize
    from ..operations.quantize_checkpoint import Model, Rules

    catalog = Catalog.of(opened)
    rules = Rules(scheme, None)
    rules.schema = Model.of(catalog).schema
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
