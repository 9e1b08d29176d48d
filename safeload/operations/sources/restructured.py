"""Tensors that are made of those of another catalog: which items and rows go where, and their values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.cached import cached_property
from ...base.table import Unknown
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source
from ...engine.read.tensors import Tensors
from ...engine.run.cast import astype
from ...errors import FormatError
from ...models.config_dtype import dtype_in
from .catalog import Catalog, Made, TensorDescription, TensorPlace

_F32, _BF16 = dtypes.BY_CODE["F32"], dtypes.BY_CODE["BF16"]
_ALL = slice(None)


class TensorView(NamedTuple):
    """A part of a tensor."""

    item: int | None = None  # index of the first axis; None for the whole tensor
    rows: slice = _ALL  # of the item, after it is transposed
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
        return part[self.rows]


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
    constant: Array | None = None  # float32 values of a tensor without sources

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


class RestructuredCatalog(Catalog):
    """Tensors made by recipes when they are read."""

    def __init__(
        self,
        base: Catalog,
        recipes: Mapping[str, TensorRecipe],
        *,
        metadata: Mapping[str, Any],
        config: dict[str, Any] | None = None,
        format: str | None = None,  # of the structure: "gguf" for names of llama.cpp
        kept_f32: Iterable[str] = (),
        restored: dtypes.Dtype | None = None,  # of dequantized tensors; None for that of the config, else bfloat16
        for_engine: bool = False,  # True to leave the tensors that are only renamed as they are stored
    ) -> None:
        super().__init__(base._origins, base.mapped)
        self.base = base
        self._recipes = recipes
        self._restored = restored or dtype_in(base.config) or _BF16
        self.for_engine = for_engine
        self.kept_f32 = frozenset(kept_f32)
        self.texts = base.texts
        self.metadata = metadata
        self.config = config
        self.format = format
        self.ignored = {}
        self.codes = {}  # sources with codes are refused
        self._whole: tuple[str, str, Array] | None = None  # name, dtype and values of the last packed source
        self._known = recipes

    def plain(self, names: Collection[str] | None = None, *, blocks: bool = False) -> Tensors | None:
        return None

    def place(self, name: str) -> TensorPlace:
        source = self._recipes[name].renamed
        return TensorPlace({}) if source is None else self.base.place(source)

    @cached_property
    def made(self) -> dict[str, Made]:
        return {name: self._made(name, recipe) for name, recipe in self._recipes.items()}

    def _made(self, name: str, recipe: TensorRecipe) -> Made:
        sources = [*map(self.base.about, self.sources_of(name))]
        if self.for_engine and recipe.renamed is not None:
            about = sources[0]._replace(name=name)
        else:
            rows = {self._row(name, source) for source in sources}
            row = rows.pop() if len(rows) == 1 and not recipe.shift and name not in self.kept_f32 else _F32
            row = row if recipe.dtype is None else dtypes.BY_CODE[recipe.dtype]
            about = TensorDescription(name, row.name, recipe.shape, row.nbytes(math.prod(recipe.shape)), row, True)
        # Dequantized values are not rounded before they are quantized again.
        work = _F32 if any(source.quantized for source in sources) else about.row

        def fill(row: dtypes.Dtype, out: Array, threads: int | None) -> None:
            self.make(recipe, row, out, threads)
            self.release()

        return Made(fill, work, about)

    def _row(self, name: str, source: TensorDescription) -> dtypes.Dtype:
        """Return the dtype of the values of a source."""
        if source.quantized:
            return self._restored
        row = source.row
        if not source.floating or row.packed:
            raise FormatError(f"tensor {source.name!r} is {source.dtype}, expected floating-point numbers", tensor=name)
        return row if row.code in ("F32", "F16", "BF16") else _F32 if row.bits > 16 else self._restored

    def refuse_unknown(self, names: Iterable[str]) -> None:
        self.base.refuse_unknown(source for name in names for source in self.sources_of(name))

    def recipe(self, name: str) -> TensorRecipe:
        """Return how a tensor is made."""
        return self._recipes[name]

    def sources_of(self, name: str) -> list[str]:
        """Return the source tensors of a tensor."""
        return list(dict.fromkeys(self._recipes[name].sources)) if name in self._recipes else []

    def matching(self, pattern: str) -> list[str]:
        """Return a pattern of names, or the names whose sources match it if no name matches."""
        if any(fnmatchcase(name, pattern) for name in self):
            return [pattern]
        names = [name for name in self if any(fnmatchcase(source, pattern) for source in self.sources_of(name))]
        return names or [pattern]

    def unknown(self) -> dict[str, Unknown]:
        return {}

    def check_kept(self, name: str) -> None:
        for source in self.sources_of(name):
            self.base.check_kept(source)

    def array(self, name: str, threads: int | None = None) -> Array:
        recipe = self._recipes[name]
        whole = super().array(name, threads) if recipe.renamed is None else self.base.array(recipe.renamed, threads)
        return whole.reshape(recipe.shape)

    def source(self, name: str, threads: int | None = None) -> Source | QuantizedTensor:
        recipe = self._recipes[name]
        if recipe.renamed is None or self.base.about(recipe.renamed).quantized:
            return super().source(name, threads)
        source = self.base.source(recipe.renamed, threads)
        return source if isinstance(source, QuantizedTensor) else source._replace(name=name, shape=recipe.shape)

    def restoring(self, name: str) -> Source | None:
        recipe = self._recipes[name]
        source = None if recipe.renamed is None else self.base.restoring(recipe.renamed)
        return source._replace(name=name) if source is not None and source.shape == recipe.shape else None

    # ---- values ----

    def release(self) -> None:
        """Free the memory of a source that was read as a whole."""
        self._whole = None

    def make(self, recipe: TensorRecipe, row: dtypes.Dtype, out: Array, threads: int | None) -> None:
        """Fill an array with a tensor or an item; several threads may call this if sources are plain and in files."""
        if recipe.constant is not None:
            out[...] = astype(recipe.constant, row.name)
        for move in recipe.moves:
            target = move.written.of(out)
            if move.read.whole and not recipe.heads and not recipe.shift and target.flags.c_contiguous:
                if move.read.item is None:
                    stored: Array = target.reshape(self.base.about(move.source).shape)
                    self.base.read_into(move.source, row, stored, threads)
                else:
                    target[...] = self._item(move.source, move.read.item, row, threads)
                continue
            work = _F32 if recipe.shift else row
            array = self._item(move.source, move.read.item, work, threads)
            array = recipe.arranged(move.read.in_item(array))
            if recipe.shift:
                array = astype(array + np.float32(recipe.shift), row.name, threads=threads)
            target[...] = array

    def _item(self, name: str, item: int | None, row: dtypes.Dtype, threads: int | None) -> Array:
        """Return an item of a source; sources that are read as a whole are kept for the next item."""
        place, about = self.base.place(name), self.base.about(name)
        if item is not None and place.file is not None and not about.packed and name not in self.base.made:
            owner: Any = place.origin  # tensors of a dict have no file
            array: Array = owner.take(name, [item], row.name)[0]  # reads the item only
            return array
        if self._whole is None or self._whole[:2] != (name, row.code):
            self._whole = None  # frees its memory first
            whole: Array = np.empty(about.shape, dtypes.array_dtype(row.number))
            self.base.read_into(name, row, whole, threads)
            self._whole = name, row.code, whole
        part: Array = self._whole[2] if item is None else self._whole[2][item]
        return part
