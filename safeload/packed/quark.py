"""AMD Quark: floats and integers of 4 to 8 bits, with scales for a tensor, its rows, groups or blocks.

The configuration says what codes are and in what order, since the same shapes hold several; the shapes must agree.

Source: quark ``torch/utils/pack.py``, ``torch/export/nn/modules``, ``torch/kernel/hw_emulation``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..base import packing
from ..base.packing import Grid, Packing, Zeros
from ..base.text import show
from ..errors import UnsupportedError
from . import floats
from .checks import NUMBERS
from .config import QUARK_ORDERS, Quantization, brief, is_length
from .grid import Misfit, Refused, whole_grid
from .methods import SPEC, unknown
from .packed_group import FP8, PackedGroup, label_of, matrices_of

METHOD = "quark"
# Suffixes of the names of scales and zero points: of checkpoints for transformers, and of those for diffusers.
SCALE = ("_scale", "_quantizer.scale", "_quantizer.0.scale")
SECOND_SCALE = ("_scale_2", "_quantizer.1.scale")
ZERO = ("_zero_point", "_quantizer.zero_point")
SECOND_ZERO = ("_zero_point_2", "_quantizer.1.zero_point")

# By the name of a dtype: the dtypes that store it, bits of a code, and what codes stand for.
_STORED: Mapping[str, tuple[frozenset[str], int, str]] = {
    "fp8_e4m3": (frozenset(("F8_E4M3", "F8_E4M3FNUZ")), 8, ""),
    "fp8_e5m2": (frozenset(("F8_E5M2", "F8_E5M2FNUZ")), 8, ""),
    "int8": (frozenset(("I8",)), 8, "I8"),
    "uint8": (frozenset(("U8",)), 8, "U8"),
    "int4": (frozenset(("I32",)), 4, "signed"),
    "uint4": (frozenset(("I32",)), 4, "unsigned"),
    "fp4": (frozenset(("U8",)), 4, "e2m1"),
    "fp6_e2m3": (frozenset(("U8",)), 6, "e2m3"),
    "fp6_e3m2": (frozenset(("U8",)), 6, "e3m2"),
}
_CODES_IN_WORD = 8
# Axes of `ch_axis` that are the rows of a weight, and its columns.
_ROWS, _COLUMNS = (0, -2), (1, -1)
_EXPONENTS = ("U8", "F8_E8M0")


def describe(group: PackedGroup) -> Packing:
    """The packing that the configuration says, if the shapes are those."""
    first, second = _specs(group)
    if second is not None:
        return _scales_in_fp8(group, first, second)
    if group.has(packing.GLOBAL):
        raise Misfit(f"{group.names[packing.GLOBAL]} is there, but its weights have one stage of scales (dtype)")
    if group.dtype() in FP8:
        return _bytes(group, first)
    numbers, bits = _numbers(group, first)
    if group.dtype() == "I32":
        return _words(group, first, numbers)
    return _bytes(group, first) if bits == 8 else _small_floats(group, first)


def in_fp8(group: PackedGroup) -> Packing:
    """Integers of 4 bits with a scale for each row, which stand for fp8 with a scale for all of them."""
    _, second = _specs(group)
    if second is None:
        raise Misfit(f"{group.names[packing.SCALE]} is there, but its weights have one stage of scales (dtype)")
    numbers, _ = _numbers(group, second)
    if math.prod(group.shape(packing.FACTORS)) != 1:
        raise Misfit(f"scales {list(group.shape(packing.FACTORS))} of fp8 are not one for all")
    packed = _words(group, second, numbers)
    return packed._replace(label=f"{packed.label} in fp8")


# ---- the configuration ----


def unread(config: Quantization, name: str) -> str | None:
    """What the configuration says of a tensor that is not dequantized; None if it is.

    Raises:
        UnsupportedError: a glob that is not matched.
    """
    return _unread(config, name, _given(config, name))


def _unread(config: Quantization, name: str, specs: Sequence[Mapping[str, Any]]) -> str | None:
    if _rotated(config, _module(name)):
        return "Quark's weights in a rotated basis (algo_config)"
    said = [brief(str(spec.get("dtype"))) for spec in specs]
    if any(spec.get("scale_format") == "e5m3" for spec in specs):
        return f"Quark's {said[0]} with scales of e5m3"
    if len(specs) > 1 and said not in (["fp4", "fp8_e4m3"], ["fp8_e4m3", "int4"], ["fp8_e4m3", "uint4"]):
        return f"Quark's {' and '.join(said[:3])} in stages"
    if said and "dtype" in specs[0] and said[0] not in _STORED:
        return f"Quark's {said[0]}"
    return None


def _module(name: str) -> str:
    """The module that a weight or a bias belongs to."""
    return name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name


def _given(config: Quantization, name: str) -> list[Mapping[str, Any]]:
    """What is said of a tensor: of a weight in two stages twice."""
    layer = config.of_quark(_module(name))
    given = layer.get("bias" if name.endswith(".bias") else "weight")
    specs = given if isinstance(given, list) else [given]
    return [spec for spec in specs if isinstance(spec, Mapping)]


def _rotated(config: Quantization, module: str) -> bool:
    """Whether the weights of a module are rotated, and its inputs are when it runs."""
    algorithms = config.get("algo_config")
    for one in algorithms if isinstance(algorithms, list) else [algorithms]:
        online = one.get("online_config") if isinstance(one, Mapping) else None
        layers = online.get("online_rotation_layers") if isinstance(online, Mapping) else None
        if isinstance(layers, list) and module in layers:
            return True
    return False


def _specs(group: PackedGroup) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """What is said of codes, and of what those or their scales stand for; empty where nothing is."""
    assert group.config is not None  # the row of the table asks for its method
    try:
        specs = _given(group.config, group.logical)
    except UnsupportedError as error:
        raise Refused(str(error.args[0])) from None
    why = _unread(group.config, group.logical, specs)
    setting = next(filter(None, (unknown(spec, SPEC) for spec in specs)), None)
    if why is None and setting is not None:
        why = f"Quark's {brief(str(setting[0]))} {brief(str(setting[1]))}"
    if group.has_beside(".input_rotation"):
        why = "Quark's weights in a rotated basis (input_rotation)"
    if why is not None:
        raise Refused(f"{why} is not dequantized")
    first = specs[0] if specs else {}
    return first, specs[1] if len(specs) > 1 else None


def _numbers(group: PackedGroup, spec: Mapping[str, Any]) -> tuple[str, int]:
    """What codes stand for, and their bits."""
    said = spec.get("dtype")
    if not isinstance(said, str):
        raise Misfit(f"nothing says what its {group.dtype()} codes are: its configuration has no dtype for them")
    stored, bits, numbers = _STORED.get(said, (frozenset(), 0, ""))
    if group.dtype() not in stored:
        raise Misfit(f"its codes {list(group.shape())} are {group.dtype()}, but dtype is {show(said)}")
    return numbers, bits


def _label(prefix: str, group: PackedGroup, spec: Mapping[str, Any], grid: Grid, shape: tuple[int, ...]) -> str:
    """Quark stores the zero points of symmetric weights too, which are all zero."""
    asymmetric = group.has(packing.ZERO) and spec.get("symmetric") is not True
    return label_of(prefix, grid, shape, asymmetric)


# ---- scales ----


def _grid_of(group: PackedGroup, spec: Mapping[str, Any], shape: tuple[int, ...]) -> Grid:
    """The grid of one scale, or of those of rows or of columns."""
    scale, (rows, columns) = group.shape(packing.SCALE), shape[-2:]
    scheme, axis = spec.get("qscheme"), spec.get("ch_axis")
    if math.prod(scale) == 1 and scheme in (None, "per_tensor"):
        return Grid(max(1, rows), max(1, columns), 1, 1, shared=True)
    if len(scale) != 1 or scheme not in (None, "per_channel"):
        raise Misfit(f"scales {list(scale)} of {list(shape)} are not those of qscheme {show(str(scheme))}")
    if axis not in (*_ROWS, *_COLUMNS):
        if rows == columns:
            raise Misfit(f"scales {list(scale)} may be those of rows or of columns: nothing says which (ch_axis)")
        axis = 0 if scale[0] == rows else 1
    if scale[0] != (rows if axis in _ROWS else columns):
        raise Misfit(f"scales {list(scale)} do not fit {list(shape)} along axis {axis} (ch_axis)")
    return Grid(1, max(1, columns), rows, 1) if axis in _ROWS else Grid(max(1, rows), 1, 1, columns)


def _group_size(spec: Mapping[str, Any], scale: tuple[int, ...], length: int, groups: int) -> int:
    """Columns of a weight in a group, of which rows have a whole number."""
    given = spec.get("group_size")
    size = length // max(1, groups)
    if not groups or size * groups != length:
        raise Misfit(f"scales {list(scale)} do not divide rows of {length}")
    if type(given) is int and given != size and not (groups == 1 and not 0 < given < length):
        raise Misfit(f"scales {list(scale)} do not fit rows of {length} in groups of {show(given)} (group_size)")
    return size


# ---- 8 bits ----


def _bytes(group: PackedGroup, spec: Mapping[str, Any]) -> Packing:
    """fp8 and int8. Groups of integers are stored transposed."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    integers = group.dtype() not in FP8
    if integers:
        _check_zeros(group, spec, needed=False)
    if integers and spec.get("qscheme") == "per_group":
        return _grouped_bytes(group, spec)
    if len(stored) == 2 and (integers or (spec.get("ch_axis") in _COLUMNS and len(scale) == 1)):
        grid = _grid_of(group, spec, stored)
        prefix, numbers = ("int8" if integers else "fp8"), group.dtype()
        if group.has(packing.ZERO) and math.prod(group.shape(packing.ZERO)) != math.prod(scale):
            raise Misfit(f"zero points {list(group.shape(packing.ZERO))} beside scales {list(scale)}")
        return group.packing(prefix, _label(prefix, group, spec, grid, stored), stored, 8, numbers, grid=grid)
    return floats.plain(group, _block(spec, stored))


def _check_zeros(group: PackedGroup, spec: Mapping[str, Any], *, needed: bool) -> None:
    """Refuses codes without zero points if they need some, or the configuration says that they have some."""
    if not group.has(packing.ZERO) and (needed or spec.get("symmetric") is False):
        raise Misfit("its zero points are missing" + ("" if needed else ", but symmetric is false"))


def _block(spec: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns of the elements that share a scale; None if the configuration does not say."""
    size, block, scheme = spec.get("group_size"), spec.get("block_size"), spec.get("qscheme")
    if isinstance(block, list) and len(block) == 2 and all(map(is_length, block)):
        return block[0], block[1]
    _, rows, columns = matrices_of(shape)
    if scheme == "per_group":
        return (1, size) if is_length(size) else None
    if scheme == "per_channel":
        return (1, max(1, columns)) if spec.get("ch_axis") in _ROWS and len(shape) > 1 else None
    return (max(1, rows), max(1, columns)) if scheme == "per_tensor" else None


def _grouped_bytes(group: PackedGroup, spec: Mapping[str, Any]) -> Packing:
    stored, scale = group.shape(), group.shape(packing.SCALE)
    if len(stored) != 2 or len(scale) != 2 or scale[1] != stored[1] or 0 in stored:
        raise Misfit(f"codes {list(stored)} and scales {list(scale)} are not [in, out] and [groups, out]")
    if group.has(packing.ZERO) and group.shape(packing.ZERO) != scale:
        raise Misfit(f"zero points {list(group.shape(packing.ZERO))} beside scales {list(scale)}")
    size = _group_size(spec, scale, stored[0], scale[0])
    return group.packing(
        "int8",
        _label("int8", group, spec, Grid(1, size, stored[1], scale[0]), (stored[1], stored[0])),
        (stored[1], stored[0]),
        8,
        group.dtype(),
        transpose=True,
        rows=stored[0],
        columns=stored[1],
        grid=Grid(size, 1, *scale),
    )


# ---- integers of 4 bits, in words ----


def _words(group: PackedGroup, spec: Mapping[str, Any], numbers: str) -> Packing:
    """Words along the rows; weights in groups are stored transposed, and so are their scales and zero points."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    if len(stored) != 2 or 0 in (*stored, *scale):
        raise Misfit(f"words {list(stored)} and scales {list(scale)} are not those of a matrix")
    layout = _layout(group)
    _check_zeros(group, spec, needed=numbers == "unsigned")
    if spec.get("qscheme") != "per_group":
        shape = (stored[0], stored[1] * _CODES_IN_WORD)
        grid = _grid_of(group, spec, shape)
        label = _label("int4", group, spec, grid, shape)
        zeros = _zeros_of(group, layout, grid)
        return group.packing("int", label, shape, 4, numbers, layout=layout, grid=grid, zeros=zeros)
    if len(scale) != 2 or -(-scale[1] // _CODES_IN_WORD) != stored[1]:
        if len(scale) == 2 and -(-scale[0] // _CODES_IN_WORD) == stored[1]:
            raise Refused(f"scales {list(scale)} are [out, groups], as old releases of Quark store them")
        raise Misfit(f"words {list(stored)} and scales {list(scale)} are not [in, out / 8] and [groups, out]")
    length, out = stored[0], scale[1]
    if layout == packing.WORDS and out % _CODES_IN_WORD:
        raise Refused(f"{out} rows do not fill whole words of permuted codes")
    size = _group_size(spec, scale, length, scale[0])
    return group.packing(
        "int",
        _label("int4", group, spec, Grid(1, size, out, scale[0]), (out, length)),
        (out, length),
        4,
        numbers,
        layout=layout,
        transpose=True,
        rows=length,
        columns=out,
        grid=Grid(size, 1, *scale),
        zeros=_zeros_in_groups(group, layout, (scale[0], stored[1])),
    )


def _layout(group: PackedGroup) -> int:
    """The order of the codes in a word."""
    export = None if group.config is None else group.config.get("export")
    said = export.get("pack_method") if isinstance(export, Mapping) else None
    layout = QUARK_ORDERS.get(said) if isinstance(said, str) else None
    if layout is None:
        raise Misfit(f"pack_method {show(str(said))} does not say the order of its codes (export.pack_method)")
    return layout


def _zeros_in_groups(group: PackedGroup, layout: int, wanted: tuple[int, int]) -> Zeros | None:
    """Packed zero points of groups; None where they are plain numbers, or missing."""
    if not group.has(packing.ZERO):
        return None
    found = group.shape(packing.ZERO)
    if group.dtype(packing.ZERO) in NUMBERS:  # zero_point_type float32
        wanted = group.shape(packing.SCALE)[0], group.shape(packing.SCALE)[1]
    elif group.dtype(packing.ZERO) != "I32":
        raise Misfit(f"zero points are {group.dtype(packing.ZERO)}, wanted I32")
    if found != wanted:
        raise Misfit(f"zero points {list(found)}, wanted {list(wanted)}")
    return None if group.dtype(packing.ZERO) in NUMBERS else Zeros(layout, 4)


def _zeros_of(group: PackedGroup, layout: int, grid: Grid) -> Zeros | None:
    """Packed zero points of rows or of columns, which are one row of words; a single one is in a word of its own."""
    if not group.has(packing.ZERO):
        return None
    count, found = max(grid.rows, grid.columns), group.shape(packing.ZERO)
    if group.dtype(packing.ZERO) != "I32":
        raise Misfit(f"zero points are {group.dtype(packing.ZERO)}, wanted I32")
    if grid.shared:
        if math.prod(found) != 1:
            raise Misfit(f"zero points {list(found)} beside scales {list(group.shape(packing.SCALE))}")
        return Zeros(packing.ROWS, 4)
    if found != (-(-count // _CODES_IN_WORD),):
        raise Misfit(f"zero points {list(found)} beside scales {list(group.shape(packing.SCALE))}")
    if grid.columns == 1:
        return Zeros(packing.COLUMNS, 4, permuted=layout == packing.WORDS)
    return Zeros(layout, 4)


# ---- floats of 4 and 6 bits ----


def _small_floats(group: PackedGroup, spec: Mapping[str, Any]) -> Packing:
    """Rows of codes, the first in the low bits, with a scale for each group: an exponent, or a number."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    numbers, bits = _numbers(group, spec)
    if len(stored) < 2 or 0 in stored or stored[-1] * 8 % bits:
        raise Misfit(f"codes {list(stored)} are not rows of {bits} bits")
    shape = (*stored[:-1], stored[-1] * 8 // bits)
    if len(scale) != len(shape) or scale[:-1] != shape[:-1]:
        raise Misfit(f"scales {list(scale)} do not fit codes {list(stored)}")
    size = _group_size(spec, scale, shape[-1], scale[-1])
    exponents = group.dtype(packing.SCALE) in _EXPONENTS
    said = spec.get("scale_format")
    if isinstance(said, str) and exponents != (said == "e8m0"):
        raise Misfit(f"scales {list(scale)} are {group.dtype(packing.SCALE)}, but scale_format is {show(said)}")
    grid = whole_grid(shape, 1, size)
    if exponents and size == 32:
        label = f"mxfp{bits}{' e3m2' if numbers == 'e3m2' else ''}"
    else:
        label = label_of(f"fp{bits}", grid, shape, grouped=True)
    dtype = group.scale_dtype("F8_E8M0")
    return group.packing(f"fp{bits}", label, shape, bits, numbers, grid=grid, scale_dtype=dtype)


def _scales_in_fp8(group: PackedGroup, spec: Mapping[str, Any], scales: Mapping[str, Any]) -> Packing:
    """E2M1 whose scales are fp8 with a scale for all of them."""
    _numbers(group, spec)
    if not group.has(packing.GLOBAL):
        raise Misfit("the scale of its scales is missing (weight_scale_2)")
    if group.dtype(packing.SCALE) != "F8_E4M3" or math.prod(group.shape(packing.GLOBAL)) != 1:
        raise Misfit(
            f"scales {list(group.shape(packing.SCALE))} are {group.dtype(packing.SCALE)} beside "
            f"{list(group.shape(packing.GLOBAL))}, but dtype is {show(str(scales.get('dtype')))}"
        )
    packed = _small_floats(group, {**spec, "scale_format": None})
    assert packed.grid is not None
    label = "nvfp4" if packed.grid.column_block == 16 else packed.label
    return packed._replace(label=label, scale_rule=packing.MULTIPLIED)
