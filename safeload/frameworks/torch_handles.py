"""Give the tensors and slices of `safe_open` as torch tensors, sliced by torch's rules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, array_over, foreign_order
from ..engine.read.load import VIEWED_FROM, load_tensors, mapping
from ..engine.read.tensors import Entry, FileTensor, Tensors, entries_of
from ..engine.run.memory import address_of
from ..engine.run.slice import as_index
from ..engine.run.threads import MOST_THREADS
from ..engine.run.weight_file import WeightFile
from ..errors import SafetensorError
from . import torch_arrays, torch_devices
from .torch_arrays import torch

# Tensors of at least this size go to a device through a ring of pinned buffers, which would slow down smaller ones.
_STAGED_FROM = 4 << 20

_BYTES = np.dtype(np.uint8)


class TorchHandle:
    """The `Handle` for torch. As in safetensors, the device need not be available before a tensor is read."""

    def __init__(self, device: Any, backend: str) -> None:
        self._device = torch_arrays.parsed_device(device)
        self._available = self._device is None
        self._without_data = self._device is not None and self._device.type == "meta"
        self._backend = backend
        self._inner: dict[WeightFile, Any] = {}  # mappings that never leave this object: their pages are the file's
        self._outer: dict[WeightFile, Any] = {}  # mappings behind returned slices
        self._sliced: dict[int, object] = {}  # index of a tensor -> token of the first call to get a view of it

    def __reduce__(self) -> tuple[Any, ...]:
        return TorchHandle, (self._device, self._backend)

    def _check_device(self) -> None:
        if not self._available:
            torch_arrays.device_of(self._device)
            self._available = True

    def tensor(self, part: FileTensor, read: Callable[[], Array]) -> Any:
        self._check_device()
        if self._without_data:
            return torch_arrays.without_data(entries_of([part], None))[part[0]]
        name, file, index = part
        begin, end = file.table.byte_range(index) if self._device is not None else (0, 0)
        if end - begin >= _STAGED_FROM:
            return torch_devices.load(entries_of([part], None), self._device)[name]
        array = read()
        raw = torch_arrays.raw_of([part]).get(name) if array.dtype is _BYTES else None  # possibly a packed dtype
        return self._moved(torch_arrays.from_array(array, name, raw))

    def tensors(
        self, parts: Sequence[FileTensor], target: dtypes.Dtype | None, read: Callable[[], dict[str, Array]]
    ) -> dict[str, Any]:
        self._check_device()
        if self._without_data:
            return torch_arrays.without_data(entries_of(parts, target))
        if self._device is not None:
            return torch_devices.load(entries_of(parts, target), self._device)
        return torch_arrays.from_arrays(read(), torch_arrays.raw_of(parts) if target is None else None)

    def item(self, file: WeightFile, index: int, key: Any, select: Callable[[Any], Array]) -> Any:
        """Return the selected elements, by torch's rules if the file is mapped and by `SafeSlice`'s otherwise."""
        self._check_device()
        name, row = file.table.names[index], file.table.row(index)
        shape, dtype = torch_arrays.described(name, row, file.table.shape(index))
        raw = dtype if row.packed else None
        if self._without_data:
            return torch.empty(shape, dtype=dtype, device="meta")[key]
        if self._backend != "mmap":
            return self._moved(torch_arrays.from_array(select(key), name, raw))
        whole = self._whole(file, index, shape)
        if _is_basic(key):
            try:
                part = whole[key]
            except IndexError:
                pass  # below, torch raises its own error
            else:
                part = np.asarray(part)  # a single element is not an array
                return self._moved(torch_arrays.from_array(self._separate(file, index, part), name, raw))
        tensor = torch_arrays.from_array(whole, name, raw)
        selected = tensor[key]
        if selected.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            selected = selected.clone()
        return self._moved(selected)

    def arrivals(
        self, file: WeightFile, rows: Mapping[str, range | None] | None, device: Any, threads: int
    ) -> tuple[list[str], Generator[torch_devices.Arrival]]:
        place = self._device if device is None else torch_arrays.parsed_device(device)
        if place is None or place.type != "cuda":
            raise SafetensorError(f"prefetch loads to cuda devices, not {'cpu' if place is None else place}")
        threads = operator.index(threads)
        if threads < 1:
            raise ValueError(f"threads must be >= 1, got {threads}")
        entries = entries_of(Tensors.in_file(file), None)
        if rows is not None:
            entries = [_rows_of(entry, rows[entry.name]) for entry in entries if entry.name in rows]
        for entry in entries:
            torch_arrays.of_entry(entry)  # an unsupported dtype is found before anything moves
        torch_arrays.device_of(place)
        return [entry.name for entry in entries], torch_devices.prefetch(entries, place, min(threads, MOST_THREADS))

    def _moved(self, tensor: Any) -> Any:
        return tensor if self._device is None else tensor.to(self._device)

    def _whole(self, file: WeightFile, index: int, shape: tuple[int, ...]) -> Array:
        """Return a tensor in memory that never leaves this object: a private mapping, or a copy."""
        begin, end = file.table.byte_range(index)
        if begin < end and not foreign_order(False):
            buffer = mapping(file, self._inner)
            if buffer is not None:
                return array_over(buffer, dtypes.array_dtype(file.table.row(index).number), shape, begin)
        name = file.table.names[index]
        array: Array = load_tensors(Tensors([file], [name], [index]), backend="pread")[0][name]
        return array

    def _separate(self, file: WeightFile, index: int, part: Array) -> Array:
        """Return a part of `_whole` in memory that no other array shares: a view if it is large."""
        inner = self._inner.get(file)
        if part.nbytes < VIEWED_FROM["mmap"] or inner is None or not part.flags.aligned:
            return np.array(part)
        caller = object()
        first = self._sliced.setdefault(index, caller) is caller  # atomic: only one of two threads is first
        buffer = mapping(file, self._outer if first else None)
        if buffer is None:
            return np.array(part)
        offset = part.ctypes.data - address_of(np.frombuffer(inner, np.uint8))
        return array_over(buffer, part.dtype, part.shape, offset, part.strides)


def _rows_of(entry: Entry, rows: range | None) -> Entry:
    """Return the entry of some rows of a tensor, which must take whole bytes."""
    if rows is None:
        return entry
    size = (entry.end - entry.begin) // max(1, entry.shape[0])
    begin, end = (entry.begin + row * size for row in (rows.start, rows.stop))
    return entry._replace(begin=begin, end=end, shape=(len(rows), *entry.shape[1:]))


def _is_basic(key: Any) -> bool:
    """Return whether a key is basic indexing: it gives a view, and NumPy and torch agree on it within bounds."""
    for item in key if isinstance(key, tuple) else (key,):
        if isinstance(item, slice):
            if item.step is not None and (as_index(item.step) or 0) <= 0:
                return False
        elif item is not None and item is not Ellipsis and as_index(item) is None:
            return False
    return True
