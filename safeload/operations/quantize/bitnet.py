"""Quantizes to ternary codes, as training a BitNet b1.58 model does in each step."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...base import packing
from ...base.arrays import Array
from ...base.packing import Grid, Packing
from ...base.text import subject
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import of_reals
from ...engine.run.cast import astype
from ...errors import RangeError

BITNET = "bitnet"

# The smallest mean magnitude, of `WeightQuant`.
_LEAST = 1e-5
# Rows that are processed at a time have about this many elements.
_PIECE = 1 << 20
# What makes a file of such tensors open again: the scale divides.
_CONFIG = '{"quantization_config": {"linear_class": "bitlinear", "quant_method": "bitnet"}}'


def quantize_bitnet(name: str, x: Any, threads: int | None) -> QuantizedTensor:
    """Ternary codes of a matrix: clip(round(x * s), -1, 1) with s = 1 / mean(|x|), value code / s.

    That is ``WeightQuant`` of transformers' integrations/bitnet.py in float32, with the mean summed in float64 and
    rounded once; PyTorch sums it in float32, in an order that depends on the machine.

    Raises:
        ValueError: not a matrix, or its rows are not a multiple of 4.
        RangeError: a value is NaN or infinite.
        TypeError: x does not hold real numbers.
    """
    source = of_reals(name, x, threads)
    shape = source.shape
    if len(shape) != 2 or shape[0] % 4:
        raise ValueError(
            f"{subject(name)}{BITNET} packs four rows of a matrix into one, but the shape is {list(shape)}"
        )
    values: Array = np.asarray(astype(x, np.float32, threads=threads))
    step = max(1, _PIECE // max(1, shape[1]))
    total = sum(float(np.abs(values[k : k + step], dtype=np.float64).sum()) for k in range(0, shape[0], step))
    if not np.isfinite(total):
        at = [int(k) for k in np.argwhere(~np.isfinite(values))[0]]
        raise RangeError(f"{subject(name)}element {at} is {values[tuple(at)]}: only finite numbers can be quantized")
    mean = np.float32(max(total / max(1, values.size), _LEAST))
    scale = np.reciprocal(mean, dtype=np.float32)
    rows = shape[0] // 4
    data = np.zeros((rows, shape[1]), np.uint8)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        planes = [values[plane * rows + part.start : plane * rows + part.stop] for plane in range(4)]
        for plane, numbers in enumerate(planes):
            codes = np.clip(np.rint(numbers * scale), -1, 1).astype(np.int8) + 1
            data[part] |= (codes << 2 * plane).astype(np.uint8)
    grid = Grid(max(1, shape[0]), max(1, shape[1]), 1, 1)
    packed = Packing(
        BITNET,
        "ternary",
        shape,
        1,
        *shape,
        packing.PLANES,
        2,
        "ternary",
        shape[1],
        grid=grid,
        scale_rule=packing.INVERSE,
        config=_CONFIG,
    )
    return QuantizedTensor.of_parts(packed, {}, {packing.CODES: data, packing.SCALE: np.array([scale])})
