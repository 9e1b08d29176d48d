"""Describe jobs: operations of the C core on the bytes of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...base.arrays import Array
from ...base.native import ffi, lib
from .weight_file import WeightFile

# Bytes to plan, or to read, at a time from the network: enough for many requests.
WINDOW = 64 << 20


class JobGrid(NamedTuple):
    """An ``sl_grid``: a strided 2-D copy between elements that are not contiguous on both sides."""

    rows: int
    columns: int  # elements in each row
    strides: tuple[int, int, int, int]  # in bytes: row and column of the source, row and column of the destination

    def prepare(self) -> dict[str, Any]:
        """Return the fields of an ``sl_grid``."""
        return dict(zip(_GRID_FIELDS, (self.rows, self.columns, *self.strides), strict=True))


_GRID_FIELDS = [name for name, _ in ffi.typeof("sl_grid").fields]


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


class Updates(NamedTuple):
    """An ``sl_merge``: the changes of a matrix, one after another."""

    columns: int  # of the matrix
    updates: Sequence[Update]

    def prepare(self) -> dict[str, Any]:
        """Return the fields of an ``sl_merge``."""
        floats = partial(ffi.from_buffer, "float[]")
        rows = [(left.shape[1], floats(left), floats(panels), scaling) for left, panels, scaling in self.updates]
        table = np.frombuffer(ffi.buffer(ffi.new("sl_update[]", rows)), np.uint8) if rows else None
        return {"columns": self.columns, "count": len(rows), "updates": table}


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

    @property
    def files(self) -> list[WeightFile]:
        """The files to read."""
        files = [self.file] if isinstance(self.file, WeightFile) else []
        if self.packed is not None:
            files += [file for file, _, _ in self.packed.stored().values() if file is not None]
        return files


def moving(source: int, target: int, grid: JobGrid | None = None) -> int:
    """Return the operation that moves values from one dtype to another."""
    if grid is not None:
        return int(lib.SL_OP_GRID)
    return int(lib.SL_OP_COPY if source == target else lib.SL_OP_CONVERT)
