"""Tensors as sources of jobs: in an array, or in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, as_array
from ..base.file import WeightFile
from ..base.native import lib
from ..base.text import show
from ..errors import RangeError
from . import jobs
from .cast import astype
from .jobs import Job, Progress

_F32 = dtypes.BY_CODE["F32"]


class Source(NamedTuple):
    """Where a tensor's values are, in C order and little-endian: in memory or in a file.

    It holds no descriptor: a list of sources may have more files than a process descriptors.

    Attributes:
        name: for messages; "" for a single array.
        shape: logical shape.
        row: row of the dtype table.
        offset: in the file, or the address.
        file: None for memory.
        owner: keeps memory or file alive.
    """

    name: str
    shape: tuple[int, ...]
    row: dtypes.Dtype
    offset: int
    file: WeightFile | None
    owner: Any  # keeps memory alive

    @property
    def size(self) -> int:
        """Bytes."""
        return self.row.nbytes(math.prod(self.shape))

    def job(self, memory: int, target: int, *, grid: int = 0) -> Job:
        """What moves it to an address, as the dtype numbered ``target``; for `run`, which opens the file."""
        op = jobs.moving(self.row.number, target, grid)
        return Job(self._where, self.offset, memory, self.size, self.row.number, target, grid, op=op)

    def work(self, op: int, memory: int, *, channels: int = 0) -> Job:
        """An operation on its values whose result is of no other dtype than the operation's own; for `run`."""
        number = self.row.number
        return Job(self._where, self.offset, memory, self.size, number, number, channels=channels, op=op)

    @property
    def _where(self) -> int:
        """Where a job finds it: in memory, or in the file that `run` opens."""
        where: int = lib.SL_MEMORY if self.file is None else jobs.IN_FILE
        return where


def subject(name: str) -> str:
    """The tensor as messages begin with it; nothing for a single array."""
    return f"tensor {show(name)}: " if name else ""


def of_reals(name: str, x: Any, threads: int | None) -> Source:
    """An array of real numbers as a source: as it is where the core reads its dtype, else as float32.

    Raises:
        TypeError: no real numbers.
    """
    array = as_array(x, name)
    row = dtypes.BY_NAME.get(array.dtype.name)
    if array.dtype.kind in "OSUMmcb" or (row is None and array.dtype.kind == "V"):
        raise TypeError(f"{subject(name)}{array.dtype} holds no real numbers")
    direct = row is not None and row.floating and not row.packed and array.dtype.isnative
    if not direct or row is None:
        row, array = _F32, astype(array, np.float32, threads=threads)
    return of_numbers(name, array, row, threads)


def of_numbers(name: str, array: Array, row: dtypes.Dtype, threads: int | None) -> Source:
    """An array as it is; a copy where it is not C-contiguous or not in the machine's byte order."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.c_contiguous:
        array = astype(array, array.dtype, threads=threads)
    little = jobs.native_order(array)  # the core takes the byte order of files
    return Source(name, array.shape, row, address(little), None, little)


def of_array(name: str, value: Any) -> Source:
    """An array of any dtype that weights have.

    Raises:
        TypeError: it has another.
    """
    array = as_array(value, name)
    row = dtypes.BY_NAME.get(array.dtype.name)
    if row is None or row.packed:
        raise TypeError(f"{subject(name)}{array.dtype} is no dtype of weights")
    if row.floating:
        return of_reals(name, array, None)
    kept = np.ascontiguousarray(jobs.native_order(array))
    return Source(name, array.shape, row, address(kept), None, kept)


def address(array: Array) -> int:
    """Address of a contiguous array's first element, 0 where there is none."""
    return jobs.address_of(array) if array.size else 0


def run(
    sources: Sequence[Source],
    work: Sequence[Job],
    *,
    grids: Sequence[jobs.Grid] = (),
    channels: Sequence[jobs.Channels] = (),
    threads: int | None = None,
    progress: Progress = None,
) -> None:
    """Runs jobs, each of the source at its place.

    Raises:
        RangeError: a value that its target cannot hold, with tensor and index.
        FormatError: a file ends too early, with its path and the offset.
        OSError: a file cannot be read.
    """

    def where(job: int, position: int) -> tuple[str, str | None]:
        file = sources[job].file
        return file.path if file is not None else "", f"tensor {show(sources[job].name)}"

    try:
        jobs.run(
            work,
            where,
            files=[source.file for source in sources],
            grids=grids,
            channels=channels,
            threads=threads,
            progress=progress,
        )
    except jobs.Refused as refused:
        source = sources[refused.job]
        index = [int(k) for k in np.unravel_index(refused.element, source.shape)]
        raise RangeError(f"{subject(source.name)}element {index} {refused.reason}") from None
