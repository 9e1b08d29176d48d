"""Threads of safeload's in this process."""

import gc
import threading
import time
from collections.abc import Callable


def threads() -> list[threading.Thread]:
    """Return the running threads that safeload has started."""
    return [thread for thread in threading.enumerate() if thread.name == "safeload"]


def until(condition: Callable[[], object], seconds: float = 15) -> None:
    """Wait until a condition holds, which another thread or process brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.002)


def await_no_threads(seconds: float = 10) -> None:
    """Wait until safeload's threads have ended, at most ``seconds``; abandoned streams are collected first."""
    if not threads():
        return
    gc.collect()
    until = time.monotonic() + seconds
    while threads() and time.monotonic() < until:
        time.sleep(0.005)
