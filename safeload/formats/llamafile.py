"""llamafile: a program with a zip archive at its end, which holds a GGUF file.

1. The file begins like a program: "MZ" (Actually Portable Executable, Windows), ELF or Mach-O. It ends like a zip
   archive, whose offsets count from the beginning of the file (zip.py).
2. The GGUF is an entry, stored and aligned, so that programs map it. Compressed entries are parts of the program.
3. ``.args`` holds the program's default arguments, which may name another model; it is not read.
"""

from __future__ import annotations

from contextlib import suppress

from ..base.text import error_about, show
from ..errors import FormatError, SafeloadError, UnsupportedError
from ..stores.members import name_fault
from .folder import open_members
from .registry import Candidate, Opened, OpenRequest
from .zip import STORED, Archive

_SUFFIX = ".gguf"


def claims(candidate: Candidate) -> bool:
    """Return True if a program ends with an archive that holds a GGUF file."""
    with suppress(SafeloadError):
        return any(map(_is_model, Archive(candidate.file, appended=True).entries))
    return False


def _is_model(name: str) -> bool:
    return name.lower().endswith(_SUFFIX)


def enter(candidate: Candidate, request: OpenRequest) -> Opened:
    """Open the GGUF in a program; see `open_members`."""
    file = candidate.file
    archive = Archive(file, appended=True)
    members: dict[str, tuple[int, int]] = {}
    for name, entry in archive.entries.items():
        if not _is_model(name):
            continue
        fault = name_fault(name)
        if fault is not None:
            raise FormatError(f"the name of the zip entry {show(name)} {fault}", file.path, max(0, entry.at))
        if entry.method != STORED:
            text = f"zip entry {show(name)} is compressed: extract it with unzip, and open the result"
            raise error_about(UnsupportedError, text, path=file.path)
        archive.check_stored(name)
        members[name] = archive.locate(name), entry.size
    archive.check_overlap()
    return open_members(file, members, request, kind="a llamafile")
