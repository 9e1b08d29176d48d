"""Load tensors of open files as a dict of arrays: views if possible, read and converted otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, eq
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_args

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, array_over, check_mapping
from ...base.names import Patterns
from ...base.native import ffi, lib, pointer, short
from ...base.packing import advice_for
from ...base.table import Entry
from ...base.text import show
from ...errors import SafeloadError, UnsupportedError, exported
from ...stores.local import LocalStore, mapping_of
from ..run.jobs import read_small
from ..run.memory import ALIGNMENT, HUGE_FROM, check_threads, thread_count
from ..run.progress import Progress
from ..run.weight_file import WeightFile
from .load import Value, deliver, views_of
from .tensors import FileTensor, Tensors

Backend = Literal["mmap", "pread", "direct"]
_BACKENDS: tuple[str, ...] = get_args(Backend)

_F64 = dtypes.BY_CODE["F64"]
# Target dtypes of loading, in the order of messages.
_TARGETS = tuple(row for row in reversed(dtypes.TABLE) if _F64.converts_to(row))

# `safe_open` reads smaller tensors and slices with any backend: a view would save less than the mapping costs, and a
# system call costs less than a batch of jobs.
VIEWED_FROM = {"mmap": 127 << 10, "pread": HUGE_FROM, "direct": HUGE_FROM}

# Dtypes for `parse_target`.
DtypeLike: TypeAlias = str | type[Any] | np.dtype[Any]


class LoadOptions(TypedDict, total=False):
    """Options of every function that loads; see `Checkpoint.load`."""

    only: Patterns
    drop: Patterns
    backend: Backend
    out: Mapping[str, Array] | None
    threads: int | None
    progress: Progress


@exported()
class LoadStats(NamedTuple):
    """Statistics of the last load.

    Attributes:
        bytes: size of the arrays.
        tensors: number of tensors.
        seconds: wall-clock time.
        backend: "mmap", "pread" or "direct"; "pread" also if the system refused the requested mapping or direct reads;
            "remote" if a file came over the network.

    Example:
        >>> import safeload
        >>> with safeload.open("tiny-llama") as checkpoint:
        ...     _ = checkpoint.load(backend="pread")
        >>> checkpoint.last_load.tensors, checkpoint.last_load.bytes, checkpoint.last_load.backend
        (30, 246656, 'pread')
    """

    bytes: int
    tensors: int
    seconds: float
    backend: str


def check_backend(backend: object) -> None:
    """Refuse unknown backends."""
    if backend not in _BACKENDS:
        expected = ", ".join(f'"{name}"' for name in _BACKENDS)
        raise SafeloadError(f"backend {show(backend)} is invalid (expected one of: {expected})")


def parse_target(dtype: Any) -> dtypes.Dtype | None:
    """Return the target dtype of a load; None to convert nothing."""
    if dtype is None:
        return None
    try:
        row = dtypes.parse(dtype, _TARGETS)
    except TypeError:
        if (advice := advice_for(dtype)) is None:
            raise
        raise TypeError(f"unknown dtype {show(dtype)}: it is a quantization scheme, {advice}") from None
    if row not in _TARGETS:
        advice = advice_for(row.name)
        quantized = "" if advice is None else f"; to quantize, {advice}"
        raise UnsupportedError(f"cannot load as {row.name}; supported: {', '.join(targets())}{quantized}")
    return row


def targets() -> list[str]:
    """Return the dtype names that `parse_target` accepts."""
    return [row.name for row in _TARGETS]


def load_tensors(
    tensors: Tensors,
    *,
    backend: str,
    dtype: Any = None,
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
    mappings: dict[WeightFile, Any] | None = None,
) -> tuple[dict[str, Any], LoadStats]:
    """Load tensors as arrays (or quantized tensors) by name, in their order.

    "mmap" reads what cannot be a view: converted or unaligned tensors, or a mapping that the system refuses. Tensors
    that share bytes share memory with every backend, unless they are converted.
    """
    check_backend(backend)
    check_threads(threads)
    target = parse_target(dtype)
    started = time.perf_counter()
    names = tensors.names
    remote = tensors.remote
    verified = [file for file in dict.fromkeys(file for _, file, _ in tensors) if file.verified] if remote else []
    if verified:  # hashed on several threads, before the first tensor is made
        from ...stores.thread_group import each  # only here: few programs verify

        stores: list[Any] = [file.store for file in verified]
        count = thread_count(sum(file.size for file in verified), threads)
        each(lambda store: store.verify(alone=len(stores) < count), stores, max(1, count))
    if out is not None:
        check_out_names(out, names, "load")
        backend = "pread" if backend == "mmap" else backend
    arrays, allowed = deliver(
        tensors,
        target=target,
        view=backend == "mmap",
        direct=backend == "direct",
        mappings=mappings,
        out=out,
        threads=threads,
        progress=progress,
    )
    if not all(map(eq, arrays, names)):  # views come first, then the tensors that were read, file by file
        arrays = {name: arrays[name] for name in names}
    nbytes = sum(map(attrgetter("nbytes"), arrays.values()))
    if remote and not all(file.verified for file in tensors.files):
        backend = "remote"
    elif remote or not allowed:
        backend = "pread"
    return arrays, LoadStats(nbytes, len(arrays), time.perf_counter() - started, backend)


def load_all(file: WeightFile, backend: str) -> dict[str, Array]:
    """Return all tensors of a file without quantized tensors, by name in the order of their bytes."""
    if backend == "mmap" and file.table.plain:
        buffer = mapping_of(file.store)
        if buffer is not None:
            return views_of(file.table, buffer)
    arrays: dict[str, Array]
    arrays, _ = load_tensors(Tensors.in_file(file), backend=backend)
    return arrays


def check_out_names(out: Mapping[str, Array], names: Iterable[str], operation: str) -> None:
    """Check that ``out`` has arrays only for these tensors."""
    check_mapping(out, "out")
    unknown = sorted(set(out) - set(names), key=str)
    if unknown:
        raise ValueError(f"out: {show(unknown[0])} is not a tensor of this {operation}")


class Views:
    """The accessed arrays of a checkpoint, by name: each access returns the same memory. Any thread may use it."""

    def __init__(self) -> None:
        self._mappings: dict[WeightFile, Any] = {}
        self._arrays: dict[str, Value] = {}
        self._groups: dict[str, dict[str, Value]] = {}  # tensors that share bytes, by the name of the first

    def find(self, name: str) -> Value | None:
        """Return the array of an earlier access, or None."""
        return self._arrays.get(name)

    def make(self, name: str, aliases: Sequence[FileTensor]) -> Value:
        """Create the array of a tensor. ``aliases`` are the tensor and all tensors that share bytes with it."""
        loaded, _ = load_tensors(Tensors.of(aliases), backend="mmap", mappings=self._mappings)
        if len(aliases) > 1:  # setdefault is atomic: all threads get the arrays of the first
            loaded = self._groups.setdefault(aliases[0][0], loaded)
            self._arrays.update(loaded)
        array: Value = self._arrays.setdefault(name, loaded[name])
        return array

    def clear(self) -> None:
        """Drop the arrays. Arrays of callers stay valid, because a mapping lives as long as its last array."""
        self._arrays.clear()
        self._groups.clear()
        self._mappings.clear()


# ---- single small tensors ----


# Bytes of a window, and of the largest tensor to copy from it. A system call takes as long as copying 8 KiB.
_WINDOW, _COPIED = 64 << 10, 16 << 10


class Window:
    """Small tensors of a file. Any thread may use it.

    If a tensor begins at the end of the last tensor, or near the end of the file, a window of the file is read, and
    tensors are copied from the window, unless the table is not `Table.plain`. It does not keep the file open.
    """

    def __init__(self) -> None:
        # Its first byte in the file, one past the last, and its memory: replaced as a whole, as other threads may read.
        self._content: tuple[int, int, Any] = 0, 0, None
        self._next = -1  # end of the last tensor

    def tensor(self, file: WeightFile, index: int, entry: Entry) -> Array:
        """Return a tensor in its own memory; the file must not change between calls."""
        if not file.table.plain:
            return read_small(file, *file.table.layout(index)[:4])
        number, shape, begin, end = entry
        dtype, store = dtypes.array_dtype(number), file.store
        first, last, memory = self._content
        follows, self._next = begin == self._next, end
        if not (first <= begin and end <= last):
            near = follows or end - begin < file.size - begin <= _WINDOW
            if end - begin > _COPIED or not near or not isinstance(store, LocalStore):
                return read_small(file, dtype, shape, begin, end)
            first = begin - begin % ALIGNMENT  # aligned tensors of the file are aligned in the window
            memory = np.empty(min(_WINDOW, file.size - first), np.uint8)
            address = pointer(ffi.from_buffer(memory))
            if store.use(short.sl_file_read, first, address, memory.size, None) != lib.SL_OK:
                return read_small(file, dtype, shape, begin, end)
            self._content = first, first + memory.size, memory
        return np.array(array_over(memory, dtype, shape, begin - first))
