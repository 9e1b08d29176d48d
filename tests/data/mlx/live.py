"""Compares the logits of mlx-lm for the folders that make.py has kept with those for safeload's: live.py FOLDER."""

import shutil
import sys
from pathlib import Path

import mlx.core as mx
from builders import mlx_models
from mlx_lm.utils import load_model

import safeload

TOKENS = mx.array([list(range(1, 9))])


def logits(folder):
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)  # on the CPU, MLX multiplies stacks of experts in this dtype only
    return model(TOKENS)


def main(folder):
    for name, formats in mlx_models.expected().items():
        for format in formats:
            ours = folder / name / "ours"
            shutil.rmtree(ours, ignore_errors=True)
            safeload.convert(folder / name / "source", ours, quantize=format)
            first, second = logits(ours), logits(folder / name / format)
            assert bool(mx.array_equal(first, second, equal_nan=True)), (name, format)
    print("all logits are equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
