"""Tensors on the devices of torch: through a ring of pinned buffers, which are filled while earlier ones are copied.

Each byte is read once, by the core's threads, straight into pinned memory, and copied once, by the device. The ring is
all the host memory that a load takes, except for tensors that cannot be divided into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..engine.ahead.staging import BUFFERS, buffer_size, staged
from ..engine.codes.pieces import Meter
from ..engine.read.plan import Entry, in_file_order
from ..engine.run.progress import Progress
from . import torch_arrays
from .torch_arrays import torch

# Conversions that the device does after the copy, which then moves fewer bytes; they are exact.
_WIDENED = {"BF16": ("F32", "F64"), "F16": ("F32", "F64"), "F32": ("F64",)}


class DeviceCopies(Protocol):
    """Copies from buffers in host memory to one device, in the order in which they are started."""

    def buffer(self, nbytes: int) -> Any:
        """A new buffer: a uint8 tensor on the CPU."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new tensor on the device, which copies can fill."""

    def copy(self, destination: Any, source: Any) -> None:
        """Starts to copy the bytes of a buffer to as many of a tensor."""

    def convert(self, destination: Any, source: Any) -> None:
        """Starts to convert one tensor of the device to the dtype of another; the first is not used again."""

    def started(self, number: int) -> None:
        """Notes that all copies from a buffer, by its number, have been started."""

    def wait(self, number: int) -> None:
        """Returns when they are done; called in another thread."""

    def finish(self) -> None:
        """Returns when all that was started is done."""


class Blocking:
    """Copies of a device without streams, each of which is done when it returns.

    Args:
        device: any.
    """

    def __init__(self, device: Any) -> None:
        self._device = device

    def buffer(self, nbytes: int) -> Any:
        """Pageable memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new tensor."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def copy(self, destination: Any, source: Any) -> None:
        """Copies bytes."""
        destination.copy_(source)

    def convert(self, destination: Any, source: Any) -> None:
        """Converts."""
        destination.copy_(source)

    def started(self, number: int) -> None:
        """Nothing is under way."""

    def wait(self, number: int) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Nothing is under way."""


class Streamed:
    """Copies on a stream of their own from pinned memory. An event for each buffer tells when it may be filled again.

    Args:
        device: one whose module has streams and events: CUDA, which is also ROCm's name in torch, or XPU.
    """

    def __init__(self, device: Any) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device=device)
        self._events: dict[int, Any] = {}

    def buffer(self, nbytes: int) -> Any:
        """Pinned memory, which torch keeps for the next load; pageable where the system refuses to pin it."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new tensor of the caller's stream; copies wait for what that stream still does with its memory."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._stream.wait_stream(self._module.current_stream(self._device))
        return tensor

    def copy(self, destination: Any, source: Any) -> None:
        """Starts to copy."""
        with self._module.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def convert(self, destination: Any, source: Any) -> None:
        """Starts to convert; the memory of ``source`` is not used for anything else until that is done."""
        with self._module.stream(self._stream):
            destination.copy_(source)
        source.record_stream(self._stream)

    def started(self, number: int) -> None:
        """Records the event of the buffer."""
        if number not in self._events:
            self._events[number] = self._module.Event()
        self._events[number].record(self._stream)

    def wait(self, number: int) -> None:
        """Waits for the event of the buffer."""
        if number in self._events:
            self._events[number].synchronize()

    def finish(self) -> None:
        """Waits for the stream."""
        self._stream.synchronize()


# How tensors are copied, by type of the device.
_COPIES: dict[str, type[Streamed]] = {"cuda": Streamed, "xpu": Streamed}


def load(
    entries: Sequence[Entry],
    device: Any,
    *,
    threads: int | None = None,
    progress: Progress = None,
    copies: DeviceCopies | None = None,
) -> dict[str, Any]:
    """Tensors on a device by name, in the order of ``entries``.

    Tensors that are the same bytes of a file share memory, as tied weights do; every other one has a storage of its
    own. If anything fails, nothing is left on the device.

    Args:
        entries: the tensors, none of which stays in parts.
        device: a `torch.device` that is available.
        threads: for reading; None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total) of what is copied.
        copies: how it is copied; None for what suits the device.

    Raises:
        UnsupportedError: torch does not have a dtype.
        FormatError, OSError: a file ends too early, or cannot be read.
        torch.OutOfMemoryError: the device has too little memory.
    """
    copies = _COPIES.get(device.type, Blocking)(device) if copies is None else copies
    targets: dict[Any, _Target] = {}
    keys = {entry.name: _key(entry) for entry in entries}
    for entry in entries:
        if keys[entry.name] not in targets:
            targets[keys[entry.name]] = _Target(entry, copies)
    by_name = {target.moved.name: target for target in targets.values()}
    moved = in_file_order((target.moved for target in targets.values()), (entry.file for entry in entries))
    total = sum(entry.nbytes for entry in moved)
    buffers = [copies.buffer(buffer_size(total)) for _ in range(BUFFERS)] if total else []
    arrays: list[Array] = [buffer.numpy() for buffer in buffers]
    meter = Meter(progress, total)
    reading = staged(moved, arrays, copies.wait, threads) if total else None
    try:
        for filled in reading or ():
            if filled.buffer is None:
                target = by_name[filled.name]
                target.copy(0, torch.from_numpy(filled.array.reshape(-1).view(np.uint8)))
                meter.add(target.moved.nbytes)
                continue
            for name, begin, nbytes, at in filled.pieces:
                by_name[name].copy(begin, buffers[filled.buffer][at : at + nbytes])
            copies.started(filled.buffer)
            meter.add(sum(piece.nbytes for piece in filled.pieces))
        return {entry.name: targets[keys[entry.name]].result() for entry in entries}
    finally:
        if reading is not None:
            reading.close()
        copies.finish()  # before any memory that is copied from or to is freed
        meter.close()


def _key(entry: Entry) -> Any:
    """Equal for tensors that are the same bytes, read in the same way."""
    layout = entry.file.table.strides(entry.at) if entry.strided else None
    return entry.file, entry.begin, entry.end, entry.shape, entry.source, entry.target, layout, entry.packed is None


class _Target:
    """A tensor under construction.

    Args:
        entry: the tensor.
        copies: to its device.

    Attributes:
        moved: the tensor as it is copied: in its own dtype if the device widens it.
    """

    def __init__(self, entry: Entry, copies: DeviceCopies) -> None:
        self.moved = _moved(entry)
        self._copies = copies
        self._copied = torch_arrays.described(self.moved)[1]
        self._shape, self._dtype = torch_arrays.described(entry)
        self._left = self.moved.nbytes
        self._memory: Any = None
        self._result: Any = None if self._left else copies.empty(self._shape, self._dtype)

    def copy(self, begin: int, source: Any) -> None:
        """Starts to copy bytes of a buffer to the place where they begin."""
        if self._memory is None:
            # Not a part of a larger block: writers save whole storages, and some libraries free them.
            self._memory = self._copies.empty((self.moved.nbytes,), torch.uint8)
        size = source.numel()
        self._copies.copy(self._memory[begin : begin + size], source)
        self._left -= size
        if self._left:
            return
        copied, self._memory = self._memory.view(self._copied).reshape(self._shape), None
        if self._copied == self._dtype:
            self._result = copied
        else:
            self._result = self._copies.empty(self._shape, self._dtype)
            self._copies.convert(self._result, copied)

    def result(self) -> Any:
        """The tensor."""
        assert self._result is not None
        return self._result.view(self._result.shape)


def _moved(entry: Entry) -> Entry:
    """What is copied to the device: the tensor as it is stored if the device widens it."""
    assert entry.target is not None
    source, target = dtypes.BY_NUMBER[entry.source], dtypes.BY_NUMBER[entry.target]
    if entry.packed is None and target.code in _WIDENED.get(source.code, ()):
        return entry._replace(target=entry.source)
    return entry
