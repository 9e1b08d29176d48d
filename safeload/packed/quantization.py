"""The quantization of a checkpoint, parsed once from its configuration and carried along.

The configuration is in ``config.json``, in the metadata of safeload's own files, or in a file of an older tool beside
the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard, TypeVar

from ..base import dtypes, packing
from ..base.cached import cached_property
from ..base.text import clip, printable, show
from ..engine.run.weight_file import WeightFile
from ..errors import SafeloadError, UnsupportedError, VerificationError
from ..stores.json_file import parse_json, read_if_there
from .families import settings_of_modules
from .methods import (
    AUTO_ROUND,
    QUARK,
    TENSORRT,
    canonical_name,
    method_of,
    part_of,
    unknown_setting,
)
from .patterns import Pattern, compiled

# Depth to which a configuration is searched for a quantization: thinker_config.text_config is the deepest known.
_CONFIG_DEPTH = 4
QUANTIZATION = "quantization_config"
_CONFIG_KEYS = (QUANTIZATION, "compression_config")
# The ``quant_method`` of folders with safeload's own quantized tensors; the headers of their files describe them.
OWN = "safeload"
# Keys that list unquantized modules.
_OTHER_MODULES = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
# The key of TensorRT-LLM and of mlx-lm, which also stores a copy without a method under the first of `_CONFIG_KEYS`. If
# the two differ, MLX's readers use this key.
MLX_KEY = "quantization"
_MLX_SETTINGS = frozenset(("bits", "group_size"))
_MLX_MODULE = _MLX_SETTINGS | {"mode"}
# Keys with settings of single modules.
_OF_MODULES = ("dynamic", "extra_config", "quantized_layers")
# Words in auto-round's ``packing_format``, formerly ``backend``, if its layout is GPTQ's or AWQ's: layouts and kernels,
# as in "auto_round:gptq:exllamav2".
_LAYOUT_WORDS = frozenset(
    (
        "auto", "auto_round", "auto_gptq", "auto_awq", "gptq", "awq", "gptqmodel", "exllama", "exllamav2", "tritonv2",
        "torch",
    )
)  # fmt: skip
# Locations of compressed-tensors' transforms: in weights alone, which the model runs with as stored, or in both factors
# of attention scores, which stay the same.
_MERGED = frozenset(("weight_input", "weight_output"))
_SCORES = frozenset(("q_attn", "k_cache"))
# Longest side of a block. Tensors with a single scale have no block.
_LONGEST_BLOCK = 1 << 31
# Maximum number of characters to quote from a configuration in a message.
_QUOTED = 40

# Files beside weights with their quantization.
BESIDE = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
# Keys of a config group beside the settings of its weights, without an effect on weights.
_BESIDE_WEIGHTS = frozenset(("weights", "targets", "input_activations", "output_activations"))
# Methods of files without a ``quant_method``: they hold nothing but the quantization.
_METHODS_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

_Computed = TypeVar("_Computed")


@dataclass(frozen=True)
class Quantization:
    """The description of quantized weights in a configuration."""

    key: str  # such as "quantization_config"
    method: str | None  # such as "gptq"; None if not given
    values: Mapping[str, Any]  # everything under the key
    rival: Quantization | None = None  # that of ``quant_method``, which holds if no tensor has MLX's codes

    def __str__(self) -> str:
        return self.key if self.method is None else f"{self.key} {self.method[:_QUOTED]}"

    @property
    def shown(self) -> str:
        """The method, and the unsupported setting, for messages."""
        method, why = self.method or self.key, self.unread_layout or self.unknown
        return method if why is None or why.startswith("quant_method") else f"{method}, {why}"

    def text(self, model_type: str | None = None) -> str:
        """Return the description as JSON for a file of packed tensors, without lists of other modules; "" for none."""
        # Sort only these keys: the order of the patterns of `dynamic` matters.
        values = {key: value for key, value in sorted(self.values.items()) if key not in _OTHER_MODULES}
        described: dict[str, Any] = {self.key: values} if self.key else {}
        if model_type is not None:
            described["model_type"] = model_type
        if not described:
            return ""
        import json  # as in stores/json_file

        return json.dumps(described)

    # ---- support ----

    @property
    def unread_layout(self) -> str | None:
        """The key and value of an unsupported auto-round layout, or None."""
        for key in ("packing_format", "backend") if self.method in AUTO_ROUND else ():
            layout = self.values.get(key)
            if isinstance(layout, str):
                return None if _LAYOUT_WORDS.issuperset(layout.lower().split(":")) else f"{key} {brief(layout)}"
        return None

    def is_covered(self, name: str = "") -> bool:
        """Return True if codes outside all families are an error of the checkpoint."""
        row = method_of(self.method) if self.method else None
        if row is None or self.method not in row.names or self.unknown is not None:
            return False
        if self.method == "modelopt":
            own = self.own(name.removesuffix(".weight")) or {}
            algorithm = own.get("quant_algo") or self.values.get("quant_algo")
            if isinstance(algorithm, str) and algorithm.upper() in row.without_family:
                return False
        layout = self.values.get("format")
        return not (isinstance(layout, str) and layout in row.without_family)

    @cached_property
    def unknown(self) -> str | None:
        """The first setting for all modules with an unknown effect on values, as text."""
        if not self.method:
            return None
        row = method_of(self.method)
        if row is None:
            return f"quant_method {brief(self.method)}"
        values = self.values
        if self.method == "mlx":  # the other keys are names of modules
            values = {key: value for key, value in values.items() if not _is_mlx_module(value)}
        setting, export = unknown_setting(values, row), self.values.get("export")
        exporter = method_of(QUARK)
        if setting is None and exporter is not None and isinstance(export, Mapping):  # also written for method AWQ
            setting = unknown_setting(export, exporter)
        if setting is None:  # only the format of sparse tensors; the other settings describe the model
            layout = {"format": mapping(self.values.get("sparsity_config")).get("format")}
            text = _setting_text(unknown_setting(layout, part_of("sparsity")))
            return None if text is None else f"sparsity_config {text}"
        return _setting_text(setting)

    @cached_property
    def is_uniform(self) -> bool:
        """True if `unknown` holds for every module: no module has its own settings or weights of an unknown kind."""
        own = any(map(self.values.get, _OF_MODULES)) or (
            self.method == "mlx" and any(isinstance(value, Mapping) for value in self.values.values())
        )
        return not own and not any(unknown_setting(weights, part_of("weights")) for weights in self._described)

    def unknown_of(self, own: Mapping[str, Any] | None, described: list[Mapping[str, Any]]) -> str | None:
        """Like `unknown`, for a single module: of its own settings, and of its `weights`."""
        row = method_of(self.method) if self.method else None
        if self.unknown is not None or row is None:
            return self.unknown
        setting = unknown_setting(own or {}, row)
        for weights in described:
            setting = setting or unknown_setting(weights, part_of("weights"))
        return _setting_text(setting)

    @property
    def is_rotated(self) -> bool:
        """True if weights are stored in another basis, to which the model transforms its activations at run time."""
        transforms = self.values.get("transform_config")
        schemes = transforms.get("config_groups") if isinstance(transforms, Mapping) else transforms
        if not transforms or schemes == {}:
            return False
        return not isinstance(schemes, Mapping) or not all(map(_keeps_basis, schemes.values()))

    # ---- settings of a module ----

    def own(self, module: str) -> Mapping[str, Any] | None:
        """Return a module's own settings, which replace the shared ones; None if the module is not quantized."""
        read = settings_of_modules().get(self.method or "")
        return {} if read is None else read(self, module)

    def once(self, compute: Callable[[Quantization], _Computed]) -> _Computed:
        """Return the result of a function of the configuration, which all modules share."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        computed: _Computed = self._computed[compute]
        return computed

    @cached_property
    def _computed(self) -> dict[Callable[[Quantization], Any], Any]:
        return {}

    # ---- blocks and groups of scales ----

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """The rows and columns of a block in ``weight_block_size``; None if it holds none."""
        size = self.values.get("weight_block_size")
        if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(map(is_length, size)):
            return None
        return size[0], size[1]

    def weights(self, module: str) -> list[Mapping[str, Any]]:
        """Return the weight descriptions in compressed-tensors' ``config_groups`` for a module.

        All descriptions are returned if no target names the module, or if a target is a pattern with unsupported
        syntax: shapes and dtypes then decide.
        """
        described = self._described
        if self._targets is None:
            return described
        targets = zip(described, self._targets, strict=True)
        targeted = [
            weights
            for weights, (names, patterns) in targets
            if module in names or any(pattern.matches(module) for pattern in patterns)
        ]
        return targeted or described

    @cached_property
    def _targets(self) -> list[tuple[frozenset[str], list[Pattern]]] | None:
        """The names and patterns of each description; None if there is one, or a pattern has unsupported syntax."""
        try:
            return [_names_and_patterns(targets) for _, targets in self._weights] if len(self._weights) > 1 else None
        except UnsupportedError:
            return None

    @cached_property
    def _described(self) -> list[Mapping[str, Any]]:
        return [weights for weights, _ in self._weights]

    @cached_property
    def _weights(self) -> list[tuple[Mapping[str, Any], Any]]:
        """Weight descriptions with their targets; a single pair if all descriptions are alike."""
        groups = self.values.get("config_groups")
        if not groups and isinstance(self.values.get("weights"), Mapping):  # modelopt, without groups
            groups = {"": {key: self.values.get(key) for key in ("weights", "targets", "format")}}
        pairs: list[tuple[Mapping[str, Any], Any]] = []
        for key, group in groups.items() if isinstance(groups, Mapping) else ():
            if not isinstance(group, Mapping):  # such as {"W4A16": ["Linear"]}, a preset of compressed-tensors
                pairs.append(({f"config_groups {key}": group}, group))
            elif isinstance(group.get("weights"), Mapping):
                rest = {name: value for name, value in group.items() if name not in _BESIDE_WEIGHTS}
                pairs.append(({**group["weights"], **rest}, group.get("targets")))
        return pairs[:1] if all(weights == pairs[0][0] for weights, _ in pairs) else pairs


# The configuration of a checkpoint that has none.
UNCONFIGURED = Quantization("", None, {})


def _setting_text(setting: tuple[str, Any] | None) -> str | None:
    if setting is None:
        return None
    key, value = setting
    return f"{brief(key)} {brief(value) if isinstance(value, str) else brief(show(value))}"


def brief(text: str) -> str:
    """Return a text of a configuration, printable and clipped, for messages."""
    return clip(printable(text), _QUOTED)


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a value of a configuration if it has keys, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def _keeps_basis(scheme: Any) -> bool:
    """Return True if the transforms of a scheme are merged into weights, or rotate queries and keys alike."""
    steps = mapping(scheme).get("apply")
    if not isinstance(steps, list) or mapping(scheme).get("requires_grad"):
        return False
    locations = {str(mapping(step).get("location")) for step in steps}
    return locations <= _MERGED or locations == _SCORES


def _names_and_patterns(targets: Any) -> tuple[frozenset[str], list[Pattern]]:
    """Return the targets of a config group: names, and the patterns among them."""
    texts = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    return frozenset(texts), [compiled(text[3:], "config_groups") for text in texts if text.startswith("re:")]


def overrides_key(quantization: Quantization) -> str:
    """Return GPTQModel's or auto-round's key of the settings of single layers."""
    in_extra = quantization.method in AUTO_ROUND or "extra_config" in quantization.values
    return "extra_config" if in_extra else "dynamic"


def is_length(value: Any) -> TypeGuard[int]:
    """Return True if a value of a configuration can be the length of a block."""
    return type(value) is int and 0 < value < _LONGEST_BLOCK


@lru_cache(maxsize=4)  # all packed tensors of a checkpoint have the same text
def _parsed(text: str) -> Quantization | None:
    import json  # as in stores/json_file

    return quantization_of(json.loads(text))


def is_kept_by(text: str | None, module: str, new: str) -> bool:
    """Return True if renaming a module does not change its settings."""
    quantization = _parsed(text) if text else None
    if quantization is None:
        return True
    if quantization.values.get("module_quant_configs") and module != new:
        return False  # `gemma` matches its patterns when it needs the bits
    own = quantization.method == "modelopt" or quantization.own(module) == quantization.own(new)
    return own and quantization.weights(module) == quantization.weights(new)


# ---- parsing ----


def quantization_of(config: Mapping[str, Any] | None) -> Quantization | None:
    """Return the quantization in a ``config.json`` or its nested configurations, or None."""
    if not config:
        return None
    level = [config]
    for _ in range(_CONFIG_DEPTH):
        for holder in level:
            value = holder.get(MLX_KEY)
            if isinstance(value, Mapping) and _method(value) == "mlx" and value != holder.get(QUANTIZATION):
                other = holder.get(QUANTIZATION)
                named = isinstance(other, Mapping) and isinstance(other.get("quant_method"), str)
                return Quantization(MLX_KEY, "mlx", value, quantization_of({QUANTIZATION: other}) if named else None)
            for key in _CONFIG_KEYS:
                value = holder.get(key)
                if isinstance(value, Mapping) and value and value.get("quant_method") != OWN:
                    settings = _flattened(value)
                    return Quantization(key, _method(settings), settings)
            value = holder.get(MLX_KEY)
            if isinstance(value, Mapping) and isinstance(value.get("quant_algo"), str):
                return Quantization(MLX_KEY, TENSORRT, value)
        level = [value for holder in level for value in holder.values() if isinstance(value, Mapping)]
    return None


def is_own(config: Mapping[str, Any]) -> bool:
    """Return True if a ``config.json`` says that tensors are quantized by safeload."""
    value = config.get(QUANTIZATION)
    return isinstance(value, Mapping) and value.get("quant_method") == OWN


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` without its quantization, nested configurations included."""
    return {
        key: without_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in (*_CONFIG_KEYS, MLX_KEY) or not isinstance(value, Mapping)
    }


def with_quantization(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with another quantization."""
    return {**without_quantization(config), QUANTIZATION: settings}


def _flattened(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge the settings of an hf_quant_config.json, nested under "quantization", into their parent."""
    inner = settings.get(MLX_KEY)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("quant_algo"), str):
        return settings
    return {**{key: value for key, value in settings.items() if key != MLX_KEY}, **inner}


def _is_mlx_module(value: object) -> bool:
    """Return True if a value under MLX's key belongs to a module: its own settings, or whether it is quantized."""
    return isinstance(value, bool) or (isinstance(value, Mapping) and not value.keys().isdisjoint(_MLX_MODULE))


def _method(settings: Mapping[str, Any]) -> str | None:
    if isinstance(settings.get("quant_method"), str):
        return canonical_name(settings["quant_method"])
    if isinstance(settings.get("quant_algo"), str):
        return "modelopt"
    if isinstance(settings.get("format"), str):
        return canonical_name(settings["format"])
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return "mlx" if settings.keys() >= _MLX_SETTINGS else None


# ---- in and beside files ----


def find_quantization(files: Sequence[WeightFile], title: str) -> Quantization | None:
    """Return the quantization in the metadata of files, else in their folders."""
    parsed: dict[tuple[str | None, str], Quantization | None] = {}  # by the text in the file, or its folder
    pairs: list[tuple[str, Quantization | None]] = []
    for file in files:
        if not dtypes.may_hold_codes(file.table.numbers):
            continue
        text = (file.table.metadata() or {}).get(packing.CONFIG_KEY)
        key = text, _folder_of(file) if text is None else ""
        if key not in parsed:
            parsed[key] = quantization_beside(file) if text is None else quantization_of(config_inside(file))
        if text is not None or parsed[key] is not None:
            pairs.append((file.path, parsed[key]))
    if not pairs:
        return None
    first, quantization = pairs[0]
    for path, other in pairs:
        if other != quantization:
            raise UnsupportedError(
                f"{title}: {show(first)} and {show(path)} have different quantization configurations; open them "
                "separately, or pass stored=True",
                path=path,
            )
    return quantization


def config_inside(file: WeightFile) -> dict[str, Any] | None:
    """Return the description that `Quantization.text` put into the metadata of a file; None if it has none."""
    text = (file.table.metadata() or {}).get(packing.CONFIG_KEY)
    return parse_json(text.encode(), packing.CONFIG_KEY, file.path) if isinstance(text, str) else None


def config_beside(file: WeightFile, name: str = BESIDE[0]) -> dict[str, Any] | None:
    """Return a JSON file in the folder of a file; None if it is missing or unreadable, because nobody requested it."""
    try:
        return read_if_there(file.files.join(_folder_of(file), name), name, file.files)
    except VerificationError:  # it could change values
        raise
    except (SafeloadError, OSError):
        return None


def quantization_beside(file: WeightFile) -> Quantization | None:
    """Return the quantization in the folder of a file; None if missing or unreadable."""
    for name in BESIDE:
        config = config_beside(file, name)
        if config is None:
            continue
        if name in _METHODS_BESIDE and not {"bits", "w_bit"}.isdisjoint(config):
            config = {QUANTIZATION: {"quant_method": _METHODS_BESIDE[name], **config}}
        elif name != BESIDE[0] and isinstance(config.get("quantization"), Mapping):
            config = {QUANTIZATION: {"quant_method": "modelopt", **config["quantization"]}}
        quantization = quantization_of(config)
        if quantization is not None:
            return quantization
    return None


def _folder_of(file: WeightFile) -> str:
    return file.files.split(file.place if file.remote else file.path)[0]
