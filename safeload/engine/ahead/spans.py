"""Ranges of files as columns: reads very many small tensors, in their order, without an object for each.

Ranges that are neighbours in a file and stay neighbours become one. Jobs are described to the core in columns too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.cached import cached_property
from ...stores.thread_group import REMOTE_WORKERS, Check, Prefetch, Task
from ..read.tensors import Tensors
from ..run.job import Job, moving
from ..run.jobs import Batch, move
from ..run.memory import address_of, aligned_bytes
from ..run.weight_file import WeightFile, is_remote
from .staging import BUFFERS, IN_TURN, SMALLEST_BUFFER, buffer_size, nothing

# Bytes of an element by the number of its dtype; 0 for elements that share bytes, and for blocks.
_BYTES = np.zeros(256, np.int64)
for _row in dtypes.TABLE:
    _BYTES[_row.number] = 0 if _row.packed else _row.block_bytes


class Spans:
    """Ranges of files, each with elements of one dtype that become elements of another.

    Args:
        files: the files; None for memory.
        file: int64, index of the file of each range.
        begins: int64, its first byte there; an address in memory.
        sizes: int64, its bytes there.
        sources: uint8, number of the dtype of its elements there.
        targets: uint8, number of the dtype that they become.

    Attributes:
        targets: uint8, number of the dtype that they become.
    """

    def __init__(
        self,
        files: Sequence[WeightFile | None],
        file: Array,
        begins: Array,
        sizes: Array,
        sources: Array,
        targets: Array,
    ) -> None:
        self.files = files
        self.columns = file, begins, sizes, sources, targets
        self.targets = targets

    @cached_property
    def lengths(self) -> Array:
        """Bytes that each range becomes, int64."""
        _, _, sizes, sources, targets = self.columns
        lengths: Array = sizes // np.maximum(_BYTES[sources], 1) * _BYTES[targets]
        return lengths

    @classmethod
    def of(cls, tensors: Tensors, targets: Array | None = None) -> Spans:
        """The bytes of plain tensors; ``targets`` are numbers of dtypes, None to convert nothing."""
        file, begins, sizes, numbers = tensors.ranges
        return cls(tensors.files, file, begins, sizes, numbers, numbers if targets is None else targets)

    def __len__(self) -> int:
        return len(self.columns[2])

    def pick(self, rows: Array | slice) -> Spans:
        """Some of them, in another order."""
        return Spans(self.files, *[column[rows] for column in self.columns])

    def follows(self) -> Array:
        """bool, for each but the first: whether it begins where the one before it ends, and has the same dtypes."""
        file, begins, sizes, sources, targets = self.columns
        alike: Array = (begins[1:] == begins[:-1] + sizes[:-1]) & (file[1:] == file[:-1])
        alike &= (sources[1:] == sources[:-1]) & (targets[1:] == targets[:-1])
        return alike

    def merged(self, first: Array) -> Spans:
        """The same bytes in fewer ranges.

        Args:
            first: indices of those that begin a new range; all others follow.
        """
        file, begins, sizes, sources, targets = self.columns
        ends = np.add.reduceat(sizes, first)
        return Spans(self.files, file[first], begins[first], ends, sources[first], targets[first])

    def joined(self) -> Spans:
        """The same bytes in as few ranges as possible, without empty ones."""
        sizes = self.columns[2]
        some = self if sizes.all() else self.pick(sizes > 0)
        return some.merged(np.flatnonzero(np.concatenate([[True], ~some.follows()]))) if len(some) else some

    def divided(self, most: int) -> Spans:
        """The same bytes in ranges of at most ``most`` bytes of the result each, at whole elements."""
        if not len(self) or int(self.lengths.max()) <= most:
            return self
        step = most // np.maximum(_BYTES[self.columns[4]], 1)
        items = np.maximum(_BYTES[self.columns[3]], 1)
        step_bytes = step * items
        parts = -(-self.columns[2] // step_bytes)
        rows = np.repeat(np.arange(len(self)), parts)
        number = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
        file, begins, sizes, sources, targets = (column[rows] for column in self.columns)
        before = number * step_bytes[rows]
        return Spans(self.files, file, begins + before, np.minimum(sizes - before, step_bytes[rows]), sources, targets)

    def fill(self, buffer: Array, threads: int | None, check: Check = nothing) -> int:
        """Reads all of them into a buffer, one after the other. Returns the number of bytes.

        Args:
            buffer: uint8, contiguous, large enough.
            threads: None: chosen automatically.
            check: called after each time slice.

        Raises:
            FormatError, OSError: a file cannot be read.
        """
        if not len(self):
            return 0
        ends = np.cumsum(self.lengths)
        memory = address_of(buffer) + ends - self.lengths
        file, begins, sizes, sources, targets = self.columns
        if any(is_remote(self.files[k]) for k in set(file.tolist())):
            rows = zip(*(column.tolist() for column in (file, begins, memory, sizes, sources, targets)), strict=True)
            jobs = (Job(self.files[k], at, to, n, x, y, moving(x, y)) for k, at, to, n, x, y in rows)
            Batch(jobs).run(threads=threads, progress=lambda done, total: check())
        else:
            move(
                self.files,
                file,
                offsets=begins,
                memory=memory,
                sizes=sizes,
                sources=sources,
                targets=targets,
                threads=threads,
                check=check,
            )
        return int(ends[-1])

    def read(self, threads: int | None) -> Generator[tuple[int, int]]:
        """What they become, one after the other, as ranges of memory, each of which the next may overwrite.

        The bytes are read ahead unless they are few.

        Args:
            threads: for reading and converting; None: chosen automatically.

        Yields:
            Address and size.

        Raises:
            FormatError, OSError: a file cannot be read.
        """
        total = int(self.lengths.sum())
        if not total:
            return
        if total <= IN_TURN:
            buffer = aligned_bytes(max(SMALLEST_BUFFER, total))  # alive while the consumer uses its address
            yield _fill(self.joined(), buffer, threads, nothing)
            return
        buffers = [aligned_bytes(buffer_size(total)) for _ in range(BUFFERS)]
        workers = REMOTE_WORKERS if any(map(is_remote, self.files)) else 1
        limit = (len(buffers) - 1) * buffers[0].size
        ahead: Prefetch[tuple[int, int]] = Prefetch(self._tasks(buffers, threads), limit, workers=workers)
        with closing(ahead) as filled:
            yield from filled

    def _tasks(self, buffers: Sequence[Array], threads: int | None) -> Iterator[Task]:
        size = buffers[0].size
        some = self.joined().divided(size // BUFFERS)
        ends = np.cumsum(some.lengths)
        numbers = cycle(range(len(buffers)))
        begin = done = 0
        while begin < len(some):
            end = int(np.searchsorted(ends, done + size, side="right"))
            buffer = buffers[next(numbers)]
            yield Task(size, partial(_fill, some.pick(slice(begin, end)), buffer, threads))
            begin, done = end, int(ends[end - 1])


def _fill(some: Spans, buffer: Array, threads: int | None, check: Check) -> tuple[int, int]:
    return address_of(buffer), some.fill(buffer, threads, check)
