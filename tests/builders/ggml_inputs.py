"""Rows for quantizers and their importance, with equal bits everywhere, and ggml's `ggml_quantize_chunk`."""

import ctypes

import numpy as np

from .llama_quantize import noise

ROWS, COLUMNS = 5, 1280
COUNT = ROWS * COLUMNS
# Numbers of ggml's types.
TYPES = {
    "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10, "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14,
    "iq4_nl": 20, "iq4_xs": 23, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39, "nvfp4": 40,
}  # fmt: skip


def _by_run(seed, low, high, run=32):
    """Powers of two between 2^low and 2^high, one for each run."""
    exponents = np.floor((noise(COUNT // run, seed) + 2) / 4 * (high - low) + low)
    return np.ldexp(1.0, exponents.astype(np.int64)).repeat(run)


def _kinds():
    normal = noise(COUNT, 1)
    yield "normal", normal * 0.02
    yield "uniform", np.remainder(noise(COUNT, 2) * 64, 1.0) - 0.3
    yield "constant", noise(COUNT // 64, 3).repeat(64)
    yield "zero", np.zeros(COUNT)
    # Below 2^-120 ggml gives MXFP4 a NaN as exponent, which it refuses itself.
    yield "tiny", normal * _by_run(4, -60, -48, 16)
    yield "denormal", normal * _by_run(4, -149, -130)
    yield "huge", normal * 10_000
    yield "outlier", np.where(np.arange(COUNT) % 997 == 5, 300.0, normal * 0.01)
    yield "bf16", (normal.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    yield "heavy tails", normal * np.abs(noise(COUNT, 5)) ** 5 * 8
    yield "alternating signs", np.abs(normal) * np.where(np.arange(COUNT) % 2, 1, -1)
    yield "sparse", np.where(np.remainder(np.arange(COUNT) * 7, 11) == 0, normal, 0.0)
    yield "near powers of two", _by_run(6, -20, 10, 1) * (1 - np.remainder(np.arange(COUNT), 100) * 2.0**-24)


KINDS = {name: np.ascontiguousarray(values, np.float32).reshape(ROWS, COLUMNS) for name, values in _kinds()}
IMPORTANCE = {
    "none": None,
    "squares": np.square(noise(COLUMNS, 7)).astype(np.float32) * np.float32(1000),
    "some zeros": np.where(np.arange(COLUMNS) % 3 == 0, 0, np.abs(noise(COLUMNS, 8))).astype(np.float32),
    "zeros": np.zeros(COLUMNS, np.float32),
}


def cases():
    """Type, kind and importance of each case."""
    for scheme in TYPES:
        for kind in KINDS:
            if (scheme, kind) != ("mxfp4", "denormal"):
                for importance in IMPORTANCE:
                    yield scheme, kind, importance


def load(path):
    """ggml's library at a path."""
    library = ctypes.CDLL(str(path))
    library.ggml_quantize_chunk.restype = library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    return library


def quantize(library, scheme, x, importance):
    """The bytes of ``ggml_quantize_chunk``."""
    number = TYPES[scheme]
    out = np.empty((len(x), library.ggml_row_size(number, x.shape[1])), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    library.ggml_quantize_chunk(number, x.ctypes.data, out.ctypes.data, 0, *x.shape, weights)
    return out
