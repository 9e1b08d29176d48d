"""Models of transformers for mlx-lm: those of `llama_models`, with the config keys that mlx-lm reads."""

import functools
import json

from . import llama_models
from .paths import ROOT

DATA = ROOT / "tests" / "data" / "mlx" / "models.json"
ARGUMENTS = DATA.with_name("arguments.json")

# Models of text and images around a language model that `llama_models` has alone: its name, the type of the whole, the
# key of its config, and where its tensors stand.
AROUND = {
    "qwen3_5_images": ("qwen3_5", "qwen3_5", "text_config", "model.language_model."),
    "qwen3_5_moe_images": ("qwen3_5_moe", "qwen3_5_moe", "text_config", "model.language_model."),
    "kimi_k25": ("deepseek_v3", "kimi_k25", "text_config", "language_model.model."),
}
CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "kimi_k25": "KimiK25ForConditionalGeneration",
}

# More keys that mlx-lm needs, which published models have; those of the language model below "text_config".
MORE = {
    "qwen3_moe": {"num_experts": 4},
    "qwen3_vl_moe": {"tie_word_embeddings": False, "text_config": {"num_experts": 4, "tie_word_embeddings": False}},
    "gemma3_vision": {"vocab_size": 453, "text_config": {"vocab_size": 453}},
    "gemma4": {"global_head_dim": 32},
    "gemma4_moe": {"global_head_dim": 32, "num_global_key_value_heads": 1},
    "gemma4_vision": {"vocab_size": 453, "text_config": {"num_kv_shared_layers": 0}},
    "gemma4_unified": {"vocab_size": 453, "text_config": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}},
    "qwen3_next": {"full_attention_interval": 2},
    "lfm2": {"block_dim": 64},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt_neox_sequential": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "exaone4": {"head_dim": 16},
    "mellum": {"num_experts": 4},
    "glm4_moe": {"rope_scaling": None},
    "minimax_m2": {"shared_intermediate_size": 0},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "moe_layer_freq": 1},
    "qwen3_5_moe_images": {"text_config": {"full_attention_interval": 2}},
}


def older(config):
    """The keys of transformers 4 beside those of transformers 5, and what mlx-lm has no default for."""
    rope = config.get("rope_parameters") or {}
    if "gemma4" in config["model_type"]:  # mlx-lm reads the new keys
        rope = {}
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    more = {"rope_theta": full.get("rope_theta"), "partial_rotary_factor": full.get("partial_rotary_factor")}
    more["rope_local_base_freq"] = sliding.get("rope_theta")
    kind = full.get("rope_type", "default")
    more["rope_scaling"] = {**full, "type": kind} if kind != "default" else None
    more = {key: value for key, value in more.items() if value is not None and config.get(key) is None}
    inner = config.get("text_config")
    if isinstance(inner, dict):
        tie = {key: config[key] for key in ("tie_word_embeddings",) if key in config and key not in inner}
        more["text_config"] = {**inner, **tie, **older(inner)}
    return more


@functools.cache
def listed():
    """The models by name, which nobody changes."""
    models = {name: dict(model) for name, model in llama_models.listed().items()}
    for name in ("gpt2", "gpt2_untied"):  # mlx-lm knows the names of the published files
        tensors = models[name]["tensors"].items()
        models[name]["tensors"] = {each.removeprefix("transformer."): shape for each, shape in tensors}
    for name in ("gpt_neox", "gpt_neox_sequential"):  # mlx-lm has a width of its own
        model = models[name]
        model["config"] = {**model["config"], "intermediate_size": 256}
        model["tensors"] = {each: [256 if n == 96 else n for n in shape] for each, shape in model["tensors"].items()}
    for name, (inner, model_type, key, prefix) in AROUND.items():
        model = models[inner]
        whole = {"architectures": [CLASSES[model_type]], "model_type": model_type, key: model["config"]}
        whole |= {"vision_config": {"depth": 1}, "tie_word_embeddings": model["config"]["tie_word_embeddings"]}
        head = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
        names = {
            each: prefix + each.removeprefix("model.") if each.startswith("model.") else each
            for each in model["tensors"]
        }
        names["lm_head.weight"] = head + "lm_head.weight"
        tensors = {names[each]: shape for each, shape in model["tensors"].items()}
        tower = "vision_tower.patch.weight" if model_type == "kimi_k25" else "model.visual.patch_embed.weight"
        models[name] = {**model, "config": whole, "tensors": {**tensors, tower: [4, 4]}}
    return models


def write(folder, name):
    """Write a model of `listed` with the keys that mlx-lm reads."""
    model = listed()[name]
    more = dict(MORE.get(name, {}))
    if "text_config" in more:
        more["text_config"] = {**model["config"]["text_config"], **more["text_config"]}
    config = {**model["config"], **more}
    return llama_models.write_folder(folder, {**model, "config": {**config, **older(config)}})


def digest_of(tensors):
    """A digest of described tensors."""
    return llama_models.digest(json.dumps(tensors, sort_keys=True).encode())


@functools.cache
def expected():
    """What mlx-lm writes of the models, by name and format."""
    return json.loads(DATA.read_text(encoding="utf-8"))
