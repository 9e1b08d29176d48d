"""Calls of functions, counted: a measure of speed that depends on no clock."""

import gc
import sys
from collections.abc import Callable


def count_calls(function: Callable[[], object]) -> int:
    """Return the number of calls of functions, in Python and in C, that a call makes."""
    calls = []
    gc.disable()  # what collects and what is told of it would count too
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(calls)
