"""The engines that load quantized folders: what each leaves unquantized, and the quantization in its ``config.json``.

Sources: llmcompressor 0.14 ``entrypoints/model_free``; compressed-tensors 0.19 ``quantization/quant_scheme.py``;
transformers 5.17 ``utils/quantization_config.py``; mlx-lm 0.32 ``utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..base import dtypes, packing
from ..base.preset import BITSANDBYTES, COMPRESSED, FP8, MLX, Preset
from ..base.text import show
from .quantization import MLX_KEY, QUANTIZATION, Quantization, quantization_of, without_quantization

# Modules that choose experts. Engines compute these in full precision, although they are linear.
_ROUTER = re.compile(r"\.(?:gate|router|shared_expert_gate)\.weight\Z")
# Experts, which transformers holds as 3-D parameters; bitsandbytes quantizes only linear modules.
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
_STACKED = re.compile(r"\.(?:switch_mlp\.[a-z_]+|self_attn\.embed_q|self_attn\.unembed_out)\.weight\Z")
_FUSED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)\Z")

# ``model_type`` of models whose matrices are all linear modules under the names of their files.
_DENSE = frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"))
_EXPERTS = frozenset(("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"))


_USUAL = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}


class MlxExperts(NamedTuple):
    """How mlx-lm stores and quantizes the experts of a model; source: its ``models``."""

    experts: str  # key of config.json: their number
    renamed: str | None = None  # that key in transformers 5
    block: str = "mlp"  # module of a layer that holds the experts
    modules: Mapping[str, str] = MappingProxyType(_USUAL)  # stack of each module
    router: str | None = None  # format of routers; None for that of other modules
    keeps_routers: bool = False  # True if routers are not linear modules
    in_every_layer: bool = False  # True if no layer can be without experts
    split_heads: bool = False  # True to divide ``kv_b_proj`` by heads
    dropped: str | None = None  # prefix of tensors that are left out
    uncast: str | None = None  # suffix of tensors that keep their dtype


_ROUTER_FORMAT = "mlx8"  # groups of 64
MLX_EXPERTS: Mapping[str, MlxExperts] = {
    "mixtral": MlxExperts(
        "num_local_experts",
        block="block_sparse_moe",
        modules={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
        in_every_layer=True,
    ),
    "qwen2_moe": MlxExperts("num_experts", in_every_layer=True),
    "qwen3_moe": MlxExperts("num_experts", "num_local_experts", router=_ROUTER_FORMAT),
    "deepseek_v2": MlxExperts("n_routed_experts", keeps_routers=True),
    "deepseek_v3": MlxExperts(
        "n_routed_experts",
        keeps_routers=True,
        split_heads=True,
        dropped="model.layers.61.",
        uncast=".e_score_correction_bias",
    ),
}

# ``model_type`` of models whose tensors mlx-lm 0.32.2 stores as transformers does: their classes have no ``sanitize``,
# or only leave out tensors.
_SAME_IN_MLX = frozenset(
    (
        *(
            "afm7",
            "cohere",
            "cohere2",
            "ernie4_5",
            "exaone",
            "exaone4",
            "gemma",
            "gemma2",
            "gemma3_text",
            "glm",
            "glm4",
        ),
        *("gpt_bigcode", "granite", "helium", "hunyuan_v1_dense", "internlm2", "internlm3", "iquestcoder", "llama"),
        *("mimo", "minicpm3", "ministral3", "mistral", "nanbeige", "nanochat", "nemotron", "nemotron-nas", "olmo"),
        *("olmo2", "olmo3", "openelm", "phi", "phi3", "phi3small", "plamo", "qwen", "qwen2", "qwen3", "seed_oss"),
        *("smollm3", "stablelm", "starcoder2", "telechat3", "xverse", "youtu_llm"),
    )
)
# Models with experts that it stacks, and otherwise the same tensors. The names of the stacks show it.
_STACKED_IN_MLX = frozenset(
    (
        *("afmoe", "deepseek", "deepseek_v2", "dots1", "glm4_moe", "mellum", "mixtral", "olmoe", "phimoe"),
        *("qwen2_moe", "qwen3_moe"),
    )
)


def changed_by_mlx(config: Mapping[str, Any] | None) -> bool:
    """Return True if mlx-lm may store other values, axes or names for a model than transformers."""
    model_type = (config or {}).get("model_type")
    known = _SAME_IN_MLX | _STACKED_IN_MLX | ENGINES[MLX].model_types
    return isinstance(model_type, str) and model_type not in known


def not_as_in_mlx(model_type: object) -> str:
    """Return why a model's tensors of MLX are not those of transformers."""
    return (
        f"mlx-lm does not store {show(model_type)} as transformers does (norms + 1, axes of convolutions, names), and "
        "safeload does not know the differences"
    )


# The version of compressed-tensors whose configuration this is.
_VERSION = "0.19.0"


class Engine(NamedTuple):
    """What loads a folder."""

    title: str  # for messages
    model_types: frozenset[str]  # supported models
    quantizes_ends: bool = False  # True to quantize embeddings and the head
    quantizes_experts: bool = True
    casts: bool = False  # True to give unquantized tensors the dtype of the weights too
    always_indexed: bool = False  # True to write an index even for a single shard
    metadata: str = "pt"  # "format" in the header of each file
    shard_size: int = 5_000_000_000  # default limit in bytes
    dropped: tuple[str, ...] = ()  # suffixes of stored tensors that the engine computes itself


ENGINES = {
    COMPRESSED: Engine("vLLM, SGLang and transformers", _DENSE | _EXPERTS),
    FP8: Engine("vLLM, SGLang and transformers", _DENSE | _EXPERTS),
    BITSANDBYTES: Engine("transformers and vLLM", _DENSE | _EXPERTS, quantizes_experts=False),
    MLX: Engine(
        "mlx-lm",
        _DENSE | MLX_EXPERTS.keys(),
        quantizes_ends=True,
        casts=True,
        always_indexed=True,
        metadata="mlx",
        shard_size=5 << 30,
        dropped=(".rotary_emb.inv_freq",),
    ),
}


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

# Modules that engines merge into a single matrix, so that they must share NVFP4's global scale.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv_a_with_mqa"),
)
_PARTNERS = {name: names for names in _FUSED for name in names}


def partners_of(name: str) -> tuple[str, ...]:
    """Return the names of the weights that share a global scale with a weight, itself included."""
    parent, _, module = name.removesuffix(".weight").rpartition(".")
    return tuple(f"{parent}.{other}.weight" for other in _PARTNERS.get(module, ())) or (name,)


# ---- config.json ----


def config_for(
    preset: Preset,
    config: Mapping[str, Any] | None,
    left: Sequence[str],
    exceptions: Mapping[str, Preset] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the ``config.json`` of a folder.

    Args:
        config: the config of the source.
        left: names of the linear modules that stay unquantized.
        exceptions: modules with another format of the engine.
    """
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
    model_type = config.get("model_type")
    experts = MLX_EXPERTS.get(model_type) if isinstance(model_type, str) else None
    if experts is not None and experts.renamed is not None and config.get(experts.renamed) is not None:
        older[experts.experts] = config[experts.renamed]
    return {**config, **{k: value for k, value in older.items() if value is not None and config.get(k) is None}}


def quantization_for(preset: Preset, exceptions: Mapping[str, Preset] = MappingProxyType({})) -> Quantization:
    """Return the quantization of a folder, as its reader would parse it.

    Args:
        exceptions: see `config_for`.
    """
    quantization = quantization_of(config_for(preset, None, (), exceptions))
    assert quantization is not None
    return quantization


def settings_of(preset: Preset, left: Sequence[str]) -> dict[str, Any]:
    """Return the quantization for ``config.json``.

    Args:
        left: see `config_for`.
    """
    if preset.engine == MLX:
        mode = preset.name.removeprefix("mlx-") if preset.name.startswith("mlx-") else "affine"
        return {"group_size": preset.group, "bits": preset.bits, "mode": mode}
    if preset.engine == FP8:
        return {
            "activation_scheme": "dynamic",
            "modules_to_not_convert": list(left),
            "quant_method": "fp8",
            "weight_block_size": [preset.row_block, preset.group],
        }
    if preset.engine == BITSANDBYTES:
        return _bitsandbytes(preset, left)
    return _compressed(preset, left)


def _bitsandbytes(preset: Preset, left: Sequence[str]) -> dict[str, Any]:
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": preset.name.removeprefix("bnb_"),
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(left) or None,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


def _compressed(preset: Preset, left: Sequence[str]) -> dict[str, Any]:
    kind = "float" if _is_float(preset) else "int"
    scale_dtype = preset.parts[packing.SCALE].dtype
    grouped = preset.group is not None and preset.row_block == 1
    strategy = "tensor_group" if packing.GLOBAL in preset.parts else "group" if grouped else "channel"
    weights = _arguments(
        kind,
        preset.bits,
        "block" if preset.row_block > 1 else strategy,
        group_size=preset.group if grouped else None,
        block_structure=[preset.row_block, preset.group] if preset.row_block > 1 else None,
        symmetric=packing.ZERO not in preset.parts,
        zp_dtype="torch.int8" if packing.ZERO in preset.parts else None,
        scale_dtype=None if scale_dtype is None else f"torch.{dtypes.BY_CODE[scale_dtype].name}",
    )
    activations = None
    if packing.SHAPE not in preset.parts and preset.bits == 8:
        by = {"group_size": 128} if preset.row_block > 1 else {}
        activations = _arguments(kind, 8, "group" if by else "token", dynamic=True, **by)
    form = _format(preset, kind)
    group = {
        "format": form,
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": None,
        "ignore": list(left),
        "kv_cache_scheme": None,
        "quant_method": COMPRESSED,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": _VERSION,
    }


def _arguments(kind: str, bits: int, strategy: str, **fields: Any) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": None,
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
        "zp_dtype": None,
        **fields,
    }


def _is_float(preset: Preset) -> bool:
    return preset.parts[packing.CODES].dtype in ("F8_E4M3", "U8")


def _format(preset: Preset, kind: str) -> str:
    if packing.SHAPE in preset.parts:
        return "pack-quantized"
    if preset.bits == 8:
        return f"{kind}-quantized"
    return f"{preset.name.removesuffix('a16')}-pack-quantized"
