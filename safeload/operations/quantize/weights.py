"""Read the values of a weight in ranges, on several threads at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...engine.codes.pieces import memory_of
from ...engine.codes.source import Source
from ...engine.run import jobs
from ...engine.run.memory import address_of, private_array
from ..sources.catalog import Catalog, RestructuredCatalog, TensorRecipe, read_values

# Weights that are read at once: few enough for the caches, and as many as hide the latency of a network.
_LOCAL, _REMOTE = 1 << 20, 4 << 20
# Threads that read from a network: one reads, while another quantizes.
_REMOTE_READERS = 2
# Bytes of the ranges that all threads read.
_MOST_BYTES = 32 << 20


class Weights(NamedTuple):
    """The values of a weight, in C order and little-endian."""

    # Returns a range, valid until its context ends; any thread may call it.
    read: Callable[[int, int], AbstractContextManager[Array]]
    step: int  # values to read at once
    readers: int | None = None  # most threads

    def threads(self, nbytes: int, count: int) -> int:
        """Return how many of ``count`` threads may read ranges of this many bytes."""
        limit = count if self.readers is None else min(count, self.readers)
        return max(1, min(limit, _MOST_BYTES // max(1, nbytes)))


class Scratch:
    """Memory reused from tensor to tensor."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array over the memory, which grows if necessary."""
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # frees the old memory before new memory is allocated
            self._memory = private_array((size,), np.dtype(np.uint8))
        array: Array = np.ndarray(shape, dtype, self._memory)
        return array


class ScratchBuffers:
    """Scratch memory that threads borrow; it is reused from weight to weight."""

    def __init__(self) -> None:
        self._free: list[Scratch] = []

    @contextmanager
    def borrow(self, count: int, dtype: np.dtype[Any]) -> Iterator[Array]:
        """Lend memory for this many values."""
        try:
            scratch = self._free.pop()
        except IndexError:
            scratch = Scratch()
        try:
            yield scratch.array((count,), dtype)
        finally:
            self._free.append(scratch)


def in_memory(values: Array) -> Weights:
    """Return little-endian values in memory."""
    flat = values.reshape(-1)
    return Weights(lambda begin, end: nullcontext(flat[begin:end]), _LOCAL)


def weights_in(
    catalog: Catalog,
    name: str,
    row: dtypes.Dtype,
    scratch: ScratchBuffers,
    whole: Callable[[tuple[int, ...], np.dtype[np.generic]], Array],  # an array for values that have no ranges
    *,
    threads: int | None,
) -> Weights:
    """Return the values of a weight of a model as a dtype; weights with a merged adapter are computed first."""
    arranged = catalog if isinstance(catalog, RestructuredCatalog) and catalog.for_engine else None
    base, dtype = catalog if arranged is None else arranged.base, dtypes.array_dtype(row.number)
    if arranged is not None and arranged.recipe(name).renamed is None:
        items = arranged.recipe(name).items
        if len(items) > 1:
            packed = any(base.about(source).packed for source in arranged.sources_of(name))
            alone = packed or base.in_memory or base.makes
            return _of_items(arranged, items, row, scratch, alone=alone)
    elif not base.makes:
        value = catalog.values(name)
        if isinstance(value, Source) and value.packed is None:
            return _ranges_of(value, row, scratch)
        return in_memory(jobs.native_order(read_values(value, row, whole(value.shape, dtype), threads)))
    values = whole(catalog.about(name).shape, dtype)
    catalog.read_into(name, row, values, threads)
    return in_memory(jobs.native_order(values))


def _ranges_of(source: Source, row: dtypes.Dtype, scratch: ScratchBuffers) -> Weights:
    dtype = dtypes.array_dtype(row.number)
    if source.file is None and source.row.number == row.number and source.size:
        stored = memory_of(source)
        if (
            stored.nbytes == source.size
            and address_of(stored) == source.offset
            and source.offset % dtype.alignment == 0
        ):
            return in_memory(stored.view(dtype))

    @contextmanager
    def read(begin: int, end: int) -> Iterator[Array]:
        part = source._replace(shape=(end - begin,), offset=source.offset + source.row.nbytes(begin))
        with scratch.borrow(end - begin, dtype) as values:
            yield jobs.native_order(read_values(part, row, values, 1))

    if source.file is not None and source.file.remote:
        return Weights(read, _REMOTE, _REMOTE_READERS)
    return Weights(read, _LOCAL)


def _of_items(
    catalog: RestructuredCatalog,
    items: Sequence[TensorRecipe],
    row: dtypes.Dtype,
    scratch: ScratchBuffers,
    *,
    alone: bool,
) -> Weights:
    """Return the values of a stack, of which each strip makes one item."""
    dtype, shape = dtypes.array_dtype(row.number), items[0].shape
    size = math.prod(shape)

    @contextmanager
    def read(begin: int, end: int) -> Iterator[Array]:
        with scratch.borrow(end - begin, dtype) as values:
            for number in range(begin // size, end // size):
                item = values[number * size - begin : (number + 1) * size - begin]
                catalog.make(items[number], row, item.reshape(shape), 1)
            if end == size * len(items):
                catalog.release()
            yield jobs.native_order(values)

    return Weights(read, size, 1 if alone else None)
