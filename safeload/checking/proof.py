"""Compare the result of a conversion with its source: losses, changes, and the cause.

Tensors whose difference no format explains are looked at again: a cause is a simple operation that makes the tensor of
the result from that of the source, or from another tensor of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ..conversion.catalog import Catalog, Given, RestructuredCatalog
from ..conversion.make import merged
from ..core.arrays import Array
from ..core.names import Patterns, grouped, layer_of
from ..core.progress import Progress
from ..core.text import plural
from ..errors import SafeloadError, one_line
from ..models.family import without_numbers
from ..models.schema import language_of
from .diff import DiffReport, compare
from .factors import Factors, factors_of, undone
from .findings import Finding, find
from .forms import Forms
from .judging import BLOCK, CALIBRATED, CHANGED, DAMAGED, EXPECTED, judged, pair_of

_CLOSE = 0.35  # largest relative difference of an operation that explains a tensor; unrelated tensors have 1.4
_ESTIMATED = 0.45  # likewise of estimated factors: codes of 4 bits move rows of outliers by a third
_EXACT = 0.01  # likewise of an addition: bfloat16 rounds by half of it
_MOST_ROWS = 2048  # to find their order
_SAMPLE = 4096  # values by which tensors that changed places are recognized
_MOST_ALIKE = 4096  # damaged tensors of a shape to compare with each other
_KINDS = {"experts": "experts", "layers": "layers", "h": "layers", "blk": "layers", "blocks": "layers"}


def findings_of(
    result: Given,
    source: Given | Sequence[Given],
    *,
    adapters: Any = None,
    only: Patterns = None,
    drop: Patterns = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> Iterator[Finding]:
    """Yield the losses and changes of a result, causes first."""
    with ExitStack() as stack:
        original, written = (stack.enter_context(Catalog.of(each, storage_options)) for each in (source, result))
        if adapters is not None:
            original = merged(stack, original, adapters, storage_options)
        try:
            report, forms = compare(original, written, only, drop, threads=threads, progress=progress)
        except SafeloadError as problem:
            yield find("source.form", problem=one_line(problem))
            return
        unequal = [name for name, row in report.tensors.items() if row.unequal]
        changed, calibrated, rescaled = _changed(forms, unequal, threads)
        yield from changed
        yield from _lost(report, [*original] if not report.form else [*forms.catalogs[0]])
        for name, (expected, shape) in report.shapes.items():
            yield find("source.shape", name, shape=[*shape], expected=[*expected])
        yield from (find("source.more", name) for name in report.only_b)
        for reason, names in grouped(report.left_out_a, report.left_out_a.__getitem__).items():
            yield find("source.left_out", names[0], reason=reason, tensors=plural(len(names), "tensor"))
        if calibrated:
            yield find("source.calibrated", tensors=plural(calibrated, "tensor"))
        if rescaled:
            yield find("source.rescaled", tensors=plural(rescaled, "tensor"))


def _lost(report: DiffReport, names: Collection[str]) -> Iterator[Finding]:
    """Yield the missing tensors, by the shortest beginning of names that the result lacks altogether."""

    def beginnings(name: str) -> Iterator[str]:
        return accumulate(name.split(".")[:-1], "{}.{}".format)

    kept = {begin for name in {*names}.difference(report.only_a) for begin in beginnings(name)}
    lost = grouped(report.only_a, lambda name: next((begin for begin in beginnings(name) if begin not in kept), name))
    for begin, members in lost.items():
        if len(members) == 1:
            yield find("source.lost:one", members[0])
        else:
            yield find("source.lost", f"{begin}.*", tensors=plural(len(members), "tensor"))


def _changed(forms: Forms, names: Sequence[str], threads: int | None) -> tuple[list[Finding], int, int]:
    """Return the cause of each damage, and the numbers of calibrated tensors and of tensors with factors."""
    samples: dict[str, tuple[Array, Array]] = {}
    causes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    factors: dict[str, Factors] = {}
    calibrated: list[str] = []
    for name in names:
        pair = pair_of(forms, name, threads)
        kind = judged(forms, name, pair).kind
        if kind == CALIBRATED:
            calibrated.append(name)
        elif kind in (DAMAGED, CHANGED) and not _is_rounded_norm(name, *pair()):
            a, b = _floats(pair)
            shapes[name] = tuple(forms.catalogs[0].about(name).shape)
            causes[name] = _cause(forms, name, a, b)
            factors |= _factors(forms, name, a, b)
            samples[name] = a.reshape(-1)[:_SAMPLE].copy(), b.reshape(-1)[:_SAMPLE].copy()
    layers = {layer_of(name) for name in factors}
    for name in calibrated:  # factors near 1 look like calibration
        if layer_of(name) in layers:
            factors |= _factors(forms, name, *_floats(pair_of(forms, name, threads)))
    everything = forms.catalogs[0]
    excused = undone(factors, {name: tuple(everything.about(name).shape) for name in everything if factors})
    excused &= causes.keys()
    places = _places(samples, shapes)
    ordered = sorted((name for name in causes if name not in excused), key=lambda name: name not in places)
    found = [find("source.changed", name, cause=places.get(name) or causes[name]) for name in ordered]
    return found, len(calibrated), len(excused)


def _is_rounded_norm(name: str, a: Array, b: Array) -> bool:
    """Return True if 1 was added to a norm and subtracted, as llm-compressor does with Gemma's."""
    if "norm" not in name or len(a) != 1 or a.dtype != b.dtype or a.dtype.kind in "iub":
        return False
    unit = a.dtype.type(1)
    return np.array_equal((a + unit) - unit, b)


def _floats(pair: Callable[[], tuple[Array, Array]]) -> Iterator[Array]:
    return (x.astype(np.float32, copy=False) for x in pair())


def _factors(forms: Forms, name: str, a: Array, b: Array) -> dict[str, Factors]:
    own = factors_of(a, b, partial(_explains, forms, name, b))
    return {} if own is None else {name: own}


def _explains(forms: Forms, name: str, b: Array, a: Array) -> bool:
    """Return True if rounding makes a tensor ``b`` of the result from ``a``."""
    coarse = forms.quantized(name)  # so factors are estimates
    return _is(a, b, _ESTIMATED if coarse else _EXACT) or judged(forms, name, lambda: (a, b)).kind == EXPECTED


def _places(samples: Mapping[str, tuple[Array, Array]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return which tensors hold the values of other tensors."""
    texts: dict[str, str] = {}
    alike = grouped(shapes, shapes.__getitem__).values()
    for names in (group[:_MOST_ALIKE] for group in alike if len(group) > 1):
        cosines = _cosines(*(np.stack([samples[name][side] for name in names]) for side in (0, 1)))
        origins = cosines.argmax(axis=1)
        for k, origin in enumerate(origins.tolist()):
            if origin == k or cosines[k, origin] < 1 - _CLOSE**2:
                continue
            kind, numbers = _difference(names[k], names[origin])
            if origins[origin] == k and cosines[origin, k] >= 1 - _CLOSE**2:
                first, second = sorted(numbers) if numbers else ("it", names[origin])
                texts[names[k]] = f"{kind} {first} and {second} changed places".strip()
            else:
                texts[names[k]] = f"has the values of {names[origin]}"
    return texts


def _difference(name: str, other: str) -> tuple[str, list[int]]:
    """Return the kind and the numbers if two names differ in a single number, such as that of an expert."""
    (pattern, own), (second, theirs) = without_numbers(name), without_numbers(other)
    different = [k for k, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]]
    if pattern != second or len(different) != 1:
        return "", []
    word = pattern.split("{}")[different[0]].rstrip(".").rpartition(".")[2]
    return _KINDS.get(word, word), [int(own[different[0]]), int(theirs[different[0]])]


def _cause(forms: Forms, name: str, a: Array, b: Array) -> str:
    """Return the operation that makes a matrix of the result from that of the source."""
    if not np.isfinite(b).all() and np.isfinite(a).all():
        return f"{np.count_nonzero(~np.isfinite(b)):,} values are NaN or infinite"
    if not b.any() and a.any():
        return "all values are 0"
    if b.size > 1 and (b == b.flat[0]).all() and (a != a.flat[0]).any():
        return f"all values are {b.flat[0]:g}"
    step = np.float64(b.mean(dtype=np.float64) - a.mean(dtype=np.float64))
    if abs(step) > 2 * _EXACT and _is(a + np.float32(step), b, _EXACT):
        return f"values differ by exactly {_figure(abs(step))}"
    square = float(np.vdot(a, a))
    times = float(np.vdot(a, b)) / square if square else 1.0
    if abs(times - 1) > 0.05 and _is(a * np.float32(times), b):
        return (
            "values have the other sign" if abs(times + 1) < 0.05 else f"values are {_figure(times)} times the source's"
        )
    if a.shape[0] == a.shape[1] and _is(a.T, b):
        return "is transposed"
    order = _order_of(forms, name, a, b)
    if order:
        return order
    return _extent(a, b)


def _order_of(forms: Forms, name: str, a: Array, b: Array) -> str:
    """Return how the rows or columns of a matrix are ordered otherwise, or an empty text."""
    rows, catalog = len(a), forms.catalogs[0]
    recipe = catalog.recipes[name] if isinstance(catalog, RestructuredCatalog) else None
    moves = () if recipe is None else recipe.moves
    permuted = any(move.arrangement is not None and move.arrangement.rows is not None for move in moves)
    config = language_of(next((each.config for each in forms.catalogs if each.config), {}))
    counts = {config.get(key) for key in ("num_attention_heads", "num_key_value_heads", "n_head")}
    for heads in counts:
        if type(heads) is not int or heads <= 0 or rows % (2 * heads) or rows == 2 * heads:
            continue
        order = np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
        if _is(a[order], b):
            return "rows are interleaved twice" if permuted else "rows are interleaved"
        if _is(a[np.argsort(order)], b):
            return "rows are not interleaved" if permuted else "rows are interleaved the other way"
    if rows % 2 == 0 and _is(np.roll(a, rows // 2, axis=0), b):
        return "the halves of the rows changed places"
    for what, x, y in (("rows", a, b), ("columns", a.T, b.T)):
        if 1 < len(x) <= _MOST_ROWS and x.shape[1] > 1:
            origins = _cosines(x, y).argmax(axis=1)
            if len(set(origins.tolist())) == len(x) and (origins != np.arange(len(x))).any() and _is(x[origins], y):
                return f"{what} are in another order"
    return ""


def _cosines(a: Array, b: Array) -> Array:
    """Return the cosines of each row of ``b`` with the rows of ``a``, 0 for rows without a direction."""
    with np.errstate(all="ignore"):
        a, b = (np.nan_to_num(x / np.linalg.norm(x, axis=1, keepdims=True)) for x in (a, b))
    cosines: Array = b @ a.T
    return cosines


def _extent(a: Array, b: Array) -> str:
    """Return how much of a matrix differs, if no operation explains it."""
    change, norm = np.linalg.norm(a - b, axis=1), np.linalg.norm(a, axis=1)
    bad = np.flatnonzero(change > _CLOSE * norm)
    total = float(np.linalg.norm(change) / max(float(np.linalg.norm(norm)), 1e-30))
    cosine = float(np.vdot(a, b)) / max(float(np.linalg.norm(a)) * float(np.linalg.norm(b)), 1e-30)
    if a.size >= 64 and abs(cosine) < 0.2:
        return "values are unrelated to the source's"
    starts = np.arange(0, a.shape[1], BLOCK)
    shares = np.add.reduceat(np.square(a - b), starts, axis=1)
    row, block = np.unravel_index(int(shares.argmax()), shares.shape)
    if len(bad) < 2 < len(starts) and shares[row, block] > np.square(change[row]) / 2:
        begin, end = int(starts[block]), min(int(starts[block]) + BLOCK, a.shape[1])
        return f"values of row {row:,} differ in columns {begin:,} to {end - 1:,}"
    if 0 < len(bad) < len(a):
        return f"{len(bad):,} of {plural(len(a), 'row')} differ, the first is row {bad[0]:,}"
    return f"values differ by {total:.2g} of their norm, which the format does not explain"


def _is(a: Array, b: Array, tolerance: float = _CLOSE) -> bool:
    """Return True if the rows of matrices are equal but for rounding."""
    if a.shape != b.shape:
        return False
    change, norm = (np.linalg.norm(x, axis=1) for x in (a - b, a))
    return bool((change <= tolerance * np.maximum(norm, 1e-30)).all())


def _figure(value: float) -> str:
    return str(round(value)) if abs(value - round(value)) < 0.03 else f"{value:.3g}"
