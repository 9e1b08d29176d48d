"""Loads tensors of open files as a dict of arrays: views where the bytes allow it, read and converted otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from operator import attrgetter, eq
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_args

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, check_mapping
from ...base.selecting import Patterns
from ...base.text import show
from ...errors import SafeloadError, UnsupportedError
from ...stores.local import mapping_of
from ..run.memory import HUGE_FROM
from ..run.progress import Progress
from ..run.threads import check_threads
from ..run.weight_file import WeightFile
from .delivery import deliver
from .in_memory import views_of
from .tensors import Tensors

Backend = Literal["mmap", "pread", "direct"]
_BACKENDS: tuple[str, ...] = get_args(Backend)

_F64 = dtypes.BY_CODE["F64"]
# The dtypes that loading converts to, in the order of messages.
_TARGETS = tuple(row for row in reversed(dtypes.TABLE) if _F64.converts_to(row))

# Tensors of `safe_open` below this size, and slices, are read, with any backend: a view would save less than the
# mapping costs, and one call of the system is less than a batch of jobs.
VIEWED_FROM = {"mmap": 127 << 10, "pread": HUGE_FROM, "direct": HUGE_FROM}

# What `parse_target` takes as a dtype.
DtypeLike: TypeAlias = str | type[Any] | np.dtype[Any]


class LoadOptions(TypedDict, total=False):
    """Options of every function that loads; see `Checkpoint.load`."""

    only: Patterns
    drop: Patterns
    backend: Backend
    out: Mapping[str, Array] | None
    threads: int | None
    progress: Progress


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
    """Refuses backends other than those of `Backend`."""
    if backend not in _BACKENDS:
        expected = ", ".join(f'"{one}"' for one in _BACKENDS)
        raise SafeloadError(f"backend {show(backend)} is invalid (expected one of: {expected})")


def parse_target(dtype: Any) -> dtypes.Dtype | None:
    """The dtype that floating tensors are converted to while loading; None to convert nothing.

    Raises:
        TypeError: an unknown dtype.
        UnsupportedError: a dtype that loading cannot convert to.
    """
    if dtype is None:
        return None
    row = dtypes.parse(dtype, _TARGETS)
    if row not in _TARGETS:
        raise UnsupportedError(f"cannot load as {row.name}; supported: {', '.join(targets())}")
    return row


def targets() -> list[str]:
    """Names of the dtypes that `parse_target` takes."""
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

    Args:
        tensors: each name once.
        backend: "mmap" for views into one mapping per file, "pread" for private memory, "direct" for private memory
            that is read past the page cache. Tensors that cannot be views (converted, not aligned in the file, or the
            system refuses the mapping) are read. Tensors that share bytes share memory with every backend, unless they
            are converted.
        dtype: dtype that floating tensors are converted to and quantized ones dequantized to; None to convert nothing.
        out: arrays to fill, by name; all of them are checked before the first byte is written.
        threads: for reading.
        progress: for reading; if everything is mapped, which takes no time, only the end is reported.
        mappings: mappings to use; new ones are added. None for new mappings.

    Raises:
        ValueError, TypeError: invalid arguments, including an array of ``out`` that does not fit.
        UnsupportedError: an unsupported conversion.
        FormatError: a file ends too early, with path and offset.
        OSError: a file cannot be read.
    """
    check_backend(backend)
    check_threads(threads)
    target = parse_target(dtype)
    started = time.perf_counter()
    names = tensors.names
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
    if not all(map(eq, arrays, names)):  # delivered views first, then tensors that were read, file by file
        arrays = {name: arrays[name] for name in names}
    nbytes = sum(map(attrgetter("nbytes"), arrays.values()))
    if tensors.remote:
        backend = "remote"
    elif not allowed:
        backend = "pread"
    return arrays, LoadStats(nbytes, len(arrays), time.perf_counter() - started, backend)


def load_all(file: WeightFile, backend: str) -> dict[str, Array]:
    """All tensors of a file, by name in the order of their bytes; not converted.

    Args:
        file: of which no tensor is a `QuantizedTensor`.
        backend: see `load_tensors`.

    Raises:
        UnsupportedError, FormatError, OSError: see `load_tensors`.
    """
    if backend == "mmap" and file.table.plain:
        buffer = mapping_of(file.store)
        if buffer is not None:
            return views_of(file.table, buffer)
    arrays: dict[str, Array]
    arrays, _ = load_tensors(Tensors.in_file(file), backend=backend)
    return arrays


def check_out_names(out: Mapping[str, Array], names: Iterable[str], what: str) -> None:
    """Refuses arrays to fill for anything but the tensors named.

    Args:
        out: arrays by name.
        names: of the tensors.
        what: what reads them, for the message.

    Raises:
        TypeError: ``out`` is not a mapping.
        ValueError: it has another name.
    """
    check_mapping(out, "out")
    unknown = sorted(set(out) - set(names), key=str)
    if unknown:
        raise ValueError(f"out: {show(unknown[0])} is not a tensor of this {what}")
