"""Turn arrays of any library into the input of the safetensors writer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...base.messages import error_about
from ...base.packing import CONFIG_KEY
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...errors import SafetensorError
from ...formats.safetensors.file import text
from ...formats.safetensors.quantized import KEY, pack

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


class Packer:
    """Turn the tensors of a file into plain tensors, one at a time, and describe the quantized ones."""

    def __init__(self, metadata: Mapping[str, str] | None, *, in_folder: bool = False) -> None:
        self._in_folder = in_folder
        self._texts = pack({}, metadata)[1]
        self._described: dict[str, Any] = {}
        self._config: str | None = None  # the quantization of packed tensors

    def parts(self, name: str, value: Any) -> dict[str, Any]:
        """Return the plain tensors that store a value, by name."""
        import json

        packed, texts = pack({name: value}, None, in_folder=self._in_folder)
        if texts is not None:
            config = texts.get(CONFIG_KEY)
            if config is not None and self._config not in (None, config):
                raise SafetensorError("the packed tensors come from checkpoints with different configurations")
            self._config = config or self._config
            self._described.update(json.loads(texts[KEY]))
        return dict(packed)

    @property
    def texts(self) -> Mapping[str, str] | None:
        """The metadata of the file."""
        import json

        if not self._described:
            return self._texts
        texts = {**(self._texts or {}), KEY: json.dumps(self._described, sort_keys=True)}
        return texts if self._config is None else {**texts, CONFIG_KEY: self._config}
