"""Convert the only weight file of a model, passed by its own path, as the model of its folder.

The Hub's models of one file are often passed as ``MODEL/model.safetensors``. An engine needs what lies beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...base import log
from ...base.preset import Preset
from ...errors import SafeloadError, VerificationError
from ...formats.folder import read_config
from ...models.choosing import choose
from ...models.family import engine_model_types, gguf_forms
from ...stores.files import Location
from ..architectures.to_llama_cpp import source_of
from ..sources.catalog import Catalog

if TYPE_CHECKING:
    from ...formats.verifying import Verify

_EMBEDDING = "embed_tokens.weight"


def model_of_file(
    catalog: Catalog,
    preset: Preset | None,  # None for llama.cpp
    *,
    storage_options: Mapping[str, Any] | None,
    verify: Verify,
) -> Catalog | None:
    """Return the open folder of a file, if the folder is a supported model in this file alone; else None."""
    if catalog.folder is not None or catalog.config is not None or len(catalog.weight_files) != 1:
        return None
    if catalog.format == "gguf":
        return None
    file = catalog.weight_files[0]
    parent = file.files.split(file.place)[0]
    try:
        config = read_config(parent, file.files)
        if config is None or not _is_supported(config, catalog, preset):
            return None
        place: Any = Location(file.files, parent) if file.files.remote else os.path.dirname(file.path) or os.curdir
        with ExitStack() as stack:
            folder = stack.enter_context(Catalog.of(place, storage_options, verify))
            if [other.place for other in folder.weight_files] != [file.place]:
                return None  # the folder's model is another one
            stack.pop_all()
    except VerificationError:
        raise
    except (SafeloadError, OSError) as error:
        log.debug("%s: not the model of its folder: %s", file.path, error)
        return None
    return folder


def _is_supported(config: dict[str, Any], catalog: Catalog, preset: Preset | None) -> bool:
    """Return True if an engine has the class in a config, and the tensors can be those of such a model."""
    if preset is not None:
        known = config.get("model_type") in engine_model_types()
        return known and choose(config, catalog.format, dict.fromkeys(catalog).keys()) is not None
    return source_of(config) in gguf_forms() and any(name.endswith(_EMBEDDING) for name in catalog)
