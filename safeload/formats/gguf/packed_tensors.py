"""Packed tensors as GGUF files hold them: blocks with a scale beside them, or behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...base import packing
from ...base.arrays import Array
from ...base.text import show
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.read.lazy import Lazy, LazyPacked, LazyQuantized, materialize
from ...errors import SafeloadError, UnsupportedError
from . import file_type

# I2_S of https://github.com/microsoft/BitNet: its number there, and what tells it from the type that ggml had under it.
I2_S, _TAIL = 36, 32
_FILE_TYPE_I2_S = 40


class Ternary(NamedTuple):
    """A tensor of I2_S: its logical shape, and codes with their scale behind them."""

    shape: tuple[int, ...]
    data: Lazy


def parts_of(
    name: Any, value: Any, tensors: Mapping[str, Any], metadata: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """What a file holds of a tensor: a packed one of GGUF becomes its blocks and what scales them, others stay.

    Args:
        name: of the tensor.
        value: the tensor.
        tensors: all of the file.
        metadata: of the file.

    Raises:
        UnsupportedError: readers of the metadata would not expect I2_S.
        SafeloadError: the scale would have the name of another tensor, or no reader would find it.
    """
    means = value.packing if isinstance(value, (LazyPacked, QuantizedTensor)) else None
    if means is None or means.family != packing.GGUF:
        yield name, value
        return
    codes, scale = value.roles[packing.CODES], value.roles[packing.SCALE]
    if means.numbers == "i2_s":
        if metadata.get(file_type.KEY) != _FILE_TYPE_I2_S:
            raise UnsupportedError(
                f"tensor {show(name)} is I2_S of BitNet, which readers know by {file_type.KEY} {_FILE_TYPE_I2_S} in "
                "the metadata: keep that, or pass dtype=",
                tensor=name,
            )
        yield name, Ternary(means.shape, _behind(codes, scale))
        return
    beside = f"{name.removesuffix('.weight')}.scale"
    if not name.endswith(".weight") or beside in tensors:
        why = f"{show(beside)} is another tensor" if beside in tensors else "its name does not end in .weight"
        raise SafeloadError(f"tensor {show(name)}: its scale has no place beside it: {why}", tensor=name)
    yield name, LazyQuantized(means.numbers, means.shape, _lazy(codes))
    yield beside, scale


def _lazy(array: Array | Lazy) -> Lazy:
    if isinstance(array, Lazy):
        return array
    return Lazy(array.dtype, array.shape, lambda: np.ascontiguousarray(array))


def _behind(codes: Array | Lazy, scale: Array | Lazy) -> Lazy:
    """Codes, and behind them their scale in 32 bytes."""
    size = codes.nbytes + _TAIL

    def make() -> Array:
        both: Array = np.zeros(size, np.uint8)
        both[: codes.nbytes] = materialize(codes).ravel()
        both[codes.nbytes : codes.nbytes + 4] = materialize(scale).astype("<f4").reshape(1).view(np.uint8)
        return both

    return Lazy(np.dtype(np.uint8), (size,), make)
