"""Tensors by name, from checkpoints of any format, dicts of arrays, or several of both, and their descriptions.

Operations work on a `Catalog`: only this module distinguishes a `Checkpoint` from a dict. The tensors of a
`RestructuredCatalog` are made of those of another catalog: recipes say which items and rows go where.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from fnmatch import fnmatchcase
from itertools import chain, repeat
from operator import add, attrgetter, itemgetter, sub
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from ..core import dtypes, jobs
from ..core.arrays import Array, as_array, not_an_array
from ..core.cast import astype
from ..core.checkpoint import (
    Checkpoint,
    codes_of,
    folder_of,
    index_of,
    opened_as_stored,
    recipe_of,
    tensors_of,
    with_aliases,
)
from ..core.files import Located, Location
from ..core.forking import cached_property
from ..core.memory import private_array
from ..core.names import Patterns, Selection, choose
from ..core.native import address_of
from ..core.opening import Verify, open_paths
from ..core.packing import CODES, INT8, SCHEMES, Packed, Packing, Part, scheme_row
from ..core.progress import Progress
from ..core.quantized_tensor import QuantizedTensor
from ..core.runtime import paused
from ..core.source import Source, in_file, of_array, of_numbers, of_packed
from ..core.table import Unknown
from ..core.tensors import Entry, FileTensor, Tensors, entries_of, packed_of
from ..core.text import PathLike, check_name, error_about, missing, tensor_named
from ..core.weight_file import WeightFile
from ..errors import FormatError, SafeloadError
from ..formats.gguf import scales_beside
from ..models.choosing import dtype_in
from ..quant import finder
from ..quant.codes import Coded, Immovable, Matrix
from ..quant.families import Stored
from ..quant.gguf import blocks_in, blocks_of
from ..quant.quantization import Quantization, quantization_of
from ..remote.places import is_file_object, is_located
from .recipes import Arrangement, Move, TensorRecipe, TensorView, copy_values

if TYPE_CHECKING:
    from ..adapters.merge import Merge


class TensorDescription(NamedTuple):
    """Name, dtype and shape of a tensor, and how it is stored."""

    name: str
    dtype: str  # as in messages: "bfloat16", "q4_0"
    shape: tuple[int, ...]  # logical
    nbytes: int  # stored bytes, int8 scales included
    element: dtypes.Dtype | None  # None if weight files do not support the dtype
    floating: bool  # whether the elements are real floating-point numbers
    scheme: str | None = None  # of a quantized tensor
    axis: int | None = None  # of int8 with per-axis scales
    packing: Packing | None = None  # if it is packed as in published checkpoints

    @property
    def quantized(self) -> bool:
        """True for int8 with scales, and for blocks."""
        return self.scheme is not None

    @property
    def packed(self) -> bool:
        return self.packing is not None

    @property
    def codes(self) -> str | None:
        """The scheme of its codes, which blocks with a scale beside them have too; None for other packed codes."""
        codes = self.scheme if self.packing is None else self.packing.numbers
        return codes if self.packing is None or codes in SCHEMES else None

    @property
    def code(self) -> str:
        """The dtype as in `TensorInfo`: "BF16", "Q4_0", "int8"."""
        named = self.element is None or self.packing is not None or self.scheme == INT8
        return self.dtype if self.element is None or named else self.element.code

    @property
    def row(self) -> dtypes.Dtype:
        if self.element is None:
            raise dtypes.not_stored(self.dtype, self.name)
        return self.element


def about_value(name: str, value: Any) -> TensorDescription:
    """Describe a tensor in memory."""
    if isinstance(value, Mapping):
        raise not_an_array(tensor_named(name), value)
    if isinstance(value, QuantizedTensor):
        scheme, kind = value.scheme, value.packing
        row = scheme_row(scheme) if kind is None else dtypes.BY_NAME[value.data.dtype.name]
        return TensorDescription(name, scheme, value.shape, value.nbytes, row, False, scheme, value.axis, kind)
    array = as_array(value, name)
    stored = dtypes.row_of(array.dtype)
    # Packed elements take one byte each in memory, unlike in files.
    element = None if stored is None or stored.packed else stored
    floating = stored is not None and stored.floating
    return TensorDescription(name, dtypes.shown(array.dtype), array.shape, array.nbytes, element, floating)


# Fields of the description of a plain tensor by dtype number: the name of the dtype, and all after its bytes.
_PLAIN_FIELDS = {number: (row.name, (row, row.floating, None, None, None)) for number, row in dtypes.BY_NUMBER.items()}


class Made(NamedTuple):
    """A tensor that is made when it is read."""

    fill: Callable[[dtypes.Dtype, Array, int | None], object]  # an array with its values in a dtype, on some threads
    work: dtypes.Dtype  # in which values are not rounded yet
    about: TensorDescription


# Returns the memory of an array.
Room: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]


class TensorPlace(NamedTuple):
    """The origin of a tensor, and its file."""

    origin: Any  # a checkpoint or a mapping, which has no file
    file: WeightFile | None = None  # None for a dict
    number: int = 0  # index in the table of the file


class Catalog:
    """The tensors of checkpoints and dicts by name, in their order. `of` creates it; leaving it closes its files."""

    fixed: Mapping[str, str] = MappingProxyType({})  # codes of dtypes by name, whatever dtype is requested
    texts: Mapping[str, bytes] = {}  # further files of the result, by name
    makes = False  # whether tensors are made when they are read
    merge: Merge | None = None  # adapters
    aliases: Mapping[str, str] = {}  # tensors by the second names that adapters need

    def __init__(
        self,
        origins: Sequence[Checkpoint | Mapping[str, Any]],
        mapped: bool = True,  # False to read packed tensors even if they stay packed, instead of mapping their files
        names: Collection[str] | None = None,  # distinct, of a single checkpoint: the rest of its files is not decoded
    ) -> None:
        self._origins = tuple(origins)
        self.mapped = mapped
        self.rows: dict[str, Made] = {}  # of the tensors that are made, by name
        self.checkpoints = [origin for origin in origins if isinstance(origin, Checkpoint)]
        self.files = [file for checkpoint in self.checkpoints for file in checkpoint.files]
        self.weight_files = [file for checkpoint in self.checkpoints for file in checkpoint.weight_files]
        self.config: dict[str, Any] | None = None  # the first nonempty config
        # Activation scales: files hold them, but they are not tensors of the catalog.
        self.ignored: dict[str, Part] = {}
        for checkpoint in self.checkpoints:
            self.ignored.update(checkpoint.ignored)
            if not self.config and checkpoint.config is not None:
                self.config = checkpoint.config
        for name in chain.from_iterable(origin for origin in origins if not isinstance(origin, Checkpoint)):
            check_name(name)
        formats = {origin.format if isinstance(origin, Checkpoint) else None for origin in origins}
        title = origins[0].path if isinstance(origins[0], Checkpoint) else "dict"
        self.title = title if len(origins) == 1 else f"{title} and {len(origins) - 1} more"  # for messages
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
        *,
        stored: bool = False,  # True to open all tensors as stored; `as_stored` does the rest
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
                    opened = open_paths(
                        item, None, None, "refuse", stored, storage_options=storage_options, verify=verify
                    )
                    origins.append(stack.enter_context(Checkpoint(opened)))
            catalog = cls(origins)
            catalog._owned = stack.pop_all()
        return catalog

    def as_stored(self, stack: ExitStack) -> Catalog:
        """Return a catalog with the parts of packed tensors as tensors; ``stack`` closes files opened for it."""
        origins: list[Checkpoint | Mapping[str, Any]] = []
        for origin in self._origins:
            if isinstance(origin, Checkpoint):
                again = not recipe_of(origin).stored
                origins.append(stack.enter_context(opened_as_stored(origin)) if again else origin)
                continue
            parts: dict[str, Any] = {}
            for name, value in origin.items():
                names = {"data": name, "scale": f"{name}_scale"}
                own = value.parts if isinstance(value, QuantizedTensor) else {name: value}
                parts |= {names.get(key, key): part for key, part in own.items()}
            origins.append(parts)
        return Catalog(origins, self.mapped)

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

    def selected(self, names: Iterable[str]) -> Catalog:
        """Return a catalog of some tensors and activation scales, with the same files."""
        known = dict.fromkeys(names)
        result = copy(self)
        result._known = {name: None for name in known if name in self}
        result.ignored = {name: part for name, part in self.ignored.items() if name in known}
        return result

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *error: object) -> None:
        self._owned.close()

    @cached_property
    def _places(self) -> dict[str, TensorPlace]:
        places: dict[str, TensorPlace] = {}
        for origin in self._origins:
            if isinstance(origin, Checkpoint):
                tensors = tensors_of(origin, self._names)
                added = {name: TensorPlace(origin, file, index) for name, file, index in tensors}
            else:
                added = dict.fromkeys(origin, TensorPlace(origin))
            duplicate = next((name for name in added if name in places), None) if places else None
            if duplicate is not None:
                files = places[duplicate].file, added[duplicate].file
                titles = " and ".join("a dict" if file is None else file.path for file in files)
                raise error_about(SafeloadError, f"is in both {titles}", tensor=duplicate)
            places.update(added)
        return places

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
        if self.in_memory or not self.checkpoints or self.ignored or self.makes:
            return None
        readable = not self.weight_files
        for table in map(attrgetter("table"), self.weight_files):
            if blocks and table.unknown:
                return None
            readable = readable or not (table.shaped or (table.scaled if blocks else table.quantized))
        if not readable:
            return None
        with paused(len(self._known)):
            if len(self.checkpoints) == 1:
                tensors = tensors_of(self.checkpoints[0], self._names if names is None else names)
            else:
                where = {name: (file, number) for name, file, number in self.entries()}
                tensors = Tensors.located(where, None if names is None else [*names])
            return tensors if (tensors.whole if blocks else tensors.plain) else None

    def place(self, name: str) -> TensorPlace:
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
        return Selection(drop=drop).of(exact)

    # ---- single tensors ----

    def about(self, name: str) -> TensorDescription:
        """Describe a tensor without reading it."""
        if self.makes and (computed := self.made(name)) is not None:
            return computed.about
        origin, file, index = self._places[name]
        if file is None:
            return about_value(name, origin[name])
        table, row = file.table, file.table.row(index)
        unknown = table.unknown.get(table.names[index]) if table.unknown else None
        if unknown is not None:
            begin, end = table.byte_range(index)
            return TensorDescription(name, unknown.label, unknown.shape, end - begin, row, False, unknown.label)
        shape, scale, packed = table.shape(index), table.scales.get(index), table.packed.get(index)
        if packed is not None:
            kind, label = packed.packing, packed.packing.label
            return TensorDescription(name, label, shape, packed.nbytes, row, False, label, None, kind)
        nbytes = row.nbytes(math.prod(shape))
        if scale is not None:
            return TensorDescription(name, INT8, shape, nbytes + scale.end - scale.begin, row, False, INT8, scale.axis)
        return TensorDescription(name, row.name, shape, nbytes, row, row.floating, row.name if row.blocked else None)

    def recipe(self, name: str) -> TensorRecipe:
        """Return the recipe of an unchanged tensor."""
        return TensorRecipe(self.about(name).shape, (Move(name),))

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
        return dict(zip(tensors.names, tensors.spans.sizes.tolist(), strict=True))

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Refuse to read unreadable entries."""
        for name in names:
            _, file, index = self._places[name]
            if file is not None and file.table.unknown:
                file.table.refuse_unknown([index], file.path)

    def unknown(self) -> dict[str, Unknown]:
        """Return the unreadable entries by name."""
        if not any(file.table.unknown for file in self.weight_files):
            return {}
        places = ((name, file.table.unknown, file.table.names[k]) for name, file, k in self.entries())
        return {name: unknown[stored] for name, unknown, stored in places if stored in unknown}

    def made(self, name: str) -> Made | None:
        """Return how a tensor is made; None if a file or a dict has its values."""
        return self.rows.get(name)

    def sources_of(self, name: str) -> list[str]:
        """Return the stored tensors that a tensor is made of."""
        return [name]

    def check_kept(self, name: str) -> None:
        """Refuse a tensor if it cannot stay as it is stored."""
        if self.merge is not None and name in self.merge:
            self.merge.target_row(name, None)

    def value(self, name: str, threads: int | None = None, dtype: Any = None, room: Room = private_array) -> Any:
        """Return an array or a `QuantizedTensor`, as stored without a dtype, in private memory, or ``room`` if made."""
        if (computed := self.made(name)) is not None:
            row = computed.work if dtype is None else dtypes.parse(dtype)
            out = room(self.about(name).shape, dtypes.array_dtype(row.number))
            computed.fill(row, out, threads)
            return out
        origin, file, index = self._places[name]
        if file is not None:
            # If a tensor stays packed it is mapped, because its codes are read only once.
            reads = dtype is not None or file.table.packed.get(index) is None or not self.mapped
            return origin.load([name], dtype=dtype, backend="pread" if reads else "mmap", threads=threads)[name]
        value = origin[name]
        return value if isinstance(value, QuantizedTensor) else as_array(value, name)

    def array(self, name: str, threads: int | None = None) -> Array:
        """Return the values of a tensor; quantized and packed tensors are dequantized to float32."""
        about = self.about(name)
        packed = self.place(name).file is not None and about.row.packed
        value: Array | QuantizedTensor = self.value(name, threads, np.float32 if packed else None)
        return value.dequantize(threads=threads) if isinstance(value, QuantizedTensor) else value

    def source(self, name: str, threads: int | None = None, room: Room = private_array) -> Source | QuantizedTensor:
        """Return a tensor as a source of jobs; a quantized tensor is read and returned as it is stored."""
        if self.made(name) is not None:
            return of_array(name, self.value(name, threads, room=room))
        origin, file, index = self._places[name]
        if file is not None and not file.table.packed.get(index):
            source = in_file(origin, name, file, index)
            if source is not None and not (file.table.quantized and self.about(name).quantized):
                return source
        value = self.value(name, threads)
        if isinstance(value, QuantizedTensor):
            return value
        return of_array(name, np.ascontiguousarray(value) if file is not None else value)

    def values(self, name: str, called: str | None = None, room: Room = private_array) -> Source | QuantizedTensor:
        """Like `source`, but jobs dequantize packed and int8 file tensors; messages have the name ``called``."""
        value = self.restoring(name) or self.source(name, room=room)
        return value if called is None or isinstance(value, QuantizedTensor) else value._replace(name=called)

    def described(self, names: Iterable[str], target: dtypes.Dtype | None) -> dict[str, Entry]:
        """Return read plans for the tensors stored in files; tensors in memory, or made of others, are skipped."""
        places = [(name, self._places[name]) for name in names if self.made(name) is None]
        parts = [(name, place.file, place.number) for name, place in places if place.file is not None]
        return {entry.name: entry for entry in entries_of(parts, target)}

    def in_place(self, name: str) -> Source | None:
        """Return a tensor as a source if jobs can read or dequantize it in place; None if it must be copied first."""
        if self.made(name) is not None:
            return None
        origin, file, index = self._places[name]
        value = origin[name] if file is None else None
        packed = value.restoring() if isinstance(value, QuantizedTensor) else None
        source = None if packed is None else of_packed(name, *packed)
        source = self.restoring(name) if file is not None else source
        if source is not None:  # codes must be in the order of their values
            return source if source.in_order else None
        if file is not None:
            return in_file(origin, name, file, index)
        row: dtypes.Dtype | None
        if isinstance(value, QuantizedTensor):
            data, row, shape = value.data, scheme_row(value.scheme), value.shape
        else:
            data = as_array(value, name)
            row, shape = dtypes.row_of(data.dtype), data.shape
        # Elements must be whole bytes, and in C order.
        if row is None or row.packed or not (data.flags.c_contiguous and data.dtype.isnative):
            return None
        return of_numbers(name, data, row, None)._replace(shape=shape)

    def restoring(self, name: str) -> Source | None:
        """Return a packed or int8 file tensor as a source; jobs dequantize it. None for other tensors."""
        if self.made(name) is not None:
            return None
        _, file, index = self._places[name]
        packed = None if file is None else packed_of(file, index)
        return None if packed is None else of_packed(name, packed, self)

    def packed(self, name: str) -> Packed | None:
        """Return a packed tensor as it is stored, in a file or in memory."""
        if self.made(name) is not None:
            return None
        origin, file, number = self._places[name]
        if file is not None:
            return file.table.packed.get(number)
        value = origin[name]
        if not isinstance(value, QuantizedTensor) or value.packing is None:
            return None
        parts = {}
        for role, array in value.roles.items():
            raw: Any = np.ascontiguousarray(jobs.native_order(array)).reshape(-1).view(np.uint8)  # the part owns it
            row = dtypes.BY_NAME[array.dtype.name]
            parts[role] = Part(value.names.get(role, role), raw, row, array.shape, 0, raw.size)
        return Packed(value.packing, parts)

    def scheme(self, name: str) -> str | None:
        """Return the scheme of the codes that a tensor is made of; None if there are none, or an adapter changes it."""
        return None if self.made(name) is not None else self.about(name).scheme

    def coded(self, name: str) -> Coded:
        """Return the codes of a quantized tensor; `Immovable` if they cannot be read as codes."""
        packed = self.packed(name)
        if packed is None:
            packed = self._in_blocks(name)
        kind = packed.packing
        return Coded(kind.shape, [Matrix(packed, k) for k in range(kind.matrices)])

    def _in_blocks(self, name: str) -> Packed:
        about = self.about(name)
        if self.made(name) is not None or about.element is None or not about.element.blocked or len(about.shape) < 2:
            raise Immovable(f"safeload moves no codes of {about.dtype}")
        row, (origin, file, index) = about.element, self._places[name]
        shape, u8 = (*about.shape[:-1], row.nbytes(about.shape[-1])), dtypes.BY_CODE["U8"]
        if file is not None:
            part = Part(name, file, u8, shape, *file.table.byte_range(index))
        else:
            raw: Any = np.ascontiguousarray(origin[name].data)
            part = Part(name, raw.reshape(-1), u8, shape, 0, raw.size)
        return Packed(blocks_of(row, row.name, about.shape, shared=True)._replace(grid=None), {CODES: part})

    def stored(self, name: str) -> QuantizedTensor:
        """Return a quantized tensor that is not packed as it is stored."""
        value = self.source(name)
        assert isinstance(value, QuantizedTensor)
        return value

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
        ordered = read_values(self.values(name), row, out, threads)
        if ordered is not out:
            out[...] = ordered

    # ---- codes ----

    @cached_property
    def codes(self) -> Mapping[str, finder.Codes]:
        """The tensors with codes: values without meaning unless they are scaled."""
        return self.find_codes(quantization_of(self.config) if self._single is None else None)

    def find_codes(self, quantization: Quantization | None) -> Mapping[str, finder.Codes]:
        """Return `codes`; ``quantization`` applies to origins without a configuration."""
        if self._single is not None:
            return codes_of(self._single)
        recognized = {name: codes for checkpoint in self.checkpoints for name, codes in codes_of(checkpoint).items()}
        stored = {}
        for name, (origin, file, _) in self._places.items():
            if file is None and not isinstance(origin[name], QuantizedTensor):
                with suppress(Exception):  # a foreign __array__ can raise anything; reading the tensor reports it
                    array = np.asarray(origin[name])  # a scale may be a number
                    if (row := dtypes.row_of(array.dtype)) is not None:
                        stored[name] = Stored(row, array.shape)
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


_F32, _BF16 = dtypes.BY_CODE["F32"], dtypes.BY_CODE["BF16"]
_WHOLE = TensorView()


class RestructuredCatalog(Catalog):
    """Tensors made by recipes when they are read."""

    makes = True

    def __init__(
        self,
        base: Catalog,
        recipes: Mapping[str, TensorRecipe],
        *,
        # None for a model as another program loads it: it keeps its metadata, config and format, and tensors that are
        # only renamed stay as they are stored.
        metadata: Mapping[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        format: str | None = None,  # of the structure: "gguf" for names of llama.cpp
        fixed: Mapping[str, str] = MappingProxyType({}),
        restored: dtypes.Dtype | None = None,  # of dequantized tensors; None for that of the config, else bfloat16
    ) -> None:
        super().__init__(base._origins, base.mapped)
        self.base = base
        self.recipes = recipes
        self._restored = restored or dtype_in(base.config) or _BF16
        self.for_engine = metadata is None
        self.fixed = fixed
        self.texts = base.texts
        self.metadata = base.metadata if metadata is None else metadata
        self.config = base.config if metadata is None else config
        self.format = base.format if metadata is None else format
        self.ignored = base.ignored if metadata is None else {}
        self.codes = {}  # sources with codes are refused
        self._whole: tuple[str, str, Array] | None = None  # name, dtype and values of the last packed source
        self._known = recipes

    def _renamed(self, name: str) -> str | None:
        """Return the source if only the name changes, or for another program also shape and dtype; else None."""
        recipe = self.recipes[name]
        return None if self.for_engine and recipe.dtype is not None else recipe.renamed

    def place(self, name: str) -> TensorPlace:
        source = self._renamed(name)
        return TensorPlace({}) if source is None else self.base.place(source)

    def made(self, name: str) -> Made:
        recipe = self.recipes[name]
        if name in self.rows:
            return self.rows[name]
        stated = None if recipe.dtype is None else dtypes.BY_CODE[recipe.dtype]
        # If a recipe for an engine states a dtype, values are rounded before they are quantized.
        rounded = self.for_engine and stated is not None
        sources = [] if rounded else [*map(self.base.about, self.sources_of(name))]
        if self.for_engine and self._renamed(name) is not None:
            about = sources[0]._replace(name=name, shape=recipe.shape)
        elif recipe.blocks is not None:
            row, size = dtypes.BLOCK_TYPES[recipe.blocks], math.prod(recipe.shape)
            about = TensorDescription(name, row.name, recipe.shape, row.nbytes(size), row, False, row.name)
        else:
            rows = {self._row(name, source) for source in sources} if stated is None else {stated}
            keeps = stated is not None or (name not in self.fixed and (recipe.scales or not recipe.computes))
            row = rows.pop() if len(rows) == 1 and keeps else _F32
            size = row.nbytes(math.prod(recipe.shape))
            about = TensorDescription(name, row.name, recipe.shape, size, row, row.floating)
        # Dequantized and computed values are not rounded before they are quantized.
        work = _F32 if recipe.computes or any(source.quantized for source in sources) else about.row

        def fill(row: dtypes.Dtype, out: Array, threads: int | None) -> None:
            self.make(recipe, row, out, threads)
            self.release()

        self.rows[name] = Made(fill, work, about)
        return self.rows[name]

    def _row(self, name: str, source: TensorDescription) -> dtypes.Dtype:
        """Return the dtype of the values of a source."""
        if source.quantized:
            return self._restored
        row = source.row
        if not source.floating or row.packed:
            raise FormatError(f"tensor {source.name!r} is {source.dtype}, expected floating-point numbers", tensor=name)
        return row if row.code in ("F32", "F16", "BF16") else _F32 if row.bits > 16 else self._restored

    def refuse_unknown(self, names: Iterable[str]) -> None:
        self.base.refuse_unknown(source for name in names for source in self.sources_of(name))

    def sources_of(self, name: str) -> list[str]:
        return list(dict.fromkeys(self.recipes[name].sources)) if name in self.recipes else []

    def matching(self, pattern: str) -> list[str]:
        """Return a pattern of names, or if no name matches, the names of the tensors with matching sources."""
        if any(fnmatchcase(name, pattern) for name in self):
            return [pattern]
        names = [name for name in self if any(fnmatchcase(source, pattern) for source in self.sources_of(name))]
        return names or [pattern]

    def unknown(self) -> dict[str, Unknown]:
        return {}

    def check_kept(self, name: str) -> None:
        for source in self.sources_of(name):
            self.base.check_kept(source)

    def source(self, name: str, threads: int | None = None, room: Room = private_array) -> Source | QuantizedTensor:
        recipe, renamed = self.recipes[name], self._renamed(name)
        if renamed is None or self.base.about(renamed).quantized:
            return super().source(name, threads, room)
        source = self.base.source(renamed, threads, room)
        return source if isinstance(source, QuantizedTensor) else source._replace(name=name, shape=recipe.shape)

    def restoring(self, name: str) -> Source | None:
        recipe, renamed = self.recipes[name], self._renamed(name)
        source = None if renamed is None else self.base.restoring(renamed)
        return source._replace(name=name) if source is not None and source.shape == recipe.shape else None

    def packed(self, name: str) -> Packed | None:
        source = self._renamed(name)
        return None if source is None else self.base.packed(source)

    def scheme(self, name: str) -> str | None:
        return next((scheme for source in self.sources_of(name) if (scheme := self.base.scheme(source))), None)

    def coded(self, name: str) -> Coded:
        recipe, matrices = self.recipes[name], dict[int, Matrix]()
        for move in recipe.moves:
            arrangement, item = move.arrangement or Arrangement(), move.written.item
            rows: Any = None if move.read.rows == slice(None) else move.read.rows
            only_rows = arrangement.columns is None and arrangement._replace(rows=None, inverse=False) == Arrangement()
            if not only_rows or move.read.transposed or move.written._replace(item=None) != TensorView():
                raise Immovable("its values are rearranged")
            if self.base.scheme(move.source) is None:
                raise Immovable("a part of it is not quantized")
            if arrangement.rows is not None:
                rows = np.argsort(arrangement.rows) if arrangement.inverse else arrangement.rows
            chosen = self.base.coded(move.source).part(move.read.item, rows)
            first = (item or 0) * math.prod(recipe.shape[1:-2] if item is not None else ())
            matrices.update(enumerate(chosen, first))
        result = Coded(recipe.shape, [each for _, each in sorted(matrices.items())])
        if len(matrices) != math.prod(recipe.shape[:-2]) or {each.shape for each in result.matrices} != {
            recipe.shape[-2:]
        }:
            raise Immovable("its values are rearranged")
        return result

    def value(self, name: str, threads: int | None = None, dtype: Any = None, room: Room = private_array) -> Any:
        source = self._renamed(name)
        if self.for_engine and dtype is None and source is not None and self.base.about(source).packed:
            return self.base.value(source, threads)
        return super().value(name, threads, dtype, room)

    def beside(self, name: str) -> list[str]:
        """Return the tensors that belong to the blocks of a tensor."""
        kept = self.recipes[name].blocks is not None
        return [scale for scale in scales_beside(name) if scale in self.recipes] if kept else []

    def stored(self, name: str) -> QuantizedTensor:
        recipe = self.recipes[name]
        if recipe.blocks is None:
            return super().stored(name)
        row = dtypes.BLOCK_TYPES[recipe.blocks]
        out: Array = np.empty((*recipe.shape[:-1], row.nbytes(recipe.shape[-1])), np.uint8)
        for move in recipe.moves:
            packed = self.base.packed(move.source)
            assert packed is not None
            target, rows = move.written.of(out), blocks_in(packed, move.read.item)
            if move.arrangement is None:
                target[...] = rows[move.read.rows].reshape(target.shape)
            else:
                move.arrangement.fill(target, rows, dtypes.BY_CODE["U8"], None)
        return QuantizedTensor(recipe.blocks, recipe.shape, out)

    # ---- values ----

    def release(self) -> None:
        """Free the memory of a source that was read as a whole."""
        self._whole = None

    def fill(self, arrays: Mapping[str, Array], *, threads: int | None = None, progress: Progress = None) -> None:
        """Fill C-contiguous arrays with tensors in their own dtypes, in one run as far as possible."""
        batch = jobs.Batch()
        for name, array in arrays.items():
            self._add(batch, self.recipes[name], self.about(name).row, array, threads)
        batch.run(threads=threads, progress=progress)
        self.release()

    def make(self, recipe: TensorRecipe, row: dtypes.Dtype, out: Array, threads: int | None) -> None:
        """Fill an array with a tensor or an item; several threads may call this if sources are plain and in files."""
        if recipe.constant is not None:
            out[...] = astype(recipe.constant, row.name)
        batch = jobs.Batch()
        self._add(batch, recipe, row, out, threads)
        if batch.jobs:
            batch.run(threads=threads)

    def _add(self, batch: jobs.Batch, recipe: TensorRecipe, row: dtypes.Dtype, out: Array, threads: int | None) -> None:
        """Add jobs to fill an array; if values need more than a job, they are made at once."""
        for move in recipe.moves:
            target, arrangement = move.written.of(out), move.arrangement
            if move.read == _WHOLE and arrangement is None and target.flags.c_contiguous:
                source = self.base.in_place(move.source)
                if source is None or source.row.packed:
                    stored: Array = target.reshape(self.base.about(move.source).shape)
                    self.base.read_into(move.source, row, stored, threads)
                elif source.size:
                    batch.jobs += source.jobs(batch.into(target), row.number)
            elif (job := self._transposing(move, row, target)) is not None:
                batch.results((target,))
                batch.jobs.append(job)
            else:
                work = _F32 if arrangement is not None and arrangement.computes else row
                array = self._item(move.source, move.read.item, work, threads)
                if arrangement is not None:
                    arrangement.fill(target, array, row, threads)
                else:
                    copy_values(target, move.read._replace(item=None).of(array), threads)

    def _transposing(self, move: Move, row: dtypes.Dtype, target: Array) -> jobs.Job | None:
        """Return a job that transposes a matrix while it is read; None if values must be made first."""
        part = move.turned
        source = self.base.in_place(move.source) if part is not None and target.flags.c_contiguous else None
        if part is None or source is None or source.packed is not None or source.row.packed or source.row.blocked:
            return None
        if len(source.shape) != (2 if part.item is None else 3):
            return None
        rows, across = source.shape[-2:]
        begin, end, _ = part.rows.indices(across)
        element, target_element = source.row.block_bytes, row.block_bytes
        grid = jobs.JobGrid(rows, end - begin, (across * element, element, target_element, rows * target_element))
        offset = source.offset + ((part.item or 0) * rows * across + begin) * element
        matrix = source._replace(shape=(rows, end - begin), offset=offset)
        return matrix.job(address_of(target), row.number, grid=grid) if target.size else None

    def _item(self, name: str, item: int | None, row: dtypes.Dtype, threads: int | None) -> Array:
        """Return an item of a source; sources that are read as a whole are kept for the next item."""
        place, about = self.base.place(name), self.base.about(name)
        if item is not None and place.file is not None and not about.packed and self.base.made(name) is None:
            array: Array = place.origin.take(name, [item], row.name)[0]  # reads the item only
            return array
        if self._whole is None or self._whole[:2] != (name, row.code):
            self._whole = None  # frees its memory first
            whole: Array = np.empty(about.shape, dtypes.array_dtype(row.number))
            self.base.read_into(name, row, whole, threads)
            self._whole = name, row.code, whole
        part: Array = self._whole[2] if item is None else self._whole[2][item]
        return part
