"""What `safe_open` gives for torch: tensors, and slices by torch's own rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, array_over, foreign_order
from ..engine import jobs
from ..engine.load import Part, load_parts
from ..engine.slice import as_index
from ..engine.weight_file import WeightFile
from ..stores.local import mapping_of
from . import torch_arrays
from .torch_arrays import torch

# Slices that span less than this are read: a view would save less than the mapping costs.
_VIEWED_FROM = 64 << 10


class TorchHandle:
    """Gives the tensors of one open file on a device of torch; see `Handle`.

    Args:
        device: see `torch_arrays.device_of`.
        backend: "mmap" or "pread".

    Raises:
        SafeloadError: the device is invalid or not available.
    """

    def __init__(self, device: Any, backend: str) -> None:
        self._device = torch_arrays.device_of(device)
        self._backend = backend
        self._mappings: dict[WeightFile, Any] = {}
        self._sliced: dict[int, object] = {}  # index of a tensor to a token of the call that got a view of it first

    def __reduce__(self) -> tuple[Any, ...]:
        return TorchHandle, (self._device, self._backend)

    @property
    def _without_data(self) -> bool:
        return self._device is not None and self._device.type == "meta"

    def tensor(self, part: Part, read: Callable[[], Array]) -> Any:
        """One tensor; see `Handle.tensor`."""
        if self._without_data:
            return torch_arrays.without_data([part], None)[part[0]]
        name, file, index = part
        row = file.table.row(index)
        if row.packed:
            torch_arrays.shape_of(name, row, file.table.shape(index))
            return self._moved(torch_arrays.from_array(read(), name, row))
        return self._moved(torch_arrays.from_array(read(), name))

    def tensors(
        self, parts: Sequence[Part], target: dtypes.Dtype | None, read: Callable[[], dict[str, Array]]
    ) -> dict[str, Any]:
        """Several tensors; see `Handle.tensors`."""
        if self._without_data:
            return torch_arrays.without_data(parts, target)
        raw = None
        if target is None:
            raw = torch_arrays.raw_of(
                {file.table for _, file, _ in parts}, ((name, file.table, index) for name, file, index in parts)
            )
        tensors = torch_arrays.from_arrays(read(), raw)
        return tensors if self._device is None else {name: self._moved(x) for name, x in tensors.items()}

    def item(self, file: WeightFile, index: int, key: Any, select: Callable[[Any], Array]) -> Any:
        """The selected elements: by torch's rules of a mapped file, else by those of `SafeSlice`; see `Handle.item`."""
        table = file.table
        name, row = table.names[index], table.row(index)
        shape, dtype = torch_arrays.shape_of(name, row, table.shape(index)), torch_arrays.torch_dtype(row, name)
        if self._backend != "mmap" and not self._without_data:
            return self._moved(torch_arrays.from_array(select(key), name, row if row.packed else None))
        # A tensor without data knows where the elements are, and which keys torch refuses.
        whole = torch.empty(shape, dtype=dtype, device="meta")
        if self._without_data:
            return whole[key]
        if foreign_order(False) or not _is_basic(key):
            arrays, _ = load_parts([(name, file, index)], backend="mmap")
            array: Array = arrays[name]
            part = torch_arrays.from_array(array, name, row if row.packed else None)[key]
            return part.clone() if self._device is None else self._moved(part)
        part = whole[key]
        if not part.numel():
            return torch.empty(part.shape, dtype=dtype, device="cpu" if self._device is None else self._device)
        array = self._stored(file, index, part)
        return self._moved(torch_arrays.from_array(array, name, row if row.packed else None))

    def _moved(self, tensor: Any) -> Any:
        return tensor if self._device is None else tensor.to(self._device)

    def _stored(self, file: WeightFile, index: int, part: Any) -> Array:
        """The elements of a tensor that a view without data refers to, in memory that no other array shares."""
        begin, end = file.table.byte_range(index)
        dtype = dtypes.array_dtype(file.table.row(index).number)
        strides = tuple(stride * dtype.itemsize for stride in part.stride())
        begin += part.storage_offset() * dtype.itemsize
        size = sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True)) + dtype.itemsize
        assert begin + size <= end
        shape = tuple(part.shape)
        if size >= _VIEWED_FROM and begin % dtype.alignment == 0:
            buffer = self._mapping(file, index)
            if buffer is not None:
                return array_over(buffer, dtype, shape, begin, strides)
        block = np.empty(size, np.uint8)
        origin = jobs.Origin(file.table.names[index], file.table.shape(index))
        jobs.Batch([jobs.Job(file, begin, jobs.address_of(block), size, origin=origin)]).run()
        return array_over(block, dtype, shape, 0, strides)

    def _mapping(self, file: WeightFile, index: int) -> Any:
        """A mapping without an earlier view of this tensor; None where the system refuses it."""
        caller = object()
        if self._sliced.setdefault(index, caller) is not caller:
            return mapping_of(file.store)
        buffer = self._mappings.get(file)
        if buffer is None:
            buffer = mapping_of(file.store)
            if buffer is not None:
                self._mappings[file] = buffer
        return buffer


def _is_basic(key: Any) -> bool:
    """Whether a key gives a view."""
    items = key if isinstance(key, tuple) else (key,)
    return all(
        item is None or item is Ellipsis or isinstance(item, slice) or as_index(item) is not None for item in items
    )
