"""The format of torch.save before torch 1.6, still available as an option: not a zip archive.

1. Five consecutive pickles: a magic number, the protocol 1001, facts about the machine, the object, and the list of
   storage keys.
2. For each key of that list: the number of elements (int64), then their bytes, little-endian on every machine
   (torch/csrc/utils/storage.cpp). Nothing is aligned.
3. The persistent id of a storage has six fields. The sixth describes a part of another storage, or is None.

Strings can come from Python 2. Bytes after the last storage are ignored, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...base.text import error_about, show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, LimitError, UnsupportedError
from ..registry import Candidate, Content, OpenRequest
from ..unpickle import machine as unpickler
from ..unpickle.machine import Global, TruncatedError, Unpickled, describe, unpickle
from .globals import ALLOWED, Storage, read_persistent_id
from .tensors import content_of, make_tables

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001

# Bytes to read first for a pickle; each further attempt reads eight times as many.
_WINDOW = 1 << 16


def pickle_at(
    file: WeightFile,
    offset: int,
    storages: dict[str, Storage] | None,
    inert: bool,
    table: Mapping[str, Global] = ALLOWED,
) -> Unpickled:
    """Run the pickle at an offset of the file; `Unpickled.size` tells where it ends."""
    persistent = partial(read_persistent_id, storages=storages)
    size = _WINDOW
    while True:
        data = file.read_at(offset, size)
        complete = offset + size >= file.size
        try:
            return unpickle(data, table, persistent, path=file.path, base=offset, inert=inert, complete=complete)
        except TruncatedError:
            if complete:
                raise
        if size >= unpickler.MAX_PICKLE:
            text = f"the pickle at byte {offset} has more than {unpickler.MAX_PICKLE} bytes"
            raise error_about(LimitError, text, path=file.path)
        size *= 8


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Run the pickles of a file."""
    file = candidate.file

    def read_tables(request: OpenRequest) -> Content:
        pickled, begins = _parse(file, request.inert)

        def locate(storage: Storage) -> int:
            if storage.key not in begins:
                raise FormatError(f"storage {show(storage.key)} is not in the file's list of storages", file.path)
            return begins[storage.key]

        return make_tables(pickled, request, file, locate)

    return content_of(file, request, read_tables)


def storage_in(content: bytes, path: str) -> Storage:
    """Return the storage behind a file in memory."""
    file: Any = SimpleNamespace(path=path, size=len(content), read_at=lambda at, size: content[at : at + size])
    pickled, begins = _parse(file, inert=False)
    storage = pickled.value
    if type(storage) is not Storage or storage.part is not None or storage.key not in begins:
        raise UnsupportedError(f"a torch file in the pickle holds {describe(storage)}, expected a storage", path=path)
    begin = begins[storage.key]
    storage.raw = content[begin : begin + storage.nbytes]
    return storage


def _parse(file: WeightFile, inert: bool) -> tuple[Unpickled, dict[str, int]]:
    """Return the object of a file, and the first byte of each storage by key."""
    magic = pickle_at(file, 0, None, inert)
    if magic.value != MAGIC or type(magic.value) is not int:
        raise FormatError(f"the file begins with {describe(magic.value)}, not with torch's magic number", file.path, 0)
    at = magic.size
    protocol = pickle_at(file, at, None, inert=False)
    if protocol.value != PROTOCOL:
        raise FormatError(f"protocol is {describe(protocol.value)}, but only {PROTOCOL} is supported", file.path, at)
    at += protocol.size
    at += pickle_at(file, at, None, inert=False).size  # facts about the machine, unused
    storages: dict[str, Storage] = {}
    pickled = pickle_at(file, at, storages, inert)
    at += pickled.size
    keys = pickle_at(file, at, None, inert=False)
    if type(keys.value) is not list:
        raise FormatError(f"the storage keys must be a list, got {describe(keys.value)}", file.path, at)
    return pickled, _walk(file, at + keys.size, keys.value, storages)


def _walk(file: WeightFile, at: int, keys: list[Any], storages: dict[str, Storage]) -> dict[str, int]:
    """Check the storages in file order; return the offset of the first byte of each by key."""
    begins: dict[str, int] = {}
    for key in keys:
        storage = storages.get(key) if type(key) is str else None
        if storage is None or key in begins:
            fault = "is a duplicate" if type(key) is str and key in begins else "is not used in the pickle"
            raise FormatError(f"key {describe(key)} in the list of storages {fault}", file.path, at)
        head = file.read_at(at, 8)
        count = int.from_bytes(head, "little", signed=True)
        if len(head) < 8 or count * storage.type.itemsize > file.size - at - 8:
            message = f"storage {show(key)}: {count if len(head) == 8 else 'an unknown number of'} elements of "
            message += f"{storage.type.itemsize} bytes extend past the end of the file, which has {file.size} bytes"
            raise FormatError(message, file.path, at)
        if count != storage.count:
            message = f"storage {show(key)} has {count} elements, but the pickle says {storage.count}"
            raise FormatError(message, file.path, at)
        begins[key] = at + 8
        at += 8 + count * storage.type.itemsize
    return begins
