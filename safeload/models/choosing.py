"""What the config of a model says of its tensors: their schema, the heads that are tied, and their dtype.

The experts of a model are stored as separate tensors, fused by transformers, or stacked by mlx-lm.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, NamedTuple

from ..core import dtypes
from ..core.names import NUMBER, pattern_of
from ..core.text import error_about
from ..errors import UnsupportedError
from .family import FamilyFile, family_files, mlx_form, with_schema
from .module_names import unwrapped
from .renamed import ModelNames
from .schema import LANGUAGE, LAYER, PREFIX, Config, Schema, SchemaEntry, language_of, listed_in

# Class name of a model: its family, then its head. "LlamaForSequenceClassification" belongs to the family "Llama".
_CLASS = re.compile(r"(\w+?)(?:(?:LMHead|DoubleHeads|PreTrained)?Model|(?:For|With)[A-Z]\w*)", re.ASCII)
# The end of classes with a language model inside, in a config of its own.
_WITH_INNER = "ForConditionalGeneration"
# Maximum length of a class name, because matching takes quadratic time.
_CLASS_LENGTH = 200
# A nested object with any of these keys is the config of a model.
_WIDTHS = ("hidden_size", "dim", "encoder_args")
# Number of levels of a config to search for nested configs.
_NESTED = 3
# Maximum number of nested configs and of embedding prefixes to try. No real model has more.
_CONFIGS, _MODELS = 16, 16
# A prefix outside the schema is accepted if it puts at least 1 in this many names into the schema.
_PLACED_OF = 4

_COUNT = "expert"
_ONE = ".experts.{expert}."
# A part of the names of mlx-lm's stacks.
STACK = ".switch_mlp."
# The block of Mixtral's experts in its files, and the experts' in transformers 5.
_MIXTRAL_BLOCK, _NEW = ".block_sparse_moe.", ".mlp.experts."
# The names of Mixtral's modules in transformers 5.
_RENAMED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Inner(NamedTuple):
    """The part of a model that a schema covers, such as the language model inside a multi-modal model."""

    config: Mapping[str, Any]
    key: str  # key of its config in the config of the whole model, such as "text_config"
    prefix: str  # prefix of the names of its tensors
    whole: bool = False  # it is the whole model, under other names


class Choice(NamedTuple):
    """The schema of a model."""

    schema: Schema  # with the prefix of the part's tensors
    complete: bool  # the schema lists the architecture, so it describes the whole model including its head
    inner: Inner | None = None  # None for the whole model


def choose(config: Mapping[str, Any] | None, format: str | None, names: Collection[str]) -> Choice | None:
    """Choose a schema in the form of the model's experts: by the config, without one by the format.

    The schema of a format needs at least half of its tensors in the model.
    """
    families = _by_format(format, names) if config is None else _by_config(config)
    return next((Choice(_with_expert_form(family, config, names), complete) for family, complete in families), None)


def choose_for_mlx(config: Mapping[str, Any]) -> tuple[Choice | None, Mapping[str, Any]]:
    """Choose the schema of a model as mlx-lm has it, and return it with the config of its language model."""
    form = mlx_form(config)
    if form is None:
        return None, config
    return Choice(form.schema_of(config["model_type"]), True), language_of(config)


def _by_format(format: str | None, names: Collection[str]) -> Iterator[tuple[FamilyFile, bool]]:
    for family in with_schema().values():
        if format in family.own.get("formats", ()):
            required = [entry.name for entry in family.schema.entries if not entry.optional]
            if 2 * sum(name in names for name in required) >= len(required):
                yield family, True


def _by_config(config: Mapping[str, Any]) -> Iterator[tuple[FamilyFile, bool]]:
    """Yield the family of the architectures, then of the model_type, then of the keys; and if its schema is complete.

    An architecture that no schema lists belongs to the family at the start of its name, and has another head or none:
    "LlamaForSequenceClassification", "LlamaModel".
    """
    known = with_schema().values()
    listed, model_type = listed_in(config), config.get("model_type")
    yield from ((family, True) for family in known if any(text in family.architectures for text in listed))
    if model_type is not None:
        yield from ((family, not listed) for family in known if model_type in family.model_types)
    elif not listed:  # the config of an inner model, such as a vision encoder, has a width
        inner = any(isinstance(value, Mapping) and any(key in value for key in _WIDTHS) for value in config.values())
        by_keys = ((family, family.own.get("keys")) for family in known)
        yield from ((family, not inner) for family, keys in by_keys if keys and config.keys() >= {*keys})
    if any(isinstance(inner, Mapping) and "model_type" in inner for inner in config.values()):
        return  # a model of models, see `choose_part`
    stems = {_stem(text) for text in listed if not str(text).endswith(_WITH_INNER)} - {None}
    yield from ((family, False) for family in known if any(_stem(text) in stems for text in family.architectures))


def _stem(name: Any) -> str | None:
    match = _CLASS.fullmatch(name) if isinstance(name, str) and len(name) <= _CLASS_LENGTH else None
    return None if match is None else match[1]


def choose_part(config: Mapping[str, Any] | None, format: str | None, names: Collection[str]) -> Choice | None:
    """Choose the schema of a model, with an additional prefix of its names, or of the language model inside it.

    All names may have a prefix ("module.model.layers.0...", "language_model.model.layers.0..."). The config of a
    language model inside is nested in the model's.
    """
    choice = choose(config, format, names)
    if choice is not None:
        prefix = _inner_prefix(choice.schema, names)
        if config is None or prefix is None or prefix in choice.schema.prefixes:
            return choice
        placed = _with_prefix(choice.schema, prefix)
        if _PLACED_OF * sum(placed.find(name) is not None for name in names) < len(names):
            return choice
        return Choice(placed, choice.complete, Inner(config, "config.json", prefix, True))
    for key, inner in islice(_inner_configs(config or {}, _NESTED), _CONFIGS):
        if (choice := choose(inner, None, names)) is not None:
            one_each = {pattern_of(name): name for name in names}.values()
            known = ModelNames(config, {unwrapped(name): name for name in one_each})
            stored = {name: place for name, place in known.places.items() if isinstance(place, str)}
            prefixes = (_inner_prefix(choice.schema, each) for each in (names, stored))
            if schemas := [_with_prefix(choice.schema, prefix) for prefix in prefixes if prefix is not None]:
                schema, in_memory = schemas[0], schemas[-1]
                # The stored names of tensors that transformers renames by rules of the whole model.
                matches = (
                    (place, in_memory.find(name)) for name, place in stored.items() if schema.find(place) is None
                )
                also = {
                    match.entry.name: pattern_of(place)
                    for place, match in matches
                    if match is not None and match.numbers == (*map(int, NUMBER.findall(place)),)
                }
                return Choice(schema.with_also(also), False, Inner(inner, key, schema.prefixes[0]))
    return None


def _inner_configs(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    nested = [(key, value) for key, value in config.items() if depth and isinstance(value, Mapping)]
    for key, value in sorted(nested, key=lambda item: item[0] not in LANGUAGE):
        yield key, value
        yield from _inner_configs(value, depth - 1)


def _inner_prefix(schema: Schema, names: Collection[str]) -> str | None:
    """Return the prefix of the embedding's name, or None."""
    embeddings = (entry.name for entry in schema.entries if entry.role == "embedding")
    bare = next((name.removeprefix(PREFIX) for name in embeddings if name.startswith(PREFIX)), None)
    ends = (name.removesuffix(bare) for name in names if bare is not None and name.endswith(bare))
    prefixes = islice((prefix for prefix in ends if prefix == "" or prefix.endswith(".")), _MODELS)
    return max(prefixes, key=lambda prefix: sum(name.startswith(prefix) for name in names), default=None)


def _with_prefix(schema: Schema, prefix: str) -> Schema:
    """Return the schema with a single prefix; names without a prefix, such as the head, can have it or its start."""
    before = [prefix[: k + 1] for k, character in enumerate(prefix) if character == "."]
    entries = (
        entry
        if entry.name.startswith(PREFIX)
        else entry._replace(also=(*entry.also, *(b + entry.name for b in before)))
        for entry in schema.entries
    )
    return replace(schema, prefixes=(prefix,), entries=tuple(entries))


# ---- experts ----


def _with_expert_form(family: FamilyFile, config: Mapping[str, Any] | None, names: Collection[str]) -> Schema:
    """Return the schema of a model with these names, or the schema itself if its experts are separate tensors."""
    schema = family.schema
    if _COUNT not in schema.counts:
        return schema
    places = {name: place for name, place in family.in_memory.items() if place.parts}
    stacks = tuple({place.name.rpartition(LAYER)[2] for place in places.values()})
    fused = any(name.endswith(stacks) for name in names)
    form = mlx_form(config) if not fused and any(STACK in name for name in names) else None
    if form is not None:
        return form.schema_of((config or {})["model_type"])
    # Mixtral under the names of transformers 5, in which llm-compressor stores separate experts.
    modules = any(_NEW in name and name.endswith(".gate_proj.weight") for name in names)
    modules = modules and any(_MIXTRAL_BLOCK in entry.name for entry in schema.entries)
    if not (fused or modules):
        return schema
    entries: list[SchemaEntry] = []
    for entry in schema.entries:
        name, shape = entry.name, entry.shape
        block, one, module = name.partition(_ONE)
        if one and modules:
            inner, _, suffix = module.partition(".")
            name = f"{block.replace(_MIXTRAL_BLOCK[:-1], '.mlp')}{one}{_RENAMED.get(inner, inner)}.{suffix}"
        if one and fused:
            if (place := places.get(entry.name)) is None or place.part or shape is None:
                continue
            rows, columns = shape
            rows = f"{place.parts} * ({rows})" if place.parts > 1 else rows
            name, shape = place.name, (schema.counts[_COUNT], rows, columns)
        entries.append(entry._replace(name=name, shape=shape))
    return replace(schema, entries=tuple(entries))


# ---- layers ----

# Keys of a config with the number of layers of a stack.
_COUNT_KEY = re.compile(r"(?:num_(?:hidden_)?|n_|(?:num_)?(?:en|de)coder_(?:num_hidden_)?)layers?|depth", re.ASCII)
# Keys of a model that may not use, and not store, the last layers of its vision tower.
_FEATURE_KEY = re.compile(r".*(?:vision|select).*layer.*", re.ASCII)


def layer_counts(config: Mapping[str, Any]) -> tuple[set[int], set[int]]:
    """Return the numbers of layers in a config and the configs inside, and the lengths of their lists."""
    unused = any(_FEATURE_KEY.fullmatch(str(key)) for key in config)
    parts = [config, *(part for key, part in _inner_configs(config, _NESTED) if key in LANGUAGE or not unused)]
    items = [item for part in parts for item in part.items()]
    stated = {value for key, value in items if type(value) is int and _COUNT_KEY.fullmatch(str(key))}
    return stated, {len(value) for _, value in items if isinstance(value, (list, tuple))}


# ---- tied heads ----

TIE = "tie_word_embeddings"
VOCABULARY = "vocab_size"

_HEAD = "lm_head.weight"
# Conventions of Hugging Face's causal models and of llama.cpp, for models without a schema: a head, the embedding of
# an absent head, and a tensor in all models with a head.
_CONVENTIONS = (
    (_HEAD, "model.embed_tokens.weight", "model.embed_tokens.weight"),
    ("output.weight", "token_embd.weight", "output_norm.weight"),
)
# Last parts of the names of embeddings in models without a schema. An encoder and a decoder share the last of these.
EMBEDDINGS = (
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
    with suppress(ValueError):  # the config lacks a key
        pairs = schema.pairs(names, config).items()
        return {head: embedding for head, (embedding, optional) in pairs if not optional and head not in names}
    return {}


def tied_heads(config: Mapping[str, Any] | None, names: Collection[str]) -> dict[str, str]:
    """Return the embeddings of the tied heads of a Hugging Face model, stored or not, by head."""
    if config is None:
        return absent_heads(None, names, None)
    choice, keys = _of_model(config, names)
    if choice is None:
        tie = _tie_in(config)
        ties = _generates(config) and tie is not False and (tie or _HEAD not in names)
        embeddings = [name for name in names if ties and f".{name}".endswith(EMBEDDINGS)]
        shared = [name for name in embeddings if f".{name}".endswith(EMBEDDINGS[-1])] or embeddings
        return {_HEAD: shared[0]} if len(shared) == 1 else {}
    result = {}
    with suppress(ValueError):  # the config lacks a key
        for head, (embedding, _) in choice.schema.pairs(names, keys).items():
            # The head stands beside the module of the embedding: language_model.model., language_model.lm_head.
            prefix = next((text for text in choice.schema.prefixes if text and embedding.startswith(text)), "")
            nested = prefix.removesuffix("model.") + head if prefix.endswith(".model.") else head
            result[nested] = embedding
    return result


def _of_model(config: Mapping[str, Any], names: Collection[str]) -> tuple[Choice | None, Mapping[str, Any]]:
    """Choose the schema of a model, or of the language model inside it, and return it with its config."""
    choice = choose_part(config, None, names)
    if choice is None or choice.inner is None:
        return choice, config
    return choice, {**choice.inner.config, **({TIE: config[TIE]} if isinstance(config.get(TIE), bool) else {})}


def is_unclear(config: Mapping[str, Any] | None, pairs: Mapping[str, str]) -> bool:
    """Return True if a config ties a head that `tied_heads` has not found."""
    return config is not None and not pairs and _generates(config) and _tie_in(config) is True


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without ties, for a model and the language model inside it."""
    nested = {key: {**value, TIE: False} for key in LANGUAGE if isinstance(value := config.get(key), Mapping)}
    return {**config, **nested, TIE: False}


def vocabulary_sizes(config: Mapping[str, Any] | None) -> set[Any]:
    """Return the sizes of the vocabularies in the configs of a model and of the language model inside it."""
    return {part[VOCABULARY] for part in _parts(config or {}) if isinstance(part.get(VOCABULARY), int)}


def with_vocabulary(config: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """Return a config with another size of the vocabulary, for a model and the language model inside it."""
    nested = {
        key: with_vocabulary(config[key], before, after) for key in LANGUAGE if isinstance(config.get(key), Mapping)
    }
    return {**config, **nested, **({VOCABULARY: after} if config.get(VOCABULARY) == before else {})}


def _generates(config: Mapping[str, Any]) -> bool:
    return any(isinstance(text, str) and text.endswith(_GENERATING) for text in listed_in(config))


def _tie_in(config: Mapping[str, Any]) -> bool | None:
    """Return the outermost value of `TIE`, or None."""
    return next((part[TIE] for part in _parts(config) if isinstance(part.get(TIE), bool)), None)


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a config and the configs of the language model inside it."""
    return [config, *(value for key in LANGUAGE if isinstance(value := config.get(key), Mapping))]


# ---- tensor parallelism ----


class Pieces(NamedTuple):
    """How the matrix of a linear module is divided among ranks."""

    rows: bool  # the rows, its outputs; otherwise the columns, its inputs
    sizes: tuple[int, ...]  # relative sizes of the matrices in it, each divided by itself
    heads: bool  # sizes are numbers of heads, which stay whole


def tensor_parallel(config: Mapping[str, Any] | None, names: Collection[str], path: str) -> dict[str, Pieces]:
    """Return how the tensors of a model are divided by its family's plan; all other tensors are replicated."""
    choice, keys = (None, {}) if config is None else _of_model(config, names)
    plan = None if choice is None else family_files()[choice.schema.name].parallel
    if choice is None or plan is None:
        model = "no config.json of a known family" if choice is None else f"family {choice.schema.name} has no plan"
        text = f'"tp" needs a tensor-parallel plan, but {model}: pass a mapping of name patterns to placements'
        raise error_about(UnsupportedError, text, path=path)
    values, result = Config(keys, choice.schema.defaults, choice.schema.config), {}
    for name in filter(choice.schema.find, names):
        axis, parts = next((own for text, own in plan.items() if fnmatchcase(name, text)), (None, 0))
        if axis is not None:
            sizes = (1,) * parts if isinstance(parts, int) else tuple(map(values.evaluate, parts))
            result[name] = Pieces(axis == "rows", sizes, not isinstance(parts, int))
    return result


# ---- the dtype of the weights ----

# The keys before and since transformers 4.56.
_DTYPES = ("torch_dtype", "dtype")
# The nested configuration to prefer if the outermost has no dtype: the language model's.
_FIRST_NESTED = "text_config"


def dtype_in(config: Mapping[str, Any] | None) -> dtypes.Dtype | None:
    """Return the floating dtype of the dequantized weights, at least 16 bits wide, or None.

    The outermost configuration decides, else ``text_config``, else all other nested configurations if they agree.
    """
    if config is None:
        return None
    named = (value for key in reversed(_DTYPES) if isinstance(value := config.get(key), str) and dtypes.is_name(value))
    row = next(map(dtypes.parse, named), None)
    if row is not None and row.floating and row.bits >= 16:
        return row
    nested = {key: dtype_in(part) for key, part in config.items() if _is_config(key, part)}
    rows = {nested.get(_FIRST_NESTED)} - {None} or {*nested.values()} - {None}
    return rows.pop() if len(rows) == 1 else None


def with_dtype(config: Mapping[str, Any], dtype: dtypes.Dtype) -> dict[str, Any]:
    """Return a config with another dtype, nested configurations included."""
    result = _changed(config, dtype.name)
    if not any(isinstance(result.get(key), str) for key in _DTYPES):
        result[_DTYPES[0]] = dtype.name
    return result


def _is_config(key: str, value: Any) -> bool:
    return isinstance(value, Mapping) and key.endswith("config")


def _changed(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    result = {key: _changed(value, name) if _is_config(key, value) else value for key, value in config.items()}
    result.update((key, name) for key in _DTYPES if isinstance(config.get(key), str))
    return result
