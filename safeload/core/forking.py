"""Keep a forked child from waiting forever for a lock held by another thread of its parent.

A child has only the thread that forked. If another thread is importing a module at that moment, the module's lock stays
locked in the child. Therefore a fork waits until other threads have finished the imports that safeload does on first
use. safeload's own long-lived locks are `ProcessLock`s.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import LockType, RLock, allocate_lock, get_ident

TYPE_CHECKING = False  # without an import: the first 5 ms of a command, in which Ctrl-C still prints a traceback
if TYPE_CHECKING:
    from functools import cached_property as cached_property
    from typing import Any
else:

    class cached_property:  # noqa: N801 - the standard library's name
        """Compute an attribute once per instance; concurrent threads may each compute it.

        The lock of `functools.cached_property` in Python 3.10 and 3.11 is shared by all instances, so a child forked
        during a computation would wait forever.
        """

        def __init__(self, function):
            self.function = function
            self.__doc__ = function.__doc__

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = self.function(instance)
            return instance.__dict__.setdefault(self.function.__name__, value)


# Packages imported on first use, besides the standard library.
PACKAGES = frozenset(
    {
        *("blake3", "compression", "fsspec", "h5py", "huggingface_hub", "idna", "jax", "ml_dtypes", "model_signing"),
        *("numpy", "safeload", "tokenizers", "torch", "tqdm", "urllib3", "zstandard"),
    }
    | {"safetensors"}  # by way of `install_as_safetensors`
)
# In seconds. A fork waits no longer for the next module, because an import may itself wait for the forking thread.
_PATIENCE, _PAUSE = 30.0, 0.001
# CPython's locks of modules during import: weak references by name.
_LOCKS = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
# Modules that hold these locks during every fork, unless they are older than our hook, which then runs first.
_HOLDERS = {"logging": "_lock", "concurrent.futures.thread": "_global_shutdown_lock"}
_OLDER = frozenset([name for name in _HOLDERS if name in sys.modules])  # without the GIL, other threads may import


#: Held while OpenSSL makes a context. A fork waits for it: OpenSSL's locks stay locked in a child that is forked
#: meanwhile, which then never makes a context of its own.
making_context = RLock()


class ProcessLock:
    """A lock per process: in a forked child it is free."""

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
    """Return the modules being imported by other threads."""
    mine, names = get_ident(), []
    for name, reference in list(_LOCKS.items()):
        owner = getattr(reference(), "owner", None)
        package = name.partition(".")[0]
        if owner not in (None, mine) and (package in PACKAGES or package in sys.stdlib_module_names):
            names.append(name)
    return names


def _is_held(lock: Any) -> bool:
    return bool((getattr(lock, "_is_owned", None) or lock.locked)())


def _holding() -> dict[str, Any]:
    """Return the locks of modules with their own fork hooks, if these are registered."""
    locks = {}
    for name, attribute in _HOLDERS.items():
        lock: Any = getattr(sys.modules.get(name), attribute, None)
        if lock is None or name in _OLDER:
            continue
        if not _initializing(name) or _is_held(lock):
            locks[name] = lock
    return locks


def _wait() -> None:
    if not _imported_elsewhere():
        return
    before, count, deadline = _holding(), len(sys.modules), time.monotonic() + _PATIENCE
    # Their hooks have already locked these for the fork, but an import may need them, as `logging.getLogger` does.
    lent = [lock for lock in before.values() if _is_held(lock)]
    for lock in lent:
        lock.release()
    while _imported_elsewhere() and time.monotonic() < deadline:
        if len(sys.modules) != count:  # the import makes progress: importing torch can take longer on a busy machine
            count, deadline = len(sys.modules), time.monotonic() + _PATIENCE
        time.sleep(_PAUSE)
    # Python listed the hooks when the fork began: hooks registered since then would release free locks.
    for lock in [*lent, *(lock for name, lock in _holding().items() if name not in before)]:
        lock.acquire()


def _forget() -> None:
    """In the child, drop imports begun by the parent's threads after the wait, so that the imports can start again."""
    for name in _imported_elsewhere():
        _LOCKS.pop(name, None)
        if _initializing(name):
            del sys.modules[name]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait, after_in_child=_forget)
    os.register_at_fork(
        before=making_context.acquire, after_in_parent=making_context.release, after_in_child=making_context.release
    )
