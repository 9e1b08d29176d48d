"""NVIDIA ModelOpt's NVFP4. Source: nvidia-modelopt ``torch/quantization/qtensor``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base import packing
from ..base.packing import Packing
from .families import Family
from .floats import fp4
from .packed_group import Misfit, PackedGroup, Refused, check_shared, whole_grid
from .quantization import Quantization, mapping


def modelopt_nvfp4(group: PackedGroup) -> Packing:
    """NVFP4 with a multiplying global scale and the factors of AWQ."""
    algorithm = _layer(group.config, group.module).get("quant_algo") or group.config.values.get("quant_algo")
    if isinstance(algorithm, str) and algorithm.upper().startswith("W4A") and algorithm.upper() != "W4A16_NVFP4":
        raise Refused(f"its quant_algo {algorithm} stores unsupported codes or scales")
    if group.has_beside(".svdquant_lora_a") or group.has_beside(".svdquant_lora_b"):
        raise Refused("NVFP4_SVD adds a product of two matrices, which safeload does not compute")
    packed = check_shared(group, fp4(group, "nvfp4", 16, "F8_E4M3"))
    return check_shared(group, packed)._replace(scale_rule=packing.MULTIPLIED)


def modelopt_experts(group: PackedGroup) -> Packing:
    """Experts in a single tensor; Llama 4 stores them as [in, out], packed along ``in``."""
    stored, scale = group.stored, group.scales
    if len(stored) != 3 or len(scale) != 3 or scale[-1] != stored[-1] or scale[-2] * 8 != stored[-2]:
        return modelopt_nvfp4(group)
    if group.scale_code != "F8_E4M3":
        raise Misfit(f"scales of nvfp4 must be F8_E4M3, got {group.scale_code}")
    shape = (stored[0], stored[1] * 2, stored[2])
    packed = group.packing(
        "fp4", "nvfp4", shape, 4, "e2m1", layout=packing.PLANES, interleaved=True, grid=whole_grid(shape, 16, 1)
    )
    return check_shared(group, packed)._replace(scale_rule=packing.MULTIPLIED)


def _layer(quantization: Quantization, module: str) -> Mapping[str, Any]:
    """Return the settings of a layer under ``quantized_layers``, which can also name an enclosing module."""
    layers = mapping(quantization.values.get("quantized_layers"))
    while layers and module:
        if module in layers:
            return mapping(layers[module])
        module = module.rpartition(".")[0]
    return {}


SETTINGS_OF_MODULES = {"modelopt": _layer}
FAMILIES = [
    Family(
        "modelopt NVFP4",
        ".weight",
        frozenset(("U8",)),
        {packing.SCALE: (".weight_scale",), packing.GLOBAL: (".weight_scale_2",)},
        modelopt_nvfp4,
        {packing.FACTORS: (".pre_quant_scale",)},
    ),
    Family(
        "modelopt NVFP4, experts",
        "",
        frozenset(("U8",)),
        {packing.SCALE: ("_weight_scale",), packing.GLOBAL: ("_weight_scale_2",)},
        modelopt_experts,
    ),
]
