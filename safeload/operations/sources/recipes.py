"""Tensors that are made of other tensors: which items and rows go where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...base.arrays import Array


class RowRange(NamedTuple):
    """The arguments of a slice."""

    begin: int | None = None
    end: int | None = None
    step: int | None = None


_ALL = RowRange()


class TensorView(NamedTuple):
    """A part of a tensor."""

    item: int | None = None  # index of the first axis; None for the whole tensor
    rows: RowRange = _ALL  # of the item, after it is transposed
    transposed: bool = False

    @property
    def whole(self) -> bool:
        """True if rows are neither chosen nor transposed."""
        return self.rows == _ALL and not self.transposed

    def of(self, tensor: Array) -> Array:
        """Return the part of an array, without copying."""
        part: Array = tensor if self.item is None else tensor[self.item]
        return self.in_item(part)

    def in_item(self, item: Array) -> Array:
        """Return the part of the item."""
        part: Array = item.swapaxes(-1, -2) if self.transposed and item.ndim > 1 else item
        return part if self.rows == _ALL else part[slice(*self.rows)]


class Move(NamedTuple):
    """A part of a source that becomes a part of the result."""

    source: str
    read: TensorView = TensorView()
    written: TensorView = TensorView()


class TensorRecipe(NamedTuple):
    """How a tensor is made."""

    shape: tuple[int, ...]
    moves: tuple[Move, ...]
    heads: int = 0  # heads of the rows that change places; 0 if rows stay
    inverse: bool = False  # the rows go back
    shift: float = 0.0  # added to each element in float32
    dtype: str | None = None  # code of the dtype; None for that of the sources

    @property
    def sources(self) -> Iterable[str]:
        """The names of all sources, with duplicates."""
        return (move.source for move in self.moves)

    @property
    def renamed(self) -> str | None:
        """The source if the tensor is unchanged except for its name."""
        if len(self.moves) != 1 or self.heads or self.shift or self.moves[0][1:] != (TensorView(), TensorView()):
            return None
        return self.moves[0].source

    @property
    def items(self) -> tuple[TensorRecipe, ...]:
        """The recipe of each item of the first axis, or the recipe itself if items cannot be made alone."""
        by_item: dict[int, list[Move]] = {}
        for move in self.moves:
            item = move.written.item
            if item is None or self.heads or (move.read.item is None and not move.read.whole):
                return (self,)
            by_item.setdefault(item, []).append(move._replace(written=move.written._replace(item=None)))
        return tuple(self._replace(shape=self.shape[1:], moves=tuple(by_item.get(k, ()))) for k in range(self.shape[0]))

    def arranged(self, array: Array) -> Array:
        """Return the array with its rows in the order of the result."""
        if not self.heads:
            return array
        rows, half = array.shape[0], array.shape[0] // self.heads // 2
        inner = (self.heads, half, 2) if self.inverse else (self.heads, 2, half)
        swapped: Array = array.reshape(*inner, -1).swapaxes(1, 2).reshape(rows, *array.shape[1:])
        return swapped
