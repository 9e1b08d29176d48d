"""Tables built in Python, for packed tensors and formats without a parser in C."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from . import dtypes
from .native import lib
from .packing import Packed
from .table import Columns, Entry, Scale, Table, Unknown
from .text import printable


class Listing(NamedTuple):
    """A tensor of a `ListedTable`."""

    name: str
    row: dtypes.Dtype
    shape: tuple[int, ...]  # logical
    begin: int  # first byte in the file
    end: int  # one past the last byte
    strides: tuple[int, ...] | None = None  # bytes between neighbours along each axis; None for C order
    scale: Scale | None = None  # of quantized int8
    packed: Packed | None = None  # codes and scales of a packed tensor; row, begin and end describe its codes
    big_endian: bool = False
    unknown: Unknown | None = None  # the entry cannot be read; row and shape describe its bytes


def unreadable(
    name: str,
    label: str,
    shape: tuple[int, ...],
    reason: str,
    *,
    begin: int = 0,
    end: int = 0,
    is_tensor: bool = True,
    is_missing: bool = False,
) -> Listing:
    """List an unreadable entry; see `Unknown`."""
    row, unknown = dtypes.BY_NUMBER[lib.SL_UNKNOWN], Unknown(printable(label), shape, reason, is_tensor, is_missing)
    return Listing(name, row, (end - begin,), begin, end, unknown=unknown)


class ListedTable(Table):
    """A table built in Python, in the order of the caller; tensors may overlap.

    The caller has validated the tensors: unique names, byte ranges inside the file, shapes and strides inside the
    ranges.
    """

    def __init__(
        self,
        tensors: Iterable[Listing],
        metadata: Mapping[str, Any] | None = None,
        *,
        big_endian: bool = False,
        named_globals: Mapping[str, bool] | None = None,
    ) -> None:
        self._names, self._shapes, self._rows = [], [], []
        self._index = None
        # Numbers go into compact arrays, rare properties into dicts, because a file can have a tensor every 14 bytes.
        self._begins, self._ends = array("Q"), array("Q")
        self._strides: dict[int, tuple[int, ...]] = {}
        self._scales: dict[int, Scale] = {}
        self._packed: dict[int, Packed] = {}
        swapped: set[int] = set()
        unknowns: dict[str, Unknown] = {}
        for index, (name, row, shape, begin, end, strides, scale, packed, big, unknown) in enumerate(tensors):
            self._names.append(name)
            self._rows.append(row)
            self._shapes.append(shape)
            self._begins.append(begin)
            self._ends.append(end)
            if strides is not None:
                self._strides[index] = strides
            if scale is not None:
                self._scales[index] = scale
            if packed is not None:
                self._packed[index] = packed
            if big:
                swapped.add(index)
            if unknown is not None:
                unknowns[name] = unknown
        self.unknown = unknowns
        self.count = len(self._names)
        self._big_endian: Collection[int] = range(self.count) if big_endian else swapped
        self.quantized = bool(self._scales or self._packed) or any(row.blocked for row in self._rows)
        self._metadata = metadata
        self.named_globals = named_globals or {}
        self._groups = _overlapping(self._begins, self._ends)
        self.shaped = bool(self._big_endian) or bool(self._groups) or bool(self._strides)

    def find(self, name: str) -> int:
        if self._index is None:
            self._index = {known: index for index, known in enumerate(self.names)}
        return self._index.get(name, -1)

    def sorted_names(self) -> list[str]:
        return sorted(self.names)

    @property
    def numbers(self) -> bytes:
        return bytes([row.number for row in self.rows])

    def row(self, index: int) -> dtypes.Dtype:
        return self.rows[index]

    def entry(self, index: int) -> Entry:
        return self.rows[index].number, self.shapes[index], self._begins[index], self._ends[index]

    def begins(self) -> list[int]:
        return self._begins.tolist()

    def byte_range(self, index: int) -> tuple[int, int]:
        """Return the bytes of a tensor: [begin, end), including other tensors' bytes between its elements."""
        return self._begins[index], self._ends[index]

    def byte_ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._begins, self._ends, strict=True))

    def _columns_between(self, begin: int, end: int) -> Columns:
        between = slice(begin, end)
        return Columns(self.numbers[between], self.shapes[between], self._begins[between], self._ends[between])

    def sizes(self) -> list[int]:
        """Return the size of each tensor's elements in bytes, without gaps; a repeated element counts each time."""
        sizes = [row.nbytes(prod(shape)) for shape, row in zip(self.shapes, self.rows, strict=True)]
        for index, packed in self._packed.items():
            sizes[index] = packed.nbytes
        return sizes

    @property
    def nbytes(self) -> int:
        return sum(self.sizes())

    def strides(self, index: int) -> tuple[int, ...] | None:
        return self._strides.get(index)

    def big_endian(self, index: int) -> bool:
        return index in self._big_endian

    def together(self, index: int) -> list[int]:
        return self._groups.get(index, [index])

    def scale(self, index: int) -> Scale | None:
        return self._scales.get(index)

    @property
    def scaled(self) -> bool:
        return bool(self._scales or self._packed)

    def packed(self, index: int) -> Packed | None:
        return self._packed.get(index)

    def metadata(self) -> Mapping[str, Any] | None:
        """Return all other content of the file, or None."""
        return self._metadata

    def replace_rows(self, old: dtypes.Dtype, new: dtypes.Dtype) -> None:
        """Replace a dtype by another of the same size."""
        self._rows = [new if row is old else row for row in self.rows]

    def add_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add content that lies beside the tensors, which wins over content of the same key."""
        self._metadata = {**(self._metadata or {}), **metadata}


def _overlapping(begins: Sequence[int], ends: Sequence[int]) -> dict[int, list[int]]:
    """Return, for each overlapping range, the sorted indices of its connected group."""
    if all(end <= begin for end, begin in zip(ends, islice(begins, 1, None), strict=False)):
        return {}
    ranges = list(zip(begins, ends, strict=True))
    groups: dict[int, list[int]] = {}
    group: list[int] = []
    reach = -1
    for index in sorted((k for k, (begin, end) in enumerate(ranges) if begin < end), key=ranges.__getitem__):
        begin, end = ranges[index]
        if begin < reach:
            group.append(index)
            groups.update(dict.fromkeys(group[-2:] if len(group) == 2 else group[-1:], group))
        else:
            group = [index]
        reach = max(reach, end)
    for members in {id(members): members for members in groups.values()}.values():
        members.sort()
    return groups
