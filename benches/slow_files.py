"""A FUSE file system that shows a folder and waits before each read: slow_files.py FOLDER MOUNTPOINT SECONDS.

Needs fusepy and libfuse 2. The kernel asks for at most 128 KiB at a time, from several threads.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from fuse import FUSE, FuseOSError, Operations


class SlowFiles(Operations):
    """The files of a folder, read-only."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds

    def getattr(self, path: str, _: int | None = None) -> dict[str, Any]:
        try:
            status = os.lstat(self.folder + path)
        except OSError as error:
            raise FuseOSError(error.errno) from error
        return {name: getattr(status, name) for name in dir(status) if name.startswith("st_") and "_ns" not in name}

    def readdir(self, path: str, _: int) -> list[str]:
        return [".", "..", *os.listdir(self.folder + path)]

    def open(self, path: str, _: int) -> int:
        return os.open(self.folder + path, os.O_RDONLY)

    def read(self, _: str, size: int, offset: int, file: int) -> bytes:
        time.sleep(self.seconds)
        return os.pread(file, size, offset)

    def release(self, _: str, file: int) -> int:
        os.close(file)
        return 0


if __name__ == "__main__":
    source, mountpoint, seconds = sys.argv[1:]
    FUSE(SlowFiles(source, float(seconds)), mountpoint, foreground=True, ro=True, max_read=1 << 17)
