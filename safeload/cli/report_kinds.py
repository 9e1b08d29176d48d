"""Which tensors the charts of ``safeload report`` show as one: those of a kind over the layers, or of a module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..base.names import pattern_of
from ..base.text import clip

# Most kinds of tensors with a bar or a panel of their own; the others share one.
KINDS = 12

# Kinds of the layers that have a colour of their own.
COLOURS = 9

# A larger number in a name is not that of a layer, and Python refuses to parse thousands of digits.
_FIRST_NUMBER = re.compile(r"(?:^|\.)([0-9]{1,9})(?=\.|$)", re.ASCII)

_DIGITS = re.compile(r"[0-9]+", re.ASCII)

# Characters of a kind in a chart.
_LABEL = 48

# Most parts of a name that make a module: names of hostile files have thousands of dots.
_DEPTH = 8


class ReportRow(NamedTuple):
    """One tensor in a chart.

    Attributes:
        name: its name.
        kind: what it is counted as: its name with ``{}`` for numbers, or its module.
        layer: the first number in its name, None without one.
        nbytes: size in bytes.
        stats: `safeload.TensorStats`, None without statistics.
    """

    name: str
    kind: str
    layer: int | None
    nbytes: int
    stats: Any


class ReportContent(NamedTuple):
    """The tensors of a checkpoint.

    Attributes:
        tensors: all of them.
        layered: those of the family of layers with the most bytes; empty without layers.
        colours: the kinds of the layers with a colour, each with its number.
    """

    tensors: Sequence[ReportRow]
    layered: Sequence[ReportRow]
    colours: Mapping[str, int]


def content(sizes: Mapping[str, int], stats: Mapping[str, Any]) -> ReportContent:
    """Sorts tensors into kinds.

    Args:
        sizes: name to bytes.
        stats: name to statistics.
    """
    tensors = [ReportRow(name, pattern_of(name), _layer(name), n, stats.get(name)) for name, n in sizes.items()]
    layered = _layered(tensors)
    if not layered:
        modules = _modules([one.name for one in tensors])
        tensors = [one._replace(kind=modules[one.name]) for one in tensors]
    colours = {kind: k for k, kind in enumerate(list(by_size(layered))[:COLOURS])}
    return ReportContent(tensors, layered, colours)


def by_size(tensors: Iterable[ReportRow]) -> dict[str, int]:
    """Kinds with their bytes, largest first."""
    totals: dict[str, int] = {}
    for one in tensors:
        totals[one.kind] = totals.get(one.kind, 0) + one.nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def by_kind(tensors: Iterable[ReportRow], most: int = KINDS) -> dict[str, list[ReportRow]]:
    """The tensors of the largest kinds, largest first."""
    tensors = list(tensors)
    found: dict[str, list[ReportRow]] = {kind: [] for kind in list(by_size(tensors))[:most]}
    for one in tensors:
        if one.kind in found:
            found[one.kind].append(one)
    return found


def labels(kinds: Iterable[str]) -> dict[str, str]:
    """Short labels: without the path of the layers and without ".weight", unless two kinds would look the same."""
    short = {kind: (kind.rpartition("{}.")[2] or kind).removesuffix(".weight") or kind for kind in kinds}
    times = Counter(short.values())
    return {kind: clip(text if times[text] == 1 else kind, _LABEL) for kind, text in short.items()}


def _layer(name: str) -> int | None:
    number = _FIRST_NUMBER.search(name)
    return None if number is None else int(number[1])


def _layered(tensors: Iterable[ReportRow]) -> list[ReportRow]:
    families: dict[str, list[ReportRow]] = {}
    for one in tensors:
        if one.layer is not None:
            families.setdefault(one.kind.partition("{}")[0], []).append(one)
    best = max(families.values(), key=lambda family: sum(one.nbytes for one in family), default=[])
    return best if len({one.layer for one in best}) > 1 else []


def _modules(names: Sequence[str]) -> dict[str, str]:
    """The module of each tensor: as much of the names as makes at most `KINDS` of them.

    That is at least the first part; ``{}`` stands for the digits in it where these would be too many: "t{}" of "t1234".
    """
    modules = {name: name for name in names}
    depth = min(_DEPTH, max((name.count(".") for name in names), default=0))
    while len(set(modules.values())) > KINDS and depth > 0:
        modules = {name: ".".join(name.split(".", depth)[:depth]) for name in names}
        depth -= 1
    if len(set(modules.values())) > KINDS:
        return {name: _DIGITS.sub("{}", module) for name, module in modules.items()}
    return modules
