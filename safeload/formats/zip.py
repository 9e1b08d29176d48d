"""Zip archives whose entries are mapped: locates the bytes of each entry and checks everything.

zip_directory.py reads the directory. The rest is checked here, so that all readers see the same contents: the archive
is the whole file, names are unique, no two entries overlap, and the local header of an entry that is used agrees with
the directory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from operator import le
from typing import Any

import numpy as np

from ..base.text import show
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, LimitError, UnsupportedError
from ..stores.remote import RemoteStore
from .zip_directory import DEFLATED, STORED, Columns, End, read_directory

# Bytes that a compressed entry may inflate to in memory: pickles have a few MiB and are usually not compressed.
MAX_INFLATED = 256 << 20

# Largest ratio of deflate: a copy of 258 bytes takes two bits.
_DEFLATE_RATIO = 1032

# The local header: flags, method, compressed and full size, lengths of name and extra field; then the name.
_LOCAL = struct.Struct("<6x2H8x2I2H").unpack_from
_LOCAL_SIZE = 30
# The same as columns.
_FIELDS = np.dtype(
    {
        "names": ["magic", "flags", "method", "packed", "size", "name", "extra"],
        "formats": ["<u4", "<u2", "<u2", "<u4", "<u4", "<u2", "<u2"],
        "offsets": [0, 6, 8, 18, 22, 26, 28],
        "itemsize": _LOCAL_SIZE,
    }
)
_MAGIC = int.from_bytes(b"PK\x03\x04", "little")
# Stands for a size in a ZIP64 field.
_LARGE = 0xFFFFFFFF
# Bytes read for a local header: a page, which the system reads anyway.
_WINDOW = 4096
# Bytes read for the local headers of entries that lie close together.
_BLOCK = 1 << 20
# The same over the network: what a local header and that of an array behind it take.
_NEAR = 512

# Bytes of an entry that are inflated at a time.
_PIECE = 1 << 20

_ENCRYPTED, _UTF8 = 0x1, 0x800


class Archive:
    """The entries of an archive by name.

    Args:
        file: the archive.

    Raises:
        FormatError: the file is not a zip archive, or holds more than one; a duplicate name, or entries that overlap.
        LimitError: a directory of more than `MAX_DIRECTORY` bytes.
        OSError: the file cannot be read.
    """

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._used: dict[str, int] = {}  # the first byte of each entry that was located
        self._sound: dict[str, int] = {}  # the same of entries whose local headers `prefetch` has checked
        self._window, self._window_at = b"", 0
        self._step = _NEAR if file.remote else _WINDOW
        entries, self._directory, end, self._fields = read_directory(file)
        self.entries = {entry.name: entry for entry in entries}
        if len(self.entries) < len(entries):
            seen: set[str] = set()
            for name, *_, at in entries:
                if name in seen:
                    raise FormatError(f"duplicate zip entry {show(name)}", file.path, min(max(0, at), file.size))
                seen.add(name)
        self._check_whole(end)

    def _check_whole(self, end: End | None) -> None:
        """Refuses overlapping entries, and an archive that is not the whole file: other readers may find another.

        zipfile shifts all offsets by the number of bytes before an archive. Some readers do not.
        """
        path = self._file.path
        if end is None:
            raise FormatError("the file continues after the zip archive's end", path)
        if end.offset + end.size != end.at:
            message = f"the zip archive's directory must end at byte {end.at}, but it says {end.offset + end.size}: "
            raise FormatError(message + "there are extra bytes before the archive, or within it", path, end.at)
        if end.entries != len(self.entries):
            message = f"the zip archive's directory has {len(self.entries)} entries, but its end says {end.entries}"
            raise FormatError(message, path, end.at)
        entries = self.entries.values()
        for entry in entries:
            if not 0 <= entry.at < end.offset:
                raise self._fault(entry.name, "there is no local header at its offset", 0)
        begins = [entry.at for entry in entries]
        begin = min(begins, default=end.offset)
        if begin:
            raise FormatError(f"the zip archive's first entry begins at byte {begin}, not at 0", path, 0)
        self._check_apart(list(self.entries), begins, [entry.at + _LOCAL_SIZE + entry.packed for entry in entries])

    def locate(self, name: str) -> int:
        """The offset of the first byte of an entry.

        Raises:
            FormatError: local header and directory disagree, or the entry extends past the data.
            UnsupportedError: the entry is encrypted.
        """
        sound = self._sound.get(name)
        if sound is not None:
            self._used[name] = sound
            return sound
        info = self.entries[name]
        at = info.at
        wanted = name.encode("utf-8" if info.flags & _UTF8 else "cp437", "surrogateescape")
        head = self._head(at, _LOCAL_SIZE + len(wanted))
        if len(head) < _LOCAL_SIZE or head[:4] != b"PK\x03\x04":
            raise self._fault(name, "there is no local header at its offset", 0)
        flags, method, packed, size, name_size, extra_size = _LOCAL(head)
        if (flags | info.flags) & _ENCRYPTED:
            raise UnsupportedError(f"{self._file.path}: zip entry {show(name)} is encrypted")
        if name_size != len(wanted) or head[_LOCAL_SIZE:] != wanted:
            local = self._file.read_at(at + _LOCAL_SIZE, name_size)
            raise self._fault(name, f"it is called {show(local)} in its local header", _LOCAL_SIZE)
        # A size of 0 stands for one that follows the data, the largest value for one in a ZIP64 field.
        if method != info.method:
            raise self._differ(name, "compression", method, info.method, 8)
        if packed not in (0, _LARGE, info.packed):
            raise self._differ(name, "compressed size", packed, info.packed, 18)
        if size not in (0, _LARGE, info.size):
            raise self._differ(name, "size", size, info.size, 22)
        begin: int = at + _LOCAL_SIZE + name_size + extra_size
        end = begin + info.packed
        if end > self._directory:
            message = f"bytes [{begin}, {end}) reach beyond the data, which ends at {self._directory}"
            raise self._fault(name, message, 0)
        self._used[name] = begin
        return begin

    def prefetch(self, names: Iterable[str]) -> None:
        """Reads local headers that `locate` will be asked for, many at a time: on the network, and of small entries."""
        if isinstance(self._file.store, RemoteStore):
            begins = [self.entries[name].at for name in names]
            self._file.store.prefetch((begin, begin + self._step) for begin in begins)
        elif self._fields is not None and self._directory <= len(self.entries) * _WINDOW:
            self._check_heads(self._fields)

    def _check_heads(self, fields: Columns) -> None:
        """Locates all entries about which nothing is unusual; the others are left to `locate`."""
        names = list(self.entries)
        lengths = np.array(list(map(len, names)))
        order = np.argsort(fields["at"], kind="stable")
        fields, lengths = fields[order], lengths[order]
        begins = fields["at"].astype(np.int64)
        at = 0
        while at < len(begins):
            start = int(begins[at])
            block = self._file.read_at(start, _BLOCK)
            # Up to the last entry whose local header is in the block; one that has none in its own block is skipped.
            end = int(np.searchsorted(begins, start + len(block) - _LOCAL_SIZE, "right"))
            while end > at and begins[end - 1] + _LOCAL_SIZE + lengths[end - 1] > start + len(block):
                end -= 1
            if end > at:
                part = slice(at, end)
                heads = begins[part] - start
                found = start + _sound(block, heads, fields[part], lengths[part])
                found[found + fields[part]["packed"] > self._directory] = -1
                text = str(block, "latin-1")
                for k, head, begin in zip(order[part].tolist(), heads.tolist(), found.tolist(), strict=True):
                    if begin >= start and text.startswith(names[k], head + _LOCAL_SIZE):
                        self._sound[names[k]] = begin
            at = max(end, at + 1)

    def _head(self, at: int, size: int) -> bytes:
        """Bytes of a local header, from the last read if it covers them: small storages lie close together."""
        start = at - self._window_at
        if not 0 <= start <= len(self._window) - size:
            self._window = self._file.read_at(at, max(size, self._step)) if at >= 0 else b""
            self._window_at, start = at, 0
        return self._window[start : start + size]

    def _place(self, name: str, at: int = 0) -> int:
        """The offset of a byte of the local header, clamped to the file: the directory may hold any value."""
        return min(max(0, self.entries[name].at + at), self._file.size)

    def _fault(self, name: str, message: str, at: int) -> FormatError:
        return FormatError(f"zip entry {show(name)}: {message}", self._file.path, self._place(name, at))

    def _differ(self, name: str, what: str, local: int, central: int, at: int) -> FormatError:
        return self._fault(name, f"{what} {local} in its local header, but {central} in the directory", at)

    def check_overlap(self) -> None:
        """Refuses overlaps of the entries located so far. Only now is the size of their extra fields known."""
        used = [self.entries[name] for name in self._used]
        ends = [begin + entry.packed for begin, entry in zip(self._used.values(), used, strict=True)]
        self._check_apart(list(self._used), [entry.at for entry in used], ends)

    def _check_apart(self, names: Sequence[str], begins: Sequence[int], ends: Sequence[int]) -> None:
        if all(map(le, ends, islice(begins, 1, None))):  # in the order of their bytes
            return
        for (_, end, before), (begin, _, name) in pairwise(sorted(zip(begins, ends, names, strict=True))):
            if begin < end:
                message = f"zip entry {show(name)} begins within {show(before)}, which ends at {end}"
                raise FormatError(message, self._file.path, min(max(0, begin), self._file.size))

    def read(self, name: str) -> tuple[bytes, int | None]:
        """The bytes of an entry, and their offset in the file; None where they are compressed.

        Raises:
            FormatError, UnsupportedError: see `inflate`.
            LimitError: the entry inflates to more than `MAX_INFLATED` bytes.
        """
        info, file = self.entries[name], self._file
        begin = self.locate(name)
        if info.method == STORED:
            self.check_stored(name)
            return file.read_at(begin, info.size), begin
        if info.size > MAX_INFLATED:
            raise LimitError(f"{file.path}: zip entry {show(name)} inflates to more than {MAX_INFLATED} bytes")
        return b"".join(self.inflate(name)), None

    def check_packed(self, name: str) -> None:
        """Refuses, before inflating it, an entry that cannot have the size in the directory.

        Raises:
            FormatError: it is stored with two different sizes, or the size exceeds the largest ratio of deflate.
            UnsupportedError: its compression is not deflate.
        """
        info, file = self.entries[name], self._file
        if info.method == STORED:
            self.check_stored(name)
        elif info.method != DEFLATED:
            raise UnsupportedError(f"{file.path}: zip entry {show(name)} has compression {info.method}")
        elif info.size > info.packed * _DEFLATE_RATIO:
            raise self._fault(name, f"{info.packed} bytes cannot inflate to the {info.size} in the directory", 0)

    def inflate(self, name: str) -> Iterator[bytes]:
        """The bytes of an entry in pieces, at most as many as the directory says.

        Raises:
            FormatError: the entry is damaged.
            UnsupportedError: its compression is not deflate.
        """
        info, file = self.entries[name], self._file
        at = self.locate(name)
        end = at + info.packed
        self.check_packed(name)
        if info.method == STORED:
            while at < end:
                yield file.read_at(at, min(_PIECE, end - at))
                at += _PIECE
            return
        machine = zlib.decompressobj(-15)
        left = info.size
        while not machine.eof:
            data = machine.unconsumed_tail
            if not data:
                data = file.read_at(at, min(_PIECE, end - at))
                at += len(data)
            try:
                # Also without input: zlib may hold output beyond the limit of the last call.
                piece = machine.decompress(data, min(_PIECE, left + 1))
            except zlib.error as error:
                raise FormatError(f"zip entry {show(name)} is damaged: {error}", file.path, at) from None
            if not piece and not data:
                break
            left -= len(piece)
            if left < 0:
                message = f"zip entry {show(name)} inflates to more than the {info.size} bytes in the directory"
                raise FormatError(message, file.path, self._place(name))
            if piece:
                yield piece
        if left:
            message = f"zip entry {show(name)} inflates to {info.size - left} bytes, the directory says {info.size}"
            raise FormatError(message, file.path, self._place(name))

    def check_stored(self, name: str) -> None:
        """Refuses an entry that is compressed."""
        info = self.entries[name]
        if info.method != STORED:
            raise UnsupportedError(
                f"{self._file.path}: zip entry {show(name)} is compressed; torch stores tensors uncompressed, and so "
                "must other writers"
            )
        if info.packed != info.size:
            message = f"zip entry {show(name)} is stored, but has {info.packed} and {info.size} bytes"
            raise FormatError(message, self._file.path, self._place(name))


def _sound(block: bytes, heads: Any, fields: Columns, lengths: Any) -> Any:
    """Where the contents of entries begin in a block; far below 0 where a local header differs from the directory.

    Names are not compared, only their lengths.

    Args:
        block: bytes of the file.
        heads: where the local headers are in it.
        fields: what the directory says.
        lengths: of the names.
    """
    rows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(block, np.uint8), _LOCAL_SIZE)[heads]
    local = rows.view(_FIELDS)[:, 0]
    sound = (local["magic"] == _MAGIC) & (local["method"] == fields["method"]) & (local["name"] == lengths)
    sound &= (local["flags"] | fields["flags"]) & _ENCRYPTED == 0
    for size in ("packed", "size"):
        sound &= (local[size] == fields[size]) | (local[size] == 0) | (local[size] == _LARGE)
    return np.where(sound, heads + _LOCAL_SIZE + lengths + local["extra"], -(1 << 62))
