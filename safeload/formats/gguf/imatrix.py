"""Importance matrices of llama.cpp's llama-imatrix: for each tensor, how much its columns matter.

Two formats. GGUF files hold two f32 tensors for each tensor NAME, and metadata:

1. ``NAME.in_sum2``: sums of squared inputs, ggml dimensions {columns, experts}; ``NAME.counts``: {1, experts}, how many
   inputs were added up. The importance is in_sum2 / count, or 1 where an expert's count is 0.
2. ``imatrix.datasets``: array of strings; ``imatrix.chunk_count`` and ``imatrix.chunk_size``: u32.

Files of the older format (.dat), little-endian:

1. i32 number of entries, at least 1.
2. For each entry: i32 length of the name and its bytes, i32 number of calls, i32 number of values (at least 1), and the
   values as f32. The importance is a value divided by the number of calls, if that is positive.
3. Optional: i32 number of chunks, i32 length and bytes of the name of a data set. Bytes behind it are ignored.

Source: https://github.com/ggml-org/llama.cpp/blob/master/common/imatrix-loader.cpp and tools/quantize/quantize.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...base.arrays import Array
from ...base.text import plural, show
from ...errors import FormatError

SUMS, COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
KEYS = (_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE)

# The shortest entry of the older format: three numbers and a value.
_SHORTEST_ENTRY = 16
# Bytes of a text in metadata written by llama-quantize.
_LONGEST_TEXT = 127
_I32 = struct.Struct("<i")


class ImportanceMatrix(NamedTuple):
    """The importance of columns."""

    path: str
    vectors: Mapping[str, Array]  # by tensor name: f32 [columns * experts]
    datasets: tuple[str, ...] = ()
    chunks: int = 0

    def metadata(self) -> dict[str, Any]:
        """Return the keys that llama-quantize writes into a file quantized with this matrix."""
        keys: dict[str, Any] = {"quantize.imatrix.file": _clipped(self.path)}
        if self.datasets:
            keys["quantize.imatrix.dataset"] = _clipped(self.datasets[0])
        keys["quantize.imatrix.entries_count"] = np.uint32(len(self.vectors))
        if self.chunks > 0:
            keys["quantize.imatrix.chunks_count"] = np.uint32(self.chunks)
        return keys


def _clipped(text: str) -> str:
    return text.encode("utf-8", "replace")[:_LONGEST_TEXT].decode("utf-8", "ignore")


def checked(path: str, vectors: Mapping[str, Array], datasets: tuple[str, ...], chunks: int) -> ImportanceMatrix:
    """Return the matrix if all its numbers are finite and not negative."""
    if not vectors:
        raise FormatError("the importance matrix has no entries", path)
    for name, vector in vectors.items():
        bad = ~(np.isfinite(vector) & (vector >= 0))
        if bad.any():
            at = int(np.argmax(bad))
            raise FormatError(
                f"importance of {show(name)} is {vector[at]} at {at}, expected a finite number >= 0", path
            )
    return ImportanceMatrix(path, vectors, datasets, chunks)


def of_gguf(path: str, tensors: Mapping[str, Array], metadata: Mapping[Any, Any]) -> ImportanceMatrix:
    """Return the matrix in the tensors of a GGUF file."""
    missing = [key for key in KEYS if key not in metadata]
    if missing:
        raise FormatError(f"not an importance matrix: the metadata has no {missing[0]}", path)
    names = [name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)]
    alone = {name.removesuffix(COUNTS) for name in tensors if name.endswith(COUNTS)} ^ set(names)
    if alone:
        raise FormatError(f"{show(min(alone))} has only one of {SUMS} and {COUNTS}", path)
    vectors = {name: _of_sums(name, tensors[name + SUMS], tensors[name + COUNTS], path) for name in names}
    datasets = metadata[_DATASETS]
    texts = tuple(map(str, datasets)) if isinstance(datasets, (list, tuple, np.ndarray)) else ()
    chunks = metadata[_CHUNK_COUNT]
    if isinstance(chunks, bool) or not isinstance(chunks, (int, np.integer)) or not 0 <= chunks < 1 << 32:
        raise FormatError(f"{_CHUNK_COUNT} must be an unsigned integer of 32 bits, got {show(chunks)}", path)
    return checked(path, vectors, texts, int(chunks))


def _of_sums(name: str, sums: Array, counts: Array, path: str) -> Array:
    if not all(isinstance(array, np.ndarray) and array.dtype == np.float32 for array in (sums, counts)):  # no codes
        raise FormatError(f"sums and counts of {show(name)} must be float32", path)
    if counts.size == 0 or sums.size == 0 or sums.size % counts.size:
        raise FormatError(f"{show(name)} has {sums.size} sums and {plural(counts.size, 'count')}", path)
    if not np.isfinite(counts).all():
        raise FormatError(f"a count of {show(name)} is not finite", path)
    whole = np.trunc(counts + np.copysign(np.float32(0.5), counts)).reshape(-1, 1)
    rows = sums.reshape(counts.size, -1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        means = rows / np.where(whole > 0, whole, np.float32(1))
    return np.ascontiguousarray(np.where(whole > 0, means, np.float32(1)), np.float32).reshape(-1)


def of_dat(path: str, content: bytes) -> ImportanceMatrix:
    """Return the matrix in a file of the older format."""
    at = 0

    def take(size: int, what: str) -> bytes:
        nonlocal at
        left = len(content) - at
        if not 0 <= size <= left:
            raise FormatError(f"{what} at byte {at:,} needs {size:,} bytes, but {left:,} are left", path)
        at += size
        return content[at - size : at]

    def number(what: str) -> int:
        return int(_I32.unpack(take(_I32.size, what))[0])

    count = number("the number of entries")
    if not 1 <= count <= (len(content) - at) // _SHORTEST_ENTRY:
        raise FormatError(f"neither GGUF nor an importance matrix: {count:,} entries in {len(content):,} bytes", path)
    vectors: dict[str, Array] = {}
    for index in range(count):
        what = f"entry {index}"
        raw = take(number(what), what)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError(f"the name of {what} is not UTF-8", path) from None
        calls, values = number(what), number(what)
        if values < 1:
            raise FormatError(f"{what} has {values} values", path)
        vector = np.frombuffer(take(4 * values, what), "<f4").astype(np.float32)
        if name in vectors:
            raise FormatError(f"two entries for {show(name)}", path)
        with np.errstate(over="ignore", invalid="ignore"):
            vectors[name] = vector / np.float32(calls) if calls > 0 else vector
    chunks = number("the number of chunks") if len(content) - at >= _I32.size else 0
    size = number("the data set") if len(content) - at >= _I32.size else 0
    known = 0 < size <= len(content) - at
    datasets = (take(size, "the data set").decode("utf-8", "replace"),) if known else ()
    return checked(path, vectors, datasets, chunks)
