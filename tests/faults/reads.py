"""The operations that read: each with what it comes to, the same for the same tensors."""

import hashlib

import numpy as np
from builders.inside import manifest

import safeload
from safeload import QuantizedTensor

FORMATS = [
    *("safetensors", "long header", "gguf", "moon", "npz", "npz, compressed"),
    *("torch zip", "torch legacy", "shards"),
]


class _Bytes:
    """The bytes of an array: comparing them takes a fraction of the time that hashing them takes."""

    def __init__(self, array):
        flat = np.ascontiguousarray(array).reshape(-1)
        self.words = flat.view(np.uint8 if flat.nbytes % 8 else np.uint64)

    def __eq__(self, other):
        return np.array_equal(self.words, other.words)

    def __repr__(self):
        return hashlib.sha1(self.words).hexdigest()


def digest(value):
    """A value that is the same for the same names, shapes and bytes."""
    if isinstance(value, dict):
        return {name: digest(item) for name, item in value.items()}
    if isinstance(value, QuantizedTensor):
        return value.scheme, digest(value.data), None if value.scale is None else digest(value.scale)
    return value.dtype.name, value.shape, _Bytes(value)


def listing(path):
    with safeload.open(path) as checkpoint:
        return [(info.name, info.dtype, info.shape) for info in checkpoint.tensors.values()], dict(checkpoint.metadata)


def slices(path):
    with safeload.open(path) as checkpoint:
        return digest({name: checkpoint.get_slice(name)[1:3] for name in checkpoint})


def filled(path):
    with safeload.open(path) as checkpoint:
        out = {name: np.empty(info.shape, np.float32) for name, info in checkpoint.tensors.items()}
        checkpoint.load(dtype="float32", out=out)
    return digest(out)


def transposed(path):
    """Through strides: the tensors of a layout are read as grids."""
    entry = safeload.StackedTensor("w", "middle.weight", transpose=True)
    return digest(safeload.stack(path, safeload.Layout("test", (entry,)), dtype="float32"))


def hashes(path):
    with safeload.open(path) as checkpoint:
        return manifest.make(checkpoint)["tensors"]


LOADS = {
    "list": listing,
    "load": lambda path: digest(safeload.load(path, backend="pread")),
    "load directly": lambda path: digest(safeload.load(path, backend="direct")),
    "load directly as f32": lambda path: digest(safeload.load(path, backend="direct", dtype="float32")),
    "load as f32": lambda path: digest(safeload.load(path, backend="pread", dtype="float32")),
    "slice": slices,
    "fill": filled,
}
WORK = {
    **LOADS,
    "transpose": transposed,
    "hash": hashes,
    "quantize to q8_0": lambda path: digest(safeload.load_quantized(path, "q8_0")),
    "quantize to int8": lambda path: digest(safeload.load_quantized(path, "int8")),
    "stats": lambda path: repr(safeload.stats(path)),
    "diff": lambda path: str(safeload.diff(path, path)).splitlines()[1:],
}
# Every format is read in each of the ways to read, two of them go through everything else.
CASES = [(format, name) for format in FORMATS for name in (WORK if format in ("shards", "gguf") else LOADS)]
