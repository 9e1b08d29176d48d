"""Describe jobs to the C core, run them in groups, and name the file and tensor of a failed job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...base.arrays import Array, ArraySpec, byteswapped, empty_array, swappable
from ...base.native import TIER, Error, check, ffi, lib, private_buffer, short
from ...base.text import subject
from ...errors import RangeError
from ...stores.local import direct_of, none_free
from .job import Channels, Job, JobGrid, Origin, Updates
from .memory import address_of
from .progress import Progress, reporter
from .threads import thread_count
from .weight_file import WeightFile, is_remote

# Length of a time slice in C, after which signals are handled and progress is reported.
SLICE_MS = 50
# Direct reads get longer slices, because the disk is idle from the end of a slice until all readers are back.
DIRECT_SLICE_MS = 200
# True if this machine is not little-endian like the files.
_SWAPS = sys.byteorder == "big"
# File handle of a job before its file is opened.
_NO_FILE = -2
# A file of up to this size is written without a job, which would take longer than the system call.
_SHORT_FILE = 1 << 20
# Memory for the scales of packed codes in a group of jobs.
_PREPARED_BYTES = 64 << 20


def struct_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a struct of the C core, with the compiler's offsets; pointers are uint64."""
    kind = ffi.typeof(name)
    fields = [(field, info.offset, info.type) for field, info in kind.fields]
    codes = {"int32_t": "i4", "uint32_t": "u4", "int64_t": "i8", "uint64_t": "u8", "float": "f4", "double": "f8"}
    return np.dtype(
        {
            "names": [field for field, _, _ in fields],
            "formats": ["u8" if of.kind == "pointer" else codes[of.cname] for _, _, of in fields],
            "offsets": [offset for _, offset, _ in fields],
            "itemsize": ffi.sizeof(kind),
        }
    )


# A job, with its fields in the order of `Job`.
JOB = struct_dtype("sl_job")[
    ["file", "offset", "memory", "size", "from", "to", "op", "grid", "channels", "packed", "direct", "merge"]
]
_GRID = struct_dtype("sl_grid")
_CHANNELS = struct_dtype("sl_channels")
_PACKED = struct_dtype("sl_packed")
_MERGE, _UPDATE = struct_dtype("sl_merge"), struct_dtype("sl_update")

# The source of a job: a file, a handle kept open by the caller, or None for memory.
JobFile = WeightFile | int | None
# Types of sources that are open already.
_OPEN = frozenset((int, type(None)))


class Runner:
    """Run groups of jobs, one after another. ``fail`` raises the error of a job, whose index counts over all groups."""

    def __init__(
        self,
        total: int,
        threads: int | None,
        *,
        report: Callable[[int], object],
        fail: Callable[[int, Any, int], None],
        done: int = 0,
        direct: bool = False,
    ) -> None:
        self.refused = False  # True if the system refused a direct read
        self._total = total
        self._threads = threads
        self._report = report
        self._fail = fail
        self._done = done
        self._first = 0  # index of the next job in all groups
        self._direct = direct
        self._room: Any = None

    def run(self, group: Array, files: Sequence[JobFile]) -> None:
        """Run a group of jobs, in parts if the process may not open all of their files at once."""
        if _OPEN.issuperset(map(type, files)):
            self._run(group, files, {file: _handle(file) for file in dict.fromkeys(files)})
            return
        begin = 0
        while begin < len(files):
            left = files[begin:] if begin else files
            handles: dict[JobFile, int] = {}
            try:
                count = len(left)
                if not self._open(left, handles):
                    count = next(k for k, file in enumerate(left) if file not in handles)
                self._run(group[begin : begin + count], left[:count], handles)
                begin += count
            finally:
                for file in handles:
                    if isinstance(file, WeightFile):
                        file.local.end_use()

    def _open(self, files: Sequence[JobFile], handles: dict[JobFile, int]) -> bool:
        """Open as many files as the budget and the system allow, at least one; return True if all are open."""
        each = 2 if self._direct else 1  # for direct reads a file has a second handle
        for file in dict.fromkeys(files):
            if not isinstance(file, WeightFile):
                handles[file] = _handle(file)
                continue
            try:
                handles[file] = file.local.begin_use(each if handles else 0)
            except OSError as error:
                if not handles or not none_free(error.errno):
                    raise
                return False
        return True

    def _run(self, group: Array, files: Sequence[JobFile], handles: Mapping[JobFile, int]) -> None:
        """Run jobs on open files."""
        group["file"] = [handles[file] for file in files]
        direct: dict[JobFile, int] = {}
        try:
            if self._direct:
                self._open_direct(files, handles, group, direct)
            self._run_open(group, [direct.get(file, 0) for file in files] if direct else [])
        finally:
            for handle in direct.values():
                short.sl_file_close(handle)

    def _run_open(self, group: Array, direct: Sequence[int]) -> None:
        """Run jobs, given their handles for direct reads, if there are any."""
        count = thread_count(self._total, self._threads, direct=bool(direct))
        slice_ms = DIRECT_SLICE_MS if direct else SLICE_MS
        described = ffi.from_buffer("sl_job[]", group)
        cursor = ffi.new("sl_cursor *")
        error = Error()
        if direct:
            group["direct"] = direct
            if self._room is None:
                self._room = ffi.from_buffer(private_buffer(count * lib.SL_DIRECT_ROOM))
            cursor.room, cursor.rooms = self._room, count
        while not cursor.finished:
            status = lib.sl_jobs_run(described, len(group), TIER, count, slice_ms, cursor, error)
            if status != lib.SL_OK:
                self._fail(status, error, self._first + cursor.failed_job)
            self._report(self._done + cursor.bytes_done)
        self._done += int(cursor.bytes_done)
        self._first += len(group)

    def _open_direct(
        self, files: Sequence[JobFile], handles: Mapping[JobFile, int], group: Array, direct: dict[JobFile, int]
    ) -> None:
        """Open handles for direct reads, by file, which the caller closes."""
        plain = (group["grid"] == 0) & (group["packed"] == 0) & (group["size"] > 0)
        for file in dict.fromkeys(file for file, usable in zip(files, plain.tolist(), strict=True) if usable):
            handle = direct_of(handles[file]) if isinstance(file, WeightFile) else None
            if handle is not None:
                direct[file] = handle
            elif isinstance(file, WeightFile):
                self.refused = True


def _handle(file: JobFile) -> int:
    return file if isinstance(file, int) else int(lib.SL_MEMORY)


class Batch:
    """Jobs to run together. Their memory must stay alive until they have run.

    ``Origin.owner`` keeps the memory of a source alive; the caller keeps the rest.
    """

    def __init__(self, jobs: Iterable[Job] = (), path: str | None = None, *, direct: bool = False) -> None:
        self.jobs = list(jobs)
        self.refused = False  # True if the system refused a direct read
        self._path = path
        self._direct = direct
        self._results: list[Array] = []

    def add(self, job: Job) -> None:
        """Add a job."""
        self.jobs.append(job)

    def into(self, array: Array) -> int:
        """Return the address of an array for jobs to fill; `run` leaves its values in this machine's byte order."""
        if _SWAPS:
            self.results((array,))
        return address_of(array)

    def results(self, arrays: Iterable[Array]) -> None:
        """Register arrays over memory of jobs for `run`, which swaps bytes if this machine is not little-endian."""
        self._results += (array for array in arrays if _SWAPS and array.dtype.itemsize > 1)

    def run(self, *, threads: int | None = None, progress: Progress = None) -> int:
        """Run all jobs and return the number of bytes moved.

        Files are opened if their descriptors were closed. If the process may not have enough descriptors, the jobs run
        in groups with fewer files.
        """
        total = sum(job.size for job in self.jobs)
        count = thread_count(total, threads)
        with reporter(progress, total) as report:
            local = self._fetch(count, report)
            self._run(local, threads, total - sum(job.size for job in local), total, report)
        for result in self._results:
            swappable(result).byteswap(inplace=True)
        return total

    def _fetch(self, threads: int, report: Callable[[int], object]) -> list[Job]:
        """Run the jobs on remote files, and return the remaining jobs."""
        files = {job.file for job in self.jobs}
        if not any(map(is_remote, files)) and not any(
            job.packed and any(map(is_remote, job.files)) for job in self.jobs
        ):
            return self.jobs
        from ...stores.thread_group import check_stopped
        from .fetch import Fetch  # `formats.opening` has imported both

        def execute(jobs: Sequence[Job], path: str) -> None:
            Batch(jobs, path).run(threads=1, progress=check_stopped)

        return Fetch(self.jobs, execute, threads).run(report)

    def _run(
        self, jobs: Sequence[Job], threads: int | None, done: int, total: int, report: Callable[[int], object]
    ) -> None:
        """Run jobs on local files and in memory, after ``done`` bytes of ``total``."""
        rows = [(_NO_FILE, job[1], job[2], job[3], job[4], job[5], job[6], 0, 0, 0, 0, 0) for job in jobs]
        array = np.array(rows, dtype=JOB)
        descriptions = [
            _point_at([job.grid for job in jobs], array["grid"], _GRID),
            _point_at([job.channels for job in jobs], array["channels"], _CHANNELS),
            _point_at_merges([job.merge for job in jobs], array["merge"]),
        ]
        files = [job.file for job in jobs]

        def fail(status: int, error: Any, index: int) -> None:
            self._fail(status, error, jobs[index] if jobs else None)

        runner = Runner(total, threads, report=report, fail=fail, done=done, direct=self._direct)
        for begin, end in _affordable(jobs):
            group = array[begin:end]
            prepared = _prepare(jobs[begin:end], group["packed"])
            runner.run(group, files[begin:end])
            del prepared
        self.refused |= runner.refused
        del descriptions

    def _fail(self, status: int, error: Any, job: Job | None) -> None:
        """Raise the core's error with the file and the tensor of the failed job."""
        if status == lib.SL_E_MEMORY or job is None:  # not the error of a single job
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
    files: Sequence[WeightFile | None],
    file: Array,
    *,
    offsets: Array,
    memory: Array,
    sizes: Array,
    sources: Array,
    targets: Array,
    threads: int | None = None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Read ranges of local files, described in columns: faster than a `Batch` if there are many.

    The error of a value that cannot be quantized names no tensor.
    """
    op = np.where(sources == targets, lib.SL_OP_COPY, lib.SL_OP_CONVERT)
    columns = {"offset": offsets, "memory": memory, "size": sizes, "from": sources, "to": targets, "op": op}
    _run_columns(files, file, columns, threads, report=lambda done: check())


def work(
    files: Sequence[WeightFile],
    file: Array,
    *,
    op: int,
    offsets: Array,
    memory: Array,
    sizes: Array,
    numbers: Array,
    origin: Callable[[int], Origin],
    threads: int | None = None,
    progress: Progress = None,
) -> None:
    """Run an operation without target dtype on tensors of local files, like `Source.work` for each in a `Batch`."""
    columns = {"offset": offsets, "memory": memory, "size": sizes, "from": numbers, "to": numbers}
    columns["op"] = np.full(len(sizes), op)
    with reporter(progress, int(sizes.sum())) as report:
        _run_columns(files, file, columns, threads, report=report, origin=origin)


def _run_columns(
    files: Sequence[WeightFile | None],
    file: Array,
    columns: Mapping[str, Array],
    threads: int | None,
    *,
    report: Callable[[int], object],
    origin: Callable[[int], Origin | None] = lambda row: None,
) -> None:
    """Run jobs in the order of their bytes, given the fields of `JOB`."""
    order = np.lexsort((columns["offset"], file))
    array = np.zeros(len(order), JOB)
    for field, column in columns.items():
        array[field] = column[order]
    ordered = [files[k] for k in file[order].tolist()]

    def fail(status: int, error: Any, index: int) -> None:
        job = Job(ordered[index], int(array["offset"][index]), 0, int(array["size"][index]))
        Batch()._fail(status, error, job._replace(origin=origin(int(order[index]))))

    Runner(int(columns["size"].sum()), threads, report=report, fail=fail).run(array, ordered)


def write(
    handle: int,
    position: int,
    pieces: Sequence[tuple[int, int]],
    *,
    path: str,
    in_order: bool,
    durable: bool,
) -> int:
    """Write memory to an open file, and return the position after it.

    Devices and pipes have no positions and need ``in_order``; ``durable`` lets the system begin to write to the disk at
    once.
    """
    if len(pieces) == 1 and position + pieces[0][1] <= _SHORT_FILE and not in_order:
        address, size = pieces[0]
        error = Error()
        check(lib.sl_file_write(handle, position, ffi.cast("void *", address), size, error), error, path)
        return position + size
    op = lib.SL_OP_APPEND if in_order else lib.SL_OP_WRITE_BACK if durable else lib.SL_OP_WRITE
    rows, begin = [], position
    for address, size in pieces:
        rows.append((handle, position, address, size, 0, 0, op, 0, 0, 0, 0, 0))
        position += size

    def fail(status: int, error: Any, index: int) -> None:
        check(status, error, None if status == lib.SL_E_MEMORY else path)

    # A single thread is enough: ext4 and xfs serialize buffered writes to a file by its lock.
    runner = Runner(position - begin, 1, report=lambda done: None, fail=fail)
    runner.run(np.array(rows, dtype=JOB), [handle] * len(rows))
    return position


def _affordable(jobs: Sequence[Job]) -> Iterator[tuple[int, int]]:
    """Divide jobs into ranges [begin, end) with little memory for scales of packed codes."""
    begin, cost = 0, 0
    for k, job in enumerate(jobs):
        if job.packed is None:
            continue
        if cost and cost + job.packed.cost > _PREPARED_BYTES:
            yield begin, k
            begin, cost = k, 0
        cost += job.packed.cost
    yield begin, len(jobs)


def _prepare(jobs: Sequence[Job], column: Array) -> list[Any]:
    """Prepare the packed codes of jobs, fill a column with the addresses of their descriptions, and return the owners.

    The owners must stay alive until the jobs have run.
    """
    packed = [(k, job.packed.prepare()) for k, job in enumerate(jobs) if job.packed is not None]
    if not packed:
        return []
    table = np.zeros(len(packed), _PACKED)
    for row, (_, fields) in enumerate(packed):
        for name, value in fields.items():
            table[row][name] = address_of(value) if isinstance(value, np.ndarray) else 0 if value is None else value
    column[[k for k, _ in packed]] = address_of(table) + np.arange(len(packed), dtype=np.uint64) * table.itemsize
    return [table, packed]


def _point_at(values: Sequence[JobGrid | Channels | None], column: Array, dtype: np.dtype[Any]) -> Array | None:
    """Fill a column of jobs with the addresses of their grids or channels, and return the described array.

    The array must stay alive until the jobs have run; it is None if no job has a grid or channels.
    """
    if not any(values):
        return None
    distinct = {id(value): value for value in values if value is not None}
    table = np.array([value.described() for value in distinct.values()], dtype=dtype)
    begin = address_of(table)
    places = {key: begin + k * table.itemsize for k, key in enumerate(distinct)}
    column[...] = [0 if value is None else places[id(value)] for value in values]
    return table


def _point_at_merges(merges: Sequence[Updates | None], column: Array) -> list[Array]:
    """Like `_point_at`, for merges; each has a table of updates."""
    places = [k for k, merge in enumerate(merges) if merge is not None]
    table = np.zeros(len(places), _MERGE)
    tables = []
    for row, k in enumerate(places):
        merge = merges[k]
        assert merge is not None
        tables.append(np.zeros(len(merge.updates), _UPDATE))
        table[row] = merge.described(tables[-1])
        column[k] = address_of(table) + row * table.itemsize
    return [table, *tables]


# ---- small tensors ----


def read_small(file: WeightFile, layout: ArraySpec, origin: Origin | None = None) -> Array:
    """Read a small tensor into private memory, without releasing the GIL and without converting it."""
    array = empty_array(layout.shape, layout.dtype)
    size = layout.end - layout.begin
    if size and file.remote:
        Batch([Job(file, layout.begin, address_of(array), size, origin=origin)]).run()
    elif size and file.local.use(short.sl_file_read, layout.begin, address_of(array), size, None) != lib.SL_OK:
        job = Job(file, layout.begin, address_of(array), size, origin=origin)
        Batch([job]).run()  # fails again, with an error message
    return native_order(array)


def native_order(array: Array) -> Array:
    """Return a little-endian array in this machine's byte order, copied if it is not aligned."""
    if _SWAPS and array.dtype.itemsize > 1:
        array = byteswapped(array)
    return array if array.flags.aligned else array.copy()
