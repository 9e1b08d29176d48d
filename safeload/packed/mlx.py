"""MLX: words of unsigned codes, or the mx modes. Source: mlx ``ops.cpp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base import packing
from ..base.packing import Packing
from ..base.preset import MLX, Preset
from ..base.text import show
from .families import Family
from .grid import Misfit, Refused, whole_grid
from .packed_group import PackedGroup, check_global
from .quantization import brief, is_length

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


def settings(preset: Preset, left: Sequence[str]) -> dict[str, Any]:
    """Return the quantization for ``config.json``, which does not name unquantized modules."""
    mode = preset.name.removeprefix("mlx-") if preset.name.startswith("mlx-") else "affine"
    return {"group_size": preset.group, "bits": preset.bits, "mode": mode}


FAMILIES = [
    Family(
        "MLX",
        ".weight",
        frozenset(("U32",)),
        {packing.SCALE: (".scales",)},
        mlx,
        {packing.BIAS: (".biases", ".qbiases"), packing.GLOBAL: (".global_scale",)},
        engine=MLX,
        settings=settings,
    )
]
