"""Tensors wherever they are: in a checkpoint of any format, or in a dict of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..base import dtypes
from ..base.file import Array, WeightFile
from ..checkpoint import Checkpoint
from ..engine.quantized_tensor import QuantizedTensor
from ..engine.source import Source, of_array
from ..packed import grouping
from ..packed.grouping import Codes


def tensors(given: Checkpoint | Mapping[str, Any]) -> dict[str, Source | QuantizedTensor]:
    """Each tensor as a source, or as what it is if it is quantized already."""
    if isinstance(given, Checkpoint):
        return {name: of_file(given, name, file, index) for name, file, index in given.entries()}
    return {name: v if isinstance(v, QuantizedTensor) else of_array(name, v) for name, v in given.items()}


def codes_of(given: Checkpoint | Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Mapping[str, Codes]:
    """The tensors that hold codes, whose values mean nothing without their scale.

    Args:
        given: a checkpoint, which knows its own configuration, or a dict of arrays.
        config: parsed ``config.json`` of a dict; None without one.
    """
    if isinstance(given, Checkpoint):
        return given.codes()
    stored = {}
    for name, value in given.items():
        row = dtypes.BY_NAME.get(value.dtype.name) if isinstance(value, np.ndarray) else None
        if row is not None:
            stored[name] = grouping.Stored(row, value.shape)
    return grouping.find(stored, config)


def refuse_codes(given: Checkpoint | Mapping[str, Any], names: Iterable[str], what: str) -> None:
    """Refuses what takes codes for numbers.

    Args:
        given: all tensors there are: the scale of one may be any of them.
        names: those that are asked for.
        what: the operation, as messages name it.

    Raises:
        UnsupportedError: one of them holds codes; the message names tensor, scale and quant_method.
    """
    grouping.refuse(codes_of(given), names, what, given.path if isinstance(given, Checkpoint) else "")


def of_file(opened: Checkpoint, name: str, file: WeightFile, index: int) -> Source | QuantizedTensor:
    """A tensor of a checkpoint; what is quantized, or not in C order in its file, is read now."""
    table = file.table
    if table.row(index).blocked or table.scale(index) is not None:
        value = opened.load([name], backend="pread")[name]
        assert isinstance(value, QuantizedTensor)
        return value
    stored = in_place(opened, name, file, index)
    if stored is None:  # in memory, in C order; rare
        array: Array = np.ascontiguousarray(opened.load([name], backend="pread")[name])
        return of_array(name, array)
    return stored


def in_place(opened: Checkpoint, name: str, file: WeightFile, index: int) -> Source | None:
    """A tensor's bytes where they are in its file; None where they are not in C order and little-endian."""
    layout = file.layout(index)
    if layout.strides is not None or layout.big_endian:
        return None
    table = file.table
    return Source(name, table.shape(index), table.row(index), layout.begin, file, opened)
