"""Small models with awkward weights, and what a folder for an engine holds, to compare with the engines' own tools."""

import hashlib
import json

import ml_dtypes
import numpy as np

from builders.models import BUILT_IN_SCHEMAS
from safeload.numpy import load_file, save_file

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# Widths of the usual model: whole blocks of every format. Those of the ragged model: of none but rows and flat blocks.
USUAL = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
RAGGED = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 36,
}
# Formats without a choice of shapes.
ANY_SHAPE = ("w8a8", "fp8_dynamic", "bnb_nf4", "bnb_fp4")


def matrix(rows, columns, seed):
    """Numbers that depend on nothing but the arguments; the first rows are awkward."""
    position = np.arange(rows * columns, dtype=np.uint64) + np.uint64(seed * 1_000_003)
    bits = (position * np.uint64(0x9E3779B97F4A7C15)) ^ (position >> np.uint64(7))
    bits = (bits * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(40)
    x = ((bits.astype(np.float32) / np.float32(1 << 23)) - np.float32(1)).reshape(rows, columns) * np.float32(0.04)
    x[1] = 0
    x[2] = 0.5
    x[3] *= np.float32(1e-6)
    x[4, ::16] *= 100
    x[5], x[6] = -np.abs(x[5]), np.abs(x[6])
    x[7, : columns // 2] = -0.0
    x[8] = np.round(x[8] * 64) / 64  # ties
    x[9] = np.linspace(-1, 1, columns, dtype=np.float32)
    x[10] *= np.float32(1e5)
    x[11, 1:] = 0
    return x


def tensors(dtype, widths=USUAL):
    """A Llama of one layer."""
    hidden, inner = widths["hidden_size"], widths["intermediate_size"]
    queries = widths["num_attention_heads"] * widths["head_dim"]
    keys = widths["num_key_value_heads"] * widths["head_dim"]
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (64, hidden),
        layer + "self_attn.q_proj.weight": (queries, hidden),
        layer + "self_attn.k_proj.weight": (keys, hidden),
        layer + "self_attn.v_proj.weight": (keys, hidden),
        layer + "self_attn.o_proj.weight": (hidden, queries),
        layer + "mlp.gate_proj.weight": (inner, hidden),
        layer + "mlp.up_proj.weight": (inner, hidden),
        layer + "mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (64, hidden),
    }
    result = {name: matrix(*shape, seed).astype(DTYPES[dtype]) for seed, (name, shape) in enumerate(shapes.items())}
    for name in ("model.norm.weight", layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight"):
        result[name] = np.ones(hidden, DTYPES[dtype])
    return result


def config(dtype, widths=USUAL):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **widths,
    }


def write_model(folder, dtype, widths=USUAL):
    folder.mkdir(parents=True)
    save_file(tensors(dtype, widths), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(dtype, widths)))
    (folder / "tokenizer.json").write_text("{}")
    return folder


_SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN = {**_SMALL, "moe_intermediate_size": 128, "num_experts": 3, "decoder_sparse_step": 1, "mlp_only_layers": []}
_MLA = {
    **_SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}
# Models with experts; their widths are whole blocks of every format.
EXPERTS = {
    "mixtral": {**_SMALL, "num_local_experts": 3, "intermediate_size": 128},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 128, "norm_topk_prob": False},
    "qwen3_moe": {**_QWEN, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "deepseek_v2": {
        **_MLA,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "mscale_all_dim": 0.7},
    },
    "deepseek_v3": {
        **_MLA,
        "q_lora_rank": 128,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
    },
}


def expert_model(kind):
    """Config and tensors of a model with experts, each alone; the weights are awkward where they have enough rows."""
    schema = BUILT_IN_SCHEMAS[kind]
    settings = {"architectures": [schema.architectures[0]], "model_type": kind, **EXPERTS[kind]}
    weights = {}
    for seed, tensor in enumerate(schema.expand(settings, ()).values()):
        if tensor.required:
            *rows, columns = tensor.shape
            values = np.ones(columns) if not rows else matrix(max(rows[0], 12), columns, seed)[-rows[0] :]
            uncast = tensor.name.endswith("e_score_correction_bias")
            weights[tensor.name] = values.astype(np.float32 if uncast else ml_dtypes.bfloat16)
    return settings, weights


def write_experts(folder, kind, *, fused=False):
    """Write a model with experts, which ``fused`` stores as transformers holds them in memory."""
    folder.mkdir(parents=True)
    settings, weights = expert_model(kind)
    save_file(fused_experts(weights) if fused else weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def fused_experts(weights):
    """The tensors of a model whose experts are fused per layer."""
    result, layers = {}, {}
    for name, array in weights.items():
        layer, found, rest = name.partition(".mlp.experts.")
        if not found:
            result[name] = array
            continue
        number, module = rest.split(".")[:2]
        layers.setdefault(layer, {}).setdefault(module, {})[int(number)] = array
    for layer, modules in layers.items():
        gate, up, down = (
            np.stack([modules[f"{name}_proj"][k] for k in range(len(modules["up_proj"]))])
            for name in ("gate", "up", "down")
        )
        result[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        result[f"{layer}.mlp.experts.down_proj"] = down
    return result


def described(path):
    """Dtype, shape and digest of each stored tensor."""
    return {
        name: [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()[:16]]
        for name, array in sorted(load_file(path).items())
    }
