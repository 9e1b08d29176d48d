"""Ends the threads of a call: after the call returns, no thread writes into the caller's memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

_Result = TypeVar("_Result")

# Seconds after which a wait looks again: on Windows, Ctrl-C does not end a wait for another thread.
_TICK = 0.1
# Seconds that a function gets to clean up after its call has ended.
_GRACE = 0.3


class Stopped(BaseException):
    """Raised in a thread after its call has ended. Not an `Exception`, because it is not a failed read."""


class Stop:
    """Ends the threads of a call. Any thread may use it; `stop` may be called more than once."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._stopped = False
        self._filling: list[int] = []  # thread ids
        self._aborts: dict[object, Callable[[], object]] = {}

    def stop(self) -> None:
        """End all waits and abortable reads, and return when no thread is in `filling`."""
        with self._condition:
            self._stopped = True
            aborts = list(self._aborts.values())
            self._condition.notify_all()
        for abort in aborts:
            abort()
        with self._condition:
            own = threading.get_ident()  # it may be in `filling` itself, if garbage collection brought it here
            self._condition.wait_for(lambda: all(thread == own for thread in self._filling))

    def check(self) -> None:
        """Raise Stopped after `stop`."""
        if self._stopped:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Sleep; raise Stopped as soon as `stop` is called."""
        with self._condition:
            self._condition.wait_for(lambda: self._stopped, seconds)
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


class _Never(Stop):
    """The `Stop` of the program's own threads. It has no lock, which another thread could hold at a fork."""

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
    """Return the `Stop` of this thread. In the program's own threads it never stops; Ctrl-C interrupts reads there."""
    stop: Stop = getattr(_of_thread, "stop", _NEVER)
    return stop


@contextmanager
def belonging(stop: Stop) -> Iterator[None]:
    """Inside the block, `current` returns ``stop`` in this thread."""
    before = current()
    _of_thread.stop = stop
    try:
        yield
    finally:
        _of_thread.stop = before


def left_behind(function: Callable[[], _Result], seconds: float = math.inf) -> _Result:
    """Call a function that cannot be aborted in a thread of its own, which is left behind if this call ends first."""
    from queue import Empty, SimpleQueue  # only here: every program imports this module

    outcomes: SimpleQueue[tuple[list[_Result], BaseException | None] | None] = SimpleQueue()
    inner = Stop()  # of the function's own waits and abortable reads

    def work() -> None:
        try:
            with belonging(inner):
                outcomes.put(([function()], None))
        except BaseException as error:
            outcomes.put(([], error))

    def abort() -> None:
        outcomes.put(None)
        inner.stop()

    thread = threading.Thread(target=work, name="safeload", daemon=True)
    until = time.monotonic() + seconds
    outcome = error = None
    try:
        with current().aborting(abort):
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                return function()
            while outcome is None:
                with suppress(Empty):
                    outcome = outcomes.get(timeout=max(0.0, min(_TICK, until - time.monotonic())))
                current().check()
                if outcome is None and time.monotonic() >= until:
                    raise TimeoutError
        results, error = outcome
        if error is None:
            return results.pop()
        raise error
    except BaseException:
        if outcome is None:
            inner.stop()
            thread.join(_GRACE)
        raise
    finally:
        del outcome, error  # which refer to this frame
