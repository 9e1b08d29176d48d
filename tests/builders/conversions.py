"""The ways to run one conversion to a folder: they must leave the same files."""

import json
from concurrent.futures import ThreadPoolExecutor

import safeload


def at_once(src, dst, **options):
    safeload.convert(src, dst, **options)


def resumed(src, dst, **options):
    safeload.convert(src, dst, resume=True, **options)


def on_an_executor(src, dst, **options):
    with ThreadPoolExecutor(2) as pool:
        safeload.convert(src, dst, executor=pool, **options)


def planned(src, dst, **options):
    plan = safeload.plan_convert(src, dst, **options)
    safeload.finalize(json.loads(json.dumps(plan)), map(safeload.run_piece, plan.pieces))
