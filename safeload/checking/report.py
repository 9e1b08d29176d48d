"""Write an HTML page about a checkpoint: findings, contents, charts, sizes, tables, and the digests of its files.

The page is one file without scripts or external resources. Text is HTML, so that it keeps its size on a phone; only
marks are SVG, stretched to the available width. Colours are classes of report.css, which has both modes. Charts show
groups of tensors: by kind over the layers, or by module.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files
from itertools import islice, pairwise
from string import Template
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from .._version import __version__
from ..conversion.catalog import Catalog
from ..conversion.destinations import Output
from ..conversion.origin import entry_of
from ..conversion.quantize import SchemeName
from ..core import checkpoint as loading
from ..core.files import LOCAL, Located, Location
from ..core.memory import thread_count
from ..core.names import grouped, pattern_of
from ..core.packing import parse_scheme, usual_axis
from ..core.progress import Bars, Meter, Progress, bars
from ..core.registry import UnknownGlobals
from ..core.showing import escaped, figure
from ..core.text import PathLike, clip, native_path, plural, show, size, unit
from ..core.thread_group import in_order
from ..errors import RangeError, SafeloadError, public
from ..remote.places import is_file_object
from ..remote.url import is_url
from .check import settings, validate_path
from .findings import CheckReport, gather
from .info import totals_of
from .stats import HISTOGRAM_EDGES

# Limits of the page, because browsers are slow with more.
_ROWS, _GROUPS, _LISTED = 5000, 500, 1000  # rows of a table, groups of findings, tensors in a group
_METADATA, _LENGTH = 100, 200  # metadata entries, and characters in each
_PRINTED, _OPEN = 50, 20  # rows of a list that is printed even if it is collapsed, and of a table that is open
# Kinds with their own bar or panel (the rest share one), layer kinds with their own colour, kinds in the heat map,
# layers in a chart, layers with a dot at each point of a line.
KINDS, _COLOURS, _HEAT_ROWS, LAYERS, _DOTS = 12, 9, 16, 512, 40
_LABEL = 48  # characters of a label in a chart
_DEPTH = 8  # name parts in a module: names in hostile files have thousands of dots
_HEIGHT = 1000  # of a drawing, in SVG units; the page stretches it
_SHADES = (0.16, 0.32, 0.5, 0.72, 1.0)  # opacities; the palest must stay visible

_HEAT = (
    "Number of values by magnitude, for each kind of tensor. Shades are relative to the fullest column of a row. "
    "Zeros, NaN and infinity are left out."
)
_BARS = "Colours match the layers below."
_SIZES = "Memory of all arrays if loaded with this dtype, or by load_quantized with this scheme."
_QUANTIZED = "With a scheme, embeddings, norms, biases and tensors that do not fit it stay float32."
_BARS_HEAD = (
    '<thead><tr><th scope="col" class="name">tensors</th><td></td><th scope="col" class="number">size</th>'
    '<th scope="col" class="number share">share</th></tr></thead>'
)
_MARKS = {"good": "✓", "calm": "✓", "odd": "!", "bad": "✗"}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# A line of a panel: its title, its colour, and the value of a tensor.
Line: TypeAlias = "tuple[str, int, Callable[[ReportRow], float]]"

_SPREAD: tuple[Line, ...] = (
    ("largest absolute value", 1, lambda row: float(row.stats.absmax)),
    ("standard deviation", 0, lambda row: float(row.stats.std)),
)

# Identifies pages written by safeload.
_GENERATOR = '<meta name="generator" content="safeload '
# The variable with the date of the page, in seconds since 1970: https://reproducible-builds.org/specs/source-date-epoch/
_EPOCH = "SOURCE_DATE_EPOCH"

# At most nine digits: larger numbers are not layers, and Python refuses to parse thousands of digits.
_FIRST_NUMBER = re.compile(r"(?:^|\.)([0-9]{1,9})(?=\.|$)", re.ASCII)
_DIGITS = re.compile(r"[0-9]+", re.ASCII)
# The power of two at the begin of the first bin of magnitudes.
_LOWEST = round(math.log2(HISTOGRAM_EDGES[0]))


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
    scheme = None if quantize is None else cast(SchemeName, parse_scheme(quantize))
    place, _ = native_path(dst)
    if is_file_object(path) and not getattr(path, "seekable", bool)():
        raise ValueError("report reads its source twice, and a pipe only once: save it to a file first")

    opening = {"root": root, "unknown_globals": unknown_globals, "stored": stored, "storage_options": storage_options}
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
    sharded = len(report.files) > 1
    sizes = _sizes_of(report.files or [report.source]) if local else {}
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
    if sharded and rows:
        title, header = _some(len(rows), _ROWS, "file", "files"), ("file", "SHA-256", "bytes")
        parts.append(section("Files", table(title, header, rows[:_ROWS], label="SHA-256 of each file", words=2)))
    # "calm": parts are unchecked.
    mood = "bad" if report.errors else "odd" if report.warnings else "calm" if report.notes else "good"
    name = os.path.abspath(report.source) if local else report.source.rstrip("/")
    about = {"Path": report.source, "Date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(date))}
    if sizes:
        count, nbytes = f" in {plural(len(sizes), 'file')}" if len(sizes) > 1 else "", sum(sizes.values())
        about["Size"] = f"{size(nbytes)}{count} ({nbytes:,} bytes)"
    if digests:
        about["SHA-256"] = "see the table of files at the end" if sharded else next(iter(digests.values()))
    about["Written by"] = f"safeload {__version__}"
    folder = files(__package__)
    style = re.sub(r"/\*.*?\*/", "", folder.joinpath("report.css").read_text("utf-8"), flags=re.DOTALL)
    template = "".join(map(str.strip, folder.joinpath("report.html").read_text("utf-8").splitlines()))
    page = Template(template).substitute(
        mood=mood,
        mark=_MARKS[mood],
        version=__version__,
        style=re.sub(r"\s+", " ", style).strip(),
        generator=_GENERATOR,
        title=escaped(os.path.basename(name) or report.source),
        verdict=escaped(report.verdict),
        checked=escaped(f"checked: {report.checked}") if report.tensors else "",
        about=facts(about.items(), "meta"),
        sections="".join(parts),
    )
    return f"<!doctype html>\n{page}\n", report


def _now() -> int:
    """Return the time in seconds since 1970, or SOURCE_DATE_EPOCH for reproducible pages."""
    text = os.environ.get(_EPOCH)
    if text is None:
        return int(time.time())
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) < 253_402_300_800):
        raise ValueError(f"{_EPOCH} must be seconds since 1970, got {text[:40]!r}")
    return int(text)


def _sizes_of(files: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files, without those that are missing or, as a pipe, would block a reader."""
    sizes = {}
    for file in files:
        with suppress(OSError, ValueError):
            status = os.stat(file)
            if stat.S_ISREG(status.st_mode):
                sizes[file] = status.st_size
    return sizes


def _digests(sizes: Mapping[str, int], threads: int | None, bars: Bars) -> dict[str, str]:
    """Return the SHA-256 of files, without unreadable files, hashing several files at a time."""
    total = sum(sizes.values())
    with bars("sha256") as progress:
        meter = Meter(progress, total)

        def digest(file: str) -> str | None:
            try:
                return str(entry_of(Location(LOCAL, file), meter.add)["sha256"])
            except (OSError, SafeloadError):
                return None

        digests = zip(sizes, in_order(digest, sizes, thread_count(total, threads)), strict=True)
        return {file: value for file, value in digests if value is not None}


# ---- sections ----


def _findings(report: CheckReport) -> str:
    """Return the findings of `safeload.check`; equal findings about several tensors form a group."""
    groups = gather(report)
    items = []
    for first, *more in groups[:_GROUPS]:
        lines = [f"<li><code>{escaped(f.tensor or 'file')}</code> {escaped(f.message)}</li>" for f in more[:_LISTED]]
        if len(more) > _LISTED:
            lines.append(f"<li>and {len(more) - _LISTED:,} more; safeload check --json lists all</li>")
        inside = f"<ul>{''.join(lines)}</ul>" if lines else ""
        many = f'<span class="soft small">{plural(1 + len(more), "tensor")}</span>' if more else ""
        items.append(
            f'<li class="{escape(first.severity)}"><p class="what"><b>{escape(first.severity)}</b> '
            f"<code>{escaped(first.code)}</code>{many}</p>"
            f"<p><code>{escaped(first.tensor or 'file')}</code> {escaped(first.message)}</p>"
            f"{collapsible(f'{len(more):,} more like it', inside, rows=len(lines))}</li>"
        )
    if not items:
        return ""
    left = len(groups) - len(items)
    rest = f'<p class="soft">and {left:,} more; safeload check --json lists all.</p>' if left > 0 else ""
    return section("Findings", f'<ul class="findings">{"".join(items)}</ul>', rest)


def _sections(
    opened: loading.Checkpoint, report: CheckReport, scheme: SchemeName | None, threads: int | None, bars: Bars
) -> Iterator[str]:
    """Yield the sections about an open checkpoint; ``scheme`` adds its quantization error."""
    infos = opened.tensors
    shown = content({name: info.nbytes for name, info in infos.items()}, report.stats)
    tiles = {"format": opened.format, "tensors": f"{report.tensors:,}", "parameters": f"{report.parameters:,}"}
    tiles["tensor size"] = size(report.nbytes)
    if infos:
        tiles["dtypes"] = ", ".join(totals_of(infos.values()))
    if report.schema is not None:
        tiles["schema"] = report.schema
    metadata = []
    for key, value in islice(opened.metadata.items(), _METADATA):
        if not isinstance(value, str):
            value = show(value)
        elif len(value) > _LENGTH:
            value = f"{value[:_LENGTH]}…"
        metadata.append((key, value))
    title = _some(len(opened.metadata), _METADATA, "metadata entry", "metadata entries")
    listed = collapsible(title, facts(metadata, "pairs"), rows=len(metadata))
    yield section("Contents", facts(tiles.items(), "tiles"), listed)
    if not infos:
        return
    layers = len({row.layer for row in shown.layered})
    cut = f"The first {LAYERS} of {layers:,} layers." if layers > LAYERS else ""
    by_layer = f"<h3>By layer</h3>{soft(cut)}{stacks(shown)}" if layers else ""
    yield section("Size breakdown", bars_of(shown), by_layer, note=_BARS if layers else "")
    yield _sizes(opened)
    lines = [row for row in shown.layered if row.stats is not None]
    yield section("Values by layer", panels(lines, _SPREAD, log=True), note=cut)
    yield section("Magnitude distribution", heat(shown.tensors), note=_HEAT)
    if scheme is not None:
        yield _quantized(opened, shown, scheme, threads, bars)
    header = ("tensor", "dtype", "shape", "size", "min", "max", "mean", "std", "NaN, Inf")
    rows = []
    for name, info in islice(infos.items(), _ROWS):
        stats, numbers = report.stats.get(name), [""] * 5
        if stats is not None:
            measured_values = (stats.min, stats.max, stats.mean, stats.std)
            numbers = ["" if math.isnan(value) else figure(value, 4) for value in measured_values]
            numbers.append(f"{stats.nan + stats.inf:,}" if stats.nan + stats.inf else "")
        rows.append((name, info.dtype, str(list(info.shape)), size(info.nbytes), *numbers))
    title = _some(len(infos), _ROWS, "tensor", "tensors")
    yield section("Tensors", table(title, header, rows, label="all tensors", words=3))


def _some(count: int, limit: int, singular: str, plural: str) -> str:
    """Return the title of a list that is cut at a limit."""
    total = f"{count:,} {singular if count == 1 else plural}"
    return total if count <= limit else f"the first {limit:,} of {total}"


def _sizes(opened: loading.Checkpoint) -> str:
    """Return the section with the memory that the checkpoint takes as each dtype and scheme."""
    from .sizes import sizes

    loaded = sizes(opened)
    rows = [("as stored", loaded.stored), *loaded.dtypes.items(), *loaded.smaller.items()]
    drawn = [
        (escape(name), 0 if k else "o", total, f"{total / max(1, loaded.stored):.2f}x")
        for k, (name, total) in enumerate(rows)
    ]
    note = f"{_SIZES} {_QUANTIZED}" if loaded.smaller else _SIZES
    return section("Size when loaded", _bars(drawn, "name"), note=note) if len(rows) > 1 else ""


# ---- quantization error ----


def _quantized(
    opened: loading.Checkpoint, shown: ReportContent, scheme: SchemeName, threads: int | None, bars: Bars
) -> str:
    """Return the section on the errors of tensors that `load_quantized` quantizes, reading one at a time."""
    from ..conversion.in_memory import COLUMNS, quantization_error
    from ..conversion.quantize import quantize
    from ..conversion.rules import Rules, schema_of

    catalog, rules = Catalog.of(opened), Rules(scheme, None)
    rules.schema = schema_of(catalog)
    errors: dict[str, Any] = {}
    refused: dict[str, str] = {}  # reasons
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
    worst = sorted(errors.items(), key=lambda item: item[1].snr_db)
    header, rows = ["tensor", *COLUMNS], [[name, *error.cells()] for name, error in worst[:_ROWS]]
    if refused:
        header.append("not quantized")
        rows = [[*row, ""] for row in rows]
        rows += [[name, "", "", "", reason] for name, reason in islice(refused.items(), _ROWS)]
    if not rows:
        return ""
    line: Line = ("signal-to-noise ratio in dB, higher is better", 2, lambda row: float(errors[row.name].snr_db))
    title = f"{_some(len(errors) + len(refused), len(rows), 'tensor', 'tensors')}, worst first"
    return section(
        f"Error when quantized to {scheme}",
        panels([row for row in shown.layered if row.name in errors], [line], log=False),
        table(title, header, rows, label=f"quantization error of {scheme}"),
    )


# ---- parts of the page ----


def breakable(name: str) -> str:
    """Escape a name and allow line breaks after dots and underscores."""
    return re.sub(r"([._])(?=.)", r"\1<wbr>", escaped(name))


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, label: str, words: int = 1) -> str:
    """Return a table in a scrolling box, collapsed if it is long; ``words`` columns are text, the rest numbers."""
    kinds = ["name mono", *["word"] * (words - 1), *["number"] * (len(header) - words)]

    def row(cells: Sequence[str]) -> str:
        values = (f'<td class="{k}">{escaped(cell)}</td>' for k, cell in zip(kinds[1:], cells[1:], strict=True))
        return f'<tr><th scope="row" class="{kinds[0]}">{breakable(cells[0])}</th>{"".join(values)}</tr>'

    heads = "".join(
        f'<th scope="col" class="{kind.partition(" ")[0]}">{escaped(title)}</th>'
        for title, kind in zip(header, kinds, strict=True)
    )
    inside = (
        '<p class="hint">Scroll sideways to see all columns.</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table><thead><tr>'
        f"{heads}</tr></thead><tbody>{''.join(map(row, rows))}</tbody></table></div>"
    )
    return collapsible(title, inside, rows=len(rows), closed=len(rows) > _OPEN)


def section(title: str, *parts: str, note: str = "") -> str:
    """Return a section; empty if all its parts are empty."""
    return f"<section><h2>{escape(title)}</h2>{soft(note)}{''.join(parts)}</section>" if any(parts) else ""


def soft(note: str) -> str:
    """Return a note in small type."""
    return f'<p class="soft small">{escape(note)}</p>' if note else ""


def collapsible(title: str, inside: str, *, rows: int, closed: bool = True) -> str:
    """Return a collapsible list, "" for an empty one; on paper a short list is printed, and a long list named."""
    if not inside:
        return ""
    state = "" if closed else " open"
    short = ' class="short"' if rows <= _PRINTED else ""
    missing = "" if short else f'<p class="printed soft">Not printed: {escape(title)}.</p>'
    return f"<details{short}{state}><summary>{escape(title)}</summary>{inside}</details>{missing}"


def facts(pairs: Iterable[tuple[str, str]], kind: str) -> str:
    """Return names and values as "tiles", as "meta" data of the head, or as "pairs" of long texts."""
    items = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="{kind}">{items}</dl>' if items else ""


def is_page(head: bytes) -> bool:
    """Return True if a file with these first bytes is a report page."""
    return head.startswith(b"<!doctype html>") and _GENERATOR.encode() in head


# ---- groups of tensors ----


class ReportRow(NamedTuple):
    """A tensor in a chart."""

    name: str
    kind: str  # its name with ``{}`` for numbers, or its module
    layer: int | None  # the first number in its name
    nbytes: int
    stats: Any  # `safeload.TensorStats` or None


class ReportContent(NamedTuple):
    """The tensors of a checkpoint."""

    tensors: Sequence[ReportRow]
    layered: Sequence[ReportRow]  # tensors of the family of layers with the most bytes
    colours: Mapping[str, int]  # kind to colour number


def content(sizes: Mapping[str, int], stats: Mapping[str, Any]) -> ReportContent:
    """Sort tensors into kinds."""
    tensors, families = [], Counter[str]()
    for name, nbytes in sizes.items():
        number, kind = _FIRST_NUMBER.search(name), pattern_of(name)
        tensors.append(ReportRow(name, kind, None if number is None else int(number[1]), nbytes, stats.get(name)))
        if number is not None:
            families[kind.partition("{}")[0]] += nbytes
    family = max(families, key=families.__getitem__, default=None)
    layered = [row for row in tensors if row.layer is not None and row.kind.partition("{}")[0] == family]
    if len({row.layer for row in layered}) < 2:
        layered, modules = [], _modules([*sizes])
        tensors = [row._replace(kind=modules[row.name]) for row in tensors]
    return ReportContent(tensors, layered, {kind: k for k, kind in enumerate([*by_kind(layered)][:_COLOURS])})


def by_kind(tensors: Iterable[ReportRow]) -> dict[str, list[ReportRow]]:
    """Group tensors by kind, the kind with the most bytes first."""
    groups = grouped(tensors, lambda row: row.kind)
    return dict(sorted(groups.items(), key=lambda group: -_nbytes(group[1])))


def _nbytes(tensors: Iterable[ReportRow]) -> int:
    return sum(row.nbytes for row in tensors)


def labels(kinds: Iterable[str]) -> dict[str, str]:
    """Shorten kinds to labels without layer path and ".weight", unless two labels would be equal."""
    short = {kind: (kind.rpartition("{}.")[2] or kind).removesuffix(".weight") or kind for kind in kinds}
    times = Counter(short.values())
    return {kind: clip(text if times[text] == 1 else kind, _LABEL) for kind, text in short.items()}


def _modules(names: Sequence[str]) -> dict[str, str]:
    """Map names to modules, cutting names until there are at most `KINDS` modules."""
    modules = {name: name for name in names}
    depth = min(_DEPTH, max((name.count(".") for name in names), default=0))
    while len(set(modules.values())) > KINDS and depth > 0:
        modules = {name: ".".join(name.split(".", depth)[:depth]) for name in names}
        depth -= 1
    if len(set(modules.values())) > KINDS:  # "t{}" for "t1234"
        return {name: _DIGITS.sub("{}", module) for name, module in modules.items()}
    return modules


# ---- charts ----


def bars_of(shown: ReportContent) -> str:
    """Bar chart of the bytes of each kind of tensor, in the colours of `stacks`."""
    groups = by_kind(shown.tensors)
    names, plain = labels(groups), "o" if shown.colours else 0
    rows = [
        (breakable(names[kind]), shown.colours.get(kind, plain), _nbytes(tensors)) for kind, tensors in groups.items()
    ]
    if rest := rows[KINDS:]:
        rows[KINDS:] = [(plural(len(rest), "other"), plain, sum(total for *_, total in rest))]
    shares = [100 * total / max(1, _nbytes(shown.tensors)) for *_, total in rows]
    texts = ["< 0.1 %" if 0 < share < 0.1 else f"{share:.1f} %" for share in shares]
    return _bars([(*row, text) for row, text in zip(rows, texts, strict=True)], "name mono", _BARS_HEAD)


def _bars(rows: Sequence[tuple[str, int | str, int, str]], kind: str, head: str = "") -> str:
    """Return a bar chart: HTML of the title, colour, bytes and a remark for each bar."""
    largest = max([1, *(total for _, _, total, _ in rows)])
    lines = [
        f'<tr><th scope="row" class="{kind}">{title}</th><td class="bar">'
        + (f'<span class="f{colour}" style="width:{100 * total / largest:.2f}%"></span>' if total else "")
        + f'</td><td class="number">{size(total)}</td><td class="number share soft">{escaped(remark)}</td></tr>'
        for title, colour, total, remark in rows
    ]
    return f'<table class="bars">{head}<tbody>{"".join(lines)}</tbody></table>'


def stacks(shown: ReportContent) -> str:
    """Stacked bar chart of the bytes of each layer, by kind."""
    place = _places(shown.layered)
    count, names = len(place), labels(by_kind(shown.layered))
    heights = {kind: np.zeros(count) for kind in (*shown.colours, None)}
    for row in shown.layered:
        if row.layer in place:
            heights[row.kind if row.kind in shown.colours else None][place[row.layer]] += row.nbytes
    top = max(1.0, float(sum(heights.values(), np.zeros(count)).max(initial=0)))
    gap = 0.1 if count <= 128 else 0
    sums, marks = np.zeros(count), ""
    for kind, own in heights.items():
        boxes = [
            f"M{k + gap:g} {_HEIGHT * (1 - low / top):.0f}h{1 - 2 * gap:g}v{-_HEIGHT * height / top:.1f}H{k + gap:g}z"
            for k, (low, height) in enumerate(zip(sums, own, strict=True))
            if height
        ]
        colour, title = ("o", "others") if kind is None else (shown.colours[kind], names[kind])
        if boxes:
            marks += f'<path class="f{colour}" d="{"".join(boxes)}"><title>{escaped(title)}</title></path>'
        sums += own
    per_unit, unit_name = unit(int(top))
    ticks = [(tick / top * per_unit, f"{tick:g} {unit_name}") for tick in _steps(top / per_unit)]
    label = f"Bytes of {plural(count, 'layer')}: {size(int(sums.min(initial=top)))} to {size(int(top))} each."
    return _plot(marks, place, ticks, label=label, most=12, caption="<p class=caption>layer</p>")


def panels(tensors: Sequence[ReportRow], lines: Sequence[Line], *, log: bool) -> str:
    """Line charts of values over the layers with a legend, a chart per kind, all on one scale."""
    place = _places(tensors)
    groups = dict([*by_kind(row for row in tensors if row.layer in place).items()][:KINDS])

    def points_of(rows: Iterable[ReportRow], value_of: Callable[[ReportRow], float]) -> list[tuple[int, float]]:
        values = [(place[row.layer], value_of(row)) for row in rows]
        finite = [(k, value) for k, value in values if math.isfinite(value) and (value > 0 or not log)]
        return sorted((k, math.log10(value) if log else value) for k, value in finite)

    series = {kind: [points_of(rows, value_of) for _, _, value_of in lines] for kind, rows in groups.items()}
    every = [y for drawn in series.values() for points in drawn for _, y in points]
    if not every:
        return ""
    bottom, top, ticks = _scale(min(every), max(every), log=log)
    names, figures = labels(groups), ""
    for kind, drawn in series.items():
        marks, extents = "", []
        for (title, colour, _), points in zip(lines, drawn, strict=True):
            marks += _line([(k, _HEIGHT * (top - y) / (top - bottom)) for k, y in points], colour)
            heights = [10**y if log else y for _, y in points]
            extents.append(f"{title} {min(heights):.3g} to {max(heights):.3g}" if heights else f"no {title}")
        label = f"{names[kind]}, {plural(len(place), 'layer')}: {', '.join(extents)}"
        figures += _plot(marks, place, ticks, title=names[kind], label=label, most=3)
    legend = "".join(f'<span><i class="f{colour}"></i>{escape(title)}</span>' for title, colour, _ in lines)
    return f'<p class="legend">{legend}</p><div class="panels">{figures}</div>'


def _places(tensors: Iterable[ReportRow]) -> dict[int | None, int]:
    """Return the place of each layer in a chart."""
    layers = sorted({row.layer for row in tensors if row.layer is not None})[:LAYERS]
    return {layer: k for k, layer in enumerate(layers)}


def _line(points: Sequence[tuple[int, float]], colour: int) -> str:
    """Draw a line through places and heights, which is broken where a place is missing."""
    moves = ["M", *("L" if b[0] - a[0] <= 1 else "M" for a, b in pairwise(points))]
    steps = "".join(f"{move}{k + 0.5:g} {y:.0f}" for move, (k, y) in zip(moves, points, strict=False))
    drawn = f'<path class="line s{colour}" d="{steps}"/>' if points else ""
    if len(points) <= _DOTS:
        drawn += f'<path class="dots s{colour}" d="{"".join(f"M{k + 0.5:g} {y:.0f}h0" for k, y in points)}"/>'
    return drawn


def _plot(
    marks: str,
    place: Mapping[int | None, int],  # of each layer
    ticks: Sequence[tuple[float, str]],  # positions on the vertical axis, between 0 and 1, and their texts
    *,
    title: str = "",
    label: str,
    most: int,  # of the texts below, but the first and the last layer always have one
    caption: str = "",
) -> str:
    rules = "".join(f'<path class="rule" d="M0 {_HEIGHT * (1 - at):.0f}H{len(place)}"/>' for at, _ in ticks)
    scale = "".join(f'<span style="bottom:{100 * at:.1f}%">{escaped(text)}</span>' for at, text in ticks)
    heading = f"<figcaption class=mono>{breakable(title)}</figcaption>" if title else ""
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if len(place) <= n * most or n == 500)
    last = len(place) - 1
    shown = [k for k in range(0, last, step) if k == 0 or last - k >= 0.8 * step] + [last]
    layers = [*place]
    axis = _axis([((k + 0.5) / len(place), str(layers[k])) for k in shown], edges=len(place) > _DOTS)
    return (
        f'<figure class="plot">{heading}<div class="y">{scale}</div>'
        f'<div class="area">{_svg(label, len(place), _HEIGHT, rules + marks)}</div>{axis}{caption}</figure>'
    )


def _svg(label: str, width: int, height: int, marks: str, options: str = "") -> str:
    """Return a drawing that is stretched to its place, with a description for screen readers."""
    return (
        f'<svg role="img" aria-label="{escaped(label)}" viewBox="0 0 {width} {height}" preserveAspectRatio="none"'
        f"{options}><title>{escaped(label)}</title>{marks}</svg>"
    )


def _axis(ticks: Sequence[tuple[float, str]], *, edges: bool = False) -> str:
    """Return the texts below a chart; a phone omits every second text if there are many."""
    last = len(ticks) - 1
    spans = []
    for k, (at, text) in enumerate(ticks):
        edge = {last: "last", 0: "first"}.get(k) if edges else None
        kinds = ["between"] if last > 3 and k % 2 and edge != "last" else []
        if edge is not None:  # stays within the chart
            kinds.append(edge)
            at = float(k > 0)
        chosen = f' class="{" ".join(kinds)}"' if kinds else ""
        spans.append(f'<span{chosen} style="left:{100 * at:.2f}%">{escaped(text)}</span>')
    return f'<div class="x">{"".join(spans)}</div>'


def _steps(top: float) -> list[float]:
    """Return 0 and at most four round numbers up to ``top``."""
    power = 10.0 ** (math.log10(top) // 1)
    step = next(n * power / 10 for n in (1, 2, 2.5, 5, 10, 20, 25, 50, 100) if top <= 4 * n * power / 10)
    return [k * step for k in range(int(top / step + 1e-9) + 1)]


def _scale(low: float, high: float, *, log: bool) -> tuple[float, float, list[tuple[float, str]]]:
    """Return the ends of the vertical axis, and its ticks as positions between 0 and 1 with texts."""
    room = max(0.06 * (high - low), 0.05 if log else 1e-3 * max(abs(low), abs(high), 1e-3))
    bottom, top = low - room, high + room
    if log:  # values and ends are exponents of ten; ticks at 1, 10, 100 or, if fewer than two, at 1, 2, 5, 10
        at = [float(power) for power in _decades(bottom, top, 4)]
        if len(at) < 2:
            at = [power + math.log10(n) for power in range(int(bottom // 1), math.ceil(top)) for n in (1, 2, 5)]
            at = [tick for tick in at if bottom <= tick <= top] or [(bottom + top) / 2]
        shown = [(tick, _power(int(tick)) if tick.is_integer() else f"{10**tick:.3g}") for tick in at]
    else:
        apart = _steps(top - bottom)[1]
        shown = [(k * apart, f"{k * apart:g}") for k in range(math.ceil(bottom / apart), int(top // apart) + 1)]
    return bottom, top, [((tick - bottom) / (top - bottom), text) for tick, text in shown]


def _decades(low: float, high: float, limit: int) -> list[int]:
    """Return at most ``limit`` integers in a range, or a few more, at equal distances."""
    every = range(math.ceil(low), int(high // 1) + 1)
    step = -(-len(every) // limit) or 1
    return [power for power in every if power % step == 0]


def _power(exponent: int) -> str:
    """Format a power of ten: "0.01", "10⁻⁶"."""
    return f"{10.0**exponent:g}" if -3 <= exponent <= 4 else f"10{str(exponent).translate(_RAISED)}"


def heat(tensors: Sequence[ReportRow]) -> str:
    """Heat map of the values of each kind by order of magnitude, with a legend."""
    counted = (row for row in tensors if row.stats is not None and row.stats.histogram is not None)
    groups = islice(by_kind(counted).items(), _HEAT_ROWS)
    counts = {kind: np.sum([row.stats.histogram for row in rows], axis=0, dtype=float) for kind, rows in groups}
    counts = {kind: bins for kind, bins in counts.items() if bins.any()}
    if not counts:
        return ""
    filled = np.flatnonzero(np.sum(list(counts.values()), axis=0))
    first, last = int(filled[0]), int(filled[-1]) + 1
    names, rows = labels(counts), ""
    for kind, bins in counts.items():
        middle = np.searchsorted(np.cumsum(bins) / bins.sum(), (0.1, 0.9))
        low, high = (f"{2.0 ** (_LOWEST + int(k)):.3g}" for k in (middle[0], middle[1] + 1))
        label = f"{names[kind]}: most absolute values lie between {low} and {high}"
        levels = np.ceil(np.sqrt(bins[first:last] / bins.max()) * len(_SHADES)).astype(int)
        cells = [
            f'<path fill-opacity="{shade:g}" d="{"".join(f"M{k} 0h1v1h-1z" for k in places)}"/>'
            for level, shade in enumerate(_SHADES, 1)
            if (places := np.flatnonzero(levels == level)).size
        ]
        drawing = _svg(label, last - first, 1, "".join(cells), ' shape-rendering="crispEdges"')
        rows += (
            f'<tr><th scope="row" class="name mono">{breakable(names[kind])}</th><td class="map">{drawing}</td></tr>'
        )
    begin, end = ((_LOWEST + k) * math.log10(2) for k in (first, last))
    ticks = [((k - begin) / (end - begin), _power(k)) for k in _decades(begin, end, 6)]
    axis = f'<tr class="axis"><td></td><td>{_axis(ticks)}</td></tr>'
    steps = "".join(f'<i class="step" style="opacity:{shade:g}"></i>' for shade in _SHADES)
    legend = f'<p class="legend"><span>few values {steps} many</span></p>'
    return f'{legend}<table class="heat"><tbody>{rows}{axis}</tbody></table>'
