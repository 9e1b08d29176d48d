"""Compare two checkpoints: names, shapes, dtypes and values, across formats, dtypes and quantization.

Values are compared in blocks: many small tensors to a block, many blocks to a large tensor. Bytes are compared first,
and numbers only if the bytes or the dtypes of two tensors differ. The results are rows of plain values, the fields of
`TensorDiff`, because pieces on other machines return them too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from fractions import Fraction
from itertools import repeat
from threading import local
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..conversion.catalog import Catalog, Given, RestructuredCatalog, TensorDescription
from ..conversion.executors import Executor, check_executor, opened, pieces_of, run_pieces
from ..core import dtypes
from ..core.arrays import Array, index_of
from ..core.files import caching
from ..core.forking import cached_property
from ..core.jobs import native_order, struct_dtype
from ..core.memory import Cache, aligned_bytes, check_threads, thread_count, windows
from ..core.names import Patterns, Selection, grouped, layer_of, natural_key
from ..core.native import TIER, address_of, ffi, lib
from ..core.packing import INT8
from ..core.progress import Meter, Progress
from ..core.quantized_tensor import QuantizedTensor, storage_of
from ..core.runtime import paused
from ..core.showing import Report, Row, shorten, table
from ..core.source import Source, of_array
from ..core.staging import fill_buffer
from ..core.tensors import Spans
from ..core.text import clip, debug, more, plural, printable, show
from ..core.thread_group import in_order
from ..core.weight_file import is_remote
from ..errors import exported, public
from .forms import Accounts, Forms, common_form
from .judging import judged, pair_of
from .stats import measure

Shape: TypeAlias = tuple[int, ...]

# Bytes per block: enough to amortize the cost of a read, but the blocks of both sides still fit into a cache.
BYTES = 1 << 20
# Numbers per block: handing a block to a thread takes as long as comparing 100,000 numbers.
NUMBERS = 1 << 19

_FEW_RANGES = 8  # joining so many takes longer than separate reads

_DIFFERENCE = struct_dtype("sl_difference")
_F32, _F64 = dtypes.BY_CODE["F32"], dtypes.BY_CODE["F64"]
_SMALL_INTEGER = 16  # bits of integers that are exact as float32
_EXACT = 1 << 52  # integers up to this size are exact as float64, and so are their differences

# By dtype number: the bytes of an element, and the dtype to compare; complex numbers are compared as two floats.
_SIZES, _PARTS = np.zeros(256, np.int64), np.arange(256, dtype=np.uint8)
_SIZES[[row.number for row in dtypes.TABLE]] = [row.bits // 8 for row in dtypes.TABLE]
_PARTS[dtypes.BY_CODE["C64"].number], _PARTS[dtypes.BY_CODE["C128"].number] = _F32.number, _F64.number


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


_EQUAL = TensorDiff(0.0, None, 0.0, 1.0, 0, 0)


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
_HEAD = ("different values", "max", "rms", "relative", "cosine", "unequal", "not finite")


def reasons(left_out: Mapping[str, str]) -> list[str]:
    """Return a line for each reason, with the number of tensors and the first."""
    groups = grouped(left_out, left_out.__getitem__).items()
    return [f"{reason}: {plural(len(names), 'tensor')}, {printable(names[0])}" for reason, names in groups]


def _by_name(differences: Mapping[str, TensorDiff]) -> dict[str, dict[str, Any]]:
    return {name: {**d._asdict(), "relative_change": d.relative_change} for name, d in differences.items()}


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
        form: the names and layouts in which two forms of a model are compared; "" for the names as stored.
        left_out_a: why the form of ``b`` has no place for tensors of ``a``, by name.
        left_out_b: likewise for tensors of ``b``.
        tied: heads that one side lacks, each with the embedding that its config ties it to, and that was compared.
        accounts: of each side, the number of stored tensors by fate: "compared", "other shape", "only here", "left out"
            and "not selected". Empty if both checkpoints have the names as stored.
        judged: of quantized tensors with different values, what the coarser format explains: "as expected of q4_k",
            "calibrated q4_k" (codes chosen for the outputs of a layer), "damaged q4_k"; "changed" for equal formats.

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
        *("same", "a", "b", "form", "only_a", "only_b", "left_out_a", "left_out_b", "tied", "shapes"),
        *("dtypes", "accounts"),
        ("tensors", lambda report: _by_name(report.tensors)),
        ("common_rows", lambda report: _by_name(report.common_rows)),
        *("judged", "layers"),
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
        self.form = ""
        self.left_out_a: Mapping[str, str] = {}
        self.left_out_b: Mapping[str, str] = {}
        self.tied: Mapping[str, str] = {}
        self.judged: dict[str, str] = {}
        self.accounts: Accounts = ({}, {})
        self.norms: Mapping[str, float] = {}  # internal: of the equal tensors in layers with differences

    @cached_property
    def layers(self) -> dict[str, LayerDiff]:
        """`LayerDiff` of every layer, by prefix, such as "model.layers.0"; "" holds the tensors outside layers."""
        summaries, layers = {}, grouped(self.tensors, layer_of)
        for layer in sorted(layers, key=natural_key):
            rows = {name: self.tensors[name] for name in layers[layer]}
            norms = (self.norms.get(name, 0.0) if row.norm is None else row.norm for name, row in rows.items())
            relative = _ratio(math.hypot(*(row.change for row in rows.values())), math.hypot(*norms))
            summaries[layer] = LayerDiff(len(rows), sum(row.unequal > 0 for row in rows.values()), relative)
        return summaries

    @property
    def same(self) -> bool:
        """True if names, shapes, dtypes and values are equal."""
        return self.within(0.0) and not self.dtypes

    def within(self, tolerance: float) -> bool:
        """Return True if names and shapes are equal and values differ by at most ``tolerance``. Dtypes may differ."""
        return not (self.only_a or self.only_b or self.shapes or self._far(tolerance))

    def _far(self, tolerance: float) -> int:
        """Count the tensors that differ by more than a tolerance."""
        return sum(not d.max <= tolerance or d.nonfinite > 0 for d in self.tensors.values())

    @property
    def unequal(self) -> dict[str, TensorDiff]:
        """Tensors with different values, largest difference first."""
        rows = [(name, d) for name, d in self.tensors.items() if d.unequal]
        return dict(sorted(rows, key=lambda row: (-row[1].nonfinite, -row[1].max)))

    def lines(
        self, columns: int | None = 80, rows: int | None = None, sort: str | None = None, tolerance: float | None = None
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

        def tabled(head: tuple[str, ...], cells: Sequence[tuple[str, ...]], count: int) -> list[str]:
            return ["", *table(head, cells, right=frozenset(range(1, len(head))), columns=columns), *more(count, rows)]

        lines = [clip(f"a: {printable(self.a)}", columns), clip(f"b: {printable(self.b)}", columns)]
        if self.form:
            lines.append(clip(f"compared in the {printable(self.form)}", columns))
        for side, account in zip("ab", self.accounts, strict=True):
            if account:
                counts = ", ".join(f"{n:,} {fate}" for fate, n in sorted(account.items()))
                lines.append(clip(f"{side}: {plural(sum(account.values()), 'tensor')}: {counts}", columns))
        lists = {
            "only in a": [*map(printable, self.only_a)],
            "only in b": [*map(printable, self.only_b)],
            "left out of a by the form": reasons(self.left_out_a),
            "left out of b by the form": reasons(self.left_out_b),
            "tied": [f"{printable(head)} to {printable(embedding)}" for head, embedding in self.tied.items()],
            "different shape": [*map(self._shapes_of, self.shapes)],
            "different dtype": reasons({name: f"{a} and {b}" for name, (a, b) in self.dtypes.items()}),
        }
        for title, entries in lists.items():
            if entries:
                shown = shorten(entries[:rows], None if columns is None else columns - 2)
                lines += ["", title, *(f"  {entry}" for entry in (*shown, *more(len(entries), rows)))]
        if self.judged:
            by_judgement = Counter(self.judged.values()).items()
            lines += ["", "judged by format", *(f"  {plural(n, 'tensor')}: {text}" for text, n in by_judgement)]
        unequal = [*self.unequal.items()]
        if sort is not None:
            unequal.sort(key=_ORDERS[sort])
        if unequal:
            count = len(_HEAD) if any(d.nonfinite for _, d in unequal) else len(_HEAD) - 1
            cells = []
            for name, d in unequal[:rows]:
                numbers = (f"{value:.3g}" for value in (d.max, d.rms, d.relative_change))
                cosine = f"{d.cosine:.6f}"
                cosine = ">0.999999" if cosine == "1.000000" and d.change else cosine
                cells.append((printable(name), *numbers, cosine, f"{d.unequal:,}", f"{d.nonfinite:,}")[:count])
            lines += tabled(_HEAD[:count], cells, len(unequal))
            changed = [(layer, row) for layer, row in self.layers.items() if row.unequal]
            if changed and len(self.layers.keys() - {""}) > 1:
                by_layer = [
                    (printable(name) or "(outside layers)", f"{change:.3g}", f"{different:,} of {tensors:,}")
                    for name, (tensors, different, change) in changed[:rows]
                ]
                lines += tabled(("by layer", "relative", "tensors"), by_layer, len(changed))
        return [*lines, "", self._verdict(tolerance)]

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

    def _verdict(self, tolerance: float | None) -> str:
        """Return the last line, which agrees with `same` or, with a tolerance, with `within`."""
        count, unequal = plural(len(self.tensors), "tensor"), self.unequal
        if self.same:
            return f"the same: {count}"
        if tolerance is not None and self.within(tolerance):
            if not unequal:
                differ = "differs" if len(self.dtypes) == 1 else "differ"
                return f"within {tolerance:g}: {count} with equal values; {len(self.dtypes):,} {differ} in dtype"
            name, largest = next(iter(unequal.items()))
            worst = f"the largest difference is {largest.max:.3g} ({printable(name)})"
            return f"within {tolerance:g}: {count}; {len(unequal):,} not equal, {worst}"
        in_value = "differs in value" if tolerance is None else f"differs by more than {tolerance:g}"
        faults = {
            in_value: self._far(tolerance or 0.0),
            "only in a": len(self.only_a),
            "only in b": len(self.only_b),
            "differs in shape": len(self.shapes),
            "differs in dtype": 0 if tolerance is not None else len(self.dtypes),
        }
        parts = (f"{n:,} {fault if n == 1 else fault.replace('differs', 'differ')}" for fault, n in faults.items() if n)
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
    stored: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
    cache: Cache = "keep",
) -> DiffReport:
    """Compare two checkpoints tensor by tensor, holding only a few blocks (or one quantized tensor) in memory.

    Tensors that differ only in the size of their first axis, such as embeddings with added tokens, are compared up to
    the last common row.

    Quantized tensors are dequantized before they are compared. Integers are compared exactly, even with floats.

    Two forms of a model are compared under published names, each tensor in the layout of the other form: a folder of
    transformers and a GGUF file of llama.cpp, stacked experts of MLX, fused experts, names with the wrappers of a
    framework. The report accounts for every tensor of both. Differences between formats are judged by the coarser one.

    Args:
        a: path or URL of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays and quantized
            tensors.
        b: the checkpoint to compare with, in any of these forms.
        only: shell pattern, or several, of the names to compare, such as ``"model.layers.0.*"``; None compares all.
        drop: shell pattern, or several, of names to skip.
        stored: True to compare the stored tensors: codes, scales and zero points by their own names, and the bytes
            of blocks, of which ``index`` then counts bytes. An open `Checkpoint` is opened again.
        storage_options: options of the filesystems behind URLs, see `open`.
        executor: compares groups of tensors in other processes or on other machines with access to the same files: any
            object with the ``submit`` of `concurrent.futures.Executor`, such as Dask's ``Client``.
            The report is identical to that of a single process.
        threads: number of threads. None chooses automatically; pieces of an executor get a single thread.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total), with 8 bytes for each value.
        cache: "drop" leaves few pages of the files in the system's page cache, see `load`.

    Returns:
        The report. ``same`` and ``within`` summarize it.

    Raises:
        TensorNotFoundError: a pattern matches no name in either checkpoint.
        UnsupportedError: a tensor holds codes that cannot be dequantized, such as EXL2, or was opened as stored; no
            family is known whose names both forms have; or see `safeload.open`.
        ValueError: ``executor`` is given, but tensors are in memory, or the forms differ.
        FormatError: a file changed before an executor could read it; or see `safeload.open`.
        OSError: see `safeload.open`.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.diff({"w": np.float32([1, 2])}, {"w": np.float64([1, 2.5])}).tensors["w"].max
        0.5
    """
    check_threads(threads)
    check_executor(executor)
    with (
        caching(cache),
        ExitStack() as stack,
        Catalog.of(a, storage_options, stored=stored) as catalog_a,
        Catalog.of(b, storage_options, stored=stored) as catalog_b,
    ):
        if stored:
            catalog_a, catalog_b = (catalog.as_stored(stack) for catalog in (catalog_a, catalog_b))
        catalog_a.mapped = catalog_b.mapped = False  # another program may write to the files
        how: Any = {"stored": stored, "executor": executor, "threads": threads, "progress": progress}
        report, forms = compare(catalog_a, catalog_b, only, drop, **how)
        if not stored:  # codes are read again; plain numbers are judged by `check` with a source
            unequal = [name for name, row in report.tensors.items() if row.unequal and forms.quantized(name)]
            report.judged = {name: judged(forms, name, pair_of(forms, name, threads)) for name in unequal}
        return report


def compare(
    catalog_a: Catalog,
    catalog_b: Catalog,
    only: Patterns,
    drop: Patterns,
    *,
    stored: bool = False,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> tuple[DiffReport, Forms]:
    """Compare two checkpoints in a common form; see `diff`."""
    forms = Forms((catalog_a, catalog_b)) if stored else common_form(catalog_a, catalog_b)
    if executor is not None and (forms.form or forms.tied):
        raise ValueError("executor= compares checkpoints of one form: convert one of them first")
    catalogs = forms.catalogs
    report = DiffReport(catalog_a.title, catalog_b.title)
    report.form, report.tied = forms.form, forms.tied
    report.left_out_a, report.left_out_b = forms.left_out
    with paused(len(catalog_a) + len(catalog_b)):
        shapes, described = _compare_structure(report, catalogs, only, drop)
        report.described = {about.name: (about.code, about.shape, about.nbytes) for about in described}
    for catalog in () if stored else catalogs:
        catalog.refuse_codes(shapes, "diff")
    if executor is None:
        rows = _compare_values(*catalogs, shapes, stored=stored, threads=threads, progress=progress)
    else:
        sizes = {name: 8 * count for name, count in zip(shapes, map(math.prod, shapes.values()), strict=True)}
        pieces = pieces_of(sizes, *catalogs, operation="diff", stored=stored)
        rows = run_pieces(run, pieces, executor, threads=threads, progress=progress).get("differences", {})
        fields = ((peak, at and tuple(at), *rest) for peak, at, *rest in rows.values())
        rows = dict(zip(rows, map(tuple.__new__, repeat(TensorDiff), fields), strict=True))
    report.common_rows = {name: rows[name] for name in report.shapes if name in rows}
    report.tensors = {name: rows[name] for name in shapes if name not in report.shapes}
    if forms.form or forms.tied:
        fates = {**dict.fromkeys(shapes, "compared"), **dict.fromkeys(report.shapes, "other shape")}
        fates |= dict.fromkeys((*report.only_a, *report.only_b), "only here")
        report.accounts = forms.account(0, catalog_a, fates), forms.account(1, catalog_b, fates)
    changed = {layer_of(name) for name, row in report.tensors.items() if row.unequal}
    equal = [name for name, row in report.tensors.items() if not row.unequal and layer_of(name) in changed]
    if equal:
        report.norms = {  # complex tensors have none
            name: math.sqrt(row.count - row.nan - row.inf) * math.hypot(row.mean, row.std)
            for name, row in measure(catalogs[0], equal, executor=executor, threads=threads).items()
            if row.count > row.nan + row.inf
        }
    return report, forms


def _compare_structure(
    report: DiffReport, catalogs: tuple[Catalog, Catalog], only: Patterns, drop: Patterns
) -> tuple[dict[str, Shape], Iterable[TensorDescription]]:
    """Report differences in names, dtypes and shapes; return the common shapes to compare by value, and all tensors."""
    in_a, in_b = map(list, catalogs)
    if only is not None or drop is not None:
        selected = set(Selection(only, drop).of(dict.fromkeys((*in_a, *in_b))))
        in_a, in_b = ([name for name in names if name in selected] for names in (in_a, in_b))
    a, b = (catalog.descriptions(names) for catalog, names in zip(catalogs, (in_a, in_b), strict=True))
    report.only_a = [name for name in in_a if name not in b]
    report.only_b = [name for name in in_b if name not in a]
    shapes: dict[str, Shape] = {}
    for name in filter(b.__contains__, a):
        x, y = a[name], b[name]
        if x.dtype != y.dtype or x.scheme != y.scheme:
            report.dtypes[name] = _dtype(x), _dtype(y)
        if x.shape == y.shape:
            shapes[name] = x.shape
            continue
        report.shapes[name] = x.shape, y.shape
        rows = min(x.shape[0], y.shape[0]) if x.shape and y.shape else 0
        if rows and x.shape[1:] == y.shape[1:]:
            shapes[name] = (rows, *x.shape[1:])
    return shapes, (*b.values(), *map(a.__getitem__, report.only_a))


def _dtype(about: TensorDescription) -> str:
    return "int8 with scale" if about.scheme == INT8 else about.dtype


# ---- values ----


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compare the tensors of a piece; see `run_piece`."""
    with opened(piece, storage_options, ("sources", "against")) as (names, (a, b)):
        with paused(len(names)):
            shapes, _ = _compare_structure(DiffReport("", ""), (a, b), None, None)
        rows = _compare_values(a, b, shapes, stored=piece["stored"], threads=threads, progress=None)
        return {"differences": {name: [*row] for name, row in rows.items()}}


def _compare_values(
    a: Catalog, b: Catalog, shapes: Mapping[str, Shape], *, stored: bool, threads: int | None, progress: Progress
) -> dict[str, TensorDiff]:
    """Compare tensors up to common shapes: plain tensors of local files together, the rest in batches."""
    blocks: dict[str, Shape] = {}  # of the bytes of tensors in equal block types, which are compared byte by byte
    for name, shape in shapes.items() if stored else ():
        x, y = a.about(name), b.about(name)
        if x.scheme is not None and (x.scheme, x.shape, shape) == (y.scheme, y.shape, x.shape):
            blocks[name] = storage_of(x.scheme, shape, None)[0][1]
    shapes = {**shapes, **blocks}
    meter = Meter(progress, 8 * sum(map(math.prod, shapes.values())))
    names = [*shapes]
    rows: dict[str, TensorDiff] = {}

    def compare(names: Sequence[str], a: Spans, b: Spans) -> None:
        rows.update(zip(names, _compare(a, b, [shapes[name] for name in names], threads, meter), strict=True))

    def alike(name: str, *sources: Source) -> Sequence[Source]:  # both complex or both real
        if len({source.row.complex for source in sources}) == 1:
            return sources
        return [of_array(name, np.asarray(side.array(name, threads), np.complex128)) for side in (a, b)]

    (files_a, of_a), (files_b, of_b) = _in_files(a, names), _in_files(b, names)
    together = [k for k, pair in enumerate(zip(of_a, of_b, strict=True)) if None not in pair]
    if len(together) < len(names):
        of_a, of_b = ([stored[k] for k in together] for stored in (of_a, of_b))
    tables = [files_a.plain(of_a), files_b.plain(of_b)]  # type: ignore[arg-type]
    tables = [tensors for tensors in tables if tensors is not None and not tensors.remote]
    if len(tables) == 2:
        spans = [tensors.spans for tensors in tables if tensors is not None]
        complex_a, complex_b = (_PARTS[side.targets] != side.targets for side in spans)
        plain = np.flatnonzero(complex_a == complex_b)
        compare([names[together[k]] for k in plain.tolist()], *(side.pick(plain) for side in spans))
    rest = [name for name in names if name not in rows] if len(rows) < len(names) else []
    with _reader(a, rest, blocks, threads) as read_a, _reader(b, rest, blocks, threads) as read_b:
        for batch in windows(rest, NUMBERS, lambda name: math.prod(shapes[name])):
            pairs = [alike(name, read_a(name), read_b(name)) for name in batch]
            compare(batch, *map(_spans, zip(*pairs, strict=True)))
            del pairs  # before the next tensors are decoded
            for name in batch:
                debug("diff of %s: %s", name, rows[name])
    return rows


def _in_files(catalog: Catalog, names: Sequence[str]) -> tuple[Catalog, Sequence[str | None]]:
    """Return the catalog of files, and the name of each tensor there; None if a form changes more than its name."""
    stored: Sequence[str | None] = names
    while isinstance(catalog, RestructuredCatalog):
        recipes, catalog = catalog.recipes, catalog.base
        stored = [None if name is None else recipes[name].renamed for name in stored]
    if stored is not names:  # of a tied head and its embedding, the first
        first = {name: k for k, name in reversed([*enumerate(stored)])}
        stored = [name if first[name] == k else None for k, name in enumerate(stored)]
    return catalog, stored


# ---- tensors that are not plain, or not in local files ----


@contextmanager
def _reader(
    catalog: Catalog, names: Sequence[str], blocks: Collection[str], threads: int | None
) -> Iterator[Callable[[str], Source]]:
    """Yield a function that reads tensors in this order, some as ``blocks``; remote tensors are read ahead."""

    def is_encoded(name: str) -> bool:  # it is decoded to float32, or weight files do not have its dtype
        element = catalog.about(name).element
        return element is None or element.packed

    def read(name: str) -> Source:
        encoded = is_encoded(name)
        if stream is not None and not encoded:
            value: Any = next(stream)[1]
            if name in blocks:
                return of_array(name, np.ascontiguousarray(value.data))
            array = value.dequantize(threads=threads) if isinstance(value, QuantizedTensor) else value
        elif name in blocks:
            array = np.ascontiguousarray(catalog.stored(name).data)
        elif encoded or catalog.about(name).quantized or is_remote(catalog.place(name).file):
            array = catalog.array(name, threads)
        else:
            source = catalog.source(name, threads=threads)
            assert isinstance(source, Source)
            return source
        row = dtypes.row_of(array.dtype)
        if row is None or row.packed:
            array = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
        return of_array(name, array)

    stream = None
    if (
        len(catalog.checkpoints) == 1
        and not (catalog.in_memory or catalog.makes)
        and any(map(is_remote, catalog.weight_files))
    ):
        ahead = [name for name in names if not is_encoded(name)]
        stream = catalog.checkpoints[0].stream(ahead, order="given", threads=threads)
    with nullcontext() if stream is None else closing(stream):
        yield read


def _spans(sources: Sequence[Source]) -> Spans:
    files = {file: k for k, file in enumerate(dict.fromkeys(source.file for source in sources))}
    numbers = np.array([source.row.number for source in sources], np.uint8)
    file, begins, sizes = np.array([(files[source.file], source.offset, source.size) for source in sources], np.int64).T
    return Spans([*files], file, begins, sizes, numbers, numbers)


# ---- blocks ----


class _Pieces(NamedTuple):
    """Tensors divided into pieces of at most a block. Small tensors are not divided."""

    tensors: Array  # int64, the tensor of each piece
    begins: Array  # int64, first item of the piece in its tensor
    counts: Array  # int64, items
    last: Array  # bool, True for the last piece of a tensor

    @classmethod
    def of(cls, counts: Array, size: int) -> _Pieces:
        """Divide non-empty tensors with ``counts`` items into pieces of at most ``size`` items."""
        parts = -(-counts // size)
        tensors = np.repeat(np.arange(len(counts)), parts)
        begins = (np.arange(len(tensors)) - np.repeat(np.cumsum(parts) - parts, parts)) * size
        left = counts[tensors] - begins
        return cls(tensors, begins, np.minimum(left, size), left <= size)

    def blocks(self, size: int) -> Iterator[slice]:
        """Yield runs of pieces, each with ``size`` to ``2 * size - 1`` items; the last run can be shorter."""
        ends = np.cumsum(self.counts)
        begin = done = 0
        while begin < len(ends):
            end = min(int(np.searchsorted(ends, done + size)) + 1, len(ends))
            yield slice(begin, end)
            begin, done = end, int(ends[end - 1])


class _Buffers(local):
    """Memory of a thread for a block of each side."""

    def __init__(self, size: int) -> None:
        self.memory = aligned_bytes(size), aligned_bytes(size)

    def read(self, side: int, spans: Spans) -> Array:
        """Read ranges into consecutive bytes, which the next block of this side can overwrite."""
        spans = spans.joined() if len(spans.sizes) > _FEW_RANGES else spans
        files, file, begins, sizes, sources, targets = spans
        if len(sizes) == 1 and files[int(file[0])] is None and sources[0] == targets[0]:
            return np.frombuffer(ffi.buffer(ffi.cast("char *", int(begins[0])), int(sizes[0])), np.uint8)
        memory = self.memory[side]
        return memory[: fill_buffer(memory, spans, 1)]


def _compare(a: Spans, b: Spans, shapes: Sequence[Shape], threads: int | None, meter: Meter) -> list[TensorDiff]:
    """Compare the first elements of tensors, as many as ``shapes`` have; both of a pair are complex or real."""
    # `meter` gets 8 bytes for each compared element.
    elements = np.array([math.prod(shape) for shape in shapes], np.int64)
    a, b = (  # complex numbers become two floats each
        spans._replace(sizes=elements * _SIZES[spans.sources], sources=parts, targets=parts)
        for spans, parts in ((a, _PARTS[a.sources]), (b, _PARTS[b.sources]))
    )
    in_file = np.lexsort((a.begins, a.file))
    in_file = in_file[elements[in_file] > 0]
    differs = a.targets != b.targets
    alike = in_file[~differs[in_file]]
    differs[alike] = _unequal(a.pick(alike), b.pick(alike), elements[alike], threads, meter)
    rows = [_EQUAL] * len(elements)
    in_file = in_file[differs[in_file]]
    of_a, of_b = a.targets[in_file], b.targets[in_file]
    for dtype_a, dtype_b in dict.fromkeys(zip(of_a.tolist(), of_b.tolist(), strict=True)):
        pair = in_file[(of_a == dtype_a) & (of_b == dtype_b)]
        values = _differences(a.pick(pair), b.pick(pair), [shapes[k] for k in pair.tolist()], threads, meter)
        for k, value in zip(pair.tolist(), values, strict=True):
            rows[k] = value
    return rows


# ---- bytes ----


def _unequal(a: Spans, b: Spans, elements: Array, threads: int | None, meter: Meter) -> Array:
    """Return a mask of the tensors with different bytes, for two sides with equal dtypes."""
    differs = np.zeros(len(a.sizes), bool)
    pieces = _Pieces.of(a.lengths, BYTES)
    total = int(a.lengths.sum())
    a, b = a.divided(BYTES), b.divided(BYTES)
    buffers = _Buffers(min(total, 2 * BYTES))

    def blocks() -> Iterator[slice]:  # of a large tensor, up to the first that differs
        for block in pieces.blocks(BYTES):
            if block.stop - block.start > 1 or not differs[pieces.tensors[block.start]]:
                yield block

    def compare_block(block: slice) -> tuple[slice, Array | bool]:
        x, y = buffers.read(0, a.pick(block)), buffers.read(1, b.pick(block))
        if _same(x, y):
            return block, False
        lengths = pieces.counts[block]
        return block, np.logical_or.reduceat(x != y, np.cumsum(lengths) - lengths)

    for block, unequal in in_order(compare_block, blocks(), thread_count(2 * total, threads)):
        differs[pieces.tensors[block]] |= unequal
        complete = pieces.tensors[block][pieces.last[block]]
        meter.add(8 * int(elements[complete][~differs[complete]].sum()))
    return differs


def _same(x: Array, y: Array) -> bool:
    words = x.size - x.size % 8
    alike = bool((x[:words].view(np.uint64) == y[:words].view(np.uint64)).all())
    return alike and bool((x[words:] == y[words:]).all())


# ---- numbers ----


def _differences(a: Spans, b: Spans, shapes: Sequence[Shape], threads: int | None, meter: Meter) -> list[TensorDiff]:
    """Compare the numbers of tensors that share a dtype in each checkpoint."""
    stored = [dtypes.BY_NUMBER[int(spans.targets[0])] for spans in (a, b)]
    counts = a.sizes // stored[0].block_bytes
    per_element = counts // np.array([math.prod(shape) for shape in shapes], np.int64)
    pieces = _Pieces.of(counts, NUMBERS)
    integers = [row.kind == lib.SL_KIND_INT for row in stored]
    small = all(row.bits <= (_F32.bits if row.floating else _SMALL_INTEGER) for row in stored)
    common = _F32 if small else _F64
    # The core would convert integers to float64 by way of float32.
    targets = [row if integer and not small else common for row, integer in zip(stored, integers, strict=True)]
    sides = [
        spans._replace(targets=np.full_like(spans.targets, row.number)).divided(NUMBERS * row.block_bytes)
        for spans, row in zip((a, b), targets, strict=True)
    ]
    total = int(counts.sum())
    buffers = _Buffers(min(total, 2 * NUMBERS) * _F64.block_bytes)
    progress = 8 * pieces.counts // per_element[pieces.tensors]

    def compare_block(block: slice) -> tuple[list[float], Array]:
        x, y = (
            native_order(buffers.read(side, spans.pick(block)).view(dtypes.element_dtype(targets[side].number)))
            for side, spans in enumerate(sides)
        )
        floats = [values.astype(common.name, copy=False) for values in (x, y)]
        counts = np.ascontiguousarray(pieces.counts[block], np.uint64)
        sums = np.zeros(len(counts), _DIFFERENCE)
        places = [ffi.cast("void *", address_of(values)) for values in floats]
        lengths, records = ffi.from_buffer("uint64_t[]", counts), ffi.from_buffer("sl_difference[]", sums)
        lib.sl_differ(TIER, common.number, *places, lengths, len(counts), records)
        largest = sums["largest"].tolist()
        # If any integer is larger than _EXACT, so is the sum of squares larger than its square.
        wide = np.zeros(len(counts), bool)
        for values, norm in ((x, "norm_a"), (y, "norm_b")):
            wide |= (values.dtype.kind in "iu") & ~(sums[norm] <= _EXACT**2)
        ends = np.cumsum(pieces.counts[block])
        for k in np.flatnonzero(wide).tolist():
            own = slice(int(ends[k]) - int(counts[k]), int(ends[k]))
            largest[k], sums[k] = _exact_sums(x[own], y[own])
        meter.add(int(progress[block].sum()))
        return largest, sums

    parts = [*in_order(compare_block, pieces.blocks(NUMBERS), thread_count(16 * total, threads))]
    largest = [value for part, _ in parts for value in part]
    if all(integers):
        largest = [int(value) for value in largest]
    sums = np.concatenate([part for _, part in parts])
    if len(sums) > len(shapes):
        largest, sums = _added_up(largest, sums, pieces)
    return _rows(largest, sums, per_element, shapes)


def _added_up(largest: list[float], sums: Array, pieces: _Pieces) -> tuple[list[float], Array]:
    """Add up the pieces of each tensor."""
    first = np.flatnonzero(pieces.begins == 0)
    ends, best = np.flatnonzero(pieces.last) + 1, first.copy()
    for tensor in np.flatnonzero(ends - first > 1).tolist():
        best[tensor] = max(range(int(first[tensor]), int(ends[tensor])), key=largest.__getitem__)
    totals = sums[best]
    totals["at"] += pieces.begins[best].astype(np.uint64)
    with np.errstate(over="ignore", invalid="ignore"):
        for field in ("squares", "dot", "norm_a", "norm_b", "unequal", "nonfinite", "finite"):
            totals[field] = np.add.reduceat(sums[field], first)
    return [largest[k] for k in best.tolist()], totals


def _rows(largest: list[float], sums: Array, per_element: Array, shapes: Sequence[Shape]) -> list[TensorDiff]:
    """Return the differences of tensors, given the largest difference and the sums of each."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        rms = np.sqrt(sums["squares"] / np.maximum(sums["finite"], 1))
        # NaN if either tensor is zero.
        cosine = np.clip(sums["dot"] / (np.sqrt(sums["norm_a"]) * np.sqrt(sums["norm_b"])), -1.0, 1.0)
        cosine[sums["unequal"] == 0] = 1.0
        change, norm = np.sqrt(sums["squares"]), np.sqrt(sums["norm_a"])
    unequal = sums["unequal"].tolist()
    norms = [length if count else None for length, count in zip(norm.tolist(), unequal, strict=True)]
    columns = (rms.tolist(), cosine.tolist(), unequal, sums["nonfinite"].tolist(), change.tolist(), norms)
    places = (sums["at"].astype(np.int64) // per_element).tolist()
    with paused(len(shapes)):
        peaks = zip(largest, places, shapes, strict=True)
        indices = [index_of(place, shape) if peak > 0 else None for peak, place, shape in peaks]
        return [*map(tuple.__new__, repeat(TensorDiff), zip(largest, indices, *columns, strict=True))]


def _exact_sums(x: Array, y: Array) -> tuple[float, tuple[float, ...]]:
    """Return the largest difference and the ``sl_difference`` of a piece with 64-bit integers, by Python's numbers."""
    finite = np.isfinite(x) & np.isfinite(y)
    a, b = (np.where(finite, values, 0) for values in (x, y))
    exact = [
        np.array([*map(Fraction, values.tolist())], object) if values.dtype.kind == "f" else values.astype(object)
        for values in (a, b)
    ]
    differences = np.abs(exact[0] - exact[1])
    distances, a, b = (values.astype(np.float64) for values in (differences, a, b))
    sizes = distances if "f" in (x.dtype.kind, y.dtype.kind) else differences
    at = int(np.argmax(sizes))
    largest = sizes.item(at)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [float((p * q).sum()) for p, q in ((distances, distances), (a, b), (a, a), (b, b))]
    nonfinite = int(np.count_nonzero(~finite))
    unequal = int(np.count_nonzero(distances)) + nonfinite
    return largest, (largest, at, *sums, unequal, nonfinite, x.size - nonfinite)
