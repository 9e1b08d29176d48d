"""The metadata keys of llama.cpp from a ``config.json``, and a config from the keys of another program.

A family's file says which keys hold which values, see `safeload.models.family`. Every key that changes the computation
is either written, or must have the value that llama.cpp assumes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import chain, product
from typing import Any

import numpy as np

from ...core.arrays import Array
from ...core.forking import cached_property
from ...core.text import error_about, show, warning
from ...errors import FormatError, UnsupportedError
from ...formats import gguf
from ...models.diffusion import ARCHITECTURE
from ...models.family import (
    BOOL,
    BOOLS,
    F32,
    FLOATS,
    METADATA,
    NUMBERS,
    PLACE,
    TEXT,
    U32,
    USUAL_BASE,
    GgufForm,
    GgufKey,
    MmprojForm,
    gguf_architectures,
    gguf_forms,
    of_all_layers,
    without_numbers,
)
from ...models.schema import ANY, MAX_LAYERS, Config, ConfigError, Schema, language_of, listed_in, names_in
from ..catalog import Catalog

_MAX_SIZE = (1 << 32) - 1
_MAX_I32 = (1 << 31) - 1
# Rows or columns that can change places; published models have up to 65,536.
_MAX_PLACES = 1 << 22
_MAX_F32 = float(np.finfo(np.float32).max)
# Largest number of rotation factors: half of the largest head.
MAX_FACTORS = 1 << 16

# Rope parameters that older configs have outside of them, under these names.
_OUTSIDE_ROPE = {
    "rope_theta": ("rope_theta", "rope_global_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
}
# Keys of llama.cpp below ``rope.scaling``, with the rope parameters that hold the value.
_YARN: dict[str, Sequence[str]] = {
    "yarn_ext_factor": ("extrapolation_factor",),
    "yarn_attn_factor": ("attention_factor", "attn_factor"),
    "yarn_beta_fast": ("beta_fast",),
    "yarn_beta_slow": ("beta_slow",),
}
# Keys of rope parameters by type, besides those of `_ANY_ROPE`.
_ANY_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS: dict[str, set[str]] = {
    "default": {"factor", _ORIGINAL},
    "linear": {"factor"},
    "yarn": {"factor", _ORIGINAL, "truncate", "finetuned", *chain.from_iterable(_YARN.values())},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "longrope": {"short_factor", "long_factor", "factor", _ORIGINAL},
    "proportional": set(),
    "dynamic": {"factor", _ORIGINAL},
}
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}
# Settings of Llama 3.1 and later beside the factor; published models have the first context length.
_CONTEXTS = (8192, *(1 << k for k in range(6, 21)))
_HIGH = (4.0, 1.0)  # the second in Llama 4
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": _HIGH[0], _ORIGINAL: _CONTEXTS[0]}
# Context length of stretched rotations.
_STRETCHED = 1 << 18
# Names in the texts of refusals.
_NAMES = re.compile(r"\{([\w.]+)\}", re.ASCII)
# Keys in which 0 stands for no value.
_NONE_IF_ZERO = ("attention.sliding_window", "final_logit_softcapping")
# Tensors with values that the config has.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Keys of special tokens, with the words of llama.cpp's.
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


class ModelConfig:
    """The values of a ``config.json``, checked as they are read."""

    def __init__(self, values: Mapping[str, Any], title: str, form: GgufForm) -> None:
        self.values = language_of(values, form.nested)
        self.whole = values  # also of the vision tower
        self._title = title
        self._form = form
        self._keys = form.keys  # of llama.cpp, which name the keys of the config
        for key, usual in form.omitted.items():
            name = "rope_scaling" if key == "rope_parameters" and "rope_scaling" in self.values else key  # older name
            if name not in self.values or (isinstance(usual, str) and self.values[key] is None):
                with suppress(ConfigError):  # of a key that is missing too, which is refused under its own name
                    value = Config(self.values, {}).evaluate(usual) if isinstance(usual, str) else usual
                    self.values = {**self.values, key: value}

    @property
    def headless(self) -> bool:
        name = next(iter(listed_in(self.values)), None)
        return isinstance(name, str) and name.endswith("Model") and "LMHead" not in name

    @cached_property
    def rope(self) -> Rope:
        """The settings of rotary embeddings."""
        return Rope(self)

    @cached_property
    def _expressions(self) -> Config:
        # Expressions find the settings of rotations below "rope", wherever they stand in a config.
        return Config({**self.values, "rope": self.rope.full if self._form.rope.types else {}}, self._form.defaults)

    def fault(self, text: str) -> FormatError:
        return FormatError(f"config.json: {text}", self._title)

    def unsupported(self, text: str) -> UnsupportedError:
        """Return an error about a setting that llama.cpp does not have."""
        return UnsupportedError(f"{self._title}: config.json: {text}; raw=True writes the tensors as they are")

    def find(self, names: Sequence[str]) -> Any:
        """Return the value of the first name that has a value, or None; a name with dots is of nested objects."""
        return next((value for name in names if (value := self._at(name)) is not None), None)

    def _at(self, name: str) -> Any:
        value: Any = self.values if not name.startswith("rope.") else {"rope": self.rope.full}
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def integer(self, expression: str, layer: int | None = None) -> int:
        """Return the value of an expression, see `safeload.models.schema`."""
        try:
            return self._expressions.evaluate(expression, layer)
        except ConfigError as error:
            raise self.fault(str(error)) from None

    def holds(self, condition: str) -> bool:
        """Return True if an expression is not 0, in every layer if it depends on the layer."""
        if not self._expressions.varies(condition):
            return self.integer(condition) != 0
        return all(self.integer(condition, layer) for layer in range(min(self.size(self._form.blocks), MAX_LAYERS)))

    def shape(self, expressions: Sequence[str], total: int) -> tuple[int, ...]:
        """Return a shape of so many values; "-1" is the size that is left."""
        sizes = [-1 if text == "-1" else self.integer(text) for text in expressions]
        if -1 in sizes:
            sizes[sizes.index(-1)] = total // max(1, -math.prod(sizes))
        return tuple(sizes)

    def shape_of(self, published: Schema, name: str) -> tuple[int, ...]:
        """Return the shape of a published tensor."""
        match = published.find(name)
        if match is None or match.entry.shape is None:
            raise self.fault(f"nothing is known of the shape of {show(name)}")
        return tuple(self.integer(text.removesuffix(ANY), match.layer) for text in match.entry.shape)

    def has(self, published: Schema, name: str, numbers: Sequence[str]) -> bool:
        """Return False if the condition of a published tensor does not hold in this layer."""
        match = published.find(name.replace(PLACE, numbers[0] if numbers else "", 1).replace(PLACE, "0"))
        return match is None or match.entry.when is None or self.integer(match.entry.when, match.layer) != 0

    def expected(self, published: Schema, names: Collection[str]) -> list[str]:
        """Return the published tensors that a model must have."""
        try:
            return [name for name, tensor in published.expand(self.values, names).items() if tensor.required]
        except ConfigError as error:
            raise self.fault(str(error)) from None

    def places(self, pieces: Iterable[Mapping[str, Any]], count: int, name: str) -> Array:
        """Return for each place of an axis in llama.cpp the place among the ``count`` of the published tensor."""
        parts = []
        for piece in pieces:
            begin, end = self._range((piece.get("begin", "0"), piece.get("end", str(count))), count, name)
            sizes = self.shape(piece.get("split", ("-1",)), end - begin)
            if math.prod(sizes) != end - begin or min(sizes) < 0 or max(sizes) > _MAX_PLACES:
                text = f"has {end - begin:,} rows or columns, which cannot be divided as {list(sizes)}"
                raise error_about(FormatError, text, path=self._title, tensor=name)
            places = np.arange(begin, end).reshape(sizes)
            if "take" in piece:
                axis, *taken = piece["take"]
                places = places.take(np.arange(*self._range(taken, sizes[axis], name)), axis)
            parts.append(places.transpose(piece.get("order", [*range(places.ndim)])).reshape(-1))
        return np.concatenate(parts)

    def _range(self, ends: Sequence[str], count: int, name: str) -> tuple[int, int]:
        """Return a range of the ``count`` places of an axis."""
        begin, end = map(self.integer, ends)
        if not 0 <= begin <= end <= count <= _MAX_PLACES:
            text = f"has {count:,} rows or columns, from which {begin:,} to {end:,} cannot be taken"
            raise error_about(FormatError, text, path=self._title, tensor=name)
        return begin, end

    def number(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MAX_F32:
            raise self.fault(f"{name} must be a number, got {show(value)}")
        return float(value)

    def factors(self, steps: Iterable[Mapping[str, str]], rows: int) -> tuple[tuple[int, int, float], ...]:
        """Return ranges of rows and their factors other than 1; ``a.0`` is item 0 of the list a."""
        result = []
        for step in steps:
            name, _, item = step["key"].partition(".")
            value = self.values.get(name)
            if item and value is not None:
                value = value[int(item)] if isinstance(value, list) and int(item) < len(value) else None
                value = self.number(value, step["key"])
            begin, end = self.integer(step.get("begin", "0")), self.integer(step.get("end", str(rows)))
            if (factor := 1.0 if value is None else self.number(value, name)) != 1:
                if factor == 0:
                    raise self.unsupported(f"{name} is {show(self.values[name])}")
                result.append((begin, end, factor))
        return tuple(result)

    def size(self, *keys: str) -> int:
        """Return the positive integer of the first key of llama.cpp for which the config has a value."""
        for name, key in ((name, self._keys[name]) for name in keys):
            value = self.find(key.config)
            if value is None and key.value is not None and key.each_layer is None:
                value = self.integer(key.value)
            value = key.default if value is None else value
            if value is not None:
                return self.positive(value, (*key.config, name)[0])
        raise self.fault(f"{self._keys[keys[-1]].config[0]} is missing")

    def positive(self, value: Any, name: str) -> int:
        if type(value) is not int or not 0 < value <= _MAX_SIZE:
            raise self.fault(f"{name} must be a positive integer, got {show(value)}")
        return value

    @property
    def head_dim(self) -> int:
        key = self._keys["attention.key_length"]
        if key.value is not None:
            return self.positive(self.integer(key.value), key.value)
        if key.default is not None or self.find(key.config) is not None:
            return self.size("attention.key_length")
        return max(1, self.size("embedding_length") // self.size("attention.head_count"))


def settings_of(config: ModelConfig, form: GgufForm) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the metadata of a model in types of GGUF, and the tensors that hold settings: factors of rotations."""
    _refuse_other_settings(config, form)
    _check_layers(config, form)
    _check_windows(config, form)
    scale = config.values.get("query_pre_attn_scalar", form.defaults.get("query_pre_attn_scalar"))
    if scale is not None and form.query_scale_by_width is not None and scale != (usual := _query_scale(config, form)):
        raise config.unsupported(f"query_pre_attn_scalar is {show(scale)}, but llama.cpp uses {usual}")
    stated = ((name, _setting(config, key)) for name, key in form.keys.items() if key.config or key.value is not None)
    metadata = {name: value for name, value in stated if value is not None}
    experts, used = (metadata.get(key, 0) for key in ("expert_count", "expert_used_count"))
    if used > experts:
        raise config.fault(f"{used} of {experts} experts are used")
    for name, value in config.rope.keys(form) if form.rope.types else ():
        metadata.setdefault(f"rope.{name}", value)
    return {f"{form.architecture}.{name}": value for name, value in metadata.items()}, rotation_factors(config, form)


def settings_of_tower(config: ModelConfig, form: MmprojForm) -> dict[str, Any]:
    """Return the metadata of a vision tower in types of GGUF, in the order of llama.cpp's converter."""
    _refuse_other_settings(config, form)
    stated = ((name, _setting(config, key)) for name, key in form.keys.items())
    return {f"{form.architecture}.{name}": value for name, value in stated if value is not None}


def _refuse_other_settings(config: ModelConfig, form: GgufForm) -> None:
    """Refuse values of a config with which llama.cpp does not compute."""
    activation = config.find(form.activations["config"])
    if activation is not None and activation not in form.activations["values"]:
        raise config.unsupported(f"llama.cpp has no activation {show(activation)} for {form.title}")
    for setting, allowed in form.assumes.items():
        value = config.find((setting,))
        if value is not None and (tuple(value) if isinstance(value, list) else value) not in allowed:
            expected = " or ".join(show([] if item == () else item) for item in allowed)
            name = setting.removeprefix("whole.")
            raise config.unsupported(f"{name} is {show(value)}, but llama.cpp computes {form.title} as with {expected}")
    for text, condition in form.needs.items():
        if not config.holds(condition):
            for name in _NAMES.findall(text):
                value = form.architecture if name == "architecture" else show(config.find((name,)))
                text = text.replace(f"{{{name}}}", value)
            raise config.unsupported(text)


def rotation_factors(config: ModelConfig, form: GgufForm) -> dict[str, Array]:
    """Return the tensors with factors of rotations that follow from a config."""
    return config.rope.tensors(form) if form.rope.types else {}


def _setting(config: ModelConfig, key: GgufKey) -> Any:
    """Return the value of a key in its type of GGUF, or None if it is not written."""
    if key.when is not None and not config.integer(key.when):
        return None
    kind, name = key.types[0], next(iter(key.config), "")
    layers = 0 if key.each_layer is None else config.integer(key.each_layer)
    if layers:
        if not 0 <= layers <= MAX_LAYERS:
            raise config.fault(f"{key.each_layer} must be 0 to {MAX_LAYERS}, got {layers}")
        numbers = [config.integer(key.value or "0", layer) for layer in range(layers)]
        for number in numbers:
            if abs(number) > _MAX_I32:
                raise config.fault(f"{key.value} must be at most {_MAX_I32}, got {number}")
        return np.array(numbers, bool if kind == BOOLS else np.int32)
    if key.value is not None and key.each_layer is None:
        return _typed(config, kind, config.integer(key.value), key.value)
    value = config.find(key.config)
    if value is None:
        value = key.default
    if value is None:
        if key.optional:
            return None
        raise config.fault(f"{name} is missing")
    if key.values and (not isinstance(value, (str, bool)) or str(value) not in key.values):
        raise config.unsupported(f"llama.cpp has no {name} {show(value)}")
    return _typed(config, kind, key.values.get(str(value), value), name, times=key.times, size=key.size)


def _typed(config: ModelConfig, kind: str, value: Any, name: str, *, times: float = 1.0, size: int = 0) -> Any:
    if kind == F32:
        return gguf.F32(config.number(value, name) * times)
    if kind == U32:
        if type(value) is int and 0 <= value <= _MAX_SIZE:
            return gguf.U32(value)
        raise config.fault(f"{name} must be an integer from 0 to {_MAX_SIZE}, got {show(value)}")
    if kind == BOOL:
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise config.fault(f"{name} must be true or false, got {show(value)}")
    if kind == TEXT and isinstance(value, str):
        return value
    if kind == FLOATS and isinstance(value, (list, tuple)) and 0 < len(value) <= MAX_LAYERS:
        return np.array([config.number(item, name) for item in value], np.float32)
    listed = kind == NUMBERS and isinstance(value, (list, tuple)) and len(value) <= (size or MAX_LAYERS)
    if listed and all(type(item) is int and abs(item) <= _MAX_I32 for item in value):
        return np.array([*value, *[0] * (size - len(value))], np.int32)
    raise config.fault(f"{name} must be of type {kind}, got {show(value)}")


# ---- what llama.cpp assumes ----


def _query_scale(config: ModelConfig, form: GgufForm) -> int:
    """Return the number that llama.cpp divides queries by the root of."""
    heads, width = config.size("attention.head_count"), config.size("embedding_length")
    return width // heads if config.size("block_count") == form.query_scale_by_width else config.head_dim


def _kinds_of_layers(layers: int, full_every: int, windowed: str) -> list[str]:
    """Return ``layer_types``, as llama.cpp takes every layer of this number for one without a sliding window."""
    return [windowed if k % full_every else "full_attention" for k in range(1, layers + 1)]


def _check_layers(config: ModelConfig, form: GgufForm) -> None:
    """Refuse settings of single layers that llama.cpp has for all layers only."""
    by_layer = config.values.get("per_layer_config") or {}
    if not isinstance(by_layer, Mapping) or not all(isinstance(values, Mapping) for values in by_layer.values()):
        raise config.fault(f"per_layer_config must map layers to objects, got {show(by_layer)}")
    other = next((key for values in by_layer.values() for key in values if key not in form.per_layer), None)
    if other is not None:
        raise config.unsupported(f"per_layer_config: llama.cpp's {form.architecture} has no {show(other)} by layer")


def _check_windows(config: ModelConfig, form: GgufForm) -> None:
    """Check which layers have a sliding window; llama.cpp does not read this from the files of these models."""
    values, layers, every = config.values, config.size("block_count"), form.windows.full_every
    kinds = values.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise config.fault(f"layer_types must be a list of {layers} items, got {show(kinds)}")
    if every is not None:
        if kinds is not None and kinds != _kinds_of_layers(layers, every, form.windows.kind):
            raise config.unsupported(f"layer_types: llama.cpp uses full attention in every layer number {every}")
        if values.get("sliding_window_pattern") not in (None, every):
            raise config.unsupported(f"sliding_window_pattern must be {every}")
        return
    if form.windows.written is not None:
        other = next((kind for kind in kinds or () if kind not in ("full_attention", "sliding_attention")), None)
        if other is not None:
            raise config.unsupported(f"layer_types: llama.cpp's {form.architecture} has no {show(other)}")
        return
    window = values.get("sliding_window")
    usual = window is not None and values.get("use_sliding_window") is not False
    slides = usual if kinds is None else any(kind not in form.windows.kinds_without for kind in kinds)
    if slides and form.windows.ignored:
        effect = f"texts longer than {show(window)} tokens give other results than transformers"
        warning("%s has no sliding windows in llama.cpp: %s", form.architecture, effect)
    elif slides and window is None:
        raise config.unsupported(f"layer_types: llama.cpp has only {' and '.join(form.windows.kinds_without)} here")
    elif slides:
        raise config.unsupported(f"sliding_window is {show(window)}")


# ---- rotations ----


class Rope:
    """The settings of rotary embeddings, as transformers 5 writes them (``rope_parameters``), or older versions."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        content, older = (config.values.get(key) for key in ("rope_parameters", "rope_scaling"))
        for part in (content, older):
            if part is not None and not isinstance(part, Mapping):
                raise config.fault(f"rope_parameters must be an object, got {show(part)}")
        for key, value in (older or {}).items():
            if content is not None and content.get("rope_type" if key == "type" else key) != value:
                raise config.unsupported(f"rope_parameters and rope_scaling differ in {show(key)}")
        content = older if content is None else content
        parameters = dict(content or {})
        name = "rope_local_base_freq"
        sliding = config.find((name, "local_rope_theta", "rope_local_theta", "swa_rope_theta"))
        if "full_attention" in parameters or "sliding_attention" in parameters:
            full, windowed = (parameters.pop(key, None) for key in ("full_attention", "sliding_attention"))
            if parameters or not all(part is None or isinstance(part, Mapping) for part in (full, windowed)):
                raise config.fault(f"rope_parameters must map kinds of layers to objects, got {show(content)}")
            parameters, windowed = dict(full or {}), windowed or {}
            if windowed.get("rope_type", "default") != "default":
                raise config.unsupported(f"rope type {show(windowed['rope_type'])} of layers with a sliding window")
            if windowed.get("rope_theta") is not None:
                sliding, name = windowed["rope_theta"], "rope_theta"
        # the base of layers with a sliding window
        self.sliding_base = None if sliding is None else config.number(sliding, name)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        kind = _ROPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind
        if not isinstance(kind, str) or kind not in _ROPE_KEYS:
            raise config.unsupported(f"llama.cpp has no rope type {show(kind)} for this model")
        self.kind = kind  # "default", "linear", ...
        outside = {key: config.find(names) for key, names in _OUTSIDE_ROPE.items()}
        # of full attention
        self.full = {key: value for key, value in {**outside, **parameters}.items() if value is not None}

    def keys(self, form: GgufForm) -> Iterator[tuple[str, Any]]:
        """Yield the keys of rotations, without the architecture."""
        rope = form.rope
        for key in self.full:
            if key not in _ROPE_KEYS[self.kind] and key not in _ANY_ROPE and key not in rope.parameters:
                raise self.config.unsupported(f"rope parameter {show(key)} of type {self.kind} is unknown")
        if rope.dimensions == "head":
            yield "dimension_count", gguf.U32(self.config.head_dim)
        base = self.full.get("rope_theta", None if rope.base == USUAL_BASE else rope.base)
        if rope.single_base and self.sliding_base not in (None, base):
            raise self.config.unsupported(
                f"llama.cpp has the rope_theta {show(base)} in layers with a sliding window too"
            )
        if self.kind == "dynamic" and self.kind in rope.types:  # stretched by a fixed factor, as Hunyuan's
            if (base := self.full.get("rope_theta", USUAL_BASE)) != USUAL_BASE:
                raise self.config.unsupported(f"rope_theta is {show(base)}, but llama.cpp stretches {USUAL_BASE}")
            base *= self._number("alpha") ** (self.config.head_dim / max(1, self.config.head_dim - 2))
            yield "scaling.type", "none"
            yield "scaling.factor", gguf.F32(1.0)
            yield "scaling.original_context_length", gguf.U32(_STRETCHED)
        elif self.kind == "dynamic" and self._number("factor") != 1:  # which begins beyond the context
            text = "llama.cpp has no dynamic scaling of rotations: texts longer than %d tokens give other results"
            warning(f"{text} than transformers", self.config.size("context_length"))
        if base is not None and base != rope.unless:
            yield "freq_base", gguf.F32(self.config.number(base, "rope_theta"))
        if self.sliding_base is not None or rope.sliding:
            usual = base if rope.single_base else USUAL_BASE
            yield "freq_base_swa", gguf.F32(usual if self.sliding_base is None else self.sliding_base)
        if self.kind in ("linear", "yarn"):
            yield "scaling.type", self.kind
            yield "scaling.factor", gguf.F32(self._number("factor"))
        if self.kind == "yarn":
            yield "scaling.original_context_length", gguf.U32(self._original())
            for key, names in _YARN.items():
                name = next(filter(self.full.__contains__, names), None)
                if name is not None:
                    yield f"scaling.{key}", gguf.F32(self._number(name))
        if rope.dimensions in ("partial", "share"):
            yield "dimension_count", gguf.U32(self._rotated(rope.share))
        if rope.dimensions == "partial":
            original = self._original()
            yield "scaling.original_context_length", gguf.U32(original)
            if self.kind == "longrope":
                scale = self.config.size("context_length") / original
                factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 and original > 1 else 1.0
                yield "scaling.attn_factor", gguf.F32(factor)
        elif (partial := self.full.get("partial_rotary_factor", 1)) != 1 and rope.dimensions not in ("share", "keys"):
            raise self.config.unsupported(f"partial_rotary_factor is {show(partial)}")

    def tensors(self, form: GgufForm) -> dict[str, Array]:
        if self.kind not in form.rope.types and not (self.kind == "dynamic" and "default" in form.rope.types):
            raise self.config.unsupported(f"llama.cpp has no rope type {show(self.kind)} for {form.architecture}")
        if self.kind == "llama3":
            return {"rope_freqs.weight": self._llama3()}
        if self.kind == "proportional":  # divisors: 1 for the first part of a head, and beyond all numbers for the rest
            size, share = self.config.head_dim, self._number("partial_rotary_factor", 1.0)
            if not 0 <= share <= 1 or size // 2 > MAX_FACTORS:
                raise self.config.fault(
                    f"partial_rotary_factor must be 0 to 1, got {share} of heads with {size} values"
                )
            divisors = np.where(np.arange(size // 2) < int(size * share / 2), 1, 1e30)
            return {"rope_freqs.weight": divisors.astype(np.float32)}
        result = {}
        for key in ("long_factor", "short_factor") if self.kind == "longrope" else ():
            count, factors = self._rotated() // 2, self.full.get(key)
            if not isinstance(factors, list) or len(factors) != count or count > MAX_FACTORS:
                raise self.config.fault(f"{key} must be a list of {count} numbers, got {show(factors)}")
            numbers = [self.config.number(factor, key) for factor in factors]
            result[f"rope_factors_{key.removesuffix('_factor')}.weight"] = np.array(numbers, np.float32)
        return result

    def _rotated(self, usual: float = 1.0) -> int:
        """Return the elements of a head that are rotated."""
        share = self._number("partial_rotary_factor", usual)
        if not 0 < share <= 1:
            raise self.config.fault(f"partial_rotary_factor must be above 0 and at most 1, got {share}")
        return int(share * self.config.size("embedding_length")) // self.config.size("attention.head_count")

    def _number(self, key: str, default: float | None = None) -> float:
        value = self.full.get(key, default)
        if value is None:
            raise self.config.fault(f"rope parameter {key} is missing")
        return self.config.number(value, key)

    def _original(self) -> int:
        """Return the context length of training; by default, as in transformers 5, that of the model."""
        stated = self.full.get(_ORIGINAL, self.config.values.get(_ORIGINAL))
        return self.config.size("context_length") if stated is None else self.config.positive(stated, _ORIGINAL)

    def _llama3(self) -> Array:
        """Return the divisors of Llama 3.1's frequencies, computed like llama.cpp's converter in f32."""
        size = self.config.head_dim
        if size // 2 > MAX_FACTORS:
            raise self.config.fault(f"head_dim must be at most {2 * MAX_FACTORS}, got {size}")
        base = np.float32(self._number("rope_theta", USUAL_BASE))
        if not base > 0:
            raise self.config.fault(f"rope_theta must be above 0, got {base}")
        unit, exponents = np.float32(1), np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        # torch rounds powers better than NumPy does in f32, and divides a number by a tensor in two steps.
        frequencies = unit / np.power(np.float64(base), exponents, dtype=np.float64).astype(np.float32)
        factor = self._number("factor", 8.0)
        low, high = self._number("low_freq_factor", 1.0), self._number("high_freq_factor", 4.0)
        original = self._number(_ORIGINAL) if _ORIGINAL in self.full else self._original()
        if not (0 < low <= high and factor > 0 and original > 0):
            text = "rope parameters of llama3 must have 0 < low_freq_factor <= high_freq_factor and factor > 0"
            raise self.config.fault(text)
        with np.errstate(all="ignore"):  # of values that are not chosen
            lengths = unit / frequencies * np.float32(2 * math.pi)
            smooth = (unit / lengths * np.float32(original) - np.float32(low)) / np.float32(high - low)
            between = unit / ((unit - smooth) / np.float32(factor) + smooth)
            factors: Array = np.where(lengths > original / low, np.float32(factor), between)
        result = np.where(lengths < original / high, unit, factors)
        if not np.isfinite(result).all():  # a length is at both bounds
            raise self.config.fault("rope parameters of llama3 give a factor that is not finite")
        return result


# ---- the way back: the config of a file that another program wrote ----


def value_at(catalog: Catalog, key: str, kind: str = F32) -> Any:
    """Return the value of a key that must be of a type of `_READ`, as Python has it; None without the key."""
    # A float is the shortest decimal number that an f32 stands for. An integer can be given for every layer.
    value = of_all_layers(catalog.metadata.get(key))
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    fits, expected = {
        U32: (number and isinstance(value, int) and value >= 0, "a number of at least 0 without a fraction"),
        F32: (number, "a number"),
        TEXT: (isinstance(value, str), "a string"),
        BOOL: (isinstance(value, bool), "a bool"),
        BOOLS: (
            isinstance(value, np.ndarray) and value.dtype == bool and value.size <= MAX_LAYERS,
            "an array of bools",
        ),
    }[kind]
    if value is not None and not fits:
        raise FormatError(f"key {key} must be {expected}, got {show(value)}", catalog.title)
    if number:
        return _shortest(value) if isinstance(value, float) else int(value)
    return value.tolist() if isinstance(value, np.ndarray) else value


_READ = (U32, F32, BOOL, BOOLS)  # the types of keys that become a key of a config


def _shortest(value: float) -> float:
    """Return the shortest decimal number that stands for a number as f32."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def _whole_at(catalog: Catalog, key: str) -> int:
    """Return an integer, 1 for another number, or 0 without the key."""
    value = value_at(catalog, key) or 0
    return 1 if isinstance(value, float) and not value.is_integer() else int(value)


def form_of(catalog: Catalog) -> GgufForm:
    """Return the family of a foreign file: chosen by a key of the file, or the usual family."""
    architecture = str(catalog.metadata[ARCHITECTURE])
    for form in gguf_forms().values():
        if form.architecture == architecture and form.chosen_by is not None:
            names = {key.replace(".", "_"): f"{architecture}.{key}" for key in form.keys}
            sizes = {name: _whole_at(catalog, names[name]) for name in names_in(form.chosen_by)}
            try:
                chosen = Config(sizes, {}, METADATA).evaluate(form.chosen_by)
            except ConfigError as error:
                raise FormatError(f"sizes of the model: {error}", catalog.title) from None
            if chosen:
                return form
    return gguf_architectures()[architecture]


def config_of(catalog: Catalog, form: GgufForm) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a foreign file, and the settings that the file lacks."""
    config: dict[str, Any] = {"architectures": [form.class_name], "model_type": form.model_type}
    for name, key in ((name, key) for name, key in form.keys.items() if key.config and key.types[0] in _READ):
        if key.config[0].startswith("rope.") or key.config[0] in form.computed:  # see `_add_rope` and `_computed`
            continue
        value = value_at(catalog, f"{form.architecture}.{name}", key.types[0])
        if value is not None and (value or name not in _NONE_IF_ZERO):
            texts = {written: text for text, written in key.values.items()}
            named = [texts.get(item, item) for item in value] if isinstance(value, list) else texts.get(value, value)
            config[key.config[0]] = named
        elif key.null:
            config[key.config[0]] = None
        elif not key.optional and key.default is None and key.when is None:
            raise FormatError(f"key {form.architecture}.{name} is missing", catalog.title)
    name = "token_embd.weight"
    if name not in catalog:
        raise error_about(FormatError, "is missing", path=catalog.title, tensor=name)
    shape = catalog.about(name).shape
    if len(shape) != 2:
        raise error_about(FormatError, f"has the shape {list(shape)}, expected 2 axes", path=catalog.title, tensor=name)
    config |= {
        **_computed(catalog, form, int(shape[0])),
        "vocab_size": int(shape[0]),
        "tie_word_embeddings": "output.weight" not in catalog,
        "attention_bias": "blk.0.attn_q.bias" in catalog or "blk.0.attn_qkv.bias" in catalog,
        form.activations["config"][0]: form.activations["values"][0],
        **{key: form.assumes[key][0] for key in form.restores},
    }
    for setting, (pattern, *values) in form.shown_by.items():
        config[setting] = values[any(fnmatchcase(each, pattern) for each in catalog)]
    for name, kind in _TOKENS.items():
        number = value_at(catalog, f"tokenizer.ggml.{kind}_token_id")
        # llama.cpp has -1 for no token.
        config[name] = number if isinstance(number, int) and 0 <= number < config["vocab_size"] else None
    if form.query_scale_by_width is not None:
        config["query_pre_attn_scalar"] = _query_scale(ModelConfig(config, catalog.title, form), form)
    if form.windows.full_every is not None and config["num_hidden_layers"] <= 10_000:
        config["layer_types"] = _kinds_of_layers(
            config["num_hidden_layers"], form.windows.full_every, form.windows.kind
        )
    if form.windows.written is not None:
        sliding = np.asarray(catalog.metadata.get(f"{form.architecture}.{form.windows.written}", ()), bool).reshape(-1)
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding] or None
    if form.rope.types:
        _add_rope(config, catalog, form)
    notes = ["the dtype of the weights before conversion"]
    if form.windows.ignored and "sliding_window" not in config:
        notes.append("a sliding window, which llama.cpp ignores")
        config["sliding_window"] = None
    _check_rope(catalog, config, form)
    return config, notes


def _computed(catalog: Catalog, form: GgufForm, tokens: int) -> dict[str, Any]:
    """Return the keys of a config that follow from several keys of a file, or from the numbers of its tensors."""
    counts: dict[str, Any] = {}
    for module, part in (name.split(".")[2:4] for name in catalog if without_numbers(name)[0].count(".") == 3):
        counts.setdefault(module, Counter())[part] += 1
    values = {**form.sizes(catalog.metadata, (), tokens), "tensors": counts}
    sizes = Config(values, form.schema.defaults, METADATA)
    result: dict[str, Any] = {}

    def chosen(entry: Mapping[str, Any], layer: int | None = None) -> Any:
        number, values = sizes.evaluate(entry["value"], layer), entry["values"]
        if not 0 <= number < len(values):
            raise ConfigError(f"{entry['value']} is {number}, which means no known kind of layer")
        return values[number]

    try:
        for name, entry in form.computed.items():
            if isinstance(entry, str):
                result[name] = sizes.evaluate(entry)
            elif "each_layer" not in entry:
                result[name] = chosen(entry)
            elif 0 <= (layers := sizes.evaluate(entry["each_layer"])) <= MAX_LAYERS:
                result[name] = [chosen(entry, layer) for layer in range(layers)]
            else:
                raise ConfigError(f"{entry['each_layer']} must be 0 to {MAX_LAYERS}, got {layers}")
    except ConfigError as error:
        raise FormatError(f"sizes of the model: {error}", catalog.title) from None
    return result


def _add_rope(config: dict[str, Any], catalog: Catalog, form: GgufForm) -> None:
    prefix = f"{form.architecture}.rope."

    def number(key: str, default: float) -> float:
        value = value_at(catalog, prefix + key)
        return default if value is None else value

    def head_dim() -> int:
        size: int = config.get("head_dim") or config["hidden_size"] // max(1, config["num_attention_heads"])
        return size

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": number("freq_base", USUAL_BASE)}
    kind = value_at(catalog, f"{prefix}scaling.type", TEXT) or "none"
    if kind not in ("none", "linear", "yarn", "longrope"):
        text = f"rope scaling of type {show(kind)} is unknown; raw=True keeps the tensors"
        raise UnsupportedError(f"{catalog.title}: {text}")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": number("scaling.factor", 1.0)}
    if kind == "yarn":
        stated = ((names[0], value_at(catalog, f"{prefix}scaling.{key}")) for key, names in _YARN.items())
        rope[_ORIGINAL] = number("scaling.original_context_length", 0)
        rope |= {**{name: value for name, value in stated if value is not None}, "truncate": True}
    if "dynamic" in form.rope.types and kind == "none" and number("scaling.original_context_length", 0) == _STRETCHED:
        if not rope["rope_theta"] > 0:
            raise FormatError(f"key {prefix}freq_base must be above 0, got {rope['rope_theta']}", catalog.title)
        size = head_dim()
        alpha = _shortest((rope["rope_theta"] / USUAL_BASE) ** ((size - 2) / max(1, size)))
        rope |= {"rope_type": "dynamic", "rope_theta": USUAL_BASE, "alpha": alpha, "factor": 1.0}
    for key, field in form.keys.items():
        names = [name.removeprefix("rope.") for name in field.config if name.startswith("rope.")]
        names = names if field.types[0] in (U32, F32) else []
        value = value_at(catalog, f"{form.architecture}.{key}") if names else None
        rope |= {name: _shortest(value / field.times) for name in names if value is not None}
    for key in [key for key in config if key.startswith("rope.")]:  # that llama.cpp assumes
        rope[key.removeprefix("rope.")] = config.pop(key)
    if "rope_freqs.weight" in catalog:
        factors = _factors_in(catalog, "rope_freqs.weight")
        share, largest = (factors == 1).sum().item() / max(1, factors.size), factors.max() if factors.size else 1.0
        if "proportional" in form.rope.types:
            rope |= {"rope_type": "proportional", "partial_rotary_factor": share}
        else:
            rope |= {"rope_type": "llama3", "factor": _shortest(largest), **_LLAMA_3}
    if "rope_factors_long.weight" in catalog and "rope_factors_short.weight" in catalog:
        rope["rope_type"] = "longrope"
        for name in ("long", "short"):
            rope[f"{name}_factor"] = [*map(_shortest, _factors_in(catalog, f"rope_factors_{name}.weight").tolist())]
    if form.rope.dimensions in ("partial", "share"):
        heads, width = max(1, config["num_attention_heads"]), config["hidden_size"]
        rotated = number("dimension_count", width // heads) * heads
        share = rotated / max(1, width)
        # The next number above if the quotient is rounded down.
        stated_twice = {"partial_rotary_factor": share if share * width >= rotated else math.nextafter(share, 2)}
        if form.rope.dimensions == "partial":
            stated_twice[_ORIGINAL] = number("scaling.original_context_length", config["max_position_embeddings"])
        rope |= stated_twice
        config |= stated_twice
    count = form.keys.get("rope.dimension_count", GgufKey(())).value or ""
    if "partial_rotary_factor" in form.rope.parameters or "rope.partial_rotary_factor" in count:
        width = max(1, head_dim())
        rope["partial_rotary_factor"] = number("dimension_count", width) / width
    sections = catalog.metadata.get(f"{prefix}dimension_sections")
    if "mrope_section" in form.rope.parameters and isinstance(sections, np.ndarray) and sections.dtype.kind in "iu":
        rope["mrope_section"] = sections[:3].tolist()
    config["rope_parameters"] = rope
    if form.rope.sliding:
        usual = rope["rope_theta"] if form.rope.single_base else USUAL_BASE
        sliding = {"rope_type": "default", "rope_theta": number("freq_base_swa", usual)}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}


def _factors_in(catalog: Catalog, name: str) -> Array:
    size = math.prod(catalog.about(name).shape)
    if size > MAX_FACTORS:
        raise error_about(FormatError, f"has {size:,} factors of rotations", path=catalog.title, tensor=name)
    return catalog.array(name).reshape(-1)


def has_rotations(catalog: Catalog, tensors: Mapping[str, Array]) -> bool:
    """Return True if a file has exactly these factors of rotations."""
    return all(name in tensors or name not in catalog for name in ROPE_TENSORS) and all(
        name in catalog
        and catalog.about(name).shape == expected.shape
        and np.allclose(catalog.array(name), expected, rtol=1e-5, atol=0)
        for name, expected in tensors.items()
    )


def _check_settings(catalog: Catalog, settings: Mapping[str, Any], form: GgufForm) -> None:
    """Refuse a file with another value than that which follows from a config: another model of the architecture."""
    unknown = {*form.counted, "vision_config"}  # which the config of a language model does not have
    for name, key in form.keys.items():
        names = names_in(f"{key.value} {key.each_layer}")
        if key.value is None or name == "context_length" or unknown & {text.split(".")[0] for text in names}:
            continue
        full = f"{form.architecture}.{name}"
        values = (of_all_layers(each.get(full)) for each in (catalog.metadata, settings))
        stated, expected = (value.tolist() if isinstance(value, np.ndarray) else value for value in values)
        if None not in (stated, expected) and stated != expected:
            text = f"key {full} is {show(stated)}, but {form.class_name} has {show(expected)} with "
            raise UnsupportedError(f"{catalog.title}: {text}the other keys; raw=True keeps the tensors")


def _check_rope(catalog: Catalog, config: dict[str, Any], form: GgufForm) -> None:
    """Compare the settings of rotations with the tensors of the file."""
    rope = config.get("rope_parameters", {})
    unknown = product(_HIGH, _CONTEXTS) if rope.get("rope_type") == "llama3" else [None]  # gemma3's is nested, not this
    for stated in unknown:
        if stated is not None:
            rope["high_freq_factor"], rope[_ORIGINAL] = stated
        settings, tensors = settings_of(ModelConfig(config, catalog.title, form), form)
        if has_rotations(catalog, tensors):
            _check_settings(catalog, settings, form)
            return
    text = "the factors of rotations need unknown settings; raw=True keeps the tensors"
    raise UnsupportedError(f"{catalog.title}: {text}")
