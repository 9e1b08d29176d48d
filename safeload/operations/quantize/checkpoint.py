"""Quantizes whole checkpoints: which tensors, to which scheme, by which rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.listing import dict_repr
from ...base.scheme import INT8, SCHEMES, parse, row_of, usual_axis
from ...base.text import show, subject
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import Source, of_reals
from ...engine.run import jobs
from ...engine.run.memory import private_array
from ...engine.run.progress import Progress
from ...engine.run.threads import check_threads
from ...errors import UnsupportedError
from ...models.choosing import choose
from ...models.schema import Schema
from ...models.tied import absent_heads
from ..sources.catalog import Catalog, Given
from ..sources.description import TensorDescription
from .quantize import Request, Rounding, SchemeName, new_tensor, run_requests

#: Names of matrices that engines want in full precision: lookup tables, and tensors that are small or scale others.
#: Used for models without a schema; a schema gives the role of each tensor.
KEPT_NAMES = ("*embed*", "*_embd*", "*wte*", "*wpe*", "*pos_emb*", "*norm*", "*ln_*", "*bias")

_KEPT_ROLES = {"embedding": "is an embedding", "norm": "is a norm", "bias": "is a bias", "buffer": "is a buffer"}

# Part of the architecture name of embedding models in GGUF files: they have a final norm, but no head.
_HEADLESS = "embedding"

Keep = str | Iterable[str] | Callable[[str], object] | None
Scheme: TypeAlias = SchemeName | Mapping[str, SchemeName | None]

_F32 = dtypes.BY_CODE["F32"]


class Summary(NamedTuple):
    """Summary of `load_quantized`; prints as a table.

    Attributes:
        bytes_before: bytes of all tensors as stored in the source.
        bytes_after: bytes of the result.
        quantized: name to scheme of each tensor that was quantized.
        kept: name to reason of each tensor that was left unquantized.
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
        summary: which tensors were quantized, and why the others were not.
    """

    summary: Summary

    def __repr__(self) -> str:
        made = Counter(self.summary.quantized.values()) if hasattr(self, "summary") else {}
        note = ", ".join(f"{count:,} quantized to {scheme}" for scheme, count in made.items())
        return dict_repr("QuantizedDict", self, note)


class Planned(NamedTuple):
    """The decision about one tensor.

    Attributes:
        scheme: the scheme to quantize it to; None if it is left unquantized.
        reason: why it is left unquantized.
        already: whether the reason is that it is of the requested scheme already.
    """

    scheme: str | None
    reason: str = ""
    already: bool = False


class ModelRules(NamedTuple):
    """What the roles of tensors are derived from: embedding, head, norm.

    Attributes:
        names: names of all tensors.
        config: parsed ``config.json``; None without one.
        schema: schema of the architecture; None if it is unknown.
        architecture: ``general.architecture`` of a GGUF file; "" without one.
    """

    names: Collection[str]
    config: Mapping[str, Any] | None = None
    schema: Schema | None = None
    architecture: str = ""

    @classmethod
    def of(cls, catalog: Catalog) -> ModelRules:
        """The model of a catalog."""
        names = dict.fromkeys(catalog).keys()
        choice = choose(catalog.config, catalog.format, names)
        architecture = str(catalog.metadata.get("general.architecture", ""))
        return cls(names, catalog.config, None if choice is None else choice.schema, architecture)

    def tied_heads(self) -> dict[str, str]:
        """Absent heads that are tied to an embedding: name of the head to name of the embedding."""
        if self.schema is None and _HEADLESS in self.architecture:
            return {}
        return absent_heads(self.schema, self.names, self.config)


def check_restorable(name: str, scheme: str) -> None:
    """Refuses a quantized tensor that cannot be dequantized, as requantizing it needs.

    Raises:
        UnsupportedError: there is no kernel for its scheme.
    """
    try:
        readable = row_of(scheme).converts_to(_F32)
    except ValueError:  # a ggml type that this version does not know
        readable = False
    if not readable:
        raise UnsupportedError(f"tensor {show(name)} is {scheme}, which this version does not dequantize")


class Rules:
    """The rules for which tensors are quantized to which scheme."""

    def __init__(self, scheme: Scheme, keep: Keep) -> None:
        self.schema: Schema | None = None
        given = scheme if isinstance(scheme, Mapping) else {"*": parse(scheme)}
        self._schemes = {pattern: None if one is None else parse(one) for pattern, one in given.items()}
        self._keep = keep if callable(keep) else None
        self._patterns = () if keep is None or callable(keep) else (keep,) if isinstance(keep, str) else tuple(keep)

    def plan(self, name: str, about: TensorDescription) -> Planned:
        """Decides about one tensor: the first reason that applies leaves it unquantized."""
        shape, scheme = about.shape, about.scheme
        if not about.floating and scheme is None:
            return Planned(None, f"is {about.dtype}, not floating")
        if len(shape) not in (2, 3):
            return Planned(None, f"is {len(shape)}-D, not 2-D or 3-D")
        if 0 in shape:
            return Planned(None, "is empty")
        found = next(((p, s) for p, s in self._schemes.items() if fnmatchcase(name, p)), None)
        if found is None:
            return Planned(None, "no pattern of scheme= matches")
        if found[1] is None:
            return Planned(None, f"scheme={{{show(found[0])}: None}}")
        made = SCHEMES[found[1]].of_rows(shape[-1])
        if scheme is not None and scheme in (found[1], made):
            return Planned(None, f"is {scheme} already", already=True)
        kept = next((p for p in self._patterns if fnmatchcase(name, p)), None)
        if kept is not None:
            return Planned(None, f"keep={show(kept)}")
        if self._keep is not None and self._keep(name):
            return Planned(None, "keep= said so")
        usual = self.usual(name)
        if usual is not None and found[0] == "*":  # an explicit pattern overrides the defaults
            return Planned(None, usual)
        if made is None:
            return Planned(None, f"rows of {shape[-1]} elements are not whole blocks of {SCHEMES[found[1]].block}")
        if scheme is not None and not about.packed:
            check_restorable(name, scheme)
        return Planned(made)

    def usual(self, name: str) -> str | None:
        """Why a matrix of this name is left unquantized by default; None if it is quantized."""
        role = None if self.schema is None else self.schema.role(name)
        if role is not None:
            return _KEPT_ROLES.get(role)
        pattern = next((p for p in KEPT_NAMES if fnmatchcase(name, p)), None)
        return None if pattern is None else f"matches {pattern}"


def heads_to_quantize(model: ModelRules, rules: Rules, about: Callable[[str], TensorDescription]) -> dict[str, str]:
    """Tied heads that are quantized although no file has them: name of the head to name of its embedding."""
    found = {}
    for head, embedding in model.tied_heads().items():
        origin = about(embedding)
        if not origin.quantized and origin.floating and rules.plan(head, origin).scheme is not None:
            found[head] = embedding
    return found


def load_quantized(
    source: Given,
    scheme: Scheme = "q4_0",
    *,
    keep: Keep = None,
    tie_lm_head: bool = True,
    rounding: Rounding | None = None,
    axis: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> QuantizedDict:
    """Loads a checkpoint with its matrices quantized and other floating tensors as float32, in one pass over its bytes.

    Floating tensors of 2 axes are quantized (of 3 axes: each matrix), except embeddings, norms and biases. The schema
    that ``config.json`` selects says which those are (see `safeload.models.schema`); without one, `KEPT_NAMES` does.
    Integer, bool and complex tensors are unchanged. A tensor that is already quantized is dequantized and quantized
    again if another scheme is requested; otherwise it is unchanged. For int8 each matrix is read twice, once for its
    absmax.

    A head that is absent because it is tied to the embedding is quantized from it, and the embedding stays float32. The
    schema and the config say what is tied. For an unknown architecture ``lm_head.weight`` is tied to
    ``model.embed_tokens.weight``, and in GGUF files ``output.weight`` to ``token_embd.weight``.

    Args:
        source: path or URL of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays.
        scheme: as in `quantize`; or a dict of ``fnmatch`` pattern to scheme for mixed precision. The first pattern that
            matches decides, None leaves the tensor unquantized, and any pattern other than "*" overrides the schema
            and `KEPT_NAMES`. Matrices whose rows are not whole super-blocks of 256 get, as in llama.cpp, "q5_0" instead
            of "q4_k", "q5_1" instead of "q5_k", and "q8_0" instead of "q6_k".
        keep: patterns of names to leave unquantized, or a function of the name.
        tie_lm_head: False to omit the tied head.
        rounding: for "q4_0": "absmax" (the default) or "ggml".
        axis: for int8 the axis with a scale for each of its elements; None for one scale for each matrix, so shape [N]
            for a tensor of N matrices.
        storage_options: for URLs: options of the filesystem that a URL leads to, see `open`.
        threads: None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array or `QuantizedTensor`, in the order of the source; its ``summary`` says which were left unquantized
        and why.

    Raises:
        RangeError: NaN, infinity, or a block whose scale float16 cannot hold, with tensor and index.
        ValueError: wrong arguments.
        UnsupportedError: a tensor holds codes of a family that is not dequantized, such as EXL2, or stored codes; or
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
    rules = Rules(scheme, keep)
    with Catalog.of(source, storage_options) as catalog:
        catalog.refuse_codes(catalog, "load_quantized")
        work = _Work(catalog, rules, tie_lm_head, rounding, axis, threads)
        return work.run(progress)


class _Tensor(NamedTuple):
    """A tensor of the result.

    Attributes:
        origin: name of the tensor that it is made from; for a tied head that of the embedding.
        about: description of the origin.
        source: values of the origin; None if it is quantized: it is read when its turn comes.
    """

    origin: str
    about: TensorDescription
    source: Source | None


class _Work:
    """One run of `load_quantized`.

    Args:
        catalog: the tensors.
        rules: decide which tensors are quantized to which scheme.
        tie_lm_head: see `load_quantized`, also for the other arguments.
    """

    def __init__(
        self,
        catalog: Catalog,
        rules: Rules,
        tie_lm_head: bool,
        rounding: Rounding | None,
        axis: int | None,
        threads: int | None,
    ) -> None:
        self._catalog = catalog
        self._rules = rules
        self._rounding = rounding
        self._axis = axis
        self._threads = threads
        self._requests: list[Request] = []
        self._result = QuantizedDict()
        self._tensors = {name: self._find(name) for name in catalog}
        self._before = sum(tensor.about.nbytes for tensor in self._tensors.values())
        model = ModelRules.of(catalog)
        rules.schema = model.schema
        if tie_lm_head:
            heads = heads_to_quantize(model, rules, lambda name: self._tensors[name].about)
            self._tensors.update({head: self._find(embedding, head) for head, embedding in heads.items()})

    def _find(self, name: str, called: str | None = None) -> _Tensor:
        about = self._catalog.about(name)
        source = self._catalog.restoring(name, called) if about.packed else None
        if not about.quantized:
            source = self._catalog.source(name, called)  # type: ignore[assignment]
        assert not isinstance(source, QuantizedTensor)
        return _Tensor(name, about, source)

    def run(self, progress: Progress) -> QuantizedDict:
        """The result; tensors in files are read in one run."""
        quantized, kept = {}, {}
        for name, tensor in self._tensors.items():
            plan = self._rules.plan(name, tensor.about)
            if plan.scheme is None:
                kept[name] = plan.reason
                self._result[name] = self._keep(tensor)
            else:
                quantized[name] = plan.scheme
                self._result[name] = self._quantize(name, tensor, plan.scheme)
        run_requests(self._requests, threads=self._threads, progress=progress)
        for name, made in self._result.items():
            if isinstance(made, np.ndarray):
                self._result[name] = jobs.native_order(made)
        after = sum(made.nbytes for made in self._result.values())
        self._result.summary = Summary(self._before, after, quantized, kept)
        return self._result

    def _keep(self, tensor: _Tensor) -> QuantizedTensor | Array:
        """A tensor that is not to be quantized: unchanged if it is already, else an array that `run` fills."""
        source = tensor.source
        if source is None:
            value = self._catalog.value(tensor.origin)
            if tensor.about.packed and isinstance(value, QuantizedTensor):
                return value.dequantize(threads=self._threads)
            return value
        row = _F32 if source.row.floating else source.row
        array = private_array(source.shape, dtypes.array_dtype(row.number))
        self._requests.append(Request(source, array, row.number))
        return array

    def _quantize(self, name: str, tensor: _Tensor, scheme: str) -> QuantizedTensor:
        """A quantized tensor that `run` fills; if the source has another scheme, it is filled at once."""
        axis = _axis_of(name, tensor.about.shape, self._axis) if scheme == INT8 else None
        target = SCHEMES[scheme].target(self._rounding if scheme == "q4_0" else None)
        if tensor.source is not None:
            new = new_tensor(tensor.source, scheme, axis)
            self._requests.append(Request(tensor.source, new, target))
            return new
        value = self._catalog.value(tensor.origin)  # one at a time: each needs memory as float32
        assert isinstance(value, QuantizedTensor)
        source = of_reals(name, value.dequantize(threads=self._threads), self._threads)
        new = new_tensor(source, scheme, axis)
        run_requests([Request(source, new, target)], threads=self._threads, progress=None)
        return new


def _axis_of(name: str, shape: tuple[int, ...], axis: int | None) -> int | None:
    """The axis with per-axis scales; a tensor of 3 axes has at least one scale for each matrix."""
    if axis is None:
        return usual_axis(INT8, shape)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{subject(name)}axis {axis} is outside the axes of {list(shape)}")
    return axis % len(shape)
