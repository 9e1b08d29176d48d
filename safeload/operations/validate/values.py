"""Check values: NaN and infinity, range, constant matrices, scales of quantized tensors, tied heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array, index_of
from ...base.packing import Packed
from ...base.showing import figure
from ...base.text import show
from ...engine.codes.quantized_tensor import PartRows, QuantizedTensor
from ...engine.codes.source import Source, source_pieces
from ...engine.read.tensors import packed_of
from ...errors import exported
from ...packed.gptq import wrapped_zeros, zeros_disagree
from ..measure.stats import HISTOGRAM_EDGES, TensorStats, measure
from ..sources.catalog import Catalog, TensorDescription
from .findings import Finding, find
from .structure import Descriptions

# A value is an outlier if it is above this, the largest float16, and far above the 99.9th percentile of the tensor's
# magnitudes without zeros. Smaller tensors are not judged.
OUTLIER_ABOVE = 65504.0
_OUTLIER_FACTOR, _OUTLIER_PERMILLE, _OUTLIER_COUNT = 1e4, 999, 1000
# Default range of weights, and default absolute value of norm weights.
_LOW, _HIGH, _NORM = -128.0, 128.0, 4096.0

# Numbers to compare at a time.
_CHUNK = 1 << 20

# Largest relative difference between a float32 scale and the expected one: two roundings.
_SCALE_TOLERANCE = 2.0**-22

# Last name parts of norm weights, and words that mark a norm like the suffix "norm". Source: transformers, torch and
# llama.cpp.
_NORM_WEIGHTS = ("weight", "gamma", "scale", "g")
_NORM_WORDS = {"ln", "rms"}

# Roles of the parts of packed tensors to check.
_SCALES = (packing.SCALE, packing.NESTED, packing.GLOBAL, packing.BIAS)
# Families with negative scales: MLX, and the formats that auto-round writes. For symmetric codes, the lowest code has
# the largest magnitude and stands for the value with the largest magnitude (auto_round/data_type/int.py).
_SIGNED = ("mlx", "gptq", "awq", "int", "int8")


@exported()
class Limits(NamedTuple):
    """Limits for values.

    Attributes:
        low: smaller values are a warning.
        high: larger values are a warning.
        parameters: expected number of elements in all tensors; None accepts any.
        scale: expected scale of int8 tensors: a number, or numbers by name; None accepts any.
        absmax: largest absolute value before quantization to int8, so that scale is absmax / 127: a number, or numbers
            by name; None accepts any.
        norm: largest absolute value of norm weights. None means ``low`` and ``high`` if you set these, else 4096,
            because norm weights reach hundreds in good models (Gemma).

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> report = safeload.check(np.float32([0.5, 3]), limits=safeload.Limits(low=-1, high=1))
        >>> [warning.code for warning in report.warnings]
        ['value.range']
    """

    low: float = _LOW
    high: float = _HIGH
    parameters: int | None = None
    scale: float | Mapping[str, float] | None = None
    absmax: float | Mapping[str, float] | None = None
    norm: float | None = None

    @classmethod
    def of(cls, value: Any) -> Limits:
        """Return limits from None, (low, high), a dict of fields, or limits."""
        if value is None:
            return cls()
        if isinstance(value, Limits):
            return value
        if isinstance(value, Mapping):
            unknown = sorted(set(value) - set(cls._fields))
            if unknown:
                raise ValueError(f"limits: unknown key {show(unknown[0])}, expected {', '.join(cls._fields)}")
            limits = cls(**value)
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
            limits = cls(*value)
        else:
            raise TypeError(f"limits must be (low, high) or a dict of {', '.join(cls._fields)}, got {show(value)}")
        if not limits.low <= limits.high:
            raise ValueError(f"limits: low must be <= high, got {limits.low} and {limits.high}")
        if limits.norm is not None and not limits.norm >= 0:
            raise ValueError(f"limits: norm must be >= 0, got {limits.norm}")
        return limits


def is_norm(name: str, about: TensorDescription, role: str | None) -> bool:
    """True for norm weights, by the role in the schema or else by name."""
    if role is not None or len(about.shape) > 1:
        return role == "norm"
    module, _, last = name.rpartition(".")
    norm = (module.rpartition(".")[2] if last in _NORM_WEIGHTS else last).lower().rstrip("0123456789")
    return norm.endswith("norm") or not _NORM_WORDS.isdisjoint(norm.split("_"))


def check_values(
    stats: Mapping[str, TensorStats],
    tensors: Descriptions,
    limits: Limits,
    *,
    skip: Collection[str],  # tensors with bad scales
    role: Callable[[str], str | None],  # of a tensor in the schema
    codes: Collection[str],  # parts of quantized weights, which can have any finite value
    zero: Collection[str],  # tensors already reported as zero
    outliers: Mapping[str, float],  # see `find_outliers`
) -> Iterator[Finding]:
    """Find NaN, infinity and outliers (errors), values out of range and constant matrices (warnings)."""
    low, high, norm = limits.low, limits.high, limits.norm
    if norm is None and (low, high) == (_LOW, _HIGH):
        norm = _NORM
    usual, of_norms = (low, high), (low, high) if norm is None else (-norm, norm)
    for name, values in stats.items():
        about = tensors[name]
        if name in skip or not is_real(about):
            continue
        for rule, bad, first in (
            ("value.nan", values.nan, values.first_nan),
            ("value.inf", values.inf, values.first_inf),
        ):
            if bad:
                at = "" if first is None else f", the first at {list(first)}"
                yield find(rule, name, bad=bad, count=values.count, are="is" if bad == 1 else "are", at=at)
        if values.count == 0 or math.isnan(values.min) or name in codes or name in zero:
            continue
        low, high = of_norms if is_norm(name, about, role(name)) else usual
        if name in outliers:
            yield find("value.outlier", name, absmax=figure(values.absmax, 6), bound=figure(outliers[name], 6))
        elif values.min < low or values.max > high:
            smallest, largest = figure(values.min, 6), figure(values.max, 6)
            yield find("value.range", name, min=smallest, max=largest, low=low, high=high)
        if sum(size > 1 for size in about.shape) > 1 and values.nan + values.inf == 0 and values.min == values.max:
            rule = "value.zero" if values.absmax == 0 else "value.constant"
            yield find(rule, name, count=values.count, value=figure(values.min, 6))


def is_real(about: TensorDescription) -> bool:
    """True if the values of a tensor are real numbers, dequantized ones included."""
    return about.floating or about.quantized


# ---- outliers ----


def find_outliers(catalog: Catalog, names: Sequence[str], threads: int | None = None) -> dict[str, float]:
    """Return the tensors with an outlier, each with a bound that 99.9 % of its magnitudes stay below."""
    bounds = {}
    for name, counted in measure(catalog, names, histogram=True, threads=threads).items():
        histogram = counted.histogram
        assert histogram is not None
        count = int(histogram.sum())
        if count < _OUTLIER_COUNT:
            continue
        allowed = count - -(-count * _OUTLIER_PERMILLE // 1000)  # values beyond the percentile
        limit = counted.absmax / _OUTLIER_FACTOR
        first = int(np.searchsorted(HISTOGRAM_EDGES, limit, side="right")) - 1  # the bin of the limit
        bins = len(histogram)
        if first >= 0 and int(histogram[min(first, bins - 1) :].sum()) <= allowed:
            beyond = np.cumsum(histogram[::-1])[::-1]
            edge = int((beyond > allowed).sum())  # the smallest with at most `allowed` larger values
            # A power of two, or the largest magnitude that is not an outlier divided by 10,000.
            bounds[name] = min(float(HISTOGRAM_EDGES[edge]), limit)
        elif int(histogram[min(first + 1, bins) :].sum()) <= allowed:
            array = catalog.array(name, threads).reshape(-1)
            beyond_limit = 0
            for at in range(0, array.size, _CHUNK):
                magnitudes = np.abs(array[at : at + _CHUNK].astype(np.float64))
                beyond_limit += int(((magnitudes >= limit) & np.isfinite(magnitudes)).sum())
            if beyond_limit <= allowed:
                bounds[name] = limit
    return bounds


# ---- quantized tensors ----


def check_scales(catalog: Catalog, name: str, limits: Limits, threads: int | None = None) -> Iterator[Finding]:
    """Find bad scales of a quantized or packed tensor. For tensors in files, only scales and blocks are read."""
    about, place = catalog.about(name), catalog.place(name)
    packed = None if place.file is None else packed_of(place.file, place.number)
    names: Mapping[str, str]
    parts: Mapping[str, Array]
    if packed is not None:
        names = packed.names(name)
        parts = {role: PartRows(packed.parts[role]).whole() for role in _SCALES if role in packed.parts}
    else:
        value = catalog.value(name, threads)
        assert isinstance(value, QuantizedTensor)
        restoring = value.restoring()  # with the owner of the memory of its parts
        if restoring is None:  # blocks with their scales inside
            row = dtypes.BLOCK_TYPES[value.scheme]
            blocks = np.ascontiguousarray(value.data).reshape(-1, row.block_bytes)
            of_blocks = dtypes.block_scales(row, blocks) if blocks.size else None
            bad = np.zeros(0, bool) if of_blocks is None else ~np.isfinite(of_blocks).all(axis=1)
            if of_blocks is not None and bad.any():
                block = int(bad.argmax())
                first = f"block {block} with {', '.join(map(str, of_blocks[block]))}"
                yield _bad_scales(name, bad, "blocks have a scale that is not finite", first)
            return
        packed, names = restoring[0], value.names
        parts = value.roles if about.packed or value.scale is None else {packing.SCALE: value.scale}
    if about.packed:
        yield from _check_packed(name, packed, names, parts)
        return
    scales: Array = np.atleast_1d(np.asarray(parts[packing.SCALE], np.float64))
    bad = ~np.isfinite(scales) | (scales < 0)
    if bad.any():
        at = int(bad.argmax())
        where = "" if about.axis is None else f" {at} of axis {about.axis}"
        yield find("quantization.scale:int8", name, where=where, scale=scales[at])
        return
    for limit, factor, origin in ((limits.scale, 1.0, ""), (limits.absmax, 1 / 127, " (absmax / 127)")):
        number: Any = limit.get(name) if isinstance(limit, Mapping) else limit
        if number is None:
            continue
        expected = float(number) * factor
        off = np.abs(scales - expected) > _SCALE_TOLERANCE * abs(expected)
        if off.any():
            scale = scales[int(off.argmax())]
            yield find("quantization.scale:limit", name, scale=scale, expected=expected, origin=origin)


def _bad_scales(name: str, bad: Array, fault: str, first: str) -> Finding:
    return find("quantization.scale", name, bad=int(bad.sum()), total=bad.size, fault=fault, first=first)


def _check_packed(name: str, packed: Packed, names: Mapping[str, str], parts: Mapping[str, Array]) -> Iterator[Finding]:
    """Find bad scales: not finite, or negative in a family without negative scales; and zero points of 0.

    For a zero point of 0, AutoGPTQ stores -1, with an overflow into the rest of the word.
    """
    for role in _SCALES:
        array = parts.get(role)
        if array is None or array.size == 0:
            continue
        if array.dtype == np.uint8:
            if packed.packing.scale_dtype is None:
                continue
            array = array.view(dtypes.element_dtype(dtypes.BY_CODE[packed.packing.scale_dtype].number))
        scales = array.astype(np.float32)
        bad = ~np.isfinite(scales)
        if role != packing.BIAS and packed.packing.family not in _SIGNED:
            bad |= scales < 0
        if bad.any():
            at = [int(k) for k in np.argwhere(bad)[0]]
            fault = f"values of {show(names[role])} are not finite numbers >= 0"
            yield _bad_scales(name, bad, fault, f"{scales[tuple(at)]:g} at {at}")
    count = wrapped_zeros(packed)
    if count:
        yield find("quantization.zero", name, zeros=f"{count:,} zero {'point is' if count == 1 else 'points are'}")
    if zeros_disagree(packed):
        yield find("quantization.zero:format", name)


# ---- tied head ----


def check_tied(catalog: Catalog, head: str, embedding: str) -> Finding | None:
    """Return a finding if a head differs from the embedding that the config ties it to."""
    abouts = [catalog.about(name) for name in (head, embedding)]
    if any(about.quantized or (about.element is not None and about.element.packed) for about in abouts):
        return None
    a, b = catalog.source(head), catalog.source(embedding)
    if not (isinstance(a, Source) and isinstance(b, Source)) or a.row is not b.row or a.shape != b.shape:
        return None
    begin = 0
    for pieces in zip(source_pieces(a), source_pieces(b), strict=True):
        x, y = (np.frombuffer(piece, np.uint8) for piece in pieces)
        unequal = x != y
        if unequal.any():
            element = (begin + int(unequal.argmax())) // a.row.block_bytes
            index = list(index_of(element, a.shape))
            return find("head.tied", head, embedding=show(embedding), index=index)
        begin += x.size
    return None
