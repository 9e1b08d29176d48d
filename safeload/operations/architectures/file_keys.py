"""Metadata keys of a GGUF file, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...base.text import show
from ...errors import FormatError


class FileKeys:
    """The metadata of a file."""

    def __init__(self, metadata: Mapping[Any, Any], title: str) -> None:
        self._metadata = metadata
        self._title = title

    def number(self, key: str) -> float | None:
        """Return an int, or the shortest decimal number that an f32 stands for; None without the key."""
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, (bool, str)) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._fault(key, "a number", value)
        return int(value) if isinstance(value, int) else shortest(value)

    def count(self, key: str) -> int | None:
        """Return an integer of at least 0; None without the key."""
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._fault(key, "a number of at least 0 without a fraction", value)
        return int(value)

    def text(self, key: str) -> str | None:
        """Return a string; None without the key."""
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self._fault(key, "a string", value)
        return value

    def _fault(self, key: str, expected: str, value: object) -> FormatError:
        return FormatError(f"key {key} must be {expected}, got {show(value)}", self._title)


def shortest(value: float) -> float:
    """Return the shortest decimal number that stands for a number as f32."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))
