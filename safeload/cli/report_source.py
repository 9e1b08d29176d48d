"""The head of the page of ``safeload report``: what was looked at, when, and by which bytes it is recognised."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .._version import __version__
from ..base.text import plural, size
from ..engine.codes.pieces import Meter, in_order
from .common import bar

# Bytes read at a time: enough to amortize the cost of a read.
_PIECE = 1 << 20

# Seconds since 1970 that the page gives as its date: https://reproducible-builds.org/specs/source-date-epoch/
_EPOCH = "SOURCE_DATE_EPOCH"


class File(NamedTuple):
    """One file of the source.

    Attributes:
        path: its path.
        nbytes: its size; None if it cannot be read.
        digest: SHA-256 of its bytes; None if it cannot be read, or was not asked for.
    """

    path: str
    nbytes: int | None
    digest: str | None = None


def files_of(paths: Iterable[str], *, digest: bool, threads: int | None) -> list[File]:
    """Sizes of files and, if ``digest`` is set, their SHA-256, which reads them whole, several at a time."""
    found = [File(path, _size(path)) for path in paths]
    if not digest:
        return found
    total = sum(file.nbytes or 0 for file in found)
    with bar("sha256") as progress:
        meter = Meter(progress, total)
        digests = in_order(lambda file: _sha256(file, meter), found, threads, total)
        return [file._replace(digest=value) for file, value in zip(found, digests, strict=True)]


def about(path: str, files: Sequence[File], seconds: int) -> list[tuple[str, str]]:
    """Names and values of the head: the path as it was given, date, size, digest, version."""
    rows = [("Path", path), ("Date", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)))]
    known = [file.nbytes for file in files if file.nbytes is not None]
    if known:
        parts = f" in {plural(len(known), 'file')}" if len(known) > 1 else ""
        rows.append(("Size", f"{size(sum(known))}{parts} ({sum(known):,} bytes)"))
    if len(files) == 1 and files[0].digest is not None:
        rows.append(("SHA-256", files[0].digest))
    elif any(file.digest for file in files):
        rows.append(("SHA-256", "of each file, at the end of the page"))
    rows.append(("Written by", f"safeload {__version__}"))
    return rows


def now() -> int:
    """Seconds since 1970: SOURCE_DATE_EPOCH if it is set, so that the same file gives the same page.

    Raises:
        ValueError: the variable does not hold seconds of a year up to 9999.
    """
    given = os.environ.get(_EPOCH)
    if given is None:
        return int(time.time())
    if not (given.isascii() and given.isdigit() and len(given) <= 12 and int(given) < 253_402_300_800):
        raise ValueError(f"{_EPOCH} is {given[:40]!r}, expected seconds since 1970")
    return int(given)


def _size(path: str) -> int | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None  # a pipe would block its reader


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
