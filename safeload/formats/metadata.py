"""Conversion of metadata from one format to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def as_texts(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Metadata for safetensors: strings unchanged, other values as JSON; values that JSON cannot hold are left out."""
    import json  # only here: it takes a millisecond that every import would pay

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
