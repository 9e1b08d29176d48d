"""Build the header of a safetensors file from columns; csrc/formats/safetensors.c writes its JSON."""

from __future__ import annotations

from array import array as plain_array
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from operator import add
from struct import Struct
from typing import Any, TypeAlias

import numpy as np

from ...base.arrays import Array
from ...base.messages import encode
from ...base.native import HEADER_AT, BriefHeader, Error, check, ffi, lib, pointer, short
from ...base.text import show
from ...stores.store import WINDOW

_NEWLINE = ord("\n")
# Bytes of the length before the header, and the unit of its padding.
_LENGTH = _UNIT = 8
# Spaces that editable files have after their header, so that `safeload.edit` can change metadata without a new file.
ROOM = 4096
# The largest header that csrc/formats/safetensors.c accepts, without its length.
MAX_HEADER = 100_000_000
# For `window_for`: room and metadata, bytes of a tensor besides its name, and the largest estimate.
_BASE, _ENTRY, _MOST = 2 * ROOM, 112, 1 << 20
# The first request for a shard before its index has been read. With the head of the response it fits in ten TCP
# segments, which a server sends at once over a new connection.
EARLY_WINDOW = 12 << 10

# The bytes of a header; the tensors in the order of their bytes; bytes of each tensor, in the order of the names.
Head: TypeAlias = tuple[Any, Sequence[int], Sequence[int]]

# Up to this many tensors, a single call builds a header in a buffer of fixed size.
_FEW = lib.SL_BRIEF
# Order and sizes in such a buffer, by number of tensors.
_PLACES = [Struct(f"={2 * count}Q").unpack_from for count in range(_FEW + 1)]


def head(
    names: Sequence[str],
    numbers: bytes,
    shapes: Sequence[Sequence[int]],
    metadata: Mapping[str, str] | None,
    *,
    room: int = 0,
) -> Head:
    """Return a header with upstream's order, and order and sizes as lists; see `Header`."""
    if not room and len(names) <= _FEW:
        brief = _brief(names, numbers, shapes, metadata)
        if brief is not None:
            return brief
    header = Header(names, numbers, shapes, metadata, room=room)
    return ffi.buffer(header.memory, header.nbytes), header.order.tolist(), header.sizes.tolist()


def _brief(
    names: Sequence[str], numbers: bytes, shapes: Sequence[Sequence[int]], metadata: Mapping[str, str] | None
) -> Head | None:
    """Return the header of few tensors, or None if it is too long or `Header` must explain why there is none."""
    try:
        encoded = "\n".join([*names, ""]).encode()
    except UnicodeEncodeError:
        return None
    count, memory = len(names), BriefHeader()
    dims = plain_array("Q", chain.from_iterable(shapes)).tobytes()
    dim_ends = plain_array("Q", accumulate(map(len, shapes))).tobytes()
    texts: list[bytes] = []
    text_ends = None
    if metadata is not None:
        texts = _metadata_texts(metadata)
        text_ends = plain_array("Q", accumulate(map(len, texts))).tobytes()
    size = short.sl_safetensors_brief_header(
        count, encoded, len(encoded), numbers, dims, dim_ends, b"".join(texts), text_ends, len(texts) // 2, memory
    )
    if not size:
        return None
    places = _PLACES[count](memory)
    return memory[HEADER_AT : HEADER_AT + size], places[:count], places[count:]


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
        memory, size, error = ffi.new("void **"), ffi.new("uint64_t *"), Error()
        check(
            lib.sl_safetensors_header(
                columns,
                ffi.from_buffer("uint32_t[]", self.order),
                ffi.from_buffer("uint64_t[]", self.sizes),
                memory,
                size,
                error,
            ),
            error,
            subject="Error while serializing",
        )
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
        ends = np.flatnonzero(np.frombuffer(encoded, np.uint8) == _NEWLINE)
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
