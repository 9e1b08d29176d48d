"""Python's side of the engine: describes jobs, runs them in groups, reports progress and whose job has failed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, ArraySpec, byteswapped, empty_array, swappable
from ...base.native import check, ffi, lib, pointer, short
from ...base.table import Entry
from ...base.text import subject
from ...errors import RangeError
from ...stores.local import LocalStore
from ...stores.stop import current
from .job import Channels, Job, JobGrid, Origin
from .memory import address_of
from .progress import Progress, reporter
from .runner import JOB, Runner, struct_dtype
from .threads import thread_count
from .weight_file import WeightFile, is_remote

# Whether this machine's byte order is not the one of files.
_SWAPS = sys.byteorder == "big"


_GRID = struct_dtype("sl_grid")
_CHANNELS = struct_dtype("sl_channels")
_PACKED = struct_dtype("sl_packed")


class Batch:
    """Jobs that run together. The memory that they refer to must stay alive until they have run.

    ``Origin.owner`` keeps the memory of a source alive; the caller keeps the rest.

    Args:
        jobs: initial jobs.
        path: for errors: the file of jobs that have a handle instead of a `WeightFile`.
        direct: whether files are read past the page cache where the system allows it.

    Attributes:
        refused: whether a file that was to be read past the page cache had to be read through it.
    """

    def __init__(self, jobs: Iterable[Job] = (), path: str | None = None, *, direct: bool = False) -> None:
        self.jobs = list(jobs)
        self.refused = False
        self._path = path
        self._direct = direct
        self._results: list[Array] = []

    def add(self, job: Job) -> None:
        """Adds a job."""
        self.jobs.append(job)

    def into(self, array: Array) -> int:
        """The address of an array that jobs fill. Its values are in this machine's byte order after `run`."""
        if _SWAPS:
            self.results((array,))
        return address_of(array)

    def results(self, arrays: Iterable[Array]) -> None:
        """Registers arrays over memory that jobs fill: the core writes them in the byte order of files, `run` swaps."""
        self._results += (array for array in arrays if _SWAPS and array.dtype.itemsize > 1)

    def run(self, *, threads: int | None = None, progress: Progress = None) -> int:
        """Runs all jobs. Returns the number of bytes moved.

        Files are opened if their descriptors were closed. If the process may not have enough descriptors, the jobs run
        in groups that need fewer files.

        Args:
            threads: None for `thread_count`'s choice.
            progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

        Raises:
            RangeError: a value that the target cannot represent, with tensor and index.
            FormatError: a file ends too early, with its path and the offset.
            OSError: a file cannot be read or written.
            MemoryError: the core's scratch memory cannot be allocated.
        """
        total = sum(job.size for job in self.jobs)
        count = thread_count(total, threads)
        with reporter(progress, total) as report:
            here = self._fetch(count, report)
            self._run(here, threads, total - sum(job.size for job in here), total, report)
        for result in self._results:
            swappable(result).byteswap(inplace=True)
        return total

    def _fetch(self, threads: int, report: Callable[[int], object]) -> list[Job]:
        """Runs the jobs that read from stores on the network. Returns the others."""
        files = {job.file for job in self.jobs}
        if not any(map(is_remote, files)) and not any(
            job.packed and any(map(is_remote, job.files)) for job in self.jobs
        ):
            return self.jobs
        from .fetch import Fetch  # only here: local files do not need it

        def execute(jobs: Sequence[Job], path: str) -> None:
            stop = current()
            Batch(jobs, path).run(threads=1, progress=lambda done, total: stop.check())

        return Fetch(self.jobs, execute, threads).run(report)

    def _run(
        self, given: Sequence[Job], threads: int | None, done: int, total: int, report: Callable[[int], object]
    ) -> None:
        """Runs jobs on files of this machine, and in memory, after others of ``done`` bytes of ``total``."""
        rows = [(_NO_FILE, job[1], job[2], job[3], job[4], job[5], job[6], 0, 0, 0, 0) for job in given]
        array = np.array(rows, dtype=JOB)
        kept = [
            _point_at([job.grid for job in given], array["grid"], _GRID),
            _point_at([job.channels for job in given], array["channels"], _CHANNELS),
        ]
        files = [job.file for job in given]
        runner = Runner(total, threads, direct=self._direct)
        for begin, end in _affordable(given):
            part = array[begin:end]
            prepared = _prepare(given[begin:end], part["packed"])

            def fail(status: int, error: Any, index: int, first: int = begin) -> None:
                self._fail(status, error, given[first + index] if given else None)

            done = runner.run(part, files[begin:end], done, report, fail)
            del prepared
        self.refused |= runner.refused
        del kept

    def _fail(self, status: int, error: Any, job: Job | None) -> None:
        """Raises the core's error with the file and the tensor of the job that failed."""
        if status == lib.SL_E_MEMORY or job is None:  # that error belongs to no single job
            check(status, error)
            return
        path = job.file.path if isinstance(job.file, WeightFile) else self._path
        if job.origin is not None:
            tensor = job.origin.tensor or None
        else:
            tensor = job.file.tensor_at(error.position) if isinstance(job.file, WeightFile) else None
        if status == lib.SL_E_RANGE:
            shape = () if job.origin is None else job.origin.shape
            position = error.position + (0 if job.origin is None else job.origin.first)
            at = [int(k) for k in np.unravel_index(position, shape)] if job.origin is not None else position
            message = f"{subject(tensor)}element {at} {ffi.string(error.message).decode()}"
            raise RangeError(message, path=path, tensor=tensor)
        check(status, error, path, tensor=tensor)


def move(
    files: Sequence[WeightFile],
    file: Array,
    offsets: Array,
    memory: Array,
    sizes: Array,
    sources: Array,
    targets: Array,
    *,
    threads: int | None = None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Reads ranges of local files, described in columns: what a `Batch` does with jobs of which there are few.

    Args:
        files: the files.
        file: index of the file of each range.
        offsets: its first byte there.
        memory: address that it is read to.
        sizes: its bytes in the file.
        sources: number of the dtype of its elements.
        targets: number of the dtype that they are converted to; never one of blocks.
        threads: None for `thread_count`'s choice.
        check: called after each time slice.

    Raises:
        FormatError, OSError: a file cannot be read.
    """
    order = np.lexsort((offsets, file))
    file = file[order]
    array = np.zeros(len(order), JOB)
    array["op"] = np.where(sources == targets, lib.SL_OP_COPY, lib.SL_OP_CONVERT)[order]
    columns = {"offset": offsets, "memory": memory, "size": sizes, "from": sources, "to": targets}
    for field, column in columns.items():
        array[field] = column[order]
    opened = [files[k] for k in file.tolist()]
    runner = Runner(int(sizes.sum()), threads)

    def fail(status: int, error: Any, index: int) -> None:
        Batch()._fail(status, error, Job(opened[index], int(array["offset"][index]), 0, int(array["size"][index])))

    runner.run(array, opened, 0, lambda done: check(), fail)


# File handle of a job before its file is opened.
_NO_FILE = -2
# Memory for the scales of the packed codes of all jobs that run together.
_PREPARED_BYTES = 64 << 20


def _affordable(given: Sequence[Job]) -> Iterator[tuple[int, int]]:
    """Divide jobs into ranges [begin, end), so that the scales of packed codes take little memory."""
    begin, cost = 0, 0
    for k, job in enumerate(given):
        if job.packed is None:
            continue
        if cost and cost + job.packed.cost > _PREPARED_BYTES:
            yield begin, k
            begin, cost = k, 0
        cost += job.packed.cost
    yield begin, len(given)


def _prepare(given: Sequence[Job], column: Array) -> list[Any]:
    """Prepares the packed codes of jobs, and fills a column with the addresses of their descriptions.

    Returns:
        What must stay alive until the jobs have run.
    """
    packed = [(k, job.packed.prepare()) for k, job in enumerate(given) if job.packed is not None]
    if not packed:
        return []
    table = np.zeros(len(packed), _PACKED)
    for row, (_, fields) in enumerate(packed):
        for name, value in fields.items():
            table[row][name] = address_of(value) if isinstance(value, np.ndarray) else 0 if value is None else value
    column[[k for k, _ in packed]] = address_of(table) + np.arange(len(packed), dtype=np.uint64) * table.itemsize
    return [table, packed]


def _point_at(given: Sequence[JobGrid | Channels | None], column: Array, dtype: np.dtype[Any]) -> Array | None:
    """Fills a column of jobs with addresses of their grids or channels, each described once.

    Returns:
        The array of descriptions, which must stay alive until the jobs have run; None if there are none.
    """
    if not any(given):
        return None
    distinct = {id(one): one for one in given if one is not None}
    table = np.array([one.described() for one in distinct.values()], dtype=dtype)
    begin = address_of(table)
    places = {key: begin + k * table.itemsize for k, key in enumerate(distinct)}
    column[...] = [0 if one is None else places[id(one)] for one in given]
    return table


def read_small(file: WeightFile, layout: ArraySpec, origin: Origin | None = None) -> Array:
    """One small tensor in private memory, read immediately without releasing the GIL; not converted."""
    array = empty_array(layout.shape, layout.dtype)
    size = layout.end - layout.begin
    if size and file.remote:
        Batch([Job(file, layout.begin, address_of(array), size, origin=origin)]).run()
    elif size and short.sl_file_read(file.descriptor, layout.begin, address_of(array), size, None) != lib.SL_OK:
        job = Job(file, layout.begin, address_of(array), size, origin=origin)
        Batch([job]).run()  # fails again, with an error message
    return native_order(array)


def read_plain(file: WeightFile, index: int, entry: Entry) -> Array:
    """`read_small` of a tensor of a table that is `Table.plain`, with its entry there."""
    number, shape, begin, end = entry
    array = empty_array(shape, dtypes.array_dtype(number))
    store = file.store
    if isinstance(store, LocalStore):
        address = pointer(ffi.from_buffer(array))
        if short.sl_file_read(store.descriptor, begin, address, end - begin, None) == lib.SL_OK:
            return array
    return read_small(file, file.layout(index))


def native_order(array: Array) -> Array:
    """A little-endian array in this machine's byte order, copied if it is not aligned."""
    if _SWAPS and array.dtype.itemsize > 1:
        array = byteswapped(array)
    return array if array.flags.aligned else array.copy()
