"""Recipes: how the values of other tensors make a tensor, for `RestructuredCatalog`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ..core import dtypes
from ..core.arrays import Array
from ..core.cast import astype

_ALL = slice(None)


class TensorView(NamedTuple):
    """A part of a tensor."""

    item: int | None = None  # index of the first axis; None for the whole tensor
    rows: slice = _ALL  # of the item, after it is transposed
    transposed: bool = False

    def of(self, tensor: Array) -> Array:
        """Return the part of an array, without copying."""
        item: Array = tensor if self.item is None else tensor[self.item]
        part: Array = item.swapaxes(-1, -2) if self.transposed and item.ndim > 1 else item
        return part[self.rows]


def copy_values(out: Array, values: Array, threads: int | None) -> None:
    """Copy values of the same dtype, which may be a transposed view."""
    if out.flags.c_contiguous and out.dtype == values.dtype:
        astype(values, out.dtype, out=out, threads=threads)
    else:
        out[...] = values


class Arrangement(NamedTuple):
    """How a tensor holds the values of another one: rows and columns in another order, or computed values."""

    flat: bool = False  # all axes after the first of the other tensor are the columns
    rows: Array | None = None  # the row of the other tensor for each row; None for the same rows
    columns: Array | None = None  # likewise
    shape: tuple[int, ...] | None = None  # of these, before axes are swapped; None for that of the other tensor
    transposed: bool = False  # the last two axes are swapped
    factors: tuple[tuple[int, int, float], ...] = ()  # of the rows from one to another, one after the other in float32
    function: str | None = None  # a key of `_FUNCTIONS`: what is computed of each value
    shift: float = 0.0  # then added to each value in float32
    inverse: bool = False  # this tensor becomes a part of the other one

    @property
    def computes(self) -> bool:
        """True if values change."""
        return self.function is not None or self.shift != 0 or bool(self.factors)

    @property
    def reorders(self) -> bool:
        """True if rows or columns change places, or form matrices."""
        return self.flat or self.rows is not None or self.columns is not None or self.shape is not None

    def fill(self, out: Array, array: Array, row: dtypes.Dtype, threads: int | None) -> None:
        """Fill ``out`` with the values of ``array``, which are float32 if they change."""
        if self.inverse:
            result: Array = array.swapaxes(-1, -2) if self.transposed else array
            counts = [] if self.rows is None else [len(self.rows)]
            if self.columns is not None:
                counts = [*(counts or out.shape[:1]), len(self.columns)]
            result = self._computed(result.reshape(*counts, *out.shape[len(counts) :]), row, threads)
            if counts:
                out[self._places(out)] = result
            else:
                copy_values(out, result, threads)
            return
        if self.rows is not None and self.columns is None and not (self.computes or self.transposed):
            flat: Array = out.reshape(len(self.rows), *array.shape[1:])
            np.take(array, self.rows, 0, out=flat, mode="clip")  # without this mode NumPy fills a copy first
            return
        array = array.reshape(len(array), -1) if self.flat else array
        result = array[self._places(array)]
        result = result.reshape(self.shape or result.shape)
        result = self._computed(result.swapaxes(-1, -2) if self.transposed else result, row, threads)
        copy_values(out, result.reshape(out.shape), threads)

    def _places(self, array: Array) -> Any:
        if self.columns is None:
            return slice(None) if self.rows is None else self.rows
        return np.ix_(np.arange(array.shape[0]) if self.rows is None else self.rows, self.columns)

    def _computed(self, array: Array, row: dtypes.Dtype, threads: int | None) -> Array:
        if not self.computes:
            return array
        if self.factors:
            array = array.copy()
            for begin, end, factor in self.factors[:: -1 if self.inverse else 1]:
                rows, step = array[begin:end], np.float32(factor)
                (np.divide if self.inverse else np.multiply)(rows, step, out=rows)
        array = array if self.inverse else self._applied(array)
        array = array + np.float32(self.shift)
        array = self._applied(array) if self.inverse else array
        return astype(np.ascontiguousarray(array), row.name, threads=threads)

    def _applied(self, array: Array) -> Array:
        """Return the function of values, computed in float64 and rounded once."""
        if self.function is None:
            return array
        with np.errstate(all="ignore"):
            values: Array = _FUNCTIONS[self.function, self.inverse](array.astype(np.float64))
            return values.astype(np.float32)


# Functions by name, and their inverse if such files have a way back.
_FUNCTIONS: dict[tuple[str, bool], Callable[[Array], Array]] = {
    ("negative_exp", False): lambda array: -np.exp(array),
    ("negative_exp", True): lambda array: np.log(-array),
    ("softplus", False): lambda array: np.logaddexp(0, array),
}


class Move(NamedTuple):
    """A part of a source that becomes a part of the result."""

    source: str
    read: TensorView = TensorView()
    written: TensorView = TensorView()
    arrangement: Arrangement | None = None  # of the whole source; None for its values in their order

    @property
    def turned(self) -> TensorView | None:
        """The part of the source, of adjacent columns, that the move only transposes; None for other moves."""
        if self.arrangement is None:
            return self.read if self.read.transposed and self.read.rows.step is None else None
        plain = not (self.arrangement.reorders or self.arrangement.computes)
        return TensorView(transposed=True) if self.arrangement.transposed and plain else None


class TensorRecipe(NamedTuple):
    """How a tensor is made."""

    shape: tuple[int, ...]
    moves: tuple[Move, ...]
    dtype: str | None = None  # code of the dtype; None for that of the sources
    constant: Array | None = None  # float32 values of a tensor without sources
    blocks: str | None = None  # the block type in which it holds the codes of its sources, which are packed

    @property
    def sources(self) -> Iterable[str]:
        """The names of all sources, with duplicates."""
        return (move.source for move in self.moves)

    @property
    def computes(self) -> bool:
        """True if values change."""
        return any(move.arrangement is not None and move.arrangement.computes for move in self.moves)

    @property
    def scales(self) -> bool:
        """True if values are multiplied and keep their dtype."""
        return any(move.arrangement is not None and move.arrangement.factors for move in self.moves)

    @property
    def renamed(self) -> str | None:
        """The source if the tensor is unchanged except for its name."""
        if len(self.moves) != 1 or self.moves[0][1:] != (TensorView(), TensorView(), None):
            return None
        return self.moves[0].source

    @property
    def items(self) -> tuple[TensorRecipe, ...]:
        """The recipe of each item of the first axis, or the recipe itself if items cannot be made alone."""
        by_item: dict[int, list[Move]] = {}
        for move in self.moves:
            item = move.written.item
            if item is None or move.arrangement or (move.read.item is None and move.read != TensorView()):
                return (self,)
            by_item.setdefault(item, []).append(move._replace(written=move.written._replace(item=None)))
        return tuple(self._replace(shape=self.shape[1:], moves=tuple(by_item.get(k, ()))) for k in range(self.shape[0]))
