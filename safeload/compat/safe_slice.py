"""The lazy tensors of `safe_open`, compatible with safetensors."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..engine.read.tensors import FileTensor
from ..engine.run.slice import as_index, read_slice
from ..engine.run.weight_file import WeightFile
from ..errors import SafetensorError, exported, public
from ..formats.safetensors import file as safetensors
from ..stores.local import check_unchanged

# How to use an index that is not supported, as upstream's tensors do.
_WHOLE = "index the whole tensor, as in get_tensor(name)[rows]"


class Handle(Protocol):
    """The framework of `safe_open`'s tensors: converts those of an open file. Pickles as device and backend."""

    def tensor(self, part: FileTensor, read: Callable[[], Array]) -> Any:
        """Return a tensor. ``read`` returns a writable array that shares memory with no other array."""

    def tensors(
        self, parts: Sequence[FileTensor], target: dtypes.Dtype | None, read: Callable[[], dict[str, Array]]
    ) -> dict[str, Any]:
        """Return tensors by name."""

    def item(self, file: WeightFile, index: int, key: Any, select: Callable[[Any], Array]) -> Any:
        """Return the selected elements of the tensor at ``index`` in the file's table."""


@exported()
class SafeSlice:
    """A lazy tensor: indexing it reads only the selected elements.

    Indexing follows NumPy's basic indexing, with four additional errors of safetensors: a bound or an index past the
    end, a list that is not empty, more indices than axes. With ``framework="pt"`` and a mapped file, indexing follows
    torch.

    Example:
        >>> from safeload import safe_open
        >>> with safe_open("model.safetensors", framework="np") as file:
        ...     rows = file.get_slice("conv1.weight")
        ...     print(rows.get_shape(), rows.get_dtype(), rows[:2].shape)
        [128, 129, 3] F32 (2, 129, 3)
    """

    def __init__(self, file: WeightFile, index: int, handle: Handle | None = None) -> None:
        self._file = file
        self._index = index
        self._handle = handle

    @classmethod
    @public
    def _reopen(cls, path: str, name: str, seen: tuple[int, ...], handle: Handle | None = None) -> SafeSlice:
        check_unchanged(path, seen)
        file = safetensors.open_file(path)
        file.check_identity(seen)
        return cls(file, file.table.index(name), handle)

    def __reduce__(self) -> tuple[Any, ...]:
        file = self._file
        return SafeSlice._reopen, (file.place, file.table.names[self._index], tuple(file.identity[:2]), self._handle)

    @public
    def __copy__(self) -> SafeSlice:
        file = self._file
        return SafeSlice._reopen(file.place, file.table.names[self._index], file.identity, copy.copy(self._handle))

    @public
    def __deepcopy__(self, memo: dict[int, Any]) -> SafeSlice:
        return self.__copy__()

    def get_shape(self) -> list[int]:
        """Return the tensor's logical shape."""
        return list(self._file.table.shapes[self._index])

    def get_dtype(self) -> str:
        """Return the dtype as a safetensors code, such as "F32"."""
        return self._file.table.rows[self._index].code

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor as an array."""
        return self._file.layout(self._index).shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the whole tensor as an array."""
        return dtypes.array_dtype(self._file.table.rows[self._index].number)

    @public
    def __getitem__(self, index: Any) -> Any:
        if self._handle is not None:
            return self._handle.item(self._file, self._index, index, self._array)
        return self._array(index)

    def _array(self, index: Any) -> Array:
        if isinstance(index, list):
            if index:
                raise SafetensorError("Non empty lists are not implemented")
            index = slice(0, 0)
        items = index if isinstance(index, tuple) else (index,)
        _refuse(items, self.shape)
        try:
            return read_slice(self._file, self._index, items, _WHOLE)
        except IndexError as error:
            raise SafetensorError(str(error)) from None


def _refuse(items: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Raise the errors of safetensors, with its messages and in its order: from the last axis to the first."""
    if any(item is None for item in items) or sum(item is Ellipsis for item in items) > 1:
        return  # NumPy's rules apply
    indices = [item for item in items if item is not Ellipsis]
    ellipsis = next((k for k, item in enumerate(items) if item is Ellipsis), len(items))
    if ellipsis < len(items):
        indices[ellipsis:ellipsis] = [slice(None)] * (len(shape) - len(indices))
    if not all(isinstance(item, slice) or as_index(item) is not None for item in indices):
        return
    during = f"Error during slicing [{', '.join(map(_show, indices))}] with shape {list(shape)}"
    if len(indices) > len(shape):
        raise SafetensorError(f"{during}: more slicing indexes than dimensions in tensor")
    for axis, (item, size) in enumerate(zip(indices, shape, strict=False)):
        if not isinstance(item, slice) and operator.index(item) < -size:
            raise SafetensorError(f"Invalid index {item} for dimension {axis} of size {size}")
    for axis in reversed(range(len(indices))):
        item, size = indices[axis], shape[axis]
        beyond = None
        if not isinstance(item, slice):
            beyond = operator.index(item) if operator.index(item) >= size else None
        elif item.start is not None and item.start > size:
            beyond = item.start
        elif item.stop is not None and item.stop > size:
            beyond = item.stop - 1
        if beyond is not None:
            raise SafetensorError(f"{during}: index {beyond} out of bounds for tensor dimension #{axis} of size {size}")


def _show(item: Any) -> str:
    if not isinstance(item, slice):
        return str(item)
    text = ":".join("" if bound is None else str(bound) for bound in (item.start, item.stop))
    return text if item.step in (None, 1) else f"{text}:{item.step}"
