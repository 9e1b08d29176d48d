"""Choose the number of threads: as requested, or by the size of the job, the processors and their quota."""

from __future__ import annotations

import operator
import os
from functools import cache

from ...base.text import show

# Largest automatic choice: this many threads saturate any memory system or disk.
MAX_THREADS = 16
# Largest request: the core starts the requested number of threads on any machine.
MOST_THREADS = 4096
# Threads for direct reads, even on fewer processors: a disk is fast only with several large reads in flight, and direct
# reads have no readahead.
DIRECT_READERS = 8
# A thread for fewer bytes costs more to start than it saves.
BYTES_PER_THREAD = 4 << 20
# A thread for direct reads waits for the disk, so it pays for fewer bytes.
BYTES_PER_READER = 2 << 20


def _cgroup_cpus() -> float:
    """Return the CPU quota of this process's cgroup; infinity if it has none.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, file cpu.max; in cgroup v1 cpu.cfs_quota_us.
    """
    root = "/sys/fs/cgroup"

    def read(path: str) -> str:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()

    try:
        cgroup = os.path.normpath(f"{root}/{read('/proc/self/cgroup').rpartition('::')[2]}")
        for folder in (cgroup, root):
            if os.path.exists(f"{folder}/cpu.max"):
                quota, period = read(f"{folder}/cpu.max").split()
                return float("inf") if quota == "max" else int(quota) / int(period)
        quota_v1 = int(read(f"{root}/cpu/cpu.cfs_quota_us"))
        return quota_v1 / int(read(f"{root}/cpu/cpu.cfs_period_us")) if quota_v1 > 0 else float("inf")
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")


@cache
def available_cpus() -> int:
    """Return the number of CPUs for this process: its affinity, limited by the quota of its cgroup."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cpus, _cgroup_cpus())))


def check_threads(threads: int | None) -> None:
    """Check a number of threads: TypeError if it is not an integer, ValueError if it is below 1 or too large."""
    if threads is None:
        return
    number = operator.index(threads)
    if number < 1:
        raise ValueError(f"threads must be >= 1, got {show(number)}")
    if number > MOST_THREADS:
        raise ValueError(f"threads must be <= {MOST_THREADS:,}, got {show(number)}")


def thread_count(nbytes: int, threads: int | None, *, direct: bool = False) -> int:
    """Return the number of threads for a job: as requested, else ``SAFELOAD_NUM_THREADS``, else by its size."""
    check_threads(threads)
    if threads is not None:
        return operator.index(threads)
    setting = os.environ.get("SAFELOAD_NUM_THREADS")
    if not setting:
        if direct:
            return max(1, min(nbytes // BYTES_PER_READER, max(available_cpus(), DIRECT_READERS), MAX_THREADS))
        return max(1, min(nbytes // BYTES_PER_THREAD, available_cpus(), MAX_THREADS))
    # The length is checked first, because int() refuses thousands of digits with its own message.
    if not setting.isdecimal() or not (len(setting) < 10 and 1 <= int(setting) <= MOST_THREADS):
        raise ValueError(f"SAFELOAD_NUM_THREADS must be a number from 1 to {MOST_THREADS:,}, got {show(setting)}")
    return int(setting)
