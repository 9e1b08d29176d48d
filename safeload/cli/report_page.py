"""The page of ``safeload report``: one HTML file without external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .._version import __version__
from ..base.text import printable

_STYLE = """
:root { --ink: #1c2530; --soft: #5b6876; --line: #dde3ea; --paper: #fff; --ground: #f4f6f9; --bad: #b3261e;
  --odd: #8a5a00; --good: #1d6b3a; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.2rem 1rem 3rem; }
h1 { font-size: 1.45rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .6rem; }
p { margin: .2rem 0 .6rem; }
.soft { color: var(--soft); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 1rem;
  margin: 1rem 0; }
.verdict { display: inline-block; font-weight: 600; border-radius: 99px; padding: .15rem .8rem; color: #fff; }
.good { background: var(--good); } .odd { background: var(--odd); } .bad { background: var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem 1.2rem; margin: 1rem 0 0; }
dt { color: var(--soft); font-size: .82rem; } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; }
.wide svg { display: block; width: 100%; min-width: 30rem; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.name { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .82rem; overflow-wrap: anywhere;
  min-width: 11rem; }
ul.findings { list-style: none; margin: 0; padding: 0; }
.findings li { padding: .5rem 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.findings b { display: inline-block; min-width: 9.5rem; }
.error b { color: var(--bad); } .warning b { color: var(--odd); }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .86em; }
summary { cursor: pointer; font-weight: 600; }
footer { color: var(--soft); font-size: .82rem; }
"""


def text(value: str) -> str:
    """Text from a file, escaped for HTML and without control characters."""
    return escape(printable(value))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: frozenset[int]) -> str:
    """A table; the columns in ``left`` hold names, the others numbers."""

    def cell(tag: str, column: int, value: str) -> str:
        kind = "" if tag == "th" and column in left else "name" if column in left else "number"
        return f'<{tag} class="{kind}">{text(value)}</{tag}>' if kind else f"<{tag}>{text(value)}</{tag}>"

    head = "".join(cell("th", k, title) for k, title in enumerate(header))
    lines = [f"<tr>{''.join(cell('td', k, value) for k, value in enumerate(row))}</tr>" for row in rows]
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def findings(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """A list of findings: severity, code, subject and message of each."""
    items = [
        f'<li class="{escape(severity)}"><b>{text(code)}</b> <code>{text(subject)}</code><br>{text(message)}</li>'
        for severity, code, subject, message in rows
    ]
    return f'<ul class="findings">{"".join(items)}</ul>' if items else ""


def section(title: str, *parts: str, note: str = "") -> str:
    """A section of the page; empty if all its parts are empty."""
    inside = "".join(parts)
    if not inside:
        return ""
    explained = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{explained}{inside}</section>"


def picture(svg: str) -> str:
    """A drawing that scrolls horizontally on a narrow screen."""
    return f'<div class="wide">{svg}</div>' if svg else ""


def collapsible(title: str, inside: str) -> str:
    """Long content that is hidden until its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names and values."""
    return f"<dl>{''.join(f'<div><dt>{escape(k)}</dt><dd>{text(v)}</dd></div>' for k, v in pairs)}</dl>"


def page(title: str, verdict: str, mood: str, sections: Iterable[str]) -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{text(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{text(title)}</h1><span class="verdict {mood}">{escape(verdict)}</span>'
        f"{''.join(sections)}<footer>safeload {__version__}</footer></main></body></html>\n"
    )
