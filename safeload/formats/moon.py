"""The MOON format: f16 tensors that an engine reads in a loop. Little-endian.

1. u32 magic 0x4D4F4F4E ("NOOM" in the file), u32 version 2
2. for each tensor, to the end of the file:
   u32 size of the name in bytes, u32 number of dims, u32 number of elements,
   the name in UTF-8, the dims as u64, the elements as f16
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.arrays import array_fits, check_mapping, not_an_array, refuse_masked
from ..base.listed_table import ListedTable, Listing
from ..base.paths import PathLike
from ..base.text import check_name, show
from ..engine.read.lazy import Lazy, materialize
from ..engine.run.atomic_file import AtomicFile
from ..engine.run.memory import address_of
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, LimitError, SafeloadError, UnsupportedError
from .registry import Candidate, Content, OpenRequest

MAGIC = 0x4D4F4F4E
VERSION = 2

# Limits of the format: its first reader stores names and dims in arrays of this length.
MAX_NAME = 256
MAX_DIMS = 4
# Most tensors of a file: an entry of 14 bytes takes about 150 bytes of memory. Real files have some hundreds.
MAX_TENSORS = 1_000_000
# Bytes read at a time: the header of an entry takes at most 300, and small tensors lie close together.
_WINDOW = 4096
# The number of elements is a u32.
MAX_ELEMENTS = (1 << 32) - 1

_HEAD = struct.Struct("<II")
_ENTRY = struct.Struct("<III")
_F16 = dtypes.BY_CODE["F16"]


# ---- read ----


class _MoonReader:
    """Reads entries in order and reports faults with their byte position."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._window, self._window_at = b"", 0
        self.position = 0

    def take(self, size: int, what: str) -> bytes:
        start = self.position - self._window_at
        if start + size > len(self._window):
            self._window, self._window_at, start = self._file.read_at(self.position, _WINDOW), self.position, 0
        data = self._window[start : start + size]
        if len(data) < size:
            raise self.fault(f"{what} needs {size} bytes, but the file ends after {len(data)} of them")
        self.position += size
        return data

    def fault(self, message: str, position: int | None = None) -> FormatError:
        return FormatError(message, self._file.path, self.position if position is None else position)


def read(candidate: Candidate, wanted: OpenRequest) -> Content:
    """An open file with its table; see `read_table`."""
    candidate.file.table = read_table(candidate.file)
    return Content(candidate.file)


def read_table(file: WeightFile) -> ListedTable:
    """The tensors of an open file, in file order.

    Raises:
        FormatError: the file breaks the format; the error has the byte position.
        LimitError: more than `MAX_TENSORS` tensors.
    """
    reader = _MoonReader(file)
    magic, version = _HEAD.unpack(reader.take(_HEAD.size, "the MOON header"))
    if magic != MAGIC:
        raise reader.fault(f"magic is {magic:#010x}, but MOON's is {MAGIC:#010x}", 0)
    if version != VERSION:
        raise reader.fault(f"version is {version}, but only {VERSION} is known", 4)
    return ListedTable(_entries(reader, file))


def _entries(reader: _MoonReader, file: WeightFile) -> Iterator[Listing]:
    names: set[str] = set()
    while reader.position < file.size:
        if len(names) == MAX_TENSORS:
            raise LimitError(f"{file.path}: more than {MAX_TENSORS} tensors")
        begin = reader.position
        entry = _read_entry(reader, file.size)
        if entry.name in names:
            raise reader.fault(f"duplicate tensor {show(entry.name)}", begin)
        names.add(entry.name)
        yield entry


def _read_entry(reader: _MoonReader, file_size: int) -> Listing:
    """Reads the header of a tensor and skips its elements."""
    begin = reader.position
    name_size, rank, count = _ENTRY.unpack(reader.take(_ENTRY.size, "the head of a tensor"))
    if not 1 <= name_size <= MAX_NAME:
        raise reader.fault(f"a name of {name_size} bytes, but MOON has 1 to {MAX_NAME}", begin)
    if rank > MAX_DIMS:
        raise reader.fault(f"a tensor of {rank} dims, but MOON has at most {MAX_DIMS}", begin + 4)
    raw = reader.take(name_size, "a name")
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise reader.fault(f"a name is not UTF-8: {error.reason}", begin + _ENTRY.size + error.start) from None
    shape = struct.unpack(f"<{rank}Q", reader.take(8 * rank, f"tensor {show(name)}: the dims"))
    product = math.prod(shape)
    if product != count:
        hint = ": it looks like a byte count" if count == 2 * product else ""
        raise reader.fault(
            f"tensor {show(name)}: {count} elements, but the product of {list(shape)} is {product}{hint}", begin + 8
        )
    end = reader.position + 2 * count
    if end > file_size:
        left = file_size - reader.position
        raise reader.fault(f"tensor {show(name)}: F16 {list(shape)} needs {2 * count} bytes, but {left} are left")
    if not array_fits(shape, 2):  # reachable only with a dim of zero
        raise reader.fault(f"tensor {show(name)}: no array can have the shape {list(shape)}", begin + 12 + name_size)
    listing = Listing(name, _F16, shape, reader.position, end)
    reader.position = end
    return listing


# ---- write ----


def write(
    tensors: Mapping[str, Any],
    metadata: Mapping[Any, Any] | None,
    path: PathLike,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Writes tensors for `convert`; metadata is left out, as the format has none."""
    save(tensors, path, overwrite=overwrite, durable=durable)


def save(tensors: Mapping[str, Any], path: PathLike, *, overwrite: bool = True, durable: bool = True) -> None:
    """Writes a MOON file in the order of ``tensors``; see `safeload.moon.save_file`."""
    check_mapping(tensors, "tensors")
    tensors = {name: np.asarray(v) if isinstance(v, np.generic) else v for name, v in tensors.items()}
    heads = [_entry(name, value) for name, value in tensors.items()]
    size = _HEAD.size + sum(
        len(head) + 2 * math.prod(value.shape) for head, value in zip(heads, tensors.values(), strict=True)
    )
    with AtomicFile(path, size, overwrite=overwrite, durable=durable) as file:
        _write(file, _HEAD.pack(MAGIC, VERSION))
        for head, value in zip(heads, tensors.values(), strict=True):
            _write(file, head)
            array = np.ascontiguousarray(materialize(value), "<f2")
            if array.size:
                file.write([(address_of(array), array.nbytes)])
            del array  # freed before the next one is made


def _write(file: AtomicFile, data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    file.write([(address_of(array), array.nbytes)])


def _entry(name: Any, value: Any) -> bytes:
    """The bytes before a tensor's elements.

    Raises:
        TypeError: a name is not a str, or a value is not an array.
        UnsupportedError: the dtype is not float16.
        SafeloadError: a name, a rank or a number of elements beyond the limits of the format.
    """
    check_name(name)
    if not isinstance(value, (np.ndarray, Lazy)) and not hasattr(value, "scheme"):
        raise not_an_array(f"tensor {show(name)}", value)
    if not isinstance(value, (np.ndarray, Lazy)):
        raise UnsupportedError(
            f'tensor {show(name)} is {value.scheme}; MOON holds float16 arrays: pass dtype="float16"',
            tensor=name,
        )
    refuse_masked(value, f"tensor {show(name)}")
    if value.dtype.newbyteorder("=") != np.float16:
        floating = dtypes.of_array(value, name).floating
        advice = 'pass dtype="float16"' if floating else "leave it out"
        message = f"tensor {show(name)} is {value.dtype.name}; MOON holds only float16: {advice}"
        raise UnsupportedError(message, tensor=name)
    try:
        raw: bytes = name.encode()
    except UnicodeEncodeError:
        message = f"tensor name {name[:40]!r} holds a lone surrogate, which UTF-8 cannot write"
        raise SafeloadError(message, tensor=name) from None
    count = math.prod(value.shape)
    if not 1 <= len(raw) <= MAX_NAME:
        message = f"tensor {name[:40]!r}: its name has {len(raw)} bytes, but MOON has 1 to {MAX_NAME}"
        raise SafeloadError(message, tensor=name)
    if len(value.shape) > MAX_DIMS:
        message = f"tensor {show(name)} has {len(value.shape)} dims, but MOON has at most {MAX_DIMS}"
        raise SafeloadError(message, tensor=name)
    if count > MAX_ELEMENTS:
        raise SafeloadError(
            f"tensor {show(name)} has {count} elements, but MOON counts them in 32 bits: at most {MAX_ELEMENTS}",
            tensor=name,
        )
    return _ENTRY.pack(len(raw), len(value.shape), count) + raw + struct.pack(f"<{len(value.shape)}Q", *value.shape)
