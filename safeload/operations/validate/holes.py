"""Files that end in zeros: left by a download that allocated its file in advance and then stopped."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ...base.text import plural, show
from ...engine.codes.pieces import PIECE, file_pieces
from ...engine.run.weight_file import WeightFile
from ...formats.foreign import is_zip
from ...formats.registry import NPZ
from ...stores.local import descriptor_of
from ..sources.catalog import Catalog
from .findings import Finding, error, warning

# A shorter tail of zeros does not count as a stopped download, unless it is a hole.
_TAIL_AT_LEAST = 1 << 20

# A hole that is shorter than both limits and contains no whole tensor is only a warning: writers that skip blocks of
# zeros make such holes.
_HOLE_AT_LEAST = 64 << 10
_HOLE_OF_FILE = 1000

# Bytes that are read first from the end: the last of them is nearly always nonzero.
_FIRST_PIECE = 64 << 10

# Names of tensors that may be zero in good files: biases, the second factor of a LoRA adapter that was never trained,
# counts and caches of torch modules, zero points of symmetric quantization.
_MAY_BE_ZERO = re.compile(
    r"(?i:.*(?:^|[._])(?:bias(?:es)?|beta|lora_(?:embedding_)?b|lora(?:_linear_layer)?[._]up|running_mean|num_batches_tracked|position_ids"
    r"|inv_freq|mask|[kv]_cache|zero_?points?|q?zeros|g_idx)(?:\..*)?)|[bB]",
    re.ASCII | re.DOTALL,
)


class Tail(NamedTuple):
    """Zeros at the end of a file's tensors.

    Attributes:
        begin: offset of the first zero.
        end: end offset of the tensors.
        whole: names of the tensors that lie wholly in it, in the order of their bytes.
        cut: the tensor that it begins in; None if it begins between two.
        hole: number of its bytes that are a hole of the file system.
    """

    begin: int
    end: int
    whole: list[str]
    cut: str | None
    hole: int


def check_tails(
    catalog: Catalog, role: Callable[[str], str | None], *, values: bool
) -> Iterator[tuple[Finding, list[str]]]:
    """Files whose tail was never written: the finding, and the tensors that are zero because of it.

    Args:
        catalog: the files to check.
        role: gives the role of a tensor in the schema.
        values: False to read nothing from files without a hole at their end.
    """
    # Compressed arrays of an npz lie in a temporary file that we have written.
    for file in catalog.weight_files if catalog.format != NPZ else ():
        tail = tail_of(file, values=values)
        if tail is None:
            continue
        where = f"{os.path.basename(file.path)}: " if len(catalog.files) > 1 else ""
        weighty = any(role(name) not in ("bias", "buffer") and not _MAY_BE_ZERO.fullmatch(name) for name in tail.whole)
        size = tail.end - tail.begin
        message = f"{where}{_description(tail)}; was the download finished?"
        if tail.hole:
            small = not tail.whole and tail.hole < _HOLE_AT_LEAST and tail.hole * _HOLE_OF_FILE < file.size
            yield (warning if small else error)("file.hole", None, message), tail.whole
        elif size >= _TAIL_AT_LEAST and len(tail.whole) > 1 and weighty:
            yield error("file.hole", None, message), tail.whole


def _description(tail: Tail) -> str:
    """Describes a tail in the message of its finding."""
    size = tail.end - tail.begin
    what = f"{plural(size, 'byte')} to the end of the file {'is' if size == 1 else 'are'} zero"
    if tail.hole:
        what += ", a hole that was never written" if tail.hole >= size else f", {tail.hole:,} of them never written"
    if not tail.whole:
        return what if tail.cut is None else f"{what}, from within {show(tail.cut)} on"
    count = len(tail.whole)
    whole = f"{plural(count, 'tensor')} {'is' if count == 1 else 'are'} all zero"
    return f"{what}: {whole}, the first is {show(tail.whole[0])}"


def tail_of(file: WeightFile, *, values: bool) -> Tail | None:
    """The zeros at the end of the tensors of a file; None if there are none, or if they mean nothing.

    Archives are skipped: they end with their directory, which is not zero, and their entries have a CRC-32.

    Raises:
        FormatError, OSError: the file cannot be read.
    """
    table = file.table
    ranges = [(*place, name) for name, place in zip(table.names, table.byte_ranges(), strict=True)]
    ends = [end for begin, end, _ in ranges if begin < end]
    if table.quantized:
        scales = (table.scale(k) for k in range(len(ranges)))
        ends += [scale.end for scale in scales if scale is not None]
        packed = (table.packed(k) for k in range(len(ranges)))
        ends += [part.end for one in packed if one is not None for part in one.parts.values() if part.file is file]
    ranges = sorted(place for place in ranges if place[0] < place[1])
    if not ranges:
        return None
    end = min(file.size, max(ends))
    hole = min(end, hole_begin(file))
    if (hole == end and not values) or is_zip(file.read_at(0, 4)):
        return None
    begin = zeros_begin(file, ranges[0][0], hole)
    if begin == end:
        return None
    whole = [name for at, _, name in ranges if at >= begin]
    cut = next((name for at, to, name in ranges if at < begin < to), None)
    return Tail(begin, end, whole, cut, end - hole)


def zeros_begin(file: WeightFile, begin: int, end: int) -> int:
    """Offset where the zeros before ``end`` begin, at least ``begin``. The file is read backwards."""
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
    """Offset of the hole that the file ends with; the size of the file without one.

    Takes one system call if there is no such hole. A system without support for holes reports none.
    """
    seek_data = getattr(os, "SEEK_DATA", None)
    descriptor = descriptor_of(file.store)  # a reference keeps it open
    if seek_data is None or descriptor is None or file.size == 0:
        return file.size

    def has_data(offset: int) -> bool:
        try:
            os.lseek(descriptor, offset, seek_data)
        except OSError as problem:
            import errno

            return problem.errno != errno.ENXIO  # a file system that cannot tell has no holes
        return True

    # A file that has shrunk has no data past its end either: reading it raises an error.
    if has_data(file.size - 1) or os.fstat(descriptor).st_size < file.size:
        return file.size
    low, high = 0, file.size  # data follows every offset below low, none follows high
    while low < high:
        middle = (low + high) // 2
        if has_data(middle):
            low = middle + 1
        else:
            high = middle
    return low
