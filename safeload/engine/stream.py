"""Streams tensors of open files: one after the other, while the next ones are read, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, array_over, check_mapping
from ..base.text import plural, show
from . import jobs
from .ahead import Ahead, Check, Task
from .delivery import check_given, deliver, stored_in_parts
from .entries import Entry, entries_of
from .load import Part, selections_of
from .pieces import Meter
from .progress import Progress
from .recycled import Recycler
from .threads import check_threads
from .weight_file import WeightFile

# Arrays to fill: by name, or a function that gives the one for a name.
Out = Mapping[str, Array] | Callable[[str], Array] | None

# Which tensor comes next.
Order = Literal["file", "given", "ready"]

# Bytes of tensors that are read together: enough for all threads to have work, and little compared with any limit.
_UNIT = 16 << 20
# A unit takes at most this part of the limit, so that others are read while its tensors are taken.
_SHARE = 4


# Names and arrays of tensors, and the error of the tensor after them.
_Found: TypeAlias = tuple[deque[tuple[str, Any]], Exception | None]


class TensorStream(Iterator[tuple[str, Any]]):
    """Names and arrays of tensors, in turn, while the next ones are read; made by `Checkpoint.stream`.

    `close` stops reading, and so do an error, the end of the program and the last reference to the stream. It belongs
    to the process that made it: after a fork, the child's copy raises RuntimeError.

    Example:
        >>> import safeload
        >>> stream = safeload.open("tiny-llama").stream(dtype="float32")
        >>> name, array = next(stream)
        >>> stream.close()
    """

    def __init__(self, entries: Sequence[Entry], reader: _Reader, limit: int, progress: Progress) -> None:
        share = max(1, min(_UNIT, limit // _SHARE))
        self._memory = memory = Recycler(limit)
        units = (_Unit(part, reader, memory) for part in _units(entries, share))
        tasks = (Task(unit.nbytes, unit.run, unit.start if reader.out is not None else None) for unit in units)
        self._ahead: Ahead[_Found] = Ahead(tasks, limit - limit // _SHARE - share)
        self._ready: deque[tuple[str, Any]] = deque()
        self._error: Exception | None = None
        self._left = {entry.name: entry.nbytes for entry in entries}
        self._count = len(entries)
        self._meter = Meter(progress, sum(self._left.values()))

    def __next__(self) -> tuple[str, Any]:
        self._ahead.check_process()
        try:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                self._ready, self._error = next(self._ahead)
                self._memory.used = self._ahead.pending
            name, value = self._ready.popleft()
            self._meter.add(self._left.pop(name))
        except BaseException:
            self.close()
            raise
        return name, value

    def __length_hint__(self) -> int:
        return len(self._left)

    def __repr__(self) -> str:
        return f"<TensorStream: {len(self._left)} of {plural(self._count, 'tensor')} left>"

    def close(self) -> None:
        """Stops reading and waits until it has stopped. Arrays that were taken stay valid."""
        self._ahead.close()
        self._memory.close()
        self._ready.clear()
        self._error = None
        self._left.clear()
        self._meter.close()


class _Reader(NamedTuple):
    """How tensors are read.

    Attributes:
        target: dtype that floating tensors are converted to and packed ones dequantized to; None to convert nothing.
        out: gives the arrays to fill; None for new ones.
        threads: None: chosen automatically.
    """

    target: dtypes.Dtype | None
    out: Callable[[str], Any] | None
    threads: int | None

    def read(self, entries: Sequence[Entry], given: Mapping[str, Array], check: Check) -> dict[str, Any]:
        """Reads tensors into the arrays given, those that are stored in parts into new ones."""
        if not entries:
            return {}
        arrays, _ = deliver(
            selections_of([entry[:3] for entry in entries]),
            target=self.target,
            out=given or None,
            threads=self.threads,
            progress=lambda done, total: check(),
        )
        return arrays


class _Unit:
    """Tensors that are read together.

    Args:
        entries: the tensors.
        reader: how they are read.
        memory: for new arrays.
    """

    def __init__(self, entries: Sequence[Entry], reader: _Reader, memory: Recycler) -> None:
        self._memory = memory
        self.nbytes = sum(entry.nbytes for entry in entries)
        self._entries = entries
        self._reader = reader
        self._given: dict[str, Array] = {}
        self._error: Exception | None = None

    def start(self) -> None:
        """Asks the caller for the arrays to fill, up to an error."""
        for k, entry in enumerate(self._entries):
            error = self._ask(entry)
            if error is not None:
                self._entries, self._error = self._entries[:k], error
                return

    def _ask(self, entry: Entry) -> Exception | None:
        assert self._reader.out is not None
        try:
            self._given[entry.name] = self._reader.out(entry.name)
            check_given(entry.name, entry.dtype, entry.shape, self._given)
        except Exception as error:
            return error
        return None

    def run(self, check: Check) -> _Found:
        """The tensors with their arrays, up to the first that cannot be read, and its error."""
        if self._reader.out is None and self._entries and _has_array(self._entries[0]):
            self._given = _new_arrays(self._entries, self._memory)
        found, error = self._read(self._entries, check)
        if error is None:
            return found, self._error
        if len(self._entries) > 1:
            for entry in self._entries:  # once more, to find out which cannot be read
                one, error = self._read([entry], check)
                found += one
                if error is not None:
                    break
        return found, error or self._error

    def _read(self, entries: Sequence[Entry], check: Check) -> _Found:
        try:
            arrays = self._reader.read(entries, self._given, check)
        except Exception as error:
            return deque(), error
        return deque((entry.name, arrays[entry.name]) for entry in entries), None


def _units(entries: Sequence[Entry], share: int) -> Iterator[list[Entry]]:
    """Divides tensors into those that are read together."""
    unit: list[Entry] = []
    size = 0
    for entry in entries:
        if unit and (size + entry.nbytes > share or _has_array(entry) != _has_array(unit[0])):
            yield unit
            unit, size = [], 0
        unit.append(entry)
        size += entry.nbytes
    if unit:
        yield unit


def _new_arrays(entries: Sequence[Entry], memory: Recycler) -> dict[str, Array]:
    """New arrays, each aligned to `jobs.ALIGNMENT`; small ones share memory that is allocated at once."""
    places, size = [], 0
    for entry in entries:
        places.append(size)
        if entry.nbytes < jobs.POOLED_BELOW:
            size += -(-entry.nbytes // jobs.ALIGNMENT) * jobs.ALIGNMENT
    pool = memory.array((size,), np.dtype(np.uint8))
    arrays = {}
    for entry, place in zip(entries, places, strict=True):
        alone = entry.nbytes >= jobs.POOLED_BELOW
        arrays[entry.name] = (
            memory.array(entry.shape, entry.dtype) if alone else array_over(pool, entry.dtype, entry.shape, place)
        )
    return arrays


def stream(
    parts: Sequence[Part],
    files: Sequence[WeightFile],
    *,
    target: dtypes.Dtype | None,
    limit: int,
    sort: bool,
    out: Out,
    threads: int | None,
    progress: Progress,
) -> TensorStream:
    """Reads tensors one after the other; `Checkpoint.stream` describes it.

    Args:
        parts: the tensors.
        files: all files, in order.
        target: dtype that floating tensors are converted to and packed ones dequantized to; None to convert nothing.
        limit: most bytes that are read and not taken.
        sort: whether to read in the order of the bytes instead of that of ``parts``.
        out: arrays to fill; None for new ones.
        threads: None: chosen automatically.
        progress: reports in the consumer's thread.
    """
    check_threads(threads)
    entries = entries_of(parts, target)
    for entry in entries if out is not None else ():
        if entry.packed is not None and entry.target is None:
            raise stored_in_parts(entry.name, entry.packed)
    if sort:
        rank = {file: k for k, file in enumerate(files)}
        entries.sort(key=lambda entry: (rank[entry.file], entry.begin))
    if out is not None and not callable(out):
        _check_out(out, entries)
    give = out if out is None or callable(out) else out.__getitem__
    return TensorStream(entries, _Reader(target, give, threads), limit, progress)


def _check_out(out: Mapping[str, Array], entries: Sequence[Entry]) -> None:
    """Refuses arrays of ``out`` that are missing, do not fit, or are of no tensor that is read."""
    check_mapping(out, "out")
    names = {entry.name for entry in entries}
    unknown = sorted(name for name in out if name not in names)
    if unknown:
        raise ValueError(f"out: {show(unknown[0])} is not a tensor of this stream")
    for entry in entries:
        check_given(entry.name, entry.dtype, entry.shape, out)


def _has_array(entry: Entry) -> bool:
    """Whether its array can be made before it is read.

    Not so for packed codes that stay as they are stored, which are several arrays; nor for repeated elements, which
    have no memory of their own and may be more than any memory holds.
    """
    if entry.target is None:
        return False
    return not (entry.strided and entry.source == entry.target and entry.nbytes > entry.end - entry.begin)
