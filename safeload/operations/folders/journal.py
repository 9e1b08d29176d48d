"""Records of complete shards: a resumed conversion skips recorded shards.

The records of an unfinished conversion stand in the subfolder ``.safeload-resume``, a file for each shard; success
removes them. Records of earlier releases, ``SHARD.done.json`` beside the shard, are read and removed too.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...base.text import plural, printable, show
from ...errors import FormatError
from ...formats.folder import INDEX, RESUME, SINGLE
from ..sources.codec import decode, encode
from . import unfinished
from .folder import Folder

# Suffix of the record of a shard, in the subfolder or beside the shard, where earlier releases wrote it.
RECORD = ".done.json"
_COUNT = re.compile(r"-of-([0-9]{5,})\.safetensors\Z", re.ASCII)
KEY, VERSION = "safeload_done", 2
# Records of this version do not name the piece of a shard, so their shards are written again.
_WITHOUT_PIECE = 1


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """A complete shard."""

    safeload_done: int = VERSION
    plan: str  # id of the plan
    version: Any  # of safeload
    options: Any  # of the conversion
    piece: str  # id of the piece; empty in records of older releases
    sources: Any = None  # bare name, size and version of each source file
    in_place: Any = None  # id of the conversion, if it replaces its own source
    size: int  # bytes
    sha256: str
    object: Any = None  # identity of an object in a store, see `Folder.identity`


def write(folder: Folder, file: str, record: ShardRecord) -> None:
    """Write the record of a complete shard."""
    if folder.location.files.remote:
        record = replace(record, object=folder.identity(file))
    try:
        _write(folder, file, record)
    except PermissionError:  # Windows: another process running this piece is reading its record
        if read(folder, file) != record:
            raise


def _write(folder: Folder, file: str, record: ShardRecord) -> None:
    text = (json.dumps(encode(record), indent=1) + "\n").encode()
    records = folder / RESUME
    with records.writing(file + RECORD, len(text), overwrite=True) as written, written.stream() as stream:
        stream.write(text)


def read(folder: Folder, file: str) -> ShardRecord | None:
    """Return the record of a shard, or None if there is no valid record."""
    record = _read(folder / RESUME, file + RECORD)
    return _read(folder, file + RECORD) if record is None else record


def _read(folder: Folder, name: str) -> ShardRecord | None:
    try:
        plain = folder.read_json(name, "the record of a shard")
        if plain.get(KEY) == _WITHOUT_PIECE:
            plain["piece"] = ""
        record = decode(ShardRecord, plain, "invalid record", extra=True)
        return record if record.safeload_done in (_WITHOUT_PIECE, VERSION) else None
    except (FormatError, FileNotFoundError):
        return None
    except OSError:
        if folder.location.files.remote:  # the record may exist
            raise
        return None


def is_whole(folder: Folder, file: str, piece: str) -> ShardRecord | None:
    """Return the record of a shard if the piece with this id wrote it and it is unchanged; else None."""
    record = read(folder, file)
    if record is None or record.piece != piece or not folder.holds(file, record.size, record.sha256, record.object):
        return None
    return record


def forget(folder: Folder, files: Iterable[str]) -> None:
    """Remove the records of shards."""
    files = [*files]
    (folder / RESUME).remove([file + RECORD for file in files])
    folder.remove([file + RECORD for file in files])


def clear(folder: Folder) -> None:
    """Remove all records of a complete folder."""
    records, names = folder / RESUME, folder.names()
    folder.remove([name for name in sorted(names) if name.endswith(RECORD) and _is_shard(name, RECORD)])
    records.remove([name for name in sorted(records.names()) if name.endswith((RECORD, ".tmp"))])
    folder.remove([RESUME + "/"])


def _is_shard(name: str, suffix: str) -> bool:
    file = name.removesuffix(suffix)
    return file == SINGLE or _COUNT.search(file) is not None


def check_unfinished(folder: Folder, names: Collection[str]) -> None:
    """Refuse a folder with an unfinished conversion, and say how to continue it."""
    if INDEX in names and unfinished.NAME not in names:
        return
    records = recorded(folder, names)
    complete = sorted(file for file in records if file in names)
    if not complete or (complete == [SINGLE] and records[SINGLE].in_place is not None):
        return
    count = _COUNT.search(complete[0])
    total = 1 if count is None else int(count[1])
    of = f"{len(complete):,} of {plural(total, 'shard')} {'is' if total == 1 else 'are'} there"
    raise FileExistsError(
        errno.EEXIST,
        f"An unfinished conversion: {of}; pass resume=True to continue or overwrite=True to start over",
        folder.location.shown,
    )


def copy(file: str, source: Folder, target: Folder) -> None:
    """Copy the record of a shard to another folder, unless it is missing or invalid."""
    record = read(source, file)
    if record is not None:
        _write(target, file, record)


def recorded(folder: Folder, names: Iterable[str]) -> dict[str, ShardRecord]:
    """Return the valid records of a folder by shard name."""
    files = sorted(shards(folder, names))
    records = folder.location.files.each(lambda file: read(folder, file), files)
    return {file: record for file, record in zip(files, records, strict=True) if record is not None}


def shards(folder: Folder, names: Iterable[str]) -> set[str]:
    """Return the names of the shards with records, which can be malformed."""
    old = {name.removesuffix(RECORD) for name in names if name.endswith(RECORD)}
    return old | {name.removesuffix(RECORD) for name in (folder / RESUME).names() if name.endswith(RECORD)}


def same_work(record: ShardRecord, version: str, options: Mapping[str, Any]) -> bool:
    """Return True if a conversion with this version and these options wrote a record."""
    return bool(record.version == version and record.options == options)


def superseded(asides: Iterable[Folder], version: str, options: Mapping[str, Any]) -> list[Folder]:
    """Return the subfolders in which the same conversion left shards of other sources; see `same_work`."""
    names_of = [(aside, aside.names() - {RESUME}) for aside in asides]
    return [
        aside
        for aside, names in names_of
        if not names - {RESUME}
        or any(same_work(record, version, options) for record in recorded(aside, names).values())
    ]


def difference(record: ShardRecord, version: str, options: Mapping[str, Any], sources: Sequence[Sequence[Any]]) -> str:
    """Explain why a plan cannot keep a recorded shard: a different version, option or source."""
    if record.version != version:
        return f"with safeload {printable(str(record.version))}, but this is {version}"
    before = record.options if isinstance(record.options, dict) else {}
    for key in (*options, *before):
        if before.get(key) != options.get(key):
            return printable(f"with {key}={show(before.get(key))}, but this call has {key}={show(options.get(key))}")
    if record.safeload_done == _WITHOUT_PIECE:
        return "by an older safeload, whose record does not list the shard's sources"
    before_sources = record.sources if isinstance(record.sources, list) else []
    changed = [source[0] for source in sources if source not in before_sources]
    if changed and changed[0] in [source[0] for source in before_sources if isinstance(source, list) and source]:
        return f"before its source {show(changed[0])} changed"
    return "from other sources, or they have changed since"
