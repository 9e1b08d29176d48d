"""Loads a checkpoint with adapters merged into it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..base import dtypes, log
from ..base.arrays import Array
from ..base.selecting import Patterns
from ..base.text import show
from ..checkpoint import Checkpoint, chosen
from ..engine.read.delivery import check_given, refuse_own_files
from ..engine.read.load import check_backend, check_out_names
from ..engine.run.progress import Progress, reporter
from ..engine.run.threads import check_threads
from ..errors import SafeloadError
from .adapter import Adapter, listed, opened
from .adapter_base import CheckpointBase
from .adapter_heads import Heads, heads_of
from .merge import Merge


@contextmanager
def merging(
    checkpoint: Checkpoint, adapters: Any, storage_options: Mapping[str, Any] | None = None
) -> Iterator[tuple[Checkpoint, Merge | None]]:
    """The base of adapters, with the heads that they untie, and the adapters fitted to it; None without adapters.

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
        yield checkpoint, None
        return
    with ExitStack() as stack:
        base, merge = fit(checkpoint, opened(stack, given, storage_options))
        warn_of_untied(merge.heads, checkpoint.config)
        yield base, merge


def fit(
    checkpoint: Checkpoint, adapters: Sequence[Adapter], problems: list[SafeloadError] | None = None
) -> tuple[Checkpoint, Merge]:
    """Fit open adapters to a base; see `merging`, and `Merge` for the list of problems."""
    heads = heads_of(adapters, checkpoint.config, checkpoint)
    absent = {head: embedding for head, embedding in heads.untied.items() if head not in checkpoint}
    base = checkpoint.with_aliases(absent) if absent else checkpoint
    return base, Merge(CheckpointBase(base), adapters, problems=problems, heads=heads)


def warn_of_untied(heads: Heads, config: Mapping[str, Any] | None) -> None:
    """Warn that a model of these tensors needs another configuration than the base."""
    for head, embedding in heads.untied.items():
        where = "the model's config" if config is None else "config.json"
        log.warning(
            "the adapter gives %s and %s different values: load them into a model whose %s has "
            '"tie_word_embeddings": false',
            show(head),
            show(embedding),
            where,
        )


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
        refuse_own_files(out, checkpoint.weight_files)
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
