"""Reuse the memory of dropped arrays.

The system fills new memory with zeros, which takes as long as reading the bytes. A stream is faster if it reuses the
memory of arrays that were dropped.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from ...base.arrays import Array, array_over
from ...base.native import ffi, short
from ..run.memory import POOLED_BELOW, aligned_bytes

# Memory is not reused if more than this part of it would be wasted.
_WASTE = 4


class Recycler:
    """Allocate arrays, and keep the memory of dropped arrays for new arrays.

    Any thread may use it and drop its arrays. The owner should close it, because the arrays refer to it and may live
    much longer than the owner.
    """

    def __init__(self, limit: int) -> None:
        self.used = 0  # bytes of arrays that count towards the limit
        self._limit = limit
        self._kept: list[tuple[int, int]] = []  # size and address, oldest first
        self._returned: deque[tuple[int, int]] = deque()  # of dropped arrays
        self._closed = False
        self._lock = Lock()  # protects `_kept`
        self._free = short.sl_memory_free  # at exit, globals may disappear before the last array

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a page-aligned array with undefined values. Small arrays bypass the pool, aligned to a cache line."""
        size = dtype.itemsize * math.prod(shape)
        if size < POOLED_BELOW:
            return array_over(aligned_bytes(size), dtype, shape, 0)
        capacity, address = self._take(size)
        memory = ffi.gc(ffi.cast("void *", address), partial(self._give_back, capacity, address))
        return array_over(ffi.buffer(memory, size), dtype, shape, 0)

    def _take(self, size: int) -> tuple[int, int]:
        """Return the capacity and address of memory for ``size`` bytes."""
        best = None
        with self._lock:
            fitting = [block for block in self._kept if size <= block[0] <= size + size // _WASTE]
            if fitting:
                best = min(fitting)
                self._kept.remove(best)
        self._settle(True)
        if best is not None:
            return best
        address = short.sl_memory_alloc(size)
        if not address:
            raise MemoryError(f"cannot allocate {size} bytes")
        return size, address

    def _give_back(self, size: int, address: int, memory: object) -> None:
        self._returned.append((size, address))
        self._settle()

    def _settle(self, trim: bool = False) -> None:
        """Keep returned memory, and free the oldest memory above the limit.

        This never waits. An array may be dropped anywhere: by garbage collection in the middle of this method, or in a
        child whose parent forked while another thread was here. The holder of the lock checks again.
        """
        while (trim or self._returned) and self._lock.acquire(blocking=False):
            trim = False
            try:
                while self._returned:
                    self._kept.append(self._returned.popleft())
                room = 0 if self._closed else max(0, self._limit - self.used)
                excess = sum(size for size, _ in self._kept) - room
                while excess > 0:
                    size, address = self._kept.pop(0)
                    self._free(address, size)
                    excess -= size
            finally:
                self._lock.release()

    def close(self) -> None:
        """Free the kept memory. Arrays stay valid and own their memory from now on."""
        self._closed = True
        self._settle(True)
