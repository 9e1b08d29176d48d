"""The block type that ComfyUI-GGUF's llama-quantize chooses for each tensor of a diffusion model, as data.

Source: https://github.com/city96/ComfyUI-GGUF/blob/main/tools/lcpp.patch (img_tensor_get_type).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ...base.messages import error_about
from ...base.scheme import SCHEMES
from ...errors import UnsupportedError
from ...models.diffusion import DIFFUSION_MODELS
from .mixtures import FLOAT16, TensorType, axes_of, file_types, is_quantized

# Kinds of tensors, by a part of the name; the first match counts.
_VALUE, _FUSED, _DOWN = "value", "fused", "down"
_KINDS = {
    _VALUE: (
        "attn_v.weight", ".to_v.weight", ".v.weight", ".attn.w1v.weight", ".attn.w2v.weight", "_attn.v_proj.weight",
    ),
    _FUSED: ("attn_qkv.weight", "attn.qkv.weight", "attention.qkv.weight"),
    _DOWN: (
        "ffn_down", ".ffn.2.weight", ".ff.net.2.weight", ".mlp.layer2.weight", ".adaln_modulation_mlp.2.weight",
        ".feed_forward.w2.weight",
    ),
}  # fmt: skip
# For each file type, the types of kinds where they are not the base, with the number of tensors that get them: the
# first of their kind, or all.
_ALL = 1 << 62
_CELLS: dict[str, dict[str, tuple[tuple[int, str], ...]]] = {
    "q2_k": {_VALUE: ((_ALL, "q3_k"),)},
    "q3_k_m": {_VALUE: ((2, "q5_k"), (_ALL, "q4_k")), _FUSED: ((_ALL, "q4_k"),), _DOWN: ((_ALL, "q4_k"),)},
    "q3_k_l": {_VALUE: ((_ALL, "q5_k"),), _FUSED: ((_ALL, "q4_k"),), _DOWN: ((_ALL, "q5_k"),)},
    "q4_k_s": {_VALUE: ((4, "q5_k"),), _DOWN: ((_ALL, "q5_k"),)},
    "q4_k_m": {_VALUE: ((_ALL, "q6_k"),), _FUSED: ((_ALL, "q5_k"),), _DOWN: ((_ALL, "q6_k"),)},
    "q5_k_m": {_VALUE: ((_ALL, "q6_k"),), _FUSED: ((_ALL, "q6_k"),), _DOWN: ((_ALL, "q6_k"),)},
    "q4_0": {_DOWN: ((_ALL, "q4_1"),)},
    "q5_0": {_DOWN: ((_ALL, "q5_1"),)},
}
# File types that ComfyUI-GGUF does not write.
_REFUSED = ("iq4_nl", "iq4_xs", "mxfp4_moe")
# Parts of names of other models, or of other parts of a checkpoint.
_FOREIGN = (
    "model.diffusion_model.", "first_stage_model.", "single_transformer_blocks.", "joint_transformer_blocks.",
)  # fmt: skip


def choose(file_type: str, shapes: Mapping[str, tuple[int, ...]], architecture: str) -> dict[str, TensorType]:
    """Return the type of each tensor; it depends on the place among its kind, so ``shapes`` must be in file order."""
    if file_type in _REFUSED:
        raise UnsupportedError(
            f"file type {file_type} has no rules for diffusion models, expected one of {', '.join(_available())}"
        )
    row = file_types()[file_type]
    counters: Counter[str] = Counter()
    types: dict[str, TensorType] = {}
    for name, shape in shapes.items():
        if not _is_quantized(name, shape, architecture):
            types[name] = TensorType(None)
            continue
        part = next((part for part in _FOREIGN if part in name), None)
        if part is not None:
            text = f"is no tensor of {architecture}, because of {part}"
            raise error_about(UnsupportedError, text, tensor=name)
        kind = next((kind for kind, parts in _KINDS.items() if any(part in name for part in parts)), "")
        number = counters[kind]
        counters[kind] += 1
        cells = _CELLS.get(file_type, {}).get(kind, ())
        chosen = next((scheme for count, scheme in cells if number < count), row.base)
        whole = shape[-1] % SCHEMES[chosen].block == 0
        requires = whole and row.requires_imatrix and chosen == row.base
        types[name] = TensorType(chosen if whole else FLOAT16, None, requires)
    return types


def _available() -> list[str]:
    return [name for name in file_types() if name not in _REFUSED]


def _is_quantized(name: str, shape: tuple[int, ...], architecture: str) -> bool:
    if axes_of(shape) != 2 or not is_quantized(name, shape, architecture):
        return False
    parts = DIFFUSION_MODELS[architecture].unquantized or ()
    return not any(name == part[1:] if part.startswith("=") else part in name for part in parts)
