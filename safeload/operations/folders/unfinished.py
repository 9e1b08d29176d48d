"""Notes in folders whose files a conversion is replacing: they keep others from reading what is half old, half new.

The note comes before the first file that is replaced, and goes when the index is in place. A conversion that replaces
its own source needs the note to continue, because its sources are gone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.text import printable, show
from ...checkpoint import Checkpoint, recipe_of
from ...errors import FormatError
from ...stores import url as urls
from ...stores.files import Location
from ...stores.json_file import read_if_there
from ...stores.local import identity_of
from ..sources.catalog import Catalog, Given
from ..sources.codec import decode, encode
from ..sources.plan import bare_name, check_version
from .folder import Folder, LocalFolder

NAME = ".safeload-unfinished.json"
KEY, VERSION = "safeload_unfinished", 1

_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, eq=False, kw_only=True)
class NotedPiece:
    """A shard of a conversion that replaces its own source."""

    id: str
    file: str
    nbytes: int
    tensors: list[Any]  # plain data

    def __post_init__(self) -> None:
        bare_name(self.file)


@dataclass(frozen=True, eq=False, kw_only=True)
class UnfinishedNote:
    """A note. Without an id and pieces the conversion cannot be continued."""

    safeload_unfinished: int = VERSION
    id: str | None = None  # of the plan
    version: str | None = None
    options: dict[str, Any] | None = None
    call: str | None = None  # id of the call
    tensors: int = 0
    quantized: dict[str, Any] | None = None  # plain data
    pieces: tuple[NotedPiece, ...] | None = None
    config: dict[str, Any] | None = None  # the future config.json

    def __post_init__(self) -> None:
        if self.id is not None and not _ID.fullmatch(self.id):
            raise ValueError(f"id must be 16 hexadecimal digits, got {show(self.id)}")


def note(folder: Folder, content: UnfinishedNote) -> None:
    """Write the note of a conversion whose shards are all complete."""
    text = (json.dumps(encode(content)) + "\n").encode()
    with folder.writing(NAME, len(text), overwrite=True) as file, file.stream() as stream:
        stream.write(text)


def forget(folder: Folder) -> None:
    """Remove the note of a folder that is complete."""
    folder.remove([NAME])


def continued(folder: Folder, call: str) -> UnfinishedNote | None:
    """Return the note of an interrupted conversion that replaces its own source.

    Anyone can have written the note: only names, ids and numbers are taken from it, no paths.

    Args:
        folder: the destination.
        call: the id of this call; None is returned for the note of another one.

    Raises:
        FormatError: the note is malformed.
        UnsupportedError: another version of safeload wrote it.
    """
    plain = _read(folder)
    if plain is None or plain.get(KEY) != VERSION or plain.get("call") != call or "pieces" not in plain:
        return None
    check_version(plain, "invalid note")
    return decode(UnfinishedNote, plain, f"invalid {NAME}")


def _read(folder: Folder) -> dict[str, Any] | None:
    location = folder.location / NAME
    return read_if_there(location.path, "the note of a conversion", location.files)


# ---- sources ----


def call_id(src: Any) -> list[Any]:
    """The sources of a call as they were given: two calls with equal ones may be one that is repeated."""
    return [_given(one) for one in (src if isinstance(src, (list, tuple)) else [src])]


def _given(one: Any) -> Any:
    if hasattr(one, "weight_files"):  # an open checkpoint
        recipe = recipe_of(one)
        shown = [recipe.files.shown(path).rstrip("/") for path in recipe.paths]
        return shown[0] if (len(shown), recipe.root, recipe.stored) == (1, None, False) else [shown, recipe.root]
    if isinstance(one, Location):
        return one.shown.rstrip("/")
    text = os.fspath(one) if isinstance(one, (str, os.PathLike)) else None
    if isinstance(text, str):
        return (urls.shown(text) if urls.is_url(text) else os.path.abspath(text)).rstrip("/")
    return f"{type(one).__name__} {getattr(one, 'path', '')}"


def check_given(src: Sequence[Given]) -> None:
    """Refuse local folders that are half replaced, before they are opened.

    Raises:
        ValueError: an interrupted conversion has replaced some files of a source.
    """
    for one in src:
        path = os.fspath(one) if isinstance(one, (str, os.PathLike)) and not hasattr(one, "fs") else None
        if isinstance(path, str) and not urls.is_url(path) and "\0" not in path:
            _check(path if not path.endswith(".json") else os.path.dirname(path) or ".")


def check_opened(catalog: Catalog) -> None:
    """Refuse sources whose files are in folders that are half replaced; see `check_given`.

    Raises:
        ValueError: an interrupted conversion has replaced some files of a source.
    """
    if len(catalog.weight_files) > 1 or any(opened.index is not None for opened in catalog.checkpoints):
        for folder in sorted({path for opened in catalog.checkpoints for path in _folders(opened)}):
            _check(folder)


def _check(path: str) -> None:
    if not os.path.lexists(os.path.join(path, NAME)):
        return
    folder = LocalFolder(path)
    try:
        said = _read(folder) or {}
    except (FormatError, OSError):
        said = {}
    raise half_replaced(folder, said)


def half_replaced(folder: Folder, said: Mapping[str, Any]) -> ValueError:
    """The error for a source that an interrupted conversion has replaced in part."""
    options = said.get("options")
    listed = ", ".join(f"{key}={show(value)}" for key, value in options.items()) if isinstance(options, dict) else ""
    with_options = f" ({printable(listed)}; safeload {printable(str(said.get('version')))})" if listed else ""
    repeat = f"Repeat that call{with_options} with overwrite=True and resume=True to complete it, or restore"
    return ValueError(
        f"{show(folder.location.shown)}: an interrupted conversion has replaced some of its files. "
        f"{repeat if 'id' in said else 'Restore'} the original files and delete {NAME}"
    )


def check_remote(folder: Folder) -> None:
    """Refuse a folder in a store that is a source as well as the destination; see `check_given`.

    Raises:
        ValueError: an interrupted conversion has replaced its index.
    """
    said = _read(folder)
    if said is not None:
        raise half_replaced(folder, said)


def is_source(folder: Folder, catalog: Catalog) -> bool:
    """Whether a conversion reads files of the folder that it writes."""
    if folder.location.files.remote:
        title = folder.location.shown.rstrip("/")
        remote = (file for file in catalog.weight_files if file.files.remote)
        return any(file.files.shown(file.files.split(file.place)[0]).rstrip("/") == title for file in remote)
    if not os.path.isdir(folder.location.shown):
        return False
    here = identity_of(os.stat(folder.location.shown))[2:]
    folders = {path for opened in catalog.checkpoints for path in _folders(opened)}
    return any(identity_of(os.stat(path))[2:] == here for path in folders if os.path.isdir(path))


def _folders(opened: Checkpoint) -> set[str]:
    """The local folders that hold the files of a checkpoint, symbolic links resolved."""
    paths = {file.place for file in opened.weight_files if not file.files.remote}
    return {os.path.dirname(path) for path in paths} | {os.path.dirname(os.path.realpath(path)) for path in paths}
