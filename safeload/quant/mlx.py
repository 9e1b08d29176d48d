"""MLX: words of unsigned codes, or the mx modes.

Sources: mlx ``ops.cpp``; mlx-lm 0.32 ``utils.py`` and ``models``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ..core import native
from ..core.packing import BIAS, GLOBAL, MLX, MLX_GLOBAL, SCALE, STORED, Packing
from ..core.text import show
from ..models.choosing import TIE
from ..models.family import MlxForm, mlx_form
from ..models.schema import LANGUAGE, Config, ConfigError, language_of
from .families import Engine, Family, Preset, StoredPart, parts_of
from .packed_group import Misfit, PackedGroup, Refused, whole_grid
from .quantization import MLX_KEY, QUANTIZATION, brief, is_length, mapping, without_quantization

_MLX_MODES = {
    "mxfp4": (4, 32, "e2m1", "F8_E8M0"),
    "nvfp4": (4, 16, "e2m1", "F8_E4M3"),
    "mxfp8": (8, 32, "F8_E4M3", "F8_E8M0"),
}
# MLX's defaults for affine codes. mlx-lm's mixed recipes leave the group size of each module null.
_MLX_BITS, _MLX_GROUP = 4, 64


def mlx(group: PackedGroup) -> Packing:
    """Words of unsigned codes with a scale and a bias per group of columns, or the mx modes."""
    stored, scale = group.stored, group.scales
    if len(stored) < 2 or len(scale) != len(stored) or scale[:-1] != stored[:-1] or not scale[-1]:
        raise Misfit(f"scales {list(scale)} do not fit codes {list(stored)}")
    settings = group.config.values
    if group.method != "mlx" or not group.config.is_uniform:
        own = settings.get(group.module)
        settings = own if isinstance(own, Mapping) else settings  # a module's own settings inherit nothing
    mode = settings.get("mode")
    if BIAS not in group.parts:
        if mode == "affine" or group.scale_code != "U8":
            raise Misfit("its biases are missing, which codes with float scales need")
        return _mlx_mode(group, mode if isinstance(mode, str) else "mxfp4")
    if group.parts[BIAS].shape != scale:
        raise Misfit(f"biases {list(group.parts[BIAS].shape)} do not fit scales {list(scale)}")
    bits, size = settings.get("bits"), settings.get("group_size")
    if group.method == "mlx":
        bits, size = _MLX_BITS if bits is None else bits, _MLX_GROUP if size is None else size
    if bits is not None and (type(bits) is not int or bits not in (1, 2, 3, 4, 5, 6, 8)):
        raise Misfit(f"unknown bits {brief(show(bits))}, expected 1 to 6 or 8 (quantization)")
    if bits is None or not is_length(size):
        fits = [(b, g) for b in (1, 2, 3, 4, 5, 6, 8) for g in (32, 64, 128) if scale[-1] * g * b == stored[-1] * 32]
        if len(fits) > 1 and not group.is_configured:
            labels = " or ".join(f"mlx{b} g{g}" for b, g in fits)
            raise Refused(f"its shapes fit {labels}, and no config.json is there to decide")
        if len(fits) != 1:
            raise Misfit("config.json does not set the bits and group_size of its quantization")
        bits, size = fits[0]
    columns = scale[-1] * size
    if columns * bits != stored[-1] * 32:
        raise Misfit(
            f"words {list(stored)} and scales {list(scale)} do not hold {bits} bits in groups of {size} (quantization)"
        )
    shape = (*stored[:-1], columns)
    return group.packing(
        MLX, f"mlx{bits} g{size}", shape, bits, "U8" if bits == 8 else "unsigned", grid=whole_grid(shape, 1, size)
    )


def _mlx_mode(group: PackedGroup, mode: str) -> Packing:
    if mode not in _MLX_MODES:
        raise Misfit(f"unknown quantization mode {show(mode)}, expected one of affine, {', '.join(_MLX_MODES)}")
    bits, block, numbers, exponents = _MLX_MODES[mode]
    stored, scale = group.stored, group.scales
    shape = (*stored[:-1], stored[-1] * 32 // bits)
    if group.scale_code != "U8" or shape[-1] != scale[-1] * block:
        raise Misfit(f"{group.scale_code} scales {list(scale)} do not fit rows of {shape[-1]} in {mode}")
    rule = MLX_GLOBAL if GLOBAL in group.parts else STORED
    scales = {"grid": whole_grid(shape, 1, block), "scale_dtype": exponents, "scale_rule": rule}
    return group.check_shared(group.packing(MLX, mode, shape, bits, numbers, **scales))


# ---- writing ----


def lay_out(
    preset: Preset, config: Mapping[str, Any], left: Mapping[str, str], exceptions: Mapping[str, Preset]
) -> dict[str, Any]:
    """Describe the codes twice, as mlx-lm does; unquantized modules are not named."""
    mode = preset.name.removeprefix("mlx-") if preset.name.startswith("mlx-") else "affine"
    own = {module: {"group_size": other.group, "bits": other.bits} for module, other in exceptions.items()}
    settings = {"group_size": preset.group, "bits": preset.bits, "mode": mode, **own}
    codes = {MLX_KEY: settings, QUANTIZATION: settings} if preset.parts else {}
    kept = {k: v for k, v in without_quantization(config).items() if k not in ("_name_or_path", "vision_config")}
    form = mlx_form(config)
    for key in LANGUAGE:  # mlx-lm reads all settings of a language model there
        if isinstance(kept.get(key), Mapping):
            tie = {TIE: kept[TIE]} if TIE in kept and TIE not in kept[key] else {}
            kept[key] = {**_with_older_keys(kept[key], form), **tie}
    return dict(sorted({**_with_older_keys(kept, form), **codes}.items()))


def _with_older_keys(config: Mapping[str, Any], form: MlxForm | None) -> dict[str, Any]:
    """Add the keys of transformers 4, which mlx-lm reads, beside their new names in transformers 5, and needed keys.

    Without ``rope_theta`` mlx-lm would compute with its default, or refuse the model.
    """
    added = _older_keys(config, form)
    if form is not None and language_of(config) is config:
        added = {**dict(_needed_keys(config, form)), **added}
    added = {key: value for key, value in added.items() if config.get(key) is None}
    for key, names in form.older_values.items() if form is not None else ():
        if isinstance(listed := config.get(key), list):
            added[key] = [names.get(name, name) if isinstance(name, str) else name for name in listed]
    return {**config, **added}


def _needed_keys(config: Mapping[str, Any], form: MlxForm) -> Iterator[tuple[str, Any]]:
    """Yield the keys that mlx-lm has no default for: the family's default, or what llama.cpp assumes, or null."""
    rope = {"partial_rotary_factor": 1, **mapping(config.get("rope_parameters"))}
    for key in form.needed_keys:
        value = next(iter(form.assumes.get(key, (None,))))
        with suppress(ConfigError):  # a text, or the config lacks more, which mlx-lm says
            value = Config({**config, "rope": rope}, {key: value, **form.defaults}).value(key)
        yield key, value


def without_older_keys(config: Mapping[str, Any], form: MlxForm | None) -> dict[str, Any]:
    """Return a config of transformers 5 without the same settings under older keys, in its language model too."""
    older = _older_keys(config, form)
    return {
        key: without_older_keys(value, form) if key in LANGUAGE and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in older or older[key] != value
    }


def _older_keys(config: Mapping[str, Any], form: MlxForm | None) -> dict[str, Any]:
    rope = mapping(config.get("rope_parameters")) if form is None or not form.knows_rope_parameters else {}
    sliding, full = rope.get("sliding_attention"), rope.get("full_attention")  # Gemma 3: by the kind of layer
    older: dict[str, Any] = {"rope_local_base_freq": mapping(sliding).get("rope_theta")}
    rope = full if isinstance(full, Mapping) else rope
    older.update((key, rope.get(key)) for key in ("rope_theta", "partial_rotary_factor"))
    kind = rope.get("rope_type", "default")
    if kind != "default":
        older["rope_scaling"] = {**rope, "type": kind}  # some models read the first name, some the second
    for key, name in form.newer_keys.items() if form is not None else ():
        older[key] = older.get(name, config.get(name))
    return {key: value for key, value in older.items() if value is not None}


_ENGINE = Engine(
    "mlx-lm",
    stacks_experts=True,
    quantizes_ends=True,
    casts=True,
    always_indexed=True,
    metadata="mlx",
    shard_size=5 << 30,
    dropped=(".rotary_emb.inv_freq",),
)
_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_AFFINE = {**parts_of(".weight", "U32", ".scales", None), BIAS: StoredPart(".biases", None)}
_MODE = parts_of(".weight", "U32", ".scales", "U8")


def _affine(bits: int, group: int, suffix: str = "") -> Preset:
    return Preset(f"mlx{bits}{suffix}", _ENGINE, native.lib.SL_ENCODE_MLX, bits, group, _AFFINE, lay_out)


PRESETS = [
    Preset("mlx", _ENGINE, native.lib.SL_ENCODE_MLX, 0, None, {}, lay_out),  # nothing is quantized
    *(_affine(bits, _MLX_GROUP) for bits in _BITS),
    *(_affine(bits, group, f"-g{group}") for bits in _BITS for group in _GROUPS),
    Preset("mlx-mxfp4", _ENGINE, native.lib.SL_ENCODE_MLX_MXFP4, 4, 32, _MODE, lay_out),
    Preset("mlx-nvfp4", _ENGINE, native.lib.SL_ENCODE_MLX_NVFP4, 4, 16, _MODE, lay_out),
    Preset("mlx-mxfp8", _ENGINE, native.lib.SL_ENCODE_MLX_MXFP8, 8, 32, _MODE, lay_out),
]
SETTINGS_OF_MODULES = {"mlx": lambda quantization, module: mapping(quantization.values.get(module))}
FAMILIES = [
    Family(
        "MLX",
        ".weight",
        frozenset(("U32",)),
        {SCALE: (".scales",)},
        mlx,
        {BIAS: (".biases", ".qbiases"), GLOBAL: (".global_scale",)},
    )
]
