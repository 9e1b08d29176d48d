"""Compare two checkpoints: names, shapes, dtypes and values, across formats, dtypes and quantization."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ...base import dtypes, log
from ...base.arrays import Array
from ...base.gc_pause import paused
from ...base.names import layer_of
from ...base.scheme import INT8
from ...base.selecting import Patterns, select
from ...engine.ahead.spans import SpanColumns, Spans
from ...engine.ahead.stream import TensorStream
from ...engine.codes.pieces import Meter
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source, of_array
from ...engine.read.tensors import Tensors
from ...engine.run.progress import Progress
from ...engine.run.threads import check_threads
from ...engine.run.weight_file import is_remote
from ...errors import public
from ..sources import executors
from ..sources.catalog import Catalog, Given
from ..sources.description import TensorDescription
from ..sources.executors import Executor
from ..sources.reading import opened, pieces_of, run_pieces
from .diff_blocks import NUMBERS, compare
from .diff_report import DiffReport, TensorDiff
from .stats import measure, measure_in_pieces

_Shape: TypeAlias = tuple[int, ...]


class _Checkpoint(NamedTuple):
    """One side of a comparison."""

    catalog: Catalog
    columns: Tensors | None  # its tensors, if all are plain; see `Catalog.plain`

    @classmethod
    def of(cls, catalog: Catalog) -> _Checkpoint:
        return cls(catalog, catalog.plain())

    def described(self, names: list[str]) -> Iterable[tuple[str, _Shape]]:
        """Return the dtype, as in messages, and the shape of each tensor."""
        if self.columns is None:
            return ((_dtype(about), about.shape) for about in map(self.catalog.about, names))
        tensors = self.columns.named(names)
        return zip([dtypes.BY_NUMBER[number].name for number in tensors.columns.numbers], tensors.shapes, strict=True)

    def shapes(self, names: list[str]) -> Iterable[_Shape]:
        """Return the shape of each tensor."""
        if self.columns is None:
            return (self.catalog.about(name).shape for name in names)
        return self.columns.named(names).shapes

    def rows(self, names: list[str]) -> dict[str, tuple[str, _Shape, int]]:
        """Return dtype code, shape and bytes of each tensor."""
        if self.columns is None:
            return {about.name: (about.code, about.shape, about.nbytes) for about in map(self.catalog.about, names)}
        tensors = self.columns.named(names)
        elements = [dtypes.BY_NUMBER[number] for number in tensors.columns.numbers]
        columns = zip(names, elements, tensors.shapes, strict=True)
        return {name: (element.code, shape, element.nbytes(math.prod(shape))) for name, element, shape in columns}


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
    executors.check_executor(executor)
    with Catalog.of(a, storage_options) as catalog_a, Catalog.of(b, storage_options) as catalog_b:
        report = DiffReport(catalog_a.title, catalog_b.title)
        with paused(len(catalog_a) + len(catalog_b)):
            sides = _Checkpoint.of(catalog_a), _Checkpoint.of(catalog_b)
            shapes = _compare_structure(sides, only, drop, report)
        for catalog in (catalog_a, catalog_b):
            catalog.refuse_codes(shapes, "diff")
        if executor is None:
            differences = _compare_values(*sides, shapes, report.shapes, threads=threads, progress=progress)
        else:
            differences = _in_pieces(catalog_a, catalog_b, shapes, executor, threads=threads, progress=progress)
        for name in report.shapes:
            if name in differences:
                report.common_rows[name] = differences.pop(name)
        report.tensors = differences
        report.norms = _norms(catalog_a, _equal_among_unequal(differences), executor, threads)
        return report


def _equal_among_unequal(differences: Mapping[str, TensorDiff]) -> list[str]:
    """Return the equal tensors in layers with differences."""
    changed = {layer_of(name) for name, difference in differences.items() if difference.unequal}
    if not changed:
        return []
    return [name for name, row in differences.items() if not row.unequal and layer_of(name) in changed]


def _norms(catalog: Catalog, names: list[str], executor: Executor | None, threads: int | None) -> dict[str, float]:
    """Return the L2 norms of tensors; complex tensors have none."""
    if not names:
        return {}
    if executor is None:
        statistics = measure(catalog, names, False, threads)
    else:
        statistics = measure_in_pieces(catalog, names, False, executor, threads=threads, progress=None)
    norms = {}
    for name, row in statistics.items():
        finite = row.count - row.nan - row.inf
        norms[name] = math.sqrt(finite) * math.hypot(row.mean, row.std) if finite else 0.0
    return norms


def _common_shape(a: _Shape, b: _Shape) -> _Shape | None:
    """Return the shape of the rows that tensors have in common; None if they differ beyond the first axis."""
    if a == b:
        return a
    common = a and b and a[1:] == b[1:] and (min(a[0], b[0]), *a[1:])
    return common if common and common[0] else None


def _compare_structure(
    sides: tuple[_Checkpoint, _Checkpoint], only: Patterns, drop: Patterns, report: DiffReport
) -> dict[str, _Shape]:
    """Report differences in names, dtypes and shapes; return the common shapes of the tensors to compare by value."""
    in_a, in_b = (list(side.catalog) for side in sides)
    if only is not None or drop is not None:
        known = set(in_a)
        selected = set(select([*in_a, *(name for name in in_b if name not in known)], only, drop))
        in_a, in_b = ([name for name in names if name in selected] for names in (in_a, in_b))
    known_a, known_b = set(in_a), set(in_b)
    report.only_a = [name for name in in_a if name not in known_b]
    report.only_b = [name for name in in_b if name not in known_a]
    names = [name for name in in_a if name in known_b]
    report.described = sides[1].rows(in_b) | sides[0].rows(report.only_a)
    shapes = {}
    described = (side.described(names) for side in sides)
    for name, (dtype_a, shape_a), (dtype_b, shape_b) in zip(names, *described, strict=True):
        if dtype_a != dtype_b:
            report.dtypes[name] = dtype_a, dtype_b
        if shape_a != shape_b:
            report.shapes[name] = shape_a, shape_b
        common = _common_shape(shape_a, shape_b)
        if common is not None:
            shapes[name] = common
    return shapes


def _dtype(about: TensorDescription) -> str:
    return "int8 with scale" if about.scheme == INT8 else about.dtype


def _compare_values(
    a: _Checkpoint,
    b: _Checkpoint,
    shapes: Mapping[str, _Shape],
    resized: Collection[str],  # tensors with other shapes
    *,
    threads: int | None,
    progress: Progress,
) -> dict[str, TensorDiff]:
    """Compare tensors up to common shapes: plain tensors of local files together, the rest in batches."""
    meter = Meter(progress, 8 * sum(map(math.prod, shapes.values())))
    differences: dict[str, TensorDiff | None] = dict.fromkeys(shapes)
    columns = [side.columns for side in (a, b) if side.columns is not None and not side.columns.remote]
    if len(columns) == 2:
        names = [name for name in shapes if name not in resized]
        spans_a, spans_b = (Spans.of(tensors.named(names)) for tensors in columns)
        compared = compare(spans_a, spans_b, [shapes[name] for name in names], threads, meter)
        differences.update(zip(names, compared, strict=True))
    names = [name for name, difference in differences.items() if difference is None]
    with _Reader(a.catalog, names, threads) as read_a, _Reader(b.catalog, names, threads) as read_b:
        for batch in _batches(names, shapes):
            pairs = {name: _pair(name, read_a, read_b, shapes[name]) for name in batch}
            differences.update(_compare_sources(pairs, shapes, threads, meter))
            del pairs  # before the next tensors are decoded
    return {name: difference for name, difference in differences.items() if difference is not None}


def _in_pieces(
    a: Catalog,
    b: Catalog,
    shapes: Mapping[str, _Shape],
    executor: Executor,
    *,
    threads: int | None,
    progress: Progress,
) -> dict[str, TensorDiff]:
    sizes = {name: 8 * count for name, count in zip(shapes, map(math.prod, shapes.values()), strict=True)}
    pieces = pieces_of(sizes, a, b, operation="diff")
    rows = run_pieces(run, pieces, executor, threads=threads, progress=progress).get("differences", {})
    names = [name for name in shapes if name in rows]
    plain = [
        (largest, None if index is None else tuple(index), *numbers)
        for largest, index, *numbers in map(rows.__getitem__, names)
    ]
    return dict(zip(names, map(tuple.__new__, repeat(TensorDiff), plain), strict=True))


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compare the tensors of a piece; see `run_piece`."""
    with opened(piece, storage_options, ("sources", "against")) as (names, catalogs):
        a, b = map(_Checkpoint.of, catalogs)
        with paused(len(names)):
            of_a, of_b = list(a.shapes(names)), list(b.shapes(names))
            resized = {name for name, shape, other in zip(names, of_a, of_b, strict=True) if shape != other}
            common = zip(names, map(_common_shape, of_a, of_b) if resized else of_a, strict=True)
            shapes = {name: shape for name, shape in common if shape is not None}
        differences = _compare_values(a, b, shapes, resized, threads=threads, progress=None)
        return {"differences": {name: [*row] for name, row in differences.items()}}


# ---- tensors that are not plain, or not in local files ----


def _compare_sources(
    pairs: Mapping[str, tuple[Source, Source]], shapes: Mapping[str, _Shape], threads: int | None, meter: Meter
) -> dict[str, TensorDiff | None]:
    a, b = (_spans(side) for side in zip(*pairs.values(), strict=True))
    differences = dict(zip(pairs, compare(a, b, [shapes[name] for name in pairs], threads, meter), strict=True))
    for name, difference in differences.items():
        log.debug("diff of %s: %s", name, difference)
    return differences


def _batches(names: Iterable[str], shapes: Mapping[str, _Shape]) -> Iterator[list[str]]:
    """Divide tensors into batches to hold in memory together: a large tensor alone, small tensors up to a block."""
    batch: list[str] = []
    total = 0
    for name in names:
        count = math.prod(shapes[name])
        if batch and total + count > NUMBERS:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += count
    if batch:
        yield batch


class _Reader:
    """Read tensors of a checkpoint in the given order; remote tensors are read ahead."""

    def __init__(self, catalog: Catalog, names: Sequence[str], threads: int | None) -> None:
        self._catalog, self._threads = catalog, threads
        self._stream: TensorStream[Any] | None = None
        if len(catalog.checkpoints) == 1 and not catalog.in_memory and any(map(is_remote, catalog.weight_files)):
            ahead = [name for name in names if not _is_encoded(catalog.about(name))]
            self._stream = catalog.checkpoints[0].stream(ahead, order="given", threads=threads)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def __call__(self, name: str) -> Source | Array:
        """Return the next tensor: a source for plain bytes, or an array for decoded or complex numbers."""
        catalog, threads, about = self._catalog, self._threads, self._catalog.about(name)
        if _is_encoded(about):
            return catalog.array(name, threads)
        value: Source | Array | QuantizedTensor
        if self._stream is not None:
            value = next(self._stream)[1]
        elif about.element is not None and about.element.complex:
            value = catalog.array(name, threads)
        else:
            value = catalog.source(name, threads=threads)
            if isinstance(value, Source) and is_remote(value.file):
                value = catalog.array(name, threads)
        return value.dequantize(threads=threads) if isinstance(value, QuantizedTensor) else value

    def whole(self, name: str) -> Array:
        """Return all numbers of a tensor."""
        return self._catalog.array(name, self._threads)


def _is_encoded(about: TensorDescription) -> bool:
    """True if reading the tensor decodes it to float32, or if weight files do not have its dtype."""
    return about.element is None or about.element.packed


def _pair(name: str, a: _Reader, b: _Reader, shape: _Shape) -> tuple[Source, Source]:
    """Return the first rows of the next tensor of both checkpoints, with complex numbers as two parts."""
    values = [_rows(value, shape) for value in (a(name), b(name))]
    if any(isinstance(value, np.ndarray) and value.dtype.kind == "c" for value in values):
        arrays = (
            _rows(reader.whole(name), shape) if isinstance(value, Source) else value
            for reader, value in zip((a, b), values, strict=True)
        )
        values = [np.asarray(array, np.complex128).reshape(-1).view(np.float64) for array in arrays]
    x, y = (value if isinstance(value, Source) else _as_source(name, value) for value in values)
    return x, y


_Value = TypeVar("_Value", Source, Array, Source | Array)


def _rows(value: _Value, shape: _Shape) -> _Value:
    """Return the first rows of a tensor, without a copy."""
    if value.shape == shape:
        return value
    if isinstance(value, Source):
        return value._replace(shape=shape)
    return value[: shape[0]]


def _as_source(name: str, array: Array) -> Source:
    row = dtypes.row_of(array.dtype)
    return of_array(name, array.astype(np.float64) if row is None or row.packed else array)


def _spans(sources: Sequence[Source]) -> Spans:
    files = {file: k for k, file in enumerate(dict.fromkeys(source.file for source in sources))}
    numbers = np.array([source.row.number for source in sources], np.uint8)
    columns = SpanColumns(
        np.array([files[source.file] for source in sources]),
        np.array([source.offset for source in sources]),
        np.array([source.size for source in sources]),
        numbers,
        numbers,
    )
    return Spans([*files], columns)
