"""Files that commands write beside what they print: the page of ``report``, the manifest of ``check``."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

from ..engine.run.atomic_file import check_place, write_text
from ..stores import url as urls
from .common import shown

# A path that stands for stdout.
STDOUT = "-"
# Bytes at the start of a file that tell whether safeload wrote it.
_HEAD = 4096


class Output:
    """A text file to write. `check` refuses a path before the work begins, `write` checks it again.

    Args:
        option: of the command line, for messages.
        path: of the file.
        kind: what the file is, for messages.
        recognises: tells from the first bytes of a file whether safeload wrote it as such a file.
        overwrite: whether any other file may be replaced too, unless it is a source.
        sources: paths that the command reads.
    """

    def __init__(
        self,
        option: str,
        path: str,
        kind: str,
        recognises: Callable[[bytes], bool],
        *,
        overwrite: bool,
        sources: Iterable[str | None],
    ) -> None:
        self._option, self._path, self._kind, self._recognises = option, path, kind, recognises
        self._overwrite = overwrite
        self._sources = [path for path in sources if path is not None]

    def check(self, sources: Iterable[str] = ()) -> bool:
        """Whether the path holds a file that may be replaced, or a device to write to; False if there is no file.

        Args:
            sources: more paths that the command reads.

        Raises:
            FileExistsError: safeload did not write the existing file.
            ValueError: the file is a source, or the path is a URL.
            OSError: no file can be created at this path.
        """
        path = self._path
        try:
            existing = os.stat(path)
        except FileNotFoundError:
            if urls.is_url(path):
                raise ValueError(f"{self._option} writes a file of this machine, got {shown(path)}") from None
            check_place(path)
            return False
        if stat.S_ISDIR(existing.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if stat.S_ISCHR(existing.st_mode) or stat.S_ISFIFO(existing.st_mode):
            return True
        empty = stat.S_ISREG(existing.st_mode) and not existing.st_size
        ours = empty or self._is_ours()
        if self._is_source(sources, ours):
            raise ValueError(f"{self._option} {path} is a file of the source, choose another")
        if not ours and not self._overwrite:
            raise self._exists()
        return True

    def write(self, text: str, sources: Iterable[str] = ()) -> int:
        """Writes the file, atomically. Returns its bytes.

        Raises:
            OSError, ValueError: see `check`.
        """
        if self._path == STDOUT:
            data = text.encode("utf-8", "backslashreplace")
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return len(data)
        replaces = self.check(sources)
        try:
            return write_text(self._path, text, overwrite=replaces)
        except FileExistsError:  # created since
            raise self._exists() from None

    def _exists(self) -> FileExistsError:
        return FileExistsError(
            errno.EEXIST,
            f"File exists, and safeload did not write it as a {self._kind}; --overwrite replaces it",
            self._path,
        )

    def _is_ours(self) -> bool:
        """Whether safeload wrote the existing file as such a file."""
        with open(self._path, "rb", buffering=0) as file:
            return self._recognises(file.read(_HEAD))

    def _is_source(self, sources: Iterable[str], ours: bool) -> bool:
        """Whether the command reads the existing file: it is a source, or in a folder that is a source."""
        folders = {os.path.dirname(os.path.abspath(self._path)), os.path.dirname(os.path.realpath(self._path))}
        for source in map(_place, (*self._sources, *sources)):
            with suppress(OSError, ValueError):
                if os.path.isdir(source):
                    if not ours and any(os.path.samefile(folder, source) for folder in folders):
                        return True
                elif os.path.samefile(self._path, source):
                    return True
        return False


def _place(source: str) -> str:
    """The path of a source that is a file:// URL; the folder of a source that is an index."""
    if urls.is_url(source) and urls.scheme_of(source) == "file":
        source = urls.local_path(source)
    return os.path.dirname(source) or "." if source.endswith(".index.json") else source
