"""How much of what could go on for ever is tried: a part in each run, all of it in tests/long.sh."""

import os
from collections.abc import Iterable, Sequence
from itertools import cycle, product

THOROUGH = os.environ.get("SAFELOAD_FULL_SWEEP") == "1"


def examples(most: int) -> int:
    """The number of random examples for hypothesis, or of random seeds."""
    return most if THOROUGH else most // 4


def part_of(values: Sequence, k: int, parts: int) -> Sequence:
    """The k-th part of what is tried at one of many places, dealt out one by one; all of it when there is time."""
    return values if THOROUGH else values[k % parts :: parts]


def dealt(values: Iterable, among: Iterable) -> list[tuple]:
    """Each value with one of ``among``, which take turns; with all of them when there is time."""
    return [*product(values, among)] if THOROUGH else [*zip(values, cycle(among), strict=False)]
