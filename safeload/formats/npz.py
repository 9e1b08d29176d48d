"""What numpy.savez writes: a zip archive of ``<name>.npy`` entries.

Entries that are stored as they are become views. An archive with a compressed entry is unpacked into a temporary file
when it is opened. Header of an entry:
https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import math
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..errors import FormatError, UnsupportedError
from ..files import PathLike, WeightFile, array_fits, c_strides, open_descriptor
from ..lazy import Lazy, materialize
from ..tensor import ListedTable, Listing
from ..writer import AtomicFile
from .archive import Archive
from .pickle_machine import show

SUFFIX = ".npy"

# Bytes of an entry's header that are looked at: numpy itself reads no header of more than 10,000 bytes.
_HEADER_SIZE = 10_240

# What Python's and numpy's parsers raise for headers that are none.
_HEADER_ERRORS = (ValueError, TypeError, SyntaxError, LookupError, RecursionError, MemoryError, OverflowError)

# A dtype that is no record, as numpy writes it: byte order, kind, bytes.
_DESCR = re.compile(r"[<>|=]?[?biufcSUVOMm][0-9]{0,9}(\[[a-zA-Z0-9]+\])?", re.ASCII)

# The oldest time that zip has, as numpy writes it: the same tensors give the same bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


def is_npz(archive: Archive) -> bool:
    """Whether an archive holds arrays of numpy and no pickle of torch."""
    names = archive.entries
    return any(name.endswith(SUFFIX) for name in names) and not any(name.endswith(".pkl") for name in names)


# ---- read ----


class _Array(NamedTuple):
    """What an entry's header says.

    Attributes:
        listing: the tensor.
        big_endian: its byte order, None for single bytes.
    """

    listing: Listing
    big_endian: bool | None


def open_archive(archive: Archive, file: WeightFile) -> WeightFile:
    """The file with its table; another one (temporary, without a name) where entries are compressed.

    Raises:
        FormatError: an entry breaks the format.
        UnsupportedError: an array of Python objects, or of a dtype that weights do not have.
    """
    names = [name for name in archive.entries if name.endswith(SUFFIX)]
    if any(archive.entries[name].compress_type != zipfile.ZIP_STORED for name in names):
        return _unpacked(archive, names, file)
    arrays = []
    for name in names:
        archive.check_stored(name)
        begin = archive.locate(name)
        arrays.append(_read_array(file, name, begin, archive.entries[name].file_size))
    archive.check_overlap()
    file.table = _table(arrays, file.path)
    return file


def _unpacked(archive: Archive, names: list[str], file: WeightFile) -> WeightFile:
    descriptor, path = tempfile.mkstemp(prefix="safeload-npz-")
    try:
        places = []
        with os.fdopen(descriptor, "wb") as out:
            for name in names:
                out.write(bytes(-out.tell() % 64))
                places.append(out.tell())
                for piece in archive.inflate(name):
                    out.write(piece)
        unpacked = open_descriptor(path)
    finally:
        with suppress(OSError):  # Windows keeps it until it is closed, and then until the folder is cleaned
            os.unlink(path)
    unpacked.path = file.path
    arrays = [
        _read_array(unpacked, name, begin, archive.entries[name].file_size)
        for name, begin in zip(names, places, strict=True)
    ]
    unpacked.table = _table(arrays, file.path)
    file.close()
    return unpacked


def _read_array(file: WeightFile, entry: str, begin: int, size: int) -> _Array:
    """What the header of the entry at ``begin`` says, checked against its size."""
    name = entry.removesuffix(SUFFIX)
    try:
        dtype, fortran, shape, header_size = _parse_header(file.read_at(begin, min(size, _HEADER_SIZE)))
    except _HEADER_ERRORS as error:
        message = f"array {show(name)}: its npy header cannot be read: {show(str(error))}"
        raise FormatError(message, file.path, begin) from None
    if dtype.hasobject:
        raise UnsupportedError(f"{file.path}: array {show(name)} holds Python objects, which are a pickle: refused")
    row = dtypes.BY_NAME.get(dtype.name)
    if row is None or row.packed:
        hint = ": numpy forgets bfloat16 and float8" if dtype.kind == "V" else ""
        raise UnsupportedError(f"{file.path}: array {show(name)} is {dtype}, no dtype of weights{hint}")
    possible = all(type(dim) is int and 0 <= dim < 1 << 63 for dim in shape)
    if possible and 0 in shape:
        possible = array_fits(shape, dtype.itemsize)
    if not possible:
        raise FormatError(f"array {show(name)}: no array can have the shape {show(str(shape))}", file.path, begin)
    data = begin + header_size
    end, left = data + math.prod(shape) * dtype.itemsize, begin + size - data
    if end != begin + size:
        wanted = f"{row.code} {list(shape)} needs {end - data} bytes"
        raise FormatError(f"array {show(name)}: {wanted}, but its entry has {left}", file.path, begin)
    strides = None
    if fortran and sum(dim > 1 for dim in shape) > 1 and 0 not in shape:
        strides = c_strides(shape[::-1], dtype.itemsize)[::-1]
    big_endian = None if dtype.itemsize == 1 else dtype.isnative == (sys.byteorder == "big")
    return _Array(Listing(name, row, tuple(shape), data, end, strides), big_endian)


def _parse_header(head: bytes) -> tuple[np.dtype[Any], bool, tuple[Any, ...], int]:
    """Dtype, Fortran order, shape and size of a header. Numpy's own reader mends what Python 2 wrote, with warnings."""
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise ValueError("it does not begin with the magic of npy")
    if head[6] not in (1, 2, 3) or head[7] != 0:
        raise ValueError(f"npy version {head[6]}.{head[7]}")
    start = 10 if head[6] == 1 else 12
    end = start + int.from_bytes(head[8:start], "little")
    if end > len(head):
        raise ValueError(f"a header of {end} bytes")
    fields = ast.literal_eval(head[start:end].decode("latin1" if head[6] < 3 else "utf-8"))
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("it must have the keys descr, fortran_order and shape")
    if not isinstance(fields["fortran_order"], bool) or not isinstance(fields["shape"], tuple):
        raise ValueError("fortran_order must be a bool and shape a tuple")
    descr = fields["descr"]
    if isinstance(descr, str) and not _DESCR.fullmatch(descr):
        raise ValueError(f"descr {descr!r}")
    return np.lib.format.descr_to_dtype(descr), fields["fortran_order"], fields["shape"], end


def _table(arrays: list[_Array], path: str) -> ListedTable:
    orders = {array.big_endian for array in arrays if array.big_endian is not None}
    if len(orders) > 1:
        raise UnsupportedError(f"{path}: arrays of both byte orders in one archive")
    return ListedTable([array.listing for array in arrays], big_endian=True in orders)


# ---- write ----


def save(tensors: Mapping[str, Any], path: PathLike, *, overwrite: bool = True, durable: bool = True) -> None:
    """Writes an npz archive (not compressed), atomically.

    Args:
        tensors: name to array.
        path: where.
        overwrite: False to raise FileExistsError where something exists.
        durable: False to leave out the fsync of file and folder.

    Raises:
        UnsupportedError: a tensor whose dtype npz does not have.
        OSError: it cannot be written; the old one is still there.
    """
    for name, value in tensors.items():
        _check(name, value)
    with (
        AtomicFile(path, 0, overwrite=overwrite, durable=durable) as file,
        file.stream() as stream,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        for name, value in tensors.items():
            with archive.open(zipfile.ZipInfo(name + SUFFIX, _NO_TIME), "w", force_zip64=True) as entry:
                array = materialize(value)
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
                del array  # before the next one is made


def _check(name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a tensor name is a str, not {type(name).__name__}")
    if not isinstance(value, (np.ndarray, np.generic, Lazy)):
        what = getattr(value, "scheme", type(value).__name__)
        raise UnsupportedError(f'tensor {name!r} is {what}, which npz does not have: pass dtype="float32"')
    if value.dtype.isbuiltin != 1 or value.dtype.kind not in "biufc":
        raise UnsupportedError(f'tensor {name!r} is {value.dtype.name}, which npz does not have: pass dtype="float32"')
