"""Formats of other distributions, by entry points of the group ``safeload.formats``.

1. The name of an entry point is the name of its format, and its object is a `Format`.
2. Plug-ins are asked only for files that no row of safeload claims, or by ``format=NAME``.
3. Entry points are looked up when the first such file is met; a plug-in is imported when it is asked.
4. A plug-in that cannot be used is left out with a warning, or is an error if it was asked for by name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from ..base.text import show
from ..errors import SafeloadError
from .format import Candidate, Format

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "safeload.formats"
DISABLE = "SAFELOAD_NO_PLUGINS"


def disabled() -> bool:
    """Return True if the environment disables plug-ins."""
    return os.environ.get(DISABLE, "") not in ("", "0")


@cache
def _entry_points() -> dict[str, list[EntryPoint]]:
    from importlib.metadata import entry_points  # only here: it takes milliseconds, and few files need it

    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        points.setdefault(point.name, []).append(point)
    return points


@cache
def _load(name: str, reserved: frozenset[str]) -> Format | str:
    """Return the format of a plug-in, or why it cannot be used."""
    points = _entry_points()[name]
    sources = [_source(point) for point in points]
    subject = f"the plug-in {show(name)} of {' and '.join(sources)} cannot be used"
    if name in reserved:
        return f"{subject}: safeload has a format of this name"
    if len(points) > 1:
        return f"{subject}: only one distribution may have a plug-in of this name"
    try:
        row = points[0].load()
    except Exception as error:
        return f"{subject}: {type(error).__name__}: {show(str(error))[1:-1]}"
    if not isinstance(row, Format):
        return f"{subject}: expected a safeload.plugins.Format, got {type(row).__name__}"
    texts = (row.title, row.kind, row.module, *row.suffixes)
    if not callable(row.matches) or not all(isinstance(text, str) and text for text in texts):
        return f"{subject}: title, kind, module and suffixes must be text, and matches a function"
    if row.name != name:
        return f"{subject}: its format has another name, {show(row.name)}"
    return row._replace(source=sources[0], family=None, public=False, parts=None, extra_suffixes=())


def _source(point: EntryPoint) -> str:
    dist = point.dist
    return "an unknown distribution" if dist is None else f"{dist.metadata['Name']} {dist.version}"


def find(name: str, reserved: frozenset[str]) -> Format | None:
    """Return the plug-in of a name, or None if there is none; ``reserved`` are the names of safeload's own formats."""
    if disabled() or name in reserved or name not in _entry_points():
        return None
    row = _load(name, reserved)
    if isinstance(row, str):
        raise SafeloadError(row)
    return row


def rows(reserved: frozenset[str]) -> Iterator[Format]:
    """Iterate over the usable plug-ins in the order of their names; warn about the rest."""
    for name in [] if disabled() else sorted(_entry_points()):
        row = _load(name, reserved)
        if isinstance(row, str):
            warnings.warn(row, RuntimeWarning, stacklevel=2)
        else:
            yield row


def claim(candidate: Candidate, reserved: frozenset[str]) -> Format | None:
    """Return the first plug-in that accepts a file."""
    return next((row for row in rows(reserved) if _accepts(row, candidate)), None)


def matches(row: Format, head: bytes) -> bool:
    """Return True if a plug-in can read a file with these first bytes; warn if it fails."""
    try:
        with row.guarded("recognise a file"):
            return bool(row.matches(head))
    except SafeloadError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return False


def _accepts(row: Format, candidate: Candidate) -> bool:
    try:
        return row.accepts(candidate)
    except SafeloadError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return False
