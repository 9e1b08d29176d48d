"""The resources of a load: memory for tensors, threads, and the way it reads."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from .._version import __version__
from ..errors import SafeloadError, UnsupportedError
from .arrays import Array, array_over
from .native import TIER, address_of, available_tiers, ffi, lib, private_buffer, tier_name
from .text import show

_Item = TypeVar("_Item")

Backend = Literal["mmap", "pread", "direct", "auto"]
# The fate of the pages of files in the system's cache: "drop" leaves few behind.
Cache = Literal["keep", "drop"]
_BACKENDS: tuple[str, ...] = get_args(Backend)

# Tensors of at least this size get memory of their own. Smaller tensors share a pool: 100,000 tensors should not
# take 100,000 allocations and reads.
POOLED_BELOW = 1 << 20
# Arrays of at least this size, a huge page, get memory in huge pages. Smaller arrays come from malloc, which reuses
# pages: new pages take much longer to touch than to fill.
HUGE_FROM = 2 << 20
# Alignment of pools: a cache line, more than any dtype needs.
ALIGNMENT = 64
# Unit of direct reads: SL_DIRECT_PAGE in the core.
PAGE = 4096


def aligned_bytes(size: int) -> Array:
    """Return new memory aligned to `ALIGNMENT`, in huge pages if it is large."""
    raw = private_array((size + ALIGNMENT,), np.dtype(np.uint8))
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + size]


def empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a new array with undefined values."""
    try:
        return np.empty(shape, dtype)
    except ValueError as error:
        raise UnsupportedError(
            f"numpy {np.__version__} does not support shape {list(shape)} as {dtype}: {error}"
        ) from None


def private_array(shape: tuple[int, ...], dtype: np.dtype[Any], begin: int = 0) -> Array:
    """Return a new array, in huge pages if large; direct reads need it at the place in a page that ``begin`` has."""
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    if size < HUGE_FROM:
        return empty_array(shape, dtype)
    at = begin % PAGE if begin % max(dtype.alignment, 1) == 0 else 0
    return array_over(private_buffer(size + at), dtype, shape, at)


def windows(
    items: Iterable[_Item],
    limit: int,
    size: Callable[[_Item], int],
    kind: Callable[[_Item], object] = lambda item: None,
) -> Iterator[list[_Item]]:
    """Divide items into windows of one kind and up to ``limit`` bytes; a larger item has a window of its own."""
    window: list[_Item] = []
    total, last = 0, None
    for item in items:
        nbytes, its_kind = size(item), kind(item)
        if window and (total + nbytes > limit or its_kind != last):
            yield window
            window, total = [], 0
        window.append(item)
        total, last = total + nbytes, its_kind
    if window:
        yield window


# ---- threads ----


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


def check_backend(backend: object) -> None:
    """Refuse unknown backends."""
    if backend not in _BACKENDS:
        expected = ", ".join(f'"{name}"' for name in _BACKENDS)
        raise SafeloadError(f"backend {show(backend)} is invalid (expected one of: {expected})")


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
    if threads is not None:
        check_threads(threads)
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


def show_config() -> None:
    """Print versions, the instruction set in use, the number of threads and the compiler.

    Example:
        >>> import safeload
        >>> safeload.show_config()
        safeload         ...
        python           CPython ...
        numpy            ...
        instruction set  ...
        threads          ...
        compiler         ...
    """
    import platform  # only here: few programs ask

    alternatives = ", ".join(tier_name(tier) for tier in available_tiers() if tier != TIER)
    instructions = f"{tier_name(TIER)} (SAFELOAD_ISA can be {alternatives})" if alternatives else tier_name(TIER)
    rows = {
        "safeload": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}",
        "numpy": np.__version__,
        "instruction set": instructions,
        "threads": f"{available_cpus()} at most (SAFELOAD_NUM_THREADS)",
        "compiler": str(ffi.string(lib.sl_compiler()), "utf-8"),
    }
    for name, value in rows.items():
        print(f"{name:16} {value}")
