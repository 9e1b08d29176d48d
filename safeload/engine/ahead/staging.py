"""Fill a ring of staging buffers with chunks of tensors, for example to copy tensors to a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.arrays import Array, foreign_order
from ...base.packing import Packed, Packing, by_columns, row_unit
from ...stores.thread_group import REMOTE_WORKERS, Check, Prefetch, Task
from ..codes.code_ranges import Range, flat_ranges, rows_apart, rows_range, values_before
from ..codes.restore import restore_jobs
from ..read.delivery import deliver
from ..read.plan import Entry
from ..read.tensors import Tensors
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

    entry: Entry  # the tensor
    begin: int  # first byte in the array
    nbytes: int
    source: tuple[int, int] | Range  # first byte and size in the file, or a range of codes

    def jobs(self, memory: int) -> Iterable[Job]:
        """Return the jobs that make the chunk at an address."""
        entry = self.entry
        assert entry.target is not None
        if isinstance(self.source, Range):
            assert entry.packed is not None
            # A range is written to its place in the whole array.
            return restore_jobs(entry.packed, memory - self.begin, entry.target, entry.name, ranges=(self.source,))
        begin, size = self.source
        op = moving(entry.source, entry.target)
        return (Job(entry.file, begin, memory, size, entry.source, entry.target, op),)


def chunks_of(entry: Entry, limit: int) -> Iterator[Chunk] | None:
    """Divide a tensor that is not empty into chunks of at most ``limit`` bytes; None if it is indivisible."""
    if entry.target is None or entry.strided or (foreign_order(False) and entry.dtype.itemsize > 1):
        return None
    if entry.packed is not None:
        return _packed_chunks(entry, entry.packed, limit)
    row = dtypes.BY_NUMBER[entry.source]
    if entry.source == entry.target:
        block_bytes = array_bytes = entry.dtype.itemsize
    else:
        block_bytes, array_bytes = row.block_bytes, row.block * entry.dtype.itemsize
    return _plain_chunks(entry, block_bytes, array_bytes, limit // array_bytes) if limit >= array_bytes else None


def _plain_chunks(entry: Entry, block_bytes: int, array_bytes: int, step: int) -> Iterator[Chunk]:
    """Yield chunks of ``step`` blocks with ``block_bytes`` each in the file and ``array_bytes`` in the array."""
    count = (entry.end - entry.begin) // block_bytes
    for first in range(0, count, step):
        blocks = min(step, count - first)
        source = entry.begin + first * block_bytes, blocks * block_bytes
        yield Chunk(entry, first * array_bytes, blocks * array_bytes, source)


def _flat_chunks(entry: Entry, packing: Packing, limit: int) -> Iterator[Chunk] | None:
    """Divide flat codes into chunks of at most ``limit`` values."""
    element = entry.dtype.itemsize
    ranges = list(flat_ranges(packing, limit))
    if ranges[0].columns_of(packing) > limit:
        return None
    return (Chunk(entry, span.column * element, span.columns_of(packing) * element, span) for span in ranges)


def _packed_chunks(entry: Entry, packed: Packed, limit: int) -> Iterator[Chunk] | None:
    """Divide packed codes into chunks of whole matrices or, if rows can be dequantized separately, of rows."""
    packing = packed.packing
    element = entry.dtype.itemsize
    matrix = packing.rows * packing.columns * element
    if not matrix:
        return None
    if packing.flat:
        return _flat_chunks(entry, packing, limit // entry.dtype.itemsize)
    if matrix <= limit:
        step = limit // matrix
        ranges = (
            Range(first, min(step, packing.matrices - first), 0, packing.rows)
            for first in range(0, packing.matrices, step)
        )
    else:
        rows, across = packing.rows, packing.columns
        if by_columns(packing):
            rows, across = across, rows
        block = row_unit(packing)
        step = limit // (across * element) // block * block
        if not step or not rows_apart(packing):
            return None
        ranges = (
            rows_range(packing, first, at, min(at + step, rows))
            for first in range(packing.matrices)
            for at in range(0, rows, step)
        )
    return (
        Chunk(
            entry,
            values_before(packing, span) * element,
            span.matrices * span.rows * span.columns_of(packing) * element,
            span,
        )
        for span in ranges
    )


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
    pieces: Sequence[Piece]  # of the buffer
    name: str = ""  # of the indivisible tensor
    array: Any = None  # the indivisible tensor


def buffer_size(total: int) -> int:
    """Return the size of each of `BUFFERS` buffers for tensors of ``total`` bytes."""
    return max(SMALLEST_BUFFER, min(BUFFER, -(-total // BUFFERS)))


def staged(
    entries: Iterable[Entry],
    buffers: Sequence[Array],
    wait: Callable[[int], object],
    threads: int | None,
) -> Prefetch[Filled]:
    """Fill buffers in turn, in the order of the tensors, while the caller uses earlier buffers.

    Args:
        entries: tensors with a target dtype; empty tensors are skipped.
        buffers: at least two arrays of bytes, aligned to 64, of equal size.
        wait: called in another thread with the number of a buffer before it is filled again; it must return when the
            buffer is free.

    Returns:
        An iterator of filled buffers. Each belongs to the caller until the next step.
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
    chunks: list[tuple[Chunk, int]] = []
    end = 0

    def fill() -> Task:
        nonlocal chunks, end
        number = next(numbers)
        work = partial(_fill, number, buffers[number], chunks, wait=wait, threads=threads)
        chunks, end = [], 0
        return Task(size, work)

    for entry in entries:
        if not entry.nbytes:
            continue
        parts = chunks_of(entry, size // _PER_BUFFER)
        if parts is None:
            if chunks:  # results come in the order of the tensors
                yield fill()
            yield Task(entry.nbytes, partial(_make, entry, threads))
            continue
        for chunk in parts:
            at = -(-end // ALIGNMENT) * ALIGNMENT
            if at + chunk.nbytes > size:
                yield fill()
                at = 0
            chunks.append((chunk, at))
            end = at + chunk.nbytes
    if chunks:
        yield fill()


def _fill(
    number: int,
    buffer: Array,
    chunks: Sequence[tuple[Chunk, int]],
    check: Check,
    *,
    wait: Callable[[int], object],
    threads: int | None,
) -> Filled:
    wait(number)
    base = address_of(buffer)
    batch = Batch(job for chunk, at in chunks for job in chunk.jobs(base + at))
    batch.run(threads=threads, progress=lambda done, total: check())
    return Filled(number, _joined(chunks))


def _joined(chunks: Iterable[tuple[Chunk, int]]) -> list[Piece]:
    """Return the chunks in a buffer as pieces, joining neighbours of a tensor."""
    pieces: list[Piece] = []
    for chunk, at in chunks:
        name, begin, size = chunk.entry.name, chunk.begin, 0
        if pieces:
            last = pieces[-1]
            if (last.name, last.begin + last.nbytes, last.at + last.nbytes) == (name, begin, at):
                _, begin, size, at = pieces.pop()
        pieces.append(Piece(name, begin, size + chunk.nbytes, at))
    return pieces


def _make(entry: Entry, threads: int | None, check: Check) -> Filled:
    """Read an indivisible tensor into a C-contiguous array."""
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
    """Do nothing, if there is nothing to wait for or to check."""


class StagedBytes:
    """The bytes of tensors for writers, read ahead unless there are few.

    Args:
        entries: the tensors in the order of the requests.
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
        """Yield the bytes of the next tensor, in order.

        Yields:
            Address and size of a range, and True if all ranges so far must be used before the next step.
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
        """Stop reading and wait for the threads."""
        self._filled.close()
