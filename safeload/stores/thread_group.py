"""Run tasks on several threads: all at once, or ahead of a consumer. The threads end with their caller."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from .stop import Stop, Stopped, belonging, current

# Requests in flight while headers are read, and while tensors are. An object store gives a connection 50 to 100 MB/s,
# and its first byte takes 50 to 100 ms.
HEADS, RANGES = 32, 16
# Threads that prefetch from a network: they hide its latency from each other.
REMOTE_WORKERS = 8
# Seconds after which `run` reports progress and handles signals.
_TICK = 0.05
# Seconds after which a wait looks again: on Windows, Ctrl-C does not end a wait for another thread.
_POLL = 0.1
# Seconds that the threads of `run` get to end. A thread in a read that cannot be aborted then continues without effect.
_GRACE = 1.0

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Called between the time slices of a task: raises `Stopped` if the iterator is closed.
Check = Callable[[], object]


def run(tasks: Iterable[Callable[[], object]], limit: int, tick: Callable[[], object] | None = None) -> None:
    """Run tasks on up to ``limit`` threads. The first error stops all tasks, and is raised.

    One thread at a time advances ``tasks``; ``tick`` runs in this thread, and its exception stops the tasks.
    """
    errors: list[BaseException] = []
    threads = _Threads(_next_of(tasks), limit, errors.append)
    outer = current()  # of a task that calls `run` itself
    try:
        threads.start()
        while not threads.wait(_TICK, errors):
            outer.check()
            if tick is not None:
                tick()
    finally:
        threads.end(_GRACE)
    if errors:
        raise errors.pop(0)  # the traceback refers to this frame
    if tick is not None:
        tick()


def _next_of(tasks: Iterable[Callable[[], object]]) -> Callable[[Stop], Callable[[], object] | None]:
    """Return a function that returns the next task, or None at the end; any thread may call it."""
    iterator, taking = iter(tasks), threading.Lock()

    def take(stop: Stop) -> Callable[[], object] | None:
        with taking:
            stop.check()
            return next(iterator, None)

    return take


def each(function: Callable[[_Item], _Result], items: Sequence[_Item], limit: int = HEADS) -> list[_Result]:
    """Return the results of a function for each item. Two or more items are run on threads."""
    if len(items) < 2:
        return [function(item) for item in items]
    results: dict[int, _Result] = {}

    def work(k: int) -> None:
        results[k] = function(items[k])

    run((partial(work, k) for k in range(len(items))), min(limit, len(items)))
    return [results[k] for k in range(len(items))]


def in_order(function: Callable[[_Item], _Result], items: Iterable[_Item], count: int) -> Iterator[_Result]:
    """Yield the results of a function that releases the GIL, called on ``count`` threads, in the order of its items.

    A few calls run ahead of the consumer. Closing the generator stops all calls.
    """
    if count == 1:
        yield from map(function, items)
        return

    def task(item: _Item) -> Task:
        return Task(1, lambda check: function(item))

    results: Prefetch[_Result] = Prefetch(map(task, items), 2 * count + 1, workers=count)
    with closing(results):
        yield from results


class _Threads:
    """Daemon threads that run tasks until there are none, `end` is called or a task fails."""

    def __init__(
        self,
        take: Callable[[Stop], Callable[[], object] | None],
        limit: int,
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        self.process = os.getpid()
        self._take = take
        self._limit = limit
        self._failed = failed
        self._stop = Stop()
        self._threads: list[threading.Thread] = []
        self._ended: set[threading.Thread] = set()
        self._condition = threading.Condition()

    def start(self) -> None:
        """Start a thread if the limit allows. If the system cannot start it, the running threads do all tasks."""
        with self._condition:
            if len(self._threads) >= self._limit:
                return
            # The interpreter would wait for any other thread before it calls the exit hooks that stop this one.
            thread = threading.Thread(target=self._work, name="safeload", daemon=True)
            self._threads.append(thread)
        try:
            thread.start()
        except Exception:
            with self._condition:
                self._threads.remove(thread)
                if self._threads:
                    self._limit = len(self._threads)
                    return
            raise

    def _work(self) -> None:
        try:
            with belonging(self._stop):
                while (task := self._take(self._stop)) is not None:
                    if self._failed is not None and len(self._threads) < self._limit:
                        self.start()
                    task()
                    del task  # so that a waiting thread keeps nothing alive
        except Stopped:
            pass
        except BaseException as error:
            if self._failed is not None:
                self._failed(error)
                self._stop.stop()
        finally:
            with self._condition:
                self._ended.add(threading.current_thread())
                self._condition.notify_all()

    def _running(self) -> list[threading.Thread]:
        """Return the threads that have begun and not ended, except this one."""
        own = threading.get_ident()
        return [thread for thread in [*self._threads] if thread.ident not in (None, own) and thread not in self._ended]

    def wait(self, seconds: float, errors: Sequence[BaseException] = ()) -> bool:
        """Wait until all threads have ended or there is an error, up to ``seconds``; return False if time ran out."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(errors) or not self._running(), seconds)

    def end(self, grace: float = math.inf) -> None:
        """Stop the threads and wait up to ``grace`` seconds until they have ended, even if Ctrl-C is pressed again."""
        until = time.monotonic() + grace
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                self._stop.stop()
                # An interrupted `join` would take a running thread for one that has ended.
                while not self.wait(max(0.0, min(_POLL, until - time.monotonic()))):
                    if time.monotonic() >= until:
                        break
                break
            except KeyboardInterrupt as error:
                interrupted = error
                until = min(until, time.monotonic() + _GRACE)
        for thread in [*self._threads]:
            if thread in self._ended and thread is not threading.current_thread():
                # The last steps of a thread may need a lock of the interpreter that this thread holds: garbage may be
                # collected, and an iterator with it, in the middle of threading.enumerate().
                thread.join(_POLL)
        if interrupted is not None:
            try:
                raise interrupted
            finally:
                del interrupted  # which refers to this frame


class Task(NamedTuple):
    """Work that may be done ahead of the consumer."""

    nbytes: int  # memory that the result takes
    run: Callable[[Check], Any]  # makes the result, in another thread
    start: Callable[[], object] | None = None  # called before `run`, in the consumer's thread


class Prefetch(Iterator[_Result], Generic[_Result]):
    """The results of tasks, while threads already run the next tasks.

    The threads start with the first `next`. They end with the last task or the first error, when `close` is called,
    with the last reference to this object, and when the interpreter exits. Running tasks and waiting results take at
    most ``limit`` bytes; a larger task runs alone. Only one thread at a time may take results; any thread may close.

    The consumer's thread advances ``tasks``.
    """

    def __init__(self, tasks: Iterable[Task], limit: int, *, workers: int = 1, ordered: bool = True) -> None:
        self._tasks = iter(tasks)
        self._limit = limit
        self._next: Task | None = None
        self._count = 0  # tasks handed over
        self._sizes: dict[int, int] = {}  # of the tasks without a taken result, by number
        self.pending = 0  # sum of the sizes
        self._starting = False
        self._queues = _Queues(workers, ordered)
        self._stop = weakref.finalize(self, self._queues.stop)  # also called at exit

    @property
    def forked(self) -> bool:
        """True in a child process, which has a copy of the iterator but no thread."""
        return self._queues.threads.process != os.getpid()

    def check_process(self) -> None:
        """Raise RuntimeError after a fork, in the child process."""
        if self.forked:
            raise RuntimeError("this iterator was made before a fork, and belongs to the parent process")

    def __next__(self) -> _Result:
        self.check_process()
        if self._queues.stopped:
            raise StopIteration
        if self._starting:
            raise ValueError("this iterator is starting a task, and cannot be advanced by the function that starts it")
        try:
            self._submit()
            if not self._sizes:
                raise StopIteration
            number, result = self._queues.take(next(iter(self._sizes)))
            self.pending -= self._sizes.pop(number)
            self._submit()
            self._queues.check_open()  # `Task.start` may have closed it
        except BaseException:
            self.close()
            raise
        value: _Result = result
        return value

    def start(self) -> None:
        """Start the first tasks now instead of with the first `next`."""
        self._submit()

    def _submit(self) -> None:
        """Hand over as many tasks as the limit allows, at least one."""
        while True:
            task = next(self._tasks, None) if self._next is None else self._next
            self._next = task
            if task is None or (self._sizes and self.pending + task.nbytes > self._limit):
                return
            work = task.run
            if task.start is not None:
                self._starting = True
                try:
                    task.start()
                except Exception as error:  # raised when it is this task's turn
                    work = partial(_fail, [error])
                finally:
                    self._starting = False
            self._next = None
            self._sizes[self._count] = task.nbytes
            self.pending += task.nbytes
            self._queues.put(self._count, work)
            self._count += 1

    def close(self) -> None:
        """Stop the threads, within a time slice, and wait for them. Further results are dropped.

        State that the consumer's thread may be using is left to that thread.
        """
        self._next, self._tasks = None, iter(())
        self._queues.stop()
        self._stop.detach()


def _fail(errors: list[Exception], check: Check) -> NoReturn:
    raise errors.pop()  # the traceback refers to this frame and to the caller's


class _Queues:
    """Tasks and results of a `Prefetch`, without a reference to it: it can be collected while its threads run."""

    def __init__(self, workers: int, ordered: bool) -> None:
        self.stopped = False
        self.threads = _Threads(self._next_task, workers)
        self._workers = workers
        self._ordered = ordered
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[int, Any, BaseException | None] | None] = SimpleQueue()
        self._early: dict[int, tuple[int, Any, BaseException | None]] = {}  # results ahead of their turn

    def _next_task(self, _: Stop) -> Callable[[], object] | None:
        task = self._tasks.get()
        self._check()
        return task

    def _check(self) -> None:
        if self.stopped:
            raise Stopped

    def _run(self, number: int, work: Callable[[Check], Any]) -> None:
        try:
            self._results.put((number, work(self._check), None))
            return
        except Stopped:
            raise
        except BaseException as error:
            self._results.put((number, None, error))
        raise Stopped  # the thread begins nothing after an error

    def put(self, number: int, work: Callable[[Check], Any]) -> None:
        """Add a task. If `stop` is called meanwhile, the thread ends at the task."""
        if self.stopped:
            return
        self._tasks.put(partial(self._run, number, work))
        if number < self._workers:
            self.threads.start()

    def take(self, first: int) -> tuple[int, Any]:
        """Return the next result and its number; ``first`` is the first task still to be taken."""
        entry = self._early.pop(first, None)
        while entry is None and not self.stopped:
            with suppress(Empty):
                entry = self._results.get(timeout=_POLL)
            if entry is not None and self._ordered and entry[0] != first:
                self._early[entry[0]] = entry
                entry = None
        self.check_open()
        assert entry is not None
        number, result, error = entry
        if error is None:
            return number, result
        try:
            raise error
        finally:
            del entry, error  # which refers to this frame

    def check_open(self) -> None:
        """Raise ValueError after `stop`."""
        if self.stopped:
            raise ValueError("this iterator was closed while its next item was awaited")

    def stop(self) -> None:
        """End the threads and wait for them, except for this thread and after a fork."""
        self.stopped = True
        if self.threads.process != os.getpid():
            return
        for _ in range(self._workers):
            self._tasks.put(None)
        self.threads.end()
        self._early.clear()
        with suppress(Empty):
            while True:
                self._results.get_nowait()
        self._results.put(None)  # for a thread that waits
