"""Compare two checkpoints: names, shapes, dtypes and values, across formats, dtypes and quantization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from ...base.cached import cached_property
from ...base.gc_pause import paused
from ...base.layout import shorten, table
from ...base.names import layer_of, natural_key
from ...base.results import Report, Row
from ...base.scheme import INT8
from ...base.selecting import Patterns, select
from ...base.text import clip, more, plural, printable, show
from ...engine.run.progress import Progress
from ...engine.run.threads import check_threads
from ...errors import exported, public
from ..sources.catalog import Catalog, Given, TensorDescription
from ..sources.executors import Executor, check_executor, pieces_of, run_pieces
from . import diff_values
from .diff_values import Shape, common_shape
from .stats import TensorStats, measure


@exported()
class TensorDiff(NamedTuple):
    """The difference between the values of two tensors with equal shapes.

    Two NaNs, or two infinities with equal sign, count as equal. If an element is finite in only one tensor, or if
    infinities differ in sign, the pair counts as ``unequal`` and ``nonfinite`` and is excluded from all other numbers.

    Attributes:
        max: largest absolute difference. Exact for integers, and an int if both tensors hold integers that differ.
        index: index of the largest difference, with an integer per axis; None if nothing differs.
        rms: root mean square of the differences.
        cosine: cosine similarity of the tensors as vectors; 1 if they are equal, nan if either tensor is zero.
        unequal: number of elements that differ.
        nonfinite: number of differing elements with a NaN or infinity.
        change: L2 norm of the differences.
        norm: L2 norm of the tensor of ``a``; None if nothing differs.
        relative_change: ``change / norm``; inf if the tensor of ``a`` is zero.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> a, b = {"x": np.float32([1, 2])}, {"x": np.float32([1, 2.5])}
        >>> safeload.diff(a, b).tensors["x"].max
        0.5
    """

    max: float
    index: tuple[int, ...] | None  # type: ignore[assignment]
    rms: float
    cosine: float
    unequal: int
    nonfinite: int
    change: float = 0.0
    norm: float | None = None

    @property
    def relative_change(self) -> float:
        return _ratio(self.change, self.norm)


@exported()
class LayerDiff(NamedTuple):
    """The difference between two layers: their tensors with equal shapes, taken together.

    Attributes:
        tensors: number of tensors.
        unequal: number of tensors that differ.
        relative_change: L2 norm of all differences by that of all values of ``a``.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> base = {"h.0.weight": np.float32([3, 4]), "h.0.bias": np.zeros(2)}
        >>> tuned = {**base, "h.0.weight": np.float32([3, 5])}
        >>> safeload.diff(base, tuned).layers["h.0"]
        LayerDiff(tensors=2, unequal=1, relative_change=0.2)
    """

    tensors: int
    unequal: int
    relative_change: float


def _ratio(change: float, norm: float | None) -> float:
    if not change:
        return 0.0
    return change / norm if norm else math.inf


# Sort keys of rows, by the column to sort by.
_ORDERS: dict[str, Callable[[tuple[str, TensorDiff]], Any]] = {
    "name": lambda row: natural_key(row[0]),
    "max": lambda row: -row[1].max,
    "rms": lambda row: -row[1].rms,
    "relative": lambda row: -row[1].relative_change,
    "cosine": lambda row: -2.0 if math.isnan(row[1].cosine) else row[1].cosine,
    "unequal": lambda row: -row[1].unequal,
}


def _cells(difference: TensorDiff) -> tuple[str, ...]:
    """Return a row of the table, without the name."""
    cosine = f"{difference.cosine:.6f}"
    return (
        *(f"{value:.3g}" for value in (difference.max, difference.rms, difference.relative_change)),
        ">0.999999" if cosine == "1.000000" and difference.change else cosine,
        f"{difference.unequal:,}",
        f"{difference.nonfinite:,}",
    )


def _by_name(differences: Mapping[str, TensorDiff]) -> dict[str, dict[str, Any]]:
    return {name: {**d._asdict(), "relative_change": d.relative_change} for name, d in differences.items()}


def _near(difference: TensorDiff, tolerance: float) -> bool:
    return difference.max <= tolerance and not difference.nonfinite


@exported()
class DiffReport(Report):
    """The result of `safeload.diff`. ``str()`` is a table.

    It has a row per tensor of either checkpoint, whose ``status`` is "equal", "different", "only in a", "only in b" or
    "other shape". Numbers are those of the common rows for another shape, and nan for tensors that were not compared.
    dtype, shape and nbytes describe the tensor in ``b``, if it is there.

    Attributes:
        a: title of the first checkpoint, as in messages.
        b: title of the second checkpoint.
        only_a: names found only in ``a``.
        only_b: names found only in ``b``.
        shapes: both shapes of each tensor that differs in shape.
        common_rows: `TensorDiff` of the first rows, for each tensor that differs only in the size of its first axis.
        dtypes: both dtypes of each tensor that differs in dtype.
        tensors: `TensorDiff` of every tensor with equal shapes in both checkpoints.
        described: dtype, shape and bytes of every tensor: in ``b``, or in ``a`` if ``b`` lacks it.

    Example:
        >>> import safeload
        >>> safeload.convert("tiny-llama", "half.safetensors", dtype="float16")
        <ConvertReport 'half.safetensors': safetensors, 30 tensors, 248 KiB>
        >>> report = safeload.diff("tiny-llama", "half.safetensors")
        >>> report.same, report.within(0.001)
        (False, True)
    """

    _columns = (
        *("name", "dtype", "shape", "nbytes", "status"),
        *("max", "rms", "relative_change", "cosine", "unequal", "nonfinite"),
    )
    _notebook = (*_columns[:3], *_columns[4:10])
    _json = (
        *("same", "a", "b", "only_a", "only_b", "shapes", "dtypes"),
        ("tensors", lambda report: _by_name(report.tensors)),
        ("common_rows", lambda report: _by_name(report.common_rows)),
        "layers",
    )

    def __init__(self, a: str, b: str) -> None:
        self.a = a
        self.b = b
        self.only_a: list[str] = []
        self.only_b: list[str] = []
        self.shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.dtypes: dict[str, tuple[str, str]] = {}
        self.tensors: dict[str, TensorDiff] = {}
        self.described: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self.common_rows: dict[str, TensorDiff] = {}
        self.norms: Mapping[str, float] = {}  # internal: of the equal tensors in layers with differences

    @cached_property
    def layers(self) -> dict[str, LayerDiff]:
        """`LayerDiff` of every layer, by prefix, such as "model.layers.0"; "" holds the tensors outside layers."""
        layers: dict[str, list[str]] = {}
        for name in self.tensors:
            layers.setdefault(layer_of(name), []).append(name)
        summaries = {}
        for layer, names in sorted(layers.items(), key=lambda item: natural_key(item[0])):
            rows = [self.tensors[name] for name in names]
            norms = (
                self.norms.get(name, 0.0) if row.norm is None else row.norm
                for name, row in zip(names, rows, strict=True)
            )
            relative = _ratio(math.hypot(*(row.change for row in rows)), math.hypot(*norms))
            summaries[layer] = LayerDiff(len(names), sum(row.unequal > 0 for row in rows), relative)
        return summaries

    @property
    def same(self) -> bool:
        """True if names, shapes, dtypes and values are equal."""
        return self.within(0.0) and not self.dtypes

    def within(self, tolerance: float) -> bool:
        """Return True if names and shapes are equal and values differ by at most ``tolerance``. Dtypes may differ."""
        structure = self.only_a or self.only_b or self.shapes
        return not structure and all(_near(difference, tolerance) for difference in self.tensors.values())

    @property
    def unequal(self) -> dict[str, TensorDiff]:
        """Tensors with different values, largest difference first."""
        rows = [(name, d) for name, d in self.tensors.items() if d.unequal]
        return dict(sorted(rows, key=lambda row: (-row[1].nonfinite, -row[1].max)))

    def lines(
        self,
        columns: int | None = 80,
        rows: int | None = None,
        sort: str | None = None,
        tolerance: float | None = None,
    ) -> list[str]:
        """Return the report as lines of text.

        Args:
            columns: width in characters; None never shortens names.
            rows: maximum number of rows per list, followed by a count of the rest; None shows all.
            sort: order of tensors with different values: "name", or worst first by "max", "rms", "cosine" or
                "unequal". None keeps the order of `unequal`.
            tolerance: the last line says if the checkpoints agree `within` the tolerance; None requires `same`.

        Returns:
            Lines without line ends.
        """
        lines = [clip(f"a: {printable(self.a)}", columns), clip(f"b: {printable(self.b)}", columns)]

        def block(title: str, entries: list[str]) -> None:
            if entries:
                lines.extend(("", title))
                room = None if columns is None else columns - 2
                lines.extend(f"  {entry}" for entry in (*shorten(entries[:rows], room), *more(len(entries), rows)))

        block("only in a", [printable(name) for name in self.only_a])
        block("only in b", [printable(name) for name in self.only_b])
        block("different shape", [self._shapes_of(name) for name in self.shapes])
        pairs: dict[tuple[str, str], list[str]] = {}
        for name, pair in self.dtypes.items():
            pairs.setdefault(pair, []).append(name)
        block(
            "different dtype",
            [f"{a} and {b}: {plural(len(names), 'tensor')}, {printable(names[0])}" for (a, b), names in pairs.items()],
        )
        unequal = self.unequal
        if sort is not None:
            unequal = dict(sorted(unequal.items(), key=_ORDERS[sort]))
        if unequal:
            cells: list[tuple[str, ...]] = [(printable(name), *_cells(d)) for name, d in [*unequal.items()][:rows]]
            header: tuple[str, ...] = ("different values", "max", "rms", "relative", "cosine", "unequal", "not finite")
            if not any(d.nonfinite for d in unequal.values()):
                header, cells = header[:-1], [row[:-1] for row in cells]
            lines += ["", *table(header, cells, right=frozenset(range(1, len(header))), columns=columns)]
            lines += [*more(len(unequal), rows), *self._layer_lines(columns, rows)]
        lines.append("")
        lines.append(self._verdict(tolerance))
        return lines

    def _shapes_of(self, name: str) -> str:
        """Describe a tensor with two shapes, and the difference of its common rows."""
        a, b = self.shapes[name]
        text = f"{printable(name)}: {list(a)} and {list(b)}"
        common = self.common_rows.get(name)
        if common is None:
            return text
        rows = f"the first {min(a[0], b[0]):,} rows"
        if not common.unequal:
            return f"{text}; {rows} are equal"
        return f"{text}; {rows}: max {common.max:.3g}, relative {common.relative_change:.3g}"

    def _layer_lines(self, columns: int | None, rows: int | None) -> list[str]:
        """Return the table of layers, if there are several."""
        changed = [(layer, row) for layer, row in self.layers.items() if row.unequal]
        if sum(layer != "" for layer in self.layers) < 2 or not changed:
            return []
        cells = [
            (
                printable(layer) or "(outside layers)",
                f"{row.relative_change:.3g}",
                f"{row.unequal:,} of {row.tensors:,}",
            )
            for layer, row in changed[:rows]
        ]
        lines = table(("by layer", "relative", "tensors"), cells, right=frozenset((1, 2)), columns=columns)
        return ["", *lines, *more(len(changed), rows)]

    def _verdict(self, tolerance: float | None) -> str:
        """Return the last line, which agrees with `same` or, with a tolerance, with `within`."""
        count = plural(len(self.tensors), "tensor")
        if self.same:
            return f"the same: {count}"
        unequal = self.unequal
        if tolerance is not None and self.within(tolerance):
            if not unequal:
                differ = "differs" if len(self.dtypes) == 1 else "differ"
                return f"within {tolerance:g}: {count} with equal values; {len(self.dtypes):,} {differ} in dtype"
            name, largest = next(iter(unequal.items()))
            worst = f"the largest difference is {largest.max:.3g} ({printable(name)})"
            return f"within {tolerance:g}: {count}; {len(unequal):,} not equal, {worst}"
        far = sum(not _near(difference, tolerance or 0.0) for difference in self.tensors.values())
        faults = [
            (far, "differs in value" if tolerance is None else f"differs by more than {tolerance:g}"),
            (len(self.only_a), "only in a"),
            (len(self.only_b), "only in b"),
            (len(self.shapes), "differs in shape"),
            (0 if tolerance is not None else len(self.dtypes), "differs in dtype"),
        ]
        parts = (
            f"{number:,} {fault if number == 1 else fault.replace('differs', 'differ')}"
            for number, fault in faults
            if number
        )
        return f"different: {', '.join(parts)}; {count} compared"

    def __repr__(self) -> str:
        return f"<DiffReport {show(self.a)}, {show(self.b)}: {self._verdict(None)}>"

    def _values(self) -> Iterable[Any]:
        only_b = frozenset(self.only_b)
        for name, (dtype, shape, nbytes) in self.described.items():
            d = self.tensors.get(name, self.common_rows.get(name))
            if name in self.shapes:
                status = "other shape"
            elif d is not None:
                status = "different" if d.unequal else "equal"
            else:
                status = "only in b" if name in only_b else "only in a"
            numbers = [math.nan] * 4 if d is None else map(float, (d.max, d.rms, d.relative_change, d.cosine))
            counts = (0, 0) if d is None else (d.unequal, d.nonfinite)
            yield name, dtype, [*shape], nbytes, status, *numbers, *counts

    def _about(self) -> Sequence[str]:
        return [f"{self.a} and {self.b}", self._verdict(None)]

    def _notable(self, rows: list[Row]) -> list[Row]:
        return [row for row in rows if row["status"] != "equal"]

    to_json = Report.to_dict


@public
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
    """Compare two checkpoints tensor by tensor, holding only a few blocks (or one quantized tensor) in memory.

    Tensors that differ only in the size of their first axis, such as embeddings with added tokens, are compared up to
    the last common row.

    Quantized tensors are dequantized before they are compared. Integers are compared exactly, even with floats.

    Args:
        a: path or URL of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays and quantized
            tensors.
        b: the checkpoint to compare with, in any of these forms.
        only: shell pattern, or several, of the names to compare, such as ``"model.layers.0.*"``; None compares all.
        drop: shell pattern, or several, of names to skip.
        storage_options: options of the filesystems behind URLs, see `open`.
        executor: compares groups of tensors in other processes or on other machines with access to the same files: any
            object with the ``submit`` of `concurrent.futures.Executor`, such as Dask's ``Client``.
            The report is identical to that of a single process.
        threads: number of threads. None chooses automatically; pieces of an executor get a single thread.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total), with 8 bytes for each value.

    Returns:
        The report. ``same`` and ``within`` summarize it.

    Raises:
        TensorNotFoundError: a pattern matches no name in either checkpoint.
        UnsupportedError: a tensor holds codes that cannot be dequantized, such as EXL2, or was opened as stored; or
            see `safeload.open`.
        ValueError: ``executor`` is given, but tensors are in memory.
        FormatError: a file changed before an executor could read it; or see `safeload.open`.
        OSError: see `safeload.open`.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.diff({"w": np.float32([1, 2])}, {"w": np.float64([1, 2.5])}).tensors["w"].max
        0.5
    """
    check_threads(threads)
    check_executor(executor)
    with Catalog.of(a, storage_options) as catalog_a, Catalog.of(b, storage_options) as catalog_b:
        catalogs = catalog_a, catalog_b
        report = DiffReport(catalog_a.title, catalog_b.title)
        with paused(len(catalog_a) + len(catalog_b)):
            shapes = _compare_structure(report, catalogs, only, drop)
        for catalog in catalogs:
            catalog.refuse_codes(shapes, "diff")
        rows: Mapping[str, Sequence[Any]]
        if executor is None:
            rows = diff_values.compare_values(*catalogs, shapes, threads=threads, progress=progress)
        else:
            sizes = {name: 8 * count for name, count in zip(shapes, map(math.prod, shapes.values()), strict=True)}
            pieces = pieces_of(sizes, *catalogs, operation="diff")
            results = run_pieces(diff_values.run, pieces, executor, threads=threads, progress=progress)
            rows = {
                name: (largest, None if index is None else tuple(index), *numbers)
                for name, (largest, index, *numbers) in results.get("differences", {}).items()
            }
        with paused(len(rows)):
            names = [name for name in shapes if name in rows]
            fields = map(rows.__getitem__, names)
            differences = dict(zip(names, map(tuple.__new__, repeat(TensorDiff), fields), strict=True))
        report.common_rows = {name: differences.pop(name) for name in report.shapes if name in differences}
        report.tensors = differences
        changed = {layer_of(name) for name, difference in differences.items() if difference.unequal}
        equal = [name for name, row in differences.items() if not row.unequal and layer_of(name) in changed]
        if equal:
            statistics = measure(catalog_a, equal, executor=executor, threads=threads)  # complex tensors have none
            report.norms = {name: _norm(row) for name, row in statistics.items()}
        return report


def _norm(row: TensorStats) -> float:
    """Return the L2 norm of the finite values of a tensor."""
    finite = row.count - row.nan - row.inf
    return math.sqrt(finite) * math.hypot(row.mean, row.std) if finite else 0.0


def _compare_structure(
    report: DiffReport, catalogs: tuple[Catalog, Catalog], only: Patterns, drop: Patterns
) -> dict[str, Shape]:
    """Report differences in names, dtypes and shapes; return the common shapes of the tensors to compare by value."""
    in_a, in_b = map(list, catalogs)
    if only is not None or drop is not None:
        selected = set(select([*dict.fromkeys((*in_a, *in_b))], only, drop))
        in_a, in_b = ([name for name in names if name in selected] for names in (in_a, in_b))
    a, b = (catalog.descriptions(names) for catalog, names in zip(catalogs, (in_a, in_b), strict=True))
    report.only_a = [name for name in in_a if name not in b]
    report.only_b = [name for name in in_b if name not in a]
    described = (*b.values(), *map(a.__getitem__, report.only_a))
    report.described = {about.name: (about.code, about.shape, about.nbytes) for about in described}
    shapes = {}
    for name, x in a.items():
        if name not in b:
            continue
        y = b[name]
        if x.dtype != y.dtype or x.scheme != y.scheme:
            report.dtypes[name] = _dtype(x), _dtype(y)
        shape: Shape | None = x.shape
        if x.shape != y.shape:
            report.shapes[name] = x.shape, y.shape
            shape = common_shape(x.shape, y.shape)
        if shape is not None:
            shapes[name] = shape
    return shapes


def _dtype(about: TensorDescription) -> str:
    return "int8 with scale" if about.scheme == INT8 else about.dtype
