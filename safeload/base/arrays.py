"""What functions take as an array and as a dict of arrays: each of them asks here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from .file import Array
from .text import show

# What a dict has and is asked for: `Mapping` knows only those that are registered with it.
_METHODS = ("keys", "values", "items", "__getitem__", "__contains__", "__len__")


def as_array(value: Any, name: str = "") -> Array:
    """What numpy makes of a value.

    Args:
        value: an array, or what numpy makes one of.
        name: of the tensor; "" for a single array.

    Raises:
        TypeError: see `refuse_masked`.
    """
    refuse_masked(value, f"tensor {show(name)}" if name else "the array")
    array: Array = np.asarray(value)
    return array


def refuse_masked(value: Any, subject: str) -> None:
    """Refuses arrays whose hidden values would be taken as if they were not.

    Raises:
        TypeError: a masked array.
    """
    # Nobody has one who has not imported its module, which takes milliseconds.
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise TypeError(f"{subject} is a masked array, and its mask would be lost: fill it first, with x.filled(...)")


def check_mapping(value: Any, what: str, of: str = "names to arrays") -> None:
    """Refuses what is no dict, and nothing like one.

    Args:
        value: an argument.
        what: how messages name it.
        of: what it maps.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, Mapping) and not all(hasattr(value, method) for method in _METHODS):
        raise TypeError(f"{what} must be a mapping of {of}, not {type(value).__name__}")
