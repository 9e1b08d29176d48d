"""GGUF: tensors whose blocks are scaled once more, by a tensor beside them or by bytes behind them.

Sources: llama.cpp ``conversion/base.py`` (NVFP4); microsoft/BitNet ``src/ggml-bitnet-mad.cpp`` (I2_S).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from ..base import dtypes, packing
from ..base.packing import CODES, SCALE, Grid, Packed, Packing, Part
from .grid import Misfit
from .packed_group import PackedGroup, matrices_of

# The ``quant_method`` of these tensors in a safetensors file, where bytes of blocks are U8.
METHOD = "gguf"
_CONFIG = '{"quantization_config": {"quant_method": "gguf"}}'
_NVFP4, _U8, _F32 = dtypes.BLOCK_TYPES["nvfp4"], dtypes.BY_CODE["U8"], dtypes.BY_CODE["F32"]
_I2_S = dtypes.of_number(packing.I2_S)


def nvfp4(group: PackedGroup) -> Packing:
    """NVFP4 with the scale that its writer divided the scales of its blocks by: one, or one for each expert."""
    return _scaled(group, _NVFP4, "nvfp4", group.dtype() == _NVFP4.code)


def i2_s(group: PackedGroup) -> Packing:
    """I2_S of BitNet in a safetensors file: its blocks, and apart the scale that a GGUF file has behind them."""
    return _scaled(group, _I2_S, "ternary", False)


def _scaled(group: PackedGroup, row: dtypes.Dtype, label: str, blocks: bool) -> Packing:
    """A packing of blocks.

    Args:
        group: the tensors.
        row: the block type.
        label: of the scheme.
        blocks: whether the shape of the codes is logical; else its last axis counts bytes.
    """
    shape, scale = group.shape(), group.shape(SCALE)
    if group.dtype(SCALE) != "F32":
        raise Misfit(f"{group.names[SCALE]} is {group.dtype(SCALE)}, but scales of {label} are F32")
    if not blocks:
        if not shape or shape[-1] % row.block_bytes:
            raise Misfit(f"codes {list(shape)} are not whole blocks of {row.block_bytes} bytes")
        shape = (*shape[:-1], shape[-1] // row.block_bytes * row.block)
    matrices = matrices_of(shape)[0]
    size = math.prod(scale)
    if size != 1 and (len(shape) < 3 or size != matrices):
        raise Misfit(
            f"{group.names[SCALE]} {list(scale)} has neither one scale nor one for each matrix of {list(shape)}"
        )
    return blocks_of(row, label, shape, shared=size == 1)


def blocks_of(row: dtypes.Dtype, label: str, shape: tuple[int, ...], *, shared: bool) -> Packing:
    """The packing of a tensor in blocks, with one scale, or one for each matrix."""
    matrices, rows, columns = matrices_of(shape)
    grid = Grid(max(1, rows), max(1, columns), 1, 1, shared=shared)
    bits, row_bytes = row.block_bytes * 8 // row.block, row.nbytes(columns)
    return Packing(
        packing.GGUF, label, shape, matrices, rows, columns, packing.BLOCKS, bits, row.name, row_bytes,
        grid=grid, config=_CONFIG,
    )  # fmt: skip


def ternary(files: Iterable[Any]) -> Iterator[tuple[str, Packed]]:
    """The tensors of I2_S by name: codes, and behind them the scale of all, which gets a name of its own."""
    for file in files:
        for name, shape in file.table.ternary.items():
            begin, _ = file.table.byte_range(file.table.find(name))
            made = blocks_of(_I2_S, "ternary", shape, shared=True)
            middle = begin + _I2_S.nbytes(math.prod(shape))
            codes = Part(name, file, _U8, (*shape[:-1], made.row_bytes), begin, middle)
            scale = Part(f"{name}_scale", file, _F32, (), middle, middle + _F32.block_bytes)
            yield name, Packed(made, {CODES: codes, SCALE: scale})
