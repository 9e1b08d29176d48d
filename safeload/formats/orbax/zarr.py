"""zarr arrays, versions 2 and 3, as Orbax and tensorstore write them: their metadata, and their chunks as boxes.

1. Version 2, ``.zarray``: JSON with ``zarr_format`` 2, ``shape``, ``chunks``, ``dtype`` (NumPy's code "<f4", or
   tensorstore's name "bfloat16"), ``order`` "C" or "F", ``compressor`` (null or ``{"id": "zstd"}``), ``filters``
   (none), ``dimension_separator`` "." or "/", ``fill_value``. Keys of chunks: "0.1"; "0" without axes.
2. Version 3, ``zarr.json``: ``zarr_format`` 3, ``node_type`` "array", ``shape``, ``data_type``, ``chunk_grid``
   (regular), ``chunk_key_encoding`` ("default": "c/0/1", and "c" without axes; or "v2"), ``codecs``, ``fill_value``.
3. Codecs of version 3: ``transpose`` (once), ``bytes`` (``endian``), then ``crc32c`` and ``zstd`` (each once). Or a
   single ``sharding_indexed``: a file holds a grid of smaller chunks with codecs of their own.
4. Chunks at the border have full size. int2 and int4 take a byte each, of which the low bits count.

Chunks:

1. A key holds a chunk, or with ``sharding_indexed`` a shard: a grid of chunks in C order and an index, before or after
   them: u64 offset and u64 length of each chunk, little-endian, then a CRC-32C if the codecs say so. Offsets count from
   the beginning of the value; both numbers are 2**64 - 1 for a chunk that is not stored.
2. A chunk that is not stored has the fill value, unless the checkpoint says that all chunks were stored. tensorstore
   leaves out chunks that equal it, such as the zeros of a new optimizer, so few keys can stand for large arrays. They
   cost memory only when they are read.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, c_strides
from ...base.cached import cached_property
from ...base.messages import error_about
from ...base.table import Unknown
from ...base.text import show
from ...errors import FormatError, LimitError, UnsupportedError
from ...stores.store import ByteStore, Unpacked
from ..boxed import MAX_RANK, Box, BoxedListing, Region, Stored
from ..zstd import MAX_RATIO, FrameStore, KeptFrames, content_of, decompressed, reader
from .ocdbt import Value, crc32c

V2, V3 = ".zarray", "zarr.json"
ZSTD, CRC32C = "zstd", "crc32c"
_LARGEST = 1 << 62
_CODE = re.compile(r"([<>|])([biufc])([0-9]{1,2})", re.ASCII)
_HEX = re.compile(r"0x[0-9a-fA-F]{1,16}", re.ASCII)
# Dtypes of fewer than 8 bits, which take a byte each: opened as int8, with the bits that count.
_NARROW = {"int4": 4, "int2": 2}
_V2_FIELDS = {
    "zarr_format", "shape", "chunks", "dtype", "order", "compressor", "filters", "dimension_separator", "fill_value"
}  # fmt: skip
_V3_FIELDS = {
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "fill_value",
    "attributes", "dimension_names", "storage_transformers",
}  # fmt: skip


class ChunkLayout(NamedTuple):
    """How the elements of a chunk are stored."""

    shape: tuple[int, ...]  # of every chunk
    itemsize: int
    bits: int | None = None  # the low bits of each byte that count, if not all
    axes: tuple[int, ...] | None = None  # order in which the axes are stored; None for C order
    swapped: bool = False  # True if elements are big-endian
    steps: tuple[str, ...] = ()  # what was done to the bytes, in order

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, before the steps."""
        return prod(self.shape) * self.itemsize

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Bytes between neighbours along each axis; None for C order."""
        if self.axes is None:
            return None
        strides, step = [0] * len(self.shape), self.itemsize
        for axis in reversed(self.axes):
            strides[axis] = step
            step *= self.shape[axis]
        return tuple(strides)


class ZarrArray(NamedTuple):
    """An array of a checkpoint."""

    row: dtypes.Dtype
    shape: tuple[int, ...]
    grid: tuple[int, ...]  # shape of a chunk with a key of its own
    chunk: ChunkLayout
    sharded: bool  # True if the value of a key is a grid of chunks with an index
    index_first: bool  # True if the index precedes the chunks
    index_checked: bool  # True if a CRC-32C follows the index
    separator: str
    prefix: str  # "c" in version 3
    fill: Any  # as in the metadata

    @property
    def counts(self) -> list[int]:
        """Chunks along each axis."""
        return [-(-size // chunk) for size, chunk in zip(self.shape, self.grid, strict=True)]

    def index_of(self, number: int) -> tuple[int, ...]:
        """Return the index of a chunk by its number in C order."""
        index: list[int] = []
        for count in reversed(self.counts):
            number, k = divmod(number, count)
            index.insert(0, k)
        return tuple(index)

    def inside(self, shape: Sequence[int], offsets: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the part of a chunk that is inside the array; none is positive beyond it."""
        return tuple(map(min, shape, map(int.__sub__, self.shape, offsets)))

    def key(self, index: Sequence[int]) -> str:
        """Return the key of a chunk, after the name of the array and a slash."""
        parts = [*([self.prefix] if self.prefix else ()), *map(str, index)]
        return self.separator.join(parts) or "0"


class _Metadata:
    """A JSON object and how to complain about it."""

    def __init__(self, fields: Mapping[str, Any], path: str, name: str) -> None:
        self.fields = fields
        self.path = path
        self.name = name

    def error(self, text: str) -> FormatError:
        return error_about(FormatError, f": {text}", path=self.path, tensor=self.name)

    def unsupported(self, text: str) -> UnsupportedError:
        return UnsupportedError(f"has {text}", path=self.path, tensor=self.name)

    def shape(self, value: Any, what: str, *, least: int = 0) -> tuple[int, ...]:
        """Return a checked list of sizes."""
        valid = type(value) is list and all(type(n) is int and least <= n < _LARGEST for n in value)
        if not valid or len(value) > MAX_RANK:
            raise self.error(f"{what} must be a list of up to {MAX_RANK} sizes, got {show(value)[:100]}")
        return tuple(value)

    def dtype(self, text: Any, names: bool) -> tuple[dtypes.Dtype, int | None, bool]:
        """Return the row of a dtype, the bits that count, and True if it is big-endian."""
        match = _CODE.fullmatch(text) if type(text) is str and not names else None
        name = text
        if match is not None:
            kind, size = match[2], int(match[3])
            name = "bool" if match[0] == "|b1" else f"{_KINDS[kind]}{8 * size}" if kind != "b" else None
        if type(name) is str and name in _NARROW:
            return dtypes.BY_NAME["int8"], _NARROW[name], False
        row = dtypes.BY_NAME.get(name) if type(name) is str else None
        swapped = match is not None and match[1] == ">"
        if row is None or row.packed or (swapped and row.complex):
            raise self.unsupported(f"dtype {show(text)}, which no array can represent")
        return row, None, swapped and row.bits > 8

    def configuration(self, value: Any, what: str) -> tuple[str, Mapping[str, Any]]:
        """Return the name and the configuration of a codec or another extension of version 3."""
        if type(value) is str:
            return value, {}
        name = value.get("name") if type(value) is dict else None
        configuration = value.get("configuration", {}) if type(value) is dict else None
        if type(name) is not str or type(configuration) is not dict:
            raise self.error(f"{what} must have a name and a configuration, got {show(value)[:100]}")
        return name, configuration

    def check_fields(self, allowed: set[str]) -> None:
        """Refuse fields that may change the meaning of the array."""
        for name, value in self.fields.items():
            optional = type(value) is dict and value.get("must_understand") is False
            if name not in allowed and not optional:
                raise self.unsupported(f"the field {show(name)}, which safeload does not know")


_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}


def parse(fields: Mapping[str, Any], path: str, name: str, version: int) -> ZarrArray:
    """Return the array that metadata describes."""
    metadata = _Metadata(fields, path, name)
    actual = fields.get("zarr_format")
    if actual != version:
        raise metadata.error(f"zarr_format must be {version}, got {show(actual)}")
    array = _version2(metadata) if version == 2 else _version3(metadata)
    if len(array.grid) != len(array.shape) or len(array.chunk.shape) != len(array.shape):
        raise metadata.error(f"chunks of shape {list(array.grid)} do not divide an array of shape {list(array.shape)}")
    if any(outer % inner for outer, inner in zip(array.grid, array.chunk.shape, strict=True)):
        raise metadata.error(f"chunks of {list(array.chunk.shape)} do not divide shards of {list(array.grid)}")
    return array


def unreadable(fields: Mapping[str, Any], reason: str) -> Unknown:
    """Describe an array that `parse` does not support."""
    shape: Any = fields.get("shape")
    known = type(shape) is list and len(shape) <= MAX_RANK and all(type(n) is int and 0 <= n < _LARGEST for n in shape)
    dtype = show(fields.get("dtype", fields.get("data_type")))[:100]
    return Unknown(dtype.strip("'"), tuple(shape) if known else (), reason)


def _version2(metadata: _Metadata) -> ZarrArray:
    fields = metadata.fields
    metadata.check_fields(_V2_FIELDS)
    shape = metadata.shape(fields.get("shape"), "shape")
    chunks = metadata.shape(fields.get("chunks"), "chunks", least=1)
    row, bits, swapped = metadata.dtype(fields.get("dtype"), names=False)
    order, separator = fields.get("order"), fields.get("dimension_separator", ".")
    if order not in ("C", "F") or separator not in (".", "/"):
        raise metadata.error(f"order {show(order)} or dimension_separator {show(separator)} is unknown")
    if fields.get("filters"):
        raise metadata.unsupported(f"filters {show(fields['filters'])[:100]}, which safeload does not read")
    steps: tuple[str, ...] = ()
    compressor = fields.get("compressor")
    if compressor is not None:
        codec = compressor.get("id") if type(compressor) is dict else compressor
        if codec != ZSTD:
            raise metadata.unsupported(f"compressor {show(codec)[:100]}; safeload reads zstd and uncompressed chunks")
        steps = (ZSTD,)
    axes = tuple(reversed(range(len(shape)))) if order == "F" and len(shape) > 1 else None
    layout = ChunkLayout(chunks, dtypes.array_dtype(row.number).itemsize, bits, axes, swapped, steps)
    return ZarrArray(row, shape, chunks, layout, False, False, False, separator, "", fields.get("fill_value"))


def _version3(metadata: _Metadata) -> ZarrArray:
    fields = metadata.fields
    metadata.check_fields(_V3_FIELDS)
    if fields.get("node_type") != "array":
        raise metadata.error(f"node_type must be array, got {show(fields.get('node_type'))}")
    if fields.get("storage_transformers"):
        raise metadata.unsupported("storage_transformers, which safeload does not read")
    shape = metadata.shape(fields.get("shape"), "shape")
    kind, configuration = metadata.configuration(fields.get("chunk_grid"), "chunk_grid")
    if kind != "regular":
        raise metadata.unsupported(f"chunk_grid {show(kind)}; safeload reads regular grids")
    grid = metadata.shape(configuration.get("chunk_shape"), "chunk_shape", least=1)
    encoding, configuration = metadata.configuration(fields.get("chunk_key_encoding"), "chunk_key_encoding")
    separator = configuration.get("separator", "/" if encoding == "default" else ".")
    if encoding not in ("default", "v2") or separator not in (".", "/"):
        raise metadata.unsupported(f"chunk_key_encoding {show(encoding)} with separator {show(separator)}")
    row, bits, _ = metadata.dtype(fields.get("data_type"), names=True)
    codecs: Any = fields.get("codecs")
    first = codecs[0] if type(codecs) is list and codecs else None
    name, configuration = metadata.configuration(first, "codecs")
    sharded = name == "sharding_indexed"
    inner, checked, index_first = grid, False, False
    if sharded:
        if len(codecs) > 1:
            raise metadata.unsupported("codecs after sharding_indexed, which safeload does not read")
        inner = metadata.shape(configuration.get("chunk_shape"), "chunk_shape of sharding_indexed", least=1)
        codecs = configuration.get("codecs")
        checked = _index_codecs(metadata, configuration.get("index_codecs"))
        location = configuration.get("index_location", "end")
        if location not in ("start", "end"):
            raise metadata.error(f"index_location must be start or end, got {show(location)}")
        index_first = location == "start"
    axes, swapped, steps = _codecs(metadata, codecs, len(inner), row)
    layout = ChunkLayout(inner, dtypes.array_dtype(row.number).itemsize, bits, axes, swapped, steps)
    prefix = "c" if encoding == "default" else ""
    fill = fields.get("fill_value")
    return ZarrArray(row, shape, grid, layout, sharded, index_first, checked, separator, prefix, fill)


def _codecs(
    metadata: _Metadata, codecs: Any, rank: int, row: dtypes.Dtype
) -> tuple[tuple[int, ...] | None, bool, tuple[str, ...]]:
    """Return the order of the axes, True for big-endian elements, and the steps after that."""
    if type(codecs) is not list:
        raise metadata.error(f"codecs must be a list, got {show(codecs)[:100]}")
    axes: tuple[int, ...] | None = None
    swapped: bool | None = None
    steps: list[str] = []
    for codec in codecs:
        name, configuration = metadata.configuration(codec, "a codec")
        if name == "transpose" and axes is None and swapped is None:
            order: Any = configuration.get("order")
            numbers = type(order) is list and all(type(axis) is int for axis in order)
            if not numbers or sorted(order) != list(range(rank)):
                raise metadata.error(f"the order of transpose must list {rank} axes, got {show(order)[:100]}")
            axes = tuple(order)
        elif name == "bytes" and swapped is None:
            endian = configuration.get("endian", "little" if row.bits <= 8 else None)
            if endian not in ("little", "big"):
                raise metadata.error(f"endian must be little or big, got {show(endian)}")
            swapped = endian == "big" and row.bits > 8
            if swapped and row.complex:
                raise metadata.unsupported("big-endian complex numbers, which safeload does not read")
        elif name in (ZSTD, CRC32C) and swapped is not None and name not in steps:
            steps.append(name)
        else:
            text = (
                f"codec {show(name)} there; safeload reads transpose, bytes, zstd and crc32c, and one sharding_indexed"
            )
            raise metadata.unsupported(text)
    if swapped is None:
        raise metadata.error("codecs must include bytes")
    return axes, swapped, tuple(steps)


def _index_codecs(metadata: _Metadata, codecs: Any) -> bool:
    """Return True if a checksum follows the index of a shard."""
    if type(codecs) is not list:
        raise metadata.error(f"index_codecs must be a list, got {show(codecs)[:100]}")
    steps = [metadata.configuration(codec, "a codec of the index") for codec in codecs]
    names = [name for name, _ in steps]
    if names not in (["bytes"], ["bytes", CRC32C]) or steps[0][1].get("endian") != "little":
        raise metadata.unsupported(f"index_codecs {', '.join(map(show, names[:8]))}; safeload reads bytes and crc32c")
    return len(names) == 2


def fill_of(array: ZarrArray, path: str, name: str) -> bytes:
    """Return the bytes of an element that is not stored."""
    value, row = array.fill, array.row
    dtype = dtypes.array_dtype(row.number)
    special = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
    if value is None or value is False:
        return bytes(dtype.itemsize)
    try:
        if row.floating and type(value) is str and value in special:
            return np.array(special[value]).astype(dtype).tobytes()
        if row.floating and type(value) is str and _HEX.fullmatch(value):
            return int(value, 16).to_bytes(dtype.itemsize, "little")
        if row.floating and type(value) in (int, float):
            with np.errstate(over="ignore"):
                return np.array(value, np.float64).astype(dtype).tobytes()
        if row.code == "BOOL" and value is True:
            return b"\1"
        if dtype.kind in "iu" and type(value) is int:
            return value.to_bytes(dtype.itemsize, "little", signed=dtype.kind == "i")
        if row.complex and type(value) is list and all(type(part) in (int, float) for part in value):
            real, imaginary = value
            return np.array(complex(real, imaginary), dtype).tobytes()
    except (ValueError, OverflowError):
        pass
    text = f"lacks chunks, and its fill value {show(value)[:100]} is in a notation that safeload does not read"
    raise UnsupportedError(text, path=path, tensor=name)


# ---- chunks ----


# The length of a value that is a file.
WHOLE_FILE = -1
# Bytes of missing elements, besides those in proportion to the files: as for repeated elements of torch.
MAX_FILLED = 1 << 32
# Arrays of up to this many chunks are searched for in the order of the grid.
_FEW = 1 << 10
# Chunks in shards: each takes some 600 bytes of memory.
MAX_IN_SHARDS = 1 << 21
# Bytes of padding in chunks beyond the tensor, if they are more than three times the tensor.
MAX_PADDING = 1 << 20
# Larger compressed chunks are read forward, if up to _BESIDE lie side by side: each takes 2 MiB then. If threads
# unpacked and dropped large arrays, the allocator would keep their memory.
_STREAMED, _BESIDE = 256 << 10, 8
_CHECKSUM = 4
_ABSENT = 2**64 - 1


class StoredBytes(NamedTuple):
    """The bytes of a file, or of a chunk or shard in it."""

    store: ByteStore
    begin: int
    length: int
    path: str  # in messages


class _Chunks(NamedTuple):
    """What all chunks of a tensor share."""

    name: str
    layout: ChunkLayout
    fill: bytes | None  # an element of chunks that a shard lacks; None if all should be stored
    frames: KeptFrames | None  # keeps decompressors; None to unpack chunks as a whole

    def fault(self, text: str, stored: StoredBytes) -> FormatError:
        """Return the error for a malformed chunk."""
        return error_about(FormatError, f": {text}", path=stored.path, offset=stored.begin, tensor=self.name)

    def check_length(self, length: int, stored: StoredBytes) -> None:
        """Refuse a chunk of another length."""
        if length != self.layout.nbytes:
            raise self.fault(f"a chunk must have {self.layout.nbytes:,} bytes, got {length:,}", stored)


class _ZarrShard:
    """A value that holds a grid of chunks, whose index is read on first use."""

    def __init__(self, stored: StoredBytes, count: int, array: ZarrArray) -> None:
        self._stored = stored
        self._count = count
        self._array = array

    @cached_property
    def _index(self) -> Array:
        store, begin, length, path = self._stored
        size = _index_size(self._count, self._array)
        begin += 0 if self._array.index_first else length - size
        memory = bytearray(size)
        store.read_into(begin, memory)
        index = memory[: 16 * self._count]
        if self._array.index_checked and crc32c(index) != int.from_bytes(memory[-_CHECKSUM:], "little"):
            raise FormatError("the checksum of the index of a shard is wrong", path, begin)
        return np.frombuffer(index, "<u8").reshape(-1, 2)

    def locate(self, number: int, chunks: _Chunks, sizes: tuple[int, ...]) -> Stored:
        """Return the elements of a chunk."""
        store, begin, available, path = self._stored
        offset, length = self._index[number].tolist()
        if offset == length == _ABSENT:
            if chunks.fill is None:
                raise error_about(FormatError, "lacks a chunk that should be stored", path=path, tensor=chunks.name)
            element: Array = np.frombuffer(chunks.fill, np.uint8)
            return lambda: np.broadcast_to(element, (*sizes, len(element)))
        if offset + length > available:
            text = f"chunk {number} of a shard, [{offset:,}, {offset + length:,}), is outside its {available:,} bytes"
            raise FormatError(text, path, begin)
        return _locate(StoredBytes(store, begin + offset, length, path), chunks, sizes)


def _index_size(count: int, array: ZarrArray) -> int:
    return 16 * count + (_CHECKSUM if array.index_checked else 0)


def _locate(stored: StoredBytes, chunks: _Chunks, sizes: tuple[int, ...]) -> Stored:
    """Return the elements of a stored chunk, of which ``sizes`` are inside the tensor."""
    layout = chunks.layout
    if layout.bits is not None or layout.swapped or (layout.steps and not (chunks.frames and layout.steps == (ZSTD,))):
        return partial(_unpacked, stored, chunks, sizes)
    strides = layout.strides
    if strides is None and sizes != layout.shape:
        strides = c_strides(layout.shape, layout.itemsize)
    if not layout.steps:
        chunks.check_length(stored.length, stored)
        return Region(stored.store, stored.begin, strides)
    store, begin, length, path = stored
    return Region(FrameStore(store, begin, length, layout.nbytes, path, kept=chunks.frames), 0, strides)


def _unpacked(stored: StoredBytes, chunks: _Chunks, sizes: tuple[int, ...]) -> Array:
    layout = chunks.layout
    strides = layout.strides or c_strides(layout.shape, layout.itemsize)
    shape = (*layout.shape, layout.itemsize)
    elements: Array = np.ndarray(shape, np.uint8, _content(stored, chunks), 0, (*strides, 1))
    elements = elements[tuple(map(slice, sizes))]
    if layout.swapped:
        elements = elements[..., ::-1]
    if layout.bits is not None:
        unused = np.int8(8 - layout.bits)
        elements = (elements.view(np.int8) << unused >> unused).view(np.uint8)
    return np.ascontiguousarray(elements)


def _content(stored: StoredBytes, chunks: _Chunks) -> Array:
    """Undo the steps, the last one first."""
    store, begin, length, path = stored
    size, steps = chunks.layout.nbytes, chunks.layout.steps
    if steps == (ZSTD,):
        return content_of(store, begin, length, size, path)
    memory = np.empty(length, np.uint8)
    store.read_into(begin, memory)
    for k in reversed(range(len(steps))):
        if steps[k] == ZSTD:
            expected = size + _CHECKSUM * steps[:k].count(CRC32C)
            frame = Unpacked(memory.tobytes())
            memory = np.frombuffer(decompressed(frame, 0, frame.size, expected, path, name=chunks.name), np.uint8)
            continue
        checksum = int.from_bytes(memory[-_CHECKSUM:].tobytes(), "little")
        if len(memory) < _CHECKSUM or crc32c(memory[:-_CHECKSUM]) != checksum:
            raise chunks.fault("the checksum of a chunk is wrong", stored)
        memory = memory[:-_CHECKSUM]
    chunks.check_length(len(memory), stored)
    return memory


class ChunkFinder:
    """Finds the chunks of all tensors of a checkpoint."""

    def __init__(
        self, values: Mapping[str, Value], files: Mapping[str, StoredBytes], path: str, *, filled: bool
    ) -> None:
        self._values = values  # by key
        self._files = files  # open
        self._path = path
        self._filled = filled  # True if chunks that are not stored have the fill value
        self._frames = KeptFrames()
        self._in_shards = 0
        self._claimed = 0  # bytes of elements that are not stored
        self._provided = 0  # bytes of all chunks as stored
        self._used: dict[str, int] = {}  # bytes of chunks in each file

    @cached_property
    def _keys(self) -> list[str]:
        return sorted(self._values)

    def find(self, name: str, array: ZarrArray) -> list[tuple[tuple[int, ...], Value]]:
        """Return the first element and the value of each stored chunk."""
        stem = f"{name}/" if name else ""
        total = prod(array.counts)
        if total > _FEW:
            indices = sorted(self._stored_indices(stem, array))
        else:
            grid = product(*map(range, array.counts)) if total else ()
            indices = [index for index in grid if stem + array.key(index) in self._values]
        if len(indices) < total and not self._filled:
            first = next((k for k, index in enumerate(indices) if index != array.index_of(k)), len(indices))
            text = f": its chunk {array.key(array.index_of(first))} is missing; was the checkpoint copied as a whole?"
            raise error_about(FormatError, text, path=self._path, tensor=name)
        places: list[tuple[tuple[int, ...], Value]] = []
        stored = 0
        for index in indices:
            offsets = tuple(map(int.__mul__, index, array.grid))
            stored += prod(array.inside(array.grid, offsets))
            places.append((offsets, self._values[stem + array.key(index)]))
        self._claimed += (prod(array.shape) - stored) * array.chunk.itemsize
        return places

    def _stored_indices(self, stem: str, array: ZarrArray) -> Iterator[tuple[int, ...]]:
        """Yield the indices of the stored chunks, from the keys that begin with ``stem``."""
        counts = array.counts
        for key in islice(self._keys, bisect_left(self._keys, stem), None):
            if not key.startswith(stem):
                break
            parts = key[len(stem) :].split(array.separator)[bool(array.prefix) :]
            if len(parts) == len(counts) and all(part.isdecimal() and len(part) < 20 for part in parts):
                index = tuple(map(int, parts))
                if all(map(int.__lt__, index, counts)) and stem + array.key(index) == key:
                    yield index

    def listing(self, name: str, array: ZarrArray, places: Sequence[tuple[tuple[int, ...], Value]]) -> BoxedListing:
        """Return a tensor with its boxes; the files of ``places`` must be open."""
        layout = array.chunk
        if ZSTD in layout.steps:
            reader()
        tensor_bytes = prod(array.shape) * layout.itemsize
        if tensor_bytes and layout.nbytes > 4 * tensor_bytes + MAX_PADDING:
            text = f": chunks of {layout.nbytes:,} bytes are mostly padding of its {tensor_bytes:,} bytes"
            raise error_about(LimitError, text, path=self._path, tensor=name)
        inner = [-(-size // chunk) for size, chunk in zip(array.shape, layout.shape, strict=True)]
        divided = next((axis for axis, count in enumerate(inner) if count > 1), len(inner))
        streamed = layout.nbytes > _STREAMED and prod(inner[divided + 1 :]) <= _BESIDE
        fill = fill_of(array, self._path, name) if self._filled and array.sharded else None
        chunks = _Chunks(name, layout, fill, self._frames if streamed else None)
        boxes: list[Box] = []
        for offsets, value in places:
            stored = self._stored(value)
            if array.sharded:
                boxes += self._in_shard(array, chunks, offsets, stored)
            else:
                sizes = array.inside(layout.shape, offsets)
                self._claim(chunks, stored, layout.nbytes)
                boxes.append(Box(offsets, sizes, locate=partial(_locate, stored, chunks, sizes)))
        covered = len(places) == prod(array.counts)
        return BoxedListing(array.row, array.shape, boxes, fill=None if covered else fill_of(array, self._path, name))

    def check_claims(self) -> None:
        """Refuse chunks that share bytes, and fill values that stand for far more than the files hold."""
        for file, used in self._used.items():
            data = self._files[file]
            if used > data.length:
                text = f"its chunks have {used:,} bytes, but it has {data.length:,}: chunks overlap in the file"
                raise FormatError(text, data.path)
        if self._claimed > MAX_FILLED + MAX_RATIO * self._provided:
            text = f"chunks that are not stored stand for {self._claimed:,} bytes, but all others have only "
            raise error_about(LimitError, f"{text}{self._provided:,} bytes", path=self._path)

    def _stored(self, value: Value) -> StoredBytes:
        if not value.file:
            return StoredBytes(Unpacked(value.inline), 0, value.length, self._path)
        data = self._files[value.file]
        length = data.length if value.length == WHOLE_FILE else value.length
        end = value.offset + length
        if end > data.length:
            text = f"a chunk at [{value.offset:,}, {end:,}) lies outside the file, which has {data.length:,} bytes"
            raise FormatError(f"{text}; is it cut off?", data.path, min(value.offset, data.length))
        self._used[value.file] = self._used.get(value.file, 0) + length
        return data._replace(begin=value.offset, length=length)

    def _claim(self, chunks: _Chunks, stored: StoredBytes, nbytes: int) -> None:
        """Check that stored bytes can hold elements."""
        self._provided += stored.length
        unpackable = ZSTD in chunks.layout.steps or chunks.fill is not None
        if nbytes > stored.length * (MAX_RATIO if unpackable else 1):
            raise chunks.fault(f"a chunk has {nbytes:,} bytes, but {stored.length:,} bytes store it", stored)

    def _in_shard(
        self, array: ZarrArray, chunks: _Chunks, offsets: tuple[int, ...], stored: StoredBytes
    ) -> Iterator[Box]:
        """Yield the chunks of a shard that are inside the tensor."""
        shape = chunks.layout.shape
        counts = [outer // size for outer, size in zip(array.grid, shape, strict=True)]
        count = prod(counts)
        size = _index_size(count, array)
        if size > stored.length:
            text = f"a shard of {count:,} chunks needs an index of {size:,} bytes, but it has {stored.length:,}"
            raise chunks.fault(text, stored)
        self._in_shards += count
        if self._in_shards > MAX_IN_SHARDS:
            text = f": with it the shards have more than {MAX_IN_SHARDS:,} chunks"
            raise error_about(LimitError, text, path=self._path, tensor=chunks.name)
        shard = _ZarrShard(stored, count, array)
        inside = 0
        for number, index in enumerate(product(*map(range, counts))):
            begin = tuple(offset + k * size for offset, k, size in zip(offsets, index, shape, strict=True))
            sizes = array.inside(shape, begin)
            if not sizes or min(sizes) > 0:
                inside += 1
                yield Box(begin, sizes, locate=partial(shard.locate, number, chunks, sizes))
        self._claim(chunks, stored, inside * chunks.layout.nbytes)
