"""Folders of safetensors shards with an index and a config: splits tensors into shards and writes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.text import show
from ...engine.read.lazy import Lazy, LazyPacked, LazyQuantized
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.digest import Digest
from ...engine.run.memory import address_of
from ...engine.run.weight_file import WeightFile
from ...errors import RemotePermissionError, SafetensorError, UnsupportedError
from ...formats import registry
from ...formats.folder import CONFIG, INDEX
from ...formats.registry import WEIGHT_SUFFIXES
from ...formats.safetensors.file import Writer, open_file
from ...formats.safetensors.quantized import pack
from ...models.config_dtype import with_dtype
from ...packed.quantization import without_quantization
from ...stores.files import Location
from ...stores.remote import RemoteStore
from .destinations import replacement_of
from .folder import Folder
from .replacement import Replacement

# Files of a model's folder that other libraries need beside its weights and config.json: tokenizers (also of
# sentencepiece and tiktoken), chat templates, settings of generation and of processors.
_EXTRAS = (
    *("tokenizer*", "*.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template*", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
# The largest of them; tokenizers have up to 40 MB.
_LARGEST_EXTRA = 1 << 30
_COPY_BUFFER = 4 << 20

# One tensor for a writer.
Output = Lazy | LazyQuantized | LazyPacked


def config_with(
    config: Mapping[str, Any] | None, target: dtypes.Dtype | None, *, restored: bool = False
) -> dict[str, Any] | None:
    """A ``config.json`` that is true of the new weights, also in nested configurations.

    Args:
        config: the config of the source; None without one.
        target: dtype that floating tensors were converted to; None if it is unchanged.
        restored: whether packed tensors were dequantized, so that the quantization is no longer that of the weights.
    """
    if config is None:
        return None
    if restored:
        config = without_quantization(config)
    return dict(config) if target is None else with_dtype(config, target)


def extras_of(folder: Location) -> dict[str, Location]:
    """Files beside the weights that other libraries need, by name. Stores that list no folders have none."""
    try:
        listed = folder.files.listing(folder.path)
    except (UnsupportedError, RemotePermissionError):  # https; a key that may read, but not list
        return {}
    names = [
        name
        for name, is_folder in listed
        if not is_folder
        and any(fnmatchcase(name, pattern) for pattern in _EXTRAS)
        and os.path.splitext(name)[1] not in WEIGHT_SUFFIXES
    ]
    found = {name: folder / name for name in names}
    return found if folder.files.remote else {name: one for name, one in found.items() if _may_be_copied(one.path)}


def _may_be_copied(path: str) -> bool:
    return os.path.isfile(path) and os.stat(path).st_size <= _LARGEST_EXTRA


def divide(outputs: Mapping[str, Output], limit: int) -> dict[str, dict[str, Output]]:
    """Divide tensors into shards as `shard_bounds` does: name of the file to its tensors."""
    tensors = list(outputs.items())
    bounds = shard_bounds([output.nbytes for output in outputs.values()], limit)
    return {file: dict(tensors[rows]) for file, rows in bounds.items()}


def shard_bounds(sizes: Sequence[int] | Array, limit: int) -> dict[str, slice]:
    """The consecutive tensors of each shard by the name of its file; without tensors there is one empty shard.

    Args:
        sizes: bytes of the tensors, in order.
        limit: most bytes of a shard; a larger tensor gets a shard of its own.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    bounds, begin, done = [], 0, 0
    while begin < len(ends):
        end = max(begin + 1, int(np.searchsorted(ends, done + limit, side="right")))
        bounds.append(slice(begin, end))
        begin, done = end, int(ends[end - 1])
    bounds = bounds or [slice(0, 0)]
    return {f"model-{k + 1:05}-of-{len(bounds):05}.safetensors": rows for k, rows in enumerate(bounds)}


def weight_map(shards: Mapping[str, Mapping[str, Output]]) -> dict[str, str]:
    """The file of each tensor by the name that it is stored under: a quantized one is stored as several.

    Raises:
        SafetensorError: two tensors would have one name.
    """
    files: dict[str, str] = {}
    for file, shard in shards.items():
        for name in pack(shard, None)[0]:
            if name in files:  # within a shard `pack` has refused it
                raise SafetensorError(f"two tensors would be stored as {show(name)}: one is a part of a quantized one")
            files[name] = file
    return files


def writer_of(outputs: Mapping[str, Output], texts: Mapping[str, str] | None) -> ShardWriter:
    """The writer of a shard of these tensors, with these texts as its metadata."""
    return Writer(*pack(outputs, texts))


def open_shard(folder: Folder, name: str) -> WeightFile:
    """Open a shard to read its header.

    Raises:
        FileNotFoundError: there is no such file.
    """
    location = folder.location / name
    if not location.files.remote:
        return open_file(location.path, brief=True)
    return registry.open_file(location.path, registry.OpenRequest((registry.SAFETENSORS,), files=location.files)).file


class Beside(NamedTuple):
    """What stands beside the shards of a folder.

    Attributes:
        weight_map: the file of each tensor.
        total_size: bytes of all tensors.
        config: content of ``config.json``; None to write none.
        extras: other files to copy into the folder, by name.
    """

    weight_map: Mapping[str, str]
    total_size: int
    config: Mapping[str, Any] | None
    extras: Mapping[str, Location]


class ShardWriter(Protocol):
    """A shard to write: its size is known, its tensors are not made yet."""

    size: int

    def write_to(self, file: AtomicFile) -> None:
        """Writes all bytes into a file under construction."""


def write_shards(
    shards: Mapping[str, Callable[[], ShardWriter]],
    beside: Beside,
    folder: Folder,
    overwrite: bool,
    replacing: Callable[[], object] | None = None,
) -> int:
    """Writes shards, an index and the config.

    Each file is in place when it is complete, and the index comes last, so that a new folder has no index until its
    shards are complete.

    Args:
        shards: name of each file to what makes its writer when its turn comes.
        beside: the other files.
        folder: the destination; it is created, and removed again on an error if it is empty.
        overwrite: False to refuse existing files.
        replacing: called when all files are complete and none is in place.

    Returns:
        Bytes of the shards.
    """
    written = 0
    replacement = replacement_of(folder)
    outdated = replacement.outdated([*shards]) if overwrite else []
    with replacement.undone(), ExitStack() as stack:  # closed in reverse order: the first file is put in place last
        write_beside(stack, beside, folder, replacement, overwrite=overwrite, outdated=outdated)
        for file, shard in shards.items():
            with replacement.shard(stack, file) as own:
                writer = shard()
                write_shard(own, writer, folder, file, overwrite=overwrite)
                written += writer.size
        if replacing is not None:
            replacing()
    return written


def write_shard(
    stack: ExitStack,
    writer: ShardWriter,
    folder: Folder,
    name: str,
    *,
    overwrite: bool,
    digest: Digest | None = None,
) -> AtomicFile:
    """Writes one shard; leaving the stack puts it in place.

    Args:
        stack: gets the file under construction.
        writer: writes it.
        folder: gets the shard.
        name: of the file.
        overwrite: False to refuse an existing file.
        digest: gets every byte of the file; None for none.

    Returns:
        The sealed file.
    """
    file = stack.enter_context(folder.writing(name, writer.size, overwrite=overwrite, digest=digest))
    writer.write_to(file)
    file.seal()  # closes it: there may be more shards than descriptors
    return file


def write_beside(
    stack: ExitStack,
    beside: Beside,
    folder: Folder,
    replacement: Replacement,
    *,
    overwrite: bool,
    outdated: Sequence[str] = (),
    extras: ExitStack | None = None,
) -> None:
    """Writes what stands beside the shards; leaving the stack puts it in place, the index last.

    Args:
        stack: gets the files under construction.
        beside: the files.
        folder: gets them.
        overwrite: False to refuse existing files.
        outdated: what `Folder.outdated` has said; removed after that.
        extras: gets the extra files, if they are put in place before all others.
    """
    import json

    stack.enter_context(replacement.after_index(outdated))
    texts = {INDEX: _index(beside)}
    if beside.config is not None:
        texts[CONFIG] = (json.dumps(dict(beside.config), indent=2) + "\n").encode()
    for name, text in texts.items():
        data = np.frombuffer(text, np.uint8)
        written = stack.enter_context(folder.writing(name, data.size, overwrite=overwrite))
        written.write([(address_of(data), data.size)])
        written.seal()
    stack.enter_context(replacement.before_config(texts.get(CONFIG), outdated))
    for name, location in beside.extras.items():
        _copy(stack if extras is None else extras, location, folder, name, overwrite=overwrite)


def _index(beside: Beside) -> bytes:
    """The index as ``json.dumps(..., indent=2)`` writes it, which takes five times as long for very many tensors."""
    from json.encoder import encode_basestring_ascii as quoted

    rows = ",\n".join([f"    {quoted(name)}: {quoted(file)}" for name, file in sorted(beside.weight_map.items())])
    inside = f"{{\n{rows}\n  }}" if rows else "{}"
    return (
        f'{{\n  "metadata": {{\n    "total_size": {beside.total_size}\n  }},\n  "weight_map": {inside}\n}}\n'
    ).encode()


def _is_same(source: Location, copy: Location) -> bool:
    """Return True if a file would be copied onto itself."""
    if copy.files.remote or source.files.remote:
        return copy.files.remote and source.files.remote and source.shown == copy.shown
    return os.path.exists(copy.path) and os.path.samefile(source.path, copy.path)


def _copy(stack: ExitStack, source: Location, folder: Folder, name: str, *, overwrite: bool) -> None:
    """Copies a file; leaving the stack puts the copy in place."""
    if _is_same(source, folder.location / name):
        return
    with closing(source.files.open(source.path)) as store:
        if store.size > _LARGEST_EXTRA:
            return
        buffer = np.empty(min(_COPY_BUFFER, max(1, store.size)), np.uint8)
        copy = stack.enter_context(folder.writing(name, store.size, overwrite=overwrite))
        for at in range(0, store.size, _COPY_BUFFER):
            count = min(_COPY_BUFFER, store.size - at)
            store.read_into(at, buffer[:count].data)
            copy.write([(address_of(buffer), count)])
        if isinstance(store, RemoteStore):
            store.confirm()
        copy.seal()
