"""Present models as the GGUF files that llama.cpp and ComfyUI load, and such files as models again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np

from ...core import dtypes
from ...core.arrays import Array
from ...core.files import Location
from ...core.text import error_about, plural, show, warning
from ...errors import FormatError, UnsupportedError
from ...formats import gguf, mixtures
from ...models.diffusion import (
    ARCHITECTURE,
    MMPROJ,
    SHAPE_KEY,
    TYPE,
    diffusion_models,
    has_marks,
    is_of_tower,
    original_shape,
    prefix_of,
)
from ...models.family import (
    GgufForm,
    MmprojForm,
    gguf_architectures,
    gguf_form,
    is_kept_f32,
    mmproj_form,
    without_numbers,
)
from ...models.schema import language_of, listed_in
from ...quant.gguf import algorithm_of, block_type, numbers_in, tensor_scale
from ...quant.quantization import without_quantization
from ..catalog import Catalog, RestructuredCatalog
from ..forms import (
    NAME_PREFIX,
    SINGLE,
    config_of_text,
    counted,
    has_towers,
    laid_out,
    published_recipes,
    refuse_missing,
    some_of,
    text_form_of,
    with_rotations_of,
)
from ..recipes import Move, TensorRecipe
from .sentencepiece import MAX_PIECES
from .settings import ModelConfig, config_of, form_of, has_rotations, rotation_factors, settings_of, settings_of_tower
from .tokenizer import GENERATION, KEPT, TOKENS, TokenizerFiles, object_at, skeleton, tokenizer_keys
from .tokenizer_files import kept_json, tokenizer_files

# safeload's keys for the way back.
_CONFIG = "config"
_EXPERTS = f"{KEPT}experts"
# The dtypes of the source by tensor, and the key of most of them.
_DTYPES, _USUAL = "dtypes", "*"
_EXACT_IN_F32 = ("BF16", "F16", "F32")
_VERSION_LIKE = re.compile(r"v\d+(?:\.\d+)*|\d.*", re.ASCII)
# Longest name to write.
_LONGEST = 200

# Keys of `GENERATION`, and the type of their value.
_SAMPLING: dict[str, tuple[tuple[str, ...], type[int] | type[float]]] = {
    "top_k": (("top_k",), gguf.I32),
    "top_p": (("top_p",), gguf.F32),
    "min_p": (("min_p",), gguf.F32),
    "temp": (("temperature",), gguf.F32),
    "penalty_repeat": (("penalty_repeat", "repetition_penalty"), gguf.F32),
}
_MODULES, _POOLING = "modules.json", "pooling_type"
_PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
# Poolings by number from 1, with older keys.
_POOLINGS = (
    ("mean", "pooling_mode_mean_tokens"),
    ("cls", "pooling_mode_cls_token"),
    ("lasttoken", "pooling_mode_lasttoken"),
)
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def form_between(model: Catalog, file: Catalog) -> tuple[Catalog, ModelConfig, GgufForm]:
    """Return a model with a config, of its own or that of a file of llama.cpp, and the family of both."""
    if is_of_tower(file.metadata):
        return model, *tower_of(model)
    values = model.config or kept_json(file, _CONFIG)
    architecture = str(file.metadata.get(ARCHITECTURE))
    if not values and architecture in gguf_architectures():
        values = config_of(file, form_of(file))[0]
    name, form = gguf_form(values)
    if form is None:
        text = f"architecture {show(architecture if name is None else name)} is not known to have a form in llama.cpp"
        raise UnsupportedError(f"{model.title}: {text}, so its tensors cannot be compared with those of {file.title}")
    if form.architecture != architecture:
        text = f"{show(name)} is {form.architecture} in llama.cpp, but {file.title} is {architecture}"
        raise UnsupportedError(f"{model.title}: {text}")
    if not model.config:
        model = copy(model)
        model.config = dict(values or {})
    config = ModelConfig({**(model.config or {}), **counted(model, form)}, model.title, form)
    return model, config, form


def keys_between(model: Catalog, file: Catalog) -> Iterator[Mapping[str, Any]]:
    """Yield the keys of a model, then those of its tokenizer, as the metadata of a file of llama.cpp has them."""
    model, config, form = form_between(model, file)
    if isinstance(form, MmprojForm):
        yield settings_of_tower(config, form)
        return
    yield settings_of(config, form)[0]
    if model.folder is not None and "token_embd.weight" in file:
        yield tokenizer_keys(TokenizerFiles(model.folder), config, form, file.about("token_embd.weight").shape[0])


def to_llama_cpp(catalog: Catalog, *, blocks: bool = False) -> Catalog:
    """Return the tensors and metadata of a model as llama.cpp needs them."""
    # With `blocks`, packed codes stay in the block types of ggml that hold them unchanged.
    name, form = gguf_form(catalog.config)
    if form is None:
        text = f"architecture {show(name)} cannot be converted for llama.cpp; `safeload families` lists what can"
        raise UnsupportedError(f"{catalog.title}: {text}; raw=True writes the tensors as they are")
    catalog.refuse_codes(catalog, "convert for llama.cpp")
    config = ModelConfig({**(catalog.config or {}), **counted(catalog, form)}, catalog.title, form)
    settings, factors = settings_of(config, form)
    laid = laid_out(catalog, config, form)
    laid.tell(catalog.title, form.holder)
    recipes, experts = laid.recipes, laid.experts
    embedding = recipes.get("token_embd.weight", TensorRecipe((0, 0), ()))
    if len(embedding.shape) != 2 or embedding.shape[0] > MAX_PIECES:
        text = f"has the shape {list(embedding.shape)}, expected 2 axes and at most {MAX_PIECES:,} rows"
        raise error_about(FormatError, text, path=catalog.title, tensor=next(iter(embedding.sources)))
    rows, stated = embedding.shape[0], config.values.get("vocab_size")
    if embedding.moves and type(stated) is int and rows < stated:  # tokens would be lost
        text = f"has {rows:,} rows, but vocab_size is {stated:,}"
        raise error_about(FormatError, text, path=catalog.title, tensor=next(iter(embedding.sources)))
    recipes |= {name: TensorRecipe(array.shape, (), constant=array) for name, array in factors.items()}
    check_tensors({name: recipe.shape for name, recipe in recipes.items()}, settings, rows, catalog.title, form)
    files = TokenizerFiles(_home(catalog))
    tokens = tokenizer_keys(files, config, form, rows)
    recipes, extra = _in_blocks(catalog, recipes, form.architecture) if blocks else (recipes, {})
    shapes = {name: recipe.shape for name, recipe in recipes.items()}
    metadata = {
        ARCHITECTURE: form.architecture,
        TYPE: "model",
        **_general_keys(files, shapes, config.values, suppresses=form.suppress_tokens),
        **settings,
        **({f"{form.architecture}.{_POOLING}": gguf.U32(kind)} if form.pooling and (kind := _pooling(files)) else {}),
        mixtures.FILE_TYPE: gguf.U32(0),  # replaced once types are decided
        mixtures.QUANTIZATION_VERSION: gguf.U32(mixtures.CURRENT_VERSION),
        **extra,
        **tokens,
        f"{KEPT}{_CONFIG}": json.dumps(catalog.config, ensure_ascii=False),
        **({} if experts is None else {_EXPERTS: experts}),
        f"{KEPT}{_DTYPES}": _dtypes(catalog, recipes),
        **({NAME_PREFIX: ""} if form.prefix and form.embedding in catalog else {}),
        **{f"{KEPT}{name}": text for name, text in skeleton(files).items()},
    }
    return RestructuredCatalog(
        catalog, recipes, metadata=metadata, format="gguf", fixed=dict.fromkeys(filter(is_kept_f32, recipes), "F32")
    )


def _home(catalog: Catalog) -> Location:
    """Return the folder of the weights."""
    if catalog.folder is not None:
        return catalog.folder
    file = catalog.weight_files[0]
    return Location(file.files, file.files.split(file.place)[0])


def _dtypes(catalog: Catalog, recipes: Mapping[str, TensorRecipe]) -> str:
    """Return the dtype of most sources under "*", and of the others by tensor, as JSON; null for another form."""
    listed: dict[str, str | None] = {}
    for name, recipe in recipes.items():
        rows = {None if about.quantized else about.row.code for about in map(catalog.about, set(recipe.sources))}
        code = rows.pop() if len(rows) == 1 else None
        listed[name] = code if code in _EXACT_IN_F32 else None
    usual = max(_EXACT_IN_F32, key=[*listed.values()].count)
    return json.dumps({_USUAL: usual, **{name: code for name, code in listed.items() if code != usual}})


# ---- vision towers ----

_PROCESSORS = (("preprocessor_config.json", "media_proc_cfg"), ("processor_config.json", "image_processor"))


def tower_of(catalog: Catalog) -> tuple[ModelConfig, MmprojForm]:
    """Return the config of a model's vision tower, with that of the whole model, and how llama.cpp has the tower."""
    whole: Mapping[str, Any] = catalog.config or {}
    form = mmproj_form(whole)
    if form is None:
        name = show(next(iter(listed_in(whole)), None))
        text = f"architecture {name} has no vision part for llama.cpp; `safeload families` lists the models with one"
        raise UnsupportedError(f"{catalog.title}: {text}")
    tower, text_form = whole.get("vision_config"), gguf_form(whole)[1]
    if not isinstance(tower, Mapping):
        raise FormatError(f"config.json: vision_config must be an object, got {show(tower)}", catalog.title)
    files = TokenizerFiles(_home(catalog))
    added = [*files.added_elsewhere, *files.added_in_json] if form.token_ids else []
    ids = {key: next((token.id for token in added if token.text == text), 0) for key, text in form.token_ids.items()}
    inner = language_of(whole) if text_form is None else ModelConfig(whole, catalog.title, text_form).values
    values = {**tower, "whole": whole, "text": inner, "processor": _processor(files), "token": ids}
    return ModelConfig(values, catalog.title, form), form


def tower_to_llama_cpp(catalog: Catalog, target: dtypes.Dtype | None, *, quantized: bool) -> Catalog:
    """Return a model's vision tower as llama.cpp's converter writes it, in a dtype, or ``quantized`` to q8_0."""
    config, form = tower_of(catalog)
    settings = settings_of_tower(config, form)
    laid = laid_out(catalog, config, form)
    laid.tell(catalog.title, form.holder)
    catalog.refuse_codes([name for recipe in laid.recipes.values() for name in recipe.sources], "convert for llama.cpp")
    shapes = {name: recipe.shape for name, recipe in laid.recipes.items()}
    check_tensors(shapes, settings, None, catalog.title, form)
    own = {}  # codes of dtypes by tensor, unless the converter has another
    for name, recipe in laid.recipes.items():
        about = catalog.about(recipe.moves[0].source)
        own[name] = target.code if target is not None else "BF16" if about.quantized else about.row.code
    fixed = {}
    for name, dtype in ((name, form.dtype_of(name)) for name in own):
        if dtype is not None:
            fixed[name] = dtype if dtype in dtypes.BY_CODE else "F32" if quantized or own[name] != "F16" else "F16"
    first = next((own[name] for name, shape in shapes.items() if len(shape) > 1), "F16")
    number = mixtures.number_of("q8_0" if quantized else dtypes.BY_CODE[first].name)
    metadata = {
        ARCHITECTURE: form.architecture,
        TYPE: MMPROJ,
        **_general_keys(TokenizerFiles(_home(catalog)), shapes, config.whole["whole"], suppresses=False),
        **({} if number is None else {mixtures.FILE_TYPE: gguf.U32(number)}),
        **settings,
        mixtures.QUANTIZATION_VERSION: gguf.U32(mixtures.CURRENT_VERSION),
    }
    return RestructuredCatalog(catalog, laid.recipes, metadata=metadata, format="gguf", fixed=fixed)


def _processor(files: TokenizerFiles) -> dict[str, Any]:
    """Return the settings of a model's image processor."""
    settings: dict[str, Any] = {}
    for name, key in _PROCESSORS:
        content = files.read(name) or {}
        settings |= {**content, **object_at(content, key)}
    for key in ("image_mean", "image_std"):
        if key not in settings:
            raise files.fault(_PROCESSORS[0][0], f"{key} is missing, which llama.cpp needs to prepare images")
    return settings


# ---- codes that stay as they are ----

_SCALED = "nvfp4"  # the block type with factors in tensors beside it
# Architectures with a graph that multiplies by all factors of the language model: src/models of llama.cpp.
_APPLIES_FACTORS = ("llama", "qwen3", "qwen3moe", "qwen35", "qwen35moe")
_OF_INPUTS = ("input_scale", "input_global_scale")  # the second divides
_A4 = ("general.tensor_extra.name", "general.tensor_extra.prec_a4")  # whether activations may have 4 bits


def _in_blocks(
    catalog: Catalog, recipes: Mapping[str, TensorRecipe], architecture: str
) -> tuple[dict[str, TensorRecipe], dict[str, Any]]:
    """Return recipes that keep the codes of packed sources, and the metadata of these codes."""
    result: dict[str, TensorRecipe] = {}
    precise, ignored = [], []  # tensors with activations of more than 4 bits; tensors with factors without effect
    for name, recipe in recipes.items():
        kind = None if is_kept_f32(name) else _block_type(catalog, recipe)
        beside: dict[str, TensorRecipe] = {}
        if kind == _SCALED:
            experts = recipe.shape[0] if len(recipe.shape) > 2 else 1
            scale, _ = names = gguf.scales_beside(name)
            for part, values in zip(names, zip(*_factors(catalog, recipe), strict=True), strict=True):
                factors = np.broadcast_to(np.concatenate(values), (experts,)).copy()
                if (factors != 1).any():
                    beside[part] = TensorRecipe((experts,), (), constant=factors)
            applied = architecture in _APPLIES_FACTORS and name not in mixtures.EMBEDDINGS
            if not applied and scale in beside:
                ignored.append(name)
                kind, beside = None, {}
            elif (packed := catalog.packed(source := recipe.moves[0].source)) is not None:
                precise += [name] if algorithm_of(packed, source) == "W4A16_NVFP4" else []
        result |= {name: recipe._replace(blocks=kind), **beside}
    if ignored:
        text = "%s: dequantized, because llama.cpp's %s ignores the factors of NVFP4: %s"
        warning(text, catalog.title, architecture, some_of(ignored))
    return result, dict(zip(_A4, (sorted(precise), [False] * len(precise)), strict=True)) if precise else {}


def _block_type(catalog: Catalog, recipe: TensorRecipe) -> str | None:
    """Return the block type that holds the codes of all sources unchanged, or None."""
    kinds = set()
    for move in recipe.moves:
        packed, places = catalog.packed(move.source), move.arrangement
        if packed is None or (packed.packing.columns, packed.packing.transpose) != (
            recipe.shape[-1],
            move.read.transposed,
        ):
            return None
        if places is not None and (
            places.rows is None or places.columns is not None or places.transposed or places.computes
        ):
            return None
        kinds.add(block_type(packed))
    kind = kinds.pop() if len(kinds) == 1 else None
    # A matrix has one factor.
    return None if kind == _SCALED and len(recipe.moves) not in (1, *recipe.shape[:-2]) else kind


def _factors(catalog: Catalog, recipe: TensorRecipe) -> Iterable[tuple[Array, Array]]:
    """Yield the factors of the scales, and of the activations, of the matrices that each move makes."""
    for move in recipe.moves:
        packed, module = catalog.packed(move.source), move.source.removesuffix(".weight")
        assert packed is not None
        scale, own = tensor_scale(packed), np.ones(1, np.float32)
        name = next((n for part in _OF_INPUTS if (n := f"{module}.{part}") in catalog.ignored), None)
        if name is not None:
            part, shape = catalog.ignored[name], catalog.about(move.source).shape
            matrices = shape[0] if len(shape) > 2 else 1
            if math.prod(part.shape) not in (1, matrices):
                text = f"has the shape {list(part.shape)}, expected one number, or one for each matrix"
                raise error_about(FormatError, text, path=catalog.title, tensor=name)
            with np.errstate(divide="ignore"):
                own = np.float32(1) / numbers_in(part) if name.endswith(_OF_INPUTS[1]) else numbers_in(part)
        item = slice(None) if move.read.item is None else slice(move.read.item, move.read.item + 1)
        first, second = (values if values.size == 1 else values[item] for values in (scale, own))
        yield first, second


# ---- name, size and settings of sampling ----


def _general_keys(
    files: TokenizerFiles, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, suppresses: bool
) -> dict[str, Any]:
    """Return the general keys of a model, with its name for people as llama.cpp's converter writes it."""
    name = files.folder.shown.replace("\\", "/").rstrip("/").rpartition("/")[2]
    named = config.get("_name_or_path")
    if isinstance(named, str) and named and named.count("/") <= 1:
        name = named.rpartition("/")[2]
    keys: dict[str, Any] = {}
    for key, (names, kind) in _SAMPLING.items():
        value = next((value for name in names if (value := files.generation.get(name)) is not None), None)
        numbers = int if kind is gguf.I32 else (int, float)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, numbers) or not abs(value) < 1 << 31:
                raise files.fault(GENERATION, f"{names[-1]} must be a number, got {show(value)}")
            keys[f"general.sampling.{key}"] = kind(value)
    tokens = files.generation.get("suppress_tokens") if suppresses else None
    if tokens:
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < MAX_PIECES for token in tokens):
            raise files.fault(GENERATION, f"suppress_tokens must be a list of ids, got {show(tokens)}")
        keys["tokenizer.ggml.suppress_tokens"] = np.array(tokens, np.int32)
    if name.strip(". "):
        keys["general.name"] = titled(name)
    return {**keys, "general.size_label": _size_label(shapes)}


def titled(name: str) -> str:
    """Return the name for people that llama.cpp's converter makes of the name of a folder."""
    words = name[:_LONGEST].strip().replace("-", " ").split()
    return " ".join(word.title() if word.islower() and not _VERSION_LIKE.fullmatch(word) else word for word in words)


def _size_label(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the number of parameters as llama.cpp's converter writes it: "8.0B", "8x7B"."""
    parameters = 0  # of the model with a single expert
    counts = []
    for name, shape in shapes.items():
        size = math.prod(shape)
        if "_exps." in name and len(shape) >= 3:
            counts.append(max(1, shape[-2 if ".bias" in name else -3]))
            size //= counts[-1]
        parameters += size
    divisor, unit = next(((divisor, unit) for divisor, unit in _UNITS if parameters > divisor), (1e3, "K"))
    scaled = parameters * (1 / divisor)
    digits = max(2 - len(str(round(scaled)).lstrip("0")), 0)
    experts = f"{sum(counts) // len(counts)}x" if counts else ""
    return f"{experts}{scaled:.{digits}f}{unit}"


def _pooling(files: TokenizerFiles) -> int | None:
    """Return llama.cpp's number of the pooling that sentence-transformers computes, or None if there is none."""
    try:
        modules = json.loads(files.content(_MODULES) or b"[]")
    except ValueError:
        raise files.fault(_MODULES, "invalid JSON") from None
    steps = [step for step in modules if isinstance(step, dict)] if isinstance(modules, list) else []
    place = next((step.get("path") for step in steps if str(step.get("type")).endswith("Pooling")), None)
    if place is None:
        return None
    if not isinstance(place, str) or not _PLAIN_NAME.fullmatch(place):
        raise files.fault(_MODULES, f"invalid path {show(place)}")
    name = f"{place}/config.json"
    content = files.read(name) or {}
    for number, (kind, key) in enumerate(_POOLINGS, 1):
        if content.get(key) is True or content.get("pooling_mode") == kind:
            return number
    expected = ", ".join(kind for kind, _ in _POOLINGS)
    raise UnsupportedError(f"{files.folder.shown}: {name}: llama.cpp has no such pooling, expected one of {expected}")


# ---- the way back ----


def published(catalog: Catalog) -> tuple[dict[str, TensorRecipe], ModelConfig, GgufForm, list[str]]:
    """Return the recipes of a model of transformers, its config, the form of the file, and notes of losses."""
    metadata = catalog.metadata
    architecture = str(metadata[ARCHITECTURE])
    known = gguf_architectures()
    if architecture not in known:
        text = f"architecture {show(architecture)} cannot become a folder for transformers; `safeload families` lists "
        raise UnsupportedError(f"{catalog.title}: {text}what can; raw=True writes the tensors as they are")
    catalog.refuse_codes(catalog, "convert to a model of transformers")
    notes: list[str] = []
    kept = kept_json(catalog, _CONFIG)  # by `to_llama_cpp`; None in a foreign file
    if kept is not None:
        name, own = gguf_form(kept)
        if own is None or own.architecture != architecture:
            text = f"{KEPT}{_CONFIG} names {show(name)}, but the file is of architecture {architecture}"
            raise FormatError(text, catalog.title)
        form, experts = own, " ".join(str(metadata.get(_EXPERTS, "")).split()) or SINGLE
        config = {**without_quantization(kept), "architectures": [name]}
        if has_towers(config):
            config = config_of_text(catalog, form, config)
    else:
        form, experts = form_of(catalog), SINGLE
        text_form = text_form_of(catalog, form, architecture, form.text_type, "")
        config, notes = config_of(catalog, form)
        config = with_rotations_of(text_form, config, form)
        config |= {"architectures": [text_form.class_name], "model_type": text_form.model_type}
    of_text = form.of_text
    if of_text is not form:
        notes.append(f"towers, which are in another file: the folder has the language model, {of_text.class_name}")
    settings = ModelConfig(config, catalog.title, of_text)
    if kept is not None and not has_rotations(catalog, rotation_factors(settings, of_text)):
        text = f"the factors of rotations are not those of {KEPT}{_CONFIG}; raw=True keeps the tensors"
        raise FormatError(text, catalog.title)
    recipes = published_recipes(catalog, settings, of_text, experts if of_text is form else SINGLE)
    return recipes, settings, form, notes


def from_llama_cpp(catalog: Catalog) -> Catalog:
    """Return the tensors, the config and the tokenizer's files of a model."""
    recipes, settings, form, notes = published(catalog)
    metadata, of_text = catalog.metadata, form.of_text
    shapes = {tensor: catalog.about(tensor).shape for tensor in catalog}
    tokens = metadata.get(TOKENS)
    rows = len(tokens) if isinstance(tokens, list) else next(iter(shapes.get("token_embd.weight", ())), 0)
    check_tensors(shapes, metadata, rows, catalog.title, form)
    refuse_missing(catalog, recipes, settings, of_text)
    kept = kept_json(catalog, _CONFIG)
    surplus = [] if kept else [name for name in recipes if not settings.has(of_text.published, *without_numbers(name))]
    if surplus:  # transformers would drop these tensors
        text = f"{some_of(surplus)}: a config of {of_text.class_name} made from the keys of the file has no such tensor"
        raise UnsupportedError(f"{catalog.title}: {text}; raw=True keeps the tensors", tensor=surplus[0])
    recipes = _as_in_source(catalog, recipes)
    result = RestructuredCatalog(catalog, recipes, metadata={}, config={**settings.whole})
    result.texts, more = tokenizer_files(catalog, of_text.class_name)
    notes += more
    if f"{form.architecture}.{_POOLING}" in metadata:
        notes.append(f"{_MODULES}, the pooling of embeddings")
    if notes:
        warning("%s: not recovered: %s", catalog.title, "; ".join(notes))
    return result


def _as_in_source(catalog: Catalog, recipes: Mapping[str, TensorRecipe]) -> dict[str, TensorRecipe]:
    """Return recipes that give tensors stored as f32, such as norms, the dtype that they had before."""
    kept = kept_json(catalog, _DTYPES) or {}
    result = {}
    for name, recipe in recipes.items():
        sources = set(recipe.sources)
        wide = all(catalog.about(source).row is dtypes.BY_CODE["F32"] for source in sources)
        codes = {str(kept.get(source, kept.get(_USUAL))) for source in sources} if wide else set()
        code = next(iter(codes)) if len(codes) == 1 else None
        result[name] = recipe._replace(dtype=code) if code in _EXACT_IN_F32 else recipe
    return result


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[Any, Any], tokens: int | None, title: str, form: GgufForm
) -> None:
    """Compare the tensors of a file with those that llama.cpp expects."""
    try:
        expected = form.schema.expand(form.sizes(metadata, shapes, tokens), shapes.keys())
    except ValueError as error:
        raise FormatError(f"sizes of the model: {error}", title) from None
    missing = [name for name, tensor in expected.items() if tensor.required and name not in shapes]
    if missing:
        raise FormatError(f"tensors are missing: llama.cpp needs {some_of(missing)}", title, tensor=missing[0])
    for name, shape in shapes.items():
        if name not in expected:
            raise UnsupportedError(f"{title}: {form.holder} has no tensor {show(name)}", tensor=name)
        if expected[name].wrong_axes(shape):
            needed = list(expected[name].shape or ())
            text = f"has the shape {list(shape)}, but the sizes of the model need {needed}"
            raise error_about(FormatError, text, path=title, tensor=name)


# ---- diffusion models, for ComfyUI ----

# Tensors with at most this many elements stay float32.
_SMALL = 1024
# Tensors with at least this many elements get rows of `_ROW`.
_DIVIDED, _ROW = 512, 256
# The shapes that metadata holds are int32.
_LONGEST_AXIS = (1 << 31) - 1
# Dtypes whose vectors and small tensors become float32; in other checkpoints they become float16 as all tensors.
_WIDE = ("F32", "BF16")


def recognized(catalog: Catalog) -> tuple[str, str] | None:
    """Return the architecture of a diffusion model, and the prefix of its names, or None."""
    names = dict.fromkeys(catalog).keys()
    prefix = prefix_of(names)
    for architecture, model in diffusion_models().items():
        if model.diffusers is not None and prefix + model.diffusers in names:
            text = f"tensor {show(model.diffusers)} is from Diffusers, but ComfyUI loads {architecture} from GGUF only "
            text += "in the layout of the original checkpoint: convert that one, or pass raw=True to write the tensors "
            raise UnsupportedError(f"{catalog.title}: {text}as they are")
        if has_marks(names, model, prefix):
            return architecture, prefix
    return None


def to_comfyui(catalog: Catalog, diffusion: tuple[str, str]) -> Catalog:
    """Return the tensors and the metadata of a diffusion model as ComfyUI needs them."""
    architecture, prefix = diffusion
    model = diffusion_models()[architecture]
    names = {name: name.removeprefix(prefix) for name in catalog if name.startswith(prefix)}
    names = {name: bare for name, bare in names.items() if not any(part in bare for part in model.left_out)}
    catalog.refuse_codes(names, "convert for ComfyUI")
    rest = [name for name in catalog if name not in names]
    if rest:
        left_out = f"{plural(len(rest), 'other tensor')}, such as {show(rest[0])}"
        warning("%s: only the diffusion model (%s) is converted, without %s", catalog.title, architecture, left_out)
    recipes: dict[str, TensorRecipe] = {}
    metadata = {
        ARCHITECTURE: architecture,
        mixtures.QUANTIZATION_VERSION: gguf.U32(mixtures.CURRENT_VERSION),
        mixtures.FILE_TYPE: gguf.U32(1),  # replaced once types are decided
    }
    for name, bare in names.items():
        about = catalog.about(name)
        shape, count = about.shape, math.prod(about.shape)
        code = None if about.quantized else about.row.code
        small = len(shape) == 1 or count <= _SMALL or any(part in bare for part in model.kept_f32)
        dtype = "F32" if code in _WIDE and small else "BF16" if code == "BF16" else "F16"
        if model.rearranged and len(shape) > 1 and count >= _DIVIDED and count % _ROW == 0 and shape[-1] % _ROW:
            if max(shape) > _LONGEST_AXIS:
                text = f"{list(shape)} cannot be divided into rows of {_ROW}, because its shape does not fit int32"
                raise error_about(UnsupportedError, text, tensor=name)
            metadata[SHAPE_KEY + bare] = np.array(shape, np.int32)
            shape = (count // _ROW, _ROW)
        if not about.quantized and (not about.floating or about.row.packed):
            text = f"is {about.dtype}, but ComfyUI loads only floating-point numbers from GGUF"
            raise error_about(UnsupportedError, f"{text}; raw=True writes the tensors as they are", tensor=name)
        recipes[bare] = TensorRecipe(shape, (Move(name),), dtype=dtype)
    kept = dict.fromkeys((name for name, recipe in recipes.items() if recipe.dtype == "F32"), "F32")
    return RestructuredCatalog(catalog, recipes, metadata=metadata, format="gguf", fixed=kept)


def from_comfyui(catalog: Catalog, chosen: Iterable[str]) -> Catalog:
    """Return the tensors of a GGUF file of a diffusion model in their original shapes."""
    catalog.refuse_codes(catalog, "convert a diffusion model")
    metadata = catalog.metadata
    shapes = {name: catalog.about(name).shape for name in catalog}
    try:
        for name in shapes.keys() & chosen:
            original_shape(metadata, name, shapes[name])
    except FormatError as error:
        raise error_about(FormatError, f": {error}; drop= leaves it out", path=catalog.title, tensor=name) from None
    recipes = {name: TensorRecipe(shape, (Move(name),)) for name, shape in shapes.items()}
    # Without the keys about the types and shapes of the GGUF file.
    general = {k: v for k, v in metadata.items() if k not in mixtures.FILE_KEYS and not str(k).startswith(SHAPE_KEY)}
    bf16 = any(not (about := catalog.about(name)).quantized and about.row.code == "BF16" for name in catalog)
    return RestructuredCatalog(catalog, recipes, metadata=general, restored=dtypes.BY_CODE["BF16" if bf16 else "F16"])
