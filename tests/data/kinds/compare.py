"""Compares PEFT's merges of adapters with random values with safeload's: ``compare.py [SEEDS]``; see `make.py`."""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from make import CASES, made
from safetensors.torch import save_file

import safeload

folder = Path(tempfile.mkdtemp())
for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
    for name, case in CASES.items():
        base, expected = made(*case, 1000 + seed, folder / name)
        save_file(base, folder / "base.safetensors")
        merged = safeload.load(folder / "base.safetensors", adapters=folder / name)
        for tensor, value in expected.items():
            wrong = np.abs(merged[tensor] - value.numpy()).max() / np.abs(value.numpy()).max()
            assert wrong < 4e-6, (name, seed, tensor, wrong)
    print(f"seed {seed}: {len(CASES)} adapters are merged alike")
shutil.rmtree(folder)
