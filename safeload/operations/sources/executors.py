"""Run the pieces of an operation on an executor, such as `concurrent.futures.ProcessPoolExecutor` or Dask's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np

from ...base import log
from ...base import url as urls
from ...base.arrays import Array
from ...base.paths import native_path
from ...engine.run.progress import Progress, reporter
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError
from ...stores.files import LOCAL, Files
from .catalog import Catalog

# The argument, for messages.
EXECUTOR = "executor="

# Bytes of tensors in a piece. Small pieces waste time, because a task costs about 1 ms with Dask; large pieces leave
# workers idle at the end.
_SMALLEST, _LARGEST = 16 << 20, 1 << 30
# The number of pieces, if the limits allow it.
_PIECES = 64
# The cost of a tensor besides its bytes, in bytes.
_TENSOR_COST = 4 << 10
# The number of tensors that open again, with their file, in the time that a tensor costs.
_OPENED = 4

_T = TypeVar("_T")


class Executor(Protocol):
    """The required method of executors, as in `concurrent.futures.Executor`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function in another thread, process or machine and return a `concurrent.futures.Future`, or alike."""


def run(
    function: Callable[[Mapping[str, Any], int | None], _T],  # importable by name, because executors pickle it
    pieces: Sequence[Mapping[str, Any]],  # with the nbytes of each
    executor: Executor | None,  # None to run the pieces in this thread
    *,
    threads: int | None,  # per piece; None: one on an executor, which can run several pieces per machine, and all here
    progress: Progress,
) -> list[_T]:
    """Call ``function(piece, threads)`` for each piece and return the results in order.

    Retrying is up to the executor: its first exception ends the run. Pending pieces are cancelled,
    running pieces are awaited.
    """
    results: dict[int, _T] = {}
    finished: SimpleQueue[Any] = SimpleQueue()
    futures: dict[Any, int] = {}
    # Dask returns the result of an earlier call with equal arguments unless it gets pure=False.
    token = os.urandom(8).hex()
    done, total = 0, sum(map(itemgetter("nbytes"), pieces))
    with reporter(progress, total) as report:
        try:
            if executor is not None:
                for piece in pieces:
                    future = executor.submit(_call, function, piece, threads or 1, token)
                    futures[future] = len(futures)
                    future.add_done_callback(finished.put)
            for k, piece in enumerate(pieces):
                if executor is None:
                    results[k] = function(piece, threads)
                else:
                    future = finished.get()
                    k = futures[future]
                    results[k] = future.result()
                log.debug("piece %d of %d is done", k + 1, len(pieces))
                done += pieces[k]["nbytes"]
                report(done)
        except BaseException:
            # The first exception is raised. An executor that has lost its cluster cannot cancel, and runs nothing.
            for future in [future for future in futures if not _quietly(future.cancel)]:
                _quietly(future.result)
            raise
    return [results[k] for k in range(len(pieces))]


def groups(sizes: Sequence[int], files: Sequence[WeightFile], file: Sequence[int] | Array) -> list[list[int]]:
    """Divide tensors, or entries of archives, into pieces of similar size, and return their positions."""
    # Only small files share a piece. A file that must be unpacked is not divided, and a piece should take no less time
    # than opening its file again.
    costs = np.array(sizes, np.float64) + _TENSOR_COST
    limit = max(_SMALLEST, min(_LARGEST, int(costs.sum()) // _PIECES))
    divided: list[list[int]] = []
    used: float | None = None  # of the limit by the last piece, if another file can share it
    for first, rows in _by_place(files, np.array(file, np.int64)):
        positions = rows.tolist()
        if first.unpacked:
            divided.append(positions)
            used = None
            continue
        if used is not None and used >= _SMALLEST:
            used = None
        ends = np.cumsum(costs[rows])
        parts = ends[-1] // max(1, _TENSOR_COST * first.table.count / _OPENED)
        allowed = max(limit, float(ends[-1]) / max(1, parts) + _TENSOR_COST)
        begin, done = 0, 0.0
        while begin < len(positions):
            room = -1 if used is None else allowed - used
            end = int(np.searchsorted(ends, done + room, side="right"))
            if end <= begin:
                divided.append([])
                used = 0.0
                end = max(begin + 1, int(np.searchsorted(ends, done + allowed, side="right")))
            divided[-1] += positions[begin:end]
            used = (used or 0.0) + float(ends[end - 1]) - done
            begin, done = end, float(ends[end - 1])
    return divided


def _by_place(files: Sequence[WeightFile], file: Array) -> Iterator[tuple[WeightFile, Array]]:
    """Yield the first file of each place with the positions of its tensors, in the order of their first tensors."""
    places: dict[str, int] = {}
    number = np.array([places.setdefault(each.place, k) for k, each in enumerate(files)], np.int64)
    numbers = number[file]
    rows = np.argsort(numbers, kind="stable")
    begins = np.flatnonzero(np.diff(numbers[rows], prepend=-1))
    for of_place in sorted(np.split(rows, begins[1:]), key=lambda rows: int(rows[0])) if len(rows) else ():
        yield files[file[of_place[0]]], of_place


def check_executor(executor: Any) -> None:
    """Refuse an object if it is neither an executor nor None."""
    usable = callable(getattr(executor, "submit", None)) and not isinstance(executor, type)
    if executor is not None and not usable:
        raise TypeError(
            f"executor must have a submit() method like concurrent.futures.Executor, got {type(executor).__name__}: "
            "for Dask, pass the client"
        )


def _call(function: Callable[[Any, int | None], _T], piece: Any, threads: int, token: str) -> _T:
    return function(piece, threads)


def _quietly(call: Callable[[], Any]) -> Any:
    """Call a method of a future, and return True if it raises."""
    try:
        return call()
    except Exception as error:
        log.debug("another piece failed, or cannot be cancelled: %s", error)
        return True


# ---- what other processes can read ----


def check_paths(catalog: Catalog, argument: str) -> None:
    """Refuse tensors in memory, which other processes cannot read."""
    if catalog.in_memory:
        raise in_memory("the tensors of a dict are", argument)


def in_memory(tensors_are: str, argument: str) -> ValueError:
    """Return the error for tensors in memory; ``tensors_are`` is the subject and the verb of its message."""
    return ValueError(f"{argument} needs the path of a checkpoint, or an open one: {tensors_are} only in this process")


def check_path(path: str) -> None:
    """Refuse a path or name that no system can have."""
    try:
        native_path(path)
    except (ValueError, OSError) as error:
        raise FormatError(f"invalid plan: {error}") from None


def files_at(path: str, planned: Mapping[str, Any] | None, storage_options: Mapping[str, Any] | None) -> Files:
    """Return the file system of a path or URL in a plan; options of this process override ``planned`` options."""
    check_path(path)
    if not urls.is_url(path):
        return LOCAL
    from ...stores.remote_files import RemoteFiles  # only here: most paths are local

    if planned is None and storage_options is None:
        return RemoteFiles()
    return RemoteFiles(_merged(planned or {}, storage_options or {}))


def _merged(planned: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**planned, **own}
    for key, value in planned.items():
        if isinstance(value, dict) and isinstance(own.get(key), Mapping):
            merged[key] = _merged(value, own[key])
    return merged
