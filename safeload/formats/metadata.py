"""Metadata of one format as another one holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def as_texts(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Metadata as safetensors holds it: strings as they are, other values as JSON; what JSON lacks is left out."""
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
