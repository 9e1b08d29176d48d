"""Packed tensors: the meaning of a quantized tensor's codes, and the location of its codes and scales.

Published checkpoints store a quantized weight as several plain tensors. `Packed` describes such a weight as data:
`safeload.packed` derives it from names, shapes and the configuration, and `safeload.engine` dequantizes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import dtypes
from .native import lib

# Layouts of codes (see ``sl_packed`` in csrc/sl_api.h).
ROWS = int(lib.SL_LAYOUT_ROWS)
COLUMNS = int(lib.SL_LAYOUT_COLUMNS)
WORDS = int(lib.SL_LAYOUT_WORDS)
PLANES = int(lib.SL_LAYOUT_PLANES)
BLOCKS = int(lib.SL_LAYOUT_BLOCKS)
MASKED = int(lib.SL_LAYOUT_MASKED)
# A block type only for packed tensors.
I2_S = int(lib.SL_I2_S)

# Roles of the stored tensors.
CODES = "codes"
SCALE = "scale"  # an element per block
GLOBAL = "global"  # an element for the whole tensor, or per expert
ZERO = "zero"
BIAS = "bias"
GROUPS = "groups"  # the group of each column
FACTORS = "factors"  # a factor per column
SHAPE = "shape"  # the logical shape
TABLE = "table"  # the numbers that codes stand for
STATE = "state"  # bitsandbytes: JSON with the logical shape and the block lengths
FORMAT = "format"  # bitsandbytes int8: the order of the codes
NESTED = "nested_scale"  # the scales of the scales, if these are codes themselves
NESTED_TABLE = "nested_table"  # the numbers that such scales stand for
MASK = "mask"  # a bit per value: whether it is stored
OFFSETS = "offsets"  # per row, the number of stored values before it

# The key of the tensor's own name in a mapping of roles to names.
NAME = "name"

# The family of safeload's own int8, which uses stored scales unchanged.
OWN = "safeload"

# The family of ggml blocks with an additional scale, in GGUF files.
GGUF = "GGUF"

# The family of MLX, which stacks experts under its own names.
MLX = "mlx"

# The metadata key in a safetensors file for the quantization of ``config.json`` of its packed tensors.
CONFIG_KEY = "safeload.quantization"
# The key for descriptions of quantized tensors there, see `formats.quantized`.
KEY = "safeload.quantized"

# Rules to derive a block's scale from the stored scale, each with a single rounding to float32.
STORED = "stored"  # the stored scale
INVERSE = "inverse"  # 1 / scale
QUOTIENT = "quotient"  # the stored scale divides the codes
DIVIDED = "divided"  # scale / global
MULTIPLIED = "multiplied"  # scale * global
NESTED_RULE = "nested"  # table[scale] * nested scale + offset: two roundings
MLX_GLOBAL = "mlx"  # scale * (global / 2688); 2688 is 6 * 448, the largest E2M1 times the largest E4M3


class Grid(NamedTuple):
    """The blocks of a matrix that share a scale."""

    row_block: int  # rows per scale
    column_block: int  # columns per scale
    rows: int  # number of scales down a matrix
    columns: int  # number of scales across a matrix
    shared: bool = False  # whether all matrices use the same scales


class Zeros(NamedTuple):
    """The storage of packed zero points: for each scale a code, encoded like a weight's."""

    layout: int  # `COLUMNS`: down the grid of scales; `ROWS`, `WORDS`: along its rows
    bits: int  # per code
    word_codes: int = 0  # for `COLUMNS`, see `Packing`
    added: int = 0  # added to the stored code, modulo 2^bits: GPTQ's first format stores zero - 1
    # Whether all codes can be the middle code, or one less; then the codes themselves determine ``added``.
    symmetric: bool = False
    permuted: bool = False  # for `COLUMNS`: whether the codes of a word are in the order of `WORDS`


class Packing(NamedTuple):
    """The storage of a tensor's codes, and their values: (number - zero) * scale + bias."""

    family: str  # name in `safeload.packed.families`
    label: str  # `QuantizedTensor.scheme`, such as "fp8 128x128" or "int4 g32"
    shape: tuple[int, ...]  # logical
    matrices: int  # number of consecutive matrices of codes
    rows: int  # stored rows of codes per matrix
    columns: int  # stored columns of codes per matrix
    layout: int  # such as `ROWS`
    bits: int  # per code
    # The numbers that codes stand for: the code of an 8-bit dtype, the name of a table in
    # `safeload.engine.codes.restore`, or `TABLE` for the part with that role. For `BLOCKS`, the name of the block
    # type; for `MASKED`, the code of the values' dtype.
    numbers: str
    row_bytes: int  # per stored row; for `MASKED`, 0 unless all rows store equally many values
    word_codes: int = 0  # codes in a 32-bit word with unused upper bits; 0 for a bit stream
    high_first: bool = False  # whether the high bits of a byte hold its first code
    transpose: bool = False  # whether the values are stored as columns by rows
    interleaved: bool = False  # for `PLANES`: whether the planes of a row of bytes are adjacent rows
    grid: Grid | None = None  # of the scales; None for codes without scales
    scale_dtype: str | None = None  # dtype of the scales, if it differs from their tensor's: float8 stored as U8
    scale_rule: str = STORED
    zeros: Zeros | None = None  # packed zero points; None if they are plain numbers or absent
    config: str = ""  # the quantization of ``config.json`` as JSON, to recognize the tensor in another file
    flat: bool = False  # whether the codes are a single row in C order, so that blocks may cross rows of the shape
    factor: float = 1.0  # multiplies each value, with its own rounding
    nested_block: int = 0  # for `NESTED_RULE`: scales per nested scale
    nested_offset: float = 0.0  # for `NESTED_RULE`
    symmetric: bool = False  # whether the zero points must be 0, because the configuration says so


class Part(NamedTuple):
    """A stored tensor that belongs to a packed tensor."""

    name: str  # in the file
    file: Any  # its `WeightFile`
    row: dtypes.Dtype
    shape: tuple[int, ...]
    begin: int  # first byte in the file
    end: int  # one past the last byte


class Packed(NamedTuple):
    """A packed tensor of a file."""

    packing: Packing
    parts: Mapping[str, Part]  # by role

    @property
    def nbytes(self) -> int:
        """Stored size of all parts in bytes."""
        return sum(part.end - part.begin for part in self.parts.values())

    def names(self, own: str) -> dict[str, str]:
        """Return the names of the parts by role, and the tensor's own name under `NAME`."""
        return {NAME: own, **{role: part.name for role, part in self.parts.items()}}


def int8_packing(shape: tuple[int, ...], axis: int | None) -> Packing:
    """Describe safeload's own int8: codes with a single scale, or with a scale for each index along an axis."""
    columns = math.prod(shape[1:]) if axis is None else math.prod(shape[axis + 1 :])
    rows = (shape[0] if shape else 1) if axis is None else shape[axis]
    matrices = 1 if axis is None else math.prod(shape[:axis])
    grid = Grid(max(1, rows), max(1, columns), 1, 1)
    if axis is not None and columns == 1:  # adjacent codes have different scales
        matrices, rows, columns = 1, matrices, rows
        grid = Grid(max(1, rows), 1, 1, columns)
    elif axis is not None:
        grid = Grid(1, max(1, columns), rows, 1, shared=True)
    return Packing(OWN, "int8", shape, matrices, rows, columns, ROWS, 8, "I8", columns, grid=grid)
