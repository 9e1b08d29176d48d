"""Arrays that are created on first access, and show the same memory each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..run.weight_file import WeightFile
from .delivery import Value
from .load import load_tensors
from .tensors import FileTensor, Tensors


class Views:
    """The arrays of a checkpoint that have been accessed, by name. Any thread may use it."""

    def __init__(self) -> None:
        self._mappings: dict[WeightFile, Any] = {}
        self._arrays: dict[str, Value] = {}
        self._groups: dict[str, dict[str, Value]] = {}  # aliases, under the name of the first

    def find(self, name: str) -> Value | None:
        """The array that was created before, None if there is none."""
        return self._arrays.get(name)

    def make(self, name: str, aliases: Sequence[FileTensor]) -> Value:
        """Creates the array of a tensor.

        Args:
            name: of the tensor.
            aliases: the tensor and those that share bytes with it.

        Raises:
            FormatError, OSError: a file cannot be read.
        """
        loaded, _ = load_tensors(Tensors.of(aliases), backend="mmap", mappings=self._mappings)
        if len(aliases) > 1:  # an atomic step: concurrent threads all get the arrays of the first
            loaded = self._groups.setdefault(aliases[0][0], loaded)
            self._arrays.update(loaded)
        array: Value = self._arrays.setdefault(name, loaded[name])
        return array

    def clear(self) -> None:
        """Drops the arrays. Those that callers hold stay valid: a mapping lives as long as its last array."""
        self._arrays.clear()
        self._groups.clear()
        self._mappings.clear()
