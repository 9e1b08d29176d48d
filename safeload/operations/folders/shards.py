"""Divide tensors into safetensors shards, and write a folder of shards with its index and config."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Protocol

import numpy as np

from ...base import dtypes, log
from ...base.arrays import Array
from ...base.text import show
from ...engine.read.tensors import Lazy, LazyEncoded, LazyPacked, LazyQuantized
from ...engine.run.atomic_file import AtomicFile
from ...errors import RemotePermissionError, SafetensorError, UnsupportedError
from ...formats.folder import INDEX, SINGLE
from ...formats.quantized import pack
from ...formats.registry import WEIGHT_SUFFIXES
from ...formats.safetensors import ROOM, FileWriter
from ...models.choosing import with_dtype
from ...packed.quantization import OWN, QUANTIZATION, is_own, quantization_of, without_quantization
from ...stores.files import Location
from . import journal
from .sink import Sink, free_names, is_extra

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
    return {
        name: location
        for name, is_folder in listed
        if not is_folder and is_extra(name) and os.path.splitext(name)[1] not in WEIGHT_SUFFIXES
        if (location := folder / name).files.remote or os.path.isfile(location.path)
    }


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
        for name in pack(shard, None, in_folder=True)[0]:
            if name in files:  # `pack` refuses duplicates within a shard
                text = f"two tensors would be stored as {show(name)}, which is also a part of a quantized tensor"
                raise SafetensorError(text)
            files[name] = file
    return files


def writer_of(
    outputs: Mapping[str, Output], metadata: Mapping[str, str] | None, *, editable: bool = True
) -> ShardWriter:
    """Return the writer of a shard; an ``editable`` header has room for changes, unlike the headers of engines."""
    return FileWriter(*pack(outputs, metadata, in_folder=True), room=ROOM if editable else 0)


class ShardWriter(Protocol):
    """A shard to write; its tensors need not exist yet."""

    size: int  # bytes of the file

    def write_to(self, file: AtomicFile) -> None: ...


def write_shards(
    shards: Mapping[str, Callable[[], ShardWriter]],  # each is called when its turn comes
    files: Mapping[str, bytes | Location],  # see `Sink.commit`
    sink: Sink,
    *,
    overwrite: bool,
    config: bytes | None = None,
) -> int:
    """Write a folder of shards and the files beside them, and return the bytes of the shards."""
    written = 0
    with sink.begin(overwrite=overwrite, config=config):
        for name, shard in shards.items():
            writer = shard()
            with sink.file(name, writer.size) as file:
                writer.write_to(file)
            written += writer.size
        sink.commit(files)
    if overwrite:
        journal.clear(sink)
    return written


def write_folder(
    sink: Sink, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None, *, limit: int, overwrite: bool
) -> None:
    """Write all tensors of a folder."""
    items, sizes = [*tensors.items()], [tensor.nbytes for tensor in tensors.values()]
    bounds = shard_bounds(sizes, limit)
    names = free_names(sink, [*bounds])
    shards = {names[file]: dict(items[rows]) for file, rows in bounds.items()}
    files, writers = weight_map(shards), {file: partial(writer_of, shard, metadata) for file, shard in shards.items()}
    index = {} if [*shards] == [SINGLE] else {INDEX: index_text(files, sum(sizes))}
    write_shards(writers, index, sink, overwrite=overwrite)


def config_text(config: Mapping[str, Any] | None) -> bytes | None:
    """Return the content of a ``config.json``; None to write none."""
    return None if config is None else (json.dumps(dict(config), indent=2) + "\n").encode()


def index_text(
    weight_map: Mapping[str, str],  # the shard of each tensor
    total_size: int,  # bytes of all tensors
    parameters: int | None = None,  # "total_parameters", as MLX has it
) -> bytes:
    """Return the index as ``json.dumps(..., indent=2)`` would write it, but five times faster."""
    rows = ",\n".join([f"    {quoted(name)}: {quoted(file)}" for name, file in sorted(weight_map.items())])
    inside = f"{{\n{rows}\n  }}" if rows else "{}"
    more = "" if parameters is None else f',\n    "total_parameters": {parameters}'
    sizes = f'"total_size": {total_size}{more}'
    return f'{{\n  "metadata": {{\n    {sizes}\n  }},\n  "weight_map": {inside}\n}}\n'.encode()
