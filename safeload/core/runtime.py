"""Python's runtime: a pause of the garbage collector, and names of the doors that are imported on first access."""

from __future__ import annotations

import gc
import os
import sys
from _thread import RLock
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, TypeVar

_T = TypeVar("_T")

# ---- a pause of the garbage collector ----

# Otherwise the collector runs hundreds of times while a list of 100,000 descriptions is built, and finds nothing to
# free. The standard library's unpickler pauses it too.

# Whether the collector can visit young objects alone: without the GIL, it visits all objects each time.
_GENERATIONAL = "free-threading" not in sys.version

# For fewer objects, the pause has no measurable effect.
_PAUSED_FROM = 1000


class _Pause:
    """Pauses the collector in ``with`` blocks, in any number of threads at once; the last block restores it."""

    def __init__(self) -> None:
        self._lock = RLock()  # a signal handler may load a file too
        self._blocks = 0
        self.restore = False

    def __enter__(self) -> None:
        with self._lock:
            if self._blocks == 0:
                self.restore = gc.isenabled()
            self._blocks += 1
            gc.disable()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._blocks = max(0, self._blocks - 1)
            if self._blocks == 0 and self.restore:
                self.restore = False
                gc.enable()

    def forget(self) -> None:
        """Restore the collector in a forked child, which lacks the threads in a block."""
        self._lock = RLock()
        self._blocks = 0
        if self.restore:
            self.restore = False
            gc.enable()


_pause, _nothing = _Pause(), nullcontext()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pause.forget)


def paused(count: int) -> AbstractContextManager[None]:
    """Return a context manager that pauses the collector while ``count`` objects are created, if they are many.

    The collector's state is restored, whatever happens in the block, as soon as no thread is in such a block.

    Example:
        >>> import gc
        >>> with paused(100_000):
        ...     pairs = [(k, str(k)) for k in range(100_000)]
        >>> gc.isenabled()
        True
    """
    return _pause if count >= _PAUSED_FROM else _nothing


def collected_young(tuples: Iterable[_T], count: int) -> Iterable[_T]:
    """Return tuples of texts; in a pause, the collector visits them now, while young, and never again."""
    if count < _PAUSED_FROM:
        return tuples
    complete = list(tuples)
    if _pause.restore and _GENERATIONAL:  # not if the program has disabled the collector
        gc.collect(0)
    return complete


# ---- names of the doors that are imported on first access ----

# Names that every framework module of safetensors imports, with the module and the name of their definition.
SHARED = {
    **{name: ("compat.serialize", name) for name in ("TensorSpec", "deserialize", "serialize", "serialize_file")},
    "safe_open": ("compat.safe_open", "safe_open"),
}

# Names of the package itself.
PACKAGE = {
    **SHARED,
    "PrefetchLoader": ("compat.safe_open", "PrefetchLoader"),
    "PySafeSlice": ("compat.safe_open", "SafeSlice"),
    "SafetensorError": ("errors", "SafetensorError"),
    "TensorMeta": ("compat.serialize", "TensorMeta"),
    "_safe_open_handle": ("compat.safe_open", "_safe_open_handle"),
}


def imported(namespace: dict[str, Any], names: Mapping[str, tuple[str, ...]], name: str) -> Any:
    """Import a name into a module's namespace and return its value: the body of a module's ``__getattr__``.

    ``names`` has the module and the attribute of each name, or also a key of the attribute, which it may lack (None).
    """
    if name not in names:
        raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
    module, attribute, *key = names[name]
    value = getattr(import_module(f"..{module}", __package__), attribute)
    namespace[name] = value = value.get(*key) if key else value
    return value
