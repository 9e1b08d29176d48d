"""Open LoRA adapters of PEFT, MLX and llama.cpp: settings and tensors, and find the tensors of a base they change."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, count, permutations, takewhile
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..core import dtypes
from ..core.arrays import Array
from ..core.checkpoint import Checkpoint
from ..core.files import Location, read_json
from ..core.forking import cached_property
from ..core.names import grouped
from ..core.opening import open_paths
from ..core.registry import GGUF
from ..core.source import Source
from ..core.text import error_about, show, warning
from ..errors import FormatError, UnsupportedError
from ..models.choosing import EMBEDDINGS, STACK, is_unclear, tied_heads, vocabulary_sizes
from ..models.module_names import foreign_kind, stored_names, unwrapped
from ..models.renamed import Divided, Joined, ModelNames, Turned, Unmapped, has_rules
from ..quant.finder import CONV1D, CONV1D_MODELS
from ..quant.patterns import compiled

CONFIG = "adapter_config.json"

# ---- settings ----

# PEFT's LoraConfig defaults, for keys missing in the file.
_RANK, _ALPHA = 8, 8
_MAX_RANK = 1 << 20
# Initializations that change the base, unless the adapter was converted after training.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Settings for further targets in the base, and for more than s * B A or a base changed before training.
_VARIANTS = ("use_bdlora", "alora_invocation_tokens", "arrow_config", "use_qalora", "kasa_config", "monteclora_config")
_REFUSED = {
    "layer_replication": "repeats layers of the base, which",
    **dict.fromkeys(_VARIANTS, "is a variant of LoRA that"),
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
            bare = pattern.removeprefix("^")
            begin = len(module) - len(bare)
            bounded = begin == 0 or (begin > 0 and bare == pattern and module[begin - 1] == ".")
            matches = bounded and all(a in (".", b) for a, b in zip(bare, module[begin:], strict=True))
        else:
            # "^" can match only if nothing precedes the pattern, and the subset has no "^".
            whole = pattern.startswith("^") and "|" not in pattern
            expression = rf"({pattern[1:]})$" if whole else rf"(.*\.)?({pattern})$"
            matches = compiled(expression, key).matches(module)
        if matches:
            return value
    return default


def _check_method(config: Mapping[str, Any], path: str) -> None:
    """Refuse adapters of PEFT that are no plain LoRA."""
    kind, key = config.get("peft_type"), next(filter(config.get, _REFUSED), None)
    problem = None if key is None else f'"{key}" {_REFUSED[key]} safeload does not merge'
    if kind not in ("LORA", "TRAINABLE_TOKENS"):
        state = f'"peft_type" is {show(kind)}' if "peft_type" in config else 'there is no "peft_type"'
        problem = f"{state}. safeload merges LoRA adapters and trained tokens only"
    if problem is not None:
        raise error_about(UnsupportedError, f"{problem}; merge this adapter with PEFT", path=path)
    initialization = config.get("init_lora_weights")
    if isinstance(initialization, str) and initialization.lower().startswith(_CHANGES_BASE):
        effect = f"is {show(initialization)}, which changes the base when training begins"
        advice = "or convert the adapter with PEFT's path_initial_model_for_weight_conversion"
        warning('%s: "init_lora_weights" %s. Merge into that changed base, %s', path, effect, advice)


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
    names = [] if config.get(key) is None else config[key]
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise FormatError(f'"{key}" must be a list of names, got {show(names)}', path)
    if len(names) > _MAX_NAMES or any(len(name) > _MAX_NAME_LENGTH for name in names):
        limit = f"{_MAX_NAMES:,} names of {_MAX_NAME_LENGTH:,} characters"
        raise error_about(UnsupportedError, f'"{key}" has more than {limit}', path=path)
    return tuple(dict.fromkeys(names))


def _token_indices(config: Mapping[str, Any], path: str) -> dict[str, tuple[int, ...]]:
    """Return the numbers of the trained tokens by the end of the embedding's name; "" is any embedding."""
    key = "token_indices" if config.get("peft_type") == "TRAINABLE_TOKENS" else "trainable_token_indices"
    value = config.get(key) or {}
    lists = value if isinstance(value, Mapping) else {"": value}
    for indices in lists.values():
        valid = isinstance(indices, list) and all(type(k) is int and k >= 0 for k in indices)
        if not valid or len({*indices}) != len(indices):
            raise FormatError(f'"{key}" must be lists of different token numbers, got {show(indices)}', path)
    return {module: tuple(indices) for module, indices in lists.items()}


def _flag(config: Mapping[str, Any], key: str, path: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise FormatError(f'"{key}" must be true or false, got {show(value)}', path)
    return bool(value)


# ---- tensors ----

# Roles of an adapter's tensors.
A, B, MAGNITUDE, BIAS, VALUE = "A", "B", "magnitude", "bias", "value"
EMBEDDING_A, EMBEDDING_B = "embedding A", "embedding B"
TOKENS = "rows of tokens"

_PREFIX = "base_model.model."
_PEFT = {
    ".lora_A.weight": A,
    ".lora_B.weight": B,
    ".lora_B.bias": BIAS,
    ".lora_embedding_A": EMBEDDING_A,
    ".lora_embedding_B": EMBEDDING_B,
    ".lora_magnitude_vector": MAGNITUDE,
    ".lora_magnitude_vector.weight": MAGNITUDE,
    ".trainable_tokens_delta": TOKENS,
    ".token_adapter.trainable_tokens_delta": TOKENS,
}
# A role in a PEFT name, with the adapter's own name if the state dict of the model was saved ("lora_A.default.weight").
_ROLE = re.compile(
    r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|(?:token_adapter\.)?trainable_tokens_delta)(?:\.(?!(?:weight|bias)\Z)([^.]+))?(\.weight|\.bias)?\Z",
    re.ASCII,
)
_MLX = {".lora_a": A, ".lora_b": B, ".m": MAGNITUDE}
_MLX_ROLE = re.compile(r"\.(lora_[ab]|m)()()\Z", re.ASCII)  # with the groups of `_ROLE`
_GGUF = {"lora_a": A, "lora_b": B}
_GGUF_ROLE = re.compile(r"(?:\.weight)?\.(lora_[ab])\Z", re.ASCII)
# Each role needs at least one of these partners.
_FACTORS = {A: {B}, B: {A}, EMBEDDING_A: {EMBEDDING_B}, EMBEDDING_B: {EMBEDDING_A}}
_PARTNERS = {**_FACTORS, BIAS: {B}, MAGNITUDE: {B, EMBEDDING_B}}
# Wrappers in PEFT's module names, and names of other methods.
_SAVED, _UNUSED = ".modules_to_save.", ".original_module."
_WRAPPED = [".base_layer.", ".token_adapter.", _SAVED]
_NOT_LORA = ("lora_", "ia3_", "vera_", "prompt_", "oft_", "boft_", "ranknum")


class Adapter:
    """An open adapter: the settings behind the values of merged tensors, and its tensors by module of the base.

    A subclass for each dialect reads its settings, and the module and the role in a tensor's name.
    """

    writer = ""
    mlx = False  # factors are transposed
    gguf = False  # llama.cpp's names and rows, see `safeload.conversion.adapter_forms`
    fit: Fit | None = None  # the base tensors of all modules, if they are known
    default_rank: int | None = None  # None: only the shapes tell
    alpha = 1.0
    dora: bool | None = False  # rows are rescaled to magnitudes; None: where a module has them
    rslora = False  # the factor is alpha / sqrt(r) instead of alpha / r
    transposed = False  # weights of the base are [in, out]
    ranks: Mapping[str, float] = MappingProxyType({})
    alphas: Mapping[str, float] = MappingProxyType({})
    # Name endings: of target tensors other than a module's ``weight``, and of the modules copied and trained.
    parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    tying = False  # PEFT kept the head and the embedding of a tied model equal
    indices: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # numbers of tokens by the end of the module's name

    def __init__(self, checkpoint: Checkpoint, weight: float, config: Mapping[str, Any], config_at: Location) -> None:
        self.checkpoint, self.weight = checkpoint, weight
        self.config, self.config_at = config, config_at
        self.read_settings(config, config_at.shown)
        self.modules = self._modules()

    def read_settings(self, config: Mapping[str, Any], path: str) -> None:
        """Set the attributes that the dialect has, and refuse what it has besides LoRA."""
        raise NotImplementedError

    def parse_name(self, name: str) -> tuple[str, str]:
        """Return the module and the role of a tensor."""
        raise NotImplementedError

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module; for MLX the factor."""
        alpha: float = _of_module(self.alphas, "alpha_pattern", module, self.alpha)
        return alpha

    def scaling(self, module: str, rank: int, tensor: str) -> float:
        """Return the factor of a module's product, with the weight of the adapter."""
        expected = _of_module(self.ranks, "rank_pattern", module, self.default_rank)
        if rank < 1 or expected != rank:
            key = "r" if expected == self.default_rank else "rank_pattern"
            text = f"has rank {rank}, but {show(key)} of {CONFIG} says {expected}"
            raise error_about(FormatError, text, path=self.config_at.shown, tensor=tensor)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank) * self.weight

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.tensors[name].shape

    def is_copy(self, name: str) -> bool:
        """Return whether PEFT trained a copy of the module of a base tensor, which replaces the tensor."""
        stored = self.modules.get(name, {}).get(VALUE)
        outer = accumulate(name.split(".")[:-1], "{}.{}".format)  # the module and the modules around it
        trained = stored is not None and (_SAVED in stored or any(module.endswith(self.saved) for module in outer))
        return trained and not self.mlx

    @cached_property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the tokens whose rows a tensor of the adapter has, by its name."""
        tokens = {}
        for module, parts in ((module, parts) for module, parts in self.modules.items() if TOKENS in parts):
            ends = [end for end in self.indices if f".{module}".endswith(f".{end}" if end else "")]
            tokens[parts[TOKENS]] = self.indices[max(ends, key=len)] if ends else ()
        return tokens

    def rank(self, module: str) -> int:
        """Return the rank of a module with factors, summed over the matrices of a stack."""
        parts = self.modules[module]
        shape = self.shape(parts[B if self.gguf else A if A in parts else EMBEDDING_A])
        return sum(shape[-1:] if self.gguf else shape[1:2] if self.mlx else shape[:1])

    def _modules(self) -> dict[str, dict[str, str]]:
        """Group tensor names by module of the base and role; a whole tensor is its own module."""
        checkpoint = self.checkpoint
        modules: dict[str, dict[str, str]] = {}
        # Without the base's own values, stored beside their replacements.
        for name in (name for name in checkpoint if _UNUSED not in name):
            module, part = self.parse_name(name)
            parts = modules.setdefault(module, {})
            if part == VALUE and _SAVED in name and part in parts:  # PEFT writes a saved module's trained bias twice
                continue
            if part in parts and not (part == VALUE and _SAVED in parts[part]):
                text = f"tensors {show(parts[part])} and {show(name)} of the adapter are the same part of one module"
                raise FormatError(text, checkpoint.path, tensor=name)
            parts[part] = name
        if not modules:
            raise FormatError("the adapter has no tensors", checkpoint.path)
        for parts in modules.values():
            if {A, EMBEDDING_A} <= parts.keys():
                both = f"tensors {show(parts[A])} and {show(parts[EMBEDDING_A])}"
                raise FormatError(f"{both} of the adapter change one module in two ways", checkpoint.path)
            for part, partners in _PARTNERS.items():
                if part in parts and not partners & parts.keys():
                    text = "of the adapter has no counterpart: A and B belong together"
                    raise error_about(FormatError, text, path=checkpoint.path, tensor=parts[part])
            if parts.keys() & {A, EMBEDDING_A} and self.dora not in (None, MAGNITUDE in parts):
                state = "no magnitude" if self.dora else "a magnitude"
                text = f"the module of tensor {show(next(iter(parts.values())))} has {state}, which contradicts "
                raise FormatError(text + show("fine_tune_type" if self.mlx else "use_dora"), checkpoint.path)
        return modules

    def factor_of(self, name: str, prefix: str, pattern: re.Pattern[str], roles: Mapping[str, str]) -> tuple[str, str]:
        """Return the module and the role of a tensor by a pattern; refuse names of other methods."""
        bare = unwrapped(name)
        rest = bare.removeprefix(prefix)
        match = pattern.search(rest)
        if match is not None and (part := roles.get(f".{match[1]}{match[3] or ''}")) is not None:
            return rest[: match.start()], part
        if any(part in rest for part in _NOT_LORA):
            named = "" if (kind := foreign_kind(bare)) is None else f" ({kind})"
            text = f"of the adapter belongs to a method other than LoRA{named}; merge this adapter with PEFT"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=name)
        return rest, VALUE


class _PeftAdapter(Adapter):
    writer = "PEFT"

    def read_settings(self, config: Mapping[str, Any], path: str) -> None:
        _check_method(config, path)
        self.default_rank = int(_number(config, "r", _RANK, path, whole=True))
        self.alpha = _number(config, "lora_alpha", _ALPHA, path)
        self.dora = _flag(config, "use_dora", path)
        self.rslora = _flag(config, "use_rslora", path)
        self.transposed = _flag(config, "fan_in_fan_out", path)
        self.ranks = _numbers(config, "rank_pattern", path, whole=True)
        self.alphas = _numbers(config, "alpha_pattern", path)
        self.parameters = _names(config, "target_parameters", path)
        self.saved = _names(config, "modules_to_save", path)
        self.indices = _token_indices(config, path)
        self.tying = _flag(config, "ensure_weight_tying", path)

    @cached_property
    def _wrappers(self) -> list[str]:
        """The wrappers in names, which in a saved state dict contain the adapter's own name."""
        roles = (match for name in self.checkpoint if (match := _ROLE.search(name)) is not None and match[2])
        own = list(dict.fromkeys(match[2] for match in roles)) or ["default"]
        if len(own) > 1:
            text = f"several adapters in one file: {', '.join(map(show, own[:5]))}; save each one with PEFT"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path)
        return [f"{_SAVED}{own[0]}.", *_WRAPPED]

    def parse_name(self, name: str) -> tuple[str, str]:
        wrappers = self._wrappers
        if not unwrapped(name).startswith(_PREFIX):
            text = f"does not begin with {show(_PREFIX)}, as PEFT writes it"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=name)
        module, part = self.factor_of(name, _PREFIX, _ROLE, _PEFT)
        for wrapped in wrappers if part == VALUE else ():
            while wrapped in module:  # wrappers can nest
                module = module.replace(wrapped, ".")
        return module, part


class _MlxAdapter(Adapter):
    writer, mlx = "MLX", True

    def read_settings(self, config: Mapping[str, Any], path: str) -> None:
        kind, inner = config.get("fine_tune_type", "lora"), config.get("lora_parameters")
        if kind not in ("lora", "dora"):
            text = f'"fine_tune_type" must be "lora" or "dora", got {show(kind)}'
            raise error_about(UnsupportedError, text, path=path)
        if not isinstance(inner, Mapping):
            raise FormatError(f'"lora_parameters" must be an object with rank and scale, got {show(inner)}', path)
        self.alpha = _number(inner, "scale", None, path)  # the factor itself
        self.dora = kind == "dora"

    def parse_name(self, name: str) -> tuple[str, str]:
        module, part = self.factor_of(name, "", _MLX_ROLE, _MLX)
        for wrapped in _WRAPPED if part == VALUE else ():
            while wrapped in module:
                module = module.replace(wrapped, ".")
        return module, part

    def scaling(self, module: str, rank: int, tensor: str) -> float:
        return self.alpha * self.weight


class _LlamaCppAdapter(Adapter):
    """An adapter in a GGUF file, configured by its metadata."""

    writer, gguf = "llama.cpp", True

    def read_settings(self, config: Mapping[str, Any], path: str) -> None:
        for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
            if config.get(key) != expected:
                text = f"{key} must be {show(expected)} for llama.cpp, got {show(config.get(key))}"
                raise error_about(UnsupportedError, text, path=path)
        if config.get(tokens := "adapter.alora.invocation_tokens") is not None:
            text = f"{tokens} activates the adapter after some tokens only, which no merged weight can do"
            raise error_about(UnsupportedError, text, path=path)
        alpha = config.get("adapter.lora.alpha", 0.0)
        number = float(alpha) if isinstance(alpha, (float, np.floating)) else alpha
        self.alpha = _number({"adapter.lora.alpha": number}, "adapter.lora.alpha", None, path)

    def parse_name(self, name: str) -> tuple[str, str]:
        match = _GGUF_ROLE.search(name)
        if match is None:
            text = "of the adapter is no factor of LoRA, and llama.cpp does not read it"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=name)
        return name[: match.start()], _GGUF[match[1]]

    def scaling(self, module: str, rank: int, tensor: str) -> float:
        return (self.alpha / rank if self.alpha else 1.0) * self.weight  # llama.cpp takes an alpha of 0 for none


def adapter_of(checkpoint: Checkpoint, weight: float = 1.0) -> Adapter:
    """Return an open checkpoint as an adapter, in the dialect of its names and its configuration."""
    file = checkpoint.weight_files[0]
    if checkpoint.format == GGUF:
        config: Any = checkpoint.metadata
        return _LlamaCppAdapter(
            checkpoint, weight, {key: config[key] for key in config}, Location(file.files, file.place)
        )
    _check_names(checkpoint)
    config_at = Location(file.files, file.files.join(file.files.split(file.place)[0], CONFIG))
    try:
        config = read_json(config_at.path, CONFIG, file.files)
    except FileNotFoundError:
        _check_names(checkpoint, "")
        raise
    mlx = "peft_type" not in config and ("lora_parameters" in config or "fine_tune_type" in config)
    return (_MlxAdapter if mlx else _PeftAdapter)(checkpoint, weight, config, config_at)


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
    seen = (
        (open_paths(path, None, None, "refuse", True, storage_options=storage_options), weight)
        for path, weight in adapters
    )
    return [adapter_of(stack.enter_context(Checkpoint(each)), weight) for each, weight in seen]


def _check_names(checkpoint: Checkpoint, prefix: str = _PREFIX) -> None:
    """Refuse the names of other tools before their missing configuration becomes the error."""
    for name in checkpoint:
        bare = unwrapped(name)
        if (not prefix or not bare.startswith(prefix)) and (kind := foreign_kind(bare)) is not None:
            text = f"belongs to {kind}, not to a LoRA of PEFT or MLX; merge it with its own tool, or convert it to PEFT"
            raise error_about(UnsupportedError, text, path=checkpoint.path, tensor=name)


# ---- what an adapter changes ----

# The files of an adapter state neither the tensors of its base nor the order of their axes: PEFT asks the layers of the
# model. Names and shapes decide here, then known architectures. Whatever remains ambiguous is refused.


class AdapterTarget(NamedTuple):
    """A base tensor to merge into."""

    name: str
    shape: tuple[int, ...]
    row: dtypes.Dtype | None  # the dtype to keep without dtype=; None if the tensor is packed
    work: np.dtype[Any]  # the dtype to merge in
    # Values as `work`, at a range of the first axis. If rows are plain, also at (integer, range of the second axis).
    read: Callable[[Any], Array]
    together: bool = False  # values can only be read all at once
    source: Source | None = None  # the plain values, if jobs can read them a few rows at a time


def never_read(rows: Any) -> Array:
    """Stand for the values of a tensor that is only described."""
    raise AssertionError("the tensor is only described")


# ---- tied heads ----

# PEFT changes modules, not weights. A trained copy of a module (`modules_to_save`) and the factors of a module do not
# reach the module it is tied to. Only tensors that replace the weights of the base reach both.

# The end of the name of an embedding shared by an encoder, a decoder and a head.
_SHARED = "shared.weight"
# The ends of the names of tensors with a row for each token.
_VOCABULARY = (*EMBEDDINGS, ".lm_head.weight", ".lm_head.bias", ".embed_out.weight", ".predictions.bias")


class Heads(NamedTuple):
    """The tied heads of a base."""

    pairs: Mapping[str, str]  # head -> embedding
    untied: Mapping[str, str]  # head -> embedding, if the head gets its own weights
    added: Collection[str] = ()  # of a piece: its tensors that the base lacks, such as task heads


def heads_of(adapters: Sequence[Adapter], config: Mapping[str, Any] | None, names: Collection[str]) -> Heads:
    """Decide which tied heads of a base get weights of their own."""
    pairs = tied_heads(config, names)
    untied: dict[str, str] = {}
    if is_unclear(config, pairs):
        for adapter in adapters:
            for module, parts in adapter.modules.items():
                if EMBEDDING_A in parts:
                    text = f"the adapter changes the embedding {show(module)}; the base's config.json ties its head to "
                    text += "an embedding, but their names are not known, so the head would change too"
                    raise UnsupportedError(text, path=adapter.checkpoint.path, tensor=parts[EMBEDDING_A])
    if not pairs:
        return Heads(pairs, untied)
    known = ModelNames(config, {unwrapped(name): name for name in (*names, *pairs)})
    for adapter in adapters:
        own = modules_by_tensor(adapter, known.find)
        for head, embedding in pairs.items():
            name = _changed_alone(adapter, own, (head, embedding))
            if name is not None and embedding.endswith(_SHARED):
                text = f"the adapter changes {show(name)}, but encoder, decoder and head share {show(embedding)}: "
                text += "merging into one of them is not supported"
                raise UnsupportedError(text, path=adapter.checkpoint.path, tensor=name)
            if name is not None:
                untied[head] = embedding
    return Heads(pairs, untied)


def modules_by_tensor(adapter: Adapter, find: Callable[[str], Any]) -> dict[str, list[str]]:
    """Return the modules of an adapter by the stored tensor that they change; ``find`` takes names of the model."""

    def tensor_of(module: str) -> str:
        name = module if VALUE in adapter.modules[module] else f"{module}.weight"
        place = find(name)
        return place if isinstance(place, str) else name

    return grouped(adapter.modules, tensor_of)


def _changed_alone(adapter: Adapter, own: Mapping[str, Sequence[str]], pair: tuple[str, str]) -> str | None:
    """Return the changed tensor of a tied pair, or None if the adapter changes neither or both."""
    if adapter.mlx:  # its embeddings are their own heads
        return None
    modules = [(name, module) for name in pair for module in own.get(name, ())]
    factors = [name for name, module in modules if adapter.modules[module].keys() & {A, EMBEDDING_A}]
    changed = factors or [name for name, module in modules if adapter.is_copy(module)]
    values = [adapter.modules[module][VALUE] for _, module in modules if VALUE in adapter.modules[module]]
    rows = [adapter.modules[module][TOKENS] for _, module in modules if TOKENS in adapter.modules[module]]
    if len({(adapter.tokens[name], array.tobytes()) for name, array in adapter.checkpoint.load(rows).items()}) > 1:
        text = f"the adapter gives {show(pair[0])} and {show(pair[1])} different rows, but the base ties them"
        raise UnsupportedError(text, path=adapter.checkpoint.path, tensor=rows[0])
    if not factors and (adapter.tying or not changed) and len(values) == 2:
        first, second = map(adapter.checkpoint.tensors.__getitem__, values)
        if (first.dtype, first.shape) == (second.dtype, second.shape):
            loaded = adapter.checkpoint.load(values)
            a, b = (np.ascontiguousarray(loaded[name]).reshape(-1).view(np.uint8) for name in values)
            if np.array_equal(a, b):
                return None
        if not changed:
            text = f"tensors {show(values[0])} and {show(values[1])} of the adapter differ, but the base ties them and "
            raise FormatError(f"{text}'modules_to_save' names neither", adapter.checkpoint.path, tensor=values[0])
    return changed[0] if changed else None


# ---- stacks of experts, and renamed tensors ----

# transformers and mlx-lm rename or stack some weights on loading. Adapters have the model's names, files the stored.

# Layers concatenated by transformers, row by row and in order, under the last part of the stack's name.
_LAYERS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),  # Nemotron-H has no gate
    "down_proj": (("down_proj",), ("w2",)),
}
# The layers that mlx-lm stacks, under the last part of the stack's name.
_MLX_LAYERS = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3"), "down_proj": ("down_proj", "w2")}
# Name parts in the model and in files without a config (Mixtral, MiniMax, PhiMoE; Granite MoE; GPT-NeoX).
_RENAMED = (
    (".mlp.", ".block_sparse_moe."),
    (".mlp.router.", ".block_sparse_moe.gate."),
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
    ("lm_head.weight", "embed_out.weight"),
)


class Apart(NamedTuple):
    """A stack stored expert by expert, or a matrix stored layer by layer."""

    experts: int  # 0 for a matrix
    layers: Sequence[str]  # names of the layers concatenated in each matrix, in order
    rows: int  # of each layer
    columns: int  # of each layer
    outer: str  # name of the experts' module

    @property
    def shape(self) -> tuple[int, ...]:
        return *([self.experts] if self.experts else []), len(self.layers) * self.rows, self.columns

    def tensors(self) -> Iterator[tuple[str, int, int]]:
        """Yield each stored tensor with its expert and its first row in the expert's matrix."""
        for expert in range(self.experts or 1):  # without `product`, which would store all numbers that a plan names
            outer = f"{self.outer}.{expert}" if self.experts else self.outer
            yield from ((f"{outer}.{layer}.weight", expert, k * self.rows) for k, layer in enumerate(self.layers))


class Base:
    """The tensors of a model to merge adapters into, found by the names of the model."""

    def __init__(
        self,
        title: str,  # the path, for messages
        names: Collection[str],  # of the stored tensors
        config: Mapping[str, Any] | None,
        shape: Callable[[str], tuple[int, ...]],  # of a stored tensor
        target: Callable[[str], AdapterTarget],  # a stored tensor
        *,
        heads: Collection[str] = (),  # names of tied heads, stored or not
        places: Mapping[str, str | Apart | Divided] | None = None,  # found in the whole base, if this is a part of it
    ) -> None:
        self.title, self.names, self._shape, self._target = title, names, shape, target
        model_type = (config or {}).get("model_type")
        self.model_type = model_type if isinstance(model_type, str) else None
        self.is_part = places is not None
        # Places other than a tensor of the same name, by the names of the model looked up so far.
        self.places = dict(places or {})
        self.unmapped: dict[str, str] = {}  # names of the model -> reason why they have no place
        self.turned: set[str] = set()  # names of the model whose matrices are stored transposed
        self._renames = has_rules(config)
        self._config, self._heads = config, heads
        # Tensors that an adapter brings whole, with another number of rows or in addition: their shapes and dtypes.
        self.grown: dict[str, AdapterTarget] = {}
        self.rows_before: dict[str, int] = {}  # of those with another number of rows

    def grow(self, modules: Iterable[tuple[Adapter, Mapping[str, Mapping[str, str]]]], heads: Heads) -> None:
        """Find the embeddings and heads of a larger vocabulary, and the task heads that the base lacks."""
        sizes = vocabulary_sizes(self._config)
        values = ((a, module, parts[VALUE]) for a, own in modules for module, parts in own.items() if VALUE in parts)
        for adapter, module, value in values:
            place, shape = self.find(module), adapter.shape(value)
            row: dtypes.Dtype | None = dtypes.parse(adapter.checkpoint.tensors[value].dtype)
            if adapter.mlx or row is None or not row.floating or module in self.unmapped:
                continue
            if place in heads.added or (place is None and self._is_task_head(adapter, module)):
                place = module
            elif isinstance(place, str) and place in self.names:
                before, row = self._shape(place), self._target(place).row
                grows = len(before) > 0 and before[0] != shape[0] and before[1:] == shape[1:]
                if not grows or not (before[0] in sizes or self.is_part or f".{place}".endswith(_VOCABULARY)):
                    continue
                self.rows_before[place] = before[0]
            else:
                continue
            work = np.dtype(np.float64 if row is not None and row.code == "F64" else np.float32)
            self.grown.setdefault(place, AdapterTarget(place, shape, row, work, never_read))
        if self.rows_before and not self.is_part:
            self._check_vocabulary()

    def _is_task_head(self, adapter: Adapter, module: str) -> bool:
        """Return whether an adapter brings a trained module below an outermost module that the base lacks."""
        outer = module.partition(".")[0] + "."
        known = any(name.startswith(outer) for name in (*self.names, *self._heads))
        return adapter.is_copy(module) and not known

    def _check_vocabulary(self) -> None:
        """Refuse vocabularies of two sizes."""
        first, before = next(iter(self.rows_before.items()))
        after = self.grown[first].shape[0]
        for name in (name for name in self.names if f".{name}".endswith(_VOCABULARY) or name in self.rows_before):
            rows = [*self.target(name).shape, 0][0]
            if rows != after and (name in self.grown or rows == before):
                text = (
                    f"the adapter gives {show(first)} {after} rows instead of {before}, but {show(name)} has {rows}: "
                )
                text += "train and save embedding and head together"
                raise UnsupportedError(text, path=self.title, tensor=name)

    def find(self, name: str) -> str | Apart | Divided | None:
        """Return where a tensor of the model is stored; None if the base lacks it."""
        if name in self.grown:
            return name
        if name not in self.places and not self.is_part:
            if not self._renames and name in self.names:
                return name
            texts = [name, *(name.replace(part, stored) for part, stored in _RENAMED if part in name)]
            place = next((place for place in map(self._place, texts) if place is not None), None)
            if place is None or place == name:
                return place
            self.places[name] = place
        return self.places.get(name, name if name in self.names else None)

    @cached_property
    def _known(self) -> ModelNames:
        """The places by the names of the model; few names are missing, so most bases need none."""
        stored = stored_names(self.names, self.title)
        return ModelNames(self._config, {**dict(zip(self._heads, self._heads, strict=True)), **stored})

    def _place(self, name: str) -> str | Apart | Divided | None:
        place = self._known.find(name)
        if isinstance(place, Turned):
            self.turned.add(name)
            return place.stored
        if isinstance(place, Joined):
            outers, layers, _ = zip(*(stored.rsplit(".", 2) for stored in place.stored), strict=True)
            apart = self._with_sizes(Apart(0, layers, 0, 0, outers[0]))
            if apart is not None:
                return apart
            place = Unmapped(f"transformers joins {', '.join(map(show, place.stored))}")
        if isinstance(place, Divided) and (not (shape := self._shape(place.stored)) or shape[0] % place.parts):
            place = Unmapped(f"{show(place.stored)} does not consist of {place.parts} equal parts")
        if isinstance(place, Unmapped):
            self.unmapped[name] = place.reason
            return None
        return self._stack(name) if place is None else place

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that `find` finds."""
        place = self.find(name) or name
        if isinstance(place, Divided):
            rows, *columns = self._shape(place.stored)
            return rows // place.parts, *columns
        if isinstance(place, Apart):
            return place.shape
        return self.grown[place].shape if place in self.grown else self._shape(place)

    def target(self, stored: str) -> AdapterTarget:
        """Return a stored tensor, or one that an adapter brings whole."""
        return self.grown[stored] if stored in self.grown else self._target(stored)

    def _stack(self, name: str) -> Apart | None:
        """Return the stack of this name, or None if the base lacks its experts."""
        outer, _, last = name.rpartition(".")
        choices: Sequence[tuple[str, ...]] = _LAYERS.get(last, ())
        if STACK in name:
            block, _, last = name.removesuffix(".weight").rpartition(STACK)
            outer, choices = f"{block}.experts", [(layer,) for layer in _MLX_LAYERS.get(last, ())]
        for layers in choices:
            first = self._known.find(f"{outer}.0.{layers[0]}.weight")
            if not isinstance(first, str) or not first.endswith(end := f".0.{layers[0]}.weight"):
                continue
            inner = first.removesuffix(end)
            present = (all(f"{inner}.{k}.{layer}.weight" in self.names for layer in layers) for k in count())
            stack = self._with_sizes(Apart(sum(takewhile(bool, present)), layers, 0, 0, inner))
            if stack is not None and stack.experts:
                return stack
        return None

    def _with_sizes(self, apart: Apart) -> Apart | None:
        """Return tensors with their common shape, or None if they are no matrices of one shape."""
        names = [stored for stored, _, _ in apart.tensors()]
        shapes = {self._shape(stored) for stored in names} if all(name in self.names for name in names) else ()
        matrices = len(shapes) == 1 and len(shape := next(iter(shapes))) == 2
        return apart._replace(rows=shape[0], columns=shape[1]) if matrices else None


# ---- modules ----

# Models that store experts as [experts, in, out], which every version of PEFT knows.
_IN_FIRST = frozenset(("gpt_oss",))

# Models whose experts have no gate, so that shapes cannot tell up_proj, which they create first, from down_proj.
_UP_FIRST = frozenset(("nemotron_h",))

# PEFT adds this to a module's name for each further parameter it changes.
_INSIDE = ".base_layer"
# Limit on the changes of one module to tell apart by shape, because every order is tried.
_MAX_PARAMETERS = 6


class Fit(NamedTuple):
    """How the modules of an adapter map to a base."""

    parameters: Mapping[str, str]  # module -> tensor, see `_parameters`; all other modules: ``weight``
    transposed: frozenset[str]  # modules with weights stored as [in, out]
    unclear: Mapping[str, str]  # module -> reason why it cannot be merged


def fitted(adapter: Adapter, base: Base) -> Fit:
    """Find the tensors of a base that an adapter changes."""
    if adapter.fit is not None:
        return adapter.fit
    unclear: dict[str, str] = {}
    parameters = _parameters(adapter, base, unclear)
    turned: dict[str, bool | None] = {}  # whether a weight is stored as [in, out]; None if it is square
    for module, parts in adapter.modules.items():
        name, sizes = parameters.get(module, f"{module}.weight"), _sizes(adapter, module)
        whole = module if VALUE in parts else f"{module}.bias" if BIAS in parts else name
        base.find(whole)  # so that a base with unclear names is refused at once
        plain = adapter.mlx and _last(module) not in CONV1D
        if plain or sizes is None or module in unclear or not base.find(name):
            continue
        shape = base.shape(name)
        # PEFT never transposes one expert.
        turns = len(shape) == (3 if module in parameters else 2) and shape[:-2] != (1,)
        if turns and sizes in (shape[-2:], shape[:-3:-1]):
            turned[module] = None if sizes == sizes[::-1] else sizes != shape[-2:]
    turned.update(_guesses(adapter, turned, parameters, base.model_type))
    for module, order in turned.items():
        if order is None:
            name, experts = parameters.get(module, f"{module}.weight"), module in parameters
            question = "[out, in] or [in, out]? 'fan_in_fan_out' may not hold for every layer of this adapter"
            if experts:
                question = "[experts, out, in] or [experts, in, out]? Square experts do not show the order, and the "
                question += "adapter changes no other experts"
            elif not base.model_type:
                question += "; open the base as a folder, because its config.json may show the order"
            change = f"tensor {show(adapter.modules[module][A])} of the adapter changes {show(name)} of {base.title}"
            unclear[module] = f"{change}, which is {list(base.shape(name))}: {question}"
    transposed = frozenset(m for m in adapter.modules if turned.get(m, adapter.transposed and m not in parameters))
    return Fit(parameters, transposed, unclear)


def _sizes(adapter: Adapter, module: str) -> tuple[int, ...] | None:
    """Return the rows of B and the columns of A, or None if the module lacks two matrices."""
    parts = adapter.modules[module]
    if not {A, B} <= parts.keys():
        return None
    a, b = adapter.shape(parts[A]), adapter.shape(parts[B])
    if len(a) != 2 or len(b) != 2:
        return None
    return (b[1], a[0]) if adapter.mlx else (b[0], a[1])


def _parameters(adapter: Adapter, base: Base, unclear: dict[str, str]) -> dict[str, str]:
    """Return the tensors named by ``target_parameters``, and MLX's stacks of separate experts, by module."""
    if adapter.mlx:
        stacks = {module: f"{module}.weight" for module in adapter.modules if STACK in module}
        return {module: name for module, name in stacks.items() if isinstance(base.find(name), Apart)}
    if not adapter.parameters:
        return {}
    targets: dict[str, list[str]] = {}  # by the end of their module's name
    for target in adapter.parameters:
        place, _, last = target.rpartition(".")
        targets.setdefault(place, []).append(last)
    depth = max(place.count(".") for place in targets) + 1
    wrapped = grouped((module for module, parts in adapter.modules.items() if A in parts), outermost)
    parameters: dict[str, str] = {}
    for outer, modules in wrapped.items():
        last_parts = outer.rsplit(".", depth)[-depth:]
        places = (".".join(last_parts[begin:]) for begin in range(len(last_parts), -1, -1))
        targeted = ((place, f"{outer}.{last}") for place in places for last in targets.get(place, ()))
        names = [*dict.fromkeys(name for place, name in targeted if place or not outer or base.find(name))]
        if names:
            parameters.update(_matched(adapter, sorted(modules, key=len), names, base, unclear))
    return parameters


def outermost(module: str) -> str:
    """Return the name of the module inside PEFT's wrappers."""
    end = len(module)
    while module.endswith(_INSIDE, 0, end):
        end -= len(_INSIDE)
    return module[:end]


def _matched(
    adapter: Adapter, modules: Sequence[str], names: Sequence[str], base: Base, unclear: dict[str, str]
) -> dict[str, str]:
    """Match nested changes of a module with its parameters, in the order in which its layer created these."""
    absent = next((name for name in names if not base.find(name)), None)
    if absent is not None:
        return dict.fromkeys(modules, absent)
    orders, reason = [tuple(names)], ""
    if len(names) != len(modules):
        reason = f"it has {len(modules)} of this module, but 'target_parameters' names {len(names)} tensors there"
    elif 1 < len(names) <= _MAX_PARAMETERS:
        suits = {(module, name): _suits(adapter, module, base.shape(name)) for module in modules for name in names}
        tried = (order for order in permutations(names) if all(map(suits.get, zip(modules, order, strict=True))))
        orders = [*tried] or orders
        if base.model_type in _UP_FIRST and tuple(sorted(names)) in orders:  # down_proj is the last, so the outermost
            orders = [tuple(sorted(names))]
    if len(orders) > 1 or len(names) > _MAX_PARAMETERS:
        reason = "neither shapes nor names tell which change belongs to which tensor"
    if not reason:
        return dict(zip(modules, orders[0], strict=False))
    changes = " and ".join(show(adapter.modules[module][A]) for module in modules[:_MAX_PARAMETERS])
    of_base = " and ".join(map(show, names[:_MAX_PARAMETERS]))
    unclear.update(dict.fromkeys(modules, f"{changes} of the adapter change {of_base} of {base.title}: {reason}"))
    return dict.fromkeys(modules, names[0])


def _suits(adapter: Adapter, module: str, shape: tuple[int, ...]) -> bool:
    sizes = _sizes(adapter, module)
    return sizes == shape if len(shape) == 2 else len(shape) == 3 and sizes in (shape[1:], shape[:0:-1])


# ---- orders of axes ----


def _guesses(
    adapter: Adapter, turned: Mapping[str, bool | None], parameters: Mapping[str, str], model_type: str | None
) -> dict[str, bool | None]:
    """Return whether square weights are stored as [in, out], from the orders of others; None if that is ambiguous."""
    # PEFT asks a module for the order of all its parameters, and each layer for its own; it stores that of the last.
    experts: dict[str, set[bool]] = {}  # orders by outermost module
    layers: dict[str, set[bool]] = {}  # by the last part of the module's name
    for module, order in turned.items():
        if order is not None:
            orders, key = (experts, outermost(module)) if module in parameters else (layers, _last(module))
            orders.setdefault(key, set()).add(order)
    every_expert, every_layer = set().union(*experts.values()), set().union(*layers.values())
    conv1d, flag = set().union(*(orders for last, orders in layers.items() if last in CONV1D)), adapter.transposed
    plain = (module for module, parts in adapter.modules.items() if A in parts and module not in parameters)
    unsure = not conv1d and not flag and not all(_last(module) in CONV1D for module in plain)
    guesses: dict[str, bool | None] = {}
    for module in (module for module, order in turned.items() if order is None):
        last = _last(module)
        if module in parameters:
            known = {True} if model_type in _IN_FIRST else set()
            choices = [experts.get(outermost(module), set()), every_expert, known]
        elif model_type in CONV1D_MODELS and not adapter.mlx:
            choices = [{last in CONV1D}]
        else:
            choices = [layers.get(last, set()), conv1d if last in CONV1D else set()]
            unknown = adapter.mlx and model_type in (None, *CONV1D_MODELS)  # in the form of MLX or transformers?
            if every_layer <= {flag} and not (unsure and last in CONV1D) and not unknown:
                choices.append({flag})
        guesses[module] = next((next(iter(orders)) for orders in choices if len(orders) == 1), None)
    return guesses


def _last(module: str) -> str:
    return module.rpartition(".")[2]
