"""Groups of tensors in the charts of the report: by kind over the layers, or by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...base.names import pattern_of
from ...base.text import clip

# Maximum number of kinds with their own bar or panel; the rest share one.
KINDS = 12

# Number of layer kinds with their own colour.
COLOURS = 9

# At most nine digits: larger numbers are not layers, and Python refuses to parse thousands of digits.
_FIRST_NUMBER = re.compile(r"(?:^|\.)([0-9]{1,9})(?=\.|$)", re.ASCII)

_DIGITS = re.compile(r"[0-9]+", re.ASCII)

# Maximum length of a label in a chart.
_LABEL = 48

# Maximum number of name parts in a module: names in hostile files have thousands of dots.
_DEPTH = 8


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
    tensors = [ReportRow(name, pattern_of(name), _layer(name), n, stats.get(name)) for name, n in sizes.items()]
    layered = _layered(tensors)
    if not layered:
        modules = _modules([row.name for row in tensors])
        tensors = [row._replace(kind=modules[row.name]) for row in tensors]
    colours = {kind: k for k, kind in enumerate(list(by_size(layered))[:COLOURS])}
    return ReportContent(tensors, layered, colours)


def by_size(tensors: Iterable[ReportRow]) -> dict[str, int]:
    """Sum the bytes of each kind, largest first."""
    totals: dict[str, int] = {}
    for row in tensors:
        totals[row.kind] = totals.get(row.kind, 0) + row.nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def by_kind(tensors: Iterable[ReportRow], limit: int = KINDS) -> dict[str, list[ReportRow]]:
    """Group tensors by kind, for the largest kinds only, largest first."""
    tensors = list(tensors)
    groups: dict[str, list[ReportRow]] = {kind: [] for kind in list(by_size(tensors))[:limit]}
    for row in tensors:
        if row.kind in groups:
            groups[row.kind].append(row)
    return groups


def labels(kinds: Iterable[str]) -> dict[str, str]:
    """Shorten kinds to labels without layer path and ".weight", unless two labels would be equal."""
    short = {kind: (kind.rpartition("{}.")[2] or kind).removesuffix(".weight") or kind for kind in kinds}
    times = Counter(short.values())
    return {kind: clip(text if times[text] == 1 else kind, _LABEL) for kind, text in short.items()}


def _layer(name: str) -> int | None:
    number = _FIRST_NUMBER.search(name)
    return None if number is None else int(number[1])


def _layered(tensors: Iterable[ReportRow]) -> list[ReportRow]:
    families: dict[str, list[ReportRow]] = {}
    for row in tensors:
        if row.layer is not None:
            families.setdefault(row.kind.partition("{}")[0], []).append(row)
    largest = max(families.values(), key=lambda family: sum(row.nbytes for row in family), default=[])
    return largest if len({row.layer for row in largest}) > 1 else []


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
