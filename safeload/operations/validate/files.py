"""Check the files themselves: indices against shards, missing and damaged shards, CRC-32 of zip entries."""

from __future__ import annotations

import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, NamedTuple

from ...base.paths import dangling, snapshot_of
from ...base.text import clip, plural, printable, show
from ...engine.codes.source import file_pieces, in_order
from ...engine.run.weight_file import WeightFile, open_without_table
from ...errors import (
    ForbiddenError,
    FormatError,
    LimitError,
    MissingShardError,
    SafeloadError,
    UnsupportedError,
    one_line,
)
from ...formats.folder import CONFIG, RESUME, ExpectedShards, choose_whole, listed_shards, read_config
from ...formats.foreign import is_zip
from ...formats.numbered import MOST_MISSING, PART, STEMS, NumberedFiles, sets_of
from ...formats.registry import WEIGHT_SUFFIXES, OpenRequest, open_file
from ...formats.zip import STORED, Archive, ZipEntry
from ...stores.files import Files, Location
from ...stores.json_file import read_json
from ..sources.catalog import Catalog
from .findings import Finding, find

# Numbers usually have five digits. DeepSeek writes six after "of", a few models two.
_SHARD = re.compile(r"(.*)-([0-9]{1,18})-of-([0-9]{1,18})(\..*)", re.ASCII | re.DOTALL)

# Rules about unreadable files, by error class.
_REFUSALS = (
    (MissingShardError, "index.shard:opening"),
    (ForbiddenError, "file.forbidden"),
    (UnsupportedError, "file.unsupported"),
    (LimitError, "file.limit"),
    (SafeloadError, "file.format"),
)

# The advice lists at most this many files, each with at most this many characters.
_LISTED, _NAME_LENGTH = 20, 100


def check_index(catalog: Catalog) -> Iterator[Finding]:
    """Check an ``index.json`` against its shards. Without an index, check the numbers in the names of shards."""
    if catalog.index is None:
        groups: dict[tuple[str, str, str], dict[int, int]] = {}  # number of each shard to its digits
        for path in catalog.files:
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
        return
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
        if file.table.quantized and (scale := file.table.scales.get(k)) is not None
    )
    ignored = sum(part.end - part.begin for part in catalog.ignored.values())
    if total_size is not None and total_size not in (nbytes, nbytes + scales, nbytes + ignored):
        yield find("index.total_size", index=base, total_size=total_size, nbytes=nbytes + scales)
    listed: set[tuple[WeightFile, int]] = {(file, k) for _, file, k in catalog.entries()}
    for file in catalog.weight_files:
        for k, name in enumerate(file.table.names):
            if (file, k) not in listed:
                yield find("index.unlisted", name, shard=os.path.basename(file.path), index=base)


# ---- CRC-32 ----


class FileEntry(NamedTuple):
    """An entry of an archive."""

    archive: Archive
    file: WeightFile  # the archive's file
    info: ZipEntry  # the entry in the central directory
    begin: int  # first byte of the entry in the file
    tensors: list[str]  # names of the tensors in the entry

    def finding(self, fault: str) -> Finding:
        """Return the finding for a fault."""
        more = f" (with {plural(len(self.tensors) - 1, 'more tensor')})" if len(self.tensors) > 1 else ""
        tensor = self.tensors[0] if self.tensors else None
        return find("file.crc", tensor, entry=show(self.info.name), path=self.file.path, more=more, fault=fault)


def entries_of(catalog: Catalog) -> list[FileEntry]:
    """Return all entries of zip archives, compressed entries last."""
    entries = [entry for file in catalog.weight_files for entry in _entries(file, catalog.format)]
    return sorted(entries, key=lambda entry: entry.info.method != STORED)


def faults_of(entries: Sequence[FileEntry], threads: int | None) -> list[str | None]:
    """Return the fault of each entry with a wrong CRC-32 or unreadable bytes; None for good entries."""
    stored = [entry for entry in entries if entry.info.method == STORED]
    nbytes = sum(entry.info.packed for entry in stored)
    # Compressed entries run in sequence, because an archive caches a single header.
    return [*in_order(_fault_of, stored, threads, nbytes), *map(_fault_of, entries[len(stored) :])]


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
    if not is_zip(file.read_at(0, 4)):
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


def _fault_of(entry: FileEntry) -> str | None:
    """Return the fault of an entry, or None for a good entry."""
    info = entry.info
    crc = 0
    try:
        pieces: Iterable[bytes | memoryview] = (
            file_pieces(entry.file, entry.begin, entry.begin + info.packed)
            if info.method == STORED
            else entry.archive.inflate(info.name)
        )
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
    except (SafeloadError, OSError) as problem:
        return one_line(problem)
    return None if crc == info.crc else f"CRC-32 of its bytes is {crc:08x}, but the directory says {info.crc:08x}"


# ---- folders that do not open ----


def refusal(problem: SafeloadError | OSError) -> Finding:
    """Return the finding for an error that opening raised."""
    if isinstance(problem, OSError):
        return find("file.read", problem=one_line(problem))
    return find(next(rule for kind, rule in _REFUSALS if isinstance(problem, kind)), problem=problem)


def check_shards(
    path: str, files: Files, opening: Mapping[str, Any]
) -> tuple[list[Finding], list[Location], Mapping[str, Any] | None] | None:
    """Check each shard that a path needs; return None if it does not need several files, or all are good.

    Return findings, the last of which lists the files to fetch again; the good shards; and the config.
    """
    bad: dict[str, Finding] = {}  # by name; the index comes first
    try:
        expected = expected_shards(path, files)
    except (SafeloadError, OSError) as problem:
        bad[files.split(str(getattr(problem, "path", None) or path))[1]] = refusal(problem)
        try:
            expected = expected_shards(path, files, indexed=False)
        except (SafeloadError, OSError):  # the error of opening says it
            return None
    if expected is None:
        return None
    findings: list[Finding] = []
    config = None
    try:
        config = read_config(expected.folder, files)
    except (SafeloadError, OSError) as problem:
        findings.append(refusal(problem))
    unread = [CONFIG] if findings else []
    request = OpenRequest(None, opening.get("root"), opening.get("unknown_globals") == "inert", files)
    names = sorted(expected.names)
    shards = dict(zip(names, files.each(lambda name: _check_shard(name, expected, request), names), strict=True))
    count = plural(len(bad) + len(shards), "shard")
    bad |= {name: fault for name, (fault, _) in shards.items() if fault is not None}
    findings += bad.values()
    good = [Location(files, files.join(expected.folder, name)) for name in names if shards[name][1] is not None]
    if bad:
        message = f"{len(bad):,} of {count} {'is' if len(bad) == 1 else 'are'} missing or damaged"
        if expected.total_size is not None and all(fault.code == "index.shard" for fault in bad.values()):
            absent = expected.total_size - sum(nbytes or 0 for _, nbytes in shards.values())
            message += f" ({absent:,} bytes)" if absent > 0 else ""
        names = [*bad, *unread]
        listed = ", ".join(clip(printable(name), _NAME_LENGTH) for name in names[:_LISTED])
        advice = f"fetch again: {listed}" + (f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else "")
        with suppress(SafeloadError, OSError):  # https lists no folders
            if files.is_folder(files.join(expected.folder, RESUME)):
                advice = "this is an unfinished conversion: repeat it with resume=True"
        findings.append(find("index.fetch", problem=message, advice=advice))
    return (findings, good, config) if findings else None


def _check_shard(name: str, expected: ExpectedShards, request: OpenRequest) -> tuple[Finding | None, int | None]:
    """Compare the tensors of a shard with the index; return its fault and its bytes, None if it does not open."""
    files, shown = request.files, show(name)[1:-1]
    try:
        opened = open_file(files.join(expected.folder, name), request)
    except FileNotFoundError as problem:
        listed = f", but {expected.listed_in} lists it" if expected.listed_in is not None else ""
        link = dangling(problem.filename)
        return find("index.shard", name=f"{shown}{link}," if link else shown, listed=listed), None
    except (SafeloadError, OSError) as problem:
        return refusal(problem), None
    with ExitStack() as stack:
        for file in opened.files:
            stack.callback(file.close)
        tables = [file.table for file in opened.files]
        nbytes = sum(sum(table.sizes()) for table in tables)
        absent = [tensor for tensor in expected.names[name] if all(table.find(tensor) < 0 for table in tables)]
    if not absent:
        return None, nbytes
    listed = f"{plural(len(expected.names[name]), 'tensor')} that {expected.listed_in} lists"
    return find("index.tensor", name=shown, absent=len(absent), listed=listed, first=show(min(absent))), nbytes


def expected_shards(path: str, files: Files, *, indexed: bool = True) -> ExpectedShards | None:
    """List the shards that a folder, an ``index.json`` or a part of a GGUF file needs; None if it is a single file."""
    path = path if files.remote else snapshot_of(path) or path
    folder, base = files.split(path)
    numbered: NumberedFiles | None
    if base.endswith(".json"):
        if indexed:
            return listed_shards(folder, base, files)
        path = folder
    if files.is_folder(path):
        names = [name for name, is_folder in files.listing(path) if not is_folder]
        names = [name for name in names if indexed or not name.endswith(".json")]
        try:
            chosen = choose_whole(names, path, [*STEMS], Location(files, path)) or choose_whole(names, path, [*STEMS])
            chosen = chosen or []
        except MissingShardError:
            chosen = []
        if len(chosen) == 1:
            return listed_shards(path, chosen[0], files) if chosen[0].endswith(".json") else None
        sets = [numbered for numbered in sets_of(names) if numbered.suffix.endswith(tuple(WEIGHT_SUFFIXES))]
        folder, numbered = path, next((each for each in sets if each.in_order == chosen), None)
        numbered = sets[0] if numbered is None and len(sets) == 1 else numbered
    else:
        part = PART.fullmatch(base)
        if part is None or part[4] != ".gguf":
            return None
        names = [name for name, is_folder in files.listing(folder) if not is_folder]
        numbered = next((numbered for numbered in sets_of(names) if base in numbered.files.values()), None)
    if numbered is None or int(numbered.total) > len(numbered.files) + MOST_MISSING:
        return None
    return ExpectedShards(folder, None, dict.fromkeys([*numbered.in_order, *numbered.missing()], ()), None)
