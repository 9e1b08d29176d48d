"""Families of 1- to 8-bit integers: compressed-tensors, MLX and BitNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..base import packing
from ..base.packing import Grid, Packing, Zeros
from ..base.text import show
from ..engine.codes.zero_points import words_for
from .grid import Misfit, Refused, label_of, whole_grid
from .packed_group import PackedGroup, check_global, configured_grid, configured_group_size
from .quantization import brief, is_length

# ---- compressed-tensors ----


def ct_packed(group: PackedGroup) -> Packing:
    """compressed-tensors, pack-quantized: words of codes, scales per group, row or tensor."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    if len(stored) < 2:
        raise Misfit(f"codes {list(stored)} are not a matrix")
    shape, bits, words = _ct_shape(group)
    rows = shape[-2]
    grid = configured_grid(group, shape) or _ct_grid(shape, scale)
    zeros = _ct_zeros(group, grid, Zeros(packing.COLUMNS, bits, words)) if group.has(packing.ZERO) else None
    if group.has(packing.GROUPS):
        if 1 < grid.row_block < rows:
            raise Misfit("it has a g_idx, but its scales are per block")
        form = group.dtype(packing.GROUPS), group.shape(packing.GROUPS)
        if form != ("I32", shape[-1:]):
            raise Misfit(f"g_idx is {form[0]} {list(form[1])}, expected I32 [{shape[-1]}]")
    label = label_of(f"int{bits}", grid, shape, group.has(packing.ZERO), configured_group_size(group) == shape[-1])
    return group.packing("int", label, shape, bits, "offset", word_codes=words, grid=grid, zeros=zeros)


def _ct_zeros(group: PackedGroup, grid: Grid, packed: Zeros) -> Zeros | None:
    """Return how zero points are packed: down the rows, if per row or group. None if they are plain numbers."""
    if group.dtype(packing.ZERO) != "I32":
        zeros, expected = None, group.shape(packing.SCALE)
    elif grid.row_block == 1:
        zeros, expected = packed, (*group.shape()[:-2], words_for(packed, grid.rows), grid.columns)
    else:
        raise Misfit(f"zero points are packed, but scales {list(group.shape(packing.SCALE))} are not per row")
    if group.shape(packing.ZERO) != expected:
        raise Misfit(f"zero points are {list(group.shape(packing.ZERO))}, expected {list(expected)}")
    return zeros


def _ct_grid(shape: tuple[int, ...], scale: tuple[int, ...]) -> Grid:
    """Return the grid of scales per group, row or tensor if the configuration does not define it."""
    if len(scale) != len(shape) or scale[:-1] != shape[:-1]:
        if math.prod(scale) == 1:
            return Grid(max(1, shape[-2]), max(1, shape[-1]), 1, 1, shared=True)
        raise Misfit(f"scales {list(scale)} do not fit {list(shape)}")
    if not scale[-1] or shape[-1] % scale[-1]:
        raise Misfit(f"rows of {shape[-1]} codes do not divide into {scale[-1]} equal groups")
    return Grid(1, max(1, shape[-1] // scale[-1]), shape[-2], scale[-1])


def _ct_shape(group: PackedGroup) -> tuple[tuple[int, ...], int, int]:
    """Return the logical shape, bits of a code, and codes per word before compressed-tensors 0.17 (since then 0)."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    described = [(weights.get("num_bits"), weights.get("group_size")) for weights in group.weights()] or [(None, None)]
    grouped = math.prod(scale) > 1
    counts = [scale[-1] * size if grouped and is_length(size) else None for _, size in described]
    fits = _ct_fits(stored[-1], counts, described)
    # Read weight_shape only if group sizes do not decide: a checkpoint of experts has 100,000 groups, and reading the
    # weights compares it anyway.
    if group.has(packing.SHAPE) and not (len(fits) == 1 and None not in counts and _is_usual_shape(group)):
        counts = [_ct_columns(group)] * len(described)
        fits = _ct_fits(stored[-1], counts, described)
    elif None in counts:
        raise Misfit("it has no weight_shape, and config.json has no group_size")
    if not fits:
        rows = " or ".join(str(count) for count in sorted({count for count in counts if count is not None}))
        configured = ", ".join(str(bits) for bits, _ in described) if group.weights() else "1 to 8"
        raise Misfit(f"words {list(stored)} do not hold rows of {rows} codes of {configured} bits (config_groups)")
    if len(fits) > 1:
        raise Misfit(f"words {list(stored)} can hold codes of {', '.join(str(bits) for _, bits, _ in fits)} bits")
    count, bits, words = next(iter(fits))
    return (*stored[:-1], count), bits, words


def _is_usual_shape(group: PackedGroup) -> bool:
    """Return True if weight_shape has its usual form beside scales of two or more groups."""
    form = group.dtype(packing.SHAPE), group.shape(packing.SHAPE)
    return form[0] in ("I32", "I64") and form[1] in ((2,), (len(group.shape()),)) and group.shape(packing.SCALE)[-1] > 1


def _ct_columns(group: PackedGroup) -> int:
    """Return the columns in weight_shape."""
    stored, logical = group.shape(), group.integers(packing.SHAPE)
    if (
        not 2 <= len(logical) <= len(stored)
        or min(logical) < 0
        or logical[-2] != stored[-2]
        or (len(logical) == len(stored) and logical[:-1] != stored[:-1])
    ):
        raise Misfit(f"weight_shape {list(logical)} does not fit codes {list(stored)}")
    return logical[-1]


def _ct_fits(
    width: int, counts: Sequence[int | None], described: Sequence[tuple[Any, Any]]
) -> dict[tuple[int, int, int], None]:
    """Return all columns, bits, and codes per word of the old layout (else 0) for rows of ``width`` words."""
    fits: dict[tuple[int, int, int], None] = {}
    for count, (configured, _) in zip(counts, described, strict=True):
        for bits in (configured,) if type(configured) is int and 1 <= configured <= 8 else range(1, 9):
            if count is None:
                continue
            if -(-count * bits // 32) == width:
                fits[count, bits, 0] = None
            elif -(-count // (32 // bits)) == width:
                fits[count, bits, 32 // bits] = None
    return fits


# ---- MLX ----

_MLX_MODES = {
    "mxfp4": (4, 32, "e2m1", "F8_E8M0"),
    "nvfp4": (4, 16, "e2m1", "F8_E4M3"),
    "mxfp8": (8, 32, "F8_E4M3", "F8_E8M0"),
}
# MLX's defaults for affine codes. mlx-lm's mixed recipes leave the group size of each module null.
_MLX_BITS, _MLX_GROUP = 4, 64


def mlx(group: PackedGroup) -> Packing:
    """Words of unsigned codes with a scale and a bias per group of columns, or the mx modes."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    if len(stored) < 2 or len(scale) != len(stored) or scale[:-1] != stored[:-1] or not scale[-1]:
        raise Misfit(f"scales {list(scale)} do not fit codes {list(stored)}")
    settings = {} if group.config is None else group.config.mlx_settings(group.module)
    mode = settings.get("mode")
    if not group.has(packing.BIAS):
        if mode == "affine" or group.dtype(packing.SCALE) != "U8":
            raise Misfit("its biases are missing, which codes with float scales need")
        return _mlx_mode(group, mode if isinstance(mode, str) else "mxfp4")
    if group.shape(packing.BIAS) != scale:
        raise Misfit(f"biases {list(group.shape(packing.BIAS))} do not fit scales {list(scale)}")
    bits, size = settings.get("bits"), settings.get("group_size")
    if group.method == "mlx":
        bits, size = _MLX_BITS if bits is None else bits, _MLX_GROUP if size is None else size
    if bits is not None and (type(bits) is not int or bits not in (1, 2, 3, 4, 5, 6, 8)):
        raise Misfit(f"unknown bits {brief(show(bits))}, expected 1 to 6 or 8 (quantization)")
    if bits is None or not is_length(size):
        fits = [(b, g) for b in (1, 2, 3, 4, 5, 6, 8) for g in (32, 64, 128) if scale[-1] * g * b == stored[-1] * 32]
        if len(fits) > 1 and group.config is None:
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
        packing.MLX,
        f"mlx{bits} g{size}",
        shape,
        bits,
        "U8" if bits == 8 else "unsigned",
        grid=whole_grid(shape, 1, size),
    )


def _mlx_mode(group: PackedGroup, mode: str) -> Packing:
    if mode not in _MLX_MODES:
        modes = ", ".join(("affine", *_MLX_MODES))
        raise Misfit(f"unknown quantization mode {show(mode)}, expected one of {modes}")
    bits, block, numbers, exponents = _MLX_MODES[mode]
    stored, scale = group.shape(), group.shape(packing.SCALE)
    shape = (*stored[:-1], stored[-1] * 32 // bits)
    if group.dtype(packing.SCALE) != "U8" or shape[-1] != scale[-1] * block:
        raise Misfit(f"{group.dtype(packing.SCALE)} scales {list(scale)} do not fit rows of {shape[-1]} in {mode}")
    rule = packing.MLX_GLOBAL if group.has(packing.GLOBAL) else packing.STORED
    packed = group.packing(
        packing.MLX, mode, shape, bits, numbers, grid=whole_grid(shape, 1, block), scale_dtype=exponents
    )
    return (check_global(group, packed) if group.has(packing.GLOBAL) else packed)._replace(scale_rule=rule)


# ---- BitNet ----


def bitnet(group: PackedGroup) -> Packing:
    """Four planes of 2 bits; ``linear_class`` decides if the scale multiplies or divides."""
    stored = group.shape()
    if len(stored) != 2 or math.prod(group.shape(packing.SCALE)) != 1:
        raise Misfit(
            f"codes {list(stored)} and scale {list(group.shape(packing.SCALE))} do not fit: expected a matrix with a "
            "single scale"
        )
    shape = (stored[0] * 4, stored[1])
    grid = Grid(max(1, shape[0]), max(1, shape[1]), 1, 1)
    kind = None if group.config is None else group.config.get("linear_class")
    rule = packing.STORED if kind == "autobitlinear" else packing.INVERSE
    return group.packing(
        "bitnet", "ternary", shape, 2, "ternary", layout=packing.PLANES, grid=grid, scale_rule=rule, row_bytes=stored[1]
    )
