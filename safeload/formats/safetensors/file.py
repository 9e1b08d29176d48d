"""Reads and writes safetensors files. csrc/formats/safetensors.c parses and writes the header."""

from __future__ import annotations

from array import array as plain_array
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, array_over, check_mapping, not_an_array, refuse_masked
from ...base.native import Error, check, ffi, lib, pointer, short
from ...base.paths import PathLike, native_path
from ...base.table import Table
from ...base.text import show
from ...engine import jobs
from ...engine.atomic_file import AtomicFile, pieces_of, written_as_is
from ...engine.lazy import Lazy, Staged, materialize
from ...engine.weight_file import WeightFile, layouts
from ...errors import SafetensorError
from ...stores.local import LocalStore, make_room
from ..registry import Candidate, Content, Wanted, explain

if TYPE_CHECKING:
    from ...engine.staging import StagedBytes

# Bytes of the size of the header, and the largest header that csrc/formats/safetensors.c takes.
_LENGTH, _MAX_HEADER = 8, 100_000_000

# ---- read ----


def open_file(path: PathLike, *, brief: bool = False) -> WeightFile:
    """Opens a file and validates its header; no tensor is read.

    Args:
        path: of the file.
        brief: see `LocalStore`.

    Raises:
        FormatError: the file breaks the format, or has another format.
        OSError: the file cannot be opened.
    """
    text, encoded = native_path(path)
    opened, table, error = ffi.new("sl_file *"), ffi.new("sl_table **"), Error()
    arguments = encoded, pointer(opened), pointer(table), pointer(error)
    status = short.sl_safetensors_open(*arguments)
    if status == lib.SL_E_OS and make_room(error.os_errno):
        status = short.sl_safetensors_open(*arguments)
    if status == lib.SL_E_FORMAT:
        known = explain(text)
        if known is not None:
            raise known
    check(status, error, text)
    return WeightFile(text, LocalStore(text, opened, brief=brief), Table(table[0]))


def read(candidate: Candidate, wanted: Wanted) -> Content:
    """An open file with its table, for a file that the C core does not open itself.

    Raises:
        FormatError: the file breaks the format.
        OSError: the header cannot be read.
    """
    file = candidate.file
    size = int.from_bytes(file.read_at(0, _LENGTH), "little")
    # A size that cannot be right is refused by the parser, which then needs no more than the size.
    valid = size <= min(_MAX_HEADER, file.size - _LENGTH)
    head = file.read_at(0, _LENGTH + size if valid else _LENGTH)
    table, error = ffi.new("sl_table **"), Error()
    status = lib.sl_safetensors_parse_head(ffi.from_buffer(head), len(head), file.size, table, error)
    check(status, error, file.path)
    file.table = Table(table[0])
    return Content(file)


def parse_table(data: Any) -> tuple[memoryview, Table]:
    """The bytes of a file in memory, and their table.

    Raises:
        FormatError: the bytes break the format.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("data must be contiguous bytes")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    table = ffi.new("sl_table **")
    error = Error()
    check(lib.sl_safetensors_parse(ffi.from_buffer(view), view.nbytes, table, error), error)
    return view, Table(table[0])


def parse(data: Any, *, copy: bool) -> dict[str, Array]:
    """The tensors of a file in memory, in the order of their bytes.

    Args:
        data: any C-contiguous bytes-like object.
        copy: False for views, read-only where ``data`` is; unaligned tensors are copied all the same.
    """
    return arrays_of(*parse_table(data), copy=copy)


def arrays_of(view: memoryview, table: Table, *, copy: bool) -> dict[str, Array]:
    """The tensors of a file in memory, see `parse`."""
    arrays = {}
    for name, (dtype, shape, begin, end, *_) in zip(table.names, layouts(table, range(table.count)), strict=True):
        if begin == end:
            arrays[name] = np.empty(shape, dtype)
            continue
        array = array_over(view, dtype, shape, begin)
        arrays[name] = jobs.native_order(array.copy() if copy else array)
    return arrays


# ---- write ----


class Memory(NamedTuple):
    """A tensor's bytes in file layout, at an address that the caller keeps valid.

    Attributes:
        row: row of the dtype table.
        shape: logical shape.
        address: of the first byte.
        nbytes: number of bytes.
    """

    row: dtypes.Dtype
    shape: Sequence[int]
    address: int
    nbytes: int


class _Source(NamedTuple):
    """One tensor to write: its header entry, and its data."""

    row: dtypes.Dtype
    shape: Sequence[int]
    data: Array | Lazy | Memory

    def pieces(self) -> Iterator[tuple[Any, int, int]]:
        """The tensor's bytes in order as (owner, address, bytes); memory in C order is passed on uncopied."""
        if isinstance(self.data, Memory):
            yield None, self.data.address, self.data.nbytes
            return
        yield from pieces_of(materialize(self.data))

    @property
    def staged(self) -> Staged | None:
        """How its bytes are read ahead; None for what `pieces` gives."""
        return self.data.staged if isinstance(self.data, Lazy) else None

    @property
    def streamed(self) -> bool:
        """Whether each of `pieces` is a buffer that must be written before the next one is made."""
        if isinstance(self.data, Memory):
            return False
        return isinstance(self.data, Lazy) or not written_as_is(self.data)


def _staged(ahead: Sequence[Staged]) -> AbstractContextManager[StagedBytes | None]:
    """The bytes of what is read ahead, if anything is."""
    if not ahead:
        return nullcontext()
    from ...engine.staging import StagedBytes  # only here: most files are loaded, or written from memory

    return closing(StagedBytes([one.entry for one in ahead], ahead[0].threads))


def _source(name: str, value: Any) -> _Source:
    if isinstance(value, Memory):
        return _Source(value.row, value.shape, value)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    refuse_masked(value, f"tensor {show(name)}")
    if not isinstance(value, (np.ndarray, Lazy)):
        raise not_an_array(f"tensor {show(name)}", value, safetensors=True)
    return _Source(dtypes.of_array(value, name), value.shape, value)


def write(
    tensors: Mapping[str, Any],
    metadata: Mapping[Any, Any] | None,
    path: PathLike,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Writes tensors from any format; `quantized.pack` turns quantized ones into plain ones."""
    from ..metadata import as_texts
    from .quantized import pack

    packed, texts = pack(tensors, as_texts(metadata or {}) or None)
    Writer(packed, texts).to_file(path, overwrite=overwrite, durable=durable)


class Writer:
    """A file to write: the header is built and the size known, the tensors are not copied yet.

    Args:
        tensors: name to array, `Memory` or `Lazy`.
        metadata: text to text, written in ascending order of keys; None for none.

    Raises:
        TypeError: a name is not a str, a value is not an array, or metadata is not text.
        SafetensorError: a dtype or a name that the format does not have, or a header that is too large.
    """

    def __init__(self, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> None:
        check_mapping(tensors, "tensors")
        if metadata is not None:
            check_mapping(metadata, "metadata", "text to text")
        sources = {_text(name, "a tensor name", tensor=name): _source(name, value) for name, value in tensors.items()}
        self._sources = list(sources.values())
        count = len(sources)
        columns = ffi.new("sl_columns *")
        keep = _Columns(columns)
        keep.texts("names", "name_ends", list(sources), separator=b"\n")
        keep.column("dtypes", bytes([s.row.number for s in self._sources]))
        keep.column("dims", plain_array("Q", [dim for s in self._sources for dim in s.shape]))
        keep.column("dim_ends", plain_array("Q", accumulate(len(s.shape) for s in self._sources)))
        columns.count = count
        if metadata is not None:
            pairs = sorted((_text(k, "a metadata key"), _text(v, f"metadata {show(k)}")) for k, v in metadata.items())
            columns.has_metadata = 1
            columns.metadata_count = len(pairs)
            keep.texts("metadata_text", "metadata_ends", [part for pair in pairs for part in pair], separator=b"")
        order, sizes = np.empty(count, np.uint32), np.empty(count, np.uint64)
        header, header_size, error = ffi.new("void **"), ffi.new("uint64_t *"), Error()
        check(
            lib.sl_safetensors_header(
                columns,
                ffi.from_buffer("uint32_t[]", order),
                ffi.from_buffer("uint64_t[]", sizes),
                header,
                header_size,
                error,
            ),
            error,
            subject="Error while serializing",
        )
        self._header = ffi.gc(header[0], lib.sl_free)
        self._header_size = header_size[0]
        names = list(sources)
        self._order: list[int] = order.tolist()
        for name, source, size in zip(names, self._sources, sizes.tolist(), strict=True):
            if isinstance(source.data, Memory):
                _check_memory(name, source.data, size)
        self.size: int = self._header_size + int(sizes.sum())

    def pieces(self) -> Generator[tuple[Any, int, int, bool]]:
        """All bytes in order as (owner, address, bytes, whether all so far must be used before the next step)."""
        yield self._header, int(ffi.cast("uintptr_t", self._header)), self._header_size, False
        sources = [self._sources[index] for index in self._order]
        ahead = [source.staged for source in sources if source.staged is not None]
        with _staged(ahead) as staged:
            for source in sources:
                one = source.staged
                if one is None or staged is None:
                    streamed = source.streamed
                    for owner, address, size in source.pieces():
                        yield owner, address, size, streamed
                    continue
                for address, size, last in staged.of_next(one.entry.nbytes):
                    yield staged, address, size, last
                if one.written is not None:
                    one.written()

    def to_bytes(self) -> bytes:
        """The whole file."""
        out = bytearray(self.size)
        position = 0
        with closing(self.pieces()) as pieces:
            for _owner, address, size, _streamed in pieces:
                if size:
                    out[position : position + size] = ffi.buffer(ffi.cast("char *", address), size)
                position += size
        return bytes(out)

    def to_file(self, path: PathLike, *, overwrite: bool = True, durable: bool = True) -> None:
        """Writes the file; see `AtomicFile`."""
        with AtomicFile(path, self.size, overwrite=overwrite, durable=durable) as file:
            self.write_to(file)

    def write_to(self, file: AtomicFile) -> None:
        """Writes all bytes into a file under construction."""
        waiting: list[tuple[int, int]] = []
        with closing(self.pieces()) as pieces:
            for _owner, address, size, streamed in pieces:
                waiting.append((address, size))
                if streamed:
                    file.write(waiting)
                    waiting.clear()
            file.write(waiting)


# The C type of each column.
_COLUMNS = {name: field.type for name, field in ffi.typeof("sl_columns").fields}


class _Columns:
    """Fills the input columns of ``sl_safetensors_header`` and keeps their memory alive."""

    def __init__(self, columns: Any) -> None:
        self._columns = columns
        self._alive: list[Any] = []

    def column(self, field: str, values: bytes | plain_array[int]) -> None:
        view = ffi.from_buffer(values) if len(values) else ffi.NULL
        self._alive += [values, view]
        setattr(self._columns, field, ffi.cast(_COLUMNS[field], view))

    def texts(self, field: str, ends_field: str, texts: Sequence[str], *, separator: bytes) -> None:
        encoded = [text.encode() for text in texts]
        self.column(field, separator.join([*encoded, b""]) if separator else b"".join(encoded))
        # The end of each is that of its text, before the separator.
        ends = accumulate((len(part) + len(separator) for part in encoded), initial=-len(separator))
        self.column(ends_field, plain_array("Q", islice(ends, 1, None)))


def _text(value: Any, what: str, *, tensor: str | None = None) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be str, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        message = f"{what} {show(value)} holds a lone surrogate, which UTF-8 cannot write"
        raise SafetensorError(message, tensor=tensor) from None
    return value


def _check_memory(name: str, memory: Memory, size: int) -> None:
    if memory.nbytes != size:
        raise SafetensorError(
            f"Error while serializing: tensor {show(name)}: data_len is {memory.nbytes}, but {memory.row.code} "
            f"{list(memory.shape)} needs {size} bytes",
            tensor=name,
        )
    if size and memory.address == 0:
        raise SafetensorError(f"Error while serializing: tensor {show(name)}: data_ptr is null", tensor=name)
