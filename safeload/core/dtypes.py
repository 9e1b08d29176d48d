"""The dtypes of weight files and their NumPy names. The table itself is in csrc/kernels/dtype.c."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import SafeloadError
from .native import ffi, lib
from .text import error_about, nearest, show


class Dtype(NamedTuple):
    """A row of the dtype table."""

    number: int  # identifies the row in the C core
    code: str  # the spelling of safetensors or ggml: "BF16", "Q4_0"
    name: str  # the spelling of numpy, ml_dtypes, torch and ggml: "bfloat16", "q4_0"
    kind: int  # kind of the elements, such as ``lib.SL_KIND_FLOAT``
    bits: int  # size of an element, 0 for block types; elements below 8 bits share bytes, the first in the low bits
    block: int  # smallest number of elements in whole bytes: 32 for "Q4_0", 2 for "F4", 1 for most dtypes
    block_bytes: int  # size of a block
    swap: int  # bytes of the numbers in a byte swap: half of a complex number; 1 if there is nothing to swap
    ggml: int  # number in enum ggml_type, or -1
    scale_at: int  # byte of a block at which its float16 scales begin
    scale_count: int  # float16 scales per block; 0 if the scales have another type or are scattered (IQ1_M)

    @property
    def floating(self) -> bool:
        """Whether elements are real floating-point numbers."""
        return bool(self.kind == lib.SL_KIND_FLOAT)

    @property
    def complex(self) -> bool:
        """Whether elements are complex numbers."""
        return bool(self.kind == lib.SL_KIND_COMPLEX)

    @property
    def packed(self) -> bool:
        """Whether elements share bytes, so that arrays show raw uint8."""
        return 0 < self.bits < 8

    @property
    def blocked(self) -> bool:
        """Whether rows consist of blocks with shared scales; such tensors load as `QuantizedTensor`."""
        return bool(self.kind == lib.SL_KIND_BLOCKS)

    def converts_to(self, other: Dtype) -> bool:
        """Return True if elements of this dtype can become ``other`` in the C core, or are ``other`` already."""
        return self is other or bool(lib.sl_convertible(self.number, other.number))

    def loaded_as(self, target: Dtype | None) -> Dtype:
        """Return the dtype after loading with ``dtype=target``: only floats and blocks are converted."""
        return target if target is not None and (self.floating or self.blocked) else self

    def nbytes(self, count: int) -> int:
        """Return the size of ``count`` elements, which must be a multiple of `block`."""
        return count // self.block * self.block_bytes


def _row(number: int) -> Dtype | None:
    info = lib.sl_dtype_get(number)
    if info == ffi.NULL:
        return None
    code, name = (ffi.string(text).decode() for text in (info.code, info.name))
    return Dtype(number, code, name, *(getattr(info, field) for field in Dtype._fields[3:]))


# Element types, indexed by number: the dtypes of safetensors, then C128.
TABLE = tuple(row for row in map(_row, range(lib.SL_DTYPE_COUNT)) if row is not None)
SAFETENSORS = TABLE[: lib.SL_SAFETENSORS_COUNT]
BY_CODE = {row.code: row for row in TABLE}
F32, F64 = BY_CODE["F32"], BY_CODE["F64"]
BY_NAME = {row.name: row for row in TABLE}
# GGUF's block types, by lower-case name.
BLOCK_TYPES = {row.name: row for row in map(_row, range(lib.SL_GGML, lib.SL_DTYPE_LIMIT)) if row is not None}
# Bytes of a ggml type unknown to this version.
_UNKNOWN = _row(lib.SL_UNKNOWN)
assert _UNKNOWN is not None  # the C core always has this row
BY_NUMBER = {row.number: row for row in (*TABLE, *BLOCK_TYPES.values(), _UNKNOWN)}
# Dtypes that can hold codes: numbers without a meaning until a scale, from another tensor, is applied. F8_E8M0 holds
# powers of two, so it is a dtype of scales and never of codes.
FLOAT_CODES = frozenset(row.code for row in TABLE if row.floating and row.bits <= 8) - {"F8_E8M0"}
INTEGER_CODES = frozenset(("I8", "U8", "I16", "I32", "U32"))
_STORED = frozenset(row.number for row in SAFETENSORS if not row.packed)
_NOT_PACKED = bytes(row.number for row in BY_NUMBER.values() if not row.packed)
_NO_CODES = bytes(row.number for row in BY_NUMBER.values() if row.code not in FLOAT_CODES | INTEGER_CODES)


def may_hold_codes(numbers: bytes) -> bool:
    """Return whether any of the numbered dtypes can hold codes."""
    return bool(numbers.translate(None, _NO_CODES))


def holds_packed(numbers: bytes) -> bool:
    """Return whether elements of any of the numbered dtypes share bytes."""
    return bool(numbers.translate(None, _NOT_PACKED))


@cache
def of_number(number: int) -> Dtype:
    """Return the row of a number; it can be a row only for quantizing jobs, such as ``SL_Q4_0_ABSMAX``."""
    row = _row(number)
    assert row is not None
    return row


@cache
def array_dtype(number: int) -> np.dtype[Any]:
    """Return the dtype of arrays over a tensor of row ``number``: uint8 if it is packed or blocked."""
    row = BY_NUMBER[number]
    return np.dtype(np.uint8) if row.packed or row.blocked else element_dtype(number)


def array_dtypes(numbers: bytes) -> list[np.dtype[Any]]:
    """Return `array_dtype` of each number."""
    if numbers and numbers.count(numbers[0]) == len(numbers):
        return [array_dtype(numbers[0])] * len(numbers)
    return list(map(array_dtype, numbers))


@cache
def element_dtype(number: int) -> np.dtype[Any]:
    """Return the dtype of single elements of row ``number``; ml_dtypes stores a packed element in a byte."""
    row = TABLE[number]
    with suppress(TypeError):
        return np.dtype(row.name)
    import ml_dtypes  # only if numpy lacks the dtype

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, row.name))
    return dtype


# Common alternative spellings, in any case. Numpy's own names take precedence: "f4" and "f8" have 4 and 8 bytes there.
_ALIASES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "half": "float16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


def parse(dtype: Any, among: Sequence[Dtype] = TABLE) -> Dtype:
    """Return the row for a dtype."""
    if isinstance(dtype, str) and (row := BY_CODE.get(dtype) or BY_NAME.get(dtype)) is not None:
        return row
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError):  # text with a comma is parsed as a record
        name = None
    row = BY_NAME.get(name) if name is not None else None
    if row is None and (isinstance(dtype, str) or type(dtype).__module__ == "torch"):
        row = _named(str(dtype))
    if row is None:
        raise TypeError(f"unknown dtype {show(dtype)}{_nearest(dtype, among)}")
    return row


def _named(text: str) -> Dtype | None:
    name = text.lower().removeprefix("torch.")
    return BY_NAME.get(_ALIASES.get(name, name))


def is_name(text: str) -> bool:
    """Return whether ``text`` is the name of a dtype."""
    return _named(text) is not None


def _nearest(dtype: Any, among: Sequence[Dtype]) -> str:
    """Return the end of the message for an unknown dtype: a suggestion, or the list of dtypes."""
    text = dtype.lower() if isinstance(dtype, str) else ""
    scheme = BLOCK_TYPES.get(text)
    if scheme is not None:
        written = BY_CODE["F32"].converts_to(scheme)
        return f": it is a quantization scheme{', see safeload.load_quantized' if written else ''}"
    names = [row.name for row in among]
    meant = [name for name in names if text and name.startswith(text)] or nearest(text, names)
    return f": did you mean {' or '.join(map(repr, meant))}?" if meant else f", expected one of {', '.join(names)}"


def of_array(array: Any, name: str) -> Dtype:
    """Return the row that stores this array."""
    row = row_of(array.dtype)
    if row is None or row.number not in _STORED:
        raise not_stored(shown(array.dtype), name)
    return row


@lru_cache(maxsize=256)  # bounded, because a program can create any number of dtypes
def row_of(dtype: np.dtype[Any]) -> Dtype | None:
    """Return the row with the name of a NumPy dtype, or None. Cached because NumPy computes a name on each access."""
    return BY_NAME.get(dtype.name)


@lru_cache(maxsize=256)
def shown(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype; for text its code "<U2", because numpy does not accept its own name "str64"."""
    return str(dtype.str if dtype.kind in "SU" else dtype.name)


def not_stored(dtype: str, name: str) -> SafeloadError:
    """Return the error for a tensor if safetensors does not have its dtype."""
    supported = ", ".join(row.name for row in SAFETENSORS if not row.packed)
    hint = "; NumPy files hold complex128" if dtype == "complex128" else ""
    text = f": dtype {show(dtype)} cannot be saved; supported dtypes are {supported}{hint}"
    return error_about(SafeloadError, text, tensor=name)


def array_shape(row: Dtype, shape: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    """Return the shape of the array over a tensor of logical ``shape``.

    The last axis of packed and blocked dtypes counts bytes if each row fills whole bytes, or if there are no rows;
    otherwise the array is 1-D. Other dtypes keep their shape.
    """
    if not (row.packed or row.blocked):
        return shape
    if shape and (shape[-1] % row.block == 0 or 0 in shape[:-1]):
        return (*shape[:-1], row.nbytes(shape[-1] + -shape[-1] % row.block))
    return (nbytes,)


def block_scales(row: Dtype, blocks: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]] | None:
    """Return the float16 scales of blocks, [blocks, scales], or None if the scales have another type."""
    if row.code == "IQ1_M":  # the high nibble of each of the last four words holds a nibble of the scale
        nibbles = np.ascontiguousarray(blocks[:, -8:]).view("<u2") >> 12 << np.array([0, 4, 8, 12], np.uint16)
        return np.bitwise_or.reduce(nibbles, axis=1, keepdims=True).view(np.float16)
    if row.scale_count == 0:
        return None
    return np.ascontiguousarray(blocks[:, row.scale_at : row.scale_at + 2 * row.scale_count]).view("<f2")
