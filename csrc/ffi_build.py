"""Builds the extension module safeload._core: sl_api.h is the cdef, the other files of this folder the source."""

import os
import sys
import sysconfig
from pathlib import Path

import cffi

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# Per compiler. -ffp-contract=off: a fused multiply-add would make the bits depend on the machine. No -march: the
# same binary runs everywhere, faster instructions are chosen at run time.
GCC_FLAGS = ["-O2", "-std=c11", "-fvisibility=hidden", "-ffp-contract=off"]
MSVC_FLAGS = ["/O2", "/std:c11", "/fp:precise", "/utf-8"]


def _environment_flags() -> tuple[list[str], list[str]]:
    """Extra compile and link flags for CI: SAFELOAD_WERROR=1, SAFELOAD_SANITIZE=address,undefined."""
    compile_flags: list[str] = []
    link_flags: list[str] = []
    if os.environ.get("SAFELOAD_WERROR") == "1":
        # cffi's generated wrappers have parameters they do not use and casts that -Wconversion dislikes; our own
        # files are compiled with more warnings by .ci/run.
        compile_flags += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    sanitizers = os.environ.get("SAFELOAD_SANITIZE")
    if sanitizers:
        # -g1: reports name lines; what else -g writes takes GCC three times as long, and -O2 twice as long as -O1.
        flags = ["-O1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]
        compile_flags += flags
        link_flags += flags
    return compile_flags, link_flags


def make_ffi() -> cffi.FFI:
    """The builder that setup.py hands to cffi. Sources are relative to the project root, as setuptools wants."""
    ffi = cffi.FFI()
    ffi.cdef((HERE / "sl_api.h").read_text(encoding="utf-8"))
    flags = MSVC_FLAGS if sys.platform == "win32" and "GCC" not in sys.version else GCC_FLAGS
    compile_flags, link_flags = _environment_flags()
    # The stable ABI covers the interpreters with a GIL from 3.10 on; free-threaded ones have none yet (PEP 703).
    limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
    ffi.set_source(
        "safeload._core",
        '#include "safeload.h"',
        sources=[path.relative_to(ROOT).as_posix() for path in sorted(HERE.rglob("*.c"))],
        depends=[path.relative_to(ROOT).as_posix() for path in sorted(HERE.rglob("*.h"))],
        include_dirs=["csrc"],
        extra_compile_args=flags + compile_flags,
        extra_link_args=link_flags,
        # On Windows both kinds of interpreter share pyconfig.h, which therefore does not define Py_GIL_DISABLED.
        define_macros=[("Py_LIMITED_API", "0x030A0000") if limited else ("Py_GIL_DISABLED", "1")],
        py_limited_api=limited,
    )
    return ffi


ffibuilder = make_ffi()
