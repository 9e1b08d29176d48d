"""The tensors of a checkpoint as columns, where they are plain: operations on very many need no object for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..base.collector import paused
from ..checkpoint import Checkpoint
from ..engine.spans import Spans
from ..engine.weight_file import WeightFile
from .catalog import Catalog

_PACKED = bytes(row.number for row in dtypes.TABLE if row.packed)


class Columns:
    """Plain tensors of files: C-contiguous, little-endian, of whole bytes, and not quantized.

    Attributes:
        names: of the tensors.
        shapes: their shapes.
        numbers: uint8, numbers of their dtypes.
        begins: int64, first byte of each in its file.
        sizes: int64, bytes of each.
        file: int64, index of the file of each.
        files: the files.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        numbers: Array,
        begins: Array,
        sizes: Array,
        file: Array,
        files: Sequence[WeightFile],
    ) -> None:
        self.names = names
        self.shapes = shapes
        self.numbers = numbers
        self.begins = begins
        self.sizes = sizes
        self.file = file
        self.files = files

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, catalog: Catalog) -> Columns | None:
        """The tensors of a catalog, in its order; None unless it is of one checkpoint, and all of them are plain."""
        if catalog.in_memory or len(catalog.checkpoints) != 1 or catalog.ignored:
            return None
        with paused(len(catalog)):
            return cls._of(catalog.checkpoints[0])

    @classmethod
    def _of(cls, checkpoint: Checkpoint) -> Columns | None:
        files = list(dict.fromkeys(checkpoint.weight_files))
        for file in files:
            table = file.table
            if table.shaped or table.quantized or table.numbers.translate(None, _PACKED) != table.numbers:
                return None
        tables = [file.table.columns(range(file.table.count)) for file in files]
        counts = [file.table.count for file in files]
        begins, ends = (
            np.concatenate([np.empty(0, np.int64), *(np.array(getattr(table, field), np.int64) for table in tables)])
            for field in ("begins", "ends")
        )
        names = list(checkpoint)
        whole = cls(
            names,
            [shape for table in tables for shape in table.shapes],
            np.frombuffer(b"".join(table.numbers for table in tables), np.uint8),
            begins,
            ends - begins,
            np.repeat(np.arange(len(files)), counts),
            files,
        )
        if len(files) == 1 and names == files[0].table.names:
            return whole
        starts = dict(zip(files, (np.cumsum(counts) - counts).tolist(), strict=True))
        return whole.pick(np.array([starts[file] + index for _, file, index in checkpoint.entries()], np.int64), names)

    def pick(self, rows: Array, names: Sequence[str] | None = None) -> Columns:
        """Some of the tensors.

        Args:
            rows: their indices.
            names: their names, where these are at hand.
        """
        numbers = rows.tolist()
        return Columns(
            [self.names[k] for k in numbers] if names is None else names,
            [self.shapes[k] for k in numbers],
            self.numbers[rows],
            self.begins[rows],
            self.sizes[rows],
            self.file[rows],
            self.files,
        )

    def named(self, names: Sequence[str]) -> Columns:
        """The tensors of these names, in their order."""
        if len(names) == len(self.names) and list(names) == list(self.names):
            return self
        places = {name: k for k, name in enumerate(self.names)}
        return self.pick(np.array([places[name] for name in names], np.int64), names)

    def spans(self, targets: Array | None = None) -> Spans:
        """Their bytes in the files.

        Args:
            targets: uint8, numbers of the dtypes that they become; None to convert nothing.
        """
        targets = self.numbers if targets is None else targets
        return Spans(self.files, self.file, self.begins, self.sizes, self.numbers, targets)
