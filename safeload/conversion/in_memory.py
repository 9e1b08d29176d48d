"""Results of a conversion in memory: quantized checkpoints and their error, and stacked layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple, overload

import numpy as np

from ..core import dtypes, jobs, packing
from ..core.arrays import Array, as_array, check_disjoint, check_mapping, overlapping
from ..core.cast import target_array
from ..core.load import parse_target, refuse_own_files
from ..core.memory import check_threads, private_array
from ..core.progress import Progress, reporter
from ..core.quantized_tensor import QuantizedTensor
from ..core.showing import Result, ResultTable, dict_repr, table
from ..core.source import Source, of_reals
from ..core.text import PathLike, printable, show, subject
from ..errors import exported, public
from ..models.layout import Layout
from ..quant.codes import blocks
from ..quant.families import preset_of
from ..quant.packed_group import GroupContext, packing_of
from ..quant.quantization import Quantization
from .catalog import Catalog, Given, TensorDescription
from .decide import ConvertOptions, ConvertRequest, Decider, check_codes
from .forms import arranged, like
from .make import COPIED, Decision, Maker, stacked
from .quantize import Request, Rounding, quantizing, run_requests, weighted_rounding
from .rules import Keep, Rules, Scheme, Summary, importance_by_name, schema_of, tied_heads

# ---- quantized ----


@exported()
class QuantizedDict(dict[str, QuantizedTensor | Array]):
    """Name to array or `QuantizedTensor`, in the order of the source.

    Attributes:
        summary: the quantized tensors, and why each other tensor was kept.
    """

    summary: Summary

    def __repr__(self) -> str:
        counts = Counter(self.summary.quantized.values()) if hasattr(self, "summary") else {}
        note = ", ".join(f"{count:,} quantized to {scheme}" for scheme, count in counts.items())
        return dict_repr("QuantizedDict", self, note)


@public
def load_quantized(
    source: Given,
    scheme: Scheme = "q4_0",
    *,
    keep: Keep = None,
    tie_lm_head: bool = True,
    rounding: Rounding | None = None,
    axis: int | None = None,
    imatrix: PathLike | Mapping[str, Any] | None = None,
    requantize: bool = False,
    exact: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> QuantizedDict:
    """Load a checkpoint with its matrices quantized and other floating tensors as float32, in one pass over its bytes.

    Floating tensors with 2 axes are quantized (with 3 axes: each matrix), except embeddings, norms and biases. These
    are identified by the schema of the architecture in ``config.json``, or by `KEPT_NAMES` if there is no schema.
    Integer, bool and complex tensors are unchanged. Tensors that are already quantized stay as they are, unless another
    scheme is requested: then codes move to it, or are rounded again (see ``requantize``). For int8 each matrix is read
    twice, first for its absmax.

    If the head is tied to the embedding and not stored, the head is quantized from the embedding, which stays float32.
    The schema and the config determine which tensors are tied. In unknown architectures ``lm_head.weight`` is tied to
    ``model.embed_tokens.weight``, and in GGUF files ``output.weight`` to ``token_embd.weight``.

    Args:
        source: path or URL of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays.
        scheme: as in `quantize`, or a dict from ``fnmatch`` patterns to schemes for mixed precision. The first matching
            pattern wins; None leaves the tensor unquantized, and patterns other than "*" override the schema and
            `KEPT_NAMES`. If the rows of a matrix are not whole super-blocks of 256, it gets smaller blocks, as in
            llama.cpp: "q5_0" instead of "q4_k", "q5_1" instead of "q5_k", "q8_0" instead of "q6_k", "iq4_nl" instead
            of "iq4_xs", and "q4_0" instead of "q2_k", "q3_k", "tq1_0" and "tq2_0".
            The format of an engine, such as "w4a16" or "mlx4", returns the tensors of the folder that `convert` writes
            for the engine: unquantized tensors are then as stored.
        keep: patterns of tensors or modules to leave unquantized, or a function of the name.
        tie_lm_head: False to omit the tied head.
        rounding: for "q4_0": "absmax" (the default) or "ggml".
        axis: for int8: the axis to give a scale per element; None for a scale per matrix: a tensor of N matrices has
            scales of shape [N].
        imatrix: path of a llama.cpp importance matrix, as in `convert`, for a GGUF model; or a dict from tensor names
            to importance, as in `quantize`. Tensors without an entry are quantized without importance, and "q4_0" is
            rounded by "ggml".
        requantize: as in `convert`.
        exact: as in `convert`.
        storage_options: for URLs: options of the filesystem behind the URL, see `open`.
        threads: None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array or `QuantizedTensor`, in the order of the source. Its ``summary`` lists the unquantized tensors,
        with reasons.

    Raises:
        RangeError: a value is NaN or infinite, or the scale of a block does not fit float16; with tensor and index.
        ValueError: invalid arguments.
        UnsupportedError: a tensor holds codes that cannot be dequantized, such as EXL2, or was opened as stored; or
            see `safeload.open`.
        FormatError, OSError: see `safeload.open` and `Checkpoint.load`.

    Example:
        >>> import safeload
        >>> weights = safeload.load_quantized("tiny-llama", "q4_0", keep="lm_head*")
        >>> weights["model.layers.0.mlp.up_proj.weight"]
        <QuantizedTensor q4_0 [128, 64], 4,608 bytes>
        >>> weights["lm_head.weight"].dtype
        dtype('float32')
    """
    packing.SCHEMES["q4_0"].target(rounding)
    check_threads(threads)
    check_codes(requantize, exact)
    preset = preset_of(scheme)
    if preset is not None and not preset.parts:
        raise ValueError(f"{preset.name} quantizes nothing: convert writes its folder")
    if preset is not None and (rounding is not None or axis is not None or imatrix is not None):
        raise ValueError(f"{preset.name} does not accept rounding=, axis= or imatrix=")
    if imatrix is not None:
        rounding = weighted_rounding(scheme, rounding, "imatrix=")
    keep = keep if keep is None or isinstance(keep, str) or callable(keep) else tuple(keep)  # it is read twice
    Rules({} if preset is not None else scheme, keep)  # refuses unknown schemes before anything is opened
    with Catalog.of(source, storage_options) as catalog:
        catalog.refuse_codes(catalog, "load_quantized")
        if preset is not None:
            catalog = arranged(catalog, preset)
        options: Any = {**dict.fromkeys(ConvertOptions.__annotations__), "quantize": scheme, "keep": keep}
        options |= {"requantize": requantize, "exact": exact}
        nowhere: Any = None  # the result has no format of its own and no place
        by_name = catalog.config is None  # an engine needs a whole model only if a config describes one
        shared: Any = {"every_tensor": True, "threads": threads, "progress": progress}
        request = ConvertRequest("", "", nowhere, None, 0, None, options, preset, [], by_name, **shared)
        decider = Decider(catalog, request, ties=tie_lm_head and preset is None)
        if preset is not None:
            decider.check_kept()
        decisions = decider.of_tensors()
        if preset is not None:
            result = _encoded(catalog, decisions, request, decider.quantization())
        else:
            result = _quantized(catalog, decisions, request, rounding=rounding, axis=axis, imatrix=imatrix)
        for name, value in result.items():
            if isinstance(value, np.ndarray):
                result[name] = jobs.native_order(value)
        summary = decider.summary(sum(value.nbytes for value in result.values()))
        # Other heads stay tied.
        result.summary = summary._replace(kept={name: why for name, why in summary.kept.items() if name in result})
        return result


def _quantized(
    catalog: Catalog,
    decisions: Mapping[str, Decision],
    how: ConvertRequest,
    *,
    rounding: Rounding | None,
    axis: int | None,
    imatrix: PathLike | Mapping[str, Any] | None,
) -> QuantizedDict:
    """Load tensors quantized, and other floating tensors as float32, in one run."""
    origins = {name: decision.source or name for name, decision in decisions.items()}
    abouts = {name: catalog.about(origin) for name, origin in origins.items()}
    weighted = {name: abouts[name].shape for name, each in decisions.items() if each.scheme not in (None, packing.INT8)}
    importance = importance_by_name({} if imatrix is None else imatrix, weighted)

    def request(name: str, values: Source) -> Request:
        scheme = decisions[name].scheme
        if scheme is None:
            row = dtypes.BY_CODE["F32"] if values.row.floating else values.row
            return Request(values, private_array(values.shape, dtypes.array_dtype(row.number)), row.number)
        shape, own_axis = abouts[name].shape, axis if scheme == packing.INT8 else None
        if own_axis is None:  # int8 tensors with 3 axes have at least a scale per matrix
            own_axis = packing.usual_axis(scheme, shape)
        elif not -len(shape) <= own_axis < len(shape):
            raise ValueError(f"{subject(name)}axis {axis} is out of range for shape {list(shape)}")
        own_axis = own_axis and own_axis % len(shape)
        return quantizing(values, scheme, own_axis, rounding, importance=importance.get(name))

    result, requests = QuantizedDict(), []
    for name, origin in origins.items():
        about = abouts[name]
        if decisions[name].codes:
            scheme = str(decisions[name].scheme)
            data = blocks(scheme, catalog.coded(origin), how.threads)
            result[name] = QuantizedTensor(scheme, abouts[name].shape, data)
            continue
        stays = about.quantized and (not about.packed or decisions[name] == Decision())
        value: Any = catalog.value(origin) if stays else catalog.values(origin, name)
        if isinstance(value, Source):
            requests.append(request(name, value))
            value = requests[-1].result
        elif decisions[name].scheme is not None:  # at once, so that only one is in memory as float32
            only = request(name, of_reals(name, value.dequantize(threads=how.threads), how.threads))
            run_requests([only], threads=how.threads, progress=None)
            value = only.result
        elif about.packed and not stays:
            value = value.dequantize(threads=how.threads)
        result[name] = value
    run_requests(requests, threads=how.threads, progress=how.progress)
    return result


def _encoded(
    catalog: Catalog, decisions: Mapping[str, Decision], how: ConvertRequest, quantization: Quantization
) -> QuantizedDict:
    """Load tensors as a folder for an engine would hold them, one after another."""
    context, maker = GroupContext({}, quantization), Maker(catalog, decisions, "", threads=how.threads)
    abouts = {name: catalog.about(name) for name in decisions}
    result, done = QuantizedDict(), 0
    with reporter(how.progress, sum(about.nbytes for about in abouts.values())) as report:
        for name, decision in decisions.items():
            if decision.scheme is not None and decision.codes != COPIED:
                encoding, parts = maker.encoded(name, decision)
                parts = {role: jobs.native_order(part) for role, part in {**parts, **encoding.constants()}.items()}
                module = name.removesuffix(".weight")
                names = {role: module + part.suffix for role, part in encoding.preset.parts.items()}
                kind = packing_of(context, name, names, parts)
                result[name] = QuantizedTensor.of_parts(kind, {packing.NAME: name, **names}, parts)
            elif decision.dtype is None:
                result[name] = catalog.value(name, how.threads)
            else:
                row = dtypes.BY_CODE[decision.dtype]
                result[name] = array = private_array(abouts[name].shape, dtypes.array_dtype(row.number))
                catalog.read_into(name, row, array, how.threads)
            done += abouts[name].nbytes
            report(done)
    return result


# ---- stacked ----


@exported()
class StackedDict(dict[str, Array]):
    """Name to stacked array, in the order of the layout.

    Attributes:
        left_out: names of the tensors that the layout does not use.

    Example:
        >>> import safeload
        >>> norms = safeload.StackedTensor("norm", "model.layers.{}.input_layernorm.weight")
        >>> stacked = safeload.stack("tiny-llama", safeload.Layout("norms", [norms]))
        >>> stacked["norm"].shape, len(stacked.left_out)
        ((3, 64), 27)
    """

    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return dict_repr("StackedDict", self)


@public
def stack(
    source: Given,
    layout: Layout,
    *,
    dtype: Any = None,
    out: Mapping[str, Array] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> StackedDict:
    """Arrange the tensors of a checkpoint by a layout: read, convert, transpose and stack them in one pass.

    Args:
        source: path or URL of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays.
        layout: the layout of the result; see `safeload.layouts`.
        dtype: dtype for floating tensors; None leaves it unchanged. Required if tensors are quantized.
        out: arrays to fill, by name. Each must be C-contiguous and have the dtype and shape of the result; all are
            checked before the first byte is written. Arrays can overlap those of the source, but must not map its
            files.
        storage_options: for URLs: options of the filesystem behind the URL, see `open`.
        threads: None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array in the order of the layout; ``left_out`` names the tensors that the layout does not use.

    Raises:
        TensorNotFoundError: a source or a layer is missing; the message names layer and tensor.
        SafeloadError: layers differ in shape or dtype; the message names two layers.
        UnsupportedError: a tensor to transpose is not a matrix, the conversion is not supported, or a tensor holds
            codes that cannot be dequantized, such as EXL2, or was opened as stored.
        ValueError: an array of ``out`` does not match.
        FormatError, OSError: see `safeload.open`.

    Example:
        >>> import numpy as np
        >>> from safeload import Layout, StackedTensor, stack
        >>> layers = {f"h.{k}.w": np.ones((2, 3), np.float16) for k in range(4)}
        >>> stack(layers, Layout("tiny", [StackedTensor("w", "h.{}.w", transpose=True)]), dtype="float32")["w"].shape
        (4, 3, 2)
    """
    check_threads(threads)
    target = parse_target(dtype)
    if out is not None:
        check_mapping(out, "out")
    with Catalog.of(source, storage_options) as catalog:
        laid = stacked(catalog, catalog.descriptions([*catalog]), layout, target)
        used = {source for name in laid for source in laid.sources_of(name)}
        catalog.refuse_codes(used, "stack")
        result = StackedDict()
        unknown = sorted(set(out or ()).difference(laid), key=str)
        if unknown:
            raise ValueError(f"out: {show(unknown[0])} is not a tensor of this layout")
        for name, about in laid.descriptions([*laid]).items():
            if out is not None and name not in out:
                raise ValueError(f"out: no array for {show(name)}")
            dtype = dtypes.array_dtype(about.row.number)
            try:
                result[name] = target_array(about.shape, dtype, None if out is None else out[name])
            except ValueError as error:
                raise ValueError(f"{show(name)}: {error}") from None
        moved: dict[str, Array] = {}  # arrays that overlap those of the source
        if out is not None:
            check_disjoint(result)
            refuse_own_files(result, catalog.weight_files)
            names = overlapping(result, catalog.memory_of(used))
            moved = {name: private_array(result[name].shape, result[name].dtype) for name in names}
        laid.fill({**result, **moved}, threads=threads, progress=progress)
        for name, array in moved.items():
            np.copyto(result[name], array)
        result.left_out = tuple(name for name in catalog if name not in used)
    return result


# ---- the error of quantized values ----


class _ErrorFields(NamedTuple):
    max_error: float
    rms_error: float
    snr_db: float


@exported()
class QuantizationStats(Result, _ErrorFields):
    """The distance of dequantized values from the originals. ``str()`` is a line.

    Attributes:
        max_error: largest absolute difference.
        rms_error: root mean square of the differences.
        snr_db: 10 * log10(sum of squares of the original / sum of squares of the differences); infinite if all values
            are equal.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> x = np.float32([-1, -0.5, 0.3, 1])
        >>> error = safeload.quantization_error({"x": x}, {"x": safeload.quantize(x, "int8")})["x"]
        >>> error.max_error < 0.004
        True
    """

    __slots__ = ()

    _columns = _json = _ErrorFields._fields

    def cells(self) -> tuple[str, str, str]:
        """Return the numbers as text for tables.

        :meta private:
        """
        return f"{self.max_error:.4g}", f"{self.rms_error:.4g}", f"{self.snr_db:.2f}"

    def __str__(self) -> str:
        largest, rms, snr = self.cells()
        return f"max error {largest}, RMS error {rms}, SNR {snr} dB"


#: Titles of the columns of `QuantizationStats.cells`.
COLUMNS = ("max error", "RMS error", "SNR in dB")


@exported()
class QuantizationTable(ResultTable[QuantizationStats]):
    """The dict of `QuantizationStats` by name that `quantization_error` returns. ``str()`` is a table.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> x = np.float32([[0.25] * 32])
        >>> safeload.quantization_error({"w": x}, {"w": safeload.quantize(x, "q8_0")})
        tensor  max error  RMS error  SNR in dB
        w       ...
    """

    _columns = ("name", "dtype", "shape", "nbytes", *_ErrorFields._fields)

    def __init__(self, stats: Mapping[str, QuantizationStats], tensors: Iterable[TensorDescription]) -> None:
        super().__init__(stats)
        self._tensors = {about.name: about for about in tensors}

    def _values(self) -> Iterable[Any]:
        for name, stats in self.items():
            about = self._tensors[name]
            yield name, about.code, [*about.shape], about.nbytes, *stats

    def lines(self, columns: int | None = None, rows: int | None = None) -> list[str]:
        cells = [(printable(name), *stats.cells()) for name, stats in islice(self.items(), rows)]
        return table(("tensor", *COLUMNS), cells, right=frozenset((1, 2, 3)), columns=columns)


_BLOCK = 1 << 20  # elements compared at a time


@overload
def quantization_error(source: Array, quantized: QuantizedTensor) -> QuantizationStats: ...
@overload
def quantization_error(
    source: Given, quantized: Given, *, storage_options: Mapping[str, Any] | None = None
) -> QuantizationTable: ...
@public
def quantization_error(
    source: Given | Array, quantized: Given | QuantizedTensor, *, storage_options: Mapping[str, Any] | None = None
) -> QuantizationTable | QuantizationStats:
    """Return the quantization error of a tensor, or of each quantized tensor of a checkpoint.

    Args:
        source: the original values: an array, a dict of arrays, a `Checkpoint`, a path or a URL.
        quantized: the quantized values. If ``source`` is an array, a `QuantizedTensor`; otherwise a dict such as
            `load_quantized` returns, a `Checkpoint`, a path or a URL. A tied head is compared with the embedding.
        storage_options: for URLs: options of the filesystem behind the URL, see `open`.

    Returns:
        A `QuantizationStats` if ``source`` is an array, else a dict from the name of each quantized tensor to its
        error, which prints as a table and has the methods ``rows`` and ``to_dict`` of other results.

    Raises:
        TensorNotFoundError: the source lacks a quantized tensor.
        ValueError: shapes differ, or a single tensor is compared with a checkpoint.

    Example:
        >>> import safeload
        >>> weights = safeload.load_quantized("tiny-llama", "q8_0")
        >>> errors = safeload.quantization_error("tiny-llama", weights)
        >>> len(errors), errors["lm_head.weight"].snr_db > 40
        (22, True)
    """
    if isinstance(quantized, QuantizedTensor):
        if not isinstance(source, np.ndarray):
            raise ValueError(f"source must be an array if quantized is a QuantizedTensor, got {type(source).__name__}")
        return _error_of("", source, quantized)
    if isinstance(source, np.ndarray):
        raise ValueError(f"quantized must be a QuantizedTensor if source is an array, got {type(quantized).__name__}")
    with Catalog.of(source, storage_options) as originals, Catalog.of(quantized, storage_options) as codes:
        originals = like(originals, codes)
        tied = tied_heads(originals, schema_of(originals))
        names = {name: tied.get(name, name) for name in codes if codes.about(name).quantized}
        originals.check(names.values())
        originals.refuse_codes(names.values(), "quantization_error")
        errors = {name: _error_of(name, originals.array(origin), codes.value(name)) for name, origin in names.items()}
        return QuantizationTable(errors, map(codes.about, errors))


def _error_of(name: str, original: Any, quantized: Array | QuantizedTensor) -> QuantizationStats:
    assert isinstance(quantized, QuantizedTensor)
    original, shape = as_array(original, name), quantized.shape
    if original.shape != shape:
        text = f"the original has shape {list(original.shape)}, but the quantized tensor has shape {list(shape)}"
        raise ValueError(subject(name) + text)
    matrix = original if len(shape) > 1 else original.reshape(1, -1)
    # Packed tensors are dequantized whole, plain tensors in blocks of rows.
    whole = len(shape) < 2 or quantized.packing is not None
    values = quantized.dequantize(np.float32).reshape(matrix.shape) if whole else None
    largest, squares, signal = 0.0, 0.0, 0.0
    step = max(1, _BLOCK * len(matrix) // max(1, matrix.size))
    for begin in range(0, len(matrix), step):
        rows = slice(begin, begin + step)
        exact = matrix[rows].astype(np.float64)
        difference = exact - (quantized[rows].dequantize(np.float32) if values is None else values[rows])
        largest = max(largest, float(np.abs(difference).max(initial=0)))
        squares += float(np.square(difference).sum())
        signal += float(np.square(exact).sum())
    snr = math.inf if squares == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / squares)
    return QuantizationStats(largest, math.sqrt(squares / max(1, original.size)), snr)
