"""Companions of codes, recognized by name: scales, zero points, smoothing, rotation and activation scales.

A family reads the companions in its row of `families`. Any other companion with an arithmetic name makes the values
unknown, unless it is listed here as harmless to weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

# Companions of activations and the KV cache, markers and bookkeeping: hidden, because no weight needs these tensors.
IGNORED = frozenset(
    (
        "input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "prob_scale", "input_global_scale",
        "input_zero_point", "comfy_quant", "gate_up_proj_input_scale", "down_proj_input_scale",
        "input_scale_ub", "activation_scale", "qscale_act", "scale_input", "scaled_fp8",
        "gate_up_proj_activation_scale", "down_proj_activation_scale", "_weight_act_quant_scale",
        "_gate_up_proj_act_quant_scale", "_down_proj_act_quant_scale",
        "_weight_act_quant_zero_point", "input_activation_scale", "output_activation_scale", "output_zero_point",
        "input_scale_2", "output_scale_2", "q_zero_point", "k_zero_point", "v_zero_point",
    )
)  # fmt: skip
# Also harmless, but visible as tensors of the checkpoint: names too general to hide, and companions of the bias.
_LISTED = frozenset(
    (
        "input_scale_inv", "activation_scale_inv", "act_scale", "act_scales", "activation_scaling_factor",
        "input_global_scale_inv", "output_global_scale", "input_zero_point_2", "output_zero_point_2", "k_cache_scale",
        "v_cache_scale", "kv_cache_scaling_factor",
        "k_cache_scaling_factor", "v_cache_scaling_factor", "k_global_scale", "v_global_scale", "q_global_scale",
        "w1_input_scale", "w2_input_scale", "w3_input_scale", "w13_input_scale", "embed_scale",
    )
)  # fmt: skip
_HARMLESS = IGNORED | _LISTED
_OF_BIAS = ("bias_", "bias.")
# Substrings in the names of companions with an effect on weights. When in doubt, list the word: refusing is safe.
_TELLING = (
    "scal", "zero", "zp", "smooth", "rotat", "hadamard", "absmax", "factor", "shift", "perm", "g_idx", "svdquant",
    "codebook", "biases", "scb", "offset", "outlier",
)  # fmt: skip
# Maximum number of parts of a companion's name after the name of its codes: "_weight_scale_2" has three.
_MOST_PARTS = 6


def unread(names: Iterable[str], owners: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of an owner and a companion unread by its family."""
    for name in names:
        module, _, last = name.rpartition(".")
        telling = is_telling(last)
        if not telling and not is_telling(module.rpartition(".")[2]):  # such as X.weight_scale.second
            continue
        # Beside the codes: X.weight or X, and X.scale. Below the codes: X.weight_scale, X.weight.absmax.
        owner = (owners.get(f"{module}.weight") or owners.get(module)) if telling else None
        if owner is not None and not last.startswith(_OF_BIAS):
            yield owner, name
            continue
        end = len(name)
        for _ in range(_MOST_PARTS):
            end = max(name.rfind("_", 0, end), name.rfind(".", 0, end))
            if end < 0:
                break
            rest = name[end + 1 :]
            owner = owners.get(name[:end])
            beside = name[end] == "_" and is_telling(rest.partition("_")[0].partition(".")[0])
            if owner is None and beside:  # X_scale_2 of X.weight
                owner = owners.get(f"{name[:end]}.weight")
            if owner is not None:
                if rest not in _HARMLESS and not rest.startswith(_OF_BIAS):
                    yield owner, name
                break


def is_zero_point(name: str) -> bool:
    """Return True for the name of a zero point, a plain number even if it has the dtype of codes."""
    return name.endswith("zero_point")


def is_telling(last: str) -> bool:
    """Return True if the last part of a name says that the companion changes weights."""
    lower = last.lower()
    return lower not in _HARMLESS and any(word in lower for word in _TELLING)
