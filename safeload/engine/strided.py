"""Tensors that are not simply their bytes: with strides, in big-endian order, or sharing bytes with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, ArraySpec, array_over, foreign_order
from ..base.file import WeightFile
from ..base.native import lib
from . import cast as casting
from . import jobs
from .jobs import Progress

_BYTES = dtypes.BY_CODE["U8"].number


class _Block(NamedTuple):
    """Bytes that are read once, for one tensor or for several that share them.

    Attributes:
        file: where they are.
        begin: first byte.
        end: past the last.
        swap: size of the numbers whose bytes are to be swapped; 1 for none.
        members: positions of the tensors.
    """

    file: WeightFile
    begin: int
    end: int
    swap: int
    members: list[int]


def read_arrays(
    parts: Sequence[tuple[WeightFile, ArraySpec]],
    *,
    into: Sequence[Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> list[Array]:
    """`jobs.read_arrays` for tensors of any layout.

    What is not converted and shares bytes with others shares memory with them, and keeps its strides; everything else,
    and every array of ``into``, is C-contiguous and alone.

    Raises:
        FormatError: a file ends too early, with its path and the offset.
        OSError: a file cannot be read.
    """
    if not any(file.table.shaped for file, _ in parts):
        return jobs.read_arrays(parts, into=into, threads=threads, progress=progress)
    plain, blocks = _plan(parts)
    memories = [_memory(block, parts) for block in blocks]
    places: list[Array | None] = [None if into is None else into[k] for k in plain]
    to_read = [parts[k] for k in plain]
    for block, memory in zip(blocks, memories, strict=True):
        to_read.append((block.file, ArraySpec(memory.dtype, memory.shape, block.begin, block.end, _BYTES, _BYTES)))
        places.append(memory)
    arrays = jobs.read_arrays(to_read, into=places, threads=threads, progress=progress)
    result: list[Array | None] = [None] * len(parts)
    for k, array in zip(plain, arrays, strict=False):
        result[k] = array
    for block, memory in zip(blocks, memories, strict=True):
        if block.swap > 1:
            memory.view(f"u{block.swap}").byteswap(inplace=True)
        for k in block.members:
            result[k] = _finish(memory, block.begin, parts[k][1], None if into is None else into[k], threads)
    return [array for array in result if array is not None]


def _plan(parts: Sequence[tuple[WeightFile, ArraySpec]]) -> tuple[list[int], list[_Block]]:
    """Positions of the tensors that are simply their bytes, and the blocks for the others."""
    plain: list[int] = []
    others: list[int] = []
    for k, (file, layout) in enumerate(parts):
        (others if file.table.shaped and layout.begin < layout.end else plain).append(k)
    blocks: list[_Block] = []
    identity = {file: number for number, file in enumerate(dict.fromkeys(file for file, _ in parts))}
    for k in sorted(others, key=lambda k: (identity[parts[k][0]], _swap(parts[k][1]), parts[k][1].begin)):
        file, layout = parts[k]
        last = blocks[-1] if blocks else None
        if last is not None and (last.file, last.swap) == (file, _swap(layout)) and layout.begin < last.end:
            last.members.append(k)
            blocks[-1] = last._replace(end=max(last.end, layout.end))
        else:
            blocks.append(_Block(file, layout.begin, layout.end, _swap(layout), [k]))
    alone = [b for b in blocks if len(b.members) == 1 and _is_plain(parts[b.members[0]][1])]
    plain += [block.members[0] for block in alone]
    return sorted(plain), [b for b in blocks if len(b.members) > 1 or not _is_plain(parts[b.members[0]][1])]


def _is_plain(layout: ArraySpec) -> bool:
    return layout.strides is None and not layout.big_endian


def _swap(layout: ArraySpec) -> int:
    """Size of the numbers whose bytes are to be swapped."""
    return dtypes.TABLE[layout.source].swap if foreign_order(layout.big_endian) else 1


def _memory(block: _Block, parts: Sequence[tuple[WeightFile, ArraySpec]]) -> Array:
    """Fresh memory in which every member is aligned: the one of the largest elements decides.

    The others lie whole elements away from it or are of smaller ones, as all of them start whole elements from the
    start of one storage.
    """
    largest = max((parts[k][1] for k in block.members), key=lambda layout: dtypes.TABLE[layout.source].bits)
    raw = jobs.private_array((block.end - block.begin + jobs.ALIGNMENT,), np.dtype(np.uint8))
    start = -(jobs.address_of(raw) + largest.begin - block.begin) % jobs.ALIGNMENT
    return raw[start : start + block.end - block.begin]


def _finish(memory: Array, origin: int, layout: ArraySpec, given: Array | None, threads: int | None) -> Array:
    """One tensor of a block that has been read: as a view, or converted, or copied to where it is wanted."""
    offset = layout.begin - origin
    if layout.source != layout.target and layout.strides is None:
        array = jobs.private_array(layout.shape, layout.dtype) if given is None else given
        address = jobs.address_of(memory) + offset
        size = layout.end - layout.begin
        place = lib.SL_MEMORY, address, jobs.address_of(array), size
        job = jobs.Job(*place, layout.source, layout.target, op=lib.SL_OP_CONVERT)
        jobs.run([job], lambda job, position: ("", None), threads=threads)
        return array
    view = array_over(memory, dtypes.array_dtype(layout.source), layout.shape, offset, layout.strides)
    if layout.source != layout.target:
        return casting.astype(view, layout.dtype, out=given, threads=threads)
    if given is not None:
        given[...] = view
        return given
    return view if view.flags.aligned else view.copy()
