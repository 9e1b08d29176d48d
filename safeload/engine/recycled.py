"""Memory of large arrays that is used again once the arrays are gone.

New memory comes as pages of zeros, and the system takes as long to write these as a read takes to fill them: a stream
that uses the memory of dropped arrays again is 1.5 times as fast.
"""

from __future__ import annotations

import math
from functools import partial
from threading import RLock
from typing import Any

import numpy as np

from ..base.arrays import Array, array_over
from ..base.native import ffi, pointer, short
from . import jobs

# Memory is not used for an array that is smaller by more than this part of it.
_WASTE = 4


class Recycler:
    """Makes arrays, and keeps the memory of those that are dropped for the next ones.

    Any thread may use it, and drop the arrays.

    Args:
        limit: most bytes that are kept, less what is used.

    Attributes:
        used: bytes of arrays that count towards the limit.
    """

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._kept: list[tuple[int, int]] = []  # size and address, the oldest first
        self._closed = False
        self._lock = RLock()  # dropping an array may end others in the same thread

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array with undefined values, aligned to a page; a small one is always new."""
        size = dtype.itemsize * math.prod(shape)
        if size < jobs.POOLED_BELOW:
            return array_over(jobs.aligned_bytes(size), dtype, shape, 0)
        held, address = self._take(size)
        memory = ffi.gc(ffi.cast("void *", address), partial(self._give_back, held))
        return array_over(ffi.buffer(memory, size), dtype, shape, 0)

    def _take(self, size: int) -> tuple[int, int]:
        """Size and address of memory for ``size`` bytes."""
        with self._lock:
            fitting = [one for one in self._kept if size <= one[0] <= size + size // _WASTE]
            if fitting:
                best = min(fitting)
                self._kept.remove(best)
                return best
            self._trim()
        address = short.sl_memory_alloc(size)
        if not address:
            raise MemoryError(f"cannot allocate {size} bytes")
        return size, address

    def _give_back(self, size: int, memory: Any) -> None:
        address = pointer(memory)
        with self._lock:
            if not self._closed:
                self._kept.append((size, address))
                self._trim()
                return
        short.sl_memory_free(address, size)

    def _trim(self) -> None:
        """Frees the oldest memory that there is no room for."""
        while self._kept and self.used + sum(size for size, _ in self._kept) > self._limit:
            size, address = self._kept.pop(0)
            short.sl_memory_free(address, size)

    def close(self) -> None:
        """Frees what is kept; arrays stay valid, and their memory is freed with them."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, []
        for size, address in kept:
            short.sl_memory_free(address, size)
