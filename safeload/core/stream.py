"""Stream tensors of open files in bounded memory: the next tensors are read while the caller uses a tensor."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from threading import Lock, RLock
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, get_args

import numpy as np

from ..errors import RemoteError, exported, public
from . import dtypes
from .arrays import Array, array_over, check_disjoint, check_fits, check_out_names
from .load import deliver, parse_target, stored_in_parts
from .memory import POOLED_BELOW, aligned_bytes, check_threads, windows
from .names import grouped, layer_of
from .native import ffi, short
from .progress import Meter, Progress
from .tensors import Entry, FileTensor, Tensors, entries_of, in_file_order
from .text import parse_size, plural, show
from .thread_group import REMOTE_WORKERS, Prefetch, Stopped, Task, check_stopped
from .weight_file import WeightFile

# Arrays to fill: by name, or a function from a name to an array.
Out = Mapping[str, Array] | Callable[[str], Array] | None

# Order of the tensors.
Order = Literal["file", "given", "ready"]

# Bytes of tensors to read together: enough work for all threads, and little compared with usual limits.
_UNIT = 16 << 20
# A unit takes at most this part of the limit, so that the next units are read while its tensors are taken.
_SHARE = 4


# Names and arrays of tensors, and the error of the next tensor, if any. The error is popped from a list, because a
# variable in a frame of its traceback would keep arrays alive until a garbage collection.
_T = TypeVar("_T")  # of the tensors: arrays, or also quantized tensors
_Loaded: TypeAlias = tuple[deque[tuple[str, Any]], list[Exception]]


class _Stream(Iterator[_T]):
    """Base of `TensorStream` and `LayerStream`. Threads may share a stream: each item goes to a single thread."""

    _of = "tensor"

    def __init__(
        self,
        entries: Sequence[Entry],
        reader: _Reader,
        limit: int,
        *,
        ordered: bool,
        progress: Progress,
        layers: Mapping[str, int] | None = None,  # and the number of their tensors
    ) -> None:
        share = max(1, min(_UNIT, limit // _SHARE))
        self._memory = reader.memory
        weakref.finalize(self, reader.memory.close)
        workers = REMOTE_WORKERS if any(entry.file.remote for entry in entries) else 1
        room = limit - limit // _SHARE - share
        self._results: Prefetch[_Loaded] = Prefetch(
            reader.tasks(entries, share), room, workers=workers, ordered=ordered
        )
        self._ready: deque[tuple[str, Any]] = deque()
        self._failed: list[Exception] = []
        self._sizes = {entry.name: reader.nbytes(entry) for entry in entries}
        self._left: Any = self._sizes if layers is None else deque(layers.items())  # not taken yet
        self._count = len(self._left)
        self._lock = RLock()  # a progress report may call this object again
        self._meter = Meter(progress, sum(self._sizes.values()))

    @public
    def __next__(self) -> _T:
        self._results.check_process()  # before the lock, which another thread may have held during a fork
        with self._lock:
            try:
                item: _T = self._take()
                return item
            except BaseException:
                self.close()
                raise

    def _take(self) -> Any:
        while not self._ready:
            if self._failed:
                raise self._failed.pop()
            self._ready, self._failed = next(self._results)
            self._memory.used = self._results.pending
        name, value = self._ready.popleft()
        try:
            self._meter.add(self._sizes.pop(name))
        except StopIteration as error:  # it would end the stream
            raise RuntimeError("progress: the function raised StopIteration") from error
        return name, value

    def close(self) -> None:
        """Stop reading and wait for the threads. Arrays that were taken stay valid."""
        self._results.close()
        self._memory.close()
        if self._results.forked:
            return
        with self._lock:  # a thread that was waiting for a tensor has released it now
            self._ready.clear()
            self._failed = []
            self._left.clear()
            self._meter.close()

    def __length_hint__(self) -> int:
        return len(self._left)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._left)} of {plural(self._count, self._of)} left>"

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"cannot copy or pickle a {kind}; copy or pickle the checkpoint, and call stream() again")


@exported()
class TensorStream(_Stream[tuple[str, _T]]):
    """An iterator of tensor names and arrays that reads ahead; made by `Checkpoint.stream`.

    Reading stops with `close`, an error, the end of the program or the last reference to the stream. Threads may share
    a stream: each tensor goes to a single thread. After a fork, the child's copy of a stream raises RuntimeError.

    Example:
        >>> import safeload
        >>> stream = safeload.open("tiny-llama").stream(dtype="float32")
        >>> name, array = next(stream)
        >>> stream.close()
    """


@exported()
class LayerStream(_Stream[tuple[str, dict[str, _T]]]):
    """An iterator of layers, each with all of its tensors, that reads ahead; made by `Checkpoint.stream`.

    Reading stops as for `TensorStream`. Threads may share a stream: each layer goes to a single thread.

    Example:
        >>> import safeload
        >>> stream = safeload.open("tiny-llama").stream(by_layer=True)
        >>> layer, tensors = next(stream)
        >>> stream.close()
    """

    _of = "layer"

    def _take(self) -> tuple[str, dict[str, _T]]:
        if not self._left:
            raise StopIteration
        layer, count = self._left.popleft()
        return layer, dict([_Stream._take(self) for _ in range(count)])


class _Reader:
    """Reads tensors in units: into the arrays that ``out`` returns, or into new arrays."""

    def __init__(
        self, target: dtypes.Dtype | None, out: Callable[[str], Any] | None, threads: int | None, limit: int
    ) -> None:
        self.memory = Recycler(limit)
        self._target = target  # for floating and packed tensors; None to convert nothing
        self._out = out
        self._threads = threads
        self._failed: list[int] = []  # numbers of failed units; later units are not read

    def _repeats(self, entry: Entry) -> bool:
        """Return True if elements share bytes of the array, too: an array of all might be larger than any memory."""
        return entry.repeated and self._out is None

    def nbytes(self, entry: Entry) -> int:
        """Return the bytes of the arrays of a tensor."""
        return entry.end - entry.begin if self._repeats(entry) else entry.nbytes

    def _cost(self, entry: Entry) -> int:
        """Return the memory for reading a tensor, including the byte range of a strided tensor."""
        copied = entry.strided and not self._repeats(entry)
        return self.nbytes(entry) + (entry.end - entry.begin if copied else 0)

    def tasks(self, entries: Sequence[Entry], share: int) -> Iterator[Task]:
        """Yield the tasks that read the tensors of a unit, up to the first error."""
        # Repeated elements alone, or `deliver` would let tensors share their memory.
        units = windows(entries, share, self._cost, lambda entry: object() if self._repeats(entry) else None)
        for number, unit in enumerate(units):
            destinations: dict[str, Array] = {}
            refused: list[Exception] = []
            ask = None if self._out is None else partial(self._ask, unit, destinations, refused)
            yield Task(sum(map(self._cost, unit)), partial(self._run, number, unit, destinations, refused), ask)

    def _ask(self, entries: Sequence[Entry], destinations: dict[str, Array], refused: list[Exception]) -> None:
        """Get the caller's arrays to fill, up to an error."""
        assert self._out is not None
        try:
            for entry in entries:
                try:
                    array = self._out(entry.name)
                except StopIteration as error:  # of a `next` in the function: it would end the stream
                    text = f"out: the function raised StopIteration for tensor {show(entry.name)}"
                    raise RuntimeError(text) from error
                check_fits(entry.name, entry.dtype, entry.shape, {entry.name: array})
                destinations[entry.name] = array
        except Exception as error:
            refused.append(error)

    def _run(
        self, number: int, entries: Sequence[Entry], destinations: Mapping[str, Array], refused: list[Exception]
    ) -> _Loaded:
        if any(other < number for other in self._failed):
            raise Stopped
        loaded, failed = self._read(entries if self._out is None else entries[: len(destinations)], destinations)
        failed = failed or refused
        if failed:
            self._failed.append(number)
        return loaded, failed

    def _read(self, entries: Sequence[Entry], destinations: Mapping[str, Array]) -> _Loaded:
        if not entries:
            return deque(), []
        try:
            arrays, _ = deliver(
                Tensors.of(entry.tensor for entry in entries),
                target=self._target,
                out=destinations or None,
                memory=None if self._repeats(entries[0]) else self.memory.array,
                threads=self._threads,
                progress=check_stopped,
            )
        except RemoteError as error:  # names the tensor, and was retried
            at = next((k for k, entry in enumerate(entries) if entry.name == error.tensor), 0)
            loaded, failed = self._read(entries[:at], destinations)
            return loaded, failed or [error]
        except Exception as error:
            if len(entries) < 2:
                return deque(), [error]
        else:
            return deque((entry.name, arrays[entry.name]) for entry in entries), []
        half = len(entries) // 2  # again in halves, to find the tensor that cannot be read
        loaded, failed = self._read(entries[:half], destinations)
        if not failed:
            rest, failed = self._read(entries[half:], destinations)
            loaded += rest
        return loaded, failed


def stream(
    tensors: Iterable[FileTensor],
    files: Sequence[WeightFile],
    *,
    by_layer: bool,
    dtype: Any,
    ahead: int | str,
    order: Order,
    out: Out,
    threads: int | None,
    progress: Progress,
) -> TensorStream[Any] | LayerStream[Any]:
    """Read tensors one after another; see `Checkpoint.stream`."""
    if order not in get_args(Order):
        raise ValueError(f'order must be "file", "given" or "ready", got {show(order)}')
    if by_layer and order == "ready":
        raise ValueError('order="ready" yields single tensors: with by_layer=True, order must be "file" or "given"')
    target, limit = parse_target(dtype), parse_size(ahead, "ahead")
    check_threads(threads)
    entries = entries_of(tensors, target)
    for entry in entries if out is not None else ():
        if entry.target is None and entry.packed is not None:
            raise stored_in_parts(entry.name, entry.packed)
    if order != "given":
        entries = in_file_order(entries, files)
    if out is not None and not callable(out):
        check_out_names(out, (entry.name for entry in entries), "stream")
        for entry in entries:
            check_fits(entry.name, entry.dtype, entry.shape, out)
        whole = [entry for entry in entries if not entry.strided]
        check_disjoint(out, lambda: {entry.name: entry._replace(name="", at=0) for entry in whole})
    give = out if out is None or callable(out) else out.__getitem__
    reader = _Reader(target, give, threads, limit)
    if not by_layer:
        return TensorStream(entries, reader, limit, ordered=order != "ready", progress=progress)
    layers = grouped(entries, lambda entry: layer_of(entry.name))
    entries, sizes = [*chain.from_iterable(layers.values())], dict(zip(layers, map(len, layers.values()), strict=True))
    return LayerStream(entries, reader, limit, ordered=True, progress=progress, layers=sizes)


# ---- the memory of dropped arrays ----


# Memory is not reused if more than this part of it would be wasted.
_WASTE = 4


class Recycler:
    """Allocate arrays, and reuse the memory of dropped arrays until `close`, on any thread."""

    def __init__(self, limit: int) -> None:
        self.used = 0  # bytes of arrays that count towards the limit
        self._limit = limit
        self._kept: list[tuple[int, int]] = []  # size and address, oldest first
        self._returned: deque[tuple[int, int]] = deque()  # of dropped arrays
        self._closed = False
        self._lock = Lock()  # protects `_kept`
        self._free = short.sl_memory_free  # at exit, globals may disappear before the last array

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a page-aligned array with undefined values. Small arrays bypass the pool, aligned to a cache line."""
        size = dtype.itemsize * math.prod(shape)
        if size < POOLED_BELOW:
            return array_over(aligned_bytes(size), dtype, shape, 0)
        capacity, address = self._take(size)
        memory = ffi.gc(ffi.cast("void *", address), partial(self._give_back, capacity, address))
        return array_over(ffi.buffer(memory, size), dtype, shape, 0)

    def _take(self, size: int) -> tuple[int, int]:
        """Return the capacity and address of memory for ``size`` bytes."""
        with self._lock:
            fitting = (block for block in self._kept if size <= block[0] <= size + size // _WASTE)
            best = min(fitting, default=None)
            if best is not None:
                self._kept.remove(best)
        self._settle(True)
        if best is not None:
            return best
        address = short.sl_memory_alloc(size)
        if not address:
            raise MemoryError(f"cannot allocate {size} bytes")
        return size, address

    def _give_back(self, size: int, address: int, memory: object) -> None:
        self._returned.append((size, address))
        self._settle()

    def _settle(self, trim: bool = False) -> None:
        """Keep returned memory, and free the oldest memory above the limit.

        This never waits. An array may be dropped anywhere: by garbage collection in the middle of this method, or in a
        child whose parent forked while another thread was here. The holder of the lock checks again.
        """
        while (trim or self._returned) and self._lock.acquire(blocking=False):
            trim = False
            try:
                while self._returned:
                    self._kept.append(self._returned.popleft())
                room = 0 if self._closed else max(0, self._limit - self.used)
                excess = sum(size for size, _ in self._kept) - room
                while excess > 0:
                    size, address = self._kept.pop(0)
                    self._free(address, size)
                    excess -= size
            finally:
                self._lock.release()

    def close(self) -> None:
        """Free the kept memory. Arrays stay valid and own their memory from now on."""
        self._closed = True
        self._settle(True)
