"""Protocol buffers as they are stored: fields of a message, one after another.

1. A field begins with a varint: its number times 8, plus its wire type.
2. Type 0 is a varint: 7 bits in each byte, the lowest first; the top bit says that more follow. At most 10 bytes.
3. Type 1 is 8 bytes, type 5 is 4 bytes, little-endian.
4. Type 2 is a varint and as many bytes: text, bytes, a message, or numbers one after another ("packed").
5. Types 3 and 4, groups, are refused: nothing has written them for many years.
6. Fields may come in any order, and repeatedly; unknown numbers are skipped.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...base.arrays import Array
from ...base.messages import error_about
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, LimitError
from ..byte_reader import ByteReader

# Maximum number of fields of a file; a graph of 100,000 nodes has about 2 million.
MAX_FIELDS = 20_000_000
# Bytes of all text that is kept.
MAX_TEXT = 64 << 20
# Longest varint, in bytes.
MAX_VARINT = 10

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
# Bytes of a field after its tag, or after its varint.
_SIZES = {VARINT: 0, EIGHT: 8, BYTES: 0, FOUR: 4}

# Bytes of a message to parse at a time: nodes are smaller.
_BLOCK = 4096


class Field(NamedTuple):
    """A field of a message."""

    number: int
    wire: int  # the wire type
    value: int  # of a varint; bytes of a content
    begin: int  # first byte of the content
    end: int  # one past the last byte


class WireReader(ByteReader):
    """Reads the fields of messages in a file."""

    def __init__(self, file: WeightFile) -> None:
        super().__init__(file)
        self._fields = self._text = 0

    def fields(self, begin: int, end: int, message: str) -> Iterator[Field]:
        """Iterate over the fields of a message; the caller may read elsewhere in between."""
        at = begin
        while at < end:
            self.position = at
            data = self.peek(min(_BLOCK, end - at))
            low, rest = 0, end - at
            while low < len(data):
                tag, first = data[low], low + 1  # most numbers have one byte
                if tag >= 0x80:
                    tag, first = _varint(data, low)
                wire, value, begin = tag & 7, 0, first
                if first and wire in (BYTES, VARINT):
                    value, first = _varint(data, first)
                    begin = first if wire == BYTES else begin
                if not first and len(data) < rest and low:
                    break  # the field continues beyond the block
                stop = self._end_of(tag, first, value, message, (at + low, rest))
                self._count(at + low)
                yield Field(tag >> 3, wire, value, at + begin, at + stop)
                low = stop
            at += low

    def _count(self, position: int) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            text = f"the file has more than {MAX_FIELDS:,} fields"
            raise error_about(LimitError, text, path=self.file.path, offset=position)

    def _end_of(self, tag: int, first: int, value: int, message: str, block: tuple[int, int]) -> int:
        """Return the end of a field in its block, after checking the field."""
        position, rest = block  # the field's byte in the file; bytes from the block's start to the message's end
        number, wire = tag >> 3, tag & 7
        if not first:  # else the first byte of the content in the block
            self.position = position
            raise self.fault(f"a number in {message} is cut off, or has more than {MAX_VARINT} bytes")
        if not 0 < number < 1 << 29:
            raise self.fault(f"a field of {message} has the number {number}", position)
        if wire not in _SIZES:
            raise self.fault(f"field {number} of {message} has the wire type {wire}, which is not in use", position)
        size = value if wire == BYTES else _SIZES[wire]
        if first + size > rest:
            text = f"field {number} of {message} needs {size} bytes, but {rest - first} are left"
            raise self.fault(text, position)
        return first + size

    def text(self, field: Field, what: str) -> str:
        """Return the text of a field."""
        if field.wire != BYTES:
            raise self.fault(f"{what} must be text, got wire type {field.wire}", field.begin)
        self._text += field.end - field.begin
        if self._text > MAX_TEXT:
            text = f"names and metadata have more than {MAX_TEXT:,} bytes"
            raise error_about(LimitError, text, path=self.file.path, offset=field.begin)
        self.position = field.begin
        data = self.take(field.end - field.begin, what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.fault(f"{what} is not UTF-8: {error.reason}", field.begin + error.start) from None

    def varints(self, field: Field, what: str, most: int) -> list[int]:
        """Return the numbers of a repeated field, packed or single, as u64."""
        if field.wire == VARINT:
            return [field.value]
        if field.wire != BYTES:
            raise self.fault(f"{what} must be numbers, got wire type {field.wire}", field.begin)
        if field.end - field.begin > MAX_VARINT * most:
            raise self.fault(f"{what} has more than {most} numbers", field.begin)
        self.position = field.begin
        data = self.take(field.end - field.begin, what)
        numbers: list[int] = []
        at = 0
        while at < len(data):
            value, at = _varint(data, at)
            if not at:
                raise self.fault(f"a number in {what} is cut off, or has more than {MAX_VARINT} bytes", field.begin)
            numbers.append(value)
        if len(numbers) > most:
            raise self.fault(f"{what} has more than {most} numbers", field.begin)
        return numbers


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and its end, which is 0 if the varint is cut off or too long."""
    value = shift = 0
    for k, byte in enumerate(data[at : at + MAX_VARINT], at):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, k + 1
        shift += 7
    return 0, 0


def decode_varints(data: Array, what: str) -> Array:
    """Return packed varints as u64."""
    ends = np.flatnonzero(data < 0x80)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise FormatError(f"{what}: the last number is cut off")
    begins = np.concatenate([np.zeros(min(1, len(ends)), np.intp), ends[:-1] + 1])
    sizes = ends - begins + 1
    longest = int(sizes.max(initial=0))
    if longest > MAX_VARINT:
        raise FormatError(f"{what}: a number has {longest} bytes, the limit is {MAX_VARINT}")
    values = np.zeros(len(ends), np.uint64)
    for k in range(longest):
        which = np.flatnonzero(sizes > k)
        digits = (data[begins[which] + k] & 0x7F).astype(np.uint64)
        values[which] |= digits << np.uint64(7 * k)
    return values
