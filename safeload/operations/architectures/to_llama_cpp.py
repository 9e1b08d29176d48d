"""Present a model of transformers as the file that llama.cpp loads: tensors, metadata and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...base.messages import error_about
from ...base.text import show
from ...errors import FormatError, UnsupportedError
from ...formats.gguf import mixtures, values
from ...models.diffusion import ARCHITECTURE
from ...models.family import gguf_forms
from ...models.gguf import is_kept_f32
from ...stores.files import Location
from ..sources.catalog import Catalog
from ..sources.recipes import TensorRecipe
from ..sources.restructured import RestructuredCatalog
from .general import general_keys
from .layouts import ToLlamaCpp, check_tensors
from .sentencepiece import MAX_PIECES
from .settings import ModelConfig, settings_of
from .special_tokens import SpecialTokens, skeleton
from .tokenizer import KEPT, TokenizerFiles, vocabulary_of

# safeload's keys for the way back.
CONFIG_KEY = f"{KEPT}config"
FORM_KEY = f"{KEPT}experts"


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
    return class_of(model_type) or f"model_type {show(model_type)}"


def class_of(model_type: object) -> str | None:
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
    settings = settings_of(config, form)
    recipes, experts = ToLlamaCpp(catalog, config, form).run()
    rows = _rows_of_embedding(recipes.get("token_embd.weight"), catalog.title)
    files = TokenizerFiles(home_of(catalog))
    vocabulary = vocabulary_of(files, rows)
    if not form.adds_space and files.model is not None:
        vocabulary = vocabulary._replace(add_space_prefix=False)
    shapes = {name: recipe.shape for name, recipe in recipes.items()}
    shapes.update((name, array.shape) for name, array in settings.tensors.items())
    metadata = {
        ARCHITECTURE: form.architecture,
        "general.type": "model",
        **general_keys(files.folder, shapes, config),
        **settings.metadata,
        mixtures.FILE_TYPE: values.U32(0),  # replaced once types are decided
        mixtures.QUANTIZATION_VERSION: values.U32(mixtures.CURRENT_VERSION),
        **dict(vocabulary.keys()),
        **dict(SpecialTokens(files, config, vocabulary).keys()),
        **_ends_of_turns(form.end_of_turn, vocabulary.texts),
        CONFIG_KEY: json.dumps(catalog.config, ensure_ascii=False),
        **({} if experts is None else {FORM_KEY: experts}),
        **{f"{KEPT}{name}": text for name, text in skeleton(files).items()},
    }
    check_tensors(shapes, settings.metadata, rows, catalog.title, form)
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


def _ends_of_turns(token: str | None, texts: list[str]) -> dict[str, Any]:
    """Return the token that ends a turn of a chat, for models whose tokenizer does not name it."""
    return {"tokenizer.ggml.eot_token_id": values.U32(texts.index(token))} if token in texts else {}
