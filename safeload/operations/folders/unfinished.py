"""Notes in half-replaced folders: no other conversion reads a folder with a note.

A note is written before the first file is replaced, and removed when the index is in place. A conversion that replaces
its own source can only continue with the note, because its sources are gone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...base.text import printable, show
from ...checkpoint import Checkpoint, recipe_of
from ...errors import FormatError
from ...formats.folder import INDEX, SINGLE
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
    """A shard in a note."""

    id: str
    file: str
    nbytes: int  # of all tensors
    tensors: list[Any]  # as in the piece

    def __post_init__(self) -> None:
        bare_name(self.file)


@dataclass(frozen=True, eq=False, kw_only=True)
class UnfinishedNote:
    """The plan of a conversion: with an id if it ran in pieces, and with pieces if it replaces its own source."""

    safeload_unfinished: int = VERSION
    id: str | None = None  # of the plan
    version: str | None = None  # of safeload
    options: dict[str, Any] | None = None
    call: str | None = None  # id of the call
    tensors: int = 0
    quantized: dict[str, Any] | None = None  # as in the plan
    schemes: tuple[str, ...] = ()  # as in the plan
    parameters: int | None = None  # as in the plan
    pieces: tuple[NotedPiece, ...] | None = None
    config: dict[str, Any] | None = None  # the new config.json
    old: list[Any] | None = None  # what `heads_of` gave before the first step

    def __post_init__(self) -> None:
        if self.id is not None and not _ID.fullmatch(self.id):
            raise ValueError(f"id must be 16 hexadecimal digits, got {show(self.id)}")


def note(folder: Folder, content: UnfinishedNote) -> None:
    """Write the note of a conversion after all of its shards are complete."""
    text = (json.dumps(encode(content)) + "\n").encode()
    with folder.writing(NAME, len(text), overwrite=True) as file, file.stream() as stream:
        stream.write(text)


@contextmanager
def noted(folder: Folder, content: UnfinishedNote) -> Iterator[None]:
    """Write the note of a conversion; an error, which restores the old folder, removes a new note."""
    continues = NAME in folder.names()
    try:
        note(folder, content)
        yield
    except BaseException:
        if not continues:
            forget(folder)
        raise


def heads_of(folder: Folder) -> list[Any]:
    """Identify the files from which the weights of a folder are read; while they stay, the old weights are whole."""
    return [folder.identity(name) for name in (SINGLE, INDEX)]


def forget(folder: Folder) -> None:
    """Remove the note of a complete folder."""
    folder.remove([NAME])


def continued(folder: Folder, call: str) -> UnfinishedNote | None:
    """Return the note of this call, if it was interrupted while replacing its own source; None otherwise."""
    plain = _read(folder)
    if plain is None or plain.get(KEY) != VERSION or plain.get("call") != call or "pieces" not in plain:
        return None
    prefix = f"invalid {NAME}"
    # A note is untrusted: it has names, ids and numbers, but no paths.
    check_version(plain, prefix)
    content = decode(UnfinishedNote, plain, prefix)
    if content.id is None:
        raise FormatError(f"{prefix}: id is missing", folder.shown(NAME))
    return content


def _read(folder: Folder) -> dict[str, Any] | None:
    location = folder.location / NAME
    return read_if_there(location.path, "the note of a conversion", location.files)


# ---- sources ----


def call_id(src: Any) -> list[Any]:
    """Identify the sources of a call by their paths, to recognize a repeated call."""
    return [_source_id(source) for source in (src if isinstance(src, (list, tuple)) else [src])]


def _source_id(source: Any) -> Any:
    if hasattr(source, "weight_files"):  # an open checkpoint
        recipe = recipe_of(source)
        shown = [recipe.files.shown(path).rstrip("/") for path in recipe.paths]
        return shown[0] if (len(shown), recipe.root, recipe.stored) == (1, None, False) else [shown, recipe.root]
    if isinstance(source, Location):
        return source.shown.rstrip("/")
    text = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
    if isinstance(text, str):
        return (urls.shown(text) if urls.is_url(text) else os.path.abspath(text)).rstrip("/")
    return f"{type(source).__name__} {getattr(source, 'path', '')}"


def check_unopened(sources: Sequence[Given]) -> None:
    """Refuse half-replaced local folders before they are opened."""
    for source in sources:
        is_path = isinstance(source, (str, os.PathLike)) and not hasattr(source, "fs")
        path = os.fspath(source) if is_path else None  # type: ignore[arg-type]
        if isinstance(path, str) and not urls.is_url(path) and "\0" not in path:
            _check(path if not path.endswith(".json") else os.path.dirname(path) or ".")


def check_opened(catalog: Catalog) -> None:
    """Refuse sources with files in half-replaced folders."""
    if len(catalog.weight_files) > 1 or any(checkpoint.index is not None for checkpoint in catalog.checkpoints):
        for folder in sorted({path for checkpoint in catalog.checkpoints for path in _folders(checkpoint)}):
            _check(folder)


def check_remote(folder: Folder) -> None:
    """Refuse a half-replaced folder in a store as both source and destination."""
    plain = _read(folder)
    if plain is not None:
        raise _half_replaced(folder, plain)


def _check(path: str) -> None:
    if not os.path.lexists(os.path.join(path, NAME)):
        return
    folder = LocalFolder(path)
    try:
        plain = _read(folder) or {}
    except (FormatError, OSError):
        plain = {}
    if plain.get("old") == heads_of(folder):
        return
    raise _half_replaced(folder, plain)


def _half_replaced(folder: Folder, plain: Mapping[str, Any]) -> ValueError:
    """Return the error for a half-replaced source; its note ``plain`` can be malformed."""
    options = plain.get("options")
    listed = ", ".join(f"{key}={show(value)}" for key, value in options.items()) if isinstance(options, dict) else ""
    with_options = f" ({printable(listed)}; safeload {printable(str(plain.get('version')))})" if listed else ""
    repeat = f"Repeat that call{with_options} with overwrite=True and resume=True to complete it, or restore"
    return ValueError(
        f"{show(folder.location.shown)}: an interrupted conversion has replaced some of its files. "
        f"{repeat if 'id' in plain else 'Restore'} the original files and delete {NAME}"
    )


def is_source(folder: Folder, catalog: Catalog) -> bool:
    """Return True if a conversion reads files of its destination folder."""
    shown = folder.location.shown
    if folder.location.files.remote:
        remote = (file for file in catalog.weight_files if file.files.remote)
        parents = (file.files.shown(file.files.split(file.place)[0]) for file in remote)
        return any(parent.rstrip("/") == shown.rstrip("/") for parent in parents)
    if not os.path.isdir(shown):
        return False
    identity = identity_of(os.stat(shown))[2:]
    folders = {path for checkpoint in catalog.checkpoints for path in _folders(checkpoint)}
    return any(identity_of(os.stat(path))[2:] == identity for path in folders if os.path.isdir(path))


def _folders(checkpoint: Checkpoint) -> set[str]:
    """Return the local folders of a checkpoint's files, with and without symbolic links resolved."""
    paths = {file.place for file in checkpoint.weight_files if not file.files.remote}
    return {os.path.dirname(path) for path in paths} | {os.path.dirname(os.path.realpath(path)) for path in paths}
