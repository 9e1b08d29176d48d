"""Brings the bytes that jobs read from stores on the network: in few large requests, many of them in flight.

What is copied unchanged lands in the memory of its array. All else lands in staging memory, where its jobs run as soon
as their last byte is there, while other requests go on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice
from typing import Any

from ...base import dtypes
from ...base.arrays import Array
from ...base.native import ffi, lib
from ...errors import RemoteError
from ...stores.remote import RemoteStore, read_spans
from ...stores.stop import current
from ...stores.store import Span
from ...stores.thread_group import RANGES, each, run
from .job import Job, Origin
from .memory import ALIGNMENT, address_of, aligned_bytes
from .weight_file import WeightFile, is_remote

# Bytes of a request, and of one of many: as object stores advise. More makes nothing faster, and what is broken off, or
# waits for the slowest, is more.
RANGE, LONG_RANGE = 8 << 20, 16 << 20
_LONG_FROM = 1 << 30
# Bytes between two tensors that are read and dropped, to save a request: as many as come in the time that it takes. Not
# if they were most of the request, unless that is little.
_GAP, _SMALL_GAP = 1 << 20, 64 << 10
# Bytes of jobs that are planned together, which is also what callers ask for that read in pieces: enough for many
# requests. Bytes of staging memory in use, but at least what one job needs.
WINDOW, _STAGED = 64 << 20, 192 << 20
# Seconds after which a thread that waits for staging memory looks whether it is still wanted.
_POLL = 0.05


class Fetch:
    """The jobs of one call.

    Args:
        jobs: all of them; `run` returns those that read nothing from the network.
        execute: runs jobs whose sources are in memory; gets the path of their file for errors. Called in several
            threads, where it looks at `stop.current` now and then.
        threads: of those, at most so many run jobs at a time.
    """

    def __init__(self, jobs: Iterable[Job], execute: Callable[[Sequence[Job], str], object], threads: int) -> None:
        self._others: list[Job] = []
        found: list[Job] = []
        for job in jobs:
            (found if _reads_remote(job) else self._others).append(job)
        self.done = 0  # bytes of the jobs
        self._execute = execute
        self._turns = threading.BoundedSemaphore(threads)
        self._lock = threading.Lock()
        self._freed = threading.Condition()
        self._staged = 0  # bytes of staging memory, whether in use or not
        self._free: list[Array] = []
        self._total = sum(map(_extent, found))
        self._files = list(dict.fromkeys(file for job in found for file in job.files))
        rank = {file: k for k, file in enumerate(self._files)}
        self._jobs = sorted(found, key=lambda job: (rank.get(job.file, 0), job.offset))  # type: ignore[arg-type]
        self._most = RANGE if sum(job.size for job in found) < _LONG_FROM else LONG_RANGE

    def run(self, report: Callable[[int], object]) -> list[Job]:
        """Runs all jobs that read from the network.

        Args:
            report: called in this thread, now and then, with the bytes done.

        Returns:
            The other jobs.

        Raises:
            FormatError: a file has changed since it was opened.
            RemoteError, OSError: bytes cannot be had; with the tensor, URL and range.
            SafeloadError: what the jobs raise.
        """
        windows = _windows(self._jobs, self._most)
        first = list(islice(windows, 2))
        tasks = self._tasks(chain(first, windows))
        if len(first) < 2:
            begun = list(tasks)
            if len(begun) < 2:  # a request on its own needs no other thread
                for task in begun:
                    task()
                begun = []
            tasks = iter(begun)
        run(tasks, RANGES, lambda: report(self.done))
        stores = [file.store for file in self._files if isinstance(file.store, RemoteStore)]
        each(lambda store: store.confirm(), stores)
        return self._others

    def _tasks(self, windows: Iterable[_Window]) -> Iterator[Callable[[], object]]:
        for window in windows:
            if window.staged:
                window.place(self._take(window.staged))
            for request in window.requests(self._most):
                yield partial(self._serve, window, request)

    def _take(self, nbytes: int) -> Array:
        """Staging memory: some that was used before, as new pages cost as much as a copy; it may have to wait."""
        with self._freed:
            while True:
                for k, memory in enumerate(self._free):
                    if memory.size >= nbytes:
                        return self._free.pop(k)
                if not self._staged or self._staged + nbytes <= _STAGED:
                    memory = aligned_bytes(max(nbytes, min(WINDOW, self._total)))
                    self._staged += memory.size
                    return memory
                if self._free:  # too small: room for a larger one
                    self._staged -= self._free.pop().size
                    continue
                self._freed.wait(_POLL)
                current().check()

    def _serve(self, window: _Window, request: Sequence[tuple[_Piece, int, int]]) -> None:
        """Reads the bytes of a request, and runs the jobs that waited for them alone."""
        file = request[0][0].file
        spans = [
            Span(begin, _memory(piece.address + begin - piece.begin, end - begin)) for piece, begin, end in request
        ]
        try:
            read_spans(file.store, spans)
        except RemoteError as error:
            if error.tensor is None:
                error.tensor = _tensor_at(request, spans[0].offset if error.begin is None else error.begin)
            raise
        ready: list[_FetchWork] = []
        with self._lock:
            for piece, begin, end in request:
                piece.left -= end - begin
                if not piece.works:
                    self.done += end - begin
                if not piece.left:
                    for work in piece.works:
                        work.waits -= 1
                        if not work.waits:
                            ready.append(work)
        if ready:
            with self._turns, current().filling():  # as it writes where the caller can see it
                for path, works in groupby(ready, lambda work: work.path):
                    self._execute([work.placed() for work in works], path)
            with self._lock:
                self.done += sum(work.job.size for work in ready)
                window.works -= len(ready)
                last = not window.works
            if last:
                with self._freed:
                    self._free.append(window.memory)
                    self._freed.notify_all()


class _Piece:
    """Bytes of a file that one place in memory wants.

    Attributes:
        file: the file.
        begin: the first byte.
        end: one past the last byte.
        address: of the memory.
        works: what waits for them; nothing if they are where they belong.
        left: bytes that are not there.
        name: of the tensor, if it is known.
    """

    __slots__ = ("address", "begin", "end", "file", "left", "name", "works")

    def __init__(self, file: WeightFile, begin: int, end: int, address: int = 0, name: str | None = None) -> None:
        self.file, self.begin, self.end, self.address, self.name = file, begin, end, address, name
        self.works: list[_FetchWork] = []
        self.left = end - begin


class _FetchWork:
    """A job that runs when its bytes are in staging memory.

    Attributes:
        job: it, as it reads from the file.
        pieces: what it needs, by role of a packed tensor; under "" what it reads itself.
        waits: number of pieces that are not there.
    """

    __slots__ = ("job", "pieces", "waits")

    def __init__(self, job: Job, pieces: dict[str, _Piece]) -> None:
        self.job, self.pieces, self.waits = job, pieces, len(pieces)

    @property
    def path(self) -> str:
        """The path of the file that has the values or codes of the tensor, as messages show it."""
        file = self.job.file
        return file.path if isinstance(file, WeightFile) else next(iter(self.pieces.values())).file.path

    def placed(self) -> Job:
        """The job, as it reads from memory."""
        job, pieces = self.job, self.pieces
        if job.packed is not None:
            job = job._replace(packed=job.packed.moved({role: piece.address for role, piece in pieces.items() if role}))
        if "" in pieces:
            piece = pieces[""]
            job = job._replace(file=None, offset=piece.address)
            if job.origin is None:
                job = job._replace(origin=Origin(piece.file.tensor_at(piece.begin) or ""))
        return job


class _Window:
    """Neighbouring jobs, whose bytes are asked for together.

    Attributes:
        pieces: their bytes.
        works: number of jobs that have not run and need staging memory.
        staged: bytes of staging memory.
        memory: the staging memory.
    """

    memory: Array

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.works = 0
        self.staged = 0
        self._shared: dict[tuple[WeightFile, int, int], _Piece] = {}

    def add(self, job: Job) -> None:
        """Adds a job."""
        file = job.file
        name = None if job.origin is None else job.origin.tensor
        if _is_direct(job):
            assert isinstance(file, WeightFile)
            self.pieces.append(_Piece(file, job.offset, job.offset + job.size, job.memory, name))
            return
        pieces: dict[str, _Piece] = {}
        for role, place in _remote_parts(job).items():
            piece = self._shared.get(place)
            if piece is None:
                piece = self._shared[place] = _Piece(*place, name=name)
                self.pieces.append(piece)
                self.staged += -(-(place[2] - place[1]) // ALIGNMENT) * ALIGNMENT
            pieces[role] = piece
        work = _FetchWork(job, pieces)
        for piece in pieces.values():
            piece.works.append(work)
        self.works += 1

    def place(self, memory: Array) -> None:
        """Gives the pieces their places in staging memory."""
        self.memory = memory
        address = address_of(memory)
        for piece in self._shared.values():
            piece.address = address
            address += -(-(piece.end - piece.begin) // ALIGNMENT) * ALIGNMENT

    def requests(self, most: int) -> Iterator[list[tuple[_Piece, int, int]]]:
        """Bytes of pieces, in the order of the file, that are asked for together."""
        rank = {file: k for k, file in enumerate(dict.fromkeys(piece.file for piece in self.pieces))}
        request: list[tuple[_Piece, int, int]] = []
        first = reach = wanted = 0
        for piece in sorted(self.pieces, key=lambda piece: (rank[piece.file], piece.begin)):
            at = piece.begin
            while at < piece.end:
                if request:
                    gap = at - reach
                    near = 0 <= gap <= max(_SMALL_GAP, min(_GAP, wanted))
                    if request[0][0].file is not piece.file or not near or at - first >= most:
                        yield request
                        request = []
                if not request:
                    first, wanted = at, 0
                end = min(piece.end, first + most)
                request.append((piece, at, end))
                wanted += end - at
                at = reach = end
        if request:
            yield request


def _windows(jobs: Iterable[Job], most: int) -> Iterator[_Window]:
    window, size = _Window(), 0
    for job in chain.from_iterable(_divided(job, most) for job in jobs):
        cost = _extent(job)
        if size and size + cost > WINDOW:
            yield window
            window, size = _Window(), 0
        window.add(job)
        size += cost
    if size or window.works:
        yield window


def _reads_remote(job: Job) -> bool:
    return bool(job.size) and any(map(is_remote, job.files)) and bool(_remote_parts(job))


def _remote_parts(job: Job) -> dict[str, tuple[Any, int, int]]:
    """What a job reads from the network: by role the file and the bytes; under "" what it reads itself."""
    wanted: dict[str, tuple[Any, int, int]] = {"": (job.file, job.offset, job.offset + _extent(job))}
    if job.packed is not None:
        wanted.update(job.packed.stored())
    return {role: place for role, place in wanted.items() if is_remote(place[0]) and place[1] < place[2]}


def _is_direct(job: Job) -> bool:
    return job.op == lib.SL_OP_COPY and job.grid is None and job.packed is None


def _extent(job: Job) -> int:
    """Bytes from the first to the last that a job reads from its own file."""
    if job.packed is not None:
        return job.packed.nbytes
    if job.grid is not None:
        grid, item = job.grid, dtypes.BY_NUMBER[job.source].nbytes(1)
        return (grid.rows - 1) * grid.strides[0] + (grid.columns - 1) * grid.strides[1] + item
    return job.size


def _divided(job: Job, most: int) -> Iterator[Job]:
    """A large job as several, where one can be divided: each runs while others wait for their bytes."""
    if _is_direct(job):
        unit = to = 1
    elif job.op == lib.SL_OP_CONVERT:
        source, target = dtypes.of_number(job.source), dtypes.of_number(job.target)
        count = math.lcm(source.block, target.block)
        unit, to = source.nbytes(count), target.nbytes(count)
    else:
        yield job
        return
    step = max(1, most // unit) * unit
    for begin in range(0, job.size, step):
        origin = job.origin
        if begin and origin is not None and not _is_direct(job):
            origin = origin._replace(first=origin.first + begin // unit * count)
        memory = job.memory + begin // unit * to
        yield job._replace(offset=job.offset + begin, memory=memory, size=min(step, job.size - begin), origin=origin)


def _memory(address: int, size: int) -> memoryview:
    return memoryview(ffi.buffer(ffi.cast("char *", address), size))


def _tensor_at(request: Iterable[tuple[_Piece, int, int]], position: int) -> str | None:
    """Name of the tensor that a byte belongs to; of the first one where it lies between tensors."""
    named = None
    for piece, begin, end in request:
        if named is None or begin <= position < end:
            named = piece.name or piece.file.tensor_at(max(position, begin)) or piece.file.tensor_at(begin)
        if begin <= position < end:
            return named
    return named
