"""Python's side of the engine: plans jobs, runs them slice by slice, reports progress, lets signals in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base.arrays import Array, ArraySpec, array_over, empty_array
from ..base.file import WeightFile, are_few, groups
from ..base.native import TIER, Error, check, ffi, lib, pointer, private_buffer, short
from .progress import Progress as Progress
from .progress import reporter as reporter
from .threads import check_threads as check_threads
from .threads import thread_count as thread_count

# One slice of work in C, after which signals are handled and progress is shown.
SLICE_MS = 50

# From this size a tensor gets memory of its own; smaller ones share a pool, so that 100,000 of them do not mean
# 100,000 allocations and reads.
POOLED_BELOW = 1 << 20
# Largest pool: what one surviving small tensor can keep alive.
POOL_SIZE = 16 << 20
# Alignment of pools: a cache line, and more than any dtype needs.
ALIGNMENT = 64


def struct_dtype(name: str) -> np.dtype[Any]:
    """A struct of the C core as numpy has it, its fields by name where the compiler put them; pointers are uint64."""
    kind = ffi.typeof(name)
    fields = [(field, info.offset, info.type) for field, info in kind.fields]
    codes = {"int32_t": "i4", "uint32_t": "u4", "int64_t": "i8", "uint64_t": "u8", "double": "f8"}
    return np.dtype(
        {
            "names": [field for field, _, _ in fields],
            "formats": ["u8" if of.kind == "pointer" else codes[of.cname] for _, _, of in fields],
            "offsets": [offset for _, offset, _ in fields],
            "itemsize": ffi.sizeof(kind),
        }
    )


_GRID = struct_dtype("sl_grid")
# With its fields in the order of `Job`.
_JOB = struct_dtype("sl_job")[["file", "offset", "memory", "size", "from", "to", "grid", "channels", "op"]]
_CHANNELS = struct_dtype("sl_channels")


class Grid(NamedTuple):
    """One ``sl_grid``: two axes whose elements are not one run on both sides.

    Attributes:
        rows: how many.
        columns: how many elements in each.
        strides: bytes from one to the next: rows and columns of the source, rows and columns of the destination.
    """

    rows: int
    columns: int
    strides: tuple[int, int, int, int]


class Channels(NamedTuple):
    """One ``sl_channels``: what values are scaled by, or the channels whose absmax is wanted.

    Attributes:
        number: how many.
        inner: consecutive elements (in C order) of one channel.
        factors: f32 of shape [number]; None where only absmax is wanted.
    """

    number: int
    inner: int
    factors: Array | None = None


class Refused(Exception):  # noqa: N818 - becomes an error where name and shape of the tensor are known
    """A value that the target of a job cannot hold.

    Attributes:
        job: index of the job.
        element: index of the value in C order.
        reason: what is wrong with it.
    """

    def __init__(self, job: int, element: int, reason: str) -> None:
        super().__init__(reason)
        self.job = job
        self.element = element
        self.reason = reason


# As `Job.file`: the file is among those given to `run`. A descriptor that there is not.
IN_FILE = -2


class Job(NamedTuple):
    """One ``sl_job``.

    Attributes:
        file: descriptor, ``lib.SL_MEMORY`` where the source is memory, or `IN_FILE`.
        offset: in the file, or the address of the source.
        memory: address of the destination (of the source of a write).
        size: bytes of all elements at the source.
        source: number of its dtype.
        target: number of the dtype of the destination, for operations that have one.
        grid: 1 + index of its grid among those given to `run`; 0 where the elements are one run on both sides.
        channels: likewise of its channels; 0 where values are taken as they are.
        op: what is done, ``lib.SL_OP_COPY`` and the like.
    """

    file: int
    offset: int
    memory: int
    size: int
    source: int = 0
    target: int = 0
    grid: int = 0
    channels: int = 0
    op: int = lib.SL_OP_COPY


def moving(source: int, target: int, grid: int = 0) -> int:
    """The operation that brings values of one dtype to their place as another, by a grid where there is one."""
    if grid:
        return int(lib.SL_OP_GRID)
    return int(lib.SL_OP_COPY if source == target else lib.SL_OP_CONVERT)


def run(
    jobs: Sequence[Job],
    where: Callable[[int, int], tuple[str, str | None]],
    *,
    files: Sequence[WeightFile | None] | None = None,
    grids: Sequence[Grid] = (),
    channels: Sequence[Channels] = (),
    threads: int | None = None,
    progress: Progress = None,
) -> int:
    """Runs jobs to their end; the memory they name must be alive. Returns the bytes moved.

    Args:
        jobs: what to do.
        where: for an error, path and tensor of a job's index and a byte in its file.
        files: the file of each job, None for one in memory, where `Job.file` is `IN_FILE`: they are opened as far as
            they are not, no more than a part of them at a time where the process may not have so many descriptors.
        grids: what `Job.grid` counts in.
        channels: what `Job.channels` counts in.
        threads: None for `thread_count`'s choice.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Raises:
        Refused: a value that the target cannot hold.
        FormatError: a file ends too early, with its path and the offset.
        OSError: a file cannot be read or written.
        MemoryError: the core's scratch memory is refused.
    """
    array = np.array(jobs, dtype=_JOB)
    planes = np.array([(grid.rows, grid.columns, *grid.strides) for grid in grids], dtype=_GRID)
    factors = [(c.number, c.inner, 0 if c.factors is None else address_of(c.factors)) for c in channels]
    scales = np.array(factors, dtype=_CHANNELS)
    for field, table in (("grid", planes), ("channels", scales)):
        if table.size:
            numbers = array[field]
            array[field] = np.where(numbers > 0, address_of(table) + (numbers - 1) * table.itemsize, 0)
    total = int(array["size"].sum())
    count = thread_count(total, threads)
    done = 0
    with reporter(progress, total) as report:
        for begin, end in [(0, len(array))] if files is None else groups(files):
            batch = array[begin:end]
            if files is not None:
                held = {file: file.descriptor for file in set(files[begin:end]) if file is not None}
                batch["file"] = [lib.SL_MEMORY if file is None else held[file] for file in files[begin:end]]
            described = ffi.from_buffer("sl_job[]", batch)
            cursor = ffi.new("sl_cursor *")
            error = Error()
            while not cursor.finished:
                status = lib.sl_jobs_run(described, len(batch), TIER, count, SLICE_MS, cursor, error)
                if status != lib.SL_OK:
                    _fail(status, error, begin + cursor.failed_job, where)
                report(done + cursor.bytes_done)
            done += cursor.bytes_done
    return total


def _fail(status: int, error: Any, job: int, where: Callable[[int, int], tuple[str, str | None]]) -> None:
    if status == lib.SL_E_RANGE:
        raise Refused(job, error.position, ffi.string(error.message).decode())
    if status == lib.SL_E_MEMORY:  # of no one job, and there may be none
        check(status, error)
    path, subject = where(job, error.position)
    check(status, error, path, subject)


def address_of(array: Array) -> int:
    """Address of a contiguous array's first element. Numpy's own ways to it take four times as long."""
    return pointer(ffi.from_buffer(array))


def _aligned_bytes(size: int) -> Array:
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + size]


def private_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array, its values undefined, in huge pages if it is large.

    Raises:
        UnsupportedError: numpy cannot have it.
    """
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    return empty_array(shape, dtype) if size < POOLED_BELOW else array_over(private_buffer(size), dtype, shape, 0)


class _Reads:
    """Collects tensors to be read into private memory.

    Args:
        few: whether all of their files may be open at once.
    """

    def __init__(self, few: bool) -> None:
        self.few = few
        self.jobs: list[Job] = []
        self.files: list[WeightFile] = []  # of each job
        self.arrays: list[Array | None] = []
        self._small: list[tuple[int, WeightFile, ArraySpec]] = []
        self._pooled = 0

    def add(self, file: WeightFile, layout: ArraySpec, into: Array | None) -> None:
        size = layout.end - layout.begin
        if into is None and layout.source == layout.target and POOLED_BELOW > size > 0:
            if self._pooled + size > POOL_SIZE:
                self.flush()
            self._small.append((len(self.arrays), file, layout))
            # Up to two gaps of ALIGNMENT where a run starts.
            self._pooled += size + 2 * ALIGNMENT
            self.arrays.append(None)
            return
        array = private_array(layout.shape, layout.dtype) if into is None else into
        self.arrays.append(array)
        if size > 0:
            op = moving(layout.source, layout.target)
            place = self._source(file), layout.begin, address_of(array), size
            self.jobs.append(Job(*place, layout.source, layout.target, op=op))
            self.files.append(file)

    def _source(self, file: WeightFile) -> int:
        return file.descriptor if self.few else IN_FILE

    def flush(self) -> None:
        """Places the small tensors collected so far in one pool, neighbours in the file side by side in one job."""
        if not self._small:
            return
        pool = _aligned_bytes(self._pooled)
        base = address_of(pool)
        at, previous, previous_end = 0, None, -1
        for slot, file, (dtype, shape, begin, end, *_) in self._small:
            if file is previous and begin == previous_end:
                self.jobs[-1] = self.jobs[-1]._replace(size=self.jobs[-1].size + end - begin)
            else:
                # The same address modulo ALIGNMENT as in the file: what is aligned there is aligned here.
                at += (begin - at) % ALIGNMENT
                self.jobs.append(Job(self._source(file), begin, base + at, end - begin))
                self.files.append(file)
            self.arrays[slot] = array_over(pool, dtype, shape, at)
            at += end - begin
            previous, previous_end = file, end
        self._small.clear()
        self._pooled = 0


def read_arrays(
    parts: Sequence[tuple[WeightFile, ArraySpec]],
    *,
    into: Sequence[Array | None] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> list[Array]:
    """Tensors of any files, read (and converted) into private memory in one go: aligned, writable, C-contiguous.

    Args:
        parts: what to read.
        into: arrays to fill, one for each part, C-contiguous and of its dtype and shape; None for new ones.
        threads: see `thread_count`.
        progress: see `run`.

    Raises:
        FormatError: a file ends too early, with its path and the offset.
        OSError: a file cannot be read.
    """
    reads = _Reads(are_few(file for file, _ in parts))
    for k, (file, layout) in enumerate(parts):
        reads.add(file, layout, None if into is None else into[k])
    reads.flush()

    def where(job: int, position: int) -> tuple[str, str | None]:
        file = reads.files[job]
        return file.path, file.tensor_at(position)

    run(reads.jobs, where, files=None if reads.few else reads.files, threads=threads, progress=progress)
    arrays = [native_order(array) for array in reads.arrays if array is not None]
    for k, given in enumerate(into or ()):
        if given is not None and arrays[k] is not given:  # only where bytes had to be swapped
            given[...] = arrays[k]
            arrays[k] = given
    return arrays


def read_small(file: WeightFile, layout: ArraySpec) -> Array:
    """One small tensor in private memory, read at once and with the GIL kept; unconverted."""
    array = empty_array(layout.shape, layout.dtype)
    size = layout.end - layout.begin
    if size and short.sl_file_read(file.descriptor, layout.begin, address_of(array), size, None) != lib.SL_OK:
        return read_arrays([(file, layout)])[0]  # fails again, and says how
    return native_order(array)


def native_order(array: Array) -> Array:
    """Little-endian bytes as this machine's numbers, at an address that suits them."""
    if sys.byteorder == "big" and array.dtype.itemsize > 1:
        array = array.byteswap()
    return array if array.flags.aligned else array.copy()
