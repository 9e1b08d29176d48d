"""The MOON format: f16 tensors for an engine that reads them in a loop. Little-endian.

1. u32 magic 0x4D4F4F4E ("NOOM" in the file), u32 version 2
2. for each tensor, to the end of the file:
   u32 size of the name in bytes, u32 number of dims, u32 number of elements,
   the name in UTF-8, the dims as u64, the elements as f16
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from itertools import chain, starmap
from typing import Any

import numpy as np

from ..core import dtypes
from ..core.arrays import Array, array_fits, check_mapping
from ..core.atomic_file import AtomicFile, pieces_of, write_pieces
from ..core.npy import plain_array
from ..core.registry import Candidate, Content, OpenRequest, StoredTensor
from ..core.tensors import Lazy
from ..core.text import PathLike, encode, error_about, show
from ..core.weight_file import ByteReader
from ..errors import LimitError, SafeloadError, UnsupportedError

MAGIC = 0x4D4F4F4E
VERSION = 2

# Limits of the format: its first reader stores names and dims in arrays of these lengths.
MAX_NAME = 256
MAX_DIMS = 4
# Maximum number of tensors: a 14-byte entry takes about 150 bytes of memory. Real files have a few hundred tensors.
MAX_TENSORS = 1_000_000
# The number of elements is a u32.
MAX_ELEMENTS = (1 << 32) - 1

_HEAD = struct.Struct("<II")
_ENTRY = struct.Struct("<III")


# ---- read ----


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the tensors of an open file in file order."""
    reader = ByteReader(candidate.file)
    magic, version = _HEAD.unpack(reader.take(_HEAD.size, "the MOON header"))
    if magic != MAGIC:
        raise reader.fault(f"magic is {magic:#010x}, expected {MAGIC:#010x}", 0)
    if version != VERSION:
        raise reader.fault(f"version is {version}, but only {VERSION} is supported", 4)
    return candidate.content(_entries(reader))


def _entries(reader: ByteReader) -> Iterator[StoredTensor]:
    """Read the header of each tensor and skip its elements."""
    names: set[str] = set()
    while reader.position < reader.file.size:
        if len(names) == MAX_TENSORS:
            raise error_about(LimitError, f"the file has more than {MAX_TENSORS} tensors", path=reader.file.path)
        begin = reader.position
        name_size, rank, count = _ENTRY.unpack(reader.take(_ENTRY.size, "the head of a tensor"))
        if not 1 <= name_size <= MAX_NAME:
            raise reader.fault(f"a name of {name_size} bytes, but MOON allows 1 to {MAX_NAME}", begin)
        if rank > MAX_DIMS:
            raise reader.fault(f"a tensor of {rank} dims, but MOON allows at most {MAX_DIMS}", begin + 4)
        name = reader.take_text(name_size, "a name")
        shape = struct.unpack(f"<{rank}Q", reader.take(8 * rank, f"the shape of tensor {show(name)}"))
        if (product := math.prod(shape)) != count:
            hint = ": it looks like a byte count" if count == 2 * product else ""
            text = f"has {count} elements, but the product of {list(shape)} is {product}{hint}"
            raise reader.fault(text, begin + 8, name)
        offset, left = reader.position, reader.file.size - reader.position
        if 2 * count > left:
            raise reader.fault(f"of F16 {list(shape)} needs {2 * count} bytes, but {left} are left", tensor=name)
        if not array_fits(shape, 2):  # reachable only with a dim of zero
            raise reader.fault(f": no array can have the shape {list(shape)}", begin + 12 + name_size, name)
        if name in names:
            raise reader.fault(f"duplicate tensor {show(name)}", begin)
        reader.position += 2 * count
        names.add(name)
        yield StoredTensor(name, "F16", shape, offset)


# ---- write ----


def write(tensors: Mapping[str, Any], metadata: Mapping[Any, Any] | None, path: PathLike, **options: Any) -> None:
    """Write a MOON file in the order of ``tensors``; see `safeload.moon.save_file`. MOON has no metadata."""
    check_mapping(tensors, "tensors")
    head = np.frombuffer(_HEAD.pack(MAGIC, VERSION), np.uint8)
    entries = [(head, np.empty(0, "<f2")), *starmap(_entry, tensors.items())]
    with AtomicFile(path, sum(head.nbytes + 2 * math.prod(value.shape) for head, value in entries), **options) as file:
        write_pieces(file, chain.from_iterable(map(pieces_of, chain.from_iterable(entries))))


def _entry(name: Any, value: Any) -> tuple[Array, Array | Lazy]:
    """Return the bytes before a tensor's elements, and the array, checked."""
    value = plain_array(name, value, '; MOON holds only float16 arrays: pass dtype="float16"')
    if value.dtype.newbyteorder("=") != np.float16:
        row = dtypes.row_of(value.dtype)
        advice = 'pass dtype="float16"' if row is not None and row.floating else "leave it out"
        raise error_about(UnsupportedError, f"is {value.dtype.name}; MOON holds only float16: {advice}", tensor=name)
    raw = encode(name, "tensor name", tensor=name)
    count = math.prod(value.shape)
    for fits, text in (
        (1 <= len(raw) <= MAX_NAME, f"a name of {len(raw)} bytes, but MOON allows 1 to {MAX_NAME}"),
        (len(value.shape) <= MAX_DIMS, f"{len(value.shape)} dims, but MOON allows at most {MAX_DIMS}"),
        (count <= MAX_ELEMENTS, f"{count} elements, but the 32-bit count of MOON allows at most {MAX_ELEMENTS}"),
    ):
        if not fits:
            raise error_about(SafeloadError, f"has {text}", tensor=name)
    dims = struct.pack(f"<{len(value.shape)}Q", *value.shape)
    return np.frombuffer(_ENTRY.pack(len(raw), len(value.shape), count) + raw + dims, np.uint8), value
