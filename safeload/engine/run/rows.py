"""Read rows of files: records at a constant distance. Neighbouring rows share a read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ...base.arrays import Array
from .job import Job, Origin
from .jobs import Batch
from .memory import address_of, private_array
from .weight_file import WeightFile

# Gaps of up to this many bytes are read and dropped: the system reads whole pages anyway.
_NEAR = 4096
# Bytes of a read with gaps, and of all such reads at a time.
_BLOCK, _STAGED = 1 << 20, 64 << 20

# Numbers of the first position and of one past the last, and whether rows are missing between them.
_Span = tuple[int, int, bool]


def read_rows(
    file: WeightFile,
    begin: int,
    pitch: int,
    positions: Array,
    *,
    width: int | None = None,
    origin: Origin | None = None,
) -> Array:
    """Return rows as uint8 of shape [positions, width]. ``positions`` are ascending and distinct."""
    width = pitch if width is None else width
    rows = private_array((len(positions), width), np.dtype(np.uint8))
    if not rows.size:
        return rows
    batch = Batch()
    staged: list[tuple[Array, slice]] = []
    size = 0
    for first, last, gaps in _spans(positions, pitch, width):
        at, extent = int(positions[first]), int(positions[last - 1] - positions[first]) * pitch + width
        if not gaps:
            memory = address_of(rows[first:last])
            batch.add(Job(file, begin + at * pitch, memory, extent, origin=origin))
            continue
        if size + extent > _STAGED and size:
            _run(batch, staged, rows, positions)
            batch, staged, size = Batch(), [], 0
        block = np.empty((int(positions[last - 1]) - at + 1, pitch), np.uint8)
        batch.add(Job(file, begin + at * pitch, address_of(block), extent, origin=origin))
        staged.append((block, slice(first, last)))
        size += block.nbytes
    _run(batch, staged, rows, positions)
    return rows


def _run(batch: Batch, staged: list[tuple[Array, slice]], rows: Array, positions: Array) -> None:
    batch.run()
    for block, which in staged:
        chosen = positions[which]
        rows[which] = block[chosen - chosen[0], : rows.shape[1]]


def _spans(positions: Array, pitch: int, width: int) -> Iterator[_Span]:
    """Divide positions into reads: rows without gaps, or rows of a block with small gaps."""
    steps, blocks = np.diff(positions), positions // max(1, _BLOCK // pitch)
    adjacent, in_block = steps * pitch == width, blocks[1:] == blocks[:-1]
    near = in_block & (steps * pitch - width <= _NEAR)
    gaps = np.concatenate([[0], np.cumsum(~adjacent)])  # before each row
    for first, last in _divided(0, len(positions), ~(adjacent | near)):
        if gaps[last - 1] == gaps[first]:
            yield first, last, False
            continue
        for begin, end in _divided(first, last, ~in_block[first : last - 1]):
            yield begin, end, bool(gaps[end - 1] != gaps[begin])


def _divided(first: int, last: int, between: Array) -> Iterator[tuple[int, int]]:
    """Divide [first, last) where ``between`` is true for an item and the next."""
    edges = (np.flatnonzero(between) + first + 1).tolist()
    return pairwise((first, *edges, last))
