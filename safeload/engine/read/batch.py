"""Reads tensors into new arrays, into pools, or into the caller's arrays, all in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, ArraySpec, array_over
from ...base.packing import Packed, Part
from ...base.table import Scale
from ..codes import restore
from ..run import jobs
from ..run.job import Job, moving
from ..run.jobs import Batch
from ..run.memory import ALIGNMENT, POOLED_BELOW, address_of, aligned_bytes, paged_array, private_array
from ..run.progress import Progress
from ..run.weight_file import WeightFile
from . import strided
from .plan import CONVERT, DEQUANTIZE, EMPTY, READ, STRIDED, ReadPlan
from .tensors import packed_of

if TYPE_CHECKING:
    from .buffer_pool import Recycler

# Size of the largest pool, which is what one surviving small tensor can keep alive.
POOL_SIZE = 16 << 20

_F32 = dtypes.BY_CODE["F32"]


class Reads:
    """Collects the tensors to read, and reads them in one batch.

    Args:
        out: arrays to fill, by name; None for new ones.
        memory: of new arrays, each of which is then C-contiguous, aligned to `ALIGNMENT`, and shares no bytes with
            others; None for `private_array`.
        direct: whether to read past the page cache where the system allows it.

    Attributes:
        arrays: the arrays of all tensors added, by name; `run` fills them.
    """

    def __init__(
        self, out: Mapping[str, Array] | None, memory: Recycler | None = None, *, direct: bool = False
    ) -> None:
        self.arrays: dict[str, Array] = {}
        self._out = out
        self._memory = memory
        self._direct = direct
        self._batch = Batch(direct=direct)
        self._shared: list[tuple[ReadPlan, strided.Block]] = []

    def add(self, plan: ReadPlan) -> None:
        """Adds the tensors of a plan that are not views."""
        for k in plan.of_way(EMPTY):
            self.arrays[plan.names[k]] = self._array(plan.names[k], plan.shapes[k], plan.dtype(k))
        plain, converted = plan.of_way(READ), plan.of_way(CONVERT)
        if STRIDED in plan.ways:
            alone, blocks = strided.plan(plan.file, {k: plan.spec(k) for k in plan.of_way(STRIDED)}, self._batch)
            self._shared += [(plan, block) for block in blocks]
            plain = sorted([*plain, *(k for k in alone if plan.sources[k] == plan.targets[k])])
            converted = sorted([*converted, *(k for k in alone if plan.sources[k] != plan.targets[k])])
        if self._out is None:
            self._place(plan, plain, converted=False)
            self._place(plan, converted, converted=True)
        else:
            for k in (*plain, *converted):
                self._read(plan, k)
        for k in plan.of_way(DEQUANTIZE):
            packed = packed_of(plan.file, plan.tensors.indices[k])
            assert packed is not None
            self.restore(plan.names[k], packed, dtypes.BY_NUMBER[plan.targets[k]])

    def restore(self, name: str, packed: Packed, target: dtypes.Dtype) -> None:
        """Adds a packed tensor, dequantized to a dtype."""
        shape, dtype = packed.packing.shape, dtypes.array_dtype(target.number)
        array = self.arrays[name] = self._array(name, shape, dtype)
        if array.size:
            for job in restore.restore_jobs(packed, self._batch.into(array), target.number, name):
                self._batch.add(job)

    def stored(self, part: Part) -> Array:
        """An aligned array that will hold the bytes of a stored tensor unchanged."""
        size = part.end - part.begin
        dtype, shape = dtypes.array_dtype(part.row.number), dtypes.array_shape(part.row, part.shape, size)
        array = array_over(aligned_bytes(size), dtype, shape, 0)
        if size:
            number = part.row.number
            self._batch.add(Job(part.file, part.begin, self._batch.into(array), size, number, number))
        return array

    def _array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The array for one tensor: the caller's, or a new one."""
        if self._out is not None:
            return self._out[name]
        return private_array(shape, dtype) if self._memory is None else self._memory.array(shape, dtype)

    def _read(self, plan: ReadPlan, k: int) -> None:
        """Adds the job that reads one tensor into an array of its own."""
        begin, source, target = plan.begins[k], plan.sources[k], plan.targets[k]
        if self._direct and source == target and self._out is None and self._memory is None:
            array = paged_array(plan.shapes[k], plan.dtype(k), begin)
        else:
            array = self._array(plan.names[k], plan.shapes[k], plan.dtype(k))
        self.arrays[plan.names[k]] = array
        place = plan.file, begin, self._batch.into(array), plan.ends[k] - begin
        self._batch.add(Job(*place, source, target, moving(source, target)))

    def _place(self, plan: ReadPlan, which: Sequence[int], *, converted: bool) -> None:
        """Adds jobs that read tensors into new memory: one array per large tensor, a pool for small ones.

        Small tensors that are adjacent in the file are adjacent in the pool and share a job; converted ones only if
        they have the same dtype.
        """
        if len(which) == 1:
            self._read(plan, which[0])
        if len(which) < 2:
            return
        sources, begins, ends = plan.sources, plan.begins, plan.ends
        least = 1 if self._memory is None else ALIGNMENT
        steps = {source: _step(source, to, least) for source, to in set(zip(sources, plan.targets, strict=True))}
        pool = _Pool([], [], [])
        at, previous, kind = 0, -1, -1
        for k in which:
            begin, end, source = begins[k], ends[k], sources[k]
            mask, stored, made = steps[source]
            size = (end - begin) // stored * made
            if size >= POOLED_BELOW:
                self._read(plan, k)
                continue
            if at + size + 2 * ALIGNMENT > POOL_SIZE:
                self._fill(plan, pool, at)
                pool = _Pool([], [], [])
                at, previous = 0, -1
            if begin != previous or at & mask or (converted and source != kind):
                # The same address modulo ALIGNMENT as in the file: tensors that are aligned there are aligned here.
                at += -at % ALIGNMENT if converted or begin & mask else (begin - at) % ALIGNMENT
                pool.runs.append([k, begin, end, at])
            else:
                pool.runs[-1][2] = end
            pool.members.append(k)
            pool.places.append(at)
            at, previous, kind = at + size, end, source
        if pool.members:
            self._fill(plan, pool, at)

    def _fill(self, plan: ReadPlan, pool: _Pool, size: int) -> None:
        """Adds the jobs that read small tensors into a shared pool, and the arrays over it."""
        memory = aligned_bytes(size) if self._memory is None else self._memory.array((size,), np.dtype(np.uint8))
        base = address_of(memory)
        file, names, shapes, sources, targets = plan.file, plan.names, plan.shapes, plan.sources, plan.targets
        for k, begin, end, at in pool.runs:
            source, target = sources[k], targets[k]
            self._batch.add(Job(file, begin, base + at, end - begin, source, target, moving(source, target)))
        kinds = [dtypes.array_dtype(targets[k]) for k in pool.members]
        arrays = over(memory, kinds, [shapes[k] for k in pool.members], pool.places)
        self._batch.results(arrays)
        self.arrays.update(zip([names[k] for k in pool.members], arrays, strict=True))

    @property
    def refused(self) -> bool:
        """Whether a file that was to be read past the page cache had to be read through it."""
        return self._batch.refused

    def run(self, threads: int | None, progress: Progress) -> None:
        """Reads all tensors added."""
        self._batch.run(threads=threads, progress=progress)
        for plan, block in self._shared:
            block.swap()
            for k, spec in block.members.items():
                shared = self._out is None and self._memory is None
                given = None if shared else self._array(plan.names[k], spec.shape, spec.dtype)
                self.arrays[plan.names[k]] = block.finish(spec, given, threads)


class _Pool(NamedTuple):
    """Small tensors that share memory.

    Attributes:
        members: their positions in the plan.
        places: their offsets in the memory.
        runs: for each job: first member, first byte in the file, one past the last byte, offset in the memory.
    """

    members: list[int]
    places: list[int]
    runs: list[list[int]]


def _step(source: int, target: int, least: int) -> tuple[int, int, int]:
    """Bits that must be zero in the address of an array; bytes of one block in the file; their size in memory.

    Args:
        source: number of the dtype in the file.
        target: number of the dtype of the array.
        least: the least alignment.
    """
    dtype = dtypes.array_dtype(target)
    mask = max(dtype.alignment, least) - 1
    if source == target:
        return mask, 1, 1
    row = dtypes.BY_NUMBER[source]
    return mask, row.block_bytes, row.block * dtype.itemsize


def over(
    buffer: Any, kinds: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]], places: Sequence[int]
) -> list[Array]:
    """Arrays in C order over parts of a buffer.

    Raises:
        UnsupportedError: see `array_over`.
    """
    try:
        return list(map(np.ndarray, shapes, kinds, repeat(buffer), places))
    except ValueError:  # once more, to find out which
        return [array_over(buffer, *one) for one in zip(kinds, shapes, places, strict=True)]


def read_scale(file: WeightFile, scale: Scale) -> Array:
    """The scales of an int8 tensor."""
    number = _F32.number
    spec = ArraySpec(dtypes.array_dtype(number), scale.shape, scale.begin, scale.end, number, number)
    return jobs.read_small(file, spec)
