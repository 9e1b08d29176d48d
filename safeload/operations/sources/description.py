"""Descriptions of tensors, available before they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import as_array, not_an_array
from ...base.scheme import INT8, row_of
from ...base.text import tensor_named
from ...engine.codes.quantized_tensor import QuantizedTensor


class TensorDescription(NamedTuple):
    """Name, dtype and shape of a tensor, and how it is stored."""

    name: str
    dtype: str  # as in messages: "bfloat16", "q4_0"
    shape: tuple[int, ...]  # logical
    nbytes: int  # stored bytes, int8 scales included
    element: dtypes.Dtype | None  # None if weight files do not support the dtype
    floating: bool  # whether the elements are real floating-point numbers
    scheme: str | None = None  # of a quantized tensor
    axis: int | None = None  # of int8 with per-axis scales
    packed: bool = False  # whether it is packed as in published checkpoints

    @property
    def quantized(self) -> bool:
        """True for int8 with scales, and for blocks."""
        return self.scheme is not None

    @property
    def code(self) -> str:
        """The dtype as in `TensorInfo`: "BF16", "Q4_0", "int8"."""
        named = self.element is None or self.packed or self.scheme == INT8
        return self.dtype if self.element is None or named else self.element.code

    @property
    def row(self) -> dtypes.Dtype:
        """The row of the dtype table."""
        if self.element is None:
            raise dtypes.not_stored(self.dtype, self.name)
        return self.element


def stored_as(value: Any) -> tuple[dtypes.Dtype | None, tuple[int, ...]]:
    """Return dtype and shape of a dict's value; the dtype is None if the value is not an array of weights."""
    if isinstance(value, QuantizedTensor):
        return None, ()
    try:
        array = np.asarray(value)  # a scale may be a number
    except Exception:  # a foreign __array__ can raise anything; reading the tensor reports it
        return None, ()
    return dtypes.row_of(array.dtype), array.shape


def about_value(name: str, value: Any) -> TensorDescription:
    """Describe a tensor in memory."""
    if isinstance(value, Mapping):
        raise not_an_array(tensor_named(name), value)
    if isinstance(value, QuantizedTensor):
        if value.packing is not None:
            row = dtypes.BY_NAME[value.data.dtype.name]
            return TensorDescription(
                name, value.scheme, value.shape, value.nbytes, row, False, value.scheme, None, True
            )
        row = row_of(value.scheme)
        return TensorDescription(name, value.scheme, value.shape, value.nbytes, row, False, value.scheme, value.axis)
    array = as_array(value, name)
    stored = dtypes.row_of(array.dtype)
    # Packed elements take one byte each in memory, unlike in files.
    element = None if stored is None or stored.packed else stored
    floating = stored is not None and stored.floating
    return TensorDescription(name, dtypes.shown(array.dtype), array.shape, array.nbytes, element, floating)
