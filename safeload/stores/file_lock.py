"""Lock open files against other processes. A lock ends when its process does."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

# Errors of filesystems without locks.
_UNABLE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
_FAR = 1 << 62  # no byte of the file, which others may read


def lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed.

    False if somebody else holds the lock, None if the filesystem has no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _FAR, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        if error.errno in _UNABLE:
            return None
        raise
    return True


def unlock(descriptor: int) -> None:
    """Release a lock before the file is closed: a child process that inherited the descriptor would keep the lock."""
    if sys.platform != "win32":
        import fcntl

        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
