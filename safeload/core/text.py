"""Text: values, names and paths in messages, errors that name what is absent, and log lines."""

from __future__ import annotations

import errno
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, TextIO, TypeVar

from ..errors import FormatError, SafeloadError, TensorNotFoundError, missing_file

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
    comparable = [name for name in names if _digits(name) == _digits(text)]
    ratios = {name: difflib.SequenceMatcher(None, name, text).ratio() for name in comparable}
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


def listed(texts: Iterable[str], most: int) -> str:
    """Return the first ``most`` texts, and the number of the rest: "a, b and 3 more"."""
    every = [*texts]
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")


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


# ---- names that no tensor has ----

# Above this many names, errors about missing names make no suggestions, because difflib would compare all of them.
_SUGGEST_UP_TO = 5_000

# Maximum length of a name in such an error, which shows the name without quotes, as upstream does.
_NAME = 200


def hidden(name: str, whole: str, path: str) -> TensorNotFoundError:
    """Return the error for a hidden tensor: a part of the tensor ``whole``, or "" if it scales activations."""
    what = f"is a part of {show(whole)}" if whole else "scales activations, not weights"
    return error_about(TensorNotFoundError, f"{what}; open with stored=True", path=path, tensor=name)


def missing(name: str, names: Sequence[str]) -> TensorNotFoundError:
    """Return the error for an unknown name, with suggestions."""
    check_name(name)
    from fnmatch import fnmatchcase  # only here: it is needed by this message alone

    message = f"File does not contain tensor {clip(printable(name), _NAME)}"
    if any(c in name for c in "*?[") and any(fnmatchcase(known, name) for known in names[:_SUGGEST_UP_TO]):
        return TensorNotFoundError(f"{message}: names are exact; only= of safeload.load takes patterns", tensor=name)
    inside = [known for known in names if isinstance(known, str) and known.startswith((f"{name}.", f"{name}/"))]
    close = similar(name, names)
    if len(inside) > 1 and name:
        message += f"; {plural(len(inside), 'name')} begin with it, such as {clip(printable(inside[0]), _NAME)}"
    elif close:
        message += f"; similar names: {', '.join(close)}"
    return TensorNotFoundError(message, tensor=name)


def similar(name: str, names: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """Return up to three existing names that are similar to ``name``, for a message; none if there are very many."""
    import difflib  # only here: at the top it would add a millisecond to `import safeload`

    close = difflib.get_close_matches(name, names, n=3, cutoff=cutoff) if len(names) <= _SUGGEST_UP_TO else []
    return [clip(printable(known), _NAME) for known in close]


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
