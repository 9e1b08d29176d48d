"""Decide how each tensor of a file becomes an array: as a view, read, converted, restored or copied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import and_, eq
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import ArraySpec, foreign_order
from ...base.packing import Packed
from ...base.text import tensor_named
from ...errors import UnsupportedError
from ..run.weight_file import WeightFile
from .tensors import FileTensor, Tensors, packed_of

# How a tensor becomes an array.
EMPTY = 0  # no bytes
VIEW = 1  # view of the mapped file
READ = 2  # bytes are read unchanged
CONVERT = 3  # values are converted while they are read, and blocks dequantized
DEQUANTIZE = 4  # int8 values are multiplied by their scales while they are read
STRIDED = 5  # non-contiguous, big-endian or sharing bytes: see `batch.Block`

# Dtypes with arrays of bytes, not of elements.
_IN_BYTES = frozenset(number for number, row in dtypes.BY_NUMBER.items() if row.bits < 8)


class ReadPlan(NamedTuple):
    """How tensors of one file become arrays."""

    # The columns of the tensors are fields, because each is read several times while a small file loads.
    tensors: Tensors
    file: WeightFile
    names: Sequence[str]
    sources: bytes  # numbers of the dtypes in the file
    begins: Sequence[int]  # first bytes in the file
    ends: Sequence[int]  # one past the last bytes
    targets: bytes  # numbers of the dtypes of the arrays
    shapes: Sequence[tuple[int, ...]]  # of the arrays
    ways: bytearray  # `VIEW` and the like

    def dtype(self, k: int) -> np.dtype[Any]:
        """Return the dtype of the k-th array."""
        return dtypes.array_dtype(self.targets[k])

    def spec(self, k: int) -> ArraySpec:
        """Return the `ArraySpec` of the k-th tensor."""
        table = self.file.table
        place = self.begins[k], self.ends[k], self.sources[k], self.targets[k]
        index = self.tensors.indices[k]
        return ArraySpec(self.dtype(k), self.shapes[k], *place, table.strides(index), table.big_endian(index))

    def of_way(self, way: int) -> Sequence[int]:
        """Return the positions of the tensors with this way."""
        count = self.ways.count(way)
        if count == len(self.ways):
            return range(count)
        return [k for k, tensor_way in enumerate(self.ways) if tensor_way == way] if count else ()


def viewable(dtype: np.dtype[Any], begin: int) -> bool:
    """Return True if little-endian bytes at this position of a file can be shown as an array."""
    return begin % dtype.alignment == 0 and not (foreign_order(False) and dtype.itemsize > 1)


def decide(tensors: Tensors, target: dtypes.Dtype | None, view: bool) -> ReadPlan:
    """Decide how each tensor of one file becomes an array."""
    file = tensors.files[0]
    table = file.table
    if table.unknown:
        table.refuse_unknown(tensors.indices, file.path)
    sources, shapes, begins, ends = tensors.columns
    present = set(sources)
    plain = VIEW if view else READ
    targets, ways = sources, bytearray((plain,)) * len(sources)
    if target is not None:
        targets, ways = _convert(tensors, target, plain)
    if not _IN_BYTES.isdisjoint(present):
        shapes = [
            dtypes.array_shape(dtypes.BY_NUMBER[source], shape, end - begin) if source == to else shape
            for source, to, shape, begin, end in zip(sources, targets, shapes, begins, ends, strict=True)
        ]
    if view:
        masks = bytearray(256)  # by dtype: bits to be zero in an aligned address
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
        for k, (way, index) in enumerate(zip(ways, tensors.indices, strict=True)):
            foreign = way == VIEW and foreign_order(table.big_endian(index))
            if way in (READ, CONVERT) or (foreign and dtypes.array_dtype(sources[k]).itemsize > 1):
                ways[k] = STRIDED
    if any(map(eq, begins, ends)):
        for k, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if begin == end:
                ways[k] = EMPTY
    return ReadPlan(tensors, file, tensors.names, sources, begins, ends, targets, shapes, ways)


def _convert(tensors: Tensors, target: dtypes.Dtype, plain: int) -> tuple[bytes, bytearray]:
    """Return targets and ways if floating and quantized tensors are converted; unconverted tensors get ``plain``."""
    file, sources = tensors.files[0], tensors.columns.numbers
    become, way = bytearray(range(256)), bytearray(256)
    refused = []
    for number in set(sources):
        row = dtypes.BY_NUMBER[number]
        array_row = row.loaded_as(target)
        become[number], way[number] = array_row.number, plain if array_row is row else CONVERT
        if not row.converts_to(array_row):
            refused.append(sources.index(number))
    targets = bytearray(sources.translate(become))
    ways = bytearray(sources.translate(way))
    if file.table.quantized:
        for k, index in enumerate(tensors.indices):
            if file.table.scale(index) is not None:
                targets[k], ways[k] = target.number, DEQUANTIZE
                if not dtypes.BY_NUMBER[sources[k]].converts_to(target):
                    refused.append(k)
    if refused:
        k = min(refused)
        row = dtypes.BY_NUMBER[sources[k]]
        text = f"{tensor_named(tensors.names[k])}: cannot convert {row.code} to {target.code}"
        raise UnsupportedError(text, path=file.path, tensor=tensors.names[k])
    return bytes(targets), ways


class Entry(NamedTuple):
    """A tensor to read."""

    name: str
    file: WeightFile
    at: int  # index in the table of the file
    begin: int  # first byte in the file, or of the codes of a packed tensor
    end: int  # one past the last byte
    shape: tuple[int, ...]  # of the array
    source: int  # number of the dtype in the file
    target: int | None  # dtype number of the array; None for packed codes that are not restored
    packed: Packed | None = None  # codes and scales of the values
    strided: bool = False  # non-contiguous or big-endian in the file

    @property
    def tensor(self) -> FileTensor:
        """Name, file and index."""
        return self[:3]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array, if the tensor becomes a single array."""
        assert self.target is not None
        return dtypes.array_dtype(self.target)

    @property
    def nbytes(self) -> int:
        """Bytes of the array, or of the packed parts."""
        if self.target is None:
            assert self.packed is not None
            return self.packed.nbytes
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def repeated(self) -> bool:
        """True if elements share bytes of the file, and are not converted."""
        return self.strided and self.source == self.target and self.nbytes > self.end - self.begin


def in_file_order(entries: Iterable[Entry], files: Iterable[WeightFile]) -> list[Entry]:
    """Sort tensors by their bytes, file after file; files may be listed more than once."""
    rank = {file: k for k, file in enumerate(dict.fromkeys(files))}
    return sorted(entries, key=lambda entry: (rank[entry.file], entry.begin))


def entries_of(tensors: Iterable[FileTensor], target: dtypes.Dtype | None) -> list[Entry]:
    """Describe tensors one by one, in their order."""
    tensors = Tensors.of(tensors)
    entries: dict[str, Entry] = {}
    for file_tensors in tensors.by_file():
        file, table = file_tensors.files[0], file_tensors.files[0].table
        plain, packed = file_tensors.without_packed()
        plan = decide(plain, target, False)
        columns = zip(
            *(plan.names, plain.indices, plan.begins, plan.ends, plan.shapes),
            *(plan.sources, plan.targets, plan.ways),
            strict=True,
        )
        for name, index, begin, end, shape, source, to, way in columns:
            codes = packed_of(file, index) if way == DEQUANTIZE else None
            strided = way == STRIDED and (table.strides(index) is not None or table.big_endian(index))
            entries[name] = Entry(name, file, index, begin, end, shape, source, to, codes, strided)
        indices = dict(zip(file_tensors.names, file_tensors.indices, strict=True)) if packed else {}
        for name, tensor in packed.items():
            index = indices[name]
            place = *table.byte_range(index), tensor.packing.shape, table.row(index).number
            entries[name] = Entry(name, file, index, *place, None if target is None else target.number, tensor)
    return [entries[name] for name in tensors.names]
