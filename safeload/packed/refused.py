"""Recognized but unsupported quantizations, with the tools that read them.

Sources of the names: the quantizers of transformers, ExLlamaV2 and V3, AQLM, VPTQ, QuIP#, QTIP, SpQR, Marlin, HQQ,
EETQ; Quark's as in `quark`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from .families import FP8
from .methods import QUARK, quark_dtypes
from .quantization import Quantization, brief


class Refusal(NamedTuple):
    """An unsupported quantization."""

    what: str  # the quantization, and why it is not supported
    reader: str  # the tool that reads it
    suffixes: tuple[tuple[str, str], ...] = ()  # of the codes and an identifying companion
    methods: tuple[str, ...] = ()  # identifying values of ``quant_method``, ``format`` and similar keys
    fp8: bool = False  # the suffixes also identify fp8 codes


QUARK_READER = "AMD Quark"

# Pairs of suffixes are searched first: they are more specific than a method, which can have different layouts.
REFUSALS = (
    Refusal(
        "EXL2, with permuted rows and codes of different widths", "ExLlamaV2", ((".q_weight", ".q_scale"),), ("exl2",)
    ),
    Refusal(
        "EXL3, which encodes weights as paths through a trellis, in a rotated basis",
        "ExLlamaV3",
        ((".trellis", ".suh"), (".trellis", ".svh")),
        ("exl3",),
    ),
    Refusal(
        "QTIP, which encodes weights as paths through a trellis, in a rotated basis",
        "QTIP",
        ((".trellis", ".SU"), (".trellis", ".SV")),
        ("qtip",),
    ),
    Refusal(
        "QuIP#, which encodes weights as points of a lattice, in a rotated basis",
        "QuIP#",
        ((".Qidxs", ".SU"), (".Qidxs", ".SV")),
        ("quip", "quip_sharp"),
    ),
    Refusal("AQLM, which stores weights as sums of codebook vectors", "aqlm", ((".codes", ".codebooks"),), ("aqlm",)),
    Refusal(
        "VPTQ, which stores weights as permuted codebook vectors",
        "vptq",
        ((".indices", ".centroids.weight"),),
        ("vptq",),
    ),
    Refusal(
        "SpQR, which stores outliers separately from its 3-bit tiles",
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
    Refusal("Marlin, with codes in the order of its kernel", "vLLM", ((".B", ".s"),), ("marlin", "gptq_marlin")),
    Refusal(
        "HQQ, with its settings in tensors or a pickle beside it",
        "hqq",
        ((".W_q", ".scale"), (".W_q", ".meta")),
        ("hqq",),
    ),
    Refusal(
        "EETQ, with codes permuted for its kernel",
        "EETQ",
        ((".weight", ".weight_scales"), (".qweight", ".weight_scales")),
        ("eetq",),
    ),
    Refusal(
        "ComfyUI's, with 4-bit codes in its own order, and wider codes that can be rotated",
        "ComfyUI",
        ((".weight", ".comfy_quant"),),
    ),
    Refusal(
        "TensorRT-LLM's, in the layout of its engines",
        "TensorRT-LLM",
        ((".weight", ".weights_scaling_factor"), (".weight", ".per_channel_scale")),
        fp8=True,
    ),
    Refusal("Quark's weights in a rotated basis", QUARK_READER, ((".weight", ".input_rotation"),), fp8=True),
    Refusal(
        "HIGGS, which encodes weights as grid points, in a rotated basis", "transformers with flute", (), ("higgs",)
    ),
    Refusal("FP-Quant, with weights in a rotated basis", "transformers with fp_quant", (), ("fp_quant",)),
    Refusal("SINQ, which scales both rows and columns", "sinq", (), ("sinq",)),
    Refusal("Four Over Six, with NVFP4 blocks of two different ranges", "fouroversix", (), ("fouroversix",)),
    Refusal("BitBLAS, with codes in the order of its kernel", "vLLM with bitblas", (), ("bitblas",)),
    Refusal("IPEX, with codes in the order of its kernel", "intel-extension-for-pytorch", (), ("ipex",)),
    Refusal("llm-awq's, with codes in the order of its kernel", "llm-awq", (), ("llm-awq",)),
    Refusal("AWQ's gemv_fast, with codes in the order of its kernel", "AutoAWQ", (), ("gemv_fast",)),
    Refusal("modelopt's AWQ, with codes of two rows in each byte", "TensorRT-LLM", (), ("W4A16_AWQ", "W4A8_AWQ")),
)

# Keys with more specific values than the method.
_KEYS = ("format", "checkpoint_format", "version", "quant_algo")
_BY_METHOD = {method: row for row in REFUSALS for method in row.methods}
_ROTATED = Refusal("compressed-tensors in a rotated basis (transform_config)", "vLLM")


def refusal_of(name: str, dtype: str, companion: str | None, quantization: Quantization | None) -> Refusal | None:
    """Return the reason why codes are not dequantized, or None if no listed quantization matches."""
    if companion is not None:
        for row in REFUSALS:
            for main, suffix in row.suffixes:
                if name.endswith(main) and companion == name.removesuffix(main) + suffix:
                    return row if row.fp8 or dtype not in FP8 else None
    if quantization is None:
        return None
    if quantization.is_rotated:
        return _ROTATED  # of any dtype
    if quantization.method == QUARK:
        reason = unread_by_quark(quantization, name)
        return None if reason is None else Refusal(reason, QUARK_READER)
    if dtype in FP8:
        return None
    for value in (quantization.method, *map(quantization.get, _KEYS)):
        refusal = _BY_METHOD.get(value) if isinstance(value, str) else None
        if refusal is not None:
            return refusal
    return None


# ---- Quark, where the configuration decides for each tensor ----


def unread_by_quark(quantization: Quantization, name: str) -> str | None:
    """Return the unsupported quantization of a tensor, or None."""
    try:
        return unread_specs(quantization, name, quark_specs(quantization, name))
    except UnsupportedError:  # opening the checkpoint reports it, except with stored=True
        return None


def unread_specs(quantization: Quantization, name: str, specs: Sequence[Mapping[str, Any]]) -> str | None:
    """Like `unread_by_quark`, for the `quark_specs` of the tensor."""
    if _is_rotated(quantization, _module_of(name)):
        return "Quark's weights in a rotated basis (algo_config)"
    kinds = [brief(str(spec.get("dtype"))) for spec in specs]
    if any(spec.get("scale_format") == "e5m3" for spec in specs):
        return f"Quark's {kinds[0]} with scales of e5m3"
    if len(specs) > 1 and kinds not in (["fp4", "fp8_e4m3"], ["fp8_e4m3", "int4"], ["fp8_e4m3", "uint4"]):
        return f"Quark's {' and '.join(kinds[:3])} in stages"
    if kinds and "dtype" in specs[0] and kinds[0] not in quark_dtypes():
        return f"Quark's {kinds[0]}"
    return None


def quark_specs(quantization: Quantization, name: str) -> list[Mapping[str, Any]]:
    """Return Quark's settings of a tensor, an item per stage of quantization."""
    layer = quantization.quark_settings(_module_of(name))
    value = layer.get("bias" if name.endswith(".bias") else "weight")
    specs = value if isinstance(value, list) else [value]
    return [spec for spec in specs if isinstance(spec, Mapping)]


def _module_of(name: str) -> str:
    """Return the module of a weight or bias."""
    return name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name


def _is_rotated(quantization: Quantization, module: str) -> bool:
    """Return True if the module's weights are rotated, and its inputs at run time."""
    config = quantization.get("algo_config")
    for algorithm in config if isinstance(config, list) else [config]:
        online = algorithm.get("online_config") if isinstance(algorithm, Mapping) else None
        layers = online.get("online_rotation_layers") if isinstance(online, Mapping) else None
        if isinstance(layers, list) and module in layers:
            return True
    return False
