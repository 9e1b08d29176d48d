"""Reads and writes safetensors files. csrc/formats/safetensors.c parses and writes the header."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import groupby
from operator import attrgetter
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
from .header import Header, text

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

# Arrays of at most this many bytes are copied into buffers of about this size, of which each is written at once.
_SMALL, _TOGETHER = 64 << 10, 1 << 20

# Types of values that are not masked arrays.
_PLAIN = (np.ndarray, Lazy)


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
    def small(self) -> bool:
        """Whether it is an array that is written together with its neighbours."""
        data = self.data
        return isinstance(data, np.ndarray) and data.nbytes <= _SMALL and written_as_is(data)

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
    if not isinstance(value, (np.ndarray, Lazy)):
        raise not_an_array(f"tensor {show(name)}", value, safetensors=True)
    if type(value) not in _PLAIN:
        refuse_masked(value, f"tensor {show(name)}")
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
        names = list(tensors)
        for name in names:
            if type(name) is not str:
                text(name, "a tensor name", tensor=name)
        self._sources = [_source(name, tensors[name]) for name in names]
        shapes = [source.shape for source in self._sources]
        self._header = Header(names, bytes([source.row.number for source in self._sources]), shapes, metadata)
        self._order: list[int] = self._header.order.tolist()
        for name, source, size in zip(names, self._sources, self._header.sizes.tolist(), strict=True):
            if isinstance(source.data, Memory):
                _check_memory(name, source.data, size)
        self.size: int = self._header.nbytes + int(self._header.sizes.sum())

    def pieces(self) -> Generator[tuple[Any, int, int, bool]]:
        """All bytes in order as (owner, address, bytes, whether all so far must be used before the next step)."""
        yield self._header.memory, self._header.address, self._header.nbytes, False
        sources = [self._sources[index] for index in self._order]
        ahead = [source.staged for source in sources if source.staged is not None]
        with _staged(ahead) as staged:
            for small, group in groupby(sources, attrgetter("small")):
                if small:
                    yield from _together(group)
                    continue
                for source in group:
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


def _together(sources: Iterable[_Source]) -> Iterator[tuple[Any, int, int, bool]]:
    """Small arrays one after the other in buffers: a system call for each would take longer than the copy."""
    waiting: list[Any] = []
    size = 0
    for source in sources:
        data = source.data
        assert isinstance(data, np.ndarray)
        waiting.append(data)
        size += data.nbytes
        if size >= _TOGETHER:
            yield _joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(arrays: list[Any]) -> tuple[Any, int, int, bool]:
    joined = b"".join(arrays)
    return joined, pointer(ffi.from_buffer(joined)), len(joined), True


def _check_memory(name: str, memory: Memory, size: int) -> None:
    if memory.nbytes != size:
        raise SafetensorError(
            f"Error while serializing: tensor {show(name)}: data_len is {memory.nbytes}, but {memory.row.code} "
            f"{list(memory.shape)} needs {size} bytes",
            tensor=name,
        )
    if size and memory.address == 0:
        raise SafetensorError(f"Error while serializing: tensor {show(name)}: data_ptr is null", tensor=name)
