"""ggml's own quantizers, compiled for this machine in pywhispercpp's wheel."""

import ctypes
import importlib.util
from pathlib import Path

import numpy as np

BLOCK_BYTES = {"q4_0": 18, "q8_0": 34, "q4_1": 20, "q5_0": 22, "q5_1": 24}


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


def make_blocks(library, scheme, x, block_bytes):
    """Blocks that ggml makes of f32, as uint8; for types that it makes without an importance matrix."""
    x = np.ascontiguousarray(x, np.float32)
    size = {"nvfp4": 64, "iq4_xs": 256, "tq1_0": 256, "tq2_0": 256}.get(scheme, 256 if scheme.endswith("_k") else 32)
    out = np.empty((x.size // size, block_bytes), np.uint8)
    name = scheme.upper().replace("Q", "q", 1) if scheme.endswith("_k") else scheme
    convert_row(library, f"quantize_row_{name}_ref", x, out)
    return out


def dequantize(library, scheme, blocks, count, out=None):
    """What ggml restores from blocks: f32, into ``out`` where it is given."""
    name = scheme.upper().replace("Q", "q", 1) if scheme.endswith("_k") else scheme
    if out is None:
        out = np.empty(count, np.float32)
    function = getattr(library, f"dequantize_row_{name}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    function(np.ascontiguousarray(blocks).ctypes.data, out.ctypes.data, count)
    return out


def by_definition(bits, blocks):
    """The values of Q1_0 and Q2_0, which gguf-py 0.19 and the reference lack: ggml's dequantize_row_q1_0 and _q2_0."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    codes = blocks[:, 2:, None] >> np.arange(0, 8, bits, np.uint8) & (2**bits - 1)
    steps = codes.reshape(len(blocks), -1).astype(np.float32)
    return (d * (2 * steps - 1 if bits == 1 else steps - 1)).ravel()
