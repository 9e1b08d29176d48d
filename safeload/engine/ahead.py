"""Runs tasks ahead of their consumer: on one thread, in order, in bounded memory."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

Result = TypeVar("Result")

# Called between the time slices of a task: it raises when the result is not wanted, since the iterator is closed.
Check = Callable[[], object]

# Seconds after which a wait looks for signals: on Windows a wait for another thread does not end at Ctrl-C.
_POLL = 0.1


class Task(NamedTuple):
    """Work that may be done ahead.

    Attributes:
        nbytes: memory that its result takes.
        run: makes the result, in another thread.
        start: called before, in the consumer's thread; None for nothing to do.
    """

    nbytes: int
    run: Callable[[Check], Any]
    start: Callable[[], object] | None = None


class Unwanted(BaseException):
    """Ends a task after `Ahead.close`; not an Exception, so that no task catches it."""


class Ahead(Iterator[Result], Generic[Result]):
    """The results of tasks, in order, while the next tasks run on a thread of its own.

    The thread starts with the first `next`. It ends with the last task or the first that fails, when `close` is called,
    with the last reference to this object, and when the interpreter exits: nothing runs after that. The results that
    are not taken, with the task that runs, have at most ``limit`` bytes; a larger task runs when all before it are
    taken.

    One thread at a time may take results; any thread may close.

    Attributes:
        pending: bytes of the results that are made or being made, and not taken.

    Args:
        tasks: what to do. It is advanced in the consumer's thread.
        limit: in bytes.
    """

    def __init__(self, tasks: Iterable[Task], limit: int) -> None:
        self._tasks = iter(tasks)
        self._limit = limit
        self._next: Task | None = None
        self._sizes: deque[int] = deque()  # of the tasks that are handed over and not taken
        self.pending = 0  # their sum
        self._worker: _Worker | None = None
        self._stop: Callable[[], object] | None = None
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raises RuntimeError after a fork, in the process that has no thread."""
        if self._process != os.getpid():
            raise RuntimeError("this iterator was made before a fork, and its thread is in the parent process")

    def __next__(self) -> Result:
        self.check_process()
        try:
            self._submit()
            if self._worker is None or not self._sizes:
                raise StopIteration
            result: Result = self._worker.take()
            self.pending -= self._sizes.popleft()
            self._submit()
        except BaseException:
            self.close()
            raise
        return result

    def _submit(self) -> None:
        """Hands over as many tasks as the limit allows, at least one."""
        while True:
            task = next(self._tasks, None) if self._next is None else self._next
            self._next = task
            if task is None or (self._sizes and self.pending + task.nbytes > self._limit):
                return
            run = task.run
            if task.start is not None:
                try:
                    task.start()
                except Exception as error:  # it is raised when it is this task's turn
                    run = partial(_fail, error)
            if self._worker is None:
                self._worker = _Worker()
                self._stop = weakref.finalize(self, self._worker.stop)  # which is also called at exit
            self._next = None
            self._sizes.append(task.nbytes)
            self.pending += task.nbytes
            self._worker.put(run)

    def close(self) -> None:
        """Stops the thread, within a time slice, and waits for it. Further results are dropped."""
        self._next, self._tasks = None, iter(())
        self._sizes.clear()
        stop, self._stop, self._worker = self._stop, None, None
        if stop is not None:
            stop()


def _fail(error: Exception, check: Check) -> NoReturn:
    raise error


class _Worker:
    """The thread. It has no reference to the `Ahead`, which can be collected while the thread runs."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[Check], Any] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._stopped = False
        self._process = os.getpid()
        # A daemon: the interpreter would wait for any other thread before it calls what stops this one.
        self._thread = Thread(target=self._work, name="safeload", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (run := self._tasks.get()) is not None:
            try:
                self._check()
                result = run(self._check)
            except Unwanted:
                return
            except BaseException as error:
                self._results.put((None, error))
                return
            self._results.put((result, None))
            del run, result  # so that a thread that waits keeps nothing alive

    def _check(self) -> None:
        if self._stopped:
            raise Unwanted

    def put(self, run: Callable[[Check], Any]) -> None:
        """Adds a task."""
        self._tasks.put(run)

    def take(self) -> Any:
        """The next result.

        Raises:
            ValueError: another thread has closed the iterator meanwhile.
            Exception: the error that the task has raised.
        """
        while True:
            try:
                result, error = self._results.get(timeout=_POLL)
            except Empty:
                if self._stopped:
                    raise ValueError("another thread has closed this iterator") from None
                continue
            if error is not None:
                raise error
            return result

    def stop(self) -> None:
        """Ends the thread and waits for it; not in the thread itself, nor after a fork, which it has not survived."""
        self._stopped = True
        if self._process == os.getpid() and current_thread() is not self._thread:
            self._tasks.put(None)
            self._thread.join()
