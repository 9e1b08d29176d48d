"""Divides tensors into chunks, each of which is made by jobs of its own: a large tensor needs the memory of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...base import dtypes
from ...base.arrays import foreign_order
from ...base.packing import Packed, Packing, by_columns, row_unit
from ..codes.code_ranges import Range, flat_ranges, rows_apart, rows_range, values_before
from ..codes.restore import restore_jobs
from ..read.plan import Entry
from ..run.job import Job, moving


class Chunk(NamedTuple):
    """Consecutive bytes of a tensor's array.

    Attributes:
        entry: the tensor.
        begin: the first byte.
        nbytes: their number.
        source: what they are made of: a range of the bytes of the file, or of rows of codes.
    """

    entry: Entry
    begin: int
    nbytes: int
    source: tuple[int, int] | Range

    def jobs(self, memory: int) -> Iterable[Job]:
        """The jobs that make it at an address."""
        entry = self.entry
        assert entry.target is not None
        if isinstance(self.source, Range):
            assert entry.packed is not None
            # A range is written where it would be in the whole array.
            return restore_jobs(entry.packed, memory - self.begin, entry.target, entry.name, ranges=(self.source,))
        begin, size = self.source
        op = moving(entry.source, entry.target)
        return (Job(entry.file, begin, memory, size, entry.source, entry.target, op),)


def chunks_of(entry: Entry, most: int) -> Iterator[Chunk] | None:
    """Divides a tensor; None for one that can only be made as a whole.

    Args:
        entry: a tensor that is not empty.
        most: bytes of the largest chunk.
    """
    if entry.target is None or entry.strided or (foreign_order(False) and entry.dtype.itemsize > 1):
        return None
    if entry.packed is not None:
        return _of_rows(entry, entry.packed, most)
    row = dtypes.BY_NUMBER[entry.source]
    if entry.source == entry.target:
        stored = made = entry.dtype.itemsize
    else:
        stored, made = row.block_bytes, row.block * entry.dtype.itemsize
    return _of_bytes(entry, stored, made, most // made) if most >= made else None


def _of_bytes(entry: Entry, stored: int, made: int, step: int) -> Iterator[Chunk]:
    """Chunks of ``step`` blocks, each of which has ``stored`` bytes in the file and ``made`` in the array."""
    count = (entry.end - entry.begin) // stored
    for first in range(0, count, step):
        blocks = min(step, count - first)
        yield Chunk(entry, first * made, blocks * made, (entry.begin + first * stored, blocks * stored))


def _of_flat(entry: Entry, packing: Packing, most: int) -> Iterator[Chunk] | None:
    """Chunks of at most this many values."""
    element = entry.dtype.itemsize
    ranges = list(flat_ranges(packing, most))
    if ranges[0].columns_of(packing) > most:
        return None
    return (Chunk(entry, one.column * element, one.columns_of(packing) * element, one) for one in ranges)


def _of_rows(entry: Entry, packed: Packed, most: int) -> Iterator[Chunk] | None:
    """Chunks of whole matrices or, where these can be dequantized apart, of rows."""
    packing = packed.packing
    element = entry.dtype.itemsize
    matrix = packing.rows * packing.columns * element
    if not matrix:
        return None
    if packing.flat:
        return _of_flat(entry, packing, most // entry.dtype.itemsize)
    if matrix <= most:
        step = most // matrix
        ranges = (
            Range(first, min(step, packing.matrices - first), 0, packing.rows)
            for first in range(0, packing.matrices, step)
        )
    else:
        rows, across = packing.rows, packing.columns
        if by_columns(packing):
            rows, across = across, rows
        block = row_unit(packing)
        step = most // (across * element) // block * block
        if not step or not rows_apart(packing):
            return None
        ranges = (
            rows_range(packing, first, at, min(at + step, rows))
            for first in range(packing.matrices)
            for at in range(0, rows, step)
        )
    return (
        Chunk(
            entry,
            values_before(packing, one) * element,
            one.matrices * one.rows * one.columns_of(packing) * element,
            one,
        )
        for one in ranges
    )
