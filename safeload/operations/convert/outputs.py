"""Tensors that `convert` makes one at a time, when the writer reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, foreign_order
from ...base.packing import Part
from ...engine.codes.restore import read_array
from ...engine.read.lazy import Lazy, LazyPacked, LazyQuantized, Staged
from ...engine.read.plan import Entry
from ...engine.run.memory import private_array
from ..folders.shards import Output


class Scratch:
    """Memory that is reused for one tensor after the other."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array over the memory, which is larger than before if it has to be."""
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # frees the old memory before new memory is allocated
            self._memory = private_array((size,), np.dtype(np.uint8))
        array: Array = np.ndarray(shape, dtype, self._memory)
        return array


def itself(array: Array) -> Array:
    """The array, contiguous: what a `Lazy` of an array that stands already makes."""
    return np.ascontiguousarray(array)


def not_none(array: Array | None) -> Array:
    """The array, which is there."""
    assert array is not None
    return array


def reporting(outputs: Mapping[str, Output], report: Callable[[int], object]) -> dict[str, Output]:
    """Wraps outputs to report their bytes after they are made."""
    done = 0

    def wrap(lazy: Lazy) -> Lazy:
        def written() -> None:
            nonlocal done
            done += lazy.nbytes
            report(done)

        def make() -> Array:
            array = lazy.make()
            written()
            return array

        staged = None if lazy.staged is None else lazy.staged._replace(written=written)
        return Lazy(lazy.dtype, lazy.shape, make, staged)

    wrapped: dict[str, Output] = {}
    for name, output in outputs.items():
        if isinstance(output, Lazy):
            wrapped[name] = wrap(output)
        elif isinstance(output, LazyPacked):
            parts = {role: wrap(part) for role, part in output.roles.items()}
            wrapped[name] = LazyPacked(output.packing, output.names, parts)
        else:
            scale = None if output.scale is None else wrap(output.scale)
            wrapped[name] = LazyQuantized(output.scheme, output.shape, wrap(output.data), scale, output.axis)
    return wrapped


def lazy_part(part: Part, threads: int | None) -> Lazy:
    """A stored tensor of a file, unchanged."""
    number = part.row.number
    dtype, shape = dtypes.array_dtype(number), dtypes.array_shape(part.row, part.shape, part.end - part.begin)
    staged = None
    if not foreign_order(False):
        staged = Staged(Entry(part.name, part.file, -1, part.begin, part.end, shape, number, number), threads)
    return Lazy(dtype, shape, lambda: read_array(part), staged)
