"""Stored parts of packed tensors in files, of which only the selected rows are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.packing import Part
from ..run import jobs
from ..run.job import Job, Origin
from ..run.memory import address_of, private_array
from ..run.rows import read_rows


class PartRows:
    """A part of a file. It is read when rows are selected, and at most once as a whole.

    Attributes:
        shape: of the array over the part
        dtype: of its elements
        size: number of elements
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._array: Array | None = None
        self.dtype = dtypes.array_dtype(part.row.number)
        self.shape = dtypes.array_shape(part.row, part.shape, part.end - part.begin)
        self.size = math.prod(self.shape)

    def whole(self) -> Array:
        """Return the part as an array."""
        if self._array is None:
            array = private_array(self.shape, self.dtype)
            if array.size:
                part = self._part
                origin = Origin(part.name, part.shape)
                jobs.Batch([Job(part.file, part.begin, address_of(array), array.nbytes, origin=origin)]).run()
            self._array = jobs.native_order(array)
        return self._array

    def along(self, runs: Sequence[slice], length: int) -> Array:
        """Return rows of the part, which is divided into ``length`` rows if its first axis has another length."""
        if self._array is not None:
            return picked(self._array, runs, length)
        divided = self.shape[:1] != (length,)
        shape = (self.size // max(1, length),) if divided else self.shape[1:]
        pitch = math.prod(shape) * self.dtype.itemsize
        positions = positions_of(runs)
        unique, inverse = np.unique(positions, return_inverse=True)
        origin = Origin(self._part.name, self._part.shape)
        rows = read_rows(self._part.file, self._part.begin, pitch, unique, origin=origin)
        if len(unique) < len(positions) or (inverse[1:] < inverse[:-1]).any():
            rows = rows[inverse]
        return jobs.native_order(rows.view(self.dtype).reshape(len(positions), *shape))

    def ranges(self, runs: Sequence[slice]) -> Array:
        """Return ranges of the elements in C order, one after the other."""
        if self._array is not None:
            return ranges_of(self._array, runs)
        part, size = self._part, self.dtype.itemsize
        array = private_array((sum(run.stop - run.start for run in runs),), self.dtype)
        batch, at = jobs.Batch(), address_of(array) if array.size else 0
        for run in runs:
            nbytes = (run.stop - run.start) * size
            if nbytes:
                origin = Origin(part.name, part.shape)
                batch.add(Job(part.file, part.begin + run.start * size, at, nbytes, origin=origin))
            at += nbytes
        batch.run()
        return jobs.native_order(array)


# A part in memory, or in a file.
AnyPart = Array | PartRows


def positions_of(runs: Sequence[slice]) -> Array:
    """Return the positions in runs."""
    return np.concatenate([np.arange(run.start, run.stop) for run in runs] or [np.empty(0, np.int64)])


def whole(part: AnyPart) -> Array:
    """Return a part as an array."""
    return part.whole() if isinstance(part, PartRows) else part


def along(part: AnyPart, runs: Sequence[slice], length: int) -> Array:
    """Return runs of the first axis of a part, which is divided into ``length`` rows if necessary."""
    return part.along(runs, length) if isinstance(part, PartRows) else picked(part, runs, length)


def ranges(part: AnyPart, runs: Sequence[slice]) -> Array:
    """Return ranges of the elements of a part in C order."""
    return part.ranges(runs) if isinstance(part, PartRows) else ranges_of(part, runs)


def picked(array: Array, runs: Sequence[slice], length: int) -> Array:
    """`along` for an array: a view of a single run."""
    if array.shape[:1] != (length,):
        array = array.reshape(length, array.size // max(1, length))
    view: Array = array[runs[0]] if len(runs) == 1 else array[positions_of(runs)]
    return view


def ranges_of(array: Array, runs: Sequence[slice]) -> Array:
    """`ranges` for an array: a view of a single run."""
    flat = array.reshape(-1)
    view: Array = flat[runs[0]] if len(runs) == 1 else flat[positions_of(runs)]
    return view
