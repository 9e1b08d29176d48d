"""A tensor in a file: indexing reads it, and unpickling opens its file again."""

from __future__ import annotations

from typing import Any

from ..base.arrays import Array
from ..engine.slice import read_slice
from ..engine.weight_file import WeightFile
from ..stores.local import check_unchanged
from . import registry
from .registry import Wanted


class TensorSlice:
    """A tensor that has not been read. Basic indexing as in numpy reads only the elements that it returns.

    It is pickled as the path of its file, as a `Checkpoint` is.

    Attributes:
        shape: of the array that loading the whole tensor returns.
        dtype: of that array.
    """

    def __init__(self, file: WeightFile, index: int, wanted: Wanted) -> None:
        self._file = file
        self._index = index
        self._wanted = wanted
        self.dtype, self.shape, *_ = file.layout(index)

    def _copied(self, seen: tuple[int, ...]) -> tuple[str, tuple[Any, ...], str, tuple[int, ...]]:
        _ = self._file.descriptor  # raises if the file is closed
        return self._file.place, tuple(self._wanted), self._file.table.names[self._index], seen

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_slice, self._copied(tuple(self._file.identity[:2]))

    def __copy__(self) -> TensorSlice:
        return _reopen_slice(*self._copied(self._file.identity))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorSlice:
        return self.__copy__()

    def __getitem__(self, index: Any) -> Array:
        return read_slice(self._file, self._index, index if isinstance(index, tuple) else (index,))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<TensorSlice {self.dtype} {list(self.shape)}>"


def _reopen_slice(path: str, wanted: tuple[Any, ...], name: str, seen: tuple[int, ...]) -> TensorSlice:
    """Opens the slice of the same file again."""
    options = Wanted(*wanted)
    check_unchanged(path, seen)
    files = registry.open_file(path, options).files
    files[0].check_identity(seen)
    file = next((file for file in files if file.table.find(name) >= 0), files[0])
    return TensorSlice(file, file.table.index(name), options)
