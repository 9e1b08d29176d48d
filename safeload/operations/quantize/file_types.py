"""llama.cpp's file types as rules that select a scheme for each tensor of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from ...base.messages import error_about
from ...base.text import show
from ...errors import UnsupportedError
from ...formats.gguf import mixtures
from ...formats.gguf.imatrix import ImportanceMatrix
from ...formats.gguf.mixtures import FLOAT16, ModelSizes, TensorType
from ...models.diffusion import diffusion_models, quantized_models
from ..sources.catalog import Catalog, TensorDescription
from .checkpoint import Rules, check_restorable
from .engine_rules import EngineFormat
from .keeping import Keep, Planned
from .quantize import SchemeName

FileTypeName: TypeAlias = Literal[
    "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "mxfp4_moe"
]  # fmt: skip
ConvertScheme: TypeAlias = SchemeName | FileTypeName | EngineFormat | Mapping[str, SchemeName | FileTypeName | None]

_ALL = "*"  # the pattern for all other tensors


def file_type_of(scheme: ConvertScheme, sizes: ModelSizes | None) -> str | None:
    """Return the file type that ``quantize=`` asks for, or None if it asks for block types, or for no llama.cpp model.

    A bare name is a file type. In a dict the names of block types are block types; the pattern "*" can also have a
    mixture such as "q4_k_m".
    """
    name = scheme.get(_ALL) if isinstance(scheme, Mapping) else scheme
    lower = name.lower() if isinstance(name, str) else ""
    named = lower in mixtures.mixtures() if isinstance(scheme, Mapping) else mixtures.is_known(lower)
    return mixtures.parse(lower) if named and sizes is not None else None


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
            if chosen.requires_imatrix and self.plan(name, tensors[name]).scheme == chosen.type:
                self._check_importance(name, chosen)

    def ordered(self, names: Iterable[str]) -> Iterable[str]:
        """Return the names in llama-quantize's order."""
        return names if self._sizes.architecture in diffusion_models() else sorted(names, key=mixtures.sort_key)

    def _check_importance(self, name: str, chosen: TensorType) -> None:
        if self._matrix is not None and name in self._matrix.vectors:
            return
        missing = "pass imatrix=" if self._matrix is None else f"{show(self._matrix.path)} has no entry for it"
        text = f"becomes {chosen.type}, which file type {self.file_type} requires an importance matrix for: {missing}"
        raise error_about(UnsupportedError, text, tensor=name)

    def plan(self, name: str, about: TensorDescription) -> Planned:
        if any(fnmatchcase(name, pattern) for pattern in self.patterns):
            return super().plan(name, about)
        kept = self.unquantizable(about)
        if kept is not None:
            return Planned(None, kept)
        chosen = self._types[name]
        if chosen.type is None:
            return Planned(None, f"stays as it is in file type {self.file_type}")
        if about.scheme == chosen.type:
            return Planned(None, f"is already {about.scheme}", already=True)
        kept = self.kept.reason(name)
        if kept is not None:
            return Planned(None, kept)
        if about.scheme is not None and not about.packed:
            check_restorable(name, about.scheme)
        if chosen.type == FLOAT16:
            return Planned(None, f"rows of {about.shape[-1]} elements are not whole blocks: float16", dtype="F16")
        return Planned(chosen.type, requested=chosen.requested)


def rules_for(
    catalog: Catalog, scheme: ConvertScheme, keep: Keep, matrix: ImportanceMatrix | None, *, model: bool
) -> Rules:
    """Return the rules for ``quantize=``; in a ``model``, a file for llama.cpp, bare names are file types."""
    sizes = ModelSizes.of(catalog.metadata) if model else None
    if sizes is not None and sizes.architecture in diffusion_models() and sizes.architecture not in quantized_models():
        raise UnsupportedError(
            f"{catalog.title}: safeload quantizes the diffusion models {', '.join(quantized_models())}, not "
            f'{sizes.architecture}: pass dtype="float16" or "bfloat16" instead of quantize=, and llama-quantize of '
            "ComfyUI-GGUF quantizes the result"
        )
    file_type = file_type_of(scheme, sizes)
    if file_type is None or sizes is None:
        return Rules(scheme, keep)  # type: ignore[arg-type]  # refuses file types
    patterns = {name: to for name, to in scheme.items() if name != _ALL} if isinstance(scheme, Mapping) else {}
    return FileTypeRules(patterns, keep, file_type, sizes, matrix)


def metadata_with(
    metadata: Mapping[Any, Any], rules: Rules | None, matrix: ImportanceMatrix | None, own: Mapping[str, Any]
) -> Mapping[Any, Any]:
    """Return metadata with the keys that llama-quantize writes; the caller's ``own`` keys stay."""
    keys = {} if matrix is None else matrix.metadata()
    if isinstance(rules, FileTypeRules):
        metadata = mixtures.with_file_type(metadata, rules.file_type, keys.items())
    else:
        metadata = {**metadata, **keys}
    return {**metadata, **{key: value for key, value in own.items() if value is not None}}
