"""``general.file_type``: the number by which tools show what most weights of a file are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

KEY = "general.file_type"

# Names of dtypes and block types, and their numbers in enum llama_ftype of
# https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h. K-quants have a number for each mixture: those here
# are the ones of a single type (S).
_NUMBERS = {
    "float32": 0, "float16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q5_k": 16,
    "q6_k": 18, "bfloat16": 32,
}  # fmt: skip


def updated(metadata: Mapping[Any, Any], tensors: Iterable[Any]) -> Mapping[Any, Any]:
    """The metadata of a file whose tensors have been converted: the number, if it has one, is theirs.

    Args:
        metadata: that of the source.
        tensors: what is written: arrays, `Lazy` and `LazyQuantized`.

    Returns:
        The metadata; without the number where the type of most weights has none.
    """
    if KEY not in metadata:
        return metadata
    elements: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            elements[getattr(tensor, "scheme", None) or tensor.dtype.name] += math.prod(tensor.shape)
    most = max(elements, key=elements.__getitem__, default=None)
    others = {key: value for key, value in metadata.items() if key != KEY}
    number = None if most is None else _NUMBERS.get(most)
    return others if number is None else {**others, KEY: np.uint32(number)}
