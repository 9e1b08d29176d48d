"""The diffusion models that ComfyUI loads from GGUF files, a row per architecture in ``diffusion.json``.

Source: https://github.com/city96/ComfyUI-GGUF (tools/convert.py; tools/lcpp.patch for `DiffusionModel.unquantized`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from ..core.files import read_data
from ..core.table import Table
from ..core.text import show
from ..errors import FormatError

ARCHITECTURE = "general.architecture"
# The key of the kind of a GGUF file, and its value for the towers of a model of text and images.
TYPE, MMPROJ = "general.type", "mmproj"
# Followed by the name of a tensor: its shape before its elements were divided into rows of 256.
SHAPE_KEY = "comfy.gguf.orig_shape."
# The axes of a tensor in PyTorch are at most this many.
_MOST_AXES = 64

# Prefixes of a diffusion model in a checkpoint with other parts, such as a VAE: tensors without the prefix belong to
# these parts. The first of the list that occurs counts. A torch checkpoint can hold the model in a dict of its own.
_INNER = "model.diffusion_model."
_WRAPPERS = ("state_dict.", "model.", "module.")
_PREFIXES = (_INNER, *(wrapper + _INNER for wrapper in _WRAPPERS), "model.", "module.", "state_dict.")
# A prefix of all tensors.
_UNIFORM = "net."


class DiffusionModel(NamedTuple):
    """A row: an architecture."""

    marks: tuple[tuple[str, ...], ...]  # groups of names that only this architecture has; one group is enough
    diffusers: str | None = None  # a name in the layout of Diffusers, which ComfyUI does not load from GGUF
    kept_f32: tuple[str, ...] = ()  # parts of names of tensors that stay float32
    left_out: tuple[str, ...] = ()  # parts of names of tensors that ComfyUI does not need
    rearranged: bool = False  # elements are divided into rows of 256 if the last axis is no multiple of 256
    unquantized: tuple[str, ...] | None = None  # parts of names, or "=" and a whole name; None if nothing is quantized


def is_of_tower(metadata: Mapping[Any, Any]) -> bool:
    """Return True for metadata of a vision tower of llama.cpp; a value can be of any type."""
    kind = metadata.get(TYPE)
    return isinstance(kind, str) and kind == MMPROJ


@cache
def diffusion_models() -> dict[str, DiffusionModel]:
    """Return the rows by ``general.architecture``, in the order in which they are tried."""
    return {name: DiffusionModel(**fields) for name, fields in read_data(__name__, "diffusion.json").items()}


def quantized_models() -> list[str]:
    """Return the architectures with rules for types of blocks."""
    return [name for name, model in diffusion_models().items() if model.unquantized is not None]


def has_marks(names: Collection[str], model: DiffusionModel, prefix: str) -> bool:
    """Return True if the names are those of a model."""
    return any(all(prefix + mark in names for mark in marks) for marks in model.marks)


def prefix_of(names: Collection[str]) -> str:
    """Return the prefix of the diffusion model's tensors, "" if they have none."""
    for prefix in _PREFIXES:
        if any(map(methodcaller("startswith", prefix), names)):
            return prefix
    return _UNIFORM if names and all(map(methodcaller("startswith", _UNIFORM), names)) else ""


def model_of(metadata: Mapping[Any, Any]) -> DiffusionModel | None:
    """Return the row of a GGUF file, or None if it holds no diffusion model."""
    architecture = metadata.get(ARCHITECTURE)
    return diffusion_models().get(architecture) if isinstance(architecture, str) else None


def is_rearranged(metadata: Mapping[Any, Any] | None) -> bool:
    """Return True if a GGUF file has the original shapes of tensors that were divided into rows of 256."""
    return any(isinstance(key, str) and key.startswith(SHAPE_KEY) for key in metadata or ())


def original_shape(metadata: Mapping[Any, Any], name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a GGUF tensor before its elements were divided into rows of 256."""
    key = SHAPE_KEY + name
    sizes = metadata.get(key)
    if sizes is None:
        return shape
    if not isinstance(sizes, np.ndarray) or sizes.dtype != np.int32 or not 0 < sizes.size <= _MOST_AXES:
        raise FormatError(f"key {show(key)} must be an array of 1 to {_MOST_AXES} int32, got {show(sizes)}")
    original = tuple(map(int, sizes))
    if min(original) < 0 or math.prod(original) != math.prod(shape):
        text = f"key {show(key)} has the shape {list(original)}, but the tensor has {list(shape)}"
        raise FormatError(text, tensor=name)
    return original


def original_shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """Return the shapes that tensors of a file had before, by name; keys that do not fit are left to `check`."""
    metadata = table.metadata() or {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in zip(table.names, table.shapes, strict=True) if is_rearranged(metadata) else ():
        with suppress(FormatError):
            original = shape if name in table.unknown else original_shape(metadata, name, shape)
            if original != shape:
                shapes[name] = original
    return shapes


def with_renamed_shapes(metadata: Mapping[Any, Any], names: Mapping[str, str]) -> Mapping[Any, Any]:
    """Return the metadata of a GGUF file with the keys of original shapes under new names of their tensors."""
    keys = {SHAPE_KEY + old: SHAPE_KEY + new for old, new in names.items() if old != new}
    if keys.keys().isdisjoint(metadata):
        return metadata
    return {keys.get(key, key): value for key, value in metadata.items()}
