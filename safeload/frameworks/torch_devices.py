"""Load tensors onto torch devices through a ring of pinned buffers: threads fill some while the device copies others.

Each byte is read once, into pinned memory, and copied once, by the device. A load needs no other host memory, except
for tensors that cannot be divided into chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from ..core import dtypes, memory, native, runtime, weight_file
from ..core.arrays import Array, array_over, foreign_order
from ..core.checkpoint import tensors_of
from ..core.load import VIEWED_FROM, load_tensors, mapping, parse_target
from ..core.progress import Meter, Progress
from ..core.slice import as_index
from ..core.staging import BUFFERS, SMALLEST_BUFFER, Ring, buffer_size, staged
from ..core.tensors import Entry, FileTensor, Tensors, entries_of, in_file_order
from ..errors import SafetensorError
from . import torch_arrays
from .checkpoints import Selected
from .torch_arrays import torch

# Exact conversions to do on the device, after a copy of fewer bytes.
_WIDENED = {"BF16": ("F32", "F64"), "F16": ("F32", "F64"), "F32": ("F64",)}

# More threads save no time.
_MOST_THREADS = 32
# From this number of threads on, `_SHARING` of them fill a buffer together, and buffers are `_LARGER` times as large:
# fewer buffers mean fewer steps in Python, in which the other threads wait.
_FEW_THREADS, _SHARING, _LARGER = 4, 3, 2
# Pieces of up to `_SMALL` bytes, if at least `_SEVERAL` lie next to each other, are copied to the device together and
# divided there: to start a copy takes as long as to copy `_SMALL` bytes.
_SMALL, _SEVERAL = 64 << 10, 8


class Copies:
    """Copies from host buffers to a device, in the order they are started.

    With streams they run on a stream of their own, from pinned memory, and an event for each buffer tells when to
    refill it. Without, each is done once it was started.
    """

    def __init__(self, device: Any, streams: bool) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if streams else None
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)
        self._caller = None if self._module is None else self._module.current_stream(device)
        self._events: dict[int, Any] = {}

    def buffer(self, nbytes: int) -> Any:
        """Return a new buffer: a uint8 tensor on the CPU."""
        if self._stream is not None:
            with suppress(RuntimeError):  # the system refuses to pin more
                # Torch keeps pinned memory for the next load.
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _on(self, stream: Any) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = nullcontext() if self._module is None else self._module.stream(stream)
        return context

    def allocating(self) -> AbstractContextManager[object]:
        """Return a context in which another thread allocates memory as the thread that made this object would."""
        return self._on(self._caller)

    def copying(self) -> AbstractContextManager[object]:
        """Return a context to start copies in. They wait for earlier uses of the memory that `empty` has returned."""
        if self._stream is not None:  # new memory belongs to the caller's stream, which may still use its old content
            self._stream.wait_stream(self._caller)
        return self._on(self._stream)

    def copy(self, destinations: Sequence[Any], buffer: Any, places: Sequence[tuple[int, int]]) -> None:
        """Start to copy ranges of a buffer, (begin, end) in ascending order, to device tensors of equal sizes."""
        streams, pairs = self._stream is not None, zip(destinations, places, strict=True)
        for small, neighbours in groupby(pairs, lambda pair: streams and pair[1][1] - pair[1][0] <= _SMALL):
            run = list(neighbours)
            if small and len(run) >= _SEVERAL:
                self._copy_together([destination for destination, _ in run], buffer, [place for _, place in run])
                continue
            for destination, (begin, end) in run:
                destination.copy_(buffer[begin:end], non_blocking=streams)

    def _copy_together(self, destinations: Sequence[Any], buffer: Any, places: Sequence[tuple[int, int]]) -> None:
        """Copy neighbouring ranges to the device at once, and from there to their tensors."""
        first, last = places[0][0], places[-1][1]
        with self.allocating():
            copied = self.empty((last - first,), torch.uint8)
        self._stream.wait_stream(self._caller)
        copied.copy_(buffer[first:last], non_blocking=True)
        borders = [border for place in places for border in place]
        parts = copied.split_with_sizes([after - before for before, after in pairwise(borders)])
        torch._foreach_copy_(destinations, parts[::2])  # the others lie between two places
        copied.record_stream(self._stream)  # its memory stays reserved until the copies are done

    def convert(self, destination: Any, source: Any) -> None:
        """Start to convert a device tensor to the destination's dtype; the source is not used again."""
        destination.copy_(source)
        if self._stream is not None:
            source.record_stream(self._stream)  # its memory stays reserved until the conversion is done

    def started(self, number: int) -> None:
        """Note that all copies from buffer ``number`` have been started."""
        if self._module is not None:
            if number not in self._events:
                self._events[number] = self._module.Event()
            self._events[number].record(self._stream)

    def wait(self, number: int) -> None:
        """Wait for the copies from buffer ``number``; called from any thread."""
        if number in self._events:
            self._events[number].synchronize()

    def finish(self) -> None:
        """Wait for everything that was started."""
        if self._stream is not None:
            self._stream.synchronize()


def load(
    entries: Sequence[Entry],
    device: Any,
    *,
    threads: int | None = None,
    progress: Progress = None,
    copies: Copies | None = None,
) -> dict[str, Any]:
    """Load tensors onto a device, in order; tied weights share memory, and an error leaves nothing there."""
    copies = copies or Copies(device, device.type in ("cuda", "xpu"))
    tiny = sum(entry.end - entry.begin for entry in entries) < _SMALL * len(entries)
    with runtime.paused(len(entries) if tiny else 0):
        tensors = {name: tensor for name, tensor, _ in _arrivals(entries, copies, threads, progress)}
        return {entry.name: tensors[entry.name] for entry in entries}


# Name, tensor, and a function that returns once the tensor's bytes have been copied.
Arrival = tuple[str, Any, Callable[[], object]]


def _arrivals(entries: Sequence[Entry], copies: Copies, threads: int | None, progress: Progress) -> Iterator[Arrival]:
    """Yield each tensor once its last copy was started. At the end, or if closed, all copies are done."""
    targets: dict[Any, _Target] = {}
    for entry in entries:
        layout = entry.file.table.strides.get(entry.at) if entry.strided else None
        # The same bytes, read alike, become a single tensor.
        key = entry.file, entry.begin, entry.end, entry.shape, entry.source, entry.target, layout, entry.packed is None
        if key in targets:
            targets[key].aliases += (entry.name,)
        else:
            targets[key] = _Target(entry, copies)
    by_name = {target.moved.name: target for target in targets.values()}
    moved = in_file_order((target.moved for target in targets.values()), (entry.file for entry in entries))
    total = sum(target.left for target in targets.values())
    workers = max(1, min(memory.thread_count(total, threads), _MOST_THREADS, total // SMALLEST_BUFFER))
    sharing = workers >= _FEW_THREADS
    workers = -(-workers // _SHARING) if sharing else workers
    count = max(BUFFERS, workers + 2)  # one is copied while the consumer starts the copies of another
    size = buffer_size(total, count, larger=_LARGER if sharing else 1)
    buffers: dict[int, Any] = {}

    def make(number: int) -> Array:
        buffers[number] = copies.buffer(size)
        array: Array = buffers[number].numpy()
        return array

    ring = Ring(size, count, make, copies.wait)
    reading = staged(moved, ring, threads, workers=workers, sharing=_SHARING if sharing else 1, ordered=False)
    meter = Meter(progress, total)
    try:
        for target in targets.values():
            if not target.left:  # it is empty
                yield from target.arrivals(lambda: None)
        for filled in reading:
            number = filled.buffer
            buffer = torch.from_numpy(filled.array.reshape(-1).view(np.uint8)) if number is None else buffers[number]
            parts = [by_name[name].part(begin, nbytes) for name, begin, nbytes, _ in filled.pieces]
            places = [(at, at + nbytes) for _, _, nbytes, at in filled.pieces]
            with copies.copying():
                copies.copy(parts, buffer, places)
                del parts
                complete = [target for piece in filled.pieces if (target := by_name[piece.name]).copied(piece.nbytes)]
                if number is not None:
                    copies.started(number)
            meter.add(sum(piece.nbytes for piece in filled.pieces))
            wait = copies.finish if number is None else partial(copies.wait, number)
            for target in complete:
                yield from target.arrivals(wait)
            del complete
    finally:
        reading.close()
        copies.finish()  # before memory in use by copies is freed
        meter.close()


class _Target:
    __slots__ = ("_copies", "_dtype", "_memory", "_nbytes", "_result", "_sent", "_shape", "aliases", "left", "moved")

    def __init__(self, entry: Entry, copies: Copies) -> None:
        assert entry.target is not None
        source, target = dtypes.BY_NUMBER[entry.source], dtypes.BY_NUMBER[entry.target]
        widened = entry.packed is None and target.code in _WIDENED.get(source.code, ())
        self.moved = entry._replace(target=entry.source) if widened else entry  # copied, then widened on the device
        self.aliases: tuple[str, ...] = ()  # further names that get the tensor
        self._copies = copies
        self._shape, self._dtype = torch_arrays.of_entry(entry)
        self._sent = self._dtype if self.moved is entry else torch_arrays.of_entry(self.moved)[1]
        self.left = self._nbytes = self.moved.nbytes  # bytes to copy
        self._memory: Any = None
        self._result: Any = None if self.left else copies.empty(self._shape, self._dtype)

    def part(self, begin: int, nbytes: int) -> Any:
        """Return the tensor's bytes from ``begin`` on, to copy to; the first call allocates its memory."""
        if self._memory is None:
            # Its own storage, because writers save whole storages, and some libraries free them.
            self._memory = self._copies.empty((self._nbytes,), torch.uint8)
            if self._sent == self._dtype:
                self._result = self._memory.view(self._sent).view(self._shape)
            else:
                self._result = self._copies.empty(self._shape, self._dtype)
        return self._memory if nbytes == self._nbytes else self._memory[begin : begin + nbytes]

    def copied(self, nbytes: int) -> bool:
        """Note that copies of so many bytes have been started; after the last ones, start to convert the tensor."""
        self.left -= nbytes
        if self.left:
            return False
        if self._sent != self._dtype:
            sent, self._memory = self._memory.view(self._sent).view(self._shape), None
            self._copies.convert(self._result, sent)
        return True

    def arrivals(self, wait: Callable[[], object]) -> Iterator[Arrival]:
        """Yield the complete tensor for each of its names, once."""
        tensor, self._memory, self._result = self._result, None, None
        yield self.moved.name, tensor, wait
        for name in self.aliases:
            yield name, tensor.view(tensor.shape), wait


def load_selected(selected: Selected, device: Any, *, threads: int | None, progress: Progress) -> dict[str, Any]:
    """Load the selected tensors of a checkpoint onto a device other than the CPU."""
    checkpoint, merge, names, groups = selected
    by_group = (entries_of(tensors_of(checkpoint, members), parse_target(dtype)) for members, dtype in groups)
    by_name = {entry.name: entry for entries in by_group for entry in entries}
    entries = [by_name[name] for name in names]
    if device.type == "meta":
        return torch_arrays.without_data(entries)
    if merge is None:
        return load(entries, device, threads=threads, progress=progress)
    plain = [entry for entry in entries if entry.name not in merge]
    tensors = load(plain, device, threads=threads, progress=progress)
    for members, dtype in groups:
        for name in (name for name in members if name in merge):  # one at a time in host memory
            array = merge.values(name, merge.target_row(name, dtype), threads=threads)
            tensors[name] = torch_arrays.from_arrays({name: array})[name].to(device)
    return {name: tensors[name] for name in names}


# ---- tensors and slices for `safe_open`, by torch's rules ----


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
        self._inner: dict[weight_file.WeightFile, Any] = {}  # mappings that never leave this object: the file's pages
        self._outer: dict[weight_file.WeightFile, Any] = {}  # mappings behind returned slices
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
            return load(entries_of([part], None), self._device)[name]
        array = read()
        raw = torch_arrays.raw_of([part]).get(name) if array.dtype is _BYTES else None  # possibly a packed dtype
        return self._moved(torch_arrays.from_array(array, name, raw))

    def tensors(
        self, parts: Iterable[FileTensor], target: dtypes.Dtype | None, read: Callable[[], dict[str, Array]]
    ) -> dict[str, Any]:
        self._check_device()
        if self._without_data:
            return torch_arrays.without_data(entries_of(parts, target))
        if self._device is not None:
            return load(entries_of(parts, target), self._device)
        return torch_arrays.from_arrays(read(), torch_arrays.raw_of(parts) if target is None else None)

    def item(self, file: weight_file.WeightFile, index: int, key: Any, select: Callable[[Any], Array]) -> Any:
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
            with suppress(IndexError):  # below, torch raises its own error
                part = np.asarray(whole[key])  # a single element is not an array
                return self._moved(torch_arrays.from_array(self._separate(file, index, part), name, raw))
        tensor = torch_arrays.from_array(whole, name, raw)
        selected = tensor[key]
        if selected.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            selected = selected.clone()
        return self._moved(selected)

    def arrivals(
        self, file: weight_file.WeightFile, rows: Mapping[str, range | None] | None, device: Any, threads: int
    ) -> tuple[list[str], Generator[Arrival]]:
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
        copies = Copies(place, True)

        def arrivals() -> Generator[Arrival]:  # another thread advances it
            with copies.allocating():
                yield from _arrivals(entries, copies, min(threads, memory.MOST_THREADS), None)

        return [entry.name for entry in entries], arrivals()

    def _moved(self, tensor: Any) -> Any:
        return tensor if self._device is None else tensor.to(self._device)

    def _whole(self, file: weight_file.WeightFile, index: int, shape: tuple[int, ...]) -> Array:
        """Return a tensor in memory that never leaves this object: a private mapping, or a copy."""
        begin, end = file.table.byte_range(index)
        if begin < end and not foreign_order(False):
            buffer = mapping(file, self._inner, "write")
            if buffer is not None:
                return array_over(buffer, dtypes.array_dtype(file.table.row(index).number), shape, begin)
        name = file.table.names[index]
        array: Array = load_tensors(Tensors([file], [name], [index]), backend="pread")[0][name]
        return array

    def _separate(self, file: weight_file.WeightFile, index: int, part: Array) -> Array:
        """Return a part of `_whole` in memory that no other array shares: a view if it is large."""
        inner = self._inner.get(file)
        if part.nbytes < VIEWED_FROM["mmap"] or inner is None or not part.flags.aligned:
            return np.array(part)
        caller = object()
        first = self._sliced.setdefault(index, caller) is caller  # atomic: only one of two threads is first
        buffer = mapping(file, self._outer if first else None, "write")
        if buffer is None:
            return np.array(part)
        offset = part.ctypes.data - native.address_of(np.frombuffer(inner, np.uint8))
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
    items = key if isinstance(key, tuple) else (key,)
    steps = [item.step for item in items if isinstance(item, slice) and item.step is not None]
    indices = [item for item in items if not isinstance(item, slice) and item is not None and item is not Ellipsis]
    return all((as_index(step) or 0) > 0 for step in steps) and None not in map(as_index, indices)
