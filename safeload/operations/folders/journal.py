"""Unfinished conversions: their complete shards, and a record of each.

``.safeload-resume/CALL/SHARD.json`` in the destination is the record of a shard; CALL is a hash of the call. A local
shard waits beside its record until all shards are complete. A store renames nothing: its shards have their final names.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ...base.text import plural, printable, show
from ...errors import FormatError
from ...formats.folder import INDEX, RESUME, SINGLE, is_weight_file
from ...formats.numbered import PART
from .sink import EXISTS, Sink, is_file

# Suffix of a record.
RECORD = ".json"
_CALL = re.compile(r"[0-9a-f]{16}", re.ASCII)
_FIELDS = {"piece": str, "size": int, "sha256": str}


def is_call(name: str) -> bool:
    """Return True for the id of a call."""
    return _CALL.fullmatch(name) is not None


def subfolder(folder: Sink, call: str) -> Sink:
    """Return the subfolder of a call."""
    return folder / RESUME / call


def write(folder: Sink, call: str, file: str, record: Mapping[str, Any]) -> None:
    """Write the record of a complete shard."""
    if folder.location.files.remote:
        record = {**record, "object": folder.identity(file)}
    text = (json.dumps(record, indent=1) + "\n").encode()
    place = subfolder(folder, call)
    try:
        with place.writing(file + RECORD, len(text)) as written, written.stream() as stream:
            stream.write(text)
    except PermissionError:  # Windows: another process running this piece is reading its record
        if read(folder, call, file) != record:
            raise


def read(folder: Sink, call: str, file: str) -> dict[str, Any] | None:
    """Return the record of a shard, or None if there is no valid record."""
    try:
        record = subfolder(folder, call).read_json(file + RECORD, "the record of a shard")
    except (FormatError, FileNotFoundError):
        return None
    except OSError:
        if folder.location.files.remote:  # the record may exist
            raise
        return None
    return record if all(type(record.get(key)) is kind for key, kind in _FIELDS.items()) else None


def records(folder: Sink) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the valid records of a folder by call and by shard."""
    by_call = {}
    for call in sorted(filter(is_call, (folder / RESUME).names())):
        listed = sorted(subfolder(folder, call).names())
        files = [name.removesuffix(RECORD) for name in listed if name.endswith(".safetensors" + RECORD)]
        of_call = folder.location.files.each(partial(read, folder, call), files)
        by_call[call] = {file: record for file, record in zip(files, of_call, strict=True) if record is not None}
    return by_call


def places(folder: Sink, call: str, file: str) -> list[tuple[Sink, str]]:
    """Return where a shard can be: where it waits, or where an interrupted call has put it."""
    if folder.location.files.remote:
        return [(folder, file)]
    waiting, usual = subfolder(folder, call), PART.fullmatch(file)
    shards = [(waiting, file)] if file in waiting.names() else []
    for name in sorted(folder.names()):  # with any total number of shards
        part = PART.fullmatch(name)
        if name == file or (part and usual and part.group(1, 2, 4) == usual.group(1, 2, 4)):
            shards.append((folder, name))
    return shards


def whole(folder: Sink, call: str, file: str, piece: str) -> tuple[dict[str, Any], Sink, str] | None:
    """Return record and place of a shard if the piece with this id wrote it and it is unchanged; else None."""
    record = read(folder, call, file)
    if record is None or record["piece"] != piece:
        return None
    for place, name in places(folder, call, file):
        if place.holds(name, record["size"], record["sha256"], record.get("object")):
            return record, place, name
    return None


def clear(folder: Sink, calls: Iterable[str] | None = None) -> None:
    """Remove the records and waiting shards of calls, or of all; other files stay."""
    calls = sorted(filter(is_call, (folder / RESUME).names() if calls is None else calls))
    for call in calls:
        place = subfolder(folder, call)
        ours = (".safetensors" + RECORD, ".tmp")
        place.remove(sorted(name for name in place.names() if is_weight_file(name) or name.endswith(ours)))
    remove_empty(folder, calls)


def remove_empty(folder: Sink, calls: Sequence[str]) -> None:
    """Remove the subfolders of calls if they have no file."""
    if calls:
        (folder / RESUME).remove([call + "/" for call in calls])
    if calls or not folder.location.files.remote:
        folder.remove([RESUME + "/"])


def check_free(folder: Sink, *, overwrite: bool) -> None:
    """Refuse a folder with content before anything is read; say how to continue an unfinished conversion."""
    location, names = folder.location, folder.names()
    if not names and not (location.files.remote and location.path.endswith("/")) and is_file(location):
        raise FileExistsError(errno.EEXIST, "This is a file, but shards need a folder", location.shown)
    if not names or overwrite:
        return
    for call, of_call in {} if INDEX in names else records(folder).items():
        complete = [file for file in of_call if places(folder, call, file)]
        if complete and (SINGLE not in names or SINGLE in complete):
            number = PART.fullmatch(complete[0])
            total = 1 if number is None else int(number[3])
            of = f"{len(complete):,} of {plural(total, 'shard')} {'is' if total == 1 else 'are'} there"
            message = f"An unfinished conversion: {of}; pass resume=True to continue or overwrite=True to start over"
            raise FileExistsError(errno.EEXIST, message, location.shown)
    raise FileExistsError(errno.EEXIST, EXISTS, location.shown)


def difference(
    record: Mapping[str, Any], version: str, options: Mapping[str, Any], sources: Sequence[Sequence[Any]]
) -> str:
    """Explain why a call cannot keep a recorded shard: a different version, option or source."""
    if record.get("version") != version:
        return f"with safeload {printable(str(record.get('version')))}, but this is {version}"
    before = record.get("options")
    before = before if isinstance(before, dict) else {}
    for key in (*options, *before):
        if before.get(key) != options.get(key):
            return printable(f"with {key}={show(before.get(key))}, but this call has {key}={show(options.get(key))}")
    before = record.get("sources")
    before = [source for source in before if isinstance(source, list) and source] if isinstance(before, list) else []
    changed = [source[0] for source in sources if list(source) not in before]
    if changed and changed[0] in [source[0] for source in before]:
        return f"before its source {show(changed[0])} changed"
    return "from other sources, or they have changed since"
