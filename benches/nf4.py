"""A tensor in NF4 as bitsandbytes stores it, and what a user would write to read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

BLOCK, NESTED_BLOCK, OFFSET = 64, 256, 0.01
# Quantiles of a normal distribution.
NUMBERS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
CONFIG = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}


def tensors(name: str, rows: int, columns: int, *, nested: bool) -> dict[str, Any]:
    """A matrix of random codes; with nested scales, these are codes of 8 bits themselves."""
    random = np.random.default_rng(33)
    count = rows * columns // BLOCK
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": [rows, columns]}
    made = {
        name: np.resize(random.integers(0, 256, 1 << 22, np.uint8), (rows * columns // 2, 1)),
        f"{name}.absmax": random.random(count, np.float32),
        f"{name}.quant_map": NUMBERS,
    }
    if nested:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": OFFSET}
        made[f"{name}.absmax"] = random.integers(0, 256, count, np.uint8)
        made[f"{name}.nested_absmax"] = random.random(-(-count // NESTED_BLOCK), np.float32)
        made[f"{name}.nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
    made[f"{name}.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return made


def in_numpy(name: str, shape: tuple[int, int]) -> Callable[[dict[str, Any]], np.ndarray]:
    """The expression of the format."""

    def values(given: dict[str, Any]) -> np.ndarray:
        scales, codes = given[f"{name}.absmax"], given[name].reshape(-1)
        if f"{name}.nested_absmax" in given:
            own = given[f"{name}.nested_absmax"].repeat(NESTED_BLOCK)[: scales.size]
            scales = given[f"{name}.nested_quant_map"][scales] * own + np.float32(OFFSET)
        nibbles = np.stack((codes >> 4, codes & 15), -1).reshape(-1, BLOCK)
        return (given[f"{name}.quant_map"][nibbles] * scales[:, None]).reshape(shape)

    return values


def by_its_library(name: str, given: dict[str, Any], threads: int) -> Callable[[], np.ndarray] | None:
    """bitsandbytes' own dequantization on the CPU; None without it, or without torch."""
    try:
        import torch
        from bitsandbytes.functional import QuantState, dequantize_4bit
    except ImportError:
        return None
    torch.set_num_threads(threads)
    parts = {part: torch.from_numpy(array.copy()) for part, array in given.items()}
    codes = parts.pop(name)
    state = QuantState.from_dict({part.removeprefix(f"{name}."): one for part, one in parts.items()}, "cpu")
    return lambda: dequantize_4bit(codes, state).numpy()
