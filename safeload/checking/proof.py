"""Compare the result of a conversion with its source: losses, changes, and the cause.

Tensors whose difference no format explains are looked at again: a cause is a simple operation that makes the tensor of
the result from that of the source, or from another tensor of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ..conversion.catalog import Catalog, Given, RestructuredCatalog
from ..conversion.llama_cpp.gguf_models import keys_between
from ..conversion.llama_cpp.tokenizer import JSON, KEPT, MODEL, TokenizerFiles, object_at
from ..conversion.make import merged
from ..core.arrays import Array
from ..core.names import Patterns, grouped, layer_of
from ..core.progress import Progress
from ..core.text import plural, show
from ..errors import SafeloadError, one_line
from ..models.family import of_all_layers, without_numbers
from ..models.schema import language_of
from .diff import DiffReport, compare
from .factors import Factors, factors_of, undone
from .findings import Finding, find
from .forms import Forms, common_form
from .judging import BLOCK, CALIBRATED, EXPECTED, judged, pair_of

_CLOSE = 0.35  # largest relative difference of an operation that explains a tensor; unrelated tensors have 1.4
_ESTIMATED = 0.45  # likewise of estimated factors: codes of 4 bits move rows of outliers by a third
_SURE = 6  # deviations of an estimate from the rounding of a format
_EXACT = 0.01  # likewise of an addition: bfloat16 rounds by half of it
_MOST_ROWS = 2048  # to find their order
_SAMPLE = 4096  # values by which tensors that changed places are recognized
_MOST_ALIKE = 4096  # damaged tensors of a shape to compare with each other
# Keys that do not say what a model computes, or that follow from its tensors and their format.
_UNCOMPARED = ("general.", "safeload.", "quantize.", "split.", "tokenizer.chat_template")
_BOOKKEEPING = {
    *("dtype", "torch_dtype", "quantization", "quantization_config", "compression_config", "transformers_version"),
    *("tie_word_embeddings", "use_cache", "auto_map", "_name_or_path", "_attn_implementation"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),  # mlx-lm takes them from generation_config.json
}
_NEWER = {"attention": "full_attention", "mamba": "linear_attention"}  # kinds of layers in transformers 5
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
    ignored: Collection[str] = (),  # keys of metadata that the conversion was told to change
) -> Iterator[Finding]:
    """Yield the losses and changes of a result, causes first."""
    with ExitStack() as stack:
        original, written = (stack.enter_context(Catalog.of(each, storage_options)) for each in (source, result))
        base = original
        if adapters is not None:
            original = merged(stack, base, adapters, storage_options)
        try:
            report, forms = compare(original, written, only, drop, threads=threads, progress=progress)
            before = base if original is base else common_form(base, written).catalogs[0]
        except SafeloadError as problem:
            yield find("source.form", problem=one_line(problem))
            return
        unequal = [name for name, row in report.tensors.items() if row.unequal]
        changed, calibrated, rescaled = _changed(forms, before, original.merge or (), unequal, threads)
        yield from changed
        yield from _settings(original, written, report.form, ignored)
        yield from _lost(report, [*original] if not report.form else [*forms.catalogs[0]])
        for name, (expected, shape) in report.shapes.items():
            yield find("source.shape", name, shape=[*shape], expected=[*expected])
        yield from (find("source.more", name) for name in report.only_b)
        for reason, names in grouped(report.left_out_a, report.left_out_a.__getitem__).items():
            yield find("source.left_out", names[0], reason=reason, tensors=plural(len(names), "tensor"))
        for code, count in (("source.calibrated", calibrated), ("source.rescaled", rescaled)):
            if count:
                yield find(code, tensors=plural(count, "tensor"))


def _settings(original: Catalog, written: Catalog, form: str, ignored: Collection[str]) -> Iterator[Finding]:
    """Yield settings of the model and of its tokenizer with another value than in the source."""
    sides, files = (original, written), [catalog.format == "gguf" for catalog in (original, written)]
    pairs: Iterable[Sequence[Mapping[str, Any]]] = [[catalog.metadata for catalog in sides]]
    if not any(files):
        pairs = zip(*map(_own_settings, sides), strict=False)
    elif not all(files):
        if not form.startswith("layout of llama.cpp"):
            return
        model, file = sides[:: -1 if files[0] else 1]
        pairs = ([file.metadata, keys][:: 1 if files[0] else -1] for keys in keys_between(model, file))
    try:
        for expected, stated in pairs:
            ours = f"{KEPT}config" in stated  # other programs write other optional keys
            for key in expected:
                compared = expected[key] is not None and (ours or stated.get(key) is not None)
                if compared and key not in ignored and not str(key).startswith(_UNCOMPARED):
                    place, a, b = _first_difference(str(key), *(_plain(side.get(key)) for side in (expected, stated)))
                    if a != b:
                        value = "missing" if b is None else show(b)
                        yield find("source.setting", setting=place, value=value, expected=show(a))
    except SafeloadError as problem:
        yield find("source.unchecked", problem=one_line(problem))


def _own_settings(catalog: Catalog) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of config.json, then the vocabulary of the tokenizer."""
    yield dict(_leaves(catalog.config or {}, "config.json: "))
    if catalog.folder is None:
        return
    files = TokenizerFiles(catalog.folder)
    model = object_at(files.json, "model")
    merges = model.get("merges")
    pairs = (
        [each.split(" ") if isinstance(each, str) else each for each in merges] if isinstance(merges, list) else None
    )
    pieces = enumerate(() if files.model is None else files.model.pieces)
    yield {
        f"{JSON}: vocab": model.get("vocab"),
        f"{JSON}: merges": pairs,
        **{f"{JSON}: added token {token.id}": token.text for token in files.added_in_json},
        **{f"{MODEL}: token {number}": piece.text for number, piece in pieces},  # a converter can add more
    }


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config by name; those of rotations stand below several keys, or below none."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in _BOOKKEEPING:
            yield from _leaves(value, prefix if key in ("rope_scaling", "rope_parameters") else f"{prefix}{key}.")
        elif key not in _BOOKKEEPING:
            kinds = value if key == "layer_types" and isinstance(value, list) else ()
            yield f"{prefix}{key}", [_NEWER.get(str(kind), kind) for kind in kinds] or value


def _plain(value: Any) -> Any:
    """Return a value as GGUF files store it: floats in single precision, one value if all layers have it."""
    value = of_all_layers(value)
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _first_difference(key: str, a: Any, b: Any) -> tuple[str, Any, Any]:
    """Return the entry in which two lists or objects differ, or the number of their entries."""
    if type(a) is type(b) and isinstance(a, (list, dict)) and a != b:
        if len(a) != len(b):
            return f"number of {key}", len(a), len(b)
        a, b = (x if isinstance(x, dict) else dict(enumerate(x)) for x in (a, b))
        place = next(k for k, value in a.items() if b.get(k) != value)
        return f"{key}[{show(place)}]", a[place], b.get(place)
    return key, a, b


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


def _changed(
    forms: Forms,
    before: Catalog,  # the source without adapters
    merges: Container[str],  # the tensors that adapters change
    names: Sequence[str],
    threads: int | None,
) -> tuple[list[Finding], int, int]:
    """Return the cause of each damage, and the numbers of calibrated tensors and of tensors with factors."""
    samples: dict[str, tuple[Array, Array]] = {}
    causes: dict[str, str] = {}
    factors: dict[str, Factors] = {}
    calibrated: list[str] = []
    for name in names:
        pair = pair_of(forms, name, threads)
        judgement = judged(forms, name, pair)
        if judgement.startswith(CALIBRATED):
            calibrated.append(name)
        elif not judgement.startswith(EXPECTED) and not _is_rounded_norm(name, *pair()):
            a, b = _floats(pair)
            causes[name] = _cause(forms, name, a, b)
            factors |= _factors(forms, name, a, b)
            samples[name] = a.reshape(-1)[:_SAMPLE].copy(), b.reshape(-1)[:_SAMPLE].copy()
        if name in before and any(each in merges for each in forms.stored(0, name)[1]):
            causes |= _merge(name, before.array(name, threads), *_floats(pair))
    layers = {layer_of(name) for name in factors}
    for name in calibrated:  # factors near 1 look like calibration
        if layer_of(name) in layers:
            factors |= _factors(forms, name, *_floats(pair_of(forms, name, threads)))
    everything = forms.catalogs[0]
    shapes = {name: everything.about(name).shape for name in everything if causes}
    excused = undone(factors, shapes) & causes.keys()
    places = _places(samples, shapes)
    ordered = sorted((name for name in causes if name not in excused), key=lambda name: name not in places)
    found = [find("source.changed", name, cause=places.get(name) or causes[name]) for name in ordered]
    return found, len(calibrated), len(excused)


def _merge(name: str, base: Array, a: Array, b: Array) -> dict[str, str]:
    """Return how often adapters are merged into a tensor ``b``, unless it is once, as in ``a``."""
    if base.size != a.size:
        return {}
    change, got = (np.float64(x - base.reshape(a.shape)) for x in (a, b))
    with np.errstate(all="ignore"):
        times = float(np.vdot(change, got) / np.vdot(change, change))
    rest = float(np.linalg.norm(got - times * change))
    noise = rest / max(float(np.linalg.norm(change)) * change.size**0.5, 1e-30)
    if not (abs(times - 1) > max(_CLOSE, _SURE * noise) and rest < _ESTIMATED * np.linalg.norm(a)):
        return {}
    return {name: "the adapter is not merged" if abs(times) < 0.1 else f"the adapter is merged {times:.2g} times"}


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
    return _is(a, b, _ESTIMATED if coarse else _EXACT) or judged(forms, name, lambda: (a, b)).startswith(EXPECTED)


def _places(samples: Mapping[str, tuple[Array, Array]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return which tensors hold the values of other tensors."""
    texts: dict[str, str] = {}
    alike = grouped(samples, shapes.__getitem__).values()
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
    moves = catalog.recipes[name].moves if isinstance(catalog, RestructuredCatalog) else ()
    permuted = any(move.arrangement is not None and move.arrangement.rows is not None for move in moves)
    config = language_of(next((each.config for each in forms.catalogs if each.config), {}))
    for heads in {config.get(key) for key in ("num_attention_heads", "num_key_value_heads", "n_head")}:
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
