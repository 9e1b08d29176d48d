"""Numbers of GGUF metadata. They remember their stored type, which a copy of a file preserves.

GGUF has ten types of numbers, Python has two, and readers are strict: llama.cpp refuses a layer count unless it
is a u32. Numbers are therefore read as subclasses of `int` and `float`, one per type. They behave like plain numbers.
"""

from __future__ import annotations

import numpy as np

from ...base.native import lib


class U8(int):
    """Stored as u8."""


class I8(int):
    """Stored as i8."""


class U16(int):
    """Stored as u16."""


class I16(int):
    """Stored as i16."""


class U32(int):
    """Stored as u32."""


class I32(int):
    """Stored as i32."""


class U64(int):
    """Stored as u64."""


class I64(int):
    """Stored as i64."""


class F32(float):
    """Stored as f32."""


class F64(float):
    """Stored as f64."""


# Classes of numbers and dtypes of arrays by type in GGUF. Bools are plain `bool`.
NUMBERS: dict[int, type[int] | type[float]] = {
    lib.SL_GGUF_U8: U8,
    lib.SL_GGUF_I8: I8,
    lib.SL_GGUF_U16: U16,
    lib.SL_GGUF_I16: I16,
    lib.SL_GGUF_U32: U32,
    lib.SL_GGUF_I32: I32,
    lib.SL_GGUF_F32: F32,
    lib.SL_GGUF_U64: U64,
    lib.SL_GGUF_I64: I64,
    lib.SL_GGUF_F64: F64,
}
DTYPES: dict[int, np.dtype[np.generic]] = {
    lib.SL_GGUF_U8: np.dtype("<u1"),
    lib.SL_GGUF_I8: np.dtype("<i1"),
    lib.SL_GGUF_U16: np.dtype("<u2"),
    lib.SL_GGUF_I16: np.dtype("<i2"),
    lib.SL_GGUF_U32: np.dtype("<u4"),
    lib.SL_GGUF_I32: np.dtype("<i4"),
    lib.SL_GGUF_F32: np.dtype("<f4"),
    lib.SL_GGUF_BOOL: np.dtype("?"),
    lib.SL_GGUF_U64: np.dtype("<u8"),
    lib.SL_GGUF_I64: np.dtype("<i8"),
    lib.SL_GGUF_F64: np.dtype("<f8"),
}
