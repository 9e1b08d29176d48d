"""Open a checkpoint of torch.distributed.checkpoint by one of its files.

1. A folder has ``.metadata``, or ``__<rank>.metadata`` for each process if it was written without collectives, and data
   files ``__<rank>_<number>.distcp`` (records.py, chunks.py).
2. HuggingFaceStorageWriter writes no ``.metadata`` but files ``shard-<process>-model-<number>-of-<count>.safetensors``.
   The header of each has the metadata ``DCP_SHARDING_INFO``: JSON of {name: {"saved_offsets": [...]}}. The shape of a
   whole tensor is written nowhere: it is the largest offset + size along each axis.
3. Megatron and NeMo add ``metadata.json`` and ``common.pt`` (iteration, arguments), which safeload does not read.

The first metadata file, or the first shard, stands for the whole checkpoint: opening it opens all other files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from ...base.cached import cached_property
from ...base.messages import error_about
from ...base.table import Table, Unknown
from ...base.text import show
from ...engine.run.weight_file import WeightFile, open_without_table
from ...errors import FormatError, MissingShardError, public
from .. import foreign
from ..boxed import Box, BoxedListing, Region, boxed_file
from ..metadata import depth_of, names_below, nested
from ..numbered import DCP_METADATA, DCP_RANK, DCP_SHARD, in_order
from ..registry import Candidate, Content, OpenRequest
from ..zstd import MAX_RATIO
from .chunks import DataFiles, DcpChunk, check_inside, check_transforms, locate, read_value
from .records import MARK, Description, TensorRecord


def claims(candidate: Candidate) -> bool:
    """Return True if a pickle is the metadata of a checkpoint."""
    return MARK in candidate.head


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Open the checkpoint that a metadata file or a shard belongs to."""
    file = candidate.file
    folder, name = file.files.split(file.place)
    data = DataFiles(file.files, folder)
    try:
        if foreign.is_safetensors(candidate.head):
            tensors = _read_sharded(data, file, folder)
            return Content(boxed_file(file, tensors, list(data.stores.values()), folder=folder))
        return _read_metadata(file, folder, name, data, request)
    except BaseException:
        data.close()
        raise


def _read_metadata(file: WeightFile, folder: str, name: str, data: DataFiles, request: OpenRequest) -> Content:
    files = file.files
    listing = [] if name == DCP_METADATA else files.listing(folder)
    ranks = in_order(DCP_RANK, [name for name, is_folder in listing if not is_folder], 1)

    description = Description()
    if not ranks:
        description.add(file, request.inert)
    for rank in ranks:
        with closing(open_without_table(files.join(folder, rank), files=files)) as opened:
            description.add(opened, request.inert)
    names = names_below(description.paths, request.root, file.path)
    left_out = set(description.reformulated)
    tensors = {
        full: description.tensors[full] for full in names if full in description.tensors and full not in left_out
    }
    data.open_all(sorted({place.file for tensor in tensors.values() for *_, place in tensor.chunks}))
    needed: dict[str, tuple[int, int]] = {}
    listings = {names[full]: _boxed(full, tensor, data, needed) for full, tensor in tensors.items()}
    for holder, (nbytes, ratio) in needed.items():
        size = data.stores[holder].size
        if nbytes > size * ratio:
            text = f"its chunks need {nbytes:,} bytes, but it has {size:,}: chunks overlap in the file"
            raise FormatError(text, data.path(holder))
    paths = {full: description.paths[full] for full in names if full in description.values}
    metadata = _Values(paths, lambda name: read_value(data, name, description.values[name]), request.root, file.path)
    named, stores = description.named_globals, list(data.stores.values())
    whole = boxed_file(file, listings, stores, folder=folder, metadata=metadata, named_globals=named)
    return Content(whole, notes=list(_notes(description, [name for name, _ in files.listing(folder)])))


def _boxed(name: str, tensor: TensorRecord, data: DataFiles, needed: dict[str, tuple[int, int]]) -> BoxedListing:
    """Return a tensor with its boxes; ``needed`` gets the bytes of chunks in each file, and their largest ratio."""
    row, unknown = tensor.row, tensor.unknown
    if row.packed and not tensor.shape:
        unknown = Unknown(row.code, (), "without an axis cannot be read")
    if unknown is not None:
        return BoxedListing(row, (0,), [], unknown=unknown)
    boxes = []
    for offsets, sizes, place in tensor.chunks:
        chunk = DcpChunk(name, row, sizes, place)
        if 0 not in sizes:
            path = data.path(place.file)
            check_inside(data.stores[place.file], name, place, path)
            if place.transforms:
                check_transforms(place.transforms, path, name)
            ratio = MAX_RATIO if place.transforms else 1
            if chunk.nbytes > place.length * ratio:
                text = f": a chunk of {list(sizes)} has {chunk.nbytes:,} bytes, but {place.length:,} bytes store it"
                raise error_about(FormatError, text, path=path, offset=place.offset, tensor=name)
            nbytes, largest = needed.get(place.file, (0, 1))
            needed[place.file] = nbytes + chunk.nbytes, max(largest, ratio)
        boxes.append(Box(offsets, sizes, locate=partial(locate, data, chunk)))
    return BoxedListing(row, tensor.shape, boxes)


def _notes(description: Description, names: Sequence[str]) -> Iterator[str]:
    if description.reformulated:
        first, *rest = description.reformulated
        more = f" and {len(rest):,} more" if rest else ""
        yield f"left out: {show(first)}{more}, which Megatron stores flattened, not in the model's shape"
    if "common.pt" in names:
        yield "Megatron's common.pt (iteration, arguments) is not read: open it by path"


class _Values(Mapping[str, Any]):
    """All values but tensors, nested as in the state dict. They are read with the first access to any of them."""

    def __init__(
        self, paths: Mapping[str, tuple[Any, ...]], read: Callable[[str], Any], root: str | None, path: str
    ) -> None:
        self._paths: dict[str, tuple[Any, ...]] = {}
        for name, steps in paths.items():
            steps = steps if root is None else steps[depth_of(steps, root) :]
            self._paths[name] = (str(steps[0]), *steps[1:])
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


def _read_sharded(data: DataFiles, file: WeightFile, folder: str) -> dict[str, BoxedListing]:
    """Return the tensors of all shards in the folder of ``file``, and their boxes."""
    names = in_order(DCP_SHARD, [name for name, is_folder in file.files.listing(folder) if not is_folder], 1, 2)
    matches = [match for name in names if (match := DCP_SHARD.fullmatch(name)) is not None]
    written = {int(match[2]) for match in matches}
    count = max((int(match[3]) for match in matches), default=0)
    if len(written) < count:
        number = next(number for number in range(1, count + 1) if number not in written)
        raise MissingShardError(f"no process has a file of number {number:05} of {count:05}", file.files.shown(folder))
    data.open_all(names)
    tensors: dict[str, BoxedListing] = {}
    all_boxes: dict[str, list[Box]] = {}
    for name in names:
        path = data.path(name)
        table = data.table_at(name, 0)
        info = _sharding(table, path)
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
            record = tensors.get(tensor)
            if record is not None and (record.row is not row or len(record.shape) != len(sizes)):
                text = f"is {row.code} with {len(sizes)} axes here, but "
                text += f"{record.row.code} with {len(record.shape)} elsewhere"
                raise error_about(FormatError, text, path=path, tensor=tensor)
            shape = tuple(map(int.__add__, offsets, sizes))
            boxes = all_boxes.setdefault(tensor, [])
            boxes.append(Box(tuple(offsets), sizes, Region(data.stores[name], table.byte_range(index)[0])))
            if record is not None:
                shape = tuple(map(max, shape, record.shape))
            tensors[tensor] = BoxedListing(row, shape, boxes)
    return tensors


def _sharding(table: Table, path: str) -> Any:
    """Return the places of the chunks in a file."""
    text = (table.metadata() or {}).get(SHARDING)
    if text is None:
        raise FormatError(f"the header has no {SHARDING}, so the place of its chunks is unknown", path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{SHARDING} is not JSON: {show(str(error))}", path) from None
