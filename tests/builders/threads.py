"""Threads of safeload's in this process."""

import gc
import threading
import time


def threads() -> list[threading.Thread]:
    """Return the running threads that safeload has started."""
    return [thread for thread in threading.enumerate() if thread.name == "safeload"]


def await_no_threads(seconds: float = 10) -> None:
    """Wait until safeload's threads have ended, at most ``seconds``; abandoned streams are collected first."""
    if not threads():
        return
    gc.collect()
    until = time.monotonic() + seconds
    while threads() and time.monotonic() < until:
        time.sleep(0.005)
