"""Memory of dropped arrays is used again: only then, within its limit, and all of it is freed once."""

import collections
import gc
import os
import signal
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from builders.inside import buffer_pool

from safeload.errors import UnsupportedError

pytestmark = pytest.mark.inner

MIB = 1 << 20
U8 = np.dtype(np.uint8)


class Memory:
    """The core's allocator, which counts: each address must be freed once, with the size it was allocated with."""

    def __init__(self, real):
        self._real = real
        self.sizes = {}
        self.allocated = 0
        self.frees = 0

    def sl_memory_alloc(self, size):
        address = self._real.sl_memory_alloc(size)
        if address:
            assert address not in self.sizes
            self.sizes[address] = size
            self.allocated += 1
        return address

    def sl_memory_free(self, address, size):
        assert self.sizes.pop(address, None) == size
        self.frees += 1
        self._real.sl_memory_free(address, size)

    @property
    def held(self):
        return sum(self.sizes.values())


@pytest.fixture
def memory(monkeypatch):
    counted = Memory(buffer_pool.short)
    monkeypatch.setattr(buffer_pool, "short", counted)
    yield counted
    gc.collect()
    assert counted.sizes == {}


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex128, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3,), (7, 5), (1 << 20,), (3, 1 << 20)])
def test_arrays_are_aligned_writable_and_contiguous(dtype, shape, memory):
    recycler = buffer_pool.Recycler(100 * MIB)
    array = recycler.array(shape, np.dtype(dtype))
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert not array.size or address(array) % 64 == 0
    array[...] = 1
    recycler.close()


def test_a_shape_that_numpy_refuses_is_an_error():
    with pytest.raises(UnsupportedError, match="does not support shape"):
        buffer_pool.Recycler(MIB).array((0, 1 << 62), np.dtype(np.float64))


def test_what_cannot_be_allocated_is_a_memory_error():
    with pytest.raises(MemoryError, match="cannot allocate 1152921504606846976 bytes"):
        buffer_pool.Recycler(MIB).array((1 << 60,), U8)


def test_a_dropped_array_gives_its_memory_to_the_next_of_its_size(memory):
    recycler = buffer_pool.Recycler(100 * MIB)
    first = recycler.array((8 * MIB,), U8)
    at = address(first)
    del first
    again = recycler.array((2 * MIB,), np.dtype(np.float32))
    assert address(again) == at
    assert (memory.allocated, memory.held) == (1, 8 * MIB)
    del again
    assert memory.held == 8 * MIB
    recycler.close()
    assert memory.held == 0


@pytest.mark.parametrize(("size", "fits"), [(8, True), (7, True), (6, False), (3, False), (9, False)])
def test_memory_serves_an_array_that_is_little_smaller(size, fits, memory):
    recycler = buffer_pool.Recycler(100 * MIB)
    array = recycler.array((8 * MIB,), U8)
    at = address(array)
    del array
    array = recycler.array((size * MIB,), U8)
    assert (address(array) == at) == fits
    assert array.size == size * MIB
    array[...] = 1
    recycler.close()


def test_the_smallest_memory_that_fits_is_taken(memory):
    recycler = buffer_pool.Recycler(100 * MIB)
    arrays = [recycler.array((size * MIB,), U8) for size in (10, 9, 11)]
    at = address(arrays[1])
    arrays.clear()
    assert address(recycler.array((9 * MIB,), U8)) == at
    recycler.close()


@pytest.mark.parametrize("part", [lambda x: x[5:9], lambda x: x.view(np.float64), lambda x: memoryview(x), np.asarray])
def test_whatever_shows_an_array_keeps_its_memory(part, memory):
    recycler = buffer_pool.Recycler(100 * MIB)
    array = recycler.array((2 * MIB,), U8)
    array[...] = 7
    shown = part(array)
    del array
    other = recycler.array((2 * MIB,), U8)
    other[...] = 0xFF
    assert bytes(memoryview(shown).cast("B")[:4]) == b"\7\7\7\7"
    assert memory.allocated == 2
    del shown
    recycler.close()


def test_no_more_is_kept_than_the_limit_less_what_is_used(memory):
    recycler = buffer_pool.Recycler(20 * MIB)
    arrays = [recycler.array((4 * MIB,), U8) for _ in range(10)]
    oldest = [address(array) for array in arrays[:2]]
    while arrays:
        arrays.pop(0)
        assert memory.held <= 20 * MIB + sum(array.nbytes for array in arrays)
    assert memory.held == 20 * MIB
    assert not set(oldest) & set(memory.sizes)  # the oldest goes first
    recycler.used = 13 * MIB
    array = recycler.array((4 * MIB,), U8)
    assert memory.held == 4 * MIB + 4 * MIB
    recycler.used = 50 * MIB
    del array
    assert memory.held == 0


@pytest.mark.parametrize("limit", [0, 1, MIB - 1])
def test_a_limit_below_any_array_keeps_nothing(limit, memory):
    recycler = buffer_pool.Recycler(limit)
    for _ in range(3):
        recycler.array((MIB,), U8)
        assert memory.held == 0


def test_arrays_outlive_close_and_the_recycler(memory):
    recycler = buffer_pool.Recycler(100 * MIB)
    kept, dropped = recycler.array((MIB,), U8), recycler.array((MIB,), U8)
    kept[...] = 3
    del dropped
    recycler.close()
    assert memory.held == MIB
    recycler.close()
    del recycler
    assert (kept == 3).all()
    del kept
    assert memory.held == 0


def test_threads_make_and_drop_at_once(memory):
    """No memory has two owners: each array keeps the number that was written into it."""
    recycler = buffer_pool.Recycler(6 * MIB)
    passed = collections.deque(maxlen=5)
    failures = []

    def work(number):
        for k in range(150):
            array = recycler.array((MIB + (k % 3) * 100_000,), U8)
            value = (number * 50 + k) % 251
            array[::65536] = value
            passed.append((array, value))  # another thread drops it
            if not (array[::65536] == value).all():
                failures.append((number, k))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all((array[::65536] == value).all() for array, value in passed)
    passed.clear()
    assert memory.held <= 6 * MIB
    recycler.close()
    assert memory.held == 0


def test_garbage_that_is_collected_anywhere_inside_disturbs_nothing(memory):
    """A collection may drop arrays between any two lines, in the same thread."""
    recycler = buffer_pool.Recycler(5 * MIB)
    code = {one.__code__ for one in vars(buffer_pool.Recycler).values() if hasattr(one, "__code__")}
    waiting = []

    def drop(frame, event, argument):
        if frame.f_code not in code:
            return None
        if waiting:
            waiting.pop()
        return drop

    for k in range(60):
        waiting += [recycler.array((MIB + k % 4 * 70_000,), U8) for _ in range(12)]
        before = sys.gettrace()
        sys.settrace(drop)
        try:
            array = recycler.array((MIB + 70_000,), U8)
            array[...] = 1
            del array
        finally:
            sys.settrace(before)
    waiting.clear()
    assert memory.held <= 5 * MIB
    recycler.close()
    assert memory.held == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_is_inside_does_not_hang_the_child():

    recycler = buffer_pool.Recycler(100 * MIB)
    array = recycler.array((MIB,), U8)
    with recycler._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            del array
            recycler.close()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recycler.close()
