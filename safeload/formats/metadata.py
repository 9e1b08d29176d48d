"""Names and metadata as files store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base.text import show
from ..errors import SafeloadError


def as_texts(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Convert metadata to text: strings stay, other values become JSON. Values that JSON cannot hold are dropped."""
    import json  # takes a millisecond that every import would pay

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


def encode(text: str, subject: str, errors: str = "strict", *, tensor: str | None = None) -> bytes:
    """Encode a text as UTF-8.

    Args:
        subject: begins the message of an error.
        errors: "surrogateescape" to write bytes that were not UTF-8 when they were read.
        tensor: its name, if the text belongs to a tensor.

    Raises:
        SafeloadError: the text holds a lone surrogate.
    """
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError:
        message = f"{subject} {show(text)} holds a lone surrogate, which UTF-8 cannot write"
        raise SafeloadError(message, tensor=tensor) from None
