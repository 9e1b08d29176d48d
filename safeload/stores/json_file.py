"""Reads all JSON files that accompany weights: index.json, config.json, schemas, layouts, manifests."""

from __future__ import annotations

import codecs
import os
from typing import Any

from ..base.paths import PathLike, native_path
from ..base.text import show
from ..errors import FormatError
from .files import LOCAL, Files
from .store import read_at

# An index is about 100 bytes a tensor: 600,000 of them.
MAX_JSON = 64 << 20
# Nesting of objects and arrays. Configs have four or five levels.
MAX_DEPTH = 64


def read_json(path: PathLike, what: str, files: Files = LOCAL) -> dict[str, Any]:
    """Parses a JSON file that must be an object, in UTF-8 (RFC 8259), with or without a byte order mark.

    Args:
        path: a regular file; nothing else is opened for reading, as it might block or never end.
        what: what messages call it.
        files: where the path leads.

    Raises:
        FormatError: the file is not regular, is too large or is not a JSON object, its values are nested too deep, or a
            key is a duplicate.
        OSError: the file cannot be read.
    """
    return read_version(native_path(path)[0], what, files)[0]


def read_version(path: str, what: str, files: Files = LOCAL) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What `read_json` returns, and the version of the file that it was read from."""
    content, version = _content(path, what, files)
    return parse_json(content, what, files.shown(path)), version


def read_if_there(path: str, what: str, files: Files = LOCAL) -> dict[str, Any] | None:
    """What `read_json` returns; None if there is no file."""
    if not files.remote and not os.path.lexists(path):
        return None
    try:
        return read_json(path, what, files)
    except (FileNotFoundError, PermissionError):
        if files.remote:  # stores that may not be listed refuse what is not there
            return None
        raise


def parse_json(content: bytes, what: str, text: str) -> dict[str, Any]:
    """`read_json` for content that has been read; ``text`` is the path of its file.

    Raises:
        FormatError: see `read_json`.
    """
    import json  # only here: it takes a millisecond, and most files stand alone

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise FormatError(f"{what}: duplicate key {show(duplicate)}", text)
        return result

    mark = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    try:
        value = json.loads(content[mark:].decode(), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        offset = mark + len(error.doc[: error.pos].encode())
        raise FormatError(f"{what} is not JSON: {error.msg}", text, offset) from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} is not JSON, which is UTF-8: {error.reason}", text, mark + error.start) from None
    except FormatError:
        raise
    except RecursionError:
        raise FormatError(f"{what} is not JSON of at most {MAX_DEPTH} levels", text) from None
    except ValueError as error:  # a number with thousands of digits
        raise FormatError(f"{what} is not JSON: {show(str(error))[1:-1]}", text) from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be a JSON object, found {type(value).__name__}", text, 0)
    _check_depth(value, what, text)
    return value


def _content(path: str, what: str, files: Files) -> tuple[bytes, tuple[Any, ...]]:
    shown = files.shown(path)
    try:
        store = files.open(path)
    except FormatError:
        raise FormatError(f"{what} is not a regular file", shown) from None
    try:
        if store.size > MAX_JSON:
            raise FormatError(f"{what} has {store.size:,} bytes, the limit is {MAX_JSON:,}", shown)
        return read_at(store, 0, store.size), store.version
    finally:
        store.close()


def _check_depth(value: Any, what: str, path: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        items = (item.values() if isinstance(item, dict) else item for item in level)
        level = [inner for group in items for inner in group if isinstance(inner, (dict, list))]
        if not level:
            return
    raise FormatError(f"{what} is not JSON of at most {MAX_DEPTH} levels", path)
