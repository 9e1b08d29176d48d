"""The ``config.json`` of a GGUF file that another program wrote, from the keys of llama.cpp."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...base.arrays import Array
from ...base.messages import error_about
from ...base.text import show
from ...errors import FormatError, UnsupportedError
from ...models.diffusion import ARCHITECTURE
from ...models.family import gguf_architectures, gguf_forms
from ...models.gguf import U32, USUAL_BASE, GgufForm
from ..sources.catalog import Catalog
from .file_keys import FileKeys, shortest
from .settings import MAX_FACTORS, YARN, ModelConfig, kinds_of_layers, query_scale, settings_of

# Settings of Llama 3.1 and later beside the factor; published models have the first context length.
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CONTEXTS = (8192, *(1 << k for k in range(6, 21)))
_TOKENS = ("bos", "eos", "padding")


def form_of(catalog: Catalog) -> GgufForm:
    """Return the family of a foreign file: the one that a key of the file chooses, or the usual one."""
    architecture, keys = str(catalog.metadata[ARCHITECTURE]), FileKeys(catalog.metadata, catalog.title)
    for form in gguf_forms().values():
        if form.architecture == architecture and form.chosen_by and keys.count(f"{architecture}.{form.chosen_by}"):
            return form
    return gguf_architectures()[architecture]


def config_of(catalog: Catalog, form: GgufForm) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a foreign file, and the settings that the file lacks."""
    keys = FileKeys(catalog.metadata, catalog.title)
    config: dict[str, Any] = {"architectures": [form.class_name], "model_type": form.model_type}
    for name, key in form.keys.items():
        if not key.config:
            continue
        value = (keys.count if key.types[0] == U32 else keys.number)(f"{form.architecture}.{name}")
        if value is None or (name == "attention.sliding_window" and value == 0):
            if not key.optional and key.default is None:
                raise FormatError(f"key {form.architecture}.{name} is missing", catalog.title)
            continue
        config[key.config[0]] = value
    config["vocab_size"] = _rows_of_embedding(catalog)
    config["tie_word_embeddings"] = "output.weight" not in catalog
    config["attention_bias"] = "blk.0.attn_q.bias" in catalog or "blk.0.attn_qkv.bias" in catalog
    config[form.activations["config"][0]] = form.activations["values"][0]
    config.update((key, form.assumes[key][0]) for key in form.restores)
    for kind in _TOKENS:
        number = keys.number(f"tokenizer.ggml.{kind}_token_id")
        known = isinstance(number, int) and 0 <= number < config["vocab_size"]  # llama.cpp has -1 for no token
        config[f"{'pad' if kind == 'padding' else kind}_token_id"] = number if known else None
    _add_attention(config, form)
    _add_rope(config, catalog, form, keys)
    notes = ["the dtype of the weights before conversion"]
    if form.ignores_windows and "sliding_window" not in config:
        notes.append("a sliding window, which llama.cpp ignores")
        config["sliding_window"] = None
    _check_rope(catalog, config, form)
    return config, notes


def _rows_of_embedding(catalog: Catalog) -> int:
    """Return the number of tokens."""
    name = "token_embd.weight"
    if name not in catalog:
        raise error_about(FormatError, "is missing", path=catalog.title, tensor=name)
    shape = catalog.about(name).shape
    if len(shape) != 2:
        raise error_about(FormatError, f"has the shape {list(shape)}, expected 2 axes", path=catalog.title, tensor=name)
    return int(shape[0])


def _add_attention(config: dict[str, Any], form: GgufForm) -> None:
    layers = config["num_hidden_layers"]
    heads = max(1, config["num_attention_heads"])
    if form.query_scale_by_width is not None:
        config["query_pre_attn_scalar"] = query_scale(form, layers, config["hidden_size"], heads, config["head_dim"])
    if form.full_every is not None and layers <= 10_000:
        config["layer_types"] = kinds_of_layers(layers, form.full_every)


def _add_rope(config: dict[str, Any], catalog: Catalog, form: GgufForm, keys: FileKeys) -> None:
    prefix = f"{form.architecture}.rope."

    def number(key: str, default: float) -> float:
        value = keys.number(prefix + key)
        return default if value is None else value

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": number("freq_base", USUAL_BASE)}
    kind = keys.text(f"{prefix}scaling.type") or "none"
    if kind in ("linear", "yarn"):
        rope.update(rope_type=kind, factor=number("scaling.factor", 1.0))
        if kind == "yarn":
            rope["original_max_position_embeddings"] = number("scaling.original_context_length", 0)
            settings = ((names[0], keys.number(f"{prefix}scaling.{key}")) for key, names in YARN.items())
            rope.update((name, value) for name, value in settings if value is not None)
            rope["truncate"] = True
    elif kind not in ("none", "longrope"):
        raise UnsupportedError(
            f"{catalog.title}: rope scaling of type {show(kind)} is unknown; raw=True keeps the tensors"
        )
    if "rope_freqs.weight" in catalog:
        factors = _factors_in(catalog, "rope_freqs.weight")
        rope.update(rope_type="llama3", factor=shortest(factors.max() if factors.size else 1.0), **_LLAMA_3)
        rope["original_max_position_embeddings"] = _CONTEXTS[0]
    if "rope_factors_long.weight" in catalog and "rope_factors_short.weight" in catalog:
        rope["rope_type"] = "longrope"
        for name in ("long", "short"):
            factors = _factors_in(catalog, f"rope_factors_{name}.weight")
            rope[f"{name}_factor"] = [shortest(factor) for factor in factors.tolist()]
    if form.rope.dimensions == "partial":
        heads = max(1, config["num_attention_heads"])
        original = number("scaling.original_context_length", config["max_position_embeddings"])
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"] = original
        share = number("dimension_count", config["hidden_size"] // heads) * heads / max(1, config["hidden_size"])
        rope["partial_rotary_factor"] = config["partial_rotary_factor"] = share
    config["rope_parameters"] = rope
    if form.rope.sliding:
        sliding = {"rope_type": "default", "rope_theta": number("freq_base_swa", USUAL_BASE)}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}


def _factors_in(catalog: Catalog, name: str) -> Array:
    """Return the factors of rotations in a tensor."""
    size = math.prod(catalog.about(name).shape)
    if size > MAX_FACTORS:
        raise error_about(FormatError, f"has {size:,} factors of rotations", path=catalog.title, tensor=name)
    factors: Array = catalog.array(name).reshape(-1)
    return factors


def _check_rope(catalog: Catalog, config: dict[str, Any], form: GgufForm) -> None:
    """Compare the settings of rotations with the tensors of the file."""
    rope = config["rope_parameters"]
    for original in _CONTEXTS if rope.get("rope_type") == "llama3" else (None,):  # gemma3's is nested, and never this
        if original is not None:
            rope["original_max_position_embeddings"] = original
        settings = settings_of(ModelConfig(config, catalog.title, form.keys), form)
        if all(_equal(catalog, name, expected) for name, expected in settings.tensors.items()):
            return
    raise UnsupportedError(
        f"{catalog.title}: the factors of rotations need unknown settings; raw=True keeps the tensors"
    )


def _equal(catalog: Catalog, name: str, expected: Array) -> bool:
    if name not in catalog or tuple(catalog.about(name).shape) != expected.shape:
        return False
    return bool(np.allclose(catalog.array(name), expected, rtol=1e-5, atol=0))
