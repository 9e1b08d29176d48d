"""Text for people: values and names in messages, errors that name their tensor, tables, and results of functions.

Results show as text for terminals, HTML for notebooks, plain values for JSON, and rows for data frames.
"""

from __future__ import annotations

import errno
import math
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import accumulate, islice, repeat
from typing import Any, ClassVar, TextIO, TypeAlias, TypeVar

from ..errors import FormatError, SafeloadError, missing_file

_Error = TypeVar("_Error", bound=SafeloadError)

# Maximum length of a value in a message: two lines of a terminal.
_SHOWN = 200
# Minimum similarity of a misspelling, by difflib's measure.
_SIMILAR = 0.7
# Longer inputs are cut before difflib compares them: no dtype or scheme has a longer name.
_COMPARED = 40

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Powers of 1000, as Hugging Face writes them ("5GB"), and of 1024.
_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def printable(text: str) -> str:
    """Escape text from a file if a terminal would interpret its characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def show(value: Any) -> str:
    """Return a file's or a caller's value for a message: its escaped repr, at most 200 characters long."""
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


def clip(text: str, columns: int | None) -> str:
    """Shorten text in the middle, because names differ at both ends; None allows any length."""
    if columns is None or len(text) <= columns:
        return text
    left = (columns - 1) // 2
    return f"{text[:left]}…{text[len(text) - (columns - 1 - left) :]}"


def nearest(text: str, names: Iterable[str]) -> list[str]:
    """Return the name that ``text`` misspells, in a list; the list is empty if no name or several names are close.

    Digits are never misspelled: "int4" does not mean "int8".
    """
    import difflib  # only here: at the top it would add a millisecond to `import safeload`

    text = text[:_COMPARED]
    matcher = difflib.SequenceMatcher(None, b=text)
    ratios = {}
    for name in names:
        if _digits(name) == _digits(text):
            matcher.set_seq1(name)
            ratios[name] = matcher.ratio()
    best = max(ratios.values(), default=0.0)
    close = [name for name, ratio in ratios.items() if ratio == best]
    return close if best >= _SIMILAR and len(close) == 1 else []


def nearest_five(text: str, names: Iterable[str]) -> list[str]:
    """Return the five names most like ``text``; names containing it come first."""
    import difflib

    known = list(names)
    containing = [name for name in known if text and text in name]
    return [*dict.fromkeys([*containing, *difflib.get_close_matches(text[:_COMPARED], known, 5, 0.0)])][:5]


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text))


def subject(name: str | None) -> str:
    """Return the beginning of a message about a tensor; it is empty if the tensor has no name."""
    return f"{tensor_named(name)}: " if name else ""


def tensor_named(name: object) -> str:
    """Return a tensor as the subject of a message: "tensor 'w'"."""
    return f"tensor {show(name)}"


def check_name(name: Any) -> None:
    """Refuse a tensor name that is not a str."""
    if not isinstance(name, str):
        raise TypeError(f"a tensor name must be str, got {type(name).__name__}")


def more(count: int, most: int | None) -> list[str]:
    """Return the line that counts the items after the first ``most``, if there are any."""
    return [] if most is None or count <= most else [f"... and {count - most:,} more"]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 tensor", "1,024 tensors"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def unit(nbytes: float) -> tuple[int, str]:
    """Return the unit to show a size in: its number of bytes and its name."""
    power = next((k for k in range(len(_UNITS) - 1) if nbytes < 1024 ** (k + 1)), len(_UNITS) - 1)
    return 1024**power, _UNITS[power]


def size(nbytes: int) -> str:
    """Return a size for humans: "3.77 MiB"."""
    unit_bytes, name = unit(nbytes)
    value = nbytes / unit_bytes
    return f"{nbytes} B" if name == "B" else f"{value:.3g} {name}" if value < 1000 else f"{value:.0f} {name}"


def parse_size(value: int | str, what: str) -> int:
    """Parse a size in bytes: "500MB", "5GB", "2GiB" or a number."""
    if isinstance(value, str):
        from fractions import Fraction  # only here: it takes milliseconds

        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _BYTES:
            raise ValueError(f'{what} {show(value)} is not a size such as "500MB" or "5GB"')
        value = int(Fraction(match[1]) * _BYTES[match[2].upper()])
    value = operator.index(value)
    if value < 1:
        raise ValueError(f"{what} must be at least 1 byte, got {show(value)}")
    return value


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if a stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it was closed
        return False


def as_texts(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Convert metadata to text: strings stay, other values become JSON. Values without a JSON form are dropped."""
    import json  # only here: it takes a millisecond

    texts = {}
    for key, value in metadata.items():
        if isinstance(value, str):
            texts[str(key)] = value
            continue
        try:
            plain = value.tolist() if hasattr(value, "tolist") else value
            texts[str(key)] = json.dumps(plain, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            continue
    return texts


# ---- errors ----

# Errors if a path does not exist: a signed URL is too long, and "owner/name" may have a file "owner".
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
# Imports what explains paths that do not exist, and returns it: `registry` puts its part here.
explaining: Callable[[], Any] = bool
# Windows' ERROR_INVALID_NAME and ERROR_BAD_PATHNAME for a URL: EINVAL in Python, ENOENT in the C core.
_INVALID = (123, 161)


def error_about(
    kind: type[_Error], text: str, *, path: str | None = None, offset: int | None = None, tensor: str | None = None
) -> _Error:
    """Return an error that names its file and tensor, such as "w.gguf: tensor 'x' has 5 dims".

    After a tensor, ``text`` is a predicate ("has 5 dims"), or a clause that begins with a colon.
    """
    if tensor is not None:
        text = f"{tensor_named(tensor)}{'' if text.startswith(':') else ' '}{text}"
    if path is not None and not issubclass(kind, FormatError):  # a FormatError ends with its path
        text = f"{path}: {text}"
    return kind(text, path=path, offset=offset, tensor=tensor)


def encode(text: str, subject: str, errors: str = "strict", *, tensor: str | None = None) -> bytes:
    """Encode a text as UTF-8. "surrogateescape" writes bytes that were not UTF-8 when they were read."""
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError:
        message = f"{subject} {show(text)} contains a lone surrogate, which UTF-8 cannot encode"
        raise SafeloadError(message, tensor=tensor) from None


def dangling(path: object) -> str:
    """Describe a link without a target, as an addition to its path; "" for any other path."""
    try:
        if isinstance(path, str) and os.path.islink(path) and not os.path.exists(path):
            return f", a link to {printable(os.readlink(path))}, which does not exist"
    except (OSError, ValueError):
        pass
    return ""


def os_error(number: int, path: str | None) -> OSError:
    """Return the ``OSError`` subclass for an errno; if the path does not exist, the message explains why."""
    if number in _MISSING and path is not None:
        link = dangling(path)
        if link:
            return missing_file(path, f"No such file or directory: {path}{link}")
        missing_paths = explaining()  # imported here: most paths exist
        known = missing_paths.describe(path) if missing_paths else None
        if known is not None:
            return missing_file(known[0], f"No such file or directory: {known[0]}; {known[1]}")
    if number == errno.ENOENT:
        return missing_file(path, f"No such file or directory: {path}")
    return OSError(number, os.strerror(number), path)


def unwritable(error: OSError, path: str) -> OSError:
    """Return the error to raise for a failed write; for a URL it says, without secrets, how to write there."""
    if error.errno not in _MISSING and getattr(error, "winerror", None) not in _INVALID:
        return error
    missing_paths = explaining()  # imported here: most paths are writable
    known = missing_paths.of_url(path, writes=True) if missing_paths else None
    return error if known is None else missing_file(known[0], f"No such file or directory: {known[0]}; {known[1]}")


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


# ---- packages that are not installed ----


def needed(package: str, text: str, pip: str = "", *others: str) -> Any:
    """Import an optional package, or raise the error for one that is not installed: ``text`` says what needs it."""
    try:
        return import_module(package)
    except ImportError as error:
        text = f"{text}, which is not installed: pip install {pip or package}"
        raise not_installed(error, text, package, *others) from None


def not_installed(error: ImportError, text: str, *packages: str) -> ImportError:
    """Return the error to raise after an import failed: how to install the package, or ``error`` if it is there.

    An installed package fails too: if another package or a library is missing, or if memory is limited.
    """
    name = next(filter(is_absent, packages), None)
    return error if name is None else ModuleNotFoundError(text, name=name)


def is_absent(package: str) -> bool:
    """Return whether a module is not installed, without importing it."""
    from importlib.util import find_spec  # only here: nearly all imports succeed

    if package in sys.modules:
        return sys.modules[package] is None
    try:
        return find_spec(package) is None
    except ModuleNotFoundError:  # by a finder that forbids the package
        return True
    except Exception:  # such as a MemoryError
        return False


# ---- ``logging.getLogger("safeload")``: warnings for users, and details for programs if enabled ----

NAME = "safeload"


def debug(message: str, *arguments: object) -> None:
    """Log a line for debugging. A program that wants these has imported `logging`, which takes milliseconds."""
    logging = sys.modules.get("logging")
    if logging is not None and hasattr(logging, "getLogger"):
        logging.getLogger(NAME).debug(message, *arguments)


def warning(message: str, *arguments: object) -> None:
    """Log a line for the user: on stderr, unless the program handles log records."""
    import logging

    logging.getLogger(NAME).warning(message, *arguments)


# ---- paths from callers, as text for messages and for the C core ----

PathLike = str | os.PathLike[str]

# In bytes: the limit of Windows, which is far above PATH_MAX of other systems.
_LONGEST_PATH = 65_536
# How the C core takes paths: as `os.fsencode` encodes them, a closure for whose cells threads contend without the GIL,
# but on Windows in strict UTF-8.
_SYSTEM = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
_ENCODING, _ERRORS = map(sys.intern, ("utf-8", "strict") if os.name == "nt" else _SYSTEM)
# PATH_MAX of Linux. Bytes are rarely a path; by mistake they can be the content of a file.
_LONGEST_BYTES = 4096


def native_path(path: PathLike) -> tuple[str, bytes]:
    """Return a path as text for messages and encoded for the C core."""
    if isinstance(path, (bytes, bytearray, memoryview)) and (
        not isinstance(path, bytes) or len(path) > _LONGEST_BYTES or 0 in path
    ):
        raise TypeError(
            f"expected a path, got the content of a file ({type(path).__name__} of length {len(path):,}): "
            "load it with safeload.numpy.load(data)"
        )
    fs_path = os.fspath(path)
    text = fs_path if isinstance(fs_path, str) else os.fsdecode(fs_path)
    try:
        encoded = text.encode(_ENCODING, _ERRORS)
    except UnicodeEncodeError:
        raise ValueError(f"lone surrogate in path {show(text)}") from None
    if b"\0" in encoded:
        raise ValueError(f"embedded null byte in path {show(text)}")
    if len(encoded) > _LONGEST_PATH:
        raise os_error(errno.ENAMETOOLONG, show(text))
    return text, encoded


def private_text(path: str) -> str:
    """Return a copy of a path unless `native_path` refuses it: threads would contend for a caller's without the GIL."""
    return native_path(path)[1].decode(_ENCODING, _ERRORS)


def folder_names(folder: str, failures: list[OSError]) -> list[str]:
    """Return the sorted names in a folder, none if it is missing; add an error to the failures."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        failures.append(error)
        return []


def absolute(path: str) -> str:
    """Return a path that stays valid when the working directory changes."""
    if path.startswith("/") and os.name != "nt":  # the fast path, because every open calls this
        return path
    try:
        return os.path.abspath(path)
    except OSError:  # the working directory has been deleted
        return path


def is_bare(name: str) -> bool:
    """Return True for the bare name of a file: metadata and indexes must not refer to files outside its folder."""
    return bool(name) and name not in (".", "..") and not any(c in "\0/\\:" or "\ud800" <= c <= "\udfff" for c in name)
