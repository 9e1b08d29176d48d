"""Runs the pieces of a plan on an executor: anything with the ``submit`` of `concurrent.futures.Executor`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ...base import log
from ...engine.run.progress import Progress, reporter
from .catalog import Catalog
from .codec import encode
from .plan import TensorPiece
from .sources import Source, Sources, groups

# The argument, for messages.
EXECUTOR = "executor="

_T = TypeVar("_T")


class Future(Protocol):
    """What is used of `concurrent.futures.Future`."""

    def result(self) -> Any:
        """The result, or the exception, raised."""

    def cancel(self) -> bool:
        """Whether it will not run."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> object:
        """Calls a function when it is done, with itself."""


class Executor(Protocol):
    """What is used of `concurrent.futures.Executor`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs a function somewhere, and returns its `Future`."""


def run(
    function: Callable[[Mapping[str, Any], int | None], _T],
    pieces: Sequence[Mapping[str, Any]],
    executor: Executor | None,
    *,
    sizes: Sequence[int],
    threads: int | None,
    progress: Progress,
) -> list[_T]:
    """Runs a function once for each piece, and returns what it returns, in the order of the pieces.

    The engine decides what is repeated: an exception of a piece that it hands on ends the run. Pieces that have not
    begun are then cancelled, and those that cannot be cancelled are waited for.

    Args:
        function: of a piece and the number of threads; it is pickled by its name.
        pieces: plain data.
        executor: runs them; None to run them here, one after the other.
        sizes: bytes of each piece.
        threads: for each piece; None for one on an executor, which runs several on a machine, and for all here.
        progress: see `convert`.

    Raises:
        TypeError: ``executor`` has no ``submit``.
        Exception: what a piece or the executor has raised.
    """
    with reporter(progress, sum(sizes)) as report:
        if executor is None:
            results, done = [], 0
            for size, piece in zip(sizes, pieces, strict=True):
                results.append(function(piece, threads))
                done += size
                report(done)
            return results
        return _submit(function, pieces, executor, sizes, threads or 1, report)


def by_tensor(
    function: Callable[[Mapping[str, Any], int | None], Mapping[str, Any]],
    piece_of: Callable[[tuple[str, ...], tuple[Source, ...]], TensorPiece],
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
        piece_of: makes the piece for some names and their sources.
        catalog: has the tensors.
        sizes: bytes of each tensor.
        executor: runs the pieces.
        threads: see `run`.
        progress: see `run`.

    Raises:
        ValueError: a tensor is in memory, where other processes cannot read it.
    """
    sources = Sources(catalog, EXECUTOR)
    pieces = [piece_of(tuple(names), sources.of(names)) for names in groups(sizes, sources.file_of)]
    nbytes = [sum(sizes[name] for name in piece.names) for piece in pieces]
    plain = [encode(piece) for piece in pieces]
    results = run(function, plain, executor, sizes=nbytes, threads=threads, progress=progress)
    return {name: value for result in results for name, value in result["tensors"].items()}


def _submit(
    function: Callable[[Mapping[str, Any], int | None], _T],
    pieces: Sequence[Mapping[str, Any]],
    executor: Executor,
    sizes: Sequence[int],
    threads: int,
    report: Callable[[int], object],
) -> list[_T]:
    finished: SimpleQueue[Future] = SimpleQueue()
    futures: dict[Future, int] = {}
    results: dict[int, _T] = {}
    done = 0
    # Dask returns the result of an earlier call with equal arguments unless it gets pure=False.
    token = os.urandom(8).hex()
    try:
        for k, piece in enumerate(pieces):
            future = executor.submit(_call, function, piece, threads, token)
            futures[future] = k
            future.add_done_callback(finished.put)
        while len(results) < len(pieces):
            future = finished.get()
            k = futures[future]
            results[k] = future.result()
            log.debug("piece %d of %d is done", k + 1, len(pieces))
            done += sizes[k]
            report(done)
    except BaseException:
        for future in [future for future in futures if not future.cancel()]:
            _wait(future)
        raise
    return [results[k] for k in range(len(pieces))]


def check_executor(executor: Any) -> None:
    """Refuses what is not an executor, and not None.

    Raises:
        TypeError: it has no ``submit``.
    """
    usable = callable(getattr(executor, "submit", None)) and not isinstance(executor, type)
    if executor is not None and not usable:
        raise TypeError(
            f"executor must have the submit() of concurrent.futures.Executor, found {type(executor).__name__}: "
            "Dask's is client.get_executor(pure=False)"
        )


def _call(function: Callable[[Any, int | None], _T], piece: Any, threads: int, token: str) -> _T:
    return function(piece, threads)


def _wait(future: Future) -> None:
    """Waits until it has ended, however it ends: the first exception is the one to raise."""
    try:
        future.result()
    except Exception as error:
        log.debug("another piece: %s", error)
