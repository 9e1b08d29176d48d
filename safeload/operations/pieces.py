"""`run_piece`: does a piece of any operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..base.text import show
from ..engine.run.threads import check_threads
from ..errors import FormatError
from .convert import run_plan
from .measure import diff, stats
from .sources.plan import INVALID_PIECE
from .validate import contents, manifest

# By the name of the operation.
_FUNCTIONS: Mapping[str, Callable[[Mapping[str, Any], int | None, Mapping[str, Any] | None], dict[str, Any]]] = {
    "convert": run_plan.run,
    "diff": diff.run,
    "manifest": manifest.run,
    "stats": stats.run,
    "validate": contents.run,
}


def run_piece(
    piece: Mapping[str, Any], *, threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Does one piece of a plan: reads what it names, and writes its shard under a temporary name that it then renames.

    It also does what `stats`, `diff` and `validate` give to an executor; these pieces write nothing.

    A piece may be done more than once, also by two processes at a time: it writes the same bytes each time, and a shard
    that is whole is not written again.

    A piece is as trusted as code: it reads the files that it names, and writes into the folder that it names.

    Args:
        piece: one of ``plan.pieces``.
        threads: for reading and converting; None: chosen automatically.
        storage_options: for URLs: options that the piece cannot carry, such as keys; they win over those that it has.

    Returns:
        The result, plain data. For `finalize`: the name of the shard, its size and its SHA-256.

    Raises:
        UnsupportedError: another version of safeload has made the plan.
        FormatError: a source has changed since the plan was made, or is gone; or this is not a piece.
        SafeloadError, OSError: see `convert`.

    Example:
        >>> import safeload
        >>> plan = safeload.plan_convert("tiny-llama", "half", dtype="float16", max_shard_size="64KB")
        >>> safeload.run_piece(plan.pieces[0])["file"]
        'model-00001-of-00005.safetensors'
    """
    check_threads(threads)
    operation = piece.get("operation") if isinstance(piece, Mapping) else None
    if not isinstance(operation, str) or operation not in _FUNCTIONS:
        raise FormatError(f"{INVALID_PIECE}: operation must be {', '.join(_FUNCTIONS)}, got {show(operation)}")
    return _FUNCTIONS[operation](piece, threads, storage_options)
