"""Tables of the values of codes with fewer than 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from ...base.arrays import Array


def _e2m1() -> list[float]:
    """Return the values of E2M1; source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return positive + [-value for value in positive]


def _e2m3() -> list[float]:
    """Return the values of E2M3; source: the specification of E2M1, section 5.3.2."""
    positive = [m / 8 for m in range(8)] + [2.0**e * (1 + m / 8) for e in range(3) for m in range(8)]
    return positive + [-value for value in positive]


def _e3m2() -> list[float]:
    """Return the values of E3M2; source: the section of E2M3."""
    positive = [m / 16 for m in range(4)] + [2.0**e * (1 + m / 4) for e in range(-2, 5) for m in range(4)]
    return positive + [-value for value in positive]


def _mxint4() -> list[float]:
    """Return the values of auto-round's MXINT4: a sign and a magnitude in quarters."""
    positive = [k / 4 for k in range(8)]
    return positive + [-value for value in positive]


@cache
def table_of(numbers: str, bits: int) -> Array:
    """Return the values of all codes: floats, quarters, or integers.

    Integers are "unsigned", "signed" (two's complement), have an "offset" of half of their range, or are "ternary"
    (-1, 0 and 1).
    """
    tables: Mapping[str, Callable[[], list[float]]] = {
        "e2m1": _e2m1,
        "e2m3": _e2m3,
        "e3m2": _e3m2,
        "mxint4": _mxint4,
        "unsigned": lambda: [float(code) for code in range(1 << bits)],
        "offset": lambda: [float(code - (1 << bits - 1)) for code in range(1 << bits)],
        "signed": lambda: [float((code ^ 1 << bits - 1) - (1 << bits - 1)) for code in range(1 << bits)],
        "ternary": lambda: [-1.0, 0.0, 1.0, math.nan],
    }
    return np.array(tables[numbers](), np.float32)
