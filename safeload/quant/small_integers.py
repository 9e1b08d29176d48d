"""Integers of few bits in bytes, as transformers' own models have them: BitNet's ternary codes, and Gemma's.

Sources: transformers ``integrations/bitnet.py``, ``integrations/gemma_quant.py``.
"""

from __future__ import annotations

import math

import numpy as np

from ..core import arrays
from ..core.packing import CODES, INVERSE, PLANES, SCALE, STORED, Packing
from ..core.text import show
from ..errors import RangeError, UnsupportedError
from .families import Family
from .packed_group import GroupContext, Misfit, PackedGroup, Refused, label_of, one_scale, packing_of, whole_grid
from .patterns import compiled
from .quantization import QUANTIZATION, Quantization, mapping

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
    rule = STORED if group.config.values.get("linear_class") == "autobitlinear" else INVERSE
    return group.packing(
        "bitnet", "ternary", shape, 2, "ternary", layout=PLANES, grid=grid, scale_rule=rule, row_bytes=stored[1]
    )


def to_bitnet(values: arrays.Array) -> tuple[Packing, dict[str, arrays.Array]]:
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
    parts = {CODES: data, SCALE: np.array([scale])}
    names = {CODES: ".weight", SCALE: ".weight_scale"}
    return packing_of(GroupContext({}, _CONFIG), "weight", names, parts), parts


# ---- Gemma's quantization-aware training: rows of 2-, 4- or 8-bit integers with a scale per row or block ----


def gemma(group: PackedGroup) -> Packing:
    """Bytes of codes, the first in the low bits, and F32 scales; the configuration sets the bits of each module."""
    stored, scale = group.stored, group.scales
    if len(stored) != 2 or len(scale) != 2 or scale[0] != stored[0] or not scale[1]:
        raise Misfit(f"scales {list(scale)} do not fit codes {list(stored)}")
    bits = _bits(group)
    if (bits == 8) != (group.row.code == "I8"):
        raise Misfit(f"codes {list(stored)} are {group.row.code}, which cannot hold {bits} bits (num_bits)")
    shape = (stored[0], stored[1] * (8 // bits))
    if shape[1] % scale[1]:
        raise Misfit(f"scales {list(scale)} do not divide rows of {shape[1]} codes of {bits} bits (num_bits)")
    grid = whole_grid(shape, 1, max(1, shape[1] // scale[1]))
    if math.prod(shape) == 0:
        raise Misfit(f"codes {list(stored)} are empty")
    numbers = "I8" if bits == 8 else "offset"
    return group.packing("gemma", label_of(f"int{bits}", grid, shape), shape, bits, numbers, grid=grid)


def _bits(group: PackedGroup) -> int:
    """Return the ``num_bits`` of a module: of the first pattern in its name, else the shared value."""
    shared = group.config.values.get("num_bits")
    overrides = mapping(group.config.values.get("module_quant_configs"))
    own = next((own for pattern, own in overrides.items() if _is_in(pattern, group.module)), None)
    bits = mapping(own).get("num_bits", 4 if shared is None else shared)  # transformers' default
    if type(bits) is not int or bits not in (2, 4, 8):
        raise Misfit(f"num_bits in config.json must be 2, 4 or 8, got {show(str(bits))}")
    return bits


def _is_in(pattern: object, module: str) -> bool:
    """Return True if a pattern matches anywhere in a name, as in ``re.search``."""
    if not isinstance(pattern, str):
        raise Misfit("keys of module_quant_configs must be strings")
    anchored = pattern.startswith("^")
    if anchored and "|" in pattern:
        raise Refused(f"the pattern {show(pattern)} of module_quant_configs combines an anchor with alternatives")
    try:
        return compiled(pattern if anchored else f".*({pattern})", "module_quant_configs").matches(module)
    except UnsupportedError as error:
        raise Refused(str(error.args[0])) from None


_INTEGERS = frozenset(("U8", "I8"))

FAMILIES = [
    Family("BitNet", ".weight", frozenset(("U8",)), {SCALE: (".weight_scale",)}, bitnet, method="bitnet"),
    Family("Gemma", ".weight", _INTEGERS, {SCALE: (".weight_scale",)}, gemma, method="gemma"),
    Family(
        "Gemma, embeddings",
        ".embedding_quantized",
        _INTEGERS,
        {SCALE: (".embedding_scale",)},
        gemma,
        logical=".weight",
        method="gemma",
    ),
]
