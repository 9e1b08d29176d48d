"""Find heads that share the weights of the embedding, by schema, config or conventional names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from .choosing import LANGUAGE, choose, choose_inner, choose_prefix
from .schema import MAX_LISTED, Schema

KEY = "tie_word_embeddings"

_HEAD = "lm_head.weight"
# Conventions of Hugging Face's causal models and of llama.cpp, for models without a schema: a head, the embedding of
# an absent head, and a tensor in all models with a head.
_CONVENTIONS = (
    (_HEAD, "model.embed_tokens.weight", "model.embed_tokens.weight"),
    ("output.weight", "token_embd.weight", "output_norm.weight"),
)
# Last parts of the names of embeddings in models without a schema. An encoder and a decoder share the last of these.
_EMBEDDINGS = (
    *(".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight", ".tok_embeddings.weight", ".embed_in.weight"),
    *(".embeddings.weight", ".embedding.weight", ".shared.weight"),
)
# Suffixes of the class names of models with `_HEAD`.
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def absent_heads(schema: Schema | None, names: Collection[str], config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the embeddings of tied heads that no file stores, by head."""
    if schema is None:
        return {
            head: embedding
            for head, embedding, sign in _CONVENTIONS
            if head not in names and embedding in names and sign in names
        }
    try:
        pairs = schema.pairs(names, config).items()
    except ValueError:  # the config lacks a key
        return {}
    return {head: embedding for head, (embedding, optional) in pairs if not optional and head not in names}


def tied_heads(config: Mapping[str, Any] | None, names: Collection[str]) -> dict[str, str]:
    """Return the embeddings of the tied heads of a Hugging Face model, stored or not, by head."""
    if config is None:
        return absent_heads(None, names, None)
    choice = choose(config, None, names)
    keys = config
    if choice is None or not any(map(choice.schema.find, names)):
        choice = choose_inner(config, names) if choice is None else choose_prefix(choice, config, names) or choice
        if choice is not None and choice.inner is not None:
            keys = {**choice.inner.config, **({KEY: config[KEY]} if isinstance(config.get(KEY), bool) else {})}
    result = {}
    if choice is None:
        tie = _tie_in(config)
        if _generates(config) and tie is not False and (tie or _HEAD not in names):
            embeddings = [name for name in names if f".{name}".endswith(_EMBEDDINGS)]
            shared = [name for name in embeddings if f".{name}".endswith(_EMBEDDINGS[-1])]
            if len(shared or embeddings) == 1:
                result[_HEAD] = (shared or embeddings)[0]
        return result
    with suppress(ValueError):  # the config lacks a key
        for head, (embedding, _) in choice.schema.pairs(names, keys).items():
            # The head stands beside the module of the embedding: language_model.model., language_model.lm_head.
            prefix = next((text for text in choice.schema.prefixes if text and embedding.startswith(text)), "")
            nested = prefix.removesuffix("model.") + head if prefix.endswith(".model.") else head
            result[nested] = embedding
    return result


def is_unclear(config: Mapping[str, Any] | None, pairs: Mapping[str, str]) -> bool:
    """Return True if a config ties a head that `tied_heads` has not found."""
    return config is not None and not pairs and _generates(config) and _tie_in(config) is True


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without ties, for a model and the language model inside it."""
    nested = {key: {**value, KEY: False} for key in LANGUAGE if isinstance(value := config.get(key), Mapping)}
    return {**config, **nested, KEY: False}


def _generates(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    listed = architectures[:MAX_LISTED] if isinstance(architectures, list) else []
    return any(isinstance(text, str) and text.endswith(_GENERATING) for text in listed)


def _tie_in(config: Mapping[str, Any]) -> bool | None:
    """Return the outermost value of `KEY`, or None."""
    inner = [config, *(value for key in LANGUAGE if isinstance(value := config.get(key), Mapping))]
    return next((value[KEY] for value in inner if isinstance(value.get(KEY), bool)), None)
