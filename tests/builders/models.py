"""Configs of published models, and small models of each schema: for tests that need a whole one."""

import json

import ml_dtypes
import numpy as np

from builders.inside import model_families as families
from safeload.numpy import save_file

# Schema, config, tensors that must be there, and parameters as the model's publisher or its framework counts them.
PUBLISHED = {
    "Llama-2-7B": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        291,
        6_738_415_616,
    ),
    "Llama-3.2-1B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        146,
        1_235_814_400,
    ),
    "Llama-3-8B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        291,
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        "mistral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        291,
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        290,
        494_032_768,
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        310,
        596_049_920,
    ),
    "Gemma-2-2B": (
        "gemma2",
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
        288,
        2_614_341_888,
    ),
    "Gemma-3-1B": (
        "gemma3",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
        },
        340,
        999_885_952,
    ),
    "Phi-3-mini": (
        "phi3",
        {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
        195,
        3_821_079_552,
    ),
    "GPT-2": (
        "gpt2",
        {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None},
        148,
        124_439_808,
    ),
    "BERT-base": (
        "bert",
        {
            "vocab_size": 30522,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
        },
        197,
        109_482_240 - 768 * 768 - 768,  # counted with the pooler, which many files leave out
    ),
    "BitNet": ("bitnet", None, 291, 6_738_415_616),
    "Moondream 2": ("moondream2", None, 36, None),
}

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "head_dim": 32, "moe_intermediate_size": 32, "num_experts": 4}
_MLA = {
    **_SMALL,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_PATCHES = {**_SMALL, "image_size": 8, "patch_size": 4}
_CLIP = {"text_config": {**_SMALL, "max_position_embeddings": 32}, "vision_config": _PATCHES, "projection_dim": 32}
_WHISPER = {
    "vocab_size": 96,
    "d_model": 64,
    "num_mel_bins": 8,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
# The schemas that come with safeload.
BUILT_IN_SCHEMAS = {name: family.schema for name, family in families.with_schema().items()}
_ARCHITECTURES = {name: found.architectures[0] for name, found in BUILT_IN_SCHEMAS.items() if found.architectures}

# Schema and config of small models, one for each schema and for what a config may change.
SMALL = {
    "llama": ("llama", _SMALL),
    "llama-gqa": ("llama", _GROUPED),
    "llama-tied": ("llama", {**_GROUPED, "head_dim": 32, "tie_word_embeddings": True}),
    "llama-bias": ("llama", {**_GROUPED, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", _GROUPED),
    "qwen2": ("qwen2", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 32}),
    "gemma2": ("gemma2", {**_GROUPED, "head_dim": 32}),
    "gemma3": ("gemma3", {**_GROUPED, "head_dim": 32}),
    "phi3": ("phi3", _GROUPED),
    "gpt2": ("gpt2", {"vocab_size": 96, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_inner": None}),
    "bert": ("bert", {**_SMALL, "max_position_embeddings": 32}),
    "bitnet": ("bitnet", _SMALL),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "deepseek_v2": ("deepseek_v2", {**_MLA, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "gpt_oss": ("gpt_oss", {**_GROUPED, "head_dim": 32, "num_local_experts": 4}),
    "t5": ("t5", {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}),
    "vit": ("vit", _PATCHES),
    "clip": ("clip", _CLIP),
    "clip_text": ("clip_text", _CLIP["text_config"]),
    "clip_vision": ("clip_vision", _PATCHES),
    "whisper": ("whisper", _WHISPER),
    "llama_original": (
        "llama_original",
        {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32, "vocab_size": 96},
    ),
    "moondream2": (
        "moondream2",
        {
            "text": {"dim": 64, "ff_dim": 128, "n_layers": 3, "vocab_size": 96},
            "vision": {
                "enc_dim": 32,
                "enc_ff_dim": 64,
                "enc_n_layers": 2,
                "enc_patch_size": 2,
                "crop_size": 8,
                "proj_inner_dim": 64,
                "proj_out_dim": 64,
            },
        },
    ),
}


def small(kind, dtype=ml_dtypes.bfloat16):
    """Config and tensors of a small model: what must be there, with values as trained ones are."""
    name, sizes = SMALL[kind]
    family = families.family_files()[name]
    config = dict(sizes)
    if not family.own.get("keys"):
        config["model_type"] = next(iter(family.model_types), name)
    if name in _ARCHITECTURES:
        config["architectures"] = [_ARCHITECTURES[name]]
    rng = np.random.default_rng(5)
    tensors = {}
    for wanted in family.schema.expand(config, ()).values():
        if wanted.required:
            values = rng.standard_normal(wanted.shape, np.float32) * np.float32(0.02)
            tensors[wanted.name] = (values + (wanted.entry.role == "norm")).astype(dtype)
    return config, tensors


def write_folder(folder, config, tensors, shards=2):
    """The model as safetensors shards with an index and a config.json."""
    names = sorted(tensors)
    weight_map = {}
    for k in range(shards):
        part = names[k * len(names) // shards : (k + 1) * len(names) // shards]
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, durable=False)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def moondream(text=2, vision=3):
    """The names of the original checkpoint with small shapes."""
    shapes = {
        "model.text.wte": (20, 8),
        "model.text.lm_head.weight": (20, 8),
        "model.text.lm_head.bias": (20,),
        "model.text.post_ln.weight": (8,),
        "model.text.post_ln.bias": (8,),
        "model.vision.patch_emb.weight": (6, 12),
        "model.vision.patch_emb.bias": (6,),
        "model.vision.pos_emb": (1, 5, 6),
        "model.vision.post_ln.weight": (6,),
        "model.vision.post_ln.bias": (6,),
        "model.vision.proj_mlp.fc1.weight": (16, 12),
        "model.vision.proj_mlp.fc1.bias": (16,),
        "model.vision.proj_mlp.fc2.weight": (8, 16),
        "model.vision.proj_mlp.fc2.bias": (8,),
        "model.region.coord_encoder.weight": (3, 3),
    }
    for tower, count, width, norms in (("text", text, 8, ["ln"]), ("vision", vision, 6, ["ln1", "ln2"])):
        for k in range(count):
            base = f"model.{tower}.blocks.{k}."
            for part, rows, columns in (
                ("attn.qkv", 3 * width, width),
                ("attn.proj", width, width),
                ("mlp.fc1", 4 * width, width),
                ("mlp.fc2", width, 4 * width),
            ):
                shapes |= {f"{base}{part}.weight": (rows, columns), f"{base}{part}.bias": (rows,)}
            for norm in norms:
                shapes |= {f"{base}{norm}.weight": (width,), f"{base}{norm}.bias": (width,)}
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
