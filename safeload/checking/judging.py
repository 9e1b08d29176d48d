"""Judge differences by what a format explains: rounding to the nearest code, a calibrated writer, or damage.

A writer that rounds to the nearest code errs by half a step, and by one step where it clips the range of a block. The
step follows from the values of the block before quantization:

- b bits around 0: the largest magnitude by 2**(b - 1) - 1; ggml's signed blocks clip the other end of the range.
- b bits from a minimum: the range, with 0 in it, by 2**b - 1. K-quants round the scales of 256 values too, so the block
  is theirs.
- tables of numbers, such as NF4 and E2M1: the widest gap.

Writers that calibrate (GPTQ, AWQ, importance matrices) choose other codes to keep the outputs of a layer: the cosine of
each row judges them, and no block may differ far more than the rest (`_has_lone_block`). Sources: ggml-quants.c, and
the scales in `safeload.quant`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from ..core import dtypes
from ..core.arrays import Array
from ..core.packing import BIAS, INT8, NESTED_RULE
from ..quant.blocks import BLOCKS
from ..quant.codes import bits_of
from .forms import Forms

_F32 = dtypes.BY_CODE["F32"]

# These words begin a judgement, and the format of the side with fewer bits ends it, unless no format explains the
# difference.
EXPECTED, CALIBRATED, DAMAGED, CHANGED = "as expected of", "calibrated", "damaged", "changed"


class _Format(NamedTuple):
    """The error of a format."""

    label: str
    bits: float  # 0 for values that are not rounded, such as integers
    block: int = 0  # elements along a row that share a scale; 0 for the whole row, `_TENSOR` for all rows
    step: float = 0.0  # bound by the largest magnitude of a block; 0 if no bound is known
    ranged: float = 0.0  # bound by the range of a block
    relative: float = 0.0  # bound by the magnitude of the value itself
    nested: float = 0.0  # bound by the largest magnitude of the tensor, if the scales are codes themselves
    calibrates: bool = False  # True if some writers calibrate


# Of tables of numbers, by the beginning of the label or the name of the table.
_TABLES = {"nf4": 0.17, "fp4": 0.22, "e2m1": 0.3, "e2m3": 0.08, "e3m2": 0.15, "mxfp8": 0.13}
_NESTED = 0.9 / 128  # likewise of bitsandbytes' 8-bit codes of scales: 64 lie between 0.1 and 1
# The largest relative error of a float, and of float8 with the smallest magnitude of its scale's range.
_ROUNDING = {"F16": 2.0**-11, "BF16": 2.0**-8, "F32": 2.0**-24, "F64": 0.0}
_FLOAT8 = {"F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3, "F8_E4M3FNUZ": 2.0**-4, "F8_E5M2FNUZ": 2.0**-3}
_AS_COMPUTED = ", computed"
_COMPUTED = 2.0**-21  # of functions such as exp, which libraries round differently
# The least cosine of a row, and of a tensor, with so many bits.
_LEAST = (
    (1.0, 0.3, 0.5),
    (2.0, 0.45, 0.65),
    (3.0, 0.65, 0.82),
    (4.0, 0.85, 0.93),
    (5.0, 0.96, 0.985),
    (8.0, 0.99, 0.998),
)
_INTEGERS = ("unsigned", "signed", "offset", "I8", "U8")
_TENSOR = -1  # a block that is the whole tensor
BLOCK = 128  # largest number of elements in a row that are judged together
# A block is damaged if its relative difference exceeds this, and this many times the usual one. Zeros have 1, another
# sign 2. Simulated GPTQ and AWQ of 4 bits reach 0.8, and 3.4 times the usual, but not both in one block.
_FAR, _LONE = 0.7, 3.0
_SMALL_BLOCK = 1 / 16  # of the usual square of a norm; smaller blocks count as large as this
_LARGER = 1.5  # the largest change of a row's norm by a calibrated writer
_ROWS = 1 << 22  # elements to judge at a time
_SLACK = 2.0**-9  # of the largest magnitude of a block: scales are rounded, and so may be the values


def pair_of(forms: Forms, name: str, threads: int | None) -> Callable[[], tuple[Array, Array]]:
    """Return a function that reads a tensor of both sides once, as matrices."""

    @cache
    def pair() -> tuple[Array, Array]:
        a, b = (catalog.array(name, threads) for catalog in forms.catalogs)
        return (a.reshape(-1, a.shape[-1] if a.ndim else 1), b.reshape(-1, b.shape[-1] if b.ndim else 1))

    return pair


def judged(forms: Forms, name: str, pair: Callable[[], tuple[Array, Array]]) -> str:
    """Judge a tensor, which is read only if its formats differ: "as expected of q4_k"."""
    formats = [_format_of(forms, side, name) for side in (0, 1)]
    coarse = min((0, 1), key=lambda side: (formats[side].bits, -formats[side].relative))
    rule, fine = formats[coarse], formats[1 - coarse]
    label = rule.label
    if fine.label.endswith(_AS_COMPUTED):  # from values that were rounded once more
        rule = rule._replace(relative=rule.relative + fine.relative)
    if label == fine.label or not (rule.bits and fine.bits):
        return CHANGED
    got, true = pair()[coarse], pair()[1 - coarse]
    rows, size = max(1, _ROWS // max(1, got.shape[1])), min(max(rule.block, 0) or BLOCK, BLOCK)
    whole = rule.block == _TENSOR or rule.nested
    ends = (float(true.max(initial=0)), float(true.min(initial=0))) if whole else (0.0, 0.0)
    beyond, sums, least, lone = 0, np.zeros(3), 1.0, False
    starts = np.arange(0, got.shape[1], size)
    for begin in range(0, len(got), rows):
        x, y = (array[begin : begin + rows].astype(np.float32) for array in (true, got))
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return f"{DAMAGED} {label}"
        beyond += int(np.count_nonzero(np.abs(x - y) > _bound(rule, x, ends)))
        xx, yy, dd = (np.add.reduceat(np.square(z), starts, axis=1, dtype=np.float64) for z in (x, y, x - y))
        lone = lone or _has_lone_block(xx, dd)
        norms, norms_of_y, residuals = (blocks.sum(axis=1) for blocks in (xx, yy, dd))
        dots = (norms + norms_of_y - residuals) / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            cosines, sizes = dots / np.sqrt(norms * norms_of_y), np.sqrt(norms_of_y / norms)
        cosines[(norms == 0) & (norms_of_y == 0)] = 1
        cosines[(sizes < 1 / _LARGER) | (sizes > _LARGER)] = -1
        least = min(least, float(np.nan_to_num(cosines, nan=-1.0).min(initial=1.0)))
        sums += dots.sum(), norms.sum(), norms_of_y.sum()
    bounded = bool(rule.step or rule.ranged or rule.relative)
    if bounded and not beyond:
        return f"{EXPECTED} {label}"
    of_row, of_tensor = next(least for bits, *least in reversed(_LEAST) if bits <= max(1.0, rule.bits))
    alike = not lone and least >= of_row and sums[0] >= of_tensor * (sums[1] * sums[2]) ** 0.5
    if alike and not bounded:
        return f"{EXPECTED} {label}"
    return f"{CALIBRATED if alike and rule.calibrates else DAMAGED} {label}"


def _has_lone_block(norms: Array, residuals: Array) -> bool:
    """Return True if a block differs far more than the rest, given squares of norms of blocks and differences."""
    if norms.shape[1] < 3 or not len(norms):
        return False
    floor = np.median(norms, axis=1, keepdims=True) * _SMALL_BLOCK
    shares = residuals / np.maximum(np.maximum(norms, floor), np.finfo(np.float64).tiny)
    usual = np.median(shares, axis=1, keepdims=True)  # calibrated writers spread their errors over a row
    if len(norms) > 2:  # AWQ multiplies columns, so blocks with a large factor differ in every row
        usual = np.maximum(usual, np.median(shares, axis=0, keepdims=True))
    return bool(((shares / _LONE**2 > usual) & (shares > _FAR**2)).any())


def _bound(rule: _Format, values: Array, ends: tuple[float, float]) -> Array:
    """Return the largest error of each value of rows; ``ends`` are the largest and smallest value of the tensor."""
    bound: Array = np.abs(values) * np.float32(rule.relative) + np.float32(2.0**-24 if rule.relative else 0)
    if not (rule.step or rule.ranged):
        return bound
    starts = np.arange(0, values.shape[1], rule.block if rule.block > 0 else max(1, values.shape[1]))
    high, low = (f.reduceat(values, starts, axis=1) for f in (np.maximum, np.minimum))
    if rule.block == _TENSOR:
        high, low = np.full_like(high, ends[0]), np.full_like(low, ends[1])
    each = np.maximum(high, -low) * np.float32(rule.step + _SLACK)
    each += (np.maximum(high, 0) - np.minimum(low, 0)) * np.float32(rule.ranged)
    if rule.nested:
        each += np.float32(max(ends[0], -ends[1]) * rule.nested)
    bound += np.repeat(each, np.diff([*starts, values.shape[1]]), axis=1)
    return bound


def _format_of(forms: Forms, side: int, name: str) -> _Format:
    """Return the error of a tensor's format."""
    catalog, (stored, *_) = forms.stored(side, name)
    about, packed = catalog.about(stored), catalog.packed(stored)
    label = about.scheme or about.code
    if about.scheme is None and forms.computed(side, name):
        return _Format(label + _AS_COMPUTED, _F32.bits, 1, 0, 0, _ROUNDING.get(label, 0.0) + _COMPUTED)
    if about.scheme is None:
        rounding = {**_ROUNDING, **_FLOAT8}.get(label)
        return _Format(label, 0 if rounding is None else about.row.bits, 1, 0, 0, rounding or 0.0)
    if packed is not None and packed.packing.numbers not in BLOCKS:
        numbers, bits, grid = packed.packing.numbers, packed.packing.bits, packed.packing.grid
        block = 0
        if grid is not None:
            down, block = (grid.row_block, grid.column_block)[:: -1 if packed.packing.transpose else 1]
            block = block if down == 1 else _TENSOR
        table = next((gap for key, gap in _TABLES.items() if key == numbers or label.startswith(key)), 0.0)
        if numbers in _FLOAT8:
            return _Format(label, 8, block, table + 2.0**-15, 0, _FLOAT8[numbers] * 1.01)
        if table:
            nested = _NESTED if packed.packing.scale_rule == NESTED_RULE else 0.0
            return _Format(label, bits, block, table, nested=nested, calibrates=label[:3] != "nf4")
        if numbers in _INTEGERS:
            bits = min(bits, bits_of(label))  # 4 bits can be stored in bytes
            coarse = 2.0**-8 if BIAS in packed.parts else 0  # of scales and biases in bfloat16
            return _Format(label, bits, block, 0, 1 / (2**bits - 1) + coarse, calibrates=True)
        return _Format(label, bits, calibrates=True)
    if about.scheme == INT8:
        return _Format(label, 8, 0, 0.5 / 127)
    known = BLOCKS.get(about.scheme)
    if known is not None:
        step, ranged = (0.0, known.error) if known.zero == BIAS else (known.error, 0.0)
        has_imatrix = "quantize.imatrix.file" in forms.catalogs[side].metadata
        return _Format(label, known.bits, known.columns, step, ranged, calibrates=has_imatrix)
    blocks = dtypes.BLOCK_TYPES.get(about.scheme)
    share = 1.0 if blocks is None else 8.0 * blocks.block_bytes / blocks.block
    return _Format(label, min(share, 4.0), calibrates=True)
