"""CRC-32C (RFC 3720, B.4), which checksums the nodes of OCDBT and zarr's codec ``crc32c``."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, repeat
from math import isqrt

import numpy as np

from ..base.arrays import Array

_POLYNOMIAL = 0x82F63B78
# Shorter data is cheaper byte by byte.
_FEW = 2_048
_ALL = 0xFFFFFFFF


def _step(value: int, _: object) -> int:
    return value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)


@cache
def _table() -> Array:
    """The remainder of each byte."""
    return np.array([list(accumulate(repeat(None, 8), _step, initial=byte))[-1] for byte in range(256)], np.uint32)


def crc32c(data: bytes | bytearray | memoryview | Array) -> int:
    """Checksum bytes; the lanes of long data advance together, then a linear map joins the remainders."""
    content = np.frombuffer(data, np.uint8)
    table = _table()
    length = isqrt(len(content)) if len(content) >= _FEW else 0
    whole = len(content) // length * length if length else 0
    crc = _ALL
    if whole:
        lanes = content[:whole].reshape(-1, length)
        # The last 32 lanes advance each single bit by `length` zeros: the columns of the map.
        state = np.concatenate([np.zeros(len(lanes), np.uint32), np.uint32(1) << np.arange(32, dtype=np.uint32)])
        count = len(lanes)
        for column in range(length):
            index = state & np.uint32(0xFF)
            index[:count] ^= lanes[:, column]
            state = table[index] ^ (state >> np.uint32(8))
        columns = state[count:].tolist()
        for remainder in state[:count].tolist():
            advanced = 0
            for bit in range(32):
                if crc >> bit & 1:
                    advanced ^= columns[bit]
            crc = advanced ^ remainder
    numbers = table.tolist()
    for byte in content[whole:].tolist():
        crc = numbers[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _ALL
