"""The rules that select a scheme for each tensor: as requested, as llama.cpp chooses for a file type, or as kept."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

from ...base import dtypes
from ...base.arrays import Array
from ...base.names import check_matches
from ...base.packing import SCHEMES
from ...base.paths import PathLike
from ...base.text import error_about, plural, show
from ...base.url import is_url
from ...errors import FormatError, TensorNotFoundError, UnsupportedError
from ...formats.gguf import imatrix, mixtures
from ...formats.gguf.imatrix import ImportanceMatrix
from ...formats.gguf.mixtures import EMBEDDINGS, FLOAT16, ModelSizes, TensorType
from ...loading.entry import open as open_checkpoint
from ...models.choosing import absent_heads, choose
from ...models.diffusion import ARCHITECTURE, diffusion_models, quantized_models
from ...models.schema import Schema
from ...stores.files import LOCAL
from ...stores.store import read_at
from ..sources.catalog import Catalog, TensorDescription
from .quantize import SchemeName, check_importance

#: Names of matrices that engines need in full precision: lookup tables, small tensors and scales.
#: Used for models without a schema; a schema gives the role of each tensor.
KEPT_NAMES = ("*embed*", "*_embd*", "*wte*", "*wpe*", "*pos_emb*", "*norm*", "*ln_*", "*bias")

_KEPT_ROLES = {"embedding": "is an embedding", "norm": "is a norm", "bias": "is a bias", "buffer": "is a buffer"}

# Occurs in the architecture names of embedding models in GGUF files, which have a final norm but no head.
_HEADLESS = "embedding"

# The names in `presets`; MLX's formats have groups of 64 by default.
EngineFormat: TypeAlias = Literal[
    "w4a16", "w4a16_asym", "w8a16", "w8a8", "fp8_dynamic", "fp8_block", "nvfp4a16", "mxfp4a16", "deepseek_fp8",
    "mlx2", "mlx3", "mlx4", "mlx5", "mlx6", "mlx8", "mlx2-g32", "mlx2-g64", "mlx2-g128", "mlx3-g32", "mlx3-g64",
    "mlx3-g128", "mlx4-g32", "mlx4-g64", "mlx4-g128", "mlx5-g32", "mlx5-g64", "mlx5-g128", "mlx6-g32", "mlx6-g64",
    "mlx6-g128", "mlx8-g32", "mlx8-g64", "mlx8-g128", "mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8", "bnb_nf4", "bnb_fp4",
]  # fmt: skip
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

    scheme: str | None  # None leaves the tensor unquantized
    reason: str = ""  # why it is left unquantized
    already: bool = False  # True if it has the requested scheme already
    requested: str | None = None  # the requested scheme, if the rows of the tensor need its fallback
    dtype: str | None = None  # code of the dtype to convert to instead


class Kept:
    """The tensors to leave unquantized, by patterns of tensor or module names or by a function.

    They may also select all tensors of the source that an engine stores as one: ``sources_of`` returns their names.
    """

    def __init__(self, keep: Keep, sources_of: Callable[[str], Sequence[str]] = lambda name: ()) -> None:
        self._sources_of = sources_of
        patterns = () if keep is None or callable(keep) else (keep,) if isinstance(keep, str) else tuple(keep)
        self._tests = {pattern: _test_of(pattern) for pattern in patterns}
        self._function = keep if callable(keep) else None

    def reason(self, name: str) -> str | None:
        """Return why a tensor is kept, or None."""
        for pattern, test in self._tests.items():
            if self._selects(test, name):
                return f"keep={show(pattern)}"
        return "excluded by keep=" if self._function is not None and self._selects(self._function, name) else None

    def _selects(self, test: Callable[[str], object], name: str) -> bool:
        """Return True if a test selects a name, or all of its sources."""
        if test(name):
            return True
        sources = self._sources_of(name)
        left = [source for source in sources if not test(source)]
        if left and len(left) < len(sources):
            text = f"keep= selects {show(next(s for s in sources if s not in left))} and not {show(left[0])}, but "
            text += f"the engine stores both in {show(name)}: select all or none"
            raise UnsupportedError(text, tensor=name)
        return bool(sources) and not left

    def check(self, names: Collection[Any]) -> None:
        """Refuse patterns that match neither a tensor nor a module."""
        texts = [text for name in names if isinstance(name, str) for text in (name, *self._sources_of(name))]
        both = {*texts, *(text.removesuffix(".weight") for text in texts)} if self._tests else ()
        expressions = [pattern for pattern in self._tests if _is_expression(pattern)]
        check_matches("keep", [pattern for pattern in self._tests if pattern not in expressions], both)
        for pattern in expressions:
            if not any(map(self._tests[pattern], both)):
                raise TensorNotFoundError(f"keep={show(pattern)} matches no tensor")


def _is_expression(pattern: object) -> bool:
    return isinstance(pattern, str) and pattern.startswith(_EXPRESSION)


def _test_of(pattern: str) -> Callable[[str], bool]:
    """Return the function that tells if a pattern matches the name of a tensor, or of its module."""
    if not _is_expression(pattern):
        return lambda name: fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)
    try:
        match = re.compile(pattern.removeprefix(_EXPRESSION)).match
    except re.error as error:
        raise ValueError(f"keep={show(pattern)} is not a regular expression: {error}") from None
    return lambda name: match(name) is not None or match(name.removesuffix(".weight")) is not None


# ---- the schemes of a call ----


def schema_of(catalog: Catalog) -> Schema | None:
    """Return the schema of a model's architecture, which gives the roles of its tensors, such as embedding and norm."""
    choice = choose(catalog.config, catalog.format, dict.fromkeys(catalog).keys())
    return None if choice is None else choice.schema


def tied_heads(catalog: Catalog, schema: Schema | None) -> dict[str, str]:
    """Return the embedding that each absent head is tied to, by the name of the head."""
    if schema is None and _HEADLESS in str(catalog.metadata.get(ARCHITECTURE, "")):
        return {}
    return absent_heads(schema, dict.fromkeys(catalog).keys(), catalog.config)


def check_restorable(name: str, scheme: str) -> None:
    """Refuse to requantize a tensor that cannot be dequantized."""
    try:
        readable = row_of(scheme).converts_to(_F32)
    except ValueError:  # an unknown ggml type
        readable = False
    if not readable:
        raise error_about(UnsupportedError, f"is {scheme}, which this version does not dequantize", tensor=name)


class Rules:
    """Selects a scheme for each tensor."""

    def __init__(self, scheme: Scheme, keep: Keep) -> None:
        self.schema: Schema | None = None  # gives the roles of tensors; None falls back to `KEPT_NAMES`
        schemes = scheme if isinstance(scheme, Mapping) else {"*": parse(scheme)}
        self._schemes = {pattern: None if value is None else parse(value) for pattern, value in schemes.items()}
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
        chosen = "is empty" if 0 in shape else self._choose(name, shape)
        if isinstance(chosen, str):
            return Planned(None, chosen)
        planned, usual = chosen
        if scheme is not None and scheme in (planned.scheme, planned.requested):
            return Planned(None, f"is already {scheme}", already=True)
        kept = self.kept.reason(name) or usual
        if kept is not None:
            return Planned(None, kept)
        if scheme is not None and not about.packed:
            check_restorable(name, scheme)
        return planned

    def _choose(self, name: str, shape: tuple[int, ...]) -> str | tuple[Planned, str | None]:
        """Return why a matrix is left unquantized; or its scheme, and a reason against it that ``keep`` precedes."""
        matches = ((pattern, to) for pattern, to in self._schemes.items() if fnmatchcase(name, pattern))
        pattern, requested = next(matches, (None, None))
        if pattern is None:
            return "no pattern of scheme= matches"
        if requested is None:
            return f"scheme={{{show(pattern)}: None}}"
        result = SCHEMES[requested].of_rows(shape[-1])
        usual = self.usual(name) if pattern == _ALL else None  # an explicit pattern overrides the defaults
        if result is None:
            usual = usual or f"rows of {shape[-1]} elements are not whole blocks of {SCHEMES[requested].block}"
        return Planned(result or requested, requested=None if result == requested else requested), usual

    def usual(self, name: str) -> str | None:
        """Return why a matrix of this name is kept by default, or None if it is quantized."""
        role = None if self.schema is None else self.schema.role(name)
        if role is not None:
            return _KEPT_ROLES.get(role)
        pattern = next((p for p in KEPT_NAMES if fnmatchcase(name, p)), None)
        return None if pattern is None else f"matches {pattern}"


def heads_to_quantize(
    tied: Mapping[str, str], rules: Rules, about: Callable[[str], TensorDescription]
) -> dict[str, str]:
    """Return the embedding of each tied head that is quantized although no file stores it."""

    def quantizes(head: str, origin: TensorDescription) -> bool:
        return not origin.quantized and origin.floating and rules.plan(head, origin).scheme is not None

    return {head: embedding for head, embedding in tied.items() if quantizes(head, about(embedding))}


# ---- llama.cpp's file types ----


class FileTypeRules(Rules):
    """The types that llama-quantize chooses for a file type, except for tensors whose names match a pattern."""

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
        self._types: Mapping[str, TensorType] = {}

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

    def _choose(self, name: str, shape: tuple[int, ...]) -> str | tuple[Planned, str | None]:
        if any(fnmatchcase(name, pattern) for pattern in self.patterns):
            return super()._choose(name, shape)
        chosen = self._types[name]
        if chosen.type is None:
            return f"stays as it is in file type {self.file_type}"
        if chosen.type == FLOAT16:
            return Planned(None, f"rows of {shape[-1]} elements are not whole blocks: float16", dtype="F16"), None
        return Planned(chosen.type, requested=chosen.requested), None


def rules_for(
    catalog: Catalog, scheme: ConvertScheme, keep: Keep, matrix: ImportanceMatrix | None, *, model: bool
) -> Rules:
    """Return the rules for ``quantize=``.

    In a ``model``, a file for llama.cpp, a bare name is a file type. In a dict the names of block types are block
    types; the pattern "*" can also have a mixture such as "q4_k_m".
    """
    sizes = ModelSizes.of(catalog.metadata) if model else None
    if sizes is not None and sizes.architecture in diffusion_models() and sizes.architecture not in quantized_models():
        raise UnsupportedError(
            f"{catalog.title}: safeload quantizes the diffusion models {', '.join(quantized_models())}, not "
            f'{sizes.architecture}: pass dtype="float16" or "bfloat16" instead of quantize=, and llama-quantize of '
            "ComfyUI-GGUF quantizes the result"
        )
    patterns = {name: to for name, to in scheme.items() if name != _ALL} if isinstance(scheme, Mapping) else {}
    name = scheme.get(_ALL) if isinstance(scheme, Mapping) else scheme
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
                return imatrix.of_dat(shown, read_at(store, 0, store.size))
    with open_checkpoint(shown) as checkpoint:
        names = [name for name in checkpoint if name.endswith((imatrix.SUMS, imatrix.COUNTS))]
        return imatrix.of_gguf(shown, checkpoint.load(names=names), checkpoint.metadata)


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
    vectors = {name: vector_for(matrix, name, shape) for name, shape in shapes.items()}
    importance = {name: vector for name, vector in vectors.items() if vector is not None}
    if shapes and not importance:
        text = f"imatrix= {show(matrix.path)} has no entry for any of {plural(len(shapes), 'tensor')} to quantize"
        raise ValueError(f"{text}, such as {show(next(iter(shapes)))}")
    return importance


def vector_for(matrix: ImportanceMatrix, name: str, shape: tuple[int, ...]) -> Array | None:
    """Return the importance of a tensor's columns, or None if the matrix has no entry for it."""
    vector = matrix.vectors.get(name)
    if vector is None:
        return None
    columns, matrices = shape[-1], math.prod(shape[:-2])
    if vector.size == columns * matrices:
        return vector.reshape(matrices, columns)
    if name in EMBEDDINGS:
        return None  # llama-quantize ignores such an entry
    text = f"importance of {show(name)} has {vector.size:,} numbers, but the tensor has {columns:,} columns"
    raise FormatError(text + (f" in {matrices:,} matrices" if matrices > 1 else ""), matrix.path)
