"""OCDBT: the database of tensorstore, in which Orbax keeps the arrays of a checkpoint.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html. varint is LEB128, unsigned. The order of fields below is
that of their bytes; [n] is a column of n values.

1. Manifest and nodes: magic (u32, big-endian), length of everything (u64, little-endian), varint version (0), varint
   compression (0, or 1 for a zstd frame), body, CRC-32C of all bytes before (u32, little-endian).
2. Manifest, ``manifest.ocdbt``, magic 0x0cdb3a2a: UUID (16 bytes), varint kind (0: a single manifest), varint largest
   inline value, varint largest node, u8 arity, varint compression (1 is followed by i32 level); a table of data files;
   the latest versions; references to nodes with older versions, which safeload does not read.
3. Table of data files: varint n, varint common prefix with the path before [n-1], varint rest [n], varint length of
   the base path [n], the rests. The base path leads from the folder of a node to the folder of its children.
4. Versions: varint n; varint generation [n], ascending; u8 height of the root [n]; varint file, offset and length of
   the root [n] each; varint statistics [n], three times; u64 time [n]. Offset and length of 2**64 - 1: an empty tree.
5. B+tree node, magic 0x0cdb20de: u8 height, a table of data files, varint n, varint common prefix with the key before
   [n-1], varint rest [n].
6. Height 0: the rests; varint length of the value [n]; u8 kind [n]; for values of kind 1 varint file [m] and offset
   [m]; the values of kind 0.
7. Other heights: varint length of the prefix of all keys below [n]; the rests; varint file, offset and length of the
   child [n] each; varint statistics [n], three times. Keys of a child lack the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, pairwise
from math import isqrt
from typing import NamedTuple, TypeAlias

import numpy as np

from ..core.arrays import Array
from ..core.files import Unpacked
from ..core.text import is_bare, show
from ..errors import FormatError, LimitError, UnsupportedError
from .zstd import decompressed

MANIFEST = "manifest.ocdbt"
# Bytes of a node, unpacked. Orbax writes up to 100,000,000.
MAX_NODE = 256 << 20
# Bytes of all nodes, as stored or unpacked, of all keys, and of the paths in a table. Several parents can share a node:
# it counts each time.
MAX_TREE = 1 << 30
MAX_KEY_BYTES = 256 << 20
MAX_PATHS = 16 << 20
# Keys take some 500 bytes of memory. A checkpoint of 2,000 tensors for 1,000 devices has 2,000,000.
MAX_KEYS = 1 << 21
# Data files in a table: a few for each process. A node lists only the files that its keys refer to.
MAX_FILES = 1 << 16
# Heights of a tree: its nodes have dozens of keys at least.
MAX_HEIGHT = 16
_MANIFEST, _NODE = 0x0CDB3A2A, 0x0CDB20DE
_HEADER, _CHECKSUM = 12, 4
_NOTHING = 2**64 - 1


class Value(NamedTuple):
    """The value of a key: inline, or a range of a data file."""

    file: str  # path in the checkpoint's folder; empty if inline
    offset: int
    length: int
    inline: bytes = b""


class _Fields:
    """The fields of a body, in order."""

    def __init__(self, body: bytes | bytearray, path: str, offset: int) -> None:
        self.body = body
        self._at = 0
        self.path = path
        self.offset = offset  # of the manifest or node in the file

    def error(self, text: str) -> FormatError:
        return FormatError(text, self.path, self.offset)

    def take(self, count: int) -> bytes:
        if count > len(self.body) - self._at:
            raise self.error(f"the node ends {count - (len(self.body) - self._at):,} bytes too early")
        self._at += count
        return bytes(self.body[self._at - count : self._at])

    def number(self) -> int:
        return self.numbers(1)[0]

    def numbers(self, count: int) -> list[int]:
        if not count:
            return []
        if count > len(self.body) - self._at:
            raise self.error(f"a column of {count:,} numbers reaches beyond the node")
        content = np.frombuffer(self.body, np.uint8, min(len(self.body) - self._at, 10 * count), self._at)
        ends = np.flatnonzero(content < 128)[:count]
        if len(ends) < count:
            raise self.error(f"a column of {count:,} numbers reaches beyond the node")
        begins = np.concatenate([[0], ends[:-1] + 1])
        lengths = ends - begins + 1
        if lengths.max() > 10 or (content[ends[lengths == 10]] > 1).any():
            raise self.error("a number has more than 64 bits")
        values = np.zeros(count, np.uint64)
        for k in range(int(lengths.max())):
            more = lengths > k
            values[more] |= (content[begins[more] + k] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * k)
        self._at += int(ends[-1]) + 1
        numbers: list[int] = values.tolist()
        return numbers

    def texts(self, prefixes: Sequence[int], lengths: Sequence[int], limit: int) -> list[bytes]:
        """Return texts that are stored without the prefix that they share with the previous text."""
        if sum(prefixes) + sum(lengths) > limit:
            raise LimitError(f"{self.path}: its keys or paths have more than {limit:,} bytes", path=self.path)
        rests = self.take(sum(lengths))
        texts: list[bytes] = []
        before, at = b"", 0
        for prefix, length in zip(chain((0,), prefixes), lengths, strict=True):
            if prefix > len(before):
                raise self.error(f"a text shares {prefix} bytes with the one before, which has {len(before)}")
            before = before[:prefix] + rests[at : at + length]
            texts.append(before)
            at += length
        return texts

    def end(self) -> None:
        """Refuse bytes after the last field."""
        if self._at != len(self.body):
            raise self.error(f"{len(self.body) - self._at:,} bytes follow the last field")


# A data file: its path in the checkpoint's folder, and what precedes the paths in its nodes.
_File: TypeAlias = tuple[str, bytes]
# A node: its file, offset, length and height, and the prefix of all its keys.
_Node: TypeAlias = tuple[_File, int, int, int, bytes]


def _files(fields: _Fields, base: bytes) -> list[_File]:
    """Return a table of data files. `_file` checks their paths on use: an empty version has an empty path."""
    count = fields.number()
    if not count:
        return []
    if count > MAX_FILES:
        raise LimitError(f"{fields.path}: a node names {count:,} data files, more than {MAX_FILES:,}", path=fields.path)
    prefixes, rests, bases = (fields.numbers(n) for n in (count - 1, count, count))
    files: list[_File] = []
    for path, length in zip(fields.texts(prefixes, rests, MAX_PATHS), bases, strict=True):
        if length > len(path):
            raise fields.error(f"a base path of {length} bytes is longer than its path")
        files.append(((base + path).decode("utf-8", "replace"), base + path[:length]))
    return files


def _body(data: bytes, magic: int, path: str, offset: int) -> _Fields:
    """Check a manifest or node, and return its fields."""
    subject = "the manifest" if magic == _MANIFEST else "a node"
    if len(data) < _HEADER + 2 + _CHECKSUM:
        raise FormatError(f"{subject} has only {len(data)} bytes", path, offset)
    actual, length = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:_HEADER], "little")
    if actual != magic:
        raise FormatError(f"{subject} must begin with {magic:#010x}, got {actual:#010x}", path, offset)
    if length != len(data):
        raise FormatError(f"{subject} says that it has {length:,} bytes, but {len(data):,} are stored", path, offset)
    if crc32c(data[:-_CHECKSUM]) != int.from_bytes(data[-_CHECKSUM:], "little"):
        raise FormatError(f"the checksum of {subject} is wrong", path, offset)
    version, compression = data[_HEADER], data[_HEADER + 1]
    if version or compression > 1:
        text = f"{path}: {subject} has version {version} and compression {compression}; safeload reads version 0, "
        raise UnsupportedError(f"{text}uncompressed or zstd", path=path)
    begin, end = _HEADER + 2, len(data) - _CHECKSUM
    content: bytes | bytearray
    content = decompressed(Unpacked(data), begin, end - begin, MAX_NODE, path) if compression else data[begin:end]
    return _Fields(content, path, offset)


def _roots(manifest: bytes, path: str) -> list[_Node]:
    """Return the root of the latest version; none if its tree is empty."""
    fields = _body(manifest, _MANIFEST, path, 0)
    fields.take(16)
    if kind := fields.number():
        text = f"{path}: a manifest of kind {kind}; safeload reads checkpoints with a single manifest (kind 0)"
        raise UnsupportedError(text, path=path)
    fields.numbers(2)
    fields.take(1)
    if fields.number():
        fields.take(4)
    files = _files(fields, b"")
    count = fields.number()
    if count > MAX_FILES:
        raise LimitError(f"{path}: the manifest has {count:,} versions, more than {MAX_FILES:,}", path=path)
    generations = fields.numbers(count)
    heights = list(fields.take(count))
    numbers, offsets, lengths = (fields.numbers(count) for _ in range(3))
    if not count:
        raise fields.error("the manifest has no version")
    if any(later <= earlier for earlier, later in pairwise(generations)):
        raise fields.error("the generations of versions must ascend")
    if offsets[-1] == lengths[-1] == _NOTHING:
        return []
    return [(_file(files, numbers[-1], fields), offsets[-1], lengths[-1], heights[-1], b"")]


def _file(files: Sequence[_File], number: int, fields: _Fields) -> _File:
    if number >= len(files):
        raise fields.error(f"data file {number} is not in the table, which has {len(files)}")
    path = files[number][0]
    if not all(map(is_bare, path.split("/"))):
        raise fields.error(f"a data file must be inside the checkpoint's folder, got {show(path)}")
    return files[number]


def read_tree(
    manifest: bytes, path: str, read: Callable[[str, int, int], bytes], shown: Callable[[str], str]
) -> dict[str, Value]:
    """Return the values of the latest version by key; ``read`` can return fewer bytes at a data file's end."""
    waiting = _roots(manifest, path)
    values: dict[str, Value] = {}
    last: bytes | None = None
    nodes = keys = rows = paths = 0
    while waiting:
        file, offset, length, height, prefix = waiting.pop()
        place = shown(file[0])
        if height > MAX_HEIGHT or length > MAX_NODE:
            text = f"{place}: a node of height {height} and {length:,} bytes"
            raise LimitError(f"{text} is beyond the limits of {MAX_HEIGHT} and {MAX_NODE:,}", path=place)
        data = read(file[0], offset, length)
        if len(data) < length:
            text = f"a node of {length:,} bytes reaches beyond the end of the file; is it cut off?"
            raise FormatError(text, place, offset)
        fields = _body(data, _NODE, place, offset)
        nodes += max(len(data), len(fields.body))
        if (stored_height := fields.take(1)[0]) != height:
            raise fields.error(f"a node of height {height} says that it has height {stored_height}")
        files = _files(fields, file[1])
        rows += len(files)
        paths += sum(len(path) for path, _ in files)
        count = fields.number()
        if not count:
            raise fields.error("a node has no keys")
        if rows > MAX_KEYS or paths > MAX_KEY_BYTES:
            text = f"the nodes name more than {MAX_KEYS:,} data files, or {MAX_KEY_BYTES:,} bytes in their paths"
            raise LimitError(f"{path}: {text}", path=path)
        fits = len(values) + len(waiting) + count <= MAX_KEYS
        prefixes, rests = (fields.numbers(count - 1), fields.numbers(count)) if fits else ([], [])
        keys += sum(prefixes) + sum(rests) + count * len(prefix)
        if nodes > MAX_TREE or not fits or keys > MAX_KEY_BYTES:
            text = f"{path}: the tree has more than {MAX_KEYS:,} keys, {MAX_KEY_BYTES:,} bytes in keys"
            raise LimitError(f"{text} or {MAX_TREE:,} bytes in nodes", path=path)
        if height:
            children = _children(fields, files, prefixes, rests)
            waiting += [(*child[:3], height - 1, prefix + child[3]) for child in reversed(children)]
            continue
        for key, value in _leaves(fields, files, prefixes, rests):
            key = prefix + key
            if last is not None and key <= last:
                raise fields.error(f"keys must ascend: {show(key)} follows {show(last)}")
            last = key
            values[key.decode("utf-8", "surrogateescape")] = value
    return values


def _children(
    fields: _Fields, files: Sequence[_File], prefixes: Sequence[int], rests: Sequence[int]
) -> list[tuple[_File, int, int, bytes]]:
    """Return the file, offset and length of each child of a node, and the prefix of its keys."""
    count = len(rests)
    common = fields.numbers(count)
    texts = fields.texts(prefixes, rests, MAX_KEY_BYTES)
    columns = [fields.numbers(count) for _ in range(6)]
    fields.end()
    children = []
    for text, shared, number, offset, length in zip(texts, common, *columns[:3], strict=True):
        if shared > len(text):
            raise fields.error(f"a prefix of {shared} bytes is longer than its key")
        children.append((_file(files, number, fields), offset, length, text[:shared]))
    return children


def _leaves(
    fields: _Fields, files: Sequence[_File], prefixes: Sequence[int], rests: Sequence[int]
) -> list[tuple[bytes, Value]]:
    """Return the keys and values of a node of height 0."""
    count = len(rests)
    keys = fields.texts(prefixes, rests, MAX_KEY_BYTES)
    lengths = fields.numbers(count)
    kinds = fields.take(count)
    if kinds.translate(None, b"\0\1"):
        raise fields.error("values must be inline (0) or in a data file (1)")
    outside = kinds.count(1)
    numbers, offsets = iter(fields.numbers(outside)), iter(fields.numbers(outside))
    values = [
        Value(_file(files, next(numbers), fields)[0], next(offsets), length)
        if kind
        else Value("", 0, length, fields.take(length))
        for length, kind in zip(lengths, kinds, strict=True)
    ]
    fields.end()
    return list(zip(keys, values, strict=True))


# ---- CRC-32C, which also zarr's codec ``crc32c`` stores ----

_POLYNOMIAL = 0x82F63B78
# Shorter data is cheaper byte by byte.
_FEW = 2_048
_ALL = 0xFFFFFFFF


@cache
def _table() -> Array:
    """The remainder of each byte."""
    table: Array = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> np.uint32(1) ^ (table & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return table


def crc32c(data: bytes | bytearray | memoryview | Array) -> int:
    """Return the CRC-32C (RFC 3720, B.4) of bytes.

    The lanes of long data advance together, then a linear map joins the remainders.
    """
    content = np.frombuffer(data, np.uint8)
    table = _table()
    length = isqrt(len(content)) if len(content) >= _FEW else 0
    whole = len(content) // length * length if length else 0
    crc = _ALL
    if whole:
        lanes = content[:whole].reshape(-1, length)
        # The last 32 lanes advance each single bit by `length` zeros: the columns of the map.
        state = np.concatenate([np.zeros(len(lanes), np.uint32), np.uint32(1) << np.arange(32, dtype=np.uint32)])
        count = len(lanes)
        for column in range(length):
            index = state & np.uint32(0xFF)
            index[:count] ^= lanes[:, column]
            state = table[index] ^ (state >> np.uint32(8))
        columns = state[count:].tolist()
        for remainder in state[:count].tolist():
            advanced = 0
            for bit in range(32):
                if crc >> bit & 1:
                    advanced ^= columns[bit]
            crc = advanced ^ remainder
    numbers = table.tolist()
    for byte in content[whole:].tolist():
        crc = numbers[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _ALL
