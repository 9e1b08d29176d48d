"""Find zeros in files that no writer meant: tails of stopped downloads, and blocks that a copy or a disk lost.

Pruned tensors, padding rows and zero initializations are zeros too. A run of zeros counts as damage if its ends follow
the blocks of the file instead of the rows of a tensor, or if it is long and continues into another tensor.
"""

from __future__ import annotations

import errno
import math
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...base.arrays import Array
from ...base.cached import cached_property
from ...base.text import plural, show
from ...engine.codes.pieces import PIECE, file_pieces
from ...engine.run.weight_file import WeightFile
from ...formats.foreign import is_zip
from ...formats.registry import NPZ
from ...stores.local import LocalStore, keeping_position
from ..measure.stats import TensorStats
from ..sources.catalog import Catalog
from .findings import ERROR, WARNING, Finding, find

# Files are written, sent and lost in blocks of this size or multiples.
_BLOCK = 4096
# Shorter runs of zeros are not judged.
_RUN_AT_LEAST = 64 << 10
# A run this long is damage if it continues into another tensor, or if it was never written.
_LONG = 1 << 20
# A tensor with fewer bytes of zeros holds no half of a run.
_HALF = _RUN_AT_LEAST // 2
# Bytes of the largest element.
_LARGEST_ITEM = 16
# Blocks of quantized values end inside a block of the file; the byte beside a lost block can be 0 by chance.
_SLACK = 3
# Downloads that allocate their file in advance leave zeros at its end if they stop. A shorter tail of zeros does not
# count as a stopped download, unless it is a hole.
_TAIL_AT_LEAST = 1 << 20
# A hole at the end below both limits without a whole tensor is only a warning, because writers can skip blocks of
# zeros.
_HOLE_AT_LEAST = 64 << 10
_HOLE_OF_FILE = 1000
# Bytes to read first in search of the ends of zeros. The last byte of a file is nearly always nonzero.
_FIRST_PIECE = 64 << 10
# A file with more holes was written sparsely, and its holes mean nothing.
_MOST_HOLES = 1000

# Tensors that can be zero in good files: biases, the second factor of an untrained LoRA adapter, counters and caches of
# torch modules, zero points of symmetric quantization.
_MAY_BE_ZERO = re.compile(
    r"(?i:.*(?:^|[._])(?:bias(?:es)?|beta|lora_(?:embedding_)?b|lora(?:_linear_layer)?[._]up|running_mean|num_batches_tracked|position_ids"
    r"|inv_freq|mask|[kv]_cache|zero_?points?|q?zeros|g_idx)(?:\..*)?)|[bB]",
    re.ASCII | re.DOTALL,
)
# States of optimizers, which begin as zeros and stay zero for rows without gradients.
_OPTIMIZER = re.compile(
    r"(?i:(?:.*[._/])?(?:optimizer\w*|optim\w*|opt_state|exp_avg\w*|max_exp_avg_sq|momentum_buffer|square_avg|grad_avg"
    r"|acc_delta|prev|state)(?:[._/].*)?)",
    re.ASCII | re.DOTALL,
)


def may_be_zero(name: str) -> bool:
    """True if a whole tensor of this name can be zero in a good file."""
    return _MAY_BE_ZERO.fullmatch(name) is not None or _OPTIMIZER.fullmatch(name) is not None


class StoredRange(NamedTuple):
    """The bytes of a stored tensor."""

    begin: int
    end: int
    name: str
    tensor: str  # the tensor that it belongs to, if it is a part of a packed tensor
    row: int  # bytes of a row
    item: int  # bytes of an element; 1 if zeros can end inside an element

    def on_row(self, offset: int) -> bool:
        """True if a row begins or ends at an offset."""
        return self.begin < offset < self.end and (offset - self.begin) % self.row == 0


def _places(file: WeightFile) -> list[StoredRange]:
    """Return the stored tensors of a file that have bytes, in the order of their bytes."""
    table = file.table
    places = []
    for k, (name, (begin, end)) in enumerate(zip(table.names, table.byte_ranges(), strict=True)):
        packed = table.packed.get(k)
        if packed is not None:
            for part in packed.parts.values():
                if part.file is file and part.begin < part.end:
                    row_size = _row_size(part.end - part.begin, part.shape)
                    places.append(StoredRange(part.begin, part.end, part.name, name, row_size, 1))
        elif begin < end:
            row = table.row(k)
            item = 1 if row.blocked or row.bits < 8 else row.bits // 8
            places.append(StoredRange(begin, end, name, name, _row_size(end - begin, table.shape(k)), item))
    return sorted(set(places))


def _row_size(nbytes: int, shape: Sequence[int]) -> int:
    """Return the bytes of a row of the last axis; all bytes if rows share bytes."""
    rows = math.prod(shape[:-1])
    return nbytes // rows if rows and nbytes % rows == 0 else nbytes


# ---- runs ----


class ZeroRun(NamedTuple):
    """A run of zeros as long as possible."""

    begin: int
    end: int
    places: Sequence[StoredRange]  # the stored tensors with these bytes

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def whole(self) -> list[StoredRange]:
        """The stored tensors entirely in the run."""
        return [place for place in self.places if self.begin <= place.begin and place.end <= self.end]

    @property
    def on_blocks(self) -> bool:
        """True if both ends are on block boundaries of the file, up to elements that happen to be 0 in part."""
        before, after = (place.item - 1 or _SLACK for place in (self.places[0], self.places[-1]))
        return -self.begin % _BLOCK <= before and self.end % _BLOCK <= after

    @property
    def on_rows(self) -> bool:
        """True if both ends are row boundaries or the ends of tensors."""
        first, last = self.places[0], self.places[-1]
        begin = self.begin + (-(self.begin - first.begin) % first.item)
        end = self.end - (self.end - last.begin) % last.item
        return (begin <= first.begin or first.on_row(begin)) and (end >= last.end or last.on_row(end))


def _finding(run: ZeroRun, unwritten: bool, where: str, role: Callable[[str], str | None]) -> Finding | None:
    """Judge a run of zeros; return None if it does not indicate damage."""
    whole = {place.name for place in run.whole}
    cut = [place for place in run.places if place.name not in whole]
    touched = run.whole + [p for p in cut if min(p.end, run.end) - max(p.begin, run.begin) >= _BLOCK]
    if all(may_be_zero(place.name) or role(place.tensor) in ("bias", "buffer") for place in touched):
        return None
    in_tensors = len(touched) > 1
    long = run.size >= _LONG
    never = ", never written," if unwritten else ""
    first = run.places[0].name
    inside = show(first)
    if in_tensors:
        inside = f"{plural(len(run.places), 'tensor')}, {inside} to {show(run.places[-1].name)}"
    zeros = f"{where}{run.size:,} bytes from byte {run.begin:,} are zero{never} in {inside}"
    if long and (in_tensors or unwritten):
        return find("file.hole" if in_tensors or not run.on_rows else "file.hole:unwritten", zeros=zeros)
    if run.size < _RUN_AT_LEAST or not run.on_blocks:
        return None
    if not run.on_rows:
        return find("file.hole", zeros=zeros)
    inner = run.places[0].begin < run.begin and run.end < run.places[-1].end
    return find("file.hole:rows", zeros=zeros) if inner else None


class _File:
    """A file to search for zeros."""

    def __init__(self, file: WeightFile, where: str) -> None:
        self.file, self.where = file, where  # the prefix of messages

    @cached_property
    def places(self) -> list[StoredRange]:
        """The stored tensors that have bytes, in the order of their bytes."""
        return _places(self.file)

    @cached_property
    def end(self) -> int:
        """The end of the last tensor."""
        return min(self.file.size, max(place.end for place in self.places))

    def run(self, begin: int, end: int) -> ZeroRun | None:
        """Return the run around zeros; None if no tensor has them."""
        places = self.places
        begin, end = (max(begin, places[0].begin), min(end, self.end)) if places else (0, 0)
        if begin >= end:
            return None
        begin, end = zeros_begin(self.file, places[0].begin, begin), _zeros_end(self.file, end, self.end)
        first = max(0, bisect_right(places, begin, key=lambda place: place.begin) - 1)
        last = bisect_right(places, end - 1, key=lambda place: place.begin)
        inside = [place for place in places[first:last] if place.begin < end and begin < place.end]
        return ZeroRun(begin, end, inside) if inside else None


def zeros_begin(file: WeightFile, begin: int, end: int) -> int:
    """Return the offset of the first of the zeros before ``end``, reading backwards down to ``begin``."""
    step = _FIRST_PIECE
    while end > begin:
        at = max(begin, end - step)
        chunk = b"".join(map(bytes, file_pieces(file, at, end)))
        nonzero = np.flatnonzero(np.frombuffer(chunk, np.uint8))
        if nonzero.size:
            return at + int(nonzero[-1]) + 1
        end, step = at, min(2 * step, PIECE)
    return begin


def _zeros_end(file: WeightFile, begin: int, end: int) -> int:
    """Return the end of the zeros after ``begin``, reading up to ``end``."""
    step = _FIRST_PIECE
    while begin < end:
        chunk = np.frombuffer(file.read_at(begin, min(step, end - begin)), np.uint8)
        nonzero = np.flatnonzero(chunk)
        if nonzero.size or not chunk.size:
            return begin + (int(nonzero[0]) if nonzero.size else 0)
        begin, step = begin + chunk.size, min(2 * step, PIECE)
    return end


def _zeros(file: WeightFile, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield runs of at least eight blocks of zeros in ascending ranges."""
    memory = np.empty(PIECE, np.uint8)
    begin = end = 0  # of the run so far
    for first, last in ranges:
        at = max(0, first - first % _BLOCK)
        for piece in file_pieces(file, at, min(file.size, last), memory):
            for a, b in _zero_blocks(np.frombuffer(piece, np.uint8)):
                if at + a != end:
                    if end - begin >= _HALF - 2 * _BLOCK:
                        yield begin, end
                    begin = at + a
                end = at + b
            at += len(piece)
    if end - begin >= _HALF - 2 * _BLOCK:
        yield begin, end


def _zero_blocks(piece: Array) -> list[tuple[int, int]]:
    """Return the runs of whole blocks of zeros in a piece."""
    count = piece.size // _BLOCK
    if not count:
        return []
    zero = ~piece[: count * _BLOCK].view(np.uint64).reshape(count, -1).any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], zero, [False])).astype(np.int8)))
    return [(int(a) * _BLOCK, int(b) * _BLOCK) for a, b in zip(edges[::2], edges[1::2], strict=True)]


# ---- holes of the file system ----


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
    return bisect_left(range(size), True, key=lambda offset: not has_data(offset))


def _holes_of(file: WeightFile) -> list[tuple[int, int]]:
    """Return the long holes of a file, without one at its end; none if the system does not tell."""
    store = file.store
    if not isinstance(store, LocalStore) or not hasattr(os, "SEEK_HOLE") or file.size < _LONG:
        return []
    return store.use(_long_holes, file.size)


def _long_holes(descriptor: int, size: int) -> list[tuple[int, int]]:
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


# ---- checks ----

# These add the names of the zero tensors that they report to ``zero``.


def _files(catalog: Catalog) -> Iterator[tuple[WeightFile, str]]:
    """Yield the files that can have lost blocks, with the prefix of messages. Archives have checksums."""
    for file in catalog.weight_files if catalog.format != NPZ else ():
        yield file, f"{os.path.basename(file.path)}: " if len(catalog.files) > 1 else ""


def check_tails(
    catalog: Catalog, role: Callable[[str], str | None], zero: set[str], *, values: bool
) -> Iterator[Finding]:
    """Find files with an unwritten tail; without ``values``, only a hole at the end counts."""
    for file, where in _files(catalog):
        table = file.table
        ranges = sorted((*place, name) for name, place in zip(table.names, table.byte_ranges(), strict=True))
        ranges = [place for place in ranges if place[0] < place[1]]
        if not ranges:
            continue
        ends = [end for _, end, _ in ranges]
        if table.quantized:
            ends += [place.end for place in _places(file)]
            ends += [scale.end for scale in table.scales.values()]
        end = min(file.size, max(ends))
        hole = min(end, hole_begin(file))
        if (hole == end and not values) or is_zip(file.read_at(0, 4)):
            continue
        begin = zeros_begin(file, ranges[0][0], hole)
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


def check_unwritten(catalog: Catalog, role: Callable[[str], str | None], zero: set[str]) -> Iterator[Finding]:
    """Find long holes of the file system inside files."""
    for file in _searched(catalog):
        for hole in _holes_of(file.file):
            run = file.run(*hole)
            if run is None or run.end >= file.end or any(place.tensor in zero for place in run.places):
                continue
            finding = _finding(run, True, file.where, role)
            if finding is not None:
                yield finding
                zero.update(place.tensor for place in run.whole)


def check_zeros(
    catalog: Catalog, stats: Mapping[str, TensorStats], role: Callable[[str], str | None], zero: set[str]
) -> Iterator[Finding]:
    """Find runs of zeros inside files."""
    # Only tensors with many zeros are read again, and the parts of packed tensors in local files.
    known = frozenset(zero)  # in a reported hole
    tensors_of: dict[WeightFile, dict[str, str]] = {}  # names by stored name
    if _has_many_zeros(stats):
        for name, weights, k in catalog.entries():
            tensors_of.setdefault(weights, {})[weights.table.names[k]] = name
    for file in _searched(catalog):
        tensors = tensors_of.get(file.file, {})
        if not tensors and not file.file.table.quantized:
            continue
        rows = {stored: stats[name] for stored, name in tensors.items() if name in stats}
        suspects = [place for place in file.places if _is_suspect(place, rows.get(place.tensor), file.file)]
        judged = _holes_of(file.file)
        done = 0
        for core in _zeros(file.file, _joined(suspects)):
            run = file.run(*core) if core[0] >= done else None
            if run is None or any(place.tensor in known for place in run.places):
                continue
            done = run.end
            if any(begin < run.end and run.begin < end for begin, end in judged):
                continue
            finding = _finding(run, False, file.where, role)
            if finding is not None:
                yield finding
                zero.update(tensors.get(place.tensor, place.tensor) for place in run.whole)


def _searched(catalog: Catalog) -> Iterator[_File]:
    for file, where in _files(catalog):
        if not file.unpacked and file.table.count and not is_zip(file.read_at(0, 4)):
            yield _File(file, where)


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


def _joined(places: Iterable[StoredRange]) -> list[tuple[int, int]]:
    """Return the ranges of places, joined in the same blocks, without ranges too short for a run."""
    joined: list[tuple[int, int]] = []
    for place in places:
        if joined and place.begin - place.begin % _BLOCK <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(place.end, joined[-1][1])
        else:
            joined.append((place.begin, place.end))
    return [(begin, end) for begin, end in joined if end - begin >= _HALF]
