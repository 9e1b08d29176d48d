"""Write an HTML page about a checkpoint: findings, contents, charts, sizes, tables, and the digests of its files."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, cast

from ..._version import __version__
from ...base.layout import figure
from ...base.paths import PathLike, native_path
from ...base.scheme import parse, usual_axis
from ...base.table import TensorInfo
from ...base.text import plural, show, size
from ...base.url import is_url
from ...checkpoint import Checkpoint
from ...engine.codes.pieces import Meter, in_order
from ...engine.run.progress import Bars, Progress, bars
from ...errors import RangeError, SafeloadError, public
from ...formats.registry import UnknownGlobals
from ...loading import entry as loading
from ...stores.places import Located, is_file_object
from ..folders.destinations import Output
from ..measure.stats import HISTOGRAM_EDGES, TensorStats
from ..quantize.quantize import SchemeName
from ..sources.catalog import Catalog
from ..validate.check import settings, validate_path
from ..validate.findings import CheckReport, gather
from . import page
from .page import Line, ReportContent, collapsible, content, facts, is_page, section, table

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

# Bytes per read: enough to amortize the call.
_PIECE = 1 << 20

# The variable with the date of the page, in seconds since 1970: https://reproducible-builds.org/specs/source-date-epoch/
_EPOCH = "SOURCE_DATE_EPOCH"


@public
def report(
    path: PathLike | Located,
    dst: PathLike,
    *,
    quantize: SchemeName | None = None,
    digest: bool = True,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress = None,
) -> CheckReport:
    """Write an HTML page with charts about a checkpoint, as ``safeload report`` does.

    The page has the findings of `check`, the contents, a size breakdown, the size when loaded or quantized, values by
    layer, the magnitude distribution, and the SHA-256 of the files. It is a single file that works offline. A bad file
    gets a page, too.

    Args:
        path: a weight file, a folder, an index.json, a URL, or a file object opened in binary mode.
        dst: path of the page.
        quantize: also show the error of each tensor when it is quantized to this scheme, such as "q4_0".
        digest: False omits the SHA-256 digests, which need a second read, and should be passed for checkpoints larger
            than memory. Digests are always omitted for URLs.
        root: nested container to report about, see `open`.
        unknown_globals: see `open`.
        stored: True shows codes and scales of a quantized checkpoint as the files store them.
        storage_options: options of the filesystem behind a URL, see `open`.
        overwrite: True replaces ``dst`` even if it is not a page that safeload wrote. Source files are never replaced.
        threads: number of threads; None chooses it.
        progress: True for a bar of each step, or a callable that gets (bytes_done, bytes_total) of each step.

    Returns:
        The report of the check, which is false if there are errors.

    Raises:
        FileExistsError: ``dst`` exists and is not a page that safeload wrote.
        ValueError: ``dst`` is a source file or a URL, ``path`` is a pipe, or ``quantize`` is not a scheme.
        OSError: a file cannot be opened or written.

    Example:
        >>> import safeload
        >>> safeload.report("tiny-llama", "tiny-llama.html").ok
        True
    """
    scheme = None if quantize is None else cast(SchemeName, parse(quantize))
    place, _ = native_path(dst)
    if is_file_object(path) and not getattr(path, "seekable", bool)():
        raise ValueError("report reads its source twice, and a pipe only once: save it to a file first")

    opening = {
        "root": root,
        "unknown_globals": unknown_globals,
        "stored": stored,
        "storage_options": storage_options,
    }
    sources = [os.fspath(path)] if isinstance(path, (str, os.PathLike)) else []
    output = Output("dst", place, "report", is_page, overwrite=overwrite, sources=sources)
    output.check()
    text, checked = page_of(path, opening, scheme, digest=digest, threads=threads, bars=bars(progress))
    output.write(text, checked.files)
    return checked


def page_of(
    path: PathLike | Located,
    opening: Mapping[str, Any],
    scheme: SchemeName | None,  # show the error of quantizing to this scheme
    *,
    digest: bool,  # show the SHA-256 of local files
    threads: int | None,
    bars: Bars,
) -> tuple[str, CheckReport]:
    """Return the page about a checkpoint, and the report of its check."""
    date = _now()
    with bars("report") as progress:
        report = validate_path(path, opening, settings(threads=threads, progress=progress, histogram=True))
    parts = [_findings(report)]
    local = isinstance(path, (str, os.PathLike)) and not is_url(report.source)
    sizes = {file: _size_of(file) for file in report.files or [report.source]} if local else {}
    digests = _digests(sizes, threads, bars) if local and digest else {}
    try:
        checkpoint = loading.open(path, **opening) if report.files else None
    except (SafeloadError, OSError):
        if report.ok:
            raise
        checkpoint = None  # the findings say why
    if checkpoint is not None:
        with checkpoint as opened:
            parts += _sections(opened, report, scheme, threads, bars)
            if not local:  # read only once
                sizes = {file.path: file.identity[0] for file in opened.weight_files}
    rows = [(os.path.basename(file), value, f"{sizes[file]:,}") for file, value in digests.items()]
    if len(sizes) > 1 and rows:
        title = _some(len(rows), _ROWS, "file", "files")
        listed = table(title, ("file", "SHA-256", "bytes"), rows[:_ROWS], label="SHA-256 of each file", words=2)
        parts.append(section("Files", listed))
    mood = "bad" if report.errors else "odd" if report.warnings else "calm" if report.notes else "good"
    checked = f"checked: {report.checked}" if report.tensors else ""
    name = os.path.abspath(report.source) if local else report.source.rstrip("/")
    title = os.path.basename(name) or report.source
    about = facts(_about(report.source, sizes, digests, date), "meta")
    return page.page(title, report.verdict, mood, checked=checked, about=about, sections=parts), report


# ---- sections ----


def _findings(report: CheckReport) -> str:
    """Return the findings of `safeload.check`; equal findings about several tensors form a group."""
    groups = gather(report)
    items = []
    for first, *more in groups[:_GROUPS]:
        similar = [(item.tensor or "file", item.message) for item in more[:_LISTED]]
        items.append(page.finding(first, similar=similar, left=max(0, len(more) - _LISTED)))
    if not items:
        return ""
    left = len(groups) - len(items)
    rest = f'<p class="soft">and {left:,} more; safeload check --json lists all.</p>' if left > 0 else ""
    return section("Findings", f'<ul class="findings">{"".join(items)}</ul>', rest)


def _sections(
    opened: Checkpoint, report: CheckReport, scheme: SchemeName | None, threads: int | None, bars: Bars
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
    cut = f"The first {page.LAYERS} of {layers:,} layers." if layers > page.LAYERS else ""
    by_layer = page.part("By layer", page.soft(cut) + page.stacks(shown)) if layered else ""
    yield section("Size breakdown", page.bars(shown), by_layer, note=_BARS if layered else "")
    yield _sizes(opened)
    lines = [row for row in shown.layered if row.stats is not None]
    yield section("Values by layer", page.panels(lines, _SPREAD, log=True), note=cut)
    measured = [row for row in shown.tensors if row.stats is not None]
    yield section("Magnitude distribution", page.heat(measured, round(math.log2(HISTOGRAM_EDGES[0]))), note=_HEAT)
    if scheme is not None:
        yield _quantized(opened, shown, scheme, threads, bars)
    header = ("tensor", "dtype", "shape", "size", "min", "max", "mean", "std", "NaN, Inf")
    rows = [_row(info, report.stats.get(name)) for name, info in islice(infos.items(), _ROWS)]
    title = _some(len(infos), _ROWS, "tensor", "tensors")
    yield section("Tensors", table(title, header, rows, label="all tensors", words=3))


def _row(info: TensorInfo, stats: TensorStats | None) -> tuple[str, ...]:
    """Return the cells of a tensor."""
    numbers = [""] * 5
    if stats is not None:
        bad = f"{stats.nan + stats.inf:,}" if stats.nan + stats.inf else ""
        values = (stats.min, stats.max, stats.mean, stats.std)
        numbers = [*("" if math.isnan(value) else figure(value, 4) for value in values), bad]
    return info.name, info.dtype, str(list(info.shape)), size(info.nbytes), *numbers


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
    return section("Size when loaded", page.measures([("as stored", loaded.stored), *rows]), note=note) if rows else ""


# ---- quantization error ----


def _quantized(opened: Checkpoint, shown: ReportContent, scheme: SchemeName, threads: int | None, bars: Bars) -> str:
    """Return the section on the quantization error, reading tensors one at a time."""
    errors, refused = _errors(opened, scheme, threads, bars)
    if not errors and not refused:
        return ""
    from ..quantize.quantization_error import COLUMNS

    worst = sorted(errors.items(), key=lambda item: item[1].snr_db)
    header, rows = ["tensor", *COLUMNS], [[name, *error.cells()] for name, error in worst[:_ROWS]]
    if refused:
        header.append("not quantized")
        rows = [[*row, ""] for row in rows]
        rows += [[name, "", "", "", reason] for name, reason in islice(refused.items(), _ROWS)]
    line = Line("signal-to-noise ratio in dB, higher is better", 2, lambda row: float(errors[row.name].snr_db))
    title = f"{_some(len(errors) + len(refused), len(rows), 'tensor', 'tensors')}, worst first"
    return section(
        f"Error when quantized to {scheme}",
        page.panels([row for row in shown.layered if row.name in errors], [line], log=False),
        table(title, header, rows, label=f"quantization error of {scheme}"),
    )


def _errors(
    opened: Checkpoint, scheme: SchemeName, threads: int | None, bars: Bars
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure the errors of tensors that `load_quantized` quantizes; list reasons why tensors cannot be quantized."""
    from ..quantize.quantization_error import quantization_error
    from ..quantize.quantize import quantize
    from ..quantize.rules import Rules, schema_of

    catalog, rules = Catalog.of(opened), Rules(scheme, None)
    rules.schema = schema_of(catalog)
    errors: dict[str, Any] = {}
    refused: dict[str, str] = {}
    sizes = catalog.sizes([*catalog])
    with bars(scheme) as progress:
        meter = Meter(progress, sum(sizes.values()))
        for name, nbytes in sizes.items():
            about = catalog.about(name)
            if name in catalog.codes or about.quantized:
                refused[name] = "holds codes, not weights" if name in catalog.codes else "is already quantized"
            elif rules.plan(name, about).scheme is not None:
                value = catalog.array(name, threads)
                try:
                    quantized = quantize(value, scheme, axis=usual_axis(scheme, about.shape), threads=threads)
                    errors[name] = quantization_error(value, quantized)
                except RangeError as problem:
                    refused[name] = str(problem)
            meter.add(nbytes)
    return errors, refused


# ---- source files ----


def _digests(sizes: Mapping[str, int | None], threads: int | None, bars: Bars) -> dict[str, str]:
    """Return the SHA-256 of files, without unreadable files, hashing several files at a time."""
    files = [file for file, nbytes in sizes.items() if nbytes is not None]
    total = sum(filter(None, sizes.values()))
    with bars("sha256") as progress:
        meter = Meter(progress, total)
        digests = in_order(lambda file: _sha256(file, meter), files, threads, total)
        return {file: value for file, value in zip(files, digests, strict=True) if value is not None}


def _about(
    path: str, nbytes: Mapping[str, int | None], digests: Mapping[str, str], seconds: int
) -> Iterator[tuple[str, str]]:
    """Yield names and values of the head: path, date, size, digest, version."""
    yield "Path", path
    yield "Date", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    sizes = [size for size in nbytes.values() if size is not None]
    if sizes:
        count = f" in {plural(len(sizes), 'file')}" if len(sizes) > 1 else ""
        yield "Size", f"{size(sum(sizes))}{count} ({sum(sizes):,} bytes)"
    if digests:
        yield "SHA-256", next(iter(digests.values())) if len(nbytes) == 1 else "see the table of files at the end"
    yield "Written by", f"safeload {__version__}"


def _now() -> int:
    """Return the time in seconds since 1970, or SOURCE_DATE_EPOCH for reproducible pages."""
    text = os.environ.get(_EPOCH)
    if text is None:
        return int(time.time())
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) < 253_402_300_800):
        raise ValueError(f"{_EPOCH} must be seconds since 1970, got {text[:40]!r}")
    return int(text)


def _size_of(path: str) -> int | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None  # reading a pipe would block


def _sha256(file: str, meter: Meter) -> str | None:
    digest = hashlib.sha256()
    memory = memoryview(bytearray(_PIECE))
    try:
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(memory):
                digest.update(memory[:count])
                meter.add(count)
    except OSError:
        return None
    return digest.hexdigest()
