"""Metadata of any format as safetensors stores it: text. Some formats have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..base.paths import PathLike


def as_texts(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Convert metadata to text: strings stay, other values become JSON. Values without a JSON form are dropped."""
    import json  # would add a millisecond to every import

    texts = {}
    for key, value in metadata.items():
        if isinstance(value, str):
            texts[str(key)] = value
            continue
        try:
            plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
            texts[str(key)] = json.dumps(plain, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            continue
    return texts


def without_metadata(save: Callable[..., None]) -> Callable[..., None]:
    """Return a format's ``write`` that drops metadata, because the format has none."""

    def write(
        tensors: Mapping[str, Any],
        metadata: Mapping[Any, Any] | None,
        path: PathLike,
        *,
        overwrite: bool = True,
        durable: bool = True,
    ) -> None:
        save(tensors, path, overwrite=overwrite, durable=durable)

    return write
