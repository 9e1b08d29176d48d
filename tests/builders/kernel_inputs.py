"""What the tests of kernels feed them: odd numbers, and memory with an end that is felt."""

import ctypes
import mmap
import sys

import numpy as np

from builders.random import rng


def unsigned(array):
    return array.view(f"u{array.dtype.itemsize}")


# Powers of two and their neighbours, zeros, subnormals, infinities, NaNs of every kind, ties of bf16, f16 and f8.
F32_SPECIALS = np.unique(
    np.concatenate(
        [
            np.array([base + near & 0xFFFFFFFF for base in range(0, 2**32, 1 << 19) for near in (-1, 0, 1)], np.uint32),
            np.array(
                [0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF, 1, 0x80000001], np.uint32
            ),
            unsigned(np.array([448, 464, 464.0001, 480, 57344, 61440, 61439.99, 65504, 65519.99, 65520], np.float32)),
        ]
    )
).view(np.float32)
F32_RANDOM = rng.integers(0, 2**32, 1_000_000, dtype=np.uint64).astype(np.uint32).view(np.float32)


def _forbid(address, size):
    """Whatever touches these pages ends the process."""
    if sys.platform == "win32":
        no_access, before = 1, ctypes.c_ulong()
        pages = ctypes.c_void_p(address), ctypes.c_size_t(size)
        assert ctypes.WinDLL("kernel32").VirtualProtect(*pages, no_access, ctypes.byref(before))
    else:
        assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), size, 0) == 0


class Guarded:
    """Memory between two pages that must not be touched; ``at_end`` puts the bytes against the second."""

    def __init__(self, size, at_end):
        page = mmap.PAGESIZE
        middle = -(-max(size, 1) // page) * page
        self.map = mmap.mmap(-1, middle + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for guard in (base, base + page + middle):
            _forbid(guard, page)
        self.address = base + page + (middle - size if at_end else 0)
        self.size = size

    def bytes(self):
        return (ctypes.c_char * self.size).from_address(self.address)
