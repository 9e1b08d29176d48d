"""The families of packed tensors that safeload dequantizes, one row each.

A row says which stored tensors belong together, by the suffixes of their names, and has a function that turns their
shapes and dtypes into a `Packing`, or says why they do not fit. Shapes decide, the configuration confirms. Other
companions are in `companions`.

Sources: `DeepSeek-V3 README_WEIGHTS.md`; transformers ``integrations/{finegrained_fp8,mxfp4,bitnet}.py``;
bitsandbytes ``functional.py``; compressed-tensors ``compressors/``; nvidia-modelopt ``torch/quantization/qtensor``;
mlx ``ops.cpp``; those of `gptq` and `quark`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..base import packing
from ..base.packing import Packing
from . import bitsandbytes, floats, gemma, gguf, gptq, integers, quark, sparse, subclasses
from .packed_group import FP8, PackedGroup


class Family(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the family.
        main: suffix of the name of the codes.
        logical: suffix that replaces it in the name of the packed tensor.
        dtypes: codes of dtypes of the codes.
        required: suffixes that replace ``main`` in names of parts, by role, in order of preference.
        optional: the same for parts that may be missing.
        describe: the packing of a group; raises `Misfit`.
        method: the ``quant_method`` that the configuration must have; None for any or none. Under it the row is the
            only one for its codes, except for fp8.
    """

    name: str
    main: str
    logical: str
    dtypes: frozenset[str]
    required: Mapping[str, tuple[str, ...]]
    optional: Mapping[str, tuple[str, ...]]
    describe: Callable[[PackedGroup], Packing]
    method: str | None = None


# ---- the table ----

_WEIGHT_SCALE = {packing.SCALE: ("_scale_inv", "_scale", "_weight_scale")}
_NOTHING: Mapping[str, tuple[str, ...]] = {}


def _scale(suffix: str) -> Mapping[str, tuple[str, ...]]:
    return {packing.SCALE: (suffix,)}


def _sparse(stem: str) -> Family:
    """compressed-tensors' values with a mask, under names that begin with a suffix of the tensor's."""
    return Family(
        "compressed-tensors, sparse",
        stem + sparse.SUFFIX,
        stem or ".weight",
        sparse.NUMBERS | sparse.CODES,
        {packing.MASK: (stem + ".bitmask",), packing.SHAPE: (stem + ".shape",)},
        {
            packing.OFFSETS: (stem + ".row_offsets",),
            packing.SCALE: (".weight_scale",),
            packing.ZERO: (".weight_zero_point",),
        },
        sparse.bitmask,
    )


FAMILIES = (
    Family(
        "Quark, int4 in fp8",
        "",
        "",
        frozenset(("I32",)),
        {packing.SCALE: quark.SECOND_SCALE, packing.FACTORS: quark.SCALE},
        {packing.ZERO: quark.SECOND_ZERO},
        quark.in_fp8,
        quark.METHOD,
    ),
    Family(
        "Quark",
        "",
        "",
        FP8 | {"I8", "U8", "I32"},
        {packing.SCALE: quark.SCALE},
        {packing.ZERO: quark.ZERO, packing.GLOBAL: quark.SECOND_SCALE},
        quark.describe,
        quark.METHOD,
    ),
    Family("DeepSeek V4", ".weight", ".weight", FP8 | {"I8"}, _scale(".scale"), _NOTHING, floats.deepseek_v4),
    Family(
        "modelopt NVFP4",
        ".weight",
        ".weight",
        frozenset(("U8",)),
        {packing.SCALE: (".weight_scale",), packing.GLOBAL: (".weight_scale_2",)},
        {packing.FACTORS: (".pre_quant_scale",)},
        floats.modelopt_nvfp4,
    ),
    Family(
        "modelopt NVFP4, experts",
        "",
        "",
        frozenset(("U8",)),
        {packing.SCALE: ("_weight_scale",), packing.GLOBAL: ("_weight_scale_2",)},
        _NOTHING,
        floats.modelopt_experts,
    ),
    Family(
        "BitNet",
        ".weight",
        ".weight",
        frozenset(("U8",)),
        _scale(".weight_scale"),
        _NOTHING,
        integers.bitnet,
        "bitnet",
    ),
    Family(
        "Gemma",
        ".weight",
        ".weight",
        frozenset(("U8", "I8")),
        _scale(".weight_scale"),
        _NOTHING,
        gemma.gemma,
        "gemma",
    ),
    Family(
        "Gemma, embeddings",
        ".embedding_quantized",
        ".weight",
        frozenset(("U8", "I8")),
        _scale(".embedding_scale"),
        _NOTHING,
        gemma.gemma,
        "gemma",
    ),
    Family(
        "bitsandbytes, 4 bits",
        "",
        "",
        bitsandbytes.STORAGE,
        {packing.STATE: (*bitsandbytes.STATES.values(), bitsandbytes.GPTQMODEL_STATE)},
        {role: (suffix, bitsandbytes.GPTQMODEL_BESIDE[role]) for role, suffix in bitsandbytes.BESIDE.items()},
        bitsandbytes.four_bits,
    ),
    Family(
        "bitsandbytes, 8 bits",
        ".weight",
        ".weight",
        frozenset(("I8",)),
        {packing.SCALE: (".SCB", ".weight_scb")},
        {packing.FORMAT: (".weight_format",)},
        bitsandbytes.eight_bits,
    ),
    Family(
        "MLX",
        ".weight",
        ".weight",
        frozenset(("U32",)),
        _scale(".scales"),
        {packing.BIAS: (".biases", ".qbiases"), packing.GLOBAL: (".global_scale",)},
        integers.mlx,
    ),
    Family(
        "compressed-tensors",
        "_packed",
        "",
        frozenset(("I32",)),
        _scale("_scale"),
        {packing.ZERO: ("_zero_point",), packing.GROUPS: ("_g_idx",), packing.SHAPE: ("_shape",)},
        integers.ct_packed,
    ),
    Family(
        "compressed-tensors fp4",
        "_packed",
        "",
        frozenset(("U8",)),
        _scale("_scale"),
        {packing.GLOBAL: ("_global_scale",)},
        floats.ct_fp4,
    ),
    Family(
        "GPTQ, auto-round, AWQ",
        ".qweight",
        ".weight",
        frozenset(("I8", "I16", "I32")),
        {packing.SCALE: (".scales", ".qscales")},  # Quark's, where transformers 5.6 and later save them: a q too many
        {packing.ZERO: (".qzeros", ".qqzeros"), packing.GROUPS: (".g_idx",)},
        gptq.describe,
    ),
    *(_sparse(stem) for stem in sparse.STEMS),
    Family("gpt-oss", "_blocks", "", frozenset(("U8",)), _scale("_scales"), _NOTHING, floats.gpt_oss),
    Family("gpt-oss, OpenAI's", ".blocks", "", frozenset(("U8",)), _scale(".scales"), _NOTHING, floats.gpt_oss),
    Family("Mistral", ".weight", ".weight", FP8, _scale(".qscale_weight"), _NOTHING, floats.plain),
    Family("ComfyUI", ".weight", ".weight", FP8, _scale(".scale_weight"), _NOTHING, floats.plain),
    Family("quanto", "._data", "", FP8 | {"I8"}, _scale("._scale"), _NOTHING, subclasses.quanto),
    Family(
        "torchao",
        "._weight_qdata",
        ".weight",
        FP8 | {"I8"},
        _scale("._weight_scale"),
        {packing.ZERO: ("._weight_zero_point",)},
        subclasses.torchao,
    ),
    Family("GGUF NVFP4", ".weight", ".weight", frozenset(("U8",)), _scale(".scale"), _NOTHING, gguf.nvfp4, gguf.METHOD),
    Family("GGUF I2_S", "", "", frozenset(("U8",)), _scale("_scale"), _NOTHING, gguf.i2_s, gguf.METHOD),
    Family("fp8", "", "", FP8, _WEIGHT_SCALE, {packing.ZERO: ("_zero_point",)}, floats.plain),
    Family(
        "int8",
        ".weight",
        ".weight",
        frozenset(("I8",)),
        _scale(".weight_scale"),
        {packing.ZERO: (".weight_zero_point",), packing.FACTORS: (".pre_quant_scale",)},
        floats.smoothed,
    ),
)

# Of GGUF files, whose dtypes say what blocks are.
IN_GGUF = (Family("NVFP4", ".weight", ".weight", frozenset(("NVFP4",)), _scale(".scale"), _NOTHING, gguf.nvfp4),)
