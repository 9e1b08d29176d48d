"""ggml's own quantizers, compiled for this machine in pywhispercpp's wheel."""

import ctypes
import importlib.util
from pathlib import Path

import numpy as np

BLOCK_BYTES = {"q4_0": 18, "q8_0": 34}


def load():
    """The library with ggml's reference functions, or None where there is no such wheel."""
    found = importlib.util.find_spec("pywhispercpp")
    if found is None or found.origin is None:
        return None
    site = Path(found.origin).parent.parent
    for folder in (site / "pywhispercpp.libs", site / "pywhispercpp" / ".dylibs", site / ".dylibs", site):
        for path in sorted(folder.glob("*ggml-base*")):
            library = ctypes.CDLL(str(path))
            if hasattr(library, "quantize_row_q4_0_ref") and hasattr(library, "quantize_row_q8_0_ref"):
                return library
    return None


def quantize(library, scheme, x, out=None):
    """Blocks as ggml writes them: uint8 [blocks, bytes of a block]; ``out`` is such an array to fill."""
    x = np.ascontiguousarray(x, np.float32)
    if out is None:
        out = np.empty((x.size // 32, BLOCK_BYTES[scheme]), np.uint8)
    function = getattr(library, f"quantize_row_{scheme}_ref")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    function(x.ctypes.data, out.ctypes.data, x.size)
    return out


def convert_row(library, name, source, target):
    """``ggml_bf16_to_fp32_row`` and its like, into ``target``."""
    function = getattr(library, name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    function(source.ctypes.data, target.ctypes.data, source.size)
    return target
