"""JSON files beside weights: index.json, config.json, layouts, manifests."""

from __future__ import annotations

import codecs
import os
from contextlib import closing
from typing import Any

from ..errors import FormatError
from .files import LOCAL, Files
from .paths import PathLike, native_path
from .store import read_at
from .text import show

# An index takes about 100 bytes per tensor, so this is enough for 600,000 tensors.
MAX_JSON = 64 << 20
# Maximum nesting of objects and arrays. Configs have four or five levels.
MAX_DEPTH = 64


def read_json(path: PathLike, what: str, files: Files = LOCAL) -> dict[str, Any]:
    """Read a JSON object from a regular file in UTF-8 (RFC 8259), with or without a byte order mark."""
    return read_version(native_path(path)[0], what, files)[0]


def read_version(path: str, what: str, files: Files = LOCAL) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Like `read_json`, but also return the version of the file."""
    shown = files.shown(path)
    try:
        store = files.open(path)
    except FormatError:
        if files.remote:  # the store says more
            raise
        raise FormatError(f"{what} is not a regular file", shown) from None
    with closing(store):
        if store.size > MAX_JSON:
            raise FormatError(f"{what} has {store.size:,} bytes, but the limit is {MAX_JSON:,}", shown)
        content, version = read_at(store, 0, store.size), store.version
    return parse_json(content, what, shown), version


def read_if_there(path: str, what: str, files: Files = LOCAL) -> dict[str, Any] | None:
    """Like `read_json`, but return None if the file does not exist."""
    if is_missing(path, files):
        return None
    try:
        return read_json(path, what, files)
    except (FileNotFoundError, PermissionError):
        if files.remote:  # without permission to list, stores refuse access to missing files
            return None
        raise


def is_missing(path: str, files: Files) -> bool:
    """Return True if a local file does not exist. Of remote files only opening tells."""
    if files.remote or os.path.lexists(path):
        return False
    check_missing = getattr(files, "check_missing", None)  # of verified files only
    if check_missing is not None:
        check_missing(path)
    return True


def parse_json(content: bytes, what: str, text: str) -> dict[str, Any]:
    """Like `read_json`, for content already read from the path ``text``."""
    import json  # only here: it takes a millisecond, and most files have no JSON beside them

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise FormatError(f"{what}: duplicate key {show(duplicate)}", text)
        return result

    if content.startswith(b"version https://git-lfs"):
        raise FormatError(f"{what} is a Git LFS pointer: run `git lfs pull` to get the file itself", text)
    mark = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    try:
        value = json.loads(content[mark:].decode(), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        offset = mark + len(error.doc[: error.pos].encode())
        fault = error.msg.removesuffix(" at").removesuffix(" starting")  # Python adds line and column
        raise FormatError(f"{what} is not JSON: {fault}", text, offset) from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} is not JSON: it is not UTF-8 ({error.reason})", text, mark + error.start) from None
    except FormatError:
        raise
    except RecursionError:
        raise FormatError(f"{what} is nested more than {MAX_DEPTH} levels deep", text) from None
    except ValueError as error:  # a number with thousands of digits
        raise FormatError(f"{what} is not JSON: {show(str(error))[1:-1]}", text) from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be a JSON object, got {type(value).__name__}", text, 0)
    if content.count(b"{") + content.count(b"[") <= MAX_DEPTH:
        return value
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        items = (item.values() if isinstance(item, dict) else item for item in level)
        level = [inner for group in items for inner in group if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise FormatError(f"{what} is nested more than {MAX_DEPTH} levels deep", text)
