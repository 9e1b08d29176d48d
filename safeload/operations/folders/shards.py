"""Divide tensors into safetensors shards, and write a folder of shards with its index and config."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...base import dtypes, log
from ...base.arrays import Array
from ...base.text import show
from ...engine.read.lazy import Lazy, LazyEncoded, LazyPacked, LazyQuantized
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.digest import Digest
from ...engine.run.memory import address_of
from ...engine.run.weight_file import WeightFile
from ...errors import RemotePermissionError, SafetensorError, UnsupportedError
from ...formats import registry
from ...formats.folder import CONFIG, INDEX, SINGLE
from ...formats.registry import WEIGHT_SUFFIXES
from ...formats.safetensors.file import FileWriter, open_file
from ...formats.safetensors.header import ROOM
from ...formats.safetensors.quantized import pack, packed_in
from ...models.config_dtype import with_dtype
from ...packed.quantization import OWN, QUANTIZATION, is_own, quantization_of, without_quantization
from ...stores.files import Location
from ...stores.remote import RemoteStore
from .destinations import replacement_of
from .folder import Folder, is_extra
from .replacement import Put, Replacement

# The limit in bytes; tokenizers have up to 40 MB.
_LARGEST_EXTRA = 1 << 30
_COPY_BUFFER = 4 << 20

# A tensor for a writer.
Output = Lazy | LazyQuantized | LazyPacked | LazyEncoded


def config_with(
    config: Mapping[str, Any] | None,
    target: dtypes.Dtype | None,
    *,
    restored: bool = False,
    schemes: Collection[str] = (),
) -> dict[str, Any] | None:
    """Return the ``config.json`` for converted weights, nested parts included; ``restored`` if dequantized."""
    if config is None:
        return None
    if restored or is_own(config):
        config = without_quantization(config)
    result = dict(config) if target is None else with_dtype(config, target)
    if schemes and quantization_of(result) is None:
        result[QUANTIZATION] = {"quant_method": OWN, "schemes": sorted(schemes)}
    return result


def warn_of_schemes(path: str, schemes: Collection[str]) -> None:
    """Warn that other libraries cannot load a folder with safeload's quantized tensors."""
    if schemes:
        log.warning(
            "%s: only safeload reads the quantized tensors (%s); transformers, vLLM and other engines do not load them",
            path,
            ", ".join(sorted(schemes)),
        )


def extras_of(folder: Location) -> dict[str, Location]:
    """Return the files for other libraries beside the weights; none if a store cannot list folders."""
    try:
        listed = folder.files.listing(folder.path)
    except (UnsupportedError, RemotePermissionError):  # https, or a key without permission to list
        return {}
    names = [
        name
        for name, is_folder in listed
        if not is_folder and is_extra(name) and os.path.splitext(name)[1] not in WEIGHT_SUFFIXES
    ]
    locations = {name: folder / name for name in names}
    if folder.files.remote:
        return locations
    return {name: location for name, location in locations.items() if _is_extra(location.path)}


def _is_extra(path: str) -> bool:
    return os.path.isfile(path) and os.stat(path).st_size <= _LARGEST_EXTRA


def divide(outputs: Mapping[str, Output], limit: int) -> dict[str, dict[str, Output]]:
    """Return the tensors of each shard by file name; see `shard_bounds`."""
    tensors = list(outputs.items())
    bounds = shard_bounds([output.nbytes for output in outputs.values()], limit)
    return {file: dict(tensors[rows]) for file, rows in bounds.items()}


def shard_bounds(sizes: Sequence[int] | Array, limit: int) -> dict[str, slice]:
    """Return the range of tensors in each shard by file name: ``model.safetensors`` for a single shard."""
    ends = np.cumsum(sizes, dtype=np.int64)
    bounds, begin, done = [], 0, 0
    while begin < len(ends):
        # A tensor larger than the limit gets its own shard.
        end = max(begin + 1, int(np.searchsorted(ends, done + limit, side="right")))
        bounds.append(slice(begin, end))
        begin, done = end, int(ends[end - 1])
    bounds = bounds or [slice(0, 0)]  # an empty shard
    if len(bounds) == 1:
        return {SINGLE: bounds[0]}
    return {f"model-{k + 1:05}-of-{len(bounds):05}.safetensors": rows for k, rows in enumerate(bounds)}


def weight_map(shards: Mapping[str, Mapping[str, Output]]) -> dict[str, str]:
    """Return the shard of each stored tensor; a quantized tensor is stored in several parts."""
    files: dict[str, str] = {}
    for file, shard in shards.items():
        for name in packed_in(shard, in_folder=True).tensors:
            if name in files:  # `packed_in` refuses duplicates within a shard
                raise SafetensorError(
                    f"two tensors would be stored as {show(name)}, which is also a part of a quantized tensor"
                )
            files[name] = file
    return files


def writer_of(
    outputs: Mapping[str, Output], metadata: Mapping[str, str] | None, *, editable: bool = True
) -> ShardWriter:
    """Return the writer of a shard; an ``editable`` header has room for changes, unlike the headers of engines."""
    return FileWriter(*pack(outputs, metadata, in_folder=True), room=ROOM if editable else 0)


def open_shard(folder: Folder, name: str) -> WeightFile:
    """Open a shard to read its header."""
    location = folder.location / name
    if not location.files.remote:
        return open_file(location.path, brief=True)
    return registry.open_file(location.path, registry.OpenRequest((registry.SAFETENSORS,), files=location.files)).file


class Beside(NamedTuple):
    """The files beside the shards of a folder."""

    weight_map: Mapping[str, str]  # the shard of each tensor
    total_size: int  # bytes of all tensors
    config: Mapping[str, Any] | None  # content of config.json; None to write none
    extras: Mapping[str, Location | bytes]  # other files by name: where to copy from, or the content
    indexed: bool  # False if the only shard is ``model.safetensors``
    parameters: int | None = None  # "total_parameters" of the index, as MLX has it


class ShardWriter(Protocol):
    """A shard to write; its tensors need not exist yet."""

    size: int  # bytes of the file

    def write_to(self, file: AtomicFile) -> None: ...


def write_shards(
    shards: Mapping[str, Callable[[], ShardWriter]],  # each is called when its turn comes
    beside: Beside,
    folder: Folder,
    *,
    overwrite: bool,
) -> int:
    """Write shards, config and index, and return the bytes of the shards."""
    written = 0
    # A folder cannot be opened until it is complete. If an error occurs, a new folder is removed.
    replacement = replacement_of(folder)
    outdated = replacement.outdated([*shards, *([INDEX] if beside.indexed else [])]) if overwrite else []
    with replacement.undone(), ExitStack() as stack:  # a store gets the first file last
        stack.enter_context(replacement.after_index(outdated))
        # With an index, a local shard comes first; a store removes a shard that comes before the new config.
        alone = [*shards] == [SINGLE] and (not beside.indexed or folder.location.files.remote)
        files: dict[str, AtomicFile] = {}
        for file, shard in shards.items() if alone else ():
            writer = shard()
            files[file] = write_shard(stack, writer, folder, file, overwrite=overwrite)
            written += writer.size
        commit = write_beside(stack, beside, folder, replacement, overwrite=overwrite, outdated=outdated)
        for file, shard in () if alone else shards.items():
            with replacement.shard(stack, file) as own:
                writer = shard()
                # A shard replaces nothing: its name is free.
                files[file] = write_shard(own, writer, folder, file, overwrite=overwrite and file == SINGLE)
                written += writer.size
        commit({file: shard.put for file, shard in files.items()})
    return written


def write_shard(
    stack: ExitStack,
    writer: ShardWriter,
    folder: Folder,
    name: str,
    *,
    overwrite: bool,
    digest: Digest | None = None,  # receives every byte of the file
) -> AtomicFile:
    """Write a shard and return the sealed file. Leaving the stack puts it in place."""
    file = stack.enter_context(folder.writing(name, writer.size, overwrite=overwrite, digest=digest))
    writer.write_to(file)
    file.seal()  # this closes the file, because there can be more shards than descriptors
    return file


def write_beside(
    stack: ExitStack,  # its end uploads the files of a store, the index last if there is one
    beside: Beside,
    folder: Folder,
    replacement: Replacement,
    *,
    overwrite: bool,
    outdated: Sequence[str] = (),
    placed: Collection[str] = (),  # new shards that are in the folder already
) -> Callable[[Mapping[str, Put]], None]:
    """Write the files beside the shards, and return the function that puts local files in place, shards included."""
    import json

    config = None if beside.config is None else (json.dumps(dict(beside.config), indent=2) + "\n").encode()
    names = {*beside.weight_map.values()}
    blocking = replacement.blocking_index(config, outdated, names or {SINGLE}, placed)
    block = None
    if blocking is not None:
        block = _write_text(stack, json.dumps(blocking).encode(), folder, INDEX, overwrite=overwrite)
    files: dict[str, AtomicFile] = {}
    for name, text in ((INDEX, _index(beside) if beside.indexed else None), (CONFIG, config)):
        if text is not None:
            replaces = overwrite or (name == INDEX and block is not None)
            first = name == CONFIG and replacement.is_new  # a new folder has no weights without it
            with replacement.shard(stack, name) if first else nullcontext(stack) as own:
                files[name] = _write_text(own, text, folder, name, overwrite=replaces)
    stack.enter_context(replacement.before_config(config, placed))
    for name, content in beside.extras.items():
        if isinstance(content, bytes):
            files[name] = _write_text(stack, content, folder, name, overwrite=overwrite)
        else:
            files.update(_copy(stack, content, folder, name, overwrite=overwrite))

    def commit(shards: Mapping[str, Put]) -> None:
        single = names <= {SINGLE}
        replacement.commit(shards, files, outdated, single=single, block=block)

    return commit


def _write_text(stack: ExitStack, text: bytes, folder: Folder, name: str, *, overwrite: bool) -> AtomicFile:
    """Write a file and return it, sealed."""
    data = np.frombuffer(text, np.uint8)
    written = stack.enter_context(folder.writing(name, data.size, overwrite=overwrite))
    written.write([(address_of(data), data.size)])
    written.seal()
    return written


def _index(beside: Beside) -> bytes:
    """Return the index as ``json.dumps(..., indent=2)`` would write it, but five times faster."""
    from json.encoder import encode_basestring_ascii as quoted

    rows = ",\n".join([f"    {quoted(name)}: {quoted(file)}" for name, file in sorted(beside.weight_map.items())])
    inside = f"{{\n{rows}\n  }}" if rows else "{}"
    parameters = "" if beside.parameters is None else f',\n    "total_parameters": {beside.parameters}'
    sizes = f'"total_size": {beside.total_size}{parameters}'
    return f'{{\n  "metadata": {{\n    {sizes}\n  }},\n  "weight_map": {inside}\n}}\n'.encode()


def _is_same(source: Location, copy: Location) -> bool:
    """Return True if a file would be copied onto itself."""
    if copy.files.remote or source.files.remote:
        return copy.files.remote and source.files.remote and source.shown == copy.shown
    return os.path.exists(copy.path) and os.path.samefile(source.path, copy.path)


def _copy(stack: ExitStack, source: Location, folder: Folder, name: str, *, overwrite: bool) -> dict[str, AtomicFile]:
    """Copy a file and return the sealed copy by its name; nothing if it is the file itself or too large."""
    if _is_same(source, folder.location / name):
        return {}
    with closing(source.files.open(source.path)) as store:
        if store.size > _LARGEST_EXTRA:
            return {}
        buffer = np.empty(min(_COPY_BUFFER, max(1, store.size)), np.uint8)
        copy = stack.enter_context(folder.writing(name, store.size, overwrite=overwrite))
        for at in range(0, store.size, _COPY_BUFFER):
            count = min(_COPY_BUFFER, store.size - at)
            store.read_into(at, buffer[:count].data)
            copy.write([(address_of(buffer), count)])
        if isinstance(store, RemoteStore):
            store.confirm()
        copy.seal()
        return {name: copy}
