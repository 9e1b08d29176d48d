"""Compares logits of AWQ and GPTQ folders in transformers, by GPTQModel's kernels, with those of dequantized weights.

python awq_and_gptq.py FOLDER, with tests/ on PYTHONPATH; README.md has the versions. Set TORCHDYNAMO_DISABLE=1, or
kernels are compiled.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from builders.engine_models import tensors, write_model
from transformers import AutoModelForCausalLM

import safeload
from safeload.numpy import save_file

# Of the largest logit: kernels sum in another order than PyTorch.
LIMITS = {"float16": 2.0**-10, "bfloat16": 2.0**-6}
NAMES = ("awq", "awq-g32", "gptq", "gptq-g32", "gptq_asym", "gptq8")


def logits(folder, dtype, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options)
    with torch.no_grad():
        return model(torch.arange(1, 9)[None]).logits.float()


def main(folder):
    for dtype, limit in LIMITS.items():
        source = write_model(folder / dtype, dtype)
        rng = np.random.default_rng(0)
        weights = {k: v if v.ndim == 1 else rng.standard_normal(v.shape) * 0.05 for k, v in tensors(dtype).items()}
        kind = tensors(dtype)["lm_head.weight"].dtype
        save_file(
            {k: v.astype(kind) for k, v in weights.items()}, source / "model.safetensors", metadata={"format": "pt"}
        )
        for name in NAMES:
            out, plain = folder / f"{dtype}-{name}", folder / f"{dtype}-{name}-plain"
            safeload.convert(source, out, quantize=name)
            safeload.convert(out, plain, dtype=dtype)
            ours, expected = logits(out, dtype, device_map="cpu"), logits(plain, dtype)
            error = float((ours - expected).abs().max() / expected.abs().max())
            print(name, dtype, error)
            assert error <= limit, (name, dtype, error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
