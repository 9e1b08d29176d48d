"""Read bytes of tensors in pieces: on several threads, in bounded memory, without mappings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from ...base.arrays import Array
from ...stores import thread_group
from ..run.jobs import WINDOW, Batch, Job
from ..run.memory import address_of, thread_count
from ..run.weight_file import WeightFile
from .source import Source

# Bytes that each thread reads at a time: enough to amortize a read, and little compared with the memory of any machine.
PIECE = 4 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None, nbytes: int
) -> Iterator[Result]:
    """Return the results of a function that releases the GIL, in the order of its arguments.

    A few calls run ahead of the consumer. Closing the iterator stops all calls and aborts their requests.

    ``nbytes``, which all calls read together, decides the number of threads.
    """
    return thread_group.in_order(function, items, thread_count(nbytes, threads))


def file_pieces(file: WeightFile, begin: int, end: int, buffer: Array | None = None) -> Iterator[memoryview]:
    """Yield the bytes [begin, end) of a file in pieces. Each piece overwrites the piece before."""
    step = WINDOW if file.remote else PIECE
    memory = np.empty(min(step, max(1, end - begin)), np.uint8) if buffer is None or file.remote else buffer
    for at in range(begin, end, step):
        size = min(step, end - at)
        Batch([Job(file, at, address_of(memory), size)]).run(threads=1)
        yield memory[:size].data


def source_pieces(source: Source) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces. Each piece overwrites the piece before."""
    if source.file is not None:
        yield from file_pieces(source.file, source.offset, source.offset + source.size)
    elif source.size:
        raw = memory_of(source)
        yield from (raw[at : at + PIECE].data for at in range(0, raw.size, PIECE))


def memory_of(source: Source) -> Array:
    """Return the bytes of a source in memory."""
    array: Array = np.asarray(source.owner)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
