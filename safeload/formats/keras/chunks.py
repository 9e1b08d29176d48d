"""Chunks of HDF5 datasets, unpacked without libhdf5.

1. A chunk holds a whole box of the dataset's chunk shape, also at the edges, where the rest is filling.
2. Filters were applied in order, so they are undone from the last to the first. A bit of the chunk's mask skips one.
3. shuffle (2): byte k of all elements, for each k. The value of the filter is the bytes of an element; the rest, less
   than an element, follows unchanged.
4. deflate (1): a stream of zlib. fletcher32 (3): a checksum of 4 bytes, little-endian, follows the data.
"""

from __future__ import annotations

import zlib

import numpy as np

from ...base.arrays import Array
from ...base.messages import error_about
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, LimitError, UnsupportedError
from ..boxed import Region
from .hdf5 import DEFLATE, FLETCHER32, SHUFFLE, Dataset, FileChunk

# Largest chunk in memory, and largest ratio of deflate.
MAX_CHUNK = 1 << 30
MAX_RATIO = 1032


class InMemory:
    """The elements of a small dataset, stored in the header of its object."""

    def __init__(self, value: Array) -> None:
        self._value = value

    def region(self) -> Region | None:
        return None

    def unpack(self) -> Array:
        return self._value


class StoredBlock:
    """A chunk in a file."""

    def __init__(self, file: WeightFile, name: str, dataset: Dataset, chunk: FileChunk, sizes: tuple[int, ...]) -> None:
        self._file, self._name = file, name
        self._dataset, self._chunk, self._sizes = dataset, chunk, sizes  # sizes inside the dataset

    def region(self) -> Region | None:
        return None

    def unpack(self) -> Array:
        """Return the elements in C order."""
        dataset, chunk, itemsize = self._dataset, self._chunk, self._dataset.itemsize
        data = bytearray(chunk.size)
        self._file.store.read_into(chunk.begin, data)
        content: Array = np.frombuffer(data, np.uint8)
        expected = dataset.chunk_nbytes
        for kind in reversed(chunk.filters):
            content = self._undone(kind, content, expected)
        if len(content) != expected:
            raise self._damaged(f"has {len(content):,} bytes, expected {expected:,}")
        whole = content.reshape(*dataset.chunk_shape, itemsize)[tuple(map(slice, self._sizes))]
        whole = np.ascontiguousarray(whole)
        if dataset.swap > 1:
            whole = whole.reshape(-1, dataset.swap)[:, ::-1]
        return np.ascontiguousarray(whole).reshape(-1)

    def _undone(self, kind: int, content: Array, expected: int) -> Array:
        """Undo a filter."""
        if kind == FLETCHER32:
            if len(content) < 4:
                raise self._damaged("has no checksum")
            content, stored = content[:-4], int.from_bytes(content[-4:].tobytes(), "little")
            checksum = fletcher32(content)
            if checksum != stored:
                raise self._damaged(f"has the checksum {checksum:08x}, expected {stored:08x}")
            return content
        if kind == DEFLATE:
            machine = zlib.decompressobj()
            room = expected + 4  # a checksum may be inside
            try:
                inflated = machine.decompress(content.data, room + 1)
            except zlib.error as error:
                raise self._damaged(f"cannot be inflated: {error}") from None
            if len(inflated) > room or not machine.eof:
                raise self._damaged(f"inflates to more than {expected:,} bytes, or is cut off")
            return np.frombuffer(inflated, np.uint8)
        step = self._dataset.shuffled
        whole = len(content) // step * step
        result = np.empty_like(content)
        result[:whole].reshape(-1, step)[...] = content[:whole].reshape(step, -1).T
        result[whole:] = content[whole:]
        return result

    def _damaged(self, text: str) -> FormatError:
        where = f": the chunk at {list(self._chunk.offsets)} {text}"
        return error_about(
            FormatError, where, path=self._file.path, offset=min(self._chunk.begin, self._file.size), tensor=self._name
        )


def fletcher32(content: Array) -> int:
    """Return HDF5's checksum: two sums of big-endian 16-bit words modulo 65535; 0 only if all bits are 0."""
    words = np.zeros(-(-len(content) // 2), np.uint64)
    even = content[: len(content) // 2 * 2].reshape(-1, 2)
    words[: len(even)] = (even[:, 0].astype(np.uint64) << np.uint64(8)) | even[:, 1]
    if len(content) % 2:
        words[-1] = np.uint64(int(content[-1]) << 8)
    if not words.any():
        return 0
    places = np.arange(len(words), 0, -1, dtype=np.uint64) % np.uint64(65535)
    first = (int(words.sum()) - 1) % 65535 + 1
    second = (int((places * words).sum()) - 1) % 65535 + 1
    return second << 16 | first


def check_filters(dataset: Dataset, path: str, name: str) -> None:
    """Refuse a dataset whose chunks could not be unpacked, or only into more memory than they justify."""
    nbytes = dataset.chunk_nbytes
    if nbytes > MAX_CHUNK:
        text = f": its chunks have {nbytes:,} bytes, the limit is {MAX_CHUNK:,}"
        raise error_about(LimitError, text, path=path, tensor=name)
    cut = any(n % count for n, count in zip(dataset.shape, dataset.chunk_shape, strict=True))
    for chunk in dataset.chunks:
        if DEFLATE in chunk.filters:
            if nbytes > chunk.size * MAX_RATIO:
                text = f": {chunk.size:,} bytes cannot inflate to a chunk of {nbytes:,}"
                raise error_about(FormatError, text, path=path, offset=chunk.begin, tensor=name)
            continue
        stored = nbytes + 4 * chunk.filters.count(FLETCHER32)
        if chunk.size != stored:
            text = f": the chunk at {list(chunk.offsets)} has {chunk.size:,} bytes, expected {stored:,}"
            raise error_about(FormatError, text, path=path, offset=chunk.begin, tensor=name)
        if cut and chunk.filters == (SHUFFLE,):
            raise UnsupportedError("is shuffled but not compressed, and its last chunks may be unfiltered")
