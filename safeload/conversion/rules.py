"""The rules that select a scheme for each tensor: as requested, as llama.cpp or an engine chooses, or as kept."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ..core import dtypes, packing
from ..core.arrays import Array
from ..core.checkpoint import open as open_checkpoint
from ..core.files import LOCAL, read_at
from ..core.forking import cached_property
from ..core.names import check_matches, grouped
from ..core.packing import EngineFormat
from ..core.showing import Result
from ..core.text import PathLike, error_about, plural, show, subject
from ..errors import FormatError, TensorNotFoundError, UnsupportedError, exported
from ..formats import mixtures
from ..formats.mixtures import ImportanceMatrix, ModelSizes
from ..models import choosing
from ..models.choosing import TIE
from ..models.diffusion import ARCHITECTURE, diffusion_models, quantized_models
from ..models.family import changed_by_mlx, engine_model_types, mlx_form, mlx_model_types
from ..models.renamed import ModelNames
from ..models.schema import Schema
from ..quant.families import IS_EXPERT, IS_HEAD, Preset, presets
from ..quant.finder import conv1d_model, is_named_conv1d
from ..quant.packed_group import GroupContext, packing_of
from ..quant.quantization import Quantization, activations_of, quantization_of
from ..remote.url import is_url
from .catalog import Catalog, TensorDescription
from .quantize import WEIGHTS, Encoding, SchemeName, check_importance

#: Names of matrices that engines need in full precision: lookup tables, small tensors and scales.
#: Used for models without a schema; a schema gives the role of each tensor.
KEPT_NAMES = ("*embed*", "*_embd*", "*wte*", "*wpe*", "*pos_emb*", "*norm*", "*ln_*", "*bias")

_KEPT_ROLES = {"embedding": "is an embedding", "norm": "is a norm", "bias": "is a bias", "buffer": "is a buffer"}

# Occurs in the architecture names of embedding models in GGUF files, which have a final norm but no head.
_HEADLESS = "embedding"

Scheme: TypeAlias = SchemeName | EngineFormat | Mapping[str, SchemeName | None]
FileTypeName: TypeAlias = Literal[
    "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "mxfp4_moe"
]  # fmt: skip
ConvertScheme: TypeAlias = SchemeName | FileTypeName | EngineFormat | Mapping[str, SchemeName | FileTypeName | None]

_ALL = "*"  # the pattern for all other tensors

Keep = str | Iterable[str] | Callable[[str], object] | None

# Begins a regular expression, which must match a name from its start, as in compressed-tensors.
_EXPRESSION = "re:"
_F32 = dtypes.BY_CODE["F32"]


class Planned(NamedTuple):
    """The decision about one tensor."""

    scheme: str | None  # None leaves the tensor as it is
    reason: str = ""  # why it is, or would be, left as it is
    already: bool = False  # True if it has the requested scheme already
    requested: str | None = None  # the requested scheme, if the rows of the tensor need its fallback
    dtype: str | None = None  # code of the dtype to convert to instead


class _SummaryFields(NamedTuple):
    bytes_before: int
    bytes_after: int
    quantized: dict[str, str]
    kept: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...], int]] | None = None
    codes: Mapping[str, str] = {}
    rule: str = ""


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
        codes: the fate of the codes of each quantized tensor that got another format, by name: they moved, or their
            values were rounded again.
        rule: which weights were quantized for an engine, if the family of the model does not say so.
    """

    __slots__ = ()

    _columns = ("name", "dtype", "shape", "nbytes", "scheme", "kept")
    _json = (*_SummaryFields._fields[:4], "codes", "rule", ("tensors", Result.rows))

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
            fates = {name: ", ".join(filter(None, (to, self.codes.get(name)))) for name, to in groups.items()}
            for label, names in grouped(fates, fates.__getitem__).items():
                lines.append(f"{len(names):6,} {verb} {label}: {names[0]}{', ...' if len(names) > 1 else ''}")
        lines += [self.rule] if self.rule else []
        return "\n".join(lines)


class Kept:
    """The tensors to leave unquantized, by patterns of tensor or module names or by a function."""

    def __init__(self, keep: Keep, sources_of: Callable[[str], Sequence[str]] = lambda name: ()) -> None:
        self._sources_of = sources_of  # the tensors of the source that an engine stores as one
        patterns = () if keep is None or callable(keep) else (keep,) if isinstance(keep, str) else keep
        self._patterns = {pattern: _test_of(pattern) for pattern in patterns}
        self._tests = [(f"keep={show(pattern)}", test) for pattern, test in self._patterns.items()]
        if callable(keep):
            self._tests.append(("excluded by keep=", keep))

    def reason(self, name: str) -> str | None:
        """Return why a tensor is kept, or None."""
        return next((reason for reason, test in self._tests if self._selects(test, name)), None)

    def _selects(self, test: Callable[[str], object], name: str) -> bool:
        """Return True if a test selects a name, or all of its sources."""
        if test(name):
            return True
        sources = self._sources_of(name)
        left = [source for source in sources if not test(source)]
        if left and len(left) < len(sources):
            text = f"keep= selects {show(next(s for s in sources if s not in left))} and not {show(left[0])}, but "
            raise UnsupportedError(f"{text}the engine stores both in {show(name)}: select all or none", tensor=name)
        return bool(sources) and not left

    def check(self, names: Collection[Any]) -> None:
        """Refuse patterns that match neither a tensor nor a module."""
        texts = [text for name in names if isinstance(name, str) for text in (name, *self._sources_of(name))]
        both = {*texts, *(text.removesuffix(_WEIGHT) for text in texts)} if self._patterns else ()
        check_matches("keep", [pattern for pattern in self._patterns if not _is_expression(pattern)], both)
        for pattern, test in self._patterns.items():
            if _is_expression(pattern) and not any(map(test, both)):
                raise TensorNotFoundError(f"keep={show(pattern)} matches no tensor")


def _is_expression(pattern: object) -> bool:
    return isinstance(pattern, str) and pattern.startswith(_EXPRESSION)


def _test_of(pattern: str) -> Callable[[str], object]:
    """Return the function that tells if a pattern matches the name of a tensor, or of its module."""
    if not _is_expression(pattern):
        return lambda name: fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(_WEIGHT), pattern)
    try:
        match = re.compile(pattern.removeprefix(_EXPRESSION)).match
    except re.error as error:
        raise ValueError(f"keep={show(pattern)} is not a regular expression: {error}") from None
    return lambda name: match(name) or match(name.removesuffix(_WEIGHT))


# ---- the schemes of a call ----


def schema_of(catalog: Catalog) -> Schema | None:
    """Return the schema of a model's architecture, which gives the roles of its tensors, such as embedding and norm."""
    choice = choosing.choose(catalog.config, catalog.format, dict.fromkeys(catalog).keys())
    return None if choice is None else choice.schema


def tied_heads(catalog: Catalog, schema: Schema | None) -> dict[str, str]:
    """Return the embedding that each absent head is tied to, by the name of the head."""
    if schema is None and _HEADLESS in str(catalog.metadata.get(ARCHITECTURE, "")):
        return {}
    return choosing.absent_heads(schema, dict.fromkeys(catalog).keys(), catalog.config)


def reason_of_role(schema: Schema | None, name: str) -> str:
    """Return why a tensor is no matrix of a linear layer, by its role in the schema or its name; "" if it may be."""
    role = None if schema is None else schema.role(name)
    if role is None or _ROUTER.search(name):
        role = next((role for role, pattern in _ROLES_BY_NAME.items() if pattern.search(name)), "weight")
    return "is a router" if role == "router" else _KEPT_ROLES.get(role, "")


def check_restorable(name: str, scheme: str) -> None:
    """Refuse to requantize a tensor that cannot be dequantized."""
    try:
        readable = packing.scheme_row(scheme).converts_to(_F32)
    except ValueError:  # an unknown ggml type
        readable = False
    if not readable:
        raise error_about(UnsupportedError, f"is {scheme}, which this version does not dequantize", tensor=name)


class Rules:
    """Selects a scheme for each tensor."""

    def __init__(self, scheme: Scheme, keep: Keep) -> None:
        self.schema: Schema | None = None  # gives the roles of tensors; None falls back to `KEPT_NAMES`
        self.fixed: Mapping[str, str] = {}  # codes of dtypes of tensors that are not quantized by default
        schemes = scheme if isinstance(scheme, Mapping) else {"*": packing.parse_scheme(scheme)}
        self._schemes = {key: None if to is None else packing.parse_scheme(to) for key, to in schemes.items()}
        self.kept = Kept(keep)

    @property
    def patterns(self) -> list[str]:
        """The patterns of ``scheme``, except "*"."""
        return [pattern for pattern in self._schemes if pattern != "*"]

    def plan(self, name: str, about: TensorDescription) -> Planned:
        """Decide about a tensor; the first reason to keep it wins."""
        shape, scheme = about.shape, about.scheme
        if not about.floating and scheme is None:
            return Planned(None, f"is {about.dtype}, not floating")
        if len(shape) not in (2, 3):
            return Planned(None, f"is {len(shape)}-D, not 2-D or 3-D")
        planned = Planned(None, "is empty") if 0 in shape else self._choose(name, shape)
        if planned.scheme is planned.dtype is None:
            return planned
        if about.codes is not None and about.codes in (planned.scheme, planned.requested):
            return Planned(None, f"is already {about.codes}", already=True)
        kept = self.kept.reason(name) or ("" if planned.dtype else planned.reason)
        if kept:
            return Planned(None, kept)
        if scheme is not None and not about.packed:
            check_restorable(name, scheme)
        return planned

    def _choose(self, name: str, shape: tuple[int, ...]) -> Planned:
        """Return why a matrix is left unquantized; or its scheme, with the reason if it is kept by default."""
        matches = ((pattern, to) for pattern, to in self._schemes.items() if fnmatchcase(name, pattern))
        pattern, requested = next(matches, (None, None))
        if pattern is None:
            return Planned(None, "no pattern of scheme= matches")
        if requested is None:
            return Planned(None, f"scheme={{{show(pattern)}: None}}")
        result = packing.SCHEMES[requested].of_rows(shape[-1])
        usual = ""
        if pattern == _ALL:  # an explicit pattern overrides the defaults
            role = None if self.schema is None else self.schema.role(name)
            default = (f"matches {kept}" for kept in KEPT_NAMES if fnmatchcase(name, kept))
            usual = next(default, "") if role is None else _KEPT_ROLES.get(role, "")
            usual = f"stays {dtypes.BY_CODE[self.fixed[name]].name}" if not usual and name in self.fixed else usual
        if result is None:
            usual = usual or f"rows of {shape[-1]} elements are not whole blocks of {packing.SCHEMES[requested].block}"
        return Planned(result or requested, usual, requested=None if result == requested else requested)


# ---- llama.cpp's file types ----


class FileTypeRules(Rules):
    """The types that llama-quantize chooses for a file type, except for tensors with names that match a pattern."""

    _types: Mapping[str, mixtures.TensorType]

    def __init__(
        self,
        patterns: Mapping[str, Any],
        keep: Keep,
        file_type: str,
        sizes: ModelSizes,
        matrix: ImportanceMatrix | None,
    ) -> None:
        super().__init__(patterns, keep)
        self.file_type, self._sizes, self._matrix = file_type, sizes, matrix

    def prepare(self, tensors: Mapping[str, TensorDescription]) -> None:
        """Choose the types of all tensors of the result."""
        shapes = {name: about.shape for name, about in tensors.items()}
        if self._sizes.architecture in diffusion_models():
            self._types = mixtures.choose_for_image(self.file_type, shapes, self._sizes.architecture)
        else:
            self._types = mixtures.choose(self.file_type, shapes, self._sizes, imatrix=self._matrix is not None)
        for name, chosen in self._types.items():
            has_entry = self._matrix is not None and name in self._matrix.vectors
            if chosen.requires_imatrix and not has_entry and self.plan(name, tensors[name]).scheme == chosen.type:
                missing = "pass imatrix=" if self._matrix is None else f"{show(self._matrix.path)} has no entry for it"
                text = f"becomes {chosen.type}, which file type {self.file_type} requires an importance matrix for"
                raise error_about(UnsupportedError, f"{text}: {missing}", tensor=name)

    def ordered(self, names: Iterable[str]) -> Iterable[str]:
        """Return the names in llama-quantize's order."""
        return names if self._sizes.architecture in diffusion_models() else sorted(names, key=mixtures.sort_key)

    def _choose(self, name: str, shape: tuple[int, ...]) -> Planned:
        if any(fnmatchcase(name, pattern) for pattern in self.patterns):
            return super()._choose(name, shape)
        chosen = self._types[name]
        if chosen.type is None:
            return Planned(None, f"stays as it is in file type {self.file_type}")
        if chosen.type == mixtures.FLOAT16:
            return Planned(None, f"rows of {shape[-1]} elements are not whole blocks: float16", dtype="F16")
        return Planned(chosen.type, requested=chosen.requested)


def check_part(options: Mapping[str, Any], format: str, path: str) -> None:
    """Refuse ``part=`` if it selects nothing, and types that llama.cpp does not write for vision towers."""
    part, quantize = options["part"], options["quantize"]
    if part is None:
        return
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {show(part)}")
    if format != "gguf":
        raise ValueError(f"part= selects a part of a model for llama.cpp, a .gguf file, but {show(path)} is {format}")
    if options["raw"]:
        raise ValueError("part= selects a part of a model for llama.cpp, and raw=True writes the tensors as they are")
    if part == "vision" and options["imatrix"] is not None:
        raise ValueError("imatrix= has the importance of columns of the text part, and part= selects the vision part")
    if part == "vision" and quantize is not None and str(quantize).lower() != TOWER_SCHEME:
        text = f"llama.cpp's converter writes vision parts as float32, float16, bfloat16 or {TOWER_SCHEME}, not as "
        raise ValueError(f"{text}{show(quantize)}; pass quantize= for the text part alone")


class TowerRules(Rules):
    """The types that llama.cpp's converter chooses for a vision tower; it rounds rows of other lengths to float16."""

    def _choose(self, name: str, shape: tuple[int, ...]) -> Planned:
        if name in self.fixed:
            return Planned(None, f"stays {dtypes.BY_CODE[self.fixed[name]].name}")
        if shape[-1] % packing.SCHEMES[TOWER_SCHEME].block:
            return Planned(None, f"rows of {shape[-1]} elements are not whole blocks: float16", dtype="F16")
        return Planned(TOWER_SCHEME)


# The only blocks that llama.cpp's converter writes; llama-quantize takes no vision towers.
TOWER_SCHEME: Literal["q8_0"] = "q8_0"
PARTS = ("text", "vision")


def rules_for(
    catalog: Catalog, scheme: ConvertScheme, keep: Keep, matrix: ImportanceMatrix | None, *, model: bool
) -> Rules:
    """Return the rules for ``quantize=``; in a ``model``, a file for llama.cpp, a bare name is a file type."""
    # In a dict the names of block types are block types; the pattern "*" can also have a mixture such as "q4_k_m".
    sizes = ModelSizes.of(catalog.metadata) if model else None
    if sizes is not None and sizes.architecture in diffusion_models() and sizes.architecture not in quantized_models():
        text = f"{catalog.title}: safeload quantizes the diffusion models {', '.join(quantized_models())}, not "
        text += f'{sizes.architecture}: pass dtype="float16" or "bfloat16" instead of quantize=, and llama-quantize of '
        raise UnsupportedError(f"{text}ComfyUI-GGUF quantizes the result")
    patterns = dict(scheme) if isinstance(scheme, Mapping) else {_ALL: scheme}
    name = patterns.pop(_ALL, None)
    lower = name.lower() if isinstance(name, str) else ""
    named = lower in mixtures.mixtures() if isinstance(scheme, Mapping) else mixtures.is_known(lower)
    if not named or sizes is None:
        return Rules(scheme, keep)  # type: ignore[arg-type]  # refuses file types
    return FileTypeRules(patterns, keep, mixtures.parse(lower), sizes, matrix)


# ---- importance ----

_MAGIC = b"GGUF"
# A file of the older format is read at once: 70B models have 30 MB.
MAX_FILE = 4 << 30


def read_importance(path: PathLike) -> ImportanceMatrix:
    """Read an importance matrix of llama.cpp's, in GGUF or in the older format."""
    shown = os.fspath(path)
    if not is_url(shown):
        with closing(LOCAL.open(shown)) as store:  # refuses pipes, which could block
            if read_at(store, 0, min(len(_MAGIC), store.size)) != _MAGIC:
                if store.size > MAX_FILE:
                    raise FormatError(f"{store.size:,} bytes are too large for an importance matrix", shown)
                return mixtures.of_dat(shown, read_at(store, 0, store.size))
    with open_checkpoint(shown) as checkpoint:
        names = [name for name in checkpoint if name.endswith((mixtures.SUMS, mixtures.COUNTS))]
        return mixtures.of_gguf(shown, checkpoint.load(names=names), checkpoint.metadata)


def importance_by_name(
    importance: PathLike | Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """Return the importance for each tensor to quantize that has one; see `check_importance`."""
    if isinstance(importance, Mapping):
        for name in importance:
            if name not in shapes:
                raise ValueError(f"imatrix= has importance for {show(name)}, which is not quantized to a type of ggml")
        return {name: check_importance(vector, shapes[name], name) for name, vector in importance.items()}
    return vectors_for(read_importance(importance), shapes)


def vectors_for(matrix: ImportanceMatrix, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Return the importance of a matrix for each tensor to quantize that has one."""
    importance = {}
    for name in filter(matrix.vectors.__contains__, shapes):
        vector, columns, matrices = matrix.vectors[name], shapes[name][-1], math.prod(shapes[name][:-2])
        if vector.size == columns * matrices:
            importance[name] = vector.reshape(matrices, columns)
        elif name not in mixtures.EMBEDDINGS:  # in which llama-quantize ignores such an entry
            text = f"importance of {show(name)} has {vector.size:,} numbers, but the tensor has {columns:,} columns"
            raise FormatError(text + (f" in {matrices:,} matrices" if matrices > 1 else ""), matrix.path)
    if shapes and not importance:
        text = f"imatrix= {show(matrix.path)} has no entry for any of {plural(len(shapes), 'tensor')} to quantize"
        raise ValueError(f"{text}, such as {show(next(iter(shapes)))}")
    return importance


# ---- rules of engines ----

_WEIGHT = ".weight"
_IGNORE = "pass ignore= with its name to leave it unquantized"
_EIGHT_BITS = "mlx8"  # of the modules that mlx-lm quantizes to 8 bits in every format
# Why a linear module stays unquantized, so that the config must name it.
_IS_CONV1D = "is a Conv1D, stored as [in, out]"
_IS_LEFT = "is not quantized in the folder"
_LINEAR = (IS_HEAD, "is a router", IS_EXPERT, _IS_CONV1D, "keep=", "excluded by keep=", "has a side", _IS_LEFT)
# Modules that choose experts. Engines compute these in full precision, although they are linear.
_ROUTER = re.compile(r"\.(?:gate|router|shared_expert_gate)\.weight\Z")
# Roles by the last module in the name of a matrix, for models of no known family.
_ROLES_BY_NAME = {
    "norm": re.compile(r"norm[^.]*\.weight$|(?:^|\.)ln_[^.]*\.weight$"),
    "embedding": re.compile(r"embed(?!_out\.weight)[^.]*\.weight$|(?:^|\.)(?:wte|wpe|pos_emb[^.]*)\.weight$"),
    "head": re.compile(r"(?:^|\.)(?:lm_head|embed_out|score|classifier)\.weight$|^(?:head|output)\.weight$"),
    "router": re.compile(r"\.(?:gate|router|shared_expert_gate)(?:\.[^.]+)?\.weight$"),
}
# Experts, which transformers holds as 3-D parameters; bitsandbytes quantizes only linear modules.
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
_FUSED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)\Z")
# Modules that engines merge into a single matrix, so that they must share NVFP4's global scale. Source: llmcompressor
# 0.14 ``entrypoints/model_free``.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv_a_with_mqa"),
)


class EngineRules:
    """Select the weights that an engine's tool would quantize."""

    def __init__(
        self,
        preset: Preset,
        keep: Keep,
        catalog: Catalog,  # the model, arranged for the engine
        schema: Schema | None,
        *,
        chosen: bool,  # True if the caller has chosen the tensors: any model is supported
    ) -> None:
        self.preset, self.engine = preset, preset.engine
        self._catalog, self._config = catalog, catalog.config
        config = self._config
        self.kept = Kept(keep, catalog.sources_of)
        model_type = None if config is None else config.get("model_type")
        for_mlx = self.engine.stacks_experts
        self._mlx = mlx_form(config) if for_mlx else None
        supported = self._mlx is not None if for_mlx else schema is not None and model_type in engine_model_types()
        changed = for_mlx and changed_by_mlx(config) and not is_of_mlx(catalog)
        self.rule = ""  # which weights are quantized if no family says so
        if not supported and not chosen and isinstance(model_type, str) and not for_mlx:
            self.rule = "every matrix but norms, embeddings, head, routers"
            self.rule = f"no family known for {model_type}: {self.rule}" if schema is None else self.rule
        elif not supported and not chosen:
            types = ", ".join(sorted(mlx_model_types() if for_mlx else engine_model_types()))
            fault = f"does not support model_type {show(model_type)} (supported: {types}): "
            if model_type is None:
                fault = "needs a config.json with a model_type: pass the folder that has it, or "
            advice = "choose the tensors to convert with only=, and pass ignore= for those to leave unquantized"
            raise UnsupportedError(f"{preset.name} {fault}{not_as_in_mlx(model_type) if changed else advice}")
        if chosen and changed:
            raise UnsupportedError(f"{self.preset.name}: {not_as_in_mlx(model_type)}")
        self._prefix = "" if self._mlx is None else self._mlx.types[str(model_type)]
        self.schema = schema if supported or self.rule else None
        self._tied = choosing.tied_heads(config, dict.fromkeys(catalog).keys())
        self.scale: dtypes.Dtype | None = None  # the requested dtype of scales
        self.already: dict[str, str] = {}  # the format of each weight that has it already, by name
        self._written: dict[tuple[Any, ...], tuple[dict[str, Any], packing.Packing]] = {}

    def role(self, name: str) -> str | None:
        """Return the role of a tensor of the result; None for an unknown one."""
        if self._mlx is not None:
            return self._mlx.role(name.removeprefix(self._prefix))
        return None if self.schema is None else self.schema.role(name)

    def plan(self, name: str, about: TensorDescription) -> Planned:
        if not about.floating and about.scheme is None:
            return Planned(None, f"is {about.dtype}, not floating")
        if not self.preset.parts:
            return Planned(None, f"is not quantized in {self.preset.name}")
        if (reason := self._reason(name, about.shape)) is not None:
            return Planned(None, reason)
        preset, shape = self.preset, about.shape
        if self._mlx is not None and any(fnmatchcase(name, text + _WEIGHT) for text in self._mlx.eight_bits):
            preset = presets()[_EIGHT_BITS]
        if self._holds(name, preset):
            self.already[name] = preset.name
            return Planned(None, f"is already {preset.name}", already=True)
        if about.scheme is None and self._is_done:
            return Planned(None, f"{_IS_LEFT}, which is already {self.preset.name}")
        axes = (2, 3) if self._mlx is not None else (2,)
        if len(shape) not in axes or not name.endswith(_WEIGHT):
            what = f"is {len(shape)}-D" if len(shape) != 2 else f"has a name that does not end in {_WEIGHT}"
            text = f"{what}, and {preset.name} quantizes the 2-D weights of linear modules: {_IGNORE}"
            raise error_about(UnsupportedError, text, tensor=name)
        if any(side % preset.sides for side in shape):
            return Planned(None, f"has a side that is not a multiple of {preset.sides}")
        if self.engine.stacks_experts and self.preset.group is not None and shape[-1] % self.preset.group:
            return Planned(None, f"has rows of {shape[-1]} elements, not whole groups of {self.preset.group}")
        if preset.group is not None and not preset.flat and preset.row_block == 1 and shape[-1] % preset.group:
            text = f"{preset.name} has blocks of {preset.group} columns, and rows of {shape[-1]:,} are not whole blocks"
            raise UnsupportedError(f"{subject(name)}{text}: {_IGNORE}", tensor=name)  # the engine has no such kernels
        return Planned(preset.name)

    @cached_property
    def _is_done(self) -> bool:
        """True if a weight has the format already: unquantized weights of its folder stay so."""
        return any(self._holds(name, self.preset) for name in self._catalog)

    def _holds(self, name: str, preset: Preset) -> bool:
        """Return True if a weight is stored as we would write it: equal parts, in which a reader finds equal codes."""
        packed, module = self._catalog.packed(name), name.removesuffix(_WEIGHT)
        names = {role: module + part.suffix for role, part in preset.parts.items()}
        if packed is None or {role: part.name for role, part in packed.parts.items()} != names:
            return False
        shape, row = packed.packing.shape, packed.parts[packing.SCALE].row
        whole = preset.group is None or preset.flat or preset.row_block > 1 or shape[-1] % preset.group == 0
        if self.scale not in (None, row) or len(shape) < 2 or not whole:
            return False
        key = preset.name, shape, row.code
        if key not in self._written:
            encoding = Encoding(name, preset, shape, row)
            forms = ((role, encoding.stored(role)) for role in preset.parts)
            stored = {role: np.broadcast_to(np.zeros((), dtype), sides) for role, (dtype, sides) in forms}
            parts: dict[str, Array] = {**stored, **encoding.constants()}
            quantization = quantization_of(preset.lay_out(preset, {}, {}, {}))
            assert quantization is not None
            self._written[key] = stored, packing_of(GroupContext({}, quantization), name, names, parts)
        stored, kind = self._written[key]
        equal = all(
            (dtypes.array_dtype(part.row.number), part.shape) == (stored[role].dtype, stored[role].shape)
            for role, part in packed.parts.items()
            if role != packing.STATE  # a text
        )
        return equal and packed.packing._replace(config="") == kind._replace(config="")

    def _reason(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return why a floating tensor stays unquantized, or None."""
        if 0 in shape:
            return "is empty"
        kept = self.kept.reason(name)
        if kept is not None:
            return kept
        if self._mlx is None and is_named_conv1d(name) and conv1d_model(self._config) is not None:
            return _IS_CONV1D  # engines quantize linear modules, or these as [out, in]
        fused = _FUSED_EXPERTS.search(name) is not None or (bool(self.rule) and len(shape) == 3 and ".experts" in name)
        knows_roles = self._mlx is not None or self.schema is not None
        role = self.role(name) if knows_roles else "weight"
        if self.rule and (self.schema is None or role is None or (role == "weight" and not name.endswith(_WEIGHT))):
            roles = (role for role, pattern in _ROLES_BY_NAME.items() if pattern.search(name))
            role = next(roles, "weight" if fused or name.endswith(_WEIGHT) else "buffer")
        if self.rule and role == "router":
            return "is a router"
        kept = {**_KEPT_ROLES, "head": IS_HEAD}.get(role or "")
        if kept is not None and not (role in ("embedding", "head") and self.engine.quantizes_ends):
            return kept
        if not self.engine.quantizes_experts and (fused or _EXPERT.search(name)):
            return IS_EXPERT
        if role is None:
            return None if fused else "is not in the schema of the model"  # `plan` refuses the axes of fused experts
        if (knows_roles or self.rule) and len(shape) == 1:
            return "is 1-D, not 2-D"
        if self.rule and len(shape) != 2 and not fused:
            return f"is {len(shape)}-D, not 2-D"
        if self._mlx is not None:
            why = next((why for text, why in self._mlx.unquantized.items() if fnmatchcase(name, text)), None)
            return why if why is not None or name.endswith(_WEIGHT) else "is no matrix of a linear module"
        return "is a router" if _ROUTER.search(name) else None

    def drops(self, name: str) -> bool:
        """Return True for a stored tensor that the engine's tool leaves out."""
        return (self.engine.stacks_experts and name in self._tied) or name.endswith(self.engine.dropped or "\0")

    def weight_dtype(self, about: TensorDescription, target: dtypes.Dtype | None) -> dtypes.Dtype:
        """Return the dtype of a weight before it is quantized: as requested, else the config's, else its own."""
        usual = self._usual_dtype() if self._casts or not self.engine.casts or about.scheme is not None else None
        row = target or usual or (about.row if about.scheme is None else _F32)
        return row if row.code in WEIGHTS else _F32

    def kept_dtype(self, about: TensorDescription, target: dtypes.Dtype | None) -> dtypes.Dtype | None:
        """Return the dtype for an unquantized tensor; None leaves it as it is."""
        uncast = () if self._mlx is None else self._mlx.uncast
        if about.scheme is None and any(fnmatchcase(about.name, text) for text in uncast):
            return None
        if target is None and (about.scheme is not None or self._casts):
            return self._usual_dtype() or (None if about.scheme is None else _F32)
        return target

    @property
    def _casts(self) -> bool:
        """True if the tool converts all tensors to the config's dtype; mlx-lm looks for it in these places only."""
        inner = (self._config or {}).get("text_config")
        return self.engine.casts and any(
            (holder or {}).get(key) for holder, key in ((self._config, "torch_dtype"), (inner, "dtype"))
        )

    def _usual_dtype(self) -> dtypes.Dtype | None:
        """Return the dtype of weights in the config, or None if engines do not quantize from it."""
        row = choosing.dtype_in(self._config)
        return row if row is not None and row.code in WEIGHTS else None

    def partners(self, name: str, quantized: Collection[str]) -> tuple[str, ...]:
        """Return the weights that share a global scale with a quantized weight, itself included; () for none."""
        if packing.GLOBAL not in self.preset.parts:
            return ()
        parent, _, module = name.removesuffix(_WEIGHT).rpartition(".")
        fused = next((modules for modules in _FUSED if module in modules), ())
        partners = [f"{parent}.{other}{_WEIGHT}" for other in fused] or [name]
        return tuple(other for other in partners if other in quantized)

    def config(
        self,
        config: Mapping[str, Any] | None,  # of the source, with the dtype of the result
        quantized: Mapping[str, str],  # format of each quantized tensor, by name before `rename`
        kept: Mapping[str, str],  # why each other tensor was kept, by name before `rename`
        names: Mapping[str, str],  # in the result, by name before `rename`
    ) -> dict[str, Any]:
        left = {
            names.get(name, name).removesuffix(_WEIGHT): reason
            for name, reason in kept.items()
            if reason.startswith(_LINEAR) and name.endswith(_WEIGHT)
        }
        for module in (head.removesuffix(_WEIGHT) for head in self._tied if head not in kept):
            left |= {module: IS_HEAD, module.rpartition(".")[2]: IS_HEAD}  # transformers has it beside the model
        config = config or {}
        places: Mapping[str, Any] = ModelNames(config, {module + _WEIGHT: module for module in left}).places
        stored = {name.removesuffix(_WEIGHT): getattr(place, "stored", place) for name, place in places.items()}
        left |= {name: left[module] for name, module in stored.items() if module in left}
        if self._mlx is not None and TIE not in config:
            has_head = any(self.role(name) == "head" for name in (*quantized, *kept))
            config = {**config, TIE: not has_head}  # mlx-lm's default is not that of transformers
        return self.preset.lay_out(self.preset, config, left, self._exceptions(quantized, names))

    def is_described(self, tensors: Iterable[TensorDescription]) -> bool:
        """Return True if the quantization in the source's config describes the result: all codes have the format."""
        own = quantization_of(self._config)
        kept = bool(self.preset.parts) and all(x.scheme is None or x.name in self.already for x in tensors)
        return kept and own is not None and activations_of(own) == activations_of(self.quantization({}))

    def quantization(self, quantized: Mapping[str, str]) -> Quantization:
        """Return the quantization of a folder with these formats by name, as its reader would parse it."""
        quantization = quantization_of(self.preset.lay_out(self.preset, {}, {}, self._exceptions(quantized, {})))
        assert quantization is not None
        return quantization

    def _exceptions(self, quantized: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Preset]:
        """Return the modules with an unusual format."""
        return {
            names.get(name, name).removesuffix(_WEIGHT): presets()[scheme]
            for name, scheme in {**quantized, **self.already}.items()
            if scheme != self.preset.name
        }


def is_of_mlx(catalog: Catalog) -> bool:
    """Return True for tensors that mlx-lm, or a conversion for it, has written."""
    quantization = quantization_of(catalog.config)
    return catalog.metadata.get("format") == "mlx" or (quantization is not None and quantization.method == "mlx")


def not_as_in_mlx(model_type: object) -> str:
    """Return why a model's tensors of MLX are not those of transformers."""
    stored = f"mlx-lm does not store {show(model_type)} as transformers does (norms + 1, axes of convolutions, names)"
    return f"{stored}, and safeload does not know the differences"


def unlike_mlx(catalog: Catalog) -> UnsupportedError:
    """Return the error for a model of MLX if its form in transformers is unknown."""
    text = f"{catalog.title}: {not_as_in_mlx((catalog.config or {}).get('model_type'))}. Convert the original "
    return UnsupportedError(f"{text}checkpoint instead; raw=True writes MLX's names and values", path=catalog.title)
