"""Differences between two checkpoints: names, shapes, dtypes and values, across formats, dtypes and quantization."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...base import dtypes, log
from ...base.arrays import Array
from ...base.gc_pause import paused
from ...base.scheme import INT8
from ...base.selecting import Patterns, select
from ...engine.ahead.spans import Spans
from ...engine.ahead.stream import TensorStream
from ...engine.codes.pieces import Meter
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source, of_array
from ...engine.read.tensors import Tensors
from ...engine.run.progress import Progress
from ...engine.run.threads import check_threads
from ...engine.run.weight_file import is_remote
from ..sources import executors, sources
from ..sources.catalog import Catalog, Given
from ..sources.codec import decode, encode
from ..sources.description import TensorDescription
from ..sources.executors import Executor
from ..sources.plan import TensorPiece, open_piece
from .diff_blocks import NUMBERS, compare
from .diff_report import DiffReport, TensorDiff

# The tensors to compare: shapes by name.
_Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
# The columns of both checkpoints, see `Catalog.plain`.
_Columns: TypeAlias = tuple[Tensors | None, Tensors | None]


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

    Quantized tensors are dequantized before they are compared. Integers are compared exactly, also with floats.

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
        UnsupportedError: a tensor holds codes of a family that is not dequantized, such as EXL2, or stored codes; or
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
    executors.check_executor(executor)
    with Catalog.of(a, storage_options) as one, Catalog.of(b, storage_options) as other:
        report = DiffReport(one.title, other.title)
        with paused(len(one) + len(other)):
            columns = one.plain(), other.plain()
            in_a, in_b = list(one), list(other)
            if only is not None or drop is not None:
                known = set(in_a)
                chosen = set(select([*in_a, *(name for name in in_b if name not in known)], only, drop))
                in_a, in_b = ([name for name in names if name in chosen] for names in (in_a, in_b))
            shapes = _structure((one, in_a), (other, in_b), columns, report)
        for catalog in (one, other):
            catalog.refuse_codes(shapes, "diff")
        if executor is None:
            report.tensors = _values(one, other, columns, shapes, threads, progress)
        else:
            report.tensors = _in_pieces(one, other, shapes, executor, threads, progress)
        return report


def _structure(
    a: tuple[Catalog, list[str]], b: tuple[Catalog, list[str]], columns: _Columns, report: DiffReport
) -> _Shapes:
    """Compares names, dtypes and shapes, and returns the shapes of the tensors whose values can be compared.

    Args:
        a: the first checkpoint, and the names of its tensors.
        b: the second.
        columns: of both, see `Catalog.plain`.
        report: gets what differs.
    """
    (one, in_a), (other, in_b) = a, b
    known_a, known_b = set(in_a), set(in_b)
    report.only_a = [name for name in in_a if name not in known_b]
    report.only_b = [name for name in in_b if name not in known_a]
    names = [name for name in in_a if name in known_b]
    alike = {}
    described = (_described(*given, names) for given in zip((one, other), columns, strict=True))
    for name, (dtype, shape), (dtype_b, shape_b) in zip(names, *described, strict=True):
        if dtype != dtype_b:
            report.dtypes[name] = dtype, dtype_b
        if shape != shape_b:
            report.shapes[name] = shape, shape_b
        else:
            alike[name] = shape
    return alike


def _described(catalog: Catalog, columns: Tensors | None, names: list[str]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Dtypes, as messages have them, and shapes of tensors."""
    if columns is None:
        return ((_dtype(about), about.shape) for about in map(catalog.about, names))
    some = columns.named(names)
    return zip([dtypes.BY_NUMBER[number].name for number in some.columns.numbers], some.shapes, strict=True)


def _values(
    a: Catalog, b: Catalog, columns: _Columns, shapes: _Shapes, threads: int | None, progress: Progress
) -> dict[str, TensorDiff]:
    """Compare tensors of the same shapes."""
    meter = Meter(progress, sum(map(_size, shapes.values())))
    differences: dict[str, TensorDiff | None] = dict.fromkeys(shapes)
    in_a, in_b = columns
    if in_a is not None and in_b is not None and not (in_a.remote or in_b.remote):
        names = list(shapes)
        spans_a, spans_b = (Spans.of(tensors.named(names)) for tensors in (in_a, in_b))
        differences = dict(zip(names, compare(spans_a, spans_b, [*shapes.values()], threads, meter), strict=True))
    names = [name for name, difference in differences.items() if difference is None]
    with _Reader(a, names, threads) as read_a, _Reader(b, names, threads) as read_b:
        for batch in _batches(names, shapes):
            pairs = {name: _pair(name, read_a, read_b) for name in batch}
            differences.update(_compare_sources(pairs, shapes, threads, meter))
            del pairs  # before the next tensors are decoded
    return {name: difference for name, difference in differences.items() if difference is not None}


def _compare_sources(
    pairs: Mapping[str, tuple[Source, Source]], shapes: _Shapes, threads: int | None, meter: Meter
) -> dict[str, TensorDiff | None]:
    a, b = (_spans(side) for side in zip(*pairs.values(), strict=True))
    differences = dict(zip(pairs, compare(a, b, [shapes[name] for name in pairs], threads, meter), strict=True))
    for name, difference in differences.items():
        log.debug("diff of %s: %s", name, difference)
    return differences


def _batches(names: Iterable[str], shapes: _Shapes) -> Iterator[list[str]]:
    """Divide tensors into batches that are in memory together: large tensors alone, small ones up to a block."""
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


def _size(shape: tuple[int, ...]) -> int:
    """Bytes of a tensor as float64."""
    return 8 * math.prod(shape)


def _in_pieces(
    a: Catalog,
    b: Catalog,
    shapes: _Shapes,
    executor: Executor,
    threads: int | None,
    progress: Progress,
) -> dict[str, TensorDiff]:
    against = sources.Sources(b, executors.EXECUTOR)
    sizes = {name: _size(shape) for name, shape in shapes.items()}
    plain = executors.by_tensor(
        run,
        lambda names, read: DiffPiece(operation="diff", names=names, sources=read, against=against.of(names)),
        a,
        sizes,
        executor,
        threads=threads,
        progress=progress,
    )
    return {name: decode(TensorDiff, plain[name], "invalid result") for name in sizes}


@dataclass(frozen=True, eq=False, kw_only=True)
class DiffPiece(TensorPiece):
    """A piece of `diff`."""

    against: tuple[sources.Source, ...]


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compare the tensors of a piece; see `run_piece`."""
    with (
        open_piece(DiffPiece, piece, storage_options) as (decoded, a),
        sources.opened(decoded.against, decoded.names, storage_options) as b,
    ):
        shapes = {name: a.about(name).shape for name in decoded.names}
        return {"tensors": encode(_values(a, b, (a.plain(), b.plain()), shapes, threads, None))}


def _dtype(about: TensorDescription) -> str:
    return "int8 with scale" if about.scheme == INT8 else about.dtype


# ---- tensors that are not plain, or not in local files ----


class _Reader:
    """Read tensors of a checkpoint in the given order; tensors behind a network are read ahead.

    Args:
        threads: None chooses automatically.
    """

    def __init__(self, catalog: Catalog, names: Sequence[str], threads: int | None) -> None:
        self._catalog, self._threads = catalog, threads
        self._stream: TensorStream | None = None
        if len(catalog.checkpoints) == 1 and not catalog.in_memory and any(map(is_remote, catalog.weight_files)):
            ahead = [name for name in names if not _is_encoded(catalog.about(name))]
            self._stream = catalog.checkpoints[0].stream(ahead, order="given", threads=threads)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def __call__(self, name: str) -> Source | Array:
        """Return the next tensor: a source of plain bytes, or an array of decoded or complex numbers."""
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
    """True for tensors that are decoded to float32 when they are read, and for dtypes that weights do not have."""
    return about.element is None or about.element.packed


def _pair(name: str, a: _Reader, b: _Reader) -> tuple[Source, Source]:
    """The next tensor of both checkpoints; complex numbers as their real and imaginary parts."""
    values = [a(name), b(name)]
    if any(isinstance(value, np.ndarray) and value.dtype.kind == "c" for value in values):
        arrays = (
            reader.whole(name) if isinstance(value, Source) else value
            for reader, value in zip((a, b), values, strict=True)
        )
        values = [np.asarray(array, np.complex128).reshape(-1).view(np.float64) for array in arrays]
    x, y = (value if isinstance(value, Source) else _as_source(name, value) for value in values)
    return x, y


def _as_source(name: str, array: Array) -> Source:
    row = dtypes.BY_NAME.get(array.dtype.name)
    return of_array(name, array.astype(np.float64) if row is None or row.packed else array)


def _spans(sources: Sequence[Source]) -> Spans:
    files = {file: k for k, file in enumerate(dict.fromkeys(source.file for source in sources))}
    numbers = np.array([source.row.number for source in sources], np.uint8)
    return Spans(
        [*files],
        np.array([files[source.file] for source in sources]),
        np.array([source.offset for source in sources]),
        np.array([source.size for source in sources]),
        numbers,
        numbers,
    )
