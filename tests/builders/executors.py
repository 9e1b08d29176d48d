"""Executors that do the pieces of an operation in odd ways, and what processes must be able to import."""

import json
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from threading import Condition, Thread


def processes(count=2):
    """A pool of new processes: those of a fork would have the state of the test."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def echoed(value):
    """A value after a trip as JSON."""
    return json.loads(json.dumps(value))


def settled(function, *arguments):
    """A future that is done, with what a function returns or raises."""
    future = Future()
    future.set_running_or_notify_cancel()
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future


class Plain:
    """Does each piece at once and twice; piece and result go and come as JSON.

    Attributes:
        pieces: all that were submitted.
        before: called with a piece before it is done.
    """

    def __init__(self, before=lambda piece: None):
        self.pieces = []
        self.before = before

    def submit(self, call, function, piece, *rest):
        self.pieces.append(piece)
        self.before(piece)
        return settled(self._twice, call, function, piece, *rest)

    def _twice(self, call, function, piece, *rest):
        once, again = (echoed(call(function, echoed(piece), *rest)) for _ in range(2))
        assert repr(once) == repr(again)
        return again


class Backwards:
    """Does the last piece first, in another thread; it begins when as many wait as there will be.

    Attributes:
        done: the pieces in the order in which they were done.
    """

    def __init__(self, count):
        self.done = []
        self._count = count
        self._waiting = []
        self._changed = Condition()
        Thread(target=self._work, daemon=True).start()

    def submit(self, call, function, piece, *rest):
        future = Future()
        with self._changed:
            self._waiting.append((future, call, function, piece, *rest))
            self._changed.notify()
        return future

    def _work(self):
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) == self._count, timeout=20)
        for future, call, function, piece, *rest in reversed(self._waiting):
            if future.set_running_or_notify_cancel():
                self.done.append(piece)
                try:
                    future.set_result(call(function, piece, *rest))
                except Exception as error:
                    future.set_exception(error)


class Lazy:
    """Never begins a piece, but for the first few, which are done at once; or refuses it.

    Attributes:
        futures: all that it has given out.
    """

    def __init__(self, begun=0, accepted=None):
        self.futures = []
        self._begun, self._accepted = begun, accepted

    def submit(self, call, *arguments):
        if len(self.futures) == self._accepted:
            raise RuntimeError("no room for another piece")
        self.futures.append(settled(call, *arguments) if len(self.futures) < self._begun else Future())
        return self.futures[-1]
