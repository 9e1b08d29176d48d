"""One interface to tensors in files of any format, in open checkpoints, in dicts of arrays, and in several of these.

Operations work on a `Catalog`; this is the only module that distinguishes a `Checkpoint` from a dict.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, as_array
from ...base.cached import cached_property
from ...base.gc_pause import paused
from ...base.paths import PathLike
from ...base.scheme import INT8
from ...base.selecting import Patterns, choose, select
from ...base.table import missing
from ...base.text import check_name, show
from ...checkpoint import Checkpoint, codes_of, folder_of, index_of, tensors_of, with_aliases
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source, in_file, of_array, of_numbers, of_packed
from ...engine.read.load import Backend
from ...engine.read.plan import Entry, entries_of
from ...engine.read.tensors import FileTensor, Tensors, packed_of
from ...engine.run.weight_file import WeightFile
from ...errors import SafeloadError
from ...loading.entry import open
from ...packed import codes_without_scale
from ...packed.codes_without_scale import Codes
from ...packed.families import Stored
from ...packed.quantization import Quantization, quantization_of
from ...stores.places import Located, is_located
from .description import TensorDescription, about_value, stored_as


class TensorPlace(NamedTuple):
    """Location of a tensor.

    Attributes:
        origin: the checkpoint or the dict.
        file: None for a dict.
        number: index of the tensor in the file's table.
    """

    origin: Checkpoint | Mapping[str, Any]
    file: WeightFile | None = None
    number: int = 0

    @property
    def title(self) -> str:
        """Name of the origin in messages."""
        return "a dict" if self.file is None else self.file.path


class Catalog:
    """The tensors of one or several origins by name, in their order. Made by `of`; a context manager.

    Attributes:
        title: the origins, as messages name them: a path, "dict".
        format: format of the origins; None for dicts and for more than one format.
        config: the first ``config.json`` that is not empty; None without one.
        files: paths of the files that hold the tensors.
        index: the ``index.json`` of a single origin, else None.
        folder: the folder that a single origin was opened by, as itself or by its index; else None.
        weight_files: the open files.
        checkpoints: the origins that are open checkpoints.
        in_memory: whether another origin is a dict.
        mapped: whether packed tensors that stay packed are mapped, not read.
        ignored: activation scales by name, which are in the files and not in the catalog.
    """

    def __init__(self, origins: Sequence[Checkpoint | Mapping[str, Any]], mapped: bool = True) -> None:
        checkpoints = [origin for origin in origins if isinstance(origin, Checkpoint)]
        titles = [origin.path if isinstance(origin, Checkpoint) else "dict" for origin in origins]
        formats = {origin.format if isinstance(origin, Checkpoint) else None for origin in origins}
        single = checkpoints[0] if len(origins) == len(checkpoints) == 1 else None
        self.title = titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"
        self.format = formats.pop() if len(formats) == 1 else None
        configs = [opened.config for opened in checkpoints if opened.config is not None]
        self.config = next(filter(None, configs), configs[0] if configs else None)
        self.files = [path for opened in checkpoints for path in opened.files]
        self.weight_files = [file for opened in checkpoints for file in opened.weight_files]
        self.ignored = {name: part for opened in checkpoints for name, part in opened.ignored.items()}
        self.index = None if single is None else index_of(single)
        self.folder = None if single is None else folder_of(single)
        self.mapped = mapped
        self._origins = tuple(origins)
        self.checkpoints = checkpoints
        self.in_memory = len(checkpoints) < len(origins)
        for origin in origins if self.in_memory else ():
            if not isinstance(origin, Checkpoint):
                for name in origin:
                    check_name(name)
        self._where = "" if single is None else single.path
        self._known = self._places if single is None else single  # two tensors of one name are refused at once
        self._codes: Mapping[str, Codes] | None = None
        self._owned = ExitStack()

    @classmethod
    def of(cls, given: Given | Sequence[Given], storage_options: Mapping[str, Any] | None = None) -> Catalog:
        """The catalog of the input of an operation.

        Args:
            given: a path or a URL, which is opened, and closed with the catalog; an open `Checkpoint`; a dict of arrays
                and quantized tensors; a catalog, which the new one does not close; or a list of these.
            storage_options: for URLs, see `safeload.open`.

        Raises:
            SafeloadError: two origins have a tensor of the same name; or see `safeload.open`.
            ValueError: an empty list.
            OSError: see `safeload.open`.
        """
        if isinstance(given, Catalog):
            return cls(given._origins, given.mapped)
        several: Sequence[Given] = given if isinstance(given, (list, tuple)) else [given]  # type: ignore[list-item]
        if not several:
            raise ValueError("there is nothing to read: no source")
        origins: list[Checkpoint | Mapping[str, Any]] = []
        with ExitStack() as stack:
            for one in several:
                if isinstance(one, (Mapping, Catalog)):
                    origins += one._origins if isinstance(one, Catalog) else [one]
                else:
                    origins.append(stack.enter_context(open(one, storage_options=storage_options)))
            made = cls(origins)
            made._owned = stack.pop_all()
        return made

    def with_aliases(self, aliases: Mapping[str, str]) -> Catalog:
        """A catalog that has some tensors under a second name: new name to the tensor's own."""
        origins: list[Checkpoint | Mapping[str, Any]] = []
        for origin in self._origins:
            own = {alias: name for alias, name in aliases.items() if name in origin}
            if isinstance(origin, Checkpoint):
                origins.append(with_aliases(origin, own) if own else origin)
            else:
                origins.append({**origin, **{alias: origin[name] for alias, name in own.items()}})
        return Catalog(origins, self.mapped)

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owned.close()

    @cached_property
    def _places(self) -> dict[str, TensorPlace]:
        return _places_of(self._origins)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    @property
    def metadata(self) -> Mapping[Any, Any]:
        """Metadata of all origins; the last value of a duplicate key wins. The total_size of an index is left out."""
        if len(self.checkpoints) == 1 and self.checkpoints[0].index is None:
            return self.checkpoints[0].metadata  # values of a GGUF file are unpacked on access
        merged: dict[Any, Any] = {}
        for opened in self.checkpoints:
            indexed = opened.index is not None
            own = opened.metadata.items()
            merged.update((k, v) for k, v in own if not indexed or k != "total_size" or isinstance(v, str))
        return merged

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; for files without the scales of int8."""
        in_memory = sum(self.about(name).nbytes for name, place in self._places.items() if place.file is None)
        return in_memory + sum(opened.nbytes for opened in self.checkpoints)

    def entries(self) -> list[FileTensor]:
        """Name, file and index of each tensor in a file."""
        return [(name, place.file, place.number) for name, place in self._places.items() if place.file is not None]

    def plain(self) -> Tensors | None:
        """All tensors, if they are in one checkpoint and plain; else None."""
        if self.in_memory or len(self.checkpoints) != 1 or self.ignored:
            return None
        with paused(len(self)):
            tensors = tensors_of(self.checkpoints[0])
            return tensors if tensors.plain else None

    def place(self, name: str) -> TensorPlace:
        """Where a tensor of the catalog is."""
        return self._places[name]

    def check(self, names: Iterable[str]) -> None:
        """Refuses unknown names.

        Raises:
            TensorNotFoundError: for the first unknown name; the message suggests similar ones.
        """
        for name in names:
            if name not in self._places:
                raise missing(name, [known for known in self._places if isinstance(known, str)])

    def choose(
        self, names: Iterable[str] | None, only: Patterns = None, drop: Patterns = None, more: Iterable[str] = ()
    ) -> list[str]:
        """The tensors that an operation works on.

        Args:
            names: exact names; None for all.
            only: patterns of the names to take, instead of ``names``.
            drop: patterns of the names to leave out.
            more: names that patterns may match beside those of the tensors.

        Raises:
            TensorNotFoundError: an unknown name, or a pattern that matches none.
            ValueError: both ``names`` and ``only``.
        """
        if names is None:
            return choose([*self, *more], None, only, drop)
        wanted = choose((), names, only, None)
        self.check(wanted)
        return select(wanted, None, drop)

    # ---- one tensor ----

    def about(self, name: str) -> TensorDescription:
        """Describes a tensor without reading it.

        Raises:
            TypeError: it is a masked array.
        """
        origin, file, index = self._places[name]
        if file is None:
            return about_value(name, origin[name])
        unknown = file.table.unknown.get(file.table.names[index]) if file.table.unknown else None
        if unknown is not None:
            begin, end = file.table.byte_range(index)
            return TensorDescription(
                name, unknown.label, unknown.shape, end - begin, file.table.row(index), False, unknown.label
            )
        row, shape, scale = file.table.row(index), file.table.shape(index), file.table.scale(index)
        packed = file.table.packed(index)
        if packed is not None:
            label = packed.packing.label
            return TensorDescription(name, label, shape, packed.nbytes, row, False, label, None, True)
        nbytes = row.nbytes(math.prod(shape))
        if scale is not None:
            return TensorDescription(name, INT8, shape, nbytes + scale.end - scale.begin, row, False, INT8, scale.axis)
        return TensorDescription(name, row.name, shape, nbytes, row, row.floating, row.name if row.blocked else None)

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Refuse to read tensors of ggml types that this version does not know.

        Raises:
            UnsupportedError: the message names the tensor and its type.
        """
        for name in names:
            _, file, index = self._places[name]
            if file is not None and file.table.unknown:
                file.table.refuse_unknown([index], file.path)

    def unknown(self) -> dict[str, str]:
        """The tensors of ggml types that this version does not know, with the types."""
        found = {}
        for name, (_, file, index) in self._places.items():
            if file is not None and file.table.unknown:
                one = file.table.unknown.get(file.table.names[index])
                if one is not None:
                    found[name] = one.label
        return found

    def check_kept(self, name: str) -> None:
        """Refuses a tensor that cannot stay as it is stored; here all can."""

    def value(self, name: str, threads: int | None = None) -> Array | QuantizedTensor:
        """A tensor in memory as it is stored; one in a file is read into private memory, by so many threads.

        Raises:
            FormatError, OSError: the file cannot be read.
        """
        value: Array | QuantizedTensor = self._load(name, None, threads)
        return value

    def array(self, name: str, threads: int | None = None) -> Array:
        """The numbers of a tensor: quantized ones are dequantized, packed ones of a file decoded, both to float32.

        Args:
            name: name of the tensor.
            threads: None: chosen automatically.

        Raises:
            UnsupportedError: there is no kernel to dequantize it.
            FormatError, OSError: the file cannot be read.
        """
        about = self.about(name)
        packed = self._places[name].file is not None and about.row.packed
        value = self._load(name, np.float32 if packed else None, threads)
        return value.dequantize(threads=threads) if isinstance(value, QuantizedTensor) else value

    def source(self, name: str, called: str | None = None, threads: int | None = None) -> Source | QuantizedTensor:
        """A tensor as a source of jobs; a quantized one is read and returned as it is stored.

        Args:
            name: name of the tensor.
            called: name in messages, if it differs.
            threads: for reading; None: chosen automatically.

        Raises:
            TypeError: an array of a dtype that weights do not have.
            FormatError, OSError: the file cannot be read.
        """
        origin, file, index = self._places[name]
        source = None if file is None or file.table.packed(index) else in_file(origin, name, file, index)
        if source is None or (file is not None and file.table.quantized and self.about(name).quantized):
            value = self._load(name, threads=threads)
            if isinstance(value, QuantizedTensor):
                return value
            source = of_array(name, np.ascontiguousarray(value) if file is not None else value)
        return source if called is None else source._replace(name=called)

    def described(self, names: Iterable[str], target: dtypes.Dtype | None) -> dict[str, Entry]:
        """What a read delivers of those tensors that are in files, converted to a dtype.

        Raises:
            UnsupportedError: an unsupported conversion.
        """
        places = ((name, self._places[name]) for name in names)
        parts = [(name, place.file, place.number) for name, place in places if place.file is not None]
        return {entry.name: entry for entry in entries_of(parts, target)}

    def in_place(self, name: str) -> Source | None:
        """A tensor's values in place, or restored by the jobs that read them; None if they must be copied first.

        Numbers must be copied if they are not in C order, not little-endian (in a file) or in the machine's byte order
        (in memory), or not of a dtype of weights with whole-byte elements; packed codes if they are in another order
        than their values.
        """
        origin, file, index = self._places[name]
        if file is not None:
            restoring = self.restoring(name)
            if restoring is not None:
                return restoring if restoring.in_order else None
            return in_file(origin, name, file, index)
        value, about = origin[name], self.about(name)
        if isinstance(value, QuantizedTensor):
            found = value.restoring()
            if found is not None:
                source = of_packed(name, *found)
                return source if source.in_order else None
            data = value.data
        else:
            data = as_array(value, name)
        if about.element is None or not (data.flags.c_contiguous and data.dtype.isnative):
            return None
        return of_numbers(name, data, about.element, None)._replace(shape=about.shape)

    def restoring(self, name: str, called: str | None = None) -> Source | None:
        """A packed tensor of a file, or int8, as a source of its values, which jobs dequantize; None for any other.

        Args:
            name: name of the tensor.
            called: name in messages, if it differs.
        """
        _, file, index = self._places[name]
        packed = None if file is None else packed_of(file, index)
        return None if packed is None else of_packed(name if called is None else called, packed, self)

    def _load(self, name: str, dtype: Any = None, threads: int | None = None) -> Any:
        """A tensor in memory."""
        origin, file, index = self._places[name]
        if isinstance(origin, Checkpoint) and file is not None:
            # A packed tensor that is not dequantized is mapped: its codes are read once, when they are used.
            reads = dtype is not None or file.table.packed(index) is None or not self.mapped
            backend: Backend = "pread" if reads else "mmap"
            return origin.load([name], dtype=dtype, backend=backend, threads=threads)[name]
        value = origin[name]
        return value if isinstance(value, QuantizedTensor) else as_array(value, name)

    def memory_of(self, names: Iterable[str]) -> Iterator[Array]:
        """The arrays in memory that some of these tensors consist of."""
        for name in names:
            origin, file, _ = self._places[name]
            if file is None:
                value = origin[name]
                yield from value.parts.values() if isinstance(value, QuantizedTensor) else (as_array(value, name),)

    def fill(self, name: str, row: dtypes.Dtype, out: Array, threads: int | None = None) -> bool:
        """Fills an array with a tensor that is computed part by part; False, and nothing done, for all others."""
        return False

    # ---- codes ----

    @property
    def codes(self) -> Mapping[str, Codes]:
        """The tensors that hold codes: values that mean nothing without their scale."""
        if self._codes is None:
            self._codes = self.find_codes(quantization_of(self.config))
        return self._codes

    def find_codes(self, quantization: Quantization | None) -> Mapping[str, Codes]:
        """Return `codes` under a quantization, for origins without a configuration of their own."""
        if len(self.checkpoints) == 1 and not self.in_memory:
            return codes_of(self.checkpoints[0])
        found = {name: codes for opened in self.checkpoints for name, codes in codes_of(opened).items()}
        stored = {}
        for name, (origin, file, _) in self._places.items():
            row, shape = (None, ()) if file is not None else stored_as(origin[name])
            if row is not None:
                stored[name] = Stored(row, shape)
        stored.update(codes_without_scale.stored_of(self.entries()))
        return {**codes_without_scale.find(stored, quantization), **found}

    def refuse_codes(self, names: Iterable[str], what: str) -> None:
        """Refuses an operation that would treat codes as numbers.

        Args:
            names: the tensors that it reads.
            what: the operation, for messages.

        Raises:
            UnsupportedError: one of them holds codes; the message names tensor, scale and quant_method.
        """
        codes_without_scale.refuse(self.codes, names, what, self._where)


# Input of an operation.
Given: TypeAlias = PathLike | Located | Checkpoint | Mapping[str, Any] | Catalog


def has_names(given: Any) -> TypeGuard[Given]:
    """Whether an input has tensors by name, for `Catalog.of`, and is not a single array."""
    return isinstance(given, (str, os.PathLike, Mapping, Catalog)) or is_located(given)


def _places_of(origins: Sequence[Checkpoint | Mapping[str, Any]]) -> dict[str, TensorPlace]:
    places: dict[str, TensorPlace] = {}
    for origin in origins:
        if isinstance(origin, Checkpoint):
            found = {name: TensorPlace(origin, file, index) for name, file, index in tensors_of(origin)}
        else:
            found = dict.fromkeys(origin, TensorPlace(origin))
        twice = next((name for name in found if name in places), None) if places else None
        if twice is not None:
            raise SafeloadError(f"tensor {show(twice)} is in both {places[twice].title} and {found[twice].title}")
        places.update(found)
    return places
