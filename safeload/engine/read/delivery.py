"""Deliver tensors of open files as arrays: views of mapped files, and a batch that reads all other tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, array_over, not_an_array, refuse_masked
from ...base.packing import Packed
from ...base.scheme import INT8
from ...base.text import show
from ...stores.local import mapping_of
from ..run import jobs
from ..run.memory import HUGE_FROM, check_disjoint
from ..run.progress import Progress, reporter
from ..run.threads import thread_count
from ..run.weight_file import WeightFile, is_remote
from .batch import Reads, over, read_scale
from .plan import EMPTY, VIEW, ReadPlan, decide, viewable
from .tensors import Tensors

if TYPE_CHECKING:
    from ..codes.quantized_tensor import QuantizedTensor
    from .buffer_pool import Recycler

# The value of a loaded tensor.
Value: TypeAlias = "Array | QuantizedTensor"


def deliver(
    tensors: Tensors,
    *,
    target: dtypes.Dtype | None = None,
    view: bool = False,
    direct: bool = False,
    mappings: dict[WeightFile, Any] | None = None,
    out: Mapping[str, Array] | None = None,
    memory: Recycler | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> tuple[dict[str, Any], bool]:
    """Return arrays (or quantized tensors) by name, in any order, and False if a view or direct read was refused.

    Refused files are read through the page cache.

    All arrays of ``out`` are checked before the first byte is written.
    """
    if len(tensors) == 1 and target is None and out is None and progress is None:
        array = _single(tensors, view, mappings, threads)
        if array is not None:
            return {tensors.names[0]: array}, True
    mappings = {} if mappings is None else mappings
    known = set(mappings) if any(file.verified for file in tensors.files) else None
    tensors, packed = tensors.without_packed()
    plans = [_decide(file_tensors, target, view) for file_tensors in tensors.by_file()]
    if out is not None:
        _check_out(plans, packed, target, out)
    delivered, to_read, allowed = _map(plans, target, mappings)
    reading = False
    if to_read or packed:
        reads = Reads(out, memory, direct=direct)
        for plan in to_read:
            reads.add(plan)
        for name, tensor in packed.items():
            if target is not None:
                reads.restore(name, tensor, target)
            else:
                delivered[name] = _parts_of(name, tensor, reads, mappings if view else None)
        reading = not view or any(way not in (VIEW, EMPTY) for plan in to_read for way in set(plan.ways))
        if reading or packed:
            reads.run(threads, progress)
            reading = True
            allowed &= not reads.refused
        delivered = _joined(delivered, reads.arrays)
    for plan in plans:
        if plan.file.table.quantized:
            _wrap(plan, delivered)
    if known is not None:
        _give_away(file for file in mappings if file not in known)
    total = 0 if reading or not progress else sum(array.nbytes for array in delivered.values())
    if total:
        with reporter(progress, total) as report:
            report(total)
    return delivered, allowed


def _decide(tensors: Tensors, target: dtypes.Dtype | None, view: bool) -> ReadPlan:
    """Like `decide`, but without views that would keep a verified file in memory for a small part of it."""
    plan = decide(tensors, target, view)
    if view and plan.file.verified and 2 * _viewed(plan) < plan.file.size:
        return decide(tensors, target, False)
    return plan


def _viewed(plan: ReadPlan) -> int:
    return sum(plan.ends[k] - plan.begins[k] for k in plan.of_way(VIEW))


def _give_away(files: Iterable[WeightFile]) -> None:
    """Leave the memory of verified files to the views of it, which their owner may change."""
    for file in files:
        if file.verified:
            file.store.forget()  # type: ignore[attr-defined]


def _map(
    plans: Iterable[ReadPlan], target: dtypes.Dtype | None, mappings: dict[WeightFile, Any] | None
) -> tuple[dict[str, Any], list[ReadPlan], bool]:
    """Return the views of all plans by name, the plans with tensors to read, and False if a mapping was refused."""
    views: dict[str, Any] = {}
    to_read, allowed = [], True
    for plan in plans:
        if VIEW in plan.ways:
            buffer = _mapping(plan.file, mappings)
            if buffer is not None:
                views = _joined(views, _views(plan, buffer))
            else:
                allowed = False
                plan = decide(plan.tensors, target, False)
        if plan.ways.count(VIEW) < len(plan.ways):
            to_read.append(plan)
    return views, to_read, allowed


def _parts_of(name: str, packed: Packed, reads: Reads, mappings: dict[WeightFile, Any] | None) -> QuantizedTensor:
    """Return a packed tensor unchanged: views of mapped files, or arrays that ``reads`` fills."""
    from ..codes.quantized_tensor import QuantizedTensor  # imported by whatever read the table

    arrays = {}
    for role, part in packed.parts.items():
        dtype = dtypes.array_dtype(part.row.number)
        known = mappings is not None and (not part.file.verified or part.file in mappings)
        mapped = known and part.begin < part.end and viewable(dtype, part.begin)
        buffer = _mapping(part.file, mappings) if mapped else None
        if buffer is None:
            arrays[role] = reads.stored(part)
        else:
            arrays[role] = array_over(
                buffer, dtype, dtypes.array_shape(part.row, part.shape, part.end - part.begin), part.begin
            )
    return QuantizedTensor.of_parts(packed.packing, packed.names(name), arrays)


def _joined(arrays: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the union of two dicts, reusing either dict to save a copy: neither may be used afterwards."""
    if not arrays:
        return more
    arrays.update(more)
    return arrays


def _single(tensors: Tensors, view: bool, mappings: dict[WeightFile, Any] | None, threads: int | None) -> Array | None:
    """Return a single contiguous tensor without the cost of columns; None if it needs a plan."""
    _, file, index = tensors[0]
    if file.table.shaped or file.table.quantized:
        return None
    spec = file.layout(index)
    if spec.begin == spec.end:
        return None
    size = spec.end - spec.begin
    if file.verified:
        return None
    if not view:
        # A small read needs no threads, but `thread_count` checks SAFELOAD_NUM_THREADS.
        return jobs.read_small(file, spec) if size < HUGE_FROM and thread_count(size, threads) else None
    buffer = _mapping(file, mappings) if viewable(spec.dtype, spec.begin) else None
    return None if buffer is None else array_over(buffer, spec.dtype, spec.shape, spec.begin)


def _mapping(file: WeightFile, mappings: dict[WeightFile, Any] | None) -> Any:
    """Return the mapping of a file; None if its store has none, or the system refuses it."""
    buffer = None if mappings is None else mappings.get(file)
    if buffer is None:
        buffer = mapping_of(file.store)
        if buffer is not None and mappings is not None:
            mappings[file] = buffer
    return buffer


def _views(plan: ReadPlan, buffer: Any) -> dict[str, Array]:
    """Return the views of a mapped file by name."""
    which = plan.of_way(VIEW)
    if plan.file.table.shaped:
        specs = [(plan.names[k], plan.spec(k)) for k in which]
        return {name: array_over(buffer, s.dtype, s.shape, s.begin, s.strides) for name, s in specs}
    kinds = dtypes.array_dtypes(plan.sources)
    if len(which) == len(plan.ways):
        return dict(zip(plan.names, over(buffer, kinds, plan.shapes, plan.begins), strict=True))
    columns = zip(plan.names, kinds, plan.shapes, plan.begins, plan.ways, strict=True)
    chosen = [(name, kind, shape, begin) for name, kind, shape, begin, way in columns if way == VIEW]
    names, kinds_of, shapes, begins = zip(*chosen, strict=True)
    return dict(zip(names, over(buffer, kinds_of, shapes, begins), strict=True))


def _wrap(plan: ReadPlan, delivered: dict[str, Any]) -> None:
    """Wrap the raw data of quantized tensors in `QuantizedTensor` if they are not converted."""
    from ..codes.quantized_tensor import QuantizedTensor  # imported by whatever read the table

    table = plan.file.table
    for k, (name, index) in enumerate(zip(plan.names, plan.tensors.indices, strict=True)):
        row, scale = dtypes.BY_NUMBER[plan.sources[k]], table.scale(index)
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
        return {name: (plan.file, plan.spec(k)) for plan in plans for k, name in enumerate(plan.names)}

    names = list(chain(packed, *(plan.names for plan in plans)))
    check_disjoint(out if len(out) == len(names) else {name: out[name] for name in names}, contents)
    parts = (part.file for tensor in packed.values() for part in tensor.parts.values())
    refuse_own_files(out, [*(plan.file for plan in plans), *parts])


def refuse_own_files(out: Mapping[str, Array], files: Iterable[WeightFile]) -> None:
    """Refuse arrays that map a file to be read: filling such an array would change tensors before they are read."""
    mapped = {name: path for name, array in out.items() if (path := _mapped_path(array)) is not None}
    if not mapped:
        return
    places = {_identity(file.path): file.path for file in files if not is_remote(file)}
    for name, path in mapped.items():
        place = _identity(path)
        if place is not None and place in places:
            raise ValueError(
                f"out: {show(name)} maps {show(places[place])}, which is being read; pass an array in memory"
            )


def _mapped_path(array: Any) -> str | None:
    """Return the file that a `numpy.memmap` array writes to; None for arrays in memory."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return None if array.mode == "c" or array.filename is None else os.fspath(array.filename)
        array = array.base
    return None


def _identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def stored_in_parts(name: str, packed: Packed) -> ValueError:
    """Return the error for an array of ``out`` if its packed tensor is not dequantized."""
    return ValueError(f"out: tensor {show(name)} is stored as {packed.packing.label}: pass dtype= to dequantize it")


def check_fits(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], out: Mapping[str, Array]) -> None:
    """Check that ``out`` has an array for a tensor, and that the array fits."""
    array = out.get(name)
    if array is None:
        raise ValueError(f"out: no array for tensor {show(name)}")
    refuse_masked(array, f"out: {show(name)}")
    if not isinstance(array, np.ndarray):
        raise not_an_array(f"out: {show(name)}", array)
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"out: {show(name)} is {array.dtype} {show(list(array.shape))}, but the tensor needs {dtype} "
            f"{show(list(shape))}"
        )
    if not array.flags.carray:
        raise ValueError(f"out: {show(name)} must be C-contiguous, aligned and writable")
