"""What the C core does to the bytes of one tensor: a job, and what describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ...base.arrays import Array
from ...base.native import lib
from .memory import address_of
from .weight_file import WeightFile


class JobGrid(NamedTuple):
    """One ``sl_grid``: a strided 2-D copy, whose elements are not contiguous on both sides.

    Attributes:
        rows: number of rows.
        columns: number of elements in each row.
        strides: in bytes: row and column of the source, row and column of the destination.
    """

    rows: int
    columns: int
    strides: tuple[int, int, int, int]

    def described(self) -> tuple[int, ...]:
        """The fields of an ``sl_grid``."""
        return self.rows, self.columns, *self.strides


class Channels(NamedTuple):
    """One ``sl_channels``: the per-axis scales of values, or the channels to compute absmax of.

    Attributes:
        number: number of channels.
        inner: number of consecutive elements (in C order) of one channel.
        factors: scales, f32 of shape [number]; None to compute absmax only.
    """

    number: int
    inner: int
    factors: Array | None = None

    def described(self) -> tuple[int, ...]:
        """The fields of an ``sl_channels``."""
        return self.number, self.inner, 0 if self.factors is None else address_of(self.factors)


class PreparedCodes(Protocol):
    """Codes, and the numbers that they stand for: what becomes an ``sl_packed`` just before its job runs."""

    @property
    def cost(self) -> int:
        """About the bytes that `prepare` allocates."""

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, from the job's offset on."""

    def stored(self) -> Mapping[str, tuple[Any, int, int]]:
        """What `prepare` reads from files: by role the file, the first byte, and one past the last one."""

    def moved(self, addresses: Mapping[str, int]) -> PreparedCodes:
        """The same, where parts of these roles are in memory."""

    def prepare(self) -> Mapping[str, Any]:
        """The fields of an ``sl_packed``; an array stands for the address of its first element, None for NULL."""


class Origin(NamedTuple):
    """The tensor that a job works on.

    Attributes:
        tensor: its name, for errors; "" for a single array.
        shape: its shape, so that errors can give the index of a value.
        owner: keeps the memory of the source alive.
        first: the element of the tensor that the job begins with.
    """

    tensor: str
    shape: tuple[int, ...] = ()
    owner: Any = None
    first: int = 0


class Job(NamedTuple):
    """One ``sl_job``.

    Attributes:
        file: the file of the source, None for memory; a handle of the C core's if there is no `WeightFile`.
        offset: in the file, or the address of the source.
        memory: address of the destination (of the source of a write).
        size: size of all elements at the source in bytes.
        source: number of the source's dtype.
        target: number of the destination's dtype, for operations that have one.
        op: the operation, ``lib.SL_OP_COPY`` and the like.
        grid: of a strided 2-D copy.
        channels: for operations that take channels.
        origin: the tensor; None if the file can find it by the failing byte.
        packed: for operations on packed codes; ``source`` is then F32, and ``size`` that of the values.
    """

    file: WeightFile | int | None
    offset: int
    memory: int
    size: int
    source: int = 0
    target: int = 0
    op: int = lib.SL_OP_COPY
    grid: JobGrid | None = None
    channels: Channels | None = None
    origin: Origin | None = None
    packed: PreparedCodes | None = None

    @property
    def files(self) -> list[WeightFile]:
        """The files that it reads from."""
        files = [self.file] if isinstance(self.file, WeightFile) else []
        if self.packed is not None:
            files += [file for file, _, _ in self.packed.stored().values() if file is not None]
        return files


def moving(source: int, target: int, grid: JobGrid | None = None) -> int:
    """The operation that moves values from one dtype to another: a strided 2-D copy if ``grid`` is given."""
    if grid is not None:
        return int(lib.SL_OP_GRID)
    return int(lib.SL_OP_COPY if source == target else lib.SL_OP_CONVERT)
