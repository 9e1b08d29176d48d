"""What the JSON files beside weights say of the model, in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..base.text import clip
from ..errors import SafeloadError
from ..stores.json_file import read_json

_ADAPTER = "adapter_config.json"
# Names of adapters whose writers do not spell them in capitals.
_SPELLED = {"LORA": "LoRA", "ADALORA": "AdaLoRA"}

# Where the config of a multi-modal model has that of its language model.
_INNER = ("text_config", "llm_config", "language_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_DTYPES = ("torch_dtype", "dtype")

# Longest text, and largest number, of a config that is shown: larger ones mean nothing.
_TEXT, _NUMBER = 80, 10**12


def model(config: Mapping[str, Any] | None, metadata: Mapping[Any, Any]) -> str:
    """The model as ``config.json`` or the metadata of a GGUF file describe it; "" where they do not.

    "llama, 12 layers, hidden 512, vocabulary 32,000, bfloat16". Values of other types than expected are left out.
    """
    if config is None:
        name = metadata.get("general.architecture")
        if not isinstance(name, str):
            return ""
        layers, hidden, vocabulary, experts = (
            _number(metadata, f"{name}.{key}")
            for key in ("block_count", "embedding_length", "vocab_size", "expert_count")
        )
        return _line(name, layers, experts, hidden, vocabulary, None)
    inner = next((found for key in _INNER if isinstance(found := config.get(key), Mapping)), {})
    both = {**inner, **config}
    return _line(
        _text(config, "model_type"),
        _number(both, *_LAYERS),
        _number(both, *_EXPERTS),
        _number(both, *_HIDDEN),
        _number(both, "vocab_size"),
        _text(both, *_DTYPES),
    )


def _line(
    name: str | None, layers: int | None, experts: int | None, hidden: int | None, words: int | None, dtype: str | None
) -> str:
    def parts() -> Iterator[str]:
        if name:
            yield clip(name, _TEXT)
        if layers is not None:
            yield f"{layers:,} layer{'' if layers == 1 else 's'}"
        if experts:
            yield f"{experts:,} experts"
        if hidden is not None:
            yield f"hidden {hidden:,}"
        if words is not None:
            yield f"vocabulary {words:,}"
        if dtype:
            yield clip(dtype, _TEXT)

    return ", ".join(parts())


def adapter(path: str) -> str:
    """The adapter in a folder: "LoRA adapter (r 8) of meta-llama/Llama-3.2-1B"; "" where there is none."""
    file = os.path.join(path, _ADAPTER)
    if not os.path.isfile(file):
        return ""
    try:
        config = read_json(file, _ADAPTER)
    except (SafeloadError, OSError):
        return f"adapter, whose {_ADAPTER} cannot be read"
    kind = _text(config, "peft_type") or ""
    rank, base = _number(config, "r"), _text(config, "base_model_name_or_path")
    words = [clip(_SPELLED.get(kind, kind), _TEXT), "adapter", f"(r {rank:,})" if rank is not None else ""]
    return " ".join(filter(None, words)) + (f" of {clip(base, 2 * _TEXT)}" if base else "")


def _text(values: Mapping[Any, Any], *keys: str) -> str | None:
    return next((found for key in keys if isinstance(found := values.get(key), str)), None)


def _number(values: Mapping[Any, Any], *keys: str) -> int | None:
    found = (values.get(key) for key in keys)
    return next((int(v) for v in found if isinstance(v, int) and type(v) is not bool and 0 <= v < _NUMBER), None)
