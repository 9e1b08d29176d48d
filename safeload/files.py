"""An open weight file: its descriptor, its table and views into its mapping."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from . import dtypes
from ._native import Error, check, ffi, lib, mapped_buffer, pointer, short
from .errors import UnsupportedError
from .tensor import Table, TensorInfo

PathLike = str | os.PathLike[str]
Array = np.ndarray[Any, Any]


class Layout(NamedTuple):
    """How a tensor becomes an array.

    Attributes:
        dtype: of the array.
        shape: of the array.
        begin: first byte in the file.
        end: past the last byte in the file.
        source: number of the dtype in the file.
        target: number of the dtype that it is converted to; ``source`` when its bytes are taken as they are.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int
    source: int
    target: int


def native_path(path: PathLike) -> tuple[str, bytes]:
    """A path as messages show it and as the C core takes it.

    Raises:
        TypeError: not a path.
        ValueError: it holds a NUL, which would silently end it.
    """
    text = os.fsdecode(os.fspath(path))
    encoded = text.encode() if os.name == "nt" else os.fsencode(text)
    if b"\0" in encoded:
        raise ValueError(f"embedded null byte in path {text!r}")
    return text, encoded


class WeightFile:
    """One file, open for reading until closed or forgotten. Any thread may use it.

    Attributes:
        path: as it was given.
        size: bytes.
        table: its tensors.
    """

    def __init__(self, path: str, descriptor: int, size: int, table: Table) -> None:
        self.path = path
        self.size = size
        self.table = table
        self._descriptor = descriptor

    @property
    def descriptor(self) -> int:
        """The C core's file handle, for jobs."""
        if self._descriptor < 0:
            raise ValueError(f"{self.path} is closed")
        return self._descriptor

    def close(self) -> None:
        """Closes the descriptor; arrays over mappings stay valid."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            short.sl_file_close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()

    def map(self) -> Any:
        """A new private copy-on-write mapping of the whole file, as a writable buffer.

        Raises:
            OSError: the system refuses the mapping.
        """
        address = ffi.new("void **")
        error = Error()
        status = short.sl_file_map(self.descriptor, self.size, pointer(address), pointer(error))
        check(status, error, self.path)
        return mapped_buffer(address[0], self.size)

    def infos(self) -> list[TensorInfo]:
        """What is known of each tensor."""
        table = self.table
        return [
            TensorInfo(name, row.code, shape, end - begin, self.path, begin)
            for name, row, shape, (begin, end) in zip(
                table.names, table.rows, table.shapes, table.byte_ranges(), strict=True
            )
        ]

    def tensor_at(self, position: int) -> str | None:
        """The tensor that a byte belongs to, as messages name it."""
        ranges = self.table.byte_ranges()
        index = bisect_right(ranges, (position, self.size + 1)) - 1
        return f"tensor {self.table.names[index]!r}" if index >= 0 and position < ranges[index][1] else None

    def layout(self, index: int) -> Layout:
        """How one tensor becomes an array."""
        return _layout(self.table.row(index), self.table.shape(index), *self.table.byte_range(index))

    def layouts(self, indices: Iterable[int], target: dtypes.Dtype | None = None) -> list[Layout]:
        """`layout` of many tensors, at the price of one look at each column.

        Args:
            indices: which.
            target: dtype to convert floating tensors to.

        Raises:
            UnsupportedError: there is no such conversion.
        """
        rows, shapes, ranges = self.table.rows, self.table.shapes, self.table.byte_ranges()
        if target is None:
            return [_layout(rows[i], shapes[i], *ranges[i]) for i in indices]
        result = []
        for i in indices:
            row = rows[i]
            if not row.floating or row is target:
                result.append(_layout(row, shapes[i], *ranges[i]))
            elif lib.sl_convertible(row.number, target.number):
                dtype = dtypes.array_dtype(target.number)
                result.append(Layout(dtype, shapes[i], *ranges[i], row.number, target.number))
            else:
                name = self.table.names[i]
                raise UnsupportedError(f"tensor {name!r}: there is no conversion from {row.code} to {target.code}")
        return result


def _layout(row: dtypes.Dtype, shape: tuple[int, ...], begin: int, end: int) -> Layout:
    if row.bits < 8:
        shape = dtypes.array_shape(row, shape, end - begin)
    return Layout(dtypes.array_dtype(row.number), shape, begin, end, row.number, row.number)


def array_over(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> Array:
    """An array over part of a buffer, which it keeps alive.

    Raises:
        UnsupportedError: this numpy cannot have an array of so many axes (32 before numpy 2).
    """
    try:
        array: Array = np.ndarray(shape, dtype, buffer, offset)
    except ValueError as error:
        raise UnsupportedError(f"numpy {np.__version__} cannot show shape {list(shape)}: {error}") from None
    return array


def view_of(buffer: Any, layout: Layout) -> Array | None:
    """The array over a mapped file, or None where it must be a copy: converted, not aligned, or in foreign order."""
    dtype, shape, begin, end, source, target = layout
    if begin == end:
        return np.empty(shape, dtype)
    if source != target or begin % dtype.alignment or (sys.byteorder == "big" and dtype.itemsize > 1):
        return None
    return array_over(buffer, dtype, shape, begin)
