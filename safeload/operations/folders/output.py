"""Text files to write: the page of ``report``, the manifest of ``check``."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable

from ...base import url as urls
from ...engine.run.atomic_file import AtomicFile, check_place
from .destinations import refuse_inputs

# Bytes at the start of a file that identify safeload as its writer.
_HEAD = 4096


class Output:
    """A text file to write. `check` refuses a path before the work starts, `write` checks it again."""

    def __init__(
        self,
        argument: str,  # or option, that names the file
        path: str,
        kind: str,  # "report" or "manifest", for messages
        recognises: Callable[[bytes], bool],  # tells by the first bytes if safeload wrote this kind of file
        *,
        overwrite: bool,  # allows to replace any file except a source
        sources: Iterable[str | None],  # paths that are read
    ) -> None:
        self._argument, self._path, self._kind, self._recognises = argument, path, kind, recognises
        self._overwrite = overwrite
        self._sources = [path for path in sources if path is not None]

    def check(self, sources: Iterable[str] = ()) -> bool:
        """Return True for a file that may be replaced or a device, False if there is no file."""
        path = self._path
        try:
            existing = os.stat(path)
        except FileNotFoundError:
            if urls.is_url(path):
                raise ValueError(f"{self._argument} needs a local file, got {urls.shown(path)}") from None
            check_place(path)
            return False
        if stat.S_ISDIR(existing.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if stat.S_ISCHR(existing.st_mode) or stat.S_ISFIFO(existing.st_mode):
            return True
        empty = stat.S_ISREG(existing.st_mode) and not existing.st_size
        ours = empty or self.is_ours()
        read = [*self._sources, *sources]
        refuse_inputs(path, read, beside=() if ours else read)  # its own file may be in a source folder
        if not ours and not self._overwrite:
            raise self._exists()
        return True

    def write(self, text: str, sources: Iterable[str] = ()) -> int:
        """Write the file atomically and return its size in bytes."""
        replaces = self.check(sources)
        encoded = text.encode("utf-8", "backslashreplace")  # lone surrogates come from paths
        try:
            with AtomicFile(self._path, len(encoded), overwrite=replaces) as file, file.stream() as stream:
                return stream.write(encoded)
        except FileExistsError:  # created since
            raise self._exists() from None

    def _exists(self) -> FileExistsError:
        return FileExistsError(
            errno.EEXIST,
            f"File exists and is not a safeload {self._kind}; pass overwrite=True to replace it",
            self._path,
        )

    def is_ours(self) -> bool:
        """True if safeload wrote the existing file as this kind of file."""
        with open(self._path, "rb", buffering=0) as file:
            return self._recognises(file.read(_HEAD))
