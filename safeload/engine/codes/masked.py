"""Packed tensors that store the values that are not zero, and a mask of their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...base import packing
from ...base.arrays import Array
from ...base.packing import Packed, Packing, Part
from ...base.text import show
from ...errors import FormatError
from ..run import jobs
from .code_ranges import Range, mask_bytes

# Columns that share a start: as many bits are counted again where a piece of a row is restored. Whole bytes.
_STEP = 1 << 16
_COUNTS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)

# Bytes of a part from the first one on, of which the number may be None for all.
Read = Callable[[Part, int, "int | None"], Array]


def parts_of(packed: Packed, rows: Range, name: str, read: Read) -> Mapping[str, Part]:
    """The parts of a range of rows; those of all rows are known without reading anything.

    Raises:
        FormatError: the rows are not where they must be; a file ends too early.
        OSError: a file cannot be read.
    """
    means, parts = packed
    if rows.rows == means.rows:
        return parts
    first, stop = rows.row, rows.row + rows.rows
    codes, width = parts[packing.CODES], mask_bytes(means)
    taken = {**parts, packing.MASK: _bytes_of(parts[packing.MASK], first * width, stop * width)}
    begin, end = first * means.row_bytes, stop * means.row_bytes
    if packing.OFFSETS in parts:
        offsets = parts[packing.OFFSETS]
        size = offsets.row.block_bytes
        taken[packing.OFFSETS] = _bytes_of(offsets, first * size, stop * size)
        found = _integers(offsets, read(offsets, first * size, (min(stop + 1, means.rows) - first) * size))
        if stop == means.rows:
            found = np.append(found, _count(codes))
        _check(found, _count(codes), first, name, offsets)
        size = codes.row.block_bytes
        begin, end = int(found[0]) * size, int(found[-1]) * size
    taken[packing.CODES] = _bytes_of(codes, begin, end)
    return taken


def fields_of(packed: Packed, rows: Range, name: str, read: Read) -> dict[str, Any]:
    """The fields of an ``sl_packed`` that only such tensors have.

    Args:
        packed: the parts are those of the range.
        rows: the range.
        name: of the tensor.
        read: reads a part.

    Raises:
        FormatError: the rows are not where they must be.
    """
    means, parts = packed
    count = _count(parts[packing.CODES])
    mask = read(parts[packing.MASK], 0, None)
    if packing.OFFSETS in parts:
        offsets = parts[packing.OFFSETS]
        starts = _integers(offsets, read(offsets, 0, None))
        origin = starts[0] if rows.row and starts.size else np.int64(0)
        starts = np.append(starts - origin, count)
        _check(starts, count, rows.row, name, offsets)
    else:
        starts = np.arange(rows.rows + 1, dtype=np.int64) * (count // max(1, rows.rows))
    if means.columns > _STEP:
        starts = _divided(mask, starts, means, rows.row, name, parts[packing.MASK])
    step = min(_STEP, max(1, means.columns))
    return {"mask": mask, "starts": starts.astype(np.uint64), "mask_columns": step, "first_row": rows.row}


def rows_of(packed: Packing, parts: Mapping[str, Array], rows: slice) -> dict[str, Array]:
    """A range of rows of the mask and of the values, in memory.

    Raises:
        ValueError: ``row_offsets`` are not those of the values.
    """
    taken = {packing.MASK: parts[packing.MASK][rows]}
    codes, offsets = parts[packing.CODES], parts.get(packing.OFFSETS)
    if offsets is None:
        return {**taken, packing.CODES: codes[rows]}
    edges = [int(offsets[k]) if k < packed.rows else codes.size for k in (rows.start, rows.stop)]
    if not 0 <= edges[0] <= edges[1] <= codes.size or (rows.start == 0 != edges[0]):
        raise ValueError(f"row_offsets: rows {rows.start} to {rows.stop} are values {edges[0]} to {edges[1]}")
    return {**taken, packing.CODES: codes[slice(*edges)], packing.OFFSETS: offsets[rows] - offsets[rows][:1]}


def _bytes_of(part: Part, begin: int, end: int) -> Part:
    return part._replace(begin=part.begin + begin, end=part.begin + end)


def _count(codes: Part) -> int:
    return (codes.end - codes.begin) // codes.row.block_bytes


def _integers(part: Part, raw: Array) -> Array:
    return jobs.native_order(raw.view(part.row.name)).astype(np.int64)


def _check(starts: Array, count: int, first: int, name: str, part: Part) -> None:
    """Refuses starts of rows from the first on, and an end, that do not ascend from 0 to the number of values."""
    bad = (starts < 0) | (starts > count)
    bad[1:] |= starts[1:] < starts[:-1]
    bad[:1] |= (first == 0) & (starts[:1] != 0)
    if bad.any():
        row = int(bad.argmax())
        raise _fault(f"row_offsets: row {first + row} begins at value {starts[row]} of {count}", name, part)


def _fault(message: str, name: str, part: Part) -> FormatError:
    path = None if part.file is None else str(part.file.path)
    return FormatError(f"tensor {show(name)}: {message}", path=path, tensor=name)


def _divided(mask: Array, starts: Array, packed: Packing, first: int, name: str, part: Part) -> Array:
    """Starts of parts of long rows, from those of rows and an end."""
    width = mask_bytes(packed)
    lines = mask.view(np.uint8).reshape(-1, width)
    step = _STEP // 8
    counts = np.stack([_COUNTS[lines[:, k : k + step]].sum(-1, dtype=np.int64) for k in range(0, width, step)], -1)
    if packed.columns % 8:  # bits after the last column mean nothing
        counts[:, -1] -= _COUNTS[lines[:, -1] >> packed.columns % 8]
    found = counts.sum(-1)
    bad = np.flatnonzero(found != np.diff(starts))
    if bad.size:
        row = int(bad[0])
        stored = starts[row + 1] - starts[row]
        text = f"row {first + row} has places for {found[row]} values in its mask, but {stored} are stored"
        raise _fault(text, name, part)
    each: Array = starts[:-1, None] + np.cumsum(counts, -1) - counts
    return np.append(each, starts[-1])
