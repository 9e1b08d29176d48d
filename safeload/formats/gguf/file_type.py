"""``general.file_type``: a number for the type of most weights, which tools show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

KEY = "general.file_type"

# Numbers of dtypes and block types in enum llama_ftype of
# https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h. K-quants have a number for each mixture; these are
# the numbers of a single type (S).
_NUMBERS = {
    "float32": 0, "float16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q5_k": 16,
    "q6_k": 18, "bfloat16": 32,
}  # fmt: skip


def updated(metadata: Mapping[Any, Any], tensors: Iterable[Any]) -> Mapping[Any, Any]:
    """Return metadata with the number for converted tensors, or without it if the type of most weights has no number.

    Args:
        metadata: of the source; unchanged if it has no such number.
        tensors: arrays, `Lazy` and `LazyQuantized` to write.
    """
    if KEY not in metadata:
        return metadata
    elements: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            elements[getattr(tensor, "scheme", None) or tensor.dtype.name] += math.prod(tensor.shape)
    commonest = max(elements, key=elements.__getitem__, default=None)
    rest = {key: value for key, value in metadata.items() if key != KEY}
    number = None if commonest is None else _NUMBERS.get(commonest)
    return rest if number is None else {**rest, KEY: np.uint32(number)}
