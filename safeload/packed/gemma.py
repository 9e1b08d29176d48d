"""Gemma's quantization-aware training: rows of integers of 2, 4 or 8 bits with a scale for each row or block.

Source: transformers ``integrations/gemma_quant.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..base import packing
from ..base.packing import Packing
from ..base.text import show
from ..errors import UnsupportedError
from .grid import Misfit, Refused, whole_grid
from .packed_group import PackedGroup, label_of
from .patterns import compiled

# What transformers takes where the configuration has no num_bits.
_DEFAULT_BITS = 4


def gemma(group: PackedGroup) -> Packing:
    """Bytes of codes, the first in the low bits, and F32 scales; the configuration says the bits of each module."""
    stored, scale = group.shape(), group.shape(packing.SCALE)
    if len(stored) != 2 or len(scale) != 2 or scale[0] != stored[0] or not scale[1]:
        raise Misfit(f"scales {list(scale)} do not fit codes {list(stored)}")
    bits = _bits(group)
    if (bits == 8) != (group.dtype() == "I8"):
        raise Misfit(f"codes {list(stored)} are {group.dtype()}, which do not hold {bits} bits (num_bits)")
    shape = (stored[0], stored[1] * (8 // bits))
    if shape[1] % scale[1]:
        raise Misfit(f"scales {list(scale)} do not divide rows of {shape[1]} codes of {bits} bits (num_bits)")
    grid = whole_grid(shape, 1, max(1, shape[1] // scale[1]))
    if math.prod(shape) == 0:
        raise Misfit(f"codes {list(stored)} are empty")
    numbers = "I8" if bits == 8 else "offset"
    return group.packing("gemma", label_of(f"int{bits}", grid, shape), shape, bits, numbers, grid=grid)


def _bits(group: PackedGroup) -> int:
    """The ``num_bits`` of a module: of the first pattern of ``module_quant_configs`` that its name has, else of all."""
    if group.config is None:
        raise Misfit("there is no num_bits in config.json")
    given = group.config.get("num_bits")
    default = _DEFAULT_BITS if given is None else given
    overrides = group.config.get("module_quant_configs")
    bits = default
    for pattern, own in overrides.items() if isinstance(overrides, Mapping) else ():
        if _found(pattern, group.module):
            bits = own.get("num_bits", default) if isinstance(own, Mapping) else default
            break
    if type(bits) is not int or bits not in (2, 4, 8):
        raise Misfit(f"num_bits {show(str(bits))} in config.json is not 2, 4 or 8")
    return bits


def _found(pattern: object, module: str) -> bool:
    """Whether a pattern is found anywhere in a name, as ``re.search`` does."""
    if not isinstance(pattern, str):
        raise Misfit("a key of module_quant_configs is not a string")
    anchored = pattern.startswith("^")
    if anchored and "|" in pattern:
        raise Refused(f"the pattern {show(pattern)} of module_quant_configs has an anchor and alternatives")
    try:
        return compiled(pattern if anchored else f".*({pattern})", "module_quant_configs").matches(module)
    except UnsupportedError as error:
        raise Refused(str(error.args[0])) from None
