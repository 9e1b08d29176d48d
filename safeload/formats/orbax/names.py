"""Names of the files and folders of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...base.messages import error_about
from ...base.text import printable
from ...errors import SafeloadError, UnsupportedError
from ...stores.files import Files

METADATA = "_METADATA"
STRINGS = "_strings.json"
# Written for a step by Orbax, beside or above the checkpoints of its items.
STEP = "_CHECKPOINT_METADATA"
# A part of the database, written by a process; "replica_" precedes the number of a replica.
PART = re.compile(r"ocdbt\.process_(?:replica_)?[A-Za-z0-9]{1,32}", re.ASCII)
# In the names of folders that are still being written.
_UNFINISHED = ".orbax-checkpoint-tmp"
# Subfolders to look into, over the network and here; names in a message.
_MOST_REMOTE, _MOST, _SHOWN = 64, 4_096, 20
# A step of `CheckpointManager`: its number, after a prefix of the program's choice.
_NUMBERED = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})", re.ASCII | re.DOTALL)


def is_checkpoint(names: Sequence[str]) -> bool:
    """Return True if a folder has the metadata of a tree."""
    return METADATA in names


def below(path: str, visible: Sequence[tuple[str, bool]], files: Files) -> str | None:
    """Return the only checkpoint in a folder of steps or items; None if there is none."""
    folders = _looked_into(visible, files)
    listings = _inner_listings(path, visible, files)
    checkpoints: list[str] = []
    for name, inner in zip(folders, listings, strict=True):
        names = [text for text, _ in inner]
        if is_checkpoint(names):
            checkpoints.append(name)
        elif STEP in names or _NUMBERED.fullmatch(name):
            inside = _inner_listings(files.join(path, name), inner, files)
            if any(is_checkpoint([text for text, _ in listing]) for listing in inside):
                checkpoints.append(name)
    if len(checkpoints) > 1:
        ordered = sorted(checkpoints, key=_number)
        shown = ", ".join(printable(name) for name in ordered[-_SHOWN:])
        what = "steps" if all(map(_NUMBERED.fullmatch, ordered)) else "checkpoints"
        text = f"this folder has {len(ordered):,} Orbax {what}: {'... ' if len(ordered) > _SHOWN else ''}{shown}; "
        text += f"open one of them, such as {printable(ordered[-1])}"
        raise error_about(UnsupportedError, text, path=files.shown(path))
    return files.join(path, checkpoints[0]) if checkpoints else None


def _looked_into(visible: Sequence[tuple[str, bool]], files: Files) -> list[str]:
    folders = [name for name, is_folder in visible if is_folder and _UNFINISHED not in name]
    return folders[: _MOST_REMOTE if files.remote else _MOST]


def _inner_listings(path: str, visible: Sequence[tuple[str, bool]], files: Files) -> list[list[tuple[str, bool]]]:
    return files.each(lambda name: _listing(files.join(path, name), files), _looked_into(visible, files))


def _listing(folder: str, files: Files) -> list[tuple[str, bool]]:
    try:
        return files.listing(folder)
    except (OSError, SafeloadError):
        return []


def _number(name: str) -> tuple[int, str]:
    match = _NUMBERED.fullmatch(name)
    return (-1 if match is None else int(match[1]), name)
