"""The tensors of a result: how each is made, in columns, when a writer reaches it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..adapters.adapter import Adapter, Fit, in_gguf, listed, opened
from ..adapters.base import AdapterTarget, Apart, Base, Heads, heads_of
from ..adapters.diffusion import Assembled
from ..adapters.merge import Merge, check_floating, in_rows, target_of, vocabulary_of, warn_of_config
from ..core import dtypes, jobs, packing
from ..core.arrays import Array, foreign_order
from ..core.atomic_file import AtomicFile, Digest
from ..core.described import pack, texts_with
from ..core.files import Location, check_unchanged, identity_of
from ..core.memory import private_array, windows
from ..core.names import Renames, renamed
from ..core.quantized_tensor import PartRows, storage_of
from ..core.registry import GGUF, SAFETENSORS, row_of
from ..core.runtime import paused
from ..core.safetensors import ROOM, Header
from ..core.staging import read_ahead
from ..core.tensors import Entry, Lazy, LazyParts, Spans, Tensors
from ..core.text import absolute, as_texts, debug, error_about, show
from ..errors import RangeError, SafeloadError, TensorNotFoundError, UnsupportedError
from ..formats.mixtures import ImportanceMatrix
from ..models.choosing import untied as without_ties
from ..models.choosing import with_vocabulary
from ..models.layout import LAYER, Layout, StackedTensor
from ..models.renamed import Divided
from ..quant.codes import blocks
from ..quant.families import presets
from . import quantize
from .catalog import Catalog, Made, RestructuredCatalog, TensorDescription
from .destinations import AnyTensor, ShardWriter, shard_bounds, writer_of
from .executors import in_memory
from .recipes import Move, TensorRecipe, TensorView
from .rules import Summary, vectors_for

_BYTES = dtypes.BY_CODE["U8"]
# Stands for the dtype number of a tensor that is copied.
AS_STORED = -1
# The fate of the codes of a source, if they are not rounded again.
COPIED, MOVED = "copied", "moved"
_SMALL = 64 << 10  # bytes of the largest tensor that is quantized in a group
# A group of small tensors fits into the caches, and is large enough that a tensor takes little time beside its bytes.
_GROUP_TENSORS, _GROUP_BYTES = 256, 1 << 20
_KEPT_BYTES = 16 << 20  # of scales that are kept until they are written
_MAX_DIGITS = 18  # of a layer number, because ``int`` refuses more than 4300
# Bytes of the widest integers that GPTQ and AWQ pack codes into.
_WIDEST_CODES = 4


class Decision(NamedTuple):
    """How a tensor of the result is made."""

    dtype: str | None = None  # code of the dtype to convert to; None leaves the tensor as stored
    scheme: str | None = None  # scheme to quantize to
    source: str = ""  # another name in the source: of the embedding of a head
    partners: tuple[str, ...] = ()  # weights in the source that share a scale with it, itself included
    codes: str = ""  # `COPIED` or `MOVED` if the codes of the source stay

    @property
    def target(self) -> int | None:
        """The dtype number that the core converts to, or `AS_STORED`; None unless a single conversion is enough."""
        if self.source or self.partners or self.codes or self.scheme == packing.INT8:
            return None
        if self.scheme is None:
            return AS_STORED if self.dtype is None else dtypes.BY_CODE[self.dtype].number
        return packing.SCHEMES[self.scheme].target(None) if self.scheme in packing.SCHEMES else None


class Outputs(NamedTuple):
    """Tensors to write, in columns. The core converts all tensors as it reads, or each is made by itself."""

    catalog: Catalog
    format: str
    threads: int | None
    reads: Sequence[str]  # names before ``rename``
    names: Sequence[str]  # in the result
    decided: Sequence[Decision]  # () if all tensors are only copied or cast
    shapes: Sequence[tuple[int, ...]] = ()  # with spans
    spans: Spans | None = None  # None if each tensor is made by itself
    made: Sequence[AnyTensor] = ()  # without spans
    maker: Maker | None = None  # without spans
    metadata: Mapping[Any, Any] = {}
    editable: bool = True  # False for the headers of engines, which have no room for changes
    # Of a whole result, beside its tensors.
    left_out: tuple[str, ...] = ()  # a sentence each about what the sources hold besides the tensors
    config: dict[str, Any] | None = None  # ``config.json`` of a folder; None if the source has none
    files: Mapping[str, Location | bytes] = {}  # other files of a folder: where to copy from, or the content
    summary: Summary | None = None  # the quantized tensors; None without ``quantize``
    parameters: int | None = None  # for the index of an engine that wants one for a single shard too
    restored: bool = False  # True if packed tensors are dequantized

    @property
    def tensor_count(self) -> int:
        """Number of tensors, without activation scales."""
        ignored = self.catalog.ignored
        return len(self.names) - (len(ignored.keys() & self.reads) if ignored else 0)

    @property
    def sizes(self) -> Sequence[int] | Array:
        """Bytes of each tensor."""
        return [output.nbytes for output in self.made] if self.spans is None else self.spans.lengths

    @property
    def nbytes(self) -> int:
        return int(sum(self.sizes)) if self.spans is None else int(self.spans.lengths.sum())

    @property
    def tensors(self) -> dict[str, AnyTensor]:
        """The tensors that are made by themselves, by name."""
        return dict(zip(self.names, self.made, strict=True))

    @property
    def stored(self) -> Collection[str]:
        """The names of the stored tensors; a quantized tensor is stored in several parts."""
        return self.names if self.spans is not None else pack(self.tensors, None, in_folder=True)[0]

    @property
    def texts(self) -> dict[str, str] | None:
        return (as_texts(self.metadata) or None) if self.metadata else None

    @property
    def in_blocks(self) -> list[int]:
        """With spans: positions of the tensors that are stored in blocks."""
        return [] if self.spans is None else (self.spans.targets >= len(dtypes.TABLE)).nonzero()[0].tolist()

    @property
    def schemes(self) -> tuple[str, ...]:
        """Safeload's schemes of quantized tensors."""
        if self.spans is None:
            return tuple(sorted({value.scheme for value in self.made if isinstance(value, LazyParts) and value.ours}))
        return tuple(sorted({dtypes.of_number(k).name for k in {*self.spans.targets[self.in_blocks].tolist()}}))

    @property
    def may_hold_codes(self) -> bool:
        """True if tensors can be codes that a ``config.json`` describes."""
        if self.spans is not None:
            numbers = [number for number in {*self.spans.targets.tobytes()} if number < len(dtypes.TABLE)]
            kinds = {*map(dtypes.array_dtype, numbers)}
        elif any(isinstance(output, LazyParts) and not output.ours for output in self.made):
            return True
        else:
            kinds = {output.dtype for output in self.made if isinstance(output, Lazy)}
        widths = {"i": _WIDEST_CODES, "u": _WIDEST_CODES, "b": 0}  # in bytes; 1 for all other kinds
        return any(kind.itemsize <= widths.get(kind.kind, 1) for kind in kinds)

    def divided(self, limit: int) -> dict[str, Outputs]:
        """Return the shards of a folder by file name, each at most ``limit`` bytes."""
        return {
            file: self._replace(
                reads=self.reads[rows],
                names=self.names[rows],
                decided=self.decided[rows],
                shapes=self.shapes[rows],
                spans=None if self.spans is None else self.spans.pick(rows),
                made=self.made[rows],
            )
            for file, rows in shard_bounds(self.sizes, limit).items()
        }

    def writer(self, written: Callable[[int], object]) -> ShardWriter:
        """Return the writer of a shard; it calls ``written`` with the bytes of tensors since the last call."""
        if self.spans is not None:
            return _CopyWriter(self, self.spans, written)
        with paused(len(self.names)):
            return writer_of(self._begun(written), self.texts, editable=self.editable)

    def write_file(
        self, path: str, overwrite: bool, written: Callable[[int], object], digest: Digest | None = None
    ) -> int:
        """Write a file in the format of the result and return its size; the writer must know ``digest``."""
        if self.spans is None:
            options: dict[str, Any] = {} if digest is None else {"digest": digest}
            row_of(self.format).write(self._begun(written), self.metadata, path, overwrite=overwrite, **options)
            return os.path.getsize(path)
        writer = _CopyWriter(self, self.spans, written)
        with AtomicFile(path, writer.size, overwrite=overwrite, digest=digest) as file:
            writer.write_to(file)
        return writer.size

    def _begun(self, written: Callable[[int], object]) -> dict[str, AnyTensor]:
        """Return the tensors for a new writer, which reports the bytes that it has written."""
        assert self.maker is not None
        reads = dict(zip(self.names, self.reads, strict=True))
        self.maker.begin(map(reads.__getitem__, sorted(reads) if self.format == SAFETENSORS else reads))
        for output in self.made:
            for lazy in output.roles.values() if isinstance(output, LazyParts) else (output,):
                lazy.written = written
        return self.tensors


def outputs_of(
    catalog: Catalog,
    decisions: Mapping[str, Decision],
    format: str,
    *,
    rename: Renames = None,
    threads: int | None = None,
    tensors: Tensors | None = None,  # plain or in blocks, as far as they are known already
    spans: Spans | None = None,  # of ``tensors``, in place of ``decisions``
    descriptions: Mapping[str, TensorDescription] | None = None,  # available already
    matrix: ImportanceMatrix | None = None,  # by names in the source
) -> Outputs:
    """Return the tensors as decided."""
    reads = [*decisions] if tensors is None or spans is None else tensors.names
    names, decided = [*renamed(reads, rename).values()] if rename else reads, [*decisions.values()]
    if spans is None and format == SAFETENSORS and matrix is None:
        targets = {decision: decision.target for decision in {*decided}}
        if None not in targets.values():
            tensors = catalog.plain(reads, blocks=True) if tensors is None else tensors.named(reads)
            if tensors is not None:
                numbers = np.array([targets[decision] for decision in decided], np.int16)
                numbers = np.where(numbers == AS_STORED, tensors.spans.sources, numbers).astype(np.uint8)
                spans = spans_of(tensors, numbers)
    if tensors is not None and spans is not None:
        return Outputs(catalog, format, threads, reads, names, decided, tensors.columns.shapes, spans)
    maker = Maker(catalog, decisions, format, threads=threads, descriptions=descriptions, matrix=matrix)
    outputs = [maker.output(name, decision) for name, decision in decisions.items()]
    return Outputs(catalog, format, threads, reads, names, decided, made=outputs, maker=maker)


def reads_of(names: Sequence[str], decided: Sequence[Decision]) -> Sequence[str]:
    """Return the names in the source of all tensors that these tensors depend on."""
    if not any(decision.source or decision.partners for decision in {*decided}):
        return names
    pairs = zip(names, decided, strict=True)
    return [*dict.fromkeys(read for name, each in pairs for read in (each.source or name, *each.partners))]


def runs_of(outputs: Outputs) -> list[dict[str, Any]]:
    """Return the decisions as plain data, with a single run for neighbours with equal decisions."""
    decided = outputs.decided
    if outputs.spans is not None and not decided:
        sources, numbers = outputs.spans.sources, outputs.spans.targets
        targets = np.where(sources == numbers, AS_STORED, numbers.astype(np.int16)).tolist()
        kinds = {k: Decision(None if k == AS_STORED else dtypes.BY_NUMBER[k].code) for k in {*targets}}
        decided = [kinds[target] for target in targets]
    runs = []
    for decision, group in groupby(zip(decided, outputs.reads, strict=True), itemgetter(0)):
        run = {key: value for key, value in zip(Decision._fields, decision, strict=True) if value}
        runs.append({"names": [name for _, name in group], **run})
    return runs


def decisions_of(runs: Iterable[Mapping[str, Any]]) -> dict[str, Decision]:
    """Return the decisions of `runs_of`."""
    decisions: dict[str, Decision] = {}
    for run in runs:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in run.items() if k != "names"}
        decisions.update(dict.fromkeys(run["names"], Decision(**fields)))
    return decisions


# ---- in columns ----


def spans_of(tensors: Tensors, targets: Array) -> Spans | None:
    """Return the spans of tensors, or None if the core does not convert each in one step."""
    for pair in {*zip(tensors.spans.sources.tobytes(), targets.tobytes(), strict=True)}:
        row, to = map(dtypes.of_number, pair)
        converts = row is to or (to.floating and (row.floating or row.blocked)) or (to.blocked and row.floating)
        if not (converts and (row is to or row.converts_to(to))):
            return None
        if to in dtypes.TABLE and to not in dtypes.SAFETENSORS:
            return None  # the writer refuses it by name
        if to.blocked:
            shapes = tensors.columns.shapes
            rows = {shapes[k][-1:] for k in np.flatnonzero(targets == to.number).tolist()}
            if () in rows or any(length % to.block for (length,) in rows):
                return None
    return tensors.spans._replace(targets=targets)


class _CopyWriter:
    def __init__(self, outputs: Outputs, spans: Spans, written: Callable[[int], object]) -> None:
        numbers, shapes, described = spans.targets.copy(), [*outputs.shapes], {}
        for k in outputs.in_blocks:
            row, shape = dtypes.of_number(int(numbers[k])), shapes[k]
            described[outputs.names[k]] = {"scheme": row.name, "shape": list(shape), "axis": None}
            numbers[k], shapes[k] = _BYTES.number, dtypes.array_shape(row, shape, 0)
        texts: Mapping[str, str] | None = outputs.texts
        texts, room = texts_with(texts, described) if texts or described else None, ROOM if outputs.editable else 0
        self._header = Header(outputs.names, numbers.tobytes(), shapes, texts, room=room)
        self._outputs = outputs
        self._spans = spans
        self._written = written
        self.size: int = self._header.nbytes + int(spans.lengths.sum())

    def write_to(self, file: AtomicFile) -> None:
        header, outputs = [(self._header.address, self._header.nbytes)], self._outputs
        try:
            with closing(read_ahead(self._spans.pick(self._header.order), outputs.threads)) as chunks:
                for chunk in chunks:  # the first chunk goes out together with the header
                    file.write([*header, chunk])
                    header = []
                    self._written(chunk[1])
            if header:
                file.write(header)
            return
        except RangeError as error:
            refused = error
        try:  # of a range of several tensors: quantize one by one, in the order of the file, to get the first error
            blocks = {*outputs.in_blocks}
            for k in self._header.order.tolist():
                source, target = (int(column[k]) for column in self._spans[4:])
                if k in blocks and source != target:
                    values, scheme = outputs.catalog.source(outputs.reads[k]), dtypes.of_number(target).name
                    quantize.quantize_source(values, scheme, axis=None, rounding=None, threads=outputs.threads)
            raise refused
        finally:
            del refused  # it refers to this frame


# ---- tensor by tensor ----


class Maker:
    """Turns decisions into lazy outputs; small tensors are quantized in groups, in the order of the writer."""

    def __init__(
        self,
        catalog: Catalog,
        decisions: Mapping[str, Decision],  # by the names for messages
        format: str,
        *,
        threads: int | None,
        descriptions: Mapping[str, TensorDescription] | None = None,  # available already
        matrix: ImportanceMatrix | None = None,  # by names in the source
    ) -> None:
        self._catalog = catalog
        self._decisions = decisions
        self._descriptions = {} if descriptions is None else descriptions
        self._format = format
        self._rounding: quantize.Rounding | None = "ggml" if format == "gguf" else None
        self._threads = threads
        self._scratch, self._codes = quantize.Scratch(), quantize.Scratch()
        self._free: list[quantize.Scratch] = []  # for the threads that quantize a weight
        self._kept_parts: dict[str, dict[str, Array]] = {}  # computed parts that have not been written, by tensor
        self._kept_bytes = 0
        self._maxima: dict[tuple[str, ...], float] = {}  # largest magnitudes, by weights
        self._entries: dict[str | None, dict[str, Entry]] = {}
        self._quantized: dict[str, tuple[LazyParts, Callable[[], Any]]] = {}  # by name, with the values
        self._small: dict[str, int] = {}  # bytes of each tensor quantized in a group
        self._groups: dict[str, list[str]] = {}  # of small tensors, by name
        self._grouped: dict[tuple[str, str], Array] = {}  # of a group, by part and name
        quantized = (name for name, decision in decisions.items() if decision.scheme is not None)
        shapes = {} if matrix is None else {name: self._about(name).shape for name in quantized}
        self._importance = {} if matrix is None else vectors_for(matrix, shapes)

    def output(self, name: str, decision: Decision) -> AnyTensor:
        source = decision.source or name
        if source not in self._catalog:
            return _stored(self._catalog.ignored[source], self._threads)
        tensor, scheme = self._about(source), decision.scheme
        if scheme in presets():
            return self._encoded(source, decision, tensor)
        if scheme is not None and decision.codes:
            return _quantized_later(scheme, tensor.shape, None, partial(self._in_blocks, scheme, source), lambda: None)
        if scheme is not None:
            codes, scale = partial(self._in_group, packing.CODES, name), partial(self._in_group, packing.SCALE, name)
            output = _quantized_later(scheme, tensor.shape, packing.usual_axis(scheme, tensor.shape), codes, scale)
            if small := name not in self._importance and self._is_small(source, tensor):
                self._small[name] = tensor.nbytes
            room = private_array if small else self._scratch.array
            self._quantized[name] = output, partial(self._catalog.values, source, name, room=room)
            return output
        if decision.dtype is None and tensor.packed:
            return self._packed(source, tensor)
        if decision.dtype is None and tensor.scheme is not None:
            stored: Any = partial(self._catalog.stored, source)
            return _quantized_later(
                tensor.scheme, tensor.shape, tensor.axis, lambda: stored().data, lambda: stored().scale
            )
        row = tensor.row if decision.dtype is None else dtypes.BY_CODE[decision.dtype]
        if row.packed:
            text = f"is {row.code}, which NumPy does not support: pass dtype="
            raise error_about(UnsupportedError, text, tensor=source)
        dtype, shape = dtypes.array_dtype(row.number), tensor.shape

        def read() -> Array:
            array = self._scratch.array(shape, dtype)
            self._catalog.read_into(source, row, array, self._threads)
            return array

        return Lazy(dtype, shape, read, self._staged(source, decision.dtype, row), self._threads)

    def _about(self, source: str) -> TensorDescription:
        return self._descriptions.get(source) or self._catalog.about(source)

    def _staged(self, source: str, code: str | None, row: dtypes.Dtype) -> Entry | None:
        """Return the staged read for the safetensors writer, or None if the tensor must be built in memory."""
        if self._format != SAFETENSORS:
            return None
        if code not in self._entries:  # single lookups take longer than reading small tensors
            items = (
                (name, each) for name, each in self._decisions.items() if each.scheme is None and each.dtype == code
            )
            plain = (each.source or name for name, each in items)
            names = [each for each in plain if each in self._catalog]
            self._entries[code] = self._catalog.described(names, None if code is None else dtypes.BY_CODE[code])
        entry = self._entries[code].get(source)
        return None if entry is None or entry.target != row.number else entry

    def _in_blocks(self, scheme: str, source: str) -> Array:
        return blocks(scheme, self._catalog.coded(source), self._threads)

    def _encoded(self, source: str, decision: Decision, tensor: TensorDescription) -> LazyParts:
        """Return a weight to quantize for an engine when it is written, or with its codes as they are."""
        if decision.codes == COPIED:
            preset, (_, _, stored) = presets()[decision.scheme or ""], self._as_stored(source)
            copied = {part.suffix: stored[role] for role, part in preset.parts.items()}
            return LazyParts(preset.name, tensor.shape, copied, encoded=True)
        encoding = self._encoding(source, decision, tensor.shape)
        constants = encoding.constants()

        def make(role: str) -> Array:
            if role in constants:
                return constants[role]
            return self._part_of(encoding, decision, role)

        roles = encoding.preset.parts.items()
        parts = {part.suffix: Lazy(*encoding.stored(role), partial(make, role)) for role, part in roles}
        return LazyParts(encoding.preset.name, tensor.shape, parts, encoded=True)

    def _encoding(self, source: str, decision: Decision, shape: tuple[int, ...]) -> quantize.Encoding:
        assert decision.scheme is not None
        assert decision.dtype is not None
        return quantize.Encoding(source, presets()[decision.scheme], shape, dtypes.BY_CODE[decision.dtype])

    def encoded(self, source: str, decision: Decision) -> tuple[quantize.Encoding, dict[str, Array]]:
        """Quantize a weight for an engine at once: its parts that depend on values, by role."""
        encoding = self._encoding(source, decision, self._about(source).shape)
        dtype, shape = encoding.stored(packing.CODES)
        roles = [role for role in encoding.preset.parts if role not in encoding.constants()]
        return encoding, self._parts(encoding, decision, roles, private_array(shape, dtype))

    def _parts(
        self, encoding: quantize.Encoding, decision: Decision, roles: Collection[str], codes: Array | None
    ) -> dict[str, Array]:
        """Move these parts of a weight, or make all that depend on values; the codes only into ``codes``."""
        if decision.codes == MOVED:  # reading a part takes less time than the pages that would keep it
            return quantize.moved(
                encoding, self._catalog.coded(encoding.name), roles, codes=codes, threads=self._threads
            )
        has_global = packing.GLOBAL in encoding.preset.parts
        largest = self._largest(encoding, decision.partners) if has_global else None
        weights = self._weights(encoding.name, encoding.row)
        return quantize.encode(encoding, weights, largest=largest, codes=codes, threads=self._threads)

    def _largest(self, encoding: quantize.Encoding, partners: tuple[str, ...]) -> float:
        """Return the largest magnitude of the weights that share a global scale."""
        names = partners or (encoding.name,)
        if names not in self._maxima:
            sharing = (encoding._replace(name=other, shape=self._about(other).shape) for other in names)
            weights = ((each, self._weights(each.name, each.row)) for each in sharing)
            self._maxima[names] = max(quantize.largest_in(each, values, self._threads) for each, values in weights)
        return self._maxima[names]

    def _part_of(self, encoding: quantize.Encoding, decision: Decision, role: str) -> Array:
        name = encoding.name
        kept = self._kept_parts.get(name, {}).pop(role, None)
        if kept is not None:
            self._kept_bytes -= kept.nbytes
            return kept
        if role == packing.GLOBAL and decision.codes != MOVED:
            largest = self._largest(encoding, decision.partners)
            return jobs.native_order(np.array([quantize.global_scale(largest, encoding.row)]))
        dtype, shape = encoding.stored(role)
        codes = self._codes.array(shape, dtype) if role == packing.CODES else None
        parts = self._parts(encoding, decision, (role,), codes)
        # Files hold all codes before or after all scales: small parts are kept until then, large ones are made again.
        scales = {other: part for other, part in parts.items() if other not in (role, packing.CODES)}
        nbytes = sum(part.nbytes for part in scales.values())
        if self._kept_bytes + nbytes <= _KEPT_BYTES:
            self._kept_parts[name] = scales
            self._kept_bytes += nbytes
        return parts[role]

    def _weights(self, name: str, row: dtypes.Dtype) -> quantize.Weights:
        return quantize.weights_in(self._catalog, name, row, self._free, self._scratch.array, threads=self._threads)

    def _as_stored(self, name: str) -> tuple[packing.Packing, Mapping[str, str], dict[str, Lazy]]:
        """Return a packed tensor with the names and the lazy parts of its roles."""
        _, file, number = self._catalog.place(name)
        packed = None if file is None else file.table.packed.get(number)
        if packed is not None:  # read in chunks, never mapped
            parts = {role: _stored(part, self._threads) for role, part in packed.parts.items()}
            return packed.packing, packed.names(name), parts
        value = self._catalog.value(name)
        roles = value.roles.items()
        parts = {role: Lazy(part.dtype, part.shape, partial(np.ascontiguousarray, part)) for role, part in roles}
        return value.packing, value.names, parts

    def _packed(self, name: str, tensor: TensorDescription) -> LazyParts:
        described, names, parts = self._as_stored(name)
        if self._format != SAFETENSORS and (self._format, described.family) != ("gguf", packing.GGUF):
            text = f"is {tensor.scheme}, which {self._format} files cannot store: pass dtype="
            raise error_about(UnsupportedError, text, tensor=name)
        return LazyParts(described.label, described.shape, parts, packing=described, names=names)

    # ---- small tensors ----

    def _is_small(self, source: str, tensor: TensorDescription) -> bool:
        """Return True if a tensor can be quantized in a group: it is small, plain, and in a local file."""
        if tensor.nbytes > _SMALL or not tensor.floating or tensor.scheme is not None:
            return False
        file = self._catalog.place(source).file if not self._catalog.makes else None
        return file is not None and not file.remote

    def begin(self, names: Iterable[str]) -> None:
        """Divide small tensors into groups, in the order in which a writer asks for them; else each is alone."""
        schemes = {name: self._quantized[name][0].scheme for name in names if name in self._small}
        sizes = {name: max(_GROUP_BYTES // _GROUP_TENSORS, self._small[name]) for name in schemes}
        ordered = sorted(schemes, key=schemes.__getitem__)  # neighbours in a group have one scheme
        groups = windows(ordered, _GROUP_BYTES, sizes.__getitem__, schemes.__getitem__)
        self._groups = {name: group for group in groups for name in group}

    def _in_group(self, part: str, name: str) -> Array:
        """Return codes or scales of a tensor, made with its group, or alone if there is no group or the group fails."""
        if (part, name) not in self._grouped:
            group, arrays = self._groups.get(name, [name]), {}
            if len(group) > 1:
                try:
                    arrays = self._together(part, group)
                except Exception as error:
                    debug("a group of %d small tensors failed: %s", len(group), error)
                    self._groups.clear()  # so that the writer gets the error of the tensor that it asks for
            arrays = arrays or {name: self._alone(part, name)}
            self._grouped.update({(part, other): array for other, array in arrays.items()})
        return self._grouped.pop((part, name))

    def _alone(self, part: str, name: str) -> Any:
        output, values = self._quantized[name]
        result = quantize.quantize_source(
            values(),  # may occupy the scratch memory
            output.scheme,
            axis=output.axis,
            rounding=self._rounding,
            data=self._codes.array(output.roles[packing.CODES].shape, output.roles[packing.CODES].dtype),
            threads=self._threads,
            importance=self._importance.get(name),
        )
        return result.data if part == packing.CODES else result.scale

    def _together(self, part: str, group: Sequence[str]) -> dict[str, Array]:
        tensors = [(output, values()) for output, values in map(self._quantized.__getitem__, group)]
        if part == packing.CODES:
            requests = [
                quantize.quantizing(values, output.scheme, output.axis, self._rounding) for output, values in tensors
            ]
            quantize.run_requests(requests, threads=self._threads, progress=None)
            return {name: request.result.data for name, request in zip(group, requests, strict=True)}
        maxima = quantize.maxima_of([(values, output.axis) for output, values in tensors], self._threads)
        shapes = [output.roles[packing.SCALE].shape for output, _ in tensors]
        return {
            name: quantize.scales_of(bits)[0].reshape(s) for name, bits, s in zip(group, maxima, shapes, strict=True)
        }


def _quantized_later(
    scheme: str, shape: tuple[int, ...], axis: int | None, codes: Callable[[], Array], scale: Callable[[], Any]
) -> LazyParts:
    """Return a quantized tensor whose codes and scale are made when they are written."""
    data, scales = storage_of(scheme, shape, axis)
    roles = {packing.CODES: Lazy(*data, codes)}
    if scales is not None:
        roles[packing.SCALE] = Lazy(*scales, scale)
    return LazyParts(scheme, shape, roles, axis=axis)


def _stored(part: packing.Part, threads: int | None) -> Lazy:
    number = part.row.number
    dtype, shape = dtypes.array_dtype(number), dtypes.array_shape(part.row, part.shape, part.end - part.begin)
    entry = Entry(part.name, part.file, -1, part.begin, part.end, shape, number, number)
    return Lazy(dtype, shape, lambda: PartRows(part).whole(), None if foreign_order(False) else entry, threads)


# ---- layouts ----


def stacked(
    catalog: Catalog,
    tensors: Mapping[str, TensorDescription],  # of the catalog, for the layout
    layout: Layout,
    target: dtypes.Dtype | None,
) -> RestructuredCatalog:
    """Return the tensors of a layout, checking every name and shape."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a safeload.Layout, got {type(layout).__name__}")
    layers = {entry.source: _layers_of(tensors, entry) for entry in layout.tensors if entry.stacked}
    counts: dict[str, int] = {}
    for source, numbers in layers.items():
        prefix = source.split(LAYER)[0]
        counts[prefix] = max(counts.get(prefix, 0), 1 + max(numbers, default=-1))
    recipes = {
        entry.name: _recipe_of(entry, tensors, layers.get(entry.source), counts, target) for entry in layout.tensors
    }
    return RestructuredCatalog(catalog, recipes)


def _layers_of(tensors: Mapping[str, TensorDescription], entry: StackedTensor) -> set[int]:
    """Return the numbers of the layers that match an entry."""
    prefix, suffix = entry.source.split(LAYER)
    pattern = re.compile(f"{re.escape(prefix)}([0-9]+){re.escape(suffix)}", re.ASCII)
    layers = set()
    for name, digits in ((match[0], match[1]) for match in map(pattern.fullmatch, tensors) if match is not None):
        if len(digits) > _MAX_DIGITS:
            shown = repr(name if len(name) <= 40 else f"{name[:40]}...")
            raise SafeloadError(f"{show(entry.name)}: {shown} has a layer number with {len(digits)} digits")
        if digits != str(int(digits)):
            raise SafeloadError(
                f"{show(entry.name)}: {show(name)} has a layer number with leading zeros: {show(digits)}"
            )
        layers.add(int(digits))
    return layers


def _recipe_of(
    entry: StackedTensor,
    tensors: Mapping[str, TensorDescription],
    layers: set[int] | None,  # that match the entry; None if it has no layer axis
    counts: Mapping[str, int],  # of layers, by the prefix of their names, over all entries
    target: dtypes.Dtype | None,
) -> TensorRecipe:
    names, at = [entry.source], f"{show(entry.name)}: "
    if layers is not None:
        prefix, suffix = entry.source.split(LAYER)
        if not layers:
            raise TensorNotFoundError(f"{at}no tensor matches {show(entry.source)} with a layer number")
        count = counts[prefix]
        if len(layers) < count:  # checked before the names are built, because a large number can imply any count
            missing = next(k for k in range(count) if k not in layers)
            name = show(f"{prefix}{missing}{suffix}")
            raise TensorNotFoundError(f"{at}layer {missing} of {count} is missing: no tensor {name}")
        names = [f"{prefix}{k}{suffix}" for k in range(count)]
    elif entry.source not in tensors:
        raise TensorNotFoundError(f"{at}no tensor {show(entry.source)}")
    shape, shown = tensors[names[0]].shape, show(names[0])
    for name in names[1:]:
        if tensors[name].shape != shape:
            text = f"{shown} has shape {list(shape)}, but {show(name)} has {list(tensors[name].shape)}"
            raise SafeloadError(at + text, tensor=name)
    rows = [_result_row(name, tensors[name], target) for name in names]
    for name, row in zip(names, rows, strict=True):
        if row is not rows[0]:
            text = f"{shown} is {rows[0].name}, but {show(name)} is {row.name}: pass dtype="
            raise SafeloadError(at + text, tensor=name)
    if entry.transpose and len(shape) != 2:
        text = f"{shown} has shape {list(shape)}: only matrices can be transposed"
        raise UnsupportedError(at + text, tensor=names[0])
    layer = shape[::-1] if entry.transpose else shape
    read = TensorView(transposed=entry.transpose)
    moves = tuple(Move(name, read, TensorView(k if entry.stacked else None)) for k, name in enumerate(names))
    return TensorRecipe((len(names), *layer) if entry.stacked else layer, moves, rows[0].code)


def _result_row(name: str, tensor: TensorDescription, target: dtypes.Dtype | None) -> dtypes.Dtype:
    if target is not None and (tensor.row.floating or tensor.scheme is not None):
        return target
    if tensor.scheme is not None or tensor.row.packed:
        text = f"is {tensor.scheme or tensor.row.name}: pass dtype= to stack its values"
        raise error_about(UnsupportedError, text, tensor=name)
    return tensor.row


# ---- adapters ----


def _target(catalog: Catalog, name: str) -> AdapterTarget:
    place = catalog.place(name)
    if place.file is not None:
        return target_of(place.origin, name)
    about = catalog.about(name)
    if not about.quantized:
        check_floating(name, about.row, None)
    work = np.dtype(np.float64 if about.row.code == "F64" and not about.quantized else np.float32)

    source = None if about.quantized else in_rows(catalog.in_place(name), work)
    row = None if about.quantized else about.row
    return AdapterTarget(
        name, about.shape, row, work, lambda at: catalog.array(name)[at].astype(work), about.quantized, source
    )


def _merged(
    catalog: Catalog,
    adapters: Sequence[Adapter],
    heads: Heads,
    fits: Sequence[Fit] | None = None,
    places: Mapping[str, Any] | None = None,
) -> Catalog:
    """Return a catalog with adapters merged into its tensors, in float32, when a tensor is read."""
    # The embedding of each untied head that is not stored.
    aliases = {head: embedding for head, embedding in heads.untied.items() if head not in catalog}
    whole = catalog.with_aliases(aliases)
    names = {**dict.fromkeys(catalog), **aliases}  # a piece has more in its files
    target = partial(_target, whole)
    base = Base(
        whole.title,
        names,
        whole.config,
        lambda name: whole.about(name).shape,
        target,
        heads=heads.pairs,
        places=places,
    )
    merge = Merge(base, adapters, heads, fits=fits)
    grown = {name: target for name, target in merge.base.grown.items() if name in merge}
    added = dict.fromkeys((name for name in grown if name not in names), next(iter(catalog), ""))
    whole, aliases = whole.with_aliases(added), {**aliases, **added}
    result = Catalog.of(whole)
    result.makes, result.merge, result.aliases = True, merge, aliases
    for name in merge.changes:
        about = whole.about(name)
        if name in grown:
            about, row = about._replace(shape=grown[name].shape), grown[name].row
            if row is not None:
                about = TensorDescription(name, row.name, about.shape, row.nbytes(math.prod(about.shape)), row, True)
        work = dtypes.BY_CODE["F64" if about.row.code == "F64" else "F32"]
        if not about.packed and (about.quantized or about.row.packed):  # merging turns blocks into numbers
            about = TensorDescription(name, work.name, about.shape, work.nbytes(math.prod(about.shape)), work, True)
        result.rows[name] = Made(partial(merge.values, name), work, about)
    if heads.untied and result.config is not None:
        result.config = without_ties(result.config)
    if (sizes := vocabulary_of(merge)) is not None and result.config is not None:
        result.config = with_vocabulary(result.config, *sizes)
    return result


def merged(
    stack: ExitStack,  # closes the adapters
    catalog: Catalog,
    adapters: Any,
    storage_options: Mapping[str, Any] | None = None,
    *,
    with_config: bool = False,  # True if the result has a config.json, which can untie the head
) -> Catalog:
    """Return a catalog with adapters merged, or the catalog itself if there are no adapters."""
    weighted = listed(adapters)
    if not weighted:
        return catalog
    opened_adapters: Sequence[Adapter] = opened(stack, weighted, storage_options)
    if catalog.format == GGUF or any(map(in_gguf, opened_adapters)):
        from .adapter_forms import for_base  # only here: most adapters have the names of their base

        opened_adapters = for_base(opened_adapters, catalog)
    heads = heads_of(opened_adapters, catalog.config, {name for name in catalog if isinstance(name, str)})
    result = _merged(catalog, opened_adapters, heads)
    if not with_config or catalog.config is None:
        assert result.merge is not None
        warn_of_config(result.merge, catalog.config)
    return result


# Where a base has the tensors that adapters change, by the key of a plan.
_PLACES: dict[str, type[Any]] = {"apart": Apart, "divided": Divided, "assembled": Assembled, "renamed": str}


def planned_adapters(catalog: Catalog) -> list[dict[str, Any]]:
    """Return the adapters of a catalog as plain data: a piece has too few tensors to fit them again."""
    if catalog.merge is None:
        return []
    merge, adapters = catalog.merge, []
    items = merge.base.places.items()
    places = {key: {name: place for name, place in items if isinstance(place, kind)} for key, kind in _PLACES.items()}
    for adapter, fit in zip(merge.adapters, merge.fits, strict=True):
        if adapter.fit is not None:
            text = f"{adapter.checkpoint.path}: an adapter in another form than its base, or with a base in GGUF, is "
            raise UnsupportedError(f"{text}not merged in pieces: merge it first, without executor= and resume=")
        if adapter.checkpoint.weight_files[0].files.remote:
            raise in_memory("an adapter from a URL is open", "a conversion in pieces")
        paths = [*(file.place for file in adapter.checkpoint.weight_files), adapter.config_at.path]
        adapters.append(
            {
                "files": [[absolute(path), *identity_of(os.stat(path))[:2]] for path in paths],  # the config comes last
                "weight": adapter.weight,
                "parameters": fit.parameters,
                "transposed": sorted(fit.transposed),
                **places,
                "tied": merge.heads.pairs,
                "untied": catalog.aliases,
            }
        )
    return adapters


def reopened(
    stack: ExitStack, catalog: Catalog, adapters: Sequence[Mapping[str, Any]], untied: Mapping[str, str]
) -> Catalog:
    """Return a catalog with the adapters of a piece merged; ``untied`` are its untied heads, with their embeddings."""
    weighted, fits = [], []
    for adapter in adapters:
        for path, size, version in adapter["files"]:
            check_unchanged(path, (size, version))
        paths = [path for path, _, _ in adapter["files"]]
        weighted.append((paths[0] if len(paths) == 2 else paths[:-1], adapter["weight"]))
        fits.append(Fit(adapter["parameters"], frozenset(adapter["transposed"]), {}))
    base = adapters[0]  # all were fitted to one base
    tables = ((kind, base[key].items()) for key, kind in _PLACES.items())
    places = {name: place if kind is str else kind(*place) for kind, table in tables for name, place in table}
    heads = {name: embedding for name, embedding in untied.items() if name in base["tied"]}
    added = {name: stored for name, stored in untied.items() if name not in heads}
    return _merged(
        catalog.with_aliases(added), opened(stack, weighted), Heads(base["tied"], heads, added), fits, places
    )
