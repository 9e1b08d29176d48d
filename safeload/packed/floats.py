"""Families of 4-, 6- and 8-bit floats and plain int8: a number per code, a scale per block."""

from __future__ import annotations

import math

from ..base import packing
from ..base.packing import Grid, Packing
from ..base.text import show
from .families import FP8
from .grid import Misfit, Refused, grid_of, has_halves, label_of, matrices_of, whole_grid
from .methods import AUTO_ROUND
from .packed_group import NUMBERS, PackedGroup, check_global, configured_bits, configured_grid, configured_group_size
from .quantization import brief, is_length

# ---- fp8 and int8 ----


def plain(group: PackedGroup, block: tuple[int, int] | None = None) -> Packing:
    """8-bit codes, and scales broadcast over blocks."""
    shape, numbers = group.shape(), group.dtype()
    scale = group.shape(packing.SCALE)
    matrices, rows, columns = matrices_of(shape)
    grid = configured_grid(group, shape) or _flat_grid(group)
    if grid is None:
        exact = block is not None or (group.config is not None and group.config.has_block)
        block = block or _block_of(group)
        if has_halves(shape, scale, block):
            matrices, rows, scale = 2 * matrices, rows // 2, (2 * scale[0], scale[1] // 2, scale[2])
        grid = grid_of((matrices, rows, columns) if len(shape) > 2 else shape, scale, block, exact=exact)
    prefix = "fp8" if numbers in FP8 else "int8"
    zeros = group.has(packing.ZERO)
    if zeros and group.shape(packing.ZERO) != group.shape(packing.SCALE):
        raise Misfit(
            f"zero points {list(group.shape(packing.ZERO))} do not fit scales {list(group.shape(packing.SCALE))}"
        )
    exponents = group.dtype(packing.SCALE) in ("F8_E8M0", "U8")
    label = label_of(prefix, grid, shape, zeros)
    bits = configured_bits(group) if prefix == "int8" else None
    if bits is not None:  # naive-quantized: a byte per code, even for codes of fewer bits
        label = label.replace("int8", f"int{bits}", 1)
    if exponents and (grid.row_block, grid.column_block) == (1, 32):
        label = "mxfp8"
    return group.packing(
        "fp8" if numbers in FP8 else "int8",
        label,
        shape,
        8,
        numbers,
        matrices=matrices,
        rows=rows,
        grid=grid,
        scale_dtype=group.scale_dtype("F8_E8M0"),
        scale_rule=_rule_of(group),
    )


def _flat_grid(group: PackedGroup) -> Grid | None:
    """Return the grid of fp8 in groups by auto-round, which stores the scales of all rows in one list; else None."""
    shape, scale = group.shape(), group.shape(packing.SCALE)
    size = group.settings().get("group_size") if group.method in AUTO_ROUND else None
    if len(shape) != 2 or len(scale) != 1 or not is_length(size) or shape[1] % size or size >= shape[1]:
        return None
    grid = whole_grid(shape, 1, size)
    return grid if scale[0] == grid.rows * grid.columns else None


def _rule_of(group: PackedGroup) -> str:
    """Return the rule of the scales: they multiply, or divide in GPTQModel's fp8."""
    if group.method != "fp8" or group.settings().get("weight_scale_semantics") is None:
        return packing.STORED
    if group.has(packing.ZERO) or not group.names[packing.SCALE].endswith("_scale_inv"):
        raise Refused("its weight_scale_semantics apply only to a weight_scale_inv without zero points")
    return packing.QUOTIENT


def smoothed(group: PackedGroup) -> Packing:
    """int8 with the column factors of modelopt's SmoothQuant."""
    packed = plain(group)
    if group.has(packing.FACTORS) and group.shape(packing.FACTORS) != (packed.columns,):
        raise Misfit(f"pre_quant_scale {list(group.shape(packing.FACTORS))} does not fit rows of {packed.columns}")
    return packed


def _block_of(group: PackedGroup) -> tuple[int, int]:
    """Return the configured rows and columns of a block of scales."""
    if group.config is None:
        return 128, 128
    scale, codes = group.shape(packing.SCALE), group.shape()
    grouped = len(scale) == len(codes) > 1 and scale[:-1] == codes[:-1]
    size = configured_group_size(group)
    if grouped and size is not None and scale[-1] > 1:
        raise Misfit(f"scales {list(scale)} do not fit codes {list(codes)} in groups of {size} (group_size)")
    exponents = group.dtype(packing.SCALE) in ("F8_E8M0", "U8")
    in_groups = grouped and scale[-1] * 32 == codes[-1] and (exponents or not group.config.has_block)
    if group.method == "mxfp8" or in_groups:
        return 1, 32
    return group.config.block((128, 128))


def deepseek_v4(group: PackedGroup) -> Packing:
    """``X.scale`` beside ``X.weight``: fp8 in blocks, or two E2M1 codes per byte with a scale per 32 codes."""
    shape, scale = group.shape(), group.shape(packing.SCALE)
    if len(shape) < 2 or len(scale) != len(shape) or group.dtype(packing.SCALE) not in ("F8_E8M0", "U8", "F32"):
        raise Misfit("its scale is not the scale of a weight")
    if group.dtype() == "I8":
        return _fp4(group, "mxfp4", 32, "F8_E8M0")
    return plain(group)


# ---- 4-bit rows: E2M1 ----


def _fp4(group: PackedGroup, label: str, block: int, exponents: str, numbers: str = "e2m1") -> Packing:
    """Two 4-bit codes per byte, the first in the low bits, and a scale per ``block`` codes."""
    stored = group.shape()
    if len(stored) < 2:
        raise Misfit(f"codes {list(stored)} are not a matrix")
    if group.dtype(packing.SCALE) not in ("U8", exponents) and not (label == "mxfp4" and group.dtype() == "I8"):
        raise Misfit(f"scales of {label} must be {exponents}, got {group.dtype(packing.SCALE)}")
    shape = (*stored[:-1], stored[-1] * 2)
    sizes = [weights["group_size"] for weights in group.weights() if weights.get("group_size") is not None]
    if sizes and block not in sizes:
        raise Misfit(f"{label} has groups of {block}, but group_size is {brief(show(sizes[0]))} (config_groups)")
    if group.shape(packing.SCALE) != (*shape[:-1], -(-shape[-1] // block)) or shape[-1] % block:
        raise Misfit(f"scales {list(group.shape(packing.SCALE))} do not fit rows of {shape[-1]} in blocks of {block}")
    grid = whole_grid(shape, 1, block)
    return group.packing("fp4", label, shape, 4, numbers, grid=grid, scale_dtype=group.scale_dtype(exponents))


def modelopt_nvfp4(group: PackedGroup) -> Packing:
    """NVFP4 with a multiplying global scale and the factors of AWQ."""
    algorithm = None if group.config is None else group.config.algorithm(group.module)
    if algorithm is not None and algorithm.upper().startswith("W4A") and algorithm.upper() != "W4A16_NVFP4":
        raise Refused(f"its quant_algo {algorithm} stores unsupported codes or scales")
    if group.has_beside(".svdquant_lora_a") or group.has_beside(".svdquant_lora_b"):
        raise Refused("NVFP4_SVD adds a product of two matrices, which safeload does not compute")
    packed = check_global(group, _fp4(group, "nvfp4", 16, "F8_E4M3"))
    if group.has(packing.FACTORS) and group.shape(packing.FACTORS) != (packed.columns,):
        raise Misfit(f"pre_quant_scale {list(group.shape(packing.FACTORS))} does not fit rows of {packed.columns}")
    return packed._replace(scale_rule=packing.MULTIPLIED)


def modelopt_experts(group: PackedGroup) -> Packing:
    """Experts in a single tensor; Llama 4 stores them as [in, out], packed along ``in``."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    if len(stored) != 3 or len(scale) != 3 or scale[-1] != stored[-1] or scale[-2] * 8 != stored[-2]:
        return modelopt_nvfp4(group)
    if group.dtype(packing.SCALE) != "F8_E4M3":
        raise Misfit(f"scales of nvfp4 must be F8_E4M3, got {group.dtype(packing.SCALE)}")
    shape = (stored[0], stored[1] * 2, stored[2])
    packed = group.packing(
        "fp4", "nvfp4", shape, 4, "e2m1", layout=packing.PLANES, interleaved=True, grid=whole_grid(shape, 16, 1)
    )
    return check_global(group, packed)._replace(scale_rule=packing.MULTIPLIED)


def ct_fp4(group: PackedGroup) -> Packing:
    """compressed-tensors: NVFP4 with or without a dividing global scale; MXFP4; MXFP6 with 4 codes in 3 bytes.

    auto-round uses the same names; its ``data_type`` mx_int means other numbers.
    """
    packed = _ct_small_floats(group)
    configured_grid(group, packed.shape)  # raises if the configured groups have another size
    return packed


def _ct_small_floats(group: PackedGroup) -> Packing:
    kind = group.settings().get("data_type") if group.method in AUTO_ROUND else None
    if isinstance(kind, str) and kind.startswith("mx_int"):
        return _fp4(group, "mxint4", 32, "F8_E8M0", "mxint4")
    if group.has(packing.GLOBAL):
        return check_global(group, _fp4(group, "nvfp4", 16, _scale_of_nvfp4(group)))._replace(
            scale_rule=packing.DIVIDED
        )
    if group.dtype(packing.SCALE) not in ("U8", "F8_E8M0"):
        if {weights.get("strategy") for weights in group.weights()} != {"group"}:  # NVFP4 has a global scale
            raise Misfit(f"scales of MXFP4 and MXFP6 must be F8_E8M0 or U8, got {group.dtype(packing.SCALE)}")
        return _fp4(group, "fp4 g16", 16, _scale_of_nvfp4(group))
    stored, scale = group.shape(), group.shape(packing.SCALE)
    if stored and scale and scale[:-1] == stored[:-1] and scale[-1] * 24 == stored[-1]:
        shape = (*stored[:-1], stored[-1] // 3 * 4)
        grid = whole_grid(shape, 1, 32)
        return group.packing("fp6", "mxfp6", shape, 6, "e2m3", grid=grid, scale_dtype=group.scale_dtype("F8_E8M0"))
    return _fp4(group, "mxfp4", 32, "F8_E8M0")


def _scale_of_nvfp4(group: PackedGroup) -> str:
    """Return the dtype of scales of 16 codes: F8_E4M3, or by ``scale_dtype`` another float."""
    dtype = group.dtype(packing.SCALE)
    return dtype if dtype in NUMBERS else "F8_E4M3"


def gpt_oss(group: PackedGroup) -> Packing:
    """16-byte blocks on their own axis; transformers' parameter is transposed, OpenAI's is not."""
    stored = group.shape()
    if len(stored) < 3 or stored[-1] != 16 or group.shape(packing.SCALE) != stored[:-1]:
        raise Misfit(
            f"blocks {list(stored)} and scales {list(group.shape(packing.SCALE))} do not fit: blocks must have 16 bytes"
        )
    if group.dtype(packing.SCALE) not in ("U8", "F8_E8M0"):
        raise Misfit(f"scales of mxfp4 must be F8_E8M0, got {group.dtype(packing.SCALE)}")
    rows, columns = stored[-3], stored[-2] * 32
    matrices = math.prod(stored[:-3])
    transpose = group.codes.endswith("_blocks")
    shape = (*stored[:-3], columns, rows) if transpose else (*stored[:-3], rows, columns)
    grid = Grid(1, 32, rows, stored[-2])
    scales = group.scale_dtype("F8_E8M0")
    return group.packing("fp4", "mxfp4", shape, 4, "e2m1", grid=grid, scale_dtype=scales)._replace(
        matrices=matrices, rows=rows, columns=columns, row_bytes=columns // 2, transpose=transpose
    )
