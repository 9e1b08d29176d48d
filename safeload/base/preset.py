"""The formats of other engines: a row for each name of ``quantize=`` that writes a folder for an engine.

A row describes the blocks of a matrix, the rounding (csrc/kernels/encode.c) and the stored parts. `packed.families` has
the row that reads the parts, `packed.engines` the engine that loads the folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from . import dtypes, packing
from .native import lib
from .text import show

# Engines.
COMPRESSED, FP8, MLX, BITSANDBYTES = "compressed-tensors", "fp8", "mlx", "bitsandbytes"

# Values of bitsandbytes' codes; source: ``get_4bit_type`` in its functional.py. Those of fp4 are twelfths.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_FP4 = tuple(sign * value / 12 + 0.0 for sign in (1.0, -1.0) for value in _TWELFTHS)


class StoredPart(NamedTuple):
    """A stored tensor of a quantized weight."""

    suffix: str  # after the name of the module
    dtype: str | None  # code; None for the dtype of the weight


class Preset(NamedTuple):
    """A format of an engine."""

    name: str  # in ``quantize=``
    engine: str
    method: int  # SL_ENCODE_*
    bits: int  # per code
    group: int | None  # columns of a block; None for whole rows
    parts: Mapping[str, StoredPart]  # by role
    row_block: int = 1  # rows of a block
    signed: bool = False  # True for codes in two's complement, without an offset
    flat: bool = False  # True if blocks cross rows
    table: tuple[float, ...] = ()  # the values of codes
    sides: int = 1  # both sides of a matrix must be multiples, or it stays unquantized

    def columns(self, shape: tuple[int, ...]) -> int:
        """Return the columns of a block of a matrix."""
        return self.group or max(1, shape[-1])

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix, or of a stack of matrices."""
        if self.flat:
            return (-(-math.prod(shape) // self.columns(shape)),)
        *stack, rows, columns = shape
        return *stack, -(-rows // self.row_block), -(-columns // self.columns(shape))

    def shape_of(self, role: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a part of a matrix; a part of text has none before it is written."""
        if role == packing.CODES and self.flat:
            return -(-math.prod(shape) // 2), 1
        if role == packing.CODES:
            unit = dtypes.BY_CODE[str(self.parts[role].dtype)].bits
            return *shape[:-1], -(-shape[-1] * self.bits // unit)
        if role == packing.ZERO:
            rows, columns = self.grid(shape)
            return -(-rows * self.bits // 32), columns
        fixed = {packing.GLOBAL: (1,), packing.SHAPE: (len(shape),), packing.TABLE: (len(self.table),)}
        return fixed.get(role) or self.grid(shape)


def _parts(codes: str, codes_dtype: str, scale: str, scale_dtype: str | None) -> dict[str, StoredPart]:
    return {packing.CODES: StoredPart(codes, codes_dtype), packing.SCALE: StoredPart(scale, scale_dtype)}


def _words(**more: StoredPart) -> dict[str, StoredPart]:
    parts = _parts(".weight_packed", "I32", ".weight_scale", None)
    return {**parts, **more, packing.SHAPE: StoredPart(".weight_shape", "I64")}


def _compressed(name: str, method: int, bits: int, group: int | None, parts: Mapping[str, StoredPart]) -> Preset:
    return Preset(name, COMPRESSED, method, bits, group, parts)


def _mlx(bits: int, group: int, suffix: str = "") -> Preset:
    parts = {**_parts(".weight", "U32", ".scales", None), packing.BIAS: StoredPart(".biases", None)}
    return Preset(f"mlx{bits}{suffix}", MLX, lib.SL_ENCODE_MLX, bits, group, parts)


def _mlx_mode(mode: str, method: int, bits: int, group: int) -> Preset:
    return Preset(f"mlx-{mode}", MLX, method, bits, group, _parts(".weight", "U32", ".scales", "U8"))


def _bitsandbytes(kind: str, table: tuple[float, ...]) -> Preset:
    parts = {
        **_parts(".weight", "U8", ".weight.absmax", "F32"),
        packing.TABLE: StoredPart(".weight.quant_map", "F32"),
        packing.STATE: StoredPart(f".weight.quant_state.bitsandbytes__{kind}", "U8"),
    }
    return Preset(f"bnb_{kind}", BITSANDBYTES, lib.SL_ENCODE_TABLE, 4, 64, parts, flat=True, table=table)


_FLOAT8 = _parts(".weight", "F8_E4M3", ".weight_scale", None)
_ZERO = StoredPart(".weight_zero_point", "I32")
_NVFP4 = {
    **_parts(".weight_packed", "U8", ".weight_scale", "F8_E4M3"),
    packing.GLOBAL: StoredPart(".weight_global_scale", "F32"),
}
_INVERSE = _parts(".weight", "F8_E4M3", ".weight_scale_inv", "F32")
_MLX_BITS, _MLX_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)

PRESETS = {
    row.name: row
    for row in (
        _compressed("w4a16", lib.SL_ENCODE_INT, 4, 128, _words()),
        _compressed("w4a16_asym", lib.SL_ENCODE_INT_ZERO, 4, 128, _words(zero=_ZERO)),
        _compressed("w8a16", lib.SL_ENCODE_INT, 8, 128, _words()),
        _compressed("w8a8", lib.SL_ENCODE_INT, 8, None, _parts(".weight", "I8", ".weight_scale", None))._replace(
            signed=True
        ),
        _compressed("fp8_dynamic", lib.SL_ENCODE_FP8, 8, None, _FLOAT8),
        _compressed("fp8_block", lib.SL_ENCODE_FP8, 8, 128, _FLOAT8)._replace(row_block=128),
        _compressed("nvfp4a16", lib.SL_ENCODE_NVFP4, 4, 16, _NVFP4),
        _compressed("mxfp4a16", lib.SL_ENCODE_MXFP4, 4, 32, _parts(".weight_packed", "U8", ".weight_scale", "U8")),
        Preset("deepseek_fp8", FP8, lib.SL_ENCODE_FP8_INVERSE, 8, 128, _INVERSE, row_block=128, sides=128),
        *(_mlx(bits, 64) for bits in _MLX_BITS),
        *(_mlx(bits, group, f"-g{group}") for bits in _MLX_BITS for group in _MLX_GROUPS),
        _mlx_mode("mxfp4", lib.SL_ENCODE_MLX_MXFP4, 4, 32),
        _mlx_mode("nvfp4", lib.SL_ENCODE_MLX_NVFP4, 4, 16),
        _mlx_mode("mxfp8", lib.SL_ENCODE_MLX_MXFP8, 8, 32),
        _bitsandbytes("nf4", _NF4),
        _bitsandbytes("fp4", _FP4),
    )
}
# The names for help and messages; MLX's groups of other sizes are variants.
PRESET_NAMES = tuple(name for name in PRESETS if "-g" not in name)


def preset_of(scheme: object) -> Preset | None:
    """Return the preset of this name, in any case, or None."""
    name = scheme.lower() if isinstance(scheme, str) else ""
    base, sign, group = name.partition("-g")
    if name not in PRESETS and sign and base in PRESETS:
        sizes = "groups of 32, 64 or 128" if PRESETS[base].engine == MLX else "no choice of groups"
        raise ValueError(f"unknown scheme {show(scheme)}: {base} has {sizes}, got {show(group)}")
    return PRESETS.get(name)
