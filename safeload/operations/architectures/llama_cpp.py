"""Present a model of transformers as the file that llama.cpp loads, and such a file as a model of transformers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ...base import log
from ...base.text import error_about, show
from ...errors import FormatError, UnsupportedError
from ...formats.gguf import mixtures, values
from ...models.diffusion import ARCHITECTURE
from ...models.family import gguf_architectures, gguf_forms, is_kept_f32
from ...packed.quantization import without_quantization
from ...stores.files import Location
from ...stores.json_file import read_if_there
from ..sources.catalog import Catalog, RestructuredCatalog, TensorRecipe
from .layouts import SINGLE, check_tensors, llama_cpp_recipes, published_recipes
from .sentencepiece import MAX_PIECES
from .settings import ModelConfig, config_of, form_of, settings_of
from .special_tokens import SpecialTokens, skeleton
from .tokenizer import KEPT, TokenizerFiles, vocabulary_of
from .tokenizer_files import kept_json, tokenizer_files

# safeload's keys for the way back.
_CONFIG = "config"
_EXPERTS = f"{KEPT}experts"
_GENERATION = "generation_config.json"
_VERSION_LIKE = re.compile(r"v\d+(?:\.\d+)*|\d.*", re.ASCII)
# Longest name to write.
_LONGEST = 200

# Keys of `_GENERATION`, and the type of their value.
_SAMPLING: dict[str, tuple[tuple[str, ...], type[int] | type[float]]] = {
    "top_k": (("top_k",), values.I32),
    "top_p": (("top_p",), values.F32),
    "min_p": (("min_p",), values.F32),
    "temp": (("temperature",), values.F32),
    "penalty_repeat": (("penalty_repeat", "repetition_penalty"), values.F32),
}
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def source_of(config: Mapping[str, Any] | None) -> str | None:
    """Return the class that a config names, or None if it names none."""
    if config is None:
        return None
    listed = config.get("architectures")
    if isinstance(listed, list) and listed:
        return listed[0] if isinstance(listed[0], str) else str(listed[0])[:100]
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return None
    return _class_of(model_type) or f"model_type {show(model_type)}"


def _class_of(model_type: object) -> str | None:
    """Return the class of a ``model_type`` in llama.cpp, or None."""
    return next((name for name, form in gguf_forms().items() if form.model_type == model_type), None)


def to_llama_cpp(catalog: Catalog) -> Catalog:
    """Return the tensors and metadata as llama.cpp needs them, or the catalog itself if its config names no class."""
    name = source_of(catalog.config)
    if name is None or catalog.format == "gguf":
        return catalog
    form = gguf_forms().get(name)
    if form is None:
        raise UnsupportedError(
            f"{catalog.title}: architecture {show(name)} cannot be converted for llama.cpp, expected one of "
            f"{', '.join(gguf_forms())}; raw=True writes the tensors as they are"
        )
    catalog.refuse_codes(catalog, "convert for llama.cpp")
    config = ModelConfig(catalog.config or {}, catalog.title, form.keys)
    settings, factors = settings_of(config, form)
    recipes, experts = llama_cpp_recipes(catalog, config, form)
    embedding, rows = recipes.get("token_embd.weight"), 0
    if embedding is not None:
        if len(embedding.shape) != 2 or embedding.shape[0] > MAX_PIECES:
            text = f"has the shape {list(embedding.shape)}, expected 2 axes and at most {MAX_PIECES:,} rows"
            raise error_about(FormatError, text, path=catalog.title, tensor=next(iter(embedding.sources)))
        rows = embedding.shape[0]
    home = catalog.folder  # with the files beside the weights
    if home is None:
        file = catalog.weight_files[0]
        home = Location(file.files, file.files.split(file.place)[0])
    files = TokenizerFiles(home)
    vocabulary = vocabulary_of(files, rows)
    if not form.adds_space and files.model is not None:
        vocabulary.add_space_prefix = False
    shapes = {name: recipe.shape for name, recipe in recipes.items()}
    shapes.update((name, array.shape) for name, array in factors.items())
    ends = {}
    if form.end_of_turn in vocabulary.texts:  # the tokenizer does not name it
        ends["tokenizer.ggml.eot_token_id"] = values.U32(vocabulary.texts.index(form.end_of_turn))
    metadata = {
        ARCHITECTURE: form.architecture,
        "general.type": "model",
        **_general_keys(files.folder, shapes, config),
        **settings,
        mixtures.FILE_TYPE: values.U32(0),  # replaced once types are decided
        mixtures.QUANTIZATION_VERSION: values.U32(mixtures.CURRENT_VERSION),
        **dict(vocabulary.keys()),
        **dict(SpecialTokens(files, config, vocabulary).keys()),
        **ends,
        f"{KEPT}{_CONFIG}": json.dumps(catalog.config, ensure_ascii=False),
        **({} if experts is None else {_EXPERTS: experts}),
        **{f"{KEPT}{name}": text for name, text in skeleton(files).items()},
    }
    check_tensors(shapes, settings, rows, catalog.title, form)
    kept = [name for name in recipes if is_kept_f32(name)]
    recipes |= {name: TensorRecipe(array.shape, (), constant=array) for name, array in factors.items()}
    return RestructuredCatalog(catalog, recipes, metadata=metadata, format="gguf", kept_f32=kept)


# ---- name, size and settings of sampling ----


def _general_keys(folder: Location, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, Any]:
    """Return the general keys of a model, with its name for people as llama.cpp's converter writes it."""
    name = folder.shown.replace("\\", "/").rstrip("/").rpartition("/")[2]
    named = config.values.get("_name_or_path")
    if isinstance(named, str) and named and named.count("/") <= 1:
        name = named.rpartition("/")[2]
    content = read_if_there((folder / _GENERATION).path, _GENERATION, folder.files) or {}
    keys: dict[str, Any] = {}
    for key, (names, kind) in _SAMPLING.items():
        value = next((value for name in names if (value := content.get(name)) is not None), None)
        numbers = int if kind is values.I32 else (int, float)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers) or not abs(value) < 1 << 31:
            raise FormatError(f"{_GENERATION}: {names[-1]} must be a number, got {show(value)}", folder.shown)
        keys[f"general.sampling.{key}"] = kind(value)
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


# ---- the way back ----


def from_llama_cpp(catalog: Catalog) -> Catalog:
    """Return the tensors, the config and the tokenizer's files of a model."""
    metadata = catalog.metadata
    architecture = str(metadata[ARCHITECTURE])
    known = gguf_architectures()
    if architecture not in known:
        raise UnsupportedError(
            f"{catalog.title}: architecture {show(architecture)} cannot become a folder for transformers, expected "
            f"one of {', '.join(sorted(known))}; raw=True writes the tensors as they are"
        )
    catalog.refuse_codes(catalog, "convert to a model of transformers")
    notes: list[str] = []
    config = _own_config(catalog, architecture)
    if config is not None:
        form = gguf_forms()[config["architectures"][0]]
        experts = str(metadata.get(_EXPERTS, SINGLE))
    else:
        form, experts = form_of(catalog), SINGLE
        config, notes = config_of(catalog, form)
    recipes = published_recipes(catalog, form, experts)
    shapes = {tensor: tuple(catalog.about(tensor).shape) for tensor in catalog}
    rows = next(iter(shapes.get("token_embd.weight", ())), 0)
    check_tensors(shapes, metadata, rows, catalog.title, form)
    result = RestructuredCatalog(catalog, recipes, metadata={}, config=config)
    result.texts, more = tokenizer_files(catalog, form.class_name)
    notes += more
    if notes:
        log.warning("%s: not recovered: %s", catalog.title, "; ".join(notes))
    return result


def _own_config(catalog: Catalog, architecture: str) -> dict[str, Any] | None:
    """Return the config that `to_llama_cpp` has kept, or None in a foreign file."""
    config = kept_json(catalog, _CONFIG)
    if config is None:
        return None
    listed = config.get("architectures")
    name = listed[0] if isinstance(listed, list) and listed else _class_of(config.get("model_type"))
    if not isinstance(name, str) or name not in gguf_forms() or gguf_forms()[name].architecture != architecture:
        raise FormatError(
            f"{KEPT}{_CONFIG} names {show(name)}, but the file is of architecture {architecture}", catalog.title
        )
    return {**without_quantization(config), "architectures": [name]}
