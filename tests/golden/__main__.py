"""Run all of it or a part, in two processes: ``python tests/golden``, or ``python -m golden`` in tests/."""

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__" and not __package__:
    sys.path.pop(1)  # this folder, which has no modules for others

from golden import records, tasks


def rows_of(only: str, processes: int) -> dict[str, str]:
    """The rows of all tasks that may have keys that match."""
    numbers = [k for k, task in enumerate(tasks.all_tasks()) if records.may_have(task.prefix, only)]
    folder = tempfile.mkdtemp(prefix="golden-")
    found: dict[str, str] = {}
    try:
        with ProcessPoolExecutor(processes, get_context("spawn"), initializer=tasks.begin) as pool:
            for future in [pool.submit(tasks.run, k, folder) for k in numbers]:
                for key, value in future.result():
                    found[f"{key} (again)" if key in found else key] = value
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="golden", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", default="*", help="rows whose keys match; only * is special")
    parser.add_argument("--accept", metavar="PATTERN", help="record the rows that match as they are now")
    parser.add_argument("--reason", metavar="TEXT", default="", help="why they change; CHANGES.md keeps it")
    parser.add_argument("--processes", metavar="N", type=int, default=2)
    options = parser.parse_args()
    if options.accept is not None and not options.reason.strip():
        parser.error("--accept needs --reason TEXT: why these rows change")
    only = options.only if options.accept is None else options.accept
    started = time.monotonic()
    found = rows_of(only, options.processes)
    if options.accept is not None:
        try:
            print(f"{records.accept(found, only, options.reason)} rows accepted; commit them alone")
        except ValueError as error:
            parser.error(str(error))
        return 0
    difference = records.compare(records.read(), found, only)
    for line in records.shown(difference):
        print(line)
    count = sum(records.matches(only, key) for key in found)
    print(f"{count} rows, {len(difference.keys())} differ from the record ({time.monotonic() - started:.0f} s)")
    if difference.keys():
        print("If that is intended: python tests/golden --accept PATTERN --reason TEXT, in a commit of its own.")
    return 1 if difference.keys() else 0


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
