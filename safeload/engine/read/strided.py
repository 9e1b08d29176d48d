"""Reads tensors that are non-contiguous, big-endian or share bytes with others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, ArraySpec, array_over, foreign_order
from ..run.cast import astype
from ..run.job import Job, moving
from ..run.jobs import Batch
from ..run.memory import ALIGNMENT, address_of, private_array
from ..run.weight_file import WeightFile


class Block:
    """A byte range that is read once, for one tensor or for several that share it.

    Args:
        file: the file to read.
        begin: first byte.
        end: one past the last byte.
        members: the tensors, by a key that the caller chooses.

    Attributes:
        members: the tensors, by the caller's keys.
    """

    def __init__(self, file: WeightFile, begin: int, end: int, members: dict[int, ArraySpec]) -> None:
        self.members = members
        self._file = file
        self._begin = begin
        self._end = end
        self._swap = _swap(next(iter(members.values())))
        self._memory: Array = np.empty(0, np.uint8)

    def read(self, batch: Batch) -> None:
        """Adds the job that reads the range into memory in which every member is aligned.

        The member with the largest elements determines the alignment. Each member starts a whole number of its own
        elements after the start of one storage, so that those with elements of equal or smaller size are aligned too.
        """
        size = self._end - self._begin
        largest = max(self.members.values(), key=lambda spec: dtypes.TABLE[spec.source].bits)
        raw = private_array((size + ALIGNMENT,), np.dtype(np.uint8))
        start = -(address_of(raw) + largest.begin - self._begin) % ALIGNMENT
        self._memory = raw[start : start + size]
        batch.add(Job(self._file, self._begin, address_of(self._memory), size))

    def swap(self) -> None:
        """Swaps bytes after reading if their order is not this machine's."""
        if self._swap > 1:
            self._memory.view(f"u{self._swap}").byteswap(inplace=True)

    def finish(self, spec: ArraySpec, given: Array | None, threads: int | None) -> Array:
        """The array of one member after the block has been read: a view, a converted array, or ``given``, filled."""
        offset = spec.begin - self._begin
        if spec.source != spec.target and spec.strides is None:
            array = private_array(spec.shape, spec.dtype) if given is None else given
            batch = Batch()
            place = None, address_of(self._memory) + offset, batch.into(array), spec.end - spec.begin
            batch.add(Job(*place, spec.source, spec.target, moving(spec.source, spec.target)))
            batch.run(threads=threads)
            return array
        view = array_over(self._memory, dtypes.array_dtype(spec.source), spec.shape, offset, spec.strides)
        if spec.source != spec.target:
            return astype(view, spec.dtype, out=given, threads=threads)
        if given is not None:
            given[...] = view
            return given
        return view if view.flags.aligned else view.copy()


def plan(file: WeightFile, specs: Mapping[int, ArraySpec], batch: Batch) -> tuple[list[int], list[Block]]:
    """Groups tensors of one file into blocks, and adds the jobs that read them.

    Tensors that share bytes share memory and keep their strides, unless they are converted. All others become
    C-contiguous arrays of their own.

    Args:
        file: the file that holds them.
        specs: tensors that are not empty, by a key that the caller chooses.
        batch: gets a job for each block.

    Returns:
        Keys of tensors that turn out to be contiguous, little-endian and without aliases, and blocks of the others.
    """
    groups: list[list[int]] = []
    swap, reach = 0, -1
    for k in sorted(specs, key=lambda k: (_swap(specs[k]), specs[k].begin)):
        if groups and _swap(specs[k]) == swap and specs[k].begin < reach:
            groups[-1].append(k)
            reach = max(reach, specs[k].end)
        else:
            groups.append([k])
            swap, reach = _swap(specs[k]), specs[k].end
    alone, blocks = [], []
    for group in groups:
        if len(group) == 1 and _is_plain(specs[group[0]]):
            alone += group
        else:
            begin, end = specs[group[0]].begin, max(specs[k].end for k in group)
            block = Block(file, begin, end, {k: specs[k] for k in group})
            block.read(batch)
            blocks.append(block)
    return alone, blocks


def _is_plain(layout: ArraySpec) -> bool:
    return layout.strides is None and not layout.big_endian


def _swap(layout: ArraySpec) -> int:
    """Size of the numbers whose bytes must be swapped; 1 if none."""
    return dtypes.TABLE[layout.source].swap if foreign_order(layout.big_endian) else 1
