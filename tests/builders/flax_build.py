"""Flax's MessagePack, in a few lines."""

import struct

import numpy as np

CHUNKED = "__msgpack_chunked_array__"


class Raw(bytes):
    """Bytes that stand in the file as they are."""


class Scalar:
    """A NumPy scalar, as extension 3."""

    def __init__(self, value):
        self.value = np.asarray(value)


def sized(size, small, codes):
    """The first bytes of a value with a length."""
    if small is not None and size < small[1]:
        return bytes([small[0] + size])
    for code, (width, letter) in zip(codes, ((1, "B"), (2, "H"), (4, "I")), strict=True):
        if code and size < 1 << 8 * width:
            return struct.pack(f">B{letter}", code, size)
    raise ValueError(size)


def extension(kind, payload):
    return sized(len(payload), None, (0xC7, 0xC8, 0xC9)) + bytes([kind]) + payload


def array(value, *, shape=None, dtype=None, elements=None, kind=1):
    """An array, with parts that may be wrong."""
    elements = np.ascontiguousarray(value).tobytes() if elements is None else elements
    parts = [list(value.shape) if shape is None else shape, value.dtype.name if dtype is None else dtype, elements]
    return extension(kind, pack(parts))


def pack(value):
    if isinstance(value, Raw):
        return bytes(value)
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        if 0 <= value < 128:
            return bytes([value])
        return struct.pack(">Bq", 0xD3, value) if value < 1 << 63 else struct.pack(">BQ", 0xCF, value)
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, complex):
        return extension(2, pack([value.real, value.imag]))
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogateescape")
        return sized(len(data), (0xA0, 32), (0xD9, 0xDA, 0xDB)) + data
    if isinstance(value, bytes):
        return sized(len(value), None, (0xC4, 0xC5, 0xC6)) + value
    if isinstance(value, dict):
        head = sized(len(value), (0x80, 16), (0, 0xDE, 0xDF))
        return head + b"".join(pack(key) + pack(item) for key, item in value.items())
    if isinstance(value, list):
        return sized(len(value), (0x90, 16), (0, 0xDC, 0xDD)) + b"".join(map(pack, value))
    if isinstance(value, Scalar):
        return array(value.value, kind=3)
    return array(value)


def chunked(value, count):
    """A chunked array of so many elements in a chunk."""
    flat = value.reshape(-1)
    parts = [flat[k : k + count] for k in range(0, flat.size, count)]
    numbered = [{str(k): part for k, part in enumerate(sequence)} for sequence in (value.shape, parts)]
    return {CHUNKED: True, "shape": numbered[0], "chunks": numbered[1]}


def single(weights, path):
    path.write_bytes(pack(dict(weights)))
