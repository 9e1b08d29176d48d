"""The only module that touches the binding: the C core's functions, and its statuses turned into exceptions."""

from __future__ import annotations

from typing import Any

from .errors import FormatError, LimitError, SafeloadError, os_error

try:
    from ._core import ffi, lib
except ImportError as error:
    raise ImportError(
        "safeload's C core is not built here. In a source tree run `pip install .` (or `pip install -e .` to work on "
        f"it) and start Python from another folder; elsewhere reinstall the package. ({error})"
    ) from error

__all__ = ["Error", "check", "ffi", "lib", "mapped_buffer"]


def Error() -> Any:  # noqa: N802 - makes a C struct, as a class would
    """A fresh ``sl_error`` for one call."""
    return ffi.new("sl_error *")


def check(status: int, error: Any, path: str | None = None, subject: str | None = None) -> None:
    """Raises what a status says. ``subject`` (a tensor) goes in front of the core's message."""
    if status == lib.SL_OK:
        return
    message = ffi.string(error.message).decode("utf-8", "replace")
    if subject is not None:
        message = f"{subject}: {message}"
    offset = error.position if error.position >= 0 else None
    if status in (lib.SL_E_FORMAT, lib.SL_E_TRUNCATED):
        raise FormatError(message, path, offset)
    if status == lib.SL_E_LIMIT:
        raise LimitError(FormatError(message, path, offset).__str__())
    if status == lib.SL_E_OS:
        raised = os_error(error.os_errno, path)
        if offset is not None and hasattr(raised, "add_note"):  # Python 3.11
            raised.add_note(f"{subject or 'the transfer'} failed at byte {offset}")
        raise raised
    if status == lib.SL_E_MEMORY:
        raise MemoryError(message)
    raise SafeloadError(message)


def mapped_buffer(address: Any, size: int) -> Any:
    """A writable buffer over a mapping, which is unmapped when the last array over it is gone."""

    def unmap(pointer: Any) -> None:
        lib.sl_file_unmap(pointer, size)

    return ffi.buffer(ffi.gc(address, unmap), size)
