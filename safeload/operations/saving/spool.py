"""Files under construction whose tensors come one at a time: in order of arrival, or in declared places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.native import ffi
from ...base.text import show
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.memory import address_of
from ...formats.safetensors.file import TensorToWrite
from ...formats.safetensors.header import ROOM, Header
from ..folders.file_object import ObjectFile

# First byte of the tensors in a file with an unknown number of them.
_BEGIN = 128 << 10
# Files with at most this many bytes of tensors are written again with a header of the right size.
_SMALL = 16 << 20
# Small tensors are written together, in about this many bytes.
_TOGETHER = 1 << 20


class TensorBytes:
    """Write tensors to positions of a file, small neighbours in a single call."""

    def __init__(self, file: AtomicFile | ObjectFile) -> None:
        self._file = file
        self._small = bytearray()
        self._begin = 0  # position of the small tensors

    def put(self, position: int, source: TensorToWrite) -> None:
        """Write a tensor, now or with a later call. After an error the next tensor may have the same position."""
        if source.small:
            if position != self._begin + len(self._small):
                self.flush()
                self._begin = position
            for _owner, address, size in source.pieces():
                self._small += ffi.buffer(ffi.cast("char *", address), size)
            if len(self._small) >= _TOGETHER:
                self.flush()
            return
        self.flush()
        self._seek(position)
        waiting: list[tuple[int, int]] = []
        owners: list[Any] = []
        for owner, address, size in source.pieces():
            waiting.append((address, size))
            owners.append(owner)
            if not source.whole:
                self._file.write(waiting)
                waiting, owners = [], []
        self._file.write(waiting)
        self._begin = position + source.nbytes

    def flush(self) -> None:
        """Write the small tensors."""
        if self._small:
            small = np.frombuffer(bytes(self._small), np.uint8)
            self._seek(self._begin)
            self._file.write([(address_of(small), small.size)])
            self._begin += small.size
            self._small = bytearray()

    def _seek(self, position: int) -> None:
        if not self._file.in_order:
            self._file.seek(position)


class Spool:
    """A safetensors file with its tensors in order of arrival, and its header written last."""

    def __init__(self, file: AtomicFile) -> None:
        self.file = file
        self.nbytes = 0  # of all tensors
        self.names: list[str] = []
        self._numbers = bytearray()
        self._shapes: list[Sequence[int]] = []
        self._begins: list[int] = []
        self._aligned = True
        self._bytes = TensorBytes(file)

    def add(self, name: str, source: TensorToWrite) -> None:
        """Append a tensor."""
        self._bytes.put(_BEGIN + self.nbytes, source)
        self.names.append(name)
        self._numbers.append(source.row.number)
        self._shapes.append(source.shape)
        self._begins.append(self.nbytes)
        self._aligned &= self.nbytes % dtypes.array_dtype(source.row.number).alignment == 0
        self.nbytes += source.nbytes

    def complete(self, metadata: Mapping[str, str] | None) -> None:
        """Write the header. The tensors move if it does not fit before them, or if some are not aligned."""
        self._bytes.flush()
        keeps_order = self._aligned and self.nbytes > _SMALL
        header = Header(self.names, bytes(self._numbers), self._shapes, metadata, keeps_order=keeps_order)
        if keeps_order and header.nbytes + ROOM <= _BEGIN:
            header.pad_to(_BEGIN)
            self.file.seek(0)
            self.file.write([(header.address, header.nbytes)])
            self.file.truncate(header.nbytes + self.nbytes)  # a tensor that failed may have been the last
        else:
            header.pad_to(header.nbytes + ROOM)
            self._move(header)

    def _move(self, header: Header) -> None:
        """Copy the tensors behind a header into another file, in the header's order."""
        file = AtomicFile(self.file.path, header.nbytes + self.nbytes, durable=False)
        try:
            file.write([(header.address, header.nbytes)])
            sizes = header.sizes.tolist()
            ranges: list[list[int]] = []  # begin and size of neighbours
            for index in header.order.tolist():
                begin = self._begins[index]
                if ranges and sum(ranges[-1]) == begin:
                    ranges[-1][1] += sizes[index]
                else:
                    ranges.append([begin, sizes[index]])
            for begin, size in ranges:
                file.copy(self.file.descriptor, _BEGIN + begin, size)
            self.file.exchange(file)
        finally:
            file.abandon()


class DeclaredFile:
    """A safetensors file whose names, dtypes and shapes are known before its tensors come."""

    def __init__(
        self, tensors: Mapping[str, tuple[dtypes.Dtype, Sequence[int]]], metadata: Mapping[str, str] | None
    ) -> None:
        self._tensors = tensors
        self._metadata = metadata
        self._missing = dict.fromkeys(tensors)

    def begin(self, in_order: bool) -> int:
        """Lay out the file and return its size; ``in_order`` if tensors come as declared and the file cannot seek."""
        rows, shapes = zip(*self._tensors.values(), strict=True) if self._tensors else ((), ())
        numbers = bytes(row.number for row in rows)
        self._header = Header([*self._tensors], numbers, shapes, self._metadata, keeps_order=in_order, room=ROOM)
        sizes, order = self._header.sizes, self._header.order
        begins = np.zeros(len(order), np.int64)
        ends = self._header.nbytes + np.cumsum(sizes[order], dtype=np.int64)
        begins[order] = ends - sizes[order].astype(np.int64)
        self._begins = dict(zip(self._tensors, begins.tolist(), strict=True))
        return int(self._header.nbytes + sizes.sum())

    def open(self, file: AtomicFile | ObjectFile) -> None:
        """Write the header."""
        file.write([(self._header.address, self._header.nbytes)])
        self._file, self._bytes = file, TensorBytes(file)

    def check(self, name: str, source: TensorToWrite) -> None:
        """Compare a tensor with its declaration."""
        declared = self._tensors.get(name)
        if declared is None:
            raise ValueError(f"tensor {show(name)} is not in tensors=")
        row, shape = declared
        if (row.number, tuple(shape)) != (source.row.number, tuple(source.shape)):
            raise ValueError(
                f"tensor {show(name)} is {source.row.code} {show(list(source.shape))}, but tensors= has "
                f"{row.code} {show(list(shape))}"
            )

    def add(self, name: str, source: TensorToWrite) -> None:
        """Write a tensor to its place."""
        self.check(name, source)
        if self._file.in_order:
            expected = next(iter(self._missing), None)
            if name != expected:
                text = f"the file cannot seek, so tensors come in the order of tensors=: expected {show(expected)}"
                raise ValueError(f"{text}, got {show(name)}")
        self._bytes.put(self._begins[name], source)
        self.added(name)

    def added(self, name: str) -> None:
        """Remember that a tensor has come."""
        self._missing.pop(name, None)

    def check_complete(self) -> None:
        """Raise ValueError if a declared tensor has not come."""
        if self._missing:
            first = next(iter(self._missing))
            names = f"{show(first)} and {len(self._missing) - 1:,} more" if len(self._missing) > 1 else show(first)
            raise ValueError(f"the file is incomplete: tensors= declares {names}; add every tensor before the end")

    def finish(self) -> None:
        """Check that the file is complete, and write small tensors that wait."""
        self.check_complete()
        self._bytes.flush()
