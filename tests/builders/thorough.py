"""How much of what could go on for ever is tried: a part in each run, all of it in tests/long.sh."""

import os
from itertools import cycle, product

THOROUGH = os.environ.get("SAFELOAD_FULL_SWEEP") == "1"


def examples(most: int) -> int:
    """The number of random examples for hypothesis, or of random seeds."""
    return most if THOROUGH else most // 4


def part_of(values: list, k: int, parts: int) -> list:
    """The k-th part of what is tried at one of many places, dealt out one by one; all of it when there is time."""
    return values if THOROUGH else values[k % parts :: parts]


def dealt(values: list, among: list) -> list[tuple]:
    """Each value with one of ``among``, which take turns; with all of them when there is time."""
    return [*product(values, among)] if THOROUGH else [*zip(values, cycle(among), strict=False)]
