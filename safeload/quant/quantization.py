"""The quantization of a checkpoint, parsed once from its configuration and carried along.

The configuration is in ``config.json``, in the metadata of safeload's own files, or in a file of an older tool beside
the weights. The known settings of each quantization method are a row per writer in ``methods.json``.

A key of a configuration either changes the values of weights, and ``values`` lists the supported settings in lower
case; or families ``read`` it and compare it with shapes; or it does not affect weights (``ignored``, and ``anywhere``
for module lists, activations, the KV cache, kernels and the writer). If any other key is set, such as ``rotation``, the
values are unknown. "@calibration" stands for the list of this name: there are lists for calibration by GPTQ and its
relatives (optimum, AutoGPTQ, GPTQModel), and for auto-round, which adds its keys to all its formats.

Sources: the configuration classes of transformers 5.23, compressed-tensors 0.20 and 0.12, GPTQModel 7.7, AutoGPTQ 0.7,
optimum, autoawq 0.2.9, auto-round 0.16, nvidia-modelopt 0.47, amd-quark 0.13, mlx-lm 0.32, lmdeploy; published configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeGuard

from ..core import dtypes, packing
from ..core.files import parse_json, read_data, read_if_there
from ..core.forking import cached_property
from ..core.text import clip, printable, show
from ..core.weight_file import WeightFile
from ..errors import SafeloadError, UnsupportedError, VerificationError
from .families import settings_of_modules
from .patterns import Pattern, compiled

QUARK = "quark"
GGUF = "gguf"  # safeload's own, for ggml blocks in a safetensors file
AUTO_ROUND = ("auto-round", "intel/auto-round")
# The method of a config.json with a ``quant_algo`` under "quantization"; the keys are modelopt's.
TENSORRT = "TensorRT-LLM"

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
# Settings of activations that change the results of a model.
_OF_ACTIVATIONS = ("num_bits", "type", "strategy", "dynamic", "group_size")
# Methods of files without a ``quant_method``: they hold nothing but the quantization.
_METHODS_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


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
        import json  # only here: it takes a millisecond, and most files need none

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
        row = method_of(self.method)
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
        if self.method == "mlx":  # other keys are names of modules, with their settings or whether they are quantized
            of_modules = {key for key, value in values.items() if not _MLX_MODULE.isdisjoint(mapping(value))}
            values = {k: v for k, v in values.items() if k not in of_modules and not isinstance(v, bool)}
        # Quark's export is also written for method AWQ. Of sparse tensors only the format matters: the other settings
        # describe the model.
        layout = {"format": mapping(self.values.get("sparsity_config")).get("format")}
        text = _setting_text((values, row), (mapping(self.values.get("export")), _methods()[0][QUARK]))
        return text or _setting_text((layout, part_of("sparsity")), before="sparsity_config ")

    @cached_property
    def is_uniform(self) -> bool:
        """True if `unknown` holds for every module: no module has its own settings or weights of an unknown kind."""
        own = any(map(self.values.get, _OF_MODULES)) or (
            self.method == "mlx" and any(isinstance(value, Mapping) for value in self.values.values())
        )
        return not own and not any(unknown_setting(weights, part_of("weights")) for weights in self._weights[0])

    def unknown_of(self, own: Mapping[str, Any] | None, described: list[Mapping[str, Any]]) -> str | None:
        """Like `unknown`, for a single module: of its own settings, and of its `weights`."""
        row = method_of(self.method)
        if self.is_uniform or self.unknown is not None or row is None:
            return self.unknown
        return _setting_text((own or {}, row), *((weights, part_of("weights")) for weights in described))

    @property
    def is_rotated(self) -> bool:
        """True if weights are stored in another basis, to which the model transforms its activations at run time."""
        transforms = self.values.get("transform_config")
        schemes = transforms.get("config_groups") if isinstance(transforms, Mapping) else transforms
        return bool(transforms) and not (isinstance(schemes, Mapping) and all(map(_keeps_basis, schemes.values())))

    # ---- settings of a module ----

    def own(self, module: str) -> Mapping[str, Any] | None:
        """Return a module's own settings, which replace the shared ones; None if the module is not quantized."""
        read = settings_of_modules().get(self.method or "")
        return {} if read is None else read(self, module)

    def once(self, compute: Callable[[Quantization], Any]) -> Any:
        """Return the result of a function of the configuration, which all modules share."""
        key = f"{compute.__module__}.{compute.__name__}"
        if key not in self.__dict__:
            self.__dict__[key] = compute(self)
        return self.__dict__[key]

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
        described, targeted = self._weights
        own = [
            weights
            for weights, names, patterns in targeted
            if module in names or any(pattern.matches(module) for pattern in patterns)
        ]
        return own or described

    @cached_property
    def _weights(self) -> tuple[list[Mapping[str, Any]], list[tuple[Mapping[str, Any], list[str], list[Pattern]]]]:
        """Weight descriptions, and again with names and patterns of their targets; only one, once, if all agree."""
        groups = self.values.get("config_groups")
        if not groups and isinstance(self.values.get("weights"), Mapping):  # modelopt, without groups
            groups = {"": {key: self.values.get(key) for key in ("weights", "targets", "format")}}
        described: list[Mapping[str, Any]] = []
        targeted: list[tuple[Mapping[str, Any], list[str]]] = []
        for key, group in mapping(groups).items():
            if not isinstance(group, Mapping):  # such as {"W4A16": ["Linear"]}, a preset of compressed-tensors
                weights, targets = {f"config_groups {key}": group}, group
            elif isinstance(group.get("weights"), Mapping):
                rest = {name: value for name, value in group.items() if name not in _BESIDE_WEIGHTS}
                weights, targets = {**group["weights"], **rest}, group.get("targets")
            else:
                continue
            described.append(weights)
            texts = [text for text in targets if isinstance(text, str)] if isinstance(targets, list) else []
            targeted.append((weights, texts))
        if not described or described.count(described[0]) == len(described):
            return described[:1], []
        with suppress(UnsupportedError):
            return described, [
                (weights, texts, [compiled(text[3:], "config_groups") for text in texts if text.startswith("re:")])
                for weights, texts in targeted
            ]
        return described, []


# The configuration of a checkpoint that has none.
UNCONFIGURED = Quantization("", None, {})


def _setting_text(*settings: tuple[Mapping[str, Any], Method], before: str = "") -> str | None:
    """Return the first unknown key and value of settings as text, or None."""
    for key, value in filter(None, (unknown_setting(values, row) for values, row in settings)):
        return f"{before}{brief(key)} {brief(value if isinstance(value, str) else show(value))}"
    return None


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


def overrides_key(quantization: Quantization) -> str:
    """Return GPTQModel's or auto-round's key of the settings of single layers."""
    return "extra_config" if quantization.method in AUTO_ROUND or "extra_config" in quantization.values else "dynamic"


def activations_of(quantization: Quantization) -> list[Any]:
    """Return the settings of activations, to compare two configurations."""
    groups = [
        mapping(group).get("input_activations") for group in mapping(quantization.values.get("config_groups")).values()
    ]
    scheme = quantization.values.get("activation_scheme")
    return [
        scheme,
        *([{key: mapping(group).get(key) for key in _OF_ACTIVATIONS} for group in groups] if any(groups) else []),
    ]


def is_length(value: Any) -> TypeGuard[int]:
    """Return True if a value of a configuration can be the length of a block."""
    return type(value) is int and 0 < value < _LONGEST_BLOCK


@lru_cache(maxsize=4)  # all packed tensors of a checkpoint have the same text
def _parsed(text: str) -> Quantization | None:
    return quantization_of(parse_json(text.encode(), packing.CONFIG_KEY, ""))


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
    for holder in nested(config):
        settings = mapping(holder.get(MLX_KEY))
        if _method(settings) == "mlx" and settings != holder.get(QUANTIZATION):
            other = holder.get(QUANTIZATION)
            named = isinstance(mapping(other).get("quant_method"), str)
            return Quantization(MLX_KEY, "mlx", settings, quantization_of({QUANTIZATION: other}) if named else None)
        for key in _CONFIG_KEYS:
            value = mapping(holder.get(key))
            if value and value.get("quant_method") != OWN:
                inner = mapping(value.get(MLX_KEY))
                if isinstance(inner.get("quant_algo"), str):  # hf_quant_config.json
                    value = {**{key: each for key, each in value.items() if key != MLX_KEY}, **inner}
                return Quantization(key, _method(value), value)
        if isinstance(settings.get("quant_algo"), str):
            return Quantization(MLX_KEY, TENSORRT, settings)
    return None


def nested(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration and its inner configurations, level by level."""
    level = [config]
    for _ in range(_CONFIG_DEPTH):
        yield from level
        level = [value for holder in level for value in holder.values() if isinstance(value, Mapping)]


def is_own(config: Mapping[str, Any]) -> bool:
    """Return True if a ``config.json`` says that tensors are quantized by safeload."""
    return bool(mapping(config.get(QUANTIZATION)).get("quant_method") == OWN)


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
    first: tuple[str, Quantization | None] | None = None
    for file in (file for file in files if dtypes.may_hold_codes(file.table.numbers)):
        text = (file.table.metadata() or {}).get(packing.CONFIG_KEY)
        key = text, _folder_of(file) if text is None else ""
        if key not in parsed:
            parsed[key] = quantization_beside(file) if text is None else quantization_of(config_inside(file))
        if text is None and parsed[key] is None:
            continue
        first = first or (file.path, parsed[key])
        if parsed[key] != first[1]:
            raise UnsupportedError(
                f"{title}: {show(first[0])} and {show(file.path)} have different quantization configurations; open "
                "them separately, or pass stored=True",
                path=file.path,
            )
    return None if first is None else first[1]


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


# ---- known settings ----


class Method(NamedTuple):
    """The settings of a quantization method."""

    # values of ``quant_method`` under which codes outside all families are an error of the checkpoint
    names: Sequence[str]
    # other values of ``quant_method``, or of its predecessors in early files; synonyms of a single name
    aliases: Sequence[str]
    without_family: Sequence[str]  # formats and algorithms
    values: Mapping[str, Sequence[str]]  # keys with an effect on weights, and their supported values
    known: frozenset[str]  # other keys that do not make values unknown


@cache
def _methods() -> tuple[dict[str, Method], dict[str, Method]]:
    """Return the settings by the names of methods, and by the keys of parts."""
    data = read_data(__name__, "methods.json")

    def expanded(texts: Iterable[str]) -> list[str]:
        return [text for each in texts for text in (data["lists"][each[1:]] if each.startswith("@") else (each,))]

    def method(row: Mapping[str, Any]) -> Method:
        values = {key: expanded(texts) for key, texts in row.get("values", {}).items()}
        known = frozenset(expanded((*row.get("read", ()), *row.get("ignored", ()), "@anywhere"))) - values.keys()
        aliases, without = expanded(row.get("aliases", ())), row.get("without_family", ())
        return Method(row.get("names", ()), aliases, without, values, known)

    by_name = {name: row for row in map(method, data["methods"]) for name in (*row.names, *row.aliases)}
    return by_name, {key: method(row) for key, row in data["parts"].items()}


def method_of(name: str | None) -> Method | None:
    """Return the settings of a method, or None if the method is unknown."""
    return _methods()[0].get(name or "")


def part_of(key: str) -> Method:
    """Return the settings of a part: "sparsity", the "weights" of a config group, or Quark's "spec" of a tensor."""
    return _methods()[1][key]


def canonical_name(name: str) -> str:
    """Return the table's name of a method: vLLM ignores case, and accepts more names than writers use."""
    lower = name.lower()
    row = method_of(lower)
    if row is None:
        return name
    return row.names[0] if lower in row.aliases and len(row.names) == 1 else lower


def unknown_setting(settings: Mapping[str, Any], method: Method) -> tuple[str, Any] | None:
    """Return the first key and value with an unknown effect on weights, or None."""
    for key, value in settings.items():
        if key in method.known or value is None or value is False or value in ("", [], {}):
            continue
        if not isinstance(value, (str, int, float)) or str(value).lower() not in method.values.get(key, ()):
            return key, value
    return None
