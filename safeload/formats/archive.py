"""Zip archives whose entries are mapped: where the bytes of each are, everything checked.

The directory is read by the standard library's zipfile. The rest is checked here: a name is there once, the local
header says what the directory says, no two entries that are used overlap.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator

from ..errors import FormatError, LimitError, UnsupportedError
from ..files import WeightFile
from .pickle_machine import show

# Bytes that a compressed entry may unfold to in memory: pickles have a few MiB, and are not compressed as a rule.
MAX_INFLATED = 256 << 20

# What zipfile raises for archives that are none.
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
# Bytes read for a local header: a page, which is what the system reads anyway.
_WINDOW = 4096

# Bytes of an entry that are unfolded at a time.
_PIECE = 1 << 20

_ENCRYPTED, _UTF8 = 0x1, 0x800


class _Stream(io.RawIOBase):
    """The file as zipfile wants it.

    Attributes:
        failure: why it could not be read: zipfile says then that there is no archive.
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
            raise ValueError(f"position {at}")
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
        FormatError: it is no zip archive, or a name is there twice.
        OSError: it cannot be read.
    """

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self.entries: dict[str, zipfile.ZipInfo] = {}
        self._used: dict[int, tuple[int, str]] = {}
        self._window, self._window_at = b"", 0
        stream = _Stream(file)
        try:
            with zipfile.ZipFile(stream) as archive:
                infos = archive.infolist()
                self._directory = archive.start_dir
        except FormatError:
            raise
        except _ZIP_ERRORS as error:
            if stream.failure is not None:
                raise stream.failure from None
            what = show(str(error)) if str(error) else type(error).__name__
            raise FormatError(f"the zip archive's directory cannot be read: {what}", file.path) from None
        for info in infos:
            if info.orig_filename in self.entries:
                raise FormatError(f"zip entry {show(info.orig_filename)} is there twice", file.path)
            self.entries[info.orig_filename] = info

    def locate(self, name: str) -> int:
        """Where the bytes of an entry begin.

        Raises:
            FormatError: local header and directory disagree, or the entry reaches beyond the data or into another.
            UnsupportedError: it is encrypted.
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
        # Sizes of 0 are said after the data, the largest in a ZIP64 field.
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
        self._used[at] = (end, name)
        return begin

    def _head(self, at: int, size: int) -> bytes:
        """Bytes of a local header, from the last read where it had them: small storages lie close together."""
        start = at - self._window_at
        if not 0 <= start <= len(self._window) - size:
            self._window = self._file.read_at(at, max(size, _WINDOW)) if at >= 0 else b""
            self._window_at, start = at, 0
        return self._window[start : start + size]

    def _place(self, name: str, at: int = 0) -> int:
        """A byte of the local header, or the nearest that the file has: the directory may say anything."""
        return min(max(0, self.entries[name].header_offset + at), self._file.size)

    def _fault(self, name: str, message: str, at: int) -> FormatError:
        return FormatError(f"zip entry {show(name)}: {message}", self._file.path, self._place(name, at))

    def _differ(self, name: str, what: str, local: int, central: int, at: int) -> FormatError:
        return self._fault(name, f"{what} {local} in its local header, but {central} in the directory", at)

    def check_overlap(self) -> None:
        """Refuses entries located so far that share bytes."""
        previous, before = 0, ""
        for begin, (end, name) in sorted(self._used.items()):
            if begin < previous:
                message = f"zip entry {show(name)} begins within {show(before)}, which ends at {previous}"
                raise FormatError(message, self._file.path, begin)
            previous, before = end, name

    def read(self, name: str) -> tuple[bytes, int | None]:
        """The bytes of an entry, and where in the file they are as such."""
        info, file = self.entries[name], self._file
        begin = self.locate(name)
        if info.compress_type == zipfile.ZIP_STORED:
            self.check_stored(name)
            return file.read_at(begin, info.file_size), begin
        if info.compress_type != zipfile.ZIP_DEFLATED:
            raise UnsupportedError(f"{file.path}: zip entry {show(name)} has compression {info.compress_type}")
        if info.file_size > MAX_INFLATED:
            raise LimitError(f"{file.path}: zip entry {show(name)} unfolds to more than {MAX_INFLATED} bytes")
        try:
            data = zlib.decompressobj(-15).decompress(file.read_at(begin, info.compress_size), info.file_size + 1)
        except zlib.error as error:
            raise FormatError(f"zip entry {show(name)} is damaged: {error}", file.path, begin) from None
        if len(data) != info.file_size:
            message = f"zip entry {show(name)} unfolds to {len(data)} bytes or more, {info.file_size} were said"
            raise FormatError(message, file.path, begin)
        return data, None

    def inflate(self, name: str) -> Iterator[bytes]:
        """The bytes of an entry, a piece at a time; where it is compressed no more than the directory says.

        Raises:
            FormatError: the entry is damaged.
            UnsupportedError: another compression than deflate.
        """
        info, file = self.entries[name], self._file
        at = self.locate(name)
        end = at + info.compress_size
        if info.compress_type == zipfile.ZIP_STORED:
            self.check_stored(name)
        elif info.compress_type != zipfile.ZIP_DEFLATED:
            raise UnsupportedError(f"{file.path}: zip entry {show(name)} has compression {info.compress_type}")
        machine = zlib.decompressobj(-15)
        left = info.file_size
        while at < end:
            data = file.read_at(at, min(_PIECE, end - at))
            at += len(data)
            try:
                while data:
                    stored = info.compress_type == zipfile.ZIP_STORED
                    piece = data if stored else machine.decompress(data, _PIECE)
                    data = b"" if stored else machine.unconsumed_tail
                    left -= len(piece)
                    if left < 0:
                        message = (
                            f"zip entry {show(name)} unfolds to more than the {info.file_size} bytes that were said"
                        )
                        raise FormatError(message, file.path, self._place(name))
                    yield piece
            except zlib.error as error:
                raise FormatError(f"zip entry {show(name)} is damaged: {error}", file.path, at) from None
        if left:
            message = f"zip entry {show(name)} unfolds to {info.file_size - left} bytes, {info.file_size} were said"
            raise FormatError(message, file.path, self._place(name))

    def check_stored(self, name: str) -> None:
        """Refuses an entry that is not stored as it is."""
        info = self.entries[name]
        if info.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedError(
                f"{self._file.path}: zip entry {show(name)} is compressed; torch stores tensors as they are, and so "
                "must whoever packs them"
            )
        if info.compress_size != info.file_size:
            message = f"zip entry {show(name)} is stored, but has {info.compress_size} and {info.file_size} bytes"
            raise FormatError(message, self._file.path, self._place(name))
