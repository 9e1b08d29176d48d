"""Present a file of llama.cpp as a model of transformers: names, rows, config and tokenizer."""

from __future__ import annotations

from typing import Any

from ...base import log
from ...base.text import show
from ...errors import FormatError, UnsupportedError
from ...models.diffusion import ARCHITECTURE
from ...models.family import gguf_architectures, gguf_forms
from ...packed.quantization import without_quantization
from ...stores.json_file import parse_json
from ..sources.catalog import Catalog
from ..sources.restructured import RestructuredCatalog
from .foreign_config import config_of, form_of
from .layouts import SINGLE, FromLlamaCpp, check_tensors
from .to_llama_cpp import CONFIG_KEY, FORM_KEY, class_of
from .tokenizer_files import tokenizer_files


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
        experts = str(metadata.get(FORM_KEY, SINGLE))
    else:
        form, experts = form_of(catalog), SINGLE
        config, notes = config_of(catalog, form)
    recipes = FromLlamaCpp(catalog, form, experts).run()
    shapes = {tensor: tuple(catalog.about(tensor).shape) for tensor in catalog}
    rows = next(iter(shapes.get("token_embd.weight", ())), 0)
    check_tensors(shapes, metadata, rows, catalog.title, form)
    result = RestructuredCatalog(catalog, recipes, constants={}, metadata={}, config=config)
    result.texts, more = tokenizer_files(catalog, form.class_name)
    notes += more
    if notes:
        log.warning("%s: not recovered: %s", catalog.title, "; ".join(notes))
    return result


def _own_config(catalog: Catalog, architecture: str) -> dict[str, Any] | None:
    """Return the config that `to_llama_cpp` has kept, or None in a foreign file."""
    text = catalog.metadata.get(CONFIG_KEY)
    if not isinstance(text, str):
        return None
    config = parse_json(text.encode("utf-8", "surrogateescape"), CONFIG_KEY, catalog.title)
    listed = config.get("architectures")
    name = listed[0] if isinstance(listed, list) and listed else class_of(config.get("model_type"))
    if not isinstance(name, str) or name not in gguf_forms() or gguf_forms()[name].architecture != architecture:
        raise FormatError(
            f"{CONFIG_KEY} names {show(name)}, but the file is of architecture {architecture}", catalog.title
        )
    return {**without_quantization(config), "architectures": [name]}
