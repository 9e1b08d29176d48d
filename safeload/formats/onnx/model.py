"""Walk an ONNX model and list its tensors; wire.py reads the fields.

1. ModelProto: 1 ir_version, 2 producer_name, 3 producer_version, 4 domain, 5 model_version, 6 doc_string, 7 graph,
   8 opset_import (1 domain, 2 version), 14 metadata_props (1 key, 2 value), 20 training_info (1 initialization and
   2 algorithm, graphs), 25 functions (1 name, 7 node, 10 domain,
   13 overload).
2. GraphProto: 1 node, 2 name, 5 initializer, 15 sparse_initializer (1 values).
3. NodeProto: 2 output, 3 name, 4 op_type, 5 attribute. AttributeProto: 1 name, 5 t, 6 g, 11 graphs: an `If` or `Loop`
   has graphs of its own, with initializers.
4. TensorProto: 1 dims, 2 data_type, 3 segment, 4 float_data, 5 int32_data, 6 string_data, 7 int64_data, 8 name,
   9 raw_data, 10 double_data, 11 uint64_data, 13 external_data (1 key, 2 value), 14 data_location.

https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ...base.messages import error_about
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import LimitError, UnsupportedError
from .wire import BYTES, EIGHT, FOUR, VARINT, Field, WireReader

# Graphs in attributes of nodes of graphs; real models have two levels.
MAX_DEPTH = 32
# Maximum number of tensors; the largest real models have some ten thousand.
MAX_TENSORS = 1_000_000
# Axes of a tensor, as in numpy 2.
MAX_RANK = 64
# Fields with numbers of all tensors: one for each tensor if they are packed, as ONNX prescribes, else one for a number.
MAX_PIECES = 1 << 18
# Attributes of a node, and graphs in an attribute; real nodes have some ten.
MAX_ATTRIBUTES = 10_000
# Entries of external_data: location, offset, length, checksum and a few more.
MAX_EXTERNAL = 64

# Fields with numbers: their names, and their wire type if each number has a field of its own.
_DATA_FIELDS = {
    4: ("float_data", FOUR),
    5: ("int32_data", VARINT),
    7: ("int64_data", VARINT),
    10: ("double_data", EIGHT),
    11: ("uint64_data", VARINT),
}


_NOTHING: Mapping[str, Any] = MappingProxyType({})  # shared by tensors: a file can have a million


class ByteSpan(NamedTuple):
    """Bytes of numbers in the file."""

    begin: int
    end: int


class TensorProto:
    """A tensor as the file describes it."""

    __slots__ = ("at", "data_type", "dims", "external", "location", "name", "pieces", "raw", "segment", "strings")

    def __init__(self, at: int) -> None:
        self.at = at  # first byte
        self.name = ""
        self.dims: tuple[int, ...] = ()
        self.data_type = 0
        self.location = 0  # 1 if the elements are in another file
        self.raw: ByteSpan | None = None
        self.pieces: Mapping[str, list[ByteSpan]] = _NOTHING  # by name of the field
        self.external: Mapping[str, str] = _NOTHING
        self.segment = self.strings = False


class OnnxModel(NamedTuple):
    """The content of a file."""

    initializers: dict[str, TensorProto]
    constants: dict[str, TensorProto]  # tensors of Constant nodes, by the name of their output
    metadata: dict[str, Any]


class ModelReader:
    """Walks a model."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._reader = WireReader(file)
        self._initializers: dict[str, TensorProto] = {}
        self._constants: dict[str, TensorProto] = {}
        self._pieces = 0
        self._metadata: dict[str, Any] = {}

    def read(self) -> OnnxModel:
        """Return the tensors and the metadata of the model."""
        reader, texts = self._reader, {2: "producer_name", 3: "producer_version", 4: "domain", 6: "doc_string"}
        graphs = trainings = 0
        for field in reader.fields(0, self._file.size, "an ONNX model"):
            if field.number in texts:
                self._metadata[texts[field.number]] = reader.text(field, texts[field.number])
            elif field.number in (1, 5) and field.wire == VARINT:
                self._metadata["ir_version" if field.number == 1 else "model_version"] = _signed(field.value)
            elif field.number == 7:
                self._graph(field, "", 0)
                graphs += 1
            elif field.number == 8:
                domain, version = self._pair(field, "an opset_import")
                self._metadata.setdefault("opset_import", {})[domain or ""] = version
            elif field.number == 14:
                key, value = self._pair(field, "an entry of metadata_props")
                self._metadata.setdefault("metadata_props", {})[str(key or "")] = str(value or "")
            elif field.number == 20:
                self._training(field, f"training_info.{trainings}.")
                trainings += 1
            elif field.number == 25:
                self._function(field)
        if not graphs:
            raise reader.fault("the model has no graph; is this an ONNX model?", 0)
        return OnnxModel(self._initializers, self._constants, self._metadata)

    def _pair(self, message: Field, what: str) -> tuple[Any, Any]:
        """Return fields 1 and 2 of a message: text, or numbers."""
        pair: dict[int, Any] = {}
        for field in self._messages(message, what):
            if field.number in (1, 2):
                pair[field.number] = (
                    _signed(field.value) if field.wire == VARINT else self._reader.text(field, f"a text in {what}")
                )
        return pair.get(1), pair.get(2)

    def _messages(self, field: Field, what: str) -> Any:
        """Iterate over the fields of a message in a field."""
        if field.wire != BYTES:
            raise self._reader.fault(f"{what} must be a message, got wire type {field.wire}", field.begin)
        return self._reader.fields(field.begin, field.end, what)

    # ---- graphs ----

    def _training(self, message: Field, prefix: str) -> None:
        for field in self._messages(message, "a training_info"):
            if field.number in (1, 2):
                self._graph(field, f"{prefix}{'initialization' if field.number == 1 else 'algorithm'}.", 0)

    def _function(self, message: Field) -> None:
        """Walk the nodes of a function, whose attributes can have graphs."""
        texts = {1: "", 10: "", 13: ""}
        for field in self._messages(message, "a function"):
            if field.number in texts:
                texts[field.number] = self._reader.text(field, "the name of a function")
        prefix = "".join(f"{texts[number]}." for number in (10, 1, 13) if texts[number])
        nodes = (field for field in self._messages(message, "a function") if field.number == 7)
        for k, node in enumerate(nodes):
            self._node(node, k, prefix, 0)

    def _graph(self, message: Field, prefix: str, depth: int) -> None:
        """List the initializers of a graph; ``prefix`` begins their names, and is empty for the model's graph."""
        if depth > MAX_DEPTH:
            text = f"graphs are nested more than {MAX_DEPTH} levels deep"
            raise error_about(LimitError, text, path=self._file.path, offset=message.begin)
        nodes = 0
        for field in self._messages(message, "a graph"):
            if field.number == 5:
                tensor = self._tensor(field, "an initializer")
                if not tensor.name:
                    raise self._reader.fault("an initializer has no name", field.begin)
                self._add(self._initializers, f"{prefix}{tensor.name}", tensor)
            elif field.number == 15:
                self._refuse_sparse(field, prefix)
            elif field.number == 1:
                self._node(field, nodes, prefix, depth)
                nodes += 1
            elif field.number == 2 and not prefix:
                self._metadata["graph_name"] = self._reader.text(field, "the name of a graph")

    def _add(self, tensors: dict[str, TensorProto], name: str, tensor: TensorProto) -> None:
        if name in tensors:
            raise self._reader.fault(f"two tensors are named {show(name)}", tensor.at)
        if len(tensors) == MAX_TENSORS:
            text = f"the model has more than {MAX_TENSORS:,} tensors"
            raise error_about(LimitError, text, path=self._file.path, offset=tensor.at)
        tensors[name] = tensor

    def _refuse_sparse(self, message: Field, prefix: str) -> None:
        name = ""
        for field in self._messages(message, "a sparse initializer"):
            if field.number == 1:
                name = self._tensor(field, "the values of a sparse initializer").name
        text = "is sparse, which safeload does not read"
        name = f"{prefix}{name}"
        raise error_about(UnsupportedError, text, path=self._file.path, offset=message.begin, tensor=name)

    def _node(self, message: Field, number: int, prefix: str, depth: int) -> None:
        """Walk the attributes of a node, if any has a tensor or a graph."""
        texts = {2: "", 3: "", 4: ""}
        attributes = []
        for field in self._messages(message, "a node"):
            if field.number == 5:
                attributes.append(field)
                self._check_count(len(attributes), MAX_ATTRIBUTES, "attributes in a node", field)
            elif field.number in (3, 4) or (field.number == 2 and not texts[2]):
                texts[field.number] = self._reader.text(field, "a name in a node")
        for attribute in attributes:
            self._attribute(attribute, texts, lambda: f"{prefix}{texts[3] or texts[2] or number}.", prefix, depth)

    def _attribute(
        self, message: Field, texts: Mapping[int, str], inner: Callable[[], str], prefix: str, depth: int
    ) -> None:
        name, tensor = "", None
        graphs: list[Field] = []
        for field in self._messages(message, "an attribute"):
            if field.number == 1:
                name = self._reader.text(field, "the name of an attribute")
            elif field.number == 5:
                tensor = field
            elif field.number in (6, 11):
                graphs.append(field)
                self._check_count(len(graphs), MAX_ATTRIBUTES, "graphs in an attribute", field)
        if tensor is not None and texts[4] == "Constant" and name == "value" and texts[2]:
            self._add(self._constants, f"{prefix}{texts[2]}", self._tensor(tensor, "the value of a Constant"))
        for k, graph in enumerate(graphs):
            numbered = f"{k}." if len(graphs) > 1 else ""
            self._graph(graph, f"{inner()}{name}.{numbered}", depth + 1)

    # ---- tensors ----

    def _tensor(self, message: Field, what: str) -> TensorProto:
        """Parse a tensor and skip its elements."""
        tensor = TensorProto(message.begin)
        reader = self._reader
        for field in self._messages(message, what):
            number = field.number
            if number == 1:
                tensor.dims += tuple(reader.varints(field, "dims", MAX_RANK))
                if len(tensor.dims) > MAX_RANK:
                    raise reader.fault(f"a tensor of more than {MAX_RANK} axes, the most that NumPy has", field.begin)
            elif number in (2, 14) and field.wire == VARINT:
                setattr(tensor, "data_type" if number == 2 else "location", field.value)
            elif number == 8:
                tensor.name = reader.text(field, "the name of a tensor")
            elif number == 9:
                if field.wire != BYTES:
                    raise reader.fault(f"raw_data must be bytes, got wire type {field.wire}", field.begin)
                tensor.raw = ByteSpan(field.begin, field.end)
            elif number in _DATA_FIELDS:
                self._add_piece(tensor, *_DATA_FIELDS[number], field)
            elif number == 13:
                key, value = self._pair(field, "an entry of external_data")
                tensor.external = {**tensor.external, str(key or ""): str(value or "")}
                if len(tensor.external) > MAX_EXTERNAL:
                    raise reader.fault(f"external_data has more than {MAX_EXTERNAL} entries", field.begin)
            elif number in (3, 6):
                tensor.segment |= number == 3
                tensor.strings |= number == 6
        return tensor

    def _add_piece(self, tensor: TensorProto, name: str, wire: int, field: Field) -> None:
        if field.wire not in (BYTES, wire):
            raise self._reader.fault(f"{name} must be numbers, got wire type {field.wire}", field.begin)
        if not tensor.pieces:
            tensor.pieces = {}
        pieces = tensor.pieces.setdefault(name, [])  # type: ignore[attr-defined]
        if field.begin < field.end:
            pieces.append(ByteSpan(field.begin, field.end))
            self._pieces += 1
        self._check_count(self._pieces, MAX_PIECES, "fields with numbers, which ONNX packs into one a tensor", field)

    def _check_count(self, count: int, limit: int, what: str, field: Field) -> None:
        if count > limit:
            text = f"more than {limit:,} {what}"
            raise error_about(LimitError, text, path=self._file.path, offset=field.begin)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
