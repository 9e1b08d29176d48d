"""Measure quantization error: the distance of dequantized values from the originals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple, overload

import numpy as np

from ..core.arrays import Array, as_array
from ..core.quantized_tensor import QuantizedTensor
from ..core.showing import Result, ResultTable, table
from ..core.text import printable, subject
from ..errors import exported, public
from .arranging import like
from .catalog import Catalog, Given, TensorDescription
from .rules import schema_of, tied_heads


class _ErrorFields(NamedTuple):
    max_error: float
    rms_error: float
    snr_db: float


@exported()
class QuantizationStats(Result, _ErrorFields):
    """The distance of dequantized values from the originals. ``str()`` is a line.

    Attributes:
        max_error: largest absolute difference.
        rms_error: root mean square of the differences.
        snr_db: 10 * log10(sum of squares of the original / sum of squares of the differences); infinite if all values
            are equal.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> x = np.float32([-1, -0.5, 0.3, 1])
        >>> error = safeload.quantization_error({"x": x}, {"x": safeload.quantize(x, "int8")})["x"]
        >>> error.max_error < 0.004
        True
    """

    __slots__ = ()

    _columns = _json = _ErrorFields._fields

    def cells(self) -> tuple[str, str, str]:
        """Return the numbers as text for tables.

        :meta private:
        """
        return f"{self.max_error:.4g}", f"{self.rms_error:.4g}", f"{self.snr_db:.2f}"

    def __str__(self) -> str:
        largest, rms, snr = self.cells()
        return f"max error {largest}, RMS error {rms}, SNR {snr} dB"


#: Titles of the columns of `QuantizationStats.cells`.
COLUMNS = ("max error", "RMS error", "SNR in dB")


@exported()
class QuantizationTable(ResultTable[QuantizationStats]):
    """The dict of `QuantizationStats` by name that `quantization_error` returns. ``str()`` is a table.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> x = np.float32([[0.25] * 32])
        >>> safeload.quantization_error({"w": x}, {"w": safeload.quantize(x, "q8_0")})
        tensor  max error  RMS error  SNR in dB
        w       ...
    """

    _columns = ("name", "dtype", "shape", "nbytes", *_ErrorFields._fields)

    def __init__(self, stats: Mapping[str, QuantizationStats], tensors: Iterable[TensorDescription]) -> None:
        super().__init__(stats)
        self._tensors = {about.name: about for about in tensors}

    def _values(self) -> Iterable[Any]:
        for name, stats in self.items():
            about = self._tensors[name]
            yield name, about.code, [*about.shape], about.nbytes, *stats

    def lines(self, columns: int | None = None, rows: int | None = None) -> list[str]:
        cells = [(printable(name), *stats.cells()) for name, stats in islice(self.items(), rows)]
        return table(("tensor", *COLUMNS), cells, right=frozenset((1, 2, 3)), columns=columns)


_BLOCK = 1 << 20  # elements compared at a time


@overload
def quantization_error(source: Array, quantized: QuantizedTensor) -> QuantizationStats: ...
@overload
def quantization_error(
    source: Given, quantized: Given, *, storage_options: Mapping[str, Any] | None = None
) -> QuantizationTable: ...
@public
def quantization_error(
    source: Given | Array, quantized: Given | QuantizedTensor, *, storage_options: Mapping[str, Any] | None = None
) -> QuantizationTable | QuantizationStats:
    """Return the quantization error of a tensor, or of each quantized tensor of a checkpoint.

    Args:
        source: the original values: an array, a dict of arrays, a `Checkpoint`, a path or a URL.
        quantized: the quantized values. If ``source`` is an array, a `QuantizedTensor`; otherwise a dict such as
            `load_quantized` returns, a `Checkpoint`, a path or a URL. A tied head is compared with the embedding.
        storage_options: for URLs: options of the filesystem behind the URL, see `open`.

    Returns:
        A `QuantizationStats` if ``source`` is an array, else a dict from the name of each quantized tensor to its
        error, which prints as a table and has the methods ``rows`` and ``to_dict`` of other results.

    Raises:
        TensorNotFoundError: the source lacks a quantized tensor.
        ValueError: shapes differ, or a single tensor is compared with a checkpoint.

    Example:
        >>> import safeload
        >>> weights = safeload.load_quantized("tiny-llama", "q8_0")
        >>> errors = safeload.quantization_error("tiny-llama", weights)
        >>> len(errors), errors["lm_head.weight"].snr_db > 40
        (22, True)
    """
    if isinstance(quantized, QuantizedTensor):
        if not isinstance(source, np.ndarray):
            raise ValueError(f"source must be an array if quantized is a QuantizedTensor, got {type(source).__name__}")
        return _error_of("", source, quantized)
    if isinstance(source, np.ndarray):
        raise ValueError(f"quantized must be a QuantizedTensor if source is an array, got {type(quantized).__name__}")
    with Catalog.of(source, storage_options) as originals, Catalog.of(quantized, storage_options) as codes:
        originals = like(originals, codes)
        tied = tied_heads(originals, schema_of(originals))
        names = {name: tied.get(name, name) for name in codes if codes.about(name).quantized}
        originals.check(names.values())
        originals.refuse_codes(names.values(), "quantization_error")
        errors = {name: _error_of(name, originals.array(origin), codes.value(name)) for name, origin in names.items()}
        return QuantizationTable(errors, map(codes.about, errors))


def _error_of(name: str, original: Any, quantized: Array | QuantizedTensor) -> QuantizationStats:
    assert isinstance(quantized, QuantizedTensor)
    original, shape = as_array(original, name), quantized.shape
    if original.shape != shape:
        text = f"the original has shape {list(original.shape)}, but the quantized tensor has shape {list(shape)}"
        raise ValueError(subject(name) + text)
    matrix = original if len(shape) > 1 else original.reshape(1, -1)
    # Packed tensors are dequantized whole, plain tensors in blocks of rows.
    whole = len(shape) < 2 or quantized.packing is not None
    values = quantized.dequantize(np.float32).reshape(matrix.shape) if whole else None
    largest, squares, signal = 0.0, 0.0, 0.0
    step = max(1, _BLOCK * len(matrix) // max(1, matrix.size))
    for begin in range(0, len(matrix), step):
        rows = slice(begin, begin + step)
        exact = matrix[rows].astype(np.float64)
        difference = exact - (quantized[rows].dequantize(np.float32) if values is None else values[rows])
        largest = max(largest, float(np.abs(difference).max(initial=0)))
        squares += float(np.square(difference).sum())
        signal += float(np.square(exact).sum())
    snr = math.inf if squares == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / squares)
    return QuantizationStats(largest, math.sqrt(squares / max(1, original.size)), snr)
