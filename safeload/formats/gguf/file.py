"""The GGUF row of the registry: open files, and write files for `convert`. csrc/formats/gguf.c describes the format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...base import log
from ...base.paths import PathLike
from ...base.text import clip, printable
from ...models.diffusion import ARCHITECTURE, model_of
from ..metadata import as_texts
from ..registry import Candidate, Content, OpenRequest
from . import read as reading

# Tensor names of transformers; names of llama.cpp begin with blk, token_embd, output.
_HUGGING_FACE_NAME = re.compile(r"^(model|transformer|lm_head|language_model)\.|\.(layers|h|layer)\.[0-9]", re.ASCII)


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of an open file; see `read.read_table`."""
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
    """Write tensors of any format with `write.save`, and warn if no engine will load the file."""
    from . import write as writing  # opening does not need it

    values = values_of(metadata or {})
    _warn(tensors, values, str(path))
    writing.save(tensors, path, values, overwrite=overwrite, durable=durable)


def values_of(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert metadata to GGUF: values without a GGUF type become JSON; values that JSON cannot hold are dropped."""
    from . import write as writing

    values: dict[str, Any] = {}
    for key, value in metadata.items():
        if writing.can_hold(value):
            values[str(key)] = value
        else:
            values.update(as_texts({key: value}))
    return values


def _warn(tensors: Mapping[str, Any], values: Mapping[str, Any], path: str) -> None:
    """Warn if the file lacks what an engine needs, because conversion copies tensors and does not build a model."""
    if model_of(values) is not None:
        return
    missing = []
    if not isinstance(values.get(ARCHITECTURE), str):
        missing.append(f"the metadata has no {ARCHITECTURE}")
    foreign = next((name for name in tensors if _HUGGING_FACE_NAME.search(name)), None)
    if foreign is not None:
        missing.append(f"{clip(printable(foreign), 80)} is a Hugging Face name, not a llama.cpp name")
    if tensors and missing:
        log.warning(
            "%s: no engine will load this file: %s. The folder of a supported model, with config.json and tokenizer, "
            "becomes a file that llama.cpp loads unless raw=True is passed",
            printable(path),
            "; ".join(missing),
        )
