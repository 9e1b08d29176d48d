"""Drives shim.c, which LD_PRELOAD has loaded into this process: says which call suffers what."""

import ctypes
import itertools
import os
from contextlib import contextmanager

ENVIRONMENT = "SAFELOAD_FAULT_SHIM"

# Classes of calls, and what the n-th of them suffers: as in shim.c.
READ, WRITE, RESERVE, SYNC, RENAME, UNLINK, ALLOCATE, CREATE = (1 << k for k in range(8))
FAIL, FAIL_FROM, SHORT, INTERRUPT, KILL, KILL_AFTER, TRUNCATE = range(7)

# More calls than any sweep makes: one that gets here never ends.
MOST_CALLS = 5000


class Shot:
    """What happened while the shim was armed: calls of the classes, and a line of text for each but reads."""

    def __init__(self, nth):
        self.nth = nth
        self.calls = 0
        self.trace = []

    @property
    def hit(self):
        return self.calls >= self.nth


def _library():
    library = ctypes.CDLL(os.environ[ENVIRONMENT])
    library.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    library.fault_arm.restype = None
    library.fault_disarm.restype = ctypes.c_long
    library.fault_trace.restype = ctypes.c_char_p
    return library


@contextmanager
def armed(folder, classes, action, nth=1, value=0):
    """Within, the nth call of the classes on files in the folder suffers."""
    library, shot = _library(), Shot(nth)
    library.fault_arm(os.fsencode(os.path.realpath(folder)), classes, action, nth, value)
    try:
        yield shot
    finally:
        shot.calls = library.fault_disarm()
        shot.trace = [line.split("\t") for line in os.fsdecode(library.fault_trace()).splitlines()]


def places(step):
    """The first eight calls, which differ most, and every ``step``-th after them."""
    return itertools.chain(range(1, 9), itertools.count(9, step))


def sweep(operation, folder, classes, action, value=0, before=lambda: None, step=1):
    """Runs an operation with one of its calls suffering, then another, ... until none is left: see ``places``.

    Yields (shot, what it returned, the error that it raised), the last time untouched.
    """
    for nth in places(step):
        assert nth < MOST_CALLS
        before()
        result = raised = None
        with armed(folder, classes, action, nth, value) as shot:
            try:
                result = operation()
            except Exception as error:
                raised = error
        yield shot, result, raised
        if not shot.hit:
            return
