"""Contents of small tensors with descriptions of packed ones, read in a batch: a remote model can have hundreds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..base.arrays import Array, empty_array
from ..base.packing import Part
from ..base.text import show
from ..engine.run import jobs
from ..engine.run.job import Job, Origin
from ..engine.run.memory import address_of
from ..engine.run.weight_file import WeightFile
from .families import Stored
from .grid import Misfit

# Bytes of a description; bitsandbytes' longest has about 250.
_LONGEST = 1024
# Values of a shape.
_MOST_AXES = 8
# Bytes of a batch.
_BATCH = 64 << 20
_MOST = {"U8": _LONGEST, "I32": 4 * _MOST_AXES, "I64": 8 * _MOST_AXES}


class PackedContents:
    """The stored tensors of a checkpoint; reads small tensors in a batch on first use."""

    def __init__(self, places: Mapping[str, tuple[WeightFile, int]], suffixes: tuple[str, ...]) -> None:
        self._places, self._suffixes = places, suffixes
        columns = {file: (file.table.rows, file.table.shapes) for file in {file for file, _ in places.values()}}
        self._ranges: dict[WeightFile, list[tuple[int, int]]] = {}
        self.tensors = {
            name: Stored(columns[file][0][index], columns[file][1][index]) for name, (file, index) in places.items()
        }
        self._read: dict[str, Array] | None = None
        self._metadata: dict[WeightFile, Mapping[str, Any]] = {}

    def part(self, name: str) -> Part | None:
        """Return a tensor as a part; None if its bytes are not in C order and little-endian."""
        file, index = self._places[name]
        if file.table.strides(index) is not None or file.table.big_endian(index):
            return None
        if file not in self._ranges:
            self._ranges[file] = file.table.byte_ranges()
        return Part(name, file, *self.tensors[name], *self._ranges[file][index])

    def __call__(self, name: str) -> bytes:
        """Return the bytes of a tensor."""
        part = self._part(name)
        if part is None or part.row.code != "U8":
            raise Misfit(f"{show(name)} must be U8 and have at most {_LONGEST:,} bytes")
        return self._bytes(part).tobytes()

    def integers(self, name: str) -> tuple[int, ...]:
        """Return the values of a list of integers."""
        part = self._part(name)
        if part is None or part.row.code == "U8" or len(part.shape) != 1:
            raise Misfit(f"{show(name)} must be a list of at most {_MOST_AXES} integers")
        return tuple(jobs.native_order(self._bytes(part).view(part.row.name)).tolist())

    def _bytes(self, part: Part) -> Array:
        if self._read is None:
            self._read = self._batch()
        if part.name not in self._read:
            self._read.update(_read([part]))
        return self._read[part.name]

    def note(self, name: str, key: str) -> str | None:
        """Return the text under a key in the metadata of a tensor's file, or None."""
        file = self._places[name][0]
        if file not in self._metadata:
            self._metadata[file] = file.table.metadata() or {}
        text = self._metadata[file].get(key)
        return text if isinstance(text, str) else None

    def _part(self, name: str) -> Part | None:
        part = self.part(name)
        if part is None or part.row.code not in _MOST or part.end - part.begin > _MOST[part.row.code]:
            return None
        return part

    def _batch(self) -> dict[str, Array]:
        parts, size = [], 0
        for name in self._places:
            part = self._part(name) if name.endswith(self._suffixes) else None
            if part is not None and size < _BATCH:
                parts.append(part)
                size += part.end - part.begin
        return _read(parts)


def _read(parts: Iterable[Part]) -> dict[str, Array]:
    arrays = {part.name: (part, empty_array((part.end - part.begin,), np.dtype(np.uint8))) for part in parts}
    batch = jobs.Batch(
        Job(part.file, part.begin, address_of(array), array.size, origin=Origin(part.name, part.shape))
        for part, array in arrays.values()
        if array.size
    )
    batch.run()
    return {name: array for name, (_, array) in arrays.items()}
