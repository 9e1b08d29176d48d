"""Checks of the files themselves: an index against its shards, CRC-32 of the entries of zip archives."""

from __future__ import annotations

import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from ...base.text import show
from ...engine.codes.pieces import file_pieces, in_order
from ...engine.run.weight_file import WeightFile, open_without_table
from ...errors import FormatError, SafeloadError, one_line
from ...formats.foreign import is_zip
from ...formats.zip import STORED, Archive, ZipEntry
from ...stores.files import Location
from ..sources.catalog import Catalog
from .findings import Finding, error, warning

# Usually five digits; DeepSeek writes six after "of", and a few models have two.
_SHARD = re.compile(r"(.*)-([0-9]{1,18})-of-([0-9]{1,18})(\..*)", re.ASCII | re.DOTALL)


def check_index(catalog: Catalog) -> Iterator[Finding]:
    """Checks an ``index.json`` against its shards; without one, the numbers in the names of the shards."""
    if catalog.index is None:
        yield from _check_shard_names(catalog.files)
        return
    from ...stores.json_file import read_json

    base = os.path.basename(catalog.index.shown)
    try:
        index = read_json(catalog.index.path, "index.json", catalog.index.files)
    except (SafeloadError, OSError) as problem:  # it was readable a moment ago
        yield error("file.read", None, one_line(problem))
        return
    metadata = index.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = catalog.nbytes
    scales = sum(
        scale.end - scale.begin
        for _, file, k in catalog.entries()
        if file.table.quantized and (scale := file.table.scale(k)) is not None
    )
    ignored = sum(part.end - part.begin for part in catalog.ignored.values())
    if said is not None and said not in (held, held + scales, held + ignored):
        yield warning(
            "index.total_size", None, f"{base} has total_size {said}, but its tensors have {held + scales} bytes"
        )
    listed: set[tuple[WeightFile, int]] = {(file, k) for _, file, k in catalog.entries()}
    for file in catalog.weight_files:
        for k, name in enumerate(file.table.names):
            if (file, k) not in listed:
                shard = os.path.basename(file.path)
                yield warning("index.unlisted", name, f"is in {shard}, but not in {base}, so it is never read")


def _check_shard_names(paths: Iterable[str]) -> Iterator[Finding]:
    """Missing files of a group named ``...-00001-of-00003...``."""
    groups: dict[tuple[str, str, str], dict[int, int]] = {}  # number of each shard to its digits
    for path in paths:
        parts = _SHARD.fullmatch(os.path.basename(path))
        if parts is not None:
            groups.setdefault((parts[1], parts[3], parts[4]), {})[int(parts[2])] = len(parts[2])
    if sum(map(len, groups.values())) < 2:
        return  # a single shard was opened
    for (stem, total, suffix), numbers in groups.items():
        digits = max(numbers.values())
        for number in range(1, min(int(total), 100_000) + 1):
            if number not in numbers:
                yield error("index.shard", None, f"{stem}-{number:0{digits}}-of-{total}{suffix} is missing")


# ---- CRC-32 ----


class FileEntry(NamedTuple):
    """One entry of an archive.

    Attributes:
        archive: the archive.
        file: the file of the archive.
        info: its entry of the central directory.
        begin: offset of its first byte in the file.
        tensors: names of the tensors in it.
    """

    archive: Archive
    file: WeightFile
    info: ZipEntry
    begin: int
    tensors: list[str]

    @property
    def name(self) -> str:
        """Its name in `Archive.entries`."""
        return self.info.name

    @property
    def stored(self) -> bool:
        """Whether it is not compressed."""
        return self.info.method == STORED


def entries_of(catalog: Catalog) -> list[FileEntry]:
    """All entries of the files that are zip archives, compressed ones last.

    Raises:
        FormatError, OSError: a directory cannot be read.
    """
    entries = [entry for file in catalog.weight_files for entry in _entries(file, catalog.format)]
    return sorted(entries, key=lambda entry: not entry.stored)


def faults_of(entries: Sequence[FileEntry], threads: int | None) -> list[str | None]:
    """The fault of each entry whose bytes do not have its CRC-32, or cannot be read; None for good ones."""
    stored = [entry for entry in entries if entry.stored]
    nbytes = sum(entry.info.packed for entry in stored)
    # Compressed entries one by one: an archive caches only the last header it read.
    return [*in_order(_fault_of, stored, threads, nbytes), *(_fault_of(entry) for entry in entries if not entry.stored)]


def crc_finding(entry: FileEntry, fault: str) -> Finding:
    """The finding about the fault of an entry."""
    name = entry.info.name
    more = f" (with {len(entry.tensors) - 1} more tensors)" if len(entry.tensors) > 1 else ""
    message = f"zip entry {show(name)} of {entry.file.path}{more}: {fault}"
    return error("file.crc", entry.tensors[0] if entry.tensors else None, message)


@contextmanager
def reopened(location: Location, identity: tuple[Any, ...], names: Sequence[str]) -> Iterator[list[FileEntry]]:
    """Opens an archive, for some of its entries by name; what tensors they hold is not looked up.

    Args:
        location: of the archive.
        identity: its size and version when it was first opened.
        names: of the entries.

    Raises:
        FormatError: there is no such entry, it is not an archive, or it has changed.
        SafeloadError, OSError: see `open_without_table`.
    """
    with closing(open_without_table(location.path, files=location.files)) as file:
        file.check_identity(identity)
        archive = Archive(file)
        unknown = next((name for name in names if name not in archive.entries), None)
        if unknown is not None:
            raise FormatError(f"the archive has no entry {show(unknown)}", file.path)
        yield [FileEntry(archive, file, archive.entries[name], archive.locate(name), []) for name in names]


def _entries(opened: WeightFile, format: str | None) -> Iterator[FileEntry]:
    """The entries of a file that is a zip archive."""
    # Compressed arrays have been unpacked into a temporary file.
    unpacked = format == "npz" and not _is_zip(opened)
    file = open_without_table(opened.place, shown=opened.path, files=opened.files) if unpacked else opened
    if not _is_zip(file):
        return
    archive = Archive(file)
    names = opened.table.names
    ranges = sorted((begin, end, name) for name, (begin, end) in zip(names, opened.table.byte_ranges(), strict=True))
    for name, info in archive.entries.items():
        begin = archive.locate(name)
        if file is opened:
            first = bisect_left(ranges, (begin, 0, ""))
            last = bisect_left(ranges, (begin + info.packed, 0, ""))
            tensors = [tensor for _, _, tensor in ranges[first:last]]
        else:
            tensors = [tensor for tensor in (name.removesuffix(".npy"),) if opened.table.find(tensor) >= 0]
        yield FileEntry(archive, file, info, begin, tensors)
    archive.check_overlap()


def _is_zip(file: WeightFile) -> bool:
    return is_zip(file.read_at(0, 4))


def _fault_of(entry: FileEntry) -> str | None:
    """The fault of an entry, None if it is good."""
    info = entry.info
    found = 0
    try:
        if info.method == STORED:
            for piece in file_pieces(entry.file, entry.begin, entry.begin + info.packed):
                found = zlib.crc32(piece, found)
        else:
            for data in entry.archive.inflate(info.name):
                found = zlib.crc32(data, found)
    except (SafeloadError, OSError) as problem:
        return one_line(problem)
    return None if found == info.crc else f"its bytes have CRC-32 {found:08x}, but the directory has {info.crc:08x}"
