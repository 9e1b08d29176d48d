"""The error for an optional library that is not installed."""

from __future__ import annotations


def not_installed(error: ImportError, package: str, title: str) -> ImportError:
    """Return the error to raise after an import failed: how to install the library, or ``error`` if it is broken.

    Args:
        package: name of the library and of safeload's module for it.
        title: the library's name in prose, such as "PyTorch".
    """
    if error.name != package:
        return error
    message = f"safeload.{package} needs {title}, which is not installed: pip install {package}"
    return ModuleNotFoundError(message, name=package)
