"""ONNX models: their initializers as tensors.

1. ``raw_data`` holds the elements as bytes: little-endian, in C order. Elements of 4 and 2 bits fill each byte from the
   low bits on; those of 6 bits are 4 in 3 bytes.
2. Without it, ``float_data`` and ``double_data`` hold floats and complex numbers as they are. ``int32_data`` holds
   varints: smaller integers, bools, the bit patterns of float16, bfloat16, float8 and float6, and the bytes of elements
   of 4 and 2 bits. ``int64_data`` and ``uint64_data`` hold int64, and uint32 and uint64, as varints. Each is a single
   field: onnx packs them, in every release.
3. With ``data_location`` 1 the elements are in another file: ``external_data`` has its ``location`` relative to the
   model's folder, ``offset`` and ``length`` in bytes as text. ``checksum`` is not compared.

Opening reads names, shapes and places only. Bytes that are stored as they are become views; varints, 4-bit and 2-bit
integers are decoded when they are read, the latter to int8 and uint8, as NumPy has no smaller integers.

A model is protocol buffers:

1. ModelProto: 1 ir_version, 2 producer_name, 3 producer_version, 4 domain, 5 model_version, 6 doc_string, 7 graph,
   8 opset_import (1 domain, 2 version), 14 metadata_props (1 key, 2 value), 20 training_info (1 initialization and
   2 algorithm, graphs), 25 functions (1 name, 7 node, 10 domain, 13 overload).
2. GraphProto: 1 node, 2 name, 5 initializer, 15 sparse_initializer (1 values, 3 dims).
3. NodeProto: 2 output, 3 name, 4 op_type, 5 attribute. AttributeProto: 1 name, 5 t, 6 g, 11 graphs: an `If` or `Loop`
   has graphs of its own, with initializers.
4. TensorProto: 1 dims, 2 data_type, 3 segment, 4 float_data, 5 int32_data, 6 string_data, 7 int64_data, 8 name,
   9 raw_data, 10 double_data, 11 uint64_data, 13 external_data (1 key, 2 value), 14 data_location.

https://github.com/onnx/onnx/blob/main/onnx/onnx.proto

Fields of a message are stored in sequence:

1. A field begins with a varint: its number times 8, plus its wire type.
2. Type 0 is a varint: 7 bits in each byte, the lowest first; the top bit says that more follow. At most 10 bytes.
3. Type 1 is 8 bytes, type 5 is 4 bytes, little-endian.
4. Type 2 is a varint and as many bytes: text, bytes, a message, or a sequence of numbers ("packed").
5. Types 3 and 4, groups, are refused: nothing has written them for many years.
6. Fields may come in any order, and repeatedly; unknown numbers are skipped.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core import dtypes
from ..core.arrays import Array, array_fits
from ..core.registry import MAX_RANK, Candidate, Content, OpenRequest, place_beside
from ..core.table import ListedTable, Listing, Unknown, unreadable
from ..core.text import error_about, plural, show
from ..core.weight_file import ByteReader, WeightFile, open_without_table
from ..errors import FormatError, TensorNotFoundError, UnsupportedError
from .boxed import BoxedListing, boxed_file, in_one_box

# Maximum number of fields of a file; a graph of 100,000 nodes has about 2 million.
MAX_FIELDS = 20_000_000
# Bytes of all text that is kept.
MAX_TEXT = 64 << 20
# Longest varint, in bytes.
MAX_VARINT = 10

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
# Bytes of a field after its tag, or after its varint.
SIZES = {VARINT: 0, EIGHT: 8, BYTES: 0, FOUR: 4}

# Bytes of a message to parse at a time: nodes are smaller.
_BLOCK = 4096


class Field(NamedTuple):
    """A field of a message."""

    number: int
    wire: int  # the wire type
    value: int  # of a varint; bytes of a content
    begin: int  # first byte of the content
    end: int  # after the last byte


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and its end, which is 0 if the varint is cut off or too long."""
    value = shift = 0
    for k, byte in enumerate(data[at : at + MAX_VARINT], at):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, k + 1
        shift += 7
    return 0, 0


# Graphs in attributes of nodes of graphs; real models have two levels.
MAX_DEPTH = 32
# Maximum number of tensors; the largest real models have some ten thousand.
MAX_TENSORS = 1_000_000
# Attributes of a node, and graphs in an attribute; real nodes have some ten.
MAX_ATTRIBUTES = 10_000
# Entries of external_data: location, offset, length, checksum and a few more.
MAX_EXTERNAL = 64

# Fields with numbers: their names, and their wire type if they are not packed.
_DATA_FIELDS = {
    4: ("float_data", FOUR),
    5: ("int32_data", VARINT),
    7: ("int64_data", VARINT),
    10: ("double_data", EIGHT),
    11: ("uint64_data", VARINT),
}


_NOTHING: Mapping[str, Any] = MappingProxyType({})  # shared by tensors: a file can have a million


ByteSpan: TypeAlias = tuple[int, int]  # the first byte of numbers in the file, and the end after the last


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

    @property
    def small(self) -> bool:
        """True for integers of 4 or 2 bits, several in a byte, which are opened as int8 and uint8."""
        return self.bits < 8 and self.code in ("I8", "U8")

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


@dataclasses.dataclass(slots=True)
class TensorProto:
    """A tensor as the file describes it."""

    at: int  # first byte
    name: str = ""
    dims: tuple[int, ...] = ()
    data_type: int = 0
    location: int = 0  # 1 if the elements are in another file
    raw: ByteSpan | None = None
    numbers: Mapping[str, ByteSpan] = dataclasses.field(default_factory=lambda: _NOTHING)  # by name of the field
    external: Mapping[str, str] = dataclasses.field(default_factory=lambda: _NOTHING)
    sparse: bool = False
    segment: bool = False
    strings: bool = False
    divided: bool = False  # numbers are not packed into a single field

    @property
    def file(self) -> str:
        """The file of external data, relative to the model's folder."""
        return self.external.get("location", "").removeprefix("./")


class OnnxModel(ByteReader):
    """The content of a file."""

    def __init__(self, file: WeightFile) -> None:
        super().__init__(file)
        self.initializers: dict[str, TensorProto] = {}
        self.constants: dict[str, TensorProto] = {}  # tensors of Constant nodes, by the name of their output
        self.metadata: dict[str, Any] = {}
        self.listings: dict[WeightFile, list[Listing]] = {file: []}
        self.boxed: dict[str, BoxedListing] = {}
        self.external: dict[str, WeightFile] = {}  # files of external data
        self._missing: dict[str, str] = {}  # why a file of external data cannot be opened
        self._fields = self._text = 0
        self._read()

    def _read(self) -> None:
        texts = {2: "producer_name", 3: "producer_version", 4: "domain", 6: "doc_string"}
        graphs = trainings = 0
        for field in self.fields(Field(0, BYTES, 0, 0, self.file.size), "an ONNX model"):
            if field.number in texts:
                self.metadata[texts[field.number]] = self.text(field, texts[field.number])
            elif field.number in (1, 5) and field.wire == VARINT:
                self.metadata["ir_version" if field.number == 1 else "model_version"] = _signed(field.value)
            elif field.number == 7:
                self._graph(field, "", 0)
                graphs += 1
            elif field.number == 8:
                domain, version = self._pair(field, "an opset_import")
                self.metadata.setdefault("opset_import", {})[domain or ""] = version
            elif field.number == 14:
                key, value = self._pair(field, "an entry of metadata_props")
                self.metadata.setdefault("metadata_props", {})[str(key or "")] = str(value or "")
            elif field.number == 20:
                for graph in self.fields(field, "a training_info"):
                    if graph.number in (1, 2):
                        kind = "initialization" if graph.number == 1 else "algorithm"
                        self._graph(graph, f"training_info.{trainings}.{kind}.", 0)
                trainings += 1
            elif field.number == 25:
                self._function(field)
        if not graphs:
            raise self.fault("the model has no graph; is this an ONNX model?", 0)

    # ---- fields ----

    def fields(self, field: Field, message: str) -> Iterator[Field]:
        """Iterate over the fields of a message in a field; the caller may read elsewhere in between."""
        if field.wire != BYTES:
            raise self.fault(f"{message} must be a message, got wire type {field.wire}", field.begin)
        at, end = field.begin, field.end
        while at < end:
            self.position = at
            data = self.peek(min(_BLOCK, end - at))
            low, rest = 0, end - at
            while low < len(data):
                tag, first = data[low], low + 1  # most numbers have one byte
                if tag >= 0x80:
                    tag, first = varint(data, low)
                wire, value, begin = tag & 7, 0, first
                if first and wire in (BYTES, VARINT):
                    value, first = varint(data, first)
                    begin = first if wire == BYTES else begin
                if not first and len(data) < rest and low:
                    break  # the field continues beyond the block
                number = tag >> 3
                if not first:
                    self.position = at + low
                    raise self.fault(f"a number in {message} is cut off, or has more than {MAX_VARINT} bytes")
                if not 0 < number < 1 << 29:
                    raise self.fault(f"a field of {message} has the number {number}", at + low)
                if wire not in SIZES:
                    text = f"field {number} of {message} has the wire type {wire}, which is not in use"
                    raise self.fault(text, at + low)
                stop = first + (value if wire == BYTES else SIZES[wire])
                if stop > rest:
                    needs = f"needs {stop - first} bytes, but {rest - first} are left"
                    raise self.fault(f"field {number} of {message} {needs}", at + low)
                self._fields += 1
                if self._fields > MAX_FIELDS:
                    raise self.limit(f"the file has more than {MAX_FIELDS:,} fields", at + low)
                yield Field(number, wire, value, at + begin, at + stop)
                low = stop
            at += low

    def text(self, field: Field, what: str) -> str:
        if field.wire != BYTES:
            raise self.fault(f"{what} must be text, got wire type {field.wire}", field.begin)
        self._text += field.end - field.begin
        if self._text > MAX_TEXT:
            raise self.limit(f"names and metadata have more than {MAX_TEXT:,} bytes", field.begin)
        self.position = field.begin
        return self.take_text(field.end - field.begin, what)

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
            value, at = varint(data, at)
            if not at:
                raise self.fault(f"a number in {what} is cut off, or has more than {MAX_VARINT} bytes", field.begin)
            numbers.append(value)
        if len(numbers) > most:
            raise self.fault(f"{what} has more than {most} numbers", field.begin)
        return numbers

    def _pair(self, message: Field, what: str) -> tuple[Any, Any]:
        """Return fields 1 and 2 of a message: text, or numbers."""
        pair: dict[int, Any] = {}
        for field in self.fields(message, what):
            if field.number in (1, 2):
                number = field.wire == VARINT
                pair[field.number] = _signed(field.value) if number else self.text(field, f"a text in {what}")
        return pair.get(1), pair.get(2)

    # ---- graphs ----

    def _function(self, message: Field) -> None:
        """Walk the nodes of a function, whose attributes can have graphs."""
        texts = {1: "", 10: "", 13: ""}
        for field in self.fields(message, "a function"):
            if field.number in texts:
                texts[field.number] = self.text(field, "the name of a function")
        prefix = "".join(f"{texts[number]}." for number in (10, 1, 13) if texts[number])
        for k, node in enumerate(field for field in self.fields(message, "a function") if field.number == 7):
            self._node(node, k, prefix, 0)

    def _graph(self, message: Field, prefix: str, depth: int) -> None:
        """List the initializers of a graph; ``prefix`` begins their names, and is empty for the model's graph."""
        if depth > MAX_DEPTH:
            raise self.limit(f"graphs are nested more than {MAX_DEPTH} levels deep", message.begin)
        nodes = 0
        for field in self.fields(message, "a graph"):
            if field.number in (5, 15):
                tensor = self._tensor(field, "an initializer") if field.number == 5 else self._sparse(field)
                if not tensor.name:
                    raise self.fault("an initializer has no name", field.begin)
                self._add(self.initializers, f"{prefix}{tensor.name}", tensor)
            elif field.number == 1:
                self._node(field, nodes, prefix, depth)
                nodes += 1
            elif field.number == 2 and not prefix:
                self.metadata["graph_name"] = self.text(field, "the name of a graph")

    def _add(self, tensors: dict[str, TensorProto], name: str, tensor: TensorProto) -> None:
        if name in tensors:
            raise self.fault(f"two tensors are named {show(name)}", tensor.at)
        if len(tensors) == MAX_TENSORS:
            raise self.limit(f"the model has more than {MAX_TENSORS:,} tensors", tensor.at)
        tensor.name = name
        tensors[name] = tensor

    def _node(self, message: Field, number: int, prefix: str, depth: int) -> None:
        """Walk the attributes of a node, if any has a tensor or a graph."""
        texts = {2: "", 3: "", 4: ""}
        attributes = []
        for field in self.fields(message, "a node"):
            if field.number == 5:
                attributes.append(field)
                self._check_count(len(attributes), "attributes in a node", field)
            elif field.number in (3, 4) or (field.number == 2 and not texts[2]):
                texts[field.number] = self.text(field, "a name in a node")
        for attribute in attributes:
            name, tensor = "", None
            graphs: list[Field] = []
            for field in self.fields(attribute, "an attribute"):
                if field.number == 1:
                    name = self.text(field, "the name of an attribute")
                elif field.number == 5:
                    tensor = field
                elif field.number in (6, 11):
                    graphs.append(field)
                    self._check_count(len(graphs), "graphs in an attribute", field)
            if tensor is not None and texts[4] == "Constant" and name == "value" and texts[2]:
                self._add(self.constants, f"{prefix}{texts[2]}", self._tensor(tensor, "the value of a Constant"))
            for k, graph in enumerate(graphs):
                inner = f"{prefix}{texts[3] or texts[2] or number}.{name}."
                self._graph(graph, f"{inner}{k}." if len(graphs) > 1 else inner, depth + 1)

    # ---- tensors ----

    def _tensor(self, message: Field, what: str) -> TensorProto:
        """Parse a tensor and skip its elements."""
        tensor = TensorProto(message.begin)
        for field in self.fields(message, what):
            number = field.number
            if number == 1:
                self._add_dims(tensor, field)
            elif number in (2, 14) and field.wire == VARINT:
                setattr(tensor, "data_type" if number == 2 else "location", field.value)
            elif number == 8:
                tensor.name = self.text(field, "the name of a tensor")
            elif number == 9:
                if field.wire != BYTES:
                    raise self.fault(f"raw_data must be bytes, got wire type {field.wire}", field.begin)
                tensor.raw = (field.begin, field.end)
            elif number in _DATA_FIELDS:
                name, wire = _DATA_FIELDS[number]
                if field.wire not in (BYTES, wire):
                    raise self.fault(f"{name} must be numbers, got wire type {field.wire}", field.begin)
                tensor.divided |= field.wire != BYTES or name in tensor.numbers
                if field.begin < field.end:
                    tensor.numbers = {**tensor.numbers, name: (field.begin, field.end)}
            elif number == 13:
                key, value = self._pair(field, "an entry of external_data")
                tensor.external = {**tensor.external, str(key or ""): str(value or "")}
                if len(tensor.external) > MAX_EXTERNAL:
                    raise self.fault(f"external_data has more than {MAX_EXTERNAL} entries", field.begin)
            elif number in (3, 6):
                tensor.segment |= number == 3
                tensor.strings |= number == 6
        return tensor

    def _sparse(self, message: Field) -> TensorProto:
        """Parse a sparse tensor: its values have its name and type."""
        tensor = TensorProto(message.begin, sparse=True)
        for field in self.fields(message, "a sparse initializer"):
            if field.number == 1:
                values = self._tensor(field, "the values of a sparse initializer")
                tensor.name, tensor.data_type = values.name, values.data_type
            elif field.number == 3:
                self._add_dims(tensor, field)
        return tensor

    def _add_dims(self, tensor: TensorProto, field: Field) -> None:
        tensor.dims += tuple(self.varints(field, "dims", MAX_RANK))
        if len(tensor.dims) > MAX_RANK:
            raise self.fault(f"a tensor of more than {MAX_RANK} axes, the most that NumPy has", field.begin)

    def _check_count(self, count: int, what: str, field: Field) -> None:
        if count > MAX_ATTRIBUTES:
            raise self.limit(f"more than {MAX_ATTRIBUTES:,} {what}", field.begin)

    # ---- the elements of tensors ----

    def place(self, tensor: TensorProto) -> None:
        """Check a tensor against its elements and list it."""
        type_ = TYPES.get(tensor.data_type)
        file, listing = self.file, None
        try:
            if type_ is None or not type_.code or tensor.strings:
                raise UnsupportedError("is not a dtype of weights")
            if tensor.sparse:
                raise UnsupportedError("is sparse, which safeload does not read")
            file, listing = self._listed(tensor, type_)
        except UnsupportedError as error:
            label = f"data type {tensor.data_type}" if type_ is None else type_.name
            kind = type_ is None or bool(type_.code), tensor.file in self._missing
            listing = unreadable(tensor.name, Unknown(label, tensor.dims, str(error), *kind))
        if isinstance(listing, Listing):
            self.listings.setdefault(file, []).append(listing)
        else:
            self.boxed[tensor.name] = listing

    def _listed(self, tensor: TensorProto, type_: ElementType) -> tuple[WeightFile, Listing | BoxedListing]:
        """Return the file and the place of a tensor."""
        row, shape = dtypes.BY_CODE[type_.code], tensor.dims
        if not array_fits(shape, max(1, type_.bits // 8)):
            raise self.fault(f": no array can have the shape {show(list(shape))}", tensor.at, tensor.name)
        count = prod(shape)
        if row.packed and count % row.block:
            raise UnsupportedError(f"has {count} elements of {row.bits} bits, which end inside a byte")
        nbytes = -(-count * type_.bits // 8)
        if tensor.segment or tensor.divided:
            raise UnsupportedError(f"is {'a segment of a tensor' if tensor.segment else 'stored in several fields'}")
        if tensor.location not in (0, 1):
            raise self.fault(f": data_location is {tensor.location}, expected 0 or 1", tensor.at, tensor.name)
        file, place = self.file, tensor.raw
        if tensor.location == 1:
            if tensor.raw is not None or tensor.numbers:
                raise self.fault(" has elements both in the model and in another file", tensor.at, tensor.name)
            file, place = self._external_place(tensor, nbytes)
        elif tensor.raw is not None and tensor.numbers:
            raise self.fault(f" has raw_data and {', '.join(tensor.numbers)}", tensor.at, tensor.name)
        if place is None and count:
            return file, self._of_numbers(tensor, type_, count)
        begin, end = place or (0, 0)
        if end - begin != nbytes:
            text = f": {type_.name} {list(shape)} needs {nbytes} bytes, but raw_data has {end - begin}"
            raise self.fault(text, tensor.at, tensor.name)
        if type_.small and count:
            return file, in_one_box(row, shape, partial(_unpacked, file, (begin, end), type_, count, varints=False))
        return file, Listing(tensor.name, row, shape, begin, end)

    def _of_numbers(self, tensor: TensorProto, type_: ElementType, count: int) -> Listing | BoxedListing:
        """Return a tensor with its elements in the field of its type."""
        file, row, shape = self.file, dtypes.BY_CODE[type_.code], tensor.dims
        fault = partial(self.fault, position=tensor.at, tensor=tensor.name)
        if tensor.numbers.keys() - {type_.field}:
            raise fault(f": {type_.name} has its elements in {type_.field}, got {', '.join(tensor.numbers)}")
        begin, end = place = tensor.numbers.get(type_.field, (0, 0))
        stored = end - begin
        if type_.field in ("float_data", "double_data"):
            if stored != (nbytes := row.nbytes(count)):
                raise fault(f": {type_.name} {list(shape)} needs {nbytes} bytes, but {type_.field} has {stored}")
            return Listing(tensor.name, row, shape, begin, end)
        numbers = type_.numbers(count)
        if not numbers <= stored <= 10 * numbers:
            raise fault(f": {type_.name} {list(shape)} needs {numbers} numbers, but {type_.field} has {stored} bytes")
        if row.packed and (not shape or shape[-1] % row.block):
            raise UnsupportedError(f"{list(shape)} is stored as numbers, and its rows end inside a byte")
        if row.packed:
            shape = (*shape[:-1], row.nbytes(shape[-1]))
        return in_one_box(row, shape, partial(_unpacked, file, place, type_, count, varints=True))

    # ---- external data ----

    def _external_place(self, tensor: TensorProto, nbytes: int) -> tuple[WeightFile, ByteSpan]:
        """Return the file of external data and the place of a tensor in it."""
        location = tensor.file
        if location in self._missing:
            raise UnsupportedError(self._missing[location])
        file = self.external.get(location) or self._open(location, tensor)
        begin, length = self._number(tensor, "offset") or 0, self._number(tensor, "length")
        fault = partial(self.fault, position=tensor.at, tensor=tensor.name)
        if length is not None and length != nbytes:
            raise fault(f": {list(tensor.dims)} needs {nbytes} bytes, but external_data says length {length}")
        if begin + nbytes > file.size:
            raise fault(f": needs bytes {begin} to {begin + nbytes} of {show(location)}, which has {file.size}")
        return file, (begin, begin + nbytes)

    def _number(self, tensor: TensorProto, key: str) -> int | None:
        text = tensor.external.get(key)
        if text is not None and not (text.isascii() and text.isdigit() and len(text) < 20):
            raise self.fault(f": {key} in external_data must be a number, got {show(text)}", tensor.at, tensor.name)
        return None if text is None else int(text)

    def _open(self, location: str, tensor: TensorProto) -> WeightFile:
        """Open a file of external data, which must be in the model's folder or below."""
        path = place_beside(self.file, location)
        if path is None:
            text = f": its location must be a file in the model's folder, got {show(location)}"
            raise self.fault(text, tensor.at, tensor.name)
        if len(self.external) + len(self._missing) == MAX_FILES:
            raise self.fault(f": external data in more than {MAX_FILES:,} files", tensor.at, tensor.name)
        try:
            file = self.external[location] = open_without_table(path, files=self.file.files)
        except FileNotFoundError as error:
            self._missing[location] = f"is stored in {error.filename}, which is missing: was the download finished?"
            raise UnsupportedError(self._missing[location]) from None
        except IsADirectoryError:
            raise self.fault(f": its location {show(location)} is a folder", tensor.at, tensor.name) from None
        return file


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of a model, and open its files of external data."""
    file = candidate.file
    model = OnnxModel(file)
    if request.root not in (None, CONSTANTS):
        text = f"no container {show(request.root)}; an ONNX model has {show(CONSTANTS)}, the tensors of Constant nodes"
        raise error_about(TensorNotFoundError, text, path=file.path)
    tensors = model.constants if request.root or not model.initializers else model.initializers
    notes = []
    if tensors is model.initializers and model.constants:
        count = plural(len(model.constants), "tensor")
        notes.append(f'Constant nodes hold {count} that are not opened: pass root="{CONSTANTS}" for these instead')
    try:
        for tensor in tensors.values():
            model.place(tensor)
        for holder, listings in model.listings.items():
            holder.table = ListedTable(listings, model.metadata if holder is file else None)
        files = list(model.external.values())
        for holder in files:
            holder.stand_for(file, unpacked=False)
        if model.boxed:
            files.append(boxed_file(file, model.boxed, [file.store, *(holder.store for holder in files)]))
        return Content(file, files, list(tensors) if files else (), notes)
    except BaseException:
        for holder in model.external.values():
            holder.close()
        raise


# ---- elements that are decoded when they are read ----


def _unpacked(file: WeightFile, place: ByteSpan, type_: ElementType, count: int, *, varints: bool) -> Array:
    """Return elements as bytes: each small integer in a byte of its own."""
    begin, end = place
    data: Array = np.empty(end - begin, np.uint8)
    file.store.read_into(begin, data)
    if varints:
        ends = np.flatnonzero(data < 0x80)
        begins = np.concatenate([np.zeros(min(1, len(ends)), np.intp), ends[:-1] + 1])
        sizes = ends - begins + 1
        longest, expected = int(sizes.max(initial=0)), type_.numbers(count)
        text = ""
        if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
            text = ": the last number is cut off"
        elif longest > MAX_VARINT:
            text = f": a number has {longest} bytes, the limit is {MAX_VARINT}"
        elif len(ends) != expected:
            text = f" has {len(ends)} numbers, expected {expected}"
        if text:
            raise FormatError(f"{type_.field}{text}", file.path, begin)
        values = np.zeros(len(ends), np.uint64)
        for k in range(longest):
            which = np.flatnonzero(sizes > k)
            values[which] |= (data[begins[which] + k] & 0x7F).astype(np.uint64) << np.uint64(7 * k)
        if type_.bits == 6:
            bits = np.unpackbits(values.astype(np.uint8)[:, None], axis=1, bitorder="little")[:, :6]
            return np.packbits(bits, bitorder="little")
        data = values.astype(f"<u{max(1, type_.bits // 8)}").view(np.uint8)
    if not type_.small:
        return data
    elements = np.stack([data >> shift for shift in range(0, 8, type_.bits)], axis=1).reshape(-1)[:count]
    elements &= (1 << type_.bits) - 1
    if type_.code == "I8":
        elements = (elements << (8 - type_.bits)).view(np.int8) >> (8 - type_.bits)
    return elements.view(np.uint8)
