"""Run the pieces of an operation on an executor, such as `concurrent.futures.ProcessPoolExecutor` or Dask's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ...base import log
from ...base import url as urls
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


def groups(sizes: Sequence[int], files: Sequence[WeightFile], file: Sequence[int]) -> list[list[int]]:
    """Divide tensors, or entries of archives, into pieces of similar size, and return their positions."""
    costs, names = [size + _TENSOR_COST for size in sizes], [each.place for each in files]
    places = [names[number] for number in file]
    limit = max(_SMALLEST, min(_LARGEST, sum(costs) // _PIECES))
    by_place: dict[str, list[int]] = {}
    for place, rows in groupby(range(len(places)), places.__getitem__):
        by_place.setdefault(place, []).extend(rows)
    divided: list[list[int]] = []
    used: int | None = None  # of the limit by the last piece, if another file can share it
    for positions in by_place.values():
        first = files[file[positions[0]]]
        if first.unpacked:  # such a file is not divided
            divided.append(positions)
            used = None
            continue
        used = None if used is not None and used >= _SMALLEST else used  # only small files share a piece
        # A piece should take no less time than opening its file again.
        size = sum(map(costs.__getitem__, positions))
        parts = size // max(1, _TENSOR_COST * first.table.count / _OPENED)
        allowed = max(limit, size / max(1, parts) + _TENSOR_COST)
        for k in positions:
            if used is None or used + costs[k] > allowed:
                divided.append([])
                used = 0
            divided[-1] += [k]
            used += costs[k]
    return divided


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
