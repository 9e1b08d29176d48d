"""Basic indexing of a tensor in a file: only the selected elements are read."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...base.arrays import Array, ArraySpec, array_over, byteswapped, c_strides, with_article
from . import jobs
from .fetch import WINDOW
from .job import Job, Origin
from .memory import address_of
from .weight_file import WeightFile

# Rows at most this far apart are read with the gaps between them: the system reads whole pages anyway.
_DENSE_PITCH = 4096
# Bytes read at once when rows are read with the gaps between them, from a file of this machine.
_BLOCK = 1 << 20


class _SliceAxis(NamedTuple):
    """Selected positions of one axis, ascending: start, start + step, ... (length of them)."""

    start: int
    step: int
    length: int


def as_index(item: Any) -> int | None:
    """An integer of any type as int; None for values that numpy does not accept as an integer, including booleans."""
    if isinstance(item, (bool, np.bool_)):
        return None
    try:
        return operator.index(item)
    except TypeError:
        return None


def _axes(index: tuple[Any, ...], shape: tuple[int, ...], whole: str) -> tuple[list[_SliceAxis], tuple[Any, ...]]:
    """The positions to read along each axis, and the index that turns the elements read into the requested array.

    Args:
        index: the items of a basic index.
        shape: of the tensor.
        whole: the expression that gives the tensor as an array, for messages.

    Raises:
        IndexError: too many indices, an index out of bounds, or not a basic index.
    """
    given = sum(item is not None and item is not Ellipsis for item in index)
    if given > len(shape):
        raise IndexError(f"too many indices: tensor is {len(shape)}-dimensional, but {given} were indexed")
    if sum(item is Ellipsis for item in index) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if not any(item is Ellipsis for item in index):
        index = (*index, Ellipsis)
    axes: list[_SliceAxis] = []
    after: list[Any] = []
    for item in index:
        if item is Ellipsis:
            for size in shape[len(axes) : len(axes) + len(shape) - given]:
                axes.append(_SliceAxis(0, 1, size))
                after.append(slice(None))
        elif item is None:
            after.append(None)
        elif isinstance(item, slice):
            start, stop, step = item.indices(shape[len(axes)])
            count = len(range(start, stop, step))
            if step > 0:
                axes.append(_SliceAxis(start, step, count))
                after.append(slice(None))
            else:
                axes.append(_SliceAxis(start + (count - 1) * step if count else 0, -step, count))
                after.append(slice(None, None, -1))
        elif (position := as_index(item)) is not None:
            size = shape[len(axes)]
            if not -size <= position < size:
                raise IndexError(f"index {position} is out of bounds for axis {len(axes)} with size {size}")
            axes.append(_SliceAxis(position % size, 1, 1))
            after.append(0)
        else:
            raise IndexError(
                f"get_slice supports integers, slices, ... and None; got {with_article(type(item).__name__)}: "
                f"index the whole tensor, as in {whole}[rows]"
            )
    return axes, (*after, ...)


def check_index(index: tuple[Any, ...], shape: tuple[int, ...], whole: str) -> None:
    """Refuses what is not a basic index of a tensor of this shape; see `_axes`.

    Raises:
        IndexError: too many indices, an index out of bounds, or not a basic index.
    """
    _axes(index, shape, whole)


class _Run(NamedTuple):
    """One read.

    Attributes:
        at: index of its elements in the result.
        offset: of its first byte in the tensor.
        size: bytes.
        pitch: 0 if all of them are selected, in order. Otherwise the bytes are rows this far apart, along the last axis
            of ``at``, from which the selected elements are copied.
    """

    at: tuple[Any, ...]
    offset: int
    size: int
    pitch: int


def _runs(axes: list[_SliceAxis], shape: tuple[int, ...], itemsize: int, block: int) -> Iterator[_Run]:
    """The reads that cover the selected elements of a tensor in C order.

    Args:
        axes: what is selected.
        shape: of the tensor.
        itemsize: bytes of an element.
        block: bytes read at once when rows are read with the gaps between them.
    """
    strides = c_strides(shape, itemsize)

    def walk(k: int, index: tuple[Any, ...], offset: int) -> Iterator[_Run]:
        """The reads for the axes from the k-th, at one index of those before it and its byte offset."""
        rest = k
        while rest < len(axes) and axes[rest].length == shape[rest]:
            rest += 1
        if rest == len(axes):  # the remaining axes are selected completely
            yield _Run(index, offset, strides[k] * shape[k] if k < len(axes) else itemsize, 0)
            return
        axis, stride = axes[k], strides[k]
        offset += axis.start * stride
        inner_full = all(a.length == n for a, n in zip(axes[k + 1 :], shape[k + 1 :], strict=True))
        if inner_full and axis.step == 1:
            yield _Run(index, offset, axis.length * stride, 0)
            return
        pitch = axis.step * stride
        selected = itemsize
        for a in axes[k + 1 :]:
            selected *= a.length
        if pitch <= block and (pitch <= _DENSE_PITCH or selected * 4 >= pitch):
            rows = block // pitch
            for first in range(0, axis.length, rows):
                count = min(rows, axis.length - first)
                at = (*index, slice(first, first + count))
                yield _Run(at, offset + first * pitch, (count - 1) * pitch + stride, pitch)
            return
        for i in range(axis.length):
            yield from walk(k + 1, (*index, i), offset + i * pitch)

    yield from walk(0, (), 0)


def read_slice(file: WeightFile, tensor: int, index: tuple[Any, ...], whole: str) -> Array:
    """The selected elements in private memory, read through the descriptor; see `_axes`.

    Raises:
        IndexError: see `_axes`.
        FormatError, OSError: the file ends too early, or cannot be read.
    """
    layout = file.layout(tensor)
    axes, after = _axes(index, layout.shape, whole)
    origin = Origin(file.table.names[tensor], layout.shape)
    if layout.strides is None:
        result = _read_dense(file, layout.dtype, layout.shape, layout.begin, axes, origin)
    else:
        result = _read_strided(file, layout, layout.strides, axes, origin)
    if layout.big_endian:
        result = byteswapped(result)  # native_order swaps back if the machine is big-endian
    view: Array = jobs.native_order(result)[after]
    return view if view.flags.c_contiguous else view.copy()


def _read_dense(
    file: WeightFile,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    begin: int,
    axes: list[_SliceAxis],
    origin: Origin,
) -> Array:
    """Selected elements of a tensor in C order."""
    result: Array = np.empty(tuple(axis.length for axis in axes), dtype)
    if result.size:
        direct = jobs.Batch()
        for run in _runs(axes, shape, dtype.itemsize, WINDOW if file.remote else _BLOCK):
            at = (*run.at, ...)  # the ellipsis makes the result an array even if a single element is selected
            target = result[at]
            if run.pitch == 0:
                direct.add(Job(file, begin + run.offset, address_of(target), run.size, origin=origin))
                continue
            block = np.empty(run.size, np.uint8)
            jobs.Batch([Job(file, begin + run.offset, address_of(block), run.size, origin=origin)]).run()
            inside = len(run.at)
            rows = _strided(block, dtype, (len(target), *shape[inside:]), run.pitch)
            inner = axes[inside:]
            selected = (slice(None), *(slice(a.start, a.start + (a.length - 1) * a.step + 1, a.step) for a in inner))
            target[...] = rows[selected]
        direct.run()
    return result


def _read_strided(
    file: WeightFile, layout: ArraySpec, strides: tuple[int, ...], axes: list[_SliceAxis], origin: Origin
) -> Array:
    """Selected elements of a tensor with strides of its own."""
    # Sorted by stride, its axes are usually in C order, as those of a transposed matrix are. Axes of length 1 go last:
    # their strides mean nothing.
    order = sorted(range(len(strides)), key=lambda k: (layout.shape[k] == 1, -strides[k]))
    shape = tuple(layout.shape[k] for k in order)
    wanted = c_strides(shape, layout.dtype.itemsize)
    if all(layout.shape[k] == 1 or strides[k] == stride for k, stride in zip(order, wanted, strict=True)):
        dense = _read_dense(file, layout.dtype, shape, layout.begin, [axes[k] for k in order], origin)
        turned: Array = dense.transpose([order.index(k) for k in range(len(order))])
        return turned
    selected = tuple(axis.length for axis in axes)
    if 0 in selected:
        return np.empty(selected, layout.dtype)
    # Otherwise read everything from the first selected byte to the last, with the gaps.
    begin = sum(axis.start * stride for axis, stride in zip(axes, strides, strict=True))
    steps = tuple(a.step * stride if a.length > 1 else 0 for a, stride in zip(axes, strides, strict=True))
    reach = sum((axis.length - 1) * step for axis, step in zip(axes, steps, strict=True))
    block = np.empty(reach + layout.dtype.itemsize, np.uint8)
    jobs.Batch([Job(file, layout.begin + begin, address_of(block), block.size, origin=origin)]).run()
    return array_over(block, layout.dtype, selected, 0, steps)


def _strided(block: Array, dtype: np.dtype[Any], shape: tuple[int, ...], pitch: int) -> Array:
    """Rows ``pitch`` bytes apart."""
    return array_over(block, dtype, shape, 0, (pitch, *c_strides(shape, dtype.itemsize)[1:]))
