"""Decides how each tensor of a file becomes an array: view, read, converted or copied.

Tensors are handled as columns (dtypes, shapes, byte ranges), not as one object each: a file may have 100,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import and_, eq
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import ArraySpec, foreign_order
from ..base.native import lib
from ..base.text import show
from ..errors import UnsupportedError
from .weight_file import WeightFile

# How a tensor becomes an array.
EMPTY = 0  # it has no bytes
VIEW = 1  # a view of the mapped file
READ = 2  # its bytes are read unchanged
CONVERT = 3  # its values are converted while they are read, blocks dequantized
DEQUANTIZE = 4  # its int8 values are multiplied by their scales while they are read
STRIDED = 5  # non-contiguous, big-endian or sharing bytes with others: see strided.py

# Dtypes whose arrays show bytes, not elements.
_IN_BYTES = frozenset(number for number, row in dtypes.BY_NUMBER.items() if row.bits < 8)


class Selection(NamedTuple):
    """Tensors of one file to deliver.

    Attributes:
        file: the file that holds them.
        names: their names.
        indices: their indices in the file's table.
    """

    file: WeightFile
    names: Sequence[str]
    indices: Sequence[int]


class Plan(NamedTuple):
    """How the tensors of a `Selection` reach their arrays, as columns.

    Attributes:
        file: the file that holds them.
        names: their names.
        indices: their indices in the file's table.
        sources: numbers of their dtypes in the file.
        targets: numbers of the dtypes of their arrays.
        shapes: shapes of their arrays.
        begins: first byte of each.
        ends: one past the last byte of each.
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
        """Dtype of the k-th tensor's array."""
        return dtypes.array_dtype(self.targets[k])

    def spec(self, k: int) -> ArraySpec:
        """The `ArraySpec` of the k-th tensor."""
        table = self.file.table
        place = self.begins[k], self.ends[k], self.sources[k], self.targets[k]
        strides, big_endian = (table.strides(self.indices[k]), table.big_endian) if table.shaped else (None, False)
        return ArraySpec(self.dtype(k), self.shapes[k], *place, strides, big_endian)

    def of_way(self, way: int) -> Sequence[int]:
        """Positions in the plan of the tensors with this way."""
        found = self.ways.count(way)
        if found == len(self.ways):
            return range(found)
        return [k for k, other in enumerate(self.ways) if other == way] if found else ()


def decide(selection: Selection, target: dtypes.Dtype | None, view: bool) -> Plan:
    """Decides how each tensor becomes an array.

    Raises:
        UnsupportedError: an unsupported conversion.
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
        masks = bytearray(256)  # by dtype: bits that must be zero in an aligned address
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
    """Targets and ways when floating and quantized tensors are converted; the others get the way ``plain``."""
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
