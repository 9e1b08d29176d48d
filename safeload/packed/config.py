"""The quantization that a ``config.json`` describes, whatever tool wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeGuard

from .patterns import compiled

# Depth to which a configuration is searched for a quantization: thinker_config.text_config is the deepest known.
_CONFIG_DEPTH = 4
_CONFIG_KEYS = ("quantization_config", "compression_config")
# Keys that list modules that are not quantized.
_OTHER_MODULES = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
# The key of mlx-lm, which also stores a copy under the first of `_CONFIG_KEYS`, without a method.
_MLX = "quantization"
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

    def get(self, key: str) -> Any:
        """A value; None where it is missing."""
        return self.values.get(key)

    def text(self) -> str:
        """The description as JSON, for a file of packed tensors alone; without lists of other modules."""
        values = {key: value for key, value in self.values.items() if key not in _OTHER_MODULES}
        import json  # as in stores/json_file

        return json.dumps({self.key: values}, sort_keys=True)

    def block(self, default: tuple[int, int]) -> tuple[int, int]:
        """``weight_block_size``: rows and columns of a block."""
        given = self.get("weight_block_size")
        return (given[0], given[1]) if _is_block(given) else default

    def of_module(self, module: str) -> Mapping[str, Any]:
        """What mlx-lm says of one module: its own entry, or that of all."""
        own = self.get(module)
        return {**self.values, **own} if isinstance(own, Mapping) else self.values

    def weights(self, module: str) -> list[Mapping[str, Any]]:
        """Descriptions of weights in ``config_groups`` of compressed-tensors: those that target the module, else all.

        Raises:
            UnsupportedError: a target is a pattern outside the subset that `patterns` matches.
        """
        described = [weights for weights, _ in self._weights]
        if len(described) < 2:
            return described
        targeted = [
            weights
            for weights, targets in self._weights
            if isinstance(targets, list) and any(_is_target(target, module) for target in targets)
        ]
        return targeted or described

    @cached_property
    def _weights(self) -> list[tuple[Mapping[str, Any], Any]]:
        """Descriptions of weights with their targets; a single one where all are alike, whatever their targets are."""
        groups = self.get("config_groups")
        found = [
            (group["weights"], group.get("targets"))
            for group in (groups.values() if isinstance(groups, Mapping) else ())
            if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
        ]
        return found[:1] if all(weights == found[0][0] for weights, _ in found) else found


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
    return said is None or (said.of_module(module) == said.of_module(new) and said.weights(module) == said.weights(new))


def quantization_of(config: Mapping[str, Any] | None) -> Quantization | None:
    """The quantization in a ``config.json``, including nested configurations; None without one."""
    level = [] if config is None else [config]
    for _ in range(_CONFIG_DEPTH):
        for holder in level:
            for key in _CONFIG_KEYS:
                found = holder.get(key)
                if isinstance(found, Mapping) and found:
                    return Quantization(key, _method(found), found)
            found = holder.get(_MLX)
            if isinstance(found, Mapping) and {"bits", "group_size"} <= found.keys():
                return Quantization(_MLX, "mlx", found)
        level = [value for holder in level for value in holder.values() if isinstance(value, Mapping)]
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` that says nothing of a quantization, nor do its nested configurations."""
    return {
        key: without_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in (*_CONFIG_KEYS, _MLX) or not isinstance(value, Mapping)
    }


def _method(said: Mapping[str, Any]) -> str | None:
    for key in ("quant_method", "quant_algo", "format"):
        if isinstance(said.get(key), str):
            return str(said[key])
    if said.get("load_in_4bit") or said.get("load_in_8bit"):
        return "bitsandbytes"
    return "mlx" if {"bits", "group_size"} <= said.keys() else None
