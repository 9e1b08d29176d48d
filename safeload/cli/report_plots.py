"""The plots of ``safeload report``: SVG by matplotlib, to be embedded in a page."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..base.text import clip, printable, size, unit
from ..operations.validate.findings import pattern_of

# Most kinds of tensors with a bar or a line of their own; the others share one.
_KINDS = 12

# Width in inches of 72 points.
_WIDTH = 8.4

_COLOURS = (
    *("#3b6fb6", "#e08a2c", "#4f9d69", "#c44e52", "#8172b3", "#937860"),
    *("#da8bc3", "#64b5cd", "#8c8c8c", "#ccb974", "#2f4858", "#b0413e"),
)

_FIRST_NUMBER = re.compile(r"(?:^|\.)([0-9]+)(?=\.|$)", re.ASCII)

# The text before an id in SVG.
_IDS = re.compile(r'((?<= )id="|href="#|url\(#)')

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: smaller, and searchable
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
}


class Tensor(NamedTuple):
    """One tensor in a plot.

    Attributes:
        name: its name.
        kind: its name with ``{}`` for numbers.
        layer: the first number in its name, None without one.
        nbytes: size in bytes.
        stats: `safeload.TensorStats`, None without statistics.
    """

    name: str
    kind: str
    layer: int | None
    nbytes: int
    stats: Any


def tensor(name: str, nbytes: int, stats: Any) -> Tensor:
    """Makes a `Tensor`, with its kind and layer from its name."""
    number = _FIRST_NUMBER.search(name)
    return Tensor(name, pattern_of(name), None if number is None else int(number[1]), nbytes, stats)


def label(kind: str) -> str:
    """A short label of a kind for a legend."""
    short = kind.rpartition("{}.")[2] or kind
    return clip(printable(short.removesuffix(".weight")), 34).replace("$", r"\$")


def _svg(name: str, height: float, draw: Callable[[Figure], None]) -> str:
    """One plot; ``name`` makes its ids unique on the page."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return _IDS.sub(rf"\g<1>{name}-", text)  # matplotlib numbers groups from 1 in every plot


def _top_kinds(tensors: Sequence[Tensor]) -> list[str]:
    """Kinds by their bytes, largest first."""
    totals: dict[str, int] = {}
    for one in tensors:
        totals[one.kind] = totals.get(one.kind, 0) + one.nbytes
    return sorted(totals, key=lambda kind: -totals[kind])


def bytes_by_kind(tensors: Sequence[Tensor]) -> str:
    """Bar chart: bytes of each kind of tensor."""
    kinds = _top_kinds(tensors)
    totals = {kind: sum(one.nbytes for one in tensors if one.kind == kind) for kind in kinds[:_KINDS]}
    bars = [(label(kind), total) for kind, total in totals.items()]
    if len(kinds) > _KINDS:
        bars.append((f"{len(kinds) - _KINDS} other kinds", sum(t.nbytes for t in tensors) - sum(totals.values())))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        rows = axes.barh(range(len(bars)), [total for _, total in bars], color=_COLOURS[0])
        axes.bar_label(rows, [size(total) for _, total in bars], padding=3)
        axes.set_yticks(range(len(bars)), [text for text, _ in bars])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)

    return _svg("kinds", 0.6 + 0.27 * len(bars), draw)


def layered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of the family of layers with the most bytes; empty without layers."""
    families: dict[str, list[Tensor]] = {}
    for one in tensors:
        if one.layer is not None:
            families.setdefault(one.kind.partition("{}")[0], []).append(one)
    best = max(families.values(), key=lambda family: sum(one.nbytes for one in family), default=[])
    return best if len({one.layer for one in best}) > 1 else []


def bytes_by_layer(tensors: Sequence[Tensor]) -> str:
    """Stacked bar chart: bytes of each layer, by kind."""
    layers = sorted({one.layer for one in tensors if one.layer is not None})
    place = {layer: k for k, layer in enumerate(layers)}
    kinds = _top_kinds(tensors)
    shown = kinds[:_KINDS]
    sums: Counter[int] = Counter()
    for one in tensors:
        if one.layer is not None:
            sums[one.layer] += one.nbytes
    per_unit, unit_name = unit(max(sums.values(), default=0))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        bottom = np.zeros(len(layers))
        for k, kind in enumerate([*shown, None] if len(kinds) > _KINDS else shown):
            heights = np.zeros(len(layers))
            for one in tensors:
                if one.layer is not None and (one.kind == kind or (kind is None and one.kind not in shown)):
                    heights[place[one.layer]] += one.nbytes / per_unit
            text = "others" if kind is None else label(kind)
            axes.bar(layers, heights, bottom=bottom, label=text, color=_COLOURS[k % len(_COLOURS)], width=0.85)
            bottom += heights
        _layer_axis(axes)
        axes.set_ylabel(unit_name)
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside lower center", ncols=3)

    return _svg("layers", 3.6, draw)


def curves(tensors: Sequence[Tensor]) -> str:
    """Line charts: largest absolute value and standard deviation of each kind over the layers."""

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        for axes, field, title in ((upper, "absmax", "largest absolute value"), (lower, "std", "standard deviation")):
            _lines(axes, tensors, lambda one, field=field: getattr(one.stats, field))  # type: ignore[misc]
            axes.set_title(title, loc="left")
        _layer_axis(lower)
        figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=3)

    return _svg("curves", 5.6, draw)


def _layer_axis(axes: Any) -> None:
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _lines(axes: Any, tensors: Sequence[Tensor], value: Callable[[Tensor], float], *, log: bool = True) -> None:
    positive = False
    for k, kind in enumerate(_top_kinds(tensors)[:_KINDS]):
        points = sorted((one.layer, value(one)) for one in tensors if one.kind == kind and one.layer is not None)
        heights = [y if math.isfinite(y) and (y > 0 or not log) else math.nan for _, y in points]
        positive = positive or any(not math.isnan(y) for y in heights)
        colour = _COLOURS[k % len(_COLOURS)]
        axes.plot([x for x, _ in points], heights, ".-", label=label(kind), color=colour, lw=1.2, ms=4)
    if log and positive:
        axes.set_yscale("log")


def histograms(tensors: Sequence[Tensor], edges: Any) -> str:
    """Heat map: number of values of each kind by binary order of magnitude."""
    kinds = _top_kinds(tensors)[:24]
    rows = np.zeros((len(kinds), len(edges) - 1))
    for one in tensors:
        if one.kind in kinds and one.stats is not None and one.stats.histogram is not None:
            rows[kinds.index(one.kind)] += np.asarray(one.stats.histogram, np.float64)
    filled = np.flatnonzero(rows.sum(axis=0))
    if filled.size == 0:
        return ""
    first, last = int(filled[0]), int(filled[-1]) + 1
    part = rows[:, first:last] / np.maximum(rows.sum(axis=1, keepdims=True), 1)
    lowest = round(math.log2(edges[0]))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        shown = np.ma.masked_equal(part, 0)
        bounds = np.arange(first, last + 1) + lowest, np.arange(len(kinds) + 1)
        axes.pcolormesh(*bounds, shown, cmap="Blues", vmin=0)
        axes.invert_yaxis()
        axes.set_yticks(np.arange(len(kinds)) + 0.5, [label(kind) for kind in kinds])
        axes.set_xlabel("log2 of the absolute value")
        axes.grid(visible=False)

    return _svg("histograms", 1.2 + 0.24 * len(kinds), draw)


def noise(tensors: Sequence[Tensor], errors: Mapping[str, Any], scheme: str) -> str:
    """Line chart: signal-to-noise ratio of each quantized kind over the layers."""
    quantized = [one for one in tensors if one.name in errors]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _lines(axes, quantized, lambda one: float(errors[one.name].snr_db), log=False)
        _layer_axis(axes)
        axes.set_ylabel(f"SNR in dB, {scheme}")
        figure.legend(loc="outside lower center", ncols=3)

    return _svg("noise", 3.4, draw)
