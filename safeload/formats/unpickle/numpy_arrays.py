"""Locates the elements of pickled arrays, in the file itself or in an unnamed temporary file.

Bytes of a pickle that are neither text nor compressed can be read from the file directly. Others, and those whose byte
order differs from the rest of the file, are written once to the temporary file when the pickle is opened.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from ...base.arrays import array_fits, c_strides
from ...base.listed_table import ListedTable, Listing
from ...base.text import show
from ...engine.run.weight_file import WeightFile, open_temporary
from ...errors import UnsupportedError
from .numpy_globals import NumpyArray
from .run import Unpickled


class Arrays:
    """Positions of the arrays of a pickle.

    Args:
        found: the pickle.
        path: of its file.
        big_endian: byte order of the file's other tensors.
    """

    def __init__(self, found: Unpickled, path: str, *, big_endian: bool) -> None:
        self._found = found
        self._path = path
        self._big_endian = big_endian
        self._pieces: list[bytes] = []
        self._size = 64  # leading zeros: the temporary file must not look like another format
        self._begins: dict[tuple[int, int], int] = {}
        self._listings: list[Listing] = []

    def place(self, name: str, array: NumpyArray) -> Listing | None:
        """Describes an array in the file; None if it goes into the temporary file.

        Raises:
            UnsupportedError: its dtype is not a dtype of weights.
        """
        dtype = array.dtype
        if dtype is None or dtype.row is None:
            what = "no dtype" if dtype is None else dtype.name
            raise UnsupportedError(f"{self._path}: array {show(name)} holds {what}, which is not a dtype of weights")
        if not array_fits(array.shape, dtype.itemsize):
            raise UnsupportedError(
                f"{self._path}: array {show(name)}: {list(array.shape)} is more than memory can have"
            )
        strides = None
        if array.order is not None:
            strides = _strides(array, dtype.itemsize)
        swapped = dtype.itemsize > 1 and len(array.raw) > 0
        begin = None if swapped and dtype.big_endian != self._big_endian else self._in_file(array.raw)
        if begin is not None:
            return Listing(name, dtype.row, array.shape, begin, begin + len(array.raw), strides)
        begin = self._put(array.raw, dtype.row.swap if swapped and dtype.big_endian else 1)
        self._listings.append(Listing(name, dtype.row, array.shape, begin, begin + len(array.raw), strides))
        return None

    def _in_file(self, raw: bytes | bytearray) -> int | None:
        """The offset of the bytes in the file; None if the file does not contain them unencoded."""
        base = self._found.base
        if base is None:
            return None
        if not raw:
            return base
        at = self._found.places.get(id(raw))
        if at is None or self._found.data[at : at + len(raw)] != raw:  # the id may have been reused
            return None
        return base + at

    def _put(self, raw: bytes | bytearray, width: int) -> int:
        key = (id(raw), width)
        begin = self._begins.get(key)
        if begin is None:
            begin = self._begins[key] = self._size
            data = bytes(raw)
            if width > 1:
                import numpy as np

                data = np.frombuffer(data, f">u{width}").astype(f"<u{width}").tobytes()
            self._pieces += (data, bytes(-len(data) % 64))
            self._size += len(data) + -len(data) % 64
        return begin

    def beside(self) -> WeightFile | None:
        """The temporary file with its table; None if no array needs it.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._listings:
            return None
        file = open_temporary("safeload-pickle-", self._write, shown=self._path)
        file.table = ListedTable(self._listings)
        return file

    def _write(self, out: BinaryIO, path: str) -> None:
        out.write(bytes(64))
        out.writelines(self._pieces)


def _strides(array: NumpyArray, itemsize: int) -> tuple[int, ...] | None:
    """The strides in bytes; None for C order."""
    order: Any = array.order
    if 0 in array.shape or sum(dim > 1 for dim in array.shape) < 2:
        return None
    in_memory = c_strides(tuple(array.shape[axis] for axis in order), itemsize)
    strides = [0] * len(order)
    for axis, step in zip(order, in_memory, strict=True):
        strides[axis] = step
    return None if tuple(strides) == c_strides(array.shape, itemsize) else tuple(strides)
