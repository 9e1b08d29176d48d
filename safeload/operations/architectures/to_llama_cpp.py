"""Present a model of transformers as the file that llama.cpp loads: tensors, metadata and tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...base.messages import error_about
from ...base.text import plural, show
from ...errors import FormatError, UnsupportedError
from ...formats.gguf import file_type, mixtures, values
from ...models import gguf_architectures, gguf_sources
from ...models.diffusion import ARCHITECTURE
from ...models.expert_forms import MAX_EXPERTS
from ...models.gguf_architectures import is_kept_f32, schema_of
from ...models.gguf_sources import BUFFERS, ENDS, HEAD, SOURCES, Experts, GgufSource
from ...models.module_names import stored_names
from ...stores.files import Location
from ..sources.catalog import Catalog
from ..sources.recipes import Move, RowRange, TensorRecipe, TensorView
from ..sources.restructured import RestructuredCatalog
from .general import general_keys
from .sentencepiece import MAX_PIECES
from .settings import ModelConfig, settings_of
from .special_tokens import SpecialTokens, skeleton
from .tokenizer import KEPT, TokenizerFiles, vocabulary_of

# safeload's keys for the way back.
CONFIG_KEY = f"{KEPT}config"
FORM_KEY = f"{KEPT}experts"

_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,9})\.(.+)", re.ASCII)
_EXPERT = re.compile(r"(.+\.experts\.)(0|[1-9][0-9]{0,9})(\..+)", re.ASCII)
_PREFIX = "model."
_END_OF_TURN = "<end_of_turn>"  # of Gemma
_MOST_SHOWN = 3


def source_of(config: Mapping[str, Any] | None) -> str | None:
    """Return the class that a config names, or None if it names none."""
    if config is None:
        return None
    listed = config.get("architectures")
    if isinstance(listed, list) and listed:
        return listed[0] if isinstance(listed[0], str) else str(listed[0])[:100]
    model_type = config.get("model_type")
    if model_type is None:
        return None
    return (
        gguf_sources.model_types().get(model_type, f"model_type {show(model_type)}")
        if isinstance(model_type, str)
        else None
    )


def to_llama_cpp(catalog: Catalog) -> Catalog:
    """Return the tensors and metadata as llama.cpp needs them, or the catalog itself if its config names no class."""
    name = source_of(catalog.config)
    if name is None or catalog.format == "gguf":
        return catalog
    if name not in SOURCES:
        raise UnsupportedError(
            f"{catalog.title}: architecture {show(name)} cannot be converted for llama.cpp, expected one of "
            f"{', '.join(SOURCES)}; raw=True writes the tensors as they are"
        )
    source = SOURCES[name]
    catalog.refuse_codes(catalog, "convert for llama.cpp")
    config = ModelConfig(catalog.config or {}, catalog.title)
    settings = settings_of(config, source)
    recipes, form = _Recipes(catalog, config, source).run()
    rows = _rows_of_embedding(recipes.get("token_embd.weight"), catalog.title)
    files = TokenizerFiles(home_of(catalog))
    vocabulary = vocabulary_of(files, rows)
    if source.norm_shift and files.model is not None:  # Gemma's texts begin without a space
        vocabulary = vocabulary._replace(add_space_prefix=False)
    shapes = {name: recipe.shape for name, recipe in recipes.items()}
    shapes.update((name, array.shape) for name, array in settings.tensors.items())
    metadata = {
        ARCHITECTURE: source.architecture,
        "general.type": "model",
        **general_keys(files.folder, shapes, config),
        **settings.metadata,
        file_type.KEY: values.U32(0),  # replaced once types are decided
        mixtures.QUANTIZATION_VERSION: values.U32(mixtures.CURRENT_VERSION),
        **dict(vocabulary.keys()),
        **dict(SpecialTokens(files, config, vocabulary).keys()),
        **_ends_of_turns(source, vocabulary.texts),
        CONFIG_KEY: json.dumps(catalog.config, ensure_ascii=False),
        **({} if form is None else {FORM_KEY: form}),
        **{f"{KEPT}{name}": text for name, text in skeleton(files).items()},
    }
    check_tensors(shapes, settings.metadata, rows, catalog.title, source.architecture)
    kept = [name for name in recipes if is_kept_f32(name)]
    return RestructuredCatalog(
        catalog, recipes, constants=settings.tensors, metadata=metadata, format="gguf", kept_f32=kept
    )


def _rows_of_embedding(recipe: TensorRecipe | None, title: str) -> int:
    """Return the number of tokens, 0 without an embedding."""
    if recipe is None:
        return 0
    if len(recipe.shape) != 2 or recipe.shape[0] > MAX_PIECES:
        text = f"has the shape {list(recipe.shape)}, expected 2 axes and at most {MAX_PIECES:,} rows"
        raise error_about(FormatError, text, path=title, tensor=next(iter(recipe.sources)))
    return recipe.shape[0]


def home_of(catalog: Catalog) -> Location:
    """Return the folder with the files beside the weights."""
    if catalog.folder is not None:
        return catalog.folder
    file = catalog.weight_files[0]
    return Location(file.files, file.files.split(file.place)[0])


def _ends_of_turns(source: GgufSource, texts: list[str]) -> dict[str, Any]:
    """Return the token that ends a turn of a chat, for models whose tokenizer does not name it."""
    if source.architecture == "gemma" and _END_OF_TURN in texts:
        return {"tokenizer.ggml.eot_token_id": values.U32(texts.index(_END_OF_TURN))}
    return {}


class _Recipes:
    """Builds the recipes of a model."""

    def __init__(self, catalog: Catalog, config: ModelConfig, source: GgufSource) -> None:
        self._catalog = catalog
        self._config = config
        self._source = source
        self._stored = stored_names(catalog, catalog.title)  # by name without wrappers
        self._experts: dict[str, dict[int, str]] = {}  # stacks: the tensor of each expert
        self._fused: dict[str, str] = {}  # layers with fused experts, by the source
        self._forms: set[str] = set()

    def run(self) -> tuple[dict[str, TensorRecipe], str | None]:
        """Return the recipes in the order of their first source, and the form of the experts."""
        recipes: dict[str, TensorRecipe] = {}
        unknown = []
        tied = self._config.values.get("tie_word_embeddings", self._source.tied)
        if self._source.tied and tied is not True and HEAD in self._stored:
            raise self._config.unsupported("tie_word_embeddings is false, but llama.cpp has no separate head here")
        for name in self._stored:
            if name.endswith(BUFFERS) or (name == HEAD and self._source.tied):
                continue
            placed = list(self._placed(name))
            if not placed:
                unknown.append(self._stored[name])
            for target, recipe in placed:
                if target in recipes and recipe is not None:
                    text = f"is a second {target}"
                    raise error_about(FormatError, text, path=self._catalog.title, tensor=self._stored[name])
                recipes.setdefault(target, recipe or TensorRecipe((), ()))
        if unknown:
            raise UnsupportedError(
                f"{self._catalog.title}: {some_of(unknown)}: llama.cpp's "
                f"{self._source.architecture} has no such tensor; raw=True writes the tensors as they are",
                tensor=unknown[0],
            )
        if tied is not True and HEAD not in self._stored and not self._source.tied:
            text = "is missing, and tie_word_embeddings is not true"
            raise error_about(FormatError, text, path=self._catalog.title, tensor=HEAD)
        for target, sources in self._experts.items():
            recipes[target] = self._stacked(target, sources)
        if len(self._forms) > 1:
            raise FormatError("some layers have fused experts and some do not", self._catalog.title)
        return recipes, next(iter(self._forms), None)

    def _placed(self, name: str) -> Iterator[tuple[str, TensorRecipe | None]]:
        """Yield the results that need a source, with their recipes; None for a stack, whose recipe comes later."""
        stored = self._stored[name]  # `name` is without wrappers
        bare = name.removeprefix(_PREFIX)
        module, _, suffix = bare.rpartition(".")
        if module in ENDS and suffix == "weight" and (module == "lm_head") == (bare == name):
            yield f"{ENDS[module]}.weight", self._same(stored, f"{ENDS[module]}.weight")
            return
        match = _LAYER.fullmatch(bare)
        if match is None or not name.startswith(_PREFIX):
            return
        block, inner = f"blk.{match[1]}.", match[2]
        module, _, suffix = inner.rpartition(".")
        target = self._source.modules.get(module)
        if target is not None and suffix in ("weight", "bias"):
            yield f"{block}{target}.{suffix}", self._same(stored, f"{block}{target}.{suffix}")
        elif self._source.modules.get(inner) is not None:  # a parameter without suffix
            target = f"{block}{self._source.modules[inner]}.weight"
            yield target, self._same(stored, target)
        elif self._source.experts is not None:
            yield from self._of_experts(stored, block, inner, self._source.experts)

    def _same(self, name: str, target: str) -> TensorRecipe:
        shape, heads = tuple(self._catalog.about(name).shape), 0
        part = target.rpartition(".")[0].rpartition(".")[2]
        if self._source.permuted and part in ("attn_q", "attn_k"):
            heads = self._config.heads if part == "attn_q" else self._config.kv_heads
            if not shape or shape[0] % (2 * heads):
                raise error_about(FormatError, f"{list(shape)} does not have {heads} heads", tensor=name)
        shift = 1.0 if self._source.norm_shift and name.endswith("norm.weight") else 0.0
        if part == "ffn_gate_inp_shexp" and shape not in (
            (width := self._config.size(gguf_sources.WIDTH),),
            (1, width),
        ):
            text = f"must have the shape [1, {width}], got {list(shape)}"
            raise error_about(FormatError, text, tensor=name)
        return TensorRecipe(shape, (Move(name),), heads, shift=shift)

    def _of_experts(
        self, name: str, block: str, inner: str, experts: Experts
    ) -> Iterator[tuple[str, TensorRecipe | None]]:
        match = _EXPERT.fullmatch(inner)
        if match is not None:
            module, _, suffix = f"{match[1]}{{}}{match[3]}".rpartition(".")
            target = experts.single.get(module)
            if target is not None and suffix == "weight" and int(match[2]) < MAX_EXPERTS:
                self._forms.add("single")
                self._experts.setdefault(f"{block}{target}.weight", {})[int(match[2])] = name
                yield f"{block}{target}.weight", None
        elif inner == experts.fused:
            self._forms.add("fused")
            yield from self._split(name, block, experts)
        elif experts.interleaved and inner == f"{experts.fused}_bias":
            yield from self._split(name, block, experts, "bias")
        elif experts.interleaved and inner == f"{experts.down}_bias":
            yield f"{block}ffn_down_exps.bias", TensorRecipe(tuple(self._catalog.about(name).shape), (Move(name),))
        elif inner == experts.down:
            shape = tuple(self._catalog.about(name).shape)
            target = f"{block}ffn_down_exps.weight"
            if not experts.interleaved:
                yield target, TensorRecipe(shape, (Move(name),))
            elif len(shape) == 3 and shape[0] <= MAX_EXPERTS:
                read = [TensorView(k, transposed=True) for k in range(shape[0])]
                moves = tuple(Move(name, view, TensorView(k)) for k, view in enumerate(read))
                yield target, TensorRecipe((shape[0], shape[2], shape[1]), moves)

    def _split(
        self, name: str, block: str, experts: Experts, suffix: str = "weight"
    ) -> Iterator[tuple[str, TensorRecipe]]:
        """Yield gate and up, which a source holds together."""
        shape = tuple(self._catalog.about(name).shape)
        axes = 2 if suffix == "bias" else 3
        rows = shape[-1 if experts.interleaved else -2] if len(shape) == axes else 1
        if rows % 2 or shape[0] > MAX_EXPERTS:
            text = f"{list(shape)} does not hold gate and up of experts"
            raise error_about(FormatError, text, tensor=name)
        half = rows // 2
        columns = shape[1 if experts.interleaved else 2 : axes - 1 if experts.interleaved else axes]
        for k, role in enumerate(("gate", "up")):
            part = RowRange(k, None, 2) if experts.interleaved else RowRange(k * half, (k + 1) * half)
            moves = tuple(
                Move(name, TensorView(item, part, experts.interleaved), TensorView(item)) for item in range(shape[0])
            )
            yield f"{block}ffn_{role}_exps.{suffix}", TensorRecipe((shape[0], half, *columns), moves)

    def _stacked(self, target: str, sources: Mapping[int, str]) -> TensorRecipe:
        count = self._config.size(gguf_sources.EXPERTS)
        missing = next((k for k in range(count) if k not in sources), None)
        if missing is not None or len(sources) != count:
            fault = f"expert {missing} is missing" if missing is not None else f"it has {len(sources)} experts"
            text = f"needs {count} experts, but {fault}"
            raise error_about(FormatError, text, path=self._catalog.title, tensor=target)
        shapes = {tuple(self._catalog.about(name).shape) for name in sources.values()}
        if len(shapes) > 1:
            text = "is a stack of experts, but these have different shapes"
            raise error_about(FormatError, text, path=self._catalog.title, tensor=target)
        moves = tuple(Move(sources[k], written=TensorView(k)) for k in range(count))
        return TensorRecipe((count, *shapes.pop()), moves)


def some_of(names: Sequence[str]) -> str:
    """Return the first names, and how many follow."""
    more = f" and {plural(len(names) - _MOST_SHOWN, 'more tensor')}" if names[_MOST_SHOWN:] else ""
    return f"{', '.join(map(show, names[:_MOST_SHOWN]))}{more}"


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[Any, Any], tokens: int, title: str, architecture: str
) -> None:
    """Compare the tensors of a file with those that llama.cpp expects."""
    prefix = f"{architecture}."
    sizes = {
        key.removeprefix(prefix).replace(".", "_"): int(value)
        for key, value in metadata.items()
        if isinstance(key, str) and key.startswith(prefix) and isinstance(value, int) and not isinstance(value, bool)
    }
    sizes["vocab_size"] = tokens
    sizes[gguf_architectures.FUSED] = int(any(name.endswith(".attn_qkv.weight") for name in shapes))
    try:
        expected = schema_of(architecture).expand(sizes, shapes.keys())
    except ValueError as error:
        raise FormatError(f"sizes of the model: {error}", title) from None
    missing = [name for name, tensor in expected.items() if tensor.required and name not in shapes]
    if missing:
        raise FormatError(f"tensors are missing: llama.cpp needs {some_of(missing)}", title, tensor=missing[0])
    for name, shape in shapes.items():
        if name not in expected:
            raise UnsupportedError(f"{title}: llama.cpp's {architecture} has no tensor {show(name)}", tensor=name)
        required_shape = expected[name].shape
        if required_shape is not None and not _fits(shape, required_shape):
            text = f"has the shape {list(shape)}, but the sizes of the model need {list(required_shape)}"
            raise error_about(FormatError, text, path=title, tensor=name)


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        size is None or size == own for own, size in zip(shape, expected, strict=True)
    )
