"""Descriptions of tensors: the table of a file, and `TensorInfo` for callers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import TensorNotFoundError, UnsupportedError
from . import dtypes
from .messages import error_about
from .native import ffi, short
from .packing import Packed
from .text import check_name, clip, printable, show

# With more names than this a missing one is reported without suggestions: difflib compares with each of them.
_SUGGEST_UP_TO = 5_000

# Characters of a name in that message, which shows the name without quotes: upstream's wording.
_NAME = 200

# One search in C takes as long as putting this many names into a dict. A dict is built once the searches have cost as
# much.
_SEARCH_COST = 16
# From this many numbers on numpy compares faster than Python makes a list of them.
_MANY = 100

# So many searches cost less than a dict, and the columns, of even a single tensor.
_FEW = 2

_COLUMNS = ffi.typeof("const sl_columns *")
_LITTLE = sys.byteorder == "little"


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        name: its name.
        dtype: its code, such as "BF16", or the label of its scheme if it is quantized, such as "fp8 128x128" or "int8".
        shape: logical shape, outermost axis first.
        nbytes: bytes of its elements, as in the file; of all parts of a packed tensor.
        file: path of the file that holds it.
        offset: byte in that file where its data begins.
        parts: names in the files of the tensors that it is made of: its own, unless it is packed.

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
        """Dtype of the array that loading it gives; None for a `QuantizedTensor`. F4 and F6 are raw uint8."""
        row = dtypes.BY_CODE.get(self.dtype)
        return None if row is None else dtypes.array_dtype(row.number)


class Columns(NamedTuple):
    """Properties of some tensors, one sequence per property. Must not be modified.

    Attributes:
        numbers: of their dtypes.
        shapes: logical shapes.
        begins: first byte of each in the file.
        ends: one past the last byte of each.
    """

    numbers: bytes
    shapes: Sequence[tuple[int, ...]]
    begins: Sequence[int]
    ends: Sequence[int]


# What `Table.entry` has of a tensor: number of its dtype, logical shape, first byte and one past the last byte.
Entry: TypeAlias = tuple[int, tuple[int, ...], int, int]


class Unknown(NamedTuple):
    """A tensor of a ggml type that this version does not know; the table lists its bytes up to the next tensor."""

    type: str  # the number, and the name if ggml has removed the type
    shape: tuple[int, ...]  # logical

    @property
    def label(self) -> str:
        """The type as listings show it."""
        return f"ggml type {self.type}"


class Table:
    """The tensors of one file in the order of their bytes, read lazily from the C core's columns.

    Attributes:
        count: number of tensors.
        shaped: whether any tensor may be non-contiguous, big-endian or share bytes with others: see `strides`,
            `big_endian` and `together`. False: each is C-contiguous, little-endian and has no aliases.
        quantized: whether any tensor may be in blocks, packed, or int8 with a scale.
        named_globals: globals that a pickle in the file names, and whether each is on the list of harmless ones.
        ternary: shapes of the tensors of I2_S, which are listed as bytes.
        unknown: tensors of unknown types, which are listed as bytes too.
        plain: whether the bytes of each tensor are its array: none is empty, unaligned, of another byte order than this
            machine's, or of elements that share bytes; and nothing above says more of any.
    """

    shaped = False
    quantized = False
    plain = False
    named_globals: Mapping[str, bool] = MappingProxyType({})
    ternary: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    unknown: Mapping[str, Unknown] = MappingProxyType({})

    _address = 0
    _names: list[str] | None = None
    _index: dict[str, int] | None = None
    _shapes: list[tuple[int, ...]] | None = None
    _rows: list[dtypes.Dtype] | None = None
    _entries: list[Entry] | None = None
    _searches = 0

    def __init__(self, address: int) -> None:
        self._address = address
        columns = self._columns = ffi.cast(_COLUMNS, address)
        self.count: int = columns.count
        if columns.plain and _LITTLE:
            self.plain = True

    def __del__(self, free: Any = short.sl_table_free) -> None:  # a default, as globals may be gone when Python ends
        free(self._address)

    def _bytes(self, column: str, size: int) -> bytes:
        return ffi.buffer(getattr(self._columns, column), size)[:] if size else b""

    def _column(self, name: str, count: int) -> list[int]:
        column: list[int] = ffi.unpack(getattr(self._columns, name), count) if count else []
        return column

    @property
    def names(self) -> list[str]:
        """Names in the order of the bytes. Must not be modified."""
        if self._names is None:
            self._names = self._make_names()
        return self._names

    def _make_names(self) -> list[str]:
        if self.count == 0:
            return []
        text = ffi.buffer(self._columns.names, self._columns.names_size - 1)  # without the last newline
        if self._columns.newline_in_names:
            starts = [0] + [end + 1 for end in self._column("name_ends", self.count)]
            return [str(text[begin : end - 1], "utf-8") for begin, end in pairwise(starts)]
        return str(text, "utf-8").split("\n")

    def sorted_names(self) -> list[str]:
        """Names in ascending order of their UTF-8 bytes, which is that of their code points."""
        # The caller gets a list of its own either way. A file that is only listed keeps no second one in memory.
        names = self._make_names() if self._names is None else list(self._names)
        if not self._columns.names_ascend:
            names.sort()
        return names

    def find(self, name: str) -> int:
        """Index of a tensor, -1 when there is none."""
        if self._index is not None:
            return self._index.get(name, -1)
        self._searches += 1
        if self._searches > _FEW and self._searches * _SEARCH_COST > self.count:
            self._index = {known: index for index, known in enumerate(self.names)}
            return self._index.get(name, -1)
        try:
            encoded = name.encode()
        except UnicodeEncodeError:  # no file has a name with a lone surrogate
            return -1
        return int(short.sl_table_find(self._address, encoded, len(encoded)))

    def index(self, name: str) -> int:
        """Index of a tensor.

        Raises:
            TensorNotFoundError: no tensor has this name.
        """
        check_name(name)
        found = self.find(name)
        if found < 0:
            raise missing(name, self.names)
        return found

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Logical shapes."""
        if self._shapes is None:
            columns, count = self._columns, self.count
            last = columns.dim_ends[count - 1] if count else 0
            rank, dims = last // max(count, 1), tuple(self._column("dims", last))
            if rank and self._are_of_rank(rank):
                self._shapes = list(zip(*[iter(dims)] * rank, strict=True))
            else:
                self._shapes = [dims[a:b] for a, b in pairwise([0, *self._column("dim_ends", count)])]
        return self._shapes

    def _are_of_rank(self, rank: int) -> bool:
        """Whether all shapes have so many dims."""
        if self.count < _MANY:
            return self._column("dim_ends", self.count) == list(range(rank, rank * self.count + 1, rank))
        ends = np.frombuffer(ffi.buffer(self._columns.dim_ends, 8 * self.count), np.uint64)
        return bool(ends[0] == rank and (np.diff(ends) == rank).all())

    def begins(self) -> list[int]:
        """First byte of each tensor in the file."""
        return self._column("begins", self.count)

    @property
    def rows(self) -> list[dtypes.Dtype]:
        """Rows of the dtype table."""
        if self._rows is None:
            self._rows = [dtypes.BY_NUMBER[number] for number in self.numbers]
        return self._rows

    @property
    def numbers(self) -> bytes:
        """Numbers of the dtypes."""
        return self._bytes("dtypes", self.count)

    def shape(self, index: int) -> tuple[int, ...]:
        """Logical shape of one tensor, without decoding the others."""
        if self._shapes is not None:
            return self._shapes[index]
        columns = self._columns
        if index == 0:
            return tuple(ffi.unpack(columns.dims, columns.dim_ends[0]))
        ends = columns.dim_ends
        begin = ends[index - 1]
        return tuple(ffi.unpack(columns.dims + begin, ends[index] - begin))

    def row(self, index: int) -> dtypes.Dtype:
        """Row of the dtype table of one tensor."""
        return dtypes.BY_NUMBER[self._columns.dtypes[index]]

    def byte_range(self, index: int) -> tuple[int, int]:
        """Bytes of one tensor in the file: [begin, end)."""
        return self._columns.begins[index], self._columns.ends[index]

    def byte_ranges(self) -> list[tuple[int, int]]:
        """Bytes of each tensor in the file."""
        return list(zip(self._column("begins", self.count), self._column("ends", self.count), strict=True))

    def entry(self, index: int) -> Entry:
        """What is needed of one tensor to read it."""
        if self._entries is not None:
            return self._entries[index]
        if self._index is not None:  # many have been searched for: from now on each takes one step
            self._entries = list(zip(*self._all_columns(), strict=True))
            return self._entries[index]
        columns = self._columns
        return columns.dtypes[index], self.shape(index), columns.begins[index], columns.ends[index]

    def columns(self, indices: Sequence[int]) -> Columns:
        """Properties of some tensors; where these are few, the others are not decoded."""
        whole = indices == range(self.count)
        if not whole and len(indices) * _SEARCH_COST < self.count:
            ranges = [self.byte_range(i) for i in indices]
            numbers = bytes([self.row(i).number for i in indices])
            return Columns(numbers, [self.shape(i) for i in indices], [b for b, _ in ranges], [e for _, e in ranges])
        columns = self._all_columns()
        if whole:
            return columns
        numbers, shapes, begins, ends = columns
        pick = bytes([numbers[i] for i in indices]), [shapes[i] for i in indices]
        return Columns(*pick, [begins[i] for i in indices], [ends[i] for i in indices])

    def _all_columns(self) -> Columns:
        return Columns(self.numbers, self.shapes, self._column("begins", self.count), self._column("ends", self.count))

    def sizes(self) -> list[int]:
        """Size of each tensor's elements in bytes."""
        return [end - begin for begin, end in self.byte_ranges()]

    def big_endian(self, index: int) -> bool:
        """Whether the elements of one tensor are big-endian."""
        return False

    def strides(self, index: int) -> tuple[int, ...] | None:
        """Bytes between neighbours along each axis of one tensor; None where they are those of C order."""
        return None

    def together(self, index: int) -> list[int]:
        """One tensor and those that share bytes with it, in ascending order."""
        return [index]

    def scale(self, index: int) -> Scale | None:
        """The scales of one tensor where it is quantized int8, else None."""
        return None

    def packed(self, index: int) -> Packed | None:
        """The codes and scales of one tensor where it is packed, else None."""
        return None

    def is_quantized(self, index: int) -> bool:
        """Whether one tensor is in blocks, packed, or int8 with a scale."""
        if not self.quantized:
            return False
        return self.row(index).blocked or self.scale(index) is not None or self.packed(index) is not None

    def refuse_unknown(self, indices: Iterable[int], path: str) -> None:
        """Refuse to read tensors of unknown types.

        Raises:
            UnsupportedError: the message names the tensor and its type.
        """
        for index in indices if self.unknown else ():
            name = self.names[index]
            if name in self.unknown:
                raise error_about(
                    UnsupportedError,
                    f": {self.unknown[name].label} is unknown to this version, so its values cannot be read; select "
                    "the other tensors by names, only= or drop=",
                    path=path,
                    tensor=name,
                )

    def may_be_packed(self) -> bool:
        """Whether any tensor may hold codes, by the dtypes alone."""
        return dtypes.may_hold_codes(self.numbers)

    def metadata(self) -> Mapping[str, Any] | None:
        """``__metadata__``; None when the file has none. The last value of a duplicate key counts."""
        columns = self._columns
        if not columns.has_metadata:
            return None
        text = self._bytes("metadata_text", columns.metadata_size)
        ends = self._column("metadata_ends", 2 * columns.metadata_count)
        parts = [text[a:b].decode() for a, b in pairwise([0, *ends])]
        return dict(zip(parts[::2], parts[1::2], strict=True))


class Scale(NamedTuple):
    """Where the scales of an int8 tensor are in its file.

    Attributes:
        axis: axis of per-axis scales: one for each index along it; None for one scale of the whole tensor.
        shape: of the scales, which are F32.
        begin: first byte.
        end: one past the last byte.
    """

    axis: int | None
    shape: tuple[int, ...]
    begin: int
    end: int


def hidden(name: str, whole: str, path: str) -> TensorNotFoundError:
    """The error for a tensor that is a part of another (of none: it scales activations) and not shown itself."""
    what = f"is a part of {show(whole)}" if whole else "scales activations, not weights"
    return error_about(TensorNotFoundError, f"{what}; open with stored=True", path=path, tensor=name)


def missing(name: str, names: Sequence[str]) -> TensorNotFoundError:
    """The error for an unknown name, with suggestions.

    Raises:
        TypeError: the name is not a str.
    """
    check_name(name)
    from fnmatch import fnmatchcase  # only here: it is needed by this message alone

    message = f"File does not contain tensor {clip(printable(name), _NAME)}"
    if any(c in name for c in "*?[") and any(fnmatchcase(known, name) for known in names[:_SUGGEST_UP_TO]):
        return TensorNotFoundError(f"{message}: names are exact; only= of safeload.load takes patterns", tensor=name)
    close = similar(name, names)
    if close:
        message += f"; close to it: {', '.join(close)}"
    return TensorNotFoundError(message, tensor=name)


def similar(name: str, names: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """Up to three names that are similar to another one, for a message; none among very many.

    Args:
        name: the name that was asked for.
        names: the existing names.
        cutoff: ratio from which `difflib.get_close_matches` takes a name.
    """
    import difflib  # only here: at the top it would add a millisecond to `import safeload`

    close = difflib.get_close_matches(name, names, n=3, cutoff=cutoff) if len(names) <= _SUGGEST_UP_TO else []
    return [clip(printable(known), _NAME) for known in close]
