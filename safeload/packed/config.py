"""The quantization that a ``config.json`` describes, whatever tool wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

from ..base import packing
from ..base.cached import cached_property
from ..base.packing import Grid
from ..base.text import clip, printable, show
from .globs import Globs
from .methods import TENSORRT, WEIGHTS, method_of, spelling_of, unknown
from .patterns import compiled

# Depth to which a configuration is searched for a quantization: thinker_config.text_config is the deepest known.
_CONFIG_DEPTH = 4
_CONFIG_KEYS = ("quantization_config", "compression_config")
# Keys that list modules that are not quantized.
_OTHER_MODULES = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
# The key of mlx-lm, which also stores a copy under the first of `_CONFIG_KEYS`, without a method; and of TensorRT-LLM.
_MLX = "quantization"
# Names that auto-round gives its method.
AUTO_ROUND = ("auto-round", "intel/auto-round")
# Methods that have settings of single modules under `Quantization.overrides`.
_WITH_OVERRIDES = frozenset(("fp8", "gptq", "awq", *AUTO_ROUND))
# Orders of the codes in a word, by their names in Quark's ``pack_method``.
QUARK_ORDERS = {"reorder": packing.WORDS, "order": packing.ROWS}
# What auto-round's ``packing_format``, and ``backend`` before it, is made of where words are those of GPTQ or AWQ:
# names of the layout, and of kernels that take it, as in "auto_round:gptq:exllamav2".
_ROUNDS = frozenset(
    (
        "auto", "auto_round", "auto_gptq", "auto_awq", "gptq", "awq", "gptqmodel", "exllama", "exllamav2", "tritonv2",
        "torch",
    )
)  # fmt: skip
# Characters that make a key of ``extra_config`` a pattern.
_OF_PATTERNS = "*^$|()[]?+\\"
# Codes of more bits are not quantized.
_MOST_BITS = 8
# Longest side of a block. Tensors of one scale have none.
_LONGEST_BLOCK = 1 << 31


@dataclass(frozen=True)
class Quantization:
    """The description of quantized weights in a ``config.json``.

    Attributes:
        key: the key that holds it, such as "quantization_config".
        method: the method of quantization, such as "gptq"; None if not given.
        values: everything under the key.
    """

    key: str
    method: str | None
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return self.key if self.method is None else f"{self.key} {self.method[:40]}"

    @property
    def shown(self) -> str:
        """The method, and the setting because of which it is not read."""
        method, why = self.method or self.key, self.variant or self.unknown
        return method if why is None or why.startswith("quant_method") else f"{method}, {why}"

    @property
    def variant(self) -> str | None:
        """The key and the value of an arrangement of words by auto-round that is not read; None else."""
        for key in ("packing_format", "backend") if self.method in AUTO_ROUND else ():
            given = self.get(key)
            if isinstance(given, str):
                return None if _ROUNDS.issuperset(given.lower().split(":")) else f"{key} {brief(given)}"
        return None

    @cached_property
    def unknown(self) -> str | None:
        """The first setting of all modules that may change their values in an unknown way, as text."""
        if not self.method:
            return None
        row = method_of(self.method)
        if row is None:
            return f"quant_method {brief(self.method)}"
        values = self.values
        if self.method == "mlx":  # the other keys are names of modules
            values = {key: value for key, value in values.items() if not isinstance(value, (Mapping, bool))}
        return _setting(unknown(values, row))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether `unknown` holds for each module: none has settings of its own, or weights of an unknown kind."""
        own = self.get(self.overrides) if self.method in _WITH_OVERRIDES else self.get("quantized_layers")
        if self.method == "mlx":
            own = any(isinstance(value, Mapping) for value in self.values.values())
        return not own and not any(self._unknown_weights.values())

    def unknown_of(self, module: str, own: Mapping[str, Any] | None, described: list[Mapping[str, Any]]) -> str | None:
        """Like `unknown`, for one module.

        Args:
            module: its name.
            own: `of_layer` of the module.
            described: `weights` of the module.
        """
        row = method_of(self.method) if self.method else None
        if self.unknown is not None or row is None:
            return self.unknown
        if self.method == "mlx":
            own = self.get(module)
        elif self.method == "modelopt":
            own = self.of_modelopt(module)
        found = unknown(own, row) if isinstance(own, Mapping) else None
        if found is None and described:
            found = next(filter(None, (self._unknown_weights[id(weights)] for weights in described)), None)
        return _setting(found)

    @property
    def overrides(self) -> str:
        """The key of what holds for single layers."""
        return "extra_config" if self.method in AUTO_ROUND else "dynamic"

    def of_layer(self, module: str) -> Mapping[str, Any] | None:
        """What GPTQModel or auto-round says of one layer, apart from what holds for all; None: it is not quantized.

        Raises:
            UnsupportedError: a pattern is outside the subset that `patterns` matches.
        """
        key = self.overrides
        given = self.get(key) if self.method in _WITH_OVERRIDES else None
        if not isinstance(given, Mapping):
            return {}
        if key == "extra_config":
            return self._of_layer_by_name(given, module)
        for pattern, own in given.items():
            if compiled(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, key).matches(module):
                return None if pattern.startswith("-:") else _mapping(own)
        return {}

    def _of_layer_by_name(self, given: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
        """The entry of ``extra_config`` for a layer: under its name, else under a pattern that is found in it."""
        own = given.get(module)
        if own is None:
            matching = (
                key
                for key in self._layer_patterns
                if given[key] and compiled(_anywhere(key), "extra_config").matches(module)
            )
            own = given.get(next(matching, ""))
        own = _mapping(own)
        bits = own.get("bits")
        return None if type(bits) is int and bits > _MOST_BITS else own

    @cached_property
    def _layer_patterns(self) -> list[str]:
        """The keys of ``extra_config`` that are patterns; a checkpoint may name each of its 100,000 experts."""
        return [key for key in _mapping(self.get("extra_config")) if any(char in key for char in _OF_PATTERNS)]

    def of_quark(self, module: str) -> Mapping[str, Any]:
        """What Quark says of a layer: under the first name or glob that matches it, else of its type, else of all.

        Raises:
            UnsupportedError: a glob is outside the subset that `globs` matches.
        """
        found = self._quark_globs.first(module)
        if found is not None:
            return _mapping(_mapping(self.get("layer_quant_config")).get(found))
        return _mapping(_mapping(self.get("layer_type_quant_config")).get("Linear", self.get("global_quant_config")))

    def of_modelopt(self, module: str) -> Mapping[str, Any]:
        """The settings of a layer under ``quantized_layers``, which names the layer or a module that holds it."""
        layers = _mapping(self.get("quantized_layers"))
        while layers and module:
            if module in layers:
                return _mapping(layers[module])
            module = module.rpartition(".")[0]
        return {}

    def algorithm(self, module: str) -> str | None:
        """The ``quant_algo`` of modelopt for a layer: the layer's own, else the one for all layers."""
        value = self.of_modelopt(module).get("quant_algo") or self.get("quant_algo")
        return value if isinstance(value, str) else None

    @cached_property
    def _quark_globs(self) -> Globs:
        return Globs(_mapping(self.get("layer_quant_config")), "layer_quant_config")

    def get(self, key: str) -> Any:
        """A value; None where it is missing."""
        return self.values.get(key)

    def text(self) -> str:
        """The description as JSON, for a file of packed tensors alone; without lists of other modules."""
        # Only the keys here are sorted: of the patterns of `dynamic` the first that matches counts.
        values = {key: value for key, value in sorted(self.values.items()) if key not in _OTHER_MODULES}
        import json  # as in stores/json_file

        return json.dumps({self.key: values})

    @property
    def has_block(self) -> bool:
        """Whether ``weight_block_size`` has rows and columns of a block."""
        return _is_block(self.get("weight_block_size"))

    def block(self, default: tuple[int, int]) -> tuple[int, int]:
        """``weight_block_size``: rows and columns of a block."""
        given = self.get("weight_block_size")
        return (given[0], given[1]) if _is_block(given) else default

    def of_module(self, module: str) -> Mapping[str, Any]:
        """What mlx-lm says of one module: its own entry, or that of all."""
        own = self.get(module)
        return {**self.values, **own} if isinstance(own, Mapping) else self.values

    @cached_property
    def grids(self) -> dict[tuple[int, tuple[int, ...], tuple[int, ...]], Grid | None]:
        """Grids of scales by the identity of a description, the shape of codes and that of scales; see `group`."""
        return {}

    def weights(self, module: str) -> list[Mapping[str, Any]]:
        """Descriptions of weights in ``config_groups`` of compressed-tensors: those that target the module, else all.

        Raises:
            UnsupportedError: a target is a pattern outside the subset that `patterns` matches.
        """
        described = self._described
        if len(described) < 2:
            return described
        targeted = [
            weights
            for weights, targets in self._weights
            if isinstance(targets, list) and any(_is_target(target, module) for target in targets)
        ]
        return targeted or described

    @cached_property
    def _described(self) -> list[Mapping[str, Any]]:
        return [weights for weights, _ in self._weights]

    @cached_property
    def _unknown_weights(self) -> dict[int, tuple[str, Any] | None]:
        """`unknown` of each description in `_weights`, by its identity."""
        return {id(weights): unknown(weights, WEIGHTS) for weights, _ in self._weights}

    @cached_property
    def _weights(self) -> list[tuple[Mapping[str, Any], Any]]:
        """Descriptions of weights with their targets; a single one if all are alike, whatever their targets are."""
        groups = self.get("config_groups")
        if not groups and isinstance(self.get("weights"), Mapping):
            groups = {"": self.values}  # modelopt, without groups
        found: list[tuple[Mapping[str, Any], Any]] = [
            ({**group["weights"], "format": group.get("format")}, group.get("targets"))
            for group in (groups.values() if isinstance(groups, Mapping) else ())
            if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
        ]
        return found[:1] if all(weights == found[0][0] for weights, _ in found) else found


def _setting(found: tuple[str, Any] | None) -> str | None:
    if found is None:
        return None
    key, value = found
    return f"{brief(key)} {brief(value) if isinstance(value, str) else brief(show(value))}"


def brief(text: str) -> str:
    """What a configuration says, for messages."""
    return clip(printable(text), 40)


def _anywhere(pattern: str) -> str:
    """A pattern that is found anywhere in a name, unless it says where it begins."""
    return pattern if pattern.startswith("^") else f".*(?:{pattern})"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_target(target: Any, module: str) -> bool:
    if not isinstance(target, str):
        return False
    if target.startswith("re:"):
        return compiled(target[3:], "config_groups").matches(module)
    return target == module


def _is_block(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and len(given) == 2 and all(map(is_length, given))


def is_length(value: Any) -> TypeGuard[int]:
    """Whether a value of a configuration can be the length of a block."""
    return type(value) is int and 0 < value < _LONGEST_BLOCK


@lru_cache(maxsize=4)  # of one checkpoint all packed tensors have the same text
def _of_text(text: str) -> Quantization | None:
    import json  # as above

    return quantization_of(json.loads(text))


def is_kept_by(text: str | None, module: str, new: str) -> bool:
    """Whether a description as `Quantization.text` gives it says the same of a module under another name.

    Without a description, None or "", nothing is said of any.
    """
    said = _of_text(text) if text else None
    if said is not None and said.get("module_quant_configs") and module != new:
        return False  # its patterns are matched where its bits are known, in `gemma`
    return said is None or all(
        of(module) == of(new) for of in (said.of_module, said.of_layer, said.of_quark, said.weights)
    )


def quantization_of(config: Mapping[str, Any] | None) -> Quantization | None:
    """The quantization in a ``config.json``, including nested configurations; None without one."""
    level = [] if config is None else [config]
    for _ in range(_CONFIG_DEPTH):
        for holder in level:
            for key in _CONFIG_KEYS:
                found = holder.get(key)
                if isinstance(found, Mapping) and found:
                    said = _unwrapped(found)
                    return Quantization(key, _method(said), said)
            found = holder.get(_MLX)
            if isinstance(found, Mapping) and {"bits", "group_size"} <= found.keys():
                return Quantization(_MLX, "mlx", found)
            if isinstance(found, Mapping) and isinstance(found.get("quant_algo"), str):
                return Quantization(_MLX, TENSORRT, found)
        level = [value for holder in level for value in holder.values() if isinstance(value, Mapping)]
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` that says nothing of a quantization, nor do its nested configurations."""
    return {
        key: without_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in (*_CONFIG_KEYS, _MLX) or not isinstance(value, Mapping)
    }


def _unwrapped(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings, also if they are those of an hf_quant_config.json, where "quantization" holds them."""
    inner = said.get(_MLX)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("quant_algo"), str):
        return said
    return {**{key: value for key, value in said.items() if key != _MLX}, **inner}


def _method(said: Mapping[str, Any]) -> str | None:
    if isinstance(said.get("quant_method"), str):
        return spelling_of(said["quant_method"])
    if isinstance(said.get("quant_algo"), str):
        return "modelopt"
    if isinstance(said.get("format"), str):
        return spelling_of(said["format"])
    if said.get("load_in_4bit") or said.get("load_in_8bit"):
        return "bitsandbytes"
    return "mlx" if {"bits", "group_size"} <= said.keys() else None
