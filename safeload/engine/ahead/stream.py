"""Streams tensors of open files: one after the other, while the next ones are read, in bounded memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import RLock
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, get_args

from ...base import dtypes
from ...base.arrays import Array
from ...base.text import parse_size, plural, show
from ...errors import RemoteError
from ...stores.stop import Stopped
from ...stores.thread_group import REMOTE_WORKERS, Check, Prefetch, Task
from ..codes.pieces import Meter
from ..read.buffer_pool import Recycler
from ..read.delivery import check_fits, deliver, stored_in_parts
from ..read.load import check_out_names, parse_target
from ..read.plan import Entry, entries_of, in_file_order
from ..read.tensors import FileTensor, Tensors
from ..run.progress import Progress
from ..run.threads import check_threads
from ..run.weight_file import WeightFile

# Arrays to fill: by name, or a function that gives the one for a name.
Out = Mapping[str, Array] | Callable[[str], Array] | None

# Which tensor comes next.
Order = Literal["file", "given", "ready"]

# Bytes of tensors that are read together: enough for all threads to have work, and little compared with any limit.
_UNIT = 16 << 20
# A unit takes at most this part of the limit, so that others are read while its tensors are taken.
_SHARE = 4


# Names and arrays of tensors, and the error of the tensor after them, if any: in a list, from which it is popped. A
# variable that still had it would be in a frame of its traceback, and the arrays there would live until a collection.
_Found: TypeAlias = tuple[deque[tuple[str, Any]], list[Exception]]


class TensorStream(Iterator[tuple[str, Any]]):
    """Names and arrays of tensors, in turn, while the next ones are read; made by `Checkpoint.stream`.

    `close` stops reading, and so do an error, the end of the program and the last reference to the stream. Threads may
    share it: each tensor goes to one of them. It belongs to the process that made it: after a fork, the child's copy
    raises RuntimeError.

    Example:
        >>> import safeload
        >>> stream = safeload.open("tiny-llama").stream(dtype="float32")
        >>> name, array = next(stream)
        >>> stream.close()
    """

    def __init__(self, entries: Sequence[Entry], reader: _Reader, limit: int, progress: Progress) -> None:
        share = max(1, min(_UNIT, limit // _SHARE))
        self._memory = memory = Recycler(limit)
        weakref.finalize(self, memory.close)
        units = (_Unit(k, part, reader, memory) for k, part in enumerate(_units(entries, reader, share)))
        tasks = (Task(unit.nbytes, unit.run, unit.start if reader.out is not None else None) for unit in units)
        workers = REMOTE_WORKERS if any(entry.file.remote for entry in entries) else 1
        room = limit - limit // _SHARE - share
        self._ahead: Prefetch[_Found] = Prefetch(tasks, room, workers=workers, ordered=reader.ordered)
        self._ready: deque[tuple[str, Any]] = deque()
        self._failed: list[Exception] = []
        self._left = {entry.name: reader.nbytes(entry) for entry in entries}
        self._count = len(entries)
        self._lock = RLock()  # what a progress report does may come back to this object
        self._meter = Meter(progress, sum(self._left.values()))

    def __next__(self) -> tuple[str, Any]:
        self._ahead.check_process()  # before the lock, which another thread may have had when this process was forked
        with self._lock:
            try:
                while not self._ready:
                    if self._failed:
                        raise self._failed.pop()
                    self._ready, self._failed = next(self._ahead)
                    self._memory.used = self._ahead.pending
                name, value = self._ready.popleft()
                try:
                    self._meter.add(self._left.pop(name))
                except StopIteration as error:  # it would end the stream as if it were complete
                    raise RuntimeError("progress: the function raised StopIteration") from error
            except BaseException:
                self.close()
                raise
            return name, value

    def __length_hint__(self) -> int:
        return len(self._left)

    def __repr__(self) -> str:
        return f"<TensorStream: {len(self._left)} of {plural(self._count, 'tensor')} left>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TensorStream is neither copied nor pickled; a checkpoint is, and makes new ones")

    def close(self) -> None:
        """Stops reading and waits until it has stopped. Arrays that were taken stay valid."""
        self._ahead.close()
        self._memory.close()
        if self._ahead.forked:
            return
        with self._lock:  # of a thread that takes a tensor, whose wait is over now
            self._ready.clear()
            self._failed = []
            self._left.clear()
            self._meter.close()


class _Reader(NamedTuple):
    """How tensors are read.

    Attributes:
        target: dtype that floating tensors are converted to and packed ones dequantized to; None to convert nothing.
        out: gives the arrays to fill; None for new ones.
        threads: None: chosen automatically.
        failed: filled with the numbers of units that have failed, after which nothing is read.
        ordered: whether the order of the tensors is that of the results.
    """

    target: dtypes.Dtype | None
    out: Callable[[str], Any] | None
    threads: int | None
    failed: list[int]
    ordered: bool = True

    def makes(self, entry: Entry) -> bool:
        """Whether it reads a tensor into one array of its own.

        Not so packed codes that stay as they are stored, which are several arrays, nor repeated elements, which have no
        bytes of their own: an array of them all might be larger than any memory.
        """
        return entry.target is not None and not (entry.repeated and self.out is None)

    def nbytes(self, entry: Entry) -> int:
        """Bytes of what it reads a tensor into."""
        return entry.end - entry.begin if entry.repeated and self.out is None else entry.nbytes

    def cost(self, entry: Entry) -> int:
        """Bytes of memory that reading a tensor takes: also of the range of the file that a strided one lies in."""
        return self.nbytes(entry) + (entry.end - entry.begin if entry.strided and self.makes(entry) else 0)

    def read(
        self, entries: Sequence[Entry], given: Mapping[str, Array], memory: Recycler, check: Check
    ) -> dict[str, Any]:
        """Reads tensors into the arrays given or new ones."""
        if not entries:
            return {}
        made = self.makes(entries[0])
        arrays, _ = deliver(
            Tensors.of(entry.tensor for entry in entries),
            target=self.target,
            out=given if made and self.out is not None else None,
            memory=memory if made else None,
            threads=self.threads,
            progress=lambda done, total: check(),
        )
        return arrays


class _Unit:
    """Tensors that are read together.

    Args:
        number: of the unit.
        entries: the tensors.
        reader: how they are read.
        memory: for new arrays.
    """

    def __init__(self, number: int, entries: Sequence[Entry], reader: _Reader, memory: Recycler) -> None:
        self._number = number
        self._memory = memory
        self.nbytes = sum(map(reader.cost, entries))
        self._entries = entries
        self._reader = reader
        self._given: dict[str, Array] = {}
        self._failed: list[Exception] = []

    def start(self) -> None:
        """Asks the caller for the arrays to fill, up to an error."""
        for k, entry in enumerate(self._entries):
            self._ask(entry)
            if self._failed:
                self._entries = self._entries[:k]
                return

    def _ask(self, entry: Entry) -> None:
        assert self._reader.out is not None
        try:
            try:
                self._given[entry.name] = self._reader.out(entry.name)
            except StopIteration as error:  # of a `next` there: it would end the stream as if it were complete
                raise RuntimeError(f"out: the function raised StopIteration for tensor {show(entry.name)}") from error
            check_fits(entry.name, entry.dtype, entry.shape, self._given)
        except Exception as error:
            self._failed.append(error)

    def run(self, check: Check) -> _Found:
        """The tensors with their arrays, up to the first that cannot be read, and its error."""
        if any(number < self._number for number in self._reader.failed):
            raise Stopped
        found, failed = self._read(self._entries, check)
        failed = failed or self._failed
        if failed:
            self._reader.failed.append(self._number)
        return found, failed

    def _read(self, entries: Sequence[Entry], check: Check) -> _Found:
        try:
            arrays = self._reader.read(entries, self._given, self._memory, check)
        except RemoteError as error:  # it was tried often enough, and names the tensor
            at = next((k for k, entry in enumerate(entries) if entry.name == error.tensor), 0)
            found, failed = self._read(entries[:at], check) if at else (deque(), [])
            return found, failed or [error]
        except Exception as error:
            if len(entries) < 2:
                return deque(), [error]
        else:
            return deque((entry.name, arrays[entry.name]) for entry in entries), []
        half = len(entries) // 2  # once more, in halves, to find out which cannot be read
        found, failed = self._read(entries[:half], check)
        if not failed:
            more, failed = self._read(entries[half:], check)
            found += more
        return found, failed


def _units(entries: Sequence[Entry], reader: _Reader, share: int) -> Iterator[list[Entry]]:
    """Divides tensors into those that are read together."""
    unit: list[Entry] = []
    size = 0
    for entry in entries:
        cost, made = reader.cost(entry), reader.makes(entry)
        alone = entry.repeated and not made  # or `deliver` would let tensors of one storage share memory
        if unit and (alone or size + cost > share or made != reader.makes(unit[0])):
            yield unit
            unit, size = [], 0
        unit.append(entry)
        size += cost
    if unit:
        yield unit


def stream(
    tensors: Sequence[FileTensor],
    files: Sequence[WeightFile],
    *,
    dtype: Any,
    ahead: int | str,
    order: Order,
    out: Out,
    threads: int | None,
    progress: Progress,
) -> TensorStream:
    """Reads tensors one after the other; `Checkpoint.stream` describes it.

    Args:
        files: all files, in order.
        dtype: dtype that floating tensors are converted to and packed ones dequantized to; None to convert nothing.
        ahead: most bytes that are read and not taken.
        order: "given" for that of ``tensors``; else that of the bytes.
        out: arrays to fill; None for new ones.
        threads: None: chosen automatically.
        progress: reports in the consumer's thread.
    """
    if order not in get_args(Order):
        raise ValueError(f'order must be "file", "given" or "ready", not {show(order)}')
    target, limit = parse_target(dtype), parse_size(ahead, "ahead")
    check_threads(threads)
    entries = entries_of(tensors, target)
    for entry in entries if out is not None else ():
        if entry.target is None and entry.packed is not None:
            raise stored_in_parts(entry.name, entry.packed)
    if order != "given":
        entries = in_file_order(entries, files)
    if out is not None and not callable(out):
        _check_out(out, entries)
    give = out if out is None or callable(out) else out.__getitem__
    return TensorStream(entries, _Reader(target, give, threads, [], order != "ready"), limit, progress)


def _check_out(out: Mapping[str, Array], entries: Sequence[Entry]) -> None:
    """Refuses arrays of ``out`` that are missing, do not fit, or are of no tensor that is read."""
    check_out_names(out, (entry.name for entry in entries), "stream")
    for entry in entries:
        check_fits(entry.name, entry.dtype, entry.shape, out)
