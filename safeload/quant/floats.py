"""A number per code: plain fp8 and int8, quanto's and torchao's too, and E2M1 codes, with a scale per block.

Sources: `DeepSeek-V3 README_WEIGHTS.md`; transformers ``integrations/{finegrained_fp8,mxfp4}.py``; nvidia-modelopt
``torch/quantization/qtensor``; optimum-quanto ``tensor/qbytes.py``; torchao ``quantize_/workflows``,
``prototype/safetensors``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core import native
from ..core.packing import FACTORS, GLOBAL, MULTIPLIED, PLANES, QUOTIENT, SCALE, STORED, ZERO, Grid, Packing
from ..core.text import show
from .families import FP8, Engine, Family, Preset, parts_of
from .packed_group import NUMBERS, Misfit, PackedGroup, Refused, label_of, matrices_of, one_scale, parsed, whole_grid
from .quantization import AUTO_ROUND, Quantization, brief, is_length, mapping, with_quantization

# ---- fp8 and int8 ----


def plain(group: PackedGroup, block: tuple[int, int] | None = None) -> Packing:
    """8-bit codes, and scales broadcast over blocks."""
    shape, scale = group.stored, group.scales
    matrices, rows, columns = matrices_of(shape)
    grid = group.configured_grid(shape) or _flat_grid(group)
    if grid is None:
        exact = block is not None or group.config.block is not None
        block = block or _block_of(group)
        if _has_halves(shape, scale, block):
            matrices, rows, scale = 2 * matrices, rows // 2, (2 * scale[0], scale[1] // 2, scale[2])
        grid = _grid_of((matrices, rows, columns) if len(shape) > 2 else shape, scale, block, exact=exact)
    label = label_of(group.prefix, grid, shape, group.has_zeros())
    bits = None if group.prefix == "fp8" else group.configured("num_bits")
    if bits in range(1, 9):  # naive-quantized: a byte per code, even for codes of fewer bits
        label = label.replace("int8", f"int{bits}", 1)
    if group.scale_code in ("F8_E8M0", "U8") and (grid.row_block, grid.column_block) == (1, 32):
        label = "mxfp8"
    rule = STORED
    if group.method == "fp8" and group.settings().get("weight_scale_semantics") is not None:  # GPTQModel's
        if ZERO in group.parts or not group.names[SCALE].endswith("_scale_inv"):
            raise Refused("its weight_scale_semantics apply only to a weight_scale_inv without zero points")
        rule = QUOTIENT
    return group.in_bytes(grid, label=label, matrices=matrices, rows=rows, scale_dtype="F8_E8M0", scale_rule=rule)


def _grid_of(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int], *, exact: bool = False) -> Grid:
    """Return the grid of scales of this shape over a tensor, as PyTorch's writers mean it.

    A single element is the scale of the whole tensor; [rows] or [rows, 1] has an element per row; an axis of 1 is
    broadcast; an axis of ceil(length / block) has an element per block. Experts have a leading axis in both tensors.

    An ``exact`` block comes from the configuration, and contradicts scales per row or column.
    """
    rows, columns = (1, 1, *shape)[-2:]
    if math.prod(scale) == 1:
        return one_scale(shape, shared=True)
    lead = shape[:-2]
    if len(scale) == 4 and len(shape) == 2 and scale[1] == scale[3] == 1:  # modelopt's blocks: [rows, 1, columns, 1]
        scale = (scale[0], scale[2])
    own = scale
    if lead:
        experts = math.prod(lead)
        if scale == lead or (scale[:1] == (experts,) and math.prod(scale) == experts):
            return one_scale(shape)
        if scale[: len(lead)] != lead:
            raise Misfit(f"scales {list(scale)} and codes {list(shape)} have different numbers of experts")
        own = scale[len(lead) :]
    expected = -(-rows // block[0]), -(-columns // block[1])
    misfit = (
        f"scales {list(scale)} do not fit {list(shape)} in blocks of {block[0]} x {block[1]}: expected "
        f"{[*lead, *expected]}"
    )
    if exact and own not in (expected, (1, 1)) and (own, 1) != (expected[:1], expected[1]):
        raise Misfit(misfit)
    if len(own) == 1:
        if own[0] != rows:
            raise Misfit(f"{own[0]} scales for {rows} rows of {list(shape)}")
        if lead and rows == columns:
            raise Misfit(f"scales {list(scale)} can be per row or per column of {list(shape)}")
        return Grid(1, max(1, columns), rows, 1)
    if len(own) != 2:
        raise Misfit(f"scales {list(scale)} do not fit {list(shape)}")
    if lead and own[1] == 1 and own[0] == columns != 1 and own[0] != rows and own[0] != -(-rows // block[0]):
        return Grid(max(1, rows), 1, 1, columns)  # Llama 4's down_proj: [experts, columns, 1]
    down, across = _axis(own[0], rows, block[0]), _axis(own[1], columns, block[1])
    if down is None or across is None:
        raise Misfit(misfit)
    return Grid(down, across, own[0], own[1])


def _axis(scales: int, length: int, block: int) -> int | None:
    """Return the elements per scale along an axis; None if no reading fits."""
    if scales == -(-length // block):
        return block
    if scales == 1:
        return max(1, length)
    return 1 if scales == length else None


def _has_halves(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Return True if each expert is two matrices, its gate and up projections, each with its own grid."""
    if len(shape) != 3 or len(scale) != 3 or shape[1] % 2 or scale[1] % 2 or scale[1] == -(-shape[1] // block[0]):
        return False
    return scale[1] // 2 in (1, -(-(shape[1] // 2) // block[0])) and scale[1] != shape[1]


def _flat_grid(group: PackedGroup) -> Grid | None:
    """Return the grid of fp8 in groups by auto-round, which stores the scales of all rows in one list; else None."""
    shape, scale = group.stored, group.scales
    size = group.settings().get("group_size") if group.method in AUTO_ROUND else None
    if len(shape) != 2 or len(scale) != 1 or not is_length(size) or shape[1] % size or size >= shape[1]:
        return None
    grid = whole_grid(shape, 1, size)
    return grid if scale[0] == grid.rows * grid.columns else None


def _block_of(group: PackedGroup) -> tuple[int, int]:
    """Return the configured rows and columns of a block of scales."""
    if not group.is_configured:
        return 128, 128
    scale, codes = group.scales, group.stored
    grouped = len(scale) == len(codes) > 1 and scale[:-1] == codes[:-1]
    size = group.configured("group_size", "group")
    if grouped and size is not None and size > 0 and scale[-1] > 1:
        raise Misfit(f"scales {list(scale)} do not fit codes {list(codes)} in groups of {size} (group_size)")
    exponents = group.scale_code in ("F8_E8M0", "U8")
    in_groups = grouped and scale[-1] * 32 == codes[-1] and (exponents or group.config.block is None)
    if group.method == "mxfp8" or in_groups:
        return 1, 32
    return group.config.block or (128, 128)


def deepseek_v4(group: PackedGroup) -> Packing:
    """``X.scale`` beside ``X.weight``: fp8 in blocks, or two E2M1 codes per byte with a scale per 32 codes."""
    shape, scale = group.stored, group.scales
    if len(shape) < 2 or len(scale) != len(shape) or group.scale_code not in ("F8_E8M0", "U8", "F32"):
        raise Misfit("its scale is not the scale of a weight")
    return fp4(group, "mxfp4", 32, "F8_E8M0") if group.row.code == "I8" else plain(group)


# ---- 4-bit rows: E2M1 ----


def fp4(group: PackedGroup, label: str, block: int, exponents: str, numbers: str = "e2m1") -> Packing:
    """Two 4-bit codes per byte, the first in the low bits, and a scale per ``block`` codes."""
    stored = group.stored
    if len(stored) < 2:
        raise Misfit(f"codes {list(stored)} are not a matrix")
    if group.scale_code not in ("U8", exponents) and not (label == "mxfp4" and group.row.code == "I8"):
        raise Misfit(f"scales of {label} must be {exponents}, got {group.scale_code}")
    shape = (*stored[:-1], stored[-1] * 2)
    sizes = [weights["group_size"] for weights in group.weights if weights.get("group_size") is not None]
    if sizes and block not in sizes:
        raise Misfit(f"{label} has groups of {block}, but group_size is {brief(show(sizes[0]))} (config_groups)")
    if group.scales != (*shape[:-1], -(-shape[-1] // block)) or shape[-1] % block:
        raise Misfit(f"scales {list(group.scales)} do not fit rows of {shape[-1]} in blocks of {block}")
    return group.packing("fp4", label, shape, 4, numbers, grid=whole_grid(shape, 1, block), scale_dtype=exponents)


def gpt_oss(group: PackedGroup) -> Packing:
    """16-byte blocks on their own axis; transformers' parameter is transposed, OpenAI's is not."""
    stored = group.stored
    if len(stored) < 3 or stored[-1] != 16 or group.scales != stored[:-1]:
        raise Misfit(f"blocks {list(stored)} and scales {list(group.scales)} do not fit: blocks must have 16 bytes")
    if group.scale_code not in ("U8", "F8_E8M0"):
        raise Misfit(f"scales of mxfp4 must be F8_E8M0, got {group.scale_code}")
    rows, columns = stored[-3], stored[-2] * 32
    matrices = math.prod(stored[:-3])
    transpose = group.codes.endswith("_blocks")
    shape = (*stored[:-3], columns, rows) if transpose else (*stored[:-3], rows, columns)
    sides = {"matrices": matrices, "rows": rows, "columns": columns, "row_bytes": columns // 2, "transpose": transpose}
    grid = Grid(1, 32, rows, stored[-2])
    return group.packing("fp4", "mxfp4", shape, 4, "e2m1", grid=grid, scale_dtype="F8_E8M0", **sides)


# ---- NVFP4 of ModelOpt ----


def modelopt_nvfp4(group: PackedGroup) -> Packing:
    """NVFP4 with a multiplying global scale and the factors of AWQ."""
    algorithm = _layer(group.config, group.module).get("quant_algo") or group.config.values.get("quant_algo")
    if isinstance(algorithm, str) and algorithm.upper().startswith("W4A") and algorithm.upper() != "W4A16_NVFP4":
        raise Refused(f"its quant_algo {algorithm} stores unsupported codes or scales")
    if any(f"{group.module}.svdquant_lora_{side}" in group.context.tensors for side in "ab"):
        raise Refused("NVFP4_SVD adds a product of two matrices, which safeload does not compute")
    return group.check_shared(fp4(group, "nvfp4", 16, "F8_E4M3"))._replace(scale_rule=MULTIPLIED)


def modelopt_experts(group: PackedGroup) -> Packing:
    """Experts in a single tensor; Llama 4 stores them as [in, out], packed along ``in``."""
    stored, scale = group.stored, group.scales
    if len(stored) != 3 or len(scale) != 3 or scale[-1] != stored[-1] or scale[-2] * 8 != stored[-2]:
        return modelopt_nvfp4(group)
    if group.scale_code != "F8_E4M3":
        raise Misfit(f"scales of nvfp4 must be F8_E4M3, got {group.scale_code}")
    shape = (stored[0], stored[1] * 2, stored[2])
    layout = {"layout": PLANES, "interleaved": True, "scale_rule": MULTIPLIED}
    return group.check_shared(group.packing("fp4", "nvfp4", shape, 4, "e2m1", grid=whole_grid(shape, 16, 1), **layout))


def _layer(quantization: Quantization, module: str) -> Mapping[str, Any]:
    """Return the settings of a layer under ``quantized_layers``, which can also name an enclosing module."""
    layers = mapping(quantization.values.get("quantized_layers"))
    while layers and module:
        if module in layers:
            return mapping(layers[module])
        module = module.rpartition(".")[0]
    return {}


# ---- quanto and torchao: inner tensors of torch.Tensor subclasses ----


# torchao's types with 8-bit numbers in the order of the tensor. Other types are in kernel order, or have two scales.
_TYPES = frozenset(("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"))


def quanto(group: PackedGroup) -> Packing:
    """``X._data`` and ``X._scale``, one per index of the first axis, for linear layers and convolutions."""
    shape, scale = group.stored, group.scales
    if len(shape) < 3:
        return plain(group)
    if scale != (shape[0], *(1 for _ in shape[1:])):
        raise Misfit(f"scales {list(scale)} do not fit codes {list(shape)}: expected one per index of the first axis")
    inner = math.prod(shape[1:])
    grid, label = Grid(1, max(1, inner), 1, 1), f"{group.prefix} row"
    return group.in_bytes(grid, label=label, matrices=shape[0], rows=1, columns=inner, row_bytes=inner)


def torchao(group: PackedGroup) -> Packing:
    """``X._weight_qdata`` and ``X._weight_scale``, for any parameter; scales divide the codes into equal blocks."""
    shape, scale = group.stored, group.scales
    text = group.context.metadata(group.context.places[group.codes][0]).get(group.logical)
    if isinstance(text, str):  # rewritten files can have lost the type
        kind = parsed(text.encode(), f"metadata of {show(group.logical)}").get("_type")
        if not isinstance(kind, str) or kind not in _TYPES:
            raise Refused(f"torchao's {show(kind)} stores codes in the order of one kernel")
    if FACTORS in group.parts:
        raise Refused("its act_pre_scale multiplies the activations, so weights alone do not give the model's results")
    if group.scale_code not in NUMBERS:
        raise Refused(f"its {group.scale_code} scales look like MXTensor's, which can be swizzled")
    zeros = group.has_zeros()
    if math.prod(scale) == 1:
        return group.in_bytes(one_scale(shape, shared=True), zeros=zeros)
    _, rows, columns = matrices_of(shape)
    down, across = scale[-2:] if len(scale) == len(shape) > 1 else (0, 0)
    if scale[:-2] != shape[:-2] or not down or not across or rows % down or columns % across:
        raise Misfit(f"scales {list(scale)} do not divide codes {list(shape)} into equal blocks")
    return group.in_bytes(Grid(max(1, rows // down), max(1, columns // across), down, across), zeros=zeros)


# ---- writing ----

#: Of formats that several engines read.
SERVERS = Engine("vLLM, SGLang and transformers", kv_cache=True)


def lay_out(
    preset: Preset, config: Mapping[str, Any], left: Mapping[str, str], exceptions: Mapping[str, Preset]
) -> dict[str, Any]:
    """Describe fp8 in blocks as DeepSeek does."""
    settings = {
        "activation_scheme": "dynamic",
        "modules_to_not_convert": sorted(left),
        "quant_method": "fp8",
        "weight_block_size": [preset.row_block, preset.group],
    }
    return with_quantization(config, settings)


_INVERSE = parts_of(".weight", "F8_E4M3", ".weight_scale_inv", "F32")
PRESETS = [
    Preset(
        "deepseek_fp8", SERVERS, native.lib.SL_ENCODE_FP8_INVERSE, 8, 128, _INVERSE, lay_out, row_block=128, sides=128
    )
]


# ---- rows ----

SETTINGS_OF_MODULES = {"modelopt": _layer}

FAMILIES = [
    Family("quanto", "._data", FP8 | {"I8"}, {SCALE: ("._scale",)}, quanto, logical=""),
    Family(
        "torchao",
        "_qdata",
        FP8 | {"I8"},
        {SCALE: ("_scale",)},
        torchao,
        {ZERO: ("_zero_point",), FACTORS: ("_act_pre_scale",)},
        logical="",
        private=True,
    ),
    Family(
        "modelopt NVFP4",
        ".weight",
        frozenset(("U8",)),
        {SCALE: (".weight_scale",), GLOBAL: (".weight_scale_2",)},
        modelopt_nvfp4,
        {FACTORS: (".pre_quant_scale",)},
    ),
    Family(
        "modelopt NVFP4, experts",
        "",
        frozenset(("U8",)),
        {SCALE: ("_weight_scale",), GLOBAL: ("_weight_scale_2",)},
        modelopt_experts,
    ),
    Family("DeepSeek V4", ".weight", FP8 | {"I8"}, {SCALE: (".scale",)}, deepseek_v4),
    Family("gpt-oss", "_blocks", frozenset(("U8",)), {SCALE: ("_scales",)}, gpt_oss, logical=""),
    Family("gpt-oss, OpenAI's", ".blocks", frozenset(("U8",)), {SCALE: (".scales",)}, gpt_oss, logical=""),
    Family("Mistral", ".weight", FP8, {SCALE: (".qscale_weight",)}, plain),
    Family("ComfyUI", ".weight", FP8, {SCALE: (".scale_weight",)}, plain),
    Family("fp8", "", FP8, {SCALE: ("_scale_inv", "_scale", "_weight_scale")}, plain, {ZERO: ("_zero_point",)}),
    Family(
        "int8",
        ".weight",
        frozenset(("I8",)),
        {SCALE: (".weight_scale",)},
        lambda group: group.check_shared(plain(group)),  # with the column factors of modelopt's SmoothQuant
        {ZERO: (".weight_zero_point",), FACTORS: (".pre_quant_scale",)},
    ),
]
