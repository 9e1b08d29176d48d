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
MOE = {**HEAD_DIM, "moe_intermediate_size": 14, "num_experts": 3, "num_experts_per_tok": 2}
QWEN2_MOE = {**MOE, "shared_expert_intermediate_size": 18}
QWEN2_MOE.pop("head_dim")
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
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {
            "": (["Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"], MLA),
            "biases": (["Glm4MoeLiteForCausalLM"], {**MLA, "q_lora_rank": None, "attention_bias": True}),
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
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def small(family):
    """The cases of a family: {"class, case": {"config": ..., "shapes": ...}}."""
    config, cases = FAMILIES[family]
    found = {}
    for case, (classes, sizes) in cases.items():
        for name in classes:
            torch.manual_seed(0)
            said, shapes = saved(made(name, config, sizes))
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
