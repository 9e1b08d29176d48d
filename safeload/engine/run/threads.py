"""The number of threads: as requested, else chosen from the size of the job, the processors and their quota."""

from __future__ import annotations

import operator
import os
from functools import cache

from ...base.text import show

# Most threads that are chosen automatically: this many saturate any memory system or disk.
MAX_THREADS = 16
# Most threads that can be requested: the core starts the requested number, whatever the machine has.
MOST_THREADS = 4096
# Threads that read past the page cache, however few processors there are: they wait for the disk, which is fast only
# while it has several large reads to do, and for which no readahead asks.
DIRECT_READERS = 8
# A thread for fewer bytes than this costs more to start than it saves.
BYTES_PER_THREAD = 4 << 20
# One that waits for the disk is worth it for fewer.
BYTES_PER_READER = 2 << 20


def _cgroup_cpus() -> float:
    """CPU quota of this process's cgroup, infinity without one.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, file cpu.max; in cgroup v1 cpu.cfs_quota_us.
    """
    root = "/sys/fs/cgroup"

    def read(path: str) -> str:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()

    try:
        own = os.path.normpath(f"{root}/{read('/proc/self/cgroup').rpartition('::')[2]}")
        for folder in (own, root):
            if os.path.exists(f"{folder}/cpu.max"):
                quota, period = read(f"{folder}/cpu.max").split()
                return float("inf") if quota == "max" else int(quota) / int(period)
        quota_v1 = int(read(f"{root}/cpu/cpu.cfs_quota_us"))
        return quota_v1 / int(read(f"{root}/cpu/cpu.cfs_period_us")) if quota_v1 > 0 else float("inf")
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")


@cache
def available_cpus() -> int:
    """CPUs that this process may use, at least 1: those of its affinity, limited by its cgroup's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cpus, _cgroup_cpus())))


def check_threads(threads: int | None) -> None:
    """Refuses invalid numbers of threads: TypeError if not an integer, ValueError if below 1 or too many."""
    if threads is None:
        return
    number = operator.index(threads)
    if number < 1:
        raise ValueError(f"threads is {show(number)}, but at least one is needed")
    if number > MOST_THREADS:
        raise ValueError(f"threads is {show(number)}, but at most {MOST_THREADS:,} are started")


def thread_count(nbytes: int, threads: int | None, *, direct: bool = False) -> int:
    """Threads for a job of ``nbytes``: as requested, else ``SAFELOAD_NUM_THREADS``, else chosen automatically.

    Args:
        nbytes: bytes that are moved.
        threads: as requested; None for no wish.
        direct: whether they read past the page cache.
    """
    check_threads(threads)
    if threads is not None:
        return operator.index(threads)
    setting = os.environ.get("SAFELOAD_NUM_THREADS")
    if not setting:
        if direct:
            return max(1, min(nbytes // BYTES_PER_READER, max(available_cpus(), DIRECT_READERS), MAX_THREADS))
        return max(1, min(nbytes // BYTES_PER_THREAD, available_cpus(), MAX_THREADS))
    # The length is checked first: int() refuses thousands of digits with an error message of its own.
    if not setting.isdecimal() or not (len(setting) < 10 and 1 <= int(setting) <= MOST_THREADS):
        raise ValueError(f"SAFELOAD_NUM_THREADS is {show(setting)}, but a number from 1 to {MOST_THREADS:,} is wanted")
    return int(setting)
