"""Make tiny tokenizers, the configs of tiny models, and what llama.cpp's converter makes of these.

    PYTHONPATH=tests python tests/data/llama_cpp/make.py PATH_OF_LLAMA_CPP             # all
    PYTHONPATH=tests python tests/data/llama_cpp/make.py PATH_OF_LLAMA_CPP qwen3 phi3  # some models

Needs transformers 5.24.0, torch, tokenizers, sentencepiece and gguf. The converter is changed in place, so give a copy
of llama.cpp, such as vendor/llama.cpp in the source distribution of llama-cpp-python.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from builders import llama_models
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


_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def _llama3(folder):
    save_byte_level(folder, byte_level(LLAMA_3, bos="<|begin|>", ignore_merges=True), bos="<|begin|>")


def _qwen(folder):
    save_byte_level(folder, byte_level(QWEN_2, nfc=True))


def _glm(folder):
    save_byte_level(folder, byte_level(QWEN_2, more=("[gMASK]", "<|user|>", "<|observation|>")))


# How a tokenizer is made, and the rows of the embedding; Qwen's has some without a token.
TOKENIZERS = {
    "llama3": (_llama3, 405),
    "qwen2": (_qwen, 408),
    "glm": (_glm, 408),
    "pieces": (pieces, 453),
    "gemma": (functools.partial(pieces, gemma=True), 453),
}

_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
_QWEN_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False,
}  # fmt: skip
_MLA = {
    "num_key_value_heads": 4, "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "kv_lora_rank": 32,
    "q_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_MLA_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
}  # fmt: skip

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
        "glm",
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
        "glm",
        {
            **_MLA, "num_hidden_layers": 3, "n_routed_experts": 3, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "index_n_heads": 3, "index_head_dim": 64, "index_topk": 64, "scoring_func": "sigmoid",
            "indexer_types": ["full", "shared", "full"], "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6,
        },
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteForCausalLM,
        transformers.Glm4MoeLiteConfig,
        "glm",
        {
            **_MLA, "num_hidden_layers": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
            "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "scoring_func": "sigmoid",
        },
    ),
}  # fmt: skip


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


def config_of(name):
    """Return config and tensor shapes of a model, as transformers writes them."""
    model_class, config_class, tokenizer, settings = MODELS[name]
    size = TOKENIZERS[tokenizer][1]
    config = config_class(**{**_SIZES, "vocab_size": size, "bos_token_id": None, "eos_token_id": None, **settings})
    with tempfile.TemporaryDirectory() as folder:
        model_class(config).to(torch.bfloat16).save_pretrained(folder)
        with safeload.open(f"{folder}/model.safetensors") as file:
            shapes = {name: list(tensor.shape) for name, tensor in file.tensors.items()}
        if name in PREDICTING:
            shapes |= prediction_layer(shapes, config)
        saved = json.loads((Path(folder) / "config.json").read_text())
    return saved, shapes


def reference(converter, folder, path):
    """Run llama.cpp's converter, which knows published tokenizers by their hash: ours have another."""
    pre = "llama-bpe" if 'ignore_merges": true' in _text(folder / "tokenizer.json") else "qwen2"
    source = Path(converter) / "conversion" / "base.py"
    code = source.read_text(encoding="utf-8")
    marked = "        if res is None:\n"
    if "SAFELOAD_PRE" not in code:
        patch = f'{marked}            res = __import__("os").environ.get("SAFELOAD_PRE")\n{marked}'
        source.write_text(code.replace(marked, patch, 1), encoding="utf-8")
    command = [
        sys.executable,
        "-O",  # without its assertions that DeepSeek-V3.2's tokenizer is the published one
        f"{converter}/convert_hf_to_gguf.py",
        str(folder),
        "--outfile",
        str(path),
        "--outtype",
        "f32",
    ]
    env = {**os.environ, "PYTHONPATH": f"{converter}/gguf-py", "SAFELOAD_PRE": pre}
    subprocess.run(command, check=True, capture_output=True, env=env)


def _text(path):
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(converter, names):
    for name, (maker, _) in () if names else TOKENIZERS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        maker(folder)
    entries = llama_models.listed() if names else {}
    for name in names or MODELS:
        config, shapes = config_of(name)
        entry = {"config": config, "tokenizer": MODELS[name][2], "tensors": shapes}
        with tempfile.TemporaryDirectory() as folder:
            source = llama_models.write_folder(Path(folder) / name, entry)
            reference(converter, source, Path(folder) / "reference.gguf")
            entry["reference"] = llama_models.described(Path(folder) / "reference.gguf")
        entries[name] = entry
    lines = [f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in MODELS]
    (HERE / "models.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
