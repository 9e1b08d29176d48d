"""The npy format of numpy.save: a header, then one array. Entries of npz archives have the same format.

1. The byte 0x93 and "NUMPY", then a byte each of major and minor version: 1.0, 2.0 or 3.0.
2. The size of the header, little-endian: u16 in version 1, u32 in later versions.
3. The header: the text of a Python dict with "descr" (the dtype), "fortran_order" and "shape", padded with spaces, in
   Latin-1; in UTF-8 in version 3.
4. The elements in C or Fortran order, to the end of the file. Arrays of dtype object are pickled.

https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import io
import math
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, array_fits, c_strides, check_mapping, not_an_array, refuse_masked
from ..base.listed_table import ListedTable, Listing
from ..base.paths import PathLike
from ..base.text import check_name, show
from ..engine.read.lazy import Lazy, materialize
from ..engine.run.atomic_file import AtomicFile, pieces_of
from ..engine.run.memory import address_of
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, SafeloadError, UnsupportedError
from .registry import Candidate, Content, OpenRequest

SUFFIX = ".npy"

# Name of the only tensor of a file, as in a torch checkpoint that is one tensor.
NAME = "tensor"

# Largest header that is read, in bytes: numpy itself reads no header of more than 10,000 bytes.
_HEADER_SIZE = 10_240
# Bytes read at first for a header: numpy writes 128 for most arrays.
_WINDOW = 256

# What Python's and numpy's parsers raise for invalid headers.
_HEADER_ERRORS = (ValueError, TypeError, SyntaxError, LookupError, RecursionError, MemoryError, OverflowError)

# A dtype that is not a record, as numpy writes it: byte order, kind, size in bytes.
_DESCR = re.compile(r"[<>|=]?[?biufcSUVOMm][0-9]{0,9}(\[[a-zA-Z0-9]+\])?", re.ASCII)


# ---- read ----


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    fortran: bool
    shape: tuple[Any, ...]


def read(candidate: Candidate, wanted: OpenRequest) -> Content:
    """An open file with its table; see `read_table`."""
    candidate.file.table = read_table(candidate.file)
    return Content(candidate.file)


def read_table(file: WeightFile) -> ListedTable:
    """The array of an open file, as a table of one tensor.

    Raises:
        FormatError: the file breaks the format; the error has the byte position.
        UnsupportedError: an array of Python objects, or of a dtype that weights do not have.
    """
    return ListedTable([read_array(file, NAME, "the array", "the file", 0, file.size)])


def read_array(file: WeightFile, name: str, subject: str, holder: str, begin: int, size: int) -> Listing:
    """Parses the header at ``begin`` and checks it against the bytes that follow.

    Args:
        file: that contains the array.
        name: of the tensor.
        subject: the array, for messages.
        holder: the file or entry that contains it, for messages.
        begin: first byte of the header.
        size: bytes of header and data together.

    Raises:
        FormatError, UnsupportedError: see `read_table`.
    """
    try:
        raw, header_size = _find_header(file, begin, size)
        dtype, fortran, shape = _parse_header(raw)
    except _HEADER_ERRORS as error:
        message = f"{subject}: its npy header cannot be read: {show(str(error))}"
        raise FormatError(message, file.path, begin) from None
    if dtype.hasobject:
        raise UnsupportedError(f"{file.path}: {subject} holds Python objects, which are a pickle: refused")
    row = dtypes.BY_NAME.get(dtype.name)
    if row is None or row.packed:
        hint = ": numpy forgets bfloat16 and float8" if dtype.kind == "V" and dtype.names is None else ""
        raise UnsupportedError(f"{file.path}: {subject} is {dtype}, not a dtype of weights{hint}")
    possible = all(type(dim) is int and 0 <= dim < 1 << 63 for dim in shape)
    if possible and 0 in shape:
        possible = array_fits(shape, dtype.itemsize)
    if not possible:
        raise FormatError(f"{subject}: no array can have the shape {show(str(shape))}", file.path, begin)
    data = begin + header_size
    end, left = data + math.prod(shape) * dtype.itemsize, begin + size - data
    if end != begin + size:
        wanted = f"{row.code} {list(shape)} needs {end - data} bytes"
        message = f"{subject}: {wanted}, but {holder} has {left} after the header"
        raise FormatError(message, file.path, min(end, begin + size))
    strides = None
    if fortran and sum(dim > 1 for dim in shape) > 1 and 0 not in shape:
        strides = c_strides(shape[::-1], dtype.itemsize)[::-1]
    big_endian = dtype.itemsize > 1 and dtype.isnative == (sys.byteorder == "big")
    return Listing(name, row, tuple(shape), data, end, strides, big_endian=big_endian)


def _find_header(file: WeightFile, begin: int, size: int) -> tuple[bytes, int]:
    """The header, starting at its magic, and its size."""
    head = file.read_at(begin, min(size, _WINDOW))
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise ValueError("it does not begin with the magic of npy")
    if head[6] not in (1, 2, 3) or head[7] != 0:
        raise ValueError(f"npy version {head[6]}.{head[7]}")
    end = _start(head) + int.from_bytes(head[8 : _start(head)], "little")
    if end > min(size, _HEADER_SIZE):
        raise ValueError(f"a header of {end} bytes")
    if end > len(head):
        head = file.read_at(begin, end)
    return head[:end], end


def _start(head: bytes) -> int:
    """Where the text of a header begins."""
    return 10 if head[6] == 1 else 12


# Cached: archives hold many arrays of few shapes.
@lru_cache(maxsize=256)
def _parse_header(head: bytes) -> _Header:
    """Parses a header. Unlike numpy's own reader, it does not repair headers of Python 2 (numpy warns there)."""
    fields = ast.literal_eval(head[_start(head) :].decode("latin1" if head[6] < 3 else "utf-8"))
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("it must have the keys descr, fortran_order and shape")
    if not isinstance(fields["fortran_order"], bool) or not isinstance(fields["shape"], tuple):
        raise ValueError("fortran_order must be a bool and shape a tuple")
    descr = fields["descr"]
    if isinstance(descr, str) and not _DESCR.fullmatch(descr):
        raise ValueError(f"descr {show(descr)}")
    return _Header(np.lib.format.descr_to_dtype(descr), fields["fortran_order"], fields["shape"])


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
    """Writes an array in C order and little-endian, atomically.

    Args:
        tensors: exactly one, whose name is not written.
        path: of the file to write.
        overwrite: False to raise FileExistsError where something exists.
        durable: False to skip the fsync of file and folder.

    Raises:
        SafeloadError: there is not exactly one tensor.
        UnsupportedError: a tensor whose dtype numpy does not have.
        OSError: the file cannot be written; an existing one is unchanged.
    """
    check_mapping(tensors, "tensors")
    if len(tensors) != 1:
        raise SafeloadError(
            f"an npy file holds one array, but there are {len(tensors)} tensors: choose one by its name"
        )
    ((name, value),) = tensors.items()
    value = check_writable(name, value, "npy")
    out = io.BytesIO()
    described = {"descr": value.dtype.newbyteorder("<").str, "fortran_order": False, "shape": tuple(value.shape)}
    np.lib.format.write_array_header_1_0(out, described)
    head = np.frombuffer(out.getvalue(), np.uint8)
    size = head.size + math.prod(value.shape) * value.dtype.itemsize
    with AtomicFile(path, size, overwrite=overwrite, durable=durable) as file:
        file.write([(address_of(head), head.size)])
        for _owner, address, nbytes in pieces_of(materialize(value)):
            if nbytes:
                file.write([(address, nbytes)])


def check_writable(name: Any, value: Any, format: str) -> Array | Lazy:
    """The array to write, checked.

    Raises:
        TypeError: the name is not a str, or the value is not an array, or a masked one.
        UnsupportedError: numpy's format cannot hold it.
    """
    check_name(name)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, (np.ndarray, Lazy)) and not hasattr(value, "scheme"):
        raise not_an_array(f"tensor {show(name)}", value)
    if not isinstance(value, (np.ndarray, Lazy)):
        message = f'tensor {show(name)} is {value.scheme}, which {format} does not have: pass dtype="float32"'
        raise UnsupportedError(message, tensor=name)
    refuse_masked(value, f"tensor {show(name)}")
    if np.dtype(value.dtype.type).isbuiltin != 1 or value.dtype.kind not in "biufc":
        advice = ': pass dtype="float32"' if value.dtype.name in dtypes.BY_NAME else ""
        message = f"tensor {show(name)} is {dtypes.shown(value.dtype)}, which {format} does not have{advice}"
        raise UnsupportedError(message, tensor=name)
    return value
