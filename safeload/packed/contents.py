"""Contents of small tensors that describe others, read together: a model in a store may have hundreds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..base.arrays import Array, empty_array
from ..base.packing import Part
from ..base.text import show
from ..engine import jobs
from ..engine.job import Job, Origin
from ..engine.memory import address_of
from ..engine.weight_file import WeightFile
from .grid import Misfit

# Bytes of one; the longest that bitsandbytes writes has about 250.
_LONGEST = 1024
# Bytes that are read together.
_TOGETHER = 64 << 20


class Contents:
    """Reads them when the first is asked for.

    Args:
        places: where the tensors of a checkpoint are, by name.
        part_of: the part of a name; None for one whose bytes are not in order.
        suffixes: of the names of those that are read together.
    """

    def __init__(
        self,
        places: Mapping[str, tuple[WeightFile, int]],
        part_of: Callable[[Mapping[str, tuple[WeightFile, int]], str], Part | None],
        suffixes: tuple[str, ...],
    ) -> None:
        self._places, self._part_of, self._suffixes = places, part_of, suffixes
        self._read: dict[str, Array] | None = None
        self._metadata: dict[WeightFile, Mapping[str, Any]] = {}

    def __call__(self, name: str) -> bytes:
        """The bytes of a tensor.

        Raises:
            Misfit: it is too long, or not U8.
            FormatError, OSError: the file cannot be read.
        """
        part = self._part(name)
        if part is None:
            raise Misfit(f"{show(name)} is not a tensor of at most {_LONGEST:,} bytes in U8")
        if self._read is None:
            self._read = self._all()
        if name not in self._read:
            self._read.update(_read([part]))
        return self._read[name].tobytes()

    def note(self, name: str, key: str) -> str | None:
        """What the metadata of the file of a tensor says under a key; None if it is missing."""
        file = self._places[name][0]
        if file not in self._metadata:
            self._metadata[file] = file.table.metadata() or {}
        text = self._metadata[file].get(key)
        return text if isinstance(text, str) else None

    def _part(self, name: str) -> Part | None:
        part = self._part_of(self._places, name)
        fits = part is not None and part.row.code == "U8" and part.end - part.begin <= _LONGEST
        return part if fits else None

    def _all(self) -> dict[str, Array]:
        found, size = [], 0
        for name in self._places:
            part = self._part(name) if name.endswith(self._suffixes) else None
            if part is not None and size < _TOGETHER:
                found.append(part)
                size += part.end - part.begin
        return _read(found)


def _read(parts: Iterable[Part]) -> dict[str, Array]:
    arrays = {part.name: (part, empty_array((part.end - part.begin,), np.dtype(np.uint8))) for part in parts}
    batch = jobs.Batch(
        Job(part.file, part.begin, address_of(array), array.size, origin=Origin(part.name, part.shape))
        for part, array in arrays.values()
        if array.size
    )
    batch.run()
    return {name: array for name, (_, array) in arrays.items()}
