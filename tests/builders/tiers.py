"""The instruction sets of the kernels."""

from builders.inside import ffi, lib


def tier_name(tier):
    """Such as "avx2"."""
    return ffi.string(lib.sl_tier_name(tier)).decode("ascii")


def available_tiers():
    """Those of this processor and this build, best first."""
    return [tier for tier in reversed(range(lib.SL_TIER_COUNT)) if lib.sl_tier_available(tier)]
