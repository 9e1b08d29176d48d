"""Opens folders of weight files, with and without an index, and lists of files."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..base.paths import os_error
from ..base.text import show
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, MissingShardError, UnsupportedError, missing_file
from ..stores.files import Files
from ..stores.json_file import read_if_there, read_version
from .folder_messages import listed, no_weights, not_an_index, notes_of
from .gguf import split as gguf_split
from .registry import GGUF, SAFETENSORS, TORCH_LEGACY, TORCH_ZIP, WEIGHT_SUFFIXES, Opened, OpenRequest, open_file

INDEX_SUFFIX = ".safetensors.index.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_SINGLES = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin")

# What the names of files end with that may be opened.
SUFFIXES_OF_FILES = (".json", *sorted(WEIGHT_SUFFIXES))

_SHARD = re.compile(r"(.*)-([0-9]{1,9})-of-([0-9]{1,9})(\.[a-z]+)", re.ASCII | re.DOTALL)


class Shards(NamedTuple):
    """The opened files of a path.

    Attributes:
        format: of the first file.
        files: the open files.
        where: name of each tensor to its file and its index in that file.
        metadata: of all files and of the index, merged.
        config: parsed ``config.json``, else None.
        index_file: path and identity of the index, else None.
        notes: what kind of folder it is, and which of its files were skipped.
    """

    format: str
    files: list[WeightFile]
    where: dict[str, tuple[WeightFile, int]]
    metadata: Mapping[str, Any]
    config: dict[str, Any] | None = None
    index_file: tuple[str, tuple[Any, ...]] | None = None
    notes: Sequence[str] = ()


def open_path(path: str, wanted: OpenRequest) -> Shards:
    """Opens a folder, an ``index.json`` or a file.

    Raises:
        FormatError, UnsupportedError, OSError: see `open_folder`, `open_index` and `open_file`.
    """
    files = wanted.files
    name = files.split(path)[1]
    if files.remote and name.endswith(SUFFIXES_OF_FILES) and not path.endswith("/"):
        # The usual case is a file; a question whether it is a folder would be a request.
        with suppress(FileNotFoundError):
            return open_index(path, wanted) if name.endswith(".json") else open_parts(open_file(path, wanted), wanted)
    if files.is_folder(path):
        return open_folder(path, wanted)
    if name.endswith(".json"):
        if not files.remote and not os.path.lexists(path):
            raise os_error(errno.ENOENT, path)
        return open_index(path, wanted)
    return open_parts(open_file(path, wanted), wanted)


def open_list(paths: Sequence[str], wanted: OpenRequest) -> Shards:
    """Opens several paths as one checkpoint: the union of their tensors.

    Raises:
        FormatError: two paths have a tensor of the same name.
        UnsupportedError: the paths have different formats.
    """
    opened: list[Shards] = []
    where: dict[str, tuple[WeightFile, int]] = {}
    metadata: dict[str, Any] = {}
    parts: set[str] = set()  # of split files: the first part opens all of them
    for path in paths:
        if wanted.files.absolute(path) in parts:
            continue
        one = open_path(path, wanted)
        if opened and one.format != opened[0].format:
            shown = wanted.files.shown
            raise UnsupportedError(
                f"{shown(path)} is {one.format}, {shown(paths[0])} is {opened[0].format}: a list of files must be of "
                "one format; safeload.convert takes sources of several"
            )
        opened.append(one)
        add(where, one.where)
        metadata.update(one.metadata)
        if one.format == GGUF and len(one.files) > 1:
            parts.update(file.place for file in one.files)
    config = next((one.config for one in opened if one.config is not None), None)
    files = [file for one in opened for file in one.files]
    return Shards(opened[0].format, files, where, metadata, config, None, [n for one in opened for n in one.notes])


def add(where: dict[str, tuple[WeightFile, int]], more: Mapping[str, tuple[WeightFile, int]]) -> None:
    """Adds tensors to those of other files.

    Raises:
        FormatError: a name is there already.
    """
    for name, place in more.items():
        if name in where:
            first, second = where[name][0].path, place[0].path
            raise FormatError(f"tensor {show(name)} is in both {first} and {second}", second, tensor=name)
        where[name] = place


def open_parts(first: Opened, wanted: OpenRequest) -> Shards:
    """Adds the other parts to an open file if it is part of a split GGUF file."""
    if first.format == GGUF and gguf_split.is_part(first.file):
        files, metadata = gguf_split.open_parts(first.file, lambda path: open_file(path, wanted).file)
        return _union(GGUF, files, metadata)
    if first.where is not None:
        return Shards(first.format, first.files, first.where, first.metadata)
    return _union(first.format, first.files, first.metadata)


def _union(format: str, files: list[WeightFile], metadata: Mapping[str, Any]) -> Shards:
    where: dict[str, tuple[WeightFile, int]] = {}
    for file in files:
        add(where, {name: (file, index) for index, name in enumerate(file.table.names)})
    return Shards(format, files, where, metadata)


def _metadata(shards: Sequence[Opened]) -> Mapping[str, Any]:
    metadata: Mapping[str, Any] = {}
    for shard in shards:
        metadata = {**metadata, **shard.metadata} if metadata else shard.metadata
    return metadata


# ---- an index ----


def _shard_name(value: Any, tensor: str, path: str) -> str:
    """Checks a bare file name: an index must not refer to files outside its folder."""
    if not isinstance(value, str) or not value:
        raise FormatError(f"weight_map[{show(tensor)}] must name a file, found {show(value)}", path, tensor=tensor)
    if value in (".", "..") or any(c in "\0/\\:" or "\ud800" <= c <= "\udfff" for c in value):
        wanted = "the bare name of a file in the same folder"
        raise FormatError(f"weight_map[{show(tensor)}] must be {wanted}, found {show(value)}", path, tensor=tensor)
    return value


def open_index(path: str, wanted: OpenRequest) -> Shards:
    """Opens every shard that an ``index.json`` names. The index is authoritative: tensors that it omits are ignored.

    Raises:
        FormatError: the index is malformed, or a tensor is missing from the shard that it names.
        FileNotFoundError: a shard is missing.
    """
    files, shown = wanted.files, wanted.files.shown(path)
    folder, base = files.split(path)
    index, version = read_version(path, "index.json", files)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        message = f"weight_map must be an object, found {type(weight_map).__name__}"
        raise FormatError(message if "weight_map" in index else not_an_index(path, index, files) or message, shown)
    metadata = index.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise FormatError(f"metadata must be an object, found {type(metadata).__name__}", shown)
    names: dict[str, list[str]] = {}
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name not in names:
            names[_shard_name(file_name, tensor, shown)] = []
        names[file_name].append(tensor)

    def open_shard(file_name: str) -> Opened:
        try:
            return open_file(files.join(folder, file_name), wanted)
        except FileNotFoundError as error:
            place = error.filename
            message = f"No such file or directory: {place}; {base} lists it: was the download finished?"
            raise missing_file(place, message) from None

    opened: dict[str, Opened] = {}
    config: list[dict[str, Any] | None] = []

    def read(file_name: str | None) -> None:
        if file_name is None:
            config.append(read_config(folder, files))
        else:
            opened[file_name] = open_shard(file_name)

    files.each(read, [*sorted(names), None])
    shards = [opened[file_name] for file_name in sorted(names)]
    where: dict[str, tuple[WeightFile, int]] = {}
    for shard, (file_name, tensors) in zip(shards, sorted(names.items()), strict=True):
        missing = set(tensors)
        for file in shard.files:
            found = sorted((at, tensor) for tensor in missing if (at := file.table.find(tensor)) >= 0)
            where.update((tensor, (file, at)) for at, tensor in found)
            missing.difference_update(tensor for _, tensor in found)
        if missing:
            message = f"tensor {show(min(missing))} should be in {show(file_name)[1:-1]}, but is not there"
            raise FormatError(message, shown, tensor=min(missing))
    merged = _metadata(shards)
    return Shards(
        shards[0].format if shards else SAFETENSORS,
        [file for shard in shards for file in shard.files],
        where,
        {**merged, **metadata} if metadata else merged,
        config[0],
        (files.absolute(path), version),
    )


# ---- a folder ----


class _Set(NamedTuple):
    """Files with numbers in their names: ``P-00001-of-00003.safetensors``.

    Attributes:
        stem: the part of the names before the numbers.
        total: expected number of files, as written in the names.
        suffix: the part of the names after the numbers.
        files: number to name.
    """

    stem: str
    total: str
    suffix: str
    files: dict[int, str]

    @property
    def complete(self) -> bool:
        return len(self.files) == max(self.files) == int(self.total) and min(self.files) == 1

    @property
    def missing(self) -> list[str]:
        """Names of missing files, at most the first five."""
        width = len(self.total) if len(self.total) < 5 else 5
        numbers = (k for k in range(1, int(self.total) + 1) if k not in self.files)
        return [
            f"{self.stem}-{k:0{width}}-of-{self.total}{self.suffix}" for k, _ in zip(numbers, range(5), strict=False)
        ]


def sets_of(names: Sequence[str]) -> list[_Set]:
    """Groups files into sets by their names."""
    found: dict[tuple[str, str, str], _Set] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None and int(match[3]) > 0:
            one = found.setdefault((match[1], match[3], match[4]), _Set(match[1], match[3], match[4], {}))
            one.files[int(match[2])] = name
    return list(found.values())


def open_folder(path: str, wanted: OpenRequest) -> Shards:
    """Opens the weights of a folder: the first of these that exists.

    ``model.safetensors.index.json``, or the only index; ``model.safetensors``; the one complete set
    ``...-00001-of-0000n.safetensors``; the only ``*.safetensors``; ``pytorch_model.bin.index.json``;
    ``pytorch_model.bin``; a set of its shards; one ``consolidated.*.pth``; one ``*.gguf`` with all of its parts.
    ``wanted.formats`` excludes other formats.

    Raises:
        FormatError: several indexes, an incomplete set, or the same name in two files.
        UnsupportedError: several files, or none of these; the message lists the files found.
    """
    files, shown = wanted.files, wanted.files.shown(path)
    visible = files.listing(path)
    names = [name for name, folder in visible if not folder]
    folders = [name for name, folder in visible if folder]
    formats = wanted.formats or (SAFETENSORS, TORCH_ZIP, GGUF)
    chosen: list[str] | None = None
    if SAFETENSORS in formats:
        chosen = _choose_safetensors(names, shown)
    if chosen is None and (TORCH_ZIP in formats or TORCH_LEGACY in formats):
        chosen = _choose_torch(names, shown)
    if chosen is None and GGUF in formats:
        chosen = _choose_gguf(names, shown)
    if chosen is None:
        raise UnsupportedError(no_weights(path, names, folders, files))
    if chosen[0].endswith(".json"):
        shards = open_index(files.join(path, chosen[0]), wanted)
    elif len(chosen) == 1 or chosen[0].endswith(".gguf"):
        shards = open_parts(open_file(files.join(path, chosen[0]), wanted), wanted)
    else:
        opened = files.each(lambda name: open_file(files.join(path, name), wanted), chosen)
        shards = _union(opened[0].format, [file for one in opened for file in one.files], _metadata(opened))
    notes = notes_of(names, folders, {*chosen, *(files.split(file.place)[1] for file in shards.files)}, path, files)
    return shards._replace(config=read_config(path, files) if shards.config is None else shards.config, notes=notes)


def _choose_safetensors(names: Sequence[str], path: str) -> list[str] | None:
    """Chooses safetensors files in a folder: the index, the single file, the complete set or the only file."""
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if INDEX in indexes:
        return [INDEX]
    if len(indexes) > 1:
        raise FormatError(f"several indexes: {listed(indexes)}; open one of them", path)
    if indexes:
        return indexes
    if SINGLE in names:
        return [SINGLE]
    files = [name for name in names if name.endswith(".safetensors")]
    sets = sets_of(files)
    complete = [one for one in sets if one.complete]
    if len(complete) == 1:
        return _in_order(complete[0])
    if not complete:
        _refuse_incomplete(sets, path)
        if len(files) <= 1:
            return files or None
    shown = ", ".join(show(path.rstrip("/") + "/" + name) for name in files[:3]) + (", ..." if len(files) > 3 else "")
    variants = len({name.split(".")[0] for name in files}) == 1
    advice = "They look like variants of one model: open one of them by its path" if variants else "Open one of them"
    raise UnsupportedError(
        f"{path}: {len(files)} .safetensors files and no index: {listed(files)}. {advice}, "
        f"or the tensors of several together with safeload.open([{shown}])"
    )


def _in_order(one: _Set) -> list[str]:
    return [one.files[number] for number in sorted(one.files)]


def _refuse_incomplete(sets: Sequence[_Set], path: str) -> None:
    for one in sets:
        if not one.complete:
            total = int(one.total)
            there = sum(1 <= number <= total for number in one.files)
            raise MissingShardError(
                f"{there:,} of {total:,} shards are there, {total - there:,} missing: {listed(one.missing, 5)}"
                + (", ..." if total - there > 5 else ""),
                path,
            )


def _choose_torch(names: Sequence[str], path: str) -> list[str] | None:
    """Chooses torch files in a folder: the index, the single file, the shards or Meta's single file."""
    for name in (TORCH_INDEX, *TORCH_SINGLES):
        if name in names:
            return [name]
    shards = [name for name in names if name.startswith("pytorch_model-") and name.endswith(".bin")]
    sets = sets_of(shards)
    complete = [one for one in sets if one.complete]
    if len(complete) == 1:
        return _in_order(complete[0])
    _refuse_incomplete(sets, path)
    parts = [name for name in names if fnmatchcase(name, "consolidated.*.pth")]
    if len(parts) > 1:
        raise UnsupportedError(
            f"{path}: {len(parts)} files {listed(parts[:1])} to {listed(parts[-1:])} are model-parallel: each holds a "
            "slice of every tensor. Open them one by one, or convert them to a single file first"
        )
    return parts or None


def _choose_gguf(names: Sequence[str], path: str) -> list[str] | None:
    """Chooses the only GGUF file in a folder, or the first part of the only split one."""
    files = [name for name in names if name.endswith(".gguf")]
    sets = sets_of(files)
    single = set(files) - {name for one in sets for name in one.files.values()}
    firsts = sorted([*single, *(one.files[min(one.files)] for one in sets)])
    if len(firsts) > 1:
        raise UnsupportedError(f"{path}: {len(firsts)} GGUF files: {listed(firsts)}; open one of them")
    _refuse_incomplete(sets, path)
    return firsts or None


def read_config(path: str, files: Files) -> dict[str, Any] | None:
    """Reads a folder's ``config.json``; None if it does not exist."""
    return read_if_there(files.join(path, CONFIG), CONFIG, files)
