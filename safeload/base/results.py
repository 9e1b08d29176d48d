"""Results of functions: rows for data frames, tables for notebooks, and plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from . import html
from .layout import figure, terminal_columns, terminal_rows
from .text import plural, show, size

# A row of a table: a plain value for each column.
Row: TypeAlias = dict[str, Any]

# Maximum number of rows in a notebook, in a repr, and on a terminal.
_ROWS, _LINES, _LISTED = 20, 8, 100


def tensor_row(name: str, dtype: str, shape: Sequence[int], nbytes: int, **more: Any) -> Row:
    """Return a row about a tensor.

    A column should have values of a single type ("" and [] instead of None), because polars derives it from the first
    100 rows.
    """
    return {"name": name, "dtype": dtype, "shape": list(shape), "nbytes": nbytes, **more}


def as_html(title: str, rows: Sequence[Row], more: Iterable[str] = (), header: Sequence[str] = ()) -> str:
    """Return the first rows as a table for a notebook."""
    header = header or list(rows[0] if rows else ())
    cells = [[_cell(key, row.get(key)) for key in header] for row in islice(rows, _ROWS)]
    hidden = [f"... and {len(rows) - len(cells):,} more"] if len(rows) > len(cells) else []
    return html.table(title, header, cells, "; ".join((*hidden, *more)))


def _cell(key: str, value: Any) -> str:
    if value is None or value == []:
        return ""
    if key == "nbytes":
        return size(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else show(value)
    return f"{value:,}" if isinstance(value, int) else figure(value, 4)


def plain(value: Any, *, lossless: bool = False) -> Any:
    """Convert a value for JSON: keys to str, arrays, tuples and sets to lists, bytes to hex, complex to text."""
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value) if lossless else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, lossless=lossless) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, lossless=lossless) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, lossless=lossless) for item in value), key=repr)
    if isinstance(value, complex):
        return repr(value)
    return value.hex() if isinstance(value, (bytes, bytearray)) else value


class Result(Protocol):
    """A result about a single tensor."""

    def rows(self) -> list[Row]:
        """Return the result as a row in a list."""


_R = TypeVar("_R", bound=Result)


class ResultTable(dict[str, _R], Generic[_R]):
    """Results by tensor name, which print as a table. The base of the dicts that functions return."""

    def lines(self, columns: int | None = None, rows: int | None = None) -> list[str]:
        """Return the header and a line for each tensor.

        Args:
            columns: width in characters; None cuts nothing.
            rows: maximum number of rows; None shows all.
        """
        raise NotImplementedError

    def rows(self) -> list[Row]:
        """Return a row for each tensor, for ``pandas.DataFrame`` or ``polars.DataFrame``."""
        return [{**row, "name": name} for name, result in self.items() for row in result.rows()]

    def to_dict(self) -> dict[str, Any]:
        """Return the rows by tensor name, for ``json.dump``; NaN and infinity become None."""
        return {row.pop("name"): plain(row) for row in self.rows()}

    def __str__(self) -> str:
        rows = terminal_rows(_LISTED)
        return "\n".join([*self.lines(terminal_columns(), rows), *self._rest(rows)])

    def __repr__(self) -> str:
        return "\n".join([*self.lines(terminal_columns(), _LINES), *self._rest(_LINES)])

    def _rest(self, rows: int | None) -> list[str]:
        """Return the line that counts hidden rows, if there are any."""
        return [] if rows is None or len(self) <= rows else [f"... and {len(self) - rows:,} more"]

    def _repr_html_(self) -> str:
        return as_html(plural(len(self), "tensor"), self.rows())
