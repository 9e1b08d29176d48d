"""Make tiny tokenizers, the configs of tiny models, and what llama.cpp's converter makes of these.

    PYTHONPATH=tests python tests/data/llama_cpp/make.py PATH_OF_LLAMA_CPP             # all
    PYTHONPATH=tests python tests/data/llama_cpp/make.py PATH_OF_LLAMA_CPP qwen3 phi3  # some models

Needs transformers 5.24.0, torch, tokenizers, sentencepiece, gguf and, for tekken.json, mistral-common. The converter
is changed in place, so give a copy of llama.cpp, such as vendor/llama.cpp in the source distribution of
llama-cpp-python.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from base64 import b64encode
from pathlib import Path

import torch
import transformers
from builders import llama_models
from builders.inside import tokenizer as tokens_of_llama_cpp
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import safeload

HERE = Path(__file__).parent
TEXTS = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")


def corpus():
    return TEXTS * 4 + [Path(__file__).read_text(encoding="utf-8")]


def byte_level(expression, *, bos=None, ignore_merges=False, nfc=False, size=400, more=()):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    special = [text for text in (bos, "<|endoftext|>", "<|im_start|>", "<|im_end|>", *more) if text]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    byte_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = byte_processor
    if bos:
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.post_processor = processors.Sequence([byte_processor, template])
    return tokenizer


def _gpt2(folder):
    """A vocabulary as GPT-2 has it: nothing but byte pairs, and a file without the type of the model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    content = json.loads(tokenizer.to_str())
    del content["model"]["type"]
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))


def save_byte_level(folder, tokenizer, *, bos=None):
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos,
        "eos_token": "<|endoftext|>", "pad_token": "<|im_end|>",
        "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def pieces(folder, *, gemma=False, size=450):
    """A vocabulary of SentencePiece, as Llama 2 and Gemma have it."""
    import sentencepiece

    text = folder / "corpus.txt"
    text.write_text(
        "\n".join(line for part in corpus() for line in part.splitlines() if line.strip()), encoding="utf-8"
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=size, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=not gemma,
        split_digits=True, character_coverage=0.98, minloglevel=2, num_threads=1,
        allow_whitespace_only_pieces=True, split_by_whitespace=True,
    )  # fmt: skip
    text.unlink()
    (folder / "tokenizer.vocab").unlink()
    config = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "add_eos_token": False, "legacy": False, "chat_template": TEMPLATE,
        "added_tokens_decoder": {
            **{str(k): {"content": text, "special": True} for k, text in enumerate(("<unk>", "<s>", "</s>"))},
            str(size): {"content": "<|im_start|>", "special": True},
            str(size + 1): {"content": "<tool>", "special": False},
            str(size + 2): {"content": "<|endoftext|>", "special": True},
        },
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tekken(folder):
    """A vocabulary in Mistral's own format, with fewer special tokens named than there are."""
    pattern = next(row for row in llama_models.pre_tokenizers()["by_steps"] if row["name"] == "tekken")
    pattern = pattern["pretokenizers"][0]["pattern"]["Regex"]
    vocab = byte_level(pattern, ignore_merges=True).get_vocab()
    bytes_of = {chr(letter): byte for byte, letter in tokens_of_llama_cpp._LETTERS.items()}
    tokens = [bytes(map(bytes_of.get, text)) for text, _ in sorted(vocab.items(), key=lambda item: item[1])[:400]]
    tokens = sorted(tokens[:256]) + tokens[256:]
    names = llama_models.pre_tokenizers()["tekken"]["special"]
    content = {
        "config": {
            "pattern": pattern, "num_vocab_tokens": 400, "default_vocab_size": 424, "default_num_special_tokens": 24,
            "version": "v7",
        },
        "vocab": [
            {"rank": k, "token_bytes": b64encode(token).decode(), "token_str": None} for k, token in enumerate(tokens)
        ],
        "special_tokens": [{"rank": k, "token_str": text, "is_control": True} for k, text in enumerate(names)],
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps(content))


def gemma4(folder, size=450):
    """Merges of characters in lines with SentencePiece's spaces, as in Gemma 4."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|video|>", "<|channel>", "<|tool_call>", "<turn|>"]
    first = [*special, '<|"|>', "<tool>", *(f"<0x{k:02X}>" for k in range(256))]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    split = [pre_tokenizers.Split(Regex(text), "merged_with_next") for text in ("\u2581", "\n+")]
    trained.pre_tokenizer = pre_tokenizers.Sequence(split)
    trainer = trainers.BpeTrainer(vocab_size=size - len(first), limit_alphabet=100, show_progress=False)
    trained.train_from_iterator((line for text in corpus() for line in text.splitlines()), trainer)
    model = json.loads(trained.to_str())["model"]
    texts = [*first, *model["vocab"], "\n", "\n\n"]
    merges = [*map(tuple, model["merges"]), ("\n", "\n")]
    tokenizer = Tokenizer(
        models.BPE(
            {text: k for k, text in enumerate(texts)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ('<|"|>', "<tool>", "<new>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "eot_token": "<turn|>", "extra_special_tokens": ["<|video|>"], "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def word_pieces(folder, size=400):
    """A vocabulary of WordPiece, as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=special, limit_alphabet=120, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(text, special.index(text)) for text in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{text[1:-1].lower()}_token": text for text in special}
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def _llama3(folder):
    save_byte_level(folder, byte_level(LLAMA_3, bos="<|begin|>", ignore_merges=True), bos="<|begin|>")


def _qwen(folder):
    save_byte_level(folder, byte_level(QWEN_2, nfc=True))


def _glm(folder):
    tokenizer = byte_level(QWEN_2, size=300)
    tokenizer.add_special_tokens([AddedToken("<|user|>", special=True, normalized=False)])
    save_byte_level(folder, tokenizer)


def _glm_moe(folder):
    save_byte_level(folder, byte_level(QWEN_2, more=("[gMASK]", "<|user|>", "<|observation|>")))


# How a tokenizer is made, and the rows of the embedding; Qwen's has some without a token.
TOKENIZERS = {
    "llama3": (_llama3, 405),
    "qwen2": (_qwen, 408),
    "glm": (_glm, 305),
    "glm_moe": (_glm_moe, 408),
    "pieces": (pieces, 453),
    "gpt2": (_gpt2, 321),
    "gemma": (functools.partial(pieces, gemma=True), 453),
    "tekken": (tekken, 424),
    "gemma4": (gemma4, 453),
    "word_pieces": (word_pieces, 400),
}

_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
_QWEN_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_GEMMA_4 = {
    "num_hidden_layers": 4, "head_dim": 24, "global_head_dim": 32, "sliding_window": 16,
    "final_logit_softcapping": 30.0, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_GEMMA_4_ROPE = {
    "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
_GRANITE_DENSE = {
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625,
    "attention_bias": True, "tie_word_embeddings": True,
}  # fmt: skip
_GRANITE_MOE = {**_GRANITE_DENSE, "attention_bias": False, "num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {
    "num_key_value_heads": 4, "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "kv_lora_rank": 32,
    "q_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_MLA_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
}  # fmt: skip

_DELTA_NET = {
    "head_dim": 32, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6,
}  # fmt: skip
_DELTA_NET_MOE = {**_DELTA_NET, **{key: _QWEN_MOE[key] for key in _QWEN_MOE if "_expert" in key or "moe" in key}}
# Models that are published with experts as [expert, in, out], which transformers 5 does not restore when it saves.
_TRANSPOSED = ("qwen3_vl_moe",)
# Towers of multi-modal models, as small as their classes allow; the converter leaves each out.
_QWEN_TOWER = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
_QWEN_TOWER_2 = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]}
# In llama.cpp, pairs beyond three times a section do not rotate: every third pair belongs to it.
_INTERLEAVED = {"head_dim": 32, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}}
_CLIP_TOWER = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
}  # fmt: skip
_PIXTRAL_TOWER = {**_CLIP_TOWER, "model_type": "pixtral", "head_dim": 8}
# As in Ministral 3, for shorter texts.
_YARN = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
# As in Llama 4 Scout. llama.cpp aborts without a layer without rotations, which is every fourth.
_LLAMA_4 = {
    "num_hidden_layers": 4, "intermediate_size": 48, "intermediate_size_mlp": 96, "head_dim": 16,
    "num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip

_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
_NEMOTRON_H = {"head_dim": 24, "mlp_hidden_act": "relu2", "pad_token_id": None, **_MAMBA}
_NEMOTRON_H_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "moe_shared_expert_intermediate_size": 80, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GRANITE = {
    "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
    "shared_intermediate_size": 80, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2,
    "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
_ATTENTION_24 = {"q": [96, 64], "k": [48, 64], "v": [48, 64], "o": [64, 96]}
# The layers for multi-token prediction of Nemotron 3 Super, which transformers ignores; names are from llama.cpp's
# conversion/nemotron.py and shapes from its src/models/nemotron-h.cpp.
_NEMOTRON_H_MTP = {
    **{f"mtp.layers.0.{name}.weight": [64] for name in ("enorm", "hnorm", "norm")},
    "mtp.layers.0.eh_proj.weight": [64, 128],
    **{f"mtp.layers.0.mixer.{name}_proj.weight": shape for name, shape in _ATTENTION_24.items()},
    **{f"mtp.layers.1.{name}.weight": [64] for name in ("norm", "final_layernorm")},
    "mtp.layers.1.mixer.gate.weight": [4, 64],
    "mtp.layers.1.mixer.gate.e_score_correction_bias": [4],
    **{f"mtp.layers.1.mixer.experts.{k}.up_proj.weight": [48, 32] for k in range(4)},
    **{f"mtp.layers.1.mixer.experts.{k}.down_proj.weight": [32, 48] for k in range(4)},
    "mtp.layers.1.mixer.shared_experts.up_proj.weight": [80, 64],
    "mtp.layers.1.mixer.shared_experts.down_proj.weight": [64, 80],
    "mtp.layers.1.mixer.fc1_latent_proj.weight": [32, 64],
    "mtp.layers.1.mixer.fc2_latent_proj.weight": [64, 32],
}

# Towers with all that llama.cpp's file of one can have; the converter finds mm.2 only below the number of layers.
_QWEN_VISION = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 48, "out_hidden_size": 64}
_QWEN_3_VISION = {**_QWEN_VISION, "depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16}
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
_GEMMA_4_VISION = {**_SIGLIP, "patch_size": 4, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 10}
_PIXTRAL = {
    **_SIGLIP,
    "num_hidden_layers": 3,
    "model_type": "pixtral",
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
}
_CLIP_MEAN = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_PROCESSOR = "preprocessor_config.json"
_ONE_LAYER = {"num_hidden_layers": 1}

# Models with a tower: class of the model and of the config, tokenizer, arguments of the config, and files beside.
VISION = {
    "qwen2_vl": (
        transformers.Qwen2VLForConditionalGeneration,
        transformers.Qwen2VLConfig,
        "qwen2",
        {
            "text_config": {**_ONE_LAYER, "rope_parameters": _MROPE},
            "vision_config": {
                "depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2,
            },
        },
        {_PROCESSOR: _CLIP_MEAN, "generation_config.json": {"top_k": 1, "temperature": 0.01}},
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLForConditionalGeneration,
        transformers.Qwen2_5_VLConfig,
        "qwen2",
        {
            "text_config": {**_ONE_LAYER, "rope_parameters": _MROPE},
            "vision_config": {**_QWEN_VISION, "depth": 4, "fullatt_block_indexes": [1, 3]},
        },
        {_PROCESSOR: _HALF, "processor_config.json": {"image_processor": _CLIP_MEAN}},
    ),
    "qwen3_vl": (
        transformers.Qwen3VLForConditionalGeneration,
        transformers.Qwen3VLConfig,
        "qwen2",
        {"text_config": {**_ONE_LAYER, **_INTERLEAVED, "rms_norm_eps": 1e-5}, "vision_config": _QWEN_3_VISION},
        {_PROCESSOR: _HALF},
    ),
    "qwen3_vl_moe": (
        transformers.Qwen3VLMoeForConditionalGeneration,
        transformers.Qwen3VLMoeConfig,
        "qwen2",
        {
            "text_config": {
                **_ONE_LAYER, **_INTERLEAVED, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48,
            },
            "vision_config": {**_QWEN_3_VISION, "spatial_merge_size": 1},
        },
        {_PROCESSOR: {"media_proc_cfg": _HALF}},
    ),
    "qwen3_5": (
        transformers.Qwen3_5ForConditionalGeneration,
        transformers.Qwen3_5Config,
        "qwen2",
        {
            "text_config": {**_ONE_LAYER, **_DELTA_NET},
            "vision_config": {**_QWEN_VISION, "depth": 1, "num_position_embeddings": 16},
        },
        {_PROCESSOR: _HALF},
    ),
    "gemma3": (
        transformers.Gemma3ForConditionalGeneration,
        transformers.Gemma3Config,
        "gemma",
        {"text_config": _ONE_LAYER, "mm_tokens_per_image": 4, "vision_config": {**_SIGLIP, "vision_use_head": False}},
        {_PROCESSOR: {**_HALF, "image_seq_length": 4}},
    ),
    "gemma4": (
        transformers.Gemma4ForConditionalGeneration,
        transformers.Gemma4Config,
        "gemma4",
        {
            "text_config": {**_ONE_LAYER, "hidden_size_per_layer_input": 0},
            "vision_config": {**_GEMMA_4_VISION, "standardize": True, "use_clipped_linears": True},
        },
        {_PROCESSOR: _HALF},
    ),
    "gemma4_audio": (
        transformers.Gemma4ForConditionalGeneration,
        transformers.Gemma4Config,
        "gemma4",
        {
            "text_config": {**_ONE_LAYER, "hidden_size_per_layer_input": 0},
            "vision_config": {**_GEMMA_4_VISION, "num_hidden_layers": 1},
            "audio_config": {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 64,
                "subsampling_conv_channels": [8, 4],
            },
        },
        {_PROCESSOR: _HALF},
    ),
    "gemma4_plain": (
        transformers.Gemma4ForConditionalGeneration,
        transformers.Gemma4Config,
        "gemma4",
        {"text_config": {**_ONE_LAYER, "hidden_size_per_layer_input": 0}, "vision_config": _GEMMA_4_VISION},
        {_PROCESSOR: _HALF},
    ),
    "llava": (
        transformers.LlavaForConditionalGeneration,
        transformers.LlavaConfig,
        "tekken",
        {
            "text_config": {**_ONE_LAYER, "model_type": "mistral"}, "vision_config": {**_PIXTRAL, "hidden_act": "silu"},
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        {
            _PROCESSOR: _CLIP_MEAN,
            "tokenizer_config.json": {"added_tokens_decoder": {"12": {"content": "[IMG_BREAK]", "special": True}}},
        },
    ),
    "mistral3": (
        transformers.Mistral3ForConditionalGeneration,
        transformers.Mistral3Config,
        "tekken",
        {"text_config": {**_ONE_LAYER, "model_type": "mistral"}, "vision_config": _PIXTRAL},
        {
            _PROCESSOR: _CLIP_MEAN,
            "tokenizer.json": {"added_tokens": [{"id": 12, "content": "[IMG_BREAK]", "special": True}]},
            "tokenizer_config.json": {},
        },
    ),
}  # fmt: skip
# The names in published files, which transformers 5 loads and no longer writes.
_PUBLISHED_NAMES = {"gemma3": ("vision_tower.", "vision_tower.vision_model.")}

# Class of the model and of the config, tokenizer, arguments of the config; then, if published files differ from what
# transformers writes, keys of their config (None for an absent key) and more tensors.
MODELS = {
    "llama3": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        "llama3",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
    ),
    "llama2": (transformers.LlamaForCausalLM, transformers.LlamaConfig, "pieces", {"tie_word_embeddings": False}),
    "mistral": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig,
        "pieces",
        {"head_dim": 24, "sliding_window": None},
    ),
    "llava": (
        transformers.LlavaForConditionalGeneration,
        transformers.LlavaConfig,
        "pieces",
        {"text_config": {"model_type": "llama"}, "vision_config": _CLIP_TOWER, "tie_word_embeddings": False},
    ),
    "mistral3": (
        transformers.Mistral3ForConditionalGeneration,
        transformers.Mistral3Config,
        "llama3",
        {
            "text_config": {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
            "vision_config": _PIXTRAL_TOWER,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": (
        transformers.Ministral3ForCausalLM,
        transformers.Ministral3Config,
        "llama3",
        {
            "head_dim": 24, "tie_word_embeddings": True, "pad_token_id": None, "rope_parameters": _YARN,
        },
    ),
    "ministral3_images": (
        transformers.Mistral3ForConditionalGeneration,
        transformers.Mistral3Config,
        "llama3",
        {
            "text_config": {"model_type": "ministral3", "pad_token_id": None, "rope_parameters": _YARN},
            "vision_config": _PIXTRAL_TOWER,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": (
        transformers.Llama4ForCausalLM,
        transformers.Llama4TextConfig,
        "llama3",
        {
            **_LLAMA_4, "num_local_experts": 4, "interleave_moe_layer_step": 2, "tie_word_embeddings": False,
        },
    ),
    "llama4_images": (
        transformers.Llama4ForConditionalGeneration,
        transformers.Llama4Config,
        "llama3",
        {
            "text_config": _LLAMA_4,
            "vision_config": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
                "image_size": 16, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
    ),
    "mistral_tekken": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig,
        "tekken",
        {"head_dim": 24, "sliding_window": None},
    ),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, "pieces", _MIXTRAL),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, "qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe": (transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig, "qwen2", _QWEN_MOE),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, "qwen2", {"head_dim": 24}),
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        "qwen2",
        {**_QWEN_MOE, "head_dim": 24, "norm_topk_prob": True},
    ),
    "qwen2_vl": (
        transformers.Qwen2VLForConditionalGeneration,
        transformers.Qwen2VLConfig,
        "qwen2",
        {"text_config": {"rope_parameters": _MROPE}, "vision_config": _QWEN_TOWER, "tie_word_embeddings": True},
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLForConditionalGeneration,
        transformers.Qwen2_5_VLConfig,
        "qwen2",
        {"text_config": {"rope_parameters": _MROPE}, "vision_config": _QWEN_TOWER_2},
    ),
    "qwen3_vl": (
        transformers.Qwen3VLForConditionalGeneration,
        transformers.Qwen3VLConfig,
        "qwen2",
        {
            "text_config": _INTERLEAVED,
            "vision_config": {**_QWEN_TOWER_2, "deepstack_visual_indexes": [0], "num_position_embeddings": 4},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": (
        transformers.Qwen3VLMoeForConditionalGeneration,
        transformers.Qwen3VLMoeConfig,
        "qwen2",
        {
            "text_config": {
                **_INTERLEAVED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                "norm_topk_prob": True,
            },
            "vision_config": {**_QWEN_TOWER_2, "deepstack_visual_indexes": [0], "num_position_embeddings": 4},
        },
    ),
    "gemma": (transformers.GemmaForCausalLM, transformers.GemmaConfig, "gemma", {"head_dim": 24}),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config,
        "gemma",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 16},
    ),
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig,
        "gemma",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 16, "num_hidden_layers": 6},
    ),
    "gemma3_vision": (
        transformers.Gemma3ForConditionalGeneration,
        transformers.Gemma3Config,
        "gemma",
        {
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 16, "vocab_size": 453,
            },
            "vision_config": _VISION, "mm_tokens_per_image": 4, "eos_token_id": [1, 2],
        },
    ),
    "gemma4": (
        transformers.Gemma4ForCausalLM,
        transformers.Gemma4TextConfig,
        "gemma4",
        {
            **_GEMMA_4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 453, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4_moe": (
        transformers.Gemma4ForCausalLM,
        transformers.Gemma4TextConfig,
        "gemma4",
        {
            **_GEMMA_4, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48,
        },
    ),
    "gemma4_vision": (
        transformers.Gemma4ForConditionalGeneration,
        transformers.Gemma4Config,
        "gemma4",
        {
            "text_config": {
                **_SIZES, **_GEMMA_4, "model_type": "gemma4_text", "vocab_size": 453, "hidden_size_per_layer_input": 0,
                "num_global_key_value_heads": 1, "attention_k_eq_v": True, "rms_norm_eps": 1e-6,
                "use_bidirectional_attention": "vision", "hidden_activation": "gelu_pytorch_tanh",
                "rope_parameters": _GEMMA_4_ROPE,
            },
            "vision_config": {**_VISION, "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16},
        },
    ),
    "gemma4_unified": (
        transformers.Gemma4UnifiedForConditionalGeneration,
        transformers.Gemma4UnifiedConfig,
        "gemma4",
        {
            "text_config": {
                **_SIZES, **_GEMMA_4, "model_type": "gemma4_unified_text", "vocab_size": 453, "attention_k_eq_v": True,
                "num_global_key_value_heads": 1, "rope_parameters": _GEMMA_4_ROPE, "moe_intermediate_size": None,
            },
            "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 4, "patch_size": 2, "output_proj_dims": 64},
            "audio_config": {"audio_embed_dim": 16},
        },
    ),
    "cohere": (transformers.CohereForCausalLM, transformers.CohereConfig, "qwen2", {"model_max_length": 1024}),
    "cohere2": (
        transformers.Cohere2ForCausalLM,
        transformers.Cohere2Config,
        "qwen2",
        {"num_hidden_layers": 4, "sliding_window": 16, "rotary_pct": 1.0},
    ),
    "phi3": (
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config,
        "pieces",
        {"pad_token_id": None, "sliding_window": None, "original_max_position_embeddings": 512},
    ),
    "phi3_long": (
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config,
        "pieces",
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.0 + k / 4 for k in range(8)],
                "short_factor": [1.0 + k / 16 for k in range(8)], "original_max_position_embeddings": 64,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "gpt_oss": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig,
        "qwen2",
        {
            "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": True, "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3_5": (
        transformers.Qwen3_5ForCausalLM,
        transformers.Qwen3_5TextConfig,
        "qwen2",
        {
            **_DELTA_NET, "num_hidden_layers": 4, "tie_word_embeddings": True, "full_attention_interval": 4,
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
    ),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeForCausalLM,
        transformers.Qwen3_5MoeTextConfig,
        "qwen2",
        {
            **_DELTA_NET_MOE, "num_experts": 3, "layer_types": ["linear_attention", "full_attention"],
            "mtp_num_hidden_layers": 1, "intermediate_size": None,
        },
    ),
    "qwen3_next": (
        transformers.Qwen3NextForCausalLM,
        transformers.Qwen3NextConfig,
        "qwen2",
        {**_DELTA_NET_MOE, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "nemotron_h": (
        transformers.NemotronHForCausalLM,
        transformers.NemotronHConfig,
        "qwen2",
        {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
        {
            "hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "rms_norm_eps": 1e-5,
            **dict.fromkeys(("layers_block_type", "mtp_layers_block_type", "moe_latent_size", "n_group", "topk_group")),
            **dict.fromkeys(("n_routed_experts", "n_shared_experts", "norm_topk_prob", "routed_scaling_factor")),
            **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size")),
            **dict.fromkeys(("moe_shared_expert_overlap", "num_nextn_predict_layers", "output_router_logits")),
        },
    ),
    "nemotron_h_moe": (
        transformers.NemotronHForCausalLM,
        transformers.NemotronHConfig,
        "qwen2",
        {**_NEMOTRON_H, **_NEMOTRON_H_EXPERTS, "layers_block_type": ["linear_attention", "moe", "full_attention"]},
        {"hybrid_override_pattern": "ME*", "num_hidden_layers": 3, "layers_block_type": None, "norm_eps": 1e-5},
    ),
    "nemotron_h_mtp": (
        transformers.NemotronHForCausalLM,
        transformers.NemotronHConfig,
        "qwen2",
        {
            **_NEMOTRON_H, **_NEMOTRON_H_EXPERTS, "moe_latent_size": 32, "num_nextn_predict_layers": 1,
            "layers_block_type": ["full_attention", "moe", "linear_attention"],
        },
        {},
        _NEMOTRON_H_MTP,
    ),
    "lfm2": (
        transformers.Lfm2ForCausalLM,
        transformers.Lfm2Config,
        "qwen2",
        {
            "intermediate_size": 130, "block_multiple_of": 32, "layer_types": ["conv", "full_attention"],
            "pad_token_id": None,
        },
    ),
    "lfm2_moe": (
        transformers.Lfm2MoeForCausalLM,
        transformers.Lfm2MoeConfig,
        "llama3",
        {
            "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "pad_token_id": None,
        },
    ),
    "granite_hybrid": (
        transformers.GraniteMoeHybridForCausalLM,
        transformers.GraniteMoeHybridConfig,
        "qwen2",
        {**_GRANITE, "shared_intermediate_size": 96, "num_local_experts": 0, "num_experts_per_tok": 0},
        {"layer_types": ["mamba", "attention"], "position_embedding_type": "nope"},
    ),
    "granite_hybrid_moe": (
        transformers.GraniteMoeHybridForCausalLM,
        transformers.GraniteMoeHybridConfig,
        "qwen2",
        {**_GRANITE, "tie_word_embeddings": True},
        {"layer_types": ["mamba", "attention"], "position_embedding_type": "nope"},
    ),
    "granite_hybrid_dense": (
        transformers.GraniteMoeHybridForCausalLM,
        transformers.GraniteMoeHybridConfig,
        "qwen2",
        {
            **_GRANITE, "shared_intermediate_size": 96, "num_local_experts": 0, "num_experts_per_tok": 0,
            "layer_types": ["full_attention"] * 2, "position_embedding_type": "rope",
        },
        {"layer_types": ["attention"] * 2},
    ),
    "falcon_h1": (
        transformers.FalconH1ForCausalLM,
        transformers.FalconH1Config,
        "qwen2",
        {
            "head_dim": 24, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16,
            "mamba_n_groups": 2, "pad_token_id": None, "embedding_multiplier": 5.656854249492381,
            "lm_head_multiplier": 0.0390625, "key_multiplier": 0.39, "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9375, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.2357,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.7],
        },
    ),
    "falcon_h1_norm": (
        transformers.FalconH1ForCausalLM,
        transformers.FalconH1Config,
        "qwen2",
        {
            "head_dim": 16, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16,
            "pad_token_id": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "num_hidden_layers": 1,
        },
    ),
    "mamba": (
        transformers.MambaForCausalLM,
        transformers.MambaConfig,
        "qwen2",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "state_size": 4, "pad_token_id": None},
    ),
    "mamba2": (
        transformers.Mamba2ForCausalLM,
        transformers.Mamba2Config,
        "qwen2",
        {
            "vocab_size": 416, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "pad_token_id": None,
            "intermediate_size": 128, "tie_word_embeddings": False,
        },
    ),
    "llama_model": (transformers.LlamaModel, transformers.LlamaConfig, "llama3", {}),
    "smollm3": (
        transformers.SmolLM3ForCausalLM,
        transformers.SmolLM3Config,
        "llama3",
        {"num_hidden_layers": 4, "pad_token_id": None},
    ),
    "granite": (transformers.GraniteForCausalLM, transformers.GraniteConfig, "llama3", {**_GRANITE_DENSE, "mlp_bias": True}),  # noqa: E501
    "granitemoe": (transformers.GraniteMoeForCausalLM, transformers.GraniteMoeConfig, "pieces", _GRANITE_MOE),
    "granitemoeshared": (
        transformers.GraniteMoeSharedForCausalLM,
        transformers.GraniteMoeSharedConfig,
        "llama3",
        {**_GRANITE_MOE, "shared_intermediate_size": 80},
    ),
    "olmo2": (
        transformers.Olmo2ForCausalLM,
        transformers.Olmo2Config,
        "llama3",
        {"attention_bias": False, "pad_token_id": None},
    ),
    "olmo3": (
        transformers.Olmo3ForCausalLM,
        transformers.Olmo3Config,
        "qwen2",
        {
            "sliding_window": 16, "num_hidden_layers": 4, "pad_token_id": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                    "original_max_position_embeddings": 64, "attention_factor": 1.2079441541679836,
                },
            },
        },
    ),
    "exaone4": (
        transformers.Exaone4ForCausalLM,
        transformers.Exaone4Config,
        "llama3",
        {
            "sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
    ),
    "ernie4_5": (transformers.Ernie4_5ForCausalLM, transformers.Ernie4_5Config, "pieces", {"head_dim": 24}),
    "ernie4_5_moe": (
        transformers.Ernie4_5_MoeForCausalLM,
        transformers.Ernie4_5_MoeConfig,
        "pieces",
        {
            "num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
            "moe_intermediate_size": 48, "moe_layer_start_index": 1, "tie_word_embeddings": False,
        },
    ),
    "hunyuan_v1_dense": (
        transformers.HunYuanDenseV1ForCausalLM,
        transformers.HunYuanDenseV1Config,
        "qwen2",
        {
            "head_dim": 24, "max_position_embeddings": 32768, "attention_bias": False, "eod_token_id": 400,
            "pad_token_id": None, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "glm4": (
        transformers.Glm4ForCausalLM,
        transformers.Glm4Config,
        "glm",
        {"head_dim": 16, "pad_token_id": None, "partial_rotary_factor": 0.5},
    ),
    "arcee": (transformers.ArceeForCausalLM, transformers.ArceeConfig, "llama3", {}),
    "olmo": (
        transformers.OlmoForCausalLM,
        transformers.OlmoConfig,
        "qwen2",
        {"pad_token_id": None, "clip_qkv": 0.5, "tie_word_embeddings": True},
    ),
    "olmoe": (
        transformers.OlmoeForCausalLM,
        transformers.OlmoeConfig,
        "qwen2",
        {"pad_token_id": None, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "mellum": (
        transformers.MellumForCausalLM,
        transformers.MellumConfig,
        "qwen2",
        {
            "head_dim": 24, "sliding_window": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                    "original_max_position_embeddings": 64,
                },
            },
        },
    ),
    "phimoe": (
        transformers.PhimoeForCausalLM,
        transformers.PhimoeConfig,
        "pieces",
        {
            "attention_bias": True, "lm_head_bias": True, "num_local_experts": 4, "sliding_window": None,
            "original_max_position_embeddings": 512,
        },
    ),
    "seed_oss": (
        transformers.SeedOssForCausalLM,
        transformers.SeedOssConfig,
        "qwen2",
        {"head_dim": 24, "pad_token_id": None},
    ),
    "deepseek_v2": (
        transformers.DeepseekV2ForCausalLM,
        transformers.DeepseekV2Config,
        "qwen2",
        {
            **_MLA, "topk_method": "greedy", "routed_scaling_factor": 2.0,
            "rope_parameters": {**_MLA_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3ForCausalLM,
        transformers.DeepseekV3Config,
        "llama3",
        {
            **_MLA, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
            "n_shared_experts": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "rope_parameters": _MLA_YARN,
        },
    ),
    "deepseek_v32": (
        transformers.DeepseekV32ForCausalLM,
        transformers.DeepseekV32Config,
        "llama3",
        {
            **_MLA, "num_hidden_layers": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
            "index_n_heads": 3, "index_head_dim": 64, "index_topk": 64, "scoring_func": "sigmoid",
            "num_nextn_predict_layers": 1, "rope_parameters": _MLA_YARN,
        },
    ),
    "glm4_moe": (
        transformers.Glm4MoeForCausalLM,
        transformers.Glm4MoeConfig,
        "glm_moe",
        {
            "head_dim": 24, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.5,
        },
    ),
    "minimax_m2": (
        transformers.MiniMaxM2ForCausalLM,
        transformers.MiniMaxM2Config,
        "qwen2",
        {
            **_MIXTRAL, "head_dim": 24, "rotary_dim": 12, "scoring_func": "sigmoid", "use_qk_norm": True,
            "attn_type_list": [1, 1],
        },
    ),
    "glm_moe_dsa": (
        transformers.GlmMoeDsaForCausalLM,
        transformers.GlmMoeDsaConfig,
        "glm_moe",
        {
            **_MLA, "num_hidden_layers": 3, "n_routed_experts": 3, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "index_n_heads": 3, "index_head_dim": 64, "index_topk": 64, "scoring_func": "sigmoid",
            "indexer_types": ["full", "shared", "full"], "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6,
        },
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteForCausalLM,
        transformers.Glm4MoeLiteConfig,
        "glm_moe",
        {
            **_MLA, "num_hidden_layers": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
            "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "scoring_func": "sigmoid",
        },
    ),
}  # fmt: skip

# Tensors for multi-token prediction, which published models have and transformers does not write: vLLM,
# models/qwen3_next_mtp.py and models/qwen3_5_mtp.py.
_MTP = {
    "fc.weight": [64, 128], "pre_fc_norm_embedding.weight": [64], "pre_fc_norm_hidden.weight": [64],
    "norm.weight": [64], "layers.0.input_layernorm.weight": [64], "layers.0.post_attention_layernorm.weight": [64],
    "layers.0.self_attn.q_proj.weight": [256, 64], "layers.0.self_attn.k_proj.weight": [64, 64],
    "layers.0.self_attn.v_proj.weight": [64, 64], "layers.0.self_attn.o_proj.weight": [64, 128],
    "layers.0.self_attn.q_norm.weight": [32], "layers.0.self_attn.k_norm.weight": [32],
}  # fmt: skip
_MTP_DENSE = {f"layers.0.mlp.{name}_proj.weight": [96, 64] for name in ("gate", "up")} | {
    "layers.0.mlp.down_proj.weight": [64, 96]
}
_MTP_MOE = {
    "layers.0.mlp.gate.weight": [3, 64], "layers.0.mlp.shared_expert_gate.weight": [1, 64],
    **{f"layers.0.mlp.shared_expert.{name}_proj.weight": [80, 64] for name in ("gate", "up")},
    "layers.0.mlp.shared_expert.down_proj.weight": [64, 80],
    **{f"layers.0.mlp.experts.{k}.{name}_proj.weight": [48, 64] for k in range(3) for name in ("gate", "up")},
    **{f"layers.0.mlp.experts.{k}.down_proj.weight": [64, 48] for k in range(3)},
}  # fmt: skip
ADDED = {"qwen3_5": _MTP | _MTP_DENSE, "qwen3_5_moe": _MTP | _MTP_MOE}
# Options of the converter.
OPTIONS = {"qwen3_next": ["--no-mtp"]}


_ENDS = {"bos_token_id": 320, "eos_token_id": 320}
MODELS["gpt2"] = (transformers.GPT2LMHeadModel, transformers.GPT2Config, "gpt2", {**_ENDS, "n_ctx": 512})
MODELS["gpt2_untied"] = (
    transformers.GPT2LMHeadModel,
    transformers.GPT2Config,
    "gpt2",
    {**_ENDS, "n_ctx": 512, "n_inner": 256, "tie_word_embeddings": False},
)


MODELS["bert_model"] = (transformers.BertModel, transformers.BertConfig, "word_pieces", {"pad_token_id": 0})
MODELS["gpt_neox"] = (
    transformers.GPTNeoXForCausalLM,
    transformers.GPTNeoXConfig,
    "qwen2",
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
)
MODELS["gpt_neox_sequential"] = (
    transformers.GPTNeoXForCausalLM,
    transformers.GPTNeoXConfig,
    "qwen2",
    {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        "use_parallel_residual": False,
        "hidden_act": "gelu_fast",
    },
)
MODELS["phi"] = (
    transformers.PhiForCausalLM,
    transformers.PhiConfig,
    "qwen2",
    {"intermediate_size": 256, "num_key_value_heads": 4},
)
MODELS["bloom"] = (transformers.BloomForCausalLM, transformers.BloomConfig, "qwen2", {"seq_length": 512})
MODELS["starcoder2"] = (transformers.Starcoder2ForCausalLM, transformers.Starcoder2Config, "qwen2", {})
MODELS["starcoder2_untied"] = (
    transformers.Starcoder2ForCausalLM,
    transformers.Starcoder2Config,
    "qwen2",
    {
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 2.0},
    },
)
MODELS["stablelm"] = (transformers.StableLmForCausalLM, transformers.StableLmConfig, "qwen2", {"use_qkv_bias": True})
MODELS["stablelm_parallel"] = (
    transformers.StableLmForCausalLM,
    transformers.StableLmConfig,
    "qwen2",
    {"qk_layernorm": True, "use_parallel_residual": True},
)
MODELS["nemotron"] = (transformers.NemotronForCausalLM, transformers.NemotronConfig, "pieces", {})
MODELS["falcon"] = (
    transformers.FalconForCausalLM,
    transformers.FalconConfig,
    "qwen2",
    {"num_kv_heads": 1, "max_position_embeddings": 2048},
)
MODELS["falcon_new"] = (
    transformers.FalconForCausalLM,
    transformers.FalconConfig,
    "qwen2",
    {"num_kv_heads": 2, "new_decoder_architecture": True, "max_position_embeddings": 2048},
)

MODELS["gpt_bigcode"] = (transformers.GPTBigCodeForCausalLM, transformers.GPTBigCodeConfig, "qwen2", {})

_STACK = 'self._stack_qk_norm(bid, n_{0}head, self._{1}_norms[bid], "{1}_layernorm")'
# The converter reads a key that transformers 5 has under another name, and loses the norms of q and k. From a model of
# text and images it drops the embedding, and so that of [IMG_BREAK], without which llama.cpp does not load Pixtral.
_KEEPS_EMBEDDING = """    use_break_tok, img_break_tok_id = True, -1

    @classmethod
    def filter_tensors(cls, item):
        return item if item[0].endswith("embed_tokens.weight") else super().filter_tensors(item)
"""
_REPAIRS = {
    "llava.py": {"    img_break_tok_id = -1\n    use_break_tok = True\n": _KEEPS_EMBEDDING},
    "gptneox.py": {'self.hparams["rotary_pct"]': 'self.rope_parameters["partial_rotary_factor"]'},
    "stablelm.py": {
        f"return {stack}": f"return (yield from {stack})"
        for stack in (_STACK.format("", "q"), _STACK.format("kv_", "k"))
    },
}


# Classes that the converter takes, where transformers has another name.
PUBLISHED = {"phimoe": "PhiMoEForCausalLM"}


# Models with a layer for multi-token prediction, as published files have it; transformers leaves it out.
PREDICTING = ("deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")


def prediction_layer(shapes, config):
    """The tensors of a further layer, with the last one's and those of DeepSeek-V3's technical report, section 2.2."""
    last, layer = (f"model.layers.{config.num_hidden_layers - back}." for back in (1, 0))
    more = {name.replace(last, layer): shape for name, shape in shapes.items() if name.startswith(last)}
    size, vectors = config.hidden_size, ("enorm", "hnorm", "shared_head.norm")
    more |= {f"{layer}{name}.weight": [size] for name in vectors}
    matrices = {"embed_tokens": config.vocab_size, "shared_head.head": config.vocab_size}
    more |= {f"{layer}{name}.weight": [rows, size] for name, rows in matrices.items()}
    return {**more, f"{layer}eh_proj.weight": [size, 2 * size]}


# Models in codes: the model without these, the settings, and the matrices in codes.
_CT_NVFP4 = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized", "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "group_size": 16, "strategy": "tensor_group", "symmetric": True, "type": "float",
            },
        }
    },
}  # fmt: skip
PACKED = {
    "gpt_oss_mxfp4": ("gpt_oss", {}, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
    "llama_nvfp4": (
        "llama2",
        {"intermediate_size": 128},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
    "qwen3_w4a16_nvfp4": (
        "qwen3",
        {"intermediate_size": 128, "head_dim": 32},
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]},
    ),
    "qwen3_moe_nvfp4": ("qwen3_moe", {"head_dim": 32, "moe_intermediate_size": 64}, _CT_NVFP4),
}


def packed(shapes, method):
    """Return the tensors of a model with linear layers in codes."""
    result = {}
    for name, shape in shapes.items():
        module, (rows, columns) = name.removesuffix(".weight"), shape if len(shape) == 2 else (0, 0)
        if method == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks = [shape[0], shape[2], shape[1] // 32]
            result |= {f"{name}_blocks": ["U8", *blocks, 16], f"{name}_scales": ["U8", *blocks]}
        elif method == "mxfp4" or not name.endswith("_proj.weight"):
            result[name] = shape
        else:
            codes, scales = ["U8", rows, columns // 2], ["F8_E4M3", rows, columns // 16]
            modelopt = method == "modelopt"
            result |= {f"{module}.weight{'' if modelopt else '_packed'}": codes, f"{module}.weight_scale": scales}
            both = ("weight_scale_2", "input_scale") if modelopt else ("weight_global_scale", "input_global_scale")
            result |= {f"{module}.{part}": ["F32"] if modelopt else ["F32", 1] for part in both}
            if modelopt and module.endswith(("k_proj", "v_proj")):
                result[f"{module}.{module[-6]}_scale"] = ["F32"]
    return result


def config_of(name, table=None):
    """Return config and tensor shapes of a model, as transformers writes them."""
    base, codes, quantization = PACKED.get(name, (name, {}, {}))
    model_class, config_class, tokenizer, settings, *published = MODELS[base] if table is None else table[name][:4]
    settings = {**settings, **codes}
    has = config_class.__dataclass_fields__.keys() | config_class.attribute_map.keys()
    inner = settings.get("text_config")  # of a model of text and images; with its sizes, it has all keys to publish
    sizes = {key: value for key, value in _SIZES.items() if key in has or inner}
    usual = {**sizes, "vocab_size": TOKENIZERS[tokenizer][1], "bos_token_id": None, "eos_token_id": None}
    whole = inner is not None and "hidden_size" in inner
    if inner:
        config = config_class(**{**settings, "text_config": inner if whole else {**usual, **inner}})
    else:
        config = config_class(**{**usual, **settings})
    with tempfile.TemporaryDirectory() as folder:
        model_class(config).to(torch.bfloat16).save_pretrained(folder)
        with safeload.open(f"{folder}/model.safetensors") as file:
            shapes = {name: list(tensor.shape) for name, tensor in file.tensors.items()}
        if name in PREDICTING:
            shapes |= prediction_layer(shapes, config)
        saved = json.loads((Path(folder) / "config.json").read_text())
    if name == "qwen3_5_moe":  # experts are published as transformers holds them, those of the added layer one by one
        shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
        for layer in range(2):
            experts = f"model.layers.{layer}.mlp.experts."
            shapes |= {f"{experts}gate_up_proj": [3, 96, 64], f"{experts}down_proj": [3, 64, 48]}
    if name == "bert_model":  # neither program keeps the pooler
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("pooler.")}
    if table is VISION:
        begin, other = _PUBLISHED_NAMES.get(name, ("", ""))
        shapes = {other * key.startswith(begin) + key.removeprefix(begin): shape for key, shape in shapes.items()}
    for tensor in shapes:
        if name in _TRANSPOSED and ".mlp.experts." in tensor:
            shapes[tensor][1:] = shapes[tensor][:0:-1]
    if whole:
        saved["text_config"] = inner
    saved["architectures"] = [PUBLISHED.get(name, each) for each in saved["architectures"]]
    changes, more = [*published, {}, {}][:2]
    saved = {key: value for key, value in {**saved, **changes}.items() if key not in changes or value is not None}
    if quantization:
        return {**saved, "quantization_config": quantization}, packed(shapes, quantization["quant_method"])
    return saved, {**shapes, **more, **{f"mtp.{key}": shape for key, shape in ADDED.get(name, {}).items()}}


def check_names(converter):
    """Compare the names of pre-tokenizers with the converter."""
    code = (Path(converter) / "conversion" / "base.py").read_text(encoding="utf-8")
    names = dict(re.findall(r'chkhsh == "(\w+)":\s+(?:#.*\s+)?res = "(.+)"', code))
    assert names == llama_models.pre_tokenizers()["by_hash"]


def reference(converter, folder, path, options=(), *, raw=False, outtype="f32"):
    """Run llama.cpp's converter, which knows published tokenizers by their hash: ours have another.

    ``raw``: it reads the config as it is. Transformers 5 gives layers other names than published files and the
    converter, which is made for 4.57, and adds the keys of experts to models without experts.
    """
    content = _text(folder / "tokenizer.json")
    pre = "llama-bpe" if 'ignore_merges": true' in content else "qwen2" if '"Split"' in content else "gpt-2"
    pre = "default" if '"WordPiece"' in content else pre
    source = Path(converter) / "conversion" / "base.py"
    code = source.read_text(encoding="utf-8")
    marked = "        if res is None:\n"
    if "SAFELOAD_PRE" not in code:
        patch = f'{marked}            res = __import__("os").environ.get("SAFELOAD_PRE")\n{marked}'
        source.write_text(code.replace(marked, patch, 1), encoding="utf-8")
    code = source.read_text(encoding="utf-8")
    loads = "AutoConfig.from_pretrained(dir_model, trust_remote_code=False).to_dict()\n"
    if loads in code:
        patch = f'json.load(open(dir_model / "config.json")) if "SAFELOAD_RAW" in os.environ else {loads[:-1]}  #\n'
        source.write_text(code.replace(loads, patch, 1), encoding="utf-8")
    for name, changes in _REPAIRS.items():
        module = source.with_name(name)
        text = module.read_text(encoding="utf-8")
        for old, new in changes.items():
            text = text.replace(old, new)
        module.write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-O",  # without its assertions that DeepSeek-V3.2's tokenizer is the published one
        f"{converter}/convert_hf_to_gguf.py",
        str(folder),
        "--outfile",
        str(path),
        "--outtype",
        outtype,
        *options,
    ]
    path = f"{converter}/gguf-py{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "SAFELOAD_PRE": pre, **({"SAFELOAD_RAW": "1"} if raw else {})}
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr


def vision(converter, name):
    """Return a model with a tower, and what the converter makes of this tower for each of its types."""
    config, shapes = config_of(name, VISION)
    entry = {"config": config, "tokenizer": VISION[name][2], "tensors": shapes, "files": VISION[name][4]}
    entry["digests"] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = llama_models.write_folder(Path(folder) / name, entry)
        for outtype in ("bf16", "f16", "q8_0", "f32"):
            path = Path(folder) / "reference.gguf"
            reference(converter, source, path, ["--mmproj"], outtype=outtype)
            entry["digests"][outtype] = llama_models.digest_of(path)
        entry["reference"] = llama_models.described(path)
    return entry


def _text(path):
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(converter, names):
    check_names(converter)
    for name, (maker, _) in () if names else TOKENIZERS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        maker(folder)
    for file, made, outtype in (("models.json", MODELS, "f32"), ("packed.json", PACKED, "bf16")):
        entries = dict(llama_models.listed(file)) if names else {}
        for name in [name for name in names if name in made] if names else made:
            config, shapes = config_of(name)
            tokenizer = MODELS[PACKED[name][0] if name in PACKED else name][2]
            entry = {"config": config, "tokenizer": tokenizer, "tensors": shapes}
            with tempfile.TemporaryDirectory() as folder:
                source = llama_models.write_folder(Path(folder) / name, entry)
                options, raw = OPTIONS.get(name, ()), len(MODELS.get(name, ())) > 4
                reference(converter, source, Path(folder) / "reference.gguf", options, raw=raw, outtype=outtype)
                entry["reference"] = llama_models.described(Path(folder) / "reference.gguf")
            entries[name] = entry
        lines = [f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in made if name in entries]
        (HERE / file).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    entries = dict(llama_models.listed("vision.json")) if names else {}
    entries |= {name: vision(converter, name) for name in VISION if not names or f"vision:{name}" in names}
    lines = [f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in VISION if name in entries]
    (HERE / "vision.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
