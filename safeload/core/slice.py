"""Read slices and rows of tensors in files: only what holds selected elements is read, and small gaps between.

Rows, at any positions, are a slice of the first axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from . import jobs
from .arrays import Array, ArraySpec, array_over, byteswapped, c_strides, with_article
from .jobs import WINDOW, Job, Origin
from .memory import private_array
from .native import address_of
from .text import tensor_named
from .weight_file import WeightFile

# Gaps of up to this many bytes are read and dropped: the system reads whole pages anyway.
_NEAR = 4096
# Bytes of a read if rows of a local file are read with their gaps, and of all such reads of rows at a time.
_BLOCK, _STAGED = 1 << 20, 64 << 20

# How to read rows by index from a checkpoint.
TAKE = "checkpoint.take(name, rows) reads rows by index"


def as_index(item: Any) -> int | None:
    """Return an integer of any type as int; None if NumPy would not accept it as an index, such as a boolean."""
    if isinstance(item, (bool, np.bool_)):
        return None
    try:
        return operator.index(item)
    except TypeError:
        return None


def axes_of(index: tuple[Any, ...], shape: tuple[int, ...], advice: str) -> tuple[list[range], tuple[Any, ...]]:
    """Return the ascending positions to read along each axis, and the index of the requested array in the elements."""
    count = sum(item is not None and item is not Ellipsis for item in index)
    if count > len(shape):
        raise IndexError(f"too many indices: tensor is {len(shape)}-dimensional, but {count} were indexed")
    if sum(item is Ellipsis for item in index) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if not any(item is Ellipsis for item in index):
        index = (*index, Ellipsis)
    axes: list[range] = []
    after: list[Any] = []
    for item in index:
        if item is Ellipsis:
            axes += map(range, shape[len(axes) : len(axes) + len(shape) - count])
            after += [slice(None)] * (len(shape) - count)
        elif item is None:
            after.append(None)
        elif isinstance(item, slice):
            positions = range(shape[len(axes)])[item]
            axes.append(positions if positions.step > 0 else positions[::-1])
            after.append(slice(None, None, 1 if positions.step > 0 else -1))
        elif (position := as_index(item)) is not None:
            size = shape[len(axes)]
            if not -size <= position < size:
                raise IndexError(f"index {position} is out of bounds for axis {len(axes)} with size {size}")
            axes.append(range(position % size, position % size + 1))
            after.append(0)
        else:
            raise IndexError(
                f"get_slice supports integers, slices, ... and None; got {with_article(type(item).__name__)}: {advice}"
            )
    return axes, (*after, ...)


# A read: the index of its elements in the result, first byte in the tensor, bytes, and None if all bytes are selected,
# in order. Otherwise the bytes are rows of the last axis of the index, with the index of the elements to copy.
_Read: TypeAlias = tuple[tuple[Any, ...], int, int, tuple[Any, ...] | None]


def _reads(axes: Sequence[Any], shape: tuple[int, ...], itemsize: int, block: int) -> list[_Read]:
    """Return the reads of the selected elements of a tensor in C order, which is not empty."""
    reads: list[_Read] = [((), 0, itemsize, None)]  # of an element; then along a further axis at a time
    strides, selected = c_strides(shape, itemsize), itemsize  # bytes of a row
    for k in reversed(range(len(axes))):
        axis, stride, row = axes[k], strides[k], reads
        spans = _spans(axis, stride, selected, block)
        if spans is None:
            reads = [
                ((number, *index), at * stride + offset, size, chosen)
                for number, at in enumerate(axis)
                for index, offset, size, chosen in row
            ]
        else:
            reads = []
        for first, last, gaps in spans or ():
            begin = int(axis[first]) * stride
            size = int(axis[last - 1]) * stride - begin + stride
            if gaps:
                rest = [slice(inner.start, inner.stop, inner.step) for inner in axes[k + 1 :]]
                rows = slice(None, None, axis.step) if isinstance(axis, range) else axis[first:last] - axis[first]
                unused = (
                    stride - itemsize - sum(a[-1] * b for a, b in zip(axes[k + 1 :], strides[k + 1 :], strict=True))
                )
                reads.append(((slice(first, last),), begin, size - unused, (rows, *rest)))
            elif selected == stride:
                reads.append(((slice(first, last),), begin, size, None))
            else:
                reads += [((first, *index), begin + offset, size, chosen) for index, offset, size, chosen in row]
        selected *= len(axis)
    return reads


def _spans(axis: range | Array, stride: int, selected: int, block: int) -> Sequence[tuple[int, int, bool]] | None:
    """Divide ascending positions into reads: numbers of the first and of one past the last, and True if there are gaps.

    Rows of ``selected`` bytes, closer than ``block`` bytes, are read with their gaps. None to read each row alone.
    """
    if isinstance(axis, range):
        pitch, count = axis.step * stride, len(axis)
        if pitch == selected:
            return ((0, count, False),)
        if count == 1 or pitch > block or (pitch > _NEAR and selected * 4 < pitch):
            return None
        rows = block // pitch
        return [(first, min(first + rows, count), True) for first in range(0, count, rows)]
    steps, blocks = np.diff(axis) * stride, axis // max(1, block // stride)
    adjacent, in_block = steps == selected, blocks[1:] == blocks[:-1]
    near = in_block & (steps - selected <= _NEAR)
    breaks = np.concatenate([[0], np.cumsum(~adjacent)])  # before each row
    spans = []
    for first, last in _divided(0, len(axis), ~(adjacent | near)):
        gaps = breaks[last - 1] != breaks[first]
        parts = _divided(first, last, ~in_block[first : last - 1]) if gaps else [(first, last)]
        spans += [(begin, end, bool(breaks[end - 1] != breaks[begin])) for begin, end in parts]
    return spans


def _divided(first: int, last: int, between: Array) -> Iterator[tuple[int, int]]:
    """Divide [first, last) where ``between`` is true for an item and the next."""
    edges = (np.flatnonzero(between) + first + 1).tolist()
    return pairwise((first, *edges, last))


def _read_dense(file: WeightFile, layout: ArraySpec, axes: Sequence[Any], origin: Origin) -> Array:
    """Read the selected elements of a tensor in C order."""
    dtype, shape, begin = layout.dtype, layout.shape, layout.begin
    rows = bool(axes) and isinstance(axes[0], np.ndarray)
    result: Array = (private_array if rows else np.empty)(tuple(map(len, axes)), dtype)
    if not result.size:
        return result
    read_box = getattr(file.store, "read_box", None)  # only an `AssembledStore` has it
    if read_box is not None and not rows:
        part = any(len(axis) != size for axis, size in zip(axes[1:], shape[1:], strict=True))  # no range of the bytes
        if part and all(axis.step == 1 for axis in axes) and file.store.has_boxes(begin, shape):  # type: ignore[attr-defined]
            read_box(begin, [axis.start for axis in axes], result.reshape(*result.shape, 1).view(np.uint8))
            return result
    block = WINDOW if file.remote else _BLOCK
    limit = _STAGED if rows else block
    batch, staged, room = jobs.Batch(), list[tuple[Array, Array, tuple[Any, ...]]](), limit
    for index, offset, size, selection in _reads(axes, shape, dtype.itemsize, block):
        at = (*index, ...)  # the ellipsis returns an array even for a single element
        memory = target = result[at]
        if selection is not None:
            if size > room:
                _run(batch, staged)
                batch, staged, room = jobs.Batch(), [], limit
            room -= size
            row = shape[len(index) :]
            memory = np.empty((-(-size // (math.prod(row) * dtype.itemsize)), *row), dtype)
            staged.append((target, memory, selection))
        batch.jobs.append(Job(file, begin + offset, address_of(memory), size, origin=origin))
    _run(batch, staged)
    return result


def _run(batch: jobs.Batch, staged: Sequence[tuple[Array, Array, tuple[Any, ...]]]) -> None:
    """Run reads, and copy the selected elements of reads with gaps."""
    batch.run()
    for target, memory, selection in staged:
        target[...] = memory[selection]


def read_slice(file: WeightFile, tensor: int, index: tuple[Any, ...], advice: str) -> Array:
    """Read the selected elements into private memory."""
    layout = file.table.layout(tensor)
    axes, after = axes_of(index, layout.shape, advice)
    origin = Origin(file.table.names[tensor], layout.shape)
    read = _read_dense if layout.strides is None else _read_strided
    result = read(file, layout, axes, origin)
    if layout.big_endian:
        result = byteswapped(result)  # native_order swaps back if the machine is big-endian
    view: Array = jobs.native_order(result)[after]
    return view if view.flags.c_contiguous else view.copy()


def _read_strided(file: WeightFile, layout: ArraySpec, axes: list[range], origin: Origin) -> Array:
    """Read the selected elements of a tensor with explicit strides."""
    strides = layout.strides
    assert strides is not None
    # Sorted by stride, the axes of most tensors are in C order, for example of a transposed matrix. Axes of length 1 go
    # last, because their strides mean nothing.
    order = sorted(range(len(strides)), key=lambda k: (layout.shape[k] == 1, -strides[k]))
    shape = tuple(layout.shape[k] for k in order)
    dense_strides = c_strides(shape, layout.dtype.itemsize)
    if all(layout.shape[k] == 1 or strides[k] == stride for k, stride in zip(order, dense_strides, strict=True)):
        dense = _read_dense(file, layout._replace(shape=shape), [axes[k] for k in order], origin)
        transposed: Array = dense.transpose([order.index(k) for k in range(len(order))])
        return transposed
    selected = tuple(map(len, axes))
    if 0 in selected:
        return np.empty(selected, layout.dtype)
    # Otherwise read everything from the first selected byte to the last, with the gaps.
    begin = sum(axis.start * stride for axis, stride in zip(axes, strides, strict=True))
    steps = tuple(axis.step * stride if len(axis) > 1 else 0 for axis, stride in zip(axes, strides, strict=True))
    reach = sum((len(axis) - 1) * step for axis, step in zip(axes, steps, strict=True))
    block = np.empty(reach + layout.dtype.itemsize, np.uint8)
    jobs.Batch([Job(file, layout.begin + begin, address_of(block), block.size, origin=origin)]).run()
    return array_over(block, layout.dtype, selected, 0, steps)


# ---- rows by position ----


def positions_in(rows: Any, count: int, name: str) -> Array:
    """Return the positions that ``rows`` selects, as int64 from 0 on."""
    about = tensor_named(name)
    single = isinstance(rows, (slice, str, bytes, bool)) or rows is None
    if single or (not isinstance(rows, range) and as_index(rows) is not None):
        kind = type(rows).__name__
        raise TypeError(f"{about}: rows must be a list, an integer array or a mask, got {kind}: {_ADVICE}")
    small = isinstance(rows, range) and max(map(abs, (rows.start, rows.stop, rows.step))) < 1 << 62  # fits 64 bits
    indices = np.arange(rows.start, rows.stop, rows.step) if small else np.asarray(rows)
    if indices.ndim != 1:
        raise TypeError(f"{about}: rows must have 1 axis, got {indices.ndim}")
    if indices.dtype.kind == "b":
        if len(indices) != count:
            raise IndexError(f"{about}: the mask must have {count:,} elements, got {len(indices):,}")
        return np.flatnonzero(indices).astype(np.int64)
    if not len(indices):
        return np.empty(0, np.int64)
    if indices.dtype.kind == "O":  # integers beyond 64 bits, or no numbers
        kinds = [type(index).__name__ for index in indices if as_index(index) is None]
        if kinds:
            raise TypeError(f"{about}: rows must be integers, got {kinds[0]}")
    elif indices.dtype.kind not in "iu":
        raise TypeError(f"{about}: rows must be integers or a boolean mask, got {indices.dtype}")
    outside = (indices >= count) | (indices < -count)
    if outside.any():
        at = int(outside.argmax())
        limits = f"expected {-count} to {count - 1}" if count else "it has no rows"
        raise IndexError(f"{about}: row {indices[at]} is out of range: {limits} (element {at} of rows)")
    indices = indices.astype(np.int64)
    return np.where(indices < 0, indices + count, indices)


_ADVICE = "get_slice(name)[...] reads a range or a single row"


def read_rows(
    file: WeightFile, begin: int, pitch: int, rows: Array | range, *, origin: Origin, window: range | None = None
) -> Array:
    """Return rows of ``pitch`` bytes, or a range of the bytes of each; ``rows`` are ascending and distinct."""
    count = int(rows[-1]) + 1 if len(rows) else 0
    records = ArraySpec(np.dtype(np.uint8), (count, pitch), begin, begin + count * pitch, 0, 0)
    if isinstance(rows, range) and not file.remote:  # positions are read with gaps only if these are small
        rows = np.arange(rows.start, rows.stop)
    return _read_dense(file, records, [rows, range(pitch) if window is None else window], origin)


def read_ranges(file: WeightFile, tensor: int, box: Sequence[slice]) -> Array:
    """Read a range along each axis into private memory."""
    layout = file.table.layout(tensor)
    cut = [k for k, (part, size) in enumerate(zip(box, layout.shape, strict=True)) if part.stop - part.start < size]
    plain = layout.strides is None and not layout.big_endian and not hasattr(file.store, "read_box")
    if not plain or len(cut) != 1 or 0 in layout.shape:
        return read_slice(file, tensor, tuple(box), TAKE)
    (axis,), strides = cut, c_strides(layout.shape, layout.dtype.itemsize)
    window = range(box[axis].start * strides[axis], box[axis].stop * strides[axis])
    pitch, origin = strides[axis] * layout.shape[axis], Origin(file.table.names[tensor], layout.shape)
    rows = range(math.prod(layout.shape[:axis]))
    raw = read_rows(file, layout.begin, pitch, rows, origin=origin, window=window)
    return jobs.native_order(raw.view(layout.dtype).reshape([part.stop - part.start for part in box]))


def rows_as_stored(file: WeightFile, index: int, positions: Array) -> Array:
    """Return rows of a tensor without conversion, in the byte order of this machine; see `read_rows`."""
    table = file.table
    layout, (count, *_) = table.layout(index), table.shape(index)
    origin = Origin(table.names[index], table.shape(index))
    if layout.strides is None:
        if layout.shape[:1] != (count,):  # bytes, of rows that are not whole blocks along the last axis
            layout = layout._replace(shape=(count, (layout.end - layout.begin) // max(1, count)))
        array = _read_dense(file, layout, [positions, *map(range, layout.shape[1:])], origin)
    else:  # rows are read together if each has bytes of its own, else with the whole tensor
        pitch, *strides = layout.strides
        reach = sum((size - 1) * stride for size, stride in zip(layout.shape[1:], strides, strict=True))
        extent = layout.dtype.itemsize + reach
        if pitch < extent or 0 in layout.shape:
            return np.ascontiguousarray(read_slice(file, index, (Ellipsis,), TAKE)[positions])
        raw = read_rows(file, layout.begin, pitch, positions, origin=origin, window=range(extent))
        array = array_over(raw, layout.dtype, (len(positions), *layout.shape[1:]), 0, (extent, *strides)).copy()
    return jobs.native_order(byteswapped(array) if layout.big_endian else array)
