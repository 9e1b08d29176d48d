"""``adapter_config.json`` of PEFT and of MLX: the settings that the values of a merged tensor depend on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base import log
from ..base.messages import error_about
from ..base.text import show
from ..errors import FormatError, UnsupportedError
from ..packed.patterns import compiled

CONFIG = "adapter_config.json"

# Ranks and alphas of PEFT's LoraConfig that its files leave out.
_RANK, _ALPHA = 8, 8
_MOST_RANK = 1 << 20
# Ways to begin the training that change the base, unless the adapter was converted afterwards.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Settings that change which tensors the adapter belongs to.
_REFUSED = {
    "layer_replication": "repeats layers of the base",
    "trainable_token_indices": "changes rows of embeddings",
}


# Variants, whose change is another one than s * B A, or that change the base when training begins.
_VARIANTS = (
    "use_bdlora", "alora_invocation_tokens", "arrow_config", "use_qalora", "kasa_config", "monteclora_config",
)  # fmt: skip
# Most names of a list, and most characters of each: they are compared with the names of modules.
_MOST_NAMES, _LONGEST = 10_000, 1000


class AdapterSettings(NamedTuple):
    """The settings of an adapter.

    Attributes:
        path: of the file, for messages.
        mlx: whether MLX has written it.
        rank: that of modules without one of their own; None where the shapes alone give it.
        alpha: that of modules without one of their own; of MLX the factor itself.
        rslora: whether the factor is alpha / sqrt(r) instead of alpha / r.
        dora: whether rows are rescaled to magnitudes.
        transposed: whether the weights of the base are [in, out].
        ranks: patterns of modules and their ranks.
        alphas: patterns of modules and their alphas.
        parameters: ends of the names of tensors that are not a module's ``weight``.
        saved: ends of the names of modules that PEFT copied and trained.
        tying: whether PEFT kept the head and the embedding of a tied model equal.
    """

    path: str
    mlx: bool
    rank: int | None
    alpha: float
    rslora: bool
    dora: bool
    transposed: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    parameters: Sequence[str] = ()
    saved: Sequence[str] = ()
    tying: bool = False

    def alpha_of(self, module: str) -> float:
        """The alpha of a module, of MLX the factor.

        Raises:
            UnsupportedError: see `scaling`.
        """
        alpha: float = _of_module(self.alphas, "alpha_pattern", module, self.alpha)
        return alpha

    def scaling(self, module: str, rank: int, tensor: str) -> float:
        """The factor of the change of a module.

        Args:
            module: its name in the base.
            rank: rows of its A.
            tensor: name of its A, for messages.

        Raises:
            FormatError: the configuration gives another rank.
            UnsupportedError: a pattern outside the subset of `packed.patterns`.
        """
        if self.mlx:
            return self.alpha
        said = _of_module(self.ranks, "rank_pattern", module, self.rank)
        if rank < 1 or (said is not None and said != rank):
            key = "r" if said == self.rank else "rank_pattern"
            text = f"has rank {rank}, but {show(key)} of {CONFIG} says {said}"
            raise error_about(FormatError, text, path=self.path, tensor=tensor)
        alpha = self.alpha_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


# A pattern that is the end of a name, in which "." stands for any character: there may be one for each module.
_PLAIN = re.compile(r"\^?[\w.]+", re.ASCII)
# Most patterns of another form: each is tried on each module.
_MOST_PATTERNS = 256


def _ends_with(module: str, end: str) -> bool:
    """Whether a module ends with a plain pattern, after any number of whole names."""
    if end.startswith("^"):
        end = end[1:]
        if len(module) != len(end):
            return False
    before = module[: len(module) - len(end)]
    last = module[len(before) :]
    if len(last) != len(end) or (before and not before.endswith(".")):
        return False
    return all(wanted in (".", found) for wanted, found in zip(end, last, strict=True))


def _of_module(patterns: Mapping[str, Any], key: str, module: str, usual: Any) -> Any:
    """The value of the first pattern that matches a module to its end, after any number of whole names."""
    for pattern, value in patterns.items():
        if _PLAIN.fullmatch(pattern):
            if _ends_with(module, pattern):
                return value
            continue
        # "^" can only match where nothing stands before the pattern; the subset has none.
        before, inner = ("", pattern[1:]) if pattern.startswith("^") and "|" not in pattern else (r"(.*\.)?", pattern)
        if compiled(rf"{before}({inner})$", key).matches(module):
            return value
    return usual


def parse(config: Mapping[str, Any], path: str) -> AdapterSettings:
    """Checks a configuration.

    Args:
        config: the JSON object.
        path: of its file.

    Raises:
        FormatError: a value of the wrong type.
        UnsupportedError: a method other than LoRA, or a setting that merging here does not cover.
    """
    if "peft_type" not in config and ("lora_parameters" in config or "fine_tune_type" in config):
        return _of_mlx(config, path)
    kind = config.get("peft_type")
    if kind != "LORA":
        what = f'"peft_type" is {show(kind)}' if "peft_type" in config else 'there is no "peft_type"'
        text = f"{what}: only LoRA adapters are merged here; PEFT merges others"
        raise error_about(UnsupportedError, text, path=path)
    for key, what in _REFUSED.items():
        if config.get(key):
            text = f'"{key}" {what}, which is not merged here: PEFT merges it'
            raise error_about(UnsupportedError, text, path=path)
    variant = next((key for key in _VARIANTS if config.get(key)), None)
    if variant is not None:
        text = f'"{variant}" is a variant of LoRA that is not merged here'
        raise error_about(UnsupportedError, text, path=path)
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        log.warning(
            '%s: "init_lora_weights" is %s, which changes the base when training begins: merge into that base, or '
            "convert the adapter with path_initial_model_for_weight_conversion of PEFT",
            path,
            show(begun),
        )
    return AdapterSettings(
        path,
        False,
        int(_number(config, "r", _RANK, path, whole=True)),
        _number(config, "lora_alpha", _ALPHA, path),
        _flag(config, "use_rslora", path),
        _flag(config, "use_dora", path),
        _flag(config, "fan_in_fan_out", path),
        {key: int(value) for key, value in _numbers(config, "rank_pattern", path, whole=True).items()},
        _numbers(config, "alpha_pattern", path),
        _names(config, "target_parameters", path),
        _names(config, "modules_to_save", path),
        _flag(config, "ensure_weight_tying", path),
    )


def _of_mlx(config: Mapping[str, Any], path: str) -> AdapterSettings:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        text = f'"fine_tune_type" is {show(kind)}: "lora" and "dora" are merged'
        raise error_about(UnsupportedError, text, path=path)
    inner = config.get("lora_parameters")
    if not isinstance(inner, Mapping):
        raise FormatError(f'"lora_parameters" is an object with rank and scale, found {show(inner)}', path)
    return AdapterSettings(path, True, None, _number(inner, "scale", None, path), False, kind == "dora", False, {}, {})


def _number(config: Mapping[str, Any], key: str, usual: float | None, path: str, *, whole: bool = False) -> float:
    value: Any = config.get(key, usual)
    good = type(value) is int or (type(value) is float and not whole and math.isfinite(value))
    if not good or (whole and not 0 < value < _MOST_RANK) or abs(value) > 1e30:
        raise FormatError(f'"{key}" is {"a positive integer" if whole else "a number"}, found {show(value)}', path)
    return float(value)


def _numbers(config: Mapping[str, Any], key: str, path: str, *, whole: bool = False) -> dict[str, float]:
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        raise FormatError(f'"{key}" is an object of patterns and numbers, found {show(given)}', path)
    if sum(_PLAIN.fullmatch(pattern) is None for pattern in given) > _MOST_PATTERNS:
        raise error_about(UnsupportedError, f'"{key}" has more than {_MOST_PATTERNS} patterns', path=path)
    for pattern in given:
        _number(given, pattern, None, path, whole=whole)
    return dict(given)


def _names(config: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    names = config.get(key)
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise FormatError(f'"{key}" must be a list of names, got {show(names)}', path)
    if len(names) > _MOST_NAMES or any(len(name) > _LONGEST for name in names):
        most = f"{_MOST_NAMES:,} names of {_LONGEST:,} characters"
        raise error_about(UnsupportedError, f'"{key}" has more than {most}', path=path)
    return tuple(dict.fromkeys(names))


def _flag(config: Mapping[str, Any], key: str, path: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise FormatError(f'"{key}" is true or false, found {show(value)}', path)
    return bool(value)
