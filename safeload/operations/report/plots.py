"""Charts of the report page.

Text is HTML, so that it keeps its size on a phone; only marks are SVG, stretched to the available width. Colours are
classes of report.css, which has both modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from ...base.html import escaped
from ...base.text import plural, size, unit
from .kinds import KINDS, ReportContent, ReportRow, by_kind, by_size, labels
from .page import breakable

# Maximum number of layers in a chart.
LAYERS = 512

# Maximum number of rows in the heat map.
_ROWS = 16

# Opacity of the shades; the palest must stay visible.
_SHADES = (0.16, 0.32, 0.5, 0.72, 1.0)

# Maximum number of layers with a dot at each point of a line.
_DOTS = 40

# Height of a drawing in SVG units; the page stretches it.
_HEIGHT = 1000


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

_BARS_HEAD = (
    '<th scope="col" class="name">tensors</th><td></td><th scope="col" class="number">size</th>'
    '<th scope="col" class="number share">share</th>'
)


class Line(NamedTuple):
    """A line of a panel."""

    title: str
    colour: int
    value: Callable[[ReportRow], float]


def bars(shown: ReportContent) -> str:
    """Bar chart of the bytes of each kind of tensor, in the colours of `stacks`."""
    totals = by_size(shown.tensors)
    total_bytes = max(1, sum(totals.values()))
    largest = max(1, max(totals.values(), default=1))
    names = labels(totals)
    rows = [(names[kind], shown.colours.get(kind), total) for kind, total in list(totals.items())[:KINDS]]
    rest = len(totals) - len(rows)
    if rest:
        remaining = sum(totals.values()) - sum(total for *_, total in rows)
        rows.append((f"{rest:,} other{'' if rest == 1 else 's'}", None, remaining))
        largest = max(largest, remaining)
    plain = "o" if shown.colours else 0
    lines = [
        _bar(
            breakable(name),
            total,
            largest,
            kind="name mono",
            colour=plain if colour is None else colour,
            remark=_share(total / total_bytes),
        )
        for name, colour, total in rows
    ]
    return f'<table class="bars"><thead><tr>{_BARS_HEAD}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _share(part: float) -> str:
    return "< 0.1 %" if 0 < part < 0.001 else f"{100 * part:.1f} %"


def measures(rows: Sequence[tuple[str, int]]) -> str:
    """Bar chart of sizes, each with its ratio to the first."""
    first = max(1, rows[0][1])
    largest = max(1, *(total for _, total in rows))
    lines = [
        _bar(escape(name), total, largest, kind="name", colour=0 if k else "o", remark=f"{total / first:.2f}x")
        for k, (name, total) in enumerate(rows)
    ]
    return f'<table class="bars"><tbody>{"".join(lines)}</tbody></table>'


def _bar(title: str, total: int, largest: int, *, kind: str, colour: int | str, remark: str) -> str:
    drawn = f'<span class="f{colour}" style="width:{100 * total / largest:.2f}%"></span>' if total else ""
    return (
        f'<tr><th scope="row" class="{kind}">{title}</th><td class="bar">{drawn}</td>'
        f'<td class="number">{size(total)}</td><td class="number share soft">{escaped(remark)}</td></tr>'
    )


def stacks(shown: ReportContent) -> str:
    """Stacked bar chart of the bytes of each layer, by kind."""
    layers = _layers(shown.layered)
    place = {layer: k for k, layer in enumerate(layers)}
    sums = np.zeros(len(layers))
    drawn = []
    kinds: dict[str | None, list[ReportRow]] = {}
    for row in shown.layered:
        kinds.setdefault(row.kind if row.kind in shown.colours else None, []).append(row)
    names = labels(by_size(shown.layered))
    gap = 0.1 if len(layers) <= 128 else 0
    for kind in [*shown.colours, None]:
        heights = np.zeros(len(layers))
        for row in kinds.get(kind, ()):
            if row.layer in place:
                heights[place[row.layer]] += row.nbytes
        if heights.any():
            drawn.append((kind, sums.copy(), heights))
            sums += heights
    top = max(1.0, float(sums.max(initial=0)))
    marks = []
    for kind, bottoms, heights in drawn:
        boxes = [
            f"M{k + gap:g} {_HEIGHT * (1 - low / top):.0f}h{1 - 2 * gap:g}v{-_HEIGHT * height / top:.1f}H{k + gap:g}z"
            for k, (low, height) in enumerate(zip(bottoms, heights, strict=True))
            if height
        ]
        colour = "o" if kind is None else shown.colours[kind]
        title = escaped("others" if kind is None else names[kind])
        marks.append(f'<path class="f{colour}" d="{"".join(boxes)}"><title>{title}</title></path>')
    per_unit, unit_name = unit(int(top))
    ticks = [(tick / top * per_unit, f"{tick:g} {unit_name}") for tick in _steps(top / per_unit, 4)]
    label = f"Bytes of {plural(len(layers), 'layer')}: {size(int(sums.min(initial=top)))} to {size(int(top))} each."
    return _plot("".join(marks), len(layers), ticks, label=label, axis=_layer_axis(layers, 12), caption="layer")


def panels(tensors: Sequence[ReportRow], lines: Sequence[Line], *, log: bool) -> str:
    """Line charts of values over the layers, a chart per kind, all on one scale."""
    layers = _layers(tensors)
    place = {layer: k for k, layer in enumerate(layers)}
    groups = by_kind([row for row in tensors if row.layer in place])
    series = [(kind, [_points(rows, line, place, log=log) for line in lines]) for kind, rows in groups.items()]
    every = [y for _, drawn in series for points in drawn for _, y in points]
    if not every:
        return ""
    bottom, top, ticks = _scale(min(every), max(every), log=log)
    names = labels(groups)
    figures = []
    for kind, drawn in series:
        marks, extents = [], []
        for line, points in zip(lines, drawn, strict=True):
            marks.append(_line(points, line.colour, lambda y: _HEIGHT * (top - y) / (top - bottom)))
            values = [10**y if log else y for _, y in points]
            extents.append(f"{line.title} {min(values):.3g} to {max(values):.3g}" if values else f"no {line.title}")
        label = f"{names[kind]}, {plural(len(layers), 'layer')}: {', '.join(extents)}"
        axis = _layer_axis(layers, 3)
        figures.append(_plot("".join(marks), len(layers), ticks, title=names[kind], label=label, axis=axis))
    return f'<div class="panels">{"".join(figures)}</div>'


def legend(lines: Iterable[Line]) -> str:
    """Return the legend of `panels`."""
    items = "".join(f'<span><i class="f{line.colour}"></i>{escape(line.title)}</span>' for line in lines)
    return f'<p class="legend">{items}</p>'


def _layers(tensors: Iterable[ReportRow]) -> list[int]:
    return sorted({row.layer for row in tensors if row.layer is not None})[:LAYERS]


def _points(
    tensors: Iterable[ReportRow], line: Line, place: Mapping[int, int], *, log: bool
) -> list[tuple[int, float]]:
    """Return places and heights of a line, without values outside the scale."""
    points = []
    for row in tensors:
        value = line.value(row)
        if row.layer is not None and math.isfinite(value) and (value > 0 or not log):
            points.append((place[row.layer], math.log10(value) if log else value))
    return sorted(points)


def _line(points: Sequence[tuple[int, float]], colour: int, height: Callable[[float], float]) -> str:
    at = [(k + 0.5, height(y)) for k, y in points]
    steps = "".join(
        f"{'L' if k and points[k][0] - points[k - 1][0] <= 1 else 'M'}{x:g} {y:.0f}" for k, (x, y) in enumerate(at)
    )
    drawn = f'<path class="line s{colour}" d="{steps}"/>' if at else ""
    if len(at) <= _DOTS:
        drawn += f'<path class="dots s{colour}" d="{"".join(f"M{x:g} {y:.0f}h0" for x, y in at)}"/>'
    return drawn


def _plot(
    marks: str,
    width: int,  # of the marks in SVG units
    ticks: Sequence[tuple[float, str]],  # positions on the vertical axis, between 0 and 1, and their texts
    *,
    title: str = "",
    label: str,  # for screen readers
    axis: str,
    caption: str = "",  # of the horizontal axis
) -> str:
    """Return a chart with its axes."""
    rules = "".join(f'<path class="rule" d="M0 {_HEIGHT * (1 - at):.0f}H{width}"/>' for at, _ in ticks)
    scale = "".join(f'<span style="bottom:{100 * at:.1f}%">{escaped(text)}</span>' for at, text in ticks)
    return (
        f'<figure class="plot">{f"<figcaption class=mono>{breakable(title)}</figcaption>" if title else ""}'
        f'<div class="y">{scale}</div><div class="area">'
        f'<svg role="img" aria-label="{escaped(label)}" viewBox="0 0 {width} {_HEIGHT}" preserveAspectRatio="none">'
        f"<title>{escaped(label)}</title>{rules}{marks}</svg></div>"
        f"{axis}{f'<p class=caption>{escaped(caption)}</p>' if caption else ''}</figure>"
    )


def _layer_axis(layers: Sequence[int], limit: int) -> str:
    """Return an axis with layer numbers, including the first and the last."""
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if len(layers) <= n * limit or n == 500)
    last = len(layers) - 1
    shown = [k for k in range(0, len(layers), step) if k == 0 or last - k >= 0.8 * step]
    places = [*shown, *([last] if last and last not in shown else [])]
    return _axis([((k + 0.5) / len(layers), str(layers[k])) for k in places], edges=len(layers) > _DOTS)


def _axis(ticks: Iterable[tuple[float, str]], *, edges: bool = False) -> str:
    """Return the texts below a chart; a phone omits every second text if there are many."""
    listed = list(ticks)
    last = len(listed) - 1

    def span(k: int, at: float, text: str) -> str:
        kinds = ["between"] if last > 3 and k % 2 and not (edges and k == last) else []
        if edges and k in (0, last):  # stay within the chart
            at, kind = (0, "first") if k == 0 else (1, "last")
            kinds.append(kind)
        chosen = f' class="{" ".join(kinds)}"' if kinds else ""
        return f'<span{chosen} style="left:{100 * at:.2f}%">{escaped(text)}</span>'

    return f'<div class="x">{"".join(span(k, at, text) for k, (at, text) in enumerate(listed))}</div>'


def _steps(top: float, limit: int) -> list[float]:
    """Return 0 and at most ``limit`` round numbers up to ``top``."""
    power = 10.0 ** (math.log10(top) // 1)
    step = next(n * power / 10 for n in (1, 2, 2.5, 5, 10, 20, 25, 50, 100) if top <= limit * n * power / 10)
    return [k * step for k in range(int(top / step + 1e-9) + 1)]


def _scale(low: float, high: float, *, log: bool) -> tuple[float, float, list[tuple[float, str]]]:
    """Return the ends of the vertical axis, and its ticks as positions between 0 and 1 with texts."""
    room = max(0.06 * (high - low), 0.05 if log else 1e-3 * max(abs(low), abs(high), 1e-3))
    bottom, top = low - room, high + room
    if log:  # values and ends are exponents of ten; ticks at 1, 10, 100 or, if fewer than two, at 1, 2, 5, 10
        decades = range(math.ceil(bottom), int(top // 1) + 1)
        step = -(-len(decades) // 4) or 1
        at = [float(power) for power in decades if power % step == 0]
        if len(at) < 2:
            fine = range(int(bottom // 1), math.ceil(top))
            at = [power + math.log10(n) for power in fine for n in (1, 2, 5)]
            at = [tick for tick in at if bottom <= tick <= top] or [(bottom + top) / 2]
        shown = [(tick, _power(int(tick)) if tick.is_integer() else f"{10**tick:.3g}") for tick in at]
    else:
        apart = _steps(top - bottom, 4)[1]
        shown = [(k * apart, f"{k * apart:g}") for k in range(math.ceil(bottom / apart), int(top // apart) + 1)]
    return bottom, top, [((tick - bottom) / (top - bottom), text) for tick, text in shown]


def _power(exponent: int) -> str:
    """Format a power of ten: "0.01", "10⁻⁶"."""
    if -3 <= exponent <= 4:
        return f"{10.0**exponent:g}"
    return f"10{str(exponent).translate(_RAISED)}"


# ---- heat map ----


def heat(tensors: Sequence[ReportRow], lowest: int) -> str:
    """Heat map of the values of each kind by binary order of magnitude; histograms begin at 2**``lowest``."""
    groups = by_kind([row for row in tensors if row.stats.histogram is not None], _ROWS)
    counts = {kind: np.sum([row.stats.histogram for row in rows], axis=0, dtype=float) for kind, rows in groups.items()}
    counts = {kind: bins for kind, bins in counts.items() if bins.any()}
    if not counts:
        return ""
    filled = np.flatnonzero(np.sum(list(counts.values()), axis=0))
    first, last = int(filled[0]), int(filled[-1]) + 1
    names = labels(counts)
    rows = []
    for kind, bins in counts.items():
        middle = np.searchsorted(np.cumsum(bins) / bins.sum(), (0.1, 0.9))
        low, high = (f"{2.0 ** (lowest + int(k)):.3g}" for k in (middle[0], middle[1] + 1))
        label = escaped(f"{names[kind]}: most absolute values lie between {low} and {high}")
        rows.append(
            f'<tr><th scope="row" class="name mono">{breakable(names[kind])}</th><td class="map"><svg role="img" '
            f'aria-label="{label}" viewBox="0 0 {last - first} 1" preserveAspectRatio="none" '
            f'shape-rendering="crispEdges"><title>{label}</title>{_cells(bins[first:last])}</svg></td></tr>'
        )
    axis = f'<tr class="axis"><td></td><td>{_axis(_powers(first + lowest, last + lowest))}</td></tr>'
    return f'<table class="heat"><tbody>{"".join(rows)}{axis}</tbody></table>'


def _cells(bins: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    """Draw the bins of a row in a few shades, relative to its fullest bin."""
    levels = np.ceil(np.sqrt(bins / bins.max()) * len(_SHADES)).astype(int)
    return "".join(
        f'<path fill-opacity="{shade:g}" d="{"".join(f"M{k} 0h1v1h-1z" for k in places)}"/>'
        for level, shade in enumerate(_SHADES, 1)
        if (places := np.flatnonzero(levels == level)).size
    )


def _powers(low: int, high: int) -> list[tuple[float, str]]:
    """Return the powers of ten between two powers of two, as positions between 0 and 1 with texts."""
    tens = range(math.ceil(low * math.log10(2)), int(high * math.log10(2) // 1) + 1)
    step = -(-len(tens) // 6) or 1
    at = [(power / math.log10(2) - low) / (high - low) for power in tens]
    return [(place, _power(power)) for power, place in zip(tens, at, strict=True) if power % step == 0]


def shades() -> str:
    """Return the legend of the heat map."""
    steps = "".join(f'<i class="step" style="opacity:{shade:g}"></i>' for shade in _SHADES)
    return f'<p class="legend"><span>few values {steps} many</span></p>'
