"""Keep a forked child from waiting forever for a lock that another thread of its parent held.

A child has only the thread that forked, so the lock of a module that another thread is importing stays locked there. A
fork therefore waits until other threads have imported what safeload imports on first use. Locks of safeload's own that
outlive a call are `ProcessLock`s.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import LockType, allocate_lock, get_ident
from typing import Any

# Packages that safeload imports on first use, besides the standard library.
PACKAGES = frozenset(
    {"fsspec", "huggingface_hub", "idna", "jax", "ml_dtypes", "numpy", "safeload", "torch", "tqdm", "urllib3"}
)
# Seconds: a fork never waits longer, because an import may itself wait for the thread that forks.
_PATIENCE, _PAUSE = 30.0, 0.001
# CPython's locks of the modules that are being imported: weak references by name.
_LOCKS = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
# Modules that hold this lock of theirs in every fork, unless the wait's hook runs first because they are older.
_HOLDERS = {"logging": "_lock", "concurrent.futures.thread": "_global_shutdown_lock"}
_OLDER = frozenset(_HOLDERS).intersection(sys.modules)


class ProcessLock:
    """A lock for each process: a forked child's is free."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: dict[int, LockType] = {}

    @property
    def own(self) -> LockType:
        """The lock of this process."""
        return self._locks.setdefault(os.getpid(), allocate_lock())


def _initializing(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _imported_elsewhere() -> list[str]:
    """Return the modules that other threads are importing now."""
    mine, names = get_ident(), []
    for name, reference in list(_LOCKS.items()):
        owner = getattr(reference(), "owner", None)
        package = name.partition(".")[0]
        if owner not in (None, mine) and (package in PACKAGES or package in sys.stdlib_module_names):
            names.append(name)
    return names


def _holding() -> dict[str, Any]:
    """Return the locks of the modules that have hooks of their own, as far as they have registered them."""
    locks = {}
    for name, attribute in _HOLDERS.items():
        lock: Any = getattr(sys.modules.get(name), attribute, None)
        if lock is None or name in _OLDER:
            continue
        held = getattr(lock, "_is_owned", None) or lock.locked
        if not _initializing(name) or held():
            locks[name] = lock
    return locks


def _wait() -> None:
    if not _imported_elsewhere():
        return
    before, deadline = _holding(), time.monotonic() + _PATIENCE
    while _imported_elsewhere() and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    # Python listed the hooks when the fork began: those registered since would release free locks.
    for name, lock in _holding().items():
        if name not in before:
            lock.acquire()


def _forget() -> None:
    """Drop, in the child, imports that a thread of the parent has begun since the wait: they start again."""
    for name in _imported_elsewhere():
        _LOCKS.pop(name, None)
        if _initializing(name):
            del sys.modules[name]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait, after_in_child=_forget)
