"""Present models as the GGUF files that llama.cpp and ComfyUI load, and such files as models again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...core import dtypes
from ...core.arrays import Array
from ...core.files import Location, read_if_there
from ...core.text import error_about, plural, show, warning
from ...errors import FormatError, UnsupportedError
from ...formats import gguf, mixtures
from ...models.diffusion import ARCHITECTURE, SHAPE_KEY, diffusion_models, has_marks, original_shape, prefix_of
from ...models.family import (
    PLACE,
    GgufForm,
    GgufLayout,
    gguf_architectures,
    gguf_form,
    is_kept_f32,
    without_numbers,
)
from ...models.module_names import stored_names
from ...models.schema import MAX_EXPERTS, NUMBER, language_of
from ...quant.gguf import algorithm_of, block_type, numbers_in, tensor_scale
from ...quant.quantization import without_quantization
from ..catalog import Arrangement, Catalog, Move, RestructuredCatalog, TensorRecipe, TensorView
from ..rules import stack_of
from .sentencepiece import MAX_PIECES
from .settings import ROPE_TENSORS, ModelConfig, config_of, form_of, has_rotations, rotation_factors, settings_of
from .tokenizer import GENERATION, KEPT, TOKENS, TokenizerFiles, skeleton, tokenizer_keys
from .tokenizer_files import kept_json, tokenizer_files

# safeload's keys for the way back.
_CONFIG = "config"
_EXPERTS, _NAME_PREFIX = f"{KEPT}experts", f"{KEPT}prefix"
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

SINGLE, FUSED = "single", "fused"

# Suffixes of buffers that llama.cpp computes itself.
_BUFFERS = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
# What every family leaves out, with the reason.
_LEFT_OUT = {
    f"*.{name}": "scales of the KV cache"
    for name in ("k_scale", "v_scale", "kv_scale", "k_cache_scale", "v_cache_scale", "kv_cache_scaling_factor")
}
# Reasons that no warning tells, because nothing is lost.
_BUFFER, _TIED = "a buffer that llama.cpp computes", "tied to the embedding"
_UNSAID = (_BUFFER, _TIED)
# Parts of names in models of text and images or sound, which llama.cpp's converter drops from the language model too.
_LANGUAGE = "language_model."
_TOWERS = (
    *("mlp", "vit.", "vpm.", "siglip2.", "conformer.", "merger.", "resampler.", "sound_encoder.", "sound_projection."),
    "speech_embeddings.",
)
_TOWER_PARTS = (
    *("visual.", "vision.", "audio.", "talker.", "vision_", "audio_", "token2wav.", "code2wav.", "projector."),
    *("pre_mm_projector_norm", "image_newline", "view_seperator", "patch_embed", "patch_merger.", "patch_merge_mlp."),
    "model.connector.",
)
# Keys of their configs, which older versions of transformers have beside the keys of the language model.
_TOWER_CONFIGS = ("vision_config", "audio_config")
_MOST_SHOWN = 3


def form_between(model: Catalog, file: Catalog) -> tuple[Catalog, ModelConfig, GgufForm]:
    """Return a model with a config, of its own or that of a file of llama.cpp, and the family of both."""
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
    config = ModelConfig({**(model.config or {}), **_counted(model, form)}, model.title, form)
    return model, config, form


def to_llama_cpp(catalog: Catalog, *, blocks: bool = False) -> Catalog:
    """Return the tensors and metadata as llama.cpp needs them, or the catalog itself if its config names no class.

    With ``blocks``, packed codes stay in the block types of ggml that hold them unchanged.
    """
    name, form = gguf_form(catalog.config)
    if name is None or catalog.format == "gguf":
        return catalog
    if form is None:
        text = f"architecture {show(name)} cannot be converted for llama.cpp; `safeload families` lists what can"
        raise UnsupportedError(f"{catalog.title}: {text}; raw=True writes the tensors as they are")
    catalog.refuse_codes(catalog, "convert for llama.cpp")
    config = ModelConfig({**(catalog.config or {}), **_counted(catalog, form)}, catalog.title, form)
    settings, factors = settings_of(config, form)
    recipes, experts, left_out, unknown = laid_out(catalog, config, form)
    for reason, names in left_out.items():
        if reason not in _UNSAID:
            warning("%s: left out (%s): %s", catalog.title, reason, _some_of(names))
    _refuse(unknown, catalog.title, f"llama.cpp's {form.architecture}")
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
    home = catalog.folder  # with the files beside the weights
    if home is None:
        file = catalog.weight_files[0]
        home = Location(file.files, file.files.split(file.place)[0])
    files = TokenizerFiles(home)
    tokens = tokenizer_keys(files, config, form, rows)
    recipes, extra = _in_blocks(catalog, recipes, form.architecture) if blocks else (recipes, {})
    pooling = _pooling(files) if form.pooling else None
    shapes = {name: recipe.shape for name, recipe in recipes.items()}
    metadata = {
        ARCHITECTURE: form.architecture,
        "general.type": "model",
        **_general_keys(files, shapes, config, form),
        **settings,
        **({} if pooling is None else {f"{form.architecture}.{_POOLING}": gguf.U32(pooling)}),
        mixtures.FILE_TYPE: gguf.U32(0),  # replaced once types are decided
        mixtures.QUANTIZATION_VERSION: gguf.U32(mixtures.CURRENT_VERSION),
        **extra,
        **tokens,
        f"{KEPT}{_CONFIG}": json.dumps(catalog.config, ensure_ascii=False),
        **({} if experts is None else {_EXPERTS: experts}),
        **({_NAME_PREFIX: ""} if form.prefix and form.embedding in catalog else {}),
        **{f"{KEPT}{name}": text for name, text in skeleton(files).items()},
    }
    return RestructuredCatalog(
        catalog, recipes, metadata=metadata, format="gguf", kept_f32=filter(is_kept_f32, recipes)
    )


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
        result |= {name: recipe._replace(blocks=kind), **beside}
        if kind == _SCALED:
            source = recipe.moves[0].source
            packed = catalog.packed(source)
            precise += [name] if packed is not None and algorithm_of(packed, source) == "W4A16_NVFP4" else []
    if ignored:
        text = "%s: dequantized, because llama.cpp's %s ignores the factors of NVFP4: %s"
        warning(text, catalog.title, architecture, _some_of(ignored))
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
    files: TokenizerFiles, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, form: GgufForm
) -> dict[str, Any]:
    """Return the general keys of a model, with its name for people as llama.cpp's converter writes it."""
    name = files.folder.shown.replace("\\", "/").rstrip("/").rpartition("/")[2]
    named = config.values.get("_name_or_path")
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
    tokens = files.generation.get("suppress_tokens") if form.suppress_tokens else None
    if tokens:
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < MAX_PIECES for token in tokens):
            raise files.fault(GENERATION, f"suppress_tokens must be a list of ids, got {show(tokens)}")
        keys["tokenizer.ggml.suppress_tokens"] = np.array(tokens, np.int32)
    if name.strip(". "):
        words = name[:_LONGEST].strip().replace("-", " ").split()
        titled = (word.title() if word.islower() and not _VERSION_LIKE.fullmatch(word) else word for word in words)
        keys["general.name"] = " ".join(titled)
    return {**keys, "general.size_label": _size_label(shapes)}


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
    content = read_if_there((files.folder / name).path, name, files.folder.files) or {}
    for number, (kind, key) in enumerate(_POOLINGS, 1):
        if content.get(key) is True or content.get("pooling_mode") == kind:
            return number
    expected = ", ".join(kind for kind, _ in _POOLINGS)
    raise UnsupportedError(f"{files.folder.shown}: {name}: llama.cpp has no such pooling, expected one of {expected}")


# ---- the way back ----


def from_llama_cpp(catalog: Catalog) -> Catalog:
    """Return the tensors, the config and the tokenizer's files of a model."""
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
        inner = language_of(config)
        if inner is not config:  # a model of text and images, whose language model is in the file
            text_form = _text_form(catalog, form, name, inner.get("model_type"), "ForCausalLM")
            kinds = {"architectures": [text_form.class_name], "model_type": text_form.model_type}
            config = {
                key: value
                for key, value in inner.items()
                if not isinstance(value, Mapping) or "rope" in key or key == "per_layer_config"
            }
            config |= kinds
        elif _has_towers(config):
            _text_form(catalog, form, name, None, "ForCausalLM")
    else:
        form, experts = form_of(catalog), SINGLE
        text_form = _text_form(catalog, form, architecture, form.text_type)
        config, notes = config_of(catalog, form)
        config |= {"architectures": [text_form.class_name], "model_type": text_form.model_type}
    settings = ModelConfig(config, catalog.title, form)
    if kept is not None and not has_rotations(catalog, rotation_factors(settings, form)):
        text = f"the factors of rotations are not those of {KEPT}{_CONFIG}; raw=True keeps the tensors"
        raise FormatError(text, catalog.title)
    recipes = published_recipes(catalog, settings, form, experts)
    shapes = {tensor: tuple(catalog.about(tensor).shape) for tensor in catalog}
    tokens = metadata.get(TOKENS)
    rows = len(tokens) if isinstance(tokens, list) else next(iter(shapes.get("token_embd.weight", ())), 0)
    check_tensors(shapes, metadata, rows, catalog.title, form)
    _refuse_missing(catalog, recipes, settings, form)
    result = RestructuredCatalog(catalog, recipes, metadata={}, config=config)
    result.texts, more = tokenizer_files(catalog, form.class_name)
    notes += more
    if f"{architecture}.{_POOLING}" in metadata:
        notes.append(f"{_MODULES}, the pooling of embeddings")
    if notes:
        warning("%s: not recovered: %s", catalog.title, "; ".join(notes))
    return result


def _refuse_missing(catalog: Catalog, recipes: Mapping[str, TensorRecipe], config: ModelConfig, form: GgufForm) -> None:
    """Refuse a file without tensors that transformers would fill with random numbers, though llama.cpp needs none."""
    expected = (name for name in config.expected(form.published, recipes) if name not in recipes)
    parts = {
        name: form.parts_of(name) for name in expected if name != form.head or _NAME_PREFIX not in catalog.metadata
    }
    missing = [name for name, places in parts.items() if places and not any(place in catalog for place in places)]
    if missing:
        text = f"tensors are missing: the config needs {_some_of(missing)}"
        raise FormatError(text, catalog.title, tensor=missing[0])


def _has_towers(config: Mapping[str, Any]) -> bool:
    """Return True for a model of text and images or sound."""
    return language_of(config) is not config or any(key in config for key in _TOWER_CONFIGS)


def _text_form(catalog: Catalog, form: GgufForm, name: str | None, model_type: Any, end: str = "") -> GgufForm:
    """Return the family of a language model without its towers: a class with a head and the given end."""
    form = gguf_form({"model_type": model_type})[1] or form
    if not form.class_name.endswith(end) or form.class_name.endswith("TextModel"):
        text = f"the file has the language model of {name}, which has no class of its own in transformers"
        raise UnsupportedError(f"{catalog.title}: {text}; raw=True writes the tensors as they are")
    return form


# ---- the layout of tensors, both ways, by the table of the model's family ----


class LaidOut(NamedTuple):
    """A model in the layout of llama.cpp."""

    recipes: dict[str, TensorRecipe]  # of a file, in the order of their first source
    experts: str | None  # how the model stores them
    left_out: dict[str, list[str]]  # stored names by the reason for which llama.cpp has no such tensor
    unknown: list[str]  # stored names that the family does not know


def laid_out(catalog: Catalog, config: ModelConfig, form: GgufForm) -> LaidOut:
    """Return the tensors of a model as llama.cpp stores them, and what becomes of the others."""
    stored_by_name, left_out = _language_names(catalog, config, form)
    outer = (catalog.config or {}).get("tie_word_embeddings")
    tied = outer if isinstance(outer, bool) else config.values.get("tie_word_embeddings", form.usually_tied)
    if form.tied and tied is not True and form.head in stored_by_name:
        raise config.unsupported("tie_word_embeddings is false, but llama.cpp has no separate head here")
    recipes: dict[str, TensorRecipe] = {}
    experts: dict[str, dict[int, TensorRecipe]] = {}  # by stack
    unknown, fused = [], set()
    for name, stored in stored_by_name.items():
        if name.endswith(_BUFFERS) or (name == form.head and form.tied):
            left_out.setdefault(_TIED if name == form.head else _BUFFER, []).append(stored)
            continue
        pattern, numbers = without_numbers(name)
        placed = False
        for place, layout in form.targets.get(pattern, ()):
            target = place.replace(PLACE, numbers[0]) if numbers else place
            if layout.when is not None and not config.integer(layout.when):
                continue
            if layout.stack and int(numbers[1]) < MAX_EXPERTS:
                recipe = TensorRecipe(tuple(catalog.about(stored).shape), (Move(stored),))
                experts.setdefault(target, {})[int(numbers[1])] = recipe
                recipes.setdefault(target, recipe)  # in its place until all experts are found
                placed = True
            elif not layout.stack and (whole := _recipe(catalog, config, layout, stored, target)) is not None:
                if target in recipes:
                    raise error_about(FormatError, f"is a second {target}", path=catalog.title, tensor=stored)
                recipes[target] = whole
                fused |= {target} if layout.part is not None else set()
                placed = True
        if not placed and form.published.role(name) != "buffer":
            unknown.append(stored)
        elif not placed:
            left_out.setdefault(_BUFFER, []).append(stored)
    if form.complete:
        optional = {source for entry in form.schema.entries if entry.optional for source in form.layouts[entry.name]}
        for name in config.expected(form.published, stored_by_name):
            if name != form.head and name not in stored_by_name and without_numbers(name)[0] in optional:
                raise error_about(FormatError, "is missing", path=catalog.title, tensor=name)
    # A model without a head has names without a prefix, even if its config has the class of a model with a head.
    headless = config.headless or (form.prefix != "" and form.embedding in catalog)
    if tied is not True and form.head not in stored_by_name and not form.tied and not headless:
        text = "is missing, and tie_word_embeddings is not true"
        raise error_about(FormatError, text, path=catalog.title, tensor=form.head)
    for target, members in experts.items():
        items = next(iter(form.layouts[without_numbers(target)[0]].values())).items
        count = config.size("expert_count") if items is None else config.integer(items)
        recipes[target] = stack_of(catalog, target, count, members)
    # The layers for multi-token prediction can have experts in another form.
    forms: dict[bool, str] = {}
    for target, kind in (*((each, SINGLE) for each in experts), *((each, FUSED) for each in sorted(fused))):
        if forms.setdefault(_is_added(target, config), kind) != kind:
            raise FormatError("some layers have fused experts and some do not", catalog.title)
    kinds = " ".join(dict.fromkeys(forms[key] for key in sorted(forms))) or None
    return LaidOut(recipes, kinds, left_out, unknown)


def _is_added(name: str, config: ModelConfig) -> bool:
    """Return True for a tensor of a layer beyond the number in the config."""
    return any(int(number) >= config.size("block_count") for number in without_numbers(name)[1][:1])


def _counted(catalog: Catalog, form: GgufForm) -> dict[str, int]:
    """Return the numbers of layers that follow from published names."""
    counts = dict.fromkeys(form.counted, 0)
    for name in stored_names(catalog, catalog.title) if counts else ():
        pattern, numbers = without_numbers(name.replace(_LANGUAGE, ""))
        for key, begin in form.counted.items():
            if pattern.startswith(begin):
                counts[key] = max(counts[key], int(numbers[0]) + 1)
    return counts


def _language_names(
    catalog: Catalog, config: ModelConfig, form: GgufForm
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the stored names of the language model's tensors by those in the family's table, and the others' fate."""
    multimodal = _has_towers(catalog.config or {})
    result: dict[str, str] = {}
    left_out: dict[str, list[str]] = {}  # by the reason for which they are left out
    reasons = {**form.left_out, **_LEFT_OUT}
    for name, stored in stored_names(catalog, catalog.title).items():
        bare = name.replace(_LANGUAGE, "")
        if multimodal and (bare.startswith(_TOWERS) or any(part in bare for part in _TOWER_PARTS)):
            left_out.setdefault("language model only", []).append(stored)
            continue
        for begin, (place, layer) in form.renames.items():
            match = re.match(re.escape(begin).replace(re.escape(PLACE), f"({NUMBER})"), bare)
            if match is not None:
                own = int(match[1]) if PLACE in begin else 0
                number = config.integer(layer) + own if PLACE in place else 0
                bare = place.replace(PLACE, str(number)) + bare[match.end() :]
                break
        reason = next((why for text, why in reasons.items() if fnmatchcase(bare, text)), None)
        if form.kept_layers is not None and (numbers := without_numbers(bare)[1]):
            layers = config.integer(form.kept_layers)
            reason = f"llama.cpp has {layers} layers" if int(numbers[0]) >= layers else reason
        if reason is not None:
            left_out.setdefault(reason, []).append(stored)
            continue
        published = form.published_name(bare)
        if published in result:
            text = f"tensors {show(result[published])} and {show(stored)} are both {show(published)}"
            raise FormatError(text, catalog.title, tensor=stored)
        result[published] = stored
    return result, left_out


def _recipe(catalog: Catalog, config: ModelConfig, layout: GgufLayout, name: str, target: str) -> TensorRecipe | None:
    """Return how a published tensor becomes a tensor, or the part of all experts; None if it does not fit."""
    shape = tuple(catalog.about(name).shape)
    if layout.inputs is not None and shape[-1:] == ((width := config.integer(layout.inputs)),):
        if shape[-2:-1] == (width,):
            raise error_about(FormatError, f"{list(shape)} does not show whether it is transposed", tensor=name)
        layout = layout._replace(transposed=False)
    if layout.of_experts(target):
        axes, (_, parts) = 2 if target.endswith(".bias") else 3, layout.part or (0, 1)
        if layout.part is None and (len(shape) != axes or shape[0] > MAX_EXPERTS):
            return None
        rows = shape[-1 if layout.transposed else -2] if len(shape) == axes else 1
        if rows % parts or shape[0] > MAX_EXPERTS:
            raise error_about(FormatError, f"{list(shape)} does not hold gate and up of experts", tensor=name)
        moves = tuple(Move(name, _part(layout, rows // parts, k), TensorView(k)) for k in range(shape[0]))
        columns = shape[1 : axes - 1] if layout.transposed else shape[2:axes]
        return TensorRecipe((shape[0], rows // parts, *columns), moves)
    _check_row(config, layout, shape, name)
    arrangement, inner = _arrangement(config, layout, shape, name)
    return TensorRecipe(inner, (Move(name, arrangement=arrangement),))


def _check_row(config: ModelConfig, layout: GgufLayout, shape: tuple[int, ...], name: str) -> None:
    """Refuse a tensor that must be a row, which files have with an axis more or less."""
    if layout.row and shape not in ((width := config.size("embedding_length"),), (1, width)):
        raise error_about(FormatError, f"must have the shape [1, {width}], got {list(shape)}", tensor=name)


def _arrangement(
    config: ModelConfig, layout: GgufLayout, shape: tuple[int, ...], name: str
) -> tuple[Arrangement | None, tuple[int, ...]]:
    """Return how llama.cpp arranges a published tensor, None if it keeps their order, and the shape of the result."""
    heads = config.size(*layout.heads) if layout.heads else 0
    if heads and (not shape or shape[0] % (2 * heads)):
        raise error_about(FormatError, f"{list(shape)} does not have {heads} heads", tensor=name)
    rows: list[Mapping[str, Any]] = [*layout.rows]
    if heads:
        rows.append({"split": (str(heads), "2", "-1"), "order": (0, 2, 1)})
    if len(shape) < (2 if layout.columns or layout.transposed else 1 if rows else 0):
        raise error_about(FormatError, f"has the shape {list(shape)}, expected more axes", tensor=name)
    row_places = config.places(rows, shape[0], name) if rows else None
    if row_places is not None and np.array_equal(row_places, np.arange(shape[0])):
        row_places = None  # all rows in their order
    column_places = config.places(layout.columns, shape[1], name) if layout.columns else None
    counts = [len(places) for places in (row_places, column_places) if places is not None]
    inner = (
        (*counts, *shape[len(counts) :]) if row_places is not None else (*shape[:1], *counts, *shape[1 + len(counts) :])
    )
    items = None
    if layout.items is not None:
        count = config.integer(layout.items)
        if not 0 < count <= MAX_EXPERTS or not inner or inner[0] % count:
            raise error_about(FormatError, f"{list(shape)} does not hold {count} matrices", tensor=name)
        items = inner = (count, inner[0] // count, *inner[1:])
    if layout.transposed:
        inner = (*inner[:-2], inner[-1], inner[-2])
    if layout.shape is not None:
        final = config.shape(layout.shape, math.prod(inner))
        if math.prod(final) != math.prod(inner):
            raise error_about(FormatError, f"{list(shape)} cannot be {list(final)}", tensor=name)
        inner = final
    factors = config.factors(layout.times, inner[0]) if layout.times and inner else ()
    arrangement = Arrangement(row_places, column_places, items, layout.transposed, factors, layout.function, layout.add)
    ordered = row_places is None and column_places is None and not (layout.transposed or arrangement.computes)
    return None if ordered else arrangement, inner


def published_recipes(catalog: Catalog, config: ModelConfig, form: GgufForm, experts: str) -> dict[str, TensorRecipe]:
    """Return the recipes of a model of transformers, in the order of the file."""
    names = [name for name in catalog if name not in ROPE_TENSORS]
    _refuse([name for name in names if not form.layouts.get(without_numbers(name)[0])], catalog.title, "transformers")
    recipes: dict[str, TensorRecipe] = {}
    for name in names:
        pattern, numbers = without_numbers(name)
        # Of the published tensors that llama.cpp joins, the last has fused experts.
        kind = experts.split()[-1 if " " in experts and _is_added(name, config) else 0]
        sources = [*form.layouts[pattern].items()]
        if len(sources) > 1:  # the config can exclude some
            sources = [source for source in sources if config.has(form.published, source[0], numbers)] or sources
        place, layout = sources[-1 if kind == FUSED else 0]
        full, shape = place.replace(PLACE, numbers[0], 1) if numbers else place, tuple(catalog.about(name).shape)
        axes = 1 if name.endswith(".scale") else 2 if name.endswith(".bias") else 3
        if "_exps." in name and (len(shape) != axes or not 0 < shape[0] <= MAX_EXPERTS):
            raise error_about(FormatError, f"{list(shape)} does not hold experts", path=catalog.title, tensor=name)
        if layout.stack and not (shape and shape[0] <= MAX_EXPERTS):
            raise error_about(FormatError, f"{list(shape)} does not hold a stack", path=catalog.title, tensor=name)
        _check_row(config, layout, shape, name)
        if numbers:
            full = _renamed(full, config, form)
        if layout.stack:
            for k in range(shape[0]):
                recipes[full.replace(PLACE, str(k))] = TensorRecipe(shape[1:], (Move(name, TensorView(k)),))
        elif layout.of_experts(name):
            parts = {other.replace(PLACE, numbers[0]): layout for other, layout in form.targets[place]}
            recipes[full] = _whole(catalog, parts, layout)
        elif layout.row and len(shape) == 1:
            recipes[full] = TensorRecipe((1, *shape), (Move(name, written=TensorView(0)),))
        elif full not in recipes:
            targets = (
                (other.replace(PLACE, numbers[0]) if numbers else other, part) for other, part in form.targets[place]
            )
            joined = [(target, part) for target, part in targets if target in catalog]
            recipes[full] = _joined(catalog, config, form, full, joined)
    prefix = form.prefix if _NAME_PREFIX in catalog.metadata else ""
    return {name.removeprefix(prefix): recipe for name, recipe in recipes.items()}


def _renamed(name: str, config: ModelConfig, form: GgufForm) -> str:
    """Return the published name of a tensor in a layer for which `llama_cpp_recipes` takes another name."""
    for begin, (place, layer) in form.renames.items():
        match = re.match(re.escape(place).replace(re.escape(PLACE), f"({NUMBER})"), name)
        if match is None or PLACE not in place or (first := config.integer(layer)) == 0:
            continue
        own = int(match[1]) - first
        if own == 0 or (own > 0 and PLACE in begin):
            return begin.replace(PLACE, str(own)) + name[match.end() :]
    return name


def _joined(
    catalog: Catalog, config: ModelConfig, form: GgufForm, name: str, parts: Sequence[tuple[str, GgufLayout]]
) -> TensorRecipe:
    """Return a published tensor from the tensors that llama.cpp makes of it."""
    shapes = [tuple(catalog.about(part).shape) for part, _ in parts]
    shape = shapes[0]
    if any(layout.rearranges for _, layout in parts):
        shape = config.shape_of(form.published, name)
    moves, values = [], 0
    for (part, layout), stored in zip(parts, shapes, strict=True):
        arrangement, expected = _arrangement(config, layout, shape, part)
        if expected != stored:
            text = f"has the shape {list(stored)}, but {show(name)} needs {list(expected)}"
            raise error_about(FormatError, text, path=catalog.title, tensor=part)
        values += math.prod(stored)
        inverse = None if arrangement is None else arrangement._replace(inverse=True, shift=-arrangement.shift)
        moves.append(Move(part, arrangement=inverse))
    if values != math.prod(shape):
        text = f"needs {math.prod(shape):,} values, but its parts have {values:,}"
        raise error_about(FormatError, text, path=catalog.title, tensor=name)
    return TensorRecipe(shape, tuple(moves))


def _whole(catalog: Catalog, parts: Mapping[str, GgufLayout], layout: GgufLayout) -> TensorRecipe:
    """Return the matrices of all experts as a single tensor: gate and up, or one of them."""
    shapes = {name: tuple(catalog.about(name).shape) if name in catalog else None for name in parts}
    first, shape = next(iter(shapes.items()))
    if shape is None:
        raise error_about(FormatError, "is missing", path=catalog.title, tensor=first)
    other = next((name for name in shapes if shapes[name] != shape), None)
    if other is not None:
        text = f"is missing or differs in shape from {show(first)}"
        raise error_about(FormatError, text, path=catalog.title, tensor=other)
    items = product(range(shape[0]), parts.items())
    moves = tuple(Move(name, TensorView(k), _part(part, shape[1], k)) for k, (name, part) in items)
    rows = shape[1] * len(parts)
    return TensorRecipe((shape[0], *shape[2:], rows) if layout.transposed else (shape[0], rows, *shape[2:]), moves)


def _part(layout: GgufLayout, rows: int, expert: int) -> TensorView:
    """Return which part of a published expert llama.cpp stores as a matrix of so many rows."""
    if layout.part is None:
        return TensorView(expert, transposed=layout.transposed)
    part, parts = layout.part
    chosen = slice(part, None, parts) if layout.interleaved else slice(part * rows, (part + 1) * rows)
    return TensorView(expert, chosen, layout.transposed)


def _refuse(unknown: Sequence[str], title: str, holder: str) -> None:
    if unknown:
        advice = "raw=True writes the tensors as they are"
        advice = advice if holder == "transformers" else f"drop= leaves tensors out, {advice}"
        text = f"{title}: {_some_of(unknown)}: {holder} has no such tensor; {advice}"
        raise UnsupportedError(text, tensor=unknown[0])


def _some_of(names: Sequence[str]) -> str:
    """Return the first names, and how many follow."""
    more = f" and {plural(len(names) - _MOST_SHOWN, 'more tensor')}" if names[_MOST_SHOWN:] else ""
    return f"{', '.join(map(show, names[:_MOST_SHOWN]))}{more}"


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[Any, Any], tokens: int, title: str, form: GgufForm
) -> None:
    """Compare the tensors of a file with those that llama.cpp expects."""
    try:
        expected = form.schema.expand(form.sizes(metadata, shapes, tokens), shapes.keys())
    except ValueError as error:
        raise FormatError(f"sizes of the model: {error}", title) from None
    missing = [name for name, tensor in expected.items() if tensor.required and name not in shapes]
    if missing:
        raise FormatError(f"tensors are missing: llama.cpp needs {_some_of(missing)}", title, tensor=missing[0])
    for name, shape in shapes.items():
        if name not in expected:
            raise UnsupportedError(f"{title}: llama.cpp's {form.architecture} has no tensor {show(name)}", tensor=name)
        sizes = expected[name].shape
        needed = shape if sizes is None else sizes
        if len(shape) != len(needed) or any(b not in (None, a) for a, b in zip(shape, needed, strict=True)):
            text = f"has the shape {list(shape)}, but the sizes of the model need {list(needed)}"
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
    """Return the architecture of a diffusion model that is not a GGUF file, and the prefix of its names, or None."""
    if catalog.format == "gguf":
        return None
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
        shape, count = tuple(about.shape), math.prod(about.shape)
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
    kept = [name for name, recipe in recipes.items() if recipe.dtype == "F32"]
    return RestructuredCatalog(catalog, recipes, metadata=metadata, format="gguf", kept_f32=kept)


def from_comfyui(catalog: Catalog, chosen: Iterable[str]) -> Catalog:
    """Return the tensors of a GGUF file of a diffusion model in their original shapes."""
    catalog.refuse_codes(catalog, "convert a diffusion model")
    metadata = catalog.metadata
    shapes = {name: tuple(catalog.about(name).shape) for name in catalog}
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
