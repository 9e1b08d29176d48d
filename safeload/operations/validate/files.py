"""Check the files themselves: indices against shards, CRC-32 of zip entries, tails of zeros from stopped downloads."""

from __future__ import annotations

import errno
import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np

from ...base.text import plural, show
from ...engine.codes.pieces import PIECE, file_pieces, in_order
from ...engine.run.weight_file import WeightFile, open_without_table
from ...errors import FormatError, SafeloadError, one_line
from ...formats.foreign import is_zip
from ...formats.registry import NPZ
from ...formats.zip import STORED, Archive, ZipEntry
from ...stores.files import Location
from ...stores.local import LocalStore, keeping_position
from ..sources.catalog import Catalog
from .findings import ERROR, WARNING, Finding, find
from .holes import may_be_zero

# Numbers usually have five digits. DeepSeek writes six after "of", a few models two.
_SHARD = re.compile(r"(.*)-([0-9]{1,18})-of-([0-9]{1,18})(\..*)", re.ASCII | re.DOTALL)


# Downloads that allocate their file in advance leave zeros at its end if they stop. A shorter tail of zeros does not
# count as a stopped download, unless it is a hole.
_TAIL_AT_LEAST = 1 << 20

# A hole below both limits without a whole tensor is only a warning, because writers can skip blocks
# of zeros.
_HOLE_AT_LEAST = 64 << 10
_HOLE_OF_FILE = 1000

# Bytes to read from the end first. The last byte is nearly always nonzero.
_FIRST_PIECE = 64 << 10


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


# ---- tails of zeros ----


class Tail(NamedTuple):
    """Zeros at the end of a file's tensors."""

    begin: int  # offset of the first zero
    end: int  # end offset of the tensors
    whole: list[str]  # tensors entirely in the tail, in the order of their bytes
    cut: str | None  # tensor cut by the beginning of the tail; None if the tail begins between tensors
    hole: int  # number of bytes in a hole of the file system


def check_tails(
    catalog: Catalog, role: Callable[[str], str | None], zero: set[str], *, values: bool
) -> Iterator[Finding]:
    """Find files with an unwritten tail, and add the names of their zero tensors to ``zero``."""
    # Compressed arrays of an npz are in a temporary file of our own.
    for file in catalog.weight_files if catalog.format != NPZ else ():
        tail = tail_of(file, values=values)  # without `values`, only a hole at the end counts
        if tail is None:
            continue
        where = f"{os.path.basename(file.path)}: " if len(catalog.files) > 1 else ""
        weighty = any(role(name) not in ("bias", "buffer") and not may_be_zero(name) for name in tail.whole)
        size = tail.end - tail.begin
        small = not tail.whole and tail.hole < _HOLE_AT_LEAST and tail.hole * _HOLE_OF_FILE < file.size
        if tail.hole or (size >= _TAIL_AT_LEAST and len(tail.whole) > 1 and weighty):
            severity = WARNING if tail.hole and small else ERROR
            yield find("file.hole:tail", severity=severity, where=where, zeros=_description(tail))
            zero.update(tail.whole)


def _description(tail: Tail) -> str:
    """Describe a tail for its finding."""
    size = tail.end - tail.begin
    zeros = f"{plural(size, 'byte')} to the end of the file {'is' if size == 1 else 'are'} zero"
    if tail.hole:
        zeros += ", a hole that was never written" if tail.hole >= size else f", {tail.hole:,} of them never written"
    if not tail.whole:
        return zeros if tail.cut is None else f"{zeros}, beginning inside {show(tail.cut)}"
    count = len(tail.whole)
    whole = f"{plural(count, 'tensor')} {'is' if count == 1 else 'are'} all zero"
    return f"{zeros}: {whole}, the first is {show(tail.whole[0])}"


def tail_of(file: WeightFile, *, values: bool) -> Tail | None:
    """Return the zeros at the end of the tensors of a file, or None if there are none or the file is an archive."""
    table = file.table
    ranges = [(*place, name) for name, place in zip(table.names, table.byte_ranges(), strict=True)]
    ends = [end for begin, end, _ in ranges if begin < end]
    if table.quantized:
        scales = (table.scale(k) for k in range(len(ranges)))
        ends += [scale.end for scale in scales if scale is not None]
        packed = (table.packed(k) for k in range(len(ranges)))
        ends += [
            part.end for codes in packed if codes is not None for part in codes.parts.values() if part.file is file
        ]
    ranges = sorted(place for place in ranges if place[0] < place[1])
    if not ranges:
        return None
    end = min(file.size, max(ends))
    hole = min(end, hole_begin(file))
    # Archives end with a nonzero directory, and their entries have a CRC-32.
    if (hole == end and not values) or is_zip(file.read_at(0, 4)):
        return None
    begin = zeros_begin(file, ranges[0][0], hole)
    if begin == end:
        return None
    whole = [name for at, _, name in ranges if at >= begin]
    cut = next((name for at, to, name in ranges if at < begin < to), None)
    return Tail(begin, end, whole, cut, end - hole)


def zeros_begin(file: WeightFile, begin: int, end: int) -> int:
    """Return the offset of the first of the zeros before ``end``, reading backwards down to ``begin``."""
    size = _FIRST_PIECE
    memory = np.empty(0, np.uint8)
    while end > begin:
        at = max(begin, end - size)
        if memory.size < end - at:
            memory = np.empty(size, np.uint8)
        for _ in file_pieces(file, at, end, memory):
            pass  # a single piece
        piece = memory[: end - at]
        if piece.any():
            return at + int(np.flatnonzero(piece)[-1]) + 1
        end, size = at, PIECE
    return begin


def hole_begin(file: WeightFile) -> int:
    """Return the offset of the hole at the end of a file, or the size of the file without such a hole."""
    store = file.store
    if not isinstance(store, LocalStore) or not hasattr(os, "SEEK_DATA") or file.size == 0:
        return file.size
    return store.use(_hole_begin, file.size)  # three system calls if there is no hole


def _hole_begin(descriptor: int, size: int) -> int:
    def has_data(offset: int) -> bool:
        try:
            with keeping_position(descriptor):
                os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as problem:
            return problem.errno != errno.ENXIO  # other errors: the file system does not support holes
        return True

    # A truncated file has no data past its end either; reading it will raise an error.
    if has_data(size - 1) or os.fstat(descriptor).st_size < size:
        return size
    low, high = 0, size  # data follows every offset below low, but no data follows high
    while low < high:
        middle = (low + high) // 2
        if has_data(middle):
            low = middle + 1
        else:
            high = middle
    return low
