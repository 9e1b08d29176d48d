"""Quantized tensors: safeload's schemes, and the meaning and location of the codes and scales of packed tensors.

Published checkpoints store a quantized weight as several plain tensors. `Packed` describes such a weight as data:
`safeload.quant` derives it from names, shapes and the configuration, and `core.restore` dequantizes it.
csrc/kernels/dtype.c describes the block layouts of schemes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from .dtypes import BLOCK_TYPES, BY_CODE, Dtype, is_name
from .native import lib
from .text import nearest_five, show

# Layouts of codes (see ``sl_packed`` in csrc/sl_api.h).
ROWS, COLUMNS, WORDS = map(int, (lib.SL_LAYOUT_ROWS, lib.SL_LAYOUT_COLUMNS, lib.SL_LAYOUT_WORDS))
PLANES, BLOCKS, MASKED = map(int, (lib.SL_LAYOUT_PLANES, lib.SL_LAYOUT_BLOCKS, lib.SL_LAYOUT_MASKED))
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
# The key for descriptions of quantized tensors there, see `described`.
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

    family: str  # name in `safeload.quant.families`
    label: str  # `QuantizedTensor.scheme`, such as "fp8 128x128" or "int4 g32"
    shape: tuple[int, ...]  # logical
    matrices: int  # number of consecutive matrices of codes
    rows: int  # rows of codes per matrix; can differ from ``shape``, if the values are in the same order
    columns: int  # columns of codes per matrix
    layout: int  # such as `ROWS`
    bits: int  # per code
    # The numbers that codes stand for: the code of an 8-bit dtype, the name of a table in
    # `restore`, or `TABLE` for the part with that role. For `BLOCKS`, the name of the block
    # type; for `MASKED`, the code of the values' dtype.
    numbers: str
    row_bytes: int  # per stored row; for `MASKED`, 0 unless all rows store equally many values
    word_codes: int = 0  # codes in a 32-bit word with unused upper bits; 0 for a bit stream
    high_first: bool = False  # whether the high bits of a byte hold its first code; for `PLANES`, the first plane
    transpose: bool = False  # whether the values are stored as columns by rows
    interleaved: bool = False  # for `PLANES`: whether the planes of a row of bytes are adjacent rows
    grid: Grid | None = None  # of the scales; None for codes without scales
    scale_dtype: str | None = None  # dtype of the scales, if it differs from their tensor's: float8 stored as U8
    scale_rule: str = STORED
    zeros: Zeros | None = None  # packed zero points; None if they are plain numbers or absent
    config: str = ""  # the quantization of ``config.json`` as JSON, to recognize the tensor in another file
    flat: bool = False  # whether codes are one row in C order (4 bits without zeros, or blocks): blocks may cross rows
    factor: float = 1.0  # multiplies each value, with its own rounding
    nested_block: int = 0  # for `NESTED_RULE`: scales per nested scale
    nested_offset: float = 0.0  # for `NESTED_RULE`
    symmetric: bool = False  # whether the zero points must be 0, because the configuration says so


class Part(NamedTuple):
    """A stored tensor that belongs to a packed tensor."""

    name: str  # in the file
    file: Any  # its `WeightFile`
    row: Dtype
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


# ---- schemes: a row for each writable scheme, and a dtype for each readable scheme ----


class Scheme(NamedTuple):
    """A quantization scheme."""

    name: str  # in ``quantize=`` and `QuantizedTensor.scheme`
    dtype: Dtype  # of the stored data; blocks include their scales, the scales of int8 are stored separately
    roundings: Mapping[str, int]  # values of ``rounding=`` with their numbers in the C core, the default first
    fallback: str | None = None  # a scheme with smaller blocks, for rows that are not whole blocks
    weighted: bool = False  # True if importance changes the result

    @property
    def block(self) -> int:
        """Elements of a row per scale in the stored bytes; 1 if scales are stored separately."""
        return self.dtype.block

    @property
    def bits(self) -> float:
        """Bits per element, including its share of the block's scales."""
        return 8 * self.dtype.block_bytes / self.dtype.block

    def of_rows(self, length: int) -> str | None:
        """Return this scheme or its fallback for rows of ``length`` elements; None if neither has whole blocks."""
        if length % self.block == 0:
            return self.name
        return None if self.fallback is None else SCHEMES[self.fallback].of_rows(length)

    def target(self, rounding: str | None) -> int:
        """Return the number of a job's target dtype."""
        if rounding is not None and rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {show(rounding)}, expected one of {', '.join(ROUNDINGS)}")
        if not self.roundings:
            return self.dtype.number
        if rounding is not None and rounding not in self.roundings:
            supported = ", ".join(self.roundings)
            raise ValueError(f"scheme {self.name} does not support rounding {show(rounding)}, only {supported}")
        return self.roundings[rounding or next(iter(self.roundings))]


def _blocks(name: str, fallback: str | None = None, *, weighted: bool = True, **roundings: int) -> Scheme:
    return Scheme(name, BLOCK_TYPES[name], roundings, fallback, weighted)


INT8 = "int8"
SCHEMES = {
    row.name: row
    for row in (
        Scheme(INT8, BY_CODE["I8"], {}),
        _blocks("q4_0", absmax=lib.SL_Q4_0_ABSMAX, ggml=lib.SL_Q4_0),
        _blocks(
            "q8_0", weighted=False, absmax=lib.SL_Q8_0, ggml=lib.SL_Q8_0
        ),  # equal: ggml's own scale is absmax / 127
        _blocks("q4_1", ggml=lib.SL_Q4_1),
        _blocks("q5_0", ggml=lib.SL_Q5_0),
        _blocks("q5_1", ggml=lib.SL_Q5_1),
        # The fallbacks are llama.cpp's: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp
        _blocks("q2_k", fallback="q4_0", ggml=lib.SL_Q2_K),
        _blocks("q3_k", fallback="q4_0", ggml=lib.SL_Q3_K),
        _blocks("q4_k", fallback="q5_0", ggml=lib.SL_Q4_K),
        _blocks("q5_k", fallback="q5_1", ggml=lib.SL_Q5_K),
        _blocks("q6_k", fallback="q8_0", ggml=lib.SL_Q6_K),
        _blocks("iq4_nl", ggml=lib.SL_IQ4_NL),
        _blocks("iq4_xs", fallback="iq4_nl", ggml=lib.SL_IQ4_XS),
        _blocks("mxfp4", weighted=False, ggml=lib.SL_MXFP4),
        _blocks("nvfp4", weighted=False, ggml=lib.SL_NVFP4),
        _blocks("tq1_0", fallback="q4_0", weighted=False, ggml=lib.SL_TQ1_0),
        _blocks("tq2_0", fallback="q4_0", weighted=False, ggml=lib.SL_TQ2_0),
    )
}
# The dtypes of all schemes' stored data, including read-only schemes.
_ROWS = {INT8: BY_CODE["I8"], **BLOCK_TYPES}
_LONGEST = 40  # characters of a scheme name
ROUNDINGS = tuple(dict.fromkeys(rounding for row in SCHEMES.values() for rounding in row.roundings))

# The formats for engines, in the order of the presets, and variants with groups of other sizes: MLX's have groups of 64
# by default, formats of integers groups of 128. Named here, because this package imports no family.
EngineFormat: TypeAlias = Literal[
    "w4a16", "w4a16_asym", "w8a16", "w4afp8", "w8a8", "fp8_dynamic", "fp8_block", "nvfp4a16", "mxfp4a16", "mxfp8a16",
    "deepseek_fp8", "awq", "gptq", "gptq_asym", "gptq8", "mlx", "mlx2", "mlx3", "mlx4", "mlx5", "mlx6", "mlx8",
    "mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8", "bnb_nf4", "bnb_fp4", "w4a16-g32", "w4a16-g64", "w4a16-g128",
    "w4a16-channel", "w4a16_asym-g32", "w4a16_asym-g64", "w4a16_asym-g128", "w4a16_asym-channel", "awq-g32", "awq-g64",
    "awq-g128", "awq-channel", "gptq-g32", "gptq-g64", "gptq-g128", "gptq-channel", "gptq_asym-g32", "gptq_asym-g64",
    "gptq_asym-g128", "gptq_asym-channel", "gptq8-g32", "gptq8-g64", "gptq8-g128", "gptq8-channel", "mlx2-g32",
    "mlx2-g64", "mlx2-g128", "mlx3-g32", "mlx3-g64", "mlx3-g128", "mlx4-g32", "mlx4-g64", "mlx4-g128", "mlx5-g32",
    "mlx5-g64", "mlx5-g128", "mlx6-g32", "mlx6-g64", "mlx6-g128", "mlx8-g32", "mlx8-g64", "mlx8-g128",
]  # fmt: skip
_PRESETS = get_args(EngineFormat)
ENGINE_FORMATS = tuple(name for name in _PRESETS if not name.endswith(("-g32", "-g64", "-g128", "-channel")))


def scheme_row(scheme: str) -> Dtype:
    """Return the dtype of a scheme's stored data; the scheme may be read-only."""
    if (row := _ROWS.get(scheme)) is None:
        raise ValueError(f"unknown scheme {show(scheme)}, expected one of {', '.join(_ROWS)}")
    return row


def parse_scheme(scheme: object) -> str:
    """Return the name of a writable scheme in lower case."""
    name = scheme.lower() if isinstance(scheme, str) else ""
    if name in SCHEMES:
        return name
    writable = ", ".join(SCHEMES)
    # llama.cpp calls mixtures of schemes "Q4_K_M"; S, M and L are their sizes.
    of_mixture = name[:-2] if name.endswith(("_s", "_m", "_l")) else name
    if of_mixture in SCHEMES:
        raise ValueError(
            f"scheme {show(scheme)} is a llama.cpp mixture: use {of_mixture!r} for all matrices, or a dict "
            "with a scheme for each name pattern. Mixtures need a whole model that becomes a .gguf file: a GGUF file, "
            "or a folder with its config.json"
        )
    if (row := _ROWS.get(name) or _ROWS.get(of_mixture)) is not None:
        read_only = f"scheme {show(scheme)}: {row.code} can only be read; writable schemes are {writable}"
        engines = [near for near in ENGINE_FORMATS if name in near]
        raise ValueError(f"{read_only}; for a whole model {' and '.join(engines)}" if engines else read_only)
    if name in _PRESETS:
        raise ValueError(f"scheme {show(scheme)} is for whole models: use convert or load_quantized")
    dtype = f"dtype={scheme!r}".replace("'", '"')
    if is_name(name) and not _FP8.fullmatch(name):
        raise ValueError(f"unknown scheme {show(scheme)}: it is a dtype; pass it as {dtype}")
    near = list(map(repr, near_schemes(name)))
    casts = f". {dtype} casts without scales" if is_name(name) else ""
    raise ValueError(
        f"unknown scheme {show(scheme)}: did you mean {', '.join(near[:-1])} or {near[-1]}? "
        f"`safeload convert --help` lists all schemes{casts}"
    )


# Common quantization names, and the schemes they can mean.
_MEANT = {
    name: schemes
    for names, schemes in {
        "int4 4bit 4-bit uint4 i4 w4 q4 load_in_4bit": ("w4a16", "q4_0", "q4_k", "mlx4", "bnb_nf4"),
        "int8 8bit 8-bit i8 w8 q8 llm.int8 load_in_8bit": (INT8, "w8a8", "w8a16", "q8_0", "mlx8"),
        "fp4 f4 float4 float4_e2m1fn": ("bnb_fp4", "mxfp4a16", "nvfp4a16", "mlx-mxfp4", "mlx-nvfp4"),
        "fp8": ("fp8_dynamic", "fp8_block", "deepseek_fp8", "mlx-mxfp8", "w8a8"),
        "gguf": ("q4_k", "q8_0", "q6_k", "q5_k", "q4_0"),
    }.items()
    for name in names.split()
}
_LIKE_SCHEMES = re.compile(r"(?:i?q|tq|w)[0-9].*|(?:mlx|bnb|nvfp|mxfp|nf)[_-]?[0-9].*|fp4", re.ASCII)
_FP8 = re.compile(r"(?:torch\.)?(?:float|fp|f)8.*|e4m3.*|e5m2.*", re.ASCII)


def near_schemes(text: str) -> list[str]:
    """Return the five scheme and engine format names nearest to a text in lower case."""
    meant = _MEANT.get("fp8" if _FP8.fullmatch(text) else text)
    mixtures = (f"q{bits}_k_{size}" for bits in "345" for size in "ms")
    return nearest_five(text, (*SCHEMES, *mixtures, *ENGINE_FORMATS)) if meant is None else [*meant]


def advice_for(dtype: object) -> str | None:
    """Return the advice for a dtype named like a quantization, or None."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
    name = text.lower()[:_LONGEST].removeprefix("torch.")
    if name in _ROWS or name in _MEANT or _LIKE_SCHEMES.fullmatch(name) or name in _PRESETS:
        written = name in SCHEMES or name in _PRESETS or name.rpartition("_")[0] in SCHEMES
        scheme = name if written else near_schemes(name)[0]
        return f'see safeload.load_quantized, or pass quantize="{scheme}" to safeload.convert'
    return None


def usual_axis(scheme: str, shape: tuple[int, ...]) -> int | None:
    """Return the default axis of per-axis scales: int8 with 3 axes has a scale for each matrix."""
    return 0 if scheme == INT8 and len(shape) == 3 else None
