"""Fills a ring of staging buffers with tensors, for what copies them on, such as to the memory of a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.arrays import Array
from ...stores.thread_group import REMOTE_WORKERS, Check, Prefetch, Task
from ..read.delivery import deliver
from ..read.plan import Entry
from ..read.tensors import Tensors
from ..run.jobs import Batch
from ..run.memory import ALIGNMENT, address_of, aligned_bytes, private_array
from .chunks import Chunk, chunks_of

# Bytes of a buffer, and the number of buffers: more makes nothing faster. A buffer has work for all threads; to copy it
# to a device takes 0.6 ms over PCIe 4 x16, which hides what starting a copy costs. To pin memory takes 0.5 s per GB.
BUFFER, BUFFERS = 16 << 20, 4
SMALLEST_BUFFER = 64 << 10
# A chunk takes at most this part of a buffer: what does not fit at its end is less than that.
_PER_BUFFER = 4
# Up to this size all tensors of a writer are read when it asks for them: reading them ahead, on a thread, takes longer.
IN_TURN = 4 << 20


class Piece(NamedTuple):
    """Bytes of a tensor's array in a staging buffer.

    Attributes:
        name: of the tensor.
        begin: the first byte in the array.
        nbytes: their number.
        at: where they are in the buffer, a multiple of 64.
    """

    name: str
    begin: int
    nbytes: int
    at: int


class Filled(NamedTuple):
    """A staging buffer that has been filled, or a tensor that cannot be divided.

    Attributes:
        buffer: its number; None for a tensor on its own.
        pieces: what is in it.
        name: of the tensor on its own, "" for a buffer.
        array: that tensor, else None.
    """

    buffer: int | None
    pieces: Sequence[Piece]
    name: str = ""
    array: Any = None


def buffer_size(total: int) -> int:
    """Bytes of each of `BUFFERS` buffers for tensors of ``total`` bytes."""
    return max(SMALLEST_BUFFER, min(BUFFER, -(-total // BUFFERS)))


def staged(
    entries: Iterable[Entry],
    buffers: Sequence[Array],
    wait: Callable[[int], object],
    threads: int | None,
) -> Prefetch[Filled]:
    """Fills buffers one after the other, round and round, in the order of the tensors, while the caller uses others.

    Args:
        entries: the tensors, none of which stays in parts; empty ones are left out.
        buffers: bytes, aligned to 64, all of one size; at least two.
        wait: called with the number of a buffer before it is filled again, in another thread: it returns when nothing
            is copied from it any longer.
        threads: None: chosen automatically.

    Returns:
        Iterator of what is filled. A buffer belongs to the caller until the next step.
    """
    size = buffers[0].size
    listed = list(entries)
    workers = REMOTE_WORKERS if any(entry.file.remote for entry in listed) else 1
    return Prefetch(_tasks(listed, buffers, wait, threads), (len(buffers) - 1) * size, workers=workers)


def _tasks(
    entries: Iterable[Entry],
    buffers: Sequence[Array],
    wait: Callable[[int], object],
    threads: int | None,
) -> Iterator[Task]:
    size = buffers[0].size
    numbers = cycle(range(len(buffers)))
    batch: list[tuple[Chunk, int]] = []
    end = 0

    def fill() -> Task:
        nonlocal batch, end
        number = next(numbers)
        task = Task(size, partial(_fill, number, buffers[number], batch, wait, threads))
        batch, end = [], 0
        return task

    for entry in entries:
        if not entry.nbytes:
            continue
        chunks = chunks_of(entry, size // _PER_BUFFER)
        if chunks is None:
            if batch:  # the order of the tensors is that of the results
                yield fill()
            yield Task(entry.nbytes, partial(_make, entry, threads))
            continue
        for chunk in chunks:
            at = -(-end // ALIGNMENT) * ALIGNMENT
            if at + chunk.nbytes > size:
                yield fill()
                at = 0
            batch.append((chunk, at))
            end = at + chunk.nbytes
    if batch:
        yield fill()


def _fill(
    number: int,
    buffer: Array,
    batch: Sequence[tuple[Chunk, int]],
    wait: Callable[[int], object],
    threads: int | None,
    check: Check,
) -> Filled:
    wait(number)
    base = address_of(buffer)
    work = Batch(job for chunk, at in batch for job in chunk.jobs(base + at))
    work.run(threads=threads, progress=lambda done, total: check())
    return Filled(number, _joined(batch))


def _joined(batch: Iterable[tuple[Chunk, int]]) -> list[Piece]:
    """The chunks in a buffer as pieces; neighbours of one tensor make one piece."""
    pieces: list[Piece] = []
    for chunk, at in batch:
        name, begin, size = chunk.entry.name, chunk.begin, 0
        if pieces:
            last = pieces[-1]
            if (last.name, last.begin + last.nbytes, last.at + last.nbytes) == (name, begin, at):
                _, begin, size, at = pieces.pop()
        pieces.append(Piece(name, begin, size + chunk.nbytes, at))
    return pieces


def _make(entry: Entry, threads: int | None, check: Check) -> Filled:
    """A tensor that cannot be divided, C-contiguous."""
    assert entry.target is not None
    out = {entry.name: private_array(entry.shape, entry.dtype)}
    deliver(
        Tensors.of([entry.tensor]),
        target=None if entry.source == entry.target and entry.packed is None else dtypes.BY_NUMBER[entry.target],
        out=out,
        threads=threads,
        progress=lambda done, total: check(),
    )
    return Filled(None, (), entry.name, out[entry.name])


def nothing(*_: object) -> None:
    """Where there is nothing to wait for or to check."""


class StagedBytes:
    """The bytes of tensors for what writes them; they are read ahead unless they are few.

    Args:
        entries: the tensors, in the order in which they are asked for.
        threads: None: chosen automatically.
    """

    def __init__(self, entries: Sequence[Entry], threads: int | None) -> None:
        total = sum(entry.nbytes for entry in entries)
        self._filled: Generator[Filled] | Prefetch[Filled]
        if total <= IN_TURN:
            self._buffers = [aligned_bytes(max(SMALLEST_BUFFER, total))]
            self._filled = (task.run(nothing) for task in _tasks(entries, self._buffers, nothing, threads))
        else:
            self._buffers = [aligned_bytes(buffer_size(total)) for _ in range(BUFFERS)]
            self._filled = staged(entries, self._buffers, nothing, threads)
        self._waiting: deque[tuple[int, int]] = deque()
        self._array: Any = None

    def of_next(self, nbytes: int) -> Iterator[tuple[int, int, bool]]:
        """The bytes of the next tensor, in order.

        Yields:
            Address and size of a range, and whether all yielded so far must be used before the next step.
        """
        while nbytes:
            if not self._waiting:
                self._take()
            address, size = self._waiting.popleft()
            nbytes -= size
            yield address, size, not self._waiting

    def _take(self) -> None:
        filled = next(self._filled)
        self._array = filled.array
        if filled.buffer is None:
            self._waiting.append((address_of(self._array), self._array.nbytes))
        else:
            base = address_of(self._buffers[filled.buffer])
            self._waiting.extend((base + piece.at, piece.nbytes) for piece in filled.pieces)

    def close(self) -> None:
        """Stops reading, and waits until it has stopped."""
        self._filled.close()
