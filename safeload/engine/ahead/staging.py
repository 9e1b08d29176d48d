"""Fill a ring of staging buffers with chunks of tensors, for example to copy tensors to a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.arrays import Array, foreign_order
from ...base.packing import Packed, Packing
from ...stores.thread_group import REMOTE_WORKERS, Prefetch, Task, check_stopped
from ..codes.restore import (
    Range,
    by_columns,
    flat_ranges,
    restore_jobs,
    row_unit,
    rows_apart,
    rows_range,
    values_before,
)
from ..read.load import deliver
from ..read.tensors import Entry, Tensors
from ..run.job import Job, moving
from ..run.jobs import Batch
from ..run.memory import ALIGNMENT, address_of, aligned_bytes, private_array

# Bytes of a buffer, and number of buffers. A buffer has work for all threads, and takes long enough to copy to a device
# to hide the start of a copy. More buffers are no faster, and pinning memory is slow.
BUFFER, BUFFERS = 16 << 20, 4
SMALLEST_BUFFER = 64 << 10
# A chunk takes at most this part of a buffer, which limits the unused end of a buffer.
_PER_BUFFER = 4
# Writers read up to this many bytes on request: reading ahead on a thread would take longer.
IN_TURN = 4 << 20


# ---- chunks ----


class Chunk(NamedTuple):
    """Consecutive bytes of a tensor's array, made by separate jobs: a large tensor needs the memory of a chunk."""

    name: str  # of the tensor
    begin: int  # first byte in the array
    nbytes: int
    jobs: Callable[[int], Iterable[Job]]  # the jobs that make the chunk at an address


def chunks_of(entry: Entry, limit: int) -> Iterator[Chunk] | None:
    """Divide a tensor that is not empty into chunks of at most ``limit`` bytes; None if it is indivisible."""
    if entry.target is None or entry.strided or (foreign_order(False) and entry.dtype.itemsize > 1):
        return None
    if entry.packed is not None:
        ranges = _ranges(entry.packed.packing, limit // entry.dtype.itemsize)
        return None if ranges is None else (_restored(entry, entry.packed, span) for span in ranges)
    row = dtypes.BY_NUMBER[entry.source]
    if entry.source == entry.target:
        block_bytes = array_bytes = entry.dtype.itemsize
    else:
        block_bytes, array_bytes = row.block_bytes, row.block * entry.dtype.itemsize
    return _plain_chunks(entry, block_bytes, array_bytes, limit // array_bytes) if limit >= array_bytes else None


def _plain_chunks(entry: Entry, block_bytes: int, array_bytes: int, step: int) -> Iterator[Chunk]:
    """Yield chunks of ``step`` blocks with ``block_bytes`` each in the file and ``array_bytes`` in the array."""
    count = (entry.end - entry.begin) // block_bytes
    assert entry.target is not None
    how = entry.source, entry.target, moving(entry.source, entry.target)

    def jobs(begin: int, size: int, memory: int) -> tuple[Job]:
        return (Job(entry.file, begin, memory, size, *how),)

    for first in range(0, count, step):
        blocks = min(step, count - first)
        work = partial(jobs, entry.begin + first * block_bytes, blocks * block_bytes)
        yield Chunk(entry.name, first * array_bytes, blocks * array_bytes, work)


def _ranges(packing: Packing, limit: int) -> Iterable[Range] | None:
    """Divide codes into ranges of at most ``limit`` values: matrices, or rows that can be dequantized separately."""
    rows, across = packing.rows, packing.columns
    if not rows * across:
        return None
    if packing.flat:
        ranges = list(flat_ranges(packing, limit))
        return ranges if ranges[0].columns <= limit else None
    step = limit // (rows * across)
    if step:
        count = packing.matrices
        return (Range(first, min(step, count - first), 0, rows, 0, across) for first in range(0, count, step))
    if by_columns(packing):
        rows, across = across, rows
    block = row_unit(packing)
    step = limit // across // block * block
    if not step or not rows_apart(packing):
        return None
    places = product(range(packing.matrices), range(0, rows, step))
    return (rows_range(packing, first, at, min(at + step, rows)) for first, at in places)


def _restored(entry: Entry, packed: Packed, span: Range) -> Chunk:
    packing, element = packed.packing, entry.dtype.itemsize
    begin = values_before(packing, span) * element
    assert entry.target is not None
    target = entry.target

    def jobs(memory: int) -> Iterable[Job]:  # a range is written to its place in the whole array
        return restore_jobs(packed, memory - begin, target, entry.name, ranges=(span,))

    return Chunk(entry.name, begin, span.values * element, jobs)


# ---- buffers ----


class Piece(NamedTuple):
    """Bytes of a tensor's array in a staging buffer."""

    name: str  # of the tensor
    begin: int  # first byte in the array
    nbytes: int
    at: int  # first byte in the buffer, a multiple of 64


class Filled(NamedTuple):
    """A filled staging buffer, or an indivisible tensor."""

    buffer: int | None  # number of the buffer; None for an indivisible tensor
    pieces: Sequence[Piece]  # of the buffer; the indivisible tensor is a single piece
    array: Array  # the buffer, or the indivisible tensor


def buffer_size(total: int, count: int | None = None, *, larger: int = 1) -> int:
    """Return the size of each of ``count`` buffers, by default `BUFFERS`, for tensors of ``total`` bytes."""
    return max(SMALLEST_BUFFER, min(BUFFER * larger, -(-total // (count or BUFFERS))))


class Ring:
    """Buffers of equal size, each made by the thread that fills it first: pinning memory takes as long as reading it.

    ``wait`` returns once the buffer of this number is free.
    """

    def __init__(
        self,
        size: int,
        count: int,
        make: Callable[[int], Array] | None = None,
        wait: Callable[[int], object] | None = None,
    ) -> None:
        self.size = size
        self.count = count
        self._make = make
        self._wait = wait
        self._arrays: dict[int, Array] = {}
        self._new = deque(range(count))  # numbers of buffers to make
        self._used = deque[int]()  # numbers of free buffers, the one that has been free for longest first

    def take(self) -> tuple[int, Array]:
        """Return number and memory of a free buffer, if possible one that was used before."""
        try:
            number = self._used.popleft()
        except IndexError:
            number = self._new.popleft()
            self._arrays[number] = aligned_bytes(self.size) if self._make is None else self._make(number)
        else:
            if self._wait is not None:
                self._wait(number)
        return number, self._arrays[number]

    def free(self, number: int) -> None:
        """Allow a buffer to be filled again."""
        self._used.append(number)


def ring_for(total: int) -> Ring:
    """Return the buffers for tensors of ``total`` bytes; a single one if they are few."""
    return Ring(max(SMALLEST_BUFFER, total), 1) if total <= IN_TURN else Ring(buffer_size(total), BUFFERS)


def filled_ahead(
    tasks: Iterator[Task], ring: Ring, *, workers: int = 1, remote: bool = False, ordered: bool = True
) -> Generator[Filled]:
    """Fill buffers while the caller uses earlier buffers; a single buffer is filled on request.

    A buffer belongs to the caller until the next step.
    """
    filling: Any
    if ring.count == 1:
        filling = (task.run() for task in tasks)
    else:
        workers = max(workers, REMOTE_WORKERS) if remote else workers
        filling = Prefetch(tasks, (ring.count - 1) * ring.size, workers=workers, ordered=ordered)
    with closing(filling):
        for filled in filling:
            yield filled
            if filled.buffer is not None:
                ring.free(filled.buffer)


def staged(
    entries: Sequence[Entry],
    ring: Ring,
    threads: int | None,
    *,
    workers: int = 1,
    sharing: int | None = None,
    ordered: bool = True,
) -> Generator[Filled]:
    """Read tensors into buffers, see `filled_ahead`. More ``sharing`` threads wait longer for each other at its end."""
    tasks = _tasks(entries, ring, threads, threads if sharing is None else sharing)
    remote = any(entry.file.remote for entry in entries)
    return filled_ahead(tasks, ring, workers=workers, remote=remote, ordered=ordered)


def _tasks(entries: Iterable[Entry], ring: Ring, threads: int | None, sharing: int | None) -> Iterator[Task]:
    """Yield the tasks that fill buffers, and that make indivisible tensors."""
    chunks: list[tuple[Chunk, int]] = []
    end = 0

    def fill() -> Task:
        nonlocal chunks, end
        work = partial(_fill, ring, chunks, sharing)
        chunks, end = [], 0
        return Task(ring.size, work)

    for entry in entries:
        if not entry.nbytes:
            continue
        parts = chunks_of(entry, ring.size // _PER_BUFFER)
        if parts is None:
            if chunks:  # results come in the order of the tensors
                yield fill()
            yield Task(entry.nbytes, partial(_make, entry, threads))
            continue
        for chunk in parts:
            at = -(-end // ALIGNMENT) * ALIGNMENT
            if at + chunk.nbytes > ring.size:
                yield fill()
                at = 0
            chunks.append((chunk, at))
            end = at + chunk.nbytes
    if chunks:
        yield fill()


def _fill(ring: Ring, chunks: Sequence[tuple[Chunk, int]], threads: int | None) -> Filled:
    number, buffer = ring.take()
    base = address_of(buffer)
    batch = Batch(job for chunk, at in chunks for job in chunk.jobs(base + at))
    batch.run(threads=threads, progress=check_stopped)
    return Filled(number, _joined(chunks), buffer)


def _joined(chunks: Iterable[tuple[Chunk, int]]) -> list[Piece]:
    """Return the chunks in a buffer as pieces, joining neighbours of a tensor."""
    pieces: list[Piece] = []
    for chunk, at in chunks:
        name, begin, size = chunk.name, chunk.begin, 0
        if pieces:
            last = pieces[-1]
            if (last.name, last.begin + last.nbytes, last.at + last.nbytes) == (name, begin, at):
                _, begin, size, at = pieces.pop()
        pieces.append(Piece(name, begin, size + chunk.nbytes, at))
    return pieces


def _make(entry: Entry, threads: int | None) -> Filled:
    """Read an indivisible tensor into a C-contiguous array."""
    assert entry.target is not None
    array = private_array(entry.shape, entry.dtype)
    deliver(
        Tensors.of([entry.tensor]),
        target=None if entry.source == entry.target and entry.packed is None else dtypes.BY_NUMBER[entry.target],
        out={entry.name: array},
        threads=threads,
        progress=check_stopped,
    )
    return Filled(None, [Piece(entry.name, 0, array.nbytes, 0)], array)


def staged_bytes(entries: Sequence[Entry], threads: int | None) -> Generator[tuple[int, int, bool]]:
    """Read tensors ahead for a writer, unless there are few bytes: yield addresses and sizes in the order of the bytes.

    True if all ranges so far must be used before the next step.
    """
    for filled in staged(entries, ring_for(sum(entry.nbytes for entry in entries)), threads):
        base = address_of(filled.array)
        for piece in filled.pieces:
            yield base + piece.at, piece.nbytes, piece is filled.pieces[-1]
