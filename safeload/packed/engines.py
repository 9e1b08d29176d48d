"""The engines that load quantized folders: what each leaves unquantized, and the quantization in its ``config.json``.

``engines.json`` has a row per engine. Modules of a list under ``fused`` are merged by engines into a single matrix, so
they must share NVFP4's global scale.

Sources: llmcompressor 0.14 ``entrypoints/model_free``; compressed-tensors 0.19 ``quantization/quant_scheme.py``;
transformers 5.17 ``utils/quantization_config.py``; mlx-lm 0.32 ``utils.py`` and ``models``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from ..base.data import read_data
from ..base.preset import MLX, Preset
from ..base.text import show
from ..models.family import mlx_experts_of
from .families import families
from .quantization import MLX_KEY, QUANTIZATION, Quantization, quantization_of, without_quantization

_data = partial(read_data, __name__, "engines.json")

# Modules that choose experts. Engines compute these in full precision, although they are linear.
_ROUTER = re.compile(r"\.(?:gate|router|shared_expert_gate)\.weight\Z")
# Experts, which transformers holds as 3-D parameters; bitsandbytes quantizes only linear modules.
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
_STACKED = re.compile(r"\.(?:switch_mlp\.[a-z_]+|self_attn\.embed_q|self_attn\.unembed_out)\.weight\Z")
_FUSED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)\Z")


def not_as_in_mlx(model_type: object) -> str:
    """Return why a model's tensors of MLX are not those of transformers."""
    return (
        f"mlx-lm does not store {show(model_type)} as transformers does (norms + 1, axes of convolutions, names), and "
        "safeload does not know the differences"
    )


class Engine(NamedTuple):
    """What loads a folder."""

    title: str  # for messages
    quantizes_ends: bool = False  # True to quantize embeddings and the head
    quantizes_experts: bool = True
    casts: bool = False  # True to give unquantized tensors the dtype of the weights too
    always_indexed: bool = False  # True to write an index even for a single shard
    metadata: str = "pt"  # "format" in the header of each file
    shard_size: int = 5_000_000_000  # default limit in bytes
    dropped: tuple[str, ...] = ()  # suffixes of stored tensors that the engine computes itself


def engine_of(preset: Preset) -> Engine:
    """Return the engine that loads a format."""
    return Engine(**_data()["engines"][preset.engine])


def is_router(name: str) -> bool:
    """Return True for the weight of a module that chooses experts."""
    return _ROUTER.search(name) is not None


def is_expert(name: str) -> bool:
    """Return True for a weight of a numbered expert."""
    return _EXPERT.search(name) is not None


def is_fused(name: str) -> bool:
    """Return True for the weights of all experts of a layer in a single tensor."""
    return _FUSED_EXPERTS.search(name) is not None


def is_stack(name: str) -> bool:
    """Return True for a weight of several matrices, as mlx-lm names it."""
    return _STACKED.search(name) is not None


# ---- fused partners ----


def partners_of(name: str) -> tuple[str, ...]:
    """Return the names of the weights that share a global scale with a weight, itself included."""
    parent, _, module = name.removesuffix(".weight").rpartition(".")
    partners = next((names for names in _data()["fused"] if module in names), ())
    return tuple(f"{parent}.{other}.weight" for other in partners) or (name,)


# ---- config.json ----


def config_for(
    preset: Preset,
    config: Mapping[str, Any] | None,
    left: Sequence[str],  # names of the linear modules that stay unquantized
    exceptions: Mapping[str, Preset] = MappingProxyType({}),  # modules with another format of the engine
) -> dict[str, Any]:
    """Return the ``config.json`` of a folder from the config of the source."""
    result = without_quantization(config or {})
    if preset.engine != MLX:
        return {**result, QUANTIZATION: settings_of(preset, left)}
    for key in ("_name_or_path", "vision_config"):
        result.pop(key, None)
    result = _as_mlx_reads(result)
    own = {module: {"group_size": other.group, "bits": other.bits} for module, other in exceptions.items()}
    settings = {**settings_of(preset, left), **own}
    return dict(sorted({**result, MLX_KEY: settings, QUANTIZATION: settings}.items()))


def _as_mlx_reads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the keys of transformers 4, which mlx-lm reads; transformers 5 renamed some.

    Without ``rope_theta`` mlx-lm would compute with its default, or refuse the model.
    """
    older: dict[str, Any] = {}
    parameters = config.get("rope_parameters")
    rope = parameters if isinstance(parameters, Mapping) else {}
    sliding = rope.get("sliding_attention")
    if isinstance(sliding, Mapping):  # Gemma 3: by the kind of layer
        older["rope_local_base_freq"] = sliding.get("rope_theta")
    full = rope.get("full_attention")
    rope = full if isinstance(full, Mapping) else rope
    older.update((key, rope.get(key)) for key in ("rope_theta", "partial_rotary_factor"))
    kind = rope.get("rope_type", "default")
    if kind != "default":
        older["rope_scaling"] = {**rope, "type": kind}  # some models read the one name, some the other
    experts = mlx_experts_of(config.get("model_type"))
    if experts is not None and experts.renamed is not None and config.get(experts.renamed) is not None:
        older[experts.experts] = config[experts.renamed]
    return {**config, **{k: value for k, value in older.items() if value is not None and config.get(k) is None}}


def quantization_for(preset: Preset, exceptions: Mapping[str, Preset] = MappingProxyType({})) -> Quantization:
    """Return the quantization of a folder, as its reader would parse it; see `config_for`."""
    quantization = quantization_of(config_for(preset, None, (), exceptions))
    assert quantization is not None
    return quantization


def settings_of(preset: Preset, left: Sequence[str]) -> dict[str, Any]:
    """Return the quantization for ``config.json``; see `config_for`."""
    settings = next(family.settings for family in families() if family.engine == preset.engine)
    assert settings is not None
    return settings(preset, left)
