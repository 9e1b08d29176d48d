"""The only module that touches the binding: the C core's functions, and its statuses turned into exceptions.

`lib` has every function of sl_api.h as cffi makes them: they release the GIL. That is right for jobs, which take
milliseconds. For what takes microseconds it is wrong: beside a busy Python thread each re-taking of the GIL costs up
to sys.getswitchinterval(), 5 ms, where the work itself (opening 300 tensors) takes 0.07 ms. `short` has these
functions bound through ctypes.PyDLL's calling convention, which keeps the GIL.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from ..errors import FormatError, LimitError, SafeloadError, UnsupportedError, os_error
from .text import show

try:
    from .._core import ffi, lib
except ImportError as error:
    raise ImportError(
        "safeload's C core is not built here. In a source tree run `pip install -e .`; elsewhere reinstall the package. "
        f"({error})"
    ) from error

__all__ = [
    "TIER",
    "Error",
    "available_tiers",
    "check",
    "ffi",
    "lib",
    "mapped_buffer",
    "pointer",
    "private_buffer",
    "short",
    "tier_name",
]


def tier_name(tier: int) -> str:
    """The name of an instruction set, such as "avx2"."""
    return str(ffi.string(lib.sl_tier_name(tier)), "ascii")


def available_tiers() -> list[int]:
    """Instruction sets that this processor and this build have, best first."""
    return [tier for tier in reversed(range(lib.SL_TIER_COUNT)) if lib.sl_tier_available(tier)]


def _choose_tier() -> int:
    """The best instruction set, or the one that ``SAFELOAD_ISA`` names."""
    available = available_tiers()
    wanted = os.environ.get("SAFELOAD_ISA")
    if not wanted:
        return available[0]
    for tier in available:
        if tier_name(tier) == wanted:
            return tier
    raise ImportError(
        f"SAFELOAD_ISA is {show(wanted)}, but available here are {', '.join(tier_name(tier) for tier in available)}"
    )


TIER = _choose_tier()


def pointer(cdata: Any) -> int:
    """A cffi pointer as the integer that `short` functions take."""
    return int(ffi.cast("uintptr_t", cdata))


def _bind(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)(pointer(ffi.addressof(lib, name)))


class short:  # noqa: N801 - a namespace beside `lib`
    """Functions of the C core that keep the GIL. Pointers are integers, see `pointer`."""

    _pointer, _i32, _i64, _u64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64

    sl_safetensors_open = _bind("sl_safetensors_open", _i32, ctypes.c_char_p, _pointer, _pointer, _pointer, _pointer)
    sl_gguf_read = _bind("sl_gguf_read", _i32, _i64, _u64, _pointer, _pointer, _pointer)
    sl_gguf_free = _bind("sl_gguf_free", None, _pointer)
    sl_table_columns = _bind("sl_table_columns", _pointer, _pointer)
    sl_table_find = _bind("sl_table_find", _i64, _pointer, ctypes.c_char_p, _u64)
    sl_table_free = _bind("sl_table_free", None, _pointer)
    sl_memory_alloc = _bind("sl_memory_alloc", _pointer, _u64)
    sl_memory_free = _bind("sl_memory_free", None, _pointer, _u64)
    sl_file_open = _bind("sl_file_open", _i32, ctypes.c_char_p, _pointer, _pointer, _pointer)
    sl_file_read = _bind("sl_file_read", _i32, _i64, _u64, _pointer, _u64, _pointer)
    sl_file_map = _bind("sl_file_map", _i32, _i64, _u64, _pointer, _pointer)
    sl_file_unmap = _bind("sl_file_unmap", None, _pointer, _u64)
    sl_file_close = _bind("sl_file_close", None, _i64)
    sl_stats_merge = _bind("sl_stats_merge", None, _pointer, _pointer, _u64, _pointer)


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
        raise LimitError(str(FormatError(message, path, offset)))
    if status == lib.SL_E_UNSUPPORTED:
        raise UnsupportedError(str(FormatError(message, path, offset)))
    if status == lib.SL_E_OS:
        raised = os_error(error.os_errno, path)
        if offset is not None and hasattr(raised, "add_note"):  # Python 3.11
            raised.add_note(f"{subject or 'the transfer'} failed at byte {offset}")
        raise raised
    if status == lib.SL_E_MEMORY:
        raise MemoryError(message)
    raise SafeloadError(message)


def private_buffer(size: int) -> Any:
    """A writable buffer of fresh memory in huge pages, freed when the last array over it is gone; size > 0.

    Raises:
        MemoryError: there is none.
    """
    address = short.sl_memory_alloc(size)
    if not address:
        raise MemoryError(f"cannot allocate {size} bytes")

    def free(memory: Any) -> None:
        short.sl_memory_free(pointer(memory), size)

    return ffi.buffer(ffi.gc(ffi.cast("void *", address), free), size)


def mapped_buffer(address: Any, size: int) -> Any:
    """A writable buffer over a mapping, which is unmapped when the last array over it is gone."""

    def unmap(mapping: Any) -> None:
        short.sl_file_unmap(pointer(mapping), size)

    return ffi.buffer(ffi.gc(address, unmap), size)
