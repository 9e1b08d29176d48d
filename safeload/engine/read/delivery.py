"""Delivers tensors of open files as arrays: views of mapped files, and one batch of jobs that reads all the others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, array_over, foreign_order, not_an_array, refuse_masked
from ...base.packing import Packed
from ...base.scheme import INT8
from ...base.text import show
from ...stores.local import mapping_of
from ..codes.quantized_tensor import QuantizedTensor
from ..run import jobs
from ..run.memory import HUGE_FROM
from ..run.progress import Progress, reporter
from ..run.threads import thread_count
from ..run.weight_file import WeightFile, is_remote
from .batch import Reads, over, read_scale
from .plan import EMPTY, VIEW, ReadPlan, decide
from .tensors import Tensors

if TYPE_CHECKING:
    from .buffer_pool import Recycler

# What a tensor becomes.
Value = Array | QuantizedTensor


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
    """Return arrays (or quantized tensors) by name, in any order, and False if the system refused the way asked for.

    A file whose mapping is refused, or reading past the page cache, is read through it instead.

    Args:
        tensors: each name once.
        target: dtype that floating tensors are converted to and quantized ones dequantized to; None to convert nothing.
        view: whether to return views of mapped files where possible.
        direct: whether to read past the page cache where possible.
        mappings: mappings to use; new ones are added. None for new mappings.
        out: arrays to fill, by name; all of them are checked before the first byte is written.
        memory: of new arrays that are read, see `Reads`.
        threads: for reading.
        progress: for reading; if everything is mapped, which takes no time, only the end is reported.

    Raises:
        ValueError, TypeError: an array of ``out`` does not fit.
        UnsupportedError: an unsupported conversion.
        FormatError: a file ends too early, with path and offset.
        OSError: a file cannot be read.
    """
    if len(tensors) == 1 and target is None and out is None and progress is None:
        array = _one(tensors, view, mappings, threads)
        if array is not None:
            return {tensors.names[0]: array}, True
    tensors, packed = tensors.without_packed()
    plans = [decide(own, target, view) for own in tensors.by_file()]
    if out is not None:
        for plan in plans:
            _check_out(plan, out)
        _check_out_packed(packed, target, out)
        parts = (part.file for tensor in packed.values() for part in tensor.parts.values())
        refuse_own_files(out, [*(plan.file for plan in plans), *parts])
    delivered: dict[str, Any] = {}
    allowed, reading, to_read = True, False, []
    for plan in plans:
        if VIEW in plan.ways:
            buffer = _mapping(plan.file, mappings)
            if buffer is not None:
                delivered = _joined(delivered, _views(plan, buffer))
            else:
                allowed = False
                plan = decide(plan.tensors, target, False)
        if plan.ways.count(VIEW) < len(plan.ways):
            to_read.append(plan)
    if to_read or packed:
        reads = Reads(out, memory, direct=direct)
        for plan in to_read:
            reads.add(plan)
        mapped = {} if mappings is None else mappings
        for name, tensor in packed.items():
            if target is not None:
                reads.restore(name, tensor, target)
            else:
                delivered[name] = _parts_of(name, tensor, reads, mapped if view else None)
        reading = not view or any(way not in (VIEW, EMPTY) for plan in to_read for way in set(plan.ways))
        if reading or packed:
            reads.run(threads, progress)
            reading = True
            allowed &= not reads.refused
        delivered = _joined(delivered, reads.arrays)
    for plan in plans:
        if plan.file.table.quantized:
            _wrap(plan, delivered)
    total = 0 if reading or not progress else sum(array.nbytes for array in delivered.values())
    if total:
        with reporter(progress, total) as report:
            report(total)
    return delivered, allowed


def _parts_of(name: str, packed: Packed, reads: Reads, mappings: dict[WeightFile, Any] | None) -> QuantizedTensor:
    """A packed tensor as it is stored: views of mapped files, or arrays that ``reads`` fills."""
    arrays = {}
    for role, part in packed.parts.items():
        dtype = dtypes.array_dtype(part.row.number)
        aligned = part.begin % dtype.alignment == 0 and not (foreign_order(False) and dtype.itemsize > 1)
        buffer = _mapping(part.file, mappings) if mappings is not None and aligned and part.begin < part.end else None
        if buffer is None:
            arrays[role] = reads.stored(part)
        else:
            arrays[role] = array_over(
                buffer, dtype, dtypes.array_shape(part.row, part.shape, part.end - part.begin), part.begin
            )
    return QuantizedTensor.of_parts(packed.packing, packed.names(name), arrays)


def _joined(arrays: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The union of two dicts. It reuses one of them, to save a copy of all entries: neither may be used afterwards."""
    if not arrays:
        return more
    arrays.update(more)
    return arrays


def _one(tensors: Tensors, view: bool, mappings: dict[WeightFile, Any] | None, threads: int | None) -> Array | None:
    """A single contiguous tensor, without the cost of columns; None if it needs the full plan."""
    _, file, index = tensors[0]
    if file.table.shaped or file.table.quantized:
        return None
    spec = file.layout(index)
    if spec.begin == spec.end or spec.begin % spec.dtype.alignment:
        return None
    size = spec.end - spec.begin
    if not view:
        # This takes one thread; `thread_count` is called to refuse an invalid SAFELOAD_NUM_THREADS here too.
        return jobs.read_small(file, spec) if size < HUGE_FROM and thread_count(size, threads) else None
    if foreign_order(False) and spec.dtype.itemsize > 1:
        return None
    buffer = _mapping(file, mappings)
    return None if buffer is None else array_over(buffer, spec.dtype, spec.shape, spec.begin)


def _mapping(file: WeightFile, mappings: dict[WeightFile, Any] | None) -> Any:
    """The file's mapping; None if its store has none, or the system refuses it."""
    buffer = None if mappings is None else mappings.get(file)
    if buffer is None:
        buffer = mapping_of(file.store)
        if buffer is not None and mappings is not None:
            mappings[file] = buffer
    return buffer


def _views(plan: ReadPlan, buffer: Any) -> dict[str, Array]:
    """The tensors that are views of the mapped file, by name."""
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
    """Replaces the raw data of quantized tensors that are not converted by `QuantizedTensor` objects."""
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


def _check_out(plan: ReadPlan, out: Mapping[str, Array]) -> None:
    """Refuses arrays of ``out`` that are missing or do not fit."""
    for k, (name, shape) in enumerate(zip(plan.names, plan.shapes, strict=True)):
        check_given(name, plan.dtype(k), shape, out)


def _check_out_packed(packed: Mapping[str, Packed], target: dtypes.Dtype | None, out: Mapping[str, Array]) -> None:
    """The same for packed tensors, which are several arrays unless they are dequantized."""
    for name, tensor in packed.items():
        if target is None:
            raise stored_in_parts(name, tensor)
        check_given(name, dtypes.array_dtype(target.number), tensor.packing.shape, out)


def refuse_own_files(out: Mapping[str, Array], files: Iterable[WeightFile]) -> None:
    """Refuse arrays that map a file to be read: filling one would change tensors that are still to be read.

    Raises:
        ValueError: which array, and which file.
    """
    mapped = {name: path for name, array in out.items() if (path := _mapped_path(array)) is not None}
    if not mapped:
        return
    places = {_identity(file.path): file.path for file in files if not is_remote(file)}
    for name, path in mapped.items():
        place = _identity(path)
        if place is not None and place in places:
            raise ValueError(f"out: {show(name)} maps {show(places[place])}, which is read; pass an array in memory")


def _mapped_path(array: Any) -> str | None:
    """The file that an array of `numpy.memmap` writes to; None for other arrays."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return None if array.mode == "c" or array.filename is None else os.fspath(array.filename)
        array = array.base
    return None


def _identity(path: str) -> tuple[int, int] | None:
    """What tells a file from others; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def stored_in_parts(name: str, packed: Packed) -> ValueError:
    """The error for an array to fill with a packed tensor that is not dequantized."""
    return ValueError(f"out: tensor {show(name)} is stored as {packed.packing.label}: pass dtype= to dequantize it")


def check_given(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], out: Mapping[str, Array]) -> None:
    """Refuses an array of ``out`` that is missing or does not fit.

    Raises:
        ValueError, TypeError: which it is, and why.
    """
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
    if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
        raise ValueError(f"out: {show(name)} must be C-contiguous, aligned and writable")
