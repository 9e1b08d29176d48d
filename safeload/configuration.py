"""What this installation of safeload is made of."""

from __future__ import annotations

import platform

import numpy as np

from ._version import __version__
from .base.native import TIER, available_tiers, ffi, lib, tier_name
from .engine import jobs


def show_config() -> None:
    """Prints versions, the instruction set in use, threads and the compiler."""
    others = ", ".join(tier_name(tier) for tier in available_tiers() if tier != TIER)
    rows = {
        "safeload": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}",
        "numpy": np.__version__,
        "instruction set": f"{tier_name(TIER)} (SAFELOAD_ISA takes also {others})" if others else tier_name(TIER),
        "threads": f"{jobs.available_cpus()} at most (SAFELOAD_NUM_THREADS)",
        "compiler": str(ffi.string(lib.sl_compiler()), "utf-8"),
    }
    for name, value in rows.items():
        print(f"{name:16} {value}")
