"""Run `safeload.convert` on several machines: plan it, run the pieces anywhere, put the shards in place.

`safeload.convert` takes these three steps if it gets an ``executor``. Programs with a scheduler of their own, such as
job arrays, call the functions themselves.

>>> from safeload import cluster
>>> plan = cluster.plan_convert("tiny-llama", "half/", dtype="float16", max_shard_size="100KB")
>>> results = [cluster.run_piece(piece) for piece in plan.pieces]
>>> len(cluster.finalize(plan, results).files)
3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .checking import check, diff, stats
from .conversion import resume
from .conversion.executors import INVALID_PIECE
from .conversion.resume import Plan, finalize, plan_convert
from .core.memory import check_threads
from .core.text import show
from .errors import FormatError, public
from .trust import verify

__all__ = ["Plan", "finalize", "plan_convert", "run_piece"]

# Functions by operation.
_FUNCTIONS: Mapping[str, Callable[[Mapping[str, Any], int | None, Mapping[str, Any] | None], dict[str, Any]]] = {
    "convert": resume.run,
    "diff": diff.run,
    "manifest": verify.run,
    "stats": stats.run,
    "validate": check.run,
}


@public
def run_piece(
    piece: Mapping[str, Any], *, threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run a piece of a plan: read its tensors and write its shard, which becomes visible only once it is complete.

    Pieces can run more than once, even in two processes at a time: they write the same bytes, and a complete shard is
    not written again. `run_piece` also runs the pieces of `stats`, `diff` and `check`, which write nothing.

    You should trust a piece like code: it can read any file and write into any folder.

    Args:
        piece: an item of ``plan.pieces``.
        threads: number of threads for reading and converting; None to choose automatically.
        storage_options: for URLs: options missing from the piece, such as keys. They take precedence over the
            options of the piece.

    Returns:
        The result as plain data. Pass it to `finalize`: it holds the name of the shard, its size and its SHA-256.

    Raises:
        UnsupportedError: another version of safeload made the plan.
        FormatError: a source has changed since the plan was made, or is gone; or ``piece`` is not a piece.
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
        raise FormatError(
            f"{INVALID_PIECE}: unknown operation {show(operation)}, expected one of {', '.join(_FUNCTIONS)}"
        )
    return _FUNCTIONS[operation](piece, threads, storage_options)


def __dir__() -> list[str]:
    return __all__
