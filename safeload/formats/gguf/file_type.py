"""``general.file_type``: a number for the type of most weights, which tools show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...models.diffusion import model_of
from .mixtures import FILE_TYPE, file_types

KEY = FILE_TYPE

# Numbers of dtypes in enum llama_ftype of https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h.
_NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 32}


def updated(metadata: Mapping[Any, Any], tensors: Iterable[Any]) -> Mapping[Any, Any]:
    """Return metadata with its file type number, if it has one, updated for the tensors to write."""
    if KEY not in metadata:
        return metadata
    elements: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            elements[getattr(tensor, "scheme", None) or tensor.dtype.name] += math.prod(tensor.shape)
    # The type of most weights decides. If it has no number, the metadata loses the key.
    commonest = max(elements, key=elements.__getitem__, default=None)
    # K-quants have a number for each mixture; the lowest is that of a single type (S).
    mixtures = [row.number for row in file_types().values() if row.base == commonest]
    number = min(mixtures) if mixtures else _NUMBERS.get(commonest or "")
    if number is not None and model_of(metadata) is not None:
        return {**metadata, KEY: np.uint32(number)}  # in its place
    rest = {key: value for key, value in metadata.items() if key != KEY}
    return rest if number is None else {**rest, KEY: np.uint32(number)}
