"""Packed tensors: what the codes of a quantized tensor mean, and where they and their scales are stored.

Published checkpoints store a quantized weight as several plain tensors. `Packed` describes one of them as data:
`safeload.packed` makes it from names, shapes and the configuration, `safeload.engine` dequantizes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import dtypes
from .native import lib

# Layouts of codes, see ``sl_packed`` in csrc/sl_api.h.
ROWS = int(lib.SL_LAYOUT_ROWS)
COLUMNS = int(lib.SL_LAYOUT_COLUMNS)
WORDS = int(lib.SL_LAYOUT_WORDS)
PLANES = int(lib.SL_LAYOUT_PLANES)
BLOCKS = int(lib.SL_LAYOUT_BLOCKS)
MASKED = int(lib.SL_LAYOUT_MASKED)
# The block type that only a packed tensor has.
I2_S = int(lib.SL_I2_S)

# Roles of stored tensors in a packed one.
CODES = "codes"
SCALE = "scale"  # an element for each block
GLOBAL = "global"  # one for the whole tensor, or for each expert
ZERO = "zero"
BIAS = "bias"
GROUPS = "groups"  # the group of each column
FACTORS = "factors"  # one for each column
SHAPE = "shape"  # the logical shape
TABLE = "table"  # the numbers that codes stand for
STATE = "state"  # of bitsandbytes: JSON with the logical shape and the lengths of blocks
FORMAT = "format"  # of bitsandbytes' int8: the order of the codes
NESTED = "nested_scale"  # where the scales are codes themselves: their scales
NESTED_TABLE = "nested_table"  # and the numbers that they stand for
MASK = "mask"  # a bit for each value: whether it is stored
OFFSETS = "offsets"  # of each row the number of values that are stored before it

# In a mapping of roles to names: the tensor's own.
NAME = "name"

# The family of our own int8, whose scales are taken as they are.
OWN = "safeload"

# The family of blocks of ggml with one more scale, which GGUF files hold.
GGUF = "GGUF"

# The family of MLX, which stacks experts under names of its own.
MLX = "mlx"

# The key of a safetensors file's metadata that holds the quantization of the ``config.json`` of its packed tensors.
CONFIG_KEY = "safeload.quantization"

# How the scale of a block is made of the stored one, each a single rounding to float32.
STORED = "stored"  # as it is
INVERSE = "inverse"  # 1 / scale
QUOTIENT = "quotient"  # as it is, and it divides the codes
DIVIDED = "divided"  # scale / global
MULTIPLIED = "multiplied"  # scale * global
NESTED_RULE = "nested"  # table[scale] * nested scale, plus an offset: two roundings
MLX_GLOBAL = "mlx"  # scale * (global / 2688), which is 6 * 448: the largest E2M1 and E4M3


class Grid(NamedTuple):
    """Which elements of a matrix share a scale.

    Attributes:
        row_block: rows that share one.
        column_block: columns that share one.
        rows: number of scales down a matrix.
        columns: number of scales across it.
        shared: whether all matrices have the same scales.
    """

    row_block: int
    column_block: int
    rows: int
    columns: int
    shared: bool = False


class Zeros(NamedTuple):
    """How packed zero points are stored: a code for each scale, which stands for the number that a weight's code does.

    Attributes:
        layout: `COLUMNS`: they run down the grid of scales; `ROWS`, `WORDS`: along its rows.
        bits: of a code.
        word_codes: as in `Packing`, of `COLUMNS`.
        added: what is added to the stored code, modulo 2^bits: the first format of GPTQ stores zero - 1.
        symmetric: whether all codes may be the one in the middle, or that less one: they then say themselves what is
            added, whatever ``added`` is.
        permuted: of `COLUMNS`: whether the codes of a word are in the order of `WORDS`.
    """

    layout: int
    bits: int
    word_codes: int = 0
    added: int = 0
    symmetric: bool = False
    permuted: bool = False


class Packing(NamedTuple):
    """How the codes of a tensor are stored, and what numbers they stand for: (number - zero) * scale + bias.

    Attributes:
        family: name of the family in `safeload.packed.families`.
        label: as in `QuantizedTensor.scheme`: "fp8 128x128", "int4 g32".
        shape: logical shape.
        matrices: the codes are this many matrices, one after the other.
        rows: rows of codes of each, as they are stored.
        columns: columns of codes of each.
        layout: `ROWS` and the like.
        bits: of a code.
        numbers: what a code stands for: the code of a dtype with 8 bits, the name of a table in
            `safeload.engine.codes.code_tables`, or `TABLE` for the part of that role; of `BLOCKS`
            the name of the block type; of `MASKED` the code of the dtype of the values.
        row_bytes: bytes of a stored row; of `MASKED` 0 unless all rows store as many values.
        word_codes: codes in a 32-bit word whose upper bits are unused; 0 for a bit stream.
        high_first: whether the first code of a byte is in its high bits.
        transpose: whether the values are stored as columns by rows.
        interleaved: of `PLANES`: whether the planes of a row of bytes are rows next to each other.
        grid: of the scales; None for codes without.
        scale_dtype: dtype of the stored scales, if it is not that of their tensor: bits of a float8 stored as U8.
        scale_rule: `STORED` and the like.
        zeros: packed zero points; None: they are stored as plain numbers, or there are none.
        config: the quantization of ``config.json`` as JSON, to find the tensor again in a file of its own.
        flat: whether the codes are one row in the C order of the shape, in which a block may cross rows of the shape.
        factor: multiplies each value, rounded by itself; 1 for none.
        nested_block: of `NESTED_RULE`: scales that share a nested scale.
        nested_offset: of `NESTED_RULE`: the offset.
        symmetric: whether the zero points must be 0, because the configuration says so.
    """

    family: str
    label: str
    shape: tuple[int, ...]
    matrices: int
    rows: int
    columns: int
    layout: int
    bits: int
    numbers: str
    row_bytes: int
    word_codes: int = 0
    high_first: bool = False
    transpose: bool = False
    interleaved: bool = False
    grid: Grid | None = None
    scale_dtype: str | None = None
    scale_rule: str = STORED
    zeros: Zeros | None = None
    config: str = ""
    flat: bool = False
    factor: float = 1.0
    nested_block: int = 0
    nested_offset: float = 0.0
    symmetric: bool = False


class Part(NamedTuple):
    """A stored tensor that belongs to a packed one.

    Attributes:
        name: its name in the file.
        file: the `WeightFile` that holds it.
        row: row of the dtype table.
        shape: its shape.
        begin: first byte in the file.
        end: one past the last byte.
    """

    name: str
    file: Any
    row: dtypes.Dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Packed(NamedTuple):
    """A packed tensor of a file.

    Attributes:
        packing: what its codes mean.
        parts: the stored tensors by role.
    """

    packing: Packing
    parts: Mapping[str, Part]

    @property
    def nbytes(self) -> int:
        """Stored bytes of all parts."""
        return sum(part.end - part.begin for part in self.parts.values())

    def names(self, own: str) -> dict[str, str]:
        """Names of the parts by role, and the tensor's own under `NAME`."""
        return {NAME: own, **{role: part.name for role, part in self.parts.items()}}


def by_columns(packed: Packing) -> bool:
    """Whether rows of the values are columns of the codes, each of which can be dequantized without the others."""
    return packed.layout == COLUMNS or (packed.layout == WORDS and packed.transpose)


def row_unit(packed: Packing) -> int:
    """Rows that are dequantized together: those of a block of scales; columns that share a word of codes."""
    if packed.layout == WORDS and packed.transpose:
        return 32 // packed.bits
    return 1 if packed.grid is None or by_columns(packed) or packed.grid.rows == 1 else packed.grid.row_block


def int8_packing(shape: tuple[int, ...], axis: int | None) -> Packing:
    """Our own int8: codes of a tensor of this shape, with one scale or one for each index along an axis."""
    columns = math.prod(shape[1:]) if axis is None else math.prod(shape[axis + 1 :])
    rows = (shape[0] if shape else 1) if axis is None else shape[axis]
    matrices = 1 if axis is None else math.prod(shape[:axis])
    grid = Grid(max(1, rows), max(1, columns), 1, 1)
    if axis is not None and columns == 1:  # adjacent codes have scales of their own
        matrices, rows, columns = 1, matrices, rows
        grid = Grid(max(1, rows), 1, 1, columns)
    elif axis is not None:
        grid = Grid(1, max(1, columns), rows, 1, shared=True)
    return Packing(OWN, "int8", shape, matrices, rows, columns, ROWS, 8, "I8", columns, grid=grid)
