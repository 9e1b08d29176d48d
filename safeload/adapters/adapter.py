"""Open adapters of PEFT, MLX, llama.cpp and diffusion models: settings, and tensors by module and role."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import accumulate
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..core.arrays import Array
from ..core.checkpoint import Checkpoint
from ..core.files import Location, read_json
from ..core.forking import cached_property
from ..core.opening import open_paths
from ..core.registry import GGUF
from ..core.text import error_about, show, warning
from ..errors import FormatError, UnsupportedError
from ..models.module_names import adapter_kind, diffusion_writer, foreign_kind, unwrapped
from ..quant.finder import is_conv1d
from ..quant.patterns import compiled
from . import diffusion, kinds
from .kinds import BIAS, CORE, EMBEDDING_A, EMBEDDING_B, MAGNITUDE, SCALE, TOKENS, VALUE, A, B, changing

# The files of PEFT, and the beginning of the names in them.
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

# ---- settings ----

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
    """Refuse other kinds of adapters, variants of LoRA, and settings that no value follows."""
    kind, key = config.get("peft_type"), next(filter(config.get, _REFUSED), None)
    problem = None if key is None else f'"{key}" {_REFUSED[key]} safeload does not merge'
    row = kinds.KINDS.get("LORA" if kind == "TRAINABLE_TOKENS" else kind) if isinstance(kind, str) else None
    if row is None:
        state = f'"peft_type" is {show(kind)}' if "peft_type" in config else 'there is no "peft_type"'
        titles = ", ".join(kind.title for kind in kinds.KINDS.values())
        problem = f"{state}. safeload merges adapters of the kinds {titles}, and trained tokens"
    elif row.known is not None and problem is None:
        known = {*row.known, *row.settings}
        key = next((key for key, value in config.items() if value and key not in known), None)
        problem = None if key is None else f'"{key}" is {show(config[key])}, which is no known setting of {row.title}'
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


def _kept(config: Mapping[str, Any], path: str) -> dict[str, int]:
    """Return the ranks of AdaLoRA's modules after training."""
    values = config.get("rank_pattern") or {}
    lists = values.values() if isinstance(values, Mapping) else [values]
    if not all(isinstance(kept, list) and all(type(flag) is bool for flag in kept) for kept in lists):
        raise FormatError(f'"rank_pattern" must map names to lists of true and false, got {show(values)}', path)
    return {name.partition(".lora_E")[0]: sum(kept) for name, kept in values.items()}


def _setting(config: Mapping[str, Any], key: str, default: Any, path: str) -> Any:
    """Return a setting of the type of its default; one without a default is a text or a list of names."""
    if key not in config:
        return default
    if type(default) is bool:
        return _flag(config, key, path)
    if default is not None:
        return _number(config, key, default, path, whole=type(default) is int)
    return config[key] if isinstance(config[key], str) else _names(config, key, path)


def _flag(config: Mapping[str, Any], key: str, path: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise FormatError(f'"{key}" must be true or false, got {show(value)}', path)
    return bool(value)


# ---- tensors ----

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
# Ends of names of kohya, ComfyUI, LyCORIS, Diffusers and, last, XLabs; the first that fits counts.
_ALPHA_OF = "alpha"
_DIFFUSION = {
    ".lora_A.weight": A,
    ".lora_B.weight": B,
    ".lora_B.bias": BIAS,
    ".lora_down.weight": A,
    ".lora_up.weight": B,
    **{f"{form}.down.weight": A for form in (".lora", "_lora", ".lora_linear_layer")},
    **{f"{form}.up.weight": B for form in (".lora", "_lora", ".lora_linear_layer")},
    **{f"{form}.alpha": _ALPHA_OF for form in (".lora", "_lora", ".lora_linear_layer", "")},
    ".dora_scale": SCALE,
    ".lora_magnitude_vector": MAGNITUDE,
    ".lora_magnitude_vector.weight": MAGNITUDE,
    ".lora_mid.weight": CORE,
    **{f".hada_{role}": f"hada_{role}" for role in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    **{f".lokr_{role}": f"lokr_{role}" for role in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    ".down.weight": A,
    ".up.weight": B,
}
_GGUF = {"lora_a": A, "lora_b": B}
_GGUF_ROLE = re.compile(r"(?:\.weight)?\.(lora_[ab])\Z", re.ASCII)
# Each role needs at least one of these partners.
_FACTORS = {A: {B}, B: {A}, EMBEDDING_A: {EMBEDDING_B}, EMBEDDING_B: {EMBEDDING_A}}
_PARTNERS = {**_FACTORS, BIAS: {B}, MAGNITUDE: {B, EMBEDDING_B}}
# Wrappers in PEFT's module names, and names of other methods.
_SAVED, _UNUSED = ".modules_to_save.", ".original_module."
_WRAPPED = [".base_layer.", ".token_adapter.", _SAVED]
_OTHERS = re.compile(r"(?:^|[._])(?:lora_|hada_|lokr_|ia3_|vera_|prompt_|b?oft_|ranknum)", re.ASCII)


def _names_of(kind: kinds.AdapterKind) -> tuple[re.Pattern[str], Mapping[str, str]]:
    """Return a pattern of the names with a role, with the groups of `_ROLE`, and the roles by the ends of names."""
    if kind.known is None:
        return _ROLE, _PEFT
    stems = {f"lora_{role}" if role in (A, B) else role: role for form in kind.forms for role in form}
    pattern = rf"\.({'|'.join(sorted(stems))})(?:\.(?!weight\Z)([^.]+))?(\.weight)?\Z"
    return re.compile(pattern, re.ASCII), {f".{stem}{end}": stems[stem] for stem in stems for end in ("", ".weight")}


class Fit(NamedTuple):
    """How the modules of an adapter map to a base."""

    parameters: Mapping[str, str]  # module -> tensor other than its ``weight``
    transposed: frozenset[str]  # modules with weights stored as [in, out]
    unclear: Mapping[str, str]  # module -> reason why it cannot be merged


class Adapter:
    """An open adapter: the settings behind the values of merged tensors, and its tensors by module of the base.

    A subclass for each dialect reads its settings, and the module and the role in a tensor's name.
    """

    writer = ""
    kind = kinds.KINDS["LORA"]
    other_kinds: tuple[kinds.AdapterKind, ...] = ()  # that modules may have too
    settings: Mapping[str, Any] = MappingProxyType({})  # of the kind
    kept: Mapping[str, int] = MappingProxyType({})  # ranks after training, by module
    by_module = True  # a module changes alone, without the one it is tied to, and can have a trained copy
    joins_stacks = True  # a pair of matrices has the factors of all matrices in a stack
    of_transformers = True  # its model stores the weights of Conv1D as [in, out], like transformers
    norms_of_outputs = True  # DoRA has a norm for each output of a module; False: for each row of its weight
    outer = 0  # the axis of B with the outputs
    ends = re.compile(r"\.")  # separators in a module's name; the name of the layer follows the last
    dora_key = "use_dora"
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
        if self.kind.problem is not None:
            roles = {role for parts in self.modules.values() for role in parts}
            if (text := self.kind.problem(roles, config, self.settings)) is not None:
                raise error_about(UnsupportedError, text, path=config_at.shown)

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

    def scaling(self, module: str, rank: int | None, tensor: str) -> float:
        """Return the factor of a module's change; ``rank`` is None if its tensors do not show it."""
        factor = self.alpha_of(module) * self.weight
        if self.default_rank is None:
            return factor
        expected = self.kept.get(module, _of_module(self.ranks, "rank_pattern", module, self.default_rank))
        rank = expected if rank is None else rank
        if expected != rank:
            assert self.kind.rank_key is not None
            key = self.kind.rank_key[0] if expected == self.default_rank else "rank_pattern"
            text = f"has rank {rank}, but {show(key)} of {CONFIG} says {expected}"
            raise error_about(FormatError, text, path=self.config_at.shown, tensor=tensor)
        if self.kind.alpha_key is None:
            return factor
        if self.kind.title == "AdaLoRA":  # which divides by the first rank, and takes a rank for an alpha of 0
            return (factor if self.alpha > 0 else rank * self.weight) / (self.default_rank + 1e-5)
        return factor / (math.sqrt(rank) if self.rslora else rank)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.tensors[name].shape

    def shapes(self, parts: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a module's tensors by role."""
        return {part: self.shape(name) for part, name in parts.items()}

    def is_copy(self, name: str) -> bool:
        """Return whether PEFT trained a copy of the module of a base tensor, which replaces the tensor."""
        stored = self.modules.get(name, {}).get(VALUE)
        outer = accumulate(name.split(".")[:-1], "{}.{}".format)  # the module and the modules around it
        trained = stored is not None and (_SAVED in stored or any(module.endswith(self.saved) for module in outer))
        return trained and self.by_module

    @cached_property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the tokens whose rows a tensor of the adapter has, by its name."""
        tokens = {}
        for module, parts in ((module, parts) for module, parts in self.modules.items() if TOKENS in parts):
            ends = [end for end in self.indices if f".{module}".endswith(f".{end}" if end else "")]
            tokens[parts[TOKENS]] = self.indices[max(ends, key=len)] if ends else ()
        return tokens

    def turns(self, module: str) -> bool:
        """Return whether the base can store the weight of a module as [in, out], which shapes and names tell."""
        return True

    def sizes(self, module: str) -> tuple[int, int] | None:
        """Return the rows of B and the columns of A, or None if a module lacks two matrices."""
        shapes = self.shapes(self.modules[module])
        a, b = shapes.get(A, ()), shapes.get(B, ())
        return (b[self.outer], a[1 - self.outer]) if len(a) == len(b) == 2 else None

    def expected(
        self, shape: kinds.Shape, a: kinds.Shape, *, parameter: bool, turned: bool, embeds: bool
    ) -> tuple[bool, bool, kinds.Shape, kinds.Shape]:
        """Return whether a weight is a stack, whether its rows are the columns of A, and the shapes of A and B.

        ``a`` is the shape of A. A ``parameter`` is none of a module's weights, and can be a stack.
        """
        stacked = parameter and len(shape) == 3
        if len(shape) > 2 and not parameter:  # a convolution
            return False, turned, (a[0], *shape[1:]), (shape[0], a[0], *(1 for _ in shape[2:]))
        sizes = shape[1:] if stacked else shape
        outer, inner = sizes[::-1] if turned else sizes
        return stacked, turned, (a[0], inner), (outer, a[0])

    def matrices(self, a: Array, b: Array, count: int) -> tuple[Array, Array]:
        """Return A and B of a number of matrices, [matrices, r, columns] and [matrices, rows, r]."""
        rank, columns = len(a) // count, math.prod(a.shape[1:])  # rows of A matrix by matrix, columns of B rank by rank
        return a.reshape(count, rank, columns), b.reshape(len(b), rank, count).transpose(2, 0, 1)

    def leave_out(self, modules: dict[str, Mapping[str, str]], known: diffusion.Names | None, title: str) -> None:
        """Leave out modules without a place in the base; ``known`` has the places of a diffusion model."""

    def rank(self, module: str) -> int:
        """Return the rank of a module that changes a weight, summed over the matrices of a stack; 0 if it has none."""
        rank = kinds.rank_of(self.shapes(self.modules[module]))
        return int(_of_module(self.ranks, "rank_pattern", module, self.default_rank or 0)) if rank is None else rank

    def _modules(self) -> dict[str, dict[str, str]]:
        """Group tensor names by module of the base and role; a whole tensor is its own module."""
        checkpoint = self.checkpoint
        modules: dict[str, dict[str, str]] = {}
        # Without the base's own values, stored beside their replacements.
        shared: dict[str, str] = {}  # role -> tensor of all modules
        for name in (name for name in checkpoint if _UNUSED not in name):
            stem = unwrapped(name).removeprefix("base_model.").partition(".")[0]
            if stem in kinds.SHARED and stem in self.kind.forms[0]:
                shared[stem] = name
                continue
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
                raise FormatError(text + show(self.dora_key), checkpoint.path)
            if changing(parts):
                parts.update({role: name for role, name in shared.items() if role not in parts})
            if changing(parts) and kinds.kind_of(parts) not in (self.kind, *self.other_kinds):
                self._refuse_form(parts)
        return modules

    def _refuse_form(self, parts: Mapping[str, str]) -> NoReturn:
        """Refuse a module without all tensors of its kind."""
        roles = changing(parts)
        alike = (kind for kind in (self.kind, *kinds.KINDS.values()) if any(roles & form for form in kind.forms))
        kind = next(alike, self.kind)
        text = f"of the adapter belongs to a module with {' and '.join(sorted(roles))}, but {kind.title} has "
        text += ", or ".join(" and ".join(sorted(form)) for form in kind.forms)
        if kind.title == "VeRA" and not roles.issuperset(kinds.SHARED):
            text = f"of the adapter needs the projections {' and '.join(kinds.SHARED)}, which depend on the machine of "
            text += "the training: save the adapter with save_projection=True"
        elif "oft_r" in roles:
            text += "; PEFT 0.13 and older have another OFT: merge this adapter with PEFT 0.13"
        raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=parts[min(roles)])

    def factor_of(
        self, name: str, prefix: str, pattern: re.Pattern[str], roles: Mapping[str, str], wrappers: Iterable[str]
    ) -> tuple[str, str]:
        """Return the module and the role of a tensor by a pattern; refuse names of other methods."""
        bare = unwrapped(name)
        rest = bare.removeprefix(prefix)
        match = pattern.search(rest)
        if match is not None and (part := roles.get(f".{match[1]}{match[3] or ''}")) is not None:
            return rest[: match.start()], part
        if _OTHERS.search(rest):
            other = adapter_kind([bare])
            named = "" if other is None or f" {self.kind.title} " in other else f" ({other})"
            text = f"of the adapter belongs to a method other than {self.kind.title}{named}"
            text += "; merge this adapter with PEFT"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=name)
        for wrapped in wrappers:
            while wrapped in rest:  # wrappers can nest
                rest = rest.replace(wrapped, ".")
        return rest, VALUE


class _PeftAdapter(Adapter):
    writer = "PEFT"

    def read_settings(self, config: Mapping[str, Any], path: str) -> None:
        _check_method(config, path)
        kind = self.kind = kinds.KINDS.get(config["peft_type"], self.kind)
        if kind.rank_key is not None:
            self.default_rank = int(_number(config, *kind.rank_key, path, whole=True))
        if kind.alpha_key is not None:
            self.alpha = _number(config, kind.alpha_key, 8, path)
        self.dora = _flag(config, "use_dora", path)
        self.rslora = _flag(config, "use_rslora", path)
        self.transposed = _flag(config, "fan_in_fan_out", path)
        self.settings = {key: _setting(config, key, default, path) for key, default in kind.settings.items()}
        adaptive = kind.title == "AdaLoRA"
        self.kept = _kept(config, path) if adaptive else {}
        self.ranks = {} if adaptive else _numbers(config, "rank_pattern", path, whole=True)
        self.alphas = _numbers(config, "alpha_pattern", path)
        self.parameters = _names(config, "target_parameters", path)
        self.saved = _names(config, "modules_to_save", path)
        self.indices = _token_indices(config, path)
        self.tying = _flag(config, "ensure_weight_tying", path)
        self._form = _names_of(kind)

    @cached_property
    def _wrappers(self) -> list[str]:
        """The wrappers in names, which in a saved state dict contain the adapter's own name."""
        roles = (match for name in self.checkpoint if (match := self._form[0].search(name)) is not None and match[2])
        own = list(dict.fromkeys(match[2] for match in roles)) or ["default"]
        if len(own) > 1:
            text = f"several adapters in one file: {', '.join(map(show, own[:5]))}; save each one with PEFT"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path)
        return [f"{_SAVED}{own[0]}.", *_WRAPPED]

    def parse_name(self, name: str) -> tuple[str, str]:
        wrappers = self._wrappers
        if not unwrapped(name).startswith(PREFIX):
            text = f"does not begin with {show(PREFIX)}, as PEFT writes it"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=name)
        return self.factor_of(name, PREFIX, *self._form, wrappers)


class _MlxAdapter(Adapter):
    writer, dora_key = "MLX", "fine_tune_type"
    by_module = joins_stacks = of_transformers = norms_of_outputs = False
    outer = 1

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
        return self.factor_of(name, "", _MLX_ROLE, _MLX, _WRAPPED)

    def turns(self, module: str) -> bool:
        return is_conv1d(module)

    def expected(
        self, shape: kinds.Shape, a: kinds.Shape, *, parameter: bool, turned: bool, embeds: bool
    ) -> tuple[bool, bool, kinds.Shape, kinds.Shape]:
        rank = a[1]
        if len(shape) == 3:
            return True, False, (shape[0], rank, shape[2]), (*shape[:2], rank)
        rows, columns = shape[0], math.prod(shape[1:])
        linear = a == (columns, rank) and not embeds
        if a == (rows, rank) and (turned or not linear):  # such as an embedding
            return False, True, (rows, rank), (rank, columns)
        return False, False, (columns, rank), (rank, rows)

    def matrices(self, a: Array, b: Array, count: int) -> tuple[Array, Array]:
        return (a.T[None], b.T[None]) if a.ndim == 2 else (a, b)

    def rank(self, module: str) -> int:
        return sum(self.shapes(self.modules[module]).get(A, ())[1:2])

    def scaling(self, module: str, rank: int | None, tensor: str) -> float:
        return self.alpha * self.weight


class _DiffusionAdapter(Adapter):
    dora, other_kinds = None, kinds.OF_LYCORIS
    ends = re.compile(r"\.|_[0-9]+_")  # kohya writes "_" for "."

    def read_settings(self, config: Mapping[str, Any], path: str) -> None:
        """Set the writer, and the settings of PEFT that Diffusers writes for each part of a pipeline."""
        self.writer = next(filter(None, map(diffusion_writer, self.checkpoint)), "diffusers")
        configs: dict[str, dict[str, Any]] = {}
        self._prefix = "transformer." if "peft_type" in config else ""  # `save_lora_adapter` names no part
        for key, value in config.items():
            part, _, setting = (self._prefix + key).partition(".")
            configs.setdefault(part, {})[setting] = value
        # rank, alpha, rank_pattern, alpha_pattern, use_rslora
        self._settings: dict[str, tuple[int, float, dict[str, float], dict[str, float], bool]] = {}
        for part, settings in configs.items():
            if settings.get("peft_type", "LORA") != "LORA":
                text = f'"peft_type" of Diffusers must be "LORA", got {show(settings["peft_type"])}'
                raise error_about(UnsupportedError, text, path=path)
            _check_method({"peft_type": "LORA", **settings}, path)
            patterns = _numbers(settings, "rank_pattern", path, whole=True), _numbers(settings, "alpha_pattern", path)
            rank, alpha = int(_number(settings, "r", 8, path, whole=True)), _number(settings, "lora_alpha", 8, path)
            self._settings[part] = rank, alpha, *patterns, _flag(settings, "use_rslora", path)

    def parse_name(self, name: str) -> tuple[str, str]:
        bare = unwrapped(name)
        end = next((end for end in _DIFFUSION if bare.endswith(end)), None)
        if end is None:
            text = "of the adapter is no part of an adapter of a diffusion model"
            if (kind := foreign_kind(bare)) is not None:
                text = f"belongs to {kind}, which safeload does not merge"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=name)
        return self._prefix + diffusion.spelled(bare.removesuffix(end)), _DIFFUSION[end]

    def turns(self, module: str) -> bool:
        return False

    def leave_out(self, modules: dict[str, Mapping[str, str]], known: diffusion.Names | None, title: str) -> None:
        """Leave out the modules of parts of a pipeline outside the base, such as its text encoders."""
        left = [module for module in modules if known is None or known.lacks(module)]
        first = next((next(iter(modules[module].values())) for module in left), None)
        for module in left:
            modules.pop(module)
        if left and not modules:
            text = f"of the adapter belongs to a part of a pipeline that {title} does not have, as do all its others"
            if known is None:
                text = f"belongs to an adapter of {self.writer}, which needs a diffusion model, and {title} has no "
                text += "names of one that safeload knows (sd1, sdxl, sd3, flux, wan)"
            raise error_about(UnsupportedError, text, path=self.checkpoint.path, tensor=first)
        if left:
            which = f"{len(left)} of {len(left) + len(modules)} modules, such as that of {show(first)}"
            text = "%s: left out %s: %s does not have the parts of the pipeline that they change"
            warning(text, self.checkpoint.path, which, title)

    def _modules(self) -> dict[str, dict[str, str]]:
        """Take the alphas out of the tensors that change weights."""
        modules = super()._modules()
        names = {module: parts.pop(_ALPHA_OF) for module, parts in modules.items() if _ALPHA_OF in parts}
        values = self.checkpoint.load([*names.values()])
        self._own_alphas: dict[str, float] = {}
        for module, name in names.items():
            problem, alpha = None, float(values[name].reshape(-1)[0]) if values[name].size == 1 else math.nan
            if not modules[module]:
                problem = "has no factors"
            elif not abs(alpha) < 1e30:
                problem = f"must be one finite number, got {show(values[name].tolist())}"
            elif alpha == 0:
                problem = "is 0: kohya takes it for the rank, ComfyUI for 0"
            elif module.partition(".")[0] in self._settings:
                problem = "gives an alpha, and so does the metadata of the file"
            if problem is not None:
                raise error_about(UnsupportedError, f"of the adapter {problem}", path=self.checkpoint.path, tensor=name)
            self._own_alphas[module] = alpha
        return modules

    def alpha_of(self, module: str) -> float:
        part, _, rest = module.partition(".")
        if part in self._settings:
            _, default, _, alphas, _ = self._settings[part]
            return float(_of_module(alphas, "alpha_pattern", rest, default))
        return self._own_alphas.get(module, self.rank(module))

    def scaling(self, module: str, rank: int | None, tensor: str) -> float:
        part, _, rest = module.partition(".")
        root = False
        if rank is None:  # of a LoKr without factors, whose alpha LyCORIS ignores
            return self.weight
        if part in self._settings:
            default, _, ranks, _, root = self._settings[part]
            expected = _of_module(ranks, "rank_pattern", rest, default)
            if expected != rank:
                text = f"has rank {rank}, but the metadata of the file says {expected}"
                raise error_about(FormatError, text, path=self.checkpoint.path, tensor=tensor)
        if rank < 1:
            raise error_about(FormatError, "has rank 0", path=self.checkpoint.path, tensor=tensor)
        return self.alpha_of(module) / (math.sqrt(rank) if root else rank) * self.weight


# The key of Diffusers in a file's metadata: the settings of PEFT, each name after a part of the pipeline.
_METADATA = "lora_adapter_metadata"


def _settings_in(checkpoint: Checkpoint) -> Mapping[str, Any]:
    text = checkpoint.metadata.get(_METADATA)
    try:
        config = {} if text is None else json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{show(_METADATA)} is no JSON: {error}", checkpoint.path) from None
    if not isinstance(config, Mapping):
        raise FormatError(f"{show(_METADATA)} must be an object, got {show(config)}", checkpoint.path)
    return config


class _LlamaCppAdapter(Adapter):
    """An adapter in a GGUF file, configured by its metadata."""

    writer = "llama.cpp"

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

    def scaling(self, module: str, rank: int | None, tensor: str) -> float:
        assert rank is not None
        return (self.alpha / rank if self.alpha else 1.0) * self.weight  # llama.cpp takes an alpha of 0 for none

    def rank(self, module: str) -> int:
        return sum(self.shape(self.modules[module][B])[-1:])


def in_gguf(adapter: Adapter) -> bool:
    """Return whether an adapter has llama.cpp's names and rows, see `safeload.conversion.adapter_forms`."""
    return adapter.checkpoint.format == GGUF


def adapter_of(checkpoint: Checkpoint, weight: float = 1.0) -> Adapter:
    """Return an open checkpoint as an adapter, in the dialect of its names and its configuration."""
    file = checkpoint.weight_files[0]
    if checkpoint.format == GGUF:
        config: Any = checkpoint.metadata
        return _LlamaCppAdapter(
            checkpoint, weight, {key: config[key] for key in config}, Location(file.files, file.place)
        )
    if any(diffusion_writer(name) for name in map(unwrapped, checkpoint) if not name.startswith(PREFIX)):
        return _DiffusionAdapter(checkpoint, weight, _settings_in(checkpoint), Location(file.files, file.place))
    _check_names(checkpoint)
    config_at = Location(file.files, file.files.join(file.files.split(file.place)[0], CONFIG))
    try:
        config = read_json(config_at.path, CONFIG, file.files)
    except FileNotFoundError:
        _check_names(checkpoint, "")
        # Diffusers' `save_lora_adapter` and ComfyUI use the names of PEFT without the prefix.
        names = [*map(unwrapped, checkpoint)]
        if any(name.startswith(PREFIX) for name in names) or not any(name.endswith((*_DIFFUSION,)) for name in names):
            raise
        return _DiffusionAdapter(checkpoint, weight, _settings_in(checkpoint), Location(file.files, file.place))
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
            text = f"the weight of {show(path)} must be a finite number of at most 1e30, got {show(weight)}"
            raise ValueError(f"adapters: {text}")
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


def _check_names(checkpoint: Checkpoint, prefix: str = "base_model.") -> None:
    """Refuse the names of other tools before their missing configuration becomes the error."""
    for name in checkpoint:
        bare = unwrapped(name)
        if (not prefix or not bare.startswith(prefix)) and (kind := foreign_kind(bare)) is not None:
            text = f"belongs to {kind}, not to a LoRA of PEFT or MLX; merge it with its own tool, or convert it to PEFT"
            raise error_about(UnsupportedError, text, path=checkpoint.path, tensor=name)
