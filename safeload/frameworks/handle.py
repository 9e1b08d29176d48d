"""What `safe_open` asks of a framework whose tensors it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..base import dtypes
from ..base.arrays import Array
from ..engine.read.tensors import FileTensor
from ..engine.run.weight_file import WeightFile


class Handle(Protocol):
    """Gives the tensors of one open file as tensors of a framework. It pickles as its device and backend."""

    def tensor(self, part: FileTensor, read: Callable[[], Array]) -> Any:
        """One tensor.

        Args:
            part: name, file and index in the file's table.
            read: gives it as an array, which is writable and shares memory with no other one.
        """

    def tensors(
        self, parts: Sequence[FileTensor], target: dtypes.Dtype | None, read: Callable[[], dict[str, Array]]
    ) -> dict[str, Any]:
        """Several tensors by name.

        Args:
            parts: name, file and index in the file's table of each.
            target: dtype that floating ones are converted to; None to convert nothing.
            read: gives them as arrays, converted.
        """

    def item(self, file: WeightFile, index: int, key: Any, select: Callable[[Any], Array]) -> Any:
        """The selected elements of a tensor.

        Args:
            file: the file.
            index: of the tensor in the file's table.
            key: what it is indexed by.
            select: gives them as an array, by the rules of `SafeSlice`.
        """
