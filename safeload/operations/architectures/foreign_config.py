"""The ``config.json`` of a GGUF file that another program wrote, from the keys of llama.cpp."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...base.arrays import Array
from ...base.text import show
from ...errors import FormatError, UnsupportedError
from ...models.gguf_sources import SOURCES, USUAL_BASE, GgufSource
from ..sources.catalog import Catalog
from .settings import ModelConfig, settings_of

# The class that llama.cpp treats alike; with experts, "llama" is Mixtral.
_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM", "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}  # fmt: skip
_MIXTRAL = "MixtralForCausalLM"
_YARN = {
    "yarn_ext_factor": "extrapolation_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Settings of Llama 3.1 and later beside the factor; published models have the first context length.
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CONTEXTS = (8192, *(1 << k for k in range(6, 21)))
_TOKENS = ("bos", "eos", "padding")


def class_of(catalog: Catalog) -> str:
    """Return the class of a foreign file."""
    architecture = str(catalog.metadata["general.architecture"])
    if architecture == "llama" and catalog.metadata.get("llama.expert_count", 0):
        return _MIXTRAL
    return _CLASSES[architecture]


def config_of(catalog: Catalog, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a foreign file, and what the file does not say.

    Raises:
        FormatError: a key is missing, or has a wrong type.
        UnsupportedError: a setting has no counterpart.
    """
    source, metadata = SOURCES[name], catalog.metadata
    config: dict[str, Any] = {"architectures": [name], "model_type": source.model_type}
    for key in source.keys:
        value = metadata.get(f"{source.architecture}.{key.key}")
        if value is None or (key.key == "attention.sliding_window" and value == 0):
            if key.required and key.default is None:
                raise FormatError(f"key {source.architecture}.{key.key} is missing", catalog.title)
            continue
        if isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
            raise FormatError(f"key {source.architecture}.{key.key} must be a number, got {show(value)}", catalog.title)
        config[key.source[0]] = int(value) if isinstance(value, int) else _short(value)
    if "token_embd.weight" not in catalog:
        raise FormatError("tensor token_embd.weight is missing", catalog.title)
    config["vocab_size"] = int(catalog.about("token_embd.weight").shape[0])
    config["tie_word_embeddings"] = "output.weight" not in catalog
    config["attention_bias"] = "blk.0.attn_q.bias" in catalog or "blk.0.attn_qkv.bias" in catalog
    config["hidden_activation" if source.norm_shift else "hidden_act"] = source.activations[
        -1 if source.norm_shift else 0
    ]
    config.update((key, values[0]) for key, values in source.always.items() if values[0] not in (None, [], True, False))
    config.update(
        (key, values[0]) for key, values in source.always.items() if key in ("norm_topk_prob", "mlp_only_layers")
    )
    for kind in _TOKENS:
        number = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        config[f"{'pad' if kind == 'padding' else kind}_token_id"] = None if number is None else int(number)
    _add_attention(config, source)
    _add_rope(config, catalog, source)
    notes = ["the dtype of the weights before conversion"]
    if source.window_ignored and "sliding_window" not in config:
        notes.append("a sliding window, which llama.cpp ignores")
        config["sliding_window"] = None
    _check_rope(catalog, config, source)
    return config, notes


def _short(value: float) -> float:
    """Return the shortest decimal number that an f32 stands for."""
    return float(str(np.float32(value)))


def _add_attention(config: dict[str, Any], source: GgufSource) -> None:
    layers = config["num_hidden_layers"]
    heads = max(1, config["num_attention_heads"])
    if source.attention_scale is not None:
        wide = layers == source.attention_scale
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if wide else config["head_dim"]
    if source.pattern is not None and layers <= 10_000:
        config["layer_types"] = [
            "full_attention" if (k + 1) % source.pattern == 0 else "sliding_attention" for k in range(layers)
        ]


class _RopeKeys:
    """The keys of rotations, checked as they are read."""

    def __init__(self, catalog: Catalog, source: GgufSource) -> None:
        self._catalog = catalog
        self._prefix = f"{source.architecture}.rope."

    def get(self, key: str, default: Any) -> Any:
        return self._catalog.metadata.get(f"{self._prefix}{key}", default)

    def number(self, key: str, default: float) -> Any:
        """Return a number: an int, or the shortest decimal of a float."""
        value = self.get(key, default)
        if isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
            raise FormatError(f"key {self._prefix}{key} must be a number, got {show(value)}", self._catalog.title)
        return int(value) if isinstance(value, int) else _short(value)


def _add_rope(config: dict[str, Any], catalog: Catalog, source: GgufSource) -> None:
    keys = _RopeKeys(catalog, source)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("freq_base", USUAL_BASE)}
    kind = keys.get("scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope.update(rope_type=kind, factor=keys.number("scaling.factor", 1.0))
        if kind == "yarn":
            rope["original_max_position_embeddings"] = keys.number("scaling.original_context_length", 0)
            present = {
                name: f"scaling.{key}" for key, name in _YARN.items() if keys.get(f"scaling.{key}", None) is not None
            }
            rope.update((name, keys.number(key, 0)) for name, key in present.items())
            rope["truncate"] = True
    elif kind not in ("none", "longrope"):
        raise UnsupportedError(
            f"{catalog.title}: rope scaling of type {show(kind)} is unknown; raw=True keeps the tensors"
        )
    if "rope_freqs.weight" in catalog:
        factors = catalog.array("rope_freqs.weight")
        rope.update(rope_type="llama3", factor=_short(factors.max() if factors.size else 1.0), **_LLAMA_3)
        rope["original_max_position_embeddings"] = _CONTEXTS[0]
    if "rope_factors_long.weight" in catalog and "rope_factors_short.weight" in catalog:
        rope["rope_type"] = "longrope"
        for name in ("long", "short"):
            factors = catalog.array(f"rope_factors_{name}.weight")
            rope[f"{name}_factor"] = [_short(factor) for factor in factors.ravel().tolist()]
    if source.architecture == "phi3":
        heads = max(1, config["num_attention_heads"])
        original = keys.number("scaling.original_context_length", config["max_position_embeddings"])
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"] = original
        share = keys.number("dimension_count", config["hidden_size"] // heads) * heads / max(1, config["hidden_size"])
        rope["partial_rotary_factor"] = config["partial_rotary_factor"] = share
    config["rope_parameters"] = rope
    if source.architecture == "gemma3":
        sliding = {"rope_type": "default", "rope_theta": keys.number("freq_base_swa", USUAL_BASE)}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}


def _check_rope(catalog: Catalog, config: dict[str, Any], source: GgufSource) -> None:
    """Compare the settings of rotations with the tensors of the file.

    Raises:
        UnsupportedError: the tensors need other settings.
    """
    rope = config["rope_parameters"]
    for original in _CONTEXTS if rope.get("rope_type") == "llama3" else (None,):  # gemma3's is nested, and never this
        if original is not None:
            rope["original_max_position_embeddings"] = original
        settings = settings_of(ModelConfig(config, catalog.title), source)
        if all(_equal(catalog, name, expected) for name, expected in settings.tensors.items()):
            return
    raise UnsupportedError(
        f"{catalog.title}: the factors of rotations need unknown settings; raw=True keeps the tensors"
    )


def _equal(catalog: Catalog, name: str, expected: Array) -> bool:
    factors: Array = catalog.array(name) if name in catalog else np.empty(0, np.float32)
    return factors.shape == expected.shape and bool(np.allclose(factors, expected, rtol=1e-5, atol=0))
