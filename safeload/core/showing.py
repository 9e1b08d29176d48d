"""Results of functions: text for terminals, HTML for notebooks, plain values for JSON, rows for data frames."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, islice, repeat
from typing import Any, ClassVar, TypeAlias, TypeVar

from .text import clip, is_terminal, more, plural, printable, show, size

# ---- tables, wrapped prose, names shortened to a width, and rounded numbers ----

# Without a line limit, columns are padded to at most this width, so that a long name does not widen every line.
_PADDED = 100

#: If a table leaves less room for names, each name gets its own line.
NARROW = 20

# `shorten` looks at this many characters and parts of a name.
_LONGEST, _PARTS = 2000, 64


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


def parts_of(name: str, most: int) -> list[str]:
    """Divide a name after dots and slashes, at most ``most`` times; not inside ranges such as {0..31}."""
    return re.split(r"(?<=[./])(?<!\.\.)(?!\.)", name, maxsplit=most)


def shorten(names: Sequence[str], columns: int | None) -> list[str]:
    """Shorten names to a width by cutting the parts that most names share.

    Beside other layers and matrices, "model.layers.3.self_attn.q_proj.weight" becomes "model.…self_attn.q_proj.weight".
    A width of None keeps the names whole.
    """
    if columns is None or all(len(name) <= columns for name in names):
        return list(names)
    divided = [parts_of(name[:_LONGEST], _PARTS) for name in names]
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
    import textwrap  # only here: few programs wrap prose

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


# ---- HTML for notebooks and report pages ----

# Maximum length of a value: a name can have a megabyte.
_CELL = 200


def escaped(value: str) -> str:
    """Escape text from a file for HTML, without control characters."""
    from html import escape  # only here: it has a table of all entities

    return escape(printable(value))


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], more: str = "") -> str:
    """Return a plain table, styled by the notebook."""

    def line(tag: str, cells: Sequence[str]) -> str:
        inside = "".join(f'<{tag} style="text-align: left">{_html_cell(cell)}</{tag}>' for cell in cells)
        return f"<tr>{inside}</tr>"

    head, body = line("th", header), "".join(line("td", row) for row in rows)
    below = f"<div>{_html_cell(more)}</div>" if more else ""
    return f"<div><div>{_html_cell(title)}</div><table><thead>{head}</thead><tbody>{body}</tbody></table>{below}</div>"


def _html_cell(value: str) -> str:
    return escaped(clip(value, _CELL))


# ---- results of functions ----

# Maximum number of rows in a notebook, in a repr, and on a terminal.
ROWS, _LINES, _LISTED = 20, 8, 100

# Maximum length of a name in a repr.
_NAME_IN_REPR = 60


def screen(head: str, tensors: Mapping[str, Any]) -> str:
    """Return a heading, the first tensors with dtype and shape, and the number of omitted tensors."""
    lines = [head]
    for name, tensor in islice(tensors.items(), _LINES):
        kind = getattr(tensor, "scheme", None) or getattr(tensor, "dtype", type(tensor).__name__)
        lines.append(f"  {clip(printable(str(name)), _NAME_IN_REPR)}  {kind} {list(getattr(tensor, 'shape', ()))}")
    return "\n".join([*lines, *(f"  {line}" for line in more(len(tensors), _LINES))])


def dict_repr(kind: str, arrays: Mapping[str, Any], note: str = "") -> str:
    """Return the repr of a dict of arrays: its first names with dtypes and shapes."""
    return screen(f"<{kind}: {plural(len(arrays), 'tensor')}{f', {note}' if note else ''}>", arrays)


# A row of a table: a plain value for each column.
Row: TypeAlias = dict[str, Any]


class Result:
    """A result, which declares its columns once: ``_columns`` has their names, `_values` their values.

    A column has values of a single type ("" and [] instead of None), because polars derives it from the first 100 rows.
    """

    __slots__ = ()

    _columns: ClassVar[tuple[str, ...]]  # keys of the rows
    _notebook: ClassVar[tuple[str, ...]] = ()  # the columns that notebooks show; () for all
    _json: ClassVar[tuple[str | tuple[str, Callable[[Any], Any]], ...]]  # attributes in `to_dict`, or keys and getters

    def _values(self) -> Iterable[Any]:
        """Return a tuple of values per row; a result that is a tuple is its only row."""
        return (self,)

    def _about(self) -> Sequence[str]:
        """Return the line above the table in a notebook, and the lines below it."""
        return [type(self).__name__]

    def _notable(self, rows: list[Row]) -> list[Row]:
        """Select the rows for a notebook."""
        return rows

    def rows(self) -> list[Row]:
        """Return a dict of plain values per row, for ``pandas.DataFrame`` or ``polars.DataFrame``."""
        return [dict(zip(self._columns, values, strict=True)) for values in self._values()]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values for ``json.dump``; NaN and infinity become None."""
        keys = ((key, getattr(self, key)) if isinstance(key, str) else (key[0], key[1](self)) for key in self._json)
        return {key: plain(value) for key, value in keys}

    def _repr_html_(self) -> str:
        title, *notes = self._about()
        rows, header = self._notable(self.rows()), self._notebook or self._columns
        cells = [[_cell(key, row[key]) for key in header] for row in rows[:ROWS]]
        return html_table(title, header, cells, "; ".join((*more(len(rows), ROWS), *notes)))


def _cell(key: str, value: Any) -> str:
    if value == []:
        return ""
    if key == "nbytes":
        return size(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else show(value)
    return f"{value:,}" if isinstance(value, int) else figure(value, 4)


def plain(value: Any, *, lossless: bool = False) -> Any:
    """Convert a value for JSON: keys to str, arrays, tuples and sets to lists, bytes to hex, complex to text."""
    if value is None or type(value) in (str, int, bool):
        return value
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value) if lossless else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, lossless=lossless) for key, item in value.items()}
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict(), lossless=lossless)
    if isinstance(value, (list, tuple)):
        return [plain(item, lossless=lossless) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, lossless=lossless) for item in value), key=repr)
    if isinstance(value, complex):
        return repr(value)
    return value.hex() if isinstance(value, (bytes, bytearray)) else value


class Report(Result):
    """A result with a page of text."""

    def lines(self, columns: int | None = 80) -> list[str]:
        """Return the report as lines of text.

        Args:
            columns: width in characters; None cuts nothing.

        Returns:
            Lines without line ends.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines(terminal_columns()))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._about()[0]}>"


_R = TypeVar("_R")


class ResultTable(Result, dict[str, _R]):
    """Results by tensor name, which print as a table. The base of the dicts that functions return."""

    def lines(self, columns: int | None = None, rows: int | None = None) -> list[str]:
        """Return the header and a line for each tensor.

        Args:
            columns: width in characters; None cuts nothing.
            rows: maximum number of rows; None shows all.

        Returns:
            Lines without line ends.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the rows by tensor name, for ``json.dump``; NaN and infinity become None."""
        return {row.pop("name"): plain(row) for row in self.rows()}

    def __str__(self) -> str:
        return self._first(terminal_rows(_LISTED))

    def __repr__(self) -> str:
        return self._first(_LINES)

    def _first(self, rows: int | None) -> str:
        """Return this many rows as text, and the number of hidden rows."""
        return "\n".join([*self.lines(terminal_columns(), rows), *more(len(self), rows)])

    def _about(self) -> Sequence[str]:
        return [plural(len(self), "tensor")]
