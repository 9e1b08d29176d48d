"""Fetch the bytes of jobs from stores on the network: in few large requests, many of them in flight.

Unconverted bytes land directly in the array. All other bytes land in staging memory, and a job runs as
soon as its last byte has arrived, while other requests continue.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, starmap
from typing import Any, TypeAlias

from ..core import dtypes
from ..core.arrays import Array
from ..core.files import ByteStore, Span, read_from
from ..core.jobs import WINDOW, Batch, Job, Origin
from ..core.memory import ALIGNMENT, aligned_bytes, windows
from ..core.native import address_of, ffi, lib
from ..core.thread_group import RANGES, check_stopped, current, each, fill, run
from ..core.weight_file import WeightFile, is_remote
from ..errors import RemoteError

# Bytes of a request, and of a request in a long download, as object stores recommend. Larger requests are no faster
# and lose more if aborted.
RANGE, LONG_RANGE = 8 << 20, 16 << 20
_LONG_FROM = 1 << 30
# Largest gap between two tensors that should be read and dropped to save a request: about as many bytes as arrive
# during a round trip. Gaps must not make up most of a request, unless the request is small.
_GAP, _SMALL_GAP = 1 << 20, 64 << 10
# Limit of staging memory, which a single job may exceed.
_STAGED = 192 << 20
# Seconds after which a thread waiting for staging memory checks if its call was stopped.
_POLL = 0.05


def read_spans(store: ByteStore, spans: Sequence[Span]) -> None:
    """Fill ascending spans that do not overlap, from any store."""
    fill_spans = getattr(store, "fill_spans", None)
    if fill_spans is not None:  # only a `RemoteStore` has it, because each of its reads can be a request
        fill_spans(spans)
        return
    begin, end = spans[0].offset, spans[-1].end
    memory = bytearray(end - begin)
    read_from(store, begin, memoryview(memory), getattr(store, "path", ""))
    fill(spans, begin, memory)


class Fetch:
    """The jobs of a call on remote files, which up to ``threads`` threads run at a time."""

    def __init__(self, remote: Sequence[Job], threads: int) -> None:
        self.done = 0  # bytes of the jobs
        self._turns = threading.BoundedSemaphore(threads)
        self._lock = threading.Lock()
        self._freed = threading.Condition()
        self._staged = 0  # bytes of staging memory, in use or free
        self._free: list[Array] = []
        self._total = sum(map(_extent, remote))
        self._files = list(dict.fromkeys(file for job in remote for file, _, _ in _remote_parts(job).values()))
        rank = {file: k for k, file in enumerate(self._files)}
        self._jobs = sorted(remote, key=lambda job: (rank.get(job.file, 0), job.offset))
        self._request_size = RANGE if sum(job.size for job in remote) < _LONG_FROM else LONG_RANGE

    def run(self, report: Callable[[int], object]) -> None:
        size = self._request_size
        parts = chain.from_iterable(_divided(job, size) for job in self._jobs)
        each_window = map(_Window, windows(parts, WINDOW, _extent))
        requests = ((window, request) for window in each_window for request in window.requests(size))
        tasks = (partial(self._serve, *request) for request in requests)
        first = list(islice(tasks, 2))
        if len(first) == 1:  # a single request needs no other thread
            first.pop()()
        run(chain(first, tasks), RANGES, lambda: report(self.done))
        confirming = (getattr(file.store, "confirm", None) for file in self._files)  # of remote stores
        each(lambda confirm: confirm(), [*filter(None, confirming)])

    def _take(self, nbytes: int) -> Array:
        """Return staging memory, waiting if necessary. It is reused, because new pages cost as much as a copy."""
        with self._freed:
            while True:
                for k, memory in enumerate(self._free):
                    if memory.size >= nbytes:
                        return self._free.pop(k)
                if not self._staged or self._staged + nbytes <= _STAGED:
                    memory = aligned_bytes(max(nbytes, min(WINDOW, self._total)))
                    self._staged += memory.size
                    return memory
                if self._free:  # too small: make room for a larger array
                    self._staged -= self._free.pop().size
                    continue
                self._freed.wait(_POLL)
                current().check()

    def _serve(self, window: _Window, request: Sequence[tuple[_Piece, int, int]]) -> None:
        """Read the bytes of a request, and run the jobs with all of their bytes."""
        file = request[0][0].file
        with window.placing:
            if window.staged and window.memory is None:
                window.place(self._take(window.staged))
        spans = []
        for piece, begin, end in request:
            address = ffi.cast("char *", piece.address + begin - piece.begin)
            spans.append(Span(begin, memoryview(ffi.buffer(address, end - begin))))
        try:
            read_spans(file.store, spans)
        except RemoteError as error:
            if error.tensor is None:
                error.tensor = _tensor_at(request, spans[0].offset if error.begin is None else error.begin)
            raise
        ready: list[_Work] = []
        with self._lock:
            for piece, begin, end in request:
                piece.left -= end - begin
                if not piece.works:
                    self.done += end - begin
                if not piece.left:
                    ready += (work for work in piece.works if not any(other.left for other in work[1].values()))
        if ready:
            with self._turns, current().filling():  # because jobs write into the caller's memory
                Batch(starmap(_placed, ready)).run(threads=1, progress=check_stopped)
            with self._lock:
                self.done += sum(job.size for job, _ in ready)
                window.works -= len(ready)
                last = not window.works
            if last:
                with self._freed:
                    assert window.memory is not None
                    self._free.append(window.memory)
                    self._freed.notify_all()


class _Piece:
    """A byte range of a file with its place in memory."""

    __slots__ = ("address", "begin", "end", "file", "left", "name", "works")

    def __init__(self, file: WeightFile, begin: int, end: int, name: str | None, address: int = 0) -> None:
        self.file = file
        self.begin = begin
        self.end = end  # after the last byte
        self.name = name  # of the tensor, if known
        self.address = address  # in memory
        self.works: list[_Work] = []  # jobs waiting for the bytes; empty if the bytes belong to an array
        self.left = end - begin  # missing bytes


# A job to run when its bytes are in staging memory, and its pieces by role of a packed tensor; under "" the bytes of
# the job itself.
_Work: TypeAlias = tuple[Job, dict[str, _Piece]]


def _placed(job: Job, pieces: Mapping[str, _Piece]) -> Job:
    origin, piece = job.origin, next(iter(pieces.values()))  # of its values or codes, if they are remote
    if job.packed is not None:
        job = job._replace(packed=job.packed.moved({role: piece.address for role, piece in pieces.items() if role}))
    if "" in pieces:
        origin = origin or Origin(piece.file.tensor_at(piece.begin) or "")
        job = job._replace(file=None, offset=piece.address)
    return job._replace(origin=origin and origin._replace(path=piece.file.path))


class _Window:
    """Neighbouring jobs that share a request for their bytes."""

    memory: Array | None = None  # the staging memory, if it has been placed

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.placing = threading.Lock()
        self.pieces: list[_Piece] = []
        self.works = 0  # pending jobs with staging memory
        self._shared: dict[tuple[Any, int, int], _Piece] = {}
        for job in jobs:
            name = None if job.origin is None else job.origin.tensor
            if _is_direct(job):
                assert isinstance(job.file, WeightFile)
                self.pieces.append(_Piece(job.file, job.offset, job.offset + job.size, name, job.memory))
                continue
            parts = _remote_parts(job)
            pieces = {
                role: self._shared.get(place) or self._shared.setdefault(place, _Piece(*place, name))
                for role, place in parts.items()
            }
            for piece in dict.fromkeys(pieces.values()):
                piece.works.append((job, pieces))
            self.works += 1
        self.pieces += self._shared.values()
        self.staged = sum(map(_room, self._shared.values()))  # bytes of staging memory

    def place(self, memory: Array) -> None:
        """Assign places in staging memory to the pieces."""
        self.memory = memory
        address = address_of(memory)
        for piece in self._shared.values():
            piece.address = address
            address += _room(piece)

    def requests(self, request_size: int) -> Iterator[list[tuple[_Piece, int, int]]]:
        """Yield requests: byte ranges of pieces, in the order of the file."""
        rank = {file: k for k, file in enumerate(dict.fromkeys(piece.file for piece in self.pieces))}
        request: list[tuple[_Piece, int, int]] = []
        first = reach = used = 0
        for piece in sorted(self.pieces, key=lambda piece: (rank[piece.file], piece.begin)):
            at = piece.begin
            while at < piece.end:
                if request:
                    gap = at - reach
                    near = 0 <= gap <= max(_SMALL_GAP, min(_GAP, used))
                    if request[0][0].file is not piece.file or not near or at - first >= request_size:
                        yield request
                        request = []
                if not request:
                    first, used = at, 0
                end = min(piece.end, first + request_size)
                request.append((piece, at, end))
                used += end - at
                at = reach = end
        if request:
            yield request


def _room(piece: _Piece) -> int:
    return -(-(piece.end - piece.begin) // ALIGNMENT) * ALIGNMENT


def _remote_parts(job: Job) -> dict[str, tuple[Any, int, int]]:
    """Return the remote byte ranges of a job by role of a packed tensor; under "" the bytes of the job itself."""
    places: dict[str, tuple[Any, int, int]] = {"": (job.file, job.offset, job.offset + _extent(job))}
    if job.packed is not None:
        places.update(job.packed.stored())
    return {role: place for role, place in places.items() if is_remote(place[0]) and place[1] < place[2]}


def _is_direct(job: Job) -> bool:
    return job.op == lib.SL_OP_COPY and job.grid is None and job.packed is None


def _extent(job: Job) -> int:
    """Return the length of the byte range that a job reads from its own file."""
    if job.packed is not None:
        return int(job.packed.nbytes)
    if job.grid is not None:
        grid, item = job.grid, dtypes.BY_NUMBER[job.source].nbytes(1)
        return (grid.rows - 1) * grid.strides[0] + (grid.columns - 1) * grid.strides[1] + item
    return job.size


def _divided(job: Job, request_size: int) -> Iterator[Job]:
    """Divide a large job if possible: a part can run while the next part is fetched."""
    if _is_direct(job):
        unit = to = 1
    elif job.op == lib.SL_OP_CONVERT:
        source, target = dtypes.of_number(job.source), dtypes.of_number(job.target)
        count = math.lcm(source.block, target.block)
        unit, to = source.nbytes(count), target.nbytes(count)
    else:
        yield job
        return
    step = max(1, request_size // unit) * unit
    for begin in range(0, job.size, step):
        origin = job.origin
        if begin and origin is not None and not _is_direct(job):
            origin = origin._replace(first=origin.first + begin // unit * count)
        memory = job.memory + begin // unit * to
        yield job._replace(offset=job.offset + begin, memory=memory, size=min(step, job.size - begin), origin=origin)


def _tensor_at(request: Sequence[tuple[_Piece, int, int]], position: int) -> str | None:
    """Return the name of the tensor at a byte, or of the first tensor if the byte lies between tensors."""
    piece, begin, _ = next((part for part in request if part[1] <= position < part[2]), request[0])
    return piece.name or piece.file.tensor_at(max(position, begin)) or piece.file.tensor_at(begin)


def _run(jobs: Sequence[Job], threads: int, report: Callable[[int], object]) -> list[Job]:
    local: list[Job] = []
    remote: list[Job] = []
    for job in jobs:
        (remote if job.size and _remote_parts(job) else local).append(job)
    Fetch(remote, threads).run(report)
    return local


Batch.run_remote = _run
