"""Fill a ring of staging buffers ahead of a consumer: with chunks of tensors, or with columns of byte ranges."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from . import dtypes
from .arrays import Array, foreign_order
from .jobs import Batch, Job, moving, run_columns
from .load import deliver
from .memory import ALIGNMENT, aligned_bytes, private_array, windows
from .native import address_of
from .restore import Range, divided, restore_jobs, values_before
from .tensors import Entry, Spans, Tensors
from .thread_group import REMOTE_WORKERS, Prefetch, Task, check_stopped
from .weight_file import is_remote

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

    entry: Entry
    begin: int  # first byte in the array
    nbytes: int
    stored: Range | tuple[int, int]  # a range of codes, or the first byte in the file and the number of bytes

    def jobs(self, memory: int) -> Iterable[Job]:
        """Return the jobs that make the chunk at an address."""
        entry, stored = self.entry, self.stored
        assert entry.target is not None
        if isinstance(stored, Range):  # it is written to its place in the whole array
            assert entry.packed is not None
            return restore_jobs(entry.packed, memory - self.begin, entry.target, entry.name, ranges=(stored,))
        begin, size = stored
        return (Job(entry.file, begin, memory, size, entry.source, entry.target, moving(entry.source, entry.target)),)


def chunks_of(entry: Entry, limit: int) -> Iterable[Chunk | Entry]:
    """Divide a tensor into chunks of at most ``limit`` bytes; return the tensor itself if it is indivisible."""
    if not entry.nbytes:
        return ()
    if entry.target is None or entry.strided or (foreign_order(False) and entry.dtype.itemsize > 1):
        return (entry,)
    element = entry.dtype.itemsize
    if entry.packed is not None:
        packing, ranges = entry.packed.packing, divided(entry.packed.packing, limit // element)
        first = next(ranges)
        if first.values * element > limit:
            return (entry,)
        spans = chain([first], ranges)
        return (Chunk(entry, values_before(packing, span) * element, span.values * element, span) for span in spans)
    stored, made = element, element  # bytes of a block in the file, and in the array
    if entry.source != entry.target:
        row = dtypes.BY_NUMBER[entry.source]
        stored, made = row.block_bytes, row.block * element
    step, count = limit // made, (entry.end - entry.begin) // stored
    if not step:
        return (entry,)
    blocks = ((first, min(step, count - first)) for first in range(0, count, step))
    return (Chunk(entry, k * made, n * made, (entry.begin + k * stored, n * stored)) for k, n in blocks)


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
    """Buffers of equal size, made by the threads that fill them: pinning memory takes as long as reading it."""

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
    """Fill buffers ahead, or a single buffer on request; a buffer belongs to the caller until the next step."""
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
    parts = chain.from_iterable(chunks_of(entry, ring.size // _PER_BUFFER) for entry in entries)
    # An indivisible tensor shares no window.
    for window in windows(parts, ring.size, _room, lambda part: object() if isinstance(part, Entry) else None):
        if isinstance(window[0], Entry):
            yield Task(window[0].nbytes, partial(_make, window[0], threads))
        else:
            yield Task(ring.size, partial(_fill, ring, window, sharing))


def _room(part: Chunk | Entry) -> int:
    """Return the bytes of a part in a buffer, up to the place where the next part can begin."""
    return -(-part.nbytes // ALIGNMENT) * ALIGNMENT


def _fill(ring: Ring, chunks: Sequence[Any], threads: int | None) -> Filled:
    """Read chunks into a buffer. Neighbours of a tensor become a single piece."""
    number, buffer = ring.take()
    base, at = address_of(buffer), 0
    batch, pieces = Batch(), list[Piece]()
    for chunk in chunks:
        batch.jobs += chunk.jobs(base + at)
        last = pieces[-1] if pieces else None
        if last and (last.name, last.begin + last.nbytes, last.at + last.nbytes) == (chunk.entry.name, chunk.begin, at):
            pieces[-1] = last._replace(nbytes=last.nbytes + chunk.nbytes)
        else:
            pieces.append(Piece(chunk.entry.name, chunk.begin, chunk.nbytes, at))
        at += _room(chunk)
    batch.run(threads=threads, progress=check_stopped)
    return Filled(number, pieces, buffer)


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
    """Read tensors ahead for a writer: yield addresses, sizes, and True if all must be used before the next step."""
    for filled in staged(entries, ring_for(sum(entry.nbytes for entry in entries)), threads):
        base = address_of(filled.array)
        for piece in filled.pieces:
            yield base + piece.at, piece.nbytes, piece is filled.pieces[-1]


# ---- byte ranges as columns: many small tensors without an object for each ----


def fill_buffer(buffer: Array, spans: Spans, threads: int | None) -> int:
    """Read all spans into a buffer, in order, and return the number of bytes."""
    if not spans.sizes.size:
        return 0
    lengths = spans.lengths
    ends = np.cumsum(lengths)
    memory = address_of(buffer) + ends - lengths
    if any(map(is_remote, map(spans.files.__getitem__, set(spans.file.tolist())))):
        rows = zip(*(column.tolist() for column in (*spans[1:], memory)), strict=True)
        jobs = (Job(spans.files[k], at, to, n, x, y, moving(x, y)) for k, at, n, x, y, to in rows)
        Batch(jobs).run(threads=threads, progress=check_stopped)
    else:
        run_columns(spans, memory, report=check_stopped, threads=threads)
    return int(ends[-1])


def read_ahead(spans: Spans, threads: int | None) -> Generator[tuple[int, int]]:
    """Read all spans in order, ahead if they are large: yield addresses and sizes, valid until the next step."""
    total = int(spans.lengths.sum())
    if total <= IN_TURN:  # a ring takes longer than so few bytes
        buffer = aligned_bytes(max(SMALLEST_BUFFER, total))  # alive while the consumer uses its address
        if total:
            yield address_of(buffer), fill_buffer(buffer, spans.joined(), threads)
        return
    ring = ring_for(total)
    filling = filled_ahead(_tasks_of(spans, ring, threads), ring, remote=any(map(is_remote, spans.files)))
    with closing(filling):
        for filled in filling:
            [piece] = filled.pieces
            yield address_of(filled.array), piece.nbytes


def _tasks_of(spans: Spans, ring: Ring, threads: int | None) -> Iterator[Task]:
    spans = spans.joined().divided(ring.size // ring.count)
    ends = np.cumsum(spans.lengths)
    begin = done = 0
    while begin < len(ends):
        end = int(np.searchsorted(ends, done + ring.size, side="right"))
        yield Task(ring.size, partial(_fill_spans, ring, spans.pick(slice(begin, end)), threads))
        begin, done = end, int(ends[end - 1])


def _fill_spans(ring: Ring, spans: Spans, threads: int | None) -> Filled:
    number, buffer = ring.take()
    return Filled(number, [Piece("", 0, fill_buffer(buffer, spans, threads), 0)], buffer)
