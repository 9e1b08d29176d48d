"""The formats of NumPy: npy of numpy.save has a header and an array, npz of numpy.savez is a zip archive of npy files.

1. The byte 0x93 and "NUMPY", then a byte each of major and minor version: 1.0, 2.0 or 3.0.
2. The size of the header, little-endian: u16 in version 1, u32 in later versions.
3. The header: the text of a Python dict with "descr" (the dtype), "fortran_order" and "shape", padded with spaces, in
   Latin-1; in UTF-8 in version 3.
4. The elements in C or Fortran order, to the end of the file. Arrays of dtype object are pickled; the arrays in such a
   pickle are read as those of a pickle file, for ``numpy.save`` of a dict.

Stored (uncompressed) entries of an archive become views. An archive with a compressed entry is unpacked into a
temporary file when it is opened.

https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import io
import math
import re
import sys
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError, SafeloadError, UnsupportedError
from . import dtypes, foreign
from .arrays import Array, array_fits, c_strides, check_mapping, not_an_array, refuse_masked
from .atomic_file import AtomicFile, pieces_of, write_pieces
from .registry import BY_NAME, Candidate, Content, OpenRequest, check_whole
from .table import ListedTable, Listing, Unknown, unreadable
from .tensors import Lazy, materialize
from .text import PathLike, check_name, encode, error_about, show, tensor_named
from .weight_file import WeightFile
from .zip import STORED, Archive, Readable, unpacked

if TYPE_CHECKING:
    import zipfile  # at run time only where it is used, because it takes milliseconds

SUFFIX = ".npy"

# Name of the only tensor of a file, as for a torch checkpoint that is one tensor.
NAME = "tensor"

# Largest header to read, in bytes: numpy itself reads at most 10,000.
_HEADER_SIZE = 10_240
# Bytes to read first for a header: numpy writes 128 for most arrays.
_WINDOW = 256

# Errors of Python's and numpy's parsers for invalid headers.
HEADER_ERRORS = (ValueError, TypeError, SyntaxError, LookupError, RecursionError, MemoryError, OverflowError)

# A dtype without fields, as numpy writes it: byte order, kind, size in bytes.
_DESCR = re.compile(r"[<>|=]?[?biufcSUVOMm][0-9]{0,9}(\[[a-zA-Z0-9]+\])?", re.ASCII)

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
    """Read the table of an open file: a tensor, or the tensors in a pickle of Python objects or in an archive."""
    file = candidate.file
    if foreign.is_zip(candidate.head):
        return _read_archive(file, candidate.archive)
    try:
        raw, begin = find_header(file, 0, file.size)
        pickled = parse_header(raw)[0].hasobject
    except HEADER_ERRORS:  # `read_array` says more
        pickled = False
    if pickled:
        content: Content = BY_NAME["pickle"].load().read(candidate, request, begin)
        return content
    file.table = ListedTable([read_array(file, NAME, 0, file.size)])
    return Content(file)


def _read_archive(file: WeightFile, archive: Archive) -> Content:
    """Read the table of an archive; if an entry is compressed, unpack it into an unnamed temporary file."""
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


def read_array(file: WeightFile, name: str, begin: int, size: int, *, entry: bool = False) -> Listing:
    """Parse the header of an array, in a file or an ``entry`` of an archive, and check the bytes that follow it."""
    subject, holder = (f"array {show(name)}", "its entry") if entry else ("the array", "the file")
    try:
        raw, header_size = find_header(file, begin, size)
        dtype, fortran, shape = parse_header(raw)
    except HEADER_ERRORS as error:
        raise FormatError(f"{subject}: its npy header cannot be read: {show(str(error))}", file.path, begin) from None
    possible = all(type(dim) is int and 0 <= dim < 1 << 63 for dim in shape)
    if possible and 0 in shape:
        possible = array_fits(shape, dtype.itemsize)
    if not possible:
        raise FormatError(f"{subject}: no array can have the shape {show(str(shape))}", file.path, begin)
    row = dtypes.row_of(dtype)
    if dtype.hasobject or row is None or row.packed:
        label, reason = dtypes.shown(dtype), "is not a dtype of weights"
        if dtype.hasobject:
            label, reason = "Python objects", "are pickled, which safeload refuses to load"
        elif dtype.kind == "V" and dtype.names is None:
            reason += " (NumPy files lose bfloat16 and float8)"
        is_tensor = dtype.kind not in "OSU"
        return unreadable(name, Unknown(label, shape, reason, is_tensor), begin, begin + size)
    data = begin + header_size
    end, left = data + math.prod(shape) * dtype.itemsize, begin + size - data
    if end != begin + size:
        expected = f"{row.code} {list(shape)} needs {end - data} bytes"
        message = f"{subject}: {expected}, but {holder} has {left} after the header"
        raise FormatError(message, file.path, min(end, begin + size))
    strides = None
    if fortran and sum(dim > 1 for dim in shape) > 1 and 0 not in shape:
        strides = c_strides(shape[::-1], dtype.itemsize)[::-1]
    big_endian = dtype.itemsize > 1 and dtype.isnative == (sys.byteorder == "big")
    return Listing(name, row, tuple(shape), data, end, strides, big_endian=big_endian)


def find_header(file: Readable, begin: int, size: int) -> tuple[bytes, int]:
    """Return the header, starting at its magic number, and its size."""
    head = file.read_at(begin, min(size, _WINDOW))
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise ValueError("it does not begin with the npy magic number")
    if head[6] not in (1, 2, 3) or head[7] != 0:
        raise ValueError(f"unknown npy version {head[6]}.{head[7]}")
    start = 10 if head[6] == 1 else 12
    end = start + int.from_bytes(head[8:start], "little")
    if end > min(size, _HEADER_SIZE):
        raise ValueError(f"its size of {end} bytes exceeds the limit")
    if end > len(head):
        head = file.read_at(begin, end)
    return head[:end], end


# Cached because archives hold many arrays of few shapes.
@lru_cache(maxsize=256)
def parse_header(head: bytes) -> tuple[np.dtype[Any], bool, tuple[Any, ...]]:
    """Return dtype, Fortran order and shape. Headers of Python 2, which numpy repairs with a warning, are refused."""
    text = head[10 if head[6] == 1 else 12 :].decode("latin1" if head[6] < 3 else "utf-8")
    fields = ast.literal_eval(text)
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("it must have the keys descr, fortran_order and shape")
    if not isinstance(fields["fortran_order"], bool) or not isinstance(fields["shape"], tuple):
        raise ValueError("fortran_order must be a bool and shape a tuple")
    descr = fields["descr"]
    if isinstance(descr, str) and not _DESCR.fullmatch(descr):
        raise ValueError(f"unsupported descr {show(descr)}")
    return np.lib.format.descr_to_dtype(descr), fields["fortran_order"], fields["shape"]


# ---- write ----


def write(tensors: Mapping[str, Any], metadata: Mapping[Any, Any] | None, path: PathLike, **options: Any) -> None:
    """Write an array in C order and little-endian, atomically."""
    check_mapping(tensors, "tensors")
    if len(tensors) != 1:
        raise SafeloadError(f"an npy file holds one array, got {len(tensors)} tensors: select one by its name")
    ((name, value),) = tensors.items()
    value = check_writable(name, value, "npy")
    out = io.BytesIO()
    header = {"descr": value.dtype.newbyteorder("<").str, "fortran_order": False, "shape": tuple(value.shape)}
    np.lib.format.write_array_header_1_0(out, header)
    head = np.frombuffer(out.getvalue(), np.uint8)
    size = head.size + math.prod(value.shape) * value.dtype.itemsize
    with AtomicFile(path, size, **options) as file:
        write_pieces(file, chain(pieces_of(head), pieces_of(value)))


def write_archive(
    tensors: Mapping[str, Any], metadata: Mapping[Any, Any] | None, path: PathLike, **options: Any
) -> None:
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
    size, limit = len(encode(name, "tensor name", tensor=name)), _MAX_NAME - len(SUFFIX)
    if "\0" in name:
        raise SafeloadError(f"tensor name {show(name)} contains NUL, where npz readers would truncate it", tensor=name)
    if size > limit:
        raise error_about(SafeloadError, f"has a name of {size} bytes, but npz allows at most {limit}", tensor=name)
    import zipfile

    info = zipfile.ZipInfo(SUFFIX, _NO_TIME)
    info.filename = name + SUFFIX  # set here: on Windows the constructor of ZipInfo turns backslashes into slashes
    return info


def check_writable(name: Any, value: Any, format: str) -> Array | Lazy:
    """Return the array to write, checked."""
    array = plain_array(name, value, f', which {format} does not support: pass dtype="float32"')
    if np.dtype(array.dtype.type).isbuiltin != 1 or array.dtype.kind not in "biufc":
        advice = ': pass dtype="float32"' if dtypes.row_of(array.dtype) else ""
        text = f"is {dtypes.shown(array.dtype)}, which {format} does not support{advice}"
        raise error_about(UnsupportedError, text, tensor=name)
    return array


def plain_array(name: Any, value: Any, advice: str) -> Array | Lazy:
    """Return the array to write; ``advice`` is for quantized tensors."""
    check_name(name)
    array: Array | Lazy = np.asarray(value) if isinstance(value, np.generic) else value
    if not isinstance(array, (np.ndarray, Lazy)):
        if not hasattr(array, "scheme"):
            raise not_an_array(tensor_named(name), value)
        raise error_about(UnsupportedError, f"is {array.scheme}{advice}", tensor=name)
    if type(array) not in (np.ndarray, Lazy):
        refuse_masked(array, tensor_named(name))
    return array
