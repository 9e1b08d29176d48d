"""A catalog of tensors under other names, and tensors made of those of another catalog."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.table import Unknown
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source
from ...engine.read.tensors import FileTensor, Tensors
from ...engine.run.cast import astype
from ...errors import FormatError
from ...models.config_dtype import dtype_in
from ...packed.finder import Codes
from .catalog import Catalog, Made, TensorPlace
from .description import TensorDescription
from .recipes import TensorRecipe

_F32, _BF16 = dtypes.BY_CODE["F32"], dtypes.BY_CODE["BF16"]


class RestructuredCatalog(Catalog):
    """Tensors made by recipes when they are read."""

    def __init__(
        self,
        base: Catalog,
        recipes: Mapping[str, TensorRecipe],
        *,
        constants: Mapping[str, Array],  # further tensors
        metadata: Mapping[str, Any],
        config: dict[str, Any] | None = None,
        format: str | None = None,  # of the structure: "gguf" for names of llama.cpp
        kept_f32: Iterable[str] = (),
        restored: dtypes.Dtype | None = None,  # of dequantized tensors; None for that of the config, else bfloat16
    ) -> None:
        super().__init__(base._origins, base.mapped)
        self._base = base
        self._recipes = recipes
        self._constants = constants
        self._restored = restored or dtype_in(base.config) or _BF16
        self.kept_f32 = frozenset(kept_f32)  # names that stay float32 whatever dtype is requested
        self.texts: dict[str, bytes] = {}  # further files of the result, by name
        self.notes: list[str] = []  # facts of the source that the result does not have
        self.metadata = metadata
        self.config = config
        self.format = format
        self.ignored = {}
        self.index = None
        self._whole: tuple[str, str, Array] | None = None  # name, dtype and values of the last packed source
        self._known = dict.fromkeys([*recipes, *constants])

    @property
    def base(self) -> Catalog:
        """The catalog of the sources."""
        return self._base

    @property
    def nbytes(self) -> int:
        return sum(self.about(name).nbytes for name in self)

    def entries(self) -> list[FileTensor]:
        return self._base.entries()

    def plain(self, names: Collection[str] | None = None, *, blocks: bool = False) -> Tensors | None:
        return None

    def place(self, name: str) -> TensorPlace:
        source = self._renamed(name)
        return TensorPlace({}) if source is None else self._base.place(source)

    def about(self, name: str) -> TensorDescription:
        if name in self._constants:
            array = self._constants[name]
            return TensorDescription(name, "float32", array.shape, array.nbytes, _F32, True)
        recipe = self._recipes[name]
        sources = [self._base.about(source) for source in dict.fromkeys(recipe.sources)]
        rows = {self._row(name, source) for source in sources}
        row = rows.pop() if len(rows) == 1 and not recipe.shift and name not in self.kept_f32 else _F32
        row = row if recipe.dtype is None else dtypes.BY_CODE[recipe.dtype]
        return TensorDescription(name, row.name, recipe.shape, row.nbytes(math.prod(recipe.shape)), row, True)

    def _row(self, name: str, source: TensorDescription) -> dtypes.Dtype:
        """Return the dtype of the values of a source."""
        if source.quantized:
            return self._restored
        row = source.row
        if not source.floating or row.packed:
            raise FormatError(f"tensor {source.name!r} is {source.dtype}, expected floating-point numbers", tensor=name)
        return row if row.code in ("F32", "F16", "BF16") else _F32 if row.bits > 16 else self._restored

    def refuse_unknown(self, names: Iterable[str]) -> None:
        self._base.refuse_unknown(source for name in names for source in self.sources_of(name))

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
            self._base.check_kept(source)

    def find_codes(self, quantization: Any) -> Mapping[str, Codes]:
        return {}  # sources with codes are refused

    def array(self, name: str, threads: int | None = None) -> Array:
        source = self._renamed(name)
        if source is None:
            return self._values(name, self.about(name).row, threads)
        array: Array = self._base.array(source, threads).reshape(self._recipes[name].shape)
        return array

    def read_item(self, name: str, item: int | None, row: dtypes.Dtype, threads: int | None = None) -> Array:
        source = self._renamed(name)
        if source is not None and self._base.about(source).shape == self._recipes[name].shape:
            return self._base.read_item(source, item, row, threads)
        items = () if item is None else self._recipes[name].items
        if item is None or len(items) < 2:
            whole = self._values(name, row, threads)
            return whole if item is None else whole[item]
        out: Array = np.empty(items[item].shape, dtypes.array_dtype(row.number))
        self._make(items[item], row, out, threads)
        return out

    def source(self, name: str, called: str | None = None, threads: int | None = None) -> Source | QuantizedTensor:
        renamed = self._renamed(name)
        if renamed is None or self._base.about(renamed).quantized:
            return super().source(name, called, threads)
        source = self._base.source(renamed, name if called is None else called, threads)
        return source if isinstance(source, QuantizedTensor) else source._replace(shape=self._recipes[name].shape)

    def made(self, name: str) -> Made:
        # Dequantized values are not rounded before they are quantized again.
        quantized = any(self._base.about(each).quantized for each in self.sources_of(name))
        return Made(partial(self._fill, name), _F32 if quantized else self.about(name).row)

    def restoring(self, name: str, called: str | None = None) -> Source | None:
        renamed = self._renamed(name)
        if renamed is None:
            return None
        source = self._base.restoring(renamed, name if called is None else called)
        return source if source is not None and source.shape == self._recipes[name].shape else None

    def memory_of(self, names: Iterable[str]) -> Iterator[Array]:
        return self._base.memory_of(source for name in names for source in self.sources_of(name))

    # ---- values ----

    def _renamed(self, name: str) -> str | None:
        return self._recipes[name].renamed if name in self._recipes else None

    def _values(self, name: str, row: dtypes.Dtype, threads: int | None) -> Array:
        out: Array = np.empty(self.about(name).shape, dtypes.array_dtype(row.number))
        self._fill(name, row, out, threads)
        return out

    def _fill(self, name: str, row: dtypes.Dtype, out: Array, threads: int | None) -> None:
        if name in self._constants:
            out[...] = astype(self._constants[name], row.name)
            return
        self._make(self._recipes[name], row, out, threads)
        self._whole = None

    def items(self, name: str) -> tuple[TensorRecipe, ...]:
        """Return the recipes of a tensor's items; see `TensorRecipe.items`."""
        return self._recipes[name].items

    def release(self) -> None:
        """Free the memory of a source that was read as a whole."""
        self._whole = None

    def fill_item(self, recipe: TensorRecipe, row: dtypes.Dtype, out: Array) -> None:
        """Fill an array with an item; several threads may call this unless a source is packed."""
        self._make(recipe, row, out, 1)

    def _make(self, recipe: TensorRecipe, row: dtypes.Dtype, out: Array, threads: int | None) -> None:
        """Fill an array with a tensor."""
        for move in recipe.moves:
            target = move.written.of(out)
            if move.read.whole and not recipe.heads and not recipe.shift and target.flags.c_contiguous:
                if move.read.item is None:
                    stored: Array = target.reshape(self._base.about(move.source).shape)
                    self._base.read_into(move.source, row, stored, threads)
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
        if item is not None and not self._base.about(name).packed and self._base.made(name) is None:
            return self._base.read_item(name, item, row, threads)
        if self._whole is None or self._whole[:2] != (name, row.code):
            self._whole = None  # frees its memory first
            self._whole = name, row.code, self._base.read_item(name, None, row, threads)
        part: Array = self._whole[2] if item is None else self._whole[2][item]
        return part
