"""GGUF files as the registry has them: opened, and written by `convert`. csrc/formats/gguf.c describes the format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...base import log
from ...base.file import PathLike
from ...base.text import clip, printable
from ..metadata import as_texts
from ..registry import Candidate, Content, Wanted
from . import read as reading

_ARCHITECTURE = "general.architecture"
# Names that modules of transformers have; those of llama.cpp begin with blk, token_embd, output.
_HUGGING_FACE_NAME = re.compile(r"^(model|transformer|lm_head|language_model)\.|\.(layers|h|layer)\.[0-9]", re.ASCII)


def read(candidate: Candidate, wanted: Wanted) -> Content:
    """An open file with its table; see `read.read_table`."""
    candidate.file.table = reading.read_table(candidate.file)
    return Content(candidate.file)


def write(
    tensors: Mapping[str, Any],
    metadata: Mapping[Any, Any] | None,
    path: PathLike,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Writes tensors of any origin, as `write.save` does, and warns where no engine will load them."""
    from . import write as writing  # only here: opening does not need it

    values = values_of(metadata or {})
    _warn(tensors, values, str(path))
    writing.save(tensors, path, values, overwrite=overwrite, durable=durable)


def values_of(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    """Metadata as GGUF holds it: what has no type there as JSON; what JSON lacks too is left out."""
    from . import write as writing

    values: dict[str, Any] = {}
    for key, value in metadata.items():
        if writing.can_hold(value):
            values[str(key)] = value
        else:
            values.update(as_texts({key: value}))
    return values


def _warn(tensors: Mapping[str, Any], values: Mapping[str, Any], path: str) -> None:
    """Says what an engine will miss in a GGUF file: conversion copies tensors, it makes no model of them."""
    missing = []
    if not isinstance(values.get(_ARCHITECTURE), str):
        missing.append(f"the metadata has no {_ARCHITECTURE}")
    foreign = next((name for name in tensors if _HUGGING_FACE_NAME.search(name)), None)
    if foreign is not None:
        missing.append(f"{clip(printable(foreign), 80)} is a name of Hugging Face, not of llama.cpp")
    if tensors and missing:
        log.warning(
            "%s: no engine will load this file: %s. llama.cpp's convert_hf_to_gguf.py makes a model that engines load",
            printable(path),
            "; ".join(missing),
        )
