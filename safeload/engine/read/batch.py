"""Execute read plans: read tensors into new arrays, into pools, or into the caller's arrays, in a single batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, ArraySpec, array_over, foreign_order
from ...base.packing import Packed, Part
from ...base.table import Scale
from ..run import jobs
from ..run.cast import astype
from ..run.job import Job, moving
from ..run.jobs import Batch
from ..run.memory import ALIGNMENT, POOLED_BELOW, address_of, aligned_bytes, paged_array, private_array
from ..run.progress import Progress
from ..run.weight_file import WeightFile
from .plan import CONVERT, DEQUANTIZE, EMPTY, READ, STRIDED, ReadPlan
from .tensors import packed_of

if TYPE_CHECKING:
    from .buffer_pool import Recycler

# Size of the largest pool, which a single surviving small tensor can keep alive.
POOL_SIZE = 16 << 20

_F32 = dtypes.BY_CODE["F32"]


class Reads:
    """Collect tensors, then read them in a single batch.

    ``memory`` must return C-contiguous arrays, aligned to `ALIGNMENT` and without shared bytes.
    """

    def __init__(
        self, out: Mapping[str, Array] | None, memory: Recycler | None = None, *, direct: bool = False
    ) -> None:
        self.arrays: dict[str, Array] = {}  # of all added tensors, by name; `run` fills them
        self._out = out
        self._memory = memory
        self._direct = direct
        self._batch = Batch(direct=direct)
        self._shared: list[tuple[ReadPlan, Block]] = []

    def add(self, plan: ReadPlan) -> None:
        """Add the tensors of a plan, except views."""
        for k in plan.of_way(EMPTY):
            self.arrays[plan.names[k]] = self._array(plan.names[k], plan.shapes[k], plan.dtype(k))
        plain, converted = plan.of_way(READ), plan.of_way(CONVERT)
        if STRIDED in plan.ways:
            alone, blocks = group_blocks(plan.file, {k: plan.spec(k) for k in plan.of_way(STRIDED)}, self._batch)
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
        """Add a packed tensor, dequantized to a dtype."""
        from ..codes import restore  # imported by whatever read the table

        shape, dtype = packed.packing.shape, dtypes.array_dtype(target.number)
        array = self.arrays[name] = self._array(name, shape, dtype)
        if array.size:
            for job in restore.restore_jobs(packed, self._batch.into(array), target.number, name):
                self._batch.add(job)

    def stored(self, part: Part) -> Array:
        """Return an aligned array that `run` will fill with the unchanged bytes of a stored tensor."""
        size = part.end - part.begin
        dtype, shape = dtypes.array_dtype(part.row.number), dtypes.array_shape(part.row, part.shape, size)
        array = array_over(aligned_bytes(size), dtype, shape, 0)
        if size:
            number = part.row.number
            self._batch.add(Job(part.file, part.begin, self._batch.into(array), size, number, number))
        return array

    def _array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the caller's array for a tensor, or a new array."""
        if self._out is not None:
            return self._out[name]
        return private_array(shape, dtype) if self._memory is None else self._memory.array(shape, dtype)

    def _read(self, plan: ReadPlan, k: int) -> None:
        """Add the job that reads a tensor into its own array."""
        begin, source, target = plan.begins[k], plan.sources[k], plan.targets[k]
        if self._direct and source == target and self._out is None and self._memory is None:
            array = paged_array(plan.shapes[k], plan.dtype(k), begin)
        else:
            array = self._array(plan.names[k], plan.shapes[k], plan.dtype(k))
        self.arrays[plan.names[k]] = array
        place = plan.file, begin, self._batch.into(array), plan.ends[k] - begin
        self._batch.add(Job(*place, source, target, moving(source, target)))

    def _place(self, plan: ReadPlan, rows: Sequence[int], *, converted: bool) -> None:
        """Add jobs that read tensors into new memory: an array per large tensor, pools for small tensors.

        Small tensors that are adjacent in the file are adjacent in the pool and share a job. Converted tensors share a
        job only if they have the same dtype.
        """
        if len(rows) == 1:
            self._read(plan, rows[0])
        if len(rows) < 2:
            return
        sources, begins, ends = plan.sources, plan.begins, plan.ends
        least = 1 if self._memory is None else ALIGNMENT
        steps = {source: _step(source, to, least) for source, to in set(zip(sources, plan.targets, strict=True))}
        pool = _Pool([], [], [])
        at, previous, dtype = 0, -1, -1
        for k in rows:
            begin, end, source = begins[k], ends[k], sources[k]
            mask, block_bytes, array_bytes = steps[source]
            size = (end - begin) // block_bytes * array_bytes
            if size >= POOLED_BELOW:
                self._read(plan, k)
                continue
            if at + size + 2 * ALIGNMENT > POOL_SIZE:
                self._fill(plan, pool, at)
                pool = _Pool([], [], [])
                at, previous = 0, -1
            if begin != previous or at & mask or (converted and source != dtype):
                # The same address modulo ALIGNMENT as in the file: tensors aligned in the file stay aligned.
                at += -at % ALIGNMENT if converted or begin & mask else (begin - at) % ALIGNMENT
                pool.runs.append([k, begin, end, at])
            else:
                pool.runs[-1][2] = end
            pool.members.append(k)
            pool.places.append(at)
            at, previous, dtype = at + size, end, source
        if pool.members:
            self._fill(plan, pool, at)

    def _fill(self, plan: ReadPlan, pool: _Pool, size: int) -> None:
        """Add the jobs that read small tensors into a pool, and the arrays over the pool."""
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
        """True if the system refused a direct read."""
        return self._batch.refused

    def run(self, threads: int | None, progress: Progress) -> None:
        """Read all added tensors."""
        self._batch.run(threads=threads, progress=progress)
        for plan, block in self._shared:
            block.swap()
            for k, spec in block.members.items():
                shared = self._out is None and self._memory is None
                out = None if shared else self._array(plan.names[k], spec.shape, spec.dtype)
                self.arrays[plan.names[k]] = block.finish(spec, out, threads)


class _Pool(NamedTuple):
    """Small tensors that share memory."""

    members: list[int]  # positions in the plan
    places: list[int]  # offsets in the memory
    runs: list[list[int]]  # per job: first member, first byte in the file, one past the last byte, offset in the memory


def _step(source: int, target: int, least: int) -> tuple[int, int, int]:
    """Return address bits to be zero in an aligned array, and the bytes of a block in the file and in memory."""
    dtype = dtypes.array_dtype(target)
    mask = max(dtype.alignment, least) - 1
    if source == target:
        return mask, 1, 1
    row = dtypes.BY_NUMBER[source]
    return mask, row.block_bytes, row.block * dtype.itemsize


def over(
    buffer: Any, kinds: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]], places: Sequence[int]
) -> list[Array]:
    """Return arrays in C order over parts of a buffer, at byte offsets ``places``."""
    try:
        return list(map(np.ndarray, shapes, kinds, repeat(buffer), places))
    except ValueError:  # again, to find the array
        return [array_over(buffer, *place) for place in zip(kinds, shapes, places, strict=True)]


def read_scale(file: WeightFile, scale: Scale) -> Array:
    """Read the scales of an int8 tensor."""
    number = _F32.number
    spec = ArraySpec(dtypes.array_dtype(number), scale.shape, scale.begin, scale.end, number, number)
    return jobs.read_small(file, spec)


# ---- non-contiguous, big-endian and overlapping tensors ----


class Block:
    """A byte range that is read once, for all tensors that share it."""

    def __init__(self, file: WeightFile, begin: int, end: int, members: dict[int, ArraySpec]) -> None:
        self.members = members
        self._file = file
        self._begin = begin
        self._end = end
        self._swap = _swap(next(iter(members.values())))
        self._memory: Array = np.empty(0, np.uint8)

    def read(self, batch: Batch) -> None:
        """Add the job that reads the range into memory in which every member is aligned.

        The member with the largest elements determines the alignment. Each member starts a whole number of its own
        elements after the start of the storage, so members with equal or smaller elements are aligned too.
        """
        size = self._end - self._begin
        largest = max(self.members.values(), key=lambda spec: dtypes.TABLE[spec.source].bits)
        raw = private_array((size + ALIGNMENT,), np.dtype(np.uint8))
        start = -(address_of(raw) + largest.begin - self._begin) % ALIGNMENT
        self._memory = raw[start : start + size]
        batch.add(Job(self._file, self._begin, address_of(self._memory), size))

    def swap(self) -> None:
        """Swap the bytes that were read if their order is not this machine's."""
        if self._swap > 1:
            self._memory.view(f"u{self._swap}").byteswap(inplace=True)

    def finish(self, spec: ArraySpec, out: Array | None, threads: int | None) -> Array:
        """Return the array of a member after reading: a view, a converted array, or ``out``, filled."""
        offset = spec.begin - self._begin
        if spec.source != spec.target and spec.strides is None:
            array = private_array(spec.shape, spec.dtype) if out is None else out
            batch = Batch()
            place = None, address_of(self._memory) + offset, batch.into(array), spec.end - spec.begin
            batch.add(Job(*place, spec.source, spec.target, moving(spec.source, spec.target)))
            batch.run(threads=threads)
            return array
        view = array_over(self._memory, dtypes.array_dtype(spec.source), spec.shape, offset, spec.strides)
        if spec.source != spec.target:
            return astype(view, spec.dtype, out=out, threads=threads)
        if out is not None:
            out[...] = view
            return out
        return view if view.flags.aligned else view.copy()


def group_blocks(file: WeightFile, specs: Mapping[int, ArraySpec], batch: Batch) -> tuple[list[int], list[Block]]:
    """Group tensors of a file into blocks, and add the jobs that read the blocks.

    Tensors that share bytes share memory and keep their strides, unless they are converted. All other tensors become
    C-contiguous arrays of their own.

    Empty tensors are not allowed; plain ones (contiguous, little-endian, without aliases) are returned apart.
    """
    groups: list[list[int]] = []
    swap, reach = 0, -1
    for k in sorted(specs, key=lambda k: (_swap(specs[k]), specs[k].begin)):
        if groups and _swap(specs[k]) == swap and specs[k].begin < reach:
            groups[-1].append(k)
            reach = max(reach, specs[k].end)
        else:
            groups.append([k])
            swap, reach = _swap(specs[k]), specs[k].end
    plain, blocks = [], []
    for group in groups:
        if len(group) == 1 and _is_plain(specs[group[0]]):
            plain += group
        else:
            begin, end = specs[group[0]].begin, max(specs[k].end for k in group)
            block = Block(file, begin, end, {k: specs[k] for k in group})
            block.read(batch)
            blocks.append(block)
    return plain, blocks


def _is_plain(layout: ArraySpec) -> bool:
    return layout.strides is None and not layout.big_endian


def _swap(layout: ArraySpec) -> int:
    """Return the size of the numbers to byte-swap; 1 if there is nothing to swap."""
    return dtypes.TABLE[layout.source].swap if foreign_order(layout.big_endian) else 1
