"""Makes the fixtures again: configs, and names and shapes of the tensors, as transformers writes them.

    python -m venv v && v/bin/pip install torch==2.13.0 transformers==5.23.0
    cd tests/data/architectures && v/bin/python make.py

Each case is a model of a few thousand parameters whose sizes all differ, so that a wrong one shows. It is saved with
``save_pretrained``; the header of the file gives names and shapes. ``published.json`` has parameter counts of models
with the sizes of published ones, made on torch's ``meta`` device, which has no values.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

HERE = Path(__file__).parent

HEADS = ("ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEAD_DIM = {**GROUPED, "head_dim": 10}
GEMMA_4_UNIFIED = {
    **HEAD_DIM,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 12,
}
GEMMA_4 = {**GEMMA_4_UNIFIED, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 90}
MOE = {**HEAD_DIM, "moe_intermediate_size": 14, "num_experts": 3, "num_experts_per_tok": 2}
QWEN2_MOE = {**MOE, "shared_expert_intermediate_size": 18}
QWEN2_MOE.pop("head_dim")
LLAMA_4 = {**HEAD_DIM, "intermediate_size": 14, "intermediate_size_mlp": 40, "num_local_experts": 3}
ERNIE_MOE = {**GROUPED, "moe_intermediate_size": 14, "moe_num_experts": 3, "moe_k": 2, "moe_num_shared_experts": 1}
GRANITE_MOE = {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2}
MLA = {
    **SIZES,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 14,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
INTERLEAVED = ["sparse", "dense", "sparse"]
NEMOTRON_H = {
    **HEAD_DIM,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "ssm_state_size": 7,
    "conv_kernel": 3,
    "n_routed_experts": 3,
    "moe_intermediate_size": 14,
    "moe_shared_expert_intermediate_size": 18,
}
LFM2 = {**GROUPED, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
LFM2_MOE = {"num_dense_layers": 1, "num_experts": 3, "moe_intermediate_size": 14, "num_experts_per_tok": 2}
GRANITE_HYBRID = {
    **GROUPED,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 18,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 7,
    "mamba_d_conv": 3,
}
FALCON_H1 = {
    **HEAD_DIM,
    "mamba_d_ssm": 30,
    "mamba_n_heads": 6,
    "mamba_d_head": 5,
    "mamba_n_groups": 2,
    "mamba_d_state": 7,
    "mamba_d_conv": 3,
}
MAMBA = {"vocab_size": 96, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 7, "conv_kernel": 3}
MAMBA2 = {**MAMBA, "num_heads": 6, "head_dim": 8, "n_groups": 2}
MOE_LAYERS = {
    key: MLA[key] for key in ("num_hidden_layers", "moe_intermediate_size", "n_routed_experts", "n_shared_experts")
}
BERT = {**SIZES, "max_position_embeddings": 34, "type_vocab_size": 3}
GPT2 = {"vocab_size": 96, "n_positions": 34, "n_embd": 24, "n_layer": 2, "n_head": 4}
GPT2_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
T5 = {
    "vocab_size": 96,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 7,
    "decoder_start_token_id": 0,
}
VIT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}
CLIP_TEXT = {**SIZES, "max_position_embeddings": 11, "projection_dim": 18}
CLIP_VISION = {**VIT, "hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 3, "projection_dim": 18}
CLIP = {"text_config": CLIP_TEXT, "vision_config": CLIP_VISION, "projection_dim": 18}
WHISPER = {
    "vocab_size": 96,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 44,
    "num_mel_bins": 9,
    "max_source_positions": 30,
    "max_target_positions": 13,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
LABELS = {"num_labels": 5}
DELTA_NET = {
    **HEAD_DIM,
    "num_hidden_layers": 5,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 9,
    "linear_value_head_dim": 11,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
DELTA_NET_MOE = {
    **DELTA_NET,
    **QWEN2_MOE,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
}

# Family: (class of the config, its cases: name to (classes of models, arguments of the config)).
FAMILIES = {
    "llama": (
        "LlamaConfig",
        {
            "": ([f"Llama{head}" for head in HEADS], {**GROUPED, **LABELS}),
            "tied": (["LlamaForCausalLM"], {**GROUPED, "tie_word_embeddings": True, "head_dim": 10}),
            "biases": (["LlamaForCausalLM"], {**GROUPED, "attention_bias": True, "mlp_bias": True}),
            "two labels": (["LlamaForSequenceClassification"], GROUPED),
        },
    ),
    "mistral": ("MistralConfig", {"": ([f"Mistral{head}" for head in HEADS], {**HEAD_DIM, **LABELS})}),
    "ministral3": ("Ministral3Config", {"": ([f"Ministral3{head}" for head in HEADS], {**HEAD_DIM, **LABELS})}),
    "llama4": (
        "Llama4TextConfig",
        {
            "": (["Llama4ForCausalLM", "Llama4TextModel"], LLAMA_4),
            "biases": (
                ["Llama4ForCausalLM"],
                {**LLAMA_4, "interleave_moe_layer_step": 2, "attention_bias": True, "tie_word_embeddings": True},
            ),
            "listed": (["Llama4ForCausalLM"], {**LLAMA_4, "moe_layers": [0]}),
            "dense": (["Llama4ForCausalLM"], {**LLAMA_4, "moe_layers": []}),
        },
    ),
    "qwen2": (
        "Qwen2Config",
        {
            "": ([f"Qwen2{head}" for head in HEADS], {**GROUPED, **LABELS}),
            "tied": (["Qwen2ForCausalLM"], {**GROUPED, "tie_word_embeddings": True}),
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "": ([f"Qwen3{head}" for head in HEADS], {**HEAD_DIM, **LABELS}),
            "biases": (["Qwen3ForCausalLM"], {**HEAD_DIM, "attention_bias": True, "tie_word_embeddings": True}),
        },
    ),
    "qwen2_vl": ("Qwen2VLTextConfig", {"": (["Qwen2VLTextModel"], GROUPED)}),
    "qwen2_5_vl": ("Qwen2_5_VLTextConfig", {"": (["Qwen2_5_VLTextModel"], GROUPED)}),
    "qwen3_vl": (
        "Qwen3VLTextConfig",
        {
            "": (["Qwen3VLTextModel"], HEAD_DIM),
            "biases": (["Qwen3VLTextModel"], {**HEAD_DIM, "attention_bias": True}),
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeTextConfig",
        {
            "": (["Qwen3VLMoeTextModel"], MOE),
            "dense layers": (["Qwen3VLMoeTextModel"], {**MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "": ([f"Gemma2{head}" for head in HEADS[:4]], {**HEAD_DIM, **LABELS}),
            "biases": (["Gemma2ForCausalLM"], {**HEAD_DIM, "attention_bias": True, "tie_word_embeddings": False}),
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "": (
                ["Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3TextForSequenceClassification"],
                {**HEAD_DIM, **LABELS},
            ),
            "biases": (["Gemma3ForCausalLM"], {**HEAD_DIM, "attention_bias": True, "tie_word_embeddings": False}),
        },
    ),
    "cohere": (
        "CohereConfig",
        {
            "": (["CohereForCausalLM", "CohereModel"], GROUPED),
            "norms": (
                ["CohereForCausalLM"],
                {**GROUPED, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
            ),
        },
    ),
    "cohere2": (
        "Cohere2Config",
        {
            "": (["Cohere2ForCausalLM", "Cohere2Model"], GROUPED),
            "biases": (["Cohere2ForCausalLM"], {**GROUPED, "attention_bias": True, "tie_word_embeddings": False}),
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "": (["Gemma4ForCausalLM", "Gemma4TextModel"], {**GEMMA_4, "num_kv_shared_layers": 2}),
            "experts": (
                ["Gemma4ForCausalLM"],
                {
                    **GEMMA_4,
                    "hidden_size_per_layer_input": 0,
                    "enable_moe_block": True,
                    "num_experts": 3,
                    "top_k_experts": 2,
                    "moe_intermediate_size": 14,
                },
            ),
            "biases": (
                ["Gemma4ForCausalLM"],
                {
                    **GEMMA_4,
                    "attention_bias": True,
                    "tie_word_embeddings": False,
                    "attention_k_eq_v": True,
                    "num_global_key_value_heads": 1,
                    "use_double_wide_mlp": True,
                    "num_kv_shared_layers": 2,
                },
            ),
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedTextConfig",
        {
            "": (["Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"], GEMMA_4_UNIFIED),
            "kinds": (["Gemma4UnifiedForCausalLM"], {**GEMMA_4_UNIFIED, "num_hidden_layers": 7, "layer_types": None}),
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "": ([f"Phi3{head}" for head in HEADS[:4]], {**GROUPED, **LABELS}),
            "tied": (["Phi3ForCausalLM"], {**GROUPED, "tie_word_embeddings": True}),
        },
    ),
    "bitnet": ("BitNetConfig", {"": (["BitNetForCausalLM", "BitNetModel"], GROUPED)}),
    "mixtral": (
        "MixtralConfig",
        {
            "": ([f"Mixtral{head}" for head in HEADS], {**GROUPED, "num_local_experts": 3, **LABELS}),
            "tied": (
                ["MixtralForCausalLM"],
                {**HEAD_DIM, "num_local_experts": 3, "tie_word_embeddings": True},
            ),
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "": ([f"Qwen2Moe{head}" for head in HEADS], {**QWEN2_MOE, **LABELS}),
            "dense layers": (
                ["Qwen2MoeForCausalLM"],
                {**QWEN2_MOE, "num_hidden_layers": 5, "mlp_only_layers": [0, 3], "decoder_sparse_step": 2},
            ),
            "no experts": (["Qwen2MoeForCausalLM"], {**QWEN2_MOE, "num_experts": 0}),
            "no biases": (["Qwen2MoeForCausalLM"], {**QWEN2_MOE, "qkv_bias": False, "tie_word_embeddings": True}),
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "": ([f"Qwen3Moe{head}" for head in HEADS], {**MOE, **LABELS}),
            "dense layers": (
                ["Qwen3MoeForCausalLM"],
                {
                    **MOE,
                    "num_hidden_layers": 5,
                    "mlp_only_layers": [1],
                    "decoder_sparse_step": 2,
                    "attention_bias": True,
                    "tie_word_embeddings": True,
                },
            ),
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "": (
                ["Qwen3_5ForCausalLM", "Qwen3_5TextModel", "Qwen3_5TextForSequenceClassification"],
                {**DELTA_NET, **LABELS},
            ),
            "biases": (["Qwen3_5ForCausalLM"], {**DELTA_NET, "attention_bias": True, "tie_word_embeddings": True}),
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {"": (["Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"], DELTA_NET_MOE)},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "": ([f"Qwen3Next{head}" for head in HEADS], {**DELTA_NET_MOE, **LABELS}),
            "dense layers": (["Qwen3NextForCausalLM"], {**DELTA_NET_MOE, "mlp_only_layers": [1]}),
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "": (
                ["DeepseekV2ForCausalLM", "DeepseekV2Model", "DeepseekV2ForSequenceClassification"],
                {**MLA, **LABELS},
            ),
            "lite": (
                ["DeepseekV2ForCausalLM"],
                {**MLA, "q_lora_rank": None, "first_k_dense_replace": 2, "attention_bias": True},
            ),
            "biases": (["DeepseekV2ForCausalLM"], {**MLA, "attention_bias": True, "mlp_bias": True}),
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "": (
                [f"DeepseekV3{head}" for head in HEADS[:4]],
                {**MLA, **LABELS},
            ),
            "lite": (
                ["DeepseekV3ForCausalLM"],
                {
                    **MLA,
                    "q_lora_rank": None,
                    "n_shared_experts": 1,
                    "first_k_dense_replace": 0,
                    "tie_word_embeddings": True,
                },
            ),
            "biases": (["DeepseekV3ForCausalLM"], {**MLA, "attention_bias": True, "first_k_dense_replace": 3}),
        },
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            "": (
                ["DeepseekV32ForCausalLM", "DeepseekV32Model"],
                {**MLA, "index_n_heads": 3, "index_head_dim": 18},
            ),
            "biases": (["DeepseekV32ForCausalLM"], {**MLA, "attention_bias": True, "index_n_heads": 3}),
            "listed": (["DeepseekV32ForCausalLM"], {**MLA, "index_n_heads": 3, "mlp_layer_types": INTERLEAVED}),
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "": (
                ["Glm4MoeForCausalLM", "Glm4MoeModel"],
                {**HEAD_DIM, **MOE_LAYERS, "first_k_dense_replace": 1},
            ),
            "norms": (
                ["Glm4MoeForCausalLM"],
                {**HEAD_DIM, **MOE_LAYERS, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True},
            ),
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "": (["MiniMaxM2ForCausalLM", "MiniMaxM2Model"], {**HEAD_DIM, "num_local_experts": 3}),
            "tied": (
                ["MiniMaxM2ForCausalLM"],
                {**HEAD_DIM, "num_local_experts": 3, "tie_word_embeddings": True},
            ),
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            "": (["GlmMoeDsaForCausalLM", "GlmMoeDsaModel"], {**MLA, "index_n_heads": 3, "index_head_dim": 18}),
            "shared": (
                ["GlmMoeDsaForCausalLM"],
                {**MLA, "index_head_dim": 18, "indexer_types": ["full", "shared", "full"], "attention_bias": True},
            ),
            "listed": (["GlmMoeDsaForCausalLM"], {**MLA, "index_n_heads": 3, "mlp_layer_types": INTERLEAVED}),
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {
            "": (["Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"], MLA),
            "biases": (["Glm4MoeLiteForCausalLM"], {**MLA, "q_lora_rank": None, "attention_bias": True}),
            "listed": (["Glm4MoeLiteForCausalLM"], {**MLA, "mlp_layer_types": INTERLEAVED}),
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "": (
                ["GptOssForCausalLM", "GptOssModel", "GptOssForSequenceClassification", "GptOssForTokenClassification"],
                {**HEAD_DIM, "num_local_experts": 3, **LABELS},
            ),
            "no biases": (
                ["GptOssForCausalLM"],
                {**HEAD_DIM, "num_local_experts": 3, "attention_bias": False, "tie_word_embeddings": True},
            ),
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "": (["NemotronHForCausalLM", "NemotronHModel"], NEMOTRON_H),
            "latent experts": (["NemotronHForCausalLM"], {**NEMOTRON_H, "moe_latent_size": 22, "use_conv_bias": False}),
            "biases": (["NemotronHForCausalLM"], {**NEMOTRON_H, "mlp_bias": True, "use_bias": True}),
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "": (["Lfm2ForCausalLM", "Lfm2Model"], {**LFM2, "block_multiple_of": 8}),
            "biases": (
                ["Lfm2ForCausalLM"],
                {**LFM2, "conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
            ),
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {"": (["Lfm2MoeForCausalLM", "Lfm2MoeModel"], {**LFM2, **LFM2_MOE})},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "": (["GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel"], GRANITE_HYBRID),
            "no experts": (
                ["GraniteMoeHybridForCausalLM"],
                {**GRANITE_HYBRID, "num_local_experts": 0, "tie_word_embeddings": True, "mamba_conv_bias": False},
            ),
            "biases": (
                ["GraniteMoeHybridForCausalLM"],
                {**GRANITE_HYBRID, "attention_bias": True, "mamba_proj_bias": True},
            ),
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            "": (["FalconH1ForCausalLM", "FalconH1Model"], FALCON_H1),
            "biases": (
                ["FalconH1ForCausalLM"],
                {
                    **FALCON_H1,
                    "attention_bias": True,
                    "mlp_bias": True,
                    "projectors_bias": True,
                    "mamba_proj_bias": True,
                    "mamba_rms_norm": True,
                    "tie_word_embeddings": True,
                },
            ),
        },
    ),
    "mamba": (
        "MambaConfig",
        {
            "": (["MambaForCausalLM", "MambaModel"], MAMBA),
            "biases": (
                ["MambaForCausalLM"],
                {**MAMBA, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
            ),
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "": (["Mamba2ForCausalLM", "Mamba2Model"], MAMBA2),
            "biases": (
                ["Mamba2ForCausalLM"],
                {**MAMBA2, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
            ),
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {
            "": ([f"SmolLM3{head}" for head in HEADS], {**GROUPED, **LABELS}),
            "biases": (
                ["SmolLM3ForCausalLM"],
                {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
            ),
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "": (["GraniteForCausalLM", "GraniteModel"], GROUPED),
            "biases": (
                ["GraniteForCausalLM"],
                {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            ),
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            "": (["GraniteMoeForCausalLM", "GraniteMoeModel"], GRANITE_MOE),
            "biases": (["GraniteMoeForCausalLM"], {**GRANITE_MOE, "attention_bias": True, "tie_word_embeddings": True}),
        },
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {
            "": (
                ["GraniteMoeSharedForCausalLM", "GraniteMoeSharedModel"],
                {**GRANITE_MOE, "shared_intermediate_size": 18},
            ),
            "nothing shared": (["GraniteMoeSharedForCausalLM"], GRANITE_MOE),
        },
    ),
    "olmo2": (
        "Olmo2Config",
        {
            "": (["Olmo2ForCausalLM", "Olmo2Model", "Olmo2ForSequenceClassification"], {**GROUPED, **LABELS}),
            "biases": (["Olmo2ForCausalLM"], {**GROUPED, "attention_bias": True, "tie_word_embeddings": True}),
        },
    ),
    "olmo3": (
        "Olmo3Config",
        {"": (["Olmo3ForCausalLM", "Olmo3Model", "Olmo3ForSequenceClassification"], {**GROUPED, **LABELS})},
    ),
    "exaone4": (
        "Exaone4Config",
        {
            "": ([f"Exaone4{head}" for head in HEADS], {**GROUPED, **LABELS}),
            "tied": (["Exaone4ForCausalLM"], {**HEAD_DIM, "tie_word_embeddings": True}),
        },
    ),
    "ernie4_5": (
        "Ernie4_5Config",
        {
            "": (["Ernie4_5ForCausalLM", "Ernie4_5Model"], HEAD_DIM),
            "biases": (["Ernie4_5ForCausalLM"], {**HEAD_DIM, "use_bias": True, "tie_word_embeddings": False}),
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "": (["Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel"], ERNIE_MOE),
            "dense layers": (
                ["Ernie4_5_MoeForCausalLM"],
                {
                    **ERNIE_MOE,
                    "num_hidden_layers": 7,
                    "moe_layer_start_index": 2,
                    "moe_layer_end_index": 4,
                    "moe_layer_interval": 2,
                    "tie_word_embeddings": False,
                },
            ),
            "biases": (["Ernie4_5_MoeForCausalLM"], {**ERNIE_MOE, "use_bias": True, "moe_num_shared_experts": 0}),
        },
    ),
    "seed_oss": (
        "SeedOssConfig",
        {
            "": ([f"SeedOss{head}" for head in HEADS], {**HEAD_DIM, **LABELS}),
            "biases": (
                ["SeedOssForCausalLM"],
                {**HEAD_DIM, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
            ),
        },
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        {
            "": (
                ["HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Model", "HunYuanDenseV1ForSequenceClassification"],
                {**HEAD_DIM, **LABELS},
            ),
            "biases": (
                ["HunYuanDenseV1ForCausalLM"],
                {**HEAD_DIM, "attention_bias": True, "tie_word_embeddings": True},
            ),
        },
    ),
    "glm4": (
        "Glm4Config",
        {
            "": ([f"Glm4{head}" for head in HEADS[:4]], {**HEAD_DIM, **LABELS}),
            "no biases": (
                ["Glm4ForCausalLM"],
                {**HEAD_DIM, "attention_bias": False, "tie_word_embeddings": True},
            ),
        },
    ),
    "arcee": (
        "ArceeConfig",
        {
            "": ([f"Arcee{head}" for head in HEADS], {**HEAD_DIM, **LABELS}),
            "biases": (["ArceeForCausalLM"], {**GROUPED, "attention_bias": True, "mlp_bias": True}),
        },
    ),
    "olmo": (
        "OlmoConfig",
        {
            "": (["OlmoForCausalLM", "OlmoModel", "OlmoForSequenceClassification"], {**GROUPED, **LABELS}),
            "biases": (["OlmoForCausalLM"], {**GROUPED, "attention_bias": True, "tie_word_embeddings": True}),
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {
            "": (["OlmoeForCausalLM", "OlmoeModel"], {**GROUPED, "num_experts": 3, "num_experts_per_tok": 2}),
            "biases": (
                ["OlmoeForCausalLM"],
                {**GROUPED, "num_experts": 3, "attention_bias": True, "tie_word_embeddings": True},
            ),
        },
    ),
    "mellum": (
        "MellumConfig",
        {
            "": (["MellumForCausalLM", "MellumModel"], MOE),
            "biases": (["MellumForCausalLM"], {**MOE, "attention_bias": True, "tie_word_embeddings": True}),
            "listed": (["MellumForCausalLM"], {**MOE, "mlp_layer_types": ["dense", "sparse"]}),
        },
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            "": (["PhimoeForCausalLM", "PhimoeModel"], {**GROUPED, "num_local_experts": 3}),
            "biases": (
                ["PhimoeForCausalLM"],
                {**GROUPED, "num_local_experts": 3, "attention_bias": True, "lm_head_bias": True},
            ),
        },
    ),
    "internlm3": ("LlamaConfig", {"": (["InternLM3ForCausalLM"], GROUPED)}),
    "llama_embed": ("LlamaConfig", {"": (["LlamaBidirectionalModel"], GROUPED)}),
    "bert": (
        "BertConfig",
        {
            "": (
                [
                    "BertModel",
                    "BertForMaskedLM",
                    "BertForPreTraining",
                    "BertForSequenceClassification",
                    "BertForTokenClassification",
                    "BertForQuestionAnswering",
                    "BertForNextSentencePrediction",
                    "BertForMultipleChoice",
                ],
                {**BERT, **LABELS},
            ),
            "untied": (["BertForMaskedLM"], {**BERT, "tie_word_embeddings": False}),
            "decoder": (["BertLMHeadModel", "BertModel"], {**BERT, "is_decoder": True}),
            "cross attention": (
                ["BertLMHeadModel", "BertModel"],
                {**BERT, "is_decoder": True, "add_cross_attention": True},
            ),
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "": (
                [
                    "GPT2LMHeadModel",
                    "GPT2Model",
                    "GPT2DoubleHeadsModel",
                    "GPT2ForSequenceClassification",
                    "GPT2ForTokenClassification",
                    "GPT2ForQuestionAnswering",
                ],
                {**GPT2, **GPT2_ENDS, **LABELS},
            ),
            "untied": (["GPT2LMHeadModel"], {**GPT2, **GPT2_ENDS, "tie_word_embeddings": False, "n_inner": 30}),
            "cross attention": (
                ["GPT2LMHeadModel", "GPT2Model"],
                {**GPT2, **GPT2_ENDS, "add_cross_attention": True},
            ),
            "summary": (
                ["GPT2DoubleHeadsModel"],
                {**GPT2, **GPT2_ENDS, "summary_proj_to_labels": False, "summary_use_proj": True},
            ),
        },
    ),
    "t5": (
        "T5Config",
        {
            "": (
                [
                    "T5ForConditionalGeneration",
                    "T5Model",
                    "T5EncoderModel",
                    "T5ForSequenceClassification",
                    "T5ForTokenClassification",
                    "T5ForQuestionAnswering",
                ],
                {**T5, **LABELS},
            ),
            "gated": (
                ["T5ForConditionalGeneration"],
                {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
            ),
        },
    ),
    "vit": (
        "ViTConfig",
        {
            "": (["ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"], {**VIT, **LABELS}),
            "no biases": (["ViTForImageClassification"], {**VIT, "qkv_bias": False}),
            "pooler": (["ViTModel"], {**VIT, "pooler_output_size": 15}),
            "stride": (["ViTForMaskedImageModeling"], {**VIT, "encoder_stride": 8, "num_channels": 1}),
        },
    ),
    "clip": ("CLIPConfig", {"": (["CLIPModel", "CLIPForImageClassification"], {**CLIP, **LABELS})}),
    "clip_text": ("CLIPTextConfig", {"": (["CLIPTextModel", "CLIPTextModelWithProjection"], CLIP_TEXT)}),
    "clip_vision": ("CLIPVisionConfig", {"": (["CLIPVisionModel", "CLIPVisionModelWithProjection"], CLIP_VISION)}),
    "whisper": (
        "WhisperConfig",
        {
            "": (["WhisperForConditionalGeneration", "WhisperModel", "WhisperForCausalLM"], WHISPER),
            "untied": (["WhisperForConditionalGeneration"], {**WHISPER, "tie_word_embeddings": False}),
            "audio": (["WhisperForAudioClassification"], {**WHISPER, **LABELS, "classifier_proj_size": 16}),
            "weighted": (["WhisperForAudioClassification"], {**WHISPER, "use_weighted_layer_sum": True}),
        },
    ),
}


BLOOM = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
FALCON = {**SIZES, "ffn_hidden_size": 40}
FALCON.pop("intermediate_size")
OPT = {**SIZES, "ffn_dim": 40, "max_position_embeddings": 34}
OPT.pop("intermediate_size")
NEO = {**SIZES, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
NEO = {key: value for key, value in NEO.items() if key not in ("num_hidden_layers", "num_attention_heads")}
FAMILIES |= {
    "gpt_neox": (
        "GPTNeoXConfig",
        {
            "": ([f"GPTNeoX{head}" for head in HEADS], {**SIZES, **LABELS}),
            "no biases": (["GPTNeoXForCausalLM"], {**SIZES, "attention_bias": False, "tie_word_embeddings": True}),
        },
    ),
    "phi": (
        "PhiConfig",
        {
            "": ([f"Phi{head}" for head in HEADS[:4]], {**GROUPED, **LABELS}),
            "norms": (["PhiForCausalLM"], {**SIZES, "qk_layernorm": True}),
        },
    ),
    "bloom": (
        "BloomConfig",
        {
            "": ([f"Bloom{head}" for head in HEADS], {**BLOOM, **LABELS}),
            "untied": (["BloomForCausalLM"], {**BLOOM, "tie_word_embeddings": False}),
        },
    ),
    "starcoder2": (
        "Starcoder2Config",
        {
            "": ([f"Starcoder2{head}" for head in HEADS[:4]], {**GROUPED, **LABELS}),
            "no biases": (["Starcoder2ForCausalLM"], {**GROUPED, "use_bias": False, "tie_word_embeddings": False}),
        },
    ),
    "stablelm": (
        "StableLmConfig",
        {
            "": ([f"StableLm{head}" for head in HEADS[:4]], {**GROUPED, **LABELS}),
            "parallel": (
                ["StableLmForCausalLM"],
                {**GROUPED, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
            ),
        },
    ),
    "nemotron": (
        "NemotronConfig",
        {
            "": ([f"Nemotron{head}" for head in HEADS], {**HEAD_DIM, **LABELS}),
            "biases": (
                ["NemotronForCausalLM"],
                {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            ),
        },
    ),
    "falcon": (
        "FalconConfig",
        {
            "": ([f"Falcon{head}" for head in HEADS], {**FALCON, **LABELS}),
            "new": (["FalconForCausalLM"], {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
            "one norm": (
                ["FalconForCausalLM"],
                {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            ),
            "in sequence": (
                ["FalconForCausalLM"],
                {
                    **FALCON,
                    "multi_query": False,
                    "parallel_attn": False,
                    "alibi": True,
                    "bias": True,
                    "tie_word_embeddings": False,
                },
            ),
        },
    ),
    "opt": (
        "OPTConfig",
        {
            "": (
                ["OPTForCausalLM", "OPTModel", "OPTForSequenceClassification", "OPTForQuestionAnswering"],
                {**OPT, **LABELS},
            ),
            "projections": (
                ["OPTForCausalLM", "OPTModel"],
                {**OPT, "word_embed_proj_dim": 18, "do_layer_norm_before": False},
            ),
            "no biases": (
                ["OPTForCausalLM"],
                {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
            ),
            "no final norm": (["OPTForCausalLM"], {**OPT, "_remove_final_layer_norm": True}),
        },
    ),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {
            "": ([f"GPTBigCode{head}" for head in HEADS[:4]], {**GPT2, **GPT2_ENDS, **LABELS}),
            "many heads": (
                ["GPTBigCodeForCausalLM"],
                {**GPT2, **GPT2_ENDS, "multi_query": False, "n_inner": 30, "tie_word_embeddings": False},
            ),
        },
    ),
    "gpt_neo": ("GPTNeoConfig", {"": ([f"GPTNeo{head}" for head in HEADS], {**NEO, **LABELS})}),
}
# Classes that transformers does not have, and classes with the same tensors.
OTHERS = {"InternLM3ForCausalLM": "LlamaForCausalLM", "LlamaBidirectionalModel": "LlamaModel"}

# Published models: class of the config and of the model, and the sizes in their config.json that are not the defaults.
PUBLISHED = {
    "Mixtral-8x7B": ("MixtralConfig", "MixtralForCausalLM", {}),
    "Mixtral-8x22B": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_attention_heads": 48,
            "num_hidden_layers": 56,
            "vocab_size": 32768,
        },
    ),
    "Qwen1.5-MoE-A2.7B": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {}),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_hidden_layers": 48, "head_dim": 128},
    ),
    "Qwen3-235B-A22B": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 4096,
            "head_dim": 128,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
    ),
    "Qwen3.5-27B": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "linear_num_value_heads": 48,
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
        },
    ),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {}),
    "Qwen3-Next-80B-A3B": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {}),
    "DeepSeek-V2-Lite": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "q_lora_rank": None,
        },
    ),
    "DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {}),
    "gpt-oss-20b": ("GptOssConfig", "GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("GptOssConfig", "GptOssForCausalLM", {}),
    "t5-small": ("T5Config", "T5ForConditionalGeneration", {}),
    "flan-t5-xxl encoder": (
        "T5Config",
        "T5EncoderModel",
        {"d_ff": 10240, "d_model": 4096, "num_heads": 64, "num_layers": 24, "feed_forward_proj": "gated-gelu"},
    ),
    "vit-base-patch16-224": ("ViTConfig", "ViTForImageClassification", {"num_labels": 1000}),
    "clip-vit-base-patch32": ("CLIPConfig", "CLIPModel", {}),
    "clip-vit-large-patch14": (
        "CLIPConfig",
        "CLIPModel",
        {
            "projection_dim": 768,
            "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
    ),
    "whisper-tiny": ("WhisperConfig", "WhisperForConditionalGeneration", {}),
    "whisper-large-v3": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "d_model": 1280,
            "decoder_attention_heads": 20,
            "decoder_ffn_dim": 5120,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "encoder_layers": 32,
            "num_mel_bins": 128,
            "vocab_size": 51866,
        },
    ),
    "Llama-3.1-405B": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_attention_heads": 128,
            "num_hidden_layers": 126,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "pythia-410m": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "vocab_size": 50304,
        },
    ),
    "phi-2": (
        "PhiConfig",
        "PhiForCausalLM",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32},
    ),
    "bloom-560m": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 1024, "n_head": 16, "n_layer": 24}),
    "starcoder2-3b": ("Starcoder2Config", "Starcoder2ForCausalLM", {}),
    "falcon-7b": ("FalconConfig", "FalconForCausalLM", {}),
    "opt-350m": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "do_layer_norm_before": False,
            "ffn_dim": 4096,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "word_embed_proj_dim": 512,
        },
    ),
    "GPT-2 XL": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1600, "n_head": 25, "n_layer": 48}),
    "BERT-large": (
        "BertConfig",
        "BertForMaskedLM",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24},
    ),
}


def published():
    """Config and number of parameters of the published models: each tensor once, also if it is tied."""
    found = {}
    for name, (config, model, sizes) in PUBLISHED.items():
        with torch.device("meta"):
            one = made(model, config, sizes)
        tensors = {id(x): x.numel() for x in one.state_dict(keep_vars=True).values()}
        one.config.architectures = [model]
        found[name] = {"config": json.loads(one.config.to_json_string()), "parameters": sum(tensors.values())}
        print(name, found[name]["parameters"], flush=True)
    return found


def saved(model):
    """The config, and names and shapes, that ``save_pretrained`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            names = file.keys()
            shapes = {name: file.get_slice(name).get_shape() for name in names}
    return config, shapes


def made(name, config, sizes):
    return getattr(transformers, OTHERS.get(name, name))(getattr(transformers, config)(**sizes))


def small(family):
    """The cases of a family: {"class, case": {"config": ..., "shapes": ...}}."""
    config, cases = FAMILIES[family]
    found = {}
    for case, (classes, sizes) in cases.items():
        for name in classes:
            torch.manual_seed(0)
            said, shapes = saved(made(name, config, sizes))
            said["architectures"] = [name]
            found[f"{name}, {case}" if case else name] = {"config": said, "shapes": shapes}
    return found


def write(path, found):
    """JSON with a line for each config and tensor."""
    lines = []
    for case, one in found.items():
        shapes = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(one['shapes'][name])}" for name in sorted(one["shapes"])
        )
        lines.append(f'{json.dumps(case)}: {{"config": {json.dumps(one["config"])},\n "shapes": {{\n{shapes}}}}}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(names):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not names or "published" in names:
        lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in published().items()]
        (HERE / "published.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for family in [name for name in names if name != "published"] or (() if names else FAMILIES):
        found = small(family)
        write(HERE / f"{family}.json", found)
        print(family, len(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
