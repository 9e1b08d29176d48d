"""Storages that are entries of a zip archive."""

from __future__ import annotations

from ...base.text import show
from ...errors import FormatError
from ..zip import STORED, Archive
from .globals import Storage


def locate_entry(archive: Archive, storage: Storage, name: str, path: str) -> int:
    """The offset of the first byte of a storage.

    Args:
        archive: the archive.
        storage: the storage.
        name: of its entry.
        path: for messages.

    Raises:
        FormatError: the storage has no entry, or an entry of a different size.
        UnsupportedError: its entry is compressed or encrypted.
    """
    info = archive.entries.get(name)
    if info is None:
        raise FormatError(f"the archive has no entry for storage {show(storage.key)}", path)
    begin = archive.locate(name)
    size = info.size
    if info.method != STORED or info.packed != size:
        archive.check_stored(name)
    if size != storage.nbytes:
        raise FormatError(
            f"storage {show(storage.key)} has {size} bytes, but {storage.count} elements of {storage.type.name} have "
            f"{storage.nbytes}",
            path,
            begin,
        )
    return begin
