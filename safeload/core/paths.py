"""Paths from callers, for messages and for the C core."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

from ..errors import missing_file
from .text import printable, show

PathLike = str | os.PathLike[str]

# In bytes: the limit of Windows, which is far above PATH_MAX of other systems.
_LONGEST_PATH = 65_536
# How the C core takes paths: as `os.fsencode` encodes them, a closure for whose cells threads contend without the GIL,
# but on Windows in strict UTF-8.
_SYSTEM = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
_ENCODING, _ERRORS = map(sys.intern, ("utf-8", "strict") if os.name == "nt" else _SYSTEM)
# PATH_MAX of Linux. Bytes are rarely a path; by mistake they can be the content of a file.
_LONGEST_BYTES = 4096
# Errors if a path does not exist: a signed URL is too long, and "owner/name" may have a file "owner".
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
# Imports what explains paths that do not exist, and returns it: `registry` puts its part here.
explaining: Callable[[], Any] = bool
# Windows' ERROR_INVALID_NAME and ERROR_BAD_PATHNAME for a URL: EINVAL in Python, ENOENT in the C core.
_INVALID = (123, 161)


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
