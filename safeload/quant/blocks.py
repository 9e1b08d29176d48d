"""The numbers in ggml's block types, and how far rounding to their codes moves a value.

Sources: ggml-common.h (layouts), ggml-quants.c (rounding).
"""

from __future__ import annotations

from typing import NamedTuple

from ..core.packing import BIAS

INTEGER, E2M1, NUMBERS = "integer", "e2m1", "numbers"  # codes are integers, 4-bit floats, or places in a table
MIDDLE = "middle"  # the middle code stands for 0


class BlockType(NamedTuple):
    """A block type of ggml."""

    codes: str  # such as `INTEGER`
    bits: float  # per code
    zero: str  # `MIDDLE` or `BIAS`
    scale: str  # code of the dtype of scales
    columns: int  # that share a scale, or scales that are rounded together
    # The largest error of a rounded value, relative to the largest magnitude of these columns, or to their range with a
    # `BIAS`: half a step, or a whole one where the writer clips or rounds scales.
    error: float

    @property
    def plain(self) -> bool:
        """True if a block is its scales and then 32 codes, in bytes or nibbles."""
        return self.columns == 32 and self.codes != NUMBERS and self.bits in (4, 8)


BLOCKS = {
    "q4_0": BlockType(INTEGER, 4, MIDDLE, "F16", 32, 1 / 8),
    "q5_0": BlockType(INTEGER, 5, MIDDLE, "F16", 32, 1 / 16),
    "q8_0": BlockType(INTEGER, 8, MIDDLE, "F16", 32, 0.5 / 127),
    "q4_1": BlockType(INTEGER, 4, BIAS, "F16", 32, 0.5 / 15),
    "q5_1": BlockType(INTEGER, 5, BIAS, "F16", 32, 0.5 / 31),
    "q2_k": BlockType(INTEGER, 2, BIAS, "F16", 256, 1 / 3),
    "q3_k": BlockType(INTEGER, 3, MIDDLE, "F16", 256, 1 / 4),
    "q4_k": BlockType(INTEGER, 4, BIAS, "F16", 256, 1 / 15),
    "q5_k": BlockType(INTEGER, 5, BIAS, "F16", 256, 1 / 31),
    "q6_k": BlockType(INTEGER, 6, MIDDLE, "F16", 256, 1 / 32),
    "iq4_nl": BlockType(NUMBERS, 4, MIDDLE, "F16", 32, 24 / 127),
    "iq4_xs": BlockType(NUMBERS, 4, MIDDLE, "F16", 256, 24 / 127),
    "tq1_0": BlockType(INTEGER, 1.6, MIDDLE, "F16", 256, 0.5),
    "tq2_0": BlockType(INTEGER, 2, MIDDLE, "F16", 256, 0.5),
    "mxfp4": BlockType(E2M1, 4, MIDDLE, "F8_E8M0", 32, 1 / 3),
    "nvfp4": BlockType(E2M1, 4, MIDDLE, "F8_E4M3", 16, 0.2),
}
