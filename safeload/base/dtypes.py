"""The dtypes of weight files and their names in numpy. The table itself is csrc/kernels/dtype.c."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import SafeloadError
from .messages import error_about
from .native import ffi, lib
from .text import nearest, show


class Dtype(NamedTuple):
    """One row of the table.

    Attributes:
        number: identifies it in the C core.
        code: as safetensors or ggml writes it: "BF16", "Q4_0".
        name: as numpy, ml_dtypes, torch and ggml name it: "bfloat16", "q4_0".
        kind: kind of the elements: ``lib.SL_KIND_FLOAT`` and the like.
        bits: size of one element, 0 for block types. Elements below 8 bits share bytes, first element in the low bits.
        block: the fewest elements that fill whole bytes: 32 for "Q4_0", 2 for "F4", 1 for most.
        block_bytes: size of one block in bytes.
        swap: size in bytes of the numbers that a byte swap reverses: 4 for "C64", whose halves are numbers; 1 if there
            is nothing to swap.
        ggml: its number in enum ggml_type; -1 if it has none.
        scale_at: byte of a block where its float16 scales begin.
        scale_count: number of float16 scales of a block; 0 where they have another type or are in pieces (IQ1_M).
    """

    number: int
    code: str
    name: str
    kind: int
    bits: int
    block: int
    block_bytes: int
    swap: int
    ggml: int
    scale_at: int
    scale_count: int

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
        """Whether rows are divided into blocks whose elements share scales; such tensors are `QuantizedTensor`."""
        return bool(self.kind == lib.SL_KIND_BLOCKS)

    def converts_to(self, other: Dtype) -> bool:
        """Return True if elements of this dtype can become ``other`` in the C core, or are ``other`` already."""
        return self is other or bool(lib.sl_convertible(self.number, other.number))

    def loaded_as(self, target: Dtype | None) -> Dtype:
        """Return the dtype after loading with ``dtype=target``: only floats and blocks are converted."""
        return target if target is not None and (self.floating or self.blocked) else self

    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` elements, a multiple of `block`."""
        return count // self.block * self.block_bytes


def _row(number: int) -> Dtype | None:
    info = lib.sl_dtype_get(number)
    if info == ffi.NULL:
        return None
    code, name = (ffi.string(text).decode() for text in (info.code, info.name))
    return Dtype(number, code, name, *(getattr(info, field) for field in Dtype._fields[3:]))


# Element types, indexed by number: those of safetensors.
TABLE = tuple(row for row in map(_row, range(lib.SL_DTYPE_COUNT)) if row is not None)
BY_CODE = {row.code: row for row in TABLE}
BY_NAME = {row.name: row for row in TABLE}
# Block types of GGUF, by lower-case name.
BLOCK_TYPES = {row.name: row for row in map(_row, range(lib.SL_GGML, lib.SL_DTYPE_LIMIT)) if row is not None}
# Bytes of a ggml type that this version does not know.
_UNKNOWN = _row(lib.SL_UNKNOWN)
assert _UNKNOWN is not None  # the C core has it
BY_NUMBER = {row.number: row for row in (*TABLE, *BLOCK_TYPES.values(), _UNKNOWN)}
# Dtypes that may store codes: numbers that mean nothing without a scale, which is another tensor. F8_E8M0 holds powers
# of two: it is a dtype of scales, never of codes.
FLOAT_CODES = frozenset(row.code for row in TABLE if row.floating and row.bits <= 8) - {"F8_E8M0"}
INTEGER_CODES = frozenset(("I8", "U8", "I16", "I32", "U32"))
_NOT_PACKED = bytes(row.number for row in BY_NUMBER.values() if not row.packed)
_NO_CODES = bytes(row.number for row in BY_NUMBER.values() if row.code not in FLOAT_CODES | INTEGER_CODES)


def may_hold_codes(numbers: bytes) -> bool:
    """Whether any of the dtypes with these numbers may store codes."""
    return bool(numbers.translate(None, _NO_CODES))


def holds_packed(numbers: bytes) -> bool:
    """Whether any of the dtypes with these numbers has elements that share bytes."""
    return bool(numbers.translate(None, _NOT_PACKED))


@cache
def of_number(number: int) -> Dtype:
    """The row of a number, which may be one that jobs only quantize to, such as ``SL_Q4_0_ABSMAX``."""
    row = _row(number)
    assert row is not None
    return row


@cache
def array_dtype(number: int) -> np.dtype[Any]:
    """The dtype of arrays that show a tensor of row ``number``: uint8 for packed and blocked ones."""
    row = BY_NUMBER[number]
    return np.dtype(np.uint8) if row.packed or row.blocked else element_dtype(number)


def array_dtypes(numbers: bytes) -> list[np.dtype[Any]]:
    """`array_dtype` of each of these numbers."""
    if numbers and numbers.count(numbers[0]) == len(numbers):
        return [array_dtype(numbers[0])] * len(numbers)
    return list(map(array_dtype, numbers))


@cache
def element_dtype(number: int) -> np.dtype[Any]:
    """The dtype of single elements of row ``number``; ml_dtypes stores packed ones in one byte each."""
    row = TABLE[number]
    with suppress(TypeError):
        return np.dtype(row.name)
    import ml_dtypes  # only for dtypes that numpy does not have

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, row.name))
    return found


# What people also type, in any case. Numpy's own names come first: "f4" and "f8" have 4 and 8 bytes there.
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
    """The row for a dtype.

    Args:
        dtype: type or dtype of numpy, ml_dtypes, torch or JAX; name ("float32", "bf16", "torch.float16") in any case;
            safetensors code ("F32").
        among: the rows that the caller supports, for the message.

    Raises:
        TypeError: an unknown dtype; the message names the nearest one.
    """
    if isinstance(dtype, str) and (found := BY_CODE.get(dtype) or BY_NAME.get(dtype)) is not None:
        return found
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
    """Whether a text is the name of a dtype."""
    return _named(text) is not None


def _nearest(dtype: Any, among: Sequence[Dtype]) -> str:
    """The end of the message for an unknown dtype: what was meant, or what there is."""
    text = dtype.lower() if isinstance(dtype, str) else ""
    scheme = BLOCK_TYPES.get(text)
    if scheme is not None:
        written = BY_CODE["F32"].converts_to(scheme)
        return f": it is a quantization scheme{', see safeload.load_quantized' if written else ''}"
    names = [row.name for row in among]
    meant = [name for name in names if text and name.startswith(text)] or nearest(text, names)
    return f": did you mean {' or '.join(map(repr, meant))}?" if meant else f", expected one of {', '.join(names)}"


def of_array(array: Any, name: str) -> Dtype:
    """The row of the dtype that stores this array.

    Raises:
        SafeloadError: safetensors does not have the array's dtype.
    """
    row = _stored_row(array.dtype)
    if row is None:
        raise not_stored(shown(array.dtype), name)
    return row


@lru_cache(maxsize=256)  # a program may make dtypes without end
def _stored_row(dtype: np.dtype[Any]) -> Dtype | None:
    """The row of a dtype of arrays that safetensors has; None for others. numpy computes a name on each access."""
    row = BY_NAME.get(dtype.name)
    return None if row is None or row.packed else row


def shown(dtype: np.dtype[Any]) -> str:
    """The name of a dtype; of text its code, "<U2": numpy's name for that, "str64", is not one that numpy takes."""
    return str(dtype.str if dtype.kind in "SU" else dtype.name)


def not_stored(dtype: str, name: str) -> SafeloadError:
    """The error for a tensor whose dtype safetensors does not have."""
    supported = ", ".join(row.name for row in TABLE if not row.packed)
    text = f": dtype {show(dtype)} cannot be saved. Supported dtypes: {supported}"
    return error_about(SafeloadError, text, tensor=name)


def array_shape(row: Dtype, shape: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    """Shape of the array that shows a tensor of logical ``shape``.

    The same shape, except for packed and blocked dtypes: their last axis counts bytes if each row fills whole bytes;
    otherwise the array is 1-D.
    """
    if not (row.packed or row.blocked):
        return shape
    if shape and shape[-1] % row.block == 0:
        return (*shape[:-1], row.nbytes(shape[-1]))
    return (nbytes,)


def block_scales(row: Dtype, blocks: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]] | None:
    """The float16 scales of blocks of a block type, [blocks, scales]; None where scales have another type.

    Args:
        row: the block type.
        blocks: their bytes, [blocks, block_bytes].
    """
    if row.code == "IQ1_M":  # a nibble of its scale is above those of runs in each of the last four words
        nibbles = np.ascontiguousarray(blocks[:, -8:]).view("<u2") >> 12 << np.array([0, 4, 8, 12], np.uint16)
        return np.bitwise_or.reduce(nibbles, axis=1, keepdims=True).view(np.float16)
    if row.scale_count == 0:
        return None
    return np.ascontiguousarray(blocks[:, row.scale_at : row.scale_at + 2 * row.scale_count]).view("<f2")
