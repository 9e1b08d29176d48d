"""Turn arrays of any library into the input of the safetensors writer."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ...base.messages import error_about
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...errors import SafetensorError
from ...formats.safetensors.file import text

# The key of the header for metadata, which cannot name a tensor.
_RESERVED = "__metadata__"


def value_of(name: str, value: Any, keep: list[Any]) -> Any:
    """Return the writer's input for a tensor; ``keep`` receives objects that must live until the value is written."""
    if isinstance(value, (np.ndarray, np.generic, QuantizedTensor)):
        return value
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(value, torch.Tensor):
        from ...frameworks import torch_arrays

        return torch_arrays.value_of(name, value, keep)
    if jax is not None and (isinstance(value, jax.Array) or hasattr(value, "__jax_array__")):
        from ...frameworks import jax_arrays

        return jax_arrays.to_write({name: value})[name]
    return value  # the writer explains what it expects


def check_name(name: Any) -> str:
    """Check that a tensor can have this name, and return it."""
    text(name, "a tensor name", tensor=name if isinstance(name, str) else None)
    if name == _RESERVED:
        raise error_about(SafetensorError, ": this name is reserved for the metadata of safetensors", tensor=name)
    return str(name)
