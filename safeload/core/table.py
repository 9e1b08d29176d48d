"""Tensor descriptions: the table of a file, and `TensorInfo` for callers."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import UnsupportedError, exported
from . import dtypes
from .arrays import ArraySpec, array_spec
from .native import ITEM_SETTER, MAKERS, TEXT_MAKER, bytes_at, columns_at, ffi, lib, short
from .text import check_name, error_about, missing, printable

if TYPE_CHECKING:
    from .packing import Packed

# A search in C takes as long as adding this many names to a dict. A dict is built as soon as the searches have cost as
# much as the dict will.
_SEARCH_COST = 16
# Up to this many tensors, making a tuple of each costs less than decoding columns.
FEW = _SEARCH_COST

_COLUMNS, _NUMBERS = map(ffi.typeof, ("const sl_columns *", "const uint64_t *"))
# Places of fields in `native.columns_at`.
_NAMES, _NAMES_SIZE, _NAME_ENDS, _DTYPES, _DIMS, _DIM_ENDS, _BEGINS, _ENDS = range(1, 9)
_ASCEND, _NEWLINES, _PLAIN, _HAS_METADATA, _PAIRS, _METADATA, _METADATA_ENDS, _METADATA_SIZE = range(9, 17)
_LITTLE = sys.byteorder == "little"


@exported()
class TensorInfo(NamedTuple):
    """Description of a tensor in a checkpoint.

    Attributes:
        name: name of the tensor.
        dtype: its code, such as "BF16", or the label of its scheme if it is quantized, such as "fp8 128x128" or "int8".
        shape: logical shape, outermost axis first.
        nbytes: size of its elements in the file; for a packed tensor, of all its parts.
        file: path of the file.
        offset: byte in the file at which its data begins.
        parts: names of its stored tensors; only its own name unless it is packed.

    Example:
        >>> import safeload
        >>> info = safeload.open("tiny-llama").tensors["lm_head.weight"]
        >>> info.dtype, info.shape, info.nbytes
        ('BF16', (96, 64), 12288)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int
    parts: tuple[str, ...] = ()

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def np_dtype(self) -> np.dtype[Any] | None:
        """Dtype of the loaded array; None for a `QuantizedTensor`. F4 and F6 load as raw uint8."""
        row = dtypes.BY_CODE.get(self.dtype)
        return None if row is None else dtypes.array_dtype(row.number)


class Columns(NamedTuple):
    """Properties of tensors, in a sequence per property. Must not be modified."""

    numbers: bytes  # of the dtypes
    shapes: Sequence[tuple[int, ...]]  # logical
    begins: Sequence[int]  # first byte of each tensor in the file
    ends: Sequence[int]  # one past the last byte


# A tensor in `Table.entry`: number of the dtype, logical shape, first byte, and one past the last byte.
Entry: TypeAlias = tuple[int, tuple[int, ...], int, int]


class Unknown(NamedTuple):
    """A listed entry with unreadable values; the table lists its bytes, if they have a place."""

    label: str  # the dtype in listings, such as "ggml type 99"
    shape: tuple[int, ...]  # logical
    reason: str  # follows the label in messages
    is_tensor: bool = True  # False for texts and objects, which `convert` leaves out
    is_missing: bool = False  # nothing stores its values


class Table:
    """The tensors of a file in the order of their bytes, read lazily from the C core's columns.

    Attributes:
        count: number of tensors
        shaped: whether any tensor can be non-contiguous, big-endian or overlap another tensor (see `strides`,
            `big_endian` and `together`). If False, all tensors are C-contiguous, little-endian and disjoint.
        quantized: whether any tensor can be blocked, packed, or int8 with a scale
        plain: whether the bytes of every tensor are its array, with no exception above: no tensor is empty,
            unaligned, or of another byte order than this machine's, and no elements share bytes
    """

    shaped = False
    quantized = False
    plain = False
    # globals named by a pickle in the file, and whether each is on the allowlist
    named_globals: Mapping[str, bool] = MappingProxyType({})
    ternary: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # shapes of I2_S tensors, which are listed as bytes
    unknown: Mapping[str, Unknown] = MappingProxyType({})  # entries that cannot be read, which are also listed as bytes

    _address = 0
    _cdata: Any = None
    _names: list[str] | None = None
    _index: dict[str, int] | None = None
    _shapes: list[tuple[int, ...]] | None = None
    _rows: list[dtypes.Dtype] | None = None
    _entries: list[Entry] | None = None
    _searches = 0
    # Rare properties, by the index of a tensor.
    strides: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # bytes along each axis, if not in C order
    scales: Mapping[int, Scale] = MappingProxyType({})  # of int8
    packed: Mapping[int, Packed] = MappingProxyType({})  # codes and scales
    big_endian: Collection[int] = ()
    _groups: Mapping[int, list[int]] = MappingProxyType({})  # of tensors that overlap
    _metadata: Mapping[str, Any] | None = None

    def __init__(self, address: int, fields: Sequence[int] | None = None) -> None:
        self._address = address
        fields = self._fields = columns_at(address) if fields is None else fields
        self.count: int = fields[0]
        if fields[_PLAIN] and _LITTLE:
            self.plain = True

    def __del__(self, free: Any = short.sl_table_free) -> None:  # a default, because globals may be gone at exit
        free(self._address)

    def _columns(self) -> Any:
        columns = self._cdata
        if columns is None:
            columns = self._cdata = ffi.cast(_COLUMNS, self._address)
        return columns

    def _column(self, field: int, count: int) -> list[int]:
        column: list[int] = ffi.unpack(ffi.cast(_NUMBERS, self._fields[field]), count) if count else []
        return column

    @property
    def names(self) -> list[str]:
        """Names in the order of the bytes. Must not be modified."""
        if self._names is None:
            self._names, _ = self._list_names(False)
        return self._names

    def _list_names(self, ascending: bool) -> tuple[list[str], bool]:
        """Return the names, in ascending order if asked for and known to the core, and whether they ascend."""
        names = [""] * self.count
        return names, bool(short.sl_table_list_names(self._address, ascending, TEXT_MAKER, ITEM_SETTER, id(names)))

    def sorted_names(self) -> list[str]:
        """Return the names in ascending order of their UTF-8 bytes, which is also the order of their code points."""
        # The caller gets a new list either way, so listing a large file should not keep a second list in memory.
        if self._names is None and self.count > FEW:
            names, ascend = self._list_names(True)
        else:
            names, ascend = list(self.names), bool(self._fields[_ASCEND])
        if not ascend:
            names.sort()
        return names

    def find(self, name: str) -> int:
        """Return the index of a tensor, or -1."""
        if self._index is None:
            self._searches += 1
            if self._address and self._searches * _SEARCH_COST <= self.count:
                try:
                    encoded = name.encode()
                except UnicodeEncodeError:  # no file has a name with a lone surrogate
                    return -1
                return int(short.sl_table_find(self._address, encoded, len(encoded)))
            self._index = dict(zip(self.names, range(self.count), strict=True))
        return self._index.get(name, -1)

    def index(self, name: str) -> int:
        """Return the index of a tensor."""
        index = self.find(name) if isinstance(name, str) else -1
        if index < 0:
            check_name(name)
            raise missing(name, self.names)
        return index

    def indices(self, names: list[str]) -> Sequence[int]:
        """Return the index of each tensor: a range if they are neighbours."""
        if len(names) > 1:
            begin = self.index(names[0])
            end = begin + len(names)
            if end <= self.count and self._names_between(begin, end) == names:
                return range(begin, end)
        return [self.index(name) for name in names]

    def _names_between(self, begin: int, end: int) -> list[str]:
        """Return the names of neighbouring tensors; wrong ones, and more, if names have newlines."""
        if self._names is not None or end - begin == self.count:
            return self.names[begin:end]
        columns = self._columns()
        first = columns.name_ends[begin - 1] + 1 if begin else 0
        return str(ffi.buffer(columns.names + first, columns.name_ends[end - 1] - first), "utf-8").split("\n")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Logical shapes."""
        if self._shapes is None:
            self._shapes = self._shapes_between(0, self.count)
        return self._shapes

    def _shapes_between(self, begin: int, end: int) -> list[tuple[int, ...]]:
        """Return shapes of neighbours; equal shapes share a tuple, because the garbage collector visits each tuple."""
        shapes: list[Any] = [()] * (end - begin)
        short.sl_table_list_shapes(self._address, begin, end, MAKERS, id(shapes))
        return shapes

    def begins(self) -> list[int]:
        """Return the first byte of each tensor in the file."""
        return self._column(_BEGINS, self.count)

    @property
    def rows(self) -> list[dtypes.Dtype]:
        """Rows of the dtype table."""
        if self._rows is None:
            self._rows = [dtypes.BY_NUMBER[number] for number in self.numbers]
        return self._rows

    @property
    def numbers(self) -> bytes:
        """Numbers of the dtypes."""
        numbers: bytes = bytes_at(self._fields[_DTYPES], self.count)
        return numbers

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the logical shape of a tensor, without decoding other shapes."""
        if self._shapes is not None:
            return self._shapes[index]
        return self._shapes_between(index, index + 1)[0]

    def row(self, index: int) -> dtypes.Dtype:
        """Return a tensor's row of the dtype table."""
        return dtypes.BY_NUMBER[self._columns().dtypes[index]]

    def byte_range(self, index: int) -> tuple[int, int]:
        """Return the bytes of a tensor in the file: [begin, end)."""
        columns = self._columns()
        return columns.begins[index], columns.ends[index]

    def byte_ranges(self) -> list[tuple[int, int]]:
        """Return the bytes of each tensor in the file."""
        return list(zip(self._column(_BEGINS, self.count), self._column(_ENDS, self.count), strict=True))

    def layout(self, index: int) -> ArraySpec:
        """Return the layout of a tensor, without conversion."""
        columns = self._columns()
        row, place = dtypes.BY_NUMBER[columns.dtypes[index]], (columns.begins[index], columns.ends[index])
        layout = array_spec(row, self.shape(index), *place)
        if self.shaped:
            return layout._replace(strides=self.strides.get(index), big_endian=index in self.big_endian)
        return layout

    def entry(self, index: int) -> Entry:
        """Return the properties needed to read a tensor."""
        entries = self._entries
        if entries is None and self._index is None:
            columns = self._columns()
            return columns.dtypes[index], self.shape(index), columns.begins[index], columns.ends[index]
        return (entries or self.entries())[index]  # after many searches, or in a small table

    def entries(self) -> list[Entry]:
        """Return the properties of all tensors, each with a shape of its own. Must not be modified."""
        if self._entries is None:
            if self._address:
                entries: list[Any] = [None] * self.count
                short.sl_table_list_entries(self._address, MAKERS, id(entries))
            else:
                entries = list(zip(*self._columns_between(0, self.count), strict=True))
            self._entries = entries
        return self._entries

    def columns(self, indices: Sequence[int]) -> Columns:
        """Return the properties of tensors; if they are few, the rest of the table is not decoded."""
        if isinstance(indices, range) and indices.step == 1:
            return self._columns_between(indices.start, indices.stop)
        if len(indices) * _SEARCH_COST < self.count:
            of: Any = [*zip(*map(self.entry, indices), strict=True)] or [()] * 4
            return Columns(bytes(of[0]), *of[1:])
        numbers, shapes, begins, ends = self._columns_between(0, self.count)
        pick = bytes([numbers[i] for i in indices]), [shapes[i] for i in indices]
        return Columns(*pick, [begins[i] for i in indices], [ends[i] for i in indices])

    def _columns_between(self, begin: int, end: int) -> Columns:
        if begin == 0 and end == self.count:
            return Columns(self.numbers, self.shapes, self._column(_BEGINS, end), self._column(_ENDS, end))
        columns, count = self._columns(), end - begin
        return Columns(
            self.numbers[begin:end],
            self._shapes_between(begin, end) if self._shapes is None else self._shapes[begin:end],
            ffi.unpack(columns.begins + begin, count),
            ffi.unpack(columns.ends + begin, count),
        )

    def sizes(self) -> list[int]:
        """Return the size of each tensor's elements in bytes, without gaps; a repeated element counts each time."""
        if self.shaped:
            sizes = [row.nbytes(prod(shape)) for shape, row in zip(self.shapes, self.rows, strict=True)]
        else:
            sizes = [end - begin for begin, end in self.byte_ranges()]
        for index, packed in self.packed.items():
            sizes[index] = packed.nbytes
        return sizes

    def together(self, index: int) -> list[int]:
        """Return the tensors that overlap a tensor, itself included, in ascending order."""
        return self._groups.get(index, [index])

    @property
    def scaled(self) -> bool:
        """Whether any tensor can be packed, or int8 with a scale."""
        return bool(self.scales or self.packed)

    def is_quantized(self, index: int) -> bool:
        """Return whether a tensor is blocked, packed, or int8 with a scale."""
        if not self.quantized:
            return False
        return self.row(index).blocked or index in self.scales or index in self.packed

    def refuse_unknown(self, indices: Iterable[int], path: str) -> None:
        """Refuse to read unreadable entries."""
        for index in indices if self.unknown else ():
            name = self.names[index]
            if name in self.unknown:
                label, _, reason, *_ = self.unknown[name]
                text = f": {label} {reason}; select the other tensors by names, only= or drop="
                raise error_about(UnsupportedError, text, path=path, tensor=name)

    def may_be_packed(self) -> bool:
        """Return whether any tensor can hold codes, judging by the dtypes alone."""
        return dtypes.may_hold_codes(self.numbers)

    def metadata(self) -> Mapping[str, Any] | None:
        """Return ``__metadata__`` or all other content of the file, or None. The last value of a duplicate key wins."""
        fields = self._fields
        if not fields[_HAS_METADATA]:
            return self._metadata
        text: bytes = bytes_at(fields[_METADATA], fields[_METADATA_SIZE])
        ends = [0, *self._column(_METADATA_ENDS, 2 * fields[_PAIRS])]
        parts = [text[a:b].decode() for a, b in pairwise(ends)]
        return dict(zip(parts[::2], parts[1::2], strict=True))


class Scale(NamedTuple):
    """Location of the scales of an int8 tensor in its file."""

    axis: int | None  # the axis with a scale for each index; None for a single scale of the whole tensor
    shape: tuple[int, ...]  # of the scales, which are F32
    begin: int  # first byte
    end: int  # one past the last byte


def distinct(names: Iterable[str]) -> Iterable[str]:
    """Return exact names without duplicates; TypeError for a single str, whose characters would count as names."""
    if isinstance(names, str):
        raise TypeError("names must be an iterable of names, got a single str: pass a list, such as [name]")
    if not isinstance(names, Iterable):
        raise TypeError(f"names must be an iterable of names, got {type(names).__name__}")
    return names if isinstance(names, dict) else dict.fromkeys(names)


# ---- tables built in Python, for packed tensors and formats without a parser in C ----


class Listing(NamedTuple):
    """A tensor of a `ListedTable`."""

    name: str
    row: dtypes.Dtype
    shape: tuple[int, ...]  # logical
    begin: int  # first byte in the file
    end: int  # one past the last byte
    strides: tuple[int, ...] | None = None  # bytes between neighbours along each axis; None for C order
    scale: Scale | None = None  # of quantized int8
    packed: Packed | None = None  # codes and scales of a packed tensor; row, begin and end describe its codes
    big_endian: bool = False
    unknown: Unknown | None = None  # the entry cannot be read; row and shape describe its bytes


def unreadable(name: str, unknown: Unknown, begin: int = 0, end: int = 0) -> Listing:
    """List an unreadable entry."""
    unknown = unknown._replace(label=printable(unknown.label))
    return Listing(name, dtypes.BY_NUMBER[lib.SL_UNKNOWN], (end - begin,), begin, end, unknown=unknown)


# Types of the columns of a `ListedTable`.
_KINDS = "uint8_t[]", "uint64_t[]", "uint64_t[]"


class ListedTable(Table):
    """A table built in Python, in the order of the caller; tensors may overlap.

    The caller has validated the tensors: unique names, byte ranges inside the file, shapes and strides inside the
    ranges.
    """

    def __init__(
        self,
        tensors: Iterable[Listing],
        metadata: Mapping[str, Any] | None = None,
        *,
        big_endian: bool = False,
        named_globals: Mapping[str, bool] | None = None,
    ) -> None:
        # Numbers go into compact columns, rare properties into dicts, because a file can have a tensor every 14 bytes.
        names: list[str] = []
        shapes: list[tuple[int, ...]] = []
        numbers, begins, ends = self._memory = bytearray(), array("Q"), array("Q")
        self.strides, self.scales, self.packed = strided, scales, coded = {}, {}, {}
        swapped: set[int] = set()
        self.unknown = unknowns = {}
        for index, (name, row, shape, begin, end, strides, scale, packed, big, unknown) in enumerate(tensors):
            names.append(name)
            numbers.append(row.number)
            shapes.append(shape)
            begins.append(begin)
            ends.append(end)
            if strides is not None:
                strided[index] = strides
            if scale is not None:
                scales[index] = scale
            if packed is not None:
                coded[index] = packed
            if big:
                swapped.add(index)
            if unknown is not None:
                unknowns[name] = unknown
        columns = dict(zip(("dtypes", "begins", "ends"), map(ffi.from_buffer, _KINDS, self._memory), strict=True))
        self._cdata = ffi.new("sl_columns *", {"count": len(names), **columns})
        super().__init__(0, columns_at(int(ffi.cast("uintptr_t", self._cdata))))
        self._names, self._shapes = names, shapes
        self.big_endian = range(self.count) if big_endian else swapped
        self.quantized = self.scaled or any(dtypes.BY_NUMBER[number].blocked for number in set(numbers))
        self._metadata = metadata
        self.named_globals = named_globals or {}
        self._groups = overlap_groups(begins, ends)
        self.shaped = bool(self.big_endian) or bool(self._groups) or bool(self.strides)

    def replace_rows(self, old: dtypes.Dtype, new: dtypes.Dtype) -> None:
        """Replace a dtype by another of the same size."""
        numbers, *_ = self._memory
        numbers[:] = numbers.replace(bytes([old.number]), bytes([new.number]))
        self._rows = self._entries = None


def overlap_groups(begins: Sequence[int], ends: Sequence[int]) -> dict[int, list[int]]:
    """Return, for each overlapping range, the sorted indices of its connected group."""
    if all(end <= begin for end, begin in zip(ends, islice(begins, 1, None), strict=False)):
        return {}
    first, last = np.array(begins, np.uint64), np.array(ends, np.uint64)
    order = np.flatnonzero(first < last)
    order = order[np.argsort(first[order], kind="stable")]
    edges = np.flatnonzero(first[order][1:] >= np.maximum.accumulate(last[order])[:-1]) + 1
    starts = np.append(0, edges)
    sizes = np.diff(np.append(starts, len(order)))
    shared = zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True)
    groups = [sorted(order[start : start + size].tolist()) for start, size in shared]
    return {index: group for group in groups for index in group}
