"""Runs what waits for a network on several threads, all of which have ended when the call returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from .stop import Stop, Stopped, belonging, current

# Requests in flight while headers are read, and while tensors are. An object store gives a connection 50 to 100 MB/s,
# and its first byte takes 50 to 100 ms.
HEADS, RANGES = 32, 16
# Seconds after which progress is reported and signals are handled.
_TICK = 0.05
# Seconds that threads get to end after an error. Those whose read cannot be aborted go on without effect.
_GRACE = 1.0

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run(tasks: Iterable[Callable[[], object]], limit: int, tick: Callable[[], object] | None = None) -> None:
    """Runs tasks on up to ``limit`` threads. The first error ends all of them, and is raised.

    Args:
        tasks: what to do; they are taken one after the other, in any thread.
        limit: most threads.
        tick: called in this thread, now and then; what it raises ends the tasks.
    """
    crew = _Crew(iter(tasks), limit)
    outer = current()  # where a task of another crew runs tasks itself
    try:
        crew.begin()
        while not crew.wait(_TICK):
            outer.check()
            if tick is not None:
                tick()
    finally:
        crew.end()
    if crew.errors:
        raise crew.errors.pop(0)  # which refers to this frame and to the crew
    if tick is not None:
        tick()


def each(function: Callable[[_Item], _Result], items: Sequence[_Item], limit: int = HEADS) -> list[_Result]:
    """The results of a function for each item, which is called on several threads if there are several items.

    Raises:
        Exception: the first error, after which no further item is begun.
    """
    if len(items) < 2:
        return [function(item) for item in items]
    results: dict[int, _Result] = {}

    def work(k: int) -> None:
        results[k] = function(items[k])

    run((partial(work, k) for k in range(len(items))), min(limit, len(items)))
    return [results[k] for k in range(len(items))]


class _Crew:
    """The threads of one call.

    Attributes:
        errors: the first that a task has raised, if one has.
    """

    def __init__(self, tasks: Iterator[Callable[[], object]], limit: int) -> None:
        self.errors: list[BaseException] = []
        self._tasks = tasks
        self._limit = limit
        self._stop = Stop()
        self._taking = threading.Lock()
        self._exhausted = False
        self._threads: list[threading.Thread] = []
        self._alive = 0
        self._condition = threading.Condition()

    def begin(self) -> None:
        """Starts the first thread; each starts the next one when it has found a task."""
        with self._condition:
            if len(self._threads) >= self._limit or self._exhausted:
                return
            thread = threading.Thread(target=self._work, name="safeload", daemon=True)
            self._threads.append(thread)
            self._alive += 1
        try:
            thread.start()
        except BaseException:  # no memory for a thread: those that run do all tasks
            with self._condition:
                self._threads.remove(thread)
                self._alive -= 1
                if self._threads:
                    return
            raise

    def _work(self) -> None:
        first = True
        try:
            with belonging(self._stop):
                while (task := self._take()) is not None:
                    if first:
                        first = False
                        self.begin()
                    task()
                    del task
        except Stopped:
            pass
        except BaseException as error:
            with self._condition:
                if not self.errors:
                    self.errors.append(error)
            self._stop.stop()
        finally:
            with self._condition:
                self._alive -= 1
                self._condition.notify_all()

    def _take(self) -> Callable[[], object] | None:
        with self._taking:
            self._stop.check()
            task = None if self._exhausted else next(self._tasks, None)
            if task is None:
                self._exhausted = True
            return task

    def wait(self, seconds: float) -> bool:
        """Waits until all tasks are done, but not longer than ``seconds``. Returns whether they are."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._alive or bool(self.errors), seconds)

    def end(self) -> None:
        """Ends all threads and waits for them, also where Ctrl-C is pressed once more."""
        until = time.monotonic() + _GRACE
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                self._stop.stop()
                with self._condition:  # an interrupted `join` would take a thread that runs for one that has ended
                    ended = self._condition.wait_for(lambda: not self._alive, max(0.0, until - time.monotonic()))
                if ended:
                    for thread in self._threads:
                        thread.join()
                break
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            try:
                raise interrupted
            finally:
                del interrupted  # which refers to this frame
