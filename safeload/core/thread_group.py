"""Run tasks on several threads: all at once, or ahead of a consumer. The threads end with the call that uses them.

After the call returns, no thread writes into the caller's memory. The threads are daemons: the interpreter would wait
for any other thread, such as those of `concurrent.futures`, before it calls the exit hooks that stop ours.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

# Requests in flight while headers are read, and while tensors are. An object store gives a connection 50 to 100 MB/s,
# and its first byte takes 50 to 100 ms.
HEADS, RANGES = 32, 16
# Threads that prefetch from a network: they hide its latency from each other.
REMOTE_WORKERS = 8
# Seconds after which a wait looks again, reports progress and handles signals: on Windows, Ctrl-C ends no wait.
_TICK = 0.05
# Seconds that the threads of `run` get to end. A thread in a read that cannot be aborted then continues without effect.
_GRACE = 1.0
# Seconds that the function of `left_behind` gets to clean up after its call has ended.
_CLEANUP = 0.3

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


# ---- stopping ----


class Stopped(BaseException):
    """Raised in a thread after its call has ended. Not an `Exception`, because it is not a failed read."""


class Stop:
    """Ends the threads of a call. Any thread may use it; `stop` may be called more than once."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.stopped = False
        self._filling: list[int] = []  # thread ids
        self._aborts: dict[object, Callable[[], object]] = {}

    def stop(self) -> None:
        """End all waits and abortable reads, and return when no thread is in `filling`."""
        with self._condition:
            self.stopped = True
            aborts = list(self._aborts.values())
            self._condition.notify_all()
        for abort in aborts:
            abort()
        with self._condition:
            own = threading.get_ident()  # it may be in `filling` itself, if garbage collection brought it here
            self._condition.wait_for(lambda: all(thread == own for thread in self._filling))

    def check(self) -> None:
        """Raise Stopped after `stop`."""
        if self.stopped:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Sleep; raise Stopped soon after `stop` is called."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.stopped:
            time.sleep(min(left, _TICK))
        self.check()

    @contextmanager
    def aborting(self, abort: Callable[[], object]) -> Iterator[None]:
        """Inside the block, `stop` calls ``abort`` from another thread, which makes this thread's read fail."""
        key = object()
        with self._condition:
            self.check()
            self._aborts[key] = abort
        try:
            yield
        except BaseException:
            self.check()  # the abort has caused the failure
            raise
        finally:
            with self._condition:
                del self._aborts[key]

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Surround an unabortable read's writes into the caller's memory: `stop` waits for the end of the block."""
        with self._condition:
            self.check()
            self._filling.append(threading.get_ident())
        try:
            yield
        finally:
            with self._condition:
                self._filling.remove(threading.get_ident())
                self._condition.notify_all()


_of_thread = threading.local()


def current() -> Stop:
    """Return the `Stop` of this thread. It never stops in the program's own threads, where Ctrl-C interrupts reads."""
    stop: Stop | None = getattr(_of_thread, "stop", None)
    if stop is None:  # one for each, because another thread could hold its lock at a fork
        stop = _of_thread.stop = Stop()
    return stop


def check_stopped(*_: object) -> None:
    """Raise Stopped if the call of this thread has ended; work that reports its progress can report here."""
    current().check()


@contextmanager
def belonging(stop: Stop) -> Iterator[None]:
    """Inside the block, `current` returns ``stop`` in this thread."""
    before = current()
    _of_thread.stop = stop
    try:
        yield
    finally:
        _of_thread.stop = before


def fill(spans: Iterable[tuple[int, memoryview]], begin: int, content: bytes | bytearray | memoryview) -> None:
    """Copy the result of an unabortable read to `Span`s, unless its call has ended."""
    view = memoryview(content)
    with current().filling():
        for offset, memory in spans:
            memory[:] = view[offset - begin : offset - begin + len(memory)]


class _Threads(Stop):
    """Threads and their tasks, without a reference to a `Prefetch`: it can be collected while they run."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.process = os.getpid()
        self._limit = limit
        self._threads: list[threading.Thread] = []
        self._ended: set[threading.Thread] = set()
        self._tasks: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()  # None ends a thread
        self._results: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()  # number, result and error

    def put(self, number: int, work: Callable[[], Any]) -> None:
        """Add a task, and start a thread if the limit allows. After `stop`, the thread ends at the task."""
        self._tasks.put((number, work))
        if self.stopped or len(self._threads) >= self._limit:
            return
        # In the context of this call, which says whether pages of files that a thread opens are dropped.
        thread = threading.Thread(target=copy_context().run, args=(self._work,), name="safeload", daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except Exception:  # the running threads do all tasks
            self._threads.remove(thread)
            self._limit = len(self._threads)
            if not self._threads:
                raise

    def _work(self) -> None:
        failed = False
        try:
            with suppress(Stopped), belonging(self):
                while not failed and (task := self._tasks.get()) is not None:
                    self.check()
                    number, work = task
                    result: tuple[int, Any, BaseException | None]
                    try:
                        result = number, work(), None
                    except Stopped:
                        raise
                    except BaseException as error:
                        result, failed = (number, None, error), True
                    self._results.put(result)
                    del task, work, result  # so that this thread keeps nothing alive
        finally:
            with self._condition:
                self._ended.add(threading.current_thread())
                self._condition.notify_all()

    def take(self, tick: Callable[[], object] | None = None) -> tuple[int, Any, BaseException | None]:
        """Return the next result; wait for it, and call ``tick`` now and then."""
        outer = current()  # of a task that waits for other tasks
        while not self.stopped:
            with suppress(Empty):
                return self._results.get(timeout=_TICK)
            outer.check()
            if tick is not None:
                tick()
        raise ValueError("this iterator was closed while its next item was awaited")

    def end(self, grace: float = math.inf) -> None:
        """Stop the threads and wait up to ``grace`` seconds until they have ended, even if Ctrl-C is pressed again."""
        self.stopped = True
        if self.process != os.getpid():  # a forked child has none of the threads
            return
        own, until, ended = threading.get_ident(), time.monotonic() + grace, False

        def all_ended() -> bool:
            return all(thread.ident in (None, own) or thread in self._ended for thread in [*self._threads])

        interrupted: list[KeyboardInterrupt] = []
        while not ended:
            try:
                self.stop()
                for _ in range(self._limit):
                    self._tasks.put(None)
                # An interrupted `join` would take a running thread for one that has ended.
                with self._condition:
                    ended = self._condition.wait_for(all_ended, max(0.0, min(_TICK, until - time.monotonic())))
                if time.monotonic() >= until:
                    break
            except KeyboardInterrupt as error:
                interrupted = [error]
                until = min(until, time.monotonic() + _GRACE)
        for thread in [*self._threads]:
            if thread in self._ended and thread is not threading.current_thread():
                # The last steps of a thread may need a lock of the interpreter that this thread holds: garbage may be
                # collected, and an iterator with it, in the middle of threading.enumerate().
                thread.join(4 * _TICK)
        self._results = SimpleQueue()  # nobody takes the rest
        if interrupted:
            raise interrupted.pop()  # which refers to this frame


# ---- tasks ahead of a consumer ----


class Task(NamedTuple):
    """Work that may be done ahead of the consumer."""

    nbytes: int  # memory that the result takes
    run: Callable[[], Any]  # makes the result, in another thread
    start: Callable[[], object] | None = None  # called before `run`, in the consumer's thread


class Prefetch(Iterator[_Result], Generic[_Result]):
    """The results of tasks, while threads already run the next tasks.

    The threads start with the first `next`. They end with the last task or the first error, when `close` is called,
    with the last reference to this object, and when the interpreter exits. Running tasks and waiting results take at
    most ``limit`` bytes; a larger task runs alone. Only one thread at a time may take results; any thread may close.

    The consumer's thread advances ``tasks``, and calls ``tick`` while it waits.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        limit: int,
        *,
        workers: int = 1,
        ordered: bool = True,
        tick: Callable[[], object] | None = None,
        grace: float = math.inf,
    ) -> None:
        self._tasks = iter(tasks)
        self._limit = limit
        self._next: Task | None = None
        self._count = 0  # tasks handed over
        self._sizes: dict[int, int] = {}  # of the tasks without a taken result, by number
        self.pending = 0  # sum of the sizes
        self._starting = False
        self._ordered = ordered
        self._tick = tick
        self._grace = grace
        self._early: dict[int, tuple[int, Any, BaseException | None]] = {}  # results ahead of their turn
        self._threads = _Threads(workers)
        self.stop = self._threads.stop  # does not wait for the threads
        self._end = weakref.finalize(self, self._threads.end)  # also called at exit

    @property
    def forked(self) -> bool:
        """True in a child process, which has a copy of the iterator but no thread."""
        return self._threads.process != os.getpid()

    def check_process(self) -> None:
        """Raise RuntimeError after a fork, in the child process."""
        if self.forked:
            raise RuntimeError("this iterator was made before a fork, and belongs to the parent process")

    def __next__(self) -> _Result:
        self.check_process()
        if self._threads.stopped:
            raise StopIteration
        if self._starting:
            raise ValueError("this iterator is starting a task, and cannot be advanced by the function that starts it")
        error: BaseException | None = None
        try:
            self.start()
            if not self._sizes:
                raise StopIteration
            number, result, error = self._take()
            if error is not None:
                raise error
            self.pending -= self._sizes.pop(number)
            self.start()
            if self._threads.stopped:  # `Task.start` may have closed it
                raise ValueError("this iterator was closed while its next item was awaited")
        except BaseException:
            self.close()
            raise
        finally:
            del error  # it refers to this frame
        value: _Result = result
        return value

    def _take(self) -> tuple[int, Any, BaseException | None]:
        """Return the next result: that of the first task, if they are ordered."""
        if not self._ordered:
            return self._threads.take(self._tick)
        first = next(iter(self._sizes))
        while first not in self._early:
            result = self._threads.take(self._tick)
            self._early[result[0]] = result
        return self._early.pop(first)

    def start(self) -> None:
        """Hand over as many tasks as the limit allows, at least one."""
        while True:
            task = next(self._tasks, None) if self._next is None else self._next
            self._next = task
            if task is None or (self._sizes and self.pending + task.nbytes > self._limit):
                return
            if task.start is not None:
                self._starting = True
                try:
                    task.start()
                finally:
                    self._starting = False
            self._next = None
            self._sizes[self._count] = task.nbytes
            self.pending += task.nbytes
            self._threads.put(self._count, task.run)
            self._count += 1

    def close(self) -> None:
        """Stop the threads, within a time slice, and wait for them; the consumer's thread may be using other state."""
        self._next, self._tasks = None, iter(())
        self._threads.end(self._grace)
        if self._grace < math.inf:
            self._grace = 0.0  # threads that are left now end on their own
        self._end.detach()
        self._early.clear()


# ---- calls ----


def run(tasks: Iterable[Callable[[], object]], limit: int, tick: Callable[[], object] | None = None) -> None:
    """Run tasks on up to ``limit`` threads until the first error, also of this thread, which advances and ticks."""
    due = 0.0
    calls = (Task(1, task) for task in tasks)
    results: Prefetch[object] = Prefetch(calls, 2 * limit, workers=limit, ordered=False, tick=tick, grace=_GRACE)
    with closing(results):
        for _ in results:
            if tick is not None and time.monotonic() >= due:
                tick()
                due = time.monotonic() + _TICK
    if tick is not None:
        tick()


def each(function: Callable[[_Item], _Result], items: Sequence[_Item], limit: int = HEADS) -> list[_Result]:
    """Return the results of a function for each item. Two or more items are run on threads."""
    if len(items) < 2:
        return [function(item) for item in items]
    results: list[Any] = [None] * len(items)

    def work(k: int) -> None:
        results[k] = function(items[k])

    run((partial(work, k) for k in range(len(items))), min(limit, len(items)))
    return results


def in_order(function: Callable[[_Item], _Result], items: Iterable[_Item], count: int) -> Iterator[_Result]:
    """Yield the results of a function that releases the GIL, a few calls ahead, until the generator is closed."""
    if count == 1:
        yield from map(function, items)
        return
    tasks = (Task(1, partial(function, item)) for item in items)
    results: Prefetch[_Result] = Prefetch(tasks, 2 * count + 1, workers=count)
    with closing(results):
        yield from results


def left_behind(function: Callable[[], _Result], seconds: float = math.inf) -> _Result:
    """Call a function that cannot be aborted in a thread of its own, which is left behind if this call ends first."""
    until = time.monotonic() + seconds

    def tick() -> None:
        if time.monotonic() >= until:
            raise TimeoutError

    call: Prefetch[_Result] = Prefetch([Task(1, function)], 1, tick=tick, grace=_CLEANUP)
    with closing(call), current().aborting(call.stop):
        try:
            call.start()
        except RuntimeError:  # the system has no more threads
            return function()
        return next(call)
