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

from .operations.convert.resume import Plan, finalize, plan_convert
from .operations.pieces import run_piece

__all__ = ["Plan", "finalize", "plan_convert", "run_piece"]


def __dir__() -> list[str]:
    return __all__
