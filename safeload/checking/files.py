"""Check the files themselves: indices against shards, missing and damaged shards, CRC-32 of zip entries, lost blocks.

Zeros that no writer meant are tails of stopped downloads, and blocks that a copy or a disk lost. Pruned tensors,
padding rows and zero initializations are zeros too. A run of zeros counts as damage if its ends follow the blocks of
the file instead of the rows of a tensor, or if it is long and continues into another tensor.
"""

from __future__ import annotations

import errno
import math
import os
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from .. import errors
from ..conversion.catalog import Catalog
from ..conversion.executors import unlisted_in
from ..core.files import Files, LocalStore, Location, keeping_position, read_json
from ..core.foreign import is_zip
from ..core.memory import thread_count
from ..core.registry import NPZ, WEIGHT_SUFFIXES, OpenRequest, open_file
from ..core.source import PIECE, file_pieces
from ..core.text import clip, dangling, listed, plural, printable, show
from ..core.thread_group import in_order
from ..core.weight_file import WeightFile, open_without_table
from ..core.zip import STORED, Archive, ZipEntry
from ..errors import FormatError, MissingShardError, SafeloadError, one_line
from ..formats.folder import CONFIG, RESUME, ExpectedShards, choose_whole, listed_shards, read_config
from ..formats.numbered import MOST_MISSING, PART, STEMS, sets_of
from ..remote.hub_cache import snapshot_of
from .findings import ERROR, WARNING, Finding, find
from .stats import TensorStats

# Like `PART`, for shards of any suffix.
_SHARD = re.compile(r"(.*)-([0-9]{1,18})-of-([0-9]{1,18})(\..*)", re.ASCII | re.DOTALL)

# Rules about unreadable files, by error class.
_REFUSALS = (
    (OSError, "file.read"),
    (MissingShardError, "index.shard:opening"),
    (errors.ForbiddenError, "file.forbidden"),
    (errors.UnsupportedError, "file.unsupported"),
    (errors.LimitError, "file.limit"),
    (SafeloadError, "file.format"),
)

# The advice lists at most this many files, each with at most this many characters.
_LISTED, _NAME_LENGTH = 20, 100


def check_index(catalog: Catalog) -> Iterator[Finding]:
    """Check an ``index.json`` against its shards. Without an index, check the numbers in the names of shards."""
    if catalog.index is None:
        sets = sets_of([os.path.basename(path) for path in catalog.files], _SHARD)
        if sum(len(numbered.files) for numbered in sets) > 1:  # a single shard is opened on its own
            yield from (find("index.shard", name=name, listed="") for each in sets for name in each.missing())
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
    for file, names in unlisted_in(catalog.checkpoints[0]).items():
        yield from (find("index.unlisted", name, shard=os.path.basename(file.path), index=base) for name in names)


# ---- CRC-32 ----


class FileEntry(NamedTuple):
    """An entry of an archive."""

    archive: Archive
    file: WeightFile  # the archive's file
    info: ZipEntry  # the entry in the central directory
    begin: int  # first byte of the entry in the file
    tensors: list[str]  # names of the tensors in the entry

    def finding(self, fault: str) -> Finding:
        more = f" (with {plural(len(self.tensors) - 1, 'more tensor')})" if len(self.tensors) > 1 else ""
        tensor = self.tensors[0] if self.tensors else None
        return find("file.crc", tensor, entry=show(self.info.name), path=self.file.path, more=more, fault=fault)


def entries_of(catalog: Catalog) -> list[FileEntry]:
    """Return all entries of zip archives, compressed entries last."""
    entries = (entry for file in catalog.weight_files for entry in _entries(file, catalog.format))
    return sorted(entries, key=lambda entry: entry.info.method != STORED)


def faults_of(entries: Mapping[str, FileEntry], threads: int | None) -> dict[str, str]:
    """Return the fault of each entry with a wrong CRC-32 or unreadable bytes, by the number of the entry."""
    stored = [entry for entry in entries.values() if entry.info.method == STORED]
    nbytes = sum(entry.info.packed for entry in stored)
    # Compressed entries, which are the last, run in sequence, because an archive caches a single header.
    faults = [*in_order(_fault_of, stored, thread_count(nbytes, threads))]
    faults += map(_fault_of, [*entries.values()][len(stored) :])
    return {number: fault for number, fault in zip(entries, faults, strict=True) if fault is not None}


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
    return find(next(rule for kind, rule in _REFUSALS if isinstance(problem, kind)), problem=one_line(problem))


def check_shards(
    path: str, files: Files, opening: Mapping[str, Any], cause: SafeloadError | OSError
) -> tuple[list[Finding], list[Location], Mapping[str, Any] | None]:
    """Return findings on a path that does not open, the files to fetch again last; its good shards; and the config."""
    refused = [refusal(cause)]
    bad: dict[str, Finding] = {}  # by name; the index comes first
    try:
        expected = expected_shards(path, files)
    except (SafeloadError, OSError) as problem:
        bad[files.split(str(getattr(problem, "path", None) or path))[1]] = refusal(problem)
        try:
            expected = expected_shards(path, files, indexed=False)
        except (SafeloadError, OSError):
            expected = None
    if expected is None:
        return refused, [], None
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
        advice = f"fetch again: {listed((clip(printable(name), _NAME_LENGTH) for name in (*bad, *unread)), _LISTED)}"
        with suppress(SafeloadError, OSError):  # https lists no folders
            if files.is_folder(files.join(expected.folder, RESUME)):
                advice = "this is an unfinished conversion: repeat it with resume=True"
        findings.append(find("index.fetch", problem=message, advice=advice))
    return (findings, good, config) if findings else (refused, [], None)  # all shards are good


def _check_shard(name: str, expected: ExpectedShards, request: OpenRequest) -> tuple[Finding | None, int | None]:
    """Compare the tensors of a shard with the index; return its fault and its bytes, None if it does not open."""
    files, shown = request.files, show(name)[1:-1]
    try:
        opened = open_file(files.join(expected.folder, name), request)
    except FileNotFoundError as problem:
        why = f", but {expected.listed_in} lists it" if expected.listed_in is not None else ""
        link = dangling(problem.filename)
        return find("index.shard", name=f"{shown}{link}," if link else shown, listed=why), None
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
    tensors = f"{plural(len(expected.names[name]), 'tensor')} that {expected.listed_in} lists"
    return find("index.tensor", name=shown, absent=len(absent), listed=tensors, first=show(min(absent))), nbytes


def expected_shards(path: str, files: Files, *, indexed: bool = True) -> ExpectedShards | None:
    """List the shards that a folder, an ``index.json`` or a part of a GGUF file needs; None if it is a single file."""
    path = path if files.remote else snapshot_of(path) or path
    folder, base = files.split(path)
    if base.endswith(".json"):
        if indexed:
            return listed_shards(folder, base, files)
        path = folder
    if files.is_folder(path):
        listing = files.listing(path)
        names = [name for name, is_folder in listing if not is_folder and (indexed or not name.endswith(".json"))]
        chosen: list[str] | None = None
        with suppress(MissingShardError):
            chosen = choose_whole(names, path, [*STEMS], Location(files, path)) or choose_whole(names, path, [*STEMS])
        if chosen is not None and len(chosen) == 1:
            return listed_shards(path, chosen[0], files) if chosen[0].endswith(".json") else None
        folder, sets = path, [each for each in sets_of(names) if each.suffix.endswith(tuple(WEIGHT_SUFFIXES))]
        sets = [each for each in sets if each.in_order == chosen] or sets
    else:
        part = PART.fullmatch(base)
        if part is None or part[4] != ".gguf":
            return None
        names = [name for name, is_folder in files.listing(folder) if not is_folder]
        sets = [each for each in sets_of(names) if base in each.files.values()]
    if len(sets) != 1 or int(sets[0].total) > len(sets[0].files) + MOST_MISSING:
        return None
    return ExpectedShards(folder, None, dict.fromkeys([*sets[0].in_order, *sets[0].missing()], ()), None)


# ---- zeros ----

_BLOCK = 4096  # files are written, sent and lost in blocks of this size or multiples
_RUN_AT_LEAST = 64 << 10  # shorter runs of zeros are not judged
_LONG = 1 << 20  # a run this long is damage if it continues into another tensor, or if it was never written
_HALF = _RUN_AT_LEAST // 2  # a tensor with fewer bytes of zeros holds no half of a run
_LARGEST_ITEM = 16  # bytes of the largest element
# Blocks of quantized values end inside a block of the file; the byte beside a lost block can be 0 by chance.
_SLACK = 3
# Downloads that allocate their file in advance leave zeros at its end if they stop. A shorter tail of zeros does not
# count as a stopped download, unless it is a hole.
_TAIL_AT_LEAST = 1 << 20
# A hole at the end below both limits without a whole tensor is only a warning, because writers can skip blocks of
# zeros.
_HOLE_AT_LEAST, _HOLE_OF_FILE = 64 << 10, 1000
# Bytes to read first in search of the ends of zeros. The last byte of a file is nearly always nonzero.
_FIRST_PIECE = 64 << 10
_MOST_HOLES = 1000  # a file with more holes was written sparsely, and its holes mean nothing

# Tensors that can be zero in good files.
_MAY_BE_ZERO = re.compile(
    # Biases, the second factor of an untrained LoRA adapter, counters and caches of torch modules, zero points of
    # symmetric quantization.
    r"(?i:.*(?:^|[._])(?:bias(?:es)?|beta|lora_(?:embedding_)?b|lora(?:_linear_layer)?[._]up|running_mean|num_batches_tracked|position_ids"
    r"|inv_freq|mask|[kv]_cache|zero_?points?|q?zeros|g_idx)(?:\..*)?)|[bB]"
    # States of optimizers, which begin as zeros and stay zero for rows without gradients.
    r"|(?i:(?:.*[._/])?(?:optimizer\w*|optim\w*|opt_state|exp_avg\w*|max_exp_avg_sq|momentum_buffer|square_avg|grad_avg"
    r"|acc_delta|prev|state)(?:[._/].*)?)",
    re.ASCII | re.DOTALL,
)


def may_be_zero(name: str) -> bool:
    """True if a whole tensor of this name can be zero in a good file."""
    return _MAY_BE_ZERO.fullmatch(name) is not None


class StoredRange(NamedTuple):
    """The bytes of a stored tensor."""

    begin: int
    end: int
    name: str
    tensor: str  # the tensor that it belongs to, if it is a part of a packed tensor
    row: int  # bytes of a row of the last axis; all bytes if rows share bytes
    item: int  # bytes of an element; 1 if zeros can end inside an element


def _places(file: WeightFile) -> list[StoredRange]:
    """Return the stored tensors of a file that have bytes, in the order of their bytes."""
    table = file.table
    parts = []
    for k, (name, (begin, end)) in enumerate(zip(table.names, table.byte_ranges(), strict=True)):
        packed = table.packed.get(k)
        if packed is None:
            row = table.row(k)
            item = 1 if row.blocked or row.bits < 8 else row.bits // 8
            parts.append((begin, end, name, name, table.shape(k), item))
        else:
            own = (part for part in packed.parts.values() if part.file is file)
            parts += [(part.begin, part.end, part.name, name, part.shape, 1) for part in own]
    places = set()
    for begin, end, name, tensor, shape, item in parts:
        nbytes, rows = end - begin, math.prod(shape[:-1])
        if nbytes > 0:
            row_size = nbytes // rows if rows and nbytes % rows == 0 else nbytes
            places.add(StoredRange(begin, end, name, tensor, row_size, item))
    return sorted(places)


def finding_of(
    begin: int,
    end: int,
    places: Sequence[StoredRange],  # with these bytes
    *,
    unwritten: bool,
    where: str,
    role: Callable[[str], str | None],
) -> Finding | None:
    """Judge a run of zeros as long as possible; return None if it does not indicate damage."""
    first, last, nbytes = places[0], places[-1], end - begin
    touched = [
        place
        for place in places
        if (begin <= place.begin and place.end <= end) or min(place.end, end) - max(place.begin, begin) >= _BLOCK
    ]
    if all(may_be_zero(place.name) or role(place.tensor) in ("bias", "buffer") for place in touched):
        return None
    # Both ends are row boundaries or the ends of tensors.
    low, high = begin + (first.begin - begin) % first.item, end - (end - last.begin) % last.item
    on_rows = (low <= first.begin or (low < first.end and (low - first.begin) % first.row == 0)) and (
        high >= last.end or (last.begin < high and (high - last.begin) % last.row == 0)
    )
    # Both ends are block boundaries of the file, up to elements that happen to be 0 in part.
    on_blocks = -begin % _BLOCK <= (first.item - 1 or _SLACK) and end % _BLOCK <= (last.item - 1 or _SLACK)
    inside = show(first.name)
    if len(touched) > 1:
        inside = f"{plural(len(places), 'tensor')}, {inside} to {show(last.name)}"
    never = ", never written," if unwritten else ""
    zeros = f"{where}{nbytes:,} bytes from byte {begin:,} are zero{never} in {inside}"
    if nbytes >= _LONG and (len(touched) > 1 or unwritten):
        return find("file.hole" if len(touched) > 1 or not on_rows else "file.hole:unwritten", zeros=zeros)
    if nbytes < _RUN_AT_LEAST or not on_blocks:
        return None
    if not on_rows:
        return find("file.hole", zeros=zeros)
    return find("file.hole:rows", zeros=zeros) if first.begin < begin and end < last.end else None


def zeros_end(file: WeightFile, at: int, limit: int) -> int:
    """Return the end of the zeros that begin at an offset, or their begin if the limit is below it."""
    step = _FIRST_PIECE
    while at != limit:
        begin, end = sorted((at, max(at - step, limit) if limit < at else min(at + step, limit)))
        nonzero = np.flatnonzero(np.frombuffer(b"".join(map(bytes, file_pieces(file, begin, end))), np.uint8))
        if nonzero.size:
            return begin + int(nonzero[-1] + 1 if limit < at else nonzero[0])
        at, step = begin if limit < at else end, min(2 * step, PIECE)
    return limit


def _zero_blocks(file: WeightFile, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the runs of whole blocks of zeros in ranges that begin at a block; runs end with pieces."""
    memory = np.empty(PIECE, np.uint8)
    for begin, end in ranges:
        for piece in file_pieces(file, begin, min(file.size, end), memory):
            blocks = np.frombuffer(piece, np.uint8)[: len(piece) // _BLOCK * _BLOCK].view(np.uint64)
            zero = ~blocks.reshape(-1, _BLOCK // 8).any(axis=1)
            edges = np.flatnonzero(np.diff(zero, prepend=False, append=False)) * _BLOCK + begin
            yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
            begin += len(piece)


def _joined(ranges: Iterable[tuple[int, int]], least: int) -> Iterator[tuple[int, int]]:
    """Join ascending ranges that touch, and leave out shorter ranges than ``least``."""
    begin = end = 0
    for first, last in ranges:
        if first > end:
            if end - begin >= least:
                yield begin, end
            begin = first
        end = max(end, last)
    if end - begin >= least:
        yield begin, end


# ---- holes of the file system ----


def hole_begin(file: WeightFile) -> int:
    """Return the offset of the hole at the end of a file, or the size of the file without such a hole."""

    def begin_of(descriptor: int, size: int) -> int:
        def has_data(offset: int) -> bool:
            try:
                with keeping_position(descriptor):
                    os.lseek(descriptor, offset, os.SEEK_DATA)
            except OSError as problem:
                return problem.errno != errno.ENXIO  # other errors: the file system does not support holes
            return True

        # A truncated file has no data past its end either; reading it will raise an error.
        if has_data(size - 1) or os.fstat(descriptor).st_size < size:  # three system calls if there is no hole
            return size
        return bisect_left(range(size), True, key=lambda offset: not has_data(offset))

    store = file.store
    if not isinstance(store, LocalStore) or not hasattr(os, "SEEK_DATA") or file.size == 0:
        return file.size
    return store.use(begin_of, file.size)


def _holes_of(file: WeightFile) -> list[tuple[int, int]]:
    """Return the long holes of a file, without one at its end; none if the system does not tell."""

    def long_holes(descriptor: int, size: int) -> list[tuple[int, int]]:
        holes: list[tuple[int, int]] = []
        at = 0
        try:
            with keeping_position(descriptor):
                for _ in range(_MOST_HOLES):
                    begin = os.lseek(descriptor, at, os.SEEK_HOLE)
                    if begin >= size:
                        return holes
                    at = os.lseek(descriptor, begin, os.SEEK_DATA)
                    if at - begin >= _LONG:
                        holes.append((begin, at))
        except OSError:  # no data after the last hole, or no support
            return holes
        return []

    store = file.store
    if not isinstance(store, LocalStore) or not hasattr(os, "SEEK_HOLE") or file.size < _LONG:
        return []
    return store.use(long_holes, file.size)


# These add the names of the zero tensors that they report to ``zero``.


def _files(catalog: Catalog) -> Iterator[tuple[WeightFile, str]]:
    """Yield the files that can have lost blocks, with the prefix of messages. Archives have checksums."""
    for file in catalog.weight_files if catalog.format != NPZ else ():
        if file.table.count and not is_zip(file.read_at(0, 4)):
            yield file, f"{os.path.basename(file.path)}: " if len(catalog.files) > 1 else ""


def check_tails(
    catalog: Catalog, role: Callable[[str], str | None], zero: set[str], *, values: bool
) -> Iterator[Finding]:
    """Find files with an unwritten tail; without ``values``, only a hole at the end counts."""
    for file, where in _files(catalog):
        table = file.table
        places = zip(table.names, table.byte_ranges(), strict=True)
        ranges = sorted((begin, end, name) for name, (begin, end) in places if begin < end)
        if not ranges:
            continue
        ends = [end for _, end, _ in ranges]
        if table.quantized:
            ends += [place.end for place in _places(file)]
            ends += [scale.end for scale in table.scales.values()]
        end = min(file.size, max(ends))
        hole = min(end, hole_begin(file))
        if hole == end and not values:
            continue
        begin = zeros_end(file, hole, ranges[0][0])
        size, never = end - begin, end - hole
        whole = [name for at, _, name in ranges if at >= begin]
        weighty = any(role(name) not in ("bias", "buffer") and not may_be_zero(name) for name in whole)
        if not never and (size < _TAIL_AT_LEAST or len(whole) < 2 or not weighty):
            continue
        zeros = f"{plural(size, 'byte')} to the end of the file {'is' if size == 1 else 'are'} zero"
        if never:
            zeros += ", a hole that was never written" if never >= size else f", {never:,} of them never written"
        if whole:
            count = f"{plural(len(whole), 'tensor')} {'is' if len(whole) == 1 else 'are'} all zero"
            zeros += f": {count}, the first is {show(whole[0])}"
        else:
            cut = next((name for at, to, name in ranges if at < begin < to), None)
            zeros += "" if cut is None else f", beginning inside {show(cut)}"
        small = not whole and never < _HOLE_AT_LEAST and never * _HOLE_OF_FILE < file.size
        yield find("file.hole:tail", severity=WARNING if small else ERROR, where=where, zeros=zeros)
        zero.update(whole)


def check_runs(
    catalog: Catalog, role: Callable[[str], str | None], zero: set[str], stats: Mapping[str, TensorStats] | None = None
) -> Iterator[Finding]:
    """Find runs of zeros inside files: long holes of the file system or, given statistics, other runs."""
    # Only tensors with many zeros are read again, and the parts of packed tensors in local files.
    reported = zero if stats is None else frozenset(zero)  # in a reported hole
    names: dict[WeightFile, dict[str, str]] = {}  # of the tensors by stored name
    if stats is not None and _has_many_zeros(stats):
        for name, weights, k in catalog.entries():
            names.setdefault(weights, {})[weights.table.names[k]] = name
    for file, where in _files(catalog):
        own, holes = names.get(file, {}), [] if file.unpacked else _holes_of(file)
        if file.unpacked or not (holes if stats is None else own or file.table.quantized):
            continue
        places = _places(file)
        first, last = (places[0].begin, min(file.size, max(place.end for place in places))) if places else (0, 0)
        cores: Iterable[tuple[int, int]] = holes
        judged = [(last - 1, last)]  # by `check_tails`
        if stats is not None:
            judged = holes  # by this function without statistics
            rows = {stored: stats[name] for stored, name in own.items() if name in stats}
            suspects = (place for place in places if _is_suspect(place, rows.get(place.tensor), file))
            ranges = _joined(((place.begin - place.begin % _BLOCK, place.end) for place in suspects), _HALF)
            cores = _joined(_zero_blocks(file, ranges), _HALF - 2 * _BLOCK)
        done = first
        for begin, end in cores:
            begin, end = max(begin, done), min(end, last)
            if begin >= end:
                continue
            begin, end = zeros_end(file, begin, first), zeros_end(file, end, last)
            done = end
            at = max(0, bisect_right(places, begin, key=lambda place: place.begin) - 1)
            inside = places[at : bisect_right(places, end - 1, key=lambda place: place.begin)]
            inside = [place for place in inside if begin < place.end]
            if not inside or any(place.tensor in reported for place in inside):
                continue
            if any(low < end and begin < high for low, high in judged):
                continue
            finding = finding_of(begin, end, inside, unwritten=stats is None, where=where, role=role)
            if finding is not None:
                yield finding
                whole = (place.tensor for place in inside if begin <= place.begin and place.end <= end)
                zero.update(own.get(tensor, tensor) for tensor in whole)


def _has_many_zeros(stats: Mapping[str, TensorStats]) -> bool:
    """True if tensors can have a run of zeros, alone or with zero tensors beside it."""
    whole = sum(row.count for row in stats.values() if row.zeros == row.count)
    largest = max((row.zeros for row in stats.values()), default=0)
    return whole * _LARGEST_ITEM >= _RUN_AT_LEAST or largest * _LARGEST_ITEM >= _HALF


def _is_suspect(place: StoredRange, row: TensorStats | None, file: WeightFile) -> bool:
    """True if a stored tensor can hold half of a run, by the statistics of its values."""
    if place.name != place.tensor or row is None:  # codes, whose zeros are not counted
        return not file.remote
    return row.zeros == row.count or row.zeros * (place.end - place.begin) >= _HALF * row.count
