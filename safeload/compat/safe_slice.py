"""The lazy tensors of `safe_open`, compatible with safetensors."""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..engine.run.slice import as_index, read_slice
from ..engine.run.weight_file import WeightFile
from ..errors import SafetensorError
from ..formats.safetensors import file as safetensors
from ..stores.local import check_unchanged

if TYPE_CHECKING:
    from ..frameworks.handle import Handle


class SafeSlice:
    """A lazy tensor: indexing it reads only the selected elements.

    Indexing follows numpy's basic indexing, except for four errors that safetensors raises and its tests assert: a
    bound or an index past the end, a list that is not empty, more indices than axes. Slices for torch of a mapped file
    follow torch's indexing instead.

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

    def __reduce__(self) -> tuple[Any, ...]:
        file = self._file
        return _reopen_slice, (file.place, file.table.names[self._index], tuple(file.identity[:2]), self._handle)

    def __copy__(self) -> SafeSlice:
        file = self._file
        return _reopen_slice(file.place, file.table.names[self._index], file.identity, copy.copy(self._handle))

    def __deepcopy__(self, memo: dict[int, Any]) -> SafeSlice:
        return self.__copy__()

    def get_shape(self) -> list[int]:
        """Logical shape of the tensor."""
        return list(self._file.table.shapes[self._index])

    def get_dtype(self) -> str:
        """Its safetensors code, such as "F32"."""
        return self._file.table.rows[self._index].code

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of the whole tensor."""
        return self._file.layout(self._index).shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array of the whole tensor."""
        return dtypes.array_dtype(self._file.table.rows[self._index].number)

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
            return read_slice(self._file, self._index, items, "get_tensor(name)")
        except IndexError as error:
            raise SafetensorError(str(error)) from None


def _reopen_slice(path: str, name: str, seen: tuple[int, ...], handle: Handle | None = None) -> SafeSlice:
    check_unchanged(path, seen)
    file = safetensors.open_file(path)
    file.check_identity(seen)
    return SafeSlice(file, file.table.index(name), handle)


def _refuse(items: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Raises the errors of safetensors, with its messages and in its order: from the last axis to the first."""
    if any(item is None for item in items) or sum(item is Ellipsis for item in items) > 1:
        return  # numpy's rules apply
    given = [item for item in items if item is not Ellipsis]
    where = next((k for k, item in enumerate(items) if item is Ellipsis), len(items))
    full = [slice(None)] * (len(shape) - len(given)) if where < len(items) else []
    given[where:where] = full
    if not all(isinstance(item, slice) or as_index(item) is not None for item in given):
        return
    during = f"Error during slicing [{', '.join(map(_show, given))}] with shape {list(shape)}"
    if len(given) > len(shape):
        raise SafetensorError(f"{during}: more slicing indexes than dimensions in tensor")
    for axis, (item, size) in enumerate(zip(given, shape, strict=False)):
        if not isinstance(item, slice) and operator.index(item) < -size:
            raise SafetensorError(f"Invalid index {item} for dimension {axis} of size {size}")
    for axis in reversed(range(len(given))):
        item, size = given[axis], shape[axis]
        asked = None
        if not isinstance(item, slice):
            asked = operator.index(item) if operator.index(item) >= size else None
        elif item.start is not None and item.start > size:
            asked = item.start
        elif item.stop is not None and item.stop > size:
            asked = item.stop - 1
        if asked is not None:
            raise SafetensorError(f"{during}: index {asked} out of bounds for tensor dimension #{axis} of size {size}")


def _show(item: Any) -> str:
    if not isinstance(item, slice):
        return str(item)
    text = ":".join("" if bound is None else str(bound) for bound in (item.start, item.stop))
    return text if item.step in (None, 1) else f"{text}:{item.step}"
