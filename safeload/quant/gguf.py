"""GGUF: blocks with an additional scale, which is another tensor or the bytes behind the blocks.

Sources: llama.cpp ``conversion/base.py`` (NVFP4); microsoft/BitNet ``src/ggml-bitnet-mad.cpp`` (I2_S).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from ..core import dtypes, jobs, packing, weight_file
from ..core.arrays import Array
from ..core.packing import CODES, GLOBAL, SCALE, Grid, Packed, Packing, Part
from ..core.restore import read_part
from ..core.text import error_about
from ..errors import UnsupportedError
from .blocks import BLOCKS, E2M1
from .families import Family
from .packed_group import GroupContext, Misfit, PackedGroup, matrices_of, one_scale, parsed
from .quantization import GGUF, quantization_of

# The configuration of these tensors in a safetensors file, which stores the bytes of blocks as U8.
_CONFIG = f'{{"quantization_config": {{"quant_method": "{GGUF}"}}}}'
_NVFP4, _U8, _F32 = dtypes.BLOCK_TYPES["nvfp4"], dtypes.BY_CODE["U8"], dtypes.BY_CODE["F32"]
_I2_S = dtypes.of_number(packing.I2_S)


def _scaled(group: PackedGroup, row: dtypes.Dtype, label: str) -> Packing:
    """Return the packing of blocks with a scale per tensor or per expert, by which the writer divided the values.

    In a safetensors file the codes are U8, and their last axis counts bytes.
    """
    shape, scale = group.stored, group.scales
    if group.parts[SCALE].row.code != "F32":
        raise Misfit(f"{group.names[SCALE]} is {group.parts[SCALE].row.code}, but scales of {label} must be F32")
    if group.row.code != row.code:
        if not shape or shape[-1] % row.block_bytes:
            raise Misfit(f"codes {list(shape)} are not whole blocks of {row.block_bytes} bytes")
        shape = (*shape[:-1], shape[-1] // row.block_bytes * row.block)
    size = math.prod(scale)
    if size != 1 and (len(shape) < 3 or size != matrices_of(shape)[0]):
        raise Misfit(f"{group.names[SCALE]} {list(scale)} must hold a single scale or one per matrix of {list(shape)}")
    return blocks_of(row, label, shape, shared=size == 1)


def blocks_of(row: dtypes.Dtype, label: str, shape: tuple[int, ...], *, shared: bool) -> Packing:
    """Return the packing of a tensor in blocks, with a scale per matrix or a shared scale."""
    matrices, rows, columns = matrices_of(shape)
    grid = one_scale(shape, shared=shared)
    bits, row_bytes = row.block_bytes * 8 // row.block, row.nbytes(columns)
    return Packing(
        packing.GGUF, label, shape, matrices, rows, columns, packing.BLOCKS, bits, row.name, row_bytes,
        grid=grid, config=_CONFIG,
    )  # fmt: skip


def across_rows(
    context: GroupContext, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[str, Packed]]]:
    """Yield tensors stored as rows of another length if their blocks cross the rows of the original shape."""
    for name, shape in shapes.items():
        row, count = context.tensors[name].row, math.prod(shape)
        part = context.part(name) if shape[-1] % row.block and count else None
        if part is not None:
            grid = Grid(1, row.block, 1, count // row.block)
            kind = blocks_of(row, row.name, (count,), shared=False)
            kind = kind._replace(shape=shape, grid=grid, config="", flat=True)
            codes = part._replace(row=_U8, shape=(*part.shape[:-1], row.nbytes(part.shape[-1])))
            yield name, (name, Packed(kind, {CODES: codes}))


def ternary(files: Iterable[weight_file.WeightFile]) -> Iterator[tuple[str, tuple[str, Packed]]]:
    """Yield the I2_S tensors: codes, and the scale that follows them as a separate part."""
    for file in files:
        for name, shape in file.table.ternary.items():
            begin, _ = file.table.byte_range(file.table.find(name))
            packed = blocks_of(_I2_S, "ternary", shape, shared=True)
            middle = begin + _I2_S.nbytes(math.prod(shape))
            codes = Part(name, file, _U8, (*shape[:-1], packed.row_bytes), begin, middle)
            scale = Part(f"{name}_scale", file, _F32, (), middle, middle + _F32.block_bytes)
            yield name, (name, Packed(packed, {CODES: codes, SCALE: scale}))


# ---- codes of E2M1 in other formats, as blocks of the same codes and scales ----

_BLOCKS = {(each.columns, each.scale): name for name, each in BLOCKS.items() if each.codes == E2M1}
# By the dtype of scales: their rules, and the largest that is a number.
_SCALES: dict[str, tuple[tuple[str, ...], int]] = {
    "F8_E8M0": ((packing.STORED,), 0xFE),
    "F8_E4M3": ((packing.STORED, packing.MULTIPLIED, packing.DIVIDED), 0x7E),
}


def _key_of(packed: Packed) -> tuple[int, str]:
    """Return the columns and the dtype of a scale, if two codes of E2M1 fill each byte of a row."""
    kind, grid = packed.packing, packed.packing.grid
    in_rows = kind.layout == packing.ROWS and kind.numbers == "e2m1" and 2 * kind.row_bytes == kind.columns
    if not in_rows or kind.high_first or kind.flat or grid is None or grid.row_block != 1:
        return 0, ""
    return grid.column_block, kind.scale_dtype or packed.parts[SCALE].row.code


def block_type(packed: Packed) -> str | None:
    """Return the block type that holds the codes and the scales of blocks of a packed tensor unchanged, or None."""
    kind, key = packed.packing, _key_of(packed)
    if key not in _BLOCKS:
        return None
    name, (rules, _) = _BLOCKS[key], _SCALES[key[1]]
    factors = math.prod(packed.parts[GLOBAL].shape) if GLOBAL in packed.parts else 1
    fits = kind.scale_rule in rules and kind.factor == 1 and factors in (1, kind.matrices)
    sides = (kind.columns, kind.rows) if kind.transpose else (kind.rows, kind.columns)
    whole = fits and kind.shape[-2:] == sides and not packed.parts.keys() - {CODES, SCALE, GLOBAL}
    return name if whole and kind.columns % dtypes.BLOCK_TYPES[name].block == 0 else None


def blocks_in(packed: Packed, item: int | None) -> Array:
    """Return a matrix of a packed tensor, or all, as rows of blocks: bytes [..., rows, bytes of a row]."""
    kind, (width, dtype) = packed.packing, _key_of(packed)
    name, (_, largest) = _BLOCKS[width, dtype], _SCALES[dtype]
    count, per_block, half = (kind.matrices if item is None else 1), dtypes.BLOCK_TYPES[name].block // width, width // 2

    def read(role: str, row_bytes: int) -> Array:
        size = kind.rows * row_bytes
        return read_part(packed.parts[role], (item or 0) * size, count * size)

    scales, codes = read(SCALE, kind.columns // width), read(CODES, kind.row_bytes).reshape(-1, half)
    # The sign of a scale of 0 is nothing.
    scales = np.where(scales == 0x80, 0, scales) if name == "nvfp4" else scales
    if (scales > largest).any():
        text = f"has the scale of a block that is negative or no number, which {name} cannot hold: pass dtype="
        raise error_about(UnsupportedError, text, tensor=packed.parts[SCALE].name)
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(-1, width)
    halves = (nibbles[:, :half] | nibbles[:, half:] << 4).reshape(-1, per_block * half)
    blocks = np.concatenate([scales.reshape(-1, per_block), halves], axis=1)
    lead = kind.shape[:-2] if item is None else ()
    return blocks.reshape(*lead, kind.rows, -1)


def tensor_scale(packed: Packed) -> Array:
    """Return the f32 factors of a packed tensor's block scales: one, or one per matrix."""
    part = packed.parts.get(GLOBAL)
    if part is None:
        return np.ones(1, np.float32)
    scale = numbers_in(part)
    with np.errstate(divide="ignore"):
        return np.float32(1) / scale if packed.packing.scale_rule == packing.DIVIDED else scale


def numbers_in(part: Part) -> Array:
    """Return the numbers of a small part as f32."""
    return jobs.native_order(read_part(part).view(dtypes.array_dtype(part.row.number))).astype(np.float32)


def algorithm_of(packed: Packed, name: str) -> object:
    """Return the name that ModelOpt gives the quantization of a tensor, or None."""
    quantization = quantization_of(parsed(packed.packing.config.encode(), name))
    if quantization is None:
        return None
    own = quantization.own(name.removesuffix(".weight")) or {}
    return own.get("quant_algo") or quantization.values.get("quant_algo")


_nvfp4 = partial(_scaled, row=_NVFP4, label="nvfp4")
FAMILIES = [
    Family("GGUF NVFP4", ".weight", frozenset(("U8",)), {SCALE: (".scale",)}, _nvfp4, method=GGUF),
    Family(
        "GGUF I2_S",
        "",
        frozenset(("U8",)),
        {SCALE: ("_scale",)},
        partial(_scaled, row=_I2_S, label="ternary"),
        method=GGUF,
    ),
]
# The rows for GGUF files, in which dtypes name block types.
IN_GGUF = [Family("NVFP4", ".weight", frozenset(("NVFP4",)), {SCALE: (".scale",)}, _nvfp4)]
