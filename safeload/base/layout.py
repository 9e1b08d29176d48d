"""Layout of text for terminals: tables, wrapped prose, names shortened to a width, and rounded numbers."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, repeat
from typing import TextIO

from .text import clip, plural

# Without a line limit, columns are padded to at most this width, so that a long name does not widen every line.
_PADDED = 100

#: If a table leaves less room for names, each name gets its own line.
NARROW = 20

# `shorten` looks at this many characters and parts of a name.
_LONGEST, _PARTS = 2000, 64
#: Where the parts of a name are divided; not inside ranges such as {0..31}.
BETWEEN_PARTS = re.compile(r"(?<=[./])(?<!\.\.)(?!\.)")


def width() -> int:
    """Return the width of the terminal in columns, or 80 if there is no terminal."""
    import shutil  # only here: it imports bz2 and lzma, which takes 2 ms

    return max(40, shutil.get_terminal_size((80, 24)).columns)


def terminal_columns() -> int | None:
    """Return the width of the terminal, or None if stdout is not a terminal, because pipes get uncut lines."""
    return width() if is_terminal(sys.stdout) else None


def terminal_rows(rows: int) -> int | None:
    """Return a limit of rows for a terminal, or None if stdout is not a terminal, because pipes get all rows."""
    return rows if is_terminal(sys.stdout) else None


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if a stream is an open terminal."""
    return stream is not None and not stream.closed and stream.isatty()


def shorten(names: Sequence[str], columns: int | None) -> list[str]:
    """Shorten names to a width by cutting the parts that most names share.

    Beside other layers and matrices, "model.layers.3.self_attn.q_proj.weight" becomes "model.…self_attn.q_proj.weight".
    A width of None keeps the names whole.
    """
    if columns is None or all(len(name) <= columns for name in names):
        return list(names)
    divided = [BETWEEN_PARTS.split(name[:_LONGEST], _PARTS) for name in names]
    count = Counter(part for parts in divided for part in set(parts))
    return [_shorten(name, parts, columns, count, len(names)) for name, parts in zip(names, divided, strict=True)]


def _shorten(name: str, parts: Sequence[str], columns: int, count: Mapping[str, int], total: int) -> str:
    """Cut the run of parts that carries the least information and is long enough; the middle one if several tie."""
    excess = len(name) + 1 - columns
    if excess <= 1:
        return name
    begins = [0, *accumulate(map(len, parts))]
    lost = [0.0, *accumulate(math.log(total / count[part]) for part in parts)]
    best, end = None, 0
    for first in range(len(parts)):
        while end < len(parts) and begins[end] - begins[first] < excess:
            end += 1
        if begins[end] - begins[first] < excess:
            break
        off_centre = abs(begins[first] + begins[end] - len(name))
        cut = lost[end] - lost[first], off_centre, begins[first], begins[end]
        best = cut if best is None or cut < best else best
    if best is None or best[3] - best[2] == len(name):
        return clip(name, columns)
    stop = best[3]
    return f"{name[: stop - excess]}…{name[stop:]}"


def wrap(text: str, columns: int | None, indent: str = "", hanging: str | None = None) -> list[str]:
    """Wrap prose into lines. Without ``columns`` it wraps at 80, but never breaks a word, such as a name."""
    wrapper = textwrap.TextWrapper(columns or 80, indent, indent if hanging is None else hanging)
    wrapper.break_long_words = columns is not None
    wrapper.break_on_hyphens = columns is not None
    return wrapper.wrap(text)


def table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: frozenset[int], columns: int | None
) -> list[str]:
    """Return the lines of a table; each row takes two lines if the other columns leave too little room for names.

    The first column holds names, which are shortened if the table is too wide; ``right`` lists right-aligned columns.
    """
    cells = [list(column) for column in zip(header, *rows, strict=True)]
    names, own_line = cells[0], False
    if columns is not None:
        limit = max(NARROW, columns // 2)
        cells[1:] = [[title, *(clip(cell, limit) for cell in column)] for title, *column in cells[1:]]
    widths = [max(map(len, column)) for column in cells]
    if columns is None:
        widths = [min(width, _PADDED) for width in widths]
    else:
        room = columns - sum(widths[1:]) - 2 * (len(header) - 1)
        own_line = room < min(widths[0], NARROW)
        widths[0] = min(widths[0], columns if own_line else room)
        names[1:] = shorten(names[1:], widths[0])
    align = [str.rjust if k in right else str.ljust for k in range(len(header))]
    aligned = [map(align[k], cells[k], repeat(widths[k])) for k in range(int(own_line), len(header))]
    lines = [line.rstrip() for line in map("  ".join, zip(*aligned, strict=True))]
    return [f"{name}\n  {line}" for name, line in zip(names, lines, strict=True)] if own_line else lines


def quantity(count: int, noun: str) -> str:
    """Return a large count with three digits: "8,192 values", "42.1 M values", "1.24 B parameters"."""
    for unit_size, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        amount = count / unit_size
        if amount >= 1:
            return f"{amount:.3g} {name} {noun}s" if amount < 999.5 else f"{amount:,.0f} {name} {noun}s"
    return plural(count, noun)


def figure(value: float, digits: int) -> str:
    """Return a float with this many significant digits, or an int with all its digits."""
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"
