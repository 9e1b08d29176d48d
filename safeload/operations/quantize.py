"""Arrays and whole checkpoints in int8 or the blocks of ggml, quantized in the pass that reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import checkpoint as checkpoints
from ..base import dtypes
from ..base.arrays import as_array
from ..base.file import Array, PathLike, WeightFile
from ..base.native import lib
from ..base.table import missing
from ..checkpoint import Checkpoint
from ..engine import jobs
from ..engine import source as sources
from ..engine.jobs import Progress
from ..engine.quantized_tensor import INT8, QuantizedTensor, channels_of, storage_of
from ..engine.source import Source, subject
from ..errors import UnsupportedError
from ..models import schema as schemas
from ..models.schema import Schema
from . import catalog

# What `quantize` makes, with the number that the C core knows each rounding by.
_BLOCK_TARGETS = {
    ("q4_0", "absmax"): lib.SL_Q4_0_ABSMAX,
    ("q4_0", "ggml"): lib.SL_Q4_0,
    ("q8_0", "absmax"): lib.SL_Q8_0,  # the same: ggml's own scale is absmax / 127
    ("q8_0", "ggml"): lib.SL_Q8_0,
    ("q4_1", "ggml"): lib.SL_Q4_1,
    ("q5_0", "ggml"): lib.SL_Q5_0,
    ("q5_1", "ggml"): lib.SL_Q5_1,
}
SCHEMES = (INT8, *dict.fromkeys(scheme for scheme, _ in _BLOCK_TARGETS))
ROUNDINGS = ("absmax", "ggml")

#: Matrices that engines want in full precision: look-up tables, and what is small or scales others. For models without
#: a schema; where there is one, it says what a tensor is.
KEPT_NAMES = ("*embed*", "*_embd*", "*wte*", "*wpe*", "*pos_emb*", "*norm*", "*ln_*", "*bias")

_KEPT_ROLES = {"embedding": "is an embedding", "norm": "is a norm", "bias": "is a bias", "buffer": "is a buffer"}

# Head, the embedding that it is the same as where it is absent, and a tensor that only models with a head have: of
# Hugging Face's causal models and of llama.cpp's, where no schema says more.
_TIED = (
    ("lm_head.weight", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    ("output.weight", "token_embd.weight", "output_norm.weight"),
)
# Part of the architecture's name of GGUF files whose models give embeddings: they have a final norm, and no head.
_HEADLESS = "embedding"

Keep = str | Iterable[str] | Callable[[str], object] | None
Scheme = str | Mapping[str, str | None]

_F32 = dtypes.BY_CODE["F32"]
_INFINITY_BITS = 0x7F800000


class _Wanted(NamedTuple):
    """What to make of a source: a quantized tensor, or an array of the dtype numbered ``target``."""

    source: Source
    result: QuantizedTensor | Array
    target: int


def _new(source: Source, scheme: str, axis: int | None) -> QuantizedTensor:
    """A quantized tensor to be filled."""
    (data_dtype, data_shape), scale = storage_of(scheme, source.shape, axis)
    scales = None if scale is None else np.zeros(scale[1], scale[0])
    return QuantizedTensor(scheme, source.shape, jobs.private_array(data_shape, data_dtype), scales, axis)


def _run(wanted: Sequence[_Wanted], *, threads: int | None, progress: Progress) -> None:
    """Fills results: int8 in two passes over its source, everything else in one.

    Raises:
        RangeError: a value that its scheme cannot hold, with tensor and index.
    """
    scaled = [w for w in wanted if isinstance(w.result, QuantizedTensor) and w.result.scale is not None]
    first, second = _halves(progress, sum(w.source.size for w in scaled), sum(w.source.size for w in wanted))
    factors = _scales(scaled, threads, first)
    batch = jobs.Batch()
    for w in wanted:
        memory = sources.address(w.result.data if isinstance(w.result, QuantizedTensor) else w.result)
        if id(w) in factors:
            assert isinstance(w.result, QuantizedTensor)
            channels = channels_of(w.source.shape, w.result.axis, factors[id(w)])
            batch.add(w.source.work(lib.SL_OP_INT8, memory, channels=channels))
        else:
            batch.add(w.source.job(memory, w.target))
    batch.run(threads=threads, progress=second)


def _scales(scaled: Sequence[_Wanted], threads: int | None, progress: Progress) -> dict[int, Array]:
    """Fills in the scales of int8 tensors; what each is to be multiplied by, by identity."""
    maxima = [np.zeros(w.result.scale.shape, np.uint32) for w in scaled]  # type: ignore[union-attr]
    channels = [channels_of(w.source.shape, w.result.axis, None) for w in scaled]  # type: ignore[union-attr]
    work = [
        w.source.work(lib.SL_OP_ABSMAX, sources.address(bits), channels=one)
        for w, bits, one in zip(scaled, maxima, channels, strict=True)
    ]
    jobs.Batch(work).run(threads=threads, progress=progress)
    factors = {}
    for w, bits in zip(scaled, maxima, strict=True):
        if (bits >= _INFINITY_BITS).any():
            jobs.Batch([w.source.work(lib.SL_OP_FINITE, 0)]).run(threads=threads)  # says where
        absmax = bits.view(np.float32)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(127) / absmax
        usable = np.isfinite(inverse)
        w.result.scale[...] = np.where(usable, absmax / np.float32(127), np.float32(0))  # type: ignore[union-attr,index]
        factors[id(w)] = np.ascontiguousarray(np.where(usable, inverse, np.float32(0)), np.float32)
    return factors


def _halves(progress: Progress, first: int, second: int) -> tuple[Progress, Progress]:
    """Progress of two runs as that of one."""
    if not callable(progress) or not first:
        return None, progress
    report = progress
    return (lambda done, total: report(done, first + second)), (
        lambda done, total: report(first + done, first + second)
    )


# ---- one array ----


def quantize(
    x: Any,
    scheme: str,
    *,
    axis: int | None = None,
    rounding: str | None = None,
    out: QuantizedTensor | None = None,
    threads: int | None = None,
) -> QuantizedTensor:
    """An array in int8 or in blocks of ggml.

    - "int8": scale = absmax / 127, codes x * (127 / absmax) rounded half away from zero, within [-128, 127].
    - "q4_0": blocks of 32 along the last axis, each with a float16 scale d and 4-bit codes q, value (q - 8) * d. With
      ``rounding="absmax"`` d = absmax / 7 and q = round(x / d) + 8; with "ggml" what llama.cpp's reference makes, byte
      for byte.
    - "q8_0": blocks of 32 with a float16 scale absmax / 127 and int8 codes, as llama.cpp's reference makes them.
    - "q5_0": as "q4_0" with 5-bit codes, value (q - 16) * d; "q4_1" and "q5_1": with a float16 minimum m as well, value
      q * d + m. All as llama.cpp's reference makes them.

    The reference is https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c. An absmax of zero, or so small that
    its inverse is not finite, gives scale 0 and codes that restore to 0.

    Args:
        x: array of real numbers, or what numpy makes one of; for blocks with whole blocks of 32 in its last axis.
        scheme: "int8", "q4_0", "q4_1", "q5_0", "q5_1" or "q8_0".
        axis: for int8 the axis that keeps a scale for each of its elements; None for one scale.
        rounding: for "q4_0": "absmax" (the default) or "ggml"; "q8_0" has both, the same; others "ggml".
        out: a quantized tensor of the same scheme, shape and axis to fill; None for a new one. It stays as it was when
            a value is refused.
        threads: None for what helps.

    Returns:
        The quantized tensor; ``out`` if it was given.

    Raises:
        RangeError: NaN, infinity, or a block whose scale float16 cannot hold, with the index of the first.
        ValueError: no such scheme or rounding, an axis that is not there, rows that are not whole blocks, an ``out``
            that does not fit.
        TypeError: no real numbers.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.quantize(np.float32([-0.5, -0.25, 0.1, 0.5]), "int8").data
        array([-127,  -64,   25,  127], dtype=int8)
    """
    _check_scheme(scheme)
    target = _target(scheme, rounding)
    if scheme == INT8 and rounding is not None:
        raise ValueError("rounding is for q4_0: int8 has one")
    jobs.check_threads(threads)
    source = sources.of_reals("", x, threads)
    if axis is not None and axis < 0:
        axis += len(source.shape)
    storage_of(scheme, source.shape, axis)
    if out is not None:
        _check_fitting(out, source, scheme, axis)
    result = _new(source, scheme, axis)
    _run([_Wanted(source, result, target)], threads=threads, progress=None)
    if out is None:
        return result
    out.data[...] = result.data  # only now: a value that is refused leaves it as it was
    if out.scale is not None:
        out.scale[...] = result.scale
    return out


def quantize_source(
    source: Source | Array | QuantizedTensor,
    scheme: str,
    *,
    axis: int | None,
    rounding: str | None,
    data: Array,
    threads: int | None,
) -> QuantizedTensor:
    """One tensor, quantized into ``data``.

    Raises:
        RangeError: a value that the scheme cannot hold, with tensor and index.
    """
    if isinstance(source, QuantizedTensor):
        source = source.dequantize(threads=threads)
    given = source if isinstance(source, Source) else sources.of_reals("", source, threads)
    scale = storage_of(scheme, given.shape, axis)[1]
    result = QuantizedTensor(scheme, given.shape, data, None if scale is None else np.zeros(scale[1], scale[0]), axis)
    _run([_Wanted(given, result, _target(scheme, rounding))], threads=threads, progress=None)
    return result


def _check_scheme(scheme: object) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme!r} is none of {', '.join(SCHEMES)}")


def _target(scheme: str, rounding: str | None) -> int:
    """The number of what a job makes."""
    if rounding is not None and rounding not in ROUNDINGS:
        raise ValueError(f"rounding {rounding!r} is none of {', '.join(ROUNDINGS)}")
    if scheme == INT8:
        return int(lib.SL_I8)
    own = [name for of, name in _BLOCK_TARGETS if of == scheme]
    if rounding is not None and rounding not in own:
        raise ValueError(f"rounding {rounding!r} is not one of {scheme}, which has {', '.join(own)}")
    return int(_BLOCK_TARGETS[scheme, rounding or own[0]])


def _check_fitting(out: QuantizedTensor, source: Source, scheme: str, axis: int | None) -> None:
    if not isinstance(out, QuantizedTensor):
        raise TypeError(f"out must be a QuantizedTensor, not {type(out).__name__}")
    if (out.scheme, out.shape, out.axis) != (scheme, source.shape, axis):
        raise ValueError(f"out is {out!r}, but {scheme} {list(source.shape)} with axis={axis} is made")
    if not (out.data.flags.c_contiguous and out.data.flags.writeable):
        raise ValueError("out.data must be C-contiguous and writable")


# ---- whole checkpoints ----


class Summary(NamedTuple):
    """What `load_quantized` did; prints as a table.

    Attributes:
        bytes_before: of all tensors as they were in the source.
        bytes_after: of the result.
        quantized: name to scheme of what was quantized.
        kept: name to the reason why it was not.
    """

    bytes_before: int
    bytes_after: int
    quantized: dict[str, str]
    kept: dict[str, str]

    def __str__(self) -> str:
        ratio = self.bytes_before / self.bytes_after if self.bytes_after else 1.0
        times = f"{ratio:.2f} times smaller" if ratio >= 1 else f"{1 / ratio:.2f} times larger"
        lines = [f"{self.bytes_before:,} bytes became {self.bytes_after:,} ({times})"]
        for verb, groups in (("quantized to", self.quantized), ("kept:", self.kept)):
            counts: dict[str, list[str]] = {}
            for name, what in groups.items():
                counts.setdefault(what, []).append(name)
            for what, names in counts.items():
                lines.append(f"{len(names):6,} {verb} {what}: {names[0]}{', ...' if len(names) > 1 else ''}")
        return "\n".join(lines)


class QuantizedDict(dict[str, QuantizedTensor | Array]):
    """Name to array or `QuantizedTensor`, in the order of the source.

    Attributes:
        summary: what was quantized, what was kept and why.
    """

    summary: Summary


class Planned(NamedTuple):
    """What becomes of a tensor.

    Attributes:
        scheme: what it is quantized to; None where it is left as it is.
        reason: why it is left.
        already: whether it is left because it is of the scheme that is asked for.
    """

    scheme: str | None
    reason: str = ""
    already: bool = False


class Model(NamedTuple):
    """What tells the roles of tensors: embedding, head, norm.

    Attributes:
        names: of all tensors.
        config: parsed ``config.json``; None without one.
        schema: of the architecture; None for one that is not known.
        architecture: ``general.architecture`` of a GGUF file; "" without one.
    """

    names: Collection[str]
    config: Mapping[str, Any] | None = None
    schema: Schema | None = None
    architecture: str = ""

    @classmethod
    def of(
        cls,
        names: Collection[str],
        config: Mapping[str, Any] | None,
        format: str | None,
        metadata: Mapping[Any, Any],
    ) -> Model:
        """The model that tensors of these names are."""
        choice = schemas.choose(config, format, names)
        architecture = str(metadata.get("general.architecture", ""))
        return cls(names, config, None if choice is None else choice.schema, architecture)

    @classmethod
    def of_source(cls, given: Checkpoint | Mapping[str, Any]) -> Model:
        """The model in a checkpoint or a dict."""
        if isinstance(given, Checkpoint):
            return cls.of(given.keys(), given.config, given.format, given.metadata)
        return cls(given.keys())

    def tied_heads(self) -> dict[str, str]:
        """Heads that are not there because they are the same as an embedding, and that embedding."""
        names = self.names
        if self.schema is not None:
            try:
                return self.schema.tied(names, self.config)
            except ValueError:  # a config that does not say
                return {}
        if _HEADLESS in self.architecture:
            return {}
        return {
            head: embedding
            for head, embedding, sign in _TIED
            if head not in names and embedding in names and sign in names
        }


def check_restorable(name: str, scheme: str) -> None:
    """Refuses a quantized tensor that cannot be dequantized, which quantizing it anew needs.

    Raises:
        UnsupportedError: there is no kernel for its scheme.
    """
    row = dtypes.BY_CODE["I8"] if scheme == INT8 else dtypes.BLOCK_TYPES[scheme]
    if not lib.sl_convertible(row.number, _F32.number):
        raise UnsupportedError(f"tensor {name!r} is {scheme}, which this version does not dequantize")


class Rules:
    """Which tensors are quantized to what."""

    def __init__(self, scheme: Scheme, keep: Keep) -> None:
        self.schema: Schema | None = None
        self._schemes = {"*": scheme} if isinstance(scheme, str) else dict(scheme)
        for known in self._schemes.values():
            if known is not None:
                _check_scheme(known)
        self._keep = keep if callable(keep) else None
        self._patterns = () if keep is None or callable(keep) else (keep,) if isinstance(keep, str) else tuple(keep)

    def plan(self, name: str, row: dtypes.Dtype, shape: tuple[int, ...], scheme: str | None = None) -> Planned:
        """What becomes of a tensor.

        Args:
            name: its name.
            row: its dtype.
            shape: its logical shape.
            scheme: of a tensor that is quantized already; None for any other.
        """
        if not row.floating and scheme is None:
            return Planned(None, f"is {row.name}, not floating")
        if len(shape) not in (2, 3):
            return Planned(None, f"is {len(shape)}-D, not 2-D or 3-D")
        if 0 in shape:
            return Planned(None, "is empty")
        found = next(((p, s) for p, s in self._schemes.items() if fnmatchcase(name, p)), None)
        if found is None:
            return Planned(None, "no pattern of scheme= matches")
        if found[1] is None:
            return Planned(None, f"scheme={{{found[0]!r}: None}}")
        if found[1] == scheme:
            return Planned(None, f"is {scheme} already", already=True)
        kept = next((p for p in self._patterns if fnmatchcase(name, p)), None)
        if kept is not None:
            return Planned(None, f"keep={kept!r}")
        if self._keep is not None and self._keep(name):
            return Planned(None, "keep= said so")
        usual = self._usual(name)
        if usual is not None and found[0] == "*":  # a pattern of one's own is stronger than the usual
            return Planned(None, usual)
        if found[1] != INT8 and shape[-1] % 32:
            return Planned(None, f"rows of {shape[-1]} elements are no whole blocks of 32")
        if scheme is not None:
            check_restorable(name, scheme)
        return Planned(found[1])

    def _usual(self, name: str) -> str | None:
        """Why a tensor is usually kept, None where it is not."""
        role = None if self.schema is None else self.schema.role(name)
        if role is not None:
            return _KEPT_ROLES.get(role)
        pattern = next((p for p in KEPT_NAMES if fnmatchcase(name, p)), None)
        return None if pattern is None else f"matches {pattern}"


def load_quantized(
    source: PathLike | Checkpoint | Mapping[str, Any],
    scheme: Scheme = "q4_0",
    *,
    keep: Keep = None,
    tie_lm_head: bool = True,
    rounding: str | None = None,
    axis: int | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> QuantizedDict:
    """A checkpoint with its matrices quantized and everything else floating as float32, in one pass over its bytes.

    Quantized are floating tensors of 2 axes (of 3: each matrix), except embeddings, norms and biases. The schema of the
    architecture that ``config.json`` names says which those are (see `safeload.models.schema`); for other models
    `KEPT_NAMES` does. Integer, bool and complex tensors come unchanged. A tensor that is quantized already is
    dequantized and quantized again if another scheme is asked for; otherwise it stays as it is. For int8 each matrix is
    read twice, once for its absmax.

    A head that is absent because it is tied to the embedding (by the schema and the config; of an unknown architecture
    ``lm_head.weight`` to ``model.embed_tokens.weight``, in GGUF files ``output.weight`` to ``token_embd.weight``)
    appears quantized from it, and the embedding stays float32.

    Args:
        source: path of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays.
        scheme: as in `quantize`; or pattern (as ``fnmatch`` has them) to scheme for mixed precision, where the
            first that matches counts, None keeps, and any pattern but "*" is stronger than `KEPT_NAMES`.
        keep: patterns of names to keep, or a function of the name.
        tie_lm_head: False to leave out the tied head.
        rounding: for "q4_0": "absmax" (the default) or "ggml".
        axis: for int8 the axis that keeps its own scales; None for one scale a matrix: [N] for N of them in one tensor.
        threads: None for what helps.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array or `QuantizedTensor`, in the order of the source; its ``summary`` says what was kept and why.

    Raises:
        RangeError: NaN, infinity, or a block whose scale float16 cannot hold, with tensor and index.
        ValueError: wrong arguments.
        UnsupportedError: a tensor holds codes, such as fp8 with a scale beside it; or see `safeload.open`.
        FormatError, OSError: see `safeload.open` and `Checkpoint.load`.
    """
    _target("q4_0", rounding)
    jobs.check_threads(threads)
    rules = Rules(scheme, keep)
    if isinstance(source, Checkpoint):
        return _quantize_all(source, rules, tie_lm_head, rounding, axis, threads, progress)
    if isinstance(source, Mapping):
        return _quantize_all(source, rules, tie_lm_head, rounding, axis, threads, progress)
    with checkpoints.open(source) as opened:
        return _quantize_all(opened, rules, tie_lm_head, rounding, axis, threads, progress)


class _Stored(NamedTuple):
    """A quantized tensor of a checkpoint, which is read when its turn comes."""

    scheme: str
    shape: tuple[int, ...]
    nbytes: int
    load: Callable[[], QuantizedTensor]


def _tensors(given: Checkpoint | Mapping[str, Any]) -> dict[str, Source | _Stored]:
    """Each tensor as a source, or as what it is if it is quantized already."""
    if isinstance(given, Checkpoint):
        return {name: _of_file(given, name, file, index) for name, file, index in given._parts()}
    return {
        name: _Stored(value.scheme, value.shape, value.nbytes, partial(_same, value))
        if isinstance(value, QuantizedTensor)
        else sources.of_array(name, value)
        for name, value in given.items()
    }


def _same(value: QuantizedTensor) -> QuantizedTensor:
    return value


def _of_file(opened: Checkpoint, name: str, file: WeightFile, index: int) -> Source | _Stored:
    row, shape, scale = file.table.row(index), file.table.shape(index), file.table.scale(index)
    if not row.blocked and scale is None:
        source = catalog.of_file(opened, name, file, index)
        assert isinstance(source, Source)
        return source
    size = row.nbytes(math.prod(shape)) + (0 if scale is None else scale.end - scale.begin)

    def load() -> QuantizedTensor:
        value: QuantizedTensor = opened.load([name], backend="pread")[name]
        return value

    return _Stored(row.name if scale is None else INT8, shape, size, load)


def _quantize_all(
    given: Checkpoint | Mapping[str, Any],
    rules: Rules,
    tie_lm_head: bool,
    rounding: str | None,
    axis: int | None,
    threads: int | None,
    progress: Progress,
) -> QuantizedDict:
    catalog.refuse_codes(given, given, "load_quantized")
    tensors = _tensors(given)
    before = sum(value.size if isinstance(value, Source) else value.nbytes for value in tensors.values())
    model = Model.of_source(given)
    rules.schema = model.schema
    for head, embedding in model.tied_heads().items() if tie_lm_head else ():
        tied = tensors[embedding]
        if isinstance(tied, Source) and tied.row.floating and rules.plan(head, tied.row, tied.shape).scheme is not None:
            tensors[head] = tied._replace(name=head)
    result, quantized, kept = QuantizedDict(), {}, {}
    wanted = []
    for name, value in tensors.items():
        stored = value.scheme if isinstance(value, _Stored) else None
        row = value.row if isinstance(value, Source) else _F32
        plan = rules.plan(name, row, value.shape, stored)
        if plan.scheme is None:
            kept[name] = plan.reason
            if isinstance(value, _Stored):
                result[name] = value.load()
                continue
            row = _F32 if row.floating else row
            array = jobs.private_array(value.shape, dtypes.array_dtype(row.number))
            result[name] = array
            wanted.append(_Wanted(value, array, row.number))
            continue
        quantized[name] = plan.scheme
        kept_axis = _axis_of(name, value.shape, axis) if plan.scheme == INT8 else None
        target = _target(plan.scheme, rounding if plan.scheme == "q4_0" else None)
        if isinstance(value, _Stored):  # one after the other: each is held as float32 for a moment
            restored = sources.of_reals(name, value.load().dequantize(threads=threads), threads)
            result[name] = new = _new(restored, plan.scheme, kept_axis)
            _run([_Wanted(restored, new, target)], threads=threads, progress=None)
        else:
            result[name] = new = _new(value, plan.scheme, kept_axis)
            wanted.append(_Wanted(value, new, target))
    _run(wanted, threads=threads, progress=progress)
    for name, made in result.items():
        if isinstance(made, np.ndarray):
            result[name] = jobs.native_order(made)
    result.summary = Summary(before, sum(made.nbytes for made in result.values()), quantized, kept)
    return result


def _axis_of(name: str, shape: tuple[int, ...], axis: int | None) -> int | None:
    """The axis of a tensor whose elements keep their own scales: of 3 axes at least one for each matrix."""
    if axis is None:
        return 0 if len(shape) == 3 else None
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{subject(name)}axis {axis} is outside the axes of {list(shape)}")
    return axis % len(shape)


# ---- what it cost ----


class QuantizationError(NamedTuple):
    """How far restored values are from the original ones.

    Attributes:
        max_error: largest absolute difference.
        rms_error: root of the mean square of the differences.
        snr_db: 10 * log10(sum of squares of the original / sum of squares of the differences); infinite for no
            difference.
    """

    max_error: float
    rms_error: float
    snr_db: float


# Elements that are compared at a time.
_COMPARED = 1 << 20


def quantization_error(
    source: PathLike | Checkpoint | Mapping[str, Any] | Array,
    quantized: PathLike | Checkpoint | Mapping[str, Any] | QuantizedTensor,
) -> dict[str, QuantizationError] | QuantizationError:
    """What quantization cost: of one tensor, or of each quantized tensor of a checkpoint.

    Args:
        source: the original values: an array, a dict of arrays, a `Checkpoint` or a path.
        quantized: what became of them: a `QuantizedTensor` for an array, else a dict (as `load_quantized` gives it), a
            `Checkpoint` or a path. A tied head is compared with the embedding.

    Returns:
        A `QuantizationError` for one tensor, else a dict of them by name, of the quantized tensors only.

    Raises:
        TensorNotFoundError: a quantized tensor is not in the source.
        ValueError: shapes differ, or one is a single tensor and the other is not.
    """
    if isinstance(quantized, QuantizedTensor):
        if not isinstance(source, np.ndarray):
            raise ValueError(f"a single QuantizedTensor is compared with an array, not with a {type(source).__name__}")
        return _error_of("", source, quantized)
    if isinstance(source, np.ndarray):
        raise ValueError(f"an array is compared with a QuantizedTensor, not with a {type(quantized).__name__}")
    if not isinstance(source, Mapping):
        with checkpoints.open(source) as opened:
            return quantization_error(opened, quantized)
    if not isinstance(quantized, Mapping):
        with checkpoints.open(quantized) as opened:
            return quantization_error(source, opened)
    tied = Model.of_source(source).tied_heads()
    values = {name: value for name, value in quantized.items() if isinstance(value, QuantizedTensor)}
    originals = {name: tied.get(name, name) for name in values}
    lost = next((origin for origin in originals.values() if origin not in source), None)
    if lost is not None:
        raise missing(lost, [known for known in source if isinstance(known, str)])
    catalog.refuse_codes(source, originals.values(), "quantization_error")
    return {name: _error_of(name, source[originals[name]], value) for name, value in values.items()}


def _error_of(name: str, original: Any, quantized: QuantizedTensor) -> QuantizationError:
    if isinstance(original, QuantizedTensor):
        original = original.dequantize()
    original = as_array(original, name)
    if original.shape != quantized.shape:
        raise ValueError(
            f"{subject(name)}the original has shape {list(original.shape)}, the quantized one {list(quantized.shape)}"
        )
    largest, squares, signal = 0.0, 0.0, 0.0
    for exact, restored in _pieces(original, quantized):
        difference = exact - restored
        largest = max(largest, float(np.abs(difference).max(initial=0)))
        squares += float(np.square(difference).sum())
        signal += float(np.square(exact).sum())
    count = max(1, original.size)
    snr = math.inf if squares == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / squares)
    return QuantizationError(largest, math.sqrt(squares / count), snr)


def _pieces(original: Array, quantized: QuantizedTensor) -> Iterable[tuple[Array, Array]]:
    """Original and restored values in float64, some rows at a time."""
    if len(original.shape) < 2:
        yield np.float64(original), quantized.dequantize(np.float32).astype(np.float64)
        return
    step = max(1, _COMPARED * original.shape[0] // max(1, original.size))
    for begin in range(0, original.shape[0], step):
        rows = slice(begin, begin + step)
        exact = original[rows].astype(np.float64)
        yield exact, quantized._rows(rows).dequantize(np.float32).astype(np.float64)
