"""The binding to the C core: its functions, and exceptions for its statuses. No other module imports it directly.

`lib` has every function of sl_api.h as cffi binds it: calls release the GIL. That is right for jobs, which take
milliseconds. It is wrong for calls that take microseconds: beside a busy Python thread each reacquisition of the GIL
costs up to sys.getswitchinterval(), 5 ms, where the work itself (opening 300 tensors) takes 0.07 ms. `short` has the
short functions bound with ctypes.PyDLL's calling convention, which keeps the GIL.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from ..errors import FormatError, LimitError, SafeloadError, UnsupportedError
from .paths import os_error
from .text import show

try:
    from .._core import ffi, lib
except ImportError as error:
    raise ImportError(
        "safeload's C core is not built here. In a source tree run `pip install -e .`, elsewhere reinstall the package "
        f"({error})"
    ) from error

__all__ = [
    "TIER",
    "Error",
    "available_tiers",
    "check",
    "content_buffer",
    "ffi",
    "kept",
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
    """Instruction sets that both this processor and this build support, best first."""
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


_ADDRESS = ffi.typeof("uintptr_t")
_ERROR = ffi.typeof("sl_error *")


def pointer(cdata: Any) -> int:
    """The address in a cffi pointer, as the functions of `short` take it."""
    return int(ffi.cast(_ADDRESS, cdata))


_C_TYPES = {
    "void": None,
    "char *": ctypes.c_char_p,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
}


def _ctype(kind: Any) -> Any:
    """The ctypes type for a cffi type: text is const in every function, other pointers are addresses."""
    if kind.kind == "pointer" and kind.cname != "char *":
        return ctypes.c_void_p
    return _C_TYPES[kind.cname]


def _bind(name: str) -> Any:
    """A function of the C core bound with ctypes, with the types that cffi has parsed from sl_api.h."""
    kind = ffi.typeof(getattr(lib, name))
    return ctypes.PYFUNCTYPE(*map(_ctype, (kind.result, *kind.args)))(pointer(ffi.addressof(lib, name)))


class short:  # noqa: N801 - a namespace beside `lib`
    """Functions of the C core that keep the GIL. Pointers are integers, see `pointer`."""

    sl_safetensors_load = _bind("sl_safetensors_load")
    sl_safetensors_table = _bind("sl_safetensors_table")
    sl_safetensors_parse = _bind("sl_safetensors_parse")
    sl_gguf_read = _bind("sl_gguf_read")
    sl_gguf_free = _bind("sl_gguf_free")
    sl_table_find = _bind("sl_table_find")
    sl_table_free = _bind("sl_table_free")
    sl_free = _bind("sl_free")
    sl_memory_alloc = _bind("sl_memory_alloc")
    sl_memory_free = _bind("sl_memory_free")
    sl_file_open = _bind("sl_file_open")
    sl_file_read = _bind("sl_file_read")
    sl_file_open_direct = _bind("sl_file_open_direct")
    sl_file_map = _bind("sl_file_map")
    sl_file_unmap = _bind("sl_file_unmap")
    sl_file_close = _bind("sl_file_close")
    sl_stats_merge = _bind("sl_stats_merge")


def Error() -> Any:  # noqa: N802 - makes a C struct, as a class would
    """A new ``sl_error`` for one call."""
    return ffi.new(_ERROR)


def check(
    status: int, error: Any, path: str | None = None, subject: str | None = None, *, tensor: str | None = None
) -> None:
    """Raises the exception for the status of a call; returns if it is ``SL_OK``.

    Args:
        status: of the call.
        error: the ``sl_error`` that the call has filled.
        path: the file concerned.
        subject: goes in front of the core's message; None for the tensor.
        tensor: name of the tensor concerned.
    """
    if status != lib.SL_OK:
        raise failure(status, error, path, subject, tensor=tensor)


def failure(
    status: int, error: Any, path: str | None = None, subject: str | None = None, *, tensor: str | None = None
) -> Exception:
    """The exception that `check` raises for a status that is not ``SL_OK``."""
    message = ffi.string(error.message).decode("utf-8", "replace")
    if subject is None and tensor is not None:
        subject = f"tensor {show(tensor)}"
    if subject is not None:
        message = f"{subject}: {message}"
    offset = error.position if error.position >= 0 else None
    if status in (lib.SL_E_FORMAT, lib.SL_E_TRUNCATED):
        return FormatError(message, path, offset, tensor=tensor)
    if status in (lib.SL_E_LIMIT, lib.SL_E_UNSUPPORTED):
        kind = LimitError if status == lib.SL_E_LIMIT else UnsupportedError
        text = str(FormatError(message, path, offset))
        return kind(text, path=path, offset=offset, tensor=tensor)
    if status == lib.SL_E_OS:
        raised = os_error(error.os_errno, path)
        if offset is not None and hasattr(raised, "add_note"):  # Python 3.11
            raised.add_note(f"{subject or 'the transfer'} failed at byte {offset}")
        return raised
    if status == lib.SL_E_MEMORY:
        return MemoryError(message)
    return SafeloadError(message, path=path, offset=offset, tensor=tensor)


def private_buffer(size: int) -> Any:
    """A writable buffer of new memory in huge pages, freed when the last array over it is gone; size > 0.

    Raises:
        MemoryError: the memory cannot be allocated.
    """
    address = short.sl_memory_alloc(size)
    if not address:
        raise MemoryError(f"cannot allocate {size} bytes")
    return ffi.buffer(kept(ffi.cast("void *", address), short.sl_memory_free, size), size)


def kept(memory: Any, free: Any, *arguments: int) -> Any:
    """A pointer to memory that ``free(address, *arguments)`` frees when nothing refers to the pointer any more.

    It uses no globals: free-threaded Python ends with globals that are gone before the last arrays are.
    """
    return ffi.gc(memory, lambda it, cast=ffi.cast, kind=_ADDRESS: free(int(cast(kind, it)), *arguments))


def content_buffer(content: Any, size: int) -> Any:
    """A writable buffer over a block of the C core's, which `sl_free` frees when the last array over it is gone."""
    return ffi.buffer(kept(content, short.sl_free), size)


def mapped_buffer(address: Any, size: int) -> Any:
    """A writable buffer over a mapping, which is unmapped when the last array over it is gone."""
    return ffi.buffer(kept(address, short.sl_file_unmap, size), size)
