"""AMD Quark: 4- to 8-bit floats and integers, with scales per tensor, row, group or block.

The configuration defines the codes and their order, because several fit the same shapes; the shapes must agree.

Source: quark ``torch/utils/pack.py``, ``torch/export/nn/modules``, ``torch/kernel/hw_emulation``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core.files import read_data
from ..core.packing import COLUMNS, FACTORS, GLOBAL, MULTIPLIED, ROWS, SCALE, WORDS, ZERO, Grid, Packing, Zeros
from ..core.text import show
from ..errors import UnsupportedError
from . import floats, patterns
from .families import FP8, Family
from .packed_group import NUMBERS, Misfit, PackedGroup, Refused, label_of, matrices_of, one_scale, whole_grid
from .quantization import QUARK, Quantization, brief, is_length, mapping, part_of, unknown_setting

CODES_IN_WORD = 8  # of 4 bits
# Values of `ch_axis` for the rows and for the columns of a weight.
_ROWS, _COLUMNS = (0, -2), (1, -1)
# Orders of the codes in a word, by ``pack_method``.
_ORDERS = {"reorder": WORDS, "order": ROWS}


def describe(group: PackedGroup) -> Packing:
    """Return the configured packing if the shapes fit it."""
    first, second = _specs(group)
    if second is not None:
        return _scales_in_fp8(group, first, second)
    if GLOBAL in group.parts:
        raise Misfit(f"unexpected {group.names[GLOBAL]}: its configured dtype has a single stage of scales")
    if group.row.code in FP8:
        return _bytes(group, first)
    numbers, bits = _numbers(group, first)
    if group.row.code == "I32":
        return _words(group, first, numbers)
    return _bytes(group, first) if bits == 8 else _small_floats(group, first)


def in_fp8(group: PackedGroup) -> Packing:
    """4-bit integers with a scale per row, which stand for fp8 with a scale per tensor."""
    _, second = _specs(group)
    if second is None:
        raise Misfit(f"unexpected {group.names[SCALE]}: its configured dtype has a single stage of scales")
    numbers, _ = _numbers(group, second)
    if math.prod(group.parts[FACTORS].shape) != 1:
        raise Misfit(f"fp8 must have a single scale, got scales {list(group.parts[FACTORS].shape)}")
    packed = _words(group, second, numbers)
    return packed._replace(label=f"{packed.label} in fp8")


# ---- configuration ----


def _specs(group: PackedGroup) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the settings of the first stage, empty if missing, and of the second stage, or None."""
    try:
        specs, why = _specs_of(group.config, group.logical), unread(group.config, group.logical)
    except UnsupportedError as error:
        raise Refused(str(error.args[0])) from None
    setting = next(filter(None, (unknown_setting(spec, part_of("spec")) for spec in specs)), None)
    if why is None and setting is not None:
        why = f"Quark's {brief(str(setting[0]))} {brief(str(setting[1]))}"
    if f"{group.module}.input_rotation" in group.context.tensors:
        why = "Quark's weights in a rotated basis (input_rotation)"
    if why is not None:
        raise Refused(f"{why} is not supported")
    first = specs[0] if specs else {}
    return first, specs[1] if len(specs) > 1 else None


def _numbers(group: PackedGroup, spec: Mapping[str, Any]) -> tuple[str, int]:
    """Return the kind of number that codes represent, and the bits of a code."""
    dtype = spec.get("dtype")
    if not isinstance(dtype, str):
        raise Misfit(f"its configuration has no dtype for its {group.row.code} codes")
    row = read_data(__name__, "methods.json")["quark_dtypes"].get(dtype)
    if row is None or group.row.code not in row["stored"]:
        raise Misfit(f"its codes {list(group.stored)} are {group.row.code}, but dtype is {show(dtype)}")
    return row["numbers"], row["bits"]


def _has_zeros(group: PackedGroup, spec: Mapping[str, Any]) -> bool:
    """Return True for asymmetric weights; Quark stores zero points for symmetric weights too, all 0."""
    return ZERO in group.parts and spec.get("symmetric") is not True


# ---- scales ----


def _grid_of(group: PackedGroup, spec: Mapping[str, Any], shape: tuple[int, ...]) -> Grid:
    """Return the grid of a single scale, or of scales per row or per column."""
    scale, (rows, columns) = group.scales, shape[-2:]
    scheme, axis = spec.get("qscheme"), spec.get("ch_axis")
    if math.prod(scale) == 1 and scheme in (None, "per_tensor"):
        return one_scale(shape, shared=True)
    if len(scale) != 1 or scheme not in (None, "per_channel"):
        raise Misfit(f"scales {list(scale)} of {list(shape)} do not fit qscheme {show(str(scheme))}")
    if axis not in (*_ROWS, *_COLUMNS):
        if rows == columns:
            raise Misfit(f"scales {list(scale)} can be per row or per column, and ch_axis is missing")
        axis = 0 if scale[0] == rows else 1
    if scale[0] != (rows if axis in _ROWS else columns):
        raise Misfit(f"scales {list(scale)} do not fit {list(shape)} along axis {axis} (ch_axis)")
    return Grid(1, max(1, columns), rows, 1) if axis in _ROWS else Grid(max(1, rows), 1, 1, columns)


def _group_size(spec: Mapping[str, Any], scale: tuple[int, ...], length: int, groups: int) -> int:
    """Return the columns of a weight in a group; groups divide rows evenly."""
    configured = spec.get("group_size")
    size = length // max(1, groups)
    if not groups or size * groups != length:
        raise Misfit(f"scales {list(scale)} do not divide rows of {length}")
    if type(configured) is int and configured != size and not (groups == 1 and not 0 < configured < length):
        raise Misfit(f"scales {list(scale)} do not fit rows of {length} in groups of {show(configured)} (group_size)")
    return size


def _in_groups(group: PackedGroup, spec: Mapping[str, Any], shape: tuple[int, int], bits: int, numbers: str) -> Packing:
    """Return the packing of integers in groups, which are stored transposed."""
    (out, length), groups = shape, group.scales[0]
    size = _group_size(spec, group.scales, length, groups)
    label = label_of(f"int{bits}", Grid(1, size, out, groups), shape, _has_zeros(group, spec))
    return group.transposed("int8" if bits == 8 else "int", label, shape, bits, numbers, size=size)


# ---- 8-bit codes ----


def _bytes(group: PackedGroup, spec: Mapping[str, Any]) -> Packing:
    """fp8 and int8; integers in groups are stored transposed."""
    stored, scale = group.stored, group.scales
    integers = group.row.code not in FP8
    if integers:
        _check_zeros(group, spec, needed=False)
    if integers and spec.get("qscheme") == "per_group":
        if len(stored) != 2 or len(scale) != 2 or scale[1] != stored[1] or 0 in stored:
            raise Misfit(f"codes {list(stored)} and scales {list(scale)} must be [in, out] and [groups, out]")
        group.has_zeros()  # of the same shape
        return _in_groups(group, spec, (stored[1], stored[0]), 8, group.row.code)
    if len(stored) == 2 and (integers or (spec.get("ch_axis") in _COLUMNS and len(scale) == 1)):
        grid = _grid_of(group, spec, stored)
        if ZERO in group.parts and math.prod(group.parts[ZERO].shape) != math.prod(scale):
            raise Misfit(f"zero points {list(group.parts[ZERO].shape)} do not fit scales {list(scale)}")
        return group.in_bytes(grid, zeros=_has_zeros(group, spec))
    return floats.plain(group, _block(spec, stored))


def _check_zeros(group: PackedGroup, spec: Mapping[str, Any], *, needed: bool) -> None:
    """Refuse codes without zero points if the codes or the configuration require zero points."""
    if ZERO not in group.parts and (needed or spec.get("symmetric") is False):
        raise Misfit("its zero points are missing" + ("" if needed else ", but symmetric is false"))


def _block(spec: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the configured rows and columns of a block, or None."""
    size, block, scheme = spec.get("group_size"), spec.get("block_size"), spec.get("qscheme")
    if isinstance(block, list) and len(block) == 2 and all(map(is_length, block)):
        return block[0], block[1]
    _, rows, columns = matrices_of(shape)
    if scheme == "per_group":
        return (1, size) if is_length(size) else None
    if scheme == "per_channel":
        return (1, max(1, columns)) if spec.get("ch_axis") in _ROWS and len(shape) > 1 else None
    return (max(1, rows), max(1, columns)) if scheme == "per_tensor" else None


# ---- 4-bit integers in words ----


def _words(group: PackedGroup, spec: Mapping[str, Any], numbers: str) -> Packing:
    """Words along the rows; weights in groups, their scales and their zero points are stored transposed."""
    stored, scale = group.stored, group.scales
    if len(stored) != 2 or 0 in (*stored, *scale):
        raise Misfit(f"words {list(stored)} and scales {list(scale)} do not form a matrix")
    layout = word_layout(mapping(group.config.values.get("export")).get("pack_method"), "export.pack_method")
    _check_zeros(group, spec, needed=numbers == "unsigned")
    if spec.get("qscheme") != "per_group":
        shape = (stored[0], stored[1] * CODES_IN_WORD)
        grid = _grid_of(group, spec, shape)
        label = label_of("int4", grid, shape, _has_zeros(group, spec))
        zeros = _zeros_of(group, layout, grid)
        return group.packing("int", label, shape, 4, numbers, layout=layout, grid=grid, zeros=zeros)
    if len(scale) != 2 or -(-scale[1] // CODES_IN_WORD) != stored[1]:
        if len(scale) == 2 and -(-scale[0] // CODES_IN_WORD) == stored[1]:
            raise Refused(f"its scales {list(scale)} are [out, groups], as in old releases of Quark")
        raise Misfit(f"words {list(stored)} and scales {list(scale)} must be [in, out / 8] and [groups, out]")
    length, out = stored[0], scale[1]
    if layout == WORDS and out % CODES_IN_WORD:
        raise Refused(f"its {out} rows do not fill whole words of permuted codes")
    packed = _in_groups(group, spec, (out, length), 4, numbers)
    return packed._replace(layout=layout, zeros=_zeros_of(group, layout, None))


def word_layout(order: object, key: str) -> int:
    """Return the layout for an order of codes in a word."""
    layout = _ORDERS.get(order) if isinstance(order, str) else None
    if layout is None:
        raise Misfit(f"unknown {key} {show(str(order))}, expected one of {', '.join(_ORDERS)}")
    return layout


def _zeros_of(group: PackedGroup, layout: int, grid: Grid | None) -> Zeros | None:
    """Return how zero points are packed: in a row of words, a single zero point in its own word.

    Groups, which have no grid here, can also have plain numbers (zero_point_type float32).
    """
    if ZERO not in group.parts:
        return None
    row, zeros = group.parts[ZERO]
    if row.code != "I32" and (grid is not None or row.code not in NUMBERS):
        raise Misfit(f"zero points are {row.code}, expected I32")
    if grid is None:
        return group.packed_zeros(Zeros(layout, 4), (group.scales[0], group.stored[1]))
    words = -(-max(grid.rows, grid.columns) // CODES_IN_WORD)
    if math.prod(zeros) != 1 if grid.shared else zeros != (words,):
        raise Misfit(f"zero points {list(zeros)} do not fit scales {list(group.scales)}")
    if grid.shared:
        return Zeros(ROWS, 4)
    return Zeros(COLUMNS, 4, permuted=layout == WORDS) if grid.columns == 1 else Zeros(layout, 4)


# ---- 4- and 6-bit floats ----


def _small_floats(group: PackedGroup, spec: Mapping[str, Any]) -> Packing:
    """Rows of codes, the first in the low bits, with a scale per group: an exponent or a number."""
    stored, scale = group.stored, group.scales
    numbers, bits = _numbers(group, spec)
    if len(stored) < 2 or 0 in stored or stored[-1] * 8 % bits:
        raise Misfit(f"codes {list(stored)} are not rows of {bits}-bit codes")
    shape = (*stored[:-1], stored[-1] * 8 // bits)
    if len(scale) != len(shape) or scale[:-1] != shape[:-1]:
        raise Misfit(f"scales {list(scale)} do not fit codes {list(stored)}")
    size = _group_size(spec, scale, shape[-1], scale[-1])
    exponents = group.scale_code in ("U8", "F8_E8M0")
    scale_format = spec.get("scale_format")
    if isinstance(scale_format, str) and exponents != (scale_format == "e8m0"):
        raise Misfit(f"scales {list(scale)} are {group.scale_code}, but scale_format is {show(scale_format)}")
    grid = whole_grid(shape, 1, size)
    if exponents and size == 32:
        label = f"mxfp{bits}{' e3m2' if numbers == 'e3m2' else ''}"
    else:
        label = label_of(f"fp{bits}", grid, shape, grouped=True)
    return group.packing(f"fp{bits}", label, shape, bits, numbers, grid=grid, scale_dtype="F8_E8M0")


def _scales_in_fp8(group: PackedGroup, spec: Mapping[str, Any], scales: Mapping[str, Any]) -> Packing:
    """E2M1 with fp8 scales, which share a scale."""
    _numbers(group, spec)
    if GLOBAL not in group.parts:
        raise Misfit("the global scale of its scales is missing (weight_scale_2)")
    if group.scale_code != "F8_E4M3" or math.prod(group.parts[GLOBAL].shape) != 1:
        raise Misfit(
            f"scales {list(group.scales)} are {group.scale_code} beside "
            f"{list(group.parts[GLOBAL].shape)}, but dtype is {show(str(scales.get('dtype')))}"
        )
    packed = _small_floats(group, {**spec, "scale_format": None})
    assert packed.grid is not None
    label = "nvfp4" if packed.grid.column_block == 16 else packed.label
    return packed._replace(label=label, scale_rule=MULTIPLIED)


# ---- unsupported settings ----


def unread(quantization: Quantization, name: str) -> str | None:
    """Return the unsupported quantization of a tensor, or None."""
    specs = _specs_of(quantization, name)
    config, module = quantization.values.get("algo_config"), _module_of(name)
    for algorithm in config if isinstance(config, list) else [config]:
        layers = mapping(mapping(algorithm).get("online_config")).get("online_rotation_layers")
        if isinstance(layers, list) and module in layers:  # their inputs are rotated at run time
            return "Quark's weights in a rotated basis (algo_config)"
    kinds = [brief(str(spec.get("dtype"))) for spec in specs]
    if any(spec.get("scale_format") == "e5m3" for spec in specs):
        return f"Quark's {kinds[0]} with scales of e5m3"
    if len(specs) > 1 and kinds not in (["fp4", "fp8_e4m3"], ["fp8_e4m3", "int4"], ["fp8_e4m3", "uint4"]):
        return f"Quark's {' and '.join(kinds[:3])} in stages"
    if kinds and "dtype" in specs[0] and kinds[0] not in read_data(__name__, "methods.json")["quark_dtypes"]:
        return f"Quark's {kinds[0]}"
    return None


def _specs_of(quantization: Quantization, name: str) -> list[Mapping[str, Any]]:
    """Return Quark's settings of a tensor, an item per stage of quantization."""
    value = _layer(quantization, _module_of(name))["global_quant_config"].get(
        "bias" if name.endswith(".bias") else "weight"
    )
    return [spec for spec in (value if isinstance(value, list) else [value]) if isinstance(spec, Mapping)]


def _layer(quantization: Quantization, module: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of a layer: by the first matching name or glob, else by type, else the global ones."""
    match = quantization.once(_globs).first(module)
    if match is not None:
        layer = mapping(quantization.values.get("layer_quant_config")).get(match)
    else:
        types = mapping(quantization.values.get("layer_type_quant_config"))
        layer = types.get("Linear", quantization.values.get("global_quant_config"))
    return {"global_quant_config": mapping(layer)}


def _globs(quantization: Quantization) -> patterns.Globs:
    return patterns.Globs(mapping(quantization.values.get("layer_quant_config")), "layer_quant_config")


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name


# ---- rows ----

SETTINGS_OF_MODULES = {QUARK: _layer}

# Suffixes of scales and zero points in checkpoints for transformers, then for diffusers.
_SCALE = ("_scale", "_quantizer.scale", "_quantizer.0.scale")
_SECOND_SCALE = ("_scale_2", "_quantizer.1.scale")

FAMILIES = [
    Family(
        "Quark, int4 in fp8",
        "",
        frozenset(("I32",)),
        {SCALE: _SECOND_SCALE, FACTORS: _SCALE},
        in_fp8,
        {ZERO: ("_zero_point_2", "_quantizer.1.zero_point")},
        method=QUARK,
    ),
    Family(
        "Quark",
        "",
        FP8 | {"I8", "U8", "I32"},
        {SCALE: _SCALE},
        describe,
        {ZERO: ("_zero_point", "_quantizer.zero_point"), GLOBAL: _SECOND_SCALE},
        method=QUARK,
    ),
]
