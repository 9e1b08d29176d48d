"""The error where an optional library is not installed."""

from __future__ import annotations


def not_installed(error: ImportError, package: str, title: str) -> ImportError:
    """What to raise when a library cannot be imported.

    Args:
        error: the error of its import.
        package: its name, which is also that of safeload's module for it and of the extra that installs it.
        title: what people call it.

    Returns:
        An error with the command to type if the library is missing; otherwise ``error``: it is there, but broken.
    """
    if error.name != package:
        return error
    message = f"safeload.{package} needs {title}, which is not installed: pip install 'safeload[{package}]'"
    return ModuleNotFoundError(message, name=package)
