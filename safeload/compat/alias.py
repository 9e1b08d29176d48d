"""Put safeload in the place of safetensors, in this program and in the Python programs that it starts.

An import asks the finders on `sys.meta_path` in turn. `Finder` answers for safetensors before every other finder, so
nothing is imported before a program asks for it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING

from .._version import __version__
from ..core import forking, runtime
from ..core.text import is_absent

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

_NAME = "safetensors"
_VERSION = "0.8.0"  # the release of safetensors that safeload follows
_PACKAGE = __name__.partition(".")[0]

_NAMES = {**runtime.PACKAGE, "safe_open": ("compat.safe_open", "AliasSafeOpen")}
_COMPILED = "_safetensors_rust"  # the module from which the package has its names
# safeload's module for a module of safetensors, and the framework that safetensors imports there.
_COUNTERPARTS = {"numpy": ("numpy", "numpy"), "torch": ("torch", "torch"), "flax": ("jax", "jax")}
# Modules that only the real package has.
_REAL_ONLY = ("mlx", "paddle", "tensorflow")

# Python runs sitecustomize.py of this folder at start if PYTHONPATH has the folder.
_SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim")


class Finder:
    """Find and load safeload's modules under the names of safetensors."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of safetensors, or None if other finders have to find the module."""
        package, _, module = fullname.partition(".")
        if package != _NAME:
            return None
        if not module:
            spec = ModuleSpec(fullname, self, origin=__file__, is_package=True)  # type: ignore[arg-type]
            spec.has_location = True
            spec.submodule_search_locations = real_folders()
            return spec
        if module in _COUNTERPARTS or module == _COMPILED:
            return ModuleSpec(fullname, self, origin=__file__)  # type: ignore[arg-type]
        if module in _REAL_ONLY and not real_folders():
            raise ModuleNotFoundError(
                f"{fullname} is not part of safeload: install the real package for it, pip install safetensors",
                name=fullname,
            )
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the creation to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the package its names, which resolve on first use, or replace a module by its counterpart."""
        name = module.__name__.rpartition(".")[2]
        if name in _COUNTERPARTS:
            counterpart, framework = _COUNTERPARTS[name]
            if is_absent(framework):
                raise ModuleNotFoundError(f"No module named {framework!r}", name=framework)
            sys.modules[module.__name__] = import_module(f"{_PACKAGE}.{counterpart}")
            return
        vars(module).update(
            __doc__=f"safeload in the place of safetensors {_VERSION}.",
            __version__=_VERSION,
            __getattr__=partial(runtime.imported, vars(module), _NAMES),
            __dir__=lambda: sorted({*_NAMES, *vars(module)} - {"__getattr__", "__dir__", "__all__"}),
            __all__=[name for name in _NAMES if not name.startswith("_")],
        )

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield the distribution in which `importlib.metadata` finds the version that clients ask for."""
        searched = {} if context is None else vars(context)
        if (searched.get("name") or "").lower() == _NAME and "path" not in searched:
            yield _distribution()


def _distribution() -> Distribution:
    from importlib.metadata import Distribution  # only here: it takes milliseconds
    from pathlib import Path

    text = f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {_VERSION}\nSummary: provided by safeload {__version__}\n"

    class AliasDistribution(Distribution):
        def read_text(self, filename: str | os.PathLike[str]) -> str | None:
            return text if filename == "METADATA" else None

        def locate_file(self, path: str | os.PathLike[str]) -> Path:
            return Path(__file__).parent / path

    return AliasDistribution()


def real_folders() -> list[str]:
    """Return the folders of the real package; empty if it is not installed."""
    for finder in sys.meta_path:
        if isinstance(finder, Finder) or type(finder).__name__ == "ShimFinder" or not hasattr(finder, "find_spec"):
            continue
        try:
            spec = finder.find_spec(_NAME, None)
        except ImportError:  # a finder that forbids the package
            return []
        if spec is not None and spec.loader is not None:  # without a loader it is any folder of this name
            return list(spec.submodule_search_locations or ())
    return []


def working_finder() -> Finder:
    """Return a finder for the shim."""
    import_module(f"{_PACKAGE}.core.native")
    for name in ("numpy", "ml_dtypes"):
        if is_absent(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return Finder()


def real_compiled_module() -> ModuleType | None:
    """Return the compiled module of the real package, without its name in `sys.modules`; None if not installed."""
    spec = PathFinder.find_spec(f"{_NAME}.{_COMPILED}", real_folders())
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The changes of `install_as_safetensors`, each with the number of calls that want it and the function that undoes it.
_lock = forking.ProcessLock()
_changes: dict[Callable[[], Callable[[], None]], tuple[int, Callable[[], None]]] = {}


def _import_safeload() -> Callable[[], None]:
    """Answer for safetensors before all other finders."""
    real_modules, finder = _take_modules(), Finder()
    sys.meta_path.insert(0, finder)

    def undo() -> None:
        sys.meta_path[:] = [entry for entry in sys.meta_path if entry is not finder]
        _take_modules()
        sys.modules.update(real_modules)

    return undo


def _take_modules() -> dict[str, ModuleType]:
    """Remove the modules of safetensors from `sys.modules` and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == _NAME}


def path_with_shim(*folders: str) -> str:
    """Return the value of PYTHONPATH with the shim and further folders in front."""
    before = os.environ.get("PYTHONPATH", "")
    if _SHIM in before.split(os.pathsep):
        return before
    return os.pathsep.join([_SHIM, *folders, *filter(None, [before])])


def _start_with_shim() -> Callable[[], None]:
    before, after = os.environ.get("PYTHONPATH"), path_with_shim()
    os.environ["PYTHONPATH"] = after

    def undo() -> None:
        now, restored = os.environ.pop("PYTHONPATH", None), before
        if now is not None and now != after:  # the program has changed it meanwhile
            restored = os.pathsep.join(entry for entry in now.split(os.pathsep) if entry != _SHIM)
        if now is not None and restored is not None:
            os.environ["PYTHONPATH"] = restored

    return undo


def install_as_safetensors(subprocesses: bool = False) -> Callable[[], None]:
    """Import safeload wherever this program asks for ``safetensors``.

    ``safetensors``, ``safetensors.numpy``, ``safetensors.torch`` and ``safetensors.flax`` are safeload's from now on.
    ``safetensors.mlx``, ``safetensors.paddle`` and ``safetensors.tensorflow`` come from the real package, which must be
    installed only for these. ``safetensors.__version__`` and ``importlib.metadata.version("safetensors")`` are "0.8.0",
    the release that safeload follows. Call this before other imports, because modules keep the functions that they have
    imported.

    Args:
        subprocesses: True also changes the environment variable PYTHONPATH, for all Python programs that this program
            starts. A Python without safeload still imports the real package.

    Returns:
        A function that undoes this call: once every call is undone, ``safetensors`` is the real package again. Modules
        keep the functions that they imported in the meantime.

    Warns:
        RuntimeWarning: safetensors has already been imported.

    Example:
        >>> import safeload
        >>> undo = safeload.install_as_safetensors()
        >>> from safetensors.numpy import load_file
        >>> load_file is safeload.numpy.load_file
        True
        >>> undo()
    """
    module = sys.modules.get(_NAME)
    if module is not None and not isinstance(getattr(getattr(module, "__spec__", None), "loader", None), Finder):
        warnings.warn(
            "safetensors has already been imported, and modules keep the functions that they have imported from it: "
            "call safeload.install_as_safetensors() before other imports",
            RuntimeWarning,
            stacklevel=2,
        )
    changes = [_import_safeload, _start_with_shim] if subprocesses else [_import_safeload]
    with _lock.own:
        for change in changes:
            calls, undo_change = _changes.get(change) or (0, change())
            _changes[change] = calls + 1, undo_change

    def undo() -> None:
        with _lock.own:
            while changes:
                change = changes.pop()
                calls, undo_change = _changes.pop(change)
                if calls > 1:
                    _changes[change] = calls - 1, undo_change
                else:
                    undo_change()

    return undo
