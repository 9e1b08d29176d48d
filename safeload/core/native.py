"""The binding to the C core: its functions, and exceptions for its status codes. No other module imports it directly.

`lib` has every function of sl_api.h, bound by cffi, whose calls release the GIL. That suits jobs, which take
milliseconds. It does not suit calls of microseconds: beside a busy Python thread, reacquiring the GIL can take up to
sys.getswitchinterval(), 5 ms, which is much longer than opening a file. `short` binds the short functions by ctypes
with the calling convention of PyDLL, which keeps the GIL.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from ..errors import FormatError, LimitError, SafeloadError, UnsupportedError
from .text import is_absent, os_error, show, tensor_named

try:
    from .._core import ffi as ffi
    from .._core import lib as lib
except ImportError as error:
    if not is_absent("safeload._core"):
        raise ImportError(f"safeload's C core is here, but cannot be loaded: {error}") from error
    raise ImportError(
        "safeload's C core is not built here: run `pip install -e .` in a source tree, or reinstall the package "
        f"({error})"
    ) from error


def tier_name(tier: int) -> str:
    """Return the name of an instruction set, such as "avx2"."""
    return str(ffi.string(lib.sl_tier_name(tier)), "ascii")


def available_tiers() -> list[int]:
    """Return the instruction sets supported by this processor and this build, best first."""
    return [tier for tier in reversed(range(lib.SL_TIER_COUNT)) if lib.sl_tier_available(tier)]


def _choose_tier() -> int:
    """Return the best instruction set, or the choice of ``SAFELOAD_ISA``."""
    tiers = {tier_name(tier): tier for tier in available_tiers()}
    name = os.environ.get("SAFELOAD_ISA") or next(iter(tiers))
    if name not in tiers:
        raise ImportError(f"SAFELOAD_ISA is {show(name)}, but only {', '.join(tiers)} are available here")
    return tiers[name]


TIER = _choose_tier()


_ADDRESS = ffi.typeof("uintptr_t")
_ERROR = ffi.typeof("sl_error *")


def pointer(cdata: Any) -> int:
    """Return the address in a cffi pointer, which the functions of `short` take."""
    return int(ffi.cast(_ADDRESS, cdata))


def address_of(array: Any) -> int:
    """Return the address of a contiguous array's first element, faster than NumPy's own attributes."""
    return int(ffi.cast(_ADDRESS, ffi.from_buffer(array)))


_C_TYPES = {f"{name}_t": getattr(ctypes, f"c_{name}") for name in ("int32", "int64", "uint32", "uint64")}
_C_TYPES |= {"void": None, "char *": ctypes.c_char_p}


def _bind(name: str) -> Any:
    """Bind a function of the C core with ctypes, using cffi's types from sl_api.h."""
    kind = ffi.typeof(getattr(lib, name))
    kinds = [  # char pointers are always const text, and other pointers are addresses
        ctypes.c_void_p if each.kind == "pointer" and each.cname != "char *" else _C_TYPES[each.cname]
        for each in (kind.result, *kind.args)
    ]
    return ctypes.PYFUNCTYPE(*kinds)(pointer(ffi.addressof(lib, name)))


# Functions of the C core that keep the GIL. Pointers are integers (see `pointer`).
_SHORT = (
    "sl_safetensors_load", "sl_safetensors_table", "sl_safetensors_brief", "sl_safetensors_parse",
    "sl_safetensors_brief_header", "sl_gguf_read", "sl_gguf_free", "sl_table_find", "sl_table_list_names",
    "sl_table_list_entries", "sl_table_list_shapes", "sl_table_free", "sl_free", "sl_memory_alloc", "sl_memory_free",
    "sl_file_open", "sl_file_read", "sl_file_open_direct", "sl_file_map", "sl_file_unmap", "sl_file_close",
    "sl_stats_merge", "sl_file_resident", "sl_file_system", "sl_file_drop",
)  # fmt: skip
short: Any = type("short", (), {name: _bind(name) for name in _SHORT})


# Return a copy of memory as bytes. Objects of `ffi` would take longer, and without the GIL threads contend for the
# reference counts of `ffi` and its types.
bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)

# The functions with which the core makes lists: a text of all names, split, would be written twice, and each field of a
# column would take two objects of `ffi`.
TEXT_MAKER, *_makers = (
    ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    for name in (
        "PyUnicode_FromStringAndSize",
        *("PyLong_FromUnsignedLongLong", "PyTuple_New", "PyTuple_SetItem", "PyList_SetItem", "Py_IncRef"),
    )
)
ITEM_SETTER = _makers[3]
_MAKERS = ffi.new("sl_makers *", [ffi.cast("void *", maker) for maker in _makers])
MAKERS = pointer(_MAKERS)

# Makes an ``sl_loaded`` for `short`, and unpacks its fields before the error.
Loaded = ctypes.c_char * ffi.sizeof("sl_loaded")
_COLUMNS = "QPQPPPPPPiiiiQPPQ"
loaded_fields = struct.Struct(f"@qQqQQPP{_COLUMNS}").unpack_from
# The place of the first column among these fields.
LOADED_COLUMNS = 7

column_fields = struct.Struct(f"@{_COLUMNS}").unpack_from


def columns_at(address: int) -> tuple[int, ...]:
    """Return the fields of an ``sl_columns`` up to ``metadata_size``; see `table`."""
    return column_fields(bytes_at(address, struct.calcsize(f"@{_COLUMNS}")))


# Makes an ``sl_lone`` for `short`, and unpacks its numbers: they precede its name. Columns of a table follow it.
Lone = ctypes.c_char * ffi.sizeof("sl_lone")
LONE_NAME = ffi.offsetof("sl_lone", "name")
lone_numbers = struct.Struct(f"={LONE_NAME // 8}Q").unpack_from

LONE_COLUMNS = ffi.offsetof("sl_lone", "columns")

# Makes an ``sl_brief_header`` for `short`. It begins with its places; its header begins at this byte.
BriefHeader = ctypes.c_char * ffi.sizeof("sl_brief_header")
HEADER_AT = ffi.offsetof("sl_brief_header", "header")


def Error() -> Any:  # noqa: N802 - makes a C struct, as a class would
    """Return a new ``sl_error`` for a single call."""
    return ffi.new(_ERROR)


def check(
    status: int, error: Any, path: str | None = None, subject: str | None = None, *, tensor: str | None = None
) -> None:
    """Raise the exception for a status, if any; ``subject`` replaces the tensor in front of the message."""
    if status != lib.SL_OK:
        raise failure(status, error, path, subject, tensor=tensor)


def failure(
    status: int, error: Any, path: str | None = None, subject: str | None = None, *, tensor: str | None = None
) -> Exception:
    """Return the exception for a status other than ``SL_OK``, see `check`."""
    message = ffi.string(error.message).decode("utf-8", "replace")
    if subject is None and tensor is not None:
        subject = tensor_named(tensor)
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
    """Allocate a writable buffer in huge pages, freed with the last array over it; ``size`` must be positive."""
    address = short.sl_memory_alloc(size)
    if not address:
        raise MemoryError(f"cannot allocate {size} bytes")
    return ffi.buffer(kept(ffi.cast("void *", address), short.sl_memory_free, size), size)


def kept(memory: Any, free: Any, *arguments: int) -> Any:
    """Return a pointer; its last reference frees the memory, without globals, which may be gone at exit."""
    return ffi.gc(memory, lambda it, cast=ffi.cast, kind=_ADDRESS: free(int(cast(kind, it)), *arguments))
