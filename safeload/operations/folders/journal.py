"""Records that a shard is whole, in a file beside it: what a conversion that is resumed need not do again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ...base.text import printable, show
from ...errors import FormatError
from ..sources.plan import Plan
from ..sources.sources import versions_of
from .shard_folder import RECORD, Folder, LocalFolder

SUFFIX = RECORD
KEY, VERSION = "safeload_done", 2
# Records of this version name the plan of a shard, but not its piece: no shard is kept because of them.
_WITHOUT_PIECE = 1


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
    made_of = {"piece": piece.get("id"), "sources": versions_of(piece)}
    if "in_place" in piece:
        made_of["in_place"] = piece["in_place"]
    record = {KEY: VERSION, **kept, **made_of, "size": size, "sha256": digest, **folder.stamp(file)}
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
    if type(found.get(KEY)) is int and found[KEY] == _WITHOUT_PIECE:
        found["piece"] = ""
    elif found.get(KEY) != VERSION:
        return None
    kinds = {"plan": str, "piece": str, "size": int, "sha256": str}
    return found if all(type(found.get(key)) is kind for key, kind in kinds.items()) else None


def is_whole(folder: Folder, file: str, piece: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is recorded of a file if this piece has made it, and it is still the same; else None."""
    found = read(folder, file)
    if found is None or found["piece"] != piece.get("id"):
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


def recorded(folder: Folder, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The records among the files of a folder, by the name of the shard."""
    names = [name.removesuffix(SUFFIX) for name in sorted(names) if name.endswith(SUFFIX)]
    found = folder.files.each(lambda name: read(folder, name), names)
    return {name: record for name, record in zip(names, found, strict=True) if record is not None}


def same_work(record: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    """Whether a record comes from a conversion with the version and the options of a plan."""
    return all(record.get(key) == plan.get(key) for key in ("version", "options"))


def superseded(folder: Folder, plan: Mapping[str, Any]) -> list[Folder]:
    """The folders inside a complete one in which a plan's earlier versions, with other sources, have left shards."""
    waiting = [(place, place.names()) for place in folder.asides()]
    return [
        place
        for place, names in waiting
        if not names or any(same_work(record, plan) for record in recorded(place, names).values())
    ]


def difference(record: Mapping[str, Any], plan: Plan, file: str) -> str:
    """Explain why a plan cannot keep a recorded shard: the version, an option, or a source that changed."""
    if record.get("version") != plan.get("version"):
        return f"with safeload {printable(str(record.get('version')))}, and this is {plan.get('version')}"
    before, now = record.get("options"), plan.get("options")
    before, now = (one if isinstance(one, dict) else {} for one in (before, now))
    for key in (*now, *before):
        if before.get(key) != now.get(key):
            return printable(f"with {key}={show(before.get(key))}, and this is {key}={show(now.get(key))}")
    if record[KEY] == _WITHOUT_PIECE:
        return "by an older safeload, whose record does not list the shard's sources"
    pieces = [piece for piece in plan.pieces if piece["file"] == file]
    sources = [source for piece in pieces for source in versions_of(piece)]
    recorded_sources = record.get("sources")
    known = recorded_sources if isinstance(recorded_sources, list) else []
    changed = [source[0] for source in sources if source not in known]
    if changed and changed[0] in [source[0] for source in known if isinstance(source, list) and source]:
        return f"before its source {show(changed[0])} changed"
    return "from other sources, or they have changed since"
