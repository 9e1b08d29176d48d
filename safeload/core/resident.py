"""Safetensors files in memory: given as bytes, or small enough for a single call of the C core to read them whole.

Programs that load such files alone do not import the modules that read larger files.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import path_error
from . import dtypes, native
from .arrays import Array, array_over, array_spec, over
from .memory import HUGE_FROM, private_array, thread_count
from .native import Error, Loaded, Lone, check, ffi, lib, loaded_fields, lone_numbers, pointer, short
from .runtime import paused
from .table import FEW, Table
from .text import PathLike, native_path

if TYPE_CHECKING:
    from .files import LocalStore
    from .weight_file import WeightFile

# The largest file to read whole, by backend. For "mmap" the limit is the size from which glibc's malloc may map new
# memory, 128 KiB, because that would be as slow as mapping the file.
_SMALL = {"mmap": 127 << 10, "auto": 127 << 10, "pread": (2 << 20) - 1, "direct": 0}

_LITTLE = sys.byteorder == "little"
_LOADED, _TABLE = map(ffi.typeof, ("sl_loaded *", "sl_table **"))


class Resident(NamedTuple):
    """A small file, already read and closed."""

    table: Table
    arrays: dict[str, Array]  # by name, in the order of their bytes


def load_or_open(path: PathLike, backend: str, folders: str = "safeload.load") -> Resident | WeightFile:
    """Return the tensors of a small file, or an open file if it is larger than the limit of the backend."""
    if backend == "pread":
        thread_count(0, None)  # only to check SAFELOAD_NUM_THREADS: reading takes one thread
    # A read even for "mmap": a mapping and its first page fault take longer.
    text, fields = read_or_open(path, _SMALL[backend], folders)
    _, size, _, _, _, address, content, *_ = fields
    table = Table(address, fields[native.LOADED_COLUMNS :])
    if not content:
        try:
            file_of, store_of = _opening()
        except BaseException:  # for example if no descriptor is left to read a module
            short.sl_file_close(fields[0])
            raise
        return file_of(text, store_of(text, fields[:5], brief=True), table)
    # Like a mapping, the memory is private and lives as long as the last array over it.
    return Resident(table, views_of(table, ffi.buffer(native.kept(ffi.cast("void *", content), short.sl_free), size)))


@cache  # a call takes a tenth of the time of an import statement
def _opening() -> tuple[type[WeightFile], type[LocalStore]]:
    from .files import LocalStore
    from .weight_file import WeightFile

    return WeightFile, LocalStore


def read_or_open(path: PathLike, largest: int, folders: str, explained: bool = True) -> tuple[str, tuple[Any, ...]]:
    """Return the path as text, and the fields of its ``sl_loaded``, see `loaded_fields`."""
    text, encoded = native_path(path)
    memory = Loaded()
    status = short.sl_safetensors_load(encoded, largest, memory)
    if status:
        _retry(text, (encoded, largest, memory), status, folders, explained)
    return text, loaded_fields(memory)


def _retry(text: str, arguments: tuple[Any, ...], status: int, folders: str, explained: bool) -> None:
    """Call ``sl_safetensors_load`` again if its failure may pass, or raise its error."""
    loaded = ffi.cast(_LOADED, ffi.from_buffer(arguments[2]))
    files = sys.modules.get(f"{__package__}.files")  # without it, there are no files to close
    if status == lib.SL_E_OS and files is not None:
        status = files.with_room(lambda: int(short.sl_safetensors_load(*arguments)), loaded.error, status)
    if status == lib.SL_E_OS and loaded.error.os_errno == errno.EISDIR:
        raise path_error(errno.EISDIR, text, f"Is a directory: {text}; {folders} loads folders")
    if status == lib.SL_E_FORMAT:
        from .registry import explain, part  # only here: few files are broken

        edits = part("edits")
        for _ in edits.editor_pauses(text) if edits else ():
            status = int(short.sl_safetensors_load(*arguments))
            if status != lib.SL_E_FORMAT:
                break
    if status == lib.SL_E_FORMAT:
        raise (explain(text) if explained else None) or native.failure(status, loaded.error, text)
    check(status, loaded.error, text)


def parse_table(data: Any) -> tuple[memoryview, Table]:
    """Return the bytes of a file in memory, and their table."""
    view, *place = _place(data)
    return view, _table(short.sl_safetensors_table(*place), place)


def _place(data: Any) -> tuple[memoryview, bytes | int, int]:
    """Return the bytes of a file in memory, their address (or the bytes) for C, and their number."""
    if type(data) is bytes:
        return memoryview(data), data, len(data)
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("data must be contiguous bytes")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    return view, pointer(ffi.from_buffer(view)), len(view)


def _table(address: int | None, place: Sequence[Any], fields: Sequence[int] | None = None) -> Table:
    """Return the table at an address, or raise the error of a file for which there is none."""
    if address is None:
        table, error = ffi.new(_TABLE), Error()  # again, to get the error
        check(short.sl_safetensors_parse(*place, pointer(table), pointer(error)), error)
        address = pointer(table[0])
        fields = None
    return Table(address, fields)


def parse(data: Any, *, copy: bool) -> tuple[dict[str, Array], Table | None]:
    """Return the tensors of a file in memory, in the order of their bytes, and its table, if it has several tensors."""
    view, address, size = _place(data)
    lone = Lone()
    table = short.sl_safetensors_brief(address, size, lone)
    small = copy and size < HUGE_FROM
    if table is None and _LITTLE:  # a single plain tensor: making a table would take longer than the rest
        numbers = lone_numbers(lone)
        if numbers[0]:
            _, dtype, begin, length, rank = numbers[:5]
            name = lone[native.LONE_NAME : native.LONE_NAME + length].decode()
            content = memoryview(bytearray(view)) if small else view  # which nobody can resize
            array = array_over(content, dtypes.array_dtype(dtype), numbers[5 : 5 + rank], begin)
            return {name: _large_copy(array) if copy and not small else array}, None
    columns = _table(table, (address, size), native.column_fields(lone, native.LONE_COLUMNS))
    if small and columns.plain:
        return views_of(columns, memoryview(bytearray(view))), columns
    arrays = views_of(columns, view)
    with paused(columns.count):
        for name, array in arrays.items() if copy else ():
            if array.base is not None:  # unaligned tensors are copies already
                arrays[name] = array.copy() if array.nbytes < HUGE_FROM else _large_copy(array)
    return arrays, columns


# ---- arrays over them ----


def views_of(table: Table, buffer: Any) -> dict[str, Array]:
    """Return all tensors by name, in the order of their bytes, as views of the buffer if they are aligned."""
    if not table.plain:
        from .jobs import native_order  # only here: files of usual writers are plain

        arrays = {}
        for name, number, shape, begin, end in zip(table.names, *table.columns(range(table.count)), strict=True):
            spec = array_spec(dtypes.BY_NUMBER[number], shape, begin, end)
            array = (
                array_over(buffer, spec.dtype, spec.shape, begin) if begin < end else np.empty(spec.shape, spec.dtype)
            )
            arrays[name] = native_order(array)
        return arrays
    if table.count <= FEW:
        entries = zip(table.names, table.entries(), strict=True)
        return {name: array_over(buffer, dtypes.array_dtype(kind), dims, at) for name, (kind, dims, at, _) in entries}
    with paused(table.count):
        views = over(buffer, dtypes.array_dtypes(table.numbers), table.shapes, table.begins())
        return dict(zip(table.names, views, strict=True))


def _large_copy(array: Array) -> Array:
    copy = private_array(array.shape, array.dtype)
    copy[...] = array
    return copy
