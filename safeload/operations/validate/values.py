"""Checks of values: NaN and infinity, range, constant matrices, scales of quantized tensors, tied heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.layout import figure
from ...base.packing import Packed, Packing
from ...base.scheme import INT8
from ...base.text import show
from ...engine.codes.pieces import source_pieces
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.restore import read_array
from ...engine.codes.source import Source
from ...engine.read.tensors import packed_of
from ...packed.gptq import wrapped_zeros, zeros_disagree
from ..measure.stats import TensorStats
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from .findings import Finding, Limits, error, note, warning

# Largest relative difference between a float32 scale and the expected one: two roundings.
_SCALE_TOLERANCE = 2.0**-22


# Last parts of the names of norm weights, and words that mark a norm like a word that ends in "norm". Source:
# transformers, torch and llama.cpp.
_NORM_WEIGHTS = ("weight", "gamma", "scale", "g")
_NORM_WORDS = {"ln", "rms"}


def is_norm(name: str, known: TensorDescription, role: str | None) -> bool:
    """Whether a tensor holds the weights of a norm, by its role in the schema or else by its name."""
    if role is not None or len(known.shape) > 1:
        return role == "norm"
    module, _, last = name.rpartition(".")
    norm = (module.rpartition(".")[2] if last in _NORM_WEIGHTS else last).lower().rstrip("0123456789")
    return norm.endswith("norm") or not _NORM_WORDS.isdisjoint(norm.split("_"))


def check_values(
    stats: Mapping[str, TensorStats],
    tensors: Mapping[str, TensorDescription],
    limits: Limits,
    skip: Collection[str],
    *,
    role: Callable[[str], str | None] = lambda name: None,
    codes: Collection[str] = (),
    zero: Collection[str] = (),
) -> Iterator[Finding]:
    """NaN and infinity as errors; values out of range and matrices of a single value as warnings.

    Args:
        stats: statistics of the tensors.
        tensors: descriptions of the tensors.
        limits: the range.
        skip: names to skip, since their scales are bad.
        role: gives the role of a tensor in the schema; None if it is unknown.
        codes: parts of quantized weights: any finite value is good there.
        zero: tensors already reported as zero.
    """
    for name, found in stats.items():
        known = tensors[name]
        if name in skip or not (known.floating or known.quantized):
            continue
        for code, what, count, first in (
            ("value.nan", "NaN", found.nan, found.first_nan),
            ("value.inf", "infinite", found.inf, found.first_inf),
        ):
            if count:
                of = f"{count:,} of {found.count:,} values {'is' if count == 1 else 'are'} {what}"
                yield error(code, name, of + (f", the first at {list(first)}" if first is not None else ""))
        if found.count == 0 or math.isnan(found.min) or name in codes or name in zero:
            continue
        low, high = limits.of_norms() if is_norm(name, known, role(name)) else (limits.low, limits.high)
        if found.min < low or found.max > high:
            reach = f"values reach from {figure(found.min, 6)} to {figure(found.max, 6)}"
            yield warning("value.range", name, f"{reach}, outside [{low:g}, {high:g}]")
        if sum(size > 1 for size in known.shape) > 1 and found.nan + found.inf == 0 and found.min == found.max:
            what, code = ("0", "value.zero") if found.absmax == 0 else (figure(found.min, 6), "value.constant")
            yield warning(code, name, f"all {found.count:,} values of the matrix are {what}")


# ---- quantized tensors ----


def check_scales(catalog: Catalog, name: str, limits: Limits, threads: int | None = None) -> Iterator[Finding]:
    """Scales that are not finite, or not the expected ones. Of a file only the scales are read, and blocks.

    Args:
        catalog: has the tensor.
        name: of a quantized or packed tensor.
        limits: what is expected of int8.
        threads: for reading; None: chosen automatically.

    Raises:
        FormatError, OSError: the file cannot be read.
    """
    about, place = catalog.about(name), catalog.place(name)
    packed = None if place.file is None else packed_of(place.file, place.number)
    if packed is not None:
        scales = {role: read_array(packed.parts[role]) for role in _SCALES if role in packed.parts}
        if about.packed:
            yield from _check_packed(name, packed.packing, packed.names(name), scales)
            yield from _check_zeros(name, packed)
        else:
            yield from _check_int8(name, scales[packing.SCALE], about.axis, limits)
        return
    value = catalog.value(name, threads)
    assert isinstance(value, QuantizedTensor)
    if value.packing is not None:
        yield from _check_packed(name, value.packing, value.names, value.roles)
        in_memory = value.restoring()
        assert in_memory is not None
        yield from _check_zeros(name, in_memory[0])
    elif value.scheme == INT8:
        assert value.scale is not None
        yield from _check_int8(name, value.scale, value.axis, limits)
    else:
        yield from _check_blocks(name, value)


# Roles of the parts of a packed tensor that are checked.
_SCALES = (packing.SCALE, packing.NESTED, packing.GLOBAL, packing.BIAS)
# Families whose scales may be negative: MLX's, and what auto-round stores as any of the others: of symmetric codes the
# least, which has the largest magnitude, stands for the value that has (auto_round/data_type/int.py).
_SIGNED = ("mlx", "gptq", "awq", "int")


def _check_blocks(name: str, value: QuantizedTensor) -> Iterator[Finding]:
    row = dtypes.BLOCK_TYPES[value.scheme]
    if value.data.size == 0:
        return
    blocks = np.ascontiguousarray(value.data).reshape(-1, row.block_bytes)
    scales = dtypes.block_scales(row, blocks)
    if scales is None:
        return
    bad = ~np.isfinite(scales).all(axis=1)
    if bad.any():
        block = int(bad.argmax())
        shown = ", ".join(str(scale) for scale in scales[block])
        of = f"{int(bad.sum()):,} of {len(blocks):,} blocks have a scale that is not finite"
        yield error("quantization.scale", name, f"{of}, the first is block {block} with {shown}")


def _check_packed(
    name: str, packed: Packing, names: Mapping[str, str], parts: Mapping[str, Array]
) -> Iterator[Finding]:
    """Scales that no writer of the family stores: not finite, or negative."""
    for role in _SCALES:
        array = parts.get(role)
        if array is None or array.size == 0:
            continue
        stored = names[role]
        if array.dtype == np.uint8:
            if packed.scale_dtype is None:
                continue
            array = array.view(dtypes.element_dtype(dtypes.BY_CODE[packed.scale_dtype].number))
        scales = array.astype(np.float32)
        bad = ~np.isfinite(scales)
        if role != packing.BIAS and packed.family not in _SIGNED:
            bad |= scales < 0
        if bad.any():
            at = [int(k) for k in np.argwhere(bad)[0]]
            of = f"{int(bad.sum()):,} of {bad.size:,} values of {show(stored)} are not finite numbers of at least 0"
            yield error("quantization.scale", name, f"{of}, the first is {scales[tuple(at)]:g} at {at}")


def _check_zeros(name: str, packed: Packed) -> Iterator[Finding]:
    """Zero points that AutoGPTQ stores with an overflow into the rest of their word."""
    count = wrapped_zeros(packed)
    if count:
        of = f"{count:,} zero {'point is' if count == 1 else 'points are'} 0, stored as -1"
        yield warning("quantization.zero", name, f"{of}: AutoGPTQ then damages the others of the same word")
    if zeros_disagree(packed):
        yield note(
            "quantization.zero", name, "its zero points are not stored as the configuration says, but understood"
        )


def _check_int8(name: str, stored: Array, axis: int | None, limits: Limits) -> Iterator[Finding]:
    scales: Array = np.atleast_1d(np.asarray(stored, np.float64))
    bad = ~np.isfinite(scales) | (scales < 0)
    if bad.any():
        first = int(bad.argmax())
        where = "" if axis is None else f" {first} of axis {axis}"
        yield error(
            "quantization.scale", name, f"scale{where} is {scales[first]:g}, expected a finite number of at least 0"
        )
        return
    for what, given, factor in (("scale", limits.scale, 1.0), ("absmax / 127", limits.absmax, 1 / 127)):
        expected: Any = given.get(name) if isinstance(given, Mapping) else given
        if expected is None:
            continue
        wanted = float(expected) * factor
        off = np.abs(scales - wanted) > _SCALE_TOLERANCE * abs(wanted)
        if off.any():
            first = int(off.argmax())
            yield error("quantization.scale", name, f"scale is {scales[first]:.9g}, but {what} is {wanted:.9g}")


# ---- tied head ----


def check_tied(catalog: Catalog, head: str, embedding: str) -> Finding | None:
    """The finding about a head that the config ties to an embedding, and that has other values in the file.

    Raises:
        FormatError, OSError: a file cannot be read.
    """
    one, other = _source(catalog, head), _source(catalog, embedding)
    if one is None or other is None or one.row is not other.row or one.shape != other.shape:
        return None
    at = 0
    for a, b in zip(source_pieces(one), source_pieces(other), strict=True):
        if a != b:
            differ = int((np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)).argmax()) + at
            element = differ // one.row.block_bytes
            index = [int(k) for k in np.unravel_index(element, one.shape)]
            message = f"differs from {show(embedding)} from {index} on, but the config ties the two"
            return warning("head.tied", head, message)
        at += len(a)
    return None


def _source(catalog: Catalog, name: str) -> Source | None:
    """A tensor as a source; None if it is quantized or packed."""
    about = catalog.about(name)
    if about.quantized or (about.element is not None and about.element.packed):
        return None
    found = catalog.source(name)
    return found if isinstance(found, Source) else None
