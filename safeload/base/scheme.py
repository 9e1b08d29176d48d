"""The quantization schemes that can be written, one row each. csrc/kernels/dtype.c describes their block layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .dtypes import BLOCK_TYPES, BY_CODE, Dtype
from .native import lib
from .text import show


class Scheme(NamedTuple):
    """One scheme.

    Attributes:
        name: as in ``quantize=`` and `QuantizedTensor.scheme`.
        dtype: of the stored data: blocks hold their scales; the scales of int8 are stored separately.
        roundings: values of ``rounding=``, each with its number in the C core; the first is the default.
    """

    name: str
    dtype: Dtype
    roundings: Mapping[str, int]

    @property
    def block(self) -> int:
        """Elements of a row that share a scale in the stored bytes; 1 where scales are stored separately."""
        return self.dtype.block

    @property
    def bits(self) -> float:
        """Bits per element, with its share of the scales of its block."""
        return 8 * self.dtype.block_bytes / self.dtype.block

    @property
    def in_gguf(self) -> bool:
        """Whether GGUF holds tensors of this scheme."""
        return self.dtype.blocked and self.dtype.ggml >= 0

    def target(self, rounding: str | None) -> int:
        """The number of the dtype that a job quantizes to with this rounding.

        Raises:
            ValueError: an unknown rounding, or one that this scheme does not have.
        """
        if rounding is not None and rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {show(rounding)}, expected one of {', '.join(ROUNDINGS)}")
        if not self.roundings:
            return self.dtype.number
        if rounding is not None and rounding not in self.roundings:
            own = ", ".join(self.roundings)
            raise ValueError(f"rounding {show(rounding)} is not one of {self.name}, which has {own}")
        return self.roundings[rounding or next(iter(self.roundings))]


def _blocks(name: str, **roundings: int) -> Scheme:
    return Scheme(name, BLOCK_TYPES[name], roundings)


INT8 = "int8"
SCHEMES = {
    row.name: row
    for row in (
        Scheme(INT8, BY_CODE["I8"], {}),
        _blocks("q4_0", absmax=lib.SL_Q4_0_ABSMAX, ggml=lib.SL_Q4_0),
        _blocks("q8_0", absmax=lib.SL_Q8_0, ggml=lib.SL_Q8_0),  # the same: ggml's own scale is absmax / 127
        _blocks("q4_1", ggml=lib.SL_Q4_1),
        _blocks("q5_0", ggml=lib.SL_Q5_0),
        _blocks("q5_1", ggml=lib.SL_Q5_1),
    )
}
ROUNDINGS = tuple(dict.fromkeys(rounding for row in SCHEMES.values() for rounding in row.roundings))
