"""Paths as callers give them, as messages show them and as the C core takes them."""

from __future__ import annotations

import errno
import os

from ..errors import missing_file
from .text import show

PathLike = str | os.PathLike[str]

# In bytes: the limit of Windows, far above PATH_MAX of other systems.
_LONGEST_PATH = 65_536
# PATH_MAX of Linux. Bytes are rarely a path, and sometimes the content of a file by mistake.
_LONGEST_BYTES = 4096
# What systems answer to a path that leads nowhere: a signed URL is too long, "owner/name" may have a file "owner".
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
# ERROR_INVALID_NAME and ERROR_BAD_PATHNAME, which Windows answers to a URL: EINVAL in Python, ENOENT in the C core.
_NO_NAME = (123, 161)


def native_path(path: PathLike) -> tuple[str, bytes]:
    """A path as messages show it and as the C core takes it.

    Raises:
        TypeError: not a path.
        ValueError: the path contains a NUL, which would truncate it silently.
        OSError: the path is longer than any system accepts.
    """
    if isinstance(path, (bytes, bytearray, memoryview)):
        _refuse_content(path)
    place = os.fspath(path)
    text = place if isinstance(place, str) else os.fsdecode(place)
    encoded = text.encode() if os.name == "nt" else os.fsencode(text)
    if b"\0" in encoded:
        raise ValueError(f"embedded null byte in path {show(text)}")
    if len(encoded) > _LONGEST_PATH:
        raise os_error(errno.ENAMETOOLONG, show(text))
    return text, encoded


def _refuse_content(path: bytes | bytearray | memoryview) -> None:
    if not isinstance(path, bytes) or len(path) > _LONGEST_BYTES or bytes(1) in path:
        raise TypeError(
            f"a path, not the content of a file, is wanted (found {type(path).__name__} of length {len(path):,}): "
            "for content use safeload.numpy.load(data)"
        )


def os_error(number: int, path: str | None) -> OSError:
    """The ``OSError`` subclass for an errno, with its text and path; says what a path that leads nowhere may be."""
    if number in _NOWHERE and path is not None:
        from .missing_path import describe  # only here: most paths lead somewhere

        known = describe(path)
        if known is not None:
            return missing_file(known[0], f"No such file or directory: {known[0]}; {known[1]}")
    if number == errno.ENOENT:
        return missing_file(path, f"No such file or directory: {path}")
    return OSError(number, os.strerror(number), path)


def unwritable(error: OSError, path: str) -> OSError:
    """The error to raise for one of writing a file: of a URL it says, without secrets, what writes there."""
    if error.errno not in _NOWHERE and getattr(error, "winerror", None) not in _NO_NAME:
        return error
    from .missing_path import destination  # only here: most paths can be written to

    known = destination(path)
    return error if known is None else missing_file(known[0], f"No such file or directory: {known[0]}; {known[1]}")


def absolute(path: str) -> str:
    """A path that stays valid when the working directory changes."""
    if path.startswith("/") and os.name != "nt":  # the fast case: every open calls this
        return path
    try:
        return os.path.abspath(path)
    except OSError:  # the working directory has been deleted
        return path
