"""Copy bytes between open files, inside the system if it can: some filesystems then share the blocks."""

from __future__ import annotations

import errno
import os

# Blocks can be shared only if both positions are multiples of this size.
BLOCK = 4096
# Bytes per call, so that signals are handled in between, and bytes of the buffer without the system's help.
_STEP, _BUFFER = 1 << 30, 8 << 20
# Errors of systems, filesystems and sandboxes that do not copy between these files.
_UNABLE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY)


def copy_range(source: int, begin: int, nbytes: int, target: int, at: int) -> None:
    """Copy bytes of a descriptor to a position of another descriptor."""
    # The first step ends on a block of the source: the following steps can share blocks if the target's match.
    step = min(nbytes, -begin % BLOCK) or min(nbytes, _STEP)
    while nbytes:
        copied = _in_system(source, begin, step, target, at) or _through_memory(source, begin, step, target, at)
        begin, at, nbytes = begin + copied, at + copied, nbytes - copied
        step = min(nbytes, _STEP)


def _in_system(source: int, begin: int, nbytes: int, target: int, at: int) -> int:
    """Return the number of bytes that the system has copied; 0 if it cannot copy."""
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(source, target, nbytes, begin, at)
    except OSError as error:
        if error.errno in _UNABLE:
            return 0
        raise


def _through_memory(source: int, begin: int, nbytes: int, target: int, at: int) -> int:
    data = _read(source, begin, min(nbytes, _BUFFER))
    if not data:
        raise OSError(errno.EIO, f"the file ends at byte {begin}, {nbytes} bytes too early")
    os.lseek(target, at, os.SEEK_SET)
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return len(data)


def _read(source: int, begin: int, nbytes: int) -> bytes:
    """Read without moving the position, which a caller's file object may share, if the system can."""
    if hasattr(os, "pread"):
        return os.pread(source, nbytes, begin)
    os.lseek(source, begin, os.SEEK_SET)
    return os.read(source, nbytes)
