"""BitNet: ternary codes, a byte for the codes of four rows. Source: transformers ``integrations/bitnet.py``."""

from __future__ import annotations

import math

import numpy as np

from ..base import packing
from ..base.arrays import Array
from ..base.packing import Packing
from ..errors import RangeError
from .families import Family
from .packed_group import GroupContext, Misfit, PackedGroup, one_scale, packing_of
from .quantization import QUANTIZATION, Quantization

_SMALLEST_MEAN = 1e-5  # the smallest mean magnitude, as in ``WeightQuant``
_BLOCK = 1 << 20  # elements of the rows processed together
# A file of codes that we write opens again with this config, in which the scale divides.
_CONFIG = Quantization(QUANTIZATION, "bitnet", {"linear_class": "bitlinear", "quant_method": "bitnet"})


def bitnet(group: PackedGroup) -> Packing:
    """Four planes of 2 bits; ``linear_class`` decides if the scale multiplies or divides."""
    stored = group.stored
    if len(stored) != 2 or math.prod(group.scales) != 1:
        raise Misfit(
            f"codes {list(stored)} and scale {list(group.scales)} do not fit: expected a matrix with a single scale"
        )
    shape = (stored[0] * 4, stored[1])
    grid = one_scale(shape)
    rule = packing.STORED if group.config.values.get("linear_class") == "autobitlinear" else packing.INVERSE
    return group.packing(
        "bitnet", "ternary", shape, 2, "ternary", layout=packing.PLANES, grid=grid, scale_rule=rule, row_bytes=stored[1]
    )


def lay_out(values: Array) -> tuple[Packing, dict[str, Array]]:
    """Return the ternary codes of a float32 matrix: clip(round(x * s), -1, 1) with s = 1 / mean(abs(x)).

    The mean is summed in float64 and rounded once, because the order of PyTorch's float32 sum depends on the machine.
    """
    rows, columns = len(values) // 4, values.shape[1]
    step = max(1, _BLOCK // max(1, columns))
    blocks = (values[k : k + step] for k in range(0, len(values), step))
    total = sum(float(np.abs(block, dtype=np.float64).sum()) for block in blocks)
    if not np.isfinite(total):
        at = [int(k) for k in np.argwhere(~np.isfinite(values))[0]]
        raise RangeError(f"element {at} is {values[tuple(at)]}: only finite numbers can be quantized")
    scale = np.reciprocal(np.float32(max(total / max(1, values.size), _SMALLEST_MEAN)), dtype=np.float32)
    data = np.zeros((rows, columns), np.uint8)
    for begin in range(0, rows, step):
        part = data[begin : begin + step]
        for plane in range(4):
            numbers = values[plane * rows + begin :][: len(part)]
            codes = np.clip(np.rint(numbers * scale), -1, 1).astype(np.int8) + 1
            part |= (codes << 2 * plane).astype(np.uint8)
    parts = {packing.CODES: data, packing.SCALE: np.array([scale])}
    names = {packing.CODES: ".weight", packing.SCALE: ".weight_scale"}
    return packing_of(GroupContext({}, _CONFIG), "weight", names, parts), parts


FAMILIES = [
    Family("BitNet", ".weight", frozenset(("U8",)), {packing.SCALE: (".weight_scale",)}, bitnet, method="bitnet")
]
