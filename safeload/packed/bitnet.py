"""BitNet: ternary codes. Source: transformers ``integrations/bitnet.py``."""

from __future__ import annotations

import math

from ..base import packing
from ..base.packing import Grid, Packing
from .families import Family
from .grid import Misfit
from .packed_group import PackedGroup


def bitnet(group: PackedGroup) -> Packing:
    """Four planes of 2 bits; ``linear_class`` decides if the scale multiplies or divides."""
    stored = group.shape()
    if len(stored) != 2 or math.prod(group.shape(packing.SCALE)) != 1:
        raise Misfit(
            f"codes {list(stored)} and scale {list(group.shape(packing.SCALE))} do not fit: expected a matrix with a "
            "single scale"
        )
    shape = (stored[0] * 4, stored[1])
    grid = Grid(max(1, shape[0]), max(1, shape[1]), 1, 1)
    kind = None if group.config is None else group.config.get("linear_class")
    rule = packing.STORED if kind == "autobitlinear" else packing.INVERSE
    return group.packing(
        "bitnet", "ternary", shape, 2, "ternary", layout=packing.PLANES, grid=grid, scale_rule=rule, row_bytes=stored[1]
    )


FAMILIES = [
    Family("BitNet", ".weight", frozenset(("U8",)), {packing.SCALE: (".weight_scale",)}, bitnet, method="bitnet")
]
