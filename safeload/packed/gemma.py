"""Gemma's quantization-aware training: rows of 2-, 4- or 8-bit integers with a scale per row or block.

Source: transformers ``integrations/gemma_quant.py``.
"""

from __future__ import annotations

import math

from ..base import packing
from ..base.packing import Packing
from ..base.text import show
from ..errors import UnsupportedError
from .families import Family
from .packed_group import Misfit, PackedGroup, Refused, label_of, whole_grid
from .patterns import compiled
from .quantization import mapping

# transformers' default if the configuration has no num_bits.
_DEFAULT_BITS = 4


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
    bits = mapping(own).get("num_bits", _DEFAULT_BITS if shared is None else shared)
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
    Family("Gemma", ".weight", _INTEGERS, {packing.SCALE: (".weight_scale",)}, gemma, method="gemma"),
    Family(
        "Gemma, embeddings",
        ".embedding_quantized",
        _INTEGERS,
        {packing.SCALE: (".embedding_scale",)},
        gemma,
        logical=".weight",
        method="gemma",
    ),
]
