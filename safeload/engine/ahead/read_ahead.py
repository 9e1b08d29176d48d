"""Runs tasks ahead of their consumer: on threads of its own, in bounded memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, get_ident
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from ...stores.stop import Stop, Stopped, belonging

Result = TypeVar("Result")

# Called between the time slices of a task: it raises `Stopped` when the iterator is closed, and wants no result.
Check = Callable[[], object]

# Threads for tasks that read from a network: they hide its latency from each other.
REMOTE_WORKERS = 8

# Seconds after which a wait looks again: on Windows a wait for another thread does not end at Ctrl-C.
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


class Ahead(Iterator[Result], Generic[Result]):
    """The results of tasks while the next tasks run: on one thread, or on several if they wait for a network.

    The threads start with the first `next`. They end with the last task or the first that fails, when `close` is
    called, with the last reference to this object, and when the interpreter exits: nothing runs after that. The results
    that are not taken, with the tasks that run, have at most ``limit`` bytes; a larger task runs when all before it are
    taken.

    One thread at a time may take results; any thread may close.

    Attributes:
        pending: bytes of the results that are made or being made, and not taken.

    Args:
        tasks: what to do. It is advanced in the consumer's thread.
        limit: in bytes.
        workers: number of threads.
        ordered: whether results come in the order of the tasks, not in that in which they are ready.
    """

    def __init__(self, tasks: Iterable[Task], limit: int, *, workers: int = 1, ordered: bool = True) -> None:
        self._tasks = iter(tasks)
        self._limit = limit
        self._next: Task | None = None
        self._count = 0  # of the tasks that are handed over
        self._sizes: dict[int, int] = {}  # by number, of those that are not taken
        self.pending = 0  # their sum
        self._starting = False
        self._worker = _Worker(workers, ordered)
        self._stop = weakref.finalize(self, self._worker.stop)  # which is also called at exit

    @property
    def forked(self) -> bool:
        """Whether this is a child process, which has a copy of the iterator but no thread."""
        return self._worker.process != os.getpid()

    def check_process(self) -> None:
        """Raises RuntimeError after a fork, in the child process."""
        if self.forked:
            raise RuntimeError("this iterator was made before a fork, and belongs to the parent process")

    def __next__(self) -> Result:
        self.check_process()
        if self._worker.stopped:
            raise StopIteration
        if self._starting:
            raise ValueError("this iterator is taken from by what one of its tasks starts with")
        try:
            self._submit()
            if not self._sizes:
                raise StopIteration
            number, result = self._worker.take(next(iter(self._sizes)))
            self.pending -= self._sizes.pop(number)
            self._submit()
            self._worker.check_open()  # what a task starts with may have closed it
        except BaseException:
            self.close()
            raise
        found: Result = result
        return found

    def _submit(self) -> None:
        """Hands over as many tasks as the limit allows, at least one."""
        while True:
            task = next(self._tasks, None) if self._next is None else self._next
            self._next = task
            if task is None or (self._sizes and self.pending + task.nbytes > self._limit):
                return
            run = task.run
            if task.start is not None:
                self._starting = True
                try:
                    task.start()
                except Exception as error:  # it is raised when it is this task's turn
                    run = partial(_fail, [error])
                finally:
                    self._starting = False
            self._next = None
            self._sizes[self._count] = task.nbytes
            self.pending += task.nbytes
            self._worker.put(self._count, run)
            self._count += 1

    def close(self) -> None:
        """Stops the threads, within a time slice, and waits for them. Further results are dropped.

        It leaves to the thread that takes results what that thread may be using.
        """
        self._next, self._tasks = None, iter(())
        self._worker.stop()
        self._stop.detach()


def _fail(errors: list[Exception], check: Check) -> NoReturn:
    raise errors.pop()  # which refers to this frame and to the one that calls this


class _Worker:
    """The threads. They have no reference to the `Ahead`, which can be collected while they run.

    Args:
        count: number of threads.
        ordered: see `Ahead`.

    Attributes:
        process: that they belong to.
        stopped: whether `stop` was called.
    """

    def __init__(self, count: int, ordered: bool) -> None:
        self.process = os.getpid()
        self.stopped = False
        self._ordered = ordered
        self._count = count
        self._stop = Stop()
        self._ended: set[int | None] = set()
        self._tasks: SimpleQueue[tuple[int, Callable[[Check], Any]] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[int, Any, BaseException | None] | None] = SimpleQueue()
        self._early: dict[int, tuple[int, Any, BaseException | None]] = {}  # results whose turn has not come
        self._threads: list[Thread] = []

    def _work(self) -> None:
        number = -1
        try:
            with belonging(self._stop):
                while (task := self._tasks.get()) is not None:
                    number, run = task
                    self._check()
                    self._results.put((number, run(self._check), None))
                    del task, run  # so that a thread that waits keeps nothing alive
        except Stopped:
            pass
        except BaseException as error:
            self._results.put((number, None, error))
        finally:
            self._ended.add(get_ident())

    def _check(self) -> None:
        if self.stopped:
            raise Stopped

    def put(self, number: int, run: Callable[[Check], Any]) -> None:
        """Adds a task. If `stop` is called meanwhile, the thread ends at the task."""
        if self.stopped:
            return
        self._tasks.put((number, run))
        if len(self._threads) < self._count:
            # A daemon: the interpreter would wait for any other thread before it calls what stops this one.
            thread = Thread(target=self._work, name="safeload", daemon=True)
            thread.start()
            self._threads.append(thread)

    def take(self, first: int) -> tuple[int, Any]:
        """The next result, and its number.

        Args:
            first: number of the first task whose result was not taken.

        Raises:
            ValueError: the iterator was closed meanwhile, by another thread or by what was called.
            Exception: the error that the task has raised.
        """
        found = self._early.pop(first, None)
        while found is None and not self.stopped:
            with suppress(Empty):
                found = self._results.get(timeout=_POLL)
            if found is not None and self._ordered and found[0] != first:
                self._early[found[0]] = found
                found = None
        self.check_open()
        assert found is not None
        number, result, error = found
        if error is None:
            return number, result
        try:
            raise error
        finally:
            del found, error  # which refers to this frame

    def check_open(self) -> None:
        """Raises ValueError after `stop`."""
        if self.stopped:
            raise ValueError("this iterator was closed while its next item was awaited")

    def stop(self) -> None:
        """Ends the threads and waits for them; not for this one, nor after a fork, which they have not survived."""
        self.stopped = True
        if self.process != os.getpid():
            return
        self._stop.stop()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            while thread.ident != get_ident() and thread.is_alive():
                ended = thread.ident in self._ended
                thread.join(_POLL)
                if ended:
                    # Its last steps may need a lock of the interpreter's that this thread has: garbage may be
                    # collected, and an iterator with it, in the middle of threading.enumerate().
                    break
        self._early.clear()
        with suppress(Empty):
            while True:
                self._results.get_nowait()
        self._results.put(None)  # for a thread that waits
