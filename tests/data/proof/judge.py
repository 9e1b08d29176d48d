"""Let the engines' own tools convert a small model, and compare each result with it: none may be accused.

    python tests/data/proof/judge.py FOLDER [RESULT ...]

FOLDER gets the models, the results and a table. Needs torch, transformers, llmcompressor and auto-round; mlx-lm and
GPTQModel if MLX_PYTHON and GPTQMODEL_PYTHON name Pythons that have them, and llama.cpp's programs and converter if
LLAMA_CPP and CONVERTER name their folders. PYTHONPATH is tests and tests/data/llama_cpp.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import safeload

warnings.simplefilter("ignore")
WIDTH, TOKENS = 256, 512
# llm-compressor by name: its modifier, its scheme, and smoothing before it.
COMPRESSED = {
    "rtn-w4a16": ("QuantizationModifier", "W4A16", None),
    "rtn-w4a16-asym": ("QuantizationModifier", "W4A16_ASYM", None),
    "rtn-w8a16": ("QuantizationModifier", "W8A16", None),
    "fp8": ("QuantizationModifier", "FP8", None),
    "fp8-dynamic": ("QuantizationModifier", "FP8_DYNAMIC", None),
    "nvfp4": ("QuantizationModifier", "NVFP4", None),
    "nvfp4a16": ("QuantizationModifier", "NVFP4A16", None),
    "gptq-w4a16": ("GPTQModifier", "W4A16", None),
    "gptq-w8a8": ("GPTQModifier", "W8A8", None),
    "smooth-w8a8": ("GPTQModifier", "W8A8", 0.8),
    "mxfp4": ("QuantizationModifier", "MXFP4", None),
    "mxfp8": ("QuantizationModifier", "MXFP8", None),
    "fp8-block": ("QuantizationModifier", "FP8_BLOCK", None),
    "w4afp8": ("QuantizationModifier", "W4AFP8", None),
    "gemma/smooth-w8a8": ("GPTQModifier", "W8A8", 0.8),
    "qwen2/smooth-w8a8": ("GPTQModifier", "W8A8", 0.8),
    "qwen3moe/w4a16": ("QuantizationModifier", "W4A16", None),
    "qwen3moe/fp8-dynamic": ("QuantizationModifier", "FP8_DYNAMIC", None),
}
# GPTQModel: arguments of QuantizeConfig. Not its AWQ of Qwen3 MoE, which divides the norm that the router reads and not
# the router, nor that of Gemma 2, which divides a norm that the feed-forward does not read: both are accused, rightly.
GPTQMODEL = {
    "gptqmodel-4": {"bits": 4, "group_size": 128},
    "gptqmodel-4-g32": {"bits": 4, "group_size": 32},
    "gptqmodel-4-act-order": {"bits": 4, "group_size": 128, "desc_act": True},
    "gptqmodel-4-asym": {"bits": 4, "group_size": 128, "sym": False},
    "gptqmodel-4-v2": {"bits": 4, "group_size": 128, "sym": False, "format": "gptq_v2"},
    "gptqmodel-8": {"bits": 8, "group_size": 128},
    "gptqmodel-3": {"bits": 3, "group_size": 128},
    "gptqmodel-2": {"bits": 2, "group_size": 64},
    "gptqmodel-awq": {"bits": 4, "group_size": 128, "quant_method": "awq", "format": "gemm"},
    "qwen2/gptqmodel-awq": {"bits": 4, "group_size": 128, "quant_method": "awq", "format": "gemm"},
    "gemma/gptqmodel-awq": {"bits": 4, "group_size": 128, "quant_method": "awq", "format": "gemm"},
    "qwen3moe/gptqmodel-4": {"bits": 4, "group_size": 128},
}
# auto-round: scheme and format.
ROUNDED = {
    "auto-w4a16": ("W4A16", "auto_round"),
    "auto-gptq": ("W4A16", "auto_gptq"),
    "auto-awq": ("W4A16", "auto_awq"),
    "auto-w2a16": ("W2A16", "auto_round"),
    "auto-w8a16": ("W8A16", "auto_round"),
}
MLX = {
    "mlx": [],
    "mlx4": ["-q", "--q-bits", "4"],
    "mlx8": ["-q", "--q-bits", "8"],
    "mlx3-g32": ["-q", "--q-bits", "3", "--q-group-size", "32"],
    "mlx-mxfp4": ["-q", "--q-mode", "mxfp4"],
    "mlx-mixed": ["-q", "--quant-predicate", "mixed_4_6"],
}
CONVERTED = ["f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0"]
PLAIN = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M",
    "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "TQ1_0", "MXFP4_MOE", "F16", "BF16",
]  # fmt: skip
WEIGHTED = ["Q4_K_M", "IQ4_XS", "IQ3_S", "IQ2_XS", "Q4_0", "Q3_K_S", "Q2_K"]


SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": TOKENS, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
# Models by the beginning of a result's name: classes and sizes.
MODELS = {
    "": ("Llama", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 64}),
    "qwen3moe": (
        "Qwen3Moe",
        {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
}


def make_model(folder, name, sizes):
    """A model of two layers with rows and columns of outliers, and a tokenizer of bytes."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1 + 3 * (torch.rand(parameter.shape[-1]) < 0.02).to(parameter.dtype))
                parameter[..., torch.randint(0, parameter.shape[-2], (3,)), :] *= 4
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS - 2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()] * 2, trainer)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def inputs(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, TOKENS - 2, (64,), generator=generator) for _ in range(count)]


def compress(source, result, modifier, scheme, smoothing):
    import llmcompressor.modifiers.quantization as quantization
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    recipe = [] if smoothing is None else [SmoothQuantModifier(smoothing_strength=smoothing)]
    recipe.append(getattr(quantization, modifier)(targets="Linear", scheme=scheme, ignore=["lm_head"]))
    ids = [each.tolist() for each in inputs(16)]
    dataset = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 64] * len(ids)})
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    how = {"max_seq_length": 64, "num_calibration_samples": len(ids), "pipeline": "basic"}
    oneshot(model=model, processor=tokenizer, dataset=dataset, recipe=recipe, **how)
    model.save_pretrained(result, save_compressed=True)


def round_by_gradient(source, result, scheme, format):
    from auto_round import AutoRound

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    how = {"iters": 8, "seqlen": 64, "nsamples": 8, "batch_size": 2, "device_map": "cpu"}
    rounding = AutoRound(model, tokenizer, scheme=scheme, dataset=[each[None] for each in inputs(8)], **how)
    rounding.quantize_and_save(str(result), format=format)


def run(*command):
    subprocess.run([*map(str, command)], check=True, capture_output=True)


def results(folder):
    """Each result by name, with the function that makes it, and its model."""
    source = folder / "model"
    table = {name: (compress, folder / name, *row) for name, row in COMPRESSED.items()}
    table |= {name: (round_by_gradient, folder / name, *row) for name, row in ROUNDED.items()}
    python, programs = os.environ.get("GPTQMODEL_PYTHON"), os.environ.get("LLAMA_CPP")
    for name, arguments in GPTQMODEL.items() if python else ():
        table[name] = (by_gptqmodel, folder / name, python, arguments)
    converter, python = os.environ.get("CONVERTER"), os.environ.get("MLX_PYTHON")
    for kind in CONVERTED if converter else ():
        file = folder / f"converter-{kind}.gguf"
        table[file.name] = (by_converter, file, converter, kind)
    for name, options in MLX.items() if python else ():
        table[name] = (by_mlx, folder / name, python, options)
    if programs:
        plain, matrix = folder / "model-f32.gguf", folder / "imatrix.gguf"
        if not matrix.exists():
            safeload.convert(source, plain, dtype="float32")
            texts = "-f", __file__, "-c", "64", "--chunks", "20"
            run(f"{programs}/llama-imatrix", "-m", plain, *texts, "-o", matrix)
        for label, types, options in (("", PLAIN, []), ("imatrix-", WEIGHTED, ["--imatrix", matrix])):
            for kind in types:
                file = folder / f"{label}{kind}.gguf"
                table[file.name] = (by_llama_quantize, file, programs, plain, kind, options)
    return table


def by_gptqmodel(source, result, python, arguments):
    ids = json.dumps([each.tolist() for each in inputs(32)])
    here = Path(__file__).with_name("by_gptqmodel.py")
    environment = {**os.environ, "GPTQMODEL_CPU_WORKERS": "2"}  # it refuses to run with less
    command = [python, here, source, result, json.dumps(arguments)]
    subprocess.run([*map(str, command)], input=ids.encode(), env=environment, check=True, capture_output=True)


def by_mlx(source, result, python, options):
    run(python, "-m", "mlx_lm", "convert", "--hf-path", source, "--mlx-path", result, *options)


def by_converter(source, result, converter, kind):
    from make import reference  # of tests/data/llama_cpp

    reference(converter, source, result, outtype=kind)


def by_llama_quantize(source, result, programs, plain, kind, options):
    run(f"{programs}/llama-quantize", *options, plain, result, kind)


def main(folder, *names):
    sources = {kind: folder / f"{kind}model" for kind in MODELS}
    for kind, source in sources.items():
        if not source.exists():
            make_model(source, *MODELS[kind])
    accused = judged = 0
    for name, (make, place, *arguments) in results(folder).items():
        if names and name not in names:
            continue
        source = sources[name.rpartition("/")[0]]
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            make(source, place, *arguments)
        inner = next(place.glob("*/config.json"), None) if place.is_dir() else None  # auto-round makes a folder
        report = safeload.check(inner.parent if inner is not None else place, original=source)
        errors = [finding for finding in report.errors if finding.code.startswith("source.")]
        notes = sorted({finding.code for finding in report.notes} & {"source.calibrated", "source.rescaled"})
        print(f"{name}: {len(errors)} errors; {', '.join(notes) or 'as expected'}", flush=True)
        accused, judged = accused + bool(errors), judged + 1
    print(f"{accused} of {judged} accused")
    return 1 if accused else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
