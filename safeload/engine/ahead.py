"""Runs tasks ahead of their consumer: on one thread, in order, in bounded memory."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, get_ident
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

Result = TypeVar("Result")

# Called between the time slices of a task: it raises when the result is not wanted, since the iterator is closed.
Check = Callable[[], object]

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


class Unwanted(BaseException):
    """Ends a task and the thread after `Ahead.close`, or in a task whose turn never comes.

    It is not an Exception, so that no task catches it.
    """


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
        self._starting = False
        self._worker = _Worker()
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
            result: Result = self._worker.take()
            self.pending -= self._sizes.popleft()
            self._submit()
            self._worker.check_open()  # what a task starts with may have closed it
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
                self._starting = True
                try:
                    task.start()
                except Exception as error:  # it is raised when it is this task's turn
                    run = partial(_fail, error)
                finally:
                    self._starting = False
            self._next = None
            self._sizes.append(task.nbytes)
            self.pending += task.nbytes
            self._worker.put(run)

    def close(self) -> None:
        """Stops the thread, within a time slice, and waits for it. Further results are dropped.

        It leaves to the thread that takes results what that thread may be using.
        """
        self._next, self._tasks = None, iter(())
        self._worker.stop()
        self._stop.detach()


def _fail(error: Exception, check: Check) -> NoReturn:
    raise error


class _Worker:
    """The thread. It has no reference to the `Ahead`, which can be collected while the thread runs.

    Attributes:
        process: that it belongs to.
        stopped: whether `stop` was called.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.stopped = False
        self._ended = False
        self._tasks: SimpleQueue[Callable[[Check], Any] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread: Thread | None = None

    def _work(self) -> None:
        try:
            while (run := self._tasks.get()) is not None:
                self._check()
                self._results.put((run(self._check), None))
                del run  # so that a thread that waits keeps nothing alive
        except Unwanted:
            pass
        except BaseException as error:
            self._results.put((None, error))
        finally:
            self._ended = True

    def _check(self) -> None:
        if self.stopped:
            raise Unwanted

    def put(self, run: Callable[[Check], Any]) -> None:
        """Adds a task. If `stop` is called meanwhile, the thread ends at the task."""
        if self.stopped:
            return
        self._tasks.put(run)
        if self._thread is None:
            # A daemon: the interpreter would wait for any other thread before it calls what stops this one.
            thread = Thread(target=self._work, name="safeload", daemon=True)
            thread.start()
            self._thread = thread

    def take(self) -> Any:
        """The next result.

        Raises:
            ValueError: the iterator was closed meanwhile, by another thread or by what was called.
            Exception: the error that the task has raised.
        """
        found = None
        while found is None and not self.stopped:
            with suppress(Empty):
                found = self._results.get(timeout=_POLL)
        self.check_open()
        assert found is not None
        result, error = found
        if error is None:
            return result
        try:
            raise error
        finally:
            del found, error  # which refers to this frame

    def check_open(self) -> None:
        """Raises ValueError after `stop`."""
        if self.stopped:
            raise ValueError("this iterator was closed while its next item was awaited")

    def stop(self) -> None:
        """Ends the thread and waits for it; not in the thread itself, nor after a fork, which it has not survived."""
        self.stopped = True
        if self.process != os.getpid():
            return
        self._tasks.put(None)
        thread = self._thread
        while thread is not None and thread.ident != get_ident() and thread.is_alive():
            ended = self._ended
            thread.join(_POLL)
            if ended:
                # Its last steps may need a lock of the interpreter's that this thread has: garbage may be collected,
                # and an iterator with it, in the middle of threading.enumerate().
                break
        with suppress(Empty):
            while True:
                self._results.get_nowait()
        self._results.put((None, None))  # for a thread that waits
