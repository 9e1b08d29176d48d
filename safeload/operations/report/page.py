"""Parts of the report page: one HTML file without scripts or external resources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from ..._version import __version__
from ...base.html import escaped
from ...base.text import plural
from ..validate.findings import Finding

# Content security policy: only the page's own style.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

# Lists of at most this many rows are printed even if collapsed; shorter tables are open.
_PRINTED = 50
_OPEN = 20

# Identifies pages written by safeload.
_GENERATOR = '<meta name="generator" content="safeload '

_MARKS = {"good": "✓", "calm": "✓", "odd": "!", "bad": "✗"}


def breakable(name: str) -> str:
    """Escape a name and allow line breaks after dots and underscores."""
    return re.sub(r"([._])(?=.)", r"\1<wbr>", escaped(name))


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, label: str, words: int = 1) -> str:
    """Return a table in a scrolling box, collapsed if it is long; ``words`` columns are text, the rest numbers."""
    kinds = ["name mono", *["word"] * (words - 1), *["number"] * (len(header) - words)]

    def row(cells: Sequence[str]) -> str:
        values = (f'<td class="{k}">{escaped(cell)}</td>' for k, cell in zip(kinds[1:], cells[1:], strict=True))
        return f'<tr><th scope="row" class="{kinds[0]}">{breakable(cells[0])}</th>{"".join(values)}</tr>'

    heads = "".join(
        f'<th scope="col" class="{kind.partition(" ")[0]}">{escaped(title)}</th>'
        for title, kind in zip(header, kinds, strict=True)
    )
    inside = (
        '<p class="hint">Scroll sideways to see all columns.</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table><thead><tr>'
        f"{heads}</tr></thead><tbody>{''.join(map(row, rows))}</tbody></table></div>"
    )
    return collapsible(title, inside, rows=len(rows), closed=len(rows) > _OPEN)


def finding(first: Finding, *, similar: Sequence[tuple[str, str]], left: int) -> str:
    """Return a finding, with ``similar`` findings by subject and message, and the number of findings ``left`` out."""
    severity, subject = first.severity, first.tensor or "file"
    count = 1 + len(similar) + left
    many = f'<span class="soft small">{plural(count, "tensor")}</span>' if count > 1 else ""
    items = [f"<li><code>{escaped(name)}</code> {escaped(message)}</li>" for name, message in similar]
    if left:
        items.append(f"<li>and {left:,} more; safeload check --json lists all</li>")
    inside = f"<ul>{''.join(items)}</ul>" if items else ""
    listed = collapsible(f"{count - 1:,} more like it", inside, rows=len(items))
    return (
        f'<li class="{escape(severity)}"><p class="what"><b>{escape(severity)}</b> '
        f"<code>{escaped(first.code)}</code>{many}</p>"
        f"<p><code>{escaped(subject)}</code> {escaped(first.message)}</p>{listed}</li>"
    )


def section(title: str, *parts: str, note: str = "") -> str:
    """Return a section; empty if all its parts are empty."""
    inside = "".join(parts)
    if not inside:
        return ""
    return f"<section><h2>{escape(title)}</h2>{soft(note)}{inside}</section>"


def soft(note: str) -> str:
    """Return a note in small type."""
    return f'<p class="soft small">{escape(note)}</p>' if note else ""


def part(title: str, inside: str) -> str:
    """Return a titled part of a section; empty if it has no content."""
    return f"<h3>{escape(title)}</h3>{inside}" if inside else ""


def collapsible(title: str, inside: str, *, rows: int, closed: bool = True) -> str:
    """Return a collapsible list, "" for an empty one; on paper a short list is printed, and a long list named."""
    if not inside:
        return ""
    state = "" if closed else " open"
    short = ' class="short"' if rows <= _PRINTED else ""
    missing = "" if short else f'<p class="printed soft">Not printed: {escape(title)}.</p>'
    return f"<details{short}{state}><summary>{escape(title)}</summary>{inside}</details>{missing}"


def facts(pairs: Iterable[tuple[str, str]], kind: str) -> str:
    """Return names and values as "tiles", as "meta" data of the head, or as "pairs" of long texts."""
    items = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="{kind}">{items}</dl>' if items else ""


def is_page(head: bytes) -> bool:
    """Return True if a file with these first bytes is a report page."""
    return head.startswith(b"<!doctype html>") and _GENERATOR.encode() in head


def page(title: str, verdict: str, mood: str, *, checked: str, about: str, sections: Iterable[str]) -> str:
    """Return the whole page; ``mood`` is "good", "calm" (parts are unchecked), "odd" or "bad"."""
    style = files(__package__).joinpath("report.css").read_text("utf-8")
    style = re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)).strip()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'{_GENERATOR}{__version__}">'
        f"<title>{escaped(title)}: safeload report</title><style>{style}</style></head>"
        f'<body><div class="page"><header><p class="brand"><b>safeload</b> report</p><h1>{escaped(title)}</h1>'
        f'<div class="verdict {mood}"><strong><span aria-hidden="true">{_MARKS[mood]}</span> '
        f'{escaped(verdict)}</strong><span class="soft">{escaped(checked)}</span></div>{about}</header>'
        f"<main>{''.join(sections)}</main>"
        f"<footer>Written by safeload {__version__}. This page is self-contained: it loads nothing and runs no "
        "script.</footer></div></body></html>\n"
    )
