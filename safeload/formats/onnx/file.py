"""The ONNX row of the registry: the initializers of a model as tensors; model.py walks the file.

1. ``raw_data`` holds the elements as bytes: little-endian, in C order. Elements of 4 and 2 bits fill each byte from the
   low bits on; those of 6 bits are 4 in 3 bytes.
2. Without it, ``float_data`` and ``double_data`` hold floats and complex numbers as they are. ``int32_data`` holds
   varints: smaller integers, bools, the bit patterns of float16, bfloat16, float8 and float6, and the bytes of elements
   of 4 and 2 bits. ``int64_data`` and ``uint64_data`` hold int64, and uint32 and uint64, as varints.
3. With ``data_location`` 1 the elements are in another file: ``external_data`` has its ``location`` relative to the
   model's folder, ``offset`` and ``length`` in bytes as text. ``checksum`` is not compared.

Opening reads names, shapes and places only. Bytes that are stored as they are become views; varints, 4-bit and 2-bit
integers are decoded when they are read, the latter to int8 and uint8, as NumPy has no smaller integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, array_fits
from ...base.listed_table import ListedTable, Listing, unreadable
from ...base.messages import error_about
from ...base.text import plural, show
from ...engine.run.weight_file import WeightFile, open_without_table
from ...errors import FormatError, TensorNotFoundError, UnsupportedError
from ..boxed import Box, BoxedListing, BoxSource, InFile, Region, boxed_file
from ..registry import Candidate, Content, OpenRequest, place_beside
from .model import ByteSpan, ModelReader, OnnxModel, TensorProto
from .wire import decode_varints

# Value of ``root=`` for the tensors of Constant nodes.
CONSTANTS = "constants"
# Files of external data; one for each tensor is usual.
MAX_FILES = 100_000


class ElementType(NamedTuple):
    """A data_type of ONNX."""

    code: str  # of the dtype that safeload reads; empty if there is none
    name: str  # ONNX's name
    bits: int  # of an element
    field: str  # that holds it without raw_data

    def numbers(self, count: int) -> int:
        """Return how many numbers hold elements in `field`: a byte of several elements of 4 or 2 bits is one."""
        return -(-count * self.bits // 8) if self.bits < 6 else count


TYPES = {
    1: ElementType("F32", "FLOAT", 32, "float_data"),
    2: ElementType("U8", "UINT8", 8, "int32_data"),
    3: ElementType("I8", "INT8", 8, "int32_data"),
    4: ElementType("U16", "UINT16", 16, "int32_data"),
    5: ElementType("I16", "INT16", 16, "int32_data"),
    6: ElementType("I32", "INT32", 32, "int32_data"),
    7: ElementType("I64", "INT64", 64, "int64_data"),
    8: ElementType("", "STRING", 8, "string_data"),
    9: ElementType("BOOL", "BOOL", 8, "int32_data"),
    10: ElementType("F16", "FLOAT16", 16, "int32_data"),
    11: ElementType("F64", "DOUBLE", 64, "double_data"),
    12: ElementType("U32", "UINT32", 32, "uint64_data"),
    13: ElementType("U64", "UINT64", 64, "uint64_data"),
    14: ElementType("C64", "COMPLEX64", 64, "float_data"),
    15: ElementType("C128", "COMPLEX128", 128, "double_data"),
    16: ElementType("BF16", "BFLOAT16", 16, "int32_data"),
    17: ElementType("F8_E4M3", "FLOAT8E4M3FN", 8, "int32_data"),
    18: ElementType("F8_E4M3FNUZ", "FLOAT8E4M3FNUZ", 8, "int32_data"),
    19: ElementType("F8_E5M2", "FLOAT8E5M2", 8, "int32_data"),
    20: ElementType("F8_E5M2FNUZ", "FLOAT8E5M2FNUZ", 8, "int32_data"),
    21: ElementType("U8", "UINT4", 4, "int32_data"),
    22: ElementType("I8", "INT4", 4, "int32_data"),
    23: ElementType("F4", "FLOAT4E2M1", 4, "int32_data"),
    24: ElementType("F8_E8M0", "FLOAT8E8M0", 8, "int32_data"),
    25: ElementType("U8", "UINT2", 2, "int32_data"),
    26: ElementType("I8", "INT2", 2, "int32_data"),
    27: ElementType("F6_E2M3", "FLOAT6E2M3", 6, "int32_data"),
    28: ElementType("F6_E3M2", "FLOAT6E3M2", 6, "int32_data"),
}


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of a model, and open its files of external data."""
    file = candidate.file
    model = ModelReader(file).read()
    if request.root not in (None, CONSTANTS):
        text = f"no container {show(request.root)}; an ONNX model has {show(CONSTANTS)}, the tensors of Constant nodes"
        raise error_about(TensorNotFoundError, text, path=file.path)
    tensors = model.initializers if request.root is None else model.constants
    places = TensorPlacer(file)
    try:
        for name, tensor in tensors.items():
            places.add(name, tensor)
        return places.content(model, list(tensors), _notes(model, request))
    except BaseException:
        places.close()
        raise


def _notes(model: OnnxModel, request: OpenRequest) -> list[str]:
    if request.root is not None or not model.constants:
        return []
    count = plural(len(model.constants), "tensor")
    return [f'Constant nodes hold {count} that are not opened: pass root="{CONSTANTS}" for these instead']


class TensorPlacer:
    """Finds the elements of tensors."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._listings: dict[WeightFile, list[Listing]] = {file: []}
        self._boxed: dict[str, BoxedListing] = {}
        self._external: dict[str, WeightFile] = {}
        self._missing: dict[str, str] = {}  # why a file of external data cannot be opened

    def close(self) -> None:
        """Close the files of external data."""
        for file in self._external.values():
            file.close()

    def content(self, model: OnnxModel, names: Sequence[str], notes: Sequence[str]) -> Content:
        """Return the content with all tensors."""
        for file, listings in self._listings.items():
            file.table = ListedTable(listings, model.metadata if file is self._file else None)
        files = list(self._external.values())
        for file in files:
            file.stand_for(self._file, unpacked=False)
        if self._boxed:
            stores = [self._file.store, *(file.store for file in files)]
            files.append(boxed_file(self._file, self._file.path, self._boxed, stores))
        return Content(self._file, files, names if files else (), notes)

    def add(self, name: str, tensor: TensorProto) -> None:
        """Check a tensor against its elements and list it."""
        type_ = TYPES.get(tensor.data_type)
        label = f"data type {tensor.data_type}" if type_ is None else type_.name
        try:
            if type_ is None or not type_.code or tensor.strings:
                raise UnsupportedError("is not a dtype of weights")
            self._add(name, tensor, type_)
        except UnsupportedError as error:
            is_tensor = type_ is None or bool(type_.code)
            missing = _location(tensor) in self._missing
            listing = unreadable(name, label, tuple(tensor.dims), str(error), is_tensor=is_tensor, is_missing=missing)
            self._listings[self._file].append(listing)

    def _add(self, name: str, tensor: TensorProto, type_: ElementType) -> None:
        row = dtypes.BY_CODE[type_.code]
        shape = tuple(tensor.dims)
        if not array_fits(shape, max(1, type_.bits // 8)):
            raise self._fault(f": no array can have the shape {show(list(shape))}", name, tensor)
        count = prod(shape)
        if row.packed and count % row.block:
            raise UnsupportedError(f"has {count} elements of {row.bits} bits, which end inside a byte")
        nbytes = -(-count * type_.bits // 8)
        if tensor.segment:
            raise UnsupportedError("is a segment of a tensor")
        if tensor.location not in (0, 1):
            raise self._fault(f": data_location is {tensor.location}, expected 0 or 1", name, tensor)
        file, place = self._file, tensor.raw
        if tensor.location == 1:
            if tensor.raw is not None or any(tensor.pieces.values()):
                raise self._fault(" has elements both in the model and in another file", name, tensor)
            file, place = self._external_place(name, tensor, nbytes)
        elif tensor.raw is not None and any(tensor.pieces.values()):
            raise self._fault(f" has raw_data and {', '.join(tensor.pieces)}", name, tensor)
        if place is None and count:
            self._add_numbers(name, tensor, type_, shape)
            return
        if place is None:
            place = ByteSpan(0, 0)
        if place.end - place.begin != nbytes:
            text = f": {type_.name} {list(shape)} needs {nbytes} bytes, but raw_data has {place.end - place.begin}"
            raise self._fault(text, name, tensor)
        if type_.bits < 8 and not row.packed and count:
            self._box(name, row, shape, SmallIntegers(file, [place], type_, count))
        else:
            self._listings.setdefault(file, []).append(Listing(name, row, shape, *place))

    def _add_numbers(self, name: str, tensor: TensorProto, type_: ElementType, shape: tuple[int, ...]) -> None:
        """List a tensor whose elements are in the field of its type."""
        count = prod(shape)
        if any(pieces for field, pieces in tensor.pieces.items() if field != type_.field):
            text = f": {type_.name} has its elements in {type_.field}, got {', '.join(tensor.pieces)}"
            raise self._fault(text, name, tensor)
        pieces = tensor.pieces.get(type_.field, [])
        stored = sum(piece.end - piece.begin for piece in pieces)
        row = dtypes.BY_CODE[type_.code]
        if type_.field in ("float_data", "double_data"):
            nbytes = row.nbytes(count)
            if stored != nbytes:
                text = f": {type_.name} {list(shape)} needs {nbytes} bytes, but {type_.field} has {stored}"
                raise self._fault(text, name, tensor)
            if len(pieces) == 1:
                self._listings[self._file].append(Listing(name, row, shape, *pieces[0]))
            else:
                self._box_pieces(name, row, shape, pieces)
            return
        numbers = type_.numbers(count)
        if not numbers <= stored <= 10 * numbers:
            text = f": {type_.name} {list(shape)} needs {numbers} numbers, but {type_.field} has {stored} bytes"
            raise self._fault(text, name, tensor)
        kind = Varints if type_.bits >= 8 or row.packed else SmallIntegers
        self._box(name, row, shape, kind(self._file, pieces, type_, count, varints=True))

    def _box(self, name: str, row: dtypes.Dtype, shape: tuple[int, ...], stored: BoxSource) -> None:
        if row.packed:
            if not shape or shape[-1] % row.block:
                raise UnsupportedError(f"{list(shape)} is stored as numbers, and its rows end inside a byte")
            shape = (*shape[:-1], row.nbytes(shape[-1]))
        self._boxed[name] = BoxedListing(row, shape, [Box((0,) * len(shape), shape, stored)])

    def _box_pieces(self, name: str, row: dtypes.Dtype, shape: tuple[int, ...], pieces: Sequence[ByteSpan]) -> None:
        """List a tensor whose elements are in several places; a piece must hold whole elements."""
        boxes, at, itemsize = [], 0, row.nbytes(1)
        for begin, end in pieces:
            if (end - begin) % itemsize:
                raise UnsupportedError("is stored in pieces that end inside an element")
            count = (end - begin) // itemsize
            boxes.append(Box((at,), (count,), InFile(self._file.store, begin)))
            at += count
        self._boxed[name] = BoxedListing(row, shape, boxes, flat=True)

    # ---- external data ----

    def _external_place(self, name: str, tensor: TensorProto, nbytes: int) -> tuple[WeightFile, ByteSpan]:
        """Return the file of external data and the place of a tensor in it."""
        location = _location(tensor)
        if location in self._missing:
            raise UnsupportedError(self._missing[location])
        file = self._external.get(location) or self._open(location, name, tensor)
        begin = self._number(tensor, "offset", name) or 0
        length = self._number(tensor, "length", name)
        if length is not None and length != nbytes:
            text = f": {list(tensor.dims)} needs {nbytes} bytes, but external_data says length {length}"
            raise self._fault(text, name, tensor)
        if begin + nbytes > file.size:
            text = f": needs bytes {begin} to {begin + nbytes} of {show(location)}, which has {file.size}"
            raise self._fault(text, name, tensor)
        return file, ByteSpan(begin, begin + nbytes)

    def _number(self, tensor: TensorProto, key: str, name: str) -> int | None:
        text = tensor.external.get(key)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise self._fault(f": {key} in external_data must be a number, got {show(text)}", name, tensor)
        return int(text)

    def _open(self, location: str, name: str, tensor: TensorProto) -> WeightFile:
        """Open a file of external data, which must be in the model's folder or below."""
        path = place_beside(self._file, location)
        if path is None:
            text = f": its location must be a file in the model's folder, got {show(location)}"
            raise self._fault(text, name, tensor)
        if len(self._external) + len(self._missing) == MAX_FILES:
            raise self._fault(f": external data in more than {MAX_FILES:,} files", name, tensor)
        try:
            file = open_without_table(path, files=self._file.files)
        except FileNotFoundError as error:
            self._missing[location] = f"is stored in {error.filename}, which is missing: was the download finished?"
            raise UnsupportedError(self._missing[location]) from None
        except IsADirectoryError:
            raise self._fault(f": its location {show(location)} is a folder", name, tensor) from None
        self._external[location] = file
        return file

    def _fault(self, text: str, name: str, tensor: TensorProto) -> FormatError:
        return error_about(FormatError, text, path=self._file.path, offset=tensor.at, tensor=name)


def _location(tensor: TensorProto) -> str:
    return tensor.external.get("location", "").removeprefix("./")


# ---- elements that are decoded when they are read ----


class Varints:
    """Elements as varints, or as bytes that are stored as varints."""

    def __init__(
        self, file: WeightFile, pieces: Sequence[ByteSpan], type_: ElementType, count: int, *, varints: bool = False
    ) -> None:
        self._file = file
        self._pieces = pieces
        self._type = type_
        self._count = count
        self._varints = varints

    def region(self) -> Region | None:
        return None

    def unpack(self) -> Array:
        """Return the elements as bytes."""
        if not self._varints:
            return self._bytes()
        type_ = self._type
        try:
            values = decode_varints(self._bytes(), type_.field)
            expected = type_.numbers(self._count)
            if len(values) != expected:
                raise FormatError(f"{type_.field} has {len(values)} numbers, expected {expected}")
        except FormatError as error:
            raise FormatError(error.args[0], self._file.path, self._pieces[0].begin) from None
        if type_.bits == 6:
            bits = np.unpackbits(values.astype(np.uint8)[:, None], axis=1, bitorder="little")[:, :6]
            return np.packbits(bits, bitorder="little")
        return values.astype(f"<u{max(1, type_.bits // 8)}").view(np.uint8)

    def _bytes(self) -> Array:
        data = np.empty(sum(piece.end - piece.begin for piece in self._pieces), np.uint8)
        at = 0
        for begin, end in self._pieces:
            self._file.store.read_into(begin, data[at : at + end - begin])
            at += end - begin
        return data


class SmallIntegers(Varints):
    """Integers of 4 or 2 bits, several in a byte."""

    def unpack(self) -> Array:
        """Return each element in a byte of its own."""
        data, bits = super().unpack(), self._type.bits
        elements = np.stack([data >> shift for shift in range(0, 8, bits)], axis=1).reshape(-1)[: self._count]
        elements &= (1 << bits) - 1
        if self._type.code == "I8":
            elements = (elements << (8 - bits)).view(np.int8) >> (8 - bits)
        return elements.view(np.uint8)
