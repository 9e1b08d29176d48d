"""The error for an optional package that cannot be imported: not installed, or installed and broken."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def needed(package: str, text: str, pip: str = "", *others: str) -> Any:
    """Import an optional package, or raise the error for one that is not installed: ``text`` says what needs it."""
    try:
        return import_module(package)
    except ImportError as error:
        text = f"{text}, which is not installed: pip install {pip or package}"
        raise not_installed(error, text, package, *others) from None


def not_installed(error: ImportError, text: str, *packages: str) -> ImportError:
    """Return the error to raise after an import failed: how to install the package, or ``error`` if it is there.

    An installed package fails too: if another package or a library is missing, or if memory is limited.
    """
    name = next(filter(is_absent, packages), None)
    return error if name is None else ModuleNotFoundError(text, name=name)


def is_absent(package: str) -> bool:
    """Return whether a module is not installed, without importing it."""
    import sys
    from importlib.util import find_spec  # only here: nearly all imports succeed

    if package in sys.modules:
        return sys.modules[package] is None
    try:
        return find_spec(package) is None
    except ModuleNotFoundError:  # by a finder that forbids the package
        return True
    except Exception:  # such as a MemoryError
        return False
