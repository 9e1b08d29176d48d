"""Conv1D, the layer of GPT-2 that stores its weight as [in, out]; tools quantize it as a linear layer, [out, in]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.packing import Packing
from .quantization import nested

# ``model_type`` of the models of transformers with such layers, and the last names of the layers.
CONV1D_MODELS = frozenset(("clvp", "clvp_decoder", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"))
CONV1D = frozenset(("c_attn", "c_fc", "c_proj", "q_attn"))
CONV1D_SUFFIXES = [f"{layer}.{kind}" for layer in sorted(CONV1D) for kind in ("weight", "qweight")]
# Families with tools that quantize these layers. The rest quantize the tensors of files, or leave the layers alone.
_TURNED = frozenset(("bitsandbytes", "gptq", "awq"))


def conv1d_model(config: Mapping[str, Any] | None) -> str | None:
    """Return the ``model_type`` of a model with such layers, or of such a model inside another, else None."""
    types = (inner.get("model_type") for inner in nested(config or {}))
    return next((name for name in types if isinstance(name, str) and name in CONV1D_MODELS), None)


def is_named_conv1d(name: str) -> bool:
    """Return True for the weight of a module with the name of such a layer."""
    module, _, last = name.rpartition(".")
    return last in ("weight", "qweight") and module.rpartition(".")[2] in CONV1D


def as_stored(packed: Packing) -> Packing | str:
    """Return the packing of a layer's weight as [in, out], or why there is none."""
    if packed.family not in _TURNED or len(packed.shape) != 2:
        return packed
    if packed.flat:
        return "its module is a Conv1D, which stores [in, out], and its blocks cross the rows of [out, in]"
    return packed._replace(shape=packed.shape[::-1], transpose=not packed.transpose)
