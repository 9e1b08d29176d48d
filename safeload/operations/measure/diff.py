"""Differences between two checkpoints: names, shapes, dtypes and values, across formats, dtypes and quantization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...base import dtypes, log
from ...base.arrays import Array
from ...base.gc_pause import paused
from ...base.scheme import INT8
from ...base.selecting import Patterns, select
from ...engine.ahead.stream import TensorStream
from ...engine.codes.pieces import Meter, in_order, numbers, source_pieces, spans, values
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
from . import diff_columns
from .diff_report import DiffReport, TensorDiff
from .diff_values import Sums, sum_up, summary

# Tensors that both have, with their shapes.
_Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
# The columns of both, where they have any.
_Both: TypeAlias = tuple[Tensors | None, Tensors | None]

# Elements that are compared at a time: to call another thread takes as long as to compare 100,000.
_PIECE = 1 << 19

# Reads `size` elements from `begin`, as float32, float64 or integers: (begin, size) to array.
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
    a: tuple[Catalog, list[str]], b: tuple[Catalog, list[str]], columns: _Both, report: DiffReport
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
    a: Catalog, b: Catalog, columns: _Both, shapes: _Shapes, threads: int | None, progress: Progress
) -> dict[str, TensorDiff]:
    """Compares tensors of the same shape.

    Args:
        a: the first checkpoint.
        b: the second.
        columns: of both, see `Catalog.plain`.
        shapes: the tensors, and the shape of each.
        threads: see `diff`.
        progress: see `diff`.
    """
    meter = Meter(progress, sum(map(_size, shapes.values())))
    found: dict[str, TensorDiff] = {}
    unequal: set[str] = set()
    one, other = columns
    if one is not None and other is not None and not (one.remote or other.remote):
        names = list(shapes)
        found, unequal = diff_columns.compare(one.named(names), other.named(names), threads, meter)
    left = [name for name in shapes if name not in found]
    with _Values(a, left, threads) as in_a, _Values(b, left, threads) as in_b:
        for name in left:
            found[name] = _compare(in_a(name), in_b(name), shapes[name], name in unequal, threads, meter)
            log.debug("diff of %s: %s", name, found[name])
    return {name: found[name] for name in shapes}


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


# ---- one tensor ----


def _compare(
    one: Source | Array,
    other: Source | Array,
    shape: tuple[int, ...],
    unequal: bool,
    threads: int | None,
    meter: Meter,
) -> TensorDiff:
    """Compares two tensors of the same shape, ``unequal`` if it is known that their bytes differ.

    Equal bytes of the same dtype need no arithmetic. Otherwise pieces are compared on several threads, and
    their partial sums are added up. A complex tensor gets one more axis for its real and imaginary parts.
    """
    count = math.prod(shape)
    comparable = not unequal and isinstance(one, Source) and isinstance(other, Source) and one.row is other.row
    if comparable and _equal(one, other):  # type: ignore[arg-type]
        meter.add(8 * count)
        return diff_columns.EQUAL
    axes = shape
    if any(isinstance(value, np.ndarray) and value.dtype.kind == "c" for value in (one, other)):
        shape, count = (*shape, 2), 2 * count  # the real and the imaginary part
        one, other = (
            np.asarray(value, np.complex128).reshape(-1).view(np.float64) for value in (_whole(one), _whole(other))
        )
    weight = 8 * math.prod(axes) // max(1, count)  # of a number for the report of progress
    read_a, read_b = _reader(one, count), _reader(other, count)

    def sums(span: tuple[int, int]) -> Sums:
        part = sum_up(read_a(*span), read_b(*span), span[0])
        meter.add(weight * span[1])
        return part

    return summary(list(in_order(sums, spans(shape, _PIECE), threads, 8 * count)), shape, len(axes))


class _Values:
    """Gives some tensors of a checkpoint, in their order, as sources; those behind a network are read ahead.

    Quantized, packed and complex ones are loaded whole.

    Args:
        catalog: has them.
        names: of the tensors.
        threads: None: chosen automatically.
    """

    def __init__(self, catalog: Catalog, names: Sequence[str], threads: int | None) -> None:
        self._catalog, self._threads = catalog, threads
        self._stream: TensorStream | None = None
        if len(catalog.checkpoints) == 1 and not catalog.in_memory and any(map(is_remote, catalog.weight_files)):
            ahead = [name for name in names if not _encoded(catalog.about(name))]
            self._stream = catalog.checkpoints[0].stream(ahead, order="given", threads=threads)

    def __enter__(self) -> _Values:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def __call__(self, name: str) -> Source | Array:
        """The next tensor."""
        catalog, threads, about = self._catalog, self._threads, self._catalog.about(name)
        if _encoded(about):
            return catalog.array(name, threads)
        if self._stream is not None:
            value = next(self._stream)[1]
            if isinstance(value, QuantizedTensor):
                return value.dequantize(threads=threads)
            return value if about.row.complex else of_array(name, value)
        if about.element is not None and about.element.complex:
            return catalog.array(name, threads)
        found = catalog.source(name, threads=threads)
        return found.dequantize(threads=threads) if isinstance(found, QuantizedTensor) else found


def _encoded(about: TensorDescription) -> bool:
    """Whether a tensor is decoded to float32 when it is read, or of a dtype that weights do not have."""
    return about.element is None or about.element.packed


def _equal(one: Source, other: Source) -> bool:
    """Whether the bytes are equal."""
    pieces = zip(source_pieces(one), source_pieces(other), strict=True)
    return all(a == b for a, b in pieces)


def _reader(value: Source | Array, count: int) -> _Read:
    if isinstance(value, Source):
        source = value
        return lambda begin, size: numbers(source, begin, size)
    flat = np.ascontiguousarray(_whole(value)).reshape(count)
    if flat.dtype == np.float32 or flat.dtype.kind in "iu":
        return lambda begin, size: flat[begin : begin + size]
    return lambda begin, size: flat[begin : begin + size].astype(np.float64)


def _whole(value: Source | Array) -> Array:
    return values(value, 0, math.prod(value.shape)).reshape(value.shape) if isinstance(value, Source) else value
