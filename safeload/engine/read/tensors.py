"""Tensors of files as columns, because a file with 100,000 tensors should not need 100,000 objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple, TypeAlias, overload

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.cached import cached_property
from ...base.gc_pause import paused
from ...base.packing import Packed, Part
from ...base.selecting import distinct
from ...base.table import Columns
from ..run.weight_file import WeightFile

# A tensor in a file: its name, the file, its index in the file's table.
FileTensor: TypeAlias = tuple[str, WeightFile, int]

_F32 = dtypes.BY_CODE["F32"]
_PACKED = bytes(row.number for row in dtypes.TABLE if row.packed)


class Ranges(NamedTuple):
    """Byte ranges of tensors as NumPy arrays."""

    file: Array  # int64, position of the file in `Tensors.files`
    begins: Array  # int64, first byte in the file
    sizes: Array  # int64, bytes in the file
    numbers: Array  # uint8, dtype numbers


class Tensors(Sequence[FileTensor]):
    """Tensors of one or more files, as a sequence of `FileTensor`. Columns are decoded on first use."""

    def __init__(
        self,
        files: Sequence[WeightFile],
        names: Sequence[str],
        indices: Sequence[int],
        file: Sequence[int] | None = None,
    ) -> None:
        self.files = files
        self.names = names
        self.indices = indices
        self.file = file

    @classmethod
    def of(cls, tensors: Iterable[FileTensor]) -> Tensors:
        """Collect tensors into columns."""
        if isinstance(tensors, Tensors):
            return tensors
        names, files, indices = [*zip(*tensors, strict=True)] or [(), (), ()]
        return cls._in_files(names, files, indices)

    @classmethod
    def located(cls, where: Mapping[str, tuple[WeightFile, int]], names: Sequence[str] | None = None) -> Tensors:
        """Return the tensors of a mapping from names to files and indices."""
        places = where.values() if names is None else map(where.__getitem__, names)
        files, indices = [*zip(*places, strict=True)] or [(), ()]
        return cls._in_files([*where] if names is None else names, files, indices)

    @classmethod
    def _in_files(cls, names: Sequence[str], files: Sequence[WeightFile], indices: Sequence[int]) -> Tensors:
        places = {file: k for k, file in enumerate(dict.fromkeys(files))}
        return cls([*places], names, indices, None if len(places) < 2 else [places[file] for file in files])

    @classmethod
    def in_file(cls, file: WeightFile, names: Iterable[str] | None = None) -> Tensors:
        """Return the tensors with these names, or all tensors in the order of their bytes."""
        if names is None:
            return cls([file], file.table.names, range(file.table.count))
        chosen = list(distinct(names))
        return cls([file], chosen, file.table.indices(chosen))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[FileTensor]:
        files: Iterable[WeightFile] = repeat(self.files[0]) if self.files else ()
        if self.file is not None:
            files = map(self.files.__getitem__, self.file)
        return zip(self.names, files, self.indices, strict=False)

    @overload
    def __getitem__(self, k: int) -> FileTensor: ...
    @overload
    def __getitem__(self, k: slice) -> Tensors: ...
    def __getitem__(self, k: int | slice) -> FileTensor | Tensors:
        if isinstance(k, slice):
            file = None if self.file is None else self.file[k]
            return Tensors(self.files, self.names[k], self.indices[k], file)
        return self.names[k], self.files[0 if self.file is None else self.file[k]], self.indices[k]

    def pick(self, rows: Iterable[int], names: Sequence[str] | None = None) -> Tensors:
        """Return the tensors at these positions, in this order."""
        rows = rows.tolist() if isinstance(rows, np.ndarray) else list(rows)
        indices, file = self.indices, self.file
        return Tensors(
            self.files,
            [self.names[k] for k in rows] if names is None else names,
            [indices[k] for k in rows],
            None if file is None else [file[k] for k in rows],
        )

    def named(self, names: Sequence[str]) -> Tensors:
        """Return the tensors with these names, in this order."""
        if len(names) == len(self.names) and list(names) == list(self.names):
            return self
        places = {name: k for k, name in enumerate(self.names)}
        return self.pick([places[name] for name in names], names)

    def by_file(self) -> list[Tensors]:
        """Return the tensors of each file, ordered by the first tensor of each file."""
        if self.file is None:
            return [self] if len(self) else []
        rows: list[list[int]] = [[] for _ in self.files]
        for k, file in enumerate(self.file):
            rows[file].append(k)
        names, indices = self.names, self.indices
        return [
            Tensors([self.files[self.file[ks[0]]]], [names[k] for k in ks], [indices[k] for k in ks])
            for ks in sorted(filter(None, rows))
        ]

    @cached_property
    def columns(self) -> Columns:
        """Dtype numbers, logical shapes and byte ranges."""
        with paused(len(self)):
            return self._columns()

    def _columns(self) -> Columns:
        if self.file is None:
            return self.files[0].table.columns(self.indices) if self.files else Columns(b"", (), (), ())
        tables = [file.table.columns(range(file.table.count)) for file in self.files]
        places = list(zip(self.file, self.indices, strict=True))
        return Columns(
            bytes([tables[file].numbers[k] for file, k in places]),
            [tables[file].shapes[k] for file, k in places],
            [tables[file].begins[k] for file, k in places],
            [tables[file].ends[k] for file, k in places],
        )

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Logical shapes."""
        return self.columns.shapes

    @cached_property
    def ranges(self) -> Ranges:
        """Byte ranges and dtype numbers as NumPy arrays."""
        numbers, _, begins, ends = self.columns
        file = np.zeros(len(self), np.int64) if self.file is None else np.array(self.file, np.int64)
        first = np.array(begins, np.int64)
        return Ranges(file, first, np.array(ends, np.int64) - first, np.frombuffer(numbers, np.uint8))

    @property
    def remote(self) -> bool:
        """True if any file is read by requests."""
        return any(file.remote for file in self.files)

    @property
    def plain(self) -> bool:
        """True if all tensors of the files are `whole`, and none is in blocks."""
        return self.whole and not any(file.table.quantized for file in self.files)

    @property
    def whole(self) -> bool:
        """True if each tensor of the files is a single C-contiguous, little-endian range of elements or blocks."""
        tables = [file.table for file in self.files]
        return not any(
            table.shaped or table.scaled or table.numbers.translate(None, _PACKED) != table.numbers for table in tables
        )

    def without_packed(self) -> tuple[Tensors, Mapping[str, Packed]]:
        """Return the tensors that are not packed, and the packed tensors by name."""
        for file in self.files:
            if file.table.quantized:
                break
        else:
            return self, {}
        codes = [file.table.packed(index) for _, file, index in self]
        packed = {name: tensor for name, tensor in zip(self.names, codes, strict=True) if tensor is not None}
        return (self.pick([k for k, tensor in enumerate(codes) if tensor is None]) if packed else self), packed


def packed_of(file: WeightFile, index: int) -> Packed | None:
    """Return the codes and scales of a packed or int8 tensor; None for plain tensors."""
    table = file.table
    scale = table.scale(index)
    if scale is None:
        return table.packed(index)
    name, shape = table.names[index], table.shape(index)
    parts = {
        packing.CODES: Part(name, file, table.row(index), shape, *table.byte_range(index)),
        packing.SCALE: Part(name, file, _F32, scale.shape, scale.begin, scale.end),
    }
    return Packed(packing.int8_packing(shape, scale.axis), parts)
