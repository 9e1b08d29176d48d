"""Storages that are entries of a zip archive."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.text import show
from ...errors import FormatError
from ..zip import Archive
from .globals import Storage


def locate_entry(archive: Archive, storage: Storage, names: Sequence[str], path: str) -> int:
    """The offset of the first byte of a storage.

    Args:
        archive: the archive.
        storage: the storage.
        names: possible names of its entry.
        path: for messages.

    Raises:
        FormatError: the storage has no entry, or an entry of a different size.
        UnsupportedError: its entry is compressed or encrypted.
    """
    name = next((name for name in names if name in archive.entries), None)
    if name is None:
        raise FormatError(f"the archive has no entry for storage {show(storage.key)}", path)
    begin = archive.locate(name)
    archive.check_stored(name)
    size = archive.entries[name].file_size
    if size != storage.nbytes:
        raise FormatError(
            f"storage {show(storage.key)} has {size} bytes, but {storage.count} elements of {storage.type.name} have "
            f"{storage.nbytes}",
            path,
            begin,
        )
    return begin
