"""Keep a forked child from waiting forever for a module that another thread of its parent was importing.

A child has only the thread that forked, so the lock of a module that another thread is importing stays locked there. A
fork therefore waits until other threads have imported what safeload imports on first use.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import get_ident

# Packages that safeload imports on first use, besides the standard library.
PACKAGES = frozenset(
    {"fsspec", "huggingface_hub", "idna", "jax", "ml_dtypes", "numpy", "safeload", "torch", "tqdm", "urllib3"}
)
# Seconds: a fork never waits longer, because an import may itself wait for the thread that forks.
_PATIENCE, _PAUSE = 30.0, 0.001
# CPython's locks of the modules that are being imported: weak references by name.
_LOCKS = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})


def _imported_elsewhere() -> list[str]:
    """Return the modules that other threads are importing now."""
    mine, names = get_ident(), []
    for name, reference in list(_LOCKS.items()):
        owner = getattr(reference(), "owner", None)
        package = name.partition(".")[0]
        if owner not in (None, mine) and (package in PACKAGES or package in sys.stdlib_module_names):
            names.append(name)
    return names


def _wait() -> None:
    deadline = 0.0
    while _imported_elsewhere():
        deadline = deadline or time.monotonic() + _PATIENCE
        if time.monotonic() > deadline:
            return
        time.sleep(_PAUSE)


def _forget() -> None:
    """Drop, in the child, imports that a thread of the parent has begun since the wait: they start again."""
    for name in _imported_elsewhere():
        _LOCKS.pop(name, None)
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            del sys.modules[name]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait, after_in_child=_forget)
