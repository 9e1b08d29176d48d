"""Differences between two checkpoints: names, shapes, dtypes and values, across formats, dtypes and quantization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..base import log
from ..base.arrays import Array
from ..base.names import natural_key
from ..base.scheme import INT8
from ..base.selecting import Patterns, select
from ..base.text import clip, plural, printable, shorten, show, table
from ..engine.pieces import Meter, in_order, source_pieces, spans, values
from ..engine.progress import Progress
from ..engine.quantized_tensor import QuantizedTensor
from ..engine.source import Source
from ..engine.threads import check_threads
from .about import About
from .catalog import Catalog, Given

# Reads `size` elements from `begin` as float64: (begin, size) to array.
_Read = Callable[[int, int], Array]


class TensorDiff(NamedTuple):
    """How far the values of one tensor are from those of another of the same shape.

    NaN in both, or the same infinity in both, counts as equal. An element that is finite in only one of them is counted
    in ``unequal`` and ``nonfinite``, and excluded from the other numbers.

    Attributes:
        max: largest absolute difference.
        index: index of that difference, one integer for each axis; None if nothing differs.
        rms: root of the mean square of the differences.
        cosine: cosine of the angle between the two as vectors; 1 if they are equal, nan if one of them is zero.
        unequal: number of elements that differ.
        nonfinite: number of those that are NaN or infinite in only one of the two, or infinite with different signs.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> one, other = {"x": np.float32([1, 2])}, {"x": np.float32([1, 2.5])}
        >>> safeload.diff(one, other).tensors["x"].max
        0.5
    """

    max: float
    index: tuple[int, ...] | None  # type: ignore[assignment]
    rms: float
    cosine: float
    unequal: int
    nonfinite: int


# Keys that sort names and differences.
_ORDERS: dict[str, Callable[[tuple[str, TensorDiff]], Any]] = {
    "name": lambda row: natural_key(row[0]),
    "max": lambda row: -row[1].max,
    "rms": lambda row: -row[1].rms,
    "cosine": lambda row: -2.0 if math.isnan(row[1].cosine) else row[1].cosine,
    "unequal": lambda row: -row[1].unequal,
}


class DiffReport:
    """The result of `safeload.diff`. ``str()`` is a table.

    Attributes:
        a: title of the first checkpoint, as in messages.
        b: title of the second.
        only_a: names that are only in a.
        only_b: names that are only in b.
        shapes: name to both shapes where they differ; values of these tensors are not compared.
        dtypes: name to both dtypes where they differ.
        tensors: name to `TensorDiff` for every tensor in both that has the same shape.

    Example:
        >>> import safeload
        >>> safeload.convert("tiny-llama", "half.safetensors", dtype="float16")
        <ConvertReport 'half.safetensors': safetensors, 30 tensors, 244 KiB>
        >>> report = safeload.diff("tiny-llama", "half.safetensors")
        >>> report.same, report.within(0.001)
        (False, True)
    """

    def __init__(self, a: str, b: str) -> None:
        self.a = a
        self.b = b
        self.only_a: list[str] = []
        self.only_b: list[str] = []
        self.shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.dtypes: dict[str, tuple[str, str]] = {}
        self.tensors: dict[str, TensorDiff] = {}

    @property
    def same(self) -> bool:
        """Whether names, shapes, dtypes and values are equal."""
        return self.within(0.0) and not self.dtypes

    def within(self, tolerance: float) -> bool:
        """Whether names and shapes are equal and values differ by no more than ``tolerance``. Dtypes may differ."""
        structure = self.only_a or self.only_b or self.shapes
        return not structure and all(d.max <= tolerance and not d.nonfinite for d in self.tensors.values())

    @property
    def unequal(self) -> dict[str, TensorDiff]:
        """The tensors whose values differ, largest difference first."""
        found = [(name, d) for name, d in self.tensors.items() if d.unequal]
        return dict(sorted(found, key=lambda item: (-item[1].nonfinite, -item[1].max)))

    def lines(self, columns: int | None = 80, rows: int | None = None, sort: str | None = None) -> list[str]:
        """The report as text.

        Args:
            columns: width in characters; None where names must not be cut.
            rows: the most rows of each list; the rest are only counted. None for all.
            sort: "name", "max", "rms", "cosine" or "unequal": orders the tensors whose values differ, numbers from the
                worst. None for the order of `unequal`.

        Returns:
            Lines without line ends.
        """
        lines = [clip(f"a: {printable(self.a)}", columns), clip(f"b: {printable(self.b)}", columns)]

        def block(title: str, entries: list[str]) -> None:
            if entries:
                lines.extend(("", title))
                room = None if columns is None else columns - 2
                lines.extend(f"  {entry}" for entry in shorten(entries[:rows], room))
                if rows is not None and len(entries) > rows:
                    lines.append(f"  ... and {len(entries) - rows:,} more")

        block("only in a", [printable(name) for name in self.only_a])
        block("only in b", [printable(name) for name in self.only_b])
        block("other shape", [f"{printable(n)}: {list(a)} and {list(b)}" for n, (a, b) in self.shapes.items()])
        pairs: dict[tuple[str, str], list[str]] = {}
        for name, pair in self.dtypes.items():
            pairs.setdefault(pair, []).append(name)
        block(
            "other dtype",
            [f"{a} and {b}: {plural(len(names), 'tensor')}, {printable(names[0])}" for (a, b), names in pairs.items()],
        )
        unequal = self.unequal
        if sort is not None:
            unequal = dict(sorted(unequal.items(), key=_ORDERS[sort]))
        if unequal:
            shown = list(unequal.items())[:rows]
            cells: list[tuple[str, ...]] = [
                (printable(n), f"{d.max:.3g}", f"{d.rms:.3g}", f"{d.cosine:.6f}", f"{d.unequal:,}", f"{d.nonfinite:,}")
                for n, d in shown
            ]
            header: tuple[str, ...] = ("other values", "max", "rms", "cosine", "unequal", "not finite")
            if not any(d.nonfinite for d in unequal.values()):
                header, cells = header[:-1], [row[:-1] for row in cells]
            lines.append("")
            lines += table(header, cells, right=frozenset(range(1, len(header))), columns=columns)
            if len(shown) < len(unequal):
                lines.append(f"... and {len(unequal) - len(shown):,} more")
        lines.append("")
        equal = len(self.tensors) - len(unequal)
        verdict = "the same" if self.same else "different"
        lines.append(f"{verdict}: {equal:,} of {plural(len(self.tensors), 'tensor')} in both have equal values")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<DiffReport {show(self.a)}, {show(self.b)}: {self.lines()[-1]}>"

    def to_json(self) -> dict[str, Any]:
        """The whole report, for ``json.dump``; values that are not finite are null."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return {
            "same": self.same,
            **{name: getattr(self, name) for name in ("a", "b", "only_a", "only_b")},
            "shapes": {name: [list(shape) for shape in pair] for name, pair in self.shapes.items()},
            "dtypes": {name: list(pair) for name, pair in self.dtypes.items()},
            "tensors": {
                name: {key: plain(value) for key, value in found._asdict().items()}
                for name, found in self.tensors.items()
            },
        }


def diff(
    a: Given,
    b: Given,
    *,
    only: Patterns = None,
    drop: Patterns = None,
    threads: int | None = None,
    progress: Progress = None,
) -> DiffReport:
    """Compares two checkpoints tensor by tensor, in the memory of a few pieces (or of one quantized tensor).

    Quantized tensors are dequantized, and those values are compared.

    Args:
        a: path of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays and quantized tensors.
        b: what to compare it with, in the same forms.
        only: shell pattern, or several, of the names to compare, such as ``"model.layers.0.*"``; None for all.
        drop: shell pattern, or several, of names to leave out.
        threads: None: chosen automatically.
        progress: a callable that gets (bytes_done, bytes_total), counting values as float64.

    Returns:
        The report. ``same`` and ``within`` summarize it.

    Raises:
        TensorNotFoundError: a pattern matches no name of either.
        UnsupportedError: a tensor holds codes of a family that is not dequantized, such as GPTQ, or stored codes; or
            see `safeload.open`.
        FormatError, OSError: see `safeload.open`.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.diff({"w": np.float32([1, 2])}, {"w": np.float64([1, 2.5])}).tensors["w"].max
        0.5
    """
    check_threads(threads)
    with Catalog.of(a) as one, Catalog.of(b) as other:
        chosen = set(select([*one, *(name for name in other if name not in one)], only, drop))
        return _diff(one, other, chosen, threads, progress)


def _diff(a: Catalog, b: Catalog, chosen: set[str], threads: int | None, progress: Progress) -> DiffReport:
    report = DiffReport(a.title, b.title)
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
    for catalog in (a, b):
        catalog.refuse_codes(alike, "diff")
    meter = Meter(progress, sum(8 * math.prod(shape) for shape in alike.values()))
    for name, shape in alike.items():
        report.tensors[name] = _compare(_value(a, name), _value(b, name), shape, threads, meter)
        log.debug("diff of %s: %s", name, report.tensors[name])
    return report


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
    one: Source | QuantizedTensor | Array,
    other: Source | QuantizedTensor | Array,
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


def _value(catalog: Catalog, name: str) -> Source | QuantizedTensor | Array:
    """A tensor as a source; quantized, packed and complex ones are loaded whole."""
    row = catalog.about(name).element
    if row is None or row.packed or row.complex:
        return catalog.array(name)
    return catalog.source(name)


def _equal(one: Source, other: Source) -> bool:
    """Whether the bytes are equal."""
    pieces = zip(source_pieces(one), source_pieces(other), strict=True)
    return all(a == b for a, b in pieces)


def _reader(value: Source | QuantizedTensor | Array, count: int) -> _Read:
    if isinstance(value, Source):
        source = value
        return lambda begin, size: values(source, begin, size)
    flat = np.ascontiguousarray(_whole(value)).reshape(count)
    return lambda begin, size: flat[begin : begin + size].astype(np.float64)


def _whole(value: Source | QuantizedTensor | Array) -> Array:
    if isinstance(value, Source):
        return values(value, 0, math.prod(value.shape)).reshape(value.shape)
    return value.dequantize() if isinstance(value, QuantizedTensor) else value
