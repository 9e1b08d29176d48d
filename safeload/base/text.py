"""Text for terminals and messages: escaped names, sizes, columns that fit."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

# Characters of a value in a message: two lines of a terminal.
_SHOWN = 200
# Least likeness of a misspelling, as difflib measures it.
_NEAR = 0.7
# Characters of it that are compared: no name of a dtype or scheme has more.
_COMPARED = 40

# Widest that columns are padded to where lines have no limit, so that one long name does not widen every line.
_PADDED = 100

#: Names that have less room than this beside other columns get a line of their own.
NARROW = 20

# Most parts of a name that `shorten` chooses from, and most characters of it.
_PARTS = 64
_LONGEST = 2000
#: Where the parts of a name are divided; not in {0..31}.
BETWEEN_PARTS = re.compile(r"(?<=[./])(?<!\.\.)(?!\.)")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Powers of 1000, as Hugging Face writes them ("5GB"), and of 1024.
_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


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

    text = text[:_COMPARED]
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


def parse_size(value: int | str, what: str) -> int:
    """Parses a size in bytes: "500MB", "5GB", "2GiB" or a number.

    Args:
        value: the size.
        what: how messages name it.

    Raises:
        TypeError: it is neither a number nor text.
        ValueError: it is not a size, or not positive.
    """
    if isinstance(value, str):
        from fractions import Fraction  # only here: it takes milliseconds

        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _BYTES:
            raise ValueError(f'{what} {show(value)} is not a size such as "500MB" or "5GB"')
        value = int(Fraction(match[1]) * _BYTES[match[2].upper()])
    value = operator.index(value)
    if value < 1:
        raise ValueError(f"{what} is {show(value)}, but at least one byte is needed")
    return value


def size(nbytes: int) -> str:
    """A size in human-readable form: "3.77 MiB"."""
    one, name = unit(nbytes)
    value = nbytes / one
    return f"{nbytes} B" if name == "B" else f"{value:.3g} {name}" if value < 1000 else f"{value:.0f} {name}"


def width() -> int:
    """Width of the terminal in columns, 80 where there is none."""
    import shutil  # only here: it imports bz2 and lzma, and would add 2 ms to `import safeload`, which uses `plural`

    return max(40, shutil.get_terminal_size((80, 24)).columns)


def clip(text: str, columns: int | None) -> str:
    """Text shortened in the middle: names differ at both ends. None leaves it whole."""
    if columns is None or len(text) <= columns:
        return text
    left = (columns - 1) // 2
    return f"{text[:left]}…{text[len(text) - (columns - 1 - left) :]}"


def shorten(names: Sequence[str], columns: int | None) -> list[str]:
    """Names of at most this width: of long ones the parts are left out that most names have.

    Of "model.layers.3.self_attn.q_proj.weight" remains "model.…self_attn.q_proj.weight" where other layers and other
    matrices are among the names. A width of None leaves them whole.
    """
    if columns is None or all(len(name) <= columns for name in names):
        return list(names)
    parts = [BETWEEN_PARTS.split(name[:_LONGEST], _PARTS) for name in names]
    count = Counter(part for one in parts for part in set(one))
    return [_shorten(name, one, count, len(names), columns) for name, one in zip(names, parts, strict=True)]


def _shorten(name: str, parts: Sequence[str], count: Mapping[str, int], total: int, columns: int) -> str:
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
        found = lost[end] - lost[first], off_centre, begins[first], begins[end]
        best = found if best is None or found < best else best
    if best is None or best[3] - best[2] == len(name):
        return clip(name, columns)
    _, _, begin, stop = best
    return f"{name[: begin + stop - begin - excess]}…{name[stop:]}"


def wrap(text: str, columns: int | None, indent: str = "", hanging: str | None = None) -> list[str]:
    """Lines of prose. Without a width they have 80 columns, or more where a word, such as a name, is longer.

    Args:
        text: the prose.
        columns: width; None where nothing may be cut.
        indent: begins every line.
        hanging: begins the lines after the first, if they begin otherwise.
    """
    import textwrap  # only here: most callers of this module do not need it

    wrapper = textwrap.TextWrapper(columns or 80, indent, indent if hanging is None else hanging)
    wrapper.break_long_words = columns is not None
    wrapper.break_on_hyphens = columns is not None
    return wrapper.wrap(text)


def table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: frozenset[int], columns: int | None
) -> list[str]:
    """A table: its header and its rows, each of two lines where the other columns leave the names too little room.

    Args:
        header: titles of the columns.
        rows: the cells. Those of the first column are names, which are shortened if the table is too wide.
        right: numbers of the columns that are aligned at the right.
        columns: width; None where nothing may be cut.
    """
    most = None if columns is None else max(NARROW, columns // 2)
    rows = [header, *((name, *(clip(cell, most) for cell in cells)) for name, *cells in rows)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
    names, apart = [row[0] for row in rows], False
    if columns is None:
        widths = [min(width, _PADDED) for width in widths]
    else:
        room = columns - sum(widths[1:]) - 2 * (len(header) - 1)
        apart = room < min(widths[0], NARROW)
        widths[0] = min(widths[0], columns if apart else room)
        names[1:] = shorten(names[1:], widths[0])

    def line(cells: Sequence[str]) -> str:
        """The last cells of a row."""
        places = range(len(header) - len(cells), len(header))
        aligned = (c.rjust(widths[k]) if k in right else c.ljust(widths[k]) for k, c in zip(places, cells, strict=True))
        return "  ".join(aligned).rstrip()

    if apart:
        return [f"{name}\n  {line(row[1:])}" for name, row in zip(names, rows, strict=True)]
    return [line((name, *row[1:])) for name, row in zip(names, rows, strict=True)]


def quantity(count: int, noun: str) -> str:
    """A large number of things with three digits: "8,192 values", "42.1 M values", "1.24 B parameters"."""
    for unit_size, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        amount = count / unit_size
        if amount >= 1:
            return f"{amount:.3g} {name} {noun}s" if amount < 999.5 else f"{amount:,.0f} {name} {noun}s"
    return plural(count, noun)


def check_name(name: Any) -> None:
    """Refuse a tensor name that is not a str.

    Raises:
        TypeError: the message names its type.
    """
    if not isinstance(name, str):
        raise TypeError(f"a tensor name must be str, not {type(name).__name__}")


def figure(value: float, digits: int) -> str:
    """A number with this many digits, or with all if it is an int."""
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def plural(count: int, noun: str) -> str:
    """A number of things: "1 tensor", "1,024 tensors"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
