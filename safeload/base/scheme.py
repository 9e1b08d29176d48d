"""The quantization schemes: one row for each that can be written, and the dtype of each that can be read.

csrc/kernels/dtype.c describes their block layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .dtypes import BLOCK_TYPES, BY_CODE, Dtype, is_name
from .native import lib
from .text import nearest, show


class Scheme(NamedTuple):
    """One scheme.

    Attributes:
        name: as in ``quantize=`` and `QuantizedTensor.scheme`.
        dtype: of the stored data: blocks hold their scales; the scales of int8 are stored separately.
        roundings: values of ``rounding=``, each with its number in the C core; the first is the default.
        instead: the scheme of smaller blocks that matrices of a checkpoint get whose rows are not whole blocks of this.
    """

    name: str
    dtype: Dtype
    roundings: Mapping[str, int]
    instead: str | None = None

    @property
    def block(self) -> int:
        """Elements of a row that share a scale in the stored bytes; 1 where scales are stored separately."""
        return self.dtype.block

    @property
    def bits(self) -> float:
        """Bits per element, with its share of the scales of its block."""
        return 8 * self.dtype.block_bytes / self.dtype.block

    def of_rows(self, length: int) -> str | None:
        """The scheme for rows of this many elements: this one, the one instead, or None if neither has whole blocks."""
        if length % self.block == 0:
            return self.name
        return None if self.instead is None else SCHEMES[self.instead].of_rows(length)

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


def _blocks(name: str, instead: str | None = None, **roundings: int) -> Scheme:
    return Scheme(name, BLOCK_TYPES[name], roundings, instead)


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
        # Those instead are llama.cpp's: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp
        _blocks("q4_k", instead="q5_0", ggml=lib.SL_Q4_K),
        _blocks("q5_k", instead="q5_1", ggml=lib.SL_Q5_K),
        _blocks("q6_k", instead="q8_0", ggml=lib.SL_Q6_K),
    )
}
# Of the stored data of every scheme, those that are only read included.
_ROWS = {INT8: BY_CODE["I8"], **BLOCK_TYPES}
ROUNDINGS = tuple(dict.fromkeys(rounding for row in SCHEMES.values() for rounding in row.roundings))


def row_of(scheme: str) -> Dtype:
    """The dtype of the stored data of a scheme, which may be one that is only read.

    Raises:
        ValueError: the scheme is unknown.
    """
    row = _ROWS.get(scheme)
    if row is None:
        raise ValueError(f"unknown scheme {show(scheme)}, expected one of {', '.join(_ROWS)}")
    return row


def parse(scheme: object) -> str:
    """The name of a scheme that can be written, in lower case.

    Args:
        scheme: its name in any case.

    Raises:
        ValueError: an unknown scheme, or one that is only read.
    """
    name = scheme.lower() if isinstance(scheme, str) else ""
    if name in SCHEMES:
        return name
    can = ", ".join(SCHEMES)
    # llama.cpp calls mixtures of schemes "Q4_K_M": S, M and L are their sizes.
    of_mixture = name[:-2] if name.endswith(("_s", "_m", "_l")) else name
    if of_mixture in SCHEMES:
        raise ValueError(
            f"scheme {show(scheme)} is a mixture of llama.cpp: {of_mixture!r} quantizes all matrices alike, and a dict "
            "has a scheme for each pattern of names"
        )
    row = _ROWS.get(name) or _ROWS.get(of_mixture)
    if row is not None:
        raise ValueError(f"scheme {show(scheme)}: {row.code} is read only; can be written: {can}")
    if is_name(name):
        raise ValueError(f"unknown scheme {show(scheme)}: it is a dtype, for dtype= of safeload.load and convert")
    meant = nearest(name, SCHEMES)
    raise ValueError(
        f"unknown scheme {show(scheme)}" + (f": did you mean {meant[0]!r}?" if meant else f", expected one of {can}")
    )


def usual_axis(scheme: str, shape: tuple[int, ...]) -> int | None:
    """The axis of per-axis scales unless another is asked for: int8 of 3 axes has a scale for each matrix."""
    return 0 if scheme == INT8 and len(shape) == 3 else None
