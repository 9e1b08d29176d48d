"""Files under construction whose tensors come one at a time: in order of arrival, or in declared places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.native import ffi
from ...engine.run.atomic_file import AtomicFile
from ...engine.run.memory import address_of
from ...formats.safetensors.file import ROOM, Header, TensorToWrite

# First byte of the tensors in a file with an unknown number of them.
_BEGIN = 128 << 10
# Files with at most this many bytes of tensors are written again with a header of the right size.
_SMALL = 16 << 20
# Small tensors are written together, in about this many bytes.
_TOGETHER = 1 << 20


def declared_header(
    tensors: Mapping[str, tuple[dtypes.Dtype, Sequence[int]]], metadata: Mapping[str, str] | None, *, keeps_order: bool
) -> tuple[Header, int]:
    """Return the header of declared tensors, and the size of the file."""
    rows, shapes = zip(*tensors.values(), strict=True) if tensors else ((), ())
    numbers = bytes(row.number for row in rows)
    header = Header([*tensors], numbers, shapes, metadata, keeps_order=keeps_order, room=ROOM)
    return header, int(header.nbytes + header.sizes.sum())


class Spool:
    """A safetensors file with its tensors in order of arrival and its header written last, unless it is declared."""

    def __init__(
        self,
        file: Any,  # an `AtomicFile`, or an `ObjectFile` for a declared header
        header: Header | None = None,  # of all tensors; None if they are unknown
        names: Sequence[str] = (),  # of the tensors of ``header``
    ) -> None:
        self.file = file
        self.nbytes = 0  # of all tensors
        self.names: list[str] = []
        self._numbers = bytearray()
        self._shapes: list[Sequence[int]] = []
        self._begins: list[int] = []
        self._aligned = True
        self._small, self._small_begin = bytearray(), 0  # small neighbours that wait, and their position
        self._places: dict[str, int] | None = None
        if header is not None:
            file.write([(header.address, header.nbytes)])
            sizes, order = header.sizes, header.order
            places = np.zeros(len(order), np.int64)
            places[order] = header.nbytes + np.cumsum(sizes[order], dtype=np.int64) - sizes[order].astype(np.int64)
            self._places = dict(zip(names, places.tolist(), strict=True))

    def add(self, name: str, source: TensorToWrite) -> None:
        """Write a tensor, now or with a later call. After an error, the next tensor can take its place."""
        self._write(_BEGIN + self.nbytes if self._places is None else self._places[name], source)
        self.names.append(name)
        self._numbers.append(source.row.number)
        self._shapes.append(source.shape)
        self._begins.append(self.nbytes)
        self._aligned &= self.nbytes % dtypes.array_dtype(source.row.number).alignment == 0
        self.nbytes += source.nbytes

    def _write(self, position: int, source: TensorToWrite) -> None:
        if source.small:
            if position != self._small_begin + len(self._small):
                self._flush()
                self._small_begin = position
            for _owner, address, size in source.pieces():
                self._small += ffi.buffer(ffi.cast("char *", address), size)
            if len(self._small) >= _TOGETHER:
                self._flush()
            return
        self._flush()
        self._seek(position)
        waiting: list[tuple[int, int]] = []
        owners: list[Any] = []
        for owner, address, size in source.pieces():
            waiting.append((address, size))
            owners.append(owner)
            if not source.whole:
                self.file.write(waiting)
                waiting, owners = [], []
        self.file.write(waiting)
        self._small_begin = position + source.nbytes

    def _flush(self) -> None:
        """Write the small tensors."""
        if self._small:
            small = np.frombuffer(bytes(self._small), np.uint8)
            self._seek(self._small_begin)
            self.file.write([(address_of(small), small.size)])
            self._small_begin += small.size
            self._small = bytearray()

    def _seek(self, position: int) -> None:
        if not self.file.in_order:
            self.file.seek(position)

    def complete(self, metadata: Mapping[str, str] | None) -> None:
        """Write the header. The tensors move if it does not fit before them, or if some are not aligned."""
        self._flush()
        if self._places is not None:
            return
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
