"""The chunks of zarr arrays: where they are, and how they become boxes of tensors.

1. A key holds a chunk, or with ``sharding_indexed`` a shard: a grid of chunks in C order and an index, before or after
   them: u64 offset and u64 length of each chunk, little-endian, then a CRC-32C if the codecs say so. Offsets count from
   the beginning of the value; both numbers are 2**64 - 1 for a chunk that is not stored.
2. A chunk that is not stored has the fill value, unless the checkpoint says that all chunks were stored. tensorstore
   leaves out chunks that equal it, such as the zeros of a new optimizer, so few keys can stand for large arrays. They
   cost memory only when they are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, product
from math import prod
from typing import NamedTuple

import numpy as np

from ...base.arrays import Array, c_strides
from ...base.cached import cached_property
from ...base.messages import error_about
from ...errors import FormatError, LimitError
from ...stores.store import ByteStore
from ...stores.windows import Unpacked
from ..boxed import Box, BoxedListing, Region, Stored
from ..crc32c import crc32c
from ..zstd import MAX_RATIO, FrameStore, KeptFrames, check_available, content_of, decompressed
from .ocdbt import Value
from .zarr import CRC32C, ZSTD, ChunkLayout, ZarrArray, fill_of

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

    def check_length(self, length: int, stored: StoredBytes) -> None:
        """Refuse a chunk of another length."""
        if length != self.layout.nbytes:
            text = f": a chunk must have {self.layout.nbytes:,} bytes, got {length:,}"
            raise error_about(FormatError, text, path=stored.path, offset=stored.begin, tensor=self.name)


class _Shard:
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
            text = ": the checksum of a chunk is wrong"
            raise error_about(FormatError, text, path=path, offset=begin, tensor=chunks.name)
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
            check_available()
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
            text = f": a chunk has {nbytes:,} bytes, but {stored.length:,} bytes store it"
            raise error_about(FormatError, text, path=stored.path, offset=stored.begin, tensor=chunks.name)

    def _in_shard(
        self, array: ZarrArray, chunks: _Chunks, offsets: tuple[int, ...], stored: StoredBytes
    ) -> Iterator[Box]:
        """Yield the chunks of a shard that are inside the tensor."""
        shape = chunks.layout.shape
        counts = [outer // size for outer, size in zip(array.grid, shape, strict=True)]
        count = prod(counts)
        size = _index_size(count, array)
        if size > stored.length:
            text = f": a shard of {count:,} chunks needs an index of {size:,} bytes, but it has {stored.length:,}"
            raise error_about(FormatError, text, path=stored.path, offset=stored.begin, tensor=chunks.name)
        self._in_shards += count
        if self._in_shards > MAX_IN_SHARDS:
            text = f": with it the shards have more than {MAX_IN_SHARDS:,} chunks"
            raise error_about(LimitError, text, path=self._path, tensor=chunks.name)
        shard = _Shard(stored, count, array)
        inside = 0
        for number, index in enumerate(product(*map(range, counts))):
            begin = tuple(offset + k * size for offset, k, size in zip(offsets, index, shape, strict=True))
            sizes = array.inside(shape, begin)
            if not sizes or min(sizes) > 0:
                inside += 1
                yield Box(begin, sizes, locate=partial(shard.locate, number, chunks, sizes))
        self._claim(chunks, stored, inside * chunks.layout.nbytes)
