"""HTML for notebooks and report pages, with everything that comes from a file escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .text import clip, printable

# Most characters of a value: a name may have a megabyte.
_LONGEST = 200


def escaped(value: str) -> str:
    """Text from a file, escaped for HTML and without control characters."""
    from html import escape  # only here: it has a table of all entities

    return escape(printable(value))


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], more: str = "") -> str:
    """A plain table that a notebook styles.

    Args:
        title: a line above it.
        header: titles of the columns.
        rows: the cells, as plain text; long ones are shortened in the middle.
        more: a line below it, such as the number of rows that are left out.
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        inside = "".join(f'<{tag} style="text-align: left">{_cell(cell)}</{tag}>' for cell in cells)
        return f"<tr>{inside}</tr>"

    head, body = line("th", header), "".join(line("td", row) for row in rows)
    below = f"<div>{_cell(more)}</div>" if more else ""
    return f"<div><div>{_cell(title)}</div><table><thead>{head}</thead><tbody>{body}</tbody></table>{below}</div>"


def _cell(value: str) -> str:
    return escaped(clip(value, _LONGEST))
