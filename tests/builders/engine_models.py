"""Small models with awkward weights, and what a folder for an engine holds, to compare with the engines' own tools."""

import hashlib
import json

import ml_dtypes
import numpy as np

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


def described(path):
    """Dtype, shape and digest of each stored tensor."""
    return {
        name: [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()[:16]]
        for name, array in sorted(load_file(path).items())
    }
