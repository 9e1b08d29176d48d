"""Differences between two checkpoints: names, shapes, dtypes and values, across formats, dtypes and quantization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..base import log
from ..base.arrays import Array
from ..base.scheme import INT8
from ..base.selecting import Patterns, select
from ..engine.pieces import Meter, in_order, source_pieces, spans, values
from ..engine.progress import Progress
from ..engine.quantized_tensor import QuantizedTensor
from ..engine.source import Source, of_array
from ..engine.threads import check_threads
from ..engine.weight_file import is_remote
from . import executing, plan, sources
from .about import About
from .catalog import Catalog, Given
from .diff_report import DiffReport, TensorDiff
from .executing import Executor

# Reads `size` elements from `begin` as float64: (begin, size) to array.
_Read = Callable[[int, int], Array]


def diff(
    a: Given,
    b: Given,
    *,
    only: Patterns = None,
    drop: Patterns = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> DiffReport:
    """Compares two checkpoints tensor by tensor, in the memory of a few pieces (or of one quantized tensor).

    Quantized tensors are dequantized, and those values are compared.

    Args:
        a: path or URL of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays and quantized
            tensors.
        b: what to compare it with, in the same forms.
        only: shell pattern, or several, of the names to compare, such as ``"model.layers.0.*"``; None for all.
        drop: shell pattern, or several, of names to leave out.
        storage_options: for URLs, of either: options of the filesystems that they lead to, see `open`.
        executor: runs pieces, each of some tensors, on other processes or machines that have the same files: anything
            with the ``submit`` of `concurrent.futures.Executor`, such as Dask's ``client.get_executor(pure=False)``.
            The report is that of one process.
        threads: None: chosen automatically, and one for each piece of an executor.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total), counting values as float64.

    Returns:
        The report. ``same`` and ``within`` summarize it.

    Raises:
        TensorNotFoundError: a pattern matches no name of either.
        UnsupportedError: a tensor holds codes of a family that is not dequantized, such as GPTQ, or stored codes; or
            see `safeload.open`.
        ValueError: ``executor`` for tensors in memory.
        FormatError: a file has changed before an executor's piece read it; or see `safeload.open`.
        OSError: see `safeload.open`.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.diff({"w": np.float32([1, 2])}, {"w": np.float64([1, 2.5])}).tensors["w"].max
        0.5
    """
    check_threads(threads)
    executing.check_executor(executor)
    with Catalog.of(a, storage_options) as one, Catalog.of(b, storage_options) as other:
        chosen = set(select([*one, *(name for name in other if name not in one)], only, drop))
        report = DiffReport(one.title, other.title)
        shapes = _structure(one, other, chosen, report)
        for catalog in (one, other):
            catalog.refuse_codes(shapes, "diff")
        if executor is None:
            report.tensors = _values(one, other, shapes, threads, progress)
        else:
            report.tensors = _in_pieces(one, other, shapes, executor, threads, progress)
        return report


def _structure(a: Catalog, b: Catalog, chosen: set[str], report: DiffReport) -> dict[str, tuple[int, ...]]:
    """Compares names, dtypes and shapes, and returns the shapes of the tensors whose values can be compared."""
    in_a, in_b = ([name for name in catalog if name in chosen] for catalog in (a, b))
    report.only_a = [name for name in in_a if name not in b]
    report.only_b = [name for name in in_b if name not in a]
    alike = {}
    for name in in_a:
        if name not in b:
            continue
        one, other = a.about(name), b.about(name)
        if _dtype(one) != _dtype(other):
            report.dtypes[name] = _dtype(one), _dtype(other)
        if one.shape != other.shape:
            report.shapes[name] = one.shape, other.shape
        else:
            alike[name] = one.shape
    return alike


def _values(
    a: Catalog, b: Catalog, shapes: Mapping[str, tuple[int, ...]], threads: int | None, progress: Progress
) -> dict[str, TensorDiff]:
    """Compares tensors of the same shape.

    Args:
        a: the first checkpoint.
        b: the second.
        shapes: the tensors, and the shape of each.
        threads: see `diff`.
        progress: see `diff`.
    """
    meter = Meter(progress, sum(map(_size, shapes.values())))
    found = {}
    for name, shape in shapes.items():
        found[name] = _compare(_value(a, name, threads), _value(b, name, threads), shape, threads, meter)
        log.debug("diff of %s: %s", name, found[name])
    return found


def _size(shape: tuple[int, ...]) -> int:
    """Bytes of a tensor as float64."""
    return 8 * math.prod(shape)


def _in_pieces(
    a: Catalog,
    b: Catalog,
    shapes: Mapping[str, tuple[int, ...]],
    executor: Executor,
    threads: int | None,
    progress: Progress,
) -> dict[str, TensorDiff]:
    against = sources.Sources(b, executing.EXECUTOR)
    sizes = {name: _size(shape) for name, shape in shapes.items()}
    found = executing.by_tensor(
        run,
        "diff",
        a,
        sizes,
        executor,
        threads=threads,
        progress=progress,
        more=lambda names: {"against": against.of(names)},
    )
    return {name: TensorDiff._make(plan.of_plain(found[name])) for name in sizes}


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compares the tensors of a piece; see `run_piece`."""
    plan.check_version(piece)
    names = plan.texts(piece, "names")
    with (
        sources.opened(plan.field(piece, "sources", list), names, storage_options) as a,
        sources.opened(plan.field(piece, "against", list), names, storage_options) as b,
    ):
        shapes = {name: a.about(name).shape for name in names}
        return {"tensors": {name: plan.as_plain(found) for name, found in _values(a, b, shapes, threads, None).items()}}


def _dtype(about: About) -> str:
    return "int8 with scale" if about.scheme == INT8 else about.dtype


# ---- one tensor ----


class _Sums(NamedTuple):
    """Partial sums over one piece of two tensors."""

    largest: float
    at: int
    squares: float
    dot: float
    norm_a: float
    norm_b: float
    unequal: int
    nonfinite: int
    finite: int


def _compare(
    one: Source | Array,
    other: Source | Array,
    shape: tuple[int, ...],
    threads: int | None,
    meter: Meter,
) -> TensorDiff:
    """Compares two tensors of the same shape.

    Equal bytes of the same dtype need no arithmetic. Otherwise pieces are compared as float64 on several threads, and
    their partial sums are added up. A complex tensor gets one more axis for its real and imaginary parts.
    """
    count = math.prod(shape)
    if isinstance(one, Source) and isinstance(other, Source) and one.row is other.row and _equal(one, other):
        meter.add(8 * count)
        return TensorDiff(0.0, None, 0.0, 1.0, 0, 0)
    axes = shape
    if any(isinstance(value, np.ndarray) and value.dtype.kind == "c" for value in (one, other)):
        shape, count = (*shape, 2), 2 * count  # the real and the imaginary part
        one, other = (np.asarray(value, np.complex128).view(np.float64) for value in (_whole(one), _whole(other)))
    read_a, read_b = _reader(one, count), _reader(other, count)

    def sums(span: tuple[int, int]) -> _Sums:
        found = _sum_up(read_a(*span), read_b(*span), span[0])
        meter.add(8 * span[1])
        return found

    parts = list(in_order(sums, spans(shape), threads, 8 * count))
    largest = max(parts, key=lambda part: part.largest, default=None)
    unequal = sum(part.unequal for part in parts)
    finite = sum(part.finite for part in parts)
    squares, dot, norm_a, norm_b = (
        math.fsum(getattr(part, field) for part in parts) for field in ("squares", "dot", "norm_a", "norm_b")
    )
    length = math.sqrt(norm_a) * math.sqrt(norm_b)
    cosine = 1.0 if unequal == 0 else dot / length if length else math.nan
    index = None
    if largest is not None and largest.largest > 0:
        index = tuple(int(k) for k in np.unravel_index(largest.at, shape)[: len(axes)])
    return TensorDiff(
        0.0 if largest is None else largest.largest,
        index,
        math.sqrt(squares / finite) if finite else 0.0,
        max(-1.0, min(1.0, cosine)) if not math.isnan(cosine) else cosine,
        unequal,
        sum(part.nonfinite for part in parts),
    )


def _sum_up(x: Array, y: Array, begin: int) -> _Sums:
    """Partial sums over the elements of one piece; ``begin`` is the index of its first element."""
    nonfinite, finite = 0, x.size
    with np.errstate(invalid="ignore", over="ignore"):
        norm_a, norm_b = _dot(x, x), _dot(y, y)
    if not (math.isfinite(norm_a) and math.isfinite(norm_b)):
        both = np.isfinite(x) & np.isfinite(y)
        finite = int(np.count_nonzero(both))
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        nonfinite = int(np.count_nonzero(~both & ~same))
        x, y = np.where(both, x, 0.0), np.where(both, y, 0.0)
        norm_a, norm_b = _dot(x, x), _dot(y, y)
    difference = x - y
    np.abs(difference, out=difference)
    at = int(difference.argmax()) if difference.size else 0
    return _Sums(
        float(difference[at]) if difference.size else 0.0,
        begin + at,
        _dot(difference, difference),
        _dot(x, y),
        norm_a,
        norm_b,
        int(np.count_nonzero(difference)) + nonfinite,
        nonfinite,
        finite,
    )


def _dot(x: Array, y: Array) -> float:
    """The dot product on this thread alone: BLAS would start threads of its own in each of ours."""
    return float(np.einsum("i,i->", x, y))


def _value(catalog: Catalog, name: str, threads: int | None) -> Source | Array:
    """A tensor as a source; quantized, packed and complex ones are loaded whole."""
    row = catalog.about(name).element
    if row is None or row.packed or row.complex:
        return catalog.array(name, threads)
    found = catalog.source(name, threads=threads)
    if isinstance(found, Source) and is_remote(found.file):  # which is read once, whatever is compared
        return of_array(name, catalog.value(name, threads))
    return found.dequantize(threads=threads) if isinstance(found, QuantizedTensor) else found


def _equal(one: Source, other: Source) -> bool:
    """Whether the bytes are equal."""
    pieces = zip(source_pieces(one), source_pieces(other), strict=True)
    return all(a == b for a, b in pieces)


def _reader(value: Source | Array, count: int) -> _Read:
    if isinstance(value, Source):
        source = value
        return lambda begin, size: values(source, begin, size)
    flat = np.ascontiguousarray(_whole(value)).reshape(count)
    return lambda begin, size: flat[begin : begin + size].astype(np.float64)


def _whole(value: Source | Array) -> Array:
    return values(value, 0, math.prod(value.shape)).reshape(value.shape) if isinstance(value, Source) else value
