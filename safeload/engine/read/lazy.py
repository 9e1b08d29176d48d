"""Tensors that are created when a writer reaches them, so that writing a file needs the memory of a single tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...base.arrays import Array
from ...base.packing import Packing

if TYPE_CHECKING:
    from .tensors import Entry


class Staged(NamedTuple):
    """A file tensor with the bytes of a `Lazy`: writers read many of these ahead, in chunks."""

    entry: Entry
    threads: int | None  # for reading


class Lazy:
    """An array that is created later.

    ``create`` may overwrite the array of its previous call; ``staged`` reads the bytes without it.
    """

    __slots__ = ("_create", "_written", "dtype", "shape", "staged")  # the garbage collector visits no dict

    def __init__(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], create: Callable[[], Array], staged: Staged | None = None
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.staged = staged
        self._create = create
        self._written: Callable[[int], object] | None = None

    def make(self) -> Array:
        """Create the array and report its bytes."""
        array = self._create()
        self.report()
        return array

    def report_to(self, written: Callable[[int], object]) -> None:
        """Have ``written`` called with the bytes of the array once the writer has them."""
        self._written = written

    def report(self) -> None:
        """Report the bytes of the array."""
        if self._written is not None:
            self._written(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class _InParts:
    """A tensor of several arrays that are created later."""

    def __init__(self, scheme: str, shape: tuple[int, ...], parts: Mapping[str, Lazy]) -> None:
        self.scheme = scheme
        self.shape = shape
        self.parts = parts

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def report_to(self, written: Callable[[int], object]) -> None:
        """See `Lazy.report_to`."""
        for part in self.parts.values():
            part.report_to(written)


class LazyQuantized(_InParts):
    """A `QuantizedTensor` that is created later: data and scale are `Lazy`."""

    def __init__(
        self, scheme: str, shape: tuple[int, ...], data: Lazy, scale: Lazy | None = None, axis: int | None = None
    ) -> None:
        super().__init__(scheme, shape, {"data": data} if scale is None else {"data": data, "scale": scale})
        self.data = data
        self.scale = scale
        self.axis = axis


class LazyPacked(_InParts):
    """A packed `QuantizedTensor` that is written unchanged."""

    def __init__(self, packing: Packing, names: Mapping[str, str], roles: Mapping[str, Lazy]) -> None:
        super().__init__(packing.label, packing.shape, roles)
        self.packing = packing
        self.names = names
        self.roles = roles


class LazyEncoded(_InParts):
    """A weight in the format of another engine, whose ``config.json`` describes it."""


def materialize(value: Array | Lazy) -> Array:
    """Return the array, creating it if it is `Lazy`."""
    return value.make() if isinstance(value, Lazy) else value
