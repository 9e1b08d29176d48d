"""Plain tensors of all dtypes and of many shapes."""

import ml_dtypes
import numpy as np

from builders.random import rng

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64")
SHAPES = [(), (0, 3), (1,), (7,), (2, 3), (3, 1, 5), (64, 64)]


def tensor(dtype, shape):
    bits = rng.integers(0, 2, shape) if dtype == "bool" else rng.integers(-50, 50, shape)
    return bits.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def many(count, stem=""):
    """Tensors in no order of names, some of them empty or scalars, one with a newline in its name."""
    names = [f"{stem}{'zyx'[k % 3]}.{k * 7919 % count}.é{chr(10) if k == 5 else ''}" for k in range(count)]
    return {name: tensor(DTYPES[k % len(DTYPES)], SHAPES[k % len(SHAPES)]) for k, name in enumerate(names)}
