"""GPTQ, auto-round and AWQ: words of codes beside scales and packed zero points, usually stored transposed.

Shapes distinguish the three layouts; the configuration confirms the layout and defines the meaning of zero points.

Sources: AutoGPTQ ``nn_modules/qlinear``; GPTQModel ``utils/model.py``; auto-round ``export/export_to_autoround``;
AutoAWQ ``modules/linear``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core import arrays, restore
from ..core.native import lib
from ..core.packing import COLUMNS, GROUPS, ROWS, SCALE, WORDS, ZERO, Grid, Packed, Packing, Zeros
from ..core.text import show
from .families import GROUP_SIZES, Engine, Family, Preset, StoredPart, filled, parts_of
from .packed_group import Misfit, PackedGroup, Refused
from .patterns import compiled
from .quantization import AUTO_ROUND, Quantization, mapping, overrides_key, quantization_of, with_quantization
from .quark import CODES_IN_WORD, word_layout

# AutoAWQ's gemv pads scales and zero points to multiples of this many words, by group size.
_GEMV_WORDS = {64: 2, 32: 4}
# Zero points to unpack at a time.
_CHUNK = 1 << 20
# auto-round without a model stored zero points less one whatever it said in ``packing_format``, before this version.
_RAW_SINCE = (0, 16)
_VERSION = re.compile("([0-9]{1,9})[.]([0-9]{1,9})", re.ASCII)
# Offset of stored zero points, by ``checkpoint_format``.
_CHECKPOINT_FORMATS = {"gptq": 1, "gptq_v2": 0}


def describe(group: PackedGroup) -> Packing:
    """Return the layout for the shapes of words, scales and zero points."""
    settings, why = group.settings(), group.config.unread_layout
    if why is not None:  # for special kernels
        raise Refused(f"{why} is not supported")
    if group.row.code != "I32":
        raise Refused(f"its words are {group.row.code}, and only I32 is supported (pack_dtype)")
    if settings.get("rotation_config"):
        raise Refused("its weights are in a rotated basis (rotation_config)")
    if f"{group.module}.w_bf16_to_fp8_scale" in group.context.tensors:
        raise Refused("its scales belong to fp8 weights (w_bf16_to_fp8_scale)")
    stored, scale = group.stored, group.scales
    zeros = group.parts[ZERO].shape if ZERO in group.parts else None
    if len(stored) != 2 or len(scale) != 2 or 0 in (*stored, *scale):
        raise Misfit(f"words {list(stored)} and scales {list(scale)} do not form a matrix")
    if zeros is not None and group.parts[ZERO].row.code != "I32":
        raise Misfit(f"qzeros are {group.parts[ZERO].row.code}, expected I32")
    transposed = stored[1] in (scale[1], scale[1] / CODES_IN_WORD)
    rows = stored[0] == scale[0] and zeros == (scale[0], scale[1] // CODES_IN_WORD)
    in_rows = rows and (not transposed or str(settings.get("version")).lower() == "gemv")
    if not (in_rows or transposed):
        raise Misfit(f"words {list(stored)} and scales {list(scale)} are neither GPTQ's nor AWQ's")
    layout = "AWQ" if in_rows or stored[1] != scale[1] else "GPTQ"
    if group.method not in (None, layout.lower(), *AUTO_ROUND):
        raise Misfit(
            f"words {list(stored)} and scales {list(scale)} have the layout of {layout}, "
            f"but quant_method is {show(group.method)}"
        )
    if layout == "GPTQ":
        return _gptq(group, settings, zeros)
    _check_bits(group, settings, 4)
    return _gemv(group, settings) if in_rows else _gemm(group, settings, zeros)


def _check_bits(group: PackedGroup, settings: Mapping[str, Any], bits: int) -> None:
    configured = settings.get("bits", settings.get("w_bit"))
    if type(configured) is int and configured != bits:
        raise Misfit(
            f"words {list(group.stored)} beside scales {list(group.scales)} hold {bits} bits, but bits "
            f"is {show(configured)} ({group.config})"
        )


def _group_size(group: PackedGroup, settings: Mapping[str, Any], length: int, groups: int) -> int:
    """Return the columns of the weight in a group of scales; ``length`` for a whole row."""
    configured = settings.get("group_size", settings.get("q_group_size"))
    if type(configured) is not int or configured == 0:
        size = -(-length // groups)
        if -(-length // size) != groups:
            raise Misfit(f"rows of {length} do not divide into {groups} groups, and group_size is missing")
        return size
    size = length if configured < 0 or configured > length else configured
    if -(-length // size) != groups:
        raise Misfit(
            f"scales {list(group.scales)} do not fit rows of {length} in groups of {show(configured)} (group_size)"
        )
    return size


def _label(name: str, size: int, length: int) -> str:
    return f"{name} row" if size == length else f"{name} g{size}"


# ---- GPTQ, auto-round ----


def _gptq(group: PackedGroup, settings: Mapping[str, Any], zeros: tuple[int, ...] | None) -> Packing:
    """GPTQ: codes run down the columns of the words, which are rows of the weight."""
    stored, scale = group.stored, group.scales
    if zeros is None:
        raise Misfit("its qzeros are missing")
    bits, rest = divmod(32 * zeros[-1], scale[1]) if len(zeros) == 2 else (0, 0)
    configured = settings.get("bits")
    if type(configured) is int and 2 <= configured <= 8 and zeros == (scale[0], -(-scale[1] * configured // 32)):
        bits, rest = configured, 0  # auto-round can fill the last word of zero points
    if not 2 <= bits <= 8 or zeros[0] != scale[0] or rest or stored[0] % (bits // math.gcd(bits, 32)):  # whole words
        raise Misfit(f"words {list(stored)}, qzeros {list(zeros)} and scales {list(scale)} do not fit each other")
    _check_bits(group, settings, bits)
    if not group.is_configured:
        raise Refused("its zero points are ambiguous without the quantization of its config.json")
    if bits in (5, 6, 7) and group.method == "gptq" and "autoround_version" not in settings:
        raise Refused(f"GPTQModel's layout of {bits} bits is not supported")
    length = stored[0] * 32 // bits
    size = _group_size(group, settings, length, scale[0])
    if GROUPS in group.parts:
        group.check_form(GROUPS, "g_idx", ("I32",), (length,))
    label, shape = _label(f"gptq{bits}", size, length), (scale[1], length)
    packed = Zeros(ROWS, bits, added=_added(group, settings), symmetric=settings.get("sym") is not False)
    return group.transposed("gptq", label, shape, bits, "unsigned", size=size, layout=COLUMNS, zeros=packed)


def _added(group: PackedGroup, settings: Mapping[str, Any]) -> int:
    """Return the configured offset of stored zero points."""
    if group.method in AUTO_ROUND:
        kind = settings.get("packing_format", settings.get("backend"))
        if kind == "auto_round" and settings.get("model_free") is True and settings.get("sym") is False:
            version = settings.get("autoround_version")
            numbers = _VERSION.match(version) if isinstance(version, str) else None
            if numbers is None:
                raise Refused("its zero points depend on the version of auto-round, and autoround_version is missing")
            return int(tuple(map(int, numbers.groups())) < _RAW_SINCE)
        return 1 if not isinstance(kind, str) or ("gptq" in kind and "gptqmodel" not in kind) else 0
    return _CHECKPOINT_FORMATS.get(str(settings.get("checkpoint_format", settings.get("format"))), 1)


def zeros_disagree(packed: Packed) -> bool:
    """Return True if the zero points of symmetric weights contradict the configured format."""
    zeros = packed.packing.zeros
    return zeros is not None and zeros.symmetric and _settled(packed, zeros).added != zeros.added


def wrapped_zeros(packed: Packed) -> int:
    """Count wrapped zero points, which are all ones: a carry has probably damaged their neighbors."""
    zeros, grid = packed.packing.zeros, packed.packing.grid
    if zeros is None or grid is None or packed.packing.family != "gptq" or not _settled(packed, zeros).added:
        return 0
    step, count = max(1, _CHUNK // grid.columns), 0
    for row in range(0, grid.rows, step):
        at = slice(row, min(row + step, grid.rows)), slice(0, grid.columns)
        codes = restore.read_codes(zeros, grid, packed.parts[ZERO], ((0, 1), at))
        count += int((codes == (1 << zeros.bits) - 1).sum())
    return count


def _settled(packed: Packed, zeros: Zeros) -> Zeros:
    assert packed.packing.grid is not None
    return restore.settled(zeros, packed.packing.grid, packed.parts[ZERO], packed.packing.matrices)[0]


# ---- AWQ ----


def _gemm(group: PackedGroup, settings: Mapping[str, Any], zeros: tuple[int, ...] | None) -> Packing:
    """AWQ's gemm: words along the rows, which are columns of the weight, with permuted codes."""
    stored, scale = group.stored, group.scales
    if zeros is None and settings.get("zero_point") is not False:
        raise Misfit("its qzeros are missing")
    if zeros is not None and zeros != (scale[0], stored[1]):
        raise Misfit(f"qzeros {list(zeros)} do not fit scales {list(scale)}")
    if GROUPS in group.parts:
        raise Misfit("AWQ weights must not have a g_idx")
    size = _group_size(group, settings, stored[0], scale[0])
    numbers = "offset" if zeros is None else "unsigned"
    export = settings.get("export")
    method = (export if isinstance(export, Mapping) else settings).get("pack_method")
    order = WORDS if method is None else word_layout(method, "pack_method")
    if method is not None and settings.get("zero_point") is False:  # AMD Quark also writes AWQ's names
        numbers = "signed"
    label, packed = _label("awq4", size, stored[0]), None if zeros is None else Zeros(order, 4)
    return group.transposed("awq", label, (scale[1], stored[0]), 4, numbers, size=size, layout=order, zeros=packed)


def _gemv(group: PackedGroup, settings: Mapping[str, Any]) -> Packing:
    """AWQ's gemv: plain rows; scales and zero points of a row are padded to whole words."""
    stored, scale = group.stored, group.scales
    length, size = stored[1] * CODES_IN_WORD, settings.get("group_size", settings.get("q_group_size"))
    if type(size) is not int or size < 32:
        raise Misfit(f"scales {list(scale)} are padded, so the configuration must set group_size")
    words = _GEMV_WORDS.get(size, 1)
    groups = -(-length // size)
    if length % size or -(-groups // (words * CODES_IN_WORD)) * words * CODES_IN_WORD != scale[1]:
        raise Misfit(f"scales {list(scale)} do not fit rows of {length} in groups of {size} (group_size)")
    grid, zeros = Grid(1, size, scale[0], scale[1]), Zeros(ROWS, 4)
    label = _label("awq4", size, length)
    return group.packing("awq", label, (stored[0], length), 4, "unsigned", grid=grid, zeros=zeros)


# ---- settings of modules ----

# Characters of patterns among the keys of ``extra_config``.
_PATTERN_CHARACTERS = "*^$|()[]?+\\"
# Names in the name of a module whose parts are looked up; known models have at most 10.
_MOST_NAMES = 32
# auto-round lists modules with more bits as not quantized.
_MOST_BITS = 8


def _overrides(quantization: Quantization, module: str) -> Mapping[str, Any] | None:
    """Return the overrides of GPTQModel or auto-round for a layer; None if the layer is not quantized."""
    key = overrides_key(quantization)
    overrides = quantization.values.get(key)
    if not isinstance(overrides, Mapping):
        return {}
    if key == "extra_config":
        own = overrides.get(module)
        own = mapping(_in_name(quantization, overrides, module) if own is None else own)
        bits = own.get("bits")
        return None if type(bits) is int and bits > _MOST_BITS else own
    for pattern, own in overrides.items():
        if compiled(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, key).matches(module):
            return None if pattern.startswith("-:") else mapping(own)
    return {}


def _in_name(quantization: Quantization, overrides: Mapping[str, Any], module: str) -> Any:
    """Return the entry of the first key found in the name of a module: a part such as "mlp.down_proj", or a pattern."""
    order, patterns, lengths = quantization.once(_keys)
    names = module.split(".")
    starts = ((k, n) for n in lengths for k in range(len(names) - n + 1) if len(names) <= _MOST_NAMES)
    keys = [part for k, n in starts if overrides.get(part := ".".join(names[k : k + n]))]
    anchored = ((key, key if key.startswith("^") else f".*(?:{key})") for key in patterns if overrides[key])
    matching = (key for key, pattern in anchored if compiled(pattern, "extra_config").matches(module))
    keys += [key for key in (next(matching, None),) if key is not None]
    return overrides.get(min(keys, key=order.__getitem__)) if keys else None


def _keys(quantization: Quantization) -> tuple[dict[str, int], list[str], frozenset[int]]:
    """Return the order of the keys of ``extra_config``, the patterns, and the numbers of names separated by dots.

    A checkpoint can name 100,000 experts separately.
    """
    order = {key: number for number, key in enumerate(mapping(quantization.values.get("extra_config")))}
    patterns = [key for key in order if any(char in key for char in _PATTERN_CHARACTERS)]
    return order, patterns, frozenset(key.count(".") + 1 for key in order)


# ---- writing ----

_ENGINE = Engine("vLLM, SGLang and transformers")
_HEAD = "lm_head"  # has a setting of its own


def lay_out_gptq(
    preset: Preset, config: Mapping[str, Any], left: Mapping[str, str], exceptions: Mapping[str, Preset]
) -> dict[str, Any]:
    """Describe the codes as GPTQModel does; only its second format holds zero points of 0.

    Copied codes can be in the order of activations, which the config of their folder tells.
    """
    source = quantization_of(config)
    ordered = source is not None and source.method == "gptq" and source.values.get("desc_act") is True
    modules: dict[str, Any] = {f"-:.*{re.escape(name)}$": {} for name in sorted(left) if name != _HEAD}
    settings = filled(
        "gptq",
        bits=preset.bits,
        checkpoint_format=next(name for name, added in _CHECKPOINT_FORMATS.items() if added == preset.added),
        desc_act=ordered,
        group_size=preset.group or -1,
        sym=preset.added == 1,
        **({"dynamic": modules} if modules else {}),
    )
    return with_quantization(config, settings)


def lay_out_awq(
    preset: Preset, config: Mapping[str, Any], left: Mapping[str, str], exceptions: Mapping[str, Preset]
) -> dict[str, Any]:
    """Describe the codes as AutoAWQ does."""
    settings = filled("awq", group_size=preset.group or -1, modules_to_not_convert=sorted(left) or None)
    return with_quantization(config, settings)


def _groups(preset: Preset, shape: tuple[int, ...], dtype: str) -> dict[str, arrays.Array]:
    return {GROUPS: (np.arange(shape[-1], dtype=np.int32) // (preset.group or max(1, shape[-1]))).astype(np.int32)}


_PARTS = {**parts_of(".qweight", "I32", ".scales", None), ZERO: StoredPart(".qzeros", "I32")}
_GPTQ_PARTS = {**_PARTS, GROUPS: StoredPart(".g_idx", "I32")}


def _written(suffix: str, group: int | None) -> list[Preset]:
    symmetric, zeros = lib.SL_ENCODE_INT, lib.SL_ENCODE_INT_ZERO
    kinds = (("gptq", symmetric, 4, 1), ("gptq_asym", zeros, 4, 0), ("gptq8", symmetric, 8, 1))
    layout: dict[str, Any] = {"sides": 8, "layout": COLUMNS}
    gptq = [
        Preset(name + suffix, _ENGINE, method, bits, group, _GPTQ_PARTS, lay_out_gptq, _groups, added=added, **layout)
        for name, method, bits, added in kinds
    ]
    awq = Preset(f"awq{suffix}", _ENGINE, lib.SL_ENCODE_INT_ZERO, 4, group, _PARTS, lay_out_awq, sides=8, layout=WORDS)
    return [awq, *gptq]


PRESETS = [preset for suffix, group in GROUP_SIZES.items() for preset in _written(suffix, group)]

# ---- rows ----

SETTINGS_OF_MODULES = dict.fromkeys(("fp8", "gptq", "awq", *AUTO_ROUND), _overrides)

FAMILIES = [
    Family(
        "GPTQ, auto-round, AWQ",
        ".qweight",
        frozenset(("I8", "I16", "I32")),
        {SCALE: (".scales", ".qscales")},  # transformers 5.6 and later save Quark's with an extra q
        describe,
        {ZERO: (".qzeros", ".qqzeros"), GROUPS: (".g_idx",)},
        logical=".weight",
    )
]
