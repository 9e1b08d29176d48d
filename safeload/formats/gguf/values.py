"""Metadata of GGUF files, and its numbers. They remember their stored type, which a copy of a file preserves.

GGUF has ten types of numbers, Python has two, and readers are strict: llama.cpp refuses a layer count unless it
is a u32. Numbers are therefore read as subclasses of `int` and `float`, one per type. They behave like plain numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...base.arrays import Array
from ...base.native import ffi, kept, lib, short
from ...base.table import Unknown

# Classes of numbers and dtypes of arrays by type in GGUF. Bools are plain `bool`.
NUMBERS: dict[int, Any] = {}
DTYPES: dict[int, np.dtype[np.generic]] = {lib.SL_GGUF_BOOL: np.dtype("?")}
for _name in ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F32", "F64"):
    _number, _plain = getattr(lib, f"SL_GGUF_{_name}"), float if _name[0] == "F" else int
    NUMBERS[_number] = type(_name, (_plain,), {"__doc__": f"Stored as {_name.lower()}."})
    DTYPES[_number] = np.dtype(f"<{_name[0].lower()}{int(_name[1:]) // 8}")
U8, I8, U16, I16, U32, I32, U64, I64, F32, F64 = NUMBERS.values()

_SIZE = struct.Struct("<Q")  # length of a string
_HEAD = 24  # bytes before the metadata: magic, version, number of tensors, number of keys
_ARRAY_HEAD = struct.Struct("<IQ")  # type of the elements, number of elements
# Types in files of 2023 and 2024, since removed from ggml.
_REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
# Why tensors of other types are refused.
_UNKNOWN = "is unknown to this version, so its values cannot be read"


class Metadata(Mapping[str, Any]):
    """The metadata of a GGUF file, in file order. A value is unpacked on first access and then cached.

    Integers and floats are instances of ``int`` and ``float`` subclasses, which remember the stored type. Bools are
    ``bool``, strings ``str``. Arrays of numbers and bools are 1-D NumPy arrays of their type, arrays of strings lists
    of ``str``, arrays of arrays lists of arrays. Bytes outside UTF-8 become lone surrogates, as in `os.fsdecode`. The
    metadata stays valid after the file is closed.
    """

    def __init__(self, gguf: Any) -> None:
        self._owner = kept(gguf, short.sl_gguf_free)
        self._bytes = ffi.buffer(gguf.bytes, gguf.size)
        self.version: int = gguf.version  # of the format, 2 or 3
        self._entries: dict[str, tuple[int, int, int]] = {}
        for k in range(gguf.count):
            entry = gguf.entries[k]
            key = str(self._bytes[entry.key_begin : entry.key_end], "utf-8")
            self._entries[key] = entry.type, entry.begin, entry.end
        self._values: dict[str, Any] = {}
        self.ternary: dict[str, tuple[int, ...]] = {}  # shapes of I2_S tensors, which the table lists as bytes
        self.unknown: dict[str, Unknown] = {}  # tensors of unknown types
        for k in range(gguf.listed_count):
            tensor = gguf.listed[k]
            name = str(self._bytes[tensor.name_begin : tensor.name_end], "utf-8")
            shape = struct.unpack_from(f"<{tensor.rank}Q", self._bytes, tensor.dims_begin)[::-1]
            if tensor.dtype == lib.SL_UNKNOWN:
                removed = _REMOVED.get(tensor.type)
                label = f"{tensor.type} ({removed}, removed)" if removed else str(tensor.type)
                self.unknown[name] = Unknown(f"ggml type {label}", shape, _UNKNOWN)
            else:
                self.ternary[name] = shape

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            type, begin, end = self._entries[key]
            self._values[key] = _unpack(type, self._bytes[begin:end])
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def stored(self, key: str) -> bytes:
        """Return a value as stored in the file: its type as u32, then its bytes."""
        type, begin, end = self._entries[key]
        data: bytes = type.to_bytes(4, "little") + self._bytes[begin:end]
        return data

    @property
    def descriptions(self) -> bytes:
        """The tensor descriptions as stored in the file."""
        begin = max((end for _, _, end in self._entries.values()), default=_HEAD)
        data: bytes = self._bytes[begin:]
        return data

    @property
    def nbytes(self) -> int:
        """Bytes of the head: everything before the padding that precedes the tensors."""
        return len(self._bytes)

    def type_of(self, key: str) -> int:
        """Return the number of the stored type of a value."""
        return self._entries[key][0]

    @property
    def tensor_count(self) -> int:
        """Number of tensors in the descriptions."""
        return int(_SIZE.unpack_from(self._bytes, _HEAD - 2 * _SIZE.size)[0])

    def without(self, prefix: str) -> Metadata:
        """Return the metadata without keys that begin with ``prefix``."""
        rest = Metadata.__new__(Metadata)
        rest.__dict__.update(self.__dict__)
        rest._entries = {key: entry for key, entry in self._entries.items() if not key.startswith(prefix)}
        rest._values = {}
        return rest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.keys() == other.keys() and all(_same(value, other[key]) for key, value in self.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = []
        for key, (type, begin, _) in self._entries.items():
            if type == lib.SL_GGUF_ARRAY:
                count = _ARRAY_HEAD.unpack_from(self._bytes, begin)[1]
                shown.append(f"{key!r}: <array of {count:,}>")
            else:
                shown.append(f"{key!r}: {self[key]!r}")
        return f"{{{', '.join(shown)}}}"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # pickle the values without the file


def _same(a: Any, b: Any) -> bool:
    """Compare two values. As usual, NaN does not equal itself."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _unpack(type: int, data: bytes) -> Any:
    """Decode a value; the C core has checked its bytes."""
    if type == lib.SL_GGUF_ARRAY:
        return _unpack_array(data, 0)[0]
    if type == lib.SL_GGUF_STRING:
        return str(data[_SIZE.size :], "utf-8", "surrogateescape")
    value = np.frombuffer(data, DTYPES[type])[0].item()
    return value if type == lib.SL_GGUF_BOOL else NUMBERS[type](value)


def _unpack_array(data: bytes, at: int) -> tuple[Any, int]:
    """Decode the array at ``at``; return it and the position of its end."""
    item, count = _ARRAY_HEAD.unpack_from(data, at)
    at += _ARRAY_HEAD.size
    values: list[Any] = []
    if item == lib.SL_GGUF_ARRAY:
        for _ in range(count):
            inner, at = _unpack_array(data, at)
            values.append(inner)
        return values, at
    if item == lib.SL_GGUF_STRING:
        size_at, size = _SIZE.unpack_from, _SIZE.size
        for _ in range(count):
            begin = at + size
            at = begin + size_at(data, at)[0]
            values.append(str(data[begin:at], "utf-8", "surrogateescape"))
        return values, at
    stored = DTYPES[item]
    array: Array = np.frombuffer(data, stored, count, at).astype(stored.newbyteorder("="))
    return array, at + array.nbytes
