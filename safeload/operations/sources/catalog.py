"""Tensors by name, from checkpoints of any format, dicts of arrays, or several of both.

Operations work on a `Catalog`: only this module distinguishes a `Checkpoint` from a dict.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from operator import add, itemgetter, sub
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, as_array
from ...base.cached import cached_property
from ...base.gc_pause import paused
from ...base.messages import error_about
from ...base.packing import Part
from ...base.paths import PathLike
from ...base.scheme import INT8
from ...base.selecting import Patterns, choose, select
from ...base.table import Unknown, missing
from ...base.text import check_name
from ...checkpoint import (
    Checkpoint,
    codes_of,
    folder_of,
    index_of,
    opened_as_stored,
    tensors_of,
    with_aliases,
)
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source, in_file, of_array, of_numbers, of_packed
from ...engine.read.load import Backend
from ...engine.read.tensors import Entry, FileTensor, Tensors, entries_of, packed_of
from ...engine.run import jobs
from ...engine.run.memory import address_of
from ...engine.run.weight_file import WeightFile
from ...errors import SafeloadError
from ...loading.entry import open
from ...packed import finder
from ...packed.families import Stored
from ...packed.finder import Codes
from ...packed.quantization import Quantization, quantization_of
from ...stores.files import Location
from ...stores.places import Located, is_file_object, is_located
from .description import TensorDescription, about_value, stored_as

if TYPE_CHECKING:
    from ...formats.verifying import Verify


# Fields of the description of a plain tensor by dtype number: the name of the dtype, and all after its bytes.
_PLAIN_FIELDS = {number: (row.name, (row, row.floating, None, None, False)) for number, row in dtypes.BY_NUMBER.items()}


class Made(NamedTuple):
    """A tensor that is made when it is read."""

    fill: Callable[[dtypes.Dtype, Array, int | None], object]  # an array with its values in a dtype, on some threads
    work: dtypes.Dtype  # in which values are not rounded yet


class TensorPlace(NamedTuple):
    """The origin of a tensor, and its file."""

    origin: Checkpoint | Mapping[str, Any]
    file: WeightFile | None = None  # None for a dict
    number: int = 0  # index in the table of the file

    @property
    def title(self) -> str:
        """The origin in messages."""
        return "a dict" if self.file is None else self.file.path


class Catalog:
    """The tensors of checkpoints and dicts by name, in their order. `of` creates it; leaving it closes its files."""

    kept_f32: Collection[str] = ()  # names that stay float32 whatever dtype is requested
    texts: Mapping[str, bytes] = {}  # further files of the result, by name

    def __init__(
        self,
        origins: Sequence[Checkpoint | Mapping[str, Any]],
        mapped: bool = True,  # False to read packed tensors even if they stay packed, instead of mapping their files
        names: Collection[str] | None = None,  # to include from a single checkpoint
    ) -> None:
        self._origins = tuple(origins)
        self.mapped = mapped
        self.checkpoints: list[Checkpoint] = []
        self.files: list[str] = []
        self.weight_files: list[WeightFile] = []
        self.config: dict[str, Any] | None = None  # the first nonempty config
        # Activation scales: files hold them, but they are not tensors of the catalog.
        self.ignored: dict[str, Part] = {}
        titles: list[str] = []
        formats: set[str | None] = set()
        for origin in origins:
            if isinstance(origin, Checkpoint):
                self.checkpoints.append(origin)
                self.files += origin.files
                self.weight_files += origin.weight_files
                self.ignored.update(origin.ignored)
                if not self.config and origin.config is not None:
                    self.config = origin.config
            else:
                for name in origin:
                    check_name(name)
            titles.append(origin.path if isinstance(origin, Checkpoint) else "dict")
            formats.add(origin.format if isinstance(origin, Checkpoint) else None)
        self.title = titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"  # for messages
        self.format = formats.pop() if len(formats) == 1 else None  # None for dicts and mixed formats
        self.in_memory = len(self.checkpoints) < len(origins)  # whether an origin is a dict
        self._single = self.checkpoints[0] if len(origins) == len(self.checkpoints) == 1 else None
        self._names = None if self._single is None else names
        self._known: Collection[Any]
        if self._names is not None:
            self._known = dict.fromkeys(self._names)
        else:
            self._known = self._places if self._single is None else self._single  # refuses duplicate names at once
        self._owned = ExitStack()

    @cached_property
    def index(self) -> Location | None:
        """The index of a single origin."""
        return None if self._single is None else index_of(self._single)

    @cached_property
    def folder(self) -> Location | None:
        """The folder of a single origin."""
        return None if self._single is None else folder_of(self._single)

    @classmethod
    def of(
        cls,
        source: Given | Sequence[Given],
        storage_options: Mapping[str, Any] | None = None,
        verify: Verify = None,
    ) -> Catalog:
        """Return the catalog of an operation's input; it closes files that it opens, but no checkpoint or catalog."""
        if isinstance(source, Catalog) and not verify:
            return cls(source._origins, source.mapped)
        sources: Sequence[Given] = source if isinstance(source, (list, tuple)) else [source]  # type: ignore[list-item]
        if not sources:
            raise ValueError("the list of sources is empty; pass at least one")
        origins: list[Checkpoint | Mapping[str, Any]] = []
        with ExitStack() as stack:
            for item in sources:
                if isinstance(item, (Mapping, Catalog)):
                    if verify is not None and verify is not False:
                        raise ValueError("verify= needs paths: a checkpoint is verified when it is opened")
                    origins += item._origins if isinstance(item, Catalog) else [item]
                else:
                    origins.append(stack.enter_context(open(item, storage_options=storage_options, verify=verify)))
            catalog = cls(origins)
            catalog._owned = stack.pop_all()
        return catalog

    def as_stored(self) -> Catalog:
        """Return a catalog of a single checkpoint that shows the tensors as its files store them; it closes both."""
        checkpoint = opened_as_stored(self.checkpoints[0])
        catalog = Catalog([checkpoint], self.mapped)
        catalog._owned.push(self)
        catalog._owned.enter_context(checkpoint)
        return catalog

    def with_aliases(self, aliases: Mapping[str, str]) -> Catalog:
        """Return a catalog with tensors under second names, the keys of ``aliases``."""
        origins: list[Checkpoint | Mapping[str, Any]] = []
        for origin in self._origins:
            names = {alias: name for alias, name in aliases.items() if name in origin}
            if isinstance(origin, Checkpoint):
                origins.append(with_aliases(origin, names) if names else origin)
            else:
                origins.append({**origin, **{alias: origin[name] for alias, name in names.items()}})
        return Catalog(origins, self.mapped)

    def among(self, names: Collection[str]) -> Catalog:
        """Return a catalog with distinct ``names`` of a checkpoint, so that the rest of its files is not decoded."""
        return Catalog(self._origins, self.mapped, names)

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owned.close()

    @cached_property
    def _places(self) -> dict[str, TensorPlace]:
        return _places_of(self._origins, self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    @cached_property
    def metadata(self) -> Mapping[Any, Any]:
        """Metadata of all origins, without the total_size of indexes. The last value of a duplicate key wins."""
        if len(self.checkpoints) == 1 and self.checkpoints[0].index is None:
            return self.checkpoints[0].metadata  # values of a GGUF file are unpacked on access
        merged: dict[Any, Any] = {}
        for checkpoint in self.checkpoints:
            indexed = checkpoint.index is not None
            items = checkpoint.metadata.items()
            merged.update((k, v) for k, v in items if not indexed or k != "total_size" or isinstance(v, str))
        return merged

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; int8 scales in files do not count."""
        in_memory = sum(self.about(name).nbytes for name, place in self._places.items() if place.file is None)
        return in_memory + sum(checkpoint.nbytes for checkpoint in self.checkpoints)

    def entries(self) -> list[FileTensor]:
        """Return name, file and index of the tensors stored in files."""
        return [(name, place.file, place.number) for name, place in self._places.items() if place.file is not None]

    def plain(self, names: Collection[str] | None = None, *, blocks: bool = False) -> Tensors | None:
        """Return tensors if all are plain tensors of checkpoints, or ``blocks`` of known types; else None."""
        if self.in_memory or not self.checkpoints or self.ignored:
            return None
        tables = [file.table for file in self.weight_files]
        readable = [table for table in tables if not (table.shaped or (table.scaled if blocks else table.quantized))]
        if (tables and not readable) or (blocks and [table for table in tables if table.unknown]):
            return None
        with paused(len(self)):
            if len(self.checkpoints) == 1:
                tensors = tensors_of(self.checkpoints[0], self._names if names is None else names)
            else:
                where = {name: (file, number) for name, file, number in self.entries()}
                tensors = Tensors.located(where, None if names is None else [*names])
            return tensors if (tensors.whole if blocks else tensors.plain) else None

    def place(self, name: str) -> TensorPlace:
        """Return the place of a tensor."""
        return self._places[name]

    def check(self, names: Iterable[str]) -> None:
        """Refuse unknown names."""
        if isinstance(self._known, Checkpoint):
            tensors_of(self._known, names)  # looks all of them up
            return
        for name in names:
            if name not in self:
                raise missing(name, [key for key in self if isinstance(key, str)])

    def choose(
        self, names: Iterable[str] | None, only: Patterns = None, drop: Patterns = None, more: Iterable[str] = ()
    ) -> list[str]:
        """Return the names of the tensors for an operation; patterns can also match the names in ``more``."""
        if names is None:
            return choose([*self, *more], None, only, drop)
        exact = choose((), names, only, None)
        self.check(exact)
        return select(exact, None, drop)

    # ---- single tensors ----

    def about(self, name: str) -> TensorDescription:
        """Describe a tensor without reading it."""
        origin, file, index = self._places[name]
        if file is None:
            return about_value(name, origin[name])
        unknown = file.table.unknown.get(file.table.names[index]) if file.table.unknown else None
        if unknown is not None:
            begin, end = file.table.byte_range(index)
            return TensorDescription(
                name, unknown.label, unknown.shape, end - begin, file.table.row(index), False, unknown.label
            )
        row, shape, scale = file.table.row(index), file.table.shape(index), file.table.scales.get(index)
        packed = file.table.packed.get(index)
        if packed is not None:
            label = packed.packing.label
            return TensorDescription(name, label, shape, packed.nbytes, row, False, label, None, True)
        nbytes = row.nbytes(math.prod(shape))
        if scale is not None:
            return TensorDescription(name, INT8, shape, nbytes + scale.end - scale.begin, row, False, INT8, scale.axis)
        return TensorDescription(name, row.name, shape, nbytes, row, row.floating, row.name if row.blocked else None)

    def descriptions(self, names: Collection[str], tensors: Tensors | None = None) -> dict[str, TensorDescription]:
        """Describe tensors without reading them, in columns if all are plain; see `about`."""
        # `tensors` has them if they are plain or in blocks, and known already.
        tensors = self.plain(names) if tensors is None else tensors if tensors.plain else None
        with paused(len(names)):
            if tensors is None or any(file.table.unknown for file in tensors.files):
                return {name: self.about(name) for name in names}
            numbers, shapes, begins, ends = tensors.columns
            fields = [_PLAIN_FIELDS[number] for number in numbers]
            sizes = map(sub, ends, begins)
            columns = zip(tensors.names, map(itemgetter(0), fields), shapes, sizes, strict=False)
            described = map(tuple.__new__, repeat(TensorDescription), map(add, columns, map(itemgetter(1), fields)))
            return dict(zip(tensors.names, described, strict=True))

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        """Return the stored bytes of tensors; see `TensorDescription.nbytes`."""
        tensors = self.plain(names)
        if tensors is None:
            return {name: about.nbytes for name, about in self.descriptions(names).items()}
        return dict(zip(tensors.names, tensors.ranges.sizes.tolist(), strict=True))

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Refuse to read unreadable entries."""
        for name in names:
            _, file, index = self._places[name]
            if file is not None and file.table.unknown:
                file.table.refuse_unknown([index], file.path)

    def unknown(self) -> dict[str, Unknown]:
        """Return the unreadable entries by name."""
        unknowns: dict[str, Unknown] = {}
        if not any(file.table.unknown for file in self.weight_files):
            return unknowns
        for name, (_, file, index) in self._places.items():
            if file is not None and file.table.unknown:
                unknown = file.table.unknown.get(file.table.names[index])
                if unknown is not None:
                    unknowns[name] = unknown
        return unknowns

    def check_kept(self, name: str) -> None:
        """Refuse a tensor if it cannot stay as it is stored; here every tensor can."""

    def made(self, name: str) -> Made | None:
        """Return how a tensor is made, or None if its values are those of a file or of a dict."""
        return None

    def value(self, name: str, threads: int | None = None, dtype: Any = None) -> Any:
        """Return an array or a `QuantizedTensor`, as stored without a dtype; file tensors get private memory."""
        if (computed := self.made(name)) is not None:
            row = computed.work if dtype is None else dtypes.parse(dtype)
            out: Array = np.empty(self.about(name).shape, dtypes.array_dtype(row.number))
            computed.fill(row, out, threads)
            return out
        origin, file, index = self._places[name]
        if isinstance(origin, Checkpoint) and file is not None:
            # If a tensor stays packed it is mapped, because its codes are read only once.
            reads = dtype is not None or file.table.packed.get(index) is None or not self.mapped
            backend: Backend = "pread" if reads else "mmap"
            return origin.load([name], dtype=dtype, backend=backend, threads=threads)[name]
        value = origin[name]
        return value if isinstance(value, QuantizedTensor) else as_array(value, name)

    def array(self, name: str, threads: int | None = None) -> Array:
        """Return the values of a tensor; quantized and packed tensors are dequantized to float32."""
        about = self.about(name)
        packed = self.place(name).file is not None and about.row.packed
        value: Array | QuantizedTensor = self.value(name, threads, np.float32 if packed else None)
        return value.dequantize(threads=threads) if isinstance(value, QuantizedTensor) else value

    def source(self, name: str, called: str | None = None, threads: int | None = None) -> Source | QuantizedTensor:
        """Return a tensor as a source of jobs; a quantized tensor is read and returned as it is stored."""
        if self.made(name) is not None:
            return of_array(name if called is None else called, self.value(name, threads))
        origin, file, index = self._places[name]
        source = None if file is None or file.table.packed.get(index) else in_file(origin, name, file, index)
        if source is None or (file is not None and file.table.quantized and self.about(name).quantized):
            value = self.value(name, threads)
            if isinstance(value, QuantizedTensor):
                return value
            source = of_array(name, np.ascontiguousarray(value) if file is not None else value)
        return source if called is None else source._replace(name=called)

    def described(self, names: Iterable[str], target: dtypes.Dtype | None) -> dict[str, Entry]:
        """Return read plans for the tensors stored in files; those in memory, and those that are made, are skipped."""
        places = [(name, self._places[name]) for name in names if self.made(name) is None]
        parts = [(name, place.file, place.number) for name, place in places if place.file is not None]
        return {entry.name: entry for entry in entries_of(parts, target)}

    def in_place(self, name: str) -> Source | None:
        """Return a tensor as a source if jobs can read or dequantize it in place; None if it must be copied first."""
        if self.made(name) is not None:
            return None
        origin, file, index = self._places[name]
        if file is not None:
            restoring = self.restoring(name)
            if restoring is not None:
                return restoring if restoring.in_order else None
            return in_file(origin, name, file, index)
        value, about = origin[name], self.about(name)
        if isinstance(value, QuantizedTensor):
            packed = value.restoring()
            if packed is not None:
                source = of_packed(name, *packed)
                return source if source.in_order else None
            data = value.data
        else:
            data = as_array(value, name)
        # Elements must be whole bytes, and in C order; codes in the order of their values.
        if about.element is None or not (data.flags.c_contiguous and data.dtype.isnative):
            return None
        return of_numbers(name, data, about.element, None)._replace(shape=about.shape)

    def restoring(self, name: str, called: str | None = None) -> Source | None:
        """Return a packed or int8 file tensor as a source; jobs dequantize it. None for other tensors."""
        if self.made(name) is not None:
            return None
        _, file, index = self._places[name]
        packed = None if file is None else packed_of(file, index)
        return None if packed is None else of_packed(name if called is None else called, packed, self)

    def memory_of(self, names: Iterable[str]) -> Iterator[Array]:
        """Yield the arrays of the tensors in memory."""
        for name in names:
            origin, file, _ = self._places[name]
            if file is None:
                value = origin[name]
                yield from value.parts.values() if isinstance(value, QuantizedTensor) else (as_array(value, name),)

    def read_into(self, name: str, row: dtypes.Dtype, out: Array, threads: int | None = None) -> None:
        """Fill a contiguous array with a tensor, converted or dequantized to the array's dtype."""
        if (computed := self.made(name)) is not None:
            computed.fill(row, out, threads)
            return
        ordered = read_values(self.restoring(name) or self.source(name), row, out, threads)
        if ordered is not out:
            out[...] = ordered

    # ---- codes ----

    @cached_property
    def codes(self) -> Mapping[str, Codes]:
        """The tensors with codes: values without meaning unless they are scaled."""
        return self.find_codes(quantization_of(self.config) if self._single is None else None)

    def find_codes(self, quantization: Quantization | None) -> Mapping[str, Codes]:
        """Return `codes`; ``quantization`` applies to origins without a configuration."""
        if self._single is not None:
            return codes_of(self._single)
        recognized = {name: codes for checkpoint in self.checkpoints for name, codes in codes_of(checkpoint).items()}
        stored = {}
        for name, (origin, file, _) in self._places.items():
            row, shape = (None, ()) if file is not None else stored_as(origin[name])
            if row is not None:
                stored[name] = Stored(row, shape)
        stored.update(finder.stored_of(self.entries()))
        return {**finder.find(stored, quantization), **recognized}

    def refuse_codes(self, names: Iterable[str], operation: str) -> None:
        """Refuse to treat codes as numbers."""
        finder.refuse(self.codes, names, operation, "" if self._single is None else self._single.path)


def read_values(value: Source | QuantizedTensor, row: dtypes.Dtype, array: Array, threads: int | None = None) -> Array:
    """Fill an array with the values of a tensor as a dtype, and return it."""
    if isinstance(value, QuantizedTensor):
        return value.dequantize(array.dtype, out=array, threads=threads)
    if value.size:
        jobs.Batch(value.jobs(address_of(array), row.number)).run(threads=threads)
    return jobs.native_order(array)


# Input of an operation: a checkpoint, by path or open, or tensors by name.
Given: TypeAlias = PathLike | Located | Checkpoint | Mapping[str, Any] | Catalog


def has_names(source: Any) -> TypeGuard[Given]:
    """Return True if `Catalog.of` accepts an input, False if it is a single array."""
    return isinstance(source, (str, os.PathLike, Mapping, Catalog)) or is_located(source)


def is_path(source: Any) -> bool:
    """Return True for the path of a file or folder, which is not open yet."""
    return isinstance(source, (str, os.PathLike)) or (is_located(source) and not is_file_object(source))


def _places_of(
    origins: Sequence[Checkpoint | Mapping[str, Any]], names: Collection[str] | None
) -> dict[str, TensorPlace]:
    places: dict[str, TensorPlace] = {}
    for origin in origins:
        if isinstance(origin, Checkpoint):
            added = {name: TensorPlace(origin, file, index) for name, file, index in tensors_of(origin, names)}
        else:
            added = dict.fromkeys(origin, TensorPlace(origin))
        duplicate = next((name for name in added if name in places), None) if places else None
        if duplicate is not None:
            titles = f"{places[duplicate].title} and {added[duplicate].title}"
            raise error_about(SafeloadError, f"is in both {titles}", tensor=duplicate)
        places.update(added)
    return places
