"""Checks that hold for the packing of any family: that the stored parts are as many, and of such dtypes, as it says."""

from __future__ import annotations

import math

from ..base import packing
from ..base.packing import Packing
from .grid import Misfit
from .packed_group import PackedGroup

# Dtypes of the parts. U8 holds the bits of a float8, and only where a packing says of which.
_SCALES = frozenset(("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"))
NUMBERS = frozenset(("F32", "F16", "BF16"))
_DTYPES = {
    packing.SCALE: _SCALES,
    packing.GLOBAL: NUMBERS,
    packing.BIAS: NUMBERS,
    packing.FACTORS: NUMBERS,
    packing.TABLE: NUMBERS,
    packing.NESTED: NUMBERS,
    packing.NESTED_TABLE: NUMBERS,
    packing.ZERO: frozenset(("I8", "U8", "I32", "F8_E4M3", *NUMBERS)),
}
# What codes stand for that may have zero points: see `Packing.numbers`.
_INTEGERS = frozenset(("I8", "U8", "offset", "signed", "unsigned"))
# Settings of codes with zero points.
_ASYMMETRIC = (("symmetric", False), ("sym", False), ("zero_point", True))
# Most elements, counting empty axes as 1: numpy and the C core count bytes of float64 in 63 bits.
MOST = 1 << 59


def check(group: PackedGroup, packed: Packing) -> Packing:
    """The packing, if all parts fit it.

    Raises:
        Misfit: one does not.
    """
    for role, name in group.names.items():
        if role in _DTYPES and group.dtype(role) not in _DTYPES[role]:
            raise Misfit(f"{name} is {group.dtype(role)}, which is not a dtype of its kind")
    plain = packed.scale_dtype is None and packed.scale_rule != packing.NESTED_RULE
    if plain and group.has(packing.SCALE) and group.dtype(packing.SCALE) == "U8":
        raise Misfit("its scales are U8")
    if max(1, packed.matrices) * max(1, packed.rows) * max(1, packed.columns) >= MOST:
        raise Misfit(f"shape {list(packed.shape)} has too many elements")
    if _needed(packed) > group.nbytes():
        raise Misfit(f"codes {list(group.shape())} are too few for {list(packed.shape)}")
    if packed.grid is not None:
        _check_grid(group, packed)
    if not group.has(packing.ZERO):
        _check_symmetric(group, packed)
    elif all(weights.get("symmetric") is True for weights in group.weights()) and group.weights():
        return packed._replace(symmetric=True)
    return packed


def _check_symmetric(group: PackedGroup, packed: Packing) -> None:
    """Refuses codes without zero points if the configuration says that they have some."""
    said = None
    if group.weights():
        if all(weights.get("symmetric") is False for weights in group.weights()):
            said = "symmetric is false in config_groups"
    elif group.config is not None and packed.numbers in _INTEGERS and not group.has(packing.BIAS):
        values = group.config.values
        said = next((f"{key} is {value}" for key, value in _ASYMMETRIC if values.get(key) is value), None)
    if said is not None:
        raise Misfit(f"its zero points are missing, but {said}")


def _needed(packed: Packing) -> int:
    """Bytes of the codes."""
    if packed.layout == packing.MASKED:
        return packed.rows * packed.row_bytes
    if packed.layout == packing.PLANES:
        per_row, rows = packed.columns, packed.rows * packed.bits // 8
    elif packed.layout == packing.COLUMNS:
        per_row, rows = packed.columns * 4, packed.rows * packed.bits // 32
    elif packed.word_codes:
        per_row, rows = -(-packed.columns // packed.word_codes) * 4, packed.rows
    else:
        per_row, rows = -(-packed.columns * packed.bits // 8), packed.rows
    return packed.matrices * rows * max(per_row, packed.row_bytes)


def _check_grid(group: PackedGroup, packed: Packing) -> None:
    grid = packed.grid
    assert grid is not None
    count = (1 if grid.shared else packed.matrices) * grid.rows * grid.columns
    roles = [packing.SCALE, packing.BIAS] if packed.zeros is not None else [packing.SCALE, packing.BIAS, packing.ZERO]
    for role in roles:
        if group.has(role) and math.prod(group.shape(role)) != count:
            raise Misfit(f"{role} {list(group.shape(role))} has not the {count} elements that its codes need")
