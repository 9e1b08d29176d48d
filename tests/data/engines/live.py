"""Compares the logits of folders that safeload writes with those of the engines' own, in transformers and mlx-lm.

python live.py FOLDER, in the environment of compare.sh.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from builders import code_layouts as layouts
from builders.engine_models import EXPERTS, config, tensors, write_experts, write_model
from make import COMPRESSED, MLX, MLX_EXPERTS
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import safeload
from safeload.numpy import save_file

TOKENS = list(range(1, 9))


# Codes that move, by their layout: with zero points, or with the middle code as 0.
MOVED = {
    "awq asym": lambda seed, shape: layouts.awq("F16", 32, seed, shape),
    "awq": lambda seed, shape: layouts.awq("F16", 32, seed, shape, zero=8),
    "gptq asym": lambda seed, shape: layouts.gptq("F16", 32, seed, shape),
    "gptq": lambda seed, shape: layouts.gptq("F16", 32, seed, shape, zero=8),
    "compressed asym": lambda seed, shape: layouts.compressed("F16", 32, seed, shape, symmetric=False),
    "compressed": lambda seed, shape: layouts.compressed("F16", 32, seed, shape),
}
TARGETS = ("w4a16_asym-g32", "w4a16-g32")


def logits(folder, dtype=torch.bfloat16, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model(torch.tensor([TOKENS])).logits.float()


def of_compressed(source, out, name):
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    oneshot(
        model=model,
        recipe=QuantizationModifier(targets="Linear", scheme=name.upper(), ignore=["lm_head", r"re:.*mlp\.gate$"]),
    )
    model.save_pretrained(out, save_compressed=True)
    return logits(out)


def of_bitsandbytes(source, out, name):
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=name.removeprefix("bnb_"))
    return logits(source, quantization_config=settings, device_map="cpu")


def of_values(source, out, name):
    """The model with the weights that safeload reads."""
    plain = out.with_name("plain")
    shutil.rmtree(plain, ignore_errors=True)
    safeload.convert(out.with_name("ours"), plain, dtype="bfloat16")
    return logits(plain)


def mlx_logits(folder, name=None):
    import mlx.core as mx
    from mlx_lm.utils import load_model, quantize_model

    model, config = load_model(folder)
    if name is not None:
        bits, group, mode = MLX[name]
        model, _ = quantize_model(model, config, group, bits, mode=mode)
    return model(mx.array([TOKENS])).astype(mx.float32)


def attempt(load, *arguments):
    """The logits, or the error as text."""
    try:
        return load(*arguments)
    except RuntimeError as error:
        return str(error)


def of_experts(folder):
    """Compare models with experts; transformers fails to load some formats, whoever has written them."""
    source = write_experts(folder / "qwen3_moe", "qwen3_moe")
    for name in COMPRESSED:
        ours, out = folder / "ours", folder / "theirs"
        for path in (ours, out):
            shutil.rmtree(path, ignore_errors=True)
        safeload.convert(source, ours, quantize=name)
        first, second = attempt(logits, ours), attempt(of_compressed, source, out, name)
        same = first == second if isinstance(first, str) else torch.equal(first, second)
        assert same, name
        print(name, "loads" if torch.is_tensor(first) else "does not load in transformers")
    for kind in EXPERTS:
        source = write_experts(folder / f"{kind}-mlx", kind)
        for name in MLX_EXPERTS:
            shutil.rmtree(folder / "ours")
            safeload.convert(source, folder / "ours", quantize=name)
            assert bool((mlx_logits(folder / "ours") == mlx_logits(source, name)).all()), (kind, name)


def write_coded(folder, layout):
    """A small Llama whose projections have random codes in a layout."""
    plain, settings = tensors("float16"), config("float16")
    for seed, name in enumerate([name for name in plain if name.endswith("_proj.weight")]):
        parts, quantization, _ = layout(seed, plain.pop(name).shape)
        plain |= {f"{name.removesuffix('weight')}{suffix}": np.asarray(part) for suffix, part in parts.items()}
    if quantization["quant_method"] == "compressed-tensors":
        quantization |= {"ignore": ["lm_head"], "quantization_status": "compressed"}
    folder.mkdir(parents=True)
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": quantization}))
    return folder


def of_moved(folder):
    """Compare models whose codes have moved with models of the weights that safeload reads."""
    for label, layout in MOVED.items():
        source = write_coded(folder / "coded" / label, layout)
        safeload.convert(source, folder / "coded" / f"{label}-plain", dtype="float16")
        for name in TARGETS:
            if label.endswith("asym") and name.startswith("w4a16-"):
                continue
            out = folder / "coded" / f"{label}-{name}"
            codes = safeload.convert(source, out, quantize=name).summary
            assert all(text.startswith("codes of ") for text in codes.codes.values()), (label, name)
            assert codes.codes or "already" in str(codes.kept), (label, name)
            ours, theirs = (logits(path, torch.float16) for path in (out, out.with_name(f"{label}-plain")))
            assert torch.equal(ours, theirs), (label, name)
            print("codes of", label, "as", name, "have equal logits")


def main(folder):
    of_moved(folder)
    of_experts(folder)
    source = write_model(folder / "source", "bfloat16")
    rows = {**dict.fromkeys(COMPRESSED, of_compressed), "bnb_nf4": of_bitsandbytes, "bnb_fp4": of_bitsandbytes}
    for name, theirs in {**rows, "deepseek_fp8": of_values}.items():
        ours, out = folder / "ours", folder / "theirs"
        for path in (ours, out):
            shutil.rmtree(path, ignore_errors=True)
        safeload.convert(source, ours, quantize=name)
        options = {"device_map": "cpu"} if name.startswith("bnb") else {}
        assert torch.equal(logits(ours, **options), theirs(source, out, name)), name
    for name in MLX:
        shutil.rmtree(folder / "ours")
        safeload.convert(source, folder / "ours", quantize=name)
        assert bool((mlx_logits(folder / "ours") == mlx_logits(source, name)).all()), name
    print("all logits are equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
