"""Time a job in 8 threads against one thread that does as many, in an interpreter without the GIL.

    python3.13t -I benches/eight_threads.py open PATH ROUNDS CALLS

`bench_open.py` starts it with the interpreter that `FREE_THREADED_PYTHON` names, in which safeload must be installed.
It prints the version of Python and the seconds of both sides as JSON; CALLS is the number of calls by each thread.
"""

from __future__ import annotations

import json
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import safeload
import safeload.numpy

THREADS = 8


def open_and_list(path: str) -> list[str]:
    """Return the names of the tensors of a file."""
    with safeload.open(path) as checkpoint:
        return list(checkpoint)


JOBS: dict[str, Callable[[str], Any]] = {"open": open_and_list, "load_file": safeload.numpy.load_file}


def main(job: str, path: str, rounds: int, calls: int) -> None:
    """Race both sides in shuffled order."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED") or sys._is_gil_enabled():  # type: ignore[attr-defined]
        raise SystemExit(f"{sys.executable} has a GIL")
    function = JOBS[job]

    def several(count: int) -> None:
        for _ in range(count):
            function(path)

    with ThreadPoolExecutor(THREADS) as pool:
        sides = {
            "one": lambda: several(THREADS * calls),
            "threads": lambda: list(pool.map(several, [calls] * THREADS)),
        }
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            side()
        for _ in range(rounds):
            for name in random.sample(list(sides), len(sides)):
                started = time.perf_counter()
                sides[name]()
                samples[name].append(time.perf_counter() - started)
    print(json.dumps({"python": platform.python_version(), **samples}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
