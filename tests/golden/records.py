"""The recorded rows: files of text with a row a line, what differs from them, and how rows are accepted."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SHOWN = 20  # rows of a group
WIDTH = 160  # characters of a value


class Difference(NamedTuple):
    """Rows that are not as recorded, by key: old and new values."""

    changed: dict[str, tuple[str, str]]
    missing: dict[str, str]
    new: dict[str, str]

    def keys(self) -> set[str]:
        return {*self.changed, *self.missing, *self.new}


def matches(pattern: str, key: str) -> bool:
    """A glob in which only ``*`` is special: keys have brackets."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), key, re.DOTALL) is not None


def may_have(prefix: str, pattern: str) -> bool:
    """Whether keys with this prefix can match."""
    head = pattern.partition("*")[0]
    return head.startswith(prefix) or prefix.startswith(head)


def read(folder: Path = FOLDER) -> dict[str, str]:
    rows = {}
    for path in sorted((folder / "records").glob("*.tsv")):
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("\t")
            rows[key] = value
    return rows


def write(rows: Mapping[str, str], folder: Path = FOLDER) -> None:
    """Write a file for each subject, the first part of keys."""
    subjects: dict[str, list[str]] = {}
    for key in sorted(rows):
        subjects.setdefault(key.partition("/")[0], []).append(f"{key}\t{rows[key]}\n")
    (folder / "records").mkdir(exist_ok=True)
    for path in (folder / "records").glob("*.tsv"):
        path.unlink()
    for subject, lines in subjects.items():
        (folder / "records" / f"{subject}.tsv").write_text("".join(lines), encoding="utf-8", newline="\n")


def compare(recorded: Mapping[str, str], found: Mapping[str, str], only: str = "*") -> Difference:
    old = {key: value for key, value in recorded.items() if matches(only, key)}
    new = {key: value for key, value in found.items() if matches(only, key)}
    return Difference(
        {key: (old[key], new[key]) for key in sorted(old.keys() & new.keys()) if old[key] != new[key]},
        {key: old[key] for key in sorted(old.keys() - new.keys())},
        {key: new[key] for key in sorted(new.keys() - old.keys())},
    )


def window(value: str, begin: int) -> str:
    """The part of a value that tells: from a little before the first difference on."""
    begin = max(0, begin - WIDTH // 3) if len(value) > WIDTH else 0
    part = value[begin : begin + WIDTH]
    return f"{'...' if begin else ''}{part}{'...' if begin + WIDTH < len(value) else ''}"


def shown(difference: Difference) -> Iterable[str]:
    """Lines for a terminal; none if nothing differs."""
    for title, rows in zip(("changed", "missing", "new"), difference, strict=True):
        if rows:
            yield f"{len(rows)} rows {title}:"
        for key, value in list(rows.items())[:SHOWN]:
            yield f"  {key}"
            if isinstance(value, str):
                yield f"    {window(value, 0)}"
                continue
            pairs = zip(*value, strict=False)
            first = next((k for k, (a, b) in enumerate(pairs) if a != b), min(map(len, value)))
            yield f"    was {window(value[0], first)}"
            yield f"    is  {window(value[1], first)}"
        if len(rows) > SHOWN:
            yield f"  and {len(rows) - SHOWN} more"


def accept(found: Mapping[str, str], pattern: str, reason: str, folder: Path = FOLDER) -> int:
    """Record the rows that match as they are now, and write down why; returns their number.

    Raises:
        ValueError: there is no reason, or no row that matches differs.
    """
    if not reason.strip():
        raise ValueError("--accept needs --reason TEXT: why these rows change")
    recorded = read(folder)
    difference = compare(recorded, found, pattern)
    if not difference.keys():
        raise ValueError(f"no row that differs matches {pattern!r}")
    for key in difference.missing:
        del recorded[key]
    recorded |= {key: new for key, (_, new) in difference.changed.items()} | difference.new
    write(recorded, folder)
    counts = ", ".join(f"{len(rows)} {name}" for name, rows in zip(Difference._fields, difference, strict=True) if rows)
    with (folder / "CHANGES.md").open("a", encoding="utf-8", newline="\n") as log:
        log.write(f"- `{pattern}`: {' '.join(reason.split())} ({counts})\n")
    return len(difference.keys())
