"""Describe checkpoints: tensors, metadata, adapters."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...base.listing import TensorInfos
from ...base.selecting import Patterns, select
from ...base.text import plural, size
from ...base.url import is_url, shown
from ...checkpoint import Checkpoint, codes_of, settings_of, tensors_of
from ...engine.run.weight_file import WeightFile
from ...errors import public
from ...formats.opening import Paths
from ...formats.registry import FormatName, UnknownGlobals
from ...loading import entry as loading
from ...packed.gptq import zeros_disagree
from ...packed.quantization import quantization_of
from . import adapters, description
from .contents import Info, totals_of

# Maximum number of reasons why known families cannot be dequantized.
_REASONS = 3

# Formats with a header before the first tensor.
_WITH_HEADER = ("safetensors", "gguf")


@public
def info(
    path: Paths,
    *,
    only: Patterns = None,
    drop: Patterns = None,
    base: Paths | None = None,
    format: FormatName | None = None,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Info:
    """Describe a checkpoint without reading its tensors, as ``safeload info`` does.

    Args:
        path: whatever `open` opens: a weight file, a folder, an index.json, a URL, or a file object.
        only: shell pattern, or several, of the tensors to list, such as ``"*.mlp.*"``; None lists all.
        drop: shell pattern, or several, of tensors to leave out.
        base: the model of a LoRA adapter; ``adapter.fitting`` of the result shows if the adapter fits.
        format: required format, see `open`.
        root: nested container to take tensors from, see `open`.
        unknown_globals: see `open`.
        stored: True lists codes and scales of a quantized checkpoint as the files store them.
        storage_options: options of the filesystem behind a URL, see `open`.

    Returns:
        The description. It stays valid when the files are gone.

    Raises:
        TensorNotFoundError: a pattern matches no tensor.
        ValueError: ``base`` is given, but this is not an adapter.
        SafeloadError, OSError: see `open`.

    Example:
        >>> import safeload
        >>> safeload.info("tiny-llama")
        <Info 'tiny-llama': safetensors, 30 tensors, 241 KiB>
    """
    with loading.open(
        path,
        format=format,
        root=root,
        unknown_globals=unknown_globals,
        stored=stored,
        storage_options=storage_options,
    ) as opened:
        text = spelled(path) if isinstance(path, (str, os.PathLike)) else opened.path
        adapter = adapters.about(text, opened, base, storage_options)
        names = None if only is drop is None else select(opened.tensors, only, drop)
        return describe(text, opened, names=names, adapter=adapter)


def spelled(path: str | os.PathLike[str]) -> str:
    """Return a path for people; a URL loses its secrets."""
    text = os.fspath(path)
    return shown(text) if is_url(text) else text


def describe(
    path: str,
    opened: Checkpoint,
    *,
    names: Iterable[str] | None = None,
    adapter: adapters.Found = None,
    memory: bool = True,
) -> Info:
    """Describe an open checkpoint; its ``memory`` takes milliseconds to compute."""
    infos = opened.tensors
    return Info(
        path=path,
        format=opened.format,
        files={file.path: _size_of(file, opened) for file in opened.weight_files},
        header_nbytes=_header_nbytes(opened),
        notes=opened.notes,
        model=description.model(opened.config, opened.metadata),
        metadata=opened.metadata,
        globals=opened.named_globals,
        tensors=infos if names is None else TensorInfos({name: infos[name] for name in names}),
        selected=names is not None,
        tensor_count=len(infos),
        parameters=sum(info.size for info in infos.values()),
        nbytes=opened.nbytes,
        dtypes=totals_of(infos.values()),
        memory=_memory(opened) if memory and infos else {},
        quantization=list(_quantization(opened)),
        adapter=adapter,
    )


def _size_of(file: WeightFile, opened: Checkpoint) -> int:
    """Return the size on disk: of the file itself if it holds tensors of others, such as external data of ONNX."""
    size: int = file.identity[0]
    return size if file.unpacked or file.path == opened.weight_files[0].path else file.size


def _header_nbytes(opened: Checkpoint) -> int | None:
    """Return the bytes of all headers, for formats with a header."""
    if opened.format not in _WITH_HEADER or not opened.weight_files:
        return None
    files = opened.weight_files
    return sum(min((begin for begin, _ in file.table.byte_ranges()), default=file.size) for file in files)


def _memory(opened: Checkpoint) -> dict[str, int]:
    """Return the bytes of all loaded tensors by dtype or scheme; schemes only if they would quantize a tensor."""
    from ..measure.sizes import sizes  # only here: importing it takes milliseconds

    loaded = sizes(opened)
    schemes = {name: nbytes for name, nbytes in loaded.schemes.items() if nbytes != loaded.dtypes.get("float32")}
    return {**loaded.dtypes, **schemes}


def _quantization(opened: Checkpoint) -> Iterator[str]:
    """Yield the labels of packed tensors, and the codes that cannot be dequantized."""
    quantization = None if quantization_of(opened.config) is None else settings_of(opened)
    config = "" if quantization is None else f" ({quantization} in config.json)"
    packed = [info for info in opened.tensors.values() if len(info.parts) > 1]
    if packed:
        labels = ", ".join(sorted({info.dtype for info in packed}))
        stored, restored = sum(info.nbytes for info in packed), sum(4 * info.size for info in packed)
        count = f"{len(packed):,} of {plural(len(opened), 'tensor')}"
        yield f"quantized: {labels}{config}: {count}; {size(stored)} stored, {size(restored)} as float32"
        if _zeros_disagree(opened):
            yield "zero points: the format differs from the configuration and was recognized"
    codes = codes_of(opened)
    if codes:
        count = plural(len(codes), "tensor")
        yield f"codes{config}: {count} of a quantization that safeload cannot dequantize"
        refusals = {(entry.reason, entry.reader) for entry in codes.values() if entry.reader is not None}
        yield from sorted(f"they are {what}: {reader} reads it" for what, reader in refusals)
        reasons = Counter(entry.reason for entry in codes.values() if entry.reason is not None and entry.reader is None)
        yield from (
            f"not dequantized: {plural(tensors, 'tensor')}: {reason}"
            for reason, tensors in reasons.most_common(_REASONS)
        )


def _zeros_disagree(opened: Checkpoint) -> bool:
    """True if the zero points of the smallest weight follow another GPTQ format than configured."""
    groups = (file.table.packed(index) for _, file, index in tensors_of(opened))
    packed = [group for group in groups if group is not None and group.packing.zeros is not None]
    return bool(packed) and zeros_disagree(min(packed, key=lambda group: group.nbytes))
