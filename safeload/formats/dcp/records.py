"""The pickle of ``.metadata``: which tensors exist, their chunks, and where each chunk is stored.

1. One object ``Metadata`` with the fields ``state_dict_metadata`` {name: TensorStorageMetadata or
   BytesStorageMetadata}, ``planner_data`` {name: path in the nested state dict} or None, ``storage_data``
   {MetadataIndex: _StorageInfo}, and in newer files ``storage_meta`` and ``version``.
2. TensorStorageMetadata: ``properties``, ``size``, ``chunks``, each with ``offsets`` and ``sizes``. The state of the
   properties is a tuple that begins with the dtype.
3. MetadataIndex: ``fqn`` (the name), ``offset`` (of the chunk; None for other values), ``index``.
4. _StorageInfo: ``relative_path``, ``offset``, ``length``, and in newer files ``transform_descriptors``.
5. Without collectives each process writes its own ``__<rank>.metadata`` with its own chunks of all tensors.
6. Megatron adds ``mcore_data``: {name: {"nd_reformulated_orig_global_shape": shape}} for tensors in other shapes, and
   ``all_local_plans``, the ``SavePlan`` of each process, which is not needed to read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...base import dtypes
from ...base.messages import error_about
from ...base.paths import is_bare
from ...base.table import Unknown
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, LimitError
from ..boxed import MAX_RANK
from ..torch.globals import ALLOWED, CONTAINER, DTYPE, VALUE
from ..torch.legacy_file import pickle_at
from ..torch.tensors import STAND_INS
from ..unpickle.machine import Built, Fault, Global, describe

_MODULE = "torch.distributed.checkpoint.metadata."
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata."
_PLANNER = "torch.distributed.checkpoint.planner."
_MCORE = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
METADATA, TENSOR, BYTES, CHUNK, PROPERTIES, INDEX = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    "MetadataIndex",
)
STORAGE_INFO = "_StorageInfo"
# Begins every ``.metadata``, in protocols 2 and 4.
MARK = b"torch.distributed.checkpoint.metadata"


class Record(Built):
    """An object of a dataclass: the name of its class and the state that the pickle sets."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = {}

    def build(self, state: Any) -> None:
        if type(state) not in (dict, tuple):
            raise Fault(f"the state of a {self.kind} must be a dict or a tuple, got {describe(state)}")
        self.state = state


def _record(kind: str, name: str) -> Global:
    def build(args: tuple[Any, ...]) -> Record:
        if args:
            raise Fault(f"{kind} takes no arguments, got {len(args)}")
        return Record(kind)

    return Global(name, CONTAINER, build)


def _text(args: tuple[Any, ...]) -> Any:
    """Make the text of a layout, or of a path from its parts."""
    if any(type(part) is not str for part in args):
        raise Fault("expected texts as arguments")
    return "/".join(args)


def _number(args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or type(args[0]) is not int:
        raise Fault("a member of an enumeration takes its number")
    return args[0]


RECORDS: dict[str, Global] = {
    row.name: row
    for row in (
        *(_record(kind, _MODULE + kind) for kind in (METADATA, TENSOR, BYTES, CHUNK, PROPERTIES, INDEX, "StorageMeta")),
        _record(PROPERTIES, _OLD_MODULE + PROPERTIES),
        _record(STORAGE_INFO, "torch.distributed.checkpoint.filesystem._StorageInfo"),
        _record(METADATA, _MCORE),
        *(_record(kind, _PLANNER + kind) for kind in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")),
        _record("_StoragePrefix", "torch.distributed.checkpoint.filesystem._StoragePrefix"),
        Global(_PLANNER + "WriteItemType", VALUE, _number),
        *(Global(module + "_MEM_FORMAT_ENCODING", VALUE, _number) for module in (_MODULE, _OLD_MODULE)),
        Global(_OLD_MODULE + "MEM_FORMAT_ENCODING", VALUE, _number),
        *(
            Global(f"{module}.{kind}", VALUE, _text, copies=True)
            for module in ("pathlib", "pathlib._local")
            for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        ),
    )
}
_TABLE = {**ALLOWED, **RECORDS}


class ChunkPlace(NamedTuple):
    """The place of a chunk or of another value."""

    file: str  # bare name
    offset: int  # first byte in the file
    length: int  # bytes, compressed if there are transforms
    transforms: tuple[str, ...] = ()  # in the order of reading


class TensorRecord(NamedTuple):
    """A tensor and its chunks."""

    row: dtypes.Dtype
    shape: tuple[int, ...]  # as torch counts: bytes on the last axis if elements share them
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], ChunkPlace]]  # offsets, sizes and place
    unknown: Unknown | None = None  # its dtype, if arrays lack it


class Description:
    """The content of one or several metadata files."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorRecord] = {}
        self.values: dict[str, ChunkPlace] = {}  # other values by name
        self.paths: dict[str, tuple[Any, ...]] = {}  # path of each name in the nested state dict
        self.reformulated: list[str] = []  # names of tensors that Megatron stores in another shape
        self.named_globals: dict[str, bool] = {}
        self._path, self._free = "", 0  # of the file that is read, and the chunks that its pickle can still hold

    def add(self, file: WeightFile, inert: bool) -> None:
        """Run the pickle of a metadata file, and add its records."""
        pickled = pickle_at(file, 0, None, inert, _TABLE)
        record, self._path, self._free = pickled.value, file.path, pickled.size
        if type(record) is not Record or record.kind != METADATA:
            raise FormatError(f"expected the Metadata of a checkpoint, got {describe(record)}", file.path, 0)
        self.named_globals |= dict.fromkeys(pickled.harmless, True) | dict.fromkeys(pickled.foreign, False)
        fields = self._fields(record, METADATA, "the checkpoint")
        names = self._dict(fields.get("state_dict_metadata"), "state_dict_metadata")
        places = self._places(self._dict(fields.get("storage_data"), "storage_data"))
        planned = fields.get("planner_data")
        paths = planned if type(planned) is dict else {}
        for name, about in names.items():
            if type(name) is not str:
                raise FormatError(f"a name must be text, got {describe(name)}", self._path)
            path = paths.get(name)
            if not isinstance(path, (tuple, list)) or any(type(step) not in (str, int) for step in path) or not path:
                path = (name,)
            self.paths[name] = tuple(path)
            if type(about) is Record and about.kind == BYTES:
                place = places.get((name, None))
                if place is None:
                    raise FormatError(f"value {show(name)} has no place in storage_data", self._path)
                self.values.setdefault(name, place)
            elif type(about) is Record and about.kind == TENSOR:
                self._add_tensor(name, self._fields(about, TENSOR, name), places, pickled.size)
            else:
                text = f"{show(name)} must be described as tensor or bytes, got {describe(about)}"
                raise FormatError(text, self._path)
        mcore = fields.get("mcore_data")
        for name, data in mcore.items() if type(mcore) is dict else ():
            if type(data) is dict and data.get("nd_reformulated_orig_global_shape") is not None and name in names:
                self.reformulated.append(name)

    def _places(self, storage: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], ChunkPlace]:
        places: dict[tuple[str, tuple[int, ...] | None], ChunkPlace] = {}
        for index, info in storage.items():
            key = self._fields(index, INDEX, "a key of storage_data")
            name, at = key.get("fqn"), key.get("offset")
            if type(name) is not str:
                raise FormatError(f"a key of storage_data must have a name, got {describe(name)}", self._path)
            if at is not None:
                at = self._integers(at, "the offset in storage_data", name)
            fields = self._fields(info, STORAGE_INFO, name)
            file, transforms = fields.get("relative_path"), fields.get("transform_descriptors")
            offset, length = self._integers((fields.get("offset"), fields.get("length")), "offset and length", name)
            if type(file) is not str or not is_bare(file):
                text = f"relative_path must be the bare name of a file in the folder, got {describe(file)}"
                raise self._fault(name, text)
            if transforms is None:
                transforms = ()
            if type(transforms) not in (list, tuple) or any(type(text) is not str for text in transforms):
                text = f"transform_descriptors must be a list of texts, got {describe(transforms)}"
                raise self._fault(name, text)
            places[name, at] = ChunkPlace(file, offset, length, tuple(transforms))
        return places

    def _add_tensor(
        self,
        name: str,
        fields: dict[Any, Any],
        places: dict[tuple[str, tuple[int, ...] | None], ChunkPlace],
        size: int,
    ) -> None:
        dtype = self._dtype(fields.get("properties"), name)
        row = dtypes.BY_CODE[dtype.code or STAND_INS[dtype.itemsize].code]  # type: ignore[index]
        shape = self._integers(fields.get("size"), "the size", name)
        unknown = None
        if dtype.code is None:
            unknown = Unknown(dtype.name.removeprefix("torch."), shape, "cannot be represented by an array")
        chunks = fields.get("chunks")
        if not isinstance(chunks, (list, tuple)):
            raise self._fault(name, f"chunks must be a list, got {describe(chunks)}")
        self._free -= len(chunks)
        if self._free < 0:  # each takes a byte of the pickle at least, unless tensors share a list
            text = f"with {show(name)} its tensors have more than {size:,} chunks"
            raise error_about(LimitError, text, path=self._path)
        record = self.tensors.setdefault(name, TensorRecord(row, shape, [], unknown))
        if (record.row, record.shape) != (row, shape):
            text = f"is {row.code} {list(shape)} here, but {record.row.code} {list(record.shape)} in another file"
            raise error_about(FormatError, text, path=self._path, tensor=name)
        for chunk in chunks:
            about = self._fields(chunk, CHUNK, name)
            offsets = self._integers(about.get("offsets"), "the offsets of a chunk", name)
            sizes = self._integers(about.get("sizes"), "the sizes of a chunk", name)
            place = places.get((name, offsets))
            if place is not None:
                record.chunks.append((offsets, sizes, place))
            elif 0 not in sizes:
                raise self._fault(name, f"the chunk at {list(offsets)} has no place in storage_data")

    def _dtype(self, properties: Any, name: str) -> Global:
        state = properties.state if type(properties) is Record and properties.kind == PROPERTIES else None
        dtype = state[0] if type(state) is tuple and state else None
        if type(state) is dict:
            dtype = state.get("dtype")
        if type(dtype) is not Global or dtype.kind != DTYPE:
            raise self._fault(name, f"its properties have no dtype of torch, got {describe(dtype)}")
        return dtype

    def _fields(self, record: Any, kind: str, subject: str) -> dict[Any, Any]:
        if type(record) is not Record or record.kind != kind or type(record.state) is not dict:
            what = record.kind if type(record) is Record else describe(record)
            raise FormatError(f"{show(subject)}: expected a {kind} with fields, got {what}", self._path)
        return record.state

    def _dict(self, value: Any, label: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise FormatError(f"{label} must be a dict, got {describe(value)}", self._path)
        return value

    def _integers(self, values: Any, label: str, name: str) -> tuple[int, ...]:
        if isinstance(values, (tuple, list)) and len(values) > MAX_RANK:
            text = f": {label} has {len(values):,} axes, more than {MAX_RANK}"
            raise error_about(LimitError, text, path=self._path, tensor=name)
        if not isinstance(values, (tuple, list)) or any(type(value) is not int for value in values):
            raise self._fault(name, f"{label} must be integers, got {describe(values)}")
        if any(not 0 <= value < 1 << 62 for value in values):
            raise self._fault(name, f"{label} must be from 0 to 2**62, got {[describe(value) for value in values[:8]]}")
        return tuple(values)

    def _fault(self, name: str, text: str) -> FormatError:
        return error_about(FormatError, f": {text}", path=self._path, tensor=name)
