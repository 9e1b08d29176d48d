"""Tensors that are created when a writer reaches them, so that writing a file takes the memory of one at most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...base.arrays import Array
from ...base.packing import Packing

if TYPE_CHECKING:
    from .plan import Entry


class Staged(NamedTuple):
    """A tensor of a file whose bytes are those of a `Lazy`: writers read many of them ahead, in chunks.

    Attributes:
        entry: the tensor.
        threads: for reading; None: chosen automatically.
        written: called when its bytes have been handed over; None for nothing to do.
    """

    entry: Entry
    threads: int | None
    written: Callable[[], object] | None = None


class Lazy:
    """An array that is created later.

    Args:
        dtype: of the array.
        shape: of the array.
        make: creates it, C-contiguous; a call may overwrite the array that it returned before.
        staged: how a writer gets its bytes without `make`; None if only `make` knows.
    """

    def __init__(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], make: Callable[[], Array], staged: Staged | None = None
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.make = make
        self.staged = staged

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class LazyQuantized:
    """A `QuantizedTensor` that is created later: the same attributes, with data and scale as `Lazy`."""

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


class LazyPacked:
    """A packed `QuantizedTensor` that is written as it is stored.

    Args:
        packing: what its codes mean.
        names: names of its parts by role.
        parts: the parts by role.
    """

    def __init__(self, packing: Packing, names: Mapping[str, str], parts: Mapping[str, Lazy]) -> None:
        self.packing = packing
        self.names = names
        self.roles = parts
        self.scheme = packing.label
        self.shape = packing.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.roles.values())


def materialize(value: Array | Lazy) -> Array:
    """The array, created now if it is `Lazy`."""
    return value.make() if isinstance(value, Lazy) else value
