"""Describes the tensors that a read delivers, each on its own: where they are, and what their arrays will be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.packing import Packed
from .delivery import without_packed
from .load import Part, selections_of
from .plan import DEQUANTIZE, STRIDED, Selection, decide
from .read import packed_of
from .weight_file import WeightFile


class Entry(NamedTuple):
    """A tensor to read.

    Attributes:
        name: of the tensor.
        file: the file that holds it.
        at: its index in the file's table.
        begin: its first byte, or that of its codes.
        end: one past its last byte.
        shape: of its array.
        source: number of its dtype in the file.
        target: number of the dtype of its array; None for packed codes that stay as they are stored.
        packed: codes and scales that its values are restored from; None for any other tensor.
        strided: whether it is non-contiguous or big-endian in the file.
    """

    name: str
    file: WeightFile
    at: int
    begin: int
    end: int
    shape: tuple[int, ...]
    source: int
    target: int | None
    packed: Packed | None = None
    strided: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of its array, of a tensor that has one."""
        assert self.target is not None
        return dtypes.array_dtype(self.target)

    @property
    def nbytes(self) -> int:
        """Bytes of its array, or of its parts."""
        if self.target is None:
            assert self.packed is not None
            return self.packed.nbytes
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def repeated(self) -> bool:
        """Whether some of its elements are the same bytes of the file, and it is not converted."""
        return self.strided and self.source == self.target and self.nbytes > self.end - self.begin


def in_file_order(entries: Iterable[Entry], files: Iterable[WeightFile]) -> list[Entry]:
    """Tensors in the order of their bytes, file after file; files may be listed more than once."""
    rank = {file: k for k, file in enumerate(dict.fromkeys(files))}
    return sorted(entries, key=lambda entry: (rank[entry.file], entry.begin))


def entries_of(parts: Sequence[Part], target: dtypes.Dtype | None) -> list[Entry]:
    """Describes tensors, in their order.

    Args:
        parts: the tensors.
        target: dtype that floating tensors are converted to and quantized ones dequantized to; None to convert nothing.

    Raises:
        UnsupportedError: an unsupported conversion.
    """
    found: dict[str, Entry] = {}
    selections = selections_of(parts)
    for selection in selections:
        file = selection.file
        plain: list[Selection] = [selection]
        packed: dict[str, Packed] = {}
        if file.table.quantized:
            plain, packed = without_packed(plain)
        for plan in (decide(one, target, False) for one in plain):
            columns = zip(
                *(plan.names, plan.indices, plan.begins, plan.ends, plan.shapes),
                *(plan.sources, plan.targets, plan.ways),
                strict=True,
            )
            for name, index, begin, end, shape, source, to, way in columns:
                found[name] = Entry(
                    name,
                    file,
                    index,
                    begin,
                    end,
                    shape,
                    source,
                    to,
                    packed_of(file, index) if way == DEQUANTIZE else None,
                    way == STRIDED and (file.table.strides(index) is not None or file.table.big_endian),
                )
        indices = dict(zip(selection.names, selection.indices, strict=True)) if packed else {}
        for name, one in packed.items():
            index = indices[name]
            place = *file.table.byte_range(index), one.packing.shape, file.table.row(index).number
            found[name] = Entry(name, file, index, *place, None if target is None else target.number, one)
    if len(selections) == 1:
        return [found[name] for name in selections[0].names]
    return [found[name] for name, _, _ in parts]
