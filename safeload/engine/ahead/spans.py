"""Byte ranges of files as columns, to read many small tensors without an object for each.

Neighbouring ranges are read as a single range, and jobs are described to the core in columns too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.packing import SCHEMES
from ...stores.thread_group import Task, check_stopped
from ..read.tensors import Tensors
from ..run.job import Job, moving
from ..run.jobs import Batch, run_columns
from ..run.memory import address_of, aligned_bytes
from ..run.weight_file import WeightFile, is_remote
from .staging import IN_TURN, SMALLEST_BUFFER, Filled, Piece, Ring, filled_ahead, ring_for

# Bytes and elements of a block by dtype number; most dtypes have blocks of a single element.
_BYTES, _ELEMENTS = np.ones((2, 256), np.int64)
_QUANTIZING = (dtypes.of_number(number) for scheme in SCHEMES.values() for number in scheme.roundings.values())
for _row in (*dtypes.BY_NUMBER.values(), *_QUANTIZING):
    _BYTES[_row.number], _ELEMENTS[_row.number] = _row.block_bytes, _row.block


class Spans(NamedTuple):
    """Byte ranges of files or memory, read in order and converted to target dtypes."""

    files: Sequence[WeightFile | None]
    file: Array  # int64, index of the file
    begins: Array  # int64, first byte in the file, or address in memory
    sizes: Array  # int64, bytes in the file
    sources: Array  # uint8, dtype number in the file
    targets: Array  # uint8, dtype number of the result

    @property
    def lengths(self) -> Array:
        """Bytes of each result, int64."""
        _, _, _, sizes, sources, targets = self
        lengths: Array = sizes // _BYTES[sources] * _ELEMENTS[sources] // _ELEMENTS[targets] * _BYTES[targets]
        return lengths

    @classmethod
    def of(cls, tensors: Tensors, targets: Array | None = None) -> Spans:
        """Return the spans of `Tensors.whole`; ``targets`` are dtype numbers, None to convert nothing."""
        file, begins, sizes, numbers = tensors.ranges
        return cls(tensors.files, file, begins, sizes, numbers, numbers if targets is None else targets)

    def pick(self, rows: Array | slice) -> Spans:
        """Return the spans at these positions, in this order."""
        return Spans(self.files, *(column[rows] for column in self[1:]))

    def follows(self) -> Array:
        """Return a bool for each span except the first: True if it continues the previous span with equal dtypes."""
        _, file, begins, sizes, sources, targets = self
        alike: Array = (begins[1:] == begins[:-1] + sizes[:-1]) & (file[1:] == file[:-1])
        alike &= (sources[1:] == sources[:-1]) & (targets[1:] == targets[:-1])
        return alike

    def merged(self, first: Array) -> Spans:
        """Merge spans that follow each other; ``first`` are the positions of spans that begin a new range."""
        return self.pick(first)._replace(sizes=np.add.reduceat(self.sizes, first))

    def joined(self) -> Spans:
        """Return as few spans as possible with these bytes, without empty spans."""
        spans = self if self.sizes.all() else self.pick(self.sizes > 0)
        return spans.merged(np.flatnonzero(np.append(True, ~spans.follows()))) if spans.sizes.size else spans

    def divided(self, limit: int) -> Spans:
        """Divide spans at whole blocks so that no result has more than ``limit`` bytes."""
        sources, targets = self.sources, self.targets
        unit = np.lcm(_ELEMENTS[sources], _ELEMENTS[targets])
        step = limit // (unit // _ELEMENTS[targets] * _BYTES[targets])
        step_bytes = step * (unit // _ELEMENTS[sources] * _BYTES[sources])
        parts = -(-self.sizes // step_bytes)
        if not parts.size or int(parts.max()) <= 1:
            return self
        rows = np.repeat(np.arange(len(parts)), parts)
        before = (np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)) * step_bytes[rows]
        spans = self.pick(rows)
        sizes = np.minimum(spans.sizes - before, step_bytes[rows])
        return spans._replace(begins=spans.begins + before, sizes=sizes)

    def fill(self, buffer: Array, threads: int | None) -> int:
        """Read all spans into a buffer, in order, and return the number of bytes."""
        files, file, begins, sizes, sources, targets = self
        if not sizes.size:
            return 0
        lengths = self.lengths
        ends = np.cumsum(lengths)
        memory = address_of(buffer) + ends - lengths
        if any(is_remote(files[k]) for k in set(file.tolist())):
            rows = zip(*(column.tolist() for column in (file, begins, memory, sizes, sources, targets)), strict=True)
            jobs = (Job(files[k], at, to, n, x, y, moving(x, y)) for k, at, to, n, x, y in rows)
            Batch(jobs).run(threads=threads, progress=check_stopped)
        else:
            run_columns(
                files,
                file,
                offsets=begins,
                memory=memory,
                sizes=sizes,
                sources=sources,
                targets=targets,
                report=check_stopped,
                threads=threads,
            )
        return int(ends[-1])

    def read(self, threads: int | None) -> Generator[tuple[int, int]]:
        """Read all spans in order, ahead of the consumer unless there are few bytes.

        The next step may overwrite a range.
        """
        total = int(self.lengths.sum())
        if not total:
            return
        if total <= IN_TURN:
            buffer = aligned_bytes(max(SMALLEST_BUFFER, total))  # alive while the consumer uses its address
            yield address_of(buffer), self.joined().fill(buffer, threads)
            return
        ring = ring_for(total)
        filling = filled_ahead(self._tasks(ring, threads), ring, remote=any(map(is_remote, self.files)))
        with closing(filling):
            for filled in filling:
                [piece] = filled.pieces
                yield address_of(filled.array), piece.nbytes

    def _tasks(self, ring: Ring, threads: int | None) -> Iterator[Task]:
        spans = self.joined().divided(ring.size // ring.count)
        ends = np.cumsum(spans.lengths)
        begin = done = 0
        while begin < len(ends):
            end = int(np.searchsorted(ends, done + ring.size, side="right"))
            yield Task(ring.size, partial(_fill, spans.pick(slice(begin, end)), ring, threads))
            begin, done = end, int(ends[end - 1])


def _fill(spans: Spans, ring: Ring, threads: int | None) -> Filled:
    number, buffer = ring.take()
    return Filled(number, [Piece("", 0, spans.fill(buffer, threads), 0)], buffer)
