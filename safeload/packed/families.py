"""The supported families of packed tensors, one row each.

A row says which stored tensors belong together, by the suffixes of their names, and names the function that turns their
shapes and dtypes into a `Packing`, or explains why they do not fit. Shapes decide; the configuration should confirm.
`codes_without_scale` uses the same suffixes to recognize codes of unsupported formats; `companions` lists other names.

Sources: `DeepSeek-V3 README_WEIGHTS.md`; transformers ``integrations/{finegrained_fp8,mxfp4,bitnet}.py``;
bitsandbytes ``functional.py``; compressed-tensors ``compressors/``; nvidia-modelopt ``torch/quantization/qtensor``;
mlx ``ops.cpp``; see also `gptq` and `quark`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..base import dtypes, packing
from .methods import GGUF, QUARK

FP8 = frozenset(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))


class Stored(NamedTuple):
    """A tensor as a file stores it."""

    row: dtypes.Dtype
    shape: tuple[int, ...]  # logical shape


class Family(NamedTuple):
    """A family of packed tensors."""

    name: str
    main: str  # suffix of the name of the codes
    logical: str  # replaces ``main`` in the name of the packed tensor
    dtypes: frozenset[str]  # codes of the dtypes of the codes
    describe: str  # "module.function": returns the packing of a group, or raises `Misfit`
    required: Mapping[str, tuple[str, ...]]  # suffixes of the parts in place of ``main``, preferred first
    optional: Mapping[str, tuple[str, ...]] = {}  # suffixes of parts that can be absent
    # required ``quant_method`` of the configuration; if set, only this row and fp8 apply to its codes
    method: str | None = None
    private: bool = False  # True if the names of parameters begin with "_" in the file: X._weight_qdata is X.weight


# ---- suffixes ----

# bitsandbytes: the JSON beside 4-bit codes, by kind, and the other parts, by role.
STATES = {kind: f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
STATE_PARTS = {
    packing.SCALE: ".absmax",
    packing.TABLE: ".quant_map",
    packing.NESTED: ".nested_absmax",
    packing.NESTED_TABLE: ".nested_quant_map",
}
# GPTQModel's suffixes of the JSON and of the other parts.
GPTQMODEL_STATE = "_quant_state"
GPTQMODEL_PARTS = {role: f"_{suffix[1:]}" for role, suffix in STATE_PARTS.items()}
# Storage dtypes of 4-bit codes: `bnb_4bit_quant_storage`.
_STORAGE = frozenset(("U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64"))

# Quark: scales and zero points of checkpoints for transformers, then for diffusers.
_QUARK_SCALE = ("_scale", "_quantizer.scale", "_quantizer.0.scale")
_QUARK_SECOND_SCALE = ("_scale_2", "_quantizer.1.scale")
_QUARK_ZERO = ("_zero_point", "_quantizer.zero_point")
_QUARK_SECOND_ZERO = ("_zero_point_2", "_quantizer.1.zero_point")

# compressed-tensors' sparse tensors: values, a mask of their positions, and more. One-byte values are codes.
SPARSE = ".compressed"
SPARSE_NUMBERS = frozenset(("F32", "F16", "BF16"))
_SPARSE_CODES = FP8 | {"I8"}
# Suffixes of the other parts, the most telling first.
SPARSE_PARTS = (".bitmask", ".row_offsets", ".shape")
# Part of the name between the module and these suffixes. Early versions name the tensor, which can be a bias.
SPARSE_STEMS = (".weight", ".bias", "")

_INTEGERS = frozenset(("U8", "I8"))


def _sparse(stem: str) -> Family:
    return Family(
        "compressed-tensors, sparse",
        stem + SPARSE,
        stem or ".weight",
        SPARSE_NUMBERS | _SPARSE_CODES,
        "sparse.bitmask",
        {packing.MASK: (stem + ".bitmask",), packing.SHAPE: (stem + ".shape",)},
        {
            packing.OFFSETS: (stem + ".row_offsets",),
            packing.SCALE: (".weight_scale",),
            packing.ZERO: (".weight_zero_point",),
        },
    )


def _scale(suffix: str) -> Mapping[str, tuple[str, ...]]:
    return {packing.SCALE: (suffix,)}


# ---- the table ----

FAMILIES = (
    Family(
        "Quark, int4 in fp8",
        "",
        "",
        frozenset(("I32",)),
        "quark.in_fp8",
        {packing.SCALE: _QUARK_SECOND_SCALE, packing.FACTORS: _QUARK_SCALE},
        {packing.ZERO: _QUARK_SECOND_ZERO},
        QUARK,
    ),
    Family(
        "Quark",
        "",
        "",
        FP8 | {"I8", "U8", "I32"},
        "quark.describe",
        {packing.SCALE: _QUARK_SCALE},
        {packing.ZERO: _QUARK_ZERO, packing.GLOBAL: _QUARK_SECOND_SCALE},
        QUARK,
    ),
    Family("DeepSeek V4", ".weight", ".weight", FP8 | {"I8"}, "floats.deepseek_v4", _scale(".scale")),
    Family(
        "modelopt NVFP4",
        ".weight",
        ".weight",
        frozenset(("U8",)),
        "floats.modelopt_nvfp4",
        {packing.SCALE: (".weight_scale",), packing.GLOBAL: (".weight_scale_2",)},
        {packing.FACTORS: (".pre_quant_scale",)},
    ),
    Family(
        "modelopt NVFP4, experts",
        "",
        "",
        frozenset(("U8",)),
        "floats.modelopt_experts",
        {packing.SCALE: ("_weight_scale",), packing.GLOBAL: ("_weight_scale_2",)},
    ),
    Family(
        "BitNet",
        ".weight",
        ".weight",
        frozenset(("U8",)),
        "integers.bitnet",
        _scale(".weight_scale"),
        method="bitnet",
    ),
    Family("Gemma", ".weight", ".weight", _INTEGERS, "gemma.gemma", _scale(".weight_scale"), method="gemma"),
    Family(
        "Gemma, embeddings",
        ".embedding_quantized",
        ".weight",
        _INTEGERS,
        "gemma.gemma",
        _scale(".embedding_scale"),
        method="gemma",
    ),
    Family(
        "bitsandbytes, 4 bits",
        "",
        "",
        _STORAGE,
        "bitsandbytes.four_bits",
        {packing.STATE: (*STATES.values(), GPTQMODEL_STATE)},
        {role: (suffix, GPTQMODEL_PARTS[role]) for role, suffix in STATE_PARTS.items()},
    ),
    Family(
        "bitsandbytes, 8 bits",
        ".weight",
        ".weight",
        frozenset(("I8",)),
        "bitsandbytes.eight_bits",
        {packing.SCALE: (".SCB", ".weight_scb")},
        {packing.FORMAT: (".weight_format",)},
    ),
    Family(
        "MLX",
        ".weight",
        ".weight",
        frozenset(("U32",)),
        "integers.mlx",
        _scale(".scales"),
        {packing.BIAS: (".biases", ".qbiases"), packing.GLOBAL: (".global_scale",)},
    ),
    Family(
        "compressed-tensors",
        "_packed",
        "",
        frozenset(("I32",)),
        "integers.ct_packed",
        _scale("_scale"),
        {packing.ZERO: ("_zero_point",), packing.GROUPS: ("_g_idx",), packing.SHAPE: ("_shape",)},
    ),
    Family(
        "compressed-tensors fp4",
        "_packed",
        "",
        frozenset(("U8",)),
        "floats.ct_fp4",
        _scale("_scale"),
        {packing.GLOBAL: ("_global_scale",)},
    ),
    Family(
        "GPTQ, auto-round, AWQ",
        ".qweight",
        ".weight",
        frozenset(("I8", "I16", "I32")),
        "gptq.describe",
        {packing.SCALE: (".scales", ".qscales")},  # transformers 5.6 and later save Quark's with an extra q
        {packing.ZERO: (".qzeros", ".qqzeros"), packing.GROUPS: (".g_idx",)},
    ),
    *(_sparse(stem) for stem in SPARSE_STEMS),
    Family("gpt-oss", "_blocks", "", frozenset(("U8",)), "floats.gpt_oss", _scale("_scales")),
    Family("gpt-oss, OpenAI's", ".blocks", "", frozenset(("U8",)), "floats.gpt_oss", _scale(".scales")),
    Family("Mistral", ".weight", ".weight", FP8, "floats.plain", _scale(".qscale_weight")),
    Family("ComfyUI", ".weight", ".weight", FP8, "floats.plain", _scale(".scale_weight")),
    Family("quanto", "._data", "", FP8 | {"I8"}, "subclasses.quanto", _scale("._scale")),
    Family(
        "torchao",
        "_qdata",
        "",
        FP8 | {"I8"},
        "subclasses.torchao",
        _scale("_scale"),
        {packing.ZERO: ("_zero_point",), packing.FACTORS: ("_act_pre_scale",)},
        private=True,
    ),
    Family("GGUF NVFP4", ".weight", ".weight", frozenset(("U8",)), "gguf.nvfp4", _scale(".scale"), method=GGUF),
    Family("GGUF I2_S", "", "", frozenset(("U8",)), "gguf.i2_s", _scale("_scale"), method=GGUF),
    Family(
        "fp8",
        "",
        "",
        FP8,
        "floats.plain",
        {packing.SCALE: ("_scale_inv", "_scale", "_weight_scale")},
        {packing.ZERO: ("_zero_point",)},
    ),
    Family(
        "int8",
        ".weight",
        ".weight",
        frozenset(("I8",)),
        "floats.smoothed",
        _scale(".weight_scale"),
        {packing.ZERO: (".weight_zero_point",), packing.FACTORS: (".pre_quant_scale",)},
    ),
)

# The families of GGUF files, in which dtypes name block types.
IN_GGUF = (Family("NVFP4", ".weight", ".weight", frozenset(("NVFP4",)), "gguf.nvfp4", _scale(".scale")),)
