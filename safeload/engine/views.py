"""Arrays that are made when they are first asked for, and are the same memory each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.file import WeightFile
from .load import Part, Value, load_parts


class Views:
    """The arrays of a checkpoint that were asked for, by name; any thread may use it."""

    def __init__(self) -> None:
        self._mappings: dict[WeightFile, Any] = {}
        self._arrays: dict[str, Value] = {}
        self._groups: dict[str, dict[str, Value]] = {}  # those that share bytes, under the first of them

    def find(self, name: str) -> Value | None:
        """The array that was made before, None where there is none."""
        return self._arrays.get(name)

    def make(self, name: str, aliases: Sequence[Part]) -> Value:
        """The array of a tensor.

        Args:
            name: of the tensor.
            aliases: the tensor and those that share bytes with it.

        Raises:
            FormatError, OSError: a file cannot be read.
        """
        loaded, _ = load_parts(aliases, backend="mmap", mappings=self._mappings)
        if len(aliases) > 1:  # one step: of threads that come here at once all get what the first has loaded
            loaded = self._groups.setdefault(aliases[0][0], loaded)
            self._arrays.update(loaded)
        array: Value = self._arrays.setdefault(name, loaded[name])
        return array

    def clear(self) -> None:
        """Forgets the arrays; those that were handed out stay valid: a mapping goes with its last array."""
        self._arrays.clear()
        self._groups.clear()
        self._mappings.clear()
