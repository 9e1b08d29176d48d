"""The page of ``safeload report``: one HTML file without scripts and external resources, made of these parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from .._version import __version__
from ..base.html import escaped
from ..base.text import plural

# What the browser may use: the page's own style, nothing else.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

# A list with at most this many rows is printed although it is closed on the screen; a table with few is open.
_PRINTED = 50
_OPEN = 20

# Tells the pages of safeload from those of others.
_GENERATOR = '<meta name="generator" content="safeload '

_MARKS = {"good": "✓", "calm": "✓", "odd": "!", "bad": "✗"}


def breakable(name: str) -> str:
    """A name from a file, escaped, that a line may break after its dots and underscores."""
    return re.sub(r"([._])(?=.)", r"\1<wbr>", escaped(name))


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, label: str, words: int = 1) -> str:
    """A wide table in a box that scrolls; a long one is hidden until its title is clicked.

    Args:
        title: what is listed, with the number of rows.
        header: titles of the columns.
        rows: the first cell of each is a name.
        label: what the table shows, for screen readers.
        words: number of columns at the left that hold words; the others hold numbers.
    """
    kinds = ["name mono", *["word"] * (words - 1), *["number"] * (len(header) - words)]

    def row(cells: Sequence[str]) -> str:
        others = (f'<td class="{k}">{escaped(cell)}</td>' for k, cell in zip(kinds[1:], cells[1:], strict=True))
        return f'<tr><th scope="row" class="{kinds[0]}">{breakable(cells[0])}</th>{"".join(others)}</tr>'

    heads = "".join(
        f'<th scope="col" class="{kind.partition(" ")[0]}">{escaped(title)}</th>'
        for title, kind in zip(header, kinds, strict=True)
    )
    inside = (
        '<p class="hint">Scroll the table sideways to see all of its columns.</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table><thead><tr>'
        f"{heads}</tr></thead><tbody>{''.join(map(row, rows))}</tbody></table></div>"
    )
    return collapsible(title, inside, rows=len(rows), closed=len(rows) > _OPEN)


def finding(severity: str, code: str, subject: str, message: str, others: Sequence[tuple[str, str]], more: int) -> str:
    """One finding.

    Args:
        severity: "error", "warning" or "note".
        code: its code.
        subject: the tensor, or the file.
        message: what was found.
        others: subject and message of each that says the same of another tensor.
        more: number of further ones that are not listed.
    """
    count = 1 + len(others) + more
    many = f'<span class="soft small">{plural(count, "tensor")}</span>' if count > 1 else ""
    items = [f"<li><code>{escaped(name)}</code> {escaped(said)}</li>" for name, said in others]
    if more:
        items.append(f"<li>and {more:,} more; safeload check --json lists every one</li>")
    listed = collapsible(f"{count - 1:,} more like it", f"<ul>{''.join(items)}</ul>", rows=len(items)) if items else ""
    return (
        f'<li class="{escape(severity)}"><p class="what"><b>{escape(severity)}</b> '
        f"<code>{escaped(code)}</code>{many}</p>"
        f"<p><code>{escaped(subject)}</code> {escaped(message)}</p>{listed}</li>"
    )


def section(title: str, *parts: str, note: str = "") -> str:
    """A section of the page; empty if all its parts are empty."""
    inside = "".join(parts)
    if not inside:
        return ""
    explained = f'<p class="soft small">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{explained}{inside}</section>"


def part(title: str, inside: str) -> str:
    """A part of a section with a title of its own; empty if it has nothing inside."""
    return f"<h3>{escape(title)}</h3>{inside}" if inside else ""


def collapsible(title: str, inside: str, *, rows: int, closed: bool = True) -> str:
    """A list that is hidden until its title is clicked; on paper a short one is shown, and a long one is named."""
    state = "" if closed else " open"
    short = ' class="short"' if rows <= _PRINTED else ""
    missing = "" if short else f'<p class="printed soft">Not printed: {escape(title)}.</p>'
    return f"<details{short}{state}><summary>{escape(title)}</summary>{inside}</details>{missing}"


def facts(pairs: Iterable[tuple[str, str]], kind: str) -> str:
    """Names and values, as "tiles", as the "meta" data of the head or as "pairs" of long texts."""
    items = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="{kind}">{items}</dl>' if items else ""


def head(title: str, verdict: str, mood: str, checked: str, about: str) -> str:
    """The head of the page.

    Args:
        title: name of the file or folder.
        verdict: "sound", and the number of findings.
        mood: "good", "calm" (not everything was checked), "odd" or "bad".
        checked: what the verdict rests on.
        about: path, date, size, digest.
    """
    return (
        f'<header><p class="brand"><b>safeload</b> report</p><h1>{escaped(title)}</h1>'
        f'<div class="verdict {mood}"><strong><span aria-hidden="true">{_MARKS[mood]}</span> '
        f"{escaped(verdict)}</strong>"
        f'<span class="soft">{escaped(checked)}</span></div>{about}</header>'
    )


def is_page(head: bytes) -> bool:
    """Whether a file with these first bytes is such a page."""
    return head.startswith(b"<!doctype html>") and _GENERATOR.encode() in head


def page(title: str, header: str, sections: Iterable[str]) -> str:
    """The whole page."""
    style = files(__package__).joinpath("report.css").read_text("utf-8")
    style = re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)).strip()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'{_GENERATOR}{__version__}">'
        f"<title>{escaped(title)}: safeload report</title><style>{style}</style></head>"
        f'<body><div class="page">{header}<main>{"".join(sections)}</main>'
        f"<footer>Written by safeload {__version__}. This page holds all it needs: it loads nothing and runs no "
        "script.</footer></div></body></html>\n"
    )
