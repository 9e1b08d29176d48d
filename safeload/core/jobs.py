"""Describe jobs, operations of the C core on the bytes of a tensor; run them, and name what a failed job read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import RangeError
from .arrays import Array, byteswapped, swappable
from .files import NONE_FREE, LocalStore
from .memory import empty_array, thread_count
from .native import TIER, Error, address_of, check, ffi, lib, private_buffer, short
from .progress import Progress, reporter
from .tensors import Spans
from .text import subject
from .weight_file import WeightFile, is_remote

# Bytes to plan, or to read, at a time from the network: enough for many requests.
WINDOW = 64 << 20
# Length of a time slice in C, after which signals are handled and progress is reported.
SLICE_MS = 50
# Direct reads get longer slices, because the disk is idle from the end of a slice until all readers are back.
DIRECT_SLICE_MS = 200
# True if this machine is not little-endian like the files.
_SWAPS = sys.byteorder == "big"
# Memory for the scales of packed codes in a group of jobs.
_PREPARED_BYTES = 64 << 20


class JobGrid(NamedTuple):
    """An ``sl_grid``: a strided 2-D copy between elements that are not contiguous on both sides."""

    rows: int
    columns: int  # elements in each row
    strides: tuple[int, int, int, int]  # in bytes: row and column of the source, row and column of the destination

    def prepare(self) -> dict[str, Any]:
        """Return the fields of an ``sl_grid``."""
        return dict(zip(_DESCRIBED["grid"].names or (), (self.rows, self.columns, *self.strides), strict=True))


class Channels(NamedTuple):
    """An ``sl_channels``: per-axis scales, or the channels to compute absmax of."""

    number: int  # of channels
    inner: int  # consecutive elements (in C order) of a channel
    factors: Array | None = None  # scales, f32 of shape [number]; None to compute absmax only

    def prepare(self) -> dict[str, Any]:
        """Return the fields of an ``sl_channels``."""
        return {"count": self.number, "inner": self.inner, "factors": self.factors}


class Update(NamedTuple):
    """An ``sl_update``: a product of matrices to add to a matrix."""

    left: Array  # f32 [rows, rank]
    panels: Array  # f32; see `panels_of`
    scaling: float
    times: bool = False  # its elements are multiplied by those of the next update's product


class Updates(NamedTuple):
    """An ``sl_merge``: the changes of a matrix, one after another."""

    columns: int  # of the matrix
    updates: Sequence[Update]

    def prepare(self) -> dict[str, Any]:
        """Return the fields of an ``sl_merge``."""
        floats = partial(ffi.from_buffer, "float[]")
        rows = [
            (left.shape[1], floats(left), floats(panels), scaling, times)
            for left, panels, scaling, times in self.updates
        ]
        table = np.frombuffer(ffi.buffer(ffi.new("sl_update[]", rows)), np.uint8) if rows else None
        return {"columns": self.columns, "count": len(rows), "updates": table}


class CodeLayout(NamedTuple):
    """An ``sl_codes``: the layout of codes that packed codes move to."""

    bits: int
    order: int  # such as `lib.SL_ORDER_STREAM`
    row_bytes: int
    block_bytes: int = 0  # between blocks of 32 codes; 0 for rows without gaps

    def prepare(self) -> dict[str, Any]:
        """Return the fields of an ``sl_codes``."""
        return self._asdict()


def panels_of(right: Array) -> Array:
    """Return a matrix [rank, columns] as f32 panels, with zeros in the last panel's unused columns."""
    rank, columns = right.shape
    width = int(lib.SL_MERGE_PANEL)
    panels = np.zeros((-(-columns // width), rank, width), np.float32)
    whole = columns // width
    panels[:whole] = right[:, : whole * width].reshape(rank, whole, width).transpose(1, 0, 2)
    panels[whole:, :, : columns - whole * width] = right[:, whole * width :]
    return panels


class Origin(NamedTuple):
    """The tensor of a job."""

    tensor: str  # name for errors; "" for a single array
    shape: tuple[int, ...] = ()  # to report indices in errors
    owner: Any = None  # keeps the memory of the source alive
    first: int = 0  # first element of the job in the tensor
    path: str | None = None  # of the file, if the job reads bytes of it in memory


class Job(NamedTuple):
    """An ``sl_job``."""

    file: WeightFile | int | None  # of the source: None for memory, a handle of the C core if there is no `WeightFile`
    offset: int  # in the file, or the address of the source
    memory: int  # address of the destination (of the source of a write)
    size: int  # bytes of all elements at the source
    source: int = 0  # dtype number of the source
    target: int = 0  # dtype number of the destination, if the operation has one
    op: int = lib.SL_OP_COPY
    grid: JobGrid | None = None  # for strided 2-D copies
    channels: Channels | None = None  # for operations with channels
    origin: Origin | None = None  # None if the file can find the tensor by the failing byte
    packed: Any = None  # a `CodeReader` for operations on packed codes: `source` is F32, `size` counts values
    merge: Updates | None = None  # for `lib.SL_OP_MERGE`
    codes: CodeLayout | None = None  # for `lib.SL_OP_RESTORE` to codes, with the target U8


_FILE, _SIZE, _CODES = map(attrgetter, ("file", "size", "packed"))


def moving(source: int, target: int, grid: JobGrid | None = None) -> int:
    """Return the operation that moves values from one dtype to another."""
    if grid is not None:
        return int(lib.SL_OP_GRID)
    return int(lib.SL_OP_COPY if source == target else lib.SL_OP_CONVERT)


# ---- running ----


def struct_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a struct of the C core, with the compiler's offsets; pointers are uint64."""
    names, fields = zip(*ffi.typeof(name).fields, strict=True)
    codes = {"int32_t": "i4", "uint32_t": "u4", "int64_t": "i8", "uint64_t": "u8", "float": "f4", "double": "f8"}
    formats = ["u8" if field.type.kind == "pointer" else codes[field.type.cname] for field in fields]
    offsets, size = [field.offset for field in fields], ffi.sizeof(name)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


# A job, with its fields in the order of `Job`.
_MOVE = "file", "offset", "memory", "size", "from", "to", "op"
JOB = struct_dtype("sl_job")[[*_MOVE, "grid", "channels", "packed", "direct", "merge", "pages", "codes"]]
# Fields of a job that have a struct of their own.
_DESCRIBED = {field: struct_dtype(f"sl_{field}") for field in ("grid", "channels", "merge", "codes", "packed")}

# The source of a job: a file, a handle kept open by the caller, or None for memory.
JobFile = WeightFile | int | None


def run_jobs(
    table: Array,
    files: Sequence[JobFile],
    total: int,
    threads: int | None,
    *,
    report: Callable[[int], object],
    job: Callable[[int], Job],
    packed: Sequence[Any] = (),
    done: int = 0,
    direct: bool = False,
) -> bool:
    """Run jobs in groups with few open files and scales; return True if the system refused a direct read."""
    refused, room, begin = False, None, 0
    while True:
        end = _affordable(packed, begin) if packed else len(table)
        prepared = _describe(packed[begin:end], table["packed"][begin:end], _DESCRIBED["packed"]) if packed else None
        handles: dict[JobFile, int] = {}
        unbuffered: dict[JobFile, int] = {}  # handles for direct reads
        try:
            end = begin + _open(files[begin:end], handles, 2 if direct else 1)
            group, ours = table[begin:end], files[begin:end]
            group["file"] = list(map(handles.__getitem__, ours))
            if direct:
                refused |= not _open_direct(ours, handles, group, unbuffered)
            count = thread_count(total, threads, direct=bool(unbuffered))
            cursor, error = ffi.new("sl_cursor *"), Error()
            if unbuffered:
                group["direct"] = [unbuffered.get(file, 0) for file in ours]
                room = room or ffi.from_buffer(private_buffer(count * lib.SL_DIRECT_ROOM))
                cursor.room, cursor.rooms = room, count
            pages = [file.local.pages if isinstance(file, WeightFile) else 0 for file in handles]
            if any(pages):
                group["pages"] = [*map(dict(zip(handles, pages, strict=True)).__getitem__, ours)]
            described, slice_ms = ffi.from_buffer("sl_job[]", group), DIRECT_SLICE_MS if unbuffered else SLICE_MS
            while not cursor.finished:
                status = lib.sl_jobs_run(described, len(group), TIER, count, slice_ms, cursor, error)
                if status != lib.SL_OK and (status == lib.SL_E_MEMORY or not len(table)):  # not of a single job
                    check(status, error)
                if status != lib.SL_OK:
                    _fail(status, error, job(begin + cursor.failed_job))
                report(done + cursor.bytes_done)
        finally:
            for handle in unbuffered.values():
                short.sl_file_close(handle)
            for file in handles:
                if isinstance(file, WeightFile):
                    file.local.end_use()
        del prepared
        done, begin = done + int(cursor.bytes_done), end
        if begin == len(table):
            return refused


def _open(files: Sequence[JobFile], handles: dict[JobFile, int], each: int) -> int:
    """Open the files of the first jobs, as many as the budget and the system allow; return how many jobs."""
    for file in dict.fromkeys(files):
        if not isinstance(file, WeightFile):
            handles[file] = int(lib.SL_MEMORY) if file is None else file
            continue
        try:
            handles[file] = file.local.begin_use(each if handles else 0)
        except OSError as error:
            if not handles or error.errno not in NONE_FREE:
                raise
            return next(k for k, other in enumerate(files) if other not in handles)
    return len(files)


def _open_direct(
    files: Sequence[JobFile], handles: Mapping[JobFile, int], group: Array, unbuffered: dict[JobFile, int]
) -> bool:
    """Open handles for direct reads, by file, which the caller closes; return False if the system refuses one."""
    plain = (group["grid"] == 0) & (group["packed"] == 0) & (group["size"] > 0)
    usable = {file for file, reads in zip(files, plain.tolist(), strict=True) if reads and isinstance(file, WeightFile)}
    for file in usable:
        if handle := short.sl_file_open_direct(handles[file]):  # 0 if the system or the disk has none
            unbuffered[file] = handle
    return len(unbuffered) == len(usable)


class Batch:
    """Jobs to run together. The caller keeps their memory alive, unless it is an ``Origin.owner``."""

    # Runs the jobs on remote files, and returns the other jobs. `remote.fetch` sets it, which `opening` imports.
    run_remote: ClassVar[Callable[[Sequence[Job], int, Callable[[int], object]], list[Job]]]

    def __init__(self, jobs: Iterable[Job] = (), *, direct: bool = False) -> None:
        self.jobs = list(jobs)
        self.refused = False  # True if the system refused a direct read
        self._direct = direct
        self._results: list[Array] = []

    def into(self, array: Array) -> int:
        """Return the address of an array for jobs to fill; `run` leaves its values in this machine's byte order."""
        if _SWAPS:
            self.results((array,))
        return address_of(array)

    def results(self, arrays: Iterable[Array]) -> None:
        """Register arrays over memory of jobs for `run`, which swaps bytes if this machine is not little-endian."""
        self._results += (array for array in arrays if _SWAPS and array.dtype.itemsize > 1)

    def run(self, *, threads: int | None = None, progress: Progress = None) -> int:
        """Run all jobs, in groups if descriptors are few, and return the number of bytes moved."""
        jobs = self.jobs
        left = total = int(sum(map(_SIZE, jobs)))
        with reporter(progress, total) as report:
            sources = set(map(_FILE, jobs))
            for reader in set(map(_CODES, jobs)) - {None}:  # with scales of their own
                sources.update(map(itemgetter(0), reader.stored().values()))
            if any(map(is_remote, sources)):
                jobs = Batch.run_remote(jobs, thread_count(total, threads), report)
                left = sum(map(_SIZE, jobs))
            table = np.array([(0, *job[1:7], 0, 0, 0, 0, 0, 0, 0) for job in jobs], dtype=JOB)
            fields = dict(zip(Job._fields, zip(*jobs, strict=True), strict=True)) if jobs else {}
            packed = fields.pop("packed", ())  # described as the jobs run
            described = [name for name in _DESCRIBED if any(fields.get(name, ()))]
            descriptions = [_describe(fields[name], table[name], _DESCRIBED[name]) for name in described]
            self.refused |= run_jobs(
                table,
                fields.get("file", ()),
                total,
                threads,
                report=report,
                job=jobs.__getitem__,
                packed=packed if any(packed) else (),
                done=total - left,
                direct=self._direct,
            )
            del descriptions  # alive until the jobs have run
        for result in self._results:
            swappable(result).byteswap(inplace=True)
        return total


def _fail(status: int, error: Any, job: Job) -> None:
    """Raise the core's error with the file and the tensor of the failed job."""
    file, origin = job.file if isinstance(job.file, WeightFile) else None, job.origin
    path = file.path if file is not None else origin.path if origin is not None else None
    if origin is not None:
        tensor = origin.tensor or None
    else:
        tensor = file.tensor_at(error.position) if file is not None else None
    if status == lib.SL_E_RANGE:
        at = error.position
        if origin is not None:
            at = [int(k) for k in np.unravel_index(at + origin.first, origin.shape)]
        message = f"{subject(tensor)}element {at} {ffi.string(error.message).decode()}"
        raise RangeError(message, path=path, tensor=tensor)
    check(status, error, path, tensor=tensor)


def run_columns(
    spans: Spans,
    memory: Array,
    *,
    report: Callable[[int], object],
    op: int | None = None,
    origin: Callable[[int], Origin | None] = lambda row: None,
    threads: int | None = None,
) -> None:
    """Run an operation, by default a move, on ranges of local files: faster than a `Batch` if there are many."""
    files, file, offsets, sizes, sources, targets = spans
    order = np.lexsort((offsets, file))
    table = np.zeros(len(order), JOB)
    ops = np.where(sources == targets, lib.SL_OP_COPY, lib.SL_OP_CONVERT) if op is None else np.full(len(order), op)
    for field, column in zip(JOB.names[1:7], (offsets, memory, sizes, sources, targets, ops), strict=True):  # type: ignore[index]
        table[field] = column[order]
    ordered = [files[k] for k in file[order].tolist()]

    def job(index: int) -> Job:
        place = int(table["offset"][index]), 0, int(table["size"][index])
        return Job(ordered[index], *place, origin=origin(int(order[index])))

    run_jobs(table, ordered, int(sizes.sum()), threads, report=report, job=job)


def _affordable(packed: Sequence[Any], begin: int) -> int:
    """Return the end of the jobs from ``begin`` on with little memory for scales of packed codes."""
    cost = 0
    for k in range(begin, len(packed)):
        codes = packed[k]
        if codes is not None:
            if cost and cost + codes.cost > _PREPARED_BYTES:
                return k
            cost += codes.cost
    return len(packed)


def _describe(values: Sequence[Any], column: Array, dtype: np.dtype[Any]) -> Any:
    """Fill a column of jobs with the addresses of their descriptions, and return what must live until they have run."""
    distinct = {id(value): value.prepare() for value in values if value is not None}
    if not distinct:
        return None
    table = np.zeros(len(distinct), dtype)
    for row, fields in zip(table, distinct.values(), strict=True):
        for name, value in fields.items():
            row[name] = address_of(value) if isinstance(value, np.ndarray) else 0 if value is None else value
    places = dict(zip(distinct, range(address_of(table), 1 << 64, table.itemsize), strict=False))
    column[...] = [0 if value is None else places[id(value)] for value in values]
    return table, distinct


# ---- small tensors ----


def read_small(
    file: WeightFile,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    begin: int,
    end: int,
    *,
    origin: Origin | None = None,
) -> Array:
    """Read a small tensor into private memory, without releasing the GIL and without converting it."""
    array, size, store = empty_array(shape, dtype), end - begin, file.store
    if size:
        address = address_of(array)
        alone = isinstance(store, LocalStore) and not store.pages  # a batch drops them
        if not alone or store.use(short.sl_file_read, begin, address, size, None) != lib.SL_OK:  # type: ignore[attr-defined]
            Batch([Job(file, begin, address, size, origin=origin)]).run()  # a failed read fails again, with a message
    return native_order(array) if _SWAPS or not array.flags.aligned else array


def native_order(array: Array) -> Array:
    """Return a little-endian array in this machine's byte order, copied if it is not aligned."""
    if _SWAPS and array.dtype.itemsize > 1:
        array = byteswapped(array)
    return array if array.flags.aligned else array.copy()
