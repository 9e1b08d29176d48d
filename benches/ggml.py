"""ggml's compiled reference, out of the pywhispercpp wheel."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import util
from pathlib import Path

import numpy as np
import pytest


@cache
def library() -> ctypes.CDLL:
    """libggml-base, or a skip that says what is missing."""
    spec = util.find_spec("pywhispercpp")
    if spec is None or spec.origin is None:
        pytest.skip("pywhispercpp, whose wheel holds ggml, is not installed")
    for path in sorted(Path(spec.origin).parent.parent.glob("pywhispercpp.libs/libggml-base*")):
        return ctypes.CDLL(str(path))
    pytest.skip("the pywhispercpp wheel of this platform holds no libggml-base")


def convert_row(name: str, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """``ggml_bf16_to_fp32_row`` and its like."""
    function = getattr(library(), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    function(source.ctypes.data, target.ctypes.data, source.size)
    return target
