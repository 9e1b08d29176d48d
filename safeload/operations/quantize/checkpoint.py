"""Quantize whole checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.packing import INT8, SCHEMES, usual_axis
from ...base.paths import PathLike
from ...base.showing import Result, dict_repr
from ...base.text import subject
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source, of_reals
from ...engine.run import jobs
from ...engine.run.memory import check_threads, private_array
from ...engine.run.progress import Progress, reporter
from ...errors import exported, public
from ...packed.families import preset_of, presets
from ...packed.packed_group import GroupContext, packing_of
from ..sources.catalog import Catalog, Given, TensorDescription
from .encoding import Encoding, ScratchBuffers, Weights, encode, largest_in, weights_in
from .engine_rules import EngineRules, arranged, nothing_left
from .quantize import Request, Rounding, new_tensor, run_requests, weighted_rounding
from .rules import Keep, Rules, Scheme, heads_to_quantize, importance_by_name, schema_of, tied_heads

_F32 = dtypes.BY_CODE["F32"]


class _SummaryFields(NamedTuple):
    bytes_before: int
    bytes_after: int
    quantized: dict[str, str]
    kept: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...], int]] | None = None


@exported()
class Summary(Result, _SummaryFields):
    """Summary of `load_quantized`; prints as a table.

    It has a row for each tensor; ``scheme`` is "" for tensors that were kept, for the reason in ``kept``.

    Attributes:
        bytes_before: bytes of all tensors as stored in the source.
        bytes_after: bytes of the result.
        quantized: the scheme of each quantized tensor, by name.
        kept: the reason for each unquantized tensor, by name.
        tensors: dtype, shape and bytes of each tensor in the source, by name. Unknown after a conversion in pieces.
    """

    __slots__ = ()

    _columns = ("name", "dtype", "shape", "nbytes", "scheme", "kept")
    _json = (*_SummaryFields._fields[:-1], ("tensors", Result.rows))

    def _values(self) -> Iterable[Any]:
        tensors = self.tensors or {}
        for name in {**dict.fromkeys(tensors), **dict.fromkeys(self.quantized), **dict.fromkeys(self.kept)}:
            dtype, shape, nbytes = tensors.get(name, ("", (), 0))
            yield name, dtype, [*shape], nbytes, self.quantized.get(name, ""), self.kept.get(name, "")

    def _about(self) -> Sequence[str]:
        return [line.strip() for line in str(self).splitlines()]

    def __str__(self) -> str:
        ratio = self.bytes_before / self.bytes_after if self.bytes_after else 1.0
        times = f"{ratio:.2f} times smaller" if ratio >= 1 else f"{1 / ratio:.2f} times larger"
        lines = [f"{self.bytes_before:,} bytes became {self.bytes_after:,} ({times})"]
        for verb, groups in (("quantized to", self.quantized), ("kept:", self.kept)):
            counts: dict[str, list[str]] = {}
            for name, label in groups.items():
                counts.setdefault(label, []).append(name)
            for label, names in counts.items():
                lines.append(f"{len(names):6,} {verb} {label}: {names[0]}{', ...' if len(names) > 1 else ''}")
        return "\n".join(lines)


def described(tensors: Mapping[str, TensorDescription]) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return ``tensors`` of a summary."""
    return {name: (about.code, about.shape, about.nbytes) for name, about in tensors.items()}


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
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> QuantizedDict:
    """Load a checkpoint with its matrices quantized and other floating tensors as float32, in one pass over its bytes.

    Floating tensors with 2 axes are quantized (with 3 axes: each matrix), except embeddings, norms and biases. These
    are identified by the schema of the architecture in ``config.json``, or by `KEPT_NAMES` if there is no schema.
    Integer, bool and complex tensors are unchanged. Tensors that are already quantized stay as they are, unless another
    scheme is requested: then they are dequantized and quantized again. For int8 each matrix is read twice, first for
    its absmax.

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
    SCHEMES["q4_0"].target(rounding)
    check_threads(threads)
    preset = preset_of(scheme)
    if preset is not None and (rounding is not None or axis is not None or imatrix is not None):
        raise ValueError(f"{preset.name} does not accept rounding=, axis= or imatrix=")
    if imatrix is not None:
        rounding = weighted_rounding(scheme, rounding, "imatrix=")
    rules: Rules | EngineRules
    rules = plain = Rules({} if preset is not None else scheme, keep)
    with Catalog.of(source, storage_options) as catalog:
        catalog.refuse_codes(catalog, "load_quantized")
        heads: Mapping[str, str] = {}
        if preset is not None:
            catalog = arranged(catalog, preset)
            rules = EngineRules(preset, keep, catalog, schema_of(catalog), chosen=catalog.config is None)
            abouts = {name: catalog.about(name) for name in catalog if not rules.drops(name)}
            rules.kept.check(abouts)
        else:
            plain.schema = schema_of(catalog)
            abouts = {name: catalog.about(name) for name in catalog}
            tied = tied_heads(catalog, plain.schema) if tie_lm_head else {}
            heads = heads_to_quantize(tied, plain, abouts.__getitem__)
        before = sum(about.nbytes for about in abouts.values())
        abouts.update((head, abouts[embedding]) for head, embedding in heads.items())
        plans = {name: rules.plan(name, about) for name, about in abouts.items()}
        quantized = {name: plan.scheme for name, plan in plans.items() if plan.scheme is not None}
        kept = {name: plan.reason for name, plan in plans.items() if plan.scheme is None}
        if isinstance(rules, EngineRules):
            if not quantized:
                raise nothing_left(rules.preset, kept)
            result = _encoded(catalog, rules, abouts, quantized, threads=threads, progress=progress)
        else:
            shapes = {name: abouts[name].shape for name, to in quantized.items() if to != INT8}
            importance = importance_by_name({} if imatrix is None else imatrix, shapes)
            options: Any = {"rounding": rounding, "axis": axis, "threads": threads, "progress": progress}
            result = _quantized(catalog, abouts, heads, quantized, importance=importance, **options)
        for name, value in result.items():
            if isinstance(value, np.ndarray):
                result[name] = jobs.native_order(value)
        after = sum(value.nbytes for value in result.values())
        result.summary = Summary(before, after, quantized, kept, described(abouts))
        return result


def _quantized(
    catalog: Catalog,
    abouts: Mapping[str, TensorDescription],
    heads: Mapping[str, str],  # the embedding of each tied head
    quantized: Mapping[str, str],  # the scheme of each tensor to quantize
    *,
    importance: Mapping[str, Array],
    rounding: Rounding | None,
    axis: int | None,
    threads: int | None,
    progress: Progress,
) -> QuantizedDict:
    """Load tensors quantized, and other floating tensors as float32, in one run."""

    def request(name: str, values: Source) -> Request:
        if name not in quantized:
            row = _F32 if values.row.floating else values.row
            return Request(values, private_array(values.shape, dtypes.array_dtype(row.number)), row.number)
        to = quantized[name]
        shape, own_axis = abouts[name].shape, axis if to == INT8 else None
        if own_axis is None:  # int8 tensors with 3 axes have at least a scale per matrix
            own_axis = usual_axis(to, shape)
        elif not -len(shape) <= own_axis < len(shape):
            raise ValueError(f"{subject(name)}axis {axis} is out of range for shape {list(shape)}")
        target = SCHEMES[to].target(rounding if to == "q4_0" else None)
        return Request(values, new_tensor(values, to, own_axis and own_axis % len(shape)), target, importance.get(name))

    result, requests = QuantizedDict(), []
    for name, about in abouts.items():
        origin = heads.get(name, name)
        as_stored = about.quantized and not about.packed
        value: Any = catalog.value(origin) if as_stored else catalog.values(origin, name)
        if isinstance(value, Source):
            requests.append(request(name, value))
            result[name] = requests[-1].result
            continue
        result[name] = value
        if isinstance(value, QuantizedTensor) and (name in quantized or about.packed):
            result[name] = array = value.dequantize(threads=threads)
            if name in quantized:  # at once, so that only one is in memory as float32
                only = request(name, of_reals(name, array, threads))
                run_requests([only], threads=threads, progress=None)
                result[name] = only.result
    run_requests(requests, threads=threads, progress=progress)
    return result


def _encoded(
    catalog: Catalog,
    rules: EngineRules,
    abouts: Mapping[str, TensorDescription],
    quantized: Mapping[str, str],  # the format of each tensor to quantize
    *,
    threads: int | None,
    progress: Progress,
) -> QuantizedDict:
    """Load tensors as a folder for an engine would hold them, one after another."""
    context, buffers = GroupContext({}, rules.quantization(quantized)), ScratchBuffers()
    maxima: dict[tuple[str, ...], float] = {}  # largest magnitudes of weights that share a scale
    result, done = QuantizedDict(), 0

    def weights(encoding: Encoding) -> Weights:
        return weights_in(catalog, encoding.name, encoding.row, buffers, private_array, threads=threads)

    with reporter(progress, sum(about.nbytes for about in abouts.values())) as report:
        for name, about in abouts.items():
            if name in quantized:
                preset = presets()[quantized[name]]
                encoding = Encoding(name, preset, about.shape, rules.weight_dtype(about, None))
                partners = rules.partners(name, quantized)
                if partners and partners not in maxima:
                    each = (encoding._replace(name=other, shape=abouts[other].shape) for other in partners)
                    maxima[partners] = max(largest_in(other, weights(other), threads) for other in each)
                parts = encode(encoding, weights(encoding), largest=maxima.get(partners), threads=threads)
                parts = {role: jobs.native_order(part) for role, part in {**parts, **encoding.constants()}.items()}
                module = name.removesuffix(".weight")
                names = {role: module + part.suffix for role, part in preset.parts.items()}
                kind = packing_of(context, name, names, parts)
                result[name] = QuantizedTensor.of_parts(kind, {packing.NAME: name, **names}, parts)
            elif (row := rules.kept_dtype(about, None)) is None or not (about.floating or about.scheme is not None):
                result[name] = catalog.value(name, threads)
            else:
                result[name] = array = private_array(about.shape, dtypes.array_dtype(row.number))
                catalog.read_into(name, row, array, threads)
            done += about.nbytes
            report(done)
    return result
