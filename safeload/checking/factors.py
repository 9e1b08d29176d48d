"""Factors that a writer moved between tensors, which change their values but not what a model computes.

AWQ and SmoothQuant multiply columns of the matrices that read a norm, and divide the norm by these factors; AWQ also
multiplies rows of a matrix and divides the columns of the matrix that reads its outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from ..core.arrays import Array
from ..core.names import grouped, layer_of

# Codes of 4 bits change factors by a few percent, and those of columns with small values by more: the greatest distance
# of a product of factors from 1, of all but a few columns; of their median; and of each column in the clearest matrix.
_NEAR, _MIDDLE, _CLEAR = 0.3, 0.05, 0.35
_MOST = 0.97  # share of the columns
_LEFT = 0.75  # greatest part of factors that products leave; damage of a few rows is left whole
# Modules that write to the residual stream, so their columns read no norm.
_WRITERS = re.compile(r"(^|\.)(o_proj|out_proj|down_proj|dense|dense_4h_to_h|c_proj|wo|w2|fc2|fc_out|out)(\.|$)")
# Norms of a module's output, which no matrix reads. If the feed-forward has such a norm, so has the attention.
_OF_WRITTEN = re.compile(r"\.post_(feedforward|mlp|self_attn)_layernorm\.")
_OF_ATTENTION = ".post_attention_layernorm."


class Factors(NamedTuple):
    """Factors of the columns and rows of a tensor; a vector has columns alone."""

    columns: Array
    rows: Array | None = None
    shifted: Array | None = None  # of 1 + each value of a vector, as norms of Gemma use it


def factors_of(a: Array, b: Array, explains: Callable[[Array], bool]) -> Factors | None:
    """Return factors that make a matrix of the source the result, as far as a format ``explains``; None without any."""
    rows: Array = np.ones(len(a), np.float32)
    columns: Array = np.ones(a.shape[1], np.float32)
    with np.errstate(all="ignore"):
        if len(a) == 1:
            columns, shifted = b[0] / a[0], (1 + b[0]) / (1 + a[0])
            return Factors(columns, shifted=shifted) if _is_valid(columns) or _is_valid(shifted) else None
        for _ in range(3):  # least squares of one side after the other
            scaled = a * rows[:, None]
            columns = (scaled * b).sum(axis=0) / np.square(scaled).sum(axis=0)
            scaled = a * columns
            rows = (scaled * b).sum(axis=1) / np.square(scaled).sum(axis=1)
        middle = np.median(rows)  # a common factor belongs to the columns
        rows, columns = rows / middle, columns * middle
        if not (_is_valid(rows) and _is_valid(columns)):
            return None
        for candidate in (Factors(columns), Factors(columns, rows)):
            scaled = a * candidate.columns
            if explains(scaled if candidate.rows is None else scaled * candidate.rows[:, None]):
                return candidate
    return None


def undone(found: Mapping[str, Factors], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Find tensors with factors that another tensor of the layer undoes, given the shapes of all tensors."""
    layers = grouped(shapes, layer_of)
    return {name for layer in {*map(layer_of, found)} - {""} for name in _undone(layers[layer], found, shapes)}


def _undone(names: Collection[str], found: Mapping[str, Factors], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Find the tensors of a layer with factors that another of its tensors undoes."""
    vectors, matrices = ([name for name in names if len(shapes[name]) == axes] for axes in (1, 2))
    sandwich = any(".post_feedforward_layernorm." in name for name in vectors)
    read_norms = [name for name in vectors if not _OF_WRITTEN.search(name) and not (sandwich and _OF_ATTENTION in name)]
    norms: dict[str, Array] = {}
    for size, shifted in product({shapes[name] for name in vectors if name in found}, (False, True)):
        ours = [name for name in read_norms if shapes[name] == size and name.endswith("weight")]
        used = {name: found[name].shifted if shifted else found[name].columns for name in ours if name in found}
        changed = {name: factors for name, factors in used.items() if factors is not None and _is_valid(factors)}
        # Each matrix that can read one of these norms undoes it, or reads a norm that did not change.
        readers = [name for name in matrices if shapes[name][1:] == size and not _WRITERS.search(name)]
        read = {name: {norm for norm, each in changed.items() if _undoes(found, name, each)} for name in readers}
        alone = [name for name in readers if not read[name]]
        clear = {
            norm
            for name, theirs in read.items()
            for norm in theirs
            if (np.abs(found[name].columns * changed[norm] - 1) < _CLEAR).all()
        }
        if clear == changed.keys() and (not alone or len(changed) < len(ours)):
            norms |= changed
    rows = {name: own.rows for name in matrices if (own := found.get(name)) is not None and own.rows is not None}
    taken = {name for name, each in rows.items() if any(_undoes(found, other, each, in_all=True) for other in matrices)}
    good = {name for name in found.keys() & taken if _is_one(found[name].columns)}
    for name in found.keys() & {*matrices}:
        if name in taken or name not in rows:
            by_norm = any(_undoes(found, name, each) for each in norms.values())
            if by_norm or any(_undoes(found, name, rows[other], in_all=True) for other in taken):
                good.add(name)
    biases = [*norms.values(), *(rows[name] for name in good & taken)]  # are multiplied as norms and rows are
    for name in found.keys() & {*vectors}:
        columns = found[name].columns
        good |= {name for each in biases if len(columns) == len(each) and _is_one(columns / each)}
    return good | norms.keys()


def _undoes(found: Mapping[str, Factors], name: str, factors: Array, *, in_all: bool = False) -> bool:
    """Return True if the columns of a matrix are divided by these factors, up to a number that its rows can have."""
    own = found.get(name)
    if own is None or len(own.columns) != len(factors):
        return False
    products = own.columns * factors
    if in_all or own.rows is not None:
        products /= np.median(products)
    left, before = (np.log(each / np.median(each)) for each in (products, factors))
    return _is_one(products) and bool(np.linalg.norm(left) < _LEFT * np.linalg.norm(before))


def _is_valid(factors: Array) -> bool:
    return bool(np.isfinite(factors).all() and (factors > 0).all())


def _is_one(values: Array) -> bool:
    return bool(np.quantile(np.abs(values - 1), _MOST) < _NEAR and abs(np.median(values) - 1) < _MIDDLE)
