"""Write GGUF files. csrc/formats/gguf.c describes the format."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...base import dtypes, log
from ...base.arrays import Array, check_mapping, not_an_array, refuse_masked
from ...base.native import lib
from ...base.packing import CODES, GGUF, INT8, SCALE
from ...base.paths import PathLike
from ...base.text import check_name, clip, encode, error_about, printable, show, tensor_named
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.read.tensors import Lazy, LazyParts, materialize
from ...engine.run.atomic_file import AtomicFile, pieces_of, written_as_is
from ...engine.run.memory import address_of
from ...errors import SafeloadError, UnsupportedError
from ...models.diffusion import ARCHITECTURE, SHAPE_KEY, model_of
from ..metadata import as_texts
from .mixtures import FILE_TYPE
from .values import DTYPES, NUMBERS, Metadata

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

_U32, _U64, _ARRAY_HEAD = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")

# Types for a plain integer, in order of preference. gguf-py also prefers i32.
_INTEGERS = (lib.SL_GGUF_I32, lib.SL_GGUF_U32, lib.SL_GGUF_I64, lib.SL_GGUF_U64)
# Tensor names of transformers; names of llama.cpp begin with blk, token_embd, output.
_HUGGING_FACE_NAME = r"(?a)^(model|transformer|lm_head|language_model)\.|\.(layers|h|layer)\.[0-9]"
_OF_NUMBER = {kind: number for number, kind in NUMBERS.items()}
_OF_DTYPE = {dtype: number for number, dtype in DTYPES.items()}


def save(
    tensors: Mapping[str, Any], path: PathLike, metadata: Mapping[str, Any] | None, *, overwrite: bool, durable: bool
) -> None:
    """Write a GGUF file in the order of ``tensors``; see `safeload.gguf.save_file`."""
    metadata = {} if metadata is None else metadata
    check_mapping(tensors, "tensors")
    check_mapping(metadata, "metadata", "text to values")
    alignment = _alignment(metadata)
    entries = [_key(key) + _stored(metadata, key, alignment) for key in metadata]
    parts = {name: part for item in tensors.items() for name, part in _parts(*item, tensors, metadata)}
    plans = [_plan(name, value, metadata) for name, value in parts.items()]
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(plans), len(entries)))
    head += b"".join(entries)
    offset = 0
    for description, data in plans:
        head += description + _U64.pack(offset)
        offset += data.nbytes + -data.nbytes % alignment
    if plans:
        head += bytes(-len(head) % alignment)
    if len(head) + offset >= 1 << 63:
        raise SafeloadError(f"a file cannot have {len(head) + offset} bytes")
    with AtomicFile(path, len(head) + offset, overwrite=overwrite, durable=durable) as file:
        padding = np.zeros(alignment, np.uint8)
        buffers = [(address_of(np.frombuffer(head, np.uint8)), len(head))]  # written together as far as they exist
        for _, data in plans:
            for _owner, address, size in pieces_of(materialize(data)):
                buffers.append((address, size))
                if isinstance(data, Lazy) or not written_as_is(data):
                    file.write([buffer for buffer in buffers if buffer[1]])
                    buffers.clear()
            buffers.append((address_of(padding), -data.nbytes % alignment))
        file.write([buffer for buffer in buffers if buffer[1]])


# ---- tensors ----


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
    if advice:
        text = f"is {label}, which GGUF does not support: {advice}"
        raise error_about(UnsupportedError, text, tensor=name)
    raw, shape = encode(name, "tensor name", tensor=name), value.shape
    if b"\0" in raw:
        raise SafeloadError(f"tensor name {show(name)} contains NUL, where ggml would truncate it", tensor=name)
    if len(raw) > MAX_NAME:
        text = f"has a name of {len(raw)} bytes, but ggml reads at most {MAX_NAME}"
        raise error_about(SafeloadError, text, tensor=name)
    if len(shape) > MAX_DIMS:
        from ...models.family import gguf_architectures  # only tensors of 5 axes need the table

        architecture = metadata.get(ARCHITECTURE)
        if not isinstance(architecture, str) or architecture in gguf_architectures():
            text = f"has {len(shape)} dims, but ggml reads at most {MAX_DIMS}"
            raise error_about(SafeloadError, f"{text}, except in image and video models for ComfyUI", tensor=name)
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
    beside = f"{name.removesuffix('.weight')}.scale"
    if not name.endswith(".weight") or beside in tensors:
        reason = f"{show(beside)} is another tensor" if beside in tensors else "its name does not end in .weight"
        raise error_about(SafeloadError, f"cannot store its scale: {reason}", tensor=name)
    yield name, LazyParts(packing.numbers, packing.shape, {CODES: _lazy(codes)})
    yield beside, scale


def _lazy(array: Array | Lazy) -> Lazy:
    if isinstance(array, Lazy):
        return array
    return Lazy(array.dtype, array.shape, lambda: np.ascontiguousarray(array))


# ---- metadata ----


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


def data_begin(metadata: Metadata) -> int:
    """Return the byte of the file that the offsets of its tensors count from; no tensor needs to begin there."""
    return metadata.nbytes + -metadata.nbytes % _alignment(metadata)


def head_with(metadata: Metadata, changes: Mapping[str, Any]) -> bytes:
    """Return the head of a file, padded to the tensors, with changed metadata; None removes a key."""
    alignment = _alignment(metadata)
    if ALIGNMENT_KEY in changes:
        raise UnsupportedError(f"{ALIGNMENT_KEY} cannot be edited, because the positions of all tensors depend on it")
    entries = []
    for key in dict.fromkeys([*metadata, *changes]):
        if key not in changes:
            entries.append(_key(key) + metadata.stored(key))
        elif changes[key] is not None:
            value = changes[key]  # a number keeps the stored type of the old value
            kind = NUMBERS.get(metadata.type_of(key)) if key in metadata else None
            if kind is not None and (type(value) is int or (type(value) is float and issubclass(kind, float))):
                value = kind(value)
            entries.append(_key(key) + _stored({key: value}, key, alignment))
    head = MAGIC + struct.pack("<IQQ", metadata.version, metadata.tensor_count, len(entries))
    head += b"".join(entries) + metadata.descriptions
    return head + bytes(-len(head) % alignment) if metadata.tensor_count else head


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
        number = _array_type(value.dtype)
        return _ARRAY_HEAD.pack(number, value.size) + value.astype(DTYPES[number]).tobytes()
    items = list(value)
    if all(isinstance(item, str) for item in items):
        number, data = lib.SL_GGUF_STRING, b"".join(map(_text, items))
    elif all(map(_is_array, items)):
        number, data = lib.SL_GGUF_ARRAY, b"".join(_pack_array(item, depth + 1) for item in items)
    else:
        number, data = _numbers(items)
    return _ARRAY_HEAD.pack(number, len(items)) + data


def _array_type(dtype: np.dtype[Any]) -> int:
    number = _OF_DTYPE.get(dtype.newbyteorder("<"))
    if number is None:
        raise TypeError(f"GGUF cannot store values of dtype {dtype}")
    return number


def _declared_type(value: Any) -> int | None:
    """Return the declared type of a value; None for plain ints and floats."""
    if isinstance(value, (bool, np.bool_)):
        return int(lib.SL_GGUF_BOOL)
    if isinstance(value, (np.generic, np.ndarray)):
        return _array_type(value.dtype)
    if type(value) not in _OF_NUMBER and not isinstance(value, (int, float)):
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
        number = next((type for type in _INTEGERS if _limits(type)[0] <= low and high <= _limits(type)[1]), None)
        if number is None:
            raise SafeloadError(f"{low if low < 0 else high} does not fit in 64 bits")
    if number is None:
        with np.errstate(over="ignore"):
            exact = all(math.isnan(value) or float(np.float32(float(value))) == float(value) for value in values)
        number = lib.SL_GGUF_F32 if exact else lib.SL_GGUF_F64
    dtype = DTYPES[number]
    try:
        with np.errstate(over="raise"):
            if dtype.kind in "iu" and len(values):  # numpy before 2 lets integers wrap around
                lowest, highest = _limits(number)
                if min(values) < lowest or max(values) > highest:
                    raise OverflowError
            return number, np.array(values, dtype).tobytes()
    except (OverflowError, FloatingPointError):  # a caller made the instance of a class of values.py
        raise SafeloadError(f"a number does not fit {dtype.name}") from None


def _limits(number: int) -> tuple[int, int]:
    limits = np.iinfo(str(DTYPES[number]))
    return limits.min, limits.max


def save_converted(
    tensors: Mapping[str, Any], metadata: Mapping[Any, Any], path: PathLike, *, overwrite: bool, durable: bool
) -> None:
    """Write tensors of any format, and warn if no engine will load the file, as conversion does not build a model."""
    values = values_of(metadata)
    missing = []
    if not isinstance(values.get(ARCHITECTURE), str):
        missing.append(f"the metadata has no {ARCHITECTURE}")
    foreign = next((name for name in tensors if re.search(_HUGGING_FACE_NAME, name)), None)
    if foreign is not None:
        missing.append(f"{clip(printable(foreign), 80)} is a Hugging Face name, not a llama.cpp name")
    if tensors and missing and model_of(values) is None:
        log.warning(
            "%s: no engine will load this file: %s. The folder of a supported model, with config.json and tokenizer, "
            "becomes a file that llama.cpp loads unless raw=True is passed",
            printable(str(path)),
            "; ".join(missing),
        )
    save(tensors, path, values, overwrite=overwrite, durable=durable)


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
