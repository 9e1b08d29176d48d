"""Source files in the head of the report page: path, date, size and digests."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..._version import __version__
from ...base.text import plural, size
from ...engine.codes.pieces import Meter, in_order
from ...engine.run.progress import Bars

# Bytes per read: enough to amortize the call.
_PIECE = 1 << 20

# The variable with the date of the page, in seconds since 1970: https://reproducible-builds.org/specs/source-date-epoch/
_EPOCH = "SOURCE_DATE_EPOCH"


class File(NamedTuple):
    """A file of the source."""

    path: str
    nbytes: int | None  # None if it cannot be read
    digest: str | None = None  # SHA-256; None if it cannot be read or was not requested


def files_of(paths: Iterable[str], *, digest: bool, threads: int | None, bars: Bars) -> list[File]:
    """Return the sizes of files and, if ``digest`` is set, their SHA-256, hashing several files at a time."""
    files = [File(path, _size(path)) for path in paths]
    if not digest:
        return files
    total = sum(file.nbytes or 0 for file in files)
    with bars("sha256") as progress:
        meter = Meter(progress, total)
        digests = in_order(lambda file: _sha256(file, meter), files, threads, total)
        return [file._replace(digest=value) for file, value in zip(files, digests, strict=True)]


def about(path: str, files: Sequence[File], seconds: int) -> list[tuple[str, str]]:
    """Return names and values of the head: path, date, size, digest, version."""
    rows = [("Path", path), ("Date", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)))]
    sizes = [file.nbytes for file in files if file.nbytes is not None]
    if sizes:
        count = f" in {plural(len(sizes), 'file')}" if len(sizes) > 1 else ""
        rows.append(("Size", f"{size(sum(sizes))}{count} ({sum(sizes):,} bytes)"))
    if len(files) == 1 and files[0].digest is not None:
        rows.append(("SHA-256", files[0].digest))
    elif any(file.digest for file in files):
        rows.append(("SHA-256", "see the table of files at the end"))
    rows.append(("Written by", f"safeload {__version__}"))
    return rows


def now() -> int:
    """Return the time in seconds since 1970, or SOURCE_DATE_EPOCH for reproducible pages."""
    text = os.environ.get(_EPOCH)
    if text is None:
        return int(time.time())
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) < 253_402_300_800):
        raise ValueError(f"{_EPOCH} must be seconds since 1970, got {text[:40]!r}")
    return int(text)


def _size(path: str) -> int | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None  # reading a pipe would block


def _sha256(file: File, meter: Meter) -> str | None:
    if file.nbytes is None:
        return None
    digest = hashlib.sha256()
    memory = memoryview(bytearray(_PIECE))
    try:
        with open(file.path, "rb", buffering=0) as stream:
            while count := stream.readinto(memory):
                digest.update(memory[:count])
                meter.add(count)
    except OSError:
        return None
    return digest.hexdigest()
