"""Converts checkpoints of plain tensors to safetensors in columns: what is only copied or cast needs no object each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.selecting import renamed
from ...engine.ahead.spans import Spans
from ...engine.read.tensors import Tensors
from ...engine.run.atomic_file import AtomicFile
from ...formats.metadata import as_texts
from ...formats.registry import SAFETENSORS
from ...formats.safetensors.header import Header
from ...formats.safetensors.quantized import pack
from ...stores.files import Location
from ..folders.shards import config_with, shard_bounds
from ..sources.catalog import Catalog
from .preparing import ConvertRequest, extras_for, metadata_for


class Copies(NamedTuple):
    """A conversion that only copies and casts.

    Attributes:
        columns: the tensors.
        names: their names in the result.
        targets: uint8, numbers of their dtypes in the result.
        lengths: int64, their bytes in the result.
        texts: metadata of the result; None for none.
        config: ``config.json`` of a folder; None without one.
        extras: other files to copy into a folder, by name.
    """

    columns: Tensors
    names: Sequence[str]
    targets: Array
    lengths: Array
    texts: Mapping[str, str] | None
    config: dict[str, Any] | None
    extras: dict[str, Location]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the result."""
        return int(self.lengths.sum())

    def divided(self, limit: int) -> dict[str, Copies]:
        """The shards of a folder, as `shards.shard_bounds` divides them: name of the file to its tensors."""
        return {file: self._slice(rows) for file, rows in shard_bounds(self.lengths, limit).items()}

    def _slice(self, rows: slice) -> Copies:
        return self._replace(
            columns=self.columns[rows], names=self.names[rows], targets=self.targets[rows], lengths=self.lengths[rows]
        )


def copies_of(catalog: Catalog, wanted: ConvertRequest) -> Copies | None:
    """The conversion, if all tensors are plain and are only copied or cast; None if any of them needs more.

    Raises:
        SafeloadError, ValueError: see `convert`.
    """
    options = wanted.options
    if wanted.format != SAFETENSORS or options.get("quantize") is not None or options.get("layout") is not None:
        return None
    if options.get("adapters") is not None:
        return None
    columns = catalog.plain()
    if columns is None or (wanted.target is not None and catalog.codes):
        return None
    columns = columns.named(catalog.choose(options.get("names"), options.get("only"), options.get("drop")))
    targets = _targets(columns.ranges.numbers, wanted.target)
    if targets is None:
        return None
    rename = options.get("rename")
    names = columns.names if rename is None else [*renamed(columns.names, rename).values()]
    return Copies(
        columns,
        names,
        targets,
        Spans.of(columns, targets).lengths,
        pack({}, as_texts(metadata_for(catalog, wanted)) or None)[1],
        config_with(catalog.config, wanted.target),
        extras_for(catalog, wanted),
    )


def files_of(shards: Mapping[str, Copies]) -> dict[str, str]:
    """The file of each tensor by its name."""
    return {name: file for file, shard in shards.items() for name in shard.names}


def _targets(numbers: Array, target: dtypes.Dtype | None) -> Array | None:
    """What dtypes become, by number; None if one cannot be converted."""
    if target is None:
        return numbers
    targets = np.arange(256, dtype=np.uint8)
    for number in set(numbers.tolist()):
        row = dtypes.BY_NUMBER[number]
        if not row.converts_to(row.loaded_as(target)):
            return None
        targets[number] = row.loaded_as(target).number
    return targets[numbers]


class CopyWriter:
    """A file of copies to write: see `Writer`.

    Args:
        copies: the tensors.
        threads: for reading and converting; None: chosen automatically.
        report: called with the number of bytes of tensors that have been written since the last call.
    """

    def __init__(self, copies: Copies, threads: int | None, report: Callable[[int], object]) -> None:
        shapes = copies.columns.shapes
        self._header = Header(copies.names, copies.targets.tobytes(), shapes, copies.texts)
        self._spans = Spans.of(copies.columns, copies.targets).pick(self._header.order)
        self._threads = threads
        self._report = report
        self.size: int = self._header.nbytes + copies.nbytes

    def write_to(self, file: AtomicFile) -> None:
        """Writes all bytes into a file under construction."""
        file.write([(self._header.address, self._header.nbytes)])
        with closing(self._spans.read(self._threads)) as pieces:
            for address, size in pieces:
                file.write([(address, size)])
                self._report(size)
