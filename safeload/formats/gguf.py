"""Read GGUF files into tables with metadata, open split files, whose first part holds the metadata, and write files.

The parser is csrc/formats/gguf.c, which describes the format. llama.cpp and gguf-py write split files,
``X-00001-of-00003.gguf``, with keys ``split.*``: https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split.

GGUF has ten types of numbers, Python has two, and readers are strict: llama.cpp refuses a layer count unless it is a
u32. Numbers are therefore read as subclasses of `int` and `float`, one per type, which behave like plain numbers and
keep their type in a copy of the file.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core import dtypes
from ..core.arrays import Array, check_mapping, not_an_array, refuse_masked
from ..core.atomic_file import AtomicFile, Piece, pieces_of, write_pieces
from ..core.native import Error, address_of, check, ffi, kept, lib, pointer, short
from ..core.packing import CODES, GGUF, INT8, SCALE
from ..core.quantized_tensor import QuantizedTensor
from ..core.registry import Candidate, Content, OpenRequest
from ..core.table import Table, Unknown
from ..core.tensors import Lazy, LazyParts, materialize
from ..core.text import (
    PathLike,
    as_texts,
    check_name,
    clip,
    encode,
    error_about,
    printable,
    show,
    tensor_named,
    warning,
)
from ..core.weight_file import WeightFile
from ..errors import FormatError, MissingShardError, SafeloadError, UnsupportedError
from ..models.diffusion import ARCHITECTURE, SHAPE_KEY, is_rearranged, model_of
from .mixtures import FILE_TYPE

# Bytes of a remote file to read first, and the factor for each further read. The header of a model with its vocabulary
# has 2 to 15 MB.
_FIRST, _GROWTH = 128 << 10, 8
PREFIX = "split."
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"

# The largest number with five digits.
MAX_PARTS = 99_999

_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.ASCII | re.DOTALL | re.IGNORECASE)

# ---- metadata ----

# Classes of numbers and dtypes of arrays by type in GGUF. Bools are plain `bool`.
NUMBERS: dict[int, Any] = {}
DTYPES: dict[int, np.dtype[np.generic]] = {lib.SL_GGUF_BOOL: np.dtype("?")}
for _name in ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F32", "F64"):
    _number, _plain = getattr(lib, f"SL_GGUF_{_name}"), float if _name[0] == "F" else int
    NUMBERS[_number] = type(_name, (_plain,), {"__doc__": f"Stored as {_name.lower()}."})
    DTYPES[_number] = np.dtype(f"<{_name[0].lower()}{int(_name[1:]) // 8}")
U8, I8, U16, I16, U32, I32, U64, I64, F32, F64 = NUMBERS.values()

_HEAD = 24  # bytes before the metadata: magic, version, number of tensors, number of keys
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")  # a type, and the length of a string
_ARRAY_HEAD = struct.Struct("<IQ")  # type of the elements, number of elements
# Types in files of 2023 and 2024, since removed from ggml.
_REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip


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
        return b"".join((_U32.pack(type), self._bytes[begin:end]))

    @property
    def tensor_count(self) -> int:
        """Number of tensors in the descriptions."""
        return int(_U64.unpack_from(self._bytes, _HEAD - 2 * _U64.size)[0])

    @property
    def data_begin(self) -> int:
        """The byte of the file that the offsets of its tensors count from; no tensor needs to begin there."""
        return len(self._bytes) + -len(self._bytes) % _alignment(self)

    def head_with(self, changes: Mapping[str, Any]) -> bytes:
        """Return the head of a file, padded to the tensors, with changed metadata; None removes a key."""
        alignment = _alignment(self)
        if ALIGNMENT_KEY in changes:
            text = f"{ALIGNMENT_KEY} cannot be edited, because the positions of all tensors depend on it"
            raise UnsupportedError(text)
        entries = []
        for key in dict.fromkeys([*self, *changes]):
            if key not in changes:
                entries.append(_key(key) + self.stored(key))
            elif changes[key] is not None:
                value = changes[key]  # a number keeps the stored type of the old value
                kind = NUMBERS.get(self._entries[key][0]) if key in self else None
                if kind is not None and (type(value) is int or (type(value) is float and issubclass(kind, float))):
                    value = kind(value)
                entries.append(_key(key) + _stored({key: value}, key, alignment))
        head: bytes = MAGIC + struct.pack("<IQQ", self.version, self.tensor_count, len(entries)) + b"".join(entries)
        head += self._bytes[max((end for _, _, end in self._entries.values()), default=_HEAD) :]  # descriptions
        return head + bytes(-len(head) % alignment) if self.tensor_count else head

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
                shown.append(f"{key!r}: <array of {_ARRAY_HEAD.unpack_from(self._bytes, begin)[1]:,}>")
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
        return str(data[_U64.size :], "utf-8", "surrogateescape")
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
        size_at, size = _U64.unpack_from, _U64.size
        for _ in range(count):
            begin = at + size
            at = begin + size_at(data, at)[0]
            values.append(str(data[begin:at], "utf-8", "surrogateescape"))
        return values, at
    stored = DTYPES[item]
    array: Array = np.frombuffer(data, stored, count, at).astype(stored.newbyteorder("="))
    return array, at + array.nbytes


# ---- tensors ----


class GgufTable(Table):
    """The tensors of a GGUF file, in the order of their bytes."""

    def __init__(self, address: int, gguf: Any) -> None:
        super().__init__(address)
        self._gguf = Metadata(gguf)
        ternary: dict[str, tuple[int, ...]] = {}
        unknown: dict[str, Unknown] = {}
        head = ffi.buffer(gguf.bytes, gguf.size)
        for k in range(gguf.listed_count):
            tensor = gguf.listed[k]
            name = str(head[tensor.name_begin : tensor.name_end], "utf-8")
            shape = struct.unpack_from(f"<{tensor.rank}Q", head, tensor.dims_begin)[::-1]
            if tensor.dtype == lib.SL_UNKNOWN:
                removed = _REMOVED.get(tensor.type)
                label = f"{tensor.type} ({removed}, removed)" if removed else str(tensor.type)
                reason = "is unknown to this version, so its values cannot be read"
                unknown[name] = Unknown(f"ggml type {label}", shape, reason)
            else:
                ternary[name] = shape
        self.ternary, self.unknown = ternary, unknown
        self.quantized = any(row.blocked for row in self.rows)

    def may_be_packed(self) -> bool:
        return bool(self.ternary) or lib.SL_NVFP4 in self.numbers or is_rearranged(self._gguf)

    def metadata(self) -> Metadata:
        return self._gguf


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
    return GgufTable(pointer(table[0]), gguf[0])


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of an open file."""
    candidate.file.table = read_table(candidate.file)
    return Content(candidate.file)


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
        text = f"this is part {number + 1} of {count} of a split GGUF file; to find the other parts, its name must end"
        raise error_about(UnsupportedError, f"{text} in -{number + 1:05}-of-{count:05}.gguf", path=file.path)
    else:
        paths = [files.join(folder, f"{name[1]}-{k + 1:05}-of-{count:05}{name[4]}") for k in range(count)]
    missing = [] if files.remote else [path for path in paths if not os.path.lexists(path)]
    if not missing:
        try:
            parts = files.each(lambda k: file if k == number else open_part(paths[k]), range(count))
        except FileNotFoundError as error:
            missing = [error.filename]
    if missing:
        shown = ", ".join(show(files.split(path)[1])[1:-1] for path in missing[:5]) + ", ..." * (len(missing) > 5)
        raise MissingShardError(f"{len(missing):,} of {count:,} parts are missing: {shown}", file.path)
    total = _value(parts[0], _TENSORS)
    for k, part in enumerate(parts):
        for key, expected in ((_NUMBER, k), (_COUNT, count), (_TENSORS, total)):
            if (value := _value(part, key)) != expected:
                raise FormatError(f"{key} is {value}, but {expected} according to the other parts", part.path)
    if (stored := sum(part.table.count for part in parts)) != total:
        raise FormatError(f"{_TENSORS} is {total}, but the parts have {stored} tensors", parts[0].path)
    metadata = parts[0].table.metadata()
    assert isinstance(metadata, Metadata)
    return parts, metadata.without(PREFIX)


def _value(file: WeightFile, key: str) -> int:
    value = (file.table.metadata() or {}).get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormatError(f"{key} must be an integer, got {show(value)}", file.path)
    return int(value)


# ---- write ----

MAGIC = b"GGUF"
VERSION = 3

ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
# The reader's limit: no processor has a larger page.
MAX_ALIGNMENT = 1 << 30

# ggml's limit (GGML_MAX_DIMS). ComfyUI reads image and video models with gguf-py, which has none.
MAX_DIMS = 4
# llama.cpp accepts names of fewer than 64 bytes (GGML_MAX_NAME), stable-diffusion.cpp builds ggml with 128. No build of
# ggml reads longer names.
MAX_NAME = 127
# The format's limit.
MAX_KEY = (1 << 16) - 1

# I2_S of https://github.com/microsoft/BitNet: its type, which ggml has used for another type, the file type to
# distinguish both, and the bytes of the scale.
_I2_S, _FILE_TYPE_I2_S, _TAIL = 36, 40, 32

# Types for a plain integer, in order of preference. gguf-py also prefers i32.
_INTEGERS = (lib.SL_GGUF_I32, lib.SL_GGUF_U32, lib.SL_GGUF_I64, lib.SL_GGUF_U64)
# Tensor names of transformers; names of llama.cpp begin with blk, token_embd, output.
_HUGGING_FACE_NAME = r"(?a)^(model|transformer|lm_head|language_model)\.|\.(layers|h|layer)\.[0-9]"
_OF_NUMBER = {**{kind: number for number, kind in NUMBERS.items()}, bool: lib.SL_GGUF_BOOL}
# Letters of `struct`, which refuses numbers that do not fit.
_LETTERS = {lib.SL_GGUF_BOOL: "?", **dict(zip(NUMBERS, "BbHhIiQqfd", strict=True))}
_OF_DTYPE = {dtype: number for number, dtype in DTYPES.items()}


def save(tensors: Mapping[str, Any], path: PathLike, metadata: Mapping[str, Any] | None, **options: Any) -> None:
    """Write a GGUF file in the order of ``tensors``; see `safeload.gguf.save_file`."""
    metadata = {} if metadata is None else metadata
    check_mapping(tensors, "tensors")
    check_mapping(metadata, "metadata", "text to values")
    alignment = _alignment(metadata)
    entries = [_key(key) + _stored(metadata, key, alignment) for key in metadata]
    parts = {name: part for item in tensors.items() for name, part in _parts(*item, tensors, metadata)}
    plans = [_plan(name, value, metadata) for name, value in parts.items()]
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(plans), len(entries)) + b"".join(entries))
    offset = 0
    for description, data in plans:
        head += description + _U64.pack(offset)
        offset += data.nbytes + -data.nbytes % alignment
    if plans:
        head += bytes(-len(head) % alignment)
    if len(head) + offset >= 1 << 63:
        raise SafeloadError(f"a file cannot have {len(head) + offset} bytes")
    padding = np.zeros(alignment, np.uint8)
    zeros = address_of(padding)

    def pieces() -> Iterator[Piece]:
        yield from pieces_of(np.frombuffer(head, np.uint8))
        for _, data in plans:
            yield from pieces_of(data)
            yield padding, zeros, -data.nbytes % alignment, False

    with AtomicFile(path, len(head) + offset, **options) as file:
        write_pieces(file, pieces())


# ---- tensors to write ----


def _plan(name: Any, value: Any, metadata: Mapping[str, Any]) -> tuple[bytes, Array | Lazy]:
    """Return the header entry of a tensor, up to its offset, and the data."""
    check_name(name)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    data: Array | Lazy
    label = advice = ""
    if isinstance(value, (QuantizedTensor, LazyParts)):
        if value.packing is not None or value.data is None:
            label, advice = value.scheme, 'dequantize it, or convert with quantize="q8_0" or dtype="float32"'
        elif value.scheme == INT8:
            label, advice = "int8 with scales", 'pass quantize="q8_0" or dtype="float32"'
        else:
            number = _I2_S if value.scheme == "i2_s" else dtypes.BLOCK_TYPES[value.scheme].ggml
            data = value.data
    elif isinstance(value, (np.ndarray, Lazy)):
        refuse_masked(value, tensor_named(name))
        row, data = dtypes.row_of(value.dtype), value
        number = -1 if row is None else row.ggml
        if number < 0:
            label = value.dtype.name
            advice = "its integers are int8 to int64. Convert the tensor with safeload.astype, or leave it out"
            if row is not None and row.floating and not row.packed:
                advice = 'pass dtype="float16"'
    else:
        raise not_an_array(tensor_named(name), value, "a NumPy array or a QuantizedTensor")
    error = partial(error_about, tensor=name)
    if advice:
        raise error(UnsupportedError, f"is {label}, which GGUF does not support: {advice}")
    raw, shape = encode(name, "tensor name", tensor=name), value.shape
    if b"\0" in raw:
        raise SafeloadError(f"tensor name {show(name)} contains NUL, where ggml would truncate it", tensor=name)
    if len(raw) > MAX_NAME:
        raise error(SafeloadError, f"has a name of {len(raw)} bytes, but ggml reads at most {MAX_NAME}")
    if len(shape) > MAX_DIMS:
        from ..models.family import gguf_architectures  # only tensors of 5 axes need the table

        architecture = metadata.get(ARCHITECTURE)
        if not isinstance(architecture, str) or architecture in gguf_architectures():
            text = f"has {len(shape)} dims, but ggml reads at most {MAX_DIMS}"
            raise error(SafeloadError, f"{text}, except in image and video models for ComfyUI")
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return _U64.pack(len(raw)) + raw + dims + _U32.pack(number), data


def _parts(name: Any, value: Any, tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Split a packed GGUF tensor into its blocks and their scale; other tensors stay whole."""
    packing = value.packing if isinstance(value, (LazyParts, QuantizedTensor)) else None
    if packing is None or packing.family != GGUF:
        yield name, value
        return
    codes = value.roles[CODES]
    if packing.flat:
        if tuple(metadata.get(SHAPE_KEY + name, ())) != packing.shape:
            text = f"has blocks that cross its rows, so readers need {SHAPE_KEY}{name} in the metadata: "
            raise error_about(UnsupportedError, f"{text}keep it, or pass dtype=", tensor=name)
        row = dtypes.BLOCK_TYPES[packing.numbers]
        rows = (*codes.shape[:-1], codes.shape[-1] // row.block_bytes * row.block)
        yield name, LazyParts(packing.numbers, rows, {CODES: _lazy(codes)})
        return
    scale = value.roles[SCALE]
    if packing.numbers == "i2_s":
        if metadata.get(FILE_TYPE) != _FILE_TYPE_I2_S:
            text = f"is I2_S of BitNet, so readers need {FILE_TYPE} {_FILE_TYPE_I2_S} in the metadata: "
            raise error_about(UnsupportedError, f"{text}keep it, or pass dtype=", tensor=name)

        def make() -> Array:
            data: Array = np.zeros(codes.nbytes + _TAIL, np.uint8)  # the scale follows the codes
            data[: codes.nbytes] = materialize(codes).ravel()
            data[codes.nbytes : codes.nbytes + 4] = materialize(scale).astype("<f4").reshape(1).view(np.uint8)
            return data

        both = Lazy(np.dtype(np.uint8), (codes.nbytes + _TAIL,), make)
        yield name, LazyParts(packing.numbers, packing.shape, {CODES: both})
        return
    beside, _ = scales_beside(name)
    if not name.endswith(".weight") or beside in tensors:
        reason = f"{show(beside)} is another tensor" if beside in tensors else "its name does not end in .weight"
        raise error_about(SafeloadError, f"cannot store its scale: {reason}", tensor=name)
    yield name, LazyParts(packing.numbers, packing.shape, {CODES: _lazy(codes)})
    yield beside, scale


def scales_beside(name: str) -> tuple[str, str]:
    """Return the names of the tensors with the factors of a weight's blocks in GGUF, and of its activations."""
    module = name.removesuffix(".weight")
    return f"{module}.scale", f"{module}.input_scale"


def _lazy(array: Array | Lazy) -> Lazy:
    return array if isinstance(array, Lazy) else Lazy(array.dtype, array.shape, lambda: np.ascontiguousarray(array))


# ---- metadata to write ----


def _text(text: str) -> bytes:
    """Encode a string value; bytes outside UTF-8 are written as they were read."""
    raw = encode(text, "the text", "surrogateescape")
    return _U64.pack(len(raw)) + raw


def _key(key: Any) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"a metadata key must be str, got {type(key).__name__}")
    raw = encode(key, "metadata key")
    if not 1 <= len(raw) <= MAX_KEY:
        raise SafeloadError(f"metadata key {show(key)} has {len(raw)} bytes, but GGUF allows 1 to {MAX_KEY}")
    return _U64.pack(len(raw)) + raw


def _alignment(metadata: Mapping[str, Any]) -> int:
    """Return the alignment of tensors in bytes."""
    value = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"metadata {show(ALIGNMENT_KEY)} must be int, got {type(value).__name__}")
    if not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise SafeloadError(f"metadata {show(ALIGNMENT_KEY)} must be a power of two up to {MAX_ALIGNMENT}, got {value}")
    return int(value)


def _stored(metadata: Mapping[str, Any], key: str, alignment: int) -> bytes:
    """Encode a value, preceded by its type."""
    if key == ALIGNMENT_KEY:
        return struct.pack("<II", lib.SL_GGUF_U32, alignment)
    if isinstance(metadata, Metadata):  # copied from its file without unpacking
        return metadata.stored(key)
    try:
        return _pack(metadata[key])
    except (TypeError, SafeloadError) as error:
        raise type(error)(f"metadata {show(key)}: {error}") from None


def _pack(value: Any) -> bytes:
    """Encode the type of a value, then its bytes."""
    if isinstance(value, str):
        return _U32.pack(lib.SL_GGUF_STRING) + _text(value)
    if _is_array(value):
        return _U32.pack(lib.SL_GGUF_ARRAY) + _pack_array(value, 1)
    number, data = _numbers([value])
    return _U32.pack(number) + data


def _is_array(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _pack_array(value: Any, depth: int) -> bytes:
    """Encode type and number of elements, then the elements."""
    if depth > 2:
        raise TypeError("arrays of arrays of arrays are not supported")
    refuse_masked(value, "the value")
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind not in "OUST":
        number = _declared_type(value)
        assert number is not None
        return _ARRAY_HEAD.pack(number, value.size) + value.astype(DTYPES[number]).tobytes()
    items = list(value)
    if all(isinstance(item, str) for item in items):
        number, data = lib.SL_GGUF_STRING, b"".join(map(_text, items))
    elif all(map(_is_array, items)):
        number, data = lib.SL_GGUF_ARRAY, b"".join(_pack_array(item, depth + 1) for item in items)
    else:
        number, data = _numbers(items)
    return _ARRAY_HEAD.pack(number, len(items)) + data


def _declared_type(value: Any) -> int | None:
    """Return the declared type of a value, or of the elements of an array; None for plain ints and floats."""
    if isinstance(value, (np.generic, np.ndarray)):
        if (number := _OF_DTYPE.get(value.dtype.newbyteorder("<"))) is None:
            raise TypeError(f"GGUF cannot store values of dtype {value.dtype}")
        return number
    if not isinstance(value, (int, float)):
        raise TypeError(f"GGUF cannot store values of type {type(value).__name__}")
    return _OF_NUMBER.get(type(value))


def _numbers(values: Sequence[Any]) -> tuple[int, bytes]:
    """Return type and bytes of numbers: the declared type of all, else the first type that holds all exactly."""
    declared = {_declared_type(value) for value in values}
    number = declared.pop() if len(declared) == 1 else None
    if number is None and any(isinstance(value, (bool, np.bool_)) for value in values):
        raise TypeError("an array must not mix bools and numbers")
    if number is None and all(isinstance(value, (int, np.integer)) for value in values):
        low, high = int(min(values)), int(max(values))
        ranges = ((type, np.iinfo(str(DTYPES[type]))) for type in _INTEGERS)
        number = next((type for type, limits in ranges if limits.min <= low and high <= limits.max), None)
        if number is None:
            raise SafeloadError(f"{low if low < 0 else high} does not fit in 64 bits")
    if number is None:
        with np.errstate(over="ignore"):
            exact = all(math.isnan(value) or float(np.float32(float(value))) == float(value) for value in values)
        number = lib.SL_GGUF_F32 if exact else lib.SL_GGUF_F64
    try:
        return number, struct.pack(f"<{len(values)}{_LETTERS[number]}", *values)
    except (OverflowError, struct.error):  # a caller made the instance of a class of `NUMBERS`
        raise SafeloadError(f"a number does not fit {DTYPES[number].name}") from None


def write(tensors: Mapping[str, Any], metadata: Mapping[Any, Any] | None, path: PathLike, **options: Any) -> None:
    """Write tensors of any format, and warn if no engine will load the file, as conversion does not build a model."""
    values = values_of(metadata or {})
    missing = []
    if not isinstance(values.get(ARCHITECTURE), str):
        missing.append(f"the metadata has no {ARCHITECTURE}")
    foreign = next((name for name in tensors if re.search(_HUGGING_FACE_NAME, name)), None)
    if foreign is not None:
        missing.append(f"{clip(printable(foreign), 80)} is a Hugging Face name, not a llama.cpp name")
    if tensors and missing and model_of(values) is None:
        warning(
            "%s: no engine will load this file: %s. The folder of a supported model, with config.json and tokenizer, "
            "becomes a file that llama.cpp loads unless raw=True is passed",
            printable(str(path)),
            "; ".join(missing),
        )
    save(tensors, path, values, **options)


def values_of(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert metadata to GGUF: values without a GGUF type become JSON; values that JSON cannot hold are dropped."""
    values: dict[str, Any] = {}
    for key, value in metadata.items():
        values.update({str(key): value} if _can_hold(value) else as_texts({key: value}))
    return values


def _can_hold(value: Any) -> bool:
    """Return True if GGUF has a type for a metadata value."""
    try:
        _pack(value)
    except (TypeError, SafeloadError):
        return False
    return True
