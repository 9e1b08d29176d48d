"""What torch.save writes since torch 1.6: a zip archive of one pickle and its storages.

1. ``<prefix>/data.pkl`` is the pickle, ``<prefix>/data/<key>`` the storage of each key, as it is in memory;
   ``<prefix>/byteorder`` says "little" or "big" and may be missing (little). The prefix is free text.
2. torch.package puts storages into ``<prefix>/.data/<key>.storage`` and names its pickle otherwise.
3. Local headers hold no sizes (a data descriptor follows the data): they are taken from the central directory. The data
   begins at the local header + 30 + the *local* name's length + the *local* extra field's length, padding in which
   aligns it.
4. Storages are never compressed by torch; what is compressed has been packed by someone else and cannot be mapped.

The directory is read by the standard library's zipfile. Everything else is checked here: a name is there once, the
local header says what the directory says, no two entries that are used overlap.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any

from ..errors import ForbiddenError, FormatError, LimitError, UnsupportedError
from ..files import WeightFile
from ..tensor import ListedTable
from . import unpickler
from .pickle_machine import show
from .torch_globals import ALLOWED, Storage, read_persistent_id
from .torch_tensors import Options, make_table
from .unpickler import unpickle

# Bytes that a compressed pickle may unfold to. Real ones have a few MiB, and are not compressed.
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

_ENCRYPTED, _UTF8 = 0x1, 0x800


class _Stream(io.RawIOBase):
    """The file as zipfile wants it."""

    def __init__(self, file: WeightFile) -> None:
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
        data = self._file.read_at(self._at, self._file.size if size < 0 else size)
        self._at += len(data)
        return data


class _Archive:
    """The entries of an archive by name.

    Args:
        file: the archive.

    Raises:
        FormatError: it is no zip archive, or a name is there twice.
    """

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self.entries: dict[str, zipfile.ZipInfo] = {}
        self._used: dict[int, tuple[int, str]] = {}
        self._window, self._window_at = b"", 0
        try:
            with zipfile.ZipFile(_Stream(file)) as archive:
                infos = archive.infolist()
                self._directory = archive.start_dir
        except FormatError:
            raise
        except _ZIP_ERRORS as error:
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

    def _fault(self, name: str, message: str, at: int) -> FormatError:
        offset = max(0, self.entries[name].header_offset + at)
        return FormatError(f"zip entry {show(name)}: {message}", self._file.path, offset)

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
            raise FormatError(message, self._file.path, info.header_offset)


def _find_pickle(archive: _Archive, path: str) -> str:
    """The name of the pickle: ``data.pkl`` at depth one, else the archive's only one."""
    names = archive.entries
    found = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    found = found or [name for name in names if name.endswith(".pkl")]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(show(name) for name in (found or list(names))[:10])
    if found:
        raise FormatError(f"the zip archive has {len(found)} pickles that could be the checkpoint: {shown}", path)
    if any(name.endswith(".npy") for name in names):
        raise UnsupportedError(f"{path}: an npz archive: not read yet")
    raise UnsupportedError(f"{path}: a zip archive without a pickle, so no torch checkpoint; it holds {shown}")


def _kind(archive: _Archive, prefix: str) -> str | None:
    """What else than torch.save may have written the archive."""
    if any(name.startswith(f"{prefix}code/") or name == f"{prefix}constants.pkl" for name in archive.entries):
        return "a TorchScript archive"
    if any(name.endswith(".data/extern_modules") for name in archive.entries):
        return "a torch.package archive"
    return None


def read_table(file: WeightFile, options: Options) -> ListedTable:
    """The tensors of a file.

    Raises:
        FormatError, UnsupportedError, ForbiddenError, LimitError, TensorNotFoundError: see the modules used.
        OSError: the file cannot be read.
    """
    archive = _Archive(file)
    name = _find_pickle(archive, file.path)
    prefix = name[: name.rindex("/") + 1] if "/" in name else ""
    package = f"{name[: name.find('/') + 1]}.data/"
    storages: dict[str, Storage] = {}
    begins: dict[str, int] = {}

    def persistent(value: Any) -> Any:
        return read_persistent_id(value, storages)

    def locate(storage: Storage) -> int:
        begin = begins.get(storage.key)
        if begin is None:
            begin = begins[storage.key] = _locate_storage(archive, storage, prefix, package, file.path)
        return begin

    if archive.entries[name].file_size > unpickler.MAX_PICKLE:
        raise LimitError(f"{file.path}: the pickle {show(name)} has more than {unpickler.MAX_PICKLE} bytes")
    data, base = archive.read(name)
    kind = _kind(archive, prefix)
    try:
        found = unpickle(data, ALLOWED, persistent, path=file.path, base=base, inert=options.inert)
    except ForbiddenError as error:
        if kind is None:
            raise
        raise UnsupportedError(f"{file.path}: this is {kind}: {str(error).removeprefix(file.path + ': ')}") from None
    table = make_table(found, options, file.path, locate, big_endian=_is_big_endian(archive, prefix, file.path))
    archive.check_overlap()
    return table


def _locate_storage(archive: _Archive, storage: Storage, prefix: str, package: str, path: str) -> int:
    for name in (f"{prefix}data/{storage.key}", f"{package}{storage.key}.storage"):
        if name in archive.entries:
            break
    else:
        raise FormatError(f"the archive has no entry for storage {show(storage.key)}", path)
    begin = archive.locate(name)
    archive.check_stored(name)
    size = archive.entries[name].file_size
    if size != storage.nbytes:
        raise FormatError(
            f"storage {show(storage.key)} has {size} bytes, but {storage.count} elements of {storage.type.name} have "
            f"{storage.nbytes}",
            path,
            begin,
        )
    return begin


def _is_big_endian(archive: _Archive, prefix: str, path: str) -> bool:
    name = f"{prefix}byteorder"
    if name not in archive.entries:
        return False
    size = archive.entries[name].file_size
    if size > len("little"):
        raise FormatError(f'byteorder has {size} bytes, wanted is "little" or "big"', path)
    order, begin = archive.read(name)
    if order not in (b"little", b"big"):
        raise FormatError(f'byteorder is {show(order)}, wanted is "little" or "big"', path, begin)
    return order == b"big"
