"""An open weight file: its descriptor, its table and views into its mapping."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from . import dtypes
from ._native import Error, check, ffi, lib, mapped_buffer, pointer, short
from .errors import UnsupportedError
from .tensor import ListedTable, Table, TensorInfo

PathLike = str | os.PathLike[str]
Array = np.ndarray[Any, Any]

# Bytes of any array, as numpy has it (NPY_MAX_INTP).
MAX_ARRAY = (1 << 63) - 1


class Layout(NamedTuple):
    """How a tensor becomes an array.

    Attributes:
        dtype: of the array.
        shape: of the array.
        begin: first byte in the file.
        end: past the last byte in the file.
        source: number of the dtype in the file.
        target: number of the dtype that it is converted to; ``source`` when its bytes are taken as they are.
        strides: bytes between neighbours along each axis in the file; None where they are those of C order.
        big_endian: whether the bytes of elements are in that order in the file.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int
    source: int
    target: int
    strides: tuple[int, ...] | None = None
    big_endian: bool = False


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


class Descriptor(int):
    """The C core's file handle, closed when nothing refers to it any more.

    Jobs keep the one that they read: closed under them, its number would go to the next file that is opened, and they
    would read that.
    """

    __slots__ = ()

    def __del__(self) -> None:
        short.sl_file_close(int(self))


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
        self._descriptor: Descriptor | None = Descriptor(descriptor)

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes of the file, fewer where it ends; GIL kept, so for what is small.

        Raises:
            OSError: they cannot be read.
        """
        size = max(0, min(size, self.size - offset))
        if size == 0:
            return b""
        memory = ffi.new("char[]", size)
        if short.sl_file_read(self.descriptor, offset, pointer(memory), size, None) != lib.SL_OK:
            error = Error()  # once more, to hear why
            status = short.sl_file_read(self.descriptor, offset, pointer(memory), size, pointer(error))
            check(status, error, self.path)
        data: bytes = ffi.unpack(memory, size)
        return data

    @property
    def descriptor(self) -> Descriptor:
        """The C core's file handle, for jobs."""
        descriptor = self._descriptor
        if descriptor is None:
            raise ValueError(f"{self.path} is closed")
        return descriptor

    def close(self) -> None:
        """Closes the descriptor once no job needs it; arrays over mappings stay valid."""
        self._descriptor = None

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
        ranges = table.byte_ranges()
        sizes = table.sizes() if table.shaped else [end - begin for begin, end in ranges]
        return [
            TensorInfo(name, row.code, shape, size, self.path, begin)
            for name, row, shape, size, (begin, _) in zip(
                table.names, table.rows, table.shapes, sizes, ranges, strict=True
            )
        ]

    def tensor_at(self, position: int) -> str | None:
        """The tensor that a byte belongs to, as messages name it."""
        for name, (begin, end) in zip(self.table.names, self.table.byte_ranges(), strict=True):
            if begin <= position < end:
                return f"tensor {name!r}"
        return None

    def layout(self, index: int) -> Layout:
        """How one tensor becomes an array."""
        layout = _layout(self.table.row(index), self.table.shape(index), *self.table.byte_range(index))
        return self._shaped(index, layout) if self.table.shaped else layout

    def layouts(self, indices: Iterable[int], target: dtypes.Dtype | None = None) -> list[Layout]:
        """`layout` of many tensors, at the price of one look at each column.

        Args:
            indices: which.
            target: dtype to convert floating tensors to.

        Raises:
            UnsupportedError: there is no such conversion.
        """
        if self.table.shaped:
            indices = list(indices)
            plain = self._plain_layouts(indices, target)
            return [self._shaped(i, layout) for i, layout in zip(indices, plain, strict=True)]
        return self._plain_layouts(indices, target)

    def _shaped(self, index: int, layout: Layout) -> Layout:
        return layout._replace(strides=self.table.strides(index), big_endian=self.table.big_endian)

    def _plain_layouts(self, indices: Iterable[int], target: dtypes.Dtype | None) -> list[Layout]:
        rows, shapes, ranges = self.table.rows, self.table.shapes, self.table.byte_ranges()
        if target is None:
            return [_layout(rows[i], shapes[i], *ranges[i]) for i in indices]
        result = []
        for i in indices:
            row = rows[i]
            restored = self.table.quantized and (row.blocked or self.table.scale(i) is not None)
            if row is target or not (row.floating or restored):
                result.append(_layout(row, shapes[i], *ranges[i]))
            elif lib.sl_convertible(row.number, target.number):
                dtype = dtypes.array_dtype(target.number)
                result.append(Layout(dtype, shapes[i], *ranges[i], row.number, target.number))
            else:
                name = self.table.names[i]
                raise UnsupportedError(f"tensor {name!r}: there is no conversion from {row.code} to {target.code}")
        return result


def open_descriptor(path: PathLike) -> WeightFile:
    """An open file whose table is still empty, for readers in Python.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    text, encoded = native_path(path)
    descriptor, size, error = ffi.new("int64_t *"), ffi.new("uint64_t *"), Error()
    check(short.sl_file_open(encoded, *map(pointer, (descriptor, size, error))), error, text)
    return WeightFile(text, descriptor[0], size[0], ListedTable([]))


def _layout(row: dtypes.Dtype, shape: tuple[int, ...], begin: int, end: int) -> Layout:
    if row.bits < 8:
        shape = dtypes.array_shape(row, shape, end - begin)
    return Layout(dtypes.array_dtype(row.number), shape, begin, end, row.number, row.number)


def array_over(
    buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, strides: tuple[int, ...] | None = None
) -> Array:
    """An array over part of a buffer, which it keeps alive; in C order without strides.

    Raises:
        UnsupportedError: this numpy cannot have an array of so many axes (32 before numpy 2).
    """
    try:
        array: Array = np.ndarray(shape, dtype, buffer, offset, strides)
    except ValueError as error:
        raise UnsupportedError(f"numpy {np.__version__} cannot show shape {list(shape)}: {error}") from None
    return array


def empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array, its values undefined.

    Raises:
        UnsupportedError: as `array_over`; also of an empty shape that is too large for a wider dtype than the file's.
    """
    try:
        return np.empty(shape, dtype)
    except ValueError as error:
        raise UnsupportedError(f"numpy {np.__version__} cannot show shape {list(shape)} as {dtype}: {error}") from None


def array_fits(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether numpy can have an array of this shape, in which it counts an axis of no elements as one of 1."""
    return itemsize * (math.prod(shape) or math.prod(dim for dim in shape if dim)) <= MAX_ARRAY


def view_of(buffer: Any, layout: Layout) -> Array | None:
    """The array over a mapped file, or None where it must be a copy: converted, not aligned, or in foreign order."""
    dtype, shape, begin, end, source, target, strides, big_endian = layout
    if begin == end:
        return empty_array(shape, dtype)
    if source != target or begin % dtype.alignment or (foreign_order(big_endian) and dtype.itemsize > 1):
        return None
    return array_over(buffer, dtype, shape, begin, strides)


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Bytes between neighbours along each axis of an array in C order."""
    strides = [itemsize] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    return tuple(strides)


def foreign_order(big_endian: bool) -> bool:
    """Whether elements of that byte order are not this machine's numbers."""
    return big_endian != (sys.byteorder == "big")
