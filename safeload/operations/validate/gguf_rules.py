"""Check a GGUF file against the rules of llama.cpp or ComfyUI for its architecture: keys, their types, vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...base.text import show
from ...errors import FormatError
from ...formats.gguf.values import F32, U32
from ...models import gguf as rows
from ...models.choosing import Choice
from ...models.diffusion import ARCHITECTURE, SHAPE_KEY, DiffusionModel, has_marks, model_of, original_shape, prefix_of
from ...models.family import gguf_architectures
from .findings import Finding, find
from .structure import Descriptions

_TYPE, _TOKENIZER = "general.type", "tokenizer.ggml.model"
_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
# Optional keys with a size.
_MORE_SIZES = ("feed_forward_length", "attention.head_count_kv", "expert_feed_forward_length")
# Files of these types have the architecture of another file, and other tensors.
_OTHER_TYPES = ("adapter", "imatrix", "mmproj", "vocab")


def check_gguf(
    metadata: Mapping[Any, Any], tensors: Descriptions
) -> tuple[list[Finding], Choice | None, Mapping[str, Any] | None]:
    """Check the metadata and the vectors of a GGUF file.

    Return findings, the schema and the integers of the metadata under its names; None if tensors cannot be compared.
    """
    architecture = metadata.get(ARCHITECTURE)
    if not tensors:
        return [], None, None
    if architecture is None:
        return [find("gguf.unchecked:no key", key=ARCHITECTURE)], None, None
    diffusion = model_of(metadata)
    if diffusion is not None:
        return list(_check_diffusion(metadata, tensors, diffusion)), None, None
    kind = _text(metadata, _TYPE)
    form = gguf_architectures().get(architecture) if isinstance(architecture, str) else None
    if form is None or kind in _OTHER_TYPES:
        subject = f"{kind} file" if kind in _OTHER_TYPES else f"architecture {show(architecture)}"
        return [find("gguf.unchecked", subject=subject)], None, None
    faults = list(_check_keys(metadata, architecture))
    findings = [finding for _, finding in faults]
    for name, about in tensors.items():
        if (len(about.shape) == 1 or name.endswith(".bias")) and about.dtype != "float32":
            kind = "bias" if name.endswith(".bias") else "vector"
            findings.append(find("gguf.vector", name, kind=kind, dtype=about.dtype))
    sizes = [f"{architecture}.{key}" for key in (*rows.SIZES, *form.required, *_MORE_SIZES)]
    array = next((key for key in sizes if isinstance(metadata.get(key), np.ndarray)), None)
    if array is not None:
        findings.append(find("gguf.unchecked:layers", key=array))
    if array is not None or any(key in sizes for key, _ in faults):
        return findings, None, None
    tokens = metadata.get(_TOKENS)
    count = len(tokens) if isinstance(tokens, (list, tuple)) else None
    return findings, Choice(form.schema, True), form.sizes(metadata, tensors, count)


def _check_diffusion(metadata: Mapping[Any, Any], tensors: Descriptions, model: DiffusionModel) -> Iterator[Finding]:
    """Check the names and the original shapes of a diffusion model."""
    architecture = metadata[ARCHITECTURE]
    if not has_marks(tensors.keys(), model, prefix_of(tensors.keys())):
        yield find("gguf.names", architecture=architecture, name=model.marks[-1][0])
    for key in metadata:
        name = key.removeprefix(SHAPE_KEY)
        if name == key or name not in tensors:
            continue
        try:
            original_shape(metadata, name, tensors[name].shape)
        except FormatError as fault:
            yield find("gguf.shape", name, fault=fault)
    yield find("gguf.unchecked:diffusion", architecture=architecture)


def _check_keys(metadata: Mapping[Any, Any], architecture: str) -> Iterator[tuple[str, Finding]]:
    """Yield missing keys and keys of a wrong type, each with its finding."""
    form = gguf_architectures()[architecture]
    required = [f"{architecture}.{key}" for key in (*rows.REQUIRED, *form.required)]
    model = _text(metadata, _TOKENIZER)
    required += [_TOKENIZER] if model in rows.NO_TOKENS else [_TOKENIZER, _TOKENS]
    required += [_MERGES] if model == "gpt2" else []
    for key in required:
        if key not in metadata:
            yield key, find("gguf.key", key=key)
    types: dict[str, tuple[str, ...]] = {key: (kind,) for key, kind in rows.GENERAL_TYPES.items()}
    types |= {f"{architecture}.{name}": key.types for name, key in form.keys.items()}
    for key, kinds in types.items():
        if key in metadata and not any(_has_type(metadata[key], kind) for kind in kinds):
            value = metadata[key]
            name = "string" if isinstance(value, str) else type(value).__name__.lower()
            name = "an array" if isinstance(value, (list, tuple)) else name
            name = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else name
            yield key, find("gguf.key_type", key=key, type=name, expected=" or ".join(kinds))
    if model is not None and model not in rows.TOKENIZERS:
        expected = ", ".join(rows.TOKENIZERS)
        yield _TOKENIZER, find("gguf.key:tokenizer", key=_TOKENIZER, value=show(model), expected=expected)


def _text(metadata: Mapping[Any, Any], key: str) -> str | None:
    """Return a text of the metadata; None if it is missing or of another type, such as an array."""
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def _has_type(value: Any, kind: str) -> bool:
    if kind == rows.TEXTS:
        return isinstance(value, (list, tuple)) and (not value or isinstance(value[0], str))
    if kind == rows.NUMBERS:
        return isinstance(value, np.ndarray) and value.dtype.kind in "iuf"
    types: dict[str, type] = {rows.U32: U32, rows.F32: F32, rows.BOOL: bool, rows.TEXT: str}
    return type(value) is types[kind]
