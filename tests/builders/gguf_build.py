"""GGUF files byte by byte, also those that no writer would make: after the format's own description."""

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
MAGIC = b"GGUF"


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(type, content):
    """A value after the number of its type; of an array: (type of the elements, elements)."""
    if type == STRING:
        return text(content)
    if type == ARRAY:
        item, elements = content
        return struct.pack("<IQ", item, len(elements)) + b"".join(value(item, element) for element in elements)
    return struct.pack(f"<{CODES[type]}", content)


def entry(key, type, content):
    return text(key) + struct.pack("<I", type) + value(type, content)


def tensor(name, dims, type, offset):
    """A description; dims innermost first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type, offset)


def build(
    entries=(),
    tensors=(),
    data=b"",
    *,
    version=3,
    tensor_count=None,
    entry_count=None,
    alignment=32,
    magic=MAGIC,
):
    """A file of entries and tensors that are bytes already."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data else head


def part(number, count, total, names, *, more=(), types=(U16, U16, I32)):
    """A part of a split file, its tensors of 8 F32 each; a number that is None is left out."""
    keys = ("split.no", "split.count", "split.tensors.count")
    entries = [
        entry(key, type, value)
        for key, type, value in zip(keys, types, (number, count, total), strict=True)
        if value is not None
    ]
    tensors = [tensor(name, [8], 0, 32 * k) for k, name in enumerate(names)]
    return build([*entries, *more], tensors, bytes(32 * len(names)))
