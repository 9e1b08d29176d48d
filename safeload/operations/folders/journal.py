"""Records that a shard is whole, in a file beside it: what a conversion that is resumed need not do again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...base.text import printable, show
from ...errors import FormatError
from ..sources.codec import decode, encode
from .shard_folder import RECORD, Folder, LocalFolder

SUFFIX = RECORD
KEY, VERSION = "safeload_done", 2
# Records of this version name the plan of a shard, but not its piece: no shard is kept because of them.
_WITHOUT_PIECE = 1


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """A shard that is whole."""

    safeload_done: int = VERSION
    plan: str  # id of the plan
    version: Any  # of safeload
    options: Any  # of the conversion
    piece: str  # id of the piece; empty in records of older releases
    sources: Any = None  # bare name, size and version of each file that the piece read
    in_place: Any = None  # id of a conversion that replaces its own source
    size: int  # bytes
    sha256: str
    object: Any = None  # size and version of an object in a store


def write(folder: Folder, file: str, record: ShardRecord) -> None:
    """Record that a file is whole."""
    record = replace(record, object=folder.stamp(file))
    try:
        _write(folder, file, record)
    except PermissionError:  # Windows: a process that does the same piece reads the record that it has just written
        if read(folder, file) != record:
            raise


def _write(folder: Folder, file: str, record: ShardRecord) -> None:
    text = (json.dumps(encode(record), indent=1) + "\n").encode()
    with folder.writing(file + SUFFIX, len(text), overwrite=True) as written, written.stream() as stream:
        stream.write(text)


def read(folder: Folder, file: str) -> ShardRecord | None:
    """Return the record of a file; None without a legible one."""
    try:
        plain = folder.read_json(file + SUFFIX, "the record of a shard")
        if plain.get(KEY) == _WITHOUT_PIECE:
            plain["piece"] = ""
        record = decode(ShardRecord, plain, "invalid record", extra=True)
        return record if record.safeload_done in (_WITHOUT_PIECE, VERSION) else None
    except (FormatError, FileNotFoundError):
        return None
    except OSError:
        if folder.files.remote:  # it may be there
            raise
        return None


def is_whole(folder: Folder, file: str, piece: str) -> ShardRecord | None:
    """Return the record of a file if the piece of this id wrote it and it is unchanged; else None."""
    record = read(folder, file)
    if record is None or record.piece != piece or not folder.holds(file, record.size, record.sha256, record.object):
        return None
    return record


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


def recorded(folder: Folder, names: Iterable[str]) -> dict[str, ShardRecord]:
    """The records among the files of a folder, by the name of the shard."""
    names = [name.removesuffix(SUFFIX) for name in sorted(names) if name.endswith(SUFFIX)]
    found = folder.files.each(lambda name: read(folder, name), names)
    return {name: record for name, record in zip(names, found, strict=True) if record is not None}


def same_work(record: ShardRecord, version: str, options: Mapping[str, Any]) -> bool:
    """Whether a record comes from a conversion with this version and these options."""
    return bool(record.version == version and record.options == options)


def superseded(folder: Folder, version: str, options: Mapping[str, Any]) -> list[Folder]:
    """The folders inside a complete one in which a plan's earlier versions, with other sources, have left shards."""
    waiting = [(place, place.names()) for place in folder.asides()]
    return [
        place
        for place, names in waiting
        if not names or any(same_work(record, version, options) for record in recorded(place, names).values())
    ]


def difference(record: ShardRecord, version: str, now: Mapping[str, Any], sources: Sequence[Sequence[Any]]) -> str:
    """Explain why a plan cannot keep a recorded shard: the version, an option, or a source that changed.

    Args:
        record: of the shard.
        version: of the plan.
        now: options of the plan.
        sources: files that the plan reads for this shard; see `ShardRecord`.
    """
    if record.version != version:
        return f"with safeload {printable(str(record.version))}, and this is {version}"
    before = record.options if isinstance(record.options, dict) else {}
    for key in (*now, *before):
        if before.get(key) != now.get(key):
            return printable(f"with {key}={show(before.get(key))}, and this is {key}={show(now.get(key))}")
    if record.safeload_done == _WITHOUT_PIECE:
        return "by an older safeload, whose record does not list the shard's sources"
    known = record.sources if isinstance(record.sources, list) else []
    changed = [source[0] for source in sources if source not in known]
    if changed and changed[0] in [source[0] for source in known if isinstance(source, list) and source]:
        return f"before its source {show(changed[0])} changed"
    return "from other sources, or they have changed since"
