"""Puts a file in the place of another."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time

from .local import release_at

# ERROR_USER_MAPPED_FILE, for which Python has no errno: it reports EINVAL.
_USER_MAPPED_FILE = 1224
# Seconds to wait, one after the other, where Windows refuses to replace a file: others may have it open for a moment
# only, such as a load that reads it or a virus scanner.
_PAUSES = (0.01, 0.03, 0.1, 0.3)


def replace(source: str, target: str, shown: str) -> None:
    """Renames a file over another, as ``os.replace``; on Windows also over one that this process has open.

    Args:
        source: path of the file.
        target: its new path.
        shown: the path in messages.

    Raises:
        PermissionError: Windows refuses; the message says why, and what to do.
    """
    for pause in (*_PAUSES, 0):
        try:
            os.replace(source, target)
            return
        except OSError as error:
            if not _refused(error):
                raise
        if not release_at(target):
            time.sleep(pause)
    raise PermissionError(errno.EACCES, _in_use(target), shown)


def _refused(error: OSError) -> bool:
    """Whether Windows does not replace a file because of what it is or who uses it."""
    mapped = getattr(error, "winerror", None) == _USER_MAPPED_FILE
    return os.name == "nt" and (mapped or isinstance(error, PermissionError))


def _in_use(path: str) -> str:
    with contextlib.suppress(OSError):
        if not os.stat(path).st_mode & stat.S_IWRITE:
            return "the file is read-only, and Windows replaces no such file"
    return (
        "Windows replaces no file that is mapped or open: delete arrays that were loaded from it, or load them with "
        'backend="pread"; close open checkpoints; or write to another path'
    )
