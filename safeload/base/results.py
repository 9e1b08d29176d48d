"""Results of functions: rows for data frames, tables for notebooks, plain values for JSON, and text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from .showing import figure, terminal_columns, terminal_rows
from .text import more, plural, show, size

# A row of a table: a plain value for each column.
Row: TypeAlias = dict[str, Any]

# Maximum number of rows in a notebook, in a repr, and on a terminal.
_ROWS, _LINES, _LISTED = 20, 8, 100


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
        cells = [[_cell(key, row[key]) for key in header] for row in rows[:_ROWS]]
        return html.table(title, header, cells, "; ".join((*more(len(rows), _ROWS), *notes)))


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
