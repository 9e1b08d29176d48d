"""Run the pieces of an operation on an executor, such as `concurrent.futures.ProcessPoolExecutor` or Dask's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ...base import log
from ...engine.run.progress import Progress, reporter
from ...engine.run.weight_file import WeightFile
from .catalog import Catalog
from .codec import encode
from .piece_files import PieceSource, Sources
from .plan import TensorPiece

# The argument, for messages.
EXECUTOR = "executor="

# Bytes of tensors in a piece. Small pieces waste time, because a task costs about 1 ms with Dask; large pieces leave
# workers idle at the end.
_SMALLEST, _LARGEST = 16 << 20, 1 << 30
# The number of pieces, if the limits allow it.
_PIECES = 64
# The cost of a tensor besides its bytes, in bytes.
_TENSOR_COST = 4 << 10

_T = TypeVar("_T")
_K = TypeVar("_K")


class Future(Protocol):
    """The required methods of futures, as in `concurrent.futures.Future`."""

    def result(self) -> Any: ...

    def cancel(self) -> bool: ...

    def add_done_callback(self, fn: Callable[[Any], object], /) -> object: ...


class Executor(Protocol):
    """The required method of executors, as in `concurrent.futures.Executor`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function in another thread, process or machine and return its `Future`."""


def run(
    function: Callable[[Mapping[str, Any], int | None], _T],
    pieces: Sequence[Mapping[str, Any]],
    executor: Executor | None,
    *,
    sizes: Sequence[int],
    threads: int | None,
    progress: Progress,
) -> list[_T]:
    """Call ``function(piece, threads)`` for each piece and return the results in order.

    Retrying is up to the executor: its first exception ends the run. Pending pieces are cancelled,
    running pieces are awaited.

    Args:
        function: must be importable by name, because executors pickle it.
        pieces: plain data.
        executor: None to run the pieces in this thread.
        sizes: bytes of each piece.
        threads: per piece. If None, pieces get a single thread on an executor, which can run several pieces per
            machine, and all threads here.
        progress: see `convert`.
    """
    with reporter(progress, sum(sizes)) as report:
        if executor is None:
            results, done = [], 0
            for size, piece in zip(sizes, pieces, strict=True):
                results.append(function(piece, threads))
                done += size
                report(done)
            return results
        # Dask returns the result of an earlier call with equal arguments unless it gets pure=False.
        token = os.urandom(8).hex()
        calls = [(function, piece, threads or 1, token) for piece in pieces]
        return _submit(executor, calls, sizes, report)


def by_tensor(
    function: Callable[[Mapping[str, Any], int | None], Mapping[str, Any]],
    piece_of: Callable[[tuple[str, ...], tuple[PieceSource, ...]], TensorPiece],
    catalog: Catalog,
    sizes: Mapping[str, int],
    executor: Executor,
    *,
    threads: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """Run an operation on groups of tensors and return its results by tensor name.

    Args:
        function: see `run`. Its result holds "tensors": plain data by tensor name.
        piece_of: returns the piece of tensor names and their sources.
        sizes: bytes of each tensor.

    Raises:
        ValueError: a tensor is in memory, where other processes cannot read it.
    """
    sources = Sources(catalog, EXECUTOR)
    pieces = [piece_of(tuple(names), sources.of(names)) for names in groups(sizes, sources.file_of)]
    nbytes = [sum(sizes[name] for name in piece.names) for piece in pieces]
    plain = [encode(piece) for piece in pieces]
    results = run(function, plain, executor, sizes=nbytes, threads=threads, progress=progress)
    return {name: value for result in results for name, value in result["tensors"].items()}


def groups(sizes: Mapping[_K, int], file_of: Callable[[_K], WeightFile]) -> list[list[_K]]:
    """Divide tensors, or entries of archives, into pieces of similar size.

    Only small files share a piece. A file that must be unpacked is not divided.

    Args:
        sizes: bytes of each tensor.
        file_of: returns the file of a tensor.
    """
    limit = max(_SMALLEST, min(_LARGEST, sum(sizes.values(), _TENSOR_COST * len(sizes)) // _PIECES))
    by_file: dict[str, tuple[bool, list[_K]]] = {}  # whatever the order of the names
    for name in sizes:
        file = file_of(name)
        by_file.setdefault(file.place, (file.unpacked, []))[1].append(name)
    divided: list[list[_K]] = []
    room = -1  # bytes left in the last piece; none before the first
    for unpacked, names in by_file.values():
        if unpacked:
            divided.append(names)
            room = -1
            continue
        if limit - room >= _SMALLEST:
            room = -1
        for name in names:
            cost = sizes[name] + _TENSOR_COST
            if cost > room:
                divided.append([])
                room = limit
            divided[-1].append(name)
            room -= cost
    return divided


def check_executor(executor: Any) -> None:
    """Refuse an object if it is neither an executor nor None.

    Raises:
        TypeError: it has no ``submit``.
    """
    usable = callable(getattr(executor, "submit", None)) and not isinstance(executor, type)
    if executor is not None and not usable:
        raise TypeError(
            f"executor must have a submit() method like concurrent.futures.Executor, got {type(executor).__name__}: "
            "for Dask, pass client.get_executor(pure=False)"
        )


def _submit(
    executor: Executor,
    calls: Sequence[tuple[Any, ...]],
    sizes: Sequence[int],
    report: Callable[[int], object],
) -> list[Any]:
    """Submit calls of pieces and return their results in order; see `_call`."""
    finished: SimpleQueue[Future] = SimpleQueue()
    futures: dict[Future, int] = {}
    results: dict[int, Any] = {}
    done = 0
    try:
        for k, call in enumerate(calls):
            future = executor.submit(_call, *call)
            futures[future] = k
            future.add_done_callback(finished.put)
        while len(results) < len(calls):
            future = finished.get()
            k = futures[future]
            results[k] = future.result()
            log.debug("piece %d of %d is done", k + 1, len(calls))
            done += sizes[k]
            report(done)
    except BaseException:
        for future in [future for future in futures if not future.cancel()]:
            _wait(future)
        raise
    return [results[k] for k in range(len(calls))]


def _call(function: Callable[[Any, int | None], _T], piece: Any, threads: int, token: str) -> _T:
    return function(piece, threads)


def _wait(future: Future) -> None:
    """Wait for a future and ignore its error, because the first exception is raised."""
    try:
        future.result()
    except Exception as error:
        log.debug("another piece failed: %s", error)
