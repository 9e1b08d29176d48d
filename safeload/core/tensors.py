"""Tensors of files as columns, because 100,000 tensors should not need 100,000 objects, and how each is read.

And tensors that are created later, when they are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, repeat
from operator import and_, eq
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import UnsupportedError
from . import dtypes
from .arrays import Array, ArraySpec, foreign_order
from .forking import cached_property
from .packing import CODES, SCALE, SCHEMES, Packed, Packing, Part, int8_packing
from .runtime import paused
from .table import Columns, distinct
from .text import tensor_named
from .weight_file import WeightFile

# A tensor in a file: its name, the file, its index in the file's table.
FileTensor: TypeAlias = tuple[str, WeightFile, int]

# Bytes and elements of a block by dtype number; most dtypes have blocks of a single element.
_BYTES, _ELEMENTS = np.ones((2, 256), np.int64)
_QUANTIZING = (dtypes.of_number(number) for scheme in SCHEMES.values() for number in scheme.roundings.values())
for _row in (*dtypes.BY_NUMBER.values(), *_QUANTIZING):
    _BYTES[_row.number], _ELEMENTS[_row.number] = _row.block_bytes, _row.block


class Spans(NamedTuple):
    """Byte ranges of files or memory, read in order and converted to target dtypes."""

    files: Sequence[WeightFile | None]
    file: Array  # int64, index of the file
    begins: Array  # int64, first byte in the file, or address in memory
    sizes: Array  # int64, bytes in the file
    sources: Array  # uint8, dtype number in the file
    targets: Array  # uint8, dtype number of the result

    @property
    def lengths(self) -> Array:
        """Bytes of each result, int64."""
        _, _, _, sizes, sources, targets = self
        if sources.tobytes() == targets.tobytes():  # bytes are only copied
            return sizes
        lengths: Array = sizes // _BYTES[sources] * _ELEMENTS[sources] // _ELEMENTS[targets] * _BYTES[targets]
        return lengths

    def pick(self, rows: Array | slice) -> Spans:
        """Return the spans at these positions, in this order."""
        return Spans(self.files, *[column[rows] for column in self[1:]])

    def joined(self) -> Spans:
        """Return as few spans as possible with these bytes: without empty ones, neighbours of equal dtypes merged."""
        spans = self if self.sizes.all() else self.pick(self.sizes > 0)
        _, file, begins, sizes, sources, targets = spans
        if not sizes.size:
            return spans
        apart = np.ones(sizes.size, np.bool_)
        apart[1:] = (begins[1:] != begins[:-1] + sizes[:-1]) | (file[1:] != file[:-1])
        apart[1:] |= (sources[1:] != sources[:-1]) | (targets[1:] != targets[:-1])
        first = apart.nonzero()[0]
        return spans.pick(first)._replace(sizes=np.add.reduceat(sizes, first))

    def divided(self, limit: int) -> Spans:
        """Divide spans at whole blocks so that no result has more than ``limit`` bytes."""
        sources, targets = self.sources, self.targets
        unit = np.lcm(_ELEMENTS[sources], _ELEMENTS[targets])
        step = limit // (unit // _ELEMENTS[targets] * _BYTES[targets])
        step_bytes = step * (unit // _ELEMENTS[sources] * _BYTES[sources])
        parts = -(-self.sizes // step_bytes)
        if not parts.size or int(parts.max()) <= 1:
            return self
        rows = np.repeat(np.arange(len(parts)), parts)
        before = (np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)) * step_bytes[rows]
        spans = self.pick(rows)
        sizes = np.minimum(spans.sizes - before, step_bytes[rows])
        return spans._replace(begins=spans.begins + before, sizes=sizes)


class Tensors(Iterable[FileTensor]):
    """Tensors of one or more files, each a `FileTensor`. Columns are decoded on first use."""

    def __init__(
        self,
        files: Sequence[WeightFile],
        names: Sequence[str],
        indices: Sequence[int],
        file: Sequence[int] | None = None,
    ) -> None:
        self.files = files
        self.names = names
        self.indices = indices
        self.file = file

    @classmethod
    def of(cls, tensors: Iterable[FileTensor]) -> Tensors:
        """Collect tensors into columns."""
        if isinstance(tensors, Tensors):
            return tensors
        return cls.located({name: (file, index) for name, file, index in tensors})

    @classmethod
    def located(cls, where: Mapping[str, tuple[WeightFile, int]], names: Sequence[str] | None = None) -> Tensors:
        """Return the tensors of a mapping from names to files and indices."""
        names = [*where] if names is None else names
        files, indices = [*zip(*map(where.__getitem__, names), strict=True)] or [(), ()]
        places = dict(zip(dict.fromkeys(files), count(), strict=False))
        return cls([*places], names, indices, None if len(places) < 2 else [places[file] for file in files])

    @classmethod
    def in_file(cls, file: WeightFile, names: Iterable[str] | None = None) -> Tensors:
        """Return the tensors with these names, or all tensors in the order of their bytes."""
        if names is None:
            return cls([file], file.table.names, range(file.table.count))
        chosen = list(distinct(names))
        return cls([file], chosen, file.table.indices(chosen))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[FileTensor]:
        files: Iterable[WeightFile] = repeat(self.files[0]) if self.files else ()
        if self.file is not None:
            files = map(self.files.__getitem__, self.file)
        return zip(self.names, files, self.indices, strict=False)

    def pick(self, rows: Iterable[int], names: Sequence[str] | None = None) -> Tensors:
        """Return the tensors at these positions, in this order."""
        rows = rows.tolist() if isinstance(rows, np.ndarray) else list(rows)
        indices, file = self.indices, self.file
        return Tensors(
            self.files,
            [self.names[k] for k in rows] if names is None else names,
            [indices[k] for k in rows],
            None if file is None else [file[k] for k in rows],
        )

    def named(self, names: Sequence[str]) -> Tensors:
        """Return the tensors with these names, in this order."""
        if len(names) == len(self.names) and list(names) == list(self.names):
            return self
        places = {name: k for k, name in enumerate(self.names)}
        return self.pick([places[name] for name in names], names)

    def by_file(self) -> list[Tensors]:
        """Return the tensors of each file, ordered by the first tensor of each file."""
        if self.file is None:
            return [self] if len(self) else []
        rows: list[list[int]] = [[] for _ in self.files]
        for k, file in enumerate(self.file):
            rows[file].append(k)
        names, indices = self.names, self.indices
        return [
            Tensors([self.files[self.file[ks[0]]]], [names[k] for k in ks], [indices[k] for k in ks])
            for ks in sorted(filter(None, rows))
        ]

    @cached_property
    def columns(self) -> Columns:
        """Dtype numbers, logical shapes and byte ranges."""
        with paused(len(self)):
            if self.file is None:
                return self.files[0].table.columns(self.indices) if self.files else Columns(b"", (), (), ())
            tables = [file.table.columns(range(file.table.count)) for file in self.files]
            rows = [(tables[file], k) for file, k in zip(self.file, self.indices, strict=True)]
            return Columns(
                bytes([table.numbers[k] for table, k in rows]),
                [table.shapes[k] for table, k in rows],
                [table.begins[k] for table, k in rows],
                [table.ends[k] for table, k in rows],
            )

    @cached_property
    def spans(self) -> Spans:
        """Byte ranges, converted to nothing; in order only of tensors that are `whole`."""
        numbers, _, begins, ends = self.columns
        file = np.zeros(len(self), np.int64) if self.file is None else np.array(self.file, np.int64)
        first, sources = np.array(begins, np.int64), np.frombuffer(numbers, np.uint8)
        return Spans(self.files, file, first, np.array(ends, np.int64) - first, sources, sources)

    @property
    def remote(self) -> bool:
        """True if any file is read by requests."""
        return any(file.remote for file in self.files)

    @property
    def plain(self) -> bool:
        """True if all tensors of the files are `whole`, and none is in blocks."""
        return self.whole and not any(file.table.quantized for file in self.files)

    @property
    def whole(self) -> bool:
        """True if each tensor of the files is a single C-contiguous, little-endian range of elements or blocks."""
        tables = [file.table for file in self.files]
        return not any(table.shaped or table.scaled or dtypes.holds_packed(table.numbers) for table in tables)

    def without_packed(self, target: dtypes.Dtype | None) -> tuple[Tensors, Mapping[str, Packed]]:
        """Return the tensors that are not packed, and the packed tensors by name; int8 counts if it is dequantized."""
        for file in self.files:
            if file.table.quantized:
                break
        else:
            return self, {}
        packed: dict[str, Packed] = {}
        for name, file, index in self:
            codes = file.table.packed.get(index)
            if codes is None and target is not None and index in file.table.scales:
                codes = packed_of(file, index)
            if codes is not None:
                packed[name] = codes
        return (self.pick([k for k, name in enumerate(self.names) if name not in packed]) if packed else self), packed


def packed_of(file: WeightFile, index: int) -> Packed | None:
    """Return the codes and scales of a packed or int8 tensor; None for plain tensors."""
    table = file.table
    scale = table.scales.get(index)
    if scale is None:
        return table.packed.get(index)
    name, (number, shape, begin, end) = table.names[index], table.entry(index)
    parts = {
        CODES: Part(name, file, dtypes.BY_NUMBER[number], shape, begin, end),
        SCALE: Part(name, file, dtypes.F32, scale.shape, scale.begin, scale.end),
    }
    return Packed(int8_packing(shape, scale.axis), parts)


# ---- how each tensor becomes an array ----

# How a tensor becomes an array.
EMPTY = 0  # no bytes
VIEW = 1  # view of the mapped file
READ = 2  # bytes are read unchanged
CONVERT = 3  # values are converted while they are read, and blocks dequantized
STRIDED = 4  # non-contiguous, big-endian or sharing bytes: see `load.Block`

# Dtypes with arrays of bytes, not of elements.
_IN_BYTES = frozenset(number for number, row in dtypes.BY_NUMBER.items() if row.bits < 8)


class ReadPlan(NamedTuple):
    """How tensors of one file become arrays."""

    # The columns of the tensors are fields, because each is read several times while a small file loads.
    tensors: Tensors
    file: WeightFile
    names: Sequence[str]
    sources: bytes  # numbers of the dtypes in the file
    begins: Sequence[int]  # first bytes in the file
    ends: Sequence[int]  # one past the last bytes
    targets: bytes  # numbers of the dtypes of the arrays
    shapes: Sequence[tuple[int, ...]]  # of the arrays
    ways: bytearray  # `VIEW` and the like

    def dtype(self, k: int) -> np.dtype[Any]:
        """Return the dtype of the k-th array."""
        return dtypes.array_dtype(self.targets[k])

    def spec(self, k: int) -> ArraySpec:
        """Return the `ArraySpec` of the k-th tensor."""
        table = self.file.table
        place = self.begins[k], self.ends[k], self.sources[k], self.targets[k]
        index = self.tensors.indices[k]
        return ArraySpec(self.dtype(k), self.shapes[k], *place, table.strides.get(index), index in table.big_endian)

    def of_way(self, way: int) -> Sequence[int]:
        """Return the positions of the tensors with this way."""
        count = self.ways.count(way)
        if count == len(self.ways):
            return range(count)
        return [k for k, tensor_way in enumerate(self.ways) if tensor_way == way] if count else ()


def viewable(dtype: np.dtype[Any], begin: int) -> bool:
    """Return True if little-endian bytes at this position of a file can be shown as an array."""
    return begin % dtype.alignment == 0 and not (foreign_order(False) and dtype.itemsize > 1)


def decide(tensors: Tensors, target: dtypes.Dtype | None, view: bool) -> ReadPlan:
    """Decide how each tensor of a file becomes an array; floating tensors and blocks get the dtype ``target``."""
    file = tensors.files[0]
    table = file.table
    if table.unknown:
        table.refuse_unknown(tensors.indices, file.path)
    sources, shapes, begins, ends = tensors.columns
    present = set(sources)
    become, way = bytearray(range(256)), bytearray(256)
    masks = bytearray(256)  # by dtype: bits to be zero in an aligned address
    refused = []
    for number in present:
        row, dtype = dtypes.BY_NUMBER[number], dtypes.array_dtype(number)
        array_row = row.loaded_as(target)
        swapped = foreign_order(False) and dtype.itemsize > 1 and not table.shaped
        become[number], masks[number] = array_row.number, dtype.alignment - 1
        way[number] = CONVERT if array_row is not row else VIEW if view and not swapped else READ
        if not row.converts_to(array_row):
            refused.append(sources.index(number))
    targets, ways = bytearray(sources.translate(become)), bytearray(sources.translate(way))
    if refused and target is not None:
        k = min(refused)
        text = f"{tensor_named(tensors.names[k])}: cannot convert {dtypes.BY_NUMBER[sources[k]].code} to {target.code}"
        raise UnsupportedError(text, path=file.path, tensor=tensors.names[k])
    if not _IN_BYTES.isdisjoint(present):
        shapes = [
            dtypes.array_shape(dtypes.BY_NUMBER[source], shape, end - begin) if source == to else shape
            for source, to, shape, begin, end in zip(sources, targets, shapes, begins, ends, strict=True)
        ]
    unaligned = sources.translate(masks)
    if view and any(map(and_, begins, unaligned)):
        for k, (begin, mask) in enumerate(zip(begins, unaligned, strict=True)):
            if begin & mask and ways[k] == VIEW:
                ways[k] = READ
    if table.shaped:
        for k, (kind, index) in enumerate(zip(ways, tensors.indices, strict=True)):
            foreign = kind == VIEW and foreign_order(index in table.big_endian)
            if kind in (READ, CONVERT) or (foreign and dtypes.array_dtype(sources[k]).itemsize > 1):
                ways[k] = STRIDED
    if any(map(eq, begins, ends)):
        for k, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if begin == end:
                ways[k] = EMPTY
    return ReadPlan(tensors, file, tensors.names, sources, begins, ends, bytes(targets), shapes, ways)


class Entry(NamedTuple):
    """A tensor to read."""

    name: str
    file: WeightFile
    at: int  # index in the table of the file
    begin: int  # first byte in the file, or of the codes of a packed tensor
    end: int  # one past the last byte
    shape: tuple[int, ...]  # of the array
    source: int  # number of the dtype in the file
    target: int | None  # dtype number of the array; None for packed codes that are not restored
    packed: Packed | None = None  # codes and scales of the values
    strided: bool = False  # non-contiguous or big-endian in the file

    @property
    def tensor(self) -> FileTensor:
        """Name, file and index."""
        return self[:3]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array, if the tensor becomes a single array."""
        assert self.target is not None
        return dtypes.array_dtype(self.target)

    @property
    def nbytes(self) -> int:
        """Bytes of the array, or of the packed parts."""
        if self.target is None:
            assert self.packed is not None
            return self.packed.nbytes
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def repeated(self) -> bool:
        """True if elements share bytes of the file, and are not converted."""
        return self.strided and self.source == self.target and self.nbytes > self.end - self.begin


def in_file_order(entries: Iterable[Entry], files: Iterable[WeightFile]) -> list[Entry]:
    """Sort tensors by their bytes, file after file; files may be listed more than once."""
    rank = {file: k for k, file in enumerate(dict.fromkeys(files))}
    return sorted(entries, key=lambda entry: (rank[entry.file], entry.begin))


def entries_of(tensors: Iterable[FileTensor], target: dtypes.Dtype | None) -> list[Entry]:
    """Describe tensors one by one, in their order."""
    tensors = Tensors.of(tensors)
    entries: dict[str, Entry] = {}
    for file_tensors in tensors.by_file():
        file, table = file_tensors.files[0], file_tensors.files[0].table
        plain, packed = file_tensors.without_packed(target)
        plan = decide(plain, target, False)
        columns = zip(
            *(plan.names, plain.indices, plan.begins, plan.ends, plan.shapes),
            *(plan.sources, plan.targets, plan.ways),
            strict=True,
        )
        for name, index, begin, end, shape, source, to, way in columns:
            strided = way == STRIDED and (table.strides.get(index) is not None or index in table.big_endian)
            entries[name] = Entry(name, file, index, begin, end, shape, source, to, None, strided)
        indices = dict(zip(file_tensors.names, file_tensors.indices, strict=True)) if packed else {}
        for name, tensor in packed.items():
            source, _, begin, end = table.entry(indices[name])
            place = indices[name], begin, end, tensor.packing.shape, source
            entries[name] = Entry(name, file, *place, None if target is None else target.number, tensor)
    return [entries[name] for name in tensors.names]


# ---- tensors that are created when a writer reaches them: a file is written in the memory of one ----


class Lazy:
    """An array that is created later.

    ``create`` may overwrite the array of its previous call. Writers read many of the file tensors ``entry``, which have
    the same bytes, ahead in chunks, on ``threads``.
    """

    __slots__ = ("_create", "dtype", "entry", "shape", "threads", "written")  # the garbage collector visits no dict

    def __init__(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        create: Callable[[], Array],
        entry: Entry | None = None,
        threads: int | None = None,
    ) -> None:
        self.dtype, self.shape, self.entry, self.threads = dtype, shape, entry, threads
        self._create = create
        self.written: Callable[[int], object] | None = None  # gets the bytes of the array once the writer has them

    def make(self) -> Array:
        """Create the array and report its bytes."""
        array = self._create()
        self.report()
        return array

    def report(self) -> None:
        """Report the bytes of the array."""
        if self.written is not None:
            self.written(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class LazyParts:
    """A quantized tensor of several arrays that are created later; ``roles`` has codes and scale of safeload's schemes.

    If it is written unchanged, ``packing`` and ``names`` describe it as in `QuantizedTensor`. If it is in the format of
    another engine, whose ``config.json`` describes it, ``encoded`` is True and ``roles`` has the suffixes of its parts.
    """

    def __init__(
        self,
        scheme: str,
        shape: tuple[int, ...],
        roles: Mapping[str, Lazy],
        *,
        axis: int | None = None,
        packing: Packing | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
        encoded: bool = False,
    ) -> None:
        self.scheme, self.shape, self.roles, self.axis = scheme, shape, roles, axis
        self.packing, self.names, self.encoded = packing, names, encoded
        self.ours = packing is None and not encoded  # in a scheme of safeload
        self.data, self.scale = roles.get(CODES), roles.get(SCALE)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.roles.values())


def materialize(value: Array | Lazy) -> Array:
    """Return the array, creating it if it is `Lazy`."""
    return value.make() if isinstance(value, Lazy) else value
