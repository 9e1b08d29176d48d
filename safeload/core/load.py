"""Load tensors of open files: views of mapped files, and a batch that reads and converts all other tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter, eq
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import UnsupportedError, exported
from . import dtypes, jobs
from .arrays import Array, ArraySpec, array_over, check_disjoint, check_fits, check_out_names, foreign_order, over
from .files import Access, mapping_of
from .jobs import Batch, Job, moving
from .memory import (
    ALIGNMENT,
    HUGE_FROM,
    POOLED_BELOW,
    aligned_bytes,
    check_backend,
    check_threads,
    private_array,
    thread_count,
)
from .native import address_of
from .packing import INT8, Packed, advice_for
from .progress import Progress, reporter
from .resident import views_of
from .table import overlap_groups
from .tensors import CONVERT, EMPTY, READ, STRIDED, VIEW, ReadPlan, Tensors, decide, viewable
from .text import show
from .weight_file import WeightFile, is_remote

if TYPE_CHECKING:
    from .quantized_tensor import QuantizedTensor

# Target dtypes of loading, in the order of messages.
_TARGETS = tuple(row for row in reversed(dtypes.TABLE) if dtypes.F64.converts_to(row))

# `safe_open` reads smaller tensors and slices with any backend: a view would save less than the mapping costs, and a
# system call costs less than a batch of jobs.
VIEWED_FROM = {"mmap": 127 << 10, "auto": 127 << 10, "pread": HUGE_FROM, "direct": HUGE_FROM}

# Dtypes for `parse_target`.
DtypeLike: TypeAlias = str | type[Any] | np.dtype[Any]


@exported()
class LoadStats(NamedTuple):
    """Statistics of the last load.

    Attributes:
        bytes: size of the arrays.
        tensors: number of tensors.
        seconds: wall-clock time.
        backend: "mmap", "pread" or "direct"; "pread" also if the system refused the requested mapping or direct reads;
            "remote" if a file came over the network.
        reason: why ``backend="auto"`` chose it; "" if the caller did.

    Example:
        >>> import safeload
        >>> with safeload.open("tiny-llama") as checkpoint:
        ...     _ = checkpoint.load(backend="pread")
        >>> checkpoint.last_load.tensors, checkpoint.last_load.bytes, checkpoint.last_load.backend
        (30, 246656, 'pread')
    """

    bytes: int
    tensors: int
    seconds: float
    backend: str
    reason: str = ""


def parse_target(dtype: Any) -> dtypes.Dtype | None:
    """Return the target dtype of a load; None to convert nothing."""
    if dtype is None:
        return None
    try:
        row = dtypes.parse(dtype, _TARGETS)
    except TypeError:
        if (advice := advice_for(dtype)) is None:
            raise
        raise TypeError(f"unknown dtype {show(dtype)}: it is a quantization scheme, {advice}") from None
    if row not in _TARGETS:
        advice = advice_for(row.name)
        quantized = "" if advice is None else f"; to quantize, {advice}"
        raise UnsupportedError(f"cannot load as {row.name}; supported: {', '.join(targets())}{quantized}")
    return row


def targets() -> list[str]:
    """Return the dtype names that `parse_target` accepts."""
    return [row.name for row in _TARGETS]


def load_tensors(
    tensors: Tensors,
    *,
    backend: str,
    dtype: Any = None,
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
    mappings: dict[WeightFile, Any] | None = None,
    access: Access = "write",
) -> tuple[dict[str, Any], LoadStats]:
    """Load tensors as arrays or quantized tensors, in order. Shared bytes are shared memory with any backend."""
    check_backend(backend)
    check_threads(threads)
    target = parse_target(dtype)
    started = time.perf_counter()
    names, reason = tensors.names, ""
    if backend == "auto":
        backend, reason, threads = automatic(tensors, threads)
    remote = tensors.remote
    verified = [file for file in dict.fromkeys(file for _, file, _ in tensors) if file.verified] if remote else []
    if verified:  # hashed on several threads, before the first tensor is made
        from .thread_group import each  # only here: few programs verify

        stores: list[Any] = [file.store for file in verified]
        count = thread_count(sum(file.size for file in verified), threads)
        each(lambda store: store.verify(alone=len(stores) < count), stores, max(1, count))
    if out is not None:
        check_out_names(out, names, "load")
        backend = "pread" if backend == "mmap" else backend
    arrays, allowed = deliver(
        tensors,
        target=target,
        view=access if backend == "mmap" else None,
        direct=backend == "direct",
        mappings=mappings,
        out=out,
        threads=threads,
        progress=progress,
    )
    if access == "read":
        freeze(arrays.values())
    if not all(map(eq, arrays, names)):  # views come first, then the tensors that were read, file by file
        arrays = {name: arrays[name] for name in names}
    nbytes = sum(map(attrgetter("nbytes"), arrays.values()))
    if remote and not all(file.verified for file in tensors.files):
        backend = "remote"
    elif remote or not allowed:
        reason = f"{reason}, and the system refused {backend}" if reason and not allowed and not remote else reason
        backend = "pread"
    return arrays, LoadStats(nbytes, len(arrays), time.perf_counter() - started, backend, reason)


# From this share of the bytes in the page cache, mapping is fastest; up to this share, reading past the cache is.
_WARM, _COLD = 0.9, 0.1


def automatic(tensors: Tensors, threads: int | None = None) -> tuple[str, str, int | None]:
    """Choose the backend for ``"auto"``; return it, the reason, and the number of threads.

    A page fault of a network file system is a request of a few pages, and a read one of megabytes; waiting for several
    at once takes more threads than processors. The bytes between the first and the last tensor of a file stand for all.
    """
    total = cached = pages = 0
    for part in tensors.by_file():
        file, (_, _, begins, ends) = part.files[0], part.columns
        if file.remote:
            return "pread", "a file is behind a URL or in memory", threads
        network = file.local.network
        if network is not None:
            count = thread_count(sum(ends) - sum(begins), threads, direct=True)
            return "pread", f"{file.path} is on {network}, which is read in large pieces", count
        begin, size = min(begins), max(ends) - min(begins)
        resident = file.local.resident(begin, size)
        if resident is None:
            return "pread", "the system does not tell which pages are in its cache", threads
        total, cached, pages = total + size, cached + resident, pages | file.local.pages
    share = cached / total if total else 1.0
    chosen = "mmap" if share >= _WARM and not pages else "direct" if share <= _COLD else "pread"
    return chosen, f"{share:.0%} of the bytes are in the page cache", threads


def access_of(writable: bool, out: Any) -> Access:
    """Return whether the arrays of a load can be written to."""
    if not writable and out is not None:
        raise ValueError("writable=False and out= exclude each other: out= has the caller's arrays")
    return "either" if writable else "read"


def freeze(values: Iterable[Any]) -> None:
    """Make arrays read-only, also those of quantized tensors."""
    for value in values:
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        else:
            freeze(value.roles.values())


def load_all(file: WeightFile, backend: str, access: Access = "write") -> dict[str, Array]:
    """Return all tensors of a file without quantized tensors, by name in the order of their bytes."""
    if backend == "mmap" and file.table.plain:
        buffer = mapping_of(file.store, access)
        if buffer is not None:
            return views_of(file.table, buffer)
    arrays: dict[str, Array]
    arrays, _ = load_tensors(Tensors.in_file(file), backend=backend, access=access)
    return arrays


# ---- one pass: views of mapped files, and a batch of jobs for all other tensors ----

# Allocates arrays.
Memory: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]


def deliver(
    tensors: Tensors,
    *,
    target: dtypes.Dtype | None = None,
    view: Access | None = None,
    direct: bool = False,
    mappings: dict[WeightFile, Any] | None = None,
    out: Mapping[str, Array] | None = None,
    memory: Memory | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> tuple[dict[str, Any], bool]:
    """Return arrays by name, in any order, and False if a view or direct read was refused; ``out`` is checked first."""
    if len(tensors) == 1 and target is None and out is None and progress is None:
        array = _single(tensors, view, mappings, threads)
        if array is not None:
            return {tensors.names[0]: array}, True
    mappings = {} if mappings is None else mappings
    known = set(mappings)
    tensors, packed = tensors.without_packed(target)
    plans: list[ReadPlan] = []
    delivered: dict[str, Any] = {}
    allowed = True
    for file_tensors in tensors.by_file():
        plan = decide(file_tensors, target, view is not None)
        if VIEW in plan.ways:
            viewed = sum(plan.ends[k] - plan.begins[k] for k in plan.of_way(VIEW)) if plan.file.verified else 0
            small = plan.file.verified and 2 * viewed < plan.file.size  # it would stay in memory for this part
            buffer = None if small or view is None else mapping(plan.file, mappings, view)
            if buffer is None:
                allowed &= small
                plan = decide(file_tensors, target, False)
            else:
                delivered.update(_views(plan, buffer))
        plans.append(plan)
    if out is not None:
        _check_out(plans, packed, target, out)
    to_read = [plan for plan in plans if plan.ways.count(VIEW) < len(plan.ways)]
    reading = False
    if to_read or packed:
        reads = Reads(delivered, out, memory, direct=direct)
        for plan in to_read:
            reads.add(plan)
        for name, tensor in packed.items():
            if target is not None:
                reads.restore(name, tensor, target)
            else:
                delivered[name] = reads.parts(name, tensor, mappings, view)
        reading = not view or bool(reads.batch.jobs)
        if reading:
            reads.run(threads, progress)
            allowed &= not reads.batch.refused
    for plan in plans:
        if plan.file.table.quantized:
            _wrap(plan, delivered)
    for file in mappings:
        if file.verified and file not in known:  # its memory belongs to the views, which their owner may change
            file.store.forget()  # type: ignore[attr-defined]
    total = 0 if reading or not progress else sum(array.nbytes for array in delivered.values())
    if total:
        with reporter(progress, total) as report:
            report(total)
    return delivered, allowed


def _single(
    tensors: Tensors, view: Access | None, mappings: dict[WeightFile, Any] | None, threads: int | None
) -> Array | None:
    """Return a single contiguous tensor without the cost of columns; None if it needs a plan."""
    ((_, file, index),) = tensors
    if file.table.shaped or file.table.quantized or file.verified:
        return None
    spec = file.table.layout(index)
    size = spec.end - spec.begin
    if not size:
        return None
    if not view:
        # A small read needs no threads, but `thread_count` checks SAFELOAD_NUM_THREADS.
        return jobs.read_small(file, *spec[:4]) if size < HUGE_FROM and thread_count(size, threads) else None
    buffer = mapping(file, mappings, view) if viewable(spec.dtype, spec.begin) else None
    return None if buffer is None else array_over(buffer, spec.dtype, spec.shape, spec.begin)


def mapping(file: WeightFile, mappings: dict[WeightFile, Any] | None, access: Access) -> Any:
    """Return the mapping of a file; None if its store has none, or the system refuses it."""
    buffer = None if mappings is None else mappings.get(file)
    if buffer is None:
        buffer = mapping_of(file.store, access)
        if buffer is not None and mappings is not None:
            buffer = mappings.setdefault(file, buffer)  # another thread may have been faster
    return buffer


def _views(plan: ReadPlan, buffer: Any) -> Iterable[tuple[str, Array]]:
    which = plan.of_way(VIEW)
    if plan.file.table.shaped:
        specs = [(plan.names[k], plan.spec(k)) for k in which]
        return [(name, array_over(buffer, s.dtype, s.shape, s.begin, s.strides)) for name, s in specs]
    columns: Any = plan.names, dtypes.array_dtypes(plan.sources), plan.shapes, plan.begins
    if len(which) < len(plan.ways):
        columns = ([column[k] for k in which] for column in columns)
    names, kinds, shapes, begins = columns
    return zip(names, over(buffer, kinds, shapes, begins), strict=True)


def _wrap(plan: ReadPlan, delivered: dict[str, Any]) -> None:
    """Wrap the raw data of quantized tensors in `QuantizedTensor` if they are not converted."""
    from .quantized_tensor import QuantizedTensor, read_scale  # imported by whatever read the table

    table = plan.file.table
    for k, (name, index) in enumerate(zip(plan.names, plan.tensors.indices, strict=True)):
        row, scale = dtypes.BY_NUMBER[plan.sources[k]], table.scales.get(index)
        if plan.sources[k] != plan.targets[k]:
            continue
        if row.blocked:
            delivered[name] = QuantizedTensor(row.name, table.shape(index), delivered[name])
        elif scale is not None:
            factors = read_scale(plan.file, scale)
            delivered[name] = QuantizedTensor(INT8, plan.shapes[k], delivered[name], factors, scale.axis)


def _check_out(
    plans: Sequence[ReadPlan], packed: Mapping[str, Packed], target: dtypes.Dtype | None, out: Mapping[str, Array]
) -> None:
    """Refuse arrays of ``out`` that are missing, do not fit, share memory, or map a file to be read."""
    for plan in plans:
        for k, (name, shape) in enumerate(zip(plan.names, plan.shapes, strict=True)):
            check_fits(name, plan.dtype(k), shape, out)
    for name, tensor in packed.items():
        if target is None:
            raise stored_in_parts(name, tensor)
        check_fits(name, dtypes.array_dtype(target.number), tensor.packing.shape, out)

    def contents() -> dict[str, Any]:
        return {**packed, **{name: (plan.file, plan.spec(k)) for plan in plans for k, name in enumerate(plan.names)}}

    names = list(chain(packed, *(plan.names for plan in plans)))
    check_disjoint(out if len(out) == len(names) else {name: out[name] for name in names}, contents)
    parts = (part.file for tensor in packed.values() for part in tensor.parts.values())
    refuse_own_files(out, [*(plan.file for plan in plans), *parts])


def refuse_own_files(out: Mapping[str, Array], files: Iterable[WeightFile]) -> None:
    """Refuse arrays that map a file to be read: filling such an array would change tensors before they are read."""
    mapped: dict[str, str] = {}
    for name, array in out.items():
        base: Any = array
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        if isinstance(base, np.memmap) and base.mode != "c" and base.filename is not None:
            mapped.setdefault(os.fspath(base.filename), name)
    places: dict[tuple[int, int], str] = {}  # by device and inode: each file is asked once
    for place in dict.fromkeys(file.path for file in files if not is_remote(file)) if mapped else ():
        with suppress(OSError):  # the file was removed
            status = os.stat(place)
            places.setdefault((status.st_dev, status.st_ino), place)
    for path, name in mapped.items():
        with suppress(OSError):
            status = os.stat(path)
            place = places.get((status.st_dev, status.st_ino), "")
            if place:
                raise ValueError(f"out: {show(name)} maps {show(place)}, which is being read; pass an array in memory")


def stored_in_parts(name: str, packed: Packed) -> ValueError:
    """Return the error for an array of ``out`` if its packed tensor is not dequantized."""
    return ValueError(f"out: tensor {show(name)} is stored as {packed.packing.label}: pass dtype= to dequantize it")


# ---- reading ----


# Size of the largest pool, which a single surviving small tensor can keep alive.
POOL_SIZE = 16 << 20


class Reads:
    """Collect tensors, then read them in a single batch; ``memory`` must align arrays to `ALIGNMENT`."""

    def __init__(
        self,
        arrays: dict[str, Any],  # gets all added tensors by name; `run` fills them
        out: Mapping[str, Array] | None,
        memory: Memory | None = None,
        *,
        direct: bool = False,
    ) -> None:
        self.batch = Batch(direct=direct)
        self._arrays, self._out, self._memory, self._direct = arrays, out, memory, direct
        self._blocks: list[Block] = []

    def add(self, plan: ReadPlan) -> None:
        """Add the tensors of a plan, except views."""
        for k in plan.of_way(EMPTY):
            self._arrays[plan.names[k]] = self._array(plan.names[k], plan.shapes[k], plan.dtype(k))
        kinds = [plan.of_way(READ), plan.of_way(CONVERT)]
        if STRIDED in plan.ways:
            alone, blocks = group_blocks(plan, self.batch)
            kinds.append(alone)
            self._blocks += blocks
        kinds = [*filter(None, kinds)]
        rows = kinds[0] if len(kinds) == 1 else sorted(chain(*kinds))
        if self._out is None and len(rows) > 1:
            self._place(plan, rows)
        else:
            for k in rows:
                self._read(plan, k)

    def restore(self, name: str, packed: Packed, target: dtypes.Dtype) -> None:
        """Add a packed tensor, dequantized to a dtype."""
        from . import restore  # imported by whatever read the table

        shape, dtype = packed.packing.shape, dtypes.array_dtype(target.number)
        array = self._arrays[name] = self._array(name, shape, dtype)
        if array.size:
            self.batch.jobs += restore.restore_jobs(packed, self.batch.into(array), target.number, name)

    def parts(self, name: str, packed: Packed, mappings: dict[WeightFile, Any], view: Access | None) -> QuantizedTensor:
        """Add a packed tensor, unchanged: views of mapped files, or aligned arrays."""
        from .quantized_tensor import QuantizedTensor  # imported by whatever read the table

        arrays = {}
        for role, (_, file, row, shape, begin, end) in packed.parts.items():
            size, dtype = end - begin, dtypes.array_dtype(row.number)
            shape = dtypes.array_shape(row, shape, size)
            buffer = None
            if view is not None and (not file.verified or file in mappings) and size and viewable(dtype, begin):
                buffer = mapping(file, mappings, view)
            if buffer is not None:
                arrays[role] = array_over(buffer, dtype, shape, begin)
                continue
            arrays[role] = array_over(aligned_bytes(size), dtype, shape, 0)
            if size:
                self.batch.jobs.append(Job(file, begin, self.batch.into(arrays[role]), size, row.number, row.number))
        return QuantizedTensor.of_parts(packed.packing, packed.names(name), arrays)

    def _array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], begin: int = 0) -> Array:
        """Return the caller's array for a tensor, or a new array; for ``begin`` see `private_array`."""
        if self._out is not None:
            return self._out[name]
        return private_array(shape, dtype, begin) if self._memory is None else self._memory(shape, dtype)

    def _read(self, plan: ReadPlan, k: int) -> None:
        """Add the job that reads a tensor into its own array."""
        name, begin, source, target = plan.names[k], plan.begins[k], plan.sources[k], plan.targets[k]
        at = begin if self._direct and source == target else 0
        array = self._arrays[name] = self._array(name, plan.shapes[k], dtypes.array_dtype(target), at)
        place = plan.file, begin, self.batch.into(array), plan.ends[k] - begin
        self.batch.jobs.append(Job(*place, source, target, moving(source, target)))

    def _place(self, plan: ReadPlan, rows: Iterable[int]) -> None:
        """Add jobs that read tensors into new memory; small neighbours in the file share a pool and a job."""
        sources, begins, ends = plan.sources, plan.begins, plan.ends
        least = 1 if self._memory is None else ALIGNMENT
        # By dtype: bits to be zero in an address, bytes of a block in file and memory, and the dtype if converted.
        steps: dict[int, tuple[int, int, int, int]] = {}
        for source, to in set(zip(sources, plan.targets, strict=True)):
            row, dtype = dtypes.BY_NUMBER[source], dtypes.array_dtype(to)
            sizes = (1, 1, 0) if source == to else (row.block_bytes, row.block * dtype.itemsize, source + 1)
            steps[source] = max(dtype.alignment, least) - 1, *sizes
        members: dict[int, int] = {}  # of the pool: offsets by position in the plan
        runs: list[list[int]] = []  # per job: first member, first byte in the file, one past the last, offset
        at, previous, values = 0, -1, -1
        for k in rows:
            begin, end, source = begins[k], ends[k], sources[k]
            mask, block_bytes, array_bytes, converted = steps[source]
            size = (end - begin) // block_bytes * array_bytes
            if size >= POOLED_BELOW:
                self._read(plan, k)
                continue
            if at + size + 2 * ALIGNMENT > POOL_SIZE:
                self._fill(plan, members, runs, at)
                members, runs, at, previous = {}, [], 0, -1
            if begin != previous or at & mask or converted != values:
                # The same address modulo ALIGNMENT as in the file: tensors aligned in the file stay aligned.
                at += -at % ALIGNMENT if converted or begin & mask else (begin - at) % ALIGNMENT
                runs.append([k, begin, end, at])
            else:
                runs[-1][2] = end
            members[k] = at
            at, previous, values = at + size, end, converted
        if members:
            self._fill(plan, members, runs, at)

    def _fill(self, plan: ReadPlan, members: Mapping[int, int], runs: Iterable[Sequence[int]], size: int) -> None:
        """Add the jobs that read small tensors into a pool, and the arrays over the pool."""
        memory = aligned_bytes(size) if self._memory is None else self._memory((size,), np.dtype(np.uint8))
        base = address_of(memory)
        file, names, shapes, sources, targets = plan.file, plan.names, plan.shapes, plan.sources, plan.targets
        for k, begin, end, at in runs:
            source, target = sources[k], targets[k]
            self.batch.jobs.append(Job(file, begin, base + at, end - begin, source, target, moving(source, target)))
        kinds = [dtypes.array_dtype(targets[k]) for k in members]
        arrays = over(memory, kinds, [shapes[k] for k in members], [*members.values()])
        self.batch.results(arrays)
        self._arrays.update(zip([names[k] for k in members], arrays, strict=True))

    def run(self, threads: int | None, progress: Progress) -> None:
        """Read all added tensors."""
        self.batch.run(threads=threads, progress=progress)
        own = self._out is not None or self._memory is not None  # no tensor shares memory with another
        for block in self._blocks:
            block.swap()
            for name, spec in block.members.items():
                out = self._array(name, spec.shape, spec.dtype) if own else None
                self._arrays[name] = block.finish(spec, out, threads)


# ---- non-contiguous, big-endian and overlapping tensors ----


class Block:
    """A byte range that is read once for all tensors that share it, aligned for the largest elements."""

    def __init__(self, file: WeightFile, members: dict[str, ArraySpec], batch: Batch) -> None:
        self.members = members
        specs = members.values()
        self._begin = begin = min(spec.begin for spec in specs)
        self._swap = _swap(next(iter(specs)))
        size = max(spec.end for spec in specs) - begin
        largest = max(specs, key=lambda spec: dtypes.TABLE[spec.source].bits)
        raw = private_array((size + ALIGNMENT,), np.dtype(np.uint8))
        start = -(address_of(raw) + largest.begin - begin) % ALIGNMENT
        self._memory = raw[start : start + size]
        batch.jobs.append(Job(file, begin, address_of(self._memory), size))

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
            batch.jobs.append(Job(*place, spec.source, spec.target, moving(spec.source, spec.target)))
            batch.run(threads=threads)
            return array
        view = array_over(self._memory, dtypes.array_dtype(spec.source), spec.shape, offset, spec.strides)
        if spec.source != spec.target:
            from .cast import astype  # only here: few files have such tensors

            return astype(view, spec.dtype, out=out, threads=threads)
        if out is not None:
            out[...] = view
            return out
        return view if view.flags.aligned else view.copy()


def group_blocks(plan: ReadPlan, batch: Batch) -> tuple[list[int], list[Block]]:
    """Group `STRIDED` tensors into blocks with jobs, and return plain tensors (contiguous, little-endian) apart."""
    rows = sorted(plan.of_way(STRIDED), key=plan.begins.__getitem__)
    sharing = overlap_groups([plan.begins[k] for k in rows], [plan.ends[k] for k in rows])
    groups: dict[tuple[int, int], dict[int, ArraySpec]] = {}
    for place, k in enumerate(rows):
        spec = plan.spec(k)
        groups.setdefault((_swap(spec), sharing.get(place, [place])[0]), {})[k] = spec
    plain, blocks = [], []
    for specs in groups.values():
        (k, spec), *rest = specs.items()
        if not rest and spec.strides is None and not spec.big_endian:
            plain.append(k)
        else:
            blocks.append(Block(plan.file, {plan.names[k]: spec for k, spec in specs.items()}, batch))
    return plain, blocks


def _swap(layout: ArraySpec) -> int:
    """Return the size of the numbers to byte-swap; 1 if there is nothing to swap."""
    return dtypes.TABLE[layout.source].swap if foreign_order(layout.big_endian) else 1
