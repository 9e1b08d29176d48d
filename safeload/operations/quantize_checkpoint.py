"""Whole checkpoints quantized: which tensors, to what, by whose rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import checkpoint as checkpoints
from ..base import dtypes
from ..base.file import Array, PathLike, WeightFile
from ..base.native import lib
from ..checkpoint import Checkpoint
from ..engine import jobs
from ..engine import source as sources
from ..engine.jobs import Progress
from ..engine.quantized_tensor import INT8, QuantizedTensor
from ..engine.source import Source, subject
from ..errors import UnsupportedError
from ..models.choosing import choose
from ..models.schema import Schema
from . import catalog
from .quantize import Request, check_scheme, new_tensor, run_requests, target_number

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
        choice = choose(config, format, names)
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
                check_scheme(known)
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
    target_number("q4_0", rounding)
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
        return {name: _of_file(given, name, file, index) for name, file, index in given.entries()}
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
            wanted.append(Request(value, array, row.number))
            continue
        quantized[name] = plan.scheme
        kept_axis = _axis_of(name, value.shape, axis) if plan.scheme == INT8 else None
        target = target_number(plan.scheme, rounding if plan.scheme == "q4_0" else None)
        if isinstance(value, _Stored):  # one after the other: each is held as float32 for a moment
            restored = sources.of_reals(name, value.load().dequantize(threads=threads), threads)
            result[name] = new = new_tensor(restored, plan.scheme, kept_axis)
            run_requests([Request(restored, new, target)], threads=threads, progress=None)
        else:
            result[name] = new = new_tensor(value, plan.scheme, kept_axis)
            wanted.append(Request(value, new, target))
    run_requests(wanted, threads=threads, progress=progress)
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
