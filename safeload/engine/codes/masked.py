"""Sparse packed tensors: the values that are not zero, and a bitmask of their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...base import packing
from ...base.arrays import Array
from ...base.messages import error_about
from ...base.packing import Packed, Part
from ...errors import FormatError
from ..run import jobs
from .code_ranges import Range, mask_bytes

# Columns per recorded start, in whole bytes: restoring a piece of a row counts up to this many bits again.
_STEP = 1 << 16
_COUNTS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)

# Reads bytes of a part: first byte, and number of bytes or None for all.
Read = Callable[[Part, int, "int | None"], Array]


def parts_of(packed: Packed, rows: Range, name: str, read: Read) -> Mapping[str, Part]:
    """Return the parts of a range of rows. The offsets are read unless the range has all rows."""
    spec, parts = packed
    if rows.rows == spec.rows:
        return parts
    first, stop = rows.row, rows.row + rows.rows
    codes, width = parts[packing.CODES], mask_bytes(spec)
    sliced = {**parts, packing.MASK: _bytes_of(parts[packing.MASK], first * width, stop * width)}
    begin, end = first * spec.row_bytes, stop * spec.row_bytes
    if packing.OFFSETS in parts:
        offsets = parts[packing.OFFSETS]
        size = offsets.row.block_bytes
        sliced[packing.OFFSETS] = _bytes_of(offsets, first * size, stop * size)
        starts = _integers(offsets, read(offsets, first * size, (min(stop + 1, spec.rows) - first) * size))
        if stop == spec.rows:
            starts = np.append(starts, _count(codes))
        _check(starts, _count(codes), first, name, offsets)
        size = codes.row.block_bytes
        begin, end = int(starts[0]) * size, int(starts[-1]) * size
    sliced[packing.CODES] = _bytes_of(codes, begin, end)
    return sliced


def fields_of(packed: Packed, rows: Range, name: str, read: Read) -> dict[str, Any]:
    """Return the fields of an ``sl_packed`` that only sparse tensors have."""
    spec, parts = packed
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
    if spec.columns > _STEP:
        starts = _divided(mask, starts, Packed(spec, parts), first=rows.row, name=name)
    step = min(_STEP, max(1, spec.columns))
    return {"mask": mask, "starts": starts.astype(np.uint64), "mask_columns": step, "first_row": rows.row}


def _bytes_of(part: Part, begin: int, end: int) -> Part:
    return part._replace(begin=part.begin + begin, end=part.begin + end)


def _count(codes: Part) -> int:
    return (codes.end - codes.begin) // codes.row.block_bytes


def _integers(part: Part, raw: Array) -> Array:
    return jobs.native_order(raw.view(part.row.name)).astype(np.int64)


def _check(starts: Array, count: int, first: int, name: str, part: Part) -> None:
    """Check that the starts of rows, and an end, ascend from 0 to the number of values."""
    bad = (starts < 0) | (starts > count)
    bad[1:] |= starts[1:] < starts[:-1]
    bad[:1] |= (first == 0) & (starts[:1] != 0)
    if bad.any():
        row = int(bad.argmax())
        raise _fault(f"row_offsets: row {first + row} begins at value {starts[row]} of {count}", name, part)


def _fault(message: str, name: str, part: Part) -> FormatError:
    path = None if part.file is None else str(part.file.path)
    return error_about(FormatError, f": {message}", path=path, tensor=name)


def _divided(mask: Array, starts: Array, packed: Packed, *, first: int, name: str) -> Array:
    """Return starts for every `_STEP` columns of long rows, given the starts of rows and an end."""
    spec, parts = packed
    width = mask_bytes(spec)
    lines = mask.view(np.uint8).reshape(-1, width)
    step = _STEP // 8
    counts = np.stack([_COUNTS[lines[:, k : k + step]].sum(-1, dtype=np.int64) for k in range(0, width, step)], -1)
    if spec.columns % 8:  # bits after the last column mean nothing
        counts[:, -1] -= _COUNTS[lines[:, -1] >> spec.columns % 8]
    totals = counts.sum(-1)
    bad = np.flatnonzero(totals != np.diff(starts))
    if bad.size:
        row = int(bad[0])
        stored = starts[row + 1] - starts[row]
        text = f"row {first + row} has places for {totals[row]} values in its mask, but {stored} are stored"
        raise _fault(text, name, parts[packing.MASK])
    divided: Array = starts[:-1, None] + np.cumsum(counts, -1) - counts
    return np.append(divided, starts[-1])
