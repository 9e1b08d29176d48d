"""Quantizations that are recognised and not dequantized: what each is, and what reads it.

Sources of the names: the quantizers of transformers, ExLlamaV2 and V3, AQLM, VPTQ, QuIP#, QTIP, SpQR, Marlin, HQQ,
EETQ.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UnsupportedError
from . import quark
from .config import Quantization
from .packed_group import FP8


class Refusal(NamedTuple):
    """A row of the table.

    Attributes:
        what: the family, and why its codes are not dequantized.
        reader: what reads it.
        suffixes: pairs of suffixes, of the name of the codes and of that of their companion.
        methods: values of ``quant_method``, ``format`` and the like that identify it.
        fp8: whether the suffixes identify codes of fp8 too.
    """

    what: str
    reader: str
    suffixes: tuple[tuple[str, str], ...] = ()
    methods: tuple[str, ...] = ()
    fp8: bool = False


QUARK_READER = "AMD Quark"

# A pair of suffixes tells more than a method, which may have several layouts: rows are searched for pairs first.
REFUSALS = (
    Refusal(
        "EXL2, whose permuted rows have codes of different widths", "ExLlamaV2", ((".q_weight", ".q_scale"),), ("exl2",)
    ),
    Refusal(
        "EXL3, whose codes are paths through a trellis in a rotated basis",
        "ExLlamaV3",
        ((".trellis", ".suh"), (".trellis", ".svh")),
        ("exl3",),
    ),
    Refusal(
        "QTIP, whose codes are paths through a trellis in a rotated basis",
        "QTIP",
        ((".trellis", ".SU"), (".trellis", ".SV")),
        ("qtip",),
    ),
    Refusal(
        "QuIP#, whose codes are points of a lattice in a rotated basis",
        "QuIP#",
        ((".Qidxs", ".SU"), (".Qidxs", ".SV")),
        ("quip", "quip_sharp"),
    ),
    Refusal("AQLM, whose weights are sums of vectors of codebooks", "aqlm", ((".codes", ".codebooks"),), ("aqlm",)),
    Refusal(
        "VPTQ, whose weights are vectors of codebooks, permuted",
        "vptq",
        ((".indices", ".centroids.weight"),),
        ("vptq",),
    ),
    Refusal(
        "SpQR, which stores outliers apart from its tiles of 3 bits",
        "spqr_quant",
        ((".col_vals", ".dense_weights"),),
        ("spqr",),
    ),
    Refusal(
        "Marlin's 2:4 sparse codes, in the order of its kernel",
        "vLLM before 0.10",
        ((".weight_packed", ".scale_packed"),),
        ("marlin-24", "gptq_marlin_24"),
    ),
    Refusal("Marlin, whose codes are in the order of its kernel", "vLLM", ((".B", ".s"),), ("marlin", "gptq_marlin")),
    Refusal("HQQ, whose settings are in a pickle beside it", "hqq", ((".W_q", ".scale"), (".W_q", ".meta")), ("hqq",)),
    Refusal(
        "EETQ, whose codes are permuted for its kernel",
        "EETQ",
        ((".weight", ".weight_scales"), (".qweight", ".weight_scales")),
        ("eetq",),
    ),
    Refusal(
        "ComfyUI's, whose 4-bit codes are in an order of its own, and whose others may be rotated",
        "ComfyUI",
        ((".weight", ".comfy_quant"),),
    ),
    Refusal(
        "TensorRT-LLM's, whose files hold the layout of its engines",
        "TensorRT-LLM",
        ((".weight", ".weights_scaling_factor"), (".weight", ".per_channel_scale")),
        fp8=True,
    ),
    Refusal("Quark's weights in a rotated basis", QUARK_READER, ((".weight", ".input_rotation"),), fp8=True),
    Refusal("HIGGS, whose codes are points of a grid in a rotated basis", "transformers with flute", (), ("higgs",)),
    Refusal("FP-Quant, whose weights are in a rotated basis", "transformers with fp_quant", (), ("fp_quant",)),
    Refusal("SINQ, which scales both rows and columns", "sinq", (), ("sinq",)),
    Refusal("Four Over Six, whose NVFP4 blocks have one of two ranges", "fouroversix", (), ("fouroversix",)),
    Refusal("BitBLAS, whose codes are in the order of its kernel", "vLLM with bitblas", (), ("bitblas",)),
    Refusal("IPEX, whose codes are in the order of its kernel", "intel-extension-for-pytorch", (), ("ipex",)),
    Refusal("llm-awq's, whose codes are in the order of its kernel", "llm-awq", (), ("llm-awq",)),
    Refusal("AWQ's gemv_fast, whose codes are in the order of its kernel", "AutoAWQ", (), ("gemv_fast",)),
    Refusal(
        "modelopt's AWQ, whose bytes hold a code of each of two rows", "TensorRT-LLM", (), ("W4A16_AWQ", "W4A8_AWQ")
    ),
)

# Keys whose value says more than the method.
_KEYS = ("format", "checkpoint_format", "version", "quant_algo")
_READ_BY_METHOD = {method: row for row in REFUSALS for method in row.methods}
_ROTATED = Refusal("compressed-tensors in a rotated basis (transform_config)", "vLLM")


def refusal_of(name: str, dtype: str, companion: str | None, quantization: Quantization | None) -> Refusal | None:
    """The row of codes that are not dequantized; None if the table has none.

    Args:
        name: of the codes.
        dtype: code of their dtype.
        companion: name of the companion that identifies them; None without one.
        quantization: of the configuration; None without one.
    """
    if companion is not None:
        for row in REFUSALS:
            for main, other in row.suffixes:
                if name.endswith(main) and companion == name.removesuffix(main) + other:
                    return row if row.fp8 or dtype not in FP8 else None
    if quantization is not None and quantization.get("transform_config"):
        return _ROTATED  # of any dtype
    if quantization is not None and quantization.method == quark.METHOD:
        return _of_quark(name, quantization)
    if quantization is None or dtype in FP8:
        return None
    for said in (quantization.method, *map(quantization.get, _KEYS)):
        row_said = _READ_BY_METHOD.get(said) if isinstance(said, str) else None
        if row_said is not None:
            return row_said
    return None


def _of_quark(name: str, quantization: Quantization) -> Refusal | None:
    try:
        what = quark.unread(quantization, name)
    except UnsupportedError:  # of opening the checkpoint, unless its tensors are wanted as stored
        return None
    return None if what is None else Refusal(what, QUARK_READER)
