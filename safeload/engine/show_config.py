"""Print what a bug report should contain: versions, instruction set, threads and compiler."""

from __future__ import annotations

import platform

import numpy

from .._version import __version__
from ..base.native import TIER, available_tiers, ffi, lib, tier_name
from .run.threads import available_cpus


def show_config() -> None:
    """Print versions, the instruction set in use, the number of threads and the compiler.

    Example:
        >>> import safeload
        >>> safeload.show_config()
        safeload         ...
        python           CPython ...
        numpy            ...
        instruction set  ...
        threads          ...
        compiler         ...
    """
    alternatives = ", ".join(tier_name(tier) for tier in available_tiers() if tier != TIER)
    instructions = f"{tier_name(TIER)} (SAFELOAD_ISA can be {alternatives})" if alternatives else tier_name(TIER)
    rows = {
        "safeload": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}",
        "numpy": numpy.__version__,
        "instruction set": instructions,
        "threads": f"{available_cpus()} at most (SAFELOAD_NUM_THREADS)",
        "compiler": str(ffi.string(lib.sl_compiler()), "utf-8"),
    }
    for name, value in rows.items():
        print(f"{name:16} {value}")
