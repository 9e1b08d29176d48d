"""Find zeros inside files that no writer meant: blocks that a download, a copy or a disk lost.

Pruned tensors, padding rows and zero initializations are zeros too. A run of zeros counts as damage if its ends follow
the blocks of the file instead of the rows of a tensor, or if it is long and continues into another tensor.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...base.arrays import Array
from ...base.text import plural, show
from ...engine.codes.pieces import PIECE, file_pieces
from ...engine.run.weight_file import WeightFile
from ...formats.foreign import is_zip
from ...formats.registry import NPZ
from ...stores.local import LocalStore, keeping_position
from ..measure.stats import TensorStats
from ..sources.catalog import Catalog
from .findings import Finding, find

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
        packed = table.packed(k) if table.quantized else None
        if packed is not None:
            parts = [part for part in packed.parts.values() if part.file is file and part.begin < part.end]
            places += [
                StoredRange(part.begin, part.end, part.name, name, _row_size(part.end - part.begin, part.shape), 1)
                for part in parts
            ]
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
        first, last = self.places[0], self.places[-1]
        slack = max(first.item - 1, _SLACK if first.item == 1 else 0)
        early = -self.begin % _BLOCK
        slack_after = max(last.item - 1, _SLACK if last.item == 1 else 0)
        return early <= slack and self.end % _BLOCK <= slack_after

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
    touched = [
        place
        for place in run.places
        if min(place.end, run.end) - max(place.begin, run.begin) >= _BLOCK or place.name in whole
    ]
    weighty = [
        place for place in touched if not may_be_zero(place.name) and role(place.tensor) not in ("bias", "buffer")
    ]
    if not weighty:
        return None
    several = len(touched) > 1
    long = run.size >= _LONG
    never = ", never written," if unwritten else ""
    first = run.places[0].name
    if several:
        inside = f"{plural(len(run.places), 'tensor')}, {show(first)} to {show(run.places[-1].name)}"
    else:
        inside = show(first)
    zeros = f"{where}{run.size:,} bytes from byte {run.begin:,} are zero{never} in {inside}"
    if long and (several or unwritten):
        return find("file.hole" if several or not run.on_rows else "file.hole:unwritten", zeros=zeros)
    if run.size < _RUN_AT_LEAST or not run.on_blocks:
        return None
    if not run.on_rows:
        return find("file.hole", zeros=zeros)
    inner = run.places[0].begin < run.begin and run.end < run.places[-1].end
    return find("file.hole:rows", zeros=zeros) if inner else None


class _File:
    """A file to search for zeros."""

    def __init__(self, file: WeightFile, places: list[StoredRange]) -> None:
        self.file, self.places = file, places
        self._begins = [place.begin for place in places]
        self.begin, self.end = places[0].begin, min(file.size, max(place.end for place in places))

    def run(self, begin: int, end: int) -> ZeroRun | None:
        """Return the run around zeros; None if no tensor has them."""
        begin, end = max(begin, self.begin), min(end, self.end)
        if begin >= end:
            return None
        begin, end = self._first(begin), self._last(end)
        first = max(0, bisect_right(self._begins, begin) - 1)
        last = bisect_right(self._begins, end - 1)
        places = [place for place in self.places[first:last] if place.begin < end and begin < place.end]
        return ZeroRun(begin, end, places) if places else None

    def _first(self, begin: int) -> int:
        """Return the first of the zeros that end at an offset."""
        step = _BLOCK
        while begin > self.begin:
            at = max(self.begin, begin - step)
            nonzero = np.flatnonzero(np.frombuffer(self.file.read_at(at, begin - at), np.uint8))
            if nonzero.size:
                return at + int(nonzero[-1]) + 1
            begin, step = at, min(2 * step, _LONG)
        return begin

    def _last(self, end: int) -> int:
        """Return the end of the zeros that begin at an offset."""
        step = _BLOCK
        while end < self.end:
            chunk = np.frombuffer(self.file.read_at(end, min(step, self.end - end)), np.uint8)
            nonzero = np.flatnonzero(chunk)
            if nonzero.size or not chunk.size:
                return end + (int(nonzero[0]) if nonzero.size else 0)
            end, step = end + chunk.size, min(2 * step, _LONG)
        return end

    def zeros(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield runs of at least eight blocks of zeros in ascending ranges."""
        memory = np.empty(PIECE, np.uint8)
        pending: tuple[int, int] | None = None
        for begin, end in ranges:
            begin -= begin % _BLOCK
            begin, end = max(begin, 0), min(self.file.size, end)
            at = begin
            for piece in file_pieces(self.file, begin, end, memory):
                blocks = _zero_blocks(np.frombuffer(piece, np.uint8))
                for first, last in blocks:
                    if pending is not None and pending[1] == at + first:
                        pending = pending[0], at + last
                        continue
                    if pending is not None and pending[1] - pending[0] >= _HALF - 2 * _BLOCK:
                        yield pending
                    pending = at + first, at + last
                at += len(piece)
        if pending is not None and pending[1] - pending[0] >= _HALF - 2 * _BLOCK:
            yield pending


def _zero_blocks(piece: Array) -> list[tuple[int, int]]:
    """Return the runs of whole blocks of zeros in a piece."""
    count = piece.size // _BLOCK
    if not count:
        return []
    zero = ~piece[: count * _BLOCK].view(np.uint64).reshape(count, -1).any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], zero, [False])).astype(np.int8)))
    return [(int(a) * _BLOCK, int(b) * _BLOCK) for a, b in zip(edges[::2], edges[1::2], strict=True)]


# ---- checks ----


def _files(catalog: Catalog) -> Iterator[tuple[WeightFile, str]]:
    """Yield the files that can have lost blocks, with the prefix of messages. Archives have checksums."""
    for file in catalog.weight_files if catalog.format != NPZ else ():
        if not file.unpacked and file.table.count and not is_zip(file.read_at(0, 4)):
            yield file, f"{os.path.basename(file.path)}: " if len(catalog.files) > 1 else ""


def check_unwritten(catalog: Catalog, role: Callable[[str], str | None], zero: set[str]) -> Iterator[Finding]:
    """Find long holes of the file system inside files, and add the names of their zero tensors to ``zero``."""
    for weights, where in _files(catalog):
        holes = _holes_of(weights)
        places = _places(weights) if holes else []
        if not places:
            continue
        file = _File(weights, places)
        for hole in holes:
            run = file.run(*hole)
            if run is None or run.end >= file.end or any(place.tensor in zero for place in run.places):
                continue
            finding = _finding(run, True, where, role)
            if finding is not None:
                yield finding
                zero.update(place.tensor for place in run.whole)


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


def check_zeros(
    catalog: Catalog,
    stats: Mapping[str, TensorStats],
    role: Callable[[str], str | None],
    zero: set[str],
) -> Iterator[Finding]:
    """Find runs of zeros inside files, and add the names of their zero tensors to ``zero``."""
    # Only tensors with many zeros are read again, and the parts of packed tensors in local files.
    known = frozenset(zero)  # in a reported hole
    tensors_of: dict[WeightFile, dict[str, str]] = {}  # names by stored name
    if _has_many_zeros(stats):
        for name, weights, k in catalog.entries():
            tensors_of.setdefault(weights, {})[weights.table.names[k]] = name
    for weights, where in _files(catalog):
        tensors = tensors_of.get(weights, {})
        if not tensors and not weights.table.quantized:
            continue
        places = _places(weights)
        if not places:
            continue
        file = _File(weights, places)
        rows = {stored: stats[name] for stored, name in tensors.items() if name in stats}
        suspects = [place for place in file.places if _is_suspect(place, rows.get(place.tensor), weights)]
        judged = _holes_of(weights)
        done = 0
        for core in file.zeros(_joined(suspects)):
            run = file.run(*core) if core[0] >= done else None
            if run is None or any(place.tensor in known for place in run.places):
                continue
            done = run.end
            if any(begin < run.end and run.begin < end for begin, end in judged):
                continue
            finding = _finding(run, False, where, role)
            if finding is not None:
                yield finding
                zero.update(tensors.get(place.tensor, place.tensor) for place in run.whole)


def _has_many_zeros(stats: Mapping[str, TensorStats]) -> bool:
    """True if tensors can have a run of zeros, alone or with zero tensors beside it."""
    whole = sum(row.count for row in stats.values() if row.zeros == row.count)
    most = max((row.zeros for row in stats.values()), default=0)
    return whole * _LARGEST_ITEM >= _RUN_AT_LEAST or most * _LARGEST_ITEM >= _HALF


def _is_suspect(place: StoredRange, row: TensorStats | None, file: WeightFile) -> bool:
    """True if a stored tensor can hold half of a run, by the statistics of its values."""
    if place.name != place.tensor or row is None:  # codes, whose zeros are not counted
        return not file.remote
    return row.zeros == row.count or row.zeros * (place.end - place.begin) >= _HALF * row.count


def _joined(places: Iterable[StoredRange]) -> list[tuple[int, int]]:
    """Return the ranges of places, joined in the same blocks, without those too short for a run."""
    joined: list[tuple[int, int]] = []
    for place in places:
        if joined and place.begin - place.begin % _BLOCK <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(place.end, joined[-1][1])
        else:
            joined.append((place.begin, place.end))
    return [(begin, end) for begin, end in joined if end - begin >= _HALF]
