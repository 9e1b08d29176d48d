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
from .bitsandbytes import STATES
from .grid import Misfit

# Suffixes of their names.
_SUFFIXES = (*STATES.values(), ".weight_format")
# Bytes of one; the longest that bitsandbytes writes has about 250.
_LONGEST = 1024
# Bytes that are read together.
_TOGETHER = 64 << 20


class Contents:
    """Reads them when the first is asked for.

    Args:
        places: where the tensors of a checkpoint are, by name.
        part_of: the part of a name; None for one whose bytes are not in order.
    """

    def __init__(self, places: Mapping[str, Any], part_of: Callable[[Mapping[str, Any], str], Part | None]) -> None:
        self._places, self._part_of = places, part_of
        self._read: dict[str, Array] | None = None

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

    def _part(self, name: str) -> Part | None:
        part = self._part_of(self._places, name)
        fits = part is not None and part.row.code == "U8" and part.end - part.begin <= _LONGEST
        return part if fits else None

    def _all(self) -> dict[str, Array]:
        found, size = [], 0
        for name in self._places:
            part = self._part(name) if name.endswith(_SUFFIXES) else None
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
