"""Arrays of a file that is in memory: views of its bytes, or copies.

The columns of a `Table.plain` table become arrays without running Python code per tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import sub
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, array_over
from ...base.gc_pause import paused
from ...base.table import Table
from ..run import jobs
from ..run.memory import ALIGNMENT, HUGE_FROM, POOLED_BELOW, private_array
from ..run.weight_file import layouts
from .batch import POOL_SIZE, over

_BYTES = np.dtype(np.uint8)


def views_of(table: Table, buffer: Any) -> dict[str, Array]:
    """Return all tensors, by name in the order of their bytes, as views if they are aligned.

    The arrays are writable if the buffer is.
    """
    if not table.plain:
        return dict(_each(table, buffer))
    if table.count == 1:
        number, shape, begin, _ = table.entry(0)
        return {table.names[0]: array_over(buffer, dtypes.array_dtype(number), shape, begin)}
    with paused(table.count):
        arrays = over(buffer, dtypes.array_dtypes(table.numbers), table.shapes, table.begins())
        return dict(zip(table.names, arrays, strict=True))


def copies_of(table: Table, content: memoryview) -> dict[str, Array]:
    """Return all tensors, by name in the order of their bytes, as writable copies; small tensors share memory."""
    if not table.plain:
        return {name: array if array.base is None else array.copy() for name, array in _each(table, content)}
    return views_of(table, _copy(content)) if content.nbytes < HUGE_FROM else _in_pools(table, content)


def lone(content: memoryview, number: int, shape: tuple[int, ...], begin: int, *, copy: bool) -> Array:
    """Return the only tensor of a file, which would be `Table.plain`, as a writable copy or as a view."""
    dtype = dtypes.array_dtype(number)
    if copy and content.nbytes >= HUGE_FROM:
        array = private_array(shape, dtype)
        array.reshape(-1).view(_BYTES).data[:] = content[begin:]
        return array
    return array_over(_copy(content) if copy else content, dtype, shape, begin)


def _copy(content: memoryview) -> memoryview:
    """Return a writable copy of a small file, which nobody can resize."""
    return memoryview(bytearray(content))


def _each(table: Table, buffer: Any) -> Iterator[tuple[str, Array]]:
    """Yield each tensor as a view, or in its own memory if it cannot be a view."""
    for name, spec in zip(table.names, layouts(table, range(table.count)), strict=True):
        if spec.begin == spec.end:
            yield name, np.empty(spec.shape, spec.dtype)
        else:
            yield name, jobs.native_order(array_over(buffer, spec.dtype, spec.shape, spec.begin))


def _in_pools(table: Table, content: memoryview) -> dict[str, Array]:
    """Copy each large tensor into its own memory, and the small tensors between them into pools."""
    names = table.names
    numbers, shapes, begins, ends = table.columns(range(table.count))
    alone = [k for k, size in enumerate(map(sub, ends, begins)) if size >= POOLED_BELOW]
    arrays: dict[str, Array] = {}
    k = 0
    while k < table.count:
        start = begins[k] - begins[k] % ALIGNMENT  # aligned tensors of the file are aligned in the pool
        full = bisect_right(ends, start + POOL_SIZE)
        large = next(iter(alone[bisect_left(alone, k) :]), table.count)
        stop = max(k + 1, min(full, large))
        memory = private_array((ends[stop - 1] - start,), _BYTES)
        memory.data[:] = content[start : ends[stop - 1]]
        kinds, places = dtypes.array_dtypes(numbers[k:stop]), [begin - start for begin in begins[k:stop]]
        arrays.update(zip(names[k:stop], over(memory, kinds, shapes[k:stop], places), strict=True))
        k = stop
    return arrays
