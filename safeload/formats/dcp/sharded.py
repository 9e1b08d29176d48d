"""Sharded safetensors of HuggingFaceStorageWriter: each process writes its chunks as tensors of its own files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...base.messages import error_about
from ...base.table import Table
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, MissingShardError
from ..boxed import Box, BoxedListing, InFile
from ..numbered import DCP_SHARD, in_order
from .chunks import DataFiles

SHARDING = "DCP_SHARDING_INFO"


def read(data: DataFiles, file: WeightFile, folder: str) -> dict[str, BoxedListing]:
    """Return the tensors of all shards in the folder of ``file``, and their boxes."""
    names = in_order(DCP_SHARD, [name for name, is_folder in file.files.listing(folder) if not is_folder], 1, 2)
    _check_complete(names, file.files.shown(folder))
    data.open_all(names)
    tensors: dict[str, BoxedListing] = {}
    all_boxes: dict[str, list[Box]] = {}
    for name in names:
        path = data.path(name)
        table = data.table_at(name, 0)
        offsets_of = _offsets(table, path)
        for index, tensor in enumerate(table.names):
            row, sizes = table.row(index), table.shape(index)
            if row.packed:
                sizes = (*sizes[:-1], sizes[-1] * row.bits // 8)
            offsets = offsets_of(tensor, len(sizes))
            record = tensors.get(tensor)
            if record is not None and (record.row is not row or len(record.shape) != len(sizes)):
                text = f"is {row.code} with {len(sizes)} axes here, but "
                text += f"{record.row.code} with {len(record.shape)} elsewhere"
                raise error_about(FormatError, text, path=path, tensor=tensor)
            shape = tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
            if record is not None:
                shape = tuple(map(max, shape, record.shape))
            begin, _ = table.byte_range(index)
            boxes = all_boxes.setdefault(tensor, [])
            boxes.append(Box(offsets, sizes, InFile(data.stores[name], begin)))
            tensors[tensor] = BoxedListing(row, shape, boxes)
    return tensors


def _check_complete(names: Sequence[str], path: str) -> None:
    """Refuse a folder if the numbers in its names show that a file is missing."""
    matches = [match for name in names if (match := DCP_SHARD.fullmatch(name)) is not None]
    written = {int(match[2]) for match in matches}
    count = max((int(match[3]) for match in matches), default=0)
    if len(written) < count:
        number = next(number for number in range(1, count + 1) if number not in written)
        raise MissingShardError(f"no process has a file of number {number:05} of {count:05}", path)


def _offsets(table: Table, path: str) -> Any:
    """Return a function from a tensor to the offsets of its chunk."""
    text = (table.metadata() or {}).get(SHARDING)
    if text is None:
        raise FormatError(f"the header has no {SHARDING}, so the place of its chunks is unknown", path)
    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{SHARDING} is not JSON: {show(str(error))}", path) from None

    def offsets_of(name: str, rank: int) -> tuple[int, ...]:
        entry = info.get(name) if type(info) is dict else None
        offsets = entry.get("saved_offsets") if type(entry) is dict else None
        valid = type(offsets) is list and all(type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets)
        if not valid or offsets is None or len(offsets) != rank:
            text = f": {SHARDING} must give {rank} offsets, got {show(json.dumps(entry)[:100])}"
            raise error_about(FormatError, text, path=path, tensor=name)
        return tuple(offsets)

    return offsets_of
