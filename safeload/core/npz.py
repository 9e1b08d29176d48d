"""The npz format of numpy.savez: a zip archive of ``<name>.npy`` entries.

Stored (uncompressed) entries become views. An archive with a compressed entry is unpacked into a temporary file when it
is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SafeloadError
from .arrays import check_mapping
from .atomic_file import AtomicFile
from .files import PathLike
from .npy import SUFFIX, check_writable, read_array
from .registry import Candidate, Content, OpenRequest, check_whole
from .table import ListedTable, Listing
from .tensors import materialize
from .text import encode, error_about, show
from .weight_file import WeightFile
from .zip import STORED, Archive, unpacked

if TYPE_CHECKING:
    import zipfile  # at run time only where it is used, because it takes milliseconds

# Longest name of an entry in bytes: its length is a u16.
_MAX_NAME = (1 << 16) - 1

# The oldest time in zip, as numpy writes it, so that equal tensors give equal bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


# ---- read ----


def claims(candidate: Candidate) -> bool:
    """Return True if an archive holds arrays and no pickle, or is empty, as ``numpy.savez(path)`` writes it."""
    names = candidate.archive.entries
    if any(name.endswith(".pkl") for name in names):
        return False
    return not names or any(name.endswith(SUFFIX) for name in names)


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of an archive; if an entry is compressed, unpack it into an unnamed temporary file."""
    archive, file = candidate.archive, candidate.file
    names = [name for name in archive.entries if name.endswith(SUFFIX)]
    archive.prefetch(names)
    if any(archive.entries[name].method != STORED for name in names):
        check_whole(file, "a compressed npz must be unpacked as a whole")
        for name in names:
            archive.locate(name)
        archive.check_overlap()
        with unpacked(archive, names, file, "safeload-npz-") as (copy, begins):
            copy.table = ListedTable([*map(partial(_array, archive, copy), names, begins)])
        return Content(copy)
    arrays = []
    for name in names:
        archive.check_stored(name)
        arrays.append(_array(archive, file, name, archive.locate(name)))
    archive.check_overlap()
    file.table = ListedTable(arrays)
    return Content(file)


def _array(archive: Archive, file: WeightFile, name: str, begin: int) -> Listing:
    return read_array(file, name.removesuffix(SUFFIX), begin, archive.entries[name].size, entry=True)


# ---- write ----


def write(tensors: Mapping[str, Any], metadata: Mapping[Any, Any] | None, path: PathLike, **options: Any) -> None:
    """Write an uncompressed npz archive atomically."""
    import zipfile

    check_mapping(tensors, "tensors")
    arrays = {name: check_writable(name, value, "npz") for name, value in tensors.items()}
    entries = [_entry(name) for name in arrays]
    with (
        AtomicFile(path, 0, **options) as file,
        file.stream() as stream,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        for info, value in zip(entries, arrays.values(), strict=True):
            with archive.open(info, "w", force_zip64=True) as entry:
                array = materialize(value)
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
                del array  # frees it before the next is made


def _entry(name: str) -> zipfile.ZipInfo:
    """Return the zip entry for a tensor."""
    size, limit = len(encode(name, "tensor name", tensor=name)), _MAX_NAME - len(SUFFIX)
    if "\0" in name:
        raise SafeloadError(f"tensor name {show(name)} contains NUL, where npz readers would truncate it", tensor=name)
    if size > limit:
        raise error_about(SafeloadError, f"has a name of {size} bytes, but npz allows at most {limit}", tensor=name)
    import zipfile

    info = zipfile.ZipInfo(SUFFIX, _NO_TIME)
    info.filename = name + SUFFIX  # set here: on Windows the constructor of ZipInfo turns backslashes into slashes
    return info
