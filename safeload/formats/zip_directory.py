"""The directory of a zip archive: what it says about each entry.

The standard library's zipfile decides what a directory means. It makes an object of many fields for each entry; where
nothing about a directory is unusual, in which every reader finds the same, its fields are read here as columns.
"""

from __future__ import annotations

import errno
import io
import struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..base.text import show
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, LimitError

# Largest directory in bytes: an entry takes 46 bytes plus its name, and becomes Python objects of about 600 bytes. The
# limit allows a million entries; the largest real checkpoints have some ten thousand.
MAX_DIRECTORY = 64 << 20

# Methods of compression.
STORED, DEFLATED = 0, 8

# The end record of an archive: numbers of two disks, entries on this disk and in total, size and offset of the
# directory, length of the comment that follows. Where a field does not fit, a ZIP64 record (of the size that all
# writers give it) and a locator with the offset of that record precede it.
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")

# The fields of an entry that are used; its name follows them, then an extra field and a comment.
_FIELDS = np.dtype(
    {
        "names": ["magic", "version", "flags", "method", "crc", "packed", "size", "extra", "at"],
        "formats": ["<u4", "u1", "<u2", "<u2", "<u4", "<u4", "<u4", "<u2", "<u4"],
        "offsets": [0, 6, 8, 10, 16, 20, 24, 30, 42],
        "itemsize": 46,
    }
)
# An array of them.
Columns: TypeAlias = np.ndarray[Any, Any]
_MAGIC = int.from_bytes(b"PK\x01\x02", "little")
_LENGTHS = struct.Struct("<3H").unpack_from
_LENGTHS_AT = 28
# Newest version of the format that zipfile takes.
_NEWEST = 63


class ZipEntry(NamedTuple):
    """What the directory says about one entry.

    Attributes:
        name: its name.
        flags: bits that say how it is stored.
        method: how it is compressed.
        crc: CRC-32 of its content.
        packed: bytes that it takes in the archive.
        size: bytes of its content.
        at: offset of its local header.
    """

    name: str
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    at: int


def _entry_of(info: Any) -> ZipEntry:
    fields = info.flag_bits, info.compress_type, info.CRC, info.compress_size, info.file_size, info.header_offset
    return ZipEntry(info.orig_filename, *fields)


class End(NamedTuple):
    """What the end record of an archive says about its directory.

    Attributes:
        at: first byte of the end record; the directory must end there.
        entries: number of entries in the directory.
        size: of the directory in bytes.
        offset: of the directory in the file.
        usual: whether every reader takes it so: there is one disk, and a ZIP64 record has the size that all give it.
    """

    at: int
    entries: int
    size: int
    offset: int
    usual: bool = True


class Directory(NamedTuple):
    """The directory of an archive.

    Attributes:
        entries: in its order; there may be several of a name.
        begin: first byte of the directory in the file.
        end: what the end record says; None where no record ends with the file.
        columns: the fields of the entries, where nothing about any is unusual: names are ASCII, all fields have their
            values in the entry itself; else None.
    """

    entries: list[ZipEntry]
    begin: int
    end: End | None
    columns: Columns | None


def _read_end(file: WeightFile) -> End | None:
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
        return End(at, *small)
    record_at = at - _LOCATOR.size - _END64.size
    record = _END64.unpack(file.read_at(record_at, _END64.size))
    large = record[-3:]
    _, disk, offset, disks = _LOCATOR.unpack(locator)
    if record[0] != b"PK\x06\x06" or offset != record_at:
        raise FormatError("the zip archive's ZIP64 record is not where its locator says", file.path, record_at)
    for what, one, other, most in zip(
        ("entries", "bytes of directory", "as its offset"), small, large, (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF), strict=True
    ):
        if one not in (other, most):
            message = f"the zip archive's end says {one} {what}, its ZIP64 record {other}"
            raise FormatError(message, file.path, record_at)
    return End(record_at, large[0], large[1], large[2], disk == 0 and disks <= 1 and record[1] == _END64.size - 12)


class _Stream(io.RawIOBase):
    """The file as the stream that zipfile expects.

    Attributes:
        failures: the errors of failed reads, which zipfile would report as an invalid archive.
    """

    def __init__(self, file: WeightFile) -> None:
        self.failures: list[OSError] = []
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
            self.failures.append(error)
            raise
        self._at += len(data)
        return data


def read_directory(file: WeightFile) -> Directory:
    """Reads the directory of an archive.

    Raises:
        FormatError: the file is not a zip archive.
        LimitError: a directory of more than `MAX_DIRECTORY` bytes.
        OSError: the file cannot be read.
    """
    end = _read_end(file)
    if end is not None:
        if end.size > MAX_DIRECTORY:
            raise LimitError(f"{file.path}: the zip archive's directory has more than {MAX_DIRECTORY} bytes")
        if end.usual and end.offset + end.size == end.at:
            found = _read_plain(file.read_at(end.offset, end.size))
            if found is not None:
                return Directory(found[0], end.offset, end, found[1])
    return _read_any(file, end)


def _read_plain(data: bytes) -> tuple[list[ZipEntry], Columns] | None:
    """The entries of a directory; None where anything about one is unusual."""
    text = str(data, "latin-1")
    names, begins, at = [], [], 0
    try:
        while at < len(data):
            name, extra, comment = _LENGTHS(data, at + _LENGTHS_AT)
            begins.append(at)
            at += _FIELDS.itemsize
            names.append(text[at : at + name])
            at += name + extra + comment
    except struct.error:
        return None
    if not begins or at != len(data) or not all(map(str.isascii, names)):
        return None
    rows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), _FIELDS.itemsize)[begins]
    fields = rows.view(_FIELDS)[:, 0]
    if (fields["magic"] != _MAGIC).any() or (fields["version"] > _NEWEST).any() or fields["extra"].any():
        return None
    columns = (fields[name].tolist() for name in ("flags", "method", "crc", "packed", "size", "at"))
    return list(map(ZipEntry, names, *columns)), fields


def _read_any(file: WeightFile, end: End | None) -> Directory:
    """The directory of any archive, by zipfile; see `read_directory`."""
    import zipfile  # only here: it takes milliseconds

    # What zipfile raises for invalid archives.
    errors = (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        NotImplementedError,
        RuntimeError,
        ValueError,
        LookupError,
        EOFError,
        OverflowError,
    )
    stream = _Stream(file)
    try:
        with zipfile.ZipFile(stream) as archive:
            infos = archive.infolist()
            begin = archive.start_dir
    except FormatError:
        raise
    except (*errors, OSError) as error:
        if stream.failures:
            raise stream.failures.pop() from None  # it refers to this frame and to the stream
        what = show(str(error)) if str(error) else type(error).__name__
        # Where the directory should begin; without an end record, the end of the file.
        at = file.size if end is None else min(end.offset, file.size)
        cut = "" if end is not None else ": the file is truncated, or its end was never written"
        raise FormatError(f"the zip archive's directory cannot be read: {what}{cut}", file.path, at) from None
    return Directory(list(map(_entry_of, infos)), begin, end, None)
