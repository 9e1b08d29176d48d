"""The interface between `safe_open` and the framework of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from ..base import dtypes
from ..base.arrays import Array
from ..engine.read.tensors import FileTensor
from ..engine.run.weight_file import WeightFile

# What `Handle.arrivals` raises for frameworks other than torch.
NO_PREFETCH = 'prefetch needs framework="pt"'


class Handle(Protocol):
    """Convert the tensors of an open file to a framework. Pickles as device and backend."""

    def tensor(self, part: FileTensor, read: Callable[[], Array]) -> Any:
        """Return a tensor. ``read`` returns a writable array that shares memory with no other array."""

    def tensors(
        self, parts: Sequence[FileTensor], target: dtypes.Dtype | None, read: Callable[[], dict[str, Array]]
    ) -> dict[str, Any]:
        """Return tensors by name."""

    def item(self, file: WeightFile, index: int, key: Any, select: Callable[[Any], Array]) -> Any:
        """Return the selected elements of the tensor at ``index`` in the file's table."""

    def arrivals(
        self, file: WeightFile, rows: Mapping[str, range | None] | None, device: Any, threads: int
    ) -> tuple[list[str], Generator[tuple[str, Any, Callable[[], object]]]]:
        """Return names and arrivals for a `PrefetchLoader`."""
