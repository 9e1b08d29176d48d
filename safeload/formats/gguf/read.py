"""Read GGUF files into tables with metadata, and open split files, whose first part holds the metadata of the model.

The parser is csrc/formats/gguf.c, which describes the format. llama.cpp and gguf-py write split files,
``X-00001-of-00003.gguf``, with keys ``split.*``: https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ...base.arrays import Array
from ...base.messages import error_about
from ...base.native import Error, check, ffi, kept, lib, pointer, short
from ...base.paths import PathLike
from ...base.table import Table, Unknown
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, MissingShardError, UnsupportedError
from ...models.diffusion import is_rearranged
from ..registry import Candidate, Content, OpenRequest
from .values import DTYPES, NUMBERS

# Bytes of a remote file to read first, and the factor for each further read. The header of a model with its vocabulary
# has 2 to 15 MB.
_FIRST, _GROWTH = 128 << 10, 8
_SIZE = struct.Struct("<Q")  # length of a string
_HEAD = 24  # bytes before the metadata: magic, version, number of tensors, number of keys
_ARRAY_HEAD = struct.Struct("<IQ")  # type of the elements, number of elements
# Types in files of 2023 and 2024, since removed from ggml.
_REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip


PREFIX = "split."
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"

# The largest number with five digits.
MAX_PARTS = 99_999

_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.ASCII | re.DOTALL | re.IGNORECASE)

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


class GgufTable(Table):
    """The tensors of a GGUF file, in the order of their bytes."""

    def __init__(self, address: int, metadata: Metadata) -> None:
        super().__init__(address)
        self._metadata = metadata
        self.ternary, self.unknown = metadata.ternary, metadata.unknown
        self.quantized = any(row.blocked for row in self.rows)

    def may_be_packed(self) -> bool:
        return bool(self.ternary) or lib.SL_NVFP4 in self.numbers or is_rearranged(self._metadata)

    def metadata(self) -> Metadata:
        return self._metadata


def read_table(file: WeightFile) -> GgufTable:
    """Return the tensors of an open file."""
    table, gguf, error = ffi.new("sl_table **"), ffi.new("sl_gguf **"), Error()
    if not file.remote:
        status = file.local.use(short.sl_gguf_read, file.size, *map(pointer, (table, gguf, error)))
    else:
        head = file.read_at(0, _FIRST)
        while True:
            status = lib.sl_gguf_parse_head(ffi.from_buffer(head), len(head), file.size, table, gguf, error)
            if status != lib.SL_E_TRUNCATED:
                break
            head += file.read_at(len(head), max(error.position, _GROWTH * len(head)) - len(head))
    check(status, error, file.path)
    return GgufTable(pointer(table[0]), Metadata(gguf[0]))


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of an open file."""
    candidate.file.table = read_table(candidate.file)
    return Content(candidate.file)


def write(
    tensors: Mapping[str, Any],
    metadata: Mapping[Any, Any] | None,
    path: PathLike,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Write tensors of any format; see `write.save_converted`."""
    from .write import save_converted  # opening does not need it

    save_converted(tensors, metadata or {}, path, overwrite=overwrite, durable=durable)


# ---- split files ----


def is_part(file: WeightFile) -> bool:
    """Return True if an open GGUF file is part of a split model."""
    return _COUNT in (file.table.metadata() or {})


def open_parts(file: WeightFile, open_part: Callable[[str], WeightFile]) -> tuple[list[WeightFile], Mapping[str, Any]]:
    """Return all parts in order, given any part, and the metadata of the model."""
    count, number = _value(file, _COUNT), _value(file, _NUMBER)
    if not 1 <= count <= MAX_PARTS or not 0 <= number < count:
        raise FormatError(f"{_NUMBER} is {number} and {_COUNT} is {count}, expected 0 to count - 1", file.path)
    files = file.files
    folder, base = files.split(file.place if files.remote else file.path)
    name = _NAME.fullmatch(base)
    if count == 1:
        paths = [file.path]
    elif name is None or (int(name[2]), int(name[3])) != (number + 1, count):
        raise error_about(
            UnsupportedError,
            f"this is part {number + 1} of {count} of a split GGUF file; to find the other parts, its name must end in "
            f"-{number + 1:05}-of-{count:05}.gguf",
            path=file.path,
        )
    else:
        paths = [files.join(folder, f"{name[1]}-{k + 1:05}-of-{count:05}{name[4]}") for k in range(count)]
    missing = [] if files.remote else [path for path in paths if not os.path.lexists(path)]
    if not missing:
        try:
            parts = files.each(lambda k: file if k == number else open_part(paths[k]), range(count))
        except FileNotFoundError as error:
            missing = [error.filename]
    if missing:
        shown = ", ".join(show(files.split(path)[1])[1:-1] for path in missing[:5])
        raise MissingShardError(
            f"{len(missing):,} of {count:,} parts are missing: {shown}{', ...' if len(missing) > 5 else ''}",
            file.path,
        )
    total = _value(parts[0], _TENSORS)
    for k, part in enumerate(parts):
        for key, expected in ((_NUMBER, k), (_COUNT, count), (_TENSORS, total)):
            if (value := _value(part, key)) != expected:
                raise FormatError(f"{key} is {value}, but {expected} according to the other parts", part.path)
    stored = sum(part.table.count for part in parts)
    if stored != total:
        raise FormatError(f"{_TENSORS} is {total}, but the parts have {stored} tensors", parts[0].path)
    metadata = parts[0].table.metadata()
    assert isinstance(metadata, Metadata)
    return parts, metadata.without(PREFIX)


def _value(file: WeightFile, key: str) -> int:
    value = (file.table.metadata() or {}).get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormatError(f"{key} must be an integer, got {show(value)}", file.path)
    return int(value)
