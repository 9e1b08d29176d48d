"""Flax weights: the MessagePack of ``flax.serialization``, as in ``flax_model.msgpack``. Numbers are big-endian.

1. The file is one value: a map of names to values, nested. Lists and tuples were saved as maps of "0", "1", and so on;
   plain MessagePack arrays are read alike. Numbers, text, bytes, bools and nil are metadata.
2. Extension type 1 is an array, 3 a NumPy scalar: a MessagePack array of shape (array of integers), dtype (NumPy's or
   ml_dtypes' name) and elements (bytes, little-endian, in C order). Type 2 is a complex number: two floats.
3. An array of more than 2^30 bytes is a map with the key ``__msgpack_chunked_array__``: ``shape`` is a map of "0", "1"
   to lengths, ``chunks`` a map of "0", "1" to one-dimensional arrays, consecutive parts of all elements in C order.
4. Names of tensors are the keys on their path, joined by dots. A file that is a single array has the name "tensor".

https://github.com/msgpack/msgpack/blob/master/spec.md and flax/serialization.py of https://github.com/google/flax.
Arrays lie in the file as they are, so aligned ones become views of it; chunked arrays are assembled from their chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ..core import dtypes
from ..core.arrays import array_fits
from ..core.registry import MAX_RANK, Candidate, Content, OpenRequest
from ..core.table import ListedTable, Listing, Unknown, unreadable
from ..core.text import error_about, show
from ..core.weight_file import ByteReader
from ..errors import FormatError, UnsupportedError
from .boxed import BoxedListing, Region, boxed_file, in_pieces
from .torch.tensors import Tree

# Maximum number of values, and levels of maps; real files have some thousand and ten.
MAX_VALUES = 2_000_000
MAX_DEPTH = 100
# Bytes of a key, and of all keys, text and bytes that are kept.
MAX_KEY = 1 << 16
MAX_TEXT = 64 << 20

CHUNKED = "__msgpack_chunked_array__"
_TENSORS = frozenset((Listing, BoxedListing))

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_MAP, _LIST, _TEXT, _BYTES, _EXTENSION, _VALUE = "map", "array", "text", "bytes", "extension", "value"

# Kind, bytes of the length that follows, and the length if none follows, by first byte.
_SIZED = {
    0xC4: (_BYTES, 1, 0), 0xC5: (_BYTES, 2, 0), 0xC6: (_BYTES, 4, 0),
    0xC7: (_EXTENSION, 1, 0), 0xC8: (_EXTENSION, 2, 0), 0xC9: (_EXTENSION, 4, 0),
    0xD9: (_TEXT, 1, 0), 0xDA: (_TEXT, 2, 0), 0xDB: (_TEXT, 4, 0),
    0xDC: (_LIST, 2, 0), 0xDD: (_LIST, 4, 0), 0xDE: (_MAP, 2, 0), 0xDF: (_MAP, 4, 0),
    **{0x80 + size: (_MAP, 0, size) for size in range(16)}, **{0x90 + size: (_LIST, 0, size) for size in range(16)},
    **{0xA0 + size: (_TEXT, 0, size) for size in range(32)}, **{0xD4 + k: (_EXTENSION, 0, 1 << k) for k in range(5)},
}  # fmt: skip
_NUMBERS = {
    code: struct.Struct(f">{letter}")
    for code, letter in zip((0xCA, 0xCB, *range(0xCC, 0xD4)), "fdBHIQbhiq", strict=True)
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True, **{number & 0xFF: number for number in range(-32, 128)}}


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of an open file; chunked arrays become a second file."""
    file = candidate.file
    tree = Tree(MessagePackReader(file).read(), file.path, file.size, tensors=_TENSORS)
    root = None if request.root is None else tree.select(request.root)
    tensors: dict[str, Listing | BoxedListing] = {}
    for name, array in tree.tensors(root):
        if tensors.setdefault(name, array) is not array:
            raise FormatError(f"two tensors are named {show(name)}", file.path)
    whole = [array._replace(name=name) for name, array in tensors.items() if isinstance(array, Listing)]
    chunked = {name: array for name, array in tensors.items() if isinstance(array, BoxedListing)}
    file.table = ListedTable(whole, tree.metadata(root))
    return Content(file, [boxed_file(file, chunked, [file.store])], list(tensors)) if chunked else Content(file)


# ---- MessagePack ----


class _Token(NamedTuple):
    kind: str
    size: int  # values of a map or array, bytes of anything else
    value: Any = None  # of a number, bool or nil; the type of an extension


class MessagePackReader(ByteReader):
    """Parses a file into dicts, lists, values and arrays."""

    _values = _text = 0  # so far

    def read(self) -> Any:
        """Return the value of the file, which must fill it."""
        value = self._value(0)
        if self.position != self.file.size:
            raise self.fault(f"{self.file.size - self.position} bytes follow the value of the file")
        return value

    def _token(self, what: str) -> _Token:
        """Return the next type byte with its number or length."""
        begin = self.position
        code = self.take(1, what)[0]
        if code in _NUMBERS:
            return _Token(_VALUE, 0, _NUMBERS[code].unpack(self.take(_NUMBERS[code].size, what))[0])
        if code in _CONSTANTS:
            return _Token(_VALUE, 0, _CONSTANTS[code])
        if code not in _SIZED:
            raise self.fault(f"{what} begins with the byte 0x{code:02x}, which MessagePack does not use", begin)
        kind, width, size = _SIZED[code]
        if width:
            size = int.from_bytes(self.take(width, f"the length of {what}"), "big")
        if kind is not _EXTENSION:
            return _Token(kind, size)
        return _Token(kind, size, int.from_bytes(self.take(1, f"the type of {what}"), "big", signed=True))

    def _value(self, depth: int) -> Any:
        """Parse the next value and everything in it."""
        begin = self.position
        token = self._token("a value")
        self._values += 1
        if self._values > MAX_VALUES:
            raise self.limit(f"the file has more than {MAX_VALUES:,} values")
        if token.kind is _VALUE:
            return token.value
        if token.kind in (_TEXT, _BYTES):
            return self._text_of(token, "a value")
        if token.kind is _EXTENSION:
            return self._extension(token, begin)
        if depth == MAX_DEPTH:
            raise self.limit(f"maps are nested more than {MAX_DEPTH} levels deep")
        values = token.size * (2 if token.kind is _MAP else 1)
        left = self.file.size - self.position
        if values > left:
            raise self.fault(f"{token.kind} of {token.size:,} entries, but only {left} bytes follow", begin)
        if token.kind is _LIST:
            return [self._value(depth + 1) for _ in range(token.size)]
        entries: dict[str, Any] = {}
        for _ in range(token.size):
            at = self.position
            key = self._key()
            if key in entries:
                raise self.fault(f"the key {show(key)} occurs twice in a map", at)
            entries[key] = self._value(depth + 1)
        return self._chunked(entries, begin) if CHUNKED in entries else entries

    def _key(self) -> str:
        begin = self.position
        token = self._token("a key")
        if token.kind is _VALUE and type(token.value) is int:
            return str(token.value)
        if token.kind is not _TEXT:
            raise self.fault("a key must be text or an integer", begin)
        if token.size > MAX_KEY:
            raise self.limit(f"a key has {token.size:,} bytes, the limit is {MAX_KEY:,}")
        return str(self._text_of(token, "a key"))

    def _text_of(self, token: _Token, what: str) -> str | bytes:
        self._text += token.size
        if self._text > MAX_TEXT:
            raise self.limit(f"keys, text and bytes outside arrays have more than {MAX_TEXT:,} bytes")
        return self.take(token.size, what) if token.kind is _BYTES else self.take_text(token.size, what)

    # ---- arrays ----

    def _extension(self, token: _Token, begin: int) -> Any:
        end = self.position + token.size
        if end > self.file.size:
            left = self.file.size - self.position
            raise self.fault(f"an extension of {token.size} bytes, but the file ends after {left}")
        if token.value in (_ARRAY, _SCALAR):
            value: Any = self._array(end)
        elif token.value == _COMPLEX:
            at, pair = self.position, self._token("a complex number")
            parts = [self._token("a part of a complex number") for _ in range(2)] if pair[:2] == (_LIST, 2) else []
            if not parts or any(part.kind is not _VALUE or type(part.value) not in (int, float) for part in parts):
                raise self.fault("a complex number must be two numbers", at)
            value = complex(parts[0].value, parts[1].value)
        else:
            text = f"byte {begin}: extension type {token.value} is none of Flax's; they are 1 to 3"
            raise error_about(UnsupportedError, text, path=self.file.path, offset=begin)
        if self.position != end:
            raise self.fault(f"an extension should end at byte {end}, but its content ends here")
        return value

    def _array(self, end: int) -> Listing:
        """Parse shape and dtype of an array and skip its elements."""
        begin = self.position
        token = self._token("an array")
        shape = self._token("a shape")
        if token.kind is not _LIST or token.size != 3 or shape.kind is not _LIST:
            raise self.fault("an array must be its shape, its dtype and its elements", begin)
        if shape.size > MAX_RANK:
            raise self.fault(f"an array of {shape.size} axes, but NumPy has at most {MAX_RANK}", begin)
        dims = [self._token("a shape") for _ in range(shape.size)]
        at = self.position
        token = self._token("a dtype")
        if token.kind not in (_TEXT, _BYTES) or token.size > 100:
            raise self.fault("the dtype of an array must be a name", at)
        name = self.take(token.size, "a dtype").decode("ascii", "backslashreplace")
        at_elements = self.position
        elements = self._token("the elements of an array")
        if elements.kind is not _BYTES and elements.kind is not _TEXT:
            raise self.fault("the elements of an array must be bytes", at_elements)
        row = dtypes.BY_NAME.get(name)
        if row is None or row.packed:
            hint = " (ml_dtypes stores its elements in a byte each)" if row is not None else ""
            shown = tuple(dim.value for dim in dims if type(dim.value) is int)
            data = self.position
            if data + elements.size > end:
                raise self.fault(f"an array of {elements.size} bytes reaches beyond the end", at_elements)
            self.position = data + elements.size
            unknown = Unknown(show(name)[1:-1], shown, f"is not a dtype of weights{hint}")
            return unreadable("", unknown, data, data + elements.size)
        lengths = self._shape([dim.value if dim.kind is _VALUE else None for dim in dims], row, begin)
        data = self.position
        expected = prod(lengths) * row.nbytes(1)
        if elements.size != expected or data + expected > end:
            text = f"{row.code} {list(lengths)} needs {expected} bytes, but its elements have {elements.size}"
            raise self.fault(text, at_elements)
        self.position = data + expected
        return Listing("", row, lengths, data, data + expected)

    def _shape(self, dims: list[Any], row: dtypes.Dtype, begin: int) -> tuple[int, ...]:
        if any(type(dim) is not int or not 0 <= dim < 1 << 63 for dim in dims):
            raise self.fault(f"a shape must be numbers of at least 0, got {show(dims)}", begin)
        if len(dims) > MAX_RANK or not array_fits(tuple(dims), row.nbytes(1)):
            raise self.fault(f"no array can have the shape {show(dims)}", begin)
        return tuple(dims)

    def _chunked(self, entries: Mapping[str, Any], begin: int) -> Listing | BoxedListing:
        """Return the array of a map with the key `CHUNKED`."""
        shape, chunks = (_in_order(entries.get(key)) for key in ("shape", "chunks"))
        if entries.keys() != {CHUNKED, "shape", "chunks"} or shape is None or chunks is None:
            raise self.fault("a chunked array must have a shape and chunks, numbered from 0", begin)
        if not chunks or not all(isinstance(chunk, Listing) and len(chunk.shape) == 1 for chunk in chunks):
            raise self.fault("the chunks of an array must be arrays of one axis", begin)
        row, unknown = chunks[0].row, chunks[0].unknown
        if unknown is not None:
            return unreadable("", unknown._replace(shape=tuple(shape)), begin, begin)
        if any(chunk.row is not row for chunk in chunks):
            raise self.fault("the chunks of an array have several dtypes", begin)
        lengths = self._shape(shape, row, begin)
        if (count := sum(chunk.shape[0] for chunk in chunks)) != prod(lengths):
            text = f"an array of shape {list(lengths)} has {prod(lengths)} elements, but its chunks have {count}"
            raise self.fault(text, begin)
        return in_pieces(row, lengths, ((Region(self.file.store, chunk.begin), chunk.shape[0]) for chunk in chunks))


def _in_order(numbered: Any) -> list[Any] | None:
    """Return the values of a map with the keys "0", "1" and so on; None for other maps."""
    if not isinstance(numbered, dict) or any(str(k) not in numbered for k in range(len(numbered))):
        return None
    return [numbered[str(k)] for k in range(len(numbered))]
