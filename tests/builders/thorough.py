"""How much of what could go on for ever is tried: a part in each run, all of it in tests/long.sh."""

import os

THOROUGH = os.environ.get("SAFELOAD_FULL_SWEEP") == "1"


def examples(most: int) -> int:
    """The number of random examples for hypothesis."""
    return most if THOROUGH else most // 4
