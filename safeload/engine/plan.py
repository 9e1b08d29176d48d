"""Which way each tensor of a file takes to its array.

Tensors are handled as columns (dtypes, shapes, byte ranges), not as an object each: a file may have 100,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import and_, eq
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import ArraySpec, foreign_order
from ..base.file import WeightFile
from ..base.native import lib
from ..base.text import show
from ..errors import UnsupportedError

# Ways of a tensor to its array.
EMPTY = 0  # there is nothing to bring
VIEW = 1  # it shows the mapped file
READ = 2  # its bytes are read
CONVERT = 3  # they are converted on their way, blocks dequantized
DEQUANTIZE = 4  # likewise of int8, which is multiplied by its scales
STRIDED = 5  # its elements are not simply its bytes

# Dtypes whose arrays show bytes, not elements.
_IN_BYTES = frozenset(number for number, row in dtypes.BY_NUMBER.items() if row.bits < 8)


class Selection(NamedTuple):
    """Tensors of one file that are to be delivered.

    Attributes:
        file: where they are.
        names: what they are called.
        indices: of them in the file's table.
    """

    file: WeightFile
    names: Sequence[str]
    indices: Sequence[int]


class Plan(NamedTuple):
    """How the tensors of a `Selection` reach their arrays, as columns.

    Attributes:
        file: where they are.
        names: of the tensors.
        indices: in the file's table.
        sources: numbers of their dtypes in the file.
        targets: numbers of the dtypes that they become.
        shapes: of their arrays.
        begins: first byte of each.
        ends: past the last.
        ways: `VIEW` and the like.
    """

    file: WeightFile
    names: Sequence[str]
    indices: Sequence[int]
    sources: bytes
    targets: bytes
    shapes: Sequence[tuple[int, ...]]
    begins: Sequence[int]
    ends: Sequence[int]
    ways: bytearray

    def dtype(self, k: int) -> np.dtype[Any]:
        """Of the array that the k-th of them becomes."""
        return dtypes.array_dtype(self.targets[k])

    def spec(self, k: int) -> ArraySpec:
        """All of it that is known of one of them."""
        table = self.file.table
        place = self.begins[k], self.ends[k], self.sources[k], self.targets[k]
        strides, big_endian = (table.strides(self.indices[k]), table.big_endian) if table.shaped else (None, False)
        return ArraySpec(self.dtype(k), self.shapes[k], *place, strides, big_endian)

    def of_way(self, way: int) -> Sequence[int]:
        """Those that go this way."""
        found = self.ways.count(way)
        if found == len(self.ways):
            return range(found)
        return [k for k, other in enumerate(self.ways) if other == way] if found else ()


def decide(selection: Selection, target: dtypes.Dtype | None, view: bool) -> Plan:
    """The way of each tensor.

    Raises:
        UnsupportedError: a conversion that there is not.
    """
    file, names, indices = selection
    table = file.table
    sources, shapes, begins, ends = table.columns(indices)
    present = set(sources)
    plain = VIEW if view else READ
    targets, ways = sources, bytearray((plain,)) * len(sources)
    if target is not None:
        targets, ways = _convert(selection, sources, target, plain)
    if not _IN_BYTES.isdisjoint(present):
        shapes = [
            dtypes.array_shape(dtypes.BY_NUMBER[source], shape, end - begin) if source == to else shape
            for source, to, shape, begin, end in zip(sources, targets, shapes, begins, ends, strict=True)
        ]
    if view:
        masks = bytearray(256)  # by dtype: the bits of an address that must be zero
        for number in present:
            masks[number] = dtypes.array_dtype(number).alignment - 1
        unaligned = sources.translate(masks)
        if any(map(and_, begins, unaligned)):
            for k, (begin, mask) in enumerate(zip(begins, unaligned, strict=True)):
                if begin & mask and ways[k] == VIEW:
                    ways[k] = READ
    if view and foreign_order(False) and not table.shaped:
        for k, source in enumerate(sources):
            if ways[k] == VIEW and dtypes.array_dtype(source).itemsize > 1:
                ways[k] = READ
    if table.shaped:
        foreign = foreign_order(table.big_endian)
        for k, way in enumerate(ways):
            if way in (READ, CONVERT) or (way == VIEW and foreign and dtypes.array_dtype(sources[k]).itemsize > 1):
                ways[k] = STRIDED
    if any(map(eq, begins, ends)):
        for k, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if begin == end:
                ways[k] = EMPTY
    return Plan(file, names, indices, sources, targets, shapes, begins, ends, ways)


def _convert(selection: Selection, sources: bytes, target: dtypes.Dtype, plain: int) -> tuple[bytes, bytearray]:
    """Targets and ways where floating and quantized tensors become another dtype, and the others go ``plain``."""
    file, names, indices = selection
    become, way = bytearray(range(256)), bytearray(256)
    refused = []
    for number in set(sources):
        row = dtypes.BY_NUMBER[number]
        way[number] = plain
        if row is not target and (row.floating or row.blocked):
            become[number], way[number] = target.number, CONVERT
            if not lib.sl_convertible(number, target.number):
                refused.append(sources.index(number))
    targets = bytearray(sources.translate(become))
    ways = bytearray(sources.translate(way))
    if file.table.quantized:
        for k, index in enumerate(indices):
            if file.table.scale(index) is not None:
                targets[k], ways[k] = target.number, DEQUANTIZE
                if not lib.sl_convertible(sources[k], target.number):
                    refused.append(k)
    if refused:
        k = min(refused)
        row = dtypes.BY_NUMBER[sources[k]]
        raise UnsupportedError(
            f"tensor {show(names[k])}: there is no conversion from {row.code} to {target.code}",
            path=file.path,
            tensor=names[k],
        )
    return bytes(targets), ways
