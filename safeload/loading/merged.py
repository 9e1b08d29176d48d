"""Loads a checkpoint with adapters merged into it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ..base import dtypes
from ..base.arrays import Array
from ..base.selecting import Patterns
from ..checkpoint import Checkpoint, chosen
from ..engine.delivery import check_given
from ..engine.load import check_backend, check_out_names
from ..engine.progress import Progress, reporter
from ..engine.threads import check_threads
from .adapter import listed, opened
from .adapter_base import CheckpointBase
from .merge import Merge


@contextmanager
def merging(
    checkpoint: Checkpoint, adapters: Any, storage_options: Mapping[str, Any] | None = None
) -> Iterator[Merge | None]:
    """The adapters of a base, open and fitted to it; None for none.

    Args:
        checkpoint: the base.
        adapters: a path, a pair (path, weight), or a list of these.
        storage_options: for URLs, see `safeload.open`.

    Raises:
        TypeError, ValueError: see `listed`.
        SafeloadError, OSError: see `Adapter` and `Merge`.
    """
    given = listed(adapters)
    if not given:
        yield None
        return
    with ExitStack() as stack:
        yield Merge(CheckpointBase(checkpoint), opened(stack, given, storage_options))


def load_merged(
    checkpoint: Checkpoint,
    merge: Merge,
    names: Iterable[str] | None = None,
    *,
    only: Patterns = None,
    drop: Patterns = None,
    dtype: Any = None,
    backend: Any = "mmap",
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """`Checkpoint.load`, with adapters merged.

    Raises:
        UnsupportedError: a packed tensor that an adapter changes, without ``dtype``.
        SafeloadError, ValueError, OSError: see `Checkpoint.load`.
    """
    check_backend(backend)
    check_threads(threads)
    every = [part[0] for part in chosen(checkpoint, names, only, drop, dtype)]
    rows = {name: merge.target_row(name, dtype) for name in every if name in merge}
    results: dict[str, Array] = {}
    filled: Mapping[str, Array] = {}
    if out is not None:
        check_out_names(out, every, "load")
        filled = out
    shapes = {name: tuple(checkpoint.tensors[name].shape) for name in rows}
    for name, row in rows.items() if out is not None else ():
        check_given(name, dtypes.array_dtype(row.number), shapes[name], filled)
        results[name] = filled[name]
    rest = [name for name in every if name not in rows]
    others = None if out is None else {name: array for name, array in filled.items() if name not in rows}
    sizes = [rows[name].nbytes(math.prod(shapes[name])) for name in rows]
    arrays = checkpoint.load(rest, dtype=dtype, backend=backend, out=others, threads=threads)
    done = sum(array.nbytes for array in arrays.values())
    with reporter(progress, done + sum(sizes)) as report:
        report(done)
        for (name, row), size in zip(rows.items(), sizes, strict=True):
            results[name] = merge.values(name, row, results.get(name), threads)
            done += size
            report(done)
    return {name: results[name] if name in results else arrays[name] for name in every}
