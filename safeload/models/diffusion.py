"""The diffusion models that ComfyUI loads from GGUF files, a row per architecture, by the names of their tensors.

Source: https://github.com/city96/ComfyUI-GGUF (tools/convert.py; tools/lcpp.patch for `DiffusionModel.unquantized`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ..base.table import Table
from ..base.text import show
from ..errors import FormatError

ARCHITECTURE = "general.architecture"
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


_CONVOLUTIONS = (
    "class_embedding.", "time_embedding.", "add_embedding.", "time_embed.", "label_emb.", "conv_in.", "conv_out.",
    "=input_blocks.0.0.weight", "=out.2.weight",
)  # fmt: skip
_DOWN = "down_blocks.0.downsamplers.0.conv.weight"

#: By ``general.architecture``, in the order in which they are tried.
DIFFUSION_MODELS = {
    "flux": DiffusionModel(
        (("double_blocks.0.img_attn.proj.weight",),),
        "transformer_blocks.0.attn.norm_added_k.weight",
        unquantized=("txt_in.", "img_in.", "time_in.", "vector_in.", "guidance_in.", "final_layer."),
    ),
    "sd3": DiffusionModel(
        (("joint_blocks.0.x_block.attn.qkv.weight",),), "transformer_blocks.0.attn.add_q_proj.weight"
    ),
    "aura": DiffusionModel(
        (("double_layers.3.modX.1.weight",),), "joint_transformer_blocks.3.ff_context.out_projection.weight"
    ),
    "hidream": DiffusionModel(
        (("caption_projection.0.linear.weight", "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight"),),
        kept_f32=(".ff_i.gate.weight", "img_emb.emb_pos"),
    ),
    "cosmos": DiffusionModel(
        (("blocks.0.mlp.layer1.weight", "blocks.0.adaln_modulation_cross_attn.1.weight"),),
        kept_f32=("pos_embedder",),
        left_out=("_extra_state", "accum_"),
    ),
    "ltxv": DiffusionModel(
        (
            (
                "adaln_single.emb.timestep_embedder.linear_2.weight",
                "transformer_blocks.27.scale_shift_table",
                "caption_projection.linear_2.weight",
            ),
        ),
        kept_f32=("scale_shift_table",),
    ),
    "hyvid": DiffusionModel(
        (
            (
                "double_blocks.0.img_attn_proj.weight",
                "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight",
            ),
        )
    ),
    "wan": DiffusionModel(
        (("blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight", "head.modulation"),),
        kept_f32=(".modulation",),
    ),
    "sdxl": DiffusionModel(
        (
            (_DOWN, "add_embedding.linear_1.weight"),
            (
                *("input_blocks.3.0.op.weight", "input_blocks.6.0.op.weight"),
                *("output_blocks.2.2.conv.weight", "output_blocks.5.2.conv.weight"),
            ),
            ("label_emb.0.0.weight",),
        ),
        rearranged=True,
        unquantized=_CONVOLUTIONS,
    ),
    "sd1": DiffusionModel(
        (
            (_DOWN,),
            (
                *(f"input_blocks.{k}.0.op.weight" for k in (3, 6, 9)),
                *("output_blocks.2.1.conv.weight", "output_blocks.5.2.conv.weight", "output_blocks.8.2.conv.weight"),
            ),
        ),
        rearranged=True,
        unquantized=_CONVOLUTIONS,
    ),
    "lumina2": DiffusionModel((("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight"),)),
}
#: The architectures with rules for types of blocks.
QUANTIZED = tuple(name for name, model in DIFFUSION_MODELS.items() if model.unquantized is not None)


class DiffusionNames(NamedTuple):
    """An architecture that was recognised by names."""

    architecture: str
    prefix: str  # of the names of the model's tensors
    diffusers: str | None  # the name that only the layout of Diffusers has


def recognize(names: Collection[str]) -> DiffusionNames | None:
    """Return the architecture of tensors with these names, or None."""
    prefix = prefix_of(names)
    for architecture, model in DIFFUSION_MODELS.items():
        refused = model.diffusers is not None and prefix + model.diffusers in names
        if refused or has_marks(names, model, prefix):
            return DiffusionNames(architecture, prefix, model.diffusers if refused else None)
    return None


def has_marks(names: Collection[str], model: DiffusionModel, prefix: str) -> bool:
    """Return True if the names are those of a model."""
    return any(all(prefix + mark in names for mark in marks) for marks in model.marks)


def prefix_of(names: Collection[str]) -> str:
    """Return the prefix of the diffusion model's tensors, "" if they have none."""
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in names):
            return prefix
    return _UNIFORM if names and all(name.startswith(_UNIFORM) for name in names) else ""


def model_of(metadata: Mapping[Any, Any]) -> DiffusionModel | None:
    """Return the row of a GGUF file, or None if it holds no diffusion model."""
    architecture = metadata.get(ARCHITECTURE)
    return DIFFUSION_MODELS.get(architecture) if isinstance(architecture, str) else None


def is_rearranged(metadata: Mapping[Any, Any] | None) -> bool:
    """Return True if a GGUF file has the original shapes of tensors that were divided into rows of 256."""
    return any(isinstance(key, str) and key.startswith(SHAPE_KEY) for key in metadata or ())


def original_shape(
    metadata: Mapping[Any, Any], name: str, shape: tuple[int, ...], title: str | None = None
) -> tuple[int, ...]:
    """Return the shape of a GGUF tensor before its elements were divided into rows of 256."""
    key = SHAPE_KEY + name
    sizes = metadata.get(key)
    if sizes is None:
        return shape
    if not isinstance(sizes, np.ndarray) or sizes.dtype != np.int32 or not 0 < sizes.size <= _MOST_AXES:
        raise FormatError(f"key {show(key)} must be an array of 1 to {_MOST_AXES} int32, got {show(sizes)}", title)
    original = tuple(map(int, sizes))
    if min(original) < 0 or math.prod(original) != math.prod(shape):
        raise FormatError(
            f"key {show(key)} has the shape {list(original)}, but the tensor has {list(shape)}", title, tensor=name
        )
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
