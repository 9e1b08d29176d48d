"""Attributes of HDF5 objects that hold text, read without libhdf5: it trusts lengths and loops over malformed heaps.

1. The header of an object, version 1: 1, 0, number of messages (2 bytes), references (4), size (4), 4 bytes; then
   messages of type (2), size (2), flags (1), 3 bytes and data. Version 2: "OHDR", 2, flags (1), times (16 if flags &
   32), limits (4 if flags & 16), size (1 << (flags & 3) bytes); then messages of type (1), size (2), flags (1), order
   (2 if flags & 4) and data, and a checksum (4).
2. Message 16 continues a header elsewhere: offset (8), size (8). In version 2 "OCHK" begins such a block.
3. Message 12 is an attribute: version (1 to 3), flags (1), sizes of name, type and space (2 each), an encoding (1;
   version 3 only), then these three, filled up to multiples of 8 in version 1, then the value.
4. A type: class in the low 4 bits, 3 bytes of properties, size (4). Class 3 is a text of this size, class 9 a text in a
   heap: length (4), offset of the heap (8), index (4).
5. A space: version (1), axes (1), ...; its dims follow at byte 8 in version 1, at byte 4 in version 2.
6. A heap: "GCOL", 1, 3 bytes, size (8), then objects of index (2), references (2), 4 bytes, size (8) and data, filled
   up to a multiple of 8. Index 0 is free space, whose size includes its header.

Attributes outside of the header (more than 8, or of more than 64 KiB) are not found, as if there were none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ...base.messages import error_about
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, LimitError

# Bytes of all texts of an attribute, blocks and bytes of a header, and bytes of a heap.
MAX_ATTRIBUTE = 64 << 20
MAX_BLOCKS = 1024
MAX_HEADER = 16 << 20
MAX_HEAP = 256 << 20

_ATTRIBUTE, _CONTINUATION = 12, 16
_TEXT, _VARIABLE = 3, 9
_SHARED = 2  # flag of a message whose data is elsewhere
_REFERENCE, _OBJECT = struct.Struct("<IQI"), struct.Struct("<HH4xQ")


class _Message(NamedTuple):
    """A message of a header."""

    kind: int
    flags: int
    data: bytes


def texts_of(file: WeightFile, address: int, names: frozenset[str]) -> dict[str, bytes | list[bytes]]:
    """Return the attributes that hold a text or a list of texts; a number can follow a name, as in ``layer_names0``."""
    attributes: dict[str, bytes | list[bytes]] = {}
    for message in _messages(file, address):
        if message.kind == _ATTRIBUTE and not message.flags & _SHARED:
            name = _name_of(message.data).decode("utf-8", "replace")
            if name.rstrip("0123456789") in names:
                value = _value_of(file, message.data, name)
                if value is not None:
                    attributes[name] = value
    return attributes


def _messages(file: WeightFile, address: int) -> Iterator[_Message]:
    head = file.read_at(address, 64)
    if head[:4] == b"OHDR":
        flags = head[5] if len(head) > 5 else 0
        at = 6 + 16 * bool(flags & 32) + 4 * bool(flags & 16)
        width = 1 << (flags & 3)
        begin, size = address + at + width, int.from_bytes(head[at : at + width], "little")
        order, version = bool(flags & 4), 2
    elif head[:1] == b"\1" and len(head) >= 16:
        begin, size = address + 16, int.from_bytes(head[8:12], "little")
        order, version = False, 1
    else:
        raise FormatError("the header of an HDF5 object is malformed", file.path, min(address, file.size))
    blocks = [(begin, size)]
    total = 0
    for count, (begin, size) in enumerate(blocks):  # grows
        total += size
        if count >= MAX_BLOCKS or total > MAX_HEADER:
            raise error_about(LimitError, "the header of an HDF5 object is too large", path=file.path)
        data = file.read_at(begin, size)
        if len(data) < size:
            raise FormatError("the header of an HDF5 object is cut off", file.path, min(begin, file.size))
        if version == 2 and count:
            data = data[4:-4]  # "OCHK" and the checksum
        for message in _divided(data, version, order):
            if message.kind == _CONTINUATION and len(message.data) >= 16:
                blocks.append(struct.unpack_from("<QQ", message.data))
            yield message


def _divided(data: bytes, version: int, order: bool) -> Iterator[_Message]:
    """Yield the messages of a block; less than a message is filling."""
    at, head = 0, 8 if version == 1 else 6 if order else 4
    while at + head <= len(data):
        if version == 1:
            kind, size, flags = struct.unpack_from("<HHB", data, at)
        else:
            kind, size, flags = struct.unpack_from("<BHB", data, at)
        yield _Message(kind, flags, data[at + head : at + head + size])
        at += head + size


def _parts_of(data: bytes) -> tuple[bytes, bytes, bytes, bytes] | None:
    """Return name, type, space and value of an attribute; None for an unknown version."""
    if len(data) < 8 or data[0] not in (1, 2, 3) or (data[0] > 1 and data[1]):
        return None  # flags say that type or space are elsewhere
    sizes = struct.unpack_from("<HHH", data, 2)
    at = 9 if data[0] == 3 else 8
    parts = []
    for size in sizes:
        parts.append(data[at : at + size])
        at += size + (-size % 8 if data[0] == 1 else 0)
    name, kind, space = parts
    return name, kind, space, data[at:]


def _name_of(data: bytes) -> bytes:
    parts = _parts_of(data)
    return b"" if parts is None else parts[0].partition(b"\0")[0]


def _value_of(file: WeightFile, data: bytes, name: str) -> bytes | list[bytes] | None:
    """Return the text or texts of an attribute; None if it holds something else."""
    parts = _parts_of(data)
    if parts is None or len(parts[1]) < 8 or len(parts[2]) < 4:
        return None
    _, kind, space, value = parts
    rank = space[1]
    at = 8 if space[0] == 1 else 4
    if rank > 1 or len(space) < at + 8 * rank or (space[0] == 2 and space[3] == 2):
        return None
    count = prod(struct.unpack_from(f"<{rank}Q", space, at))
    variable = kind[0] & 15 == _VARIABLE and kind[1] & 15 == 1
    if kind[0] & 15 != _TEXT and not variable:
        return None
    width = _REFERENCE.size if variable else int.from_bytes(kind[4:8], "little")
    if not width or count * width > len(value):
        text = f"the attribute {show(name)} has {count:,} texts of {width:,} bytes, but {len(value):,} bytes"
        raise FormatError(text, file.path, 0)
    pieces = [value[k * width : (k + 1) * width] for k in range(count)]
    if variable:
        pieces = _from_heaps(file, pieces, name)
    texts = [piece.rstrip(b"\0") for piece in pieces]
    return texts if rank else texts[0]


def _from_heaps(file: WeightFile, references: list[bytes], name: str) -> list[bytes]:
    """Return the texts that references lead to."""
    heaps: dict[int, dict[int, bytes]] = {}
    texts, total = [], 0
    for reference in references:
        length, begin, index = _REFERENCE.unpack(reference)
        total += length
        if total > MAX_ATTRIBUTE:
            text = f"the attribute {show(name)} has more than {MAX_ATTRIBUTE:,} bytes"
            raise error_about(LimitError, text, path=file.path)
        if length and begin not in heaps:
            heaps[begin] = dict(_objects(file, begin))
        text_bytes = heaps[begin].get(index) if length else b""
        if text_bytes is None or len(text_bytes) < length:
            text = f"the attribute {show(name)} has a text that is not in its heap"
            raise FormatError(text, file.path, min(begin, file.size))
        texts.append(text_bytes[:length])
    return texts


def _objects(file: WeightFile, begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield the objects of a heap by index."""
    head = file.read_at(begin, 16)
    size = int.from_bytes(head[8:16], "little")
    if head[:5] != b"GCOL\1" or begin + size > file.size:
        raise FormatError("a global heap of HDF5 is malformed", file.path, min(begin, file.size))
    if size > MAX_HEAP:
        raise error_about(LimitError, f"a global heap of {size:,} bytes", path=file.path)
    data = file.read_at(begin, size)
    at = 16
    while at + _OBJECT.size <= size:
        index, _, length = _OBJECT.unpack_from(data, at)
        if index == 0:  # free space ends the heap
            return
        end = at + _OBJECT.size + length
        if end > size:
            raise FormatError("a text reaches beyond its global heap", file.path, begin + at)
        yield index, data[at + _OBJECT.size : end]
        at = end + -length % 8
