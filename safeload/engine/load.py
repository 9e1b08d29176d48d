"""Tensors of open files as a dict of arrays: as views where their bytes allow it, read and converted otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, ArraySpec, check_mapping, refuse_masked, view_of
from ..base.file import WeightFile
from ..base.native import lib
from ..base.table import Scale
from ..base.text import show
from ..errors import SafeloadError, UnsupportedError
from . import jobs, strided
from .jobs import Progress
from .quantized_tensor import INT8, QuantizedTensor

Backend = Literal["mmap", "pread"]

# What a tensor becomes.
Value = Array | QuantizedTensor

_F32 = dtypes.BY_CODE["F32"]

# A tensor to load: its name, its file, its index there.
Part = tuple[str, WeightFile, int]


class LoadStats(NamedTuple):
    """What the last load did.

    Attributes:
        bytes: size of the arrays.
        tensors: how many.
        seconds: wall clock.
        backend: "mmap" or "pread"; "pread" where the system refused the mapping that was asked for.
    """

    bytes: int
    tensors: int
    seconds: float
    backend: str


def check_backend(backend: object) -> None:
    """Refuses what is neither "mmap" nor "pread"."""
    if backend not in ("mmap", "pread"):
        raise SafeloadError(f'backend {show(backend)} is invalid (expected one of: "mmap", "pread")')


def parse_target(dtype: Any) -> dtypes.Dtype | None:
    """The dtype that floating tensors are converted to while loading; None for none.

    Raises:
        TypeError: no dtype at all.
        UnsupportedError: one that nothing is converted to.
    """
    if dtype is None:
        return None
    row = dtypes.parse(dtype)
    if not row.floating or not (row.code == "F32" or lib.sl_convertible(dtypes.BY_CODE["F32"].number, row.number)):
        able = [r.name for r in dtypes.TABLE if lib.sl_convertible(dtypes.BY_CODE["F64"].number, r.number)]
        raise UnsupportedError(f"dtype={row.name} is no dtype to load as; able are float64, {', '.join(able)}")
    return row


def distinct(names: Iterable[str]) -> Iterable[str]:
    """Names to load, each once; TypeError for a single str, whose characters nobody means."""
    if isinstance(names, str):
        raise TypeError("names must be an iterable of names, not one str")
    return dict.fromkeys(names)


def parts_of(file: WeightFile, names: Iterable[str] | None = None) -> list[Part]:
    """The tensors named, or all in the order of their bytes.

    Raises:
        TensorNotFoundError: an unknown name.
    """
    if names is None:
        return [(name, file, index) for index, name in enumerate(file.table.names)]
    return [(name, file, file.table.index(name)) for name in distinct(names)]


def load_parts(
    parts: Sequence[Part],
    *,
    backend: str,
    dtype: Any = None,
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
    mappings: dict[WeightFile, Any] | None = None,
) -> tuple[dict[str, Any], LoadStats]:
    """Arrays (or quantized tensors) of tensors in any files, in the order of ``parts``.

    Args:
        parts: what to load.
        backend: "mmap" for views into one mapping per file, "pread" for private memory. What cannot be a view
            (converted, not aligned in the file, or the system refuses the mapping) is read. Tensors that share bytes
            share memory either way, unless they are converted.
        dtype: what floating tensors are converted to and quantized ones restored to; None for none.
        out: arrays to fill, by name; all of them are checked before the first byte is written.
        threads: for what is read.
        progress: for what is read.
        mappings: mappings to use; those made are added. None for fresh ones.

    Raises:
        ValueError, TypeError: wrong arguments, an array of ``out`` that does not fit among them.
        UnsupportedError: a conversion that there is not.
        FormatError: a file ends too early, with path and offset.
        OSError: a file cannot be read.
    """
    check_backend(backend)
    jobs.check_threads(threads)
    target = parse_target(dtype)
    started = time.perf_counter()
    layouts = _layouts(parts, target)
    arrays: list[Array | None] = [None] * len(parts)
    into = None
    if out is not None:
        into = _check_out(parts, layouts, out)
        backend = "pread"
    elif backend == "mmap" and not _fill_views(parts, layouts, {} if mappings is None else mappings, arrays):
        backend = "pread"
    for k, part in enumerate(parts):
        if layouts[k].source != layouts[k].target and _scale(part) is not None:
            arrays[k] = _quantized(part, _read_raw(part, threads)).dequantize(
                dtypes.array_dtype(layouts[k].target), out=None if into is None else into[k], threads=threads
            )
    missing = [k for k, array in enumerate(arrays) if array is None]
    if missing:
        to_read = [(parts[k][1], layouts[k]) for k in missing]
        places = None if into is None else [into[k] for k in missing]
        read = strided.read_arrays(to_read, into=places, threads=threads, progress=progress)
        for k, array in zip(missing, read, strict=True):
            arrays[k] = array
    done: dict[str, Any] = {}
    for part, layout, loaded in zip(parts, layouts, arrays, strict=True):
        if loaded is not None:
            raw = part[1].table.quantized and layout.source == layout.target
            done[part[0]] = _quantized(part, loaded) if raw else loaded
    nbytes = sum(value.nbytes for value in done.values())
    return done, LoadStats(nbytes, len(done), time.perf_counter() - started, backend)


def _scale(part: Part) -> Scale | None:
    return part[1].table.scale(part[2]) if part[1].table.quantized else None


def _read_raw(part: Part, threads: int | None) -> Array:
    return jobs.read_arrays([(part[1], part[1].layout(part[2]))], threads=threads)[0]


def _quantized(part: Part, array: Array) -> Any:
    """The tensor that raw data belongs to: itself, or quantized."""
    _, file, index = part
    row, scale = file.table.row(index), _scale(part)
    if row.blocked:
        return QuantizedTensor(row.name, file.table.shape(index), array)
    if scale is None:
        return array
    return QuantizedTensor(INT8, array.shape, array, read_scale(file, scale), scale.axis)


def read_scale(file: WeightFile, scale: Scale) -> Array:
    """The scales of an int8 tensor."""
    number = _F32.number
    layout = ArraySpec(dtypes.array_dtype(number), scale.shape, scale.begin, scale.end, number, number)
    return jobs.read_small(file, layout)


def _by_file(parts: Sequence[Part]) -> dict[WeightFile, list[int]]:
    """Positions in ``parts`` of the tensors of each file."""
    positions: dict[WeightFile, list[int]] = {}
    for k, (_, file, _) in enumerate(parts):
        positions.setdefault(file, []).append(k)
    return positions


def _layouts(parts: Sequence[Part], target: dtypes.Dtype | None) -> list[ArraySpec]:
    if len(parts) == 1 and target is None:
        return [parts[0][1].layout(parts[0][2])]
    result: dict[int, ArraySpec] = {}
    for file, positions in _by_file(parts).items():
        result.update(zip(positions, file.layouts([parts[k][2] for k in positions], target), strict=True))
    return [result[k] for k in range(len(parts))]


def _fill_views(
    parts: Sequence[Part], layouts: list[ArraySpec], mappings: dict[WeightFile, Any], arrays: list[Array | None]
) -> bool:
    """Fills in views where they can be; whether the system allowed every mapping."""
    allowed = True
    for file, positions in _by_file(parts).items():
        buffer = mappings.get(file)
        if buffer is None:
            if all(layouts[k].source != layouts[k].target for k in positions):
                continue  # nothing to view
            try:
                buffer = mappings[file] = file.map()
            except OSError:
                allowed = False
                continue
        for k in positions:
            arrays[k] = view_of(buffer, layouts[k])
    return allowed


def _check_out(parts: Sequence[Part], layouts: list[ArraySpec], out: Mapping[str, Array]) -> list[Array]:
    """The arrays to fill, in the order of ``parts``."""
    check_mapping(out, "out")
    names = [name for name, _, _ in parts]
    unknown = sorted(set(out) - set(names))
    if unknown:
        raise ValueError(f"out: {show(unknown[0])} is no tensor of this load")
    arrays = []
    for name, layout in zip(names, layouts, strict=True):
        array = out.get(name)
        if array is None:
            raise ValueError(f"out: no array for tensor {show(name)}")
        refuse_masked(array, f"out: {show(name)}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"out: {show(name)} is a {type(array).__name__}, not a numpy array")
        if array.dtype != layout.dtype or array.shape != layout.shape:
            raise ValueError(
                f"out: {show(name)} is {array.dtype} {show(list(array.shape))}, but the tensor needs {layout.dtype} "
                f"{show(list(layout.shape))}"
            )
        if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
            raise ValueError(f"out: {show(name)} must be C-contiguous, aligned and writable")
        arrays.append(array)
    return arrays
