"""Read and write safetensors files. csrc/formats/safetensors.c parses and writes the header."""

from __future__ import annotations

from array import array as plain_array
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import accumulate, chain
from operator import add, attrgetter
from struct import Struct
from typing import Any

import numpy as np

from ..errors import SafetensorError, unsaved
from . import dtypes, native
from .arrays import Array, array_over, check_mapping, not_an_array, refuse_masked
from .atomic_file import AtomicFile, Piece, pieces_of, write_pieces, written_as_is
from .files import WINDOW, LocalStore
from .foreign import MAX_HEADER as MAX_HEADER
from .jobs import read_small
from .memory import ALIGNMENT
from .native import Error, check, ffi, lib, pointer, short
from .registry import Candidate, Content, OpenRequest, part
from .resident import read_or_open
from .runtime import paused
from .table import Entry, Table
from .tensors import Lazy, Tensors
from .text import PathLike, as_texts, encode, show, tensor_named
from .weight_file import WeightFile

# Bytes of the length before the header, and the unit of its padding.
_LENGTH = _UNIT = 8
# Spaces that editable files have after their header, so that `safeload.edit` can change metadata without a new file.
ROOM = 4096
# For `window_for`: room and metadata, bytes of a tensor besides its name, and the largest estimate.
_BASE, _ENTRY, _MOST = 2 * ROOM, 112, 1 << 20
# The first request for a shard before its index has been read. With the head of the response it fits in ten TCP
# segments, which a server sends at once over a new connection.
EARLY_WINDOW = 12 << 10

# Up to this many tensors, a single call builds a header in a buffer of fixed size.
_FEW = lib.SL_BRIEF
# Order and sizes in such a buffer, by number of tensors.
_PLACES = [Struct(f"={2 * count}Q").unpack_from for count in range(_FEW + 1)]

# ---- read ----


def open_file(
    path: PathLike, *, brief: bool = False, folders: str = "safeload.load", explained: bool = True
) -> WeightFile:
    """Open a file and validate its header; errors name the loader for ``folders``, and if ``explained`` what it is."""
    text, fields = read_or_open(path, 0, folders, explained)
    return WeightFile(
        text, LocalStore(text, fields[:5], brief=brief), Table(fields[5], fields[native.LOADED_COLUMNS :])
    )


def chosen(file: WeightFile, names: Iterable[str] | None, dtype: Any, operation: str) -> Tensors:
    """Return the tensors to load, after refusing to convert floating codes without their scales."""
    tensors = Tensors.in_file(file, names)
    if dtype is not None and file.table.may_be_packed():
        part("codes").refuse_floating(file, tensors, operation)
    return tensors


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of an open file, such as a remote file."""
    file = candidate.file
    size = int.from_bytes(file.read_at(0, _LENGTH), "little")
    # The parser refuses an impossible size without more bytes.
    valid = size <= min(MAX_HEADER, file.size - _LENGTH)
    head = file.read_at(0, _LENGTH + size if valid else _LENGTH)
    file.table = parse_head(head, file.size, file.path)
    return Content(file)


def parse_head(head: bytes, file_size: int, path: str) -> Table:
    """Return the table of a file of this size, of which the first bytes are known."""
    table, error = ffi.new("sl_table **"), Error()
    status = lib.sl_safetensors_parse_head(ffi.from_buffer(head), len(head), file_size, table, error)
    check(status, error, path)
    return Table(pointer(table[0]))


# ---- single small tensors ----

# Bytes of a window, and of the largest tensor to copy from it. A system call takes as long as copying 8 KiB.
_WINDOW, _COPIED = 64 << 10, 16 << 10


class Window:
    """Small tensors of a file. Any thread may use it.

    If a tensor begins at the end of the last tensor, or near the end of the file, a window of the file is read, and
    tensors are copied from the window, unless the table is not `Table.plain`. It does not keep the file open.
    """

    # Its first byte in the file, one past the last, and its memory: replaced as a whole, as other threads may read.
    _content: tuple[int, int, Any] = 0, 0, None
    _next = -1  # end of the last tensor

    def tensor(self, file: WeightFile, index: int, entry: Entry) -> Array:
        """Return a tensor in its own memory; the file must not change between calls."""
        if not file.table.plain:
            return read_small(file, *file.table.layout(index)[:4])
        number, shape, begin, end = entry
        dtype, store = dtypes.array_dtype(number), file.store
        first, last, memory = self._content
        follows, self._next = begin == self._next, end
        if not (first <= begin and end <= last):
            near = follows or end - begin < file.size - begin <= _WINDOW
            if end - begin > _COPIED or not near or not isinstance(store, LocalStore):
                return read_small(file, dtype, shape, begin, end)
            first = begin - begin % ALIGNMENT  # aligned tensors of the file are aligned in the window
            memory = np.empty(min(_WINDOW, file.size - first), np.uint8)
            address = pointer(ffi.from_buffer(memory))
            if store.use(short.sl_file_read, first, address, memory.size, None) != lib.SL_OK:
                return read_small(file, dtype, shape, begin, end)
            self._content = first, first + memory.size, memory
        return np.array(array_over(memory, dtype, shape, begin - first))


# ---- headers from columns; csrc/formats/safetensors.c writes their JSON ----


def _header(
    names: Sequence[str], sources: Sequence[TensorToWrite], metadata: Mapping[str, str] | None, room: int
) -> tuple[Any, Sequence[int], Sequence[int]]:
    """Return a header, the tensors in the order of their bytes, and the bytes of each by their names; see `Header`."""
    try:
        encoded = "\n".join([*names, ""]).encode() if not room and len(names) <= _FEW else None
    except UnicodeEncodeError:
        encoded = None  # `Header` explains it
    if encoded is not None:
        count, memory = len(names), native.BriefHeader()
        values = [count, len(encoded)]
        for source in sources:
            values += source.row.number, len(source.shape), *source.shape
        if metadata is None:
            values += 0, 0
        else:
            texts = _metadata_texts(metadata)
            values += 1, len(texts) // 2, *accumulate(map(len, texts))
            encoded += b"".join(texts)
        size = short.sl_safetensors_brief_header(encoded, plain_array("Q", values).tobytes(), memory)
        if size:  # else it is too long, or there is none
            places = _PLACES[count](memory)
            return memory[native.HEADER_AT : native.HEADER_AT + size], places[:count], places[count:]
    header = Header(names, bytes(map(_NUMBER, sources)), list(map(_SHAPE, sources)), metadata, room=room)
    return ffi.buffer(header.memory, header.nbytes), header.order.tolist(), header.sizes.tolist()


class Header:
    """A header, and the order of the tensors' bytes after it."""

    def __init__(
        self,
        names: Sequence[str],
        numbers: bytes,  # of the dtypes
        shapes: Sequence[Sequence[int]],  # logical
        metadata: Mapping[str, str] | None,
        *,
        keeps_order: bool = False,  # bytes in the order of the names, not in upstream's
        room: int = 0,  # least number of spaces after the header
    ) -> None:
        columns = ffi.new("sl_columns *")
        columns.keeps_order = keeps_order
        encoded, name_ends = _encoded(names)
        columns.count = count = len(names)
        values: dict[str, Any] = {
            "names": encoded,
            "name_ends": name_ends,
            "dtypes": numbers,
            "dims": plain_array("Q", chain.from_iterable(shapes)),
            "dim_ends": plain_array("Q", accumulate(map(len, shapes))),
        }
        if metadata is not None:
            texts = _metadata_texts(metadata)
            columns.has_metadata = 1
            columns.metadata_count = len(texts) // 2
            values["metadata_text"] = b"".join(texts)
            values["metadata_ends"] = plain_array("Q", accumulate(map(len, texts)))
        alive: list[Any] = []  # the memory of the columns
        for field, column in values.items():
            if len(column):
                alive.append(ffi.from_buffer(_ARRAYS[field], column))
                setattr(columns, field, alive[-1])
        self.order: Array = np.empty(count, np.uint32)  # the tensors in the order of their bytes
        self.sizes: Array = np.empty(count, np.uint64)  # bytes of each tensor, in the order of the names
        order, sizes = ffi.from_buffer("uint32_t[]", self.order), ffi.from_buffer("uint64_t[]", self.sizes)
        memory, size, error = ffi.new("void **"), ffi.new("uint64_t *"), Error()
        status = lib.sl_safetensors_header(columns, order, sizes, memory, size, error)
        check(status, error, subject="Error while serializing")
        self.memory = ffi.gc(memory[0], lib.sl_free)  # the length of the header and the header itself
        self.address = pointer(self.memory)
        self.nbytes: int = size[0]
        if room:
            self.pad_to(min(self.nbytes + -(-room // _UNIT) * _UNIT, max(self.nbytes, MAX_HEADER + _LENGTH)))

    def pad_to(self, nbytes: int) -> None:
        """Extend the header with spaces to this size, a multiple of 8."""
        text = ffi.buffer(self.memory, self.nbytes)[_LENGTH:]
        head = (nbytes - _LENGTH).to_bytes(_LENGTH, "little")
        self.memory = ffi.from_buffer(head + text + b" " * (nbytes - self.nbytes))
        self.address, self.nbytes = pointer(self.memory), nbytes


# Each column as an array in C.
_ARRAYS = {
    name: ffi.typeof(f"{field.type.item.cname.removeprefix('const ')}[]")
    for name, field in ffi.typeof("sl_columns").fields
    if field.type.kind == "pointer"
}

# Up to this many names, encoding each by itself is faster.
_ONE_BY_ONE = 64


def _encoded(names: Sequence[str]) -> tuple[bytes, plain_array[int] | Array]:
    """Return the names, each with a newline behind it, and their ends."""
    try:
        encoded = "\n".join([*names, ""]).encode()
    except (TypeError, UnicodeEncodeError):
        for name in names:
            text(name, "a tensor name", tensor=name)
        raise
    if len(names) > _ONE_BY_ONE and encoded.count(b"\n") == len(names):
        ends = np.flatnonzero(np.frombuffer(encoded, np.uint8) == ord("\n"))
        return encoded, ends.astype(np.uint64)
    lengths = [len(name.encode()) for name in names]
    return encoded, plain_array("Q", map(add, accumulate(lengths), range(len(names))))


def window_for(file_name: str, names: Sequence[str]) -> int:
    """Return the size of the first request for a shard that an index lists: its header should fit."""
    if not file_name.endswith(".safetensors"):
        return WINDOW
    # A small request spares the round trips in which a new connection reaches its speed; a header that does not fit
    # takes a second request.
    return min(_BASE + len(names) * _ENTRY + sum(map(len, names)), _MOST)


def _metadata_texts(metadata: Mapping[str, str]) -> list[bytes]:
    """Return keys and values alternately, in ascending order of keys."""
    pairs = [*metadata.items()]
    try:
        if all(type(key) is str is type(value) for key, value in pairs):
            return [part.encode() for pair in sorted(pairs) for part in pair]
    except UnicodeEncodeError:
        pass  # refused below, with the name of the key
    pairs = sorted((text(key, "a metadata key"), text(value, f"metadata {show(key)}")) for key, value in pairs)
    return [part.encode() for pair in pairs for part in pair]


def text(value: Any, subject: str, *, tensor: str | None = None) -> str:
    """Check that a value is a text that UTF-8 can write, and return it."""
    if not isinstance(value, str):
        raise TypeError(f"{subject} must be str, got {type(value).__name__}")
    encode(value, subject, tensor=tensor)
    return value


# ---- write ----

# Arrays of at most _TINY bytes are copied into buffers of about _TOGETHER bytes, to write them in few calls.
_TINY, _TOGETHER = 64 << 10, 1 << 20

# Types that are never masked arrays.
_PLAIN = frozenset((np.ndarray, Lazy))


class TensorToWrite:
    """A tensor to write."""

    __slots__ = ("address", "data", "nbytes", "row", "shape")

    def __init__(
        self,
        row: dtypes.Dtype,
        shape: Sequence[int],  # logical
        nbytes: int,
        data: Array | Lazy | None,
        address: int = 0,  # without data: of the bytes in file layout, which the caller keeps valid
    ) -> None:
        self.row, self.shape, self.nbytes, self.data, self.address = row, shape, nbytes, data, address

    def pieces(self) -> Iterable[Piece]:
        """Return the tensor's bytes, without copying memory in C order."""
        return ((None, self.address, self.nbytes, False),) if self.data is None else pieces_of(self.data)

    @property
    def staged(self) -> Lazy | None:
        """The tensor if its bytes are read ahead; None if `pieces` makes them."""
        return self.data if isinstance(self.data, Lazy) and self.data.entry is not None else None

    @property
    def whole(self) -> bool:
        """True if `buffer` has the bytes of the tensor; else each of `pieces` is written before the next."""
        return self.data is None or (not isinstance(self.data, Lazy) and written_as_is(self.data))

    @property
    def small(self) -> bool:
        """True if the tensor is `whole` and should be written together with its neighbours."""
        return self.nbytes <= _TINY and self.whole

    @property
    def buffer(self) -> Any:
        """The bytes of a `whole` tensor."""
        return ffi.buffer(ffi.cast("char *", self.address), self.nbytes) if self.data is None else self.data


_SHAPE, _NUMBER, _WHOLE, _BUFFER = map(attrgetter, ("shape", "row.number", "whole", "buffer"))


def _staged(ahead: Sequence[Lazy]) -> AbstractContextManager[Iterator[tuple[int, int, bool]]]:
    """Return the bytes to read ahead, or nothing."""
    if not ahead:
        return nullcontext(iter(()))
    from .staging import staged_bytes  # few files need it: most are loaded, or written from memory

    return closing(staged_bytes([lazy.entry for lazy in ahead if lazy.entry is not None], ahead[0].threads))


def source_of(name: str, value: Any) -> TensorToWrite:
    """Return the tensor to write for an array, `Lazy` or a tensor to write."""
    if type(value) not in _PLAIN:
        if isinstance(value, TensorToWrite):
            return value
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if not isinstance(value, (np.ndarray, Lazy)):
            raise not_an_array(tensor_named(name), value, safetensors=True)
        refuse_masked(value, tensor_named(name))
    return TensorToWrite(dtypes.of_array(value, name), value.shape, value.nbytes, value)


def write(tensors: Mapping[str, Any], metadata: Mapping[Any, Any] | None, path: PathLike, **options: Any) -> None:
    """Write tensors of any format; `quantized.pack` turns quantized tensors into plain tensors."""
    from .described import pack

    packed, texts = pack(tensors, as_texts(metadata or {}) or None)
    FileWriter(packed, texts, room=ROOM).to_file(path, **options)


def writer(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> FileWriter:
    """Return the writer of arrays and quantized tensors, as the drop-in functions take them."""
    if metadata is not None or not isinstance(tensors, dict) or not _PLAIN.issuperset(map(type, tensors.values())):
        from .described import pack  # only here: it brings everything that decodes

        tensors, metadata = pack(tensors, metadata)
    return FileWriter(tensors, metadata)


class FileWriter:
    """A file to write: its header is built and its size known, but tensors are not copied yet."""

    def __init__(self, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None, *, room: int = 0) -> None:
        check_mapping(tensors, "tensors")
        if metadata is not None:
            check_mapping(metadata, "metadata", "str to str")
        names = list(tensors)
        for name in names:
            if type(name) is not str:
                text(name, "a tensor name", tensor=name)
        sources = self._sources = list(map(source_of, names, map(tensors.__getitem__, names)))
        # `room` spaces follow the header; 0 gives the bytes of upstream.
        self._head, self._order, sizes = _header(names, sources, metadata, room)
        for name, source, size in zip(names, sources, sizes, strict=True):
            if source.data is None and (source.nbytes != size or (size and source.address == 0)):
                fault = f"data_len is {source.nbytes}, but {source.row.code} {list(source.shape)} needs {size} bytes"
                fault = "data_ptr is null" if source.nbytes == size else fault
                raise SafetensorError(f"Error while serializing: tensor {show(name)}: {fault}", tensor=name)
        self.size: int = len(self._head) + sum(sizes)

    def pieces(self) -> Generator[Piece]:
        """Iterate over all bytes of the file."""
        sources = [self._sources[index] for index in self._order]
        waiting, size = [self._head], 0  # small buffers: a system call for each would take longer than a copy
        if len(self._head) > _TINY or not sources or not sources[0].small:
            yield self._head, pointer(ffi.from_buffer(self._head)), len(self._head), False
            waiting = []
        ahead = [source.staged for source in sources if source.staged is not None]
        with _staged(ahead) as staged:
            for source in sources:
                small = source.small
                if small:
                    waiting.append(source.buffer)
                    size += source.nbytes
                if waiting and (not small or size >= _TOGETHER):
                    yield _joined(waiting)
                    waiting, size = [], 0
                if small:
                    continue
                lazy = source.staged
                if lazy is None:
                    yield from source.pieces()
                    continue
                left = lazy.nbytes
                while left:
                    address, nbytes, last = next(staged)
                    left -= nbytes
                    yield staged, address, nbytes, last
                lazy.report()
            if waiting:
                yield _joined(waiting)

    def to_bytes(self) -> bytes:
        """Return the whole file."""
        sources = [self._sources[index] for index in self._order]
        if all(map(_WHOLE, sources)):
            return b"".join([self._head, *map(_BUFFER, sources)])
        out = bytearray(self.size)
        position = 0
        with closing(self.pieces()) as pieces:
            for _owner, address, size, _streamed in pieces:
                if size:
                    out[position : position + size] = ffi.buffer(ffi.cast("char *", address), size)
                position += size
        return bytes(out)

    def to_file(self, path: PathLike, **options: Any) -> None:
        """Write the file; see `AtomicFile`."""
        try:
            with AtomicFile(path, self.size, **options) as file:
                self.write_to(file)
        except OSError as error:
            raise unsaved(error) from None

    def write_to(self, file: AtomicFile) -> None:
        """Write all bytes into a file under construction."""
        tensors = len(self._sources)
        with paused(tensors if self.size <= _TINY * tensors else 0), closing(self.pieces()) as pieces:
            write_pieces(file, pieces)


def _joined(arrays: list[Any]) -> Piece:
    joined = b"".join(arrays)
    return joined, pointer(ffi.from_buffer(joined)), len(joined), True
