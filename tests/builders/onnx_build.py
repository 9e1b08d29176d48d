"""ONNX models, in a few lines: messages of Protocol Buffers."""

import struct

import numpy as np

TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "float64": 11, "uint32": 12, "uint64": 13, "complex64": 14, "bfloat16": 16, "float8_e4m3fn": 17,
}  # fmt: skip


def varint(value):
    value &= (1 << 64) - 1
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def number(field, value):
    return varint(field << 3) + varint(value)


def message(field, *parts):
    """A field of text, bytes or a message."""
    data = b"".join(part.encode() if isinstance(part, str) else bytes(part) for part in parts)
    return varint(field << 3 | 2) + varint(len(data)) + data


def packed(field, numbers):
    return message(field, *map(varint, numbers))


def floats(field, values, letter="f"):
    return message(field, struct.pack(f"<{len(values)}{letter}", *values))


def pair(field, key, value):
    return message(field, message(1, key), message(2, value) if isinstance(value, str) else number(2, value))


def tensor(name, value, *more, dims=None, kind=None, raw=True):
    """The content of a TensorProto: an array as raw_data, or the caller's fields."""
    shape = value.shape if dims is None else dims
    parts = [*(number(1, n) for n in shape), number(2, TYPES[value.dtype.name] if kind is None else kind), *more]
    parts.append(message(8, name))
    if raw:
        parts.append(message(9, np.ascontiguousarray(value).tobytes()))
    return b"".join(parts)


def described(name, kind, dims, *more):
    """The content of a TensorProto without elements."""
    return tensor(name, np.zeros(0), *more, dims=dims, kind=kind, raw=False)


def external(name, kind, dims, **entries):
    """The content of a TensorProto with its elements in another file."""
    return described(name, kind, dims, number(14, 1), *(pair(13, key, str(value)) for key, value in entries.items()))


def constant(output, content, *more):
    """The content of a Constant node."""
    attribute = message(5, message(1, "value"), message(5, content), number(20, 4))
    return b"".join([message(2, output), message(4, "Constant"), attribute, *more])


def graph(*tensors, nodes=(), more=(), name="main"):
    """The content of a GraphProto."""
    return b"".join(
        [*(message(1, node) for node in nodes), message(2, name), *(message(5, content) for content in tensors), *more]
    )


def model(content, *more):
    """The bytes of a model with one graph."""
    return b"".join([number(1, 10), message(2, "safeload tests"), message(7, content), pair(8, "", 21), *more])


def sample():
    """A model with initializers of several kinds, a constant, and a graph in a node."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    inner = graph(tensor("w", values + 10), nodes=[constant("inner", tensor("", values[0]))], name="then")
    condition = b"".join([message(3, "if"), message(4, "If"), message(5, message(1, "then_branch"), message(6, inner))])
    tensors = [
        tensor("a", values),
        described("floats", 1, (2,), floats(4, [1.5, -2])),
        described("half", 10, (3,), packed(5, np.array([1, 2, -3], np.float16).view(np.uint16).tolist())),
        described("small", 22, (5,), message(9, bytes([0x81, 0x7F, 0x0F]))),
        described("wide", 7, (2,), packed(7, [-1, 1 << 40])),
    ]
    nodes = [constant("c", tensor("", values.T)), condition]
    return model(graph(*tensors, nodes=nodes), pair(14, "license", "MIT"))


def single(weights, path):
    path.write_bytes(model(graph(*(tensor(name, array) for name, array in weights.items()))))
