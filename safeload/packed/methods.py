"""The known settings of each quantization method, one row per writer.

A key of a configuration either changes the values of weights, and the row lists the supported settings; or families
read it and compare it with shapes; or it does not affect weights. If any other key is set, the values are unknown.

Sources: the configuration classes of transformers 5.23, compressed-tensors 0.20 and 0.12, GPTQModel 7.7, AutoGPTQ 0.7,
optimum, autoawq 0.2.9, auto-round 0.16, nvidia-modelopt 0.47, amd-quark 0.13, mlx-lm 0.32, lmdeploy; published configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..base import packing

QUARK = "quark"
GGUF = "gguf"  # safeload's own, for ggml blocks in a safetensors file
AUTO_ROUND = ("auto-round", "intel/auto-round")
# The method of a config.json with a ``quant_algo`` under "quantization"; the keys are modelopt's.
TENSORRT = "TensorRT-LLM"


class Method(NamedTuple):
    """The settings of a quantization method."""

    # values of ``quant_method`` under which codes outside all families are an error of the checkpoint
    names: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]  # keys with an effect on weights, and their supported values in lower case
    read: tuple[str, ...] = ()  # keys for the families
    ignored: tuple[str, ...] = ()  # keys without an effect on weights
    # other values of ``quant_method``, or of its predecessors in early files; synonyms of a single name
    aliases: tuple[str, ...] = ()


# ---- keys shared by methods ----

# Module lists, activations, the KV cache, kernels, and the writer of the file.
_ANYWHERE = frozenset(
    (
        "quant_method", "quantization_method", "ignore", "ignored_layers", "modules_to_not_convert",
        "modules_to_convert", "exclude_modules", "exclude", "exclude_layers", "llm_int8_skip_modules", "skip_modules",
        "packed_modules_mapping", "dequantize", "run_compressed", "use_optimized_inference", "activation_scheme",
        "act_scheme", "input_activations", "output_activations", "kv_cache_scheme", "kv_cache_quant_algo",
        "kv_cache_dtype", "kv_cache_quant_targets", "kv_cache_bits", "producer", "provider", "tokenizer", "dataset",
        "lm_head", "backend", "meta", "is_checkpoint_fp8_serialized", "_load_in_4bit", "_load_in_8bit",
    )
)  # fmt: skip
_FP8_NAMES = (
    "fp8", "e4m3", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e4m3", "torch.float8_e4m3fn", "torch.float8_e5m2",
)  # fmt: skip
# Calibration of GPTQ and its relatives: keys of optimum, AutoGPTQ and GPTQModel.
_CALIBRATION = (
    "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "model_name_or_path",
    "model_file_base_name", "act_group_aware", "mse", "gptaq", "foem", "hessian", "mock_quantization", "fallback",
    "failsafe", "fail_safe", "moe", "offload_to_disk", "offload_to_disk_path", "pack_impl", "gc_mode", "telemetry",
    "activation", "hyb_act", "adapter", "device", "preprocessors", "parallel_packing", "batch_size", "pad_token_id",
    "use_cuda_fp16", "use_exllama", "disable_exllama", "max_input_length", "exllama_config", "cache_block_outputs",
    "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "cache_examples_on_gpu", "desc_act", "v2", "v2_alpha", "v2_memory_device", "awq_gemm_checkpoint", "quantizer",
    "wait_for_submodule_finalizers", "auto_forward_data_parallel", "dense_vram_strategy", "moe_vram_strategy",
    "export_nntr_module", "nsamples", "seqlen", "inside_layer_modules", "use_triton",
)  # fmt: skip
_LEGACY_GPTQ = ("quant_type", "format_version")
# auto-round adds its own keys to the configurations of all its formats.
_AUTO_ROUND = (
    "act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic", "amp", "batch_size",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "enable_torch_compile",
    "gradient_accumulate_steps", "iters", "lr", "low_gpu_mem_usage", "low_cpu_mem_usage", "minmax_lr", "nsamples",
    "quant_block_list", "scale_dtype", "seqlen", "supported_types", "static_attention_dtype", "static_kv_dtype",
    "static_attention_granularity", "static_kv_granularity", "super_bits", "super_group_size", "to_quant_block_names",
    "block_name_to_quantize", "autoround_version", "version", "attention_input_activations", "enable_alg_ext",
    "use_quant_input", "quant_lm_head", "momentum", "not_use_best_mse", "dynamic_max_gap", "n_samples", "sampler",
    "device", "device_map", "export_format", "disable_opt_rtn", "enable_adam", "enable_deterministic_algorithms",
    "model_dtype", "regex_config", "layer_config", "model_free",
)  # fmt: skip
_DATA_TYPES = (
    "int", "int_sym", "int_asym", "rtn_int_sym", "rtn_int_asym", "opt_rtn_int_sym", "opt_rtn_int_asym", "mx_fp",
    "mx_fp4", "mx_fp6", "mx_fp8", "mx_fp_rceil", "mx_fp4_rceil", "mx_fp8_rceil", "mx_fp4e2m1", "mx_fp6e2m3",
    "mx_fp8e4m3", "mx_fp8e5m2", "rtn_mx_fp", "opt_rtn_mx_fp", "mx_int", "mx_int4", "rtn_mx_int", "opt_rtn_mx_int",
    "nv_fp", "nv_fp4", "nv_fp4_with_static_gs", "nv_fp4_rtn", "rtn_nv_fp4", "opt_rtn_nv_fp4",
    "rtn_nv_fp4_with_static_gs", "opt_rtn_nv_fp4_with_static_gs", "fp", "fp8", "fp8_sym", "fp8_e4m3", "fp8_e5m2",
    "block_fp8", "block_fp8_sym", "block_fp8_e4m3", "float", "bf16", "bfloat16", "fp16", "float16",
)  # fmt: skip
_INT = ("int", "int_sym", "int_asym", "rtn_int_sym", "rtn_int_asym", "opt_rtn_int_sym", "opt_rtn_int_asym")
_QUANTO = ("int8", "float8", "int4", "int2")
_NONE: tuple[str, ...] = ()
# Any value of these keys means rotated weights.
_ROTATION = {"rotation": _NONE, "rotation_config": _NONE, "rotation_configs": _NONE, "spinquant_config": _NONE}

# ---- the table ----

_CT_FORMATS = (
    "dense", "fakequant", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "sparse-bitmask",
    "sparse-24-bitmask",
)  # fmt: skip
_ALGORITHMS = (
    "fp8", "fp8_per_channel_per_token", "fp8_pc_pt", "fp8_pb_wo", "fp8_pb_real", "nvfp4", "nvfp4_awq", "nvfp4_svd",
    "w4a16_nvfp4", "w4a8_nvfp4_fp8", "mxfp4", "mxfp8", "w4a8_mxfp4_fp8", "w8a16", "w8a8_sq_per_channel", "int8_sq",
    "int8_wo", "w4a16_awq", "w4a8_awq", "mixed_precision",
)  # fmt: skip

METHODS = (
    Method(
        ("fp8", "mxfp8", "fbgemm_fp8"),
        {
            "fmt": _FP8_NAMES,
            "quant_dtype": _FP8_NAMES,
            "format": _FP8_NAMES,
            "checkpoint_format": _FP8_NAMES,
            "method": ("fp8",),
            "scale_fmt": ("float", "float32", "fp32", "ue8m0", "e8m0"),
            "expert_dtype": ("fp8", "fp4"),
            "bits": ("8",),
            "weight_scale_semantics": ("inverse",),
            "weight_scale_method": ("tensor", "row", "block"),
            "data_type": _DATA_TYPES,
            **_ROTATION,
        },
        ("weight_block_size", "dynamic", "extra_config"),
        ("activation_scale_ub", "is_dynamic", "group_size", "sym", "pack_dtype", *_CALIBRATION, *_AUTO_ROUND),
        ("w8a8_fp8", "w8a8_int8", "blockwise_int8"),
    ),
    Method(("mxfp4",), {}),
    Method(
        ("compressed-tensors",),
        {
            "format": (*_CT_FORMATS, "marlin-24"),
            "fp8_dtype_flavor": ("float8_e4m3fn",),
            "data_type": _DATA_TYPES,
            **_ROTATION,
        },
        ("config_groups", "sparsity_config", "transform_config", "bits", "group_size", "sym"),
        (
            "quantization_status", "global_compression_ratio", "version", "moe_sparsity_config", *_AUTO_ROUND,
        ),
        ("compressed_tensors", "sparseml", *_CT_FORMATS, "marlin-24"),
    ),
    Method(
        ("modelopt",),
        {"quant_algo": _ALGORITHMS, "moe_quant_algo": _ALGORITHMS, "quant_type": _ALGORITHMS},
        (
            "group_size", "config_groups", "weights", "quantized_layers", "has_zero_point", "pre_quant_scale",
            "lora_rank",
        ),
        ("weight_block_size", "version"),
        (TENSORRT, "modelopt_fp4", "modelopt_fp8", "modelopt_mixed"),
    ),
    Method(
        ("gptq",),
        {
            "checkpoint_format": ("gptq", "gptq_v2"),
            "format": ("gptq", "gptq_v2"),
            "pack_dtype": ("int32", "torch.int32"),
            "method": ("gptq",),
            "data_type": _INT,
            "is_marlin_format": _NONE,
            **_ROTATION,
        },
        ("bits", "group_size", "sym", "dynamic", "w_bit", "q_group_size"),
        (*_CALIBRATION, *_AUTO_ROUND, *_LEGACY_GPTQ),
    ),
    Method(
        ("awq",),
        {
            "version": ("gemm", "gemv"),
            "format": ("gemm", "gemv", "awq"),
            "checkpoint_format": ("gemm", "gemv", "awq"),
            "method": ("awq",),
            "data_type": _INT,
            "pack_dtype": ("int32", "torch.int32"),
            **_ROTATION,
        },
        ("bits", "group_size", "zero_point", "sym", "w_bit", "q_group_size", "pack_method", "export", "dynamic"),
        (
            "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "global_quant_config", "layer_quant_config",
            "algo_config",
            *_CALIBRATION, *_AUTO_ROUND,
        ),
    ),
    Method(
        AUTO_ROUND,
        {"data_type": _DATA_TYPES, "fmt": _FP8_NAMES, "weight_zp_dtype": _NONE, **_ROTATION},
        ("bits", "group_size", "sym", "packing_format", "extra_config", "weight_block_size", "zero_point"),
        (*_AUTO_ROUND, *_CALIBRATION, "train_bs", "seed"),
    ),
    Method(
        ("bitsandbytes",),
        {
            "bnb_4bit_quant_type": ("nf4", "fp4"),
            "format": ("nf4", "fp4", "int8", "bitsandbytes"),
            "checkpoint_format": ("nf4", "fp4", "int8", "bitsandbytes"),
            "method": ("bitsandbytes",),
            **_ROTATION,
        },
        ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant", "bits", "block_size", "compress_statistics"),
        (
            "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_blocksize", "llm_int8_threshold",
            "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "group_size", "sym", "dynamic",
            "pack_dtype", *_CALIBRATION,
        ),
        ("bitsandbytes_4bit", "bitsandbytes_8bit"),
    ),
    Method(
        ("bitnet",),
        {"linear_class": ("bitlinear", "autobitlinear"), "quantization_mode": ("offline", "online")},
        (),
        ("use_rms_norm", "rms_norm_eps"),
    ),
    Method(
        ("mlx",),
        {"mode": ("affine", "mxfp4", "nvfp4", "mxfp8")},
        ("bits", "group_size", "global_scale"),
        ("quantize_input", "linear_class"),
    ),
    Method(("metal",), {}, ("bits", "group_size")),
    Method(("gemma",), {}, ("num_bits", "module_quant_configs"), ("quantize_embeddings",)),
    Method(
        (QUARK,),
        {"weight_format": ("real_quantized",)},
        ("global_quant_config", "layer_quant_config", "layer_type_quant_config", "algo_config", "export"),
        (
            "kv_cache_quant_config", "kv_cache_post_rope", "kv_cache_group", "min_kv_scale", "softmax_quant_spec",
            "quant_mode", "version", "shared_scale_groups", "sync_moe_expert_input_amax", "keep_prequantized_layers",
            "weight_merge_groups", "pack_method",
        ),
    ),
    Method((), {}, aliases=("nvfp4",)),  # transformers' own: scales in kernel order
    Method((), {}, aliases=(GGUF,)),
    # Transformers and, second, diffusers.
    Method((), dict.fromkeys(("weights", "weights_dtype"), _QUANTO), (), ("activations",), ("quanto",)),
    Method(
        (),
        {},
        ("quant_type", "quant_type_kwargs"),
        ("include_input_output_embeddings", "untie_embedding_weights"),
        ("torchao",),
    ),
)  # fmt: skip

# The setting in a "sparsity_config" of compressed-tensors that decides how values are stored.
SPARSITY = Method((), {"format": (*_CT_FORMATS, "marlin-24")})

# Settings of the weights of a config group: compressed-tensors, and modelopt with its own keys.
WEIGHTS = Method(
    (),
    {
        "type": ("int", "float"),
        "strategy": ("tensor", "channel", "group", "block", "tensor_group", "token"),
        "format": (*_CT_FORMATS, "marlin-24"),
        "actorder": ("weight", "static", "group", "dynamic", "true"),
        "dynamic": _NONE,
    },
    ("num_bits", "symmetric", "group_size", "block_structure"),
    ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mx"),
)
# Quark's settings of a tensor; ``dtype`` is compared with the dtype of the codes.
SPEC = Method(
    (),
    {
        "qscheme": ("per_tensor", "per_channel", "per_group", "per_block"),
        "scale_format": ("float32", "float16", "bfloat16", "float", "e8m0", "e4m3", "e5m3"),
        "scale_type": ("float", "float32", "float16", "bfloat16", "pof2", "float8_e8m0fnu"),
        "zero_point_type": ("int32", "float32", "int8"),
    },
    ("dtype", "ch_axis", "group_size", "block_size", "symmetric"),
    (
        "is_dynamic", "observer_cls", "round_method", "is_scale_quant", "mx_element_dtype", "enable_buffer_reuse",
        "max_input_numel", "scale_calculation_mode", "percentile", "qat_spec",
    ),
)  # fmt: skip

# Quark's dtypes of codes: the storage dtypes, the bits of a code, and the numbers that codes represent.
QUARK_DTYPES: Mapping[str, tuple[frozenset[str], int, str]] = {
    "fp8_e4m3": (frozenset(("F8_E4M3", "F8_E4M3FNUZ")), 8, ""),
    "fp8_e5m2": (frozenset(("F8_E5M2", "F8_E5M2FNUZ")), 8, ""),
    "int8": (frozenset(("I8",)), 8, "I8"),
    "uint8": (frozenset(("U8",)), 8, "U8"),
    "int4": (frozenset(("I32",)), 4, "signed"),
    "uint4": (frozenset(("I32",)), 4, "unsigned"),
    "fp4": (frozenset(("U8",)), 4, "e2m1"),
    "fp6_e2m3": (frozenset(("U8",)), 6, "e2m3"),
    "fp6_e3m2": (frozenset(("U8",)), 6, "e3m2"),
}
# Quark's orders of the codes in a word, by ``pack_method``.
QUARK_ORDERS = {"reorder": packing.WORDS, "order": packing.ROWS}

_BY_NAME = {name: row for row in METHODS for name in (*row.names, *row.aliases)}
COVERED = frozenset(name for row in METHODS for name in row.names)
# Formats and algorithms of covered methods without a family.
NOT_COVERED = frozenset(("marlin-24", "W4A16_AWQ", "W4A8_AWQ", "NVFP4_SVD", "MXFP4", "W4A8_MXFP4_FP8"))


def method_of(name: str) -> Method | None:
    """Return the settings of a method, or None if the method is unknown."""
    return _BY_NAME.get(name)


def canonical_name(name: str) -> str:
    """Return the table's name of a method: vLLM ignores case, and accepts more names than writers use."""
    lower = name.lower()
    row = _BY_NAME.get(lower)
    if row is None:
        return name
    return row.names[0] if lower in row.aliases and len(row.names) == 1 else lower


def unknown_setting(settings: Mapping[str, Any], method: Method) -> tuple[str, Any] | None:
    """Return the first key and value with an unknown effect on weights, or None."""
    for key, value in settings.items():
        if value is None or value is False or value in ("", [], {}):
            continue
        supported = method.values.get(key)
        if supported is None:
            if key not in _ANYWHERE and key not in method.read and key not in method.ignored:
                return key, value
        elif not isinstance(value, (str, int, float)) or str(value).lower() not in supported:
            return key, value
    return None
