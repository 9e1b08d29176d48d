"""Open a checkpoint of torch.distributed.checkpoint by one of its files.

1. A folder has ``.metadata``, or ``__<rank>.metadata`` for each process if it was written without collectives, and data
   files ``__<rank>_<number>.distcp``.
2. HuggingFaceStorageWriter writes no ``.metadata`` but files ``shard-<process>-model-<number>-of-<count>.safetensors``.
   The header of each has the metadata ``DCP_SHARDING_INFO``: JSON of {name: {"saved_offsets": [...]}}. The shape of a
   whole tensor is written nowhere: it is the largest offset + size along each axis.
3. Megatron and NeMo add ``metadata.json`` and ``common.pt`` (iteration, arguments), which safeload does not read.

The first metadata file, or the first shard, stands for the whole checkpoint: opening it opens all other files.

The pickle of ``.metadata`` says which tensors exist, their chunks, and where each chunk is stored:

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

Chunks in data files, each found on first use:

1. Bytes [offset, offset + length) of a file are a whole zip archive of `torch.save`, of a single tensor in any strides.
   Offsets inside the archive count from its own begin.
2. Other values are archives too, without a storage, unless they hold tensors.
3. With the transform ``stream.zstd/1`` the bytes are a zstd frame around the archive. The name may carry "@domain"
   before the slash; the version is read up to the first dot and must be 1.
4. With the serialization format SAFETENSORS a file is the archives of other values, followed by a whole safetensors
   file. The offset of each chunk is the beginning of that file, and its length the bytes of the chunk. The place of the
   chunk is in the header, under the name of its tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core import dtypes, foreign, safetensors
from ..core.arrays import Array, c_strides
from ..core.files import ByteStore, StoreWindow, Unpacked, read_at
from ..core.forking import cached_property
from ..core.names import depth_of, names_below, nested
from ..core.registry import Candidate, Content, OpenRequest
from ..core.table import ListedTable, Table, Unknown
from ..core.text import error_about, is_bare, listed, show
from ..core.weight_file import WeightFile, open_without_table
from ..core.zip import Archive
from ..errors import FormatError, LimitError, MissingShardError, UnsupportedError, public
from . import zstd
from .boxed import MAX_RANK, Box, BoxedListing, DataFolder, Region, Stored, itemsize_of, logical_shape
from .numbered import DCP_METADATA, DCP_RANK, DCP_SHARD, in_order
from .torch.file import pickle_at, read_tables, run_pickle
from .torch.globals import ALLOWED, CONTAINER, DTYPE
from .torch.tensors import STAND_INS, Tree
from .unpickle import Global, Inert, class_of, describe


def claims(candidate: Candidate) -> bool:
    """Return True if a pickle is the metadata of a checkpoint."""
    return MARK in candidate.head


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Open the checkpoint that a metadata file or a shard belongs to."""
    with DataFiles(candidate.file) as data:
        if foreign.is_safetensors(candidate.head):
            return data.joined(_read_sharded(data))
        return _read_metadata(data, request)


def _read_metadata(data: DataFiles, request: OpenRequest) -> Content:
    file, files, description = data.file, data.files, Description(data.named_globals)
    ranks = [] if files.split(file.place)[1] == DCP_METADATA else in_order(DCP_RANK, data.names, 1)
    if not ranks:
        description.add(file, request.inert)
    for rank in ranks:
        with closing(open_without_table(data.join(rank), files=files)) as opened:
            description.add(opened, request.inert)
    names = names_below(description.paths, request.root, file.path)
    left_out = description.reformulated
    tensors = {
        full: description.tensors[full] for full in names if full in description.tensors and full not in left_out
    }
    data.files.each(data.store, sorted({chunk.file for tensor in tensors.values() for _, chunk in tensor.chunks}))
    needed: dict[str, tuple[int, int]] = {}
    listings = {names[full]: _boxed(tensor, data, needed) for full, tensor in tensors.items()}
    for holder, (nbytes, ratio) in needed.items():
        size = data.stores[holder].size
        if nbytes > size * ratio:
            text = f"its chunks need {nbytes:,} bytes, but it has {size:,}: chunks overlap in the file"
            raise FormatError(text, data.path_of(holder))
    paths = {full: description.paths[full] for full in names if full in description.values}
    metadata = _Values(paths, lambda name: read_value(data, description.values[name]), request.root, file.path)
    flat = f"left out: {listed(map(show, left_out), 1)}, which Megatron stores flattened, not in the model's shape"
    notes = [flat] if left_out else []
    if "common.pt" in data.names:
        notes.append("Megatron's common.pt (iteration, arguments) is not read: open it by path")
    return data.joined(listings, metadata, notes)


def _boxed(tensor: TensorRecord, data: DataFiles, needed: dict[str, tuple[int, int]]) -> BoxedListing:
    """Return a tensor with its boxes; ``needed`` gets the bytes of chunks in each file, and their largest ratio."""
    row, unknown = tensor.row, tensor.unknown
    if row.packed and not tensor.shape:
        unknown = Unknown(row.code, (), "without an axis cannot be read")
    if unknown is not None:
        return BoxedListing(row, (0,), [], unknown=unknown)
    boxes = []
    for offsets, chunk in tensor.chunks:
        if 0 not in chunk.shape:
            path = data.path_of(chunk.file)
            chunk.check_place(data.stores[chunk.file], path)
            ratio = zstd.MAX_RATIO if chunk.transforms else 1
            if chunk.nbytes > chunk.length * ratio:
                size = f"a chunk of {list(chunk.shape)} has {chunk.nbytes:,} bytes"
                raise chunk.fault(f": {size}, but {chunk.length:,} bytes store it", path, chunk.offset)
            nbytes, largest = needed.get(chunk.file, (0, 1))
            needed[chunk.file] = nbytes + chunk.nbytes, max(largest, ratio)
        boxes.append(Box(offsets, chunk.shape, locate=partial(locate, data, chunk)))
    return BoxedListing(row, tensor.shape, boxes)


class _Values(Mapping[str, Any]):
    """All values but tensors, nested as in the state dict. They are read with the first access to any of them."""

    def __init__(
        self, paths: Mapping[str, tuple[Any, ...]], read: Callable[[str], Any], root: str | None, path: str
    ) -> None:
        below = [steps if root is None else steps[depth_of(steps, root) :] for steps in paths.values()]
        self._paths = {name: (str(steps[0]), *steps[1:]) for name, steps in zip(paths, below, strict=True)}
        self._keys = list(dict.fromkeys(steps[0] for steps in self._paths.values()))
        self._read = read
        self._path = path

    @cached_property
    def _tree(self) -> dict[str, Any]:
        return nested(self._paths, self._read, self._path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @public
    def __getitem__(self, key: str) -> Any:
        return self._tree[key]

    def __repr__(self) -> str:
        return repr(dict(self))


SHARDING = "DCP_SHARDING_INFO"


def _read_sharded(data: DataFiles) -> dict[str, BoxedListing]:
    """Return the tensors of all shards in a folder, and their boxes."""
    names = in_order(DCP_SHARD, data.names, 1, 2)
    matches = [match for name in names if (match := DCP_SHARD.fullmatch(name)) is not None]
    written = {int(match[2]) for match in matches}
    count = max((int(match[3]) for match in matches), default=0)
    if len(written) < count:
        number = next(number for number in range(1, count + 1) if number not in written)
        raise MissingShardError(f"no process has a file of number {number:05} of {count:05}", data.shown)
    data.files.each(data.store, names)
    tensors: dict[str, BoxedListing] = {}
    for name in names:
        path = data.path_of(name)
        table = data.table_at(name, 0)
        sharding = (table.metadata() or {}).get(SHARDING)
        if sharding is None:
            raise FormatError(f"the header has no {SHARDING}, so the place of its chunks is unknown", path)
        try:
            info = json.loads(sharding)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{SHARDING} is not JSON: {show(str(error))}", path) from None
        for index, tensor in enumerate(table.names):
            row, sizes = table.row(index), table.shape(index)
            if row.packed:
                sizes = (*sizes[:-1], sizes[-1] * row.bits // 8)
            entry = info.get(tensor) if type(info) is dict else None
            offsets: Any = entry.get("saved_offsets") if type(entry) is dict else None
            valid = type(offsets) is list and all(type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets)
            if not valid or len(offsets) != len(sizes):
                text = f": {SHARDING} must give {len(sizes)} offsets, got {show(json.dumps(entry)[:100])}"
                raise error_about(FormatError, text, path=path, tensor=tensor)
            record = tensors.get(tensor, BoxedListing(row, sizes, []))
            if record.row is not row or len(record.shape) != len(sizes):
                text = f"is {row.code} with {len(sizes)} axes here, but "
                text += f"{record.row.code} with {len(record.shape)} elsewhere"
                raise error_about(FormatError, text, path=path, tensor=tensor)
            record.boxes.append(Box(tuple(offsets), sizes, Region(data.stores[name], table.byte_range(index)[0])))
            tensors[tensor] = record._replace(shape=tuple(map(max, record.shape, map(int.__add__, offsets, sizes))))
    return tensors


# ---- the pickle of .metadata ----


_MODULE = "torch.distributed.checkpoint.metadata."
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata."
METADATA, TENSOR, BYTES = "Metadata", "TensorStorageMetadata", "BytesStorageMetadata"
_MEGATRON = "MCoreMetadata"  # instead of `METADATA`
CHUNK, PROPERTIES, INDEX = "ChunkStorageMetadata", "TensorProperties", "MetadataIndex"
STORAGE_INFO, _ENCODING = "_StorageInfo", "_MEM_FORMAT_ENCODING"
# Begins every ``.metadata``, in protocols 2 and 4.
MARK = b"torch.distributed.checkpoint.metadata"
_PLANS = ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData", "WriteItemType")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
# Classes of the metadata, which become placeholders.
RECORDS: dict[str, Global] = {
    name: Global(name, CONTAINER, partial(Inert, name))
    for name in (
        *(_MODULE + kind for kind in (METADATA, TENSOR, BYTES, CHUNK, PROPERTIES, INDEX, "StorageMeta", _ENCODING)),
        *(_OLD_MODULE + kind for kind in (PROPERTIES, _ENCODING, _ENCODING[1:])),
        *(f"torch.distributed.checkpoint.filesystem.{kind}" for kind in (STORAGE_INFO, "_StoragePrefix")),
        *(f"torch.distributed.checkpoint.planner.{kind}" for kind in _PLANS),
        f"megatron.core.dist_checkpointing.strategies.torch.{_MEGATRON}",
        *(f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in _PATHS),
    )
}
_TABLE = {**ALLOWED, **RECORDS}


class DcpChunk(NamedTuple):
    """A chunk of a tensor, or another value, and where it is stored."""

    name: str
    file: str  # bare name
    offset: int  # first byte in the file
    length: int  # bytes, compressed if there are transforms
    transforms: tuple[str, ...] = ()  # in the order of reading
    row: dtypes.Dtype = dtypes.BY_CODE["U8"]
    shape: tuple[int, ...] = ()  # as torch counts

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * itemsize_of(self.row)

    def fault(self, text: str, path: str, offset: int | None = None) -> FormatError:
        """Return the error for a chunk that is stored in another way than the metadata says."""
        return error_about(FormatError, text, path=path, offset=offset, tensor=self.name)

    def check_place(self, store: ByteStore, path: str) -> None:
        """Check that the bytes lie inside their file, and refuse transforms other than zstd, or without its package."""
        if (end := self.offset + self.length) > store.size:
            text = f": bytes [{self.offset:,}, {end:,}) lie outside the file, which has {store.size:,}; is it cut off?"
            raise self.fault(text, path, min(self.offset, store.size))
        for text in self.transforms:
            kind, _, version = text.partition("/")
            known = kind.partition("@")[0] == _ZSTD and version.partition(".")[0] == _ZSTD_VERSION
            if len(self.transforms) > 1 or not known:
                shown = ", ".join(map(show, self.transforms[:5]))
                text = f"is stored with {shown}; of transforms safeload reads a single {_ZSTD}/{_ZSTD_VERSION}"
                raise error_about(UnsupportedError, text, path=path, tensor=self.name)
            zstd.reader()

    def check(self, table: Table, index: int, path: str, offset: int | None) -> None:
        """Check that a stored tensor is the chunk that the metadata describes."""
        if (unknown := table.unknown.get(table.names[index])) is not None:
            raise error_about(UnsupportedError, f": {unknown.label} {unknown.reason}", path=path, tensor=self.name)
        row, shape, expected = table.row(index), table.shape(index), logical_shape(self.row, self.shape)
        if (row, shape) != (self.row, expected):
            text = f": the metadata says its chunk is {self.row.code} {list(expected)}, but it is "
            raise self.fault(f"{text}{row.code} {list(shape)}", path, offset)


# By name, and by offset of the chunk; None for values other than tensors.
_Places: TypeAlias = dict[tuple[str, "tuple[int, ...] | None"], DcpChunk]


class TensorRecord(NamedTuple):
    """A tensor and its chunks."""

    row: dtypes.Dtype
    shape: tuple[int, ...]  # as torch counts: bytes on the last axis if elements share them
    chunks: list[tuple[tuple[int, ...], DcpChunk]]  # with their offsets
    unknown: Unknown | None = None  # its dtype, if arrays lack it


class Description:
    """The content of one or several metadata files."""

    def __init__(self, named_globals: dict[str, bool]) -> None:
        self.tensors: dict[str, TensorRecord] = {}
        self.values: dict[str, DcpChunk] = {}  # other values by name
        self.paths: dict[str, tuple[Any, ...]] = {}  # path of each name in the nested state dict
        self.reformulated: list[str] = []  # names of tensors that Megatron stores in another shape
        self.named_globals = named_globals
        self._path, self._free = "", 0  # of the file that is read, and the chunks that its pickle can still hold

    def add(self, file: WeightFile, inert: bool) -> None:
        """Run the pickle of a metadata file, and add its records."""
        pickled = pickle_at(file, 0, None, inert, _TABLE, whole=True)
        record, self._path, self._free = pickled.value, file.path, pickled.size
        if (kind := class_of(record)) not in (METADATA, _MEGATRON):
            raise FormatError(f"expected the Metadata of a checkpoint, got {describe(record)}", file.path, 0)
        self.named_globals |= dict.fromkeys(pickled.harmless, True) | dict.fromkeys(pickled.foreign, False)
        fields = self._fields(record, kind, "the checkpoint")
        for label in ("state_dict_metadata", "storage_data"):
            if type(fields.get(label)) is not dict:
                raise FormatError(f"{label} must be a dict, got {describe(fields.get(label))}", self._path)
        names, places = fields["state_dict_metadata"], self._places(fields["storage_data"])
        planned = fields.get("planner_data")
        paths = planned if type(planned) is dict else {}
        for name, about in names.items():
            if type(name) is not str:
                raise FormatError(f"a name must be text, got {describe(name)}", self._path)
            path = paths.get(name)
            if not isinstance(path, (tuple, list)) or any(type(step) not in (str, int) for step in path) or not path:
                path = (name,)
            self.paths[name] = tuple(path)
            if class_of(about) == BYTES:
                place = places.get((name, None))
                if place is None:
                    raise FormatError(f"value {show(name)} has no place in storage_data", self._path)
                self.values.setdefault(name, place)
            elif class_of(about) == TENSOR:
                self._add_tensor(name, self._fields(about, TENSOR, name), places, pickled.size)
            else:
                text = f"{show(name)} must be described as tensor or bytes, got {describe(about)}"
                raise FormatError(text, self._path)
        mcore = fields.get("mcore_data")
        for name, data in mcore.items() if type(mcore) is dict else ():
            if type(data) is dict and data.get("nd_reformulated_orig_global_shape") is not None and name in names:
                self.reformulated.append(name)

    def _places(self, storage: dict[Any, Any]) -> _Places:
        places: _Places = {}
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
                raise self._fault(name, f"transform_descriptors must be a list of texts, got {describe(transforms)}")
            places[name, at] = DcpChunk(name, file, offset, length, tuple(transforms))
        return places

    def _add_tensor(self, name: str, fields: dict[Any, Any], places: _Places, size: int) -> None:
        properties = fields.get("properties")
        state = properties.state if type(properties) is Inert and class_of(properties) == PROPERTIES else None
        dtype = state[0] if type(state) is tuple and state else None
        if type(state) is dict:
            dtype = state.get("dtype")
        if type(dtype) is not Global or dtype.kind != DTYPE:
            raise self._fault(name, f"its properties have no dtype of torch, got {describe(dtype)}")
        row = dtypes.BY_CODE[dtype.code or STAND_INS[dtype.itemsize].code]  # type: ignore[index]
        shape = self._integers(fields.get("size"), "the size", name)
        label = dtype.name.removeprefix("torch.")
        unknown = None if dtype.code else Unknown(label, shape, "cannot be represented by an array")
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
            if (place := places.get((name, offsets))) is not None:
                record.chunks.append((offsets, place._replace(row=row, shape=sizes)))
            elif 0 not in sizes:
                raise self._fault(name, f"the chunk at {list(offsets)} has no place in storage_data")

    def _fields(self, record: Any, kind: str, subject: str) -> dict[Any, Any]:
        if type(record) is not Inert or class_of(record) != kind or type(record.state) is not dict:
            raise FormatError(f"{show(subject)}: expected a {kind} with fields, got {describe(record)}", self._path)
        return record.state

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


# ---- chunks ----


# Bytes of an archive beside its storage: about 1,500. Strided storages may hold a few more elements.
MAX_OVERHEAD = 1 << 20
# Bytes of a compressed value other than a tensor, unpacked.
MAX_VALUE = 1 << 30
_ZSTD, _ZSTD_VERSION = "stream.zstd", "1"


class DataFiles(DataFolder):
    """The data files of a checkpoint."""

    def __init__(self, file: WeightFile) -> None:
        super().__init__(file, "the checkpoint's metadata lists it: was it copied?")
        self._parts: dict[tuple[str, int], Table] = {}

    def table_at(self, name: str, offset: int) -> Table:
        """Return the table of the safetensors file that begins at an offset and reaches to the end of a file."""
        if (name, offset) not in self._parts:
            store, path = self.stores[name], self.path_of(name)
            with _within(path, StoreWindow(store, offset, store.size - offset, path), offset) as window:
                self._parts[name, offset] = safetensors.read(Candidate(window), OpenRequest()).file.table
        return self._parts[name, offset]


def locate(data: DataFiles, chunk: DcpChunk) -> Stored:
    """Return the elements of a chunk."""
    store, path, offset = data.stores[chunk.file], data.path_of(chunk.file), chunk.offset
    window = StoreWindow(store, offset, chunk.length, path)
    if chunk.transforms:
        return partial(_unpacked, chunk, window, path)
    head = read_at(store, offset, foreign.HEAD_SIZE)
    if foreign.is_safetensors(head) and not foreign.is_zip(head):
        table = data.table_at(chunk.file, offset)
        index = table.find(chunk.name)
        if index < 0:
            raise chunk.fault("should be in the safetensors part, but is not there", path, offset)
        chunk.check(table, index, path, offset)
        return Region(store, offset + table.byte_range(index)[0])
    region = _in_archive(chunk, window, path, offset)
    return Region(store, offset + region.begin, region.strides)


def _unpacked(chunk: DcpChunk, store: ByteStore, path: str) -> Array:
    """Return the elements of a compressed chunk."""
    content = zstd.decompressed(store, 0, chunk.length, chunk.nbytes + MAX_OVERHEAD, path, name=chunk.name)
    region = _in_archive(chunk, Unpacked(content), path, None)
    shape = (*chunk.shape, itemsize_of(chunk.row))
    strides = c_strides(shape, 1) if region.strides is None else (*region.strides, 1)
    return np.ascontiguousarray(np.ndarray(shape, np.uint8, content, region.begin, strides))


def _in_archive(chunk: DcpChunk, store: ByteStore, path: str, offset: int | None) -> Region:
    """Return the place of the elements in an archive; ``offset`` in the file is None for a compressed archive."""
    with _within(path, store, offset) as window:
        _, beside, names, _ = read_tables(Archive(window), window, OpenRequest())
    if len(names) != 1 or beside:
        raise chunk.fault(f": its chunk must hold a single tensor, got {len(names)}", path, offset)
    table = window.table
    chunk.check(table, 0, path, offset)
    if 0 in table.big_endian:
        raise error_about(UnsupportedError, "has big-endian chunks", path=path, tensor=chunk.name)
    begin, end = table.byte_range(0)
    if end - begin > 4 * chunk.nbytes + MAX_OVERHEAD:
        text = f": strides spread a chunk of {chunk.nbytes:,} bytes over {end - begin:,}"
        raise error_about(LimitError, text, path=path, tensor=chunk.name)
    return Region(store, begin, table.strides.get(0))


@contextmanager
def _within(path: str, store: ByteStore, begin: int | None) -> Iterator[WeightFile]:
    """Give a part of a file as a file; its errors name bytes of the whole, or none if ``begin`` is None."""
    try:
        yield WeightFile(path, store, ListedTable([]))
    except FormatError as error:
        error.offset = None if begin is None or error.offset is None else error.offset + begin
        raise


def read_value(data: DataFiles, value: DcpChunk) -> Any:
    """Return a value other than a tensor, without running code; unknown objects become placeholders."""
    path = data.path_of(value.file)
    with closing(data.open(value.file)) as store:
        value.check_place(store, path)
        source: ByteStore = StoreWindow(store, value.offset, value.length, path)
        if value.transforms:
            limit = min(value.length * zstd.MAX_RATIO, MAX_VALUE)
            source = Unpacked(zstd.decompressed(source, 0, value.length, limit, path, name=value.name))
        with _within(path, source, None if value.transforms else value.offset) as window:
            pickled, _ = run_pickle(Archive(window), window, inert=True)
    return Tree(pickled.value, path, pickled.size).plain()
