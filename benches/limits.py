"""What the machine gives to code that does only the unavoidable part: moving bytes in memory, or reading them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

# The peer's name of `reader`.
READ = "limit: reading as many bytes"

# The peers' names of `storer` and of `read_twice_and_store`.
STORE = "limit: storing the result"
TWO_PASSES = "limit: reading it twice, storing the codes"

# Elements: parts begin at whole blocks of any quantized dtype.
_BLOCK = 256


def shared(work: Callable[[int, int], object], count: int, workers: int) -> Callable[[], None]:
    """``work(begin, end)`` over ``count`` elements, in as many equal parts as there are threads."""
    if workers == 1:
        return lambda: work(0, count) and None
    step = -(-count // workers // _BLOCK) * _BLOCK
    pool = ThreadPoolExecutor(workers)

    def run() -> None:
        list(pool.map(lambda begin: work(begin, min(begin + step, count)), range(0, count, step)))

    return run


def reader(source: np.ndarray, workers: int) -> Callable[[], None]:
    """The C library's search for a number that is not there, which reads every byte in its widest registers."""
    wmemchr = ctypes.CDLL(None).wmemchr
    wmemchr.argtypes, wmemchr.restype = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t], ctypes.c_void_p

    def work(begin: int, end: int) -> None:
        assert wmemchr(source.ctypes.data + 4 * begin, 0x7FC12345, end - begin) is None

    return shared(work, source.nbytes // 4, workers)


def storers(target: np.ndarray) -> dict[str, Callable[[], None]]:
    """Storing as many bytes, plainly and past the cache; the better one is the limit.

    Not of zeros, which some machines store in less than half the time.
    """
    return {
        "numpy's fill, plain stores": lambda: target.fill(1),
        "memset, by rep stosb or non-temporal stores": lambda: (
            ctypes.memset(target.ctypes.data, 1, target.nbytes) and None
        ),
    }


def storer(target: np.ndarray, workers: int) -> Callable[[], None]:
    """The C library's memset over memory that may be fresh."""

    def work(begin: int, end: int) -> None:
        ctypes.memset(target.ctypes.data + begin, 1, end - begin)

    return shared(work, target.nbytes, workers)


def read_twice_and_store(source: np.ndarray, workers: int) -> Callable[[], None]:
    """Reads f32 twice and stores a byte for each, in fresh memory: what no int8 with one scale can do without."""
    read = reader(source, workers)

    def run() -> None:
        read()
        read()
        storer(np.empty(source.size, np.int8), workers)()

    return run


def stream(nbytes: int, workers: int) -> Callable[[], np.ndarray]:
    """memcpy that moves ``nbytes`` in all, half read and half written, in memory that has been touched.

    glibc's memcpy of large blocks is the better of plain and non-temporal loops.
    """
    half = nbytes // 2
    source, target = np.ones(half, np.uint8), np.ones(half, np.uint8)
    step = -(-half // workers)
    pool = ThreadPoolExecutor(workers)

    def piece(begin: int) -> None:
        ctypes.memmove(target.ctypes.data + begin, source.ctypes.data + begin, min(step, half - begin))

    def copy() -> np.ndarray:
        list(pool.map(piece, range(0, half, step)))
        return target

    return copy


def read_and_store(path: Path, times: int, workers: int) -> Callable[[], np.ndarray]:
    """Reads a file through buffers that stay in the cache, and stores each ``times`` times in one fresh array."""
    size, step = path.stat().st_size, 512 << 10

    def run() -> np.ndarray:
        result = np.empty(size * times, np.uint8)
        descriptor = os.open(path, os.O_RDONLY)

        def work(begin: int, end: int) -> None:
            buffer = np.empty(step, np.uint8)
            for at in range(begin, end, step):
                got = os.preadv(descriptor, [buffer[: min(step, end - at)]], at)
                for copy in range(times):
                    ctypes.memmove(result.ctypes.data + at * times + copy * got, buffer.ctypes.data, got)

        shared(work, size, workers)()
        os.close(descriptor)
        return result

    return run
