"""Zip archives with mapped entries: read the directory, locate the bytes of each entry and check everything.

All readers must see the same contents, so the archive is the whole file, names are unique, entries do not overlap, and
the local header of each entry in use agrees with the directory. A directory is refused unless zipfile of the standard
library finds the same entries in it; zipfile itself makes an object of many fields for each.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from operator import le
from typing import BinaryIO, NamedTuple, Protocol

from ..errors import FormatError, LimitError, SafeloadError, UnsupportedError
from .atomic_file import reserve
from .files import LocalStore
from .text import error_about, show
from .weight_file import WeightFile, open_temporary

# Largest directory in bytes: an entry takes 46 bytes plus its name, and becomes Python objects of about 600 bytes. The
# limit allows a million entries; the largest real checkpoints have some ten thousand.
MAX_DIRECTORY = 64 << 20
# Largest size in memory of a compressed entry: pickles have a few MiB and are usually not compressed.
MAX_INFLATED = 256 << 20

# Compression methods.
STORED, DEFLATED = 0, 8
# Largest ratio of deflate: a copy of 258 bytes takes two bits.
_DEFLATE_RATIO = 1032
# Flags of an entry.
_ENCRYPTED, _UTF8 = 0x1, 0x800

# An entry of the directory: magic number, version, flags, method, CRC, sizes, lengths of name, extra field and comment,
# and the offset of the local header; then the name, the extra field and the comment.
_CENTRAL = struct.Struct("<4s2xBx2H4x3I3H8xI")
# Newest version that zipfile reads.
_NEWEST = 63

# The local header: flags, method, compressed and full size, lengths of name and extra field; then the name.
_LOCAL = struct.Struct("<6x2H8x2I2H").unpack_from
_LOCAL_SIZE = 30
# Marks a size that is stored in a ZIP64 field instead.
_LARGE = 0xFFFFFFFF

# The end record: numbers of two disks, entries on this disk and in total, size and offset of the directory, length of
# the comment that follows. If a field is too small for its value, a ZIP64 record (of the usual size) and
# a locator with the offset of that record precede it.
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")

# Bytes to read for a local header: a page, because the system reads a page anyway; more if entries are small.
_WINDOW, _BLOCK = 4096, 1 << 16
# Bytes to read over the network: a local header and the header of the array that follows.
_NEAR = 512
# Bytes to read of each local header in one pass: names of storages are short.
_BRIEF = 128
# Alignment of entries in the temporary file of a compressed archive.
_ALIGNED = 64
# Bytes of an entry to inflate at a time.
_CHUNK = 1 << 20


class Readable(Protocol):
    """Bytes at random access."""

    size: int

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes, fewer at the end."""


class ZipEntry(NamedTuple):
    """An entry of the directory."""

    name: str
    flags: int
    method: int  # of compression
    crc: int  # CRC-32 of the content
    packed: int  # bytes in the archive
    size: int  # bytes of the content
    at: int  # offset of the local header


# ---- the directory ----


def _read_end(file: WeightFile) -> tuple[int, int, int, int]:
    """Return the place of an archive's end record; number of entries, size and place of the directory before it."""
    start = max(0, file.size - _END.size - 0xFFFF)
    tail = file.read_at(start, file.size - start)
    begin = tail.rfind(b"PK\x05\x06")
    if begin < 0 or begin + _END.size > len(tail):
        text = "the zip archive's directory cannot be read: the file is truncated, or its end was never written"
        raise FormatError(text, file.path, file.size)
    _, _, _, _, *small, comment = _END.unpack_from(tail, begin)
    at = start + begin
    if at + _END.size + comment != file.size:
        raise FormatError("the file continues after the zip archive's end", file.path)
    locator = file.read_at(at - _LOCATOR.size, _LOCATOR.size) if at >= _LOCATOR.size + _END64.size else b""
    if locator[:4] != b"PK\x06\x07":
        return at, *small
    record_at = at - _LOCATOR.size - _END64.size
    record = _END64.unpack(file.read_at(record_at, _END64.size))
    large = record[-3:]
    _, disk, offset, disks = _LOCATOR.unpack(locator)
    if record[0] != b"PK\x06\x06" or offset != record_at:
        raise FormatError("the zip archive's ZIP64 record is not where its locator says", file.path, record_at)
    for label, short, long, full in zip(
        ("entries", "bytes of directory", "as its offset"), small, large, (0xFFFF, _LARGE, _LARGE), strict=True
    ):
        if short not in (long, full):
            message = f"the zip archive's end says {short} {label}, but its ZIP64 record says {long}"
            raise FormatError(message, file.path, record_at)
    if disk or disks > 1:
        raise FormatError("the zip archive is divided among several disks", file.path, at - _LOCATOR.size)
    return record_at, *large


def _read_entries(file: WeightFile, offset: int, size: int) -> list[ZipEntry]:
    data = file.read_at(offset, size)
    text, entries, at = str(data, "latin-1"), [], 0
    try:
        while at < len(data):
            magic, version, *fields, length, extra, comment, local = _CENTRAL.unpack_from(data, at)
            begin = at + _CENTRAL.size
            stop = begin + length + extra
            name = text[begin : begin + length]
            if magic != b"PK\x01\x02" or version > _NEWEST or stop + comment > len(data):
                fault = "is cut off" if version <= _NEWEST else f"needs version {version / 10} of zip"
                fault = fault if magic == b"PK\x01\x02" else "has no magic number"
                break
            if not name.isascii():
                name = str(data[begin : begin + length], "utf-8" if fields[0] & _UTF8 else "cp437")
            if extra:
                large = _zip64(data[begin + length : stop], (fields[4], fields[3], local), strict=True)
                fields[4], fields[3], local = large
            entries.append(ZipEntry._make((name, *fields, local)))
            at = stop + comment
        else:
            return entries
    except struct.error:
        fault = "is cut off"
    except UnicodeDecodeError:
        fault = "has a name that is not UTF-8"
    raise FormatError(f"the zip archive's directory cannot be read: an entry {fault}", file.path, offset + at)


# ---- the entries ----


class Archive:
    """The entries of an archive by name."""

    def __init__(self, file: WeightFile, *, appended: bool = False) -> None:
        self._file = file
        self._used: dict[str, int] = {}  # first byte of each located entry
        self._window, self._window_at = b"", 0
        self._heads: dict[int, bytes] = {}  # by their offsets
        path, (end, count, size, self._directory) = file.path, _read_end(file)
        if size > MAX_DIRECTORY:
            text = f"the directory of the zip archive has {size} bytes, the limit is {MAX_DIRECTORY}"
            raise error_about(LimitError, text, path=path)
        # zipfile shifts all offsets by the number of bytes before an archive. Some readers do not.
        if self._directory + size != end:
            message = f"the zip archive's directory must end at byte {end}, but it says {self._directory + size}: "
            raise FormatError(message + "there are extra bytes before the archive, or within it", path, end)
        entries = _read_entries(file, self._directory, size)
        self.entries: dict[str, ZipEntry] = {}
        for entry in entries:
            if self.entries.setdefault(entry.name, entry) is not entry:
                raise FormatError(f"duplicate zip entry {show(entry.name)}", path, min(entry.at, file.size))
        small = self._directory <= len(self.entries) * _WINDOW
        self._step = _NEAR if file.remote else _BLOCK if small else _WINDOW
        if count != len(self.entries):
            message = f"the zip archive's directory has {len(self.entries)} entries, but its end says {count}"
            raise FormatError(message, path, end)
        for entry in entries:
            if entry.at >= self._directory:
                raise self._fault(entry.name, ": no local header at its offset")
        begins = [entry.at for entry in entries]
        begin = min(begins, default=self._directory)
        if begin and not appended:  # else other bytes, such as a program, can precede the first entry
            raise FormatError(f"the zip archive's first entry begins at byte {begin}, not at 0", path, 0)
        self._check_apart(list(self.entries), begins, [entry.at + _LOCAL_SIZE + entry.packed for entry in entries])

    def locate(self, name: str) -> int:
        """Return the offset of the first byte of an entry."""
        info = self.entries[name]
        at = info.at
        encoded = name.encode("utf-8" if info.flags & _UTF8 else "cp437", "surrogateescape")
        head = self._head(at, _LOCAL_SIZE + len(encoded))
        if len(head) < _LOCAL_SIZE or head[:4] != b"PK\x03\x04":
            raise self._fault(name, ": no local header at its offset")
        flags, method, packed, size, name_size, extra_size = _LOCAL(head)
        if (flags | info.flags) & _ENCRYPTED:
            raise self._fault(name, "is encrypted", kind=UnsupportedError)
        if name_size != len(encoded) or head[_LOCAL_SIZE:] != encoded:
            local = self._file.read_at(at + _LOCAL_SIZE, name_size)
            raise self._fault(name, f": its local header names it {show(local)}", _LOCAL_SIZE)
        # A size can be 0 if the true size follows the data, or _LARGE if it is in a ZIP64 field.
        if method != info.method:
            raise self._differ(name, "compression", method, info.method, 8)
        if packed not in (0, _LARGE, info.packed):
            raise self._differ(name, "compressed size", packed, info.packed, 18)
        if size not in (0, _LARGE, info.size):
            raise self._differ(name, "size", size, info.size, 22)
        begin: int = at + _LOCAL_SIZE + name_size + extra_size
        end = begin + info.packed
        if end > self._directory:
            message = f": bytes [{begin}, {end}) reach beyond the data, which ends at {self._directory}"
            raise self._fault(name, message)
        self._used[name] = begin
        return begin

    def prefetch(self, names: Iterable[str]) -> None:
        """Read local headers for `locate`, many at a time."""
        store, begins = self._file.store, [self.entries[name].at for name in names]
        if isinstance(store, LocalStore):
            if self._step == _WINDOW and hasattr(os, "pread"):
                with suppress(OSError):  # `_head` reads again, and says which file fails
                    self._heads = store.use(lambda number: {at: os.pread(number, _BRIEF, at) for at in begins})
        elif (prefetch := getattr(store, "prefetch", None)) is not None:  # a remote file
            prefetch((begin, begin + self._step) for begin in begins)

    def _head(self, at: int, size: int) -> bytes:
        """Return bytes of a local header, from the last read if possible: small storages lie close together."""
        head = self._heads.get(at, b"")
        if len(head) >= size:
            return head[:size]
        start = at - self._window_at
        if not 0 <= start <= len(self._window) - size:
            self._window = self._file.read_at(at, max(size, self._step))
            self._window_at, start = at, 0
        return self._window[start : start + size]

    def _fault(self, name: str, text: str, at: int = 0, kind: type[SafeloadError] = FormatError) -> SafeloadError:
        """Return an error about an entry; a FormatError is at a byte of its local header."""
        # Clamped to the file, because the directory can be wrong.
        offset = min(self.entries[name].at + at, self._file.size) if kind is FormatError else None
        separator = "" if text.startswith(":") else " "
        return error_about(kind, f"zip entry {show(name)}{separator}{text}", path=self._file.path, offset=offset)

    def _differ(self, name: str, field: str, local: int, central: int, at: int) -> SafeloadError:
        return self._fault(name, f": {field} {local} in its local header, but {central} in the directory", at)

    def check_overlap(self) -> None:
        """Refuse overlaps of the entries located so far, because only now the size of their extra fields is known."""
        used = [self.entries[name] for name in self._used]
        ends = [begin + entry.packed for begin, entry in zip(self._used.values(), used, strict=True)]
        self._check_apart(list(self._used), [entry.at for entry in used], ends)

    def _check_apart(self, names: Sequence[str], begins: Sequence[int], ends: Sequence[int]) -> None:
        if all(map(le, ends, islice(begins, 1, None))):  # in the order of their bytes
            return
        for (_, end, before), (begin, _, name) in pairwise(sorted(zip(begins, ends, names, strict=True))):
            if begin < end:
                raise self._fault(name, f"begins within {show(before)}, which ends at {end}")

    def read(self, name: str) -> tuple[bytes, int | None]:
        """Return the bytes of an entry, and their offset in the file or None if they are compressed."""
        info, begin = self.entries[name], self.locate(name)
        if info.method == STORED:
            self.check_stored(name)
            return self._file.read_at(begin, info.size), begin
        if info.size > MAX_INFLATED:
            raise self._fault(name, f"inflates to more than {MAX_INFLATED} bytes", kind=LimitError)
        return b"".join(self.inflate(name)), None

    def check_packed(self, name: str) -> None:
        """Refuse, before inflating it, an entry that cannot have the size in the directory."""
        info = self.entries[name]
        if info.method == STORED:
            self.check_stored(name)
        elif info.method != DEFLATED:
            raise self._fault(name, f"uses unsupported compression method {info.method}", kind=UnsupportedError)
        elif info.size > info.packed * _DEFLATE_RATIO:
            raise self._fault(name, f": {info.packed} bytes cannot inflate to the {info.size} in the directory")

    def inflate(self, name: str) -> Iterator[bytes]:
        """Iterate over the bytes of an entry in chunks, at most as many bytes as the directory says."""
        info, file = self.entries[name], self._file
        at = self.locate(name)
        end = at + info.packed
        self.check_packed(name)
        if info.method == STORED:
            for begin in range(at, end, _CHUNK):
                yield file.read_at(begin, min(_CHUNK, end - begin))
            return
        machine, left, crc = zlib.decompressobj(-15), info.size, 0
        while not machine.eof:
            data = machine.unconsumed_tail
            if not data:
                data = file.read_at(at, min(_CHUNK, end - at))
                at += len(data)
            try:
                # Also without input, because zlib may hold output beyond the limit of the last call.
                chunk = machine.decompress(data, min(_CHUNK, left + 1))
            except zlib.error as error:
                raise self._fault(name, f"is damaged: {error}", at - info.at) from None
            if not chunk and not data:
                break
            left -= len(chunk)
            if left < 0:
                raise self._fault(name, f"inflates to more than the {info.size} bytes in the directory")
            if chunk:
                crc = zlib.crc32(chunk, crc)
                yield chunk
        if left:
            raise self._fault(name, f"inflates to {info.size - left} bytes, the directory says {info.size}")
        if crc != info.crc:
            raise self._fault(name, f"is damaged: its CRC-32 is {crc:08x}, but the directory says {info.crc:08x}")

    def check_stored(self, name: str) -> None:
        """Refuse a compressed entry."""
        info = self.entries[name]
        if info.method != STORED:
            text = "is compressed, but torch checkpoints must store tensors uncompressed"
            raise self._fault(name, text, kind=UnsupportedError)
        if info.packed != info.size:
            text = f"is stored uncompressed, but its sizes are {info.packed} and {info.size} bytes"
            raise self._fault(name, text)


@contextmanager
def unpacked(
    archive: Archive, names: list[str], file: WeightFile, prefix: str
) -> Iterator[tuple[WeightFile, list[int]]]:
    """Yield an unnamed temporary file with unpacked entries, which then stands for the archive, and their places."""
    begins, size = [], 0
    for name in names:
        archive.check_packed(name)
        begins.append(size)
        size += archive.entries[name].size + -archive.entries[name].size % _ALIGNED

    def write(out: BinaryIO, path: str) -> None:
        reserve(out.fileno(), size, path)  # fails before writing if the disk is too small
        for name, begin in zip(names, begins, strict=True):
            out.write(bytes(begin - out.tell()))
            for chunk in archive.inflate(name):
                out.write(chunk)

    copy = open_temporary(prefix, write, shown=file.path)
    try:
        yield copy, begins
    except BaseException:
        copy.close()
        raise
    copy.stand_for(file)
    file.close()


# ---- every reading of an archive, for judging it ----


def every_entry(content: Readable, most: int) -> list[ZipEntry]:
    """Return at most ``most`` entries of all archives in a content; torch.distributed writes one for each chunk."""
    end = content.size
    entries: list[ZipEntry] = []
    listed: set[str] = set()  # offset and shift of each entry, to read it once: as text, whose hash no file can choose
    while len(listed) <= most:
        start = max(0, end - _END.size - 0xFFFF)
        tail = content.read_at(start, end - start)
        # The possible last end records, in descending order.
        records = [start + match.start() for match in re.finditer(rb"PK\x05\x06", tail)][::-1]
        if not records:
            break
        before = len(entries)
        for record in records:
            entries += _listed(content, record, listed, most)
        begin = max(last - size - offset for last, size, offset in _directories(content, records[-1]))
        end = min([entry.at for entry in entries[before:] if entry.at >= max(0, begin)], default=records[-1])
        if end >= records[0]:
            break
    return entries


def _directories(content: Readable, end: int) -> list[tuple[int, int, int]]:
    """Return end, size and offset of the directories to which an end record can lead readers."""
    *_, size, offset, _ = _END.unpack(content.read_at(end, _END.size).ljust(_END.size, b"\xff"))
    locator = content.read_at(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size else b""
    if locator[:4] != b"PK\x06\x07":
        return [(end, size, offset)]
    directories = [(offset + size, size, offset)]
    # The locator counts from the beginning of its archive, which other bytes can precede.
    for at in (end - _LOCATOR.size - _END64.size, _LOCATOR.unpack(locator)[2]):
        record = content.read_at(min(at, content.size), _END64.size) if at >= 0 else b""
        if record[:4] == b"PK\x06\x06" and len(record) == _END64.size:
            directories.append((at, *_END64.unpack(record)[-2:]))
    return directories


def _listed(content: Readable, end: int, listed: set[str], most: int) -> Iterator[ZipEntry]:
    """Iterate over the entries of the directories of an end record, as far as they can be read."""
    for last, size, offset in _directories(content, end):
        for at, shift in ((last - size, last - size - offset), (offset, 0)):
            while at >= 0 and (key := f"{at} {shift}") not in listed and len(listed) <= most:
                listed.add(key)
                head = content.read_at(min(at, content.size), _CENTRAL.size)
                if len(head) < _CENTRAL.size or head[:4] != b"PK\x01\x02":
                    break
                *_, flags, method, crc, packed, full, name_size, extra_size, comment_size, local = _CENTRAL.unpack(head)
                at += _CENTRAL.size
                rest = content.read_at(at, name_size + extra_size)
                name = rest[:name_size].decode("utf-8", "backslashreplace")
                full, packed, local = _zip64(rest[name_size:], (full, packed, local))
                yield ZipEntry(name, flags, method, crc, packed, full, local + shift)
                at += name_size + extra_size + comment_size


def _zip64(extra: bytes, values: tuple[int, ...], *, strict: bool = False) -> tuple[int, ...]:
    """Return full and packed size and offset, from the ZIP64 field if they are there; if ``strict``, they must be."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        data = extra[at + 4 : at + 4 + size]
        if strict and (len(data) < size or (kind == 1 and size // 8 < values.count(_LARGE))):
            raise struct.error
        if kind == 1:
            large = iter(struct.unpack_from(f"<{len(data) // 8}Q", data))
            values = tuple(next(large, value) if value == _LARGE else value for value in values)
        at += 4 + size
    return values


def local_readings(content: Readable, entry: ZipEntry, *, listed: bool = True) -> tuple[int, list[ZipEntry]]:
    """Return the first byte of an entry, its entry in the directory and, if different, its local header."""
    head = content.read_at(entry.at, _LOCAL_SIZE) if 0 <= entry.at < content.size else b""
    if len(head) < _LOCAL_SIZE or head[:4] != b"PK\x03\x04":
        return entry.at + _LOCAL_SIZE, [entry]
    flags, method, packed, full, name_size, extra_size = _LOCAL(head)
    rest = content.read_at(entry.at + _LOCAL_SIZE, name_size + extra_size)
    full, packed = _zip64(rest[name_size:], (full, packed))
    begin = entry.at + _LOCAL_SIZE + name_size + extra_size
    name = rest[:name_size].decode("utf-8", "backslashreplace")
    local = ZipEntry(name, flags, method, 0, packed if packed != _LARGE else 0, full, entry.at)
    if not listed:
        return begin, [local]
    entry = entry._replace(flags=entry.flags | (flags & 1))
    if local.packed == 0:  # the size follows the data, or is only in the directory
        local = local._replace(packed=entry.packed)
    same = (local.method, local.packed) == (entry.method, entry.packed)
    return begin, [entry] if same else [entry, local._replace(name=entry.name)]
