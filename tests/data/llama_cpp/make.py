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


def byte_level(expression, *, bos=None, ignore_merges=False, nfc=False, size=400):
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
    special = [text for text in (bos, "<|endoftext|>", "<|im_start|>", "<|im_end|>") if text]
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


# How a tokenizer is made, and the rows of the embedding; Qwen's has some without a token.
TOKENIZERS = {
    "llama3": (_llama3, 405),
    "qwen2": (_qwen, 408),
    "pieces": (pieces, 453),
    "gemma": (functools.partial(pieces, gemma=True), 453),
}

_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
_QWEN_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False,
}  # fmt: skip

_DELTA_NET = {
    "head_dim": 32, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6,
}  # fmt: skip
_DELTA_NET_MOE = {**_DELTA_NET, **{key: _QWEN_MOE[key] for key in _QWEN_MOE if "_expert" in key or "moe" in key}}

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
    """Return the tensors of a model whose linear layers are in codes."""
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


def config_of(name):
    """Return config and tensor shapes of a model, as transformers writes them."""
    base, changes, quantization = PACKED.get(name, (name, {}, {}))
    model_class, config_class, tokenizer, settings = MODELS[base]
    settings = {**settings, **changes}
    size = TOKENIZERS[tokenizer][1]
    config = config_class(**{**_SIZES, "vocab_size": size, "bos_token_id": None, "eos_token_id": None, **settings})
    with tempfile.TemporaryDirectory() as folder:
        model_class(config).to(torch.bfloat16).save_pretrained(folder)
        with safeload.open(f"{folder}/model.safetensors") as file:
            shapes = {name: list(tensor.shape) for name, tensor in file.tensors.items()}
        saved = json.loads((Path(folder) / "config.json").read_text())
    if name == "qwen3_5_moe":  # experts are published as transformers holds them, those of the added layer one by one
        shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
        for layer in range(2):
            experts = f"model.layers.{layer}.mlp.experts."
            shapes |= {f"{experts}gate_up_proj": [3, 96, 64], f"{experts}down_proj": [3, 64, 48]}
    if quantization:
        return {**saved, "quantization_config": quantization}, packed(shapes, quantization["quant_method"])
    return saved, shapes | {f"mtp.{key}": shape for key, shape in ADDED.get(name, {}).items()}


def reference(converter, folder, path, options=(), outtype="f32"):
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
        f"{converter}/convert_hf_to_gguf.py",
        str(folder),
        "--outfile",
        str(path),
        "--outtype",
        outtype,
        *options,
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
    for file, made, outtype in (("models.json", MODELS, "f32"), ("packed.json", PACKED, "bf16")):
        entries = llama_models.listed(file) if names else {}
        for name in [name for name in names if name in made] if names else made:
            config, shapes = config_of(name)
            tokenizer = MODELS[PACKED[name][0] if name in PACKED else name][2]
            entry = {"config": config, "tokenizer": tokenizer, "tensors": shapes}
            with tempfile.TemporaryDirectory() as folder:
                source = llama_models.write_folder(Path(folder) / name, entry)
                reference(converter, source, Path(folder) / "reference.gguf", OPTIONS.get(name, ()), outtype)
                entry["reference"] = llama_models.described(Path(folder) / "reference.gguf")
            entries[name] = entry
        lines = [f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in made]
        (HERE / file).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
