"""Tensors as sources of jobs, wherever they are: in an array, in a file, in a checkpoint of any format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import dtypes, jobs
from ._native import lib
from .arrays import as_array
from .casting import astype
from .checkpoint import Checkpoint
from .errors import RangeError
from .files import Array, WeightFile
from .jobs import Job, Progress
from .packed import grouping
from .packed.grouping import Codes
from .quantized import QuantizedTensor
from .text import show

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


def tensors(given: Checkpoint | Mapping[str, Any]) -> dict[str, Source | QuantizedTensor]:
    """Each tensor as a source, or as what it is if it is quantized already."""
    if isinstance(given, Checkpoint):
        return {name: of_file(given, name, file, index) for name, file, index in given._parts()}
    return {name: v if isinstance(v, QuantizedTensor) else of_array(name, v) for name, v in given.items()}


def codes_of(given: Checkpoint | Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Mapping[str, Codes]:
    """The tensors that hold codes, whose values mean nothing without their scale.

    Args:
        given: a checkpoint, which knows its own configuration, or a dict of arrays.
        config: parsed ``config.json`` of a dict; None without one.
    """
    if isinstance(given, Checkpoint):
        return given._codes()
    stored = {}
    for name, value in given.items():
        row, shape = _stored(value)
        if row is not None:
            stored[name] = grouping.Stored(row, shape)
    return grouping.find(stored, config)


def _stored(value: Any) -> tuple[dtypes.Dtype | None, tuple[int, ...]]:
    """Dtype and shape of a value of a dict; a scale may be a number, too. No dtype: it is no array of weights."""
    if isinstance(value, QuantizedTensor):
        return None, ()
    try:
        array = np.asarray(value)
    except Exception:  # whatever its own __array__ raises: whoever reads it says so
        return None, ()
    return dtypes.BY_NAME.get(array.dtype.name), array.shape


def refuse_codes(given: Checkpoint | Mapping[str, Any], names: Iterable[str], what: str) -> None:
    """Refuses what takes codes for numbers.

    Args:
        given: all tensors there are: the scale of one may be any of them.
        names: those that are asked for.
        what: the operation, as messages name it.

    Raises:
        UnsupportedError: one of them holds codes; the message names tensor, scale and quant_method.
    """
    grouping.refuse(codes_of(given), names, what, given._path if isinstance(given, Checkpoint) else "")


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


def of_file(opened: Checkpoint, name: str, file: WeightFile, index: int) -> Source | QuantizedTensor:
    """A tensor of a checkpoint; what is quantized, or not in C order in its file, is read now."""
    table = file.table
    if table.row(index).blocked or table.scale(index) is not None:
        value = opened.load([name], backend="pread")[name]
        assert isinstance(value, QuantizedTensor)
        return value
    stored = in_place(opened, name, file, index)
    if stored is None:  # in memory, in C order; rare
        array: Array = np.ascontiguousarray(opened.load([name], backend="pread")[name])
        return of_array(name, array)
    return stored


def in_place(opened: Checkpoint, name: str, file: WeightFile, index: int) -> Source | None:
    """A tensor's bytes where they are in its file; None where they are not in C order and little-endian."""
    layout = file.layout(index)
    if layout.strides is not None or layout.big_endian:
        return None
    table = file.table
    return Source(name, table.shape(index), table.row(index), layout.begin, file, opened)


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
