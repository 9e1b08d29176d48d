"""Memory of large arrays that is used again once the arrays are gone.

New memory comes as pages of zeros, and the system takes as long to write these as a read takes to fill them: a stream
that uses the memory of dropped arrays again is 1.5 times as fast.
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

# Memory is not used for an array that is smaller by more than this part of it.
_WASTE = 4


class Recycler:
    """Makes arrays, and keeps the memory of those that are dropped for the next ones.

    Any thread may use it, and drop the arrays. Its owner closes it: the arrays refer to it, so that it may outlive its
    owner by far.

    Args:
        limit: most bytes that are kept, less what is used.

    Attributes:
        used: bytes of arrays that count towards the limit.
    """

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._kept: list[tuple[int, int]] = []  # size and address, the oldest first
        self._returned: deque[tuple[int, int]] = deque()  # those of arrays dropped since
        self._closed = False
        self._lock = Lock()  # of what is kept
        self._free = short.sl_memory_free  # globals may be gone before the last array is, when Python ends

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array with undefined values, aligned to a page; a small one is always new, and aligned to a cache line.

        Raises:
            MemoryError: the memory cannot be allocated.
            UnsupportedError: numpy does not support an array of this shape.
        """
        size = dtype.itemsize * math.prod(shape)
        if size < POOLED_BELOW:
            return array_over(aligned_bytes(size), dtype, shape, 0)
        held, address = self._take(size)
        memory = ffi.gc(ffi.cast("void *", address), partial(self._give_back, held, address))
        return array_over(ffi.buffer(memory, size), dtype, shape, 0)

    def _take(self, size: int) -> tuple[int, int]:
        """Size and address of memory for ``size`` bytes."""
        best = None
        with self._lock:
            fitting = [one for one in self._kept if size <= one[0] <= size + size // _WASTE]
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
        """Keeps what was returned, and frees the oldest memory that there is no room for.

        It never waits. An array may be dropped anywhere, even by a collection of garbage in the middle of these lines,
        or after a fork while a thread that the child does not have was in them. Whoever has the lock looks again.

        Args:
            trim: whether to look although nothing was returned.
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
        """Frees what is kept; arrays stay valid, and their memory is freed with them."""
        self._closed = True
        self._settle(True)
