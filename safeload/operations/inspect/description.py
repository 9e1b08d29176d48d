"""A one-line description of the model from config.json or GGUF metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...base.text import clip
from ...models.diffusion import ARCHITECTURE, model_of

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_DTYPES = ("torch_dtype", "dtype")

# Longest text and largest number to show: larger values are garbage.
_TEXT, _NUMBER = 80, 10**12


def model(config: Mapping[str, Any] | None, metadata: Mapping[Any, Any]) -> str:
    """Describe the model, such as "llama, 12 layers, hidden 512, vocabulary 32,000, bfloat16"; "" if unknown."""
    if config is None:
        name = metadata.get(ARCHITECTURE)
        if not isinstance(name, str):
            return ""
        layers, hidden, vocabulary, experts = (
            _number(metadata, f"{name}.{key}")
            for key in ("block_count", "embedding_length", "vocab_size", "expert_count")
        )
        if model_of(metadata) is not None:
            return f"{name}, diffusion model"
        return _line(name, layers=layers, experts=experts, hidden=hidden, words=vocabulary)
    from ...models.choosing import LANGUAGE  # imported here: most files have no config.json

    # Values of unexpected types are left out.
    inner = next((part for key in LANGUAGE if isinstance(part := config.get(key), Mapping)), {})
    both = {**inner, **config}
    return _line(
        _text(config, "model_type"),
        layers=_number(both, *_LAYERS),
        experts=_number(both, *_EXPERTS),
        hidden=_number(both, *_HIDDEN),
        words=_number(both, "vocab_size"),
        dtype=_text(both, *_DTYPES),
    )


def _line(
    name: str | None,
    *,
    layers: int | None,
    experts: int | None,
    hidden: int | None,
    words: int | None,
    dtype: str | None = None,
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


def _text(values: Mapping[Any, Any], *keys: str) -> str | None:
    return next((text for key in keys if isinstance(text := values.get(key), str)), None)


def _number(values: Mapping[Any, Any], *keys: str) -> int | None:
    numbers = (values.get(key) for key in keys)
    return next((int(v) for v in numbers if isinstance(v, int) and type(v) is not bool and 0 <= v < _NUMBER), None)
