"""Open LoRA adapters of PEFT and MLX: settings, tensors, and the modules they change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from typing import Any

from ..base import log
from ..base.paths import PathLike
from ..base.text import error_about, show
from ..checkpoint import Checkpoint
from ..errors import FormatError, UnsupportedError
from ..formats.opening import open_paths
from ..models.module_names import foreign_kind, unwrapped
from ..packed.patterns import compiled
from ..stores.files import Location
from ..stores.json_file import read_json
from ..stores.places import Located

# The `adapters=` argument: a path, a path with its weight, or a sequence of these in order.
One = PathLike | Located | tuple[PathLike | Located, float]
Adapters = One | Sequence[One] | None

CONFIG = "adapter_config.json"

# ---- settings ----

# PEFT's LoraConfig defaults, for keys missing in the file.
_RANK, _ALPHA = 8, 8
_MAX_RANK = 1 << 20
# Initializations that change the base, unless the adapter was converted after training.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Settings for further targets in the base, and for more than s * B A or a base changed before training.
_REFUSED = {
    "layer_replication": "repeats layers of the base, which",
    "trainable_token_indices": "changes rows of embeddings, which",
    **dict.fromkeys(
        ("use_bdlora", "alora_invocation_tokens", "arrow_config", "use_qalora", "kasa_config", "monteclora_config"),
        "is a variant of LoRA that",
    ),
}
# Limits on lists of names, which are compared with the names of modules.
_MAX_NAMES, _MAX_NAME_LENGTH = 10_000, 1000
# A plain pattern: the end of a name; "." matches any character. A config may have one for each module.
_PLAIN = re.compile(r"\^?[\w.]+", re.ASCII)
# Limit on patterns of any other form, because each is tried on each module.
_MAX_PATTERNS = 256


def _of_module(patterns: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, at a name boundary."""
    for pattern, value in patterns.items():
        if _PLAIN.fullmatch(pattern):
            matches = _ends_with(module, pattern)
        else:
            # "^" can match only if nothing precedes the pattern, and the subset has no "^".
            whole = pattern.startswith("^") and "|" not in pattern
            expression = rf"({pattern[1:]})$" if whole else rf"(.*\.)?({pattern})$"
            matches = compiled(expression, key).matches(module)
        if matches:
            return value
    return default


def _ends_with(module: str, end: str) -> bool:
    """Return whether a module's name ends with a plain pattern, at a name boundary."""
    bare = end.removeprefix("^")
    begin = len(module) - len(bare)
    if begin < 0 or (begin > 0 and (bare != end or module[begin - 1] != ".")):
        return False
    return all(expected in (".", letter) for expected, letter in zip(bare, module[begin:], strict=True))


def _check_method(config: Mapping[str, Any], path: str) -> None:
    """Refuse adapters of PEFT that are no plain LoRA."""
    kind = config.get("peft_type")
    if kind != "LORA":
        problem = f'"peft_type" is {show(kind)}' if "peft_type" in config else 'there is no "peft_type"'
        text = f"{problem}. safeload merges LoRA adapters only; merge this adapter with PEFT"
        raise error_about(UnsupportedError, text, path=path)
    for key, effect in _REFUSED.items():
        if config.get(key):
            text = f'"{key}" {effect} safeload does not merge; merge this adapter with PEFT'
            raise error_about(UnsupportedError, text, path=path)
    initialization = config.get("init_lora_weights")
    if isinstance(initialization, str) and initialization.lower().startswith(_CHANGES_BASE):
        log.warning(
            '%s: "init_lora_weights" is %s, which changes the base when training begins. Merge into that changed base, '
            "or convert the adapter with PEFT's path_initial_model_for_weight_conversion",
            path,
            show(initialization),
        )


def _number(config: Mapping[str, Any], key: str, default: float | None, path: str, *, whole: bool = False) -> float:
    value: Any = config.get(key, default)
    valid = type(value) is int or (type(value) is float and not whole and math.isfinite(value))
    if not valid or (whole and not 0 < value < _MAX_RANK) or abs(value) > 1e30:
        expected = "a positive integer" if whole else "a number"
        raise FormatError(f'"{key}" must be {expected}, got {show(value)}', path)
    return float(value)


def _numbers(config: Mapping[str, Any], key: str, path: str, *, whole: bool = False) -> dict[str, float]:
    values = config.get(key) or {}
    if not isinstance(values, Mapping):
        raise FormatError(f'"{key}" must map patterns to numbers, got {show(values)}', path)
    if sum(_PLAIN.fullmatch(pattern) is None for pattern in values) > _MAX_PATTERNS:
        raise error_about(UnsupportedError, f'"{key}" has more than {_MAX_PATTERNS} patterns', path=path)
    for pattern in values:
        _number(values, pattern, None, path, whole=whole)
    return dict(values)


def _names(config: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    names = config.get(key)
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise FormatError(f'"{key}" must be a list of names, got {show(names)}', path)
    if len(names) > _MAX_NAMES or any(len(name) > _MAX_NAME_LENGTH for name in names):
        limit = f"{_MAX_NAMES:,} names of {_MAX_NAME_LENGTH:,} characters"
        raise error_about(UnsupportedError, f'"{key}" has more than {limit}', path=path)
    return tuple(dict.fromkeys(names))


def _flag(config: Mapping[str, Any], key: str, path: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise FormatError(f'"{key}" must be true or false, got {show(value)}', path)
    return bool(value)


# ---- tensors ----

# Roles of an adapter's tensors.
A, B, MAGNITUDE, BIAS, VALUE = "A", "B", "magnitude", "bias", "value"
EMBEDDING_A, EMBEDDING_B = "embedding A", "embedding B"

_PREFIX = "base_model.model."
_PEFT = {
    ".lora_A.weight": A,
    ".lora_B.weight": B,
    ".lora_B.bias": BIAS,
    ".lora_embedding_A": EMBEDDING_A,
    ".lora_embedding_B": EMBEDDING_B,
    ".lora_magnitude_vector": MAGNITUDE,
    ".lora_magnitude_vector.weight": MAGNITUDE,
}
# A role in a PEFT name, with the adapter's own name if the state dict of the model was saved ("lora_A.default.weight").
_ROLE = re.compile(
    r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)(?:\.(?!(?:weight|bias)\Z)([^.]+))?(\.weight|\.bias)?\Z",
    re.ASCII,
)
_MLX = {".lora_a": A, ".lora_b": B, ".m": MAGNITUDE}
# Each role needs at least one of these partners.
_PARTNERS = {
    A: {B},
    B: {A},
    EMBEDDING_A: {EMBEDDING_B},
    EMBEDDING_B: {EMBEDDING_A},
    BIAS: {B},
    MAGNITUDE: {B, EMBEDDING_B},
}
# Wrappers in PEFT's module names, and names of other methods.
_SAVED, _UNUSED = ".modules_to_save.", ".original_module."
_WRAPPED = [".base_layer.", _SAVED]
_NOT_LORA = ("trainable_tokens", "token_adapter", "lora_", "ia3_", "vera_", "prompt_", "oft_", "boft_", "ranknum")


class Adapter:
    """An open adapter: the settings behind the values of merged tensors, and its tensors by module of the base."""

    def __init__(self, checkpoint: Checkpoint, weight: float = 1.0) -> None:
        self.checkpoint, self.weight = checkpoint, weight
        file = checkpoint.weight_files[0]
        _check_names(checkpoint)
        self.config_at = Location(file.files, file.files.join(file.files.split(file.place)[0], CONFIG))
        try:
            config = self.config = read_json(self.config_at.path, CONFIG, file.files)
        except FileNotFoundError:
            _check_names(checkpoint, "")
            raise
        path = self.config_at.shown
        self.mlx = "peft_type" not in config and ("lora_parameters" in config or "fine_tune_type" in config)
        self.default_rank: int | None = None  # only the shapes tell
        if self.mlx:
            kind, inner = config.get("fine_tune_type", "lora"), config.get("lora_parameters")
            if kind not in ("lora", "dora"):
                text = f'"fine_tune_type" must be "lora" or "dora", got {show(kind)}'
                raise error_about(UnsupportedError, text, path=path)
            if not isinstance(inner, Mapping):
                raise FormatError(f'"lora_parameters" must be an object with rank and scale, got {show(inner)}', path)
            self.alpha = _number(inner, "scale", None, path)  # the factor itself
            self.dora = kind == "dora"
            config = {}  # it has no other settings
        else:
            _check_method(config, path)
            self.default_rank = int(_number(config, "r", _RANK, path, whole=True))
            self.alpha = _number(config, "lora_alpha", _ALPHA, path)
            self.dora = _flag(config, "use_dora", path)  # rows are rescaled to magnitudes
        self.rslora = _flag(config, "use_rslora", path)  # the factor is alpha / sqrt(r) instead of alpha / r
        self.transposed = _flag(config, "fan_in_fan_out", path)  # weights of the base are [in, out]
        self.ranks = _numbers(config, "rank_pattern", path, whole=True)
        self.alphas = _numbers(config, "alpha_pattern", path)
        # Name endings: of target tensors other than a module's ``weight``, and of the modules copied and trained.
        self.parameters = _names(config, "target_parameters", path)
        self.saved = _names(config, "modules_to_save", path)
        # PEFT kept the head and the embedding of a tied model equal.
        self.tying = _flag(config, "ensure_weight_tying", path)
        self.modules = self._modules()

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module; for MLX the factor."""
        alpha: float = _of_module(self.alphas, "alpha_pattern", module, self.alpha)
        return alpha

    def scaling(self, module: str, rank: int, tensor: str) -> float:
        """Return the factor of a module's change."""
        if self.mlx:
            return self.alpha * self.weight
        expected = _of_module(self.ranks, "rank_pattern", module, self.default_rank)
        if rank < 1 or expected != rank:
            key = "r" if expected == self.default_rank else "rank_pattern"
            text = f"has rank {rank}, but {show(key)} of {CONFIG} says {expected}"
            raise error_about(FormatError, text, path=self.config_at.shown, tensor=tensor)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank) * self.weight

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an adapter tensor."""
        return self.checkpoint.tensors[name].shape

    def is_copy(self, name: str) -> bool:
        """Return whether PEFT trained a copy of the module of a base tensor, which replaces the tensor."""
        stored = self.modules.get(name, {}).get(VALUE)
        if stored is None or self.mlx:
            return False
        return _SAVED in stored or name.rpartition(".")[0].endswith(self.saved)

    def rank(self, module: str) -> int:
        """Return the rank of a module with factors, summed over the matrices of a stack."""
        parts = self.modules[module]
        shape = self.shape(parts[A if A in parts else EMBEDDING_A])
        return sum(shape[1:2] if self.mlx else shape[:1])

    def _modules(self) -> dict[str, dict[str, str]]:
        """Group tensor names by module of the base and role; a whole tensor is its own module."""
        checkpoint = self.checkpoint
        modules: dict[str, dict[str, str]] = {}
        wrappers = _WRAPPED
        if not self.mlx:  # the names of a saved state dict contain the adapter's own name
            roles = (match for name in checkpoint if (match := _ROLE.search(name)) is not None and match[2])
            own = list(dict.fromkeys(match[2] for match in roles)) or ["default"]
            if len(own) > 1:
                text = f"several adapters in one file: {', '.join(map(show, own[:5]))}; save each one with PEFT"
                raise error_about(UnsupportedError, text, path=checkpoint.path)
            wrappers = [f"{_SAVED}{own[0]}.", *_WRAPPED]
        for name in checkpoint:
            if _UNUSED in name:  # the base's own value, stored beside its replacement
                continue
            module, part = self._parse_name(name, wrappers)
            parts = modules.setdefault(module, {})
            if part == VALUE and _SAVED in name and part in parts:  # PEFT writes a saved module's trained bias twice
                continue
            if part in parts and not (part == VALUE and _SAVED in parts[part]):
                both = f"tensors {show(parts[part])} and {show(name)}"
                raise FormatError(
                    f"{both} of the adapter are the same part of one module", checkpoint.path, tensor=name
                )
            parts[part] = name
        if not modules:
            raise FormatError("the adapter has no tensors", checkpoint.path)
        for parts in modules.values():
            self._check_parts(parts)
        return modules

    def _parse_name(self, name: str, wrappers: Iterable[str]) -> tuple[str, str]:
        """Return the module and the role of an adapter tensor."""
        bare = unwrapped(name)
        if self.mlx:
            for suffix, part in _MLX.items():
                if bare.endswith(suffix):
                    return bare.removesuffix(suffix), part
        elif not bare.startswith(_PREFIX):
            text = f"does not begin with {show(_PREFIX)}, as PEFT writes it"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=name)
        rest = bare if self.mlx else bare.removeprefix(_PREFIX)
        role = None if self.mlx else _ROLE.search(rest)
        key = "" if role is None else f".{role[1]}{role[3] or ''}"
        if role is not None and key in _PEFT:
            return rest[: role.start()], _PEFT[key]
        if any(part in rest for part in _NOT_LORA):
            named = "" if (kind := foreign_kind(bare)) is None else f" ({kind})"
            text = f"of the adapter belongs to a method other than LoRA{named}; merge this adapter with PEFT"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=name)
        for wrapped in wrappers:
            while wrapped in rest:  # wrappers can nest
                rest = rest.replace(wrapped, ".")
        return rest, VALUE

    def _check_parts(self, parts: Mapping[str, str]) -> None:
        """Refuse inconsistent roles of a module."""
        path = self.checkpoint.path
        if {A, EMBEDDING_A} <= parts.keys():
            both = f"tensors {show(parts[A])} and {show(parts[EMBEDDING_A])}"
            raise FormatError(f"{both} of the adapter change one module in two ways", path)
        for part, partners in _PARTNERS.items():
            if part in parts and not partners & parts.keys():
                text = "of the adapter has no counterpart: A and B belong together"
                raise error_about(FormatError, text, path=path, tensor=parts[part])
        if parts.keys() & {A, EMBEDDING_A} and self.dora != (MAGNITUDE in parts):
            name = next(iter(parts.values()))
            state = "no magnitude" if self.dora else "a magnitude"
            key = "fine_tune_type" if self.mlx else "use_dora"
            raise FormatError(f"the module of tensor {show(name)} has {state}, which contradicts {show(key)}", path)


def listed(adapters: Any) -> list[tuple[Any, float]]:
    """Return the paths in ``adapters=`` with their weights."""
    if adapters is None:
        return []
    items = adapters if isinstance(adapters, (list, tuple)) and not _is_pair(adapters) else [adapters]
    weighted = []
    for item in items:
        path, weight = item if _is_pair(item) else (item, 1.0)
        if isinstance(path, (list, tuple, Mapping, bool, int, float)) or path is None:
            raise TypeError(f"adapters must be a path, a pair (path, weight) or a list of these, got {show(item)}")
        if not abs(weight) <= 1e30:  # `not <=` also catches NaN
            raise ValueError(f"adapters: the weight of {show(path)} must be a finite number, got {show(weight)}")
        weighted.append((path, float(weight)))
    return weighted


def _is_pair(value: Any) -> bool:
    number = value[1] if isinstance(value, tuple) and len(value) == 2 else None
    return isinstance(number, Real) and not isinstance(number, bool)


def opened(
    stack: ExitStack, adapters: Iterable[tuple[Any, float]], storage_options: Mapping[str, Any] | None = None
) -> list[Adapter]:
    """Open adapters until ``stack`` closes."""
    result = []
    for path, weight in adapters:
        seen = open_paths(path, None, None, "refuse", True, storage_options=storage_options)
        result.append(Adapter(stack.enter_context(Checkpoint(seen)), weight))
    return result


def _check_names(checkpoint: Checkpoint, prefix: str = _PREFIX) -> None:
    """Refuse the names of other tools before their missing configuration becomes the error."""
    for name in checkpoint:
        bare = unwrapped(name)
        if (not prefix or not bare.startswith(prefix)) and (kind := foreign_kind(bare)) is not None:
            text = f"belongs to {kind}, not to a LoRA of PEFT or MLX; merge it with its own tool, or convert it to PEFT"
            raise error_about(UnsupportedError, text, path=checkpoint.path, tensor=name)
