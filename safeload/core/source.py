"""Sources of jobs: tensors in arrays or in files, and their bytes in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from . import dtypes, jobs, restore
from .arrays import Array, as_array
from .cast import astype
from .jobs import WINDOW, Batch, Channels, Job, JobGrid, Origin, moving
from .native import address_of
from .packing import CODES, Packed
from .text import subject
from .weight_file import WeightFile


class Source(NamedTuple):
    """Location of a tensor's values, in C order and little-endian: in memory or in a file, without a descriptor."""

    name: str  # for messages; "" for a single array
    shape: tuple[int, ...]  # logical shape
    row: dtypes.Dtype
    offset: int  # in the file, or the address in memory
    file: WeightFile | None  # None for memory
    owner: Any  # keeps memory or file alive
    packed: Packed | None = None  # codes to restore: `row` is then F32, and `offset` has no meaning

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.row.nbytes(math.prod(self.shape))

    def job(self, memory: int, target: int, op: int | None = None, *, grid: JobGrid | None = None) -> Job:
        """Return the job of an operation, by default the copy to an address, converted to dtype number ``target``."""
        op = moving(self.row.number, target, grid) if op is None else op
        origin = Origin(self.name, self.shape, self.owner)
        return Job(self.file, self.offset, memory, self.size, self.row.number, target, op, grid, origin=origin)

    def jobs(self, memory: int, target: int) -> list[Job]:
        """Return the jobs that copy the tensor to an address; packed codes may need more than a single job."""
        if self.packed is None:
            return [self.job(memory, target)]
        return restore.restore_jobs(self.packed, memory, target, self.name, owner=self.owner)

    def work(self, op: int, memory: int, *, channels: Channels | None = None) -> Job:
        """Return a job for an operation without target dtype; packed codes must be `in_order`."""
        if self.packed is not None:
            ranges = (restore.whole(self.packed.packing),)
            numbers = memory, dtypes.F32.number, self.name
            (job,) = restore.restore_jobs(self.packed, *numbers, owner=self.owner, ranges=ranges)
            return job._replace(op=op, channels=channels)
        return self.job(memory, self.row.number, op)._replace(channels=channels)

    @property
    def in_order(self) -> bool:
        """True if bytes or codes are in the order of the values, so that any job can use the source."""
        return self.packed is None or not self.packed.packing.transpose


def in_file(owner: Any, name: str, file: WeightFile, index: int) -> Source | None:
    """Return a tensor in its file as a source; None unless it is in C order and little-endian."""
    layout = file.table.layout(index)
    if layout.strides is not None or layout.big_endian:
        return None
    return Source(name, file.table.shape(index), file.table.row(index), layout.begin, file, owner)


def of_packed(name: str, packed: Packed, owner: Any) -> Source:
    """Return a packed tensor as a source of its values; ``owner`` keeps the memory of the parts alive."""
    return Source(name, packed.packing.shape, dtypes.F32, 0, packed.parts[CODES].file, owner, packed)


def of_reals(name: str, x: Any, threads: int | None) -> Source:
    """Return an array of real numbers as a source: unchanged if the core reads its dtype, else as float32."""
    array = as_array(x, name)
    row = dtypes.row_of(array.dtype)
    if array.dtype.kind in "OSUMmcb" or (row is None and array.dtype.kind == "V"):
        raise TypeError(f"{subject(name)}{array.dtype} does not hold real numbers")
    if row is None or not row.floating or row.packed:
        row, array = dtypes.F32, astype(array, np.float32, threads=threads)
    return of_numbers(name, array, row, threads)


def of_numbers(name: str, array: Array, row: dtypes.Dtype, threads: int | None) -> Source:
    """Return an array as a source, copied if it is not C-contiguous or not in the machine's byte order."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.c_contiguous:
        array = astype(array, array.dtype, threads=threads)
    little = jobs.native_order(array)  # the core expects the byte order of files
    return Source(name, array.shape, row, address_of(little), None, little)


def of_array(name: str, value: Any) -> Source:
    """Return an array of any dtype of weight files as a source."""
    array = as_array(value, name)
    row = dtypes.row_of(array.dtype)
    if row is None or row.packed:
        raise TypeError(f"{subject(name)}weight files do not support dtype {array.dtype}")
    return of_numbers(name, array, row, None)


def memory_of(source: Source) -> Array:
    """Return the bytes of a source in memory."""
    array: Array = np.asarray(source.owner)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# ---- bytes in pieces: on several threads, in bounded memory, without mappings ----

# Bytes that each thread reads at a time: enough to amortize a read, and little compared with the memory of any machine.
PIECE = 4 << 20


def file_pieces(file: WeightFile, begin: int, end: int, buffer: Array | None = None) -> Iterator[memoryview]:
    """Yield the bytes [begin, end) of a file in pieces. Each piece overwrites the piece before."""
    step = WINDOW if file.remote else PIECE
    memory = np.empty(min(step, max(1, end - begin)), np.uint8) if buffer is None or file.remote else buffer
    for at in range(begin, end, step):
        size = min(step, end - at)
        Batch([Job(file, at, address_of(memory), size)]).run(threads=1)
        yield memory[:size].data


def source_pieces(source: Source) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces. Each piece overwrites the piece before."""
    if source.file is not None:
        yield from file_pieces(source.file, source.offset, source.offset + source.size)
    elif source.size:
        raw = memory_of(source)
        yield from (raw[at : at + PIECE].data for at in range(0, raw.size, PIECE))
