"""Compares safeload with PEFT's own merge, for tiny random models of transformers: ``compare.py FOLDER [CLASS ...]``.

Needs torch, transformers 5.24.0, peft 0.21.2 and safeload. PEFT trains all linear layers, and the stacks of experts.
transformers writes base and result under the published names. A class whose small model cannot be built is left out.
"""

import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import transformers
from make import auto_classes
from peft import LoraConfig, get_peft_model

import safeload

SMALL = {
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth encoder_num_hidden_layers "
    "decoder_num_hidden_layers num_encoder_layers num_decoder_layers num_experts_per_tok num_key_value_heads n_groups",
    4: "num_experts num_local_experts n_routed_experts num_attention_heads n_head num_heads n_heads mamba_num_heads "
    "encoder_attention_heads decoder_attention_heads qk_rope_head_dim qk_nope_head_dim mamba_n_heads",
    1: "n_group topk_group first_k_dense_replace",
    0: "num_kv_shared_layers",
    8: "head_dim d_kv v_head_dim patch_size hidden_size_per_layer_input ssm_state_size",
    16: "q_lora_rank kv_lora_rank projection_dim mamba_head_dim mamba_d_head",
    24: "moe_intermediate_size shared_expert_intermediate_size",
    32: "hidden_size d_model n_embd dim embed_dim hidden_dim out_hidden_size image_size",
    48: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner",
    64: "max_position_embeddings",
    96: "vocab_size vocab_size_per_layer_input",
}
SIZES = {key: value for value, keys in SMALL.items() for key in keys.split()}
SIZES |= {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id", "image_token_index", "video_token_id")
EXPERTS, UNTRAINED = ".experts.", ["out_proj", "conv1d"]
ENDS = ("LM", "ForConditionalGeneration", "Classification")
#: As the suite has it: PEFT rounds once more.
EPS = float(np.finfo(np.float32).eps)


def shrunk(config):
    """A configuration with small sizes, in nested ones too."""
    layers = getattr(config, "num_hidden_layers", None)
    for key, value in SIZES.items():
        with suppress(AttributeError, KeyError, ValueError):  # some are properties
            if type(getattr(config, key, None)) is type(value):
                setattr(config, key, value)
    for key in TOKENS:
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, 1)
    for key, value in [*vars(config).items()]:
        if isinstance(value, list) and len(value) == layers:
            setattr(config, key, value[:2])
    for key in getattr(config, "sub_configs", {}):
        if isinstance(inner := getattr(config, key, None), transformers.PreTrainedConfig):
            shrunk(inner)
    return config


def trained(model, folder):
    """Save an adapter of a model, and merge it by PEFT."""
    stacks = {
        name.rpartition(".")[2] for name, value in model.named_parameters() if value.ndim == 3 and EXPERTS in name
    }
    options = {"target_modules": "all-linear", "target_parameters": sorted(f"experts.{name}" for name in stacks)}
    if not any(isinstance(module, torch.nn.Linear) for module in model.modules()):
        return None
    try:
        adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **options))
    except ValueError:  # Mamba reads these weights itself
        adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, exclude_modules=UNTRAINED, **options))
    for name, value in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(value, std=0.5)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


def compare(name, folder):
    """What became of a class: "equal", or why not."""
    model_class = getattr(transformers, name)
    try:
        torch.manual_seed(0)
        model = model_class(shrunk(model_class.config_class())).to(torch.float32)
    except Exception as error:
        return f"not built: {error}"
    if sum(value.numel() for value in model.parameters()) > 60e6:
        return "not built: too large"
    try:
        model.save_pretrained(folder / "base")
        merged = trained(model, folder / "adapter")
        if merged is None:
            return "not built: no linear layers"
        merged.save_pretrained(folder / "merged")
    except Exception as error:
        return f"not built: PEFT: {type(error).__name__}: {error}"
    try:
        found = safeload.load(folder / "base", adapters=folder / "adapter")
        expected = safeload.load(folder / "merged")
    except Exception as error:
        return f"refused: {error}"
    if found.keys() != expected.keys():
        return f"other names: {sorted(found.keys() ^ expected.keys())[:4]}"
    base = safeload.load(folder / "base")
    changed = sum(not np.array_equal(value, base[key]) for key, value in expected.items())
    for key, value in expected.items():
        bound = 16 * EPS * max(1.0, float(np.abs(value).max(initial=0)))
        if value.shape != found[key].shape or not np.allclose(value, found[key], rtol=0, atol=bound):
            return f"differs: {key}"
    return f"equal: {changed} changed" if changed else "not built: nothing changed"


def main():
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kept = Path(sys.argv[1])
    names = sys.argv[2:] or [name for name in auto_classes() if name.endswith(ENDS)]
    results = {}
    for name in names:
        folder = kept / name
        shutil.rmtree(folder, ignore_errors=True)
        results[name] = compare(name, folder)
        print(f"{name}: {results[name][:600]}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    wrong = [name for name, result in results.items() if not result.startswith(("equal", "not built"))]
    equal = sum(result.startswith("equal") for result in results.values())
    print(f"{equal} equal, {len(wrong)} not, {len(results) - equal - len(wrong)} not built")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
