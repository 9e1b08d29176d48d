"""Tensors that are made when a writer comes to them, so that a file of any size is written with the memory of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..base.arrays import Array


class Lazy:
    """An array to be.

    Args:
        dtype: of the array.
        shape: of the array.
        make: makes it, C-contiguous; what it returned before may be overwritten then.
    """

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...], make: Callable[[], Array]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.make = make

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class LazyQuantized:
    """A `QuantizedTensor` to be: its attributes, but that data and scale are `Lazy`."""

    def __init__(
        self, scheme: str, shape: tuple[int, ...], data: Lazy, scale: Lazy | None = None, axis: int | None = None
    ) -> None:
        self.scheme = scheme
        self.shape = shape
        self.data = data
        self.scale = scale
        self.axis = axis

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


def materialize(value: Array | Lazy) -> Array:
    """The array, made now if it is to be."""
    return value.make() if isinstance(value, Lazy) else value
