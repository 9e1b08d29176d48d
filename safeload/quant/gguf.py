"""GGUF: blocks with an additional scale, which is another tensor or the bytes behind the blocks.

Sources: llama.cpp ``conversion/base.py`` (NVFP4); microsoft/BitNet ``src/ggml-bitnet-mad.cpp`` (I2_S).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from ..core import dtypes, packing, weight_file
from ..core.packing import CODES, SCALE, Grid, Packed, Packing, Part
from .families import Family
from .packed_group import GroupContext, Misfit, PackedGroup, matrices_of, one_scale
from .quantization import GGUF

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
