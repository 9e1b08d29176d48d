"""Conversions in columns, without an object per tensor.

They copy, cast, dequantize blocks, and quantize to blocks: all that takes a single conversion of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.selecting import Renames, renamed
from ...engine.ahead.spans import Spans
from ...engine.codes.quantized_tensor import storage_of
from ...engine.read.tensors import Tensors
from ...engine.run.atomic_file import AtomicFile
from ...errors import RangeError
from ...formats.metadata import as_texts
from ...formats.registry import KERAS, SAFETENSORS
from ...formats.safetensors.header import ROOM, Header
from ...formats.safetensors.quantized import texts_with
from ...stores.files import Location
from ..folders.shards import config_with, shard_bounds
from ..quantize.checkpoint import Summary
from ..quantize.quantize import quantize_source
from ..sources.catalog import Catalog
from ..sources.recipes import TensorRecipe
from .decide import (
    AS_STORED,
    Decider,
    Decision,
    runs_of,
    runs_of_casts,
    target_of,
)
from .request import ConvertRequest, extras_for, is_restored, metadata_for

_BYTES = dtypes.BY_CODE["U8"]
# Bytes of the widest integers that GPTQ and AWQ pack codes into.
_WIDEST_CODES = 4


def may_be_code(dtype: np.dtype[Any]) -> bool:
    """Return True if elements of this dtype can be codes described by a ``config.json``."""
    integer = dtype.kind in "iu" and dtype.itemsize <= _WIDEST_CODES
    return integer or (dtype.itemsize == 1 and dtype.kind != "b")


class Copies(NamedTuple):
    """A conversion in columns."""

    catalog: Catalog
    names: Sequence[str]  # in the result
    reads: Sequence[str]  # names in the source
    shapes: Sequence[tuple[int, ...]]
    spans: Spans
    texts: Mapping[str, str] | None  # metadata of the result
    threads: int | None
    config: dict[str, Any] | None = None
    extras: Mapping[str, Location] = {}
    room: int = ROOM  # spaces after headers
    decider: Decider | None = None  # has decided, if there are decisions
    decisions: Sequence[Decision] = ()  # about each tensor; none if all are only converted
    engine_rules: None = None
    parameters: None = None

    @property
    def tensor_count(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        return int(self.spans.lengths.sum())

    @property
    def files(self) -> Mapping[str, Location]:
        return self.extras

    @property
    def schemes(self) -> tuple[str, ...]:
        numbers = {*self.spans.targets[self.in_blocks].tolist()}
        return tuple(sorted({dtypes.of_number(number).name for number in numbers}))

    @property
    def in_blocks(self) -> Array:
        """Positions of the tensors that are stored in blocks."""
        return np.flatnonzero(self.spans.targets >= len(dtypes.TABLE))

    @property
    def summary(self) -> Summary | None:
        return None if self.decider is None else self.decider.summary(self.nbytes)

    @property
    def planned_summary(self) -> dict[str, Any] | None:
        return None if self.decider is None else self.decider.planned_summary(self.nbytes, self._decided)

    @property
    def runs(self) -> list[dict[str, Any]]:
        if self.decisions:
            return runs_of(self._decided)
        return runs_of_casts(self.reads, self.spans.columns.sources, self.spans.targets)

    @property
    def _decided(self) -> dict[str, Decision]:
        return dict(zip(self.reads, self.decisions, strict=True))

    @property
    def recipes(self) -> dict[str, TensorRecipe]:
        return {}

    @property
    def may_hold_codes(self) -> bool:
        elements = (number for number in {*self.spans.targets.tobytes()} if number < len(dtypes.TABLE))
        return any(map(may_be_code, map(dtypes.array_dtype, elements)))

    def divided(self, limit: int) -> dict[str, Copies]:
        return {file: self._slice(rows) for file, rows in shard_bounds(self.spans.lengths, limit).items()}

    def _slice(self, rows: slice) -> Copies:
        return self._replace(
            names=self.names[rows],
            reads=self.reads[rows],
            shapes=self.shapes[rows],
            spans=self.spans.pick(rows),
            decisions=self.decisions[rows],
        )

    def weight_map(self, shards: Mapping[str, Copies]) -> dict[str, str]:
        files: dict[str, str] = {}
        for file, shard in shards.items():
            files.update(dict.fromkeys(shard.names, file))
        return files

    def writer(self, written: Callable[[int], object]) -> CopyWriter:
        return CopyWriter(self, written)

    def write_file(self, path: str, overwrite: bool, written: Callable[[int], object]) -> int:
        writer = CopyWriter(self, written)
        with AtomicFile(path, writer.size, overwrite=overwrite) as file:
            writer.write_to(file)
        return writer.size


def copies_of(catalog: Catalog, request: ConvertRequest, threads: int | None) -> Copies | None:
    """Return the conversion in columns, or None unless all tensors are plain or in blocks, and only copied or cast."""
    options, target = request.options, request.target
    if request.format != SAFETENSORS or options.get("quantize") is not None:
        return None
    if options.get("layout") is not None or options.get("adapters") is not None or is_restored(catalog, request):
        return None
    tensors = catalog.plain(blocks=True)
    if tensors is None:
        return None
    refuses = target is not None or catalog.format == KERAS  # see `Decider`
    if refuses and dtypes.may_hold_codes(tensors.columns.numbers) and catalog.codes:
        return None
    if not request.every_tensor:
        tensors = tensors.named(catalog.choose(options.get("names"), options.get("only"), options.get("drop")))
    numbers = tensors.ranges.numbers
    loaded = {number: dtypes.BY_NUMBER[number].loaded_as(target).number for number in set(numbers.tolist())}
    targets = np.array([loaded.get(number, number) for number in range(256)])[numbers]
    copies = _columns(catalog, tensors, targets, options.get("rename"), threads)
    if copies is None:
        return None
    texts, extras = as_texts(metadata_for(catalog, request)) or None, extras_for(catalog, request)
    copies = copies._replace(texts=texts, extras=extras)
    if request.folder is None:
        return copies
    return copies._replace(config=config_with(catalog.config, target, schemes=copies.schemes))


def planned_copies(
    catalog: Catalog, piece: Mapping[str, Any], casts: Mapping[str, int], threads: int | None
) -> Copies | None:
    """Return the conversion of a piece in columns, or None unless all of its tensors are plain or in blocks."""
    targets = np.fromiter(casts.values(), np.int16, len(casts))
    copies = _columns(catalog, catalog.plain(casts, blocks=True), targets, piece["rename"], threads)
    return None if copies is None else copies._replace(texts=piece["metadata"], room=ROOM if piece["editable"] else 0)


def copies_as_decided(
    catalog: Catalog, request: ConvertRequest, decider: Decider, decisions: Mapping[str, Decision], threads: int | None
) -> Copies | None:
    """Return a conversion in columns, under the names of the source; None unless `planned_copies` would take it."""
    if request.format != SAFETENSORS or type(catalog) is not Catalog:
        return None
    if any(decision.reads != (name,) or decision.stack is not None for name, decision in decisions.items()):
        return None
    kinds = {(decision.dtype, decision.scheme) for decision in decisions.values()}
    numbers = {kind: target_of(*kind) for kind in kinds}
    if None in numbers.values():
        return None
    targets = np.array([numbers[decision.dtype, decision.scheme] for decision in decisions.values()], np.int16)
    copies = _columns(catalog, catalog.plain([*decisions], blocks=True), targets, None, threads)
    if copies is None:
        return None
    return copies._replace(
        texts=as_texts(metadata_for(catalog, request)) or None,
        extras=extras_for(catalog, request),
        decider=decider,
        decisions=[*decisions.values()],
        config=None if request.folder is None else decider.config(copies.schemes, {}),
    )


def _columns(
    catalog: Catalog, tensors: Tensors | None, targets: Array, rename: Renames, threads: int | None
) -> Copies | None:
    """Return the conversion of tensors without metadata, or None if it is not supported; see `target_of`."""
    spans = None if tensors is None else _spans(tensors, targets)
    if tensors is None or spans is None:
        return None
    names = [*renamed(tensors.names, rename).values()] if rename else tensors.names
    return Copies(catalog, names, tensors.names, tensors.shapes, spans, None, threads)


def _spans(tensors: Tensors, targets: Array) -> Spans | None:
    """Return the spans of tensors, or None if a conversion is not supported."""
    numbers = tensors.ranges.numbers
    targets = np.where(targets == AS_STORED, numbers, targets).astype(np.uint8)
    for pair in set((numbers.astype(np.uint16) << 8 | targets).tolist()):
        row, to = map(dtypes.of_number, divmod(pair, 256))
        converts = (to.floating and (row.floating or row.blocked)) or (to.blocked and row.floating)
        if row != to and not (converts and row.converts_to(to)):
            return None
    for to in map(dtypes.of_number, set(targets.tolist())):
        if to in dtypes.TABLE and to not in dtypes.SAFETENSORS:
            return None  # the writer refuses it by name
        shapes = (tensors.shapes[k] for k in np.flatnonzero(targets == to.number).tolist()) if to.blocked else ()
        if any(not shape or shape[-1] % to.block for shape in shapes):
            return None
    return Spans.of(tensors, targets)


class CopyWriter:
    """The writer of a file of copies."""

    def __init__(self, copies: Copies, written: Callable[[int], object]) -> None:
        numbers, shapes, described = copies.spans.targets.copy(), [*copies.shapes], {}
        for k in copies.in_blocks.tolist():
            row, shape = dtypes.of_number(int(numbers[k])), shapes[k]
            described[copies.names[k]] = {"scheme": row.name, "shape": list(shape), "axis": None}
            numbers[k], shapes[k] = _BYTES.number, dtypes.array_shape(row, shape, 0)
        texts = texts_with(copies.texts, described)
        self._header = Header(copies.names, numbers.tobytes(), shapes, texts, room=copies.room)
        self._spans = copies.spans.pick(self._header.order)
        self._copies = copies
        self._written = written
        self.size: int = self._header.nbytes + copies.nbytes

    def write_to(self, file: AtomicFile) -> None:
        try:
            self._write(file)
            return
        except RangeError as error:  # of a range of several tensors
            refused = error
        try:
            self._quantize_alone()
            raise refused
        finally:
            del refused  # it refers to this frame

    def _quantize_alone(self) -> None:
        """Quantize the tensors one by one, in the order of the file, to get the error of the first."""
        copies, blocks = self._copies, {*self._copies.in_blocks.tolist()}
        for k in self._header.order.tolist():
            source, target = (int(column[k]) for column in copies.spans.columns[3:])
            if k in blocks and source != target:
                scheme, shape, name = dtypes.of_number(target).name, copies.shapes[k], copies.reads[k]
                (dtype, stored), _ = storage_of(scheme, shape, None)
                data, values = np.empty(stored, dtype), copies.catalog.source(name)
                quantize_source(values, scheme, axis=None, rounding=None, data=data, threads=copies.threads)

    def _write(self, file: AtomicFile) -> None:
        header = [(self._header.address, self._header.nbytes)]
        with closing(self._spans.read(self._copies.threads)) as chunks:
            for chunk in chunks:  # the first chunk goes out together with the header
                file.write([*header, chunk])
                header = []
                self._written(chunk[1])
        if header:
            file.write(header)
