"""The metadata of zarr arrays, versions 2 and 3, as Orbax and tensorstore write it.

1. Version 2, ``.zarray``: JSON with ``zarr_format`` 2, ``shape``, ``chunks``, ``dtype`` (NumPy's code "<f4", or
   tensorstore's name "bfloat16"), ``order`` "C" or "F", ``compressor`` (null or ``{"id": "zstd"}``), ``filters``
   (none), ``dimension_separator`` "." or "/", ``fill_value``. Keys of chunks: "0.1"; "0" without axes.
2. Version 3, ``zarr.json``: ``zarr_format`` 3, ``node_type`` "array", ``shape``, ``data_type``, ``chunk_grid``
   (regular), ``chunk_key_encoding`` ("default": "c/0/1", and "c" without axes; or "v2"), ``codecs``, ``fill_value``.
3. Codecs of version 3: ``transpose`` (once), ``bytes`` (``endian``), then ``crc32c`` and ``zstd`` (each once). Or a
   single ``sharding_indexed``: a file holds a grid of smaller chunks with codecs of their own.
4. Chunks at the border have full size. int2 and int4 take a byte each, of which the low bits count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.messages import error_about
from ...base.table import Unknown
from ...base.text import show
from ...errors import FormatError, UnsupportedError
from ..boxed import MAX_RANK

V2, V3 = ".zarray", "zarr.json"
ZSTD, CRC32C = "zstd", "crc32c"
_LARGEST = 1 << 62
_CODE = re.compile(r"([<>|])([biufc])([0-9]{1,2})", re.ASCII)
_HEX = re.compile(r"0x[0-9a-fA-F]{1,16}", re.ASCII)
# Dtypes of fewer than 8 bits, which take a byte each: opened as int8, with the bits that count.
_NARROW = {"int4": 4, "int2": 2}
_V2_FIELDS = {
    "zarr_format", "shape", "chunks", "dtype", "order", "compressor", "filters", "dimension_separator", "fill_value"
}  # fmt: skip
_V3_FIELDS = {
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "fill_value",
    "attributes", "dimension_names", "storage_transformers",
}  # fmt: skip


class ChunkLayout(NamedTuple):
    """How the elements of a chunk are stored."""

    shape: tuple[int, ...]  # of every chunk
    itemsize: int
    bits: int | None = None  # the low bits of each byte that count, if not all
    axes: tuple[int, ...] | None = None  # order in which the axes are stored; None for C order
    swapped: bool = False  # True if elements are big-endian
    steps: tuple[str, ...] = ()  # what was done to the bytes, in order

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, before the steps."""
        return prod(self.shape) * self.itemsize

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Bytes between neighbours along each axis; None for C order."""
        if self.axes is None:
            return None
        strides, step = [0] * len(self.shape), self.itemsize
        for axis in reversed(self.axes):
            strides[axis] = step
            step *= self.shape[axis]
        return tuple(strides)


class ZarrArray(NamedTuple):
    """An array of a checkpoint."""

    row: dtypes.Dtype
    shape: tuple[int, ...]
    grid: tuple[int, ...]  # shape of a chunk with a key of its own
    chunk: ChunkLayout
    sharded: bool  # True if the value of a key is a grid of chunks with an index
    index_first: bool  # True if the index precedes the chunks
    index_checked: bool  # True if a CRC-32C follows the index
    separator: str
    prefix: str  # "c" in version 3
    fill: Any  # as in the metadata

    @property
    def counts(self) -> list[int]:
        """Chunks along each axis."""
        return [-(-size // chunk) for size, chunk in zip(self.shape, self.grid, strict=True)]

    def index_of(self, number: int) -> tuple[int, ...]:
        """Return the index of a chunk by its number in C order."""
        index: list[int] = []
        for count in reversed(self.counts):
            number, k = divmod(number, count)
            index.insert(0, k)
        return tuple(index)

    def inside(self, shape: Sequence[int], offsets: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the part of a chunk that is inside the array; none is positive beyond it."""
        return tuple(map(min, shape, map(int.__sub__, self.shape, offsets)))

    def key(self, index: Sequence[int]) -> str:
        """Return the key of a chunk, after the name of the array and a slash."""
        parts = [*([self.prefix] if self.prefix else ()), *map(str, index)]
        return self.separator.join(parts) or "0"


class _Metadata:
    """A JSON object and how to complain about it."""

    def __init__(self, fields: Mapping[str, Any], path: str, name: str) -> None:
        self.fields = fields
        self.path = path
        self.name = name

    def error(self, text: str) -> FormatError:
        return error_about(FormatError, f": {text}", path=self.path, tensor=self.name)

    def unsupported(self, text: str) -> UnsupportedError:
        return UnsupportedError(f"has {text}", path=self.path, tensor=self.name)

    def shape(self, value: Any, what: str, *, least: int = 0) -> tuple[int, ...]:
        """Return a checked list of sizes."""
        valid = type(value) is list and all(type(n) is int and least <= n < _LARGEST for n in value)
        if not valid or len(value) > MAX_RANK:
            text = f"{what} must be a list of up to {MAX_RANK} sizes, got {show(value)[:100]}"
            raise self.error(text)
        return tuple(value)

    def dtype(self, text: Any, names: bool) -> tuple[dtypes.Dtype, int | None, bool]:
        """Return the row of a dtype, the bits that count, and True if it is big-endian."""
        match = _CODE.fullmatch(text) if type(text) is str and not names else None
        name = text
        if match is not None:
            kind, size = match[2], int(match[3])
            name = "bool" if match[0] == "|b1" else f"{_KINDS[kind]}{8 * size}" if kind != "b" else None
        if type(name) is str and name in _NARROW:
            return dtypes.BY_NAME["int8"], _NARROW[name], False
        row = dtypes.BY_NAME.get(name) if type(name) is str else None
        swapped = match is not None and match[1] == ">"
        if row is None or row.packed or (swapped and row.complex):
            raise self.unsupported(f"dtype {show(text)}, which no array can represent")
        return row, None, swapped and row.bits > 8

    def configuration(self, value: Any, what: str) -> tuple[str, Mapping[str, Any]]:
        """Return the name and the configuration of a codec or another extension of version 3."""
        if type(value) is str:
            return value, {}
        name = value.get("name") if type(value) is dict else None
        configuration = value.get("configuration", {}) if type(value) is dict else None
        if type(name) is not str or type(configuration) is not dict:
            raise self.error(f"{what} must have a name and a configuration, got {show(value)[:100]}")
        return name, configuration

    def check_fields(self, allowed: set[str]) -> None:
        """Refuse fields that may change the meaning of the array."""
        for name, value in self.fields.items():
            optional = type(value) is dict and value.get("must_understand") is False
            if name not in allowed and not optional:
                raise self.unsupported(f"the field {show(name)}, which safeload does not know")


_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}


def parse(fields: Mapping[str, Any], path: str, name: str, version: int) -> ZarrArray:
    """Return the array that metadata describes."""
    metadata = _Metadata(fields, path, name)
    actual = fields.get("zarr_format")
    if actual != version:
        raise metadata.error(f"zarr_format must be {version}, got {show(actual)}")
    array = _version2(metadata) if version == 2 else _version3(metadata)
    if len(array.grid) != len(array.shape) or len(array.chunk.shape) != len(array.shape):
        raise metadata.error(f"chunks of shape {list(array.grid)} do not divide an array of shape {list(array.shape)}")
    if any(outer % inner for outer, inner in zip(array.grid, array.chunk.shape, strict=True)):
        raise metadata.error(f"chunks of {list(array.chunk.shape)} do not divide shards of {list(array.grid)}")
    return array


def unreadable(fields: Mapping[str, Any], reason: str) -> Unknown:
    """Describe an array that `parse` does not support."""
    shape: Any = fields.get("shape")
    known = type(shape) is list and len(shape) <= MAX_RANK and all(type(n) is int and 0 <= n < _LARGEST for n in shape)
    dtype = show(fields.get("dtype", fields.get("data_type")))[:100]
    return Unknown(dtype.strip("'"), tuple(shape) if known else (), reason)


def _version2(metadata: _Metadata) -> ZarrArray:
    fields = metadata.fields
    metadata.check_fields(_V2_FIELDS)
    shape = metadata.shape(fields.get("shape"), "shape")
    chunks = metadata.shape(fields.get("chunks"), "chunks", least=1)
    row, bits, swapped = metadata.dtype(fields.get("dtype"), names=False)
    order, separator = fields.get("order"), fields.get("dimension_separator", ".")
    if order not in ("C", "F") or separator not in (".", "/"):
        raise metadata.error(f"order {show(order)} or dimension_separator {show(separator)} is unknown")
    if fields.get("filters"):
        raise metadata.unsupported(f"filters {show(fields['filters'])[:100]}, which safeload does not read")
    steps: tuple[str, ...] = ()
    compressor = fields.get("compressor")
    if compressor is not None:
        codec = compressor.get("id") if type(compressor) is dict else compressor
        if codec != ZSTD:
            raise metadata.unsupported(f"compressor {show(codec)[:100]}; safeload reads zstd and uncompressed chunks")
        steps = (ZSTD,)
    axes = tuple(reversed(range(len(shape)))) if order == "F" and len(shape) > 1 else None
    layout = ChunkLayout(chunks, dtypes.array_dtype(row.number).itemsize, bits, axes, swapped, steps)
    return ZarrArray(row, shape, chunks, layout, False, False, False, separator, "", fields.get("fill_value"))


def _version3(metadata: _Metadata) -> ZarrArray:
    fields = metadata.fields
    metadata.check_fields(_V3_FIELDS)
    if fields.get("node_type") != "array":
        raise metadata.error(f"node_type must be array, got {show(fields.get('node_type'))}")
    if fields.get("storage_transformers"):
        raise metadata.unsupported("storage_transformers, which safeload does not read")
    shape = metadata.shape(fields.get("shape"), "shape")
    kind, configuration = metadata.configuration(fields.get("chunk_grid"), "chunk_grid")
    if kind != "regular":
        raise metadata.unsupported(f"chunk_grid {show(kind)}; safeload reads regular grids")
    grid = metadata.shape(configuration.get("chunk_shape"), "chunk_shape", least=1)
    encoding, configuration = metadata.configuration(fields.get("chunk_key_encoding"), "chunk_key_encoding")
    separator = configuration.get("separator", "/" if encoding == "default" else ".")
    if encoding not in ("default", "v2") or separator not in (".", "/"):
        raise metadata.unsupported(f"chunk_key_encoding {show(encoding)} with separator {show(separator)}")
    row, bits, _ = metadata.dtype(fields.get("data_type"), names=True)
    codecs: Any = fields.get("codecs")
    first = codecs[0] if type(codecs) is list and codecs else None
    name, configuration = metadata.configuration(first, "codecs")
    sharded = name == "sharding_indexed"
    inner, checked, index_first = grid, False, False
    if sharded:
        if len(codecs) > 1:
            raise metadata.unsupported("codecs after sharding_indexed, which safeload does not read")
        inner = metadata.shape(configuration.get("chunk_shape"), "chunk_shape of sharding_indexed", least=1)
        codecs = configuration.get("codecs")
        checked = _index_codecs(metadata, configuration.get("index_codecs"))
        location = configuration.get("index_location", "end")
        if location not in ("start", "end"):
            raise metadata.error(f"index_location must be start or end, got {show(location)}")
        index_first = location == "start"
    axes, swapped, steps = _codecs(metadata, codecs, len(inner), row)
    layout = ChunkLayout(inner, dtypes.array_dtype(row.number).itemsize, bits, axes, swapped, steps)
    prefix = "c" if encoding == "default" else ""
    fill = fields.get("fill_value")
    return ZarrArray(row, shape, grid, layout, sharded, index_first, checked, separator, prefix, fill)


def _codecs(
    metadata: _Metadata, codecs: Any, rank: int, row: dtypes.Dtype
) -> tuple[tuple[int, ...] | None, bool, tuple[str, ...]]:
    """Return the order of the axes, True for big-endian elements, and the steps after that."""
    if type(codecs) is not list:
        raise metadata.error(f"codecs must be a list, got {show(codecs)[:100]}")
    axes: tuple[int, ...] | None = None
    swapped: bool | None = None
    steps: list[str] = []
    for codec in codecs:
        name, configuration = metadata.configuration(codec, "a codec")
        if name == "transpose" and axes is None and swapped is None:
            order: Any = configuration.get("order")
            numbers = type(order) is list and all(type(axis) is int for axis in order)
            if not numbers or sorted(order) != list(range(rank)):
                raise metadata.error(f"the order of transpose must list {rank} axes, got {show(order)[:100]}")
            axes = tuple(order)
        elif name == "bytes" and swapped is None:
            endian = configuration.get("endian", "little" if row.bits <= 8 else None)
            if endian not in ("little", "big"):
                raise metadata.error(f"endian must be little or big, got {show(endian)}")
            swapped = endian == "big" and row.bits > 8
            if swapped and row.complex:
                raise metadata.unsupported("big-endian complex numbers, which safeload does not read")
        elif name in (ZSTD, CRC32C) and swapped is not None and name not in steps:
            steps.append(name)
        else:
            text = (
                f"codec {show(name)} there; safeload reads transpose, bytes, zstd and crc32c, and one sharding_indexed"
            )
            raise metadata.unsupported(text)
    if swapped is None:
        raise metadata.error("codecs must include bytes")
    return axes, swapped, tuple(steps)


def _index_codecs(metadata: _Metadata, codecs: Any) -> bool:
    """Return True if a checksum follows the index of a shard."""
    if type(codecs) is not list:
        raise metadata.error(f"index_codecs must be a list, got {show(codecs)[:100]}")
    steps = [metadata.configuration(codec, "a codec of the index") for codec in codecs]
    names = [name for name, _ in steps]
    if names not in (["bytes"], ["bytes", CRC32C]) or steps[0][1].get("endian") != "little":
        raise metadata.unsupported(f"index_codecs {', '.join(map(show, names[:8]))}; safeload reads bytes and crc32c")
    return len(names) == 2


def fill_of(array: ZarrArray, path: str, name: str) -> bytes:
    """Return the bytes of an element that is not stored."""
    value, row = array.fill, array.row
    dtype = dtypes.array_dtype(row.number)
    special = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
    if value is None or value is False:
        return bytes(dtype.itemsize)
    try:
        if row.floating and type(value) is str and value in special:
            return np.array(special[value]).astype(dtype).tobytes()
        if row.floating and type(value) is str and _HEX.fullmatch(value):
            return int(value, 16).to_bytes(dtype.itemsize, "little")
        if row.floating and type(value) in (int, float):
            with np.errstate(over="ignore"):
                return np.array(value, np.float64).astype(dtype).tobytes()
        if row.code == "BOOL" and value is True:
            return b"\1"
        if dtype.kind in "iu" and type(value) is int:
            return value.to_bytes(dtype.itemsize, "little", signed=dtype.kind == "i")
        if row.complex and type(value) is list and all(type(part) in (int, float) for part in value):
            real, imaginary = value
            return np.array(complex(real, imaginary), dtype).tobytes()
    except (ValueError, OverflowError):
        pass
    text = f"lacks chunks, and its fill value {show(value)[:100]} is in a notation that safeload does not read"
    raise UnsupportedError(text, path=path, tensor=name)
