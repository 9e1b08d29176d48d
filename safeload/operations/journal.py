"""Records that a shard is whole, in a file beside it: what a conversion that is resumed need not do again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..base.text import printable, show
from ..errors import FormatError
from .shard_folder import Folder, LocalFolder

SUFFIX = ".done.json"
KEY, VERSION = "safeload_done", 1


def write(folder: Folder, file: str, piece: Mapping[str, Any], size: int, digest: str) -> None:
    """Records that a file is whole.

    Args:
        folder: has the file.
        file: its name.
        piece: the piece of the plan that has made it.
        size: bytes.
        digest: SHA-256 in hexadecimal digits.
    """
    kept = {key: piece.get(key) for key in ("plan", "version", "options")}
    record = {KEY: VERSION, **kept, "size": size, "sha256": digest, **folder.stamp(file)}
    try:
        _write(folder, file, record)
    except PermissionError:  # Windows: a process that does the same piece reads the record that it has just written
        if read(folder, file) != record:
            raise


def _write(folder: Folder, file: str, record: Mapping[str, Any]) -> None:
    text = (json.dumps(record, indent=1) + "\n").encode()
    with folder.writing(file + SUFFIX, len(text), overwrite=True) as written, written.stream() as stream:
        stream.write(text)


def read(folder: Folder, file: str) -> dict[str, Any] | None:
    """What is recorded of a file; None if nothing is, or nothing legible."""
    try:
        found = folder.read_json(file + SUFFIX, "the record of a shard")
    except (FormatError, FileNotFoundError):
        return None
    except OSError:
        if folder.files.remote:  # it may be there
            raise
        return None
    kinds = {"plan": str, "size": int, "sha256": str}
    legible = found.get(KEY) == VERSION and all(type(found.get(key)) is kind for key, kind in kinds.items())
    return found if legible else None


def is_whole(folder: Folder, file: str, piece: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is recorded of a file if this piece has made it, and it is still the same; else None."""
    found = read(folder, file)
    if found is None or found["plan"] != piece.get("plan"):
        return None
    return found if folder.holds(file, found) else None


def forget(folder: Folder, files: list[str]) -> None:
    """Removes the records of files that something else has made."""
    there = folder.names()
    folder.remove([file + SUFFIX for file in files if file + SUFFIX in there])


def move(file: str, source: LocalFolder, target: LocalFolder) -> None:
    """Moves a file and its record to another folder; at any moment one of the two folders has both.

    What ``source`` lacks was moved before.
    """
    record = read(source, file)
    if record is not None:
        _write(target, file, record)
    target.take(file, source)
    source.remove([file + SUFFIX])


def recorded(folder: Folder) -> dict[str, dict[str, Any]]:
    """The records in a folder, by the name of the file."""
    names = [name.removesuffix(SUFFIX) for name in sorted(folder.names()) if name.endswith(SUFFIX)]
    found = folder.files.each(lambda name: read(folder, name), names)
    return {name: record for name, record in zip(names, found, strict=True) if record is not None}


def difference(record: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Says in what the plan of a record differs from another plan: the version, an option, or the sources."""
    if record.get("version") != plan.get("version"):
        return f"with safeload {printable(str(record.get('version')))}, and this is {plan.get('version')}"
    before, now = record.get("options"), plan.get("options")
    before, now = (one if isinstance(one, dict) else {} for one in (before, now))
    for key in (*now, *before):
        if before.get(key) != now.get(key):
            return printable(f"with {key}={show(before.get(key))}, and this is {key}={show(now.get(key))}")
    return "from other sources, or they have changed since"
