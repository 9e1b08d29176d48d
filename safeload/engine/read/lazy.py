"""Tensors that are created when a writer reaches them, so that writing a file needs the memory of a single tensor."""

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
    """A file tensor with the bytes of a `Lazy`: writers read many of these ahead, in chunks."""

    entry: Entry
    threads: int | None  # for reading
    written: Callable[[], object] | None = None  # called when the writer has received the bytes


class Lazy:
    """An array that is created later.

    Args:
        make: creates the array, C-contiguous; a call may overwrite the array of the previous call.
        staged: reads the bytes without `make`; None if only `make` can.
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
    """A `QuantizedTensor` that is created later: data and scale are `Lazy`."""

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
    """A packed `QuantizedTensor` that is written unchanged.

    Args:
        names: names of the parts by role.
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


class LazyEncoded:
    """A weight in the format of another engine, whose ``config.json`` describes it.

    Args:
        scheme: name of the format.
        parts: by the ends of their names, after the name of the module.
    """

    def __init__(self, scheme: str, shape: tuple[int, ...], parts: Mapping[str, Lazy]) -> None:
        self.scheme = scheme
        self.shape = shape
        self.parts = parts

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())


def materialize(value: Array | Lazy) -> Array:
    """Return the array, creating it if it is `Lazy`."""
    return value.make() if isinstance(value, Lazy) else value
