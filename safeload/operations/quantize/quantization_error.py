"""Quantization error: how far dequantized values are from the original ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, overload

import numpy as np

from ...base.arrays import Array, as_array
from ...base.text import subject
from ...engine.codes.quantized_tensor import QuantizedTensor
from ..sources.catalog import Catalog, Given
from .checkpoint import ModelRules


class QuantizationError(NamedTuple):
    """How far dequantized values are from the original ones.

    Attributes:
        max_error: largest absolute difference.
        rms_error: root of the mean square of the differences.
        snr_db: 10 * log10(sum of squares of the original / sum of squares of the differences); infinite if there is no
            difference.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> x = np.float32([-1, -0.5, 0.3, 1])
        >>> error = safeload.quantization_error({"x": x}, {"x": safeload.quantize(x, "int8")})["x"]
        >>> error.max_error < 0.004
        True
    """

    max_error: float
    rms_error: float
    snr_db: float


# Number of elements that are compared at a time.
_COMPARED = 1 << 20


@overload
def quantization_error(source: Array, quantized: QuantizedTensor) -> QuantizationError: ...
@overload
def quantization_error(
    source: Given, quantized: Given, *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, QuantizationError]: ...
def quantization_error(
    source: Given | Array,
    quantized: Given | QuantizedTensor,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, QuantizationError] | QuantizationError:
    """The quantization error of one tensor, or of each quantized tensor of a checkpoint.

    Args:
        source: the original values: an array, a dict of arrays, a `Checkpoint`, a path or a URL.
        quantized: the quantized values: a `QuantizedTensor` for an array, else a dict (as `load_quantized` returns it),
            a `Checkpoint`, a path or a URL. A tied head is compared with the embedding.
        storage_options: for URLs: options of the filesystem that a URL leads to, see `open`.

    Returns:
        A `QuantizationError` for one tensor, else a dict of them by name for the quantized tensors.

    Raises:
        TensorNotFoundError: the source lacks a quantized tensor.
        ValueError: shapes differ, or only one of the two is a single tensor.

    Example:
        >>> import safeload
        >>> weights = safeload.load_quantized("tiny-llama", "q8_0")
        >>> errors = safeload.quantization_error("tiny-llama", weights)
        >>> len(errors), errors["lm_head.weight"].snr_db > 40
        (22, True)
    """
    if isinstance(quantized, QuantizedTensor):
        if not isinstance(source, np.ndarray):
            raise ValueError(f"a single QuantizedTensor is compared with an array, not with a {type(source).__name__}")
        return _error_of("", source, quantized)
    if isinstance(source, np.ndarray):
        raise ValueError(f"an array is compared with a QuantizedTensor, not with a {type(quantized).__name__}")
    with Catalog.of(source, storage_options) as originals, Catalog.of(quantized, storage_options) as made:
        tied = ModelRules.of(originals).tied_heads()
        names = {name: tied.get(name, name) for name in made if made.about(name).quantized}
        originals.check(names.values())
        originals.refuse_codes(names.values(), "quantization_error")
        return {name: _of_tensor(name, originals.array(origin), made.value(name)) for name, origin in names.items()}


def _of_tensor(name: str, original: Array, quantized: Array | QuantizedTensor) -> QuantizationError:
    assert isinstance(quantized, QuantizedTensor)
    return _error_of(name, original, quantized)


def _error_of(name: str, original: Any, quantized: QuantizedTensor) -> QuantizationError:
    original = as_array(original, name)
    if original.shape != quantized.shape:
        raise ValueError(
            f"{subject(name)}the original has shape {list(original.shape)}, the quantized one {list(quantized.shape)}"
        )
    largest, squares, signal = 0.0, 0.0, 0.0
    for exact, dequantized in _pieces(original, quantized):
        difference = exact - dequantized
        largest = max(largest, float(np.abs(difference).max(initial=0)))
        squares += float(np.square(difference).sum())
        signal += float(np.square(exact).sum())
    count = max(1, original.size)
    snr = math.inf if squares == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / squares)
    return QuantizationError(largest, math.sqrt(squares / count), snr)


def _pieces(original: Array, quantized: QuantizedTensor) -> Iterable[tuple[Array, Array]]:
    """Original and dequantized values in float64, some rows at a time."""
    if len(original.shape) < 2:
        yield np.float64(original), quantized.dequantize(np.float32).astype(np.float64)
        return
    values = None if quantized.packing is None else quantized.dequantize(np.float32)
    step = max(1, _COMPARED * original.shape[0] // max(1, original.size))
    for begin in range(0, original.shape[0], step):
        rows = slice(begin, begin + step)
        exact = original[rows].astype(np.float64)
        made = quantized._rows(rows).dequantize(np.float32) if values is None else values[rows]
        yield exact, made.astype(np.float64)
