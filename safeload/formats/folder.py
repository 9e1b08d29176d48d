"""Folders of weight files, with and without an index."""

from __future__ import annotations

import codecs
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FormatError, UnsupportedError, os_error
from ..files import WeightFile
from .opening import GGUF, SAFETENSORS, TORCH_LEGACY, TORCH_ZIP, Opened, Wanted, open_file

INDEX_SUFFIX = ".safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_FILE = "pytorch_model.bin"

# An index is about 100 bytes a tensor; this is as far beyond any real one as the header limit of safetensors.
MAX_JSON = 100_000_000


def _show(value: Any) -> str:
    """A value of a file as messages show it: escaped, and no longer than a line or two."""
    text = repr(value[:200] if isinstance(value, (str, list)) else value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class Shards(NamedTuple):
    """What a folder or an index came to.

    Attributes:
        format: of the first of them.
        files: the open shards.
        where: name of each tensor to its shard and its index there; None when every tensor of every file counts.
        metadata: the index's own "metadata", else None.
    """

    format: str
    files: list[WeightFile]
    where: dict[str, tuple[WeightFile, int]]
    metadata: dict[str, Any] | None


def read_json(path: Path, what: str) -> Any:
    """Parses a JSON file that must be an object, in UTF-8 (RFC 8259), with or without a byte order mark.

    Of a key that is there twice FormatError says which.

    Raises:
        FormatError: no JSON object.
        OSError: the file cannot be read.
    """
    if path.stat().st_size > MAX_JSON:
        raise FormatError(f"{what} has more than {MAX_JSON} bytes", str(path))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise FormatError(f"{what}: key {_show(twice)} is there twice", str(path))
        return result

    try:
        content = path.read_bytes()
    except OSError as error:  # of a read, which does not know the path
        raise os_error(error.errno or 0, str(path)) from None
    mark = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    try:
        value = json.loads(content[mark:].decode(), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        offset = mark + len(error.doc[: error.pos].encode())
        raise FormatError(f"{what} is not JSON: {error.msg}", str(path), offset) from None
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{what} is not JSON, which is UTF-8: {error.reason}", str(path), mark + error.start
        ) from None
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise FormatError(f"{what} is not JSON: {error}", str(path)) from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be a JSON object, found {type(value).__name__}", str(path), 0)
    return value


def _shard_name(value: Any, tensor: str, path: Path) -> str:
    """A bare file name: an index must not reach out of its folder."""
    if not isinstance(value, str) or not value:
        raise FormatError(f"weight_map[{_show(tensor)}] must name a file, found {_show(value)}", str(path))
    if value in (".", "..") or any(c in "\0/\\:" or "\ud800" <= c <= "\udfff" for c in value):
        wanted = "the bare name of a file in the same folder"
        raise FormatError(f"weight_map[{_show(tensor)}] must be {wanted}, found {_show(value)}", str(path))
    return value


def open_index(path: Path, wanted: Wanted) -> Shards:
    """Opens every shard that an ``index.json`` names. The index is authoritative: what it leaves out is ignored.

    Raises:
        FormatError: the index is malformed, or a tensor is not in the shard it names.
        FileNotFoundError: a shard is missing.
    """
    index = read_json(path, "index.json")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise FormatError(f"weight_map must be an object, found {type(weight_map).__name__}", str(path))
    metadata = index.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise FormatError(f"metadata must be an object, found {type(metadata).__name__}", str(path))
    names: dict[str, list[str]] = {}
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name not in names:
            names[_shard_name(file_name, tensor, path)] = []
        names[file_name].append(tensor)
    shards: list[Opened] = []
    where: dict[str, tuple[WeightFile, int]] = {}
    for file_name, tensors in sorted(names.items()):
        shards.append(open_file(str(path.parent / file_name), wanted))
        missing = set(tensors)
        for file in shards[-1].files:
            found = sorted((index, tensor) for tensor in missing if (index := file.table.find(tensor)) >= 0)
            where.update((tensor, (file, index)) for index, tensor in found)
            missing.difference_update(tensor for _, tensor in found)
        if missing:
            raise FormatError(f"tensor {_show(min(missing))} should be in {file_name}, but is not there", str(path))
    return _shards(shards, where, metadata)


def _shards(shards: list[Opened], where: dict[str, tuple[WeightFile, int]], metadata: dict[str, Any] | None) -> Shards:
    return Shards(
        shards[0].format if shards else SAFETENSORS, [file for shard in shards for file in shard.files], where, metadata
    )


def _union(paths: list[Path], wanted: Wanted) -> Shards:
    shards = [open_file(str(path), wanted) for path in paths]
    where: dict[str, tuple[WeightFile, int]] = {}
    for file in (file for shard in shards for file in shard.files):
        for index, name in enumerate(file.table.names):
            if name in where:
                raise FormatError(f"tensor {_show(name)} is in both {where[name][0].path} and {file.path}", file.path)
            where[name] = (file, index)
    return _shards(shards, where, None)


def open_folder(path: Path, wanted: Wanted) -> Shards:
    """Opens the weights of a folder: the first of these that is there.

    ``*.safetensors.index.json``; all ``*.safetensors``; ``pytorch_model.bin.index.json``; ``pytorch_model.bin``; one
    ``consolidated.*.pth``; one ``*.gguf``. A format that is insisted on leaves out the others.

    Raises:
        FormatError: several indexes, or the same name in two files.
        UnsupportedError: nothing of these; the message lists what is there.
    """
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    formats = wanted.formats or (SAFETENSORS, TORCH_ZIP, GGUF)
    if SAFETENSORS in formats:
        indexes = [entry for entry in entries if entry.name.endswith(INDEX_SUFFIX)]
        if len(indexes) > 1:
            raise FormatError(f"several indexes: {', '.join(i.name for i in indexes)}; open one of them", str(path))
        if indexes:
            return open_index(indexes[0], wanted)
        shards = [entry for entry in entries if entry.name.endswith(".safetensors") and entry.is_file()]
        if shards:
            return _union(shards, wanted)
    if TORCH_ZIP in formats or TORCH_LEGACY in formats:
        found = _torch_of(entries, path)
        if found is not None:
            return open_index(found, wanted) if found.name == TORCH_INDEX else _union([found], wanted)
    if GGUF in formats:
        models = [entry for entry in entries if entry.suffix == ".gguf" and entry.is_file()]
        if len(models) > 1:
            names = ", ".join(entry.name for entry in models[:20])
            raise UnsupportedError(f"{path}: {len(models)} GGUF files: {names}; open one of them")
        if models:
            return _union(models, wanted)
    there = ", ".join(entry.name for entry in entries[:20]) or "nothing"
    raise UnsupportedError(f"{path}: no weights here; found {there}{' ...' if len(entries) > 20 else ''}")


def _torch_of(entries: list[Path], path: Path) -> Path | None:
    """What torch has left in a folder: its index, its file or Meta's single one."""
    by_name = {entry.name: entry for entry in entries}
    for name in (TORCH_INDEX, TORCH_FILE):
        if name in by_name:
            return by_name[name]
    parts = [entry for entry in entries if entry.match("consolidated.*.pth")]
    if len(parts) > 1:
        raise UnsupportedError(
            f"{path}: {len(parts)} files {parts[0].name} to {parts[-1].name} are model-parallel: each holds a slice of "
            "every tensor. Open them one by one, or convert them to a single file first"
        )
    return parts[0] if parts else None


def open_path(path: str, wanted: Wanted) -> tuple[Shards, dict[str, Any] | None]:
    """Opens a folder or an ``index.json``, with the ``config.json`` beside it.

    Raises:
        FormatError, UnsupportedError, OSError: see `open_folder` and `open_index`.
    """
    place = Path(path)
    if place.is_dir():
        return open_folder(place, wanted), read_config(place)
    return open_index(place, wanted), read_config(place.parent)


def read_config(path: Path) -> dict[str, Any] | None:
    """The folder's ``config.json``, None when there is none."""
    config = path / "config.json"
    if not os.path.exists(config):
        return None
    value: dict[str, Any] = read_json(config, "config.json")
    return value
