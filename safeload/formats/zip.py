"""Zip archives whose entries are mapped: locates the bytes of each entry and checks everything.

The standard library's zipfile reads the directory. The rest is checked here, so that all readers see the same
contents: the archive is the whole file, names are unique, no two entries overlap, and the local header of an entry that
is used agrees with the directory.
"""

from __future__ import annotations

import errno
import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from ..base.text import show
from ..engine.weight_file import WeightFile
from ..errors import FormatError, LimitError, UnsupportedError
from ..stores.remote import RemoteStore

# Bytes that a compressed entry may inflate to in memory: pickles have a few MiB and are usually not compressed.
MAX_INFLATED = 256 << 20

# Largest directory in bytes: an entry takes 46 bytes plus its name, and becomes Python objects of about 600 bytes. The
# limit allows a million entries; the largest real checkpoints have some ten thousand.
MAX_DIRECTORY = 64 << 20

# Largest ratio of deflate: a copy of 258 bytes takes two bits.
_DEFLATE_RATIO = 1032

# What zipfile raises for invalid archives.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    NotImplementedError,
    RuntimeError,
    ValueError,
    LookupError,
    EOFError,
    OverflowError,
)

# The local header: flags, method, compressed and full size, lengths of name and extra field; then the name.
_LOCAL = struct.Struct("<6x2H8x2I2H").unpack_from
_LOCAL_SIZE = 30
# Bytes read for a local header: a page, which the system reads anyway.
_WINDOW = 4096
# The same over the network: what a local header and that of an array behind it take.
_NEAR = 512

# Bytes of an entry that are inflated at a time.
_PIECE = 1 << 20

_ENCRYPTED, _UTF8 = 0x1, 0x800

# The end record of an archive: numbers of two disks, entries on this disk and in total, size and offset of the
# directory, length of the comment that follows. Where a field does not fit, a ZIP64 record (of the size that all
# writers give it) and a locator with the offset of that record precede it.
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")


class _End(NamedTuple):
    """What the end record of an archive says about its directory.

    Attributes:
        at: first byte of the end record; the directory must end there.
        entries: number of entries in the directory.
        size: of the directory in bytes.
        offset: of the directory in the file.
    """

    at: int
    entries: int
    size: int
    offset: int


def _read_end(file: WeightFile) -> _End | None:
    """Finds the end record of an archive as zipfile does; None where no record ends with the file.

    Raises:
        FormatError: the end record and the ZIP64 record disagree.
    """
    start = max(0, file.size - _END.size - 0xFFFF)
    tail = file.read_at(start, file.size - start)
    found = tail.rfind(b"PK\x05\x06")
    if found < 0 or found + _END.size > len(tail):
        return None
    _, _, _, _, *small, comment = _END.unpack_from(tail, found)
    at = start + found
    if at + _END.size + comment != file.size:
        return None
    locator = file.read_at(at - _LOCATOR.size, _LOCATOR.size) if at >= _LOCATOR.size + _END64.size else b""
    if locator[:4] != b"PK\x06\x07":
        return _End(at, *small)
    record_at = at - _LOCATOR.size - _END64.size
    record = _END64.unpack(file.read_at(record_at, _END64.size))
    large = record[-3:]
    if record[0] != b"PK\x06\x06" or _LOCATOR.unpack(locator)[2] != record_at:
        raise FormatError("the zip archive's ZIP64 record is not where its locator says", file.path, record_at)
    for what, one, other, most in zip(
        ("entries", "bytes of directory", "as its offset"), small, large, (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF), strict=True
    ):
        if one not in (other, most):
            message = f"the zip archive's end says {one} {what}, its ZIP64 record {other}"
            raise FormatError(message, file.path, record_at)
    return _End(record_at, *large)


class _Stream(io.RawIOBase):
    """The file as the stream that zipfile expects.

    Attributes:
        failure: the error of a failed read, which zipfile would report as an invalid archive; None without one.
    """

    def __init__(self, file: WeightFile) -> None:
        self.failure: OSError | None = None
        self._file = file
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._file.size)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, f"position {at}")  # as files do: zipfile seeks before the start of small ones
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._file.read_at(self._at, self._file.size if size < 0 else size)
        except OSError as error:
            self.failure = error
            raise
        self._at += len(data)
        return data


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
        self.entries: dict[str, zipfile.ZipInfo] = {}
        self._used: dict[str, tuple[int, int]] = {}
        self._window, self._window_at = b"", 0
        self._step = _NEAR if file.remote else _WINDOW
        stream = _Stream(file)
        end = _read_end(file)
        if end is not None and end.size > MAX_DIRECTORY:
            raise LimitError(f"{file.path}: the zip archive's directory has more than {MAX_DIRECTORY} bytes")
        try:
            with zipfile.ZipFile(stream) as archive:
                infos = archive.infolist()
                self._directory = archive.start_dir
        except FormatError:
            raise
        except (*_ZIP_ERRORS, OSError) as error:
            if stream.failure is not None:
                raise stream.failure from None
            what = show(str(error)) if str(error) else type(error).__name__
            # Where the directory should begin; without an end record, the end of the file.
            at = file.size if end is None else min(end.offset, file.size)
            cut = "" if end is not None else ": the file is truncated, or its end was never written"
            raise FormatError(f"the zip archive's directory cannot be read: {what}{cut}", file.path, at) from None
        for info in infos:
            if info.orig_filename in self.entries:
                at = min(max(0, info.header_offset), file.size)
                raise FormatError(f"duplicate zip entry {show(info.orig_filename)}", file.path, at)
            self.entries[info.orig_filename] = info
        self._check_whole(end)

    def _check_whole(self, end: _End | None) -> None:
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
        for name, info in self.entries.items():
            if not 0 <= info.header_offset < end.offset:
                raise self._fault(name, "there is no local header at its offset", 0)
        spans = sorted(
            (info.header_offset, info.header_offset + _LOCAL_SIZE + info.compress_size, name)
            for name, info in self.entries.items()
        )
        begin = spans[0][0] if spans else end.offset
        if begin:
            raise FormatError(f"the zip archive's first entry begins at byte {begin}, not at 0", path, 0)
        self._check_apart(spans)

    def locate(self, name: str) -> int:
        """The offset of the first byte of an entry.

        Raises:
            FormatError: local header and directory disagree, or the entry extends past the data.
            UnsupportedError: the entry is encrypted.
        """
        info = self.entries[name]
        at = info.header_offset
        wanted = name.encode("utf-8" if info.flag_bits & _UTF8 else "cp437", "surrogateescape")
        head = self._head(at, _LOCAL_SIZE + len(wanted))
        if len(head) < _LOCAL_SIZE or head[:4] != b"PK\x03\x04":
            raise self._fault(name, "there is no local header at its offset", 0)
        flags, method, packed, size, name_size, extra_size = _LOCAL(head)
        if (flags | info.flag_bits) & _ENCRYPTED:
            raise UnsupportedError(f"{self._file.path}: zip entry {show(name)} is encrypted")
        if name_size != len(wanted) or head[_LOCAL_SIZE:] != wanted:
            local = self._file.read_at(at + _LOCAL_SIZE, name_size)
            raise self._fault(name, f"it is called {show(local)} in its local header", _LOCAL_SIZE)
        # A size of 0 stands for one that follows the data, the largest value for one in a ZIP64 field.
        if method != info.compress_type:
            raise self._differ(name, "compression", method, info.compress_type, 8)
        if packed not in (0, 0xFFFFFFFF, info.compress_size):
            raise self._differ(name, "compressed size", packed, info.compress_size, 18)
        if size not in (0, 0xFFFFFFFF, info.file_size):
            raise self._differ(name, "size", size, info.file_size, 22)
        begin: int = at + _LOCAL_SIZE + name_size + extra_size
        end = begin + info.compress_size
        if end > self._directory:
            message = f"bytes [{begin}, {end}) reach beyond the data, which ends at {self._directory}"
            raise self._fault(name, message, 0)
        self._used[name] = (at, end)
        return begin

    def prefetch(self, names: Iterable[str]) -> None:
        """Reads the local headers of entries on the network, many at a time, which `locate` will be asked for."""
        if isinstance(self._file.store, RemoteStore):
            begins = [self.entries[name].header_offset for name in names]
            self._file.store.prefetch((begin, begin + self._step) for begin in begins)

    def _head(self, at: int, size: int) -> bytes:
        """Bytes of a local header, from the last read if it covers them: small storages lie close together."""
        start = at - self._window_at
        if not 0 <= start <= len(self._window) - size:
            self._window = self._file.read_at(at, max(size, self._step)) if at >= 0 else b""
            self._window_at, start = at, 0
        return self._window[start : start + size]

    def _place(self, name: str, at: int = 0) -> int:
        """The offset of a byte of the local header, clamped to the file: the directory may hold any value."""
        return min(max(0, self.entries[name].header_offset + at), self._file.size)

    def _fault(self, name: str, message: str, at: int) -> FormatError:
        return FormatError(f"zip entry {show(name)}: {message}", self._file.path, self._place(name, at))

    def _differ(self, name: str, what: str, local: int, central: int, at: int) -> FormatError:
        return self._fault(name, f"{what} {local} in its local header, but {central} in the directory", at)

    def check_overlap(self) -> None:
        """Refuses overlaps of the entries located so far. Only now is the size of their extra fields known."""
        self._check_apart(sorted((begin, end, name) for name, (begin, end) in self._used.items()))

    def _check_apart(self, spans: list[tuple[int, int, str]]) -> None:
        for (_, end, before), (begin, _, name) in pairwise(spans):
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
        if info.compress_type == zipfile.ZIP_STORED:
            self.check_stored(name)
            return file.read_at(begin, info.file_size), begin
        if info.file_size > MAX_INFLATED:
            raise LimitError(f"{file.path}: zip entry {show(name)} inflates to more than {MAX_INFLATED} bytes")
        return b"".join(self.inflate(name)), None

    def check_packed(self, name: str) -> None:
        """Refuses, before inflating it, an entry that cannot have the size in the directory.

        Raises:
            FormatError: it is stored with two different sizes, or the size exceeds the largest ratio of deflate.
            UnsupportedError: its compression is not deflate.
        """
        info, file = self.entries[name], self._file
        if info.compress_type == zipfile.ZIP_STORED:
            self.check_stored(name)
        elif info.compress_type != zipfile.ZIP_DEFLATED:
            raise UnsupportedError(f"{file.path}: zip entry {show(name)} has compression {info.compress_type}")
        elif info.file_size > info.compress_size * _DEFLATE_RATIO:
            raise self._fault(
                name, f"{info.compress_size} bytes cannot inflate to the {info.file_size} in the directory", 0
            )

    def inflate(self, name: str) -> Iterator[bytes]:
        """The bytes of an entry in pieces, at most as many as the directory says.

        Raises:
            FormatError: the entry is damaged.
            UnsupportedError: its compression is not deflate.
        """
        info, file = self.entries[name], self._file
        at = self.locate(name)
        end = at + info.compress_size
        self.check_packed(name)
        if info.compress_type == zipfile.ZIP_STORED:
            while at < end:
                yield file.read_at(at, min(_PIECE, end - at))
                at += _PIECE
            return
        machine = zlib.decompressobj(-15)
        left = info.file_size
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
                message = f"zip entry {show(name)} inflates to more than the {info.file_size} bytes in the directory"
                raise FormatError(message, file.path, self._place(name))
            if piece:
                yield piece
        if left:
            message = (
                f"zip entry {show(name)} inflates to {info.file_size - left} bytes, the directory says {info.file_size}"
            )
            raise FormatError(message, file.path, self._place(name))

    def check_stored(self, name: str) -> None:
        """Refuses an entry that is compressed."""
        info = self.entries[name]
        if info.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedError(
                f"{self._file.path}: zip entry {show(name)} is compressed; torch stores tensors uncompressed, and so "
                "must other writers"
            )
        if info.compress_size != info.file_size:
            message = f"zip entry {show(name)} is stored, but has {info.compress_size} and {info.file_size} bytes"
            raise FormatError(message, self._file.path, self._place(name))
