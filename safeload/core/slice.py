"""Read slices and rows of tensors in files: only what holds selected elements is read, and small gaps between."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from . import jobs
from .arrays import Array, ArraySpec, array_over, byteswapped, c_strides, with_article
from .jobs import WINDOW, Job, Origin
from .memory import private_array, windows
from .native import address_of
from .weight_file import WeightFile

# Gaps of up to this many bytes are read and dropped: the system reads whole pages anyway.
_NEAR = 4096
# Bytes read at once if rows of a local file are read with their gaps.
_BLOCK = 1 << 20


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


# A read: the index of its elements in the result, first byte in the tensor, bytes, and 0 if all bytes are selected, in
# order. Otherwise the bytes are rows this far apart, along the last axis of the index, with the elements to copy.
_Run = tuple[tuple[Any, ...], int, int, int]


def _runs(axes: list[range], shape: tuple[int, ...], itemsize: int, block: int) -> Iterator[_Run]:
    """Yield reads of the selected elements of a tensor in C order.

    Rows closer than ``block`` bytes are read with their gaps.
    """
    strides = c_strides(shape, itemsize)
    full = [len(axis) == size for axis, size in zip(axes, shape, strict=True)]

    def walk(k: int, index: tuple[Any, ...], offset: int) -> Iterator[_Run]:
        """Yield the reads for axis k and the axes after it, at an index of the axes before it."""
        if all(full[k:]):
            yield index, offset, strides[k] * shape[k] if k < len(axes) else itemsize, 0
            return
        axis, stride = axes[k], strides[k]
        offset += axis.start * stride
        if all(full[k + 1 :]) and axis.step == 1:
            yield index, offset, len(axis) * stride, 0
            return
        pitch = axis.step * stride
        selected = itemsize * math.prod(map(len, axes[k + 1 :]))
        if pitch <= block and (pitch <= _NEAR or selected * 4 >= pitch):
            rows = block // pitch
            for first in range(0, len(axis), rows):
                count = min(rows, len(axis) - first)
                yield (*index, slice(first, first + count)), offset + first * pitch, (count - 1) * pitch + stride, pitch
            return
        for i in range(len(axis)):
            yield from walk(k + 1, (*index, i), offset + i * pitch)

    yield from walk(0, (), 0)


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


def _read_dense(file: WeightFile, layout: ArraySpec, axes: list[range], origin: Origin) -> Array:
    """Read the selected elements of a tensor in C order."""
    dtype, shape, begin = layout.dtype, layout.shape, layout.begin
    result: Array = np.empty(tuple(map(len, axes)), dtype)
    if not result.size:
        return result
    read_box = getattr(file.store, "read_box", None)  # only an `AssembledStore` has it
    part = any(len(axis) != size for axis, size in zip(axes[1:], shape[1:], strict=True))  # no range of the bytes
    box = read_box is not None and part and all(axis.step == 1 for axis in axes)
    if read_box is not None and box and file.store.has_boxes(begin, shape):  # type: ignore[attr-defined]
        read_box(begin, [axis.start for axis in axes], result.reshape(*result.shape, 1).view(np.uint8))
        return result
    direct = jobs.Batch()
    for index, offset, size, pitch in _runs(axes, shape, dtype.itemsize, WINDOW if file.remote else _BLOCK):
        at = (*index, ...)  # the ellipsis returns an array even for a single element
        target = result[at]
        if pitch == 0:
            direct.add(Job(file, begin + offset, address_of(target), size, origin=origin))
            continue
        block = np.empty(size, np.uint8)
        jobs.Batch([Job(file, begin + offset, address_of(block), size, origin=origin)]).run()
        row = shape[len(index) :]
        rows = array_over(block, dtype, (len(target), *row), 0, (pitch, *c_strides(row, dtype.itemsize)))
        selected = (slice(None), *(slice(a.start, a.stop, a.step) for a in axes[len(index) :]))
        target[...] = rows[selected]
    direct.run()
    return result


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


# ---- rows: records at a constant distance ----


# Bytes of all reads with gaps at a time.
_STAGED = 64 << 20

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

    def job(first: int, last: int, memory: Array) -> Job:
        at, extent = int(positions[first]), int(positions[last - 1] - positions[first]) * pitch + width
        return Job(file, begin + at * pitch, address_of(memory), extent, origin=origin)

    def count(span: _Span) -> int:
        return int(positions[span[1] - 1] - positions[span[0]]) + 1

    spans = list(_spans(positions, pitch, width))
    batch = jobs.Batch(job(first, last, rows[first:last]) for first, last, gaps in spans if not gaps)
    for window in windows((span for span in spans if span[2]), _STAGED // pitch, count):
        blocks = [np.empty((count(span), pitch), np.uint8) for span in window]
        for block, (first, last, _) in zip(blocks, window, strict=True):
            batch.add(job(first, last, block))
        batch.run()
        for block, (first, last, _) in zip(blocks, window, strict=True):
            rows[first:last] = block[positions[first:last] - positions[first], :width]
        batch = jobs.Batch()
    if batch.jobs:
        batch.run()
    return rows


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
