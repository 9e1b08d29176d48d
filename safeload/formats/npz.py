"""The npz format of numpy.savez: a zip archive of ``<name>.npy`` entries.

Stored (uncompressed) entries become views. An archive with a compressed entry is unpacked into a temporary file
when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ..base.arrays import check_mapping
from ..base.listed_table import ListedTable, Listing
from ..base.paths import PathLike
from ..base.text import show
from ..engine.read.lazy import materialize
from ..engine.run.atomic_file import AtomicFile, reserve
from ..engine.run.weight_file import WeightFile, open_temporary
from ..errors import SafeloadError
from .npy import SUFFIX, check_writable, read_array
from .registry import Candidate, Content, OpenRequest, check_whole
from .zip import STORED, Archive

if TYPE_CHECKING:
    import zipfile  # elsewhere where it is used: it takes milliseconds, which opening a torch checkpoint would pay

# Longest name of an entry in bytes: zip counts them in 16 bits.
_MAX_NAME = (1 << 16) - 1

# Alignment of arrays in the temporary file that a compressed archive is unpacked into.
_ALIGNMENT = 64

# The oldest time that zip can hold, as numpy writes it: the same tensors give the same bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


# ---- read ----


def claims(candidate: Candidate) -> bool:
    """Whether an archive holds numpy arrays and no torch pickle, or is empty, as ``numpy.savez(path)`` writes it."""
    names = candidate.archive.entries
    if any(name.endswith(".pkl") for name in names):
        return False
    return not names or any(name.endswith(SUFFIX) for name in names)


def read(candidate: Candidate, wanted: OpenRequest) -> Content:
    """An open archive with its table, or the temporary file that stands for it; see `open_archive`."""
    opened = open_archive(candidate.archive, candidate.file)
    if opened is not candidate.file:
        opened.stand_for(candidate.file)
    return Content(opened)


def open_archive(archive: Archive, file: WeightFile) -> WeightFile:
    """The file with its table; where entries are compressed, an unnamed temporary file instead.

    Raises:
        FormatError: an entry breaks the format.
        UnsupportedError: an array of Python objects, or of a dtype that weights do not have.
    """
    names = [name for name in archive.entries if name.endswith(SUFFIX)]
    archive.prefetch(names)
    if any(archive.entries[name].method != STORED for name in names):
        check_whole(file, "a compressed npz must be unpacked as a whole")
        for name in names:
            archive.locate(name)
        archive.check_overlap()
        return _unpacked(archive, names, file)
    arrays = []
    for name in names:
        archive.check_stored(name)
        begin = archive.locate(name)
        arrays.append(_read_array(file, name, begin, archive.entries[name].size))
    archive.check_overlap()
    file.table = ListedTable(arrays)
    return file


def _unpacked(archive: Archive, names: list[str], file: WeightFile) -> WeightFile:
    """Unpacks entries into an unnamed temporary file, closes the archive and returns the file with its table."""
    places, size = [], 0
    for name in names:
        archive.check_packed(name)
        places.append(size)
        size += archive.entries[name].size + -archive.entries[name].size % _ALIGNMENT

    def write(out: BinaryIO, path: str) -> None:
        reserve(out.fileno(), size, path)  # fails before writing if the disk is too small
        for name, begin in zip(names, places, strict=True):
            out.write(bytes(begin - out.tell()))
            for piece in archive.inflate(name):
                out.write(piece)

    unpacked = open_temporary("safeload-npz-", write, shown=file.path)
    arrays = [
        _read_array(unpacked, name, begin, archive.entries[name].size)
        for name, begin in zip(names, places, strict=True)
    ]
    unpacked.table = ListedTable(arrays)
    file.close()
    return unpacked


def _read_array(file: WeightFile, entry: str, begin: int, size: int) -> Listing:
    name = entry.removesuffix(SUFFIX)
    return read_array(file, name, f"array {show(name)}", "its entry", begin, size)


# ---- write ----


def write(
    tensors: Mapping[str, Any],
    metadata: Mapping[Any, Any] | None,
    path: PathLike,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Writes tensors for `convert`; metadata is left out, as the format has none."""
    save(tensors, path, overwrite=overwrite, durable=durable)


def save(tensors: Mapping[str, Any], path: PathLike, *, overwrite: bool = True, durable: bool = True) -> None:
    """Writes an uncompressed npz archive atomically.

    Args:
        tensors: name to array.
        path: of the file to write.
        overwrite: False to raise FileExistsError where something exists.
        durable: False to skip the fsync of file and folder.

    Raises:
        TypeError: a name is not a str.
        UnsupportedError: a tensor whose dtype npz does not have.
        SafeloadError: a name that npz cannot hold.
        OSError: the file cannot be written; an existing one is unchanged.
    """
    import zipfile

    check_mapping(tensors, "tensors")
    arrays = {name: check_writable(name, value, "npz") for name, value in tensors.items()}
    entries = [_entry(name) for name in arrays]
    with (
        AtomicFile(path, 0, overwrite=overwrite, durable=durable) as file,
        file.stream() as stream,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        for info, value in zip(entries, arrays.values(), strict=True):
            with archive.open(info, "w", force_zip64=True) as entry:
                array = materialize(value)
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
                del array  # freed before the next one is made


def _entry(name: str) -> zipfile.ZipInfo:
    """The zip entry for a tensor.

    Raises:
        SafeloadError: a name that zip cannot hold, or that other readers would truncate.
    """
    try:
        size = len((name + SUFFIX).encode())
    except UnicodeEncodeError:
        message = f"tensor name {name[:40]!r} holds a lone surrogate, which UTF-8 cannot write"
        raise SafeloadError(message, tensor=name) from None
    if "\0" in name:
        raise SafeloadError(f"tensor name {name[:40]!r} holds a NUL, at which readers of npz end it", tensor=name)
    if size > _MAX_NAME:
        most = _MAX_NAME - len(SUFFIX)
        raise SafeloadError(
            f"tensor {name[:40]!r}: its name has {size - len(SUFFIX)} bytes, but npz has at most {most}", tensor=name
        )
    import zipfile

    info = zipfile.ZipInfo(SUFFIX, _NO_TIME)
    info.filename = name + SUFFIX  # set here: on Windows the constructor of ZipInfo turns backslashes into slashes
    return info
