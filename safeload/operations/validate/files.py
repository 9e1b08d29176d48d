"""Check the files themselves: indices against shards, CRC-32 of zip entries."""

from __future__ import annotations

import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from ...base.text import plural, show
from ...engine.codes.pieces import file_pieces, in_order
from ...engine.run.weight_file import WeightFile, open_without_table
from ...errors import FormatError, SafeloadError, one_line
from ...formats.foreign import is_zip
from ...formats.zip import STORED, Archive, ZipEntry
from ...stores.files import Location
from ..sources.catalog import Catalog
from .findings import Finding, find

# Numbers usually have five digits. DeepSeek writes six after "of", a few models two.
_SHARD = re.compile(r"(.*)-([0-9]{1,18})-of-([0-9]{1,18})(\..*)", re.ASCII | re.DOTALL)


def check_index(catalog: Catalog) -> Iterator[Finding]:
    """Check an ``index.json`` against its shards. Without an index, check the numbers in the names of shards."""
    if catalog.index is None:
        yield from _check_shard_names(catalog.files)
        return
    from ...stores.json_file import read_json

    base = os.path.basename(catalog.index.shown)
    try:
        index = read_json(catalog.index.path, "index.json", catalog.index.files)
    except (SafeloadError, OSError) as problem:  # readable when the checkpoint was opened
        yield find("file.read", problem=one_line(problem))
        return
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    nbytes = catalog.nbytes
    scales = sum(
        scale.end - scale.begin
        for _, file, k in catalog.entries()
        if file.table.quantized and (scale := file.table.scale(k)) is not None
    )
    ignored = sum(part.end - part.begin for part in catalog.ignored.values())
    if total_size is not None and total_size not in (nbytes, nbytes + scales, nbytes + ignored):
        yield find("index.total_size", index=base, total_size=total_size, nbytes=nbytes + scales)
    listed: set[tuple[WeightFile, int]] = {(file, k) for _, file, k in catalog.entries()}
    for file in catalog.weight_files:
        for k, name in enumerate(file.table.names):
            if (file, k) not in listed:
                yield find("index.unlisted", name, shard=os.path.basename(file.path), index=base)


def _check_shard_names(paths: Iterable[str]) -> Iterator[Finding]:
    """Find missing files among shards named ``...-00001-of-00003...``."""
    groups: dict[tuple[str, str, str], dict[int, int]] = {}  # number of each shard to its digits
    for path in paths:
        parts = _SHARD.fullmatch(os.path.basename(path))
        if parts is not None:
            groups.setdefault((parts[1], parts[3], parts[4]), {})[int(parts[2])] = len(parts[2])
    if sum(map(len, groups.values())) < 2:
        return  # a single shard, opened on its own
    for (stem, total, suffix), numbers in groups.items():
        digits = max(numbers.values())
        for number in range(1, min(int(total), 100_000) + 1):
            if number not in numbers:
                yield find("index.shard", name=f"{stem}-{number:0{digits}}-of-{total}{suffix}", listed="")


# ---- CRC-32 ----


class FileEntry(NamedTuple):
    """An entry of an archive."""

    archive: Archive
    file: WeightFile  # the archive's file
    info: ZipEntry  # the entry in the central directory
    begin: int  # first byte of the entry in the file
    tensors: list[str]  # names of the tensors in the entry

    @property
    def name(self) -> str:
        """The name in `Archive.entries`."""
        return self.info.name

    @property
    def stored(self) -> bool:
        """True if the entry is not compressed."""
        return self.info.method == STORED


def entries_of(catalog: Catalog) -> list[FileEntry]:
    """Return all entries of zip archives, compressed entries last."""
    entries = [entry for file in catalog.weight_files for entry in _entries(file, catalog.format)]
    return sorted(entries, key=lambda entry: not entry.stored)


def faults_of(entries: Sequence[FileEntry], threads: int | None) -> list[str | None]:
    """Return the fault of each entry with a wrong CRC-32 or unreadable bytes; None for good entries."""
    stored = [entry for entry in entries if entry.stored]
    nbytes = sum(entry.info.packed for entry in stored)
    # Compressed entries run in sequence, because an archive caches a single header.
    return [*in_order(_fault_of, stored, threads, nbytes), *(_fault_of(entry) for entry in entries if not entry.stored)]


def crc_finding(entry: FileEntry, fault: str) -> Finding:
    """Return the finding for a fault of an entry."""
    more = f" (with {plural(len(entry.tensors) - 1, 'more tensor')})" if len(entry.tensors) > 1 else ""
    tensor = entry.tensors[0] if entry.tensors else None
    return find("file.crc", tensor, entry=show(entry.info.name), path=entry.file.path, more=more, fault=fault)


@contextmanager
def reopened(location: Location, identity: tuple[Any, ...], names: Sequence[str]) -> Iterator[list[FileEntry]]:
    """Open an archive, unchanged since it had ``identity``, to check named entries; tensors are not looked up."""
    with closing(open_without_table(location.path, files=location.files)) as file:
        file.check_identity(identity)
        archive = Archive(file)
        unknown = next((name for name in names if name not in archive.entries), None)
        if unknown is not None:
            raise FormatError(f"the archive has no entry {show(unknown)}", file.path)
        yield [FileEntry(archive, file, archive.entries[name], archive.locate(name), []) for name in names]


def _entries(opened: WeightFile, format: str | None) -> Iterator[FileEntry]:
    """Yield the entries of a file, if it is a zip archive."""
    # Compressed arrays were unpacked into a temporary file.
    unpacked = opened.unpacked and format in ("npz", "torch zip")
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
    """Return the fault of an entry, or None for a good entry."""
    info = entry.info
    crc = 0
    try:
        if info.method == STORED:
            for piece in file_pieces(entry.file, entry.begin, entry.begin + info.packed):
                crc = zlib.crc32(piece, crc)
        else:
            for data in entry.archive.inflate(info.name):
                crc = zlib.crc32(data, crc)
    except (SafeloadError, OSError) as problem:
        return one_line(problem)
    return None if crc == info.crc else f"CRC-32 of its bytes is {crc:08x}, but the directory says {info.crc:08x}"
