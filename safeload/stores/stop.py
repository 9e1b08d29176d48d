"""Ends the threads that read for a call: when the call returns, none of them writes into the caller's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopped(BaseException):
    """Raised in a thread whose work is no longer wanted. Not an `Exception`: nothing may take it for a failed read."""


class Stop:
    """Tells the threads of a call to end. Any thread may use it; `stop` may be called more than once."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._stopped = False
        self._filling: list[int] = []  # threads
        self._aborts: dict[object, Callable[[], object]] = {}

    def stop(self) -> None:
        """Ends all waiting and every read that can be ended, and returns when no thread is in `filling`."""
        with self._condition:
            self._stopped = True
            aborts = list(self._aborts.values())
            self._condition.notify_all()
        for abort in aborts:
            abort()
        with self._condition:
            own = threading.get_ident()  # which may be in `filling`, where garbage was collected
            self._condition.wait_for(lambda: all(thread == own for thread in self._filling))

    def check(self) -> None:
        """Raises Stopped after `stop`."""
        if self._stopped:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Waits; raises Stopped as soon as `stop` is called."""
        with self._condition:
            self._condition.wait_for(lambda: self._stopped, seconds)
        self.check()

    @contextmanager
    def aborting(self, abort: Callable[[], object]) -> Iterator[None]:
        """While it is entered, `stop` calls a function that makes the read in this thread fail, in another thread."""
        key = object()
        with self._condition:
            self.check()
            self._aborts[key] = abort
        try:
            yield
        except BaseException:
            self.check()  # the failure is that of the abort
            raise
        finally:
            with self._condition:
                del self._aborts[key]

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Around every write into the caller's memory by a read that cannot be aborted: `stop` waits for its end."""
        with self._condition:
            self.check()
            self._filling.append(threading.get_ident())
        try:
            yield
        finally:
            with self._condition:
                self._filling.remove(threading.get_ident())
                self._condition.notify_all()


class _Never(Stop):
    """That of the program's own threads. It has no lock: a fork might find it held by another thread."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextmanager
    def aborting(self, abort: Callable[[], object]) -> Iterator[None]:
        yield

    @contextmanager
    def filling(self) -> Iterator[None]:
        yield


_of_thread = threading.local()
_NEVER = _Never()


def current() -> Stop:
    """What ends the reads of this thread. In a thread of the program's it is never stopped: Ctrl-C interrupts it."""
    stop: Stop = getattr(_of_thread, "stop", _NEVER)
    return stop


@contextmanager
def belonging(stop: Stop) -> Iterator[None]:
    """While it is entered, `current` returns ``stop`` in this thread."""
    before = current()
    _of_thread.stop = stop
    try:
        yield
    finally:
        _of_thread.stop = before
