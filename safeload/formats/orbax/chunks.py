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
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from math import prod

import numpy as np

from ...base.arrays import Array, c_strides
from ...base.forking import ProcessLock
from ...base.messages import error_about
from ...errors import FormatError, LimitError
from ...stores.store import ByteStore, Memory, Unpacked
from ..boxed import Box, BoxedListing, Region
from ..crc32c import crc32c
from ..zstd import MAX_RATIO, FrameStore, check_available, content_of, decompressed
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
# Decompressors to keep, of any tensors.
_KEPT_FRAMES = 8
_CHECKSUM = 4
_ABSENT = 2**64 - 1


class FillStore:
    """A repeated element as a store."""

    def __init__(self, element: bytes, size: int) -> None:
        self.size = size
        self.version = (size,)
        self._element = np.frombuffer(element, np.uint8)

    def read_into(self, offset: int, memory: Memory) -> None:
        target = np.frombuffer(memory, np.uint8)
        turned = np.roll(self._element, -(offset % len(self._element)))
        whole = len(target) // len(turned) * len(turned)
        target[:whole].reshape(-1, len(turned))[...] = turned
        target[whole:] = turned[: len(target) - whole]

    def close(self) -> None:
        pass


class KeptFrames:
    """The decompressors of large chunks; only the latest keep their state."""

    def __init__(self) -> None:
        self._frames: OrderedDict[int, FrameStore] = OrderedDict()
        self._lock = ProcessLock()

    def use(self, frame: FrameStore) -> None:
        """Keep the state of a decompressor, and drop that of the one unused for longest."""
        with self._lock.own:
            self._frames[id(frame)] = frame
            self._frames.move_to_end(id(frame))
            oldest = self._frames.popitem(last=False)[1] if len(self._frames) > _KEPT_FRAMES else None
        if oldest is not None:
            oldest.release()


class ChunkBytes:
    """The bytes of a value in a store, or in a shard."""

    __slots__ = ("begin", "length", "path", "store")

    def __init__(self, store: ByteStore, begin: int, length: int, path: str) -> None:
        self.store = store
        self.begin = begin
        self.length = length
        self.path = path  # in messages

    def place(self) -> tuple[int, int] | None:
        """Return the first byte and the length; None if the chunk is not stored."""
        return self.begin, self.length


class ShardBytes(ChunkBytes):
    """A value that holds a grid of chunks, whose index is read on first use."""

    __slots__ = ("_checked", "_count", "_first", "_index")

    def __init__(self, stored: ChunkBytes, count: int, *, first: bool, checked: bool) -> None:
        super().__init__(stored.store, stored.begin, stored.length, stored.path)
        self._count = count
        self._first = first
        self._checked = checked
        self._index: Array | None = None

    @staticmethod
    def index_size(count: int, checked: bool) -> int:
        """Return the bytes of an index."""
        return 16 * count + (_CHECKSUM if checked else 0)

    def entry(self, number: int) -> tuple[int, int] | None:
        """Return the first byte and the length of a chunk; None if it is not stored."""
        if self._index is None:
            self._index = self._read()
        offset, length = self._index[number].tolist()
        if offset == length == _ABSENT:
            return None
        if offset + length > self.length:
            text = f"chunk {number} of a shard, [{offset:,}, {offset + length:,}), is outside its {self.length:,} bytes"
            raise FormatError(text, self.path, self.begin)
        return self.begin + offset, length

    def _read(self) -> Array:
        size = self.index_size(self._count, self._checked)
        begin = self.begin if self._first else self.begin + self.length - size
        memory = bytearray(size)
        self.store.read_into(begin, memory)
        index = memory[: 16 * self._count]
        if self._checked and crc32c(index) != int.from_bytes(memory[-_CHECKSUM:], "little"):
            raise FormatError("the checksum of the index of a shard is wrong", self.path, begin)
        return np.frombuffer(index, "<u8").reshape(-1, 2)


class InShard:
    """The bytes of a chunk in a shard; see `ChunkBytes`."""

    __slots__ = ("_number", "_shard")

    def __init__(self, shard: ShardBytes, number: int) -> None:
        self._shard = shard
        self._number = number

    @property
    def store(self) -> ByteStore:
        return self._shard.store

    @property
    def path(self) -> str:
        return self._shard.path

    def place(self) -> tuple[int, int] | None:
        """Return the first byte and the length; None if the chunk is not stored."""
        return self._shard.entry(self._number)


class ChunkRules:
    """The rules that all chunks of a tensor share."""

    def __init__(self, name: str, layout: ChunkLayout, fill: bytes | None, frames: KeptFrames | None) -> None:
        self.name = name
        self.layout = layout
        self.fill = fill  # bytes of an element that is not stored; None if all chunks should be stored
        self.frames = frames  # keeps decompressors; None to unpack chunks as a whole


class ZarrChunk:
    """A chunk of a tensor; see `BoxSource`."""

    __slots__ = ("_region", "_rules", "_sizes", "_stored")

    def __init__(self, rules: ChunkRules, stored: ChunkBytes | InShard, sizes: tuple[int, ...]) -> None:
        self._rules = rules
        self._stored = stored
        self._sizes = sizes  # elements along each axis inside the tensor; chunks at the border have more
        self._region: Region | None = None

    def region(self) -> Region | None:
        if self._region is None:
            self._region = self._located()
        frames = self._rules.frames
        if frames is not None and self._region is not None and isinstance(self._region.store, FrameStore):
            frames.use(self._region.store)
        return self._region

    def _located(self) -> Region | None:
        """Return the place of the elements, or of a frame to read forward; None to unpack them."""
        layout, stored = self._rules.layout, self._stored
        place = stored.place()
        if place is None:
            return self._filled()
        begin, length = place
        strides = layout.strides
        if strides is None and self._sizes != layout.shape:
            strides = c_strides(layout.shape, layout.itemsize)
        if layout.bits is not None or layout.swapped:
            return None
        if layout.steps == (ZSTD,) and self._rules.frames is not None:
            return Region(FrameStore(stored.store, begin, length, layout.nbytes, stored.path), 0, strides)
        if layout.steps:
            return None
        self._check_length(length, layout.nbytes, begin)
        return Region(stored.store, begin, strides)

    def _filled(self) -> Region:
        rules = self._rules
        if rules.fill is None:
            text = "lacks a chunk that should be stored"
            raise error_about(FormatError, text, path=self._stored.path, tensor=rules.name)
        return Region(FillStore(rules.fill, prod(self._sizes) * rules.layout.itemsize), 0)

    def _check_length(self, length: int, expected: int, offset: int | None) -> None:
        if length != expected:
            text = f": a chunk must have {expected:,} bytes, got {length:,}"
            raise error_about(FormatError, text, path=self._stored.path, offset=offset, tensor=self._rules.name)

    def unpack(self) -> Array:
        layout = self._rules.layout
        content = self._content()
        strides = layout.strides or c_strides(layout.shape, layout.itemsize)
        shape = (*layout.shape, layout.itemsize)
        elements: Array = np.ndarray(shape, np.uint8, content, 0, (*strides, 1))
        elements = elements[tuple(map(slice, self._sizes))]
        if layout.swapped:
            elements = elements[..., ::-1]
        if layout.bits is not None:
            unused = np.int8(8 - layout.bits)
            elements = (elements.view(np.int8) << unused >> unused).view(np.uint8)
        return np.ascontiguousarray(elements)

    def _content(self) -> Array:
        """Undo the steps, the last one first."""
        layout, stored = self._rules.layout, self._stored
        place = stored.place()
        assert place is not None
        begin, length = place
        size = layout.nbytes
        sizes: list[int] = []  # before each step; only a checksum can follow zstd
        for step in layout.steps:
            sizes.append(size)
            size += _CHECKSUM if step == CRC32C else 0
        if layout.steps == (ZSTD,):
            return content_of(stored.store, begin, length, layout.nbytes, stored.path)
        memory = np.empty(length, np.uint8)
        stored.store.read_into(begin, memory)
        for step, expected in zip(reversed(layout.steps), reversed(sizes), strict=True):
            if step == ZSTD:
                frame = Unpacked(memory.tobytes())
                name = self._rules.name
                memory = np.frombuffer(decompressed(frame, 0, frame.size, expected, stored.path, name=name), np.uint8)
            else:
                stored_sum = int.from_bytes(memory[-_CHECKSUM:].tobytes(), "little")
                if len(memory) < _CHECKSUM or crc32c(memory[:-_CHECKSUM]) != stored_sum:
                    text = ": the checksum of a chunk is wrong"
                    raise error_about(FormatError, text, path=stored.path, offset=begin, tensor=self._rules.name)
                memory = memory[:-_CHECKSUM]
        self._check_length(len(memory), layout.nbytes, begin)
        return memory


# ---- boxes ----


class ChunkFinder:
    """Finds the chunks of all tensors of a checkpoint."""

    def __init__(
        self, values: Mapping[str, Value], stored: Mapping[str, ChunkBytes], path: str, *, filled: bool
    ) -> None:
        self._values = values  # by key
        self._files = stored  # open
        self._path = path
        self._filled = filled  # True if chunks that are not stored have the fill value
        self._in_shards = 0
        self._sorted: list[str] | None = None  # all keys
        self._frames = KeptFrames()
        self._claimed = 0  # bytes of elements that are not stored
        self._provided = 0  # bytes of all chunks as stored
        self._used: dict[str, int] = {}  # bytes of chunks in each file

    def find(self, name: str, array: ZarrArray) -> list[tuple[tuple[int, ...], Value]]:
        """Return the first element and the value of each stored chunk."""
        counts = [-(-size // chunk) for size, chunk in zip(array.shape, array.grid, strict=True)]
        stem = f"{name}/" if name else ""
        total = prod(counts)
        if total > _FEW:
            indices = self._stored_indices(stem, array, counts)
        else:
            grid = product(*map(range, counts)) if total else ()
            indices = [index for index in grid if stem + array.key(index) in self._values]
        if len(indices) < total and not self._filled:
            first = next((k for k, index in enumerate(indices) if index != _unraveled(k, counts)), len(indices))
            text = (
                f": its chunk {array.key(_unraveled(first, counts))} is missing; was the checkpoint copied as a whole?"
            )
            raise error_about(FormatError, text, path=self._path, tensor=name)
        places: list[tuple[tuple[int, ...], Value]] = []
        stored = 0
        for index in indices:
            offsets = tuple(map(int.__mul__, index, array.grid))
            stored += prod(map(min, array.grid, map(int.__sub__, array.shape, offsets)))
            places.append((offsets, self._values[stem + array.key(index)]))
        self._claimed += (prod(array.shape) - stored) * array.chunk.itemsize
        return places

    def _stored_indices(self, stem: str, array: ZarrArray, counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the indices of the stored chunks in order, from the keys that begin with ``stem``."""
        if self._sorted is None:
            self._sorted = sorted(self._values)
        indices = []
        for key in islice(self._sorted, bisect_left(self._sorted, stem), None):
            if not key.startswith(stem):
                break
            parts = key[len(stem) :].split(array.separator)[bool(array.prefix) :]
            if len(parts) != len(counts) or not all(part.isdecimal() and len(part) < 20 for part in parts):
                continue
            index = tuple(map(int, parts))
            if all(map(int.__lt__, index, counts)) and stem + array.key(index) == key:
                indices.append(index)
        return sorted(indices)

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
        rules = ChunkRules(name, layout, fill, self._frames if streamed else None)
        boxes: list[Box] = []
        for offsets, value in places:
            if array.sharded:
                boxes += self._in_shard(array, rules, offsets, self._stored(value))
            else:
                sizes = tuple(map(min, layout.shape, map(int.__sub__, array.shape, offsets)))
                stored = self._stored(value)
                self._claim(rules, stored, layout.nbytes)
                boxes.append(Box(offsets, sizes, ZarrChunk(rules, stored, sizes)))
        counts = [-(-size // chunk) for size, chunk in zip(array.shape, array.grid, strict=True)]
        covered = len(places) == prod(counts)
        return BoxedListing(array.row, array.shape, boxes, fill=None if covered else fill_of(array, self._path, name))

    def check_claims(self) -> None:
        """Refuse chunks that share bytes, and fill values that stand for far more than the files hold."""
        for file, used in self._used.items():
            data = self._files[file]
            if used > data.length:
                text = f"its chunks have {used:,} bytes, but it has {data.length:,}: chunks overlap in the file"
                raise FormatError(text, data.path)
        if self._claimed > MAX_FILLED + MAX_RATIO * self._provided:
            text = (
                f"{self._path}: chunks that are not stored stand for {self._claimed:,} bytes, but all others have only "
            )
            raise LimitError(f"{text}{self._provided:,} bytes", path=self._path)

    def _stored(self, value: Value) -> ChunkBytes:
        if not value.file:
            return ChunkBytes(Unpacked(value.inline), 0, value.length, self._path)
        data = self._files[value.file]
        self._used.setdefault(value.file, 0)
        if value.length == WHOLE_FILE:
            value = value._replace(length=data.length)
        if value.offset + value.length > data.length:
            text = f"a chunk at [{value.offset:,}, {value.offset + value.length:,}) lies outside the file, which has "
            raise FormatError(f"{text}{data.length:,} bytes; is it cut off?", data.path, min(value.offset, data.length))
        self._used[value.file] += value.length
        return ChunkBytes(data.store, value.offset, value.length, data.path)

    def _claim(self, rules: ChunkRules, stored: ChunkBytes, nbytes: int) -> None:
        """Check that stored bytes can hold elements."""
        self._provided += stored.length
        unpackable = ZSTD in rules.layout.steps or rules.fill is not None
        if nbytes > stored.length * (MAX_RATIO if unpackable else 1):
            text = f": a chunk has {nbytes:,} bytes, but {stored.length:,} bytes store it"
            raise error_about(FormatError, text, path=stored.path, offset=stored.begin, tensor=rules.name)

    def _in_shard(
        self, array: ZarrArray, rules: ChunkRules, offsets: tuple[int, ...], stored: ChunkBytes
    ) -> Iterator[Box]:
        """Yield the chunks of a shard that are inside the tensor."""
        chunk = rules.layout.shape
        counts = [outer // size for outer, size in zip(array.grid, chunk, strict=True)]
        count = prod(counts)
        size = ShardBytes.index_size(count, array.index_checked)
        if size > stored.length:
            text = f": a shard of {count:,} chunks needs an index of {size:,} bytes, but it has {stored.length:,}"
            raise error_about(FormatError, text, path=stored.path, offset=stored.begin, tensor=rules.name)
        self._in_shards += count
        if self._in_shards > MAX_IN_SHARDS:
            text = f": with it the shards have more than {MAX_IN_SHARDS:,} chunks"
            raise error_about(LimitError, text, path=self._path, tensor=rules.name)
        shard = ShardBytes(stored, count, first=array.index_first, checked=array.index_checked)
        inside = 0
        for number, index in enumerate(product(*map(range, counts))):
            begin = tuple(offset + k * size for offset, k, size in zip(offsets, index, chunk, strict=True))
            sizes = tuple(map(min, chunk, map(int.__sub__, array.shape, begin)))
            if not sizes or min(sizes) > 0:
                inside += 1
                yield Box(begin, sizes, ZarrChunk(rules, InShard(shard, number), sizes))
        self._claim(rules, stored, inside * rules.layout.nbytes)


def _unraveled(number: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the index of a chunk by its number in C order."""
    index: list[int] = []
    for count in reversed(counts):
        number, k = divmod(number, count)
        index.insert(0, k)
    return tuple(index)
