"""Text for terminals and messages: escaped names, sizes, columns that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Characters of a value in a message: two lines of a terminal.
_SHOWN = 200
# Least likeness of a misspelling, as difflib measures it.
_NEAR = 0.7

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    """Text from a file, with characters escaped that a terminal would interpret instead of print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def show(value: Any) -> str:
    """A value from a file or a caller as messages show it: its escaped repr, in at most 200 characters."""
    try:
        if isinstance(value, (str, bytes)):
            text = repr(value[:_SHOWN])
        else:
            import reprlib  # only here: it is rarely needed

            short = reprlib.Repr()
            short.maxstring = short.maxother = short.maxlong = _SHOWN
            short.maxlist = short.maxtuple = short.maxdict = 20
            text = short.repr(value)
    except Exception:  # an int with thousands of digits, or any error of a foreign __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def nearest(text: str, names: Iterable[str]) -> list[str]:
    """The name that a text is a misspelling of, as a list of one; empty if none is near, or several are equally.

    Digits are never misspelled: "int4" does not mean "int8".
    """
    import difflib  # only here: at the top it would add a millisecond to `import safeload`

    near = difflib.SequenceMatcher(None, b=text)
    ratios = {}
    for name in names:
        if _digits(name) == _digits(text):
            near.set_seq1(name)
            ratios[name] = near.ratio()
    best = max(ratios.values(), default=0.0)
    close = [name for name, ratio in ratios.items() if ratio == best]
    return close if best >= _NEAR and len(close) == 1 else []


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text))


def subject(name: str | None) -> str:
    """The beginning of a message about a tensor; empty for a single array, or where the tensor is not known."""
    return f"tensor {show(name)}: " if name else ""


def jsonable(value: Any) -> Any:
    """Metadata as JSON values: keys as text, arrays, tuples and sets as lists, bytes as hexadecimal."""
    if isinstance(value, (np.ndarray, np.generic)):
        return jsonable(value.tolist())
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(item) for item in value), key=repr)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def unit(nbytes: float) -> tuple[int, str]:
    """The unit to show a size in: its number of bytes, and its name."""
    power = 0
    while nbytes >= 1024 and power < len(_UNITS) - 1:
        nbytes /= 1024
        power += 1
    return 1024**power, _UNITS[power]


def size(nbytes: int) -> str:
    """A size in human-readable form: "3.77 MiB"."""
    one, name = unit(nbytes)
    value = nbytes / one
    return f"{nbytes} B" if name == "B" else f"{value:.3g} {name}" if value < 1000 else f"{value:.0f} {name}"


def width() -> int:
    """Width of the terminal in columns, 80 where there is none."""
    import shutil  # only here: it imports bz2 and lzma, and would add 2 ms to `import safeload`, which uses `plural`

    return max(40, shutil.get_terminal_size((80, 24)).columns)


def clip(text: str, columns: int) -> str:
    """Text shortened in the middle: names differ at both ends."""
    if len(text) <= columns:
        return text
    left = (columns - 1) // 2
    return f"{text[:left]}…{text[len(text) - (columns - 1 - left) :]}"


def table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: frozenset[int], columns: int
) -> list[str]:
    """Lines of a table. The first column is shortened if the table would be wider than ``columns``."""
    widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]
    others = sum(widths[1:]) + 2 * (len(header) - 1)
    widths[0] = max(len(header[0]), min(widths[0], columns - others))
    lines = []
    for row in (header, *rows):
        cells = [clip(row[0], widths[0]), *row[1:]]
        padded = [c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(cells, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    return lines


def plural(count: int, noun: str) -> str:
    """A number of things: "1 tensor", "1,024 tensors"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
