"""Records that a shard is whole, in a file beside it: what a conversion that is resumed need not do again."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..base.text import printable, show
from ..engine.atomic_file import write_text
from ..errors import FormatError
from ..stores.json_file import read_json

SUFFIX = ".done.json"
KEY, VERSION = "safeload_done", 1

_BUFFER = 4 << 20


def write(path: str, piece: Mapping[str, Any], size: int, digest: str) -> None:
    """Records that a file is whole.

    Args:
        path: of the file.
        piece: the piece of the plan that has made it.
        size: bytes.
        digest: SHA-256 in hexadecimal digits.
    """
    kept = {key: piece.get(key) for key in ("plan", "version", "options")}
    record = {KEY: VERSION, **kept, "size": size, "sha256": digest}
    try:
        _write(path, record)
    except PermissionError:  # Windows: a process that does the same piece reads the record that it has just written
        if read(path) != record:
            raise


def _write(path: str, record: Mapping[str, Any]) -> None:
    write_text(path + SUFFIX, json.dumps(record, indent=1) + "\n")


def read(path: str) -> dict[str, Any] | None:
    """What is recorded of a file; None if nothing is, or nothing legible."""
    try:
        found = read_json(path + SUFFIX, "the record of a shard")
    except (FormatError, OSError):
        return None
    kinds = {"plan": str, "size": int, "sha256": str}
    legible = found.get(KEY) == VERSION and all(type(found.get(key)) is kind for key, kind in kinds.items())
    return found if legible else None


def is_whole(path: str, piece: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is recorded of a file if this piece has made it, and its bytes are still the same; else None."""
    found = read(path)
    if found is None or found["plan"] != piece.get("plan"):
        return None
    return found if has(path, found["size"], found["sha256"]) else None


def has(path: str, size: int, digest: str) -> bool:
    """Whether a file has this size and SHA-256."""
    try:
        return os.path.getsize(path) == size and _digest_of(path) == digest
    except OSError:
        return False


def _digest_of(path: str) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def aside(folder: str, plan: str) -> str:
    """Where the shards of a plan wait that replaces what a folder has."""
    return os.path.join(folder, f".safeload-{plan}")


def forget(path: str) -> None:
    """Removes the record of a file that something else has made."""
    with suppress(OSError):
        os.unlink(path + SUFFIX)


def move(file: str, source: str, target: str) -> None:
    """Moves a file and its record to another folder; at any moment one of the two folders has both.

    What ``source`` lacks was moved before. A file that is replaced keeps its mode, as `AtomicFile` has it.
    """
    old, new = os.path.join(source, file), os.path.join(target, file)
    record = read(old)
    if record is not None:
        _write(new, record)
    if os.name != "nt":
        with suppress(FileNotFoundError):
            os.chmod(old, stat.S_IMODE(os.stat(new).st_mode))
    with suppress(FileNotFoundError):
        os.replace(old, new)
    with suppress(FileNotFoundError):
        os.unlink(old + SUFFIX)


def recorded(folder: str) -> dict[str, dict[str, Any]]:
    """The records in a folder, by the name of the file."""
    names = (name.removesuffix(SUFFIX) for name in sorted(os.listdir(folder)) if name.endswith(SUFFIX))
    found = {name: read(os.path.join(folder, name)) for name in names}
    return {name: record for name, record in found.items() if record is not None}


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
