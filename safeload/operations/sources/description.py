"""What is known of a tensor before it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import as_array, not_an_array
from ...base.scheme import row_of
from ...base.text import show
from ...engine.codes.quantized_tensor import QuantizedTensor


class TensorDescription(NamedTuple):
    """Description of a tensor, available before it is read.

    Attributes:
        name: name of the tensor.
        dtype: dtype as in messages: "bfloat16", "q4_0".
        shape: logical shape.
        nbytes: stored bytes, including the scales of int8.
        element: row of the dtype table; None for an array of a dtype that weights do not have.
        floating: whether its elements are real floating-point numbers.
        scheme: scheme of a quantized tensor, else None.
        axis: axis of int8 with per-axis scales, else None.
        packed: whether it is packed as published checkpoints store it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    element: dtypes.Dtype | None
    floating: bool
    scheme: str | None = None
    axis: int | None = None
    packed: bool = False

    @property
    def quantized(self) -> bool:
        """Whether it is int8 with scales, or in blocks."""
        return self.scheme is not None

    @property
    def row(self) -> dtypes.Dtype:
        """Its row of the dtype table.

        Raises:
            SafeloadError: it has a dtype that weights do not have.
        """
        if self.element is None:
            raise dtypes.not_stored(self.dtype, self.name)
        return self.element


def stored_as(value: Any) -> tuple[dtypes.Dtype | None, tuple[int, ...]]:
    """Dtype and shape of a value of a dict; a scale may also be a number. No dtype if it is not an array of weights."""
    if isinstance(value, QuantizedTensor):
        return None, ()
    try:
        array = np.asarray(value)
    except Exception:  # its own __array__ may raise anything: reading the tensor reports it
        return None, ()
    return dtypes.BY_NAME.get(array.dtype.name), array.shape


def about_value(name: str, value: Any) -> TensorDescription:
    """Describes a tensor in memory.

    Raises:
        TypeError: a dict.
    """
    if isinstance(value, Mapping):
        raise not_an_array(f"tensor {show(name)}", value)
    if isinstance(value, QuantizedTensor):
        if value.packing is not None:
            row = dtypes.BY_NAME[value.data.dtype.name]
            return TensorDescription(
                name, value.scheme, value.shape, value.nbytes, row, False, value.scheme, None, True
            )
        row = row_of(value.scheme)
        return TensorDescription(name, value.scheme, value.shape, value.nbytes, row, False, value.scheme, value.axis)
    array = as_array(value, name)
    found = dtypes.BY_NAME.get(array.dtype.name)
    # Packed elements take a byte each in memory, unlike in any file.
    element = None if found is None or found.packed else found
    floating = found is not None and found.floating
    return TensorDescription(name, dtypes.shown(array.dtype), array.shape, array.nbytes, element, floating)
